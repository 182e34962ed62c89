"""The curves of a run of classify: its report and its W&B dashboard show them."""

from common.report.panels import GRADIENT, LR, MEMORY, PHASES, THROUGHPUT, Panel

ALGORITHM = "classify"

PANELS = (
    Panel(
        name="metric",
        title="Validation",
        unit="percent",
        curves={"validation/accuracy": "accuracy", "validation/macro_f1": "macro F1"},
        x="epoch",
    ),
    THROUGHPUT,
    PHASES,
    MEMORY,
    GRADIENT,
    LR,
    Panel(
        name="loss",
        title="Loss",
        unit="loss (nats)",
        curves={"loss": "training", "validation/loss": "validation"},
        zero=True,
    ),
    Panel(
        name="rows",
        title="Rows a second",
        unit="rows/s",
        curves={"samples_per_second": "rows"},
        zero=True,
    ),
)
