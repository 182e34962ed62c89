"""Drawing figures to files, in one style. matplotlib is imported when a figure is made: it takes
half a second.

Figures are made without pyplot, so that a notebook keeps its own backend.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

# Okabe and Ito: told apart by the colour-blind.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
# Legible at half size, where a letter of 14 points is one of 7.
STYLE: dict[Any, Any] = {
    "font.size": 14,
    "axes.titlesize": 15,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.axisbelow": True,
    "lines.linewidth": 2.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 12,
}
SIZE = (7.5, 4.8)  # inches
DPI = 110
AREA = (0.15, 0.145, 0.825, 0.665)  # of the axes: left, bottom, width, height
ROW = 66  # letters that a row of a legend has room for
BINS = 800  # points of a curve at most; more are means of neighbours
CONSTANT = 0.01  # of its value: a curve that moves less is drawn as a level one
SMOOTHED = 40  # points from which on a curve has a running mean over it


@contextmanager
def saved(path: Path) -> Iterator[Any]:
    """Yield a matplotlib axis to draw on, and save it as `path` afterwards."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(SIZE, dpi=DPI)
        axis = figure.add_axes(AREA)
        yield axis
        figure.savefig(path)


def lines(
    axis: Any,
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    exact: bool = False,
    breaks: Sequence[float] = (),
) -> None:
    """Draw curves, x and y by legend. Long ones are thin with a running mean over them, unless
    `exact`.

    breaks: places on the x axis that no mean reaches over.
    """
    for number, (legend, (x, y)) in enumerate(curves.items()):
        x, y = binned(x, y)
        colour = COLOURS[number % len(COLOURS)]
        above = {"zorder": 3 - number / 100}  # the first curve is the one that counts
        if exact or len(x) < SMOOTHED:
            size = 8 if len(x) < 15 else 4
            marks = {"marker": "o", "markersize": size} if len(x) < SMOOTHED else {}
            axis.plot(x, y, color=colour, label=legend, **marks, **above)
            continue
        axis.plot(x, y, color=colour, linewidth=1, alpha=0.35, **above)
        reach = len(y) // 20
        for n, (low, high) in enumerate(itertools.pairwise([-math.inf, *breaks, math.inf])):
            part = [(a, b) for a, b in zip(x, y, strict=True) if low <= a < high]
            places, values = [a for a, _ in part], [b for _, b in part]
            label = None if n else legend
            axis.plot(places, running_mean(values, reach), color=colour, label=label, **above)


def stack(axis: Any, x: Sequence[float], layers: Mapping[str, Sequence[float]]) -> None:
    """Draw layers on top of each other, the largest at the bottom."""
    ordered = sorted(layers, key=lambda name: -sum(layers[name]))
    places = binned(x, x)[0]
    means = [running_mean(binned(x, layers[name])[1], len(places) // 20) for name in ordered]
    axis.stackplot(places, means, labels=ordered, colors=COLOURS, linewidth=0)


def bars(axis: Any, categories: Sequence[str], series: Mapping[str, Sequence[float]]) -> None:
    """Draw bars side by side: for each category one of each series."""
    width = 0.8 / len(series)
    for number, (legend, values) in enumerate(series.items()):
        places = [i + (number - (len(series) - 1) / 2) * width for i in range(len(categories))]
        drawn = axis.bar(places, values, width, color=COLOURS[number % len(COLOURS)], label=legend)
        if len(series) <= 4:
            axis.bar_label(drawn, [f"{value:g}" for value in values], padding=2, fontsize=10)
    axis.set_xticks(range(len(categories)), categories)
    axis.grid(axis="x", visible=False)


def finished(axis: Any, title: str, x: str, unit: str, zero: bool) -> None:
    """Add title, axes, and a legend above the data, where it covers none of it."""
    axis.set_xlabel(x)
    axis.set_ylabel(unit)
    axis.margins(x=0.02)
    if zero:
        room = 1.1 if axis.containers else 1.05  # bars have their number above them
        axis.set_ylim(0, room * axis.dataLim.ymax or 1.0)
    low, high = axis.dataLim.ymin, axis.dataLim.ymax
    if not zero and high - low < CONSTANT * max(abs(low), abs(high)):  # noise, made large
        middle, room = (low + high) / 2, 0.1 * max(abs(low), abs(high))
        axis.set_ylim(middle - room, middle + room)
    # no power of ten apart, which a legend would cover
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    handles, labels = axis.get_legend_handles_labels()
    if len(labels) < 2 and not axis.collections:  # one layer of a stack has a name too
        axis.set_title(title, pad=10)
        return
    columns = max(1, min(len(labels), ROW // (max(map(len, labels)) + 5)))
    rows = -(-len(labels) // columns)
    left, bottom, width, height = AREA
    axis.set_position((left, bottom, width, height - 0.052 * (rows - 1)))
    axis.set_title(title, pad=12 + 18 * rows)
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.01, 0.985)}
    gaps = {"handlelength": 1.2, "columnspacing": 1.0, "borderaxespad": 0.2}
    gaps |= {"handletextpad": 0.4, "labelspacing": 0.3}
    axis.legend(handles, labels, ncols=columns, **place, **gaps)


def binned(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return at most BINS points: means of neighbours."""
    size = -(-len(x) // BINS)
    if size <= 1:
        return list(x), list(y)
    parts = [slice(i, i + size) for i in range(0, len(x), size)]
    return [fmean(x[part]) for part in parts], [fmean(y[part]) for part in parts]


def running_mean(values: Sequence[float], reach: int) -> list[float]:
    """Return the mean of each value and of up to `reach` neighbours on each side."""
    sums = list(itertools.accumulate(values, initial=0.0))
    ends = [(max(0, i - reach), min(len(values), i + reach + 1)) for i in range(len(values))]
    return [(sums[stop] - sums[start]) / (stop - start) for start, stop in ends]
