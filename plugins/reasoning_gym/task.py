"""The data sets of reasoning-gym (arXiv:2505.24760): questions made by a program, and a score for
any answer.

A run names one data set with its settings (`task.dataset`, `task.config`); the package's own data
set `composite` mixes several. Train and held-out rows come from two seeds. The reward of an answer
is the score of the data set. If that score would run the answer as Python, or compute without
bound, the answer is read as a literal here, or must be plain arithmetic.
"""

import ast
import difflib
import importlib
import inspect
import io
import json
import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

from annotated_types import Ge

from common.config import ConfigError, Count, Natural, Nonnegative, Share, Whole, holds, unknown_key
from common.system import user_code
from common.task import Example, Messages, plain
from common.tasks import (
    SPLIT_SEED,
    Chat,
    Weighted,
    call,
    checked,
    converse,
    distinct,
    evaluate,
    path_key,
    percent,
    tagged,
    tell,
    wording,
)

# A row is made from a seed plus its position, so the two are far apart; numpy takes 32 bits.
SEEDS = {"train": SPLIT_SEED, "test": 2**31 + SPLIT_SEED}
NEAR = 1e-4  # of a probability
_MARKS = " \t\n.?!:;'\"`*$"  # around an answer they make it no other one
RIGHT = 1 - 1e-6  # a score of an answer that is right; some are sums of shares

# Questions of these follow the order of a set of texts, which Python draws at every start.
_UNORDERED = (
    *("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note"),
    "word_ladder",
)
# Scores of these evaluate an answer as Python, to take a list for a matrix.
_EVALUATED = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
# Scores of these give an answer to sympy's parser, which evaluates it too: whole numbers, names of
# a letter and functions are let through, and of powers only small ones.
_FUNCTIONS = "sqrt|exp|log|a?sin|a?cos|a?tan|sinh|cosh|tanh|pi"
_ALGEBRA = re.compile(
    r"(?:[0-9]{1,12}(?:\.[0-9]{1,12})?(?![0-9.A-Za-z_])"
    rf"|(?:[a-zCXYZ]|{_FUNCTIONS})(?![A-Za-z_0-9(])|(?:{_FUNCTIONS})(?=\()"
    r"|\*(?!\*)|\*\*(?:\(-?[0-9]{1,2}(?:/[0-9])?\)|-?[0-9]{1,2})(?! *\*\*|[0-9])|[-+/() ])*"
)
_NO_NUMBER = re.compile(r"(?i)(?<![a-z])(?:nan|inf(?:inity)?)j?(?![a-z])")
_EXPONENT = re.compile(r"[eE][-+]?[0-9]{4}")


@dataclass(kw_only=True, eq=False)
class ReasoningGym(Weighted):
    """The task, with the settings of conf/task/reasoning_gym.yaml; `answer` is "" if the data set
    has none.
    """

    name = "reasoning_gym"
    repeatable = True

    dataset: str
    config: dict[str, Any]
    problems: Annotated[Whole, Ge(2)]
    test_problems: Count
    template: Annotated[str, holds("{question}")]
    chat: Chat
    system: str
    few_shot: Natural
    weights: dict[str, Nonnegative]
    share_right: Share

    def __post_init__(self) -> None:
        _check(self.dataset, self.config)
        self.weigh(score=self._scores, answered=self._answered)
        train = distinct(self._make("train", self.problems), _question)
        test = distinct(self._make("test", self.test_problems), _question)
        if len(train) < self.problems:  # there are not many: leave some to train on
            test = test[: max(1, len(train) // 4)]
        self._shots, train = self._take_shots(train, test)
        self.split(f"task.dataset={self.dataset}", train, test, 0, _question)

    def prompt(self, example: Example) -> str | Messages:
        """Return the question in the template; with task.chat a conversation."""
        if self.converses:
            return converse(self.system, self._shots, example.question)
        return self.template.replace("{question}", example.question)

    def hint(self, example: Example) -> str | Messages:
        """Return the prompt with the answer, if there is one."""
        return self.prompt(tell(example) if example.answer else example)

    def pretraining(self, example: Example, draw: random.Random) -> tuple[str, str]:
        """Return the right answer with probability task.share_right, else the same followed by a
        question mark, as `Custom` does.
        """
        prompt = plain(self.prompt(example))
        if not example.answer:
            raise ConfigError(
                f"task.dataset={self.dataset!r} scores answers but gives none, so model=tiny cannot"
                " be taught it. Give a model: model=hf model.path=FOLDER_OR_HUB_ID."
            )
        right = draw.random() < self.share_right
        return prompt, f" {example.answer}{'' if right else '?'}"

    def answer(self, completion: str) -> str | None:
        """Return the text between the last tags; without tags, and without task.chat, the whole
        completion.
        """
        answer = tagged(completion)
        if answer is None and not self.converses:
            answer = completion
        return None if answer is None else answer.strip() or None

    path_key = staticmethod(path_key)  # the calculations on the way

    def metrics(self, examples: Sequence[Example], completions: Sequence[str]) -> dict[str, float]:
        """Return percentages: answers that are right, the mean score, and answers found."""
        scores = self._scores(examples, completions)
        return {
            "accuracy": percent(score >= RIGHT for score in scores),
            "score": percent(scores),
            "answered": percent(self._answered(examples, completions)),
        }

    # --- components: (examples, completions) -> scores in [0, 1]

    def _scores(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        settings = (self.dataset, json.dumps(self.config), SEEDS["train"], self.problems)
        pairs = zip(examples, map(self.answer, completions), strict=True)
        return [
            0.0
            if answer is None
            else call("reasoning_gym", score_answer, settings, answer, example.extra["entry"])
            for example, answer in pairs
        ]

    def _answered(self, _: Sequence[Example], completions: Sequence[str]) -> list[float]:
        return [float(self.answer(text) is not None) for text in completions]

    def _take_shots(
        self, train: list[Example], test: list[Example]
    ) -> tuple[list[dict[str, str]], list[Example]]:
        """Return the worked examples of every prompt, and the train rows without them. No example
        is a held-out question. Raises: ConfigError.
        """
        held_out = {example.question for example in test}
        fit = [row for row in train if row.answer and row.question not in held_out]
        if len(fit) < self.few_shot:
            raise ConfigError(
                f"task.few_shot={self.few_shot}: task.dataset={self.dataset!r} has {len(fit)}"
                " questions with an answer that are not held out. Give that or less."
            )
        shown = {row.question: f"<answer>{row.answer}</answer>" for row in fit[: self.few_shot]}
        shots = [{"question": question, "answer": text} for question, text in shown.items()]
        return shots, [row for row in train if row.question not in shown]

    def _make(self, split: str, count: int) -> Iterator[Example]:
        """Yield the rows of a split. Raises: ConfigError if the package raises."""
        seed = SEEDS[split]
        what = f"task.dataset={self.dataset}, task.config={self.config}: reasoning-gym"
        # Some data sets draw from Python's generator, and print.
        worded = wording(what, f", in question 0 to {count - 1}", "Change task.config.")
        with worded, checked.seeded(seed), redirect_stdout(io.StringIO()):
            dataset = _create(self.dataset, json.dumps(self.config), seed, count)
            for position in range(count):
                entry = dataset[position]
                answer = entry["answer"]
                if position == 0 and answer is not None:
                    dataset.score_answer(answer, entry)
                # An empty answer, or an integral that sympy could not solve, nobody can give.
                if answer is None or (answer and _harmless(_source(entry), answer)):
                    yield Example(0, entry["question"], answer or "", {"entry": entry})


def _question(example: Example) -> str:
    return example.question


def _source(entry: dict[str, Any]) -> str:
    return entry["metadata"]["source_dataset"]


def score_answer(settings: tuple[str, str, int, int], answer: str, entry: dict[str, Any]) -> float:
    """Return the data set's score of an answer. Runs in a process of its own (bounded.call).

    Args: settings: the settings of `_create`.
    """
    # A distance from NaN is taken for none: `min(1.0, nan)` is 1.
    odd = _NO_NUMBER.search(answer) and not _NO_NUMBER.search(entry["answer"] or "")
    if odd or not _harmless(_source(entry), answer):
        return 0.0
    score = float(_create(*settings).score_answer(answer, entry))
    return _correct(_source(entry), answer, entry["answer"] or "", score)


def _read_expression(text: str) -> tuple[Any, list[int]]:
    read = evaluate(text.strip(" .!\n"))
    return read.value, sorted(read.numbers)


# Of data sets whose own function takes wrong answers for right ones: how to read what has to be the
# same, and the most that another answer earns. Sums of shares fall short of 1, which alone is
# looked at.
_SAME: dict[str, tuple[Callable[[str], Any], float]] = {
    "spell_backward": (str.lower, 0.8),
    "letter_jumble": (str.split, 0.9),
    "word_sorting": (lambda text: [word.strip() for word in text.split(",")], 0.9),
    "figlet_fonts": (lambda text: text.replace(" ", "").lower(), 0.9),
    # Numbers that are rounded are taken, any four numbers, and 24.5 for 24.
    "number_sorting": (
        lambda text: [float(n) for n in re.findall(r"-?[0-9]*\.?[0-9]+", text)],
        0.0,
    ),
    "puzzle24": (_read_expression, 0.01),
}


def _correct(name: str, answer: str, wanted: str, score: float) -> float:
    """Return a data set's score without the points that its own function gives for a wrong
    answer.
    """
    if score < RIGHT and _holds(answer, wanted, score):
        return 0.0
    if name in _SAME:
        read, most = _SAME[name]
        return score if read(answer) == read(wanted) else min(score, most)
    if name == "game_of_life_halting":  # any text is taken for True
        return float(answer.strip().lower() == wanted.strip().lower())
    same = answer.split() == wanted.split()
    if name == "gsm_symbolic":  # signs are dropped
        signs = (re.search(r"[-−]\s*[0-9]", text) is not None for text in (answer, wanted))
        return 1.0 if same else score if len({*signs}) == 1 else min(score, 0.01)
    if name == "coin_flip":  # any beginning of the right number is right
        try:
            near = abs(float(answer) - float(wanted)) <= NEAR
        except ValueError:
            near = same
        return score if near else min(score, 0.5)
    return score


def _holds(answer: str, wanted: str, score: float) -> bool:
    """Return whether a score was given because the answer contains the right one among other
    characters. Such scores would teach to write texts with many answers: 240 for 24, 40 and 0.
    """
    for change in (
        str.strip,
        lambda text: text.replace(",", ""),
        lambda text: text.strip().upper(),
    ):
        whole, part = change(answer), change(wanted)
        held = bool(part) and part in whole and abs(score - len(part) / len(whole)) < NEAR
        if held and whole.replace(part, "", 1).strip(_MARKS):
            return True
    return False


def _harmless(name: str, answer: str) -> bool:
    """Return whether scoring the answer neither runs it nor computes without bound."""
    if name in ("countdown", "puzzle24"):
        return evaluate(answer).value is not None
    if name in ("polynomial_multiplication", "simple_integration", "intermediate_integration"):
        return bool(_ALGEBRA.fullmatch(answer)) and len(re.findall(r"\) *\*\*", answer)) < 2
    return name != "coin_flip" or not _EXPONENT.search(answer)


# --- the package


def _package() -> Any:
    """Import reasoning-gym so that it runs no answer. Raises: ConfigError if it is not
    installed.
    """
    try:
        package: Any = importlib.import_module("reasoning_gym")  # optional, slow to import
    except ImportError as error:
        raise ConfigError(
            f"task=reasoning_gym needs a package ({error}): pip install -e '.[reasoning_gym]'."
        ) from None
    for name in _EVALUATED:
        kind = package.factory.DATASETS[name][0]
        vars(importlib.import_module(kind.__module__))["eval"] = ast.literal_eval
    return package


def _check(dataset: str, config: dict[str, Any], place: str = "task") -> dict[str, Any]:
    """Return the settings of a data set in the form of the package.

    Args: place: the names of both settings, for errors.
    Raises: ConfigError for an unknown data set or setting, or a value of a wrong type.
    """
    known = _package().factory.DATASETS
    key = f"{place}.{'dataset' if place == 'task' else 'name'}"
    if dataset not in known:
        near = difflib.get_close_matches(dataset, known, n=3) or sorted(known)
        raise ConfigError(
            f"{key}={dataset!r} is no data set of reasoning-gym. Did you mean {', '.join(near)}?"
        )
    if dataset == "codeio":  # it runs code that draws from generators without a seed
        raise ConfigError(
            f"{key}='codeio' makes other questions at every start, and a run must find its own"
            " again. Use another data set."
        )
    if dataset in _UNORDERED and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise ConfigError(
            f"{key}={dataset!r} makes other questions at every start of Python, and a run must find"
            " its own again. Put PYTHONHASHSEED=0 before the command, or use another data set."
        )
    parameters = inspect.signature(known[dataset][1]).parameters
    names = [name for name in parameters if name not in ("seed", "size")]
    for name in config:
        if name not in names:
            given, chosen = f"{place}.config.{name}={config[name]}", "task=reasoning_gym "
            raise ConfigError(unknown_key(given, names, chosen=chosen))
    if dataset == "composite":
        return {"datasets": _check_parts(config.get("datasets"), place)}
    arguments = [parameters[name].replace(default=inspect.Parameter.empty) for name in config]
    return user_code.convert(f"{place}.config", config, arguments)


def _check_parts(parts: Any, place: str) -> list[Any]:
    """Return the data sets of `composite`. Raises: ConfigError."""
    key = f"{place}.config.datasets"
    shape = (
        f"Give '{key}=[{{name: chain_sum, weight: 2, config: {{max_digits: 2}}}}, {{name: gcd}}]'."
    )
    if not isinstance(parts, list) or not parts:
        raise ConfigError(f"{key} is needed by the data set composite. {shape}")
    parts_checked = []
    for position, part in enumerate(parts):
        names = set(part) if isinstance(part, dict) else set()
        odd = "name" not in names or not names <= {"name", "weight", "config"}
        if odd or not isinstance(part.get("config", {}), dict) or part["name"] == "composite":
            raise ConfigError(f"{key}[{position}]={part!r:.80} is no data set. {shape}")
        weight = part.get("weight", 1)
        if not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise ConfigError(f"{key}[{position}].weight={weight!r} is not a number above 0.")
        settings = _check(part["name"], part.get("config", {}), f"{key}[{position}]")
        parts_checked.append(_package().composite.DatasetSpec(part["name"], weight, settings))
    return parts_checked


@lru_cache(maxsize=8)
def _create(dataset: str, config: str, seed: int, size: int) -> Any:
    """Create a data set of the package. Some cannot be sent to other processes, so each process
    creates its own.

    Args: config: its settings as JSON.
    """
    settings = _check(dataset, json.loads(config))
    return _package().create_dataset(dataset, seed=seed, size=size, **settings)
