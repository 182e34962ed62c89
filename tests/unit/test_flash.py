"""Decode steps on flash attention, whose operator is computed row by row (tests/support/flash.py),
recorded by the tape of tests/support/standin/tape.py.
"""

from typing import Any

import pytest
import torch

from common.config import ConfigError
from common.engine import Population, Requests
from common.memory.arithmetic import cache_bytes
from common.memory.row_limit import Load
from common.model import varlen
from common.sampling.flash import FlashCache
from common.sampling.native import Sampler
from common.sampling.peak import piece_bytes
from common.sampling.prefill import Prefill
from common.sampling.schedule import LOOK_EVERY
from common.sampling.turn_cache import TurnCache
from eggroll.config import NoiseConfig
from eggroll.noise import Noise
from tests.support.flash import emulated
from tests.support.models import (
    EACH,
    check_greedy,
    prompts,
    prompts_that_open_alike,
    sampling,
    small_model,
)
from tests.unit.test_graphs import Tape, needs_ampere, same

STOPS: Any = {"pad_id": 96, "stop_ids": (11, 12)}


@pytest.fixture
def flash(monkeypatch):
    """A sampler with recorded steps and flash attention; steps are looked at every 4."""
    monkeypatch.setitem(LOOK_EVERY, "cpu", 4)
    # In inference mode operations that consist of others would be seen whole.
    monkeypatch.setattr("common.distributed.Sharding.inference", lambda _: torch.no_grad())
    Tape.recorded = Tape.replayed = 0

    def build(model: Any, rows: int, **more: Any) -> Sampler:
        sampler = Sampler(model.requires_grad_(False), rows=rows, **STOPS, **more)
        sampler.recorder, sampler.shares = Tape, False
        assert sampler.flash
        return sampler

    with emulated():
        yield build


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("rows", [2, pytest.param(64, marks=pytest.mark.thorough)])
def test_greedy_equals_generate(name, rows, flash):
    """With refills, stops and fewer rows at the end."""
    model = small_model(name)
    made = flash(model, rows).generate(Requests(prompts=prompts()), sampling())
    check_greedy(model, made)


@pytest.mark.run
@pytest.mark.parametrize(
    ("name", "rows", "groups"),
    [("qwen2", 12, 3), pytest.param("gpt2", 5, 1, marks=pytest.mark.thorough)],
)
def test_rows_with_lengths_of_their_own_change_nothing(name, rows, groups, flash):
    """Tokens, lengths and log-probabilities are those of plain steps."""
    model = small_model(name)
    requests = Requests(
        prompts=prompts(), samples=4, seed=3, population=Population(members=groups), logprobs=True
    )
    plain = Sampler(model, rows=rows, **STOPS).generate(requests, sampling(1.0))
    same(flash(model, rows).generate(requests, sampling(1.0)), plain)
    assert Tape.replayed > Tape.recorded > 1, "one for each number of rows"
    assert Tape.recorded <= 4


@pytest.mark.run
def test_prompts_that_begin_alike(flash):
    """What is prefilled once for all of them lies in front of each row's own tokens."""
    model = small_model("qwen2")
    requests = Requests(prompts=prompts_that_open_alike(), samples=2, seed=3, logprobs=True)
    plain = Sampler(model, rows=8, **STOPS).generate(requests, sampling(1.0))
    for rows in (3, 8):
        same(flash(model, rows).generate(requests, sampling(1.0)), plain)


@pytest.mark.run
def test_calls_that_follow_record_nothing(flash):
    """They find buffers and recordings, and see weights that have changed in place."""
    model = small_model("llama")
    sampler, plain = flash(model, 6), Sampler(model, rows=6, **STOPS)
    requests = Requests(prompts=prompts(), samples=2, logprobs=True)
    same(sampler.generate(requests, sampling(1.0)), plain.generate(requests, sampling(1.0)))
    recorded, board = Tape.recorded, sampler.board
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    fewer_tokens = Requests(prompts=prompts((4, 2, 8)), samples=4, seed=1, logprobs=True)
    for asked in (requests, fewer_tokens):
        same(sampler.generate(asked, sampling(1.0)), plain.generate(asked, sampling(1.0)))
    assert Tape.recorded <= recorded + 1, "at most another number of rows at the end"
    assert sampler.board is board
    recorded = Tape.recorded
    same(sampler.generate(requests, sampling(0.0)), plain.generate(requests, sampling(0.0)))
    assert Tape.recorded > recorded, "another way of drawing is another step"
    assert sampler.board is board
    longer = Requests(prompts=prompts((30, 4)), logprobs=True)
    same(sampler.generate(longer, sampling(1.0)), plain.generate(longer, sampling(1.0)))
    assert sampler.board is not board, "which has no room for it"
    assert (sampler.board.cache.slots, sampler.board.cache.columns) == (6, 50)


def test_rows_that_are_longer_than_planned_leave_nothing(flash):
    """A task of evaluate.also must not make the board of the run's own rows as wide as its own."""
    model = small_model("llama")
    sampler, plain = flash(model, 6), Sampler(model, rows=6, **STOPS)
    sampler.row_limit.columns = 40
    usual = Requests(prompts=prompts((20, 9, 7, 12, 5, 16)), logprobs=True)
    longer = Requests(prompts=prompts((30, 4)), logprobs=True)
    how = sampling(1.0, new=20)
    for asked, sizes in ((usual, (6, 40)), (longer, None), (usual, (6, 40))):
        same(sampler.generate(asked, how), plain.generate(asked, how))
        board = sampler.board
        assert sizes == (board and (board.cache.slots, board.cache.columns))


def test_turns_with_fewer_rows_and_tokens_record_next_to_nothing(flash):
    """As those of episodes have, each with a length limit and a number of rows of its own."""
    model = small_model("llama")
    sampler, plain = flash(model, 8), Sampler(model, rows=8, **STOPS)
    how = sampling(1.0, new=20)
    opening = Requests(prompts=prompts((6, 4, 9, 5, 7, 3, 8, 6)), logprobs=True)
    same(sampler.generate(opening, how), plain.generate(opening, how))
    assert Tape.recorded <= 4, "8, 4, 2 and 1 rows"
    board = sampler.board
    for count, new in ((7, 17), (6, 12), (5, 11), (3, 9), (3, 4), (2, 3)):
        asked = Requests(prompts=opening.prompts[:count], seed=count, logprobs=True)
        how = sampling(1.0, new=new)
        same(sampler.generate(asked, how), plain.generate(asked, how))
    assert sampler.board is board
    assert Tape.recorded <= 4, "the same numbers of rows"


@pytest.mark.run
@pytest.mark.parametrize(
    "how",
    [
        *(pytest.param(sampling(t), marks=pytest.mark.thorough) for t in (0.0, 1.0)),
        sampling(0.7, top_p=0.9),
    ],
    ids=str,
)
def test_a_recording_reads_what_outlives_the_call(how, flash):
    """The model and the board: an address of anything else would be another tensor's later."""
    model = small_model("qwen2")
    sampler = flash(model, 4)
    samples = 2 if how.temperature else 1
    sampler.generate(Requests(prompts=prompts(), samples=samples, logprobs=True), how)
    cache, board = sampler.board.cache, sampler.board
    kept = [*model.parameters(), *model.buffers(), *cache.keys, *cache.values, cache.lengths]
    kept += [cache.queries, cache.starts, sampler.stop_ids]
    kept += [tensor for tensor in vars(board.rows).values() if isinstance(tensor, torch.Tensor)]
    lasting = {tensor.untyped_storage().data_ptr() for tensor in kept}
    for recording in cache.graphs.recordings:
        for step in recording.steps:
            for tensor in step.leaves:
                if isinstance(tensor, torch.Tensor):
                    assert tensor.untyped_storage().data_ptr() in lasting, step.func


def test_an_episode_goes_on_from_what_is_kept_of_it(flash):
    """Its second turn is that of a whole prefill, and so is its third."""
    model = small_model("qwen2")
    turns: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for keeps, made in turns.items():
        sampler, asked, turn_cache = flash(model, 8), prompts(), TurnCache(5, 80)
        begun = None
        for _ in range(3):
            more: Any = {"turn_cache": turn_cache, "at": range(5)} if keeps else {}
            requests = Requests(prompts=asked, begun=begun, logprobs=True, **more)
            came = sampler.generate(requests, sampling(1.0, new=9))
            made += [came.tokens, came.logprobs]
            rows = zip(came.tokens.tolist(), came.lengths.tolist(), strict=True)
            said = [ids[:length] for ids, length in rows]
            asked = [[*p, *s, 20 + len(p) % 7, 30] for p, s in zip(asked, said, strict=True)]
            begun = [(0, 11)] * 5
        assert any(turn_cache.lengths) == keeps
    for one, other in zip(*turns.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_nothing_is_kept_where_backward_passes_want_the_memory(flash):
    sampler = flash(small_model("llama"), 6)
    sampler.generate(Requests(prompts=prompts()), sampling(new=4))
    sampler.rest()
    assert sampler.board is not None, "of a model that is not trained"
    sampler.model.requires_grad_(True)
    sampler.keeps = sampler.board.cache.slots
    sampler.rest()
    assert sampler.board is not None, "where the plan has room for both"
    sampler.keeps -= 1
    sampler.rest()
    assert sampler.board is None, "an evaluation has had more rows than are planned for"


def test_the_plan_counts_slots_while_prompts_are_prefilled(flash):
    """The last call has left them."""
    sampler = flash(small_model("qwen2"), 64)
    sampler.generate(Requests(prompts=prompts()), sampling(new=4))
    assert sampler.board.cache.keys
    token = cache_bytes(sampler.model.config, 4)
    held = 64 * 60 * token + 64 * (60 + 20) * token + piece_bytes(sampler, 64, 60, False)
    assert sampler.peak_bytes(64, Load(60, sampling(new=20), completions=64)) >= held


def test_nothing_is_kept_of_a_call_that_failed(flash, monkeypatch):
    sampler = flash(small_model("llama"), 6)
    sampler.generate(Requests(prompts=prompts()), sampling(new=4))
    assert sampler.board is not None

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("planted")

    sampler.row_limit.fixed = True
    monkeypatch.setattr(Prefill, "run", fail)
    with pytest.raises(ConfigError):
        sampler.generate(Requests(prompts=prompts()), sampling(new=4))
    assert sampler.board is None


@pytest.mark.run
def test_population_and_model_are_recorded_separately(flash):
    """Of one board; noise is read where it lies."""
    model = small_model("llama").requires_grad_(False)
    config = NoiseConfig(
        matrices="lowrank", vectors="full", embeddings="frozen", head="frozen", patterns={}
    )
    noise = Noise(model, config, rank=2, mirrored=True, seed=5)
    plain, ours = Sampler(model, rows=8, **STOPS), flash(model, 8)
    arguments: Any = {"prompts": prompts((5, 9)), "logprobs": True}
    population = Requests(population=Population(members=4), **arguments)
    for step in range(2):
        recorded = Tape.recorded
        with noise.members(step, range(4), sigma=0.1):
            same(
                ours.generate(population, sampling(1.0, new=8)),
                plain.generate(population, sampling(1.0, new=8)),
            )
        alone = Requests(samples=4, **arguments)
        same(
            ours.generate(alone, sampling(1.0, new=8)), plain.generate(alone, sampling(1.0, new=8))
        )
    assert Tape.recorded == recorded, "the second step finds those of the first"


def test_other_samplers_keep_a_common_column(flash):
    """Without recordings, compiled, with an attention of the model's own, and without flash."""
    model = small_model("llama")
    assert not Sampler(model, rows=4, **STOPS).flash
    sampler = flash(model, 4)
    sampler.replaces = False
    assert not sampler.flash
    sampler = flash(model, 4)
    sampler.forward = lambda **_: None
    assert not sampler.flash
    sampler = flash(model, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "has_flash", lambda *_: False)
        assert not sampler.flash


@pytest.mark.parametrize(
    ("slots", "used", "left"), [(64, 64, 64), (64, 33, 64), (64, 32, 32), (7, 1, 1), (5, 3, 3)]
)
def test_rows_are_halved(slots, used, left):
    assert FlashCache.worth_keeping(slots, used) == left


@pytest.mark.gpu
@needs_ampere
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("groups", [1, 3])
def test_on_a_gpu_the_kernel_draws_what_masked_attention_draws(name, groups):
    model = small_model(name).to("cuda", torch.bfloat16).requires_grad_(False)
    requests = Requests(
        prompts=prompts(), samples=4, seed=3, population=Population(members=groups), logprobs=True
    )
    made = []
    for graphs in (True, False):
        sampler = Sampler(model, rows=12, graphs=graphs, **STOPS)
        assert sampler.flash == graphs
        made.append(sampler.generate(requests, sampling(1.0, new=60)))
        if graphs:
            board, number = sampler.board, len(sampler.board.cache.graphs.replays)
            again = sampler.generate(requests, sampling(1.0, new=60))
            assert torch.equal(again.tokens, made[0].tokens)
            assert sampler.board is board
            assert len(board.cache.graphs.replays) == number
    first = [m.logprobs[:, :4] for m in made]  # rounding may lead to other tokens later
    assert (made[0].tokens[:, :4] == made[1].tokens[:, :4]).double().mean() > 0.8
    assert (first[0] - first[1]).abs().median() < 0.05
