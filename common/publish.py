"""Put a run's model on the Hugging Face hub: python -m common.publish RUN --repo USER/NAME."""

from common.config import run_command

if __name__ == "__main__":
    run_command("publish")
