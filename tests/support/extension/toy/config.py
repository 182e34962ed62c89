"""Names, types and checks of conf/algo/toy.yaml."""

from dataclasses import dataclass
from typing import ClassVar

from common.config import AlgorithmConfig, Count, Positive, SamplingConfig


@dataclass(kw_only=True)
class ToyConfig(AlgorithmConfig):
    """Settings of the toy."""

    PROGRESS: ClassVar = {"reward": "reward {:.3f}", "metric": ""}
    RESUME_MAY_CHANGE: ClassVar = ("steps", "rollout_rows")

    name: str
    steps: Count | None
    prompts_per_step: Count
    rollout_rows: Count | None
    sigma: Positive
    sampling: SamplingConfig
