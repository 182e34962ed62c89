"""metrics.jsonl, and the trackers that read the same events."""

import json

import pytest
from conftest import SMALL, events
from letters import Letters

from common import checkpoint
from launch import compose, train

RUN = [*SMALL, "algo.steps=4", "evaluate.every=1", "algo.sigma=0.1", "algo.lr=0.5", "algo.sampling.temperature=1.0"]


def run_here(out, *overrides):
    return train(compose([*RUN, *overrides]), out, Letters("smooth"))


def test_resume_cuts_later_events_and_a_torn_line(in_cache, tmp_path):
    """As a killed run leaves it: events of steps that no checkpoint holds, and half a line."""
    run_here(tmp_path, "algo.steps=2")
    path = tmp_path / "metrics.jsonl"
    first = path.read_text()
    lost = [{"step": step, "reward": -1.0} for step in (3, 4)]
    path.write_text(first + "".join(json.dumps(event) + "\n" for event in lost) + '{"step": 5, "rewa')
    run_here(tmp_path, "resume=auto")
    assert path.read_text().startswith(first), "what stands is not written anew with other times"
    assert [event["step"] for event in events(tmp_path)] == [1, 2, 3, 4]
    assert all(event["reward"] > 0 for event in events(tmp_path))
    assert sorted(path.name for path in tmp_path.glob("metrics*")) == ["metrics.jsonl"]


def test_a_fresh_run_drops_what_a_run_without_checkpoint_left(in_cache, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": -1.0}\n')
    run_here(tmp_path, "algo.steps=1")
    (event,) = events(tmp_path)
    assert event["reward"] > 0


def flat(event: dict, prefix: str = "") -> dict[str, float]:
    """The numbers of an event under the names that trackers show."""
    numbers: dict[str, float] = {}
    for key, value in event.items():
        if isinstance(value, dict):
            numbers |= flat(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)):
            numbers[prefix + key] = value
    return numbers


def test_tensorboard_shows_the_same_numbers(in_cache, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = run_here(tmp_path, "tracker=tensorboard", "algo.steps=2")
    run_here(tmp_path, "tracker=tensorboard", "algo.steps=4", "resume=auto")
    seen = EventAccumulator(str(tmp_path / "tensorboard"))
    seen.Reload()
    log = [flat(event) for event in events(tmp_path)]
    names = {name for event in log for name in event} - {"step"}
    assert {"reward", "phase_seconds/rollout", "metric", "metrics/exact", "peak_memory_gb"} <= names
    assert set(seen.Tags()["scalars"]) == names | {"summary/before", "summary/after"}
    for name in names:
        shown = [(scalar.step, scalar.value) for scalar in seen.Scalars(name)]
        expected = [(event["step"], event[name]) for event in log if name in event]
        assert [step for step, _ in shown] == [step for step, _ in expected]
        assert [value for _, value in shown] == pytest.approx([value for _, value in expected], rel=1e-6)
    assert seen.Scalars("summary/after")[0].value == pytest.approx(result.after)


def test_wandb_offline(launch, tmp_path):
    """Nothing listens where W&B is told to be, so anything that went over the network would fail or wait."""
    pytest.importorskip("wandb")
    secrets = {"WANDB_API_KEY": "0123456789abcdef" * 2 + "01234567", "HF_TOKEN": "hf_aVerySecretToken"}
    out = tmp_path / "run"
    common = [*SMALL, "tracker=wandb", f"hydra.run.dir={out}"]
    env = {"WANDB_MODE": "offline", "WANDB_BASE_URL": "http://127.0.0.1:9", "HOME": str(tmp_path), **secrets}
    launch(*common, "algo.steps=2", env=env)
    (folder,) = (out / "wandb").glob("offline-run-*")
    identity = folder.name.rsplit("-", 1)[1]
    written = (folder / f"run-{identity}.wandb").read_bytes()
    for key in (b"rows_per_forward", b"prompts_per_step", b"phase_seconds", b"tokens_per_second", b"clutch"):
        assert key in written

    saved = checkpoint.latest(out / "checkpoints")
    assert saved is not None
    assert saved.state["run"]["tracker"] == {"id": identity}, "so that a resumed run goes on in the same W&B run"

    for path in out.rglob("*"):
        if path.is_file() and not path.is_symlink():
            for secret in secrets.values():
                assert secret.encode() not in path.read_bytes(), path
