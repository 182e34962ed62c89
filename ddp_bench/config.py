"""Names, types and checks of conf/algo/classify.yaml."""

from dataclasses import dataclass
from typing import ClassVar

from common.config import (
    ConfigError,
    OptimizerConfig,
    Run,
    ScheduleConfig,
    above,
    at_least,
    choice,
    no_effect,
)


@dataclass(kw_only=True)
class EncoderConfig:
    """Sizes of the transformer encoder."""

    size: int
    heads: int
    layers: int
    feedforward: int
    dropout: float
    max_tokens: int

    def __post_init__(self) -> None:
        for key in ("size", "heads", "layers", "feedforward", "max_tokens"):
            at_least(f"algo.model.{key}", getattr(self, key), 1)
        at_least("algo.model.dropout", self.dropout, 0)
        if self.dropout >= 1:
            raise ConfigError(
                f"algo.model.dropout={self.dropout} is out of range. Give a value below 1."
            )
        if self.size % self.heads:
            raise ConfigError(
                f"algo.model.size={self.size} is not a multiple of algo.model.heads={self.heads}."
            )


@dataclass(kw_only=True)
class TokenizerConfig:
    """The tokenizer that is trained on the training rows."""

    kind: str
    vocabulary: int
    lowercase: bool

    def __post_init__(self) -> None:
        choice("algo.tokenizer.kind", self.kind, ("bpe", "wordpiece"))
        at_least("algo.tokenizer.vocabulary", self.vocabulary, 300)


@dataclass(kw_only=True)
class LoaderConfig:
    """How batches are made."""

    workers: int | None
    prefetch: int | None
    bucket_batches: int

    def __post_init__(self) -> None:
        if self.workers is not None:
            at_least("algo.loader.workers", self.workers, 0)
        if self.prefetch is not None:
            at_least("algo.loader.prefetch", self.prefetch, 1)
        at_least("algo.loader.bucket_batches", self.bucket_batches, 1)


@dataclass(kw_only=True)
class WrapperConfig:
    """DistributedDataParallel, used with more than one rank."""

    static_graph: bool
    gradient_as_bucket_view: bool
    bucket_cap_mb: float
    hook: str
    powersgd_rank: int
    powersgd_start: int

    def __post_init__(self) -> None:
        above("algo.ddp.bucket_cap_mb", self.bucket_cap_mb, 0)
        choice("algo.ddp.hook", self.hook, ("none", "fp16", "bf16", "powersgd"))
        at_least("algo.ddp.powersgd_rank", self.powersgd_rank, 1)
        at_least("algo.ddp.powersgd_start", self.powersgd_start, 2)
        if self.hook != "powersgd":
            for key in ("powersgd_rank", "powersgd_start"):
                other = (
                    f"with algo.ddp.hook={self.hook}. Add algo.ddp.hook=powersgd, or leave it out."
                )
                no_effect("algo/classify.yaml", f"algo.ddp.{key}", getattr(self, key), other)


@dataclass(kw_only=True)
class ClassifyConfig:
    """Settings of classify; what each does stands beside its value in conf/algo/classify.yaml."""

    # How the progress line writes the numbers of a step.
    PROGRESS: ClassVar[dict[str, str]] = {
        "epoch": "epoch {:.2f}",
        "loss": "loss {:.3f}",
        "samples_per_second": "{:.0f} rows/s",
        "validation": "validation accuracy {[accuracy]:.2f}",
    }
    # Settings that a run that is resumed may change.
    RESUME_MAY_CHANGE: ClassVar = ("train_rows", "ddp", "loader.workers", "loader.prefetch")
    RENAMED: ClassVar[dict[str, str | None]] = {
        "batch_rows": "algo.batch_size",
        "micro_batch_rows": "algo.train_rows",
    }

    name: str
    epochs: int
    batch_size: int
    train_rows: int | None
    validation_share: float
    patience: int | None
    lr: float
    lr_schedule: ScheduleConfig
    warmup: float
    optimizer: OptimizerConfig
    grad_clip: float
    label_smoothing: float
    model: EncoderConfig
    tokenizer: TokenizerConfig
    loader: LoaderConfig
    ddp: WrapperConfig
    scaling: list[int] | None
    scaling_mode: str
    scaling_steps: int
    scaling_warmup: int
    scaling_repeats: int
    predict: list[int] | None
    predict_times: dict[int, float]

    def __post_init__(self) -> None:
        for key in ("epochs", "batch_size", "train_rows"):
            if getattr(self, key) is not None:
                at_least(f"algo.{key}", getattr(self, key), 1)
        for key in ("lr", "grad_clip"):
            above(f"algo.{key}", getattr(self, key), 0)
        for key in ("validation_share", "warmup", "label_smoothing"):
            at_least(f"algo.{key}", getattr(self, key), 0)
            if getattr(self, key) >= 1:
                raise ConfigError(
                    f"algo.{key}={getattr(self, key)} is a share. Give a value below 1."
                )
        if self.patience is not None:
            at_least("algo.patience", self.patience, 1)
            if not self.validation_share:
                raise ConfigError(
                    f"algo.patience={self.patience} has no effect with algo.validation_share=0:"
                    " there is nothing to tell by when to stop. Set a share, for example 0.1, or"
                    " algo.patience=null."
                )
        choice("algo.scaling_mode", self.scaling_mode, ("strong", "weak", "both"))
        for key, minimum in (("steps", 1), ("warmup", 0), ("repeats", 1)):
            at_least(f"algo.scaling_{key}", getattr(self, f"scaling_{key}"), minimum)
        if self.scaling is not None:
            ranks = self.scaling
            if len(ranks) < 2 or ranks[0] != 1 or sorted(set(ranks)) != ranks:
                raise ConfigError(
                    f"algo.scaling={ranks} must be numbers of ranks that begin with 1, what"
                    " speed-up is told against, and grow. Use for example algo.scaling=[1,2,4]."
                )
        if self.predict is not None:
            ranks = self.predict
            if not ranks or ranks[0] < 2 or sorted(set(ranks)) != ranks:
                raise ConfigError(
                    f"algo.predict={ranks} must be numbers of ranks from 2 on, and grow; one rank"
                    " is always told. Use for example algo.predict=[2,4,8]."
                )
            if self.scaling is not None:
                raise ConfigError(
                    f"algo.scaling={self.scaling} measures and algo.predict={ranks} predicts. Give"
                    " one of them, and the other in a run of its own; ddp_bench.report puts them"
                    " side by side."
                )
        self._check_times()

    def check_run(self, run: Run) -> None:
        """Raise ConfigError for a switch that has no effect with these settings."""
        if run.opt.offload.enabled:
            raise ConfigError(
                "opt=offload has no effect with algo=classify: there is no reference model. Leave it"
                " out."
            )

    def _check_times(self) -> None:
        if not self.predict_times:
            return
        if self.predict is None:
            raise ConfigError(
                "algo.predict_times has no effect without algo.predict. Add for example"
                " algo.predict=[4]."
            )
        for ranks, milliseconds in self.predict_times.items():
            above(f"algo.predict_times.{ranks}", milliseconds, 0)
            if ranks not in (1, *self.predict):
                raise ConfigError(
                    f"algo.predict_times names {ranks} ranks, and algo.predict={self.predict} does"
                    " not. Add it there."
                )
        if 1 not in self.predict_times:
            raise ConfigError(
                "algo.predict_times has no time of one rank, which the others are told against. Use"
                " for example 'algo.predict_times={1: 5.2, 4: 11.3}'."
            )
        if self.scaling_mode == "weak":
            raise ConfigError(
                "algo.predict_times are of strong scaling. Use algo.scaling_mode=strong or both."
            )


def check_switches(run: Run, settings: ClassifyConfig, ranks: int) -> None:
    """Raise ConfigError for settings that have no effect with these, or with this number of ranks."""
    if settings.ddp.hook != "none" and run.opt.fsdp.enabled:
        raise ConfigError(
            f"algo.ddp.hook={settings.ddp.hook} is of DistributedDataParallel, which opt=fsdp"
            " replaces. Use opt=[ddp] for it, or leave it out."
        )
    if settings.ddp.hook != "none" and ranks == 1:
        raise ConfigError(
            f"algo.ddp.hook={settings.ddp.hook} has no effect with one rank: nothing is sent. Add"
            " 'opt=[ddp]', or leave it out."
        )
