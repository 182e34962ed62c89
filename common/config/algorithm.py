"""The base classes of an algorithm's settings, with what an algorithm declares to the rest of the
project, each with a default, and the rules for settings without effect.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from common.config.checks import ConfigError, Count, Positive, no_effect

# The sources of given answers (common/answers.py).
ANSWERS = ("auto", "answer", "solution", "teach")
REWARD_TASKS = ("reward", ("common.tasks.", "plugins."))


@dataclass(frozen=True)
class Rule:
    """Settings that have an effect only under a condition. Without it they must have the value in
    conf/.

    Attributes:
        keys: the settings, without "algo.".
        only: the condition, a function of the algorithm's settings.
        why: the end of the error message: the reason that the setting has no effect, and the next
            step; {algo.KEY} stands for the value of another setting.
    """

    keys: tuple[str, ...]
    only: Callable[[Any], Any]
    why: str

    def check(self, algo: Any) -> None:
        """Raise ConfigError if one of the settings is given but has no effect."""
        for key in () if self.only(algo) else self.keys:
            why, value = self.why.format(algo=algo), operator.attrgetter(key)(algo)
            no_effect(f"algo/{algo.name}.yaml", key, value, why)


@dataclass(kw_only=True)
class AlgorithmConfig:
    """The base class of an algorithm's settings.

    Attributes:
        PROGRESS: the numbers of a step in the progress line, by name, with their formats.
        RESUME_MAY_CHANGE: settings that may change when a run resumes.
        RULES: the conditions under which settings have an effect.
        NO_EFFECT: settings that never have an effect with this algorithm, with the reason; an error
            if the command line gives them.
        TASKS: the kind of task that the algorithm needs, and the beginnings of the names of modules
            with such tasks in this project.
        BUILDS_TASK: the functions that build such a task, in modules without torch; empty = the
            default.
        STARTS_RANKS: the function that runs the algorithm, if it starts its own ranks.
        PROBES: whether the algorithm perturbs weights, so that probe=true can measure the noise
            that they survive.
        COMPILES_TRAINING: whether opt.compile.training compiles its training forward.
        VALIDATION: the algorithm's own setting of how many examples are validated on, if it
            chooses the exported model itself.
        WHOLE_NUMBERS: the kinds of model.quantize whose weights the algorithm can train.
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
    VALIDATION: ClassVar[str] = ""
    WHOLE_NUMBERS: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for rule in self.RULES:
            rule.check(self)

    @property
    def step_samples(self) -> int:
        """The least number of completions that the first step samples."""
        return 0

    def find_idle(self, task: str = "") -> dict[str, str]:
        """Return settings that have no effect with these settings, or with a task, each with the
        reason. Giving one on the command line is an error.

        Args: task: the task's _target_; "" = for advice, before a task is known.
        """
        return {}

    def check_run(self, run: Any) -> None:
        """Raise ConfigError for settings outside `algo` that conflict with these."""

    @property
    def chooses(self) -> bool:
        """Whether the session measures the model on validation examples between steps, and the
        best one is exported (common/choice.py).
        """
        return False

    @property
    def in_epochs(self) -> bool:
        """Whether the run's length is given in passes over the training prompts."""
        return False

    def in_steps(self, prompts: int) -> tuple[Self, str]:
        """Return the settings with a length in epochs converted to one in steps, and a note on it
        for the plan; the same settings and "" if the length is not in epochs.

        Args: prompts: the number of training prompts.
        """
        return self, ""


@dataclass(kw_only=True)
class SteppedConfig(AlgorithmConfig):
    """The settings of an algorithm that takes `prompts_per_step` prompts at a time. The length of a
    run is `steps` or `epochs`; once the number of prompts is known, it is converted to `steps`.
    """

    steps: Count | None
    epochs: Positive | None
    prompts_per_step: Count
    # Measurements on validation examples in a row that are worse than the best one, which end the
    # run; null = the run goes on.
    patience: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(
                f"algo.steps={self.steps} and algo.epochs={self.epochs:g} both say how long the run"
                " is. Leave out one of them, or set it to null."
            )

    @property
    def updates_per_rollout(self) -> int:
        """The number of optimizer steps on the prompts of one rollout."""
        return 1

    @property
    def in_epochs(self) -> bool:
        """Whether the run's length is given in passes over the training prompts."""
        return self.epochs is not None

    def in_steps(self, prompts: int) -> tuple[Self, str]:
        """Return the settings with `steps` in place of `epochs`, rounded up to whole rollouts, and
        a note on it for the plan.
        """
        if self.epochs is None:
            return self, ""
        rollouts = math.ceil(round(self.epochs * prompts / self.prompts_per_step, 9))
        times = "epoch" if self.epochs == 1 else "epochs"
        said = f" ({self.epochs:g} {times} of {prompts} training prompts)"
        return replace(self, steps=rollouts * self.updates_per_rollout, epochs=None), said
