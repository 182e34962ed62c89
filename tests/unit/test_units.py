"""Units: factors against a table by hand, answers against the homework's own data, and nothing that
a model writes raises.
"""

import json
import math
import pickle
import random
import re
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from common.config import ConfigError, ScoringConfig
from common.config.checks import shipped
from common.model.prompts import encode_prompts
from common.model.tiny import byte_tokenizer
from common.scoring import Scorer
from common.task import Example, Task, build, plain
from common.tasks.answers import path_key, tagged
from common.tasks.units import UNITS, WRONG_WAYS, Units, convert, number, parse
from tests.support import ROOT

SETTINGS: dict[str, Any] = OmegaConf.to_container(OmegaConf.load(ROOT / "conf/task/units.yaml"))  # type: ignore


def make(**changed: Any) -> Units:
    task = build(SETTINGS | changed)
    assert isinstance(task, Units)
    return task


def error(**changed: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        make(**changed)
    return str(caught.value)


@pytest.fixture(scope="module")
def task() -> Units:
    return make()


FEW = make(problems=60, test_problems=20)


def example(value: str | float) -> Example:
    return Example(0, "", "", {"value": Fraction(str(value))})


def converted(question: str) -> Fraction:
    found = parse(question)
    assert found is not None, question
    return convert(*found)


# --- converting


# From the definitions: the inch is 25.4 mm, the pound 0.45359237 kg, the US gallon 231 cubic
# inches.
@pytest.mark.parametrize(
    ("question", "value"),
    [
        ("3 mi in ft", Fraction(3 * 5280)),
        ("1 ft in cm", Fraction("30.48")),
        ("2 km in yd", Fraction(20_000_000, 9144)),
        ("2 ton in kg", Fraction(2000)),
        ("5 pound in ounce", Fraction(80)),
        ("10 ounce in g", Fraction("283.49523125")),
        ("1 gallon in ml", Fraction(231) * Fraction("2.54") ** 3),
        ("10 ounce in ml", Fraction(2310, 128) * Fraction("2.54") ** 3),
        ("1 m^3 in mm^3", Fraction(10**9)),
        ("2 quart in pint", Fraction(4)),
        ("36 km/h in m/s", Fraction(10)),
        ("1 mph in in/s", Fraction("17.6")),
        ("3 week in h", Fraction(504)),
        ("1 century in month", Fraction(1200)),
        ("1 year in s", Fraction("31556925.9747")),
        ("2 MB in bit", Fraction(16 * 10**6)),
        ("100 C in F", Fraction(212)),
        ("212 F in C", Fraction(100)),
        ("0 K in C", Fraction("-273.15")),
        ("-40 F in C", Fraction(-40)),
        ("25 C in K", Fraction("298.15")),
        ("50 F in K", Fraction("283.15")),
        ("9 in in ft", Fraction(3, 4)),
        ("9 ft in in", Fraction(108)),
        ("How many in are there per 2 ft?", Fraction(24)),
        ("What is the conversion from fluid ounce to pint for 32 units?", Fraction(2)),
        ("Could you give the conversion from metric ton to kg for 1.5 units?", Fraction(1500)),
    ],
)
def test_factors(question, value):
    assert converted(question) == value


@pytest.mark.parametrize(
    "question", ["", "7 km", "7 km in kg", "7 apples in kg", "7 km or 8 km in m", "7", "\0 km in m"]
)
def test_what_is_unclear_is_not_parsed(question):
    assert parse(question) is None


def test_there_and_back_is_exact():
    found = {name: unit for unit in UNITS.values() for names in unit for name in names}
    assert len(found) > 80
    for kind, units in UNITS.items():
        for one in units:
            for other in units:
                if one == other:
                    continue
                there = parse(f"7 {one[0]} in {other[0]}")
                assert there is not None, (kind, one, other)
                value, source, target = there
                assert (source.name, target.name, source.kind) == (one[0], other[0], kind)
                assert convert(convert(value, source, target), target, source) == 7


def test_the_homeworks_answers_are_ours(shared_data):
    folder = shared_data / "unit_conversion"
    rows = [
        row
        for name in ("train", "valid")
        for row in json.loads((folder / f"{name}.json").read_text())
    ]
    assert len(rows) == 2000
    for question, value in rows:
        assert float(converted(question)) == pytest.approx(value, rel=1e-9), question
        found = number(f"so <answer>{value} {question.split()[-1]}</answer>")
        assert found is not None
        assert float(found) == pytest.approx(value, rel=1e-12)


# --- answers


@pytest.mark.parametrize(
    ("inside", "value"),
    [
        ("6000", 6000),
        (" 6,000.0 gram ", 6000),
        ("6e3", 6000),
        ("6.0E+03 m^3", 6000),
        ("= 6000.", 6000),
        ("+.5", 0.5),
        ("-273.15 C", -273.15),
        ("−4", -4),
        ("≈ 3.1 km/h", 3.1),
        ("5 m**2", 5),
        ("1,234,567", 1234567),
        ("1e-5", 1e-5),
        ("9\n", 9),
        ("", None),
        ("nan", None),
        ("inf", None),
        ("-Infinity", None),
        ("1e999", None),
        ("1e400000000", None),
        ("ten", None),
        ("1/2", None),
        ("6000 or 7000", None),
        ("6 000", None),
        ("1,00", None),
        ("1..2", None),
        ("0x10", None),
        ("7*1000", None),
        ("7*1000 = 7000", None),
        ("١", None),
        ("9" * 41, None),
        ("1" + " " * 300, None),
        ("--5", None),
        *((text, None) for text in ("6½", "6k gram", "6 e3", "6 trillion", "6 times ten")),
        ("6 and a half", None),
        ("6 kg", 6),
    ],
)
def test_numbers(inside, value, task):
    found = number(f"<answer>{inside}</answer>")
    assert found == (None if value is None else Fraction(str(value)))
    assert (task.answer(f"<answer>{inside}</answer>") is None) == (value is None)


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("<answer>1</answer> <answer>2", "1"),
        ("<answer>1</answer></answer>", "1"),
        ("<answer><answer>1</answer>", "1"),
        ("</answer>1<answer>", None),
        ("</answer>", None),
        ("<answer>1", None),
        ("1", None),
        ("", None),
    ],
)
def test_the_last_complete_pair_counts(completion, text):
    assert tagged(completion) == text


def test_an_answer_has_one_spelling(task):
    for inside in ("6000", "6,000.00", "6e3 gram", " +6000 "):
        assert task.answer(f"<answer>{inside}</answer>") == "6000"
    assert task.answer("<answer>.50 km</answer>") == "0.5"
    assert task.answer("<answer>-0</answer>") == "0"
    assert task.answer("6000") is None


@pytest.mark.parametrize(
    ("wanted", "given_", "right"),
    [
        (100, "101", True),
        (100, "99", True),
        (100, "101.0001", False),
        (100, "98.9999", False),
        (100, "-100", False),
        (-40, "-40.4", True),
        (-40, "-39.5999", False),
        (0, "0.001", True),
        (0, "-0.0011", False),
        (0, "nan", False),
        (0.0005, "0.0014", True),
        (0.002, "0.00202", True),
        (0.002, "0.003", False),
        (1e15, "1e15", True),
        (100, "inf", False),
    ],
)
def test_tolerance(task, wanted, given_, right):
    reward = task.reward(example(wanted), f"<answer>{given_}</answer>")
    assert (reward == 1) == right
    assert right or reward < 0.1


def test_the_homeworks_tolerance():
    loose = make(tolerance=0.05, problems=60, test_problems=20)
    assert loose.reward(example(365.2422), "<answer>360 day</answer>") == 1
    assert FEW.reward(example(365.2422), "<answer>360 day</answer>") < 1


HOSTILE = [
    "",
    " ",
    "\0",
    "\ud800",
    "<answer>\ud800</answer>",
    "<answer>" * 2_000,
    "</answer>" * 2_000,
    "<answer></answer>" * 999,
    "9" * 10_000,
    "<answer>" + "9" * 10_000 + "</answer>",
    "<answer>" + "1," * 5_000 + "</answer>",
    "=-" * 5_000,
    "<answer>1e99999999999</answer>",
    "<answer>NaN</answer>",
    "<answer>-inf</answer>",
    "<answer>6\x006</answer>",
    "<answer>__import__('os').abort()</answer>",
    "<answer>٦</answer>",
    "<answer>👩‍👩‍👧‍👦</answer>" * 50,
    "6/0 = <answer>6/0</answer>",
    "%s {question} ${oc.env:HOME} \\1",
    '{"answer": 6}',
    "1" + "*1" * 4_999 + "=1",
    "-" * 10_000,
    "(" * 10_000,
    "6",
    "\n" * 10_000,
]


@pytest.mark.parametrize("completion", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_completions_earn_nothing(completion):
    assert FEW.reward(example(6), completion) == 0
    assert FEW.metrics([example(6)], [completion]) == {"accuracy": 0, "answered": 0}
    assert FEW.answer(completion) is None
    assert isinstance(FEW.path_key(completion), str)


@given(st.text(alphabet="06.,e-+*/=x× \n<answer>kmNaN", max_size=80) | st.text(max_size=80))
def test_any_text_has_a_reward_and_a_key(text):
    for completion in (text, f"<answer>{text}</answer>"):
        reward = FEW.reward(example(6), completion)
        assert 0 <= reward <= 1
        found = number(completion)
        assert (reward == 1) == (found is not None and abs(found - 6) <= Fraction("0.06"))
        key = path_key(completion)
        assert bool(key) == any(c in "0123456789" for c in completion) or not key
        assert (
            path_key(key) == key or " -" in key
        )  # a list of numbers, in which a minus reads as a sign between two


# --- keys of a calculation


@pytest.mark.parametrize(
    ("key", "texts"),
    [
        (
            "7*1000=7000",
            [
                " 7*1000 = <answer>7000</answer>",
                "1 km = 1000 m, 7*1000 = <answer>7000</answer>",
                "1 km = 1,000 m. So 7 km * 1,000 = 7,000.0 m",
                "7 × 1000\n= 7000",
                "7 x 1000=07000",
                "7·1000 = <answer>7e3 m</answer>",
            ],
        ),
        (
            "7*100=700;700*10=7000",
            ["7*100 = 700, 700*10 = <answer>7000</answer>", "7*100=700; 700 × 10 = 7000."],
        ),
        (
            "68-32=36;36/1.8=20",
            ["68-32 = 36, 36/1.8 = <answer>20</answer>", "68 F − 32 = 36, 36 ÷ 1.80 = 20 C"],
        ),
        ("-5+273.15=268.15", ["-5+273.15 = 268.15", "−5 + 273.150 = <answer>268.15 K</answer>"]),
        ("1 3.6 36", ["1 m/s = 3.6 km/h, so <answer>36</answer>", "1 3.60 (36)"]),
        ("7000", ["<answer>7,000</answer>", "it is 7000"]),
        ("", ["", "no idea", "m**x = y", "<answer></answer>"]),
        ("4*1000=4000", ["4*1000 = 4000 cm^3", "4 m**3 * 1000 = 4000 km/h"]),
    ],
)
def test_texts_that_calculate_the_same_have_one_key(key, texts):
    assert [path_key(text) for text in texts] == [key] * len(texts)


def test_other_calculations_have_other_keys():
    texts = [
        "7*1000 = 7000",
        "1000*7 = 7000",
        "7/1000 = 7000",
        "7*1000 = 700",
        "7*100 = 700, 700*10 = 7000",
        "7000",
    ]
    assert len({path_key(text) for text in texts}) == len(texts)


# --- prompts


def test_few_shot_goes_through_the_chat_template(shared_data):
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "smollm2-135m-instruct")
    chat = make(chat=True, question="How many {to} are there per {value} {from}?")
    row = chat.examples("test")[0]
    (ids,) = encode_prompts(tokenizer, [chat.prompt(row)])
    assert (
        tokenizer.decode(ids)
        == "<|im_start|>system\nConvert the units. Calculate briefly, then give the number between"
        " <answer> and "
        "</answer>.<|im_end|>\n"
        "<|im_start|>user\nHow many gram are there per 6 kg?<|im_end|>\n"
        "<|im_start|>assistant\n1 kg = 1000 gram. 6 * 1000 = <answer>6000</answer><|im_end|>\n"
        "<|im_start|>user\nConvert 90 min to hours?<|im_end|>\n"
        "<|im_start|>assistant\n1 hour = 60 min. 90 / 60 = <answer>1.5</answer><|im_end|>\n"
        f"<|im_start|>user\n{row.question}<|im_end|>\n<|im_start|>assistant\n"
    )
    mixed = encode_prompts(tokenizer, ["7 km in m:", chat.prompt(row)])
    assert mixed == [encode_prompts(tokenizer, ["7 km in m:"])[0], ids]


def test_few_shot_without_a_chat_template_is_plain_lines():
    chat = make(
        chat=True, system="Convert.", few_shot=[{"question": "6 kg in g", "answer": "6000"}]
    )
    row = chat.examples("test")[0]
    text = f"Convert.\n6 kg in g\n6000\n\n{row.question}\n"
    assert plain(chat.prompt(row)) == text
    assert encode_prompts(byte_tokenizer(), [chat.prompt(row)]) == [list(text.encode())]


def test_no_system_text_and_no_examples():
    bare = make(chat=True, system="", few_shot=[])
    row = bare.examples("test")[0]
    assert bare.prompt(row) == [{"role": "user", "content": row.question}]


def test_a_template_that_refuses_roles_is_explained(shared_data):
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "smollm2-135m-instruct")
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported')"
        " }}{% endif %}"
    )
    chat = make(chat=True, few_shot=[])
    with pytest.raises(ConfigError) as caught:
        encode_prompts(tokenizer, [chat.prompt(chat.examples("test")[0])])
    assert str(caught.value).endswith(
        "refuses a prompt of the roles system, user: System role not supported. Leave out the"
        " system text (task.system='' in task=units), or give plain prompts (task.chat=false)."
    )


def test_chat_auto_follows_the_models_template():
    task = make(chat="auto")
    row = task.examples("test")[0]
    assert task.prompt(row) == f"{row.question}:"
    task.templated = True
    assert task.prompt(row) == make(chat=True).prompt(row)
    assert task.hint(row)[-1]["content"] != row.question
    task.templated = False
    assert task.prompt(row) == f"{row.question}:"
    with pytest.raises(ConfigError, match=r"^task\.chat=yes .* auto, true, false"):
        build({**shipped("task/units.yaml"), "chat": "yes"})


def test_a_model_without_a_template_is_taught_plain_lines():
    chat = make(chat=True)
    row = chat.examples("train")[0]
    prompt, _ = chat.pretraining(row, random.Random(0))
    assert prompt == plain(chat.prompt(row))


# --- questions


def test_it_is_a_task_and_its_yaml_makes_it(task):
    one: Task = task
    assert one.examples("test") == build(SETTINGS).examples("test")
    assert pickle.loads(pickle.dumps(FEW)).reward(example(6), "<answer>6</answer>") == 1
    rows, texts = [example(6)] * 3, ["<answer>6</answer>", "<answer>7</answer>", "7"]
    scorer = Scorer(FEW, ScoringConfig(kind="processes", workers=2, timeout_seconds=60))
    assert scorer.submit(rows, texts).result().rewards == [
        FEW.reward(e, t) for e, t in zip(rows, texts, strict=True)
    ]
    scorer.close()
    assert FEW.metrics(rows, texts) == {"accuracy": 100 / 3, "answered": 200 / 3}


def test_generated_questions_are_right_distinct_and_the_same_every_time(task):
    train, test = task.examples("train"), task.examples("test")
    assert (len(train), len(test)) == (SETTINGS["problems"], SETTINGS["test_problems"])
    assert len({e.question for e in (*train, *test)}) == len(train) + len(test)
    assert task.dropped == 0
    for row in (*train, *test):
        assert converted(row.question) == row.extra["value"]
        assert task.reward(row, f"<answer>{row.answer}</answer>") == 1
    assert [e.id for e in test] == list(range(len(test)))
    assert task.prompt(test[0]) == TEST_PROMPT


# the very row, so that another machine or Python version that draws anew is noticed
TEST_PROMPT = "24 century in year:"


def test_all_kinds_come_up():
    for kind in UNITS:
        few = make(kinds=[kind], problems=4, test_problems=2, largest_value=99, factor_digits=2)
        for row in few.examples("train"):
            found = parse(row.question)
            assert found is not None
            assert found[1].kind == found[2].kind == kind


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_pretraining_shows_right_ones_as_often_as_asked(share):
    teacher = make(share_right=share)
    draw = random.Random(1)
    rewards, by_pair = [], Counter()
    for row in teacher.examples("train"):
        for _ in range(3):
            prompt, completion = teacher.pretraining(row, draw)
            assert prompt == teacher.prompt(row)
            reward = teacher.reward(row, completion)
            assert reward > 0  # there is an answer
            rewards.append(reward == 1)
            by_pair[row.question.split(" ", 1)[1], reward == 1] += 1
    assert (
        abs(sum(rewards) / len(rewards) - share) <= 0.05
    )  # pairs of units are few, and few of them are mostly right
    if share == 0.4:
        pairs = {pair for pair, _ in by_pair}
        assert (
            0
            < sum(by_pair[pair, True] > by_pair[pair, False] for pair in pairs) / len(pairs)
            < 0.35
        )


def test_a_hint_tells_the_answer_and_nothing_else_changes():
    row = make().examples("train")[0]
    for chat in (False, True):
        chosen = make(chat=chat)
        asked, hinted = plain(chosen.prompt(row)), plain(chosen.hint(row))
        assert hinted != asked
        assert hinted.replace(f" (The answer is {row.answer}.)", "") == asked


def test_there_are_right_ways_and_wrong_ways(task):
    row = Example(0, "7 m in mm", "7000", {"value": Fraction(7000)})
    draw = random.Random(0)
    texts = [task.pretraining(row, draw)[1] for _ in range(400)]
    right = {path_key(text) for text in texts if task.reward(row, text) == 1}
    assert {"7*1000=7000", "1000*7=7000", "7*100=700;700*10=7000"} <= right
    assert {"7/1000=0.007", "7*100=700"} <= {path_key(text) for text in texts} - right
    for text in texts:  # what is written is calculated, and nothing else
        for equation in path_key(text).split(";"):
            left, sign, operand, value = re.fullmatch(
                r"([0-9.]+)([*/])([0-9.]+)=([0-9.]+)", equation
            ).groups()  # type: ignore
            operand = Fraction(operand) if sign == "*" else 1 / Fraction(operand)
            assert Fraction(left) * operand == Fraction(value)


@pytest.mark.parametrize(
    ("question", "steps"),
    [
        ("7 m in cm", {"turned": [("/", 100)], "ten_off": [("*", 10)], "neighbour": [("/", 1000)]}),
        ("7 km in m", {"turned": [("/", 1000)], "ten_off": [("*", 100)], "neighbour": []}),
        (
            "7 C in F",
            {
                "turned": [("/", Fraction("1.8")), ("-", 32)],
                "ten_off": [("*", 18), ("+", Fraction("3.2"))],
                "neighbour": [],
            },
        ),
    ],
)
def test_the_wrong_ways(question, steps):
    found = parse(question)
    assert found is not None
    assert {name: way(*found[1:]) for name, way in WRONG_WAYS.items()} == steps


# --- files


def test_real_data(shared_data, caplog):
    folder = shared_data / "unit_conversion"
    files = {"path": str(folder / "train.json"), "test_path": str(folder / "valid.json")}
    with caplog.at_level("INFO", logger="clutch"):
        real = make(**files)
    # 991 and 986 distinct questions, of which 20 stand in both, and one in the worked examples
    assert (len(real.examples("train")), len(real.examples("test")), real.dropped) == (970, 986, 20)
    assert caplog.messages == [
        f"{folder / 'train.json'}: 1 rows are dropped: their questions stand in task.few_shot",
        "units: 20 train rows are dropped: they also stand in the test rows",
    ]
    asked = {shot["question"].rstrip("?") for shot in SETTINGS["few_shot"]}
    swapped = make(path=files["test_path"], test_path=files["path"])
    assert not asked & {e.question.rstrip("?") for e in swapped.examples("test")}
    assert len(make(**files, chat=False).examples("train")) == 971, "without chat none is shown"
    questions = {split: {e.question for e in real.examples(split)} for split in ("train", "test")}
    assert not questions["train"] & questions["test"]
    assert not questions["test"] & {shot["question"] for shot in SETTINGS["few_shot"]}
    teacher, draw = make(**files, share_right=1.0), random.Random(0)
    for row in teacher.examples("train"):
        completion = teacher.pretraining(row, draw)[1]
        assert teacher.reward(row, completion) == 1, (row.question, completion)
        assert path_key(completion)
    wrong = make(**files, share_right=0.0)
    assert all(
        wrong.reward(row, wrong.pretraining(row, draw)[1]) < 1 for row in wrong.examples("train")
    )


PAIRS = [[f"How many m are there per {n} km?", 1000.0 * n] for n in range(1, 21)]


def pairs_file(folder, rows, name="rows.json"):
    if name.endswith("l"):
        text = "\n".join(
            json.dumps({"question": question, "answer": value}) for question, value in rows
        )
    else:
        text = json.dumps(rows)
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_file_is_split_without_leaks(tmp_path):
    again = [
        [f"  {question[:-1]} ", value] for question, value in PAIRS
    ]  # the same questions, spelled otherwise
    alone = make(path=pairs_file(tmp_path, PAIRS + again))
    assert (len(alone.examples("train")), len(alone.examples("test")), alone.dropped) == (16, 4, 0)
    two = make(
        path=pairs_file(tmp_path, PAIRS), test_path=pairs_file(tmp_path, again[:5], "test.jsonl")
    )
    assert (len(two.examples("train")), len(two.examples("test")), two.dropped) == (15, 5, 5)
    assert two.examples("test")[0].extra["value"] == 1000
    odd = make(
        path=pairs_file(tmp_path, [[f"{n} apples in pears", n] for n in range(9)]), share_right=1.0
    )
    row = odd.examples("train")[0]
    assert odd.pretraining(row, random.Random(0)) == (
        f"{row.question}:",
        f" <answer>{row.answer}</answer>",
    )


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "line 1 is not JSON (Expecting property name enclosed in double quotes, column 2)."),
        ("[" * 100_000, "line 1 holds a number too long to read, or is nested too deep."),
        ("[]", "has no rows. Give data with at least one row."),
        ('[["a", 1], ["b"]]', "row 2 has 1 values, but task.columns names 2"),
        ('[["a", 1], "b"]', "row 2 has 1 values, but task.columns names 2"),
    ],
)
def test_broken_files(tmp_path, content, text):
    path = tmp_path / "rows.json"
    path.write_text(content)
    said = error(path=str(path))
    assert said.startswith(f"task.path={str(path)!r}")
    assert text in said


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (math.nan, "nan"),
        (math.inf, "inf"),
        ("7", "'7'"),
        (None, "None"),
        (True, "True"),
        ([1], "[1]"),
    ],
)
def test_a_broken_answer_is_named_by_file_and_row(tmp_path, answer, shown):
    for name, place in (("rows.json", "row 3"), ("rows.jsonl", "line 3")):
        path = pairs_file(tmp_path, [*PAIRS[:2], ["2 km in m", answer]], name)
        expected = f"task.path: the answer in {path!r} {place} is {shown}. Give a finite number."
        assert error(path=path) == expected


def test_a_whole_number_may_be_larger_than_any_float(tmp_path):
    path = pairs_file(tmp_path, [*PAIRS, ["2 km in m", 10**400]])
    with pytest.raises(ConfigError, match=r"row 21 is 1000.*Give a finite number"):
        make(path=path)


def test_settings_of_generated_rows_are_refused_beside_a_file(tmp_path):
    path = pairs_file(tmp_path, PAIRS)
    for changed in ({"problems": 9}, {"kinds": ["mass"]}, {"question": "{value} {from}: {to}"}):
        (name,) = changed
        assert f"task.{name}=" in error(path=path, **changed)
    assert make(path=path, test_problems=2).examples("test")
    beside = error(path=path, test_path=path, test_problems=2)
    assert beside == "task.test_problems=2 has no effect with task.test_path. Leave it out."


def test_a_question_must_be_text(tmp_path):
    path = pairs_file(tmp_path, [*PAIRS, [7, 7]])
    assert (
        error(path=path)
        == f"task.path='question' is not a text in {path!r} row 21, but int: 7. Fix or remove the"
        " row. Fields there: question, answer."
    )


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {"test_path": "a"},
            "task.test_path='a' has no effect without task.path. Give it too.",
        ),
        ({"share_right": 2}, "task.share_right=2 is too large. Give a value of at most 1."),
        ({"tolerance": -1}, "task.tolerance=-1 is too small. Give a value of at least 0."),
        (
            {"absolute_tolerance": -1},
            "task.absolute_tolerance=-1 is too small. Give a value of at least 0.",
        ),
        (
            {"kinds": ["lenght"]},
            (
                "task.kinds=lenght is not a choice. Did you mean 'length'? Choices: length, mass,"
                " time, volume, speed, data, temperature."
            ),
        ),
        ({"template": "{value}:"}, "task.template={value}: does not hold {question}. Add it."),
        (
            {"question": "{value} {from}"},
            "task.question={value} {from} does not hold {to}. Add it.",
        ),
        (
            {"few_shot": [{"question": "6 kg in g"}]},
            "task.few_shot: example 1 has the keys question. Give it question and answer.",
        ),
        (
            {"weights": {"rigth": 1}},
            "task.weights.rigth is not a component. Components: right, answered.",
        ),
        ({"problems": 1}, "task.problems=1 is too small. Give a value of at least 2."),
        (
            {"problems": 90000, "kinds": ["mass"]},
            (
                "task.problems and task.test_problems ask for 90300 questions, but the settings"
                " make only 300. Ask for fewer, or raise task.largest_value, task.largest_factor,"
                " task.factor_digits, task.answer_digits, or add task.kinds."
            ),
        ),
    ],
)
def test_setting_errors(changed, text):
    assert error(**changed) == text
