"""Fine-tuning on selected completions: full weights or LoRA, completion tokens only, a prompt
computed once for all of them.

A prompt and its completions are a tree: completions attend to their prompt and to themselves, never
to each other, and their positions go on from the prompt. A row holds one tree, or with packing
several, none of which sees another; either way every token's loss equals that of a row of its own.
"""

import importlib.util
import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from common import checkpoint, hardware, optim
from common.config import ConfigError, Run
from common.distributed import fsdp
from common.distributed.context import Context
from common.files import replacing
from common.model import logprobs
from common.model.half import compiled
from common.model.lora import peft_of_today
from common.model.masks import additive
from common.precision import Precision
from common.signals import EXIT_NUMBERS, RunStopped
from common.timer import Timer
from rft.config import LoraConfig, RftConfig

log = logging.getLogger("clutch")


@dataclass(frozen=True)
class Tree:
    """One prompt and the completions to learn from, as token ids."""

    prompt: list[int]
    completions: list[list[int]]

    @property
    def tokens(self) -> int:
        """Of the prompt and of all completions."""
        return len(self.prompt) + sum(map(len, self.completions))

    @property
    def targets(self) -> int:
        """Tokens that carry loss."""
        return sum(map(len, self.completions))


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
                    source += [
                        row * width + last,
                        *range(row * width + column, row * width + where.stop - 1),
                    ]
                    targets += tokens
                column = where.stop
    trees, branches = trees.to(device), branches.to(device)
    causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    along = (branches[:, None, :] == 0) | (branches[:, None, :] == branches[:, :, None])
    seen = causal & along & (trees[:, None, :] == trees[:, :, None])  # [B, T, T]
    mask = additive(seen, torch.float32)
    return Layout(
        ids.to(device),
        positions.to(device),
        mask[:, None],
        torch.tensor(source, device=device),
        torch.tensor(targets, device=device),
    )


def token_losses(forward: Any, model: Any, layout: Layout, dtype: torch.dtype) -> Tensor:
    """-log p of each token that carries loss, float32 [N]. forward: the model without its head,
    perhaps compiled.
    """

    def losses(model: Any) -> Tensor:
        states = forward(
            input_ids=layout.ids,
            attention_mask=layout.mask.to(dtype),
            position_ids=layout.positions,
            use_cache=False,
        ).last_hidden_state
        logp, _ = logprobs.head_logprobs(
            model, states.flatten(0, 1)[layout.source], layout.targets, 1.0
        )
        return -logp

    with torch.autocast(layout.ids.device.type, dtype, enabled=dtype != torch.float32):
        return fsdp.inside(model, losses)


def steps(trees: Sequence[Tree], completions: int, epoch: int, seed: int) -> list[list[Tree]]:
    """The trees of an epoch in random order, cut into optimizer steps of about `completions`
    completions each.
    """
    order = list(trees)
    random.Random(f"finetune {seed} {epoch}").shuffle(order)
    found: list[list[Tree]] = []
    held = completions
    for tree in order:
        if held >= completions:
            found.append([])
            held = 0
        found[-1].append(tree)
        held += len(tree.completions)
    return found


def micro_batches(
    trees: Sequence[Tree], completions: int, pack_tokens: int | None
) -> list[list[list[Tree]]]:
    """Forwards of about `completions` completions: lists of rows, which are lists of trees.

    pack_tokens: None = a tree a row, those of like length together; else rows of up to so many
    tokens, filled best-fit (a longer tree has a row of its own).
    """
    # Where memory is so short that a tree does not fit, its completions share their prompt in
    # smaller parts.
    parts = [
        Tree(tree.prompt, tree.completions[start : start + completions])
        for tree in trees
        for start in range(0, len(tree.completions), completions)
    ]
    ordered = sorted(parts, key=lambda tree: tree.tokens, reverse=True)
    rows: list[list[Tree]] = []
    room: list[int] = []
    for tree in ordered:
        fitting = [i for i, left in enumerate(room) if left >= tree.tokens] if pack_tokens else []
        if fitting:
            best = min(fitting, key=room.__getitem__)
            rows[best].append(tree)
            room[best] -= tree.tokens
        else:
            rows.append([tree])
            room.append((pack_tokens or 0) - tree.tokens)
    batches: list[list[list[Tree]]] = []
    held = completions
    for row in rows:
        if held >= completions:
            batches.append([])
            held = 0
        batches[-1].append(row)
        held += sum(len(tree.completions) for tree in row)
    return batches


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


def with_lora(model: Any, config: LoraConfig) -> Any:
    """`model` with adapters in it, its own weights frozen. Returns the peft model around it; see
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
        if isinstance(
            parameter, DTensor
        ):  # peft has frozen what was gathered of it; adapters are whole on every rank
            parameter.requires_grad_(False)
    return found


@torch.no_grad()
def merge_rows(model: Any) -> None:
    """Add adapters, which every rank has, to the rows of the sharded weights that this rank holds."""
    for module in model.modules():
        if hasattr(module, "get_delta_weight"):
            weight = module.base_layer.weight
            rows = fsdp.rows(weight)
            for adapter in module.active_adapters:
                fsdp.local(weight).add_(module.get_delta_weight(adapter)[rows.start : rows.stop])


def _targets(config: LoraConfig) -> list[str]:
    return [target.strip() for target in config.targets.split(",")]


class Finetuner:
    """One fine-tuning: the weights, their optimizer and the steps still to do.

    Args: model: plain, float32; trained in place (with LoRA, `finish` merges the adapters into it).
    folder: where its checkpoints and adapter go. seed: of the order, and of the adapters' first
    values. unusual: called where a step was not made, with what is not finite and this rank's trees
    behind it; it may raise to stop the run.
    """

    def __init__(
        self,
        model: Any,
        trees: Sequence[Tree],
        run: Run,
        context: Context,
        numbers: Precision,
        folder: Any,
        seed: int,
        unusual: Callable[[str, list[Tree]], None],
    ) -> None:
        self.run, self.context, self.numbers, self.folder = run, context, numbers, folder
        self.settings: RftConfig = run.algo
        self.unusual = unusual
        self.model = model
        self.lora: Any = None
        if self.settings.lora.rank:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)
                self.lora = with_lora(model, self.settings.lora)
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.updater = optim.Updater(
            list(self.named.values()), self.settings, numbers, context.device.device
        )
        self.guards = optim.Guards(numbers.scaler)
        self.rows = self.settings.batch_rows
        if run.opt.checkpointing.enabled:
            optim.checkpoint_activations(model)
        self.forward = model.base_model
        if run.opt.compile.enabled:
            self.forward = compiled(model.base_model, run.opt.compile.mode)
        batch = self.settings.batch_rows * self.settings.accumulate
        self.epochs = [steps(trees, batch, epoch, seed) for epoch in range(self.settings.epochs)]
        self.total = sum(map(len, self.epochs))
        self.done = 0

    def resume(self, record: dict[str, Any], same: Callable[..., None]) -> dict[str, Any]:
        """Take over the newest checkpoint, if there is one. Returns the state that was saved with
        it.
        """
        saved = checkpoint.latest(self.folder / "checkpoints")
        if saved is None:
            return {}
        same(saved.path, saved.state["made_with"], record)
        self.updater.load(fsdp.restore(saved, dict(self.named), self.updater.fresh))
        self.done = saved.step
        return saved.state

    def save(self, state: dict[str, Any]) -> None:
        """Write a checkpoint with all that the next step needs. Every rank calls it."""
        fsdp.save(
            self.context,
            self.folder / "checkpoints",
            self.done,
            {name: parameter.detach() for name, parameter in self.named.items()},
            state,
            self.updater.state(),
            keep=self.run.checkpoint.keep,
        )

    def train(self, seen: Callable[..., bool]) -> None:
        """All steps that are left. Calls `seen(event, phases)` on every rank after each; it returns
        True to end.
        """
        flat = [trees for epoch in self.epochs for trees in epoch]
        for step in range(self.done, self.total):
            started, phases = time.perf_counter(), Timer()
            event = self.step(flat[step], step, phases)
            self.done = step + 1
            if seen(event | {"seconds": time.perf_counter() - started}, phases.seconds):
                return

    def step(self, trees: Sequence[Tree], step: int, phases: Timer) -> dict[str, float]:
        """One optimizer step on `trees`: the mean loss over all of their completion tokens,
        whatever the forwards.
        """
        context, settings = self.context, self.settings
        device = context.device.device
        tokens = sum(tree.targets for tree in trees)
        shares = [trees[rank :: context.world_size] for rank in range(context.world_size)]

        def attempt(rows: int) -> float:
            self.updater.clear()
            total = torch.zeros((), dtype=torch.float64, device=device)
            every = [
                micro_batches(share, rows, settings.pack_tokens if settings.packing else None)
                for share in shares
            ]
            for batch in every[context.rank]:
                losses = token_losses(
                    self.forward, self.model, lay(batch, device), self.numbers.compute
                )
                loss = losses.sum() / tokens
                self.updater.scaler.scale(loss).backward()
                total += loss.detach()
            if fsdp.of(self.model):
                logprobs.keep_step(
                    self.model, max(map(len, every)) - len(every[context.rank]), device
                )
            return total.item()

        with phases("train"):
            self.model.train(
                self.run.opt.checkpointing.enabled
            )  # a checkpointed block wants training mode
            loss, self.rows = hardware.halving(
                attempt, self.rows, fsdp.floor(self.model, self.rows, 1), key="algo.batch_rows"
            )
        with phases("exchange"):
            optim.sum_gradients(self.updater.parameters)
            loss = context.sum(torch.tensor([loss], dtype=torch.float64, device=device)).item()
        with phases("update"):
            warm = max(1, math.ceil(settings.warmup * self.total))
            factor = min(1.0, (step + 1) / warm) * settings.lr_schedule.factor(step, self.total)
            seen = self.updater.step(settings.lr * factor, loss)
        if (what := self.guards.not_finite(seen)) is not None:
            self.unusual(what, self._offending(shares[context.rank]))
        elif (trouble := self.guards.trouble(seen)) is not None:
            raise RunStopped(f"fine-tuning step {step + 1}: {trouble}", EXIT_NUMBERS)
        return seen | {"trained_tokens": tokens, "epoch": (step + 1) / self.total * settings.epochs}

    @torch.no_grad()
    def _offending(self, trees: Sequence[Tree]) -> list[Tree]:
        """Those whose loss is not finite; all of them where only their gradient is not."""
        device, dtype = self.context.device.device, self.numbers.compute
        with fsdp.forwards(self.model):
            alone = [
                token_losses(self.model.base_model, self.model, lay([[tree]], device), dtype)
                for tree in trees
            ]
        return [
            tree for tree, loss in zip(trees, alone, strict=True) if not torch.isfinite(loss).all()
        ] or list(trees)

    def finish(self) -> Any:
        """The plain model after training. With LoRA the adapter is written to FOLDER/adapter and
        merged.
        """
        if self.lora is None:
            return self.model
        if self.context.main:
            with replacing(self.folder / "adapter") as temporary:
                self.lora.save_pretrained(temporary)
        if fsdp.of(self.model):
            merge_rows(self.model)
            return self.lora.unload()
        return self.lora.merge_and_unload()
