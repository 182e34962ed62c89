"""Names, types and checks of conf/algo/grpo.yaml."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Le, Lt

from common.config import (
    ConfigError,
    Count,
    Natural,
    Nonnegative,
    Number,
    OptimizerConfig,
    Positive,
    Rule,
    Run,
    SamplingConfig,
    ScheduleConfig,
    SteppedConfig,
    Tuned,
    Whole,
    check,
    one_of,
    unused,
)

LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo", "sapo", "dppo")
CLIPPED = ("grpo", "dr_grpo", "dapo", "bnpo", "gspo")  # losses that clip the ratio to a range
ADVANTAGES = (
    *("group", "batch", "none"),
    *("scalerl", "rloo", "maxrl", "pass_at_k", "components"),
)
AGGREGATES = ("auto", "completions", "tokens", "prompts", "constant")
CORRECTIONS = (
    *("auto", "off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    "icepop",
)


# Environment variables of the first GRPO scripts, and the setting that each gives a default.
ENVIRONMENT = {
    "USE_AMP": "opt.amp.enabled",
    "AMP_DTYPE": "opt.amp.dtype",
    "USE_TF32": "opt.tf32.enabled",
    "COMPILE_MODEL": "opt.compile.enabled",
    "PARALLEL_REWARDS": "scoring.kind",
    "NUM_WORKERS": "scoring.workers",
}


@dataclass(kw_only=True)
class KlConfig:
    """Settings of the KL term, which pulls the policy towards the reference model."""

    beta: Nonnegative
    estimator: Annotated[str, one_of("k1", "k2", "k3")]
    where: Annotated[str, one_of("loss", "reward")]
    unbiased: bool
    clamp: Positive

    @property
    def in_loss(self) -> bool:
        """Whether the loss has a KL term."""
        return bool(self.beta) and self.where == "loss"

    def __post_init__(self) -> None:
        if self.in_loss and self.estimator == "k1" and not self.unbiased:
            raise ConfigError(
                "algo.kl.estimator=k1 has no effect with algo.kl.where=loss and"
                " algo.kl.unbiased=false: its gradient is zero on average. Use k2 or k3 there, or"
                " algo.kl.where=reward."
            )


@dataclass(kw_only=True)
class StopAtConfig:
    """Bounds of measures at which the run stops; null = off."""

    kl: Positive | None
    approx_kl: Positive | None
    entropy_below: Positive | None

    def crossed(self, seen: dict[str, float]) -> str | None:
        """Return the bound that a step's numbers have crossed, with advice; None if they are
        within.
        """
        if self.kl is not None and seen["kl"] > self.kl:
            return (
                f"kl {seen['kl']:.3g} is above algo.stop_at.kl={self.kl:g}. Lower algo.lr or raise"
                " algo.kl.beta."
            )
        if self.approx_kl is not None and seen["approx_kl"] > self.approx_kl:
            return (
                f"approx_kl {seen['approx_kl']:.3g} is above"
                f" algo.stop_at.approx_kl={self.approx_kl:g}. Lower algo.lr, or"
                " algo.num_iterations or algo.minibatches where they are above 1."
            )
        if self.entropy_below is not None and seen["entropy"] < self.entropy_below:
            return (
                f"entropy {seen['entropy']:.3g} is below"
                f" algo.stop_at.entropy_below={self.entropy_below:g}. Raise algo.entropy_bonus, or"
                " algo.epsilon_high where ratios can move."
            )
        return None


def only_with(setting: str, value: str, *keys: str) -> Rule:
    """Return the rule that the settings `keys` have an effect only if `setting` has this value."""
    return Rule(
        keys,
        only=lambda algo: getattr(algo, setting) == value,
        why=f"with algo.{setting}={{algo.{setting}}}. Leave it out.",
    )


# Advantages that need rewards without penalties, and why.
UNSHAPED = {
    "maxrl": "divides by the mean reward, and a penalty may take that to 0 or below",
    "components": "is made of the task's own scores",
}
EXACT = (
    "with algo.num_iterations=1: ratios are 1. Raise it or algo.minibatches, set"
    " algo.ratio_against=sampler, or leave this out."
)


@dataclass(kw_only=True)
class GrpoConfig(SteppedConfig):
    """Settings of GRPO. conf/algo/grpo.yaml explains each one next to its value."""

    PROGRESS: ClassVar = {
        "reward": "reward {:.3f}",
        "metric": "",
        "validation": "validation {:.1f}",
        "tokens_per_second": "{:,.0f} tokens/s",
        "dead_groups": "{:.0%} dead groups",
    }
    RESUME_MAY_CHANGE: ClassVar = ("steps", "rollout_rows", "train_rows", "patience")
    COMPILES_TRAINING: ClassVar = True
    # If several apply, the first is reported, so the most specific ones come first.
    RULES: ClassVar = (
        Rule(
            ("epsilon_low", "epsilon_high", "dual_clip", "delta"),
            only=lambda algo: algo.loss in CLIPPED,
            why="with algo.loss={algo.loss}, which has no such bound. Leave it out.",
        ),
        only_with("loss", "cispo", "cispo_max"),
        only_with("loss", "dppo", "dppo_delta"),
        only_with("advantage", "pass_at_k", "pass_k"),
        Rule(
            ("aggregate",),
            only=lambda algo: algo.loss != "bnpo",
            why="with algo.loss=bnpo, which is the mean over a micro-batch. Leave it out.",
        ),
        Rule(
            ("correction",),
            only=lambda algo: not algo.against_sampler,
            why="with a ratio against the sampler, which has it in it. Set"
            " algo.ratio_against=trainer (auto is sampler with algo.overlap=1), or leave it out.",
        ),
        Rule(
            ("correction_bounds",),
            only=lambda algo: not algo.against_sampler and algo.correction != "off",
            why="where nothing is corrected. Set algo.correction, or leave it out.",
        ),
        Rule(
            ("kl.estimator", "kl.where"),
            only=lambda algo: algo.kl.beta,
            why="with algo.kl.beta=0. Set algo.kl.beta, for example 0.001, or leave it out.",
        ),
        Rule(
            ("stop_at.kl", "kl.unbiased"),
            only=lambda algo: algo.kl.in_loss,
            why="without algo.kl.beta above 0 and algo.kl.where=loss. Set them, or leave it out.",
        ),
        Rule(
            (
                *("epsilon_low", "epsilon_high", "dual_clip", "delta", "dppo_delta"),
                "stop_at.approx_kl",
            ),
            only=lambda algo: algo.ratio_moves,
            why=EXACT,
        ),
        Rule(
            ("epsilon_low", "dual_clip", "delta", "off_policy_mask"),
            only=lambda algo: algo.advantage != "pass_at_k",
            why="with algo.advantage=pass_at_k, which is never negative. Leave it out.",
        ),
        Rule(
            ("cispo_max",),
            only=lambda algo: algo.ratio_moves or algo.cispo_max < 1,
            why=EXACT,
        ),
        Rule(
            ("kl.clamp",),
            only=lambda algo: algo.ratio_moves or (algo.kl.beta and algo.kl.estimator == "k3"),
            why="without algo.kl.beta and algo.kl.estimator=k3. Leave it out.",
        ),
    )

    name: str
    samples_per_prompt: Annotated[Whole, Ge(2)]
    num_iterations: Count
    minibatches: Count
    overlap: Annotated[Whole, Ge(0), Le(1)]
    rollout_rows: Count | None
    train_rows: Count | None
    loss: Annotated[str, one_of(*LOSSES)]
    aggregate: Annotated[str, one_of(*AGGREGATES)]
    advantage: Annotated[str, one_of(*ADVANTAGES)]
    pass_k: Annotated[Whole, Ge(2)]
    ratio_against: Annotated[str, one_of("auto", "trainer", "sampler")]
    epsilon_low: Annotated[Positive, Lt(1)]
    epsilon_high: Positive
    dual_clip: Annotated[Number, Gt(1)] | None
    delta: Number | None
    cispo_max: Positive
    dppo_delta: Annotated[Positive, Lt(1)]
    kl: KlConfig
    correction: Annotated[str, one_of(*CORRECTIONS)]
    correction_bounds: list[Nonnegative] | None
    off_policy_mask: Positive | None
    entropy_bonus: Number
    resample_rounds: Natural
    mask_truncated: bool
    overlong_buffer: Natural
    retire_at: Annotated[Positive, Le(1)] | None
    lr: Tuned
    lr_schedule: ScheduleConfig
    warmup_steps: Nonnegative
    optimizer: OptimizerConfig
    grad_clip: Positive
    stop_at: StopAtConfig
    sampling: SamplingConfig

    @property
    def ratio_moves(self) -> bool:
        """Whether the ratio to the policy that sampled can differ from 1."""
        return self.updates_per_rollout > 1 or self.against_sampler

    @property
    def updates_per_rollout(self) -> int:
        """The number of optimizer steps on one rollout, if each minibatch has a group with
        something to learn.
        """
        return self.num_iterations * self.minibatches

    @property
    def against_sampler(self) -> bool:
        """Whether ratios are relative to the engine's log-probabilities; auto = only with
        overlap.
        """
        return self.ratio_against == "sampler" or (
            self.ratio_against == "auto" and self.overlap > 0
        )

    @property
    def step_samples(self) -> int:
        """The least number of completions that the first step samples."""
        return self.prompts_per_step * self.samples_per_prompt

    def __post_init__(self) -> None:
        if self.delta is not None:
            above: Any = Annotated[float, Gt(1 + self.epsilon_high)]
            check(above | None, self.delta, "algo.delta")
        super().__post_init__()
        self.sampling.check_unlike("1.0")
        if (bounds := self.correction_bounds) is not None and not (
            len(bounds) == 2 and bounds[0] < 1 < bounds[1]
        ):
            raise ConfigError(
                f"algo.correction_bounds={bounds} is not a range around 1, the weight where engine"
                " and trainer agree. Give [least, most], as in [0.5,5], or null."
            )
        if self.minibatches > self.prompts_per_step:
            raise ConfigError(
                f"algo.minibatches={self.minibatches} is above algo.prompts_per_step="
                f"{self.prompts_per_step}. A part has one prompt's group at least: lower it, or"
                " raise algo.prompts_per_step."
            )
        if self.advantage == "pass_at_k" and self.pass_k > self.samples_per_prompt:
            raise ConfigError(
                f"algo.pass_k={self.pass_k} is above algo.samples_per_prompt="
                f"{self.samples_per_prompt}. The best of k is taken among these samples."
            )
        shaped = [
            (self.overlong_buffer, "algo.overlong_buffer"),
            (self.kl.beta and not self.kl.in_loss, "algo.kl.where=reward"),
        ]
        for given, name in shaped:
            if given and self.advantage in UNSHAPED:
                raise ConfigError(
                    f"{name} does not go with algo.advantage={self.advantage}, which"
                    f" {UNSHAPED[self.advantage]}. Leave one of them out."
                )
        longest = self.sampling.max_new_tokens  # 0 = not known yet
        if longest and self.overlong_buffer >= longest:
            raise ConfigError(
                f"algo.overlong_buffer={self.overlong_buffer} must be below "
                f"algo.sampling.max_new_tokens={self.sampling.max_new_tokens}."
            )

    @property
    def chooses(self) -> bool:
        """Whether the best model on validation examples is exported."""
        return True

    def find_idle(self, task: str = "") -> dict[str, str]:
        """Return the settings that advice must not recommend, because this advantage needs rewards
        without penalties, with the reason.

        Args: task: the task's _target_ when a command line is checked; the result is empty then,
        because `__post_init__` has refused such settings. "" = for advice.
        """
        why = None if task else UNSHAPED.get(self.advantage)
        idle = {"algo.overlong_buffer": f"algo.advantage={self.advantage}, which {why}"}
        return idle if why else {}

    def check_run(self, run: Run) -> None:
        """Raise ConfigError for settings outside `algo` that conflict with these, or have no effect
        with them.
        """
        adapter = run.model.adapter
        if adapter is not None and adapter.dropout:
            raise ConfigError(
                f"model.adapter.dropout={adapter.dropout:g} does not go with algo=grpo: the policy"
                " that learns would not be the one that sampled. Leave it out."
            )
        if self.overlap and run.opt.fsdp.enabled:
            raise ConfigError(
                "algo.overlap=1 does not go with opt=fsdp, whose checkpoints cannot hold the"
                " rollout that is under way. Leave one of them out."
            )
        unused(
            (
                run.opt.offload.enabled and adapter is not None,
                "opt=offload",
                "with model.adapter: the reference model is the same weights without the adapter",
            ),
            (
                run.opt.offload.enabled and not self.kl.beta,
                "opt=offload",
                "with algo=grpo and algo.kl.beta=0: there is no reference model",
            ),
        )
