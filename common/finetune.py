"""Fine-tuning on given completions: all weights or the adapter, loss on completion tokens only; a
prompt is computed once for all of its completions, without padding (common/model/logprobs.py).

The completions may be given ones, or the model's own right answers.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common import optim
from common.checkpoint import Checkpoint
from common.distributed import restore_checkpoint
from common.memory import RowLimit
from common.model import logprobs, to_device
from common.optim import Rates, choose_lr
from common.parts import Parts
from common.run import Timer

# Learning rates of algo.lr=auto. Those of model=tiny and SmolLM2-135M-Instruct were measured here
# (conf/experiment/rft_smollm2_units.yaml); those at 7B are usual for supervised fine-tuning.
RATES = Rates(
    weights=((0.9e6, 1e-3), (0.135e9, 5e-5), (7e9, 1e-5)), adapter=((0.135e9, 6e-4), (7e9, 2e-4))
)


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
    """Makes optimizer steps on given completions. It is the algorithm's part of a checkpoint.

    Args:
        parts: the parts of the run, whose model or adapter is trained in place.
        seed: the seed of dropout.
        limit: the rows of a training forward.
    """

    def __init__(self, parts: Parts, seed: int, limit: RowLimit) -> None:
        self.parts, self.model, self.seed, self.limit = parts, parts.lm.model, seed, limit
        self.named = {name: p for name, p in parts.lm.model.named_parameters() if p.requires_grad}
        parameters, cfg = list(self.named.values()), parts.run.algo
        self.peak_lr = choose_lr(parts, RATES)
        self.updater = optim.Updater(parameters, cfg, parts.lm.precision, parts.lm.device)
        self.guards = optim.Guards(parts.lm.precision.scaler)
        self.recomputed = parts.run.opt.checkpointing.enabled
        if self.recomputed:
            optim.checkpoint_activations(parts.lm.model)

    def rehearse(self) -> None:
        """Compile the training forward before the first step if opt.compile.training is set."""
        self.model.train(self.recomputed)
        self.parts.lm.rehearse_training()

    def step(self, trees: Sequence[Tree], index: int, lr: float, timer: Timer) -> dict[str, float]:
        """Make one optimizer step on the mean loss over all completion tokens; return the numbers
        to log.

        Args:
            trees: the training data of all ranks.
            index: the 0-based number of the step, which keys dropout.
        """
        parts, context, device = self.parts, self.parts.context, self.parts.lm.device
        tokens = sum(tree.targets for tree in trees)
        shares = [trees[rank :: context.world_size] for rank in range(context.world_size)]
        adapter, key = parts.lm.adapter, f"dropout {self.seed} {index} {context.rank}"

        def attempt(rows: int) -> float:
            self.updater.clear()
            total = torch.zeros((), dtype=torch.float64, device=device)
            every = [micro_batches(share, rows) for share in shares]
            # Each attempt draws the same dropout: one that ran out of memory has no effect.
            dropping = adapter.dropping(key) if adapter else nullcontext()
            with dropping, parts.lm.training_forward():
                for batch in every[context.rank]:
                    losses = token_losses(self.model, batch, device, parts.lm.precision.compute)
                    loss = losses.sum() / tokens
                    self.updater.backward(loss)
                    total += loss.detach()
            if self.parts.lm.sharding.shared:
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
            numbers = self.updater.step(lr, loss)
        return numbers | {"trained_tokens": tokens}

    # --- for checkpoints

    def tensors(self) -> dict[str, Tensor]:
        """Return the trained tensors: all weights, or the adapter."""
        return {name: parameter.detach() for name, parameter in self.named.items()}

    def extra(self) -> dict[str, Any]:
        """Return the state of optimizer and scaler."""
        return self.updater.state()

    def load(self, saved: Checkpoint) -> None:
        """Take over a checkpoint's weights, optimizer and scaler."""
        self.updater.load(restore_checkpoint(saved, dict(self.named), self.updater.fresh))

    # --- for numbers that are not finite

    def describe(self, tree: Tree) -> dict[str, str]:
        """Return the texts of a prompt and its first completion."""
        decode = self.parts.lm.tokenizer.decode
        return {"prompt": decode(tree.prompt), "completion": decode(tree.completions[0])}

    @torch.no_grad()
    def offending(self, trees: Sequence[Tree]) -> list[Tree]:
        """Return this rank's `trees` with a loss that is not finite; all of them if each loss is
        finite.
        """
        device, dtype, model = self.parts.lm.device, self.parts.lm.precision.compute, self.model
        mine = list(self.parts.context.share(trees))

        def finite(tree: Tree) -> bool:
            losses = token_losses(model, [tree], device, dtype)
            return bool(torch.isfinite(losses).all())

        with self.parts.lm.sharding.gathered():
            return [tree for tree in mine if not finite(tree)] or mine
