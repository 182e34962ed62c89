import itertools
import math
from dataclasses import replace

import pytest
import torch

from common.config import ConfigError
from grpo.loss import (
    BOUNDS,
    Counts,
    advantages,
    decoupled_advantages,
    kl,
    off_policy_mask,
    overlong_penalty,
    policy_loss,
    sampler_weights,
)
from grpo.policy import check_native
from launch import compose
from tests.support.losses import BOUNDED, MASK, NEW, OLD, REF, REWARDS, SEQUENCE, settings
from tests.support.refusals import COLUMNS, refuses

COUNTS = Counts(rows=4, tokens=13, micro_batches=1)
VARIANTS = ["grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo", "sapo", "dppo"]


def loss(config, new=NEW, old=OLD, ref=REF, advantage=None, mask=MASK, counts=COUNTS):
    advantage = advantages(REWARDS, "group").flatten() if advantage is None else advantage
    return policy_loss(
        new, old, advantage, mask, counts, config, ref=ref if config.kl.beta else None
    )


def test_advantages():
    torch.testing.assert_close(
        advantages(REWARDS, "group"),
        torch.tensor([[1.30531, -0.783186, 0.261062, -0.783186]]),
        rtol=0,
        atol=1e-5,
    )
    assert advantages(REWARDS, "none").tolist() == [[0.625, -0.375, 0.125, -0.375]]
    two = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    torch.testing.assert_close(
        advantages(two, "batch"), torch.tensor([[0.5, -0.5], [0, 0]]) / (two.std() + 1e-4)
    )
    torch.testing.assert_close(
        advantages(two, "scalerl"),
        torch.tensor([[0.5, -0.5], [0, 0]]) / (math.sqrt(0.5 / 3) + 1e-4),
    )
    assert advantages(two, "rloo").tolist() == [[1, -1], [0, 0]]
    assert advantages(two, "maxrl").tolist() == [[1, -1], [0, 0]]
    for kind in ("group", "batch", "none", "scalerl", "rloo", "maxrl", "pass_at_k"):
        assert (advantages(torch.full((3, 7), 0.1), kind, 2) == 0).all()


@pytest.mark.parametrize("kind", ["group", "batch", "none", "scalerl", "rloo", "maxrl"])
def test_samples_without_a_reward_change_nothing_for_the_others(kind):
    """They stand at the mean of their group, and a deviation over them would be too small."""
    known = torch.tensor([[1.0, 0.0, 0.5], [0.25, 1.0, 0.0]], dtype=torch.float64)
    means = known.mean(1, keepdim=True)
    filled = torch.cat((means - 0.1, known, means), 1)  # a penalty for its length was taken off
    scored = torch.tensor([[False, True, True, True, False]] * 2)
    found = advantages(filled, kind, scored=scored)
    torch.testing.assert_close(found[:, 1:4], advantages(known, kind))
    assert (found[:, [0, 4]] == 0).all()
    parts, weights = torch.stack((filled, filled.square()), 2), torch.tensor([0.5, 0.5]).double()
    every = torch.ones_like(parts, dtype=torch.bool)
    apart = decoupled_advantages(parts, weights, scored[:, :, None] & every)
    alone = decoupled_advantages(parts[:, 1:4], weights, every[:, 1:4])
    torch.testing.assert_close(apart[:, 1:4], alone)


def test_missing_scores_do_not_change_the_deviation():
    """The filled ones stand at the mean of the two that are known."""
    parts = torch.full((2, 8, 2), 0.5, dtype=torch.float64)
    parts[:, :2, 0] = torch.tensor([0.0, 1.0])
    parts[:, :, 1] = torch.linspace(0, 1, 8)
    known = torch.ones(2, 8, 2, dtype=torch.bool)
    known[:, 2:, 0] = False
    found = decoupled_advantages(parts, torch.tensor([1.0, 0.0]).double(), known)
    of_two = torch.tensor([-0.5, 0.5]).double() / (0.5**0.5 + 1e-4)
    summed = torch.zeros(2, 8).double()
    summed[:, :2] = of_two
    torch.testing.assert_close(found, summed / (summed.std() + 1e-4))
    assert (found[:, 2:] == 0).all()


def test_the_best_of_the_samples_that_have_a_reward():
    filled = torch.tensor([[0.5, 1.0, 0.0, 0.5], [0.5, 0.5, 0.5, 1.0]], dtype=torch.float64)
    scored = torch.tensor([[True, True, True, False], [False, False, False, True]])
    found = advantages(filled, "pass_at_k", 2, scored)
    torch.testing.assert_close(found[0, :3], advantages(filled[:1, :3], "pass_at_k", 2)[0])
    assert (found[0, 3], found[1].sum()) == (0, 0), "of one sample there is no best of two"


def best_of(rewards, probability, k):
    """Return the expected best reward of k samples of a policy over a few tokens."""
    total = 0.0
    for drawn in itertools.product(range(len(rewards)), repeat=k):
        total = total + probability[list(drawn)].prod() * rewards[list(drawn)].max()
    return total


@pytest.mark.parametrize(
    ("kind", "k", "size"),
    [
        ("rloo", 1, 3),
        ("pass_at_k", 2, 2),
        ("pass_at_k", 2, 4),
        ("pass_at_k", 3, 4),
        ("maxrl", 1, 4),
    ],
)
@pytest.mark.parametrize("rewards", [[0.0, 1.0, 0.25], [1.0, 0.0, 0.0]], ids=str)
def test_advantages_are_unbiased_over_all_groups_of_three_tokens(kind, k, size, rewards):
    """The mean gradient over all groups, by their probability, is that of what a kind promises.

    That of MaxRL is the likelihood's series (its theorem), up to the term before the group's size,
    where groups without a right sample have no advantage; it holds for rewards of 0 and 1.
    """
    rewards = torch.tensor(rewards, dtype=torch.float64)
    if kind == "maxrl":
        rewards = rewards.round()
    logits = torch.tensor([0.3, -0.4, 0.8], dtype=torch.float64, requires_grad=True)
    probability = logits.softmax(0)
    if kind == "maxrl":
        promised = sum(best_of(rewards, probability, m) / m for m in range(1, size))
    else:
        promised = best_of(rewards, probability, k)
    surrogate = 0.0
    for drawn in itertools.product(range(3), repeat=size):
        chosen = list(drawn)
        advantage = advantages(rewards[chosen][None], kind, k)[0]
        weight = probability[chosen].prod().detach()
        surrogate = surrogate + weight * (advantage * probability[chosen].log()).mean()
    (expected,) = torch.autograd.grad(promised, logits, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(surrogate, logits)[0], expected)


def test_decoupled_advantages_are_those_of_a_loop():
    """After TRL's normalize_then_sum: each reward by its own deviation, then the sum by that of the
    batch; a reward that is the same for a whole group adds nothing.
    """
    parts = torch.rand(3, 4, 2, generator=torch.Generator().manual_seed(1)).double()
    parts[1, :, 0] = 0.7
    weights = torch.tensor([0.25, 0.75], dtype=torch.float64)
    summed = torch.zeros(3, 4, dtype=torch.float64)
    for group, part in itertools.product(range(3), range(2)):
        values = parts[group, :, part]
        if values.max() > values.min():
            summed[group] += weights[part] * (values - values.mean()) / (values.std() + 1e-4)
    expected = (summed - summed.mean()) / (summed.std() + 1e-4)
    torch.testing.assert_close(
        decoupled_advantages(parts, weights, torch.ones(3, 4, 1) > 0), expected
    )


@pytest.mark.parametrize(
    ("name", "beta", "expected"),
    [
        ("grpo", 0.0, -0.045662),
        ("grpo", 0.04, -0.045222),
        ("dapo", 0.0, -0.070737),
        ("dapo", 0.04, -0.070297),
        ("bnpo", 0.0, -0.070737),
        ("bnpo", 0.04, -0.070297),
        ("dr_grpo", 0.0, -0.028737),
        ("dr_grpo", 0.04, -0.028558),
        ("sapo", 0.0, -0.116665),
    ],
)
def test_golden_losses(name, beta, expected):
    found, _ = loss(settings(name, beta))
    assert round(found.item(), 6) == expected


@pytest.mark.parametrize(
    ("name", "beta", "changes", "first", "second"),
    [
        ("gspo", 0.0, SEQUENCE, -0.000274, 0.093112),
        ("gspo", 0.04, SEQUENCE, 0.000166, 0.093553),
        ("gspo", 0.0, SEQUENCE | {"delta": 1.1}, -0.000274, 0.056068),
        ("cispo", 0.0, {}, -0.070442, 0.059616),
        ("cispo", 0.04, {}, -0.070003, 0.060056),
        ("cispo", 0.0, {"cispo_max": 1.2}, -0.079933, 0.078286),
        ("grpo", 0.0, {}, -0.045662, 0.100307),
        ("grpo", 0.0, {"delta": 1.5}, -0.045662, 0.085747),
        ("grpo", 0.0, {"dual_clip": 1.3}, -0.045662, 0.063727),
        ("dapo", 0.0, {"delta": 1.5}, -0.070737, 0.052784),
        ("dapo", 0.0, {"dual_clip": 1.3}, -0.070737, 0.037731),
        ("dapo", 0.0, {"dual_clip": 1.3, "delta": 1.5, "epsilon_high": 0.28}, -0.082525, 0.037731),
    ],
)
def test_golden_bounds(name, beta, changes, first, second):
    """Constants from a loop over tokens in float64, written apart from this code; for REWARDS and
    for BOUNDED.
    """
    for rewards, expected in ((REWARDS, first), (BOUNDED, second)):
        found, _ = loss(
            settings(name, beta, **changes), advantage=advantages(rewards, "group").flatten()
        )
        assert found.item() == pytest.approx(expected, abs=1e-6)


def test_golden_kl():
    means = {k: (kl(NEW, REF, k, 20.0) * MASK).sum() / 13 for k in ("k1", "k2", "k3")}
    assert {k: round(v.item(), 6) for k, v in means.items()} == {
        "k1": 0.023077,
        "k2": 0.011154,
        "k3": 0.010994,
    }


def test_kl_is_bounded():
    for estimator in ("k1", "k2", "k3"):
        assert torch.isfinite(
            kl(torch.tensor([0.0, -1e9]), torch.tensor([-1e9, 0.0]), estimator, 10.0)
        ).all()


def naive(config, new, old, advantage, mask, counts=COUNTS):
    """One token at a time, from the papers."""
    rows, tokens = len(new), int(mask.sum())
    total = 0.0
    usual = {"grpo": "completions", "gspo": "completions", "sapo": "completions"}
    usual |= {"dr_grpo": "constant"}
    how = usual.get(config.loss, "tokens") if config.aggregate == "auto" else config.aggregate
    for i in range(rows):
        length = int(mask[i].sum())
        sequence = torch.exp(sum(new[i, t] - old[i, t] for t in range(length)) / length)
        of_row = 0.0
        for t in range(length):
            ratio = sequence if config.loss == "gspo" else torch.exp(new[i, t] - old[i, t])
            a = advantage[i]
            clipped = ratio.clamp(1 - config.epsilon_low, 1 + config.epsilon_high)
            if config.loss == "cispo":
                token = -min(ratio.item(), config.cispo_max) * a * new[i, t]
            elif config.loss == "sapo":
                tau = 1.0 if a > 0 else 1.05
                token = -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * a
            elif config.loss == "dppo":
                moved = math.exp(new[i, t].item()) - math.exp(old[i, t].item())
                gone = moved > config.dppo_delta if a > 0 else moved < -config.dppo_delta
                token = -ratio * a * (not gone)
            else:
                free = ratio if config.delta is None else ratio.clamp(max=config.delta)
                token = -torch.minimum(free * a, clipped * a)
                if config.dual_clip is not None and a < 0:
                    token = torch.minimum(token, -config.dual_clip * a)
            of_row = of_row + token
        if how == "completions":
            total = total + of_row / length / rows
        elif how == "prompts":
            total = total + of_row / counts.of_prompt[i] / counts.prompts
        elif how == "constant":
            total = total + of_row / (rows * config.sampling.max_new_tokens)
        else:
            total = total + of_row / tokens
    return total


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"epsilon_high": 0.28},
        {"delta": 1.5},
        {"dual_clip": 1.2},
        {"delta": 1.3, "dual_clip": 3.0},
    ],
)
def test_equals_a_loop_over_tokens(name, changes):
    if name in ("cispo", "sapo", "dppo") and changes:
        pytest.skip("refused by the configuration")
    config = settings(name, **changes)
    generator = torch.Generator().manual_seed(0)
    new = (NEW + 0.5 * torch.randn(NEW.shape, generator=generator)).requires_grad_()
    advantage = torch.tensor([1.3, -0.8, 0.3, -0.8])
    fast, _ = loss(config, new=new, advantage=advantage)
    slow = naive(config, new, OLD, advantage, MASK)
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-6)
    (fast_grad,) = torch.autograd.grad(fast, new)
    (slow_grad,) = torch.autograd.grad(slow, new)
    torch.testing.assert_close(fast_grad, slow_grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["completions", "tokens", "prompts", "constant"])
def test_every_loss_goes_with_every_aggregate(how):
    """Two prompts of two completions each."""
    counts = replace(COUNTS, prompts=2, of_prompt=torch.tensor([7, 7, 6, 6]))
    advantage = torch.tensor([1.3, -0.8, 0.3, -0.8])
    for name in ("dapo", "cispo", "gspo"):
        config = settings(name, aggregate=how)
        expected = naive(config, NEW, OLD, advantage, MASK, counts)
        found, _ = loss(config, advantage=advantage, counts=counts)
        torch.testing.assert_close(found, torch.as_tensor(expected), rtol=1e-5, atol=1e-6)


def test_dppo_masks_what_has_moved_too_far_in_its_direction():
    new, old = (
        torch.tensor([[0.5, 0.5, 0.1, 0.1]]).log(),
        torch.tensor([[0.1, 0.4, 0.5, 0.2]]).log(),
    )
    mask = torch.ones(1, 4).bool()
    for advantage, kept in ((1.0, [0, 1, 1, 1]), (-1.0, [1, 1, 0, 1])):
        given = new.clone().requires_grad_()
        found, sums = loss(
            settings("dppo"), new=given, old=old, advantage=torch.tensor([advantage]), mask=mask
        )
        (grad,) = torch.autograd.grad(found, given)
        assert (grad != 0).int().tolist() == [kept]
        assert sums["clip_fraction"] == 1


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_has_the_gradient_of_the_divergence(estimator):
    """Summed over a whole distribution of three tokens, off policy; not without the ratio."""
    logits = torch.tensor([0.4, -0.3, 0.9], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([0.1, 0.2, 0.5], dtype=torch.float64).log_softmax(0)
    ref = torch.tensor([-0.2, 0.6, 0.1], dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    expected = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits, retain_graph=True)[0]
    for unbiased in (True, False):
        config = settings("dapo", 1.0, unbiased)
        config = replace(config, kl=replace(config.kl, estimator="k3"), epsilon_high=9.0)
        total = 0.0
        for token in range(3):  # each as often as the old policy draws it
            one = [x[token].view(1, 1) for x in (logp, old, ref)]
            kl_config = replace(config.kl, estimator=estimator if unbiased else "k3")
            value, _ = policy_loss(
                *(one[0], one[1], torch.zeros(1), torch.ones(1, 1).bool(), Counts(1, 1, 1)),
                replace(config, kl=kl_config),
                ref=one[2],
            )
            total = total + old[token].exp() * value
        (grad,) = torch.autograd.grad(total, logits, retain_graph=True)
        assert torch.allclose(grad, expected) == unbiased


def test_gspo_pulls_with_the_ratio_of_the_token():
    """TRL multiplies by the sequence's: its issue 6586."""
    config, without = settings("gspo", 0.04, True), settings("gspo", 0.0)
    ratio = torch.exp(NEW - OLD)
    pull = (kl(NEW, REF, "k3", 20.0) * ratio * MASK).sum(1) / MASK.sum(1)
    expected = loss(without)[0] + 0.04 * pull.mean()
    torch.testing.assert_close(loss(config)[0], expected)


def test_off_policy_mask_drops_bad_completions_that_have_become_unlikely():
    sampled = NEW.clone()
    sampled[:3] += 0.5  # these have lost half a nat per token since
    found = off_policy_mask(NEW, sampled, torch.tensor([1.0, -1, -1, -1]), MASK, 0.4)
    assert found.flatten().tolist() == [1, 0, 0, 1]
    found = off_policy_mask(NEW, sampled, torch.tensor([1.0, -1, -1, -1]), MASK, 0.6)
    assert found.flatten().tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("name", VARIANTS)
def test_micro_batches_add_up(name):
    config = settings(name, 0.04)
    advantage = advantages(REWARDS, "group").flatten()
    whole_new = NEW.clone().requires_grad_()
    whole, _ = loss(config, new=whole_new)
    parts_new = NEW.clone().requires_grad_()
    counts = replace(COUNTS, micro_batches=2)
    parts = sum(
        loss(config, parts_new[p], OLD[p], REF[p], advantage[p], MASK[p], counts)[0]
        for p in (slice(0, 2), slice(2, 4))
    )
    if name == "bnpo":  # a mean of means: not invariant, by definition
        without = settings(name)
        parts = sum(
            loss(without, NEW[p], OLD[p], REF[p], advantage[p], MASK[p], counts)[0]
            for p in (slice(0, 2), slice(2, 4))
        )
        assert round(parts.item(), 6) == -0.036998
        return
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(
        *(
            torch.autograd.grad(total, new)[0]
            for total, new in ((parts, parts_new), (whole, whole_new))
        )
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_padding_carries_no_loss(name):
    config = settings(name, 0.04)
    noisy = NEW.masked_fill(~MASK, -123.0).requires_grad_()
    found, _ = loss(config, new=noisy, old=OLD.masked_fill(~MASK, 55.0))
    torch.testing.assert_close(found, loss(config)[0])
    assert (torch.autograd.grad(found, noisy)[0][~MASK] == 0).all()


def test_a_row_without_loss_tokens_is_no_nan():
    mask = MASK.clone()
    mask[0] = False
    for name in VARIANTS:
        found, sums = loss(settings(name, 0.04), mask=mask)
        assert torch.isfinite(found)
        assert all(torch.isfinite(v) for v in sums.values())


def test_on_policy_gradient_is_the_policy_gradient():
    """Where the ratio is one, every variant's gradient is -A / count at each token."""
    new = NEW.clone().requires_grad_()
    advantage = torch.tensor([1.0, -1.0, 0.5, -0.5])
    found, _ = loss(settings("dapo"), new=new, old=NEW, advantage=advantage)
    (grad,) = torch.autograd.grad(found, new)
    torch.testing.assert_close(grad, (-advantage[:, None] / 13).expand_as(grad) * MASK)


def test_overlong_penalty():
    lengths = torch.tensor([1.0, 12, 13, 14, 16, 20])
    assert overlong_penalty(lengths, limit=16, buffer=4).tolist() == [0, 0, -0.25, -0.5, -1, -1]


MISTAKES = [
    ("algo.loss=drgrpo", "algo.loss", "drgrpo", "'dr_grpo'"),
    ("algo.sampling.temperature=0", "algo.sampling.temperature", 0, None),
    ("algo.samples_per_prompt=1", "algo.samples_per_prompt", 1, "at least 2"),
    ("algo.dual_clip=3", "algo.dual_clip", 3, "algo.num_iterations=1"),
    ("algo.delta=4", "algo.delta", 4, "algo.num_iterations=1"),
    ("algo.stop_at.approx_kl=0.1", "algo.stop_at.approx_kl", 0.1, "algo.num_iterations=1"),
    ("algo.kl.estimator=k2", "algo.kl.estimator", "k2", "Set algo.kl.beta"),
    ("algo.kl.where=reward", "algo.kl.where", "reward", "algo.kl.beta=0"),
    *(
        (
            f"algo.advantage=pass_at_k algo.num_iterations=2 {key}={value}",
            key,
            value,
            "algo.advantage=pass_at_k",
        )
        for key, value in (("algo.dual_clip", 3), ("algo.delta", 4), ("algo.off_policy_mask", 0.1))
    ),
    ("algo.kl.clamp=5", "algo.kl.clamp", 5, ["algo.kl.beta", "algo.kl.estimator=k3"]),
    (
        "algo.kl.clamp=5 algo.kl.beta=1 algo.kl.estimator=k2",
        "algo.kl.clamp",
        5,
        ["algo.kl.beta", "algo.kl.estimator=k3"],
    ),
    ("algo.cispo_max=2", "algo.cispo_max", 2, ["algo.loss=dapo", "Leave it out"]),
    ("algo.cispo_max=2 algo.loss=cispo", "algo.cispo_max", 2, "algo.num_iterations=1"),
    ("algo.epsilon_low=0.1", "algo.epsilon_low", 0.1, "algo.num_iterations=1"),
    (
        "algo.epsilon_high=0.28 algo.loss=cispo algo.num_iterations=2",
        "algo.epsilon_high",
        0.28,
        "algo.loss=cispo",
    ),
    ("algo.loss=dppo algo.dppo_delta=0.1", "algo.dppo_delta", 0.1, "algo.num_iterations=1"),
    ("algo.dppo_delta=0.1", "algo.dppo_delta", 0.1, "algo.loss=dapo"),
    ("algo.loss=bnpo algo.aggregate=tokens", "algo.aggregate", "tokens", "algo.loss=bnpo"),
    ("algo.pass_k=2", "algo.pass_k", 2, "algo.advantage=group"),
    (
        "algo.advantage=pass_at_k algo.pass_k=9",
        "algo.pass_k",
        9,
        "algo.samples_per_prompt=8",
    ),
    ("algo.advantage=maxrl algo.overlong_buffer=9", "algo.overlong_buffer", "maxrl", "Leave one"),
    (
        "algo.advantage=components algo.overlong_buffer=9",
        "algo.overlong_buffer",
        "components",
        "Leave one",
    ),
    ("algo.ratio_against=sampler algo.correction=icepop", "algo.correction", "icepop", "sampler"),
    (
        "algo.correction=off algo.correction_bounds=[0.5,2]",
        "algo.correction_bounds",
        None,
        "corrected",
    ),
    ("algo.correction_bounds=[2,1]", "algo.correction_bounds", "[2.0, 1.0]", "range around 1"),
    ("algo.correction_bounds=[1.1,2]", "algo.correction_bounds", "1.1", "range around 1"),
    ("algo.sampling.top_k=1", "algo.sampling.top_k", 1, None),
    ("algo.sampling.min_p=1", "algo.sampling.min_p", 1, None),
    ("algo.kl.unbiased=false", "algo.kl.unbiased", "false", "algo.kl.beta"),
    (
        "algo.kl.beta=1 algo.kl.estimator=k1 algo.kl.unbiased=false",
        ["algo.kl.estimator", "algo.kl.unbiased"],
        "k1",
        None,
    ),
    ("algo.stop_at.entropy_below=0", "algo.stop_at.entropy_below", 0, None),
    ("algo.overlong_buffer=80", "algo.overlong_buffer", 80, "algo.sampling.max_new_tokens=80"),
]


@pytest.mark.parametrize(COLUMNS, MISTAKES)
def test_mistakes_are_refused(overrides, key, value, try_next):
    refuses(f"algo=grpo {overrides}", key=key, value=value, try_next=try_next)


def test_overlap_is_refused_with_sharded_weights():
    run = compose(["algo=grpo", "algo.overlap=1", "opt=[fsdp]"])
    refuses(lambda: run.algo.check_run(run), key="algo.overlap", value="1", try_next="opt=fsdp")


def test_what_has_no_effect_on_samples_of_the_policy_itself():
    idle = ("correction_bounds=[0.5,2]", "off_policy_mask=0.1")
    for setting in idle:
        run = compose(["algo=grpo", f"algo.{setting}"])
        with pytest.raises(ConfigError, match="has no effect with engine=native"):
            check_native(run.algo, "off")
    stale = ["algo.off_policy_mask=0.1", "algo.overlap=1", "scoring.kind=threads"]
    check_native(compose(["algo=grpo", *stale]).algo, "off")


@pytest.mark.parametrize(
    "overrides",
    [
        "algo.kl.beta=0.1 algo.kl.estimator=k1 algo.kl.where=reward",
        "algo.kl.beta=0.1 algo.kl.clamp=5",
        "algo.num_iterations=2 algo.kl.clamp=5",  # of approx_kl
        "algo.num_iterations=2 algo.epsilon_low=0.1 algo.epsilon_high=0.28",
        "algo.num_iterations=2 algo.loss=cispo algo.cispo_max=2",
        "algo.loss=cispo algo.cispo_max=0.5",
        "algo.ratio_against=sampler algo.epsilon_low=0.1 algo.dual_clip=3 algo.delta=4",
        "algo.ratio_against=sampler algo.stop_at.approx_kl=0.1",
        "algo.ratio_against=sampler algo.loss=dppo algo.dppo_delta=0.1",
        "algo.cispo_max=5 algo.kl.estimator=k3 algo.epsilon_low=0.2",  # as they are anyway
    ],
)
def test_settings_that_have_an_effect(overrides):
    compose(["algo=grpo", *overrides.split()])


@pytest.mark.parametrize("name", ["grpo_chess", "grpo_dapo", "grpo_scalerl", "grpo_fp32"])
def test_experiments_compose(name):
    assert compose([f"experiment={name}"]).algo.name == "grpo"


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("bound", ["truncate", "mask"])
def test_weights_of_the_sampler_are_those_of_a_plain_loop(level, bound):
    sampled = OLD + 0.5 * torch.randn(OLD.shape, generator=torch.Generator().manual_seed(5))
    found = sampler_weights(OLD, sampled, MASK, f"{level}_{bound}", (0.8, 1.3))
    cut = 0
    for row, kept in enumerate(MASK.tolist()):
        ratios = [
            math.exp(OLD[row, i] - sampled[row, i]) if inside else 1.0
            for i, inside in enumerate(kept)
        ]
        for i, inside in enumerate(kept):
            if inside:
                ratio = math.prod(ratios) if level == "sequence" else ratios[i]
                cut += (ratio > 1.3) + 1j * (ratio < 0.8)
                inside = 0.8 <= ratio <= 1.3
                bounded = min(max(ratio, 0.8), 1.3) if bound == "truncate" else ratio * inside
                assert found[row, i].item() == pytest.approx(bounded, rel=1e-5)
    assert cut.real
    assert cut.imag


def test_icepop_masks_tokens_beyond_both_bounds():
    assert BOUNDS["icepop"] == (0.5, 5.0)
    found = sampler_weights(OLD, OLD - 1, MASK, "icepop", (0.5, 2.0))
    assert (found[MASK] == 0).all()


def test_equal_probabilities_have_weights_of_one():
    weight = sampler_weights(OLD, OLD, MASK, "sequence_mask")
    assert (weight == 1).all()
    config = settings("dapo", 0.0)
    advantage = advantages(REWARDS, "group").flatten()
    both = [
        policy_loss(NEW, OLD, advantage, MASK, COUNTS, config, weight=w)[0] for w in (None, weight)
    ]
    assert both[0].item() == both[1].item()
