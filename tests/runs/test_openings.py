"""Runs on prompts that begin alike: what these begin with is computed once, and that changes
rounding alone, also between ranks.
"""

import pytest
import torch

from common.model import prompts
from common.sampling import prefill
from launch import compose, train
from tests.support import CONF, MOVING, SMALL_GRPO, SMALL_RFT, events
from tests.support.commands import Warm
from tests.support.letters import Instructed
from tests.support.models import weights

pytestmark = pytest.mark.usefixtures("in_cache")

RUNS = {
    "eggroll": [*MOVING, "algo.prompts_per_step=4", "algo.rollout_rows=16", "algo.steps=2"],
    "grpo": [*SMALL_GRPO, "algo.num_iterations=2", "algo.kl.beta=0.05", "algo.steps=2"],
    "rft": [*SMALL_RFT, "model.tiny.pretrain_steps=0", "algo.select.accept=0.1"],
}
RUNS["rft"] += ["algo.iterations=1", "algo.epochs=1", "algo.prompts=20", "algo.hint_samples=0"]


@pytest.mark.parametrize(
    "algo", ["grpo", *(pytest.param(a, marks=pytest.mark.thorough) for a in ("eggroll", "rft"))]
)
def test_shared_openings_change_only_rounding(algo, warm: Warm, tmp_path, monkeypatch):
    torch.set_num_threads(1)
    found, inner = [], prefill.find_opening

    def find_opening(*arguments):
        found.append(len(inner(*arguments)))
        return inner(*arguments)

    monkeypatch.setattr(prefill, "find_opening", find_opening)
    task, given = Instructed("smooth"), compose(RUNS[algo], CONF)
    train(given, tmp_path / "once", task)
    assert max(found) > 40
    warm.call(train, compose([*RUNS[algo], "opt=[ddp]"], CONF), tmp_path / "two", task)
    monkeypatch.setattr(prompts, "SHORT_OPENING", 1000)
    train(given, tmp_path / "each", task)
    assert found[-1] == 0
    once, *others = (
        (told(tmp_path / folder), weights(tmp_path / folder / ("iteration-1" * (algo == "rft"))))
        for folder in ("once", "each", "two")
    )
    for numbers, tensors in others:
        assert once[0] == [pytest.approx(event, rel=1e-3, abs=1e-6) for event in numbers]
        for name, tensor in once[1].items():
            torch.testing.assert_close(tensor, tensors[name], rtol=1e-3, atol=1e-4)


def told(folder):
    """Return of each step of training what rounding should not change by much."""
    names = ("reward", "generated_tokens", "loss", "grad_norm", "drift")
    trained = [event for event in events(folder) if {"loss", "drift"} & event.keys()]
    return [{name: event[name] for name in names if name in event} for event in trained]
