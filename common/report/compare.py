"""Runs side by side: the held-out metric against what it cost, mean and spread over seeds.

    python -m common.compare multirun/2026-11-20_12-00-00-000000        # a sweep that has ended
    python -m common.compare outputs/one outputs/two --out comparison   # any runs

Writes comparison.md, comparison.csv and comparison.png. A setting is what differs between the runs,
without the seed.
"""

import argparse
import csv
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from common.config import ConfigError, flat
from common.files import write_text
from common.report.events import events, markdown_table
from common.report.failures import FAILED
from common.report.plots import COLOURS, STYLE
from common.report.summary import side_by_side

# What a run is measured against, as in result.json, and the title of its axis.
COSTS = {
    "steps": "optimizer steps",
    "generated_tokens": "generated tokens",
    "reward_evaluations": "reward evaluations",
    "seconds": "seconds of training",
}
# Overrides that make no other setting of a run.
NOT_A_SETTING = ("seed", "resume", "hydra", "tracker", "checkpoint")
# Settings of a run that its result names, where no override does.
NAMED = ("algo", "task", "model")
DASHES = ("-", "--", ":", "-.")


@dataclass
class Run:
    """A run that has a result.

    overrides: by key, without the seed; config: all settings but NOT_A_SETTING, dotted; points:
    each a measurement and its COSTS so far.
    """

    folder: Path
    seed: int | None
    overrides: dict[str, str]
    result: dict[str, Any]
    points: list[dict[str, float]]
    config: dict[str, Any]
    setting: str = ""


@dataclass
class Failure:
    """A run without a result. overrides: those that differ; code: its exit code, 0 = it is not
    known to have failed.
    """

    folder: Path
    overrides: dict[str, str]
    code: int
    error: str


# --- reading


def read_runs(folders: Sequence[Path]) -> tuple[list[Run], list[Failure]]:
    """The runs in `folders`, which are run folders or hold some. Raises: ConfigError where there is
    none.
    """
    marks = ("run.yaml", "result.json", FAILED, ".hydra/overrides.yaml")
    found: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(
                f"{folder} is no folder. Give run folders, or a folder that holds some."
            )
        below = {path.parents[mark.count("/")] for mark in marks for path in folder.rglob(mark)}
        if not below:
            raise ConfigError(
                f"{folder} holds no run. Give run folders, or a folder that holds some."
            )
        found += sorted(below, key=lambda path: (len(path.name), path))
    runs: list[Run] = []
    failures: list[Failure] = []
    for folder in dict.fromkeys(found):
        overrides, config, seed = _settings(folder)
        if (folder / FAILED).exists():
            why = json.loads((folder / FAILED).read_text(encoding="utf-8"))
            failures.append(Failure(folder, overrides, why["code"], why["error"]))
        elif not (folder / "result.json").exists():
            failures.append(
                Failure(
                    folder,
                    overrides,
                    0,
                    "no result.json: it has not ended, or measures something else",
                )
            )
        else:
            try:
                result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
                named = {key: str(result[key]) for key in NAMED}
                measured = points(events(folder / "metrics.jsonl"), result)
            except (ValueError, KeyError, TypeError) as error:
                failures.append(
                    Failure(
                        folder,
                        overrides,
                        0,
                        f"its result.json or metrics.jsonl is damaged: {error!r:.80}",
                    )
                )
                continue
            runs.append(Run(folder, seed, named | overrides, result, measured, config))
    given = [{k: v for k, v in of.overrides.items() if k not in NAMED} for of in (*runs, *failures)]
    differing = _differing(given) | _differing(
        [{k: run.overrides[k] for k in NAMED} for run in runs]
    )
    for failure in failures:
        failure.overrides = {k: v for k, v in failure.overrides.items() if k in differing}
    for run in runs:
        run.setting = (
            " ".join(f"{k}={v}" for k, v in run.overrides.items() if k in differing)
            or run.overrides["algo"]
        )
    _tell_apart(runs)
    return runs, failures


def _tell_apart(runs: Sequence[Run]) -> None:
    """Give runs of one configuration one name, and those of several several: overrides alone say
    neither.

    A run that was repeated with -cp has no overrides, and one that was told a default has one too
    many.
    """
    same: dict[str, list[Run]] = {}
    for run in runs:
        same.setdefault(json.dumps(run.config, sort_keys=True, default=str), []).append(run)
    for group in same.values():
        shortest = min((run.setting for run in group), key=len)
        for run in group:
            run.setting = shortest
    named: dict[str, list[list[Run]]] = {}
    for group in same.values():
        named.setdefault(group[0].setting, []).append(group)
    for groups in named.values():
        differing = _differing([group[0].config for group in groups])
        for group in groups if len(groups) > 1 else []:
            more = [
                f"{key}={group[0].config.get(key)}" for key in group[0].config if key in differing
            ][:4]
            for run in group:
                run.setting += " " + " ".join(more)


def points(log: Sequence[dict[str, Any]], result: dict[str, Any]) -> list[dict[str, float]]:
    """The measurements of a run with what it had cost by then: before the first step, on the way,
    at the end.

    Args: log: the events of metrics.jsonl; result: result.json, which says what the last one is.
    """
    used = dict.fromkeys(COSTS, 0.0)
    found = [{**used, "value": result["before"]}]
    for event in log:
        used["seconds"] += event.get("seconds", 0.0)
        if "stage" in event:  # of a run in stages, whose events are not all optimizer steps
            used["steps"] += event["stage"] == "finetune"
        else:
            used["steps"] = event["step"]
        for cost in ("generated_tokens", "reward_evaluations"):
            used[cost] = event.get(cost, used[cost])
        if event.get("metric_name") == result["metric"] and 0 < used["steps"] < result["steps"]:
            found.append({**used, "value": event["metric"]})
    return [*found, {**{cost: result[cost] for cost in COSTS}, "value": result["after"]}]


def _settings(folder: Path) -> tuple[dict[str, str], dict[str, Any], int | None]:
    """Return what the command gave for a run, all its settings, dotted, and its seed."""
    path, seed, config = folder / ".hydra" / "overrides.yaml", None, {}
    given = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else []
    pairs = {key.lstrip("+"): value for key, _, value in (text.partition("=") for text in given)}
    if (folder / "run.yaml").exists():
        config = yaml.safe_load((folder / "run.yaml").read_text(encoding="utf-8"))["config"]
        seed = config["seed"]

    def kept(settings: dict[str, Any]) -> dict[str, Any]:
        return {
            key: value for key, value in settings.items() if key.split(".")[0] not in NOT_A_SETTING
        }

    return kept(pairs), kept(flat(config)), seed


def _differing(given: Sequence[dict[str, Any]]) -> set[str]:
    keys = {key for overrides in given for key in overrides}
    return {key for key in keys if len({str(overrides.get(key)) for overrides in given}) > 1}


# --- mean and spread


def curve(runs: Sequence[Run], cost: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cost, mean and standard deviation over seeds of a setting's metric, each [points].

    The k-th measurements of all runs make a point. Where some run has fewer, its curve is read at
    the shares of its cost at which the longest run was measured. Either way the curve ends in the
    mean of the results.
    """
    costs = [np.array([point[cost] for point in run.points]) for run in runs]
    values = [np.array([point["value"] for point in run.points]) for run in runs]
    longest = max(costs, key=len)
    if any(len(one) < len(longest) for one in costs):
        share = longest / max(longest[-1], 1e-12)
        values = [
            np.interp(share * of[-1], of, value) for of, value in zip(costs, values, strict=True)
        ]
        costs = [share * of[-1] for of in costs]
    deviation = np.std(values, axis=0, ddof=1) if len(runs) > 1 else np.zeros(len(longest))
    return np.mean(costs, axis=0), np.mean(values, axis=0), deviation


def spread(values: Sequence[float], text: Callable[[float], str]) -> str:
    """Mean ± standard deviation (n - 1) as `text` writes them; the mean alone where there is one
    value.
    """
    mean = text(statistics.fmean(values))
    return f"{mean} ± {text(statistics.stdev(values))}" if len(values) > 1 else mean


def _short(count: float) -> str:
    """1234567 -> 1.23M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return (
                f"{count / size:.3g}{letter}"
                if count < 999.5 * size
                else f"{count / size:.0f}{letter}"
            )
    return f"{count:.0f}"


def _measures(runs: Sequence[Run]) -> Iterator[tuple[str, dict[str, list[Run]]]]:
    """Runs by what their metric measures, then by setting, in order."""
    kinds: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        kind = f"{run.result['task']}: {run.result['metric']}"
        kinds.setdefault(kind, {}).setdefault(run.setting, []).append(run)
    yield from kinds.items()


def table(settings: dict[str, list[Run]], narrow: bool = False) -> list[dict[str, str]]:
    """A row a setting. narrow: for a terminal, costs without their spread."""
    rows = []
    for setting, runs in settings.items():

        def column(key: str, text: Callable[[float], str], runs: list[Run] = runs) -> str:
            values = [run.result[key] for run in runs]
            return (
                text(statistics.fmean(values)) if narrow and key in COSTS else spread(values, text)
            )

        rows.append(
            {
                "setting": setting,
                "runs": str(len(runs)),
                "before": column("before", "{:.2f}".format),
                "after": column("after", "{:.2f}".format),
                "steps": column("steps", _short),
                "tokens": column("generated_tokens", _short),
                "rewards": column("reward_evaluations", _short),
                "seconds": column("seconds", "{:.0f}".format),
            }
        )
    return rows


# --- writing


def report_runs(runs: Sequence[Run], failures: Sequence[Failure], out: Path) -> None:
    """Write comparison.md, .csv and .png into `out`, and print the table and what has no result."""
    for kind, settings in _measures(runs):
        print(f"held-out {kind}, mean ± deviation over the runs of a setting\n")
        print(side_by_side(table(settings, narrow=True)) + "\n")
    for failure in failures:
        print(f"{_state(failure)}: {failure.folder}{_described(failure)}: {failure.error}")
    if not runs:
        print(f"nothing to compare: no run in {out} has a result.json")
        return
    out.mkdir(parents=True, exist_ok=True)
    _write_csv(runs, out / "comparison.csv")
    figure(runs, out / "comparison.png")
    write_text(out / "comparison.md", page(runs, failures, out))
    print(f"written to {out}/comparison.md, .csv and .png")


def page(runs: Sequence[Run], failures: Sequence[Failure], out: Path) -> str:
    """The text of comparison.md."""
    lines = ["# Comparison", "", "![held-out metric against cost](comparison.png)", ""]
    for kind, settings in _measures(runs):
        lines += [f"## Held-out {kind}", "", markdown_table(table(settings)), ""]
        each = [
            {
                "setting": run.setting,
                "seed": "" if run.seed is None else str(run.seed),
                "before": f"{run.result['before']:.2f}",
                "after": f"{run.result['after']:.2f}",
                "ended by": run.result.get("ended_by") or "all steps done",
                "folder": str(
                    run.folder.relative_to(out) if run.folder.is_relative_to(out) else run.folder
                ),
            }
            for group in settings.values()
            for run in group
        ]
        lines += [markdown_table(each), ""]
    lines += [
        (
            "Mean ± standard deviation over the runs of a setting (n - 1). Costs are those of"
            " training: sampling, rewards and updates; evaluation and pre-training are not in them."
            " A band is one standard deviation. Every measurement:"
            " [comparison.csv](comparison.csv)."
        ),
        "",
    ]
    if failures:
        lines += ["## Without a result", ""]
        lines += [f"- {_state(f)}: `{f.folder}`{_described(f)}: {f.error}" for f in failures]
        lines += [""]
    return "\n".join(lines)


def _state(failure: Failure) -> str:
    return f"failed (exit code {failure.code})" if failure.code else "no result"


def _described(failure: Failure) -> str:
    return (
        f" ({' '.join(f'{key}={value}' for key, value in failure.overrides.items())})"
        if failure.overrides
        else ""
    )


def _write_csv(runs: Sequence[Run], path: Path) -> None:
    """Return one row per measurement; the last one of a run is its result."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["setting", "seed", "task", "metric", "value", *COSTS, "folder"])
        for run in runs:
            for point in run.points:
                costs = [round(point[cost], 3) for cost in COSTS]
                about = [run.setting, run.seed, run.result["task"], run.result["metric"]]
                writer.writerow([*about, point["value"], *costs, run.folder])


def figure(runs: Sequence[Run], path: Path) -> None:
    """Draw the metric against each cost: a line a setting, a band of one standard deviation, a dot
    a measurement.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    costs = [cost for cost in COSTS if any(run.points[-1][cost] for run in runs)]
    measures = list(_measures(runs))
    most = max(len(settings) for _, settings in measures)
    rows = len(measures) * -(-len(costs) // 2)
    below = 0.3 + 0.26 * most  # inches of the legend
    with matplotlib.rc_context(STYLE):
        drawn = Figure((11, rows * 3.6 + len(measures) * below), dpi=110, layout="constrained")
        parts = drawn.subfigures(len(measures), 1, squeeze=False)[:, 0]
        for part, (kind, settings) in zip(parts, measures, strict=True):
            axes = part.subplots(-(-len(costs) // 2), 2, squeeze=False, sharey=True).flatten()
            for axis, cost in zip(axes, costs, strict=False):
                for number, (setting, group) in enumerate(settings.items()):
                    x, mean, deviation = curve(group, cost)
                    colour = COLOURS[number % len(COLOURS)]
                    dashes = DASHES[number // len(COLOURS) % len(DASHES)]
                    label = setting + (f" (mean of {len(group)})" if len(group) > 1 else "")
                    axis.plot(x, mean, dashes, color=colour, label=label, marker="o", markersize=4)
                    if len(group) > 1:
                        axis.fill_between(
                            x,
                            mean - deviation,
                            mean + deviation,
                            color=colour,
                            alpha=0.15,
                            linewidth=0,
                        )
                axis.set_xlabel(COSTS[cost])
                axis.set_xlim(left=0)
                axis.xaxis.set_major_formatter(EngFormatter(sep=""))
            for axis in axes[: len(costs) : 2]:
                axis.set_ylabel(f"{kind.partition(': ')[2]} (of 100)")
            for axis in axes[len(costs) :]:
                axis.set_visible(False)
            part.suptitle(f"held-out {kind}", x=0.01, ha="left", fontweight="bold")
            part.legend(
                *axes[0].get_legend_handles_labels(),
                loc="outside lower left",
                frameon=False,
                ncols=1,
            )
        drawn.savefig(path)


def main() -> int:
    """The command. Exit codes: 0 done, 2 a mistake."""
    parser = argparse.ArgumentParser(
        "python -m common.compare", description="Compare runs: comparison.md, .csv and .png."
    )
    parser.add_argument(
        "folders",
        nargs="+",
        type=Path,
        metavar="FOLDER",
        help="run folders, or folders that hold some",
    )
    parser.add_argument(
        "--out", type=Path, help="where to write; without it the only FOLDER, or else here"
    )
    given = parser.parse_args()
    try:
        runs, failures = read_runs(given.folders)
        report_runs(
            runs, failures, given.out or (given.folders[0] if len(given.folders) == 1 else Path())
        )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"error: {error.filename} cannot be written: {error.strerror}. Give another --out.",
            file=sys.stderr,
        )
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
