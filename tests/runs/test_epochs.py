"""A run's length in passes over the training prompts."""

import pytest

from common.checkpoint import checkpoint
from common.config import ConfigError
from common.report.advice import command
from common.task import Example
from launch import compose, train
from tests.support import SMALL, SMALL_GRPO, events


class Rows:
    """Twenty prompts; longer completions earn more."""

    name = "rows"

    def examples(self, split):
        return [Example(id=i, question=f"{split} q{i}", answer="") for i in range(20)]

    def prompt(self, example):
        return example.question

    def reward(self, example, completion):
        return (sum(map(ord, completion)) % 7) / 6

    def metrics(self, examples, completions):
        return {"none": 0.0}


def without_steps(arguments):
    return [text for text in arguments if not text.startswith("algo.steps=")]


@pytest.mark.run
@pytest.mark.parametrize(
    ("arguments", "changes", "steps"),
    [
        (SMALL_GRPO, ["algo.epochs=0.3", "algo.minibatches=2"], 4),  # 6 prompts of 3 per step
        (SMALL_GRPO, ["algo.epochs=0.35", "algo.resample_rounds=0"], 3),  # rounded up
        (SMALL, ["algo.epochs=0.5", "algo.prompts_per_step=5"], 2),
    ],
    ids=["parts", "rounded", "eggroll"],
)
def test_epochs_are_counted_in_steps(arguments, changes, steps, tmp_path, in_cache, capsys):
    given = [*without_steps(arguments), *changes, "checkpoint.every=1", "checkpoint.keep=9"]
    assert train(compose(given), tmp_path / "epochs", task=Rows()).steps == steps
    assert "of 20 training prompts)" in capsys.readouterr().out
    said = [text for text in given if "epochs" not in text]
    train(compose([*said, f"algo.steps={steps}"]), tmp_path / "steps", task=Rows())
    found, expected = (
        [(event["reward"], event.get("lr")) for event in events(tmp_path / name)]
        for name in ("epochs", "steps")
    )
    assert found == expected
    # The same command goes on with it, and so does one that says the steps.
    newest = checkpoint.latest(tmp_path / "epochs" / "checkpoints").path
    for path in newest.rglob("*"):
        path.unlink()
    newest.rmdir()
    train(compose([*given, "resume=auto"]), tmp_path / "epochs", task=Rows())
    one, two = (checkpoint.latest(tmp_path / n / "checkpoints") for n in ("epochs", "steps"))
    assert one.step == two.step == steps
    for name, tensor in one.tensors.items():
        assert tensor.equal(two.tensors[name])


@pytest.mark.parametrize("algo", ["grpo", "eggroll"])
def test_steps_and_epochs_are_two_ways_to_say_one_thing(algo):
    assert compose([f"algo={algo}", "algo.epochs=2"]).algo.steps is None
    with pytest.raises(ConfigError, match=r"algo\.steps=3 and algo\.epochs=2 both"):
        compose([f"algo={algo}", "algo.epochs=2", "algo.steps=3"])
    with pytest.raises(ConfigError, match="nothing ends the run"):
        compose([f"algo={algo}", "algo.steps=null"])
    for other in ("num_train_epochs", "total_epochs"):
        with pytest.raises(ConfigError, match="Did you mean 'epochs'"):
            compose([f"algo={algo}", f"algo.{other}=1"])


def test_the_next_command_says_the_length_once():
    assert command(["algo=grpo", "algo.epochs=2"], "algo.steps=30").endswith(
        "algo=grpo algo.steps=30"
    )
