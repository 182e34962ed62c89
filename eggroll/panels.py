"""The curves of a run of EGGROLL: its report and its W&B dashboard show them."""

from common.report import (
    LR,
    MEMORY,
    METRIC,
    PERCENT,
    PHASES,
    REWARD,
    TEXT,
    THROUGHPUT,
    UTILISATION,
    Panel,
)

ALGORITHM = "eggroll"

PANELS = (
    REWARD,
    METRIC,
    TEXT,
    THROUGHPUT,
    PHASES,
    MEMORY,
    UTILISATION,
    Panel(
        "Spread of the population",
        "standard deviation of reward",
        {"reward_std": "members"},
        zero=True,
    ),
    Panel(
        "Drift of the weights",
        "|W - W0| / |W0|",
        {"drift": "since the start", "update_norm": "in the step"},
        zero=True,
        exact=True,
    ),
    Panel(
        "Members without influence",
        "% of members",
        {"zero_fitness": "fitness 0, or that of the mirrored member"},
        scale=PERCENT,
        zero=True,
    ),
    Panel(
        "Texts of the members",
        "% of completions",
        {
            "changed": "not the unperturbed model's",
            "identical_pairs": "those of the mirrored member",
            "truncated": "cut off",
            "repeating": "cut off in a loop",
        },
        scale=PERCENT,
        zero=True,
        exact=True,
    ),
    Panel(
        "Signal in the fitness",
        "cosine of two halves' updates",
        {"prompt_agreement": "halves of the prompts", "member_agreement": "halves of the members"},
    ),
    Panel("Components of the reward", "reward", {"components/*": ""}),
    Panel("Logged by reward functions", "as logged", {"logged/*": ""}),
    Panel(
        "What the update is made of",
        "cosine with the update",
        {"component_cosine/*": ""},
        exact=True,
    ),
    Panel(
        "Updates after rounding",
        "share, or cosine with the intended",
        {
            "applied_share": "weights that a step changed",
            "applied_cosine": "cosine, the step",
            "applied_cosine_all": "cosine, since the start",
        },
        exact=True,
    ),
    LR,
)
