"""RUN/report.md and RUN/plots: what a run did, for people. A function of the files of the run
folder alone.

    python -m common.report outputs/mine

So it is the same after a kill and a resume as after an unbroken run, and can be made for a run that
was killed.
"""

import itertools
import json
import logging
import math
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from common.config import ConfigError
from common.config.checks import CONF
from common.files import write_text
from common.report import panels, plots
from common.report.events import EVALUATIONS, events, markdown_table, numbers
from common.report.panels import Panel
from common.tasks import plain

log = logging.getLogger("clutch")

AXES = {
    "step": "optimizer step",
    "epoch": "epoch",
    "iteration": "iteration (0 = base model)",
    "event": "event of the log",
}
ORDERS = {
    "generate": "chunk of samples",
    "finetune": "fine-tuning step",
}  # by stage, counted over all iterations
SAMPLES = 5  # completions shown
LONGEST = 600  # characters of a completion shown; the files have all


def write_or_warn(folder: Path) -> bool:
    """Write the report of a run that must not fail for it. Returns whether it is there."""
    try:
        write_report(folder, figures=os.environ.get("CLUTCH_PLOTS") != "0")
    except Exception as error:
        log.warning(
            "%s/report.md could not be written (%s: %s). The run itself is not touched by it."
            " Again: python -m common.report %s",
            *(folder, type(error).__name__, error, folder),
        )
        return False
    return True


def write_report(folder: Path, figures: bool = True) -> Path:
    """Write FOLDER/report.md and, with `figures`, FOLDER/plots/*.png. Returns the path of the page.

    Raises: ConfigError where `folder` is no run folder.
    """
    if not (folder / "run.yaml").exists():
        raise ConfigError(
            f"{folder} has no run.yaml, so it is no run folder. Give one, for example outputs/mine."
        )
    saved = yaml.load(
        (folder / "run.yaml").read_text(encoding="utf-8"),
        Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader),
    )
    result = (
        json.loads((folder / "result.json").read_text())
        if (folder / "result.json").exists()
        else None
    )
    history, evaluations = events(folder / "metrics.jsonl"), events(folder / EVALUATIONS)
    drawn = (
        draw(folder / "plots", saved["config"]["algo"]["name"], history, evaluations)
        if figures
        else []
    )
    parts = [
        _head(folder, saved, result, history),
        _facts(saved, result, history),
        _measures(result, evaluations),
        _figures(drawn),
        _time(history),
        _completions(folder / "completions"),
        _confusion(folder / "confusion.json"),
        _warnings(folder / "run.log"),
        _files(folder),
    ]
    path = folder / "report.md"
    write_text(path, "\n\n".join(part for part in parts if part) + "\n")
    return path


# --- figures


def draw(
    out: Path, algo: str, history: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]
) -> list[tuple[Panel, Path]]:
    """Draw the panels of an algorithm that `history`, or for held-out measures `evaluations`, has
    numbers for.
    """
    out.mkdir(exist_ok=True)
    for path in out.glob("*.png"):  # of an earlier report, which may have had others
        path.unlink()
    logged, measured = columns(history), columns(evaluations)
    made = []
    for panel in panels.find_panels().get(algo, ()):
        points = measured if any("metrics/" in name for name in panel.curves) else logged
        series = {
            legend: _points(panel, points[name])
            for name, legend in panel.found(list(points)).items()
        }
        series = {legend: xy for legend, xy in series.items() if xy[0]}
        if panel.kind == "stack":  # layers that stay at nothing would fill the legend
            series = {
                legend: xy for legend, xy in series.items() if sum(xy[1]) > 0.002 * _total(series)
            }
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
    breaks = _breaks(panel, history)
    if panel.kind == "bars":
        x = next(iter(series.values()))[0]
        by_iteration = {
            f"iteration {i:g}": [y[k] for _, y in series.values()] for k, i in enumerate(x)
        }
        plots.bars(axis, list(series), by_iteration)
        plots.finished(
            axis, panel.title, "share of a prompt's samples that is right", panel.unit, True
        )
        return
    if panel.kind == "stack":
        x = sorted({place for xs, _ in series.values() for place in xs})
        heights = {legend: dict(zip(*xy, strict=True)) for legend, xy in series.items()}
        layers = {
            legend: [height.get(place, 0.0) for place in x] for legend, height in heights.items()
        }
        plots.stack(axis, x, layers)
        plots.finished(axis, panel.title, _axis(panel), panel.unit, True)
    else:
        plots.lines(axis, series, panel.exact, breaks)
        plots.finished(axis, panel.title, _axis(panel), panel.unit, panel.zero)
    for place in breaks:
        axis.axvline(place, color="0.4", linestyle=":", linewidth=1.5)
    axis.xaxis.get_major_locator().set_params(integer=True)


def _breaks(panel: Panel, history: Sequence[dict[str, Any]]) -> list[float]:
    """Return where iterations meet, on the x axis of a panel that counts events."""
    if panel.x != "order":
        return []
    iterations = [event["iteration"] for event in history if event.get("stage") == _stage(panel)]
    return [
        n + 0.5 for n, (one, other) in enumerate(itertools.pairwise(iterations), 1) if one != other
    ]


def columns(history: Sequence[dict[str, Any]]) -> dict[str, list[tuple[dict[str, Any], float]]]:
    """Return by name, in order of appearance, each event that has the measure, and its value."""
    found: dict[str, list[tuple[dict[str, Any], float]]] = {}
    for event in history:
        for name, value in numbers(event).items():
            found.setdefault(name, []).append((event, value))
    return found


def _points(
    panel: Panel, column: list[tuple[dict[str, Any], float]]
) -> tuple[list[float], list[float]]:
    """x and y of a measure, where it is finite."""
    key = "step" if panel.x == "event" else panel.x
    kept = [
        (float(n if panel.x == "order" else event[key]), panel.scale * value)
        for n, (event, value) in enumerate(column, 1)
        if math.isfinite(value)
    ]
    return [x for x, _ in kept], [y for _, y in kept]


def _stage(panel: Panel) -> str:
    return next(iter(panel.curves)).partition("/")[0]


def _axis(panel: Panel) -> str:
    return (
        f"{ORDERS[_stage(panel)]} (dotted: next iteration)" if panel.x == "order" else AXES[panel.x]
    )


def _total(series: dict[str, tuple[list[float], list[float]]]) -> float:
    return sum(sum(y) for _, y in series.values())


# --- text


def _head(
    folder: Path,
    saved: dict[str, Any],
    result: dict[str, Any] | None,
    history: list[dict[str, Any]],
) -> str:
    config = saved["config"]
    measured = next(
        (name for name in ("prediction", "scaling") if (folder / f"{name}.json").exists()), None
    )
    if result:
        title = (
            f"# {result['algo']} on {result['task']}: {result['metric']} {result['before']:.2f} →"
            f" {result['after']:.2f}"
        )
    else:
        target = str(config["task"]["_target_"]).rsplit(".", 1)[-1]
        title = f"# {config['algo']['name']} on {target}: {measured or 'not finished'}"
    lines = [title]
    if measured and (folder / f"{measured}.txt").exists():
        lines.append(
            "```\n" + (folder / f"{measured}.txt").read_text(encoding="utf-8").strip() + "\n```"
        )
    elif measured:
        lines.append(f"The times are in {measured}.json.")
    elif not result:
        steps = config["algo"].get("steps")
        done = (
            f"{history[-1]['step'] if history else 0}{f' of {steps}' if steps else ''} steps are"
            " logged"
        )
        lines.append(f"{done}. Go on with `hydra.run.dir={shlex.quote(str(folder))} resume=auto`.")
    if (folder / ".hydra" / "overrides.yaml").exists():
        lines.append(
            "```\npython launch.py " + " ".join(map(shlex.quote, _arguments(folder))) + "\n```"
        )
    return "\n\n".join(lines)


def _arguments(folder: Path) -> list[str]:
    """Return the arguments of the command that made a run, with its own folders of YAML files."""

    def kept(name: str) -> Any:
        path = folder / ".hydra" / name
        return yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None

    settings: Any = (kept("hydra.yaml") or {}).get("hydra")
    found: list[str] = []
    for source in settings["runtime"]["config_sources"] if settings else []:
        if source["provider"] == "command-line":
            found += ["--config-dir", source["path"]]
        elif source["provider"] == "main" and Path(source["path"]) != CONF:
            found += ["-cp", source["path"], "-cn", settings["job"]["config_name"]]
    return [*found, *(kept("overrides.yaml") or [])]


def _facts(
    saved: dict[str, Any], result: dict[str, Any] | None, history: list[dict[str, Any]]
) -> str:
    config = saved["config"]
    rows = {
        "model": result["model"] if result else config["model"]["path"] or config["model"]["name"],
        "device": (
            saved["device"]
            + (f", {result['world_size']} ranks" if result and result["world_size"] > 1 else "")
        ),
    }
    if result:
        rows["numbers"] = result["dtype"]
        rows["steps"] = f"{result['steps']:,} in {_duration(result['seconds'])}"
        if result["generated_tokens"]:
            rows["generated"] = (
                f"{result['generated_tokens']:,} tokens, {result['reward_evaluations']:,} rewards"
            )
        if result["iteration"] is not None:
            rows["best iteration"] = str(result["iteration"] or "0, the base model")
    speeds = [event["tokens_per_second"] for event in history if event.get("tokens_per_second")]
    if speeds:
        rows["speed"] = f"{sorted(speeds)[len(speeds) // 2]:,.0f} tokens/s (median of the events)"
    memory = [event["peak_memory_gb"] for event in history if "peak_memory_gb" in event]
    if memory:
        rows["peak memory"] = f"{max(memory):.2f} GB"
    versions = saved["versions"]
    rows["made with"] = (
        f"torch {versions['torch']}, transformers {versions['transformers']}, Python"
        f" {versions['python']}"
    )
    rows["commit"] = saved["commit"] or "outside a checkout"
    rows["seed"] = str(config["seed"])
    return markdown_table([{"": key, " ": value} for key, value in rows.items()])


def _measures(result: dict[str, Any] | None, evaluations: list[dict[str, Any]]) -> str:
    """Before and after, or as far as it came."""
    if result:
        before, after = result["metrics"]["before"], result["metrics"]["after"]
        heads = ("before", "after")
    elif evaluations:
        before, after = evaluations[0]["metrics"], evaluations[-1]["metrics"]
        heads = ("first", f"last (step {evaluations[-1]['step']})")
    else:
        return ""
    rows = [
        {
            "held-out": name,
            **{
                head: f"{m[name]:.2f}" if name in m else ""
                for head, m in zip(heads, (before, after), strict=True)
            },
            "change": (
                f"{after[name] - before[name]:+.2f}" if name in before and name in after else ""
            ),
        }
        for name in dict.fromkeys((*before, *after))
    ]
    return "## Held-out measures\n\n" + markdown_table(rows)


def _figures(figures: list[tuple[Panel, Path]]) -> str:
    """Two in a row."""
    if not figures:
        return ""
    images = [
        f'<img src="plots/{path.name}" alt="{panel.title}" width="49%">' for panel, path in figures
    ]
    head = "## Curves\n\nThin: each step. Thick: running mean.\n\n"
    return head + "\n".join(" ".join(images[i : i + 2]) + "<br>" for i in range(0, len(images), 2))


def _time(history: list[dict[str, Any]]) -> str:
    """Seconds by stage and phase, over the whole run."""
    seconds: dict[str, float] = {}
    for event in history:
        for name, value in event.get("phase_seconds", {}).items():
            key = f"{event['stage']}: {name}" if "stage" in event else name
            seconds[key] = seconds.get(key, 0.0) + value
    total = sum(seconds.values())
    if not total:
        return ""
    rows = [
        {"phase": name, "seconds": f"{value:.1f}", "share": f"{100 * value / total:.1f} %"}
        for name, value in sorted(seconds.items(), key=lambda item: -item[1])
    ]
    return "## Time\n\n" + markdown_table(rows)


def _completions(folder: Path) -> str:
    """The same prompts before and after, or at the last evaluation of a run that did not finish."""
    steps = sorted(folder.glob("step-*.jsonl"))
    last = folder / "after.jsonl" if (folder / "after.jsonl").exists() else (steps or [None])[-1]
    first = _rows(folder / "before.jsonl")
    if not first:
        return ""
    later = _rows(last) if last else []
    name = "after" if last and last.stem == "after" else "last"
    rows = [
        {"prompt": _short(plain(old["prompt"])), "before": _short(old["completion"])}
        | ({name: _short(later[i]["completion"])} if i < len(later) else {})
        | {"answer": _short(str(old["answer"]))}
        for i, old in enumerate(first)
    ]
    head = (
        f"The first {len(rows)}, greedy. The others, and those of every evaluation, are in"
        " completions/."
    )
    return f"## Held-out completions\n\n{head}\n\n" + markdown_table(rows)


def _rows(path: Path) -> list[dict[str, Any]]:
    """The first lines of a file of completions."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line, _ in zip(file, range(SAMPLES), strict=False)]


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def _confusion(path: Path) -> str:
    """The confusion matrix of a classifier, where it has few classes."""
    if not path.exists():
        return ""
    found = json.loads(path.read_text(encoding="utf-8"))
    if len(found["classes"]) > 12:
        return ""
    rows = [
        {"true \\ predicted": name, **dict(zip(found["classes"], line, strict=True))}
        for name, line in zip(found["classes"], found["table"], strict=True)
    ]
    return "## Confusion of the test rows\n\n" + markdown_table(rows)


def _warnings(path: Path) -> str:
    """Show the warnings of the run, each text once."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    found = dict.fromkeys(line.split(" WARNING ", 1)[1] for line in lines if " WARNING " in line)
    return "## Warnings\n\n" + "\n".join(f"- {text}" for text in found) if found else ""


def _files(folder: Path) -> str:
    """Show the files that lie beside the page."""
    known = {
        "model": "the trained model",
        "metrics.jsonl": "every step",
        EVALUATIONS: "every held-out measure",
        "completions": "held-out completions of each evaluation",
        "predictions.jsonl": "the class of each test row",
        "checkpoints": "to go on from",
        "result.json": "the outcome",
        "run.yaml": "settings, versions, commit, device",
        "run.log": "what was printed",
    }
    rows = [
        f"- [{name}]({name}): {what}" for name, what in known.items() if (folder / name).exists()
    ]
    return "## Files\n\n" + "\n".join(rows)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes, hours = round(seconds / 60), int(seconds // 3600)
    return f"{minutes} min" if hours < 2 else f"{hours} h {round(seconds / 60) % 60:02d} min"
