"""Files that are of another format, or another encoding, than their names say."""

import bz2
import gzip
import json
import lzma

import pytest

from common.config import ConfigError
from common.scoring import score
from common.task import Example
from common.tasks.data import Reading, read_lines, read_rows
from tests.support.refusals import refuses

LINE = b'{"question": "a", "answer": "b"}\n'


def complaint(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_rows(str(tmp_path / name), "task.path")
    return str(caught.value)


@pytest.mark.parametrize("byte", [0x85, 0x91, 0x92, 0x96, 0x97])
def test_quotes_and_dashes_of_windows_are_read_and_named(tmp_path, byte):
    (tmp_path / "a.jsonl").write_bytes(LINE + b'{"question": "caf\xe9 it%cs"}\n' % byte)
    reading = Reading()
    _, row = reading.rows(str(tmp_path / "a.jsonl"), "task.path")
    assert row.whole == {"question": f"café it{bytes([byte]).decode('cp1252')}s"}
    [note] = reading.notes
    assert "Windows-1252" in note
    assert "café" in note


def test_utf_8_with_bytes_that_are_not_is_refused(tmp_path):
    text = complaint(tmp_path, "a.jsonl", '{"a": "Tōkyō"}\n'.encode() + b"\xe9")
    assert "line 2 is not UTF-8: byte 0xe9" in text
    assert "iconv -f LATIN1 " in text


PACKERS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv.gz", "a.tsv.xz"])
@pytest.mark.parametrize("kind", PACKERS)
def test_what_packs_a_file_is_told_by_its_first_bytes(tmp_path, name, kind):
    lines = {"jsonl": LINE, "csv": b"question,answer\na,b\n", "tsv": b"question\tanswer\na\tb\n"}
    content = lines[name.split(".")[1]]
    for packed in (content, PACKERS[kind](content), gzip.compress(PACKERS[kind](content))):
        (tmp_path / name).write_bytes(packed)
        [row] = read_rows(str(tmp_path / name), "task.path")
        assert row.whole == {"question": "a", "answer": "b"}


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet.gz"])
def test_what_a_file_is_is_told_by_its_first_bytes(tmp_path, name):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"question": ["a"]}), tmp_path / "b")
    (tmp_path / name).write_bytes((tmp_path / "b").read_bytes())
    [row] = read_rows(str(tmp_path / name), "task.path")
    assert row.whole == {"question": "a"}
    assert "cannot be read as Parquet" in complaint(tmp_path, name, b"PAR1\x00\x15")


def test_text_that_begins_as_another_format_does_is_text(tmp_path):
    for begin in (b"PAR1 is a word\n", b"BZh is one\n", b"ARROW1\n"):
        (tmp_path / "a.txt").write_bytes(begin)
        assert read_lines(str(tmp_path / "a.txt"), "key") == [begin.decode().strip()]


@pytest.mark.parametrize("value", [None, 0.5, True, "0.5", {"a": 1}, {0.5}])
def test_a_batched_reward_that_returns_no_list(value):
    class Task:
        def rewards(self, examples, completions):
            return value

    with pytest.raises(ConfigError) as caught:
        score(Task(), [Example(0, "q", "a")], ["text"])  # type: ignore[arg-type]
    text = str(caught.value)
    assert "Task.rewards returned" in text
    assert type(value).__name__ in text
    assert "a list with one number" in text
    assert "iterable" not in text


@pytest.mark.parametrize("row", ['{"a": 1, "a": 2}', '{"b": {"a": 1, "c": 0, "a": 1}}'])
def test_a_key_that_a_row_has_twice(tmp_path, row):
    text = complaint(tmp_path, "a.jsonl", f'{{"a": 0}}\n{row}\n'.encode())
    assert "line 2 names 'a' twice" in text


def test_a_prompt_that_is_a_conversation_is_refused_as_such(tmp_path):
    line = {"q": [{"role": "user", "content": "1+1?"}], "a": "2"}
    (tmp_path / "a.jsonl").write_text(json.dumps(line))
    [row] = read_rows(str(tmp_path / "a.jsonl"), "task.path")
    refuses(
        lambda: row.text("q", "task.prompt_field"),
        key="task.prompt_field",
        value="q",
        try_next="line 1",
    )


def test_rows_by_a_key(tmp_path):
    """As pandas writes them with orient="index"; an object of settings is none."""
    rows = {"a7": {"question": "1+1", "answer": 2}, "b9": {"question": "2+2", "answer": 4}}
    (tmp_path / "a.json").write_text(json.dumps(rows))
    reading = Reading()
    read = list(reading.rows(str(tmp_path / "a.json"), "task.path"))
    assert [row.whole for row in read] == list(rows.values())
    assert "a7, b9" in reading.notes[0]
    splits = {name: {"question": ["1+1"], "answer": [2]} for name in ("train", "test")}
    (tmp_path / "a.json").write_text(json.dumps(splits))
    [row] = read_rows(str(tmp_path / "a.json"), "task.path")
    assert row.whole == splits
