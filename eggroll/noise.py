"""Low-rank noise on an unmodified model: its numbers, the members' forwards, the update.

EGGROLL (arXiv:2511.16652), for a weight W [out, in] and direction j: E_j = A_j B_j^T / sqrt(r), A_j
[out, r] and B_j [in, r] standard normal, so var(E) = 1 for every rank. Member i of a mirrored pair
uses direction i // 2 with sign (-1)^i:

    forward   y_i = x W^T + s_i sigma / sqrt(r) (x B_j) A_j^T
    gradient  g = -1/N sum_i f_i s_i E_j

The forward costs one shared product and two skinny ones, the gradient one product per layer; the
factor 1/sigma is part of the learning rate.

The perturbed weights of a member are never computed. A normal number is a pure function of (seed,
draw, parameter, direction, index): the same in any chunk, on any rank, on CPU and CUDA; layers of
equal shape never share noise. Departures from the paper's code: noise is drawn in float32 in every
precision, the two members of a pair share their products, and embeddings, biases, norms and the
head can be perturbed too.
"""

import math
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from common import engine
from common.config import ConfigError, Run
from common.device import device_of, dtype_of
from common.distributed import sharding_of
from common.language_model import LanguageModel
from common.sampling import normals
from eggroll.addresses import BUFFER, Address, addresses, count_trunk, in_parts, kind_of
from eggroll.config import NoiseConfig
from eggroll.fitness import by_direction
from eggroll.forwards import Members, Perturbed, find_shared_inputs, find_sites

# The most rows (directions x rank) of a matrix of inner products: 32 MB of float64.
PRODUCTS = 2048


@dataclass(frozen=True)
class _Share:
    """The rows of a parameter that this rank holds: all of them unless the parameter is sharded.

    Attributes:
        address: the address of these rows, as if they were the whole parameter.
        block: int64 [K], the Philox blocks that contain the numbers of these rows.
        column: int64 [address.floats], the place of each number in these blocks; None = in order.
    """

    address: Address
    block: Tensor
    column: Tensor | None

    @classmethod
    def of(cls, address: Address, rows: range, blocks: Tensor) -> "_Share":
        whole, *others = address.shape
        if len(rows) == whole:
            return cls(address, blocks, None)
        if address.form == "lowrank":
            # The columns of A^T that belong to the rows, and all of B^T.
            parts = [(k * whole + rows.start, len(rows)) for k in range(address.rank)]
            parts.append((address.rank * whole, address.rank * others[0]))
        else:
            parts = [(rows.start * math.prod(others), len(rows) * math.prod(others))]
        pieces = [torch.arange(n, n + count, device=blocks.device) for n, count in parts]
        numbers = torch.cat(pieces)
        block = torch.unique(numbers // 4)
        column = torch.searchsorted(block, numbers // 4) * 4 + numbers % 4
        return cls(replace(address, shape=(len(rows), *others)), block, column)

    def pick(self, noise: Tensor) -> Tensor:
        """Pick the numbers of the rows, [D, >= floats], out of the noise of the blocks, [D, 4 *
        K].
        """
        return noise if self.column is None else noise[:, self.column]


class Noise:
    """The noise of one run on one model.

    Args:
        config: the parameters that are perturbed.
        rank: the rank of low-rank noise.
        mirrored: whether members come in pairs with opposite noise.
        only: names of an adapter's matrices, which alone may be perturbed; None = any parameter.
    Attributes:
        trunk: the number of blocks below all noise, whose forward all members share.
    """

    def __init__(
        self,
        model: nn.Module,
        config: NoiseConfig,
        *,
        rank: int,
        mirrored: bool,
        seed: int,
        only: Container[str] | None = None,
    ) -> None:
        self.model, self.mirrored, self.seed = model, mirrored, seed
        self.addresses = addresses(model, config, rank, only)
        self.device = device_of(model)
        self.trunk = count_trunk(model, self.addresses)
        self.sites = find_sites(model, self.addresses)
        self.inputs = find_shared_inputs(
            model, [s.module for s in self.sites if isinstance(s.module, (nn.Linear, Conv1D))]
        )
        self._blocks = {a.name: torch.arange(a.blocks, device=self.device) for a in self.addresses}
        parameters, sharding = dict(model.named_parameters()), sharding_of(model)
        self._shares = [
            _Share.of(a, sharding.rows(parameters[a.name]), self._blocks[a.name])
            for a in self.addresses
        ]
        self.perturbed: dict[tuple[int, torch.dtype], Perturbed] = {}
        self._population: Members | None = None  # the perturbed members; None outside `members`

    @classmethod
    def of(cls, run: Run, lm: LanguageModel) -> "Noise":
        """Return the noise that a run's settings put on its model, or on the model's adapter."""
        how = {"rank": run.algo.rank, "mirrored": run.algo.mirrored, "seed": run.seed}
        return cls(lm.model, run.algo.noise, **how, only=lm.adapter)

    @property
    def kinds(self) -> list[str]:
        """The kinds of parameters that are perturbed: matrices, vectors, embeddings, head."""
        kinds = kind_of(self.model)
        return list(dict.fromkeys(kinds[address.name] for address in self.addresses))

    @property
    def is_lowrank(self) -> bool:
        """Whether some of the noise is low-rank."""
        return any(address.form == "lowrank" for address in self.addresses)

    def draw(self, draw: int, directions: Tensor, addresses: Sequence[Address]) -> list[Tensor]:
        """Return the normals of some parameters, float32, [D, 4 * blocks] per parameter: views of
        one buffer.

        Args:
            draw: the number of the noise: the step, unless steps reuse noise.
            directions: int64 [D].
        """
        return self._normals(draw, addresses, [self._blocks[a.name] for a in addresses], directions)

    def _normals(
        self, draw: int, addresses: Sequence[Address], blocks: list[Tensor], directions: Tensor
    ) -> list[Tensor]:
        """Return the normals of the given Philox blocks, per parameter."""
        sizes = [len(block) for block in blocks]
        numbers, counts = (
            torch.tensor(values, device=self.device)
            for values in ([address.number for address in addresses], sizes)
        )
        parameter = numbers.repeat_interleave(counts, output_size=sum(sizes))
        buffer = torch.empty(len(directions), 4 * sum(sizes), device=self.device)
        if sum(sizes):
            normals(self.seed, draw, parameter, torch.cat(blocks), directions, buffer)
        return list(buffer.split([4 * size for size in sizes], dim=1))

    @contextmanager
    def members(self, draw: int, members: range, sigma: float) -> Iterator[engine.Population]:
        """Perturb the model's forward inside the block. The rows of a batch are ordered by member,
        with the same number of rows per member. Yields the population that an engine samples from.

        With mirrored noise `members` starts at an even number and has an even length.
        """
        per_direction = 2 if self.mirrored else 1
        assert members.start % per_direction == 0
        assert len(members) % per_direction == 0
        first, count = members.start // per_direction, len(members) // per_direction
        dtype = dtype_of(self.model)
        if (count, dtype) not in self.perturbed:
            side_by_side = Members(count, self.mirrored, dtype, self.device)
            self.perturbed[count, dtype] = Perturbed(self.sites, self.inputs, side_by_side)
        perturbed = self.perturbed[count, dtype]
        directions = torch.arange(first, first + count, device=self.device)
        perturbed.fill(partial(self.draw, draw, directions), sigma)
        self._population = perturbed.members
        try:
            for module, forward in perturbed.forwards:
                module.forward = forward  # an instance attribute, which hides the class's method
            yield engine.Population(
                members=len(members),
                factors=partial(self.factors, draw, members, sigma),
                narrow=self.narrow,
                trunk=self.trunk,
            )
        finally:
            self._population = None
            for module, _ in perturbed.forwards:
                module.__dict__.pop("forward", None)

    def forget(self) -> None:
        """Free the buffers of the forwards, before a forward with another number of members."""
        self.perturbed.clear()

    @contextmanager
    def narrow(self, members: range) -> Iterator[None]:
        """Let forwards inside the block have the rows of some of the perturbed members only.

        Args: members: their numbers, from 0 for the first perturbed member; whole pairs with
        mirrored noise.
        """
        population = self._population
        assert population is not None, "no member is perturbed"
        whole = population.window
        signs = population.signs
        population.window = range(members.start // signs, members.stop // signs)
        try:
            yield
        finally:
            population.window = whole

    def factors(
        self, draw: int, members: range, sigma: float
    ) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield, per perturbed matrix, the noise of `members` as two factors: the matrix's name,
        left [members, out, r], and right [members, r, in].

        Raises: ConfigError for full noise, which has no such factors, and for noise on an
        embedding.
        """
        kinds = kind_of(self.model)
        index = torch.tensor(list(members), device=self.device)
        sign = torch.ones(len(members), device=self.device)
        if self.mirrored:
            index, sign = index // 2, 1.0 - 2 * (index % 2)
        for address in self.addresses:
            if address.form == "full" or kinds[address.name] == "embeddings":
                raise ConfigError(
                    f"this engine samples from members as adapters, which {address.name} cannot"
                    f" have. Set algo.noise.{kinds[address.name]}=frozen, or engine=native."
                )
            a, b = address.split(self.draw(draw, index, [address])[0])
            scale = sign * (sigma / math.sqrt(address.rank))
            yield address.name, a.transpose(1, 2) * scale[:, None, None], b

    def gradients(self, draw: int, fitness: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the ES gradient of each perturbed parameter, to be descended: -1/N
        sum_i f_i s_i E_i, float32; for a sharded parameter the rows of this rank.

        The noise is drawn again, for as many parameters or directions at a time as fit `BUFFER`.

        Args: fitness: [N], the same on every rank.
        """
        fitness = fitness.to(device=self.device, dtype=torch.float32)
        weights = by_direction(fitness, self.mirrored) / -len(fitness)  # [D]
        directions = torch.arange(len(weights), device=self.device)
        floats = [4 * len(share.block) * len(weights) for share in self._shares]
        for batch in in_parts(self._shares, floats, BUFFER):
            # Several parameters fit the buffer with all directions; a single one may need its
            # directions in several parts.
            step = max(1, BUFFER // max(1, 4 * sum(len(share.block) for share in batch)))
            places, blocks = [s.address for s in batch], [s.block for s in batch]
            first = self._normals(draw, places, blocks, directions[:step])
            for share, noise in zip(batch, first, strict=True):
                total = _weighted_sum(share.address, share.pick(noise), weights[:step])
                for start in range(step, len(directions), step):
                    part = slice(start, start + step)
                    more = self._normals(draw, [share.address], [share.block], directions[part])[0]
                    total.add_(_weighted_sum(share.address, share.pick(more), weights[part]))
                yield share.address.name, total
                del total  # free it before the next gradient is computed

    def expected_norm(self, fitness: Tensor) -> float:
        """Return the norm of the gradient that `fitness` [N] gives if all directions are
        orthogonal: sqrt(number of perturbed weights) times the norm of the directions' weights.

        Directions are almost orthogonal: the relative error is about 1 / sqrt(smaller side of a
        matrix).
        """
        weights = by_direction(fitness, self.mirrored) / len(fitness)
        dimensions = sum(math.prod(address.shape) for address in self.addresses)
        return math.sqrt(dimensions) * weights.square().sum().sqrt().item()

    def gram(self, draw: int, count: int) -> Tensor | None:
        """Return the inner products <E_i, E_j> of the first `count` directions over all perturbed
        parameters, float64 [count, count]. With them the inner product of two updates needs neither
        update.

        None if the weights are sharded, or if there are too many directions to be worth the time.
        """
        ranks = [address.rank for address in self.addresses if address.form == "lowrank"]
        if sharding_of(self.model).shared or count * max(ranks, default=1) > PRODUCTS:
            return None
        directions = torch.arange(count, device=self.device)
        total = torch.zeros(count, count, dtype=torch.float64, device=self.device)
        for address in self.addresses:
            blocks = self._blocks[address.name]
            # A full parameter's products add up over its elements.
            step = max(1, BUFFER // (4 * count)) if address.form == "full" else len(blocks)
            for start in range(0, len(blocks), step):
                part = blocks[start : start + step]
                (noise,) = self._normals(draw, [address], [part], directions)
                total += _products(address, noise[:, : address.floats - 4 * start])
        return total


def _weighted_sum(address: Address, noise: Tensor, weights: Tensor) -> Tensor:
    """Return sum_j w_j E_j of a parameter, [*shape], from noise [D, >= floats] and weights [D]."""
    if address.form == "full":
        return torch.mv(noise[:, : address.floats].T, weights).view(address.shape)
    a, b = address.split(noise)  # [D, r, m], [D, r, n]
    a = (a * (weights / math.sqrt(address.rank))[:, None, None]).flatten(0, 1)  # [D r, m]
    return a.T @ b.reshape(-1, b.shape[-1])  # [m, n]


def _products(address: Address, noise: Tensor) -> Tensor:
    """Return <E_i, E_j> of one parameter, [D, D]; for full noise the sum over the elements in
    `noise`.
    """
    if address.form == "full":
        return noise @ noise.T
    a, b = (part.flatten(0, 1) for part in address.split(noise))  # [D r, m], [D r, n]
    by_column = ((a @ a.T) * (b @ b.T)).unflatten(1, (-1, address.rank)).sum(2)
    return by_column.unflatten(0, (-1, address.rank)).sum(1) / address.rank
