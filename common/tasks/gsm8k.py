"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168) and data in its form: word problems whose answer is a
number.

A row has a question, and an answer that ends with a line `#### 42`. A completion earns 1 if its
final number equals that one exactly (as fractions: 0.5 is 1/2, and 1,000 is 1000.00), else 0; how
it got there is not looked at.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from common.config import ConfigError, holds, one_of
from common.tasks import Example, Messages, equality, numbers
from common.tasks.answers import path_key
from common.tasks.data import read_jsonl
from common.tasks.rows import Chat, Rows, percent


@dataclass(kw_only=True, eq=False)
class Gsm8k(Rows):
    """The task, with the settings of conf/task/gsm8k.yaml; `answer` is the final number as text."""

    name = "gsm8k"
    drawn = False  # files are often sorted

    path: str | None
    template: Annotated[str, holds("{question}")]
    check: Annotated[str, one_of("numeric", "math_verify")]
    chat: Chat = "auto"
    system: str = ""

    def __post_init__(self) -> None:
        self.check_system()
        if self.path is None:
            raise ConfigError(
                "task.path is not set, and task=gsm8k has no data of its own. Give a folder that"
                " holds train.jsonl and test.jsonl, plain or .gz, with the fields question and"
                " answer: task.path=FOLDER."
            )
        if self.check == "math_verify":
            equality.math_verify()
        train, test = _read(self.path, "train"), _read(self.path, "test")
        self.split(f"task.path={self.path!r}", train, test, 0)

    def prompt(self, example: Example) -> str | Messages:
        """Return the question in the template; with task.chat as a conversation."""
        return self.ask(self.template.replace("{question}", example.question))

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
        """Return percentages: right answers, completions in which an answer was found, and those
        whose answer could not be read.
        """
        found = list(map(self.answer, completions))
        pairs = zip(completions, found, strict=True)
        return {
            "accuracy": percent(self.rewards(examples, completions)),
            "answer_rate": percent(answer is not None for answer in found),
            "unread": percent(numbers.is_unread(*pair) for pair in pairs),
        }


def _read(path: str, split: str) -> list[Example]:
    """Return the rows of one split. Raises: ConfigError with file and line."""
    folder = Path(path).expanduser()
    files = [folder / f"{split}.jsonl", folder / f"{split}.jsonl.gz"]
    existing = [file for file in files if file.is_file()]
    if not existing:
        raise ConfigError(
            f"task.path={path!r} holds no {files[0].name} or {files[1].name}; tried"
            f" {folder.absolute()}. Give a folder with the train and the test rows."
        )
    rows = []
    for row in read_jsonl(str(existing[0]), "task.path"):
        question, text = row.text("question", "field").strip(), row.text("answer", "field")
        _, mark, last = text.rpartition(numbers.MARK)
        value = numbers.read(last)
        if not mark or value is None:
            raise ConfigError(
                f"task.path={path!r}: the answer in {row.where} has no final line '#### NUMBER':"
                f" {text[-60:]!r}. Fix or remove the row. For answers that are no single number use"
                " task=custom task.reward=math."
            )
        rows.append(Example(0, question, last.strip(), {"value": value}))
    return rows
