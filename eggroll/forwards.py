"""The forwards of a population: modules that add the noise of the row's member to their output."""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from common.config import ConfigError
from common.device import autocast_of, device_of
from common.distributed import sharding_of
from common.model import QuantizedLinear, WideBias, evaluating, multiply, plain_weight
from eggroll.addresses import BUFFER, Address, in_parts


class Perturbed:
    """The forwards of all perturbed modules, over buffers that are refilled for each chunk of
    members, so that a compiled model or a captured graph sees the same tensors at every step.

    Args:
        sites: the modules.
        inputs: the groups of layers with the same input, as `find_shared_inputs` returns them.
        members: the members of a chunk.
    """

    def __init__(self, sites: Sequence["Site"], inputs: dict[int, int], members: "Members") -> None:
        self.members = members
        self.forwards: list[tuple[nn.Module, Any]] = []
        self.refills: list[tuple[Callable[..., None], dict[str, Address]]] = []
        groups: dict[int, _SharedInput] = {}
        for site in sites:
            forward = site.perturbed(members)
            self.refills.append((forward.refill, site.names))
            group = inputs.get(id(site.module))
            if group is not None and isinstance(forward, _LowRankLinear):
                forward = groups.setdefault(group, _SharedInput()).join(forward)
            self.forwards.append((site.module, forward))
        self.groups = list(groups.values())
        for shared in self.groups:
            shared.seal()

    def fill(self, draw: Callable[[Sequence[Address]], list[Tensor]], sigma: float) -> None:
        """Draw the noise and copy it into the buffers of the forwards.

        Args:
            draw: returns the noise of some parameters.
            sigma: the standard deviation of the noise.
        """
        blocks = [sum(a.blocks for a in names.values()) for _, names in self.refills]
        floats = [4 * self.members.all * count for count in blocks]
        for part in in_parts(self.refills, floats, BUFFER):
            together = [address for _, names in part for address in names.values()]
            noise = iter(draw(together))
            for refill, names in part:
                refill(dict(zip(names, noise, strict=False)), sigma)  # `noise` is an iterator
        for shared in self.groups:
            shared.refill()


class Members:
    """The members whose rows are side by side in a batch.

    Args:
        directions: the number of directions in a chunk.
        mirrored: whether each direction has two members, with the signs + and -.
    Attributes:
        window: the directions whose rows the current forward has; all, unless `Noise.narrow` limits
            them.
    """

    def __init__(
        self, directions: int, mirrored: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.all, self.signs = directions, 2 if mirrored else 1
        self.dtype, self.device = dtype, device
        self.window = range(directions)

    @property
    def directions(self) -> int:
        """The number of directions whose rows the current forward has."""
        return len(self.window)

    @property
    def members(self) -> int:
        """The number of members whose rows the current forward has."""
        return self.directions * self.signs

    def empty(self, *shape: int) -> Tensor:
        """Return an uninitialised buffer in the dtype of the forwards."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def take(self, buffer: Tensor) -> Tensor:
        """Return the window's part of a buffer that has an entry per direction or per member, [D or
        members, ...].
        """
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
        """Repeat a vector per member, [members, d], for the rows of `like` [rows, ..., d], to the
        shape [rows, 1, ..., d].
        """
        noise = self.take(noise).repeat_interleave(like.shape[0] // self.members, dim=0)
        return noise.view(like.shape[0], *[1] * (like.ndim - 2), noise.shape[-1])


class _LowRankLinear:
    """y = x W^T + b, plus (x B) (s sigma / sqrt(r) A)^T; the buffer of A includes the sign s."""

    def __init__(
        self, module: nn.Linear | Conv1D, population: Members, names: dict[str, Address]
    ) -> None:
        self.address = names["weight"]
        self.transposed = isinstance(module, Conv1D)  # keeps [in, out], nn.Linear [out, in]
        shape = self.address.shape[::-1] if self.transposed else self.address.shape
        self.out_features, self.in_features = shape
        self.base = _Bias(module, population, names)
        # Weights are read in the forward, because sharded ones exist only then.
        self.module = module
        self.population, self.rank = population, self.address.rank
        self.out_t = population.empty(population.members, self.rank, self.out_features)
        self.in_t = population.empty(population.directions, self.rank, self.in_features)

    def refill(self, noise: dict[str, Tensor], sigma: float) -> None:
        out_t, in_t = self.address.split(noise["weight"])
        if self.transposed:
            out_t, in_t = in_t, out_t
        self.population.signed(out_t, self.out_t, sigma / math.sqrt(self.rank))
        self.in_t.copy_(in_t)
        self.base.refill(noise, sigma)

    def project(self, x: Tensor, in_t: Tensor) -> Tensor:
        """Return (x B)^T [D, r, rows of a direction] from x [rows, ..., in] and B^T [D, r, in]."""
        in_t = self.population.take(in_t)
        return torch.bmm(in_t, x.reshape(len(in_t), -1, self.in_features).transpose(1, 2))

    def __call__(self, x: Tensor) -> Tensor:
        return self.with_noise(x, self.project(x, self.in_t))

    def with_noise(self, x: Tensor, u: Tensor) -> Tensor:
        """Return the layer's output, given u = (x B)^T [D, r, n]."""
        shape = (*x.shape[:-1], self.out_features)
        out_t, members = self.population.take(self.out_t), self.population.members
        if self.rank == 1:  # an outer product
            noise = u.reshape(members, -1, 1) * out_t
        else:
            by_sign = u.unflatten(2, (self.population.signs, -1)).permute(0, 2, 3, 1)
            noise = torch.bmm(by_sign.reshape(members, -1, self.rank), out_t)
        module = self.module
        if self.base.bias is not None and not isinstance(module, WideBias):
            return self.base(x).add_(noise.view(shape))  # a bias with noise of its own
        # Add the shared product to the noise in place: this saves one pass over the output and one
        # output tensor.
        to_bias = self.base.of_rows(x)
        if "packed" in module.__dict__:
            return multiply(module, x, noise.view(shape), to_bias)
        weight, bias = plain_weight(module, x.dtype), module.bias
        weight_t = weight if self.transposed else weight.T  # [in, out]
        y = noise.view(-1, self.out_features).addmm_(x.reshape(-1, self.in_features), weight_t)
        if isinstance(module, WideBias):
            return module.add_bias(y.view(shape), to_bias)
        return (y if bias is None else y.add_(bias)).view(shape)


class _SharedInput:
    """Linear layers that read the same tensor (q, k, v; gate, up): x B is computed once for all of
    them.
    """

    def __init__(self) -> None:
        self.layers: list[_LowRankLinear] = []
        self.x: Tensor | None = None
        self.parts: tuple[Tensor, ...] = ()

    def join(self, layer: _LowRankLinear) -> Callable[[Tensor], Tensor]:
        """Add a layer, and return its forward, which takes x B from here."""
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
        """Allocate the common buffer, once all layers have joined."""
        self.ranks = [layer.rank for layer in self.layers]
        self.in_t = torch.cat([layer.in_t for layer in self.layers], dim=1)  # [D, sum r, in]

    def refill(self) -> None:
        torch.cat([layer.in_t for layer in self.layers], dim=1, out=self.in_t)


class _Bias:
    """A linear layer without noise on its weight; its bias may have noise."""

    def __init__(
        self, module: nn.Linear | Conv1D, population: Members, names: dict[str, Address]
    ) -> None:
        self.population, self.module = population, module
        self.forward: Any = type(module).forward
        self.bias: Tensor | None = None
        if "bias" in names:
            self.bias = population.empty(population.members, *names["bias"].shape)

    def refill(self, noise: dict[str, Tensor], sigma: float) -> None:
        if self.bias is not None:
            part = noise["bias"][:, : self.bias.shape[1]]
            self.population.signed(part, self.bias, sigma)

    def of_rows(self, x: Tensor) -> Tensor | float:
        """Return the bias's noise for the rows of x; 0.0 without noise."""
        return 0.0 if self.bias is None else self.population.each_row(self.bias, x)

    def __call__(self, x: Tensor) -> Tensor:
        module, packed = self.module, "packed" in self.module.__dict__
        if isinstance(module, WideBias):
            noise = self.of_rows(x)
            return multiply(module, x, None, noise) if packed else module.with_noise(x, noise)
        y = multiply(module, x) if packed else self.forward(module, x)
        return y if self.bias is None else y + self.of_rows(y)


class _FullLinear:
    """y = x W^T + b, plus x E^T with a dense E per member: for small layers."""

    def __init__(
        self, module: nn.Linear | Conv1D, population: Members, names: dict[str, Address]
    ) -> None:
        self.address, self.population = names["weight"], population
        self.base = _Bias(module, population, names)
        self.noise = population.empty(population.members, *self.address.shape)
        # [members, in, out]
        self.right = self.noise if isinstance(module, Conv1D) else self.noise.transpose(1, 2)

    def refill(self, noise: dict[str, Tensor], sigma: float) -> None:
        self.population.signed(self.address.dense(noise["weight"]), self.noise, sigma)
        self.base.refill(noise, sigma)

    def __call__(self, x: Tensor) -> Tensor:
        y, members = self.base(x), self.population.members
        by_member = x.reshape(members, -1, x.shape[-1])
        y.view(members, -1, y.shape[-1]).baddbmm_(by_member, self.population.take(self.right))
        return y


class _Embedding:
    """Rows of W + s sigma E, with the noise E of the row's member."""

    def __init__(
        self, module: nn.Embedding, population: Members, names: dict[str, Address]
    ) -> None:
        self.module, self.population, self.address = module, population, names["weight"]
        vocabulary, size = self.address.shape
        rank, self.rows_t = vocabulary, None
        if self.address.form == "lowrank":
            rank = self.address.rank
            self.rows_t = population.empty(population.members, rank, vocabulary)
        self.dims_t = population.empty(population.members, rank, size)  # for full noise: E itself

    def refill(self, noise: dict[str, Tensor], sigma: float) -> None:
        if self.rows_t is None:
            self.population.signed(self.address.dense(noise["weight"]), self.dims_t, sigma)
            return
        rows_t, dims_t = self.address.split(noise["weight"])
        self.population.signed(rows_t, self.rows_t, sigma / math.sqrt(self.address.rank))
        if self.population.signs == 2:
            dims_t = dims_t.repeat_interleave(2, dim=0)
        self.dims_t.copy_(dims_t)

    def __call__(self, ids: Tensor) -> Tensor:
        if ids.shape[0] % self.population.members:
            # GPT-2's position ids may be one row for the whole batch, without members.
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
    """A norm with its own weight (and bias) per member. Both are float32, because the weights of a
    norm are near 1, where bfloat16 would round small noise away.
    """

    def __init__(self, module: nn.Module, population: Members, names: dict[str, Address]) -> None:
        self.module, self.population = module, population
        self.noise = {
            own: torch.empty((population.members, *address.shape), device=population.device)
            for own, address in names.items()
        }

    def refill(self, noise: dict[str, Tensor], sigma: float) -> None:
        for own, held in self.noise.items():
            self.population.signed(noise[own][:, : held.shape[1]], held, sigma)

    def of_rows(self, own: str, x: Tensor) -> Tensor | None:
        parameter = getattr(self.module, own, None)
        if parameter is None or own not in self.noise:
            return parameter
        return parameter.float() + self.population.each_row(self.noise[own], x)

    def __call__(self, x: Tensor, *gate: Tensor) -> Tensor:
        weight = self.of_rows("weight", x)
        if isinstance(self.module, nn.LayerNorm):
            y = F.layer_norm(x, self.module.normalized_shape, None, None, self.module.eps)  # type: ignore[arg-type]
            bias = self.of_rows("bias", x)
            y = y if weight is None else y * weight
            return (y if bias is None else y + bias).to(x.dtype)
        # transformers' RMS norms multiply by self.weight, which broadcasts; a weight per row does
        # so too.
        parameter = self.module._parameters["weight"]
        self.module._parameters["weight"] = weight  # type: ignore[assignment]
        try:
            return type(self.module).forward(self.module, x, *gate).to(x.dtype)
        finally:
            self.module._parameters["weight"] = parameter


@dataclass(frozen=True)
class Site:
    """A module that holds perturbed parameters.

    Attributes:
        module: the module.
        names: the address of each perturbed parameter, by the parameter's name in the module.
    """

    module: nn.Module
    names: dict[str, Address]

    def perturbed(self, population: Members) -> Any:
        """Return the module's forward under the noise of a population; its method `refill` sets the
        noise.
        """
        module = self.module
        if isinstance(module, nn.Embedding):
            return _Embedding(module, population, self.names)
        if not isinstance(module, (nn.Linear, Conv1D)):
            return _Norm(module, population, self.names)
        if "weight" not in self.names:
            return _Bias(module, population, self.names)
        low_rank = self.names["weight"].form == "lowrank"
        return (_LowRankLinear if low_rank else _FullLinear)(module, population, self.names)


def find_sites(model: nn.Module, wanted: list[Address]) -> list[Site]:
    """Return the modules that use the perturbed parameters. Raises: ConfigError if a module is of a
    kind that cannot be perturbed.
    """
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
        # A subclass with its own forward may scale or cap its output; the noise must be added
        # before that.
        kinds = (nn.Linear, Conv1D, WideBias, nn.Embedding, nn.LayerNorm, QuantizedLinear)
        plain = type(module).forward in [kind.forward for kind in kinds]
        norm = "RMSNorm" in type(module).__name__ and set(module._parameters) == {"weight"}
        norm = norm and not hasattr(module, "n_groups")  # Falcon-H1 splits the weight into groups
        if not plain and not norm:
            name = next(iter(names.values())).name
            alike = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)  # in every block
            raise ConfigError(
                f"noise on {name} is not possible: {type(module).__name__} is no plain Linear,"
                " Conv1D, Embedding, LayerNorm or RMSNorm. Freeze it:"
                f" 'algo.noise.patterns={{\"{alike}\": frozen}}'; or perturb the matrices alone:"
                " algo.noise.matrices=lowrank algo.noise.vectors=frozen."
            )
        sites.append(Site(module, names))
        seen.update(address.name for address in names.values())
    assert seen == set(address_of), "every perturbed parameter belongs to a module"
    return sites


@torch.no_grad()
def find_shared_inputs(model: nn.Module, layers: list[nn.Module]) -> dict[int, int]:
    """Group the linear layers that receive the same tensor, found by one forward. Returns the
    number of the group by the layer's id; empty for a model on the meta device, which only has
    shapes.
    """
    inputs: dict[int, Tensor] = {}
    if device_of(model).type == "meta":
        return {}

    def note(module: nn.Module, args: Any) -> None:
        inputs[id(module)] = args[0]

    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    ids = torch.zeros(1, 1, dtype=torch.long, device=device_of(model))
    try:
        with evaluating(model), sharding_of(model).gathered(), autocast_of(model):
            model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    # The tensors are all alive in `inputs`, so their ids are distinct.
    readers = Counter(map(id, inputs.values()))
    return {layer: id(x) for layer, x in inputs.items() if readers[id(x)] > 1}
