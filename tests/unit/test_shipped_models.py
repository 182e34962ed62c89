"""The tiny models that come with the project: the commands that a new user types need no
pre-training, and weights are the same on every machine.
"""

import shlex

import pytest

from common.model.tiny import ASSETS, tiny_model
from common.task import build
from launch import compose
from tests.support import ROOT

OWN_ROWS = (
    f"task=custom task.path={shlex.quote(str(ROOT / 'examples/own_data/numbers.csv'))}"
    " task.prompt_field=words task.answer_field=number task.reward=numeric"
)


@pytest.mark.parametrize(
    "command",
    [
        *("algo=eggroll hardware=a100_40g", "algo=grpo", "algo=rft"),
        *("algo=eggroll task=units", "algo=rft task=chess"),
        *(f"algo={algo} {OWN_ROWS}" for algo in ("eggroll", "grpo", "rft")),
    ],
)
def test_first_commands_need_no_pretraining(command, tmp_path, monkeypatch):
    monkeypatch.setenv("CLUTCH_CACHE", str(tmp_path))
    run = compose(shlex.split(command))
    assert run.model.tiny is not None
    assert tiny_model(run.model.tiny, build(run.task)).parent == ASSETS
    assert not list(tmp_path.iterdir())
