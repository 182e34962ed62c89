"""Names, types and checks of conf/algo/rft.yaml."""

import math
import re
from dataclasses import dataclass
from typing import Annotated, ClassVar

from common.config import (
    AlgorithmConfig,
    ConfigError,
    Count,
    Natural,
    Nonnegative,
    OptimizerConfig,
    Positive,
    Run,
    SamplingConfig,
    ScheduleConfig,
    Share,
    Tuned,
    name_folder,
    one_of,
    unused,
)

STAGES = ("generate", "select", "finetune", "evaluate")
# Environment variables of the first A100 scripts, and the setting that each is the default of.
ENVIRONMENT = {
    "MICRO_BATCH_SIZE": "rollout_rows",
    "CHUNK_SIZE": "chunk_size",
    "A100_BATCH_SIZE": "train_rows",
    "A100_GRAD_ACCUM": "batch_size",  # times A100_BATCH_SIZE
}


@dataclass(kw_only=True)
class SelectConfig:
    """The rule that selects completions as training data."""

    accept: float | None
    keep_per_prompt: Count
    min_distance: Share
    drop_all_right: bool
    buffer: Annotated[str, one_of("all", "last")]

    def __post_init__(self) -> None:
        if self.accept is not None and not math.isfinite(self.accept):
            raise ConfigError(
                f"algo.select.accept={self.accept} is not finite. Give the least reward of a right"
                " completion, or null for task.right_at."
            )

    def accepts(self, reward: float, finished: bool) -> bool:
        """Return whether a completion is right; one that was cut off never is. The tolerance covers
        the rounding of a weighted mean.
        """
        assert self.accept is not None
        return finished and self.accept - 1e-9 <= reward < math.inf


@dataclass(kw_only=True)
class RftConfig(AlgorithmConfig):
    """Settings of RFT; conf/algo/rft.yaml documents each of them."""

    RESUME_MAY_CHANGE: ClassVar = ("rollout_rows", "train_rows")
    COMPILES_TRAINING: ClassVar = True
    VALIDATION: ClassVar = "algo.validation_prompts"

    name: str
    stage: Annotated[str, one_of("all", *STAGES)]
    shard: str | None
    iterations: Count | None
    prompts: Count | None
    validation_prompts: Natural
    samples_per_prompt: Count
    second_round_samples: Natural
    hint_samples: Natural
    prompts_per_batch: Count
    chunk_size: Count
    rollout_rows: Count | None
    sampling: SamplingConfig
    select: SelectConfig
    start_from: Annotated[str, one_of("base", "last")]
    epochs: Count | None
    batch_size: Count
    train_rows: Count | None
    lr: Tuned
    lr_schedule: ScheduleConfig
    warmup_steps: Nonnegative
    optimizer: OptimizerConfig
    grad_clip: Positive
    patience: Count

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sampling.check_unlike("0.7")
        self.part()
        if self.shard is not None and self.stage != "generate":
            raise ConfigError(
                f"algo.shard={self.shard} has no effect with algo.stage={self.stage}. Use"
                " algo.stage=generate."
            )

    @property
    def step_samples(self) -> int:
        """Completions that are sampled before the budget is checked."""
        prompts = min(self.prompts_per_batch, self.prompts or self.prompts_per_batch)
        return prompts * min(self.chunk_size, self.samples_per_prompt)

    @property
    def chunk_samples(self) -> int:
        """Samples per prompt in the largest chunk of any round."""
        rounds = self.samples_per_prompt, self.second_round_samples, self.hint_samples
        return min(self.chunk_size, max(rounds))

    def part(self) -> tuple[int, int]:
        """Return the shard that this run makes, from 1, and the number of shards.

        Raises: ConfigError if `shard` is not like 2/8.
        """
        if self.shard is None:
            return 1, 1
        match = re.fullmatch(r"(\d+)/(\d+)", self.shard)
        if not match or not 1 <= int(match[1]) <= int(match[2]):
            raise ConfigError(
                f"algo.shard={self.shard!r} is no shard I/N with I from 1 to N, such as 2/8. Give"
                " one, or null."
            )
        return int(match[1]), int(match[2])

    def check_run(self, run: Run) -> None:
        """Raise ConfigError for settings outside `algo` that have no effect with RFT."""
        every = run.evaluate.every
        unused(
            (run.opt.offload.enabled, "opt=offload", "with algo=rft: there is no reference model"),
            (every, f"evaluate.every={every}", "with algo=rft, which evaluates each iteration"),
            (
                run.budget.given and self.stage != "all",
                "a budget",
                f"with algo.stage={self.stage}: it is one of a whole run",
            ),
        )
        if run.resume not in ("no", "auto"):
            raise ConfigError(
                f"resume={run.resume} has no effect with algo=rft, which goes on in its own folder:"
                f" {name_folder(run.resume)} resume=auto."
            )
