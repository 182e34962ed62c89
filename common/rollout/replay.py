"""The log of what environments have said since the last checkpoint. A run that is killed and goes
on plays its episodes again from there, and takes from the log what a tool or a server has said by
then: a second search could find something else, and lead to other tokens.

    RUN/replies/step-00000040-TIME-rank-0.jsonl    since the checkpoint of step 40, on rank 0
"""

import hashlib
import json
import math
import shutil
import time
from collections import defaultdict, deque
from collections.abc import Callable
from multiprocessing import TimeoutError
from pathlib import Path
from threading import Lock
from typing import Any

from common.config import ConfigError
from common.records import read_lines
from common.tasks import Example, Messages
from common.tasks.adapters import ScaleError

FOLDER = "replies"  # in the run folder
OVERDUE = {"overdue": True}  # of a reply that nobody waited for any longer
LINE = {"key": str, "said?": object, "failed?": str, "overdue?": bool}


class ReplyLog:
    """The log of one rank. It is written line by line, so that a kill loses the last one at most.

    Attributes: known: by key, what the killed run has left, each to be used once.
    """

    def __init__(self, out_dir: Path, rank: int) -> None:
        self.folder, self.rank, self.step = out_dir / FOLDER, rank, 0
        self.known: defaultdict[str, deque[dict[str, Any]]] = defaultdict(deque)
        self.file: Any = None
        self.ended = False  # from then on a reply that comes late is not written
        self.lock = Lock()  # environments reply side by side

    def resume(self, step: int) -> None:
        """Take over what any rank has written since the checkpoint of a step."""
        for path in sorted(self.folder.glob("step-*.jsonl")):
            if path.name >= f"step-{step:08d}":
                for line in read_lines(path, LINE):
                    if line.keys() & {"said", "failed", "overdue"}:
                        self.known[line["key"]].append(line)
        self.step = step

    def begin(self, step: int, whole: int | None) -> None:
        """Begin anew behind a checkpoint. whole: the step of the newest one that is on the disk, so
        that no run needs what was said before it; None where that is not known.
        """
        self._leave_file()
        self.step = step
        for path in [] if whole is None else self.folder.glob("step-*.jsonl"):
            if path.name < f"step-{whole:08d}":
                path.unlink(missing_ok=True)

    def recall(self, key: str) -> dict[str, Any] | None:
        """Return what the killed run has left under a key; None where there is nothing."""
        with self.lock:
            lines = self.known.get(key)
            return lines.popleft() if lines else None

    def write(self, key: str, line: dict[str, Any]) -> None:
        """Add a line."""
        text = json.dumps({"key": key, **line})
        with self.lock:
            if self.ended:
                return
            if self.file is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                name = f"step-{self.step:08d}-{time.time_ns()}-rank-{self.rank}.jsonl"
                self.file = (self.folder / name).open("a", encoding="utf-8")
            self.file.write(f"{text}\n")
            self.file.flush()

    def close(self) -> None:
        """Write nothing more."""
        self.ended = True
        self._leave_file()

    def remove(self) -> None:
        """Remove what all ranks have written, of a run that has come to its end."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _leave_file(self) -> None:
        with self.lock:
            if self.file is not None:
                self.file.close()
            self.file = None


class Replayed:
    """An episode (common.rollout.episodes.Episode) whose replies and reward are logged, or taken
    from the log. Its environment is told what it has missed before it is asked for something new.

    Args: key: tells the episode apart from all others of a step.
    """

    def __init__(self, episode: Any, log: ReplyLog, key: str) -> None:
        self.episode, self.log, self.key = episode, log, key
        self.name = getattr(episode, "name", type(episode).__name__)
        self.messages: list[dict[str, Any]] = []  # of the model
        self.reached = 0  # how many of them the environment knows

    def start(self, example: Example, seed: int) -> Messages:
        """Begin."""
        return self.episode.start(example, seed)

    def reply(self, message: dict[str, Any]) -> Messages | None:
        """Return what comes after the model's message."""
        self.messages.append(message)
        self.key = digest(self.key, message)
        return self._recall(self.key, self._ask_reply)

    def note_overdue(self) -> None:
        """Log that nobody waits for the last reply any longer."""
        self.log.write(self.key, OVERDUE)

    def reward(self) -> float | None:
        """Return what was earned."""
        return self._recall(f"{self.key} reward", self._ask_reward)

    def components(self) -> dict[str, float]:
        """Return what is shown beside the reward."""
        return self._recall(f"{self.key} components", self._ask_components)

    def close(self) -> None:
        """Give back what it holds."""
        self.episode.close()

    def _recall(self, key: str, ask: Callable[[], Any]) -> Any:
        line = self.log.recall(key)
        if line is None:
            line = {"said": self._ask(key, ask)}
            if _is_finite(line["said"]):  # JSON has no NaN
                self.log.write(key, line)
        if line.get("overdue"):
            raise TimeoutError
        if "failed" in line:
            raise ConfigError(line["failed"])
        return line["said"]

    def _ask(self, key: str, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except ScaleError:  # which ends the run
            raise
        except ConfigError as error:
            self.log.write(key, {"failed": str(error)})
            raise

    def _catch_up(self, messages: int) -> None:
        for message in self.messages[self.reached : messages]:
            self.episode.reply(message)
        self.reached = len(self.messages)

    def _ask_reply(self) -> Messages | None:
        self._catch_up(len(self.messages) - 1)
        return self.episode.reply(self.messages[-1])

    def _ask_reward(self) -> float | None:
        self._catch_up(len(self.messages))
        return self.episode.reward()

    def _ask_components(self) -> dict[str, float]:
        self._catch_up(len(self.messages))
        return self.episode.components()


def digest(key: str, message: dict[str, Any]) -> str:
    """Return the key of an episode in which a message has followed."""
    text = json.dumps([key, message], sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:24]


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
