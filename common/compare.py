"""Compare runs: python -m common.compare FOLDER."""

from common.config import run_command

if __name__ == "__main__":
    run_command("compare")
