"""Every algorithm on a task of the reward kind, for a step or two."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from common.config import ConfigError
from common.config.algorithm import REWARD_TASKS
from launch import ALGORITHMS, compose, train
from tests.support import SMALL

OWN = {
    "eggroll": [
        "algo.members=8",
        "algo.prompts_per_step=2",
        "algo.rollout_rows=8",
        "algo.steps=2",
    ],
    "grpo": ["algo.prompts_per_step=2", "algo.samples_per_prompt=3", "algo.steps=2"],
    # From random weights nothing would be right: a base that knows a little, and a low bar.
    "rft": [
        *(
            "algo.prompts=12",
            "algo.validation_prompts=2",
            "algo.samples_per_prompt=4",
            "algo.iterations=1",
        ),
        *("algo.epochs=1", "algo.select.accept=0.05", "evaluate.samples=2"),
        *(
            "model.tiny.hidden_size=64",
            "model.tiny.pretrain_steps=75",
            "model.tiny.pretrain_rows=32",
        ),
        "model.tiny.pretrain_lr=5e-3",
    ],
    "sft": ["algo.prompts_per_step=2", "algo.steps=2"],
}
# Settings that every algorithm of the reward kind has.
SHARED = [s for s in SMALL if not s.startswith("algo.") or s.startswith("algo.sampling")]
ALGOS = sorted(name for name in ALGORITHMS if ALGORITHMS[name].TASKS == REWARD_TASKS)


def pair(tasks: Sequence[str], long: Sequence[str] = ()) -> list[Any]:
    """(algorithm, task) for pytest. In make test each task is once with SFT, which needs an answer
    per task, and once with two algorithms in turn: RFT accepts nothing of random weights.

    Args: long: tasks that RFT's base model is taught first, which takes a while.
    """
    once = {(ALGOS[number % 2], task) for number, task in enumerate(tasks)}
    once |= {("sft", task) for task in tasks}
    return [
        pytest.param(
            algo,
            task,
            marks=(
                [pytest.mark.slow]
                if algo == "rft" and task in long
                else [pytest.mark.thorough] * ((algo, task) not in once)
            ),
        )
        for algo in ALGOS
        for task in tasks
    ]


def take_two_steps(
    algo: str,
    task: str,
    folder: Path,
    needs: Sequence[str] = (),
    *,
    name: str | None = None,
    learns: bool = True,
    shipped: bool = False,
) -> None:
    """Run it in a folder.

    Args: needs: settings of the task; name: of the task in the result; learns: whether so few steps
    teach a tiny model what RFT accepts; shipped: whether RFT's base comes with the project.
    """
    settings = [*SHARED, *OWN[algo], *needs, "model.tiny.context=512"]
    if algo == "rft":
        settings.append("algo.sampling.max_new_tokens=48")
    if algo == "rft" and shipped:
        settings = [
            *(s for s in OWN[algo] if not s.startswith("model")),
            *("hardware=cpu", "evaluate.examples=8"),
        ]
    given = [f"algo={algo}", f"task={task}", *settings]
    if algo == "rft" and not learns:
        run = compose([*given, "model.tiny.pretrain_steps=0"])
        with pytest.raises(ConfigError, match="no completion of iteration 1 was accepted"):
            train(run, folder / "out")
        return
    result = train(compose(given), folder / "out")
    assert result.algo == algo
    assert result.task == (name or task)
    assert result.steps == 2 or (algo == "rft" and result.steps > 0)
    assert result.reward_evaluations > 0 or algo == "sft"  # its answers are given
    assert 0 <= result.after <= 100
