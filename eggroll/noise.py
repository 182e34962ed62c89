"""Low-rank noise on an unmodified model: where it lives, the population's forward, the update.

EGGROLL (arXiv:2511.16652), for a weight W [out, in] and direction j: E_j = A_j B_j^T / sqrt(r), A_j [out, r] and B_j [in, r]
standard normal, so var(E) = 1 for every rank. Member i of a mirrored pair uses direction i // 2 with sign (-1)^i:

    forward   y_i = x W^T + s_i sigma / sqrt(r) (x B_j) A_j^T      one shared product and two skinny ones
    gradient  g = -1/N sum_i f_i s_i E_j                            one product a layer; 1/sigma is left to the step size

No member's weights are ever made. A normal number is a pure function of (seed, draw, parameter, direction, index): the
same in any chunk, on any rank, on CPU and CUDA; equal-shaped layers never share noise. Departures from the paper's code:
noise is drawn in float32 whatever the weights are, pairs share their two products, and embeddings, biases, norms and
the head can be perturbed too.
"""

import fnmatch
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from common.config import ConfigError
from common.philox import normals
from eggroll.config import NoiseConfig

# Floats of noise that an update holds at a time: 64 MB.
UPDATE_BUFFER = 1 << 24


@dataclass(frozen=True)
class Address:
    """Where the noise of one parameter is, and what it looks like.

    A low-rank parameter of shape [m, n] owns (m + n) * rank numbers: A^T [rank, m], then B^T [rank, n].
    A full one owns one number an element.
    """

    name: str
    number: int  # position among the model's parameters: the address
    shape: tuple[int, ...]
    policy: str  # lowrank | full
    rank: int

    @property
    def numbers(self) -> int:
        """How many normals a direction has here."""
        return sum(self.shape) * self.rank if self.policy == "lowrank" else math.prod(self.shape)

    @property
    def blocks(self) -> int:
        """How many Philox blocks of four that takes."""
        return -(-self.numbers // 4)

    def split(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Noise [D, >= numbers] -> A^T [D, r, m] and B^T [D, r, n], views."""
        m, n = self.shape
        edge = self.rank * m
        directions = noise.shape[0]
        return (
            noise[:, :edge].unflatten(1, (self.rank, m)),
            noise[:, edge : edge + self.rank * n].view(directions, self.rank, n),
        )

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


def addresses(model: nn.Module, noise: NoiseConfig, rank: int) -> list[Address]:
    """What is perturbed in `model` under the policy of the configuration, in the model's order.

    Raises: ConfigError where a pattern matches nothing, asks for low rank on a vector, or where nothing is perturbed.
    """
    found, unused = [], set(noise.patterns)
    kinds = kind_of(model)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        policy = getattr(noise, kinds[name])
        for pattern, chosen in noise.patterns.items():
            if fnmatch.fnmatchcase(name, pattern):
                policy = chosen
                unused.discard(pattern)
                break
        if policy == "lowrank" and parameter.ndim != 2:
            raise ConfigError(
                f"algo.noise.patterns asks for lowrank noise on {name} of shape {tuple(parameter.shape)}, which has no rank. "
                "Use full or frozen there."
            )
        if policy != "frozen":
            found.append(Address(name, number, tuple(parameter.shape), policy, rank))
    if unused:
        names = ", ".join(list(kinds)[:4])
        raise ConfigError(
            f"algo.noise.patterns: {sorted(unused)[0]!r} has no effect: it matches no parameter, or an earlier pattern "
            f"takes them all. Parameters are named like {names}, ..."
        )
    if not found:
        raise ConfigError(
            "algo.noise freezes every parameter. Set at least one of matrices, vectors, embeddings, head."
        )
    return found


class Noise:
    """The noise of one run on one model.

    `with noise.members(...)` perturbs the model's forward; `noise.gradients(...)` yields the ES gradient by parameter.
    """

    def __init__(self, model: nn.Module, config: NoiseConfig, *, rank: int, mirrored: bool, seed: int) -> None:
        self.model, self.mirrored, self.seed = model, mirrored, seed
        self.addresses = addresses(model, config, rank)
        self.parameters = dict(model.named_parameters())
        self.device = next(model.parameters()).device
        self.sites = _sites(model, self.addresses)
        self.inputs = _shared_inputs(model, [s.module for s in self.sites if isinstance(s.module, (nn.Linear, Conv1D))])
        self._ids = {
            address.name: (
                torch.full((address.blocks,), address.number, device=self.device),
                torch.arange(address.blocks, device=self.device),
            )
            for address in self.addresses
        }
        self._perturbed: dict[tuple[int, torch.dtype], _Perturbed] = {}

    def draw(
        self, draw: int, addresses: Sequence[Address], directions: Tensor, buffer: Tensor | None = None
    ) -> list[Tensor]:
        """Normals of some parameters, float32, one [D, 4 * blocks] each: views of `buffer`, or of a new one.

        Args: draw: which noise of the run (the step, unless it is reused); directions: int64 [D].
        """
        parameter = torch.cat([self._ids[a.name][0] for a in addresses])
        block = torch.cat([self._ids[a.name][1] for a in addresses])
        if buffer is None:
            buffer = torch.empty(len(directions), 4 * len(block), device=self.device)
        normals(self.seed, draw, parameter, block, directions, buffer)
        return list(buffer.split([4 * a.blocks for a in addresses], dim=1))

    @contextmanager
    def members(self, draw: int, members: range, sigma: float) -> Iterator[None]:
        """Perturb the model's forward: rows are member-major, the same number for each of `members`.

        With mirrored noise `members` starts at an even number and has an even length.
        """
        per_direction = 2 if self.mirrored else 1
        assert members.start % per_direction == 0
        assert len(members) % per_direction == 0
        first, count = members.start // per_direction, len(members) // per_direction
        dtype = next(self.model.parameters()).dtype
        if (count, dtype) not in self._perturbed:
            self._perturbed[count, dtype] = _Perturbed(self, count, dtype)
        perturbed = self._perturbed[count, dtype]
        perturbed.fill(draw, torch.arange(first, first + count, device=self.device), sigma)
        try:
            for module, forward in perturbed.forwards:
                module.forward = forward  # an instance attribute, which hides the class's method
            yield
        finally:
            for module, _ in perturbed.forwards:
                module.__dict__.pop("forward", None)

    def gradients(self, draw: int, fitness: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The ES gradient (to be descended) of each perturbed parameter: -1/N sum_i f_i s_i E_i, float32.

        Streamed: noise is made again for as many parameters or directions as fit `UPDATE_BUFFER`.

        Args: fitness: [N] of all members, on every rank the same.
        """
        fitness = fitness.to(device=self.device, dtype=torch.float32)
        # Mirrored members share E: f_+ E - f_- E. Equal fitness gives exactly zero.
        weights = (fitness[0::2] - fitness[1::2] if self.mirrored else fitness) / -len(fitness)  # [D]
        directions = torch.arange(len(weights), device=self.device)
        for batch in self._batches(len(directions)):
            step = max(1, UPDATE_BUFFER // (4 * sum(a.blocks for a in batch)))
            totals: list[Tensor | None] = [None] * len(batch)
            for start in range(0, len(directions), step):
                part = slice(start, start + step)
                for index, (address, noise) in enumerate(
                    zip(batch, self.draw(draw, batch, directions[part]), strict=True)
                ):
                    product = _weighted_sum(address, noise, weights[part])
                    total = totals[index]
                    totals[index] = product if total is None else total.add_(product)
            for address, total in zip(batch, totals, strict=True):
                assert total is not None
                yield address.name, total

    def _batches(self, directions: int) -> Iterator[list[Address]]:
        batch: list[Address] = []
        size = 0
        for address in self.addresses:
            numbers = 4 * address.blocks * directions
            if batch and size + numbers > UPDATE_BUFFER:
                yield batch
                batch, size = [], 0
            batch.append(address)
            size += numbers
        yield batch


def _weighted_sum(address: Address, noise: Tensor, weights: Tensor) -> Tensor:
    """sum_j w_j E_j of one parameter. noise [D, >= numbers], weights [D] -> [*shape]."""
    if address.policy == "full":
        return torch.mv(noise[:, : address.numbers].T, weights).view(address.shape)
    a, b = address.split(noise)  # [D, r, m], [D, r, n]
    a = (a * (weights / math.sqrt(address.rank))[:, None, None]).flatten(0, 1)  # [D r, m]
    return a.T @ b.reshape(-1, b.shape[-1])  # [m, n]


# --- the perturbed forward ---------------------------------------------------------------------------------------


class _Perturbed:
    """Forwards for all perturbed modules and `count` directions, over one buffer that each chunk of members refills.

    They outlive a step, so that a compiled model or a captured graph sees the same tensors at every step.
    """

    def __init__(self, noise: "Noise", count: int, dtype: torch.dtype) -> None:
        self.noise = noise
        sizes = [4 * address.blocks for address in noise.addresses]
        self.drawn = torch.empty(count, sum(sizes), device=noise.device)
        self.used = self.drawn if dtype == torch.float32 else torch.empty_like(self.drawn, dtype=dtype)
        population = _Population(count, noise.mirrored)
        views = dict(zip((a.name for a in noise.addresses), self.used.split(sizes, dim=1), strict=True))
        self.forwards: list[tuple[nn.Module, Any]] = []
        leaders: dict[int, _SharedInput] = {}
        for site in noise.sites:
            forward = site.perturbed(population, views)
            group = noise.inputs.get(id(site.module))
            if group is not None and isinstance(forward, _LowRankLinear):
                forward = leaders.setdefault(group, _SharedInput()).join(forward)
            self.forwards.append((site.module, forward))

    def fill(self, draw: int, directions: Tensor, sigma: float) -> None:
        """Draw the noise, scaled: sigma / sqrt(r) on B^T, sigma on full noise."""
        parts = self.noise.draw(draw, self.noise.addresses, directions, self.drawn)
        for address, part in zip(self.noise.addresses, parts, strict=True):
            if address.policy == "lowrank":
                address.split(part)[1].mul_(sigma / math.sqrt(address.rank))
            else:
                part.mul_(sigma)
        if self.used is not self.drawn:
            self.used.copy_(self.drawn)


@dataclass(frozen=True)
class _Population:
    """Members side by side in the rows of a batch."""

    directions: int
    mirrored: bool

    def rows(self, x: Tensor, trailing: int = 1) -> Tensor:
        """[rows, ..., d] -> [D, n, d]: a direction's rows together, those of +E first."""
        return x.reshape(self.directions, -1, *x.shape[x.ndim - trailing :])

    def sign(self, u: Tensor) -> Tensor:
        """Negate the rows of -E, in place. u [D, n, ...]."""
        if self.mirrored:
            u[:, u.shape[1] // 2 :].neg_()
        return u

    def each_row(self, noise: Tensor, like: Tensor) -> Tensor:
        """s E of a vector, [D, d] -> one for each row of `like`: [rows, 1, ..., d]."""
        if self.mirrored:
            noise = torch.stack((noise, -noise), dim=1).flatten(0, 1)  # [members, d]
        noise = noise.repeat_interleave(like.shape[0] // noise.shape[0], dim=0)
        return noise.view(like.shape[0], *[1] * (like.ndim - 2), noise.shape[-1])


class _LowRankLinear:
    """y = x W^T + b, plus s (x B) A^T by direction; W is any of nn.Linear and Conv1D."""

    def __init__(self, base: Callable[[Tensor], Tensor], population: _Population, out_t: Tensor, in_t: Tensor) -> None:
        self.base, self.population = base, population
        self.out_t, self.in_t = out_t, in_t  # [D, r, out], [D, r, in]

    def __call__(self, x: Tensor, u: Tensor | None = None) -> Tensor:
        y = self.base(x)
        u = _project(self.population, x, (self.in_t,)) if u is None else u  # [D, n, r]
        grouped = y.view(self.population.directions, -1, y.shape[-1])
        if u.shape[2] == 1 and not y.is_cuda:
            grouped.addcmul_(u, self.out_t)  # an outer product: one pass over y
        else:
            grouped.baddbmm_(u, self.out_t)
        return y


def _project(population: _Population, x: Tensor, in_t: tuple[Tensor, ...]) -> Tensor:
    """x [rows, ..., in], several B^T [D, r, in] -> signed x B, side by side: [D, n, sum r]."""
    grouped = population.rows(x)
    if grouped.shape[1] <= 16 and in_t[0].shape[1] == 1 and not x.is_cuda:
        parts = [(grouped * part).sum(-1, keepdim=True) for part in in_t]  # for few rows cheaper than a batched product
    else:
        parts = [torch.bmm(grouped, part.transpose(1, 2)) for part in in_t]
    return population.sign(parts[0] if len(parts) == 1 else torch.cat(parts, dim=2))


class _SharedInput:
    """Linear layers that read one tensor (q, k, v; gate, up): x B is computed once for all of them."""

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
                rank = layer.in_t.shape[1]
                self.parts = _project(layer.population, x, tuple(one.in_t for one in self.layers)).split(rank, dim=2)
            u = self.parts[index]
            if index == len(self.layers) - 1:
                self.x, self.parts = None, ()  # nothing outlives the forward
            return layer(x, u)

        return forward


@dataclass(frozen=True)
class _Site:
    """A module that holds perturbed parameters. `names`: its own parameter name -> address."""

    module: nn.Module
    names: dict[str, Address]

    def perturbed(self, population: _Population, drawn: dict[str, Tensor]) -> Any:
        """A forward for this module under the population's noise."""
        noise = {own: (address, drawn[address.name]) for own, address in self.names.items()}
        module = self.module
        if isinstance(module, nn.Embedding):
            return _embedding(module, population, *noise["weight"])
        if isinstance(module, (nn.Linear, Conv1D)):
            return _linear(module, population, noise)
        return _norm(module, population, noise)


def _linear(
    module: nn.Linear | Conv1D, population: _Population, noise: dict[str, tuple[Address, Tensor]]
) -> Callable[[Tensor], Tensor]:
    plain: Any = type(module).forward

    def base(x: Tensor) -> Tensor:
        y = plain(module, x)
        if "bias" in noise:
            y = y + population.each_row(noise["bias"][1][:, : y.shape[-1]], y)
        return y

    if "weight" not in noise:
        return base
    address, drawn = noise["weight"]
    if address.policy == "lowrank":
        first, second = address.split(drawn)
        # nn.Linear keeps [out, in], Conv1D [in, out].
        out_t, in_t = (first, second) if isinstance(module, nn.Linear) else (second, first)
        return _LowRankLinear(base, population, out_t, in_t)
    dense = address.dense(drawn)  # [D, out, in] or, for Conv1D, [D, in, out]
    right = dense.transpose(1, 2) if isinstance(module, nn.Linear) else dense

    def full(x: Tensor) -> Tensor:
        y = base(x)
        product = population.sign(torch.bmm(population.rows(x), right))
        y.view(product.shape).add_(product)
        return y

    return full


def _embedding(
    module: nn.Embedding, population: _Population, address: Address, drawn: Tensor
) -> Callable[[Tensor], Tensor]:
    if address.policy == "lowrank":
        rows_t, dims_t = address.split(drawn)  # [D, r, V], [D, r, d]
    else:
        table = address.dense(drawn)  # [D, V, d]

    def forward(ids: Tensor) -> Tensor:
        y = type(module).forward(module, ids).clone()
        grouped = population.rows(ids, trailing=0)  # [D, n]
        if grouped.numel() != ids.numel() or ids.shape[0] == 1:
            # Position ids that all rows share: [1, T] -> every member looks up its own noise.
            raise ConfigError("noise on embeddings needs one row of ids for each member. Freeze this embedding.")
        if address.policy == "lowrank":
            u = rows_t.gather(2, grouped[:, None].expand(-1, rows_t.shape[1], -1)).transpose(1, 2)  # [D, n, r]
            noise = torch.bmm(population.sign(u.contiguous()), dims_t)
        else:
            noise = population.sign(table.gather(1, grouped[..., None].expand(-1, -1, table.shape[2])))
        y.view(noise.shape).add_(noise)
        return y

    return forward


def _norm(
    module: nn.Module, population: _Population, noise: dict[str, tuple[Address, Tensor]]
) -> Callable[[Tensor], Tensor]:
    """A norm with its own weight (and bias) in each row."""

    def per_row(own: str, x: Tensor) -> Tensor | None:
        parameter = getattr(module, own, None)
        if parameter is None or own not in noise:
            return parameter
        return parameter + population.each_row(noise[own][1][:, : parameter.numel()], x)

    def layer_norm(x: Tensor) -> Tensor:
        y = F.layer_norm(x, module.normalized_shape, None, None, module.eps)  # type: ignore[arg-type]
        weight, bias = per_row("weight", x), per_row("bias", x)
        y = y if weight is None else y * weight
        return y if bias is None else y + bias

    def rms_norm(x: Tensor) -> Tensor:
        # transformers' RMS norms multiply by self.weight, which broadcasts; so a weight for each row does.
        parameter = module._parameters["weight"]
        module._parameters["weight"] = per_row("weight", x)  # type: ignore[assignment]
        try:
            return type(module).forward(module, x)
        finally:
            module._parameters["weight"] = parameter

    return layer_norm if isinstance(module, nn.LayerNorm) else rms_norm


def _sites(model: nn.Module, wanted: list[Address]) -> list[_Site]:
    """The modules that use the perturbed parameters (a tied one has two). Raises ConfigError for an unknown kind."""
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
        known = isinstance(module, (nn.Linear, Conv1D, nn.Embedding, nn.LayerNorm)) or (
            "RMSNorm" in type(module).__name__ and set(module._parameters) == {"weight"}
        )
        if not known:
            raise ConfigError(
                f"noise on {next(iter(names.values())).name} is not possible: {type(module).__name__} is none of Linear, "
                f"Conv1D, Embedding, LayerNorm, RMSNorm. Freeze it: 'algo.noise.patterns={{\"*{next(iter(names))}\": frozen}}'."
            )
        sites.append(_Site(module, names))
        seen.update(address.name for address in names.values())
    assert seen == set(address_of), "every perturbed parameter belongs to a module"
    return sites


@torch.no_grad()
def _shared_inputs(model: nn.Module, layers: list[nn.Module]) -> dict[int, int]:
    """id of a linear layer -> number of its group: layers that are handed the very same tensor, found by one forward."""
    inputs: dict[int, Tensor] = {}
    hooks = [
        layer.register_forward_pre_hook(lambda module, args: inputs.__setitem__(id(module), args[0]))
        for layer in layers
    ]
    training = model.training
    try:
        model.eval()
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device), use_cache=False)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    groups: dict[int, list[int]] = {}
    for layer, x in inputs.items():
        groups.setdefault(id(x), []).append(layer)  # the tensors are all alive in `inputs`, so ids are distinct
    return {layer: number for number, group in enumerate(groups.values()) if len(group) > 1 for layer in group}
