"""Tasks, and what they are made of."""

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
from common.tasks.adapters import CLOSING, FormError
from common.tasks.base import RIGHT, SPLIT_SEED, Component, Rows, right_from, weighted
from common.tasks.checked import Checked, wording
from common.tasks.chess import Chess
from common.tasks.data import Reading, guess_encoding, names_file
from common.tasks.environment import ENDED
from common.tasks.extra_tasks import build_others, forget_others, naming, read_text
from common.tasks.functions import as_number, list_scores
from common.tasks.logged import Logged, TrainerState, collecting
from common.tasks.order import ExampleOrder
from common.tasks.thoughts import MARKS, Behind
from common.tasks.timeouts import LateError, SideBySide, start

__all__ = [
    "CLOSING",
    "ENDED",
    "MARKS",
    "RIGHT",
    "SPLIT_SEED",
    "Behind",
    "Checked",
    "Chess",
    "Component",
    "ExampleOrder",
    "FormError",
    "LateError",
    "Logged",
    "Reading",
    "Rows",
    "SideBySide",
    "TrainerState",
    "answers",
    "as_number",
    "build_others",
    "checked",
    "collecting",
    "equality",
    "forget_others",
    "guess_encoding",
    "limited_process",
    "list_scores",
    "names_file",
    "naming",
    "numbers",
    "read_text",
    "right_from",
    "safe_arithmetic",
    "similarity",
    "start",
    "thoughts",
    "weighted",
    "wording",
]
