"""Compare records with the run of one rank: speed-up, the causes of lost efficiency, and advice."""

import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ddp_bench.report.records import PHASES, Record

ENOUGH = 1.2  # a speed-up below it is not worth a second device
COMPUTED = ("forward", "backward")


@dataclass
class Point:
    """Records with the same ranks and batch; numbers are medians over the records."""

    records: list[Record]
    mode: str = "one rank"  # strong | weak | unpaired: no run of one rank to compare with
    base: "Point | None" = None  # the run of one rank
    speedup: float | None = None
    free: float = 0.0  # the speed-up if communication took no time
    causes: list[str] = field(default_factory=list)  # the largest first
    advice: list[tuple[float, str]] = field(default_factory=list)  # (predicted gain, advice)
    foreseen: float | None = None  # the seconds of a step that algo=predict predicted

    def __post_init__(self) -> None:
        first = self.records[0]
        self.ranks, self.batch_rows = first.ranks, first.batch_rows  # of a step, of all ranks
        hook = first.wrapper.get("hook", "none")
        # The format of exchanged gradients, for people.
        self.hook = "" if hook == "none" else f", hook {hook}"
        self.hook += ", fsdp" if "fsdp" in first.wrapper else ""
        self.how = "predicted" if first.predicted else "measured"
        cores = re.search(r"\((\d+) cores\)$", first.device)
        self.cores = int(cores[1]) if cores else None  # that the ranks share; None on a GPU
        self.unit = "worker" if cores else "GPU"
        self.named = f"{self.ranks} {self.unit}{'s' * (self.ranks > 1)}"
        # Seconds of a step: the median, the mean, and the parts of that; rows per second.
        self.step, self.speed = self.number("step_p50"), self.number("rows_per_second")
        self.mean_step = self.step if (mean := self.number("step_mean")) is None else mean
        self.phases = {
            name: statistics.median(record.phases.get(name, 0.0) for record in self.records)
            for name in PHASES
            if any(name in record.phases for record in self.records)
        }

    @property
    def efficiency(self) -> float | None:
        """The speed-up in percent of the ideal one."""
        return None if self.speedup is None else 100 * self.speedup / self.ranks

    @property
    def error(self) -> float | None:
        """The percentage by which the prediction exceeds the measurement."""
        return None if self.foreseen is None else 100 * (self.foreseen / self.step - 1)

    def number(self, name: str) -> Any:
        """Return the median of a number over the records that have it; None if no record has it."""
        values = [value for record in self.records if (value := getattr(record, name)) is not None]
        return statistics.median(values) if values else None

    def seconds(self, *names: str) -> float:
        """Return the sum of the seconds of these phases of a step."""
        return sum(self.phases.get(name, 0.0) for name in names)


@dataclass
class Group:
    """One task with one set of settings.

    Attributes:
        name: the name of the group.
        task: the name of the task.
        model: the name of the model.
        points: its points, all predicted, or all measured.
    """

    name: str
    task: str
    model: str
    points: list[Point]


def group_records(records: Iterable[Record]) -> list[Group]:
    """Group the records by task, settings and device. Predictions join the measurements with the
    same settings; predictions without a measurement form groups of their own.
    """
    measured, predicted, foreseen = defaultdict(list), defaultdict(list), defaultdict(list)
    for record in records:
        key = (record.task, record.model, record.group, record.device)
        (predicted if record.predicted else measured)[key].append(record)
    for key, guesses in list(predicted.items()):
        match, known = guesses[0].match, set()
        for other in measured:
            here = other[3] == key[3] if match is None else match.lower() in other[3].lower()
            if other[:3] == key[:3] and here:
                foreseen[other] += guesses
                known |= {_find_cell(record) for record in measured[other]}
        if known >= {_find_cell(guess) for guess in guesses}:
            del predicted[key]
        elif known:  # the rest, with the run of one rank that it is compared with
            left = [g for g in guesses if g.ranks == 1 or _find_cell(g) not in known]
            predicted[key] = left
    groups, names = [], Counter()
    tasks = [key[0] for key in (*measured, *predicted)]
    for by_key, suffix in ((measured, ""), (predicted, "-predicted")):
        for key, members in sorted(by_key.items()):
            task, model = key[:2]
            slug = "" if tasks.count(task) == 1 else f"-{re.sub(r'[^A-Za-z0-9]+', '-', model)}"
            name = f"{task}{slug}{suffix}"
            names[name] += 1
            name = name if names[name] == 1 else f"{name}-{names[name]}"
            groups.append(Group(name, task, model, _make_points(members, foreseen[key])))
    return groups


def _find_cell(record: Record) -> tuple[int, int, str]:
    return record.ranks, record.batch_rows, json.dumps(record.wrapper, sort_keys=True)


def _make_points(members: list[Record], foreseen: list[Record]) -> list[Point]:
    cells, guesses = defaultdict(list), defaultdict(list)
    for by_cell, records in ((cells, members), (guesses, foreseen)):
        for record in records:
            by_cell[_find_cell(record)].append(record)
    points = []
    for cell, records in sorted(cells.items()):
        seconds = [record.step_p50 for record in guesses[cell]]
        points.append(Point(records, foreseen=statistics.median(seconds) if seconds else None))
    for point in points:
        compare_point(point, points)
    order = ("one rank", "strong", "weak", "unpaired")
    return sorted(points, key=lambda p: (order.index(p.mode), p.ranks, p.batch_rows))


def compare_point(point: Point, points: list[Point]) -> None:
    """Add speed-up, efficiency and causes relative to the run of one rank."""
    if point.ranks == 1:
        point.speedup = 1.0
        return
    alone = {other.batch_rows: other for other in points if other.ranks == 1}
    if point.batch_rows in alone:
        point.mode, base = "strong", alone[point.batch_rows]
    elif point.batch_rows / point.ranks in alone:
        point.mode, base = "weak", alone[point.batch_rows // point.ranks]
    else:
        point.mode = "unpaired"
        return
    point.base, point.speedup = base, point.speed / base.speed
    if point.phases:
        waited = point.seconds("communication", "exchange")
        # Seconds that one rank takes for the rows of this step.
        ideal = base.mean_step * point.batch_rows / base.batch_rows
        point.free = ideal / max(1e-12, point.mean_step - waited)
    wanted = (point.ranks, point.ranks * base.batch_rows, point.hook)
    # The point with the same number of ranks, each with as many rows as the one rank has.
    same = next((p for p in points if (p.ranks, p.batch_rows, p.hook) == wanted), None)
    if point.phases and base.phases:
        point.causes = find_causes(point, base, same)
    advice = _advise_changes(point, base, same) if point.causes else []
    advice = _advise_fewer(point, base, points) + [item for item in advice if item[0] >= 1.05]
    point.advice = sorted(advice, key=lambda item: -item[0])


def measure_losses(point: Point, base: Point) -> dict[str, float]:
    """Return the seconds of a step that exceed the base's seconds for each rank's
    share, by cause.
    """
    share = 1 / point.ranks if point.mode == "strong" else 1.0

    def more(*names: str) -> float:
        return max(0.0, point.seconds(*names) - share * base.seconds(*names))

    return {
        "communication": point.seconds("communication", "exchange"),
        "loader": more("data"),
        "compute": more(*COMPUTED, "optimizer"),
    }


def find_causes(point: Point, base: Point, same: Point | None) -> list[str]:
    """Return the causes of lost efficiency, the largest first; empty if the efficiency is 90 % or
    more.
    """
    if (point.efficiency or 0) >= 90:
        return []
    parts = measure_losses(point, base)
    # Fewer or equally many rows cannot take a device longer unless something is shared. The point
    # with equally many rows shows it best.
    crowded = (same or point).seconds(*COMPUTED) > 1.1 * base.seconds(*COMPUTED)
    cores, threads = point.cores, point.records[0].threads
    # Ranks that get too few cores also wait longer for each other, which looks like communication.
    forced = cores is not None and point.ranks * (threads or 1) > cores
    # Without fixed threads the one rank had all cores, and these have a part of them.
    crowded = crowded or forced or (cores is not None and threads is None)
    names = {
        "communication": "communication-bound",
        "loader": "loader-bound",
        "compute": "oversubscribed cores" if crowded else "launch-bound",
    }
    order = sorted((n for n in parts if parts[n] > 0.05 * point.mean_step), key=lambda n: -parts[n])
    first = cores is not None if crowded else point.free < ENOUGH
    if first and (forced or "compute" in order):
        order = ["compute", *(name for name in order if name != "compute")]
    return [names[name] for name in order]


def _advise_fewer(point: Point, base: Point, points: list[Point]) -> list[tuple[float, str]]:
    """Return the advice to use one rank, or fewer than these, if they would do, with the gain in
    rows per second.
    """
    rivals = [p for p in points if 1 < p.ranks < point.ranks and p.mode == point.mode]
    best = max((base, *rivals), key=lambda p: p.speed)
    if (point.speedup or 0) < ENOUGH and best.speed < ENOUGH * base.speed:
        gain = base.speed / point.speed
        # The advice also holds if it is a little slower, since it costs only a part.
        evidence = "" if gain >= 1 else f": {point.ranks} give only {1 / gain:.2f}x"
        return [(gain, f"use one {point.unit}{evidence} ({point.how})")]
    gain = best.speed / point.speed
    return [(gain, f"use {best.named} ({point.how})")] if gain > 1.05 else []


def _advise_changes(point: Point, base: Point, same: Point | None) -> list[tuple[float, str]]:
    """Return advice on settings, each with its predicted gain, from the seconds that it would save
    in the phases.
    """
    parts, cause = measure_losses(point, base), point.causes[0]
    data, communication = point.seconds("data"), point.seconds("communication")

    def gain_without(seconds: float) -> float:
        return point.mean_step / max(point.mean_step - seconds, 1e-12)

    advice: list[tuple[float, str]] = []
    if point.mode == "strong" and (same or cause in ("launch-bound", "communication-bound")):
        # Each rank then computes as many rows as the one rank did, with the same number of sends.
        larger = parts["communication"] + point.ranks * data
        larger += base.seconds(*COMPUTED, "optimizer")
        gain, how = point.ranks * point.mean_step / max(larger, 1e-12), "predicted"
        if same:
            gain, how = same.speed / point.speed, same.how
        text = f"algo.batch_size={point.ranks * point.batch_rows}: more rows a rank; raise"
        advice.append((gain, f"{text} algo.lr, check accuracy ({how})"))
    if "loader-bound" in point.causes:
        advice.append((gain_without(data), "more algo.loader.workers (predicted, at best)"))
    if "communication-bound" in point.causes and cause != "oversubscribed cores" and not point.hook:
        text = "algo.ddp.hook=fp16: half the bytes; check accuracy (predicted, at best)"
        advice.append((gain_without(communication / 2), text))
    first = point.records[0]
    can_compile = not first.compiled and "V100" not in first.device  # torch.compile needs Ampere
    if cause == "launch-bound" and point.cores is None and can_compile:
        text = "opt=[compile]: fewer launches (predicted, at best)"
        advice.append((gain_without(parts["compute"]), text))
    return advice
