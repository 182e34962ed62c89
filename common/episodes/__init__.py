"""Episodes: conversations with an environment or with tools."""

from common.episodes.episodes import STOPS, Played, Turns, check_template, play

__all__ = [
    "STOPS",
    "Played",
    "Turns",
    "check_template",
    "play",
]
