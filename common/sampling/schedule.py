"""One call of `generate`: assigns requests to rows, from the first prefill to the last token.

Every member of a population has the same number of slots and the same queue of requests. A finished
row's slot goes to the next request; when the queue is empty, slots are dropped.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from common.engine import Completions, Requests, Watch
from common.model import Mask, to_device
from common.sampling.flash import FlashCache
from common.sampling.kv_cache import ColumnCache
from common.sampling.prefill import Prefill, PromptCache
from common.sampling.random import token_uniforms
from common.sampling.slots import Rows
from common.sampling.stops import StopTexts, StopWatch
from common.sampling.turn_cache import TurnCache

# All rows wait during a refill, so it is delayed until this share of the slots is free.
REFILL_SHARE = 1 / 8
# Steps between checks for finished rows; on a CPU a check costs nothing, on CUDA it waits for the
# device.
LOOK_EVERY = {"cpu": 1, "cuda": 8}

RowCache = ColumnCache | FlashCache
# The model's forward of a token per row: tokens [rows], additive mask, positions [rows] and cache
# -> logits [rows, V].
Forward = Callable[[Tensor, Mask, Tensor, RowCache], Tensor]


class Schedule:
    """Runs the requests of one call in `rows`, the same number per member.

    Request q of a member is sample q % samples of prompt q // samples; its completion is row member
    * requests + q.
    """

    def __init__(
        self,
        requests: Requests,
        rows: Rows,
        cache: RowCache,
        prefill: Prefill,
        forward: Forward,
        watch: Watch | None,
        stops: StopTexts | None = None,
    ) -> None:
        self.stops = StopWatch(stops) if stops else None
        self.rows, self.cache, self.prefill, self.forward = rows, cache, prefill, forward
        self.prompts, self.samples, self.watch = requests.prompts, requests.samples, watch
        self.members, self.requests = requests.members, requests.each * self.samples
        self.apart = requests.each if requests.apart else 0  # prompts between those of two members
        self.device = rows.place.device
        self.queued = [0] * self.members  # the next request of each member
        # Logits [1, V] of a prompt in a shared cache whose samples are not all placed yet.
        self.unfinished: Tensor | None = None
        total, length = self.members * self.requests, rows.sampling.max_new_tokens
        greedy = rows.sampling.temperature == 0
        self.uniforms = None if greedy else draw_uniforms(requests, length, self.device)
        shape = (total, length)
        tokens = torch.full(shape, rows.pad_id, device=self.device)
        lengths = torch.zeros(total, dtype=torch.long, device=self.device)
        finished, broken = torch.zeros(2, total, dtype=torch.bool, device=self.device)
        logprobs = torch.zeros(shape, device=self.device) if requests.logprobs else None
        self.completions = Completions(tokens, lengths, finished, logprobs, broken)
        self.asked = requests

    def run(self, trace: Callable[[int], None]) -> Completions:
        """Prefill and decode until every request is done.

        Args: trace: called with the number of decode steps made.
        """
        while True:
            self._look()
            if self.cache.used.any():
                trace(self.cache.advance(LOOK_EVERY[self.device.type], self._step))
            elif not any(self._waiting()):  # else every row ended with its first token
                return self.completions

    def _step(self, mask: Mask, positions: Tensor) -> None:
        self.rows.write(self.forward(self.rows.last, mask, positions, self.cache))

    def _waiting(self) -> list[int]:
        return [self.requests - queued for queued in self.queued]

    def _look(self) -> None:
        """Retire finished rows, then give their slots to the queue, or drop them when the queue is
        empty.
        """
        self._retire()
        free = (~self.cache.used).view(self.members, -1).sum(1).tolist()
        slots = len(self.cache.used) // self.members
        if any(self._waiting()):
            most = max(map(min, self._waiting(), free))
            enough = max(1, int(slots * REFILL_SHARE))
            if most >= enough or min(free) == slots or most == max(self._waiting()):
                self._refill(free, most)
        else:
            used = slots - min(free)
            left = self.cache.worth_keeping(slots, used)
            if used > 0 and left < slots:
                self._shrink(left)

    def _retire(self) -> None:
        """Free the rows whose completions have ended."""
        if self.stops is not None:
            self._end_at_texts(self.stops)
        ended = (self.cache.used & ~self.rows.running).nonzero()[:, 0]
        if len(ended):
            self.rows.finish(ended, self.completions)
            if self.stops is not None and self.stops.ended:
                self.completions.finished[list(self.stops.ended)] = True
            if self.asked.turn_cache is not None:
                self._keep(self.asked.turn_cache, ended)
            self.cache.free(ended)
            if self.watch:
                self.watch(len(ended))

    def _end_at_texts(self, stops: StopWatch) -> None:
        """End the rows whose completions contain a stop text, at the token that completes it."""
        used, rows = self.cache.used.nonzero()[:, 0], self.rows
        for number, count in stops.look(rows.place[used], rows.count[used], rows.tokens[used]):
            row = used[number]
            rows.running[row], rows.count[row] = False, count
            rows.tokens[row, count:] = rows.pad_id
            if rows.logprobs is not None:
                rows.logprobs[row, count:] = 0.0

    def _keep(self, turn_cache: TurnCache, ended: Tensor) -> None:
        """Save the keys and values of rows for the next turn: all tokens except the last one, which
        has no keys yet. A row that only pads its member belongs to another member's episode, and is
        not saved.
        """
        slots, places = ended.tolist(), self.rows.place[ended].tolist()
        rows: list[tuple[int, int, int]] = []
        for slot, place, count in zip(slots, places, self.rows.count[ended].tolist(), strict=True):
            member, request = divmod(place, self.requests)
            if self.asked.at[place] // turn_cache.each == member:
                prompt = self._prompt(member, request // self.samples)
                rows.append((slot, self.asked.at[place], len(prompt) + count - 1))
        if rows:
            turn_cache.write(self.cache, *zip(*rows, strict=True))

    def _refill(self, free: list[int], most: int) -> None:
        """Prefill `most` requests per member and place them in free slots.

        Every member prefills the same number of rows, so that a population stays one grouped
        product: a member with fewer free slots or requests computes some rows that are discarded.
        """
        wanted = [  # requests, by member
            list(range(queued, min(queued + min(most, slots), self.requests)))
            for queued, slots in zip(self.queued, free, strict=True)
        ]
        if self.unfinished is not None:
            prompt = self.queued[0] // self.samples
            again = [(q, 0) for q in wanted[0] if q // self.samples == prompt]
            self._put([again], None, self.unfinished)
            wanted[0] = wanted[0][len(again) :]
        needed = [sorted({q // self.samples for q in member}) for member in wanted]
        width = max(map(len, needed))
        if not width:
            return
        # Repeated prompts pad the members with fewer prompts.
        needed = [prompts + (prompts[-1:] or [0]) * (width - len(prompts)) for prompts in needed]
        prompt, logits = self.prefill.run(
            [m * self.apart + i for m, prompts in enumerate(needed) for i in prompts]
        )
        placing = [
            [(q, member * width + needed[member].index(q // self.samples)) for q in requests]
            for member, requests in enumerate(wanted)
        ]
        left = max(n - len(member) for n, member in zip(self._waiting(), wanted, strict=True))
        # An unfinished prompt needs no prefill.
        if left < (self.samples if self.cache.shares and self.members == 1 else 1):
            self.prefill.forget_opening()  # before the slots are allocated
        self._put(placing, prompt, logits)

    def _put(
        self, placing: list[list[tuple[int, int]]], prompt: PromptCache | None, logits: Tensor
    ) -> None:
        """Place prefilled requests in free slots and draw their first tokens.

        Args:
            placing: per member, each request with its row of `logits` and `prompt`.
            prompt: the cache of the prompts; None = the unfinished prompt of a shared cache.
        """
        used, placed = self.cache.used.view(self.members, -1).tolist(), []
        for member, requests in enumerate(placing):
            free = (slot for slot, taken in enumerate(used[member]) if not taken)
            for (request, origin), slot in zip(requests, free, strict=False):
                row, place = member * len(used[member]) + slot, member * self.requests + request
                length = len(self._prompt(member, request // self.samples))
                placed.append((row, request, origin, place, length))
            self.queued[member] += len(requests)
        columns = [torch.tensor(column) for column in zip(*placed, strict=True)]
        rows, request, origin, place, lengths = to_device(columns, self.device)
        more = self.cache.shares and self.members == 1 and self.queued[0] % self.samples > 0
        self.cache.place(rows, prompt, origin, lengths, more)
        drawn = place if self.apart else request
        uniforms = None if self.uniforms is None else self.uniforms[drawn]
        self.rows.begin(rows, place, uniforms, logits[origin])
        # A slice would keep all logits in memory; a copy does not.
        self.unfinished = logits[-1:].clone() if more else None
        self._retire()  # a first token may already be the stop

    def _prompt(self, member: int, prompt: int) -> Sequence[int]:
        return self.prompts[member * self.apart + prompt]

    def _shrink(self, slots: int) -> None:
        """Keep `slots` slots per member, those in use first."""
        used = self.cache.used.view(self.members, -1)
        order = used.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :slots]
        first = torch.arange(self.members, device=self.device)[:, None] * used.shape[1]
        rows = (order + first).flatten()
        self.cache.keep(rows)
        self.rows = self.rows.keep(rows)


def draw_uniforms(requests: Requests, length: int, device: torch.device) -> Tensor:
    """Return the uniform numbers for the tokens of each request, [requests, length]."""
    count = len(requests.prompts)
    ids = torch.tensor(list(range(count) if requests.ids is None else requests.ids), device=device)
    prompt = ids.repeat_interleave(requests.samples)
    sample = requests.first_sample + torch.arange(requests.samples, device=device).repeat(count)
    first: Tensor | int = 0
    if requests.begun is not None:
        sample, first = torch.tensor(requests.begun, device=device).T
    return token_uniforms(requests.seed, requests.draw, prompt, sample, length, first)
