"""The native engine: prompts -> completions, on unmodified Hugging Face decoders. The hot path of
three algorithms.

A prompt is prefilled once for all its samples (prefill.py). Where it has several, its keys and
values are stored once: all rows of a prompt attend to them in one product (Hydragen,
arXiv:2402.05099, has the same idea), so a step reads them once per prompt and not once per row.
What rows generate has a cache that is allocated once, in slots (kv_cache.py); a finished row's slot
goes to the next request (schedule.py).

On CUDA a decode step is several hundred kernels that each run for less time than they take to
launch, so it is recorded as a CUDA graph and replayed: one graph for each number of rows and each
span of columns, or, with flash attention (flash.py), one for each number of rows, which later
calls find again. On a CPU in bfloat16, where reading memory is what takes the time, weights are
packed once per call (`packed`), and the attention kernel reads keys as they lie.

The random draw of a token is a function of (seed, draw, prompt id, sample id, position), applied
through the inverse CDF (output.py); so a sample does not depend on its neighbours, on the number of
rows, or on where a run was resumed. Greedy output equals `model.generate`.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel

from common.config import SamplingConfig
from common.device import hardware, tracing_some
from common.distributed import fsdp
from common.engine import Completions, Requests, Setup, Watch, check_prompts
from common.memory import Load, RowLimit
from common.model import (
    Kinds,
    Mask,
    Narrow,
    cache_name,
    compiled,
    context_length,
    evaluating,
    keeps_states,
    logprobs,
    packed,
    varlen,
)
from common.sampling.cuda_graphs import CudaGraphs
from common.sampling.flash import Board, FlashCache
from common.sampling.kv_cache import (
    ATTENTION,
    ColumnCache,
    RecordedCache,
    SharedPromptCache,
    attends_to_cache,
)
from common.sampling.peak import peak_bytes
from common.sampling.prefill import Prefill
from common.sampling.recurrent_cache import count_state_bytes
from common.sampling.schedule import RowCache, Schedule
from common.sampling.slots import Rows
from common.sampling.stops import StopTexts
from common.sampling.turn_cache import Kept

# Prompts are prefilled in pieces of so many tokens: more at a time is not faster, and takes memory.
PIECE_ON_CPU, PIECE = 1 << 12, 1 << 14


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
        stops: texts that end a row; None where only tokens do.
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
        stops: StopTexts | None = None,
    ) -> None:
        self.model = model
        self.stops = stops
        self.pad_id = pad_id
        self.stop_ids = torch.tensor(list(stop_ids), dtype=torch.long, device=self.device)
        sharded = fsdp.of(model) is not None
        self.limit = RowLimit("algo.rollout_rows", rows, fixed=sharded)
        self.autocast = autocast
        eager = compile_mode is None
        self.narrowed = Narrow(model, autocast, eager) if autocast and not sharded else None
        self.used = model if self.narrowed is None else self.narrowed.twin
        # What records decode steps. Gathering sharded weights is no part of a step that could be.
        kind = fsdp.target(model).type
        # What `refresh` takes to merge an adapter, so that a step launches no more kernels than a
        # plain model's, 0 = it does not; and of how many rows at most `rest` keeps it all.
        layers = self.narrowed.adapted if self.narrowed and kind == "cuda" else ()
        self.merged_bytes = sum(2 * x.in_features * x.out_features for x, _ in layers)
        self.keeps = 0
        recorded = graphs and kind == "cuda" and not sharded
        recorded = recorded and not waits_for_experts(self.used, fsdp.target(model))
        self.recorder = CudaGraphs if recorded else None
        self.piece = PIECE_ON_CPU if kind == "cpu" else PIECE
        if keeps_states(model.config):
            self.piece //= 4  # recurrent layers hold some four times as much of a token
        self.forward = compiled(self.used, compile_mode) if compile_mode else self.used
        self.context_length = context_length(model)
        # Whether the model's attention is one that `ATTENTION` can replace.
        attention = model.config._attn_implementation in ("sdpa", logprobs.ATTENTION)
        self.replaces = model._supports_attention_backend and attention
        # Then rows can share a prompt's keys. Not when steps are compiled or recorded: who shares
        # with whom changes with every refill, and each shape would be compiled or recorded anew.
        self.shares = self.replaces and self.stored and compile_mode is None and not recorded
        self.board: Board | None = None  # of the last call, with flash attention

    @property
    def device(self) -> torch.device:
        """The device that the model is on."""
        return fsdp.device(self.model)

    @cached_property
    def state_bytes(self) -> int:
        """Return what a row takes beside keys and values."""
        config = self.model.config
        return count_state_bytes(config, self.dtype) if keeps_states(config) else 0

    @property
    def stored(self) -> bool:
        """Whether steps may read keys and values where the cache has them."""
        return attends_to_cache(self.model.config)

    def keeps_turns(self, kept: Kept) -> bool:
        """Return whether episodes keep what they have from turn to turn: there is memory for all,
        and it is keys and values alone.
        """
        return len(kept.lengths) <= self.limit.kept and not keeps_states(self.model.config)

    @property
    def packs(self) -> bool:
        """Whether weights are packed for a call. A step that is compiled or recorded multiplies
        with them as they are.
        """
        eager = self.forward is self.used and self.recorder is None
        return eager and fsdp.of(self.model) is None

    @property
    def flash(self) -> bool:
        """Whether steps go by flash attention (common/sampling/flash.py)."""
        recorded = self.recorder is not None and self.forward is self.used
        config, device = self.model.config, fsdp.target(self.model)
        replaces = self.replaces and self.stored
        return recorded and replaces and varlen.has_flash(config, device, self.dtype)

    def describe(self) -> str:
        """Say which attention steps on CUDA use and whether they are recorded, and why not."""
        steps = "recorded as CUDA graphs" + ", the adapter merged" * bool(self.merged_bytes)
        if self.flash:
            return f"flash, steps {steps}"
        device = fsdp.target(self.model)
        why = varlen.why_not_flash(self.model.config, device, self.dtype)
        if self.recorder is None:
            because = "engine.cuda_graphs=false"
            if fsdp.of(self.model):
                because = "opt=fsdp"
            elif waits_for_experts(self.used, device):
                because = "products of experts wait for the host"
            why, steps = why or "steps are not recorded", f"not recorded: {because}"
        elif self.forward is not self.used:
            why = why or "opt=compile"
        elif not self.stored:
            why = why or "attention to other keys than the cache has"
        kind = "masked" if self.replaces else "the model's own"
        return f"{kind} (flash: no, {why or 'model.attention'}), steps {steps}"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations, and so of the cache."""
        return self.autocast or fsdp.dtype(self.model)

    def refresh(self) -> None:
        """Renew the half-precision copy; without one the weights are shared."""
        if self.narrowed is not None:
            self.narrowed.refresh(self.merged_bytes > 0)

    def rest(self) -> None:
        """Drop recorded steps of more rows than are planned for beside training, as an evaluation
        leaves them, and merged weights, where backward passes want the memory.
        """
        if not any(p.requires_grad for p in self.model.parameters()):
            return
        if self.board is not None and self.board.cache.slots > self.keeps:
            self.board = None
        if not self.keeps and self.narrowed is not None:
            self.narrowed.part()

    def keep(self, rows: int) -> bool:
        """Keep the caches of so many rows between calls. Without recorded steps there is nothing to
        keep. Returns: whether there is.
        """
        self.keeps = rows if self.flash else 0
        return self.keeps > 0

    def close(self) -> None:
        """Nothing is held that does not go with the engine."""

    def peak_bytes(self, rows: int, load: Load) -> float:
        """Return an estimate of the most that a call takes beside the model."""
        return peak_bytes(self, rows, load)

    def generate(
        self, requests: Requests, sampling: SamplingConfig, watch: Watch | None = None
    ) -> Completions:
        """Sample completions, with half the rows when memory runs out.

        Raises: ConfigError where a prompt is empty or does not fit the context with max_new_tokens.
        """
        check_prompts(requests, sampling, self.model, self.context_length)
        return self.limit.run(lambda rows: self._generate(requests, sampling, rows, watch))

    def _generate(
        self, requests: Requests, sampling: SamplingConfig, rows: int, watch: Watch | None
    ) -> Completions:
        # Without a cache of casts, which would outlive a recording that it was made in; the narrow
        # twin needs none.
        eager, narrow = self.recorder is None, self.autocast is not None
        half = torch.autocast(self.device.type, self.autocast, narrow, cache_enabled=eager)
        attention = evaluating(self.used, ATTENTION if self.replaces else None)
        quick = packed(self.used) if self.packs else nullcontext()
        if requests.kept is not None and not self.keeps_turns(requests.kept):
            requests.kept.drop()
            requests = replace(requests, kept=None)
        try:
            with attention, fsdp.inference(self.model), half, quick, tracing_some() as trace:
                prefill = Prefill(self.used, requests, self.pad_id, self.dtype, self.piece)
                slots = self._allocate(requests, sampling, rows)
                schedule = Schedule(requests, *slots, prefill, self._decode, watch, self.stops)
                completions = schedule.run(trace)
            if self.board is not None and self.board.cache.columns > self.limit.columns:
                self.board = None  # else it would stay beside what is planned
        except BaseException:
            self.board = None
            if requests.kept is not None:
                requests.kept.drop()
            raise
        # Out of inference mode a clone is an ordinary tensor, which a loss may use.
        tensors = {
            name: tensor.clone() for name, tensor in vars(completions).items() if tensor is not None
        }
        return replace(completions, **tensors)

    def _allocate(
        self, requests: Requests, sampling: SamplingConfig, rows: int
    ) -> tuple[Rows, RowCache]:
        """Return slots for at most so many rows, as many for each member as it has requests."""
        count, new = requests.each * requests.samples, sampling.max_new_tokens
        slots = min(count, max(1, rows // requests.members))
        rows, longest = slots * requests.members, max(map(len, requests.prompts))
        kinds = Kinds.of(self.model.config, longest + new)
        if self.flash and kinds.window is None:
            board = self._open_board(rows, longest + new, sampling)
            # A turn of episodes has fewer rows than the one before: it takes a number that is
            # recorded, or soon will be, and leaves some of them empty.
            most = board.cache.slots // requests.members
            rows = requests.members * board.cache.worth_keeping(most, slots)
            return board.begin(self.used, rows, sampling, requests.logprobs), board.cache
        spare = new if count > slots else 0  # columns, so that shifts are rare
        cache: RowCache
        if self.shares and requests.samples > 1 and kinds.window is None:
            cache = SharedPromptCache(rows, new + spare, self.dtype, self.device)
        else:
            sizes = (rows, longest + new + spare, longest, self.dtype, self.device, kinds)
            cache = RecordedCache(self.recorder, *sizes) if self.recorder else ColumnCache(*sizes)
        state = Rows.allocate(rows, sampling, self.stop_ids, self.pad_id)
        return state.view(rows, sampling, requests.logprobs), cache

    def _open_board(self, rows: int, columns: int, sampling: SamplingConfig) -> Board:
        """Return buffers of so many rows of `columns` tokens: those of the last call where they
        have room, else larger ones in their place. Rows that are longer than planned, as those of
        another task, make room for one call.
        """
        assert self.recorder is not None
        board, new = self.board, sampling.max_new_tokens
        if board is not None and board.cache.slots > max(rows, self.limit.rows):
            board = self.board = None  # memory has run out since
        if board is None or not board.fits(rows, columns, new):
            if board is not None and columns <= self.limit.columns:
                rows, columns = max(rows, board.cache.slots), max(columns, board.cache.columns)
                new = max(new, board.rows.sampling.max_new_tokens)
            self.board = board = None  # before there is another
            most = replace(sampling, max_new_tokens=new)
            state = Rows.allocate(rows, most, self.stop_ids, self.pad_id)
            cache = FlashCache(rows, columns, self.recorder(self.device))
            self.board = board = Board(state, cache)
        return board

    def _decode(self, tokens: Tensor, mask: Mask, positions: Tensor, cache: RowCache) -> Tensor:
        """Return the logits [rows, V] behind one token per row, whose keys go to `cache`. mask:
        additive [rows, 1, 1, columns].
        """
        # A row that is past its end until the next look could leave the context, for which there
        # may be no embedding.
        positions = positions.clamp(max=self.context_length - 1)
        slots = {"slots": cache} if self.replaces else {}
        return self.forward(
            input_ids=tokens[:, None],
            attention_mask=mask,
            position_ids=positions[:, None],
            use_cache=True,
            **{cache_name(type(self.used)): cache},
            **slots,
        ).logits[:, -1]


def waits_for_experts(model: PreTrainedModel, device: hardware.AnyDevice) -> bool:
    """Return whether a forward of a mixture of experts on CUDA waits until the host knows how many
    rows each expert has, which a recording cannot. Only PyTorch's grouped products of bfloat16 on
    devices of compute capability 9.0 and 10.0 do not; of a preset only the least is known.
    """
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    if not experts or device.type != "cuda":
        return False
    grouped = model.config._experts_implementation == "grouped_mm"
    bf16 = all(parameter.dtype == torch.bfloat16 for parameter in experts)
    return not (grouped and bf16 and hardware.capability(device) in ((9, 0), (10, 0)))


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
        stops=setup.stops,
    )
    sampler.limit.floor = setup.floor
    return sampler
