"""The sampler: prompts -> completions, on unmodified Hugging Face decoders. The hot path of three
algorithms.

A prompt is prefilled once for all its samples, and once for all members of a population as far as
these have blocks in common (trunk.py). What all prompts of a call begin with, such as instructions
and worked examples, is prefilled once for all of them, or once per member (`find_opening`). Where a
prompt has several samples, its keys and values are stored once: all rows of a prompt attend to them
in one product (Hydragen, arXiv:2402.05099, has the same idea), so a step reads them once per group
and not once per row. What rows generate has a cache that is allocated once, in slots; a finished
row's slot goes to the next request. Keys are right-aligned: all rows write the same column, a row's
valid columns end there, so a step's write is one slice and a newcomer starts at the current column.
Where a prompt has one sample or cannot be apart (see `Sampler.shares`), each row has its prompt in
front of its own columns.

On CUDA a decode step is several hundred kernels that each run for less time than they take to
launch, so it is recorded as a CUDA graph and replayed (`CudaGraphs`): one graph for each number of
rows and each window of columns. With flash attention a row writes and reads at its own length
(flash.py): then there is one graph for each number of rows, and calls that follow find it.

On a CPU in bfloat16, where reading memory is what takes the time, weights are packed once per call
(`packed`), and the attention kernel reads keys as they lie.

The random draw of a token is a function of (seed, draw, prompt id, sample id, position), applied
through the inverse CDF; so a sample does not depend on its neighbours, on the number of rows, or on
where a run was resumed. Greedy output equals `model.generate`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from common.config import SamplingConfig
from common.distributed import fsdp
from common.hardware import stands_for
from common.model import logprobs, quantized, varlen
from common.model.half import Narrow, compiled, is_adapted, packed, packs
from common.model.masks import additive
from common.model.memory import cache_bytes
from common.model.prompts import SAVED, context_length, find_opening
from common.model.transfer import to_device
from common.profile import tracing_some
from common.rows import RowLimit
from common.sampling.cuda_graphs import CudaGraphs
from common.sampling.engine import (
    Completions,
    Load,
    Population,
    Requests,
    Setup,
    Watch,
    check_prompts,
)
from common.sampling.flash import Board, halve, recorded_over
from common.sampling.kv_cache import ATTENTION, Prefix, PromptCache, SlotCache
from common.sampling.random import token_uniforms
from common.sampling.trunk import Trunk

# A refill prefills a batch while the other rows wait, and a shrink copies the cache: both wait
# until it is worth it.
REFILL_SHARE = 1 / 8  # of the slots
SHRINK_SHARE = 3 / 4  # of the slots still in use
RERECORD_SHARE = 1 / 2  # the same where steps are recorded, and would be anew
# Steps between looks at which rows have finished; on a CPU a look costs nothing, on CUDA it waits
# for the device.
LOOK_EVERY = {"cpu": 1, "cuda": 8}
# A token is drawn from sums over so many tokens first.
BLOCK = 256
# What becomes of a row: buffers of `_Grid`.
DONE = ("tokens", "logprobs", "lengths", "finished", "witness")
# On a CPU so many probabilities at a time stay in the cache while they are drawn from.
IN_CACHE = 16 * 49152
# Prompts are prefilled in pieces of so many tokens: more at a time is not faster, and takes memory.
PIECE_ON_CPU, PIECE = 1 << 12, 1 << 14


@contextmanager
def evaluating(model: PreTrainedModel, attention: str | None) -> Iterator[None]:
    """Dropout off for the block, whatever the mode was; and another attention, if one is named."""
    training, own = model.training, model.config._attn_implementation
    model.eval()
    model.config._attn_implementation = attention or own
    try:
        yield
    finally:
        model.config._attn_implementation = own
        model.train(training)


class Sampler:
    """The native engine: samples from `model` in this process, with the trainer's own weights.

    Args:
        model: any decoder whose attention goes through transformers' cache and 4-d masks (Llama,
            Qwen2, Qwen3, GPT-2, ...).
        pad_id: token id used to fill. stop_ids: ids that end a row.
        rows: slots, that is rows in one forward at most.
        compile_mode: None, or a mode of torch.compile for the decode steps.
        graphs: record decode steps as CUDA graphs, where `model` is on a CUDA device and not
            sharded.
        autocast: None, or the dtype that float32 weights are used in. Autocast would cast them for
            every token, so linear layers have a copy in that dtype, which `refresh` renews.
    """

    populations = True
    reproducible = True
    separate = False

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        pad_id: int,
        stop_ids: Sequence[int],
        rows: int,
        compile_mode: str | None = None,
        graphs: bool = False,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.device = fsdp.device(model)
        self.pad_id = pad_id
        self.stop_ids = torch.tensor(list(stop_ids), device=self.device)
        sharded = fsdp.of(model) is not None
        self.limit = RowLimit("algo.rollout_rows", rows, fixed=sharded)
        self.autocast = autocast
        self.narrowed = Narrow(model, autocast) if autocast is not None and not sharded else None
        self.used = model if self.narrowed is None else self.narrowed.twin
        # What records decode steps. Gathering sharded weights is no part of a step that could be.
        kind = stands_for(self.device).type
        recorded = graphs and kind == "cuda" and not sharded
        self.recorder = CudaGraphs if recorded else None
        self.piece = PIECE_ON_CPU if kind == "cpu" else PIECE
        # A step that is compiled multiplies with the weights as they are; so does a recorded one.
        self.packs = compile_mode is None and not sharded
        self.forward = compiled(self.used, compile_mode) if compile_mode else self.used
        self.context_length = context_length(model)
        # Whether the attention is one that this module can stand in for.
        own = model.config._attn_implementation
        self.replaces = model._supports_attention_backend and own in ("sdpa", logprobs.ATTENTION)
        # Then rows can share a prompt's keys. Not when steps are compiled or recorded: who shares
        # with whom changes with every refill, and each shape would be compiled or recorded anew.
        self.shares = self.replaces and compile_mode is None and self.recorder is None
        self.board: Board | None = None  # of the last call, with flash attention

    @property
    def flash(self) -> bool:
        """Whether steps go by flash attention (common/sampling/flash.py)."""
        recorded = self.recorder is not None and self.forward is self.used
        config, device = self.model.config, stands_for(self.device)
        return recorded and self.replaces and varlen.has_flash(config, device, self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations, and so of the cache."""
        return self.autocast or fsdp.dtype(self.model)

    def refresh(self) -> None:
        """Renew the half-precision copy; without one the weights are shared."""
        if self.narrowed is not None:
            self.narrowed.refresh()

    def rest(self) -> None:
        """Drop the buffers of recorded steps, where backward passes want the memory."""
        if any(parameter.requires_grad for parameter in self.model.parameters()):
            self.board = None

    def close(self) -> None:
        """Nothing is held that does not go with the engine."""

    def peak_bytes(self, rows: int, load: Load) -> float:
        """Return an estimate of the most that a call takes beside the model.

        It is at its peak while prompts are prefilled, while they are put into slots and the first
        tokens are drawn, or while the last tokens are decoded.
        """
        config, size, tokens = self.model.config, self.dtype.itemsize, load.prompt_tokens
        waiting = load.completions is None or load.completions > rows
        rows = rows if waiting else load.completions or 0
        prompts = max(self.limit.floor, -(-rows // load.samples))
        apart = self.shares and load.samples > 1  # slots hold completions alone
        # Those that come later, at any column, need as many columns again.
        new = load.sampling.max_new_tokens * (2 if waiting and not self.flash else 1)
        token = cache_bytes(config, size)
        prefilled = prompts * tokens * token * (2 if apart else 1)
        slots = rows * (new if apart else tokens + new) * token
        opened = load.opening * token
        logits = rows * _draw_floats(load.sampling) * 4.0 * config.vocab_size
        logits += (prompts + max(rows, prompts)) * size * config.vocab_size
        packing = (
            self.packs and self.recorder is None and packs(stands_for(self.device), self.dtype)
        )
        piece = self._piece_bytes(prompts, tokens, packing)
        placing = prefilled + slots + logits + opened * waiting
        # With flash attention they are on a board, which the last call may have left.
        filling = prefilled + opened + slots * (waiting or self.flash) + piece
        decoding = slots + prefilled * apart + opened * waiting
        decoding += self._step_bytes(rows, tokens + new, load.sampling)
        weights = fsdp.parameters(self.model) + quantized.packed_away(self.model)
        return 2.0 * weights * packing + max(filling, placing, decoding)

    def _piece_bytes(self, prompts: int, tokens: int, packing: bool) -> float:
        """Return what a piece of a prefill takes: activations, masks, and a weight that is made
        anew.
        """
        config, size = self.model.config, self.dtype.itemsize
        wide = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        rows = min(max(self.piece // tokens, self.limit.floor), prompts)
        # An adapter beside the weights adds its product to theirs; merged it takes nothing.
        wides = 5 if not packing and any(map(is_adapted, self.used.modules())) else 3
        states = (wides * wide + 6 * config.hidden_size) * size + (size + 2) * tokens
        return rows * tokens * states + quantized.remade_bytes(self.model, self.dtype)

    def _step_bytes(self, rows: int, columns: int, sampling: SamplingConfig) -> float:
        """Return what a decode step takes beside the cache: keys and values of a layer laid out for
        its products, their scores, and the logits.
        """
        config, size = self.model.config, self.dtype.itemsize
        layer = cache_bytes(config, size) / config.num_hidden_layers
        scores = 3 * 4.0 * config.num_attention_heads
        attending = 0.0 if self.flash else columns * (layer + scores)
        drawing = (4.0 * _draw_floats(sampling) + size) * config.vocab_size
        # Recorded steps have memory of their own.
        step = rows * (attending + drawing) * (2 if self.recorder else 1)
        return step + quantized.remade_bytes(self.model, self.dtype)

    def generate(
        self, requests: Requests, sampling: SamplingConfig, watch: Watch | None = None
    ) -> Completions:
        """Sample completions, with half the rows when memory runs out.

        Raises: ConfigError where a prompt is empty or does not fit the context with max_new_tokens.
        """
        check_prompts(requests, sampling, self.model, self.context_length)
        return self.limit.run(lambda rows: self._generate(requests, sampling, rows, watch))

    def open_board(self, rows: int, columns: int, length: int) -> Board:
        """Return buffers of so many rows of `columns` tokens, `length` of them new: those of the
        last call where they have room, else larger ones in their place.
        """
        assert self.recorder is not None
        board = self.board
        if board is not None and board.slots > max(rows, self.limit.rows):
            board = self.board = None  # memory has run out since
        if board is None or not board.fits(rows, columns, length):
            if board is not None:
                rows, columns = max(rows, board.slots), max(columns, board.columns)
                length = max(length, board.length)
            self.board = board = None  # before there is another
            self.board = board = Board(rows, columns, length, self.recorder(self.device))
        return board

    def _generate(
        self, requests: Requests, sampling: SamplingConfig, rows: int, watch: Watch | None
    ) -> Completions:
        # Without a cache of casts, which would outlive a recording that it was made in; the narrow
        # twin needs none.
        half = torch.autocast(
            self.device.type,
            self.autocast,
            enabled=self.autocast is not None,
            cache_enabled=self.recorder is None,
        )
        attention = evaluating(self.used, ATTENTION if self.replaces else None)
        quick = packed(self.used) if self.packs and self.recorder is None else nullcontext()
        try:
            with attention, fsdp.inference(self.model), half, quick, tracing_some() as trace:
                made = _Grid(self, requests, sampling, rows, watch).run(trace)
        except BaseException:
            self.board = None
            raise
        # Out of inference mode a clone is an ordinary tensor, which a loss may use.
        logp = made.logprobs.clone() if made.logprobs is not None else None
        tokens, lengths = made.tokens.clone(), made.lengths.clone()
        return Completions(tokens, lengths, made.finished.clone(), logp, made.broken.clone())


def open_native(setup: Setup, cuda_graphs: bool) -> Sampler:
    """Open the native engine (conf/engine/native.yaml)."""
    sampler = Sampler(
        setup.model,
        pad_id=setup.pad_id,
        stop_ids=setup.stop_ids,
        rows=setup.rows,
        compile_mode=setup.compile_mode,
        graphs=cuda_graphs,
        autocast=setup.autocast,
    )
    sampler.limit.floor = setup.floor
    return sampler


@dataclass
class _Held:
    """A prompt of the prefix whose samples are not all placed yet. logits: [1, V], of its first new
    token.
    """

    prompt: int
    place: int
    logits: Tensor


class _Grid:
    """One call of `generate`: a grid of groups x slots, and a queue of requests that is the same
    for every group.
    """

    def __init__(
        self,
        sampler: Sampler,
        requests: Requests,
        sampling: SamplingConfig,
        rows: int,
        watch: Watch | None = None,
    ) -> None:
        device, prompts = sampler.device, requests.prompts
        self.sampler, self.sampling, self.watch = sampler, sampling, watch
        population = requests.population or Population(members=1)
        self.narrows = population.narrow is not None
        self.narrow = population.narrow or nullcontext
        self.prompts, self.groups = prompts, population.members
        # Sharded weights are gathered for a whole forward.
        self.trunk = population.trunk if fsdp.of(sampler.model) is None else 0
        # Of each group, from its first on; request q is sample q % samples of prompt q // samples.
        self.samples = requests.samples
        self.requests = len(prompts) * requests.samples
        self.slots = min(self.requests, max(1, rows // self.groups))  # of each group
        self.longest = max(len(prompt) for prompt in prompts)
        self.opening = find_opening(prompts, SAVED)
        self.opened: PromptCache | None = None  # of every group
        groups = self.groups
        total, length = groups * self.requests, sampling.max_new_tokens
        self.tokens = torch.full((total, length), sampler.pad_id, device=device)
        self.logprobs = None
        if requests.logprobs:
            self.logprobs = torch.zeros((total, length), device=device)
        self.lengths = torch.zeros(total, dtype=torch.long, device=device)
        self.finished = torch.zeros(total, dtype=torch.bool, device=device)
        self.witness = torch.zeros(total, device=device)  # sums, finite as long as logits are
        self.uniforms = None
        if sampling.temperature > 0:
            keys = range(len(prompts)) if requests.ids is None else requests.ids
            ids = torch.tensor(list(keys), device=device)
            request = torch.arange(self.requests, device=device)
            sample = requests.first_sample + request % self.samples
            prompt = ids[request // self.samples]
            self.uniforms = token_uniforms(requests.seed, requests.draw, prompt, sample, length)
        self.queued = [0] * groups  # the next request of each group
        # With a prefix, slots hold completions alone; else a row's prompt lies in front of its
        # completion.
        self.prefix = Prefix() if sampler.shares and self.samples > 1 else None
        self.first = self.longest if self.prefix is None else 0  # where the first tokens go
        spare = length if self.requests > self.slots else 0  # columns, so that shifts are rare
        self.cache: Any = SlotCache(self.first + length + spare, groups * self.slots, self.prefix)
        self.cache.column = self.first
        self.columns = torch.arange(self.cache.columns, device=device)
        self.graphs = sampler.recorder(device) if sampler.recorder and not sampler.flash else None
        if self.graphs is not None:
            self.cache.at = torch.zeros(1, dtype=torch.long, device=device)
        # Of each row: request in flight (-1 = none), its place in the output, first valid column,
        # position in the sequence of what lies there, tokens so far, last token, prompt in the
        # prefix.
        rows = groups * self.slots
        self.request = torch.full((rows,), -1, device=device)
        self.place = torch.zeros(rows, dtype=torch.long, device=device)
        self.start = torch.full((rows,), self.first, device=device)
        self.offset = torch.zeros(rows, dtype=torch.long, device=device)
        self.count = torch.zeros(rows, dtype=torch.long, device=device)
        self.last = torch.zeros(rows, dtype=torch.long, device=device)
        self.of_prompt = torch.zeros(rows, dtype=torch.long, device=device)
        self.held: _Held | None = None  # a prompt whose samples are not all placed yet
        self.board: Board | None = None
        self.done = {name: getattr(self, name) for name in DONE}
        if sampler.flash:
            self.sit(sampler.open_board(rows, self.longest + length, length))

    def run(self, trace: Callable[[int], None]) -> Completions:
        """Prefill, decode, look, refill or shrink, until every request is done. trace: is told of
        the steps of decoding.
        """
        look_every = LOOK_EVERY[self.sampler.device.type]
        while True:
            self.look()
            if self.board is None and self.cache.column == self.cache.columns:
                self.shift()
            active = (self.request >= 0).view(self.groups, self.slots)
            if not active.any():
                if all(queued == self.requests for queued in self.queued):
                    break
                continue  # every row ended with its first token; the queue goes on
            if self.board is not None:
                self.cache.lengths[: len(self.request)].masked_fill_(self.request < 0, 0)
                for _ in range(look_every):
                    self.replay_rows(self.board)
                trace(look_every)
                continue
            if self.cache.at is not None:
                self.cache.at.fill_(self.cache.column)
            else:
                self.cache.masked = bool((self.start != self.cache.first).any())
                self.mask = additive(
                    self.columns[None, :] >= self.start[:, None], self.sampler.dtype
                )[:, None, None, :]
            steps = min(look_every, self.cache.columns - self.cache.column)
            for _ in range(steps):
                if self.graphs is None:
                    self.decode(
                        self.mask[:, :, :, self.cache.first : self.cache.column + 1],
                        self.cache.column,
                    )
                else:
                    self.replay(self.graphs)
                self.cache.column += 1
            trace(steps)
        tokens, logprobs, lengths, finished, witness = self.done.values()
        return Completions(tokens, lengths, finished, logprobs, ~torch.isfinite(witness))

    # --- one step

    def decode(self, mask: Tensor, column: int | Tensor) -> None:
        """One forward of all rows, one token each, whose keys go to `column`. mask: additive [rows,
        1, 1, columns].
        """
        logits = self.sampler.forward(
            input_ids=self.last[:, None],
            attention_mask=mask,
            # A row that is past its end until the next look could leave the context, for which
            # there may be no embedding.
            position_ids=(column - self.start + self.offset).clamp(
                max=self.sampler.context_length - 1
            )[:, None],
            past_key_values=self.cache,
            use_cache=True,
            **({"slots": self.cache} if self.sampler.replaces else {}),
        ).logits[:, -1]
        self.record(slice(None), logits)

    def replay(self, graphs: CudaGraphs) -> None:
        """One decode step as the graph of the window that it needs, which is recorded behind the
        first step there.
        """
        window = self.cache.open()
        if window in graphs.made:
            graphs.made[window]()
        else:
            self.windowed()  # a recording may load no kernel and compile nothing
            if self.cache.column + 1 < self.cache.closes:  # else this one was the window's last
                graphs.made[window] = graphs.record(self.windowed)

    def windowed(self) -> None:
        """A decode step of the same kernels on the same memory, whichever column of the window is
        next.
        """
        at, columns = self.cache.at, self.columns[self.cache.opens : self.cache.closes]
        assert at is not None
        visible = (columns >= self.start[:, None]) & (columns <= at)
        self.decode(additive(visible, self.sampler.dtype)[:, None, None, :], at)
        at += 1

    def replay_rows(self, board: Board) -> None:
        """One decode step of rows with lengths of their own, as the graph of their number; it is
        recorded behind the first such step.
        """
        made, key = board.graphs.made, (self.bound, len(self.request))
        if key in made:
            made[key]()
        else:
            self.step_of_rows()
            made[key] = board.graphs.record(self.step_of_rows)

    def step_of_rows(self) -> None:
        """A decode step of the same kernels on the same memory, whatever the lengths are."""
        positions = self.cache.begin()
        self.decode(self.last[None, None, None], positions)  # a mask that nothing reads

    def record(self, rows: Tensor | slice, logits: Tensor) -> None:
        """Draw a token for `rows` from `logits` [n, V] and write it down."""
        # Rows past their end are still computed until the next look; what they draw lands on their
        # last column, and `look` reads no further than the first stop token.
        step = self.count[rows].clamp(max=self.sampling.max_new_tokens - 1)
        uniform = (
            self.uniforms[self.request[rows].clamp(min=0), step]
            if self.uniforms is not None
            else None
        )
        token, logprob, witness = draw(logits, self.sampling, uniform, self.logprobs is not None)
        alive = (self.request[rows] >= 0) & (self.count[rows] < self.sampling.max_new_tokens)
        place = self.place[rows]
        # One sum a step; whether it is finite is asked once, at the end. Rows past their end do not
        # count.
        self.witness.index_add_(0, place, torch.where(alive, witness.float(), 0.0))
        self.tokens[place, step] = torch.where(alive, token, self.tokens[place, step])
        if self.logprobs is not None and logprob is not None:
            self.logprobs[place, step] = torch.where(alive, logprob, self.logprobs[place, step])
        self.last[rows] = token
        self.count[rows] += 1

    # --- between steps

    def look(self) -> None:
        """Retire finished rows, then give their slots to the queue, or drop them when the queue is
        empty.
        """
        self.retire()
        free = (self.request < 0).view(self.groups, self.slots)
        waiting = [self.requests - q for q in self.queued]
        if any(waiting):
            enough = max(1, int(self.slots * REFILL_SHARE))
            most = max(min(w, int(f)) for w, f in zip(waiting, free.sum(1).tolist(), strict=True))
            if most >= enough or bool(free.all()) or most == max(waiting):
                self.refill(free, most)
        elif self.board is not None:
            used = int((~free).sum(1).max())
            if 0 < used <= (left := halve(self.slots, used)) < self.slots:
                self.shrink(free, left)
        else:
            used = int((~free).sum(1).max())
            if 0 < used <= self.slots * (SHRINK_SHARE if self.graphs is None else RERECORD_SHARE):
                self.shrink(free, used)

    def retire(self) -> None:
        """Free the rows that drew a stop token or are full; cut what they drew after it."""
        flying = self.request >= 0
        full = self.count >= self.sampling.max_new_tokens
        stopped = torch.isin(self.last, self.sampler.stop_ids)
        # a stop token may lie some steps back; what is not written may look like one
        if LOOK_EVERY[self.sampler.device.type] > 1:
            written = (
                torch.arange(self.tokens.shape[1], device=full.device)[None, :]
                < self.count[:, None]
            )
            stopped = (torch.isin(self.tokens[self.place], self.sampler.stop_ids) & written).any(1)
        done = flying & (full | stopped) & (self.count > 0)
        rows = done.nonzero()[:, 0]
        if len(rows) == 0:
            return
        place = self.place[rows]
        drawn = self.tokens[place]  # [n, L]
        length = drawn.shape[1]
        written = torch.arange(length, device=drawn.device)[None, :]
        is_stop = torch.isin(drawn, self.sampler.stop_ids) & (written < self.count[rows, None])
        first = torch.where(is_stop.any(1), is_stop.int().argmax(1) + 1, length)
        ends = torch.minimum(first, self.count[rows].clamp(max=length))
        self.lengths[place] = ends
        self.finished[place] = is_stop.any(1)
        beyond = written >= ends[:, None]
        self.tokens[place] = drawn.masked_fill(beyond, self.sampler.pad_id)
        if self.logprobs is not None:
            self.logprobs[place] = self.logprobs[place].masked_fill(beyond, 0.0)
        self.request[rows] = -1
        if self.board is not None:
            for name, found in self.done.items():
                if found is not None:
                    found[self.home[rows]] = getattr(self, name)[rows]
        else:
            self.start[rows] = self.cache.column
            self.cache.first = int(self.start.min())
        if self.watch:
            self.watch(len(rows))

    def refill(self, free: Tensor, most: int) -> None:
        """Prefill `most` requests of each group and place them in free slots.

        Every group prefills the same number of rows, so that a population stays one grouped
        product: a group with fewer free slots or requests computes some rows that nobody keeps.
        """
        take = [
            min(most, self.requests - q, int(f))
            for q, f in zip(self.queued, free.sum(1).tolist(), strict=True)
        ]
        # requests, by group
        wanted = [list(range(q, q + n)) for q, n in zip(self.queued, take, strict=True)]
        if self.held is not None:
            chosen = [q for q in wanted[0] if q // self.samples == self.held.prompt]
            self.put(free, [chosen], self.held.logits, [[0] * len(chosen)], [self.held.place])
            free = (self.request < 0).view(self.groups, self.slots)
            wanted[0] = wanted[0][len(chosen) :]
        needed = [sorted({q // self.samples for q in qs}) for qs in wanted]  # prompts, by group
        width = max(len(p) for p in needed)
        if width:
            ids = [p + [p[-1] if p else 0] * (width - len(p)) for p in needed]  # dummies fill up
            flat = [i for row in ids for i in row]
            prompt, logits = self.prefill_rest([self.prompts[i] for i in flat], width)
            left = (self.requests - q - len(qs) for q, qs in zip(self.queued, wanted, strict=True))
            # The samples that are left of a prompt that is held need no prefill.
            if max(left) < (self.samples if self.prefix and self.groups == 1 else 1):
                self.opened = None  # before there are slots
            source = [
                [g * width + ids[g].index(q // self.samples) for q in qs]
                for g, qs in enumerate(wanted)
            ]
            if self.prefix is None:
                self.put(free, wanted, logits, source, prompt)
            else:
                places = self.settle(prompt, [len(self.prompts[i]) for i in flat])
                self.put(free, wanted, logits, source, places)
                # A slice holds all logits in memory; a copy does not.
                self.held = _Held(ids[0][-1], places[width - 1], logits[width - 1 : width].clone())
        if self.groups > 1 or self.queued[0] % self.samples == 0:
            self.held = None

    def settle(self, prompt: PromptCache, lengths: list[int]) -> list[int]:
        """Put `prompt` into the prefix, in the place of what no row needs any more. Returns where
        its rows are.
        """
        assert self.prefix is not None
        used = set(self.of_prompt[self.request >= 0].tolist())
        if self.held is not None and self.queued[0] % self.samples:
            used.add(self.held.place)
        unused = [place for place in range(len(self.prefix.lengths)) if place not in used]
        if lengths and len(unused) >= len(lengths) and max(lengths) <= max(self.prefix.lengths):
            places = unused[: len(lengths)]
            self.prefix.overwrite(places, prompt, lengths)
            return places
        keep = sorted(used)
        moved = torch.zeros(len(self.prefix.lengths) or 1, dtype=torch.long)
        moved[keep] = torch.arange(len(keep))
        if self.held is not None:
            self.held.place = int(moved[self.held.place])
        self.of_prompt = moved.to(self.of_prompt.device)[self.of_prompt]
        self.prefix.replace(keep, prompt, lengths)
        return list(range(len(keep), len(keep) + len(lengths)))

    def prefill(
        self, prompts: list[Sequence[int]], each: int, opening: PromptCache | None = None
    ) -> tuple[PromptCache, Tensor]:
        """Run prompts, `each` of every group, through the model piece by piece, padded on the left.
        opening: of every group, what its prompts go on from. Returns their cache and the last
        logits [n, V].
        """
        width, device = max(len(p) for p in prompts), self.sampler.device
        # A token of an opening has keys and values alone, less than a quarter of what one takes.
        size = max(width, (width + len(self.opening) * (opening is not None)) // 4)
        group = torch.arange(len(prompts), device=device) // each
        cache, parts, order, trunk = PromptCache(len(prompts), opening, group), [], [], None
        if self.trunk and self.groups > 1:
            most, model = max(1, self.sampler.piece // size), self.sampler.used
            run = partial(self.prefill_piece, width=width)
            trunk = Trunk(model, self.trunk, prompts, run, most, opening)
            trunk.hand_over(cache)
        for groups, rows in self.pieces(each, size):
            cache.rows = torch.tensor(rows, device=device)
            with self.narrow(groups), trunk.skipped(cache.rows) if trunk else nullcontext():
                parts.append(self.prefill_piece([prompts[row] for row in rows], cache, width))
            order += rows
        cache.opening = None  # of which each prompt has its own copy now
        logits = torch.cat(parts)
        if order != sorted(order):
            logits = logits[torch.tensor(order, device=logits.device).argsort()]
        return cache, logits

    def prefill_rest(self, prompts: list[Sequence[int]], each: int) -> tuple[PromptCache, Tensor]:
        """`prefill`, but what all prompts of the call begin with goes through the model once per
        group and call.
        """
        if not self.opening:
            return self.prefill(prompts, each)
        if self.opened is None:
            self.opened = self.prefill([self.opening] * self.groups, 1)[0]
        return self.prefill([p[len(self.opening) :] for p in prompts], each, self.opened)

    def pieces(self, each: int, size: int) -> Iterator[tuple[range, list[int]]]:
        """Yield the groups and the rows of each piece of a prefill, of `each` rows per group that
        take as much as `size` tokens each.
        """
        fitting = max(1, self.sampler.piece // size)
        # Groups that cannot be apart stay together, and so do mirrored pairs.
        together = min(self.groups, 2 if self.narrows else self.groups)
        some = min(each, max(1, fitting // together))
        count = max(together, fitting // some // together * together)
        for first in range(0, self.groups, count):
            groups = range(first, min(first + count, self.groups))
            for row in range(0, each, some):
                mine = range(row, min(row + some, each))
                yield groups, [group * each + own for group in groups for own in mine]

    def prefill_piece(
        self, prompts: Sequence[Sequence[int]], cache: PromptCache, width: int
    ) -> Tensor:
        """Run prompts, padded on the left to `width`, through the model. Returns the last logits
        [n, V].
        """
        device, before = self.sampler.device, 0 if cache.opening is None else len(self.opening)
        padding = [width - len(p) for p in prompts]
        ids = torch.tensor(
            [[self.sampler.pad_id] * n + list(p) for n, p in zip(padding, prompts, strict=True)],
            device=device,
        )
        first = torch.tensor(padding, device=device)[:, None]
        column = torch.arange(before + width, device=device)
        own = column[before:]
        # A padding row attends to itself alone: a softmax over nothing would be NaN, and spread.
        causal = (column <= own[:, None]) & (column >= first[:, :, None])
        visible = causal | (column == own[:, None])
        position = (own - first).clamp(min=0)
        cache.source = None
        if before and any(padding):
            cache.source = torch.where(column < before + first, column - first, column).clamp(min=0)
        mask = additive(visible, self.sampler.dtype)[:, None]
        return self.sampler.used(
            input_ids=ids,
            attention_mask=mask,
            position_ids=position,
            past_key_values=cache,  # type: ignore[arg-type]
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]

    def put(
        self,
        free: Tensor,
        wanted: list[list[int]],
        logits: Tensor,
        source: list[list[int]],
        prompt: PromptCache | list[int],
    ) -> None:
        """Place prefilled requests in free slots and draw their first tokens.

        source: by group, the row of `logits` of each request. prompt: what was prefilled, or where
        in the prefix its rows are.
        """
        device = self.sampler.device
        rows, requests, origins, places = [], [], [], []
        each: list[list[int]] = [[] for _ in range(self.groups)]
        for group, slot in free.nonzero().tolist():
            each[group].append(slot)
        for group, (qs, froms) in enumerate(zip(wanted, source, strict=True)):
            for q, origin, slot in zip(qs, froms, each[group], strict=False):
                rows.append(group * self.slots + slot)
                requests.append(q)
                origins.append(origin)
                places.append(group * self.requests + q)
            self.queued[group] += len(qs)
        lengths = [len(self.prompts[q // self.samples]) for q in requests]
        at, origin, lengths, requests, places = to_device(
            [torch.tensor(found) for found in (rows, origins, lengths, requests, places)], device
        )
        self.count[at] = 0
        if self.board is not None:
            self.seat(at, requests, places)
            self.cache.place(at, prompt, origin, lengths)
            self.record(at, logits[origin])
            self.retire()
            return
        self.request[at] = requests
        self.place[at] = places
        if isinstance(prompt, PromptCache):
            self.cache.place(at, prompt, origin)
            self.start[at] = self.cache.column - lengths
        else:
            self.start[at] = self.cache.column
            self.offset[at] = lengths
            self.of_prompt[at] = torch.tensor(prompt, device=device)[origin]
            assert self.prefix is not None
            self.prefix.arrange(self.of_prompt)
        self.cache.first = int(self.start.min())
        self.record(at, logits[origin])
        self.retire()  # a first token may already be the stop

    def shrink(self, free: Tensor, used: int) -> None:
        """Keep `used` slots a group, the busy ones first."""
        # busy slots come first, in order
        order = free.to(torch.int8).argsort(dim=1, stable=True)[:, :used]
        rows = (
            order + torch.arange(self.groups, device=free.device)[:, None] * self.slots
        ).flatten()
        self.slots = used
        if self.board is not None:
            self.board.keep(rows)
            self.home = self.home[rows]
            self.view(self.board)
            return
        self.cache.keep(rows)
        for name in ("request", "place", "start", "offset", "count", "last", "of_prompt"):
            setattr(self, name, getattr(self, name)[rows])
        if self.sampler.recorder is not None:
            # the others are of buffers that are gone
            self.graphs = self.sampler.recorder(self.sampler.device)
        self.cache.first = int(self.start.min())
        if self.prefix is not None:
            self.settle(PromptCache(), [])
            self.prefix.arrange(self.of_prompt)

    # --- rows on a board

    def sit(self, board: Board) -> None:
        """Compute on rows of a board; this call's own buffers receive the rows that are done."""
        sampling, rows = self.sampling, len(self.request)
        cuts = (sampling.temperature, sampling.top_k, sampling.top_p)
        shape = (self.tokens.shape[1], self.logprobs is None, *cuts)
        # What a recording holds good for, besides the number of rows.
        self.bound = (shape, recorded_over(self.sampler.used))
        self.drawn = self.uniforms  # of every request
        self.home = torch.zeros_like(self.place)  # where the row's completion goes
        board.begin(rows)
        self.board, self.cache = board, board.cache
        self.view(board)

    def view(self, board: Board) -> None:
        """See the rows that are left."""
        rows = self.groups * self.slots
        for name, found in board.views(rows, self.tokens.shape[1]).items():
            if getattr(self, name) is not None:
                setattr(self, name, found)

    def seat(self, rows: Tensor, requests: Tensor, places: Tensor) -> None:
        """Give rows to requests whose completions go to `places`."""
        self.request[rows] = rows
        self.home[rows] = places
        self.tokens[rows], self.witness[rows] = self.sampler.pad_id, 0.0
        if self.logprobs is not None:
            self.logprobs[rows] = 0.0
        if self.uniforms is not None and self.drawn is not None:
            self.uniforms[rows] = self.drawn[requests]

    def shift(self) -> None:
        """Make room at the right end of the cache."""
        # nobody needs what an ended row has written
        self.start.masked_fill_(self.request < 0, self.cache.column)
        by = min(int(self.start.min()), self.cache.column - self.first)
        assert by > 0, "the cache is as long as the longest row"
        self.cache.shift(by)
        self.start -= by
        self.cache.first = int(self.start.min())


def _draw_floats(sampling: SamplingConfig) -> int:
    """Return the floats per token of the vocabulary that `draw` makes beside the logits."""
    if sampling.temperature == 0:
        return 0
    return 2 + 4 * sampling.cuts + (sampling.top_p < 1)


def draw(
    logits: Tensor, sampling: SamplingConfig, uniform: Tensor | None, want_logprob: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Draw one token per row by the inverse CDF of the tempered (and cut) distribution.

    Args: logits [n, V]; uniform: float32 [n] in [0, 1), None = greedy.
    Returns: token int64 [n]; its log-probability float32 [n] under the tempered distribution before
    top-k and top-p (that of the policy, as a trainer computes it), or None (greedy: under the
    untempered one); a witness [n] that is finite where the row's logits are: a greedy token's logit
    is the one that is not, and a softmax over one that is not is NaN throughout.
    """
    if uniform is None:
        largest, token = logits.max(-1)
        logprob = largest.float() - logits.float().logsumexp(-1) if want_logprob else None
        return token, logprob, largest
    rows = max(1, IN_CACHE // logits.shape[1])
    if logits.device.type != "cpu" or len(logits) <= rows:
        return _draw(logits, sampling, uniform, want_logprob)
    pairs = zip(logits.split(rows), uniform.split(rows), strict=True)
    parts = [_draw(some, sampling, u, want_logprob) for some, u in pairs]
    tokens, logprobs, witnesses = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs) if want_logprob else None, torch.cat(witnesses)


def _draw(
    logits: Tensor, sampling: SamplingConfig, uniform: Tensor, want_logprob: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    if sampling.temperature != 1:
        logits = logits.float() / sampling.temperature
    policy = probability = torch.softmax(logits, dim=-1, dtype=torch.float32)
    if sampling.cuts:
        probability = _cut(probability, sampling.top_k, sampling.top_p)
    token = invert_cdf(probability, uniform)
    logprob = policy.gather(1, token[:, None])[:, 0].log() if want_logprob else None
    return token, logprob, policy[:, 0]


def invert_cdf(probability: Tensor, uniform: Tensor) -> Tensor:
    """Return the first token of each row at which the running sum exceeds the share `uniform` of
    the whole: int64 [n].

    Sums of blocks say which block it is in, so that only one block is added up token by token. One
    of probability zero is never drawn. Args: probability [n, V], which need not sum to 1; uniform
    [n] in [0, 1).
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
    """Return where the running sum of `weights` [n, m] first exceeds `target` [n], and what of the
    target is left before that place.
    """
    if weights.is_cuda and len(weights) == 1:  # a single row is summed up in any order there
        place, rest = _first_beyond(weights.expand(2, -1), target.expand(2))
        return place[:1], rest[:1]
    running = weights.cumsum(-1)
    # Rounding may lift a target to the whole sum, which nothing exceeds.
    below = torch.nextafter(running[:, -1], running.new_zeros(()))
    target = torch.minimum(target, below)[:, None]
    place = torch.searchsorted(running, target, right=True).clamp_(max=weights.shape[1] - 1)
    before = running.gather(1, place) - weights.gather(1, place)
    return place[:, 0], (target - before).clamp_(min=0)[:, 0]


def _cut(probability: Tensor, top_k: int, top_p: float) -> Tensor:
    """Zero all but the top_k likeliest tokens, then all beyond the smallest set that holds top_p.
    [n, V] -> [n, V].
    """
    ordered, index = probability.sort(dim=-1, descending=True, stable=True)
    if top_k:
        ordered[:, top_k:].zero_()
    if top_p < 1:
        share = ordered / ordered.sum(-1, keepdim=True)
        ordered.masked_fill_(share.cumsum(-1).sub_(share) >= top_p, 0)
        del share  # before there is one more of its size
    return torch.zeros_like(probability).scatter_(1, index, ordered)
