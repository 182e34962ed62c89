"""Names, types and checks of every setting; the values live in conf/*.yaml, each exactly once.

A field without a default must be set by a YAML file. `typed` is the one strict conversion from what
Hydra composed to the dataclasses; after it nothing sees OmegaConf. No torch in here, so that
`--help` stays fast.
"""

import math
import re
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from common.config.checks import ConfigError, above, at_least, choice, no_effect

T = TypeVar("T")


# --- shared by every algorithm


@dataclass(kw_only=True)
class SamplingConfig:
    """Settings of drawing completions."""

    max_new_tokens: int  # tokens
    temperature: float  # 0 = greedy
    top_p: float  # 1 = off
    top_k: int  # 0 = off

    def __post_init__(self) -> None:
        at_least("sampling.max_new_tokens", self.max_new_tokens, 1)
        at_least("sampling.temperature", self.temperature, 0)
        above("sampling.top_p", self.top_p, 0)
        if self.top_p > 1:
            raise ConfigError(
                f"sampling.top_p={self.top_p} is out of range. Give a value in (0, 1]; 1 switches"
                " it off."
            )
        at_least("sampling.top_k", self.top_k, 0)
        if self.temperature == 0 and (self.top_p < 1 or self.top_k > 0):
            raise ConfigError(
                "sampling.top_p and sampling.top_k have no effect at sampling.temperature=0"
                " (greedy). Set a temperature above 0, or leave top_p=1 and top_k=0."
            )


@dataclass(kw_only=True)
class ScheduleConfig:
    """A factor that multiplies a value over the run: 1 at the first step, `end` at the last."""

    kind: str  # constant | linear | cosine | exponential
    end: float  # factor at the last step; 1 for constant

    def __post_init__(self) -> None:
        choice("schedule.kind", self.kind, ("constant", "linear", "cosine", "exponential"))
        at_least("schedule.end", self.end, 0)
        if self.kind == "constant" and self.end != 1:
            raise ConfigError(
                f"schedule.end={self.end} has no effect with schedule.kind=constant. "
                "Choose kind=linear, cosine or exponential, or set end=1."
            )
        if self.kind != "constant" and self.end == 1:
            raise ConfigError(
                f"schedule.kind={self.kind} has no effect with schedule.end=1. Set end, for example"
                " 0.1, or kind=constant."
            )
        if self.kind == "exponential" and self.end == 0:
            raise ConfigError(
                "schedule.end=0 is out of range for schedule.kind=exponential. Give a value"
                " above 0."
            )

    @property
    def changes(self) -> bool:
        """Whether the factor is not always 1."""
        return self.kind != "constant"

    def factor(self, step: int, steps: int | None) -> float:
        """The factor at 0-based `step` of `steps`; None = a number that is not known, for a
        constant.
        """
        if steps is None:
            assert not self.changes, "Run checks it"
            return 1.0
        progress = step / max(1, steps - 1)
        if self.kind == "linear":
            return 1 + (self.end - 1) * progress
        if self.kind == "cosine":
            return self.end + (1 - self.end) * 0.5 * (1 + math.cos(math.pi * progress))
        if self.kind == "exponential":
            return self.end**progress
        return 1.0


@dataclass(kw_only=True)
class OptimizerConfig:
    """Any optimizer of torch.optim, by class name."""

    name: str  # SGD | AdamW | Adam | RMSprop | ...
    kwargs: dict[str, Any]  # passed to it, beside lr

    def __post_init__(self) -> None:
        if "lr" in self.kwargs:
            raise ConfigError(
                f"algo.optimizer.kwargs.lr={self.kwargs['lr']} has no effect. Use algo.lr."
            )


@dataclass(kw_only=True)
class EvaluateConfig:
    """The held-out measure."""

    every: int | None  # steps; 0 = only before and after; null = at each tenth of the budget
    examples: int  # how many held-out examples

    def __post_init__(self) -> None:
        if self.every is not None:
            at_least("evaluate.every", self.every, 0)
        at_least("evaluate.examples", self.examples, 1)


@dataclass(kw_only=True)
class BudgetConfig:
    """Limits of training: of sampling, rewards and updates, without evaluation and pre-training.
    null = no limit.
    """

    tokens: int | None  # generated, by all ranks
    seconds: float | None  # as result.json counts them

    def __post_init__(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) is not None:
                above(f"budget.{item.name}", getattr(self, item.name), 0)

    @property
    def given(self) -> bool:
        """Whether there is one."""
        return self.tokens is not None or self.seconds is not None

    def limits(self) -> dict[str, str]:
        """Return the limits that are given, as text by key: {"tokens": "budget.tokens=200000"}."""
        given = {item.name: getattr(self, item.name) for item in fields(self)}
        return {
            name: f"budget.{name}={limit:.12g}"
            for name, limit in given.items()
            if limit is not None
        }

    def nearest(self, tokens: int, seconds: float) -> tuple[float, str]:
        """The share that is used of the limit that is nearest to its end, and that limit; 0 where
        there is no budget.
        """
        used = {"tokens": tokens, "seconds": seconds}
        return max(
            ((used[name] / getattr(self, name), text) for name, text in self.limits().items()),
            default=(0.0, ""),
        )


@dataclass(kw_only=True)
class CheckpointConfig:
    """Settings of what a run keeps so that it can go on."""

    every: int  # steps; 0 = only at the end and on a signal
    keep: int  # newest checkpoints kept

    def __post_init__(self) -> None:
        at_least("checkpoint.every", self.every, 0)
        at_least("checkpoint.keep", self.keep, 1)


@dataclass(kw_only=True)
class TinyConfig:
    """The small byte-level Llama that `model=tiny` builds and pre-trains on the task's stream."""

    hidden_size: int
    layers: int
    heads: int
    intermediate_size: int
    context: int  # tokens
    pretrain_steps: int
    pretrain_rows: int  # sequences a step
    pretrain_lr: float
    pretrain_seed: int

    def __post_init__(self) -> None:
        for key in (
            "hidden_size",
            "layers",
            "heads",
            "intermediate_size",
            "context",
            "pretrain_rows",
        ):
            at_least(f"model.tiny.{key}", getattr(self, key), 1)
        at_least("model.tiny.pretrain_steps", self.pretrain_steps, 0)
        above("model.tiny.pretrain_lr", self.pretrain_lr, 0)
        if self.hidden_size % self.heads:
            raise ConfigError(
                f"model.tiny.hidden_size={self.hidden_size} is not a multiple of"
                f" model.tiny.heads={self.heads}."
            )


@dataclass(kw_only=True)
class ModelConfig:
    """The causal language model. `path=null` builds the tiny one."""

    name: str
    path: str | None  # hub id or local folder
    revision: str | None  # git revision on the hub; pin it for a run worth repeating
    gguf_file: str | None  # file name inside `path`
    lora: str | None  # folder of an adapter that is merged into it
    attention: str  # attn_implementation of transformers
    tiny: TinyConfig | None = None

    def __post_init__(self) -> None:
        choice("model.attention", self.attention, ("sdpa", "eager"))
        if (self.path is None) == (self.tiny is None):
            raise ConfigError(
                "model.path is not set. Give a hub id or a local folder, for example "
                f"model={self.name} model.path=HuggingFaceTB/SmolLM2-135M"
                f"{' model.gguf_file=NAME.gguf' if self.name == 'gguf' else ''}, or use model=tiny."
                if self.path is None
                else (
                    f"model.path={self.path!r} has no effect with model=tiny, which is built here."
                    " Use model=hf."
                )
            )
        if self.path is None and (self.gguf_file or self.revision):
            raise ConfigError(
                "model.revision and model.gguf_file have no effect with model=tiny. Use model=hf."
            )


@dataclass(kw_only=True)
class LoraConfig:
    """Low-rank adapters (arXiv:2106.09685); rank 0 = all weights are trained."""

    rank: int
    alpha: int
    targets: str

    def __post_init__(self) -> None:
        at_least("algo.lora.rank", self.rank, 0)
        above("algo.lora.alpha", self.alpha, 0)


@dataclass(kw_only=True)
class PeakConfig:
    """Dense peak rates in TFLOP/s; null where the device has no such unit."""

    bf16: float | None
    fp16: float | None
    tf32: float | None
    fp32: float | None

    def __post_init__(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) is not None:
                above(f"hardware.peak_tflops.{item.name}", getattr(self, item.name), 0)


@dataclass(kw_only=True)
class HardwareConfig:
    """Facts about a device. They size batches and never change a result."""

    RENAMED: ClassVar[dict[str, str | None]] = {
        "cuda_graphs": "engine.cuda_graphs",
        "power_w": None,
        "link_gbs": None,
        "compute_capability": None,
    }

    name: str
    device: str  # auto | cpu | cuda
    match: str | None  # what torch.cuda.get_device_name must contain
    memory_gb: float | None  # per device
    bandwidth_gbs: float | None  # memory bandwidth, GB/s
    allreduce_gbs: float | None  # bandwidth of an all-reduce, GB/s
    hop_us: float | None  # of each of the 2 (ranks - 1) steps of an all-reduce
    peak_tflops: PeakConfig
    p2p: bool  # direct device-to-device copies work
    compile: bool  # torch.compile is supported well enough to be allowed
    scoring_workers: int  # threads or processes that score rewards
    strict: bool  # true = a different device is an error

    def __post_init__(self) -> None:
        choice("hardware.device", self.device, ("auto", "cpu", "cuda"))
        at_least("hardware.scoring_workers", self.scoring_workers, 1)
        for key in ("memory_gb", "bandwidth_gbs", "allreduce_gbs", "hop_us"):
            if getattr(self, key) is not None:
                above(f"hardware.{key}", getattr(self, key), 0)


@dataclass(kw_only=True)
class AmpConfig:
    """Reduced precision in forward passes; masters stay float32."""

    enabled: bool = False
    dtype: str = "auto"  # auto | bfloat16 | float16

    def __post_init__(self) -> None:
        choice("opt.amp.dtype", self.dtype, ("auto", "bfloat16", "float16"))


@dataclass(kw_only=True)
class CompileConfig:
    """torch.compile of the model's forward."""

    enabled: bool = False
    mode: str = "default"

    def __post_init__(self) -> None:
        choice("opt.compile.mode", self.mode, ("default", "reduce-overhead", "max-autotune"))


@dataclass(kw_only=True)
class DdpConfig:
    """Data-parallel workers on this node."""

    enabled: bool = False
    ranks: int | None = None  # null = one for each device
    backend: str = "auto"  # auto | gloo | nccl
    arrival_seconds: float = 300  # ranks wait this long for each other at the start

    def __post_init__(self) -> None:
        choice("opt.ddp.backend", self.backend, ("auto", "gloo", "nccl"))
        above("opt.ddp.arrival_seconds", self.arrival_seconds, 0)
        if self.ranks is not None:
            at_least("opt.ddp.ranks", self.ranks, 1)


@dataclass(kw_only=True)
class FsdpConfig:
    """Workers on this node that share out weights, gradients and optimizer state."""

    enabled: bool = False
    ranks: int | None = None  # null = one for each device
    backend: str = "auto"  # auto | gloo | nccl
    ranks_per_group: int | None = None  # that share one copy of the weights; null = all
    rollout: str = "gathered"  # gathered | layerwise
    cpu_offload: bool = False
    arrival_seconds: float = 300  # ranks wait this long for each other at the start

    def __post_init__(self) -> None:
        choice("opt.fsdp.backend", self.backend, ("auto", "gloo", "nccl"))
        choice("opt.fsdp.rollout", self.rollout, ("gathered", "layerwise"))
        above("opt.fsdp.arrival_seconds", self.arrival_seconds, 0)
        for key in ("ranks", "ranks_per_group"):
            if getattr(self, key) is not None:
                at_least(f"opt.fsdp.{key}", getattr(self, key), 1)


@dataclass(kw_only=True)
class ProfileConfig:
    """A torch.profiler trace of a few steps."""

    enabled: bool = False
    steps: int = 3

    def __post_init__(self) -> None:
        at_least("opt.profile.steps", self.steps, 1)


@dataclass(kw_only=True)
class SlurmConfig:
    """A batch script for one run: common/distributed/slurm.py."""

    script: str | None
    nodes: int
    gpus_per_node: int | None  # null = 1, or 0 with hardware=cpu
    ranks_per_node: int | None  # null = one for each GPU
    cpus_per_rank: int
    time: str
    partition: str | None
    account: str | None
    warn_seconds: int
    options: dict[str, Any]
    setup: list[str]

    def __post_init__(self) -> None:
        for key in ("nodes", "cpus_per_rank", "warn_seconds"):
            at_least(f"slurm.{key}", getattr(self, key), 1)
        if self.gpus_per_node is not None:
            at_least("slurm.gpus_per_node", self.gpus_per_node, 0)
        if self.ranks_per_node is not None:
            at_least("slurm.ranks_per_node", self.ranks_per_node, 1)
        if not re.fullmatch(r"(\d+-)?\d+:[0-5]\d:[0-5]\d", self.time):
            raise ConfigError(
                f"slurm.time={self.time} is no time. Give hours:minutes:seconds, such as 08:00:00,"
                " or days-hours:minutes:seconds."
            )
        days, _, clock = self.time.rpartition("-")
        hours, minutes, seconds = map(int, clock.split(":"))
        if self.warn_seconds >= 86400 * int(days or 0) + 3600 * hours + 60 * minutes + seconds:
            raise ConfigError(
                f"slurm.warn_seconds={self.warn_seconds} is all of slurm.time={self.time}: the job"
                " would be warned as it starts. Give less, or more time."
            )
        if self.warn_seconds > 65535:
            raise ConfigError(
                f"slurm.warn_seconds={self.warn_seconds} is more than Slurm takes. Give 65535 at"
                " most."
            )


@dataclass(kw_only=True)
class SwitchConfig:
    """A switch without options."""

    enabled: bool = False


NOT_WITH_FSDP = {
    "ddp": "with ddp every rank has all weights, with fsdp a share of them. Use one of them",
    "compile": (
        "gathering weights between blocks breaks the graph. Leave compile out, or use opt=ddp"
    ),
    "offload": (
        "what it would move is shared out already. Leave it out; opt.fsdp.cpu_offload=true moves"
        " all weights"
    ),
}


@dataclass(kw_only=True)
class OptConfig:
    """The optimisation switches; each conf/opt file writes under its own key."""

    amp: AmpConfig = field(default_factory=AmpConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    ddp: DdpConfig = field(default_factory=DdpConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    tf32: SwitchConfig = field(default_factory=SwitchConfig)
    checkpointing: SwitchConfig = field(default_factory=SwitchConfig)
    offload: SwitchConfig = field(default_factory=SwitchConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    def __post_init__(self) -> None:
        for switch in fields(self):
            value = getattr(self, switch.name)
            default = switch.default_factory()  # type: ignore[misc]
            for option in fields(value):
                given = getattr(value, option.name)
                if (
                    not value.enabled
                    and option.name != "enabled"
                    and given != getattr(default, option.name)
                ):
                    raise ConfigError(
                        f"opt.{switch.name}.{option.name}={given} has no effect: {switch.name} is"
                        f" off. Add it: 'opt=[{switch.name},...]'."
                    )
        if not self.fsdp.enabled:
            return
        for name, why in NOT_WITH_FSDP.items():
            if getattr(self, name).enabled:
                raise ConfigError(f"opt=fsdp and opt={name} do not go together: {why}.")

    @property
    def workers(self) -> tuple[str, DdpConfig | FsdpConfig]:
        """The switch that says how many ranks there are: its name, and its settings."""
        return ("fsdp", self.fsdp) if self.fsdp.enabled else ("ddp", self.ddp)

    def enabled(self) -> list[str]:
        """Names of the switches that are on."""
        return [switch.name for switch in fields(self) if getattr(self, switch.name).enabled]


@dataclass(kw_only=True)
class TrackerConfig:
    """The places where metrics go beside metrics.jsonl."""

    name: str  # jsonl | wandb | tensorboard
    project: str | None = None
    entity: str | None = None  # wandb: user or team; null = the one of the key
    mode: str | None = None  # wandb: online | offline; null = online if a key is there
    group: str | None = None  # wandb: null = the folder of the sweep, if the run is a job of one
    job_type: str | None = None  # wandb: null = the algorithm
    artifacts: bool = False  # wandb: upload checkpoints and the trained model

    def __post_init__(self) -> None:
        choice("tracker.name", self.name, ("jsonl", "wandb", "tensorboard"))
        for key in ("project", "entity", "mode", "group", "job_type", "artifacts"):
            value = getattr(self, key)
            if value and self.name != "wandb":
                raise ConfigError(
                    f"tracker.{key}={value!r} has no effect with tracker={self.name}. Use"
                    " tracker=wandb."
                )
        if self.mode is not None:
            choice("tracker.mode", self.mode, ("online", "offline"))


@dataclass(kw_only=True)
class NotFiniteConfig:
    """The policy for NaN and infinity."""

    policy: str  # stop | skip
    max_skips: int | None  # steps

    def __post_init__(self) -> None:
        choice("not_finite.policy", self.policy, ("stop", "skip"))
        if self.max_skips is not None:
            at_least("not_finite.max_skips", self.max_skips, 1)
        if self.policy == "stop" and self.max_skips is not None:
            raise ConfigError(
                f"not_finite.max_skips={self.max_skips} has no effect with not_finite.policy=stop."
                " Add not_finite.policy=skip."
            )
        if self.policy == "skip" and self.max_skips is None:
            raise ConfigError(
                "not_finite.policy=skip needs a number of steps that may be left out:"
                " not_finite.max_skips=5."
            )


@dataclass(kw_only=True)
class ScoringConfig:
    """Who computes rewards."""

    kind: str  # serial | threads | processes
    workers: int
    timeout_seconds: float  # of a batch; no effect when serial

    def __post_init__(self) -> None:
        choice("scoring.kind", self.kind, ("serial", "threads", "processes"))
        at_least("scoring.workers", self.workers, 1)
        above("scoring.timeout_seconds", self.timeout_seconds, 0)


@dataclass(kw_only=True)
class PromptsConfig:
    """The treatment of prompts."""

    too_long: str  # error | skip

    def __post_init__(self) -> None:
        choice("prompts.too_long", self.too_long, ("error", "skip"))


@dataclass(kw_only=True)
class Run:
    """Everything that a run is made of. `algo` is the algorithm's own dataclass, `task` stays a
    plain dict.
    """

    seed: int
    resume: str  # no | auto | a run folder
    budget: BudgetConfig
    prompts: PromptsConfig
    evaluate: EvaluateConfig
    checkpoint: CheckpointConfig
    scoring: ScoringConfig
    not_finite: NotFiniteConfig
    hardware: HardwareConfig
    model: ModelConfig
    opt: OptConfig = field(default_factory=OptConfig)
    tracker: TrackerConfig
    slurm: SlurmConfig
    engine: dict[str, Any]
    algo: Any
    task: dict[str, Any]

    def __post_init__(self) -> None:
        at_least("seed", self.seed, 0)
        if self.seed >= 2**63:
            raise ConfigError(f"seed={self.seed} is too large. Give a value below 2**63.")
        if self.scoring.kind == "serial":
            alone = (
                "with scoring.kind=serial: this process scores. Add scoring.kind=threads or"
                " processes, or leave it out."
            )
            no_effect("config.yaml", "scoring.timeout_seconds", self.scoring.timeout_seconds, alone)
            if self.scoring.workers != self.hardware.scoring_workers:
                raise ConfigError(f"scoring.workers={self.scoring.workers} has no effect {alone}")
        for key in ("steps", "iterations"):
            if getattr(self.algo, key, 0) is None and not self.budget.given:
                raise ConfigError(
                    f"algo.{key} is null, so nothing ends the run. Give a number, or a budget."
                )
        if self.scheduled and getattr(self.algo, "steps", 0) is None:
            raise ConfigError(
                f"algo.{self.scheduled[0]} goes over algo.steps, which a budget leaves open. Give"
                " algo.steps too; the budget may end the run earlier."
            )

    @property
    def scheduled(self) -> list[str]:
        """Names of the algorithm's schedules that change something over its steps."""
        return [
            f.name
            for f in fields(self.algo)
            if getattr(getattr(self.algo, f.name), "changes", False)
        ]
