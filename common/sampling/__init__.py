"""Sampling engines: prompts in, completions out."""
