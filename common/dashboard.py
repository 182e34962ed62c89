"""Make the W&B dashboard: python -m common.dashboard PROJECT."""

from common.config import run_command

if __name__ == "__main__":
    run_command("dashboard")
