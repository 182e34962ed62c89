"""The W&B dashboard as code: a saved view of a project with the panels that matter for each
algorithm.

    python -m common.dashboard PROJECT
    python -m common.dashboard PROJECT --entity TEAM --algo NAME NAME

The panels are those of common/report/panels.py, which the report of a run shows too. Needs pip
install 'clutch[dashboard]', a key and the network; --json prints the view instead of saving it, and
needs neither.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from common.config import ConfigError, choice
from common.report import panels
from common.report.panels import Panel

X = {"step": "step", "epoch": "epoch", "iteration": "iteration", "order": "step", "event": "step"}
# What a run cost, in the units that algorithms are compared by.
COSTS = {
    "step": "optimizer steps",
    "generated_tokens": "generated tokens",
    "reward_evaluations": "reward evaluations",
}
SYSTEM = {
    "GPU utilisation (%)": r"system/gpu\.\d+\.gpu$",
    "GPU memory (%)": r"system/gpu\.\d+\.memoryAllocated$",
    "GPU power (W)": r"system/gpu\.\d+\.powerWatts$",
    "CPU utilisation (%)": r"system/cpu$",
}


def workspace(entity: str, project: str, algos: Sequence[str]) -> Any:
    """The view as a wandb_workspaces.workspaces.Workspace, not yet saved.

    Raises: ConfigError where wandb-workspaces is not installed.
    """
    try:
        import wandb_workspaces.reports.v2 as blocks
        import wandb_workspaces.workspaces as views
    except ImportError:
        raise ConfigError(
            "the dashboard needs a package: pip install 'clutch[dashboard]'."
        ) from None

    def line(title: str, x: str, y: Sequence[str], unit: str, **more: Any) -> Any:
        patterns = [name for name in y if "*" in name]
        if patterns:
            more["metric_regex"] = (
                "^(" + "|".join(name.replace("*", "[^/]+") for name in patterns) + ")$"
            )
        return blocks.LinePlot(
            title=title, x=x, y=[n for n in y if n not in patterns], title_y=unit, **more
        )

    def drawn(panel: Panel) -> Any:
        unit = "share" if panel.scale == panels.PERCENT else panel.unit
        stacked = {"plot_type": "stacked-area"} if panel.kind == "stack" else {}
        return line(panel.title, X[panel.x], list(panel.curves), unit, **stacked)

    compared = [
        line(f"Held-out metric by {label}", x, ["metric"], "percent, or points")
        for x, label in COSTS.items()
    ]
    compared += [
        blocks.BarPlot(
            title="Held-out metric after training", metrics=[blocks.SummaryMetric("after")]
        ),
        blocks.ScalarChart(
            title="Gain", metric=blocks.SummaryMetric("gain"), groupby_aggfunc="mean"
        ),
    ]
    tables: list[Any] = [
        blocks.WeavePanelSummaryTable(table_name=f"completions/{name}")
        for name in ("before", "after")
    ]
    system: list[Any] = [
        blocks.LinePlot(title=title, metric_regex=pattern) for title, pattern in SYSTEM.items()
    ]
    sections = [
        views.Section(name="All algorithms", panels=compared, is_open=True),
        *(
            views.Section(
                name=a, panels=[drawn(p) for p in panels.find_panels()[a]], is_open=len(algos) == 1
            )
            for a in algos
        ),
        views.Section(name="Completions", panels=tables),
        views.Section(name="System", panels=system),
    ]
    return views.Workspace(entity=entity, project=project, name="Clutch", sections=sections)


def main() -> int:
    """The command line. Exit codes: 0 done, 2 a mistake."""
    parser = argparse.ArgumentParser(
        "python -m common.dashboard", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("project", help="W&B project, as in tracker.project")
    parser.add_argument("--entity", help="user or team; default: that of the key")
    parser.add_argument(
        "--algo", nargs="+", default=list(panels.find_panels()), metavar="NAME", help="default: all"
    )
    parser.add_argument("--json", action="store_true", help="print the view and save nothing")
    options = parser.parse_args()
    try:
        for name in options.algo:
            choice("--algo", name, tuple(panels.find_panels()))
        entity = options.entity or ("" if options.json else _entity())
        view = workspace(entity, options.project, options.algo)
        if options.json:
            print(
                json.dumps(
                    view._to_model().spec.model_dump(by_alias=True, exclude_none=True), indent=1
                )
            )
        else:
            print(f"saved: {view.save().url}")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _entity() -> str:
    """The default entity of the configured key."""
    import wandb

    if not wandb.login(prompt=False, verify=False):
        raise ConfigError(
            "no W&B key is configured. Run wandb login, or print the view with --json."
        )
    entity = wandb.Api().default_entity
    if not entity:
        raise ConfigError("the W&B key has no default entity. Give one: --entity TEAM.")
    return entity


if __name__ == "__main__":
    sys.exit(main())
