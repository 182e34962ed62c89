"""Write a trained model to a folder that `from_pretrained` loads."""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from common.config import ConfigError
from common.system import replacing


def export_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write a Hugging Face folder that `from_pretrained` loads, atomically. An earlier export at
    `folder` is replaced.

    Weights keep their dtypes; if these differ, the folder declares float32, so that none is
    rounded.
    Args: weights: the gathered weights of a sharded model; None = the model's own.
    Raises: ConfigError if `folder` holds something else; CheckpointError with path and reason on
    I/O errors.
    """
    if (
        folder.exists()
        and not (folder / "config.json").is_file()
        and (folder.is_file() or any(folder.iterdir()))
    ):
        raise ConfigError(
            f"{folder} exists and is not a model folder. Give a new folder, or remove this one."
        )
    with replacing(folder) as temporary, _savable(model), progress_bars(False):
        model.save_pretrained(temporary, state_dict=weights)
        tokenizer.save_pretrained(temporary)
        kinds = {part.dtype for part in (weights or model.state_dict()).values()}
        if len(kinds & {torch.float32, torch.bfloat16, torch.float16}) > 1:
            # A loader uses the declared dtype for all weights, and would round the wider ones.
            path = temporary / "config.json"
            config = json.loads(path.read_text(encoding="utf-8")) | {"dtype": "float32"}
            path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def empty_like(model: PreTrainedModel) -> PreTrainedModel:
    """Return a float32 model of the same architecture on the meta device, to export other weights
    with.
    """
    config = copy.deepcopy(model.config)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    empty.generation_config = model.generation_config
    return empty


def write_weights(model: PreTrainedModel, folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write a folder without a tokenizer, for another model loader: the settings of `model`, and
    the given weights under the names that they have without an adapter.
    """
    empty = empty_like(model)
    # Each rank has an engine; by default only rank 0 saves.
    empty.should_save_on_this_rank = lambda is_main_process: True
    with _savable(model), progress_bars(False):
        empty.save_pretrained(folder, state_dict=weights)


@contextmanager
def _savable(model: PreTrainedModel) -> Iterator[None]:
    """Make the generation config of a model savable in the block.

    Some published configs set a temperature without do_sample, which transformers loads but refuses
    to save. The model then has a copy with do_sample=True, as transformers itself advises.
    """
    generation = model.generation_config
    if generation is not None:
        try:
            generation.validate(strict=True)
        except ValueError:
            drawn = copy.deepcopy(generation)
            drawn.do_sample = True
            with suppress(ValueError):  # with other faults it is saved as it came, with a warning
                drawn.validate(strict=True)
                model.generation_config = drawn
    try:
        yield
    finally:
        model.generation_config = generation


@contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """Disable the progress bars of transformers in the block unless `shown`."""
    before = transformers_logging.is_progress_bar_enabled()
    if before and not shown:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if before and not shown:
            transformers_logging.enable_progress_bar()
