"""The interface of a sampling engine: requests, completions, and the function that opens an engine.

An engine is one module and one file in conf/engine: the file's `_target_` names a function that
takes a `Setup` and the file's other settings, and returns an `Engine`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from common.config import ConfigError, SamplingConfig
from common.distributed import Context
from common.memory import Load, RowLimit
from common.model import Adapter, context_name
from common.system import instantiate

if TYPE_CHECKING:
    from common.sampling import StopTexts, TurnCache

# The fewest, and the most, tokens at the end of a row in which a loop is looked for.
LOOP, LONGEST = 8, 256


@dataclass(frozen=True, kw_only=True)
class Population:
    """Perturbed copies of the model (members), which are sampled from in one batch.

    Rows of a member are adjacent in every forward, and every member has the same number of rows.

    Attributes:
        members: the number of perturbed copies.
        factors: yields the noise, for an engine with weights of its own: the name of each perturbed
            matrix, and the factors left [members, out, r] and right [members, r, in] of the
            perturbation that is added to it.
        narrow: returns a context in which a forward has only the rows of a range of members, which
            begins and ends with a pair (0-1, 2-3, ...); None if a forward always has the rows of
            all members.
        trunk: the number of first blocks that are the same for all members.
    """

    members: int
    factors: Callable[[], Iterator[tuple[str, Tensor, Tensor]]] | None = None
    narrow: Callable[[range], AbstractContextManager[None]] | None = None
    trunk: int = 0


@dataclass(frozen=True, kw_only=True)
class Requests:
    """The prompts to sample from. The draws of a token are keyed by (seed, draw, prompt id, sample
    id, position).

    Attributes:
        prompts: token ids of each prompt, at least one token; with `apart` grouped by member, the
            same number per member, member 0 first.
        ids: prompt ids that key the draws; None = 0, 1, 2, ...
        samples: completions per prompt.
        first_sample: sample id of the first completion, so that further samples can be drawn later.
        seed: the seed of the run.
        draw: a number that distinguishes visits to the same prompt, for example the step.
        population: the perturbed copies of the model, each of which completes all prompts; None =
            the model itself.
        apart: whether each member has prompts of its own.
        begun: per prompt, (sample id, tokens) of the beginning of a completion that the prompt ends
            with; its draws continue from there, and `samples` is 1. None = completions begin after
            the prompt.
        logprobs: whether to return the log-probabilities of the sampled tokens.
        episodes: plays the turns after the first (common.episodes.episodes); None = one turn.
        turn_cache: where an engine may keep keys and values for the next turn; None = none.
        at: the episode of each completion in that cache.
    """

    prompts: Sequence[Sequence[int]]
    ids: Sequence[int] | None = None
    samples: int = 1
    first_sample: int = 0
    seed: int = 0
    draw: int = 0
    population: Population | None = None
    apart: bool = False
    begun: Sequence[tuple[int, int]] | None = None
    logprobs: bool = False
    episodes: Any = None
    turn_cache: "TurnCache | None" = None
    at: Sequence[int] = ()

    @property
    def members(self) -> int:
        """The number of models that complete the prompts; 1 without a population."""
        return 1 if self.population is None else self.population.members

    @property
    def each(self) -> int:
        """The number of prompts per member."""
        return len(self.prompts) // self.members if self.apart else len(self.prompts)


@dataclass
class Completions:
    """The sampled completions: N rows in the order (member, prompt, sample).

    Attributes:
        tokens: int64 [N, L] token ids, padded with the pad id after `lengths`; a stop token that
            was sampled is included.
        lengths: int64 [N], tokens per row.
        finished: bool [N], False if max_new_tokens cut the row off.
        logprobs: float32 [N, L], log-probabilities of the sampled tokens under the tempered
            distribution; None if the request did not ask for them.
        broken: bool [N], True if the model's logits were not finite, so that the row is
            meaningless.
        written: bool [N, L], True for tokens that the model drew; None = all.
        played: the texts of episodes, with their rewards; None for completions of one turn.
    """

    tokens: Tensor
    lengths: Tensor
    finished: Tensor
    logprobs: Tensor | None
    broken: Tensor
    written: Tensor | None = None
    played: list[str] | None = None

    @classmethod
    def join(cls, parts: Sequence["Completions"]) -> "Completions":
        """Concatenate the rows of several calls with equal sampling settings."""
        if len(parts) == 1:
            return parts[0]
        held = {name: [getattr(part, name) for part in parts] for name in vars(parts[0])}
        played = [text for texts in held.pop("played") for text in texts or ()]
        joined: dict[str, Any] = {
            name: None if some[0] is None else torch.cat(some) for name, some in held.items()
        }
        return cls(**joined, played=played or None)

    def take(self, rows: Sequence[int]) -> "Completions":
        """Return some of the rows. Not defined for rows of episodes."""
        index = torch.tensor(rows, dtype=torch.long, device=self.tokens.device)
        tensors = {name: one[index] for name, one in vars(self).items() if one is not None}
        return Completions(**{"logprobs": None, **tensors})

    @property
    def generated(self) -> int:
        """The number of sampled tokens, without those that were discarded after a row's end."""
        return int(self.lengths.sum())

    def texts(self, decode: Callable[[list[list[int]]], list[str]]) -> list[str]:
        """Return the completions as texts.

        Args: decode: turns lists of token ids into texts (common.model.prompts.Decoder).
        """
        if self.played is not None:
            return self.played
        pairs = zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)
        rows = [row[:length] for row, length in pairs]
        return decode(rows)

    def repeating(self) -> list[bool]:
        """Return per row whether it was cut off while it repeated one sequence of tokens."""
        loops = ends_in_a_loop(self.tokens, self.lengths)
        return (loops.cpu() & ~self.finished.cpu()).tolist()


def ends_in_a_loop(tokens: Tensor, lengths: Tensor) -> Tensor:
    """Return per row whether its end repeats one sequence of tokens.

    A row ends in a loop if its last `LOOP` tokens, or more, repeat a sequence of at most `LONGEST`
    / 2 tokens, with up to a tenth of the tokens different.
    Args: tokens: token ids [N, L], padded after `lengths` [N].
    Returns: bool [N].
    """
    width = tokens.shape[1]
    places = torch.arange(width, device=tokens.device) - width + lengths[:, None]
    ends = tokens.gather(1, places.clamp(min=0))  # aligned at the right: all rows end in column -1
    loops = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    for period in range(1, min(width, LONGEST) // 2 + 1):
        size = max(LOOP, 2 * period)
        tail = ends[:, -size:]
        same = (tail[:, period:] == tail[:, :-period]).double().mean(1)
        loops |= (same >= 0.9) & (lengths >= size)
    return loops


Watch = Callable[[int], None]  # called with the number of rows that have just finished


class Engine(Protocol):
    """Samples completions from the model that is being trained.

    Attributes:
        context_length: the most tokens of a prompt and its completion together.
        row_limit: the rows of one forward; `generate` halves it when memory runs out.
        populations: whether rows of one call can belong to perturbed copies of the model.
        reproducible: whether a draw is a function of (seed, draw, prompt, sample, position).
        separate: whether the engine has weights of its own, in another process.
    """

    context_length: int
    row_limit: RowLimit
    populations: bool
    reproducible: bool
    separate: bool

    def generate(
        self, requests: Requests, sampling: SamplingConfig, watch: Watch | None = None
    ) -> Completions:
        """Sample completions. Raises: ConfigError if a prompt does not fit the context."""
        ...

    def refresh(self) -> None:
        """Copy the trainer's weights into the engine; does nothing if the engine shares them."""
        ...

    def rest(self) -> None:
        """Free memory for the trainer, until the next call."""
        ...

    def close(self) -> None:
        """Free processes and memory. The engine may be used again."""
        ...

    def peak_bytes(self, rows: int, load: Load) -> float:
        """Return an estimate of the most bytes that a call takes with `rows` rows per forward, in
        addition to the trainer's model; with 0 rows, the bytes held when idle. It never falls as
        rows grow.
        """
        ...


@runtime_checkable
class ReplacesModel(Protocol):
    """The optional part of an Engine with weights of its own (`separate`): it can be given another
    model. If an engine lacks it, another one is opened for another model.
    """

    def use(self, model: Any | None) -> None:
        """Take the weights of `model`, which has the shapes of the last one, at the next `refresh`;
        None = hold no model until then, so that its memory is free.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The parts that an engine is opened with.

    Attributes:
        model: the model that is trained.
        pad_id: the id of the padding token.
        stop_ids: the ids of tokens that end a completion.
        context: the context of this rank.
        adapter: the adapter that is trained; None = all weights are trained.
        rows: the most rows of one forward.
        floor: the fewest rows of one forward that make sense.
        compile_mode: the mode of torch.compile for decode steps; None = not compiled.
        autocast: the dtype that float32 weights are cast to; None = no autocast.
        stops: texts that end a completion; None = only tokens end one.
        members: the most perturbed copies that one call samples from; 0 = none.
        noise_rank: the rank of their noise.
    """

    model: Any
    pad_id: int
    stop_ids: Sequence[int]
    context: Context
    adapter: Adapter | None = None
    rows: int
    floor: int = 1
    compile_mode: str | None = None
    autocast: torch.dtype | None = None
    stops: "StopTexts | None" = None
    members: int = 0
    noise_rank: int = 1


def open_engine(node: dict[str, Any], setup: Setup) -> Engine:
    """Open the engine of a file in conf/engine, with its settings. Raises: ConfigError if it cannot
    be opened.
    """
    needed = ("generate", "refresh", "rest", "close", "peak_bytes")
    return instantiate("engine", node, needed, setup=setup)


def check_prompts(requests: Requests, sampling: SamplingConfig, model: Any, room: int) -> None:
    """Raise ConfigError if a prompt is empty, or if a prompt and its completion exceed the engine's
    context of `room` tokens.
    """
    for index, prompt in enumerate(requests.prompts):
        if not prompt:
            raise ConfigError(f"prompt {index} is empty. Give each prompt at least one token.")
    longest = max(len(prompt) for prompt in requests.prompts)
    if longest + sampling.max_new_tokens > room:
        raise ConfigError(
            f"a prompt of {longest} tokens and max_new_tokens={sampling.max_new_tokens} exceed the"
            f" model's {context_name(model)} of {room}. Lower algo.sampling.max_new_tokens to"
            f" {max(0, room - longest)}, or shorten prompts."
        )
