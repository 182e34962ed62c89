"""Draw figures to files, in one style. matplotlib is imported when a figure is made, since the
import takes half a second.

Figures are made without pyplot, so that a notebook keeps its own backend.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# The palette of Okabe and Ito, which the colour-blind can distinguish.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
# Legible at half size, at which a letter of 14 points has 7.
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
# For names with any text, in which two dollar signs are no formula.
PLAIN: dict[Any, Any] = {**STYLE, "text.parse_math": False}
SIZE = (7.5, 4.8)  # inches
DPI = 110


@contextmanager
def saved(path: Path, title: str, x: str, unit: str) -> Iterator[Any]:
    """Yield a matplotlib axis to draw on, then save the figure to `path`, with a legend below."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(SIZE, dpi=DPI, layout="constrained")
        axis = figure.add_subplot(title=title, xlabel=x, ylabel=unit)
        axis.margins(x=0.02)
        yield axis
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")  # no power of ten apart
        figure.legend(loc="outside lower left", ncols=2)
        figure.savefig(path)
