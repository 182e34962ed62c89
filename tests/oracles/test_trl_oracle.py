"""The losses beside TRL 1.16.0's own, live (pip install -e .[peers]). Its private API: the version
is pinned.
"""

import warnings
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    trl = pytest.importorskip("trl", reason="TRL is not installed: pip install -e .[peers]")
    if trl.__version__ != "1.16.0":
        pytest.skip(f"the oracle is TRL 1.16.0, here is {trl.__version__}", allow_module_level=True)
    from trl import GRPOTrainer

from grpo.loss import Counts, advantages, off_policy_mask, policy_loss, sampler_weights
from tests.support.losses import BOUNDED, MASK, NEW, OLD, REF, REWARDS, SEQUENCE, settings


def theirs(new, advantage, loss, beta, config, weight=None):
    """TRL's loss of one optimizer batch without accumulation."""
    level, kind = ("sequence", "grpo") if loss == "gspo" else ("token", loss)
    identity = SimpleNamespace(
        num_processes=1,
        sync_gradients=True,
        reduce=lambda x, **_: x,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
    )
    stub = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros_like(new), None),
        loss_type=kind,
        importance_sampling_level=level,
        beta=beta,
        epsilon_low=config.epsilon_low,
        epsilon_high=config.cispo_max if loss == "cispo" else config.epsilon_high,
        max_completion_length=8,
        args=SimpleNamespace(
            delta=config.delta,
            use_bias_correction_kl=config.kl.unbiased,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
            steps_per_generation=1,
        ),
        current_gradient_accumulation_steps=1,
        accelerator=identity,
        model=SimpleNamespace(training=True),
        use_vllm=weight is not None,
        vllm_importance_sampling_correction=weight is not None,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        _entropy_bonus_enabled=False,
        aux_loss_enabled=False,
        tools=None,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
    )
    inputs = {
        "prompt_ids": torch.zeros(4, 1, dtype=torch.long),
        "prompt_mask": torch.ones(4, 1, dtype=torch.long),
        "completion_ids": torch.zeros(4, 4, dtype=torch.long),
        "completion_mask": MASK.long(),
        "advantages": advantage,
        "old_per_token_logps": OLD,
        "ref_per_token_logps": REF,
        "num_items_in_batch": MASK.sum(),
        "importance_sampling_ratio": weight,
    }
    return GRPOTrainer._compute_loss(stub, None, inputs)


CASES = [
    *((loss, {}) for loss in ("grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo", "sapo")),
    *((loss, {"epsilon_high": 0.28}) for loss in ("grpo", "dr_grpo", "dapo", "bnpo", "gspo")),
    *((loss, {"delta": 1.35}) for loss in ("grpo", "dr_grpo", "dapo", "bnpo", "gspo")),
    ("dapo", {"delta": 1.5, "epsilon_high": 0.28}),
    ("gspo", SEQUENCE),
    ("gspo", SEQUENCE | {"delta": 1.1}),
    ("cispo", {"cispo_max": 1.2}),
    ("cispo", {"cispo_max": 2.0}),
]


@pytest.mark.parametrize(("loss", "changes"), CASES, ids=str)
@pytest.mark.parametrize(("beta", "unbiased"), [(0.0, False), (0.04, False), (0.04, True)])
@pytest.mark.parametrize("rewards", [REWARDS, BOUNDED], ids=["rewards", "bounded"])
def test_equals_trl(loss, changes, beta, unbiased, rewards):
    if unbiased and loss == "gspo":
        pytest.skip("TRL pulls with the sequence's ratio: its issue 6586")
    generator = torch.Generator().manual_seed(3)
    advantage = advantages(rewards, "group").flatten()
    for noise in (0.0, 0.4):
        start = (NEW + noise * torch.randn(NEW.shape, generator=generator)) * MASK
        ours_new, theirs_new = start.clone().requires_grad_(), start.clone().requires_grad_()
        config = settings(loss, beta, unbiased, **changes)
        ours, _ = policy_loss(
            ours_new, OLD, advantage, MASK, Counts(4, 13, 1), config, ref=REF if beta else None
        )
        expected = theirs(theirs_new, advantage, loss, beta, config)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(
            torch.autograd.grad(ours, ours_new)[0],
            torch.autograd.grad(expected, theirs_new)[0],
            rtol=1e-4,
            atol=1e-6,
        )


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo"])
@pytest.mark.parametrize("kind", ["token_truncate", "sequence_mask"])
def test_weights_of_the_sampler_equal_trl(loss, kind):
    """TRL has a weight per sequence in [B, 1], where it is the same at all of its tokens here."""
    advantage = advantages(REWARDS, "group").flatten()
    sampled = OLD + 0.3 * torch.randn(OLD.shape, generator=torch.Generator().manual_seed(4))
    weight = sampler_weights(OLD, sampled, MASK, kind, (0.0, 1.2))
    assert (weight != 1).any()
    config = settings(loss, 0.04)
    counts = Counts(4, 13, 1)
    ours, _ = policy_loss(NEW, OLD, advantage, MASK, counts, config, ref=REF, weight=weight)
    given = weight if kind.startswith("token") else weight[:, :1]
    expected = theirs(NEW, advantage, loss, 0.04, config, given)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bound", [0.02, 0.1, 0.3])
def test_off_policy_mask_equals_trl(bound):
    sampled = OLD + 0.3 * torch.randn(OLD.shape, generator=torch.Generator().manual_seed(4))
    advantage = advantages(REWARDS, "group").flatten()
    theirs_kept = GRPOTrainer.get_off_policy_mask(advantage[:, None], NEW, sampled, MASK, bound)
    assert torch.equal(off_policy_mask(NEW, sampled, advantage, MASK, bound), theirs_kept.float())
