"""A run's models rebuilt from RUN/run.egg: bit for bit, whatever the run's settings."""

import copy
import json
import re
import struct
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from common.config import ConfigError
from common.device import precision
from launch import compose, train
from plugins.replay import egg
from plugins.replay.command import main
from plugins.replay.rebuild import Changes, rebuild
from plugins.replay.verify import ALIKE, verify
from tests.support import MOVING, ROOT
from tests.support.letters import Letters

pytestmark = pytest.mark.usefixtures("in_cache")

# What a run may be made with, each by the settings that it adds.
WAYS = {
    "plain": [],
    "adapter": ["model.adapter.rank=2"],
    "int8": ["model.quantize=int8"],
    "momentum": ["algo.optimizer.kwargs={momentum: 0.9}"],
    "Adam": ["algo.optimizer.name=Adam", "algo.lr=0.01"],
    "schedules": [
        "algo.lr_schedule={kind: cosine, end: 0.1}",
        "algo.sigma_schedule={kind: linear, end: 0.5}",
    ],
    "trust region": ["algo.max_drift=0.05"],
    "pull and shared noise": ["algo.weight_decay=0.3", "algo.noise_reuse=2"],
    "16 bits": ["opt=[amp]"],
    "all kinds of noise": ["algo.noise.vectors=full", "algo.noise.embeddings=full", "algo.rank=3"],
    "single members": ["algo.mirrored=false", "algo.fitness=centered_rank"],
    "likelihood": ["algo.fitness_of=likelihood"],
    "two ranks": ["opt=[ddp]", "opt.ddp.ranks=2"],
    "sharded": ["opt=[fsdp]", "opt.fsdp.ranks=2"],
}
QUICK = ("plain", "int8", "two ranks")  # the others are as many promises once more


def settings(way: str) -> list[str]:
    asked = WAYS[way]
    dropped = ("algo.sampling.temp",) if way == "likelihood" else ()
    return [text for text in MOVING if not text.startswith(dropped or "-")] + asked


def run_in(folder: Path, *overrides: str):
    return train(compose([*overrides]), folder)


def exported(folder: Path) -> bytes:
    (path,) = folder.glob("*/*.safetensors")
    return path.read_bytes()


@pytest.mark.parametrize(
    "way",
    [way if way in QUICK else pytest.param(way, marks=pytest.mark.thorough) for way in WAYS],
)
def test_a_model_is_rebuilt_bit_for_bit(tmp_path, monkeypatch, way):
    with monkeypatch.context() as patched:
        if way == "16 bits":  # which this machine may only emulate
            patched.setattr(precision, "native_bf16", lambda _: True)
        run_in(tmp_path, "algo=eggroll", *settings(way))
    held = egg.read(tmp_path / "run.egg")
    assert held.header["dtype"] == ("bfloat16" if way == "16 bits" else "float32")
    assert [record.number for record in held.steps] == [1, 2, 3, 4]
    _, step, proof = rebuild(held, tmp_path / "again")
    assert (step, proof.result, proof.first_other) == (held.end["exported"], True, None)
    assert proof.holds
    if way != "sharded":  # which writes its files in another order
        assert exported(tmp_path / "again") == exported(tmp_path)


def test_the_model_of_a_step_is_the_checkpoint_of_that_step(tmp_path):
    run_in(tmp_path, "algo=eggroll", *MOVING, "checkpoint.every=1", "checkpoint.keep=9")
    held = egg.read(tmp_path / "run.egg")
    _, step, proof = rebuild(held, tmp_path / "two", step=2)
    assert (step, proof.equal, proof.result) == (2, 2, None)
    saved = load_file(tmp_path / "checkpoints" / "step-00000002" / "tensors.safetensors")
    found = load_file(tmp_path / "two" / "model" / "model.safetensors")
    assert saved
    assert all(torch.equal(tensor, found[name]) for name, tensor in saved.items())


def test_a_killed_run_goes_on_in_the_same_file(tmp_path):
    """Records after the checkpoint are made again: the file is that of a run in one go."""
    more = ["algo=eggroll", *MOVING, "checkpoint.every=2"]
    run_in(tmp_path / "whole", *more)
    run_in(tmp_path / "stopped", *more, "algo.steps=2")
    whole, path = egg.read(tmp_path / "whole" / "run.egg"), tmp_path / "stopped" / "run.egg"
    # As a kill after step 3 leaves it: no end, a record after the checkpoint, and half a record.
    lost = whole.steps[2].pack()
    held = egg.read(path).cut(2)
    egg.write(path, [*held.payloads(), lost])
    with path.open("ab") as file:
        file.write(egg.frame(lost)[:40])
    run_in(tmp_path / "stopped", *more, "resume=auto")
    resumed = egg.read(path)
    assert [one.pack() for one in resumed.steps] == [one.pack() for one in whole.steps]
    assert resumed.end is not None
    assert resumed.end["sha256"] == egg.read(tmp_path / "whole" / "run.egg").end["sha256"]
    assert rebuild(resumed, tmp_path / "again")[2].result


def test_a_run_that_goes_on_without_its_record(tmp_path, caplog):
    more = ["algo=eggroll", *MOVING]
    run_in(tmp_path, *more, "algo.steps=2", "algo.record=false")
    assert not (tmp_path / "run.egg").exists()
    refuses_to_run = compose([*more, "resume=auto", "algo.record=true"])
    with pytest.raises(ConfigError, match=r"algo\.record=true.*run\.egg is not there"):
        train(refuses_to_run, tmp_path)
    run_in(tmp_path, *more, "resume=auto")
    assert not (tmp_path / "run.egg").exists()
    assert "run.egg is not written" in (tmp_path / "run.log").read_text()


@pytest.mark.parametrize("damaged", [False, True])
def test_a_record_that_is_not_gone_on_with_is_set_aside(tmp_path, damaged):
    more, path = ["algo=eggroll", *MOVING], tmp_path / "run.egg"
    run_in(tmp_path, *more, "algo.steps=2")
    content = path.read_bytes()
    if damaged:
        content = content[:-200] + bytes([content[-200] ^ 1]) + content[-199:]
        path.write_bytes(content)
    run_in(tmp_path, *more, "resume=auto", *([] if damaged else ["algo.record=false"]))
    assert not path.exists()
    assert (tmp_path / "run.egg.old").read_bytes() == content
    assert "renamed to run.egg.old" in (tmp_path / "run.log").read_text()


def test_skipped_steps_have_no_record(tmp_path):
    """A step whose rewards are not finite makes no update."""
    task = Letters("smooth")
    reward, seen = task.reward, []

    def broken(example, completion):
        seen.append(completion)
        return float("nan") if 16 <= len(seen) < 32 else reward(example, completion)

    task.reward = broken
    asked = [*MOVING, "not_finite.policy=skip", "not_finite.max_skips=4"]
    result = train(compose(["algo=eggroll", *asked, "evaluate.every=0"]), tmp_path, task)
    held = egg.read(tmp_path / "run.egg")
    assert result.skipped_steps >= 1
    assert len(held.steps) == 4 - result.skipped_steps


def test_components_can_be_weighed_otherwise(tmp_path):
    asked = [*MOVING, "task=units", "algo.noise.vectors=full"]
    run_in(tmp_path, "algo=eggroll", *asked)
    held = egg.read(tmp_path / "run.egg")
    names = held.header["components"]
    assert len(names) > 1
    assert held.steps[0].components.shape == (8, len(names))
    _, _, proof = rebuild(held, tmp_path / "same", changes=Changes(weights={}))
    assert proof.result
    one = dict.fromkeys(names[1:], 0.0)
    _, _, proof = rebuild(held, tmp_path / "other", changes=Changes(weights=one))
    assert proof.changed
    with pytest.raises(ConfigError, match=f"no such component. Components: {names[0]}"):
        rebuild(held, tmp_path / "none", changes=Changes(weights={"nothing": 1.0}))


REWARDS = """
def short(completion, **_):
    return 1.0 / (1 + len(completion))

def vowels(completion, **_):
    return float(sum(letter in "aeiou" for letter in completion))

def sometimes(completion, **_):
    return None if sum(map(ord, completion)) % 3 else float(len(set(completion)))
"""


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    """The settings of rows with reward functions of one's own."""
    (tmp_path / "rw.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = [{"question": f"say {n}", "answer": str(n)} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    fields = ["task.prompt_field=question", "task.answer_field=answer", "task.reward_weight=0.0"]
    return ["algo=eggroll", *MOVING, "task=custom", f"task.path={tmp_path}/rows.jsonl", *fields]


def test_components_that_are_not_named_keep_their_weights(tmp_path, rewards):
    run = tmp_path / "run"
    run_in(run, *rewards, "task.rewards={rw.short: 2.0, rw.vowels: 0.25}")
    held = egg.read(run / "run.egg")
    rebuild(held, tmp_path / "same", changes=Changes(weights={"rw.short": 2.0}))
    same = load_file(tmp_path / "same" / "model" / "model.safetensors")
    for name, tensor in load_file(run / "model" / "model.safetensors").items():
        torch.testing.assert_close(tensor, same[name], rtol=1e-3, atol=1e-3)
    assert verify(held, 2)[1].holds


def test_components_without_scores_cannot_be_weighed_again(tmp_path, rewards):
    run = tmp_path / "run"
    run_in(run, *rewards, "task.rewards={rw.sometimes: 1.0, rw.vowels: 1.0}")
    held = egg.read(run / "run.egg")
    with pytest.raises(ConfigError, match="has no score for some completions"):
        rebuild(held, tmp_path / "same", changes=Changes(weights={"rw.vowels": 1.0}))


def test_a_task_given_from_python_is_not_verified(tmp_path):
    compose_own = compose(["algo=eggroll", *MOVING])
    train(compose_own, tmp_path, Letters("smooth"))
    held = egg.read(tmp_path / "run.egg")
    with pytest.raises(ConfigError, match="was given from Python"):
        verify(held, 1)
    with pytest.raises(ConfigError, match="--base FOLDER"):
        rebuild(held, tmp_path / "again")
    recorded = compose(["algo=eggroll", *MOVING, "algo.record=true"])
    with pytest.raises(ConfigError, match=r"algo\.record=true, but .*model=hf"):
        train(recorded, tmp_path / "other", Letters("smooth"))


def test_a_folder_of_a_run_is_not_written_to(tmp_path):
    run_in(tmp_path, "algo=eggroll", *MOVING)
    before = exported(tmp_path)
    with pytest.raises(ConfigError, match="is the folder of a run"):
        rebuild(egg.read(tmp_path / "run.egg"), tmp_path, step=1)
    assert exported(tmp_path) == before


def test_a_forged_record_is_found_out(tmp_path):
    """Fitness that is true, beside hashes of other weights."""
    run_in(tmp_path, "algo=eggroll", *MOVING)
    held = egg.read(tmp_path / "run.egg")
    held.steps = [replace(record, digest=bytes(range(16))) for record in held.steps]
    found, proof = verify(held, 4)
    assert all(one.equal for one in found)
    assert not proof.holds


def test_updates_can_be_left_out(tmp_path):
    run_in(tmp_path, "algo=eggroll", *MOVING)
    held = egg.read(tmp_path / "run.egg")
    rebuild(held, tmp_path / "start", step=0)
    rebuild(held, tmp_path / "none", changes=Changes(dropped={1, 2, 3, 4}))
    assert exported(tmp_path / "start") == exported(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"--drop-steps 5: the steps are 1 to 4"):
        rebuild(held, tmp_path / "more", changes=Changes(dropped={5}))


@pytest.mark.parametrize("way", ["plain", "likelihood"])
def test_steps_are_sampled_again(tmp_path, way):
    run_in(tmp_path, "algo=eggroll", *settings(way))
    held = egg.read(tmp_path / "run.egg")
    found, proof = verify(held, 3)
    assert proof.holds
    assert [one.number for one in found][-1] == 4
    assert all(one.equal for one in found)


def test_fitness_of_another_reward_is_found_out(tmp_path):
    run_in(tmp_path, "algo=eggroll", *MOVING)
    held = egg.read(tmp_path / "run.egg")
    found, _ = verify(held, 4, overrides=["task.reward=exact"])  # which no member earns
    assert not all(one.equal for one in found)
    assert min(one.correlation for one in found) < ALIKE


def test_another_base_model_is_found_out(tmp_path):
    run_in(tmp_path, "algo=eggroll", *MOVING)
    held = egg.read(tmp_path / "run.egg")
    rebuild(held, tmp_path / "start", step=0)
    alone = tmp_path / "mail" / "run.egg"
    alone.parent.mkdir()
    alone.write_bytes((tmp_path / "run.egg").read_bytes())
    mailed = egg.read(alone)
    _, _, proof = rebuild(mailed, tmp_path / "got", base=str(tmp_path / "start" / "model"))
    assert proof.result
    assert exported(tmp_path / "got") == exported(tmp_path)
    wrong = str(tmp_path / "model")  # the result instead of the base
    _, _, proof = rebuild(mailed, tmp_path / "wrong", base=wrong)
    assert not proof.base
    assert not proof.holds
    with pytest.raises(ConfigError, match="--base FOLDER"):
        rebuild(mailed, tmp_path / "none")
    with pytest.raises(ConfigError, match="--trust"):
        verify(mailed, 1, base=wrong)


def damage(content: bytes, how: str) -> bytes:
    """A file that is not what a run wrote."""
    records = content[len(egg.MAGIC) :]
    length = struct.unpack("<I", records[:4])[0]
    header, rest = records[8 : 8 + length], records[8 + length :]

    def with_header(payload: bytes) -> bytes:
        return egg.MAGIC + egg.frame(payload) + rest

    facts = json.loads(zlib.decompress(header[1:]))
    end = content.rindex(b"E{") - 8
    last = json.loads(content[end + 9 :])
    return {
        "other": b"PK" + content,
        "empty": b"",
        "no header": egg.MAGIC,
        "flipped": content[:-60] + bytes([content[-60] ^ 1]) + content[-59:],
        "huge record": egg.MAGIC + struct.pack("<II", 2**31, 0) + records,
        "bomb": with_header(b"H" + zlib.compress(b"0" * (1 << 26))),
        "deep": with_header(b"H" + zlib.compress(b"[" * 100_000)),
        "other format": with_header(egg.pack_header(facts | {"format": 99})),
        "no members": with_header(egg.pack_header(facts | {"members": 0})),
        "huge members": with_header(egg.pack_header(facts | {"members": 1 << 40})),
        "settings": with_header(egg.pack_header(facts | {"settings": {"algo": {}}})),
        "dtype": with_header(egg.pack_header(facts | {"dtype": "load"})),
        "threads": with_header(
            egg.pack_header(facts | {"machine": facts["machine"] | {"threads": 10**9}})
        ),
        "end": content[:end] + egg.frame(egg.pack_json("E", last | {"exported": -3})),
        "far end": content[:end] + egg.frame(egg.pack_json("E", last | {"step": 10**30})),
        "a step twice": content + rest,
        "unknown kind": content + egg.frame(b"Z{}"),
    }[how]


DAMAGES = ["other", "empty", "no header", "flipped", "huge record", "bomb", "deep", "other format"]
DAMAGES += [
    "no members",
    "huge members",
    "settings",
    "dtype",
    "threads",
    "a step twice",
    "unknown kind",
]


@pytest.fixture(scope="module")
def content(cache, tmp_path_factory) -> bytes:
    """The file of a small run."""
    folder = tmp_path_factory.mktemp("egg")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CLUTCH_CACHE", str(cache))
        train(compose(["algo=eggroll", *MOVING, "algo.steps=2"]), folder)
    return (folder / "run.egg").read_bytes()


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_is_an_error(content, tmp_path, how):
    path = tmp_path / "run.egg"
    path.write_bytes(damage(content, how))
    with pytest.raises(ConfigError, match=str(path)):
        egg.read(path)


@pytest.mark.parametrize("beside", ["", "config: {algo: {}, task: {}}"])
@pytest.mark.parametrize(
    "settings",
    [
        {"seed": "${oc.env:HOME}"},
        {"algo": {"members": 1 << 20}},
        {"algo": {"optimizer": {"name": "os.system", "kwargs": {}}}},
        {"model": {"path": "../../etc", "name": "hf"}},
        {"task": {"_target_": "os.system", "command": "touch made"}},
    ],
)
def test_settings_of_a_foreign_file_run_no_code(content, tmp_path, settings, beside):
    """A file in the folder of its own run is trusted; this one is not."""
    (tmp_path / "own.egg").write_bytes(content)
    facts = copy.deepcopy(egg.read(tmp_path / "own.egg").header)
    changed = facts["settings"]
    for group, values in settings.items():
        changed[group] = changed[group] | values if isinstance(values, dict) else values
    path = tmp_path / "run.egg"
    path.write_bytes(egg.MAGIC + egg.frame(egg.pack_header(facts)))
    (tmp_path / "run.yaml").write_text(beside)
    with pytest.raises(ConfigError, match=r"run\.egg"):
        rebuild(egg.read(path), tmp_path / "out")
    with pytest.raises(ConfigError, match=r"run\.egg"):
        verify(egg.read(path), 1)
    assert not (tmp_path / "out").exists()


ADAPTER = {"rank": 10**9, "alpha": 32, "targets": "all-linear", "dropout": 0.0, "merge": False}
HUGE = {
    "algo.rank": 10**9,
    "algo.prompts_per_step": 1 << 22,
    "algo.samples_per_prompt": 10**400,
    "algo.sampling.max_new_tokens": 10**12,
    "algo.optimizer.kwargs": {"momentum": 0.9, "history_size": 10**9},
    "model.adapter": ADAPTER | {"path": None},
    "model.tiny.hidden_size": 1 << 22,
    "model.tiny.layers": 10**9,
    "model.tiny.pretrain_rows": 10**9,
    "task.rows": 10**9,
}


@pytest.mark.parametrize("key", HUGE)
def test_huge_sizes_are_errors_of_the_file(content, tmp_path, key):
    """Even if the file is in the folder of its own run, whose task may be built."""
    path = tmp_path / "run.egg"
    path.write_bytes(content)
    facts = copy.deepcopy(egg.read(path).header)
    node, (*groups, name) = facts["settings"], key.split(".")
    for group in groups:
        node = node[group]
    node[name] = HUGE[key]
    records = content[len(egg.MAGIC) :]
    rest = records[8 + struct.unpack("<I", records[:4])[0] :]
    path.write_bytes(egg.MAGIC + egg.frame(egg.pack_header(facts)) + rest)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"config": facts["settings"]}))
    held = egg.read(path)
    for attempt in (lambda: rebuild(held, tmp_path / "out"), lambda: verify(held, 1)):
        with pytest.raises(ConfigError, match=re.escape(str(path))) as refused:
            attempt()
        assert all(part in str(refused.value) for part in (*groups, name))
    assert not (tmp_path / "out").exists()


def test_an_unfinished_record_is_left_out(content, tmp_path):
    path = tmp_path / "run.egg"
    whole = None
    for end in range(len(content), len(content) - 60, -7):
        path.write_bytes(content[:end])
        held = egg.read(path)
        whole = whole or held
        assert held.torn == (end < len(content))
        assert held.end == (whole.end if end == len(content) else None)


def test_the_command(tmp_path, capsys):
    run_in(tmp_path / "run", "algo=eggroll", *MOVING)
    folder = str(tmp_path / "run")
    command = [sys.executable, "-m", "eggroll.replay", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "bit for bit the model that the run exported" in done.stdout
    assert (tmp_path / "run" / "replay" / "model" / "config.json").is_file()
    capsys.readouterr()
    assert main([folder, "--show"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["members"], shown["updates"]) == (8, 4)
    for arguments, said in (
        ([str(tmp_path)], "there is no such file"),
        ([folder, "--step", "9"], "has the steps 0 to 4"),
        ([folder, "--verify", "9"], "has 4 updates"),
        ([folder, "--drop-steps", "a"], "is no step"),
        ([folder, "--weights", "x=1"], "no components to weigh"),
        ([folder, "--base", str(tmp_path)], "is not a model folder"),
        ([folder, "task.path=x"], "no effect without --verify"),
        ([folder, "--verify", "1", "algo.members=4"], "no setting that may change"),
        ([folder, "--verify", "1", "task.reward={a"], "cannot be read as YAML"),
        ([folder, "--step", "0", "--drop-steps", "1"], "no effect with --step 0"),
    ):
        assert main(arguments) == 2, arguments
        failed = capsys.readouterr().err
        assert failed.startswith("error: "), arguments
        assert said in failed


def test_chat_asks_the_model_of_a_step(tmp_path):
    run_in(tmp_path, "algo=eggroll", *MOVING)
    chat = [sys.executable, "-m", "common.chat", str(tmp_path), "--prompt", "seven"]
    done = subprocess.run(
        [*chat, "--step", "2"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
