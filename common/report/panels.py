"""The curves of a run's report and the panels of its W&B dashboard, from one list.

Names are those that `common.system.events.numeric_values` gives the numbers of events. A panel
appears if its curves were logged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any

from common.system import has_stages

PERCENT = 100.0
# The x axes of panels.
AXES = {
    "step": "optimizer step",
    "epoch": "epoch",
    "iteration": "iteration (0 = base model)",
    "event": "event of the log",
}
# by stage, counted over all iterations
ORDERS = {"generate": "chunk of samples", "finetune": "fine-tuning step"}


@dataclass(frozen=True)
class Panel:
    """One figure."""

    title: str
    unit: str  # of the y axis
    # A measure (a pattern stands for all that fit) -> its legend, "" for the last part of the name.
    curves: dict[str, str]
    x: str = "step"  # epoch | iteration | event (of the log) | order (of events with the measure)
    kind: str = "lines"  # stack (shares of a whole) | bars (a table: a distribution per iteration)
    scale: float = 1.0  # of values, for `unit`; the dashboard shows them as they are
    zero: bool = False  # the y axis starts at 0
    exact: bool = False  # no running mean
    but: str = ""  # a pattern of measures that it leaves out

    def axis(self, history: Sequence[dict[str, Any]]) -> str:
        """Return the title of its x axis, for a run with these events."""
        if self.x == "order":  # the measures of a panel are of one stage
            return ORDERS[next(iter(self.curves)).split("/")[0]]
        if self.x == "step" and has_stages(history):
            return AXES["event"]
        return AXES[self.x]

    def found(self, names: list[str]) -> dict[str, str]:
        """Return the measures among `names` that it shows, with their legends."""
        return {
            name: legend or name.removeprefix(pattern.rstrip("*"))
            for pattern, legend in self.curves.items()
            for name in names
            if fnmatchcase(name, pattern) and not fnmatchcase(name, self.but)
        }


# Panels that several algorithms show.
REWARDS = {"reward": "mean", "reward_best": "best member"}
REWARD = Panel("Reward of training samples", "reward", REWARDS)
TEXTS = "metrics/text/*"
MEASURES = {"metrics/*": "", "validation": "the first, on validation examples"}
METRIC = Panel("Held-out measures", "percent, or points of 100", MEASURES, but=TEXTS)
TEXT = Panel("Held-out text", "bits per byte", {TEXTS: ""})
THROUGHPUT = Panel("Throughput", "tokens/s", {"tokens_per_second": "tokens"}, zero=True)
PHASES = Panel("Where the time of a step goes", "seconds", {"phase_seconds/*": ""}, kind="stack")
MEMORY = Panel("Peak memory", "GB", {"peak_memory_gb": "peak"}, zero=True, exact=True)
UTILISATION = Panel("Utilisation of the GPUs", "percent", {"gpu/utilisation_*": ""}, exact=True)
GRADIENT = Panel("Gradient norm", "norm before clipping", {"grad_norm": "norm"}, zero=True)
LR = Panel("Learning rate", "learning rate", {"lr": "lr"}, zero=True, exact=True)


def find_panels() -> dict[str, tuple[Panel, ...]]:
    """Return the panels of each algorithm: those of every top-level folder with a panels.py."""
    root = Path(__file__).resolve().parents[2]
    modules = [import_module(f"{path.parent.name}.panels") for path in root.glob("*/panels.py")]
    return {
        module.ALGORITHM: module.PANELS for module in sorted(modules, key=lambda m: m.ALGORITHM)
    }
