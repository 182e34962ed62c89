"""Read finished runs, measurements and predictions into one `Record` each."""

import itertools
import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from common.config import ConfigError
from common.system import events, first_line, safe_read

PHASES = ("data", "forward", "backward", "communication", "exchange", "optimizer")
TABLES = ("scaling.json", "prediction.json")
# Settings that change neither the time nor the computation of a step, or that distinguish ranks and
# batches.
NOT_A_GROUP = {
    *("name", "ddp", "batch_size", "epochs", "patience", "lr", "lr_schedule", "warmup_steps"),
    "validation_share",
}


@dataclass
class Record:
    """One run, or one measurement of a scaling run. Seconds are those of steps after
    the warm-up.
    """

    folder: str
    task: str
    model: str
    group: str  # the settings that records share apart from ranks, batch and seed
    ranks: int
    batch_rows: int  # the rows of a batch on all ranks together
    device: str
    dtype: str
    step_p50: float
    step_p90: float
    rows_per_second: float
    phases: dict[str, float]  # seconds of a step
    step_mean: float | None = None  # the sum of the phases
    epoch_seconds: float | None = None  # the median seconds of an epoch
    epochs: list[float] = field(default_factory=list)  # seconds of each epoch, warm-up included
    accuracy: list[float] = field(default_factory=list)  # validation accuracy by epoch, percent
    test: float | None = None  # accuracy of the test rows, percent
    compiled: bool = False  # whether opt=compile was used
    threads: int | None = None  # threads per rank, if the measurement fixed them
    wrapper: dict[str, Any] = field(default_factory=dict)  # algo.ddp, with more than one rank
    predicted: bool = False  # whether algo=predict predicted it, without running these ranks
    match: str | None = None  # part of the name of a device that was not present


class Incomplete(Exception):
    """A run folder that cannot be used; the text has the reason."""


def read_records(root: Path, warmup: int) -> tuple[list[Record], list[tuple[str, str]]]:
    """Return the records below `root`, and the incomplete folders with the reason. Runs of other
    algorithms are skipped.

    Args: warmup: the epochs of a run that are left out.
    Raises: ConfigError if `root` is no folder.
    """
    if not root.is_dir():
        raise ConfigError(
            f"--root {root} is not a folder. Give the one that holds the run folders, for example"
            " outputs."
        )
    names = ("run.yaml", "metrics.jsonl", "result.json", *TABLES)
    records: list[Record] = []
    incomplete: list[tuple[str, str]] = []
    for folder in sorted({path.parent for name in names for path in root.rglob(name)}):
        table = next((folder / name for name in TABLES if (folder / name).exists()), None)
        try:
            records += read_table(table) if table else read_run(folder, warmup)
        except Incomplete as error:
            incomplete.append((str(folder), str(error)))
        except (OSError, *safe_read.ERRORS) as error:
            text = f"{type(error).__name__}: {first_line(error)}"
            incomplete.append((str(folder), f"damaged or of another version ({text})"))
    return records, incomplete


def read_run(folder: Path, warmup: int) -> list[Record]:
    """Return the record of a training run; empty for a run of another algorithm. Raises:
    Incomplete.
    """
    saved, result = (safe_read.read(folder / name) for name in ("run.yaml", "result.json"))
    algo = saved["config"]["algo"]["name"] if saved else result["algo"] if result else None
    if algo not in (None, "classify"):
        return []
    log = events(folder / "metrics.jsonl")
    if algo is None and any("stage" in event for event in log):
        return []  # a shard of RFT, which logs in a folder of its own
    if result is None:
        done = log[-1]["step"] if log else "no"
        raise Incomplete(f"no result.json: the run stopped after {done} steps")
    if saved is None:
        raise Incomplete("no run.yaml: its settings are not known")
    if not log:
        raise Incomplete("no metrics.jsonl, or an empty one")
    ends = [number for number, event in enumerate(log, 1) if "epoch_done" in event]
    epochs = [log[start:end] for start, end in itertools.pairwise([0, *ends])]
    if len(epochs) <= warmup:
        raise Incomplete(f"{len(epochs)} whole epochs, of which --warmup {warmup} leaves none")
    if log[-1]["step"] != result["steps"] or len(log) != result["steps"]:
        raise Incomplete(f"metrics.jsonl has {len(log)} steps, result.json says {result['steps']}")
    ranks = {event.get("ranks") for epoch in epochs[warmup:] for event in epoch}
    if len(ranks) > 1:
        shown = " and ".join(map(str, sorted(ranks, key=str)))
        raise Incomplete(f"its steps were made by {shown} ranks: it was resumed with others")
    return [_summarise_run(folder, saved["config"], result, epochs, warmup)]


def _summarise_run(
    folder: Path,
    config: dict[str, Any],
    result: dict[str, Any],
    epochs: list[list[dict[str, Any]]],
    warmup: int,
) -> Record:
    counted = [event for epoch in epochs[warmup:] for event in epoch]
    algo, task, batch = config["algo"], config["task"], config["algo"]["batch_size"]
    whole = [event["seconds"] for event in counted if event["rows"] == batch]
    whole = whole or [event["seconds"] for event in counted]
    p50, p90 = np.percentile(whole, (50, 90)).tolist()
    seconds = [math.fsum(event["seconds"] for event in epoch) for epoch in epochs]
    spans = [event.get("phase_seconds", {}) for event in counted]
    settings = {name: value for name, value in algo.items() if name not in NOT_A_GROUP}
    sharing = ("ddp", "fsdp", "profile")  # switches that only several ranks need
    opt = {name: value for name, value in config["opt"].items() if name not in sharing}
    sharded = config["opt"].get("fsdp", {})
    kept = ("enabled", "ranks_per_group", "cpu_offload")
    wrapper = algo["ddp"]
    if sharded.get("enabled"):
        wrapper = wrapper | {"fsdp": {name: sharded.get(name) for name in kept}}
        spans = []  # sharded ranks exchange weights within forward and backward
    return Record(
        **{key: result[key] for key in ("task", "model", "device", "dtype")},
        folder=str(folder),
        group=json.dumps([settings, opt, task, result["dtype"]], sort_keys=True),
        ranks=result["world_size"],
        batch_rows=batch,
        step_p50=p50,
        step_p90=p90,
        step_mean=statistics.fmean(event["seconds"] for event in counted),
        rows_per_second=sum(e["rows"] for e in counted) / sum(e["seconds"] for e in counted),
        phases={
            name: statistics.fmean(span.get(name, 0.0) for span in spans)
            for name in PHASES
            if any(name in span for span in spans)
        },
        epoch_seconds=statistics.median(seconds[warmup:]),
        epochs=seconds,
        accuracy=[e[-1]["validation"]["accuracy"] for e in epochs if "validation" in e[-1]],
        test=result["after"],
        compiled=bool(opt.get("compile", {}).get("enabled")),
        wrapper=wrapper if result["world_size"] > 1 else {},
    )


def read_table(path: Path) -> list[Record]:
    """Return the records of a scaling.json or a prediction.json."""
    saved = safe_read.read(path)
    kind = ["scaling", saved["settings"], saved["dtype"], saved["threads_per_rank"]]
    group = json.dumps(kind, sort_keys=True)
    return [
        Record(
            **{key: saved[key] for key in ("task", "model", "device", "dtype")},
            **{key: run[key] for key in ("ranks", "batch_rows", "rows_per_second")},
            folder=str(path.parent),
            group=group,
            step_p50=run["step_seconds"]["p50"],
            step_p90=run["step_seconds"]["p90"],
            step_mean=run["batch_rows"] / run["rows_per_second"],
            # Means, as a loader may hold up every fourth step alone.
            phases={n: one.get("mean", one["p50"]) for n, one in run["phase_seconds"].items()},
            epoch_seconds=saved["training_rows"] / run["rows_per_second"],
            threads=saved["threads_per_rank"],
            wrapper=saved["settings"]["ddp"] if run["ranks"] > 1 else {},
            predicted=path.name == "prediction.json",
            match=saved.get("match"),
        )
        for run in saved["runs"]
    ]


def select_tasks(records: list[Record], datasets: Sequence[str] | None) -> list[Record]:
    """Return the records of these tasks; case and dashes are ignored. Raises: ConfigError for an
    unknown task.
    """

    def plain(name: str) -> str:
        return re.sub(r"[^a-z0-9]", "", name.lower())

    there = {plain(record.task): record.task for record in records}
    for name in datasets or ():
        if plain(name) not in there:
            choices = ", ".join(sorted({record.task for record in records})) or "none"
            raise ConfigError(f"--datasets {name}: no run of that task. Choices: {choices}.")
    wanted = set(there if datasets is None else map(plain, datasets))
    return [record for record in records if plain(record.task) in wanted]
