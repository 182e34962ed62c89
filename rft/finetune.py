"""The fine-tuning of an RFT iteration: the order of its completions, and its checkpoints."""

import random
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from common import optim
from common.checkpoint import checkpoint
from common.distributed import save_checkpoint
from common.finetune import Finetuner, Tree
from common.memory import RowLimit
from common.parts import Parts
from common.run import Timer, check_newest
from rft.config import RftConfig
from rft.made_with import check_same

# Epochs if algo.epochs is null: MORE_EPOCHS if EPOCHS would be fewer than ENOUGH steps.
EPOCHS, MORE_EPOCHS = 5, 10
ENOUGH = 30


def steps(trees: Sequence[Tree], completions: int, epoch: int, seed: int) -> list[list[Tree]]:
    """Split the trees of an epoch, in random order, into steps of about `completions` completions
    each.
    """
    order = list(trees)
    random.Random(f"finetune {seed} {epoch}").shuffle(order)
    cut: list[list[Tree]] = []
    held = completions
    for tree in order:
        if held >= completions:
            cut.append([])
            held = 0
        cut[-1].append(tree)
        held += len(tree.completions)
    return cut


def cut_epochs(
    trees: Sequence[Tree], completions: int, epochs: int | None, seed: int
) -> list[list[list[Tree]]]:
    """Return the steps of each epoch.

    Args: epochs: the number of epochs; None = chosen from the number of completions.
    """
    first = steps(trees, completions, 0, seed)
    count = epochs or (EPOCHS if EPOCHS * len(first) >= ENOUGH else MORE_EPOCHS)
    return [first, *(steps(trees, completions, epoch, seed) for epoch in range(1, count))]


class Tuning:
    """One fine-tuning: the steps that remain, and the checkpoints between them.

    Args:
        parts: the parts of the run, whose model or adapter is trained in place.
        trees: the training data.
        folder: the folder of its checkpoints.
        seed: the seed of the order of trees, and of dropout.
        row_limit: the rows of a training forward.
    """

    def __init__(
        self, parts: Parts, trees: Sequence[Tree], folder: Path, seed: int, row_limit: RowLimit
    ) -> None:
        self.run, self.context, self.folder = parts.run, parts.context, folder
        self.cfg: RftConfig = parts.run.algo
        self.tuner = Finetuner(parts, seed, row_limit)
        epochs = cut_epochs(trees, self.cfg.batch_size, self.cfg.epochs, seed)
        self.steps, self.epochs = list(chain.from_iterable(epochs)), len(epochs)
        self.done = 0

    @property
    def total(self) -> int:
        """The number of optimizer steps."""
        return len(self.steps)

    def resume(self, record: dict[str, Any]) -> None:
        """Load the newest checkpoint, if there is one; it must have been made with the settings
        `record`.
        """
        self.context.meet()  # no rank reads while another may still write
        saved = checkpoint.latest(self.folder / "checkpoints")
        check_newest(self.context, saved)
        if saved is not None:
            check_same(saved.path, saved.state["made_with"], record)
            self.tuner.load(saved)
            self.done = saved.step

    def save(self, state: dict[str, Any]) -> None:
        """Write a checkpoint with all state that the next step needs. Called on all ranks."""
        place = self.context, self.folder / "checkpoints", self.done
        content = self.tuner.tensors(), state, self.tuner.extra()
        save_checkpoint(*place, *content, keep=self.run.checkpoint.keep)

    def step(self, trees: Sequence[Tree], timer: Timer) -> dict[str, float]:
        """Make the next optimizer step; return the numbers to log."""
        lr = self.tuner.peak_lr * optim.lr_factor(self.cfg, self.done, self.total)
        numbers = self.tuner.step(trees, self.done, lr, timer)
        self.done += 1
        return numbers | {"epoch": self.done / self.total * self.epochs}
