"""Scores in a process of their own: what goes on for ever, fills the memory or ends it earns 0."""

import threading

import pytest

from common.config import ScoringConfig
from common.rollout.scoring import Scorer
from common.tasks import Example, bounded
from tests.support.scoring import answer

pytestmark = pytest.mark.run  # starts processes


def ask(text: str) -> float:
    return bounded.call("json", answer, text)


def test_scores_are_those_of_the_function():
    texts = ("right", "half", "prints", "nan", "two", "raises")
    before = bounded.count_ended()
    assert [ask(text) for text in texts] == [1, 0.5, 1, 0, 0, 0]
    assert bounded.count_ended() == before, "none of these was ended"


@pytest.mark.parametrize("text", ["computes", "fills", "exits"])
def test_what_does_not_end_earns_nothing_and_the_next_is_scored(text):
    before = bounded.count_ended()
    assert [ask(text), ask("right")] == [0, 1]
    assert bounded.count_ended() == before + 1


def test_a_process_that_ended_between_two_calls_is_replaced():
    assert ask("right") == 1
    worker = bounded._workers[answer]
    assert worker.process is not None
    worker.process.kill()
    worker.process.wait()
    assert ask("right") == 1


def test_calls_of_threads_are_scored_and_counted_apart():
    counts = {}

    def work(text: str) -> None:
        counts[text] = (ask(text), bounded.count_ended())

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


def test_a_reward_that_hangs_in_this_process_is_said(monkeypatch, caplog):
    class Waits:
        def reward(self, example: Example, completion: str) -> float:
            for _ in range(100):
                if "goes on" in caplog.text:
                    return 1.0
                threading.Event().wait(0.1)
            return 0.0

    monkeypatch.setattr("common.rollout.scoring.SLOW_SECONDS", 0.1)
    scorer = Scorer(Waits(), ScoringConfig(kind="serial", workers=2, timeout_seconds=60))  # type: ignore[arg-type]
    with caplog.at_level("WARNING", "clutch"):
        assert scorer.submit([Example(7, "q", "a", {})], ["x"]).result().rewards == [1]
    assert "scoring.kind=processes" in caplog.text
