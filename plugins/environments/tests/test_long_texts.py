"""Every game goes on or ends on any text, whatever the text repeats."""

import math

import pytest

from benchmarks.readers import LENGTH, long_texts
from plugins.environments.games import Guess, Maze
from plugins.environments.tools import Calculator, Questions, Search, Sql

pytestmark = pytest.mark.run

TEXTS = long_texts(LENGTH)


@pytest.mark.thorough
@pytest.mark.parametrize("game", [Guess, Maze, Calculator, Search, Sql])
def test_a_game_answers_any_text(game):
    for text in TEXTS:
        one = game()
        one.reset(0)
        said = [one.step(text)]
        if isinstance(one, Questions):
            said.append(game.step(one, f"={text}"))
        assert all(math.isfinite(reward) for _, reward, *_ in said), text[:50]
