"""Rows of files as people have them: every format, packing, encoding and habit, read back equal or
refused with the setting that helps.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import random
import tracemalloc
import zipfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.config import ConfigError
from common.tasks.data import Reading, Row, read_rows, with_point
from tests.support.refusals import refuses

ROWS = [
    {"question": "What is 1 + 1?", "answer": "2"},
    {"question": "Name, please; now", "answer": 'say "x"'},
    {"question": "two\nlines", "answer": "a\tb"},
]


def read(path, format=None, columns=None, split="train", config=None, **more):
    reading = Reading(columns, format, **more)
    rows = [row.whole for row in reading.rows(str(path), "task.path", config, split)]
    return rows, reading


def refusal(path, *args, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        read(path, *args, **kwargs)
    assert str(caught.value).isprintable()
    return str(caught.value)


def as_csv(rows, **how) -> str:
    text = io.StringIO()
    writer = csv.writer(text, **how)
    writer.writerow(rows[0])
    writer.writerows(row.values() for row in rows)
    return text.getvalue()


def zipped(content: bytes, *names: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, content if name == names[0] else b"about the rows")
    return file.getvalue()


def zstd(content: bytes) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    file = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(file, "zstd") as packed:
        packed.write(content)
    return file.getvalue().to_pybytes()


PACKERS = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
    ".zip": lambda content: zipped(content, "rows.data", "__MACOSX/._rows.data"),
}
JSON = {
    "a.jsonl": lambda rows: "".join(json.dumps(row) + "\n" for row in rows),
    "a.ndjson": lambda rows: "\r\n".join(map(json.dumps, rows)),
    "array.json": json.dumps,
    "pretty.json": lambda rows: json.dumps(rows, indent=2, ensure_ascii=False),
    "lines.json": lambda rows: "\n\n".join(map(json.dumps, rows)),
    "values.jsonl": lambda rows: "\n".join(json.dumps(row, indent=1) for row in rows),
    "squad.json": lambda rows: json.dumps({"version": "1.1", "data": rows}),
    "bbh.json": lambda rows: json.dumps({"canary": "x", "examples": rows}, indent=1),
    "columns.json": lambda rows: json.dumps({key: [row[key] for row in rows] for key in rows[0]}),
    "pandas.json": lambda rows: json.dumps(
        {key: {str(n): row[key] for n, row in enumerate(rows)} for key in rows[0]}
    ),
    "split.json": lambda rows: json.dumps(
        {"columns": [*rows[0]], "index": [0], "data": [[*row.values()] for row in rows]}
    ),
}


@pytest.mark.parametrize("name", JSON)
def test_json_of_any_shape(tmp_path, name):
    (tmp_path / name).write_text(JSON[name](ROWS), encoding="utf-8")
    assert read(tmp_path / name)[0] == ROWS


@pytest.mark.parametrize("packed", PACKERS)
def test_packed_files_whatever_their_names(tmp_path, packed):
    for name, content in (("a.jsonl", JSON["a.jsonl"](ROWS)), ("a.csv", as_csv(ROWS))):
        for path in (tmp_path / f"{name}{packed}", tmp_path / name):
            path.write_bytes(PACKERS[packed](content.encode()))
            assert read(path)[0] == ROWS


def test_files_by_columns(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import feather, ipc, parquet

    table = pyarrow.Table.from_pylist(ROWS)
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=1)
    feather.write_feather(table, str(tmp_path / "a.feather"))
    with ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as file:
        file.write_table(table, max_chunksize=2)
    with ipc.new_stream(str(tmp_path / "stream.arrow"), table.schema) as stream:
        stream.write_table(table)
    for name in ("a.parquet", "a.feather", "a.arrow", "stream.arrow"):
        assert read(tmp_path / name)[0] == ROWS
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
        assert read(tmp_path / f"{name}.gz")[0] == ROWS


def test_a_workbook(tmp_path):
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    for cells in ([*ROWS[0]], *([*row.values()] for row in ROWS), ["three", 7.5]):
        book.active.append(cells)
    book.create_sheet("empty")
    book.save(tmp_path / "a.xlsx")
    rows, _ = read(tmp_path / "a.xlsx")
    assert rows == [*ROWS, {"question": "three", "answer": 7.5}]
    book["empty"].append(["x"])
    book.save(tmp_path / "a.xlsx")
    assert "several sheets with rows: Sheet, empty" in refusal(tmp_path / "a.xlsx")
    assert len(read(tmp_path / "a.xlsx", {"rows": "Sheet"})[0]) == 4


def test_a_zip_file_of_several_files(tmp_path):
    content = JSON["a.jsonl"](ROWS).encode()
    (tmp_path / "a.zip").write_bytes(zipped(content, "rows.jsonl", "readme"))
    assert read(tmp_path / "a.zip")[0] == ROWS
    (tmp_path / "b.zip").write_bytes(zipped(content, "rows", "readme"))
    assert "holds readme, rows. Name the file in it" in refusal(tmp_path / "b.zip")
    assert read(tmp_path / "b.zip" / "rows")[0] == ROWS
    assert "does not exist" in refusal(tmp_path / "c.zip" / "rows")


@pytest.mark.parametrize(
    ("first", "kind"),
    [
        (b"SQLite format 3\0", "SQLite"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"\x80\x04\x95", "a pickle"),
        (b"\xd0\xcf\x11\xe0", "xlsx"),
    ],
)
def test_what_is_not_read_is_named(tmp_path, first, kind):
    for name in ("a.jsonl", "a.csv", "a.data"):
        (tmp_path / name).write_bytes(first)
        assert kind in refusal(tmp_path / name)


# --- where rows are in JSON


def test_rows_inside_of_rows(tmp_path):
    qas = [{"question": f"q{n}", "answers": [{"text": f"a{n}"}]} for n in range(2)]
    squad = {"data": [{"title": "t", "paragraphs": [{"context": "c", "qas": qas}]}]}
    (tmp_path / "a.json").write_text(json.dumps(squad))
    rows, reading = read(tmp_path / "a.json")
    assert rows == squad["data"]
    assert "task.format.rows=data.paragraphs" in reading.notes[0]
    rows, _ = read(tmp_path / "a.json", {"rows": "data.paragraphs.qas"})
    assert rows == [{"title": "t", "context": "c", **row} for row in qas]
    [first, _] = Reading(format={"rows": "data.paragraphs.qas"}).rows(
        str(tmp_path / "a.json"), "task.path"
    )
    assert first.text("answers.0.text", "task.answer_field") == "a0"
    assert "has no 'paragraph' in line 1" in refusal(
        tmp_path / "a.json", {"rows": "data.paragraph.qas"}
    )


def test_several_lists_of_rows_are_not_guessed(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"train": ROWS, "test": ROWS[:1]}))
    text = refusal(tmp_path / "a.json")
    assert "task.format.rows=train or task.format.rows=test" in text
    assert read(tmp_path / "a.json", {"rows": "test"})[0] == ROWS[:1]


def test_lists_in_place_of_objects(tmp_path):
    pairs = [["a", 1], ["b", 2]]
    for name, content in (
        ("a.json", json.dumps(pairs)),
        ("a.jsonl", "\n".join(map(json.dumps, pairs))),
    ):
        (tmp_path / name).write_text(content)
        rows, _ = read(tmp_path / name, columns=["q", "n"])
        assert rows == [{"q": "a", "n": 1}, {"q": "b", "n": 2}]
        assert "no object" in refusal(tmp_path / name)
        assert "row 1 has 2 values, but task.columns names 3" in refusal(
            tmp_path / name, columns=["a", "b", "c"]
        ).replace("line 1", "row 1")
    (tmp_path / "a.jsonl").write_text(JSON["a.jsonl"](ROWS))
    assert "task.columns has no effect" in refusal(tmp_path / "a.jsonl", columns=["a", "b"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('[{"a": 1},\n {"a": 2}\n {"a": 3}]', "line 3 is not JSON: the array has '{'"),
        ('[{"a": 1},\n {"a": 2},', "line 2 is not JSON"),
        ('[{"a": 1},\n {"a": 2}\n', "line 3 is not JSON: the array ends before its ']'"),
        ('[{"a": 1}\n] x', "line 2 is not JSON: the array has ended"),
        ('[{"a": 1},\n {"a" 2}]', "line 2 is not JSON (Expecting ':' delimiter, column 7)"),
        ('[{"a": 1},\n {"a": 1, "a": 2}]', "line 2 names 'a' twice"),
        ('{"a": 1}\n{"a":', "line 2 is not JSON"),
        ('{\n"a": 1}\n{\n"a": }', "line 4 is not JSON (Expecting value, column 6)"),
        ("3", "int and no object"),
    ],
)
def test_broken_json_names_the_line(tmp_path, content, said):
    (tmp_path / "a.json").write_text(content)
    assert said in refusal(tmp_path / "a.json")


def test_rows_of_json_are_named_by_their_places(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=1))
    where = [row.where for row in read_rows(str(tmp_path / "a.json"), "task.path")]
    assert where[1:] == [f"{str(tmp_path / 'a.json')!r} row {n} (line {4 * n - 2})" for n in (2, 3)]
    long = [{"text": "x" * 100_000, "n": n} for n in range(5)]  # longer than a piece that is read
    (tmp_path / "a.json").write_text(json.dumps(long))
    assert read(tmp_path / "a.json")[0] == long


# --- tables


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.txt"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_tables_of_any_separator_and_line_end(tmp_path, delimiter, name, end):
    # csv quotes only the line end that it writes itself
    quoting = csv.QUOTE_ALL if end == "\r" else csv.QUOTE_MINIMAL
    content = as_csv(ROWS, delimiter=delimiter, lineterminator=end, quoting=quoting)
    (tmp_path / name).write_bytes(content.encode())
    form = {"delimiter": delimiter} if name == "a.txt" and delimiter != "\t" else {}
    rows, reading = read(tmp_path / name, form)
    assert rows == ROWS
    expected = "," if name == "a.csv" else "\t"
    assert any("cells separated by" in note for note in reading.notes) == (delimiter != expected)


def test_a_separator_that_cannot_be_told_is_asked_for(tmp_path):
    (tmp_path / "a.csv").write_text("a,b;c\n1,2;3\n")
    text = refusal(tmp_path / "a.csv")
    assert "by commas and by semicolons" in text
    assert read(tmp_path / "a.csv", {"delimiter": ";"})[0] == [{"a,b": "1,2", "c": "3"}]
    (tmp_path / "a.csv").write_text("a,b\tc\n1,2\t3\n")
    assert "'task.format.delimiter=tab'" in refusal(tmp_path / "a.csv")
    assert read(tmp_path / "a.csv", {"delimiter": "tab"})[0] == [{"a,b": "1,2", "c": "3"}]


def test_the_line_with_which_excel_names_the_separator(tmp_path):
    (tmp_path / "a.csv").write_bytes("sep=;\r\na;b\r\n1,5;x\r\n".encode("utf-8-sig"))
    [row] = read_rows(str(tmp_path / "a.csv"), "task.path")
    assert row.whole == {"a": "1,5", "b": "x"}
    assert row.where.endswith("line 3")


def test_empty_columns_at_the_end(tmp_path):
    (tmp_path / "a.csv").write_text("a,b,,\n1,2\n3,4,,\n5,6,,,,\n")
    rows, _ = read(tmp_path / "a.csv")
    assert [(row["a"], row["b"]) for row in rows] == [("1", "2"), ("3", "4"), ("5", "6")]
    (tmp_path / "a.csv").write_text("a,b\n1,2,,\n3,4,,x\n")
    assert "line 3 has 5 cells" in refusal(tmp_path / "a.csv").replace("has 4", "has 5")
    (tmp_path / "a.csv").write_text(",a,b\n0,x,y\n")
    assert read(tmp_path / "a.csv")[0] == [{"column 1": "0", "a": "x", "b": "y"}]


NEWS = '"3","Wall St. Bears","Wall Street\'s dwindling\\band of cynics"\n"2","Golf, again","x"\n'


def test_a_table_without_names_of_columns(tmp_path):
    (tmp_path / "a.csv").write_text(NEWS)
    rows, _ = read(tmp_path / "a.csv", columns=["label", "title", "text"])
    assert rows[0]["label"] == "3"
    assert rows[0]["text"] == "Wall Street's dwindling\\band of cynics"
    assert len(rows) == 2
    [row] = read_rows(str(tmp_path / "a.csv"), "task.path")
    with pytest.raises(ConfigError, match=r"line 1 is a row .* task.columns=\[NAME1,NAME2,NAME3\]"):
        row.text("text", "task.text_field")
    assert "task.columns names 2 columns" in refusal(tmp_path / "a.csv", columns=["a", "b"])
    (tmp_path / "SMSSpamCollection").write_text('ham\tGo, now\nspam\t"Win" now!\n')
    rows, _ = read(tmp_path / "SMSSpamCollection", columns=["label", "text"])
    assert rows[1] == {"label": "spam", "text": '"Win" now!'}


def test_names_for_a_table_that_has_some(tmp_path):
    (tmp_path / "a.csv").write_text("Class Index,Title\n" + "3,Some words\n4,Others\n" * 10)
    text = refusal(tmp_path / "a.csv", columns=["label", "text"])
    assert "line 1 looks like names of columns" in text
    for header, first in ((True, "3"), (False, "Class Index")):
        rows, _ = read(tmp_path / "a.csv", {"header": header}, columns=["label", "text"])
        assert rows[0]["label"] == first
    (tmp_path / "b.csv").write_text("Label,Text\n" + "ham,Some words\nspam,Others\n" * 10)
    assert "looks like names" in refusal(tmp_path / "b.csv", columns=["kind", "text"])
    rows, _ = read(tmp_path / "b.csv", columns=["label", "text"])  # the same names
    assert rows[0]["label"] == "ham"


def test_quotation_marks_in_a_table_with_tabs(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text('a\tb\n"Yes," he said.\tx\n"No."\ty\n')
    assert [row["a"] for row in read(path)[0]] == ['"Yes," he said.', '"No."']
    path.write_text('a\tb\n"say ""x"""\tx\nplain\ty\n')
    rows, reading = read(path)
    assert rows[0]["a"] == 'say "x"'
    assert "quotation marks around cells are not part of them" in reading.notes[0]
    path.write_text('a\tb\n"No."\ty\nplain\tz\n')
    rows, reading = read(path)
    assert rows[0]["a"] == '"No."'
    assert "quotation marks are part of the cells" in reading.notes[0]
    path.write_text('a\tb\n"No."\ty\n"say ""x"""\tz\n')
    assert "task.format.quotes" in refusal(path)
    assert read(path, {"quotes": True})[0][0]["a"] == "No."
    assert read(path, {"quotes": False})[0][0]["a"] == '"No."'


def test_backslashes_before_quotation_marks(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('a,b\n"he said \\"x, y\\" again",c:\\\\d\n"one\\ntwo",z\n')
    rows, reading = read(path)
    assert rows == [{"a": 'he said "x, y" again', "b": "c:\\d"}, {"a": "one\ntwo", "b": "z"}]
    assert "backslash" in reading.notes[0]
    path.write_text('a,b\n"C:\\",x\n"new\\n",y\n')  # no escapes: the rows are even without
    assert [row["a"] for row in read(path)[0]] == ["C:\\", "new\\n"]


# --- encodings


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "utf-16-le", "utf-16-be", "cp1252"]
)
@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.json"])
def test_encodings_are_found_out_and_named(tmp_path, encoding, name):
    rows = [{"question": "Wie groß ist das Café?", "answer": "ü – “so”"}] * 3
    content = as_csv(rows) if name == "a.csv" else json.dumps(rows, ensure_ascii=False)
    if name == "a.jsonl":
        content = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / name).write_bytes(content.encode(encoding))
    found, reading = read(tmp_path / name)
    assert found == rows
    said = "".join(reading.notes).lower()
    assert said == "" if "utf-8" in encoding else encoding.replace("cp", "windows-") in said


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("cp1251", "Как дела сегодня? Хорошо и спасибо."),
        ("gb18030", "你好吗？今天天气很好。"),
        ("shift_jis", "こんにちは世界、元気ですか。"),
        ("euc_kr", "안녕하세요 세계 여러분"),
        ("mac_roman", "Das schöne Mädchen heißt Frédéric"),
        ("cp850", "Das schöne Mädchen heißt Frédéric"),
    ],
)
def test_an_encoding_that_is_not_sure_is_asked_for(tmp_path, encoding, text):
    (tmp_path / "a.csv").write_bytes(f"question,answer\n{text},1\n".encode(encoding))
    said = refusal(tmp_path / "a.csv")
    assert "task.format.encoding=" in said
    assert "line 2 is not UTF-8" in said
    rows, _ = read(tmp_path / "a.csv", {"encoding": encoding})
    assert rows == [{"question": text, "answer": "1"}]


def test_an_encoding_that_does_not_fit(tmp_path):
    (tmp_path / "a.csv").write_bytes("q,a\nx,1\né,2\n".encode("latin-1"))
    assert "line 3 is not utf-8" in refusal(tmp_path / "a.csv", {"encoding": "utf-8"})
    refuses(
        lambda: Reading(format={"encoding": "utf8000"}), key="task.format.encoding", value="utf8000"
    )
    with pytest.raises(ConfigError, match=r"task.format.encode=.* is not a setting"):
        Reading(format={"encode": "utf-8"})


# --- numbers


@pytest.mark.parametrize(
    ("cells", "mark"),
    [
        (["3,5", "1.234,5", "1.234"], "comma"),
        (["7.4", "1,234.5", "1,234"], "point"),
        (["1.234", "5"], None),
        (["3,5", "7.4"], None),
    ],
)
def test_the_decimal_mark_of_a_file(tmp_path, cells, mark):
    (tmp_path / "a.csv").write_text("q;a\n" + "".join(f"x;{cell}\n" for cell in cells))
    assert Reading().decimal(str(tmp_path / "a.csv"), "task.path") == mark
    (tmp_path / "a.csv").write_text(as_csv([{"q": "x", "a": cell} for cell in cells]))
    assert Reading().decimal(str(tmp_path / "a.csv"), "task.path") == "point"


def test_numbers_with_a_decimal_comma():
    for text, number in {"3,5": "3.5", "1.234,5": "1234.5", "1.234": "1234", "-,5": "-.5"}.items():
        assert with_point(text, "comma", "here") == number
        assert with_point(text, "point", "here") == text
    assert with_point("x 3,5", "comma", "here") == "x 3,5"
    with pytest.raises(ConfigError, match=r"'1,234' in here is read in two ways.*decimal=comma"):
        with_point("1,234", None, "here")
    assert with_point("0.998", None, "here") == "0.998"


# --- fields


def test_fields_by_a_path():
    row = Row(
        "here",
        {"a": {"b": [{"c": "x"}, {"c": "y"}]}, "d.e": "z", "f": {"g.h": {"i": "w"}}, "n": [1, 2.5]},
    )
    for name, value in {
        "a.b.0.c": "x",
        "a.b.-1.c": "y",
        "d.e": "z",
        "f.g.h.i": "w",
        "n.1": "2.5",
    }.items():
        assert row.text(name, "key", numbers=True) == value
    for name in ("a.b.2.c", "a.b.x", "d.e.f", "n.0.1"):
        with pytest.raises(ConfigError, match="is not a field of here"):
            row.get(name, "key")
    assert row.passage("n", "key") == "1\n2.5"
    assert Row("here", {"choices": ["A", "", "C"]}).passage("choices", "key") == "A\n\nC"


def test_incomplete_rows_are_counted_or_left_out(tmp_path):
    rows = [{"q": f"q{n}", "a": None if n % 3 == 1 else f"a{n}"} for n in range(12)]
    del rows[4]["a"]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def convert(**more):
        reading = Reading(**more)
        found = reading.rows(str(tmp_path / "a.jsonl"), "task.path")
        return reading.convert(found, lambda row: row.text("a", "task.answer_field")), reading

    with pytest.raises(ConfigError) as caught:
        convert()
    text = str(caught.value)
    assert "4 of 12 rows are incomplete: " in text
    assert all(f"line {line}" in text for line in (2, 5, 8))
    assert "line 11" not in text
    assert "task.incomplete=skip" in text
    found, reading = convert(incomplete="skip")
    assert found == [f"a{n}" for n in range(12) if n % 3 != 1]
    assert "4 of 12 rows are incomplete and left out" in reading.notes[0]
    (tmp_path / "a.jsonl").write_text('{"q": "x"}\n{"q": "y"}\n')
    with pytest.raises(ConfigError, match="'a' is not a field of"):
        convert(incomplete="skip")


# --- folders


def parquet_file(path, rows) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def numbered(first, count):
    return [{"question": f"q{n}", "answer": str(n)} for n in range(first, first + count)]


def test_a_folder_of_the_hub(tmp_path):
    for config, first in (("main", 0), ("socratic", 100)):
        for shard in range(2):
            name = f"{config}/train-0000{shard}-of-00002.parquet"
            parquet_file(tmp_path / name, numbered(first + 5 * shard, 5))
        parquet_file(tmp_path / f"{config}/test-00000-of-00001.parquet", numbered(first + 50, 2))
    (tmp_path / "dataset_infos.json").write_text("{}")
    (tmp_path / "README.md").write_text("# A set\n")
    text = refusal(tmp_path)
    assert "has the folders main, socratic. Choose one: task.dataset_config=main" in text
    assert read(tmp_path, config="main")[0] == numbered(0, 10)
    assert read(tmp_path / "socratic")[0] == numbered(100, 10)
    assert read(tmp_path, config="main", split="test")[0] == numbered(50, 2)
    assert "it has the splits" in refusal(tmp_path, config="main", split="validation")
    assert "no configuration 'other'; there: main, socratic" in refusal(tmp_path, config="other")
    card = (
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n"
        "    path: main/train-*\n- config_name: socratic\n  data_files:\n  - split: train\n"
        "    path: socratic/train-*\n---\n# A set\n"
    )
    (tmp_path / "README.md").write_text(card)
    assert "has the configurations main, socratic" in refusal(tmp_path)
    assert read(tmp_path, config="socratic")[0] == numbered(100, 10)
    (tmp_path / "main" / "train-00001-of-00002.parquet").unlink()
    assert "lacks the shard train-00001-of-00002" in refusal(tmp_path, config="main")


def test_folders_with_files_by_split(tmp_path):
    lines = JSON["a.jsonl"]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text(lines(numbered(0, 3)))
    (tmp_path / "data" / "valid.csv").write_text(as_csv(numbered(3, 2)))
    assert read(tmp_path)[0] == numbered(0, 3)
    for name in ("validation", "valid", "dev"):
        assert read(tmp_path, split=name)[0] == numbered(3, 2)
    assert "it has the splits train, validation" in refusal(tmp_path, split="test")
    (tmp_path / "data" / "train.csv").write_text(as_csv(numbered(0, 3)))
    assert "must hold exactly one file with the train rows" in refusal(tmp_path)
    parts = tmp_path / "parts"
    parts.mkdir()
    for number in (10, 9, 1):  # in the order of their numbers
        (parts / f"part-{number}.jsonl").write_text(lines(numbered(number, 1)))
    rows, reading = read(parts)
    assert [row["answer"] for row in rows] == ["1", "9", "10"]
    assert "3 files are the train rows" in reading.notes[0]
    assert "it has the splits train" in refusal(parts, split="test")
    assert [row["answer"] for row in read(parts / "part-*.jsonl")[0]] == ["1", "9", "10"]
    assert "matches no file" in refusal(parts / "*.csv")
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "readme.md").write_text("x")
    assert "holds no rows; tried" in refusal(tmp_path / "none")


def test_what_save_to_disk_writes(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")

    def save(folder, rows):
        folder.mkdir(parents=True)
        table = pyarrow.Table.from_pylist(rows)
        with pyarrow.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as f:
            f.write_table(table)
        state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": None}
        (folder / "state.json").write_text(json.dumps(state))
        (folder / "dataset_info.json").write_text("{}")

    save(tmp_path / "one", ROWS)
    assert read(tmp_path / "one")[0] == ROWS
    assert read(tmp_path / "one", split="test")[0] == ROWS  # it has no splits
    save(tmp_path / "two" / "train", ROWS)
    save(tmp_path / "two" / "valid", ROWS[:1])
    (tmp_path / "two" / "dataset_dict.json").write_text('{"splits": ["train", "valid"]}')
    assert read(tmp_path / "two")[0] == ROWS
    assert read(tmp_path / "two", split="valid")[0] == ROWS[:1]
    assert "it has the splits train, valid" in refusal(tmp_path / "two", split="test")


def test_texts_in_a_folder_for_each_class(tmp_path):
    for split in ("train", "test"):
        for name in ("neg", "pos", "unsup"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in (2, 10):
                text = f"a {name} film, {split}, é"
                (tmp_path / split / name / f"{number}_7.txt").write_text(text, encoding="utf-8")
        (tmp_path / split / "labeledBow.feat").write_text("9 0:1")
    rows, reading = read(tmp_path)
    assert [row["label"] for row in rows] == ["neg", "neg", "pos", "pos"]
    assert rows[0]["text"] == "a neg film, train, é"
    assert "unsup/ is left out" in reading.notes[0]


# --- whatever is written is read back


NAMES = st.lists(st.text("abcXYZ_éß 1", min_size=1, max_size=6), min_size=2, max_size=4).map(
    lambda names: [f"{name.strip() or 'n'}{n}" for n, name in enumerate(names)]
)
LETTERS = "abz,;|\t\n\r\"\\' éßäŠ€0.5-€“”"
WIDE = LETTERS + "日本語😀\u2028\x85"
FORMATS = (
    *(f"json {name}" for name in JSON),
    *(f"csv {delimiter}" for delimiter in (",", ";", "\t", "|")),
    *("csv all", "csv mac", "csv excel", "csv escaped", "csv unnamed"),
    *("tsv", "parquet", "arrow", "feather", "xlsx"),
)


@st.composite
def tables(draw):
    kind = draw(st.sampled_from(FORMATS))
    letters = st.text(draw(st.sampled_from((LETTERS, WIDE))), max_size=12)
    if kind == "tsv":  # which has no way to write these
        letters = letters.map(lambda cell: cell.translate(dict.fromkeys(map(ord, '\t\n\r"'), "")))
    if kind == "xlsx":
        letters = letters.map(lambda cell: "x" + cell.replace("\r", ""))
    names = draw(NAMES)
    cells = st.lists(letters, min_size=len(names), max_size=len(names))
    rows = draw(st.lists(cells, min_size=1, max_size=5))
    return kind, [dict(zip(names, row, strict=True)) for row in rows]


def write_table(folder, kind, rows, encoding, pack):
    """Write a table; return its path, the names of its columns where it has none, and settings that
    say how it is written.
    """
    base, _, how = kind.partition(" ")
    columns, form = None, {"encoding": encoding}
    if base == "json":
        name, content = how, JSON[how](rows).encode(encoding)
    elif base in ("csv", "tsv"):
        delimiter = how if len(how) == 1 else "\t" if base == "tsv" else ","
        form |= {"delimiter": delimiter, "quotes": base == "csv", "escapes": how == "escaped"}
        form["header"] = how != "unnamed"
        settings = {
            "all": {"quoting": csv.QUOTE_ALL},
            "mac": {"lineterminator": "\r", "quoting": csv.QUOTE_ALL},
            "escaped": {"doublequote": False, "escapechar": "\\"},
        }.get(how, {})
        name = "a.tsv" if base == "tsv" else "a.csv"
        text = as_csv(rows, delimiter=delimiter, **settings)
        if base == "tsv":
            lines = ["\t".join(rows[0]), *("\t".join(row.values()) for row in rows)]
            text = "\n".join(lines) + "\n"
        if how == "unnamed":
            columns, text = [*rows[0]], as_csv([*rows]).split("\r\n", 1)[1]
        content = text.encode(encoding)
    else:
        name, content = f"a.{base}", by_columns(base, rows)
        form = {}
    path = folder / f"{name}{pack}"
    path.write_bytes(PACKERS[pack](content))
    return path, columns, form


def by_columns(kind, rows) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import feather, parquet

    file = io.BytesIO()
    table = pyarrow.Table.from_pylist(rows)
    if kind == "parquet":
        parquet.write_table(table, file)
    elif kind == "feather":
        feather.write_feather(table, file)
    elif kind == "arrow":
        with pyarrow.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    else:
        openpyxl = pytest.importorskip("openpyxl")
        book = openpyxl.Workbook()
        for cells in ([*rows[0]], *([*row.values()] for row in rows)):
            book.active.append(cells)
        book.save(file)
    return file.getvalue()


def round_trip(folder, table, encoding, pack) -> None:
    kind, rows = table
    if kind == "xlsx" and not has_openpyxl():
        kind = "csv ,"
    try:
        path, columns, form = write_table(folder, kind, rows, encoding, pack)
    except UnicodeEncodeError:
        path, columns, form = write_table(folder, kind, rows, "utf-8", pack)
    assert read(path, form, columns)[0] == rows, "with everything said"
    try:
        found, reading = read(path, columns=columns)
    except ConfigError as error:
        refused = str(error)
    else:
        refused = None
    if refused is not None:
        assert "task.format." in refused, "a refusal names the setting that helps"
        return
    if found != rows:  # a guess, of which the plan says what it is
        assert reading.notes, (kind, found, rows)


def has_openpyxl() -> bool:
    try:
        import openpyxl  # noqa: F401
    except ImportError:
        return False
    return True


ENCODINGS = st.sampled_from(("utf-8", "utf-8-sig", "utf-16", "utf-32", "cp1252"))
TABLES = {"table": tables(), "encoding": ENCODINGS, "pack": st.sampled_from([*PACKERS])}
ALLOWED = (HealthCheck.function_scoped_fixture, HealthCheck.too_slow)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=ALLOWED)
@given(**TABLES)
def test_a_table_is_read_back_as_it_was_written(tmp_path, table, encoding, pack):
    round_trip(tmp_path, table, encoding, pack)


@pytest.mark.thorough
@settings(max_examples=1000, deadline=None, derandomize=True, suppress_health_check=ALLOWED)
@given(**TABLES)
def test_a_thousand_tables_are_read_back_as_they_were_written(tmp_path, table, encoding, pack):
    round_trip(tmp_path, table, encoding, pack)


@pytest.mark.run
def test_rows_are_read_one_at_a_time(tmp_path):
    """A file is never held as a whole, nor are its rows."""
    rows = [{"question": "x" * 1000, "answer": str(n)} for n in range(20_000)]
    for name in ("a.jsonl", "array.json"):
        (tmp_path / name).write_text(JSON[name](rows))
    (tmp_path / "a.csv").write_text(as_csv(rows))
    del rows
    for name in ("a.jsonl", "array.json", "a.csv"):
        tracemalloc.start()
        count = sum(1 for _ in Reading().rows(str(tmp_path / name), "task.path"))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert count == 20_000
        assert peak < 8 * 2**20, f"{name}: {peak / 2**20:.0f} MiB"


DAMAGE = {
    "cut": lambda content, draw: content[: draw.randrange(len(content))],
    "a bit": lambda content, draw: flipped(content, draw.randrange(8 * len(content))),
    "zeros": lambda content, draw: spliced(content, draw.randrange(len(content)), bytes(5), 5),
    "noise": lambda content, draw: spliced(
        content, draw.randrange(len(content)), draw.randbytes(6), 0
    ),
}


def flipped(content: bytes, bit: int) -> bytes:
    return spliced(content, bit // 8, bytes([content[bit // 8] ^ 1 << bit % 8]), 1)


def spliced(content: bytes, at: int, piece: bytes, over: int) -> bytes:
    return content[:at] + piece + content[at + over :]


def read_damaged(folder, count: int) -> None:
    """Assert that damaged files are read or refused in one line; a crash ends the process."""
    draw = random.Random(count)
    kinds = [kind for kind in FORMATS if kind != "xlsx" or has_openpyxl()]
    for _ in range(count):
        kind, pack = draw.choice(kinds), draw.choice([*PACKERS])
        encoding = draw.choice(("utf-8", "utf-16"))
        path, columns, _ = write_table(folder, kind, 5 * ROWS, encoding, pack)
        path.write_bytes(draw.choice([*DAMAGE.values()])(path.read_bytes(), draw))
        try:
            found = read(path, columns=columns)[0]
        except ConfigError as error:
            found = str(error)
        assert isinstance(found, list) or (found.isprintable() and len(found) < 900), found


def test_damaged_files_are_read_or_refused(tmp_path):
    read_damaged(tmp_path, 150)


@pytest.mark.thorough
def test_more_damaged_files_are_read_or_refused(tmp_path):
    read_damaged(tmp_path, 3000)


def test_an_object_with_a_number_beside_its_rows(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('{"version": 1, "data": [{"q": "a"}, {"q": "b"}]}')
    assert [row["q"] for row in read(str(path))[0]] == ["a", "b"]


@pytest.mark.parametrize("text", ["q,a\n1,2\n3,4\n", "q;a\n1;2\n3;4\n"])
def test_a_table_whose_name_says_nothing(tmp_path, text):
    for name, content in (("one.zip", zipped(text.encode(), "a.csv")), ("rows", text.encode())):
        (tmp_path / name).write_bytes(content)
        assert read(str(tmp_path / name))[0] == [
            {"q": "1", "a": "2"},
            {"q": "3", "a": "4"},
        ]
