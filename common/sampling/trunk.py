"""The blocks of a model below the first one that a population perturbs: all members have them in
common, so that a prompt goes through them once and not once per member.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from common.distributed import fsdp
from common.sampling.kv_cache import PromptCache

Prompts = Sequence[Sequence[int]]


class _PassedError(Exception):
    """The last block of a trunk has returned; the rest of the model is not needed."""


class Trunk:
    """Prompts as the first `count` blocks of `model`, one at least, leave them.

    A block of a decoder returns its hidden states [rows, T, d], alone or first in a tuple.
    Args: prompts: of each row; run: puts some prompts through the model and fills a cache; most: so
    many at a time; opening: what all prompts go on from, where they begin alike.
    """

    def __init__(
        self,
        model: nn.Module,
        count: int,
        prompts: Prompts,
        run: Callable[[Prompts, PromptCache], Any],
        most: int,
        opening: PromptCache | None = None,
    ) -> None:
        self.blocks, device = fsdp.blocks(model)[:count], fsdp.device(model)
        places = {tuple(p): place for place, p in enumerate(dict.fromkeys(map(tuple, prompts)))}
        self.origin = torch.tensor([places[tuple(prompt)] for prompt in prompts], device=device)
        same = torch.zeros(len(places), dtype=torch.long, device=device)  # whichever group's
        self.cache, different, parts = PromptCache(len(places), opening, same), list(places), []
        for start in range(0, len(different), most):
            some = different[start : start + most]
            self.cache.rows = torch.arange(start, start + len(some), device=device)
            parts.append(self._catch(lambda some=some: run(some, self.cache)))
        self.hidden = torch.cat([part if self.alone else part[0] for part in parts])

    def _catch(self, run: Callable[[], Any]) -> Any:
        """Return what the last of the blocks returns while the model runs, which ends there."""
        found, forward = [], self.blocks[-1].forward

        def end(*args: Any, **kwargs: Any) -> None:
            found.append(forward(*args, **kwargs))
            raise _PassedError

        with suppress(_PassedError), _replaced(self.blocks[-1:], end):
            run()
        self.alone = isinstance(found[0], Tensor)
        return found[0]

    def hand_over(self, cache: PromptCache) -> None:
        """Give a cache of all rows, still empty, the keys and values of these blocks."""
        cache.keys = [keys[self.origin] for keys in self.cache.keys]
        cache.values = [values[self.origin] for values in self.cache.values]
        del self.cache

    @contextmanager
    def skipped(self, rows: Tensor) -> Iterator[None]:
        """Let a forward of these rows begin above the blocks."""
        hidden = self.hidden[self.origin[rows]]
        with _replaced(self.blocks, lambda *_, **__: hidden if self.alone else (hidden,)):
            yield


@contextmanager
def _replaced(blocks: Sequence[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    try:
        for block in blocks:
            block.forward = forward  # an instance attribute, which hides the class's method
        yield
    finally:
        for block in blocks:
            block.__dict__.pop("forward", None)
