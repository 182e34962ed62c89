"""The settings that samples, models and evaluations depend on, saved next to each of them."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.config import Run
from common.run import resume
from rft.config import RftConfig
from rft.prompts import Prompts

ROWS = "the rows of the task"  # a hash of them


def sampled_with(run: Run, iteration: int, rows: str) -> dict[str, Any]:
    """Return the settings that the samples of an iteration depend on.

    Args: rows: the hash of the task's rows.
    """
    cfg: RftConfig = run.algo
    rounds = ("samples_per_prompt", "second_round_samples", "hint_samples")
    keys = ("prompts", *rounds, "prompts_per_batch", "chunk_size", "validation_prompts")
    return {
        "iteration": iteration,
        "seed": run.seed,
        "model": asdict(run.model),
        "task": run.task,
        ROWS: rows,
        "algo": {key: getattr(cfg, key) for key in keys}
        | {"sampling": asdict(cfg.sampling), "select.accept": cfg.select.accept},
    }


def finetuned_with(run: Run) -> dict[str, Any]:
    """Return the settings that a fine-tuned model depends on, in addition to its samples."""
    cfg: RftConfig = run.algo
    keys = ("start_from", "epochs", "batch_size", "lr", "warmup_steps")
    groups = ("select", "lr_schedule", "optimizer")
    return {
        "seed": run.seed,
        "model": {"adapter": asdict(run.model)["adapter"]},
        "algo": {key: getattr(cfg, key) for key in (*keys, "grad_clip")}
        | {key: asdict(getattr(cfg, key)) for key in groups},
    }


def evaluated_with(run: Run, prompts: Prompts, digests: dict[str, str]) -> dict[str, Any]:
    """Return the settings that an evaluation depends on, in addition to the model.

    Args: digests: hashes of the evaluated rows.
    """
    cfg: RftConfig = run.algo
    evaluate = run.evaluate
    drawn = {"drawn": evaluate.sampling, "repeats": evaluate.repeats}
    return {
        **(drawn if evaluate.sampling != "greedy" else {}),
        "seed": run.seed,
        "model": asdict(run.model),
        "task": run.task,
        "rows": digests,
        "examples": len(prompts.held_out),
        "validation_prompts": len(prompts.validation),
        "samples": run.evaluate.samples,
        "also": run.evaluate.also,
        "text": run.evaluate.text,
        "accept": cfg.select.accept,
        "sampling": asdict(cfg.sampling),
    }


def check_same(path: Path, saved: dict[str, Any], given: dict[str, Any]) -> None:
    """Raise ConfigError if the settings that `path` was made with differ from the given ones."""
    resume.refuse(path, resume.differences(saved, json.loads(json.dumps(given))))
