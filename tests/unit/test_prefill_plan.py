"""Plans of prefills against a loop over single prompts, without a model."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from common.sampling.prefill_plan import (
    Earlier,
    Fill,
    Piece,
    PrefillPlan,
    Rules,
    plan_opening,
    plan_prefill,
)

ONE = Rules(members=1, separable=False, trunk=False, recurrent=False, piece=1000)


def fill_one_by_one(fill: Fill, earlier: list[list[int]]) -> dict[int, list[int]]:
    """Return the tokens that each row of a fill attends to, computed row by row."""
    seen = {}
    for piece in fill.pieces:
        for row in piece.rows:
            before = earlier[fill.origin[row]][: fill.begun[row]]
            seen[fill.rows[row]] = [*before, *fill.tokens[row]]
    return seen


def check_pieces(fill: Fill, rules: Rules) -> None:
    """Check that each row has one forward, of equally many rows per member, and of bounded size."""
    assert sorted(row for piece in fill.pieces for row in piece.rows) == list(range(len(fill.rows)))
    each = len(fill.rows) // rules.members
    for piece in fill.pieces:
        assert [row // each for row in piece.rows] == sorted(row // each for row in piece.rows)
        counts = Counter(row // each for row in piece.rows)
        assert list(counts) == list(piece.members)
        assert len(set(counts.values())) == 1
        if rules.separable:
            assert piece.members.start % 2 == 0
            assert piece.members.stop % 2 == 0 or piece.members.stop == rules.members
        else:
            assert piece.members == range(rules.members)
        smallest = min(rules.members, 2 if rules.separable else rules.members)
        assert len(piece.rows) <= max(smallest, rules.piece // fill.width)


def check_trunk(fill: Fill) -> None:
    """Check that each different sequence passes the trunk once, and that rows find theirs."""
    assert fill.trunk is not None
    assert [place for piece in fill.trunk.pieces for place in piece] == list(
        range(len(fill.trunk.tokens))
    )
    assert len(set(fill.trunk.tokens)) == len(fill.trunk.tokens)
    found = [list(fill.trunk.tokens[place]) for place in fill.trunk.origin]
    assert found == [list(tokens) for tokens in fill.tokens]


def draw_prompts(draw: random.Random, count: int, opening: list[int]) -> list[list[int]]:
    return [
        opening + [draw.randrange(100, 103) for _ in range(draw.randint(1, 4))]
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(200))
def test_every_row_attends_to_its_own_prompt(seed):
    draw = random.Random(seed)
    rules = Rules(
        members=draw.choice([1, 2, 4, 6]),
        separable=draw.random() < 0.5,
        trunk=draw.random() < 0.5,
        recurrent=draw.random() < 0.3,
        piece=draw.choice([1, 7, 20, 1000]),
    )
    rules = replace(rules, trunk=rules.trunk and not rules.recurrent)
    opening = list(range(draw.choice([0, 5])))
    prompts = draw_prompts(draw, rules.members * draw.randint(1, 5), opening)

    plan = plan_prefill(prompts, rules, len(opening))

    earlier: list[list[int]] = [[]] * rules.members
    if plan.earlier is Earlier.OPENING:
        first = plan_opening(opening, rules)
        check_pieces(first, rules)
        filled = fill_one_by_one(first, earlier)
        earlier = [filled[member] for member in range(rules.members)]
    seen = {}
    for fill in plan.fills:
        check_pieces(fill, rules)
        seen |= fill_one_by_one(fill, earlier)
        assert (fill.trunk is not None) == (rules.trunk and rules.members > 1)
        if fill.trunk is not None:
            check_trunk(fill)
        if rules.recurrent and fill.before:
            assert len({len(tokens) for tokens in fill.tokens}) == 1, "no padding in between"
        each = len(prompts) // rules.members
        assert fill.origin == [row // each for row in fill.rows]
    assert [seen[row] for row in range(len(prompts))] == prompts


@pytest.mark.parametrize("seed", range(50))
def test_a_turn_continues_from_its_own_episode(seed):
    draw = random.Random(seed)
    rules = replace(ONE, members=draw.choice([1, 2]), trunk=True, piece=draw.choice([1, 30]))
    episodes = draw_prompts(draw, 6, list(range(draw.randint(0, 9))))
    at = draw.sample(range(6), rules.members * draw.randint(1, 3))
    turns = [(episode, draw.choice([0, len(episodes[episode])])) for episode in at]
    prompts = [[*episodes[episode], 7, 8] for episode in at]

    plan = plan_prefill(prompts, rules, 0, turns)

    assert plan.earlier is Earlier.TURNS
    (fill,) = plan.fills
    check_pieces(fill, rules)
    assert fill_one_by_one(fill, episodes) == dict(enumerate(prompts))
    assert fill.trunk is None, "each episode has keys of its own in all blocks"


def test_pieces_cut_rows_before_pairs_of_members():
    rules = replace(ONE, members=4, separable=True, piece=4)
    prompts = [[member, row] for member in range(4) for row in range(2)]
    (fill,) = plan_prefill(prompts, rules).fills
    assert fill.pieces == [
        Piece(range(2), [0, 2]),
        Piece(range(2), [1, 3]),
        Piece(range(2, 4), [4, 6]),
        Piece(range(2, 4), [5, 7]),
    ]


def test_recurrent_layers_fill_each_length_alone():
    rules = replace(ONE, recurrent=True)
    prompts = [[1, 2, 3, 4], [1, 2, 5], [1, 2, 6, 7]]
    plan = plan_prefill(prompts, rules, opening=2)
    assert plan.earlier is Earlier.OPENING
    assert [fill.rows for fill in plan.fills] == [[1], [0, 2]]
    assert [fill.tokens for fill in plan.fills] == [[[5]], [[3, 4], [6, 7]]]


def test_recurrent_members_of_other_lengths_share_no_opening():
    rules = replace(ONE, recurrent=True, members=2)
    plan = plan_prefill([[1, 2, 3], [1, 2, 3, 4]], rules, opening=2)
    assert plan == PrefillPlan(Earlier.NOTHING, plan.fills)
    assert [fill.tokens for fill in plan.fills] == [[[1, 2, 3], [1, 2, 3, 4]]]


def test_members_pass_the_trunk_together():
    rules = replace(ONE, members=3, trunk=True)
    (fill,) = plan_prefill([[1, 2], [3], [1, 2], [3], [1, 2], [3]], rules).fills
    assert fill.trunk is not None
    assert fill.trunk.tokens == [(1, 2), (3,)]
    assert fill.trunk.origin == [0, 1, 0, 1, 0, 1]


def test_long_openings_make_smaller_pieces():
    rules = replace(ONE, piece=100)
    prompts = [[0] * 399 + [row] for row in range(4)]
    (fill,) = plan_prefill(prompts, rules, opening=399).fills
    assert [piece.rows for piece in fill.pieces] == [[0], [1], [2], [3]]
