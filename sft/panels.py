"""The curves of a run of SFT: its report and its W&B dashboard show them."""

from common.report import (
    GRADIENT,
    LR,
    MEMORY,
    METRIC,
    PHASES,
    TEXT,
    THROUGHPUT,
    UTILISATION,
    Panel,
)

ALGORITHM = "sft"

PANELS = (
    Panel("Loss", "nats per token", {"loss": "training"}),
    METRIC,
    TEXT,
    THROUGHPUT,
    PHASES,
    MEMORY,
    UTILISATION,
    GRADIENT,
    LR,
)
