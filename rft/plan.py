"""Before the first stage: how many rows fit the memory, and what will be done."""

import logging
import os
from typing import Any

import torch

from common import hardware, loop
from common.config import Run
from common.distributed import fsdp
from common.distributed.context import Context
from common.model.memory import activation_bytes
from common.precision import Precision
from common.report import summary
from common.sampling.native import Sampler
from common.tasks import Task
from rft.config import ENVIRONMENT, RftConfig
from rft.prompts import Prompts

log = logging.getLogger("clutch")


def fitted(
    run: Run, context: Context, sampler: Sampler, longest: int, numbers: Precision
) -> tuple[int, int, float]:
    """Rows of a rollout forward and completions of a training forward that fit the memory, and
    bytes in all.

    Args: longest: tokens of the longest prompt.
    """
    settings: RftConfig = run.algo
    model, tokens = sampler.model, settings.sampling.max_new_tokens
    parameters = sum(p.numel() for p in model.parameters())
    half = numbers.compute != torch.float32
    trained = parameters if not settings.lora.rank else 0  # an adapter's share is small
    copied = 0 if fsdp.of(model) else 2 * half * parameters
    ranks = fsdp.share(model)
    training_fixed = (
        (4 * parameters + 12 * trained) / ranks + copied + fsdp.gathered_bytes(model, rollout=False)
    )
    sampling_fixed = 4 * parameters / ranks + copied + fsdp.gathered_bytes(model, rollout=True)
    row_of_sampling = sampler.bytes_per_row(longest, tokens)
    row_of_training = activation_bytes(
        model, 1, longest, 1, tokens, numbers.compute, run.opt.checkpointing.enabled
    )
    share = (
        context.world_size if context.device.device.type == "cpu" else 1
    )  # ranks of a CPU share its memory
    gb = context.device.memory_gb / share
    rows = hardware.fit_rows(settings.micro_batch_rows, row_of_sampling, sampling_fixed, gb)
    batch = hardware.fit_rows(settings.batch_rows, row_of_training, training_fixed, gb)
    for key, asked, fits in (
        ("micro_batch_rows", settings.micro_batch_rows, rows),
        ("batch_rows", settings.batch_rows, batch),
    ):
        if fits < asked:
            log.info("algo.%s=%d does not fit %.0f GB; going on with %d", key, asked, gb, fits)
    chunk = settings.prompts_per_batch * settings.chunk_size
    peak = max(
        sampling_fixed + min(rows, chunk) * row_of_sampling,
        training_fixed + batch * row_of_training,
    )
    return rows, batch, peak


def plan(
    run: Run,
    context: Context,
    task: Task,
    model: Any,
    prompts: Prompts,
    numbers: Precision,
    rows: int,
    peak: float,
) -> None:
    """Print what will be done, with sizes. rows: of a rollout forward; peak: bytes."""
    settings: RftConfig = run.algo
    size = sum(p.numel() for p in model.parameters())
    taken = len(prompts.of(1, settings.prompts))
    trained = f"LoRA of rank {settings.lora.rank}" if settings.lora.rank else "all weights"
    variables = []
    for name, key in ENVIRONMENT.items():
        if given := os.environ.get(name):
            counts = given == str(getattr(settings, key))
            variables.append(
                f"{name}={given}" + ("" if counts else f" (overridden: {getattr(settings, key)})")
            )
    lines = {
        "algorithm": (
            f"rft, {loop.length(run, settings.iterations, 'iterations')}, from the"
            f" {settings.start_from} weights"
            + (f"; stage {settings.stage}" if settings.stage != "all" else "")
            + (f", shard {settings.shard}" if settings.shard else "")
        ),
        "task": (
            f"{getattr(task, 'name', type(task).__name__)}: {len(prompts.train):,} training"
            f" prompts, {taken:,} an iteration; {len(prompts.validation)} for validation,"
            f" {len(prompts.held_out)} held out"
        ),
        "overlap": prompts.overlap,
        "model": f"{run.model.path or run.model.name}, {size / 1e6:.2f}M parameters",
        "device": (
            f"{context.device.name}, {context.device.memory_gb:.0f} GB;"
            f" hardware={run.hardware.name}"
        ),
        "numbers": f"{numbers.name}{', GradScaler' if numbers.scaler else ''}, masters float32",
        "ranks": str(context.world_size),
        "generate": (
            f"{settings.samples_per_prompt} samples a prompt, {settings.second_round_samples} more"
            f" for unsolved ones, {settings.hint_samples} with a hint; chunks of"
            f" {settings.prompts_per_batch} prompts x {settings.chunk_size} samples, {rows} rows a"
            " forward"
        ),
        "select": (
            f"reward from {settings.select.accept:g}, up to {settings.select.keep_per_prompt} ways"
            f" a prompt, buffer {settings.select.buffer}"
        ),
        "fine-tune": (
            f"{trained}, {settings.epochs} epochs, lr {settings.lr:g}, {settings.batch_rows}"
            " completions a forward x"
            f" {settings.accumulate}{', packed' if settings.packing else ''}"
        ),
        "environment": ", ".join(variables),
        "memory": (
            f"about {peak / 2**30:.2f} GB a"
            f" rank{fsdp.planned(model, (16 if not settings.lora.rank else 4) * size)}"
        ),
        "folder": str(context.out_dir),
    }
    summary.print_plan({key: value for key, value in lines.items() if value})
    if not settings.shard:
        summary.write_run(run, context.out_dir, context.device.name)
