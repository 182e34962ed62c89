"""Names, types and checks of conf/algo/eggroll.yaml."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Ge

from common.config import (
    ANSWERS,
    AUTO,
    ConfigError,
    Count,
    Nonnegative,
    OptimizerConfig,
    Positive,
    Rule,
    Run,
    SamplingConfig,
    ScheduleConfig,
    Share,
    SteppedConfig,
    Tuned,
    Whole,
    check,
    one_of,
    unused,
)

NoiseForm = Annotated[str, one_of("lowrank", "full", "frozen")]
LOOK_EVERY = 10  # every tenth step has the measures of the log that take time
FITNESS = ("zscore", "prompt_zscore", "component_zscore", "centered")
FITNESS += ("centered_rank", "pair_sign")
# What the fitness is computed from.
FITNESS_OF = ("rewards", "measure", "likelihood")
BY_PROMPT = ("prompt_zscore", "component_zscore")


@dataclass(kw_only=True)
class NoiseConfig:
    """The form of the noise per kind of parameter, and per pattern of names."""

    matrices: NoiseForm
    vectors: NoiseForm
    embeddings: NoiseForm
    head: NoiseForm
    patterns: dict[str, NoiseForm]

    def __post_init__(self) -> None:
        if self.vectors == "lowrank":
            raise ConfigError(
                "algo.noise.vectors=lowrank is not possible: a vector has no rank. Use full."
            )


@dataclass(kw_only=True)
class StopAtConfig:
    """Bounds of measures at which the run stops; null = off."""

    drift: Positive | None

    def crossed(self, drift: float) -> str | None:
        """Return the reason to stop, with advice, if `drift` is above its bound, otherwise None."""
        if self.drift is None or drift <= self.drift:
            return None
        return (
            f"drift {drift:.3g} is above algo.stop_at.drift={self.drift:g}. Lower algo.lr or raise"
            " algo.weight_decay."
        )


NO_WEIGHTS = "with algo.method=randopt, which moves no weights. Leave it out."


@dataclass(kw_only=True)
class EggrollConfig(SteppedConfig):
    """Settings of EGGROLL. conf/algo/eggroll.yaml explains each one next to its value."""

    PROGRESS: ClassVar = {
        "reward": "reward {:.3f}",
        "metric": "",
        "validation": "validation {:.1f}",
        "tokens_per_second": "{:,.0f} tokens/s",
        "drift": "drift {:.2f}",
    }
    RESUME_MAY_CHANGE: ClassVar = ("steps", "rollout_rows", "max_drift", "patience", "record")
    WHOLE_NUMBERS: ClassVar = ("int8",)
    PROBES: ClassVar = True
    RULES: ClassVar = (
        Rule(
            (
                *("fitness", "fitness_of", "noise_reuse", "weight_decay", "sample_quantile"),
                *("optimizer.name", "optimizer.kwargs", "stop_at.drift"),
                *("sigma_schedule.kind", "patience", "record"),
            ),
            only=lambda algo: algo.method != "randopt",
            why=NO_WEIGHTS,
        ),
        Rule(
            ("max_drift",),
            only=lambda algo: algo.method != "randopt" or algo.max_drift is None,
            why=NO_WEIGHTS,
        ),
        Rule(
            ("max_drift",),
            only=lambda algo: algo.plain_sgd or algo.max_drift is None,
            why="with algo.optimizer: it goes with plain SGD, whose steps are as long as their"
            " gradients. Leave it out, or use algo.stop_at.drift.",
        ),
        Rule(
            ("measure",),
            only=lambda algo: algo.fitness_of == "measure",
            why="with algo.fitness_of={algo.fitness_of}. Use algo.fitness_of=measure.",
        ),
        Rule(
            ("likelihood", "answers"),
            only=lambda algo: algo.fitness_of == "likelihood",
            why="with algo.fitness_of={algo.fitness_of}. Use algo.fitness_of=likelihood.",
        ),
        Rule(
            ("samples_per_prompt",),
            only=lambda algo: algo.fitness_of != "likelihood",
            why="with algo.fitness_of=likelihood, which samples nothing. Leave it out.",
        ),
        Rule(
            ("sample_quantile",),
            only=lambda algo: algo.fitness_of == "rewards",
            why="with algo.fitness_of={algo.fitness_of}, which is one number per member. Leave it"
            " out.",
        ),
        Rule(
            ("sample_quantile",),
            only=lambda algo: algo.samples_per_prompt > 1,
            why="with algo.samples_per_prompt=1. Take more samples, or leave it out.",
        ),
    )

    name: str
    method: Annotated[str, one_of("eggroll", "randopt")]
    members: Annotated[Whole, Ge(2)]
    samples_per_prompt: Count
    rollout_rows: Whole | None
    rank: Count
    sigma: Tuned
    lr: Tuned
    mirrored: bool
    noise_reuse: Count
    fitness: Annotated[str, one_of(*FITNESS)]
    fitness_of: Annotated[str, one_of(*FITNESS_OF)]
    measure: str | None
    likelihood: Annotated[str, one_of("token", "answer")]
    answers: Annotated[str, one_of(*ANSWERS)]
    sample_quantile: Share | None
    noise: NoiseConfig
    optimizer: OptimizerConfig
    lr_schedule: ScheduleConfig
    sigma_schedule: ScheduleConfig
    weight_decay: Nonnegative
    max_drift: Positive | None
    record: bool | None
    stop_at: StopAtConfig
    sampling: SamplingConfig

    def __post_init__(self) -> None:
        if self.rollout_rows is not None:
            rows: Any = Annotated[int, Ge(self.pair)]
            check(rows | None, self.rollout_rows, "algo.rollout_rows")
        if self.mirrored and self.members % 2:
            raise ConfigError(
                f"algo.members={self.members} is odd, and algo.mirrored=true needs pairs. "
                f"Use algo.members={self.members + 1}, or algo.mirrored=false."
            )
        if self.fitness == "pair_sign" and not self.mirrored:
            raise ConfigError(
                "algo.fitness=pair_sign compares pairs. Set algo.mirrored=true, or use zscore."
            )
        by_prompt = ("component_zscore",) if self.fitness_of == "likelihood" else BY_PROMPT
        if self.fitness_of != "rewards" and self.fitness in by_prompt:
            raise ConfigError(
                f"algo.fitness={self.fitness} needs rewards by prompt and by component, which"
                f" algo.fitness_of={self.fitness_of} has not. Use algo.fitness=zscore."
            )
        if self.fitness == "prompt_zscore" and self.rows_per_member == 1:
            raise ConfigError(
                "algo.fitness=prompt_zscore has no effect with algo.prompts_per_step=1: it is"
                " zscore. Give a step more prompts, or use algo.fitness=zscore."
            )
        super().__post_init__()
        if self.samples_per_prompt > 1 and self.sampling.temperature == 0:
            raise ConfigError(
                f"algo.samples_per_prompt={self.samples_per_prompt} has no effect at"
                " algo.sampling.temperature=0: they would be equal. Set a temperature above 0."
            )
        if self.samples_per_prompt > 1:
            self.sampling.check_unlike("1.0")

    def check_run(self, run: Run) -> None:
        """Raise ConfigError for settings outside `algo` that conflict with these, or have no effect
        with them.
        """
        adapter = run.model.adapter
        if adapter is not None and run.opt.fsdp.enabled and run.opt.amp.enabled:
            raise ConfigError(
                "algo=eggroll with model.adapter does not go with opt=[fsdp,amp]: the adapter is"
                " float32 and whole on every rank, the weights are gathered in half precision. Use"
                " 'opt=[ddp,amp]', which needs 2 bytes per weight, or leave out one of the two."
            )
        off = "with model.adapter, whose matrices alone are perturbed"
        kinds = {kind: getattr(self.noise, kind) for kind in ("vectors", "embeddings", "head")}
        unused(
            *(
                (adapter is not None and form != "frozen", f"algo.noise.{kind}={form}", off)
                for kind, form in kinds.items()
            )
        )
        dropout = adapter.dropout if adapter is not None else 0
        self._check_likelihood(run)
        unused(
            (
                dropout,
                f"model.adapter.dropout={dropout:g}",
                "with algo=eggroll: there is no backward pass",
            ),
            (
                run.opt.checkpointing.enabled,
                "opt=checkpointing",
                "with algo=eggroll: there is no backward pass to recompute for",
            ),
            (
                run.opt.offload.enabled and not run.opt.amp.enabled,
                "opt=offload",
                "with algo=eggroll in float32, whose forward uses the masters (add opt=amp)",
            ),
            (
                run.opt.amp.head != "auto",
                f"opt.amp.head={run.opt.amp.head}",
                "with algo=eggroll, which compares rewards and no log-probabilities",
            ),
        )

    def _check_likelihood(self, run: Run) -> None:
        """Raise ConfigError for settings that cannot work without samples."""
        if self.fitness_of != "likelihood":
            return
        if run.probe or AUTO in (self.sigma, self.lr):
            raise ConfigError(
                "algo.fitness_of=likelihood samples nothing, so that no probe can choose algo.sigma"
                " and algo.lr. Give numbers, for example algo.sigma=0.01 algo.lr=0.02."
            )
        unused(
            (
                run.budget.tokens is not None,
                "budget.tokens",
                "with algo.fitness_of=likelihood, which generates no tokens. Use budget.seconds",
            )
        )

    def find_idle(self, task: str = "") -> dict[str, str]:
        """Return the settings that have no effect, with the reason: algo.lr and its schedule if the
        method moves no weights. A model's recipe may set them, so that they are no error.
        """
        reason = "algo.method=randopt, which moves no weights"
        idle = {"algo.lr": reason, "algo.lr_schedule": reason}
        return idle if self.method == "randopt" else {}

    @property
    def chooses(self) -> bool:
        """Whether the best model on validation examples is exported; RandOpt moves no weights."""
        return self.method == "eggroll"

    @property
    def plain_sgd(self) -> bool:
        """Whether the optimizer's step is lr times the gradient."""
        return self.optimizer.name == "SGD" and not self.optimizer.kwargs

    @property
    def pair(self) -> int:
        """The number of members that must stay in one forward: 2 with mirrored noise, else 1."""
        return 2 if self.mirrored else 1

    @property
    def rows_per_member(self) -> int:
        """The number of completions of a member per step."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def step_samples(self) -> int:
        """The number of completions per step."""
        return self.members * self.rows_per_member
