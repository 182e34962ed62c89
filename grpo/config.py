"""Names, types and checks of conf/algo/grpo.yaml."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Lt

from common.config import (
    AlgorithmConfig,
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
    Tuned,
    Whole,
    check,
    one_of,
    unused,
)

LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo")
ADVANTAGES = ("group", "batch", "none")
CORRECTIONS = ("auto", "off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@dataclass(kw_only=True)
class KlConfig:
    """The pull towards the reference model."""

    beta: Nonnegative
    estimator: Annotated[str, one_of("k1", "k2", "k3")]
    where: Annotated[str, one_of("loss", "reward")]
    clamp: Positive

    def __post_init__(self) -> None:
        if self.beta and self.estimator == "k1" and self.where == "loss":
            raise ConfigError(
                "algo.kl.estimator=k1 has no effect with algo.kl.where=loss: its gradient is zero"
                " on average. Use k2 or k3 there, or algo.kl.where=reward."
            )


@dataclass(kw_only=True)
class StopAtConfig:
    """Guards; null = off."""

    kl: Positive | None
    approx_kl: Positive | None
    entropy_below: Positive | None

    def crossed(self, seen: dict[str, float]) -> str | None:
        """Return the bound that a step's numbers are beyond, and what to do about it; None where
        they are within.
        """
        if self.kl is not None and seen["kl"] > self.kl:
            return (
                f"kl {seen['kl']:.3g} is above algo.stop_at.kl={self.kl:g}. Lower algo.lr or raise"
                " algo.kl.beta."
            )
        if self.approx_kl is not None and seen["approx_kl"] > self.approx_kl:
            return (
                f"approx_kl {seen['approx_kl']:.3g} is above"
                f" algo.stop_at.approx_kl={self.approx_kl:g}. Lower algo.lr or"
                " algo.num_iterations."
            )
        if self.entropy_below is not None and seen["entropy"] < self.entropy_below:
            return (
                f"entropy {seen['entropy']:.3g} is below"
                f" algo.stop_at.entropy_below={self.entropy_below:g}. Raise algo.entropy_bonus, or"
                " with algo.num_iterations above 1 algo.epsilon_high."
            )
        return None


EXACT = "with algo.num_iterations=1: ratios are 1. Raise it, or leave this out."


@dataclass(kw_only=True)
class GrpoConfig(AlgorithmConfig):
    """Settings of GRPO; what each does stands beside its value in conf/algo/grpo.yaml."""

    PROGRESS: ClassVar = {
        "reward": "reward {:.3f}",
        "metric": "",
        "tokens_per_second": "{:,.0f} tokens/s",
        "dead_groups": "{:.0%} dead groups",
    }
    RESUME_MAY_CHANGE: ClassVar = ("steps", "rollout_rows", "train_rows")
    # Of several that hold, the first is the one that is more to the point.
    RULES: ClassVar = (
        Rule(
            ("epsilon_low", "epsilon_high", "dual_clip", "delta"),
            only=lambda algo: algo.loss != "cispo",
            why="with algo.loss=cispo, whose bound is algo.cispo_max. Leave it out.",
        ),
        Rule(
            ("cispo_max",),
            only=lambda algo: algo.loss == "cispo",
            why="with algo.loss={algo.loss}. Leave it out.",
        ),
        Rule(
            ("kl.estimator", "kl.where"),
            only=lambda algo: algo.kl.beta,
            why="with algo.kl.beta=0. Set algo.kl.beta, for example 0.001, or leave it out.",
        ),
        Rule(
            ("stop_at.kl",),
            only=lambda algo: algo.kl.beta and algo.kl.where == "loss",
            why="without algo.kl.beta above 0 and algo.kl.where=loss. Set them, or leave it out.",
        ),
        Rule(
            ("epsilon_low", "epsilon_high", "dual_clip", "delta", "stop_at.approx_kl"),
            only=lambda algo: algo.num_iterations > 1,
            why=EXACT,
        ),
        Rule(
            ("cispo_max",),
            only=lambda algo: algo.num_iterations > 1 or algo.cispo_max < 1,
            why=EXACT,
        ),
        Rule(
            ("kl.clamp",),
            only=lambda algo: (
                algo.num_iterations > 1 or (algo.kl.beta and algo.kl.estimator == "k3")
            ),
            why="without algo.kl.beta and algo.kl.estimator=k3. Leave it out.",
        ),
    )

    name: str
    steps: Count | None
    prompts_per_step: Count
    samples_per_prompt: Annotated[Whole, Ge(2)]
    num_iterations: Count
    rollout_rows: Count | None
    train_rows: Count | None
    loss: Annotated[str, one_of(*LOSSES)]
    advantage: Annotated[str, one_of(*ADVANTAGES)]
    epsilon_low: Annotated[Positive, Lt(1)]
    epsilon_high: Positive
    dual_clip: Annotated[Number, Gt(1)] | None
    delta: Number | None
    cispo_max: Positive
    kl: KlConfig
    correction: Annotated[str, one_of(*CORRECTIONS)]
    entropy_bonus: Number
    resample_rounds: Natural
    mask_truncated: bool
    overlong_buffer: Natural
    lr: Tuned
    lr_schedule: ScheduleConfig
    warmup_steps: Natural
    optimizer: OptimizerConfig
    grad_clip: Positive
    stop_at: StopAtConfig
    sampling: SamplingConfig

    def __post_init__(self) -> None:
        if self.delta is not None:
            check(Annotated[float, Gt(1 + self.epsilon_high)], self.delta, "algo.delta")
        super().__post_init__()
        if self.sampling.temperature == 0:
            raise ConfigError(
                "algo.sampling.temperature=0 makes all samples of a prompt equal. Use 1.0."
            )
        longest = self.sampling.max_new_tokens  # 0 = not known yet
        if longest and self.overlong_buffer >= longest:
            raise ConfigError(
                f"algo.overlong_buffer={self.overlong_buffer} must be below "
                f"algo.sampling.max_new_tokens={self.sampling.max_new_tokens}."
            )

    def check_run(self, run: Run) -> None:
        """Raise ConfigError for settings outside `algo` that have no effect with these."""
        attention, adapter = run.model.attention, run.model.adapter
        if adapter is not None and adapter.dropout:
            raise ConfigError(
                f"model.adapter.dropout={adapter.dropout:g} does not go with algo=grpo: the policy"
                " that learns would not be the one that sampled. Leave it out."
            )
        unused(
            (
                run.opt.offload.enabled and adapter is not None,
                "opt=offload",
                "with model.adapter: the reference model is the same weights without the adapter",
            ),
            (
                attention != "sdpa",
                f"model.attention={attention}",
                "with algo=grpo, which uses sdpa",
            ),
            (
                run.opt.offload.enabled and not self.kl.beta,
                "opt=offload",
                "with algo=grpo and algo.kl.beta=0: there is no reference model",
            ),
        )
