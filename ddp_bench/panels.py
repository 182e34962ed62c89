"""The curves of a classify run, for its report and its W&B dashboard."""

from common.report import GRADIENT, LR, MEMORY, PHASES, THROUGHPUT, UTILISATION, Panel

ALGORITHM = "classify"
MEASURES = {"validation/accuracy": "accuracy", "validation/macro_f1": "macro F1"}
LOSSES = {"loss": "training", "validation/loss": "validation"}

PANELS = (
    Panel("Validation", "percent", MEASURES, x="epoch"),
    THROUGHPUT,
    PHASES,
    MEMORY,
    UTILISATION,
    GRADIENT,
    LR,
    Panel("Loss", "loss (nats)", LOSSES, zero=True),
    Panel("Rows a second", "rows/s", {"samples_per_second": "rows"}, zero=True),
)
