"""The W&B dashboard as code: a saved view of a project with the panels that matter for each
algorithm.

    python -m common.dashboard PROJECT
    python -m common.dashboard PROJECT --entity TEAM --algo NAME NAME

The panels are those of common/report/panels.py, which the report of a run shows too. Needs pip
install -e '.[dashboard]', a key and the network; --json prints the view instead of saving it, and
needs neither.
"""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from common.config import ConfigError, choice
from common.report import Panel, panels
from common.system import ending_tool, import_optional

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
    """Return the view as a wandb_workspaces.workspaces.Workspace, not yet saved."""
    missing = "the dashboard needs pip install -e '.[dashboard]'."
    blocks = import_optional("wandb_workspaces.reports.v2", missing)
    views = import_optional("wandb_workspaces.workspaces", missing)

    def line(title: str, x: str, y: list[Any], unit: str, **more: Any) -> Any:
        return blocks.LinePlot(title=title, x=x, y=y, title_y=unit, **more)

    def drawn(panel: Panel) -> Any:
        unit = "share" if panel.scale == panels.PERCENT else panel.unit
        more = {"plot_type": "stacked-area"} if panel.kind == "stack" else {}
        names = list(panel.curves)
        if any("*" in name for name in names):  # a plot heeds a pattern or names, not both
            but = f"(?!{panel.but.replace('*', '.+')}$)" if panel.but else ""
            pattern = "|".join(names).replace("*", ".+")
            names, more = [], more | {"metric_regex": f"^{but}({pattern})$"}
        return line(panel.title, X[panel.x], names, unit, **more)

    compared = [
        line(f"Held-out metric by {label}", x, ["metric"], "percent, or points")
        for x, label in COSTS.items()
    ]
    after, gain = blocks.SummaryMetric("after"), blocks.SummaryMetric("gain")
    compared += [
        blocks.BarPlot(title="Held-out metric after training", metrics=[after]),
        blocks.ScalarChart(title="Gain", metric=gain, groupby_aggfunc="mean"),
    ]
    names = ("completions/before", "completions/after")
    tables = [blocks.WeavePanelSummaryTable(table_name=name) for name in names]
    system = [blocks.LinePlot(title=t, metric_regex=pattern) for t, pattern in SYSTEM.items()]
    known, alone = panels.find_panels(), len(algos) == 1
    shown: list[tuple[str, list[Any], bool]] = [
        ("All algorithms", compared, True),
        *((algo, [drawn(panel) for panel in known[algo]], alone) for algo in algos),
        ("Completions", tables, False),
        ("System", system, False),
    ]
    sections = [views.Section(name=name, panels=of, is_open=is_open) for name, of, is_open in shown]
    return views.Workspace(entity=entity, project=project, name="Clutch", sections=sections)


def main() -> None:
    """Run the command. Exit codes: 0 done, 2 a mistake of the user."""
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
    with ending_tool("print to another place"):
        for name in options.algo:
            choice("--algo", name, tuple(panels.find_panels()))
        entity = options.entity or ("" if options.json else _entity())
        view = workspace(entity, options.project, options.algo)
        if options.json:
            model = view._to_model().spec.model_dump(by_alias=True, exclude_none=True)
            print(json.dumps(model, indent=1))
        else:
            print(f"saved: {view.save().url}")


def _entity() -> str:
    import wandb

    if not wandb.login(prompt=False, verify=False):
        raise ConfigError("no W&B key is configured. Run wandb login, or use --json.")
    if entity := wandb.Api().default_entity:
        return entity
    raise ConfigError("the W&B key has no default entity. Give one: --entity TEAM.")


if __name__ == "__main__":
    main()
