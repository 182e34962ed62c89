"""Names, types and checks of conf/algo/toy.yaml."""

from dataclasses import dataclass
from typing import ClassVar

from common.config import Run, SamplingConfig, above, at_least


@dataclass(kw_only=True)
class ToyConfig:
    """Settings of the toy."""

    PROGRESS: ClassVar = {"reward": "reward {:.3f}", "metric": ""}
    RESUME_MAY_CHANGE: ClassVar = ("steps", "rollout_rows")

    name: str
    steps: int | None
    prompts_per_step: int
    rollout_rows: int | None
    sigma: float
    sampling: SamplingConfig

    def __post_init__(self) -> None:
        at_least("algo.prompts_per_step", self.prompts_per_step, 1)
        above("algo.sigma", self.sigma, 0)

    def check_run(self, run: Run) -> None:
        """Accept every run."""
