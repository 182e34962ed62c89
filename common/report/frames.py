"""The numbers and completions of a run as data frames, for notebooks. Needs pandas."""

from pathlib import Path
from typing import Any

from common.instance import import_optional
from common.report.completions import find_evaluations, read_training
from common.report.events import EVALUATIONS, events, numbers


def read_metrics(folder: Path) -> Any:
    """Return a row per event of metrics.jsonl, and columns as W&B has them, such as reward and
    phase_seconds/rollout. Raises: ConfigError without pandas.
    """
    logged = events(folder / "metrics.jsonl")
    return _pandas().DataFrame([{"step": event["step"], **numbers(event)} for event in logged])


def read_evaluations(folder: Path) -> Any:
    """Return a row per held-out measurement, the one before the first step (step 0) included.
    Raises: ConfigError without pandas.
    """
    held = events(folder / EVALUATIONS)
    return _pandas().DataFrame([{"step": one["step"], **one["metrics"]} for one in held])


def read_completions(folder: Path) -> Any:
    """Return a row per completion that the run keeps. `kind` is held-out or training. Held-out rows
    have the name of their evaluation, training rows step, reward and advantage or fitness.
    Raises: ConfigError without pandas.
    """
    completions = folder / "completions"
    rows: list[dict[str, Any]] = []
    for path in find_evaluations(completions):
        rows += [{"kind": "held-out", "evaluation": path.stem, **row} for row in events(path, dict)]
    pandas, tables = _pandas(), sorted((completions / "training").glob("steps-*.parquet"))
    if tables:  # completions=all
        training = pandas.concat([pandas.read_parquet(path) for path in tables])
        return pandas.concat([pandas.DataFrame(rows), training.assign(kind="training")])
    for line in read_training(folder):
        shared = {key: value for key, value in line.items() if key != "rows"}
        rows += [{"kind": "training", **shared, **row} for row in line["rows"]]
    return pandas.DataFrame(rows)


def _pandas() -> Any:
    missing = "data frames need a package: pip install 'clutch[frames]'."
    return import_optional("pandas", missing)
