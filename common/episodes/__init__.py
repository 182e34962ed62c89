"""Episodes: conversations with an environment or with tools."""

from common.episodes.episodes import STOPS, Played, Turns, check_template, play
from common.episodes.given import Given, Transcriber

__all__ = [
    "STOPS",
    "Given",
    "Played",
    "Transcriber",
    "Turns",
    "check_template",
    "play",
]
