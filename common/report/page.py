"""RUN/report.md, RUN/plots and RUN/report.html: what a run did, for people. A function of the files
of the run folder alone.

    python -m common.report outputs/mine

So it is the same after a kill and a resume as after an unbroken run, and can be made for a run that
was killed.
"""

import itertools
import logging
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.config import ConfigError
from common.files import write_text
from common.report import panels, plots, web
from common.report.events import EVALUATIONS, events, markdown_table
from common.report.panels import AXES, ORDERS, Panel
from common.report.story import (
    arguments,
    columns,
    find_facts,
    find_measures,
    find_phases,
    find_points,
    find_title,
    find_warnings,
    load,
    read_rows,
    read_run,
)
from common.tasks import plain

log = logging.getLogger("clutch")

SAMPLES = 5  # completions shown
LONGEST = 600  # characters of a completion shown; the files have all


def write_or_warn(folder: Path) -> bool:
    """Write the report of a run that must not fail for it; return whether it is there."""
    try:
        write_report(folder, figures=os.environ.get("CLUTCH_PLOTS") != "0")
    except Exception as error:
        log.warning(
            "%s/report.md could not be written (%s: %s). Again: python -m common.report %s",
            *(folder, type(error).__name__, error, folder),
        )
        return False
    return True


def write_report(folder: Path, figures: bool = True) -> Path:
    """Write FOLDER/report.md, FOLDER/report.html and, with `figures`, FOLDER/plots/*.png. Returns
    the first one's path.

    Raises: ConfigError where `folder` is no run folder.
    """
    check_folder(folder)
    saved = read_run(folder, "config", "versions", "commit", "device")
    result = load(folder / "result.json")
    history, evaluations = events(folder / "metrics.jsonl"), events(folder / EVALUATIONS)
    algo = saved["config"]["algo"]["name"]
    drawn = draw(folder / "plots", algo, history, evaluations) if figures else []
    parts = [
        _head(folder, saved, result, history),
        _facts(find_facts(saved, result, history)),
        _section("Held-out measures", find_measures(result, evaluations)),
        _figures(drawn),
        _section("Time", find_phases(history)),
        _completions(folder / "completions"),
        _confusion(folder / "confusion.json"),
        _warnings(find_warnings(folder / "run.log")),
        _files(folder),
    ]
    path = folder / "report.md"
    write_text(path, "\n\n".join(part for part in parts if part) + "\n")
    web.write_page(folder, saved, result, history, evaluations)
    return path


def check_folder(folder: Path) -> None:
    """Raise ConfigError where `folder` is no run folder."""
    if not (folder / "run.yaml").exists():
        raise ConfigError(
            f"{folder} has no run.yaml, so it is no run folder. Give one, for example outputs/mine."
        )


# --- figures


def draw(
    out: Path, algo: str, history: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]
) -> list[tuple[Panel, Path]]:
    """Draw the panels of an algorithm that its events or held-out measures have numbers of."""
    out.mkdir(exist_ok=True)
    for path in out.glob("*.png"):  # of an earlier report, which may have had others
        path.unlink()
    logged, measured = columns(history), columns(evaluations)
    made = []
    for panel in panels.find_panels().get(algo, ()):
        points = measured if any("metrics/" in name for name in panel.curves) else logged
        series = {
            legend: find_points(panel, points[name])
            for name, legend in panel.found(list(points)).items()
        }
        series = {legend: xy for legend, xy in series.items() if xy[0]}
        if panel.kind == "stack":  # layers that stay at nothing would fill the legend
            least = 0.002 * sum(sum(y) for _, y in series.values())
            series = {legend: xy for legend, xy in series.items() if sum(xy[1]) > least}
        # the headline measure is the first
        series = dict(list(series.items())[: len(plots.COLOURS)])
        if not series:
            continue
        path = out / f"{panel.name}.png"
        with plots.saved(path) as axis:
            _draw(axis, panel, series, history)
        made.append((panel, path))
    return made


def _draw(
    axis: Any,
    panel: Panel,
    series: dict[str, tuple[list[float], list[float]]],
    history: Sequence[dict[str, Any]],
) -> None:
    stage = next(iter(panel.curves)).partition("/")[0]
    breaks: list[float] = []  # where iterations meet, on an axis that counts events
    if panel.x == "order":
        met = [event["iteration"] for event in history if event.get("stage") == stage]
        breaks = [n + 0.5 for n, (a, b) in enumerate(itertools.pairwise(met), 1) if a != b]
    label = f"{ORDERS[stage]} (dotted: next iteration)" if panel.x == "order" else AXES[panel.x]
    if panel.kind == "bars":
        x = next(iter(series.values()))[0]
        heights = {f"iteration {i:g}": [y[k] for _, y in series.values()] for k, i in enumerate(x)}
        plots.bars(axis, list(series), heights)
        label = "share of a prompt's samples that is right"
    elif panel.kind == "stack":
        x = sorted({place for xs, _ in series.values() for place in xs})
        found = {legend: dict(zip(*xy, strict=True)) for legend, xy in series.items()}
        layers = {legend: [of.get(place, 0.0) for place in x] for legend, of in found.items()}
        plots.stack(axis, x, layers)
    else:
        plots.lines(axis, series, panel.exact, breaks)
    plots.finished(axis, panel.title, label, panel.unit, panel.zero or panel.kind != "lines")
    for place in breaks:
        axis.axvline(place, color="0.4", linestyle=":", linewidth=1.5)
    if panel.kind != "bars":
        axis.xaxis.get_major_locator().set_params(integer=True)


# --- text


def _head(
    folder: Path,
    saved: dict[str, Any],
    result: dict[str, Any] | None,
    history: list[dict[str, Any]],
) -> str:
    title, measured = find_title(folder, saved, result)
    lines = [f"# {title}"]
    if result and (verdict := result.get("verdict")):
        lines.append(f"{verdict[0].upper()}{verdict[1:]}")
        if result["next_command"]:
            lines.append(f"Try next:\n\n    {result['next_command']}")
    if measured and (folder / f"{measured}.txt").exists():
        text = (folder / f"{measured}.txt").read_text(encoding="utf-8").strip()
        lines.append(f"```\n{text}\n```")
    elif measured:
        lines.append(f"The times are in {measured}.json.")
    elif not result:
        steps, done = saved["config"]["algo"].get("steps"), history[-1]["step"] if history else 0
        lines.append(
            f"{done}{f' of {steps}' if steps else ''} steps are logged. Go on with"
            f" `hydra.run.dir={shlex.quote(str(folder))} resume=auto`."
        )
    if (folder / ".hydra" / "overrides.yaml").exists():
        lines.append(f"```\npython launch.py {shlex.join(arguments(folder))}\n```")
    return "\n\n".join(lines)


def _facts(facts: dict[str, str]) -> str:
    return markdown_table([{"": key, " ": value} for key, value in facts.items()])


def _section(title: str, rows: list[dict[str, str]]) -> str:
    return f"## {title}\n\n{markdown_table(rows)}" if rows else ""


def _figures(figures: list[tuple[Panel, Path]]) -> str:
    if not figures:
        return ""
    image = '<img src="plots/{}" alt="{}" width="49%">'
    images = [image.format(path.name, panel.title) for panel, path in figures]
    head = "## Curves\n\nThin: each step. Thick: running mean.\n\n"
    return head + "\n".join(" ".join(images[i : i + 2]) + "<br>" for i in range(0, len(images), 2))


def _completions(folder: Path) -> str:
    first = read_rows(folder / "before.jsonl", SAMPLES)
    if not first:
        return ""
    last = [*sorted(folder.glob("step-*.jsonl")), *folder.glob("after.jsonl")][-1:]
    later = read_rows(last[0], SAMPLES) if last else []
    name = "after" if last and last[0].stem == "after" else "last"
    rows = [
        {"prompt": _short(plain(old["prompt"])), "before": _short(old["completion"])}
        | ({name: _short(later[i]["completion"])} if i < len(later) else {})
        | {"answer": _short(str(old["answer"]))}
        for i, old in enumerate(first)
    ]
    head = f"The first {len(rows)}, greedy. All of every evaluation are in completions/."
    return f"## Held-out completions\n\n{head}\n\n{markdown_table(rows)}"


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def _confusion(path: Path) -> str:
    found = load(path)
    if found is None or len(found["classes"]) > 12:
        return ""
    rows = [
        {"true \\ predicted": name, **dict(zip(found["classes"], line, strict=True))}
        for name, line in zip(found["classes"], found["table"], strict=True)
    ]
    return "## Confusion of the test rows\n\n" + markdown_table(rows)


def _warnings(found: list[str]) -> str:
    return "## Warnings\n\n" + "\n".join(f"- {text}" for text in found) if found else ""


def _files(folder: Path) -> str:
    known = {
        "model": "the trained model",
        "metrics.jsonl": "every step",
        EVALUATIONS: "every held-out measure",
        "completions": "held-out completions of each evaluation, and some of training",
        "predictions.jsonl": "the class of each test row",
        "checkpoints": "to go on from",
        "result.json": "the outcome",
        "run.yaml": "settings, versions, commit, device",
        "run.log": "what was printed",
    }
    there = {name: what for name, what in known.items() if (folder / name).exists()}
    return "## Files\n\n" + "\n".join(f"- [{name}]({name}): {what}" for name, what in there.items())
