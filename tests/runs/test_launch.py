"""The command line and the Python interface, as users meet them."""

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from common.system.signals import EXIT_SIGNAL, StopSignal
from common.task import Example
from launch import compose, train
from tests.support import ROOT, SMALL, events
from tests.support.commands import as_ranks
from tests.support.refusals import COLUMNS, refuses
from tests.support.warm import side_by_side

FAST = [*SMALL, "algo.steps=2"]


# --- before torch


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--help"], "\n  algo        classify, "),
        (["--cfg", "job"], "rollout_rows: "),
        (["--info", "defaults"], "hardware"),
        (["algo.sgima=1"], ""),
        (["--explain", "algo.sigma"], "Standard deviation of the noise"),
        (["--explain"], "This command has eggroll"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_answers_without_importing_torch(tmp_path, arguments, shown):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", str(ROOT / "launch.py"), *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    imported = re.findall(r"^import time:.*\|\s+([\w.]+)$", done.stderr, flags=re.M)
    assert "omegaconf" in imported, "the list of imports is really there"
    assert [
        name
        for name in imported
        if name.split(".")[0] in ("torch", "transformers", "numpy", "wandb")
    ] == []
    assert shown in done.stdout
    assert list(tmp_path.iterdir()) == [], "an answer leaves no folder behind"


MISTAKES = [
    ("algo.sgima=1", "algo.sgima", 1, "'sigma'"),
    ("+algo.lrr=1", "algo.lrr", 1, "'lr'"),
    ("algo.noize.rank=1", "algo.noize.rank", 1, "'noise'"),
    ("task.sourc=x", "task.sourc", "x", "'source'"),
    ("task=translat", "task", "translat", "'translate'"),
    ("task=null", "task", "null", ["Choices", "translate"]),
    ("algo.steps=many", "algo.steps", "many", "Give one"),
    ("opt=[amp,cmpile]", "opt", "cmpile", "'compile'"),
    ("opt=null", "opt", "null", "'opt=[amp,compile]'"),
    ("opt.amp.dtype=float16", "opt.amp.dtype", "float16", "'opt=[amp,...]'"),
    (
        "model=hf model.path=x model.tiny.layers=2",
        "model.tiny.layers",
        2,
        ["Leave it out", "model=tiny"],
    ),
    ("task.source=no.txt task.target=no.txt", "task.source", "no.txt", "Correct the path"),
    ("opt=[checkpointing]", "opt", "checkpointing", "Leave it out"),
]


@pytest.mark.parametrize(COLUMNS, MISTAKES)
def test_mistakes_are_refused(overrides, key, value, try_next, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    error = refuses(
        lambda: train(compose(overrides.split()), tmp_path),
        key=key,
        value=value,
        try_next=try_next,
    )
    assert "\n" not in error


@pytest.mark.parametrize(
    COLUMNS,
    [row for row in MISTAKES if row[0].startswith(("algo.sgima", "task=null", "task.source"))],
)
def test_commands_refuse_mistakes_with_code_2(launch, overrides, key, value, try_next):
    """A mistake in a setting, in a group and in a file: the command says what Python says."""
    refuses(
        overrides,
        key=key,
        value=value,
        try_next=try_next,
        start=lambda given: launch(*given, code=2),
    )


def test_open_dicts_take_any_key():
    run = compose(
        ["algo.optimizer.kwargs={momentum: 0.9}", "algo.noise.patterns={*.mlp.*: frozen}"]
    )
    assert run.algo.optimizer.kwargs == {"momentum": 0.9}
    assert run.algo.noise.patterns == {"*.mlp.*": "frozen"}
    assert compose(["algo.optimizer.kwargs.momentum=0.9"]).algo.optimizer.kwargs == {
        "momentum": 0.9
    }
    refuses(
        ["algo.optimizer.kwarg={momentum: 0.9}"],
        key="algo.optimizer.kwarg.momentum",
        value=0.9,
        try_next="'kwargs'",
    )


# --- a run and its folder


def test_a_run_puts_everything_into_its_folder(launch, in_cache, tmp_path):
    out = tmp_path / "mine"
    poison = tmp_path / "poison"  # no tracker is imported unless it is asked for
    for name in ("wandb", "tensorboard"):
        (poison / name).mkdir(parents=True)
        (poison / name / "__init__.py").write_text("raise RuntimeError('imported')\n")
    done = launch(
        *FAST,
        f"hydra.run.dir={out}",
        env={"PYTHONPATH": str(poison)},
        fresh=True,
    )
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "poison"}
    assert {path.name for path in out.iterdir()} == {
        *(
            ".hydra",
            ".lock",
            "run.yaml",
            "run.log",
            "metrics.jsonl",
            "result.json",
            "checkpoints",
            "completions",
            "model",
        ),
        *("report.md", "report.html", "evaluations.jsonl"),
        *(["run.egg"] if (ROOT / "plugins" / "replay").is_dir() else []),
    }
    result = json.loads((out / "result.json").read_text())
    assert set(result) >= {
        *(
            "algo",
            "task",
            "model",
            "metric",
            "before",
            "after",
            "steps",
            "seconds",
            "generated_tokens",
        ),
        *("reward_evaluations", "world_size", "device", "dtype"),
    }
    assert (result["algo"], result["task"], result["model"], result["metric"]) == (
        *("eggroll", "translate", "tiny", "bleu"),
    )
    assert (result["steps"], result["world_size"], result["dtype"]) == (2, 1, "float32")
    assert result["reward_evaluations"] == 2 * 8 * 2  # steps, members, prompts
    assert 0 < result["generated_tokens"] <= 8 * result["reward_evaluations"]
    log = events(out)
    assert [event["step"] for event in log] == [1, 2]
    for event in log:
        assert set(event) >= {
            "step",
            "seconds",
            "phase_seconds",
            "reward",
            "tokens_per_second",
            "peak_memory_gb",
        }
        assert set(event["phase_seconds"]) == {"rollout", "reward", "keep", "exchange", "update"}
        assert sum(event["phase_seconds"].values()) <= event["seconds"]
        assert event["peak_memory_gb"] > 0.05
    # The plan, the measure, three completions side by side, and where everything is.
    for text in (
        "population  8 members x 2 prompts",
        "forwards ",
        "memory      about",
        "before: held-out bleu",
    ):
        assert text in done.stdout
    assert re.search(r"^prompt +before +after +answer$", done.stdout, flags=re.M)
    assert re.search(
        r"^held-out bleu +\d+\.\d\d -> \d+\.\d\d \([+-]\d+\.\d\d, 95 % .*\)$",
        done.stdout,
        flags=re.M,
    )
    assert f"{out}/result.json" in done.stdout

    refuses(
        lambda: train(compose(FAST), out), key=str(out), try_next=["resume=auto", "hydra.run.dir"]
    )
    assert json.loads((out / "result.json").read_text()) == result


def test_a_sweep_survives_a_failing_job(launch, tmp_path):
    done = launch("-m", *FAST, "seed=1,2", "algo.members=4,3", "hydra.sweep.dir=sweep", code=2)
    folders = sorted(path for path in (tmp_path / "sweep").iterdir() if path.is_dir())
    assert [(folder / "result.json").exists() for folder in folders] == [True, True, False, False]
    seeds = [
        re.search(r"^  seed: (\d)$", (f / "run.yaml").read_text(), flags=re.M).group(1)
        for f in folders[:2]
    ]
    assert seeds == ["1", "2"]
    assert "algo.members=3 is odd, and algo.mirrored=true needs pairs." in done.stderr
    assert "Traceback" not in done.stderr


def test_a_sweep_is_checked_before_its_first_job(launch, tmp_path):
    done = launch("-m", *FAST, "seed=1,two", "hydra.sweep.dir=sweep", code=2)
    assert done.stderr == "error: seed=two is not a whole number. Give one.\n"
    assert not list(tmp_path.glob("sweep/*/metrics.jsonl"))


def test_a_sweep_and_its_settings_are_two_commands(launch):
    told = "error: -m starts runs, and --cfg shows what one has. Leave out one of the two.\n"
    for flag in (["--cfg", "job"], ["--cfg=job"]):
        assert launch("-m", "seed=1,2", *flag, code=2).stderr == told


def test_a_sweep_over_a_pattern_of_files_starts(launch, tmp_path):
    sweep = ["experiment=glob(rft_smollm2*)", "model.path=nowhere", "hydra.sweep.dir=sweep"]
    done = launch("-m", *sweep, code=2)
    assert "=== job 0 experiment=rft_smollm2_units" in done.stdout
    assert "model.path='nowhere'" in done.stdout, (
        "its job says what is wrong, and not the check before it"
    )


def wait_for_steps(process, folder) -> None:
    """Return once a run below the folder has made a few."""
    until = time.monotonic() + 120
    while not any(
        path.read_text().count("\n") > 3 for path in folder.glob("outputs/*/metrics.jsonl")
    ):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.01)


def saved_by_two_ranks(folder, said: str) -> None:
    """Assert that they have saved their one run together, and that one rank goes on with it."""
    (out,) = (folder / "outputs").iterdir()
    assert (out / ".hydra" / "config.yaml").is_file()
    assert re.search(r"ranks +2$", (out / "run.log").read_text(), flags=re.M)
    step = len(events(out))
    assert [path.name for path in (out / "checkpoints").iterdir()] == [f"step-{step:08d}"], said
    assert 3 < step < 2000
    assert f"stopped after step {step} of 2000, saved in" in said
    result = train(compose([*SMALL, f"algo.steps={step + 1}", "resume=auto"]), out)
    assert (result.steps, result.world_size) == (step + 1, 1)


RANKS = [*SMALL, "algo.steps=2000", "checkpoint.every=0"]


@pytest.mark.faults
def test_launched_ranks_share_a_folder_and_save(warm, cache, in_cache, tmp_path):
    ranks = as_ranks(tmp_path, cache, RANKS, RANKS)
    process = warm.begin(side_by_side, ranks, printed=tmp_path)
    wait_for_steps(process, tmp_path)
    forks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for fork in forks:
        os.kill(int(fork), signal.SIGINT)
    process.communicate()
    said = Path(ranks[0]["stderr"]).read_text()
    assert pickle.loads((tmp_path / "call").read_bytes()) == [EXIT_SIGNAL] * 2, said
    saved_by_two_ranks(tmp_path, said)


@pytest.mark.thorough
@pytest.mark.faults
def test_torchrun_makes_one_folder_and_ctrl_c_saves(cache, in_cache, tmp_path):
    """Ctrl-C as a terminal sends it, to the whole group; torchrun passes it on to its workers once
    more.
    """
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
            *(str(ROOT / "launch.py"), *RANKS),
        ],
        cwd=tmp_path,
        env=os.environ | {"CLUTCH_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for_steps(process, tmp_path)
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate(timeout=60)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    saved_by_two_ranks(tmp_path, said)
    assert list(tmp_path.glob("outputs/*/rank-1.log"))


@pytest.mark.faults
def test_a_repeated_signal_is_one_wish_for_a_while():
    interrupt = signal.getsignal(signal.SIGINT)  # ignored where the tests run in the background
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with StopSignal() as stop:
            assert stop.name is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM], "without a stop the handlers are as before"

        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)  # torchrun and a terminal both send it
            assert stop.name == "SIGTERM"
        os.kill(os.getpid(), signal.SIGTERM)  # while the run is ending
        assert len(heard) == 1
        stop.SAME = -1.0  # as if time had passed
        os.kill(os.getpid(), signal.SIGTERM)
        assert len(heard) == 2, "later on, what was there before hears it"

        def ask_again_later() -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            stop.SAME = -1.0  # as if time had passed
            os.kill(os.getpid(), signal.SIGTERM)

        with StopSignal() as stop, pytest.raises(SystemExit) as left:
            ask_again_later()
        assert left.value.code == 128 + signal.SIGTERM, "who asks again later wants it at once"
        stop.restore()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert signal.getsignal(signal.SIGINT) is interrupt


@pytest.mark.faults
def test_a_signal_to_a_pipe_loses_nothing():
    """As Ctrl-C with `2>&1 | tee log` does."""
    code = "import os, signal, time\nfrom common.system.signals import StopSignal\n"
    code += "with StopSignal() as stop:\n    os.kill(os.getpid(), signal.SIGINT)\n    "
    code += "time.sleep(0.1)\nprint(stop.name, 'and saved', flush=True)"
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=writer, text=True)
    os.close(writer)
    assert (done.returncode, done.stdout) == (0, "SIGINT and saved\n")


# --- from Python, and with a task of one's own


class Vowels:
    """A task in ten lines."""

    def examples(self, split: str) -> list[Example]:
        words = ["alpha", "beta", "gamma", "delta"] if split == "train" else ["omega", "sigma"]
        return [
            Example(id=index, question=word, answer="aeiou") for index, word in enumerate(words)
        ]

    def prompt(self, example: Example) -> str:
        return f"{example.question}:"

    def reward(self, example: Example, completion: str) -> float:
        return sum(letter in example.answer for letter in completion) / max(1, len(completion))

    def metrics(self, examples: list[Example], completions: list[str]) -> dict[str, float]:
        return {"vowels": 100 * sum(map(self.reward, examples, completions)) / len(examples)}


@pytest.mark.thorough
def test_from_python_with_an_object_as_the_task(in_cache, tmp_path):
    run = compose([*FAST, "seed=5"])
    assert (run.seed, run.algo.members) == (5, 8)
    result = train(run, tmp_path / "run", Vowels())
    assert (result.task, result.metric, result.steps) == ("Vowels", "vowels", 2)
    assert result.folder == str(tmp_path / "run")
    assert set(result.metrics["after"]) == {"vowels"}
    model, tokenizer = result.model_and_tokenizer()
    assert sum(parameter.numel() for parameter in model.parameters()) > 10_000
    assert tokenizer.decode(tokenizer("omega:")["input_ids"]) == "omega:"
    assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 258)


def test_a_task_in_a_file_of_the_user(launch, tmp_path):
    (tmp_path / "conf" / "task").mkdir(parents=True)
    (tmp_path / "conf" / "task" / "mine.yaml").write_text(
        "_target_: my_tasks.Mine\nletters: aeiou\n"
    )
    (tmp_path / "my_tasks.py").write_text(
        "from common.tasks import Example\n\n\nclass Mine:\n    def __init__(self, letters):\n     "
        "   self.letters = letters\n\n    def examples(self, split):\n        return [Example(i, w,"
        " '') for i, w in enumerate(['ab', 'cd', 'ef'])]\n\n    def prompt(self, example):\n       "
        " return example.question\n\n    def reward(self, example, completion):\n        return"
        " float(completion[:1] in self.letters)\n\n    def metrics(self, examples, completions):\n "
        "       return {self.letters: 50.0}\n"
    )
    own = ["--config-dir", str(tmp_path / "conf"), "task=mine", *FAST]
    where = {"PYTHONPATH": str(tmp_path)}
    launch(*own, "task.letters=xyz", "hydra.run.dir=mine", env=where)
    result = json.loads((tmp_path / "mine" / "result.json").read_text())
    assert (result["task"], result["metric"], result["after"]) == ("Mine", "xyz", 50.0)

    (tmp_path / "conf" / "task" / "fails.yaml").write_text("_target_: fails.Mine\npath: nofile\n")
    (tmp_path / "fails.py").write_text(
        "class Mine:\n    def __init__(self, path):\n        open(path)\n"
    )
    failing = ["--config-dir", str(tmp_path / "conf"), "task=fails", *FAST]
    done = launch(*failing, code=2, env=where)
    assert "task._target_='fails.Mine' raised FileNotFoundError" in done.stderr
    assert "fails.py:3), with the settings {'path': 'nofile'}" in done.stderr
    assert "Traceback" not in done.stderr

    refuses(
        lambda: launch(*own, "task.leters=xyz", code=2, env=where),
        key="task.leters",
        value="xyz",
        try_next="'letters'",
    )
    refuses(
        lambda: launch("--config-dir", str(tmp_path / "conf"), "task=mien", code=2),
        key="task",
        value="mien",
        try_next="'mine'",
    )
    run = compose([*FAST, "task=mine"], str(tmp_path / "conf"))
    refuses(
        lambda: train(run, tmp_path / "other"),
        key="task._target_",
        value="'my_tasks.Mine'",
        try_next="PYTHONPATH",
    )


# --- the wheel


@pytest.mark.thorough
def test_the_wheel_works_from_another_folder(tmp_path):
    source, target, elsewhere = tmp_path / "source", tmp_path / "target", tmp_path / "elsewhere"
    unwanted = shutil.ignore_patterns(
        ".git", ".venv", "outputs", "multirun", "build", "*.egg-info", "__pycache__", ".*_cache"
    )
    shutil.copytree(
        ROOT, source, ignore=unwanted
    )  # a build in the repository would leave folders in it
    elsewhere.mkdir()
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        "PIP_DISABLE_PIP_VERSION_CHECK": "1"
    }

    def call(*command: str) -> str:
        done = subprocess.run(
            command, cwd=elsewhere, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    pip = [sys.executable, "-m", "pip", "--quiet"]
    call(
        *pip,
        "wheel",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(tmp_path),
        str(source),
    )
    (wheel,) = tmp_path.glob("clutch_rl-*.whl")
    call(*pip, "install", "--no-index", "--no-deps", "--target", str(target), str(wheel))

    packages = ("conf", "common", "eggroll", "grpo", "rft", "ddp_bench", "benchmarks", "plugins")
    travels = {
        path.relative_to(source)
        for package in packages
        for path in (source / package).rglob("*")
        if path.suffix in (".py", ".yaml") and "tests" not in path.relative_to(source).parts
    }
    assert sorted(p for p in travels if not (target / p).is_file()) == []

    environment["PYTHONPATH"] = str(target)
    assert call(sys.executable, "-c", "import launch; print(launch.CONF)").strip() == str(
        target / "conf"
    )
    expected = call(sys.executable, str(ROOT / "launch.py"), "--cfg", "job", "hardware=h100")
    assert "memory_gb: 80" in expected
    assert call(sys.executable, "-m", "launch", "--cfg", "job", "hardware=h100") == expected
    assert call(str(target / "bin" / "clutch"), "--cfg", "job", "hardware=h100") == expected


@pytest.mark.thorough
def test_a_reader_that_leaves_does_not_disturb_the_run(cache, tmp_path):
    """As of python launch.py ... | head -1."""
    call = [
        sys.executable,
        str(ROOT / "launch.py"),
        "algo=eggroll",
        *SMALL,
        "algo.steps=1",
        "hydra.run.dir=out",
    ]
    environment = os.environ | {"CLUTCH_CACHE": str(cache)}
    process = subprocess.Popen(
        call,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    with process.stderr:
        said = process.stderr.read()
    assert process.wait(120) == 0, said
    assert "Error" not in said
    assert "written to" in (tmp_path / "out/run.log").read_text()
