"""Scores in a process of their own: what goes on for ever, fills the memory or ends it earns 0."""

import os
import signal
import threading
from typing import ClassVar

import pytest

from common.config import ConfigError, ScoringConfig
from common.scoring import Scorer
from common.system.signals import SIGNALS
from common.task import Example
from common.tasks import limited_process
from tests.support.scoring import answer

pytestmark = pytest.mark.run  # starts processes


def ask(text: str) -> float:
    return limited_process.call("json", answer, text)


def test_scores_are_those_of_the_function():
    texts = ("right", "half", "prints", "nan", "two", "raises")
    before = limited_process.count_ended()
    assert [ask(text) for text in texts] == [1, 0.5, 1, 0, 0, 0]
    assert limited_process.count_ended() == before, "none of these was ended"


@pytest.mark.parametrize("text", ["computes", "fills", "exits"])
def test_endless_rewards_earn_nothing_and_scoring_continues(text):
    before = limited_process.count_ended()
    assert [ask(text), ask("right")] == [0, 1]
    assert limited_process.count_ended() == before + 1


def test_a_process_that_ended_between_two_calls_is_replaced():
    assert ask("right") == 1
    worker = limited_process.workers[answer]
    assert worker.process is not None
    worker.process.kill()
    worker.process.wait()
    assert ask("right") == 1


def test_calls_of_threads_are_scored_and_counted_apart():
    counts = {}

    def work(text: str) -> None:
        counts[text] = (ask(text), limited_process.count_ended())

    threads = [threading.Thread(target=work, args=(text,)) for text in ("exits", "half", "right")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == {"exits": (0, 1), "half": (0.5, 0), "right": (1, 0)}


class Asking:
    def reward(self, example: Example, completion: str) -> float:
        return ask(completion)


@pytest.mark.parametrize("kind", ["serial", "threads"])
def test_a_run_says_how_many_were_ended(kind, caplog):
    scorer = Scorer(Asking(), ScoringConfig(kind=kind, workers=2, timeout_seconds=60))  # type: ignore[arg-type]
    rows = [Example(7, "q", "a", {})] * 3
    with caplog.at_level("WARNING", "clutch"):
        scored = scorer.submit(rows, ["right", "exits", "half"]).result()
    scorer.close()
    assert (scored.rewards, scored.ended) == ([1, 0, 0.5], 1)
    assert "scoring of 1 completions" in caplog.text
    assert "they earn 0. The examples begin with 7." in caplog.text


def test_workers_ignore_signals_and_die_alone():
    """Slurm sends its warning to all processes of a job, the run among them."""
    scorer = Scorer(Asking(), ScoringConfig(kind="processes", workers=2, timeout_seconds=60))  # type: ignore[arg-type]
    rows = [Example(7, "q", "a", {})] * 2
    try:
        assert scorer.submit(rows, ["right", "half"]).result().rewards == [1, 0.5]
        for worker in scorer.workers:
            for number in (*SIGNALS, signal.SIGUSR2):
                os.kill(worker.pid, number)
        assert scorer.submit(rows, ["right", "half"]).result().rewards == [1, 0.5]
        for worker in scorer.workers:
            os.kill(worker.pid, signal.SIGKILL)
    finally:
        closing = threading.Thread(target=scorer.close, daemon=True)
        closing.start()
        closing.join(20)
    assert not closing.is_alive()


def test_a_component_without_a_weight_is_told_at_the_start():
    class Half:
        components: ClassVar = {"form": None, "right": None}
        weights: ClassVar = {"right": 1.0}

    serial = ScoringConfig(kind="serial", workers=1, timeout_seconds=60)
    with pytest.raises(ConfigError, match="Half has a component 'form' and no weight for it"):
        Scorer(Half(), serial)  # type: ignore[arg-type]


def test_a_reward_that_hangs_in_this_process_is_said(monkeypatch, caplog):
    class Waits:
        def reward(self, example: Example, completion: str) -> float:
            for _ in range(100):
                if "goes on" in caplog.text:
                    return 1.0
                threading.Event().wait(0.1)
            return 0.0

    monkeypatch.setattr("common.scoring.SLOW_SECONDS", 0.1)
    scorer = Scorer(Waits(), ScoringConfig(kind="serial", workers=2, timeout_seconds=60))  # type: ignore[arg-type]
    with caplog.at_level("WARNING", "clutch"):
        assert scorer.submit([Example(7, "q", "a", {})], ["x"]).result().rewards == [1]
    assert "scoring.kind=processes" in caplog.text
