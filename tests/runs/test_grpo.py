"""GRPO end to end: real runs of a model of a few thousand parameters."""

import copy
import dataclasses
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from common.checkpoint import checkpoint
from common.config import ConfigError, OptimizerConfig, ScoringConfig
from common.device import hardware
from common.memory.row_limit import RowLimit
from common.model import logprobs
from common.model.precision_copies import round_layers
from common.optim import Guards, optimizer_class, state_bytes
from common.parts import Parts
from common.sampling.native import Sampler
from common.scoring import Scorer
from common.system.signals import RunStopped
from common.task import Example
from common.tasks import ExampleOrder
from grpo.collect import (
    RETIRED,
    GroupScores,
    PromptQueue,
    check_overlap,
    describe,
    find_why_dead,
)
from grpo.config import StopAtConfig
from grpo.loss import advantages, decoupled_advantages
from grpo.policy import check_dense, cut_batches
from launch import compose, train
from tests.support import ROOT, SMALL_GRPO, events
from tests.support.commands import Begin, Launch
from tests.support.hanging import Deadly
from tests.support.models import small_model
from tests.support.refusals import refuses

LOSSES = ("dapo", "grpo")  # a mean over tokens, and one over completions


def weights(folder):
    return checkpoint.latest(folder / "checkpoints").tensors


def same(first, second, **tolerance):
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        if tolerance:
            torch.testing.assert_close(tensor, second[name], **tolerance)
        else:
            assert torch.equal(tensor, second[name]), name


def test_a_run_leaves_everything(launch: Launch, tmp_path):
    done = launch(*SMALL_GRPO, "hydra.run.dir=out")
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["algo"] == "grpo"
    assert result["steps"] == 4
    assert result["reward_evaluations"] >= 4 * 12
    keys = {
        "step",
        "seconds",
        "phase_seconds",
        "reward",
        "tokens_per_second",
        "peak_memory_gb",
        "loss",
        "grad_norm",
    }
    keys |= {
        "entropy",
        "clip_fraction",
        "approx_kl",
        "sampler_gap",
        "dead_groups",
        "truncated",
        "live_groups",
        "rounds",
    }
    logged = events(tmp_path / "out")
    assert [event["step"] for event in logged] == [1, 2, 3, 4]
    for event in logged:
        assert keys <= event.keys()
        assert event["sampler_gap"] < 1e-5  # sampler and trainer agree
        assert event["approx_kl"] == 0  # one pass: on policy
    assert "written to" in done.stdout
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()


@pytest.fixture(scope="module")
def untrained(cache, tmp_path_factory):
    """The weights of a run that does not move them."""
    folder = tmp_path_factory.mktemp("untrained")
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLUTCH_CACHE", str(cache))
        assert train(compose([*SMALL_GRPO, "algo.steps=1", "algo.lr=1e-30"]), folder).steps == 1
    return weights(folder)


# Each option in one of five runs; what a loss computes is in tests/oracles/test_grpo_loss.py.
BUNDLES = (
    "algo.loss=grpo algo.advantage=batch algo.kl.beta=0.1 algo.entropy_bonus=0.01"
    " algo.sampling.top_p=0.7",
    "algo.loss=dr_grpo algo.advantage=none algo.mask_truncated=true algo.overlong_buffer=4"
    " algo.lr_schedule.kind=cosine algo.lr_schedule.end=0.1 opt=[amp,checkpointing]",
    "algo.loss=gspo algo.epsilon_low=3e-4 algo.epsilon_high=4e-4 algo.num_iterations=2"
    " algo.optimizer.name=SGD algo.optimizer.kwargs={momentum:0.9} algo.lr=0.1"
    " scoring.kind=threads",
    "algo.loss=cispo algo.num_iterations=2 algo.kl.beta=0.1 algo.kl.estimator=k1"
    " algo.kl.where=reward",
    "algo.loss=bnpo algo.dual_clip=3 algo.delta=4 algo.epsilon_high=0.28 algo.num_iterations=2"
    " algo.resample_rounds=0",
    "algo.loss=sapo algo.advantage=scalerl algo.aggregate=prompts algo.num_iterations=2"
    " algo.kl.beta=0.1 algo.kl.estimator=k2 algo.off_policy_mask=0.1",
    "algo.minibatches=2 algo.epsilon_low=0.1 algo.delta=4 opt=[amp,checkpointing]"
    " algo.optimizer.name=SGD algo.lr=0.1 algo.warmup_steps=0",
    "algo.loss=dppo algo.advantage=pass_at_k algo.pass_k=2 algo.ratio_against=sampler"
    " algo.overlong_buffer=4",
    "algo.correction=icepop algo.advantage=rloo algo.retire_at=0.9 algo.overlap=1"
    " algo.ratio_against=trainer scoring.kind=threads",
)


@pytest.mark.parametrize("changes", [text.split() for text in BUNDLES], ids=lambda c: c[0][10:])
def test_every_option_trains(changes, untrained, tmp_path, in_cache):
    result = train(compose([*SMALL_GRPO, "algo.steps=2", *changes]), tmp_path / "out")
    assert result.steps == 2
    moved = [not torch.equal(t, untrained[n]) for n, t in weights(tmp_path / "out").items()]
    assert any(moved)
    logged = events(tmp_path / "out")
    assert all(torch.isfinite(torch.tensor([e["loss"], e["grad_norm"]])).all() for e in logged)
    if "algo.num_iterations=2" in changes:
        assert logged[0]["approx_kl"] == 0
        assert logged[1]["approx_kl"] > 0  # off the sampling policy
        assert logged[1]["sampler_gap"] < 1e-5, "of the policy that sampled"
    if "algo.minibatches=2" in changes:
        assert logged[0]["reward"] == logged[1]["reward"], "one rollout"
        assert logged[0]["approx_kl"] == 0 < logged[1]["approx_kl"], "of before the first update"
    if "algo.correction=icepop" in changes:
        assert [event["staleness"] for event in logged] == [0, 1]
        assert [event["sampler_weight"] == 1 for event in logged] == [True, False]
    if any("beta" in c for c in changes) and "algo.kl.where=reward" not in changes:
        assert logged[0]["kl"] == pytest.approx(0, abs=1e-6)
        assert logged[1]["kl"] > 0


@pytest.mark.parametrize("loss", [LOSSES[0], pytest.param(LOSSES[1], marks=pytest.mark.thorough)])
def test_micro_batches_and_checkpointing_change_nothing(loss, tmp_path, in_cache):
    """The gradient of a step has one exact denominator."""
    for name, changes in {
        "whole": ["algo.train_rows=12"],
        "split": ["algo.train_rows=3"],
        "recomputed": ["algo.train_rows=4", "opt=checkpointing"],
    }.items():
        run = compose([*SMALL_GRPO, "algo.steps=2", f"algo.loss={loss}", *changes])
        train(run, tmp_path / name)
    for name in ("split", "recomputed"):
        for one, whole in zip(events(tmp_path / name), events(tmp_path / "whole"), strict=True):
            # Adam forgives a gradient of another scale; its norm does not.
            assert one["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-4)
            assert one["loss"] == pytest.approx(whole["loss"], rel=1e-4, abs=1e-7)
        same(weights(tmp_path / name), weights(tmp_path / "whole"), rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param([], marks=pytest.mark.slow),
        ["algo.num_iterations=2", "algo.kl.beta=0.05", "algo.loss=grpo"],
        ["algo.overlap=1", "scoring.kind=threads", "algo.aggregate=prompts"],
        ["algo.minibatches=2", "algo.num_iterations=2", "algo.kl.beta=0.05", "algo.steps=8"],
    ],
    ids=["plain", "passes and kl", "overlap", "parts"],
)
def test_two_ranks_end_where_one_ends(launch: Launch, tmp_path, changes):
    launch(*SMALL_GRPO, *changes, "hydra.run.dir=one")
    launch(*SMALL_GRPO, *changes, "opt=[ddp]", "opt.ddp.ranks=2", "hydra.run.dir=two")
    same(weights(tmp_path / "one"), weights(tmp_path / "two"), rtol=1e-3, atol=2e-5)
    for first, second in zip(events(tmp_path / "one"), events(tmp_path / "two"), strict=True):
        assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-4)
    one, two = (json.loads((tmp_path / n / "result.json").read_text()) for n in ("one", "two"))
    assert two["world_size"] == 2
    assert one["generated_tokens"] == two["generated_tokens"]
    assert one["after"] == two["after"]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param([], marks=pytest.mark.slow),
        ["algo.num_iterations=2"],
        ["algo.overlap=1", "scoring.kind=threads", "algo.retire_at=0.9"],
        ["algo.overlap=1", "scoring.kind=threads", "algo.minibatches=2", "algo.epsilon_high=0.28"],
    ],
    ids=["plain", "passes", "overlap", "parts"],
)
@pytest.mark.faults
def test_killed_and_resumed_equals_unbroken(launch: Launch, begin: Begin, tmp_path, changes):
    arguments = [*SMALL_GRPO, "algo.steps=8", *changes, "checkpoint.every=2"]
    launch(*arguments, "hydra.run.dir=whole")
    process = begin(*arguments, "hydra.run.dir=broken")
    metrics = tmp_path / "broken" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 3):
        assert process.poll() is None, process.said()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    launch(*arguments, "hydra.run.dir=broken", "resume=auto")
    same(weights(tmp_path / "broken"), weights(tmp_path / "whole"))
    kept = (
        "step",
        "reward",
        "loss",
        "grad_norm",
        "entropy",
        "generated_tokens",
        "reward_evaluations",
        "approx_kl",
    )
    for mended, whole in zip(events(tmp_path / "broken"), events(tmp_path / "whole"), strict=True):
        assert {k: mended[k] for k in kept} == {k: whole[k] for k in kept}


class Fixed:
    """Every completion of an example earns the same: no group is alive."""

    name = "fixed"

    def __init__(self, value=0.0):
        self.value = value

    def examples(self, split):
        return [Example(id=i, question=f"q{i}", answer="") for i in range(20)]

    def prompt(self, example):
        return example.question

    def reward(self, example, completion):
        return self.value

    def metrics(self, examples, completions):
        return {"fixed": 0.0}


class Fading(Fixed):
    """Groups are alive in the first two steps, and dead from then on."""

    def __init__(self):
        self.calls = 0

    def rewards(self, examples, completions):
        self.calls += 1
        return [float(self.calls <= 2 and i % 2) for i in range(len(completions))]


@pytest.mark.parametrize(
    ("changes", "rounds"),
    [
        ([], 1),
        pytest.param(["algo.kl.beta=0.1", "algo.kl.where=reward"], 0, marks=pytest.mark.thorough),
        pytest.param(["algo.num_iterations=2"], 1, marks=pytest.mark.thorough),
    ],
)
def test_a_step_without_live_groups_is_no_step(changes, rounds, tmp_path, in_cache):
    """Momentum does not move the weights, and the log makes nothing up."""
    arguments = [*SMALL_GRPO, "algo.steps=6", "checkpoint.every=1", "checkpoint.keep=9", *changes]
    train(compose([*arguments, f"algo.resample_rounds={rounds}"]), tmp_path / "out", task=Fading())
    text = (tmp_path / "out" / "run.log").read_text()
    alive = 4 if "algo.num_iterations=2" in changes else 2
    dead = 3 * (rounds + 1)
    assert (
        f"step {alive + 1}: nothing to learn, so no optimizer step. Of {dead} groups in"
        f" {rounds + 1} rounds {dead} are" in text
    )
    assert text.count("so no optimizer step") == 1, "once"
    assert f"{6 - alive} of 6 steps had nothing to learn, so no update" in text
    saved = {
        step: checkpoint.load(tmp_path / "out" / "checkpoints" / f"step-{step:08d}")
        for step in (2, 4, 5, 6)
    }
    same(saved[alive].tensors, saved[5].tensors)
    same(saved[alive].tensors, saved[6].tensors)
    assert any(not torch.equal(t, saved[2].tensors[n]) for n, t in saved[6].tensors.items()) == (
        alive == 4
    )
    for event in events(tmp_path / "out"):
        made = event["step"] <= alive
        assert event["dead_groups"] == event["dead_all_wrong"] == (0 if made else 1)
        assert event["live_groups"] == (3 if made else 0)
        for key in ("loss", "grad_norm", "entropy", "clip_fraction", "sampler_gap", "lr"):
            assert (key in event) == made


def test_a_run_ends_when_all_prompts_have_retired(tmp_path, in_cache):
    run = compose([*SMALL_GRPO, "algo.steps=50", "algo.retire_at=0.9"])
    result = train(run, tmp_path / "out", task=Fixed(1.0))
    assert result.ended_by == RETIRED
    assert (result.next_command, "raise algo.retire_at" in result.verdict) == ("", True)
    assert events(tmp_path / "out")[-1]["retired"] == 1
    assert result.steps <= 10


class Several(Fixed):
    """Two components whose weighted sum is the same for all samples, and one without weight, which
    a task may leave out.
    """

    def __init__(self):
        self.components = {
            "even": lambda examples, completions: [float(i % 2) for i in range(len(completions))],
            "odd": lambda examples, completions: [(1 - i % 2) / 2 for i in range(len(completions))],
        }
        self.weights = {"even": 0.25, "none": 0.0, "odd": 0.5}


@pytest.mark.parametrize(("advantage", "live"), [("components", 3), ("group", 0)])
def test_components_are_told_apart_where_their_sum_is_not(advantage, live, tmp_path, in_cache):
    run = compose([*SMALL_GRPO, "algo.steps=2", f"algo.advantage={advantage}"])
    train(run, tmp_path / "out", task=Several())
    for event in events(tmp_path / "out"):
        assert event["live_groups"] == live
        assert ("loss" in event) == bool(live)


def test_components_need_a_reward_of_several(tmp_path, in_cache):
    run = compose([*SMALL_GRPO, "algo.advantage=components"])
    weighing, empty = Fixed(1.0), Fixed(1.0)
    weighing.weights = {"a": 1, "b": 2}  # of its own `reward`, which has no components
    empty.components = {}
    for task in (Fixed(1.0), weighing, empty):
        with pytest.raises(ConfigError, match=r"needs a reward of several.*task=fixed"):
            train(run, tmp_path / "out", task=task)
    plain = compose([*SMALL_GRPO, "algo.steps=1"])
    assert train(plain, tmp_path / "plain", task=empty).steps == 1


def test_samples_without_a_reward_are_no_visits():
    """A judge that fails for a while does not keep a prompt from retiring."""
    state = {"visits": {}}
    example = Example(3, "", "")
    prompts = PromptQueue(ExampleOrder([example], 0), retire_at=0.9)
    prompts.remember(example, [], state)
    assert state["visits"] == {}
    prompts.remember(example, [True, False], state)
    assert state["visits"] == {"3": (2, 1)}


def test_overlap_is_refused_where_vllm_sleeps_meanwhile():
    run = compose(["algo=grpo", "algo.overlap=1"])
    engine = SimpleNamespace(separate=True, sleeps=True)
    with pytest.raises(ConfigError, match=r"algo\.overlap=1.*enable_sleep_mode=true"):
        check_overlap(run.algo, engine, run.scoring)


def make_group(score, *, earned=None, finished=(), unscored=(), components=(), known=()):
    """The scores of a group whose samples ended by themselves, but for those that are given."""
    count = len(score)
    no, score = torch.zeros(count, dtype=torch.bool), torch.tensor(score, dtype=torch.float64)
    parts = torch.tensor(components or [[]] * count, dtype=torch.float64)
    lacks = no.clone()
    lacks[list(unscored)] = True
    return GroupScores(
        score=score,
        earned=score if earned is None else torch.tensor(earned, dtype=torch.float64),
        reward=score,
        length=torch.ones(count, dtype=torch.int64),
        finished=torch.tensor(finished) if len(finished) else ~no,
        repeating=no,
        gibberish=no,
        unscored=lacks,
        components=parts,
        known=torch.tensor(known, dtype=torch.bool) if known else torch.ones_like(parts).bool(),
    )


def settings(*changes):
    return compose(["algo=grpo", *changes]).algo


@pytest.mark.parametrize(
    ("score", "why"),
    [
        ([0, 0, 0], "all_wrong"),
        ([-1, -1, -1], "all_wrong"),
        ([1, 1, 1], "all_right"),
        ([0.5] * 3, "all_equal"),
        ([0, 1, 0], None),
    ],
)
def test_why_a_group_is_dead(score, why):
    assert find_why_dead(make_group(score), settings()) == why
    for cut, seen in ([False, False, False], "cut_off"), ([True, False, False], why):
        group = make_group(score, finished=cut)
        assert find_why_dead(group, settings()) == why, "cut-off completions carry loss"
        assert find_why_dead(group, settings("algo.mask_truncated=true")) == seen


def test_the_task_says_which_score_is_right():
    assert find_why_dead(make_group([0.5] * 3), settings(), right=0.5) == "all_right"


def test_completions_without_a_score_make_no_group_alive():
    assert find_why_dead(make_group([1, 0, 0], unscored=[0]), settings()) == "all_wrong"
    assert find_why_dead(make_group([1, 0, 0], unscored=[0, 1, 2]), settings()) == "unscored"


@pytest.mark.parametrize("right", range(9))
def test_groups_without_pass_at_k_gain_are_dead(right):
    """With 6 of 8 right, any 4 of them have a right one, whichever is left out."""
    changes = "algo.advantage=pass_at_k", "algo.pass_k=4"
    earned = [1.0] * right + [0.0] * (8 - right)
    gains = advantages(torch.tensor([earned]), "pass_at_k", 4)
    why = find_why_dead(make_group(earned), settings(*changes))
    assert (why is None) == bool(gains.any())
    assert why == (None if 0 < right < 6 else "all_right" if right else "all_wrong")
    # Only right ones can have a gain.
    cut = make_group(earned, finished=[False] * right + [True] * (8 - right))
    if 0 < right < 6:
        masked = settings(*changes, "algo.mask_truncated=true")
        assert find_why_dead(cut, masked) == "cut_off"
    few = make_group([1.0, 0.0, 0.0, 1.0], unscored=[0])
    assert find_why_dead(few, settings(*changes)) == "unscored"


@pytest.mark.parametrize("score", [0.0, 0.5, 1.0])
def test_penalties_of_length_make_no_group_alive(score):
    cfg = settings("algo.overlong_buffer=4")
    group = make_group([score] * 3, earned=[score, score - 1, score - 0.5])
    why = {0.0: "all_wrong", 0.5: "all_equal", 1.0: "all_right"}[score]
    assert find_why_dead(group, cfg) == why
    group = make_group([score, 0.7, score], earned=[score, score - 1, score])
    assert find_why_dead(group, cfg) is None


@pytest.mark.parametrize(
    ("components", "known"),
    [
        ([[1, 0], [1, 0], [0.5, 0]], [[1, 0], [1, 0], [0, 1]]),  # each is the same where it is
        ([[1, 0], [0, 0], [0, 0]], [[1, 1], [0, 1], [0, 1]]),
        ([[1, 0], [0, 0], [0, 0]], [[1, 1], [1, 1], [1, 1]]),
        ([[1, 1], [0, 0.5], [0.5, 0.5]], [[0, 1], [0, 1], [0, 1]]),
    ],
)
def test_components_are_compared_among_the_samples_that_have_them(components, known):
    """A group without an advantage is dead, although rewards differ."""
    group = make_group([1.0, 1.0, 0.5], components=components, known=known)
    gains = decoupled_advantages(
        group.components[None], torch.tensor([1.0, 2.0]), group.known[None]
    )
    why = find_why_dead(group, settings("algo.advantage=components"), components=True)
    assert (why is None) == bool(gains.any())


def test_unscored_groups_are_not_in_the_logged_mean():
    groups = [make_group([0.5, 1.0]), make_group([0.0, 0.0], unscored=[0, 1])]
    numbers = describe(GroupScores.stack(groups), Counter())
    assert (numbers["reward"], numbers["unscored"]) == (0.75, 0.5)


def test_scores_of_ranks_are_gathered_in_the_order_of_prompts():
    """Three prompts on two ranks, and a third rank without one."""
    one, two, three = (make_group([float(n), 0.0]) for n in (1, 2, 3))
    shares = [(GroupScores.stack([one, three]), [0, 2]), (GroupScores.stack([two]), [1])]
    context = SimpleNamespace(gather_objects=lambda mine: [*shares, mine])
    whole = GroupScores.gather([], [], context)
    assert whole.score[:, 0].tolist() == [1, 2, 3]
    assert whole.select(whole.score[:, 0] > 1).score.shape == (2, 2)


@pytest.mark.thorough
def test_completions_without_loss_are_nothing_to_learn_from(tmp_path, in_cache):
    """Rewards differ, but max_new_tokens cuts every completion off."""
    changes = [
        "algo.mask_truncated=true",
        "algo.sampling.max_new_tokens=1",
        "algo.steps=1",
        "algo.resample_rounds=1",
    ]
    train(compose([*SMALL_GRPO, *changes]), tmp_path / "out", task=Fading())
    (event,) = events(tmp_path / "out")
    assert event["dead_cut_off"] == 1
    assert "loss" not in event
    assert (
        "6 cut off as a whole (too long, or in a loop)"
        in (tmp_path / "out" / "run.log").read_text()
    )


@pytest.mark.thorough
def test_a_checkpoint_is_a_phase_of_the_next_step(tmp_path, in_cache):
    train(compose([*SMALL_GRPO, "algo.steps=3", "checkpoint.every=2"]), tmp_path / "out")
    assert ["checkpoint" in event["phase_seconds"] for event in events(tmp_path / "out")] == [
        False,
        False,
        True,
    ]


@pytest.mark.thorough
def test_a_run_cut_between_passes_cannot_resume(tmp_path, in_cache):
    """The unbroken run would have used the rollout again; it is in no checkpoint."""
    arguments = [*SMALL_GRPO, "algo.num_iterations=2"]
    train(compose([*arguments, "algo.steps=3"]), tmp_path / "out")
    train(
        compose([*arguments, "algo.steps=3", "resume=auto"]), tmp_path / "out"
    )  # all done: nothing to go on with
    refuses(
        lambda: train(compose([*arguments, "algo.steps=6", "resume=auto"]), tmp_path / "out"),
        key="algo.num_iterations",
        value="2",
    )
    train(compose([*arguments, "algo.steps=2"]), tmp_path / "even")
    train(compose([*arguments, "algo.steps=4", "resume=auto"]), tmp_path / "even")
    train(compose([*arguments, "algo.steps=4"]), tmp_path / "whole")
    same(weights(tmp_path / "even"), weights(tmp_path / "whole"))


@pytest.mark.faults
def test_a_reward_that_is_not_finite_stops_with_the_row(tmp_path, in_cache):
    with pytest.raises(
        RunStopped,
        match=r"step 1: NaN or infinity in a reward or logits on example \d+, \d+, \d+\. The rows",
    ):
        train(compose(SMALL_GRPO), tmp_path / "out", task=Fixed(float("nan")))
    assert '"reward": "nan"' in (tmp_path / "out" / "not_finite.jsonl").read_text()


@pytest.mark.faults
def test_fp16_that_overflows_for_good_stops():
    """Sequences as a GradScaler gives them, without a device that has one."""
    seen = {
        "loss": 0.1,
        "grad_norm": 1.0,
        "approx_kl": 0.0,
        "entropy": 1.0,
        "loss_scale": 65536.0,
        "overflow": 0.0,
    }
    overflow = seen | {"overflow": 1.0, "grad_norm": float("inf")}

    guards = Guards(scaled=True)
    found = [guards.trouble(overflow | {"loss_scale": 65536.0 / 2**step}) for step in range(18)]
    assert found[:17] == [None] * 17  # at 1 it may still recover
    assert found[17] is not None
    assert found[17].startswith("fp16 gradients overflow for good: 18 in a row, loss scale 0.5.")

    guards = Guards(scaled=True)
    for step in range(100):  # now and then is how a GradScaler works
        assert guards.trouble(overflow if step % 20 else seen) is None
    guards = Guards(scaled=True)
    found = [guards.trouble(overflow | {"loss_scale": 2.0**40}) for _ in range(20)]
    assert [text is None for text in found] == [True] * 19 + [False]

    without = {k: v for k, v in overflow.items() if k not in ("loss_scale", "overflow")}
    assert "gradient norm inf" in (Guards(scaled=False).not_finite(without) or "")
    assert Guards(scaled=True).not_finite(overflow) is None
    assert "loss nan" in (Guards(scaled=True).not_finite(seen | {"loss": float("nan")}) or "")
    stop_at = StopAtConfig(kl=None, approx_kl=0.1, entropy_below=0.5)
    assert stop_at.crossed(seen) is None
    assert "algo.stop_at.approx_kl=0.1" in (stop_at.crossed(seen | {"approx_kl": 0.2}) or "")
    assert "algo.stop_at.entropy_below=0.5" in (stop_at.crossed(seen | {"entropy": 0.2}) or "")


class Slow(Fixed):
    def reward(self, example, completion):
        time.sleep(5)
        return 0.0


@pytest.mark.faults
def test_a_reward_that_hangs_is_named(tmp_path, in_cache):
    run = compose(
        [*SMALL_GRPO, "scoring.kind=threads", "scoring.timeout_seconds=0.2", "scoring.workers=16"]
    )
    with pytest.raises(
        ConfigError,
        match=r"scoring took longer than scoring.timeout_seconds=0.2, at or after example \d+",
    ):
        train(run, tmp_path / "out", task=Slow())


@pytest.mark.thorough
@pytest.mark.faults
def test_a_reward_that_never_ends_does_not_hold_the_process(tmp_path, cache):
    """The error is out, and Python exits, though a worker is still at it."""
    script = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.support.hanging import Endless
from launch import compose, train
if __name__ == "__main__":
    for kind in ("processes", "threads"):
        more = [f"scoring.kind={{kind}}", "scoring.timeout_seconds=1", "scoring.workers=2"]
        run = compose([*{SMALL_GRPO!r}, *more])
        try:
            train(run, {str(tmp_path)!r} + "/" + kind, task=Endless())
        except ValueError as error:
            print(error)
"""
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        env=os.environ | {"CLUTCH_CACHE": str(cache)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.count("scoring took longer than scoring.timeout_seconds=1, at or after example")
        == 2
    )


@pytest.mark.faults
def test_a_reward_that_ends_its_process_is_told_at_once():
    task = Deadly()
    scorer = Scorer(task, ScoringConfig(kind="processes", workers=2, timeout_seconds=100))
    rows = task.examples("train")
    assert scorer.submit(rows[:4], [""] * 4).result().rewards == [0.0] * 4
    refuses(lambda: scorer.submit(rows[4:8], [""] * 4).result(), key="scoring.kind", value="serial")
    scorer.close()


class Held(Fixed):
    """A task that no other process can be sent."""

    def __init__(self):
        super().__init__()
        self.score = lambda text: 0.0


def test_a_task_that_cannot_be_sent_is_named(monkeypatch):
    processes = ScoringConfig(kind="processes", workers=1, timeout_seconds=100)
    with pytest.raises(ConfigError, match=r"^fixed cannot be sent: .*Use scoring.kind=threads"):
        Scorer(Held(), processes)
    # A class of a notebook is one that the other process does not have.
    monkeypatch.setattr(Fixed, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Fixed", Fixed, raising=False)
    scorer = Scorer(Fixed(), processes)
    with pytest.raises(ConfigError, match=r"arrived in no process.*define it in a module"):
        scorer.submit(Fixed().examples("train")[:2], ["", ""]).result()
    scorer.close()


@pytest.mark.faults
def test_out_of_memory_halves_the_rows(tmp_path, in_cache, monkeypatch):
    train(
        compose([*SMALL_GRPO, "algo.rollout_rows=6", "algo.train_rows=4"]),
        tmp_path / "smaller",
    )
    generate, calls = Sampler.generate_once, []

    def once(self, requests, sampling, rows, watch):
        calls.append(rows)
        if rows > 6:
            raise torch.OutOfMemoryError("injected")
        return generate(self, requests, sampling, rows, watch)

    monkeypatch.setattr(Sampler, "generate_once", once)
    monkeypatch.setattr(Parts, "evaluate", lambda *a, **k: _nothing())
    train(
        compose([*SMALL_GRPO, "algo.rollout_rows=12", "algo.train_rows=4"]),
        tmp_path / "halved",
    )
    assert 12 in calls
    same(weights(tmp_path / "halved"), weights(tmp_path / "smaller"), rtol=1e-3, atol=2e-5)
    assert RowLimit("algo.train_rows", 8).run(lambda rows: rows) == 8


@pytest.mark.thorough
def test_rows_are_fitted_to_the_memory(tmp_path, in_cache, monkeypatch):
    arguments = [
        *SMALL_GRPO,
        "algo.steps=2",
        "algo.rollout_rows=12",
        "algo.train_rows=12",
        "model.tiny.layers=8",
    ]
    train(compose(arguments), tmp_path / "roomy")
    find = hardware.find
    monkeypatch.setattr(
        hardware, "find", lambda *a: dataclasses.replace(find(*a), memory_gb=0.0030)
    )
    train(compose(arguments), tmp_path / "tight")
    train(compose([*arguments, "opt=checkpointing"]), tmp_path / "recomputed")
    same(weights(tmp_path / "tight"), weights(tmp_path / "roomy"), rtol=1e-3, atol=2e-5)
    fitted = {}
    for name in ("roomy", "tight", "recomputed"):
        text = (tmp_path / name / "run.log").read_text()
        found = re.findall(r"algo\.(\w+)=12 does not fit 0 GB; going on with (\d+)", text)
        assert len(found) == len(dict(found))  # told once
        fitted[name] = {key: int(rows) for key, rows in found}
    assert fitted["roomy"] == {}
    assert set(fitted["tight"]) == {"rollout_rows", "train_rows"}
    assert 1 <= fitted["tight"]["train_rows"] < fitted["recomputed"].get("train_rows", 12)


@pytest.mark.parametrize(
    "more", [["model.adapter.rank=16", "opt=[amp]"], pytest.param([], marks=pytest.mark.thorough)]
)
def test_adam_8bit_saves_memory_and_resumes_exactly(more, tmp_path, in_cache):
    pytest.importorskip("bitsandbytes")
    settings = [*SMALL_GRPO, "algo.lr=1e-2", "algo.resample_rounds=0", "evaluate.every=0", *more]
    small = [*settings, "algo.optimizer.name=AdamW8bit"]
    train(compose([*small]), tmp_path / "whole")
    train(compose([*small, "algo.steps=2"]), tmp_path / "parts")
    train(compose([*small, "resume=auto"]), tmp_path / "parts")
    found = [trained(tmp_path / name) for name in ("whole", "parts")]
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())
    train(compose([*settings]), tmp_path / "plain")
    taken = [events(tmp_path / name)[0]["state_memory_gb"] for name in ("whole", "plain")]
    assert taken[0] < taken[1]  # matrices of less than 4,096 numbers keep 32 bits


def trained(folder):
    found = [*folder.glob("model/*.safetensors"), *folder.glob("adapter/*.safetensors")]
    return load_file(found[0])


def test_without_bitsandbytes_the_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    config = OptimizerConfig(name="AdamW8bit", kwargs={})
    with pytest.raises(ConfigError, match=r"AdamW8bit needs a package: pip install -e '\.\[adam8"):
        optimizer_class(config)
    assert state_bytes(config) < 2.1 < state_bytes(OptimizerConfig(name="AdamW", kwargs={}))


@pytest.mark.parametrize("tied", [True, False])
def test_a_half_precision_reference_equals_float32(tied):
    """Where autocast rounds the same weights; the embedding alone stays float32."""
    plain = small_model("qwen2" if tied else "llama")
    logprobs.prepare(plain)
    rounded = copy.deepcopy(plain)
    round_layers(rounded, torch.bfloat16)
    laid = logprobs.group([[5, 6, 7], [8, 9]], [[[3, 4, 5]] * 2] * 2, torch.device("cpu"))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted, found = (logprobs.token_logprobs(model, laid, 1.0)[0] for model in (plain, rounded))
    assert torch.equal(found, wanted)
    wide = {name for name, p in rounded.named_parameters() if p.ndim == 2 and p.itemsize == 4}
    assert wide == {"model.embed_tokens.weight"}
    assert sum(p.nbytes for p in rounded.parameters()) < 0.8 * sum(
        p.nbytes for p in plain.parameters()
    )


@pytest.mark.thorough
@pytest.mark.faults
def test_out_of_memory_in_the_reference_pass_halves_too(tmp_path, in_cache, monkeypatch):
    arguments = [*SMALL_GRPO, "algo.steps=2", "algo.kl.beta=0.1"]
    train(compose([*arguments, "algo.train_rows=12"]), tmp_path / "roomy")
    whole, refused = logprobs.token_logprobs, []

    def cramped(model, groups, *how):
        if not torch.is_grad_enabled() and len(groups.mask) > 3:
            refused.append(len(groups.mask))
            raise torch.OutOfMemoryError("injected")
        return whole(model, groups, *how)

    monkeypatch.setattr(logprobs, "find_gap", lambda model: None)  # it looks at four rows
    monkeypatch.setattr(logprobs, "token_logprobs", cramped)
    train(compose([*arguments, "algo.train_rows=12"]), tmp_path / "cramped")
    assert refused == [12, 4]  # 12, 6 (a group of 4 at a time), 3, and from then on 3
    for one, other in zip(events(tmp_path / "cramped"), events(tmp_path / "roomy"), strict=True):
        assert one["kl"] == pytest.approx(other["kl"], abs=1e-6)


class Cramped(Fixed):
    """The device of rank 1 holds two completions in a training forward."""

    def examples(self, split):
        whole = logprobs.token_logprobs

        def cramped(model, groups, *how):
            if torch.is_grad_enabled() and len(groups.mask) > 2:
                raise torch.OutOfMemoryError("injected")
            return whole(model, groups, *how)

        if torch.distributed.get_rank() == 1:
            logprobs.token_logprobs = cramped
        return super().examples(split)

    def reward(self, example, completion):
        return len(completion) % 7 / 7 + ("1" in completion) / 7


class Roomy(Cramped):
    def examples(self, split):
        return Fixed.examples(self, split)


@pytest.mark.slow
def test_ranks_cut_micro_batches_alike(tmp_path, in_cache):
    """bnpo is a mean over the micro-batches of all ranks, though memory runs out on one alone."""
    arguments = [
        *SMALL_GRPO,
        "algo.steps=2",
        "algo.loss=bnpo",
        "opt=[ddp]",
        "opt.ddp.ranks=2",
        "algo.resample_rounds=0",
    ]
    train(compose([*arguments, "algo.train_rows=4"]), tmp_path / "cramped", task=Cramped())
    train(compose([*arguments, "algo.train_rows=2"]), tmp_path / "small", task=Roomy())
    same(weights(tmp_path / "cramped"), weights(tmp_path / "small"))
    for one, other in zip(events(tmp_path / "cramped"), events(tmp_path / "small"), strict=True):
        assert one["grad_norm"] == other["grad_norm"] > 0
        assert one["approx_kl"] == 0


class Wordy(Fixed):
    """Two prompts that are too long, one of them held out."""

    def prompt(self, example):
        return "x" * 300 if example.id in (7, 11) else "x"

    def examples(self, split):
        rows = super().examples(split)
        return rows[:10] if split == "train" else rows[10:]


@pytest.mark.thorough
def test_too_long_prompts_are_found_before_training(tmp_path, in_cache):
    with pytest.raises(ConfigError) as caught:
        train(compose([*SMALL_GRPO, "evaluate.examples=10"]), tmp_path / "out", task=Wordy())
    text = str(caught.value)
    assert text.startswith(
        "2 of 20 prompts do not fit the model's context of 256 tokens with"
        " algo.sampling.max_new_tokens=8"
    )
    assert (
        "the first is train example 7 with 300 tokens, the longest has 300. Shorten the prompts"
        in text
    )
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def _nothing():
    from common.evaluation import Evaluation

    return Evaluation({"bleu": 0.0}, [""] * 4, 0)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_mixture_of_experts_is_refused(kind):
    refuses(lambda: check_dense(AutoConfig.for_model(kind)), key="algo", value="grpo")
    check_dense(AutoConfig.for_model("qwen3"))
    dense = {"layers_block_type": ["linear_attention", "full_attention", "mlp"]}
    check_dense(AutoConfig.for_model("nemotron_h", **dense))


def test_micro_batches_cover_every_completion_once():
    lengths = torch.tensor([(3, 9, 1), (2, 2, 2), (7, 7, 7), (1, 1, 8), (4, 4, 4)])
    for rows in (1, 2, 3, 6, 7, 100):
        for groups in (5, 2, 0):
            batches = cut_batches(lengths[:groups], rows)
            assert len(batches) == len(cut_batches(torch.zeros(groups, 3), rows)), "for any lengths"
            found = sorted(
                (i, row) for batch in batches for i, part in batch for row in range(3)[part]
            )
            assert found == [(i, row) for i in range(groups) for row in range(3)]
            assert all(
                sum(len(range(3)[part]) for _, part in batch) <= max(rows, 1) for batch in batches
            )


def test_it_learns(launch: Launch, tmp_path):
    """A small model that knows two answers is taught which one is wanted."""
    taught = [
        "algo=grpo",
        "task=translate",
        "hardware=cpu",
        "model.tiny.hidden_size=48",
        "model.tiny.layers=2",
        "model.tiny.heads=2",
        "model.tiny.intermediate_size=128",
        "model.tiny.pretrain_steps=150",
        "model.tiny.pretrain_rows=32",
        "algo.sampling.max_new_tokens=40",
        "algo.steps=12",
        "algo.lr=1e-3",
        "evaluate.examples=48",
        "hydra.run.dir=out",
    ]
    launch(*taught)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["metrics"]["after"]["chrf"] > result["metrics"]["before"]["chrf"] + 5
    logged = events(tmp_path / "out")
    assert logged[-1]["reward"] > logged[0]["reward"] + 0.05
