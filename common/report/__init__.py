"""The output of a run: trackers, progress, result, report pages, plots, advice."""

from common.report import advice, card, gpu_usage, page, panels, plots, run_folder, samples, summary
from common.report.forgetting import find_others
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
from common.report.run_folder import COSTS
from common.report.runs import Failure, Run, find_differing, read_runs
from common.report.summary import Result, find_commit, side_by_side
from common.report.tracker import Tracker
from common.report.web import render

__all__ = [
    "COLOURS",
    "COSTS",
    "DPI",
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
    "Failure",
    "Panel",
    "Result",
    "Run",
    "Tracker",
    "advice",
    "card",
    "find_commit",
    "find_differing",
    "find_others",
    "gpu_usage",
    "page",
    "panels",
    "plots",
    "read_runs",
    "render",
    "run_folder",
    "samples",
    "side_by_side",
    "summary",
    "watch_completions",
]
