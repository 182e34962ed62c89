"""Report on the scaling of finished classify runs: tables, figures, a diagnosis and advice.

    python -m ddp_bench.report --root outputs --out report --warmup 1 --datasets ag_news imdb

Reads run folders, scaling runs (scaling.json) and predictions (prediction.json) anywhere below
--root, and groups those of one task with the same settings. Speed-up is rows per second relative to
one rank. In strong scaling the batch of all ranks together is that of the one rank; in weak scaling
the batch of each rank is. Only training time counts.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from common.config import ConfigError, Natural, check
from common.system import ending_tool
from ddp_bench.report import figures, tables
from ddp_bench.report.diagnosis import group_records
from ddp_bench.report.records import read_records, select_tasks


def write(root: Path, out: Path, warmup: int = 1, datasets: Sequence[str] | None = None) -> str:
    """Write the artefacts into `out`; return the text of performance_report.txt.

    Raises: ConfigError if there is no complete run below `root`.
    """
    check(Natural, warmup, "--warmup")
    records, incomplete = read_records(root, warmup)
    records = select_tasks(records, datasets)
    if not records:
        reasons = "".join(f"\n  {folder}: {reason}" for folder, reason in incomplete)
        raise ConfigError(
            f"--root {root} holds no finished classify run. Make one with python launch.py"
            f" algo=classify{reasons}"
        )
    groups = group_records(records)
    out.mkdir(parents=True, exist_ok=True)
    text = tables.describe_groups(groups, incomplete)
    rows = [tables.make_cells(group, point) for group in groups for point in group.points]
    tables.write_rows(rows, out / "comprehensive_summary.csv")
    tables.write_tex(groups, out / "summary_table.tex")
    (out / "performance_report.txt").write_text(text, encoding="utf-8")
    for group in groups:
        figures.draw_figures(group, out, warmup)
    return text


def main() -> None:
    """Run the command line. Exit codes: 0 done, 2 a user error."""
    parser = argparse.ArgumentParser(
        "python -m ddp_bench.report", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--root", type=Path, required=True, help="folder with run folders, at any depth")
    add("--out", type=Path, help="where to write; default: ROOT/report")
    add("--warmup", type=int, default=1, help="epochs of each run that do not count; default: 1")
    add("--datasets", nargs="+", metavar="NAME", help="these tasks only; default: all")
    options = parser.parse_args()
    out = options.out or options.root / "report"
    with ending_tool():
        print(write(options.root, out, options.warmup, options.datasets))
        print(f"written to {out}")
