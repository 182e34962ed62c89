"""The plan of an RFT run: the rows that fit the memory, and the work to be done."""

from typing import Any

from omegaconf import OmegaConf

from common import optim
from common.config import CONF, environment, resolvers
from common.finetune import RATES
from common.memory import (
    TRAIN_ROWS,
    Memory,
    RolloutMemory,
    RowLimit,
    count_state,
    describe,
    fit_training,
)
from common.optim import describe_lr
from common.parts import Parts
from common.run import describe_length
from common.task import task_name
from rft.config import ENVIRONMENT, RftConfig
from rft.finetune import ENOUGH, EPOCHS, MORE_EPOCHS
from rft.prompts import Prompts


def fit_rows(parts: Parts) -> tuple[RowLimit, Memory]:
    """Fit rollout and training rows to the memory. Returns the limit of training rows, and the
    memory of a step.
    """
    cfg: RftConfig = parts.run.algo
    optim.check_repeatable(parts.lm.model.config, parts.lm.precision)
    row_limit = RowLimit(
        "algo.train_rows",
        cfg.train_rows or min(cfg.batch_size, TRAIN_ROWS[parts.lm.device.type]),
        fixed=parts.lm.sharding.shared,
    )
    wave = cfg.prompts_per_batch * cfg.chunk_samples
    parts.check_sessions(wave, "algo.prompts_per_batch or algo.chunk_size")
    rollout = RolloutMemory(parts, count_state(parts, False, copies=parts.lm.half), each=wave)
    # Autocast's casts, which are freed block by block if activations are recomputed.
    state = count_state(
        parts, True, copies=parts.lm.half and not parts.run.opt.checkpointing.enabled
    )
    share = -(-cfg.batch_size // parts.context.world_size)
    training = fit_training(parts, row_limit, state, share)
    sampling = rollout.sampling_bytes(wave, cfg.chunk_samples)
    peak = max(training, rollout.fixed + sampling)
    return row_limit, Memory(state, sampling, min(parts.engine.row_limit.rows, wave), peak)


def describe_run(parts: Parts, row_limit: RowLimit, memory: Memory) -> dict[str, str]:
    """Describe the work of the run, with sizes.

    Args: row_limit, memory: results of `fit_rows`.
    """
    cfg, prompts = parts.run.algo, parts.examples
    assert isinstance(prompts, Prompts)
    taken = len(prompts.of(1, cfg.prompts))
    length = describe_length(parts, cfg.iterations, "iterations")
    trained = "the adapter" if parts.lm.adapter else "all weights"
    stage = f"; stage {cfg.stage}" if cfg.stage != "all" else ""
    shard = f", shard {cfg.shard}" if cfg.shard else ""
    skipped = f"; {prompts.skipped} too long and left out" if prompts.skipped else ""
    epochs = f"{cfg.epochs or EPOCHS} epochs"
    epochs += "" if cfg.epochs else f" ({MORE_EPOCHS} below {ENOUGH} steps)"
    lines = {
        "algorithm": f"rft, {length}, from the {cfg.start_from} weights{stage}{shard}",
        **describe(parts),
        "task": f"{task_name(parts.task)}: {len(prompts.train):,} training prompts, {taken:,} per"
        f" iteration; {len(prompts.validation)} for validation, {len(prompts.held_out)} held"
        f" out{skipped}",
        "overlap": prompts.overlap,
        "generate": f"{cfg.samples_per_prompt} samples per prompt, {cfg.second_round_samples}"
        f" more for unsolved ones, {cfg.hint_samples} with a hint; chunks of"
        f" {cfg.prompts_per_batch} prompts x {cfg.chunk_samples} samples,"
        f" {parts.engine.row_limit.rows} rows per forward",
        "select": f"reward from {cfg.select.accept:g}, up to {cfg.select.keep_per_prompt} ways per"
        f" prompt, buffer {cfg.select.buffer}",
        "fine-tune": f"{trained}, {epochs}, {describe_lr(parts, RATES)}, {cfg.batch_size}"
        f" completions per step, {row_limit.rows} per forward",
        "environment": ", ".join(describe_variables(cfg)),
        **memory.describe(parts.lm.model),
    }
    return {key: value for key, value in lines.items() if value}


def describe_variables(cfg: RftConfig) -> list[str]:
    """Return for each environment variable that is set a description, with the setting that
    overrides it.
    """
    resolvers.register()  # a worker has composed nothing
    by_default: Any = OmegaConf.load(CONF / "algo" / "rft.yaml")
    described: list[str] = []
    for name, key in ENVIRONMENT.items():
        described += environment.describe(name, by_default[key], getattr(cfg, key))
    return described
