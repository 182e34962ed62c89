"""Fine-tuning on selected completions: all weights or the adapter, completion tokens only, a prompt
computed once for all of them.

A prompt and its completions are a tree: completions attend to their prompt and to themselves, never
to each other, and their positions go on from the prompt. A row holds one tree, or with packing
several, none of which sees another; either way every token's loss equals that of a row of its own.
"""

import math
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from common import optim
from common.checkpoint import latest
from common.distributed import fsdp
from common.lm import LM
from common.model import logprobs
from common.model.half import compiled
from common.model.masks import additive
from common.rows import RowLimit
from common.timer import Timer
from rft.config import RftConfig
from rft.made_with import check_same

T = TypeVar("T")


@dataclass(frozen=True)
class Tree:
    """One prompt and the completions to learn from, as token ids."""

    prompt: list[int]
    completions: list[list[int]]

    @property
    def targets(self) -> int:
        """Tokens that carry loss."""
        return sum(map(len, self.completions))

    @property
    def tokens(self) -> int:
        """All tokens."""
        return len(self.prompt) + self.targets


@dataclass(frozen=True)
class Layout:
    """Rows of trees, padded on the right. B rows, T columns, N tokens that carry loss.

    ids, positions: int64 [B, T]. mask: additive [B, 1, T, T]. source: int64 [N], flat index of the
    state that predicts each token of `targets`, int64 [N].
    """

    ids: Tensor
    positions: Tensor
    mask: Tensor
    source: Tensor
    targets: Tensor


def lay(rows: Sequence[Sequence[Tree]], device: torch.device) -> Layout:
    """Lay out rows of trees."""
    width = max(sum(tree.tokens for tree in row) for row in rows)
    shape = (len(rows), width)
    ids, positions = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    # Of each column: which tree, and which completion in it (0 = the prompt). Padding is a tree of
    # its own.
    trees, branches = torch.full(shape, -1), torch.zeros(shape, dtype=torch.long)
    source: list[int] = []
    targets: list[int] = []
    for row, content in enumerate(rows):
        column = 0
        for number, tree in enumerate(content):
            start, length = column, len(tree.prompt)
            last = start + length - 1
            for branch, tokens in enumerate((tree.prompt, *tree.completions)):
                where = slice(column, column + len(tokens))
                ids[row, where] = torch.tensor(tokens)
                positions[row, where] = torch.arange(len(tokens)) + (length if branch else 0)
                trees[row, where], branches[row, where] = number, branch
                if branch:
                    base = row * width
                    source += [base + last, *range(base + column, base + where.stop - 1)]
                    targets += tokens
                column = where.stop
    trees, branches = trees.to(device), branches.to(device)
    causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    along = (branches[:, None, :] == 0) | (branches[:, None, :] == branches[:, :, None])
    seen = causal & along & (trees[:, None, :] == trees[:, :, None])  # [B, T, T]
    mask = additive(seen, torch.float32)
    flat = (torch.tensor(numbers, device=device) for numbers in (source, targets))
    return Layout(ids.to(device), positions.to(device), mask[:, None], *flat)


def token_losses(forward: Any, model: Any, layout: Layout, dtype: torch.dtype) -> Tensor:
    """Return -log p of each token that carries loss, float32 [N]. forward: the model's body."""

    def losses(model: Any) -> Tensor:
        states = forward(
            input_ids=layout.ids,
            attention_mask=layout.mask.to(dtype),
            position_ids=layout.positions,
            use_cache=False,
        ).last_hidden_state
        predicting = states.flatten(0, 1)[layout.source]
        logp, _ = logprobs.head_logprobs(model, predicting, layout.targets, 1.0)
        return -logp

    with torch.autocast(layout.ids.device.type, dtype, enabled=dtype != torch.float32):
        return fsdp.inside(model, losses)


def steps(trees: Sequence[Tree], completions: int, epoch: int, seed: int) -> list[list[Tree]]:
    """Cut the trees of an epoch, in random order, into steps of about `completions` each."""
    order = list(trees)
    random.Random(f"finetune {seed} {epoch}").shuffle(order)
    return _grouped(order, completions, lambda tree: len(tree.completions))


def _grouped(items: Sequence[T], most: int, size: Callable[[T], int]) -> list[list[T]]:
    """Return runs of items, each ended by the one that brings its size to `most`."""
    groups: list[list[T]] = []
    held = most
    for item in items:
        if held >= most:
            groups.append([])
            held = 0
        groups[-1].append(item)
        held += size(item)
    return groups


def micro_batches(
    trees: Sequence[Tree], completions: int, pack_tokens: int | None
) -> list[list[list[Tree]]]:
    """Return forwards of about `completions` completions: lists of rows, which are lists of trees.

    pack_tokens: None = one tree per row, those of like length together; else rows of up to so many
    tokens, filled best-fit (a longer tree has a row of its own).
    """
    # Where a tree does not fit the memory, its completions share their prompt in smaller parts.
    parts = [
        Tree(tree.prompt, tree.completions[start : start + completions])
        for tree in trees
        for start in range(0, len(tree.completions), completions)
    ]
    rows: list[list[Tree]] = []
    room: list[int] = []
    for tree in sorted(parts, key=lambda tree: tree.tokens, reverse=True):
        fitting = [i for i, left in enumerate(room) if left >= tree.tokens] if pack_tokens else []
        if fitting:
            best = min(fitting, key=room.__getitem__)
            rows[best].append(tree)
            room[best] -= tree.tokens
        else:
            rows.append([tree])
            room.append((pack_tokens or 0) - tree.tokens)
    return _grouped(rows, completions, lambda row: sum(len(tree.completions) for tree in row))


class Finetuner:
    """One fine-tuning: the weights, their optimizer and the steps still to do.

    Args: lm: its model, or the adapter of it, is trained in place; folder: where checkpoints go;
    seed: of the order, and of dropout.
    """

    def __init__(
        self, lm: LM, trees: Sequence[Tree], folder: Path, seed: int, limit: RowLimit
    ) -> None:
        self.lm, self.model, self.folder, self.limit = lm, lm.model, folder, limit
        self.run, self.context = lm.run, lm.context
        self.cfg: RftConfig = lm.run.algo
        self.seed = seed
        self.named = {name: p for name, p in lm.model.named_parameters() if p.requires_grad}
        parameters = list(self.named.values())
        self.updater = optim.Updater(parameters, self.cfg, lm.precision, lm.device)
        self.guards = optim.Guards(lm.precision.scaler)
        self.recomputed = lm.run.opt.checkpointing.enabled
        if self.recomputed:
            optim.checkpoint_activations(lm.model)
        self.forward = lm.model.base_model
        if lm.run.opt.compile.enabled:
            self.forward = compiled(lm.model.base_model, lm.run.opt.compile.mode)
        batch, epochs = self.cfg.batch_size, range(self.cfg.epochs)
        self.steps = [step for epoch in epochs for step in steps(trees, batch, epoch, seed)]
        self.total, self.done = len(self.steps), 0

    def resume(self, record: dict[str, Any]) -> None:
        """Take over the newest checkpoint, if there is one; it must be made with `record`."""
        saved = latest(self.folder / "checkpoints")
        if saved is not None:
            check_same(saved.path, saved.state["made_with"], record)
            self.updater.load(fsdp.restore(saved, dict(self.named), self.updater.fresh))
            self.done = saved.step

    def save(self, state: dict[str, Any]) -> None:
        """Write a checkpoint with all that the next step needs. Every rank calls it."""
        tensors = {name: parameter.detach() for name, parameter in self.named.items()}
        place = self.context, self.folder / "checkpoints", self.done
        content = tensors, state, self.updater.state()
        fsdp.save(*place, *content, keep=self.run.checkpoint.keep)

    def step(self, trees: Sequence[Tree], timer: Timer) -> dict[str, float]:
        """Make one optimizer step on the mean loss of all completion tokens; return the numbers."""
        cfg, context, device, step = self.cfg, self.context, self.lm.device, self.done
        tokens = sum(tree.targets for tree in trees)
        shares = [trees[rank :: context.world_size] for rank in range(context.world_size)]
        pack_tokens = cfg.pack_tokens if cfg.packing else None

        def attempt(rows: int) -> float:
            self.updater.clear()
            total = torch.zeros((), dtype=torch.float64, device=device)
            every = [micro_batches(share, rows, pack_tokens) for share in shares]
            for batch in every[context.rank]:
                laid = lay(batch, device)
                losses = token_losses(self.forward, self.model, laid, self.lm.precision.compute)
                loss = losses.sum() / tokens
                self.updater.backward(loss)
                total += loss.detach()
            if fsdp.of(self.model):
                missing = max(map(len, every)) - len(every[context.rank])
                logprobs.match_backward_passes(self.model, missing, device)
            return total.item()

        with timer("train"):
            self.model.train(self.recomputed)  # a checkpointed block wants training mode
            adapter, key = self.lm.adapter, f"dropout {self.seed} {step} {context.rank}"
            with adapter.dropping(key) if adapter else nullcontext():
                loss = self.limit.run(attempt)
        with timer("exchange"):
            optim.sum_gradients(self.updater.parameters)
            loss = context.sum(torch.tensor([loss], dtype=torch.float64, device=device)).item()
        with timer("update"):
            warm = max(1, math.ceil(cfg.warmup * self.total))
            factor = min(1.0, (step + 1) / warm) * cfg.lr_schedule.factor(step, self.total)
            numbers = self.updater.step(cfg.lr * factor, loss)
        self.done = step + 1
        return numbers | {"trained_tokens": tokens, "epoch": self.done / self.total * cfg.epochs}

    @torch.no_grad()
    def offending(self, trees: Sequence[Tree]) -> list[Tree]:
        """Return those of this rank's `trees` whose loss is not finite; all if none is so."""
        device, dtype, model = self.lm.device, self.lm.precision.compute, self.model
        mine = list(trees[self.context.rank :: self.context.world_size])

        def finite(tree: Tree) -> bool:
            losses = token_losses(model.base_model, model, lay([[tree]], device), dtype)
            return bool(torch.isfinite(losses).all())

        with fsdp.forwards(model):
            return [tree for tree in mine if not finite(tree)] or mine
