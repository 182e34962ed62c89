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
from common.files import first_line, write_text
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
# by stage, counted over all iterations
ORDERS = {"generate": "chunk of samples", "finetune": "fine-tuning step"}
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
    """Write FOLDER/report.md and, with `figures`, FOLDER/plots/*.png; return the page's path.

    Raises: ConfigError where `folder` is no run folder.
    """
    if not (folder / "run.yaml").exists():
        raise ConfigError(
            f"{folder} has no run.yaml, so it is no run folder. Give one, for example outputs/mine."
        )
    saved = read_run(folder, "config", "versions", "commit", "device")
    result = _load(folder / "result.json")
    history, evaluations = events(folder / "metrics.jsonl"), events(folder / EVALUATIONS)
    algo = saved["config"]["algo"]["name"]
    drawn = draw(folder / "plots", algo, history, evaluations) if figures else []
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


def read_run(folder: Path, *keys: str) -> dict[str, Any]:
    """Return what FOLDER/run.yaml says. Raises: ConfigError where that is damaged: no `keys`."""
    path, loader = folder / "run.yaml", getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        saved = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
        if set(keys) <= saved.keys():
            return saved
        problem = "it has not all that a run writes there"
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        problem = "it is empty" if isinstance(error, AttributeError) else first_line(error)
    raise ConfigError(
        f"{path} is damaged: {problem}. The command of the run with hydra.run.dir={folder}"
        " resume=auto writes it again."
    )


def _load(path: Path) -> Any:
    """Return what a file of a run holds, None where there is none. Raises: ConfigError."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    except ValueError as error:
        raise ConfigError(
            f"{path} is damaged: {first_line(error)}. Remove it; the command of the run with"
            f" hydra.run.dir={path.parent} resume=auto writes it again."
        ) from None


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
            legend: _points(panel, points[name])
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
    """Return x and y of a measure, where it is finite."""
    key = "step" if panel.x == "event" else panel.x
    kept = [
        (float(n if panel.x == "order" else event[key]), panel.scale * value)
        for n, (event, value) in enumerate(column, 1)
        if math.isfinite(value)
    ]
    return [x for x, _ in kept], [y for _, y in kept]


# --- text


def _head(
    folder: Path,
    saved: dict[str, Any],
    result: dict[str, Any] | None,
    history: list[dict[str, Any]],
) -> str:
    config = saved["config"]
    kinds = ("prediction", "scaling")
    measured = next((name for name in kinds if (folder / f"{name}.json").exists()), None)
    algo, task = config["algo"]["name"], str(config["task"]["_target_"]).rsplit(".", 1)[-1]
    came = measured or "not finished"
    if result:
        algo, task = result["algo"], result["task"]
        came = f"{result['metric']} {result['before']:.2f} → {result['after']:.2f}"
    lines = [f"# {algo} on {task}: {came}"]
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
        steps, done = config["algo"].get("steps"), history[-1]["step"] if history else 0
        lines.append(
            f"{done}{f' of {steps}' if steps else ''} steps are logged. Go on with"
            f" `hydra.run.dir={shlex.quote(str(folder))} resume=auto`."
        )
    if (folder / ".hydra" / "overrides.yaml").exists():
        lines.append(f"```\npython launch.py {shlex.join(arguments(folder))}\n```")
    return "\n\n".join(lines)


def arguments(folder: Path) -> list[str]:
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
    # again is a run of its own, which does not go on with this one
    given = [text for text in kept("overrides.yaml") or [] if not text.startswith("resume=")]
    return [*found, *given]


def _facts(
    saved: dict[str, Any], result: dict[str, Any] | None, history: list[dict[str, Any]]
) -> str:
    config = saved["config"]
    ranks = result["world_size"] if result else 1
    rows = {
        "model": result["model"] if result else config["model"]["path"] or config["model"]["name"],
        "device": saved["device"] + (f", {ranks} ranks" if ranks > 1 else ""),
    }
    if result:
        rows["numbers"] = result["dtype"]
        rows["steps"] = f"{result['steps']:,} in {_duration(result['seconds'])}"
        if result["generated_tokens"]:
            rewards = f"{result['reward_evaluations']:,} rewards"
            rows["generated"] = f"{result['generated_tokens']:,} tokens, {rewards}"
        if result["iteration"] is not None:
            rows["best iteration"] = str(result["iteration"] or "0, the base model")
    speeds = [event["tokens_per_second"] for event in history if event.get("tokens_per_second")]
    if speeds:
        rows["speed"] = f"{sorted(speeds)[len(speeds) // 2]:,.0f} tokens/s (median of the events)"
    if memory := [event["peak_memory_gb"] for event in history if "peak_memory_gb" in event]:
        rows["peak memory"] = f"{max(memory):.2f} GB, measured"
    names = (("torch", "torch"), ("transformers", "transformers"), ("Python", "python"))
    rows["made with"] = ", ".join(f"{name} {saved['versions'][key]}" for name, key in names)
    rows["commit"] = saved["commit"] or "outside a checkout"
    rows["seed"] = str(config["seed"])
    return markdown_table([{"": key, " ": value} for key, value in rows.items()])


def _measures(result: dict[str, Any] | None, evaluations: list[dict[str, Any]]) -> str:
    if result:
        before, after = result["metrics"]["before"], result["metrics"]["after"]
        heads = ("before", "after")
    elif evaluations:
        before, after = evaluations[0]["metrics"], evaluations[-1]["metrics"]
        heads = ("first", f"last (step {evaluations[-1]['step']})")
    else:
        return ""
    rows = []
    for name in dict.fromkeys((*before, *after)):
        shown = [f"{found[name]:.2f}" if name in found else "" for found in (before, after)]
        change = f"{after[name] - before[name]:+.2f}" if all(shown) else ""
        rows.append({"held-out": name, **dict(zip(heads, shown, strict=True)), "change": change})
    return "## Held-out measures\n\n" + markdown_table(rows)


def _figures(figures: list[tuple[Panel, Path]]) -> str:
    if not figures:
        return ""
    image = '<img src="plots/{}" alt="{}" width="49%">'
    images = [image.format(path.name, panel.title) for panel, path in figures]
    head = "## Curves\n\nThin: each step. Thick: running mean.\n\n"
    return head + "\n".join(" ".join(images[i : i + 2]) + "<br>" for i in range(0, len(images), 2))


def _time(history: list[dict[str, Any]]) -> str:
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
    first = _rows(folder / "before.jsonl")
    if not first:
        return ""
    last = [*sorted(folder.glob("step-*.jsonl")), *folder.glob("after.jsonl")][-1:]
    later = _rows(last[0]) if last else []
    name = "after" if last and last[0].stem == "after" else "last"
    rows = [
        {"prompt": _short(plain(old["prompt"])), "before": _short(old["completion"])}
        | ({name: _short(later[i]["completion"])} if i < len(later) else {})
        | {"answer": _short(str(old["answer"]))}
        for i, old in enumerate(first)
    ]
    head = f"The first {len(rows)}, greedy. All of every evaluation are in completions/."
    return f"## Held-out completions\n\n{head}\n\n{markdown_table(rows)}"


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line, _ in zip(file, range(SAMPLES), strict=False)]


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def _confusion(path: Path) -> str:
    found = _load(path)
    if found is None or len(found["classes"]) > 12:
        return ""
    rows = [
        {"true \\ predicted": name, **dict(zip(found["classes"], line, strict=True))}
        for name, line in zip(found["classes"], found["table"], strict=True)
    ]
    return "## Confusion of the test rows\n\n" + markdown_table(rows)


def _warnings(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    found = dict.fromkeys(line.split(" WARNING ", 1)[1] for line in lines if " WARNING " in line)
    return "## Warnings\n\n" + "\n".join(f"- {text}" for text in found) if found else ""


def _files(folder: Path) -> str:
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
    there = {name: what for name, what in known.items() if (folder / name).exists()}
    return "## Files\n\n" + "\n".join(f"- [{name}]({name}): {what}" for name, what in there.items())


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes, hours = round(seconds / 60), int(seconds // 3600)
    return f"{minutes} min" if hours < 2 else f"{hours} h {round(seconds / 60) % 60:02d} min"
