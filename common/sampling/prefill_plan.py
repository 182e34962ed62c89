"""Plan a prefill: which tokens of which rows are computed, in which forwards, and which keys they
continue from. A plan is plain numbers; prefill.py executes it.

Keys and values that several rows begin with are not computed again per row. They come from one of
two places:

- The common opening of all prompts of a call, such as instructions and worked examples. It is
  prefilled once, or once per member of a population.
- The earlier turns of each episode, which are cached while these are sampled.

Blocks below the first one that a population perturbs, the trunk, are the same for all members: a
prompt passes them once and not once per member.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby

Tokens = Sequence[int]


class Earlier(Enum):
    """The cache that the rows of a prefill continue from."""

    NOTHING = "nothing"  # rows are prefilled from their first token
    OPENING = "opening"  # the common opening, a row per member
    TURNS = "turns"  # the earlier turns, a row per episode


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules that all prefills of a call of `generate` follow.

    Attributes:
        members: the number of perturbed copies of the model; 1 without a population.
        separable: whether a forward may have the rows of some pairs of members (0-1, 2-3, ...)
            alone; else it has rows of all members.
        trunk: whether the first blocks of the model are the same for all members.
        recurrent: whether the model has recurrent layers, whose state padding between an opening
            and the tokens after it would change.
        piece: the most tokens of a forward, unless it is one row per member that stays together.
    """

    members: int
    separable: bool
    trunk: bool
    recurrent: bool
    piece: int


@dataclass(frozen=True)
class Piece:
    """One forward.

    Attributes:
        members: the members whose rows it has.
        rows: the rows, as indices into the fill: the same number per member, member by member.
    """

    members: range
    rows: list[int]


@dataclass(frozen=True)
class TrunkPlan:
    """The passes of different prompts through the trunk.

    Attributes:
        tokens: the different token sequences of a fill, in the order of their first row.
        origin: the index of each row's sequence.
        pieces: the sequences of each forward.
    """

    tokens: list[Tokens]
    origin: list[int]
    pieces: list[range]


@dataclass(frozen=True)
class Fill:
    """Rows that are prefilled into one cache.

    Attributes:
        rows: the rows, as indices into the prompts of the prefill.
        tokens: the tokens of each row that are computed, at least one.
        begun: the tokens of each row whose keys exist before.
        origin: the row of the earlier cache that each row continues from.
        pieces: the forwards, in their order. Each row is in one of them.
        trunk: the passes through the trunk, which precede the pieces; None = the pieces pass all
            blocks.
    """

    rows: list[int]
    tokens: list[Tokens]
    begun: list[int]
    origin: list[int]
    pieces: list[Piece]
    trunk: TrunkPlan | None

    @property
    def width(self) -> int:
        """The tokens of the longest row that are computed; shorter rows are padded to it."""
        return max(map(len, self.tokens))

    @property
    def before(self) -> int:
        """The most tokens of a row whose keys exist before."""
        return max(self.begun)


@dataclass(frozen=True)
class PrefillPlan:
    """The computations of the prefill of some prompts.

    Attributes:
        earlier: the cache that all rows continue from.
        fills: the fills, one after the other. There are several if recurrent layers need rows of
            equal length.
    """

    earlier: Earlier
    fills: list[Fill]


def plan_prefill(
    prompts: Sequence[Tokens],
    rules: Rules,
    opening: int = 0,
    turns: Sequence[tuple[int, int]] | None = None,
) -> PrefillPlan:
    """Plan the prefill of prompts, the same number per member, member 0 first.

    Args:
        opening: the number of tokens that all prompts of the call begin with and whose keys the
            prompts share; 0 = none.
        turns: per prompt, (row, tokens) of its earlier turns in the cache of turns; None = no
            prompt has earlier turns.
    """
    members = [row // (len(prompts) // rules.members) for row in range(len(prompts))]
    everything = list(range(len(prompts)))
    if turns is not None:
        episodes, begun = [episode for episode, _ in turns], [tokens for _, tokens in turns]
        whole = _fill(prompts, everything, begun, episodes, rules, trunk=False)
        return PrefillPlan(Earlier.TURNS, [whole])
    groups = [everything]
    if opening and rules.recurrent:
        groups = _group_by_length(prompts, rules.members)
    if not opening or not groups:
        whole = _fill(prompts, everything, [0] * len(prompts), members, rules, rules.trunk)
        return PrefillPlan(Earlier.NOTHING, [whole])
    begun = [opening] * len(prompts)
    fills = [_fill(prompts, rows, begun, members, rules, rules.trunk) for rows in groups]
    return PrefillPlan(Earlier.OPENING, fills)


def plan_opening(opening: Tokens, rules: Rules) -> Fill:
    """Plan the prefill of the common opening, a row per member."""
    members = list(range(rules.members))
    return _fill(
        [opening] * rules.members, members, [0] * rules.members, members, rules, rules.trunk
    )


def _fill(
    prompts: Sequence[Tokens],
    rows: list[int],
    begun: Sequence[int],
    origin: Sequence[int],
    rules: Rules,
    trunk: bool,
) -> Fill:
    """Plan the fill of some `rows`. `begun` and `origin` have an entry per prompt."""
    begun, origin = [begun[row] for row in rows], [origin[row] for row in rows]
    tokens = [prompts[row][cached:] for row, cached in zip(rows, begun, strict=True)]
    # A token whose keys exist takes less than a quarter of the memory of one that is computed.
    width = max(map(len, tokens))
    size = max(width, (width + max(begun)) // 4)
    fitting = max(1, rules.piece // size)
    pieces = _cut(len(rows) // rules.members, fitting, rules)
    shared = _plan_trunk(tokens, fitting) if trunk and rules.members > 1 else None
    return Fill(rows, tokens, begun, origin, pieces, shared)


def _cut(each: int, fitting: int, rules: Rules) -> list[Piece]:
    """Cut `each` rows per member into pieces of at most `fitting` rows, where members allow it."""
    # Members that cannot be separated stay together, and so do mirrored pairs.
    together = min(rules.members, 2 if rules.separable else rules.members)
    rows = min(each, max(1, fitting // together))
    count = max(together, fitting // rows // together * together)
    pieces = []
    for first in range(0, rules.members, count):
        members = range(first, min(first + count, rules.members))
        for start in range(0, each, rows):
            part = range(start, min(start + rows, each))
            pieces.append(
                Piece(members, [member * each + row for member in members for row in part])
            )
    return pieces


def _plan_trunk(tokens: Sequence[Tokens], fitting: int) -> TrunkPlan:
    """Plan the passes of different sequences through the trunk, `fitting` per forward."""
    places = {key: place for place, key in enumerate(dict.fromkeys(map(tuple, tokens)))}
    pieces = [
        range(first, min(first + fitting, len(places))) for first in range(0, len(places), fitting)
    ]
    return TrunkPlan(list(places), [places[tuple(row)] for row in tokens], pieces)


def _group_by_length(prompts: Sequence[Tokens], members: int) -> list[list[int]]:
    """Return the rows of the prompts of each length, the same number per member; empty if the
    lengths differ between members.
    """
    each = len(prompts) // members
    of_member = [range(row, row + each) for row in range(0, len(prompts), each)]
    ordered = [sorted(rows, key=lambda row: len(prompts[row])) for rows in of_member]
    ranks = list(zip(*ordered, strict=True))  # the rows of all members at each place in that order
    if any(len({len(prompts[row]) for row in rows}) > 1 for rows in ranks):
        return []
    grouped = groupby(ranks, key=lambda rows: len(prompts[rows[0]]))
    return [[row for rows in zip(*some, strict=True) for row in rows] for _, some in grouped]
