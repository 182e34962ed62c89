"""torch.compile of the training forward and backward pass: opt.compile.training=true.

The blocks of the model are compiled one by one, and share one compilation, since their weights are
its inputs. The number of tokens is the only length in a block and is left dynamic, because
common/model/logprobs.py lays out all tokens of a forward as one sequence. Attention, which lays
them out in rows of other lengths at each step, is not compiled: it runs between the two compiled
parts of a block. Nor are the embedding and the output layer.

Compiling a whole model instead failed for some shapes, and for blocks with recomputed activations
(docs/decisions.md).
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from common.config import ConfigError
from common.model import logprobs, recurrent
from common.model.precision_copies import compiled


def check(model: PreTrainedModel) -> None:
    """Raise ConfigError for a model whose blocks cannot be compiled."""
    why = None
    if recurrent.goes_on(model) or logprobs.is_apart(model):
        why = "whose training forward is laid out in another way"
    elif not find_blocks(model):
        why = "whose blocks are not those of transformers"
    if why is not None:
        raise ConfigError(
            f"opt.compile.training=true does not go with {type(model).__name__}, {why}. Leave it"
            " out."
        )


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model; these are also the units of activation checkpointing."""
    return [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]


@contextmanager
def compiled_blocks(model: nn.Module, mode: str) -> Iterator[None]:
    """Use compiled code for the blocks of a model within this context, in backward passes too.

    Sampling shares the blocks but must not use that code, so it is removed afterwards.
    Args: mode: opt.compile.mode.
    """
    blocks: list[Any] = find_blocks(model)
    try:
        for block in blocks:
            block._compiled_call_impl = partial(_compiled_call(mode), block)
        with warnings.catch_warnings():
            # A warning of the compiler, which reads the gradient of each input.
            warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a")
            yield
    finally:
        for block in blocks:
            block._compiled_call_impl = None


@cache
def _compiled_call(mode: str) -> Callable[..., Any]:
    """Return the compiled call of a module; blocks of the same structure share the code."""
    logprobs.leave_uncompiled()
    return compiled(nn.Module._call_impl, mode)


def rehearse(model: PreTrainedModel, device: torch.device) -> None:
    """Run a forward and a backward pass, which compiles both, and clear the gradients."""
    # Two numbers of tokens, neither of which is a special case for the compiler.
    for lengths in ((5, 3), (9, 6)):
        completions = [[[1] * length for length in lengths]]
        groups = logprobs.group([[1] * lengths[1]], completions, device)
        logp, entropy = logprobs.token_logprobs(model, groups, 1.0)
        loss: Tensor = (logp + entropy.detach()).sum()
        loss.backward()
    for parameter in model.parameters():
        parameter.grad = None
