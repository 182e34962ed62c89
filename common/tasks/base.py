"""The parts that tasks share: rows that are split once, and rewards that are weighted means."""

import logging
import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from common.config import ConfigError, no_effect, one_of, unused
from common.task import Example, Messages, TaskFeatures
from common.tasks.data import no_collection

log = logging.getLogger("clutch")

ROUNDING = 1e-9  # the rounding error of a weighted mean
RIGHT = 1 - ROUNDING  # the least reward of a right sample, unless the task declares another
SPLIT_SEED = 0  # not the run's seed, so that runs of a sweep are evaluated on the same test rows

# (examples, completions) -> a score for each, as a rule in [0, 1].
Component = Callable[[Sequence[Example], Sequence[str]], list[float]]
Key = Callable[[Example], Hashable]
Chat = Annotated[bool | str, one_of("auto", True, False)]


class Rows:
    """A task that holds its rows in memory."""

    name: str
    least = 2  # the fewest train rows
    dropped = 0  # train rows that were dropped because a test row has the same key
    drawn = True  # whether test rows are in random order, so that the first ones represent all
    repeatable = False  # whether the same example and text always earn the same reward
    chat: bool | str
    system = ""  # with chat: the system text
    # Of the tokenizer, once the model is known (`adapt`).
    templated = False
    encode: Callable[[Sequence[str]], list[list[int]]] | None = None

    def __init_subclass__(cls, **more: Any) -> None:
        """Mark tasks of this package as repeatable; other classes must declare it themselves."""
        super().__init_subclass__(**more)
        if "repeatable" not in vars(cls):
            cls.repeatable = cls.__module__.startswith(f"{__package__}.")

    def adapt(self, templated: bool, encode: Callable[[Sequence[str]], list[list[int]]]) -> None:
        """Adapt the task to a tokenizer.

        Args:
            templated: whether the tokenizer has a chat template.
            encode: turns texts into lists of token ids.
        """
        self.templated, self.encode = templated, encode

    @property
    def converses(self) -> bool:
        """Whether prompts are conversations."""
        return self.templated if self.chat == "auto" else bool(self.chat)

    def ask(self, text: str) -> str | Messages:
        """Return a text as a prompt: as a conversation with task.system if prompts are
        conversations.
        """
        return converse(self.system, (), text) if self.converses else text

    def check_system(self) -> None:
        """Raise ConfigError for a task.system that no prompt uses."""
        unused((self.system and not self.chat, "task.system", "with task.chat=false"))

    def split(
        self,
        where: str,
        train: Sequence[Example],
        test: Sequence[Example],
        held_out: int,
        key: Key = lambda example: example.question,
    ) -> None:
        """Store the rows, numbered. Without test rows, `held_out` train rows are drawn as test
        rows. Train rows with the `key` of a test row are dropped.

        Args: where: the source of the rows, for errors.
        Raises: ConfigError if too few rows are left.
        """
        if not test:
            train = list(train)
            random.Random(SPLIT_SEED).shuffle(train)
            test, train = train[:held_out], train[held_out:]
        tested = {key(example) for example in test}
        fresh = [example for example in train if key(example) not in tested]
        self.dropped = len(train) - len(fresh)
        if self.dropped:
            log.info(
                "%s: %d train rows are dropped: they also stand in the test rows",
                self.name,
                self.dropped,
            )
        if len(fresh) < self.least or not test:
            raise ConfigError(
                f"{where} leaves {len(fresh)} train and {len(test)} test rows;"
                f" {self.dropped} train rows also stand in the test rows. Give more rows."
            )
        with no_collection():
            self._splits = {
                split: [
                    Example(position, one.question, one.answer, one.extra)
                    for position, one in enumerate(rows)
                ]
                for split, rows in (("train", fresh), ("test", test))
            }

    def examples(self, split: str) -> Sequence[Example]:
        """Return the rows of `split`, "train" or "test"; no row is in both."""
        return self._splits[split]

    def reward(self, example: Example, completion: str) -> float:
        """Return the score of one completion: 1 if it is right, else less."""
        return self.rewards([example], [completion])[0]

    def rewards(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        """Return the `reward` of each completion."""
        return [self.reward(*pair) for pair in zip(examples, completions, strict=True)]


class Weighted(Rows):
    """A task with generated rows, or rows of a file, whose reward is the weighted mean of
    components.
    """

    path: str | None
    test_path: str | None
    weights: dict[str, float]
    generated: ClassVar[tuple[str, ...]]  # settings of generated rows alone
    of_files: ClassVar[tuple[str, ...]] = ()  # settings of the rows of files alone
    held_out: ClassVar[str]  # the setting for the number of held-out rows

    def fill(
        self,
        generate: Callable[[int], list[Example]],
        read: Callable[[str, str], Iterable[Example]],
        count: int,
        held_out: int,
        key: Key,
        shown: Sequence[str] = (),
    ) -> None:
        """Store generated rows, or those of task.path and task.test_path, without duplicates.

        Args: shown: the questions of the worked examples in prompts; rows with these questions are
        left out.
        """
        if self.path is None and self.test_path is not None:
            raise ConfigError(
                f"task.test_path={self.test_path!r} has no effect without task.path. Give it too."
            )
        if self.path is None:
            for name in self.of_files:
                why = "without task.path. Leave it out."
                no_effect(f"task/{self.name}.yaml", name, getattr(self, name), why)
            rows = generate(count + held_out)
            self.split(f"task={self.name}", rows[held_out:], rows[:held_out], 0, key)
            return
        names = (*self.generated, *([self.held_out] if self.test_path else []))
        why = f"with task.{'test_path' if self.test_path else 'path'}. Leave it out."
        for name in names:
            no_effect(f"task/{self.name}.yaml", name, getattr(self, name), why)
        known = {key(Example(0, question, "")) for question in shown}

        def take(path: str, setting: str) -> list[Example]:
            rows = distinct(read(path, setting), key)
            kept = [row for row in rows if key(row) not in known]
            if dropped := len(rows) - len(kept):
                text = "%s: %d rows are dropped: their questions stand in task.few_shot"
                log.info(text, path, dropped)
            return kept

        self.drawn = not self.test_path  # files are often sorted
        train = take(self.path, "task.path")
        test = take(self.test_path, "task.test_path") if self.test_path else []
        self.split(f"task.path={self.path!r}", train, test, min(held_out, len(train) // 5), key)

    def prompt(self, example: Example) -> str | Messages:
        """Return the question, which is already in the task's template; with task.chat as a
        conversation.
        """
        return self.ask(example.question)

    def weigh(self, **known: Component) -> None:
        """Select the components with a weight above 0. Raises: ConfigError for an unknown
        component, or if all weights are 0.
        """
        for name in self.weights:
            if name not in known:
                raise ConfigError(
                    f"task.weights.{name} is not a component. Components: {', '.join(known)}."
                )
        self.components = {name: known[name] for name, weight in self.weights.items() if weight}
        if not self.components:
            raise ConfigError("task.weights are all 0. Give one component a weight above 0.")

    def rewards(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        """Return the `reward` of each completion."""
        return weigh(self.components, self.weights, examples, completions)


def weigh(
    components: dict[str, Component],
    weights: dict[str, float],
    examples: Sequence[Example],
    completions: Sequence[str],
) -> list[Any]:
    """Return the weighted mean of the components' scores, per completion."""
    scores = {name: one(examples, completions) for name, one in components.items()}
    return weighted(scores, weights)


def weighted(scores: dict[str, list[Any]], weights: dict[str, float]) -> list[Any]:
    """Return per row the weighted mean of its component scores that are not None; None if it has
    none.
    """
    means: list[Any] = []
    for row in zip(*scores.values(), strict=True):
        pairs = zip(scores, row, strict=True)
        parts = [(weights[name], score) for name, score in pairs if score is not None]
        total = sum(weight for weight, _ in parts)
        means.append(sum(weight * score for weight, score in parts) / total if total else None)
    return means


def distinct(rows: Iterable[Example], key: Key) -> list[Example]:
    """Return the first row of each key."""
    first: dict[Hashable, Example] = {}
    for row in rows:
        first.setdefault(key(row), row)
    return list(first.values())


def percent(values: Iterable[float]) -> float:
    """Return the mean of scores in [0, 1] as a percentage; 0 of none."""
    listed = list(values)
    return 100 * sum(listed) / max(1, len(listed))


def converse(system: str, shots: Iterable[dict[str, str]], question: str) -> Messages:
    """Return a conversation: the system text, if there is one, examples, and the question."""
    texts = [("system", system)] if system else []
    for shot in shots:
        texts += [("user", shot["question"]), ("assistant", shot["answer"])]
    return [{"role": role, "content": text} for role, text in (*texts, ("user", question))]


def right_from(task: Any) -> float:
    """Return the least reward of a right sample, up to rounding: the task's `right_at`, or 1."""
    return TaskFeatures(task).right_at - ROUNDING


def tell(example: Example) -> Example:
    """Return an example with the answer in its question, for a model that has to find the
    reasoning.
    """
    return replace(example, question=told(example.question, example.answer))


def told(question: str, answer: str) -> str:
    """Append the answer to a question."""
    return f"{question} (The answer is {answer}.)"
