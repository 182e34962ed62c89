"""Trackers beside metrics.jsonl: they show the same numbers, and a resumed run goes on in them."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from common.checkpoint import checkpoint
from common.config import ConfigError
from common.report import Tracker
from common.system import EXIT_NUMBERS
from common.system.events import numeric_values
from common.tasks import ExampleOrder
from launch import compose
from plugins.trackers import sinks
from tests.support import CONF, ROOT, SMALL, SMALL_GRPO, events
from tests.support.letters import Letters
from tests.support.refusals import refuses
from tests.support.short_runs import run_here
from tests.support.wandb_file import records


class Sink:
    def __init__(self, run, out_dir, resumed, state):
        self.id, self.given = "mine", state

    def close(self, code):
        pass


def test_a_tracker_does_not_go_on_with_the_id_of_another(tmp_path, monkeypatch):
    """A run that is resumed may have another one."""
    monkeypatch.setattr(sinks, "Trackio", Sink)
    monkeypatch.setattr(sinks, "Wandb", Sink)
    run, state = compose([*SMALL_GRPO, "tracker=wandb"]), {"trackio": "TIME/0"}
    tracker = Tracker(run, tmp_path, 1, 0, state)
    assert tracker.sink.given == {}
    assert tracker.state() == {"trackio": "TIME/0", "wandb": "mine"}
    again = Tracker(run, tmp_path, 1, 0, tracker.state())
    assert again.sink.given == {"id": "mine"}
    for one in (tracker, again):
        one.close()


def tracked(event: dict) -> dict[str, float]:
    """The numbers of an event under the names that trackers show."""
    found: dict[str, float] = {}
    for key, value in event.items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        found |= {
            f"{key}/{name}" if name else key: v for name, v in inner if isinstance(v, (int, float))
        }
    return {name: value for name, value in found.items() if name != "step"}


def by_step(out) -> dict[int, dict[str, float]]:
    """What trackers are to show at each step: the events, and the measures before the first and
    after the last.
    """
    shown = {event["step"]: tracked(event) for event in events(out)}
    for line in (out / "evaluations.jsonl").read_text().splitlines():
        record = json.loads(line)
        shown[record["step"]] = shown.get(record["step"], {}) | tracked(record)
    if 0 in shown:  # so that curves against what was used begin there
        shown[0] |= {"generated_tokens": 0, "reward_evaluations": 0}
    return shown


def test_tensorboard_shows_the_same_numbers(in_cache, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = run_here(tmp_path, "tracker=tensorboard", "algo.steps=2")
    run_here(tmp_path, "tracker=tensorboard", "algo.steps=4", "resume=auto")
    seen = EventAccumulator(str(tmp_path / "tensorboard"))
    seen.Reload()
    expected = by_step(tmp_path)
    names = {name for values in expected.values() for name in values}
    assert {"reward", "phase_seconds/rollout", "metric", "metrics/exact", "peak_memory_gb"} <= names
    scalars = {name for name in seen.Tags()["scalars"] if not name.startswith("summary/")}
    assert scalars == names
    for name in names:
        scalars = seen.Scalars(name)
        steps = [scalar.step for scalar in scalars]
        assert steps == sorted(steps), "TensorBoard hides what comes before an earlier step"
        shown = {scalar.step: scalar.value for scalar in scalars}
        assert shown == pytest.approx(
            {s: values[name] for s, values in expected.items() if name in values}, rel=1e-6
        )
    assert seen.Scalars("summary/after")[-1].value == pytest.approx(result.after)
    tables = {
        f"completions/{name}/text_summary"
        for name in ("before", "step-00000001", "step-00000003", "after")
    }
    assert tables <= set(seen.Tags()["tensors"])


def test_trackio_shows_the_same_numbers(in_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    run, given = tmp_path / "run", ("tracker=trackio", "tracker.project=mine", "checkpoint.every=2")
    result = run_here(run, *given, "algo.steps=4")
    shutil.rmtree(run / "checkpoints" / "step-00000004")  # as if it had been killed after step 4
    run_here(run, *given, "algo.steps=4", "resume=auto")
    (one,) = SQLiteStorage.get_run_records("mine")
    assert one["name"] == "run"
    shown = SQLiteStorage.get_logs("mine", run="run")
    for name, of in (("reward", 4), ("metric", 3)):
        values = [(row["step"], row[name]) for row in shown if name in row]
        expected = {s: v[name] for s, v in by_step(run).items() if name in v}
        assert len(values) == len(expected) >= of
        assert dict(values) == pytest.approx(expected)
    assert [r["summary/after"] for r in shown if "summary/after" in r][-1] == result.after
    assert {"completions/before", "completions/after"} <= {name for row in shown for name in row}
    assert SQLiteStorage.get_run_config("mine", "run")["algo.name"] == "eggroll"


class Wandb:
    """An offline W&B run, read back."""

    def __init__(self, folder):
        found = list(records(folder))
        self.folder = folder
        self.run = next(r.run for r in found if r.WhichOneof("record_type") == "run")
        self.config = {item.key: json.loads(item.value_json) for item in self.run.config.update}
        self.axes = {
            m.glob_name or m.name: m.step_metric
            for m in (r.metric for r in found)
            if m.glob_name or m.name
        }
        self.history, self.summary = {}, {}
        for record in found:
            for item in record.summary.update:
                self.summary[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
            if record.WhichOneof("record_type") == "history":
                items = {
                    i.key or "/".join(i.nested_key): json.loads(i.value_json)
                    for i in record.history.item
                }
                assert record.history.step.num not in self.history
                self.history[record.history.step.num] = items
        self.artifacts = [
            (a.type, sorted(a.aliases)) for a in (r.artifact for r in found) if a.type
        ]
        self.exit = next(r.exit.exit_code for r in found if r.WhichOneof("record_type") == "exit")
        self.kinds = {record.WhichOneof("record_type") for record in found}

    def table(self, name):
        path = self.summary[f"{name}/path"]
        return json.loads((self.folder / "files" / path).read_text())


OFFLINE = {"WANDB_MODE": "offline", "WANDB_BASE_URL": "http://127.0.0.1:9"}


@pytest.mark.parametrize("given", [[], ["tracker.project=mine"]])
def test_variables_of_wandb_count_where_no_setting_does(launch, tmp_path, given):
    out = tmp_path / "run"
    names = {"WANDB_PROJECT": "theirs", "WANDB_NAME": "a name", "WANDB_JOB_TYPE": "a kind"}
    env = OFFLINE | {"HOME": str(tmp_path), **names}
    launch(*SMALL, "tracker=wandb", *given, f"hydra.run.dir={out}", "algo.steps=1", env=env)
    (folder,) = (out / "wandb").glob("offline-run-*")
    run = Wandb(folder).run
    assert (run.project, run.display_name) == ("mine" if given else "theirs", "a name")
    assert run.job_type == "a kind"


def test_wandb_offline(launch, tmp_path):
    """Nothing listens where W&B is told to be, so anything that went over the network would fail or
    wait.
    """
    secrets = {
        "WANDB_API_KEY": "0123456789abcdef" * 2 + "01234567",
        "HF_TOKEN": "hf_aVerySecretToken",
    }
    out = tmp_path / "run"
    common = [
        *SMALL,
        "tracker=wandb",
        f"hydra.run.dir={out}",
        "tracker.artifacts=true",
        "evaluate.every=1",
    ]
    env = OFFLINE | {"HOME": str(tmp_path), **secrets}
    done = launch(*common, "algo.steps=2", env=env)
    assert "wandb:" not in done.stdout + done.stderr, "the chatter of the library"
    (folder,) = (out / "wandb").glob("offline-run-*")
    assert f"wandb sync {folder}" in done.stdout
    seen = Wandb(folder)
    identity = seen.run.run_id
    assert (seen.run.project, seen.run.job_type, seen.run.run_group) == ("clutch", "eggroll", "")
    assert seen.config["algo"]["prompts_per_step"] == 2
    assert seen.config["tracker"]["artifacts"] is True
    assert seen.exit == 0
    assert seen.axes["*"] == "step"
    assert seen.axes["validation/*"] == "epoch"
    assert {"environment", "stats"} <= seen.kinds, "what the system does"
    expected = by_step(out)
    assert seen.history.keys() == expected.keys() == {0, 1, 2}
    for step, values in expected.items():
        assert seen.history[step]["step"] == step
        assert {name: seen.history[step][name] for name in values} == pytest.approx(values)
    result = json.loads((out / "result.json").read_text())
    assert seen.summary["after"] == result["after"]
    assert seen.summary["metric_name"] == result["metric"] == "bleu"
    tables = {
        name: seen.table(f"completions/{name}") for name in ("before", "step-00000001", "after")
    }
    for name, table in tables.items():
        kept = [
            json.loads(line)
            for line in (out / "completions" / f"{name}.jsonl").read_text().splitlines()
        ]
        assert table["columns"] == ["id", "prompt", "answer", "completion"]
        assert [row[3] for row in table["data"]] == [row["completion"] for row in kept]
    kinds = [(kind, aliases) for kind, aliases in seen.artifacts if kind in ("checkpoint", "model")]
    assert kinds == [("checkpoint", ["latest", "step-2"]), ("model", ["latest", "step-2"])]

    saved = checkpoint.latest(out / "checkpoints")
    assert saved is not None
    assert saved.state["run"]["tracker"] == {"wandb": identity}
    launch(*common, "algo.steps=3", "resume=auto", env=env)
    (later,) = (Wandb(f) for f in (out / "wandb").glob("offline-run-*") if f != folder)
    assert later.run.run_id == identity, "a resumed run goes on in the same W&B run"
    assert later.history.keys() == {3}, "and sends nothing twice"

    for path in out.rglob("*"):
        if path.is_file() and not path.is_symlink():
            for secret in secrets.values():
                assert secret.encode() not in path.read_bytes(), path


@pytest.mark.slow
def test_wandb_gets_the_end_of_a_killed_run(launch, tmp_path):
    out, env = tmp_path / "run", OFFLINE | {"HOME": str(tmp_path)}
    for more in ([], ["resume=auto"]):
        launch(*SMALL, "tracker=wandb", f"hydra.run.dir={out}", "algo.steps=2", *more, env=env)
    _, later = (
        Wandb(folder)
        for folder in sorted((out / "wandb").glob("offline-run-*"), key=lambda f: f.stat().st_mtime)
    )
    result = json.loads((out / "result.json").read_text())
    assert [values["step"] for values in later.history.values()] == [2]
    assert next(iter(later.history.values()))["metric"] == result["after"]
    assert later.table("completions/after")["data"]
    shown = subprocess.run(  # W&B's viewer of runs that no server has
        [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", out / "wandb/latest-run"],
        env=os.environ | env,
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"project +clutch\n", shown.stdout)
    assert re.search(r"completions/after +table-file", shown.stdout)


@pytest.mark.thorough
def test_wandb_shows_the_stages_of_rft(launch, tmp_path):
    """Its step is the event of the log, which stages, evaluations and tables share."""
    out = tmp_path / "run"
    rft = [
        *(
            "algo=rft",
            "task=letters",
            "task.scoring=smooth",
            "algo.select.accept=0.2",
            "evaluate.samples=null",
        )
    ]
    rft += [
        *SMALL[:6],
        "evaluate.examples=4",
        "algo.prompts=6",
        "algo.validation_prompts=2",
        "algo.samples_per_prompt=4",
    ]
    rft += [
        "algo.sampling.max_new_tokens=6",
        "algo.epochs=1",
        "algo.iterations=1",
        f"hydra.run.dir={out}",
    ]
    env = OFFLINE | {"HOME": str(tmp_path)}
    done = launch(*rft, "tracker=wandb", f"--config-dir={CONF}", env=env)
    assert "wandb:" not in done.stdout + done.stderr, "no step is logged out of order"
    (folder,) = (out / "wandb").glob("offline-run-*")
    seen, logged = Wandb(folder), events(out)
    assert list(seen.history) == [event["step"] for event in logged]
    for event in logged:
        shown = seen.history[event["step"]]
        assert {name: shown[name] for name in numeric_values(event)} == pytest.approx(
            numeric_values(event)
        )
    names = {name for shown in seen.history.values() for name in shown}
    assert {
        "generate/accepted",
        "select/prompts_by_share_right/none",
        "finetune/loss",
        "metrics/exact",
    } <= names
    assert {"iteration", "generated_tokens", "reward_evaluations"} <= names
    for name in ("before", "iteration-1", "after"):
        assert len(seen.table(f"completions/{name}")["data"]) == 4


@pytest.mark.thorough
def test_wandb_is_told_that_a_run_failed(launch, tmp_path):
    """And keeps what was logged until then."""
    env = OFFLINE | {"HOME": str(tmp_path)}
    bad = (
        ExampleOrder(Letters().examples("train"), 0).take(2, 1)[0].id
    )  # of the second step, two prompts each
    fault = ["task=letters", "task.fault=infinite", f"task.fault_id={bad}"]
    run = [
        *SMALL,
        *fault,
        "tracker=wandb",
        f"hydra.run.dir={tmp_path}/run",
        f"--config-dir={CONF}",
    ]
    launch(*run, env=env, code=EXIT_NUMBERS)
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    seen = Wandb(folder)
    assert seen.exit == EXIT_NUMBERS
    assert list(seen.history) == [0, 1]


@pytest.mark.thorough
def test_wandb_groups_sweeps_and_joins_ranks(launch, tmp_path):
    env = OFFLINE | {"HOME": str(tmp_path)}
    jobs = ("seed=3", "opt=[ddp]", "hydra.sweep.dir=sweep")
    done = launch("-m", *SMALL, "tracker=wandb", "algo.steps=1", *jobs, env=env)
    (folder,) = (tmp_path / "sweep").glob("0/wandb/offline-run-*")
    run = Wandb(folder).run
    assert (run.run_group, run.display_name) == ("sweep", "sweep/0")
    for text in ("step 1/1: ", "before: held-out", "held-out bleu", "W&B: offline"):
        assert done.stdout.count(text) == (3 if text == "held-out bleu" else 1), (
            "once, whatever the ranks"
        )


def test_wandb_online_without_a_key_says_what_to_do(launch, tmp_path):
    done = launch(
        *(*SMALL, "tracker=wandb", "tracker.mode=online"),
        env={"HOME": str(tmp_path), "WANDB_API_KEY": ""},
        code=2,
    )
    assert "tracker=wandb cannot start" in done.stderr
    assert "tracker.mode=offline" in done.stderr
    assert "Traceback" not in done.stderr


def expand(command, values):
    """The command that W&B's agent makes of a sweep, and its arguments."""
    return list(command), {"args_no_hyphens": [f"{name}={value}" for name, value in values.items()]}


def expand_as_wandb(command, values):
    """The same by the agent's own functions, which take seconds to import."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    chosen = {"args": {name: {"value": value} for name, value in values.items()}}
    return create_sweep_command(list(command)), create_sweep_command_args(chosen)


@pytest.mark.parametrize(
    "expand", [expand, pytest.param(expand_as_wandb, marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize(
    "path",
    sorted((ROOT / "plugins" / "trackers" / "sweeps").glob("*.yaml")),
    ids=lambda path: path.stem,
)
def test_wandb_sweeps_compose(path, expand):
    """The command that W&B's agent makes of a sweep is a run, at both ends of every parameter."""
    sweep = yaml.safe_load(path.read_text())
    ends = {
        name: values.get("values") or [values["min"], values["max"]]
        for name, values in sweep["parameters"].items()
    }
    for end in (0, -1):
        command, arguments = expand(
            sweep["command"], {name: values[end] for name, values in ends.items()}
        )
        assert command[:3] == ["${env}", "${interpreter}", "${program}"]
        assert command.pop() == "${args_no_hyphens}"
        run = compose([*command[3:], *arguments["args_no_hyphens"]])
        assert (run.algo.name, run.tracker.name) == (path.stem, "wandb")
        assert run.algo.lr == ends["algo.lr"][end]
        assert run.seed == ends["seed"][end]
    assert sweep["metric"]["name"] == "after", "what the summary calls it"


def test_mistakes():
    with pytest.raises(
        ConfigError, match=r"Did you mean 'wandb'\? Choices: jsonl, tensorboard, tr"
    ):
        compose(["tracker=wandbb"])
    with pytest.raises(ConfigError, match=r"tracker\.name=mine is not a choice"):
        compose(["tracker=wandb", "tracker.name=mine"])
    refuses(
        lambda: compose(["tracker=trackio", "+tracker.mode=offline"]),
        key="tracker.mode",
        value="offline",
    )


def test_settings_of_older_versions_keep_their_tracker():
    """They name it, without its class."""
    assert compose(["tracker.name=wandb"]).tracker == compose(["tracker=wandb"]).tracker
