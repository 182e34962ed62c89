"""python -m common.status: the states of a run, damaged folders, whole runs."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import yaml

from common.config import ConfigError
from common.report import advice
from common.system import lock
from plugins.status import command
from plugins.status.reading import CODES, STATES, TAIL, read_status
from tests.support import ROOT, SMALL_GRPO

COUNTS = {"steps": 4, "seconds": 8.0, "generated_tokens": 400, "reward_evaluations": 40}
RESULT = {
    **{"algo": "grpo", "task": "t", "model": "m", "metric": "exact", "before": 10.0, "after": 60.0},
    **COUNTS,
    "intervals": {
        "exact": {"before": None, "after": [50, 70], "change": [40, 60], "p_value": 0.0001}
    },
    "verdict": "it has learnt: x",
    "outcome": "learnt",
    "advice": [{"code": "forgetting", "text": "x", "settings": {"algo.lr": 0.1}}],
    "next_command": "python launch.py algo=grpo",
}


def make(folder: Path, steps: int = 2, **files: object) -> Path:
    """A run folder with events of so many steps, and further files as JSON."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / "completions").mkdir()
    (folder / ".hydra" / "overrides.yaml").write_text("[algo=grpo, hydra.run.dir=x, resume=auto]")
    config = {"algo": {"name": "grpo", "steps": 4}, "task": {"_target_": "x"}, "budget": {}}
    (folder / "run.yaml").write_text(yaml.dump({"config": config}))
    events = [{"step": n, "seconds": 2.0, "generated_tokens": 100 * n} for n in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    held = {"step": 0, "metric": 25.0, "metric_name": "exact", "metrics": {"exact": 25.0}}
    (folder / "evaluations.jsonl").write_text(json.dumps(held) + "\n")
    rows = [{"scores": {"exact": 100.0 * (n % 4 == 0)}} for n in range(64)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "completions" / "before.jsonl").write_text(text)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_a_run_that_makes_steps(tmp_path):
    with lock.locked(make(tmp_path / "run")):
        found = read_status(tmp_path / "run")
    assert (found.state, found.step, found.steps, found.share) == ("running", 2, 4, 0.5)
    assert found.seconds_left == 4
    assert found.measure["value"] == 25
    low, high = found.measure["interval"]
    assert 10 < low < 25 < high < 40
    assert (found.exit_code, found.next_command, found.problems) == (None, None, [])


@pytest.mark.parametrize(
    ("budget", "share", "left"),
    [({"tokens": 250}, 0.8, 1), ({"seconds": 5}, 0.8, 1), ({"tokens": 10**6}, 0.5, 4)],
)
def test_progress_is_of_steps_or_budget(tmp_path, budget, share, left):
    path = make(tmp_path / "run") / "run.yaml"
    saved = yaml.safe_load(path.read_text())
    saved["config"]["budget"] = budget
    path.write_text(yaml.dump(saved))
    with lock.locked(path.parent):
        found = read_status(path.parent)
    assert (found.share, found.seconds_left) == (share, pytest.approx(left))


def test_a_run_before_its_first_step_waits(tmp_path):
    with lock.locked(make(tmp_path / "run", steps=0)):
        assert read_status(tmp_path / "run").state == "waiting"
    (empty := tmp_path / "empty").mkdir()
    with lock.held(empty / ".lock-command"):
        assert read_status(empty).state == "waiting"


@pytest.mark.parametrize(
    ("code", "state", "meaning"),
    [(75, "stopped", "resume=auto"), (3, "failed", "NaN"), (1, "failed", "killed")],
)
def test_how_it_ended_is_known(tmp_path, code, state, meaning):
    failed = {"code": code, "error": "because"}
    found = read_status(make(tmp_path / "a run", failed=failed))
    assert (found.state, found.exit_code, found.error) == (state, code, "because")
    assert meaning in found.exit_meaning
    assert re.fullmatch(r"python launch\.py algo=grpo .*a run.* resume=auto", found.next_command)


def test_a_killed_run_is_stale(tmp_path):
    folder = make(tmp_path / "run")
    (folder / ".lock").write_text('{"process": 1}')
    found = read_status(folder)
    assert (found.state, found.exit_code) == ("stale", None)
    assert "resume=auto" in found.next_command


def test_a_run_that_hangs_is_stale(tmp_path):
    folder = make(tmp_path / "run")
    with lock.locked(folder):
        assert read_status(folder, time.time() + 500).state == "running"
        assert read_status(folder, time.time() + 700).state == "stale"
        (folder / "metrics.jsonl").write_text('{"step": 1, "seconds": 1000}\n')
        assert read_status(folder, time.time() + 700).state == "running", "its steps are long"


def test_a_run_with_a_result(tmp_path):
    folder = make(tmp_path / "run", steps=4, result=RESULT, failed={"code": 2, "error": "later"})
    (folder / "adapter").mkdir()
    found = read_status(folder)
    assert (found.state, found.exit_code, found.share) == ("ended", 0, 1.0)
    assert found.measure["change_interval"] == [40, 60]
    assert (found.outcome, found.advice) == ("learnt", RESULT["advice"])
    assert found.exported == str(folder / "adapter")
    with lock.locked(folder):
        assert read_status(folder).state == "running", "it goes on"


def test_a_run_in_stages_counts_iterations(tmp_path):
    folder = make(tmp_path / "run")
    text = {"config": {"algo": {"name": "rft", "iterations": 3}, "task": {"_target_": "x"}}}
    (folder / "run.yaml").write_text(yaml.dump(text))
    (folder / "metrics.jsonl").write_text('{"step": 9, "stage": "finetune", "iteration": 2}\n')
    found = read_status(folder)
    assert (found.iteration, found.iterations, found.steps, found.share) == (2, 3, None, None)


def test_advice_comes_while_it_runs(tmp_path):
    folder = make(tmp_path / "run")
    events = [{"step": n, "seconds": 1.0, "kl": 2.0, "reward": 0.1} for n in range(1, 30)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    assert [one["code"] for one in read_status(folder).advice] == ["kl"]
    assert "KL to the initial model" in command.describe(read_status(folder))


def test_a_long_log_is_read_at_its_end(tmp_path):
    folder = make(tmp_path / "run")
    line = json.dumps({"step": 7, "text": "x" * 1000}) + "\n"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line * (3 * TAIL // len(line)))
        file.write('{"step": 8}\n{"step": 9')
    assert read_status(folder).step == 8


DAMAGES = {
    "empty": b"",
    "binary": b"\xff\xfe\x00",
    "text": b"nonsense: [",
    "deep": b"[" * 5000,
    "list": b"[1]\n",
    "null": b"null\n",
    "strings": b'{"step": "1", "config": 3, "code": "x"}\n',
    "nan": b'{"step": 1, "seconds": NaN, "metric": NaN, "metrics": {}, "code": NaN}\n',
    "odd": b'{"step": 1, "metric": 1, "metrics": {}, "config": {"algo": {"name": "a", "steps":'
    b' "x"}, "task": {}, "budget": {"tokens": []}}}\n',
    "result": json.dumps(RESULT | {"intervals": {"exact": {"after": "x", "change": [1]}}}).encode(),
}
FILES = ["run.yaml", "result.json", "failed.json", "metrics.jsonl", "evaluations.jsonl"]
FILES += ["completions/before.jsonl", ".hydra/overrides.yaml"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_end_nothing(tmp_path, name, damage):
    for result in ({}, {"result": RESULT}):
        folder = make(tmp_path / f"run{len(result)}", **result)
        (folder / name).write_bytes(DAMAGES[damage])
        found = read_status(folder)
        assert found.state in STATES
        assert json.loads(json.dumps(found.content(), allow_nan=False))
        assert command.describe(found).startswith(f"{folder}: {found.state}")


@pytest.mark.parametrize("name", FILES)
def test_a_folder_or_a_pipe_in_place_of_a_file(tmp_path, name):
    for number, put in enumerate((Path.mkdir, lambda path: os.mkfifo(path))):
        folder = make(tmp_path / str(number))
        (folder / name).unlink(missing_ok=True)
        put(folder / name)
        assert read_status(folder).state in STATES


def test_what_is_no_run_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ConfigError, match="is no run folder"):
            read_status(path)
    folder = make(tmp_path / "0")
    with pytest.raises(ConfigError, match=f"such as {folder}"):
        read_status(tmp_path)  # the folder of a sweep
    (folder / "model").mkdir()
    with pytest.raises(ConfigError, match=f"the run {folder}: give that"):
        read_status(folder / "model")


def test_the_page_has_all_codes_and_states():
    page = (ROOT / "plugins/status/README.md").read_text()
    source = (ROOT / "common/report/advice.py").read_text()
    names = re.findall(r'Advice\(\s*"([a-z ]+)"', source)
    names += ["lost gain", "fallen", "forgetting"]
    assert len(set(names)) > 20
    assert {advice.Advice(name, "").code for name in names} == set(
        re.findall(r"`([a-z-]+)`", page.partition("A code keeps")[2].partition("[The quick")[0])
    )
    assert set(STATES) == set(re.findall(r"(?m)^\| (\w+) \|", page)) - {"state", "field"}


def test_exit_codes_are_those_of_the_readme():
    table = (ROOT / "README.md").read_text().partition("| exit code |")[2].partition("\n\n")[0]
    listed = {
        int(code) for cell in re.findall(r"(?m)^\| ([\d, ]+) \|", table) for code in cell.split(",")
    }
    assert listed == set(CODES)


@pytest.mark.run
def test_a_whole_run(launch, begin, tmp_path):
    def ask() -> dict:
        done = launch(str(tmp_path / "run"), "--json", module="common.status")
        return json.loads(done.stdout)

    arguments = [*SMALL_GRPO, f"hydra.run.dir={tmp_path}/run", "resume=auto"]
    process = begin(*arguments, "algo.steps=1000")
    log = tmp_path / "run" / "metrics.jsonl"
    while not log.exists() or not log.stat().st_size:  # the first step is done
        assert process.poll() is None, process.said()
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 75
    found = ask()
    assert (found["state"], found["exit_code"]) == ("stopped", 75)
    launch(*arguments, "algo.steps=1000", "budget.tokens=1")
    found = ask()
    assert (found["state"], found["exit_code"]) == ("ended", 0)
    assert found["outcome"] in ("learnt", "worse", "not-learnt")
    assert Path(found["exported"]).is_dir()
    assert not (tmp_path / "run" / "failed.json").exists()
