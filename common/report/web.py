"""RUN/report.html: the same run as a page to click through, in one file that needs no network.

The template, its style, its script and uPlot (MIT), which draws the curves, are in
common/assets/report; the numbers stand in the file as JSON.
"""

import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.config import flat
from common.files import write_text
from common.report import panels
from common.report.story import (
    arguments,
    columns,
    find_facts,
    find_measures,
    find_phases,
    find_title,
    find_warnings,
    read_rows,
)
from common.tasks import plain

ASSETS = Path(__file__).resolve().parents[1] / "assets" / "report"
POINTS = 1500  # of a curve; more lie side by side on no screen
ROWS = 200  # held-out completions of an evaluation
EVALUATIONS = 12  # whose completions can be looked at, the first and the last among them
LONGEST = 4000  # characters of a completion
CHARACTERS = 1_500_000  # of all of them
LARGEST = 1e300  # of a value; sums of more are infinite

Events = Sequence[dict[str, Any]]


def write_page(
    folder: Path,
    saved: dict[str, Any],
    result: dict[str, Any] | None,
    history: list[dict[str, Any]],
    evaluations: list[dict[str, Any]],
) -> Path:
    """Write FOLDER/report.html.

    Args: saved: of run.yaml; result: of result.json, None where the run has not ended; history,
    evaluations: the events of the log and of the held-out measures.
    """
    title, _ = find_title(folder, saved, result)
    measures = find_measures(result, evaluations)
    given = (folder / ".hydra" / "overrides.yaml").exists()
    data = {
        "title": title,
        "verdict": (result or {}).get("verdict") or "",
        "next": (result or {}).get("next_command") or "",
        "command": f"python launch.py {shlex.join(arguments(folder))}" if given else "",
        "measures": {
            "heads": list(measures[0]) if measures else [],
            "rows": [list(row.values()) for row in measures],
        },
        "panels": find_curves(saved["config"]["algo"]["name"], history, evaluations),
        "phases": [list(row.values()) for row in find_phases(history)],
        "facts": [list(pair) for pair in find_facts(saved, result, history).items()],
        "warnings": find_warnings(folder / "run.log"),
        "settings": [[key, str(value)] for key, value in flat(saved["config"]).items()],
        "completions": find_completions(folder / "completions"),
    }
    page = (ASSETS / "page.html").read_text(encoding="utf-8")
    for name in ("page.css", "uPlot.css", "page.js", "uPlot.js"):
        page = page.replace(f"{{{{{name}}}}}", (ASSETS / name).read_text(encoding="utf-8"))
    # No text of a model can end the script element that it stands in.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    text = text.encode("utf-8", "replace").decode()  # without halves of characters
    path = folder / "report.html"
    write_text(path, page.replace("{{data}}", text))
    return path


def find_curves(algo: str, history: Events, evaluations: Events) -> list[dict[str, Any]]:
    """Return the panels of an algorithm with their curves: values against steps, generated tokens
    and seconds of training, as far as the events say them.
    """
    logged, measured, places = columns(history), columns(evaluations), find_places(history)
    found = []
    for panel in panels.find_panels().get(algo, ()):
        if panel.kind == "bars":
            continue
        points = measured if any("metrics/" in name for name in panel.curves) else logged
        series = [
            {"name": legend, **find_curve(points[name], panel, places)}
            for name, legend in panel.found(list(points)).items()
        ]
        if panel.kind == "stack":  # lines that stay at nothing would fill the legend
            least = 0.002 * sum(sum(one["y"]) for one in series)
            series = [one for one in series if sum(one["y"]) > least]
        about = {"title": panel.title, "unit": panel.unit, "zero": panel.zero, "exact": panel.exact}
        found.append({**about, "series": [one for one in series if one["y"]]})
    return found


def find_places(history: Events) -> dict[int, tuple[float | None, float]]:
    """Return by step the tokens generated until then, and the seconds of training."""
    found: dict[int, tuple[float | None, float]] = {0: (0.0, 0.0)}
    seconds = 0.0
    for event in history:
        took = event.get("seconds") or 0.0
        seconds += took if math.isfinite(took) else 0.0
        found[event["step"]] = (event.get("generated_tokens"), seconds)
    return found


def find_curve(
    column: list[tuple[dict[str, Any], float]],
    panel: panels.Panel,
    places: dict[int, tuple[float | None, float]],
) -> dict[str, list[float]]:
    """Return the values of a measure where they are finite, at most `POINTS` means of neighbours,
    and where they lie.
    """
    counts = panel.x in ("event", "order")  # steps begin anew in each stage there
    kept = [
        (float(n if counts else event.get(panel.x, event["step"])), event["step"], y)
        for n, (event, value) in enumerate(column, 1)
        if abs(y := panel.scale * value) < LARGEST
    ]
    width = -(-len(kept) // POINTS) or 1
    parts = [kept[i : i + width] for i in range(0, len(kept), width)]
    found: dict[str, Any] = {
        "step": [part[-1][0] for part in parts],
        "y": [_short(sum(y for _, _, y in part) / len(part)) for part in parts],
    }
    known = [places.get(part[-1][1]) for part in parts]
    if not counts and all(place is not None and place[0] is not None for place in known):
        found["tokens"] = [place[0] for place in known if place]
        found["seconds"] = [_short(place[1]) for place in known if place]
    return found


def find_completions(folder: Path) -> dict[str, Any]:
    """Return the held-out prompts and, of some evaluations, the completions."""
    paths = [folder / "before.jsonl", *sorted(folder.glob("step-*.jsonl")), folder / "after.jsonl"]
    paths = [path for path in paths if path.exists()]
    if len(paths) > EVALUATIONS:
        places = [i * (len(paths) - 1) // (EVALUATIONS - 1) for i in range(EVALUATIONS)]
        paths = [paths[place] for place in places]
    read = {path.stem: read_rows(path, ROWS) for path in paths}
    first = next(iter(read.values()), [])
    ids = [row["id"] for row in first]
    same = {name: rows for name, rows in read.items() if [row["id"] for row in rows] == ids}
    longest = min(LONGEST, CHARACTERS // max(1, len(ids) * (len(same) + 2)))
    prompts = [
        {"prompt": _cut(plain(row["prompt"]), longest), "answer": _cut(str(row["answer"]), longest)}
        for row in first
    ]
    evaluations = [
        {"name": _name(name), "texts": texts}
        for name, rows in same.items()
        if (texts := [_cut(row["completion"], longest) for row in rows])
    ]
    total = 0
    if paths:
        with paths[0].open("rb") as file:
            total = sum(1 for _ in file)
    return {"prompts": prompts, "evaluations": evaluations, "total": total}


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest]} ..."


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _name(stem: str) -> str:
    word, _, number = stem.partition("-")
    return f"{word} {int(number)}" if number else stem
