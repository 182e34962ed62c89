"""Completions in progress. Their tokens are drawn by the inverse CDF of keyed uniform numbers."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.config import SamplingConfig
from common.engine import Completions
from common.model import cut

# Tokens per block: a draw first searches the sums of blocks.
BLOCK = 256
# The number of probabilities that stay in a CPU's cache while tokens are drawn from them.
IN_CACHE = 16 * 49152
BUFFERS = (
    *("place", "running", "count", "limit", "last", "witness"),
    *("tokens", "logprobs", "uniforms"),
)


@dataclass
class Rows:
    """The completions in progress, one per row of a forward, in buffers that are written in place.

    Attributes:
        sampling: the sampling settings.
        stop_ids: the ids of tokens that end a row.
        pad_id: the id of the padding token.
        place: int64 [R], the row of `Completions` that each row is written to when it ends.
        running: bool [R], whether the row has not ended.
        count: int64 [R], the tokens so far.
        limit: int64 [R], the most tokens, read by a recorded step, so that it serves calls of any
            length.
        last: int64 [R], the newest token.
        witness: float32 [R], a sum that is finite as long as the logits are.
        tokens: int64 [R, L + 1] token ids; full rows write to the column after their limit.
        logprobs: float32 [R, L + 1], log-probabilities of the tokens; None if not requested.
        uniforms: float32 [R, L + 1], the numbers that tokens are drawn with; None for greedy
            tokens.
    """

    sampling: SamplingConfig
    stop_ids: Tensor
    pad_id: int
    place: Tensor
    running: Tensor
    count: Tensor
    limit: Tensor
    last: Tensor
    witness: Tensor
    tokens: Tensor
    logprobs: Tensor | None
    uniforms: Tensor | None

    @classmethod
    def allocate(cls, rows: int, sampling: SamplingConfig, stop_ids: Tensor, pad_id: int) -> "Rows":
        """Allocate all buffers, for rows that are not running."""
        columns, device = sampling.max_new_tokens + 1, stop_ids.device
        # Not views of one tensor: a compiled step depends on the storage offset of `last`.
        place, count, limit, last = (
            torch.zeros(rows, dtype=torch.long, device=device) for _ in range(4)
        )
        logprobs, uniforms = torch.zeros(2, rows, columns, device=device)
        running = torch.zeros(rows, dtype=torch.bool, device=device)
        witness = torch.zeros(rows, device=device)
        tokens = torch.full((rows, columns), pad_id, device=device)
        buffers = (place, running, count, limit, last, witness, tokens, logprobs, uniforms)
        return cls(sampling, stop_ids, pad_id, *buffers)

    def view(self, rows: int, sampling: SamplingConfig, logprobs: bool) -> "Rows":
        """Return the first `rows` rows for another call, with at most as many tokens; no row is
        running.
        """
        self.running.fill_(False)
        self.count.zero_()
        view = self._each(lambda buffer: buffer[:rows])
        view.sampling = sampling
        view.logprobs = view.logprobs if logprobs else None
        view.uniforms = view.uniforms if sampling.temperature > 0 else None
        return view

    def begin(self, rows: Tensor, place: Tensor, uniforms: Tensor | None, logits: Tensor) -> None:
        """Begin completions in `rows`, with tokens that are drawn from `logits` [n, V].

        Args: uniforms: float32 [n, L]; None = greedy.
        """
        new = self._each(lambda buffer: torch.zeros_like(buffer[rows]))
        new.place.copy_(place)
        new.running.fill_(True)
        new.limit.fill_(self.sampling.max_new_tokens)
        new.tokens.fill_(self.pad_id)
        if new.uniforms is not None and uniforms is not None:
            new.uniforms[:, : uniforms.shape[1]] = uniforms
        new.write(logits)
        for name in BUFFERS:
            if (buffer := getattr(self, name)) is not None:
                buffer[rows] = getattr(new, name)

    def write(self, logits: Tensor) -> None:
        """Draw a token for every row from `logits` [R, V]. Rows that have ended are computed until
        the next look; their tokens are discarded.
        """
        step = self.count[:, None]
        uniform = None if self.uniforms is None else self.uniforms.gather(1, step)[:, 0]
        token, logprob, witness = draw(logits, self.sampling, uniform, self.logprobs is not None)
        # One sum per step; it is checked once, at the end.
        self.witness += torch.where(self.running, witness.float(), 0.0)
        self.tokens.scatter_(1, step, torch.where(self.running, token, self.pad_id)[:, None])
        if self.logprobs is not None and logprob is not None:
            self.logprobs.scatter_(1, step, torch.where(self.running, logprob, 0.0)[:, None])
        self.last.copy_(token)
        self.count += self.running
        self.running &= self.count < self.limit
        self.running &= ~self._is_stop(token)

    def finish(self, rows: Tensor, completions: Completions) -> None:
        """Write the completions of `rows` to their places in `completions`."""
        most = self.sampling.max_new_tokens
        place, tokens, count = self.place[rows], self.tokens[rows, :most], self.count[rows]
        completions.tokens[place] = tokens
        completions.lengths[place] = count
        completions.finished[place] = self._is_stop(tokens.gather(1, count[:, None] - 1)[:, 0])
        completions.broken[place] = ~torch.isfinite(self.witness[rows])
        if completions.logprobs is not None and self.logprobs is not None:
            completions.logprobs[place] = self.logprobs[rows, :most]

    def keep(self, rows: Tensor) -> "Rows":
        """Move `rows` to the beginning of the buffers, in their order, and return only these."""

        def move(buffer: Tensor) -> Tensor:
            buffer[: len(rows)] = buffer[rows]
            return buffer[: len(rows)]

        return self._each(move)

    def _is_stop(self, token: Tensor) -> Tensor:
        return (token[:, None] == self.stop_ids).any(1)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Rows":
        buffers = {name: getattr(self, name) for name in BUFFERS}
        return replace(self, **{n: change(b) for n, b in buffers.items() if b is not None})


def draw_floats(sampling: SamplingConfig) -> int:
    """Return the floats per vocabulary entry and row that `draw` allocates in addition to the
    logits.
    """
    if sampling.temperature == 0:
        return 0
    return 4 if sampling.top_k else 2 + 5 * (sampling.top_p < 1) + 2 * (sampling.min_p > 0)


def draw(
    logits: Tensor, sampling: SamplingConfig, uniform: Tensor | None, want_logprob: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Draw one token per row by the inverse CDF of the tempered, and possibly truncated,
    distribution.

    Args:
        logits: [n, V].
        uniform: float32 [n] in [0, 1); None = greedy.
    Returns: the token, int64 [n]; its log-probability, float32 [n], under the same distribution
    (greedy: under the plain one), or None; and a witness [n] that is finite if the row's logits
    are. The witness of a greedy token is its logit; else it is a probability, since a softmax over
    a NaN or infinity is NaN throughout.
    """
    if uniform is None:
        largest, token = logits.max(-1)
        logprob = largest.float() - logits.float().logsumexp(-1) if want_logprob else None
        return token, logprob, largest
    most = max(1, IN_CACHE // logits.shape[1])
    if logits.device.type != "cpu" or len(logits) <= most:
        return _draw(logits, sampling, uniform, want_logprob)
    pairs = zip(logits.split(most), uniform.split(most), strict=True)
    parts = [_draw(rows, sampling, u, want_logprob) for rows, u in pairs]
    tokens, logprobs, witnesses = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs) if want_logprob else None, torch.cat(witnesses)


def _draw(
    logits: Tensor, sampling: SamplingConfig, uniform: Tensor, want_logprob: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    if sampling.temperature != 1:
        logits = logits.float() / sampling.temperature
    policy = probability = torch.softmax(logits, dim=-1, dtype=torch.float32)
    witness = policy[:, 0]
    if sampling.cuts:
        policy = probability = cut(probability, sampling)
    token = invert_cdf(probability, uniform)
    logprob = None
    if want_logprob:
        logprob = policy.gather(1, token[:, None])[:, 0].log()
        if sampling.cuts:
            logprob = logprob - policy.sum(-1).log()
    return token, logprob, witness


def invert_cdf(probability: Tensor, uniform: Tensor) -> Tensor:
    """Return per row the first token at which the running sum exceeds the share `uniform` of the
    total: int64 [n].

    The sums of blocks of tokens are searched first, so that only one block is summed token by
    token. A token of probability zero is never drawn.
    Args: probability: [n, V], which need not sum to 1; uniform: [n] in [0, 1).
    """
    n, vocabulary = probability.shape
    whole = vocabulary // BLOCK * BLOCK
    sums = probability[:, :whole].view(n, whole // BLOCK, BLOCK).sum(-1)
    if whole < vocabulary:
        sums = torch.cat((sums, probability[:, whole:].sum(-1, keepdim=True)), dim=1)
    block, rest = _first_beyond(sums, uniform * sums.sum(-1))
    inside = block[:, None] * BLOCK + torch.arange(BLOCK, device=block.device)
    tokens = probability.gather(1, inside.clamp(max=vocabulary - 1))
    place, _ = _first_beyond(tokens.masked_fill_(inside >= vocabulary, 0.0), rest)
    return (block * BLOCK + place).clamp_(max=vocabulary - 1)  # NaN leads anywhere


def _first_beyond(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index at which the running sum of `weights` [n, m] first exceeds `target` [n], and
    the target minus the sum before that index.
    """
    if weights.is_cuda and len(weights) == 1:  # a single row is summed up in any order there
        place, rest = _first_beyond(weights.expand(2, -1), target.expand(2))
        return place[:1], rest[:1]
    running = weights.cumsum(-1)
    # Rounding may raise a target to the total, which no running sum exceeds.
    below = torch.nextafter(running[:, -1], running.new_zeros(()))
    target = torch.minimum(target, below)[:, None]
    place = torch.searchsorted(running, target, right=True).clamp_(max=weights.shape[1] - 1)
    before = running.gather(1, place) - weights.gather(1, place)
    return place[:, 0], (target - before).clamp_(min=0)[:, 0]
