"""Questions that a tool answers: a calculator, a search, a database. They have the text steps of
Gymnasium (plugins/environments/task.py), and a small model can learn to use the tool.

The text of a model reaches a tool as data, or in a language that can do no harm.
"""

import random
import re
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing

from common.task import Messages
from common.tasks import evaluate
from plugins.environments.games import Outcome, check_settings, turn

CHARACTERS = 200  # of a reply, and of a search


class Questions:
    """A question, with a tool that can be called at most `calls` times. The first text that is not
    a call is the answer, and earns 1 if its last word is right.
    """

    # The share of the games of `teach` that call the tool; the others guess. The longer a game is,
    # the less its first token counts in pre-training: a model calls in a third of its samples.
    CALLS = 0.7
    guesses: Sequence[object] = range(100, 1000)  # answers of those who do not ask the tool
    answer = call = ""  # and the call whose reply holds the answer
    ask: Callable[[random.Random], str]  # returns a question, and notes its answer and its call
    reply: Callable[[str], str | None]  # returns what the tool says; None where a text is no call
    # Shown beside the reward: whether the tool was called.
    components: dict[str, float] = {"called": 0.0}  # noqa: RUF012 (each game sets its own)

    def __init__(self, calls: int) -> None:
        self.calls = self.left = calls

    def reset(self, seed: int) -> tuple[str, dict[str, str]]:
        """Ask a question."""
        self.left, self.components = self.calls, {"called": 0.0}
        return self.ask(random.Random(f"{type(self).__name__} {seed}")), {}

    def step(self, text: str) -> Outcome:
        """Call the tool, or take the text as the answer."""
        reply = self.reply(text.strip())
        if reply is None:
            plain = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text.casefold())  # 1,234 is one word
            words = re.findall(r"-?\d+(?:[./]\d+)*(?![^\W_])|-?\w+", plain)  # 1.158 is one, too
            last = re.sub(r"\.0+$", "", words[-1].strip("_")) if words else ""
            return "", float(last == self.answer.casefold()), True, False, {}
        self.left -= 1
        self.components = {"called": 1.0}
        return reply[:CHARACTERS], 0.0, self.left < 0, False, {}

    def teach(self, seed: int, draw: random.Random) -> Messages:
        """Return a whole game in which the tool is called, or the answer is guessed."""
        question, _ = self.reset(seed)
        if draw.random() > self.CALLS:
            return turn(question, f"I guess {draw.choice(self.guesses)}")
        return turn(question, self.call) + turn(self.step(self.call)[0], self.answer)


class Calculator(Questions):
    """Add `numbers` whole numbers of `digits` digits."""

    CALLS = 0.5

    def __init__(self, numbers: int = 3, digits: int = 2, calls: int = 2) -> None:
        check_settings(numbers=(numbers, 2, 10), digits=(digits, 1, 6), calls=(calls, 1, 99))
        super().__init__(calls)
        self.numbers, self.range = numbers, range(10 ** (digits - 1), 10**digits)

    def ask(self, draw: random.Random) -> str:
        """Ask for a sum."""
        text = "+".join(str(draw.choice(self.range)) for _ in range(self.numbers))
        self.answer, self.call = str(evaluate(text).value), f"={text}"
        return f"{text}? Answer, or ask: =EXPRESSION"

    def reply(self, text: str) -> str | None:
        """Return the exact value, or the reason that there is none."""
        if not text.startswith("="):
            return None
        result = evaluate(text[1:])
        return result.problem or str(result.value)


# Names of equal length, so that the tiny model copies them from one place: it learns that first.
FIRST = ("Ada", "Ben", "Dan", "Eva", "Gus", "Ian", "Ivy", "Jon", "Kim", "Lea", "Max", "Ned")
LAST = ("Abel", "Cole", "Dorn", "Falk", "Gold", "Hale", "Ives", "Jung", "Kern", "Moss", "Nash")
TOWNS = ("Bari", "Bonn", "Cork", "Graz", "Kiel", "Lyon", "Nice", "Oslo", "Pisa", "Riga")
TRADES = ("actor", "baker", "clerk", "judge", "mason", "miner", "nurse", "pilot", "smith", "tutor")


class Search(Questions):
    """Answer a question about one of `people` people. Each has a passage in a collection, which is
    different in every game, so that nothing can be memorised. A search returns the passage with the
    highest BM25 (Robertson and Zaragoza, 2009), by SQLite's FTS5.
    """

    guesses = TOWNS + TRADES

    def __init__(self, people: int = 40, calls: int = 3) -> None:
        check_settings(people=(people, 1, len(FIRST) * len(LAST)), calls=(calls, 1, 99))
        super().__init__(calls)
        self.people, self.passages = people, [("",)]

    def ask(self, draw: random.Random) -> str:
        """Describe the people, and ask for the town or the trade of one of them."""
        names = draw.sample([f"{first} {last}" for first in FIRST for last in LAST], self.people)
        people = [(name, draw.choice(TOWNS), draw.choice(TRADES)) for name in names]
        self.passages = [(f"{name} of {town} is a {trade}",) for name, town, trade in people]
        name, town, trade = draw.choice(people)
        asked, self.answer = draw.choice([("town", town), ("trade", trade)])
        self.call = f"?{name}"
        return f"{asked} of {name}? Answer, or ask: ?WORDS"

    def reply(self, text: str) -> str | None:
        """Return the passage that matches the words best."""
        if not text.startswith("?"):
            return None
        # in quotes, so that nothing of FTS5's own language is left
        words = " OR ".join(f'"{word}"' for word in re.findall(r"\w+", text[:CHARACTERS])) or '""'
        with closing(sqlite3.connect(":memory:")) as base:
            base.execute("CREATE VIRTUAL TABLE passages USING fts5(text)")
            base.executemany("INSERT INTO passages VALUES (?)", self.passages)
            query = "SELECT text FROM passages(?) ORDER BY bm25(passages), rowid LIMIT 1"
            return (base.execute(query, [words]).fetchone() or ["nothing"])[0]


FUNCTIONS = {"count", "sum", "total", "avg", "min", "max", "abs", "round", "length", "upper"}
OPERATIONS = 100_000  # of SQLite's machine, for a query: some milliseconds
BYTES = 1000  # of a query, of a text, and of a row
MOST_ROWS = 10  # of a reply


class Sql(Questions):
    """Answer a question about a table of `rows` sales, which a query can read but not change. The
    call copies a number from the question, as the answer copies one from the reply.
    """

    def __init__(self, rows: int = 30, calls: int = 3) -> None:
        check_settings(rows=(rows, 1, 900), calls=(calls, 1, 99))
        super().__init__(calls)
        self.rows, self.sales = rows, [(0, 0)]

    def ask(self, draw: random.Random) -> str:
        """Ask for the price of an item."""
        items = draw.sample(range(100, 1000), self.rows)
        self.sales = [(item, draw.randint(100, 999)) for item in items]
        item, price = draw.choice(self.sales)
        self.call, self.answer = f"SELECT price FROM sales WHERE item={item}", str(price)
        return f"price of {item}? Answer, or ask sales(item, price): SELECT ..."

    def reply(self, text: str) -> str | None:
        """Return the rows of a query, or its error."""
        if text[:6].upper() != "SELECT":
            return None
        with closing(sqlite3.connect(":memory:")) as base:
            base.execute("CREATE TABLE sales (item INTEGER, price INTEGER)")
            base.executemany("INSERT INTO sales VALUES (?, ?)", self.sales)
            for limit in (sqlite3.SQLITE_LIMIT_LENGTH, sqlite3.SQLITE_LIMIT_SQL_LENGTH):
                base.setlimit(limit, BYTES)
            base.set_authorizer(_only_reads)
            base.set_progress_handler(lambda: 1, OPERATIONS)  # its first call ends the query
            try:
                rows = base.execute(text).fetchmany(MOST_ROWS)
            except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
                return f"error: {error}"
        return "\n".join(", ".join(map(str, row)) for row in rows) or "no rows"


def _only_reads(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    """Tell SQLite whether a query may do this: read the table, or call a harmless function."""
    reads = action == sqlite3.SQLITE_SELECT or (action, first) == (sqlite3.SQLITE_READ, "sales")
    calls = action == sqlite3.SQLITE_FUNCTION and second in FUNCTIONS
    return sqlite3.SQLITE_OK if reads or calls else sqlite3.SQLITE_DENY
