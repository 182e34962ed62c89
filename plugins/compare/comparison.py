"""Compare runs: the held-out metric against its cost, with a 95 % interval.

    python -m common.compare multirun/2026-11-20_12-00-00-000000        # a sweep, written into it
    python -m common.compare outputs/one outputs/two                    # any runs: prints a table
    python -m common.compare outputs/one outputs/two --out comparison   # and writes files

The files are comparison.html, comparison.csv and comparison.png. A setting is a combination of the
keys that differ between the runs, without the seed.
"""

import argparse
import csv
import json
import math
import os
import statistics
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common import uncertainty as certainty
from common.config import ConfigError
from common.report import (
    COLOURS,
    COSTS,
    PLAIN,
    Failure,
    Run,
    find_differing,
    find_others,
    read_runs,
    render,
    side_by_side,
)
from common.system import (
    EVALUATION,
    EVALUATIONS,
    ending_tool,
    events,
    jsonable,
    visible,
    write_text,
)

LETTERS = 120  # of a line of the legend in comparison.png
DASHES = ("-", "--", ":", "-.")


# --- mean and spread


def curve(runs: Sequence[Run], cost: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return the cost and the mean over seeds of a setting's metric, [points] each, and the
    interval of the mean, [points, 2]. Points are the k-th measurements of all runs, or shares of
    the longest run's cost. The interval comes from `find_interval`; if scores of prompts are
    missing, it is over seeds alone, and None for a single run.
    """
    costs = [np.array([point[cost] for point in run.points]) for run in runs]
    scored = not _why_not(runs) and all(len(k) == len(r.prompts) for r in runs for k in r.known)
    tables = [  # of each run [points, 1 + prompts]
        np.array([[p["value"], *(scores if scored else ())] for p, scores in of])
        for of in (list(zip(run.points, run.known, strict=True)) for run in runs)
    ]
    longest = max(costs, key=len)
    if any(len(one) < len(longest) for one in costs):
        share = longest / max(longest[-1], 1e-12)
        tables = [
            np.stack([np.interp(share * of[-1], of, column) for column in table.T], axis=1)
            for of, table in zip(costs, tables, strict=True)
        ]
        costs = [share * of[-1] for of in costs]
    every = np.stack(tables, axis=1)  # [points, runs, 1 + prompts]
    find = certainty.find_pooled if scored else lambda rows: certainty.bootstrap(rows[:, 0])
    known = scored or len(runs) > 1
    within = np.array([find(rows[:, scored:]) for rows in every]) if known else None
    return np.mean(costs, axis=0), every[:, :, 0].mean(1), within


def spread(values: Sequence[float], text: Callable[[float], str]) -> str:
    """Return mean ± standard deviation (n - 1), each formatted by `text`."""
    mean = text(statistics.fmean(values))
    return f"{mean} ± {text(statistics.stdev(values))}" if len(values) > 1 else mean


def find_interval(runs: Sequence[Run]) -> tuple[float, float] | None:
    """Return the 95 % interval of a setting's metric after training, over examples, and over seeds
    if there are several; None if the runs lack the scores.
    """
    if _why_not(runs):
        return None
    return certainty.find_pooled(np.array([run.scores for run in runs]))


def _why_not(runs: Sequence[Run]) -> str | None:
    """Return the reason that runs cannot be compared prompt by prompt; None = they can."""
    first = runs[0]
    for run in runs:
        if len(run.scores) < 2:
            return f"{run.folder} has no scores of its prompts in completions/after.jsonl"
        if run.prompts != first.prompts:
            shared = len(
                {json.dumps(p) for p in run.prompts} & {json.dumps(p) for p in first.prompts}
            )
            return (
                f"of {len(first.prompts)} held-out prompts of {first.folder} and {len(run.prompts)}"
                f" of {run.folder} {shared or 'none'} are the same. Give both runs the same task"
                " and the same evaluate.examples"
            )
    return None


def find_tests(settings: dict[str, list[Run]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a test per setting except the best: the difference from the best, prompt by prompt,
    with interval and corrected p; and the reasons for settings without one.
    """
    means = {
        name: statistics.fmean(r.result["after"] for r in runs) for name, runs in settings.items()
    }
    ranked = sorted(means, key=lambda name: -means[name])

    # The best of those that another one can be compared with.
    def is_alone(name: str) -> bool:
        others = (n for n in settings if n != name)
        return all(_why_not([*settings[name], *settings[n]]) for n in others)

    best = next((name for name in ranked if not is_alone(name)), ranked[0])
    rows, remarks, tests = [], [], []
    for name, runs in settings.items():
        if name == best:
            continue
        if why := _why_not([*settings[best], *runs]):
            remarks.append(f"{name} and {best} are not compared prompt by prompt: {why}.")
            continue
        one, other = (np.array([run.scores for run in group]) for group in (runs, settings[best]))
        gap, interval, p = certainty.find_difference(one, other)
        rows.append({"best": best, "against": name, "ahead": gap, "interval": list(interval)})
        tests.append((interval, p))
    # Whichever had been the best, these would be its tests: they are of all pairs.
    corrected = certainty.correct(tests, math.comb(len(rows) + 1, 2))
    for row, (interval, p) in zip(rows, corrected, strict=True):
        row |= {"p": p, "told_apart": certainty.is_supported(interval, p)}
    return rows, remarks


def tell_apart(settings: dict[str, list[Run]]) -> tuple[list[dict[str, str]], list[str]]:
    """Return the result of `find_tests` as rows of a table."""
    tests, remarks = find_tests(settings)
    rows = [
        {
            "best": test["best"],
            "against": test["against"],
            "ahead by": f"{test['ahead']:+.2f}",
            "95 %": certainty.show_interval(test["interval"], signed=True),
            "test": certainty.show_p(test["p"]),
            "told apart": "yes" if test["told_apart"] else "no",
        }
        for test in tests
    ]
    return rows, remarks


def _short(count: float) -> str:
    """Return 1.23M for 1234567."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * size:
            return f"{count / size:.3g}{letter}"
    return f"{count:.0f}"


# The columns of the table: of which number of the result, and how it is written.
COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "before": ("before", "{:.2f}".format),
    "after": ("after", "{:.2f}".format),
    "steps": ("steps", _short),
    "tokens": ("generated_tokens", _short),
    "rewards": ("reward_evaluations", _short),
    "seconds": ("seconds", "{:.0f}".format),
}


def table(settings: dict[str, list[Run]], narrow: bool = False) -> list[dict[str, str]]:
    """Return a row per setting. narrow: for a terminal, without intervals and spread of costs."""
    rows = []
    for setting, runs in settings.items():
        row = {"setting": setting, "runs": str(len(runs))}
        for name, (key, text) in COLUMNS.items():
            values = [run.result[key] for run in runs]
            short = narrow and key in COSTS
            row[name] = text(statistics.fmean(values)) if short else spread(values, text)
            if name == "after" and not narrow:
                row["95 %"] = certainty.show_interval(find_interval(runs))
        rows.append(row)
    return rows


# --- writing


class Kind:
    """The runs with the same metric, and their comparison.

    Attributes:
        title: task and metric.
        settings: the runs by setting.
        costs: the costs that at least one of the runs has.
        curves: the results of `curve`, by cost and setting.
        apart: the rows of `tell_apart`.
        remarks: the reasons of `tell_apart`.
        others: the settings of `find_others`.
        sentence: the sentence of `find_others`.
    """

    def __init__(self, title: str, settings: dict[str, list[Run]]) -> None:
        self.title, self.settings = title, settings
        self.runs = [run for group in settings.values() for run in group]
        costs = [cost for cost in COSTS if any(run.points[-1][cost] for run in self.runs)]
        self.costs = costs or ["steps"]  # of runs that had nothing to learn
        self.curves = {
            cost: {name: curve(group, cost) for name, group in settings.items()} for cost in COSTS
        }
        self.apart, self.remarks = tell_apart(settings)
        logged = {
            name: [events(run.folder / EVALUATIONS, EVALUATION) for run in group]
            for name, group in settings.items()
        }
        self.others, self.sentence = find_others(logged)
        self.remarks += _name_earlier(settings)

    def list_runs(self, out: Path) -> list[dict[str, str]]:
        """Return a row per run. out: the folder that the paths of runs are relative to."""
        return [
            _name_row(run)
            | {
                "before": f"{run.result['before']:.2f}",
                "after": f"{run.result['after']:.2f}",
                "ended by": str(run.result.get("ended_by") or "all steps done"),
                "folder": os.path.relpath(run.folder, out),
            }
            for run in self.runs
        ]


def _name_earlier(settings: dict[str, list[Run]]) -> list[str]:
    """Return a sentence per setting whose initial models were made by other runs."""
    sentences = []
    for name, runs in settings.items():
        folders = dict.fromkeys(str(folder) for run in runs for folder in run.made_by)
        if folders:
            sentences.append(
                f"{name}: its costs, but for steps, include those of the runs that made its"
                f" initial model: {', '.join(folders)}."
            )
    return sentences


def _name_row(run: Run) -> dict[str, str]:
    return {"setting": run.setting, "seed": "" if run.seed is None else str(run.seed)}


def describe_runs(runs: Sequence[Run], failures: Sequence[Failure]) -> dict[str, Any]:
    """Return the comparison for programs: by task and metric the settings and their tests, and the
    runs that are in none.
    """
    runs, repeated = count_seeds_once(runs)
    kinds = []
    for title, settings in _group(runs).items():
        tests, remarks = find_tests(settings)
        shown = []
        for name, group in settings.items():
            sure = find_interval(group)
            row = {"setting": name, "after": statistics.fmean(r.result["after"] for r in group)}
            row |= {"interval": list(sure) if sure else None}
            row |= {key: statistics.fmean(r.result[key] for r in group) for key in COSTS}
            kept = ("before", "after", "outcome")
            row["runs"] = [
                {"folder": str(run.folder), "seed": run.seed}
                | {key: run.result.get(key) for key in kept}
                for run in group
            ]
            shown.append(row)
        kinds.append({"title": title, "settings": shown, "apart": tests, "remarks": remarks})
    return jsonable({"kinds": kinds, "left_out": [*map(str, failures), *repeated]})


def _group(runs: Sequence[Run]) -> dict[str, dict[str, list[Run]]]:
    """Return the runs by title and setting."""
    settings: dict[str, dict[str, list[Run]]] = {}
    for title, run in zip(find_titles(runs), runs, strict=True):
        settings.setdefault(title, {}).setdefault(run.setting, []).append(run)
    return settings


def report_runs(runs: Sequence[Run], failures: Sequence[Failure], out: Path | None) -> None:
    """Print the table and the runs without a result, and write comparison.html, .csv and .png.

    Args: out: the folder to write into; None = write nothing.
    """
    runs, repeated = count_seeds_once(runs)
    kinds = [Kind(title, groups) for title, groups in _group(runs).items()]
    for kind in kinds:
        parts = [
            f"held-out {kind.title}, mean ± deviation over the runs of a setting",
            side_by_side(table(kind.settings, narrow=True)),
            side_by_side(kind.apart),
            "\n".join(kind.remarks),
            kind.sentence,
            side_by_side(kind.others),
        ]
        print(visible("\n\n".join(filter(None, parts)) + "\n", kept="\n"))
    others = [*map(str, failures), *repeated]
    for text in others:
        print(visible(text))
    if not runs:
        print("nothing to compare: none of these runs has a result.json")
        return
    if out is None:
        print("nothing is written: --out FOLDER writes comparison.html, .csv and .png")
        return
    out.mkdir(parents=True, exist_ok=True)
    _write_csv(runs, out / "comparison.csv")
    figure(kinds, out / "comparison.png")
    data = {"kinds": [_describe(kind, out) for kind in kinds], "failures": others}
    write_text(out / "comparison.html", render("comparison", data))
    print(f"written to {out}/comparison.html, .csv and .png")


def count_seeds_once(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Return the runs with one run per seed and setting, the one with the newest result, and a
    remark per omitted run: two runs with the same seed are not two draws.
    """

    def key(run: Run) -> Any:
        return run.folder if run.seed is None else (run.setting, run.seed)

    by_age = sorted(runs, key=lambda run: (run.folder / "result.json").stat().st_mtime_ns)
    newest = {key(run): run for run in by_age}
    remarks = [
        f"left out: `{run.folder}` ({run.setting}), as `{newest[key(run)].folder}` is a newer run"
        f" of its seed, {run.seed}"
        for run in runs
        if newest[key(run)] is not run
    ]
    return [run for run in runs if newest[key(run)] is run], remarks


def find_titles(runs: Sequence[Run]) -> list[str]:
    """Return the title of each run: its task and metric. If runs of one task have different held-
    out examples, the title names the settings of the task that differ, such as the data set.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(f"{run.result['task']}: {run.result['metric']}", []).append(run)
    titles = {}
    for title, alike in groups.items():
        parts: dict[str, list[Run]] = {}
        for run in alike:
            # Classifiers and environments have no answers.
            examples = run.answers if any(answer for _, answer in run.answers) else run.prompts
            parts.setdefault(json.dumps(examples), []).append(run)
        differing = find_differing([run.config for run in alike])
        within = {
            k for part in parts.values() for k in find_differing([run.config for run in part])
        }
        keys = sorted(key for key in differing - within if key.startswith("task."))
        for run in alike:
            of = ", ".join(f"{key}={run.config.get(key)}" for key in keys)
            titles[run.folder] = title.replace(": ", f" ({of}): ", 1) if of else title
    return [titles[run.folder] for run in runs]


def _describe(kind: Kind, out: Path) -> dict[str, Any]:
    """Return the content of comparison.html for a kind: the table of its settings and, folded, the
    table of its runs. apart: the rows of its tests.
    """
    tables = (table(kind.settings), kind.list_runs(out))

    def describe(tables: Sequence[list[dict[str, str]]]) -> list[dict[str, Any]]:
        return [
            {"heads": list(rows[0]), "rows": [list(row.values()) for row in rows]}
            for rows in tables
            if rows
        ]

    return {
        "title": kind.title,
        "tables": describe(tables),
        "apart": describe((kind.apart, kind.others)),
        "remarks": [text for text in (*kind.remarks, kind.sentence) if text],
        "costs": [
            {
                "title": COSTS[cost],
                "settings": [_describe_curve(kind, cost, name) for name in kind.settings],
            }
            for cost in kind.costs
        ],
    }


def _describe_curve(kind: Kind, cost: str, setting: str) -> dict[str, Any]:
    runs, (x, mean, within) = kind.settings[setting], kind.curves[cost][setting]
    low, high = (None, None) if within is None else map(_plain, within.T)
    return {
        "name": _legend(setting, runs),
        "at": _plain(x),
        "y": _plain(mean),
        "low": low,
        "high": high,
        "runs": [
            {"at": [point[cost] for point in run.points], "y": [p["value"] for p in run.points]}
            for run in runs
        ],
    }


def _legend(setting: str, runs: Sequence[Run]) -> str:
    return setting + (f" (mean of {len(runs)})" if len(runs) > 1 else "")


def _plain(values: np.ndarray) -> list[float]:
    return [float(f"{value:.7g}") for value in values]


def _write_csv(runs: Sequence[Run], path: Path) -> None:
    """Write a row per measurement; the last row of a run is its result."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["setting", "seed", "task", "metric", "value", *COSTS, "folder"])
        for run in runs:
            for point in run.points:
                costs = [round(point[cost], 3) for cost in COSTS]
                about = [run.setting, run.seed, run.result["task"], run.result["metric"]]
                writer.writerow([*about, point["value"], *costs, run.folder])


def figure(kinds: Sequence[Kind], path: Path) -> None:
    """Plot the metric against each cost: a line per setting, in a band of its 95 % interval."""
    import matplotlib
    from matplotlib.figure import Figure

    rows = [-(-len(kind.costs) // 2) for kind in kinds]
    labels = [
        {name: textwrap.fill(_legend(name, runs), LETTERS) for name, runs in kind.settings.items()}
        for kind in kinds
    ]
    lines = ["\n".join(of.values()).count("\n") + 1 for of in labels]  # of the legend
    heights = [3.6 * count + 0.3 + 0.26 * below for count, below in zip(rows, lines, strict=True)]
    with matplotlib.rc_context(PLAIN):
        drawn = Figure((11, sum(heights)), dpi=110, layout="constrained")
        parts = drawn.subfigures(len(kinds), 1, squeeze=False, height_ratios=heights)[:, 0]
        for part, kind, count, names in zip(parts, kinds, rows, labels, strict=True):
            axes = part.subplots(count, 2, squeeze=False, sharey=True).flatten()
            for axis, cost in zip(axes, kind.costs, strict=False):
                for number, setting in enumerate(kind.settings):
                    x, mean, within = kind.curves[cost][setting]
                    colour = COLOURS[number % len(COLOURS)]
                    dashes = DASHES[number // len(COLOURS) % len(DASHES)]
                    more = {"label": names[setting], "marker": "o", "markersize": 4}
                    axis.plot(x, mean, dashes, color=colour, **more)
                    if within is not None:
                        axis.fill_between(x, *within.T, color=colour, alpha=0.15, linewidth=0)
                axis.set_xlabel(COSTS[cost])
                axis.set_xlim(left=0)
                axis.xaxis.set_major_formatter(
                    lambda value, _: _short(value) if value >= 1000 else f"{value:g}"
                )
            for axis in axes[: len(kind.costs) : 2]:
                axis.set_ylabel(f"{kind.title.partition(': ')[2]} (of 100)")
            for axis in axes[len(kind.costs) :]:
                axis.set_visible(False)
            part.suptitle(f"held-out {kind.title}", x=0.01, ha="left", fontweight="bold")
            part.legend(*axes[0].get_legend_handles_labels(), loc="outside lower left", ncols=1)
        drawn.savefig(path)


def main() -> None:
    """Run the command. Exit codes: 0 done, 2 a mistake of the user."""
    parser = argparse.ArgumentParser(
        "python -m common.compare", description="Compare runs: a table, curves, tests."
    )
    folders = "run folders, or folders that hold some"
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help=folders)
    out = (
        "folder for comparison.html, .csv and .png (that of a sweep; of other runs none is written)"
    )
    parser.add_argument("--out", type=Path, help=out)
    parser.add_argument("--json", action="store_true", help="print one JSON object, write no file")
    options = parser.parse_args()
    with ending_tool():
        if options.json and options.out:
            raise ConfigError("--out has no effect with --json. Leave out one of them.")
        runs, failures = read_runs(options.folders)
        if options.json:
            print(json.dumps(describe_runs(runs, failures), indent=2))
            return
        report_runs(runs, failures, options.out or find_sweep(options.folders))


def find_sweep(folders: Sequence[Path]) -> Path | None:
    """Return the folder if it is the only one and of a sweep, which has its comparison in it."""
    only = folders[0] if len(folders) == 1 else None
    return only if only is not None and (only / "multirun.yaml").is_file() else None


if __name__ == "__main__":
    main()
