"""metrics.jsonl, and the trackers that read the same events."""

import fcntl
import json
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios

import pytest
import yaml

from common.checkpoint import checkpoint
from common.config import ConfigError
from common.report import sinks
from common.report.events import numbers
from common.report.samples import Samples, read_steps
from common.report.tracker import Tracker
from common.system.signals import EXIT_NUMBERS
from common.tasks.order import ExampleOrder
from launch import compose, train
from tests.support import CONF, ROOT, SMALL, SMALL_GRPO, events
from tests.support.letters import Letters
from tests.support.wandb_file import records

RUN = [
    *SMALL,
    "algo.steps=4",
    "evaluate.every=1",
    "algo.sigma=0.1",
    "algo.lr=0.5",
    "algo.sampling.temperature=1.0",
]


def run_here(out, *overrides):
    return train(compose([*RUN, *overrides]), out, Letters("smooth"))


def test_resume_cuts_later_events_and_a_torn_line(in_cache, tmp_path):
    """As a killed run leaves it: events of steps that no checkpoint holds, and half a line."""
    run_here(tmp_path, "algo.steps=2")
    path = tmp_path / "metrics.jsonl"
    first = path.read_text()
    lost = [{"step": step, "reward": -1.0} for step in (3, 4)]
    path.write_text(
        first + "".join(json.dumps(event) + "\n" for event in lost) + '{"step": 5, "rewa'
    )
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


def test_stages_are_curves_of_their_own_and_shared_measures_are_not():
    event = {
        "step": 7,
        "stage": "evaluate",
        "iteration": 2,
        "metric": 5.0,
        "metrics": {"a": 1.0},
        "seconds": {"x": 2.0},
    }
    assert numbers(event) == {
        "iteration": 2,
        "metric": 5.0,
        "metrics/a": 1.0,
        "evaluate/seconds/x": 2.0,
    }


def test_an_iteration_that_is_measured_again_stands_once_where_it_was(tmp_path):
    """As RFT does where a command asks for further measures of a run that has ended."""
    tracker = Tracker(compose(["algo=rft"]), tmp_path, None, 0, {})
    for step, (iteration, value) in enumerate([(0, 5.0), (1, 9.0), (0, 6.0), (1, 8.0)], start=1):
        event = {"stage": "evaluate", "iteration": iteration, "metric": value, "metric_name": "a"}
        tracker.write({"step": 10 * step, **event, "metrics": {"a": value}})
    tracker.close()
    lines = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    shown = [(line["step"], line["iteration"], line["metric"]) for line in lines]
    assert shown == [(10, 0, 6.0), (20, 1, 8.0)]


def test_samples_are_thinned_by_their_place_among_the_steps_that_have_any(tmp_path):
    samples = Samples(tmp_path, everything=False, resumed=0)
    row = {"id": 0, "group": 0, "prompt": "a", "answer": "b", "completion": "c", "reward": 1.0}
    (tmp_path / "completions").mkdir()
    for place in range(1, 41):  # a chunk of samples in every thirty events
        samples.add(30 * place, [row], place)
    lines = read_steps(tmp_path)
    assert [line["step"] for line in lines] == [30 * place for place in range(1, 41)]
    for place in range(41, 514):
        samples.add(30 * place, [row], place)
    assert [line["step"] for line in read_steps(tmp_path)] == [*range(30, 30 * 514, 60)]


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


def test_completions_of_each_evaluation_are_kept_and_those_after_the_checkpoint_cut(
    in_cache, tmp_path
):
    run_here(tmp_path, "algo.steps=2")
    (tmp_path / "completions" / "step-00000003.jsonl").write_text(
        "{}\n"
    )  # of a step that no checkpoint holds
    with (tmp_path / "evaluations.jsonl").open("a") as file:
        file.write('{"step": 3, "metric": -1, "metric_name": "exact", "metrics": {"exact": -1}}\n')
    run_here(tmp_path, "resume=auto", "evaluate.every=2")
    kept = {
        path.stem: path.read_text().splitlines() for path in (tmp_path / "completions").iterdir()
    }
    assert len(kept.pop("training")) == 4, "a line for each step"
    assert kept.keys() == {"before", "after", "step-00000001"}
    assert {len(rows) for rows in kept.values()} == {8}
    names = {"id", "prompt", "answer", "completion", "scores"}
    assert json.loads(kept["after"][0]).keys() == names
    steps = [
        json.loads(line)["step"]
        for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()
    ]
    assert steps == [0, 1, 2, 4]


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
def test_wandb_has_the_end_of_a_run_that_was_killed_after_its_last_checkpoint(launch, tmp_path):
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
        assert {name: shown[name] for name in numbers(event)} == pytest.approx(numbers(event))
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
def test_wandb_jobs_of_a_sweep_are_a_group_and_ranks_are_one_run(launch, tmp_path):
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


def test_a_secret_is_no_setting(monkeypatch):
    with pytest.raises(ConfigError, match=r"task\.api_key holds a secret.*os\.environ"):
        compose(["+task.api_key=abc"])
    monkeypatch.setenv("SOME_SERVICE_TOKEN", "a-long-secret")
    with pytest.raises(ConfigError, match=r"tracker\.project holds a secret"):
        compose(["tracker=wandb", "tracker.project=${oc.env:SOME_SERVICE_TOKEN}"])
    assert compose(["algo.sampling.max_new_tokens=5"]).algo.sampling.max_new_tokens == 5


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
    "path", sorted((ROOT / "sweeps").glob("*.yaml")), ids=lambda path: path.stem
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


@pytest.mark.parametrize("columns", [80, pytest.param(160, marks=pytest.mark.thorough)])
def test_a_terminal_shows_a_live_line(in_cache, warm, tmp_path, columns):
    """On a real terminal: it is drawn in place, is never wider than the terminal, and other lines
    stay whole.
    """
    mine, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {
        key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")
    } | {"TERM": "xterm-256color"}
    arguments = [*SMALL, "evaluate.every=2", f"hydra.run.dir={tmp_path}/run"]
    arguments.append("algo.stop_at.drift=1e9")  # so that each step measures it
    terminal = dict.fromkeys(("stdin", "stdout", "stderr"), os.ttyname(its))
    process = warm.start(tmp_path, environment, tmp_path, arguments=arguments, **terminal)
    written = b""
    while process.poll() is None or select.select([mine], [], [], 0)[0]:
        if select.select([mine], [], [], 0.1)[0]:
            written += os.read(mine, 65536)
    assert process.returncode == 0, written
    os.close(mine)
    os.close(its)
    plain = re.sub(r"\x1b\[\??[0-9;]*[A-Za-z]", "", written.decode())
    lines = [line for line in re.split(r"[\r\n]+", plain) if line]
    live = [line for line in lines if line.startswith(("step ", "evaluating"))]
    assert max(map(len, live)) < columns
    steps = [line for line in lines if line.startswith("step ")]
    assert steps[0].startswith("step 0/4 |")
    last = steps[-1]
    for text in ("step 4/4 |", "left, reward ", ", bleu 0.0 @2, ", " tokens/s"):
        assert text in last
    assert ("drift" in last) == (columns == 160), "what has no room is left out whole"
    assert any(line.startswith("evaluating: completion ") for line in lines)
    assert any(re.fullmatch(r"before: held-out bleu \d+\.\d\d", line) for line in lines)
    assert any(line.startswith("  report ") for line in lines)
