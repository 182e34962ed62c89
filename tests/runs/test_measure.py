"""EGGROLL whose fitness is a measure of all answers of a member together."""

import json
import math
from pathlib import Path

import pytest
import torch

import launch
from eggroll.fitness import fitness
from eggroll.measure import leave_out
from eggroll.population import PopulationCollector
from tests.support import CONF, MOVING, events
from tests.support.letters import Letters
from tests.support.refusals import COLUMNS, refuses

MEASURED = [*MOVING, "algo.fitness_of=measure", "algo.prompts_per_step=4"]


class Variety(Letters):
    """Wants the texts of a member to differ, which no reward of one text can say."""

    def score(self, examples, completions):
        letters = [set(text) for text in completions]
        return len(set.union(*letters)) - max(map(len, letters))


def tried_of(settings, task, tmp_path, monkeypatch):
    """Return the outcomes of the steps of a run, with the texts of each member."""
    outcomes, texts = [], []
    own = PopulationCollector.try_out

    def try_out(population, examples, *given, **more):
        tried = own(population, examples, *given, **more)
        outcomes.append((examples, tried))
        return tried

    monkeypatch.setattr(PopulationCollector, "try_out", try_out)
    launch.train(launch.compose([*settings, "completions=all"]), tmp_path, task)
    for line in (tmp_path / "completions" / "all.jsonl").read_text().splitlines():
        texts.append(json.loads(line))
    return outcomes, texts


def test_the_measure_of_each_member_agrees_with_a_naive_loop(in_cache, tmp_path, monkeypatch):
    task = Variety("smooth")
    outcomes, rows = tried_of(MEASURED, task, tmp_path, monkeypatch)
    assert len(outcomes) == 4
    for step, (examples, tried) in enumerate(outcomes, start=1):
        mine = [row for row in rows if row["step"] == step]
        assert len(mine) == 8 * 4
        naive = []
        for member in range(8):
            own = [row["completion"] for row in mine if row["member"] == member]
            naive.append(float(task.score(examples, own)))
        assert tried.measures.tolist() == naive
        shaped = fitness(torch.tensor(naive)[:, None].double(), "zscore")
        for row in mine:
            assert row["fitness"] == pytest.approx(shaped[row["member"]].item())
    found = events(tmp_path)
    assert all("measure" in event and "measure_std" in event for event in found)


def test_repeated_samples_are_measured_one_set_after_the_other(in_cache, tmp_path, monkeypatch):
    task = Variety("smooth")
    settings = [*MEASURED, "algo.samples_per_prompt=2"]
    outcomes, rows = tried_of(settings, task, tmp_path, monkeypatch)
    examples, tried = outcomes[0]
    own = [row for row in rows if row["step"] == 1 and row["member"] == 3]
    sets = [[row["completion"] for row in own if row["sample"] == k] for k in range(2)]
    assert tried.measures[3].item() == sum(task.score(examples, texts) for texts in sets) / 2


class Undecided(Letters):
    """Has no measure for every third set of answers."""

    def score(self, examples, completions):
        total = sum(map(ord, "".join(completions)))
        return total if total % 3 else math.nan


def test_members_without_a_measure_move_nothing(in_cache, tmp_path, monkeypatch):
    outcomes, _ = tried_of(MEASURED, Undecided("smooth"), tmp_path, monkeypatch)
    unknown = [~torch.isfinite(tried.measures) for _, tried in outcomes]
    assert any(some.any() and not some.all() for some in unknown)
    logged = [event.get("unmeasured", 0.0) for event in events(tmp_path)]
    assert logged == pytest.approx([some.double().mean().item() for some in unknown])


def test_a_pair_without_a_measure_is_left_out_whole():
    nan = math.nan
    alone = leave_out(torch.tensor([1.0, nan, 3.0, 5.0]).double(), mirrored=True)
    assert alone.tolist() == [4.0, 4.0, 3.0, 5.0]
    assert leave_out(torch.tensor([1.0, nan, 3.0]).double(), mirrored=False).tolist() == [1, 2, 3]
    assert leave_out(torch.tensor([nan, nan]).double(), mirrored=True).tolist() == [0, 0]


@pytest.mark.thorough
def test_two_ranks_measure_as_one(launch, tmp_path):
    settings = ["--config-dir", CONF, *MEASURED, "task=letters", "task.scoring=smooth"]
    settings += ["algo.measure=characters", "algo.rollout_rows=16"]
    for name, more in {"one": [], "two": ["opt=[ddp]", "opt.ddp.ranks=2"]}.items():
        launch(*settings, *more, f"hydra.run.dir={tmp_path / name}")
    one, two = (events(tmp_path / name) for name in ("one", "two"))
    assert [e["measure"] for e in one] == pytest.approx([e["measure"] for e in two])
    assert [e["drift"] for e in one if "drift" in e] == pytest.approx(
        [e["drift"] for e in two if "drift" in e]
    )


@pytest.mark.parametrize(
    COLUMNS,
    [
        ("algo.measure=bleu", "algo.measure", "bleu", "algo.fitness_of=measure"),
        (
            "algo.fitness_of=measure algo.fitness=prompt_zscore",
            ["algo.fitness", "algo.fitness_of"],
            "prompt_zscore",
            "algo.fitness=zscore",
        ),
        (
            "algo.fitness_of=measure algo.samples_per_prompt=2 algo.sample_quantile=1"
            " algo.sampling.temperature=1",
            "algo.sample_quantile",
            1,
            "Leave it out",
        ),
        ("algo.fitness_of=measures", "algo.fitness_of", "measures", "measure"),
    ],
)
def test_measures_without_effect(overrides, key, value, try_next):
    refuses(overrides, key=key, value=value, try_next=try_next)


@pytest.mark.parametrize(
    ("measure", "try_next"),
    [("blue", ["exact", "characters"]), ("no_such_module.score", "PYTHONPATH")],
)
def test_a_measure_that_is_not_there(measure, try_next, in_cache, tmp_path):
    run = launch.compose([*MEASURED, f"algo.measure={measure}"])
    refuses(
        lambda: launch.train(run, tmp_path, Letters()),
        key="algo.measure",
        value=measure,
        try_next=try_next,
    )


def test_a_function_of_the_user(in_cache, tmp_path: Path, monkeypatch):
    source = "def longest(examples, completions):\n    return max(map(len, completions))\n"
    (tmp_path / "my_measures.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    run = launch.compose([*MEASURED, "algo.measure=my_measures.longest"])
    launch.train(run, tmp_path / "run", Letters("smooth"))
    assert all(0 <= event["measure"] <= 8 for event in events(tmp_path / "run"))


def test_a_function_that_returns_no_number(in_cache, tmp_path):
    class Wordy(Letters):
        def score(self, examples, completions):
            return "good"

    run = launch.compose(MEASURED)
    refuses(
        lambda: launch.train(run, tmp_path, Wordy()),
        key="algo.measure",
        value="'good'",
        try_next="Return a number",
    )
