"""classify: one exact step over ranks, the whole loop, mistakes."""

import gzip
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common.config import ConfigError
from common.device import hardware
from common.distributed.workers import check_started
from common.report.runs import read_runs
from common.system.signals import EXIT_NUMBERS, EXIT_SIGNAL, RunStopped
from ddp_bench import models
from ddp_bench.tasks import Labelled, Trajectories, made
from launch import compose, train
from tests.support import LAST_WEIGHTS, SMALL_CLASSIFY, events
from tests.support.commands import Begin, Launch, Started
from tests.support.refusals import COLUMNS, refuses

pytestmark = pytest.mark.usefixtures("in_cache")
# --- a run and its folder


def test_topics_reach_ninety_percent_in_seconds(tmp_path):
    settings = ["algo=classify", "hardware=cpu", "algo.epochs=2"]
    settings += ["task.rows=1600", "task.test_rows=300"]
    result = train(compose(settings), tmp_path)
    assert (result.algo, result.task, result.metric, result.before) == (
        "classify",
        "topics",
        "accuracy",
        20.0,
    )
    assert 90 < result.after < 100
    assert {path.name for path in tmp_path.iterdir()} == {
        *("run.yaml", "run.log", "metrics.jsonl", "result.json", "checkpoints", "model", ".lock"),
        *("predictions.jsonl", "confusion.json", "report.md", "report.html"),
    }
    log = events(tmp_path)
    assert [event["step"] for event in log] == list(range(1, result.steps + 1))
    assert set(log[0]["phase_seconds"]) == {"data", "forward", "backward", "exchange", "optimizer"}
    phases = [event["phase_seconds"] for event in log]
    assert "checkpoint" in phases[result.steps // 2], (
        "that of the step before, in the next step's event"
    )
    for event, spent in zip(log, phases, strict=True):
        spent.pop("checkpoint", None)
        assert sum(spent.values()) <= event["seconds"]
    epochs = [event for event in log if "validation" in event]
    assert [event["epoch_done"] for event in epochs] == [1, 2]
    best = max(epochs, key=lambda event: event["validation"]["accuracy"])
    assert result.metrics["validation"] == {"epoch": best["epoch_done"], **best["validation"]}
    # What was written says the same as the result, and the exported model does what it says.
    table = json.loads((tmp_path / "confusion.json").read_text())
    right = sum(table["table"][i][i] for i in range(5))
    assert 100 * right / sum(map(sum, table["table"])) == pytest.approx(result.after)
    predictions = [
        json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()
    ]
    assert sum(p["class"] == p["predicted"] for p in predictions) == right
    classifier = models.load(tmp_path / "model")
    test = compose(settings).task
    values = [row.value for row in made(test).rows("test")]
    again = classifier.predict(values)
    assert [name for name, _ in again] == [p["predicted"] for p in predictions]
    assert classifier.predict([]) == []
    with pytest.raises(ConfigError, match="holds no classifier: FileNotFoundError"):
        models.load(tmp_path / "checkpoints")


@pytest.mark.thorough
def test_trajectories_are_learnt_and_exported(tmp_path):
    settings = [
        "algo=classify",
        "task=trajectories",
        "hardware=cpu",
        "task.rows=2000",
        "task.test_rows=200",
    ]
    sizes = [
        "algo.model.size=32",
        "algo.model.feedforward=64",
        "algo.model.layers=1",
        "algo.model.dropout=0",
    ]
    more = ["task.longest=40", "task.noise=0.01", "algo.epochs=6", "algo.lr=5e-3"]
    result = train(compose([*settings, *sizes, *more]), tmp_path)
    assert result.after > 50
    row = next(iter(Trajectories(rows=11, test_rows=10, longest=20, noise=0.1).rows("train")))
    (answer,) = models.load(tmp_path / "model").predict([row.value])
    assert answer[0] in ("left", "right", "to the goal", "straight")


class Letters:
    """A class task in a few lines."""

    classes = ("a", "b")

    def rows(self, split: str) -> list[Labelled]:
        return [Labelled(f"{'ab'[i % 2]} {split} {i}", i % 2) for i in range(300)]


def test_a_task_of_ones_own_and_early_stopping(tmp_path):
    run = compose([*SMALL_CLASSIFY, "algo.epochs=50", "algo.patience=2"])
    result = train(run, tmp_path, Letters())
    epochs = [event for event in events(tmp_path) if "validation" in event]
    best = result.metrics["validation"]["epoch"]
    assert len(epochs) == best + 2 < 50
    assert result.steps == epochs[-1]["step"]
    assert result.task == "Letters"
    assert result.after > 80


def test_a_run_does_not_go_on_with_other_test_rows(tmp_path):
    """What it measured before is of the old ones."""

    class Corrected(Letters):
        def rows(self, split):
            change = split == "test"
            return [Labelled(row.value, row.label ^ change) for row in super().rows(split)]

    run = [*SMALL_CLASSIFY, "algo.epochs=1"]
    train(compose(run), tmp_path, Letters())
    with pytest.raises(ConfigError, match="was made with other training or test rows"):
        train(compose([*run, "resume=auto"]), tmp_path, Corrected())


def test_predictions_name_the_line_of_a_file_with_bad_rows(tmp_path):
    for split in ("train", "test"):
        lines = [
            json.dumps({"text": f"{split} {'ab'[i % 2]} {i}", "label": i % 2}) for i in range(40)
        ]
        lines[1] = json.dumps({"text": "", "label": 1})
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    task = ["task=custom_text", f"task.path={tmp_path}", "task.on_bad_row=skip"]
    without = [text for text in SMALL_CLASSIFY if not text.startswith("task")]
    train(compose([*without, *task, "algo.epochs=1", "algo.batch_size=8"]), tmp_path / "out")
    lines = (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()
    first, second = map(json.loads, lines[:2])
    assert first["place"].endswith("test.jsonl' line 1")
    assert (second["row"], second["class"]) == (1, "0")
    assert second["place"].endswith("test.jsonl' line 3")
    (run,), _ = read_runs([tmp_path / "out"])
    assert statistics.fmean(run.scores) == pytest.approx(run.result["after"])


def test_memory_that_runs_out_in_a_validation_is_halved(tmp_path, monkeypatch):
    run = compose([*SMALL_CLASSIFY, "algo.epochs=1", "algo.batch_size=8"])
    whole = train(run, tmp_path / "whole", Letters())
    inner = models.Encoder.forward

    def forward(self, states, *more):
        if len(states) > 12:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return inner(self, states, *more)

    monkeypatch.setattr(models.Encoder, "forward", forward)
    result = train(run, tmp_path / "short", Letters())
    said = (tmp_path / "short" / "run.log").read_text()
    assert "out of memory: repeating with 8 rows" in said
    assert result.after == whole.after


def test_memory_that_runs_out_in_the_rehearsal_is_halved(tmp_path, monkeypatch):
    inner = models.Encoder.forward

    def forward(self, states, *more):
        if len(states) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return inner(self, states, *more)

    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: None)
    monkeypatch.setattr(models.Encoder, "forward", forward)
    run = compose([*SMALL_CLASSIFY, "algo.epochs=1", "algo.batch_size=8", "opt=[compile]"])
    train(run, tmp_path / "out", Letters())
    assert "out of memory: repeating with 4 rows" in (tmp_path / "out" / "run.log").read_text()


def test_an_evaluation_that_is_not_finite_ends_the_run(tmp_path, monkeypatch):
    """The largest of NaNs is the first class, which is often right."""
    inner = models.Encoder.forward

    def forward(self, *given):
        outputs = inner(self, *given)
        return outputs if self.training else outputs * math.nan

    monkeypatch.setattr(models.Encoder, "forward", forward)
    run = compose([*SMALL_CLASSIFY, "algo.epochs=1"])
    with pytest.raises(RunStopped, match=r"logits are not finite, on \d+ of \d+ rows") as ended:
        train(run, tmp_path / "out", Letters())
    assert ended.value.code == EXIT_NUMBERS


def test_workers_of_the_loader_leave_every_stop_to_the_run():
    """submitit warns with SIGUSR2, which Slurm may send to all processes of a job."""
    told = (
        "import signal; from ddp_bench.data import ignore_signals; ignore_signals(0);"
        "print({signal.getsignal(getattr(signal, f'SIG{n}')) for n in"
        " ('INT', 'TERM', 'USR1', 'USR2')} == {signal.SIG_IGN})"
    )
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_compilation_is_not_of_the_first_step(tmp_path, monkeypatch):
    """What is compiled is looked at beforehand, with a pass that changes nothing."""
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: None)
    for name, more in (("plain", []), ("compiled", ["opt=[compile]"])):
        train(compose([*SMALL_CLASSIFY, "algo.epochs=1", *more]), tmp_path / name, Letters())
    first, second, *_ = events(tmp_path / "compiled")
    assert "compile_seconds" in first
    assert "compile_seconds" not in second
    same_weights(tmp_path / "plain", tmp_path / "compiled", atol=0)


# --- ranks


def same_weights(one: Path, two: Path, atol: float) -> None:
    first, second = (load_file(folder / "model" / "model.safetensors") for folder in (one, two))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=0, atol=atol, msg=name)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, cache):
    folder = tmp_path_factory.mktemp("one")
    before = os.environ.get("CLUTCH_CACHE")
    os.environ["CLUTCH_CACHE"] = str(cache)
    torch.set_num_threads(1)
    train(compose([*SMALL_CLASSIFY, *LAST_WEIGHTS]), folder)
    os.environ.pop("CLUTCH_CACHE") if before is None else os.environ.update(CLUTCH_CACHE=before)
    return folder


@pytest.mark.parametrize(
    "more",
    [
        pytest.param([], marks=pytest.mark.slow),
        [
            "algo.train_rows=5",
            "algo.loader.workers=1",
        ],  # parts of a batch, which are not exchanged (no_sync)
        pytest.param(
            [
                "algo.train_rows=5",
                "algo.ddp.static_graph=false",
                "algo.ddp.gradient_as_bucket_view=false",
            ],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["whole", "accumulated", "dynamic"],
)
def test_two_ranks_equal_one(one_rank, warm, tmp_path, more):
    result = warm.call(
        train,
        compose([*SMALL_CLASSIFY, *LAST_WEIGHTS, "opt=[ddp]", "opt.ddp.ranks=2", *more]),
        tmp_path,
    )
    assert (result.world_size, result.steps) == (2, 20)
    log, reference = events(tmp_path), events(one_rank)
    assert {event["rows"] for event in log} == {33, 1}
    for mine, theirs in zip(log, reference, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=2e-6)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert "communication" in mine["phase_seconds"]
    same_weights(tmp_path, one_rank, atol=2e-4)
    assert result.after == pytest.approx(
        json.loads((one_rank / "result.json").read_text())["after"], abs=2
    )


@pytest.mark.thorough
def test_accumulation_on_one_rank_changes_nothing(one_rank, tmp_path):
    train(compose([*SMALL_CLASSIFY, *LAST_WEIGHTS, "algo.train_rows=7"]), tmp_path)
    for mine, theirs in zip(events(tmp_path), events(one_rank), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=2e-6)
    same_weights(tmp_path, one_rank, atol=2e-4)


@pytest.mark.thorough
def test_compressed_gradients_learn_nearly_the_same(one_rank, warm, tmp_path):
    """The loss of the first step is the same all the same."""
    more = ["opt=[ddp]", "opt.ddp.ranks=2", "algo.ddp.hook=fp16"]
    warm.call(train, compose([*SMALL_CLASSIFY, *LAST_WEIGHTS, *more]), tmp_path)
    apart = [
        abs(a["loss"] - b["loss"]) for a, b in zip(events(tmp_path), events(one_rank), strict=True)
    ]
    assert apart[0] < 2e-6
    assert 2e-6 < max(apart) < 1e-3, "it did something, and learnt all the same"


# --- killed and resumed

LONGER = [*SMALL_CLASSIFY, "algo.epochs=3", "checkpoint.every=3"]


def killed(begin: Begin, folder: Path, steps: int, number: int) -> Started:
    """A run that got `number` after `steps` steps."""
    process = begin(*LONGER, f"hydra.run.dir={folder}", "resume=auto")
    path, until = folder / "metrics.jsonl", time.monotonic() + 120
    while not (path.exists() and path.read_bytes().count(b"\n") >= steps):
        assert process.poll() is None, process.said()[0]
        assert time.monotonic() < until
        time.sleep(0.002)
    process.send_signal(number)
    process.communicate()
    return process


@pytest.mark.faults
def test_killed_in_mid_epoch_and_resumed_it_ends_the_same(launch: Launch, begin: Begin, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    launch(*LONGER, f"hydra.run.dir={whole}")
    for steps in (5, 14):  # in the first epoch, and in the second
        killed(begin, broken, steps, signal.SIGKILL)
    assert not (broken / "result.json").exists()
    assert killed(begin, broken, 20, signal.SIGTERM).returncode in (
        EXIT_SIGNAL,
        0,
    )  # 0: it was just done
    launch(*LONGER, f"hydra.run.dir={broken}", "resume=auto")
    kept = ("step", "loss", "grad_norm", "lr", "rows", "validation")
    mended, unbroken = (
        [{k: e.get(k) for k in kept} for e in events(folder)] for folder in (broken, whole)
    )
    assert mended == unbroken
    same_weights(broken, whole, atol=0)
    assert (broken / "predictions.jsonl").read_bytes() == (whole / "predictions.jsonl").read_bytes()

    with pytest.raises(ConfigError, match=r"algo\.epochs was 3, is 5"):
        train(compose([*LONGER, "algo.epochs=5", "resume=auto"]), broken)
    with pytest.raises(ConfigError, match="was made with other training or test rows"):
        train(compose([*LONGER, "resume=auto"]), broken, Letters())


# --- mistakes

MISTAKES = [
    ("algo=classify task=units", "algo=classify", "Units", ["task", "topics"]),
    ("algo=rft task=topics", "algo=rft", "Topics", ["task", "countdown"]),
    ("algo=classify model=gpt2", "model", "gpt2", "Leave it out"),
    ("algo=classify evaluate.every=3", "evaluate.every", "3", "Leave it out"),
    ("experiment=ag_news_small scoring.kind=threads", "scoring.kind", "threads", "Leave it out"),
    ("algo=classify engine=native", "engine", "native", "Leave it out"),
    ("algo=classify prompts.too_long=skip", "prompts.too_long", "skip", "Leave it out"),
    (
        "algo=classify algo.model.heads=3",
        ["algo.model.size", "algo.model.heads"],
        ["128", "3"],
        None,
    ),
    (
        "algo=classify task=trajectories algo.tokenizer.vocabulary=900",
        "algo.tokenizer.vocabulary",
        "900",
        "Leave it out",
    ),
    ("algo=classify algo.validation_share=0", "algo.patience", "2", "algo.patience=null"),
    ("algo=classify algo.label_smoothing=1", "algo.label_smoothing", "1", "Give a value below 1"),
    ("algo=classify algo.ddp.hook=fp8", "algo.ddp.hook", "fp8", ["none", "fp16", "bf16"]),
]


@pytest.mark.parametrize(COLUMNS, MISTAKES)
def test_mistakes_are_refused(overrides, key, value, try_next):
    refuses(overrides, key=key, value=value, try_next=try_next)


RUN_MISTAKES = [
    ("algo.ddp.hook=fp16", "algo.ddp.hook", "fp16", "Leave it out"),
    ("opt=[ddp] algo.ddp.hook=bf16", "algo.ddp.hook", "bf16", "algo.ddp.hook=fp16"),
    (
        "algo.loader.prefetch=4",
        "algo.loader.prefetch",
        "4",
        ["algo.loader.workers", "leave it out"],
    ),
    ("task=ag_news", "task", "ag_news", ["task.path=FOLDER", "task.train=FILE"]),
]


@pytest.mark.parametrize(COLUMNS, RUN_MISTAKES)
def test_mistakes_that_a_run_finds(overrides, key, value, try_next, warm, tmp_path):
    run = compose(["algo=classify", "hardware=cpu", *overrides.split()])
    refuses(lambda: warm.call(train, run, tmp_path), key=key, value=value, try_next=try_next)


def test_rows_and_labels_that_cannot_be(tmp_path):
    class Wrong(Letters):
        def rows(self, split):
            return [*super().rows(split), Labelled("c", 2)]

    run = compose(SMALL_CLASSIFY)
    refuses(lambda: train(run, tmp_path, Wrong()), key="label", value=2, try_next="2 classes")


def test_srun_times_torchrun_is_refused(monkeypatch, tmp_path):
    run = compose(SMALL_CLASSIFY)
    for key in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(key, "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for tasks in ("4", "4(x2)", "4,1"):
        monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", tasks)
        refuses(
            lambda: train(run, tmp_path),
            key=["srun", "torchrun"],
            value="16 processes",
            try_next=["srun --ntasks-per-node=1", "--nproc_per_node=4"],
        )
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "1(x2)")  # one torchrun per node
    check_started(run)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "4")
    check_started(run)


def test_more_ranks_than_devices(monkeypatch):
    run = compose(["algo=classify"])
    monkeypatch.setattr(hardware, "local_devices", lambda _: 1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    refuses(
        lambda: check_started(run),
        key="--nproc_per_node",
        value=["4", "1 CUDA devices"],
        try_next=["Use at most 1", "--gpus-per-node"],
    )


def test_device_ordinals_that_do_not_exist(monkeypatch):
    run = compose(["algo=classify"])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,7")
    refuses(
        lambda: hardware.check_visible(run.hardware),
        key="CUDA_VISIBLE_DEVICES",
        value="0,1,7",
        try_next=["nvidia-smi -L", "hardware=cpu"],
    )
    for fine in ("0,1", "", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", fine)
        hardware.check_visible(run.hardware)


# --- the real rows


@pytest.mark.parametrize(
    "experiment",
    [
        pytest.param("ag_news_small", marks=pytest.mark.thorough),
        "ag_news_optimized",
        pytest.param("imdb", marks=pytest.mark.thorough),
    ],
)
def test_experiments_on_a_few_real_rows(experiment, shared_data, tmp_path):
    name = "imdb" if experiment == "imdb" else "ag_news"
    for split, count in (("train", 120), ("test", 40)):
        with gzip.open(shared_data / name / f"{split}.jsonl.gz", "rt") as file:
            (tmp_path / f"{split}.jsonl").write_text("".join(file.readlines()[:count]))
    settings = [
        f"experiment={experiment}",
        "hardware=cpu",
        f"task.path={tmp_path}",
        "algo.epochs=1",
    ]
    result = train(
        compose([*settings, "algo.model.size=32", "algo.model.layers=1"]), tmp_path / "out"
    )
    assert (result.task, result.steps > 0) == (name, True)
    assert 0 <= result.after <= 100
