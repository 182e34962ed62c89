"""Low-rank adapters (LoRA, arXiv:2106.09685), through peft, which a run trains in place of a
model's weights.

For a weight W [out, in] the adapter has A [rank, in] and B [out, rank], and the layer computes x
W^T + alpha / rank (x A^T) B^T. W stays as it was loaded: it has no gradient, no optimizer state and
no float32 master; A and B are float32. B starts at zero, so that a run starts from the unchanged
model.
"""

import importlib.util
import logging
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoTokenizer
from transformers.pytorch_utils import Conv1D

from common.config import ADAPTER, AdapterConfig, ConfigError, ModelConfig
from common.device import device_of
from common.distributed import Context, is_sharded, sharding_of
from common.model import quantized
from common.model.load import load_model
from common.model.packed_linear import adapter_change
from common.system import first_line, replacing, safe_read

log = logging.getLogger("clutch")

# The fields of peft's settings that make an adapter more than plain LoRA.
BEYOND_LORA = ("use_dora", "modules_to_save", "trainable_token_indices", "target_parameters")
BEYOND_LORA += ("lora_bias", "layer_replication", "alora_invocation_tokens")
# Models with kernels that use the matrix out_proj of a state space directly, without its adapter.
STATE_SPACES = ("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2")
QUIET = ("The following (rank|alpha)_pattern keys", "fan_in_fan_out is set to False")
QUIET += ("`is_gradient_checkpointing` is deprecated", "Model has `tie_word_embeddings=True`")


class Adapter:
    """The adapter of a model, whose own weights are frozen.

    Args:
        model: the model, plain or sharded, which is changed in place.
        seed: the seed of the matrices' initial values.
        commit: the commit of the model on the hub, which is saved with the matrices.
    Raises: ConfigError if peft is not installed, or if the model does not support such an adapter.
    """

    def __init__(
        self,
        model: Any,
        config: AdapterConfig,
        context: Context,
        seed: int,
        commit: str | None = None,
    ) -> None:
        check_installed("model.adapter")
        self.model, self.config = model, config
        with torch.random.fork_rng(devices=[]), sharding_of(model).gathered(), peft_of_today():
            torch.default_generator.manual_seed(seed)
            # Gathered, since peft mistakes a sharded weight for tensor parallelism.
            self.peft = _attach(model, config, context)
        self.peft.peft_config["default"].revision = commit
        for parameter in model.parameters():
            # peft has frozen only the gathered weights; adapters are unsharded on every rank
            if is_sharded(parameter):
                parameter.requires_grad_(False)
        self.layers = [module for module in model.modules() if hasattr(module, "lora_A")]
        for layer in self.layers:
            layer.cast_input_dtype_enabled = False  # autocast does it
            drops = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
            layer.lora_dropout["default"] = drops.eval()
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        for parameter in self.parameters.values():
            parameter.data = parameter.data.float()
            if context.joined:
                dist.broadcast(parameter.data, 0)
        held = {n: p.detach() for n, p in self.parameters.items() if not p.is_meta}
        self.initial = {name: tensor.cpu().clone() for name, tensor in held.items()}

    @property
    def size(self) -> int:
        """The number of the adapter's weights."""
        return sum(parameter.numel() for parameter in self.parameters.values())

    @property
    def rank(self) -> int:
        """The rank of the adapter's matrices."""
        return self.peft.peft_config["default"].r

    def describe(self) -> str:
        """Describe for the plan the adapter that is trained."""
        begun = f" from {self.config.path}" if self.config.path else ""
        return f"adapter of rank {self.rank}{begun}, {self.size / 1e6:.2f}M parameters"

    @contextmanager
    def initially(self) -> Iterator[None]:
        """Restore the initial model for the block: without the adapter, or with the adapter that
        the run started from.
        """
        if self.config.path is None:
            with self.peft.disable_adapter():
                yield
            return
        trained = {name: parameter.data for name, parameter in self.parameters.items()}
        try:
            for name, parameter in self.parameters.items():
                parameter.data = self.initial[name].to(parameter.device)
            yield
        finally:
            for name, parameter in self.parameters.items():
                parameter.data = trained[name]

    @contextmanager
    def dropping(self, key: str) -> Iterator[None]:
        """Apply model.adapter.dropout to the inputs of the adapter in the block; `key` seeds it."""
        if not self.config.dropout:
            yield
            return
        device = device_of(self.model)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(random.Random(key).getrandbits(63))
            try:
                for layer in self.layers:
                    layer.lora_dropout.train()
                yield
            finally:
                for layer in self.layers:
                    layer.lora_dropout.train(layer.training)

    @torch.no_grad()
    def reset(self) -> None:
        """Reset the matrices to their initial values."""
        for name, parameter in self.parameters.items():
            parameter.copy_(self.initial[name])

    def load(self, folder: Path) -> None:
        """Load the matrices from a folder that `save` wrote."""
        import peft

        with peft_of_today():
            weights = peft.load_peft_weights(str(folder), device="cpu")
            peft.set_peft_model_state_dict(self.peft, weights)

    def save(self, folder: Path, tokenizer: Any) -> None:
        """Write a folder that peft and vLLM load, atomically."""
        with replacing(folder) as temporary:
            self.write(temporary)
            tokenizer.save_pretrained(temporary)

    def write(self, folder: Path) -> None:
        """Write the matrices and their settings into a folder."""
        with peft_of_today():
            # Otherwise peft queries the hub to find out whether the embedding has grown.
            self.peft.save_pretrained(str(folder), save_embedding_layers=False)

    def merged(self, held: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """Return the weights of the plain model with the adapter merged into them, float32 on the
        CPU.

        Args: held: the gathered weights of a sharded model; None = the model's own.
        """
        names = {id(module): name for name, module in self.model.named_modules()}
        tensors = quantized.plain_weights(self.model, held)
        for layer in self.layers:
            name = names[id(layer)]
            down, up = (tensors.pop(f"{name}.lora_{part}.default.weight") for part in "AB")
            base = f"{name}.base_layer.weight"
            tensors[base] = tensors[base] + adapter_change(layer, down, up)
        return {name.replace(".base_layer.", "."): tensor for name, tensor in tensors.items()}

    def __contains__(self, name: str) -> bool:
        return name in self.parameters


@contextmanager
def peft_of_today() -> Iterator[None]:
    """Silence in the block the warnings of peft 0.21 about a property that transformers 5.23 has
    renamed, tied layers (refused here), GPT-2's layers (transposed by peft itself), and the experts
    of a mixture (which get no adapter).
    """
    with warnings.catch_warnings():
        for text in QUIET:
            warnings.filterwarnings("ignore", text)
        yield


def check_installed(key: str) -> None:
    """Raise ConfigError if peft is not installed.

    Args: key: the setting that needs it.
    """
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(f"{key} needs a package: pip install -e '.[lora]'. Or leave it out.")


def merge_folder(model: Any, given: str, where: str, key: str) -> Any:
    """Return the plain `model` with the adapter of a folder merged into its weights.

    Args: where, key: the model and the option, for errors.
    Raises: ConfigError for an adapter that cannot be read or does not fit the model.
    """
    check_installed(key)
    with peft_of_today():
        return _read(model, given, where, key).merge_and_unload(safe_merge=True)


def load_adapted(folder: Path) -> tuple[Any, Any]:
    """Load an adapter together with the model that it was trained on, and the tokenizer. For a
    model of text and images, the base model is its text part. Raises: ConfigError.
    """
    saved, key = safe_read.read(folder / ADAPTER, dict), "model.adapter.path"
    check_installed(key)
    path, revision = saved["base_model_name_or_path"], saved.get("revision")
    given = ModelConfig(name="hf", path=path, revision=revision, gguf_file=None, attention="sdpa")
    model, _ = load_model(given, None, torch.float32, torch.device("cpu"), progress=False)
    with peft_of_today():
        adapted = _read(model, str(folder), f"the model {path}", key)
    return adapted, AutoTokenizer.from_pretrained(folder)


# --- inside


def _attach(model: Any, config: AdapterConfig, context: Context) -> Any:
    """Add an adapter to `model` and freeze its own weights. Return the peft model that wraps it."""
    import peft

    if config.path is not None:  # rank 0 alone reads it
        adapted = (
            _read(model, config.path, "the model", "model.adapter.path") if context.main else None
        )
        context.meet()
        settings_of_ranks = context.gather_objects(adapted and adapted.peft_config["default"])
        adapted = adapted or peft.get_peft_model(model, settings_of_ranks[0])
    else:
        assert isinstance(config.targets, str)
        targets = [target.strip() for target in config.targets.split(",")]
        if targets == ["all-linear"]:
            targets = _attention_of_mixture(model) or targets
        _check_targets(model, targets, config)
        plain = model.config.model_type in STATE_SPACES
        settings = peft.LoraConfig(
            r=config.rank or 0,
            lora_alpha=config.alpha,
            lora_dropout=config.dropout,
            target_modules=targets[0] if targets == ["all-linear"] else targets,
            exclude_modules=["out_proj"] if plain and targets == ["all-linear"] else None,
            task_type="CAUSAL_LM",
        )
        here = torch.device("meta") if context.device.planned else nullcontext()
        try:
            with here:
                adapted = peft.get_peft_model(model, settings)
        except ValueError as error:
            raise ConfigError(
                f"model.adapter.targets={config.targets!r} is refused: {first_line(error)}"
            ) from error
    _check_places(model, f"model.adapter.{'path' if config.path else 'targets'}")
    return adapted


def _attention_of_mixture(model: Any) -> list[str]:
    """Return the last parts of the names of a mixture's linear attention layers, which get its
    adapter; empty for other models. peft would adapt experts as well.
    """
    kernels = [m.weight for m in model.modules() if isinstance(m, nn.Conv1d)]
    if not any(p.ndim == 3 and all(p is not k for k in kernels) for p in model.parameters()):
        return []
    places = [name.split(".") for name, module in model.named_modules() if _is_matrix(module)]
    return sorted({place[-1] for place in places if "att" in "".join(place[-2:-1])})


def _check_targets(model: Any, targets: list[str], config: AdapterConfig) -> None:
    """Raise ConfigError if a target is not in the model, or has no matrix, or if the rank exceeds
    that of a targeted linear layer.
    """
    linear = {name.rsplit(".", 1)[-1] for name, m in model.named_modules() if _is_matrix(m)}
    ends, head = [target.rsplit(".", 1)[-1] for target in targets], model.get_output_embeddings()
    for target, end in zip(targets, ends, strict=True):
        if target != "all-linear" and end not in linear:
            raise ConfigError(
                f"model.adapter.targets={config.targets!r}: the model has no module {target!r}"
                f" with a matrix. Modules: {', '.join(sorted(linear))}."
            )
    for name, module in model.named_modules():
        last = name.rsplit(".", 1)[-1]
        wanted = last in ends or (ends == ["all-linear"] and module is not head)
        if not (wanted and isinstance(module, (nn.Linear, Conv1D))):
            continue
        sizes = quantized.shape_of(module)
        if (config.rank or 0) > min(sizes):
            raise ConfigError(
                f"model.adapter.rank={config.rank} is more than {name} can have, a matrix of"
                f" {sizes[0]} x {sizes[1]}. Give at most {min(sizes)}; 8 to 64 is usual."
            )


def _check_base(saved: dict[str, Any], model: Any, key: str) -> None:
    """Warn if an adapter was trained on the weights of another model."""
    then, now = saved.get("base_model_name_or_path"), model.name_or_path
    if then and now and Path(then).name != Path(now).name:
        log.warning(
            "%s was trained beside the weights of %s, and this model is %s. If these are other"
            " weights, the adapter fits them in shape alone.",
            *(key, then, now),
        )


def _is_matrix(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2


def _check_places(model: Any, key: str) -> None:
    """Raise ConfigError if an adapter is on an embedding, on the head, or on experts, to which peft
    adds one if the dense layers of a mixture are requested.
    """
    adapted = {name: m for name, m in model.named_modules() if hasattr(m, "lora_A")}
    others = [name for name, module in adapted.items() if not hasattr(module, "parameter_name")]
    if len(others) < len(adapted):
        ends = sorted({name.rpartition(".")[2] for name in others})
        raise ConfigError(
            f"{key} puts an adapter on the experts of this mixture, which is not supported. Name"
            f" the other layers: model.adapter.targets={','.join(ends)}."
        )
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    for name, module in model.named_modules():
        base = getattr(module, "base_layer", None)
        if base is None or not (module is head or isinstance(base, nn.Embedding)):
            continue
        what, other = ("head", embedding) if module is head else ("embedding", head)
        tied = getattr(other, "base_layer", other).weight is base.weight
        why = (
            "which is tied: the adapter would change one of head and embedding and not the other"
            if tied
            else "whose weight is used as it is wherever the model samples and learns"
        )
        raise ConfigError(
            f"{key} puts an adapter on {name}, the model's {what}, {why}. Leave it out;"
            " model.adapter.targets=all-linear is every linear layer but the head."
        )


def _read(model: Any, given: str, where: str, key: str) -> Any:
    """Return the peft model of `model` with the adapter of a folder.

    Args: where, key: the model and the setting, for errors.
    Raises: ConfigError for an adapter that cannot be read or does not fit the model.
    """
    import peft

    folder, key = Path(given).expanduser(), f"{key}={given!r}"
    settings = folder / ADAPTER
    if not settings.is_file():
        raise ConfigError(
            f"{key} is not a folder with a LoRA adapter: there is no {settings.absolute()}. Give"
            " the folder that peft's save_pretrained wrote, such as RUN/adapter of a run with"
            " model.adapter; one on the hub comes with: hf download ID --local-dir FOLDER."
        )
    try:
        saved = safe_read.read(settings, dict)
    except safe_read.DamagedError as error:
        raise ConfigError(
            f"{key}: {error} Copy it again, or write it with save_pretrained."
        ) from None
    kind = saved.get("peft_type")
    beyond = [name for name in BEYOND_LORA if saved.get(name)]
    if saved.get("bias", "none") != "none":
        beyond.append("bias")
    if kind != "LORA" or beyond:
        kind = f"with {', '.join(beyond)}" if kind == "LORA" else f"of the kind {kind}"
        raise ConfigError(f"{key} holds an adapter {kind}. Give a plain LoRA adapter.")
    _check_base(saved, model, key)
    try:
        warnings.filterwarnings("error", "Found missing adapter keys", UserWarning)
        options = {"is_trainable": True, "torch_device": "cpu"}  # else a Mac's own accelerator
        adapted = peft.PeftModel.from_pretrained(model, str(folder), **options)
        # from_pretrained drops the keys for which the model has no place, without a warning;
        # load_adapter returns them.
        surplus = sorted(adapted.load_adapter(str(folder), "default", **options).unexpected_keys)
    except (
        *(OSError, ValueError, KeyError, TypeError, RuntimeError),
        *(SafetensorError, UserWarning),
    ) as error:
        raise ConfigError(
            f"{key} does not go into {where}: {first_line(error)}. It must be an adapter of this"
            " very model, whole."
        ) from error
    if surplus:
        more = f" and {len(surplus) - 3} more" if len(surplus) > 3 else ""
        raise ConfigError(
            f"{key} holds {len(surplus)} weights for which {where} has no place:"
            f" {', '.join(surplus[:3])}{more}. It must be an adapter of this very model; one with"
            " more layers or other modules is not cut to fit."
        )
    return adapted
