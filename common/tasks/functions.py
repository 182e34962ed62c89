"""Reward functions of the user (task.rewards): their arguments, and their time limits.

A function that takes `completions`, or nothing but `**kwargs`, is called with lists, as by TRL's
trainers; one that takes `queries` as by OpenRLHF; and one that takes `solution_strs` as by verl in
batches. Any other function is called once per completion: by the names of its parameters if these
are known, such as `completion` and `answer`, or verl's `compute_score(data_source, solution_str,
ground_truth, extra_info)`, and else with the completion and its answer, in this order. Any of them
may be asynchronous. A score is a number, a value that stands for one (`as_number`), or None for a
completion without a score.
"""

import asyncio
import functools
import inspect
import logging
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from typing import Any

from common.config import ConfigError
from common.system import RunStopped, import_named
from common.task import plain
from common.tasks.awaiting import wait
from common.tasks.checked import show
from common.tasks.limited_process import WAIT_SECONDS, TooLongError, count_one, limited
from common.tasks.logged import OF_TRAINER, Logged, current

log = logging.getLogger("clutch")

ANSWERS = "the right answers"  # among the columns of functions of lists
STORED = "the answer as the row has it"  # which verl's functions get
# The parameters of verl's functions, and of those that take a batch.
OF_VERL = {"data_source", "solution_str", "ground_truth"}
OF_VERL_BATCHES = {
    "data_sources": "data_sources",
    "solution_strs": "texts",
    "ground_truths": STORED,
    "extra_infos": "extra_infos",
}
FIRST_SECONDS = 30.0  # additional processor time for the first call, which may import a package
# The kinds of arguments, by whole names of parameters.
_NAMES = {
    "completion": "completion response solution_str hypothesis output prediction pred generation"
    " generated generated_text completion_text response_text output_text model_output predict_str"
    " candidate student_answer",
    "answer": "answer ground_truth reference target gold gold_answer label expected truth ref gt"
    " correct_answer expected_answer reference_answer true_answer right_answer solution",
    "prompt": "prompt question query instruction problem",
    "data_source": "data_source",
    "extra_info": "extra_info",
}
KNOWN = {name: kind for kind, names in _NAMES.items() for name in names.split()}
# Else by words in a name, with or without a plural's s: the first kind with a word in the name.
_WORDS = {
    "completion": "candidate student predicted prediction pred hat generated generation model hyp"
    " hypothesis hypothese completion response guess",
    "answer": "truth true reference ref target tgt gold golden label expected gt correct right",
    "prompt": "prompt question query instruction problem source src input",
    "completion ": "translation output result res solution",
    "answer ": "answer y",
}
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_ADVICE = (
    "Let it take a completion and its answer; or prompts, completions and any columns of the rows,"
    " as in TRL."
)


def as_number(value: Any) -> Any:
    """Return the number that a score stands for: the element of a scalar, or of an array or list of
    one; the number in a text; the `score` of verl's dict. Other values are returned unchanged.
    """
    if isinstance(value, Mapping) and "score" in value:
        value = value["score"]
    value = _listed(value)
    while isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if isinstance(value, str | Decimal):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def list_scores(name: str, returned: Any, count: int) -> list[Any]:
    """Return the result of a function for `count` completions as a list.

    Raises: ConfigError with the name of the function if it is no list, or has another length.
    """
    values = _listed(returned)
    if isinstance(values, str | bytes | Mapping | Set) or not isinstance(values, Iterable):
        one = "one number, " if isinstance(as_number(values), Real) else ""
        raise ConfigError(
            f"{name} returned {one}{show(returned)} ({type(returned).__name__}) for {count}"
            " completions. It must return a list with one number per completion, in order, or None"
            " where a completion has no score."
        )
    scores = list(values)
    if len(scores) != count:
        raise ConfigError(
            f"{name} returned {len(scores)} scores for {count} completions. Return one for each, in"
            " order."
        )
    return scores


def _listed(value: Any) -> Any:
    """Return an array of NumPy or PyTorch as a list; other values unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


@dataclass
class Own:
    """A reward function of the user, with its arguments.

    Attributes:
        name: its name, as the user gave it.
        score: the function.
        takes: by parameter a kind of `KNOWN`, or a column of the rows; for a function that takes
            lists, one of the offered columns. Parameters named by digits are positional.
        lists: whether it takes lists and returns one.
        seconds: the limit of processor time per completion; a longer call earns 0.
        skip: whether a completion for which it raises has no score (task.reward_errors=skip).
    """

    name: str
    score: Callable[..., Any]
    takes: Mapping[str, str]
    lists: bool
    seconds: float
    skip: bool = False
    called: bool = field(default=False, init=False)
    warned: bool = field(default=False, init=False)

    def call_each(self, rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return the score of each row.

        Args: rows: the available arguments, by kind or column.
        Raises: ConfigError, with the row, if the function raises.
        """
        scores = [self._call_one(row) for row in rows]
        if any(map(inspect.iscoroutine, scores)):  # they wait side by side
            scores = wait(_gather(scores), self)
            scores = [self._settle(score, row) for score, row in zip(scores, rows, strict=True)]
        return [self._checked(score, row) for score, row in zip(scores, rows, strict=True)]

    def _checked(self, score: Any, row: Mapping[str, Any]) -> Any:
        """Return a score as a number, or None. Raises: ConfigError with the function and the row
        for any other value.
        """
        number = as_number(score)
        if number is None or isinstance(number, Real):
            return number
        raise ConfigError(
            f"{self.name} returned {score!r:.80} ({type(score).__name__}) on"
            f" {row['completion']!r:.200}, for the prompt {plain(row['prompt']).strip()!r:.80}. It"
            " must return a number, or None where a completion has no score."
        )

    def _call_one(self, row: Mapping[str, Any]) -> Any:
        logged = current()
        stored = {STORED: row["answer"]} if "answer" in row else {}
        row = {**stored, **row, **logged.offer(self.name, 1)}
        there = {name: kind for name, kind in self.takes.items() if kind in row}
        by_place = [row[kind] for name, kind in there.items() if name.isdigit()]
        by_name = {name: row[kind] for name, kind in there.items() if not name.isdigit()}
        try:
            with self._limit(1):
                return self.score(*by_place, **by_name)
        except TooLongError:
            count_one()
            return 0.0
        except Exception as error:
            return self._missed(error, row)

    def call_lists(
        self, columns: Mapping[str, Sequence[Any]], count: int, kept: Logged | None = None
    ) -> list[Any]:
        """Return the scores of completions. If they take too long together, or one raises and is
        skipped, each is scored separately, so that one text does not cost the others their scores.

        Args: kept: collects the values that the function logs.
        Raises: ConfigError, with the first row, if the function raises.
        """
        kept = current() if kept is None else kept
        logged = Logged(kept.state)
        there = {**columns, **logged.offer(self.name, count)}
        given = {name: there[kind] for name, kind in self.takes.items() if kind in there}
        texts, asked = (columns.get(one, [""] * count) for one in ("completions", "prompts"))
        rows = [{"completion": c, "prompt": p} for c, p in zip(texts, asked, strict=True)]
        try:
            with self._limit(count):
                returned: Any = wait(self.score(**given), self, WAIT_SECONDS * count)
                if isinstance(returned, Mapping) and "rewards" in returned:  # OpenRLHF's
                    returned = returned["rewards"]
                scores = list_scores(self.name, returned, count)
        except TooLongError:
            if count == 1:
                count_one()
                return [0.0]
        except Exception as error:
            if not self.skip or count == 1:
                return [self._missed(error, rows[0], count)]
        else:
            kept.take(logged)
            return [self._checked(score, row) for score, row in zip(scores, rows, strict=True)]
        alone: list[Any] = []
        together = Logged(kept.state)
        for place in range(count):
            row = {name: [column[place]] for name, column in columns.items()}
            one = Logged(kept.state)
            alone += list(self.call_lists(row, 1, one))
            together.follow(one, place, 1)
        kept.take(together)
        return alone

    def _settle(self, score: Any, row: Mapping[str, Any]) -> Any:
        """Return the score of an asynchronous call; 0 if it took too long."""
        if isinstance(score, TimeoutError):
            count_one()
            return 0.0
        return self._missed(score, row) if isinstance(score, BaseException) else score

    def _missed(self, error: BaseException, row: Mapping[str, Any], count: int = 1) -> None:
        """Return None as the score of a row for which the function raised, and warn once; without
        skip raise ConfigError with function, line, row and completion.
        """
        if isinstance(error, ConfigError | RunStopped) or not isinstance(error, Exception):
            raise error
        last = traceback.extract_tb(error.__traceback__)[-1]
        among = "" if count == 1 else f" {count} completions, the first being"
        prompt = plain(row["prompt"]).strip()
        text = (
            f"{self.name} raised {type(error).__name__}: {error} ({last.filename}:{last.lineno}),"
            f" on{among} {row['completion']!r:.200}, for the prompt {prompt!r:.80}"
        )
        if self.lists and isinstance(row["completion"], str) and "indices must be" in str(error):
            text += (
                ". Completions are texts here, as the model has no chat template or task.chat is"
                " false; with one they are messages, as in TRL"
            )
        if not self.skip:
            raise ConfigError(
                f"{text}. A reward must score any text: let it return 0, or None where a completion"
                " has no score; or set task.reward_errors=skip."
            ) from error
        if not self.warned:
            log.warning("%s: it has no score there (task.reward_errors=skip)", text)
            self.warned = True
        return None

    def _limit(self, count: int) -> Any:
        seconds = self.seconds * count + (0.0 if self.called else FIRST_SECONDS)
        self.called = True
        return limited(seconds)


async def _gather(calls: Sequence[Any]) -> list[Any]:
    """Return the result of each coroutine, or its exception; other values as they are."""

    async def one(call: Any) -> Any:
        return await asyncio.wait_for(call, WAIT_SECONDS) if inspect.iscoroutine(call) else call

    return await asyncio.gather(*map(one, calls), return_exceptions=True)


def find_function(name: str) -> Callable[..., Any]:
    """Return a function of the user by name, "module.function". Raises: ConfigError."""
    module, _, function = name.rpartition(".")
    advice = "Give MODULE.FUNCTION, with the module's folder on PYTHONPATH."
    score = import_named(f"task.rewards names {name!r}, which", module, function, advice)
    if callable(score):
        return score
    raise ConfigError(f"task.rewards names {name!r}, which is no function.")


def bind(
    name: str,
    score: Callable[..., Any],
    columns: Sequence[str],
    seconds: float,
    what: str = "",
    skip: bool = False,
) -> Own:
    """Return a function with the arguments that it takes.

    Args:
        columns: the columns of the rows.
        what: the setting that names the function; "" = task.rewards.
        skip: as in `Own`.
    Raises: ConfigError if it cannot be called, or if its parameters are ambiguous.
    """
    try:
        signature = inspect.signature(score)
    except ValueError:  # of a function in C
        return Own(name, score, {"0": "completion", "1": "answer"}, False, seconds, skip)
    parameters = signature.parameters
    lists = not _OF_LISTS.isdisjoint(parameters) or _takes_only_names(parameters)
    columns = [name for name in columns if name not in OF_TRAINER]
    try:
        if lists:
            takes = _find_lists(parameters, columns)
            signature.bind(**dict.fromkeys(takes))
        else:
            takes = _find_taken(score, parameters, (*columns, *OF_TRAINER[:2]))
            if takes.keys() >= OF_VERL:
                takes["ground_truth"] = STORED
            places = [key for key in takes if key.isdigit()]
            names = {key: "" for key in takes if not key.isdigit()}
            signature.bind(*places, **names)
    except TypeError as error:
        raise ConfigError(
            f"{what or f'task.rewards names {name!r}'}, which cannot be called: {error}."
            f" {_ADVICE} Columns there: {', '.join(columns)}."
        ) from None
    return Own(name, score, takes, lists, seconds, skip)


_OF_LISTS = {"completions", "completion_ids", "queries", "solution_strs"}


def _takes_only_names(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Return whether a function takes nothing but `**kwargs`, with which TRL calls it."""
    return [one.kind for one in parameters.values()] == [inspect.Parameter.VAR_KEYWORD]


def _find_lists(
    parameters: Mapping[str, inspect.Parameter], columns: Sequence[str]
) -> dict[str, str]:
    """Return the arguments of a function of lists: for each parameter one of the
    offered columns.
    """
    if "solution_strs" in parameters:  # whose **kwargs are settings
        takes = {name: kind for name, kind in OF_VERL_BATCHES.items() if name in parameters}
        return takes | {c: c for c in (*OF_TRAINER, *columns) if c in parameters}
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    always, on_request = ("prompts", "completions", *OF_TRAINER), ["queries", "completion_ids"]
    if _takes_only_names(parameters):
        always, on_request = (*always, "completion_ids"), []
    offered = (*always, *(name for name in on_request if name in parameters), *columns)
    takes = {c: c for c in offered if takes_all or c in parameters}
    for name, one in parameters.items():
        needed = one.default is one.empty and one.kind in _NAMED
        if name not in takes and needed and find_kind(name) == "answer":
            takes[name] = ANSWERS  # OpenRLHF's labels, and TRL's solution if it is no column
    return takes


def _find_taken(
    score: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], columns: Sequence[str]
) -> dict[str, str]:
    """Return the arguments of a function of one completion, by name or position. Raises: TypeError
    if they are ambiguous.
    """
    fixed = score.keywords if isinstance(score, functools.partial) else {}
    taken = {n: one for n, one in parameters.items() if n not in fixed}
    kinds = {n: _kind_of(one, columns) for n, one in taken.items() if one.kind in _NAMED}
    needed = [
        name
        for name, one in taken.items()
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    by_place = [n for n, one in taken.items() if one.kind is one.POSITIONAL_ONLY]
    if by_place:  # their names are used as well if all are known
        placed = [find_kind(name, columns) for name in by_place]
        rest = {name: kind for name, kind in kinds.items() if kind is not None}
        if None not in placed:
            return {str(place): str(kind) for place, kind in enumerate(placed)} | rest
        _check_order(by_place, columns)
        return dict(zip(("0", "1"), ("completion", "answer"), strict=True))
    known = {name: kind for name, kind in kinds.items() if kind is not None}
    unknown = [name for name in needed if name not in known]
    has_completion = "completion" in known.values()
    if has_completion and not unknown:
        return known
    if not known.keys() & set(needed) and not has_completion:  # no name says anything
        several = any(one.kind is one.VAR_POSITIONAL for one in taken.values())
        if len(needed) == 1 and not several:  # a completion, and options
            return {"0": "completion"}
        return dict(zip(("0", "1"), ("completion", "answer"), strict=True))
    # One name determines the other: score(completion, x), score(x, answer), score(x, column).
    order = [name for name in taken if name in needed]
    if len(unknown) == 1 and len(needed) == 2 and has_completion and known.get(order[0]):
        return known | {unknown[0]: "answer"}
    if len(unknown) == 1 and not has_completion:
        if unknown[0] != order[0]:
            _check_order(order, columns)
        return known | {unknown[0]: "completion"}
    _check_order(order, columns)
    listed = ", ".join(unknown or order)
    raise TypeError(
        f"it is not clear what {listed} should be; name it completion, answer or prompt"
    )


def _kind_of(parameter: inspect.Parameter, columns: Sequence[str]) -> str | None:
    """Return the argument for a parameter. A parameter with a default keeps it, unless its whole
    name is known.
    """
    name = parameter.name
    if parameter.default is parameter.empty:
        return find_kind(name, columns)
    return KNOWN.get(name, name if name in columns else None)


def find_kind(name: str, columns: Sequence[str] = ()) -> str | None:
    """Return the argument for a parameter name: a kind of `KNOWN`, or a column of the rows; None if
    the name is not known.
    """
    if name in KNOWN or name in columns:
        return KNOWN.get(name, name)
    parts = [part for part in name.lower().split("_") if part]
    words = {*parts, *(part.removesuffix("s") for part in parts)}
    for kind, known in _WORDS.items():
        if not words.isdisjoint(known.split()):
            return kind.strip()
    return None


def _check_order(names: Sequence[str], columns: Sequence[str]) -> None:
    """Raise TypeError if the name of the first parameter is not that of a completion."""
    first = names[0] if names else ""
    if find_kind(first, columns) in ("answer", "prompt", "data_source", "extra_info"):
        raise TypeError(
            f"its first parameter is {first}, and no name says which one is the completion; name"
            " that one completion"
        )
