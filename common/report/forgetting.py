"""Changes of other measures while runs learnt: measures of other tasks and of a text
(evaluate.also, evaluate.text), compared at equal gains on the run's own task.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

Evaluations = Sequence[dict[str, Any]]  # the lines of RUN/evaluations.jsonl


def find_others(runs: Mapping[str, Sequence[Evaluations]]) -> tuple[list[dict[str, str]], str]:
    """Return a row per setting, and a sentence about them: the change of each other measure since
    the start, at the first evaluation by which the run's own measure had gained as much as all runs
    gained. Both are empty if nothing else was measured.

    Args: runs: by setting the evaluations of its runs, each starting with the one before the first
    step.
    """
    every = [run for group in runs.values() for run in group]
    if not every or not all(run and _others(run[0]) for run in every):
        return [], ""
    gain = min(max(_gain(run, record) for record in run) for run in every)
    if gain <= 0:
        return [], "What else changed is not shown: a run has gained nothing on its own task."
    rows, names = [], list(dict.fromkeys(name for run in every for name in _others(run[0])))
    for setting, group in runs.items():
        reached = [next(r for r in run if _gain(run, r) >= gain) for run in group]
        row = {"setting": setting, "gain": _mean(map(_gain, group, reached))}
        row["step"] = f"{fmean(record['step'] for record in reached):.0f}"
        for name in names:
            pairs = [
                (run[0]["metrics"], r["metrics"]) for run, r in zip(group, reached, strict=True)
            ]
            everywhere = all(name in old and name in new for old, new in pairs)
            row[name] = _mean(new[name] - old[name] for old, new in pairs) if everywhere else ""
        rows.append(row)
    return rows, (
        f"What else changed since the start, where each run had first gained {gain:.1f} points on"
        " its own task, which is what all gained."
    )


def _others(record: dict[str, Any]) -> list[str]:
    return [name for name in record.get("metrics", {}) if "/" in name]


def _gain(run: Evaluations, record: dict[str, Any]) -> float:
    return record["metric"] - run[0]["metric"]


def _mean(changes: Any) -> str:
    mean = fmean(changes)
    return f"{mean:+.3f}" if abs(mean) < 1 else f"{mean:+.1f}"
