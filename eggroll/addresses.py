"""The parameters that are perturbed, and the address of each one's noise."""

import fnmatch
import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from common.config import ConfigError
from common.device import blocks_of
from eggroll.config import NoiseConfig

T = TypeVar("T")

# The most floats of noise that are drawn at a time: 16 MB.
BUFFER = 1 << 22
# Low-rank noise of a rank up to this one is small on any matrix.
SMALL_RANK = 64
LOWER = "lower"  # the pattern for the lower half of the blocks; no parameter has this name


@dataclass(frozen=True)
class Address:
    """The address of a parameter's noise. Low-rank noise of an [m, n] matrix takes (m + n) * rank
    numbers: A^T [rank, m], then B^T [rank, n]. Full noise takes one number per element.

    Attributes:
        name: the parameter's name.
        number: the position among the model's parameters, which keys the noise.
        shape: the parameter's shape.
        form: the form of its noise, lowrank or full.
        rank: the rank of low-rank noise.
    """

    name: str
    number: int  # position among the model's parameters: the address
    shape: tuple[int, ...]
    form: str  # lowrank | full
    rank: int

    @property
    def floats(self) -> int:
        """The number of normals per direction."""
        return sum(self.shape) * self.rank if self.form == "lowrank" else math.prod(self.shape)

    @property
    def blocks(self) -> int:
        """The number of Philox blocks, of four normals each, per direction."""
        return -(-self.floats // 4)

    def split(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Split noise [D, >= floats] into the views A^T [D, r, m] and B^T [D, r, n]."""
        a, b = noise[:, : self.floats].split([self.rank * size for size in self.shape], 1)
        return a.unflatten(1, (self.rank, -1)), b.unflatten(1, (self.rank, -1))

    def dense(self, noise: Tensor) -> Tensor:
        """Return noise [D, >= floats] of a full parameter as the view E [D, *shape]."""
        return noise[:, : self.floats].unflatten(1, self.shape)


def kind_of(model: nn.Module) -> dict[str, str]:
    """Return the kind of each parameter by name: matrices, vectors, embeddings, head or others.

    A tied head is an embedding. The kind "others" is never perturbed: convolutions, and the rates
    at which the states of linear attention decay.
    """
    kinds = {}
    holders = [m for m in model.modules() if isinstance(m, nn.Conv1d) or any(m.children())]
    others = {id(p) for m in holders for p in m.parameters(recurse=False) if p.ndim == 1}
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    for name, parameter in model.named_parameters():
        if id(parameter) in embeddings:
            kinds[name] = "embeddings"
        elif head is not None and parameter is head.weight:
            kinds[name] = "head"
        elif id(parameter) in others:
            kinds[name] = "others"
        else:
            kinds[name] = {1: "vectors", 2: "matrices"}.get(parameter.ndim, "others")
    return kinds


def block_of(model: nn.Module) -> dict[str, int]:
    """Return the block number of each parameter that belongs to a block, by name."""
    blocks = enumerate(blocks_of(model))
    number = {id(p): index for index, block in blocks for p in block.parameters()}
    return {n: number[id(p)] for n, p in model.named_parameters() if id(p) in number}


# Settings of models whose blocks read more than the output of the block below: the keys and values
# of another block, or an input per token and block.
BESIDE = ("num_kv_shared_layers", "hidden_size_per_layer_input")


def count_trunk(model: nn.Module, addresses: Sequence[Address]) -> int:
    """Return the number of blocks, from the first on, that no noise reaches, so that all members
    share their forward. 0 if a parameter below the blocks is perturbed, if not every layer is a
    block, or if blocks read more than the output of the block below.

    Parameters are in the order of the forward: embeddings, blocks, and the parameters above the
    blocks. A tied head counts as an embedding.
    """
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    if any(getattr(config, name, None) for name in BESIDE):
        return 0
    block, whole = block_of(model), config.num_hidden_layers
    names = [name for name, _ in model.named_parameters()]
    first = next((number for number, name in enumerate(names) if name in block), 0)
    outside = any(a.name not in block and a.number < first for a in addresses)
    if outside or len(blocks_of(model)) != whole:
        return 0
    return min((block[a.name] for a in addresses if a.name in block), default=whole)


def addresses(
    model: nn.Module, noise: NoiseConfig, rank: int, only: Container[str] | None = None
) -> list[Address]:
    """List the addresses of the perturbed parameters of `model`, in the model's order.

    Args:
        rank: the rank of low-rank noise.
        only: names of an adapter's matrices, which alone may be perturbed; None = any parameter.
    Raises: ConfigError if a pattern matches nothing or asks for low rank on a vector, if the head
    is tied and has a form of its own, if nothing is perturbed, or if no matrix has such a rank.
    """
    perturbed, unused = [], set(noise.patterns)
    block = block_of(model)
    below = (max(block.values(), default=0) + 1) // 2
    kinds = {n: k for n, k in kind_of(model).items() if only is None or n in only}
    if only is None and noise.head != "frozen" and "head" not in kinds.values():
        raise ConfigError(
            f"algo.noise.head={noise.head} has no effect: the output layer of this model is tied to"
            " its embedding. Leave it out, or use algo.noise.embeddings."
        )
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if name not in kinds:
            continue
        form = getattr(noise, kinds[name], "frozen")
        for pattern, chosen in noise.patterns.items():
            lower = pattern == LOWER and block.get(name, below) < below
            if lower or fnmatch.fnmatchcase(name, pattern):
                form = chosen
                unused.discard(pattern)
                break
        if form == "lowrank" and parameter.ndim != 2:
            raise ConfigError(
                f"algo.noise.patterns asks for lowrank noise on {name} of shape"
                f" {tuple(parameter.shape)}, which has no rank. Use full or frozen there."
            )
        if form != "frozen":
            perturbed.append(Address(name, number, tuple(parameter.shape), form, rank))
    if unused:
        names = ", ".join(list(kinds)[:4])
        raise ConfigError(
            f"algo.noise.patterns: {sorted(unused)[0]!r} has no effect: it matches no parameter, or"
            f" an earlier pattern takes them all. Parameters are named like {names}, ..."
        )
    if not perturbed:
        raise ConfigError(
            "algo.noise freezes every parameter of this model. Set at least one of matrices,"
            " vectors, embeddings, head: for example algo.noise.matrices=lowrank."
        )
    _check_rank(perturbed, rank)
    return perturbed


def _check_rank(perturbed: Sequence[Address], rank: int) -> None:
    """Raise ConfigError if the rank is beyond that of every matrix with low-rank noise, whose noise
    would need more memory than the matrix.
    """
    matrices = [address for address in perturbed if address.form == "lowrank"]
    largest = max(matrices, key=lambda address: min(address.shape), default=None)
    if largest is None or rank <= max(SMALL_RANK, most := min(largest.shape)):
        return
    raise ConfigError(
        f"algo.rank={rank} is more than any matrix here can have: {largest.name} is of"
        f" {largest.shape[0]} x {largest.shape[1]}. Give at most {max(SMALL_RANK, most)}; 1 to 8 is"
        " usual. For noise of full rank set algo.noise.matrices=full."
    )


def in_parts(items: Sequence[T], floats: Sequence[int], most: int) -> Iterator[list[T]]:
    """Yield the items in order, in lists that hold at most `most` floats each. An item with more
    floats than that is a list of its own.

    Args:
        floats: the number of floats per item.
        most: the largest number of floats per list.
    """
    part: list[T] = []
    held = 0
    for item, size in zip(items, floats, strict=True):
        if part and held + size > most:
            yield part
            part, held = [], 0
        part.append(item)
        held += size
    yield part
