"""No text makes a scorer slow: its time is linear in the text, whatever the text repeats."""

import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from omegaconf import OmegaConf

from common.tasks import Example, answers, build, equality, numbers, safe_arithmetic, similarity
from common.tasks.games import Guess, Maze
from common.tasks.tools import Calculator, Questions, Search, Sql
from tests.support import ROOT

pytestmark = pytest.mark.run  # a minute, for all of them

LENGTH = 10_000
SECONDS = 0.05  # of the processor, for a text of LENGTH
PARTS = (
    *("7", "0.", "1,", "1 ", "1/", "10^", "e5", "a", "x", "é", "中", "the ", "kg ", "\u0305", "½"),
    *(" ", "\t", "\n", "\r\n", "\N{NO-BREAK SPACE}", ".", ",", ";", ":", "!", "?", "'", '"', "`"),
    *("-", "−", "+", "*", "**", "/", "^", "_", "=", "<", ">", "|", "~", "%", "#", "$", "\\", "&"),
    *("(", ")", "[", "]", "{", "}", "\\{", "{,}", "\\frac", "\\boxed{", "\\text{", "\\sqrt{"),
    *("####", "<answer>", "</answer>", "<|", "<<", "- ", " or ", "× 10^", "\\,", "8/8/", "<b>"),
)


def texts() -> list[str]:
    """One part again and again, two that alternate, and a draw of three; each also with a number
    before and behind.
    """
    draw = random.Random(0)
    pairs = draw.sample(list(itertools.permutations(PARTS, 2)), 50)
    triples = [tuple(draw.sample(PARTS, 3)) for _ in range(20)]
    repeated = ["".join(parts) for parts in [*((one,) for one in PARTS), *pairs, *triples]]
    long = [(part * (LENGTH // len(part) + 1))[:LENGTH] for part in repeated]
    around = [f"7{text}7" for text in long[: len(PARTS)]]
    tagged = [f"<answer>{text}</answer>" for text in long[: len(PARTS)]]
    boxed = [f"\\boxed{{{part * 100}}}" for part in PARTS]
    return [*long, *around, *tagged, *boxed]


TEXTS = texts()


def settings(name: str, **changed: Any) -> dict[str, Any]:
    node: Any = OmegaConf.to_container(OmegaConf.load(ROOT / f"conf/task/{name}.yaml"))
    return node | changed


def find_slow(score: Callable[[str], Any]) -> list[tuple[float, str]]:
    """Return the seconds of the texts that take too long, and how they begin. One more try: the
    collector of garbage, too, takes its time.
    """
    slow = []
    score("7")
    for text in TEXTS:
        for _ in range(3):
            started = time.process_time()
            score(text)
            spent = time.process_time() - started
            if spent < SECONDS:
                break
        else:
            slow.append((spent, text[:20]))
    return slow


FUNCTIONS = {
    "find_answer": numbers.find_answer,
    "find_alone": numbers.find_alone,
    "read": numbers.read,
    "unread": lambda text: numbers.is_unread(text, None),
    "normalize": equality.normalize,
    "comparable": equality.comparable,
    "tagged": answers.tagged,
    "path_key": answers.path_key,
    "evaluate": safe_arithmetic.evaluate,
    **{
        name: lambda text, one=one: one(text, "two words and more")
        for name, one in similarity.SIMILARITIES.items()
    },
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_reader_takes_linear_time(name):
    assert find_slow(FUNCTIONS[name]) == []


TASKS = {
    "countdown": settings("countdown", problems=4, test_problems=2),
    "units": settings("units", problems=4, test_problems=2),
    "chess": settings("chess", positions=4, test_positions=2),
    "translate": settings("translate"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", TASKS)
def test_a_task_takes_linear_time(name):
    check_task(build(TASKS[name]))


@pytest.mark.parametrize("reward", ["exact", "numeric", "math", "levenshtein", "bleu", "chrf"])
def test_custom_takes_linear_time(reward, tmp_path, math_verify, monkeypatch):
    math_verify("False")
    lines = [f'{{"q": "{n}", "a": "{n}"}}' for n in range(10)]
    if reward == "math":  # what is asked has a limit of its own; nothing long may be
        lines = [f'{{"q": "{n}", "a": "x+{n}"}}' for n in range(10)]
        monkeypatch.setattr(equality, "call", refuse_long)
        monkeypatch.setattr(equality, "warn_of_unread", lambda *_: None)
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    own = {"path": str(tmp_path / "rows.jsonl"), "prompt_field": "q", "answer_field": "a"}
    check_task(build(settings("custom", reward=reward, **own)))


def test_gsm8k_takes_linear_time(tmp_path):
    for split, count in (("train", 4), ("test", 6)):
        lines = [f'{{"question": "{n + count}", "answer": "#### {n}"}}' for n in range(2)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    check_task(build(settings("gsm8k", path=str(tmp_path))))


def refuse_long(_package: str, _function: Any, _wanted: str, given: str) -> float:
    """Stand for math-verify, which takes seconds for texts that repeat themselves."""
    assert len(given) < 10, given[:50]
    return 0.0


def check_task(task: Any) -> None:
    example: Example = task.examples("test")[0]
    parts: dict[str, Callable[[str], Any]] = {"reward": lambda text: task.reward(example, text)}
    for name in ("answer", "path_key"):
        if hasattr(task, name):
            parts[name] = getattr(task, name)
    for name, part in parts.items():
        assert find_slow(part) == [], name


@pytest.mark.thorough
@pytest.mark.parametrize("game", [Guess, Maze, Calculator, Search, Sql])
def test_a_game_takes_linear_time(game):
    def step(text: str) -> Any:
        one = game()
        one.reset(0)
        if isinstance(one, Questions):
            return [one.step(text), game.step(one, f"={text}")]
        return one.step(text)

    assert find_slow(step) == []
