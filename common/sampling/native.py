"""The native engine: samples completions from unmodified Hugging Face decoders. The hot path of
three algorithms.

A prompt is prefilled once for all its samples (prefill.py). If it has several samples, its keys and
values are stored once: all rows of a prompt attend to them in one product (as in Hydragen,
arXiv:2402.05099), so a step reads them once per prompt and not once per row. Generated tokens have
a cache that is allocated once, in slots (kv_cache.py); a finished row's slot goes to the next
request (schedule.py).

On CUDA a decode step is several hundred kernels, each of which runs for less time than its launch
takes. So a step is recorded as a CUDA graph and replayed: one graph per number of rows and span of
columns, or, with flash attention (flash.py), one per number of rows, which later calls reuse. On a
CPU in bfloat16, where memory bandwidth is the limit, weights are packed once per call (`packed`),
and the attention kernel reads keys in place.

The random draw of a token is a function of (seed, draw, prompt id, sample id, position), applied
through the inverse CDF (slots.py); so a sample does not depend on its neighbours, on the number of
rows, or on the step at which a run was resumed. Greedy output equals `model.generate`.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel

from common.config import SamplingConfig
from common.device import device_of, dtype_of, hardware, target_of, tracing_some
from common.distributed import sharding_of
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
from common.sampling.turn_cache import TurnCache

# Tokens of a piece of a prefill: more at a time is not faster, and takes more memory.
PIECE_ON_CPU, PIECE = 1 << 12, 1 << 14


class Sampler:
    """The native engine: samples from `model` in this process, with the trainer's own weights.

    Args:
        model: a decoder whose attention uses transformers' cache and 4-d masks (Llama, Qwen2,
            Qwen3, GPT-2, ...).
        pad_id: the id of the padding token.
        stop_ids: the ids of tokens that end a row.
        rows: the number of slots, which is the most rows of one forward.
        compile_mode: a mode of torch.compile for decode steps; None = not compiled.
        graphs: whether to record decode steps as CUDA graphs, if `model` is on a CUDA device and
            not sharded.
        autocast: the dtype that float32 weights are cast to; None = no autocast. Autocast would
            cast them at every token, so linear layers keep a copy in that dtype, which `refresh`
            renews.
        stops: texts that end a row; None = only tokens end one.
        floor: the fewest rows of a forward that make sense.
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
        floor: int = 1,
    ) -> None:
        self.model = model
        self.stops = stops
        self.pad_id = pad_id
        self.stop_ids = torch.tensor(list(stop_ids), dtype=torch.long, device=self.device)
        sharded = sharding_of(model).shared
        self.row_limit = RowLimit("algo.rollout_rows", rows, floor, fixed=sharded)
        self.autocast = autocast
        eager = compile_mode is None
        self.narrowed = Narrow(model, autocast, eager) if autocast and not sharded else None
        self.used = model if self.narrowed is None else self.narrowed.twin
        # Steps with sharded weights are not recorded: gathering the weights cannot be.
        kind = target_of(model).type
        # Bytes of the copies that `refresh` merges an adapter into, so that a step launches no more
        # kernels than without an adapter; 0 = not merged. `keeps`: rows whose caches `rest` keeps.
        layers = self.narrowed.adapted if self.narrowed and kind == "cuda" else ()
        self.merged_bytes = sum(2 * x.in_features * x.out_features for x, _ in layers)
        self.keeps = 0
        recorded = graphs and kind == "cuda" and not sharded
        recorded = recorded and not waits_for_experts(self.used, target_of(model))
        self.recorder = CudaGraphs if recorded else None
        self.piece = PIECE_ON_CPU if kind == "cpu" else PIECE
        if keeps_states(model.config):
            self.piece //= 4  # recurrent layers take about four times as much memory per token
        self.forward = compiled(self.used, compile_mode) if compile_mode else self.used
        self.context_length = context_length(model)
        # Whether `ATTENTION` can replace the model's attention.
        attention = model.config._attn_implementation in ("sdpa", logprobs.ATTENTION)
        self.replaces = model._supports_attention_backend and attention
        # Then rows can share a prompt's keys. Not if steps are compiled or recorded: the rows that
        # share a prompt change with every refill, and each shape would need another compilation.
        self.shares = self.replaces and self.stored and compile_mode is None and not recorded
        self.board: Board | None = None  # of the last call, with flash attention

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return device_of(self.model)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of a row's recurrent states; 0 for models without recurrent layers."""
        config = self.model.config
        return count_state_bytes(config, self.dtype) if keeps_states(config) else 0

    @property
    def stored(self) -> bool:
        """Whether decode steps may read keys and values in place from the cache."""
        return attends_to_cache(self.model.config)

    def keeps_turns(self, turn_cache: TurnCache) -> bool:
        """Return whether episodes keep their keys and values between turns: the memory suffices for
        all of them, and the model has no recurrent states.
        """
        fits = len(turn_cache.lengths) <= self.row_limit.cached_episodes
        return fits and not keeps_states(self.model.config)

    @property
    def packs(self) -> bool:
        """Whether weights are packed for a call. Compiled or recorded steps use the weights
        unpacked.
        """
        eager = self.forward is self.used and self.recorder is None
        return eager and not sharding_of(self.model).shared

    @property
    def flash(self) -> bool:
        """Whether decode steps use flash attention (common/sampling/flash.py)."""
        recorded = self.recorder is not None and self.forward is self.used
        config, device = self.model.config, target_of(self.model)
        replaces = self.replaces and self.stored
        return recorded and replaces and varlen.has_flash(config, device, self.dtype)

    def describe(self) -> str:
        """Describe for the plan the attention of decode steps on CUDA and whether they are
        recorded, with the reason if not.
        """
        steps = "recorded as CUDA graphs" + ", the adapter merged" * bool(self.merged_bytes)
        if self.flash:
            return f"flash, steps {steps}"
        device = target_of(self.model)
        why = varlen.why_not_flash(self.model.config, device, self.dtype)
        if self.recorder is None:
            because = "engine.cuda_graphs=false"
            if sharding_of(self.model).shared:
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
        """The dtype of activations, and so of the cache."""
        return self.autocast or dtype_of(self.model)

    def refresh(self) -> None:
        """Renew the half-precision copy of the weights; without a copy the weights are shared."""
        if self.narrowed is not None:
            self.narrowed.refresh(self.merged_bytes > 0)

    def forgo_merging(self) -> None:
        """Compute the adapter separately from now on."""
        self.merged_bytes = 0

    def rest(self) -> None:
        """Free memory for backward passes: recorded steps with more rows than `keep` has granted,
        such as those of an evaluation, and merged adapter weights.
        """
        if not any(p.requires_grad for p in self.model.parameters()):
            return
        if self.board is not None and self.board.cache.slots > self.keeps:
            self.board = None
        if not self.keeps and self.narrowed is not None:
            self.narrowed.part()

    def keep(self, rows: int) -> bool:
        """Keep the caches of `rows` rows between calls. Returns whether there is something to keep,
        which only recorded steps have.
        """
        self.keeps = rows if self.flash else 0
        return self.keeps > 0

    def close(self) -> None:
        """Do nothing: the engine holds no processes."""

    def peak_bytes(self, rows: int, load: Load) -> float:
        """Return an estimate of the peak bytes of a call in addition to the model."""
        return peak_bytes(self, rows, load)

    def generate(
        self, requests: Requests, sampling: SamplingConfig, watch: Watch | None = None
    ) -> Completions:
        """Sample completions, with half the rows when memory runs out.

        Raises: ConfigError if a prompt is empty, or exceeds the context together with
        max_new_tokens.
        """
        check_prompts(requests, sampling, self.model, self.context_length)
        return self.row_limit.run(lambda rows: self.generate_once(requests, sampling, rows, watch))

    def generate_once(
        self, requests: Requests, sampling: SamplingConfig, rows: int, watch: Watch | None
    ) -> Completions:
        """Sample completions with at most `rows` rows per forward, without a retry when memory runs
        out.
        """
        # Without autocast's cache of casts, which would outlive the recording it was made in; the
        # half-precision copy needs no casts.
        eager, narrow = self.recorder is None, self.autocast is not None
        half = torch.autocast(self.device.type, self.autocast, narrow, cache_enabled=eager)
        attention = evaluating(self.used, ATTENTION if self.replaces else None)
        quick = packed(self.used) if self.packs else nullcontext()
        if requests.turn_cache is not None and not self.keeps_turns(requests.turn_cache):
            requests.turn_cache.drop()
            requests = replace(requests, turn_cache=None)
        try:
            inference = sharding_of(self.model).inference()
            with attention, inference, half, quick, tracing_some() as trace:
                prefill = Prefill(self.used, requests, self.pad_id, self.dtype, self.piece)
                slots = self._allocate(requests, sampling, rows)
                schedule = Schedule(requests, *slots, prefill, self._decode, watch, self.stops)
                completions = schedule.run(trace)
            if self.board is not None and self.board.cache.columns > self.row_limit.columns:
                self.board = None  # else it would take more memory than planned
        except BaseException:
            self.board = None
            if requests.turn_cache is not None:
                requests.turn_cache.drop()
            raise
        # A clone made outside of inference mode is an ordinary tensor, which a loss may use.
        tensors = {
            name: tensor.clone() for name, tensor in vars(completions).items() if tensor is not None
        }
        return replace(completions, **tensors)

    def _allocate(
        self, requests: Requests, sampling: SamplingConfig, rows: int
    ) -> tuple[Rows, RowCache]:
        """Return slots for at most `rows` rows, the same number per member, and their cache."""
        count, new = requests.each * requests.samples, sampling.max_new_tokens
        slots = min(count, max(1, rows // requests.members))
        rows, longest = slots * requests.members, max(map(len, requests.prompts))
        kinds = Kinds.of(self.model.config, longest + new)
        if self.flash and kinds.window is None:
            board = self._open_board(rows, longest + new, sampling)
            # A turn of episodes has fewer rows than the previous turn: it uses a number of rows
            # that is recorded, or soon will be, and leaves some of them empty.
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
        """Return buffers for `rows` rows of `columns` tokens: those of the last call if they are
        large enough, else larger ones in their place. Rows that are longer than planned, such as
        those of another task, get buffers for one call.
        """
        assert self.recorder is not None
        board, new = self.board, sampling.max_new_tokens
        if board is not None and board.cache.slots > max(rows, self.row_limit.rows):
            board = self.board = None  # memory has run out since
        if board is None or not board.fits(rows, columns, new):
            if board is not None and columns <= self.row_limit.columns:
                rows, columns = max(rows, board.cache.slots), max(columns, board.cache.columns)
                new = max(new, board.rows.sampling.max_new_tokens)
            self.board = board = None  # frees the old buffers before the new ones are allocated
            most = replace(sampling, max_new_tokens=new)
            state = Rows.allocate(rows, most, self.stop_ids, self.pad_id)
            cache = FlashCache(rows, columns, self.recorder(self.device))
            self.board = board = Board(state, cache)
        return board

    def _decode(self, tokens: Tensor, mask: Mask, positions: Tensor, cache: RowCache) -> Tensor:
        """Return the logits [rows, V] after one token per row, whose keys and values are added to
        `cache`.

        Args: mask: additive mask [rows, 1, 1, columns].
        """
        # A row that has ended runs on until the next look, and could exceed the context, beyond
        # which the model may have no position embedding.
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
    """Return whether a forward of a mixture of experts on CUDA waits for the host to learn the
    number of rows per expert, which a recorded graph cannot.

    Only PyTorch's grouped products in bfloat16 on devices of compute capability 9.0 and 10.0 do not
    wait. For a planned device the lowest capability of its preset is assumed.
    """
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    if not experts or device.type != "cuda":
        return False
    grouped = model.config._experts_implementation == "grouped_mm"
    bf16 = all(parameter.dtype == torch.bfloat16 for parameter in experts)
    return not (grouped and bf16 and hardware.capability(device) in ((9, 0), (10, 0)))


def open_native(setup: Setup, cuda_graphs: bool) -> Sampler:
    """Open the native engine (conf/engine/native.yaml)."""
    return Sampler(
        setup.model,
        pad_id=setup.pad_id,
        stop_ids=setup.stop_ids,
        rows=setup.rows,
        compile_mode=setup.compile_mode,
        graphs=cuda_graphs,
        autocast=setup.autocast,
        stops=setup.stops,
        floor=setup.floor,
    )
