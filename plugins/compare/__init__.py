"""Runs side by side, and the W&B dashboard: README.md."""
