"""Estimate the four algorithms on 1 to 1024 devices: plugins/capacity, under its documented name.

python -m ddp_bench.capacity --model qwen2.5_7b --hardware a100_80g h100 --rows 2048
"""

from common.config import CAPACITY
from common.system import ending_tool, user_code


def main() -> None:
    """Run the command. Exit codes: 0 done, 2 a user error."""
    with ending_tool():
        command = user_code.load(f"{CAPACITY}:main")
    command()


if __name__ == "__main__":
    main()
