"""Every algorithm on every task of its kind, for a step or two."""

import json

import pytest

from common.config import ConfigError
from common.config.algorithm import REWARD_TASKS
from launch import ALGORITHMS, compose, train
from tests.support import ROOT, SMALL

FILES = {path.stem: path.read_text() for path in sorted((ROOT / "conf" / "task").glob("*.yaml"))}
CLASSES = [name for name, text in FILES.items() if "ddp_bench" in text]
TASKS = [name for name in FILES if name not in CLASSES]
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
}
# Settings that every algorithm of the reward kind has.
SHARED = [s for s in SMALL if not s.startswith("algo.") or s.startswith("algo.sampling")]


def needs(task: str, folder) -> list[str]:
    """Settings of a task that has no embedded data."""
    if task == "reasoning_gym":
        pytest.importorskip("reasoning_gym", reason="needs pip install -e '.[reasoning_gym]'")
        return ["task.problems=64", "task.test_problems=8"]
    if task == "environment":
        return ["task.factory=common.tasks.games:Guess", "task.test_problems=8"]
    if task == "gsm8k":
        rows = [
            {"question": f"What is {i} plus {i}?", "answer": f"{i} + {i} = {2 * i}\n#### {2 * i}"}
            for i in range(1000, 1020)  # numbers that random bytes do not hit
        ]
        for split in ("train", "test"):
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            rows = [
                {"question": row["question"].replace("plus", "and"), "answer": row["answer"]}
                for row in rows
            ]
        return [f"task.path={folder}"]
    if task == "custom":
        own = ["task.prompt_field=words", "task.answer_field=number", "task.reward=levenshtein"]
        return [f"task.path={ROOT}/examples/own_data/numbers.csv", *own]
    if task == "chess":
        return ["task.positions=64", "task.test_positions=8"]
    if task == "countdown":
        return ["task.problems=64", "task.test_problems=8"]
    return []


# Each task once in make test, with two algorithms in turn: RFT accepts nothing of random weights.
ALGOS = sorted(name for name in ALGORITHMS if ALGORITHMS[name].TASKS == REWARD_TASKS)
ONCE = {(ALGOS[number % 2], task) for number, task in enumerate(TASKS)}
EVERY = [
    # RFT's base model is taught the task first, which takes a while.
    pytest.param(
        algo,
        task,
        marks=(
            [pytest.mark.slow]
            if algo == "rft" and task in ("units", "countdown", "chess")
            else [pytest.mark.thorough] * ((algo, task) not in ONCE)
        ),
    )
    for algo in ALGOS
    for task in TASKS
]


@pytest.mark.parametrize(("algo", "task"), EVERY)
def test_two_steps(algo, task, tmp_path, in_cache):
    settings = [*SHARED, *OWN[algo], *needs(task, tmp_path), "model.tiny.context=512"]
    if algo == "rft":
        settings.append("algo.sampling.max_new_tokens=48")
    if (algo, task) == ("rft", "chess"):  # its base comes with the project
        settings = [
            *(s for s in OWN[algo] if not s.startswith("model")),
            "hardware=cpu",
            "evaluate.examples=8",
        ]
    # nobody can teach it to a tiny model, or not to call a tool or to find a way in so few steps
    if algo == "rft" and task in ("gsm8k", "maze", "calculator", "search", "sql"):
        run = compose([f"algo={algo}", f"task={task}", *settings, "model.tiny.pretrain_steps=0"])
        with pytest.raises(ConfigError, match="no completion of iteration 1 was accepted"):
            train(run, tmp_path / "out")
        return
    result = train(compose([f"algo={algo}", f"task={task}", *settings]), tmp_path / "out")
    assert result.algo == algo
    assert result.task == {"environment": "guess"}.get(task, task)
    assert result.steps == 2 or (algo == "rft" and result.steps > 0)
    assert result.reward_evaluations > 0
    assert 0 <= result.after <= 100


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
