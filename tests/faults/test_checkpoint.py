"""Checkpoints: exact round trips, every kind of damage, a full disk, a killed writer."""

import itertools
import json
import logging
import math
import os
import pickle
import resource
import shutil
import signal
import time

import pytest
import torch

from common.checkpoint import checkpoint
from common.checkpoint.checkpoint import latest, load, save
from common.system.files import CheckpointError, seal, write_text

pytestmark = pytest.mark.faults


def write(root, step, keep=10, extra=True):
    tensors = {"a": torch.full((3, 2), float(step)), "b": torch.arange(5)}
    extras = (
        {"generator": torch.Generator().manual_seed(step).get_state(), "groups": [{"lr": 0.1}]}
        if extra
        else None
    )
    return save(root, step, tensors, {"step": step}, extras, keep=keep)


def names(root):
    return sorted(path.name for path in root.iterdir())


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_all_that_is_written_is_synced(tmp_path, monkeypatch):
    """Every file, its folder, and the folder of checkpoints in which it gets its name."""
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_ino))
    folder = write(tmp_path / "checkpoints", 1)
    wanted = [*folder.iterdir(), folder, folder.parent]
    assert {path.stat().st_ino for path in wanted} <= {*synced}
    assert len(wanted) > 4
    assert synced[-1] == folder.parent.stat().st_ino
    write_text(tmp_path / "metrics.jsonl", "{}")
    assert synced[-1] == (tmp_path / "metrics.jsonl").stat().st_ino


def test_everything_comes_back_bit_for_bit(tmp_path):
    weight = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    tensors = {
        "weight": weight,
        "tied": weight,
        "transposed": weight.t(),
        "view": weight[1:3],
        "half": weight.to(torch.bfloat16),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "other_empty": torch.zeros(0, 4),
        "flags": torch.tensor([True, False]),
        "parameter": torch.nn.Parameter(torch.tensor([float("nan"), -0.0, float("inf")])),
    }
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    optimizer.step()
    state = {"step": 7, "rate": 0.1, "nested": {"text": "ä\n", "list": [1, None, True]}}
    path = save(
        tmp_path / "deep" / "root", 7, tensors, state, {"optimizer": optimizer.state_dict()}, keep=1
    )
    assert path == tmp_path / "deep" / "root" / "step-00000007"
    assert names(path) == ["extra.pt", "manifest.json", "state.json", "tensors.safetensors"]

    found = latest(tmp_path / "deep" / "root")
    assert found is not None
    assert (found.path, found.step, found.state) == (path, 7, state)
    assert found.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found.tensors[name].dtype == tensor.dtype, name
        assert found.tensors[name].shape == tensor.shape, name
        torch.testing.assert_close(
            found.tensors[name], tensor.detach(), rtol=0, atol=0, equal_nan=True
        )
    assert found.tensors["tied"] is found.tensors["weight"]
    assert math.copysign(1, found.tensors["parameter"][1].item()) == -1
    assert found.extra is not None
    torch.testing.assert_close(
        found.extra["optimizer"]["state"], optimizer.state_dict()["state"], rtol=0, atol=0
    )


def test_views_of_one_storage_come_back_apart(tmp_path):
    base = torch.arange(6.0)
    save(tmp_path, 1, {"left": base[:3], "right": base[2:]}, {}, None, keep=1)
    found = latest(tmp_path)
    assert found is not None
    found.tensors["left"][2] = 99
    assert found.tensors["right"].tolist() == [2, 3, 4, 5]
    assert found.extra is None


def test_the_saved_tensors_are_copies(tmp_path):
    """Training goes on in place; a model that is as large again on disk as in memory would mean
    tied weights twice.
    """
    weight = torch.zeros(1000)
    path = save(tmp_path, 1, {"one": weight, "two": weight}, {}, None, keep=1)
    weight += 1
    assert load(path).tensors["one"].sum() == 0
    assert (path / "tensors.safetensors").stat().st_size < 5000


def test_only_the_newest_are_kept(tmp_path):
    (tmp_path / ".tmp-step-00000001-99-aa").mkdir()
    for step in (1, 2, 3, 10):
        write(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-00000003", "step-00000010"]


def test_going_back_keeps_what_was_just_saved(tmp_path):
    """A run that resumed before a damaged step 30 saves step 20: keep=1 must not mean 'keep the
    damaged one only'.
    """
    write(tmp_path, 30)
    (tmp_path / "step-00000030" / "state.json").unlink()
    write(tmp_path, 10, keep=1)
    write(tmp_path, 20, keep=1)
    assert names(tmp_path) == ["step-00000020", "step-00000030"]
    found = latest(tmp_path)
    assert found is not None
    assert found.step == 20


def test_the_same_step_is_replaced(tmp_path):
    write(tmp_path, 5)
    save(tmp_path, 5, {"new": torch.ones(1)}, {"new": True}, None, keep=3)
    assert names(tmp_path) == ["step-00000005"]
    found = latest(tmp_path)
    assert found is not None
    assert found.state == {"new": True}


def test_killed_between_the_two_renames_of_a_replacement(tmp_path, caplog):
    write(tmp_path, 5).rename(tmp_path / "step-00000005.old")
    found = latest(tmp_path)
    assert found is not None
    assert found.step == 5
    assert not warnings_of(caplog)
    write(tmp_path, 5)
    assert names(tmp_path) == ["step-00000005"]


def truncated(folder):
    data = (folder / "tensors.safetensors").read_bytes()
    (folder / "tensors.safetensors").write_bytes(data[: len(data) // 2])


def flipped(folder):
    data = bytearray((folder / "tensors.safetensors").read_bytes())
    data[-3] ^= 1
    (folder / "tensors.safetensors").write_bytes(data)


def flipped_manifest(folder):
    data = bytearray((folder / "manifest.json").read_bytes())
    data[0] ^= 1
    (folder / "manifest.json").write_bytes(data)


def moved(folder):
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("step-00000010"), folder)


def other_program(folder):
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "weights").write_bytes(b"x")
    seal(folder, {"step": 20})


def newer_format(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))


def escaping(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["../step-00000010/state.json"] = ""
    (folder / "manifest.json").write_text(json.dumps(manifest))


def replaced_by_a_file(folder):
    shutil.rmtree(folder)
    folder.write_text("")


DAMAGE = {
    truncated: "tensors.safetensors is damaged",
    flipped: "tensors.safetensors is damaged",
    flipped_manifest: "manifest.json is damaged",
    lambda folder: (folder / "manifest.json").unlink(): "manifest.json is missing",
    lambda folder: (folder / "extra.pt").unlink(): "extra.pt is missing",
    lambda folder: (folder / "manifest.json").write_text("[]"): "damaged or foreign",
    moved: "foreign, it holds step 10",
    other_program: "foreign",
    newer_format: "format 99",
    escaping: "foreign",
    replaced_by_a_file: "Not a directory",
}


@pytest.mark.parametrize(
    ("damage", "words"), DAMAGE.items(), ids=[f"{i}-{w}" for i, w in enumerate(DAMAGE.values())]
)
def test_a_damaged_checkpoint_is_skipped_with_one_warning(tmp_path, caplog, damage, words):
    write(tmp_path, 10)
    damage(write(tmp_path, 20))
    found = latest(tmp_path)
    assert found is not None
    assert found.step == 10
    assert len(warnings_of(caplog)) == 1
    assert "step-00000020" in warnings_of(caplog)[0]
    assert words in warnings_of(caplog)[0]
    with pytest.raises(CheckpointError, match="step-00000020"):
        load(tmp_path / "step-00000020")


def test_every_single_flipped_byte_is_noticed(tmp_path):
    folder = write(tmp_path, 1)
    for name in ("tensors.safetensors", "state.json"):
        good = (folder / name).read_bytes()
        for position in range(0, len(good), 7):
            bad = bytearray(good)
            bad[position] ^= 0x10
            (folder / name).write_bytes(bad)
            with pytest.raises(CheckpointError):
                load(folder)
        (folder / name).write_bytes(good)
    assert load(folder).step == 1


def test_foreign_and_half_written_entries(tmp_path, caplog):
    write(tmp_path, 3)
    (tmp_path / "best").mkdir()
    (tmp_path / ".tmp-step-00000004-1-ab").mkdir()
    (tmp_path / ".nfs0001").write_text("")
    found = latest(tmp_path)
    assert found is not None
    assert found.step == 3
    assert [
        next(word for word in ("half-written", "foreign") if word in text)
        for text in warnings_of(caplog)
    ] == [
        "half-written",
        "foreign",
    ]


def test_no_checkpoint(tmp_path, caplog):
    assert latest(tmp_path / "nowhere") is None
    assert latest(tmp_path) is None
    assert not warnings_of(caplog)
    with pytest.raises(CheckpointError, match="no such folder"):
        load(tmp_path / "step-00000001")


class Trap:
    """Unpickling it makes a folder."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (self.target,)


def test_a_malicious_pickle_is_not_executed(tmp_path, caplog):
    """With a right manifest: whoever plants the file can compute hashes too."""
    write(tmp_path, 1)
    folder = write(tmp_path, 2)
    sprung = tmp_path.parent / "sprung"
    for plant in (
        lambda file: torch.save({"x": Trap(str(sprung))}, file),
        lambda file: pickle.dump(Trap(str(sprung)), file, protocol=2),
    ):
        with (folder / "extra.pt").open("wb") as file:
            plant(file)
        (folder / "manifest.json").unlink()
        seal(folder, {"step": 2})
        with pytest.raises(CheckpointError, match=r"extra\.pt holds objects"):
            load(folder)
        found = latest(tmp_path)
        assert found is not None
        assert found.step == 1
    assert not sprung.exists()
    pickle.loads(pickle.dumps(Trap(str(sprung))))
    assert sprung.exists(), "the trap works, so the test can fail"


def test_extra_that_could_not_be_read_back_is_refused_when_saving(tmp_path):
    write(tmp_path, 1)
    with pytest.raises(TypeError, match="weights_only"):
        save(tmp_path, 2, {}, {}, {"path": Trap("x")}, keep=1)
    with pytest.raises(TypeError):
        save(tmp_path, 2, {}, {"tensor": torch.ones(1)}, None, keep=1)
    assert names(tmp_path) == ["step-00000001"]


def fill(folder, kind):
    """Save more than the largest file may hold."""
    big = {"a": torch.zeros(100_000)}
    state = {"text": "x" * 400_000} if kind == "state" else {}
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    save(
        folder, 2, big if kind == "tensors" else {}, state, big if kind == "extra" else None, keep=1
    )


@pytest.mark.parametrize(
    "kind", ["tensors", *(pytest.param(k, marks=pytest.mark.thorough) for k in ("state", "extra"))]
)
def test_a_disk_that_takes_no_more(warm, tmp_path, kind):
    """The kernel refuses writes beyond a file size, as a full disk does, in whatever language the
    writer is written.
    """
    write(tmp_path, 1)
    with pytest.raises(
        CheckpointError, match=r"step-00000002 could not be written: .*File too large"
    ):
        warm.call(fill, tmp_path, kind)
    assert names(tmp_path) == ["step-00000001"]
    assert load(tmp_path / "step-00000001").step == 1
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 100_000


def test_a_root_that_is_a_file(tmp_path):
    (tmp_path / "root").write_text("")
    with pytest.raises(
        CheckpointError, match=r"root/step-00000001 could not be written: .*Not a directory"
    ):
        write(tmp_path / "root", 1)


def test_a_failed_replacement_leaves_the_old_one(tmp_path, monkeypatch):
    write(tmp_path, 4)
    before = load(tmp_path / "step-00000004").state

    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", refuse)
    with pytest.raises(
        CheckpointError, match=r"step-00000004 could not be written: .*No space left on device"
    ):
        save(tmp_path, 4, {}, {"other": 1}, None, keep=1)
    assert names(tmp_path) == ["step-00000004"]
    assert load(tmp_path / "step-00000004").state == before


def save_for_ever(folder):
    """Replacements too: the steps go round."""
    for step in itertools.count(1):
        tensors = {"a": torch.full((50_000,), float(step % 7))}
        save(folder, step % 7, tensors, {"step": step % 7}, None, keep=3)
        print(step, flush=True)


def test_kill_9_at_any_moment_leaves_a_valid_checkpoint(warm, tmp_path):
    """keep=3 of steps up to the current one."""
    saved = tmp_path / "saved"
    for attempt in range(3):
        printed = tmp_path / str(attempt)
        printed.mkdir()
        process = warm.begin(save_for_ever, saved, printed=printed)
        until = time.monotonic() + 60
        while process.said()[0].count("\n") < 5:
            assert process.poll() is None, process.said()
            assert time.monotonic() < until
        time.sleep(0.003 * attempt)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        found = latest(saved)
        assert found is not None
        assert found.state == {"step": found.step}
        assert found.tensors["a"].unique().tolist() == [float(found.step)]
