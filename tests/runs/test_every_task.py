"""Every algorithm on every task of its kind, for a step or two. Tasks of plugins have their own."""

import json

import pytest

from launch import compose, train
from tests.support import ROOT
from tests.support.every_task import pair, take_two_steps

FILES = {path.stem: path.read_text() for path in sorted((ROOT / "conf" / "task").glob("*.yaml"))}
CLASSES = [name for name, text in FILES.items() if "ddp_bench" in text]
TASKS = [name for name in FILES if name not in CLASSES]
NEEDS = {
    "custom": [
        f"task.path={ROOT}/examples/own_data/numbers.csv",
        *("task.prompt_field=words", "task.answer_field=number", "task.reward=levenshtein"),
    ],
    "chess": ["task.positions=64", "task.test_positions=8"],
}


@pytest.mark.parametrize(("algo", "task"), pair(TASKS, long=("units", "chess")))
def test_two_steps(algo, task, tmp_path, in_cache):
    take_two_steps(algo, task, tmp_path, NEEDS.get(task, ()), shipped=task == "chess")


@pytest.mark.parametrize("task", CLASSES)
def test_classify(task, tmp_path, in_cache):
    sizes = ["task.rows=60", "task.test_rows=20"]
    if task not in ("topics", "trajectories"):
        rows = [{"text": f"{'good' if i % 2 else 'bad'} {i}", "label": i % 2} for i in range(80)]
        for split, part in (("train", rows[:60]), ("test", rows[60:])):
            (tmp_path / f"{split}.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in part)
            )
        sizes = [f"task.path={tmp_path}"]
    settings = [
        "algo=classify",
        f"task={task}",
        "hardware=cpu",
        *sizes,
        "algo.epochs=1",
        "algo.model.size=16",
    ]
    result = train(compose(settings), tmp_path / "out")
    assert (result.algo, result.task, result.steps) == ("classify", task, 2)
    assert 0 <= result.after <= 100
