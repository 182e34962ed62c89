"""Reward functions of the user's own: what each parameter is given, and how long one may take."""

import functools
import itertools
import json
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from common.config import ConfigError, ScoringConfig
from common.device.hardware import Device
from common.distributed.context import Context
from common.scoring import Scorer, score_parts
from common.task import build
from common.tasks import limited_process
from common.tasks.functions import bind
from common.tasks.logged import TrainerState
from tests.support import ROOT

GIVEN = {
    "completion": "C",
    "answer": "A",
    "prompt": "P",
    "data_source": "D",
    "extra_info": {"index": 3},
    "level": 5,
}


def called(score, columns=("level",), row=GIVEN) -> object:
    """What a function that returns what it was given returns."""
    own, seen = bind("mine.score", score, columns, 1.5), []
    own.score = lambda *given, **named: float(bool(seen.append(score(*given, **named))))
    own.call_each([row])
    return seen[0]


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


def named(*parameters):
    scope: dict = {}
    exec(f"def score({', '.join(parameters)}): return ({', '.join(parameters)})", scope)
    return scope["score"]


@pytest.mark.parametrize(
    ("parameters", "given"),
    [
        (("y_true", "y_pred"), ("A", "C")),
        (("references", "predictions"), ("A", "C")),
        (("references", "hypotheses"), ("A", "C")),
        (("expected_result", "result"), ("A", "C")),
        (("golden_answer", "candidate_answer"), ("A", "C")),
        (("gts", "res"), ("A", "C")),
        (("labels", "responses"), ("A", "C")),
        (("y", "y_hat"), ("A", "C")),
        (("source", "translation"), ("P", "C")),
        (("Prompt", "Completion"), ("P", "C")),
        (("model_answer", "correct_answer"), ("C", "A")),
        (("true_label", "predicted_label"), ("A", "C")),
        (("q", "model_response", "gold_label"), ("Q", "C", "A")),
        (("a", "text"), ("AA", "C")),
        (("text", "a"), ("C", "AA")),
        (("x", "y"), ("C", "A")),
    ],
)
def test_parameter_names_decide_what_functions_get(parameters, given):
    assert called(named(*parameters), ["q", "a"], {**GIVEN, "q": "Q", "a": "AA"}) == given


def test_options_keep_their_defaults():
    def score(text, answer, target_length=100, correct_bonus=2.0, level=0):
        return target_length, correct_bonus, level

    assert called(score) == (100, 2.0, 5)  # level is a column


@pytest.mark.parametrize("parameters", [("q", "a"), ("y_true", "x"), ("targets", "other")])
def test_without_a_completion_a_function_is_refused(parameters):
    with pytest.raises(ConfigError, match="completion"):
        bind("mine.score", named(*parameters), ["q", "a"], 1.5)


@pytest.mark.parametrize("first", ["prompt", "answer", "ground_truth", "reference", "data_source"])
def test_functions_need_a_completion_parameter(first):
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
    own, before = bind("mine.score", score, [], 0.2), limited_process.count_ended()
    rows = [{"completion": one, "answer": "ab"} for one in (text, "ab", text)]
    assert own.call_each(rows) == [0.0, 1.0, 0.0]
    assert limited_process.count_ended() == before + 2


def test_of_lists_each_is_scored_alone_then(monkeypatch):
    monkeypatch.setattr("common.tasks.functions.FIRST_SECONDS", 0.0)
    own, before = bind("mine.score", of_lists, ["answer"], 0.2), limited_process.count_ended()
    columns = {"completions": ["x", "hangs", "y"], "answer": ["x", "x", "x"]}
    assert own.call_lists(columns, 3) == [1.0, 0.0, 0.0]
    assert limited_process.count_ended() == before + 1


def test_one_that_waits_is_ended_too():
    with (
        pytest.raises(limited_process.TooLongError),
        limited_process.limited(1.0, wait_seconds=0.2),
    ):
        threading.Event().wait(600)


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


# --- rewards as people write them


NUMBERS = itertools.count()


@pytest.fixture
def rewarded(tmp_path, monkeypatch):
    """Return a task with functions of a module, and its first example."""
    rows = [{"q": f"{n} and 1", "a": f"{n + 1}", "level": n} for n in range(10)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.syspath_prepend(str(tmp_path))
    node = OmegaConf.to_container(OmegaConf.load(ROOT / "conf/task/custom.yaml"))
    assert isinstance(node, dict)
    fields = {"prompt_field": "q", "answer_field": "a", "path": str(tmp_path / "rows.jsonl")}

    def make(text, *names, **settings):
        module = f"mine_{next(NUMBERS)}"  # a module is imported once
        (tmp_path / f"{module}.py").write_text(text)
        own = {"rewards": {f"{module}.{name}": 1.0 for name in names}, "reward": None}
        task = build(node | fields | own | settings)
        return task, task.examples("test")[0]

    return make


@pytest.mark.parametrize(
    ("function", "scores"),
    [
        ("def f(completion): return len(completion)", [1, 3, 0]),
        ("def f(text): return -len(text)", [-1, -3, 0]),
        ("def f(text, most=2): return min(most, len(text))", [1, 2, 0]),
        ("def f(completion, answer): return completion == '3'", [1, 0, 0]),
        ("def f(completion, answer): return f'{len(completion) / 2}'", [0.5, 1.5, 0]),
        (
            "from fractions import Fraction as F\ndef f(completion): return F(len(completion), 2)",
            [0.5, 1.5, 0],
        ),
        (
            "from decimal import Decimal\ndef f(completion): return Decimal(len(completion))",
            [1, 3, 0],
        ),
        ("import numpy\ndef f(completion): return numpy.float32(len(completion))", [1, 3, 0]),
        ("import numpy\ndef f(completion): return numpy.array([len(completion)])", [1, 3, 0]),
        ("import torch\ndef f(completion): return torch.tensor([[1.5]])", [1.5, 1.5, 1.5]),
        ("def f(completion): return [31.0]", [31, 31, 31]),
        ("async def f(completion): return len(completion)", [1, 3, 0]),
        (
            "def f(data_source, solution_str, ground_truth, extra_info=None):\n"
            "    return {'score': len(solution_str), 'acc': True}",
            [1, 3, 0],
        ),
        ("def f(completions, **columns): return [len(c) for c in completions]", [1, 3, 0]),
        ("async def f(completions, **columns): return [len(c) for c in completions]", [1, 3, 0]),
        (
            "import torch\ndef f(completions, level): return torch.tensor([2.0] * len(level))",
            [2, 2, 2],
        ),
        ("def f(completions, **rest): return (len(c) for c in completions)", [1, 3, 0]),
        ("def f(completions, **rest): return map(len, completions)", [1, 3, 0]),
        (
            "def f(prompts, completions, solution):\n"
            "    return [len(c) + len(s) for c, s in zip(completions, solution)]",
            None,
        ),
        (
            "import torch\ndef f(queries, prompts, labels):\n"
            "    values = [len(q) - len(p) for q, p in zip(queries, prompts)]\n"
            "    assert len(labels) == len(values)\n"
            "    return {'rewards': torch.tensor(values), 'extra_logs': {}}",
            [1, 3, 0],
        ),
    ],
)
def test_functions_and_numbers_as_people_write_them(rewarded, function, scores):
    task, example = rewarded(function, "f")
    texts = ["3", "abc", ""]
    wanted = [len(text) + len(example.answer) for text in texts] if scores is None else scores
    assert score_parts(task, [example] * 3, texts).rewards == pytest.approx(wanted)
    assert [task.reward(example, text) for text in texts] == pytest.approx(wanted)


def test_asynchronous_functions_wait_side_by_side(rewarded):
    text = (
        "import asyncio\n"
        "met = asyncio.Barrier(60)\n"  # one after the other would never meet
        "async def f(completion):\n"
        "    await asyncio.wait_for(met.wait(), 60)\n"
        "    return 1.0\n"
    )
    task, example = rewarded(text, "f")
    assert score_parts(task, [example] * 60, ["a"] * 60).rewards == [1.0] * 60


def test_one_number_per_batch_is_refused(rewarded):
    task, example = rewarded("def f(completions, **rest): return 0.5", "f")
    with pytest.raises(ConfigError, match=r"returned one number, 0\.5 .* for 2 completions"):
        score_parts(task, [example] * 2, ["a", "b"])


RAISES = """
def f(completion):
    if completion == "bad":
        raise KeyError("no such thing")
    return 1.0
async def g(completion):
    return f(completion)
def h(completions, **columns):
    return [f(c) for c in completions]
"""


@pytest.mark.parametrize("name", ["f", "g", "h"])
def test_raising_functions_are_named_with_their_row(rewarded, name):
    task, example = rewarded(RAISES, name)
    with pytest.raises(ConfigError) as raised:
        score_parts(task, [example] * 2, ["bad", "good"])
    said = str(raised.value)
    for part in (f".{name} raised KeyError", ".py:4", "'bad'", repr(example.question)):
        assert part in said
    assert "task.reward_errors=skip" in said


@pytest.mark.parametrize("name", ["f", "g", "h"])
def test_a_row_that_fails_has_no_score_on_request(rewarded, name, caplog):
    task, example = rewarded(RAISES, name, reward_errors="skip")
    with caplog.at_level("WARNING", logger="clutch"):
        scored = score_parts(task, [example] * 3, ["good", "bad", "good"])
    assert scored.rewards == [1.0, None, 1.0]
    assert caplog.text.count("has no score there") == 1


def test_completions_that_are_texts_are_why_messages_cannot_be_read(rewarded):
    text = "def f(completions, **rest): return [len(c[0]['content']) for c in completions]"
    task, example = rewarded(text, "f")
    with pytest.raises(ConfigError, match="Completions are texts here, as the model has no chat"):
        score_parts(task, [example], ["abc"])
    task.templated = True
    assert score_parts(task, [example], ["abc"]).rewards == [3]


LOGS = """
def f(completions, log_metric=None, log_extra=None, trainer_state=None, **columns):
    log_metric("length", sum(map(len, completions)) / len(completions))
    log_extra("first", [text[:1] or None for text in completions])
    return [trainer_state.global_step / trainer_state.max_steps] * len(completions)
def g(**kwargs):
    kwargs["log_metric"]("calls", 1)
    return [float(len(text)) for text in kwargs["completions"]]
def h(completion, log_metric, trainer_state):
    log_metric("length", len(completion))
    if completion == "bad":
        raise ValueError(completion)
    return float(trainer_state.global_step)
def i(completions, log_extra):
    log_extra("first", ["a"])
    return [0.0] * len(completions)
def j(completions, log_metric):
    log_metric("share", "a half")
    return [0.0] * len(completions)
def k(completions, log_metric):
    log_metric("share", float("nan"))
    return [0.0] * len(completions)
"""
ALONE = Context(0, 1, Device(torch.device("cpu"), "cpu", 1.0, False), Path())


@pytest.mark.parametrize("kind", ["serial", "threads", "processes"])
def test_functions_log_numbers_and_columns_and_read_the_step(rewarded, kind):
    task, example = rewarded(LOGS, "f", "g")
    scorer = Scorer(task, ScoringConfig(kind=kind, workers=2, timeout_seconds=60), steps=8)
    try:
        scored = scorer.submit([example] * 3, ["3", "abc", ""], step=2).result()
        names = list(task.components)
        assert scored.components == {names[0]: [0.25] * 3, names[1]: [1, 3, 0]}
        assert scored.logged.columns == {"first": ["3", "a", None]}
        calls = 1 if kind == "serial" else 2
        means = scorer.take_logged(ALONE)["logged"]
        assert means == {"length": pytest.approx({1: 4 / 3, 2: 1}[calls]), "calls": 1}
        assert scorer.take_logged(ALONE) == {}
        held_out = scorer.submit([example], ["3"]).result()  # at the end, and not logged
        assert held_out.components[names[0]] == [1]
        assert scorer.take_logged(ALONE) == {}
    finally:
        scorer.close()


def test_a_function_of_one_completion_logs_too(rewarded):
    task, example = rewarded(LOGS, "h", reward_errors="skip")
    scored = score_parts(task, [example] * 2, ["abc", "bad"], TrainerState(3, None))
    assert scored.rewards == [3, None]
    assert scored.logged.metrics == {"length": [3, 3]}


def test_columns_stay_with_their_rows_if_one_fails(rewarded):
    text = (
        "def f(completions, log_extra):\n"
        "    log_extra('text', completions)\n"
        "    if 'bad' in completions:\n"
        "        raise ValueError\n"
        "    return [1.0] * len(completions)\n"
    )
    task, example = rewarded(text, "f", reward_errors="skip")
    scored = score_parts(task, [example] * 3, ["a", "bad", "c"])
    assert scored.rewards == [1, None, 1]
    assert scored.logged.columns == {"text": ["a", None, "c"]}


@pytest.mark.parametrize(("name", "why"), [("i", "1 values for 2 completions"), ("j", "no number")])
def test_what_cannot_be_logged_names_the_function(rewarded, name, why):
    task, example = rewarded(LOGS, name)
    with pytest.raises(ConfigError, match=rf"\.{name} calls log_.*{why}"):
        score_parts(task, [example] * 2, ["a", "b"])


def test_a_metric_that_is_not_finite_is_left_out(rewarded):
    task, example = rewarded(LOGS, "k")
    assert score_parts(task, [example] * 2, ["a", "b"]).logged.metrics == {}


def test_nothing_but_keywords_is_called_as_in_trl(rewarded):
    text = "def f(**kwargs): return [float(len(x)) for x in kwargs['completion_ids']]"
    task, example = rewarded(text, "f")
    task.encode = lambda texts: [[7] * (2 * len(text)) for text in texts]
    assert score_parts(task, [example] * 2, ["abc", ""]).rewards == [6, 0]


OF_VERL = """
import json
def compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    assert not kwargs
    rows = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
    return [{"score": float(said in truth), "acc": 1} for _, said, truth, _ in rows]
def one(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == json.dumps(ground_truth))
def each(completion, answer):
    return float(completion == answer)
def lists(completions, solution, log_extra):
    log_extra("said", completions)
    return [float(c == s) for c, s in zip(completions, solution)]
"""


def test_verls_functions_of_a_batch_and_several_answers(rewarded, tmp_path):
    rows = [{"q": f"{n}?", "a": [f"{n}", f"{n}.0"]} for n in range(10)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    names = ("compute_score", "one", "each", "lists")
    task, example = rewarded(OF_VERL, *names)
    first, second = example.extra["row"]["a"]
    texts = [first, second, "no", json.dumps([first, second])]
    scored = score_parts(task, [example] * 4, texts)
    batch, one, each, lists = scored.components.values()
    assert batch == each == lists == [1, 1, 0, 0]  # the best of the right answers
    assert one == [0, 0, 0, 1]  # verl's functions get the list
    assert scored.logged.columns == {"said": texts}


def test_verls_functions_get_an_object_as_the_file_has_it(rewarded, tmp_path):
    truth = {"target": 5, "numbers": [2, 3]}
    rows = [{"q": f"{n}?", "reward_model": {"ground_truth": truth}} for n in range(10)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task, example = rewarded(OF_VERL, "one", answer_field=None)
    assert score_parts(task, [example] * 2, [json.dumps(truth), "5"]).rewards == [1, 0]


def test_verls_functions_get_a_text_without_a_column_of_answers(rewarded, tmp_path):
    rows = [{"q": f"{n}?", "reward_model": {"ground_truth": f"{n} %"}} for n in range(10)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task, example = rewarded(OF_VERL, "compute_score", "one", answer_field=None)
    truth = example.extra["row"]["reward_model"]["ground_truth"]
    batch, one = score_parts(task, [example] * 2, [truth, json.dumps(truth)]).components.values()
    assert (batch, one) == ([1, 0], [0, 1])


def test_the_reward_of_the_task_has_a_weight(rewarded):
    text = "def f(completion): return 0.0"
    task, example = rewarded(text, "f", reward="exact", partial=0.0, reward_weight=3.0)
    assert task.reward(example, example.answer) == pytest.approx(0.75)
    task, example = rewarded(text, "f", reward="exact", partial=0.0, reward_weight=0.0)
    assert score_parts(task, [example], [example.answer]).components["exact"] == [1]
    assert task.reward(example, example.answer) == 0


def test_functions_of_tokens_get_those_of_the_model(rewarded):
    task, example = rewarded("def f(completion_ids, **rest): return [len(completion_ids[0])]", "f")
    task.encode = lambda texts: [[7] * (2 * len(text)) for text in texts]
    assert task.reward(example, "abc") == 6


def test_own_rewards_alone_need_no_answer_and_lead_the_measures(rewarded):
    task, example = rewarded(
        "def f(completion): return float(len(completion))", "f", answer_field=None, right_at=4.0
    )
    assert example.answer == ""
    measured = task.metrics([example] * 2, ["abcd", "ab"])
    assert measured == {"reward": pytest.approx(3.0), "right": pytest.approx(50.0)}


@pytest.mark.parametrize(
    ("function", "given"),
    [
        ("def f(completion, a): return float(a)", True),
        ("def f(completions, a, **rest): return [float(x) for x in a]", True),
        ("def f(completion, answer): return 1.0", False),
        ("def f(solution_str, ground_truth): return 1.0", False),
        ("def f(x, y): return 1.0", False),
        ("def f(queries, prompts, labels): return [1.0]", False),
    ],
)
def test_functions_without_answers_need_a_column(rewarded, function, given):
    if given:
        task, example = rewarded(function, "f", answer_field=None)
        assert task.reward(example, "?") == float(example.extra["row"]["a"])
    else:
        with pytest.raises(ConfigError, match=r"takes a right answer .* and the rows have none"):
            rewarded(function, "f", answer_field=None)


@pytest.mark.parametrize("returned", ["'good'", "[1.0, 2.0]", "(1.0, {})", "{'reward': 1.0}"])
def test_what_is_no_number_names_the_function_and_the_row(rewarded, returned):
    task, example = rewarded(f"def f(completion): return {returned}", "f")
    with pytest.raises(ConfigError, match=r"\.f returned .* on 'text', for the prompt"):
        task.metrics([example], ["text"])


@pytest.mark.parametrize(
    "settings",
    [{"reward": None}, {"right_at": 2.0}, {"reward_errors": "skip"}, {"reward_weight": 2.0}],
)
def test_settings_of_functions_need_one(rewarded, settings):
    key = next(iter(settings))
    with pytest.raises(ConfigError, match=rf"task\.{key}="):
        rewarded("", **({"rewards": {}, "reward": "exact"} | settings))
