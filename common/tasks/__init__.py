"""Tasks, rows of data in any format, and rewards; `Example` is here for tasks of users."""

from common.task import Example
from common.tasks import (
    answers,
    checked,
    equality,
    limited_process,
    numbers,
    safe_arithmetic,
    similarity,
    thoughts,
)
from common.tasks.answers import path_key, tagged
from common.tasks.awaiting import wait
from common.tasks.base import (
    RIGHT,
    SPLIT_SEED,
    Chat,
    Component,
    Rows,
    Weighted,
    converse,
    distinct,
    percent,
    right_from,
    tell,
    weighted,
)
from common.tasks.checked import Checked, wording
from common.tasks.chess import Chess
from common.tasks.custom import Custom
from common.tasks.data import (
    Incomplete,
    IncompleteError,
    Reading,
    Row,
    guess_encoding,
    names_file,
    read_rows,
)
from common.tasks.episode import CLOSING, ENDED, Episode, FormError
from common.tasks.extra_tasks import build_others, forget_others, naming, read_text
from common.tasks.functions import as_number, list_scores
from common.tasks.limited_process import call
from common.tasks.logged import Logged, TrainerState, collecting
from common.tasks.order import ExampleOrder
from common.tasks.safe_arithmetic import Arithmetic, evaluate
from common.tasks.thoughts import MARKS, Behind
from common.tasks.timeouts import LateError, SideBySide, start

__all__ = [
    "CLOSING",
    "ENDED",
    "MARKS",
    "RIGHT",
    "SPLIT_SEED",
    "Arithmetic",
    "Behind",
    "Chat",
    "Checked",
    "Chess",
    "Component",
    "Custom",
    "Episode",
    "Example",
    "ExampleOrder",
    "FormError",
    "Incomplete",
    "IncompleteError",
    "LateError",
    "Logged",
    "Reading",
    "Row",
    "Rows",
    "SideBySide",
    "TrainerState",
    "Weighted",
    "answers",
    "as_number",
    "build_others",
    "call",
    "checked",
    "collecting",
    "converse",
    "distinct",
    "equality",
    "evaluate",
    "forget_others",
    "guess_encoding",
    "limited_process",
    "list_scores",
    "names_file",
    "naming",
    "numbers",
    "path_key",
    "percent",
    "read_rows",
    "read_text",
    "right_from",
    "safe_arithmetic",
    "similarity",
    "start",
    "tagged",
    "tell",
    "thoughts",
    "wait",
    "weighted",
    "wording",
]
