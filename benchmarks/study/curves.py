"""The curves of a study: the held-out measure by generated tokens, with the range of its seeds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.report import COLOURS, DPI, PLAIN

ACROSS = 3  # panels in a row
Record = dict[str, Any]


def find_curve(runs: Sequence[Record]) -> tuple[np.ndarray, np.ndarray]:
    """Return thousands of tokens [41], and the mean, least and greatest measure of the runs [3,
    41]. Measures are interpolated between measurements, and constant after the last one.
    """
    points = [np.array(run["points"], dtype=float) for run in runs if run["points"]]
    at = np.linspace(0, max(one[-1, 1] for one in points), 41)
    values = np.array([np.interp(at, one[:, 1], one[:, 3]) for one in points])
    return at / 1000, np.array([values.mean(0), values.min(0), values.max(0)])


def draw(panels: Mapping[str, Mapping[str, Sequence[Record]]], path: Path) -> None:
    """Plot a panel per combination, with a line per compared value. panels: the runs by title and
    by value.
    """
    import matplotlib
    from matplotlib.figure import Figure

    rows = -(-len(panels) // ACROSS)
    across = min(len(panels), ACROSS)
    names = list(dict.fromkeys(name for groups in panels.values() for name in groups))
    with matplotlib.rc_context(PLAIN):
        figure = Figure((4.4 * across, 3.6 * rows + 0.5), dpi=DPI, layout="constrained")
        axes = figure.subplots(rows, across, squeeze=False).flatten()
        for axis, (title, groups) in zip(axes, panels.items(), strict=False):
            for name, runs in groups.items():
                at, (mean, least, greatest) = find_curve(runs)
                colour = COLOURS[names.index(name) % len(COLOURS)]
                axis.plot(at, mean, color=colour, label=name)
                axis.fill_between(at, least, greatest, color=colour, alpha=0.15, linewidth=0)
            measure = next(iter(groups.values()))[0]["metric"]
            axis.set_title(title)
            axis.set_ylabel(measure)
            axis.set_xlabel("thousands of generated tokens")
            axis.set_ylim(bottom=0)
            axis.margins(x=0.02)
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        drawn = {
            label: handle
            for axis in axes[: len(panels)]
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        figure.legend(drawn.values(), drawn.keys(), loc="outside upper left", ncols=len(drawn))
        figure.savefig(path)
