"""The engine vLLM: README.md."""
