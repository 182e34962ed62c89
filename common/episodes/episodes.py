"""Episodes of several turns: the model answers, its environment replies, until one of them ends it.

A turn is one call of the engine for all episodes that go on. What the model drew stays as it was
drawn, token by token; the text of a reply is rendered once, behind it (`Turns.render`), and is
nothing that the model is trained on. A draw is keyed by its position among the model's and the
environment's tokens, so that neither batches nor ranks change it.
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
from common.sampling import Kept
from common.task import Example, Messages, plain
from common.tasks import CLOSING, ENDED, Episode, FormError, LateError, SideBySide, start, wording

log = logging.getLogger("clutch")

MOST_LATE = 3  # episodes of a rollout that are waited for in vain before they begin
LONGEST = 256  # characters of a token


class Played(str):
    """The text of an episode, the model's and the environment's, with what it came to.

    Attributes: reward: in [0, 1], or None; stop: why it ended (`STOPS`); turns: answers of the
    model; components: what is shown beside the reward.
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


# The model has answered without calling a tool; the environment has ended it; the model has had
# task.max_turns turns, or with the last of them has called what cannot be read; a turn, or the
# whole, was cut off by algo.sampling.max_new_tokens; the replies have filled task.reply_tokens; a
# beginning, a reply or the reward took longer than task.call_seconds, or raised.
STOPS = (
    *("completed", "environment_done", "max_turns", "parse_error"),
    *("max_tokens", "reply_tokens", "tool_timeout", "tool_error"),
)


@dataclass(frozen=True)
class Turns:
    """The episodes of a task, and how they are played.

    Attributes: task: has `episode(example)`, `max_turns`, `reply_tokens`, of all replies of an
    episode, `call_seconds` for each, and `overlap`; examples: of each prompt; calls: reads calls of
    tools, None where there are none.
    """

    task: Any
    decode: Decoder
    examples: Sequence[Example]
    calls: Calls | None = None
    late: list[str] = field(default_factory=list)  # of episodes that did not begin in time

    @classmethod
    def of(cls, task: Any, decode: Decoder, examples: Sequence[Example]) -> "Turns":
        """Return the episodes of a task. Raises: ConfigError where its tools cannot be called."""
        calls = Calls.find(decode.tokenizer, task.tools) if task.tools else None
        return cls(task, decode, examples, calls)

    @property
    def reply_tokens(self) -> int:
        """The tokens of all replies of an episode at most: of one turn no reply is rendered."""
        return self.task.reply_tokens if self.task.max_turns > 1 else 0

    def begin(self, row: "Row") -> None:
        """Start the episode of a row; where its environment fails, the row says so. Raises:
        ConfigError where it begins with another prompt.
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
            # One that is late draws from Python's generator while others begin.
            row.fail("tool_error", why)
            row.close()

    def render(self, messages: Messages, stop: int | None) -> list[int]:
        """Return the tokens that come behind an answer that ended with the token `stop`: the end of
        the answer, unless it is `stop`, the messages, and the beginning of the next answer.
        """
        tokenizer = self.decode.tokenizer
        end = "" if stop is None else tokenizer.decode([stop], skip_special_tokens=False)
        text = self.render_text(messages, end)
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def render_text(self, messages: Messages, end: str) -> str:
        """Return the text of these tokens. end: that of the token which ended the answer."""
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
    """Raise ConfigError where a conversation that is rendered as a whole differs from its turns,
    one behind the other, or where `tools` cannot be called. Thoughts may differ: templates leave
    out those of earlier turns.
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
    """An episode under way. place: among those of its rollout; episode: None where it has not
    begun; tokens: behind the prompt, with logprobs and trains of each, `told` of them the
    environment's; began: where the model's last answer begins.
    """

    place: int
    prompt: int
    sample: int
    episode: Episode | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    trains: list[bool] = field(default_factory=list)
    turns: int = 0
    told: int = 0
    began: int = 0
    broken: bool = False
    stop: str | None = None
    error: str | None = None
    reward: float | None = None
    components: dict[str, float] = field(default_factory=dict)

    def fail(self, stop: str, error: str) -> None:
        """End the episode because of an error. Its text is kept, and not the error, whose frames
        hold the rollout with its keys and values.
        """
        self.stop, self.error = stop, self.error or error

    @property
    def drawn(self) -> int:
        """The number of tokens that the model drew."""
        return len(self.tokens) - self.told

    def close(self) -> None:
        """Give back what the episode holds."""
        if self.episode is not None:
            self.episode.close()
            self.episode = None

    def played(self, text: str) -> Played:
        """Return what it came to."""
        return Played(text, self.reward, self.stop or "", self.turns, self.components)


def play(
    engine: Engine, requests: Requests, sampling: SamplingConfig, watch: Watch | None = None
) -> Completions:
    """Play the episodes of a request, in the order (member, prompt, sample).

    Every row is as wide as its own tokens and all replies may be. It is finished where its
    environment said so. Raises: ConfigError for a mistake of the environment, or an engine that
    cannot play.
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
        kept = Kept(len(rows), columns, requests.members)
        requests = replace(requests, kept=kept)
    ids, waiting = requests.ids or range(requests.each), []
    try:
        late = len(turns.late)
        for row in rows:
            if len(turns.late) - late < MOST_LATE:
                turns.begin(row)
            else:  # they would be waited for one by one
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
        # Of one prompt alone, as when a dead group is replaced, it may be that row's own fault.
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
        if requests.kept is not None:
            requests.kept.drop()


def _close(rows: Sequence[Row]) -> None:
    """Close the episodes side by side. Those that hang are left to themselves."""
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
    """Return the next turn of the rows that go on. Every member asks for as many: one that has
    fewer asks again for the first of all, and what comes of it goes nowhere.
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
    """Add a turn to the rows: what the model drew, and at most `most` tokens of a row in all."""
    tokens, lengths = completions.tokens.tolist(), completions.lengths.tolist()
    finished, broken = completions.finished.tolist(), completions.broken.tolist()
    logprobs = None if completions.logprobs is None else completions.logprobs.tolist()
    for number, row in enumerate(rows):
        room = most - row.drawn
        length = min(lengths[number], room)
        row.tokens += tokens[number][:length]
        row.logprobs += [0.0] * length if logprobs is None else logprobs[number][:length]
        row.trains += [True] * length
        row.turns += 1
        row.broken |= broken[number]
        if row.stop is None and (not finished[number] or lengths[number] > room):
            row.stop = "max_tokens"


class Replies:
    """The replies to the last answers of rows, on their way; several environments reply at the same
    time, and an answer that calls what cannot be read has the error as its reply.
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
        """Wait, and put the replies behind the rows, or say why a row stops. most: tokens that the
        model may draw in a row.
        """
        for number, (row, answer) in enumerate(zip(self.asked, self.answers, strict=True)):
            try:
                if "error" in answer:
                    reply = [{"role": "tool", "content": f"error: {answer['error']}"}]
                else:
                    reply = self.calls.result(number)
            except TimeoutError:
                row.stop = "tool_timeout"
            except FormError:  # as in every other episode
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
            room = task.reply_tokens - row.told
            if sum(len(message["content"]) for message in reply) > LONGEST * room:
                row.stop = "reply_tokens"  # a text of megabytes is not worth its tokens
                return
            ids = self.turns.render(reply, row.tokens[-1])
            if len(ids) > room:
                row.stop = "reply_tokens"
                return
            row.tokens += ids
            row.logprobs += [0.0] * len(ids)
            row.trains += [False] * len(ids)
            row.told += len(ids)
            row.began = len(row.tokens)


def _settle(rows: Sequence[Row], turns: Turns) -> None:
    """Ask what the episodes earned: nothing is known of one that fails to say it, or hangs."""
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
            message["content"].encode()  # raises where half a character stands alone
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
        trains=padded("trains", False),
        played=[row.played(text) for row, text in pairs],
    )
