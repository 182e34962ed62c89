"""Write a run's model as a GGUF file, for llama.cpp: python -m common.export RUN --gguf q8_0."""

from common.config import run_command

if __name__ == "__main__":
    run_command("export")
