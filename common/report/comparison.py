"""OUT/comparison.html: runs side by side as a page, in one file that needs no network; a reader of
what common.report.compare computes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.files import write_text
from common.report.web import render

# Of a setting: its name, how many runs it has, and of its measurements cost, mean and interval.
Curve = tuple[str, int, np.ndarray, np.ndarray, np.ndarray | None]


def describe_kind(
    title: str,
    tables: Sequence[Sequence[Mapping[str, str]]],
    curves: Mapping[str, Sequence[Curve]],
    runs: Mapping[str, Mapping[str, Sequence[Sequence[tuple[float, float]]]]],
) -> dict[str, Any]:
    """Return what the page shows of the runs with one held-out metric.

    Args: tables: rows of settings, and last a row for each run, which is folded; curves: by the
    title of the cost's axis; runs: by that title, then by setting, (cost, value) of each
    measurement of each run.
    """
    return {
        "title": title,
        "tables": [
            {"heads": list(rows[0]), "rows": [list(row.values()) for row in rows]}
            for rows in tables
            if rows
        ],
        "costs": [
            {
                "title": cost,
                "settings": [
                    {
                        "name": name + (f" (mean of {count})" if count > 1 else ""),
                        "at": _plain(x),
                        "y": _plain(mean),
                        "low": None if within is None else _plain(within[:, 0]),
                        "high": None if within is None else _plain(within[:, 1]),
                        "runs": [
                            {"at": [x for x, _ in points], "y": [y for _, y in points]}
                            for points in runs[cost][name]
                        ],
                    }
                    for name, count, x, mean, within in curves_of_cost
                ],
            }
            for cost, curves_of_cost in curves.items()
        ],
    }


def write_comparison(path: Path, kinds: Sequence[dict[str, Any]], failures: Sequence[str]) -> None:
    """Write the page. kinds: of `describe_kind`; failures: what is said of runs without result."""
    write_text(path, render("comparison", {"kinds": list(kinds), "failures": list(failures)}))


def _plain(values: np.ndarray) -> list[float]:
    return [float(f"{value:.7g}") for value in values]
