"""Chess: FEN validation against python-chess, components, data, and pools that give the serial
scores.
"""

import csv
import gzip
import itertools
import math
import pickle
import random
import time
from pathlib import Path
from typing import Any

import chess
import Levenshtein
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from common.config import ConfigError, ScoringConfig
from common.scoring import Scorer, score
from common.task import Example, build
from common.tasks.chess import FIELDS, Chess, shaped, valid_fens
from tests.support import ROOT

SETTINGS: dict[str, Any] = OmegaConf.to_container(OmegaConf.load(ROOT / "conf/task/chess.yaml"))  # type: ignore

START = chess.STARTING_FEN
AFTER = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1"
ROW = Example(0, f"{START} e2e4 =>", AFTER, {"fen": START, "move": "e2e4"})

HOSTILE = [
    "",
    " ",
    "\n\n",
    "\0",
    "\ud800",
    "x" * 10_000,
    "8/" * 5_000,
    " " * 10_000,
    "/" * 7 + " " * 5,
    "/" * 7 + " w - - 0 1",
    "8/" * 7 + " w - - 0 1",
    "8/" * 8 + "8 w - - 0 1",
    "9/8/8/8/8/8/8/8 w - - 0 1",
    "x/8/8/8/8/8/8/8 w - - 0 1",
    "8/8/8/8/8/8/8/8 w - -  0 1",
    "8/8/8/8/8/8/8/8 - - - - -",
    "pppppppppp/8/8/8/8/8/8/8 w - - 0 1",
    AFTER[:20],
    AFTER[: len(AFTER) // 2],
    AFTER.split(" ")[0],
    AFTER + "0" * 10_000,
    f"{AFTER} {AFTER}",
    AFTER.replace(" ", "\0"),
    AFTER.replace(" ", "\u00a0"),
    AFTER.replace(" ", "  "),
    '{"fen": "' + AFTER + '"}',
    '["a", "b", "c", "d", "e", "f"]',
    "👩‍👩‍👧‍👦" * 50,
    "♜♞♝♛♚♝♞♜/♟♟♟♟♟♟♟♟/8/8/8/8/♙♙♙♙♙♙♙♙/♖♘♗♕♔♗♘♖",
    "__import__('os').abort()",
    "%s {fen} ${oc.env:HOME} \\1",
]


def make(**changed: Any) -> Chess:
    few = {"test_positions": 50} if "path" in changed else {"positions": 300, "test_positions": 50}
    few = {} if "test_path" in changed else few
    task = build(SETTINGS | few | changed)
    assert isinstance(task, Chess)
    return task


def error(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


@pytest.fixture(scope="module")
def task() -> Chess:
    return make()


# --- valid FENs

CASTLING = {"".join(c for c, keep in zip("KQkq", keeps, strict=True) if keep) or "-" for keeps in
            itertools.product((0, 1), repeat=4)}  # fmt: skip
PASSANT = {"-"} | {f"{file}{rank}" for file in "abcdefgh" for rank in "36"}


def reference(text: str) -> bool:
    """What valid_fens promises, by python-chess, which is laxer in spelling: castling rights in any
    order, "Q~", "+1".
    """
    fields = text.split(" ")
    if len(text) > 120 or len(fields) != 6 or "~" in text or text.split() != fields:
        return False
    if fields[2] not in CASTLING or fields[3] not in PASSANT:
        return False
    for clock, least in zip(fields[4:], (0, 1), strict=True):
        if not (
            clock.isascii()
            and clock.isdecimal()
            and str(int(clock)) == clock
            and least <= int(clock) <= 9999
        ):
            return False
    try:
        board = chess.Board(text)
    except ValueError:
        return False
    return all(len(board.pieces(chess.KING, color)) == 1 for color in chess.COLORS)


def played(count: int) -> list[str]:
    """FENs of random games."""
    draw, fens, board = random.Random(0), [], chess.Board()
    while len(fens) < count:
        moves = list(board.legal_moves)
        if not moves or len(board.move_stack) > 120:
            board = chess.Board()
            continue
        board.push(draw.choice(moves))
        fens.append(board.fen(en_passant=draw.choice(["fen", "legal"])))
    return fens


def mutated(fen: str, draw: random.Random) -> str:
    """One to three letters changed, put in, left out or swapped; mostly letters of FENs."""
    letters = list(fen)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(letters))
        new = draw.choice("pnbrqkPNBRQK12345678/ -wbKQkqabcdefgh0369~\0x\u0663\u00a0")
        change = draw.randrange(4)
        if change == 0:
            letters[at] = new
        elif change == 1:
            letters.insert(at, new)
        elif change == 2 and len(letters) > 1:
            del letters[at]
        else:
            other = draw.randrange(len(letters))
            letters[at], letters[other] = letters[other], letters[at]
    return "".join(letters)


def test_valid_fens_is_python_chess():
    fens = played(3000)
    draw = random.Random(1)
    texts = fens + [mutated(fen, draw) for fen in fens for _ in range(3)]
    wanted = [reference(text) for text in texts]
    assert all(wanted[: len(fens)])
    assert 0.05 < np.mean(wanted[len(fens) :]) < 0.8  # the mutations try both sides
    found = valid_fens(texts)
    assert found.dtype == bool
    assert [text for text, f, w in zip(texts, found, wanted, strict=True) if f != w] == []


def test_valid_fens_of_a_field_each():
    """Each field on its own, over more than games bring."""
    board, turn, castling, passant, half, full = AFTER.split(" ")
    boards = """k7/8/8/8/8/8/8/K7 kK6/8/8/8/8/8/8/8 k7/8/8/8/8/8/8/8 kk6/8/8/8/8/8/8/K7
        K7/8/8/8/8/8/8 K7k7 k7/8/8/8/8/8/8/K7/8 k7/44/8/8/8/8/8/K7 k7/9/8/8/8/8/8/K7
        k7/0p7/8/8/8/8/8/K7 k7//8/8/8/8/8/K15 8/k7/8/8/8/8/8/K6 k7/8\0/8/8/8/8/8/K7
        \0k7/8/8/8/8/8/8/K7 k7/8/8/8/8/8/8/K3\0003 k7/ppppppppp/7/8/8/8/8/K7 K7k7/8/8/8/8/8/8"""
    choices = (
        [board, *boards.split()],
        ["w", "b", "W", "", "wb", "-"],
        [*sorted(CASTLING), "", "qk", "KK", "HAha", "--", "kK"],
        [*sorted(PASSANT), "", "e4", "i3", "E3", "e33", "--"],
        ["0", "1", "99", "150", "9999", "10000", "00", "01", "-1", "+1", "", "1_0", "x", "٣"],
        ["1", "2", "9999", "10000", "0", "01", "-1", "", "x"],
    )
    right = [board, turn, castling, passant, half, full]
    texts = [
        " ".join([*right[:i], c, *right[i + 1 :]])
        for i, options in enumerate(choices)
        for c in options
    ]
    texts += [
        AFTER + " ",
        " " + AFTER,
        AFTER + "\n",
        AFTER + " x",
        AFTER.replace(" ", "\t"),
        f"{AFTER} {'x' * 100}",
    ]
    found = valid_fens(texts)
    assert [text for text, f in zip(texts, found, strict=True) if f != reference(text)] == []
    assert 40 < found.sum() < len(texts)


@pytest.mark.run
@given(
    st.lists(st.text(alphabet="pkKQ18/ wb-0\0é", max_size=40) | st.text(max_size=20), max_size=6)
)
def test_valid_fens_of_any_texts(texts):
    assert valid_fens([*texts, START]).tolist() == [reference(text) for text in texts] + [True]


def test_valid_fens_does_not_depend_on_its_neighbours():
    draw = random.Random(2)
    texts = [mutated(fen, draw) if draw.random() < 0.5 else fen for fen in played(300)] + HOSTILE
    assert [bool(valid_fens([text])[0]) for text in texts] == valid_fens(texts).tolist()
    assert valid_fens([]).tolist() == []
    assert valid_fens(["", "x"]).tolist() == [False, False]


# --- components and measures


def similarity(one: str, other: str) -> float:
    return 1 - Levenshtein.distance(one, other) / max(len(one), len(other))


def scores(task: Chess, completion: str) -> dict[str, float]:
    return {name: component([ROW], [completion])[0] for name, component in task.components.items()}


@pytest.mark.parametrize(
    ("completion", "exact", "fields", "valid"),
    [
        (AFTER, 1, 6, 1),
        (f" {AFTER}\n", 1, 6, 1),
        (START, 0, 4, 1),  # board and turn are left as they were
        (AFTER.replace(" b ", " w "), 0, 5, 1),
        (AFTER.replace("KQkq", "-"), 0, 5, 1),
        (AFTER.replace("0 1", "1 2"), 0, 4, 1),
        (AFTER.replace("4P3", "4P2"), 0, 5, 0),
        (AFTER.replace("KQkq", "qkQK"), 0, 0, 0),
        (AFTER + " 1", 0, 0, 0),
        (AFTER.rsplit(" ", 1)[0], 0, 0, 0),
        (AFTER.replace(" KQkq", "  KQkq"), 0, 0, 0),
    ],
)
def test_components_by_hand(task, completion, exact, fields, valid):
    found = scores(task, completion)
    assert (found["exact"], found["fields"], found["valid"]) == (exact, fields / 6, valid)
    assert found["levenshtein"] == (similarity(completion.strip(), AFTER) if fields else 0)
    total = sum(task.weights.values())
    assert task.reward(ROW, completion) == pytest.approx(
        sum(task.weights[n] * v for n, v in found.items()) / total
    )


@pytest.mark.parametrize("completion", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_completions_earn_nothing(task, completion):
    assert scores(task, completion) == {"exact": 0, "fields": 0, "valid": 0, "levenshtein": 0}
    assert task.reward(ROW, completion) == 0
    measured = task.metrics([ROW], [completion])
    assert all(math.isfinite(value) and 0 <= value <= 100 for value in measured.values())
    assert measured["exact"] == measured["valid"] == 0


@given(st.text(alphabet=AFTER + "\0", max_size=90) | st.text(max_size=60))
def test_rewards_are_in_range(completion):
    reward = FEW.reward(ROW, completion)
    assert math.isfinite(reward)
    assert 0 <= reward <= 1


SMALL_SETTINGS = SETTINGS | {"positions": 20, "test_positions": 5}
FEW = make(positions=20, test_positions=5)


def completions_of(examples: list[Example]) -> list[str]:
    """Right, copied, cut, mutated and hostile ones."""
    draw = random.Random(3)
    return [
        draw.choice(
            [e.answer, e.extra["fen"], e.answer[:30], mutated(e.answer, draw), draw.choice(HOSTILE)]
        )
        for e in examples
    ]


def test_levenshtein_is_python_levenshtein(task):
    rows = list(task.examples("train"))
    draw = random.Random(4)
    texts = [mutated(e.answer, draw) for e in rows]
    found = task.components["levenshtein"](rows, texts)
    alike = shaped(texts)
    assert found == [similarity(t, e.answer) if t else 0 for t, e in zip(alike, rows, strict=True)]
    assert 50 < sum(map(bool, alike)) < len(rows)


def test_what_has_the_shape_of_a_fen():
    fens = played(500)
    assert shaped([f" {fen}\n" for fen in fens]) == fens
    draw = random.Random(5)
    texts = [mutated(fen, draw) for fen in fens]
    assert all(
        bool(shape) >= valid for shape, valid in zip(shaped(texts), valid_fens(texts), strict=True)
    )
    assert shaped(HOSTILE) == [""] * len(HOSTILE)
    assert shaped(["7/8/8/8/8/8/8/8 w - - 0 1"]) != [""]  # a rank that is one short is nearly right


def test_copying_the_input_is_what_levenshtein_alone_would_pay_for(task):
    rows = task.examples("test")
    right = task.metrics(rows, [e.answer for e in rows])
    assert right == {name: 100 for name in right} | {"copy_levenshtein": right["copy_levenshtein"]}
    copied = task.metrics(rows, [e.extra["fen"] for e in rows])
    assert copied["levenshtein"] == copied["copy_levenshtein"] == right["copy_levenshtein"]
    assert 90 < copied["copy_levenshtein"] < 92
    assert copied["exact"] == copied["board"] == copied["turn"] == 0
    assert copied["valid"] == 100
    assert next(iter(copied)) == "exact"
    assert set(FIELDS) < set(copied)
    assert 0 < task.reward(rows[0], rows[0].extra["fen"]) < 0.6


def test_accuracy_by_field(task):
    rows = [ROW] * 2
    found = task.metrics(rows, [AFTER.replace(" b ", " w "), AFTER.split(" ")[0]])
    assert {name: found[name] for name in FIELDS} == {
        "board": 100, "turn": 0, "castling": 50, "en_passant": 50, "halfmove": 50, "fullmove": 50
    }  # fmt: skip


def test_one_by_one_and_batched_scores_are_equal(task):
    rows = list(task.examples("train"))
    texts = completions_of(rows)
    alone = [task.reward(e, text) for e, text in zip(rows, texts, strict=True)]
    assert alone == task.rewards(rows, texts) == score(task, rows, texts)
    for component in task.components.values():
        assert component(rows, texts) == [
            component([e], [text])[0] for e, text in zip(rows, texts, strict=True)
        ]


@pytest.mark.run
@pytest.mark.parametrize("kind", ["serial", "threads", "processes"])
def test_pools_give_the_serial_scores_in_order(task, kind):
    rows = list(task.examples("train"))[:101]
    texts = completions_of(rows)
    scorer = Scorer(task, ScoringConfig(kind=kind, workers=3, timeout_seconds=60))
    batches = [
        scorer.submit(rows[at:], texts[at:]) for at in (0, 1, 98)
    ]  # started together, and fewer rows than workers
    assert scorer.submit([], []).result().rewards == []
    for at, pending in zip((0, 1, 98), batches, strict=True):
        scored = pending.result()
        assert scored.rewards == task.rewards(rows[at:], texts[at:])
        assert scored.components == {
            n: c(rows[at:], texts[at:]) for n, c in task.components.items()
        }
        assert set(scored.seconds) == set(task.weights)
    scorer.close()


class Slow(Chess):
    """Waits at one example, as a reward that hangs."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.components = {"exact": self.wait}
        self.weights = {"exact": 1.0}

    @staticmethod
    def wait(examples: list[Example], completions: list[str]) -> list[float]:
        time.sleep(1 if "hang" in completions else 0)
        return [0.0] * len(completions)


def test_a_pool_that_hangs_names_the_example():
    task = build(SMALL_SETTINGS | {"_target_": f"{__name__}.Slow"})
    rows = list(task.examples("train"))[:4]
    scorer = Scorer(task, ScoringConfig(kind="threads", workers=2, timeout_seconds=0.2))
    text = error(scorer.submit(rows, ["", "", "hang", ""]).result)
    assert text.startswith(
        "scoring took longer than scoring.timeout_seconds=0.2, at or after example 2."
    )
    scorer.close()


# --- rows


def replayed(task: Chess, split: str) -> None:
    for e in task.examples(split):
        board = chess.Board(e.extra["fen"])
        board.push(chess.Move.from_uci(e.extra["move"]))
        assert board.fen() == e.answer


def keys(task: Chess, split: str) -> list[tuple[str, str]]:
    return [(e.extra["fen"], e.extra["move"]) for e in task.examples(split)]


def test_it_is_a_task_and_its_yaml_makes_it(task):
    small = build(SETTINGS | {"positions": 300, "test_positions": 50})
    assert small.examples("train") == task.examples("train")
    assert pickle.loads(pickle.dumps(task)).reward(ROW, AFTER) == 1


def test_generated_rows_are_right_distinct_and_the_same_every_time(task):
    assert (len(task.examples("train")), len(task.examples("test"))) == (300, 50)
    assert [e.id for e in task.examples("train")] == list(range(300))
    assert len({*keys(task, "train"), *keys(task, "test")}) == 350
    replayed(task, "train")
    replayed(task, "test")
    e = task.examples("test")[0]
    assert task.prompt(e) == f"{e.extra['fen']} {e.extra['move']} =>"
    # the very row, so that another machine or version that draws anew is noticed: the model that
    # comes with the project was pre-trained on these
    assert (
        task.prompt(e)
        == "rn1qkbnr/2p1ppp1/b7/pp1p4/1P2P1p1/1Q6/P1PP1P1P/RNB1KBNR b KQkq - 1 8 b8d7 =>"
    )


@pytest.mark.parametrize("share", [0.0, 0.35, 1.0])
def test_pretraining_is_right_as_often_as_asked(share):
    teacher = make(share_right=share, positions=1500)
    draw, right = random.Random(1), 0
    for e in teacher.examples("train"):
        prompt, completion = teacher.pretraining(e, draw)
        given, wanted, before = (
            completion[1:].split(" "),
            e.answer.split(" "),
            e.extra["fen"].split(" "),
        )
        assert (prompt, completion[0]) == (teacher.prompt(e), " ")
        assert given in (wanted, [wanted[0], before[1], *wanted[2:4], *before[4:]])
        right += given == wanted
    assert abs(right / 1500 - share) <= 4 * math.sqrt(share * (1 - share) / 1500)


def test_the_template_may_hold_other_braces():
    e = make(template="{x} {move}: {fen}").examples("test")[0]
    assert e.question == f"{{x}} {e.extra['move']}: {e.extra['fen']}"


@pytest.mark.run
def test_real_puzzles(shared_data):
    folder = shared_data / "chess_puzzles"
    with gzip.open(folder / "test.csv.gz", "rt") as file:
        moves = sum(len(row["Moves"].split()) for row in csv.DictReader(file))
    one = make(path=str(folder / "test.csv.gz"), test_positions=500)
    assert len(one.examples("test")) == 500
    assert moves - 200 < len(one.examples("train")) + 500 <= moves
    assert not set(keys(one, "train")) & set(keys(one, "test"))
    replayed(one, "test")
    rows = one.examples("train")
    assert set(one.rewards(rows, [e.answer for e in rows])) == {1.0}
    assert one.metrics(rows, [e.extra["fen"] for e in rows])["copy_levenshtein"] > 85
    assert all(e.extra["fen"] in e.question for e in rows)


def table(folder, *rows: str, name: str = "a.csv") -> str:
    text = "\n".join(["Id,FEN,Moves", *rows]).encode()
    (folder / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return str(folder / name)


GOOD = f"1,{START},e2e4 e7e5 g1f3"


def test_csv_with_a_test_file_leaks_nothing(tmp_path):
    train = table(tmp_path, f"1,{START},e2e4 c7c5 g1f3 d7d6", name="train.v2.csv.gz")
    test = table(tmp_path, GOOD, GOOD, name="test.csv")
    found = make(path=train, test_path=test)
    assert [m for _, m in keys(found, "test")] == ["e2e4", "e7e5", "g1f3"]
    assert [m for _, m in keys(found, "train")] == ["c7c5", "g1f3", "d7d6"]  # e2e4 is a test row


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (f"2,{START},e2e5", f"line 3: illegal move e2e5 in '{START}'."),
        (f"2,{START},0000", f"line 3: illegal move 0000 in '{START}'."),
        (f"2,{START},hello", "line 3: invalid uci: 'hello'."),
        (f"2,{START},", "line 3: no moves."),
        (f"2,{START}", "line 3 has 2 cells, but line 1 names 3 columns: Id, FEN, Moves."),
        ("2,,e2e4", "line 3: empty fen."),
        (
            "2,rnbqkbnr w - - 0 1,e2e4",
            "line 3: expected 8 rows in position part of fen: 'rnbqkbnr'.",
        ),
        (
            "2,8/8/8/8/8/8/8/K7 w - - 0 1,a1a2",
            "line 3: '8/8/8/8/8/8/8/K7 w - - 0 1' is no position (no_black_king).",
        ),
        (
            "2,k6R/8/8/8/8/8/8/K7 w - - 0 1,a1a2",
            "line 3: 'k6R/8/8/8/8/8/8/K7 w - - 0 1' is no position (opposite_check).",
        ),
        (f'2,"{START},e2e4', "line 3: unexpected end of data."),
        (f'2,"{START}"x,e2e4', "line 3: ',' expected after '\"'."),
        (f'2,"{START}\n",e2e5', f"line 3: illegal move e2e5 in '{START}'."),
    ],
)
def test_a_broken_csv_row_is_named_by_file_and_line(tmp_path, row, text):
    path = table(tmp_path, GOOD, row, GOOD)
    assert error(make, path=path).startswith(f"task.path={path!r}: {text} Fix or remove it.")


PGN = """[Event "one"]
[Result "1-0"]

1. e4 e5 2. Qh5 {a comment} Nc6 (2... d6 3. Bc4) 3. Bc4 Nf6 $4
4. Qxf7# 1-0

[Event "unplayed"]

*

[Event "three"]
[FEN "8/P6k/8/8/8/8/8/K7 w - - 0 50"]
[SetUp "1"]

50. a8=Q Kg7 *
"""


@pytest.mark.parametrize("name", ["games.pgn", "games.2024.pgn.gz"])
def test_pgn(tmp_path, name):
    (tmp_path / name).write_bytes(
        gzip.compress(PGN.encode()) if name.endswith(".gz") else PGN.encode()
    )
    found = make(path=str(tmp_path / name), test_positions=2)
    moves = {*keys(found, "train"), *keys(found, "test")}
    assert len(moves) == 9
    assert {m for _, m in moves} == {
        "e2e4",
        "e7e5",
        "d1h5",
        "b8c6",
        "f1c4",
        "g8f6",
        "h5f7",
        "a7a8q",
        "h7g7",
    }
    replayed(found, "train")
    replayed(found, "test")


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("4. Qxf7# 1-0", "4. Qxa8 1-0", "5: illegal san: 'Qxa8' in r1bqkb1r"),
        ("4. Qxf7# 1-0", "4. -- 1-0", "6: illegal move 0000 in 'r1bqkb1r"),
        (
            "8/P6k/8/8/8/8/8/K7 w",
            "8/P6k w",
            "15: expected 8 rows in position part of fen: '8/P6k'. Fix or remove it.",
        ),
        (
            "8/P6k/8/8/8/8/8/K7 w",
            "8/P6k/8/8/8/8/8/KK6 w",
            "15: '8/P6k/8/8/8/8/8/KK6 w - - 0 50' is no position (too_",
        ),
        (
            '[SetUp "1"]',
            '[Variant "Atomic"]',
            "15: a game of another variant; this task plays standard chess. Fix or",
        ),
        ('[SetUp "1"]', '[Variant "Chess960"]', "15: a game of another variant"),
        (
            '[SetUp "1"]',
            '[Variant "Made up"]',
            "15: unsupported variant: Made up. Fix or remove it.",
        ),
    ],
)
def test_a_broken_game_is_named_by_file_and_line(tmp_path, old, new, text):
    path = tmp_path / "games.pgn"
    path.write_text(PGN.replace(old, new))
    assert old not in path.read_text()
    assert error(make, path=str(path)).startswith(
        f"task.path={str(path)!r}: the game up to line {text}"
    )


# --- errors of settings


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {"test_path": "a.csv"},
            "task.test_path='a.csv' has no effect without task.path. Give it too.",
        ),
        (
            {"path": "a.txt"},
            "task.path='a.txt' does not exist; tried ",
        ),
        ({"path": "no.csv"}, "task.path='no.csv' does not exist; tried "),
        ({"share_right": -1}, "task.share_right=-1 is too small. Give a value of at least 0."),
        (
            {"template": "{fen}"},
            "task.template={fen} does not hold {move}. Add it.",
        ),
        (
            {"weights": {"exakt": 1}},
            "task.weights.exakt is not a component. Components: exact, fields, valid, levenshtein.",
        ),
        (
            {"weights": {"exact": 0}},
            "task.weights are all 0. Give one component a weight above 0.",
        ),
        (
            {"weights": {"exact": -1}},
            "task.weights.exact=-1 is too small. Give a value of at least 0.",
        ),
        (
            {"plies": 1},
            (
                "task.positions and task.test_positions ask for 350 positions, but 2000 random"
                " games of task.plies=1 brought none beside 20. Ask for fewer, or raise task.plies."
            ),
        ),
    ],
)
def test_setting_errors(changed, text):
    assert error(make, **changed).startswith(text)


def test_a_file_without_columns_or_rows(tmp_path):
    (tmp_path / "a.csv").write_text("FEN,Move\nx,y\n")
    path = str(tmp_path / "a.csv")
    assert (
        error(make, path=path)
        == f"task.path={path!r}: line 2 has no column 'Moves'. Columns there: FEN, Move."
    )
    few = table(tmp_path, f"1,{START},e2e4")
    assert (
        error(make, path=few)
        == f"task.path={few!r} leaves 1 train and 0 test rows; 0 train rows also stand"
        " in the test rows. Give more rows."
    )


def test_a_position_of_chess960_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    fen = "nrkbrqbn/pppppppp/8/8/8/8/PPPPPPPP/NRKBRQBN w EBeb - 0 1"
    path.write_text(f"FEN,Moves\n{fen},e2e4\n")
    with pytest.raises(ConfigError, match=r"line 2: .*castling rights of Chess960"):
        make(path=str(path))


def test_puzzles_as_lichess_packs_them(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    moves = f"1,{START},e2e4 c7c5 g1f3 d7d6 d2d4 c5d4"
    plain = Path(table(tmp_path, GOOD, moves, name="puzzles.csv"))
    packed = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(packed, "zstd") as file:
        file.write(plain.read_bytes())
    # zstd may write a file in several parts
    both = packed.getvalue().to_pybytes()
    (tmp_path / "puzzles.csv.zst").write_bytes(both)
    one, other = (make(path=str(plain)), make(path=f"{plain}.zst"))
    assert one.examples("train") == other.examples("train")
