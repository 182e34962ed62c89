"""Try a model: python -m common.chat RUN."""

from common.config import run_command

if __name__ == "__main__":
    run_command("chat")
