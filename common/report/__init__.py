"""The output of a run: metrics, progress, report pages, plots, comparisons and dashboards."""

from common.report import advice, gpu_usage, page, plots, run_folder, samples, summary
from common.report.compare import Run, read_runs
from common.report.events import EVALUATIONS, events, markdown_table, write_jsonl
from common.report.panels import (
    GRADIENT,
    LR,
    MEMORY,
    METRIC,
    PERCENT,
    PHASES,
    REWARD,
    TEXT,
    TEXTS,
    THROUGHPUT,
    UTILISATION,
    Panel,
)
from common.report.plots import COLOURS, DPI, PLAIN, STYLE
from common.report.progress import watch_completions
from common.report.summary import Result, find_commit
from common.report.tracker import Tracker

__all__ = [
    "COLOURS",
    "DPI",
    "EVALUATIONS",
    "GRADIENT",
    "LR",
    "MEMORY",
    "METRIC",
    "PERCENT",
    "PHASES",
    "PLAIN",
    "REWARD",
    "STYLE",
    "TEXT",
    "TEXTS",
    "THROUGHPUT",
    "UTILISATION",
    "Panel",
    "Result",
    "Run",
    "Tracker",
    "advice",
    "events",
    "find_commit",
    "gpu_usage",
    "markdown_table",
    "page",
    "plots",
    "read_runs",
    "run_folder",
    "samples",
    "summary",
    "watch_completions",
    "write_jsonl",
]
