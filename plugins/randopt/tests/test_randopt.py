"""RandOpt: what its members vote for, and the settings that it does without."""

import json

import pytest

from common.checkpoint import checkpoint
from common.config import ConfigError
from common.memory import plan
from common.rollout import Rollouter
from eggroll.weights import DiskTensors
from launch import compose, train
from plugins.randopt import method
from tests.support import MOVING, events
from tests.support.letters import Letters

pytestmark = pytest.mark.usefixtures("in_cache")

RANDOPT = [text for text in MOVING if not text.startswith("algo.lr=")] + ["algo.method=randopt"]


def test_randopt_lets_the_best_vote_and_leaves_the_weights(tmp_path):
    result = train(compose([*RANDOPT, "algo.steps=3"]), tmp_path, Letters("smooth"))
    assert set(result.metrics) == {"before", "after", "best_member"}
    assert "examples) by the vote of the best 8 members" in result.verdict
    page = (tmp_path / "report.md").read_text()
    assert "| change | test | best member |" in page
    assert "| after | of the vote of the best 8 members, not of the model that is kept |" in page
    best = checkpoint.latest(tmp_path / "checkpoints").state["run"]["best"]
    assert len(best) == 8
    assert best == sorted(best, reverse=True)
    top = max(event["reward_best"] for event in events(tmp_path))
    assert best[0][0] == top
    kept = [event["reward_kept"] for event in events(tmp_path)]
    assert kept == sorted(kept), "the least of the best only rises"
    again = train(compose([*RANDOPT, "algo.steps=3", "resume=auto"]), tmp_path, Letters("smooth"))
    assert again.metrics == result.metrics, "with the noise that they had, and not without any"


@pytest.mark.thorough
def test_the_best_members_vote(tmp_path, monkeypatch):
    """What is measured is the text of most of them, by the answer that the task reads."""

    class Counting(Letters):
        def answer(self, completion):
            return None if completion[0] == "-" else completion[:1]

        def metrics(self, examples, completions):
            measured.append(list(completions))
            return super().metrics(examples, completions)

    measured: list[list[str]] = []
    monkeypatch.setattr(method, "BEST", 6)
    # pairs: a-b, c-d, ...; the last three of the best have no answer, and so no vote
    words = ("xa", "xb", "yc", "yd", "ye", "yf", *("-" + letter for letter in "ghijkl"))
    said = iter([[text] * 8 for text in words])
    run = compose([*RANDOPT, "algo.steps=1"])
    sample = Rollouter.sample

    def answer(self, requests, sampling=None, *given, **more):
        completions = sample(self, requests, sampling, *given, **more)
        if sampling is not None and requests.population is not None:  # a pair votes
            texts = [*next(said), *next(said)]
            completions.texts = lambda _: texts
        return completions

    monkeypatch.setattr(Rollouter, "sample", answer)
    train(run, tmp_path, Counting("smooth"))
    single, voted = [m for m in measured if len(m) > 1 and set(m) <= {*words}]
    assert len(set(voted)) == 1
    best = checkpoint.latest(tmp_path / "checkpoints").state["run"]["best"]
    first, second = [
        pair[member % 2] for pair, (_, _, member) in zip(("ab", "cd"), best, strict=False)
    ]
    assert set(single) == {f"x{first}"}
    assert voted[0] == f"y{second}", "two say y, and the better of the two is read"
    rows = (tmp_path / "completions" / "after.jsonl").read_text().splitlines()
    assert [json.loads(row)["completion"] for row in rows] == voted


@pytest.mark.thorough
@pytest.mark.parametrize("given", ["algo.method=randopt", ""])
def test_initial_weights_are_kept_where_something_reads_them(tmp_path, monkeypatch, given):
    """Of 7B parameters they are a file of 24 GB."""
    kept, init = [], DiskTensors.__init__
    monkeypatch.setattr(
        DiskTensors, "__init__", lambda *args: [init(*args), kept.append(args[0].places)][0]
    )
    asked = [text for text in MOVING if given != "algo.method=randopt" or "algo.lr=" not in text]
    train(compose([*asked, "algo.steps=1", *given.split()]), tmp_path, Letters("smooth"))
    (places,) = kept
    assert bool(places) == (not given)


def test_the_plan_names_the_method():
    run = compose([*RANDOPT, "plan=true"])
    said = plan.make("eggroll.train:plan", run).rows["algorithm"]
    assert said.startswith("randopt, 4 steps")
    assert "lr" not in said


def test_settings_of_an_update_have_no_effect_with_randopt():
    for setting in ("fitness=pair_sign", "lr=auto", "lr=0.5", "weight_decay=0.1"):
        key, value = setting.split("=")
        with pytest.raises(
            ConfigError, match=rf"algo\.{key}={value} has no effect with algo\.method=randopt"
        ):
            compose(["algo.method=randopt", f"algo.{setting}"])
