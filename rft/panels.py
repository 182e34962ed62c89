"""The curves of an RFT run, for its report and its W&B dashboard."""

from functools import partial

from common.report import PERCENT, TEXTS, Panel

ALGORITHM = "rft"

MEASURES = {"metrics/*": "", "evaluate/validation": "validation"}
ACCEPTED = {"generate/accepted": "samples right", "generate/solved": "prompts solved so far"}
SHARES = {"select/prompts_by_share_right/*": ""}
GENERATED = {"generate/tokens_per_second": "generated"}
TRAINED = {"finetune/tokens_per_second": "trained"}
PHASES = {"finetune/phase_seconds/*": ""}
PEAKS = {"generate/peak_memory_gb": "sampling", "finetune/peak_memory_gb": "fine-tuning"}

UTILISATION = {"*/gpu/utilisation_p50": ""}

# Over the events that have the measure.
_Ordered = partial(Panel, x="order", zero=True)
_Stack = partial(Panel, x="order", kind="stack")

PANELS = (
    Panel(
        *("Held-out measures", "percent, or points of 100", MEASURES),
        x="iteration",
        but=TEXTS,
    ),
    Panel("Held-out text", "bits per byte", {TEXTS: ""}, x="iteration"),
    _Ordered("Sampling", "%", ACCEPTED, scale=PERCENT),
    Panel("Acceptance by prompt", "prompts", SHARES, x="iteration", kind="bars"),
    Panel("Reward of training samples", "reward", {"generate/reward": "mean"}, x="order"),
    Panel("Logged by reward functions", "as logged", {"generate/logged/*": ""}, x="order"),
    _Ordered("Fine-tuning", "loss a token (nats)", {"finetune/loss": "loss"}),
    _Ordered("Gradient norm", "norm before clipping", {"finetune/grad_norm": "norm"}),
    _Ordered("Learning rate", "learning rate", {"finetune/lr": "lr"}, exact=True),
    _Ordered("Entropy of samples", "nats per token", {"generate/entropy": "samples"}),
    _Ordered("Throughput of sampling", "tokens/s", GENERATED),
    _Ordered("Throughput of fine-tuning", "tokens/s", TRAINED),
    _Stack("Where the time of a chunk goes", "seconds", {"generate/phase_seconds/*": ""}),
    _Stack("Where the time of a fine-tuning step goes", "seconds", PHASES),
    Panel("Peak memory", "GB", PEAKS, x="event", zero=True, exact=True),
    Panel("Utilisation of the GPUs", "percent", UTILISATION, x="event", exact=True),
)
