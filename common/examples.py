"""The examples of a run: the training examples in their order and the held-out examples, chosen so
that their prompts fit the context, with the lengths of their prompts.
"""

import logging
import math
import random
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
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
from common.system import safe_read
from common.task import Example, TaskFeatures, plain
from common.tasks import SPLIT_SEED, Checked, ExampleOrder, Rows, thoughts

MANY = 20_000  # a split with more prompts is encoded only in part before the first step
SAMPLED = 1_000  # the number of longest, and of random, prompts that are encoded of such a split
REASONING = 64  # the least max_new_tokens for a model that was trained elsewhere
USUAL = 0.99  # share of answers whose lengths count for such a model
LOOKED_AT = 4096  # the most prompts that are encoded to find the longest one
# Validation examples if evaluate.validation_examples is null: a share of the training examples, at
# most MOST_VALIDATION. Fewer than FEW_VALIDATION are too few to choose by.
VALIDATION_SHARE, MOST_VALIDATION, FEW_VALIDATION = 0.1, 128, 16

log = logging.getLogger("clutch")


@dataclass(frozen=True, kw_only=True)
class Examples:
    """The examples of a run, once they are chosen.

    Attributes:
        order: the training examples, in the order of training.
        held_out: the examples of every evaluation.
        validation: training examples that are set aside, by which the exported model is chosen.
        longest_prompt: the number of tokens of the longest prompt.
        opening: the number of tokens that all prompts begin with.
        skipped: the number of prompts that are left out because they are too long.
        turns: limits and environment of episodes; None = the task has one turn.
    """

    order: ExampleOrder
    held_out: list[Example]
    longest_prompt: int
    opening: int
    skipped: int
    validation: list[Example] = field(default_factory=list)
    turns: Turns | None = None

    @property
    def reply_tokens(self) -> int:
        """The most tokens of all replies of an episode; 0 if the task has one turn."""
        return self.turns.reply_tokens if self.turns else 0


@dataclass(frozen=True)
class Fitting:
    """The examples whose prompts fit the context.

    Attributes:
        splits: the fitting examples by split.
        prompts: the token ids of their prompts.
        skipped: the number of examples whose prompts do not fit.
    """

    splits: dict[str, list[Example]]
    prompts: list[Sequence[int]]
    skipped: int = 0


def read_examples(run: Run, lm: LanguageModel, task: Any) -> Examples:
    """Read the training and the held-out examples of a run. Raises: ConfigError if a prompt does
    not fit the context or the test split is empty.
    """
    splits = {"train": list(task.examples("train")), "test": list_candidates(run, task)}
    trained = {(example.question, example.answer) for example in splits["train"]} - {("", "")}
    both = sum((example.question, example.answer) in trained for example in splits["test"])
    if both and lm.context.main:
        log.warning("%d of %d test examples are training examples too", both, len(splits["test"]))
    turns = read_turns(run, lm, task)
    fitting = fit_prompts(run, lm, task.prompt, splits, turns=turns)
    train, validation = set_aside(run, fitting.splits["train"], lm.context.out_dir)
    return Examples(
        order=ExampleOrder(train, run.seed),
        held_out=fitting.splits["test"][: run.evaluate.examples],
        validation=validation,
        skipped=fitting.skipped,
        turns=turns,
        **measure_prompts(fitting.prompts),
    )


def set_aside(run: Run, train: list[Example], folder: Path) -> tuple[list[Example], list[Example]]:
    """Split training examples into those that are trained on and those of validation, as
    `take_validation` does; examples with the same question and answer are copies.

    Args: folder: the run folder.
    Raises: ConfigError if none is left to train on.
    """
    count = count_validation(run, len(train), folder)
    if not count or run.evaluate.every == 0:
        needed = {"algo.patience": getattr(run.algo, "patience", None)}
        needed["evaluate.stop_at"] = run.evaluate.stop_at
        for key in [key for key, value in needed.items() if value is not None and run.algo.chooses]:
            raise ConfigError(
                f"{key}={needed[key]:g} needs measurements on validation examples. Set"
                f" evaluate.validation_examples, of the {len(train)} training examples, and an"
                " evaluate.every other than 0."
            )
    if not count:
        return train, []

    def identify(example: Example) -> Any:
        return (example.question, example.answer) if example.question or example.answer else None

    return take_validation(train, count, run.seed, identify, "evaluate.validation_examples")


def take_validation(
    train: list[Example], count: int, seed: int, identify: Callable[[Example], Any], setting: str
) -> tuple[list[Example], list[Example]]:
    """Return the examples that are trained on, and the first `count` of the order of training,
    which are those of validation. Copies of a validation example are in neither.

    Args:
        identify: the value that copies of an example share; None = it has no copies.
        setting: the key of `count`, for errors.
    Raises: ConfigError if none is left to train on.
    """
    validation = ExampleOrder(train, seed).take(0, count)
    taken, copied = {e.id for e in validation}, {identify(e) for e in validation} - {None}
    rest = [e for e in train if e.id not in taken and identify(e) not in copied]
    if not rest:
        raise ConfigError(
            f"{setting}={count} leaves none of the {len(train)} training examples to train on."
            " Lower it, or set it to 0."
        )
    return rest, validation


def count_validation(run: Run, count: int, folder: Path) -> int:
    """Return the number of validation examples, of `count` training examples.

    If evaluate.validation_examples is null, they are a tenth, but at most MOST_VALIDATION and at
    most evaluate.examples; none if that is too few to choose a model by. They are set aside whether
    they are measured or not, so that runs with keep=best and keep=last train on the same rows. A
    run that goes on keeps its number; one of a version without validation has none.
    """
    evaluate = run.evaluate
    if evaluate.validation_examples is not None or not run.algo.chooses or run.probe:
        return min(evaluate.validation_examples or 0, count)
    if run.resume != "no":
        begun = folder if run.resume == "auto" else Path(run.resume)
        kind = {"config": {"evaluate": {"validation_examples?": object}}}
        if (saved := safe_read.read_or_warn(begun / "run.yaml", kind)) is not None:
            return min(saved["config"]["evaluate"].get("validation_examples") or 0, count)
    wanted = min(int(VALIDATION_SHARE * count), MOST_VALIDATION, evaluate.examples)
    return wanted if wanted >= FEW_VALIDATION else 0


def measure_prompts(
    prompts: Sequence[Sequence[int]], hinted: Sequence[Sequence[int]] = ()
) -> dict[str, int]:
    """Return the sizes that a plan needs: "longest_prompt", the tokens of the longest prompt, and
    "opening", the number of tokens that all prompts begin with.

    Args: hinted: further prompts, which are sampled from but not trained on.
    """
    # The prompts of one step may share a longer opening than all prompts do; a plan does not know
    # them, and counts the shorter one.
    opening = len(find_opening(prompts, 0.0))
    return {"longest_prompt": max(map(len, [*prompts, *hinted])), "opening": opening}


def read_turns(run: Run, lm: LanguageModel, task: Any) -> Turns | None:
    """Return limits and environment of a task's episodes; None for a task with one turn. Raises:
    ConfigError if the tokenizer cannot render its conversations.
    """
    if TaskFeatures(task).episode is None:
        return None
    if stop := run.algo.sampling.stop:
        raise ConfigError(
            f"algo.sampling.stop={stop}: a turn of an episode ends with the template's own token."
            " Leave it out, or end turns in the environment."
        )
    check_template(lm.tokenizer, lm.stop_ids, task.tools)
    return Turns.of(task, lm.decode, ())


def list_candidates(run: Run, task: Any) -> list[Example]:
    """Return the test examples of a task from which evaluate.examples are taken.

    They are shuffled unless the task has drawn them at random. With prompts.too_long=skip all test
    examples are candidates, since some replace those that do not fit.
    Raises: ConfigError if the split is empty.
    """
    skip, rows = run.prompts.too_long == "skip", list(task.examples("test"))
    if not TaskFeatures(task).drawn:
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
    """Return the held-out examples of another task, and the number of tokens of their longest
    prompt.

    Args: tokens: the most tokens of a completion.
    Raises: ConfigError if a prompt does not fit the context.
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
    """Return the indices of the examples whose prompts are encoded before a run begins.

    These are all examples. In a split of more than MANY they are the prompts that may exceed `room`
    tokens, the longest texts, a random sample, and the first and the last in alphabetical order,
    which share no more than the opening that all prompts share.
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
    """Yield (index, token ids of the prompt) of each example, a batch at a time."""
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

    Args:
        ask: makes the prompt of an example.
        tokens: the most tokens of a completion; None = algo.sampling.max_new_tokens.
        turns: limits of episodes; None = the task has one turn.
    Raises: ConfigError if a prompt does not fit with prompts.too_long=error, or if no prompt of a
    split fits.
    """
    key = "max_new_tokens" if tokens else "algo.sampling.max_new_tokens"
    new: int = tokens or run.algo.sampling.max_new_tokens
    said, context = f"{key}={new}", context_length(lm.model)
    replies = turns.reply_tokens if turns else 0
    if replies:  # each later turn also has max_new_tokens at most
        said = f"twice {said} and task.reply_tokens={replies}, as an episode of several turns needs"
        new = 2 * new + replies
    fits: dict[str, list[Example]] = {}
    prompts: list[Sequence[int]] = []
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
                prompts.append(array("i", ids))
        fits[split] = [example for number, example in enumerate(examples) if number not in out]
    count = sum(map(len, splits.values()))
    if misfits and (run.prompts.too_long == "error" or not all(fits.values())):
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
    return Fitting(fits, prompts, len(misfits))


# --- the lengths of answers


def longest_answer(lm: LanguageModel, task: Any) -> int:
    """Return the most tokens that a completion may have, from the answers of a task.

    A tiny model gets twice the tokens of the longest answer and one for the stop token. A model
    that was trained elsewhere may reason, or write more than the answer. For such a model the
    longest of the shortest 99 % of answers counts twice, or once if it is a worked solution; the
    result is at least `REASONING` tokens, and at most the tokens that the context leaves after the
    longest prompt.
    """
    examples = [one for split in ("train", "test") for one in task.examples(split)]
    solve = TaskFeatures(task).solution or (lambda example: None)
    whole = [solve(one) or one.answer for one in examples]
    texts = list(dict.fromkeys(whole))
    ids = lm.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    tokens = dict(zip(texts, map(len, ids), strict=True))
    if lm.settings.path is None:
        return 2 * max(tokens.values(), default=0) + 1  # wrong answers may be longer
    wanted = sorted(
        tokens[text] * (2 if one.extra.get("final", one.answer) == text else 1)
        for one, text in zip(examples, whole, strict=True)
    )
    usual = 1 + (wanted[math.ceil(USUAL * len(wanted)) - 1] if wanted else 0)
    most = max(REASONING, usual)
    if TaskFeatures(task).episode is None and examples:
        some = examples[:: -(-len(examples) // LOOKED_AT)]
        prompts = encode_prompts(lm.tokenizer, [task.prompt(one) for one in some])
        lengths = sorted(map(len, prompts))
        context = context_length(lm.model)
        room = context - lengths[-1]
        if room < REASONING:  # the longest prompts will not fit; leave room for the others
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
    """Adapt a task to the tokenizer: set whether the tokenizer has a chat template
    (task.chat=auto), and wrap the task so that its answers are read after the thoughts of a
    completion (task.after).

    Args:
        node: the task's settings.
        built: whether the task was built from these settings alone.
    Raises: ConfigError for settings of task.after that cannot work.
    """
    own: Any = task.own
    if isinstance(own, Rows):
        own.adapt(lm.tokenizer.chat_template is not None, Encoder(lm.tokenizer))
    elif not built:
        return
    if (after := node.get("after")) is None or TaskFeatures(own).episode:
        return
    if not (examples := task.examples("test")):
        return
    ids = encode_prompts(lm.tokenizer, [task.prompt(examples[0])])[0]
    template = str(lm.tokenizer.chat_template or "")
    behind = thoughts.find(after, template, lm.tokenizer.decode(ids))
    if behind is not None:
        task.wrap(lambda own: thoughts.Answering(own, behind))
