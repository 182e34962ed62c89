"""Rebuild a model from RUN/run.egg: python -m eggroll.replay RUN."""

from common.config import run_command

if __name__ == "__main__":
    run_command("replay", "eggroll")
