import dataclasses
import math

import pytest
import torch

from common.config import ConfigError
from common.engine import Requests
from common.memory.arithmetic import BatchShape, activation_bytes
from common.model import attention, logprobs, token_filters
from common.model.adapter import peft_of_today
from common.model.logprobs import group, prepare, token_logprobs
from common.model.masks import additive
from common.model.token_filters import cut, keep_drawable
from common.model.wide_layers import widen_head
from common.optim import checkpoint_activations
from common.sampling.native import Sampler
from tests.support.models import ARCHITECTURES, sampling, small_model
from tests.support.rounding import rounding_of_product

CPU = torch.device("cpu")


def data(sizes=((5, (3, 7, 1)), (9, (4, 6)), (2, (7, 2, 5)))):
    generator = torch.Generator().manual_seed(0)

    def ids(n):
        return torch.randint(2, 90, (n,), generator=generator).tolist()

    return [ids(p) for p, _ in sizes], [[ids(c) for c in cs] for _, cs in sizes]


def data_that_opens_alike(opening=40):
    """The same with a long text in front of every prompt."""
    prompts, completions = data()
    start = data(((opening, (1,)),))[0][0]
    return [[*start, 90 + i, *own] for i, own in enumerate(prompts)], completions


def unpadded(model, prompts, completions, temperature):
    """One row at a time, no padding, the model's own logits."""
    logp, entropy = [], []
    for prompt, rows in zip(prompts, completions, strict=True):
        for completion in rows:
            whole = torch.tensor([prompt + completion])
            whole_logits = model(input_ids=whole, use_cache=False).logits[0]
            logits = whole_logits[len(prompt) - 1 : -1] / temperature
            log_softmax = torch.log_softmax(logits, -1)
            logp.append(log_softmax.gather(1, torch.tensor(completion)[:, None])[:, 0])
            entropy.append(-(log_softmax.exp() * log_softmax).sum(-1))
    return logp, entropy


def check_unpadded(model, other, prompts, completions, temperature, near):
    """Assert that values and gradients are those of an equal model that goes row by row."""
    laid = group(prompts, completions, CPU)
    logp, entropy = token_logprobs(model, laid, temperature)
    there = laid.mask.any(1)  # a prompt may have fewer completions than others
    assert (logp[~there] == 0).all()
    logp, entropy = logp[there], entropy[there]
    slow_logp, slow_entropy = unpadded(other, prompts, completions, temperature)
    weights = torch.randn(logp.shape, generator=torch.Generator().manual_seed(1))
    slow_loss = 0
    for row, (values, entropies) in enumerate(zip(slow_logp, slow_entropy, strict=True)):
        n = len(values)
        torch.testing.assert_close(logp[row, :n], values, rtol=0, atol=near)
        torch.testing.assert_close(entropy[row, :n], entropies, rtol=0, atol=near)
        assert (logp[row, n:] == 0).all()
        slow_loss = slow_loss + (weights[row, :n] * (values + 0.3 * entropies)).sum()
    (weights * (logp + 0.3 * entropy)).sum().backward()
    slow_loss.backward()
    for (name, fast), slow in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(fast.grad, slow.grad, rtol=1e-3, atol=1e-4, msg=name)


CUTS = [{"top_p": 0.7}, {"top_k": 5}, {"min_p": 0.2}, {"top_p": 0.9, "top_k": 9, "min_p": 0.05}]


@pytest.mark.parametrize("given", CUTS, ids=str)
def test_sampler_and_trainer_agree_among_the_tokens_that_are_drawn(given):
    """In value; and gradients are those of a softmax over the same tokens."""
    model, settings = small_model("llama"), sampling(0.7, 12, **given)
    sampler = Sampler(model, pad_id=96, stop_ids=(), rows=12)
    prompts, _ = data()
    drawn = sampler.generate(Requests(prompts=prompts, samples=4, logprobs=True), settings)
    rows = zip(drawn.tokens, drawn.lengths, strict=True)
    texts = [tokens[:length].tolist() for tokens, length in rows]
    prepare(model)
    laid = group(prompts, [texts[i : i + 4] for i in range(0, len(texts), 4)], CPU)
    logp, entropy = token_logprobs(model, laid, 0.7, settings)
    torch.testing.assert_close(
        logp * laid.mask, drawn.logprobs[:, : logp.shape[1]], atol=1e-4, rtol=0
    )
    whole, _ = token_logprobs(model, laid, 0.7)
    assert ((logp - whole) * laid.mask).max() > 0.1, "nothing was cut"
    (logp.sum() + 0.3 * entropy.sum()).backward()
    head = model.get_output_embeddings().weight
    states = logprobs.hidden_states(model, laid).detach()
    other = head.detach().clone().requires_grad_()
    logits = states @ other.T / 0.7
    kept = cut(logits.detach().softmax(1), settings) > 0
    log_softmax = logits.masked_fill(~kept, -30.0 * 1e3).log_softmax(1)
    of_target = log_softmax.gather(1, laid.targets[:, None]).sum()
    (of_target - 0.3 * (log_softmax.exp() * log_softmax).sum()).backward()
    if not model.config.tie_word_embeddings:
        torch.testing.assert_close(head.grad, other.grad, rtol=1e-3, atol=1e-4)


def test_a_cut_policy_has_an_unbiased_gradient_only_among_its_tokens():
    """The bias of TRL's top_p (its issue 6789), over all tokens of a policy of four: samples come
    from the cut policy, whose expected reward rises along the gradient of its own
    log-probabilities, and not along that of the whole distribution's.
    """
    reward = torch.tensor([1.0, 0.2, 0.6, 0.0], dtype=torch.float64)
    logits = torch.tensor([[1.0, 0.4, 0.1, -2.0]], dtype=torch.float64, requires_grad=True)
    settings, ids = sampling(1.0, top_p=0.9), torch.tensor([0])
    own = keep_drawable(logits, ids, settings).log_softmax(1)[0]
    probability = own.exp()
    assert (probability > 0).tolist() == [True, True, True, False]
    (expected,) = torch.autograd.grad((probability * reward).sum(), logits, retain_graph=True)
    found = []
    for logp in (own, logits.log_softmax(1)[0]):
        drawn = probability.detach()[:3] * reward[:3]
        found.append(torch.autograd.grad((drawn * logp[:3]).sum(), logits, retain_graph=True)[0])
    torch.testing.assert_close(found[0], expected)
    assert (found[1] - expected).abs().max() > 0.01


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("chunk", "fused"), [(None, True), (500, True), (None, False)])
def test_equals_the_unpadded_model(name, temperature, chunk, fused, monkeypatch):
    """Values and gradients, for any padding, absolute positions included; with a CPU's fused
    attention, and with the one of other devices.
    """
    if not fused:
        monkeypatch.setattr(attention, "fits", lambda *_: False)
    if chunk:
        monkeypatch.setitem(logprobs.LOGITS, "cpu", chunk)
    model, other = small_model(name), small_model(name)
    prepare(model)
    prompts, completions = data()
    check_unpadded(model, other, prompts, completions, temperature, 1e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("fused", [True, False])
def test_what_prompts_begin_with_is_computed_once(name, fused, monkeypatch):
    """It changes neither values nor gradients, whether prompts are as long as each other or not."""
    if not fused:
        monkeypatch.setattr(attention, "fits", lambda *_: False)
    prompts, completions = data_that_opens_alike()
    level = [prompt[:43] for prompt in prompts]
    for given in (prompts, level):
        model, other = small_model(name), small_model(name)
        prepare(model)
        laid = group(given, completions, CPU)
        rows = [len(row) for group in completions for row in group]
        assert laid.ids.numel() == sum(map(len, given)) - 2 * 40 + sum(rows)
        check_unpadded(model, other, given, completions, 0.7, 2e-5)


def test_the_gradient_of_an_opening_is_summed_in_float32():
    """Of as many rows as there are prompts, in whatever dtype they are."""
    start = list(range(40))
    laid = group([[*start, 50 + i % 40, i] for i in range(64)], [[[1]]] * 64, CPU)
    x = torch.zeros(1, 1, laid.ids.numel(), 1, dtype=torch.bfloat16, requires_grad=True)
    out = laid.lay_out(x)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    out.backward(grad)
    summed = grad[:, 0, :40, 0].float().sum(0)
    torch.testing.assert_close(x.grad[0, 0, :40, 0].float(), summed, rtol=2**-7, atol=0.05)


def test_no_padding_is_computed():
    model = small_model("llama")
    prepare(model)
    computed = []
    model.model.layers[0].mlp.register_forward_hook(
        lambda _, args, out: computed.append(out.shape[:2].numel())
    )
    prompts, completions = data()
    token_logprobs(model, group(prompts, completions, CPU), 1.0)
    assert computed == [sum(map(len, prompts)) + sum(len(c) for cs in completions for c in cs)]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_prompts_of_one_length_need_no_mask(name, monkeypatch):
    """Then attention is told that it is causal, which gives the same values."""
    model = small_model(name)
    prepare(model)
    laid = group(*data(((6, (3, 7)), (6, (4, 4)))), CPU)
    assert laid.masked(torch.float32).prompt_mask is None
    fast = token_logprobs(model, laid, 1.0)[0]
    among = additive(torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 1, 6, 6), torch.float32)
    masked = dataclasses.replace(laid.masked(torch.float32), prompt_mask=among)
    monkeypatch.setattr(logprobs.Groups, "masked", lambda *_: masked)
    torch.testing.assert_close(token_logprobs(model, laid, 1.0)[0], fast, rtol=0, atol=1e-6)
    monkeypatch.undo()
    assert group(*data(), CPU).masked(torch.float32).prompt_mask is not None


def test_autocast_gradients_are_those_of_the_reported_values():
    """bfloat16 forward, float32 weights: beside the model's own logits and plain autograd under the
    same autocast.
    """
    model, other = small_model("llama"), small_model("llama")
    prepare(model)
    prompts, completions = data()
    weights = torch.randn(8, 7, generator=torch.Generator().manual_seed(1))
    laid = group(prompts, completions, CPU)
    with torch.autocast("cpu", torch.bfloat16):
        logp, _ = token_logprobs(model, laid, 1.0)
        logp = logp[laid.mask.any(1)]
        slow = sum(
            (weights[row, : len(v)] * v.float()).sum()
            for row, v in enumerate(unpadded(other, prompts, completions, 1.0)[0])
        )
    assert logp.dtype == torch.float32
    (weights * logp).sum().backward()
    slow.backward()
    fast_grad, slow_grad = (
        torch.cat([p.grad.flatten() for p in m.parameters()]) for m in (model, other)
    )
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    assert torch.cosine_similarity(fast_grad, slow_grad, dim=0) > 0.995
    assert 0.97 < fast_grad.norm() / slow_grad.norm() < 1.03


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_head_in_float32_does_not_round_logits(name):
    """opt.amp.head=float32, tied and not: values and gradients are those of a float32 product of
    the states that bfloat16 layers made, and the sampler is nearer to the trainer if its states
    are those of the trainer but for rounding.
    """
    prompts, _ = data()
    gaps, errors, half = [], [], torch.autocast("cpu", torch.bfloat16)
    for wide in (False, True):
        model = small_model(name)
        head = model.get_output_embeddings()
        head.weight.data *= 8  # logits that 8 bits round by up to a tenth
        if wide:
            widen_head(model)
        settings = sampling(1.0, 12)
        sampler = Sampler(model, pad_id=96, stop_ids=(), rows=12, autocast=torch.bfloat16)
        sampler.refresh()
        drawn = sampler.generate(Requests(prompts=prompts, samples=4, logprobs=True), settings)
        texts = [
            row[:length].tolist() for row, length in zip(drawn.tokens, drawn.lengths, strict=True)
        ]
        prepare(model)
        laid = group(prompts, [texts[i : i + 4] for i in range(0, len(texts), 4)], CPU)
        with half:
            logp, _ = token_logprobs(model, laid, 1.0)
            states = logprobs.hidden_states(model, laid).detach().float()
        weight = head.weight.detach().clone().requires_grad_()
        expected = (states @ weight.T).log_softmax(1).gather(1, laid.targets[:, None])[:, 0]
        errors.append((logp[laid.mask] - expected).detach().abs().mean().item())
        gaps.append(((logp - drawn.logprobs)[laid.mask]).abs().mean().item())
    # Of a logit, of the largest one and of the sum of exponentials in the log-softmax.
    rounding = 3 * rounding_of_product(states, weight)
    assert (logp[laid.mask] - expected).abs().max() <= rounding
    assert errors[0] > 100 * errors[1], "a head in bfloat16 rounds"
    assert gaps[1] <= max(gaps[0], rounding)
    assert sampler.used.get_output_embeddings().weight.dtype == torch.float32
    logp.sum().backward()
    expected.sum().backward()
    if not model.config.tie_word_embeddings:
        # A row's gradient is a sum of states over tokens, each times a probability below 1.
        rounding = rounding_of_product(torch.ones(1, len(states)), states.T)
        torch.testing.assert_close(head.weight.grad, weight.grad, rtol=0, atol=rounding)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_fused_attention_is_attention(dtype, padded):
    """Result and gradients beside a softmax over all keys in float64; two prompts of 3 completions,
    6 heads of which 3 share a key head.
    """
    n, prompt, size, length, heads, key_heads, d = 2, 5, 3, 4, 6, 2, 8
    draw = torch.Generator().manual_seed(0)

    def make(heads):
        shape = (n, heads, prompt + size * length, d)
        return torch.randn(shape, generator=draw).to(dtype).requires_grad_()

    query, key, value = make(heads), make(key_heads), make(key_heads)
    seen = torch.arange(prompt) >= torch.tensor([2 * padded, 0])[:, None]
    causal = torch.ones(prompt, prompt).tril().bool()
    of_prompt = (causal & seen[:, None]) | torch.eye(prompt).bool()
    own = torch.ones(length, length).tril().bool()
    rows = torch.cat((seen[:, None].expand(n, length, prompt), own.expand(n, -1, -1)), dim=2)
    whole = torch.zeros(n, prompt + size * length, prompt + size * length).bool()
    whole[:, :prompt, :prompt] = of_prompt
    for i in range(size):
        place = slice(prompt + i * length, prompt + (i + 1) * length)
        whole[:, place, :prompt], whole[:, place, place] = rows[:, :, :prompt], own
    masks = additive(of_prompt[:, None], dtype) if padded else None
    by_row = additive(rows.repeat_interleave(size, dim=0)[:, None], dtype)
    sizes = (n, prompt, size, length)
    made = attention.SharedPrompt.apply(query, key, value, masks, by_row, sizes, 0.3)
    weights = torch.randn(made.shape, generator=draw).to(dtype)
    made.backward(weights)

    plain = [x.detach().double().requires_grad_() for x in (query, key, value)]
    q, k, v = plain[0], *(x.repeat_interleave(heads // key_heads, dim=1) for x in plain[1:])
    scores = (q @ k.transpose(2, 3) * 0.3).masked_fill(~whole[:, None], -math.inf)
    slow = torch.softmax(scores, dim=-1) @ v
    slow.backward(weights.double())
    near = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    real = torch.ones(n, prompt + size * length).bool()
    real[:, :prompt] = seen  # what a padding place attends to is not looked at
    at = real[:, None, :, None]
    torch.testing.assert_close(made.double() * at, slow * at, rtol=0, atol=near)
    for fast, exact in zip((query, key, value), plain, strict=True):
        assert fast.grad is not None
        torch.testing.assert_close(fast.grad.double(), exact.grad, rtol=near, atol=near)


def test_gradient_checkpointing_changes_nothing():
    prompts, completions = data()
    grads = []
    for checkpointing in (False, True):
        model = small_model("llama").train()
        prepare(model)
        if checkpointing:
            checkpoint_activations(model)
        token_logprobs(model, group(prompts, completions, CPU), 1.0)[0].sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_plain_forwards_stay_the_same(name):
    model, other = small_model(name), small_model(name)
    prepare(model)
    ids = torch.randint(2, 90, (3, 7), generator=torch.Generator().manual_seed(0))
    padding = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7, [0, 1, 1, 1, 1, 1, 1]])
    positions = (padding.cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": ids, "attention_mask": padding, "position_ids": positions}
    torch.testing.assert_close(
        model(**inputs).logits[padding.bool()], other(**inputs).logits[padding.bool()]
    )
    kept = {
        "max_new_tokens": 5,
        "do_sample": False,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(ids),
    }
    assert torch.equal(model.generate(ids, **kept), other.generate(ids, **kept))


@pytest.mark.parametrize("repeatable", [False, True])
def test_cuts_ask_for_no_deterministic_sum(repeatable, monkeypatch):
    """CUDA has none, and a backward pass with opt=deterministic makes them once more."""
    seen = []
    cut = token_filters.cut

    def watched(probability, of):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return cut(probability, of)

    monkeypatch.setattr(token_filters, "cut", watched)
    torch.use_deterministic_algorithms(repeatable)
    try:
        kept = token_filters.keep_drawable(
            torch.randn(2, 9), torch.tensor([1, 2]), sampling(temperature=1.0, top_p=0.5)
        )
        assert torch.are_deterministic_algorithms_enabled() == repeatable
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [False]
    assert kept.isinf().any()


def test_a_model_that_scales_its_logits_is_refused():
    model = small_model("llama")
    forward = model.forward
    model.forward = lambda **inputs: type("Out", (), {"logits": 2 * forward(**inputs).logits})
    with pytest.raises(ConfigError, match="scales its logits or attends in a way"):
        prepare(model)


def test_large_logits_in_half_precision_are_no_reason_to_refuse():
    """They are rounded by more than small ones; what is scaled shows all the same."""
    model = small_model("llama").bfloat16()
    model.lm_head.weight.data *= 30
    prepare(model)
    forward = model.forward
    model.forward = lambda **inputs: type("Out", (), {"logits": 1.2 * forward(**inputs).logits})
    with pytest.raises(ConfigError, match="scales its logits"):
        prepare(model)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*ARCHITECTURES, "llama with an adapter"])
@pytest.mark.parametrize("opening", [0, 60])
def test_activations_are_estimated(opening, name, compute, recomputed):
    """Beside the tensors that autograd really keeps; of prompts that begin alike, too."""
    model = small_model(name.split()[0])
    prepare(model)
    if "adapter" in name:
        adapted(model)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    if recomputed:
        checkpoint_activations(model)
        model.train()
    prompts = [[*[5] * opening, first, *[5] * 29] for first in (6, 7)]
    laid = group(prompts, [[[7] * 25] * 4] * 2, CPU)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=compute == torch.bfloat16),
    ):
        token_logprobs(model, laid, 1.0)
    counted = sum(size for size, _ in kept.values())
    batch = BatchShape(2, opening + 30, 8, 25, compute, opening)
    estimate = activation_bytes(model, batch, recomputed)
    if recomputed:  # two whole blocks more, of the backward pass
        assert counted < estimate < activation_bytes(model, batch, False) * 1.2
    else:
        if compute == torch.bfloat16:  # autocast's copies of the weights are counted elsewhere
            counted -= 2 * sum(parameter.numel() for parameter in model.parameters())
        # The first of two blocks keeps less before its adapter.
        assert counted < estimate < (1.5 if "adapter" in name else 1.4) * counted


def adapted(model):
    """Put an adapter of rank 4 into `model`."""
    peft = pytest.importorskip("peft")
    with peft_of_today():
        peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))


def test_estimated_activations_add_up():
    model = small_model("llama")

    def estimate(prompts, rows):
        return activation_bytes(model, BatchShape(prompts, 40, rows, 30, torch.float32), False)

    assert estimate(2, 8) == pytest.approx(2 * estimate(1, 3) + 2 * estimate(0, 1))
