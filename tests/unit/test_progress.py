"""Progress lines, by a clock of the test's own."""

import argparse
import logging
import time

import pytest

from benchmarks import measure
from common.report.progress import Progress
from common.report.tracker import describe_event


@pytest.fixture
def clock(monkeypatch):
    """Set what time.monotonic returns."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def to(seconds: float) -> None:
        now[0] = 100.0 + seconds

    return to


def test_no_time_left_before_two_observations_give_a_speed(clock, caplog):
    caplog.set_level(logging.INFO, "clutch")
    line = Progress("evaluating", 200, unit="completion", brief=True)
    for second, done in ((42, 1), (43, 2), (53, 50), (64, 100)):
        clock(second)
        line.to(done, always=True)
    assert caplog.messages == [
        "evaluating: completion 1/200",
        "evaluating: completion 2/200",
        "evaluating: completion 50/200: 00:33 left",
        "evaluating: completion 100/200: 00:22 left",
    ]


def test_a_line_says_what_it_was_given_and_its_end(clock, caplog):
    caplog.set_level(logging.INFO, "clutch")
    line = Progress("", 4)
    line.to(0, "reward 0.1")
    clock(1)
    line.to(4, "reward 0.2")
    assert caplog.messages == ["step 0/4: reward 0.1", "step 4/4: 00:00 left, reward 0.2"]


def test_a_held_out_value_that_is_old_has_its_step():
    held = {"step": 2, "metric_name": "bleu", "metric": 21.46}
    texts = {"reward": "reward {:.2f}", "metric": ""}
    said = [describe_event({"step": step, "reward": 0.5}, held, texts) for step in (2, 3)]
    assert said == ["reward 0.50, bleu 21.5", "reward 0.50, bleu 21.5 @2"]
    assert describe_event({"step": 1, "reward": 0.5}, None, texts) == "reward 0.50"


def test_labels_of_a_table_are_whole():
    """They were cut off in the middle."""
    label = "sampler-0.5b: spread lengths: this project, recorded steps / continuous batching"
    options = argparse.Namespace(quick=True, device="cpu", repeats=1)
    report = measure.Report("real", options, 1)
    report.add(label, 1234.0, "tokens/s", "vllm", 1.5)
    assert label in report.text
