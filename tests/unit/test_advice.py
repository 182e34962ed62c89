"""The words that a run's numbers are put into: each line of advice, and each verdict."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from common.config import ConfigError
from common.report import advice
from common.report.summary import Result, find_intervals, has_learnt_all
from common.report.tracker import Tracker
from launch import compose


def judge(*given: Any) -> tuple[str, str]:
    """The text and the override of a verdict."""
    verdict = advice.judge(*given)
    return verdict.text, verdict.change


ALGO: dict[str, Any] = {
    "lr": 0.1,
    "steps": 100,
    "samples_per_prompt": 8,
    "sampling": {"max_new_tokens": 16},
}
DEAD = {"dead_groups": 0.9, "dead_all_right": 0.0}
LINES = {
    "all wrong": (
        DEAD | {"dead_all_wrong": 0.9},
        "90% of the groups teach nothing: in most of them no sample is right",
        "algo.samples_per_prompt=16",
    ),
    "all right": (
        DEAD | {"dead_all_right": 0.9},
        "in most of them all samples are right, so there is nothing left to learn",
        "",
    ),
    "cut off as a whole": (
        DEAD | {"dead_cut_off": 0.9},
        "in most of them all samples are cut off.",
        "algo.sampling.max_new_tokens=32",
    ),
    "all equal": (
        DEAD | {"dead_all_equal": 0.9},
        "in most of them all samples earn the same.",
        "algo.samples_per_prompt=16",
    ),
    "truncated": (
        {"truncated": 0.8},
        "80% of the samples are cut off before they end. Others end, so the limit is short",
        "algo.sampling.max_new_tokens=32",
    ),
    "drift": ({"drift": 1.5}, "the weights have moved by 150% of their own size", "algo.lr=0.03"),
    "kl": ({"kl": 2.0}, "the KL to the initial model is 2 per token", "algo.lr=0.03"),
    "zero spread": (
        {"reward_std": 0.0},
        "all members of the population earn the same",
        "algo.sigma=0.03",
    ),
    "identical pairs": (
        {"identical_pairs": 0.9},
        "90% of the answers of mirrored members are the same text",
        "algo.sigma=0.02",
    ),
    "idle members": (
        {"zero_fitness": 0.9, "identical_pairs": 0.2, "reward_std": 0.01},
        "90% of the members move nothing, although they answer differently",
        "algo.prompts_per_step=16",
    ),
    "rounding": (
        {"applied_cosine_all": 0.3},
        "the cosine of the model that answers with the float32 masters is 0.30.",
        "algo.lr=0.2",
    ),
    "broken": (
        {"reward": 0.1, "reward_centre": 0.5},
        "members earn 0.10 where the model without noise earns 0.50.",
        "algo.sigma=0.005",
    ),
    "luck": (
        {"prompt_agreement": 0.01},
        "two halves of a step's prompts disagree on the members (cosine 0.01)",
        "algo.prompts_per_step=16",
    ),
    "one component": (
        {"component_cosine": {"answered": 0.95, "right": 0.05}},
        "the updates follow the component answered of the reward (cosine 0.95) and hardly right",
        "",
    ),
    "unscored": (
        {"unscored": 0.9, "reward": 0.0, "dead_groups": 0.9, "dead_unscored": 0.9},
        "90% of the samples have no reward (None)",
        "",
    ),
    "unsolved": ({"solved": 0.02}, "only 2% of the prompts are ever", "algo.samples_per_prompt=16"),
}


@pytest.mark.parametrize("name", LINES)
def test_each_line_is_said_once(name):
    event, words, change = LINES[name]
    of_population = ("zero spread", "identical pairs", "idle members", "broken", "luck")
    algo = ALGO | ({"sigma": 0.01, "prompts_per_step": 8} if name in of_population else {})
    adviser = advice.Adviser(algo)
    assert not any(adviser.look(event) for _ in range(advice.WINDOW - 1)), "not so soon"
    (said,) = adviser.look(event)
    assert words in said.text
    assert said.change == change
    assert not any(adviser.look(event) for _ in range(50)), "once"


def test_a_run_that_goes_well_is_not_talked_at():
    adviser = advice.Adviser(ALGO | {"sigma": 0.01})
    good = {"dead_groups": 0.3, "truncated": 0.1, "drift": 0.1, "kl": 0.01, "solved": 0.6}
    good |= {"reward_std": 0.1, "entropy": 0.5, "reward": 0.4}
    assert not any(adviser.look(good) for _ in range(100))


SIGNS: list[dict[str, float]] = [
    {"drift": 0.8},
    {"identical_pairs": 0.8},
    {"reward_std": 0.0},
    {"applied_cosine_all": 0.3},
    {"prompt_agreement": 0.01},
    {"zero_fitness": 0.9, "identical_pairs": 0.2, "reward_std": 0.01},
    {"dead_groups": 0.9, "dead_all_equal": 0.9},
]


@pytest.mark.parametrize("sign", SIGNS, ids=lambda sign: next(iter(sign)))
def test_no_advice_for_a_healthy_run(sign):
    for events in (moving(0.1, 0.6), [{"reward": 0.92 - 1e-4 * i} for i in range(50)]):
        adviser = advice.Adviser(ALGO | {"sigma": 0.01, "prompts_per_step": 8})
        assert not any(adviser.look(event | sign) for event in events)
    adviser = advice.Adviser(ALGO | {"sigma": 0.01, "prompts_per_step": 8})
    assert any(adviser.look({"reward": 0.4} | sign) for _ in range(50)), "elsewhere it is"


def test_cut_off_samples_are_harmless_when_solved():
    adviser = advice.Adviser(ALGO)
    assert not any(adviser.look({"reward": 0.95, "truncated": 0.9}) for _ in range(50))


CUT_OFF = {
    "in a loop": (
        {"truncated": 0.95, "repeating": 0.8, "reward": 0.2},
        "repeat themselves",
        "",
    ),
    "no stop token": ({"truncated": 1.0, "reward": 0.4}, "writes no stop token. To make them", ""),
    "short of the answers": (
        {"truncated": 0.8, "repeating": 0.1},
        "the limit is short of the answers: give them more tokens.",
        "algo.sampling.max_new_tokens=32",
    ),
    "one of the two": (
        {"truncated": 0.92, "reward": 0.0},
        "or the model goes on behind them: give more tokens once, and if as few end then",
        "algo.sampling.max_new_tokens=32",
    ),
}


@pytest.mark.parametrize("name", CUT_OFF)
def test_cut_off_samples_advise_more_tokens(name):
    event, words, change = CUT_OFF[name]
    for more in ({}, DEAD | {"dead_cut_off": 0.9}):
        said = advice.find_advice([event | more] * 3, ALGO)[0]
        assert words in said.text
        assert said.change == change
        assert ("fine-tune on samples" in said.text) == (name != "short of the answers"), (
            "what else helps"
        )
        said = advice.find_advice([event | more] * 3, ALGO | {"overlong_buffer": 0})[0]
        assert said.change == (change or "algo.overlong_buffer=4")


@pytest.mark.parametrize(("room", "change"), [(40, 32), (20, 20), (16, None)])
def test_advised_tokens_fit_the_context(room, change):
    algo = advice.settings(compose(["algo=grpo", "algo.sampling.max_new_tokens=16"]).algo, room)
    said = advice.find_advice([{"truncated": 0.8, "repeating": 0.1}] * 3, algo)[0]
    assert said.change == (f"algo.sampling.max_new_tokens={change}" if change else "")


@pytest.mark.parametrize("advantage", ["maxrl", "components", "group"])
def test_length_penalties_are_advised_only_where_supported(advantage):
    chosen = ["algo=grpo", f"algo.advantage={advantage}"]
    algo = advice.settings(compose(chosen).algo)
    looping = {"truncated": 0.9, "repeating": 0.8, "reward": 0.2}
    said = advice.find_advice([looping] * 3, algo)[0]
    assert bool(said.change) == (advantage == "group")
    wrong = advice.find_advice([looping | {"reward": 0.0}] * 3, algo)[0]
    assert wrong.change == "", "it orders groups of which a sample is right"
    compose([*chosen, *said.change.split()])


# --- a collapse, and damage


def falling(first: float, last: float, steps: int = 10) -> list[float]:
    return [first + (last - first) * min(1.0, i / (steps - 4)) for i in range(steps)]


COLLAPSES: dict[str, tuple[str, list[dict[str, float]]]] = {
    "grpo": (
        "the entropy went from 1.8 to 0.2, groups that teach nothing went from 0.4 to 0.97",
        [
            {"reward": r, "entropy": e, "dead_groups": d, "dead_all_wrong": d, "step": n + 1}
            for n, (r, e, d) in enumerate(
                zip(falling(0.031, 0.016), falling(1.82, 0.2), falling(0.4, 0.97), strict=True)
            )
        ],
    ),
    "eggroll": (
        "samples in a loop went from 0.1 to 1",
        [{"reward": 0.3 - r / 4, "repeating": r, "truncated": r} for r in falling(0.1, 1.0)],
    ),
    "rft": (
        "the entropy went from 2 to 0.1",
        [
            {"entropy": e, "reward": 0.1}
            if n % 2
            else {"loss": 0.1, "lr": min(0.1, 0.02 * n), "step": n}
            for n, e in enumerate(falling(2.0, 0.1, 20), start=1)
        ],
    ),
    "short": (
        "the length of samples went from 40 to 2",
        [{"length": n, "reward": 0.2} for n in falling(40, 2)],
    ),
}


@pytest.mark.parametrize("name", COLLAPSES)
def test_a_collapse_is_said_and_a_smaller_step_is_tried(name):
    words, events = COLLAPSES[name]
    auto = [{"lr": 0.1, "step": n} | event for n, event in enumerate(events, start=1)]
    for algo, logged in ((ALGO, events), (ALGO | {"lr": "auto"}, auto)):
        for outcome in (result(3, 2), result(60, 10), result(3, 2, iteration=0)):
            said, change = judge(outcome, 256, logged, algo)
            assert words in said
            assert "it needs more steps" not in said
            assert change == "algo.lr=0.01"
    adviser = advice.Adviser(ALGO)
    found = [a for event in [*events, *events[-2:] * advice.WINDOW] for a in adviser.look(event)]
    assert [(a.name, a.change) for a in found] == [("collapse", "algo.lr=0.01")], "and nothing else"


def test_confidence_in_right_answers_is_no_collapse():
    for first, last in ((0.1, 0.6), (0.85, 0.92), (0.95, 0.93)):
        pairs = zip(falling(first, last, 50), falling(1.8, 0.1, 50), strict=True)
        events = [{"reward": r, "entropy": e} for r, e in pairs]
        assert not advice.find_advice(events, ALGO)


def damaged(outcome: SimpleNamespace, before: float, after: float) -> SimpleNamespace:
    for when, bits in (("before", before), ("after", after)):
        outcome.metrics = outcome.metrics | {when: {"text/bits_per_byte": bits}}
    return outcome


def test_a_metric_that_stood_higher_on_the_way_is_said():
    """By more than half the width of the gain's interval."""
    outcome = result(1, 18)
    low, high = outcome.intervals[outcome.metric]["change"]
    measured = [{"metric_name": outcome.metric, "step": 9, "metric": 42.2}]
    said, change = judge(outcome, 256, measured, ALGO)
    assert "But it stood at 42.2 after step 9: take smaller steps." in said
    assert change == "algo.lr=0.03"
    little = [{**measured[0], "metric": 18 + 0.4 * (high - low)}]
    assert "stood at" not in judge(outcome, 256, little, ALGO)[0]
    of_stages = [{**measured[0], "stage": "evaluate"}]  # of which the best is taken anyway
    assert "stood at" not in judge(outcome, 256, of_stages, ALGO)[0]


def test_worse_text_modelling_advises_smaller_steps():
    rounding = [event | {"applied_cosine_all": 0.3} for event in moving(0.1, 0.1)]
    for events in (moving(0.10, 0.12), moving(0.1, 0.9), rounding, []):
        for outcome in (result(10, 60), result(5, 6), result(60, 10)):
            said, change = judge(damaged(outcome, 1.57, 2.05), 256, events, ALGO)
            assert "from 1.57 to 2.05 bits per byte (+31%)" in said
            assert not re.search(r"larger|more steps", said)
            assert change == "algo.lr=0.03"
    for outcome, before, after in ((result(10, 60), 1.57, 1.59), (result(10, 60), 1.57, 1.2)):
        said, change = judge(damaged(outcome, before, after), 256, [], ALGO)
        assert "bits per byte" not in said
        assert change == ""
    still = ALGO.copy()
    del still["lr"]  # a method that moves no weights
    _, change = judge(damaged(result(5, 6), 1.5, 2.0), 256, moving(0.1, 0.1), still)
    assert change == ""


def test_advice_starts_from_the_measured_value():
    event = {"identical_pairs": 0.9, "sigma": 0.004, "lr": 0.1}
    (said,) = advice.find_advice([event] * 3, ALGO | {"sigma": "auto"})
    assert said.change == "algo.sigma=0.008"
    worse = moving(0.6, 0.1)
    _, change = judge(result(60, 10), 256, [e | event for e in worse], ALGO | {"lr": "auto"})
    assert change == "algo.lr=0.03"


def test_advised_whole_number_rates_stay_above_zero():
    (said,) = advice.find_advice([{"kl": 2.0}] * 3, ALGO | {"lr": 1})
    assert said.change == "algo.lr=0.3"


def test_advice_starts_from_the_warmed_up_value():
    rates = [0.02, 0.06, 0.1, 0.1]
    events = [{"lr": lr, "drift": 0.9, "step": n} for n, lr in enumerate(rates, start=1)]
    for schedule in ({}, {"lr_schedule": {"kind": "constant", "end": 1.0}}):
        (said,) = advice.find_advice(events, ALGO | {"lr": "auto"} | schedule)
        assert said.change == "algo.lr=0.03"


def test_advice_starts_from_a_schedules_first_value():
    """Its last value is a tenth of that, and raising it to twice a tenth would be lowering it."""
    falling = {"sigma": "auto", "steps": 41, "sigma_schedule": {"kind": "linear", "end": 0.1}}
    shares = [1 - 0.9 * step / 40 for step in range(41)]
    events = [
        {"step": step, "identical_pairs": 0.9, "sigma": 0.04 * share}
        for step, share in enumerate(shares, 1)
    ]
    _, change = judge(result(5, 5), 256, events, ALGO | falling)
    assert change == "algo.sigma=0.08"
    (said,) = advice.find_advice(events[10:30], ALGO | falling)
    assert said.change == "algo.sigma=0.08"


def test_every_rule_is_reached():
    names = set()
    for event, _, _ in LINES.values():
        names |= {found.name for found in advice.find_advice([event] * 3, ALGO | {"sigma": 0.1})}
    assert len(names) == len(advice.RULES)


def test_rows_learnt_by_heart_come_before_groups_that_teach_nothing():
    """By then most groups are all right, and harder prompts are not what it needs."""
    events = [{**event, "dead_groups": 0.9, "dead_all_right": 0.9} for event in moving(0.2, 0.99)]
    said, change = judge(result(10, 12), 256, events, ALGO)
    assert "has learnt its training rows" in said
    assert change == ""


def result(before: float, after: float, iteration: int | None = None) -> SimpleNamespace:
    """Of 256 examples of which as few as can be have changed."""
    old, new = (
        [100.0] * round(2.56 * x) + [0.0] * (256 - round(2.56 * x)) for x in (before, after)
    )
    kept = [{"metrics": {"exact": 0.0}, "scores": {"exact": scores}} for scores in (old, new)]
    found = find_intervals(*kept)
    about: dict[str, Any] = {
        "metrics": {"before": {}, "after": {}},
        "metric": "exact",
        "before": before,
        "after": after,
        "iteration": iteration,
        "steps": 50,
        "ended_by": None,
    }
    return SimpleNamespace(**about, intervals=found, answered_by="", chosen=None)


def moving(first: float, last: float) -> list[dict[str, float]]:
    return [{"reward": first + (last - first) * i / 49} for i in range(50)]


VERDICTS = {
    "learnt": (
        *(result(10, 60), moving(0.1, 0.6)),
        "it has learnt: held-out exact 10.0 -> 60.0, +50.0 points (95 % +43.9 to +56.1, p < 0.001,"
        " 256 examples).",
        "",
    ),
    "worse": (
        *(result(60, 10), moving(0.6, 0.1)),
        "it has got worse: held-out exact 60.0 -> 10.0, -50.0 points (95 % -56.1 to -43.9,"
        " p < 0.001, 256 examples). The reward of training samples fell from 0.55 to 0.15.",
        "algo.lr=0.03",
    ),
    "worse, by no reward": (
        *(result(60, 10), moving(0.4, 0.42)),
        "The reward of training samples hardly moved meanwhile. Smaller steps lose less.",
        "algo.lr=0.03",
    ),
    "by heart": (
        *(result(5, 6), moving(0.1, 0.9)),
        "The reward of training samples rose from 0.17 to 0.83, so it has learnt its training rows",
        "",
    ),
    "too little": (
        *(result(5, 6), moving(0.10, 0.12)),
        "The reward of training samples hardly moved: it needs more steps, or larger ones.",
        "algo.steps=300",
    ),
    "advice": (
        *(result(5, 6), [DEAD | {"dead_all_wrong": 0.9, "reward": 0.0}] * 5),
        "Likely reason: 90% of the groups teach nothing: in most of them no sample is right",
        "algo.samples_per_prompt=16",
    ),
    "nothing left": (*(result(99, 99), []), "There was nothing left to learn", ""),
    "the base": (
        *(result(5, 5, iteration=0), []),
        "No iteration was better than the base model on the validation prompts.",
        "algo.samples_per_prompt=16",
    ),
}


def test_a_budget_of_few_steps_explains_no_gain():
    outcome, events = result(5, 6), moving(0.10, 0.12)
    outcome.steps, outcome.ended_by = 3, "budget.seconds=5"
    said, change = judge(outcome, 256, events, ALGO)
    assert "budget.seconds=5 left time for 3 steps alone" in said
    assert change == "budget.seconds=50"
    outcome.steps = advice.FEW
    assert judge(outcome, 256, events, ALGO)[1] == "algo.steps=300"


def test_a_model_from_the_middle_of_a_run_is_named():
    outcome = result(10, 60)
    outcome.chosen = {"step": 40, "value": 62.0, "last": 30.0}
    said, change = judge(outcome, 256, moving(0.1, 0.6), ALGO)
    assert said.startswith("it has learnt: held-out exact 10.0 -> 60.0")
    assert "the model of step 40" in said
    assert "62.0 -> 30.0" in said
    assert change == "algo.lr=0.03"
    outcome.chosen = {"step": outcome.steps, "value": 62.0, "last": 62.0}
    assert judge(outcome, 256, moving(0.1, 0.6), ALGO)[1] == ""


def test_a_base_that_no_model_beat_is_named():
    outcome = result(60, 60)
    outcome.chosen = {"step": 0, "value": 62.0, "last": 30.0}
    said, change = judge(outcome, 256, [], ALGO)
    assert "the base is exported" in " ".join(said.split())
    assert change == "algo.lr=0.03"


@pytest.mark.parametrize("name", VERDICTS)
def test_verdicts(name):
    outcome, events, words, change = VERDICTS[name]
    said, tried = judge(outcome, 256, events, ALGO)
    assert words in said
    assert tried == change


def test_two_steps_are_too_few_for_a_verdict():
    said, change = judge(result(5.0, 5.0), 200, [{"reward": 0.1}, {"reward": 0.9}], ALGO)
    assert said.endswith("Nothing better has been found: it needs more steps.")
    assert change == "algo.steps=300"


def test_randopt_gets_no_advice_about_steps():
    """Its lr is refused, so a command with another one would end at once."""
    given = ["algo=eggroll", "algo.method=randopt", "algo.steps=null", "budget.tokens=100"]
    algo = advice.settings(compose(given).algo)
    for events in (moving(0.6, 0.1), moving(0.10, 0.12)):
        said, change = judge(result(60, 10), 256, events, algo)
        assert not re.search(r"too fast|larger ones", said)
        assert change == ""
    assert judge(result(60, 10), 256, [], algo | {"steps": 5})[1] == "algo.steps=15"


def test_a_measure_on_another_scale_leaves_something_to_learn(caplog):
    assert has_learnt_all({"exact": 100.0, "elo": 3.0})
    assert not has_learnt_all({"elo": 1200.0})
    assert not has_learnt_all({"exact": 99.5})


def test_a_classifier_is_not_loaded_as_a_language_model(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"classes": ["a", "b"], "model": {}}')
    with pytest.raises(ConfigError, match=r"no language model.*docs"):
        Result.model_and_tokenizer(SimpleNamespace(folder=str(tmp_path)))


def test_no_gain_is_claimed_without_statistical_support():
    scores = {"interval": ([1.0, 9.0], 0.07), "test": ([-1.0, 9.0], 0.03), "neither": (None, None)}
    for within, p in scores.values():
        found = result(5, 9)
        found.intervals = {"exact": {"change": within, "p_value": p}}
        said, _ = judge(found, 50, moving(0.10, 0.12), ALGO)
        assert said.startswith("it has not measurably learnt: held-out exact 5.0 -> 9.0, +4.0")


def test_the_next_command_has_a_folder_of_its_own():
    given = ["algo=grpo", "algo.steps=5", "hydra.run.dir=a b", "resume=auto", "task.path=a b.csv"]
    assert (
        advice.command(given, "algo.steps=15")
        == "python launch.py algo=grpo 'task.path=a b.csv' algo.steps=15"
    )


def test_solved_components_need_no_more_weight():
    event = {"component_cosine": {"right": 0.95, "answered": 0.05}, "reward": 0.5}
    for earned, said in ((0.5, ["one component"]), (0.95, [])):
        events = [event | {"components": {"right": 0.2, "answered": earned}}] * advice.WINDOW
        assert [one.name for one in advice.find_advice(events, ALGO)] == said


def test_component_weights_without_effect_are_not_advised():
    events = [{"component_cosine": {"answered": 0.95, "right": 0.05}}] * advice.WINDOW
    (said,) = advice.find_advice(events, ALGO | {"fitness": "component_zscore"})
    assert "use algo.fitness=zscore with more weight for it" in said.text


def test_a_step_that_was_skipped_is_no_sign(tmp_path, caplog):
    """The rewards of a step with NaN are not known, which is not that they are all the same."""
    run = compose(["algo=eggroll", "not_finite.policy=skip", "not_finite.max_skips=3"])
    tracker = Tracker(run, tmp_path, 40, 0, {})
    for step in range(1, 41):
        rewards = {"reward": 0.01 * step, "reward_std": 0.1, "identical_pairs": 0.1}
        rewards |= {"components": {"right": 0.5}, "component_cosine": {"right": 0.9}}
        if step == 30:
            rewards |= {"reward": float("nan"), "reward_std": float("nan")}
            rewards |= {"components": {"right": float("nan")}}
        tracker.write({"step": step, **rewards})
    tracker.close()
    assert caplog.records == []


# --- rewards of another scale than [0, 1]


def noisy(first: float, last: float, noise: float, steps: int = 50) -> list[dict[str, float]]:
    """Rewards that go up and down around a line."""
    line = [first + (last - first) * i / (steps - 1) for i in range(steps)]
    return [{"reward": r + noise * (-1) ** i} for i, r in enumerate(line)]


@pytest.mark.parametrize(("low", "size"), [(0.0, 1000.0), (-50.0, 10.0), (0.0, 1e-3)])
def test_verdicts_follow_the_spread_of_a_reward_without_a_scale(low, size):
    algo = ALGO | {"bounded": False}
    for rewards, words in (
        ((0.1, 0.9), "has learnt its training rows"),
        ((0.5, 0.51), "hardly moved"),
        ((0.9, 0.1), "too fast"),
    ):
        first, last = (low + size * part for part in rewards)
        said, _ = judge(result(5, 6), 256, noisy(first, last, 0.02 * size), algo)
        assert words in said


@pytest.mark.parametrize("sign", SIGNS, ids=lambda sign: next(iter(sign)))
def test_rewards_above_one_are_not_solved(sign):
    adviser = advice.Adviser(ALGO | {"sigma": 0.01, "prompts_per_step": 8})
    events = noisy(12.0, 11.9, 0.5)
    assert any(adviser.look(event | sign) for event in events), "12 of 31 leaves much to learn"
    adviser = advice.Adviser(ALGO | {"sigma": 0.01, "prompts_per_step": 8})
    risen = [*noisy(2.0, 30.0, 0.5), *noisy(30.0, 29.9, 0.5)]
    assert not any(adviser.look(event | sign) for event in risen)


@pytest.mark.parametrize("reward", [-20.0, -0.5, 12.0])
def test_half_of_a_reward_without_a_scale_says_nothing(reward):
    event = {"reward": reward - 10, "reward_centre": reward}
    found = advice.find_advice([event] * 3, ALGO | {"sigma": 0.01})
    assert "broken" not in [one.name for one in found]


def test_functions_of_the_users_own_have_no_known_scale():
    run = compose(["algo=grpo"])
    assert advice.settings(run.algo, task={"rewards": {}})["bounded"]
    assert not advice.settings(run.algo, task={"rewards": {"mine.f": 1.0}})["bounded"]


# --- for programs


@pytest.mark.parametrize(
    ("outcome", "events", "said", "codes", "settings"),
    [
        ((5, 60), [], "learnt", [], []),
        ((60, 10), [{"drift": 0.9}] * 3, "worse", ["drift"], [{"algo.lr": 0.03}]),
        ((98, 98), [], "not-learnt", ["solved"], [{}]),
        ((5, 5), [], "not-learnt", ["more-steps"], [{"algo.steps": 300}]),
        ((5, 5), [DEAD | {"dead_all_wrong": 0.9}] * 3, "not-learnt", ["dead-groups"], None),
    ],
)
def test_a_verdict_has_codes_and_settings(outcome, events, said, codes, settings):
    verdict = advice.judge(result(*outcome), 256, events, ALGO)
    found = [one.content() for one in verdict.advice]
    assert (verdict.outcome, [one["code"] for one in found]) == (said, codes)
    if settings is not None:
        assert [one["settings"] for one in found] == settings
    for one in found:
        assert one["text"] in verdict.text


def test_damage_has_a_code_also_where_it_has_learnt():
    verdict = advice.judge(damaged(result(10, 60), 1.57, 2.05), 256, [], ALGO)
    (found,) = [one.content() for one in verdict.advice]
    assert (verdict.outcome, found["code"]) == ("learnt", "forgetting")
    assert found["settings"] == {"algo.lr": 0.03}


@pytest.mark.parametrize(
    ("change", "settings"),
    [
        ("algo.lr=1e-05", {"algo.lr": 1e-5}),
        ("budget.seconds=3000", {"budget.seconds": 3000}),
        ("algo.fitness=zscore", {"algo.fitness": "zscore"}),
        ("", {}),
    ],
)
def test_settings_of_advice_have_types(change, settings):
    assert advice.Advice("a b", "x", change).content()["settings"] == settings
