"""The parts of an algorithm's settings that are not settings: what it says of them to the rest of
the project, each with a default, and the rules of when a setting has no effect.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from common.config.checks import ConfigError, Count, Positive, no_effect

REWARD_TASKS = ("reward", ("common.tasks.", "plugins."))


@dataclass(frozen=True)
class Rule:
    """Settings that have an effect under a condition alone. Elsewhere they must be what conf/ has.

    keys: without "algo."; only: the condition, on the settings; why: there is no effect elsewhere,
    and what to do, with {algo.KEY} for the value of another setting.
    """

    keys: tuple[str, ...]
    only: Callable[[Any], Any]
    why: str

    def check(self, algo: Any) -> None:
        """Raise ConfigError for one of the settings that is given without an effect."""
        for key in () if self.only(algo) else self.keys:
            why, value = self.why.format(algo=algo), operator.attrgetter(key)(algo)
            no_effect(f"algo/{algo.name}.yaml", key, value, why)


@dataclass(kw_only=True)
class AlgorithmConfig:
    """The settings of an algorithm inherit from this.

    Attributes:
        PROGRESS: how the progress line writes the numbers of a step.
        RESUME_MAY_CHANGE: settings that a run that is resumed may change.
        RULES: when settings have no effect.
        NO_EFFECT: settings that never have one, if they stand on the command line, with the reason.
        TASKS: the kind of its tasks, and what the modules of this project's own begin with.
        BUILDS_TASK: functions that make one, in modules without torch.
        STARTS_RANKS: the function that runs it, where it starts ranks of its own.
        PROBES: whether it perturbs weights, so that probe=true can measure how much they bear.
        COMPILES_TRAINING: whether opt.compile.training compiles its training forward.
        WHOLE_NUMBERS: kinds of model.quantize whose weights it can move themselves.
    """

    PROGRESS: ClassVar[dict[str, str]] = {}
    RESUME_MAY_CHANGE: ClassVar[tuple[str, ...]] = ()
    RULES: ClassVar[tuple[Rule, ...]] = ()
    NO_EFFECT: ClassVar[dict[str, str]] = {}
    TASKS: ClassVar[tuple[str, tuple[str, ...]]] = REWARD_TASKS
    BUILDS_TASK: ClassVar[tuple[str, ...]] = ()
    STARTS_RANKS: ClassVar[str | None] = None
    PROBES: ClassVar[bool] = False
    COMPILES_TRAINING: ClassVar[bool] = False
    WHOLE_NUMBERS: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for rule in self.RULES:
            rule.check(self)

    @property
    def step_samples(self) -> int:
        """Completions that the first step samples, at least."""
        return 0

    def find_idle(self, task: str = "") -> dict[str, str]:
        """Return settings that mean nothing beside these, or with a task (its _target_), if they
        stand on the command line; each with the reason.
        """
        return {}

    def check_run(self, run: Any) -> None:
        """Raise ConfigError for settings outside algo that do not go with these."""

    @property
    def in_epochs(self) -> bool:
        """Whether the run's length is given in passes over the training prompts."""
        return False

    def in_steps(self, prompts: int) -> tuple[Self, str]:
        """Return the settings with a length in passes over `prompts` training prompts turned into
        one in steps, and what the plan says of it; the same settings and "" if the length is given
        otherwise.
        """
        return self, ""


@dataclass(kw_only=True)
class SteppedConfig(AlgorithmConfig):
    """The settings of an algorithm that takes `prompts_per_step` prompts at a time. The length of a
    run is `steps` or `epochs`; once the prompts are known, it is `steps` alone.
    """

    steps: Count | None
    epochs: Positive | None
    prompts_per_step: Count

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(
                f"algo.steps={self.steps} and algo.epochs={self.epochs:g} both say how long the run"
                " is. Leave out one of them, or set it to null."
            )

    @property
    def updates_per_rollout(self) -> int:
        """Steps that are made with the prompts of one rollout."""
        return 1

    @property
    def in_epochs(self) -> bool:
        """Whether the run's length is given in passes over the training prompts."""
        return self.epochs is not None

    def in_steps(self, prompts: int) -> tuple[Self, str]:
        """Return the settings with `steps` in place of `epochs`, rounded up to whole rollouts, and
        what the plan says of it.
        """
        if self.epochs is None:
            return self, ""
        rollouts = math.ceil(round(self.epochs * prompts / self.prompts_per_step, 9))
        times = "epoch" if self.epochs == 1 else "epochs"
        said = f" ({self.epochs:g} {times} of {prompts} training prompts)"
        return replace(self, steps=rollouts * self.updates_per_rollout, epochs=None), said
