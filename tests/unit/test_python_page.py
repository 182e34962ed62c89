"""docs/python.md has the reference that the docstrings give now."""

from launch import train
from tests.support import python_page


def test_the_reference_is_of_today():
    page = python_page.PAGE.read_text(encoding="utf-8")
    assert python_page.with_reference(page) == page, "python -m tests.support.python_page"


def test_a_changed_docstring_makes_the_page_stale(monkeypatch):
    page = python_page.PAGE.read_text(encoding="utf-8")
    monkeypatch.setattr(train, "__doc__", "Train.\n\nArgs:\n    run: the settings.\nRaises: x.")
    changed = python_page.with_reference(page)
    assert changed != page
    assert "- `run`: the settings.\n\nRaises: x." in changed


def test_every_parameter_is_described():
    made = python_page.make()
    for name in ("overrides", "config_dir", "out_dir", "test_rows", "reward", "before", "verdict"):
        assert f"- `{name}`: " in made
    for name in ("model_and_tokenizer", "history", "examples", "metrics"):
        assert f"#### {name}\n" in made
    assert max(map(len, made.splitlines())) <= python_page.WIDTH
