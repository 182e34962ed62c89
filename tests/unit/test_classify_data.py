"""classify: rows, tokenizer, batches, measures, without training."""

import gzip
import json
import multiprocessing
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import ConfigError
from ddp_bench import data, metrics, tasks
from ddp_bench.config import LoaderConfig, TokenizerConfig
from ddp_bench.data import Batches, Loader, Ragged, Rows
from ddp_bench.tasks import TextFiles, Topics, Trajectories
from tests.support import ROOT
from tests.support.refusals import refuses

pytestmark = pytest.mark.usefixtures("in_cache")
TOKENIZER = TokenizerConfig(kind="bpe", vocabulary=600, lowercase=True)


# --- the order of batches


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 97),
    batch_rows=st.integers(1, 20),
    bucket=st.integers(1, 5),
    world=st.integers(1, 4),
    seed=st.integers(0, 5),
)
def test_every_row_once_an_epoch(count, batch_rows, bucket, world, seed):
    lengths = np.arange(count)[::-1] % 7 + 1
    ranks = [
        Batches(range(count), lengths, batch_rows, bucket, seed, rank, world)
        for rank in range(world)
    ]
    for epoch in range(3):
        for batches in ranks:
            batches.step = epoch * len(batches)
        shares = [list(batches) for batches in ranks]
        assert {len(share) for share in shares} == {-(-count // batch_rows)}, (
            "all ranks take the same number of steps"
        )
        assert sorted(row for share in shares for batch in share for row in batch) == list(
            range(count)
        )
        together = [
            sorted(row for batch in step for row in batch) for step in zip(*shares, strict=True)
        ]
        assert together == [sorted(batch) for batch in ranks[0].epoch(epoch)], (
            "the batch does not depend on ranks"
        )
        assert sorted(map(len, together))[1:] == [batch_rows] * (len(together) - 1), (
            "one batch at most is smaller"
        )


def test_the_order_is_a_function_of_seed_epoch_and_position():
    def from_step(step, seed=3):
        batches = Batches(range(50), np.ones(50, int), 8, 2, seed)
        batches.step = step
        return list(batches)

    whole = from_step(7)
    assert whole == from_step(7)
    assert from_step(7 + 4) == whole[4:]
    assert from_step(0) != whole
    assert from_step(7, seed=4) != whole


def test_rows_of_like_length_go_together():
    lengths = np.random.default_rng(0).integers(1, 100, 512)

    def padding(bucket):
        batches = Batches(range(512), lengths, 16, bucket, 0).epoch(0)
        return sum(max(lengths[b]) * len(b) - sum(lengths[b]) for b in batches)

    assert padding(32) < 0.15 * padding(1)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_goes_on_from_any_step(workers):
    rows = Rows({"ids": Ragged.of([[i] * (i % 5 + 1) for i in range(23)], np.int32)}, np.arange(23))
    batches = Batches(range(23), rows.lengths, 4, 2, seed=1)
    loader = Loader(
        rows,
        batches,
        LoaderConfig(workers=workers, prefetch=None, bucket_batches=2),
        torch.device("cpu"),
    )
    before = torch.random.get_rng_state()
    feed = loader.from_step(4)
    got, of_all = zip(*(next(feed) for _ in range(10)), strict=True)
    assert torch.equal(torch.random.get_rng_state(), before), "torch's generator is left alone"
    wanted = [*batches.epoch(0)[4:], *batches.epoch(1), *batches.epoch(2)][:10]
    assert [labels.tolist() for _, labels in got] == list(of_all) == wanted
    for inputs, labels in got:
        assert inputs["ids_lengths"].tolist() == [label % 5 + 1 for label in labels]
        assert [
            ids[:n].tolist() for ids, n in zip(inputs["ids"], inputs["ids_lengths"], strict=True)
        ] == [[label] * (label % 5 + 1) for label in labels.tolist()]
        assert inputs["ids"].shape[1] == inputs["ids_lengths"].max()
    del feed, loader
    assert multiprocessing.active_children() == []


def test_a_rank_without_rows_takes_part_without_loss():
    rows = Rows({"ids": Ragged.of([[1], [2, 3]], np.int32)}, np.array([0, 1]))
    inputs, labels = rows.__getitems__([])
    assert labels.tolist() == [data.IGNORED]
    assert inputs["ids"].shape == (1, 1)


def test_validation_rows_are_kept_apart():
    rows = Rows({"ids": Ragged.of([[i] for i in range(40)], np.int32)}, np.zeros(40, int))
    trained, kept = data.held_out(rows, 0.25, 0)
    assert len(kept) == 10
    assert sorted(trained + kept) == list(range(40))
    assert data.held_out(rows, 0.25, 1) != (trained, kept)
    assert data.held_out(rows, 0, 0) == (list(range(40)), [])
    with pytest.raises(ConfigError) as caught:
        data.held_out(rows, 0.001, 0)
    assert (
        str(caught.value)
        == "algo.validation_share=0.001 of 40 training rows, 40 of them different, are 0. Change"
        " it, or give more rows."
    )


def test_copies_of_a_row_are_not_split():
    """Else the best epoch would be the one that has learnt them by heart."""
    texts = [[i // 3, 7] for i in range(60)]
    rows = Rows({"ids": Ragged.of(texts, np.int32)}, np.zeros(60, int))
    trained, kept = data.held_out(rows, 0.2, 0)
    assert sorted(trained + kept) == list(range(60))
    assert 12 <= len(kept) <= 14
    assert not {texts[row][0] for row in trained} & {texts[row][0] for row in kept}
    same = Rows({"ids": Ragged.of([[1]] * 8, np.int32)}, np.zeros(8, int))
    with pytest.raises(ConfigError, match="of 8 training rows, 1 of them different, are 8"):
        data.held_out(same, 0.25, 0)


# --- tokenizer


def test_texts_are_tokenised_once_and_kept(monkeypatch):
    task = Topics(rows=60, test_rows=20)
    first, tokenizer = data.prepare(task, TOKENIZER, 16, print)
    assert first["train"].lengths.max() == 16, "longer texts are cut"
    text = task.rows("test")[3].value
    assert (
        first["test"].fields["ids"].padded([3])[0][0].tolist()[:16]
        == tokenizer.encode(text).ids[:16]
    )
    assert tokenizer.decode(tokenizer.encode("Flour, ÄÖ!").ids).strip() == "flour, äö!", (
        "any text, in bytes"
    )
    monkeypatch.setattr(data, "train_tokenizer", lambda *_: pytest.fail("trained again"))
    second, _ = data.prepare(task, TOKENIZER, 16, print)
    assert second["train"].digest() == first["train"].digest()
    with pytest.raises(pytest.fail.Exception, match="trained again"):
        data.prepare(task, TOKENIZER, 17, print)


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_kinds_of_tokenizer(kind):
    found = data.train_tokenizer(
        TokenizerConfig(kind=kind, vocabulary=400, lowercase=False), ["Rain and rain"] * 3
    )
    assert found.token_to_id("[PAD]") == 0
    assert found.decode(found.encode("Rain and rain").ids).strip() == "Rain and rain"


# --- class tasks from files


def files(folder, train: bytes, test: bytes = b'{"text": "other", "label": "a"}\n', suffix="jsonl"):
    folder.mkdir(exist_ok=True)
    (folder / f"train.{suffix}").write_bytes(train)
    (folder / f"test.{suffix}").write_bytes(test)
    return {"train": str(folder / f"train.{suffix}"), "test": str(folder / f"test.{suffix}")}


def texts(**given):
    return TextFiles(
        **{
            **dict(
                name="custom_text",
                path=None,
                train=None,
                test=None,
                text_field="text",
                label_field="label",
            ),
            **dict(first_label=0, classes=None, on_bad_row="error"),
        }
        | given
    )


GOOD = b'{"text": "one", "label": "a"}\n{"text": "two", "label": "b"}\n'
BAD = {
    "missing label": (
        b'{"text": "x"}\n',
        "task.label_field='label' is not a field of {train!r} line 3.",
    ),
    "empty label": (
        b'{"text": "x", "label": " "}\n',
        "task.label_field='label' is empty in {train!r} line 3.",
    ),
    "label of no kind": (
        b'{"text": "x", "label": true}\n',
        "task.label_field='label' is not a text in {train!r} line 3, but bool: True.",
    ),
    "unknown label": (
        b'{"text": "x", "label": "c"}\n',
        (
            "{train!r} line 3 has the label 'c', which is not a class. Classes: a, b. Correct the"
            " row, set task.classes, or leave it out with task.on_bad_row=skip."
        ),
    ),
    "empty text": (
        b'{"text": "", "label": "a"}\n',
        (
            "task.text_field='text' is empty in {train!r} line 3. Fix or remove the row."
            " Fields there: text, label."
        ),
    ),
    "bad UTF-8": (
        '{"text": "ō'.encode() + b'\xe9", "label": "a"}\n',
        (
            "task.train={train!r}: line 3 is not UTF-8: byte 0xe9 at offset 72 of the text. "
            "Convert the file, for example with iconv -f LATIN1 -t UTF-8"
        ),
    ),
    "no JSON": (
        b"oops\n",
        (
            "task.train={train!r}: line 3 is not JSON (Expecting value, column 1). Each line must"
            ' be one object, such as {{"question": "..."}}.'
        ),
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_row_is_an_error_with_file_and_line(tmp_path, kind):
    line, text = BAD[kind]
    paths = files(tmp_path / "d", GOOD + line)
    with pytest.raises(ConfigError) as caught:
        texts(**paths, classes=["a", "b"])
    assert str(caught.value).startswith(text.format(**paths))


@pytest.mark.parametrize("kind", ["missing label", "unknown label", "empty text"])
def test_bad_rows_are_counted_with_the_first_places(tmp_path, kind):
    line, _ = BAD[kind]
    paths = files(tmp_path / "d", GOOD + 4 * line)
    with pytest.raises(ConfigError, match=r"line 3.* 4 rows are bad; .*: line 4, line 5\."):
        texts(**paths, classes=["a", "b"])


def test_bad_rows_can_be_skipped_and_are_counted(tmp_path, caplog):
    paths = files(tmp_path / "d", b"".join(line for line, _ in BAD.values()) + GOOD)
    caplog.set_level("WARNING", "clutch")
    task = texts(**paths, classes=["a", "b"], on_bad_row="skip")
    assert [(row.value, row.label) for row in task.rows("train")] == [("one", 0), ("two", 1)]
    said = "\n".join(caplog.messages)
    assert "6 bad rows of the train split are skipped. The first: " in said
    assert "1 bad rows of the train split are skipped. The first: " in said, (
        "the one whose label is unknown"
    )
    refuses(
        lambda: texts(**files(tmp_path / "e", BAD["empty text"][0]), on_bad_row="skip"),
        key="task.text_field",
        value="text",
    )


def test_classes_by_number_by_name_and_as_found(tmp_path):
    rows = (
        b'{"text": "one", "label": 10}\n{"text": "two", "label": 9}\n{"text": "three", "label":'
        b' "x"}\n'
    )
    task = texts(**files(tmp_path / "d", rows, b'{"text": "other", "label": "9"}\n'))
    assert task.classes == ["9", "10", "x"]
    assert [row.label for row in task.rows("train")] == [1, 0, 2]
    rows = (
        b'{"text": "one", "label": 1}\n{"text": "two", "label": "2"}\n{"text": "three", "label":'
        b' "good"}\n'
    )
    paths = files(tmp_path / "d", rows, b'{"text": "other", "label": "good"}\n')
    task = texts(**paths, classes=["bad", "good"], first_label=1)
    assert [row.label for row in task.rows("train")] == [0, 1, 1]
    # Stars from 1 to 5, once as what they are, and once counted from 0.
    for first in (0, 1):
        lines = [b'{"text": "%d", "label": %d}' % (i, i + first) for i in range(5)]
        paths = files(tmp_path / "stars", b"\n".join(lines), b'{"text": "other", "label": 2}\n')
        task = texts(**paths, classes=["1", "2", "3", "4", "5"])
        assert [row.label for row in task.rows("train")] == [0, 1, 2, 3, 4]
    mixed = b'{"text": "a", "label": 0}\n{"text": "b", "label": 1}\n{"text": "c", "label": 5}\n'
    with pytest.raises(ConfigError, match="label '1' is the name of one class and the number of"):
        texts(**files(tmp_path / "stars", mixed), classes=["1", "2", "3", "4", "5"])
    # Without task.classes a number is a name, and no place in the list of the others.
    paths = files(tmp_path / "d", rows, b'{"text": "other", "label": "0"}\n')
    with pytest.raises(ConfigError, match=r"label '0', which is not a class\. Classes: 1, 2, good"):
        texts(**paths)
    refuses(lambda: texts(**paths, first_label=1), key="task.first_label", value="1")
    odd = '{"text": "one", "label": "²"}\n{"text": "two", "label": "x"}\n'.encode()
    assert texts(**files(tmp_path / "d", odd, b'{"text": "b", "label": "x"}\n')).classes == [
        "x",
        "²",
    ]
    with pytest.raises(ConfigError, match=r"have 1 class\. Give at least 2"):
        texts(
            **files(
                tmp_path / "d", b'{"text": "one", "label": 1}\n', b'{"text": "b", "label": 1}\n'
            )
        )


def test_labels_of_one_value_are_in_one_order():
    """The order of a set of texts differs from process to process."""
    shown = (
        "from ddp_bench.tasks import sort_labels; print(sort_labels({'1', '01', '001', '10', 'b'}))"
    )
    for seed in "0123":
        environment = dict(os.environ, PYTHONHASHSEED=seed)
        command = [sys.executable, "-c", shown]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=ROOT, check=True
        )
        assert done.stdout.strip() == "['001', '01', '1', '10', 'b']"


def test_files_of_all_kinds_of_rows(tmp_path):
    tsv = b"text\tlabel\none\ta\ntwo\tb\n"
    paths = files(tmp_path / "t", tsv, b"text\tlabel\nother\tb\n", "tsv")
    assert [row.value for row in texts(**paths).rows("train")] == ["one", "two"]
    csv = b"text,label\none,a\ntwo,b\nother,b\n"
    paths = files(tmp_path / "c", csv, b"text,label\nother,b\n", "CSV")
    assert [row.value for row in texts(**paths).rows("train")] == ["one", "two"]


def test_csv_gz_with_quotes_and_joined_fields(tmp_path):
    folder = tmp_path / "d"
    folder.mkdir()
    train = 'label,title,body\n1,"One, two","a ""b""\nc"\n2,Three,d\n2,Four,e\n'
    (folder / "train.csv.gz").write_bytes(gzip.compress(train.encode()))
    (folder / "test.jsonl").write_text(
        '{"title": "Three", "body": "d", "label": 2}\n{"title": "F", "body": "g", "label": 1}\n'
    )
    task = texts(path=str(folder), text_field="title, body")
    assert [row.value for row in task.rows("train")] == [
        'One, two a "b"\nc',
        "Four e",
    ], "a text of the test rows is left out"


def test_csv_cells_may_be_long(tmp_path):
    long = "word " * 40_000
    (tmp_path / "train.csv").write_text(f"label,text\na,{long}\nb,short\n")
    (tmp_path / "test.csv").write_text("label,text\na,other\n")
    task = texts(path=str(tmp_path))
    assert [row.value for row in task.rows("train")] == [long.strip(), "short"]


def test_csv_errors(tmp_path):
    for text, error in {
        "text,label\none,a\ntwo\n": (
            "line 3 has 1 cells, but line 1 names 2 columns: text, label. Fix or remove it."
        ),
        'text,label\n"one\ntwo",a\n"open,b\n': "line 4: unexpected end of data. Fix or remove it.",
        "text,text\na,b\n": "line 1 names a column twice: text, text. Rename one.",
    }.items():
        paths = files(tmp_path / "d", text.encode(), suffix="csv")
        with pytest.raises(ConfigError) as caught:
            texts(**paths)
        assert str(caught.value) == f"task.train={paths['train']!r}: {error}"


def test_missing_data(tmp_path):
    for settings_, text in {
        (): (
            "task=custom_text has no data of its own. Give a folder with train.jsonl and test.jsonl"
            " (or other files of rows) or an id for the datasets library, task.path=FOLDER; or two"
            " files, task.train=FILE task.test=FILE."
        ),
        (
            ("path", "a/b"),
            ("train", "c"),
        ): "task.train=c has no effect with task.path=a/b. Give one.",
        (("path", f"{tmp_path}/no"),): (
            f"task.path='{tmp_path}/no' is not a file or a folder here, and as an id of the"
        ),
        (("path", str(tmp_path)),): (
            f"task.path='{tmp_path}' holds no rows; tried {tmp_path}, where there is nothing. Give"
            " a folder with train.jsonl or another file of rows"
        ),
    }.items():
        with pytest.raises(ConfigError) as caught:
            texts(**dict(settings_))
        assert str(caught.value).startswith(text)


def test_the_shared_rows(shared_data):
    for name, classes, counts in (
        ("ag_news", ["World", "Sports", "Business", "Sci/Tech"], (15181, 7600)),
        ("imdb", ["negative", "positive"], (5000, 2000)),
    ):
        task = texts(name=name, path=str(shared_data / name), classes=classes)
        assert tuple(len(task.rows(split)) for split in tasks.SPLITS) == counts


# --- generated tasks


def test_generated_tasks_are_reproducible_with_disjoint_splits():
    task = Topics(rows=500, test_rows=100)
    train, test = ([row.value for row in task.rows(split)] for split in tasks.SPLITS)
    assert len(set(train + test)) == 600
    assert train == [row.value for row in Topics(rows=500, test_rows=100).rows("train")]
    words = [set(text.split()) for text in tasks.TOPICS.values()]
    assert all(any(a & b for b in words if b is not a) for a in words), (
        "every topic shares words with another"
    )

    paths = Trajectories(rows=40, test_rows=10, longest=12, noise=0.1).rows("train")
    assert {len(row.value.states) for row in paths} <= set(range(3, 13))
    assert len({len(row.value.context) for row in paths}) > 3
    again = Trajectories(rows=40, test_rows=10, longest=12, noise=0.1).rows("train")
    assert all(
        np.array_equal(a.value.states, b.value.states) for a, b in zip(paths, again, strict=True)
    )


def test_a_trajectory_that_is_too_long():
    task = Trajectories(rows=40, test_rows=10, longest=30, noise=0.1)
    with pytest.raises(
        ConfigError,
        match=r"algo\.model\.max_tokens=20 is too small: the longest trajectory has \d\d tokens",
    ):
        data.prepare(task, TOKENIZER, 20, print)


# --- measures


@pytest.mark.parametrize("classes", [2, 5])
def test_measures_against_a_naive_loop(classes):
    draw = np.random.default_rng(classes)
    labels, predictions = draw.integers(0, classes, (2, 200))
    labels[labels == 0] = 1  # a class that does not occur, but is predicted
    table = [[0] * classes for _ in range(classes)]
    for label, predicted in zip(labels, predictions, strict=True):
        table[label][predicted] += 1
    scores = []
    for c in range(classes):
        right = table[c][c]
        predicted, there = sum(row[c] for row in table), sum(table[c])
        precision = right / predicted if predicted else 0.0
        recall = right / there if there else 0.0
        scores.append(2 * precision * recall / (precision + recall) if right else 0.0)
    found = metrics.confusion(torch.from_numpy(labels), torch.from_numpy(predictions), classes)
    assert found.tolist() == table
    assert metrics.macro_f1(found) == pytest.approx(100 * sum(scores) / classes)
    assert metrics.accuracy(found) == pytest.approx(100 * (labels == predictions).mean())


def test_a_class_that_never_occurs_does_not_count():
    table = torch.tensor([[3, 0, 0], [1, 2, 0], [0, 0, 0]])
    assert metrics.macro_f1(table) == pytest.approx(100 * (6 / 7 + 4 / 5) / 2)


def test_the_loss_is_the_mean_cross_entropy():
    logits, labels = torch.randn(7, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    found = metrics.measures(labels, logits.softmax(1))
    assert found["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item())
    assert json.dumps(found)


def test_the_original_files_of_ag_news(tmp_path):
    lines = ['"3","Stocks, up","They \\rose."', '"4","Chips","New ""ones""."', '"1","War","It."']
    (tmp_path / "train.csv").write_text("\n".join(lines))
    (tmp_path / "test.csv").write_text('"2","Golf","Won."\n')
    task = texts(
        path=str(tmp_path),
        columns=["label", "title", "text"],
        text_field="title,text",
        classes=["World", "Sports", "Business", "Sci/Tech"],
        first_label=1,
    )
    assert [(row.value, row.label) for row in task.rows("train")] == [
        ("Stocks, up They \\rose.", 2),
        ('Chips New "ones".', 3),
        ("War It.", 0),
    ]


def test_a_folder_of_the_hub_and_texts_by_class(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for split in ("train", "test"):
        rows = [{"text": f"{split} {n}", "label": n % 2} for n in range(4)]
        path = tmp_path / "hub" / "plain_text" / f"{split}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        for name in ("neg", "pos"):
            folder = tmp_path / "aclImdb" / split / name
            folder.mkdir(parents=True)
            for n in range(2):
                (folder / f"{n}_1.txt").write_text(f"{split} {2 * n + (name == 'pos')}")
    made = [
        texts(path=str(tmp_path / name), classes=["negative", "positive"])
        for name in ("hub", "aclImdb")
    ]
    for split in ("train", "test"):
        one, other = ({(row.value, row.label) for row in task.rows(split)} for task in made)
        assert one == other
        assert len(one) == 4


def test_a_file_in_place_of_a_folder(tmp_path):
    (tmp_path / "train.csv").write_text("text,label\na,b\n")
    with pytest.raises(ConfigError, match=r"is a file. Give a folder"):
        texts(path=str(tmp_path / "train.csv"))
