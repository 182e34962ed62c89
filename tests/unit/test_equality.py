"""Answers that are equal as mathematics: what is asked, and what is never compared."""

import pytest

from common.tasks import equality, limited_process, numbers

# Without math-verify: alike but for blanks and type.
ALIKE = {
    r"90^\circ": r"90^{\circ}",
    "x^3+3x-6": "x^3 + 3x - 6",
    r"\frac{\pi}{2}": r"\dfrac { \pi } { 2 }",
    r"\left( 3, \frac{\pi}{2} \right)": r"(3,\frac{\pi}{2})",
    r"1 \pm \sqrt{19}": r"1\pm\sqrt{19}",
    "2516_8": "2516_8",
    r"\theta^\circ": r"\theta",
    "$x^2$": "x^2",
}
WORDS = [
    (r"\text{Evelyn}", "Evelyn"),
    (r"\text{even}", "even"),
    (r"\text{Yes}", r"\textbf{yes}"),
    ("East", r"\text{East}"),
    (r"\text{no solution}", "no solution"),
    (r"\text{(C)}", "C"),
    (r"\text{Navin}", r"\text{navin}"),
    (r"3 \mod 5", r"3 \pmod{5}"),
    (r"3 \pmod 5", "3 (mod 5)"),
    (r"x \equiv 3 \pmod 5", r"x \equiv 3 \mod{5}"),
]
OTHERS = [
    (r"\text{Evelyn}", "Navin"),
    (r"\text{even}", "odd"),
    (r"\text{east}", "seat"),
    (r"\text{(C)}", "D"),
    (r"\text{(C)}", "c"),
    (r"\text{no solution}", "solution"),
    (r"3 \mod 5", "3"),
    ("3", r"3 \mod 5"),
    (r"3 \pmod 5", r"3 \pmod 7"),
    ("3", r"3 \bmod 5"),
    ("3", "3 mod 5"),
    ("x", "X"),
    ("18", "3n=18"),
    ("18", "n^2 = 18"),
    (r"\sqrt{7}", r"3n = \sqrt{7}"),
    (r"2y = \sqrt{7}", r"\sqrt{7}"),
]
HOPELESS = [
    "{",
    "(",
    "[",
    "-",
    "(-",
    r"\left(",
    r"\frac{",
    "^",
    "x^",
    "<",
    "x+",
    "(x+1)",
    "--",
    "x_",
]
EQUAL = {
    "x^3+3x-6": "3x + x^3 - 6",
    "(x+1)^2": "x^2+2x+1",
    r"3\sqrt{2}": r"\sqrt{18}",
    r"3\sqrt{2} \text{ cm}": r"3\sqrt{2}",
    "3, 5": "5,3",
    r"1 - \frac{1}{\mathrm{e}}": "1-1/e",
    "e^{2x}": "(e^x)^2",
    r"x^{-2}": r"\frac{1}{x^2}",
    r"2\frac{1}{2}x": r"\frac{5}{2}x",
    "2^{10}": "1024",
    r"\sqrt{16}": "4",
}
# (right answer, answer): each of them was paid, or would be.
DIFFERENT = [
    (r"1 - \frac{1}{\mathrm{e}}", "1"),
    (r"1 - \frac{1}{\mathrm{e}}", r"1 + \frac{1}{\mathrm{e}}"),
    ("2516_9", "2516_8"),
    (r"4\sqrt(2)", "4"),
    ("5,3", "x_1=3, x_2=5"),
    ("3t", "3"),
    ("5 6", "11"),
    ("east", "seat"),
    (r"5\,000x", "0"),
    (r"3x \text{ thousand}", "3x"),
    (r"x = 2 \text{ and } y = 3", "x=2"),
    ("x^2", "x^3"),
    (r"60^\circ 30'", "90"),
]
# Nothing of this is computed.
COSTLY = ["9^{9^9}", "9**9**9", "((x^{90})^{90})^{90}", "9^{999}", "100!", "2^{2^{2^{2^2}}}"]


@pytest.mark.parametrize(("wanted", "given"), ALIKE.items())
def test_texts_that_are_alike_are_equal_without_the_package(wanted, given, monkeypatch):
    monkeypatch.setattr(equality, "call", None)
    assert equality.equal(wanted, given)


@pytest.mark.parametrize(("wanted", "given"), WORDS)
def test_words_and_residues_that_are_written_apart(wanted, given, monkeypatch):
    monkeypatch.setattr(equality, "call", None)
    assert equality.equal(wanted, given)
    assert equality.equal(given, wanted)


@pytest.mark.parametrize(("wanted", "given"), OTHERS)
def test_another_word_or_residue_is_not_compared(wanted, given, monkeypatch):
    monkeypatch.setattr(equality, "call", lambda *_: 1.0)  # whatever math-verify says
    assert not equality.equal(wanted, given)


@pytest.mark.parametrize("part", HOPELESS)
def test_what_can_be_no_answer_is_not_asked(part, monkeypatch):
    monkeypatch.setattr(equality, "call", None)
    for count in (40, 100, 300, 10_000):
        assert not equality.equal("y+1", part * count)


def test_math_verify_is_asked_once(monkeypatch):
    asked = []
    monkeypatch.setattr(equality, "call", lambda *given: float(bool(asked.append(given))))
    for _ in range(3):
        assert not equality.equal("q+1", "q+2")
    assert len(asked) == 1


@pytest.mark.parametrize(("wanted", "given"), EQUAL.items())
def test_what_is_equal_as_mathematics(wanted, given):
    pytest.importorskip("math_verify")
    assert equality.equal(wanted, given)


@pytest.mark.parametrize(("wanted", "given"), DIFFERENT)
def test_what_is_not_read_to_its_end_is_not_compared(wanted, given):
    pytest.importorskip("math_verify")
    assert not equality.equal(wanted, given)
    assert numbers.read(given, variables=True) != numbers.read(wanted, variables=True) or (
        numbers.read(wanted, variables=True) is None
    )


@pytest.mark.parametrize("text", COSTLY)
def test_what_would_compute_without_end_is_not_asked(text):
    assert equality.comparable(text) is None


def test_small_powers_are_asked(math_verify):
    math_verify("False")
    for text in ("x^2", "2^{10}", "(x+1)^{2}", "e^{2x}", "x^{-3}", "3**2"):
        assert not equality.equal("y", text)
    assert len(math_verify.asked) == 6


def test_right_answers_that_are_not_read_are_counted(caplog):
    pytest.importorskip("math_verify")
    with caplog.at_level("WARNING", "clutch"):
        equality.warn_of_unread("rows", [r"\frac{\pi}{2}", "2516_8", r"3 \pm \sqrt{2}"])
    assert "of 3 right answers" in caplog.text
    assert "2 could not be read" in caplog.text
    limited_process.end_all()
