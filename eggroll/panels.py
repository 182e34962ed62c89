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
        name="spread",
        title="Spread of the population",
        unit="standard deviation of reward",
        curves={"reward_std": "members"},
        zero=True,
    ),
    Panel(
        name="drift",
        title="Drift of the weights",
        unit="|W - W0| / |W0|",
        curves={"drift": "drift"},
        zero=True,
        exact=True,
    ),
    Panel(
        name="zero_fitness",
        title="Members without influence",
        unit="% of members",
        curves={"zero_fitness": "fitness 0, or that of the mirrored member"},
        scale=PERCENT,
        zero=True,
    ),
    LR,
)
