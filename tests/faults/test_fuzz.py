"""Bad input of every kind: an error that names the place, or a defined result; never a traceback
from inside a library.
"""

import gzip
import itertools
import json
import math
import random
import shutil
import tracemalloc
import warnings

import chess
import hydra
import pytest
import torch
from hypothesis import given
from hypothesis import settings as settings_of
from hypothesis import strategies as st
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

import launch
from common.config import ConfigError, ModelConfig, resolvers
from common.model.load import load_model
from common.model.tiny import byte_tokenizer
from common.task import build
from common.tasks.data import text
from tests.support.models import small_model

pytestmark = pytest.mark.faults

# --- settings

VALUES = (
    *(
        "-1",
        "0",
        "1",
        "1.5",
        "1e400",
        "1e-320",
        "-0.0",
        "99999999999999999999",
        "nan",
        "inf",
        "-inf",
    ),
    *(
        "null",
        "true",
        "abc",
        "''",
        "'a b'",
        "'${seed}'",
        "../../x",
        "é",
        "[]",
        "[1,2]",
        "{}",
        "{a: 1}",
    ),
)
ONCE = (
    "translate",
    "topics",
)  # the settings of one algorithm that has a reward, and of one that has none
RUNS = (
    *(
        ("eggroll", "translate"),
        ("grpo", "chess"),
        ("rft", "units"),
        ("grpo", "countdown"),
        ("rft", "gsm8k"),
    ),
    *(("classify", "topics"), ("classify", "ag_news"), ("classify", "trajectories")),
)


def refused(call) -> str | None:
    """The text of a ConfigError; None where there is none. Any other error, and a warning, is the
    test's.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call()
    except ConfigError as error:
        return str(error)
    return None


def settings(algo: str, task: str) -> list[str]:
    """Every setting of a run, dotted."""
    resolvers.register()
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


@pytest.mark.parametrize(
    ("algo", "task"),
    [pytest.param(*pair, marks=[pytest.mark.thorough] * (pair[1] not in ONCE)) for pair in RUNS],
)
def test_any_value_of_any_setting_is_taken_or_named(algo, task):
    """A sample for each pair; thousands more were tried by hand."""
    pairs = list(itertools.product(settings(algo, task), VALUES))
    for key, value in random.Random(f"{algo} {task}").sample(pairs, 12):
        error = refused(
            lambda change=f"{key}={value}": launch.compose([f"algo={algo}", f"task={task}", change])
        )
        if error is not None:
            named = (
                key.split(".")[-1] in error or key == "algo.name" or "scoring.workers=" in error
            )  # read from it
            assert named, f"{key}={value}: {error}"
            assert "\n" not in error


# --- files

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
        b"PuzzleId,FEN,Moves\n"
        + b"".join(f"x,{b.fen()},{next(iter(b.legal_moves))}\n".encode() for b in GAMES),
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
    "other fields": (
        lambda good: (
            good.replace(b"text", b"body").replace(b"question", b"q").replace(b"de", b"xx", 1)
        )
    ),
    "another type": (
        lambda good: good.replace(b'"label": 1', b'"label": [1]').replace(
            b'"target": 7', b'"target": {}'
        )
    ),
    "numbers as texts": (
        lambda good: good.replace(b"[2, 3,", b'["2", null,').replace(b" 2000]", b" []]")
    ),
    "NaN": (
        lambda good: good.replace(b'"target": 8', b'"target": NaN').replace(
            b'"label": 2', b'"label": NaN'
        )
    ),
    "a huge number": (
        lambda good: good.replace(b'"target": 8', b'"target": ' + b"9" * 5000).replace(
            b"#### 3", b"#### " + b"9" * 5000
        )
    ),
    "deep nesting": lambda good: b"[" * 100_000 + good,
    "deep nesting in a row": lambda good: good + b'{"a":' * 100_000 + b"\n",
    "a row of a million letters": lambda good: good + b"x" * 1_000_000 + b"\n",
    "only its first line": lambda good: good.split(b"\n")[0] + b"\n",
    "a lone surrogate": (
        lambda good: good.replace(b"Hallo 1", b"Hallo \\ud800").replace(b"topic 1", b"\\udfff")
    ),
    "a NUL in a text": (
        lambda good: good.replace(b"Hallo 1", b"Hallo\0 1").replace(b"topic 1", b"\\u0000")
    ),
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


@pytest.mark.parametrize(
    "zipped",
    [pytest.param(False, id="plain"), pytest.param(True, id="gz", marks=pytest.mark.thorough)],
)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_read_or_named(name, zipped, tmp_path):
    task, setting, more, file, good = FILES[name]
    algo = "classify" if task in ("ag_news", "custom_text") else "grpo"
    node = launch.compose([f"algo={algo}", f"task={task}"]).task | {
        k: v for k, v in more.items() if v is not None
    }
    for damage, do in DAMAGE.items():
        content = do(good)
        folder = tmp_path / damage.replace(" ", "-")
        folder.mkdir()
        path = folder / (f"{file}.gz" if zipped else file)
        path.write_bytes(
            (gzip.compress(content)[:-6] if damage == "cut" else gzip.compress(content))
            if zipped
            else content
        )
        node[setting] = str(path)
        if task in HELD_OUT:
            twin = path.with_name(path.name.replace("train", "test"))
            twin.write_bytes(gzip.compress(HELD_OUT[task]) if zipped else HELD_OUT[task])
            node |= {"test": str(twin)} if setting == "train" else {"path": str(folder)}
        error = refused(lambda node=dict(node): read(node, algo))
        if error is not None:
            assert damage not in (
                "whole",
                "a byte order mark",
                "CRLF",
                "no line end",
            ), f"{damage}: {error}"
            assert any(there in error for there in (path.name, str(folder), f"task={task}")), (
                f"{damage}: {error}"
            )
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
    assert all(
        math.isfinite(value) for value in loaded.metrics(examples[:1], [HOSTILE[0]]).values()
    )


def test_a_line_without_end_is_refused_before_it_is_read(tmp_path, monkeypatch):
    """A sparse file of a gigabyte, and a small gzip file that would be a large one; the limit is
    lower than its real 64 MiB.
    """
    monkeypatch.setattr(text, "LONGEST_LINE", 2**20)
    for name in ("rows.jsonl", "rows.csv", "rows.tsv", "rows.jsonl.gz"):
        path = tmp_path / name
        if name.endswith(".gz"):
            path.write_bytes(gzip.compress(b"\0" * 2**22) * 4)
        else:
            with path.open("wb") as file:
                file.write(b'{"question": "a", "answer": "b"}\n')
                file.truncate(2**30)
        node = node_of(
            "custom", f"task.path={path}", "task.prompt_field=question", "task.answer_field=answer"
        )
        tracemalloc.start()
        error = refused(lambda node=node: build(node))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        line = 1 if name.endswith(".gz") else 2
        assert error is not None
        assert f"{name}': line {line} is longer than 1 MiB. Give one row a line" in error
        assert peak < 2**23, f"{peak / 2**20:.0f} MiB"


# --- completions


def node_of(task: str, *overrides: str) -> dict:
    return launch.compose(["algo=grpo", f"task={task}", *overrides]).task


@pytest.fixture(scope="module")
def every_reward(tmp_path_factory) -> dict:
    """Each task with a reward, and an example of it; task=custom with each of its rewards that
    needs no other package.
    """
    folder = tmp_path_factory.mktemp("rows")
    (folder / "train.jsonl").write_bytes(jsonl(map(question, range(20))))
    (folder / "test.jsonl").write_bytes(jsonl(map(question, range(50, 60))))
    tasks = {}
    for name in ("translate, tsv", "chess, csv", "units", "countdown"):
        task, setting, more, file, good = FILES[name]
        (folder / file).write_bytes(good)
        changes = {key: value for key, value in more.items() if value is not None}
        tasks[task] = build(node_of(task) | changes | {setting: str(folder / file)})
    tasks["gsm8k"] = build(node_of("gsm8k", f"task.path={folder}"))
    fields = [
        f"task.path={folder}/train.jsonl",
        "task.prompt_field=question",
        "task.answer_field=answer",
    ]
    for reward in ("exact", "numeric", "levenshtein", "bleu", "chrf"):
        tasks[f"custom {reward}"] = build(node_of("custom", *fields, f"task.reward={reward}"))
    return {name: (task, task.examples("test")[0]) for name, task in tasks.items()}


PIECES = st.sampled_from(
    [
        *HOSTILE,
        "<answer>",
        "</answer>",
        "\\boxed{",
        "####",
        "1e99",
        "-",
        "+",
        "/",
        "0",
        "9" * 400,
        "=",
        "٣",
        "½",
        "e2e4",
    ]
)
TEXTS = st.one_of(
    st.text(max_size=60),  # surrogates too
    st.binary(max_size=60).map(lambda raw: raw.decode("utf-8", "replace")),
    st.lists(st.one_of(PIECES, st.text(max_size=4)), max_size=8).map("".join),
)


@settings_of(max_examples=15, deadline=None, derandomize=True)
@given(texts=st.lists(TEXTS, min_size=1, max_size=3))
def test_any_completion_has_a_score_in_every_task(every_reward, texts):
    scored(every_reward, texts)


@pytest.mark.thorough
@settings_of(max_examples=120, deadline=None, derandomize=True)
@given(texts=st.lists(TEXTS, min_size=1, max_size=3))
def test_more_completions_have_a_score_in_every_task(every_reward, texts):
    scored(every_reward, texts)


def scored(every_reward: dict, texts: list[str]) -> None:
    """Assert that each task gives each text a reward and measures."""
    for name, (task, example) in every_reward.items():
        scores = [task.reward(example, text) for text in texts]
        assert all(0 <= score <= 1 for score in scores), (name, scores)
        if hasattr(task, "rewards"):
            assert list(task.rewards([example] * len(texts), texts)) == pytest.approx(scores), name
        measured = task.metrics([example] * len(texts), texts)
        assert all(0 <= value <= 100 + 1e-9 for value in measured.values()), (name, measured)


# --- models


def changed(name: str, **fields):
    """Change fields of a JSON file; None removes one."""

    def change(folder):
        found = json.loads((folder / name).read_text()) | fields
        (folder / name).write_text(
            json.dumps({key: value for key, value in found.items() if value is not None})
        )

    return change


def written(name: str, content: bytes | None):
    return lambda folder: (
        (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    )


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-500])


def fewer_rows(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: t[:100] if t.shape[0] == 258 else t for name, t in tensors.items()},
        folder / "model.safetensors",
    )


# What is wrong with a model folder, and what must be said of it; None = it loads all the same.
FOLDERS = {
    "whole": (lambda folder: None, None),
    "no config": (written("config.json", None), "is not a model folder: it has no config.json"),
    "empty config": (written("config.json", b""), "could not be loaded"),
    "config of another program": (written("config.json", b'{"a": 1}'), "could not be loaded"),
    "config that is a list": (written("config.json", b"[]"), "could not be loaded"),
    "config that is binary": (written("config.json", b"\xff\xfe\0"), "could not be loaded"),
    "unknown kind": (changed("config.json", model_type="nothing"), "could not be loaded"),
    "sizes as texts": (changed("config.json", hidden_size="many"), "could not be loaded"),
    "negative sizes": (changed("config.json", num_hidden_layers=-1), None),
    "heads that do not fit": (
        changed("config.json", num_attention_heads=5, num_key_value_heads=5),
        "",
    ),
    "encoder": (
        changed("config.json", model_type="bert", architectures=["BertModel"]),
        "is not a causal language mod",
    ),
    "another decoder": (
        changed("config.json", model_type="gpt2", architectures=["GPT2LMHeadModel"]),
        "",
    ),
    "no weights": (written("model.safetensors", None), "could not be loaded"),
    "empty weights": (written("model.safetensors", b""), "could not be loaded"),
    "cut weights": (cut, "could not be loaded"),
    "weights that are a pickle": (
        written("model.safetensors", b"\x80\x04K\x01."),
        "could not be loaded",
    ),
    "fewer embeddings than ids": (fewer_rows, ""),
    "no tokenizer": (written("tokenizer.json", None), "has no tokenizer that can be loaded"),
    "tokenizer that is no JSON": (
        written("tokenizer.json", b"{"),
        "has no tokenizer that can be loaded",
    ),
    "tokenizer of another program": (
        written("tokenizer.json", b"{}"),
        "has no tokenizer that can be loaded",
    ),
    "tokenizer_config that is a list": (
        written("tokenizer_config.json", b"[]"),
        "has no tokenizer that can be loaded",
    ),
    "no pad token": (changed("tokenizer_config.json", pad_token=None), None),
    "neither pad nor eos": (
        changed("tokenizer_config.json", pad_token=None, eos_token=None),
        "neither a pad token nor",
    ),
    "generation config that is no JSON": (written("generation_config.json", b"{"), ""),
}


@pytest.fixture(scope="module")
def good_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    small_model("llama", 258).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("what", FOLDERS)
def test_a_damaged_model_folder_is_loaded_or_named(what, good_model, tmp_path):
    damage, words = FOLDERS[what]
    folder = tmp_path / "model"
    shutil.copytree(good_model, folder)
    damage(folder)
    config = ModelConfig(
        **{
            "name": "hf",
            "path": str(folder),
            "revision": None,
            "gguf_file": None,
            "attention": "sdpa",
        }
    )
    error = refused(
        lambda: load_model(config, None, torch.float32, torch.device("cpu"), progress=False)
    )
    if error is None:
        assert not words, "it should not have been loaded"
        return
    assert words is not None, error
    assert str(folder) in error
    assert words in error
    assert error.isprintable(), error
