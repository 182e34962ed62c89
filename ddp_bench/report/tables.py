"""Write the findings as text: comprehensive_summary.csv, summary_table.tex, and a
report in words.
"""

import csv
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ddp_bench.report.diagnosis import ENOUGH, Group, Point
from ddp_bench.report.records import PHASES

EXPLAINED = {
    "launch-bound": "the work of a step does not shrink with its rows",
    "communication-bound": "the ranks wait for gradients, or for each other",
    "loader-bound": "the ranks wait for batches",
    "oversubscribed cores": "the ranks share cores that one rank has for itself",
}


TEX_HEAD: str = r"""\documentclass{article}
\usepackage[margin=1cm]{geometry}
\begin{document}
\noindent\footnotesize
\begin{tabular}{lllrrrrrrr}
\hline
Task & Model & Scaling & Ranks & Batch & Epoch (s) & Rows/s & Speed-up & Efficiency & Test acc. \\
\hline
"""


def write_rows(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a CSV file with one line per row; the keys of the first row are the header."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def align(rows: Sequence[Sequence[str]], left: int = 0) -> list[str]:
    """Return the rows as lines of columns, aligned to the right except for the first `left`
    columns.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    signs = ["<" if number < left else ">" for number in range(len(widths))]
    return [
        "  ".join(f"{t:{s}{w}}" for t, s, w in zip(row, signs, widths, strict=True)).rstrip()
        for row in rows
    ]


def make_cells(group: Group, point: Point) -> dict[str, Any]:
    """Return a line of comprehensive_summary.csv."""
    first = point.records[0]
    accuracy = [max(record.accuracy) for record in point.records if record.accuracy]
    cells = {
        "task": group.task,
        "model": group.model,
        "group": group.name,
        "scaling": point.mode,
        "ranks": point.ranks,
        "batch_rows": point.batch_rows,
        "hook": first.wrapper.get("hook", "none"),
        "runs": len(point.records),
        "epoch_seconds": point.number("epoch_seconds"),
        "step_seconds_p50": point.step,
        "step_seconds_p90": point.number("step_p90"),
        "rows_per_second": point.speed,
        "speedup": point.speedup,
        "efficiency_percent": point.efficiency,
        "how": point.how,
        "predicted_step_seconds": point.foreseen,
        "prediction_error_percent": point.error,
        **{f"{name}_seconds": point.phases.get(name) for name in PHASES},
        "best_validation_accuracy_percent": statistics.median(accuracy) if accuracy else None,
        "test_accuracy_percent": point.number("test"),
        "causes": "; ".join(point.causes),
        "device": first.device,
        "dtype": first.dtype,
        "folders": "; ".join(dict.fromkeys(record.folder for record in point.records)),
    }
    return {k: f"{v:.5g}" if isinstance(v, float) else v for k, v in cells.items()}


def escape(text: str) -> str:
    r"""Return text as LaTeX prints it: "87 % of a_b" -> "87 \% of a\_b"."""
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return text.translate(str.maketrans({c: f"\\{c}" for c in "%_&#${}"} | special))


def write_tex(groups: Iterable[Group], path: Path) -> None:
    """Write summary_table.tex: a small document; its tabular may be copied into another one."""
    formats = ("{:.2f}", "{:.0f}", "{:.2f}x", "{:.1f} %", "{:.1f} %")
    lines = TEX_HEAD.splitlines()
    for group in groups:
        for point in group.points:
            texts = [group.task, group.model, point.mode, str(point.ranks), str(point.batch_rows)]
            numbers = (point.number("epoch_seconds"), point.speed, point.speedup)
            for number, form in zip(
                (*numbers, point.efficiency, point.number("test")), formats, strict=True
            ):
                texts.append("--" if number is None else form.format(number))
            lines.append(" & ".join(map(escape, texts)) + r" \\")
        lines.append(r"\hline")
    lines += [r"\end{tabular}", r"\end{document}", ""]
    path.write_text("\n".join(lines), encoding="utf-8")


def describe_groups(groups: Iterable[Group], incomplete: Sequence[tuple[str, str]] = ()) -> str:
    """Return the text of performance_report.txt: measurements, causes and advice."""
    lines: list[str] = []
    for group in groups:
        first = group.points[0].records[0]
        title = f"{group.name}: {group.model}, {first.dtype}, {first.device}"
        title += " (predicted, not measured)" * first.predicted
        lines += [title, "=" * len(title), ""]
        for point in group.points:
            lines += [*_describe_point(point), ""]
        if not any(point.ranks == 1 for point in group.points):
            lines += ["No run of one rank: there is no speed-up to tell. Run one with opt=[].", ""]
        elif len(group.points) == 1:
            lines += ["No run of several ranks. Run one with 'opt=[ddp]', or algo=scaling.", ""]
    if incomplete:
        lines += ["Incomplete folders, not counted", "===============================", ""]
        lines += [f"{folder}: {reason}" for folder, reason in incomplete] + [""]
    return "\n".join(lines)


def _describe_point(point: Point) -> list[str]:
    head = f"{point.named}, {point.batch_rows} rows a step"
    head += (f", {point.mode} scaling" if point.base is not None else "") + point.hook
    epoch, p50, p90 = point.number("epoch_seconds"), 1000 * point.step, point.number("step_p90")
    step = f"  step {p50:.2f} ms p50, {1000 * p90:.2f} ms p90; {point.speed:.0f} rows/s"
    lines = [head, step + (f"; epoch {epoch:.2f} s" if epoch is not None else "")]
    if point.foreseen is not None:
        error = point.error or 0
        lines.append(
            f"  predicted {1000 * point.foreseen:.2f} ms, measured {p50:.2f} ms: the prediction is"
            f" {abs(error):.1f} % too {'high' if error > 0 else 'low'}"
        )
    if point.phases:
        phases = [f"{name} {1000 * seconds:.2f} ms" for name, seconds in point.phases.items()]
        lines.append("  phases " + ", ".join(phases))
    if point.mode == "unpaired":
        lines.append("  no run of one rank with this batch, or with that of a rank")
    return lines + (_describe_speedup(point) if point.base is not None else [])


def _describe_speedup(point: Point) -> list[str]:
    speedup, efficiency = point.speedup or 0.0, point.efficiency or 0.0
    if speedup < 1:
        verdict = "NEGATIVE SCALING, slower than one"
    elif speedup < ENOUGH:
        verdict = "no gain to speak of"
    else:
        verdict = "excellent" if efficiency >= 80 else "good" if efficiency >= 60 else "poor"
    lines = [f"  speed-up {speedup:.2f}x, efficiency {efficiency:.1f} %: {verdict}"]
    for number, cause in enumerate(point.causes):
        lines.append(f"  {'also' if number else 'cause'}: {cause}: {EXPLAINED[cause]}")
    if point.causes:
        lines.append(f"  if communication took no time: {point.free:.2f}x")
    elif not point.phases:
        lines.append("  cause: not known, the runs have no phase_seconds")
    elif efficiency < 90:
        lines.append("  cause: not in the phases of rank 0, which take no longer than they should")
    for number, (gain, text) in enumerate(point.advice, 1):
        lines.append(f"  {number}. gain {gain:.2f}x: {text}")
    return lines
