"""Countdown and its evaluator: no text is run, none raises, and the values are Python's own."""

import gzip
import itertools
import json
import math
import operator
import pickle
import random
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import ConfigError, ScoringConfig, shipped
from common.scoring import Scorer, score
from common.task import Example, Task, build
from common.tasks.safe_arithmetic import DIGITS, LONGEST, evaluate
from plugins.tasks.countdown import Countdown, expression, solve

SETTINGS: dict[str, Any] = dict(shipped("task/countdown.yaml"))

HOSTILE = [
    "",
    " ",
    "\n\n",
    "\0",
    "7*3\0+12",
    "\ud800",
    "x" * 10_000,
    "(" * 10_000,
    "7+" * 5_000,
    "9" * 10_000,
    "7*3+",
    "(7*3+12",
    "7*3+12)",
    "7 3 12",
    "٧*٣+١٢",  # digits, but not ours
    "7*3+12 = x",
    '{"answer": "7*3+12"}',
    "[7*3+12]",
    "<answer></answer>",
    "<answer>7*3+12",
    "</answer>7*3+12<answer>",
    "__import__('os').abort()",
    "7*3+12;1",
    "9**9**9",
    "1/0",
    "👩‍👩‍👧‍👦" * 50,
    "%s {target} ${oc.env:HOME} \\1",
]

LETTERS = f"not whole numbers of up to {DIGITS} digits with + - * / ( )"


def make(**changed: Any) -> Countdown:
    task = build(SETTINGS | changed)
    assert isinstance(task, Countdown)
    return task


def error(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


@pytest.fixture(scope="module")
def task() -> Countdown:
    return make()


def example(*numbers: int, target: int) -> Example:
    return Example(0, "", "", {"numbers": numbers, "target": target})


PROBLEM = example(3, 7, 12, target=33)


# --- the evaluator

trees = st.recursive(
    st.integers(0, 10**DIGITS - 1),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from("+-*/"), inner, inner), st.tuples(st.sampled_from("+-"), inner)
    ),
    max_leaves=12,
)
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def written(tree: Any) -> tuple[str, Fraction, list[int]]:
    """Text (every operation in parentheses), value and numbers of a tree; ZeroDivisionError where
    it has no value.
    """
    if isinstance(tree, int):
        return str(tree), Fraction(tree), [tree]
    sign, *parts = tree
    texts, values, numbers = zip(*map(written, parts), strict=True)
    if len(parts) == 1:
        return f"({sign}{texts[0]})", values[0] if sign == "+" else -values[0], numbers[0]
    return f"({texts[0]} {sign}{texts[1]})", OPERATORS[sign](*values), numbers[0] + numbers[1]


@given(trees)
def test_a_tree_has_the_value_that_fractions_give(tree):
    try:
        text, value, numbers = written(tree)
    except ZeroDivisionError:
        return
    found = evaluate(text)
    if len(text) > LONGEST:
        assert found.problem == f"longer than {LONGEST} characters"
    else:
        assert (found.value, list(found.numbers), found.problem) == (value, numbers, None)


def test_precedence_is_pythons():
    """Without parentheses: what Python gives for the same text with each number as a Fraction."""
    draw = random.Random(0)
    for _ in range(2_000):
        numbers = [draw.randint(1, 99) for _ in range(draw.randint(1, 8))]
        signs = [draw.choice("+-*/") for _ in numbers[1:]]
        spell = [f"Fraction({n})" for n in numbers]
        expected = eval(
            "".join(itertools.chain(*itertools.zip_longest(spell, signs, fillvalue="")))
        )
        text = "".join(
            itertools.chain(*itertools.zip_longest(map(str, numbers), signs, fillvalue=""))
        )
        assert evaluate(text).value == expected, text


@given(st.text(alphabet="0123456789+-*/() .=e^\0x", max_size=60) | st.text(max_size=60))
def test_any_text_has_a_value_or_a_reason(text):
    found = evaluate(text)
    assert (found.value is None) == (found.problem is not None)
    assert found.value is not None or found.numbers == ()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("1" * 10**6, f"longer than {LONGEST} characters"),
        ("(" * 10**6, f"longer than {LONGEST} characters"),
        *(
            (text, "no expression")
            for text in ("9**9**9", "7//2", "()", "1+", "1 2", "(1", "1)", "1(2)")
        ),
        ("7/(3-3)", "a division by zero"),
        *(
            (text, LETTERS)
            for text in ("9^9^9", "1" * (DIGITS + 1), "1.5+1", "1e5", "", "1\0", "١")
        ),
    ],
)
def test_what_is_refused(text, problem):
    found = evaluate(text)
    assert (found.value, found.numbers, found.problem) == (None, (), problem)


def test_the_limits_themselves_are_allowed():
    assert evaluate(f"{'(' * 99}1{')' * 99}").value == 1
    assert evaluate(f"{'-' * 199}1").value == -1
    assert evaluate("007+0").numbers == (7, 0)
    assert evaluate("9" * DIGITS).value == 10**DIGITS - 1
    assert evaluate(f"1{'+1' * 99}{' ' * (LONGEST - 199)}").value == 100
    assert evaluate("7×3 − 12÷5").value == Fraction(93, 5)


# --- the answer in a completion


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        (" 7*3+12", "7*3+12"),
        ("\n 7*3+12 = 33\nand so on", "7*3+12"),
        ("7*3+12=33.0=33.", "7*3+12"),
        ("7*3+12 = 21+12", "7*3+12 = 21+12"),
        ("so <answer>1</answer>, no: <answer> 7*3+12 = 33 </answer> 9", "7*3+12"),
        ("1+1 <answer>7", "1+1 <answer>7"),
        ("", ""),
    ],
)
def test_extraction(completion, text):
    assert expression(completion) == text


# --- components, reward, measures


def scores(task: Countdown, problem: Example, completion: str) -> dict[str, float]:
    return {
        name: component([problem], [completion])[0] for name, component in task.components.items()
    }


@pytest.mark.parametrize("said", ["12+7*3.", "12+7*3 = 33.", "12+7*3 = 33!"])
def test_what_ends_a_sentence_is_no_part_of_an_expression(task, said):
    assert set(scores(task, PROBLEM, f"<answer>{said}</answer>").values()) == {1}


def test_components(task):
    assert scores(task, PROBLEM, " 12+7*3 = 33") == {
        "right": 1,
        "numbers": 1,
        "valid": 1,
        "close": 1,
    }
    assert scores(task, PROBLEM, "12+7-3") == {
        "right": 0,
        "numbers": 1,
        "valid": 1,
        "close": 33 / (33 + 17),
    }
    assert scores(task, PROBLEM, "3*11") == {"right": 0, "numbers": 0, "valid": 1, "close": 0}
    assert scores(task, PROBLEM, "12+7*3*1") == {"right": 0, "numbers": 0, "valid": 1, "close": 0}
    assert scores(task, PROBLEM, "33") == {"right": 0, "numbers": 0, "valid": 1, "close": 0}
    assert task.reward(PROBLEM, "12+7*3") == 1
    twice = example(5, 5, 3, target=13)
    assert task.reward(twice, "5+5+3") == 1
    assert scores(task, twice, "5+3+3") == {"right": 0, "numbers": 0, "valid": 1, "close": 0}
    assert scores(task, example(8, 3, 3, target=8), "8/(3-8/3)")["right"] == 0
    assert (
        scores(task, example(8, 8, 3, 3, target=24), "8/(3-8/3)")["right"] == 1
    )  # exact: no rounding on the way


def test_use_all_false_lets_numbers_out():
    some = make(use_all=False, problems=100, test_problems=20)
    assert some.reward(example(3, 7, 12, target=19), "7+12") == 1
    assert scores(some, example(3, 7, 12, target=14), "7+7")["numbers"] == 0
    assert solve((3, 7, 12), 19, use_all=False) is not None
    assert solve((3, 7, 50), 10, use_all=True) is None
    assert solve((3, 7, 50), 10, use_all=False) == "7+3"


@pytest.mark.parametrize("completion", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.faults
def test_hostile_completions_earn_nothing(task, completion):
    assert task.reward(PROBLEM, completion) == 0
    assert task.metrics([PROBLEM], [completion])["solved"] == 0


@given(st.text(alphabet="37 12+-*/()=\n<answer>.", max_size=80))
def test_rewards_are_in_range(completion):
    reward = FEW.reward(PROBLEM, completion)
    assert math.isfinite(reward)
    assert 0 <= reward <= 1


FEW = make(problems=50, test_problems=20)


def test_measures(task):
    examples = [PROBLEM] * 4
    found = task.metrics(examples, ["12+7*3", "12+7+3", "1+1", ""])
    assert found == {"solved": 25, "valid": 75, "numbers": 50, "answered": 75}
    assert next(iter(found)) == "solved"


def test_one_by_one_batched_and_pooled_scores_are_equal():
    examples = [e for e in FEW.examples("train") for _ in range(3)]
    completions = [text for e in FEW.examples("train") for text in (e.answer, e.answer[:-1], "1+1")]
    alone = [FEW.reward(e, text) for e, text in zip(examples, completions, strict=True)]
    assert alone == FEW.rewards(examples, completions) == score(FEW, examples, completions)
    for kind in ("serial", "threads", "processes"):
        scorer = Scorer(FEW, ScoringConfig(kind=kind, workers=2, timeout_seconds=60))
        found = scorer.submit(examples, completions).result()
        scorer.close()
        assert found.rewards == alone
        assert set(found.components) == set(FEW.weights)


# --- problems


def keys(task: Countdown, split: str) -> list[tuple]:
    return [(*sorted(e.extra["numbers"]), e.extra["target"]) for e in task.examples(split)]


def test_it_is_a_task_and_its_yaml_makes_it(task):
    plain: Task = task
    assert plain.examples("test") == build(SETTINGS).examples("test")
    assert pickle.loads(pickle.dumps(FEW)).reward(PROBLEM, "12+7*3") == 1


def test_generated_problems_are_solvable_distinct_and_the_same_every_time(task):
    train, test = keys(task, "train"), keys(task, "test")
    assert (len(train), len(test)) == (8000, 500)
    assert len(set(train) | set(test)) == 8500
    for split in ("train", "test"):
        for row in task.examples(split):
            assert task.reward(row, row.answer) == 1
            assert all(1 <= number <= 20 for number in row.extra["numbers"])
            assert 1 <= row.extra["target"] <= 99
    assert task.prompt(task.examples("test")[0]) == TEST_PROMPT
    assert [e.id for e in task.examples("test")] == list(range(500))


# the very row, so that another machine or Python version that draws anew is noticed
TEST_PROMPT = "12 5 14 -> 31 =>"


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_pretraining_shows_right_ones_as_often_as_asked(share):
    teacher = make(problems=2000, test_problems=10, share_right=share)
    draw, right = random.Random(1), 0
    for row in teacher.examples("train"):
        prompt, completion = teacher.pretraining(row, draw)
        assert prompt == teacher.prompt(row)
        found = scores(teacher, row, completion)
        assert found["numbers"] == found["valid"] == 1
        right += found["right"] == 1
    assert abs(right / 2000 - share) <= 4 * math.sqrt(share * (1 - share) / 2000)


def test_larger_problems():
    large = make(numbers=6, largest_number=100, largest_target=999, problems=200, test_problems=20)
    draw = random.Random(0)
    for row in large.examples("train"):
        assert large.reward(row, row.answer) == 1
        assert 0 < large.reward(row, large.pretraining(row, draw)[1]) <= 1


def test_real_data(shared_data):
    folder = shared_data / "countdown"
    files = {"path": str(folder / "train.jsonl"), "test_path": str(folder / "test.jsonl")}
    real = make(**files, solution_field="solution")
    assert (len(real.examples("train")), len(real.examples("test"))) == (200, 1945)
    for split in ("train", "test"):
        rows = real.examples(split)
        assert real.rewards(rows, [e.answer for e in rows]) == [1.0] * len(rows)
    assert not set(keys(real, "train")) & set(keys(real, "test"))
    searched = make(**files)
    for row in searched.examples("train"):
        assert row.answer == ""
        found = solve(row.extra["numbers"], row.extra["target"], use_all=True)
        assert found is not None
        assert searched.reward(row, found) == 1
    teacher = make(**files, share_right=1.0)
    row = teacher.examples("train")[0]
    assert teacher.reward(row, teacher.pretraining(row, random.Random(0))[1]) == 1


ROWS = [
    {"numbers": [1, 2, n], "target": n + 3, "solution": f"1+2+{n} = {n + 3}"} for n in range(3, 23)
]


def rows_file(folder, rows, name="rows.jsonl.gz"):
    text = "\n".join(json.dumps(row) for row in rows).encode()
    (folder / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return str(folder / name)


def test_a_file_is_split_without_leaks(tmp_path):
    again = [
        row | {"numbers": row["numbers"][::-1]} for row in ROWS
    ]  # the same problems in another order
    alone = make(path=rows_file(tmp_path, ROWS + again), solution_field="solution")
    assert (len(alone.examples("train")), len(alone.examples("test"))) == (16, 4)
    assert not set(keys(alone, "train")) & set(keys(alone, "test"))
    two = make(
        path=rows_file(tmp_path, ROWS), test_path=rows_file(tmp_path, again[:5], "test.jsonl")
    )
    assert (len(two.examples("train")), len(two.examples("test"))) == (15, 5)
    renamed = [{"n": {"of": r["numbers"]}, "t": r["target"]} for r in ROWS]
    named = make(path=rows_file(tmp_path, renamed), numbers_field="n.of", target_field="t")
    assert keys(named, "test") == keys(make(path=rows_file(tmp_path, ROWS)), "test")


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (
            {"numbers": [1, 2]},
            "task.target_field='target' is not a field of {file} line 3. Fields there: numbers.",
        ),
        (
            {"numbers": [1], "target": 1},
            "task.numbers_field='numbers' in {file} line 3 is [1]. Give a list of 2 to 10 ",
        ),
        (
            {"numbers": [1, 0], "target": 1},
            "task.numbers_field='numbers' in {file} line 3 is [1, 0]. Give a list",
        ),
        (
            {"numbers": [1, True], "target": 1},
            "task.numbers_field='numbers' in {file} line 3 is [1, True]. Give a list",
        ),
        (
            {"numbers": "1 or 2", "target": 3},
            "task.numbers_field='numbers' in {file} line 3 is '1 or 2'. Give a list",
        ),
        (
            {"numbers": [1, 2], "target": 1.5},
            "task.target_field='target' in {file} line 3 is 1.5. Give a whole number",
        ),
        (
            {"numbers": [1, 2], "target": 3, "solution": "1*2"},
            (
                "task.solution_field='solution' in {file} line 3 is no solution for 3 from [1, 2]: "
                "it is 2 of [1, 2]. Fix or remove the row."
            ),
        ),
        (
            {"numbers": [1, 2], "target": 3, "solution": "exit()"},
            (
                "task.solution_field='solution' in {file} line 3 is no solution for 3 from [1, 2]:"
                f" {LETTERS}. Fix or remove the row."
            ),
        ),
    ],
)
def test_a_broken_row_is_named_by_file_and_line(tmp_path, row, text):
    path = rows_file(tmp_path, [*ROWS[:2], row])
    given = error(make, path=path, solution_field="solution" if "solution" in row else None)
    assert given.startswith(text.format(file=repr(path)))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {"test_path": "a"},
            "task.test_path='a' has no effect without task.path. Give it too.",
        ),
        (
            {"solution_field": "a"},
            "task.solution_field='a' has no effect without task.path. Give it too.",
        ),
        ({"share_right": 2}, "task.share_right=2 is too large. Give a value of at most 1."),
        (
            {"template": "{target}"},
            "task.template={target} does not hold {numbers}. Add it.",
        ),
        (
            {"weights": {"rigth": 1}},
            "task.weights.rigth is not a component. Components: right, numbers, valid, close.",
        ),
        (
            {"weights": {"right": 0}},
            "task.weights are all 0. Give one component a weight above 0.",
        ),
        ({"numbers": 11}, "task.numbers=11 is too large. Give a value of at most 10."),
        ({"numbers": 1}, "task.numbers=1 is too small. Give a value of at least 2."),
        (
            {"numbers": 2, "largest_number": 3},
            (
                "task.problems and task.test_problems ask for 8500 problems, but only 16 different"
                " ones were found with task.numbers=2, task.largest_number=3 and"
                " task.largest_target=99. Ask for fewer, or raise these."
            ),
        ),
    ],
)
def test_setting_errors(changed, text):
    assert error(make, **changed).startswith(text)


def test_rows_of_tinyzero(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"target": n + 5, "nums": [2, 3, n]} for n in range(1, 7)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "raw.parquet")
    made = [
        {
            "data_source": "countdown",
            "prompt": [{"role": "user", "content": "Reach it."}],
            "reward_model": {
                "style": "rule",
                "ground_truth": {"target": row["target"], "numbers": row["nums"]},
            },
        }
        for row in rows
    ]
    parquet.write_table(pyarrow.Table.from_pylist(made), tmp_path / "made.parquet")
    spaced = [f"{row['target']},[{' '.join(map(str, row['nums']))}]" for row in rows]
    (tmp_path / "spaced.csv").write_text("\n".join(["target,nums", *spaced]))
    commas = [f'{row["target"]},"{row["nums"]}"' for row in rows]
    (tmp_path / "commas.csv").write_text("\n".join(["target,nums", *commas]))
    truth = "reward_model.ground_truth"
    wanted = make(path=str(tmp_path / "raw.parquet"), numbers_field="nums").examples("train")
    assert wanted[0].extra["numbers"][:2] == (2, 3)
    for name in ("spaced.csv", "commas.csv"):
        found = make(path=str(tmp_path / name), numbers_field="nums")
        assert found.examples("train") == wanted
    found = make(
        path=str(tmp_path / "made.parquet"),
        numbers_field=f"{truth}.numbers",
        target_field=f"{truth}.target",
    )
    assert found.examples("train") == wanted


def test_settings_of_files_without_a_file_are_refused():
    for changed in ({"columns": ["a", "b"]}, {"format": {"encoding": "utf-8"}}):
        assert "has no effect without task.path" in error(make, **changed)


def test_countdown_reads_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    one, other = (make(path=str(tmp_path / f"rows.{kind}")) for kind in ("parquet", "jsonl"))
    assert one.examples("train") == other.examples("train")
    (tmp_path / "rows.data").write_bytes((tmp_path / "rows.parquet").read_bytes())
    unnamed = make(path=str(tmp_path / "rows.data"))
    assert unnamed.examples("train") == one.examples("train")
