"""Bounds of the recorded settings that decide how much memory a replay needs: a file from elsewhere
may ask for more than any machine has.

Ranks are not bounded here: eggroll/addresses.py and common/model compare them with the model's
matrices before they allocate anything.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

from common.config import ConfigError, Run
from common.system import DamagedError
from plugins.replay.egg import MOST, Egg

# Settings that are a number of things in memory, with the most of each.
COUNTS = {"algo.members": MOST} | dict.fromkeys(
    ("algo.prompts_per_step", "algo.samples_per_prompt", "algo.sampling.max_new_tokens"), 1 << 20
)
# The same of the tasks that come with the project.
OF_TASKS = ("rows", "test_rows", "problems", "test_problems", "positions", "test_positions")
OF_TASKS += ("plies", "few_shot", "numbers", "max_turns", "reply_tokens", "max_new_tokens")
MOST_ANSWERS = 1 << 28  # members x answers of a step that samples nothing
MOST_WEIGHTS = 1 << 30  # of model=tiny: 4 GB


def check_sizes(held: Egg, run: Run) -> None:
    """Raise DamagedError, with the file and the key, for settings of sizes that no run has."""
    for key, most in COUNTS.items():
        _check(held, key, attrgetter(key)(run), most)
    for key in OF_TASKS:
        _check(held, f"task.{key}", run.task.get(key))
    for key, value in run.algo.optimizer.kwargs.items():
        _check(held, f"algo.optimizer.kwargs.{key}", value)
    factors = "algo.members x algo.prompts_per_step x algo.samples_per_prompt"
    most = MOST_ANSWERS if run.algo.fitness_of == "likelihood" else MOST
    _check(held, factors, run.algo.step_samples, most)
    tiny = run.model.tiny
    if tiny is None:
        return
    for key, value in vars(tiny).items():
        if key != "pretrain_seed":
            _check(held, f"model.tiny.{key}", value)
    block = tiny.hidden_size * (4 * tiny.hidden_size + 3 * tiny.intermediate_size)
    sizes = "the number of weights of model.tiny (hidden_size, intermediate_size, layers)"
    _check(held, sizes, tiny.layers * block, MOST_WEIGHTS)


def _check(held: Egg, key: str, value: Any, most: int = MOST) -> None:
    """Raise DamagedError if a number of the file is too large. Other values are checked where they
    are used.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) > most:
        shown = f"{value:.3g}" if abs(value) < 1e300 else "a larger number"
        raise DamagedError(
            f"{held.path} cannot be replayed: {key} is {shown}, and {most} is the most that is"
            " computed here. Get the file again from where it was made."
        )


@contextmanager
def settings_of(held: Egg) -> Iterator[None]:
    """Name the file in errors of the block, which are about the settings that it holds."""
    try:
        yield
    except ConfigError as error:
        if str(held.path) in str(error):
            raise
        raise type(error)(f"{error} The settings are those of {held.path}.") from None
