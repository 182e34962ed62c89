"""Read the runs of folders, named by the settings that differ between them, for comparisons and
studies.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.config import ConfigError, flat
from common.report import run_folder
from common.report.run_folder import COSTS, NAMED, RESULT
from common.system import FAILED, NUMBER, OVERRIDES, DamagedError, events, safe_read

# Overrides that do not distinguish settings of runs.
NOT_A_SETTING = ("seed", "resume", "hydra", "tracker", "checkpoint")
# A run folder has at least one of these files.
MARKS = ("run.yaml", "result.json", FAILED, OVERRIDES)


@dataclass
class Run:
    """A run that has a result.

    Attributes:
        folder: the run folder.
        seed: its seed.
        overrides: overrides and names of the run, without NOT_A_SETTING.
        config: all settings, by dotted key, without NOT_A_SETTING.
        result: the content of result.json.
        points: its evaluations, each with its COSTS so far and the name of its file of completions.
        setting: the overrides that distinguish it from other runs.
        prompts: the held-out prompts, each with its id.
        answers: the answers of the prompts, each with its id.
        known: per evaluation the scores of the prompts; [] if they were not saved.
        made_by: the folders of the runs that made its initial model, the last one first. Their
            costs, but for steps, are part of `result` and `points`.
    """

    folder: Path
    seed: int | None
    overrides: dict[str, str]
    config: dict[str, Any]
    result: dict[str, Any]
    points: list[dict[str, Any]]
    setting: str = ""
    prompts: list[Any] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)
    known: list[list[float]] = field(default_factory=list)
    made_by: list[Path] = field(default_factory=list)

    @property
    def scores(self) -> list[float]:
        """The scores of its metric after training, per prompt."""
        return self.known[-1]


@dataclass
class Failure:
    """A run without a result.

    Attributes:
        folder: the run folder.
        overrides: its overrides.
        code: its exit code; 0 = it is not known to have failed.
        error: the reason.
    """

    folder: Path
    overrides: dict[str, str]
    code: int
    error: str

    def __str__(self) -> str:
        state = f"failed (exit code {self.code})" if self.code else "no result"
        settings = " ".join(f"{key}={value}" for key, value in self.overrides.items())
        return f"{state}: `{self.folder}`{f' ({settings})' if settings else ''}: {self.error}"


def read_runs(folders: Sequence[Path]) -> tuple[list[Run], list[Failure]]:
    """Return the runs in `folders`, which are run folders or contain some. Raises: ConfigError for
    a folder without runs.
    """
    paths: list[Path] = []
    for folder in folders:
        below = {path.parents[mark.count("/")] for mark in MARKS for path in folder.rglob(mark)}
        if not below:
            raise ConfigError(
                f"{folder} holds no run. Give run folders, or a folder that holds some."
            )
        paths += sorted(below, key=lambda path: (len(path.name), path))
    places: dict[Path, Path] = {}  # each folder once, however it was given
    for path in paths:
        places.setdefault(path.resolve(), path)
    found = [_read(folder) for folder in places.values()]
    runs = [one for one in found if isinstance(one, Run)]
    failures = [one for one in found if isinstance(one, Failure)]
    differing = find_differing(
        [{k: v for k, v in one.overrides.items() if k not in NAMED} for one in found]
    ) | find_differing([{k: run.overrides[k] for k in NAMED} for run in runs])
    given = {key: {one.overrides[key] for one in found if key in one.overrides} for key in NAMED}
    named = {key for key, values in given.items() if len(values) > 1}
    for one in found:
        shown = differing | named if isinstance(one, Failure) else differing
        one.overrides = {k: v for k, v in one.overrides.items() if k in shown}
    _name(runs)
    return runs, failures


def _read(folder: Path) -> Run | Failure:
    path, seed, config = folder / OVERRIDES, None, {}
    overrides: dict[str, str] = {}
    try:
        texts = safe_read.read(path, [str]) or []
        overrides = _settings(dict(text.lstrip("+").split("=", 1) for text in texts if "=" in text))
        if (folder / "run.yaml").exists():
            config = run_folder.read_run(folder, "config")["config"]
            seed = config.get("seed")
        # A run with a result may have failed in a later attempt, which left the result unchanged.
        ended = (folder / "result.json").exists()
        if not ended and (why := safe_read.read(folder / FAILED, {"code": int, "error": str})):
            return Failure(folder, overrides, why["code"], why["error"])
        result = safe_read.read(folder / "result.json", RESULT)
        if result is None:
            why = "no result.json: it has not ended, or measures something else"
            return Failure(folder, overrides, 0, why)
        named = {key: str(result[key]) for key in NAMED}
        with safe_read.reading(folder / "metrics.jsonl"):
            logged = events(folder / "metrics.jsonl")
            measured = points(logged, result)
            safe_read.check(measured, [{**dict.fromkeys(COSTS, NUMBER), "value": NUMBER}])
    except DamagedError as error:
        return Failure(folder, overrides, 0, str(error))
    run = Run(folder, seed, named | overrides, _settings(flat(config)), result, measured)
    _add_earlier(run)
    rows = events(folder / "completions" / "after.jsonl", dict)
    run.prompts = [[row.get("id"), row.get("prompt")] for row in rows]
    run.answers = [[row.get("id"), row.get("answer")] for row in rows]
    paths = [folder / "completions" / f"{point['name']}.jsonl" for point in measured]
    run.known = [_scores(path, result["metric"]) for path in paths]
    if predicted := events(folder / "predictions.jsonl", dict):  # of a classifier
        run.prompts = [[row.get("place"), row.get("row"), row.get("class")] for row in predicted]
        right = [100.0 * (row.get("class") == row.get("predicted")) for row in predicted]
        run.known[-1] = right if result["metric"] == "accuracy" else []
    return run


def _add_earlier(run: Run) -> None:
    """Add the costs of the runs that made the initial model of a run, one after the other."""
    path, folders = run.config.get("model.path"), [run.folder.resolve()]
    while path and (folder := Path(path).expanduser().resolve().parent) not in folders:
        earlier = safe_read.read(folder / "result.json", RESULT)
        if earlier is None or Path(path).name not in ("model", "adapter"):
            return
        folders.append(folder)
        run.made_by.append(folder)
        for cost in COSTS:
            for counted in (run.result, *run.points) if cost != "steps" else ():
                counted[cost] += earlier[cost]
        config = flat(run_folder.read_run(folder, "config")["config"])
        path = config.get("model.path")


def _scores(path: Path, metric: str) -> list[float]:
    rows = [row.get("scores") for row in events(path, dict)]
    scores = [one.get(metric) if isinstance(one, dict) else None for one in rows]
    sound = all(isinstance(one, (int, float)) and math.isfinite(one) for one in scores)
    return [float(one or 0) for one in scores] if sound else []


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key.split(".")[0] not in NOT_A_SETTING}


def find_differing(given: Sequence[dict[str, Any]]) -> set[str]:
    """Return the keys whose values differ between these settings."""
    keys = {key for settings in given for key in settings}
    return {key for key in keys if len({str(settings.get(key)) for settings in given}) > 1}


def _name(runs: Sequence[Run]) -> None:
    """Name runs by the overrides that differ: runs of one configuration get the same name, others
    different ones.
    """
    same: dict[str, list[Run]] = {}
    for run in runs:
        same.setdefault(json.dumps(run.config, sort_keys=True, default=str), []).append(run)
    named: dict[str, list[list[Run]]] = {}
    for group in same.values():
        texts = [" ".join(f"{k}={v}" for k, v in run.overrides.items()) for run in group]
        name = min((text or group[0].result["algo"] for text in texts), key=len)
        named.setdefault(name, []).append(group)
    for name, groups in named.items():
        differing = find_differing([group[0].config for group in groups])
        more = [
            [f"{key}={value}" for key, value in group[0].config.items() if key in differing]
            for group in groups
        ]
        shown = 4  # four settings suffice if they distinguish all groups
        while shown < len(differing) and len({str(keys[:shown]) for keys in more}) < len(more):
            shown += 1
        for group, keys in zip(groups, more, strict=True):
            for run in group:
                run.setting = " ".join([name, *keys[:shown]])


def points(log: Sequence[dict[str, Any]], result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the evaluations of a run, from its events and its result, each with the
    costs so far.
    """
    used = dict.fromkeys(COSTS, 0.0)
    measured = [{**used, "value": result["before"], "name": "before"}]
    used["seconds"] = run_folder.seconds_before(log, result)
    for event in log:
        used["seconds"] += event.get("seconds", 0.0)
        if "stage" in event:  # of a run in stages, whose events are not all optimizer steps
            used["steps"] += event["stage"] == "finetune"
        else:
            used["steps"] = event["step"]
        for cost in ("generated_tokens", "reward_evaluations"):
            used[cost] = event.get(cost, used[cost])
        if event.get("metric_name") != result["metric"]:
            continue
        stage = f"iteration-{event['iteration']}" if "stage" in event else ""
        name = stage or f"step-{event['step']:08d}"
        earlier = next((point for point in measured if point["name"] == name), None)
        if earlier is not None:  # measured again, as a resumed run does with other `evaluate`
            earlier["value"] = event["metric"]
        elif stage != "iteration-0" and 0 < used["steps"] < result["steps"]:
            measured.append({**used, "value": event["metric"], "name": name})
    last = {cost: result[cost] for cost in COSTS}
    return [*measured, {**last, "value": result["after"], "name": "after"}]
