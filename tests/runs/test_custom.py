"""task=custom: rows of the user's own, without code; the examples, from their own folder."""

import copy
import gzip
import json
import pickle
import random
import shutil
import subprocess
import sys
from functools import cache

import pytest

from common.config import ConfigError
from common.examples import list_candidates
from common.scoring import score_parts
from common.task import build
from common.tasks.checked import Checked
from common.tasks.data import Row, read_rows
from launch import compose, train
from tests.support import ROOT, SMALL, SMALL_GRPO

ROWS = [
    {"question": f"{i} and {i}", "answer": str(2 * i), "note": {"of": f"n{i}"}, "blank": ""}
    for i in range(20)
]
FIELDS = ["task.prompt_field=question", "task.answer_field=answer"]
THERE = "Fields there: question, answer, note.of, blank."


@cache
def settings(*overrides: str) -> dict:
    return compose(["algo=grpo", "task=custom", *overrides]).task


def custom(*overrides: str):
    return build(copy.deepcopy(settings(*overrides)))


def wording(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        custom(*overrides)
    return str(caught.value)


@pytest.fixture
def data(tmp_path, monkeypatch):
    """data.jsonl in the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


# --- rows


@pytest.mark.parametrize("reward", ["exact", "levenshtein", "bleu", "chrf"])
def test_an_answer_in_tags_is_what_stands_between_them(data, reward):
    (data / "data.jsonl").write_text(
        "".join(
            json.dumps({"question": str(i), "answer": f"<answer>seven eight nine {i}</answer>"})
            + "\n"
            for i in range(20)
        )
    )
    task = custom("task.path=data.jsonl", *FIELDS, f"task.reward={reward}")
    example = task.examples("train")[0]
    for text in (example.answer, f"Well. <answer>{example.answer}</answer>"):
        assert task.reward(example, text) == pytest.approx(1)


@pytest.mark.parametrize(
    "answer",
    ["3,5", "1.000.000", "1e100", "2**3", "5 - 3", "10:30", "3,5 km", "3 to 5", "4 thousand"],
)
def test_a_number_that_would_be_read_as_another_is_refused(data, answer):
    (data / "data.jsonl").write_text(json.dumps({"question": "?", "answer": answer}) + "\n")
    said = wording("task.path=data.jsonl", *FIELDS, "task.reward=numeric")
    assert repr(answer) in said
    assert "Write numbers as" in said


def test_a_last_line_in_bold_is_its_text(data, math_verify):
    math_verify("False")
    rows = [{"question": f"{n} * {n}?", "answer": "42"} for n in (6, 7)]
    (data / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = custom("task.path=data.jsonl", *FIELDS, "task.reward=math")
    for text, final in (
        ("So it is\n**42**", "42"),
        ("\\[42\\]", "42"),
        ("The answer is **42**.", "42"),
        ("2**3**2", "2**3**2"),
    ):
        assert task.answer(text) == final
    assert task.reward(task.examples("train")[0], "**42**") == 1


@pytest.mark.parametrize(
    ("text", "final"),
    [
        ("The answer is $\\sqrt{7}$.", "\\sqrt{7}"),
        ("So $x = 1$.\nThe final answer is: \\(\\frac{\\pi}{2}\\)", "\\frac{\\pi}{2}"),
        ("The answer is x + 1.", "x + 1"),
        ("Since $a=1$, we get $\\sqrt{7}$.", "\\sqrt{7}"),
        ("$3$ or $5$", "$3$ or $5$"),
        ("5$\\sqrt{7}$", "5$\\sqrt{7}$"),
        ("The answer is $x$, not $y$.", "$x$, not $y$"),
        ("$\\sqrt{7}$ is wrong", "$\\sqrt{7}$ is wrong"),
    ],
)
def test_the_formula_of_a_sentence_is_its_answer(text, final, data, math_verify):
    math_verify("False")
    rows = [{"question": f"{n} * {n}?", "answer": "42"} for n in (6, 7)]
    (data / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert custom("task.path=data.jsonl", *FIELDS, "task.reward=math").answer(text) == final


@pytest.mark.parametrize("reward", ["numeric", "math"])
def test_an_equation_or_a_rejected_number_earns_nothing(reward, data, math_verify):
    math_verify("True")
    (data / "data.jsonl").write_text(
        "\n".join(json.dumps({"question": f"{n}", "answer": "18"}) for n in range(3))
    )
    task = custom("task.path=data.jsonl", *FIELDS, f"task.reward={reward}", "task.partial=0")
    row = task.examples("train")[0]
    for text in ("\\boxed{3n=18}", "\\boxed{n^2=18}", "So 3n = 18.", "It is 20, not 18."):
        assert task.reward(row, text) == 0, text
    assert task.reward(row, "\\boxed{n = 18}") == 1


def test_numbers_as_people_write_them_are_read(data):
    texts = ["1,234.50", "$5", "-3/4", "5%", "He has 5+2=7 apples", "#### 7", "6e3", "$ 7.", ".5"]
    texts += ["1 234", "2 1/2", "- 5"]
    lines = [json.dumps({"question": str(i), "answer": text}) for i, text in enumerate(texts)]
    (data / "data.jsonl").write_text("\n".join(lines))
    task = custom("task.path=data.jsonl", *FIELDS, "task.reward=numeric")
    rows = [row for split in ("train", "test") for row in task.examples(split)]
    values = {row.answer: float(row.extra["value"]) for row in rows}
    numbers = [1234.5, 5, -0.75, 5, 7, 7, 6000, 7, 0.5, 1234, 2.5, -5]
    assert values == dict(zip(texts, numbers, strict=True))


# What the number of a completion is, as people and models write them.
READ = {
    "3 + 14 = 17\n\n**17**": 17,
    "3 + 14 = 17\n17": 17,
    "48 + 24 = 72\n72 clips": 72,
    "48 + 24 = 72\n- 72 clips": 72,
    "60 * 60 = 3600\n3600 seconds": 3600,
    "17\n17": 17,
    "Step 3: 17": 17,
    "Day 3: 17 miles": 17,
    "Year 2: $200": 200,
    "In 2023: 17": 17,
    "Answer to question 3: 17": 17,
    "In 2023, 5 people": 5,
    "25 m^2": 25,
    "The area is 25 m^2.": 25,
    "9.8 m/s^2": 9.8,
    "9.8 ms^-2": 9.8,
    "$25\\text{ cm}^2$": 25,
    "25 m**2": 25,
    "25 m2": 25,
    "–5": -5,
    "-**17**": -17,
    "x = - 5": -5,
    "is –17": -17,
    "Rs.500": 500,
    "No.42": 42,
    "approx.5": 5,
    "...5": 5,
    "It is 12 000 km.": 12000,
    "It took 5 1/2 hours.": 5.5,
    "12 000 km": 12000,
    "3 1/2 cups": 3.5,
    "-3 1/2 cups": -3.5,
    "\\boxed{\\frac{-1}{2}}": -0.5,
    "\\cfrac{3}{4}": 0.75,
    "3 × 10^8": 300000000.0,
    "It is 2 x 10^3": 2000,
    "\\boxed{6.02 \\times 10^{23}}": 6.02e23,
    "about 2 \\times 10^{3}.": 2000,
    "2.5 × 10^-3": 0.0025,
    "<answer>2.5 \\times 10^{-3}</answer>": 0.0025,
    "#### 2.5e-3": 0.0025,
    "The speed is 3 × 10^8.": 300000000.0,
    "$3 \\times 10^8.$": 300000000.0,
    "\\boxed{\\frac{3}{-4}}": -0.75,
    "negative 5": -5,
    "minus \\frac{1}{2}": -0.5,
    "<think>\n3+2\n</think>\n\n5": 5,
    "<think>3+2</think>\n-5 apples": -5,
    "So 48+24 = <<48+24=72>>72.": 72,
    "3 + 2 => 5": 5,
    "So 3+2 -> 5": 5,
    "The answer is <b>5</b>.": 5,
    "5<|im_end|>": 5,
    "5</s>": 5,
    "5 <eos>": 5,
    "5 × 10^−3": 0.005,
    "1e−3": 0.001,
    "5 \\, \\times \\, 10^{-3}": 0.005,
    "It is minus $5.": -5,
    "\\boxed{5 \\text{ m/s}}": 5,
    "1. 42": 42,
    "1) 17": 17,
    "<answer>12 pens at $2 is 24</answer>": 24,
    "#### 72 clips": 72,
    "The answer is 42.": 42,
    "$1,234.50": 1234.5,
    "6e-3 it is": 0.006,
    "x = -6E-3": -0.006,
    "He has 5+2=7 apples": 7,
    "50%": 50,
    "It is .5": 0.5,
    "(-3)": -3,
    "-3/4": -0.75,
    "**Answer:** 42": 42,
    "Answer: **$42**": 42,
    "300 K": 300,
    "20-year-old has 5": 5,
    "42!": 42,
    "The total is 1,234,567 people.": 1234567,
    "0.5": 0.5,
    "cost is $-5": -5,
    "\\(x = 5\\)": 5,
    "\\[ x = 5 \\]": 5,
    "3 boxes, so 5 left": 5,
    "7 and that is 9": 9,
    "H2O has 3": 3,
    "so 2 of 5 = 0.4": 0.4,
    "I have 3 apples and 4 pears. So 7.": 7,
    "from A to 7": 7,
    "=7": 7,
    "5 - 3 = 2": 2,
    "(5)": 5,
    "a) 5": 5,
    "Day 4:\n17": 17,
    "2.5 kg": 2.5,
    "2.50": 2.5,
    "<answer>1 234</answer>": 1234,
    "<answer>2 1/2</answer>": 2.5,
    "<answer>2 1/2 cups</answer>": 2.5,
    "<answer>- 5</answer>": -5,
}
# Of these the last number, or the first, is a part of another one, or one of several.
UNCLEAR = [
    "3,5 km",
    "1.234,50 EUR",
    "12,34,567 rupees",
    "Rs 12,34,567",
    "It is 1,23",
    "at 10:30 pm",
    "ratio of 3 : 4",
    "It is 5 to 42.",
    "It is 5 6 7 42.",
    "42x is it",
    "$2^{10}$",
    "5 or 42",
    "from 5 - 42 km",
    "3 hours 20 minutes",
    "2 h 30 min",
    "5 feet 10 inches",
    "5 lb 3 oz",
    "5 km to 10 km",
    "$5-$10",
    "5% - 10%",
    "€5 - €10",
    "5 — 10",
    "5 ± 1",
    "5 & 6",
    "\\boxed{5 \\pm 1}",
    "$5k",
    "5k",
    "$1.5M",
    "10K",
    "2.5B",
    "5 bn",
    "5 lakh",
    "12'000",
    "1_000",
    "½",
    "1½",
    "42 thousands",
    "<answer>5M</answer>",
    "#### 3 hours 20 minutes",
    "10^3",
    "#### 5 to 7",
    "3-4",
    "1e400",
    "x^2",
    "e^2",
    "1.000.000",
    "2**3**2",
    "<answer>$5-$10</answer>",
    "4 hundred",
    "5 or 17\n",
    "The answer is: 5:00",
    "<answer>42 thousands</answer>",
    "<answer>5 6 7 42</answer>",
    "<answer>42x</answer>",
    "2\\sqrt{3}",
    "10 minus 5",
    "2011_{3} it is",
    "The answer is 2011_{3}",
    "The answer is 0.\\overline{3}",
    "\\boxed{10^{-3}}",
    "±5",
    "\\boxed{\\pm 5}",
    "\\boxed{x^2+1}",
    "\\boxed{\\frac{\\pi}{2}}",
    "\\boxed{\\frac{x}{2}}",
    "\\boxed{0.\\overline{3}}",
    "\\boxed{0.3\\overline{6}}",
    "\\boxed{5n+1}",
    "\\boxed{2011_{3}}",
    "\\boxed{\\log 5}",
    "\\boxed{(-\\infty, 3]}",
    "\\boxed{3 \\leq x \\leq 5}",
    "3e-5-4",
]


@pytest.mark.parametrize("reward", ["exact", "numeric"])
def test_what_pre_training_shows_as_wrong_is_wrong(data, reward):
    """Else the tiny model has nothing left to learn."""
    (data / "data.jsonl").write_text(
        "".join(f'{{"question": "{n}", "answer": "{n}"}}\n' for n in range(9))
    )
    task = custom("task.path=data.jsonl", *FIELDS, f"task.reward={reward}", "task.share_right=0")
    for example in task.examples("train"):
        _, shown = task.pretraining(example, random.Random(0))
        assert task.reward(example, shown) < 0.5 < task.reward(example, example.answer)


def test_the_number_of_a_completion(data):
    (data / "data.jsonl").write_text(
        '{"question": "a", "answer": "1"}\n{"question": "b", "answer": "1"}\n'
    )
    task = custom("task.path=data.jsonl", *FIELDS, "task.reward=numeric")

    def read(text):
        answer = task.answer(text)
        return None if answer is None else task.read_value(answer)

    values = {text: read(text) for text in READ}
    assert {text: value and float(value) for text, value in values.items()} == READ
    assert {text: read(text) for text in UNCLEAR} == dict.fromkeys(UNCLEAR)


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("def score(completions, level, **_): return []", "missing a required argument: 'level'"),
        ("def score(a, b, c): return 1.0", "cannot be called: missing a required argument"),
    ],
)
def test_a_reward_that_cannot_be_called_is_told_at_once(data, monkeypatch, code, wrong):
    (data / "unfit.py").write_text(code)
    monkeypatch.syspath_prepend(data)
    sys.modules.pop("unfit", None)
    said = wording(
        "task.path=data.jsonl", *FIELDS, "task.reward=exact", "task.rewards={unfit.score: 1}"
    )
    assert wrong in said
    assert "Columns there: question, answer" in said


@pytest.mark.parametrize("algo", [SMALL, SMALL_GRPO], ids=["eggroll", "grpo"])
def test_a_run_does_not_go_on_with_other_rows(data, algo, in_cache):
    """Its measures before training are of the rows that there were."""
    task = ["task=custom", "task.path=data.jsonl", *FIELDS, "task.reward=exact", "algo.steps=1"]
    task += ["model.tiny.pretrain_steps=0"]
    train(compose([*algo, *task]), data / "out")
    for rows in (ROWS[::-1], ROWS + ROWS[:1]):
        (data / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        with pytest.raises(ConfigError, match="was made with other training or test rows"):
            train(compose([*algo, *task, "resume=auto"]), data / "out")
    assert (data / "out" / "result.json").exists()


@pytest.mark.parametrize(
    ("name", "old", "new", "key", "where"),
    [
        ("data.csv", b"7 and 7", b"7 and\0 7", "task.prompt_field='question'", "line 9"),
        (
            "data.jsonl",
            b'"answer": "14"',
            rb'"answer": "1\u00004"',
            "task.answer_field='answer'",
            "line 8",
        ),
    ],
)
def test_a_nul_character_is_named(data, name, old, new, key, where):
    (data / "data.csv").write_text(
        "question,answer\n" + "".join(f"{r['question']},{r['answer']}\n" for r in ROWS)
    )
    custom(f"task.path={name}", *FIELDS)
    good = (data / name).read_bytes()
    assert old in good
    (data / name).write_bytes(good.replace(old, new))
    assert wording(f"task.path={name}", *FIELDS).startswith(
        f"{key} holds a NUL character in '{name}' {where}. Remove it; a file in UTF-16 holds many:"
    )


def test_every_kind_of_file_gives_the_same_rows(data):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    lines = [f"{row['question']}\t{row['answer']}" for row in ROWS]
    (data / "data.tsv").write_text("\n".join(["question\tanswer", *lines]) + "\n")
    (data / "data.csv").write_text("\n".join(["question,answer", *lines]).replace("\t", ",") + "\n")
    parquet.write_table(
        pyarrow.Table.from_pylist([r | {"answer": int(r["answer"])} for r in ROWS]), "data.parquet"
    )
    wanted = [
        (e.question, e.answer) for e in custom("task.path=data.jsonl", *FIELDS).examples("train")
    ]
    assert len(wanted) == 16
    for kind in ("jsonl", "tsv", "csv", "parquet"):
        (data / f"data.{kind}.gz").write_bytes(gzip.compress((data / f"data.{kind}").read_bytes()))
        for name in (f"data.{kind}", f"data.{kind}.gz"):
            task = custom(f"task.path={name}", *FIELDS)
            assert [(e.question, e.answer) for e in task.examples("train")] == wanted, name


def test_a_saved_dataset_and_a_folder_that_datasets_loads(data):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(
        [{"question": r["question"], "answer": r["answer"]} for r in ROWS]
    )
    datasets.DatasetDict({"train": rows, "valid": rows.select(range(4))}).save_to_disk("saved")
    task = custom("task.path=saved", *FIELDS, "task.dataset_test_split=valid")
    assert [e.question for e in task.examples("test")] == [r["question"] for r in ROWS[:4]]
    assert len(task.examples("train")) == 16  # the four are dropped
    assert "(split=test): it has the splits train, valid." in wording(
        "task.path=saved", *FIELDS, "task.dataset_test_split=test"
    )
    (data / "folder").mkdir()
    shutil.copy(data / "data.jsonl", data / "folder" / "train.jsonl")
    assert len(custom("task.path=folder", *FIELDS).examples("train")) == 16


def test_an_array_of_objects_and_answers_that_are_no_numbers(data):
    """As SVAMP and ASDiv have them."""
    rows = [{"Body": f"There are {n}.", "Question": "And?", "Answer": float(n)} for n in range(12)]
    rows[3]["Answer"] = "Sunday"
    rows[7]["Answer"] = None
    (data / "svamp.json").write_text(json.dumps(rows, indent=1))
    asked = [
        *("task.path=svamp.json", 'task.template="{Body} {Question}"'),
        *("task.answer_field=Answer", "task.reward=numeric"),
    ]
    said = wording(*asked)
    assert "has no number in 'svamp.json' row 4 (line 17)" in said
    assert "2 of 12 rows are incomplete: 'svamp.json' row 4 (line 17), 'svamp.json' row 8" in said
    task = custom(*asked, "task.incomplete=skip")
    examples = [e for split in ("train", "test") for e in task.examples(split)]
    assert sorted(float(e.answer) for e in examples) == [0, 1, 2, 4, 5, 6, 8, 9, 10, 11]
    assert "There are 0. And?" in {e.question for e in examples}
    assert "2 of 12 rows are incomplete and left out" in task.reading.notes[-1]


def test_numbers_with_a_decimal_comma(data):
    (data / "a.csv").write_text("question;answer\n" + "".join(f"q{n};{n},5\n" for n in range(9)))
    task = custom("task.path=a.csv", *FIELDS, "task.reward=numeric")
    example = task.examples("train")[0]
    assert example.answer.endswith(".5")
    assert task.reward(example, example.answer) == 1
    (data / "a.csv").write_text("question;answer\n" + "".join(f"q{n};{n},500\n" for n in "123"))
    asked = ["task.path=a.csv", *FIELDS, "task.reward=numeric"]
    assert "task.format.decimal=comma or point" in wording(*asked)
    for mark, number in (("comma", {1.5, 2.5, 3.5}), ("point", {1500, 2500, 3500})):
        task = custom(*asked, f"task.format.decimal={mark}")
        rows = [e for split in ("train", "test") for e in task.examples(split)]
        assert {float(e.extra["value"]) for e in rows} == number


def test_lists_in_a_template_and_a_path_into_them(data):
    rows = [
        {"q": f"q{n}", "choices": ["x", n, "z"], "answers": {"text": [f"a{n}"]}} for n in range(5)
    ]
    (data / "mmlu.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = custom(
        *("task.path=mmlu.jsonl", "task.answer_field=answers.text.0"),
        'task.template="{q}: {choices}; B: {choices.1}"',
    )
    example = task.examples("test")[0]
    number = example.answer[1:]
    assert example.question == f"q{number}: x\n{number}\nz; B: {number}"


def test_a_pattern_and_columns_that_files_do_not_name(data):
    for part in range(3):
        lines = "".join(f"q{part}{n}\t{n}\n" for n in range(4))
        (data / f"part-{part}.tsv").write_text(lines)
    task = custom("task.path=part-*.tsv", "task.columns=[question,answer]", *FIELDS)
    assert len(task.examples("train")) + len(task.examples("test")) == 12
    assert "task.columns=['a', 'a'] names a column twice" in wording(
        "task.path=part-*.tsv", "task.columns=[a,a]", *FIELDS
    )
    assert "task.format.delimter=" in wording(
        "task.path=data.jsonl", "task.format.delimter=x", *FIELDS
    )


def test_the_plan_names_what_was_found_out_about_files(data, capsys, in_cache):
    lines = "".join(f"{row['question']} für;{row['answer']}\n" for row in ROWS)
    (data / "data.csv").write_bytes(f"question;answer\n{lines}".encode("cp1252"))
    asked = ["algo=grpo", "task=custom", "task.path=data.csv", *FIELDS, "plan=true"]
    train(compose([*asked, "model.tiny.pretrain_steps=0"]), data / "out")
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("rows ")]
    assert "read as Windows-1252, with words such as 'für'" in line
    assert "cells separated by semicolons" in line


@pytest.mark.slow
def test_a_million_rows_of_a_gigabyte(tmp_path):
    """Their texts are held once, and nothing else of the file."""
    code = (
        "import resource, sys; from launch import compose; from common.tasks import build;"
        "path, *fields = sys.argv[1:];"
        "task = build(compose(['task=custom', f'task.path={path}', *fields]).task);"
        "print(len(task.examples('train')), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    found = {}
    for count in (1000, 1_000_000):
        path = tmp_path / f"{count}.jsonl"
        with path.open("w") as file:
            for n in range(count):
                file.write(json.dumps({"question": f"{n} {'x' * 940}", "answer": str(n)}) + "\n")
        command = [sys.executable, "-c", code, str(path), *FIELDS]
        said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
        rows, kilobytes = map(int, said.split())
        assert rows == count - min(1000, count // 5)
        found[count] = kilobytes * 1024
    assert path.stat().st_size > 0.95e9
    assert found[1_000_000] - found[1000] < 2e9


def test_float32_columns_are_read_as_they_are_written(data):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    prices = pyarrow.array([0.1, 19.99, None], pyarrow.float32())
    plain = pyarrow.array(["a", "b", "c"])
    parquet.write_table(pyarrow.table({"q": plain, "a": prices, "b": prices}), "f.parquet")
    assert [row.fields["a"] for row in read_rows("f.parquet", "task.path")] == [0.1, 19.99, None]
    half = pyarrow.table({"q": plain, "a": prices.cast(pyarrow.float16())})
    parquet.write_table(half, "f.parquet")
    assert [row.fields["a"] for row in read_rows("f.parquet", "task.path")] == [0.1, 19.98, None]
    assert Row("here", {"a": -0.0}).text("a", "key", numbers=True) == "0"


def test_a_file_of_excel_in_utf_16_is_read(data):
    lines = "".join(f"{row['question']}\t{row['answer']}\n" for row in ROWS)
    (data / "e.txt").write_bytes(f"question\tanswer\n{lines}".encode("utf-16"))
    task = custom("task.path=e.txt", *FIELDS)
    assert len(task.examples("train")) == 16
    assert task.reading.notes == ["e.txt: in utf-16"]


def test_a_saved_set_without_splits_is_held_out(data):
    datasets = pytest.importorskip("datasets")
    rows = [{"question": r["question"], "answer": r["answer"]} for r in ROWS[:4]]
    datasets.Dataset.from_list(rows).save_to_disk("held")
    task = custom("task.path=data.jsonl", "task.test_path=held", *FIELDS)
    assert [e.question for e in task.examples("test")] == [r["question"] for r in ROWS[:4]]


def test_a_sorted_file_is_not_measured_by_its_beginning(data):
    rows = [{"question": f"q{i}", "answer": "neg" if i < 30 else "pos"} for i in range(60)]
    (data / "sorted.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = compose(["task=custom", "evaluate.examples=20", "task.path=data.jsonl", *FIELDS])
    for given in (["task.test_path=sorted.jsonl"], []):
        task = Checked(custom("task.path=data.jsonl", *given, *FIELDS))
        held_out = list_candidates(run, task)
        assert held_out == list_candidates(run, task), "the same in each run"
        if given:
            assert len(held_out) == 20
            assert {one.answer for one in held_out} == {"neg", "pos"}
            assert all(one.question == f"q{one.id}" for one in held_out), (
                "ids are places in the file"
            )


def test_held_out_rows(data):
    (data / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:5]))
    task = custom("task.path=data.jsonl", "task.test_path=test.jsonl", *FIELDS)
    assert [e.id for e in task.examples("train")] == list(range(15))
    assert not {e.question for e in task.examples("train")} & {
        e.question for e in task.examples("test")
    }
    assert (
        len(custom("task.path=data.jsonl", "task.test_share=0.5", *FIELDS).examples("test")) == 10
    )
    one, two = (custom("task.path=data.jsonl", *FIELDS).examples("test") for _ in range(2))
    assert one == two


def test_numbers_are_text(data):
    (data / "n.jsonl").write_text(
        '{"q": 1, "a": 2.0}\n{"q": 1.5, "a": 1e-5}\n{"q": "x", "a": -3}\n'
    )
    task = custom(
        "task.path=n.jsonl", "task.prompt_field=q", "task.answer_field=a", "task.reward=numeric"
    )
    found = {e.question: e.answer for split in ("train", "test") for e in task.examples(split)}
    assert found == {"1": "2", "1.5": "0.00001", "x": "-3"}


# --- prompts


def test_template_and_conversation(data):
    template = 'task.template="{note.of}: {question}{blank} {{x}}"'
    task = custom("task.path=data.jsonl", *FIELDS, template, "task.system=Add.")
    example = task.examples("test")[0]
    number = example.question.split()[-2]
    assert example.question == f"n{number}: {number} and {number} {{x}}"
    assert task.prompt(example) == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": example.question},
    ]
    assert f"(The answer is {example.answer}.)" in task.hint(example)[-1]["content"]
    plain = custom("task.path=data.jsonl", "task.answer_field=answer", template, "task.chat=false")
    assert plain.prompt(example) == example.question
    auto = custom("task.path=data.jsonl", "task.answer_field=answer", template)
    assert auto.prompt(example) == example.question, "as it is, without a chat template"
    auto.templated = True
    assert auto.prompt(example) == [{"role": "user", "content": example.question}]


def test_it_teaches_the_answer_with_and_without_a_mark(data):
    task = custom("task.path=data.jsonl", *FIELDS)
    example = next(e for e in [*task.examples("train"), *task.examples("test")] if e.answer == "12")
    taught = {task.pretraining(example, random.Random(i)) for i in range(20)}
    assert taught == {("6 and 6\n", "12"), ("6 and 6\n", "12?")}


def test_functions_get_messages_only_where_prompts_are_conversations(data, tmp_path, monkeypatch):
    (data / "mine_columns.py").write_text(
        "seen = []\n"
        "def kinds(prompts, completions, **kw):\n"
        "    seen.append((type(prompts[0]), type(completions[0])))\n"
        "    return [0.0] * len(prompts)\n"
    )
    monkeypatch.syspath_prepend(str(data))
    task = custom("task.path=data.jsonl", *FIELDS, "task.rewards={mine_columns.kinds: 1}")
    examples = task.examples("test")[:2]
    for templated in (False, True):
        task.templated = templated
        score_parts(task, examples, ["a", "b"])
    seen = sys.modules["mine_columns"].seen
    assert seen == [(str, str), (list, list)]


# --- rewards


@pytest.mark.parametrize(
    ("reward", "answer", "completion", "score"),
    [
        ("exact", "Paris", " Paris\n", 1),
        ("exact", "Paris", "paris", 0),
        ("exact", "Paris", "Let me think.\n<answer> Paris </answer>.", 1),
        ("numeric", "1,000", "It is 500. No, 1000.0", 1),
        ("numeric", "1,000", "1000, or 1001", 0),
        ("numeric", "5 * 2 = 10\n#### 10", "\\boxed{10}", 1),
        ("numeric", "6000", "<answer>6e3</answer>", 1),
        ("numeric", "0.00001", "1e-05", 1),
        ("numeric", "6000", "It is 6e3.", 1),
        ("numeric", "0.006", "6e-3 it is, I think", 1),
        ("numeric", "-0.006", "x = -6E-3", 1),
        ("numeric", "3", "It is 6e3.", 0),
        ("numeric", "6000", "#### 6e3", 1),
        ("numeric", "3", "6e3 or rather 3", 1),
        ("numeric", "0.75", "so 3/4", 1),
        ("numeric", "0.75", "1e2, no: 3/4", 1),
        ("numeric", "3", "no idea", 0),
        ("numeric", ".5", "0.5", 1),
        ("numeric", ".5", "5", 0),
        ("numeric", "0.5", "The answer is .5.", 1),
        ("numeric", "0.5", "$.50", 1),
        ("numeric", "0.5", "\\boxed{.5}", 1),
        ("numeric", "6000", "#### 6e3 apples", 1),
        ("numeric", "6000", "\\boxed{6e3\\text{ km}}", 1),
        ("numeric", "20", "120 in row 20", 1),
        ("numeric", "20", "120 in row A20", 0),
        ("numeric", "-3", "it is -3", 1),
        ("levenshtein", "abcd", "abc", 6 / 7),
        ("chrf", "the same", "the same", 1),
        ("bleu", "one two three four", "one two three four", 1),
        ("bleu", "one two three four", "", 0),
    ],
)
def test_rewards(data, reward, answer, completion, score):
    rows = [{"question": f"{i}", "answer": answer} for i in range(3)]
    (data / "one.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = ["task.partial=0"] if reward in ("exact", "numeric") else []
    task = custom("task.path=one.jsonl", *FIELDS, f"task.reward={reward}", *whole)
    example = task.examples("test")[0]
    assert task.reward(example, completion) == pytest.approx(score)
    assert task.rewards([example] * 2, [completion, answer])[1] == pytest.approx(1)
    assert all(0 <= value <= 100 for value in task.metrics([example], [completion]).values())


def test_a_wrong_answer_earns_a_part_and_counts_as_wrong(data):
    """So that there is something to climb while nothing is right."""
    task = custom("task.path=data.jsonl", *FIELDS)
    example = next(e for s in ("train", "test") for e in task.examples(s) if e.answer == "12")
    earned = [task.reward(example, text) for text in ("12", "13", "99", "")]
    assert earned == pytest.approx([1, 0.1, 0, 0])
    assert task.metrics([example], ["13"])["exact"] == 0
    numeric = custom("task.path=data.jsonl", *FIELDS, "task.reward=numeric")
    example = next(e for s in ("train", "test") for e in numeric.examples(s) if e.answer == "12")
    assert numeric.reward(example, "It is 13") == pytest.approx(0.1)
    assert numeric.metrics([example], ["It is 13"])["accuracy"] == 0
    assert "task.partial=0.5 has no effect with task.reward=chrf" in wording(
        "task.path=data.jsonl", *FIELDS, "task.reward=chrf", "task.partial=0.5"
    )


def test_the_leading_measure_is_not_the_reward(data):
    def names(reward):
        task = custom("task.path=data.jsonl", *FIELDS, f"task.reward={reward}")
        return list(task.metrics(task.examples("test"), ["x"] * 4))

    assert names("levenshtein") == ["exact", "similarity"], "no BLEU of numbers"
    assert names("bleu") == ["chrf", "bleu", "exact"]
    assert names("chrf")[0] == "exact", "BLEU of numbers is always 0"
    assert names("numeric") == ["accuracy", "answered", "unread"]


def test_tolerance(data):
    (data / "pi.jsonl").write_text('{"q": "pi?", "a": 3.14159}\n{"q": "pi!", "a": 3.14159}\n')
    own = [
        "task.path=pi.jsonl",
        "task.prompt_field=q",
        "task.answer_field=a",
        "task.reward=numeric",
    ]
    own.append("task.partial=0")
    strict, loose = custom(*own), custom(*own, "task.tolerance=0.01")
    example = strict.examples("test")[0]
    assert [strict.reward(example, text) for text in ("3.14", "3.14159")] == [0, 1]
    assert [loose.reward(example, text) for text in ("3.14", "3.2")] == [1, 0]


def test_math_asks_math_verify_where_numbers_do_not_tell(data, math_verify):
    math_verify("target == '$4$'")
    (data / "m.jsonl").write_text(
        '{"question": "a", "answer": "\\\\sqrt{16}"}\n{"question": "b", "answer": "\\\\sqrt{16}"}\n'
    )
    task = custom("task.path=m.jsonl", *FIELDS, "task.reward=math", "task.partial=0")
    example = task.examples("test")[0]
    texts = ["so\n4", "16", "we get \\boxed{4}", "\\sqrt{16}", "2^2"]
    assert task.rewards([example] * 5, texts) == [1, 0, 1, 1, 0]
    assert math_verify.asked == [["$\\sqrt{16}$", text] for text in ("$4$", "$16$", "$2^2$")]


def test_math_reads_powers_of_ten_as_numbers(data, math_verify):
    math_verify("False")
    rows = [{"question": question, "answer": "300000000"} for question in "ab"]
    (data / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = custom("task.path=m.jsonl", *FIELDS, "task.reward=math", "task.partial=0")
    example = task.examples("test")[0]
    texts = ["so\n3 × 10^8", "\\boxed{3 \\times 10^{8}}", "3 × 10^9", "3 × 10^{-8}"]
    assert task.rewards([example] * 4, texts) == [1, 1, 0, 0]


# --- mistakes


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            [],
            "task.path is not set. Give it, for example task.path=data.jsonl.",
        ),
        (
            ["task.path=data.jsonl", "task.prompt_field=question"],
            "task.answer_field is not set. Give it, for example task.answer_field=answer;",
        ),
        (
            ["task.path=data.jsonl", "task.answer_field=answer"],
            "task.prompt_field is not set. Give it, for example task.prompt_field=question.",
        ),
        (
            ["task.path=data.jsonl", "task.prompt_field=qestion", "task.answer_field=answer"],
            "task.prompt_field='qestion' is not a field of 'data.jsonl' line 1. Did you mean"
            f" 'question'? {THERE}",
        ),
        (
            ["task.path=data.jsonl", "task.prompt_field=question", "task.answer_field=blank"],
            "task.answer_field='blank' is empty in 'data.jsonl' line 1. Fix or remove"
            f" the row. {THERE}",
        ),
        (
            ["task.path=data.jsonl", "task.answer_field=answer", 'task.template="{qestion}"'],
            "task.template='qestion' is not a field of 'data.jsonl' line 1. Did you mean"
            f" 'question'? {THERE}",
        ),
        (
            [
                "task.path=data.jsonl",
                "task.prompt_field=question",
                "task.answer_field=note.of",
                "task.reward=math",
            ],
            "task.reward=math needs the package math-verify. Install it: pip install"
            " -e '.[math]'. Or use task.reward=numeric.",
        ),
        (
            ["task.path=words.jsonl", *FIELDS, "task.reward=numeric"],
            "task.answer_field='answer' has no number in 'words.jsonl' line 2, or none"
            " that stands alone: 'none'. Write numbers as 1234.5, 7/2 or"
            " 6e3, or use another reward: task.reward=math compares",
        ),
        (
            ["task.path=data.jsonl", *FIELDS, "task.reward=blue"],
            "task.reward=blue is not a choice. Did you mean 'bleu'?",
        ),
        (
            ["task.path=data.jsonl", *FIELDS, "task.template=hello"],
            "task.template='hello' holds no field. Put one",
        ),
        (
            ["task.path=data.jsonl", *FIELDS, 'task.template="{blank}"'],
            "task.prompt_field='question' has no effect with task.template=",
        ),
        (
            ["task.path=data.jsonl", *FIELDS, 'task.template="{question"'],
            "has braces that do not fit: expected '}'",
        ),
        (
            ["task.path=data.jsonl", *FIELDS, 'task.template="{question} {answer}"'],
            "also stands in the prompt",
        ),
        (
            ["task.path=data.jsonl", *FIELDS, "task.tolerance=0.1"],
            "task.tolerance=0.1 has no effect with task.reward=exact",
        ),
        (
            ["task.path=data.jsonl", *FIELDS, "task.reward=numeric", "task.tolerance=5"],
            "task.tolerance=5 is out of range. Give a value below 1.",
        ),
        (
            ["task.path=data.jsonl", *FIELDS, "task.chat=false", "task.system=x"],
            "task.system has no effect",
        ),
        (
            ["task.path=data.jsonl", *FIELDS, "task.dataset_split=x"],
            "task.dataset_split has no effect with a file.",
        ),
        (
            ["task.path=data.jsonl", *FIELDS, "task.test_path=data.jsonl", "task.test_share=0.1"],
            "both give the test rows",
        ),
        (
            ["task.path=data.jsonl", *FIELDS, "task.test_path=data.jsonl"],
            "leaves 0 train and 20 test rows; 20 train rows also stand in the test rows.",
        ),
        (
            ["task.path=data.jsonl", *FIELDS, "task.test_share=0"],
            "leaves 20 train and 0 test rows",
        ),
        (
            ["task.path=data.txt", *FIELDS],
            "task.path='data.txt' is of no known kind. Give a file that ends in .jsonl, .ndjson,",
        ),
        (["task.path=nothing.csv", *FIELDS], "task.path='nothing.csv' does not exist; tried "),
        (
            ["task.path=bad.parquet", *FIELDS],
            "task.path='bad.parquet' cannot be read as Parquet: it does not begin as such files.",
        ),
    ],
)
def test_mistakes_are_worded(data, monkeypatch, overrides, text):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    (data / "data.txt").write_text("a")
    (data / "bad.parquet").write_text("a")
    (data / "words.jsonl").write_text(
        '{"question": "a", "answer": "1"}\n{"question": "b", "answer": "none"}\n'
    )
    if "bad.parquet" in overrides[0:1]:
        pytest.importorskip("pyarrow")
    assert text in wording(*overrides)


# --- runs


@pytest.mark.thorough
def test_the_example_folder_works_from_elsewhere(launch, tmp_path):
    """A copy of examples/own_task, outside the repository, as its page says."""
    unwanted = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "examples" / "own_task", tmp_path, ignore=unwanted, dirs_exist_ok=True)
    own = ["--config-dir", "conf", "task=acronyms", "task.length=2", *SMALL, "algo=eggroll"]
    launch(*own, "algo.steps=1", "hydra.run.dir=out", env={"PYTHONPATH": "."}, fresh=True)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (result["task"], result["metric"]) == ("acronyms", "exact")
    told = (tmp_path / "out" / "report.md").read_text()
    assert (
        f"python launch.py --config-dir {tmp_path}/conf task=acronyms task.length=2 hardware=cpu"
        in told
    )


def test_whole_numbers_stay_as_they_are():
    for number in (12345678901234567890, 10**400, -3, 0):
        assert Row("here", {"a": number}).text("a", "task.answer_field", numbers=True) == str(
            number
        )
    assert Row("here", {"a": 2.0}).text("a", "task.answer_field", numbers=True) == "2"


@pytest.mark.parametrize("chat", [False, True])
def test_a_function_in_the_form_of_trl(data, monkeypatch, chat):
    """It takes the columns of the rows, and None is no score."""
    (data / "trl_like.py").write_text(
        "def length(prompts, completions, note=None, **more):\n"
        "    texts = [c if isinstance(c, str) else c[0]['content'] for c in completions]\n"
        "    assert all('answer' in more for _ in prompts) and 'question' in more\n"
        "    return [None if not t else 1 / len(t) for t in texts]\n"
        "def few(completions, answer):\n"
        "    return [None for _ in answer]\n"
    )
    monkeypatch.syspath_prepend(str(data))
    own = ["task.path=data.jsonl", *FIELDS, "task.partial=0", f"task.chat={chat}".lower()]
    task = custom(*own, "task.rewards={trl_like.length: 1, trl_like.few: 3}")
    example = next(e for s in ("train", "test") for e in task.examples(s) if e.answer == "12")
    scored = score_parts(task, [example] * 3, ["12", "1", ""])
    assert scored.components["trl_like.length"] == [0.5, 1.0, None]
    assert scored.rewards == pytest.approx([(1 + 0.5) / 2, (0 + 1) / 2, 0])
    assert task.reward(example, "12") == pytest.approx(0.75)
    sent = pickle.loads(pickle.dumps(task))  # to a process that scores
    assert score_parts(sent, [example] * 3, ["12", "1", ""]).rewards == scored.rewards


def test_columns_of_a_function_are_those_of_all_rows(data, monkeypatch):
    """Whichever row stands first, and never what the trainer itself gives."""
    (data / "noted.py").write_text(
        "def note(prompts, completions, note):\n    return [float(bool(n)) for n in note]\n"
        "def texts(prompts, completions):\n    return [float(c == '1') for c in completions]\n"
    )
    rows = [{"question": f"{i}", "answer": "1", "completions": "no"} for i in range(4)]
    rows[2] |= {"note": "x"}
    (data / "notes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.syspath_prepend(str(data))
    own = ["task.path=notes.jsonl", *FIELDS, "task.chat=false"]
    task = custom(*own, "task.rewards={noted.note: 1, noted.texts: 1}")
    examples = [*task.examples("train"), *task.examples("test")]
    one = next(example for example in examples if "note" in example.extra["row"])
    other = next(example for example in examples if "note" not in example.extra["row"])
    for pair, scores in (([one, other], [1.0, 0.0]), ([other, one], [0.0, 1.0])):
        scored = score_parts(task, pair, ["1", "1"])
        assert scored.components["noted.note"] == scores
        assert scored.components["noted.texts"] == [1.0, 1.0]


def test_a_column_of_objects_comes_whole(data, monkeypatch):
    (data / "levels.py").write_text(
        "def level(prompts, completions, metadata):\n    return [m['level'] for m in metadata]\n"
        "def parts(completions, **more):\n    return list(more['metadata.level'])\n"
    )
    rows = [{"question": f"{i}", "answer": "1", "metadata": {"level": i / 4}} for i in range(4)]
    (data / "levels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.syspath_prepend(str(data))
    task = custom(
        "task.path=levels.jsonl", *FIELDS, "task.rewards={levels.level: 1, levels.parts: 1}"
    )
    examples = [*task.examples("train"), *task.examples("test")]
    components = score_parts(task, examples, ["1"] * len(examples)).components
    for name in ("levels.level", "levels.parts"):
        assert components[name] == [int(example.question) / 4 for example in examples]


def test_several_weighted_functions_of_ones_own(data, monkeypatch):
    (data / "graded.py").write_text(
        "def brevity(completion, answer):\n    return 1 / max(1, len(completion))\n"
    )
    monkeypatch.syspath_prepend(str(data))
    own = ["task.path=data.jsonl", *FIELDS, "task.partial=0"]
    task = custom(*own, "task.rewards={graded.brevity: 0.5}")
    example = next(e for s in ("train", "test") for e in task.examples(s) if e.answer == "12")
    assert task.reward(example, "12") == pytest.approx((1 + 0.5 * 0.5) / 1.5)
    scored = score_parts(task, [example] * 2, ["12", "1"])
    assert scored.rewards == pytest.approx([(1 + 0.5 * 0.5) / 1.5, 0.5 / 1.5])
    assert scored.components == {"exact": [1.0, 0.0], "graded.brevity": [0.5, 1.0]}
    assert score_parts(pickle.loads(pickle.dumps(task)), [example], ["1"]).rewards == [0.5 / 1.5]
    assert "'graded.none', which cannot be imported: AttributeError" in wording(
        *own, "task.rewards={graded.none: 1}"
    )
