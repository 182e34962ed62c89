"""Measure the same training steps with one rank and with several, and the phases of their time:
algo=scaling.

Each number of ranks is started on this node, and all of them again for each repeat, so that a
device that slows down affects all of them. In strong scaling algo.batch_size is the batch of all
ranks together, in weak scaling that of each rank. Exposed communication is the time that the
exchange of gradients adds to the backward pass: the time of that pass with the exchange, minus the
time on the same batch under no_sync.
"""

import itertools
import json
import logging
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.config import ConfigError, DdpConfig, Run, unused
from common.device import count_cores, hardware, precision
from common.distributed import Context, launch
from common.report import summary
from common.system import ranked, write_text
from ddp_bench.classifier import Bench
from ddp_bench.config import ScalingConfig, check_switches
from ddp_bench.data import Batch, Loader, to
from ddp_bench.report.diagnosis import group_records
from ddp_bench.report.records import PHASES, read_table
from ddp_bench.report.tables import align, describe_groups
from ddp_bench.step import Clock, Stepper
from ddp_bench.tasks import ClassTask

log = logging.getLogger("clutch")

Measured = dict[int, list[dict[str, Any]]]  # by number of ranks, once per repeat
Feed = Iterator[tuple[Batch, list[int]]]  # of a rank, with the rows of all ranks

CHECKED = 10  # steps whose loss is compared
# the largest difference of the loss, relative to max(1, loss): the order of summation differs
ROUNDING = 2e-5
PROBED = 20  # batches whose backward pass is timed with and without the exchange


def scale(run: Run, out_dir: Path, task: ClassTask | None = None) -> dict[str, Any]:
    """Measure, write RUN/scaling.json and print it. Return the content of the file.

    Raises: ConfigError for settings that cannot work.
    """
    cfg: ScalingConfig = run.algo
    check_alone(run, out_dir)
    devices = hardware.local_devices(run.hardware)
    if devices and max(cfg.ranks) > devices:
        raise ConfigError(
            f"algo.ranks={cfg.ranks}, but this node has {devices} CUDA devices. Use at most"
            f" {devices}, or hardware=cpu, which measures ranks that share the cores."
        )
    measured: Measured = {count: [] for count in cfg.ranks}
    saved: dict[str, Any] = {}
    try:
        launch_each("ddp_bench.scaling:measure", run, measured, out_dir, task)
    finally:  # measurements before a failure are kept if one rank is among them
        lacking = [count for count, repeats in measured.items() if not repeats]
        if 1 not in lacking:
            for count in lacking:
                del measured[count]
                log.warning("%d ranks were not measured", count)
            device = hardware.find(run.hardware)
            saved |= summarise(run, device, measured)
            groups = save(run, out_dir, device.name, "scaling.json", saved)
            print_findings(saved, groups, out_dir)
    return saved


def launch_each(
    entry: str, run: Run, results: Measured, out_dir: Path, task: ClassTask | None
) -> None:
    """Append the result of `entry` for each number of ranks, once per repeat."""
    threads = torch.get_num_threads()
    try:
        for _ in range(run.algo.repeats):
            for count, repeats in results.items():
                repeats.append(launch(entry, with_ranks(run, count), out_dir, task))
    finally:
        torch.set_num_threads(threads)  # which one rank, measured in this process, changes


def save(run: Run, out_dir: Path, device: str, name: str, saved: dict[str, Any]) -> str:
    """Write RUN/name, and return its report."""
    summary.write_run(run, out_dir, device)
    write_text(out_dir / name, json.dumps(saved, indent=2) + "\n")
    return describe_groups(group_records(read_table(out_dir / name)))


def check_alone(run: Run, out_dir: Path) -> None:
    """Raise ConfigError for settings that conflict with a run that starts its own ranks."""
    name, ranks, opt = run.algo.name, run.algo.ranks, run.opt
    if ranked():
        raise ConfigError(f"algo={name} starts its own ranks. Run it without torchrun or srun.")
    unused(
        (opt.ddp.ranks is not None, f"opt.ddp.ranks={opt.ddp.ranks}", f"with algo.ranks={ranks}"),
        (opt.fsdp.enabled, "opt=fsdp", f"with algo={name}"),
        (opt.profile.enabled, "opt=profile", f"with algo={name}"),
    )
    check_switches(run, run.algo, max(ranks))
    names = ("result.json", "scaling.json", "prediction.json", "checkpoints")
    if any((out_dir / name).exists() for name in names):
        raise ConfigError(f"{out_dir} already holds a run. Use another hydra.run.dir.")


def with_ranks(run: Run, ranks: int) -> Run:
    """Return the run with this number of ranks on this node."""
    ddp = replace(run.opt.ddp, enabled=True, ranks=ranks) if ranks > 1 else DdpConfig()
    return replace(run, opt=replace(run.opt, ddp=ddp))


def threads_per_rank(run: Run) -> int:
    """Return the cores per rank on a CPU with the largest number of ranks."""
    return max(1, count_cores() // max(run.algo.ranks))


# --- in each rank


def check_rows(bench: Bench, batch_rows: int, ranks: int) -> None:
    """Raise ConfigError if there are fewer rows than a batch needs."""
    if len(bench.rows) < batch_rows:
        raise ConfigError(
            f"algo.batch_size={bench.cfg.batch_size} makes batches of {batch_rows} rows with"
            f" {ranks} ranks, and there are {len(bench.rows)} training rows. Lower it, or give"
            " more rows."
        )


def open_loader(bench: Bench, batch_rows: int, ranks: int) -> Loader:
    """Return the batches of a rank. Raises: ConfigError if there are fewer rows than a
    batch needs.
    """
    check_rows(bench, batch_rows, ranks)
    return bench.make_batches(batch_rows, ranks)


def find_facts(bench: Bench, stepper: Stepper) -> dict[str, Any]:
    """Return the facts of task and model in scaling.json and prediction.json."""
    return {
        "task": getattr(bench.task, "name", type(bench.task).__name__),
        "parameters": sum(p.numel() for p in stepper.model.parameters()),
        "training_rows": len(bench.rows),
        "dtype": bench.precision.name,
    }


def measure(run: Run, context: Context, task: ClassTask | None = None) -> dict[str, Any]:
    """Return losses and times for one number of ranks; times are measured on each rank
    separately.
    """
    cfg: ScalingConfig = run.algo
    if context.device.device.type == "cpu":
        torch.set_num_threads(threads_per_rank(run))
    bench = Bench(run, context, task, precision.resolve(run.opt, context.device.device))
    largest = max(cfg.ranks)  # whose batches must be there, too, before hours of measurements
    check_rows(bench, cfg.batch_size * (largest if "weak" in cfg.modes else 1), largest)
    # Ranks draw dropout by themselves, so it is off where their loss must be that of one rank.
    alike = bench.make_stepper(context, dropout=0.0)
    feed = open_loader(bench, cfg.batch_size, context.world_size).from_step(0)
    losses = [
        alike.step(batch, len(rows), i, CHECKED, Clock(alike.device))["loss"]
        for i, (batch, rows) in zip(range(CHECKED), feed, strict=False)
    ]
    times: dict[str, Any] = {}
    for mode in cfg.modes if context.world_size > 1 else cfg.modes[:1]:
        batch_rows = cfg.batch_size * (context.world_size if mode == "weak" else 1)
        if context.main:
            log.info("measuring %d ranks, %d rows a step", context.world_size, batch_rows)
        feed = open_loader(bench, batch_rows, context.world_size).from_step(0)
        stepper = bench.make_stepper(context)
        spans = time_steps(stepper, feed, batch_rows, cfg)
        exposed = measure_exposed(stepper, feed)
        times[mode] = {"batch_rows": batch_rows, "spans": spans, "exposed": exposed}
    return find_facts(bench, alike) | {"losses": losses, "times": times}


def time_steps(
    stepper: Stepper, feed: Feed, batch_rows: int, cfg: ScalingConfig
) -> list[dict[str, float]]:
    """Return the seconds, by phase, of each step after the warm-up with a full batch."""
    spans: list[dict[str, float]] = []
    steps, step = cfg.warmup_steps + cfg.steps, 0
    while len(spans) < cfg.steps:
        started, clock = time.perf_counter(), Clock(stepper.device)
        batch, rows = next(feed)
        waited = time.perf_counter() - started
        stepper.step(batch, len(rows), min(step, steps - 1), steps, clock)
        phases = {"data": waited, **clock.read()}
        seconds = time.perf_counter() - started
        # The last batch of an epoch may be smaller.
        if step >= cfg.warmup_steps and len(rows) == batch_rows:
            spans.append({"seconds": seconds, **phases})
        step += 1
    return spans


def measure_exposed(stepper: Stepper, feed: Feed) -> float:
    """Return the median seconds that the exchange of gradients adds to a backward pass."""
    if stepper.wrapper is None:
        return 0.0
    differences = []
    for _ in range(PROBED):
        batch, rows = next(feed)
        batch, took = to(batch, stepper.device), {}
        for together in (False, True):
            stepper.updater.clear()
            # otherwise the delay of one rank would look like communication of the others
            stepper.context.barrier()
            clock = Clock(stepper.device)
            with nullcontext() if together else stepper.wrapper.no_sync():
                stepper.backward(batch, len(rows), stepper.row_limit.rows, clock)
            phases = clock.read()
            took[together] = phases["backward"] + phases.get("communication", 0.0)
        differences.append(took[True] - took[False])
    return max(0.0, statistics.median(differences))


# --- results


def summarise(
    run: Run, device: hardware.Device, by_ranks: dict[int, list[dict[str, Any]]]
) -> dict[str, Any]:
    """Return the content of scaling.json."""
    cfg: ScalingConfig = run.algo
    first = by_ranks[1][0]
    runs = [
        {"scaling": "one rank" if ranks == 1 else mode, "ranks": ranks}
        | pool([repeat["times"][mode] for repeat in repeats])
        for ranks, repeats in by_ranks.items()
        for mode in repeats[0]["times"]
    ]
    compare(runs)
    losses = np.array([repeat["losses"] for repeats in by_ranks.values() for repeat in repeats])
    alone = np.array(first["losses"])
    apart = float((abs(losses - alone) / np.maximum(1.0, abs(alone))).max())
    # Other numbers and compressed gradients may differ by more.
    exact = first["dtype"] == "float32" and not run.opt.tf32.enabled and cfg.ddp.hook == "none"
    return describe_run(run, first) | {
        "device": device.name,
        "threads_per_rank": threads_per_rank(run) if device.device.type == "cpu" else None,
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "GLOO_"))},
        "loss_check": {
            "steps": CHECKED,
            "largest_difference": apart,
            "limit": ROUNDING if exact else None,
            "same": apart <= ROUNDING if exact else None,
        },
        "runs": runs,
    }


def describe_run(run: Run, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run; runs with equal settings are compared.

    Args: facts: the result of `find_facts`.
    """
    cfg: ScalingConfig = run.algo
    opt = {name: value for name, value in asdict(run.opt).items() if name not in ("ddp", "profile")}
    groups = ("model", "ddp", "loader", "optimizer", "tokenizer")
    settings = {name: asdict(getattr(cfg, name)) for name in groups}
    return {
        **{name: facts[name] for name in ("task", "parameters", "training_rows", "dtype")},
        "model": f"encoder {cfg.model.layers}x{cfg.model.size}",
        "settings": settings | {"opt": opt, "task": run.task, "train_rows": cfg.train_rows},
    }


def compare(runs: list[dict[str, Any]]) -> None:
    """Add speed-up and efficiency relative to the first run, which has one rank."""
    for line in runs:
        line["speedup"] = line["rows_per_second"] / runs[0]["rows_per_second"]
        line["efficiency_percent"] = 100 * line["speedup"] / line["ranks"]


def pool(repeats: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine the repeats of one measurement."""

    def complete(span: dict[str, float], exposed: float) -> dict[str, float]:
        # The mark of a step at the last gradient cannot distinguish waiting from computing; the
        # probe can.
        computed = max(0.0, span["backward"] + span.get("communication", 0.0) - exposed)
        phases = {"backward": computed, "communication": exposed}
        return dict.fromkeys(PHASES, 0.0) | span | phases

    steps = [[complete(span, repeat["exposed"]) for span in repeat["spans"]] for repeat in repeats]

    def summarise(name: str) -> dict[str, Any]:
        values = [[step[name] for step in repeat] for repeat in steps]
        p50, p90 = np.percentile(list(itertools.chain(*values)), (50, 90)).tolist()
        # A mean, since the median does not show a loader that delays only every fourth step.
        return {"p50": p50, "p90": p90, "mean": statistics.median(map(statistics.fmean, values))}

    medians = [statistics.median(step["seconds"] for step in repeat) for repeat in steps]
    step_seconds = summarise("seconds")
    return {
        "batch_rows": repeats[0]["batch_rows"],
        "step_seconds": step_seconds | {"p50_of_repeats": medians},
        "phase_seconds": {name: summarise(name) for name in PHASES},
        "rows_per_second": repeats[0]["batch_rows"] / step_seconds["mean"],
    }


def print_findings(saved: dict[str, Any], groups: str, out_dir: Path) -> None:
    """Print the tables, the check of the losses, the causes and the advice."""
    phases = [["scaling", "ranks", *PHASES]]
    for run in saved["runs"]:
        times = (f"{1000 * run['phase_seconds'][name]['p50']:.2f}" for name in PHASES)
        phases.append([run["scaling"], str(run["ranks"]), *times])
    log.info("\nmilliseconds of a step\n%s\n", make_table(saved["runs"]))
    log.info("of its phases, p50\n%s\n", "\n".join(align(phases)))
    losses = saved["loss_check"]
    apart = f"{losses['largest_difference']:.1e} apart at most"
    log.info("loss of %d steps at an equal batch: %s", losses["steps"], apart)
    if losses["same"] is False:
        text = "float32 rounding is %.0e: the ranks do not compute what one does."
        log.warning(text, losses["limit"])
    log.info("\n%s", groups)
    figures = f"figures: python -m ddp_bench.report --root {out_dir}"
    log.info("written to %s/scaling.json; %s", out_dir, figures)


def make_table(runs: list[dict[str, Any]]) -> str:
    """Return one line per run of scaling.json or prediction.json."""
    rows = [["scaling", "ranks", "rows", "p50", "p90", "rows/s", "speed-up", "efficiency"]]
    rows += [
        [
            *(run["scaling"], str(run["ranks"]), str(run["batch_rows"])),
            *(f"{1000 * run['step_seconds'][end]:.2f}" for end in ("p50", "p90")),
            *(f"{run['rows_per_second']:.0f}", f"{run['speedup']:.2f}x"),
            f"{run['efficiency_percent']:.0f} %",
        ]
        for run in runs
    ]
    return "\n".join(align(rows))
