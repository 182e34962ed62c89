"""Log-probabilities of given completions: each prompt is computed once per group, without padding,
and the vocabulary in chunks.

A batch is laid out in places [prompts, P + G * C]: a row is one prompt (right-aligned in P) and
then its G completions (each left-aligned in C). The model computes the tokens of all rows as one
sequence without the empty places. Only attention lays them out, so that a completion attends to its
prompt and to itself, never to another. Positions continue from the prompt. The common opening of
all prompts, such as instructions and worked examples (`find_opening`), is computed only in the
first row, and laid out in each. The forward equals that of G separate rows [prompt, completion],
with a fraction of the tokens (as PrefixGrouper, arXiv:2506.05433, for FlashAttention). Models with
recurrent layers use recurrent.py instead.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from common.config import ConfigError, SamplingConfig
from common.device import autocast_of, dtype_of, exact_float32, target_of
from common.distributed import sharding_of
from common.model import attention, recurrent, varlen
from common.model.masks import Window, additive, causal, find_window, keeps_states
from common.model.precision_copies import evaluating
from common.model.prompts import find_opening
from common.model.token_filters import keep_drawable
from common.model.transfer import to_device
from common.model.wide_layers import has_wide_head
from common.system import first_line

log = logging.getLogger("clutch")

ATTENTION = "clutch_shared_prompt"
# Logits in memory at a time, tokens x vocabulary. A chunk reads the head's weight three times and
# adds to its gradient once; on a GPU, where this dominates the time, chunks are larger.
LOGITS = {"cpu": 1 << 24, "cuda": 1 << 28}
# The factor of memory that top_p, top_k and min_p take, since they sort the vocabulary.
CUTS = 4
LEAST = -1e4  # a log-probability whose exponential is 0


@dataclass(frozen=True)
class Groups:
    """n prompts with up to G completions each, of at most P and C tokens; T tokens in all, N of
    them in completions.

    Attributes:
        ids: int64 [1, T] token ids, row by row.
        positions: int64 [1, T] position ids.
        places: int64 [T], the place of each token among n * (P + G * C), the first one if it has
            several; None if all places are taken.
        copies: int64 [(n - 1) * opening], the places of the opening in the other rows; None = no
            opening.
        mask: bool [n * G, C], True on real completion tokens.
        slots: int64 [N], the indices of those in the flat mask.
        targets: int64 [N], the ids of the real completion tokens.
        predictors: int64 [N], the index among the T tokens of the predecessor that predicts each.
        lengths: the tokens of each prompt and of its completions, by row; 0 for absent completions.
        opening: the number of tokens that all prompts begin with.
        sizes: n, P, G, C.
        prompt_mask: additive mask [n, 1, P, P]; None if no prompt is padded.
        completion_mask: additive mask [n * G, 1, C, P + C].
        spans: the layout of flash attention, which needs no masks.
        window: the window of sliding attention, if a row is longer than it.
        near: both masks for layers of sliding attention. `for_attention` makes what the device
            needs.
    """

    ids: Tensor
    positions: Tensor
    places: Tensor | None
    copies: Tensor | None
    mask: Tensor
    slots: Tensor
    targets: Tensor
    predictors: Tensor
    lengths: list[list[int]]
    opening: int
    sizes: tuple[int, int, int, int]
    prompt_mask: Tensor | None = None
    completion_mask: Tensor | None = None
    spans: varlen.Spans | None = None
    window: Window | None = None
    near: tuple[Tensor, Tensor] | None = None

    def for_attention(self, config: Any, dtype: torch.dtype) -> "Groups":
        """Return the groups with the layout that attention needs: spans if the device has flash
        attention for the heads of `config` in `dtype`, else masks, which are made here once and not
        in each layer.
        """
        window = find_window(config, max(row[0] + max(row[1:]) for row in self.lengths))
        if window is None and varlen.has_flash(config, self.ids.device, dtype):
            return replace(self, spans=varlen.span(self.lengths, self.opening, self.ids.device))
        return self.masked(dtype, window)

    def masked(self, dtype: torch.dtype, window: Window | None = None) -> "Groups":
        """Return the groups with masks of `dtype`, made on the device."""
        device, (n, width, size, length) = self.ids.device, self.sizes
        [first] = to_device([torch.tensor([width - row[0] for row in self.lengths])], device)
        column, row = torch.arange(width, device=device), torch.arange(length, device=device)
        seen = column >= first[:, None, None]  # [n, 1, P], of a prompt's places
        prompt_mask = None
        if window or min(row[0] for row in self.lengths) < width:
            prompt_mask = causal(column, column, first, dtype)
        among_own = (row <= row[:, None]).expand(n, length, length)
        among_completion = torch.cat((seen.expand(n, length, width), among_own), dim=2)
        among_completion = additive(among_completion, dtype)
        completion_mask = among_completion.repeat_interleave(size, dim=0)[:, None]
        near = None
        if window is not None and prompt_mask is not None:
            place = torch.arange(width + length, device=device)
            back = place[:, None] - place  # tokens, as nothing is empty between two of them
            of_prompt = window.hide(prompt_mask, back[:width, :width])
            near = of_prompt, window.hide(completion_mask, back[width:])
        masks = {"prompt_mask": prompt_mask, "completion_mask": completion_mask}
        return replace(self, **masks, window=window, near=near)

    def take_apart(self) -> tuple[list[list[int]], list[tuple[int, list[int]]]]:
        """Return the token indices of each prompt, and of each real completion (number of its
        prompt, token indices).
        """
        prompts, completions, start = [], [], 0
        for number, (prompt, *lengths) in enumerate(self.lengths):
            opening = self.opening if number else 0
            prompts.append([*range(opening), *range(start, start + prompt - opening)])
            start += prompt - opening
            for length in filter(None, lengths):
                completions.append((number, list(range(start, start + length))))
                start += length
        return prompts, completions

    def lay_apart(self) -> tuple[Tensor, Tensor]:
        """Return rows of a prompt and one of its completions, int64 [rows, T], padded on the right,
        and the index among the rows * T tokens that predicts each real completion token, [N].
        """
        prompts, completions = self.take_apart()
        rows = [prompts[number] + tokens for number, tokens in completions]
        width = max(map(len, rows))
        padded = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        predictors = [
            place * width + len(prompts[number]) - 1 + torch.arange(len(tokens))
            for place, (number, tokens) in enumerate(completions)
        ]
        padded, before = to_device([padded, torch.cat(predictors)], self.ids.device)
        return self.ids[0][padded], before

    def near_of(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Return the masks of a layer with sliding attention; None for a layer with full
        attention.
        """
        return self.near if self.window is not None and self.window.sliding[layer] else None

    def lay_out(self, x: Tensor) -> Tensor:
        """Lay out tokens [1, heads, T, d] in their places, [n, heads, P + G * C, d], with zeros
        elsewhere.
        """
        n, prompt, size, length = self.sizes
        x = x.transpose(1, 2)[0]
        if self.places is not None:
            laid = x.new_zeros(n * (prompt + size * length), *x.shape[1:])
            laid.index_copy_(0, self.places, x)
            if self.copies is not None:
                # Not x[tokens], whose gradient would be a sum in the dtype of x.
                laid.index_copy_(0, self.copies, x[: self.opening].repeat(n - 1, 1, 1))
            x = laid
        return x.view(n, prompt + size * length, *x.shape[1:]).transpose(1, 2)

    def take_up(self, x: Tensor) -> Tensor:
        """Undo `lay_out`: [n, heads, P + G * C, d] -> [1, T, heads, d]."""
        x = x.transpose(1, 2).flatten(0, 1)
        return (x if self.places is None else x.index_select(0, self.places))[None]


def group(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[Sequence[int] | Tensor]],
    device: torch.device,
) -> Groups:
    """Lay out prompts and the completions of each prompt (token ids, none of them empty)."""
    n, size = len(prompts), max(map(len, completions))
    completions = [[*group, *[[]] * (size - len(group))] for group in completions]
    width = max(len(p) for p in prompts)
    length = max(len(c) for group in completions for c in group)
    ids = torch.zeros(n, width + size * length, dtype=torch.long)
    real = torch.zeros(ids.shape, dtype=torch.bool)  # False for tokens that another row computes
    opening = len(find_opening(prompts, 0.0))
    tokens = torch.tensor([len(p) for p in prompts])  # of each prompt
    for row, (prompt, group) in enumerate(zip(prompts, completions, strict=True)):
        skipped = opening if row else 0
        for start, part in [
            (width - len(prompt) + skipped, prompt[skipped:]),
            *((width + i * length, c) for i, c in enumerate(group)),
        ]:
            ids[row, start : start + len(part)] = torch.as_tensor(part)
            real[row, start : start + len(part)] = True
    first, column = width - tokens, torch.arange(width)
    own_positions = (tokens[:, None, None] + torch.arange(length)).expand(n, size, length)
    positions = torch.cat((column - first[:, None], own_positions.flatten(1)), dim=1)
    mask = real[:, width:].reshape(n, size, length)
    number = (real.flatten().cumsum(0) - 1).view(real.shape)  # of the token at each place
    of_completions = number[:, width:].view(n, size, length)
    before = torch.cat(
        (number[:, width - 1, None, None].expand(n, size, 1), of_completions[:, :, :-1]), dim=2
    )
    again = (torch.arange(1, n) * ids.shape[1] + first[1:])[:, None] + torch.arange(opening)
    # All tensors on the host are copied to the device in one transfer.
    places, slots = real.flatten().nonzero()[:, 0], mask.flatten().nonzero()[:, 0]
    laid = [ids[real][None], positions[real][None], places, slots, ids[:, width:][mask.flatten(1)]]
    moved = to_device([*laid, before[mask], again.flatten()], device)
    ids, positions, places, slots, targets, predictors, copies = moved
    filled = torch.zeros(n * size * length, dtype=torch.bool, device=device)
    return Groups(
        ids=ids,
        positions=positions,
        places=None if len(places) == real.numel() else places,
        copies=copies if opening else None,
        mask=filled.index_fill_(0, slots, True).view(n * size, length),
        slots=slots,
        targets=targets,
        predictors=predictors,
        lengths=[[len(p), *map(len, cs)] for p, cs in zip(prompts, completions, strict=True)],
        opening=opening,
        sizes=(n, width, size, length),
    )


# The parameters are those that transformers passes.
def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    groups: Groups | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend for a layer of the model, over the layout of `groups`: q, k, v [1, heads, T, size].

    Without `groups` (sampling, plain forwards) it is transformers' own attention.
    """
    if groups is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **others
        )
    return _in_groups(module, query, key, value, groups, scaling, dropout)


def _attend_in_groups(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    groups: Groups,
    scaling: float | None,
    dropout: float,
) -> tuple[Tensor, None]:
    if groups.spans is not None:
        assert not dropout, "flash attention over spans has no dropout: optim.no_dropout"
        query, key, value = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
        return varlen.InGroups.apply(query, key, value, groups.spans, scaling)[None], None
    n, prompt, size, length = groups.sizes
    # A rotary embedding in float32 has widened queries and keys.
    query, key, value = (groups.lay_out(x.to(value.dtype)) for x in (query, key, value))
    masks = groups.prompt_mask, groups.completion_mask
    if near := groups.near_of(int(module.layer_idx)):  # type: ignore[arg-type]
        masks = near
    elif attention.fits(query, value, dropout):
        out = attention.SharedPrompt.apply(query, key, value, *masks, groups.sizes, scaling)
        return groups.take_up(out).contiguous(), None
    if key.shape[1] != query.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, scale=scaling, is_causal=mask is None
        )

    def rows(x: Tensor) -> Tensor:  # [n, h, G * C, d] -> [n * G, h, C, d]
        return x[:, :, prompt:].unflatten(2, (size, length)).transpose(1, 2).flatten(0, 1)

    def prefixed(
        x: Tensor,
    ) -> Tensor:  # the prompt's keys, then the completion's: [n * G, h, P + C, d]
        shared = (
            x[:, None, :, :prompt].expand(n, size, *x.shape[1:2], prompt, x.shape[3]).flatten(0, 1)
        )
        return torch.cat((shared, rows(x)), dim=2)

    of_prompt = attend(query[:, :, :prompt], key[:, :, :prompt], value[:, :, :prompt], masks[0])
    of_rows = attend(rows(query), prefixed(key), prefixed(value), masks[1])
    of_rows = of_rows.unflatten(0, (n, size)).transpose(1, 2).flatten(2, 3)  # [n, h, G * C, d]
    return groups.take_up(torch.cat((of_prompt, of_rows), dim=2)).contiguous(), None


_in_groups: Any = _attend_in_groups


def leave_uncompiled() -> None:
    """Exclude the attention over `Groups` from torch.compile, since its lengths differ at each
    step.
    """
    global _in_groups
    if _in_groups is _attend_in_groups:  # the compiler takes seconds to import
        _in_groups = torch.compiler.disable(_attend_in_groups)


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def prepare(model: PreTrainedModel, alone: bool = True) -> None:
    """Make `model` support `Groups`, permanently, since a checkpointed layer runs again in the
    backward pass.

    A model whose attention cannot be replaced keeps its own, and computes one row of prompt and
    completion per completion.
    Args: alone: whether no other rank holds a part of the weights; else such a model is refused, as
    ranks might not agree.
    Raises: ConfigError if its log-probabilities would not be the model's own; a rank that has no
    weights yet leaves the check to rank 0.
    """
    own, model.config._attn_implementation = model.config._attn_implementation, ATTENTION
    here = model.device.type != "meta"
    gap = "model.attention=eager" if own == "eager" else find_gap(model) if here else None
    if gap is None:
        return
    if alone:
        model.config._attn_implementation = own
        model.__dict__["rows_apart"] = True
        if not here or find_gap(model) is None:
            log.info("log-probabilities take a row for each completion, with its prompt: %s", gap)
            return
    raise ConfigError(
        f"{type(model).__name__} scales its logits or attends in a way that log-probabilities"
        f" {'here' if alone else 'with opt=fsdp'} do not follow ({gap}). Use a Llama, Qwen2, Qwen3,"
        " GPT-2 or similar model, or an algorithm without gradients."
    )


def is_apart(model: PreTrainedModel) -> bool:
    """Return whether every completion has a row of its own in training, with its prompt."""
    return keeps_states(model.config) or "rows_apart" in model.__dict__


def hidden_states(model: PreTrainedModel, groups: Groups) -> Tensor:
    """Return the hidden states that predict each real completion token: [N, d]."""
    prepared = model.config._attn_implementation == ATTENTION or is_apart(model)
    assert prepared, "call prepare(model) first"
    kind = groups.ids.device.type
    half = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if half else dtype_of(model)
    if recurrent.goes_on(model):
        return recurrent.hidden_states(model, groups, dtype)
    if is_apart(model):
        ids, before = groups.lay_apart()
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        rows = model.base_model(input_ids=ids, position_ids=positions, use_cache=False)
        return rows.last_hidden_state.flatten(0, 1)[before]
    groups = groups.for_attention(model.config, dtype)
    states = model.base_model(
        input_ids=groups.ids,
        position_ids=groups.positions,
        # Any 4-d tensor, so that the model makes no mask. Attention uses the masks of `groups`.
        attention_mask=groups.ids[None, None],
        use_cache=False,
        groups=groups,
    ).last_hidden_state
    # Not index_select: the last token of a prompt predicts for each completion, and its gradient
    # would be added in any order on CUDA.
    return states[0][groups.predictors]


def token_logprobs(
    model: PreTrainedModel,
    groups: Groups,
    temperature: float,
    cuts: SamplingConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each completion token and the entropy of its distribution, both
    float32 [n * G, C], 0 on padding.

    At most `LOGITS` logits exist at a time.
    Args:
        temperature: divides the logits: the temperature of sampling, or 1 for greedy runs.
        cuts: sampling settings whose top_p, top_k and min_p restrict the distribution; None = no
            restriction.
    """
    return sharding_of(model).inside(_token_logprobs, groups, temperature, cuts)


def _token_logprobs(
    model: PreTrainedModel, groups: Groups, temperature: float, cuts: SamplingConfig | None
) -> tuple[Tensor, Tensor]:
    states = hidden_states(model, groups)
    shape, length = groups.mask.shape, groups.mask.shape[1]
    place = groups.slots // length, groups.slots % length
    values_of_tokens = head_logprobs(model, states, groups.targets, temperature, cuts)
    logp, entropy = (
        values.new_zeros(shape).index_put(place, values) for values in values_of_tokens
    )
    return logp, entropy


def match_backward_passes(model: PreTrainedModel, passes: int, device: torch.device) -> None:
    """Make `passes` forward and backward passes with zero gradients on a sharded model, since all
    ranks must make the same number of passes.
    """
    for _ in range(passes):
        with autocast_of(model):
            logp, _entropy = token_logprobs(model, group([[0]], [[[0]]], device), 1.0)
        (0.0 * logp.sum()).backward()


def head_logprobs(
    model: PreTrainedModel,
    states: Tensor,
    ids: Tensor,
    temperature: float,
    cuts: SamplingConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of `ids` [N] after hidden states [N, d], and the entropy of their
    distributions, both float32 [N].
    """
    kind = states.device.type
    if has_wide_head(model):
        states = states.float()
    elif torch.is_autocast_enabled(kind):
        # Cast here, once: the backward pass runs outside autocast and must make the logits of the
        # forward again.
        states = states.to(torch.get_autocast_dtype(kind))
    head: Any = model.get_output_embeddings()
    bias, cuts = getattr(head, "bias", None), cuts if cuts and cuts.cuts else None
    temperature /= scale_of_logits(model.config)
    drawn = Drawn(temperature, cuts, getattr(model.config, "final_logit_softcapping", None))
    with torch.autocast(kind, enabled=False):  # states have the dtype of the products
        return _HeadLogprobs.apply(states, head.weight, bias, ids, drawn)


def scale_of_logits(config: Any) -> float:
    """Return the factor that a model multiplies its logits by (Granite, Cohere, Falcon-H1)."""
    if divisor := getattr(config, "logits_scaling", None):
        return 1 / divisor
    factors = (getattr(config, name, None) for name in ("logit_scale", "lm_head_multiplier"))
    return next(filter(None, factors), 1.0)


@dataclass(frozen=True)
class Drawn:
    """The distribution of a token, given the products of its hidden state with the head's weight.

    Attributes:
        temperature: divides the logits.
        cuts: sampling settings that exclude some tokens; None = all tokens.
        cap: the cap of the logits, as in Gemma 4: cap * tanh(logit / cap); None = no cap.
    """

    temperature: float
    cuts: SamplingConfig | None
    cap: float | None

    def logits(self, products: Tensor, ids: Tensor) -> Tensor:
        """Return the logits [n, V] of the distribution that `ids` were drawn from."""
        logits = products
        if self.cap is not None:
            logits = logits.float().div_(self.cap).tanh_().mul_(self.cap)
        logits = logits if self.temperature == 1 else logits.float().div_(self.temperature)
        return logits if self.cuts is None else keep_drawable(logits, ids, self.cuts)

    def slope(self, logits: Tensor) -> Tensor | None:
        """Return the derivative of the cap, 1 - tanh^2; None without a cap. Excluded tokens have an
        infinite logit and no gradient.
        """
        if self.cap is None:
            return None
        bound = self.cap / self.temperature
        return 1 - logits.float().clamp(min=-bound).div_(bound).square_()


class _HeadLogprobs(torch.autograd.Function):
    """The output layer, log-softmax and entropy in chunks of tokens; the backward pass recomputes
    the logits.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        drawn: Drawn,
    ) -> tuple[Tensor, Tensor]:
        """states [N, d], weight [V, d], ids [N] -> logp [N], entropy [N], float32."""
        weight, bias = weight.to(states.dtype), None if bias is None else bias.to(states.dtype)
        logp = states.new_empty(len(ids), dtype=torch.float32)
        entropy = torch.empty_like(logp)
        for part in _chunks(len(ids), weight, drawn.cuts):
            logits = drawn.logits(F.linear(states[part], weight, bias), ids[part])
            log_softmax = torch.log_softmax(logits, dim=1, dtype=torch.float32)
            logp[part] = log_softmax.gather(1, ids[part, None])[:, 0]
            softmax = log_softmax.exp_()
            entropy[part] = torch.special.entr(softmax, out=softmax).sum(1)
            del logits, log_softmax, softmax  # before the next ones are made
        ctx.save_for_backward(states, weight, ids, entropy)
        ctx.bias, ctx.drawn = bias, drawn
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """d logp / d logits = onehot - p; d entropy / d logits = -p (log p + entropy).

        A gradient is None if the loss does not use the value: an entropy that is only logged costs
        no pass over the vocabulary.
        """
        states, weight, ids, entropy = ctx.saved_tensors
        grad_logp = torch.zeros_like(entropy) if grad_logp is None else grad_logp
        grad_states = torch.empty_like(states)
        grad_weight = (
            torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
            if ctx.needs_input_grad[1]
            else None
        )
        grad_bias = (
            torch.zeros(weight.shape[0], device=weight.device) if ctx.bias is not None else None
        )
        drawn: Drawn = ctx.drawn
        for part in _chunks(len(ids), weight, drawn.cuts):
            logits = drawn.logits(F.linear(states[part], weight, ctx.bias), ids[part])
            slope, target = drawn.slope(logits), ids[part, None]
            of_logp = grad_logp[part, None] / drawn.temperature
            if grad_entropy is None:
                grad = _grad_of_logp(logits, target, of_logp, states.dtype)
                del logits
            else:
                of_entropy = grad_entropy[part, None] / drawn.temperature
                log_softmax = torch.log_softmax(logits, dim=1, dtype=torch.float32)
                log_softmax.clamp_(min=LEAST)  # of a token that is never drawn, times 0
                del logits
                of_logits = (log_softmax + entropy[part, None]).mul_(of_entropy).add_(of_logp)
                grad = of_logits.mul_(log_softmax.exp_()).neg_()
                grad = grad.scatter_add_(1, target, of_logp).to(states.dtype)
                del log_softmax, of_logits
            if slope is not None:
                grad *= slope
            grad_states[part] = grad @ weight
            if grad_weight is not None:
                _add_product(grad_weight, grad.T, states[part])
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            del grad  # before the next one is made
        return grad_states, grad_weight, grad_bias, None, None


def logits_bytes(model: PreTrainedModel, tokens: int, sampling: SamplingConfig) -> float:
    """Return the bytes of the logits of `tokens` tokens and of the temporaries of their softmax, of
    which only a bounded number exist at a time.
    """
    held = LOGITS["cpu" if target_of(model).type == "cpu" else "cuda"]
    each = 14.0 if getattr(model.config, "final_logit_softcapping", None) else 10.0
    return each * min(tokens * model.config.vocab_size * (CUTS if sampling.cuts else 1), held)


def _chunks(tokens: int, weight: Tensor, cuts: SamplingConfig | None) -> list[slice]:
    size = max(1, LOGITS[weight.device.type] // (CUTS if cuts else 1) // weight.shape[0])
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total`, float32. Only on a CPU is the product rounded to 16
    bits first.
    """
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _grad_of_logp(logits: Tensor, target: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Return grad * (onehot - p) [n, V] in `dtype`, in two passes over the vocabulary. The target's
    entry, whose p may be near 1, is rounded once.

    Args: target, grad: [n, 1].
    """
    softmax = torch.softmax(logits, dim=1, dtype=torch.float32)
    of_target = (grad * (1 - softmax.gather(1, target))).to(dtype)
    out = softmax if dtype == softmax.dtype else torch.empty_like(softmax, dtype=dtype)
    return torch.mul(softmax, -grad, out=out).scatter_(1, target, of_target)


def find_gap(model: PreTrainedModel) -> str | None:
    """Compare the log-probabilities with the model's own logits on a small input. Return the
    difference as text; None if they agree.

    Some architectures transform their logits, or have an attention of their own: an error is better
    than wrong results.
    """
    device = next(model.parameters()).device
    head: Any = model.get_output_embeddings()
    vocabulary = head.weight.shape[0]
    ids = (torch.arange(12) * 7 + 3) % vocabulary
    prompts = [ids[:3].tolist(), ids[3:5].tolist()]
    completions = [[ids[5:8].tolist(), ids[8:9].tolist()]] * 2
    with torch.no_grad(), exact_float32(), evaluating(model):
        try:
            logp, _ = token_logprobs(model, group(prompts, completions, device), 1.0)
        # An attention of the model's own may fail in any way on this layout.
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            if any(word in str(error) for word in ("CUDA", "memory")):
                raise
            return first_line(error)
        for row in range(4):
            prompt, completion = prompts[row // 2], completions[row // 2][row % 2]
            whole = torch.tensor([prompt + completion], device=device)
            logits = model(input_ids=whole, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
            wanted = torch.log_softmax(logits, 1).gather(1, whole[0, len(prompt) :, None])[:, 0]
            gap = (logp[row, : len(completion)] - wanted).abs().max().item()
            # 16 bits round a logit to a share of its size, and so do the layers before it.
            rounding = max(0.2, logits.abs().max().item() / 32)
            if not gap < (1e-3 if model.dtype == torch.float32 else rounding):
                return f"off by {gap:.2g}"
    return None
