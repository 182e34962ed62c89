"""Every algorithm on every reward task, two steps each."""

import json

import pytest
from conftest import ROOT, SMALL

from launch import ALGORITHMS, compose, train

TASKS = sorted(path.stem for path in (ROOT / "conf" / "task").glob("*.yaml"))
GROUPS = {"grpo": ["algo.prompts_per_step=2", "algo.samples_per_prompt=3"]}
# Settings that every algorithm of the reward kind has; the rest of SMALL is EGGROLL's.
SHARED = [s for s in SMALL if not s.startswith(("algo.members", "algo.prompts", "algo.rows"))]


def needs(task: str, folder) -> list[str]:
    """Settings of a task that has no embedded data."""
    if task == "gsm8k":
        rows = [
            {"question": f"What is {i} plus {i}?", "answer": f"{i} + {i} = {2 * i}\n#### {2 * i}"} for i in range(20)
        ]
        for split in ("train", "test"):
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            rows = [{"question": row["question"].replace("plus", "and"), "answer": row["answer"]} for row in rows]
        return [f"task.path={folder}"]
    if task == "chess":
        return ["task.positions=64", "task.test_positions=8"]
    return []


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("algo", sorted(ALGORITHMS))
def test_two_steps(algo, task, tmp_path, in_cache):
    own = [s for s in SMALL if s not in SHARED] if algo == "eggroll" else GROUPS.get(algo, [])
    run = compose(
        [
            f"algo={algo}",
            f"task={task}",
            *SHARED,
            *own,
            *needs(task, tmp_path),
            "model.tiny.context=512",
            "algo.steps=2",
        ]
    )
    result = train(run, tmp_path / "out")
    assert result.algo == algo
    assert result.task == task
    assert result.steps == 2
    assert result.reward_evaluations > 0
    assert 0 <= result.after <= 100
