"""Environments of several turns: games and tools that reply to the model.

    python launch.py algo=NAME task=guess
    python launch.py algo=NAME task=environment task.factory=my_module:MyGame model=hf ...

An environment is a class with text steps or with tools (adapters.py), or a task of a task set
(task_sets.py). Its episodes differ by their seeds, and by the rows of a file if there is one.
"""

import inspect
import logging
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Ge, Lt

from common.config import ConfigError, Count, Positive, Whole
from common.system import EXIT_NUMBERS, RunStopped, import_named
from common.task import Example, Messages
from common.tasks import ENDED, RIGHT, percent, read_rows, start, wording
from plugins.environments.adapters import TOOL_ERRORS, Tools, adapter, schemas, shown, tells_apart
from plugins.environments.task_sets import Answer, TaskSet

log = logging.getLogger("clutch")

TEST_SEEDS = 1 << 20  # the first of those that are held out


@dataclass(kw_only=True, eq=False)
class Environment:
    """The task, with the settings of conf/task/environment.yaml, which explains each.

    Attributes: tools: the tools of the model, in the form of chat templates.
    """

    repeatable = False

    factory: str | None
    settings: dict[str, Any]
    problems: Annotated[Whole, Ge(1), Lt(TEST_SEEDS)]
    test_problems: Annotated[Whole, Ge(1), Lt(TEST_SEEDS)]
    max_turns: Count
    reply_tokens: Count
    path: str | None = None
    scale: list[float] = field(default_factory=lambda: [0.0, 1.0])
    call_seconds: Positive = 30.0
    overlap: bool = False

    def __post_init__(self) -> None:
        if len(self.scale) != 2 or self.scale[0] >= self.scale[1]:
            raise ConfigError(f"task.scale={self.scale} is no range. Give [least, most].")
        self.make = make = _load(self.factory, self.settings, self.problems + self.test_problems)
        kind = make
        if not inspect.isclass(make):
            with wording(f"task.factory={self.factory!r}", f", with task.settings={self.settings}"):
                kind = type(make(**self.settings))
        self.kind, self.name = kind, kind.__name__.lower()
        self.shown = tuple(shown(make) or shown(kind))  # beside the reward
        self.rows = [] if self.path is None else read_rows(self.path, "task.path")
        if isinstance(make, TaskSet):
            if self.rows:
                raise ConfigError(f"task.path={self.path}: a task set has tasks. Leave it out.")
            self.adapter, self.rows, self.max_turns = Answer, make.rows, 1
        else:
            self.adapter = adapter(kind)
        self.tools = schemas(kind) if self.adapter is Tools else []
        if self.adapter is Tools:
            self.shown += (TOOL_ERRORS,)
        if not self.rows and not tells_apart(kind):
            raise ConfigError(
                f"task.factory={self.factory!r}: it begins without a seed and there are no rows, so"
                " the samples of a group would begin differently. Add the argument `seed` to its"
                " reset, or a method seed(number), or give task.path."
            )
        self.dropped = 0  # training rows that are also held out
        self.seeds: dict[str, Sequence[int]] = {
            "train": range(self.problems),
            "test": range(TEST_SEEDS, TEST_SEEDS + self.test_problems),
        }
        if self.rows:
            # as they were in the file
            self.rows = [row.whole for row in self.rows]
            self._split_rows()
        self.prompts: dict[int, Messages] = {}  # by seed

    def _split_rows(self) -> None:
        """Hold out rows. If all rows are equal, such as a file with one prompt a thousand times,
        hold out seeds.

        Raises: ConfigError if neither rows nor seeds distinguish episodes.
        """
        ends = len(self.rows) - min(self.test_problems, len(self.rows) // 2)
        texts = list(map(repr, self.rows))
        held_out = set(texts[ends:])
        train = [place for place in range(ends) if texts[place] not in held_out]
        if len(self.rows) > 1 and train:
            self.seeds = {"train": train[: self.problems], "test": range(ends, len(self.rows))}
            self.dropped = ends - len(train)
            if self.dropped:
                log.info(
                    "%s: %d rows to train on are dropped: they are also held out",
                    *(self.path or self.factory, self.dropped),
                )
        elif self.path and tells_apart(self.kind):
            self.rows = list(dict(zip(texts, self.rows, strict=True)).values())
            log.info(
                "%s: %d different rows, so that seeds are held out and no rows",
                *(self.path or self.factory, len(self.rows)),
            )
        elif self.path:
            raise ConfigError(
                f"task.path={self.path!r}: no row is left to train on, as all of them are also held"
                f" out, and {self.name} begins without a seed. Give more rows, or add the argument"
                " `seed` to its reset, so that seeds tell episodes apart."
            )
        else:
            raise ConfigError(
                f"task.factory={self.factory!r} leaves no task to train on, as all of them are also"
                " held out. Give more tasks."
            )

    def episode(self, example: Example) -> Any:
        """Return an episode that has not begun."""
        settings = dict(self.settings)
        if "extras" in inspect.signature(self.make).parameters:  # SkyRL-gym's, of a row
            settings["extras"] = example.extra.get("row", {})
        with wording(f"{self.make.__name__}()", f", with task.settings={self.settings}"):
            environment = self.make(**settings)
        return self.adapter(environment, self.scale)

    def examples(self, split: str) -> Sequence[Example]:
        """Return an example for each seed."""
        return [
            Example(
                number,
                f"seed {seed}",
                "",
                {"seed": seed} | ({"row": self.rows[seed % len(self.rows)]} if self.rows else {}),
            )
            for number, seed in enumerate(self.seeds[split])
        ]

    def prompt(self, example: Example) -> Messages:
        """Return the first messages of an episode."""
        seed = example.extra["seed"]
        if seed not in self.prompts:
            episode = self.episode(example)
            self.prompts[seed] = start(episode, example, self.name, self.call_seconds)
            episode.close()
        return self.prompts[seed]

    def reward(self, example: Example, completion: Any) -> float | None:
        """Return the reward of a played episode; None if it has no reward."""
        return completion.reward

    def metrics(self, examples: Sequence[Example], completions: Sequence[Any]) -> dict[str, float]:
        """Return percentages: episodes that earned everything and were completed; the mean reward,
        if there was one; episodes that were completed. Raises: RunStopped for a reward that is not
        finite.
        """
        for example, played in zip(examples, completions, strict=True):
            if played.reward is not None and not math.isfinite(played.reward):
                raise RunStopped(
                    f"evaluation: an episode of {self.kind.__name__} earned {played.reward:g}"
                    f" (example {example.id}, {example.question}). Let it earn a number of"
                    f" task.scale={self.scale}, or None where nothing is known.",
                    EXIT_NUMBERS,
                )
        ended = [played.stop in ENDED for played in completions]
        earned = [played.reward for played in completions if played.reward is not None]
        pairs = zip(completions, ended, strict=True)
        return {
            "success": percent((c.reward or 0.0) >= RIGHT and done for c, done in pairs),
            "reward": percent(earned),
            "done": percent(ended),
        }

    def pretraining(self, example: Example, draw: random.Random) -> tuple[Messages, Messages]:
        """Return the first messages of an episode, and a game that the environment's own `teach`
        plays.
        """
        if self.teach is None:
            raise ConfigError(
                f"model=tiny is pre-trained by the task, and {self.kind.__name__} has no method"
                " teach. Use a trained model (model=hf model.path=...)."
            )
        messages = self.teach(example, draw)
        return messages[:1], messages[1:]

    @property
    def teach(self) -> Callable[[Example, random.Random], Messages] | None:
        """Plays an episode as the environment's own `teach` does; None if it has none."""
        teach = getattr(self.kind, "teach", None)
        if teach is None:
            return None
        return lambda example, draw: teach(self.make(**self.settings), example.extra["seed"], draw)


def _load(path: str | None, settings: dict[str, Any], most: int) -> Any:
    if path is None:
        raise ConfigError(
            "task.factory is not set. Give MODULE:CLASS with reset(seed) and step(text):"
            " docs/environments.md. task=guess is an environment that is ready."
        )
    module, _, name = path.partition(":")
    advice = "Give MODULE:CLASS, and the folder of the module on PYTHONPATH."
    factory = import_named(f"task.factory={path!r}", module, name, advice)
    if not callable(factory):
        raise ConfigError(f"task.factory={path!r} is no class and no function. {advice}")
    if hasattr(factory, "task_type"):
        return TaskSet(factory, settings, most)
    try:
        inspect.signature(factory).bind_partial(**settings)
    except TypeError as error:
        names = ", ".join(inspect.signature(factory).parameters) or "none"
        raise ConfigError(
            f"task.settings={settings} is not what {name} takes: {error}. Its settings: {names}."
        ) from error
    return factory
