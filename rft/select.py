"""From samples to training data: the right ones, and a few distinct reasoning paths per prompt.

The gain of rejection-sampling fine-tuning comes from the number of distinct reasoning paths
(arXiv:2308.01825). Two completions have the same path if their texts are equal, or if the task's
`path_key` (normalised equations or numbers) is; of the distinct ones, those whose texts differ most
are kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from Levenshtein import distance

from rft.config import SelectConfig
from rft.generate import Record

QUARTERS = (25, 50, 75)


@dataclass
class Selection:
    """The selected training data.

    Attributes:
        kept: the selected records by prompt id, in order of the ids.
        stats: the numbers of RUN/iteration-K/selected.json.
    """

    kept: dict[int, list[Record]]
    stats: dict[str, Any]


def select(
    records: Sequence[Record], settings: SelectConfig, can_answer: bool = False
) -> Selection:
    """Select training data from the samples of one or more iterations.

    Args: can_answer: whether the task has `answer`, so that a record's "parsed" tells whether there
    was an answer.
    """
    by_prompt: dict[int, list[Record]] = {}
    for record in records:
        by_prompt.setdefault(record["prompt"], []).append(record)
    chosen: dict[int, list[Record]] = {}
    paths = all_right = all_wrong = dropped = 0
    histogram = dict.fromkeys(("none", *(f"to {q}%" for q in QUARTERS), "below all", "all"), 0)
    for prompt in sorted(by_prompt):
        samples = by_prompt[prompt]
        right = [record for record in samples if record["accepted"]]
        histogram[name_share(len(right), len(samples))] += 1
        all_wrong += not right
        all_right += len(right) == len(samples)
        if not right:
            continue
        if settings.drop_all_right and len(right) == len(samples):
            dropped += 1
            continue
        different = distinct(right)
        paths += len(different)
        chosen[prompt] = diverse(different, settings.keep_per_prompt, settings.min_distance)
    prompts, samples = len(by_prompt), len(records)
    all_prompts, all_samples, solved = max(1, prompts), max(1, samples), prompts - all_wrong
    accepted = sum(record["accepted"] for record in records)
    answered = sum(bool(record["parsed"]) for record in records) / all_samples
    stats = {
        "prompts": prompts,
        "samples": samples,
        "accepted": accepted,
        "accepted_share": accepted / all_samples,
        "answered_share": answered if can_answer else None,
        "unscored_share": sum("unscored" in record for record in records) / all_samples,
        "truncated_share": sum(not record["finished"] for record in records) / all_samples,
        "repeating_share": sum(record.get("repeating", False) for record in records) / all_samples,
        "solved_share": solved / all_prompts,
        "all_right_share": all_right / all_prompts,
        "all_wrong_share": all_wrong / all_prompts,
        "dropped_all_right": dropped,
        "paths_per_solved_prompt": paths / max(1, solved - dropped),
        "kept": sum(map(len, chosen.values())),
        "kept_prompts": len(chosen),
        "hinted": sum(record["round"] == "hint" for rows in chosen.values() for record in rows),
        "entropy": sum(record["entropy"] for record in records) / all_samples,
        "prompts_by_share_right": histogram,
    }
    return Selection(chosen, stats)


def name_share(right: int, of: int) -> str:
    """Return the name of the histogram's column for a share of right samples."""
    if right in (0, of):
        return "all" if right else "none"
    return next((f"to {q}%" for q in QUARTERS if 100 * right <= q * of), "below all")


def distinct(right: Sequence[Record]) -> list[Record]:
    """Return one sample per reasoning path, those of the most frequent path first."""
    ways: dict[str, list[Record]] = {}
    for record in right:
        ways.setdefault(record["path"] or " ".join(record["completion"].split()), []).append(record)
    return [way[0] for way in sorted(ways.values(), key=len, reverse=True)]


def diverse(ways: Sequence[Record], most: int, min_distance: float) -> list[Record]:
    """Return up to `most` of `ways`: the first, then repeatedly the one farthest from all selected
    ones.

    Args: min_distance: the least normalised edit distance (0 = equal, 1 = nothing in common) from
    all selected ones.
    """
    taken, rest = [ways[0]], list(ways[1:])
    gaps = [_gap(ways[0], way) for way in rest]
    while rest and len(taken) < most:
        farthest = max(range(len(rest)), key=gaps.__getitem__)
        if gaps[farthest] < min_distance:
            break
        taken.append(rest.pop(farthest))
        gaps.pop(farthest)
        gaps = [min(gap, _gap(taken[-1], way)) for gap, way in zip(gaps, rest, strict=True)]
    return taken


def _gap(one: Record, other: Record) -> float:
    a, b = one["completion"], other["completion"]
    return distance(a, b) / max(1, len(a), len(b))
