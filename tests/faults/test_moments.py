"""Signals that come at a moment that a random kill hardly ever meets: at the start, in a held-out
measurement, in the export, in the report. Whatever the moment, the run goes on and ends as if
nothing had been, or says that it is done.
"""

import importlib
import os
import signal
import sys
from pathlib import Path

import pytest

from common.system.signals import EXIT_SIGNAL, RunStopped
from launch import compose, train
from tests.support import CONF, MOVING, SMALL_CLASSIFY, SMALL_RFT
from tests.support.commands import Warm
from tests.support.killing import differing

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("in_cache")]

RUNS = {
    "eggroll": [*MOVING, "algo.steps=2", "evaluate.every=1", "checkpoint.every=1"],
    "rft": [*SMALL_RFT, "algo.iterations=1", "checkpoint.every=1"],
    "classify": [*SMALL_CLASSIFY, "checkpoint.every=1"],
}
# What is under way: where it begins, and which of its calls is met.
MOMENTS = {
    "start": ("common.session:Session.__init__", 1),
    "evaluation before": ("common.parts:Parts.evaluate", 1),
    "evaluation": ("common.parts:Parts.evaluate", 2),
    "checkpoint": ("common.checkpoint.checkpoint:_write", 1),
    "export": ("common.report.summary:finish_run", 1),
    "report": ("common.report.summary:page.write_or_warn", 1),
}
NO_SCHEDULE = ("classify", "evaluation")  # it measures after each epoch, by itself
CASES = [(a, m) for a in RUNS for m in MOMENTS if (a, m.partition(" ")[0]) != NO_SCHEDULE]


def carry_out(arguments: list[str], folder: Path) -> None:
    try:
        train(compose(arguments, CONF), folder)
    except RunStopped as stopped:
        sys.exit(stopped.code)


def strike(moment: str, number: int, arguments: list[str], folder: Path) -> None:
    """Carry out a run that gets a signal as soon as something is under way."""
    place, left = MOMENTS[moment]
    module, _, path = place.partition(":")
    owner, name = importlib.import_module(module), path
    if "." in path:
        first, name = path.split(".")
        owner = getattr(owner, first)
    begin = getattr(owner, name)

    def meet(*args, **kwargs):
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), number)
        return begin(*args, **kwargs)

    setattr(owner, name, meet)
    carry_out(arguments, folder)


@pytest.fixture(scope="module")
def whole(cache, tmp_path_factory):
    """The folder of an unbroken run of an algorithm, made once."""
    made: dict[str, Path] = {}

    def find(algo: str) -> Path:
        if algo not in made:
            made[algo] = tmp_path_factory.mktemp(algo) / "run"
            carry_out(RUNS[algo], made[algo])
        return made[algo]

    return find


# Both signals at each moment, each with half of the algorithms; in make test each moment once.
ONCE = (0, 1, 2, 3, 4, 15)
EACH = [
    pytest.param(
        *(algo, moment, number),
        marks=[pytest.mark.thorough] * (place not in ONCE),
        id=f"{algo}-{moment}-{number.name}",
    )
    for place, (algo, moment) in enumerate(CASES)
    for number in ((signal.SIGTERM, signal.SIGKILL)[place % 2],)
]


@pytest.mark.parametrize(("algo", "moment", "number"), EACH)
def test_a_signal_at_any_moment_changes_nothing(algo, moment, number, whole, warm: Warm, tmp_path):
    unbroken, folder = whole(algo), tmp_path / "run"
    printed = tmp_path / "printed"
    printed.mkdir()
    started = warm.begin(strike, moment, number, RUNS[algo], folder, printed=printed)
    out, err = started.communicate()
    assert "Traceback" not in err, err
    if started.returncode == 0:  # nothing was left to lose
        assert number == signal.SIGTERM
        assert differing(unbroken, folder) == []
        return
    assert started.returncode in (EXIT_SIGNAL, -number), (started.returncode, out, err)
    warm.call(carry_out, [*RUNS[algo], "resume=auto"], folder)
    assert differing(unbroken, folder) == []
