"""What EGGROLL logs of a step, beside the slow way to compute it."""

import math
from dataclasses import replace

import pytest
import torch

from eggroll import instruments
from eggroll.config import NoiseConfig
from eggroll.fitness import equal_parts, fitness
from eggroll.noise import Noise
from eggroll.population import Tried
from eggroll.weights import Weights, movement
from launch import compose
from tests.support.models import small_model

KINDS = ("matrices", "vectors", "embeddings", "head")


def some_noise(rank: int, mirrored: bool, *policies: str) -> Noise:
    given = dict(zip(KINDS, policies, strict=True))
    config = NoiseConfig(**given, patterns={"*wpe*": "frozen"} if "full" in policies else {})  # type: ignore[arg-type]
    model = small_model("gpt2").requires_grad_(False)
    return Noise(model, config, rank=rank, mirrored=mirrored, seed=0)


def tried(rewards: torch.Tensor, **components: torch.Tensor) -> Tried:
    return Tried(rewards, components, *torch.zeros(2, *rewards.shape), None)


def update(noise: Noise, shaped: torch.Tensor) -> torch.Tensor:
    return torch.cat([gradient.flatten().double() for _, gradient in noise.gradients(3, shaped)])


def cosine(u: torch.Tensor, v: torch.Tensor) -> float:
    return torch.nn.functional.cosine_similarity(u, v, dim=0).item()


@pytest.mark.parametrize("mirrored", [True, False])
@pytest.mark.parametrize(
    ("rank", "policies"),
    [
        (1, ("lowrank", "frozen", "frozen", "frozen")),
        (3, ("lowrank", "full", "full", "frozen")),
        (1, ("full", "full", "frozen", "frozen")),
    ],
)
def test_cosines_are_those_of_the_updates(rank, policies, mirrored, monkeypatch):
    monkeypatch.setattr("eggroll.noise.BUFFER", 5000)  # full parameters go in several parts
    noise = some_noise(rank, mirrored, *policies)
    draw = torch.Generator().manual_seed(0)
    one, other = (torch.rand(16, 4, generator=draw).double() for _ in range(2))
    rewards = 0.8 * one + 0.2 * other
    shaped = fitness(rewards, "zscore")
    found = instruments.look(tried(rewards, one=one, other=other), shaped, noise, 3, 1, True)
    whole = update(noise, shaped)
    for name, part in (("one", one), ("other", other)):
        own = update(noise, fitness(part, "zscore"))
        assert found["component_cosine"][name] == pytest.approx(cosine(own, whole), abs=1e-4)
    assert found["component_cosine"]["one"] > found["component_cosine"]["other"]
    direction = torch.arange(16) // (2 if mirrored else 1)
    halves = [update(noise, shaped * (direction % 2 == half)) for half in (0, 1)]
    assert found["member_agreement"] == pytest.approx(cosine(*halves), abs=1e-4)


def test_products_that_cost_too_much_are_left_out(monkeypatch):
    noise = some_noise(3, True, "lowrank", "frozen", "frozen", "frozen")
    monkeypatch.setattr("eggroll.noise.PRODUCTS", 12)
    assert noise.gram(3, 4) is not None
    assert noise.gram(3, 5) is None
    rewards = torch.rand(10, 4, generator=torch.Generator().manual_seed(0)).double()
    found = instruments.look(tried(rewards), fitness(rewards, "zscore"), noise, 3, 1, True)
    assert set(found) == {"zero_fitness", "prompt_agreement"}


def test_prompts_agree_where_members_differ_by_what_they_are():
    draw = torch.Generator().manual_seed(0)
    member, luck = (torch.randn(64, n, generator=draw).double() for n in (1, 8))
    prompts = torch.linspace(0, 5, 8).double()  # some prompts are easier for all
    assert instruments.agree_prompts(member + prompts, mirrored=True) == pytest.approx(1)
    assert instruments.agree_prompts(member + 0.5 * luck + prompts, mirrored=True) > 0.8
    assert abs(instruments.agree_prompts(luck + prompts, mirrored=True) or 0) < 0.4
    assert instruments.agree_prompts(member, mirrored=True) is None, "one prompt has no halves"
    twice = torch.stack((member + luck, member + 0.5 * luck), 2).flatten(1)
    both = instruments.agree_prompts((member + 0.75 * luck), mirrored=True)
    assert instruments.agree_prompts(twice, mirrored=True, samples=2) == pytest.approx(both)


def test_agreement_is_the_cosine_of_halves():
    draw = torch.Generator().manual_seed(1)
    rewards = (torch.randn(4000, 1, generator=draw) + torch.randn(4000, 6, generator=draw)).double()
    weights = rewards[0::2] - rewards[1::2]
    half = [weights[:, [0, 2, 4]].sum(1), weights[:, [1, 3, 5]].sum(1)]
    found = instruments.agree_prompts(rewards, mirrored=True)
    assert found == pytest.approx(cosine(*half), abs=0.03)
    assert found == pytest.approx(3 / 4, abs=0.03), "variances of 1, and of 1 / 3 of luck"


def test_rewards_that_are_equal_agree_on_nothing():
    assert instruments.agree_prompts(torch.ones(8, 4).double(), mirrored=False) is None


def test_a_step_without_differences_says_nothing_of_them():
    noise = some_noise(1, True, "lowrank", "frozen", "frozen", "frozen")
    rewards = torch.ones(8, 2).double()
    assert instruments.look(tried(rewards), fitness(rewards, "zscore"), noise, 0, 1, True) == {
        "zero_fitness": 1.0
    }


def test_rounding_of_an_update():
    draw = torch.Generator().manual_seed(0)
    initial = torch.randn(300, 300, generator=draw)
    before = initial + 1e-2 * torch.randn(300, 300, generator=draw)
    master = before + 1e-4 * torch.randn(300, 300, generator=draw)
    whole, step, changed, count, *cosines = movement(
        master, before.clone(), initial.clone(), lambda tensor: tensor.bfloat16().float()
    ).tolist()
    used = [tensor.bfloat16().double() for tensor in (master, before, initial)]
    assert whole == pytest.approx((master - initial).double().square().sum().item(), rel=1e-5)
    assert step == pytest.approx((master - before).double().square().sum().item(), rel=1e-5)
    assert count == 300 * 300
    assert changed == (used[0] != used[1]).sum()
    assert 0.02 < changed / count < 0.2, "a step below the rounding of most weights"
    by_step = cosine((used[0] - used[1]).flatten(), (master - before).double().flatten())
    since = cosine((used[0] - used[2]).flatten(), (master - initial).double().flatten())
    assert cosines[0] / math.sqrt(cosines[1] * step) == pytest.approx(by_step, rel=1e-4)
    assert cosines[2] / math.sqrt(cosines[3] * whole) == pytest.approx(since, rel=1e-4)
    assert by_step < 0.5, "one step is mostly rounding"
    assert since > 0.95, "what all steps came to is not lost, as the masters keep it"


def test_a_step_that_moves_nothing_has_no_direction(tmp_path):
    model = small_model("gpt2").requires_grad_(False)
    cfg = compose(["algo.members=4"]).algo
    noise = Noise(model, cfg.noise, rank=1, mirrored=True, seed=0)
    weights = Weights(model, noise, cfg, {}, offload=False, folder=tmp_path)
    for shaped in ([0.0] * 4, [1.0, 0.0, 0.0, 0.0]):
        for name, gradient in noise.gradients(0, torch.tensor(shaped)):
            weights.descend(name, gradient, 0.1, compare=True)
        _, found = weights.measure()
        moves = any(shaped)
        assert found["applied_share"] == pytest.approx(float(moves), abs=0.01)
        assert ("applied_cosine" in found, "applied_cosine_all" in found) == (moves, moves)


def test_masters_in_float32_are_what_the_forward_uses():
    before = torch.randn(100)
    master = before.clone()
    master[:25] += 1
    *_, changed, count, product, square, _, _ = movement(
        master, before.clone(), before.clone(), None
    ).tolist()
    assert (changed, count) == (25, 100)
    assert product == square == pytest.approx(25)


def test_what_is_looked_at_are_the_samples_that_count():
    """Members whose samples have the same mean, and another best one."""
    asked = ["algo.members=16", "algo.samples_per_prompt=2", "algo.sampling.temperature=1"]
    cfg = compose([*asked, "algo.prompts_per_step=4", "algo.sample_quantile=1"]).algo
    apart = torch.rand(16, 1, generator=torch.Generator().manual_seed(0)).double().expand(16, 4) / 2
    rewards = torch.stack((0.5 + apart, 0.5 - apart), 2).flatten(1)
    found = tried(rewards, best=rewards)
    noise = some_noise(1, True, "lowrank", "frozen", "frozen", "frozen")
    counted, samples = found.counted(cfg)
    looked = instruments.look(counted, found.shaped(cfg), noise, 0, samples, True)
    assert looked["prompt_agreement"] == pytest.approx(1)
    assert looked["component_cosine"]["best"] == pytest.approx(1)


def test_instruments_follow_component_zscore():
    draw = torch.Generator().manual_seed(0)
    parts = {name: torch.rand(8, 6, generator=draw).double() for name in ("form", "right")}
    parts["right"] = parts["right"] / 100 + 0.2  # differs little between members
    followed = equal_parts(parts).mean(1)
    shaped = fitness(sum(parts.values()), "component_zscore", components=parts)
    torch.testing.assert_close((followed - followed.mean()) / 2, shaped)
    parts["never"] = torch.ones(8, 6).double() / 3
    torch.testing.assert_close(equal_parts(parts).mean(1), followed)
    cfg = compose(["algo.fitness=component_zscore"]).algo
    found = tried(sum(parts.values()), **parts)
    assert torch.equal(found.counted(cfg)[0].rewards, equal_parts(parts))
    watched = torch.rand(8, 6, generator=draw).double()  # has no weight, and is in the log alone
    more = replace(found, components=parts | {"seen": watched}, watched=frozenset({"seen"}))
    assert torch.equal(more.counted(cfg)[0].rewards, equal_parts(parts))
    assert torch.equal(more.shaped(cfg), found.shaped(cfg))
