"""The interface of a sampling engine: what goes in, what comes out, and how one is opened.

An engine is one module and one file in conf/engine: the file's `_target_` names a function that
takes a `Setup` and the file's other settings, and returns an `Engine`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from common.config import ConfigError, SamplingConfig
from common.distributed import Context
from common.memory import Load, RowLimit
from common.model import Adapter, context_name
from common.system import instantiate

if TYPE_CHECKING:
    from common.sampling import Kept, StopTexts

LOOP, LONGEST = 8, 256  # tokens at the end of a row that show a loop, and that are looked at


@dataclass(frozen=True, kw_only=True)
class Population:
    """Perturbed copies of the model, which are sampled from side by side.

    Rows of a member are adjacent in every forward, and every member has the same number of rows.

    Attributes:
        factors: yields the noise, for an engine with weights of its own: the name of each perturbed
            matrix, and left [members, out, r] and right [members, r, in], whose product is added.
        narrow: a context in which a forward has only the rows of a range of members, which begins
            and ends with a pair (0-1, 2-3, ...); None where a forward always has all of them.
        trunk: how many of the first blocks are the same for all members.
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
        prompts: token ids, at least one each; with `apart` those of member 0 come first, as many of
            each member.
        ids: what the draws of each prompt are keyed by; None = 0, 1, 2, ...
        samples: completions of each prompt. first_sample: id of the first one, so that more can be
            drawn later.
        draw: tells visits to the same prompt apart, for example the step.
        population: None, or the perturbed copies of the model that each complete all prompts.
        apart: whether each member has prompts of its own.
        begun: None, or where each prompt ends with the beginning of its completion, (sample id,
            tokens of the completion) of each: draws go on from there. There is one sample then.
        logprobs: whether to return the log-probabilities of the sampled tokens.
        episodes: plays the turns after the first (common.episodes.episodes); None = there are none.
        kept: where an engine may keep keys and values for the next turn; None = there is none. at:
            the episode of each completion there.
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
    kept: "Kept | None" = None
    at: Sequence[int] = ()

    @property
    def members(self) -> int:
        """The number of models that complete the prompts."""
        return 1 if self.population is None else self.population.members

    @property
    def each(self) -> int:
        """The number of prompts that a member completes."""
        return len(self.prompts) // self.members if self.apart else len(self.prompts)


@dataclass
class Completions:
    """The samples, in order (member, prompt, sample): N rows in all.

    tokens: int64 [N, L], padded with the pad id after `lengths`; the stop token, where there is
    one, is included.
    lengths: int64 [N]. finished: bool [N], False where max_new_tokens cut the row off.
    logprobs: float32 [N, L], of the sampled tokens under the tempered distribution; None if they
    were not asked for.
    broken: bool [N], True where the model's logits were not finite, so that the row says nothing.
    trains: bool [N, L], the tokens that the model drew; None = all. played: of episodes, their
    texts, which know what they earned; else None.
    """

    tokens: Tensor
    lengths: Tensor
    finished: Tensor
    logprobs: Tensor | None
    broken: Tensor
    trains: Tensor | None = None
    played: list[str] | None = None

    @classmethod
    def join(cls, parts: Sequence["Completions"]) -> "Completions":
        """Return the rows of several calls of equal sampling settings, one behind the other."""
        if len(parts) == 1:
            return parts[0]
        held = {name: [getattr(part, name) for part in parts] for name in vars(parts[0])}
        played = [text for texts in held.pop("played") for text in texts or ()]
        joined: dict[str, Any] = {
            name: None if some[0] is None else torch.cat(some) for name, some in held.items()
        }
        return cls(**joined, played=played or None)

    def take(self, rows: Sequence[int]) -> "Completions":
        """Return some of the rows, of which none is of an episode yet."""
        index = torch.tensor(rows, dtype=torch.long, device=self.tokens.device)
        tensors = {name: one[index] for name, one in vars(self).items() if one is not None}
        return Completions(**{"logprobs": None, **tensors})

    @property
    def generated(self) -> int:
        """The number of tokens, without those thrown away after a row's end."""
        return int(self.lengths.sum())

    def texts(self, decode: Callable[[list[list[int]]], list[str]]) -> list[str]:
        """Return the completions as text. decode: see common.model.prompts.Decoder."""
        if self.played is not None:
            return self.played
        pairs = zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)
        rows = [row[:length] for row, length in pairs]
        return decode(rows)

    def repeating(self) -> list[bool]:
        """Return for each row whether it was cut off while its end repeated itself."""
        loops = ends_in_a_loop(self.tokens, self.lengths)
        return (loops.cpu() & ~self.finished.cpu()).tolist()


def ends_in_a_loop(tokens: Tensor, lengths: Tensor) -> Tensor:
    """Return for each row of [N, L] token ids, padded behind its length [N], whether its last
    `LOOP` tokens, or more, are one sequence over and over, but for a tenth of them: bool [N].
    """
    width = tokens.shape[1]
    places = torch.arange(width, device=tokens.device) - width + lengths[:, None]
    ends = tokens.gather(1, places.clamp(min=0))  # rows as they end, all in the last column
    loops = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    for period in range(1, min(width, LONGEST) // 2 + 1):
        size = max(LOOP, 2 * period)
        tail = ends[:, -size:]
        same = (tail[:, period:] == tail[:, :-period]).double().mean(1)
        loops |= (same >= 0.9) & (lengths >= size)
    return loops


Watch = Callable[[int], None]  # told how many rows have just finished


class Engine(Protocol):
    """Samples completions from the model that is being trained.

    Attributes:
        context_length: tokens of prompt and completion together.
        limit: the rows of one forward; `generate` halves it when memory runs out.
        populations: whether rows of one call can belong to perturbed copies of the model.
        reproducible: whether a draw is a function of (seed, draw, prompt, sample, position).
        separate: whether it has weights of its own, in another process.
    """

    context_length: int
    limit: RowLimit
    populations: bool
    reproducible: bool
    separate: bool

    def generate(
        self, requests: Requests, sampling: SamplingConfig, watch: Watch | None = None
    ) -> Completions:
        """Sample completions. Raises: ConfigError where a prompt does not fit the context."""
        ...

    def refresh(self) -> None:
        """Take over the trainer's weights; nothing happens where they are shared."""
        ...

    def rest(self) -> None:
        """Lend memory to the trainer, until the next call."""
        ...

    def close(self) -> None:
        """Give back processes and memory; the engine may be used again."""
        ...

    def peak_bytes(self, rows: int, load: Load) -> float:
        """Return an estimate of the most that a call takes with `rows` rows per forward, beside a
        model that is not its own; with 0 rows, the bytes held when idle. It never falls as rows
        grow.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The parts that an engine is opened with.

    Attributes:
        model: the model that is trained. pad_id, stop_ids: token ids.
        context: of this rank. adapter: what is trained of the model, where it is not all.
        rows: rows of one forward at most. floor: the fewest that make sense.
        compile_mode: None, or a mode of torch.compile for the decode steps.
        autocast: None, or the dtype that float32 weights are used in.
        stops: texts that end a completion; None where only tokens do.
        members: perturbed copies of the model that are sampled from in one call at most, 0 where
            there are none. rank: of their noise.
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
    rank: int = 1


def open_engine(node: dict[str, Any], setup: Setup) -> Engine:
    """Open the engine of a file in conf/engine, with its settings. Raises: ConfigError if it cannot
    be opened.
    """
    needed = ("generate", "refresh", "rest", "close", "peak_bytes")
    return instantiate("engine", node, needed, setup=setup)


def check_prompts(requests: Requests, sampling: SamplingConfig, model: Any, room: int) -> None:
    """Raise ConfigError where a prompt is empty, or does not fit the engine's `room` of tokens with
    its completion.
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
