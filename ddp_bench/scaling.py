"""algo=scaling: the same training steps with one rank and with several, and where their
time goes.

    python launch.py algo=scaling 'algo.ranks=[1,2]' algo.mode=both

Each number of ranks is started on this node, and all of them again for each repeat, so that a
device that slows down slows all. Strong scaling: algo.batch_size is of all ranks. Weak: it is of
each rank. Exposed communication is what the exchange of gradients adds to the backward pass: that
pass on a batch with it, less the pass on the same batch under no_sync. Before the timing the loss
of a few steps without dropout is compared at an equal batch of all ranks.
"""

import json
import logging
import os
import statistics
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from common import hardware, precision
from common.config import ConfigError, DdpConfig, Run
from common.distributed import slurm
from common.distributed.context import Context
from common.distributed.workers import launch
from common.files import write_text
from common.report import summary
from ddp_bench import models
from ddp_bench.config import ScalingConfig, check_switches
from ddp_bench.data import Batches, Loader, Rows, held_out, prepare, to
from ddp_bench.report import PHASES, grouped, quantile, told
from ddp_bench.report import scaling as read_back
from ddp_bench.step import Clock, Stepper
from ddp_bench.tasks import ClassTask, made

log = logging.getLogger("clutch")

CHECKED = 10  # steps whose loss is compared
# largest difference of it, of 1 or of the loss where that is larger: sums in another order
ROUNDING = 2e-5
PROBED = 20  # batches whose backward pass is timed with and without the exchange


def scale(run: Run, out_dir: Path, task: ClassTask | None = None) -> dict[str, Any]:
    """Measure, write RUN/scaling.json and print it. Returns what the file holds.

    Raises: ConfigError for settings that cannot work.
    """
    settings: ScalingConfig = run.algo
    check(run, out_dir)
    by_ranks: dict[int, list[dict[str, Any]]] = {ranks: [] for ranks in settings.ranks}
    # Every rank has the cores that it has among the most of them: like a device, which does not
    # shrink.
    device = hardware.find(run.hardware)
    threads = (
        max(1, (os.cpu_count() or 1) // max(by_ranks)) if device.device.type == "cpu" else None
    )
    before = torch.get_num_threads()
    try:
        for _ in range(settings.repeats):
            for ranks, found in by_ranks.items():
                ddp = replace(run.opt.ddp, enabled=True, ranks=ranks) if ranks > 1 else DdpConfig()
                one = replace(run, opt=replace(run.opt, ddp=ddp))
                found.append(launch("ddp_bench.scaling:measure", one, out_dir, task))
    finally:
        torch.set_num_threads(before)
    summary.write_run(run, out_dir, device.name)
    saved = summarised(run, device, threads, by_ranks)
    write_text(out_dir / "scaling.json", json.dumps(saved, indent=2) + "\n")
    tell(saved, out_dir)
    return saved


def check(run: Run, out_dir: Path) -> None:
    """Raise ConfigError for what algo=scaling cannot go with here."""
    settings: ScalingConfig = run.algo
    check_alone(run, out_dir, settings.ranks)
    devices = hardware.local_devices(run.hardware)
    if devices and max(settings.ranks) > devices:
        raise ConfigError(
            f"algo.ranks={settings.ranks}, but this node has {devices} CUDA devices. Use at"
            f" most {devices}, or hardware=cpu, which measures ranks that share the cores."
        )


def check_alone(run: Run, out_dir: Path, ranks: list[int]) -> None:
    """Raise ConfigError for what a run that starts its own ranks
    cannot go with.
    """
    if slurm.ranked():
        raise ConfigError(
            f"algo={run.algo.name} starts its own ranks. Run it without torchrun or srun: python launch.py ..."
        )
    if run.opt.ddp.ranks is not None:
        raise ConfigError(
            f"opt.ddp.ranks={run.opt.ddp.ranks} has no effect with algo.ranks={ranks}. Leave it out."
        )
    if run.opt.fsdp.enabled:
        raise ConfigError(
            f"opt=fsdp has no effect with algo={run.algo.name}, which is of DistributedDataParallel. Leave it out."
        )
    if run.opt.profile.enabled:
        raise ConfigError(
            f"opt=profile has no effect with algo={run.algo.name}: it would slow what is measured. Leave it out."
        )
    check_switches(run, run.algo, max(ranks))
    if any(
        (out_dir / name).exists()
        for name in ("result.json", "scaling.json", "prediction.json", "checkpoints")
    ):
        raise ConfigError(f"{out_dir} already holds a run. Use another hydra.run.dir.")


# --- in each rank ----------------------------------------------------------------------------------------------------


def measure(run: Run, context: Context, task: ClassTask | None = None) -> dict[str, Any]:
    """Losses and times of one number of ranks; times are those of each rank by itself."""
    settings: ScalingConfig = run.algo
    device = context.device.device
    if device.type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // max(settings.ranks)))
    task = task or made(run.task)
    torch.backends.cudnn.benchmark = device.type == "cuda"
    data, tokenizer = prepare(task, settings.tokenizer, settings.model.max_tokens, log.info)
    rows, _ = held_out(data["train"], settings.validation_share, run.seed)

    def stepper(dropout: float) -> Stepper:
        sizes = replace(settings.model, dropout=dropout)
        model = models.build(sizes, len(task.classes), tokenizer, data["train"], run.seed).to(
            device
        )
        return Stepper(model, run, context, precision.resolve(run.opt, device))

    # Ranks draw dropout by themselves, so it is off where their loss must be that of one rank.
    alike = stepper(0.0)
    losses = losses_of(alike, Feed(run, context, data["train"], rows, settings.batch_size))
    times: dict[str, Any] = {}
    for mode in ("strong", "weak"):
        batch_rows = settings.batch_size * (context.world_size if mode == "weak" else 1)
        if settings.mode in (mode, "both") and not (times and context.world_size == 1):
            if context.main:
                ranks = f"{context.world_size} rank{'s' * (context.world_size > 1)}"
                log.info("measuring %s, %d rows a step", ranks, batch_rows)
            feed = Feed(run, context, data["train"], rows, batch_rows)
            times[mode] = timed(stepper(settings.model.dropout), feed)
    return {
        "losses": losses,
        "times": times,
        "task": getattr(task, "name", type(task).__name__),
        "parameters": sum(p.numel() for p in alike.model.parameters()),
        "dtype": alike.numbers.name,
        "training_rows": len(rows),
    }


class Feed:
    """The batches of this rank, with the rows that all ranks have in each."""

    def __init__(
        self, run: Run, context: Context, data: Rows, rows: list[int], batch_rows: int
    ) -> None:
        settings: ScalingConfig = run.algo
        if len(rows) < batch_rows:
            raise ConfigError(
                f"algo.batch_size={settings.batch_size} makes batches of {batch_rows} rows with"
                f" {context.world_size} ranks, and there are {len(rows)} training rows. Lower it,"
                " or give more rows."
            )
        self.batch_rows = batch_rows
        self.batches = Batches(
            *(rows, data.lengths, batch_rows, settings.loader.bucket_batches, run.seed),
            *(context.rank, context.world_size),
        )
        self.loader = Loader(data, self.batches, settings.loader, context.device.device).from_step(
            0
        )
        self.step, self.order = 0, []

    def take(self) -> tuple[Any, int]:
        """The next batch, and its rows."""
        epoch, position = divmod(self.step, len(self.batches))
        self.order = self.order if self.order and position else self.batches.epoch(epoch)
        self.step += 1
        return next(self.loader), len(self.order[position])


def losses_of(stepper: Stepper, feed: Feed) -> list[float]:
    """The loss of the first steps."""
    clock, found = Clock(stepper.device), []
    for step in range(CHECKED):
        batch, rows = feed.take()
        found.append(stepper.step(batch, rows, step, CHECKED, clock)["loss"])
    return found


def timed(stepper: Stepper, feed: Feed) -> dict[str, Any]:
    """Seconds of the steps after the warm-up and of their phases, of whole batches; exposed
    communication of a step.
    """
    settings, spans = stepper.settings, []
    steps, step = settings.warmup_steps + settings.steps, 0
    while len(spans) < settings.steps:
        started, clock = time.perf_counter(), Clock(stepper.device)
        batch, rows = feed.take()
        waited = time.perf_counter() - started
        stepper.step(batch, rows, min(step, steps - 1), steps, clock)
        phases = {"data": waited, **clock.read()}
        seconds = time.perf_counter() - started
        if (
            step >= settings.warmup_steps and rows == feed.batch_rows
        ):  # the last batch of an epoch may be smaller
            spans.append({"seconds": seconds, **phases})
        step += 1
    return {"batch_rows": feed.batch_rows, "spans": spans, "exposed": exposed(stepper, feed)}


def exposed(stepper: Stepper, feed: Feed) -> float:
    """Seconds that the exchange of gradients adds to a backward pass: the median over batches of
    the difference.
    """
    if stepper.wrapper is None:
        return 0.0
    found = []
    for _ in range(PROBED):
        batch, rows = feed.take()
        batch, took = to(batch, stepper.device), {}
        for together in (False, True):
            stepper.updater.clear()
            # else a rank that is behind would look like communication of the others
            stepper.context.barrier()
            clock = Clock(stepper.device)
            with nullcontext() if together else stepper.wrapper.no_sync():
                stepper.backward(batch, rows, stepper.limit.rows, clock)
            phases = clock.read()
            took[together] = phases["backward"] + phases.get("communication", 0.0)
        found.append(took[True] - took[False])
    return max(0.0, statistics.median(found))


# --- what comes of it ------------------------------------------------------------------------------------------------


def summarised(
    run: Run,
    device: hardware.Device,
    threads: int | None,
    by_ranks: dict[int, list[dict[str, Any]]],
) -> dict[str, Any]:
    """What scaling.json holds."""
    settings: ScalingConfig = run.algo
    first = by_ranks[1][0]
    runs = []
    for ranks, repeats in by_ranks.items():
        for mode in repeats[0]["times"]:
            runs.append(
                {"scaling": "one rank" if ranks == 1 else mode, "ranks": ranks}
                | pooled([repeat["times"][mode] for repeat in repeats])
            )
    compare(runs)
    apart = max(
        abs(loss - alone) / max(1.0, abs(alone))
        for repeats in by_ranks.values()
        for repeat in repeats
        for loss, alone in zip(repeat["losses"], first["losses"], strict=True)
    )
    exact = first["dtype"] == "float32" and not run.opt.tf32.enabled and settings.ddp.hook == "none"
    return described(run, first) | {
        "device": device.name,
        "threads_per_rank": threads,
        "steps": settings.steps,
        "warmup_steps": settings.warmup_steps,
        "repeats": settings.repeats,
        "environment": {
            name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "GLOO_"))
        },
        "loss_check": {
            "steps": CHECKED,
            "largest_difference": apart,
            "limit": (
                ROUNDING if exact else None
            ),  # other numbers and compressed gradients may differ by more
            "same": apart <= ROUNDING if exact else None,
        },
        "runs": runs,
    }


def described(run: Run, found: dict[str, Any]) -> dict[str, Any]:
    """What was run, for scaling.json and prediction.json: equal settings are compared. found: what
    a rank told.
    """
    settings: ScalingConfig = run.algo
    opt = {name: value for name, value in asdict(run.opt).items() if name not in ("ddp", "profile")}
    loader = asdict(settings.loader)
    return {
        "task": found["task"],
        "model": f"encoder {settings.model.layers}x{settings.model.size}",
        "parameters": found["parameters"],
        "gradient_mb": 4 * found["parameters"] / 2**20,
        "training_rows": found["training_rows"],
        "dtype": found["dtype"],
        "settings": {
            "model": asdict(settings.model),
            "ddp": asdict(settings.ddp),
            "loader": loader,
            "opt": opt,
        }
        | {"task": run.task, "train_rows": settings.train_rows},
        "versions": {"torch": str(torch.__version__), "cuda": torch.version.cuda},
    }


def compare(runs: list[dict[str, Any]]) -> None:
    """Fill in speed-up and efficiency against the first, the one rank."""
    for found in runs:
        found["speedup"] = found["rows_per_second"] / runs[0]["rows_per_second"]
        found["efficiency_percent"] = 100 * found["speedup"] / found["ranks"]


def pooled(repeats: list[dict[str, Any]]) -> dict[str, Any]:
    """The repeats of one measurement together."""
    steps = [
        {
            name: span.get(name, 0.0)
            for name in ("seconds", "data", "forward", "exchange", "optimizer")
        }
        # The step's own mark of when the gradients were there cannot tell waiting from computing;
        # the probe can.
        | {
            "backward": max(
                0.0, span["backward"] + span.get("communication", 0.0) - repeat["exposed"]
            )
        }
        | {"communication": repeat["exposed"]}
        for repeat in repeats
        for span in repeat["spans"]
    ]

    def both(name: str) -> dict[str, float]:
        values = [step[name] for step in steps]
        return {"p50": quantile(values, 50), "p90": quantile(values, 90)}

    medians = [statistics.median(span["seconds"] for span in repeat["spans"]) for repeat in repeats]
    step_seconds: dict[str, Any] = {**both("seconds"), "p50_of_repeats": medians}
    return {
        "batch_rows": repeats[0]["batch_rows"],
        "step_seconds": step_seconds,
        "phase_seconds": {name: both(name) for name in PHASES},
        "rows_per_second": repeats[0]["batch_rows"] / step_seconds["p50"],
    }


def tell(saved: dict[str, Any], out_dir: Path) -> None:
    """Print the table, the check of the losses, the causes and what to do."""
    log.info("\nmilliseconds of a step; phases are p50\n%s\n", table(saved["runs"]))
    losses = saved["loss_check"]
    text = (
        f"loss of {losses['steps']} steps at an equal batch: {losses['largest_difference']:.1e}"
        " apart at most"
    )
    if losses["same"] is False:
        log.warning(
            "%s, and float32 rounding is %.0e. The ranks do not compute what one does.",
            text,
            losses["limit"],
        )
    else:
        log.info("%s%s", text, "" if losses["same"] is None else ", float32 rounding")
    log.info("\n%s", told(grouped(read_back(out_dir / "scaling.json")), []))
    log.info(
        "written to %s/scaling.json; figures: python -m ddp_bench.report --root %s",
        out_dir,
        out_dir,
    )


def table(runs: list[dict[str, Any]], phases: bool = True) -> str:
    """A line for each of the runs of scaling.json or prediction.json; with p90 and phases it is 130
    wide, without 70.
    """
    rows = [
        {
            "scaling": run["scaling"],
            "ranks": str(run["ranks"]),
            "rows": str(run["batch_rows"]),
            "p50": f"{1000 * run['step_seconds']['p50']:.2f}",
            **({"p90": f"{1000 * run['step_seconds']['p90']:.2f}"} if phases else {}),
            **{
                name: f"{1000 * run['phase_seconds'][name]['p50']:.2f}" for name in PHASES if phases
            },
            "rows/s": f"{run['rows_per_second']:.0f}",
            "speed-up": f"{run['speedup']:.2f}x",
            "efficiency": f"{run['efficiency_percent']:.0f} %",
        }
        for run in runs
    ]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    lines = ({name: name for name in widths}, *rows)
    return "\n".join(
        "  ".join(row[name].rjust(width) for name, width in widths.items()) for row in lines
    )
