"""Names, types and checks of conf/algo/{classify,scaling,predict}.yaml."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge

from common.config import (
    AlgorithmConfig,
    ConfigError,
    Count,
    Natural,
    Nonnegative,
    OptimizerConfig,
    Part,
    Positive,
    Run,
    ScheduleConfig,
    Whole,
    one_of,
    unused,
)


@dataclass(kw_only=True)
class EncoderConfig:
    """The sizes of the transformer encoder."""

    size: Count
    heads: Count
    layers: Count
    feedforward: Count
    dropout: Part
    max_tokens: Count

    def __post_init__(self) -> None:
        if self.size % self.heads:
            raise ConfigError(
                f"algo.model.size={self.size} is not a multiple of algo.model.heads={self.heads}."
            )


@dataclass(kw_only=True)
class TokenizerConfig:
    """The tokenizer that is trained on the training rows."""

    kind: Annotated[str, one_of("bpe", "wordpiece")]
    vocabulary: Annotated[Whole, Ge(300)]
    lowercase: bool


@dataclass(kw_only=True)
class LoaderConfig:
    """The worker processes that make batches."""

    workers: Natural | None
    prefetch: Count | None
    bucket_batches: Count


@dataclass(kw_only=True)
class WrapperConfig:
    """DistributedDataParallel, used with more than one rank."""

    static_graph: bool
    gradient_as_bucket_view: bool
    bucket_cap_mb: Positive
    hook: Annotated[str, one_of("none", "fp16", "bf16")]


# Settings of training, which have no effect when steps are measured or predicted.
_OF_TRAINING = (
    "algo.epochs",
    "algo.patience",
    "resume",
    "checkpoint",
    "tracker",
    "not_finite",
)


@dataclass(kw_only=True)
class ClassifyConfig(AlgorithmConfig):
    """Settings of classify; conf/algo/classify.yaml documents each of them."""

    PROGRESS: ClassVar[dict[str, str]] = {
        "epoch": "epoch {:.2f}",
        "loss": "loss {:.3f}",
        "samples_per_second": "{:.0f} rows/s",
        "validation": "validation accuracy {[accuracy]:.2f}",
    }
    VALIDATION: ClassVar = "algo.validation_share"
    RESUME_MAY_CHANGE: ClassVar = ("train_rows", "ddp", "loader.workers", "loader.prefetch")
    TASKS: ClassVar[tuple[str, tuple[str, ...]]] = ("class", ("ddp_bench.tasks.",))
    BUILDS_TASK: ClassVar[tuple[str, ...]] = ("ddp_bench.tasks:made",)
    NO_EFFECT: ClassVar[dict[str, str]] = {
        "model": "the sizes are algo.model.*",
        "scoring": "there are no rewards",
        "evaluate": "it evaluates after each epoch",
        "budget": "it generates nothing, and algo.epochs ends it",
        "plan": "algo=predict says what a classifier takes",
        "engine": "it generates nothing",
        "prompts": "its texts are cut to algo.model.max_tokens",
    }

    name: str
    epochs: Count
    batch_size: Count
    train_rows: Count | None
    validation_share: Part
    patience: Count | None
    lr: Positive
    lr_schedule: ScheduleConfig
    warmup_steps: Nonnegative
    optimizer: OptimizerConfig
    grad_clip: Positive
    label_smoothing: Part
    model: EncoderConfig
    tokenizer: TokenizerConfig
    loader: LoaderConfig
    ddp: WrapperConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patience is not None and not self.validation_share:
            raise ConfigError(
                f"algo.patience={self.patience} has no effect with algo.validation_share=0. Set a"
                " share, for example 0.1, or algo.patience=null."
            )

    def find_idle(self, task: str = "") -> dict[str, str]:
        """Return algo.tokenizer, with the reason, for a task without texts."""
        reason = "task=trajectories, which has no texts"
        return {"algo.tokenizer": reason} if task == "ddp_bench.tasks.Trajectories" else {}

    def check_run(self, run: Run) -> None:
        """Raise ConfigError for a switch that has no effect with these settings."""
        why = f"with algo={run.algo.name}: there is no reference model"
        head = run.opt.amp.head
        unused(
            (run.opt.offload.enabled, "opt=offload", why),
            (head != "auto", f"opt.amp.head={head}", f"with algo={run.algo.name}: no tokens"),
        )


@dataclass(kw_only=True)
class ScalingConfig(ClassifyConfig):
    """Settings of scaling, which measures training steps of classify with several
    numbers of ranks.
    """

    VALIDATION: ClassVar = ""
    STARTS_RANKS: ClassVar[str | None] = "ddp_bench.scaling:scale"
    NO_EFFECT: ClassVar[dict[str, str]] = (
        ClassifyConfig.NO_EFFECT
        | {key: "it measures steps and keeps no model" for key in _OF_TRAINING}
        | {"budget": "algo.steps ends it", "plan": "it is a plan, or a measurement, itself"}
    )

    ranks: list[Whole]
    mode: Annotated[str, one_of("strong", "weak", "both")]
    steps: Count
    warmup_steps: Natural
    repeats: Count

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_ranks()

    def check_ranks(self) -> None:
        """Raise ConfigError unless the numbers of ranks start at 1 and increase."""
        if len(self.ranks) < 2 or self.ranks[0] != 1 or sorted(set(self.ranks)) != self.ranks:
            raise ConfigError(
                f"algo.ranks={self.ranks} must begin with 1 and go on in ascending order. Use for"
                " example algo.ranks=[1,2,4]."
            )

    @property
    def modes(self) -> tuple[str, ...]:
        """The kinds of scaling to measure: strong, weak, or both in this order."""
        return ("strong", "weak") if self.mode == "both" else (self.mode,)


@dataclass(kw_only=True)
class PredictConfig(ScalingConfig):
    """Settings of predict, which predicts the measurements of scaling."""

    STARTS_RANKS: ClassVar[str | None] = "ddp_bench.predict:predict"

    times: dict[int, Positive]

    def check_ranks(self) -> None:
        """Raise ConfigError unless the numbers of ranks start above 1 and increase, and each time
        belongs to one of them.
        """
        if not self.ranks or self.ranks[0] < 2 or sorted(set(self.ranks)) != self.ranks:
            raise ConfigError(
                f"algo.ranks={self.ranks} must be numbers from 2 on, in ascending order. Use for"
                " example algo.ranks=[2,4,8]."
            )
        for ranks in self.times:
            if ranks not in (1, *self.ranks):
                raise ConfigError(
                    f"algo.times has a time of {ranks} ranks, which algo.ranks={self.ranks} does"
                    f" not name. Add {ranks} to algo.ranks."
                )
        if self.times and 1 not in self.times:
            raise ConfigError(
                "algo.times has no time of one rank. Use for example 'algo.times={1: 5.2, 4: 2}'."
            )
        if self.times and self.mode == "weak":
            raise ConfigError("algo.times are of strong scaling. Use algo.mode=strong or both.")


def check_switches(run: Run, settings: ClassifyConfig, ranks: int) -> None:
    """Raise ConfigError for settings that have no effect together, or with this number of ranks."""
    hook = settings.ddp.hook
    unused(
        (
            hook != "none" and run.opt.fsdp.enabled,
            f"algo.ddp.hook={hook}",
            "with opt=fsdp, which replaces DistributedDataParallel",
        ),
        (
            hook != "none" and ranks == 1,
            f"algo.ddp.hook={hook}",
            "with one rank: nothing is sent",
        ),
    )
