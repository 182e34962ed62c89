"""The parts of an algorithm's settings that are not settings: what it says of them to the rest of
the project, each with a default, and the rules of when a setting has no effect.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from common.config.checks import no_effect

REWARD_TASKS = ("reward", "common.tasks.")


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
        TASKS: the kind of its tasks, and this project's package of them.
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
    TASKS: ClassVar[tuple[str, str]] = REWARD_TASKS
    BUILDS_TASK: ClassVar[tuple[str, ...]] = ()
    STARTS_RANKS: ClassVar[str | None] = None
    PROBES: ClassVar[bool] = False
    COMPILES_TRAINING: ClassVar[bool] = False
    WHOLE_NUMBERS: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for rule in self.RULES:
            rule.check(self)

    @property
    def forces(self) -> Any:
        """The text that tells completions to answer, and its room; None = there is none."""
        return None

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
