"""metrics.jsonl, and the trackers that read the same events."""

import fcntl
import json
import os
import pty
import re
import select
import struct
import termios

import pytest

from common.config import ConfigError
from common.report.samples import Samples, read_steps
from common.report.tracker import Tracker
from common.system.events import numeric_values
from launch import compose
from tests.support import SMALL, events
from tests.support.refusals import refuses
from tests.support.short_runs import RUN, run_here


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


def test_stages_have_own_curves_and_shared_measures():
    event = {
        "step": 7,
        "stage": "evaluate",
        "iteration": 2,
        "metric": 5.0,
        "metrics": {"a": 1.0},
        "seconds": {"x": 2.0},
    }
    assert numeric_values(event) == {
        "iteration": 2,
        "metric": 5.0,
        "metrics/a": 1.0,
        "evaluate/seconds/x": 2.0,
    }


def test_a_repeated_evaluation_is_logged_once(tmp_path):
    """As RFT does where a command asks for further measures of a run that has ended."""
    tracker = Tracker(compose(["algo=rft"]), tmp_path, None, 0, {})
    for step, (iteration, value) in enumerate([(0, 5.0), (1, 9.0), (0, 6.0), (1, 8.0)], start=1):
        event = {"stage": "evaluate", "iteration": iteration, "metric": value, "metric_name": "a"}
        tracker.write({"step": 10 * step, **event, "metrics": {"a": value}})
    tracker.close()
    lines = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    shown = [(line["step"], line["iteration"], line["metric"]) for line in lines]
    assert shown == [(10, 0, 6.0), (20, 1, 8.0)]


def test_samples_are_thinned_by_step(tmp_path):
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


def test_completions_are_kept_up_to_the_checkpoint(in_cache, tmp_path):
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


def test_a_secret_is_no_setting(monkeypatch):
    with pytest.raises(ConfigError, match=r"task\.api_key holds a secret.*os\.environ"):
        compose(["+task.api_key=abc"])
    monkeypatch.setenv("SOME_SERVICE_TOKEN", "a-long-secret")
    with pytest.raises(ConfigError, match=r"tracker\.project holds a secret"):
        compose(["+tracker.project=${oc.env:SOME_SERVICE_TOKEN}"])
    assert compose(["algo.sampling.max_new_tokens=5"]).algo.sampling.max_new_tokens == 5


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


class Sink:
    """A tracker of a user's."""

    id = "mine"

    def __init__(self, run, out_dir, resumed, state):
        self.path, self.given = out_dir / "mine.txt", state

    def log(self, values, step):
        with self.path.open("a") as file:
            file.write(f"{step} {sorted(values)}\n")

    def table(self, name, step, rows):
        self.log({name: rows}, step)

    def summary(self, values):
        self.log(values, -1)

    def close(self, code):
        self.log({}, code)


OWN = [f"+tracker._target_={__name__}.Sink", "tracker.name=own", "+tracker.project=mine"]


def test_a_tracker_of_ones_own(in_cache, tmp_path):
    run_here(tmp_path, *OWN, "algo.steps=2")
    lines = (tmp_path / "mine.txt").read_text().splitlines()
    steps = [int(line.split()[0]) for line in lines]
    assert {0, 1, 2, -1} == set(steps)
    assert any(line.startswith("1 ") and "'reward'" in line for line in lines)
    assert lines[-1] == "0 []", "closed, by a run that has ended well"
    tracker = Tracker(compose([*RUN, *OWN]), tmp_path, 1, 0, {"own": "mine", "wandb": "theirs"})
    assert tracker.sink.given == {"id": "mine"}
    assert tracker.state() == {"own": "mine", "wandb": "theirs"}
    tracker.close()


def test_a_tracker_that_cannot_be_found_is_named(tmp_path):
    run = compose([*RUN, "+tracker._target_=no_such.Sink", "tracker.name=own"])
    refuses(lambda: Tracker(run, tmp_path, 1, 0, {}), key="tracker._target_", value="no_such.Sink")
    with pytest.raises(ConfigError, match=r"tracker\.name=own is not a choice"):
        compose([*RUN, "tracker.name=own"])
