"""Draw the figures of a group: times, speed-up, throughput and accuracy."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from common.report import COLOURS, STYLE
from ddp_bench.report.diagnosis import Group, Point
from ddp_bench.report.records import PHASES

# Markers distinguish curves in print, where colours are lost.
MARKERS = "os^Dv<>P"


def draw_figures(group: Group, out: Path, warmup: int) -> None:
    """Draw the figures that a group has numbers for.

    Args: warmup: the epochs of a run that are left out.
    """
    records = [record for point in group.points for record in point.records]
    draw_times(group, out / f"{group.name}_epoch_time_detailed.png", warmup)
    draw_speedup(group, out / f"{group.name}_speedup_efficiency.png")
    draw_throughput(group, out / f"{group.name}_throughput.png")
    if any(record.accuracy for record in records):
        with _saved(out / f"{group.name}_accuracy.png", 1, 8.5) as [axis]:
            _draw_epochs(axis, group, "accuracy", "validation accuracy (%)", "accuracy")


@contextmanager
def _saved(path: Path, panels: int, width: float = 7.5) -> Iterator[list[Any]]:
    """Yield axes in one row, each `width` inches wide; save them to `path` afterwards."""
    import matplotlib  # half a second
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure((width * panels, 6), layout="constrained")
        yield list(figure.subplots(1, panels, squeeze=False)[0])
        figure.savefig(path, dpi=120)


def draw_times(group: Group, path: Path, warmup: int) -> None:
    """Draw the seconds of each epoch, and next to them the phases of a step."""
    curves = any(record.epochs for point in group.points for record in point.records)
    points = [point for point in group.points if point.phases]
    if not curves and not points:
        return
    with _saved(path, curves + bool(points)) as axes:
        if curves:
            title = "training time of an epoch (s)"
            _draw_epochs(axes[0], group, "epochs", title, "time of an epoch")
            axes[0].set_ylim(0, 1.2 * axes[0].dataLim.ymax)
            if warmup:
                axes[0].axvspan(0.5, warmup + 0.5, color="0.88", label="not counted", zorder=0)
                axes[0].legend(fontsize=11)
        if points:
            axis, bottoms = axes[-1], np.zeros(len(points))
            for name, colour in zip(PHASES, COLOURS, strict=False):
                heights = [1000 * point.phases.get(name, 0.0) for point in points]
                axis.bar(
                    range(len(points)), heights, 0.65, bottom=bottoms, color=colour, label=name
                )
                bottoms += heights
            _name_bars(axis, points)
            axis.set(ylabel="time of a step (ms)", title=f"{group.name}: where a step's time goes")
            axis.set_ylim(0, 1.25 * max(bottoms.max(), 1e-9))
            axis.legend(ncols=3, fontsize=11, loc="upper center")


def draw_speedup(group: Group, path: Path) -> None:
    """Draw speed-up and efficiency by ranks, for strong and weak scaling, with the ideal line."""
    lines: dict[str, list[Point]] = {}  # each begins with the one rank that it compares with
    for point in group.points:
        if point.base is not None:
            whose = "in all" if point.mode == "strong" else "a rank"
            name = f"{point.mode}, {point.base.batch_rows} rows {whose}{point.hook}"
            lines.setdefault(name, [point.base]).append(point)
    if not lines:
        return
    points = [point for line in lines.values() for point in line]
    ranks = sorted({point.ranks for point in points})
    with _saved(path, 2) as axes:
        axes[0].plot(ranks, ranks, "--", color="0.4", label="ideal")
        axes[1].axhline(100, linestyle="--", color="0.4", label="ideal")
        axes[1].axhline(80, linestyle=":", color="0.4", label="80 %: excellent")
        shown = (("speedup", "{:.2f}x", "speed-up (x)"), ("efficiency", "{:.0f} %", "efficiency"))
        for axis, (name, text, title) in zip(axes, shown, strict=True):
            for i, (label, line) in enumerate(lines.items()):
                values = [getattr(point, name) for point in line]
                axis.plot([point.ranks for point in line], values, label=label, **_style(i))
            # The lowest is labelled below and the highest above, so that no two meet.
            for place in ranks[1:]:
                there = sorted(getattr(point, name) for point in points if point.ranks == place)
                for value, offset in {there[-1]: 10, there[0]: -22}.items():
                    where = {"xytext": (0, offset), "textcoords": "offset points", "ha": "center"}
                    axis.annotate(text.format(value), (place, value), fontsize=12, **where)
            axis.set(xlabel=f"{group.points[0].unit}s", title=f"{group.name}: {title}")
            axis.set_ylim(0, 1.15 * axis.dataLim.ymax)
            axis.set_xticks(ranks)
            axis.margins(x=0.12)
            axis.legend(fontsize=12)


def draw_throughput(group: Group, path: Path) -> None:
    """Draw the rows per second of each point."""
    colours = {"one rank": "0.45", "strong": COLOURS[0], "weak": COLOURS[1], "unpaired": COLOURS[4]}
    values = [point.number("rows_per_second") for point in group.points]
    chosen = [colours[point.mode] for point in group.points]
    with _saved(path, 1, max(7.5, 1.6 * len(group.points))) as [axis]:
        bars = axis.bar(range(len(values)), values, 0.65, color=chosen)
        axis.bar_label(bars, [f"{value:,.0f}" for value in values], padding=3, fontsize=12)
        _name_bars(axis, group.points)
        axis.set(ylabel="throughput (rows/s)", title=f"{group.name}: throughput")
        axis.set_ylim(0, 1.12 * max(values))
        axis.grid(axis="x", visible=False)


def _style(i: int) -> dict[str, Any]:
    return {"color": COLOURS[i % 8], "marker": MARKERS[i % 8], "markersize": 9}


def _draw_epochs(axis: Any, group: Group, name: str, unit: str, title: str) -> None:
    """Draw a number of each record by epoch, with one legend entry per point."""
    for i, point in enumerate(group.points):
        mode = (f", {point.mode}" if point.base is not None else "") + point.hook
        label = f"{point.named}{mode}\n({point.batch_rows} rows a step)"
        for record in point.records:
            if values := getattr(record, name):
                # Curves may lie on each other, and the lower one is still to show.
                style = _style(i) | {"linewidth": max(1.5, 5 - i), "label": label}
                axis.plot(range(1, len(values) + 1), values, **style)
                label = None
    axis.set(xlabel="epoch", ylabel=unit, title=f"{group.name}: {title}")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(fontsize=11)


def _name_bars(axis: Any, points: list[Point]) -> None:
    modes = [f"{point.mode}{point.hook}" if point.base is not None else "" for point in points]
    names = [f"{p.ranks}\n{p.batch_rows} rows\n{m}" for p, m in zip(points, modes, strict=True)]
    axis.set_xticks(range(len(points)), names, fontsize=12)
    axis.set_xlabel(f"{points[0].unit}s, rows of a step")
