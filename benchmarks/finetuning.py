"""A step of fine-tuning on accepted completions, by TRL's SFTTrainer and by this project.

Called by `python -m benchmarks real --part rft`. Both learn from the same token ids: prompts with
several completions each, of different lengths. TRL has a row per completion, padded to the longest
of the step; this project computes a prompt once and no padding.
"""

import random
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import grpo, measure
from common.device import Device, hardware, native_bf16
from common.distributed import Context
from common.finetune import Finetuner, Tree
from common.memory import RowLimit
from common.parts import open_parts
from common.run import Timer
from launch import compose
from rft import models

PEER, OURS = "TRL", "this project"
SHORTEST, LR = 8, 1e-5


def draw_trees(work: dict[str, Any]) -> list[Tree]:
    """Return the prompts and completions of all steps, as random token ids."""
    draw, tokens = random.Random(1), work["prompt_tokens"]

    def ids(count: int) -> list[int]:
        return [draw.randrange(100, 40000) for _ in range(count)]

    trees = []
    for _ in range(work["prompts"] * (work["steps"] + 1)):
        prompt = ids(tokens)
        completions = [ids(draw.randint(SHORTEST, work["new"])) for _ in range(work["each"])]
        trees.append(Tree(prompt, completions, [[True] * len(one) for one in completions]))
    return trees


def measure_row(work: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of each step except the first, the first loss, and the peak memory of one
    row, measured in a process of its own.
    """
    measure.print_to(f"{work['folder']}/rows.log")
    return (peer if work["row"] == PEER else ours)(work)


def ours(work: dict[str, Any]) -> dict[str, Any]:
    """Measure this project's fine-tuning."""
    memory, trees = measure.Peak(), draw_trees(work)
    run = compose(
        [
            "algo=rft",
            "task=chess",
            "model=hf",
            f"model.path={work['model']}",
            f"hardware={'cpu' if work['device'] == 'cpu' else 'auto'}",
            "opt=[amp]" if work["half"] else "opt=[]",
            f"algo.lr={LR}",
        ]
    )
    device = Device(torch.device(work["device"]), "here", 0.0, matches=True)
    hardware.choose_attention(device.device)
    parts = open_parts(run, Context(0, 1, device, Path(work["folder"])), grpo.Positions())
    parts = models.without_sampler(parts)
    completions = work["prompts"] * work["each"]
    tuner = Finetuner(parts, 0, RowLimit("algo.train_rows", completions))
    seconds, losses = [], []
    for step in range(work["steps"] + 1):
        some = trees[step * work["prompts"] : (step + 1) * work["prompts"]]
        took, numbers = measure.seconds(
            lambda some=some, step=step: tuner.step(some, step, LR, Timer()), parts.lm.device
        )
        seconds.append(took)
        losses.append(numbers["loss"])
    return {"seconds": seconds[1:], "loss": losses[0], "memory": memory.gb()}


def peer(work: dict[str, Any]) -> dict[str, Any]:
    """Measure TRL's SFTTrainer."""
    memory, trees = measure.Peak(), draw_trees(work)
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [(tree.prompt, tokens) for tree in trees for tokens in tree.completions]
    data = [
        {"input_ids": prompt + tokens, "labels": [-100] * len(prompt) + tokens}
        for prompt, tokens in rows
    ]
    arguments = SFTConfig(
        **measure.trainer_settings(work),
        per_device_train_batch_size=work["prompts"] * work["each"],
        learning_rate=LR,
        bf16=work["half"],
        train_sampling_strategy="sequential",
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    watch = measure.Stopwatch()
    trainer = SFTTrainer(
        model=work["model"],
        args=arguments,
        train_dataset=Dataset.from_list(data),
        callbacks=[watch],
    )
    trainer.train()
    loss = trainer.state.log_history[0]["loss"]
    return {"seconds": watch.seconds, "loss": loss, "memory": memory.gb()}


# The number of completions per prompt: RFT keeps several, SFT is given one.
SHAPES = {"RFT": 4, "SFT": 1}


def compare(report: measure.Report, model: str, folder: str) -> None:
    """Time both in turn on each shape, each in a process of its own, and add their rows."""
    sizes = {"prompts": 8, "prompt_tokens": 139, "new": 96}
    if report.quick:
        sizes = {"prompts": 2, "prompt_tokens": 8, "new": 16}
    report.conditions["sizes"] = report.conditions.get("sizes", {}) | {
        "fine-tuning": sizes | {"each": SHAPES}
    }
    work: dict[str, Any] = {"model": model, "folder": folder, "device": report.device.type} | sizes
    work["steps"] = report.repeats
    # A CPU without bfloat16 in hardware takes minutes for a step in it.
    work["half"] = native_bf16(report.device)
    if not work["half"]:
        report.notes.append("Fine-tuning is in float32: this device has no bfloat16 in hardware.")
    for shape, each in SHAPES.items():
        _compare_shape(report, f"{shape} fine-tuning", work | {"each": each})


def _compare_shape(report: measure.Report, shape: str, work: dict[str, Any]) -> None:
    found: dict[str, dict[str, Any]] = {}
    for row in (PEER, OURS):
        name = f"{shape}: {row}"
        measure.progress(name)
        try:
            one = measure.in_new_process(__name__, measure_row, work | {"row": row})
        except Exception as error:  # whatever it is, the other row stands
            report.skip(name, "s/step", measure.describe(error))
            continue
        found[row] = one
        report.add(name, median(one["seconds"]), "s/step")
        report.add(name, one["memory"], "GB")
        report.add(name, one["loss"], "first loss")
    if len(found) == 2:
        ratio = median(found[PEER]["seconds"]) / median(found[OURS]["seconds"])
        report.figures.append((f"{shape} against TRL", ">= 1.5x", f"{ratio:.2f}x"))
    seconds = {row: one["seconds"] for row, one in found.items()}
    report.conditions.setdefault("seconds", {})[shape] = seconds
