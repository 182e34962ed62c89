"""The model that RFT samples from, trains and replaces, iteration after iteration."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from common.distributed import fsdp
from common.language_model import LM, load_on_all_ranks
from common.model import narrowed


def reload(lm: LM, folder: Path | None) -> None:
    """Give `lm` the model of a folder instead, None = the run's own; with an adapter, the adapter
    of that folder. The engine stays the old.
    """
    if lm.adapter is not None:
        return lm.adapter.load(folder) if folder is not None else lm.adapter.reset()
    run, lm.model = lm.run, None
    gc.collect()
    if folder is not None:
        options: Any = dict.fromkeys(("revision", "gguf_file", "tiny"))
        run = replace(run, model=replace(run.model, name="hf", path=str(folder), **options))
    lm.model, _ = load_on_all_ranks(run, lm.task, lm.context, torch.float32)
    share_out(lm)


def share_out(lm: LM) -> None:
    """Make the model ready to be trained, and with opt=fsdp share it out if it is not yet."""
    if lm.adapter is None and not fsdp.of(lm.model):
        lm.prepare()
        fsdp.shard([lm.model], lm.run, lm.context, lm.precision)


def open_copy(lm: LM) -> None:
    """Sample from a half-precision copy of the model as it is now, or by the engine that is."""
    if lm.engine is not None:
        lm.engine.model = lm.model
        lm.engine.refresh()
        return
    lm.engine = lm.open_engine(narrowed(lm.model, lm.precision.compute))


def close_copy(lm: LM) -> None:
    """Drop the copy that `open_copy` has made; an engine without one goes on."""
    if lm.engine is not None and (lm.engine.separate or lm.adapter is not None):
        lm.engine.rest()
        if lm.adapter is None:
            lm.engine.model = None  # else it would keep the model that `reload` replaces
    else:
        lm.engine = None
