"""Episodes: conversations with an environment or with tools."""

from common.episodes.episodes import STOPS, Played, Turns, check_template, play
from common.episodes.given import Given, encode_answer, encode_given, find_end

__all__ = [
    "STOPS",
    "Given",
    "Played",
    "Turns",
    "check_template",
    "encode_answer",
    "encode_given",
    "find_end",
    "play",
]
