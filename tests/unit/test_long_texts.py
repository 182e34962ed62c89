"""Every reader of answers ends on any text, whatever the text repeats, and says what it is worth.

How long they take, and that it grows as the text does: python -m benchmarks readers.
"""

from typing import Any

import pytest
from omegaconf import OmegaConf

from benchmarks.readers import LENGTH, READERS, long_texts
from common.task import Example, build
from common.tasks import equality
from tests.support import ROOT

pytestmark = pytest.mark.run  # half a minute, for all of them

TEXTS = long_texts(LENGTH)


def settings(name: str, **changed: Any) -> dict[str, Any]:
    node: Any = OmegaConf.to_container(OmegaConf.load(ROOT / f"conf/task/{name}.yaml"))
    return node | changed


@pytest.mark.parametrize("name", READERS)
def test_a_reader_ends_on_any_text(name):
    for text in TEXTS:
        READERS[name](text)


TASKS = {
    "units": settings("units", problems=4, test_problems=2),
    "chess": settings("chess", positions=4, test_positions=2),
    "translate": settings("translate"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", TASKS)
def test_a_task_scores_any_text(name):
    check_task(build(TASKS[name]))


@pytest.mark.parametrize("reward", ["exact", "numeric", "math", "levenshtein", "bleu", "chrf"])
def test_custom_scores_any_text(reward, tmp_path, math_verify, monkeypatch):
    math_verify("False")
    lines = [f'{{"q": "{n}", "a": "{n}"}}' for n in range(10)]
    if reward == "math":  # what is asked has a limit of its own; nothing long may be
        lines = [f'{{"q": "{n}", "a": "x+{n}"}}' for n in range(10)]
        monkeypatch.setattr(equality, "call", refuse_long)
        monkeypatch.setattr(equality, "warn_of_unread", lambda *_: None)
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    own = {"path": str(tmp_path / "rows.jsonl"), "prompt_field": "q", "answer_field": "a"}
    check_task(build(settings("custom", reward=reward, **own)))


def refuse_long(_package: str, _function: Any, _wanted: str, given: str) -> float:
    """Stand for math-verify, which takes seconds for texts that repeat themselves."""
    assert len(given) < 10, given[:50]
    return 0.0


def check_task(task: Any) -> None:
    example: Example = task.examples("test")[0]
    for text in TEXTS:
        assert 0 <= task.reward(example, text) <= 1, text[:50]
        for name in ("answer", "path_key"):
            if hasattr(task, name):
                getattr(task, name)(text)
