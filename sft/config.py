"""Names, types and checks of conf/algo/sft.yaml."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from common.config import (
    ANSWERS,
    Count,
    Nonnegative,
    OptimizerConfig,
    Positive,
    Run,
    SamplingConfig,
    ScheduleConfig,
    SteppedConfig,
    Tuned,
    one_of,
    unused,
)


@dataclass(kw_only=True)
class SftConfig(SteppedConfig):
    """Settings of SFT; conf/algo/sft.yaml documents each of them."""

    PROGRESS: ClassVar = {
        "loss": "loss {:.4f}",
        "metric": "",
        "validation": "validation {:.1f}",
        "tokens_per_second": "{:,.0f} tokens/s",
    }
    RESUME_MAY_CHANGE: ClassVar = ("steps", "rollout_rows", "train_rows", "patience")
    COMPILES_TRAINING: ClassVar = True

    name: str
    answers: Annotated[str, one_of(*ANSWERS)]
    rollout_rows: Count | None
    sampling: SamplingConfig
    train_rows: Count | None
    lr: Tuned
    lr_schedule: ScheduleConfig
    warmup_steps: Nonnegative
    optimizer: OptimizerConfig
    grad_clip: Positive

    @property
    def chooses(self) -> bool:
        """Whether the best model on validation examples is exported."""
        return True

    def check_run(self, run: Run) -> None:
        """Raise ConfigError for settings outside `algo` that have no effect with SFT."""
        unused(
            (run.opt.offload.enabled, "opt=offload", "with algo=sft: there is no reference model"),
            (
                run.budget.tokens is not None,
                "budget.tokens",
                "with algo=sft, which generates no tokens; budget.seconds has an effect",
            ),
        )
