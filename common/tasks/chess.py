"""Chess: given a position (FEN) and a move (UCI), write the position after the move.

python-chess is a free and exact oracle, so data is unlimited, and exact match is a measure that the
reward cannot be hacked for. Edit distance alone rewards copying: an unchanged FEN is about 0.91
similar to the right one. So the reward is a weighted mean of several components, and every
evaluation reports the copy baseline.
"""

import io
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import chess
import chess.pgn
import numpy as np
from annotated_types import Ge
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cpdist

from common.config import ConfigError, Count, Nonnegative, Share, Whole, holds
from common.task import Example
from common.tasks.base import SPLIT_SEED, Chat, Weighted, percent
from common.tasks.data import Incomplete, IncompleteError, Reading, Row, named

FIELDS = ("board", "turn", "castling", "en_passant", "halfmove", "fullmove")
_RANK = "[pnbrqkPNBRQK1-8]{1,8}"
_SHAPE = re.compile(
    rf"{_RANK}(?:/{_RANK}){{7}} [wb] (?:-|(?=[KQkq])K?Q?k?q?) (?:-|[a-h][36])"
    r" (?:0|[1-9][0-9]{0,3}) [1-9][0-9]{0,3}"
)
_IMPOSSIBLE = (
    chess.STATUS_NO_WHITE_KING
    | chess.STATUS_NO_BLACK_KING
    | chess.STATUS_TOO_MANY_KINGS
    | chess.STATUS_OPPOSITE_CHECK
)
_GAMES = 2000  # after this many games without a new position there are no more
_LONGEST = 120  # no FEN is longer; hostile completions may be


@dataclass(kw_only=True, eq=False)
class Chess(Weighted):
    """The task, with the settings of conf/task/chess.yaml."""

    name = "chess"
    generated = ("positions", "plies")
    of_files = ("columns", "format")
    held_out = "test_positions"

    path: str | None
    test_path: str | None
    columns: list[str] | None
    format: dict[str, Any]
    incomplete: Incomplete
    positions: Annotated[Whole, Ge(2)]
    test_positions: Count
    plies: Count
    template: Annotated[str, holds("{fen}", "{move}")]
    chat: Chat = "auto"
    system: str = ""
    weights: dict[str, Nonnegative]
    share_right: Share

    def __post_init__(self) -> None:
        self.check_system()
        self.reading = Reading(self.columns, self.format, self.incomplete)
        self.weigh(
            exact=self._exact,
            fields=self._fields,
            valid=self._valid,
            levenshtein=self._levenshtein,
        )
        self.fill(
            lambda count: list(self._make(_generated(count, self.plies))),
            lambda path, key: self._make(_read(path, key, self.reading)),
            self.positions,
            self.test_positions,
            lambda row: (row.extra["fen"], row.extra["move"]),
        )

    def _make(self, rows: Iterable[tuple[str, str, str]]) -> Iterator[Example]:
        for fen, move, after in rows:
            text = self.template.replace("{fen}", fen).replace("{move}", move)
            yield Example(0, text, after, {"fen": fen, "move": move})

    def pretraining(self, example: Example, draw: random.Random) -> tuple[str, str]:
        """Return the position after the move; in most rows with the turn and clocks from before the
        move.
        """
        if draw.random() < self.share_right:
            return example.question, f" {example.answer}"
        board, _, castling, passant, _, _ = example.answer.split(" ")
        _, turn, _, _, half, full = example.extra["fen"].split(" ")
        return example.question, f" {' '.join((board, turn, castling, passant, half, full))}"

    def metrics(self, examples: Sequence[Example], completions: Sequence[str]) -> dict[str, float]:
        """Return percentages: exact match, valid FENs, each field, similarity, and the similarity
        of copying the input.
        """
        answers = [e.answer.split(" ") for e in examples]
        parts = [text.strip().split(" ", len(FIELDS)) for text in completions]
        scores = {
            "exact": self._exact(examples, completions),
            "valid": self._valid(examples, completions),
        }
        for i, name in enumerate(FIELDS):
            pairs = zip(parts, answers, strict=True)
            scores[name] = [float(said[i : i + 1] == right[i : i + 1]) for said, right in pairs]
        scores["levenshtein"] = self._levenshtein(examples, completions)
        fens = [e.extra["fen"] for e in examples]
        scores["copy_levenshtein"] = self._levenshtein(examples, fens)
        return {name: percent(values) for name, values in scores.items()}

    # --- components; a text without the shape of a FEN earns 0 in each

    @staticmethod
    def _exact(examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        return [
            float(text == e.answer) for e, text in zip(examples, shaped(completions), strict=True)
        ]

    @staticmethod
    def _fields(examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        """Return the share of the six fields that are right."""
        pairs = zip(shaped(completions), examples, strict=True)
        parts = ((text.split(" "), example.answer.split(" ")) for text, example in pairs)
        return [sum(map(str.__eq__, said, right)) / len(FIELDS) for said, right in parts]

    @staticmethod
    def _valid(examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        return valid_fens(shaped(completions)).astype(float).tolist()

    @staticmethod
    def _levenshtein(examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        """Return 1 - Levenshtein.distance / length of the longer text, for all pairs in
        one call.
        """
        answers = [example.answer for example in examples]
        scorer = Levenshtein.normalized_similarity
        return cpdist(shaped(completions), answers, scorer=scorer, dtype=np.float64).tolist()


def shaped(completions: Sequence[str]) -> list[str]:
    """Return the stripped texts that have the shape of a FEN, and "" for others.

    The shape: six fields between single spaces; eight ranks of one to eight pieces and digits; the
    other fields as in `valid_fens`. A rank with a wrong number of squares keeps the shape.
    """
    texts = [text.strip() for text in completions]
    return [text if len(text) <= _LONGEST and _SHAPE.fullmatch(text) else "" for text in texts]


def valid_fens(texts: Sequence[str]) -> np.ndarray:
    """Return whether each text is a valid FEN: bool [N].

    Valid means: six fields between single spaces; eight ranks of eight squares, without two
    adjacent digits, with one king per side; w or b; - or some of KQkq in this order; - or a square
    of rank 3 or 6; clocks without leading zeros, up to 9999. The position need not be reachable.
    All boards are checked at once, as a matrix of characters.
    """
    valid = np.array([_SHAPE.fullmatch(text) is not None for text in texts], dtype=bool)
    boards = [text.partition(" ")[0] for text, fits in zip(texts, valid, strict=True) if fits]
    matrix = np.array(boards, dtype="S71").view(np.uint8).reshape(-1, 71)  # zeros fill it up
    digit, slash = (matrix >= ord("1")) & (matrix <= ord("8")), matrix == ord("/")
    twice = (digit[:, 1:] & digit[:, :-1]).any(1)  # "11" for "2"
    squares = np.where(digit, matrix - ord("0"), matrix > ord("8")).cumsum(1)  # squares up to here
    # each slash must follow 8 more squares
    ends = (~slash | (squares == 8 * slash.cumsum(1))).all(1)
    kings = ((matrix == ord("k")).sum(1) == 1) & ((matrix == ord("K")).sum(1) == 1)
    valid[valid] = ~twice & ends & (squares[:, -1] == 64) & kings
    return valid


def _generated(count: int, plies: int) -> list[tuple[str, str, str]]:
    """Return `count` distinct (FEN, move, FEN after the move) from random games, in
    random order.
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
    positions = [(fen, move, after) for (fen, move), after in rows.items()]
    draw.shuffle(positions)
    return positions[:count]


def _read(path: str, key: str, reading: Reading) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of a table (columns FEN and Moves, one row per move of a line) or of a .pgn
    file.

    Raises: ConfigError with file and line for text that cannot be read, for illegal moves, and for
    positions without one king per side or with the side that has moved in check.
    """
    games = reading.source(path, key).suffix() == ".pgn"
    for where, board, moves in (_pgn if games else _table)(path, key, reading):
        try:
            written = board if isinstance(board, str) else board.fen()
            if isinstance(board, str):
                board = chess.Board(board)
            if board.has_chess960_castling_rights():
                raise ValueError(
                    f"{written!r} has castling rights of Chess960; this task plays standard"
                    " chess, where kings castle from e1 and e8 with rooks of the corners"
                )
            if problems := board.status() & _IMPOSSIBLE:
                names = ", ".join(problem.name or "" for problem in problems).lower()
                raise ValueError(f"{board.fen()!r} is no position ({names})")
            if not moves:
                raise ValueError("no moves")
            for move in moves:
                move = chess.Move.from_uci(move) if isinstance(move, str) else move
                if move not in board.legal_moves:
                    raise ValueError(f"illegal move {move.uci()} in {board.fen()!r}")
                before = board.fen()
                board.push(move)
                yield before, move.uci(), board.fen()
        except ValueError as error:
            raise ConfigError(f"{key}={path!r}: {where}: {error}. Fix or remove it.") from None


# A line of moves: its place, for errors; the position; the moves
_Line = tuple[str, chess.Board | str, Sequence[chess.Move | str]]


def _table(path: str, key: str, reading: Reading) -> list[_Line]:
    def take(row: Row) -> _Line:
        where = row.where.removeprefix(f"{path!r} ")
        for column in ("FEN", "Moves"):
            if column not in row.whole:
                raise ConfigError(
                    f"{key}={path!r}: {where} has no column {column!r}. Columns there:"
                    f" {named(row.whole)}.{row.hint}"
                )
            if not row.whole[column]:
                empty = "empty fen" if column == "FEN" else "no moves"
                raise IncompleteError(f"{key}={path!r}: {where}: {empty}. Fix or remove it.")
        fen, moves = (row.text(column, "column") for column in ("FEN", "Moves"))
        return where, fen, moves.split()

    return reading.convert(reading.rows(path, key), take)


def _pgn(path: str, key: str, reading: Reading) -> Iterator[_Line]:
    """Yield the main line of each game that has moves."""
    text = "\n".join(reading.lines(path, key))
    file = io.StringIO(text)
    line, counted = 1, 0
    while True:
        try:
            game, error = chess.pgn.read_game(file, Visitor=_Strict), None
        except ValueError as found:
            game, error = None, found
        position = file.tell()  # after the last line that was read
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
            raise ConfigError(f"{key}={path!r}: {where}: {error}. Fix or remove it.")


class _Strict(chess.pgn.GameBuilder[chess.pgn.Game]):
    """Raises errors that python-chess would record and skip."""

    def handle_error(self, error: Exception) -> None:
        raise error
