"""python -m common.judge: statistics against naive computation and simulation, the ledger, the
command.
"""

import itertools
import json
import shutil
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from common.config import ConfigError
from common.uncertainty import Spread, find_difference, pair_seeds
from plugins.judge import command, study
from plugins.judge.ledger import Pair, opened
from plugins.judge.statistics import (
    ALPHA,
    DISCARD,
    KEEP,
    NOT_YET,
    bound,
    decide,
    find_level,
    find_share,
    foresee,
)
from tests.support import SMALL_GRPO

# --- statistics


def test_levels_never_add_up_to_more_than_alpha():
    levels = [find_level(place, [False] * place) for place in range(1, 2000)]
    assert 0.9 * ALPHA < sum(levels) < ALPHA
    assert levels == sorted(levels, reverse=True)
    assert sum(find_share(look) for look in range(1, 60)) <= 1


@pytest.mark.parametrize("seed", range(20))
def test_levels_of_proposals_without_effect_add_up_to_at_most_alpha(seed):
    """Whatever others are kept: this is the proof of online fallback."""
    draw = np.random.default_rng(seed)
    real = draw.random(300) < draw.random()
    levels = [find_level(place, real) for place in range(1, 301)]
    assert sum(level for level, has in zip(levels, real, strict=True) if not has) <= ALPHA


def test_a_kept_proposal_passes_its_level_on():
    first, second = find_level(1, []), find_level(2, [False])
    assert find_level(2, [True]) == pytest.approx(first + second)
    third = find_level(3, [False, False])
    assert find_level(3, [True, True]) == pytest.approx(first + second + third)
    assert find_level(3, [True, False]) == pytest.approx(third)


@pytest.mark.parametrize(("seeds", "shares"), [(2, False), (3, True), (7, True)])
def test_pairs_are_an_analysis_of_variance(seeds, shares):
    """Against sums in loops."""
    draw = np.random.default_rng(seeds)
    one, other = draw.normal(50, 20, (2, seeds, 15))
    if shares:
        one, other = (100.0 * (values > 50) for values in (one, other))
    apart = (other - one).tolist()
    count, mean = 15, np.mean(apart)
    of_prompt = [np.mean([row[n] for row in apart]) for n in range(count)]
    of_seed = [np.mean(row) for row in apart]
    rest = sum(
        (apart[s][n] - of_seed[s] - of_prompt[n] + mean) ** 2
        for s, n in itertools.product(range(seeds), range(count))
    ) / ((seeds - 1) * (count - 1))
    every = of_prompt + ([100.0, -100.0] if shares else [])
    by_prompts = np.var(every, ddof=1) / len(every) - rest / seeds / count
    by_seeds, noise = np.var(of_seed, ddof=1) / seeds, rest / count / seeds
    t = [stats.t.isf(0.01, len(every) - 1), stats.t.isf(0.01, seeds - 1)]
    of_seeds = max(t[1] ** 2 * by_seeds, stats.norm.isf(0.01) ** 2 * noise)
    half = np.sqrt(t[0] ** 2 * max(0, by_prompts) + of_seeds)
    spread = pair_seeds(one, other)
    assert bound(spread, 0.01) == pytest.approx(np.mean(every) - half)
    assert spread.gap == pytest.approx(mean)
    low, high = spread.find_interval(1 - spread.p)
    assert min(abs(low), abs(high)) < 1e-6, "p is the level of the interval that ends at 0"


def test_pairs_of_seeds_cancel_what_a_seed_has_in_common():
    draw = np.random.default_rng(0)
    base, seeds = draw.normal(50, 20, 200), draw.normal(0, 10, (4, 1))
    one, other = (base + seeds + draw.normal(gain, 1, (4, 200)) for gain in (0, 5))
    assert bound(pair_seeds(one, other), 0.01) > 0
    _, (low, _), _ = find_difference(one, other)
    assert low < 0, "without pairs the seeds would hide it"


def test_seeds_that_are_equal_by_chance_are_not_certain():
    """Each of three seeds answers other prompts right, and all as many."""
    one, other = np.zeros((2, 3, 60))
    for seed in range(3):
        other[seed, 10 * seed : 10 * seed + 10] = 100.0
    assert bound(pair_seeds(one, other), 1e-9) < 0 < bound(pair_seeds(one, other), 0.025)


def test_seeds_that_differ_by_noise_alone_are_not_held_to_few():
    """Their means are closer by chance than the noise in them, which many answers estimate."""
    one, other = np.zeros((2, 3, 400))
    for seed in range(3):
        other[seed, 40 * seed : 40 * seed + 40 + seed] = 100.0
    spread = pair_seeds(one, other)
    assert spread.by_seeds < spread.floor
    assert bound(spread, 1e-3) > 0
    assert bound(replace(spread, by_seeds=spread.floor), 1e-3) < 0


SPREAD = Spread(4.0, 4.0, 0.5, 1.0, 255, 4)


def test_verdicts():
    assert decide(SPREAD, 0.025, 2.0) == KEEP
    assert decide(SPREAD, 0.0001, 2.0) == NOT_YET, "at a late place more is asked"
    assert decide(replace(SPREAD, gap=-9, centre=-9), 0.025, 2.0) == DISCARD
    assert decide(replace(SPREAD, gap=0, centre=0), 0.025, 9.0) == DISCARD
    assert decide(replace(SPREAD, gap=0, centre=0), 0.025, 2.0) == NOT_YET
    assert decide(pair_seeds(np.zeros((3, 200)), np.zeros((3, 200))), 0.025, 2.0) == DISCARD


@pytest.mark.parametrize("floor", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("effect", [2.0, 6.0, 8.0])
@pytest.mark.parametrize("level", [1e-2, 1e-4, 1e-6])
def test_seeds_are_foreseen_as_trying_would_find(level, effect, floor):
    spread = replace(SPREAD, floor=floor)
    tried = {}
    for count in range(6, 100):
        parts = {"by_seeds": 5 / count, "floor": 5 * floor / count}
        tried[count] = decide(replace(spread, **parts, seeds=count - 1), level, effect)
    first = next(count for count, answer in tried.items() if answer != NOT_YET)
    assert foresee(spread, 5, level, effect) == first
    far = replace(spread, by_examples=50.0)
    assert foresee(far, 5, level, effect) is None, "more seeds are of no use"


def test_few_ledgers_keep_noise():
    """Small ones; the study and the test below have 200 proposals."""
    draw, world = np.random.default_rng(4), study.World(prompts=48)
    policy = study.Policy(most=8)
    kept = [study.keeps_noise(draw, world, policy, 12)[0] for _ in range(60)]
    assert sum(kept) <= 8, "of 60; with 5 % more are as likely as 1 in 300"


@pytest.mark.thorough
@pytest.mark.parametrize("name", study.NOTHING)
def test_few_ledgers_of_200_proposals_keep_noise(name):
    draw, policy = np.random.default_rng(5), study.Policy(most=8)
    world = replace(study.NOTHING[name], prompts=96)
    kept = [study.keeps_noise(draw, world, policy, 200)[0] for _ in range(60)]
    assert sum(kept) <= 8


def test_an_effect_is_kept():
    """As the table of README.md says, with a margin for the number of trials."""
    draw, world = np.random.default_rng(6), study.World(prompts=512, effect=5.0)
    kept, seeds = study.find_power(draw, world, study.Policy(most=16), 1, 40)
    assert kept >= 0.8
    assert seeds < 16
    kept, _ = study.find_power(draw, world, study.Policy(first=32, most=32), 200, 40)
    assert kept >= 0.7


# --- the ledger


GAIN = asdict(replace(SPREAD, gap=40.0, centre=40.0))
LUCK = asdict(replace(SPREAD, gap=3.0, centre=3.0))


def look(path: Path, new: str, spread: dict | None, seeds: int = 3) -> dict:
    found = None if spread is None else {"seeds": seeds, "spread": spread}
    with opened(path) as ledger:
        return ledger.look(Pair("base", new), 2.0, found)


def test_a_look_is_noted_once(tmp_path):
    path = tmp_path / "ledger.jsonl"
    first = look(path, "a", LUCK)
    assert (first["place"], first["look"], first["answer"]) == (1, 1, NOT_YET)
    again = look(path, "a", GAIN)
    assert again["spread"]["gap"] == 3, "runs made again are no other chance"
    assert len(path.read_text().splitlines()) == 1
    more = look(path, "a", GAIN, seeds=6)
    assert (more["place"], more["look"], more["answer"]) == (1, 2, KEEP)
    assert more["level"] == pytest.approx(find_level(1, []) / 4)
    with opened(path) as ledger:
        assert not ledger.needs_runs(Pair("base", "a"), 9), "what is kept stays kept"
        assert ledger.needs_runs(Pair("base", "b"), 2)


def test_a_ledger_of_before_the_floor_is_read(tmp_path):
    path = tmp_path / "ledger.jsonl"
    old = {name: value for name, value in LUCK.items() if name != "floor"}
    assert look(path, "a", old)["answer"] == NOT_YET
    assert look(path, "a", None)["spread"] == old
    assert look(path, "a", GAIN | {"floor": 0.5}, seeds=4)["answer"] == KEEP


def test_places_follow_and_levels_are_passed_on(tmp_path):
    path = tmp_path / "ledger.jsonl"
    assert look(path, "a", LUCK)["place"] == 1
    before = look(path, "b", LUCK)
    assert before["place"] == 2
    look(path, "a", GAIN, seeds=4)
    after = look(path, "b", None)
    assert after["level"] == pytest.approx(before["level"] + find_level(1, []) / 2)


@pytest.mark.parametrize("damage", ["removed", "changed", "swapped", "binary", "deep", "kind"])
def test_a_damaged_ledger_is_refused(tmp_path, damage):
    path = tmp_path / "ledger.jsonl"
    for name in "abc":
        look(path, name, LUCK)
    lines = path.read_bytes().splitlines(keepends=True)
    lines = {
        "removed": lines[1:],
        "changed": [lines[0].replace(b"not yet", b"discard"), *lines[1:]],
        "swapped": [lines[1], lines[0], lines[2]],
        "binary": [*lines, b"\xff\x00\n"],
        "deep": [*lines, b"[" * 10000 + b"\n"],
        "kind": [*lines, b'{"place": 4}\n'],
    }[damage]
    path.write_bytes(b"".join(lines))
    with pytest.raises(ConfigError, match=r"ledger\.jsonl is damaged.*Restore it"):
        look(path, "d", LUCK)
    assert path.read_bytes() == b"".join(lines), "it is left as it is"


def test_an_incomplete_last_line_is_replaced(tmp_path):
    path = tmp_path / "ledger.jsonl"
    look(path, "a", LUCK)
    path.write_bytes(path.read_bytes() + b'{"previous": "12')
    assert look(path, "b", LUCK)["place"] == 2
    assert look(path, "c", LUCK)["place"] == 3


def test_processes_wait_for_each_other(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with ThreadPoolExecutor(8) as pool:
        places = pool.map(lambda n: look(path, str(n), LUCK)["place"], range(40))
    assert sorted(places) == list(range(1, 41))


# --- the command

SETTINGS = "algo=grpo task=translate hardware=cpu"


def given(base: str, new: str, folder: Path, **more) -> Namespace:
    options = command.parser().parse_args([base, new, "--out", str(folder)])
    return Namespace(**vars(options) | more)


def test_settings_may_be_text_a_file_or_a_run(tmp_path):
    (tmp_path / "base.txt").write_text("algo=grpo task=translate  # of today\nhardware=cpu\n")
    record = tmp_path / "run" / ".hydra"
    record.mkdir(parents=True)
    (record / "overrides.yaml").write_text(
        "[algo=grpo, task=translate, hardware=cpu, seed=3, budget.seconds=9, resume=auto]"
    )
    texts = (SETTINGS, str(tmp_path / "base.txt"), str(tmp_path / "run"))
    assert [command.read_settings(text) for text in texts] == [SETTINGS.split()] * 3


def test_two_spellings_are_one_proposal(tmp_path):
    other = "hardware=cpu task=translate algo=grpo algo.lr=1e-3"
    base, new = command.find_sides(given(SETTINGS, other, tmp_path))
    _, again = command.find_sides(given(SETTINGS, f"{SETTINGS} algo.lr=0.001", tmp_path))
    assert new.digest == again.digest != base.digest
    assert "budget.seconds=300" in base.arguments


@pytest.mark.parametrize(
    ("base", "new", "more", "match"),
    [
        (SETTINGS, f"{SETTINGS} algo=grpo", {}, "the same settings"),
        (SETTINGS, f"{SETTINGS} seed=3", {}, "NEW has seed=3"),
        (f"-m {SETTINGS}", SETTINGS, {}, "BASE has -m"),
        (SETTINGS, f"{SETTINGS} algo.lrr=1", {}, r"NEW: .*algo\.lrr"),
        (SETTINGS, f"{SETTINGS} budget.tokens=9", {"budget": 5.0}, "--budget 5 and"),
        (SETTINGS, "nothing", {}, "neither a file"),
        (SETTINGS, "a='", {}, "cannot be read as settings"),
        (SETTINGS, f"{SETTINGS} algo.lr=1", {"seeds": 1}, "--seeds 1"),
        (SETTINGS, f"{SETTINGS} algo.lr=1", {"effect": float("nan")}, "--effect nan"),
    ],
)
def test_mistakes_are_found_before_a_run(tmp_path, monkeypatch, base, new, more, match):
    monkeypatch.setattr(command, "make_runs", lambda *_: pytest.fail("a run has begun"))
    with pytest.raises(ConfigError, match=match):
        command.judge(given(base, new, tmp_path, **more))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("budget", value) for value in (-5.0, 0.0, float("nan"), float("inf"), 1e30)),
        *(("seeds", value) for value in (-1, 0, 1, 10**9, 10**400)),
        *(("effect", value) for value in (-1.0, float("nan"), float("inf"), 1e300)),
    ],
)
def test_options_are_refused_by_their_own_names(tmp_path, name, value):
    """Before any settings are made of them."""
    mistaken = given("no settings", "none either", tmp_path, **{name: value})
    with pytest.raises(ConfigError, match=f"^--{name} .*Give"):
        command.judge(mistaken)


def test_a_long_budget_keeps_its_digits(tmp_path):
    other = f"{SETTINGS} algo.lr=1e-3"
    base, _ = command.find_sides(given(SETTINGS, other, tmp_path, budget=1_234_567.0))
    assert "budget.seconds=1234567" in base.arguments


def write_run(folder: Path, right: np.ndarray, metric: str = "accuracy") -> None:
    """A run folder with what a comparison reads."""
    (folder / "completions").mkdir(parents=True, exist_ok=True)
    counts = dict.fromkeys(("steps", "seconds", "generated_tokens", "reward_evaluations"), 1)
    result = {"algo": "grpo", "task": "t", "model": "m", "metric": metric, "before": 0.0}
    (folder / "result.json").write_text(json.dumps(result | counts | {"after": right.mean()}))
    rows = [
        {"id": n, "prompt": str(n), "answer": "", "completion": "", "scores": {metric: score}}
        for n, score in enumerate(right.tolist())
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "completions" / "after.jsonl").write_text(text)


def test_runs_that_exist_are_judged(tmp_path, capsys):
    better = f"{SETTINGS} algo.lr=1e-3"
    sides, draw = command.find_sides(given(SETTINGS, better, tmp_path)), np.random.default_rng(0)
    for side, share in zip(sides, (0.4, 0.7), strict=True):
        for seed in (1, 2, 3):
            write_run(side.find_folder(tmp_path, seed), 100.0 * (draw.random(400) < share))
    found = command.judge(given(SETTINGS, better, tmp_path))
    assert (found["answer"], found["exit_code"], found["prompts"]) == (KEEP, 0, 400)
    assert 15 < found["interval"][0] < found["gain"] < found["interval"][1] < 45
    worse = command.judge(given(better, SETTINGS, tmp_path))
    assert (worse["answer"], worse["exit_code"], worse["place"]) == (DISCARD, 1, 2)
    for side in sides:
        shutil.rmtree(tmp_path / side.digest[:16])
    assert command.judge(given(SETTINGS, better, tmp_path)) == found, "from the ledger"
    assert command.explain(found).startswith("keep: +")


def test_other_prompts_cannot_be_paired(tmp_path):
    sides = command.find_sides(given(SETTINGS, f"{SETTINGS} algo.lr=1e-3", tmp_path))
    for side, count in zip(sides, (10, 12), strict=True):
        for seed in (1, 2):
            write_run(side.find_folder(tmp_path, seed), np.zeros(count))
    with pytest.raises(ConfigError, match="same held-out prompts"):
        command.read_sides(sides, tmp_path, 2)


@pytest.mark.run
@pytest.mark.thorough
def test_the_command_makes_its_runs(launch, tmp_path):
    base = " ".join([*SMALL_GRPO, "algo.steps=1"])
    options = ["--seeds", "2", "--out", str(tmp_path / "out"), "--json"]
    done = launch(base, f"{base} algo.lr=1e-3", *options, module="common.judge", code=None)
    assert done.returncode in (0, 1, 75), done.stderr
    found = json.loads(done.stdout)
    assert found["exit_code"] == done.returncode
    assert len(list((tmp_path / "out").glob("*/seed-*/result.json"))) == 4
    failing = "algo=grpo task=translate hardware=cpu model=hf model.path=/nowhere algo.steps=1"
    done = launch(base, failing, *options, module="common.judge", code=2)
    assert "NEW seed=1 ended with exit code 2" in done.stderr
