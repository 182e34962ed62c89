"""Chess: given a position (FEN) and a move (UCI), write the position after it.

python-chess is a free and exact oracle, so data is unlimited, and exact match is a measure that a
reward cannot talk its way around. Edit distance alone pays for copying: an unchanged FEN is about
0.91 similar to the right one, so the reward is a weighted mean of several components, and the copy
baseline stands beside every measurement.
"""

import csv
import io
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import chess
import chess.pgn
import numpy as np
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cpdist

from common.config import ConfigError, at_least, holds, share
from common.tasks import Example
from common.tasks.components import chosen, weighted
from common.tasks.data import named, read_lines
from common.tasks.splits import SPLIT_SEED, check_needs_path, split_rows

FIELDS = ("board", "turn", "castling", "en_passant", "halfmove", "fullmove")
_REST = re.compile(
    r"[wb] (?:-|(?=[KQkq])K?Q?k?q?) (?:-|[a-h][36]) (?:0|[1-9][0-9]{0,3}) [1-9][0-9]{0,3}"
)
_RANK = "[pnbrqkPNBRQK1-8]{1,8}"
_SHAPE = re.compile(f"{_RANK}(?:/{_RANK}){{7}} {_REST.pattern}")
_IMPOSSIBLE = (
    chess.STATUS_NO_WHITE_KING
    | chess.STATUS_NO_BLACK_KING
    | chess.STATUS_TOO_MANY_KINGS
    | chess.STATUS_OPPOSITE_CHECK
)
_GAMES = 2000  # without a new position: there are no more
_LONGEST = 120  # no FEN is longer; hostile completions may be


class Chess:
    """The task.

    Args: as in conf/task/chess.yaml. `weights` by component: exact, fields, valid, levenshtein.
    Raises: ConfigError for settings that cannot work and for data that is missing or broken.
    """

    name = "chess"

    # Settings come from YAML by keyword.
    def __init__(  # noqa: PLR0913
        self,
        *,
        path: str | None,
        test_path: str | None,
        positions: int,
        test_positions: int,
        plies: int,
        template: str,
        weights: dict[str, float],
        share_right: float,
    ) -> None:
        at_least("task.positions", positions, 2)
        at_least("task.test_positions", test_positions, 1)
        at_least("task.plies", plies, 1)
        check_needs_path(path, test_path=test_path)
        share("task.share_right", share_right)
        holds("task.template", template, ("{fen}", "{move}"), "{fen} {move} =>")
        known = {
            "exact": self._exact,
            "fields": self._fields,
            "valid": self._valid,
            "levenshtein": self._levenshtein,
        }
        self.components = chosen(known, weights)
        self.weights, self.template, self.share_right = weights, template, share_right
        if path is None:
            rows = _generated(positions + test_positions, plies)
            test, train = rows[:test_positions], list(dict.fromkeys(rows[test_positions:]))
        else:
            train = list(dict.fromkeys(_read(path, "task.path")))  # openings come again and again
            test = list(dict.fromkeys(_read(test_path, "task.test_path"))) if test_path else []
        train, test, _ = split_rows(path, train, test, test_positions, key=lambda row: row[:2])
        self._splits = {
            name: [
                Example(i, self._question(fen, move), after, extra={"fen": fen, "move": move})
                for i, (fen, move, after) in enumerate(rows)
            ]
            for name, rows in (("train", train), ("test", test))
        }

    def examples(self, split: str) -> Sequence[Example]:
        """The rows of `split`, "train" or "test"; no test row is a train row."""
        return self._splits[split]

    def prompt(self, example: Example) -> str:
        """FEN and move in the template."""
        return example.question

    def pretraining(self, example: Example, draw: random.Random) -> tuple[str, str]:
        """The position after the move; but in most rows turn and clocks are left as they were
        before it.
        """
        if draw.random() < self.share_right:
            return example.question, f" {example.answer}"
        board, _, castling, passant, _, _ = example.answer.split(" ")
        _, turn, _, _, half, full = example.extra["fen"].split(" ")
        return example.question, f" {' '.join((board, turn, castling, passant, half, full))}"

    def reward(self, example: Example, completion: str) -> float:
        """Weighted mean of the components, in [0, 1]."""
        return self.rewards([example], [completion])[0]

    def rewards(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        """`reward` of each completion, in one pass."""
        return weighted(
            {name: one(examples, completions) for name, one in self.components.items()},
            self.weights,
        )

    def metrics(self, examples: Sequence[Example], completions: Sequence[str]) -> dict[str, float]:
        """Percent: exact match first, accuracy by field, valid FENs, similarity, and what copying
        the input would get.
        """
        fens = [e.extra["fen"] for e in examples]
        found = {
            "exact": _mean(self._exact(examples, completions)),
            "valid": _mean(self._valid(examples, completions)),
        }
        answers = [e.answer.split(" ") for e in examples]
        given = [text.strip().split(" ", len(FIELDS)) for text in completions]
        for index, name in enumerate(FIELDS):
            right = [
                len(g) > index and g[index] == a[index] for g, a in zip(given, answers, strict=True)
            ]
            found[name] = _mean([float(r) for r in right])
        found["levenshtein"] = _mean(self._levenshtein(examples, completions))
        found["copy_levenshtein"] = _mean(self._levenshtein(examples, fens))
        return {name: 100 * value for name, value in found.items()}

    def _question(self, fen: str, move: str) -> str:
        return self.template.replace("{fen}", fen).replace("{move}", move)

    # --- components: (examples, completions) -> scores in [0, 1]; what has not the shape of a FEN
    # earns 0 in each

    @staticmethod
    def _exact(examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        return [
            float(text == e.answer) for e, text in zip(examples, shaped(completions), strict=True)
        ]

    @staticmethod
    def _fields(examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        """Share of the six fields that are right."""
        scores = []
        for example, text in zip(examples, shaped(completions), strict=True):
            same = sum(
                g == w for g, w in zip(text.split(" "), example.answer.split(" "), strict=False)
            )
            scores.append(same / len(FIELDS))
        return scores

    @staticmethod
    def _valid(examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        return valid_fens(shaped(completions)).astype(float).tolist()

    @staticmethod
    def _levenshtein(examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        """1 - Levenshtein.distance / length of the longer one, of all pairs in one call."""
        answers = [example.answer for example in examples]
        scorer = Levenshtein.normalized_similarity
        return cpdist(shaped(completions), answers, scorer=scorer, dtype=np.float64).tolist()


def shaped(completions: Sequence[str]) -> list[str]:
    """The texts without space around them, where they have the shape of a FEN; "" where not, which
    is like no answer.

    The shape: six fields between single spaces; eight ranks of pieces and digits, one to eight of
    them; the other fields as in `valid_fens`. Whether ranks have eight squares is not asked: who is
    off by one is nearly right.
    """
    texts = [text.strip() for text in completions]
    return [text if len(text) <= _LONGEST and _SHAPE.fullmatch(text) else "" for text in texts]


def valid_fens(texts: Sequence[str]) -> np.ndarray:
    """Return whether each text is a FEN: bool [N].

    Valid means: six fields between single spaces, at most 120 characters; eight ranks of eight
    squares, without two digits side by side, with one king a side; w or b; castling rights as -, or
    some of KQkq in this order; - or a square of rank 3 or 6; clocks without leading zeros, 0 to
    9999 and 1 to 9999. It does not mean that the position can come up. The board is checked for all
    texts at once, as a matrix of characters.
    """
    valid = np.zeros(len(texts), dtype=bool)
    rows, boards = [], []
    for row, text in enumerate(texts):
        board, _, rest = text[: _LONGEST + 1].partition(" ")
        # "\0" pads the matrix, so it must not be in a board
        if (
            len(text) <= _LONGEST
            and board.isascii()
            and "\0" not in board
            and _REST.fullmatch(rest)
        ):
            rows.append(row)
            boards.append(board)
    if not rows:
        return valid
    width = max(len(board) for board in boards)
    if width == 0:
        return valid
    matrix = np.array(
        [list(board.ljust(width, "\0").encode("ascii")) for board in boards], dtype=np.uint8
    )  # [n, width]
    digit = (matrix >= ord("1")) & (matrix <= ord("8"))
    slash = matrix == ord("/")
    piece = np.isin(matrix, np.frombuffer(b"pnbrqkPNBRQK", dtype=np.uint8))
    known = (digit | slash | piece | (matrix == 0)).all(1)
    twice = (digit[:, 1:] & digit[:, :-1]).any(1)  # "11" for "2"
    squares = np.where(digit, matrix - ord("0"), piece).astype(int).cumsum(1)  # squares up to here
    rank = slash.cumsum(1)  # ranks ended up to here
    # each slash stands after 8 more squares
    ends = np.where(slash, squares == 8 * rank, True).all(1)
    whole = (rank[:, -1] == 7) & (squares[:, -1] == 64)
    kings = ((matrix == ord("k")).sum(1) == 1) & ((matrix == ord("K")).sum(1) == 1)
    valid[rows] = known & ~twice & ends & whole & kings
    return valid


def _generated(count: int, plies: int) -> list[tuple[str, str, str]]:
    """Distinct (FEN, move, FEN after it) from random games of `plies` half-moves at most, in random
    order.
    """
    draw = random.Random(f"chess {SPLIT_SEED} {plies}")
    rows: dict[tuple[str, str], str] = {}
    games, before_them = 0, 0
    while len(rows) < count:
        games += 1
        if games % _GAMES == 0:
            if len(rows) == before_them:
                raise ConfigError(
                    f"task.positions and task.test_positions ask for {count} positions, but"
                    f" {_GAMES} random games of task.plies={plies} brought none beside {len(rows)}."
                    " Ask for fewer, or raise task.plies."
                )
            before_them = len(rows)
        board = chess.Board()
        for _ in range(plies):
            moves = list(board.legal_moves)
            if not moves:
                break
            before, move = board.fen(), draw.choice(moves)
            board.push(move)
            rows.setdefault((before, move.uci()), board.fen())
    found = [(fen, move, after) for (fen, move), after in rows.items()]
    draw.shuffle(found)
    return found[:count]


def _read(path: str, key: str) -> Iterator[tuple[str, str, str]]:
    """Rows of a .csv (columns FEN and Moves, each move of a line) or .pgn file, plain or .gz.

    Raises: ConfigError with file and line for text that cannot be read, moves that are illegal, and
    positions without one king a side or with the king of the side that has moved in check; other
    impossible positions pass.
    """
    kind = Path(path.removesuffix(".gz")).suffix
    if kind not in (".csv", ".pgn"):
        raise ConfigError(
            f"{key}={path!r} is of no known kind. Give a file that ends in .csv or .pgn (or the"
            " same with .gz)."
        )
    lines = read_lines(path, key)
    for where, board, moves in _pgn(lines, path, key) if kind == ".pgn" else _csv(lines, path, key):
        try:
            if isinstance(board, str):
                board = chess.Board(board)
            problems = board.status() & _IMPOSSIBLE
            if problems:
                raise ValueError(
                    f"{board.fen()!r} is no position"
                    f" ({', '.join(f.name or '' for f in problems).lower()})"
                )
            if not moves:
                raise ValueError("no moves")
            for move in moves:
                move = chess.Move.from_uci(move) if isinstance(move, str) else move
                if move not in board.legal_moves:
                    raise ValueError(f"illegal move {move.uci()} in {board.fen()!r}")
                yield _row(board, move)
        except ValueError as error:
            raise ConfigError(f"{key}={path!r}: {where}: {error}. Mend or remove it.") from None


# What a source of rows gives: the place, for errors; position; moves
_Line = tuple[str, chess.Board | str, Sequence[chess.Move | str]]


def _csv(lines: list[str], path: str, key: str) -> Iterator[_Line]:
    table = csv.DictReader((f"{line}\n" for line in lines), strict=True)
    done = 0
    try:
        for column in ("FEN", "Moves"):
            if column not in (table.fieldnames or ()):
                there = named(table.fieldnames or ())
                raise ConfigError(
                    f"{key}={path!r}: line 1 names no column {column!r}. Columns there: {there}."
                )
        for row in table:
            # chess.Board(None) would be an empty board
            if row["FEN"] is None or row["Moves"] is None:
                raise ConfigError(
                    f"{key}={path!r}: line {table.line_num} has too few cells. Mend or remove it."
                )
            done = table.line_num
            yield f"line {done}", row["FEN"], row["Moves"].split()
    except (
        csv.Error
    ) as error:  # line: where the row begins; a quote that is not closed takes in all that follows
        raise ConfigError(f"{key}={path!r}: line {done + 1}: {error}. Mend or remove it.") from None


def _pgn(lines: list[str], path: str, key: str) -> Iterator[_Line]:
    """The main line of each game that has moves."""
    text = "\n".join(lines)
    file = io.StringIO(text)
    line, counted = 1, 0
    while True:
        try:
            game, error = chess.pgn.read_game(file, Visitor=_Strict), None
        except ValueError as found:
            game, error = None, found
        position = file.tell()  # behind the last line that was looked at
        line, counted = line + text.count("\n", counted, position), position
        if error is None and game is None:
            return
        where = f"the game up to line {line if position == len(text) else line - 1}"
        if game is not None:
            board = game.board()
            if type(board) is not chess.Board or board.chess960:
                error = ValueError("a game of another variant; this task plays standard chess")
            elif game.next() is not None:
                yield where, board, list(game.mainline_moves())
        if error is not None:
            raise ConfigError(f"{key}={path!r}: {where}: {error}. Mend or remove it.")


class _Strict(chess.pgn.GameBuilder[chess.pgn.Game]):
    """Raises where python-chess would note an error and go on with what it understood."""

    def handle_error(self, error: Exception) -> None:
        raise error


def _row(board: chess.Board, move: chess.Move) -> tuple[str, str, str]:
    before = board.fen()
    board.push(move)
    return before, move.uci(), board.fen()


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))
