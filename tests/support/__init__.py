"""What the tests share: folders, the settings of small runs, and the lines that a run leaves.

No torch is imported here: worker processes unpickle tasks from this package.
"""

import json
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
# The Python of an environment with vLLM: `make vllm` makes one.
VLLM = Path(os.environ.get("VLLM_PYTHON", ROOT / ".vllm" / "bin" / "python"))
CONF = str(ROOT / "tests" / "support" / "conf")

# A model of a few thousand parameters, without pre-training: seconds for a whole run.
SMALL = [
    "hardware=cpu",
    "model.tiny.hidden_size=32",
    "model.tiny.layers=2",
    "model.tiny.heads=2",
    "model.tiny.intermediate_size=64",
    "model.tiny.pretrain_steps=0",
    "algo.members=8",
    "algo.prompts_per_step=2",
    "algo.rollout_rows=8",
    "algo.sampling.max_new_tokens=8",
    "algo.steps=4",
    "evaluate.examples=8",
]
TINY = [text for text in SMALL if text.startswith(("hardware", "model.tiny"))]

# Random weights answer everything alike, so noise is large, tokens are drawn, and any text earns
# something.
MOVING = [*SMALL, "algo.sigma=0.1", "algo.lr=0.5", "algo.sampling.temperature=1.0"]
MOVING += ["algo.max_drift=null"]  # steps so large that the trust region would shorten them

SMALL_GRPO = [
    "algo=grpo",
    "task=translate",
    "hardware=cpu",
    "model.tiny.hidden_size=32",
    "model.tiny.layers=2",
    "model.tiny.heads=2",
    "model.tiny.intermediate_size=64",
    "model.tiny.pretrain_steps=0",
    "algo.prompts_per_step=3",
    "algo.samples_per_prompt=4",
    "algo.sampling.max_new_tokens=8",
    "algo.steps=4",
    "evaluate.examples=4",
]

# Answers are given, so that it learns from random weights on.
SMALL_SFT = [
    "algo=sft",
    "task=translate",
    *(text for text in SMALL_GRPO if text.startswith(("hardware", "model.tiny"))),
    "algo.prompts_per_step=4",
    "algo.sampling.max_new_tokens=8",
    "algo.steps=6",
    "algo.lr=1e-2",
    "evaluate.examples=4",
]

SMALL_RFT = [
    "algo=rft",
    "hardware=cpu",
    "task=letters",
    "model.tiny.hidden_size=64",
    "model.tiny.layers=2",
    "model.tiny.heads=2",
    "model.tiny.intermediate_size=128",
    "model.tiny.pretrain_steps=300",
    "model.tiny.pretrain_lr=5e-3",
    "algo.prompts=60",
    "algo.validation_prompts=20",
    "algo.samples_per_prompt=4",
    "algo.second_round_samples=2",
    "algo.prompts_per_batch=8",
    "algo.chunk_size=4",
    "algo.train_rows=32",
    "algo.sampling.max_new_tokens=8",
    "algo.epochs=2",
    "evaluate.samples=2",
    "evaluate.examples=16",
    "checkpoint.every=2",
]

# The same for launch.py in a process of its own.
RFT_COMMAND = ["--config-dir", CONF, *SMALL_RFT]

# 298 rows are nine batches of 33 and one of a single row, of which a second rank has nothing.
SMALL_CLASSIFY = [
    *(
        "algo=classify",
        "hardware=cpu",
        "task.rows=298",
        "task.test_rows=60",
        "algo.batch_size=33",
        "algo.epochs=2",
    ),
    *(
        "algo.model.size=32",
        "algo.model.feedforward=64",
        "algo.tokenizer.vocabulary=600",
        "algo.lr=3e-3",
    ),
]
LAST_WEIGHTS = [
    "algo.validation_share=0",
    "algo.patience=null",
    "algo.model.dropout=0",
]  # no draws

SIZES = [
    *("hardware=cpu", "task.rows=298", "task.test_rows=60", "algo.batch_size=32"),
    *("algo.model.size=32", "algo.model.feedforward=64", "algo.tokenizer.vocabulary=600"),
]
SMALL_SCALING = [
    "algo=scaling",
    *SIZES,
    *("algo.ranks=[1,2]", "algo.steps=4", "algo.warmup_steps=1", "algo.repeats=1"),
]


def events(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def samples(folder: Path, iteration: int = 1) -> list[str]:
    lines = []
    for path in sorted((folder / f"iteration-{iteration}").glob("samples-*.jsonl")):
        lines += path.read_text(encoding="utf-8").splitlines()[1:]
    return sorted(lines)
