"""The page of a study, made from its results file alone."""

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.study import curves
from common import uncertainty as certainty
from common.config import ConfigError
from common.system import markdown_table, write_text

Record = dict[str, Any]
REACHED = 0.9  # of a run's gain, whose cost is shown


def write(
    study: Any, wanted: Sequence[Record], records: Sequence[Record], path: Path | None
) -> str:
    """Return the page of a study. With `path`, write it there, with its curves next to it.

    Args:
        wanted: the runs that the study asks for.
        records: the records of its results file.
    """
    *outer, compared = study.axes
    lines = [f"# {study.name}", "", study.about.strip(), ""]
    ended = [leave_out(record, study.skip) for record in records if "after" in record]
    places = [
        dict(zip(outer, values, strict=True))
        for values in itertools.product(*(study.axes[axis] for axis in outer))
    ]
    panels = {}
    if len(places) > 1:
        lines += [markdown_table(list_outcomes(study, places, ended)), ""]
        if not study.skip and (rows := list_at_seconds(study, places, ended)):
            lines += ["The same after the seconds that the quickest took:", ""]
            lines += [markdown_table(rows), ""]
    for of in places:
        groups = {value: find_runs(ended, of | {compared: value}) for value in study.axes[compared]}
        groups = {value: runs for value, runs in groups.items() if runs}
        lines += [f"## {name_place(of)}", ""] if of else []
        if groups:
            # A classifier generates nothing.
            drawn = [[r["points"] and r["generated_tokens"] for r in g] for g in groups.values()]
            if all(map(any, drawn)):
                panels[name_place(of) or study.name] = groups
            rows = [describe(compared, value, runs) for value, runs in groups.items()]
            columns = dict.fromkeys(itertools.chain(*rows))  # not all algorithms have all
            lines += [markdown_table([{c: row.get(c, "") for c in columns} for row in rows]), ""]
            lines += [markdown_table(pairs), ""] if (pairs := tell_apart(groups)) else []
        lines += [f"- {text}" for text in list_failures(of, records)]
    lines += ["", describe_state(wanted, records), ""]
    text = "\n".join(lines)
    if path is not None:
        write_text(path, text)
        if panels:
            curves.draw(panels, path.with_suffix(".png"))
    return text


def leave_out(record: Record, count: int) -> Record:
    """Return a record without the first `count` held-out examples. Its course is omitted as well,
    and so are rates of several samples, of which only the means over all examples are stored.

    Raises: ConfigError if the scores of examples are missing.
    """
    if not count:
        return record
    old, new = (record["scores"][when][count:] for when in ("before", "after"))
    if not len(old) or not len(new):
        raise ConfigError(
            f"skip={count} leaves nothing of {name_place(record['of'])}, seed {record['seed']}: the"
            f" scores of its examples are kept of {len(record['scores']['before'])} before and"
            f" {len(record['scores']['after'])} after training. Leave skip out, or raise"
            " evaluate.examples."
        )
    before, after = (mean(spell_out(scores)) for scores in (old, new))
    scores = {"before": old, "after": new}
    metrics = {
        when: {name: value for name, value in measures.items() if not name.startswith("pass@")}
        for when, measures in record["metrics"].items()
    }
    rest = {"before": before, "after": after, "scores": scores, "metrics": metrics, "points": []}
    return record | rest


def name_place(of: dict[str, str]) -> str:
    """Return the name of a combination."""
    return ", ".join(of.values())


def find_runs(records: Sequence[Record], of: dict[str, str]) -> list[Record]:
    """Return the records of a combination."""
    return [record for record in records if record["of"] == of]


def list_outcomes(
    study: Any, places: Sequence[dict[str, str]], records: Sequence[Record]
) -> list[dict[str, str]]:
    """Return a row per compared value: its measure after training for each combination of the
    others, with the interval over seeds and examples, and the mean over all that have it.
    """
    compared, rows = list(study.axes)[-1], []
    for value in study.axes[compared]:
        row, means = {compared: value}, []
        for of in places:
            runs = find_runs(records, of | {compared: value})
            name = name_place(of)
            row[name] = "-"
            if runs:
                means.append(mean(run["after"] for run in runs))
                within = certainty.show_interval(pool(runs))
                row[name] = f"{means[-1]:.1f}" + (f" ({within})" if within else "")
        row["mean"] = f"{mean(means):.1f}" if len(means) == len(places) else "-"
        rows.append(row)
    return rows


def list_at_seconds(
    study: Any, places: Sequence[dict[str, str]], records: Sequence[Record]
) -> list[dict[str, str]]:
    """Return a row per compared value: its mean measure at the time when the quickest value had
    ended, for each combination of the others that has all values. Values that were measured only at
    their ends have none, unless they are the quickest.
    """
    compared, values = list(study.axes.items())[-1]
    rows = {value: {compared: value} for value in values}
    for of in places:
        groups = {value: find_runs(records, of | {compared: value}) for value in values}
        if not all(groups.values()):
            continue
        times = {value: mean(run["seconds"] for run in runs) for value, runs in groups.items()}
        quickest = min(times, key=times.__getitem__)
        for value, runs in groups.items():
            if value == quickest:
                shown = f"{mean(run['after'] for run in runs):.1f}"
            elif all(len(run["points"]) > 2 for run in runs):
                shown = f"{mean(read_at(run['points'], times[quickest]) for run in runs):.1f}"
            else:
                shown = "-"
            rows[value][f"{name_place(of)}, {times[quickest]:.0f} s"] = shown
    return [row for row in rows.values() if len(row) > 1]


def read_at(points: Sequence[Sequence[float]], seconds: float) -> float:
    """Return the measure of a run after a number of seconds, interpolated linearly."""
    _, _, at, values = np.array(points).T
    return float(np.interp(seconds, at, values))


def describe(axis: str, value: str, runs: Sequence[Record]) -> dict[str, str]:
    """Return the row of one combination, over the seeds: means, the interval over seeds and
    examples, and the range of the seeds.
    """
    after = [run["after"] for run in runs]
    row = {
        axis: value,
        "seeds": str(len(runs)),
        "measure": runs[0]["metric"],
        "before": f"{mean(run['before'] for run in runs):.1f}",
        "after": f"{statistics.fmean(after):.1f}",
        "95 %": certainty.show_interval(pool(runs)),
        "seeds from": f"{min(after):.1f} to {max(after):.1f}",
        "steps": f"{mean(run['steps'] for run in runs):.0f}",
        "tokens": f"{mean(run['generated_tokens'] for run in runs) / 1000:,.0f}k",
        "seconds": f"{mean(run['seconds'] for run in runs):.0f}",
    }
    costs = [cost for run in runs if (cost := find_cost(run["points"])) is not None]
    if costs:
        tokens, seconds = (mean(cost[place] for cost in costs) for place in (0, 1))
        row["90 % of the gain after"] = f"{tokens / 1000:,.1f}k, {seconds:.0f} s"
    shared = set.intersection(*(set(run["metrics"]["after"]) for run in runs))
    for name in sorted(shared, key=lambda name: (len(name), name)):
        if name.startswith("pass@") or "/" in name:
            old, new = (
                mean(run["metrics"][when][name] for run in runs) for when in ("before", "after")
            )
            digits = 3 if name.endswith("per_byte") else 1
            row[name] = f"{old:.{digits}f} -> {new:.{digits}f}"
    if entropies := [run["entropy"] for run in runs if len(run["entropy"]) == 2]:
        first, last = (mean(one[place] for one in entropies) for place in (0, 1))
        row["entropy"] = f"{first:.2f} -> {last:.2f}"
    if drifts := [run["drift"] for run in runs if run["drift"] is not None]:
        row["drift, most"] = f"{max(drifts):.2f}"
    return row


def mean(values: Any) -> float:
    """Return the mean of numbers."""
    return statistics.fmean(values)


def find_scores(runs: Sequence[Record]) -> np.ndarray | None:
    """Return the scores after training, [seeds, examples]; None if the examples differ."""
    scores = [run["scores"]["after"] for run in runs]
    alike = len({(run["prompts"], len(one)) for run, one in zip(runs, scores, strict=True)}) == 1
    if not alike or len(scores[0]) < 2:
        return None
    return np.array([spell_out(one) for one in scores])


def spell_out(scores: str | list[float]) -> list[float]:
    """Return the scores of a record in points."""
    return [100.0 * int(s) for s in scores] if isinstance(scores, str) else scores


def pool(runs: Sequence[Record]) -> certainty.Interval | None:
    """Return the interval of the measure after training, over seeds and examples."""
    scores = find_scores(runs)
    return None if scores is None else certainty.find_pooled(scores)


def find_cost(points: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """Return the tokens and seconds after which a run had `REACHED` of its gain, interpolated
    linearly; None if it gained nothing or was measured only at its ends.
    """
    if len(points) < 3 or points[-1][-1] <= points[0][-1]:
        return None
    _, tokens, seconds, values = np.array(points).T
    goal = values[0] + REACHED * (values[-1] - values[0])
    place = int(np.argmax(values >= goal))
    share = (goal - values[place - 1]) / (values[place] - values[place - 1])
    at = [one[place - 1] + share * (one[place] - one[place - 1]) for one in (tokens, seconds)]
    return float(at[0]), float(at[1])


def tell_apart(groups: dict[str, list[Record]]) -> list[dict[str, str]]:
    """Return a row per pair of values: the difference on the same examples, its interval, and its
    test, corrected for the number of pairs (Holm).
    """
    rows, tests = [], []
    for one, other in itertools.combinations(groups, 2):
        if (both := find_scores([*groups[one], *groups[other]])) is None:
            continue
        count = len(groups[one])
        gap, interval, p = certainty.find_difference(both[count:], both[:count])
        shown = certainty.show_interval(interval, signed=True)
        rows.append({"is": one, "above": other, "by": f"{gap:+.1f}", "95 %": shown})
        tests.append((interval, p))
    for row, (interval, p) in zip(rows, certainty.correct(tests), strict=True):
        apart = "yes" if certainty.is_supported(interval, p) else "no"
        row |= {"test": certainty.show_p(p), "told apart": apart}
    return rows


def list_failures(of: dict[str, str], records: Sequence[Record]) -> list[str]:
    """Return a line per run of a combination without a result, with the reason."""
    return [
        f"{name_place(record['of'])}, seed {record['seed']}: {record['verdict']}"
        for record in records
        if "after" not in record and of.items() <= record["of"].items()
    ]


def describe_state(wanted: Sequence[Record], records: Sequence[Record]) -> str:
    """Return the number of existing runs, their machines and commits."""
    there = [
        one
        for one in wanted
        if any((one["of"], one["seed"]) == (r["of"], r["seed"]) for r in records)
    ]
    said = f"{len(there)} of {len(wanted)} runs are there."
    if records:
        devices, versions = (
            sorted({record[key] for record in records}) for key in ("device", "torch")
        )
        commits = sorted({(record["commit"] or "unknown")[:7] for record in records})
        dates = sorted(record["date"][:10] for record in records)
        said += (
            f" {' and '.join(devices)}, torch {' and '.join(versions)}, commits"
            f" {', '.join(commits)}, {dates[0]} to {dates[-1]}."
        )
    return said
