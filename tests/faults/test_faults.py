"""Runs that go wrong from outside: a full disk, ranks that were started differently or killed,
secrets, odd names.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import launch as command_line
from common.checkpoint import checkpoint
from common.config import ConfigError, resolvers
from common.config.command import check_folder, check_secrets
from common.distributed import alarm
from common.distributed.workers import launch as launch_ranks
from common.system.files import write_text
from common.system.signals import RunStopped
from eggroll import train as eggroll
from tests.support import ROOT, SMALL
from tests.support.commands import as_ranks
from tests.support.letters import Letters
from tests.support.refusals import refuses
from tests.support.warm import side_by_side

pytestmark = pytest.mark.faults


def command(*arguments):
    return [sys.executable, str(ROOT / "launch.py"), "algo=eggroll", *SMALL, *arguments]


@pytest.mark.parametrize(
    "more",
    [[], pytest.param(["opt=[ddp]", "opt.ddp.ranks=2"], marks=pytest.mark.slow)],
    ids=["one rank", "two ranks"],
)
def test_a_disk_that_fills_up_leaves_the_last_checkpoint(launch, tmp_path, more):
    """A limit on the size of files stands for it: the log fits, weights do not."""
    out = tmp_path / "out"
    settings = [*more, f"hydra.run.dir={out}", "checkpoint.every=1"]
    launch("algo=eggroll", *SMALL, *settings, "algo.steps=2")
    before = checkpoint.latest(out / "checkpoints")
    goes_on = ["algo=eggroll", *SMALL, *settings, "algo.steps=4", "resume=auto"]
    done = launch(*goes_on, code=4, largest_file=40 << 10)
    assert "Earlier checkpoints stand. Make room, then go on with hydra.run.dir=" in done.stderr
    assert "Traceback" not in done.stderr
    after = checkpoint.latest(out / "checkpoints")
    assert (after.path, after.step) == (before.path, 2)
    launch(*goes_on)
    assert checkpoint.latest(out / "checkpoints").step == 4


def test_ranks_with_other_settings_are_named_before_they_start(warm, cache, tmp_path):
    out = f"hydra.run.dir={tmp_path}/out"
    ranks = as_ranks(
        tmp_path, cache, *(command(out, f"algo.sigma={sigma}")[2:] for sigma in (0.01, 0.02))
    )
    codes = warm.call(side_by_side, ranks)
    errors = [Path(rank["stderr"]).read_text() for rank in ranks]
    assert codes == [2, 2], errors
    assert (
        "error: algo.sigma is 0.01 on rank 0 and 0.02 on rank 1. Start all ranks with the same"
        " command" in errors[0]
    )


def test_a_finished_run_without_its_checkpoints_is_not_overwritten(launch, tmp_path):
    out = tmp_path / "out"
    launch("algo=eggroll", *SMALL, f"hydra.run.dir={out}", "algo.steps=1")
    shutil.rmtree(out / "checkpoints")
    before = (out / "result.json").read_bytes()
    for more in ("seed=7", "resume=auto"):
        done = launch("algo=eggroll", *SMALL, f"hydra.run.dir={out}", "algo.steps=1", more, code=2)
        assert "holds a run that has ended, without its checkpoints" in done.stderr
    assert (out / "result.json").read_bytes() == before


def test_a_file_that_is_written_takes_no_other_for_its_own(tmp_path):
    (tmp_path / "chess.tmp").write_text("mine")
    write_text(tmp_path / "chess.sbatch", "written")
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == {"chess.tmp": "mine", "chess.sbatch": "written"}


def test_the_start_of_a_process_is_the_same_whenever_one_looks():
    before = datetime.now()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        starts = [resolvers.find_start(process.pid) for _ in range(2)]
        process.communicate(b"\n")
    assert starts[0] == starts[1]
    # The time of the boot is known to a second.
    assert before - timedelta(seconds=1.1) <= starts[0] <= datetime.now() + timedelta(seconds=1.1)


def children(process):
    """The processes that a process has started, the oldest first."""
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in found]


def wait_for_third_step(process, out):
    until = time.monotonic() + 120
    while not (out / "checkpoints" / "step-00000003").exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.01)


class Killed(Letters):
    """Ends rank 1 after its first steps, as the system does where memory runs out."""

    def reward(self, example, completion):
        self.scored = getattr(self, "scored", 0) + 1
        if self.scored > 20 and dist.get_rank() == 1:  # 8 in each step
            os.kill(os.getpid(), signal.SIGKILL)
        return super().reward(example, completion)


def train_impatiently(run, context, task):
    """Train in each of two ranks, of which none waits for the last words of the other."""
    alarm.GRACE = 0.2
    return eggroll.train(run, context, task)


def test_a_rank_that_is_killed_stops_the_others_and_is_named(warm, cache, tmp_path, capfd):
    given = command_line.compose([*SMALL, "checkpoint.every=1", "opt=[ddp]"])
    out = tmp_path / "run"
    entry = f"{__name__}:train_impatiently"
    with pytest.raises(RunStopped) as raised:
        warm.call(launch_ranks, entry, given, out, Killed("smooth"), CLUTCH_CACHE=str(cache))
    said, printed = str(raised.value), capfd.readouterr()
    assert raised.value.code == 1, said
    assert (
        "rank 1 was killed from outside (SIGKILL; where memory runs out, the system does that)"
        in said
    )
    assert f"Its log: {out}/rank-1.log. Go on with hydra.run.dir={out} resume=auto." in said
    assert "Traceback" not in printed.out + printed.err


def return_much(run, context, task):
    """Return more than a pipe holds."""
    return bytes(2**20)


@pytest.mark.thorough
def test_a_rank_returns_more_than_a_pipe_holds(warm, tmp_path):
    given = command_line.compose([*SMALL, "opt=[ddp]"])
    entry = f"{__name__}:return_much"
    assert warm.call(launch_ranks, entry, given, tmp_path / "run") == bytes(2**20)


def stop_early(run, context, task):
    """Have rank 0 ask its command to stop, before there is a step."""
    if context.main:
        os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)


@pytest.mark.thorough
def test_early_stopped_ranks_are_not_reported_as_killed(warm, tmp_path):
    given = command_line.compose([*SMALL, "opt=[ddp]"])
    with pytest.raises(RunStopped) as raised:
        warm.call(launch_ranks, f"{__name__}:stop_early", given, tmp_path / "run")
    assert raised.value.code == 128 + signal.SIGTERM
    assert str(raised.value).startswith("ended by SIGTERM, without saving. Go on with hydra.run.d")


@pytest.mark.slow
def test_torchrun_restarts_a_run_whose_rank_was_killed(cache, tmp_path):
    out = tmp_path / "out"
    process = subprocess.Popen(
        [
            *(
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc_per_node=2",
                "--max-restarts=3",
            ),
            *command(f"hydra.run.dir={out}", "algo.steps=80", "checkpoint.every=1", "resume=auto")[
                1:
            ],
        ],
        env=os.environ | {"CLUTCH_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for_third_step(process, out)
    os.kill(children(process)[-1], signal.SIGKILL)
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 0, said
    assert "resuming after step" in (out / "run.log").read_text()
    assert checkpoint.latest(out / "checkpoints").step == 80


FAKE = "sk-0123456789abcdefFAKE"


@pytest.mark.parametrize(
    "override", [f"+task.api_key={FAKE}", f"+algo.hub.token={FAKE}", f"task.name=my-{FAKE}"]
)
def test_a_secret_in_an_override_is_written_nowhere(launch, tmp_path, override):
    done = launch(
        "algo=eggroll", override, "hydra.run.dir=mine", code=2, env={"SOME_API_KEY": FAKE}
    )
    assert "holds a secret, and settings are written to run.yaml" in done.stderr
    assert FAKE not in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("override", "place"),
    [
        ("+hydra.job.env_set={HF_TOKEN: abc}", "hydra.job.env_set.HF_TOKEN"),
        ("engine.settings={x: [{hf_token: abc}]}", "engine.settings.x[0].hf_token"),
        ("+task.api_key=[abc, def]", "task.api_key"),
        ("algo.optimizer.kwargs={a: {b: 'password', password: 'abc'}}", "kwargs.a.password"),
    ],
)
def test_a_secret_is_seen_at_any_depth(override, place):
    with pytest.raises(ConfigError, match=re.escape(place) + ".* holds a secret"):
        check_secrets(["seed=1,2", "task.pad_token=x", override])


def test_mistakes_leave_no_folder_behind(launch, tmp_path):
    for arguments, words in {
        "algo.sgima=1 hydra.run.dir=mine": "Did you mean 'sigma'?",
        "+algo.lrr=1 hydra.run.dir=deep/mine": "Did you mean 'lr'?",
        "algo.sampling.max_new_token=9": "Did you mean 'max_new_tokens'?",  # not a secret
        "algo.members=-1": "algo.members=-1 is too small.",
        "algo.members=-1 hydra.run.dir=deep/mine": "algo.members=-1 is too small.",
        "task=custom task.path=a.csv task.prompt_field=a task.answer_field=b": (
            "task.path='a.csv' does not exist"
        ),
        "-m seed=1,2 hydra.run.dir=mine": (
            "hydra.run.dir=mine has no effect with -m. Use hydra.sweep.dir."
        ),
        "hydra.sweep.dir=mine": "hydra.sweep.dir=mine has no effect without -m. Use hydra.run.dir.",
        "hydra.run.dir=": "hydra.run.dir= is empty. Name a folder",
        "hydra.run.dir=.": "hydra.run.dir=. is the folder that the command runs in, or above it.",
        "hydra.run.dir=..": "hydra.run.dir=.. is the folder that the command runs in, or above it.",
        "@x=1": "@x=1 has no name before @. Give KEY=VALUE.",
        "opt=é": "opt=é cannot be read as KEY=VALUE. A value with letters or signs",
        "task=é": "task=é cannot be read as KEY=VALUE. A value with letters or signs",
        "scoring.kind=threads scoring.workers=100000": "scoring.workers=100000 is too large.",
        "hydra.output_subdir=../x": "hydra.output_subdir=../x has no effect",
        "-m seed=1,2 hydra.sweep.subdir=../../x": "is not below hydra.sweep.dir",
        "-m seed=1,2 hydra.sweep.subdir=/tmp/x": "is not below hydra.sweep.dir",
        "-m seed=1,2 hydra.sweep.subdir=same": "gives all jobs one folder. Put what tells them",
    }.items():
        done = launch(*arguments.split(), code=2)
        assert words in done.stderr
        assert list(tmp_path.iterdir()) == [], arguments
    (tmp_path / "outputs").mkdir()
    launch("algo.members=-1", code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"], "it was there before"


def test_a_folder_of_another_configuration_is_not_looked_at(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").touch()  # in the way of a run folder
    with pytest.raises(ConfigError, match="cannot be made"):
        check_folder(["algo=grpo"])
    check_folder(["--config-path", "conf"])
    check_folder(["--config-path=conf"])


def test_a_run_goes_on_from_within_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is the folder that the command runs in"):
        check_folder([f"hydra.run.dir={tmp_path}", "resume=auto"])
    (tmp_path / "run.yaml").touch()
    check_folder([f"hydra.run.dir={tmp_path}", "resume=auto"])


class Elsewhere(Letters):
    name = "../../elsewhere"


def test_names_do_not_lead_out_of_the_output_folder(in_cache, tmp_path):
    refuses(lambda: command_line.compose(["task=../../x"]), key="task", value="../../x")
    run = command_line.compose([*SMALL, "algo.steps=1"])
    result = command_line.train(run, tmp_path / "deep" / "run", Elsewhere("smooth"))
    assert result.task == "../../elsewhere"
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["run"]
