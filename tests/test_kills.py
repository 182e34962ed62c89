"""Runs that are killed at random moments end as if they had not been: weights, metrics, samples,
bit for bit.

The long form: pytest -m "faults and slow" tests/test_kills.py
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SMALL
from killing import MOMENTS, differing, until_done

pytestmark = pytest.mark.faults
TESTS = ROOT / "tests"
OWN = ["--config-dir", str(TESTS / "conf")]
TINY = [text for text in SMALL if text.startswith(("hardware", "model.tiny"))]

# All that a checkpoint has to bring back: momentum, schedules, noise and rollouts that outlive a
# step, drawn tokens, evaluations on the way, the best weights so far, several epochs.
RUNS = {
    "eggroll": [
        *(
            "algo=eggroll",
            "task=letters",
            "task.scoring=smooth",
            *SMALL,
            "algo.steps=100",
            "algo.sigma=0.1",
        ),
        *(
            "algo.optimizer.name=Adam",
            "algo.lr=0.003",
            "algo.noise_reuse=3",
            "algo.sampling.temperature=1.0",
        ),
        *(
            "algo.lr_schedule={kind: cosine, end: 0.1}",
            "algo.sigma_schedule={kind: linear, end: 0.5}",
        ),
        *("checkpoint.every=2", "evaluate.every=7"),
    ],
    "grpo": [
        *(
            "algo=grpo",
            "task=letters",
            "task.scoring=smooth",
            *TINY,
            "algo.prompts_per_step=3",
            "algo.steps=100",
        ),
        *(
            "algo.samples_per_prompt=4",
            "algo.sampling.max_new_tokens=8",
            "algo.passes=2",
            "algo.kl.beta=0.01",
        ),
        *(
            "algo.warmup_steps=5",
            "algo.lr_schedule={kind: linear, end: 0.1}",
            "checkpoint.every=2",
            "evaluate.every=7",
        ),
        "evaluate.examples=8",
    ],
    "rft": [
        *(
            "algo=rft",
            "task=letters",
            "hardware=cpu",
            "model.tiny.hidden_size=64",
            "model.tiny.layers=2",
        ),
        *(
            "model.tiny.heads=2",
            "model.tiny.intermediate_size=128",
            "model.tiny.pretrain_steps=300",
        ),
        *(
            "model.tiny.pretrain_lr=5e-3",
            "algo.prompts=60",
            "algo.validation_prompts=20",
            "algo.samples_per_prompt=4",
        ),
        *(
            "algo.second_round_samples=2",
            "algo.prompts_per_batch=8",
            "algo.chunk_size=2",
            "algo.micro_batch_rows=32",
        ),
        *(
            "algo.sampling.max_new_tokens=8",
            "algo.epochs=2",
            "algo.batch_rows=8",
            "algo.pass_samples=2",
        ),
        *("evaluate.examples=16", "checkpoint.every=2", "algo.iterations=2", "algo.patience=2"),
    ],
    "classify": [
        *(
            "algo=classify",
            "hardware=cpu",
            "task.rows=298",
            "task.test_rows=60",
            "algo.batch_rows=33",
        ),
        *(
            "algo.epochs=8",
            "algo.model.size=32",
            "algo.model.feedforward=64",
            "algo.tokenizer.vocabulary=600",
        ),
        *("algo.lr=3e-3", "algo.patience=6", "algo.warmup=0.1", "checkpoint.every=2"),
    ],
}
RANKS = {1: [], 2: ["opt=[ddp]", "opt.ddp.ranks=2"]}


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "launch.py"), *OWN, *arguments]


def environment(cache: Path) -> dict[str, str]:
    return {"CLUTCH_CACHE": str(cache), "PYTHONPATH": str(TESTS)}


def unbroken(arguments: list[str], folder: Path, cache: Path) -> None:
    done = subprocess.run(
        command(*arguments, f"hydra.run.dir={folder}"),
        env=os.environ | environment(cache),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("algo", RUNS)
def test_twenty_kills_change_nothing(algo, ranks, cache, tmp_path):
    arguments = [*RUNS[algo], *RANKS[ranks]]
    unbroken(arguments, tmp_path / "whole", cache)
    kills = until_done(
        command(*arguments),
        tmp_path / "killed",
        seed=ranks,
        kills=20,
        environment=environment(cache),
    )
    print(
        f"{algo}, {ranks} rank(s): {len(kills)} kills, {sum(k.half_written for k in kills)} in the"
        " middle of a save"
    )
    print(" ".join(f"{kill.moment}@{kill.lines}" for kill in kills))
    assert len(kills) >= 15, kills
    assert differing(tmp_path / "whole", tmp_path / "killed") == []


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["eggroll", "rft"])
def test_kills_and_another_number_of_ranks_each_time(algo, cache, tmp_path):
    """For RFT its sampling: fine-tuning on another number of ranks adds in another order."""
    arguments = [
        *RUNS[algo],
        *(["algo.stage=generate", "algo.prompts=300"] if algo == "rft" else []),
    ]
    moments = [
        moment for moment in MOMENTS if algo == "eggroll" or moment != "save"
    ]  # sampling saves nothing else
    unbroken(arguments, tmp_path / "whole", cache)
    kills = until_done(
        command(*arguments),
        tmp_path / "killed",
        **{"seed": 3, "kills": 10, "moments": moments, "variants": list(RANKS.values())},
        environment=environment(cache),
    )
    print(f"{algo}, one rank and two in turn: {len(kills)} kills")
    assert len(kills) >= 5, kills
    assert differing(tmp_path / "whole", tmp_path / "killed", metrics=algo == "eggroll") in (
        [],
        ["result.json"],
    )
