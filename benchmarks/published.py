"""Steps of this project in the shapes of figures that others published for a GPU.

    python -m benchmarks published --row grpo-0.5b
    python -m benchmarks published --row population-1.5b --json population.json

Each row is a run of `launch.train` with random weights in the shape of a known model and a byte
tokenizer: speed and memory do not depend on what the weights have learnt, if all completions have
their full length. The first step is warm-up. Beside the measured numbers stand what the plan of the
run says before it starts, and the energy, where the driver counts it.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import measure
from benchmarks.grpo import Positions
from benchmarks.models import build, save
from common.config import Run, shipped
from common.device import Device, hardware, total_gb
from common.system import events
from launch import compose, train

OURS, WITHOUT = "this project", "this project, without it"
PHASES = ("rollout", "train", "update")
# Settings of every row: nothing is measured, kept or exported that is no step.
PLAIN: dict[str, Any] = {
    "evaluate.examples": 1,
    "evaluate.validation_examples": 0,
    "evaluate.every": 0,
    "checkpoint.every": 0,
    "keep": "last",
}
GRPO: dict[str, Any] = {
    "algo": "grpo",
    "algo.resample_rounds": 0,
    "algo.kl.beta": 0.0,
    "algo.warmup_steps": 0,
    "algo.lr": 1e-6,
}
ADAPTER: dict[str, Any] = {"model.adapter.rank": 16, "model.quantize": "nf4"}


@dataclass(frozen=True)
class Row:
    """A figure and the run that is measured beside it.

    Attributes:
        about: the work.
        theirs: who published what, on which device.
        value: their number.
        figure: what is compared with it: one of `FIGURES`.
        model: a name of benchmarks.models.
        settings: the run.
        times: how often the question stands in a prompt (75 tokens each).
        steps: steps that are timed after a warm-up; 0 = one step, whose memory alone counts.
        against: settings of a second run, whose ratio to the first one is the figure.
    """

    about: str
    theirs: str
    value: float
    figure: str
    model: str
    settings: dict[str, Any]
    times: int = 1
    steps: int = 2
    against: dict[str, Any] = field(default_factory=dict)


# By figure: its unit, whether less is better, and how it is computed from a measured run.
FIGURES: dict[str, tuple[str, bool, Callable[[dict[str, Any]], float | None]]] = {
    "speed": ("tokens/s", False, lambda found: found["tokens"] / median(found["seconds"])),
    "rollout": ("s", True, lambda found: found["phases"]["rollout"]),
    "memory": ("GB", True, lambda found: found["memory"]),
    "price": ("x", True, lambda found: found["phases"]["train"]),
}
ROWS = {
    "population-1.5b": Row(
        "an EGGROLL step of 256 members x 6 prompts x 100 tokens",
        "RWKV-7 1.5B, H200, up to 1,000 tokens each (derived from arXiv:2511.16652, table 10)",
        22_000.0,
        "speed",
        "1.5b",
        {
            "algo": "eggroll",
            "algo.members": 256,
            "algo.prompts_per_step": 6,
            "algo.samples_per_prompt": 1,
            "algo.sigma": 0.01,
            "algo.lr": 0.01,
            "algo.sampling.max_new_tokens": 100,
            "opt": "[amp]",
        },
    ),
    "grpo-0.5b": Row(
        "the rollout of a GRPO step of 20 prompts x 8 samples x 280 tokens",
        "Qwen2.5-0.5B, slime, GB10",
        41.9,
        "rollout",
        "0.5b",
        GRPO
        | {
            "algo.prompts_per_step": 20,
            "algo.samples_per_prompt": 8,
            "algo.sampling.max_new_tokens": 280,
            "opt": "[amp]",
        },
    ),
    "deterministic": Row(
        "training passes with opt=[amp,deterministic] and with [amp]: 8 prompts x 8 samples x 256",
        "torchtitan, 2.4 to 2.9 times the compute of a step",
        2.4,
        "price",
        "0.5b",
        GRPO
        | {
            "algo.prompts_per_step": 8,
            "algo.samples_per_prompt": 8,
            "algo.sampling.max_new_tokens": 256,
            "opt": "[amp,deterministic]",
        },
        against={"opt": "[amp]"},
    ),
    "grpo-1.5b-nf4": Row(
        "a GRPO step of an adapter on nf4 weights: 1 prompt x 8 samples x 512 tokens",
        "Qwen2.5-1.5B, unsloth",
        5.0,
        "memory",
        "1.5b",
        GRPO
        | ADAPTER
        | {
            "algo.prompts_per_step": 1,
            "algo.samples_per_prompt": 8,
            "algo.sampling.max_new_tokens": 512,
            "opt": "[amp,checkpointing]",
            "hardware.memory_gb": 5.5,  # of which a tenth is to spare
        },
    ),
    "grpo-8b-20k": Row(
        "a GRPO step of an adapter on nf4 weights: 1 prompt of 19,000 tokens x 8 samples x 1,000",
        "Llama-3.1-8B, unsloth",
        54.3,
        "memory",
        "8b",
        GRPO
        | ADAPTER
        | {
            "algo.prompts_per_step": 1,
            "algo.samples_per_prompt": 8,
            "algo.sampling.max_new_tokens": 1_000,
            "opt": "[amp,checkpointing]",
            "hardware.memory_gb": 60.0,
        },
        times=253,
        steps=0,
    ),
}
# With --quick, the same runs with a tiny model.
QUICK: dict[str, Any] = {"algo.sampling.max_new_tokens": 8, "opt": "[]"}
QUICK_SIZES = {"algo.members": 4, "algo.prompts_per_step": 2}


def write_model(name: str, folder: str, device: torch.device) -> int:
    """Write a model of random weights in bfloat16, and a byte tokenizer without a stop token.
    Returns the number of its parameters.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = build(name, pad_token_id=256)
    finally:
        torch.set_default_dtype(default)
    return save(model, folder)


def find_hardware(device: torch.device) -> dict[str, Any]:
    """Return the settings of the device: for the plan its bandwidth, if there is a preset."""
    if device.type == "cpu":
        return {"hardware": "cpu"}
    name = torch.cuda.get_device_name(device)
    preset = hardware.find_preset(Device(device, name, total_gb(device), True))
    known = shipped(f"hardware/{preset}.yaml")["bandwidth_gbs"] if preset else None
    return {"hardware": "auto"} | ({"hardware.bandwidth_gbs": known} if known else {})


def list_settings(row: Row, work: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the run of a row."""
    settings = PLAIN | row.settings | {"model": "hf", "model.path": work["model"]}
    settings |= work["hardware"] | {"algo.steps": row.steps + 1} | changes
    if work["quick"]:
        settings |= QUICK | {k: v for k, v in QUICK_SIZES.items() if k in row.settings}
        settings["algo.steps"] = 2
    return settings


def compose_run(row: Row, work: dict[str, Any], changes: dict[str, Any]) -> Run:
    """Return the run of a row."""
    settings = list_settings(row, work, changes)
    return compose([f"{key}={value}" for key, value in settings.items()])


def make_task(row: Row, work: dict[str, Any]) -> Positions:
    """Return the task of a row."""
    return Positions(1 if work["quick"] else row.times)


def measure_row(name: str, work: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Measure the run of a row, in a process of its own."""
    measure.print_to(f"{work['folder']}/rows.log")
    row, out = ROWS[name], Path(tempfile.mkdtemp(dir=work["folder"])) / "run"
    memory, run = measure.Peak(), compose_run(row, work, changes)
    train(run, out, task=make_task(row, work))
    peak, cuda = memory.gb(), torch.cuda.is_initialized()
    lines = events(out / "metrics.jsonl")[min(row.steps, 1) :]
    found = json.loads((out / "result.json").read_text(encoding="utf-8"))
    tokens = found["generated_tokens"] / found["steps"]
    return {
        "seconds": [line["seconds"] for line in lines],
        "phases": {k: median(line["phase_seconds"].get(k, 0.0) for line in lines) for k in PHASES},
        "memory": peak,
        "tokens": tokens,
        "dead_groups": [line.get("dead_groups", 0.0) for line in lines],  # which are not trained
        "joules": [(line.get("gpu") or {}).get("joules") for line in lines],
        "reserved": torch.cuda.max_memory_reserved() / 2**30 if cuda else None,
    }


def plan_row(name: str, work: dict[str, Any]) -> dict[str, Any]:
    """Return what the plan of a row says: the peak, and the tokens/s, if it estimates them."""
    measure.print_to(f"{work['folder']}/rows.log")
    run = compose_run(ROWS[name], work, {"plan": "true"})
    made = train(run, "", task=make_task(ROWS[name], work))
    return {"memory": made.peak_gb, "rows": made.rows}


def run(options: argparse.Namespace) -> measure.Report:
    """Measure a row, and what is compared with it."""
    row = ROWS[options.row]
    report = measure.Report("published", options, 1)
    device, found = report.device, {}
    unit, less, figure = FIGURES[row.figure]
    with tempfile.TemporaryDirectory() as folder:
        work = {"model": f"{folder}/model", "folder": folder, "quick": options.quick}
        work["hardware"] = find_hardware(device)
        model = "quick" if options.quick else row.model
        parameters = measure.in_new_process(__name__, write_model, model, work["model"], device)
        report.conditions["sizes"] = {"model": model, "parameters": parameters}
        report.conditions["settings"] = list_settings(row, work, {})
        planned = measure.in_new_process(__name__, plan_row, options.row, work)
        report.conditions["plan"] = planned
        runs = {OURS: {}} | ({WITHOUT: row.against} if row.against else {})
        for name, changes in runs.items():
            given = options.row, work, changes
            found[name] = measure.in_new_process(__name__, measure_row, *given)
    report.conditions["measured"] = found
    add_rows(report, row, found, planned)
    value = figure(found[OURS])
    if row.against:
        base = figure(found[WITHOUT])
        value = value / base if value and base else None
    report.add(row.theirs, row.value, unit)
    if value is not None:
        ratio = row.value / value if less else value / row.value
        report.add(OURS, value, unit, row.theirs, ratio)
        wanted = f"{'<=' if less else '>='} {row.value:g} {unit}"
        if not options.quick:
            report.figures.append((f"beside {row.theirs}", wanted, f"{value:.4g} {unit}"))
    report.notes.insert(0, f"{row.about[:1].upper()}{row.about[1:]}.")
    return report


def add_rows(
    report: measure.Report, row: Row, found: dict[str, dict[str, Any]], planned: dict[str, Any]
) -> None:
    """Add seconds, speed, memory and energy of the runs, and what the plan said."""
    for name, one in found.items():
        if any(one["dead_groups"]):
            report.notes.append(f"{name}: not all groups were trained: {one['dead_groups']}.")
        seconds = median(one["seconds"])
        report.add(name, seconds, "s/step")
        for phase, value in one["phases"].items():
            report.add(name, value, f"{phase}, s")
        report.add(name, one["tokens"] / one["phases"]["rollout"], "tokens/s sampled")
        report.add(name, one["memory"], "GB")
        if all(one["joules"]):
            report.add(name, median(one["joules"]), "J/step")
        report.add(name, one["reserved"], "GB reserved")
    report.add("the plan", planned["memory"], "GB")
    if row.figure == "memory":
        report.notes.append("GB of 2**30 bytes, as PyTorch counts; a card also holds CUDA itself.")
    if "speed" in planned["rows"]:
        report.notes.append(f"The plan: speed {planned['rows']['speed']}.")
