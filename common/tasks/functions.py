"""Reward functions of the user's own (task.rewards): how each is called, and for how long.

A function that takes `completions` is called as TRL's trainers call it, with lists. Any other is
called for each completion: by the names of its parameters where these are known, such as
`completion` and `answer`, or verl's `compute_score(data_source, solution_str, ground_truth,
extra_info)`, and else with the completion and its answer, in this order.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.config import ConfigError
from common.instance import import_named
from common.tasks.bounded import TooLongError, count_one, limited

FIRST_SECONDS = 30.0  # of a processor more, for the first call: it may import a package
# What a parameter is given, by its name.
_NAMES = {
    "completion": "completion response solution_str hypothesis output prediction pred generation"
    " generated generated_text completion_text response_text output_text model_output predict_str"
    " candidate student_answer",
    "answer": "answer ground_truth reference target gold gold_answer label expected truth ref gt"
    " correct_answer expected_answer reference_answer true_answer right_answer",
    "prompt": "prompt question query instruction problem",
    "data_source": "data_source",
    "extra_info": "extra_info",
}
KNOWN = {name: kind for kind, names in _NAMES.items() for name in names.split()}
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_ADVICE = (
    "Let it take a completion and its answer; or prompts, completions and any columns of the rows,"
    " as in TRL."
)


@dataclass
class Own:
    """A reward function, with what it takes.

    Attributes:
        takes: by parameter a kind of `KNOWN`, or a column of the rows; in a function that takes
            lists only the parameters count. Parameters that are no names are given by position.
        lists: whether it takes lists and returns one.
        seconds: of a processor for a completion; what takes longer earns 0.
    """

    score: Callable[..., Any]
    takes: Mapping[str, str]
    lists: bool
    seconds: float
    called = False

    def call_each(self, rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return the score of each row. rows: what there is to give, by kind or column."""
        return [self._call_one(row) for row in rows]

    def _call_one(self, row: Mapping[str, Any]) -> Any:
        there = {name: kind for name, kind in self.takes.items() if kind in row}
        by_place = [row[kind] for name, kind in there.items() if name.isdigit()]
        by_name = {name: row[kind] for name, kind in there.items() if not name.isdigit()}
        try:
            with self._limit(1):
                return self.score(*by_place, **by_name)
        except TooLongError:
            count_one()
            return 0.0

    def call_lists(self, columns: Mapping[str, Sequence[Any]], count: int) -> list[Any]:
        """Return the scores of completions. Where they take too long together, each is scored
        alone, so that one text does not cost the others their scores.
        """
        given = {name: columns[name] for name in self.takes}
        try:
            with self._limit(count):
                return self.score(**given)
        except TooLongError:
            if count == 1:
                count_one()
                return [0.0]
        scores: list[Any] = []
        for place in range(count):
            alone = {name: [column[place]] for name, column in given.items()}
            scores += list(self.call_lists(alone, 1))
        return scores

    def _limit(self, count: int) -> Any:
        seconds = self.seconds * count + (0.0 if self.called else FIRST_SECONDS)
        self.called = True
        return limited(seconds)


def find_function(name: str) -> Callable[..., Any]:
    """Return a function of the user's, "module.function". Raises: ConfigError."""
    module, _, function = name.rpartition(".")
    advice = "Give MODULE.FUNCTION, with the module's folder on PYTHONPATH."
    score = import_named(f"task.rewards names {name!r}, which", module, function, advice)
    if callable(score):
        return score
    raise ConfigError(f"task.rewards names {name!r}, which is no function.")


def bind(
    name: str, score: Callable[..., Any], columns: Sequence[str], seconds: float, what: str = ""
) -> Own:
    """Return a function with what it is given. columns: of the rows; what: the setting that names
    the function, "" = task.rewards.

    Raises: ConfigError for one that cannot be called, or where it is not clear what it takes.
    """
    try:
        signature = inspect.signature(score)
    except ValueError:  # of a function in C
        return Own(score, {"0": "completion", "1": "answer"}, False, seconds)
    parameters = signature.parameters
    lists = "completions" in parameters
    try:
        if lists:
            takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
            offered = ("prompts", "completions", *columns)
            takes = {c: c for c in offered if takes_all or c in parameters}
            signature.bind(**dict.fromkeys(takes))
        else:
            takes = _find_taken(score, parameters, columns)
            places = [key for key in takes if key.isdigit()]
            names = {key: "" for key in takes if not key.isdigit()}
            signature.bind(*places, **names)
        wrong = "is asynchronous" if inspect.iscoroutinefunction(score) else ""
    except TypeError as error:
        wrong, takes = f"cannot be called: {error}", {}
    if wrong:
        raise ConfigError(
            f"{what or f'task.rewards names {name!r}'}, which {wrong}. {_ADVICE} Columns there:"
            f" {', '.join(columns)}."
        )
    return Own(score, takes, lists, seconds)


def _find_taken(
    score: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], columns: Sequence[str]
) -> dict[str, str]:
    """Return what a function of one completion is given, by name, or by place. Raises: TypeError
    where that is not clear.
    """
    fixed = score.keywords if isinstance(score, functools.partial) else {}
    kinds = {
        name: KNOWN.get(name, name if name in columns else None)
        for name, one in parameters.items()
        if one.kind in _NAMED and name not in fixed
    }
    first_two = ("0", "1")
    needed = [
        name
        for name, one in parameters.items()
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    by_place = [n for n in parameters if parameters[n].kind is inspect.Parameter.POSITIONAL_ONLY]
    if by_place:  # their names count, too, where all are known
        known = [KNOWN.get(name) for name in by_place]
        rest = {name: kind for name, kind in kinds.items() if kind is not None}
        if None not in known:
            return {str(place): str(kind) for place, kind in enumerate(known)} | rest
        _check_order(by_place)
        return dict(zip(first_two, ("completion", "answer"), strict=True))
    known = {name: kind for name, kind in kinds.items() if kind is not None}
    unknown = [name for name in needed if name not in known]
    given = set(known.values())
    if len(needed) == 1 and "completion" in given and len(parameters) == 1:
        return dict(zip(first_two, ("completion", "answer"), strict=True))
    if known and not unknown and "completion" in given:
        return known
    if not given & {"completion", "answer", "prompt", "data_source"}:
        return dict(zip(first_two, ("completion", "answer"), strict=True))
    # One name says what the other is: score(completion, x) and score(x, answer).
    order = [name for name in parameters if name in needed]
    if len(unknown) == 1 and len(needed) == 2:
        first, second = order
        if known.get(first) == "completion":
            return {first: "completion", second: "answer"}
        if known.get(second) == "answer":
            return {first: "completion", second: "answer"}
    _check_order(order)
    listed = ", ".join(unknown or order)
    raise TypeError(
        f"it is not clear what {listed} should be; name it completion, answer or prompt"
    )


def _check_order(names: Sequence[str]) -> None:
    """Raise TypeError where the first parameter is named as something else than a completion."""
    first = names[0] if names else ""
    if KNOWN.get(first, "completion") != "completion":
        raise TypeError(
            f"its first parameter is {first}, and no name says which one is the completion; name"
            " that one completion"
        )
