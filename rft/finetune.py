"""Fine-tuning on selected completions: all weights or the adapter, loss on completion tokens only;
a prompt is computed once for all of its completions, without padding (common/model/logprobs.py).
"""

import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import optim
from common.checkpoint import checkpoint
from common.distributed import restore_checkpoint, save_checkpoint, sharding_of
from common.memory import RowLimit
from common.model import logprobs, to_device
from common.optim import Rates, choose_lr
from common.parts import Parts
from common.run import Timer, check_newest
from rft.config import RftConfig
from rft.made_with import check_same

# Learning rates of algo.lr=auto. Those of model=tiny and SmolLM2-135M-Instruct were measured here
# (conf/experiment/rft_smollm2_units.yaml); those at 7B are usual for supervised fine-tuning.
RATES = Rates(
    weights=((0.9e6, 1e-3), (0.135e9, 5e-5), (7e9, 1e-5)), adapter=((0.135e9, 6e-4), (7e9, 2e-4))
)

# Epochs if algo.epochs is null: MORE_EPOCHS if EPOCHS would be fewer than ENOUGH steps.
EPOCHS, MORE_EPOCHS = 5, 10
ENOUGH = 30


@dataclass(frozen=True)
class Tree:
    """One prompt and the completions to learn from, as token ids.

    Attributes:
        prompt: the tokens of the prompt.
        completions: the tokens of each completion.
        trains: per token of each completion, whether it carries loss; tokens of an environment do
            not.
    """

    prompt: list[int]
    completions: list[list[int]]
    trains: list[list[bool]]

    @property
    def targets(self) -> int:
        """The number of tokens that carry loss."""
        return sum(map(sum, self.trains))

    def part(self, start: int, count: int) -> "Tree":
        """Return a tree with `count` of the completions, from `start`."""
        end = start + count
        return Tree(self.prompt, self.completions[start:end], self.trains[start:end])


def token_losses(
    model: Any, trees: Sequence[Tree], device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Return -log p of each token that carries loss, concatenated, float32 [N]."""
    prompts, completions = [tree.prompt for tree in trees], [tree.completions for tree in trees]
    groups = logprobs.group(prompts, completions, device)
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        logp, _ = logprobs.token_logprobs(model, groups, 1.0)
    trains = torch.tensor([one for tree in trees for row in tree.trains for one in row])
    [trains] = to_device([trains], device)
    return -logp.flatten()[groups.slots[trains]]


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


def micro_batches(trees: Sequence[Tree], rows: int) -> list[list[Tree]]:
    """Split trees into forwards of at most `rows` rows, counting for each prompt as many rows as
    the prompt with the most completions has; trees of similar shape share a forward.
    """
    # A tree that does not fit the memory is cut into parts, each with its own copy of the prompt.
    parts = [
        tree.part(start, rows) for tree in trees for start in range(0, len(tree.completions), rows)
    ]
    parts.sort(key=lambda tree: (len(tree.completions), max(map(len, tree.completions))))
    forwards: list[list[Tree]] = []
    for tree in parts:
        if not forwards or (len(forwards[-1]) + 1) * len(tree.completions) > rows:
            forwards.append([])
        forwards[-1].append(tree)
    return forwards


class Finetuner:
    """One fine-tuning: the weights, their optimizer and the remaining steps.

    Args:
        parts: the parts of the run, whose model or adapter is trained in place.
        trees: the training data.
        folder: the folder of its checkpoints.
        seed: the seed of the order of trees, and of dropout.
        limit: the rows of a training forward.
    """

    def __init__(
        self, parts: Parts, trees: Sequence[Tree], folder: Path, seed: int, limit: RowLimit
    ) -> None:
        self.parts, self.model, self.folder, self.limit = parts, parts.lm.model, folder, limit
        self.run, self.context = parts.run, parts.context
        self.cfg: RftConfig = parts.run.algo
        self.seed = seed
        self.named = {name: p for name, p in parts.lm.model.named_parameters() if p.requires_grad}
        parameters = list(self.named.values())
        self.peak_lr = choose_lr(parts, RATES)
        self.updater = optim.Updater(parameters, self.cfg, parts.lm.precision, parts.lm.device)
        self.guards = optim.Guards(parts.lm.precision.scaler)
        self.recomputed = parts.run.opt.checkpointing.enabled
        if self.recomputed:
            optim.checkpoint_activations(parts.lm.model)
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
            self.updater.load(restore_checkpoint(saved, dict(self.named), self.updater.fresh))
            self.done = saved.step

    def rehearse(self) -> None:
        """Compile the training forward before the first step if opt.compile.training is set."""
        self.model.train(self.recomputed)
        self.parts.lm.rehearse_training()

    def save(self, state: dict[str, Any]) -> None:
        """Write a checkpoint with all state that the next step needs. Called on all ranks."""
        tensors = {name: parameter.detach() for name, parameter in self.named.items()}
        place = self.context, self.folder / "checkpoints", self.done
        content = tensors, state, self.updater.state()
        save_checkpoint(*place, *content, keep=self.run.checkpoint.keep)

    def step(self, trees: Sequence[Tree], timer: Timer) -> dict[str, float]:
        """Make one optimizer step on the mean loss over all completion tokens; return the numbers
        to log.
        """
        cfg, context, device, step = self.cfg, self.context, self.parts.lm.device, self.done
        tokens = sum(tree.targets for tree in trees)
        shares = [trees[rank :: context.world_size] for rank in range(context.world_size)]

        adapter, key = self.parts.lm.adapter, f"dropout {self.seed} {step} {context.rank}"

        def attempt(rows: int) -> float:
            self.updater.clear()
            total = torch.zeros((), dtype=torch.float64, device=device)
            every = [micro_batches(share, rows) for share in shares]
            # Each attempt draws the same dropout: one that ran out of memory has no effect.
            dropping = adapter.dropping(key) if adapter else nullcontext()
            with dropping, self.parts.lm.training_forward():
                for batch in every[context.rank]:
                    losses = token_losses(
                        self.model, batch, device, self.parts.lm.precision.compute
                    )
                    loss = losses.sum() / tokens
                    self.updater.backward(loss)
                    total += loss.detach()
            if sharding_of(self.model).shared:
                missing = max(map(len, every)) - len(every[context.rank])
                logprobs.match_backward_passes(self.model, missing, device)
            return total.item()

        with timer("train"):
            self.model.train(self.recomputed)  # a checkpointed block wants training mode
            loss = self.limit.run(attempt)
        with timer("exchange"):
            optim.sum_gradients(self.updater.parameters)
            loss = context.sum(torch.tensor([loss], dtype=torch.float64, device=device)).item()
        with timer("update"):
            lr = self.peak_lr * optim.lr_factor(cfg, step, self.total)
            numbers = self.updater.step(lr, loss)
        self.done = step + 1
        return numbers | {"trained_tokens": tokens, "epoch": self.done / self.total * self.epochs}

    @torch.no_grad()
    def offending(self, trees: Sequence[Tree]) -> list[Tree]:
        """Return this rank's `trees` with a loss that is not finite; all of them if each loss is
        finite.
        """
        device, dtype, model = self.parts.lm.device, self.parts.lm.precision.compute, self.model
        mine = list(self.context.share(trees))

        def finite(tree: Tree) -> bool:
            losses = token_losses(model, [tree], device, dtype)
            return bool(torch.isfinite(losses).all())

        with sharding_of(model).gathered():
            return [tree for tree in mine if not finite(tree)] or mine
