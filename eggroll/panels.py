"""The curves of a run of EGGROLL: its report and its W&B dashboard show them."""

from common.report.panels import LR, MEMORY, METRIC, PERCENT, PHASES, REWARD, THROUGHPUT, Panel

ALGORITHM = "eggroll"

PANELS = (
    REWARD,
    METRIC,
    THROUGHPUT,
    PHASES,
    MEMORY,
    Panel(
        "spread",
        "Spread of the population",
        "standard deviation of reward",
        {"reward_std": "members"},
        zero=True,
    ),
    Panel(
        "drift",
        "Drift of the weights",
        "|W - W0| / |W0|",
        {"drift": "drift"},
        zero=True,
        exact=True,
    ),
    Panel(
        "zero_fitness",
        "Members without influence",
        "% of members",
        {"zero_fitness": "fitness 0, or that of the mirrored member"},
        scale=PERCENT,
        zero=True,
    ),
    LR,
)
