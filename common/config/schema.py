"""Names, types and checks of every setting. The values are in conf/*.yaml, each exactly once.

A field without a default must be set by a YAML file. This module imports no torch, so that `--help`
stays fast.
"""

import math
import re
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt

from common.config.checks import (
    HERE,
    Check,
    ConfigError,
    Count,
    Natural,
    Nonnegative,
    Part,
    Positive,
    Whole,
    choice,
    no_effect,
    one_of,
    shipped,
    show,
)
from common.config.plugins import list_files
from common.config.validate import check

# --- shared by every algorithm


@dataclass(kw_only=True)
class SamplingConfig:
    """Settings of sampling completions."""

    max_new_tokens: Natural  # tokens; 0 = from the answers, set when the model is loaded
    temperature: Nonnegative  # 0 = greedy
    top_p: Annotated[Positive, Le(1)]  # 1 = off
    top_k: Annotated[Whole, Ge(-1)]  # 0 = off; -1 too, as in other trainers
    min_p: Annotated[Nonnegative, Le(1)]  # share of the likeliest token's probability; 0 = off
    stop: list[str] = field(default_factory=list)  # texts that end a completion

    def __post_init__(self) -> None:
        self.top_k = max(0, self.top_k)
        if "" in self.stop:
            raise ConfigError(
                "algo.sampling.stop holds an empty text, which ends every completion. Leave it out."
            )
        if written := [text for text in self.stop if re.fullmatch(r"(\\[nrt])+", text)]:
            raise ConfigError(
                f"algo.sampling.stop holds {written[0]!r}, a backslash and a letter: a command line"
                " takes it so. For the end of a line write in bash"
                " $'algo.sampling.stop=[\"\\n\"]'."
            )
        if self.temperature == 0 and self.cuts:
            raise ConfigError(
                "algo.sampling.top_p, top_k and min_p have no effect at algo.sampling.temperature=0"
                " (greedy). Set a temperature above 0, or leave them out."
            )

    @classmethod
    def uncut(cls, max_new_tokens: int, temperature: float) -> "SamplingConfig":
        """Return the settings that draw from all tokens."""
        return cls(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
        )

    def check_unlike(self, usual: str) -> None:
        """Raise ConfigError if all samples of a prompt would be equal. Args: usual: a temperature
        to advise.
        """
        for key, value in {"temperature": 0, "top_k": 1, "min_p": 1}.items():
            if getattr(self, key) == value:
                raise ConfigError(
                    f"algo.sampling.{key}={value} makes all samples of a prompt equal. Draw them"
                    f" from several tokens, at algo.sampling.temperature={usual}."
                )

    @property
    def cuts(self) -> bool:
        """Whether unlikely tokens are never drawn."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(kw_only=True)
class ScheduleConfig:
    """A factor that multiplies a value over the run: 1 at the first step, `end` at the last."""

    kind: Annotated[str, one_of("constant", "linear", "cosine", "exponential")]
    end: Nonnegative  # factor at the last step; 1 for constant

    def __post_init__(self) -> None:
        if self.changes == (self.end == 1):
            raise ConfigError(
                f"{HERE}.kind={self.kind} has no effect with {HERE}.end={self.end:g}: it goes from"
                " 1 to another end. Set both, or leave both out."
            )
        if self.kind == "exponential":
            check(Positive, self.end, f"{HERE}.end")

    @property
    def changes(self) -> bool:
        """Whether the factor can differ from 1."""
        return self.kind != "constant"

    def factor(self, progress: float) -> float:
        """Return the factor at a progress between 0, the first step, and 1, the last step."""
        if self.kind == "linear":
            return 1 + (self.end - 1) * progress
        if self.kind == "cosine":
            return self.end + (1 - self.end) * 0.5 * (1 + math.cos(math.pi * progress))
        return self.end**progress if self.kind == "exponential" else 1.0


@dataclass(kw_only=True)
class OptimizerConfig:
    """Any optimizer of torch.optim, by class name."""

    name: str  # SGD | AdamW | Adam | RMSprop | ...
    kwargs: dict[str, Any]  # its further arguments, without lr

    def __post_init__(self) -> None:
        if "lr" in self.kwargs:
            lr = self.kwargs["lr"]
            raise ConfigError(f"algo.optimizer.kwargs.lr={lr} has no effect. Use algo.lr.")


EVALUATE_SAMPLING = ("greedy", "training")
# The keys that evaluate.sampling may have, with their types.
DRAWN: dict[str, Any] = {
    "temperature": Positive,
    "top_p": Annotated[Positive, Le(1)],
    "top_k": Annotated[Whole, Ge(-1)],
    "min_p": Annotated[Nonnegative, Le(1)],
}


@dataclass(kw_only=True)
class EvaluateConfig:
    """Settings of held-out evaluations."""

    every: Natural | None  # steps; 0 = only before and after; null = as conf/config.yaml says
    examples: Count  # the number of held-out examples
    validation_examples: Natural | None  # null = from the number of training examples
    stop_at: Positive | None  # the validation measure that ends a run
    # greedy | training (algo.sampling) | temperature, top_p, top_k and min_p
    sampling: Any
    repeats: Count  # sampled completions per example, whose measures are averaged
    samples: Count | None  # samples per example for pass@k; null = greedy completions only
    also: Any  # names of tasks; after `common.config.extra_tasks`, their settings by name
    text: str | None  # file whose bits per byte are measured

    def __post_init__(self) -> None:
        if isinstance(self.sampling, str):
            choice("evaluate.sampling", self.sampling, EVALUATE_SAMPLING)
        elif isinstance(self.sampling, dict) and self.sampling and not self._unknown:
            for key, value in self.sampling.items():
                check(DRAWN[key], value, f"evaluate.sampling.{key}")
        else:
            raise ConfigError(
                f"evaluate.sampling={show(self.sampling)}{self._unknown} is neither greedy nor"
                f" training, nor a mapping of {', '.join(DRAWN)}. For example"
                " 'evaluate.sampling={temperature: 0.6, top_p: 0.95}'."
            )
        if self.sampling == "greedy" and self.repeats > 1:
            raise ConfigError(
                f"evaluate.repeats={self.repeats} has no effect with evaluate.sampling=greedy,"
                " whose completions are equal. Set evaluate.sampling=training, or a temperature."
            )
        if self.repeats > 1 and self.samples not in (None, self.repeats):
            raise ConfigError(
                f"evaluate.samples={self.samples} does not go with evaluate.repeats={self.repeats}:"
                " pass@k comes from the repeated samples. Set evaluate.repeats alone."
            )

    @property
    def _unknown(self) -> str:
        """The keys of `sampling` that are no settings of it, in brackets; "" = none."""
        given = self.sampling if isinstance(self.sampling, dict) else {}
        others = [str(key) for key in given if key not in DRAWN]
        return f" (with {', '.join(others)})" if others else ""

    def drawn(self, training: SamplingConfig, tokens: int) -> SamplingConfig:
        """Return the settings with which measured completions are drawn.

        Args: training: algo.sampling; tokens: the most new tokens.
        """
        if self.sampling == "training":
            return replace(training, max_new_tokens=tokens)
        greedy = SamplingConfig.uncut(tokens, 0.0)
        if self.sampling == "greedy":
            return greedy
        return replace(greedy, **({"temperature": 1.0} | self.sampling))


@dataclass(kw_only=True)
class BudgetConfig:
    """Limits of training, without evaluation and pre-training; null = no limit."""

    tokens: Annotated[Whole, Gt(0)] | None  # generated, by all ranks
    seconds: Positive | None  # as result.json counts them

    @property
    def given(self) -> bool:
        """Whether there is a limit."""
        return self.tokens is not None or self.seconds is not None

    def limits(self) -> dict[str, str]:
        """Return the limits that are given, as text by key: {"tokens": "budget.tokens=200000"}."""
        limits = {name: limit for name, limit in vars(self).items() if limit is not None}
        return {name: f"budget.{name}={limit:.12g}" for name, limit in limits.items()}

    def nearest(self, tokens: float, seconds: float) -> tuple[float, str]:
        """Return the used share of the limit that is nearest to its end, and the text of that
        limit; 0 and "" without limits.
        """
        used = {"tokens": tokens, "seconds": seconds}
        shares = ((used[name] / getattr(self, name), text) for name, text in self.limits().items())
        return max(shares, default=(0.0, ""))


@dataclass(kw_only=True)
class CheckpointConfig:
    """Settings of checkpoints, from which a run can resume."""

    every: Natural  # steps; 0 = only at the end and on a signal
    keep: Count  # the number of checkpoints that are kept, the newest ones


@dataclass(kw_only=True)
class TinyConfig:
    """The small byte-level Llama that `model=tiny` builds and pre-trains on the task's stream of
    texts.
    """

    hidden_size: Count
    layers: Count
    heads: Count
    intermediate_size: Count
    context: Count  # tokens
    pretrain_steps: Natural | None  # null = from the rows
    pretrain_rows: Count  # sequences per step
    pretrain_lr: Positive
    pretrain_seed: Whole

    def __post_init__(self) -> None:
        if self.hidden_size % self.heads:
            raise ConfigError(
                f"model.tiny.hidden_size={self.hidden_size} is not a multiple of"
                f" model.tiny.heads={self.heads}."
            )


@dataclass(kw_only=True)
class AdapterConfig:
    """A low-rank adapter (arXiv:2106.09685), which is trained in place of the model's weights."""

    rank: Count | None = None  # null = no adapter: all weights are trained
    alpha: Annotated[Whole, Gt(0)] = 32  # the adapter's product is scaled by alpha / rank
    targets: str | list[str] = "all-linear"  # or ends of module names: q_proj,v_proj
    dropout: Part = 0.0  # dropout on the adapter's input, in supervised training
    path: str | None = None  # folder of an adapter to continue from, which has its own rank
    merge: bool = False  # also write RUN/model: the model with the adapter merged into it

    def __post_init__(self) -> None:
        if isinstance(self.targets, list):
            self.targets = ",".join(self.targets)
        sizes = ("rank", "alpha", "targets")
        if self.path is not None:
            idle = sizes
            why = "with model.adapter.path: the adapter there has its own. Leave it out"
        elif self.rank is None:
            idle = (*sizes, "dropout", "merge")
            why = "without model.adapter.rank. Set it, for example 16, or leave this out"
        else:
            return
        for item in fields(self):
            if item.name in idle and (value := getattr(self, item.name)) != item.default:
                raise ConfigError(f"model.adapter.{item.name}={value} has no effect {why}.")


@dataclass(kw_only=True)
class ModelConfig:
    """The causal language model. `path=null` builds the tiny one."""

    name: str
    path: str | None  # hub id or local folder
    revision: str | None  # git revision on the hub; pin it for a run worth repeating
    gguf_file: str | None  # file name inside `path`
    attention: Annotated[str, one_of("sdpa", "eager")]  # attn_implementation of transformers
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    # The format of the linear layers' weights, which are frozen under an adapter, or trained by an
    # algorithm that can; null = as they are.
    quantize: Annotated[str, one_of("int8", "nf4")] | None = None
    adapter: AdapterConfig | None = field(default_factory=AdapterConfig)  # null without a rank
    tiny: TinyConfig | None = None
    recipe: dict[str, Any] = field(default_factory=dict)  # tuned settings by algorithm

    def __post_init__(self) -> None:
        if self.adapter is not None and self.adapter.rank is None and self.adapter.path is None:
            self.adapter = None
        if self.quantize is not None and self.gguf_file is not None:
            raise ConfigError(
                f"model.quantize={self.quantize} does not go with model.gguf_file. Give the folder"
                " or hub id of the model that the file was made from: model=hf model.path=..."
            )
        if self.path is None and self.tiny is None:
            raise ConfigError(
                "model.path is not set. Give a hub id or a local folder, for example "
                f"model={self.name} model.path=HuggingFaceTB/SmolLM2-135M"
                f"{' model.gguf_file=NAME.gguf' if self.name == 'gguf' else ''}, or use model=tiny."
            )
        if self.path is not None and self.tiny is not None:
            raise ConfigError(
                f"model.path={self.path!r} has no effect with model=tiny, which is built here. Use"
                " model=hf."
            )
        if self.path is None and (self.gguf_file or self.revision):
            raise ConfigError(
                "model.revision and model.gguf_file have no effect with model=tiny. Use model=hf."
            )


@dataclass(kw_only=True)
class PeakConfig:
    """Dense peak rates in TFLOP/s; null if the device has no such unit."""

    bf16: Positive | None
    fp16: Positive | None
    tf32: Positive | None
    fp32: Positive | None


@dataclass(kw_only=True)
class HardwareConfig:
    """Facts about a device. They size batches and never change a result."""

    name: str
    device: Annotated[str, one_of("auto", "cpu", "cuda")]
    match: str | None  # what torch.cuda.get_device_name must contain
    memory_gb: Positive | None  # per device
    bandwidth_gbs: Positive | None  # memory bandwidth, GB/s
    allreduce_gbs: Positive | None  # bandwidth of an all-reduce, GB/s
    hop_us: Positive | None  # microseconds per step of an all-reduce, which has 2 (ranks - 1)
    peak_tflops: PeakConfig
    p2p: bool  # direct device-to-device copies work
    compile: bool  # torch.compile is supported well enough to be allowed
    scoring_workers: Count  # threads or processes that score rewards
    strict: bool  # true = a different device is an error


@dataclass(kw_only=True)
class AmpConfig:
    """Reduced precision in forward passes; masters stay float32."""

    enabled: bool = False
    dtype: Annotated[str, one_of("auto", "bfloat16", "float16")] = "auto"
    head: Annotated[str, one_of("auto", "float32")] = "auto"


@dataclass(kw_only=True)
class CompileConfig:
    """torch.compile of the model's forward."""

    enabled: bool = False
    training: bool = False  # also compile forward and backward passes of training
    mode: Annotated[str, one_of("default", "reduce-overhead", "max-autotune")] = "default"


@dataclass(kw_only=True)
class DdpConfig:
    """Data-parallel workers on this node."""

    enabled: bool = False
    ranks: Count | None = None  # null = one per device
    backend: Annotated[str, one_of("auto", "gloo", "nccl")] = "auto"
    arrival_seconds: Positive = 300  # ranks wait this long for each other at the start


@dataclass(kw_only=True)
class FsdpConfig(DdpConfig):
    """Workers on this node that shard weights, gradients and optimizer state."""

    ranks_per_group: Count | None = None  # ranks that share one copy of the weights; null = all
    cpu_offload: bool = False


@dataclass(kw_only=True)
class ProfileConfig:
    """A torch.profiler trace of a few steps."""

    enabled: bool = False
    steps: Count = 3


@dataclass(kw_only=True)
class SlurmConfig:
    """A batch script for one run: plugins/slurm/batch.py."""

    script: str | None
    nodes: Count
    gpus_per_node: Natural | None  # null = 1, or 0 with hardware=cpu
    ranks_per_node: Count | None  # null = one per GPU
    cpus_per_rank: Count
    time: str
    partition: str | None
    account: str | None
    warn_seconds: Annotated[Count, Le(65535)]  # Slurm takes no more
    options: dict[str, Any]
    srun_options: dict[str, Any]
    setup: list[str]

    def __post_init__(self) -> None:
        match = re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", self.time)
        if match is None:
            raise ConfigError(
                f"slurm.time={self.time} is no time. Give hours:minutes:seconds, such as 08:00:00,"
                " or days-hours:minutes:seconds."
            )
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        if self.warn_seconds >= 86400 * days + 3600 * hours + 60 * minutes + seconds:
            raise ConfigError(
                f"slurm.warn_seconds={self.warn_seconds} is all of slurm.time={self.time}. Give"
                " less, or more time."
            )


@dataclass(kw_only=True)
class SwitchConfig:
    """A switch without options."""

    enabled: bool = False


NOT_WITH_FSDP = {
    "ddp": "every rank has all weights with ddp, a share of them with fsdp. Use one of them",
    "compile": "gathering weights breaks the graph. Leave compile out, or use opt=ddp",
    "offload": "the weights are shared out already. Leave it out, or use opt.fsdp.cpu_offload=true",
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
    deterministic: SwitchConfig = field(default_factory=SwitchConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    def __post_init__(self) -> None:
        for switch in fields(self):
            value = getattr(self, switch.name)
            for option in () if value.enabled else fields(value):
                chosen, name = getattr(value, option.name), f"{switch.name}.{option.name}"
                if chosen != option.default:
                    raise ConfigError(
                        f"opt.{name}={show(chosen)} has no effect: {switch.name} is off. Add it:"
                        f" 'opt=[{switch.name},...]'."
                    )
        if self.fsdp.enabled and self.amp.head != "auto":
            raise ConfigError(
                f"opt.amp.head={self.amp.head} does not go with opt=fsdp, which gathers weights in"
                " half precision. Leave it out."
            )
        if self.tf32.enabled and self.amp.head == "float32":
            raise ConfigError(
                "opt.amp.head=float32 does not go with opt=tf32, which would round its product."
                " Leave one of them out."
            )
        for name, why in NOT_WITH_FSDP.items():
            if self.fsdp.enabled and getattr(self, name).enabled:
                raise ConfigError(f"opt=fsdp and opt={name} do not go together: {why}.")

    @property
    def workers(self) -> tuple[str, DdpConfig | FsdpConfig]:
        """The switch that sets the number of ranks: its name, and its settings."""
        return ("fsdp", self.fsdp) if self.fsdp.enabled else ("ddp", self.ddp)

    def enabled(self) -> list[str]:
        """Return the names of the switches that are on."""
        return [switch.name for switch in fields(self) if getattr(self, switch.name).enabled]


@dataclass(kw_only=True)
class TrackerConfig:
    """The services that metrics are sent to, in addition to metrics.jsonl."""

    name: str
    # The class of the tracker (common/report/tracker.py); None = as in tracker/NAME.yaml, if any.
    _target_: str | None = None
    project: str | None = None  # wandb and trackio
    entity: str | None = None  # wandb: user or team; null = the owner of the key
    # wandb; null = online if there is a key
    mode: Annotated[str, one_of("online", "offline")] | None = None
    group: str | None = None  # both: null = the folder of the sweep, if the run is a job of one
    job_type: str | None = None  # wandb: null = the algorithm
    artifacts: bool = False  # wandb: upload checkpoints and the trained model

    def __post_init__(self) -> None:
        files = [path.stem for path in list_files("tracker")]
        targets = {name: shipped(f"tracker/{name}.yaml").get("_target_") for name in files}
        if self._target_ is None or self._target_ in targets.values():
            choice("tracker.name", self.name, files)
            self._target_ = targets[self.name]
        used = {"jsonl": (), "tensorboard": (), "trackio": ("project", "group")}.get(self.name)
        for key, value in vars(self).items():
            known = used is None or key in ("name", "_target_", *used)
            if value and not known:
                raise ConfigError(
                    f"tracker.{key}={value!r} has no effect with tracker={self.name}. Use"
                    " tracker=wandb."
                )


@dataclass(kw_only=True)
class NotFiniteConfig:
    """The policy for NaN and infinity."""

    policy: Annotated[str, one_of("stop", "skip")]
    max_skips: Count | None  # steps

    def __post_init__(self) -> None:
        if (self.policy == "skip") != (self.max_skips is not None):
            raise ConfigError(
                f"not_finite.policy={self.policy} does not go with not_finite.max_skips="
                f"{'null' if self.max_skips is None else self.max_skips}. Give both policy=skip and"
                " the number of steps that may be left out, or neither."
            )


@dataclass(kw_only=True)
class ScoringConfig:
    """Settings of the threads or processes that compute rewards."""

    kind: Annotated[str, one_of("serial", "threads", "processes")]
    workers: Annotated[Whole, Ge(1), Le(1024)]
    timeout_seconds: Positive  # per batch; no effect if serial


@dataclass(kw_only=True)
class PromptsConfig:
    """The treatment of prompts."""

    too_long: Annotated[str, one_of("error", "skip")]


def _names_run(value: Any) -> None:
    if not isinstance(value, str):
        raise ValueError("names no run. Give auto, no or a run folder.")


@dataclass(kw_only=True)
class Run:
    """All settings of a run; `algo` is the algorithm's dataclass."""

    seed: Annotated[Natural, Lt(2**63)]
    resume: Annotated[str, Check(_names_run, means="no, auto or a run folder")]
    plan: bool
    probe: bool
    budget: BudgetConfig
    prompts: PromptsConfig
    evaluate: EvaluateConfig
    keep: Annotated[str, one_of("best", "last")]  # the model that is exported
    completions: Annotated[str, one_of("sample", "all")]
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
        if self.probe and not self.algo.PROBES:
            raise ConfigError(
                f"probe=true has no effect with algo={self.algo.name}, which has no noise on its"
                " weights. Leave it out."
            )
        if self.completions == "all" and not hasattr(self.algo, "sampling"):
            raise ConfigError(
                f"completions=all has no effect with algo={self.algo.name}, which samples none."
                " Leave it out."
            )
        self._check_validation()
        if self.probe and self.plan:
            raise ConfigError("plan=true and probe=true do not go together. Leave out one of them.")
        if self.scoring.kind == "serial":
            alone = (
                "with scoring.kind=serial: this process scores. Add scoring.kind=threads or"
                " processes, or leave it out."
            )
            no_effect("config.yaml", "scoring.timeout_seconds", self.scoring.timeout_seconds, alone)
            if self.scoring.workers != self.hardware.scoring_workers:
                raise ConfigError(f"scoring.workers={self.scoring.workers} has no effect {alone}")
        if self.opt.compile.training and not self.algo.COMPILES_TRAINING:
            raise ConfigError(
                f"opt.compile.training=true has no effect with algo={self.algo.name}, where"
                " opt=compile compiles all that it can. Leave it out."
            )
        trained = self.algo.WHOLE_NUMBERS
        if self.model.quantize not in (None, *trained) and self.model.adapter is None:
            also = f" Or use model.quantize={trained[0]}, which is moved itself." if trained else ""
            raise ConfigError(
                f"model.quantize={self.model.quantize} needs model.adapter.rank, for example 16:"
                " weights in few bits are frozen, and an adapter beside them is trained. Set it, or"
                f" leave model.quantize out.{also}"
            )
        if self.model.quantize is not None and self.opt.fsdp.enabled:
            raise ConfigError(
                f"model.quantize={self.model.quantize} does not go with opt=fsdp, which shares out"
                " weights of one kind. Use opt=ddp: every rank holds the few bits."
            )
        for key in ("steps", "iterations"):
            open_ended = not self.budget.given and not self.algo.in_epochs
            if getattr(self.algo, key, 0) is None and open_ended:
                raise ConfigError(
                    f"algo.{key} is null, so nothing ends the run. Give a number, or a budget."
                )

    def _check_validation(self) -> None:
        """Raise ConfigError for settings of validation that have no effect with the algorithm."""
        own, here = self.algo.VALIDATION, f"with algo={self.algo.name}"
        if self.algo.chooses:
            return
        given, stop_at = self.evaluate.validation_examples, self.evaluate.stop_at
        why = f"{here}. Use {own}." if own else f"{here}. Leave it out."
        no_effect("config.yaml", "evaluate.validation_examples", given, why)
        if not own:
            no_effect("config.yaml", "evaluate.stop_at", stop_at, f"{here}. Leave it out.")
            no_effect("config.yaml", "keep", self.keep, f"{here}. Leave it out.")
        elif stop_at is not None and not getattr(self.algo, own.removeprefix("algo.")):
            raise ConfigError(
                f"evaluate.stop_at={stop_at:g} needs a validation measure, and {own} is 0. Set it."
            )

    @property
    def scheduled(self) -> list[str]:
        """The names of the algorithm's schedules whose factor changes."""
        return [k for k, value in vars(self.algo).items() if getattr(value, "changes", False)]


# The parts of a run whose settings `build` checks; a task and an engine list theirs in their files.
OPEN_GROUPS = tuple(f.name for f in fields(Run) if f.name == "algo" or is_dataclass(f.type))
