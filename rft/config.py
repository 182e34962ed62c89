"""Names, types and checks of conf/algo/rft.yaml."""

import math
import re
from dataclasses import dataclass
from typing import ClassVar

from common.config import (
    ConfigError,
    LoraConfig,
    OptimizerConfig,
    Run,
    SamplingConfig,
    ScheduleConfig,
    above,
    at_least,
    choice,
    no_effect,
)

STAGES = ("generate", "select", "finetune", "evaluate")
# What the scripts of the first A100 set-up read, and the setting that each is the default of.
ENVIRONMENT = {
    "MICRO_BATCH_SIZE": "rollout_rows",
    "CHUNK_SIZE": "chunk_size",
    "A100_BATCH_SIZE": "train_rows",
    "A100_GRAD_ACCUM": "batch_size",  # times A100_BATCH_SIZE
}


@dataclass(kw_only=True)
class SelectConfig:
    """The rule by which completions become training data."""

    accept: float
    keep_per_prompt: int
    min_distance: float
    drop_all_right: bool
    buffer: str

    def __post_init__(self) -> None:
        at_least("algo.select.keep_per_prompt", self.keep_per_prompt, 1)
        above("algo.select.accept", self.accept, 0)
        at_least("algo.select.min_distance", self.min_distance, 0)
        for key in ("accept", "min_distance"):
            if getattr(self, key) > 1:
                raise ConfigError(
                    f"algo.select.{key}={getattr(self, key)} is out of range. Give a value up to 1."
                )
        choice("algo.select.buffer", self.buffer, ("all", "last"))

    def accepts(self, reward: float, finished: bool) -> bool:
        """Whether a completion is right; one that was cut off never is. The slack is that of a
        weighted mean's rounding.
        """
        return finished and self.accept - 1e-9 <= reward < math.inf


@dataclass(kw_only=True)
class RftConfig:
    """Settings of RFT; what each does stands beside its value in conf/algo/rft.yaml."""

    PROGRESS: ClassVar[dict[str, str]] = {}  # each stage has a line of its own
    RESUME_MAY_CHANGE: ClassVar = ("rollout_rows", "train_rows")
    RENAMED: ClassVar[dict[str, str | None]] = {
        "micro_batch_rows": "algo.rollout_rows",
        "batch_rows": "algo.batch_size (completions per optimizer step) and algo.train_rows",
        "accumulate": "algo.batch_size, the completions per optimizer step",
        "empty_cache_every": None,
    }

    name: str
    stage: str
    shard: str | None
    iterations: int | None
    prompts: int | None
    validation_prompts: int
    samples_per_prompt: int
    second_round_samples: int
    hint_samples: int
    prompts_per_batch: int
    chunk_size: int
    rollout_rows: int | None
    sampling: SamplingConfig
    select: SelectConfig
    start_from: str
    epochs: int
    batch_size: int
    train_rows: int | None
    packing: bool
    pack_tokens: int
    lr: float
    lr_schedule: ScheduleConfig
    warmup: float
    optimizer: OptimizerConfig
    grad_clip: float
    lora: LoraConfig
    pass_samples: int
    patience: int

    def __post_init__(self) -> None:
        choice("algo.stage", self.stage, ("all", *STAGES))
        counts = ("samples_per_prompt", "prompts_per_batch", "chunk_size", "epochs", "batch_size")
        optional = ("iterations", "prompts", "rollout_rows", "train_rows")
        for key in (*counts, *optional, "pack_tokens", "patience"):
            if getattr(self, key) is not None:
                at_least(f"algo.{key}", getattr(self, key), 1)
        also_none = ("second_round_samples", "hint_samples", "validation_prompts", "pass_samples")
        for key in (*also_none, "warmup"):
            at_least(f"algo.{key}", getattr(self, key), 0)
        for key in ("lr", "grad_clip"):
            above(f"algo.{key}", getattr(self, key), 0)
        if self.warmup >= 1:
            raise ConfigError(
                f"algo.warmup={self.warmup} is a share of the steps. Give a value below 1."
            )
        choice("algo.start_from", self.start_from, ("base", "last"))
        if self.sampling.temperature == 0:
            raise ConfigError(
                "algo.sampling.temperature=0 makes all samples of a prompt equal, so there is"
                " nothing to choose from. Use for example 0.7."
            )
        if not self.packing:
            off = "with algo.packing=false. Add algo.packing=true, or leave it out."
            no_effect("algo/rft.yaml", "pack_tokens", self.pack_tokens, off)
        if not self.lora.rank:
            off = (
                "with algo.lora.rank=0: all weights are trained. Set algo.lora.rank, for example"
                " 16, or leave it out."
            )
            no_effect("algo/rft.yaml", "lora.alpha", self.lora.alpha, off)
            no_effect("algo/rft.yaml", "lora.targets", self.lora.targets, off)
        self.part()
        if self.shard is not None and self.stage != "generate":
            raise ConfigError(
                f"algo.shard={self.shard} has no effect with algo.stage={self.stage}: only samples"
                " are made in shards. Use algo.stage=generate."
            )

    def part(self) -> tuple[int, int]:
        """Return which shard this run makes, from 1, and of how many.

        Raises: ConfigError where `shard` is not like 2/8.
        """
        if self.shard is None:
            return 1, 1
        match = re.fullmatch(r"(\d+)/(\d+)", self.shard)
        if not match or not 1 <= int(match[1]) <= int(match[2]):
            raise ConfigError(
                f"algo.shard={self.shard!r} is no shard. Give one of I/N with I from 1 to N, such"
                " as 2/8."
            )
        return int(match[1]), int(match[2])

    def check_run(self, run: Run) -> None:
        """Raise ConfigError for self outside `algo` that have no effect with these."""
        if run.model.attention != "sdpa":
            raise ConfigError(
                f"model.attention={run.model.attention} has no effect with algo=rft, which uses"
                " sdpa. Leave it out."
            )
        if run.opt.offload.enabled:
            raise ConfigError(
                "opt=offload has no effect with algo=rft: there is no reference model. Leave it"
                " out."
            )
        if run.evaluate.every:
            raise ConfigError(
                f"evaluate.every={run.evaluate.every} has no effect with algo=rft, which evaluates"
                " after each iteration. Leave it out."
            )
        if run.budget.given and self.stage != "all":
            raise ConfigError(
                f"a budget has no effect with algo.stage={self.stage}: it is one of a whole run."
                " Leave it out."
            )
        if run.resume not in ("no", "auto"):
            raise ConfigError(
                f"resume={run.resume} has no effect with algo=rft, which goes on in its own folder:"
                f" hydra.run.dir={run.resume} resume=auto."
            )
