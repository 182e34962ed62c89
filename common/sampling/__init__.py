"""The native sampling engine, and parts that other engines share."""

from common.sampling.native import Sampler
from common.sampling.random import normals
from common.sampling.stops import StopTexts
from common.sampling.turn_cache import TurnCache

__all__ = [
    "Sampler",
    "StopTexts",
    "TurnCache",
    "normals",
]
