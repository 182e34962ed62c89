"""Files that are of another format, or another encoding, than their names say."""

import bz2
import gzip
import json
import lzma

import pytest

from common.config import ConfigError
from common.rollout.scoring import score
from common.tasks import Example
from common.tasks.data import read_file, read_lines
from tests.unit.test_countdown import ROWS, make

LINE = b'{"question": "a", "answer": "b"}\n'


def complaint(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_file(str(tmp_path / name), "task.path")
    return str(caught.value)


@pytest.mark.parametrize("byte", [0x80, 0x85, 0x91, 0x92, 0x96, 0x97])
def test_quotes_and_dashes_of_windows_are_not_latin_1(tmp_path, byte):
    text = complaint(tmp_path, "a.jsonl", LINE + b'{"question": "caf\xe9 it%cs"}\n' % byte)
    assert "iconv -f WINDOWS-1252 " in text
    assert "iconv -f LATIN1 " in complaint(
        tmp_path, "a.jsonl", '{"a": "Tōkyō"}\n'.encode() + b"\xe9"
    )


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.tsv"])
def test_a_file_of_another_format_is_named_as_such(tmp_path, name):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    text = complaint(tmp_path, name, gzip.compress(LINE))
    assert "a gzip file" in text
    assert f"{name}.gz" in text
    assert "iconv" not in text
    parquet.write_table(pyarrow.table({"question": ["a"]}), tmp_path / "b")
    content = (tmp_path / "b").read_bytes()
    text = complaint(tmp_path, name, content)
    assert "a Parquet file" in text
    assert "a.parquet" in text
    assert "a.parquet.gz" in complaint(tmp_path, f"{name}.gz", gzip.compress(content))
    for packed, kind in ((bz2.compress(LINE), "bzip2"), (lzma.compress(LINE), "xz")):
        assert kind in complaint(tmp_path, name, packed)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet.gz", "a.csv.gz"])
def test_a_name_that_ends_in_gz_for_a_file_that_is_not_zipped(tmp_path, name):
    assert "is a text file" in complaint(tmp_path, name, LINE)
    assert "is a Parquet file" in complaint(tmp_path, name, b"PAR1\x00\x15")


def test_text_that_begins_as_another_format_does_is_text(tmp_path):
    for begin in (b"PAR1 is a word\n", b"BZh is one\n", b"ARROW1\n"):
        (tmp_path / "a.txt").write_bytes(begin)
        assert read_lines(str(tmp_path / "a.txt"), "key") == [begin.decode().strip()]


def test_countdown_reads_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    one, other = (make(path=str(tmp_path / f"rows.{kind}")) for kind in ("parquet", "jsonl"))
    assert one.examples("train") == other.examples("train")
    (tmp_path / "rows.data").write_bytes((tmp_path / "rows.parquet").read_bytes())
    with pytest.raises(ConfigError, match="is a Parquet file"):
        make(path=str(tmp_path / "rows.data"))


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
    [row] = read_file(str(tmp_path / "a.jsonl"), "task.path")
    with pytest.raises(ConfigError, match=r"task.prompt_field='q' is a conversation .* line 1"):
        row.text("q", "task.prompt_field")
