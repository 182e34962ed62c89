"""What a run has left is damaged, and read again: by the report, by the comparison and by the run
that goes on from it. Whatever stands in a file, the end is words.
"""

import errno
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import ConfigError
from common.config.model_source import find_source
from common.config.plugins import COMPARISON
from common.device import hardware
from common.distributed.context import Context
from common.report import page
from common.report.runs import read_runs
from common.run import resume
from common.system import safe_read
from common.system.files import seal
from common.system.user_code import load
from launch import compose, train
from tests.support import ROOT, SMALL

pytestmark = pytest.mark.faults

# The files of a run folder that its readers open.
FILES = ("run.yaml", "result.json", "metrics.jsonl", "evaluations.jsonl", "run.log")
FILES += tuple(f"completions/{name}.jsonl" for name in ("before", "after", "training"))
FILES += (".hydra/overrides.yaml", ".hydra/hydra.yaml")
FRESH = {"step": 0, "seconds": 0.0, "generated": 0, "skipped": 0, "tracker": {}, "digests": {}}
OTHERS = (None, "text", 7, 1e999, [], [1], {}, {"a": {"b": 1}}, True)


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def unreadable(path: Path) -> None:
    """For root too: a link to itself."""
    path.unlink()
    path.symlink_to(path.name)


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def nested(path: Path) -> None:
    deep = b"[" * 100_000
    path.write_bytes(deep if path.suffix == ".yaml" else b'{"step": 1, "a": ' + deep + b"\n")


def nested_whole(path: Path) -> None:
    """As deep as a parser just takes."""
    text = '{"step": 1, "config": ' * 300 + "1" + "}" * 300
    path.write_text(f"{text}\n")


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "torn": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 16),
    "not_utf8": lambda path: path.write_bytes(b"\xff\xfe" + path.read_bytes()),
    "null": lambda path: path.write_bytes(b"null\n"),
    "list": lambda path: path.write_bytes(b"[1, [2], {}]\n"),
    "text": lambda path: path.write_bytes(b'"words"\n'),
    "number": lambda path: path.write_bytes(b"12\n"),
    "object": lambda path: path.write_bytes(b'{"step": "x", "config": 1}\n'),
    "foreign_tag": lambda path: path.write_bytes(b"!!timestamp no\n"),
    "bomb": lambda path: path.write_bytes(
        b"a: &a [x, x]\n" + b"".join(b"b%d: &b%d [*a, *a]\n" % (i, i) for i in range(9))
    ),
    "nested": nested,
    "nested_whole": nested_whole,
    "huge_line": lambda path: path.write_bytes(b'{"step": "' + b"x" * (2 << 20)),
    "folder": as_folder,
    "unreadable": unreadable,
    "pipe": as_pipe,
}


@pytest.fixture(scope="module")
def whole(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended, with the files of Hydra."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CLUTCH_CACHE", str(cache))
        train(compose([*SMALL, "evaluate.every=2", "checkpoint.every=2"]), folder)
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(SMALL))
    runtime = {"choices": {"algo": "eggroll"}}
    runtime["config_sources"] = [{"provider": "main", "path": "/else/where"}]  # type: ignore[assignment]
    settings = {"hydra": {"runtime": runtime, "job": {"config_name": "config"}}}
    (folder / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump(settings))
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it. Nothing is drawn, which takes a second; the page has the same curves."""
    monkeypatch.setattr(f"{COMPARISON.partition(':')[0]}.figure", lambda runs, path: None)
    monkeypatch.setattr(safe_read, "LARGEST", 1 << 20)
    return shutil.copytree(whole, tmp_path / "run")


def read_all(folder: Path) -> list[str]:
    """Report and compare a run, as the commands do; return what they could not."""
    told = []
    try:
        page.write_report(folder)
    except ConfigError as error:
        told.append(str(error))
    runs, failures = read_runs([folder])
    load(COMPARISON)(runs, failures, folder)
    return [*told, *(failure.error for failure in failures)]


def restored(run: Path, whole: Path, name: str) -> None:
    path = run / name
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    shutil.copy2(whole / name, path)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_report_that_cannot_be_written_is_no_damage(code, run, monkeypatch):
    def refuse(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(page, "write_text", refuse)
    with pytest.raises(OSError, match=os.strerror(code)):
        page.write_report(run)


@pytest.mark.run
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_of_a_run_is_named(damage, run, whole, caplog):
    for name in FILES:
        caplog.clear()
        DAMAGES[damage](run / name)
        told = " ".join([*read_all(run), caplog.text])
        # the last line of a log may be torn, by a kill, and a list that is torn is a list
        whole_still = damage in ("empty", "torn") and name.endswith(("jsonl", "overrides.yaml"))
        if name != "run.log" and not whole_still:
            assert Path(name).name in told, name
        restored(run, whole, name)


def changed(value: Any) -> Iterator[Any]:
    """A value with one part of another kind, or without it, at each place."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield {k: v for k, v in value.items() if k != key}
            yield from ({**value, key: other} for other in (*OTHERS, *changed(item)))
    elif isinstance(value, list):
        for i, item in enumerate(value[:2]):
            yield [*value[:i], *value[i + 1 :]]
            yield from ([*value[:i], o, *value[i + 1 :]] for o in (*OTHERS, *changed(item)))


@pytest.mark.run
@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in FILES if name != "run.log"])
def test_any_value_of_another_kind_is_taken_or_named(name, run, monkeypatch):
    path = run / name
    text = path.read_text(encoding="utf-8")
    first, rest = text.split("\n", 1) if name.endswith(".jsonl") else (text, "")
    write = yaml.safe_dump if path.suffix == ".yaml" else json.dumps
    every = list(changed(yaml.safe_load(first)))
    for value in random.Random(0).sample(every, min(len(every), 150)):
        path.write_text(f"{write(value)}\n{rest}", encoding="utf-8")
        read_all(run)


# --- going on from it


def reseal(folder: Path, name: str, content: Any) -> None:
    """Put another content into a checkpoint, with the hash that belongs to it."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("files")
    (folder / name).write_text(json.dumps(content))
    (folder / "manifest.json").unlink()
    seal(folder, manifest)


def of_manifest(content: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / "manifest.json").write_bytes(content)


def of_state(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    def damage(folder: Path) -> None:
        state = json.loads((folder / "state.json").read_text())
        reseal(folder, "state.json", change(state))

    return damage


CHECKPOINTS: dict[str, Callable[[Path], Any]] = {
    "manifest_nested": of_manifest(b"[" * 100_000),
    "manifest_list": of_manifest(b"[]"),
    "manifest_null": of_manifest(b"null"),
    "manifest_without_step": of_manifest(b'{"format": 1, "files": {}}'),
    "manifest_of_no_files": of_manifest(b'{"format": 1, "files": {"a": 1}, "step": 4}'),
    "manifest_of_a_text": of_manifest(b'{"format": 1, "files": {}, "step": "4"}'),
    "state_list": of_state(lambda state: []),
    "state_null": of_state(lambda state: None),
    "state_without_run": of_state(lambda state: {"config": state["config"]}),
    "state_without_config": of_state(lambda state: {"run": state["run"]}),
    "state_of_no_config": of_state(lambda state: state | {"config": {"algo": None}}),
    "state_without_step": of_state(
        lambda state: state | {"run": {k: v for k, v in state["run"].items() if k != "step"}}
    ),
    **{
        f"state_{key}_{name}": of_state(lambda s, k=key, v=value: s | {"run": s["run"] | {k: v}})
        for key in ("step", "seconds", "generated", "skipped", "tracker", "before")
        for name, value in {"null": None, "text": "x", "list": [1]}.items()
    },
}
ONCE = ("manifest_nested", "state_without_run", "state_before_text")


@pytest.mark.parametrize(
    "damage", [d if d in ONCE else pytest.param(d, marks=pytest.mark.thorough) for d in CHECKPOINTS]
)
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(damage, run, caplog):
    """And where there is none before it, an error says so."""
    last = run / "checkpoints" / "step-00000004"
    CHECKPOINTS[damage](last)
    settings = compose([*SMALL, "evaluate.validation_examples=0", "resume=auto"])
    context = Context(0, 1, hardware.find(settings.hardware), run)
    found = resume.find(settings, context, FRESH)
    assert found is not None
    assert found.step == 2
    assert str(last) in caplog.text
    shutil.rmtree(found.path)
    with pytest.raises(ConfigError, match="are damaged"):
        resume.find(settings, context, FRESH)


# --- what cannot be written, and ranks that are none


def test_a_full_disk_has_its_exit_code(launch):
    done = launch(*SMALL, "hydra.run.dir=out", code=4, largest_file=1 << 10)
    assert "File too large" in done.stderr
    assert "Make room" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.run
@pytest.mark.parametrize(
    "command",
    [
        ["-m", "common.report", "RUN"],
        pytest.param(["launch.py", *SMALL, "hydra.run.dir=RUN/again"], marks=pytest.mark.thorough),
    ],
)
def test_what_is_printed_cannot_be_written(command, run, cache):
    command = [part.replace("RUN", str(run)) for part in command]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env=os.environ | {"CLUTCH_CACHE": str(cache)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 4, done.stderr
    assert "what is printed cannot be written" in done.stderr
    assert "Traceback" not in done.stderr


GROUP = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
GROUP |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("names", ["RANK", "RANK WORLD_SIZE", "LOCAL_RANK"])
def test_what_is_left_of_a_group_of_ranks_is_named(names, launch):
    left = {name: GROUP[name] for name in names.split()}
    done = launch(*SMALL, env=left, code=2)
    assert all(f"{name}={text}" in done.stderr for name, text in left.items())
    assert "unset" in done.stderr
    assert "torchrun" in done.stderr


# --- settings and folders that cannot work


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_named(name, run):
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (run / "model" / name).write_text(text)
    settings = compose(["model=hf", f"model.path={run / 'model'}"])
    with pytest.raises(ConfigError, match=f"{name} is a pointer of Git LFS"):
        find_source(settings.model)


def test_heads_of_an_odd_size_are_refused(launch):
    tiny = ["model.tiny.hidden_size=6", "model.tiny.heads=2"]
    done = launch(*SMALL, *tiny, "hydra.run.dir=out", code=2)
    assert "Give a multiple of 4" in done.stderr


def test_a_chat_without_an_answer_is_refused(run, launch):
    done = launch(str(run), "--max-new-tokens", "0", code=2, module="common.chat")
    assert "--max-new-tokens 0 is too small" in done.stderr


def test_others_may_read_the_weights_as_the_umask_says(whole):
    for folder in (whole / "model", whole / "checkpoints" / "step-00000004"):
        modes = {path.stat().st_mode & 0o777 for path in folder.iterdir()}
        assert modes == {(whole / "metrics.jsonl").stat().st_mode & 0o777}
