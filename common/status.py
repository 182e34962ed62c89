"""Say where a run stands: python -m common.status RUN --json."""

from common.config import run_command

if __name__ == "__main__":
    run_command("status")
