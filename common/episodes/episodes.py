"""Episodes of several turns: the model answers and its environment replies, until one of them ends
the episode.

A turn is one call of the engine for all running episodes. The tokens that the model drew are never
re-encoded; the text of a reply is rendered once and appended (`Turns.render`), and the model is not
trained on it. A draw is keyed by its position among the tokens of model and environment, so that
neither batches nor ranks change it.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from common.config import ConfigError, SamplingConfig
from common.engine import Completions, Engine, Requests, Watch
from common.episodes.tool_calls import REFUSED, Calls, find_anchor, identify, render_chat
from common.model import SENTINEL, Decoder
from common.sampling import TurnCache
from common.task import Example, Messages, plain
from common.tasks import CLOSING, ENDED, Episode, FormError, LateError, SideBySide, start, wording

log = logging.getLogger("clutch")

MOST_LATE = 3  # after this many episodes that begin too late, the rest of a rollout is not started
LONGEST = 256  # characters of a token


class Played(str):
    """The text of an episode, by the model and the environment, with its outcome.

    Attributes:
        reward: the reward in [0, 1], or None.
        stop: the reason that it ended (`STOPS`).
        turns: the number of the model's answers.
        components: further scores that are reported next to the reward.
    """

    reward: float | None
    stop: str
    turns: int
    components: dict[str, float]

    def __new__(
        cls,
        text: str,
        reward: float | None,
        stop: str,
        turns: int,
        components: dict[str, float] | None = None,
    ) -> "Played":
        """Return the text with its outcome."""
        played = super().__new__(cls, text)
        played.reward, played.stop, played.turns = reward, stop, turns
        played.components = components or {}
        return played

    def __getnewargs__(self) -> tuple[Any, ...]:  # type: ignore[override]
        return str(self), self.reward, self.stop, self.turns, self.components


# The reasons that an episode ends: the model has answered without calling a tool; the environment
# has ended it; the model has had task.max_turns turns; the last of them had an unreadable call; a
# turn, or all turns together, reached algo.sampling.max_new_tokens; the replies reached
# task.reply_tokens; a start, reply or reward took longer than task.call_seconds; or it raised.
STOPS = (
    *("completed", "environment_done", "max_turns", "parse_error"),
    *("max_tokens", "reply_tokens", "tool_timeout", "tool_error"),
)


@dataclass(frozen=True)
class Turns:
    """The episodes of a task, with their limits.

    Attributes:
        task: has `episode(example)`, `max_turns`, `reply_tokens` (of all replies of an episode),
            `call_seconds` (for each call) and `overlap`.
        decode: the decoder of the model's tokens.
        examples: the example of each prompt.
        calls: reads calls of tools; None if the task has no tools.
        late: the errors of episodes that did not begin in time.
    """

    task: Any
    decode: Decoder
    examples: Sequence[Example]
    calls: Calls | None = None
    late: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, task: Any, decode: Decoder, examples: Sequence[Example]) -> "Turns":
        """Return the episodes of a task. Raises: ConfigError if the model cannot call the task's
        tools.
        """
        calls = Calls.find(decode.tokenizer, task.tools) if task.tools else None
        return cls(task, decode, examples, calls)

    @property
    def reply_tokens(self) -> int:
        """The most tokens of all replies of an episode; 0 with one turn, in which no reply is
        rendered.
        """
        return self.task.reply_tokens if self.task.max_turns > 1 else 0

    def begin(self, row: "Row") -> None:
        """Start the episode of a row; if its environment fails, the row records the error. Raises:
        ConfigError if it begins with another prompt than the task's.
        """
        example = self.examples[row.prompt]
        try:
            row.episode = episode = self.task.episode(example)
            prompt = start(episode, example, self.task.name, self.task.call_seconds)
        except LateError as error:
            row.fail("tool_timeout", str(error))
            row.episode = None
            self.late.append(str(error))
            return
        except ConfigError as error:
            row.fail("tool_error", str(error))
            row.close()
            return
        if prompt != self.task.prompt(example):
            why = (
                f"{self.task.name}, example {example.id}: an episode begins with another prompt"
                f" each time, although its seed is {example.extra['seed']}."
                " Let what it begins with follow from the seed alone, or a group of samples has"
                " nothing in common."
            )
            if not self.late:
                raise ConfigError(why)
            # An episode that is late draws from Python's generator while others begin.
            row.fail("tool_error", why)
            row.close()

    def render(self, messages: Messages, stop: int | None) -> list[int]:
        """Return the tokens that follow an answer ending with the token `stop`: the end of the
        answer, unless it is `stop`, the messages, and the beginning of the next answer.
        """
        tokenizer = self.decode.tokenizer
        end = "" if stop is None else tokenizer.decode([stop], skip_special_tokens=False)
        text = self.render_text(messages, end)
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def render_text(self, messages: Messages, end: str) -> str:
        """Return the text of these tokens.

        Args: end: the text of the token that ended the answer.
        """
        tokenizer = self.decode.tokenizer
        if tokenizer.chat_template is not None and self.calls is not None:
            return self.calls.render_replies(messages, end, self._ends)
        turns = [{"role": "assistant", "content": SENTINEL}, *messages]
        if tokenizer.chat_template is None:
            text = plain(turns)
        else:
            text = render_chat(tokenizer, [{"role": "user", "content": "?"}, *turns], begin=True)
        return text.rpartition(SENTINEL)[2].removeprefix(end)

    @cached_property
    def _ends(self) -> list[str]:
        """The texts of the tokens that end a turn."""
        ids = [[token] for token in sorted(self.decode.ends)]
        return self.decode.tokenizer.batch_decode(ids, skip_special_tokens=False)


def check_template(tokenizer: Any, stops: Sequence[int], tools: Sequence[Any] = ()) -> None:
    """Raise ConfigError if a conversation that is rendered as a whole differs from its turns
    rendered one after the other, or if `tools` cannot be called. Thoughts may differ: templates
    leave out those of earlier turns.
    """
    calls = Calls.find(tokenizer, tools) if tools else None
    if tokenizer.chat_template is None:
        return
    asked = [{"role": "user", "content": "?"}]
    if calls is None:
        answer = {"role": "assistant", "content": "It is 7."}
        reply = {"role": "user", "content": "Higher."}
    else:
        answer = calls.message()
        reply = {"role": "tool", "name": "add", "content": "Higher.", "tool_call_id": identify(0)}
    turns = Turns(None, Decoder(tokenizer, frozenset(stops)), (), calls)
    why = "a turn is rendered otherwise when it has been followed by another one"
    try:
        begun, anchor = render_chat(tokenizer, asked, tools), find_anchor(tokenizer, tools)
        whole = render_chat(tokenizer, [*asked, answer, reply], tools, begin=True)
        if reply["content"] not in turns.render_text([reply], ""):
            why = "it leaves out the replies"
        elif whole.startswith(begun + anchor):
            said = whole.removeprefix(begun + anchor)
            for end in tokenizer.batch_decode([[stop] for stop in stops]):
                behind = end + turns.render_text([reply], end)
                if said.endswith(behind) and (answer["content"] or SENTINEL) in said:
                    return
    except (ConfigError, *REFUSED) as error:
        why = str(error)
    other = "" if tools else ", or plain text with task.chat=false"
    raise ConfigError(
        f"the chat template of {tokenizer.name_or_path!r} cannot be used for several turns: {why}."
        f" Give another model{other}."
    )


@dataclass
class Row:
    """A running episode.

    Attributes:
        place: its index among the episodes of the rollout.
        prompt: the index of its prompt.
        sample: its sample id.
        episode: its environment; None if it has not begun or is closed.
        tokens: the tokens after the prompt.
        logprobs: the log-probability of each token.
        written: per token, whether the model drew it.
        turns: the number of the model's answers.
        environment_tokens: the number of tokens that the environment wrote.
        began: the index of the first token of the model's last answer.
        broken: whether logits were not finite.
        stop: the reason that it ended; None while it runs.
        error: the text of its error.
        reward: its reward, once it has ended.
        components: further scores.
    """

    place: int
    prompt: int
    sample: int
    episode: Episode | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)
    turns: int = 0
    environment_tokens: int = 0
    began: int = 0
    broken: bool = False
    stop: str | None = None
    error: str | None = None
    reward: float | None = None
    components: dict[str, float] = field(default_factory=dict)

    def fail(self, stop: str, error: str) -> None:
        """End the episode because of an error. Only the error's text is kept: its frames would keep
        the rollout's keys and values in memory.
        """
        self.stop, self.error = stop, self.error or error

    @property
    def drawn(self) -> int:
        """The number of tokens that the model drew."""
        return len(self.tokens) - self.environment_tokens

    def close(self) -> None:
        """Close the environment."""
        if self.episode is not None:
            self.episode.close()
            self.episode = None

    def played(self, text: str) -> Played:
        """Return the text of the episode with its outcome."""
        return Played(text, self.reward, self.stop or "", self.turns, self.components)


def play(
    engine: Engine, requests: Requests, sampling: SamplingConfig, watch: Watch | None = None
) -> Completions:
    """Play the episodes of a request, in the order (member, prompt, sample).

    Every row is padded to max_new_tokens plus task.reply_tokens. It counts as finished if its
    environment ended it.
    Raises: ConfigError for an error in the environment, or for an engine that cannot play episodes.
    """
    turns: Turns = requests.episodes
    if engine.separate and requests.population is not None:
        raise ConfigError(
            "this engine has the same prompts for all members of a population, and in an episode"
            " each member comes to prompts of its own. Use engine=native."
        )
    places = [
        (prompt, sample) for prompt in range(requests.each) for sample in range(requests.samples)
    ]
    rows = [
        Row(place, prompt, requests.first_sample + sample)
        for place, (prompt, sample) in enumerate(places * requests.members)
    ]
    # One half of the prompts is answered while the environments of the other half reply.
    halves = min(2, requests.each) if turns.task.overlap else 1
    cuts = [requests.each * half // halves for half in range(halves + 1)]
    most = sampling.max_new_tokens
    if turns.reply_tokens:
        columns = max(map(len, requests.prompts)) + most + turns.reply_tokens
        turn_cache = TurnCache(len(rows), columns, requests.members)
        requests = replace(requests, turn_cache=turn_cache)
    ids, waiting = requests.ids or range(requests.each), []
    try:
        late = len(turns.late)
        for row in rows:
            if len(turns.late) - late < MOST_LATE:
                turns.begin(row)
            else:  # each would wait for its time limit
                row.fail("tool_timeout", turns.late[-1])
        for first, end in pairwise(cuts):
            part = [row for row in rows if first <= row.prompt < end]
            prompts, at = requests.prompts[first:end], [row.place for row in part]
            asked = replace(requests, prompts=prompts, ids=ids[first:end], at=at)
            completions = engine.generate(asked, sampling, watch)
            _take(part, completions, most)
            waiting.append(Replies(part, turns, requests))
        while waiting:
            replies = waiting.pop(0)
            replies.add(most)
            if going := [row for row in replies.rows if row.stop is None]:
                _take(going, _continue(engine, requests, sampling, replies.rows), most)
                waiting.append(Replies(replies.rows, turns, requests))
        _settle([row for row in rows if row.episode is not None], turns)
        errors = [row.error for row in rows if row.error is not None]
        # With only one prompt, as when a dead group is replaced, the example may be at fault.
        if len(errors) == len(rows) and len({row.prompt for row in rows}) > 1:
            raise ConfigError(errors[0])
        if errors:
            log.warning(
                "%d of %d episodes ended because their environment failed. The first: %s",
                *(len(errors), len(rows), errors[0]),
            )
        return _lay_out(rows, turns, requests, sampling, completions.tokens.device)
    finally:
        _close(rows)
        if requests.turn_cache is not None:
            requests.turn_cache.drop()


def _close(rows: Sequence[Row]) -> None:
    """Close the environments in parallel. Those that hang are abandoned."""
    held = [row for row in rows if row.episode is not None]
    closing, hanging = SideBySide([(row.close,) for row in held], CLOSING), 0
    for number in range(len(held)):
        try:
            closing.result(number)
        except TimeoutError:
            hanging += 1
    closing.close()
    if hanging:
        log.warning(
            "%d of %d environments have not closed within %.0f seconds, and are left to themselves",
            *(hanging, len(held), CLOSING),
        )


def _continue(
    engine: Engine, requests: Requests, sampling: SamplingConfig, rows: Sequence[Row]
) -> Completions:
    """Return the next turn of the running rows. Every member requests the same number of rows: a
    member with fewer repeats the first one, and the result is discarded.
    """
    size, fill = len(rows) // requests.members, next(row for row in rows if row.stop is None)
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    going = [[row for row in part if row.stop is None] for part in parts]
    width = max(map(len, going))
    asked = [row for part in going for row in [*part, *[fill] * (width - len(part))]]
    ids = requests.ids or range(requests.each)
    following = replace(
        requests,
        prompts=[[*requests.prompts[row.prompt], *row.tokens] for row in asked],
        ids=[ids[row.prompt] for row in asked],
        samples=1,
        begun=[(row.sample, len(row.tokens)) for row in asked],
        apart=requests.population is not None,
        at=[row.place for row in asked],
    )
    most = sampling.max_new_tokens - min(row.drawn for row in asked)
    completions = engine.generate(following, replace(sampling, max_new_tokens=most))
    kept = [m * width + i for m, part in enumerate(going) for i in range(len(part))]
    return completions.take(kept)


def _take(rows: Sequence[Row], completions: Completions, most: int) -> None:
    """Append a turn to the rows, with at most `most` tokens of the model per row over all turns."""
    tokens, lengths = completions.tokens.tolist(), completions.lengths.tolist()
    finished, broken = completions.finished.tolist(), completions.broken.tolist()
    logprobs = None if completions.logprobs is None else completions.logprobs.tolist()
    for number, row in enumerate(rows):
        room = most - row.drawn
        length = min(lengths[number], room)
        row.tokens += tokens[number][:length]
        row.logprobs += [0.0] * length if logprobs is None else logprobs[number][:length]
        row.written += [True] * length
        row.turns += 1
        row.broken |= broken[number]
        if row.stop is None and (not finished[number] or lengths[number] > room):
            row.stop = "max_tokens"


class Replies:
    """The pending replies to the last answers of rows. Environments reply in parallel; an answer
    with an unreadable call gets the error as its reply.
    """

    def __init__(self, rows: Sequence[Row], turns: Turns, requests: Requests) -> None:
        self.rows, self.turns = rows, turns
        self.asked = [row for row in rows if row.stop is None]
        said = [row.tokens[row.began :] for row in self.asked]
        self.answers: list[dict[str, Any]] = [
            {"role": "assistant", "content": text} for text in turns.decode(said)
        ]
        if turns.calls is not None:
            for row, ids, answer in zip(self.asked, said, self.answers, strict=True):
                before = [*requests.prompts[row.prompt], *row.tokens[: row.began]]
                answer |= turns.calls.read(ids, before)
        calls = [
            None if "error" in answer else (_reply_to, row.episode, answer)
            for row, answer in zip(self.asked, self.answers, strict=True)
        ]
        self.calls = SideBySide(calls, turns.task.call_seconds)

    def add(self, most: int) -> None:
        """Wait for the replies and append them to the rows, or record why a row stops.

        Args: most: the most tokens that the model may draw per row.
        """
        for number, (row, answer) in enumerate(zip(self.asked, self.answers, strict=True)):
            try:
                if "error" in answer:
                    reply = [{"role": "tool", "content": f"error: {answer['error']}"}]
                else:
                    reply = self.calls.result(number)
            except TimeoutError:
                row.stop = "tool_timeout"
            except FormError:  # every other episode would raise it too
                raise
            except ConfigError as error:
                row.fail("tool_error", str(error))
            else:
                self._put(row, answer, reply, most)
        self.calls.close()

    def _put(self, row: Row, answer: dict[str, Any], reply: Messages | None, most: int) -> None:
        task = self.turns.task
        if reply is None:
            ended = self.turns.calls is None or answer.get("tool_calls")
            row.stop = "environment_done" if ended else "completed"
        elif row.turns == task.max_turns:
            row.stop = "parse_error" if "error" in answer else "max_turns"
        elif row.drawn == most:
            row.stop = "max_tokens"
        else:
            room = task.reply_tokens - row.environment_tokens
            if sum(len(message["content"]) for message in reply) > LONGEST * room:
                row.stop = "reply_tokens"  # avoids encoding a text of megabytes
                return
            ids = self.turns.render(reply, row.tokens[-1])
            if len(ids) > room:
                row.stop = "reply_tokens"
                return
            row.tokens += ids
            row.logprobs += [0.0] * len(ids)
            row.written += [False] * len(ids)
            row.environment_tokens += len(ids)
            row.began = len(row.tokens)


def _settle(rows: Sequence[Row], turns: Turns) -> None:
    """Get the rewards of the episodes. An episode that fails or hangs has no reward."""
    asked = SideBySide([(_earned_by, row.episode) for row in rows], turns.task.call_seconds)
    for number, row in enumerate(rows):
        try:
            row.components, row.reward = asked.result(number)
        except TimeoutError:
            row.stop = "tool_timeout"
        except ConfigError as error:
            row.fail("tool_error", str(error))
    asked.close()


def _earned_by(episode: Episode) -> tuple[dict[str, float], float | None]:
    with wording(f"the reward of {name_of(episode)}", ""):
        return episode.components(), episode.reward()


def name_of(episode: Episode) -> str:
    """Return the name of an episode's environment."""
    return getattr(episode, "name", type(episode).__name__)


def _reply_to(episode: Episode, message: dict[str, Any]) -> Messages | None:
    with wording(f"a reply of {name_of(episode)}", f", for {str(message)[:80]}"):
        reply = episode.reply(message)
        for message in reply or ():
            message["content"].encode()  # raises for a lone surrogate
        return reply


def _lay_out(
    rows: Sequence[Row],
    turns: Turns,
    requests: Requests,
    sampling: SamplingConfig,
    device: torch.device,
) -> Completions:
    """Return the rows as one batch."""
    width = sampling.max_new_tokens + turns.reply_tokens
    pad = turns.decode.tokenizer.pad_token_id

    def padded(name: str, fill: float) -> Tensor:
        parts = [getattr(row, name) for row in rows]
        return torch.tensor(
            [[*part, *[fill] * (width - len(part))] for part in parts], device=device
        )

    pairs = zip(rows, turns.decode([row.tokens for row in rows]), strict=True)
    return Completions(
        tokens=padded("tokens", pad),
        lengths=torch.tensor([len(row.tokens) for row in rows], device=device),
        finished=torch.tensor([row.stop in ENDED for row in rows], device=device),
        logprobs=padded("logprobs", 0.0) if requests.logprobs else None,
        broken=torch.tensor([row.broken for row in rows], device=device),
        written=padded("written", False),
        played=[row.played(text) for row, text in pairs],
    )
