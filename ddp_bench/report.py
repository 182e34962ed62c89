"""What finished classify runs say about scaling: tables, figures, a diagnosis, and what to do about
it.

    python -m ddp_bench.report --root outputs
    python -m ddp_bench.report --root outputs --out report --warmup 1 --datasets ag_news imdb

Reads run folders (run.yaml, result.json, metrics.jsonl), scaling runs (scaling.json) and
predictions (prediction.json) anywhere below --root, and puts those of one task with the same
settings together. Speed-up is rows a second against one rank. Strong: the batch of all ranks is
that of the one rank; weak: the batch of each rank is. Training time alone counts, without
validation.
"""

import argparse
import csv
import json
import math
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from common.config import ConfigError
from common.report.events import events
from common.report.plots import COLOURS, STYLE

PHASES = ("data", "forward", "backward", "communication", "exchange", "optimizer")
ENOUGH = 1.2  # a speed-up below it is not worth a second device
# Settings that change neither the time of a step nor what is computed in it, or that tell ranks and
# batch apart.
NOT_A_GROUP = {
    "ddp",
    "batch_rows",
    "epochs",
    "patience",
    "lr",
    "lr_schedule",
    "warmup",
    "validation_share",
    "name",
}
# What colours tell apart on a screen, markers tell apart in print.
MARKERS = "os^Dv<>P"


@dataclass
class Record:
    """One run, or one measurement of a scaling run. Seconds are of training steps; warm-up is left
    out of them.
    """

    folder: str
    task: str
    model: str
    group: str  # of equal records but for ranks, batch and seed
    ranks: int
    batch_rows: int  # of all ranks
    device: str
    dtype: str
    step_p50: float
    step_p90: float
    rows_per_second: float
    phases: dict[str, float]  # seconds of a step
    epoch_seconds: float | None = None  # median
    epochs: list[float] = field(default_factory=list)  # seconds, warm-up too
    accuracy: list[float] = field(default_factory=list)  # of the validation rows by epoch, percent
    test: float | None = None  # accuracy of the test rows, percent
    threads: int | None = None  # a rank, where the measurement fixed them
    wrapper: dict[str, Any] = field(
        default_factory=dict
    )  # algo.ddp, where there is more than one rank
    predicted: bool = False  # of algo=predict: nothing was run with these ranks
    match: str | None = (
        # what the name of the device holds that it was predicted for, where that was not there
        None
    )


@dataclass
class Point:
    """Records of the same ranks and batch; a number of it is their median."""

    records: list[Record]
    mode: str = "one rank"  # strong | weak | unpaired: no run of one rank to compare with
    speedup: float | None = None
    free: float | None = None  # the speed-up if communication took no time
    causes: list[str] = field(default_factory=list)  # the largest first
    advice: list[tuple[float, str]] = field(
        default_factory=list
    )  # predicted gain, what to do; best first
    foreseen: float | None = (
        None  # seconds of a step that algo=predict told for this measured point
    )

    @property
    def ranks(self) -> int:
        """Ranks of each record."""
        return self.records[0].ranks

    @property
    def batch_rows(self) -> int:
        """Rows of a step, of all ranks."""
        return self.records[0].batch_rows

    @property
    def hook(self) -> str:
        """How gradients are compressed, for people: ", hook fp16", or nothing."""
        name = self.records[0].wrapper.get("hook", "none")
        return "" if name == "none" else f", hook {name}"

    @property
    def efficiency(self) -> float | None:
        """Percent of the ideal speed-up."""
        return None if self.speedup is None else 100 * self.speedup / self.ranks

    @property
    def error(self) -> float | None:
        """Percent by which the prediction is above what was measured."""
        return (
            None if self.foreseen is None else 100 * (self.foreseen / self.number("step_p50") - 1)
        )

    @property
    def how(self) -> str:
        """Where its numbers come from: measured or predicted."""
        return "predicted" if self.records[0].predicted else "measured"

    def middle(self, name: str) -> float | None:
        """Median of a number over the records that have it."""
        values = [value for record in self.records if (value := getattr(record, name)) is not None]
        return statistics.median(values) if values else None

    def number(self, name: str) -> float:
        """Median of a number that every record has."""
        return statistics.median(getattr(record, name) for record in self.records)

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of a step by phase."""
        return {
            name: statistics.median(record.phases.get(name, 0.0) for record in self.records)
            for name in PHASES
            if any(name in record.phases for record in self.records)
        }


@dataclass
class Group:
    """One task with one set of settings. name: in file names; points: by mode, then ranks. All
    predicted, or all measured.
    """

    name: str
    task: str
    model: str
    points: list[Point]


# --- reading ---------------------------------------------------------------------------------------------------------


def read(root: Path, warmup: int) -> tuple[list[Record], list[tuple[str, str]]]:
    """The records below `root`, and the folders that are incomplete with the reason. Other
    algorithms' are passed over.

    Args: warmup: epochs of a run that do not count; of scaling.json nothing, which leaves its own
    warm-up out.
    Raises: ConfigError where there is no such folder.
    """
    if not root.is_dir():
        raise ConfigError(
            f"--root {root} is no folder. Give the one that holds the run folders, for example"
            " outputs."
        )
    names = ("run.yaml", "metrics.jsonl", "result.json", "scaling.json", "prediction.json")
    folders = sorted({path.parent for name in names for path in root.rglob(name)})
    records: list[Record] = []
    incomplete: list[tuple[str, str]] = []
    for folder in folders:
        try:
            table = next(
                (folder / n for n in ("scaling.json", "prediction.json") if (folder / n).exists()),
                None,
            )
            if table is not None:
                records += scaling(table)
            elif (found := finished(folder, warmup)) is not None:
                records.append(found)
        except Incomplete as error:
            incomplete.append((str(folder), str(error)))
        except (KeyError, TypeError, ValueError, AttributeError, OSError, yaml.YAMLError) as error:
            reason = str(error).splitlines()[0] if str(error) else ""
            incomplete.append(
                (str(folder), f"damaged or of another version ({type(error).__name__}: {reason})")
            )
    return records, incomplete


class Incomplete(Exception):
    """A run folder that cannot be counted; the text says why."""


def finished(folder: Path, warmup: int) -> Record | None:
    """The record of a run folder; None for another algorithm's. Raises: Incomplete."""
    saved = (
        yaml.safe_load((folder / "run.yaml").read_text(encoding="utf-8"))
        if (folder / "run.yaml").exists()
        else None
    )
    path = folder / "result.json"
    result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    algo = saved["config"]["algo"]["name"] if saved else result["algo"] if result else None
    if algo not in (None, "classify"):
        return None
    log = events(folder / "metrics.jsonl")
    if result is None:
        raise Incomplete(
            f"no result.json: the run stopped after {log[-1]['step'] if log else 'no'} steps"
        )
    if saved is None:
        raise Incomplete("no run.yaml: its settings are not known")
    if not log:
        raise Incomplete("no metrics.jsonl, or an empty one")
    epochs: list[list[dict[str, Any]]] = [[]]
    for event in log:
        epochs[-1].append(event)
        if "epoch_done" in event:
            epochs.append([])
    epochs = [epoch for epoch in epochs if epoch and "epoch_done" in epoch[-1]]
    if len(epochs) <= warmup:
        raise Incomplete(f"{len(epochs)} whole epochs, of which --warmup {warmup} leaves none")
    if log[-1]["step"] != result["steps"] or len(log) != result["steps"]:
        raise Incomplete(f"metrics.jsonl has {len(log)} steps, result.json says {result['steps']}")
    config = saved["config"]
    kept = [event for epoch in epochs[warmup:] for event in epoch]
    batch = config["algo"]["batch_size"]
    whole = [event["seconds"] for event in kept if event["rows"] == batch] or [
        event["seconds"] for event in kept
    ]
    seconds = [math.fsum(event["seconds"] for event in epoch) for epoch in epochs]
    opt = {name: value for name, value in config["opt"].items() if name not in ("ddp", "profile")}
    settings = {name: value for name, value in config["algo"].items() if name not in NOT_A_GROUP}
    return Record(
        folder=str(folder),
        task=result["task"],
        model=result["model"],
        group=json.dumps([settings, opt, config["task"], result["dtype"]], sort_keys=True),
        ranks=result["world_size"],
        batch_rows=batch,
        device=result["device"],
        dtype=result["dtype"],
        step_p50=quantile(whole, 50),
        step_p90=quantile(whole, 90),
        rows_per_second=sum(event["rows"] for event in kept)
        / sum(event["seconds"] for event in kept),
        phases={
            name: statistics.fmean(event["phase_seconds"].get(name, 0.0) for event in kept)
            for name in PHASES
            if any(name in event.get("phase_seconds", {}) for event in kept)
        },
        epoch_seconds=statistics.median(seconds[warmup:]),
        epochs=seconds,
        accuracy=[
            epoch[-1]["validation"]["accuracy"] for epoch in epochs if "validation" in epoch[-1]
        ],
        test=result["after"],
        wrapper=config["algo"]["ddp"] if result["world_size"] > 1 else {},
    )


def scaling(path: Path) -> list[Record]:
    """The records of a scaling.json or a prediction.json."""
    saved = json.loads(path.read_text(encoding="utf-8"))
    return [
        Record(
            folder=str(path.parent),
            task=saved["task"],
            model=saved["model"],
            group=json.dumps(["scaling", saved["settings"], saved["dtype"]], sort_keys=True),
            ranks=run["ranks"],
            batch_rows=run["batch_rows"],
            device=saved["device"],
            dtype=saved["dtype"],
            step_p50=run["step_seconds"]["p50"],
            step_p90=run["step_seconds"]["p90"],
            rows_per_second=run["rows_per_second"],
            phases={name: span["p50"] for name, span in run["phase_seconds"].items()},
            epoch_seconds=saved["training_rows"] / run["rows_per_second"],
            threads=saved["threads_per_rank"],
            wrapper=saved["settings"]["ddp"] if run["ranks"] > 1 else {},
            predicted=path.name == "prediction.json",
            match=saved.get("match"),
        )
        for run in saved["runs"]
    ]


def quantile(values: Sequence[float], percent: int) -> float:
    """A percentile, interpolated between neighbours."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


# --- comparing -------------------------------------------------------------------------------------------------------


def grouped(records: Iterable[Record]) -> list[Group]:
    """Records by task, settings and device, with speed-up, cause and advice at each point.

    Predictions stand beside what was measured with the same settings; those of devices without any
    are groups of their own.
    """
    keys: dict[tuple[str, str, str, str, bool], list[Record]] = {}
    for record in records:
        key = (record.task, record.model, record.group, record.device, record.predicted)
        keys.setdefault(key, []).append(record)
    predicted = {key: keys.pop(key) for key in list(keys) if key[-1]}
    foreseen: dict[tuple[str, str, str, str, bool], list[Record]] = {}
    for key, members in predicted.items():
        measured = [k for k in keys if k[:3] == key[:3] and like_device(members[0], k[3])]
        for one in measured:
            foreseen.setdefault(one, []).extend(members)
        if not measured:
            keys[key] = members
    groups, names = [], {}
    tasks = [key[0] for key in keys]
    for key, members in sorted(keys.items()):
        task, model, *_, is_predicted = key
        name = task if tasks.count(task) == 1 else f"{task}-{re.sub(r'[^A-Za-z0-9]+', '-', model)}"
        name += "-predicted" * is_predicted
        names[name] = names.get(name, 0) + 1
        name = name if names[name] == 1 else f"{name}-{names[name]}"
        cells: dict[tuple[int, int, str], list[Record]] = {}
        for record in members:
            cells.setdefault(
                (record.ranks, record.batch_rows, json.dumps(record.wrapper, sort_keys=True)), []
            ).append(record)
        points = [Point(found) for _, found in sorted(cells.items())]
        for point in points:
            compare(point, points)
            seconds = [
                record.step_p50
                for record in foreseen.get(key, [])
                if (record.ranks, record.batch_rows, record.wrapper)
                == (point.ranks, point.batch_rows, point.records[0].wrapper)
            ]
            point.foreseen = statistics.median(seconds) if seconds else None
        order = ("one rank", "strong", "weak", "unpaired")
        groups.append(
            Group(
                name,
                task,
                model,
                sorted(points, key=lambda p: (order.index(p.mode), p.ranks, p.batch_rows)),
            )
        )
    return groups


def like_device(predicted: Record, device: str) -> bool:
    """Whether a prediction is for this device."""
    return (
        predicted.match.lower() in device.lower() if predicted.match else predicted.device == device
    )


def compare(point: Point, points: list[Point]) -> None:
    """Fill in what a point is against the run of one rank."""
    alone = {other.batch_rows: other for other in points if other.ranks == 1}
    if point.ranks == 1:
        point.speedup = 1.0
        return
    rows_a_rank, rest = divmod(point.batch_rows, point.ranks)
    if point.batch_rows in alone:
        point.mode, base = "strong", alone[point.batch_rows]
    elif not rest and rows_a_rank in alone:
        point.mode, base = "weak", alone[rows_a_rank]
    else:
        point.mode = "unpaired"
        return
    point.speedup = point.number("rows_per_second") / base.number("rows_per_second")
    if point.phases:
        waited = lost(point, base)["communication"]
        point.free = base_step(point, base) / max(1e-12, point.number("step_p50") - waited)
    point.causes = causes(point, base, points)
    point.advice = advice(point, base, points)


def lost(point: Point, base: Point) -> dict[str, float]:
    """Seconds of a step above the ideal one, by cause: what the base takes, for each rank's share
    of the rows.
    """
    here, alone = point.phases, base.phases
    share = 1 / point.ranks if point.mode == "strong" else 1.0

    def more(*names: str) -> float:
        return max(0.0, sum(here.get(name, 0.0) - share * alone.get(name, 0.0) for name in names))

    return {
        "communication": here.get("communication", 0.0) + here.get("exchange", 0.0),
        "loader": more("data"),
        "compute": more("forward", "backward", "optimizer"),
    }


def cores_of(point: Point) -> int | None:
    """Cores that the ranks share on a CPU; None on a GPU."""
    found = re.search(r"\((\d+) cores\)$", point.records[0].device)
    return int(found[1]) if found else None


def causes(point: Point, base: Point, points: list[Point]) -> list[str]:
    """What holds the ranks back, the largest first; empty where nothing does, or where there are no
    phases to tell by.
    """
    if not (point.phases and base.phases) or (point.efficiency or 0) >= 90:
        return []
    parts, total = lost(point, base), point.number("step_p50")
    # Fewer rows, or as many, cannot take a device longer: something is shared. As many tell it
    # best.
    like = same_share(point, base, points) or point
    computing, before = (
        sum(p.phases.get(name, 0.0) for name in ("forward", "backward")) for p in (like, base)
    )
    crowded = computing > 1.1 * before
    cores, threads = cores_of(point), point.records[0].threads
    if cores is not None:
        # Without fixed threads the one rank had all cores, and these have a part of them.
        crowded = crowded or threads is None or point.ranks * threads > cores
    names = {
        "communication": "communication-bound",
        "loader": "loader-bound",
        "compute": "oversubscribed cores" if crowded else "launch-bound",
    }
    order = [
        name for name in sorted(parts, key=lambda name: -parts[name]) if parts[name] > 0.05 * total
    ]
    # Ranks that get too few cores also wait longer for each other, which looks like communication.
    forced = cores is not None and point.ranks * (threads or 1) > cores
    assert point.free is not None
    if "compute" in order and (
        forced or (crowded and cores is not None) or (point.free < ENOUGH and not crowded)
    ):
        order.remove("compute")
        order.insert(0, "compute")
    elif forced:
        return ["oversubscribed cores", *(names[name] for name in order)]
    return [names[name] for name in order]


def same_share(point: Point, base: Point, points: list[Point]) -> Point | None:
    """The point of as many ranks where each has as many rows as the one rank."""
    batch = point.ranks * base.batch_rows
    return next(
        (p for p in points if (p.ranks, p.batch_rows, p.hook) == (point.ranks, batch, point.hook)),
        None,
    )


def base_step(point: Point, base: Point) -> float:
    """Seconds that one rank takes for the rows of a step of `point`."""
    return base.number("step_p50") * point.batch_rows / base.batch_rows


def advice(point: Point, base: Point, points: list[Point]) -> list[tuple[float, str]]:
    """Gain in rows a second, and what to do, the best first. Less than 5 % is not worth a line."""
    step, here, alone, parts = (
        point.number("step_p50"),
        point.phases,
        base.phases,
        lost(point, base),
    )
    speed = point.number("rows_per_second")
    rivals = [
        p for p in points if p is base or (1 < p.ranks < point.ranks and p.mode == point.mode)
    ]
    best = max(rivals, key=lambda p: p.number("rows_per_second"))
    fewer: list[tuple[float, str]] = []
    if (point.speedup or 0) < ENOUGH and best.number("rows_per_second") < ENOUGH * base.number(
        "rows_per_second"
    ):
        gain = base.number("rows_per_second") / speed
        # It stands even where it is a little slower: it costs a part.
        given = "" if gain >= 1 else f": {point.ranks} give only {1 / gain:.2f}x"
        fewer = [(gain, f"use one {unit(point)}{given} ({point.how})")]
    elif best.number("rows_per_second") > 1.05 * speed:
        plural = "s" * (best.ranks > 1)
        fewer = [
            (
                best.number("rows_per_second") / speed,
                f"use {best.ranks} {unit(point)}{plural} ({point.how})",
            )
        ]
    found: list[tuple[float, str]] = []
    if here and alone and point.causes:
        cause = point.causes[0]
        measured = same_share(point, base, points)
        if point.mode == "strong" and (
            measured or cause in ("launch-bound", "communication-bound")
        ):
            # Each rank then computes as many rows as the one rank did, and sends as often.
            larger = parts["communication"] + point.ranks * here.get("data", 0.0)
            larger += sum(alone.get(name, 0.0) for name in ("forward", "backward", "optimizer"))
            gain, how = point.ranks * step / max(larger, 1e-12), "predicted"
            if measured:
                gain, how = measured.number("rows_per_second") / speed, measured.how
            text = (
                f"algo.batch_size={point.ranks * point.batch_rows}: more rows a rank; raise"
                " algo.lr, check accuracy"
            )
            found.append((gain, f"{text} ({how})"))
        if "loader-bound" in point.causes:
            gain = step / max(step - here.get("data", 0.0), 1e-12)
            found.append((gain, "more algo.loader.workers (predicted, at best)"))
        if (
            "communication-bound" in point.causes
            and cause != "oversubscribed cores"
            and not point.hook
        ):
            gain = step / max(step - here.get("communication", 0.0) / 2, 1e-12)
            found.append(
                (gain, "algo.ddp.hook=fp16: half the bytes; check accuracy (predicted, at best)")
            )
        if cause == "launch-bound" and cores_of(point) is None:
            gain = step / max(step - parts["compute"], 1e-12)
            found.append((gain, "opt=[compile]: fewer launches (predicted, at best)"))
    return sorted(fewer + [item for item in found if item[0] >= 1.05], key=lambda item: -item[0])


def unit(point: Point) -> str:
    """What a rank runs on, for people."""
    return "GPU" if cores_of(point) is None else "worker"


# --- writing ---------------------------------------------------------------------------------------------------------


def cells(group: Group, point: Point) -> dict[str, Any]:
    """A line of comprehensive_summary.csv."""
    accuracy = [max(record.accuracy) for record in point.records if record.accuracy]
    return {
        "task": group.task,
        "model": group.model,
        "group": group.name,
        "scaling": point.mode,
        "ranks": point.ranks,
        "batch_rows": point.batch_rows,
        "hook": point.records[0].wrapper.get("hook", "none"),
        "runs": len(point.records),
        "epoch_seconds": rounded(point.middle("epoch_seconds")),
        "step_seconds_p50": rounded(point.number("step_p50")),
        "step_seconds_p90": rounded(point.number("step_p90")),
        "rows_per_second": rounded(point.number("rows_per_second")),
        "speedup": rounded(point.speedup),
        "efficiency_percent": rounded(point.efficiency),
        "how": point.how,
        "predicted_step_seconds": rounded(point.foreseen),
        "prediction_error_percent": rounded(point.error),
        **{f"{name}_seconds": rounded(point.phases.get(name)) for name in PHASES},
        "best_validation_accuracy_percent": rounded(
            statistics.median(accuracy) if accuracy else None
        ),
        "test_accuracy_percent": rounded(point.middle("test")),
        "causes": "; ".join(point.causes),
        "device": point.records[0].device,
        "dtype": point.records[0].dtype,
        "folders": "; ".join(dict.fromkeys(record.folder for record in point.records)),
    }


def rounded(value: float | None) -> str:
    """Five figures; nothing for None."""
    return "" if value is None else f"{value:.5g}"


def write_csv(groups: list[Group], path: Path) -> None:
    """comprehensive_summary.csv: a line a point."""
    rows = [cells(group, point) for group in groups for point in group.points]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def escaped(text: str) -> str:
    r"""Text as LaTeX prints it: "87 % of a_b" -> "87 \% of a\_b"."""
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(special.get(c, f"\\{c}" if c in "%_&#${}" else c) for c in text)


def write_tex(groups: list[Group], path: Path) -> None:
    """summary_table.tex: a small document; its tabular may be copied into another one."""
    head = [
        "Task",
        "Model",
        "Scaling",
        "Ranks",
        "Batch",
        "Epoch (s)",
        "Rows/s",
        "Speed-up",
        "Efficiency",
        "Test acc.",
    ]
    lines = [
        r"\documentclass{article}",
        r"\usepackage[margin=1cm]{geometry}",
        r"\begin{document}",
        r"\noindent\footnotesize",
        r"\begin{tabular}{lllrrrrrrr}",
        r"\hline",
        " & ".join(head) + r" \\",
        r"\hline",
    ]
    for group in groups:
        for point in group.points:
            epoch, test = point.middle("epoch_seconds"), point.middle("test")
            texts = [
                *(group.task, group.model, point.mode, str(point.ranks), str(point.batch_rows)),
                "--" if epoch is None else f"{epoch:.2f}",
                f"{point.number('rows_per_second'):.0f}",
                "--" if point.speedup is None else f"{point.speedup:.2f}x",
                "--" if point.efficiency is None else f"{point.efficiency:.1f} %",
                "--" if test is None else f"{test:.1f} %",
            ]
            lines.append(" & ".join(escaped(text) for text in texts) + r" \\")
        lines.append(r"\hline")
    lines += [r"\end{tabular}", r"\end{document}", ""]
    path.write_text("\n".join(lines), encoding="utf-8")


def told(groups: list[Group], incomplete: list[tuple[str, str]]) -> str:
    """performance_report.txt: what was found, why, and what to do."""
    lines: list[str] = []
    for group in groups:
        first = group.points[0].records[0]
        title = f"{group.name}: {group.model}, {first.dtype}, {first.device}"
        title += " (predicted, not measured)" * first.predicted
        lines += [title, "=" * len(title), ""]
        for point in group.points:
            lines += section(point)
        if not any(point.ranks == 1 for point in group.points):
            lines += ["No run of one rank: there is no speed-up to tell. Run one with opt=[].", ""]
        elif len(group.points) == 1:
            lines += [
                "No run of several ranks. Run one with 'opt=[ddp]', or algo=scaling.",
                "",
            ]
    if incomplete:
        lines += ["Incomplete folders, not counted", "===============================", ""]
        lines += [f"{folder}: {reason}" for folder, reason in incomplete] + [""]
    return "\n".join(lines)


def section(point: Point) -> list[str]:
    """The lines of a point."""
    plural = "s" * (point.ranks > 1)
    head = f"{point.ranks} {unit(point)}{plural}, {point.batch_rows} rows a step"
    head += (f", {point.mode} scaling" if point.mode in ("strong", "weak") else "") + point.hook
    epoch = point.middle("epoch_seconds")
    lines = [
        head,
        f"  step {1000 * point.number('step_p50'):.2f} ms p50,"
        f" {1000 * point.number('step_p90'):.2f} ms p90; {point.number('rows_per_second'):.0f}"
        " rows/s" + (f"; epoch {epoch:.2f} s" if epoch is not None else ""),
    ]
    if point.foreseen is not None:
        lines.append(
            f"  predicted {1000 * point.foreseen:.2f} ms, measured"
            f" {1000 * point.number('step_p50'):.2f} ms: the prediction is"
            f" {abs(point.error or 0):.1f} % too {'high' if (point.error or 0) > 0 else 'low'}"
        )
    if point.phases:
        lines.append(
            "  phases " + ", ".join(f"{name} {1000 * s:.2f} ms" for name, s in point.phases.items())
        )
    if point.mode == "unpaired":
        lines.append(
            "  no run of one rank with this batch or with that of a rank: nothing to compare with"
        )
    elif point.ranks > 1:
        assert point.speedup is not None
        assert point.efficiency is not None
        lines.append(
            f"  speed-up {point.speedup:.2f}x, efficiency {point.efficiency:.1f} %:"
            f" {verdict(point)}"
        )
        if point.causes:
            lines.append(f"  cause: {point.causes[0]}: {EXPLAINED[point.causes[0]]}")
            lines += [f"  also: {cause}: {EXPLAINED[cause]}" for cause in point.causes[1:]]
            lines.append(f"  if communication took no time: {point.free:.2f}x")
        elif not point.phases:
            lines.append("  cause: not known, the runs have no phase_seconds")
        elif point.efficiency < 90:
            lines.append(
                "  cause: not in the phases of rank 0, which take no longer than they should"
            )
        for number, (gain, text) in enumerate(point.advice, 1):
            lines.append(f"  {number}. gain {gain:.2f}x: {text}")
    return [*lines, ""]


def verdict(point: Point) -> str:
    """A speed-up in words."""
    assert point.speedup is not None
    assert point.efficiency is not None
    if point.speedup < 1:
        return "NEGATIVE SCALING, slower than one"
    if point.speedup < ENOUGH:
        return "no gain to speak of"
    return "excellent" if point.efficiency >= 80 else "good" if point.efficiency >= 60 else "poor"


EXPLAINED = {
    "launch-bound": "the work of a step does not shrink with its rows",
    "communication-bound": "the ranks wait for gradients, or for each other",
    "loader-bound": "the ranks wait for batches",
    "oversubscribed cores": "the ranks share cores that one rank has for itself",
}


# --- figures ---------------------------------------------------------------------------------------------------------


def draw(group: Group, out: Path, warmup: int) -> list[Path]:
    """The figures of a group; those that it has nothing for are left out."""
    import matplotlib  # half a second

    paths = []
    with matplotlib.rc_context(STYLE):
        made = {
            "epoch_time_detailed": draw_times(group, warmup),
            "speedup_efficiency": draw_speedup(group),
            "throughput": draw_throughput(group),
            "accuracy": draw_accuracy(group),
        }
        for name, figure in made.items():
            if figure is not None:
                paths.append(out / f"{group.name}_{name}.png")
                figure.savefig(paths[-1], dpi=120)
    return paths


def panels_of(count: int, width: float) -> tuple[Any, list[Any]]:
    """A figure with `count` axes side by side, each `width` inches wide."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * count, 6), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def named(point: Point) -> str:
    """A point in a legend."""
    mode = (f", {point.mode}" if point.mode in ("strong", "weak") else "") + point.hook
    return (
        f"{point.ranks} {unit(point)}{'s' * (point.ranks > 1)}{mode}\n({point.batch_rows} rows a"
        " step)"
    )


def draw_times(group: Group, warmup: int) -> Any:
    """Seconds of each epoch, and beside them where a step's time goes."""
    curves = any(record.epochs for point in group.points for record in point.records)
    with_phases = [point for point in group.points if point.phases]
    panels = curves + bool(with_phases)
    if not panels:
        return None
    figure, axes = panels_of(panels, 7.5)
    if curves:
        axis = axes.pop(0)
        for i, point in enumerate(group.points):
            for number, record in enumerate(record for record in point.records if record.epochs):
                axis.plot(
                    range(1, len(record.epochs) + 1),
                    record.epochs,
                    color=COLOURS[i % 8],
                    marker=MARKERS[i % 8],
                    label=named(point) if number == 0 else None,
                )
        longest = max(len(record.epochs) for point in group.points for record in point.records)
        if warmup:
            axis.axvspan(0.5, warmup + 0.5, color="0.88", label="warm-up, not counted", zorder=0)
        axis.set(
            xlabel="epoch",
            ylabel="training time of an epoch (s)",
            title=f"{group.name}: time of an epoch",
        )
        axis.set_xlim(0.5, longest + 0.5)
        axis.set_ylim(bottom=0)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend(fontsize=11)
    if axes:
        axis = axes[0]
        bottoms = [0.0] * len(with_phases)
        for name, colour in zip(PHASES, COLOURS, strict=False):
            heights = [1000 * point.phases.get(name, 0.0) for point in with_phases]
            if any(heights):
                axis.bar(
                    range(len(heights)), heights, 0.65, bottom=bottoms, color=colour, label=name
                )
                bottoms = [a + b for a, b in zip(bottoms, heights, strict=True)]
        axis.set_xticks(
            range(len(with_phases)), [short(point) for point in with_phases], fontsize=12
        )
        what = unit(group.points[0])
        axis.set(
            xlabel=f"{what}s, rows of a step",
            ylabel="time of a step (ms)",
            title=f"{group.name}: where a step's time goes",
        )
        axis.set_ylim(0, 1.25 * max([*bottoms, 1e-9]))
        axis.legend(ncols=3, fontsize=11, loc="upper center")
    return figure


def short(point: Point) -> str:
    """A point below a bar."""
    mode = f"{point.mode}{point.hook}" if point.mode in ("strong", "weak") else ""
    return f"{point.ranks}\n{point.batch_rows} rows\n{mode}"


def draw_speedup(group: Group) -> Any:
    """Speed-up and efficiency by ranks, strong and weak, beside the ideal."""
    lines = scaled_lines(group)
    if not lines:
        return None
    figure, axes = panels_of(2, 7.5)
    ranks = sorted({point.ranks for points in lines.values() for point in points})
    axes[0].plot(ranks, ranks, "--", color="0.4", label="ideal")
    axes[1].axhline(100, linestyle="--", color="0.4", label="ideal")
    axes[1].axhline(80, linestyle=":", color="0.4", label="80 %: excellent")
    for axis, name, text in ((axes[0], "speedup", "{:.2f}x"), (axes[1], "efficiency", "{:.0f} %")):
        for i, (mode, points) in enumerate(lines.items()):
            values = [getattr(point, name) for point in points]
            style = {
                "color": COLOURS[i % 8],
                "marker": MARKERS[i % 8],
                "markersize": 9,
                "label": mode,
            }
            axis.plot([point.ranks for point in points], values, **style)
        for place in ranks[
            1:
        ]:  # the lowest is labelled below and the highest above, so that no two meet
            there = sorted(
                getattr(p, name) for points in lines.values() for p in points if p.ranks == place
            )
            for value, offset in {there[-1]: 10, there[0]: -22}.items():
                axis.annotate(
                    text.format(value),
                    (place, value),
                    (0, offset),
                    textcoords="offset points",
                    ha="center",
                    fontsize=12,
                    bbox={
                        "boxstyle": "round,pad=0.1",
                        "facecolor": "white",
                        "edgecolor": "none",
                        "alpha": 0.8,
                    },
                )
    what = unit(group.points[0])
    axes[0].set(xlabel=f"{what}s", ylabel="speed-up in rows/s (x)", title=f"{group.name}: speed-up")
    axes[1].set(
        xlabel=f"{what}s", ylabel="efficiency (% of ideal)", title=f"{group.name}: efficiency"
    )
    axes[1].set_ylim(
        0, max(115, *(1.15 * (p.efficiency or 0) for points in lines.values() for p in points))
    )
    axes[0].set_ylim(bottom=0)
    for axis, place in zip(axes, ("upper left", "lower left"), strict=True):
        axis.set_xticks(ranks)
        axis.margins(x=0.12)
        axis.legend(fontsize=12, loc=place)
    return figure


def scaled_lines(group: Group) -> dict[str, list[Point]]:
    """Points by what a line of them is called, the one rank first; empty where no two points
    compare.
    """
    alone = {point.batch_rows: point for point in group.points if point.ranks == 1}
    lines: dict[str, list[Point]] = {}
    for point in group.points:
        if point.mode == "strong":
            name, base = f"strong, {point.batch_rows} rows in all", alone[point.batch_rows]
        elif point.mode == "weak":
            base = alone[point.batch_rows // point.ranks]
            name = f"weak, {base.batch_rows} rows a rank"
        else:
            continue
        lines.setdefault(name + point.hook, [base]).append(point)
    return lines


def draw_throughput(group: Group) -> Any:
    """Rows a second of each point."""
    figure, [axis] = panels_of(1, max(7.5, 1.6 * len(group.points)))
    colours = {"one rank": "0.45", "strong": COLOURS[0], "weak": COLOURS[1], "unpaired": COLOURS[4]}
    values = [point.number("rows_per_second") for point in group.points]
    bars = axis.bar(
        range(len(values)), values, 0.65, color=[colours[point.mode] for point in group.points]
    )
    axis.bar_label(bars, [f"{value:,.0f}" for value in values], padding=3, fontsize=12)
    axis.set_xticks(range(len(values)), [short(point) for point in group.points], fontsize=12)
    axis.set_ylim(0, 1.12 * max(values))
    axis.set(
        xlabel=f"{unit(group.points[0])}s, rows of a step",
        ylabel="throughput (rows/s)",
        title=f"{group.name}: throughput",
    )
    axis.grid(axis="x", visible=False)
    return figure


def draw_accuracy(group: Group) -> Any:
    """Validation accuracy by epoch: more ranks must not cost any."""
    if not any(record.accuracy for point in group.points for record in point.records):
        return None
    figure, [axis] = panels_of(1, 8.5)
    longest = 1
    for i, point in enumerate(group.points):
        for number, record in enumerate(record for record in point.records if record.accuracy):
            longest = max(longest, len(record.accuracy))
            axis.plot(
                range(1, len(record.accuracy) + 1),
                record.accuracy,
                color=COLOURS[i % 8],
                marker=MARKERS[i % 8],
                linewidth=max(
                    1.5, 7 - 2 * i
                ),  # curves should lie on each other, and the lower one still show
                markersize=max(4, 14 - 3 * i),
                label=named(point) if number == 0 else None,
            )
    axis.set(xlabel="epoch", ylabel="validation accuracy (%)", title=f"{group.name}: accuracy")
    axis.set_xlim(0.5, longest + 0.5)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(fontsize=11)
    return figure


# --- the command -----------------------------------------------------------------------------------------------------


def chosen(records: list[Record], datasets: Sequence[str] | None) -> list[Record]:
    """The records of these tasks, whose names need not have the same case or dashes. Raises:
    ConfigError.
    """
    if datasets is None:
        return records

    def plain(name: str) -> str:
        return re.sub(r"[^a-z0-9]", "", name.lower())

    there = sorted({record.task for record in records})
    for name in datasets:
        if plain(name) not in map(plain, there):
            raise ConfigError(
                f"--datasets {name}: no run of that task. Choices: {', '.join(there) or 'none'}."
            )
    return [record for record in records if plain(record.task) in map(plain, datasets)]


def write(root: Path, out: Path, warmup: int = 1, datasets: Sequence[str] | None = None) -> str:
    """Write the artefacts into `out`; returns the text of performance_report.txt.

    Raises: ConfigError where nothing below `root` can be counted, and, after the texts are written,
    without matplotlib.
    """
    records, incomplete = read(root, warmup)
    records = chosen(records, datasets)
    if not records:
        reasons = "".join(f"\n  {folder}: {reason}" for folder, reason in incomplete)
        raise ConfigError(
            f"--root {root} holds no finished classify run. Make one with python launch.py"
            f" algo=classify{reasons}"
        )
    groups = grouped(records)
    out.mkdir(parents=True, exist_ok=True)
    text = told(groups, incomplete)
    write_csv(groups, out / "comprehensive_summary.csv")
    write_tex(groups, out / "summary_table.tex")
    (out / "performance_report.txt").write_text(text, encoding="utf-8")
    for group in groups:
        draw(group, out, warmup)
    return text


def main() -> int:
    """The command line. Exit codes: 0 done, 2 a mistake."""
    parser = argparse.ArgumentParser(
        "python -m ddp_bench.report", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--root", type=Path, required=True, help="folder with run folders, at any depth"
    )
    parser.add_argument("--out", type=Path, help="where to write; default: ROOT/report")
    parser.add_argument(
        "--warmup", type=int, default=1, help="epochs of each run that do not count; default: 1"
    )
    parser.add_argument(
        "--datasets", nargs="+", metavar="NAME", help="these tasks only; default: all"
    )
    options = parser.parse_args()
    out = options.out or options.root / "report"
    try:
        if options.warmup < 0:
            raise ConfigError(f"--warmup {options.warmup} is too small. Give 0 or more.")
        print(write(options.root, out, options.warmup, options.datasets))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"error: {error.filename} cannot be written: {error.strerror}. Give another --out.",
            file=sys.stderr,
        )
        return 2
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
