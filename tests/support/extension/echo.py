"""A toy engine, as docs/architecture.md adds one: every completion is the same text."""

import torch

from common.engine import Completions, Setup
from common.memory.row_limit import RowLimit
from common.model.prompts import context_length


def open_echo(setup: Setup, token: int):
    """Open the engine (conf/engine/echo.yaml)."""
    return Echo(setup, token)


class Echo:
    """Answers every prompt with one token."""

    populations = True
    reproducible = False
    separate = False

    def __init__(self, setup, token):
        self.token, self.refreshed = token, 0
        self.context_length = context_length(setup.model)
        self.row_limit = RowLimit("algo.rollout_rows", setup.rows, setup.floor)

    def generate(self, requests, sampling, watch=None):
        """Return the token once per sample."""
        rows = len(requests.prompts) * requests.samples * requests.members
        tokens = torch.full((rows, sampling.max_new_tokens), self.token)
        ones = torch.ones(rows, dtype=torch.long)
        broken = torch.zeros(rows, dtype=torch.bool)
        return Completions(tokens, ones, ~broken, torch.zeros(tokens.shape), broken)

    def refresh(self):
        """Count the calls."""
        self.refreshed += 1

    def rest(self):
        """Lend nothing."""

    def close(self):
        """Hold nothing."""

    def peak_bytes(self, rows, load):
        """Return a byte for each row."""
        return float(rows)
