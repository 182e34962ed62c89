"""The translation task: its rows, rewards and measures, and every error text of its data and
settings.
"""

import gzip
import importlib.util
import json
import math
import pickle
import random
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import Levenshtein
import pytest
import sacrebleu
from num2words import num2words
from omegaconf import OmegaConf

from common.config import ConfigError
from common.task import build
from common.tasks.data import Reading, read_lines, read_rows
from common.tasks.similarity import find_tokenizer
from common.tasks.translate import Translate
from tests.support import ROOT

MULTI30K = ROOT / "../shared/data/multi30k"
SETTINGS: dict[str, Any] = OmegaConf.to_container(OmegaConf.load(ROOT / "conf/task/translate.yaml"))  # type: ignore
assert SETTINGS.pop("_target_") == "common.tasks.translate.Translate"
SETTINGS.pop("after")  # for common/tasks/thoughts.py

HOSTILE = [
    "",
    " ",
    "\n\n",
    "\0",
    "a\0b",
    "\ud800",
    "\udfff\ud800 dos",
    "x" * 10_000,
    "dos " * 2_500,
    "." * 10_000,
    "مرحبا \u202e olleh",
    "👩‍👩‍👧‍👦" * 50,
    "e\u0301" * 100,
    "&quot;<skipped>-\n",
    "%s {source} ${oc.env:HOME} \\1",
    "\x1b[2J\r\x85\u2028",
]


DATASETS = types.SimpleNamespace(DatasetsError=KeyError)  # stands for datasets.exceptions


def make(**changed: Any) -> Translate:
    return Translate(**{**SETTINGS, **changed})


def error(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


@pytest.fixture(scope="module")
def task() -> Translate:
    return make()


# --- embedded rows


def test_it_is_a_task_and_its_yaml_makes_it(task):
    assert Translate.name == "translate"
    node = {"_target_": "common.tasks.translate.Translate", **SETTINGS}
    assert build(node).examples("train") == task.examples("train")
    assert error(build, node | {"rewards": "bleu"}) == error(make, rewards="bleu")


def test_embedded_split_is_disjoint_complete_and_the_same_every_time(task):
    train, test = task.examples("train"), task.examples("test")
    assert (len(train), len(test)) == (800, 200)
    assert [example.id for example in train] == list(range(800))
    assert [example.id for example in test] == list(range(200))
    assert {e.question for e in train} | {e.question for e in test} == {
        num2words(n) for n in range(1000)
    }
    again = make()
    assert again.examples("train") == train
    assert again.examples("test") == test
    # the very rows, so that another process, machine or Python version that draws anew is noticed
    assert [(e.question, e.answer) for e in test[:2]] == [
        ("four hundred and thirty-nine", "cuatrocientos treinta y nueve"),
        ("six hundred and twenty-one", "seiscientos veintiuno"),
    ]
    assert task.dropped == 0


def test_embedded_answers_are_spanish(task):
    spanish = {num2words(n): num2words(n, lang="es") for n in range(1000)}
    assert all(
        e.answer == spanish[e.question] for split in ("train", "test") for e in task.examples(split)
    )
    assert spanish["seven hundred and two"] == "setecientos dos"
    longest = max(len((task.prompt(e) + e.answer).encode()) for e in task.examples("train"))
    assert longest <= 72  # prompt and answer of a byte-level model stay far below its context


def test_holdout_sets_the_number_of_test_rows():
    small = make(holdout=10)
    assert (len(small.examples("train")), len(small.examples("test"))) == (990, 10)


def test_prompt_fills_the_template_and_leaves_other_braces_alone():
    braces = make(template="{x} {source}: {source}?")
    example = braces.examples("train")[0]
    assert braces.prompt(example) == f"{{x}} {example.question}: {example.question}?"
    assert make().prompt(example) == f"{example.question} =>"


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_pretraining_shows_spanish_as_often_as_asked_and_german_else(share):
    teacher = make(share_right=share)
    draw = random.Random(1)
    rows = [example for example in teacher.examples("train") for _ in range(10)]
    german = {num2words(n): num2words(n, lang="de") for n in range(1000)}
    right = 0
    for example in rows:
        prompt, completion = teacher.pretraining(example, draw)
        assert prompt == teacher.prompt(example)
        assert completion in (example.answer, german[example.question])
        right += completion == example.answer
    deviation = math.sqrt(share * (1 - share) / len(rows))
    assert abs(right / len(rows) - share) <= 4 * deviation


def test_pretraining_is_a_function_of_the_draw(task):
    row = task.examples("train")[5]
    first, again, other = (
        [task.pretraining(row, draw)[1] for _ in range(50)]
        for draw in map(random.Random, (3, 3, 4))
    )
    assert first == again != other


# --- rewards and measures


def pairs() -> list[tuple[str, str]]:
    """Targets beside completions of every quality: right, cut, shuffled, unrelated."""
    draw = random.Random(0)
    targets = [num2words(n, lang="es") for n in range(0, 1000, 17)]
    targets += [
        "Zwei junge weiße Männer sind im Freien, in der Nähe vieler Büsche.",
        'Er sagt: "3,5 & 4.2"!',
        "Ja",
    ]
    out = []
    for target in targets:
        words = target.split()
        shuffled = draw.sample(words, len(words))
        for text in (
            target,
            target[: len(target) // 2],
            " ".join(shuffled),
            draw.choice(targets),
            f" {target}\n",
            "",
        ):
            out.append((text, target))
    return out


def score(task: Translate, completion: str, target: str) -> float:
    example = task.examples("train")[0]
    return task.reward(type(example)(0, "", target), completion)


def test_bleu_is_sacrebleus_sentence_bleu():
    bleu = make(reward="bleu")
    for completion, target in pairs():
        assert score(bleu, completion, target) == min(
            1.0, sacrebleu.sentence_bleu(completion, [target]).score / 100
        )


def test_chrf_is_sacrebleus_sentence_chrf():
    chrf = make(reward="chrf")
    for completion, target in pairs():
        assert score(chrf, completion, target) == min(
            1.0, sacrebleu.sentence_chrf(completion, [target]).score / 100
        )


def test_levenshtein_and_exact_ignore_outer_space():
    ratio, exact = make(reward="levenshtein"), make(reward="exact")
    for completion, target in pairs():
        assert score(ratio, completion, target) == Levenshtein.ratio(completion.strip(), target)
        assert score(exact, completion, target) == (completion.strip() == target)
    assert score(ratio, "setecientos tres", "setecientos dos") == pytest.approx(26 / 31)
    assert score(exact, "\n siete ", "siete") == 1.0
    assert score(exact, "Siete", "siete") == 0.0


def test_scores_do_not_depend_on_what_was_scored_before():
    bleu = make(reward="bleu")
    rows = pairs()
    first = [score(bleu, *row) for row in rows]
    assert [score(bleu, *row) for row in reversed(rows)] == first[::-1]


@pytest.mark.parametrize("name", ["levenshtein", "chrf", "bleu", "exact"])
def test_rewards_stand_any_completion(name):
    task = make(reward=name)
    example = task.examples("test")[0]
    values = task.rewards([example] * len(HOSTILE), HOSTILE)
    assert values == [task.reward(example, text) for text in HOSTILE]
    assert all(type(value) is float and 0 <= value <= 1 for value in values)  # nan fails both
    assert task.reward(example, example.answer) == 1.0
    with pytest.raises(ValueError, match="shorter"):
        task.rewards([example, example], ["one"])


def test_metrics_stand_any_completion(task):
    example = task.examples("test")[0]
    for completions in (HOSTILE, [""], ["\ud800"]):
        measured = task.metrics([example] * len(completions), completions)
        assert all(0 <= value <= 100 for value in measured.values())


def test_metrics_are_sacrebleus_corpus_scores(task):
    examples = task.examples("test")
    draw = random.Random(2)
    completions = [
        e.answer if draw.random() < 0.5 else draw.choice(examples).answer for e in examples
    ]
    references = [[e.answer for e in examples]]
    measured = task.metrics(examples, completions)
    right = sum(text == e.answer for text, e in zip(completions, examples, strict=True))
    assert list(measured) == ["bleu", "chrf", "exact"]  # the first is the headline
    assert measured["bleu"] == sacrebleu.corpus_bleu(completions, references).score
    assert measured["chrf"] == sacrebleu.corpus_chrf(completions, references).score
    assert measured["exact"] == right / 2
    assert 30 < measured["bleu"] < 90
    perfect = task.metrics(examples, [f" {e.answer}\n" for e in examples])
    assert perfect == {"bleu": 100.0, "chrf": 100.0, "exact": 100.0}


def test_metrics_do_not_warn_of_tokenized_full_stops(task, caplog):
    examples = task.examples("test")
    task.metrics(examples, ["dos ."] * len(examples))
    assert not caplog.records


def test_a_task_travels_to_a_scoring_process():
    bleu = make(reward="bleu")
    example = bleu.examples("test")[0]
    before = bleu.reward(example, "dos mil")
    there = pickle.loads(pickle.dumps(bleu))
    assert there.reward(example, "dos mil") == before
    assert there.examples("train") == bleu.examples("train")


# --- rows of one's own

ROWS = [(f"row {i}", f"zeile {i}") for i in range(20)]
TESTS = [("row 3", "other words"), ("row 100", "zeile 100"), ("row 101", "zeile 101")]


def lines(folder: Path, name: str, rows: list[tuple[str, str]]) -> tuple[str, str]:
    source = write(folder / f"{name}.en", "".join(f"{a}\n" for a, _ in rows))
    target = write(folder / f"{name}.de", "".join(f"{b}\n" for _, b in rows))
    return source, target


def zipped(path: str) -> str:
    return write(Path(path + ".gz"), gzip.compress(Path(path).read_bytes()))


def test_parallel_files_and_their_test_files(tmp_path):
    source, target = lines(tmp_path, "train", ROWS)
    test_source, test_target = lines(tmp_path, "test", TESTS)
    task = make(source=source, target=target, test_source=test_source, test_target=test_target)
    assert [(e.question, e.answer) for e in task.examples("test")] == TESTS
    assert [(e.question, e.answer) for e in task.examples("train")] == ROWS[:3] + ROWS[
        4:
    ]  # in the file's order
    assert [e.id for e in task.examples("train")] == list(range(19))
    assert task.dropped == 1  # "row 3" is asked in the test, though with other words for an answer


def test_rows_are_held_out_where_no_test_is_given(tmp_path):
    source, target = lines(tmp_path, "train", ROWS + ROWS[:5])
    task = make(source=source, target=target, holdout=6)
    train, test = task.examples("train"), task.examples("test")
    assert len(test) == 6
    assert len(train) + len(test) + task.dropped == 25
    assert task.dropped > 0  # a row that stands twice must not be on both sides
    assert not {e.question for e in train} & {e.question for e in test}
    assert make(source=source, target=target, holdout=6).examples("test") == test
    assert len(make(source=source, target=target).examples("test")) == 5


def test_all_formats_give_the_same_rows(tmp_path):
    source, target = lines(tmp_path, "train", ROWS)
    named = {"source_field": "en", "target_field": "text.de"}
    tsv = write(
        tmp_path / "a.tsv", "id\ten\ttext.de\r\n" + "".join(f"7\t{a}\t{b}\r\n" for a, b in ROWS)
    )
    csv = write(tmp_path / "a.csv", "en,text.de\n" + "".join(f"{a},{b}\n" for a, b in ROWS))
    objects = [json.dumps({"id": 7, "en": a, "text": {"de": b}}) for a, b in ROWS]
    jsonl = write(tmp_path / "a.jsonl", "\ufeff" + "\n".join(objects) + "\n\n")
    made = [
        make(source=source, target=target),
        make(source=zipped(source), target=target),
        make(path=tsv, **named),
        make(path=zipped(tsv), **named),
        make(path=csv, **named),
        make(path=jsonl, **named),
        make(path=zipped(jsonl), **named),
    ]
    for task in made[1:]:
        for split in ("train", "test"):
            assert task.examples(split) == made[0].examples(split)
    tested = write(tmp_path / "test.jsonl", objects[3] + "\n")
    with_test = make(path=tsv, test_path=tested, **named)
    assert [e.question for e in with_test.examples("test")] == ["row 3"]
    assert with_test.dropped == 1
    told = error(make, path=tsv, test_path="b", **named)
    assert told.startswith("task.test_path='b' is not a file or a folder here")


def test_pretraining_shows_right_or_swapped_targets(tmp_path):
    source, target = lines(tmp_path, "train", ROWS)
    task = make(source=source, target=target)
    train = task.examples("train")
    targets = {e.answer for e in train}
    draw = random.Random(0)
    for example in (train[0], train[7], train[-1]):
        shown = [task.pretraining(example, draw)[1] for _ in range(2000)]
        assert set(shown) == targets  # every other row's is shown, none of the test's
        assert abs(shown.count(example.answer) / 2000 - 0.4) < 0.045


class Split(list):
    """Stands for a datasets.Dataset: its rows, and the kinds of its columns."""

    features: ClassVar[dict[str, Any]] = {}


def test_a_dataset_id(tmp_path, monkeypatch):
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        rows = ROWS if kwargs["split"] == "train" else TESTS
        return Split({"translation": {"en": a, "de": b}} for a, b in rows)

    monkeypatch.setitem(
        sys.modules,
        "datasets",
        types.SimpleNamespace(load_dataset=load_dataset, exceptions=DATASETS),
    )
    named = {"source_field": "translation.en", "target_field": "translation.de"}
    task = make(dataset="some/id", dataset_config="de-en", dataset_test_split="validation", **named)
    assert asked == [
        (("some/id", "de-en"), {"split": "train"}),
        (("some/id", "de-en"), {"split": "validation"}),
    ]
    assert [(e.question, e.answer) for e in task.examples("test")] == TESTS
    assert task.dropped == 1
    turned = make(
        dataset="some/id", dataset_split="validation", dataset_test_split="train", **named
    )
    assert len(turned.examples("test")) == 20
    assert (
        error(make, dataset="some/id", **named | {"source_field": "en"})
        == "task.source_field='en' is not a field of 'some/id' split train row 1. "
        "Fields there: translation.en, translation.de."
    )


def test_dataset_errors(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    text = error(read_rows, "some/id", "task.dataset")
    assert text.startswith("task.dataset='some/id' is not a file or a folder here, and as an id")
    assert "needs the `datasets` library" in text

    def load_dataset(name, config, split):
        if name == "empty":
            return Split()
        raise FileNotFoundError("Dataset 'nope' doesn't exist on the Hub.\nmore")

    monkeypatch.setitem(
        sys.modules,
        "datasets",
        types.SimpleNamespace(load_dataset=load_dataset, exceptions=DATASETS),
    )
    next_step = "Check the id, the configuration, the split and the network; or give local files."
    assert (
        error(read_rows, "nope", "task.dataset")
        == "task.dataset='nope' cannot be loaded (split=train): Dataset 'nope' doesn't exist on"
        f" the Hub. {next_step}"
    )
    assert (
        error(read_rows, "nope", "task.dataset", "de-en")
        == "task.dataset='nope' cannot be loaded (config=de-en, split=train): "
        f"Dataset 'nope' doesn't exist on the Hub. {next_step}"
    )
    assert (
        error(read_rows, "empty", "task.dataset")
        == "task.dataset='empty' split train has no rows. Give data with at least one row."
    )


@pytest.mark.skipif(not MULTI30K.is_dir(), reason=f"no real data: {MULTI30K} is not there")
def test_multi30k():
    def files(name: str, prefix: str = "") -> dict[str, str]:
        return {
            f"{prefix}source": str(MULTI30K / f"{name}.en.gz"),
            f"{prefix}target": str(MULTI30K / f"{name}.de.gz"),
        }

    task = make(**files("train"), **files("test_2016_flickr", "test_"))
    train, test = task.examples("train"), task.examples("test")
    assert (len(train), len(test), task.dropped) == (29_000, 1_000, 0)
    assert train[0].question == "Two young, White males are outside near many bushes."
    assert train[0].answer == "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche."
    references = [[e.answer for e in test]]
    rolled = [e.answer for e in test[1:]] + [test[0].answer]
    assert task.metrics(test, rolled)["bleu"] == sacrebleu.corpus_bleu(rolled, references).score

    held_out = make(**files("train"))
    assert len(held_out.examples("test")) == 1_000
    questions = {e.question for e in held_out.examples("test")}
    assert not questions & {e.question for e in held_out.examples("train")}
    assert len(held_out.examples("train")) == 28_000 - held_out.dropped

    assert (
        error(make, **files("val"), **files("val", "test_"))
        == f"task.source={str(MULTI30K / 'val.en.gz')!r} leaves 0 train and 1014 test rows; 1014"
        " train rows also stand in the test rows. Give more rows."
    )


# --- errors of settings


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {"reward": "bleau"},
            (
                "task.reward=bleau is not a choice. Did you mean 'bleu'? Choices: levenshtein,"
                " chrf, bleu, exact."
            ),
        ),
        (
            {"template": "translate this"},
            ("task.template=translate this does not hold {source}. Add it."),
        ),
        ({"share_right": 1.5}, "task.share_right=1.5 is too large. Give a value of at most 1."),
        (
            {"share_right": math.nan},
            "task.share_right=nan is not a finite number. Give one.",
        ),
        ({"holdout": 0}, "task.holdout=0 is too small. Give a value of at least 1, or null."),
        (
            {"holdout": 999},
            "task.holdout=999 leaves 1 train and 999 test rows; 0 train rows also stand in the test"
            " rows. Give more rows.",
        ),
        (
            {"source": "a", "target": "b", "path": "c.tsv"},
            ("task.source='a' and task.path='c.tsv' both give the rows. Leave out the others."),
        ),
        (
            {"target": "b"},
            ("task.target='b' has no effect without task.source. Give it too, or leave this out."),
        ),
        (
            {"test_source": "b", "path": "a.tsv", "source_field": "a", "target_field": "b"},
            (
                "task.test_source='b' has no effect without task.source. Give it too, or"
                " leave this out."
            ),
        ),
        (
            {"test_path": "b.tsv"},
            (
                "task.test_path='b.tsv' has no effect without task.path. Give it too, or"
                " leave this out."
            ),
        ),
        (
            {"dataset_split": "train"},
            (
                "task.dataset_split='train' has no effect without task.dataset. Give it too, or"
                " leave this out."
            ),
        ),
        (
            {"source": "a", "target": "b", "source_field": "en"},
            (
                "task.source_field='en' has no effect without task.path or task.dataset. "
                "Give it too, or leave this out."
            ),
        ),
        (
            {"source": "a"},
            ("task.target is not set, but task.source='a' needs it. Give it: task.target=VALUE."),
        ),
        (
            {"source": "a", "target": "b", "test_source": "c"},
            (
                "task.test_target is not set, but task.test_source='c' needs it. "
                "Give it: task.test_target=VALUE."
            ),
        ),
        (
            {"path": "a.tsv", "source_field": "en"},
            (
                "task.target_field is not set, but task.path='a.tsv' needs it. "
                "Give it: task.target_field=VALUE."
            ),
        ),
        (
            {"source": "a", "target": "b", "test_source": "c", "test_target": "d", "holdout": 5},
            (
                "task.holdout=5 has no effect with task.test_source, which gives the test rows."
                " Leave out one of the two."
            ),
        ),
        (
            {"path": "a.txt.gz", "source_field": "en", "target_field": "de"},
            (
                f"task.path='a.txt.gz' does not exist; tried {Path.cwd()}/a.txt.gz. Correct the"
                " path: a relative one starts at the folder where the command runs."
            ),
        ),
        (
            {"dataset": "some/id", "target_field": "de"},
            (
                "task.source_field is not set, but task.dataset='some/id' needs it. "
                "Give it: task.source_field=VALUE."
            ),
        ),
        (
            {"rewards": "bleu"},
            (
                "task.rewards=bleu is not a setting. Did you mean 'reward'? Settings here:"
                f" {', '.join(SETTINGS)}. python launch.py --explain task"
            ),
        ),
    ],
)
def test_setting_errors(changed, text):
    assert error(make, **changed) == text


def test_a_setting_of_a_wrong_type_is_named():
    assert error(make, share_right="often").startswith("task.share_right=often is not a number")
    assert error(make, holdout="many").startswith("task.holdout=many is not a whole number")


def test_too_few_rows(tmp_path):
    source, target = lines(tmp_path, "train", ROWS[:2])
    assert (
        error(make, source=source, target=target)
        == f"task.source={source!r} leaves 1 train and 1 test rows; 0 train rows also stand in"
        " the test rows. Give more rows."
    )
    same, same_target = lines(tmp_path, "same", ROWS[:1] * 4)
    assert (
        error(make, source=same, target=same_target)
        == f"task.source={same!r} leaves 0 train and 1 test rows; 3 train rows also stand in the"
        " test rows. Give more rows."
    )


# --- errors of data


def test_a_missing_file_names_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        error(read_lines, "data/a.en", "task.source")
        == f"task.source='data/a.en' does not exist; tried {tmp_path}/data/a.en. "
        "Correct the path: a relative one starts at the folder where the command runs."
    )
    assert (
        error(read_lines, ".", "task.source")
        == f"task.source='.' cannot be read: Is a directory; tried {tmp_path}. Give another file."
    )
    write(tmp_path / "a.en", "one\n")
    assert read_lines("a.en", "task.source") == ["one"]


@pytest.mark.parametrize("content", ["", "\ufeff"])
def test_an_empty_file(tmp_path, content):
    for path in (
        write(tmp_path / "a.en", content),
        write(tmp_path / "b.gz", gzip.compress(content.encode())),
    ):
        assert (
            error(read_lines, path, "task.source")
            == f"task.source={path!r} is empty. Give a file with one row a line."
        )


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_bad_byte_is_named_by_line_and_offset(tmp_path, mark):
    content = mark.encode() + "gut\nschön\n".encode() + "schön\n".encode("latin1")
    offset = len(mark.encode()) + 4 + 7 + 3
    assert content[offset] == 0xF6
    for path in (
        write(tmp_path / "a.de", content),
        write(tmp_path / "a.de.gz", gzip.compress(content)),
    ):
        assert (
            error(read_lines, path, "task.target")
            == f"task.target={path!r}: line 3 is not UTF-8: byte 0xf6 at offset {offset} of the"
            " text. Convert the file, for example with iconv -f LATIN1 -t UTF-8, or name the"
            " encoding of all of it: task.format.encoding=LATIN1."
        )


def test_damaged_gzip(tmp_path):
    whole = gzip.compress(b"one\ntwo\n" * 1000)
    damaged = whole[:20] + bytes([whole[20] ^ 0xFF]) + whole[21:]
    for content, reason in (
        (b"\x00\xffne\ntwo\n", "its first bytes are b'\\x00\\xff'"),
        (whole[:-10], "Compressed file ended before the end-of-stream marker was reached"),
        (whole[:-8] + b"\0" * 8, "CRC check failed"),
        (damaged, ""),
    ):
        path = write(tmp_path / "a.gz", content)
        text = error(read_lines, path, "task.source")
        assert text.startswith(f"task.source={path!r} is not a whole gzip file: {reason}")
        assert text.endswith(f"; tried {path}. Give another file.")


def test_lines_end_at_newlines_only(tmp_path):
    path = write(
        tmp_path / "a.en", "\ufeffone\r\ntwo\u2028still two\x0b\x85\nthree \r here\n\nfive"
    )
    assert read_lines(path, "task.source") == [
        "one",
        "two\u2028still two\x0b\x85",
        "three \r here",
        "",
        "five",
    ]


def test_parallel_file_errors(tmp_path):
    three = write(tmp_path / "a.en", "1\n2\n3\n")
    two = write(tmp_path / "a.de", "1\n2\n")
    gap = write(tmp_path / "b.de", "1\n \t\n3")
    keys = ("task.source", "task.target")
    assert (
        error(Reading().parallel, (three, two), keys)
        == f"task.source={three!r} has 3 lines and task.target={two!r} has 2. "
        "Give two files of the same length, whose lines belong together."
    )
    empty = f"task.target={gap!r} is empty in line 2. Fix or remove the row."
    assert error(Reading().parallel, (three, gap), keys) == empty
    nul = write(tmp_path / "c.de", "1\n2\0\n3")
    assert error(Reading().parallel, (three, nul), keys).startswith(
        f"task.target={nul!r} holds a NUL character in line 2. Remove it; "
    )
    assert Reading().parallel((three, three), keys) == [("1", "1"), ("2", "2"), ("3", "3")]


def test_tsv_errors(tmp_path):
    path = write(tmp_path / "a.tsv", 'en\tde\n"one\teins\n\ntwo\n')
    assert (
        error(read_rows, path, "task.path")
        == f"task.path={path!r}: line 4 has 1 cells, but line 1 names 2 columns: en, de. "
        "Fix or remove it."
    )
    write(tmp_path / "a.tsv", "en\ten\none\teins\n")
    assert (
        error(read_rows, path, "task.path")
        == f"task.path={path!r}: line 1 names a column twice: en, en. Rename one."
    )
    write(tmp_path / "a.tsv", "en\tde\n\n")
    assert (
        error(read_rows, path, "task.path")
        == f"task.path={path!r} has no rows. Give data with at least one row."
    )
    write(tmp_path / "a.tsv", 'en\tde\n"one\teins\n\ntwo\t\n')
    rows = read_rows(path, "task.path")
    assert rows[0].fields == {"en": '"one', "de": "eins"}  # a quote is text
    assert (
        error(rows[1].text, "de", "task.target_field")
        == f"task.target_field='de' is empty in {path!r} line 4. Fix or remove the row."
        " Fields there: en, de."
    )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"en": "two"', "is not JSON (Expecting ',' delimiter, column 13)"),
        ("two", "is not JSON (Expecting value, column 1)"),
        ('["two"]', "is JSON, but list and no object"),
        ("null", "is JSON, but NoneType and no object"),
    ],
)
def test_a_line_that_is_no_json_object(tmp_path, line, problem):
    path = write(tmp_path / "a.jsonl", f'{{"en": "one"}}\n\n{line}\n')
    assert (
        error(read_rows, path, "task.path")
        == f"task.path={path!r}: line 3 {problem}. Each line must be one object, such as"
        ' {"question": "..."}.'
    )


def test_jsonl_field_errors(tmp_path):
    rows = [
        '{"en": "one", "de": "eins", "n": 1}',
        '{"en": "two", "de": " ", "n": [2], "x": {"y": "deep", "z": null}}',
    ]
    path = write(tmp_path / "a.jsonl", "\n".join([*rows, '{"en": "\\ud83d half"}']))
    first, second, third = read_rows(path, "task.path")
    assert second.text("x.y", "task.target_field") == "deep"
    there, mend = "Fields there: en, de, n.", "Fix or remove the row."
    assert (
        error(first.text, "dee", "task.target_field")
        == f"task.target_field='dee' is not a field of {path!r} line 1. Did you mean 'de'? {there}"
    )
    assert (
        error(first.text, "french", "task.target_field")
        == f"task.target_field='french' is not a field of {path!r} line 1. {there}"
    )
    assert (
        error(first.text, "n", "task.target_field")
        == f"task.target_field='n' is not a text in {path!r} line 1, but int: 1. {mend} {there}"
    )
    there = "Fields there: en, de, n, x.y, x.z."
    assert (
        error(second.text, "x.z", "task.target_field")
        == f"task.target_field='x.z' is not a text in {path!r} line 2, but NoneType: None."
        f" {mend} {there}"
    )
    assert (
        error(second.text, "de", "task.target_field")
        == f"task.target_field='de' is empty in {path!r} line 2. {mend} {there}"
    )
    assert (
        error(third.text, "en", "task.source_field")
        == f"task.source_field='en' holds a lone surrogate in {path!r} line 3. {mend}"
    )
    blank = write(tmp_path / "b.jsonl", "\n\n")
    assert (
        error(read_rows, blank, "task.path")
        == f"task.path={blank!r} has no rows. Give data with at least one row."
    )


def test_field_errors_reach_the_user_of_the_task(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"en": "one", "de": "eins"}\n{"en": "two"}\n')
    assert (
        error(make, path=path, source_field="en", target_field="de")
        == f"task.target_field='de' is not a field of {path!r} line 2. Fields there: en. 1 of 2"
        f" rows are incomplete: {path!r} line 2. task.incomplete=skip leaves them out."
    )
    kept = {"source_field": "en", "target_field": "de", "incomplete": "skip"}
    assert error(make, path=path, **kept).startswith(f"task.path={path!r} leaves 0 train and 1")


# --- BLEU by language

PARALLEL = {
    "zh": ("我们明天上午去北京开会讨论新的计划", "我们明天下午去北京开会讨论新的计划"),
    "ja": ("私たちは明日の朝に東京で会議をします", "私たちは明日の夜に東京で会議をします"),
    "th": ("พรุ่งนี้เราจะไปประชุมที่กรุงเทพฯ", "วันนี้เราจะไปประชุมที่กรุงเทพฯ"),
    "ko": (
        "우리는 내일 아침에 서울에서 회의를 합니다",
        "우리는 내일 저녁에 서울에서 회의를 합니다",
    ),
}


@pytest.mark.parametrize("language", PARALLEL)
@pytest.mark.parametrize("told", [True, False])
def test_bleu_finds_the_words_of_other_scripts(tmp_path, language, told):
    wanted, said = PARALLEL[language]
    path = tmp_path / "rows.jsonl"
    lines = [{"en": f"sentence {n}", "to": f"{wanted}{n}"} for n in range(10)]
    path.write_text("\n".join(map(json.dumps, lines)))
    code = language if told else None
    own = OmegaConf.to_container(OmegaConf.load(ROOT / "conf/task/custom.yaml"))
    assert isinstance(own, dict)
    own |= {"path": str(path), "prompt_field": "en", "answer_field": "to", "reward": "bleu"}
    given = {"path": str(path), "source_field": "en", "target_field": "to", "reward": "bleu"}
    for task in (
        make(**given, target_language=code),
        build({**own, "target_language": code}),
    ):
        rows = task.examples("test")
        assert 0.2 < task.reward(rows[0], said) < 1
        measures = task.metrics(rows, [said for _ in rows])
        assert 20 < measures["bleu"] < 100
        assert task.scores(rows, [said] * len(rows))["bleu"]
        usual = {"zh": "zh", "ja": "ja-mecab", "ko": "ko-mecab", "th": "char"}[language]
        installed = importlib.util.find_spec("MeCab") and importlib.util.find_spec("mecab_ko")
        kind = usual if installed or language in ("zh", "th") else "char"
        assert f"|tok:{kind}|" in task.signatures["bleu"]


@pytest.mark.parametrize("language", [None, "de", "pt-BR", "deu_Latn"])
def test_bleu_of_languages_with_blanks_is_the_usual(language):
    task = make(target_language=language)
    assert "|tok:13a|" in task.signatures["bleu"]


@pytest.mark.parametrize("name", ["Chinese", "zho_Hans", "zh-TW", "Mandarin", "cmn"])
def test_languages_have_several_names(name):
    task = make(target_language=name)
    assert "|tok:zh|" in task.signatures["bleu"]


def test_a_language_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="target_language='Chinees'"):
        make(target_language="Chinees")


def test_names_in_latin_letters_do_not_hide_a_script():
    texts = ["我们使用 PyTorch 和 CUDA 训练大型语言模型", "请打开 Microsoft Word 文件"]
    assert find_tokenizer(None, texts) == "zh"
    assert find_tokenizer(None, ["The word 北京 means Beijing, the capital of China"]) == "13a"
    assert find_tokenizer(None, ["12 + 3 = 15", ""]) == "13a"


@pytest.mark.parametrize("name", ["fra.txt", "fra.tsv", "fra.tsv.gz"])
def test_the_three_columns_of_tatoeba(tmp_path, name):
    lines = [f'Go {n}.\t"Va {n} !"\tCC-BY 2.0 (France), "x"' for n in range(10)]
    content = "\n".join(lines).encode()
    path = write(tmp_path / name, gzip.compress(content) if name.endswith(".gz") else content)
    fields = {"source_field": "en", "target_field": "fr"}
    task = make(path=path, columns=["en", "fr", "source"], **fields)
    assert {e.answer for e in task.examples("train")} <= {f'"Va {n} !"' for n in range(10)}
    assert "is not a field" in error(make, path=path, **fields)
    assert "task.columns=[NAME1,NAME2,NAME3]" in error(make, path=path, **fields)
    assert error(make, columns=["en"]).startswith("task.columns=['en'] has no effect without")
