"""Trackers beside metrics.jsonl: README.md."""
