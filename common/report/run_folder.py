"""Read a run folder into the data of the run's pages."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from common.config import CONF, find_file, flat, name_folder, shipped, show
from common.report import gpu_usage
from common.system import NUMBER, DamagedError, has_stages, numeric_values, safe_read
from common.uncertainty import show_interval, show_p

# The first line of a log record, not its continuation lines.
WARNED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} WARNING (.*)")
WHEN = ("before", "after")
SETTINGS = {"algo": {"name": str}, "task": dict}  # of run.yaml
# Keys of result.json that identify a run.
NAMED = ("algo", "task", "model")
# The costs of a run, and the titles of their axes.
COSTS = {
    "steps": "optimizer steps",
    "generated_tokens": "generated tokens",
    "reward_evaluations": "reward evaluations",
    "seconds": "seconds of training",
}
RESULT = dict.fromkeys((*NAMED, "metric"), str) | dict.fromkeys(("before", "after", *COSTS), NUMBER)
RESULT |= {"next_command?": str, "advice?": [{"settings?": dict}]}
# The files of a run in .hydra that are read, with their kinds.
KEPT = {
    "overrides.yaml": [str],
    "hydra.yaml": {"hydra": {"runtime": {"config_sources": [{"path": str}], "choices": dict}}},
}
# A line of completions/NAME.jsonl.
COMPLETION = {"id": object, "prompt": (str, list), "answer": object, "completion": str}
# Groups of conf/ with one file per choice, which has its defaults.
GROUPS = ("algo", "task", "model", "engine", "hardware", "tracker")


def read_run(folder: Path, *keys: str) -> dict[str, Any]:
    """Return the content of FOLDER/run.yaml, with at least `keys`. Raises: ConfigError if it is
    missing or damaged.
    """
    advice = f"The command of the run with {name_folder(folder)} resume=auto writes it again."
    path, kind = folder / "run.yaml", dict.fromkeys(keys, object) | {"config": SETTINGS}
    saved = safe_read.read(path, kind, advice)
    if saved is None:
        raise DamagedError(f"{path} is missing. {advice}")
    return saved


def load(path: Path, kind: Any = dict) -> Any:
    """Return the content of a file of a run; None if there is no file. Raises: ConfigError if it is
    damaged.
    """
    again = f"the command of the run with {name_folder(path.parent)} resume=auto"
    return safe_read.read(path, kind, f"Remove it; {again} writes it again.")


def find_title(
    folder: Path, saved: dict[str, Any], result: dict[str, Any] | None
) -> tuple[str, str | None]:
    """Return the headline, and the name of the measurement if the run made one in place of
    training.
    """
    config = saved["config"]
    kinds = ("prediction", "scaling")
    measured = next((name for name in kinds if (folder / f"{name}.json").exists()), None)
    algo, task = config["algo"]["name"], str(config["task"]["_target_"]).rsplit(".", 1)[-1]
    came = measured or "not finished"
    if result:
        algo, task = result["algo"], result["task"]
        came = f"{result['metric']} {result['before']:.2f} → {result['after']:.2f}"
    return f"{algo} on {task}: {came}", measured


def arguments(folder: Path) -> list[str]:
    """Return the arguments of the command that made a run, with its own folders of YAML files."""
    settings: Any = (_kept(folder, "hydra.yaml") or {}).get("hydra")
    sources: list[str] = []
    for source in settings["runtime"]["config_sources"] if settings else []:
        if source["provider"] == "command-line":
            sources += ["--config-dir", source["path"]]
        elif source["provider"] == "main" and Path(source["path"]) != CONF:
            sources += ["-cp", source["path"], "-cn", settings["job"]["config_name"]]
    # without resume: the command starts a new run
    overrides = [
        text for text in _kept(folder, "overrides.yaml") or [] if not text.startswith("resume=")
    ]
    return [*sources, *overrides]


def find_settings(folder: Path, config: dict[str, Any]) -> list[list[str]]:
    """Return each setting, its value, and its default if the value differs from it. Defaults are
    those of the files in conf/ that the run's groups name; values set on the command line are never
    defaults.
    """
    text = _kept(folder, "hydra.yaml")
    chosen = text["hydra"]["runtime"]["choices"] if text else {}
    defaults = flat(shipped("config.yaml"))
    for group in GROUPS:
        name = chosen.get(group) or config.get(group, {}).get("name")
        if find_file(f"{group}/{name}.yaml").exists():
            values = shipped(f"{group}/{name}.yaml")
            # Some files of a group hold other groups' settings too, and so name their own.
            defaults |= flat(values) if group in values else flat(values, f"{group}.")
    overridden = {
        one.lstrip("+").partition("=")[0] for one in _kept(folder, "overrides.yaml") or []
    }
    overridden -= {*GROUPS, "opt", "experiment"}
    rows = []
    for key, value in flat(config).items():
        default = defaults.get(key)
        known = key in defaults and not (isinstance(default, str) and "${" in default)
        asked = any(key == one or key.startswith(f"{one}.") for one in overridden)
        differs = value != default if known else asked
        rows.append([key, str(value), *([str(default) if known else ""] if differs else [])])
    return rows


def _kept(folder: Path, name: str) -> Any:
    return safe_read.read_or_warn(folder / ".hydra" / name, KEPT[name])


def find_facts(
    saved: dict[str, Any], result: dict[str, Any] | None, history: list[dict[str, Any]]
) -> dict[str, str]:
    """Return the model, the device, the amount of work and the versions of a run, by title."""
    config = saved["config"]
    ranks = result["world_size"] if result else 1
    rows = {}
    if result:
        rows["model"] = result["model"]
    elif "model" not in config["algo"]:  # not of a classifier, whose model is algo.model
        rows["model"] = config["model"]["path"] or config["model"]["name"]
    rows["device"] = saved["device"] + (f", {ranks} ranks" if ranks > 1 else "")
    if saved.get("attention"):
        rows["attention"] = saved["attention"]
    if result:
        rows["numbers"] = result["dtype"]
        rows["steps"] = f"{result['steps']:,} in {describe_duration(result['seconds'])}"
        if result["generated_tokens"]:
            rewards = f"{result['reward_evaluations']:,} rewards"
            rows["generated"] = f"{result['generated_tokens']:,} tokens, {rewards}"
        if by := result.get("answered_by"):
            rows["after"] = f"of {by}, not of the model that is kept"
        if result.get("chosen"):
            rows["exported"] = describe_choice(result)
        if result["iteration"] is not None:
            rows["best iteration"] = str(result["iteration"] or "0, the base model")
    # Of a run in stages, the one that samples.
    sampling = [event for event in history if event.get("stage") in (None, "generate")]
    speeds = [event["tokens_per_second"] for event in sampling if event.get("tokens_per_second")]
    if speeds:
        unit = "events" if has_stages(history) else "steps"
        rows["speed"] = f"{median(speeds):,.0f} tokens/s (median of the {unit})"
    if memory := [event["peak_memory_gb"] for event in history if "peak_memory_gb" in event]:
        rows["peak memory"] = f"{max(memory):.2f} GB, measured"
    rows |= gpu_usage.describe(gpu_usage.summarise(history))
    names = (("torch", "torch"), ("transformers", "transformers"), ("Python", "python"))
    rows["made with"] = ", ".join(f"{name} {saved['versions'][key]}" for name, key in names)
    rows["commit"] = saved["commit"] or "outside a checkout"
    rows["seed"] = str(config["seed"])
    return rows


def describe_choice(result: dict[str, Any]) -> str:
    """Describe the step of the exported model and why it is that one.

    Args: result: the content of result.json, with `chosen`.
    """
    chosen, steps = result["chosen"], result["steps"]
    which = f"step {chosen['step']} of {steps}" if chosen["step"] else "the base, before step 1"
    on = f"{chosen['metric']} on {chosen['examples']} validation examples"
    if chosen["step"] == steps:
        return f"{which}, the last: {on} {chosen['before']:.1f} -> {chosen['last']:.1f}"
    headline = chosen["last_metrics"].get(result["metric"])
    last = "" if headline is None else f"; held out, the last one has {headline:.2f}"
    return f"{which}: {on} {chosen['value']:.1f}, at the end {chosen['last']:.1f}{last}"


def find_next(result: dict[str, Any]) -> str:
    """Return what to try next: the command, or of a run from Python, which has none, the settings
    of the first advice; "" if there are none.

    Args: result: the content of result.json.
    """
    settings = next((one.get("settings") or {} for one in result.get("advice") or []), {})
    changes = " ".join(f"{key}={show(value)}" for key, value in settings.items())
    return result.get("next_command") or changes


def find_measures(
    result: dict[str, Any] | None, evaluations: list[dict[str, Any]]
) -> list[dict[str, str]]:
    """Return a row per held-out measure: before, after and the change, each with its interval, and
    further values that the result has for it.
    """
    more: dict[str, dict[str, float]] = {}
    if result:
        more = {kind: of for kind, of in result["metrics"].items() if kind not in WHEN}
        before, after = result["metrics"]["before"], result["metrics"]["after"]
        heads = WHEN
    elif evaluations:
        before, after = evaluations[0]["metrics"], evaluations[-1]["metrics"]
        heads = ("first", f"last (step {evaluations[-1]['step']})")
    else:
        return []
    rows = []
    for name in dict.fromkeys((*before, *after)):
        shown = [
            f"{measures[name]:.2f}" if name in measures else "" for measures in (before, after)
        ]
        change = f"{after[name] - before[name]:+.2f}" if all(shown) else ""
        row = {"held-out": name, **dict(zip(heads, shown, strict=True)), "change": change}
        row = add_intervals(row, (result or {}).get("intervals", {}).get(name))
        others = {kind: f"{of[name]:.2f}" if name in of else "" for kind, of in more.items()}
        row |= {kind.replace("_", " "): text for kind, text in others.items()}
        if signatures := (result or {}).get("signatures"):
            row["sacrebleu's signature"] = signatures.get(name, "")
        rows.append(row)
    return rows


def add_intervals(row: dict[str, str], sure: dict[str, Any] | None) -> dict[str, str]:
    """Return a row of measures with their intervals, and the test of the change.

    Args: sure: the measure's entry of result.json's `intervals`; None without one.
    """
    if sure is None:
        return row
    for when in (*WHEN, "change"):
        if (interval := sure[when]) is not None and row[when]:
            row[when] += f" ({show_interval(interval, signed=when == 'change')})"
    return row | {"test": "" if sure["p_value"] is None else show_p(sure["p_value"])}


def find_phases(history: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return a row per phase with its seconds and its share, the longest first."""
    seconds: dict[str, float] = {}
    for event in history:
        for name, value in event.get("phase_seconds", {}).items():
            key = f"{event['stage']}: {name}" if "stage" in event else name
            seconds[key] = seconds.get(key, 0.0) + value
    total = sum(seconds.values())
    return [
        {"phase": name, "seconds": f"{value:.1f}", "share": f"{100 * value / total:.1f} %"}
        for name, value in sorted(seconds.items(), key=lambda item: -item[1])
        if total
    ]


def seconds_before(history: Sequence[dict[str, Any]], result: dict[str, Any] | None) -> float:
    """Return the seconds of training before the first event, such as those of a probe, or of the
    run that this one has resumed; 0 without a result.
    """
    took = (event.get("seconds") or 0.0 for event in history)
    logged = sum(seconds for seconds in took if math.isfinite(seconds))
    return max(0.0, result["seconds"] - logged) if result else 0.0


def columns(history: Sequence[dict[str, Any]]) -> dict[str, list[tuple[dict[str, Any], float]]]:
    """Return by name, in order of appearance, each event with that measure, and its value."""
    columns_by_name: dict[str, list[tuple[dict[str, Any], float]]] = {}
    for event in history:
        for name, value in numeric_values(event).items():
            columns_by_name.setdefault(name, []).append((event, value))
    return columns_by_name


def read_rows(path: Path, count: int) -> list[dict[str, Any]]:
    """Return the first `count` completions of a file; empty if there is no file."""
    return safe_read.read_lines(path, COMPLETION, count)


def find_warnings(path: Path) -> list[str]:
    """Return the warnings of a log, each once."""
    warnings = (WARNED.match(line) for line in safe_read.read_text(path).splitlines())
    return list(dict.fromkeys(match[1] for match in warnings if match))


def describe_duration(seconds: float) -> str:
    """Return a duration in seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours * 60 + minutes} min" if hours < 2 else f"{hours} h {minutes:02d} min"
