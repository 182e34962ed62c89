"""Runs that are killed at random moments end as if they had not been: weights, metrics, samples,
bit for bit.

The long form: pytest -m "faults and slow" tests/faults/test_kills.py
"""

import pytest

from tests.support import CONF
from tests.support.killing import (
    MOMENTS,
    RANKS,
    RUNS,
    command,
    differing,
    environment,
    unbroken,
    until_done,
)

pytestmark = pytest.mark.faults
OWN = ["--config-dir", CONF]


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
@pytest.mark.parametrize("algo", ["eggroll", "grpo", "rft"])
def test_kills_change_nothing_with_an_adapter(algo, cache, tmp_path):
    arguments = [*RUNS[algo], "model.adapter={rank: 4}"]
    arguments += ["model.adapter.dropout=0.1"] if algo == "rft" else []
    unbroken(arguments, tmp_path / "whole", cache)
    how = {"seed": 1, "kills": 8, "environment": environment(cache)}
    kills = until_done(command(*arguments), tmp_path / "killed", **how)
    assert len(kills) >= 6, kills
    assert (tmp_path / "killed/adapter/adapter_model.safetensors").is_file()
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
