import gc

import pytest
import torch

from common.engine import Population, Requests
from common.model import prompts as model_prompts
from common.model.packed_linear import packed
from common.model.prompts import find_opening
from common.model.token_filters import cut
from common.sampling import native, slots
from common.sampling.kv_cache import ColumnCache, SharedPromptCache
from common.sampling.native import Sampler
from common.sampling.prefill import PromptCache
from common.sampling.schedule import LOOK_EVERY
from common.sampling.slots import BLOCK, draw, invert_cdf
from tests.support.models import (
    EACH,
    check_greedy,
    prompts,
    prompts_that_open_alike,
    sampling,
    small_model,
)


def sampler(model, rows=64, stop=(11, 12)):
    return Sampler(model, pad_id=96, stop_ids=stop, rows=rows)


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_greedy_equals_generate(name, rows):
    model = small_model(name)
    made = sampler(model, rows).generate(Requests(prompts=prompts()), sampling())
    check_greedy(model, made)


@pytest.mark.run
@pytest.mark.parametrize("name", EACH)
def test_a_sample_does_not_depend_on_its_company(name):
    """One row at a time, few slots with refills, all at once, one prompt alone, side by side in
    groups: the same.
    """
    model = small_model(name)
    many = sampler(model).generate(
        Requests(prompts=prompts(), samples=5, seed=3, logprobs=True), sampling(1.0)
    )
    assert many.tokens.shape == (25, 20)
    assert len({tuple(row) for row in many.tokens.tolist()}) > 20  # samples differ from each other
    for rows in (1, 2, 7):
        few = sampler(model, rows).generate(
            Requests(prompts=prompts(), samples=5, seed=3, logprobs=True), sampling(1.0)
        )
        assert torch.equal(few.tokens, many.tokens)
        assert torch.equal(few.lengths, many.lengths)
        torch.testing.assert_close(few.logprobs, many.logprobs, rtol=0, atol=1e-5)
    alone = sampler(model).generate(
        Requests(prompts=prompts()[2:3], samples=5, seed=3, ids=[2]), sampling(1.0)
    )
    assert torch.equal(alone.tokens, many.tokens[10:15])
    for rows in (4, 12, 100):
        grouped = sampler(model, rows).generate(
            Requests(prompts=prompts(), samples=5, seed=3, population=Population(members=4)),
            sampling(1.0),
        )
        assert torch.equal(grouped.tokens.view(4, 25, -1), many.tokens.expand(4, -1, -1))


def test_looking_seldom_changes_nothing(monkeypatch):
    """On CUDA finished rows are noticed every few steps only."""
    model = small_model("llama")
    often = sampler(model, 4).generate(
        Requests(prompts=prompts(), samples=3, logprobs=True), sampling(1.0)
    )
    monkeypatch.setitem(LOOK_EVERY, "cpu", 8)
    seldom = sampler(model, 4).generate(
        Requests(prompts=prompts(), samples=3, logprobs=True), sampling(1.0)
    )
    assert torch.equal(seldom.tokens, often.tokens)
    assert torch.equal(seldom.lengths, often.lengths)
    assert torch.equal(seldom.finished, often.finished)
    torch.testing.assert_close(seldom.logprobs, often.logprobs, rtol=0, atol=1e-5)


def test_looking_seldom_when_a_row_ends_at_once(monkeypatch):
    """It has written no column, and stands in no longer row's way."""
    model = small_model("llama")
    full = sampler(model, stop=()).generate(Requests(prompts=prompts(), seed=5), sampling(1.0))
    stop = int(full.tokens[0, 0])
    assert (full.tokens == stop).any(1).tolist() == [True, False, False, False, False]
    monkeypatch.setitem(LOOK_EVERY, "cpu", 8)
    made = sampler(model, stop=(stop,)).generate(Requests(prompts=prompts(), seed=5), sampling(1.0))
    assert made.lengths.tolist() == [1, 20, 20, 20, 20]
    assert torch.equal(made.tokens[1:], full.tokens[1:])


@pytest.mark.parametrize("shares", [True, False])
def test_looking_seldom_with_a_pad_token_that_stops(monkeypatch, shares):
    """As GPT-2 has it. What is not written yet is padding, and no stop."""
    model, made = small_model("llama"), []
    for every in (1, 8):
        monkeypatch.setitem(LOOK_EVERY, "cpu", every)
        ours = Sampler(model, pad_id=11, stop_ids=(11, 12), rows=4)
        ours.shares = shares
        made.append(
            ours.generate(Requests(prompts=prompts(), samples=2, seed=3), sampling(1.0, new=40))
        )
    assert made[0].lengths.max() > 8
    assert torch.equal(made[1].lengths, made[0].lengths)
    assert torch.equal(made[1].tokens, made[0].tokens)
    assert torch.equal(made[1].finished, made[0].finished)


@pytest.mark.run
@pytest.mark.parametrize("shares", [True, False])
def test_looking_seldom_up_to_the_last_position(monkeypatch, shares):
    """Rows that are past their end until the next look have no position of their own to look up."""
    model, made = small_model("gpt2"), []
    for every in (1, 8):
        monkeypatch.setitem(LOOK_EVERY, "cpu", every)
        ours = sampler(model, rows=2, stop=())
        ours.shares = shares
        made.append(
            ours.generate(
                Requests(prompts=prompts((10, 10, 3)), samples=2, seed=3), sampling(1.0, new=118)
            )
        )
    assert torch.equal(made[1].tokens, made[0].tokens)


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("samples", [1, 3])
def test_log_probabilities_are_the_models(name, temperature, samples):
    """With a prompt in front of each row, and with one that its samples share."""
    model = small_model(name)
    made = sampler(model, 4).generate(
        Requests(prompts=prompts(), samples=samples, logprobs=True), sampling(temperature)
    )
    for index in range(len(prompts()) * samples):
        prompt = prompts()[index // samples]
        length = int(made.lengths[index])
        completion = made.tokens[index, :length]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + completion.tolist()])).logits[
                0, len(prompt) - 1 : -1
            ]
        logp = torch.log_softmax(logits / (temperature or 1.0), -1).gather(1, completion[:, None])[
            :, 0
        ]
        torch.testing.assert_close(made.logprobs[index, :length], logp, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize(("rows", "groups"), [(64, 1), (5, 1), (12, 3)])
def test_a_shared_prompt_changes_nothing(name, rows, groups):
    """Samples of a prompt attend to one copy of it; an attention that cannot do so has a copy in
    each row.
    """
    model = small_model(name)
    made = {}
    for shares in (True, False):
        with_prefix = sampler(model, rows)
        assert with_prefix.shares
        with_prefix.shares = shares
        made[shares] = with_prefix.generate(
            Requests(
                prompts=prompts(),
                samples=4,
                seed=3,
                population=Population(members=groups),
                logprobs=True,
            ),
            sampling(1.0),
        )
    assert torch.equal(made[True].tokens, made[False].tokens)
    assert torch.equal(made[True].lengths, made[False].lengths)
    torch.testing.assert_close(made[True].logprobs, made[False].logprobs, rtol=0, atol=1e-5)
    assert model.config._attn_implementation == "sdpa"


def test_the_prompt_of_a_group_is_prefilled_once():
    model = small_model("llama")
    prefilled = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: (
            prefilled.append(kwargs["input_ids"].shape[0])
            if kwargs["input_ids"].shape[1] > 1
            else None
        ),
        with_kwargs=True,
    )
    sampler(model, rows=3, stop=()).generate(
        Requests(prompts=prompts(), samples=4), sampling(1.0, new=6)
    )
    assert sum(prefilled) == 5  # 20 rows through 3 slots


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("rows", [2, 64])
def test_what_prompts_begin_with_is_prefilled_once(name, samples, rows, monkeypatch):
    """In the call, whatever the pieces and the refills; and it changes nothing."""
    model, seen = small_model(name), []

    def note(_: object, args: tuple, kwargs: dict) -> None:
        if kwargs["input_ids"].shape[1] > 1:
            seen.append(tuple(kwargs["input_ids"].shape))

    model.register_forward_pre_hook(note, with_kwargs=True)
    asked = Requests(prompts=prompts_that_open_alike(), samples=samples, seed=3, logprobs=True)
    for piece in (1 << 12, 10):
        monkeypatch.setattr(native, "PIECE_ON_CPU", piece)
        seen.clear()
        made = sampler(model, rows).generate(asked, sampling(1.0))
        assert seen[0] == (1, 40)
        assert all(width <= 9 for _, width in seen[1:])
        with monkeypatch.context() as patch:
            patch.setattr(model_prompts, "SHORT_OPENING", 1000)
            seen.clear()
            whole = sampler(model, rows).generate(asked, sampling(1.0))
            assert max(width for _, width in seen) == 49
        assert torch.equal(made.tokens, whole.tokens)
        assert torch.equal(made.lengths, whole.lengths)
        torch.testing.assert_close(made.logprobs, whole.logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("samples", [1, 3])
def test_an_opening_is_held_while_requests_wait(samples, monkeypatch):
    """Its memory is free when the last requests get their slots."""
    held: list[bool] = []

    def note(kind: type) -> None:
        inner = kind.place

        def place(cache, *arguments):
            caches = [one for one in gc.get_objects() if isinstance(one, PromptCache)]
            held.append(any(set(one.lengths) == {40} for one in caches))
            inner(cache, *arguments)

        monkeypatch.setattr(kind, "place", place)

    for kind in (ColumnCache, SharedPromptCache):
        note(kind)
    for rows, times in ((64, 1), (2, samples + 1)):
        held.clear()
        asked = Requests(prompts=prompts_that_open_alike(), samples=samples)
        sampler(small_model("llama"), rows, stop=()).generate(asked, sampling(1.0, new=3))
        assert len(held) >= times
        assert held == sorted(held, reverse=True)
        assert held[0] == (rows == 2)
        assert not held[-1]


def test_an_opening_is_what_all_prompts_begin_with():
    start = list(range(40))

    def found(prompts: list[list[int]], least: float = 0.5) -> list[int]:
        return list(find_opening(prompts, least))

    assert found([[*start, 50], [*start, 51, 52], [*start, 53]]) == start
    assert found([[*start, 50], [*start, 50], [*start, 50]]) == start
    assert found([start, start, start]) == start[:39], "the last token of each is its own"
    assert found([start[:36], start, start]) == start[:35]
    two = [[*start, 50], [*start, 51]]
    assert found(two) == [], "half of the tokens are not saved"
    assert found(two, 0.0) == start
    assert found([start], 0.0) == [], "one prompt shares with none"
    assert found([start, start, start[1:]]) == []
    assert found([[*start[:20], 50 + i] for i in range(8)], 0.0) == [], "20 tokens are too few"
    assert found([[7], [7], [8]]) == found([]) == []


def test_draw_follows_the_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    n = 40_000
    u = torch.rand(n, generator=torch.Generator().manual_seed(0))
    expected = torch.softmax(logits / 0.7, -1)
    token, logp, _ = draw(logits.expand(n, 4), sampling(0.7), u, True)
    torch.testing.assert_close(torch.bincount(token, minlength=4) / n, expected, rtol=0, atol=0.01)
    torch.testing.assert_close(logp, expected.log()[token])


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 0.0])
@pytest.mark.parametrize("top_k", [1, 5, 40, 1000])
def test_top_k_equals_a_stable_sort(top_k, top_p):
    """Ties at the edge included."""
    draws = torch.randn(64, 333, generator=torch.Generator().manual_seed(0))
    probability = torch.softmax((2 * draws).round() / 2, -1)  # of which many are alike
    ordered, index = probability.sort(dim=-1, descending=True, stable=True)
    ordered[:, top_k:] = 0
    share = ordered / ordered.sum(-1, keepdim=True)
    beyond = share.cumsum(-1) - share >= top_p
    beyond[:, 0] = False
    ordered.masked_fill_(beyond & (top_p < 1), 0)
    wanted = torch.zeros_like(probability).scatter_(1, index, ordered)
    given = probability.clone()
    with torch.profiler.profile(acc_events=True) as seen:  # torch 2.11 warns without
        found = cut(probability, sampling(1.0, top_p=top_p, top_k=top_k))
    assert torch.equal(found, wanted)
    assert torch.equal(probability, given), "it is the policy's as well"
    assert "aten::sort" not in {event.key for event in seen.key_averages()}
    cut(probability * torch.nan, sampling(1.0, top_p=top_p, top_k=top_k))  # anything, but no error


def test_top_k_and_top_p_cut():
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    u = torch.linspace(0, 0.99999, 1000)
    assert draw(logits.expand(1000, 4), sampling(1.0, top_k=2), u, False)[0].unique().tolist() == [
        0,
        1,
    ]
    assert draw(logits.expand(1000, 4), sampling(1.0, top_p=0.71), u, False)[
        0
    ].unique().tolist() == [0, 1, 2]
    assert draw(logits.expand(1000, 4), sampling(1.0, top_p=0.69), u, False)[
        0
    ].unique().tolist() == [0, 1]
    min_p = draw(logits.expand(1000, 4), sampling(1.0, min_p=0.6), u, False)[0]
    assert min_p.unique().tolist() == [0, 1]
    # Kept tokens share the whole interval in proportion.
    token, _, _ = draw(logits.expand(1000, 4), sampling(1.0, top_k=2), u, False)
    assert abs((token == 0).double().mean() - 4 / 7) < 0.01


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf")]]).expand(3, 3)
    u = torch.tensor([0.0, 0.5, 1 - 2**-24])
    assert draw(logits, sampling(1.0), u, False)[0].tolist() == [1, 1, 1]


def test_dropout_is_off_and_the_mode_comes_back():
    model = small_model("gpt2")
    model.train()
    assert model.transformer.drop.p > 0
    first = sampler(model).generate(Requests(prompts=prompts()), sampling())
    assert model.training
    model.eval()
    assert torch.equal(
        first.tokens, sampler(model).generate(Requests(prompts=prompts()), sampling()).tokens
    )


def test_what_does_not_fit_is_refused():
    model = small_model("llama")
    with pytest.raises(
        ValueError,
        match=r"exceed the model's context of 128. Lower algo.sampling.max_new_tokens to 28",
    ):
        sampler(model).generate(Requests(prompts=[[5] * 100]), sampling(new=29))
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        sampler(model).generate(Requests(prompts=[[5], []]), sampling())


@pytest.mark.run
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gpt2"])
def test_a_narrow_copy_changes_nothing_under_autocast(name):
    """Beside autocast on the weights themselves, before and after they change. It casts what a norm
    returns once for all layers that take it.
    """
    model = small_model(name)
    ours = Sampler(model, pad_id=96, stop_ids=(11, 12), rows=8, autocast=torch.bfloat16)
    plain = Sampler(model, pad_id=96, stop_ids=(11, 12), rows=8, autocast=torch.bfloat16)
    plain.narrowed, plain.used, plain.forward = None, model, model
    for _ in range(2):
        ours.refresh()
        one, other = (
            s.generate(Requests(prompts=prompts(), samples=3, logprobs=True), sampling(1.0))
            for s in (ours, plain)
        )
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.logprobs, other.logprobs)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)


def casts(sampler, new):
    """How often a matrix is cast to bfloat16 while sampling `new` tokens."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        sampler.generate(Requests(prompts=[[5, 6, 7]]), sampling(1.0, new=new))
    shapes = (e.input_shapes[0] for e in profile.events() if e.name == "aten::_to_copy")
    return sum(len(shape) == 2 and min(shape) > 3 for shape in shapes)


@pytest.mark.run
def test_casts_do_not_grow_with_the_tokens():
    sampler = Sampler(small_model("qwen2"), pad_id=96, stop_ids=(), rows=1, autocast=torch.bfloat16)
    assert casts(sampler, 4) == casts(sampler, 8)
    sampler.narrowed, sampler.used, sampler.forward = None, sampler.model, sampler.model
    assert casts(sampler, 8) > casts(sampler, 4)  # what is counted is there to be counted


def test_completions_are_ordinary_tensors():
    made = sampler(small_model("llama")).generate(
        Requests(prompts=prompts(), logprobs=True), sampling(1.0)
    )
    scale = torch.ones(1, requires_grad=True)
    (made.logprobs * scale).sum().backward()  # inference tensors would refuse
    assert scale.grad is not None


@pytest.mark.parametrize("vocabulary", [5, BLOCK, 3 * BLOCK, 3 * BLOCK + 7])
def test_the_cdf_is_inverted_as_token_by_token(vocabulary):
    """In blocks, beside running sums in float64; no token of probability zero is ever drawn."""
    generator = torch.Generator().manual_seed(0)
    probability = torch.rand(400, vocabulary, generator=generator)
    probability[:, 1:4] = 0.0
    probability[:, -2:] = 0.0
    uniform = torch.rand(400, generator=generator)
    uniform[:2] = torch.tensor([0.0, 1 - 2**-24])  # the ends of what is drawn
    running = probability.double().cumsum(1)
    target = uniform.double()[:, None] * running[:, -1:]
    expected = torch.searchsorted(running, target, right=True)[:, 0]
    found = invert_cdf(probability, uniform)
    assert (probability.gather(1, found[:, None]) > 0).all()
    assert (found == expected).float().mean() > 0.99  # else a tie of rounding
    assert (found - expected).abs().max() <= 4
    broken = invert_cdf(torch.full((2, vocabulary), torch.nan), uniform[:2])
    assert (broken < vocabulary).all()  # there is an embedding for what follows


def test_draws_of_many_rows_are_those_of_each(monkeypatch):
    monkeypatch.setattr(slots, "IN_CACHE", 16 * 700)
    rows = 35
    generator = torch.Generator().manual_seed(0)
    logits, uniform = torch.randn(rows, 700, generator=generator), torch.rand(rows)
    token, logprob, witness = draw(logits, sampling(1.0), uniform, True)
    for row in range(rows):
        one = draw(logits[row : row + 1], sampling(1.0), uniform[row : row + 1], True)
        assert token[row] == one[0][0]
        assert logprob[row] == one[1][0]
        assert witness[row] == one[2][0]


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU packs no bfloat16 weights"
)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_packed_weights_give_the_same_products(name):
    """Up to rounding, at any number of rows; afterwards, and after an error, all is as before."""
    model = small_model(name).to(torch.bfloat16)
    ids = torch.randint(0, 90, (3, 9), generator=torch.Generator().manual_seed(0))

    def used() -> list[str]:
        return [n for n, m in model.named_modules() if {"packed", "forward"} & {*m.__dict__}]

    def fail() -> None:
        with packed(model):
            assert len(used()) > 4
            model(torch.full((1, 2), 10**6))

    with torch.no_grad():
        plain = model(ids).logits.float()
        with packed(model):
            found = model(ids).logits.float()
        assert used() == []
        with pytest.raises(IndexError):
            fail()
        assert used() == []
        assert (found - plain).abs().max() < 0.02 * plain.abs().max()
        model.get_output_embeddings().weight.mul_(2.0)
        with packed(model):  # packed anew: the weights of now
            doubled = model(ids).logits.float()
    assert (doubled - found).abs().max() > 0.1 * plain.abs().max()


@pytest.mark.parametrize("name", EACH)
def test_bfloat16_draws_what_a_plain_forward_scores(name):
    """Log-probabilities of the sampler, prompts shared or not, beside one forward in float32."""
    model, exact = small_model(name).to(torch.bfloat16), small_model(name)
    for rows in (2, 64):
        made = sampler(model, rows).generate(
            Requests(prompts=prompts(), samples=3, logprobs=True), sampling(1.0)
        )
        for row in range(len(made.tokens)):
            prompt = prompts()[row // 3]
            length = int(made.lengths[row])
            text = torch.tensor([prompt + made.tokens[row, :length].tolist()])
            logits = exact(text).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            expected = logits.gather(1, made.tokens[row, :length, None])[:, 0]
            assert (made.logprobs[row, :length] - expected).abs().max() < 0.15
