"""Batch scripts; and jobs on a real Slurm, which skip where none with two nodes is up (.ci/run
starts one).
"""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from safetensors.torch import load_file

import launch as command_line
from common.config import ConfigError
from common.config.resolvers import started
from launch import compose, train
from plugins.slurm import batch as slurm
from tests.support import ROOT, SMALL, events
from tests.support.refusals import COLUMNS, refuses

CLASSIFY = [
    "algo.epochs=1",
    "task.rows=300",
    "task.test_rows=60",
    "algo.model.size=32",
    "algo.model.feedforward=64",
]
CLASSIFY += ["algo.tokenizer.vocabulary=600"]
TWO_NODES = ["slurm.nodes=2", "slurm.gpus_per_node=0", "slurm.cpus_per_rank=1"]
GRPO = [setting for setting in SMALL if not setting.startswith(("algo.members", "algo.rows"))]
GRPO += ["task=translate", "algo.samples_per_prompt=4", "algo.train_rows=8"]


# --- the script


def test_a_script_says_what_the_command_says(tmp_path, launch):
    settings = [
        "algo=grpo",
        "task=chess",
        "hardware=a100_40g",
        "opt=[amp,ddp]",
        "slurm.nodes=2",
        "slurm.gpus_per_node=8",
    ]
    more = ["slurm.partition=gpu", "slurm.options.qos=long", 'slurm.setup=["module load cuda"]']
    done = launch("slurm.script=jobs/chess.sbatch", *settings, *more)
    assert done.stdout == "jobs/chess.sbatch is written. Read it, then: sbatch jobs/chess.sbatch\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["jobs"], "nothing else is left"
    lines = (tmp_path / "jobs/chess.sbatch").read_text().splitlines()
    for option in (
        "nodes=2",
        "ntasks-per-node=8",
        "gpus-per-node=8",
        "partition=gpu",
        "qos=long",
        "signal=USR1@120",
    ):
        assert f"#SBATCH --{option}" in lines
    assert "module load cuda" in lines
    assert f"cd {tmp_path}" in lines
    command = next(
        line
        for line in lines
        if "launch.py" in line and "srun" not in line and not line.startswith("#")
    )
    assert "algo=grpo task=chess hardware=a100_40g 'opt=[amp,ddp]' resume=auto " in command
    assert '"hydra.run.dir=outputs/grpo_chess_$SLURM_JOB_ID" && code=0' in command
    assert "slurm." not in command
    launch("slurm.script=jobs/chess.sbatch", *settings)  # its own may be written again
    assert subprocess.run(["bash", "-n", tmp_path / "jobs/chess.sbatch"]).returncode == 0


def test_a_folder_and_a_resume_of_ones_own_stay():
    run = compose(["slurm.script=x", "hardware=cpu"])
    text = slurm.script(run, ["hydra.run.dir=/disk/mine", "resume=outputs/old", "task.path=a b"])
    assert "hydra.run.dir=/disk/mine resume=outputs/old 'task.path=a b' && code" in text
    assert "gpus-per-node" not in text
    assert "--ntasks-per-node=1\n" in text


def test_values_with_spaces_stay_one_shell_word():
    given = ["slurm.script=x", "hardware=cpu", "slurm.options.comment='two words'"]
    run = compose([*given, "slurm.setup=['source env.sh']"])
    lines = slurm.script(run, []).splitlines()
    assert "#SBATCH --comment='two words'" in lines
    strict = [lines.index(text) for text in ("set -eo pipefail", "source env.sh", "set -u")]
    assert strict == sorted(strict)


def test_options_without_a_value():
    run = compose(
        [
            "slurm.script=x",
            "hardware=cpu",
            "slurm.options.exclusive=true",
            "slurm.options.contiguous=false",
        ]
    )
    lines = slurm.script(run, []).splitlines()
    assert "#SBATCH --exclusive" in lines
    assert not any("contiguous" in line for line in lines)


def test_options_of_srun_stand_before_the_command():
    given = ["slurm.script=x", "hardware=cpu", "slurm.srun_options.mpi=pmix"]
    more = ["slurm.srun_options.label=true", "slurm.srun_options.overlap=false"]
    run = compose([*given, *more, "slurm.srun_options.comment='two words'"])
    text = slurm.script(run, ["slurm.srun_options.mpi=pmix", "seed=1"])
    (line,) = [line for line in text.splitlines() if line.startswith("srun ")]
    words = shlex.split(line.removesuffix("\\"))
    assert {"--mpi=pmix", "--label", "--comment=two words", "--kill-on-bad-exit=0"} <= set(words)
    assert not any("overlap" in word for word in words)
    assert "srun_options" not in text, "no run has that setting"


@pytest.mark.parametrize("name", ["Zahlwörter", "sums, easy", "sums (easy)", 'a"$(b)`c`', "a/b"])
def test_task_names_make_valid_folder_names(name):
    run = compose(["slurm.script=x", "hardware=cpu"])
    text = slurm.script(replace(run, task={**run.task, "name": name}), [])
    word = next(word for word in shlex.split(text) if word.startswith("hydra.run.dir="))
    override = OverridesParser.create().parse_override(word.replace("$SLURM_JOB_ID", "7"))
    assert not override.is_sweep_override()
    assert re.fullmatch(r"outputs/eggroll_[\w.-]+_7", str(override.value()), re.ASCII)


def test_the_script_of_a_run_that_starts_its_own_ranks():
    asked = ["algo=scaling", "slurm.script=x", "hardware=a100_40g", "algo.ranks=[1,2,4]"]
    run = compose([*asked, "slurm.gpus_per_node=4", "slurm.cpus_per_rank=16"])
    text = slurm.script(run, ["algo=scaling"])
    assert "resume=" not in text
    assert "#SBATCH --ntasks-per-node=1\n" in text
    assert "#SBATCH --gpus-per-node=4\n" in text
    two = compose([*asked, "slurm.gpus_per_node=4", "slurm.ranks_per_node=4"])
    refuses(lambda: slurm.script(two, []), key="algo", value="scaling")


MISTAKES = [
    ("slurm.nodes=2", "slurm.nodes", 2, "slurm.script"),
    ("slurm.script=a/b -m seed=1,2", "slurm.script", "-m", None),
    ("slurm.script=own.sh", "slurm.script", "own.sh", "Choose another name"),
    ("slurm.script=own.sh/x", "slurm.script", "own.sh/x", None),
    (
        "slurm.script=x slurm.gpus_per_node=1 slurm.ranks_per_node=2",
        ["slurm.gpus_per_node", "slurm.ranks_per_node"],
        2,
        None,
    ),
    (
        "slurm.script=x slurm.gpus_per_node=4 opt=[ddp] opt.ddp.ranks=4",
        "opt.ddp.ranks",
        4,
        "Leave it out",
    ),
    ("slurm.script=x slurm.time=2h", "slurm.time", "2h", "hours:minutes:seconds"),
    ("slurm.script=x slurm.time=00:02:00", ["slurm.warn_seconds", "slurm.time"], 120, None),
    ("slurm.script=x slurm.options.nodes=4", "slurm.options.nodes", None, "Use slurm.nodes"),
    (
        "slurm.script=x slurm.srun_options.ntasks=4",
        "slurm.srun_options.ntasks",
        None,
        "Use slurm.ranks_per_node",
    ),
    ("slurm.script=x slurm.srun_options.wait=0", "slurm.srun_options.wait", None, "Leave it out"),
    (
        ["slurm.script=x", "slurm.srun_options={--mpi: pmix}"],
        "slurm.srun_options",
        ["--mpi", "pmix"],
        "its long name without the dashes",
    ),
    (
        ["slurm.script=x", "slurm.options={q: long}"],
        "slurm.options.q",
        "long",
        "its long name without the dashes",
    ),
    ("slurm.srun_options.mpi=pmix", "slurm.srun_options.mpi", "pmix", "slurm.script"),
    ("slurm.script=x slurm.srun_options=[mpi]", "slurm.srun_options", "[mpi]", "Use"),
    ("slurm.script=x resume=no", "resume", "no", "slurm.script"),
    ("slurm.script=x hydra.run.dir=a/${now:%S}", "hydra.run.dir", None, "Name one"),
    (
        "slurm.script=x slurm.nodes=2 slurm.gpus_per_node=2 opt=[fsdp] opt.fsdp.ranks_per_group=3",
        "opt.fsdp.ranks_per_group",
        3,
        "4 ranks",
    ),
    ("slurm.script=x algo.sgima=1", "algo.sgima", 1, "'sigma'"),
]


@pytest.mark.parametrize(COLUMNS, MISTAKES)
def test_scripts_that_are_refused(monkeypatch, tmp_path, overrides, key, value, try_next):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.sh").write_text("#!/bin/bash\nrm -rf precious\n")
    asked = "slurm.script=" in str(overrides)
    start = command_line.submit if asked else compose
    refuses(overrides, key=key, value=value, try_next=try_next, start=start)
    assert (tmp_path / "own.sh").read_text() == "#!/bin/bash\nrm -rf precious\n"


def test_ranks_of_srun(monkeypatch):
    for key in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        monkeypatch.delenv(key, raising=False)
    given = {
        "STEP_NUM_TASKS": "5",
        "STEP_NUM_NODES": "2",
        "PROCID": "4",
        "LOCALID": "0",
        "JOB_ID": "20017",
    }
    for key, value in (given | {"STEP_TASKS_PER_NODE": "4,1"}).items():
        monkeypatch.setenv(f"SLURM_{key}", value)
    before = dict(os.environ)
    with pytest.raises(
        ConfigError,
        match="srun started 5 ranks on 2 nodes, and MASTER_ADDR does not say where they meet",
    ):
        slurm.adopt()
    monkeypatch.setenv("MASTER_ADDR", "n1")
    try:
        slurm.adopt()
        found = {
            key: os.environ[key]
            for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
        }
    finally:
        os.environ.clear()
        os.environ.update(before)
    expected = {
        "RANK": "4",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_PORT": "20017",
    }
    assert found == expected


# --- on a real Slurm


@pytest.fixture(scope="session")
def slurm_nodes(slurm) -> None:
    """Skip where no Slurm with two idle nodes answers."""
    if slurm < 2:
        pytest.skip("no Slurm with two idle nodes is up")


def submit(settings: list[str], out: Path, cache: Path) -> str:
    """Write a script for two nodes as a user would and submit it; returns the number of the job."""
    path = out.parent / f"{out.name}.sbatch"
    words = [
        f"slurm.script={path}",
        *TWO_NODES,
        f"slurm.options.output={out}.out",
        f"hydra.run.dir={out}",
    ]
    words += [f'slurm.setup=["export CLUTCH_CACHE={cache}"]']
    command = [sys.executable, str(ROOT / "launch.py"), *words, "hardware=cpu", *settings]
    subprocess.run(command, cwd=out.parent, check=True, capture_output=True, timeout=60)
    done = subprocess.run(
        ["sbatch", "--parsable", path], check=True, capture_output=True, text=True, timeout=20
    )
    return done.stdout.strip()


def until(condition: Callable[[], bool], out: Path, what: str, seconds: float = 150) -> None:
    """Wait for `condition`; fail with what the job printed."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            printed = Path(f"{out}.out")
            queue = subprocess.run(["squeue"], capture_output=True, text=True).stdout
            pytest.fail(f"{what}\n{queue}\n{printed.read_text() if printed.exists() else ''}")
        time.sleep(0.2)


def released(job: str) -> bool:
    """Let a job that is back in the queue start soon: Slurm would wait two minutes, so that the
    nodes have forgotten it.
    """
    state = subprocess.run(
        ["squeue", "-h", "-j", job, "-o", "%T"], capture_output=True, text=True
    ).stdout.strip()
    if state != "PENDING":
        return False
    time.sleep(5)
    return not subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"]).returncode


def steps(out: Path) -> int:
    return (
        len((out / "metrics.jsonl").read_text().splitlines())
        if (out / "metrics.jsonl").exists()
        else 0
    )


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("algorithm", "how"),
    [
        (
            ["algo=grpo", *GRPO],
            "scancel --signal=USR1 {job}",
        ),  # as Slurm itself warns before the time is up
        (["algo=eggroll", *SMALL], "scontrol requeue {job}"),
    ],
)
def test_a_preempted_job_ends_where_an_unbroken_one_does(
    slurm_nodes, cache, tmp_path, launch, algorithm, how
):
    settings = [*algorithm, "algo.steps=40", "checkpoint.every=5"]
    launch(
        *settings,
        "opt=[ddp]",
        "opt.ddp.ranks=2",
        f"hydra.run.dir={tmp_path}/unbroken",
        env={"OMP_NUM_THREADS": "1"},
    )
    out = tmp_path / "out"
    job = submit(settings, out, cache)
    until(lambda: steps(out) >= 8, out, "the job takes no steps")
    subprocess.run(how.format(job=job).split(), check=True, timeout=20)
    until(lambda: released(job), out, "the job is not back in the queue")
    until(lambda: (out / "result.json").exists(), out, "the job did not go on")
    result = json.loads((out / "result.json").read_text())
    assert result["world_size"] == 2
    assert [event["step"] for event in events(out) if event["step"]] == list(range(1, 41)), (
        "no step is missing or doubled"
    )
    log = (out / "run.log").read_text()
    assert "resuming after step" in log, "one folder, on from the checkpoint"
    assert (out / "rank-1.log").exists()
    ours, theirs = (
        load_file(folder / "model/model.safetensors") for folder in (out, tmp_path / "unbroken")
    )
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)


@pytest.mark.slurm
def test_classify_on_two_nodes(slurm_nodes, cache, tmp_path):
    out = tmp_path / "out"
    submit(["algo=classify", *CLASSIFY], out, cache)
    until(lambda: (out / "result.json").exists(), out, "the job did not end")
    result = json.loads((out / "result.json").read_text())
    assert result["world_size"] == 2
    assert len(events(out)) == result["steps"], "one rank writes"
    until(
        lambda: Path(f"{out}.out").read_text().count("held-out accuracy") == 1,
        out,
        "one rank prints",
    )


@pytest.mark.slurm
def test_srun_of_a_job_has_the_options_that_are_given(slurm_nodes, cache, tmp_path):
    out = tmp_path / "out"
    labelled = ["slurm.srun_options.mpi=none", "slurm.srun_options.label=true"]
    submit(["algo=classify", *CLASSIFY, *labelled], out, cache)
    until(lambda: (out / "result.json").exists(), out, "the job did not end")
    until(
        lambda: re.search(r"^0: .*held-out accuracy", Path(f"{out}.out").read_text(), re.M),
        out,
        "no line has the number of its rank",
    )


@pytest.mark.slurm
@pytest.mark.slow
def test_a_job_of_a_sweep_that_submitit_warns_goes_on(slurm_nodes, cache, tmp_path, launch):
    settings = [*SMALL, "seed=3", "algo.steps=100", "checkpoint.every=0"]
    launch(*settings, f"hydra.run.dir={tmp_path}/unbroken", env={"OMP_NUM_THREADS": "1"})
    given = [
        f"hydra.launcher.{text}"
        for text in ("mem_gb=2", "cpus_per_task=1", "timeout_min=60", "max_num_timeout=3")
    ]
    sweep = tmp_path / "sweep"
    command = [
        sys.executable,
        str(ROOT / "launch.py"),
        "-m",
        "hydra/launcher=submitit_slurm",
        *given,
        *settings,
    ]
    environment = os.environ | {"CLUTCH_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [*command, f"hydra.sweep.dir={sweep}", "resume=auto"], env=environment, cwd=tmp_path
    ) as process:
        try:
            until(lambda: steps(sweep / "0") >= 8, sweep, "the job takes no steps")
            queue = subprocess.run(
                ["squeue", "-h", "-o", "%A"], capture_output=True, text=True, check=True
            )
            (job,) = queue.stdout.split()
            subprocess.run(["scancel", "--signal=USR2", job], check=True, timeout=20)
            until(lambda: released(job), sweep, "the job is not back in the queue")
            assert process.wait(240) == 0
        finally:
            process.kill()
    assert "resuming after step" in (sweep / "0/run.log").read_text()
    assert [event["step"] for event in events(sweep / "0") if event["step"]] == list(range(1, 101))
    ours, theirs = (
        load_file(folder / "model/model.safetensors")
        for folder in (sweep / "0", tmp_path / "unbroken")
    )
    assert all(ours[name].equal(theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        (
            {"TORCHELASTIC_RUN_ID": "x"},
            "torchrun has started 2 ranks. Leave it out, and say how many with torchrun --nproc",
        ),
        (
            {},
            (
                "srun has started 2 ranks. Leave it out, and say how many with srun"
                " --ntasks-per-node, or slurm.ranks_per"
            ),
        ),
    ],
    ids=["torchrun", "srun"],
)
def test_a_number_of_ranks_beside_that_of_the_launcher(monkeypatch, tmp_path, environment, text):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for key, value in (
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"} | environment
    ).items():
        monkeypatch.setenv(key, value)
    for switch in ("ddp", "fsdp"):
        run = compose([*SMALL, f"opt=[{switch}]", f"opt.{switch}.ranks=2"])
        with pytest.raises(ConfigError, match=rf"^opt\.{switch}\.ranks=2 has no effect: {text}"):
            train(run, tmp_path)


def test_torchrun_in_a_batch_script_names_its_folder(monkeypatch):
    """The script has no step, and a shell of srun may start torchrun twice in its own."""
    for key in ("RANK", "SLURM_PROCID"):
        monkeypatch.setenv(key, "0")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for key in ("SLURM_STEP_ID", "SLURM_STEP_NUM_NODES"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert started().startswith("torchrun_")
    monkeypatch.setenv("SLURM_STEP_ID", "3")
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "1")
    assert started().startswith("torchrun_")
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "2")
    assert started() == "slurm_7_3"
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "1")
    assert started() == "slurm_7_3"


# --- where ranks do not meet


@pytest.mark.thorough
def test_a_port_in_use_and_a_rank_that_never_comes(launch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        first = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        first |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = ["algo=eggroll", *SMALL, "opt=[ddp]", "opt.ddp.arrival_seconds=2"]
        done = launch(*command, code=2, env=first)
        assert (
            f"error: the ranks cannot meet at 127.0.0.1:{port}: another program uses that port."
            in done.stderr
        )
    done = launch(*command, code=2, env=first)
    expected = (
        f"error: rank 0 of 2 waited 2 s for the others at 127.0.0.1:{port}"
        " (opt.ddp.arrival_seconds): "
    )
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
