"""The examples of a run: those to train on, in their order, and those that are held out; which of
their prompts fit the context, and how long they are.
"""

import logging
import math
import random
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from common.config import ConfigError, Run
from common.episodes import Turns, check_template
from common.language_model import LanguageModel
from common.model import (
    BATCH,
    Encoder,
    PromptBound,
    check_ids,
    context_length,
    context_name,
    encode_prompts,
    find_opening,
)
from common.task import Example, plain
from common.tasks import SPLIT_SEED, Checked, ExampleOrder, Rows, thoughts

MANY = 20_000  # prompts of a split, from which on not all are encoded before the first step
SAMPLED = 1_000  # the longest of them, and as many drawn ones, are
REASONING = 64  # tokens at least, for a model that was trained elsewhere and short answers
USUAL = 0.99  # share of answers whose lengths count for such a model
LOOKED_AT = 4096  # prompts at most, of which the longest says how much room there is

log = logging.getLogger("clutch")


@dataclass(frozen=True, kw_only=True)
class Examples:
    """The examples of a run, once they are chosen.

    Attributes:
        order: the training examples, as they come. held_out: what every evaluation measures.
        longest_prompt: tokens of the longest prompt; opening: tokens that prompts begin with.
        turns: how episodes are played; None where there is one turn.
        skipped: prompts that are left out because they are too long.
    """

    order: ExampleOrder
    held_out: list[Example]
    longest_prompt: int
    opening: int
    skipped: int
    turns: Turns | None = None

    @property
    def reply_tokens(self) -> int:
        """The tokens of all replies of an episode at most; 0 where there is one turn."""
        return self.turns.reply_tokens if self.turns else 0


@dataclass
class Fitting:
    """Examples by split whose prompts fit the context. prompts: the tokens of all of these;
    skipped: how many others there are.
    """

    splits: dict[str, list[Example]]
    prompts: list[Sequence[int]]
    skipped: int = 0


def read_examples(run: Run, lm: LanguageModel, task: Any) -> Examples:
    """Read the training and the held-out examples of a run. Raises: ConfigError."""
    splits = {"train": list(task.examples("train")), "test": list_candidates(run, task)}
    trained = {(example.question, example.answer) for example in splits["train"]} - {("", "")}
    both = sum((example.question, example.answer) in trained for example in splits["test"])
    if both and lm.context.main:
        log.warning("%d of %d test examples are training examples too", both, len(splits["test"]))
    turns = read_turns(run, lm, task)
    fitting = fit_prompts(run, lm, task.prompt, splits, turns=turns)
    return Examples(
        order=ExampleOrder(fitting.splits["train"], run.seed),
        held_out=fitting.splits["test"][: run.evaluate.examples],
        skipped=fitting.skipped,
        turns=turns,
        **measure_prompts(fitting.prompts),
    )


def measure_prompts(
    prompts: Sequence[Sequence[int]], hinted: Sequence[Sequence[int]] = ()
) -> dict[str, int]:
    """Return what plans need to know: the tokens of the longest prompt, and how many all begin
    with. hinted: other prompts, which no model is trained on.
    """
    # As of a set of many. The opening of the few prompts of a step is at least as long, and longer
    # where some of the task's prompts begin otherwise, which a plan does not know.
    opening = len(find_opening(prompts, 0.0))
    return {"longest_prompt": max(map(len, [*prompts, *hinted])), "opening": opening}


def read_turns(run: Run, lm: LanguageModel, task: Any) -> Turns | None:
    """Return how the episodes of a task are played; None of a task with one turn. Raises:
    ConfigError where the tokenizer cannot render its conversations.
    """
    if not hasattr(task, "episode"):
        return None
    if stop := run.algo.sampling.stop:
        raise ConfigError(
            f"algo.sampling.stop={stop}: a turn of an episode ends with the template's own token."
            " Leave it out, or end turns in the environment."
        )
    check_template(lm.tokenizer, lm.stop_ids, task.tools)
    return Turns.of(task, lm.decode, ())


def list_candidates(run: Run, task: Any) -> list[Example]:
    """Return the test examples of a task that evaluate.examples are taken of, in an order of chance
    where the task's own may be another: with prompts.too_long=skip all, since others take the place
    of those that do not fit. Raises: ConfigError where there are none.
    """
    skip, rows = run.prompts.too_long == "skip", list(task.examples("test"))
    if not getattr(task, "drawn", True):
        random.Random(SPLIT_SEED).shuffle(rows)
    held_out = rows[: None if skip else run.evaluate.examples]
    if not held_out:
        raise ConfigError(
            'the task has no test examples. Its examples("test") must return some, to be held out.'
        )
    return held_out


def hold_out_other(
    run: Run, lm: LanguageModel, task: Any, tokens: int
) -> tuple[list[Example], int]:
    """Return the held-out examples of another task, whose completions have `tokens` at most, and
    the tokens of their longest prompt.

    Raises: ConfigError where a prompt does not fit the context.
    """
    splits, turns = {"test": list_candidates(run, task)}, read_turns(run, lm, task)
    fitting, count = fit_prompts(run, lm, task.prompt, splits, tokens, turns), run.evaluate.examples
    longest = max(map(len, fitting.prompts[:count]))
    if turns and turns.reply_tokens:  # the last turn's prompt has all others in it
        longest += tokens + turns.reply_tokens
    return fitting.splits["test"][:count], longest


def _choose_encoded(
    lm: LanguageModel, ask: Callable[[Example], Any], examples: Sequence[Example], room: int
) -> Sequence[int]:
    """Return the places of the examples whose prompts are encoded before a run begins: all, or of a
    split of more than MANY those that may be longer than `room` tokens, the longest texts, some
    drawn ones, and the first and the last in order, which have in common what all begin with.
    """
    vectors: Any = lm.model.get_input_embeddings().weight
    if len(examples) <= MANY or len(lm.tokenizer) > vectors.shape[0]:
        return range(len(examples))
    bound = PromptBound(lm.tokenizer)
    bounds, low, high = array("d"), (chr(sys.maxunicode), 0), ("", 0)
    for number, example in enumerate(examples):
        prompt = ask(example)
        bounds.append(bound(prompt))
        text = plain(prompt)
        low, high = min(low, (text, number)), max(high, (text, number))
    order = sorted(range(len(examples)), key=bounds.__getitem__)
    fitting = bisect_right(order, room, key=bounds.__getitem__)
    drawn = random.Random(SPLIT_SEED).sample(range(len(examples)), SAMPLED)
    return sorted({*order[fitting:], *order[-SAMPLED:], *drawn, low[1], high[1]})


def _encode_each(
    lm: LanguageModel,
    ask: Callable[[Example], Any],
    examples: Sequence[Example],
    places: Sequence[int],
) -> Iterator[tuple[int, list[int]]]:
    """Yield each place with the tokens of its example's prompt; not all are held at once."""
    for start in range(0, len(places), BATCH):
        part = places[start : start + BATCH]
        asked = [ask(examples[number]) for number in part]
        yield from zip(part, encode_prompts(lm.tokenizer, asked, part), strict=True)


def fit_prompts(
    run: Run,
    lm: LanguageModel,
    ask: Callable[[Example], Any],
    splits: dict[str, list[Example]],
    tokens: int | None = None,
    turns: Turns | None = None,
) -> Fitting:
    """Return the examples whose prompts fit the context.

    Args: ask: makes the prompt of an example; tokens: of a completion, None =
    algo.sampling.max_new_tokens; turns: of episodes, None where there is one turn.
    Raises: ConfigError where one does not fit with prompts.too_long=error, or none does.
    """
    key = "max_new_tokens" if tokens else "algo.sampling.max_new_tokens"
    new: int = tokens or run.algo.sampling.max_new_tokens
    said, context = f"{key}={new}", context_length(lm.model)
    replies = turns.reply_tokens if turns else 0
    if replies:  # of another turn no row asks for more than max_new_tokens
        said = f"twice {said} and task.reply_tokens={replies}, as an episode of several turns needs"
        new = 2 * new + replies
    fitting = Fitting({split: list(examples) for split, examples in splits.items()}, [])
    misfits, longest = [], 0
    for split, examples in splits.items():
        encoded, out = _choose_encoded(lm, ask, examples, context - new), set()
        for number, ids in _encode_each(lm, ask, examples, encoded):
            which = examples[number].id
            check_ids(lm.model, lm.tokenizer, ids, f"the prompt of {split} example {which}")
            longest = max(longest, len(ids))
            if len(ids) + new > context:
                misfits.append((split, which, len(ids)))
                out.add(number)
            else:
                fitting.prompts.append(array("i", ids))
        if out:
            kept = [example for number, example in enumerate(examples) if number not in out]
            fitting.splits[split] = kept
    count = sum(map(len, splits.values()))
    fitting.skipped = len(misfits)
    if misfits and (run.prompts.too_long == "error" or not all(fitting.splits.values())):
        split, first, length = misfits[0]
        room, what = context - longest, context_name(lm.model)
        advice = f"Lower it to {room}, shorten" if room > 0 else "Shorten"
        advice = "Lower these, shorten" if replies else advice
        other = ", or leave them out with prompts.too_long=skip"
        other = " so that some fit" if run.prompts.too_long == "skip" else other
        raise ConfigError(
            f"{len(misfits)} of {count} prompts do not fit the model's {what} of {context}"
            f" tokens with {said}: the first is {split} example {first} with {length}"
            f" tokens, the longest has {longest}. {advice} the prompts{other}."
        )
    if misfits and lm.context.main:
        log.warning(
            "%d of %d prompts do not fit the model's context of %d tokens and are left out"
            " (prompts.too_long=skip)",
            *(len(misfits), count, context),
        )
    return fitting


# --- the lengths of answers


def longest_answer(lm: LanguageModel, task: Any) -> int:
    """Return how many tokens a completion may have, by the answers of a task: twice as many as
    the longest has, with the one that ends it.

    A model that was trained elsewhere may reason, or say more than the answer. Of its tasks the
    longest answer but for one in a hundred counts, a worked solution counts once, and what the
    context leaves behind the longest prompt is the most.
    """
    examples = [one for split in ("train", "test") for one in task.examples(split)]
    solutions = getattr(task, "solutions", {})
    whole = [solutions.get(one.question, one.answer) for one in examples]
    texts = list(dict.fromkeys(whole))
    ids = lm.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    tokens = dict(zip(texts, map(len, ids), strict=True))
    if lm.settings.path is None:
        return 2 * max(tokens.values(), default=0) + 1  # room for what is wrong, too
    wanted = sorted(
        tokens[text] * (2 if one.extra.get("final", one.answer) == text else 1)
        for one, text in zip(examples, whole, strict=True)
    )
    usual = 1 + (wanted[math.ceil(USUAL * len(wanted)) - 1] if wanted else 0)
    most = max(REASONING, usual)
    if not hasattr(task, "episode") and examples:
        some = examples[:: -(-len(examples) // LOOKED_AT)]
        prompts = encode_prompts(lm.tokenizer, [task.prompt(one) for one in some])
        lengths = sorted(map(len, prompts))
        context = context_length(lm.model)
        room = context - lengths[-1]
        if room < REASONING:  # for the others; the longest do not fit
            room = context - lengths[math.ceil(USUAL * len(lengths)) - 1]
        most = min(most, room) if room > 0 else most
    if most < usual or usual < 1 + max(wanted, default=0):
        longer = sum(1 + length > most for length in wanted)
        log.info(
            "completions may have %d tokens; %d of %d answers ask for more: raise"
            " algo.sampling.max_new_tokens for them",
            *(most, longer, len(wanted)),
        )
    return most


# --- a task and a tokenizer


def adapt_task(lm: LanguageModel, task: Checked, node: dict[str, Any], built: bool = True) -> None:
    """Tell a task with task.chat=auto whether the tokenizer has a chat template, and give it the
    answers of completions without the thoughts before them (task.after).

    Args: node: its settings; built: whether it is made from these alone. Raises: ConfigError.
    """
    own: Any = task.own
    if isinstance(own, Rows):
        own.templated = lm.tokenizer.chat_template is not None
        own.encode = Encoder(lm.tokenizer)
    elif not built:
        return
    if (after := node.get("after")) is None or hasattr(own, "episode"):
        return
    if not (examples := task.examples("test")):
        return
    ids = encode_prompts(lm.tokenizer, [task.prompt(examples[0])])[0]
    template = str(lm.tokenizer.chat_template or "")
    behind = thoughts.find(after, template, lm.tokenizer.decode(ids))
    if behind is not None:
        task.own = thoughts.Answering(own, behind)
