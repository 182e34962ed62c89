"""Drawing figures to files, in one style. matplotlib is imported when a figure is made: it takes
half a second.

Figures are made without pyplot, so that a notebook keeps its own backend.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
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
CONSTANT = 0.01  # of its value: a curve that moves less is drawn as a level one


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


def lines(axis: Any, curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> None:
    """Draw curves of few points, x and y by legend."""
    for (legend, (x, y)), colour in zip(curves.items(), COLOURS, strict=False):
        axis.plot(x, y, color=colour, label=legend, marker="o", markersize=8)


def finished(axis: Any, title: str, x: str, unit: str, zero: bool) -> None:
    """Add title, axes, and a legend above the data, where it covers none of it."""
    axis.set_xlabel(x)
    axis.set_ylabel(unit)
    axis.margins(x=0.02)
    if zero:
        axis.set_ylim(0, 1.05 * axis.dataLim.ymax or 1.0)
    low, high = axis.dataLim.ymin, axis.dataLim.ymax
    if not zero and high - low < CONSTANT * max(abs(low), abs(high)):  # noise, made large
        middle, room = (low + high) / 2, 0.1 * max(abs(low), abs(high))
        axis.set_ylim(middle - room, middle + room)
    # no power of ten apart, which a legend would cover
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    handles, labels = axis.get_legend_handles_labels()
    if len(labels) < 2:
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
