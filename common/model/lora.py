"""Low-rank adapters (LoRA, arXiv:2106.09685), through peft."""

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from common.config import ConfigError, LoraConfig
from common.distributed import fsdp


@contextmanager
def peft_of_today() -> Iterator[None]:
    """Meanwhile peft 0.21 may look at a property that transformers 5.23 has renamed, without a
    warning.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning
        )
        yield


def check_lora(model: Any, config: LoraConfig) -> None:
    """Raise ConfigError where peft is not installed or a target is not in the model."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "algo.lora.rank needs a package: pip install 'clutch[lora]'. Or set algo.lora.rank=0."
        )
    names = sorted(
        {
            name.rsplit(".", 1)[-1]
            for name, module in model.named_modules()
            if hasattr(module, "weight")
        }
    )
    for target in _targets(config):
        if target != "all-linear" and target not in names:
            raise ConfigError(
                f"algo.lora.targets={config.targets!r}: the model has no module {target!r}."
                f" Modules: {', '.join(names)}."
            )


def add_lora(model: Any, config: LoraConfig) -> Any:
    """Put adapters into `model` and freeze its own weights. Return the peft model around it; see
    `check_lora`.
    """
    import peft

    targets = _targets(config)
    adapters = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=targets[0] if targets == ["all-linear"] else targets,
        task_type="CAUSAL_LM",
        lora_dropout=0.0,
    )
    with (
        peft_of_today(),
        fsdp.gathered(model),
    ):  # peft takes a sharded weight for one of tensor parallelism
        found = peft.get_peft_model(model, adapters)
    for parameter in model.parameters():
        # peft has frozen what was gathered of it; adapters are whole on every rank
        if isinstance(parameter, DTensor):
            parameter.requires_grad_(False)
    return found


@torch.no_grad()
def merge_rows(model: Any) -> None:
    """Add adapters, which every rank has whole, to this rank's rows of the sharded weights."""
    for module in model.modules():
        if hasattr(module, "get_delta_weight"):
            weight = module.base_layer.weight
            rows = fsdp.rows(weight)
            for adapter in module.active_adapters:
                fsdp.local(weight).add_(module.get_delta_weight(adapter)[rows.start : rows.stop])


def _targets(config: LoraConfig) -> list[str]:
    return [target.strip() for target in config.targets.split(",")]
