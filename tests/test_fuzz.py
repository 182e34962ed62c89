"""Bad input of every kind: an error that names the place, or a defined result; never a traceback from inside a library."""

import gzip
import itertools
import json
import math
import random
import warnings

import chess
import hydra
import pytest
from omegaconf import OmegaConf

import launch
from common.config import ConfigError
from common.tasks import build

# --- settings --------------------------------------------------------------------------------------------------------

VALUES = (
    *("-1", "0", "1", "1.5", "1e400", "1e-320", "-0.0", "99999999999999999999", "nan", "inf", "-inf"),
    *("null", "true", "abc", "''", "'a b'", "'${seed}'", "../../x", "é", "[]", "[1,2]", "{}", "{a: 1}"),
)
RUNS = (
    *(("eggroll", "translate"), ("grpo", "chess"), ("rft", "units"), ("grpo", "countdown"), ("rft", "gsm8k")),
    *(("classify", "topics"), ("classify", "ag_news"), ("classify", "trajectories")),
)


def refused(call) -> str | None:
    """The text of a ConfigError; None where there is none. Any other error, and a warning, is the test's."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call()
    except ConfigError as error:
        return str(error)
    return None


def settings(algo: str, task: str) -> list[str]:
    """Every setting of a run, dotted."""
    launch.register()
    with hydra.initialize_config_dir(str(launch.CONF), version_base="1.3"):
        config = hydra.compose("config", overrides=[f"algo={algo}", f"task={task}"])

    def leaves(node, prefix):
        for key in node:
            value = None if OmegaConf.is_missing(node, key) else node[key]
            if OmegaConf.is_dict(value) and len(value):
                yield from leaves(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}"

    return list(leaves(config, ""))


@pytest.mark.parametrize(("algo", "task"), RUNS)
def test_any_value_of_any_setting_is_taken_or_named(algo, task):
    """A sample for each pair; thousands more were tried by hand."""
    pairs = list(itertools.product(settings(algo, task), VALUES))
    for key, value in random.Random(f"{algo} {task}").sample(pairs, 12):
        error = refused(lambda change=f"{key}={value}": launch.compose([f"algo={algo}", f"task={task}", change]))
        if error is not None:
            named = key.split(".")[-1] in error or key == "algo.name" or "scoring.workers=" in error  # read from it
            assert named, f"{key}={value}: {error}"
            assert "\n" not in error


# --- files -----------------------------------------------------------------------------------------------------------

PAIRS = [(f"How many m are there per {i} km?", 1000 * i) for i in range(1, 12)]
GAMES = [chess.Board() for _ in range(12)]
for number, board in enumerate(GAMES):
    for _ in range(number):
        board.push(list(board.legal_moves)[7 * number % len(list(board.legal_moves))])


def question(i: int) -> dict:
    return {"question": f"What is {i} + 1?", "answer": f"{i} + 1 = {i + 1}\n#### {i + 1}"}


def topic(i: int) -> dict:
    return {"text": f"Words about topic {i}.", "label": i % 4}


def line_of_csv(i: int) -> bytes:
    return b'"Some words, no %d",%s\n' % (i, (b"a", b"b")[i % 2])


def jsonl(rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


# By name: task, the setting that takes the file, more settings, the name of the file, good content.
FILES = {
    "translate, jsonl": (
        *("translate", "path", {"source_field": "de", "target_field": "en"}, "rows.jsonl"),
        jsonl({"de": f"Hallo {i}", "en": f"Hello {i}"} for i in range(20)),
    ),
    "translate, tsv": (
        *("translate", "path", {"source_field": "de", "target_field": "en"}, "rows.tsv"),
        b"de\ten\n" + b"".join(b"Hallo %d\tHello %d\n" % (i, i) for i in range(20)),
    ),
    "gsm8k": (
        *("gsm8k", "path", {}, "train.jsonl"),
        jsonl(map(question, range(20))),
    ),
    "countdown": (
        *("countdown", "path", {"numbers": None}, "rows.jsonl"),
        jsonl({"numbers": [2, 3, i], "target": 5 + i} for i in range(1, 20)),
    ),
    "units": ("units", "path", {}, "rows.json", json.dumps(PAIRS).encode()),
    "chess, csv": (
        *("chess", "path", {}, "rows.csv"),
        b"PuzzleId,FEN,Moves\n" + b"".join(f"x,{b.fen()},{next(iter(b.legal_moves))}\n".encode() for b in GAMES),
    ),
    "chess, pgn": (
        *("chess", "path", {}, "games.pgn"),
        b'[Event "x"]\n[Result "*"]\n\n1. e4 e5 2. Nf3 Nc6 3. Bb5 a6 4. Ba4 Nf6 *\n\n' * 6,
    ),
    "ag_news, jsonl": (
        *("ag_news", "path", {}, "train.jsonl"),
        jsonl(map(topic, range(24))),
    ),
    "custom_text, csv": (
        *("custom_text", "train", {"classes": None}, "train.csv"),
        b"text,label\n" + b"".join(map(line_of_csv, range(24))),
    ),
}
HELD_OUT = {  # of the tasks that read two files
    "gsm8k": jsonl(map(question, range(50, 60))),
    "ag_news": jsonl(map(topic, range(50, 60))),
    "custom_text": b"text,label\n" + b"".join(map(line_of_csv, range(50, 60))),
}
DAMAGE = {
    "whole": lambda good: good,
    "empty": lambda good: b"",
    "blank": lambda good: b"\n\n\n",
    "zeros": lambda good: b"\0" * 1000,
    "noise": lambda good: random.Random(0).randbytes(3000),
    "cut": lambda good: good[: len(good) * 2 // 3 - 3],
    "a byte order mark": lambda good: b"\xef\xbb\xbf" + good,
    "UTF-16": lambda good: good.decode().encode("utf-16"),
    "CRLF": lambda good: good.replace(b"\n", b"\r\n"),
    "CR": lambda good: good.replace(b"\n", b"\r"),
    "a NUL": lambda good: good.replace(b"e", b"\0", 3),
    "Latin-1": lambda good: good.replace(b"o", b"\xe9", 2),
    "no line end": lambda good: good.rstrip(b"\n"),
    "other fields": lambda good: good.replace(b"text", b"body").replace(b"question", b"q").replace(b"de", b"xx", 1),
    "another type": lambda good: good.replace(b'"label": 1', b'"label": [1]').replace(b'"target": 7', b'"target": {}'),
    "numbers as texts": lambda good: good.replace(b"[2, 3,", b'["2", null,').replace(b" 2000]", b" []]"),
    "NaN": lambda good: good.replace(b'"target": 8', b'"target": NaN').replace(b'"label": 2', b'"label": NaN'),
    "a huge number": lambda good: good.replace(b'"target": 8', b'"target": ' + b"9" * 5000).replace(
        b"#### 3", b"#### " + b"9" * 5000
    ),
    "deep nesting": lambda good: b"[" * 100_000 + good,
    "deep nesting in a row": lambda good: good + b'{"a":' * 100_000 + b"\n",
    "a row of a million letters": lambda good: good + b"x" * 1_000_000 + b"\n",
    "only its first line": lambda good: good.split(b"\n")[0] + b"\n",
    "a lone surrogate": lambda good: good.replace(b"Hallo 1", b"Hallo \\ud800").replace(b"topic 1", b"\\udfff"),
    "gzip of nothing": lambda good: gzip.compress(b""),
}
HOSTILE = (
    "",
    "\0",
    "x" * 10_000,
    "((((" * 1000,
    "9**9**9",
    "#### " + "9" * 9000,
    "<answer>1e999999</answer>",
    "é\u2028\ud83d",
)


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_read_or_named(name, zipped, tmp_path):
    task, setting, more, file, good = FILES[name]
    algo = "classify" if task in ("ag_news", "custom_text") else "grpo"
    node = launch.compose([f"algo={algo}", f"task={task}"]).task | {k: v for k, v in more.items() if v is not None}
    for damage, do in DAMAGE.items():
        content = do(good)
        folder = tmp_path / damage.replace(" ", "-")
        folder.mkdir()
        path = folder / (f"{file}.gz" if zipped else file)
        path.write_bytes(
            (gzip.compress(content)[:-6] if damage == "cut" else gzip.compress(content)) if zipped else content
        )
        node[setting] = str(path)
        if task in HELD_OUT:
            twin = path.with_name(path.name.replace("train", "test"))
            twin.write_bytes(gzip.compress(HELD_OUT[task]) if zipped else HELD_OUT[task])
            node |= {"test": str(twin)} if setting == "train" else {"path": str(folder)}
        error = refused(lambda node=dict(node): read(node, algo))
        if error is not None:
            assert damage not in ("whole", "a byte order mark", "CRLF", "no line end"), f"{damage}: {error}"
            assert any(there in error for there in (path.name, str(folder), f"task={task}")), f"{damage}: {error}"
            assert error.isprintable(), f"{damage}: {error!r}"
            assert len(error) < 700, f"{damage}: {error[:2000]}"


def read(node: dict, algo: str) -> None:
    if algo == "classify":
        from ddp_bench.tasks import made

        loaded = made(node)
        for split in ("train", "test"):
            assert loaded.rows(split)
        return
    loaded = build(node)
    for split in ("train", "test"):
        examples = loaded.examples(split)
        assert examples
        prompts = [loaded.prompt(example) for example in examples]
        assert all(prompts)
    for completion in HOSTILE:
        score = loaded.reward(examples[0], completion)
        assert math.isfinite(score)
        assert 0 <= score <= 1
    assert all(math.isfinite(value) for value in loaded.metrics(examples[:1], [HOSTILE[0]]).values())
