"""Games that a small model can learn, with text steps (plugins/environments/task.py)."""

import random
import re
from typing import Any, ClassVar

from common.config import ConfigError
from common.task import Messages

_WAY = re.compile(r"(?<![\w'’.])[nesw](?![\w'’])|north|east|south|west")  # not the s of let's

Outcome = tuple[str, float, bool, bool, dict[str, Any]]  # of a step, as Gymnasium has it


def check_settings(**settings: tuple[int, int, int]) -> None:
    """Raise ConfigError for a setting, (value, least, most), that is out of range."""
    for name, (value, least, most) in settings.items():
        if type(value) is not int or not least <= value <= most:
            raise ConfigError(
                f"task.settings.{name}={value} is not a whole number from {least} to {most}."
            )


def turn(told: str, answer: str) -> Messages:
    """Return a turn: the reply that a model reads, and its answer."""
    return [{"role": "user", "content": told}, {"role": "assistant", "content": answer}]


class Guess:
    """Guess a number from 1 to `largest` in `guesses` guesses. After a wrong guess the reply says
    whether the number is higher or lower.
    """

    SCANS = 0.6  # the share of the games of `teach` that go up one by one

    def __init__(self, largest: int = 31, guesses: int = 5) -> None:
        check_settings(largest=(largest, 2, 10_000), guesses=(guesses, 1, 10_000))
        self.largest, self.guesses, self.left, self.number = largest, guesses, guesses, 0

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Draw a number."""
        self.number = random.Random(f"guess {seed}").randint(1, self.largest)
        self.left = self.guesses
        return f"guess 1 to {self.largest}", {}

    def step(self, text: str) -> Outcome:
        """Read a guess: the first number of the text."""
        number = re.search(r"[0-9]{1,9}", text)
        guess = int(number[0]) if number else 0
        self.left -= 1
        if guess == self.number:
            return "right", 1.0, True, False, {}
        told = "higher" if guess < self.number else "lower"
        return told, 0.0, self.left == 0, False, {}

    def teach(self, seed: int, draw: random.Random) -> Messages:
        """Return a whole game. A guess is the middle of the remaining range or, more often, the
        number after the last one.
        """
        scans, low, high, last = draw.random() < self.SCANS, 1, self.largest, 0
        messages, (observation, _), ended = [], self.reset(seed), False
        while not ended:
            guess = min(last + 1, self.largest) if scans else (low + high) // 2
            messages += turn(observation, f"{guess}")
            observation, _, ended, *_ = self.step(f"{guess}")
            low, high = (guess + 1, high) if observation == "higher" else (low, guess - 1)
            last = guess
        return messages


class Maze:
    """Walk from the first room of a maze of `size` x `size` to the last one in `moves` moves. A
    reply names the current room and the directions that are open: north, east, south, west.
    """

    WAYS: ClassVar = {"n": -1j, "e": 1, "s": 1j, "w": -1}  # a room is x + yj
    DIRECT = 0.25  # the share of the games of `teach` that go straight to the goal

    def __init__(self, size: int = 3, moves: int = 12) -> None:
        # The longest way through size² rooms has size² - 1 moves.
        check_settings(size=(size, 2, 9), moves=(moves, size**2 - 1, 1000))
        self.size, self.moves, self.left = size, moves, moves
        self.at, self.ways, self.route = 1 + 1j, {1 + 1j: ""}, ""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Build a maze without circles, by a random walk that backtracks at dead ends."""
        draw, sides, walk = random.Random(f"maze {seed}"), range(1, self.size + 1), [(1 + 1j, "")]
        self.at, self.left = 1 + 1j, self.moves
        self.ways = {complex(x, y): "" for x in sides for y in sides}
        while walk:
            room, _ = walk[-1]
            new = [way for way, step in self.WAYS.items() if self.ways.get(room + step) == ""]
            if not new:
                walk.pop()
                continue
            way = draw.choice(new)
            beyond = room + self.WAYS[way]
            self.ways[room] += way
            self.ways[beyond] += "swne"["nesw".index(way)]
            walk.append((beyond, way))
            if beyond == complex(self.size, self.size):
                self.route = "".join(way for _, way in walk)
        return f"walk to {self.size},{self.size}. {self._look()}", {}

    def step(self, text: str) -> Outcome:
        """Go in the first direction that the text names, if it is open."""
        way = _WAY.search(text.lower())
        if way and way[0][0] in self.ways[self.at]:
            self.at += self.WAYS[way[0][0]]
        self.left -= 1
        there = self.at == complex(self.size, self.size)
        return self._look(), float(there), there or self.left == 0, False, {}

    def teach(self, seed: int, draw: random.Random) -> Messages:
        """Return a whole game, which goes straight to the goal or, more often, back and forth in
        the first direction that is open.
        """
        direct = draw.random() < self.DIRECT
        messages, (look, _), ended = [], self.reset(seed), False
        while not ended:
            first = next(way for way in self.WAYS if way in self.ways[self.at])
            way = self.route[len(messages) // 2] if direct else first
            messages += turn(look, way)
            look, _, ended, *_ = self.step(way)
        return messages

    def _look(self) -> str:
        ways = " ".join(way for way in self.WAYS if way in self.ways[self.at])
        return f"at {self.at.real:g},{self.at.imag:g}: {ways}"
