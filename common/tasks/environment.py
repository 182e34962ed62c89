"""Environments of several turns: games and tools that reply to what the model says.

    python launch.py algo=NAME task=guess
    python launch.py algo=NAME task=environment task.factory=my_module:MyGame model=hf ...

An environment has Gymnasium's text steps, as the games of GEM have them: `reset(seed)` returns the
first observation and a dict, `step(text)` the next observation, a reward, whether the game is over,
whether it was broken off, and a dict. An episode earns the sum of its rewards, in [0, 1].
"""

import inspect
import random
from collections.abc import Sequence
from typing import Any

from common.config import ConfigError
from common.instance import import_named
from common.tasks import Example, Messages
from common.tasks.checked import wording
from common.tasks.rows import percent

TEST_SEEDS = 1 << 20  # the first of those that are held out


class TextSteps:
    """An episode of an environment with text steps (common.rollout.episodes.Episode)."""

    def __init__(self, environment: Any) -> None:
        self.environment, self.earned = environment, 0.0
        self.name = type(environment).__name__

    def start(self, example: Example, seed: int) -> Messages:
        """Begin with the first observation."""
        with wording(f"{self.name}.reset", f", for seed {seed}"):
            observation, _ = self.environment.reset(seed=seed)
        return [{"role": "user", "content": str(observation)}]

    def reply(self, message: dict[str, str]) -> Messages | None:
        """Take a step with the text of the message."""
        text = message["content"]
        with wording(f"{self.name}.step", f", for {text[:80]!r}"):
            observation, reward, ended, broken_off, _ = self.environment.step(text)
            self.earned += float(reward)
        if ended or broken_off:
            return None
        return [{"role": "user", "content": str(observation)}]

    def reward(self) -> float:
        """Return the sum of the rewards."""
        return self.earned

    def close(self) -> None:
        """Close the environment, where it can be."""
        if close := getattr(self.environment, "close", None):
            close()


class Environment:
    """Episodes of an environment, told apart by their seeds.

    Args: factory: "module:Class", called with `settings`; problems, test_problems: seeds to train
    on and to hold out; max_turns: answers of the model at most; reply_tokens: of all replies of an
    episode at most.
    """

    repeatable = False

    def __init__(
        self,
        factory: str | None,
        settings: dict[str, Any],
        problems: int,
        test_problems: int,
        max_turns: int,
        reply_tokens: int,
    ) -> None:
        for key, value in {"problems": problems, "test_problems": test_problems}.items():
            if not 1 <= value < TEST_SEEDS:
                raise ConfigError(
                    f"task.{key}={value} is out of range. Give 1 to {TEST_SEEDS - 1}."
                )
        for key, value in {"max_turns": max_turns, "reply_tokens": reply_tokens}.items():
            if value < 1:
                raise ConfigError(f"task.{key}={value} is too small. Give 1 or more.")
        self.factory, self.settings = _load(factory, settings), settings
        self.name = self.factory.__name__.lower()
        self.max_turns, self.reply_tokens = max_turns, reply_tokens
        self.seeds = {
            "train": range(problems),
            "test": range(TEST_SEEDS, TEST_SEEDS + test_problems),
        }
        self.prompts: dict[int, Messages] = {}  # by seed

    def episode(self, example: Example) -> TextSteps:
        """Return an episode that has not begun."""
        with wording(f"{self.factory.__name__}()", f", with task.settings={self.settings}"):
            return TextSteps(self.factory(**self.settings))

    def examples(self, split: str) -> Sequence[Example]:
        """Return an example for each seed."""
        return [
            Example(number, f"seed {seed}", "", {"seed": seed})
            for number, seed in enumerate(self.seeds[split])
        ]

    def prompt(self, example: Example) -> Messages:
        """Return what an episode begins with."""
        seed = example.extra["seed"]
        if seed not in self.prompts:
            episode = self.episode(example)
            self.prompts[seed] = episode.start(example, seed)
            episode.close()
        return self.prompts[seed]

    def reward(self, example: Example, completion: Any) -> float:
        """Return what a played episode has earned."""
        return completion.reward

    def metrics(self, examples: Sequence[Example], completions: Sequence[Any]) -> dict[str, float]:
        """Return percentages: episodes that earned all and ended; the mean of what was earned;
        episodes that the environment ended.
        """
        return {
            "success": percent(c.reward >= 1 and c.stop == "done" for c in completions),
            "reward": 100 * sum(c.reward for c in completions) / max(1, len(completions)),
            "done": percent(c.stop == "done" for c in completions),
        }

    def pretraining(self, example: Example, draw: random.Random) -> tuple[Messages, Messages]:
        """Return what an episode begins with, and how the environment's own `teach` plays it."""
        teach = getattr(self.factory, "teach", None)
        if teach is None:
            raise ConfigError(
                f"model=tiny is pre-trained by the task, and {self.factory.__name__} has no method"
                " teach. Use a trained model (model=hf model.path=...)."
            )
        messages = teach(self.factory(**self.settings), example.extra["seed"], draw)
        return messages[:1], messages[1:]


def _load(path: str | None, settings: dict[str, Any]) -> Any:
    if path is None:
        raise ConfigError(
            "task.factory is not set. Give MODULE:CLASS with reset(seed) and step(text):"
            " docs/environments.md. task=guess is an environment that is ready."
        )
    module, _, name = path.partition(":")
    advice = "Give MODULE:CLASS, and the folder of the module on PYTHONPATH."
    factory = import_named(f"task.factory={path!r}", module, name, advice)
    missing = [one for one in ("reset", "step") if not callable(getattr(factory, one, None))]
    if missing:
        raise ConfigError(
            f"task.factory={path!r} has no method {missing[0]}. An environment has reset(seed) and"
            " step(text): docs/environments.md."
        )
    if "seed" not in inspect.signature(factory.reset).parameters:
        raise ConfigError(
            f"task.factory={path!r}: its reset takes no seed, so the samples of a group would begin"
            " differently. Add the argument `seed`."
        )
    try:
        inspect.signature(factory).bind(**settings)
    except TypeError as error:
        takes = ", ".join(inspect.signature(factory).parameters) or "none"
        raise ConfigError(
            f"task.settings={settings} is not what {name} takes: {error}. Its settings: {takes}."
        ) from error
    return factory
