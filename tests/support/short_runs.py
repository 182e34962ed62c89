"""Settings of short runs on the letters task, for tests of the core and of plugins."""

from launch import compose, train
from tests.support import CONF, SMALL
from tests.support.letters import Letters

LETTERS = [
    *(
        "hardware=cpu",
        "task=letters",
        "evaluate.examples=8",
        "algo.sampling.max_new_tokens=8",
        "checkpoint.every=1",
    ),
    *(
        "model.tiny.hidden_size=64",
        "model.tiny.layers=2",
        "model.tiny.heads=2",
        "model.tiny.intermediate_size=128",
    ),
    *("model.tiny.pretrain_steps=300", "model.tiny.pretrain_lr=5e-3"),
]
OF = {
    "eggroll": ["algo=eggroll", "algo.members=8", "algo.prompts_per_step=4"],
    "grpo": ["algo=grpo", "algo.prompts_per_step=4", "algo.samples_per_prompt=4"],
    "sft": ["algo=sft", "algo.prompts_per_step=4"],
    "rft": [
        *(
            "algo=rft",
            "algo.prompts=40",
            "algo.validation_prompts=8",
            "algo.samples_per_prompt=4",
            "algo.epochs=2",
        ),
        *(
            "algo.prompts_per_batch=4",
            "algo.chunk_size=4",
            "evaluate.samples=null",
            "algo.patience=9",
        ),
    ],
}


def letters(algo: str, *overrides: str):
    return compose([*LETTERS, *OF[algo], *overrides], CONF)


# EGGROLL for four steps, measured after each.
RUN = [
    *SMALL,
    "algo.steps=4",
    "evaluate.every=1",
    "algo.sigma=0.1",
    "algo.lr=0.5",
    "algo.sampling.temperature=1.0",
]


def run_here(out, *overrides):
    return train(compose([*RUN, *overrides]), out, Letters("smooth"))
