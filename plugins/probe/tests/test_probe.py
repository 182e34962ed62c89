"""The sigma and lr that a probe chooses: probe=true, and auto in a run that is resumed."""

import json
import math
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.checkpoint import checkpoint
from common.config import BudgetConfig, ConfigError, ScheduleConfig
from common.device import hardware, precision
from common.distributed.context import Context
from common.parts import Parts
from common.run.state import RunState
from common.run.timer import Timer
from common.sampling import native
from common.session import Step
from common.system.signals import EXIT_SIGNAL, RunStopped
from eggroll.population import PopulationCollector, Tried
from eggroll.weights import DiskTensors
from launch import compose, train
from plugins.probe import search
from plugins.probe.search import (
    SMALLEST,
    Probe,
    Row,
    choose_lr,
    choose_sigma,
    count_prompts,
    find_step,
)
from tests.support import CONF, MOVING, events
from tests.support.commands import Warm
from tests.support.letters import Letters
from tests.support.refusals import refuses

pytestmark = pytest.mark.usefixtures("in_cache")

AUTO = [*MOVING, "algo.sigma=auto", "algo.lr=auto"]


def row(sigma: float, survived: bool, step: float = 0.1, spread: float = 0.1) -> Row:
    return Row(sigma, 0.1, 0.5, 0.0, None, 0.4, spread, 0.2, step, survived)


def test_a_sigma_without_differences_is_not_chosen():
    """Prompts that are too hard for the model without noise do not tell that members are broken."""
    rows = [row(0.01, True), row(0.04, True), row(0.16, True, spread=0), row(0.64, True, spread=0)]
    sigma, why = choose_sigma(rows, 1.0)
    assert sigma == 0.02
    assert "all earn the same at sigmas above 0.04" in why
    assert choose_sigma([row(0.01, True, spread=0), row(0.04, True, spread=0)], 1.0)[0] == 0.02


def test_half_of_the_largest_sigma_that_is_survived():
    whole = [row(0.02, True), row(0.1, True)]
    sigma, why = choose_sigma(whole, size=0.1)
    assert sigma == 0.05
    assert why == (
        "no sigma that was tried breaks the members, up to 0.1 (1 of the weights' size): the"
        " reward does not say where they do; half of it is used"
    )
    rows = [row(0.01, True), row(0.02, True), row(0.04, False), row(0.08, False)]
    sigma, why = choose_sigma(rows, size=0.1)
    assert sigma == 0.01
    assert why == (
        "members survive up to sigma 0.02 (0.2 of the weights' size); half of it is used"
    )
    assert choose_sigma([row(0.01, False)], size=0.1)[0] == 0.005


@pytest.mark.parametrize(
    ("broken", "lost", "tried", "chosen"),
    [
        ((4, 5), (), [2, 3, 4, 5, 3.5, 3.75], 3.75),  # powers of 4, of SMALLEST
        ((4,), (4,), [2, 3, 4, 3.5, 3.75], 3.75),  # nothing is left there: 5 need not be tried
        ((2, 4, 5), (), [2, 3, 4, 5, 3.5, 3.75], 3.75),  # chance has broken one of them
        ((1, 2, 3, 0.75), (), [2, 3, 1, 0, 0.5, 0.75], 0.5),
        ((2, 1.5), (2,), [2, 1, 1.5, 1.25], 1.25),
        ((0, 1, 2, 3), (), [2, 3, 1, 0], 0),
        ((), (), [2, 3, 4, 5], 5),
        ((5,), (5,), [2, 3, 4, 5, 4.5, 4.75], 4.75),
    ],
)
def test_broken_sigmas_end_the_search(broken, lost, tried, chosen, monkeypatch):
    search, seen = object.__new__(Probe), []
    search.size = 1.0

    def look(_, sigma):
        seen.append(math.log(sigma / SMALLEST, 4))
        of = [any(abs(seen[-1] - power) < 1e-6 for power in powers) for powers in (broken, lost)]
        return replace(row(sigma, not of[0]), lost=of[1])

    monkeypatch.setattr(Probe, "try_sigma", look)
    monkeypatch.setattr(Probe, "foresee", lambda *_: None)
    rows = sorted(search.search(), key=lambda one: one.sigma)
    assert seen == pytest.approx(tried)
    sigma, _ = choose_sigma(rows, 1.0)
    assert math.log(2 * sigma / SMALLEST, 4) == pytest.approx(chosen, abs=1e-6)


def test_lr_makes_all_steps_a_walk_of_some_sigma():
    cfg = compose([]).algo
    lr, _ = choose_lr(cfg, sigma=0.01, step=0.1, steps=49)
    assert math.sqrt(49) * 0.1 * lr == pytest.approx(search.WALK * 0.01)
    momentum = replace(cfg, optimizer=replace(cfg.optimizer, kwargs={"momentum": 0.9}))
    assert choose_lr(momentum, 0.01, 0.1, 49)[0] == pytest.approx(lr / 10)
    adam = replace(cfg, optimizer=replace(cfg.optimizer, name="Adam"))
    assert choose_lr(adam, 0.01, 0.1, 49)[0] == pytest.approx(lr / 10)
    damped = replace(momentum.optimizer, kwargs={"momentum": 0.9, "dampening": 0.9})
    assert choose_lr(replace(cfg, optimizer=damped), 0.01, 0.1, 49)[0] == pytest.approx(lr)
    schedule = ScheduleConfig(kind="linear", end=0.0)
    falling = replace(cfg, lr_schedule=schedule, steps=49)
    first, why = choose_lr(falling, 0.01, 0.1, 49)
    walk = math.sqrt(sum((first * 0.1 * schedule.factor(i / 48)) ** 2 for i in range(49)))
    assert walk == pytest.approx(search.WALK * 0.01)
    assert "per the first step" in why
    refuses(
        lambda: choose_lr(
            replace(cfg, optimizer=replace(cfg.optimizer, name="Rprop")), 0.01, 0.1, 49
        ),
        key="algo.optimizer.name",
        value="Rprop",
    )
    with pytest.raises(
        ConfigError, match=r"all earn the same\. Use a finer reward or more prompts"
    ):
        choose_lr(cfg, 0.01, 0.0, 49)


# The square of the difference of a pair that answers 2 prompts: of rewards in [0, 1], of variance
# 1 / 12 each; of the same over their deviation; and of +1 and -1, where the pair is not as often
# right, if an answer is right in one case of ten.
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("shaping", "square"),
    [
        ("centered", 2 / 24),
        ("prompt_zscore", 1),
        ("pair_sign", 4 * (1 - 0.81**2 - 0.18**2 - 0.01**2)),
    ],
)
def test_lr_accounts_for_the_prompts_of_a_step(tmp_path, monkeypatch, shaping, square):
    """Of which the probe has more: 16 members in place of 64 answer four times as many."""
    draw, try_out = torch.Generator().manual_seed(0), PopulationCollector.try_out

    def lucky(self, examples, *args, **kwargs):
        tried = try_out(self, examples, *args, **kwargs)
        rewards = torch.rand(tried.rewards.shape, generator=draw).double()
        return replace(
            tried, rewards=(rewards < 0.1).double() if shaping == "pair_sign" else rewards
        )

    monkeypatch.setattr(PopulationCollector, "try_out", lucky)
    asked = ["algo.members=64", "algo.prompts_per_step=2", "algo.lr=auto"]
    asked += [f"algo.fitness={shaping}", "probe=true"]
    found = train(compose([*MOVING, *asked]), tmp_path, Letters("smooth"))
    wanted = math.sqrt(square * 32) / 64  # in 32 directions
    steps = [row.step for row in found.rows]
    assert math.sqrt(sum(s * s for s in steps) / len(steps)) == pytest.approx(wanted, rel=0.15)


def test_steps_that_a_budget_leaves():
    def count(*asked: str, prompts: int | None = None) -> int:
        probed = search.Probe.__new__(search.Probe)
        probed.run = compose([*AUTO, *asked])
        probed.cfg = cfg = probed.run.algo
        tried = replace(cfg, prompts_per_step=prompts or cfg.prompts_per_step)
        probed.collector = SimpleNamespace(cfg=tried)
        probed.context = Context(0, 1, hardware.find(probed.run.hardware), Path())
        one = replace(row(0.01, True), tokens=100, seconds=2.0)
        return probed.count_steps(one, tokens=1000, seconds=20.0)

    assert count("algo.steps=null", "budget.tokens=5000") == 40
    assert count("algo.steps=50", "budget.tokens=5000") == 40
    assert count("algo.steps=30", "budget.tokens=5000") == 30
    assert count("algo.steps=null", "budget.seconds=60") == 20
    assert count("algo.steps=null", "budget.seconds=60", "budget.tokens=5000") == 20
    assert count("algo.steps=null", "budget.tokens=500") == 1
    # A probe that the budget has cut answered half as many prompts as a step of the run does.
    cut = ["algo.prompts_per_step=4", "algo.steps=null", "budget.tokens=5000"]
    assert count(*cut, prompts=2) == 20
    assert count(*cut, prompts=8) == 80


def test_lr_is_for_a_schedule_that_follows_the_budget():
    """Of 1,000 steps a budget leaves 50, in which the schedule falls to 0."""
    linear = ["algo.lr_schedule.kind=linear", "algo.lr_schedule.end=0"]
    few = compose([*AUTO, "algo.steps=50", *linear]).algo
    many = compose([*AUTO, "algo.steps=1000", *linear]).algo
    assert choose_lr(many, 0.01, 0.1, 50) == choose_lr(few, 0.01, 0.1, 50)


@pytest.mark.thorough
def test_compilation_is_no_part_of_what_a_probe_takes(tmp_path, in_cache, monkeypatch):
    order: list[str] = []
    rehearse, try_out = PopulationCollector.rehearse, PopulationCollector.try_out
    monkeypatch.setattr(native, "compiled", lambda part, mode: part)
    monkeypatch.setattr(
        PopulationCollector, "rehearse", lambda self: order.append("compiles") or rehearse(self)
    )
    monkeypatch.setattr(
        PopulationCollector,
        "try_out",
        lambda self, *a, **k: order.append("tries") or try_out(self, *a, **k),
    )
    train(compose([*AUTO, "opt=[compile]", "algo.steps=1"]), tmp_path, Letters("smooth"))
    assert order[:2] == ["compiles", "tries"]


@pytest.mark.thorough
def test_a_step_costs_the_chosen_sigmas_tokens(tmp_path, monkeypatch):
    """And not those of members that break, and write on and on."""
    try_out = PopulationCollector.try_out

    def writing(self, examples, draw, sigma, step, *args, **kwargs):
        alone = Step(0, 0.0, RunState(), Timer(), step.non_finite_handler)
        tried = try_out(self, examples, draw, sigma, alone, *args, **kwargs)
        broken = sigma > 0.01
        step.used(tokens=10_000 if broken else 100, samples=1)
        return replace(tried, rewards=tried.rewards * (not broken))

    monkeypatch.setattr(PopulationCollector, "try_out", writing)
    asked = compose([*MOVING, "algo.steps=null", "budget.tokens=1000000", "probe=true"])
    found = train(asked, tmp_path, Letters("smooth"))
    assert not all(row.survived for row in found.rows), "otherwise this says nothing"
    (chosen,) = [row for row in found.rows if row.sigma == found.sigma]
    assert chosen.tokens == 100
    assert f"for {round((1_000_000 - found.tokens) / 100)} steps" in found.why


@pytest.mark.thorough
def test_the_model_without_noise_answers_once(tmp_path, monkeypatch):
    """At each sigma it would answer the same; what it takes counts."""
    asked, ask = [], PopulationCollector.ask_centre
    monkeypatch.setattr(
        PopulationCollector, "ask_centre", lambda *a: asked.append(ask(*a)) or asked[-1]
    )
    found = train(compose([*MOVING, "probe=true"]), tmp_path, Letters("smooth"))
    (centre,) = asked
    assert found.tokens == sum(row.tokens for row in found.rows) + centre.generated


def test_a_probe_trains_nothing(launch, tmp_path):
    out = tmp_path / "run"
    overrides = (*MOVING, "task=letters", "task.scoring=smooth", "probe=true")
    said = launch("--config-dir", CONF, f"hydra.run.dir={out}", *overrides)
    found = json.loads((out / "probe.json").read_text())
    assert f"probe: algo.sigma={found['sigma']:.3g} algo.lr={found['lr']:.3g}: " in said.stdout
    assert (out / "probe.png").stat().st_size > 10_000
    assert not (out / "metrics.jsonl").exists()
    assert not (out / "checkpoints").exists()
    assert len(found["rows"]) >= 4
    (as_set,) = [row for row in found["rows"] if row["as_set"]]
    assert as_set["sigma"] == compose(MOVING).algo.sigma
    assert re.search(r"^ .* as set$", said.stdout, re.MULTILINE)
    assert [r["sigma"] for r in found["rows"]] == sorted(r["sigma"] for r in found["rows"])


@pytest.mark.thorough
def test_a_sweep_of_probes_ends_with_a_table(launch, tmp_path):
    given = ("--config-dir", CONF, f"hydra.sweep.dir={tmp_path}", *MOVING, "task=letters")
    said = launch("-m", *given, "task.scoring=smooth", "probe=true", "seed=1,2")
    table = said.stdout.split("\n\n")[-2].splitlines()
    shown = ["probe", "sigma", "lr", "without", "reward", "spread", "changed", "same", "agreement"]
    assert table[0].split() == shown  # whole, in 80 columns
    for line, folder in zip(table[2:], ("0", "1"), strict=True):
        found = json.loads((tmp_path / folder / "probe.json").read_text())
        cells = line.split()
        assert cells[:3] == [
            f"seed={int(folder) + 1}",
            f"{found['sigma']:.3g}",
            f"{found['lr']:.3g}",
        ]
    assert f"written to {tmp_path}/probes.md" in said.stdout
    assert "| seed=2 |" in (tmp_path / "probes.md").read_text()
    assert "no result" not in said.stdout


@pytest.mark.thorough
def test_the_probe_table_is_shown_without_right_answers(tmp_path, monkeypatch):
    run = compose([*MOVING, "probe=true"])
    closed, close = [], Parts.close
    monkeypatch.setattr(Parts, "close", lambda parts: closed.append(close(parts)))
    found = train(run, tmp_path, Letters("right"))
    assert len(closed) == 1, "workers that score, and an engine, would stay"
    assert "no sigma that was tried breaks the members" in found.why
    assert found.lr is None
    assert "finds no difference between the members" in found.why
    assert json.loads((tmp_path / "probe.json").read_text())["lr"] is None
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds a run, whose probe\.json would be lost"):
        train(run, tmp_path, Letters("right"))
    given = compose([*MOVING, "algo.sigma=auto", "algo.lr=0.1"])
    refuses(
        lambda: train(given, tmp_path / "given", Letters("right")), key="algo.sigma", value="auto"
    )


class EveryOther(Letters):
    """Half of the prompts have no reward, whoever answers; the others' hardly differ."""

    def reward(self, example, completion):
        return None if example.id % 2 else 0.8 + 0.01 * super().reward(example, completion)


def test_unscored_prompts_are_not_in_the_unperturbed_mean(tmp_path):
    """They counted as 0 there and in no other way for the members, so that none was broken."""
    found = train(compose([*MOVING, "probe=true"]), tmp_path, EveryOther("smooth"))
    assert found.centre > 0.79
    assert all(row.reward > 0.79 for row in found.rows)


@pytest.mark.thorough
def test_a_method_that_moves_no_weights_is_told_no_lr(tmp_path):
    without = [text for text in MOVING if not text.startswith("algo.lr=")]
    asked = compose([*without, "algo.method=randopt", "algo.sigma=auto", "algo.steps=1"])
    train(asked, tmp_path, Letters("smooth"))
    assert json.loads((tmp_path / "probe.json").read_text())["lr"] is None


@pytest.mark.faults
def test_a_signal_ends_the_probe(tmp_path, monkeypatch):
    tried, attempt = [], search.Probe.try_sigma

    def interrupted(self, sigma):
        tried.append(sigma)
        if len(tried) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return attempt(self, sigma)

    monkeypatch.setattr(search.Probe, "try_sigma", interrupted)
    with pytest.raises(RunStopped, match="stopped in the probe, before the first step") as stop:
        train(compose([*AUTO, "algo.steps=4"]), tmp_path, Letters("smooth"))
    assert stop.value.code == EXIT_SIGNAL
    assert len(tried) <= 3


def test_a_sigma_whose_rewards_are_no_numbers_is_too_large(tmp_path, monkeypatch):
    try_out = PopulationCollector.try_out

    def overflowing(self, examples, draw, sigma, *args, **kwargs):
        tried = try_out(self, examples, draw, sigma, *args, **kwargs)
        if sigma > 0.01:
            tried.rewards[0] = torch.nan
        return tried

    monkeypatch.setattr(PopulationCollector, "try_out", overflowing)
    found = train(compose([*MOVING, "probe=true"]), tmp_path, Letters("smooth"))
    assert found.rows[-1].sigma > 0.01
    assert not found.rows[-1].survived
    assert found.sigma <= 0.005


def test_unknown_optimizers_are_refused_before_probing(tmp_path, monkeypatch):
    monkeypatch.setattr(search.Probe, "try_sigma", lambda *_: pytest.fail("it has been tried"))
    run = compose([*AUTO, "algo.optimizer.name=RMSprop", "algo.steps=2"])
    with pytest.raises(ConfigError, match=r"does not know the steps of algo\.optimizer"):
        train(run, tmp_path, Letters("smooth"))


@pytest.mark.thorough
def test_two_ranks_find_the_same(warm: Warm, tmp_path):
    one = train(compose([*MOVING, "probe=true"]), tmp_path / "one", Letters("smooth"))
    two = warm.call(
        train, compose([*MOVING, "probe=true", "opt=[ddp]"]), tmp_path / "two", Letters("smooth")
    )
    assert (one.sigma, one.lr, one.rows) == (two.sigma, two.lr, two.rows)
    assert one.tokens == two.tokens


@pytest.mark.thorough
def test_the_probe_uses_the_runs_precision(tmp_path, monkeypatch):
    monkeypatch.setattr(precision, "native_bf16", lambda _: True)  # emulated where it is not
    found = {
        name: train(
            compose([*MOVING, "probe=true", *given]),
            tmp_path / name,
            Letters("smooth"),
        )
        for name, given in {
            "float32": (),
            "bfloat16": ("opt=[amp]", "opt.amp.dtype=bfloat16"),
        }.items()
    }
    one, half = found.values()
    assert one.rows[0].sigma == pytest.approx(half.rows[0].sigma, rel=0.01)
    assert one.rows != half.rows
    assert 0.25 < half.sigma / one.sigma < 4
    assert 0.25 < half.lr / one.lr < 4


def last(folder: Path) -> checkpoint.Checkpoint:
    found = checkpoint.latest(folder / "checkpoints")
    assert found is not None
    return found


@pytest.mark.faults
def test_auto_goes_on_with_what_it_chose(tmp_path, monkeypatch):
    asked = [*AUTO, "algo.steps=4", "checkpoint.every=2"]
    train(compose(asked), tmp_path / "whole", Letters("smooth"))
    found = json.loads((tmp_path / "whole" / "probe.json").read_text())
    logged = events(tmp_path / "whole")
    assert {(e["sigma"], e["lr"]) for e in logged} == {(found["sigma"], found["lr"])}
    own = logged[0]["generated_tokens"]
    assert own > found["tokens"] > 0, "what a probe generates counts"

    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-00000004")
    monkeypatch.setattr(search.Probe, "look", lambda _: pytest.fail("it has been looked for"))
    train(compose([*asked, "resume=auto"]), tmp_path / "cut", Letters("smooth"))
    one, other = last(tmp_path / "whole").tensors, last(tmp_path / "cut").tensors
    assert all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(ConfigError, match=r"algo\.sigma was 'auto', is 0\.1"):
        train(compose([*AUTO, "algo.sigma=0.1", "resume=auto"]), tmp_path / "cut", Letters())


def test_words_for_settings_that_do_not_go_together():
    refuses(
        lambda: compose(["algo.sigma=much"]),
        key="algo.sigma",
        value="much",
        try_next="Give one above 0",
    )
    with pytest.raises(ConfigError, match="probe=true has no effect with algo=grpo"):
        compose(["algo=grpo", "probe=true"])
    refuses(
        lambda: compose(["plan=true", "probe=true"]),
        key="plan",
        value="true",
        try_next="probe=true",
    )
    with pytest.raises(ConfigError, match=r"algo\.lr=-1 is out of range"):
        compose(["algo.lr=-1"])


def test_a_probe_beyond_the_budget_stops_early(tmp_path):
    run = compose([*AUTO, "budget.tokens=100"])
    refuses(
        lambda: train(run, tmp_path, Letters("smooth")),
        key="budget.tokens",
        value="100",
        try_next="algo.sigma",
    )


@pytest.mark.parametrize("fitness", ["zscore", "prompt_zscore", "centered"])
@pytest.mark.parametrize("alike", [0.0, 1.0])
def test_the_planned_step_is_the_one_of_a_step(fitness, alike):
    """Whatever both members of a pair lose alike, and whatever few prompts add by chance."""
    draw = torch.Generator().manual_seed(0)
    asked = [
        "algo=eggroll",
        "algo.members=32",
        "algo.prompts_per_step=2",
        f"algo.fitness={fitness}",
    ]
    cfg = compose(asked).algo

    def answer(prompts):
        pairs = alike * torch.randn(16, 1, generator=draw).repeat_interleave(2, 0)
        rewards = pairs + torch.randn(32, prompts, generator=draw)
        zeros = torch.zeros_like(rewards)
        return Tried(rewards.double(), {}, zeros, zeros, None)

    planned = [find_step(answer(64), cfg) for _ in range(40)]
    real = [find_step(answer(2), cfg) for _ in range(400)]
    rms = [math.sqrt(sum(x * x for x in one) / len(one)) for one in (planned, real)]
    assert rms[0] == pytest.approx(rms[1], rel=0.08)


@pytest.mark.run
def test_a_probe_takes_a_quarter_of_the_budget():
    """64 members x 8 prompts of 48 tokens are 32 prompts for 16 members, in six tries; half write
    to the end.
    """
    algo = compose(
        ["algo=eggroll", "model=hf", "model.path=somewhere", "algo.sampling.max_new_tokens=48"]
    ).algo

    def prompts(seconds=None, tokens=None, of_one=(48.0, 0.0)):
        return count_prompts(algo, 16, BudgetConfig(tokens=tokens, seconds=seconds), *of_one)

    assert prompts() == prompts(seconds=1200) == 32
    assert prompts(seconds=4 * 6 * 16 * 10, of_one=(48, 1.0)) == 10
    assert prompts(seconds=4 * 6 * 16 * 20, of_one=(16, 1.0)) == 10  # the half takes three times it
    assert prompts(tokens=4 * 6 * 16 * 48 * 20) == 20
    assert prompts(tokens=4 * 6 * 16 * 48 * 20, of_one=(16, 0.0)) == 30
    assert prompts(tokens=4 * 6 * 16 * 48 * 20, of_one=(0, 0.0)) == 20
    assert prompts(seconds=1, of_one=(48, 1.0)) == 8  # as many as a step has


def test_a_second_probe_in_a_folder_leaves_its_own_settings(launch, tmp_path):
    for seed in (3, 4):
        launch(*MOVING, f"hydra.run.dir={tmp_path / 'mine'}", "probe=true", f"seed={seed}")
    assert "seed=4" in (tmp_path / "mine" / ".hydra" / "overrides.yaml").read_text()
    assert [path.name for path in (tmp_path / "mine").glob(".hydra*")] == [".hydra"]


@pytest.mark.thorough
def test_a_probe_keeps_no_initial_weights(tmp_path, monkeypatch):
    kept, init = [], DiskTensors.__init__
    monkeypatch.setattr(
        DiskTensors, "__init__", lambda *args: [init(*args), kept.append(args[0].places)][0]
    )
    train(compose([*MOVING, "probe=true"]), tmp_path, Letters("smooth"))
    assert kept == [{}]
