"""What is worth looking at in a run: the curves of its report and the panels of the W&B dashboard,
from one list.

Names are those that `common.report.events.numbers` makes of the events. A panel appears where its
curves were logged.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

ALGORITHMS = ("eggroll", "grpo", "rft", "classify")
PERCENT = 100.0


@dataclass(frozen=True)
class Panel:
    """One figure.

    Attributes:
        name: of its file. title, unit: with the y axis.
        curves: name of a measure (a pattern stands for each name that fits) -> what the legend
        says, "" for the last part
            of the name.
        algos: whose run it is about. x: step | epoch | iteration | event (of the log) | order (of
        the events that have
            the measure).
        kind: lines | stack (shares of a whole) | bars (a distribution for each iteration).
        scale: what values are multiplied with, for `unit`; the dashboard shows them as they are.
        zero: the y axis starts at 0. exact: without a running mean.
    """

    name: str
    title: str
    unit: str
    curves: dict[str, str]
    algos: tuple[str, ...] = ALGORITHMS
    x: str = "step"
    kind: str = "lines"
    scale: float = 1.0
    zero: bool = False
    exact: bool = False

    def found(self, names: list[str]) -> dict[str, str]:
        """The measures among `names` that it shows, with their legends."""
        return {
            name: legend or name.rsplit("/", 1)[-1]
            for pattern, legend in self.curves.items()
            for name in names
            if fnmatchcase(name, pattern)
        }


_REWARDS, _RFT, _CLASSIFY = ("eggroll", "grpo"), ("rft",), ("classify",)
_EGGROLL, _GRPO, _STEPS = ("eggroll",), ("grpo",), ("eggroll", "grpo", "classify")

PANELS = (
    Panel(
        *("reward", "Reward of training samples", "reward"),
        {"reward": "mean", "reward_best": "best member"},
        _REWARDS,
    ),
    Panel("metric", "Held-out measures", "percent, or points of 100", {"metrics/*": ""}, _REWARDS),
    Panel(
        *("metric", "Held-out measures", "percent, or points of 100"),
        {"metrics/*": "", "evaluate/validation": "validation"},
        _RFT,
        x="iteration",
    ),
    Panel(
        *("metric", "Validation", "percent"),
        {"validation/accuracy": "accuracy", "validation/macro_f1": "macro F1"},
        _CLASSIFY,
        x="epoch",
    ),
    Panel(
        "throughput", "Throughput", "tokens/s", {"tokens_per_second": "tokens"}, _STEPS, zero=True
    ),
    Panel(
        "phases",
        "Where the time of a step goes",
        "seconds",
        {"phase_seconds/*": ""},
        _STEPS,
        kind="stack",
    ),
    Panel("memory", "Peak memory", "GB", {"peak_memory_gb": "peak"}, _STEPS, zero=True, exact=True),
    # eggroll
    Panel(
        "spread",
        "Spread of the population",
        "standard deviation of reward",
        {"reward_std": "members"},
        _EGGROLL,
        zero=True,
    ),
    Panel(
        "drift",
        "Drift of the weights",
        "|W - W0| / |W0|",
        {"drift": "drift"},
        _EGGROLL,
        zero=True,
        exact=True,
    ),
    Panel(
        *("zero_fitness", "Members without influence", "% of members"),
        {"zero_fitness": "fitness 0, or that of the mirrored member"},
        _EGGROLL,
        scale=PERCENT,
        zero=True,
    ),
    # grpo
    Panel(
        *("dead", "Groups with nothing to teach", "% of groups"),
        {
            "dead_all_wrong": "all wrong",
            "dead_all_right": "all right",
            "dead_cut_off": "cut off",
            "dead_all_equal": "equal in between",
        },
        _GRPO,
        kind="stack",
        scale=PERCENT,
    ),
    Panel(
        "spread",
        "Spread in a group",
        "standard deviation of reward",
        {"reward_std": "group"},
        _GRPO,
        zero=True,
    ),
    Panel("components", "Components of the reward", "reward", {"components/*": ""}, _GRPO),
    Panel("entropy", "Entropy", "nats a token", {"entropy": "policy"}, _GRPO, zero=True),
    Panel(
        *("kl", "Divergence", "nats a token"),
        {"kl": "from the reference", "ratio_kl": "from the policy that sampled"},
        _GRPO,
        zero=True,
    ),
    Panel(
        "sampler_gap",
        "Trainer against sampler",
        "|difference of log p| a token",
        {"sampler_gap": "gap"},
        _GRPO,
        zero=True,
    ),
    Panel(
        *("clipped", "Clipped and cut off", "%"),
        {"clipped": "tokens clipped", "truncated": "completions cut off"},
        _GRPO,
        scale=PERCENT,
        zero=True,
    ),
    Panel("length", "Length of a completion", "tokens", {"length": "mean"}, _GRPO, zero=True),
    Panel("loss", "Loss", "loss", {"loss": "training"}, _GRPO),
    Panel(
        "gradient",
        "Gradient norm",
        "norm before clipping",
        {"grad_norm": "norm"},
        ("grpo", "classify"),
        zero=True,
    ),
    Panel("lr", "Learning rate", "learning rate", {"lr": "lr"}, _STEPS, zero=True, exact=True),
    # rft
    Panel(
        *("accepted", "Sampling", "%"),
        {"generate/accepted": "samples right", "generate/solved": "prompts solved so far"},
        _RFT,
        x="order",
        scale=PERCENT,
        zero=True,
    ),
    Panel(
        *("by_prompt", "Acceptance by prompt", "prompts"),
        {"select/prompts_by_share_right/*": ""},
        _RFT,
        x="iteration",
        kind="bars",
    ),
    Panel(
        "reward",
        "Reward of training samples",
        "reward",
        {"generate/reward": "mean"},
        _RFT,
        x="order",
    ),
    Panel(
        "loss",
        "Fine-tuning",
        "loss a token (nats)",
        {"finetune/loss": "loss"},
        _RFT,
        x="order",
        zero=True,
    ),
    Panel(
        "gradient",
        "Gradient norm",
        "norm before clipping",
        {"finetune/grad_norm": "norm"},
        _RFT,
        x="order",
        zero=True,
    ),
    Panel(
        "lr",
        "Learning rate",
        "learning rate",
        {"finetune/lr": "lr"},
        _RFT,
        x="order",
        zero=True,
        exact=True,
    ),
    Panel(
        "entropy",
        "Entropy of samples",
        "nats a token",
        {"generate/entropy": "samples"},
        _RFT,
        x="order",
        zero=True,
    ),
    Panel(
        *("throughput", "Throughput of sampling", "tokens/s"),
        {"generate/tokens_per_second": "generated"},
        _RFT,
        x="order",
        zero=True,
    ),
    Panel(
        *("throughput_training", "Throughput of fine-tuning", "tokens/s"),
        {"finetune/tokens_per_second": "trained"},
        _RFT,
        x="order",
        zero=True,
    ),
    Panel(
        *("phases", "Where the time of a chunk goes", "seconds"),
        {"generate/phase_seconds/*": ""},
        _RFT,
        x="order",
        kind="stack",
    ),
    Panel(
        *("phases_training", "Where the time of a fine-tuning step goes", "seconds"),
        {"finetune/phase_seconds/*": ""},
        _RFT,
        x="order",
        kind="stack",
    ),
    Panel(
        *("memory", "Peak memory", "GB"),
        {"generate/peak_memory_gb": "sampling", "finetune/peak_memory_gb": "fine-tuning"},
        _RFT,
        x="event",
        zero=True,
        exact=True,
    ),
    # classify
    Panel(
        "loss",
        "Loss",
        "loss (nats)",
        {"loss": "training", "validation/loss": "validation"},
        _CLASSIFY,
        zero=True,
    ),
    Panel("rows", "Rows a second", "rows/s", {"samples_per_second": "rows"}, _CLASSIFY, zero=True),
)


def of(algo: str) -> list[Panel]:
    """The panels of an algorithm's runs."""
    return [panel for panel in PANELS if algo in panel.algos]
