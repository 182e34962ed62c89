"""RUN/report.html: the report of a run as an interactive page, in one file that needs no network.

The template, its style, its scripts and uPlot (MIT), which draws the curves, are in
common/assets/report; the numbers are in the file as JSON. `common.report.serve` shows the same page
for running runs.
"""

import json
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.report import completions, panels
from common.report.run_folder import (
    RESULT,
    arguments,
    columns,
    find_facts,
    find_measures,
    find_next,
    find_phases,
    find_settings,
    find_title,
    find_warnings,
    load,
    read_run,
    seconds_before,
)
from common.system import EVALUATION, EVALUATIONS, OVERRIDES, events, has_stages

ASSETS = Path(__file__).resolve().parents[1] / "assets" / "report"
STYLES = ("uPlot.css", "page.css")
SHARED = ("uPlot.js", "parts.js", "curves.js")
PAGES = {  # their scripts, the one that fills it last
    "page": (*SHARED, "completions.js", "page.js"),
    "comparison": (*SHARED, "comparison.js"),
}
POINTS = 1500  # the most points of a curve; no screen shows more
ALL_POINTS = 40_000  # the most points of all curves
LARGEST = 1e300  # larger values are left out, since their sums are infinite

Events = Sequence[dict[str, Any]]
Data = dict[str, Any]


def make_page(data: Data) -> str:
    """Return the text of report.html.

    Args: data: the result of `read_data`.
    """
    return render("page", {"live": False, "runs": [data]})


def read_data(folder: Path) -> Data:
    """Return all data of a run's report. Raises: ConfigError if a file is damaged."""
    saved = read_run(folder, "config", "versions", "commit", "device")
    result = load(folder / "result.json", RESULT)  # None if the run has not ended
    history = events(folder / "metrics.jsonl")
    evaluations = events(folder / EVALUATIONS, EVALUATION)
    steps, done = saved["config"]["algo"].get("steps"), history[-1]["step"] if history else 0
    title, measured = find_title(folder, saved, result)
    measures = find_measures(result, evaluations)
    has_command = (folder / OVERRIDES).exists()
    unit = "event" if has_stages(history) else "step"
    training = completions.read_training(folder)
    return {
        "name": folder.resolve().name,
        "title": title,
        "measured": measured,
        "ended": result is not None,
        "logged": f"{done}{f' of {steps}' if steps else ''} {unit}s",
        "verdict": (result or {}).get("verdict") or "",
        "next": find_next(result or {}),
        "command": f"python launch.py {shlex.join(arguments(folder))}" if has_command else "",
        "measures": {
            "heads": list(measures[0]) if measures else [],
            "rows": [list(row.values()) for row in measures],
        },
        "tables": find_tables(saved["config"]["algo"]["name"], history),
        "panels": find_curves(
            saved["config"]["algo"]["name"], history, evaluations, seconds_before(history, result)
        ),
        "phases": [list(row.values()) for row in find_phases(history)],
        "facts": [list(pair) for pair in find_facts(saved, result, history).items()],
        "warnings": find_warnings(folder / "run.log"),
        "settings": find_settings(folder, saved["config"]),
        "completions": completions.find_held_out(folder / "completions"),
        "training": completions.find_training(training),
        "prompts": completions.find_prompts(
            training, saved["config"].get("task", {}).get("right_at", 1.0)
        ),
        "unit": unit,
    }


def render(name: str, data: Data) -> str:
    """Return one of `PAGES`: the common frame with the page's body, style, scripts and data."""
    parts = {
        "body": _read(f"{name}.html"),
        "style": "\n".join(map(_read, STYLES)),
        "data": encode(data),
        "scripts": "\n".join(f"<script>{_read(script)}</script>" for script in PAGES[name]),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _read("frame.html"))


def _read(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def encode(data: Data) -> str:
    """Return data as JSON for a page, escaped so that no text of a model can end the element that
    contains it.
    """
    text = json.dumps(data, ensure_ascii=False, allow_nan=False)
    text = text.replace("</", "<\\/").replace("<!--", "\\u003c!--")
    return text.encode("utf-8", "replace").decode()  # without halves of characters


# --- curves


def find_curves(algo: str, history: Events, evaluations: Events, began: float) -> list[Data]:
    """Return the panels of an algorithm with their curves: values against the panel's x axis,
    generated tokens and seconds of training, as far as the events have them.

    Args: began: the seconds of training before the first event.
    """
    logged, measured, places = columns(history), columns(evaluations), find_places(history, began)
    shown = [
        (panel, measured if any("metrics/" in name for name in panel.curves) else logged)
        for panel in panels.find_panels().get(algo, ())
        if panel.kind != "bars"
    ]
    count = sum(len(panel.found(list(points))) for panel, points in shown)
    most = min(POINTS, ALL_POINTS // max(1, count))
    curves = []
    for panel, points in shown:
        series = [
            {"name": legend, **find_curve(points[name], panel, places, most)}
            for name, legend in panel.found(list(points)).items()
        ]
        if panel.kind == "stack":  # lines that stay at nothing would fill the legend
            least = 0.002 * sum(sum(one["y"]) for one in series)
            series = [one for one in series if sum(one["y"]) > least]
        about = {"title": panel.title, "unit": panel.unit, "zero": panel.zero, "exact": panel.exact}
        about |= {"x": panel.axis(history), "series": [one for one in series if one["y"]]}
        curves.append(about)
    return curves


def find_tables(algo: str, history: Events) -> list[Data]:
    """Return the distributions of an algorithm as tables, with a row per iteration."""
    logged, tables = columns(history), []
    for panel in panels.find_panels().get(algo, ()):
        shown = panel.found(list(logged)) if panel.kind == "bars" else {}
        if shown:
            counts = zip(*(logged[name] for name in shown), strict=True)
            rows = [
                [str(row[0][0]["iteration"]), *(f"{count:g}" for _, count in row)] for row in counts
            ]
            tables.append(
                {"title": panel.title, "heads": ["iteration", *shown.values()], "rows": rows}
            )
    return tables


def find_places(history: Events, began: float) -> dict[int, tuple[float | None, float]]:
    """Return by step the tokens generated until then (None if they are not counted), and the
    seconds of training, `began` of which are before the first event.
    """
    counts = any("generated_tokens" in event for event in history)
    tokens, seconds = (0.0 if counts else None), began
    places: dict[int, tuple[float | None, float]] = {0: (tokens, 0.0)}
    for event in history:
        took = event.get("seconds") or 0.0
        seconds += took if math.isfinite(took) else 0.0
        tokens = event.get("generated_tokens", tokens)
        places[event["step"]] = (tokens, seconds)
    return places


def find_curve(
    column: list[tuple[Data, float]],
    panel: panels.Panel,
    places: dict[int, tuple[float | None, float]],
    most: int = POINTS,
) -> dict[str, list[float]]:
    """Return the finite values of a measure, and their x values.

    Each value is one that was logged. Of more than `most` values, the lowest and the highest of
    each group of neighbours are kept; `mean` then has the mean of each group.
    """
    points = [
        (float(n if panel.x == "order" else event.get(panel.x, event["step"])), event["step"], y)
        for n, (event, value) in enumerate(column, 1)
        if abs(y := panel.scale * value) < LARGEST
    ]
    curve: dict[str, Any] = {}
    if len(points) > most:
        width = -(-2 * len(points) // most)
        parts = [points[i : i + width] for i in range(0, len(points), width)]
        if len(parts[-1]) == 1:  # the end of the run is there, whatever the count
            parts[-2:] = [parts[-2] + parts[-1]]
        curve["mean"] = [_short(sum(y for _, _, y in part) / len(part)) for part in parts]
        points = [point for part in parts for point in _extremes(part)]
    curve |= {"at": [x for x, _, _ in points], "y": [y for _, _, y in points]}
    known = [places.get(step) for _, step, _ in points]
    if all(place is not None for place in known):
        curve["seconds"] = [_short(place[1], 7) for place in known if place]
        if all(place[0] is not None for place in known if place):
            curve["tokens"] = [place[0] for place in known if place]
    return curve


def _extremes(part: list[tuple[float, int, float]]) -> list[tuple[float, int, float]]:
    """Return the lowest and the highest point of two or more, in order."""
    low = min(range(len(part)), key=lambda i: part[i][2])
    high = max((i for i in range(len(part)) if i != low), key=lambda i: part[i][2])
    return [part[i] for i in sorted((low, high))]


def _short(value: float, digits: int = 5) -> float:
    return float(f"{value:.{digits}g}")
