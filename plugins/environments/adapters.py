"""Episodes of environments that were written for other trainers, unchanged.

Text steps: the five values of Gymnasium and GEM, the four of old Gym, the dict of SkyRL-gym,
tinker's `MessageStepResult`, and OpenEnv's observations, in this process or through a client.
Tools: the public methods of an object, as in TRL's `environment_factory`. Environments run with the
rights of this process.
"""

import inspect
import json
import logging
import math
import sys
import typing
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from multiprocessing.pool import ThreadPool
from numbers import Real
from threading import Lock
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from transformers.utils import get_json_schema

from common.config import ConfigError
from common.task import Conversation, Example, Messages
from common.tasks import CLOSING, FormError, checked, wait, wording

log = logging.getLogger("clutch")

BEGINS = ("reset", "init", "initial_observation")  # how an episode begins, in each of the forms
NO_TOOLS = ("reset", "get_reward", "close")
TOOL_ERRORS = "tool_errors"  # the component of episodes with tools
SIDE_BY_SIDE = 16  # calls of one answer
LOCK = Lock()
_UNSEEN = {"done", "reward", "metadata"}  # fields of OpenEnv


@cache
def _warn(text: str) -> None:
    """Log a warning once per run."""
    log.warning("%s", text)


def begin(environment: Any, example: Example, seed: int) -> Any:
    """Return the first observation of the environment. It gets the seed and the columns of the row
    if its method takes them; Python's generator is seeded meanwhile.
    """
    method = find_beginning(environment)
    if not takes(method, "seed") and is_seeded(environment):  # old Gym's
        with wording(f"{type(environment).__name__}.seed", f", for seed {seed}"):
            wait(environment.seed(seed), environment)
    offered = {"seed": seed, **example.extra.get("row", {})}
    arguments = {name: value for name, value in offered.items() if takes(method, name)}
    with (
        checked.seeded(seed),
        wording(f"{type(environment).__name__}.{method.__name__}", f", for seed {seed}"),
    ):
        return wait(method(**arguments), environment)


def find_beginning(environment: Any) -> Any:
    """Return the method of an environment, or of its class, that begins an episode."""
    return next(getattr(environment, name) for name in BEGINS if hasattr(environment, name))


def takes(method: Any, name: str) -> bool:
    """Return whether a method has a parameter of that name."""
    taken = inspect.signature(method).parameters
    return name in taken or any(one.kind is one.VAR_KEYWORD for one in taken.values())


def is_seeded(environment: Any) -> bool:
    """Return whether an environment, or its class, has a method `seed` with one parameter, as in
    old Gym.
    """
    method = getattr(environment, "seed", None)
    if not callable(method):
        return False
    try:
        taken = [name for name in inspect.signature(method).parameters if name != "self"]
    except (TypeError, ValueError):  # of a function in C
        return False
    return len(taken) == 1


def tells_apart(kind: Any) -> bool:
    """Return whether episodes of an environment depend on seeds."""
    return takes(find_beginning(kind), "seed") or is_seeded(kind)


def as_messages(observed: Any) -> Messages:
    """Return an observation as messages. It is text, a list of messages, or an object with
    fields.
    """
    if isinstance(observed, BaseModel):
        fields = observed.model_dump(exclude=_UNSEEN)
        observed = next(iter(fields.values())) if len(fields) == 1 else json.dumps(fields)
    if isinstance(observed, (list, tuple)):
        return [{"role": str(m["role"]), "content": str(m["content"])} for m in observed]
    return [{"role": "user", "content": str(observed)}]


def scaled(name: str, reward: float, scale: Sequence[float]) -> float:
    """Return a reward as a share of the range [least, most]. A reward outside the range is logged
    as a warning, once, with the name of the environment.
    """
    (least, most), rounding = scale, 1e-6  # of sums of float32
    share = float(reward - least) / (most - least)
    share = next((end for end in (0.0, 1.0) if abs(share - end) <= rounding), share)
    if math.isfinite(share) and not -rounding <= share <= 1 + rounding:
        _warn_of_scale(name, tuple(scale), f"{reward:.9g}")
    return share


_out_of_scale: set[tuple[str, tuple[float, ...]]] = set()


def _warn_of_scale(name: str, scale: tuple[float, ...], reward: str) -> None:
    if (name, scale) in _out_of_scale:
        return
    _out_of_scale.add((name, scale))
    log.warning(
        "%s: an episode earned %s, outside task.scale=%s. It is learnt from as it is, but `success`"
        " counts what earns %g or more: give the least and the most that one can earn.",
        *(name, reward, [*scale], scale[-1]),
    )


@cache
def action_type(environment: type) -> type[BaseModel] | None:
    """Return the class of actions of an OpenEnv environment or of its client, from its base class,
    Environment[Action, ...], or from the annotation of `step`; None for text.
    """
    bases = [one for base in environment.__mro__ for one in vars(base).get("__orig_bases__", ())]
    named: list[Any] = [one for base in bases for one in typing.get_args(base)[:1]]
    taken = list(inspect.signature(environment.step).parameters.values())[1:2]  # type: ignore[attr-defined]
    known = vars(sys.modules[environment.__module__])
    named += [known.get(str(one.annotation), one.annotation) for one in taken]
    models = (one for one in named if isinstance(one, type) and issubclass(one, BaseModel))
    return next(models, None)


def shown(environment: Any) -> dict[str, float]:
    """Return the numbers that an environment, or its class, reports in addition to its reward."""
    components = getattr(environment, "components", None)
    return components if isinstance(components, dict) else {}


class Adapter:
    """An environment as an episode. scale: its least and its largest reward, which become 0
    and 1.
    """

    def __init__(self, environment: Any, scale: Sequence[float] = (0.0, 1.0)) -> None:
        self.environment, self.scale = environment, scale
        self.name = type(environment).__name__
        declared, own = shown(type(environment)), getattr(environment, "__dict__", None)
        if declared and own is not None and "components" not in own:
            # Else an episode would begin with what another one has set in its class's.
            environment.components = dict(declared)

    def components(self) -> dict[str, float]:
        """Return the numbers that the environment reports under `components`. A number that its
        class does not declare, or that is not finite, is logged as a warning, once.
        """
        declared, components = shown(type(self.environment)), {}
        for name, value in shown(self.environment).items():
            number: Any = value
            if getattr(value, "shape", None) == ():  # of NumPy or PyTorch
                number = number.item()
            if name not in declared:
                _warn(
                    f"{self.name}: the class does not declare the component {name!r}, so it is not"
                    f" shown. Its own `components` are {', '.join(declared) or 'none'}."
                )
            elif number is not None and not (
                isinstance(number, Real) and checked.is_finite(number)
            ):
                _warn(f"{self.name}: the component {name!r} is no finite number and is left out.")
            elif number is not None:
                components[name] = float(number)
        return components

    def close(self) -> None:
        """Close the environment, if it can be closed. An exception is logged as a warning, once."""
        try:
            if close := getattr(self.environment, "close", None):
                wait(close(), self.environment, CLOSING)
        except Exception as error:
            _warn(f"{self.name}.close raised {type(error).__name__}: {error}")


class TextSteps(Adapter):
    """An episode in which the environment replies to the text of the model
    (common.tasks.episode.Episode). The scale is for the sum of its rewards.
    """

    earned: float | None = None
    stepped = False

    def start(self, example: Example, seed: int) -> Messages:
        """Begin, and return the first messages: the row's prompt, if it has one, and the first
        observation.
        """
        first = begin(self.environment, example, seed)
        if isinstance(first, tuple):  # Gymnasium's, and SkyRL-gym's
            if len(first) != 2:
                raise FormError(
                    f"{self.name} begins with {len(first)} values, {checked.show(first)}. Return"
                    " two: observation, info."
                )
            first, info = first
            first = f"{first}\n{info['suffix']}" if "suffix" in (info or ()) else first  # GEM's
        if first is None:
            raise FormError(f"{self.name} begins with None. Let it return a text, or messages.")
        observed = getattr(first, "observation", first)
        messages = [] if isinstance(observed, bytes) else as_messages(observed)
        if not any(one["content"].strip(" \n{}[]") for one in messages):
            raise FormError(
                f"{self.name} begins with {checked.show(observed)}, which tells a model nothing."
                " Let it begin with a text, with messages, or with an observation that has a field."
            )
        return messages

    def reply(self, message: dict[str, Any]) -> Messages | None:
        """Take a step with the message."""
        try:
            action = self._action(message)
        except ValidationError as error:
            return as_messages(f"error: {error}")
        self.stepped = True
        with wording(f"{self.name}.step", f", for {message['content'][:80]!r}"):
            observed, reward, over = self._read(
                wait(self.environment.step(action), self.environment)
            )
            if reward is not None:
                self.earned = (self.earned or 0.0) + float(reward)
        return None if over else as_messages(observed)

    def reward(self) -> float | None:
        """Return the sum of the rewards as a share of the scale; a sum of 0 if the episode was cut
        off before its first step; None if no step gave a reward.
        """
        earned = self.earned if self.stepped else 0.0
        return None if earned is None else scaled(self.name, earned, self.scale)

    def _action(self, message: dict[str, Any]) -> Any:
        """Return the argument of the step. Raises: ValidationError for an invalid action."""
        if hasattr(self.environment, "initial_observation"):  # tinker's takes the message
            return message
        kind = action_type(type(self.environment))
        if kind is None:
            return message["content"]
        fields = _fields(kind)
        try:
            return kind.model_validate_json(message["content"])
        except ValidationError:
            if len(fields) != 1:
                raise
            return kind(**{fields[0]: message["content"]})

    def _read(self, result: Any) -> tuple[Any, float | None, bool]:
        """Return the observation, the reward, and whether the episode is over."""
        if isinstance(result, tuple):
            if len(result) == 4:  # old Gym's
                result = (*result[:3], False, result[3])
            if len(result) != 5:
                raise self._wrong_form(result)
            observed, reward, ended, broken_off, info = result
            suffix = f"\n{info['suffix']}" if "suffix" in (info or ()) else ""
            return f"{observed}{suffix}", reward, ended or broken_off
        if isinstance(result, Mapping):
            return list(result["observations"]), result["reward"], result["done"]
        if hasattr(result, "episode_done"):
            return result.next_messages[-1:], result.reward, result.episode_done
        if not hasattr(result, "reward") or not hasattr(result, "done"):
            raise self._wrong_form(result)
        return getattr(result, "observation", result), result.reward, result.done

    def _wrong_form(self, result: Any) -> FormError:
        return FormError(
            f"{self.name}.step returned {checked.show(result)}. Return observation, reward,"
            " terminated, truncated, info, or another form of docs/environments.md."
        )


class Tools(Adapter):
    """An episode in which the model calls methods of an object. It ends when an answer calls none
    (common.tasks.episode.Episode). If a tool raises, the reply is the text of its exception, and
    the share of such calls is reported in addition to the reward.
    """

    called = raised = 0

    def components(self) -> dict[str, float]:
        """Return the numbers of the environment, and `tool_errors`, the share of calls that
        raised.
        """
        return super().components() | {TOOL_ERRORS: self.raised / max(1, self.called)}

    def start(self, example: Example, seed: int) -> Messages:
        """Return the row's prompt followed by the first observation, and the tools."""
        said = begin(self.environment, example, seed)
        row = example.extra.get("row", {})
        messages = [dict(one) for one in as_messages(row["prompt"])] if "prompt" in row else []
        if said is not None and messages:
            messages[-1]["content"] += str(said)
        elif said is not None:
            messages = as_messages(said)
        return Conversation(messages, schemas(type(self.environment)))

    def reply(self, message: dict[str, Any]) -> Messages | None:
        """Call the tools that a message asks for, in parallel, and answer in its order."""
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        if not calls:
            return None
        self.called += len(calls)
        with ThreadPool(min(len(calls), SIDE_BY_SIDE)) as pool:
            answers = pool.map(self._call, calls)
        return [
            {"role": "tool", "name": str(call["name"]), "content": answer}
            for call, answer in zip(calls, answers, strict=True)
        ]

    def reward(self) -> float | None:
        """Return the result of `get_reward`, or else the attribute `reward`."""
        rewarding = getattr(self.environment, "get_reward", None)
        if rewarding is None and not hasattr(self.environment, "reward"):
            raise ConfigError(
                f"{self.name} has neither get_reward() nor an attribute reward at the end of an"
                " episode, so nothing would be learnt. Add one: docs/environments.md."
            )
        with wording(f"{self.name}.get_reward", ""):
            own = self.environment
            reward = own.reward if rewarding is None else wait(rewarding(), own)
            return None if reward is None else scaled(self.name, float(reward), self.scale)

    def _call(self, call: dict[str, Any]) -> str:
        name, arguments = call["name"], dict(call.get("arguments") or {})
        if name not in tool_names(type(self.environment)):
            known = ", ".join(tool_names(type(self.environment)))
            return f"error: there is no tool {name!r}. Call one of {known}."
        method = getattr(self.environment, name)
        try:
            inspect.signature(method).bind(**arguments)
        except TypeError as error:
            return f"error: {name}: {error}"
        types = _types(type(self.environment), name)
        for argument, value in arguments.items():
            try:
                arguments[argument] = types[argument](value)
            except ValidationError as error:
                return f"error: {name}: {argument}={value!r}: {error.errors()[0]['msg']}"
        try:
            return str(wait(method(**arguments), self.environment))
        except ConnectionError as error:  # the environment is gone
            raise ConfigError(
                f"{self.name}.{name} raised {type(error).__name__}: {error}, for"
                f" {str(arguments)[:80]}"
            ) from error
        except (Exception, SystemExit, GeneratorExit) as error:
            with LOCK:
                self.raised += 1
            kind = type(error).__name__
            _warn(f"{self.name}.{name} raised {kind}. The model gets its text as the reply.")
            return f"error: {_word(error)}"


def _word(error: BaseException) -> str:
    """Return the text of an exception, or its name if it has no text."""
    try:
        return str(error) or type(error).__name__
    except Exception:  # of its own __str__
        return type(error).__name__


@cache
def _types(factory: type, name: str) -> defaultdict[str, Callable[[Any], Any]]:
    """Return the function that converts the value of each argument of a tool; other arguments are
    passed as they are.
    """
    method = getattr(factory, name)
    hints = typing.get_type_hints(method, include_extras=True)
    parameters = inspect.signature(method).parameters
    known = {
        name: partial(_take, TypeAdapter(hints[name]), parameters[name].default)
        for name in parameters.keys() & hints.keys()
    }
    return defaultdict(lambda: lambda value: value, known)


def _take(wanted: TypeAdapter[Any], default: Any, value: Any) -> Any:
    """Convert a value to the type of a tool's parameter: a text that spells the value, 4.0 for 4,
    and a number for a text; the same in lists and objects. Raises: ValidationError.
    """
    if value is default:  # None, of an argument that need not be given
        return value
    try:
        taken = wanted.validate_python(value)
    except ValidationError:
        if not isinstance(value, int | float):
            raise
        return wanted.validate_python(str(value))
    return taken if isinstance(value, str | float | list | dict) else value


def _fields(kind: type[BaseModel]) -> list[str]:
    """Return the fields of a class of actions that a model fills in."""
    return [name for name in kind.model_fields if name not in _UNSEEN]


def _check_actions(factory: Any) -> None:
    """Raise ConfigError for an environment of OpenEnv whose actions cannot be written as text."""
    kind = action_type(factory)
    if all(hasattr(factory, name) for name in ("list_tools", "call_tool")):
        what = "takes calls of tools over MCP"
    elif kind is not None and not _fields(kind):
        what = f"takes actions of {kind.__name__}, which have no field that a model could fill in"
    else:
        return
    raise ConfigError(
        f"task.factory: {factory.__name__} {what}. Write a class whose methods are its tools and"
        " call it, or one with step(text): docs/environments.md."
    )


def tool_names(factory: Any) -> list[str]:
    """Return the public methods of a class that are tools, including inherited ones."""
    methods = inspect.getmembers(factory, callable)
    others = (*NO_TOOLS, "seed") if is_seeded(factory) else NO_TOOLS
    return [name for name, _ in methods if not name.startswith("_") and name not in others]


@cache
def schemas(factory: Any) -> list[dict[str, Any]]:
    """Return the tools of a class in the form of chat templates. Raises: ConfigError for a method
    without a docstring that describes it.
    """

    def describe(name: str) -> dict[str, Any]:
        advice = "A tool needs types and a docstring in Google's style: docs/environments.md."
        with wording(f"the tool {factory.__name__}.{name}", "", advice):
            return get_json_schema(getattr(factory, name))

    return [describe(name) for name in tool_names(factory)]


def adapter(factory: Any) -> Callable[..., Any]:
    """Return the function that makes an episode from an object of a class.

    Raises: ConfigError for a class with none of the supported interfaces.
    """
    methods = {name for name in (*BEGINS, "step") if callable(getattr(factory, name, None))}
    if "step" in methods and methods & set(BEGINS):
        _check_actions(factory)
        return TextSteps
    if "reset" in methods and tool_names(factory):
        return Tools
    raise ConfigError(
        f"task.factory: {factory.__name__} has neither reset(seed) and step(text), nor reset and"
        " methods that are tools: docs/environments.md."
    )
