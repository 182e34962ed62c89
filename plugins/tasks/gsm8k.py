"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168) and data in its form: word problems with a number as
answer.

A row has a question, and an answer that ends with a line `#### 42`. A completion earns 1 if its
final number equals that number exactly (as fractions: 0.5 is 1/2, and 1,000 is 1000.00), else 0;
the steps before it do not count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from common.config import ConfigError, holds, one_of
from common.task import Example, Messages
from common.tasks import (
    Chat,
    Incomplete,
    IncompleteError,
    Reading,
    Row,
    Rows,
    equality,
    names_file,
    numbers,
    path_key,
    percent,
)


@dataclass(kw_only=True, eq=False)
class Gsm8k(Rows):
    """The task, with the settings of conf/task/gsm8k.yaml; `answer` is the final number as text."""

    name = "gsm8k"
    repeatable = True
    drawn = False  # files are often sorted

    path: str | None
    columns: list[str] | None
    format: dict[str, Any]
    incomplete: Incomplete
    template: Annotated[str, holds("{question}")]
    check: Annotated[str, one_of("numeric", "math_verify")]
    chat: Chat = "auto"
    system: str = ""

    def __post_init__(self) -> None:
        self.check_system()
        self.solutions: dict[str, str] = {}  # by question
        if self.path is None:
            raise ConfigError(
                "task.path is not set, and task=gsm8k has no data of its own. Give a folder that"
                " holds train.jsonl and test.jsonl, or the folder of the hub, or one file, with the"
                " fields question and answer: task.path=FOLDER."
            )
        if self.check == "math_verify":
            equality.math_verify()
        self.reading = Reading(self.columns, self.format, self.incomplete)
        train, test = self._read("train"), []
        if names_file(self.path):
            self.drawn = True
        else:
            test = self._read("test")
        held_out = min(1000, max(1, len(train) // 5))
        self.split(f"task.path={self.path!r}", train, test, held_out)

    def _read(self, split: str) -> list[Example]:
        """Return the rows of one split. Raises: ConfigError with file and line."""
        assert self.path is not None
        folder = Path(self.path).expanduser()
        # The configurations of the hub are main and socratic.
        config = "main" if (folder / "main").is_dir() or not folder.exists() else None
        rows = self.reading.rows(self.path, "task.path", config, split)
        return self.reading.convert(rows, self._example)

    def _example(self, row: Row) -> Example:
        question, text = row.text("question", "field").strip(), row.text("answer", "field")
        _, mark, last = text.rpartition(numbers.MARK)
        value = numbers.read(last)
        if not mark or value is None:
            raise IncompleteError(
                f"task.path={self.path!r}: the answer in {row.where} has no final line '####"
                f" NUMBER': {text[-60:]!r}. Fix or remove the row. For answers that are no single"
                " number use task=custom task.reward=math."
            )
        self.solutions[question] = text
        return Example(0, question, last.strip(), {"value": value})

    def prompt(self, example: Example) -> str | Messages:
        """Return the question in the template; with task.chat as a conversation."""
        return self.ask(self.template.replace("{question}", example.question))

    def solution(self, example: Example) -> str | None:
        """Return the worked solution of the row."""
        return self.solutions.get(example.question)

    def reward(self, example: Example, completion: str) -> float:
        """Return 1 if the final number is right, else 0."""
        said = numbers.find_answer(completion)
        if said is None:
            return 0.0
        value = numbers.read(said)
        if value is not None and value == example.extra["value"]:
            return 1.0
        return float(self.check == "math_verify" and equality.equal(example.answer, said))

    def answer(self, completion: str) -> str | None:
        """Return the final answer as written."""
        return numbers.find_answer(completion)

    path_key = staticmethod(path_key)  # the calculations on the way

    def metrics(self, examples: Sequence[Example], completions: Sequence[str]) -> dict[str, float]:
        """Return percentages of completions: right answers, an answer was found, the answer could
        not be read.
        """
        found = list(map(self.answer, completions))
        pairs = zip(completions, found, strict=True)
        return {
            "accuracy": percent(self.rewards(examples, completions)),
            "answer_rate": percent(answer is not None for answer in found),
            "unread": percent(numbers.is_unread(*pair) for pair in pairs),
        }
