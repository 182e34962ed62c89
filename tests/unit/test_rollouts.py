"""common/rollout against a naive loop: one prompt, one sample, one reward at a time."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from common.device import hardware
from common.distributed.context import Context
from common.engine import Completions, Population, Requests
from common.parts import open_parts
from common.rollout import Rollout
from common.scoring import fill
from eggroll.population import fill_members
from launch import compose
from tests.support import SMALL_GRPO
from tests.support.letters import Letters


@pytest.fixture
def parts(in_cache, tmp_path):
    run = compose([*SMALL_GRPO, "algo.sampling.temperature=1.0"])
    opened = open_parts(
        run, Context(0, 1, hardware.find(run.hardware), tmp_path), Letters("smooth")
    )
    yield opened
    opened.close()


def test_it_equals_a_loop_over_prompts_and_samples(parts):
    examples = parts.examples.order.take(0, 3)
    asked = {"draw": 5, "logprobs": True}
    rollout = parts.rollouter.roll_out(
        examples, parts.rollouter.request(examples, samples=2, **asked)
    )
    assert [rollout.example(row).id for row in range(6)] == [e.id for e in examples for _ in "ab"]
    for row in range(6):
        example = examples[row // 2]
        alone = parts.rollouter.sample(
            parts.rollouter.request([example], first_sample=row % 2, **asked)
        )
        length = int(alone.lengths[0])
        tokens = alone.tokens[0, :length]
        assert torch.equal(rollout.tokens[row, :length], tokens)
        assert rollout.written[row].tolist() == [True] * length + [False] * (8 - length)
        assert rollout.lengths[row] == length
        text = parts.lm.tokenizer.decode(tokens, skip_special_tokens=True)
        assert rollout.texts[row] == text
        assert rollout.scored.rewards[row] == parts.task.reward(example, text)
        assert bool(rollout.finished[row]) == bool(alone.finished[0])
    assert rollout.generated == rollout.lengths.sum()


def test_kept_and_not_finite_rows_are_described(parts):
    examples = parts.examples.order.take(0, 2)
    requests = parts.rollouter.request(examples, samples=3, first_sample=4, logprobs=True)
    rollout = parts.rollouter.roll_out(examples, requests)
    rows = rollout.describe([0, 5], parts.task)
    assert [(row["group"], row["sample"], row["id"]) for row in rows] == [
        (0, 4, examples[0].id),
        (1, 6, examples[1].id),
    ]
    assert [row["completion"] for row in rows] == [rollout.texts[0], rollout.texts[5]]
    assert [row["reward"] for row in rows] == [rollout.scored.rewards[r] for r in (0, 5)]

    rollout.broken[1], rollout.scored.rewards[3] = True, float("nan")
    assert rollout.sound == [True, False, True, False, True, True]
    offending = rollout.describe_offending(3, parts.task, broken=False)
    assert offending["reward"] == "nan"
    assert (offending["id"], offending["logits"]) == (examples[1].id, "finite")


def test_sampling_and_scoring_are_timed_apart(parts):
    phases = []

    @contextmanager
    def phase(name):
        phases.append(name)
        yield

    examples = parts.examples.order.take(0, 1)
    parts.rollouter.roll_out(examples, parts.rollouter.request(examples), phase)
    assert phases == ["rollout", "reward"]


def test_parts_of_a_population_are_one_rollout(parts):
    """Where memory ran out, members were sampled in several calls."""
    examples = parts.examples.order.take(0, 2)
    requests = parts.rollouter.request(examples, samples=2)
    calls = [
        parts.rollouter.sample(requests),
        parts.rollouter.sample(parts.rollouter.request(examples, samples=2, draw=1)),
    ]
    joined = Rollout.decode(parts.lm.decode, requests, Completions.join(calls), examples)
    assert joined.tokens.shape[0] == len(joined.texts) == 8
    assert [joined.example(row).id for row in range(8)] == 2 * [
        e.id for e in examples for _ in "ab"
    ]
    assert torch.equal(joined.tokens[4:], calls[1].tokens)
    assert joined.logprobs is None


def test_a_request_is_keyed_by_the_run_and_the_examples(parts):
    examples = parts.examples.order.take(0, 2)
    requests = parts.rollouter.request(examples, lambda example: "ab", samples=3)
    assert isinstance(requests, Requests)
    assert (requests.seed, requests.samples) == (parts.run.seed, 3)
    assert list(requests.ids) == [example.id for example in examples]
    assert requests.prompts[0] == requests.prompts[1]


class Half:
    """Rewards of which every other one is missing, and those of prompt 1 are."""

    name = "half"

    def __init__(self):
        self.components, self.weights = {"only": self.scores}, {"only": 1.0}

    def scores(self, examples, texts):
        return [
            None if row % 2 or example is examples[2] else row / 8
            for row, example in enumerate(examples)
        ]


def test_missing_rewards_become_their_prompts_mean(parts, monkeypatch):
    monkeypatch.setattr(parts.scorer, "task", Half())
    examples = parts.examples.order.take(0, 2)
    asked = parts.rollouter.request(examples, samples=2)
    both = replace(asked, population=Population(members=2))
    completions = parts.rollouter.sample(both)
    rollout = Rollout.decode(parts.lm.decode, both, completions, examples)
    rollout.start_scoring(parts.scorer)
    # rows: member 0: prompt 0 twice, prompt 1 twice; member 1 the same
    assert rollout.scored.rewards == [0, 0.25, 0, 0, 0.5, 0.25, 0, 0]
    assert rollout.scored.components["only"] == rollout.scored.rewards
    assert rollout.scored.unscored == [False, True, True, True, False, True, True, True]
    assert all(rollout.sound)


def test_equal_scores_have_exactly_their_mean():
    """Rounding must not tell a row without a reward from the others of a group."""
    assert fill([0.1, 0.1, 0.1, None], [0] * 4) == [0.1] * 4
    assert fill([None, 0.5, 0.25, None], [0, 1, 1, 1]) == [0, 0.5, 0.25, 0.375]


def test_members_without_a_reward_have_the_mean_of_all_members():
    """Whatever forwards they were in: 2 prompts with 2 samples each."""
    scores = torch.tensor([[0.2, 9.0, 9.0, 9.0], [9.0, 0.4, 9.0, 9.0], [0.6, 0.8, 9.0, 9.0]])
    filled = fill_members(scores.double(), scores == 9.0, 2)
    wanted = torch.tensor([[0.2, 0.5, 0, 0], [0.5, 0.4, 0, 0], [0.6, 0.8, 0, 0]]).double()
    assert torch.allclose(filled, wanted, atol=1e-7)
    equal = fill_members(torch.full((3, 1), 0.1).double(), torch.tensor([[0], [0], [1]]).bool(), 1)
    assert equal.std() == 0, "rounding would be the only difference, and become the fitness"
