"""GSM8K: where the answer stands in a completion, exact comparison, and every error of its data."""

import gzip
import json
import math
import sys
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import ConfigError, ScoringConfig, shipped
from common.scoring import Scorer
from common.task import Example, Task, build
from common.tasks import numbers
from plugins.tasks.gsm8k import Gsm8k

SETTINGS: dict[str, Any] = dict(shipped("task/gsm8k.yaml"))
ROWS = [
    {
        "question": f"Tim has {n} boxes of 1,000 pens. How many?",
        "answer": f"{n}*1000=<<{n}*1000={n}000>>\n#### {n},000",
    }
    for n in range(1, 6)
]

HOSTILE = [
    "",
    " ",
    "\n\n",
    "\0",
    "\ud800",
    "####",
    "####" * 2_500,
    "x" * 10_000,
    "9" * 10_000,
    "#### " + "4" * 10_000,
    "1," * 5_000,
    "{" * 10_000,
    "\\boxed{" * 2_000,
    "\\boxed{42",
    "#### ٤٢",
    "#### 1/0",
    "#### 4e1",
    "#### 9**9**9",
    "#### forty-two",
    "👩‍👩‍👧‍👦" * 50,
    '{"answer": null}',
    "__import__('os').abort()",
    "%s {question} ${oc.env:HOME} \\1",
]


def folder(
    path, train=ROWS, test=({"question": "What is 6*7?", "answer": "6*7\n#### 42"},), end=""
):
    for name, rows in (("train", train), ("test", test)):
        text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows).encode()
        (path / f"{name}.jsonl{end}").write_bytes(gzip.compress(text) if end else text)
    return str(path)


def make(**changed: Any) -> Gsm8k:
    task = build(SETTINGS | changed)
    assert isinstance(task, Gsm8k)
    return task


def error(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


@pytest.fixture
def task(tmp_path) -> Gsm8k:
    return make(path=folder(tmp_path))


def example(value: str) -> Example:
    return Example(0, "", value, {"value": Fraction(value)})


@pytest.mark.parametrize("end", ["", ".gz"])
def test_rows(tmp_path, end):
    path = folder(tmp_path, end=end)
    plain: Task = build(SETTINGS | {"path": path})
    train, test = plain.examples("train"), plain.examples("test")
    assert [(e.id, e.answer, e.extra["value"]) for e in train] == [
        (n - 1, f"{n},000", 1000 * n) for n in range(1, 6)
    ]
    assert test[0].question == "What is 6*7?"
    assert (
        plain.prompt(test[0])
        == 'Solve the problem step by step. End with a line "#### <number>".\n\nProblem: What is'
        " 6*7?\n\nSolution:"
    )
    assert not hasattr(plain, "pretraining")
    assert make(path=path, template="{x} {question}").prompt(test[0]) == "{x} What is 6*7?"


def test_train_rows_with_test_questions_are_dropped(tmp_path):
    path = folder(tmp_path, train=[*ROWS, {"question": "What is 6*7?", "answer": "#### 42"}])
    assert [e.question for e in make(path=path).examples("train")] == [
        row["question"] for row in ROWS
    ]


@pytest.mark.parametrize(
    ("completion", "found"),
    [
        ("So 6*7 = 42\n#### 42", "42"),
        ("#### 41\nno\n####  $42.00 pens\nQuestion: 7", "$42.00 pens"),
        ("\\boxed{41} and \\boxed{\\frac{1}{2}} or 7", "\\frac{1}{2}"),
        ("\\boxed{41} #### 42", "42"),
        ("The answer is 42.", "42"),
        ("12 pens cost $1,234.50.", "$1,234.50"),
        ("The field has 12 m2.", "12"),
        ("It takes 1,000 cm3", "1,000"),
        ("so n2.5", None),
        ("a grid of 4x3", None),
        ("from 50 to -3", None),
        ("The answer is 5e3.", "5e3"),
        ("It is 3 × 10^8 m/s", "3 × 10^8"),
        ("in 2 1/2 hours", "2 1/2"),
        ("there are 1 234 of them", "1 234"),
        ("7-3", None),
        ("the answer is $\\frac{3}{4}$.", "$\\frac{3}{4}"),
        ("The answer is - 31.", "- 31"),
        ("no number", None),
        ("####\n42", "42"),
        ("42 ####", None),  # the mark decides
        ("42 \\boxed{", None),
    ],
)
def test_extraction(completion, found):
    assert numbers.find_answer(completion) == found


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("42.0", 42),
        ("$1,234.50", Fraction(2469, 2)),
        ("-5", -5),
        ("−5", -5),
        ("-$5", -5),
        ("$-5", -5),
        ("$ 5", 5),
        ("\\$5", 5),
        ("50%", 50),
        (".5", Fraction(1, 2)),
        ("3/4", Fraction(3, 4)),
        ("-\\frac{3}{4}", Fraction(-3, 4)),
        ("\\frac12", Fraction(1, 2)),
        ("\\dfrac{1}2", Fraction(1, 2)),
        ("1\\frac{1}{2}", Fraction(3, 2)),
        ("1.5\\frac{1}{2}", None),  # two numbers
        ("-2 \\frac 34", Fraction(-11, 4)),
        ("2 1/2", Fraction(5, 2)),
        ("1 234", 1234),
        ("12 345 678.5", Fraction(24691357, 2)),
        ("2 1/2.", Fraction(5, 2)),
        ("1 234, or so", 1234),
        ("5 apples", 5),
        ("3 12-packs", 3),
        ("42!", None),  # a factorial
        *(
            (text, None)
            for text in (
                *("2\\sqrt{3}", "\\sqrt{2}", "√2", "2\\pi", "2π", "5 - 3", "5 to 7", "5; 6; 7"),
                *("5 6 7 8 9", "5 \\text{ or } 6", "10²", "12x", "42 thousands", "42 millionths"),
                *(
                    "\\sqrt[3]{8}",
                    "\\frac{1}{\\sqrt{2}}",
                    "42\\text{ thousand}",
                    "1.000.000",
                    "1/2/3",
                ),
            )
        ),
        ("0.1", Fraction(1, 10)),  # which no float is
        ("12,345,678", 12345678),
        ("1{,}000", 1000),
        ("x = 7 apples", 7),
        ("2500 + 2500 = 5000", 5000),
        ("1\\,234", 1234),
        ("5e3", 5000),
        ("- 5", -5),
        ("1 / 2", Fraction(1, 2)),
        *(
            (text, None)
            for text in ("42 thousand", "42 * 10", "42, 43", "42 or 43", "12:30", "3-4")
        ),
        ("42e9", 42 * 10**9),
        ("7, which is prime", 7),
        ("1/0", None),
        ("1" * 41, None),
        ("apples", None),
        ("", None),
    ],
)
def test_numbers_are_exact(text, value):
    assert numbers.read(text) == value


def test_rewards_and_measures(task):
    rows = [example("42"), example("0.3"), example("1000"), example("7")]
    completions = ["#### 42", "\\boxed{3/10}", "it is 1,000.", "no idea"]
    assert task.rewards(rows, completions) == [1, 1, 1, 0]
    assert task.metrics(rows, completions) == {"accuracy": 75, "answer_rate": 75, "unread": 0}
    unread = task.metrics(rows, ["#### 5 or 6", "3-4", "\\boxed{3,5}", "#### 7"])
    assert unread == {"accuracy": 25, "answer_rate": 75, "unread": 75}
    assert next(iter(task.metrics(rows, completions))) == "accuracy"
    assert task.reward(example("0.3"), "#### 0.30000000000000004") == 0
    assert task.reward(example("9007199254740993"), "#### 9007199254740992") == 0  # equal as floats
    assert task.reward(example("42"), "#### -42") == 0
    for split in ("train", "test"):
        for row in task.examples(split):
            assert task.reward(row, f"#### {row.answer}") == 1


@pytest.mark.parametrize("completion", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_completions_earn_nothing(task, completion):
    for value in ("42", "0", "-7"):
        assert task.reward(example(value), completion) == 0
    assert task.metrics([example("42")], [completion])["accuracy"] == 0


def test_very_long_texts(task):
    for text in (
        "9" * 10**6,
        "1," * 10**5,
        "####" * 10**5,
        "\\boxed{" * 10**5,
        "1/" * 10**5,
        "-$" * 10**5,
    ):
        assert task.reward(example("42"), text) == 0


@given(st.text(alphabet="0123456789.,-/$%#\\boxed{}frac \n", max_size=60) | st.text(max_size=60))
def test_any_text_scores_0_or_1(completion):
    task = Gsm8k.__new__(Gsm8k)
    task.check = "numeric"
    reward = task.reward(example("42"), completion)
    assert reward in (0.0, 1.0)
    assert math.isfinite(reward)


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_pools_give_the_serial_scores(task, kind):
    rows = [example(str(n)) for n in range(40)]
    completions = [f"#### {n if n % 3 else n + 1}" for n in range(40)]
    scorer = Scorer(task, ScoringConfig(kind=kind, workers=2, timeout_seconds=60))
    assert scorer.submit(rows, completions).result().rewards == [
        float(n % 3 > 0) for n in range(40)
    ]
    scorer.close()


@pytest.mark.parametrize("kind", ["serial", "threads"])
def test_equal_texts_of_an_example_are_scored_once(task, kind, monkeypatch):
    """Where a task promises equal scores; another one is asked about every row."""
    asked, reward = [], Gsm8k.reward
    monkeypatch.setattr(Gsm8k, "reward", lambda *a: asked.append(a[2]) or reward(*a))
    four, five = example("4"), example("5")
    rows = [four, five, four, four, five, five]
    texts = ["#### 4", "#### 4", "#### 4", "#### 5", "#### 5", "#### 4"]
    wanted = [1, 0, 1, 0, 1, 0]
    scorer = Scorer(task, ScoringConfig(kind=kind, workers=2, timeout_seconds=60))
    assert scorer.submit(rows, texts).result().rewards == wanted
    assert sorted(asked) == ["#### 4", "#### 4", "#### 5", "#### 5"]
    assert scorer.submit([], []).result().rewards == []
    asked.clear()
    monkeypatch.setattr(task, "repeatable", False, raising=False)
    assert scorer.submit(rows, texts).result().rewards == wanted
    assert len(asked) == 6
    scorer.close()


def test_only_who_says_so_promises_equal_scores():
    class Own(Gsm8k):
        """A user's, whose rewards may draw."""

    class Sure(Own):
        repeatable = True

    assert (Gsm8k.repeatable, Own.repeatable, Sure.repeatable) == (True, False, True)


# --- math-verify


def test_math_verify_that_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    assert (
        error(make, path=folder(tmp_path), check="math_verify")
        == "task.check='math_verify' needs the package math-verify. Install it: pip install"
        " -e '.[math]'. Or use task.check=numeric."
    )


def test_math_verify_is_asked_where_the_numbers_differ(tmp_path, math_verify):
    math_verify("target == '$\\\\sqrt{16}$' or target == '$2^2$' and 1 / 0")
    task = make(path=folder(tmp_path), check="math_verify")
    four = example("4")
    completions = [
        "#### 4.0",
        "\\boxed{\\sqrt{16}}",
        "\\boxed{5}",
        "\\boxed{boom}",
        "\\boxed{2^2}",
        "\\boxed{9!}",
    ]
    assert task.rewards([four] * 6, completions) == [1, 1, 0, 0, 0, 0]
    assert math_verify.asked == [
        ["$4$", "$\\sqrt{16}$"],
        ["$4$", "$5$"],
        ["$4$", "$2^2$"],
    ]  # words, factorials and equal numbers never get there


def test_the_real_math_verify(tmp_path):
    pytest.importorskip("math_verify")
    task = make(path=folder(tmp_path), check="math_verify")
    assert task.reward(example("4"), "\\boxed{\\sqrt{16}}") == 1
    assert task.reward(example("0.5"), "\\boxed{\\sin(\\pi/6)}") == 1
    assert task.reward(example("4"), "\\boxed{\\sqrt{17}}") == 0
    scorer = Scorer(task, ScoringConfig(kind="threads", workers=2, timeout_seconds=60))
    scored = scorer.submit([example("4")] * 2, ["\\boxed{\\sqrt{16}}", "\\boxed{x}"]).result()
    scorer.close()
    assert scored.rewards == [1, 0]
    for completion in HOSTILE:
        assert task.reward(example("42"), completion) == 0


# --- errors


def test_setting_errors(tmp_path):
    assert (
        error(make)
        == "task.path is not set, and task=gsm8k has no data of its own. Give a folder that holds"
        " train.jsonl and test.jsonl, or the folder of the hub, or one file, with the fields"
        " question and answer: task.path=FOLDER."
    )
    path = str(tmp_path)
    assert error(make, path=path).startswith(
        f"task.path={path!r} holds no rows; tried {tmp_path}, where there is nothing. Give a folder"
        " with train.jsonl or another file"
    )
    folder(tmp_path)
    assert (
        error(make, path=path, template="{x}")
        == "task.template={x} does not hold {question}. Add it."
    )
    assert error(make, path=path, check="number").startswith(
        "task.check=number is not a choice. Did you mean 'numeric'?"
    )
    few = folder(tmp_path, train=ROWS[:1])
    assert error(make, path=few).startswith(
        f"task.path={few!r} leaves 1 train and 1 test rows; 0 train rows also stand"
    )


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (
            {"question": "Why?", "answer": "It is 42"},
            (
                "task.path={path}: the answer in {file} line 2 has no final line '#### NUMBER': 'It"
                " is 42'. "
            ),
        ),
        (
            {"question": "Why?", "answer": "#### none"},
            (
                "task.path={path}: the answer in {file} line 2 has no final line '#### NUMBER':"
                " '#### none'. "
            ),
        ),
        (
            {"question": "Why?"},
            "field='answer' is not a field of {file} line 2. Fields there: question.",
        ),
        ({"question": " ", "answer": "#### 1"}, "field='question' is empty in {file} line 2."),
        ("[1]", "task.path={file}: line 2 is JSON, but list and no object."),
    ],
)
def test_a_broken_row_is_named_by_file_and_line(tmp_path, row, text):
    path = folder(tmp_path, train=[ROWS[0], row, *ROWS[1:]])
    assert error(make, path=path).startswith(
        text.format(path=repr(path), file=repr(f"{path}/train.jsonl"))
    )


@pytest.mark.parametrize("folder_of", ["", "main"])
def test_the_folder_of_the_hub(tmp_path, folder_of):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for config in ("main", "socratic"):
        (tmp_path / config).mkdir()
        for split, rows in (("train", ROWS), ("test", [{"question": "6*7?", "answer": "#### 42"}])):
            path = tmp_path / config / f"{split}-00000-of-00001.parquet"
            parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    task = make(path=str(tmp_path / folder_of))
    assert [e.question for e in task.examples("train")] == [row["question"] for row in ROWS]
    assert [e.answer for e in task.examples("test")] == ["42"]
    file = make(path=str(tmp_path / "main" / "train-00000-of-00001.parquet"))
    assert (len(file.examples("train")), len(file.examples("test"))) == (4, 1)


def test_rows_without_a_final_answer_are_left_out(tmp_path):
    path = folder(tmp_path, train=[*ROWS, {"question": "Why?", "answer": "It is 42"}])
    assert "1 of 6 rows are incomplete" in error(make, path=path)
    assert len(make(path=path, incomplete="skip").examples("train")) == len(ROWS)
