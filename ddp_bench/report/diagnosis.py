"""Compare records with the run of one rank: speed-up, what holds the ranks back, and what to do."""

import json
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from ddp_bench.report.records import PHASES, Record

ENOUGH = 1.2  # a speed-up below it is not worth a second device


@dataclass
class Point:
    """Records of the same ranks and batch; a number of it is their median."""

    records: list[Record]
    mode: str = "one rank"  # strong | weak | unpaired: no run of one rank to compare with
    speedup: float | None = None
    free: float | None = None  # the speed-up if communication took no time
    causes: list[str] = field(default_factory=list)  # the largest first
    advice: list[tuple[float, str]] = field(default_factory=list)  # predicted gain, what to do
    foreseen: float | None = None  # seconds of a step that algo=predict told for this point

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
        """The compression of gradients, for people: ", hook fp16", or nothing."""
        name = self.records[0].wrapper.get("hook", "none")
        return "" if name == "none" else f", hook {name}"

    @property
    def efficiency(self) -> float | None:
        """Percent of the ideal speed-up."""
        return None if self.speedup is None else 100 * self.speedup / self.ranks

    @property
    def error(self) -> float | None:
        """Percent by which the prediction is above what was measured."""
        foreseen = self.foreseen
        return None if foreseen is None else 100 * (foreseen / self.number("step_p50") - 1)

    @property
    def how(self) -> str:
        """The source of its numbers: measured or predicted."""
        return "predicted" if self.records[0].predicted else "measured"

    @property
    def cores(self) -> int | None:
        """Cores that the ranks share on a CPU; None on a GPU."""
        found = re.search(r"\((\d+) cores\)$", self.records[0].device)
        return int(found[1]) if found else None

    @property
    def unit(self) -> str:
        """The name of what a rank runs on, for people."""
        return "GPU" if self.cores is None else "worker"

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of a step by phase."""
        return {
            name: statistics.median(record.phases.get(name, 0.0) for record in self.records)
            for name in PHASES
            if any(name in record.phases for record in self.records)
        }

    def median(self, name: str) -> float | None:
        """Return the median of a number over the records that have it."""
        values = [value for record in self.records if (value := getattr(record, name)) is not None]
        return statistics.median(values) if values else None

    def number(self, name: str) -> float:
        """Return the median of a number that every record has."""
        return statistics.median(getattr(record, name) for record in self.records)

    def seconds(self, *names: str) -> float:
        """Return the seconds of these phases of a step together."""
        return sum(self.phases.get(name, 0.0) for name in names)


@dataclass
class Group:
    """One task with one set of settings. name: in file names; points: by mode, then ranks. All
    predicted, or all measured.
    """

    name: str
    task: str
    model: str
    points: list[Point]


def group_records(records: Iterable[Record]) -> list[Group]:
    """Return the records by task, settings and device, with speed-up, cause and advice at each
    point.

    Predictions stand beside what was measured with the same settings; those of devices without any
    are groups of their own.
    """
    by_key: dict[tuple[str, str, str, str, bool], list[Record]] = {}
    for record in records:
        key = (record.task, record.model, record.group, record.device, record.predicted)
        by_key.setdefault(key, []).append(record)
    foreseen: dict[tuple[str, str, str, str, bool], list[Record]] = {}
    for key in [key for key in by_key if key[-1]]:
        first = by_key[key][0]
        measured = [k for k in by_key if not k[-1] and k[:3] == key[:3] and _is_for(first, k[3])]
        if measured:
            members = by_key.pop(key)
            for one in measured:
                foreseen.setdefault(one, []).extend(members)
    groups, names = [], {}
    tasks = [key[0] for key in by_key]
    for key, members in sorted(by_key.items()):
        task, model, *_, is_predicted = key
        name = task if tasks.count(task) == 1 else f"{task}-{re.sub(r'[^A-Za-z0-9]+', '-', model)}"
        name += "-predicted" * is_predicted
        names[name] = names.get(name, 0) + 1
        name = name if names[name] == 1 else f"{name}-{names[name]}"
        groups.append(Group(name, task, model, _make_points(members, foreseen.get(key, []))))
    return groups


def _is_for(predicted: Record, device: str) -> bool:
    """Return whether a prediction is for this device."""
    if predicted.match:
        return predicted.match.lower() in device.lower()
    return predicted.device == device


def _make_points(members: list[Record], foreseen: list[Record]) -> list[Point]:
    def cell(record: Record) -> tuple[int, int, str]:
        return record.ranks, record.batch_rows, json.dumps(record.wrapper, sort_keys=True)

    cells: dict[tuple[int, int, str], list[Record]] = {}
    for record in members:
        cells.setdefault(cell(record), []).append(record)
    by_cell = {place: Point(found) for place, found in sorted(cells.items())}
    points = list(by_cell.values())
    for place, point in by_cell.items():
        compare_point(point, points)
        seconds = [record.step_p50 for record in foreseen if cell(record) == place]
        point.foreseen = statistics.median(seconds) if seconds else None
    order = ("one rank", "strong", "weak", "unpaired")
    return sorted(points, key=lambda p: (order.index(p.mode), p.ranks, p.batch_rows))


def compare_point(point: Point, points: list[Point]) -> None:
    """Fill in what a point is against the run of one rank."""
    alone = {other.batch_rows: other for other in points if other.ranks == 1}
    if point.ranks == 1:
        point.speedup = 1.0
        return
    rows_per_rank, rest = divmod(point.batch_rows, point.ranks)
    if point.batch_rows in alone:
        point.mode, base = "strong", alone[point.batch_rows]
    elif not rest and rows_per_rank in alone:
        point.mode, base = "weak", alone[rows_per_rank]
    else:
        point.mode = "unpaired"
        return
    point.speedup = point.number("rows_per_second") / base.number("rows_per_second")
    if point.phases:
        waited = measure_losses(point, base)["communication"]
        # Seconds that one rank takes for the rows of this step.
        ideal = base.number("step_p50") * point.batch_rows / base.batch_rows
        point.free = ideal / max(1e-12, point.number("step_p50") - waited)
    point.causes = find_causes(point, base, points)
    point.advice = advise(point, base, points)


def measure_losses(point: Point, base: Point) -> dict[str, float]:
    """Return the seconds of a step above the ideal one, by cause: what the base takes, for each
    rank's share of the rows.
    """
    here, alone = point.phases, base.phases
    share = 1 / point.ranks if point.mode == "strong" else 1.0

    def more(*names: str) -> float:
        return max(0.0, sum(here.get(name, 0.0) - share * alone.get(name, 0.0) for name in names))

    return {
        "communication": point.seconds("communication") + point.seconds("exchange"),
        "loader": more("data"),
        "compute": more("forward", "backward", "optimizer"),
    }


def find_causes(point: Point, base: Point, points: list[Point]) -> list[str]:
    """Return what holds the ranks back, the largest first; nothing where nothing does, or where
    there are no phases to tell by.
    """
    if not (point.phases and base.phases) or (point.efficiency or 0) >= 90:
        return []
    parts, total = measure_losses(point, base), point.number("step_p50")
    # Fewer rows, or as many, cannot take a device longer: something is shared. As many tell it
    # best.
    like = find_same_share(point, base, points) or point
    crowded = like.seconds("forward", "backward") > 1.1 * base.seconds("forward", "backward")
    cores, threads = point.cores, point.records[0].threads
    if cores is not None:
        # Without fixed threads the one rank had all cores, and these have a part of them.
        crowded = crowded or threads is None or point.ranks * threads > cores
    names = {
        "communication": "communication-bound",
        "loader": "loader-bound",
        "compute": "oversubscribed cores" if crowded else "launch-bound",
    }
    order = [name for name in sorted(parts, key=lambda n: -parts[n]) if parts[name] > 0.05 * total]
    # Ranks that get too few cores also wait longer for each other, which looks like communication.
    forced = cores is not None and point.ranks * (threads or 1) > cores
    assert point.free is not None
    first = forced or (crowded and cores is not None) or (point.free < ENOUGH and not crowded)
    if "compute" in order and first:
        order.remove("compute")
        order.insert(0, "compute")
    elif forced:
        return ["oversubscribed cores", *(names[name] for name in order)]
    return [names[name] for name in order]


def find_same_share(point: Point, base: Point, points: list[Point]) -> Point | None:
    """Return the point of as many ranks where each has as many rows as the one rank."""
    wanted = (point.ranks, point.ranks * base.batch_rows, point.hook)
    return next((p for p in points if (p.ranks, p.batch_rows, p.hook) == wanted), None)


def advise(point: Point, base: Point, points: list[Point]) -> list[tuple[float, str]]:
    """Return the gain in rows per second, and what to do, the best first. Less than 5 % is not
    worth a line.
    """
    found = []
    if point.phases and base.phases and point.causes:
        found = [item for item in _advise_changes(point, base, points) if item[0] >= 1.05]
    return sorted(_advise_fewer(point, base, points) + found, key=lambda item: -item[0])


def _advise_fewer(point: Point, base: Point, points: list[Point]) -> list[tuple[float, str]]:
    """Return whether one rank, or fewer than these, would do."""

    def speed(p: Point) -> float:
        return p.number("rows_per_second")

    rivals = [p for p in points if 1 < p.ranks < point.ranks and p.mode == point.mode]
    best = max((p for p in points if p is base or p in rivals), key=speed)
    if (point.speedup or 0) < ENOUGH and speed(best) < ENOUGH * speed(base):
        gain = speed(base) / speed(point)
        # It stands even where it is a little slower: it costs a part.
        given = "" if gain >= 1 else f": {point.ranks} give only {1 / gain:.2f}x"
        return [(gain, f"use one {point.unit}{given} ({point.how})")]
    if speed(best) > 1.05 * speed(point):
        plural = "s" * (best.ranks > 1)
        text = f"use {best.ranks} {point.unit}{plural} ({point.how})"
        return [(speed(best) / speed(point), text)]
    return []


def _advise_changes(point: Point, base: Point, points: list[Point]) -> list[tuple[float, str]]:
    """Return what each change of a setting would give, by what it would take off the phases."""
    step, parts, cause = point.number("step_p50"), measure_losses(point, base), point.causes[0]
    data, communication = point.seconds("data"), point.seconds("communication")

    def gain_without(seconds: float) -> float:
        return step / max(step - seconds, 1e-12)

    found: list[tuple[float, str]] = []
    same = find_same_share(point, base, points)
    if point.mode == "strong" and (same or cause in ("launch-bound", "communication-bound")):
        # Each rank then computes as many rows as the one rank did, and sends as often.
        larger = parts["communication"] + point.ranks * data
        larger += base.seconds("forward", "backward", "optimizer")
        gain, how = point.ranks * step / max(larger, 1e-12), "predicted"
        if same:
            gain = same.number("rows_per_second") / point.number("rows_per_second")
            how = same.how
        text = f"algo.batch_size={point.ranks * point.batch_rows}: more rows a rank; raise"
        found.append((gain, f"{text} algo.lr, check accuracy ({how})"))
    if "loader-bound" in point.causes:
        found.append((gain_without(data), "more algo.loader.workers (predicted, at best)"))
    shared = cause == "oversubscribed cores"
    if "communication-bound" in point.causes and not shared and not point.hook:
        text = "algo.ddp.hook=fp16: half the bytes; check accuracy (predicted, at best)"
        found.append((gain_without(communication / 2), text))
    if cause == "launch-bound" and point.cores is None:
        text = "opt=[compile]: fewer launches (predicted, at best)"
        found.append((gain_without(parts["compute"]), text))
    return found
