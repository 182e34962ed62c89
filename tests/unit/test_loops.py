"""Samples that are cut off in a loop are told from those that are cut off on their way."""

import random

import torch

from common.sampling.engine import Completions, ends_in_a_loop


def rows(*given: list[int]) -> torch.Tensor:
    return torch.tensor(given)


def test_rows_whose_end_repeats_itself():
    draw = random.Random(1)
    text = [draw.randrange(1000) for _ in range(24)]
    number = [5, 5, 5, 0, 1, 9, 9, 2, 7, 3]
    loops = rows([7] * 24, [*text[:14], *[1, 2] * 5], [*text[:4], *number * 2], text[:12] * 2)
    assert ends_in_a_loop(loops).all()
    once = [*number * 2]
    once[13] = 8  # one token of ten is another
    assert ends_in_a_loop(rows(once)).all()
    others = rows(
        text, [*text[:20], 7, 7, 7, 7], [*number * 2, *text[:4]], [*text[:18], *[1, 2] * 3]
    )
    assert not ends_in_a_loop(others).any()


def test_rows_that_are_too_short_to_tell():
    assert not ends_in_a_loop(torch.zeros(3, 7, dtype=torch.long)).any()
    assert ends_in_a_loop(torch.zeros(0, 30, dtype=torch.long)).tolist() == []


def test_long_paragraphs_over_and_over():
    text = torch.randperm(120)
    assert ends_in_a_loop(torch.cat((text, text, text)).unsqueeze(0)).all()


def test_only_rows_that_are_cut_off_count():
    finished = torch.tensor([True, False, False])
    tokens = torch.cat((torch.zeros(2, 12, dtype=torch.long), torch.arange(12).unsqueeze(0)))
    lengths = torch.tensor([4, 12, 12])  # the first row ended: the rest of it is padding
    made = Completions(tokens, lengths, finished, None, torch.zeros(3, dtype=torch.bool))
    assert made.repeating() == [False, True, False]
