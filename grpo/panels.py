"""The curves of a run of GRPO: its report and its W&B dashboard show them."""

from common.report.panels import (
    GRADIENT,
    LR,
    MEMORY,
    METRIC,
    PERCENT,
    PHASES,
    REWARD,
    THROUGHPUT,
    Panel,
)

ALGORITHM = "grpo"

PANELS = (
    REWARD,
    METRIC,
    THROUGHPUT,
    PHASES,
    MEMORY,
    Panel(
        name="dead",
        title="Groups with nothing to teach",
        unit="% of groups",
        curves={
            "dead_all_wrong": "all wrong",
            "dead_all_right": "all right",
            "dead_cut_off": "cut off",
            "dead_all_equal": "equal in between",
        },
        kind="stack",
        scale=PERCENT,
    ),
    Panel(
        name="spread",
        title="Spread in a group",
        unit="standard deviation of reward",
        curves={"reward_std": "group"},
        zero=True,
    ),
    Panel(
        name="components",
        title="Components of the reward",
        unit="reward",
        curves={"components/*": ""},
    ),
    Panel(
        name="entropy",
        title="Entropy",
        unit="nats a token",
        curves={"entropy": "policy"},
        zero=True,
    ),
    Panel(
        name="kl",
        title="Divergence",
        unit="nats a token",
        curves={"kl": "from the reference", "ratio_kl": "from the policy that sampled"},
        zero=True,
    ),
    Panel(
        name="sampler_gap",
        title="Trainer against sampler",
        unit="|difference of log p| a token",
        curves={"sampler_gap": "gap"},
        zero=True,
    ),
    Panel(
        name="clipped",
        title="Clipped and cut off",
        unit="%",
        curves={"clipped": "tokens clipped", "truncated": "completions cut off"},
        scale=PERCENT,
        zero=True,
    ),
    Panel(
        name="length",
        title="Length of a completion",
        unit="tokens",
        curves={"length": "mean"},
        zero=True,
    ),
    Panel(
        name="loss",
        title="Loss",
        unit="loss",
        curves={"loss": "training"},
    ),
    GRADIENT,
    LR,
)
