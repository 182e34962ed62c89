"""What a model or a data file writes is text in a report and on a terminal, and nothing else."""

import logging
import re
import subprocess
import sys

import pytest

from common.config import ConfigError
from common.distributed.workers import _Plain
from common.report.run_folder import describe_duration, find_warnings
from common.report.summary import SHOWN, show_end
from common.system import exits
from common.system.events import markdown_cell
from common.system.terminal import visible
from tests.support import ROOT

TITLE = "\x1b]0;owned\x07"


@pytest.mark.parametrize(
    "text", ["<\rscript>", "<script>", "<\x00script>", "</\rtd>", "<\x0bimg src=x>", "<!--"]
)
def test_no_cell_of_a_report_is_html(text):
    cell = markdown_cell(f"a {text} b")
    assert not re.search(r"<[A-Za-z/!?]", cell)
    assert all(character.isprintable() for character in cell)


def test_lines_of_a_cell_stay_one_line():
    assert markdown_cell("a\r\nb|c\nd\te") == "a<br>b\\|c<br>d\\\\te"


def test_no_cell_of_a_report_is_a_link():
    assert markdown_cell("![x](http://a)") == "![x]\\(http://a)"


@pytest.mark.parametrize(
    ("seconds", "words"), [(89, "89 s"), (3599, "60 min"), (7200, "2 h 00 min")]
)
def test_durations_are_in_words(seconds, words):
    assert describe_duration(seconds) == words


def test_a_duration_is_rounded_once():
    assert describe_duration(10_790) == "3 h 00 min"


def test_warnings_are_lines_of_the_log_alone(tmp_path):
    log = tmp_path / "run.log"
    log.write_text(
        "2026-11-24 05:00:00,123 WARNING a real one\n"
        "a row of data WARNING that looks like one\n"
        "2026-11-24 05:00:00,124 INFO a prompt WARNING of data\n"
        "2026-11-24 05:00:00,125 WARNING a real one\n"
    )
    assert find_warnings(log) == ["a real one"]


def test_a_terminal_obeys_no_text():
    assert visible(f"a{TITLE}b\tc\n") == "a\\x1b]0;owned\\x07b\\tc\\n"
    assert visible("ä €\u00a0\U0001f600\n", kept="\n") == "ä €\u00a0\U0001f600\n"
    record = logging.LogRecord("clutch", logging.WARNING, "", 0, f"row {TITLE}\nnext", (), None)
    assert _Plain().format(record) == "warning: row \\x1b]0;owned\\x07\nnext"


def test_an_error_that_quotes_a_text_obeys_none_of_it(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit), exits.ending_tool():
        raise ConfigError("boom \x1b]0;title\x07\nsecond line")
    assert capsys.readouterr().err == "error: boom \\x1b]0;title\\x07\nsecond line\n"


def test_a_command_whose_reader_leaves_ends_well():
    code = (
        "from common.system.exits import ending_tool\nwith ending_tool():\n print('x\\n' * 10**6)"
    )
    head = subprocess.Popen(["head", "-n", "1"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=head.stdin, stderr=subprocess.PIPE, cwd=ROOT
    )
    head.stdin.close()
    head.wait()
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_final_table_shows_ends_of_long_texts():
    long = "a long example. " * 40 + "What is asked?"
    assert show_end(long) == f"...{long[-SHOWN:]}"
    assert show_end("short") == "short"
