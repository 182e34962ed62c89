"""Low-rank noise on an unmodified model: where it lives, the population's forward, the update.

EGGROLL (arXiv:2511.16652), for a weight W [out, in] and direction j: E_j = A_j B_j^T / sqrt(r), A_j
[out, r] and B_j [in, r] standard normal, so var(E) = 1 for every rank. Member i of a mirrored pair
uses direction i // 2 with sign (-1)^i:

    forward   y_i = x W^T + s_i sigma / sqrt(r) (x B_j) A_j^T
    gradient  g = -1/N sum_i f_i s_i E_j

The forward costs one shared product and two skinny ones, the gradient one product per layer;
1/sigma is left to the step size.

No member's weights are ever made. A normal number is a pure function of (seed, draw, parameter,
direction, index): the same in any chunk, on any rank, on CPU and CUDA; equal-shaped layers never
share noise. Departures from the paper's code: noise is drawn in float32 whatever the weights are,
pairs share their two products, and embeddings, biases, norms and the head can be perturbed too.
"""

import fnmatch
import itertools
import math
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from common.config import ConfigError
from common.distributed import fsdp
from common.model.half import multiply, plain_weight
from common.model.quantized import QuantizedLinear
from common.sampling import engine
from common.sampling.random import normals
from eggroll.config import NoiseConfig
from eggroll.fitness import by_direction

T = TypeVar("T")

# Floats of noise that are drawn at a time: 16 MB.
BUFFER = 1 << 22
LOWER = "lower"  # the pattern that stands for the lower half of the blocks; no name is like it
# Rows of a matrix of products, directions x rank, at most: 32 MB of float64.
PRODUCTS = 2048


@dataclass(frozen=True)
class Address:
    """The place of the noise of one parameter: (m + n) * rank numbers of a low-rank [m, n], A^T
    [rank, m], then B^T [rank, n]; of a full one a number per element.
    """

    name: str
    number: int  # position among the model's parameters: the address
    shape: tuple[int, ...]
    policy: str  # lowrank | full
    rank: int

    @property
    def numbers(self) -> int:
        """The number of normals per direction."""
        return sum(self.shape) * self.rank if self.policy == "lowrank" else math.prod(self.shape)

    @property
    def blocks(self) -> int:
        """The number of Philox blocks of four that they take."""
        return -(-self.numbers // 4)

    def split(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Noise [D, >= numbers] -> A^T [D, r, m] and B^T [D, r, n], views."""
        a, b = noise[:, : self.numbers].split([self.rank * size for size in self.shape], 1)
        return a.unflatten(1, (self.rank, -1)), b.unflatten(1, (self.rank, -1))

    def dense(self, noise: Tensor) -> Tensor:
        """Noise [D, >= numbers] of a full parameter -> E [D, *shape], a view."""
        return noise[:, : self.numbers].unflatten(1, self.shape)


def kind_of(model: nn.Module) -> dict[str, str]:
    """Parameter name -> matrices | vectors | embeddings | head. A tied head is the embedding."""
    kinds = {}
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    for name, parameter in model.named_parameters():
        if id(parameter) in embeddings:
            kinds[name] = "embeddings"
        elif head is not None and parameter is head.weight:
            kinds[name] = "head"
        else:
            kinds[name] = "matrices" if parameter.ndim == 2 else "vectors"
    return kinds


def block_of(model: nn.Module) -> dict[str, int]:
    """Parameter name -> the number of its block, of all that are in one."""
    blocks = enumerate(fsdp.blocks(model))
    number = {id(p): index for index, block in blocks for p in block.parameters()}
    return {n: number[id(p)] for n, p in model.named_parameters() if id(p) in number}


def count_trunk(model: nn.Module, addresses: Sequence[Address]) -> int:
    """Return how many blocks of a decoder, from the first on, come before all that is perturbed.

    A model has its parameters in the order of its forward, as far as embeddings, blocks and what
    comes after them go; a head that is tied is an embedding.
    """
    block = block_of(model)
    whole = model.config.get_text_config().num_hidden_layers  # type: ignore[operator, union-attr]
    names = [name for name, _ in model.named_parameters()]
    first = next((number for number, name in enumerate(names) if name in block), 0)
    outside = any(a.name not in block and a.number < first for a in addresses)
    if outside or len(fsdp.blocks(model)) != whole:
        return 0
    return min((block[a.name] for a in addresses if a.name in block), default=whole)


def addresses(
    model: nn.Module, noise: NoiseConfig, rank: int, only: Container[str] | None = None
) -> list[Address]:
    """List what is perturbed in `model`, in its order. only: names, of an adapter's matrices; None
    = any. Raises: ConfigError where a pattern matches nothing or asks for low rank on a vector,
    where the head is tied and has a policy of its own, or where nothing is perturbed.
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
        policy = getattr(noise, kinds[name])
        for pattern, chosen in noise.patterns.items():
            lower = pattern == LOWER and block.get(name, below) < below
            if lower or fnmatch.fnmatchcase(name, pattern):
                policy = chosen
                unused.discard(pattern)
                break
        if policy == "lowrank" and parameter.ndim != 2:
            raise ConfigError(
                f"algo.noise.patterns asks for lowrank noise on {name} of shape"
                f" {tuple(parameter.shape)}, which has no rank. Use full or frozen there."
            )
        if policy != "frozen":
            perturbed.append(Address(name, number, tuple(parameter.shape), policy, rank))
    if unused:
        names = ", ".join(list(kinds)[:4])
        raise ConfigError(
            f"algo.noise.patterns: {sorted(unused)[0]!r} has no effect: it matches no parameter, or"
            f" an earlier pattern takes them all. Parameters are named like {names}, ..."
        )
    if not perturbed:
        raise ConfigError(
            "algo.noise freezes every parameter. Set at least one of matrices, vectors, embeddings,"
            " head."
        )
    return perturbed


@dataclass(frozen=True)
class _Share:
    """The rows of a parameter that this rank holds, all of them unless it is sharded."""

    address: Address  # of the rows as if they were the parameter
    block: Tensor  # int64 [K], the blocks that hold their numbers
    column: Tensor | None  # int64 [address.numbers], where each is in these; None = in order

    @classmethod
    def of(cls, address: Address, parameter: Tensor, device: torch.device) -> "_Share":
        rows, (whole, *others) = fsdp.rows(parameter), address.shape
        if len(rows) == whole:
            return cls(address, torch.arange(address.blocks, device=device), None)
        if address.policy == "lowrank":
            # Of A^T its columns, of B^T all.
            parts = [(k * whole + rows.start, len(rows)) for k in range(address.rank)]
            parts.append((address.rank * whole, address.rank * others[0]))
        else:
            parts = [(rows.start * math.prod(others), len(rows) * math.prod(others))]
        numbers = torch.cat([torch.arange(n, n + count, device=device) for n, count in parts])
        block = torch.unique(numbers // 4)
        column = torch.searchsorted(block, numbers // 4) * 4 + numbers % 4
        return cls(replace(address, shape=(len(rows), *others)), block, column)

    def pick(self, noise: Tensor) -> Tensor:
        """Take the numbers of the rows [D, >= numbers] from the blocks [D, 4 * K]."""
        return noise if self.column is None else noise[:, self.column]


class Noise:
    """The noise of one run on one model."""

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
        self.device = fsdp.device(model)
        self.trunk = count_trunk(model, self.addresses)
        self.sites = _sites(model, self.addresses)
        self.inputs = _shared_inputs(
            model, [s.module for s in self.sites if isinstance(s.module, (nn.Linear, Conv1D))]
        )
        self._blocks = {a.name: torch.arange(a.blocks, device=self.device) for a in self.addresses}
        parameters = dict(model.named_parameters())
        self._shares = [_Share.of(a, parameters[a.name], self.device) for a in self.addresses]
        self._perturbed: dict[tuple[int, torch.dtype], _Perturbed] = {}
        self._population: _Population | None = None  # whose rows a forward has now

    @property
    def kinds(self) -> list[str]:
        """The kinds of parameters that are perturbed: matrices, vectors, embeddings, head."""
        kinds = kind_of(self.model)
        return list(dict.fromkeys(kinds[address.name] for address in self.addresses))

    @property
    def is_lowrank(self) -> bool:
        """Whether any of the noise is of low rank."""
        return any(address.policy == "lowrank" for address in self.addresses)

    def draw(self, draw: int, addresses: Sequence[Address], directions: Tensor) -> list[Tensor]:
        """Normals of some parameters, float32, one [D, 4 * blocks] each: views of one buffer.

        Args: draw: which noise of the run (the step, unless it is reused); directions: int64 [D].
        """
        return self._normals(draw, addresses, [self._blocks[a.name] for a in addresses], directions)

    def _normals(
        self, draw: int, addresses: Sequence[Address], blocks: list[Tensor], directions: Tensor
    ) -> list[Tensor]:
        """Normals of the given blocks of each parameter."""
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
        """Perturb the model's forward: rows are member-major, the same number for each of
        `members`. Yields what an engine needs to sample from them.

        With mirrored noise `members` starts at an even number and has an even length.
        """
        per_direction = 2 if self.mirrored else 1
        assert members.start % per_direction == 0
        assert len(members) % per_direction == 0
        first, count = members.start // per_direction, len(members) // per_direction
        dtype = fsdp.dtype(self.model)
        if (count, dtype) not in self._perturbed:
            self._perturbed[count, dtype] = _Perturbed(self, count, dtype)
        perturbed = self._perturbed[count, dtype]
        perturbed.fill(draw, torch.arange(first, first + count, device=self.device), sigma)
        self._population = perturbed.population
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
        """Give back the buffers of forwards: those that come have other members."""
        self._perturbed.clear()

    @contextmanager
    def narrow(self, members: range) -> Iterator[None]:
        """Let forwards have the rows of some of the perturbed members alone, numbered from 0; with
        mirrored noise they begin and end with a pair.
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
        """Yield what the noise of `members` adds to each matrix, as two factors: its name, left
        [members, out, r], and right [members, r, in].

        Raises: ConfigError for noise that has no such factors, or is of an embedding.
        """
        kinds = kind_of(self.model)
        index = torch.tensor(list(members), device=self.device)
        sign = torch.ones(len(members), device=self.device)
        if self.mirrored:
            index, sign = index // 2, 1.0 - 2 * (index % 2)
        for address in self.addresses:
            if address.policy == "full" or kinds[address.name] == "embeddings":
                raise ConfigError(
                    f"this engine samples from members as adapters, which {address.name} cannot"
                    f" have. Set algo.noise.{kinds[address.name]}=frozen, or engine=native."
                )
            a, b = address.split(self.draw(draw, [address], index)[0])
            scale = sign * (sigma / math.sqrt(address.rank))
            yield address.name, a.transpose(1, 2) * scale[:, None, None], b

    def gradients(self, draw: int, fitness: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the ES gradient (to be descended) of each perturbed parameter: -1/N sum_i f_i s_i
        E_i, float32; of a sharded one for this rank's rows. fitness: [N], on every rank the same.

        Noise is made again, for as many parameters or directions as fit `BUFFER`.
        """
        fitness = fitness.to(device=self.device, dtype=torch.float32)
        weights = by_direction(fitness, self.mirrored) / -len(fitness)  # [D]
        directions = torch.arange(len(weights), device=self.device)
        floats = [4 * len(share.block) * len(weights) for share in self._shares]
        for batch in in_parts(self._shares, floats):
            # More than one parameter fit the buffer with all directions; one alone may take several
            # parts of them.
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
                del total  # none is held while the next is made

    def expected_norm(self, fitness: Tensor) -> float:
        """Return the norm of the gradient that `fitness` [N] is expected to make, as directions are
        almost orthogonal: exact to about 1 / sqrt(the smaller side of a matrix).
        """
        weights = by_direction(fitness, self.mirrored) / len(fitness)
        dimensions = sum(math.prod(address.shape) for address in self.addresses)
        return math.sqrt(dimensions) * weights.square().sum().sqrt().item()

    def gram(self, draw: int, count: int) -> Tensor | None:
        """Return the inner products <E_i, E_j> of the first `count` directions over all that is
        perturbed, float64 [count, count]: what products of updates come to, without the updates.

        None where the weights are sharded, or where it would take longer than it is worth.
        """
        ranks = [address.rank for address in self.addresses if address.policy == "lowrank"]
        if fsdp.of(self.model) or count * max(ranks, default=1) > PRODUCTS:
            return None
        directions = torch.arange(count, device=self.device)
        total = torch.zeros(count, count, dtype=torch.float64, device=self.device)
        for address in self.addresses:
            blocks = self._blocks[address.name]
            # A full parameter's products add up over its elements.
            step = max(1, BUFFER // (4 * count)) if address.policy == "full" else len(blocks)
            for start in range(0, len(blocks), step):
                part = blocks[start : start + step]
                (noise,) = self._normals(draw, [address], [part], directions)
                total += _products(address, noise[:, : address.numbers - 4 * start])
        return total


def in_parts(items: Sequence[T], floats: Sequence[int]) -> Iterator[list[T]]:
    """Cut `items`, of so many `floats` each, into runs that fit `BUFFER`; one that alone does not
    is a run of its own.
    """
    part: list[T] = []
    held = 0
    for item, size in zip(items, floats, strict=True):
        if part and held + size > BUFFER:
            yield part
            part, held = [], 0
        part.append(item)
        held += size
    yield part


def _weighted_sum(address: Address, noise: Tensor, weights: Tensor) -> Tensor:
    """sum_j w_j E_j of one parameter. noise [D, >= numbers], weights [D] -> [*shape]."""
    if address.policy == "full":
        return torch.mv(noise[:, : address.numbers].T, weights).view(address.shape)
    a, b = address.split(noise)  # [D, r, m], [D, r, n]
    a = (a * (weights / math.sqrt(address.rank))[:, None, None]).flatten(0, 1)  # [D r, m]
    return a.T @ b.reshape(-1, b.shape[-1])  # [m, n]


def _products(address: Address, noise: Tensor) -> Tensor:
    """<E_i, E_j> of one parameter, [D, D]; of a full one over the elements in `noise`."""
    if address.policy == "full":
        return noise @ noise.T
    a, b = (part.flatten(0, 1) for part in address.split(noise))  # [D r, m], [D r, n]
    by_column = ((a @ a.T) * (b @ b.T)).unflatten(1, (-1, address.rank)).sum(2)
    return by_column.unflatten(0, (-1, address.rank)).sum(1) / address.rank


class _Perturbed:
    """Forwards for all perturbed modules and `count` directions, over buffers that each chunk of
    members refills: a compiled model or a captured graph sees the same tensors at every step.
    """

    def __init__(self, noise: "Noise", count: int, dtype: torch.dtype) -> None:
        self.noise = noise
        population = self.population = _Population(count, noise.mirrored, dtype, noise.device)
        self.forwards: list[tuple[nn.Module, Any]] = []
        self.refills: list[tuple[Callable[..., None], list[Address]]] = []
        groups: dict[int, _SharedInput] = {}
        for site in noise.sites:
            forward = site.perturbed(population)
            self.refills.append((forward.refill, list(site.names.values())))
            group = noise.inputs.get(id(site.module))
            if group is not None and isinstance(forward, _LowRankLinear):
                forward = groups.setdefault(group, _SharedInput()).join(forward)
            self.forwards.append((site.module, forward))
        self.groups = list(groups.values())
        for shared in self.groups:
            shared.seal()

    def fill(self, draw: int, directions: Tensor, sigma: float) -> None:
        """Draw the noise and hand it to the forwards."""
        blocks = [sum(a.blocks for a in addresses) for _, addresses in self.refills]
        for part in in_parts(self.refills, [4 * len(directions) * count for count in blocks]):
            together = [address for _, addresses in part for address in addresses]
            noise = iter(self.noise.draw(draw, together, directions))
            for refill, addresses in part:
                refill(list(itertools.islice(noise, len(addresses))), sigma)
        for shared in self.groups:
            shared.refill()


class _Population:
    """Members side by side in the rows of a batch. window: the directions whose rows a forward has,
    all of them unless `Noise.narrow` says otherwise.
    """

    def __init__(
        self, directions: int, mirrored: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.all, self.signs = directions, 2 if mirrored else 1
        self.dtype, self.device = dtype, device
        self.window = range(directions)

    @property
    def directions(self) -> int:
        return len(self.window)

    @property
    def members(self) -> int:
        return self.directions * self.signs

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def take(self, buffer: Tensor) -> Tensor:
        """Return the window's part of a buffer by direction or by member, [D or members, ...]."""
        if len(self.window) == self.all:
            return buffer
        each = len(buffer) // self.all
        return buffer[self.window.start * each : self.window.stop * each]

    def signed(self, noise: Tensor, out: Tensor, scale: float) -> None:
        """Write [D, ...] into [members, ...]: +scale E for even members, -scale E for odd ones."""
        by_sign = out.unflatten(0, (self.directions, -1))
        by_sign[:, 0] = noise * scale
        if self.signs == 2:
            by_sign[:, 1] = noise * -scale

    def each_row(self, noise: Tensor, like: Tensor) -> Tensor:
        """Repeat a vector per member, [members, d], for the rows of `like`: [rows, 1, ..., d]."""
        noise = self.take(noise).repeat_interleave(like.shape[0] // self.members, dim=0)
        return noise.view(like.shape[0], *[1] * (like.ndim - 2), noise.shape[-1])


class _LowRankLinear:
    """y = x W^T + b, plus (x B) (s sigma / sqrt(r) A)^T; the sign is kept in A."""

    def __init__(
        self, module: nn.Linear | Conv1D, population: _Population, names: dict[str, Address]
    ) -> None:
        self.address = names["weight"]
        self.transposed = isinstance(module, Conv1D)  # keeps [in, out], nn.Linear [out, in]
        shape = self.address.shape[::-1] if self.transposed else self.address.shape
        self.out_features, self.in_features = shape
        self.base = _Bias(module, population, names)
        # Its weights are read in the forward: sharded ones are there then alone.
        self.module = module
        self.population, self.rank = population, self.address.rank
        self.out_t = population.empty(population.members, self.rank, self.out_features)
        self.in_t = population.empty(population.directions, self.rank, self.in_features)

    def refill(self, noise: list[Tensor], sigma: float) -> None:
        by_name = dict(zip(self.base.names, noise, strict=True))
        out_t, in_t = self.address.split(by_name["weight"])
        if self.transposed:
            out_t, in_t = in_t, out_t
        self.population.signed(out_t, self.out_t, sigma / math.sqrt(self.rank))
        self.in_t.copy_(in_t)
        self.base.refill(noise, sigma)

    def project(self, x: Tensor, in_t: Tensor) -> Tensor:
        """x [rows, ..., in], B^T [D, k, in] -> (x B)^T [D, k, rows of a direction]."""
        in_t = self.population.take(in_t)
        return torch.bmm(in_t, x.reshape(len(in_t), -1, self.in_features).transpose(1, 2))

    def __call__(self, x: Tensor) -> Tensor:
        return self.with_noise(x, self.project(x, self.in_t))

    def with_noise(self, x: Tensor, u: Tensor) -> Tensor:
        """The layer's output, given u = (x B)^T [D, r, n]."""
        shape = (*x.shape[:-1], self.out_features)
        out_t, members = self.population.take(self.out_t), self.population.members
        if self.rank == 1:  # an outer product
            noise = u.reshape(members, -1, 1) * out_t
        else:
            by_sign = u.unflatten(2, (self.population.signs, -1)).permute(0, 2, 3, 1)
            noise = torch.bmm(by_sign.reshape(members, -1, self.rank), out_t)
        if self.base.bias is not None:  # a bias with noise of its own
            return self.base(x).add_(noise.view(shape))
        # The shared product adds itself to the noise: one pass over the output less than the other
        # way round, and one output.
        if "packed" in self.module.__dict__:
            return multiply(self.module, x, noise.view(shape))
        weight, bias = plain_weight(self.module, x.dtype), self.module.bias
        weight_t = weight if self.transposed else weight.T  # [in, out]
        y = noise.view(-1, self.out_features).addmm_(x.reshape(-1, self.in_features), weight_t)
        return (y if bias is None else y.add_(bias)).view(shape)


class _SharedInput:
    """Linear layers that read one tensor (q, k, v; gate, up): x B is computed once for all."""

    def __init__(self) -> None:
        self.layers: list[_LowRankLinear] = []
        self.x: Tensor | None = None
        self.parts: tuple[Tensor, ...] = ()

    def join(self, layer: _LowRankLinear) -> Callable[[Tensor], Tensor]:
        """The layer's forward, with x B taken from here."""
        self.layers.append(layer)
        index = len(self.layers) - 1

        def forward(x: Tensor) -> Tensor:
            if self.x is not x:
                self.x = x
                self.parts = layer.project(x, self.in_t).split(self.ranks, dim=1)
            u = self.parts[index]
            if index == len(self.ranks) - 1:
                self.x, self.parts = None, ()  # nothing outlives the forward
            return layer.with_noise(x, u)

        return forward

    def seal(self) -> None:
        """All layers have joined."""
        self.ranks = [layer.rank for layer in self.layers]
        self.in_t = torch.cat([layer.in_t for layer in self.layers], dim=1)  # [D, sum r, in]

    def refill(self) -> None:
        torch.cat([layer.in_t for layer in self.layers], dim=1, out=self.in_t)


class _Bias:
    """A linear layer without noise on its weight, perhaps with noise on its bias."""

    def __init__(
        self, module: nn.Linear | Conv1D, population: _Population, names: dict[str, Address]
    ) -> None:
        self.names, self.population, self.module = list(names), population, module
        self.forward: Any = type(module).forward
        self.bias: Tensor | None = None
        if "bias" in names:
            self.bias = population.empty(population.members, *names["bias"].shape)

    def refill(self, noise: list[Tensor], sigma: float) -> None:
        if self.bias is not None:
            part = dict(zip(self.names, noise, strict=True))["bias"]
            self.population.signed(part[:, : self.bias.shape[1]], self.bias, sigma)

    def __call__(self, x: Tensor) -> Tensor:
        y = self.forward(self.module, x)
        return y if self.bias is None else y + self.population.each_row(self.bias, y)


class _FullLinear:
    """y = x W^T + b, plus x E^T by member, E dense: for small layers."""

    def __init__(
        self, module: nn.Linear | Conv1D, population: _Population, names: dict[str, Address]
    ) -> None:
        self.address, self.population = names["weight"], population
        self.base = _Bias(module, population, names)
        self.noise = population.empty(population.members, *self.address.shape)
        # [members, in, out]
        self.right = self.noise if isinstance(module, Conv1D) else self.noise.transpose(1, 2)

    def refill(self, noise: list[Tensor], sigma: float) -> None:
        by_name = dict(zip(self.base.names, noise, strict=True))
        self.population.signed(self.address.dense(by_name["weight"]), self.noise, sigma)
        self.base.refill(noise, sigma)

    def __call__(self, x: Tensor) -> Tensor:
        y, members = self.base(x), self.population.members
        by_member = x.reshape(members, -1, x.shape[-1])
        y.view(members, -1, y.shape[-1]).baddbmm_(by_member, self.population.take(self.right))
        return y


class _Embedding:
    """Row lookup in W + s sigma E of the row's member."""

    def __init__(
        self, module: nn.Embedding, population: _Population, names: dict[str, Address]
    ) -> None:
        self.module, self.population, self.address = module, population, names["weight"]
        vocabulary, size = self.address.shape
        rank, self.rows_t = vocabulary, None
        if self.address.policy == "lowrank":
            rank = self.address.rank
            self.rows_t = population.empty(population.members, rank, vocabulary)
        self.dims_t = population.empty(population.members, rank, size)  # of full noise: E itself

    def refill(self, noise: list[Tensor], sigma: float) -> None:
        if self.rows_t is None:
            self.population.signed(self.address.dense(noise[0]), self.dims_t, sigma)
            return
        rows_t, dims_t = self.address.split(noise[0])
        self.population.signed(rows_t, self.rows_t, sigma / math.sqrt(self.address.rank))
        if self.population.signs == 2:
            dims_t = dims_t.repeat_interleave(2, dim=0)
        self.dims_t.copy_(dims_t)

    def __call__(self, ids: Tensor) -> Tensor:
        if ids.shape[0] % self.population.members:
            # GPT-2's position ids may be one row for all: its members cannot be told apart.
            raise ConfigError(
                f"noise on {self.address.name} is not possible: all rows share its lookup. Freeze"
                f" it: 'algo.noise.patterns={{\"{self.address.name}\": frozen}}'."
            )
        y = nn.Embedding.forward(self.module, ids)
        ids = ids.reshape(self.population.members, -1)  # [members, n]
        dims_t = self.population.take(self.dims_t)
        if self.rows_t is None:
            return y + dims_t.gather(1, ids[..., None].expand(-1, -1, y.shape[-1])).view_as(y)
        rows_t = self.population.take(self.rows_t)
        # [members, n, r]
        u = rows_t.gather(2, ids[:, None].expand(-1, rows_t.shape[1], -1)).transpose(1, 2)
        return y + torch.bmm(u, dims_t).view_as(y)


class _Norm:
    """A norm with its own weight (and bias) for each member."""

    def __init__(
        self, module: nn.Module, population: _Population, names: dict[str, Address]
    ) -> None:
        self.module, self.population = module, population
        self.noise = {
            own: population.empty(population.members, *address.shape)
            for own, address in names.items()
        }

    def refill(self, noise: list[Tensor], sigma: float) -> None:
        for noise_of_weight, part in zip(self.noise.values(), noise, strict=True):
            self.population.signed(part[:, : noise_of_weight.shape[1]], noise_of_weight, sigma)

    def of_rows(self, own: str, x: Tensor) -> Tensor | None:
        parameter = getattr(self.module, own, None)
        if parameter is None or own not in self.noise:
            return parameter
        return parameter + self.population.each_row(self.noise[own], x)

    def __call__(self, x: Tensor) -> Tensor:
        weight = self.of_rows("weight", x)
        if isinstance(self.module, nn.LayerNorm):
            y = F.layer_norm(x, self.module.normalized_shape, None, None, self.module.eps)  # type: ignore[arg-type]
            bias = self.of_rows("bias", x)
            y = y if weight is None else y * weight
            return y if bias is None else y + bias
        # transformers' RMS norms multiply by self.weight, which broadcasts; so a weight for each
        # row does.
        parameter = self.module._parameters["weight"]
        self.module._parameters["weight"] = weight  # type: ignore[assignment]
        try:
            return type(self.module).forward(self.module, x)
        finally:
            self.module._parameters["weight"] = parameter


@dataclass(frozen=True)
class _Site:
    """A module that holds perturbed parameters. `names`: its own parameter name -> address."""

    module: nn.Module
    names: dict[str, Address]

    def perturbed(self, population: _Population) -> Any:
        """A forward for this module under a population's noise, with `refill` to give it noise."""
        module = self.module
        if isinstance(module, nn.Embedding):
            return _Embedding(module, population, self.names)
        if not isinstance(module, (nn.Linear, Conv1D)):
            return _Norm(module, population, self.names)
        if "weight" not in self.names:
            return _Bias(module, population, self.names)
        low_rank = self.names["weight"].policy == "lowrank"
        return (_LowRankLinear if low_rank else _FullLinear)(module, population, self.names)


def _sites(model: nn.Module, wanted: list[Address]) -> list[_Site]:
    """The modules that use the perturbed parameters. Raises: ConfigError for an unknown kind."""
    by_parameter = {id(p): n for n, p in model.named_parameters()}
    address_of = {address.name: address for address in wanted}
    sites, seen = [], set()
    for module in model.modules():
        names = {
            own: address_of[by_parameter[id(p)]]
            for own, p in module.named_parameters(recurse=False)
            if by_parameter[id(p)] in address_of
        }
        if not names:
            continue
        # A subclass with a forward of its own may scale or cap: noise would be added to something
        # else.
        kinds = (nn.Linear, Conv1D, nn.Embedding, nn.LayerNorm, QuantizedLinear)
        plain = type(module).forward in [kind.forward for kind in kinds]
        norm = "RMSNorm" in type(module).__name__ and set(module._parameters) == {"weight"}
        if not plain and not norm:
            raise ConfigError(
                f"noise on {next(iter(names.values())).name} is not possible:"
                f" {type(module).__name__} is no plain Linear, Conv1D, Embedding, LayerNorm or"
                f" RMSNorm. Freeze it: 'algo.noise.patterns={{\"*{next(iter(names))}\": frozen}}'."
            )
        sites.append(_Site(module, names))
        seen.update(address.name for address in names.values())
    assert seen == set(address_of), "every perturbed parameter belongs to a module"
    return sites


@torch.no_grad()
def _shared_inputs(model: nn.Module, layers: list[nn.Module]) -> dict[int, int]:
    """id of a linear layer -> the group of layers that are handed the very same tensor, found by
    one forward; of shapes alone, which a plan is made for, none.
    """
    inputs: dict[int, Tensor] = {}
    if fsdp.device(model).type == "meta":
        return {}

    def note(module: nn.Module, args: Any) -> None:
        inputs[id(module)] = args[0]

    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    training = model.training
    ids = torch.zeros(1, 1, dtype=torch.long, device=fsdp.device(model))
    try:
        model.eval()
        with fsdp.gathered(model), fsdp.autocast(model):
            model(input_ids=ids, use_cache=False)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    # The tensors are all alive in `inputs`, so their ids are distinct.
    readers = Counter(map(id, inputs.values()))
    return {layer: id(x) for layer, x in inputs.items() if readers[id(x)] > 1}
