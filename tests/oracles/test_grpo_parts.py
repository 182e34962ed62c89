"""Several optimizer steps per rollout, beside a plain loop over parts and rows."""

import copy
import itertools

import pytest
import torch

from common.device import hardware
from common.distributed.context import Context
from common.run.nonfinite import NonFiniteHandler
from common.run.state import RunState
from common.run.timer import Timer
from common.session import Step
from common.task import Example
from grpo.loss import policy_loss
from grpo.train import prepare
from launch import compose
from tests.support import SMALL_GRPO
from tests.support.refusals import refuses

CLIP, BETA = (0.01, 0.02), 0.1
SETTINGS = [
    *SMALL_GRPO,
    "algo.prompts_per_step=5",
    "algo.minibatches=3",
    "algo.num_iterations=2",
    "algo.resample_rounds=0",
    "algo.optimizer.name=SGD",
    "algo.lr=2.0",
    "algo.grad_clip=0.5",
    "algo.warmup_steps=0",
    "algo.lr_schedule.kind=constant",
    "algo.lr_schedule.end=1",
    "algo.train_rows=3",  # does not divide a group
    f"algo.epsilon_low={CLIP[0]}",
    f"algo.epsilon_high={CLIP[1]}",
    f"algo.kl.beta={BETA}",
    "algo.kl.unbiased=false",
]


class Lengths:
    """Longer completions earn more, so that nearly all groups learn."""

    name = "lengths"

    def __init__(self, dead=()):
        self.rows = [Example(id=i, question=f"q{i}", answer="") for i in range(20)]
        self.dead = dead

    def examples(self, split):
        return self.rows

    def prompt(self, example):
        return example.question

    def reward(self, example, completion):
        return 0.5 if example.id in self.dead else (sum(map(ord, completion)) % 7) / 6

    def metrics(self, examples, completions):
        return {"none": 0.0}


@pytest.fixture
def parts(in_cache, tmp_path):
    """A policy, its rollout and the step that learns from it."""
    run, opened = compose(SETTINGS), []

    def begin(task):
        context = Context(0, 1, hardware.find(run.hardware), tmp_path)
        policy, collector = prepare(run, context, task)
        opened.append(policy.parts)
        state = RunState(own={"cursor": 0, "visits": {}})
        step = Step(0, 0.0, state, Timer(), NonFiniteHandler(run, context, torch.float32))
        batch = collector.collect(step).batch
        assert batch is not None
        return policy, batch, step

    yield begin
    for parts in opened:
        parts.close()


def row_logprobs(model, prompt, completion):
    tokens = torch.tensor([[*prompt, *completion.tolist()]])
    logits = model(tokens).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, completion[:, None])[:, 0]


def learn_in_a_loop(policy, batch, advantage, spans):
    """PPO's clipped loss with k3 as a penalty, a mean over the tokens of a part."""
    model, reference = copy.deepcopy(policy.model), policy.parts.lm.reference
    sgd = torch.optim.SGD(model.parameters(), lr=policy.cfg.lr)
    rows = []  # of each group: prompt, completion, advantage
    for (rollout, at), group in zip(batch.sources, range(len(batch.sources)), strict=True):
        prompt = rollout.requests.prompts[at]
        for row in range(batch.size):
            place = group * batch.size + row
            completion = batch.tokens[place, : batch.lengths[place]]
            rows.append((group, prompt, completion, float(advantage[group, row])))
    with torch.no_grad():
        old = [row_logprobs(model, prompt, completion) for _, prompt, completion, _ in rows]
        far = [row_logprobs(reference, prompt, completion) for _, prompt, completion, _ in rows]
    for span in [*spans, *spans]:
        sgd.zero_grad()
        total, tokens = 0.0, 0
        for (group, prompt, completion, worth), before, ref in zip(rows, old, far, strict=True):
            if group not in span:
                continue
            for new, b, r in zip(row_logprobs(model, prompt, completion), before, ref, strict=True):
                ratio = (new - b).exp()
                bounded = min(ratio * worth, ratio.clamp(1 - CLIP[0], 1 + CLIP[1]) * worth)
                total = total - bounded + BETA * ((r - new).exp() - (r - new) - 1)
                tokens += 1
        (total / tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), policy.cfg.grad_clip)
        sgd.step()
    return model


def learn(policy, batch, advantage, step):
    """As grpo.train does it."""
    cut = batch.cut(policy.cfg.minibatches)
    policy.look_back(cut, step)
    numbers = [policy.step(one, advantage, policy_loss, step) for one in [*cut, *cut]]
    return cut, numbers


def test_parts_equal_a_plain_loop(parts):
    policy, batch, step = parts(Lengths())
    advantage = batch.advantages(policy.cfg)
    spans = [range(1), range(1, 3), range(3, 5)]  # five groups in three parts
    expected = learn_in_a_loop(policy, batch, advantage, spans)
    before = copy.deepcopy(policy.model).state_dict()
    cut, numbers = learn(policy, batch, advantage, step)
    assert [list(one.chosen) for one in cut] == [[*span] for span in spans]
    assert numbers[0]["approx_kl"] == 0
    assert all(one["approx_kl"] > 0 for one in numbers[1:])
    assert any(one["clip_fraction"] > 0 for one in numbers)
    moved = 0.0
    for name, tensor in policy.model.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name], rtol=1e-3, atol=2e-5)
        moved = max(moved, float((tensor - before[name]).abs().max()))
    assert moved > 1e-2


def test_a_part_without_a_group_that_learns_makes_no_step(parts):
    policy, batch, step = parts(Lengths())
    first = [example.id for example in policy.parts.examples.order.take(0, 5)]
    policy, batch, step = parts(Lengths(dead=first[1:3]))
    cut, numbers = learn(policy, batch, batch.advantages(policy.cfg), step)
    assert [list(one.chosen) for one in cut] == [[0], [3, 4]]
    assert all(number["loss"] == number["loss"] for number in numbers)


def test_fewer_groups_than_parts(parts):
    _, batch, _ = parts(Lengths())
    spans = [list(one.chosen) for one in batch.cut(4)]
    assert list(itertools.chain(*spans)) == [*range(5)]
    assert [len(one.chosen) for one in batch.cut(9)] == [1] * 5


def test_more_parts_than_prompts_are_refused():
    refuses(
        lambda: compose(["algo=grpo", "algo.minibatches=9"]),
        key="algo.minibatches",
        value="9",
        try_next="algo.prompts_per_step=8",
    )


def test_bounds_have_an_effect_with_several_parts():
    run = compose(["algo=grpo", "algo.minibatches=2", "algo.epsilon_high=0.28", "algo.dual_clip=3"])
    assert (run.algo.updates_per_rollout, run.algo.ratio_moves) == (2, True)
