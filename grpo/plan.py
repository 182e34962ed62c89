"""Before the first step: how many rows fit the memory, and what will be done."""

import logging
from typing import Any

import torch

from common import hardware, loop
from common.config import Run
from common.distributed import fsdp
from common.distributed.context import Context
from common.model import logprobs
from common.model.memory import activation_bytes
from common.precision import Precision
from common.report import summary
from common.sampling.native import Sampler
from common.tasks import Example, Task
from grpo.config import GrpoConfig

log = logging.getLogger("clutch")


def plan(
    run: Run,
    context: Context,
    sampler: Sampler,
    tokenizer: Any,
    task: Task,
    order: loop.Order,
    held_out: list[Example],
    numbers: Precision,
) -> tuple[int, int]:
    """Print what will be done, with sizes.

    Returns: rows of a rollout forward and completions of a training forward, refitted to this
    device's memory.
    """
    settings: GrpoConfig = run.algo
    tokens, size = settings.sampling.max_new_tokens, settings.samples_per_prompt
    splits = {"train": order.examples, "test": held_out}
    prompt = loop.longest_prompt(sampler.context, tokenizer, task.prompt, splits, tokens)
    parameters = sum(p.numel() for p in sampler.model.parameters())
    half, offload = numbers.compute != torch.float32, run.opt.offload.enabled
    # Weights, gradients, Adam's two moments, the reference model; autocast's copy of the weights
    # and the sampler's.
    whole = parameters * (4 + 4 + 8 + 4 * bool(settings.kl.beta and not offload))
    sharded = fsdp.of(sampler.model) is not None
    held = whole / fsdp.share(sampler.model) + (0 if sharded else 4 * half * parameters)
    fixed = held + fsdp.gathered_bytes(sampler.model, rollout=False)
    fixed_rollout = held + fsdp.gathered_bytes(sampler.model, rollout=True)

    def training(prompts: float, rows: int) -> float:
        return activation_bytes(
            sampler.model,
            prompts,
            prompt,
            rows,
            tokens,
            numbers.compute,
            run.opt.checkpointing.enabled,
        )

    row_of_rollout, row_of_training = sampler.bytes_per_row(prompt, tokens), training(1 / size, 1)
    share = (
        context.world_size if context.device.device.type == "cpu" else 1
    )  # ranks of a CPU share its memory
    gb = context.device.memory_gb / share
    logits = 16 * min(
        settings.micro_batch_rows * tokens * sampler.model.config.vocab_size, logprobs.LOGITS
    )
    once = training(1, 0) + logits  # of a training forward, however many rows it has
    rows = hardware.fit_rows(settings.rows_per_forward, row_of_rollout, fixed_rollout, gb)
    micro = hardware.fit_rows(settings.micro_batch_rows, row_of_training, fixed + once, gb)
    micro = min(context.gather_objects(micro))  # ranks cut micro-batches alike: see Policy.step
    completions = -(-settings.prompts_per_step // context.world_size) * size
    for key, asked, fitting in (
        ("rows_per_forward", settings.rows_per_forward, rows),
        ("micro_batch_rows", settings.micro_batch_rows, micro),
    ):
        if fitting < min(asked, completions):
            log.info("algo.%s=%d does not fit %.0f GB; going on with %d", key, asked, gb, fitting)
    peak = max(
        fixed_rollout + min(rows, completions) * row_of_rollout,
        fixed + once + min(micro, completions) * row_of_training,
        fixed + (4 * parameters if settings.kl.beta and offload else 0),
    )
    config = sampler.model.config
    head_size = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    kernel = hardware.attention_kernel(context.device.device, sampler.dtype, head_size, masked=True)
    compiled = f", decoding compiled ({run.opt.compile.mode})" if run.opt.compile.enabled else ""
    reference = (
        "none (beta 0)" if not settings.kl.beta else "on the CPU" if offload else "on the device"
    )
    if context.main:
        summary.print_plan(
            {
                "algorithm": (
                    f"grpo, loss {settings.loss},"
                    f" {loop.length(run, settings.steps, 'optimizer steps')}, {settings.passes} a"
                    f" rollout, lr {settings.lr:g}"
                ),
                "task": (
                    f"{getattr(task, 'name', type(task).__name__)}: {len(order.examples):,}"
                    f" training examples, {len(held_out)} held out"
                ),
                "model": (
                    f"{run.model.path or run.model.name}, {parameters / 1e6:.2f}M parameters;"
                    f" reference {reference}"
                ),
                "device": (
                    f"{context.device.name}, {context.device.memory_gb:.0f} GB;"
                    f" hardware={run.hardware.name}"
                ),
                "numbers": (
                    f"{numbers.name}{', GradScaler' if numbers.scaler else ''}{compiled}, masters"
                    " float32; "
                    "attention sdpa"
                    f" ({kernel}){', activations recomputed' if run.opt.checkpointing.enabled else ''}"
                ),
                "ranks": str(context.world_size),
                "rollout": (
                    f"{settings.prompts_per_step} prompts x {size} samples, {tokens} new tokens at"
                    f" most, {min(rows, completions)} rows a forward; dead groups replaced in"
                    f" {settings.resample_rounds} rounds at most"
                ),
                "training": (
                    f"{min(micro, completions)} completions a forward, gradients accumulated"
                ),
                "memory": f"about {peak / 2**30:.2f} GB a rank{fsdp.planned(sampler.model, whole)}",
                "folder": str(context.out_dir),
            }
        )
        summary.write_run(run, context.out_dir, context.device.name)
    return rows, micro
