"""Class tasks: rows with a label, for algo=classify. Imports no torch.

topics and trajectories are generated from a seed; texts come from files and folders, read by
common.tasks.data.
"""

import logging
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import numpy as np
from annotated_types import Ge

from common.config import ConfigError, Nonnegative, one_of
from common.system import instantiate
from common.tasks import Reading, names_file

log = logging.getLogger("clutch")

SPLITS = ("train", "test")


@dataclass(frozen=True)
class Trajectory:
    """A path.

    Attributes:
        context: the states before the path, [C, S].
        states: the states of the path, [T, S].
        goal: its goal, [S].
    """

    context: np.ndarray
    states: np.ndarray
    goal: np.ndarray


@dataclass(frozen=True)
class Labelled:
    """One row of a class task.

    Attributes:
        value: a text or a `Trajectory`.
        label: the number of its class, from 0.
        place: its place in a file, for errors.
    """

    value: Any
    label: int
    place: str = ""


class ClassTask(Protocol):
    """The methods of a class task, which needs no base class; `name` is optional."""

    classes: list[str]  # names, by label

    def rows(self, split: str) -> Sequence[Labelled]:
        """Return the rows of "train" or "test" (never trained on): all texts or all trajectories,
        always in the same order.
        """
        ...


def made(node: dict[str, Any]) -> ClassTask:
    """Return the class task that a configuration names. Raises: ConfigError."""
    return instantiate("task", node, ("rows",), "ddp_bench/tasks.py")


# --- generated

# The words of each topic; a word of two topics does not determine the topic by itself.
WORDS = """
sport: match goal team coach season league score court referee stadium striker final training record
food: recipe oven salt butter kitchen dish season roast stock flour taste spice boil course
money: bank stock market interest price shares bond court record profit tax loan fund broker
travel: flight hotel beach ticket map bank course season luggage train island border museum match
weather: rain storm cloud wind forecast front record degrees snow humid sunny map boil thunder
"""
TOPICS = {name: words for name, words in (line.split(": ") for line in WORDS.strip().splitlines())}
TEMPLATES = (
    "we talked about the {} and the {} for a while",
    "nobody expected the {} after such a {}",
    "yesterday the {} was better than any {}",
    "they say a {} depends on the {}",
    "please tell me more of the {} , the {} and so on",
    "first came the {} , later the {}",
)


class Splits:
    """Rows that are generated or read in advance."""

    _splits: dict[str, list[Labelled]]

    def rows(self, split: str) -> Sequence[Labelled]:
        """Return the rows of a split."""
        return self._splits[split]


Rows = Annotated[int, Ge(10)]


class Topics(Splits):
    """Short texts made of templates, with several words of their topic and some of another one.

    In about one text of twenty both topics have the same weight, so that perfect accuracy is
    impossible.
    Args: rows, test_rows: the number of texts in each split.
    """

    name = "topics"

    def __init__(self, *, rows: Rows, test_rows: Rows) -> None:
        self.classes = list(TOPICS)
        draw, seen, rows_drawn = random.Random("topics"), set(), []
        while len(rows_drawn) < rows + test_rows:
            label = len(rows_drawn) % len(self.classes)
            text = self._draw_text(draw, label)
            if text not in seen:
                seen.add(text)
                rows_drawn.append(Labelled(text, label))
        self._splits = {"train": rows_drawn[:rows], "test": rows_drawn[rows:]}

    def _draw_text(self, draw: random.Random, label: int) -> str:
        of_topic = TOPICS[self.classes[label]].split()
        other = TOPICS[draw.choice([c for c in self.classes if c != self.classes[label]])].split()
        words = draw.sample(of_topic, draw.choice((2, 3, 3, 4)))
        words += draw.sample(other, draw.choice((0, 1, 1, 2)))
        draw.shuffle(words)
        parts = []
        while words:  # a template takes two words; the last one may be alone
            pair = [words.pop(), words.pop() if words else "thing"]
            parts.append(draw.choice(TEMPLATES).format(*pair))
        return " . ".join(parts)


class Trajectories(Splits):
    """Paths of a point in the plane; the class is the movement after the context: to the left, to
    the right, to a goal, straight.

    States are (x, y, velocity x, velocity y), with noise; lengths vary.
    Args:
        rows, test_rows: the number of paths in each split.
        longest: the most steps of a context and of a path.
        noise: the standard deviation of the noise.
    """

    name = "trajectories"

    def __init__(
        self, *, rows: Rows, test_rows: Rows, longest: Annotated[int, Ge(4)], noise: Nonnegative
    ) -> None:
        self.classes = ["left", "right", "to the goal", "straight"]
        paths = self._draw_paths(np.random.default_rng(0), rows + test_rows, longest, noise)
        self._splits = {"train": paths[:rows], "test": paths[rows:]}

    def _draw_paths(
        self, draw: np.random.Generator, rows: int, longest: int, noise: float
    ) -> list[Labelled]:
        labels = np.arange(rows) % 4
        lengths = draw.integers(longest // 4, longest + 1, (2, rows))
        place, goal = draw.normal(0, 1, (2, rows, 2))
        angle = draw.uniform(0, 2 * np.pi, rows)
        velocity = 0.05 * np.stack([np.cos(angle), np.sin(angle)], 1)
        turn = 0.05 * np.select([labels == 0, labels == 1], [1.0, -1.0], 0.0)
        rotation = np.stack([np.cos(turn), -np.sin(turn), np.sin(turn), np.cos(turn)], 1)
        rotation = rotation.reshape(rows, 2, 2)
        seen = np.empty((rows, 2 * longest, 4), np.float32)
        # a context of `longest` steps, of which the last ones are kept, and the path
        for step in range(2 * longest):
            if step >= longest:
                velocity = np.einsum("nij,nj->ni", rotation, velocity)
                towards = goal - place
                towards *= 0.05 / np.maximum(np.linalg.norm(towards, axis=1, keepdims=True), 1e-6)
                drawn = 0.9 * velocity + 0.1 * towards
                velocity = np.where((labels == 2)[:, None], drawn, velocity)
            place = place + velocity
            seen[:, step] = np.concatenate([place, 10 * velocity], 1)
        seen += noise * draw.normal(0, 1, seen.shape).astype(np.float32)
        goals = np.concatenate([goal, np.zeros_like(goal)], 1).astype(np.float32)
        paths = []
        for i, (before, after) in enumerate(lengths.T.tolist()):
            context, path = np.split(seen[i, longest - before : longest + after], [before])
            paths.append(Labelled(Trajectory(context, path, goals[i]), int(labels[i])))
        return paths


# --- from files


class TextFiles(Splits):
    """Texts with labels from files, or from a dataset of the hub. Train texts that are also test
    rows are dropped.

    Args:
        name: the name for reports.
        path: a folder with the rows of train and test, or an id for the `datasets` library.
        train, test: files in place of `path`.
        columns, format: the format of files, as in conf/task/custom.yaml.
        text_field: one field, or several separated by commas, which are joined by blanks.
        label_field: the field of the label: the name of a class, the beginning of one, or its
            number, counted from first_label.
        classes: the names of classes by number; None = those of the training rows, sorted.
        on_bad_row: error | skip.
    Raises: ConfigError for missing or invalid data, with file and line.
    """

    # Settings come from YAML by keyword.
    def __init__(
        self,
        *,
        name: str,
        text_field: str,
        label_field: str,
        on_bad_row: Annotated[str, one_of("error", "skip")],
        classes: list[str] | None,
        first_label: int,
        path: str | None,
        train: str | None,
        test: str | None,
        columns: list[str] | None = None,
        format: dict[str, Any] | None = None,
    ) -> None:
        self.name, self.path, self.skip = name, path, on_bad_row == "skip"
        self.text_fields = [field.strip() for field in text_field.split(",")]
        self.label_field = label_field
        self.columns, self.format = columns, format
        files = {"train": train, "test": test}
        chosen = [f"task.{split}={file}" for split, file in files.items() if file is not None]
        if path is not None:
            for setting in chosen:
                raise ConfigError(f"{setting} has no effect with task.path={path}. Give one.")
            if names_file(path):
                raise ConfigError(
                    f"task.path={path!r} is a file. Give a folder with the rows of train and test,"
                    " or two files: task.train=FILE task.test=FILE."
                )
            files = dict.fromkeys(SPLITS, path)
        elif len(chosen) < len(files):
            raise ConfigError(
                f"task={name} has no data of its own. Give a folder with train.jsonl and test.jsonl"
                " (or other files of rows) or an id for the datasets library, task.path=FOLDER; or"
                " two files, task.train=FILE task.test=FILE."
            )
        if first_label and not classes:
            raise ConfigError(
                f"task.first_label={first_label} has no effect without task.classes: the classes"
                " are the labels of the training rows. Name them, or leave it out."
            )
        self.notes: list[str] = []  # detected properties of the files
        read = {split: self._read(split, str(file)) for split, file in files.items()}
        self.classes = list(classes or sort_labels({label for _, _, label in read["train"]}))
        if len(self.classes) < 2:
            raise ConfigError(
                f"the training rows of task={name} have {len(self.classes)} class. Give at least 2."
            )
        labels = {label for rows in read.values() for _, _, label in rows}
        known = self._know(labels, first_label if classes else None)
        rows = {split: self._number_labels(split, found, known) for split, found in read.items()}
        tested = {row.value for row in rows["test"]}
        fresh = [row for row in rows["train"] if row.value not in tested]
        if dropped := len(rows["train"]) - len(fresh):
            log.warning("%d training rows are left out: they are test rows too", dropped)
        if len(fresh) < 2 or not tested:
            raise ConfigError(
                f"task={name} leaves {len(fresh)} train and {len(rows['test'])} test rows. Give"
                " more rows."
            )
        self._splits = {"train": fresh, "test": rows["test"]}

    def _read(self, split: str, file: str) -> list[tuple[str, str, str]]:
        """Return (place, text, label) of each valid row of a file, or of the split of a folder."""
        key = f"task.{split}" if self.path is None else "task.path"
        bad: list[str] = []
        reading = Reading(self.columns, self.format, skipped=bad if self.skip else None)
        rows = reading.rows(file, key, split=split)
        usable = []
        for row in rows:
            try:
                texts = [row.text(name, "task.text_field").strip() for name in self.text_fields]
                label = row.text(self.label_field, "task.label_field", numbers=True).strip()
                usable.append((row.where, " ".join(texts), label))
            except ConfigError as error:
                bad.append(str(error))
        self.notes += reading.notes
        self._warn_of(split, bad, len(usable))
        return usable

    def _know(self, labels: set[str], first: int | None) -> dict[str, int]:
        """Return the number of the class for each possible label.

        Args: first: the number of the first class among the labels; None = a number as label is the
        name of a class.
        Raises: ConfigError for a label that is the name of one class and the number of another.
        """
        names = {name: i for i, name in enumerate(self.classes)}
        numbers = {} if first is None else {str(i + first): i for i in range(len(self.classes))}
        if labels <= names.keys():
            return names
        if labels <= numbers.keys():
            return numbers
        begun = {
            label: [name for name in names if name.casefold().startswith(label.casefold())]
            for label in labels
        }
        if all(len(found) == 1 for found in begun.values()):  # neg, pos: as aclImdb has them
            return {label: names[found[0]] for label, found in begun.items()}
        for label in sorted(labels & names.keys() & numbers.keys()):
            if names[label] != numbers[label]:
                raise ConfigError(
                    f"the label {label!r} is the name of one class and the number of another,"
                    f" {self.classes[numbers[label]]!r}, and the labels are neither all names nor"
                    " all numbers of task.classes. Correct task.classes or task.first_label."
                )
        return numbers | names

    def _number_labels(
        self, split: str, rows: list[tuple[str, str, str]], known: dict[str, int]
    ) -> list[Labelled]:
        """Return the rows with a known label."""
        advice = "Correct the row, set task.classes, or leave it out with task.on_bad_row=skip."
        bad = [
            f"{where} has the label {label!r}, which is not a class. Classes:"
            f" {', '.join(self.classes)}. {advice}"
            for where, _, label in rows
            if label not in known
        ]
        usable = [Labelled(text, known[y], where) for where, text, y in rows if y in known]
        self._warn_of(split, bad, len(usable))
        return usable

    def _warn_of(self, split: str, bad: list[str], good: int) -> None:
        if bad and not self.skip:
            raise ConfigError(f"{bad[0]}{_count_more(bad)}")
        if not good:
            first = (bad or ["none"])[0]
            raise ConfigError(
                f"the {split} split has no row that is good. The first error: {first}"
            )
        if bad:
            text = "%d bad rows of the %s split are skipped. The first: %s"
            log.warning(text, len(bad), split, bad[0])


def _count_more(bad: list[str]) -> str:
    """Describe the number of bad rows, and the places of the next two.

    Args: bad: the error of each bad row.
    """
    if len(bad) == 1:
        return ""
    places = [found[0] for one in bad[1:3] if (found := re.search(r"\b(line|row) \d+", one))]
    return f" {len(bad)} rows are bad; the next ones: {', '.join(places) or 'see the file'}."


def sort_labels(labels: set[str]) -> list[str]:
    """Sort labels: numbers by value, then names alphabetically."""
    values = {label: int(label) for label in labels if label.isdecimal()}  # 1 of "1" and of "01"
    return sorted(labels, key=lambda label: (label not in values, values.get(label, 0), label))


def majority(rows: Sequence[Labelled]) -> int:
    """Return the most frequent label, the lowest one in case of a tie."""
    return int(np.bincount([row.label for row in rows]).argmax())
