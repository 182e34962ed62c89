"""Training attention by flash attention over sequences, beside the masked attention and the
unpadded model. Without a GPU its operators are computed in tests/support/flash.py.
"""

import pytest
import torch

from common.memory.arithmetic import BatchShape, activation_bytes
from common.model import logprobs, varlen
from common.model.logprobs import group, prepare, token_logprobs
from common.model.varlen import InGroups, Sequences, attend, has_flash, span
from common.optim import checkpoint_activations, no_dropout
from tests.oracles.test_logprobs import CPU, check_unpadded, data, data_that_opens_alike
from tests.support.flash import emulated, forward
from tests.support.models import ARCHITECTURES, small_model
from tests.unit.test_graphs import needs_ampere

BF16 = torch.bfloat16


@pytest.fixture
def flash():
    with emulated():
        yield


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("make", [data, data_that_opens_alike])
def test_equals_the_unpadded_model(make, name, recomputed, flash):
    """Values and gradients; of any lengths, and of prompts that begin alike."""
    model, other = small_model(name), small_model(name)
    prepare(model)
    if recomputed:
        checkpoint_activations(model)
        no_dropout(model)
        model.train()
    prompts, completions = make()
    laid = group(prompts, completions, CPU)
    assert laid.for_attention(model.config, BF16).completion_mask is None
    check_unpadded(model, other, prompts, completions, 0.7, 2e-5)


def gradients(model, laid, device="cpu"):
    """Log-probabilities and all gradients of a training forward in bfloat16, as one row each."""
    model.zero_grad()
    with torch.autocast(device, BF16):
        logp, _ = token_logprobs(model, laid, 1.0)
    weights = torch.randn(logp.shape, generator=torch.Generator().manual_seed(1))
    (weights.to(logp.device) * logp).sum().backward()
    return logp.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


def alike(one, other):
    """Both round to bfloat16, at places of their own."""
    torch.testing.assert_close(one[0], other[0], rtol=0, atol=0.1)
    assert torch.cosine_similarity(one[1], other[1], dim=0) > 0.995
    assert 0.97 < one[1].norm() / other[1].norm() < 1.03


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("make", [data, data_that_opens_alike])
def test_in_bfloat16_it_is_the_masked_attention(make, name):
    model = small_model(name)
    prepare(model)
    laid = group(*make(), CPU)
    masked = gradients(model, laid)
    with emulated():
        alike(gradients(model, laid), masked)


def test_queries_and_keys_of_unlike_lengths_end_together(flash):
    """What flash attention means by causal, and what keys that do not count are."""
    query, key, value = (torch.randn(n, h, 8) for n, h in ((3, 4), (7, 2), (7, 2)))
    starts = [torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 3], [0, 2, 7])]
    out, _ = attend(query, key, value, Sequences(*starts, (2, 5), causal=True), None)
    last, _ = attend(query[2:], key[2:], value[2:], one(1, 5), None)
    before, _ = attend(query[1:2], key[2:6], value[2:6], one(1, 4), None)
    torch.testing.assert_close(out[1:], torch.cat((before, last)))
    used = torch.tensor([2, 4], dtype=torch.int32)
    few = Sequences(torch.tensor([0, 1, 2], dtype=torch.int32), starts[1], (1, 5), causal=False)
    out, _ = attend(query[:2], key, value, few, None, used)
    fewer, _ = attend(query[1:2], key[2:6], value[2:6], one(1, 4), None)
    torch.testing.assert_close(out[1:], fewer)


def one(queries, keys):
    starts = (torch.tensor([0, n], dtype=torch.int32) for n in (queries, keys))
    return Sequences(*starts, (queries, keys), causal=True)


def test_no_key_is_copied_for_a_completion(flash):
    """What goes into the kernels are tokens once each, and key heads as the model has them."""
    seen, inner = [], varlen.attend
    model = small_model("qwen2")
    prepare(model)

    def attend(query, key, value, *others):
        seen.append((query.shape, key.shape))
        return inner(query, key, value, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "attend", attend)
        token_logprobs(model, group([[5] * 30] * 2, [[[7] * 25] * 4] * 2, CPU), 1.0)
    tokens, own, prompts = 2 * (30 + 4 * 25), 2 * 4 * 25, 2 * 30
    of_layer = [((tokens, 4, 8), (tokens, 2, 8)), ((own, 4, 8), (prompts, 2, 8))]
    assert seen == of_layer * 2


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("opening", [0, 60])
def test_activations_are_estimated(opening, name, flash):
    """Beside the tensors that autograd keeps: no mask, no copies of keys."""
    model, kept = small_model(name), {}
    prepare(model)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    prompts = [[*[5] * opening, first, *[5] * 29] for first in (6, 7)]
    laid = group(prompts, [[[7] * 25] * 4] * 2, CPU)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", BF16),
    ):
        token_logprobs(model, laid, 1.0)
    counted = sum(size for size, _ in kept.values())
    counted -= 2 * sum(parameter.numel() for parameter in model.parameters())  # autocast's copies
    batch = BatchShape(2, opening + 30, 8, 25, BF16, opening)
    assert counted < activation_bytes(model, batch, False) < 1.4 * counted


def test_dropout_is_refused(flash):
    model = small_model("llama").train()
    model.config._attn_implementation = logprobs.ATTENTION
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(AssertionError, match="has no dropout"):
        token_logprobs(model, group(*data(), CPU), 1.0)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_masked_attention_stays_where_there_is_no_flash(kind, monkeypatch):
    """On a CPU, in float32, for heads that the kernel does not take, and where PyTorch says no."""
    config, asked = small_model("qwen2").config, []
    device = torch.device(kind)
    assert not has_flash(config, device, torch.float32)
    monkeypatch.setattr(varlen, "_has_flash", lambda *found: asked.append(found) or False)
    assert not has_flash(config, device, BF16)
    assert asked == ([] if kind == "cpu" else [(device, BF16, 4, 2, 8)])
    config.head_dim = 12
    assert not has_flash(config, device, BF16)
    assert len(asked) == (kind == "cuda"), "PyTorch is not asked about such heads"


@pytest.mark.gpu
@needs_ampere
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_on_a_gpu_it_is_the_masked_attention(name, monkeypatch):
    model = small_model(name).cuda()
    prepare(model)
    laid = group(*data(), torch.device("cuda"))
    assert has_flash(model.config, torch.device("cuda"), BF16), "sm_80 and later have it"
    fast = gradients(model, laid, "cuda")
    monkeypatch.setattr(varlen, "has_flash", lambda *_: False)
    alike(fast, gradients(model, laid, "cuda"))


@pytest.mark.gpu
@needs_ampere
@pytest.mark.parametrize(("queries", "keys"), [(1, 5), (3, 7), (64, 300), (300, 300)])
@pytest.mark.parametrize("causal", [True, False])
def test_on_a_gpu_the_kernel_is_what_the_tests_compute(queries, keys, causal):
    """Alignment of causal sequences, grouped keys, and keys that do not count."""
    draw = torch.Generator().manual_seed(0)
    shapes = ((2 * queries, 4, 64), (2 * keys, 2, 64), (2 * keys, 2, 64))
    inputs = [torch.randn(shape, generator=draw).to(BF16) for shape in shapes]
    starts = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (queries, keys)]
    for used in (None, torch.tensor([keys, max(queries, keys - 2)], dtype=torch.int32)):
        settings = (queries, keys, 0.0, causal, False)
        slow, slow_total, *_ = forward(*inputs, *starts, *settings, seqused_k=used)
        sequences = Sequences(*(x.cuda() for x in starts), (queries, keys), causal)
        counted = None if used is None else used.cuda()
        out, total = attend(*(x.cuda() for x in inputs), sequences, None, counted)
        torch.testing.assert_close(out.cpu().float(), slow.float(), rtol=0, atol=0.03)
        torch.testing.assert_close(total.cpu().view(-1), slow_total.view(-1), rtol=0, atol=0.02)


def test_spans_are_those_of_the_layout():
    """Rows of a prompt and its completions, one behind the other."""
    laid = span([[2, 1, 3], [1, 2, 2]], 0, CPU)
    assert laid.own.queries.tolist() == [0, 2, 3, 6, 7, 9, 11]
    [look] = laid.looks
    assert look.sequences.queries.tolist() == [0, 4, 8]
    assert look.sequences.keys.tolist() == [0, 2, 3]
    assert look.keys.tolist() == [0, 1, 6]
    assert look.queries.tolist() == [2, 3, 4, 5, 7, 8, 9, 10]
    assert (laid.own.longest, look.sequences.longest) == ((3, 3), (4, 2))
    query = torch.randn(11, 2, 8, requires_grad=True)
    with emulated():
        InGroups.apply(query, query, query, laid, None).sum().backward()
    assert query.grad.isfinite().all()


def test_spans_of_prompts_that_begin_alike():
    """The first row has the opening; the others look at it with all that they have."""
    own, (to_prompt, to_opening) = (laid := span([[4, 1], [3, 2]], 2, CPU)).own, laid.looks
    assert own.queries.tolist() == [0, 4, 5, 6, 8]
    assert to_prompt.keys.tolist() == [0, 1, 2, 3, 5]
    assert to_prompt.sequences.keys.tolist() == [0, 4, 5]
    assert to_opening.queries.tolist() == [5, 6, 7]
    assert to_opening.keys.tolist() == [0, 1]
    assert to_opening.sequences.longest == (3, 2)
