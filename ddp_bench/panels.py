"""The curves of a run of classify: its report and its W&B dashboard show them."""

from common.report.panels import GRADIENT, LR, MEMORY, PHASES, THROUGHPUT, Panel

ALGORITHM = "classify"

PANELS = (
    Panel(
        "metric",
        "Validation",
        "percent",
        {"validation/accuracy": "accuracy", "validation/macro_f1": "macro F1"},
        x="epoch",
    ),
    THROUGHPUT,
    PHASES,
    MEMORY,
    GRADIENT,
    LR,
    Panel(
        "loss",
        "Loss",
        "loss (nats)",
        {"loss": "training", "validation/loss": "validation"},
        zero=True,
    ),
    Panel("rows", "Rows a second", "rows/s", {"samples_per_second": "rows"}, zero=True),
)
