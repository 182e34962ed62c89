"""launch.py with the toy in its table of algorithms: what the one line of a new algorithm does."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[3])]

from toy.config import ToyConfig  # noqa: E402

import launch  # noqa: E402

launch.ALGORITHMS["toy"] = ToyConfig

if __name__ == "__main__":
    launch.main()
