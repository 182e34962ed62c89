"""Runs that are killed again and again: `until_done` drives launch.py, `differing` says what an
unbroken run has otherwise.

command = [sys.executable, "launch.py", "algo=eggroll", ...]
kills = until_done(command, folder, seed=0, kills=20)
assert differing(unbroken, folder) == []
"""

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import CONF, ROOT, SMALL, TINY

MOMENTS = ("start", "append", "torn", "rollout", "save")
STEPS = 5  # lines of the log that an attempt may get on before it is killed, at most
# What the clock and the machine decide, wherever it stands in an event or a result.
TIMES = {
    *(
        "seconds",
        "phase_seconds",
        "component_seconds",
        "evaluate_seconds",
        "compile_seconds",
        "peak_memory_gb",
    ),
    *("tokens_per_second", "samples_per_second", "accepted_per_minute", "folder"),
}
# What a run leaves that an interruption must not change; of the rest a part is compared below.
FILES = (
    *(
        "model/*.safetensors",
        "adapter/*.safetensors",
        "completions/*.jsonl",
        "predictions.jsonl",
        "confusion.json",
        "not_finite.jsonl",
    ),
    *("iteration-*/samples-*.jsonl", "iteration-*/selected.jsonl", "iteration-*/selected.json"),
    *(
        "iteration-*/evaluation.json",
        "iteration-*/finetune.json",
        "iteration-*/model/*.safetensors",
        "iteration-*/adapter/*.safetensors",
    ),
)


@dataclass
class Kill:
    """One kill: when it was to come, how many lines the log had, and whether a checkpoint was being
    written just then.
    """

    moment: str
    lines: int
    half_written: bool


def until_done(
    command: Sequence[str],
    folder: Path,
    *,
    seed: int,
    kills: int,
    moments: Sequence[str] = MOMENTS,
    variants: Sequence[Sequence[str]] = ((),),
    environment: dict[str, str] | None = None,
    signals: Sequence[int] = (signal.SIGKILL,),
    between: Callable[[random.Random], None] = lambda _: None,
    timeout: float = 600,
) -> list[Kill]:
    """Run `command` with resume=auto in `folder`, kill -9 it and all its processes, and again,
    until it ends by itself.

    Args: command: launch.py and its arguments, without the folder; kills: how often at most;
    moments: of MOMENTS, drawn by `seed`: while it starts or resumes, at the moment when a line is
    appended, the same with that line cut short, in between lines, and while a checkpoint or a model
    is written; variants: arguments added in turn, attempt by attempt (another number of ranks,
    say); signals: drawn from too; those but SIGKILL go to the first process alone, which has to end
    in good time; between: called after each kill; timeout: seconds of one attempt.
    Returns: the kills that hit. Raises: AssertionError where an attempt ends with a code other than
    0, or not in time.
    """
    draw, made, attempt = random.Random(seed), [], 0
    while True:
        moment = draw.choice(moments) if len(made) < kills else "never"
        given = [
            *command,
            f"hydra.run.dir={folder}",
            "resume=auto",
            *variants[attempt % len(variants)],
        ]
        attempt += 1
        process = subprocess.Popen(
            given,
            env=os.environ | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
        try:
            hit = _wait(process, folder, moment, draw, timeout)
            number = draw.choice(signals) if hit and moment != "torn" else signal.SIGKILL
            if hit and number != signal.SIGKILL:
                process.send_signal(number)
                process.wait(120)
        finally:
            _kill(process)
        said = process.communicate()[0]
        if not hit:
            assert process.returncode == 0, (
                f"attempt {attempt} ended with {process.returncode}:\n{said}"
            )
            return made
        if moment == "torn":
            _tear(folder, draw)
        between(draw)
        made.append(
            Kill(
                (
                    f"{moment}"
                    if number == signal.SIGKILL
                    else f"{moment}, {signal.Signals(number).name}"
                ),
                sum(_lines(folder).values()),
                bool(_half_written(folder)),
            )
        )


def _wait(
    process: subprocess.Popen[str], folder: Path, moment: str, draw: random.Random, timeout: float
) -> bool:
    """Return at the moment, True; or when the process has ended, False."""
    began, until = time.monotonic(), time.monotonic() + timeout
    before, more = sum(_lines(folder).values()), draw.randint(1, STEPS)
    if moment == "start":
        until = min(until, began + draw.uniform(0, 8))
    while time.monotonic() < until:
        if process.poll() is not None:
            return False
        if (
            moment == "save"
            and _half_written(folder)
            and sum(_lines(folder).values()) >= before + more - 1
        ):
            return True
        if (
            moment in ("append", "torn", "rollout")
            and sum(_lines(folder).values()) >= before + more
        ):
            time.sleep(draw.uniform(0, 0.05) if moment == "rollout" else 0)
            return True
        time.sleep(0.0005 if moment != "never" else 0.05)
    assert moment == "start", f"nothing happened in {timeout} s, waiting for {moment}"
    return True


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _lines(folder: Path) -> Counter[str]:
    """Lines of each log that only grows: metrics and samples."""
    found: Counter[str] = Counter()
    for path in _glob(folder, "metrics.jsonl", "iteration-*/samples-*.jsonl"):
        try:
            found[str(path)] = path.read_bytes().count(b"\n")
        except FileNotFoundError:  # it is being replaced
            continue
    return found


def _half_written(folder: Path) -> list[Path]:
    return _glob(folder, ".tmp-*", "*/.tmp-*", "*/*/.tmp-*")


def _glob(folder: Path, *patterns: str) -> list[Path]:
    """What is there, while the run makes and removes folders."""
    with contextlib.suppress(FileNotFoundError):
        return [path for pattern in patterns for path in folder.glob(pattern)]
    return []


def _tear(folder: Path, draw: random.Random) -> None:
    """Cut the newest log in the middle of its last line, as a power cut would leave it.

    Not where a checkpoint, a model or what a stage came to is newer: before one is written, the log
    is synced to disk.
    """
    newest = max(_lines(folder), key=lambda name: Path(name).stat().st_mtime_ns, default=None)
    if newest is None:
        return
    path = Path(newest)
    names = (
        "manifest.json",
        "model.safetensors",
        "adapter_model.safetensors",
        "selected.json",
        "evaluation.json",
        "finetune.json",
    )
    saved = [saved for name in names for saved in folder.rglob(name)]
    if any(other.stat().st_mtime_ns > path.stat().st_mtime_ns for other in saved):
        return
    last = path.read_bytes().rstrip(b"\n").rpartition(b"\n")[2]
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - draw.randint(1, max(1, len(last))))


def differing(one: Path, other: Path, metrics: bool = True) -> list[str]:
    """Names of what two run folders have otherwise: weights, samples, completions, and metrics
    apart from times; [] = nothing.

    metrics: False = leave out what counts forwards, where runs had different numbers of ranks.
    """
    first, second = (_kept(folder, metrics) for folder in (one, other))
    return sorted(name for name in {**first, **second} if first.get(name) != second.get(name))


def _kept(folder: Path, metrics: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for pattern in FILES
        for path in folder.glob(pattern)
        if metrics or path.name not in ("training.jsonl", "all.jsonl")  # by event of the log
    }
    for name in ("metrics.jsonl", "evaluations.jsonl") if metrics else ():
        if (folder / name).exists():
            lines = (folder / name).read_text(encoding="utf-8").splitlines()
            found |= {
                f"{name}:{number}": _timeless(json.loads(line))
                for number, line in enumerate(lines, 1)
            }
    if (folder / "result.json").exists():
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        found["result.json"] = {
            k: v for k, v in _timeless(result).items() if metrics or k != "world_size"
        }
    return found


def _timeless(event: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in event.items() if key not in TIMES}


# All that a checkpoint has to bring back: momentum, schedules, noise and rollouts that outlive a
# step, drawn tokens, evaluations on the way, the best weights so far, several epochs.
RUNS = {
    "eggroll": [
        "completions=all",
        *(
            "algo=eggroll",
            "task=letters",
            "task.scoring=smooth",
            *SMALL,
            "algo.steps=100",
            "algo.sigma=0.1",
        ),
        *(
            "algo.optimizer.name=Adam",
            "algo.lr=0.003",
            "algo.noise_reuse=3",
            "algo.sampling.temperature=1.0",
        ),
        *(
            "algo.lr_schedule={kind: cosine, end: 0.1}",
            "algo.sigma_schedule={kind: linear, end: 0.5}",
        ),
        *("checkpoint.every=2", "evaluate.every=7"),
    ],
    "grpo": [
        "completions=all",
        *(
            "algo=grpo",
            "task=letters",
            "task.scoring=smooth",
            *TINY,
            "algo.prompts_per_step=3",
            "algo.steps=100",
        ),
        *(
            "algo.samples_per_prompt=4",
            "algo.sampling.max_new_tokens=8",
            "algo.num_iterations=2",
            "algo.kl.beta=0.01",
        ),
        *(
            "algo.warmup_steps=5",
            "algo.lr_schedule={kind: linear, end: 0.1}",
            "checkpoint.every=2",
            "evaluate.every=7",
        ),
        "evaluate.examples=8",
    ],
    "sft": [
        "completions=all",
        *("algo=sft", "task=letters", *TINY, "algo.prompts_per_step=4", "algo.steps=100"),
        *("algo.sampling.max_new_tokens=8", "algo.warmup_steps=5", "checkpoint.every=2"),
        *("algo.lr_schedule={kind: linear, end: 0.1}", "evaluate.every=7", "evaluate.examples=8"),
    ],
    "rft": [
        "completions=all",
        *(
            "algo=rft",
            "task=letters",
            "hardware=cpu",
            "model.tiny.hidden_size=64",
            "model.tiny.layers=2",
        ),
        *(
            "model.tiny.heads=2",
            "model.tiny.intermediate_size=128",
            "model.tiny.pretrain_steps=300",
        ),
        *(
            "model.tiny.pretrain_lr=5e-3",
            "algo.prompts=60",
            "algo.validation_prompts=20",
            "algo.samples_per_prompt=4",
        ),
        *(
            "algo.second_round_samples=2",
            "algo.prompts_per_batch=8",
            "algo.chunk_size=2",
            "algo.train_rows=32",
        ),
        *(
            "algo.sampling.max_new_tokens=8",
            "algo.epochs=2",
            "algo.batch_size=8",
            "evaluate.samples=2",
        ),
        *("evaluate.examples=16", "checkpoint.every=2", "algo.iterations=2", "algo.patience=2"),
    ],
    "classify": [
        *(
            "algo=classify",
            "hardware=cpu",
            "task.rows=298",
            "task.test_rows=60",
            "algo.batch_size=33",
        ),
        *(
            "algo.epochs=8",
            "algo.model.size=32",
            "algo.model.feedforward=64",
            "algo.tokenizer.vocabulary=600",
        ),
        *("algo.lr=3e-3", "algo.patience=6", "algo.warmup_steps=0.1", "checkpoint.every=2"),
    ],
}
RANKS = {1: [], 2: ["opt=[ddp]", "opt.ddp.ranks=2"]}


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "launch.py"), "--config-dir", CONF, *arguments]


def environment(cache: Path) -> dict[str, str]:
    return {"CLUTCH_CACHE": str(cache)}


def unbroken(arguments: list[str], folder: Path, cache: Path) -> None:
    done = subprocess.run(
        command(*arguments, f"hydra.run.dir={folder}"),
        env=os.environ | environment(cache),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
