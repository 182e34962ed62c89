"""The model that RFT samples from, trains and replaces, iteration after iteration."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from common.config import Run
from common.engine import ReplacesModel
from common.language_model import LanguageModel, load
from common.model import narrowed
from common.parts import Parts, open_sampler


def load_again(run: Run, lm: LanguageModel, task: Any, folder: Path | None) -> LanguageModel:
    """Load the model of a folder, prepared in the same way as `lm`, with the tokenizer of `lm`.

    Args:
        lm: the previous model, without weights, so that only one model is in memory.
        folder: the folder of the weights; None = the run's own model.
    """
    if folder is not None:
        options: Any = dict.fromkeys(("revision", "gguf_file", "tiny"))
        run = replace(run, model=replace(run.model, name="hf", path=str(folder), **options))
    loaded = load(run, lm.context, task, compute=lm.precision)
    return replace(loaded, tokenizer=lm.tokenizer, decode=lm.decode, settings=lm.settings)


def with_sampler(parts: Parts) -> Parts:
    """Return the parts with an engine: the open one, with its weights renewed, or a new one for a
    half-precision copy of the model.
    """
    lm, engine = parts.lm, parts.engine
    if engine is not None:
        if _takes_models(engine):
            engine.use(lm.model)
        engine.refresh()
        return parts
    copied = narrowed(lm.model, lm.precision.compute)
    return replace(parts, engine=open_sampler(parts.run, lm, copied))


def without_sampler(parts: Parts) -> Parts:
    """Return the parts without the copy that `with_sampler` made. An engine that can be given
    another model, or one that samples from the trained model through its adapter, stays open.
    """
    engine = parts.engine
    if engine is None:
        return parts
    if parts.lm.adapter is None and not _takes_models(engine):
        engine.close()
        return replace(parts, engine=None)
    engine.rest()
    if parts.lm.adapter is None and _takes_models(engine):
        engine.use(None)  # it would keep the model that `load_again` replaces
    return parts


def _takes_models(engine: Any) -> bool:
    return isinstance(engine, ReplacesModel)
