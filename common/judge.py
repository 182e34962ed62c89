"""Judge a changed setting: python -m common.judge BASE NEW."""

from common.config import run_command

if __name__ == "__main__":
    run_command("judge")
