"""The curves of a run of GRPO: its report and its W&B dashboard show them."""

from common.report import (
    GRADIENT,
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

ALGORITHM = "grpo"

PANELS = (
    REWARD,
    METRIC,
    TEXT,
    THROUGHPUT,
    PHASES,
    MEMORY,
    UTILISATION,
    Panel(
        "Groups with nothing to teach",
        "% of groups",
        {
            "dead_all_wrong": "all wrong",
            "dead_all_right": "all right",
            "dead_cut_off": "cut off",
            "dead_all_equal": "equal in between",
            "dead_unscored": "no reward",
        },
        kind="stack",
        scale=PERCENT,
    ),
    Panel(
        "Spread in a group",
        "standard deviation of reward",
        {"reward_std": "group"},
        zero=True,
    ),
    Panel("Components of the reward", "reward", {"components/*": ""}),
    Panel("Logged by reward functions", "as logged", {"logged/*": ""}),
    Panel("Entropy", "nats per token", {"entropy": "policy"}, zero=True),
    Panel(
        "KL divergence",
        "nats per token",
        {"kl": "from the reference", "approx_kl": "from the policy that sampled"},
        zero=True,
    ),
    Panel(
        "Trainer against sampler",
        "|difference of log p| per token",
        {"sampler_gap": "gap"},
        zero=True,
    ),
    Panel(
        "Clipped and cut off",
        "%",
        {
            "clip_fraction": "tokens clipped",
            "truncated": "cut off",
            "repeating": "of these, in a loop",
            "gibberish": "with a token rarer than chance",
        },
        scale=PERCENT,
        zero=True,
    ),
    Panel("Age of the samples", "optimizer steps", {"staleness": "mean"}, zero=True),
    Panel("Prompts that have retired", "%", {"retired": "share"}, scale=PERCENT, zero=True),
    Panel("Length of a completion", "tokens", {"length": "mean"}, zero=True),
    Panel("Loss", "loss", {"loss": "training"}),
    GRADIENT,
    LR,
)
