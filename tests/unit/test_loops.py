"""Samples that are cut off in a loop are told from those that are cut off on their way."""

import random

import torch

from common.engine import Completions, ends_in_a_loop


def rows(*given: list[int]) -> torch.Tensor:
    return torch.tensor(given)


def loops_in(tokens: torch.Tensor) -> torch.Tensor:
    """Look at rows of full width."""
    return ends_in_a_loop(tokens, torch.full((len(tokens),), tokens.shape[1]))


def test_rows_whose_end_repeats_itself():
    draw = random.Random(1)
    text = [draw.randrange(1000) for _ in range(24)]
    number = [5, 5, 5, 0, 1, 9, 9, 2, 7, 3]
    loops = rows([7] * 24, [*text[:14], *[1, 2] * 5], [*text[:4], *number * 2], text[:12] * 2)
    assert loops_in(loops).all()
    once = [*number * 2]
    once[13] = 8  # one token of ten is another
    assert loops_in(rows(once)).all()
    others = rows(
        text, [*text[:20], 7, 7, 7, 7], [*number * 2, *text[:4]], [*text[:18], *[1, 2] * 3]
    )
    assert not loops_in(others).any()


def test_rows_that_are_too_short_to_tell():
    assert not loops_in(torch.zeros(3, 7, dtype=torch.long)).any()
    assert loops_in(torch.zeros(0, 30, dtype=torch.long)).tolist() == []


def test_long_paragraphs_over_and_over():
    text = torch.randperm(120)
    assert loops_in(torch.cat((text, text, text)).unsqueeze(0)).all()


def test_only_rows_that_are_cut_off_count():
    finished = torch.tensor([True, False, False])
    tokens = torch.cat((torch.zeros(2, 12, dtype=torch.long), torch.arange(12).unsqueeze(0)))
    lengths = torch.tensor([4, 12, 12])  # the first row ended: the rest of it is padding
    made = Completions(tokens, lengths, finished, None, torch.zeros(3, dtype=torch.bool))
    assert made.repeating() == [False, True, False]


def test_padding_is_no_loop():
    """Episodes that were cut off are padded to the width that all of their replies would need."""
    text = list(range(1, 15))
    padded = rows([*text, *[0] * 16], [*text[:6], *[1, 2] * 5, *[0] * 14], [7] * 6 + [0] * 24)
    found = ends_in_a_loop(padded, torch.tensor([14, 16, 6]))
    assert found.tolist() == [False, True, False]
