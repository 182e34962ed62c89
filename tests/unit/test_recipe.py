"""Learning rates by size, the trust region of EGGROLL, and what is left of a budget."""

import math
from types import SimpleNamespace

import pytest
import torch

from common.config import BudgetConfig
from common.finetune import RATES as RFT_RATES
from common.optim import Rates, choose_lr, describe_lr
from common.run import RunState
from common.run.budget import Budget
from eggroll.trust import ROOM, TrustRegion
from grpo.loss import advantages
from grpo.policy import RATES as GRPO_RATES
from launch import compose
from tests.support import CONF

HF = ["model=hf", "model.path=somewhere"]


@pytest.mark.parametrize("rates", [GRPO_RATES, RFT_RATES], ids=["grpo", "rft"])
def test_recipe_rates_fall_with_model_size(rates):
    for adapted, points in ((False, rates.weights), (True, rates.adapter)):
        for size, rate in points:
            assert rates.at(round(size), adapted) == pytest.approx(rate)
        between = [rates.at(10**power, adapted) for power in range(5, 12)]
        assert between == sorted(between, reverse=True)
        assert between[0] == points[0][1]  # beyond the points theirs
        assert between[-1] == points[-1][1]


def test_rates_lie_on_a_line_in_logarithms():
    rates = Rates(weights=((1e6, 1e-3), (1e10, 1e-5)), adapter=((1e6, 1.0), (1e7, 0.5)))
    assert rates.at(10**8, False) == pytest.approx(1e-4)


@pytest.mark.run
@pytest.mark.parametrize(
    ("algo", "tiny"), [("grpo", 1e-4), ("rft", 1e-3), ("eggroll", 0.02)], ids=str
)
def test_a_recipe_belongs_to_its_model(algo, tiny):
    assert compose([f"algo={algo}"]).algo.lr == tiny
    other = compose([f"algo={algo}", *HF]).algo
    assert other.lr == "auto"
    if algo == "eggroll":
        assert other.sigma == "auto"
    own = [f"algo={algo}", *HF, f"+model.recipe={{{algo}: {{lr: 3e-7}}}}"]
    assert compose(own).algo.lr == 3e-7


@pytest.mark.run
def test_form_weighs_less_than_answers_without_a_recipe():
    """Of two groups one differs in form alone, and one sample of the other is right: by default an
    advantage is in proportion to what a sample earned, and with "group" both count the same.
    """
    rewards = torch.tensor([[0.1, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    tiny, other = (compose(["algo=grpo", *model]).algo.advantage for model in ([], HF))
    assert (tiny, other) == ("group", "batch")
    form, right = advantages(rewards, other)[:, 0].tolist()
    assert right == pytest.approx(10 * form)
    form, right = advantages(rewards, tiny)[:, 0].tolist()
    assert right == pytest.approx(form, rel=0.01)


@pytest.mark.run
def test_a_tiny_model_can_have_its_own_recipe():
    task = ["task=custom", "task.path=rows.jsonl", "task.prompt_field=q", "task.answer_field=a"]
    algo = compose(["algo=eggroll", *task]).algo
    assert (algo.sigma, algo.lr, algo.sampling.temperature) == (0.04, 0.08, 1.0)
    algo = compose(["algo=grpo", *task]).algo
    assert (algo.lr, algo.lr_schedule.kind, algo.lr_schedule.end) == (2e-4, "linear", 0.0)
    assert compose(["algo=eggroll", *task, *HF]).algo.sampling.temperature == 0.0


@pytest.mark.run
def test_a_model_without_a_recipe_has_noise_on_its_norms():
    vllm = ["engine=vllm", "engine.python=python"]
    noises = {
        (): ("lowrank", "frozen"),
        tuple(HF): ("frozen", "full"),
        (*HF, "algo.noise.matrices=lowrank"): ("lowrank", "frozen"),
        (*HF, "algo.noise.vectors=frozen", "algo.noise.head=full"): ("frozen", "frozen"),
        (*HF, "model.adapter.rank=8"): ("lowrank", "frozen"),
        (*HF, *vllm): ("lowrank", "frozen"),
        (*HF, "+model.recipe={eggroll: {sigma: 0.1}}"): ("lowrank", "frozen"),
    }
    for settings, expected in noises.items():
        noise = compose(["algo=eggroll", *settings]).algo.noise
        assert (noise.matrices, noise.vectors) == expected, settings


def model(run, parameters=135_000_000):
    context = SimpleNamespace(main=True)
    lm = SimpleNamespace(parameters=parameters, adapter=None)
    return SimpleNamespace(run=run, lm=lm, context=context)


@pytest.mark.run
def test_the_plan_says_which_recipe_is_used(caplog):
    lines = {
        "lr 3e-05 (auto)": HF,
        "lr 0.0001 (the recipe of model=tiny)": [],
        "lr 2e-05 (as set)": [*HF, "algo.lr=2e-5"],
    }
    for line, overrides in lines.items():
        assert describe_lr(model(compose(["algo=grpo", *overrides])), GRPO_RATES) == line
    assert not caplog.records
    describe_lr(model(compose(["algo=grpo", *HF, "algo.lr=1e-3"])), GRPO_RATES)
    assert "algo.lr=0.001 is 33 times" in caplog.text
    assert "algo.lr=auto is 3e-05" in caplog.text


def test_auto_is_refused_for_unknown_optimizers():
    run = compose(["algo=grpo", *HF, "algo.optimizer.name=SGD"])
    with pytest.raises(ValueError, match=r"algo\.optimizer\.name=SGD.*give algo\.lr"):
        choose_lr(model(run), GRPO_RATES)


def test_recipe_step_sizes_depend_on_the_optimizer():
    assert compose(["algo=eggroll"]).algo.lr == 0.02
    for other in ("algo.optimizer.name=Adam", "algo.optimizer.kwargs={momentum: 0.9}"):
        assert compose(["algo=eggroll", other]).algo.lr == "auto"
    assert compose(["algo=grpo", "algo.optimizer.name=AdamW"]).algo.lr != "auto"


class Sized:
    """Weights of size 2."""

    def size_at_start(self) -> float:
        return 4.0


def walk(
    steps: int, length: float, *overrides: str, planned: float | None = None, tokens: int = 0
) -> float:
    """Return the drift of a random walk of updates that would each be of `length`. tokens: of a
    step, where a budget of them ends the run.
    """
    cfg = compose(["algo=eggroll", *overrides], CONF).algo
    cfg.steps = None if tokens else steps
    context = SimpleNamespace(main=False, gather_objects=lambda value: [value])
    limits = BudgetConfig(tokens=steps * tokens or None, seconds=None)
    budget = Budget(limits, context, 0, 0.0)
    session = SimpleNamespace(budget=budget, state=RunState(), over=False)
    region = TrustRegion(cfg, Sized(), planned, session)
    norm, drift = 7.0, 0.0
    for step in range(steps):
        one = SimpleNamespace(index=step, started=0.0, untimed_seconds=0.0, tokens=tokens)
        lr, made = region.shorten(length * 2.0 / norm, norm, one)
        assert lr > 0
        budget.add((step + 1) * tokens, 0.0)
        assert made == pytest.approx(lr * norm / 2.0)
        drift = math.hypot(drift, made)
        region.follow(made, drift if step % 10 == 0 else None)
    return drift


@pytest.mark.run
def test_runs_of_any_length_end_in_the_trust_region():
    assert walk(60, 0.08) == pytest.approx(0.08 * math.sqrt(60))  # which is within: as they are
    assert walk(2000, 0.08) == pytest.approx(1.0)
    assert walk(2000, 0.08, "algo.max_drift=0.3") == pytest.approx(0.3)
    assert walk(30, 0.5, tokens=100) == pytest.approx(1.0), "the first step, too, by its tokens"
    assert walk(2000, 0.08, "algo.max_drift=null") == pytest.approx(0.08 * math.sqrt(2000))
    assert walk(2000, 0.08, planned=0.1) == pytest.approx(ROOM * 0.1)
    free = walk(2000, 0.08, "algo.optimizer.name=Adam")  # whose updates are not known before
    assert free == pytest.approx(0.08 * math.sqrt(2000))


def test_remaining_steps_follow_from_the_used_budget():
    context = SimpleNamespace(main=False, gather_objects=lambda value: [value])
    budget = Budget(BudgetConfig(tokens=1000, seconds=None), context, 200, 0.0)
    assert budget.steps_left(0, None, before=0.2) is None
    assert budget.steps_left(0, 60, before=0.2) == 60
    budget.add(400, 0.0)  # 4 steps of 50 tokens
    assert budget.steps_left(4, None, before=0.2) == pytest.approx(12)
    assert budget.steps_left(4, 9, before=0.2) == 5
    assert budget.progress(4, None) == pytest.approx(0.4)
    assert budget.progress(4, 5) == 1.0


@pytest.mark.run
def test_the_trust_region_follows_another_budget():
    """A run that used 1,000 tokens before its first step goes on with twice its budget."""
    cfg = compose(["algo=eggroll", "algo.steps=null", "budget.tokens=1"], CONF).algo
    context = SimpleNamespace(main=False, gather_objects=lambda value: [value])
    state = RunState()
    shares = []
    for tokens, used in ((4000, 1000), (8000, 4000)):
        budget = Budget(BudgetConfig(tokens=tokens, seconds=None), context, used, 0.0)
        state.generated = used
        region = TrustRegion(cfg, Sized(), None, SimpleNamespace(budget=budget, state=state))
        shares.append(region.before)
    assert shares == [0.25, 0.125]
