"""Prompts and answers from the user's own rows, with a reward chosen by name. No code needed.

    python launch.py algo=NAME task=custom task.path=data.jsonl task.prompt_field=question
    task.answer_field=answer

All errors in the rows are found before the model is loaded, and reported with file, row and field.
"""

import inspect
import logging
import random
import string
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Annotated, Any

import Levenshtein

from common.config import (
    ConfigError,
    Nonnegative,
    Part,
    Positive,
    Share,
    build,
    one_of,
    shipped,
    unused,
)
from common.task import Conversation, Example, Messages, plain
from common.tasks import answers, conversation, equality, numbers
from common.tasks.base import Chat, Component, Rows, converse, percent, right_from, tell, weigh
from common.tasks.checked import is_finite
from common.tasks.data import Incomplete, IncompleteError, Reading, Row, names_file, with_point
from common.tasks.functions import ANSWERS, STORED, Own, bind, find_function
from common.tasks.logged import Logged, current
from common.tasks.similarity import (
    SIMILARITIES,
    count_words,
    find_similarity,
    find_tokenizer,
    signatures,
    text_metrics,
    text_scores,
)

log = logging.getLogger("clutch")

LONGEST = 1000  # characters of an answer whose similarity is measured
MOST_HELD_OUT = 1000  # the most test rows if task.test_share is not set
NUMERIC = ("numeric", "math")
_VERL = "reward_model.ground_truth"  # the field of the answer in verl's files
REWARDS = ("exact", *NUMERIC, *(name for name in SIMILARITIES if name != "exact"))
# Headline measures that differ from the reward, so that the headline is not what is trained on.
_HEADLINE = {"bleu": "chrf", "chrf": "bleu"}


@dataclass(kw_only=True)
class CustomConfig:
    """The settings of conf/task/custom.yaml, which documents each of them."""

    name: str
    path: str | None
    test_path: str | None
    test_share: Share | None
    dataset_config: str | None
    dataset_split: str | None
    dataset_test_split: str | None
    columns: list[str] | None
    format: dict[str, Any]
    incomplete: Incomplete
    prompt_field: str | None
    answer_field: str | None
    solution_field: str | None
    template: str | None
    chat: Chat
    system: str
    reward: Annotated[str, one_of(*REWARDS)] | None
    reward_weight: Nonnegative
    rewards: dict[str, Nonnegative]
    reward_errors: Annotated[str, one_of("error", "skip")]
    right_at: float
    call_seconds: Positive
    partial: Part
    tolerance: Part
    target_language: str | None
    share_right: Share

    def __post_init__(self) -> None:
        needed = {
            "path=data.jsonl": self.path,
            "prompt_field=question": self.prompt_field or self.template,
        }
        for example, value in needed.items():
            if value is None:
                key = example.partition("=")[0]
                raise ConfigError(f"task.{key} is not set. Give it, for example task.{example}.")
        names = template_fields(self.template) if self.template is not None else []
        if self.template is not None and not names:
            raise ConfigError(
                f"task.template={self.template!r} holds no field. Put one in braces, as in"
                f" '{{{self.prompt_field or 'question'}}}'."
            )
        if self.answer_field and self.answer_field in (names or [self.prompt_field]):
            raise ConfigError(
                f"task.answer_field={self.answer_field!r} also stands in the prompt. Name another"
                " field, or leave it out of the prompt."
            )
        if self.solution_field and self.solution_field in (names or [self.prompt_field]):
            raise ConfigError(
                f"task.solution_field={self.solution_field!r} also stands in the prompt. Name"
                " another field, or leave it out of the prompt."
            )
        asked, hub = self.prompt_field, ("dataset_config", "dataset_split", "dataset_test_split")
        assert self.path is not None
        file = names_file(self.path)
        unused(
            (
                asked and names and asked not in names,
                f"task.prompt_field={asked!r}",
                f"with task.template={self.template!r}, which does not hold {{{asked}}}",
            ),
            (self.system and not self.chat, "task.system", "with task.chat=false"),
            (
                self.partial != shipped("task/custom.yaml")["partial"]
                and self.reward not in ("exact", *NUMERIC),
                f"task.partial={self.partial}",
                "without task.reward"
                if self.reward is None
                else f"with task.reward={self.reward}, which is partial itself",
            ),
            (
                self.tolerance and self.reward not in NUMERIC,
                f"task.tolerance={self.tolerance}",
                f"with task.reward={self.reward}",
            ),
            (
                self.target_language and self.reward in NUMERIC,
                f"task.target_language={self.target_language}",
                f"with task.reward={self.reward}",
            ),
            *((file and getattr(self, key), f"task.{key}", "with a file") for key in hub),
        )
        tests = ("test_path", "dataset_test_split", "test_share")
        chosen = [key for key in tests if getattr(self, key) is not None]
        if len(chosen) > 1:
            raise ConfigError(
                f"task.{chosen[0]} and task.{chosen[1]} both give the test rows. Leave one out."
            )


class Custom(Rows):
    """The task, with the settings of conf/task/custom.yaml; `question` is the whole prompt."""

    # the signature for help() and common.tasks.build, in place of **settings
    __signature__ = inspect.signature(CustomConfig)
    least = 1

    def __init__(self, **settings: Any) -> None:
        self.config = config = build(CustomConfig, settings, "task")
        self.name, self.chat, self.right_at = config.name, config.chat, config.right_at
        self._check_rewards()
        functions = {name: find_function(name) for name in config.rewards}
        # A user's function may not be repeatable.
        self.repeatable = self.repeatable and not config.rewards
        if config.reward == "math":
            equality.math_verify("task.reward=math", "task.reward=numeric")
        self.reading = Reading(config.columns, config.format, config.incomplete)
        assert config.path is not None
        train = self._read(config.path, "task.path", config.dataset_split or "train")
        test = []
        if config.test_path is not None:
            test = self._read(config.test_path, "task.test_path", "test")
        elif config.dataset_test_split is not None:
            test = self._read(config.path, "task.path", config.dataset_test_split)
        held_out = min(MOST_HELD_OUT, max(1, len(train) // 5))
        if config.test_share is not None:
            held_out = round(config.test_share * len(train))
        # A conversation that ends with its answer is learnt from as a whole.
        self.dialogues = config.prompt_field is not None and config.answer_field is None
        self.drawn = not test  # files are often sorted
        self.split(self._source(), train, test, held_out)
        rows = [row for split in ("train", "test") for row in self.examples(split)]
        if config.reward == "math":
            texts = [row.extra["final"] for row in rows if row.extra["value"] is None]
            equality.warn_of_unread(self._source(), texts)
        self._choose_measures([row.answer for row in rows])
        names = dict.fromkeys(name for row in rows for name in row.extra.get("row", ()))
        if several := sum("others" in row.extra for row in rows):
            log.info("%d of %d rows have several answers: any of them is right", several, len(rows))
        self.has_answers = all(row.answer for row in rows)
        self.columns = [name for name in names if name not in ("prompts", "completions")]
        if functions:
            own = {} if config.reward is None else {config.reward: config.reward_weight}
            self.weights = {**own, **config.rewards}
            self.components: dict[str, Component] = dict.fromkeys(own, self._scores)
        self.measures_whole = config.reward is None
        self.owns: list[Own] = []
        self.whole = set(functions)  # components that also get thoughts (common/tasks/thoughts.py)
        for name, score in functions.items():
            self.components[name] = self.component(self.bound(name, score))

    @property
    def has_functions(self) -> bool:
        """Whether functions of the user contribute to the reward."""
        return bool(self.config.rewards)

    @property
    def logs(self) -> bool:
        """Whether a function of the user may log numbers."""
        return any("log_metric" in own.takes.values() for own in self.owns)

    def _check_rewards(self) -> None:
        """Raise ConfigError if nothing gives a score, and for settings of functions without a
        function.
        """
        if self.has_functions:
            self._check_weights()
            return
        if self.config.reward is None:
            raise ConfigError(
                "task.reward=null leaves nothing that scores. Give task.rewards, such as"
                " 'task.rewards={my_rewards.brevity: 1.0}', or a task.reward."
            )
        usual = shipped("task/custom.yaml")
        for key in ("call_seconds", "reward_errors", "right_at", "reward_weight"):
            value = getattr(self.config, key)
            unused((value != usual[key], f"task.{key}={value}", "without task.rewards"))

    def _check_weights(self) -> None:
        """Raise ConfigError if no weight is above 0, and for a weight of a reward that is
        not set.
        """
        weight, rewards = self.config.reward_weight, self.config.rewards
        usual = shipped("task/custom.yaml")["reward_weight"]
        without = self.config.reward is None
        unused((without and weight != usual, f"task.reward_weight={weight}", "without task.reward"))
        if rewards and not any(rewards.values()) and (without or not weight):
            raise ConfigError(
                f"task.rewards={rewards} leaves nothing that scores, as every weight is 0. Give one"
                " a weight above 0."
            )

    def bound(self, name: str, score: Callable[..., Any], what: str = "") -> Own:
        """Return a function of the user together with the arguments that it takes.

        Args: what: the setting that names it; "" = task.rewards.
        """
        skip = self.config.reward_errors == "skip"
        own = bind(name, score, self.columns, self.config.call_seconds, what, skip)
        own = own if self.has_answers else self._without_answers(own, what)
        self.owns.append(own)
        return own

    def _without_answers(self, own: Own, what: str) -> Own:
        """Return a function whose answer parameters take the columns of the same name, for rows
        without answers. Raises: ConfigError if it takes an answer and there is no such column.
        """
        takes = dict(own.takes)
        for name, kind in own.takes.items():
            if kind not in ("answer", ANSWERS, STORED):
                continue
            if kind == STORED and _VERL.partition(".")[0] in self.columns:
                continue
            if name not in self.columns:
                raise ConfigError(
                    f"{what or f'task.rewards names {own.name!r}'}, which takes a right answer"
                    f" ({'by position' if name.isdigit() else name}), and the rows have none. Give"
                    " task.answer_field, or name the parameter as a column. Columns there:"
                    f" {', '.join(self.columns)}."
                )
            takes[name] = name
        return replace(own, takes=takes)

    def component(self, own: Own) -> Component:
        """Return a function of the user's as a component of the reward."""
        return partial(self._score_lists if own.lists else self._score_each, own)

    def _choose_measures(self, wanted: Sequence[str]) -> None:
        """Choose the measures of text similarity, by the language of the answers."""
        config = self.config
        self._short = False
        if config.reward is None or config.reward in NUMERIC:
            return
        self.tokenizer = find_tokenizer(config.target_language, wanted, "task.target_language")
        # BLEU counts four words in a row.
        self._short = all(count_words(answer, self.tokenizer) < 4 for answer in wanted)
        if not self._of_few_words:
            self.signatures = signatures(self.tokenizer)
        if config.reward != "exact":
            self._similarity = find_similarity(config.reward, self.tokenizer)

    @property
    def _of_few_words(self) -> bool:
        return self._short and self.config.reward in ("exact", "levenshtein")

    def prompt(self, example: Example) -> str | Messages:
        """Return the prompt; with task.chat as a conversation, which is plain lines if the
        tokenizer has no template. A prompt from task.template keeps its layout.

        Raises: ConfigError for a conversation of a row if there is no chat template to render it.
        """
        if (messages := example.extra.get("messages")) is not None:
            if not (self.converses and self.templated):
                raise ConfigError(
                    f"task.prompt_field={self.config.prompt_field!r} holds conversations, which"
                    " need a chat template: give an instruction model, whose tokenizer has one"
                    " (task.chat=auto), or rows whose prompt is a text."
                )
            messages = conversation.with_system(messages, self.config.system)
            tools = example.extra.get("tools")
            return Conversation(messages, tools) if tools else messages
        laid_out = self.config.template is not None and not self.config.system
        if not self.config.chat or (laid_out and not self.converses):
            return example.question
        return converse(self.config.system, (), example.question)

    @property
    def solution(self) -> Callable[[Example], str | None] | None:
        """The worked solution of an example; None without task.solution_field."""
        if self.config.solution_field is None:
            return None
        return lambda example: example.extra["solution"]

    def hint(self, example: Example) -> str | Messages:
        """Return the prompt with the answer in it."""
        prompt = self.prompt(tell(example))
        if isinstance(prompt, str) or "messages" not in example.extra:
            return prompt
        hinted = conversation.with_hint(prompt, example.answer)
        tools = example.extra.get("tools")
        return Conversation(hinted, tools) if tools else hinted

    def pretraining(self, example: Example, draw: random.Random) -> tuple[str, str]:
        """Return the right answer with probability task.share_right, else the answer with a
        question mark appended, which is wrong and yet teaches the answer. (A longer wrong answer
        prevents learning: with the answer shown twice in a row, two-digit sums were learnt only by
        luck. LOG.md)
        """
        right = draw.random() < self.config.share_right
        return plain(self.prompt(example)), example.answer + ("" if right else "?")

    def _score_lists(
        self, own: Own, examples: Sequence[Example], completions: Sequence[str]
    ) -> list[Any]:
        """Return the scores of a function called as by TRL's trainers: with its prompts,
        completions (messages if the prompts are) and columns.
        """
        rows = _by_answer(examples) if ANSWERS in own.takes.values() else list(enumerate(examples))
        texts = [completions[place] for place, _ in rows]
        asked = [example for _, example in rows]
        prompts: list[Any] = [self.prompt(example) for example in asked]
        columns: dict[str, Any] = {"prompts": prompts, "completions": texts, "texts": texts}
        if self.converses:
            said = [[{"role": "assistant", "content": text}] for text in texts]
            columns["completions"] = said
        else:
            columns["prompts"] = list(map(plain, prompts))
        pairs = zip(prompts, texts, strict=True)
        columns["queries"] = [plain(prompt) + text for prompt, text in pairs]
        if "completion_ids" in own.takes and self.encode is not None:
            columns["completion_ids"] = self.encode(texts)
        columns[ANSWERS] = [example.answer for example in asked]
        if STORED in own.takes.values():
            columns[STORED] = list(map(self._stored, asked))
        columns["data_sources"] = [self._data_source(example) for example in asked]
        columns["extra_infos"] = [example.extra["row"].get("extra_info") for example in asked]
        for name in self.columns:
            columns[name] = [example.extra["row"].get(name) for example in asked]
        if len(rows) == len(examples):
            return own.call_lists(columns, len(rows))
        logged = Logged(current().state)
        scores = own.call_lists(columns, len(rows), logged)
        first = {place: number for number, (place, _) in reversed([*enumerate(rows)])}
        current().take(logged.rows([first[place] for place in range(len(examples))]))
        return _best(rows, scores, len(examples))

    def _score_each(
        self, own: Own, examples: Sequence[Example], completions: Sequence[str]
    ) -> list[Any]:
        """Return the scores of a function that takes one completion and further arguments."""
        rows = _by_answer(examples) if "answer" in own.takes.values() else [*enumerate(examples)]
        scores = own.call_each([self._offer(one, completions[place]) for place, one in rows])
        return _best(rows, scores, len(examples))

    def _offer(self, example: Example, text: str) -> dict[str, Any]:
        """Return the available arguments for a function of one completion, by kind or column."""
        row = dict.fromkeys(self.columns) | example.extra.get("row", {})
        return row | {
            "extra_info": row.get("extra_info"),
            "data_source": self._data_source(example),
            STORED: self._stored(example),
            "completion": text,
            "answer": example.answer,
            "prompt": example.question,
        }

    def _data_source(self, example: Example) -> str:
        return example.extra.get("row", {}).get("data_source") or self.name

    def _stored(self, example: Example) -> Any:
        """Return the right answer as stored in the row, for verl's functions: a text, or the value
        in the file, such as a list of answers or an object.
        """
        found, row = None, Row("the row", example.extra.get("row", {}))
        field = self.config.answer_field or ("" if self.has_answers else _VERL)
        with suppress(IncompleteError):  # rows of a conversation that ends with its answer
            found = row.get(field, "task.answer_field")
        if isinstance(found, str) and not self.has_answers:
            return found
        if found is None or isinstance(found, str) or conversation.holds(found):
            return example.answer
        return found

    def _scores(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        return [self._score(*pair) for pair in zip(examples, completions, strict=True)]

    def reward(self, example: Example, completion: str) -> float:
        """Return the score by task.reward, or with task.rewards the weighted mean."""
        if not self.has_functions:
            return self._score(example, completion)
        return weigh(self.components, self.weights, [example], [completion])[0]

    def _score(self, example: Example, completion: str) -> float:
        """Return the score by task.reward; with several answers the best one."""
        return max(self._score_by(one, completion) for one in _each_answer(example))

    def _right(self, example: Example, completion: str) -> bool:
        """Return whether the answer matches one of the right answers, by exact, numeric or math."""
        return any(self._is_right(one, completion) for one in _each_answer(example))

    def _score_by(self, example: Example, completion: str) -> float:
        """Return the score by one answer; a wrong one earns task.partial times its similarity."""
        if self.config.reward not in ("exact", *NUMERIC):
            return self._similarity(_whole(completion), example.answer)
        if self._is_right(example, completion):
            return 1.0
        answer = self.answer(completion) or ""
        wanted = example.extra.get("final", example.answer)
        return self.config.partial * Levenshtein.ratio(answer[:LONGEST], wanted)

    def _is_right(self, example: Example, completion: str) -> bool:
        if self.config.reward == "exact":
            return _whole(completion) == example.answer
        answer, wanted = self.answer(completion), example.extra["value"]
        if answer is None:
            return False
        value = self.read_value(answer)
        if value is not None and wanted is not None:
            return abs(value - wanted) <= Fraction(str(self.config.tolerance)) * abs(wanted)
        if self.config.reward == "numeric":
            return False
        final = example.extra["final"]
        return equality.equal(final, answer)

    def read_value(self, answer: str) -> Fraction | None:
        """Return the number that an answer stands for; with math a letter after it is a
        variable.
        """
        return numbers.read(answer, variables=self.config.reward == "math")

    def answer(self, completion: str) -> str | None:
        """Return the answer in a completion; None if there is none."""
        text = _whole(completion)
        if self.config.reward == "numeric":
            found = numbers.find_answer(text)
            tagged = found is None and answers.tagged(completion) is not None
            return text if tagged and text and not numbers.is_marked(text) else found
        return _final(text) if self.config.reward == "math" else text or None

    def _is_unread(self, completion: str) -> bool:
        """Return whether a completion contains an answer, or a number, that could not be parsed."""
        answer = self.answer(completion)
        if self.config.reward == "numeric":
            return numbers.is_unread(_whole(completion), answer)
        if answer is None or self.read_value(answer) is not None:
            return False
        return not equality.is_comparable(answer)

    def path_key(self, completion: str) -> str:
        """Return the calculations of a completion for numeric and math; else ""."""
        return answers.path_key(completion) if self.config.reward in NUMERIC else ""

    def metrics(self, examples: Sequence[Example], completions: Sequence[str]) -> dict[str, float]:
        """Return percentages: right answers, answers found, and answers that could not be parsed;
        or equal answers and text similarity, by BLEU and chrF if answers are long enough.
        """
        if self.config.reward in NUMERIC:
            return {
                "accuracy": percent(map(self._right, examples, completions)),
                "answered": percent(self.answer(text) is not None for text in completions),
                "unread": percent(map(self._is_unread, completions)),
            }
        if self.config.reward is None:
            scores = self.rewards(examples, completions)
            earned = [score for score in scores if score is not None and is_finite(score)]
            right = percent(score >= right_from(self) for score in earned)
            return {"reward": sum(earned) / max(1, len(earned)), "right": right}
        hypotheses = [_whole(text) for text in completions]
        wanted = list(map(_closest, examples, hypotheses))
        if self._of_few_words:
            return {
                "exact": percent(map(str.__eq__, hypotheses, wanted)),
                "similarity": percent(map(Levenshtein.ratio, hypotheses, wanted)),
            }
        measures = text_metrics(hypotheses, wanted, self.tokenizer)
        first = _HEADLINE.get(self.config.reward, "exact")
        if first == "bleu" and self._short:  # always 0 then
            first = "exact"
        return {first: measures.pop(first), **measures}

    def scores(
        self, examples: Sequence[Example], completions: Sequence[str]
    ) -> dict[str, list[float]]:
        """Return the contributions of the examples to BLEU and chrF, which are measures of a whole
        set.
        """
        if self.config.reward is None or self.config.reward in NUMERIC:
            return {}
        hypotheses = [_whole(text) for text in completions]
        return text_scores(hypotheses, list(map(_closest, examples, hypotheses)), self.tokenizer)

    # --- rows

    def _source(self) -> str:
        return f"task.path={self.config.path!r}"

    def _read(self, path: str, key: str, split: str) -> list[Example]:
        self._decimal = self.reading.decimal(path, key) if self.config.reward in NUMERIC else None
        rows = self.reading.rows(path, key, self.config.dataset_config, split)
        return self.reading.convert(rows, self._example)

    def _example(self, row: Row) -> Example:
        config = self.config
        messages, said = None, None
        if config.prompt_field is not None:
            messages = conversation.read(row, config.prompt_field, "task.prompt_field")
        if messages is not None:
            last = messages[-1]
            messages, said = conversation.split_answer(messages)
            if messages and "tool_calls" in messages[-1]:
                raise ConfigError(
                    f"task.prompt_field={config.prompt_field!r} ends with a call of a tool in"
                    f" {row.where}, behind which a model has nothing to say. Leave out that turn,"
                    " or put the reply of the tool behind it."
                )
            question = plain(messages).strip()
        elif config.prompt_field is not None:
            question = row.text(config.prompt_field, "task.prompt_field", numbers=True)
        if config.template is not None:
            names = template_fields(config.template)
            values = {name: row.passage(name, "task.template") for name in names}
            parts = string.Formatter().parse(config.template)
            question = "".join(
                before + (values[name] if name else "") for before, name, _, _ in parts
            )
            if not question.strip():
                raise IncompleteError(
                    f"task.template={config.template!r} makes an empty prompt of {row.where}. Fix"
                    " the row."
                )
        right = self._find_answers(row, messages, said, config.answer_field)
        found = [self._read_answer(answer, row) for answer in right]
        extra: dict[str, Any] = {}
        if config.rewards:  # objects as they are, and their parts by name
            extra["row"] = row.fields | row.whole
        extra |= {key: value for key, value in found[0].items() if key != "answer"}
        if messages is not None:
            extra["messages"] = messages
            if said is not None and "weight" in last:
                extra["weight"] = last["weight"]
            if tools := conversation.read_tools(row):
                extra["tools"] = tools
        if (field := config.solution_field) is not None:
            solution = conversation.read(row, field, "task.solution_field")
            text = solution[-1]["content"] if solution else row.text(field, "task.solution_field")
            extra["solution"] = text
        if len(found) > 1:
            extra["others"] = found[1:]
        return Example(0, question, found[0]["answer"], extra)

    def _find_answers(
        self, row: Row, messages: Messages | None, said: str | None, field: str | None
    ) -> list[str]:
        """Return the right answers of a row, any one of which is right. Raises: ConfigError if
        there is none.

        Args:
            messages: the row's conversation without the answer that it ends with.
            said: that answer; None = it ends with another turn.
            field: the field with the answers.
        """
        config = self.config
        if field is None and said is not None:
            return [said]
        if field is None and config.reward is None:
            return [""]
        if field is None and messages is not None:
            raise IncompleteError(
                f"task.prompt_field={config.prompt_field!r}: the conversation in {row.where} ends"
                f" with a turn of the {messages[-1]['role']}, so that it has no answer. End it"
                " with the assistant's turn, or name the answer with task.answer_field; or"
                " task.reward=null with task.rewards, whose functions need no answer."
            )
        if field is None:
            raise ConfigError(
                "task.answer_field is not set. Give it, for example task.answer_field=answer; or"
                " task.reward=null with task.rewards, whose functions need no answer. Fields of"
                f" {row.where}: {', '.join(row.fields)}."
            )
        if said is not None:
            raise ConfigError(
                f"task.prompt_field={config.prompt_field!r} ends with an assistant's turn in"
                f" {row.where}, which is its answer. Leave out task.answer_field={field!r}, or that"
                " turn."
            )
        messages = conversation.read(row, field, "task.answer_field")
        if messages is not None:  # one, as TRL's completions are
            return [messages[-1]["content"].strip()]
        texts = row.texts(field, "task.answer_field", numbers=True)
        texts = texts or [row.text(field, "task.answer_field")]  # raises: of none, none is right
        return list(dict.fromkeys(text.strip() for text in texts))

    def _read_answer(self, answer: str, row: Row) -> dict[str, Any]:
        """Return a right answer in the form that it is compared in."""
        if self.config.reward in NUMERIC:
            answer = with_point(answer, self._decimal, row.where)
            return {"answer": answer, **self._read_right(answer, row)}
        return {"answer": _whole(answer)}  # as of a completion

    def _read_right(self, answer: str, row: Row) -> dict[str, Any]:
        """Return the part of a row's answer that is compared, as text and as a number.

        Raises: ConfigError for an answer that is not a single number, except with `math`.
        """
        config, text = self.config, _whole(answer)
        # Of a completion the last number counts; a right answer must be nothing but one.
        sentence = config.reward == "numeric" and not numbers.is_marked(text)
        final = text if sentence else self.answer(answer)
        value = None if final is None else self.read_value(final)
        if final is None or (config.reward == "numeric" and value is None):
            raise IncompleteError(
                f"task.answer_field={config.answer_field!r} has no number in {row.where}, or none"
                f" that stands alone: {answer[-60:]!r}. Write numbers as 1234.5, 7/2 or 6e3, or"
                " use another reward: task.reward=math compares expressions, lists and intervals"
                " too, task.reward=exact texts. Fields there:"
                f" {', '.join(row.fields)}."
            )
        return {"final": final, "value": value}


def template_fields(template: str) -> list[str]:
    """Return the names in braces, in order. Raises: ConfigError for braces that do not match."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(
            f"task.template={template!r} has braces that do not fit: {error}. A field is {{NAME}};"
            " write a brace twice to have it in the text."
        ) from None
    parts = [part[1:] for part in parts if part[1] is not None]
    if any(not name or form or conversion for name, form, conversion in parts):
        raise ConfigError(
            f"task.template={template!r}: braces hold the name of a field, as in {{question}}, and"
            " nothing else. Write a brace twice to have it in the text."
        )
    return [name or "" for name, _, _ in parts]


def _each_answer(example: Example) -> Iterator[Example]:
    """Yield the example once per right answer."""
    yield example
    for other in example.extra.get("others", ()):
        yield replace(example, answer=other["answer"], extra=example.extra | other)


def _by_answer(examples: Sequence[Example]) -> list[tuple[int, Example]]:
    """Return each example once per right answer, with its index."""
    return [(n, one) for n, example in enumerate(examples) for one in _each_answer(example)]


def _best(rows: Sequence[tuple[int, Example]], scores: Sequence[Any], count: int) -> list[Any]:
    """Return per index, of `count`, the best score of its rows; None if no row has a score."""
    best: list[Any] = [None] * count
    for (place, _), score in zip(rows, scores, strict=True):
        if score is not None and not (best[place] is not None and best[place] >= score):
            best[place] = score
    return best


def _closest(example: Example, text: str) -> str:
    wanted = [one.answer for one in _each_answer(example)]
    if len(wanted) == 1:
        return wanted[0]
    return max(wanted, key=lambda answer: Levenshtein.ratio(text[:LONGEST], answer[:LONGEST]))


def _whole(completion: str) -> str:
    """Return the text between the last answer tags, or the whole text; stripped."""
    tagged = answers.tagged(completion)
    return (completion if tagged is None else tagged).strip()


def _final(text: str) -> str | None:
    r"""Return the text after the last ####, else in the last \boxed{}, else of the last line."""
    if numbers.is_marked(text):
        return numbers.find_answer(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    line = numbers.without_type(lines[-1][: numbers.LONGEST])
    return numbers.find_formula(line)
