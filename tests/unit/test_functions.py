"""Reward functions of the user's own: what each parameter is given, and how long one may take."""

import functools
import json
import threading
import time
from contextlib import suppress

import pytest
from omegaconf import OmegaConf

from common.config import ConfigError
from common.rollout.scoring import score_parts
from common.tasks import bounded, build
from common.tasks.functions import bind
from tests.support import ROOT

GIVEN = {
    "completion": "C",
    "answer": "A",
    "prompt": "P",
    "data_source": "D",
    "extra_info": {"index": 3},
    "level": 5,
}


def called(score) -> object:
    return bind("mine.score", score, ["level"], 1.5).call_each([GIVEN])[0]


# --- functions; each returns what it was given


def documented(completion, answer):
    return completion, answer


def nameless(a, b):
    return a, b


def swapped(answer, completion):
    return completion, answer


def responses(ground_truth, response):
    return response, ground_truth


def of_a_translation(reference, hypothesis):
    return hypothesis, reference


def of_verl(data_source, solution_str, ground_truth, extra_info=None):
    return data_source, solution_str, ground_truth, extra_info


def of_verl_with_defaults(data_source, solution_str=None, ground_truth=None, extra_info=None):
    return data_source, solution_str, ground_truth, extra_info


def prompted(prompt, completion):
    return prompt, completion


def three(prompt, completion, answer):
    return prompt, completion, answer


def keywords(*, target, output):
    return output, target


def with_default(completion, threshold=0.5):
    return completion, threshold


def with_column(completion, answer, level):
    return completion, answer, level


def any_number(*texts):
    return texts


def with_rest(prediction, gold, **rest):
    return prediction, gold, rest


def half_known(completion, b):
    return completion, b


def other_half_known(a, answer):
    return a, answer


def by_place(answer, completion, /):
    return completion, answer


class Scores:
    def __call__(self, reference, hypothesis):
        return hypothesis, reference

    def method(self, answer, completion):
        return completion, answer


@pytest.mark.parametrize(
    ("score", "given"),
    [
        *((f, ("C", "A")) for f in (documented, nameless, swapped, responses, of_a_translation)),
        *((f, ("D", "C", "A", {"index": 3})) for f in (of_verl, of_verl_with_defaults)),
        (prompted, ("P", "C")),
        (three, ("P", "C", "A")),
        (keywords, ("C", "A")),
        (with_default, ("C", 0.5)),
        (with_column, ("C", "A", 5)),
        (any_number, ("C", "A")),
        (with_rest, ("C", "A", {})),
        (half_known, ("C", "A")),
        (other_half_known, ("C", "A")),
        (by_place, ("C", "A")),
        (Scores(), ("C", "A")),
        (Scores().method, ("C", "A")),
        (functools.partial(three, "mine"), ("mine", "C", "A")),
        (functools.partial(swapped, answer="mine"), ("C", "mine")),
        (functools.wraps(responses)(lambda *a, **k: responses(*a, **k)), ("C", "A")),
    ],
)
def test_parameters_are_given_by_their_names(score, given):
    assert called(score) == given


@pytest.mark.parametrize("first", ["prompt", "answer", "ground_truth", "reference", "data_source"])
def test_a_first_parameter_that_is_no_completion_needs_one_that_is(first):
    scope: dict = {}
    exec(f"def score({first}, other): return 1.0", scope)  # the project's own text
    with pytest.raises(ConfigError, match=f"mine.score.*{first}"):
        bind("mine.score", scope["score"], ["level"], 1.5)


@pytest.mark.parametrize("parameters", ["a, b, c", "prompt, answer", "a, completion"])
def test_what_is_not_clear_is_refused(parameters):
    scope: dict = {}
    exec(f"def score({parameters}): return 1.0", scope)
    with pytest.raises(ConfigError, match=r"cannot be called.*Let it take a completion"):
        bind("mine.score", scope["score"], ["level"], 1.5)


# --- time


def hangs(completion, answer):
    while completion == "hangs":
        with suppress(Exception):
            time.sleep(0)
    return float(completion == answer)


def matches(completion, answer):
    import re

    return float(re.fullmatch(r"(a|a)*b", completion) is not None)


def of_lists(completions, answer):
    return [hangs(*pair) for pair in zip(completions, answer, strict=True)]


@pytest.mark.parametrize(
    ("score", "text"), [(hangs, "hangs"), (matches, "a" * 40)], ids=["loop", "expression"]
)
def test_a_function_that_takes_too_long_earns_nothing(score, text, monkeypatch):
    monkeypatch.setattr("common.tasks.functions.FIRST_SECONDS", 0.0)
    own, before = bind("mine.score", score, [], 0.2), bounded.count_ended()
    rows = [{"completion": one, "answer": "ab"} for one in (text, "ab", text)]
    assert own.call_each(rows) == [0.0, 1.0, 0.0]
    assert bounded.count_ended() == before + 2


def test_of_lists_each_is_scored_alone_then(monkeypatch):
    monkeypatch.setattr("common.tasks.functions.FIRST_SECONDS", 0.0)
    own, before = bind("mine.score", of_lists, ["answer"], 0.2), bounded.count_ended()
    columns = {"completions": ["x", "hangs", "y"], "answer": ["x", "x", "x"]}
    assert own.call_lists(columns, 3) == [1.0, 0.0, 0.0]
    assert bounded.count_ended() == before + 1


def test_one_that_waits_is_ended_too():
    started = time.monotonic()
    with pytest.raises(bounded.TooLongError), bounded.limited(1.0, wait_seconds=0.2):
        threading.Event().wait(60)
    assert time.monotonic() - started < 30


def test_a_run_counts_what_took_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr("common.tasks.functions.FIRST_SECONDS", 0.0)
    (tmp_path / "slow_score.py").write_text(
        "def score(reference, hypothesis):\n"
        "    while hypothesis == 'hangs':\n"
        "        pass\n"
        "    return float(hypothesis == reference)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = [{"question": f"{n}?", "answer": f"{n}"} for n in range(10)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    node = OmegaConf.to_container(OmegaConf.load(ROOT / "conf/task/custom.yaml"))
    assert isinstance(node, dict)
    own = {"rewards": {"slow_score.score": 1.0}, "call_seconds": 0.2, "partial": 0.0}
    fields = {"prompt_field": "question", "answer_field": "answer"}
    task = build(node | own | fields | {"path": str(tmp_path / "rows.jsonl")})
    example = task.examples("test")[0]
    scored = score_parts(task, [example] * 2, ["hangs", example.answer])
    assert scored.components["slow_score.score"] == [0.0, 1.0]
    assert scored.ended == 1
