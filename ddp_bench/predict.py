"""Predict step time, speed-up and efficiency for numbers of ranks that are not available yet:
algo=predict.

step(n) = data + forward + backward + exposed communication + exchange + optimizer. Computation is
that of one device on its share of the rows. Gradients are sent in buckets of algo.ddp.bucket_cap_mb
as the backward pass computes them; the time to send those that have not arrived at its end is
exposed, always including the last bucket.

The device is measured with the real step. If several ranks share a machine, as many processes as it
holds compute at once and send nothing, since they share caches, memory and clocks. The wait for the
slowest rank is the mean over steps of the slowest, minus the mean. A GPU that is not present is
simulated, which gives only a rough estimate.
"""

import logging
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.config import ConfigError, Run, no_effect
from common.device import Precision, count_cores, hardware, precision
from common.distributed import Context, launch
from common.system import write_text
from ddp_bench import link as links
from ddp_bench import scaling
from ddp_bench.classifier import Bench
from ddp_bench.config import PredictConfig
from ddp_bench.data import WORKERS_PER_GPU, Loader, split
from ddp_bench.link import Link, find_exposed, find_link, fit_link, time_messages
from ddp_bench.report.diagnosis import ENOUGH
from ddp_bench.report.records import PHASES
from ddp_bench.simulate import Fused, SimulatedClock, Simulator, find_peak
from ddp_bench.step import TRAIN_ROWS, Clock, Stepper
from ddp_bench.tasks import ClassTask

log = logging.getLogger("clutch")

SIMULATED, PROBED = 3, 10  # the number of simulated steps; the number of timed batches
CAPS_MB = (1, 2, 5, 10, 25, 50)  # bucket sizes that are considered for advice

Cell = tuple[str, int]  # the kind of scaling (one rank, strong, weak), and the number of ranks


def predict(run: Run, out_dir: Path, task: ClassTask | None = None) -> dict[str, Any]:
    """Measure the present devices, predict, write RUN/prediction.json and prediction.txt, print the
    prediction and return the content of the file. Raises: ConfigError for settings that cannot
    work.
    """
    cfg: PredictConfig = run.algo
    absent = run.hardware.device == "cuda" and not hardware.find(run.hardware).matches
    simulating = absent or bool(cfg.times)
    check(run, out_dir, simulating)
    if simulating:
        link, device = find_link(run.hardware), f"{run.hardware.name} of conf/hardware"
        # One process on the CPU takes the steps, whatever other devices are here.
        on_cpu = replace(scaling.with_ranks(run, 1), hardware=replace(run.hardware, device="cpu"))
        facts = launch("ddp_bench.predict:simulate", on_cpu, out_dir, task)
    else:
        facts, link = measure(run, out_dir, task)
        device = hardware.find(run.hardware).name
    sent = bytes_per_number(cfg) / 4
    shares: dict[Cell, Share] = {
        cell: replace(share, sent=sent) for cell, share in facts["shares"].items()
    }
    if cfg.times:
        factor = cfg.times[1] / 1000 / shares["one rank", 1].p50
        shares = {cell: share.scaled(factor) for cell, share in shares.items()}
    runs = assemble_runs(cfg, shares, link)
    gradient_bytes = bytes_per_number(cfg) * facts["parameters"]
    explained = [
        explain_time(cfg, line, runs[0], gradient_bytes, link)
        for line in runs
        if line["scaling"] == "strong" and line["ranks"] in cfg.times
    ]
    saved = scaling.describe_run(run, facts) | {
        "device": device,
        "threads_per_rank": facts.get("threads"),
        "simulated": simulating,
        "match": run.hardware.match if simulating else None,
        "link": asdict(link),
        "runs": runs,
        "explained": explained,
    }
    groups = scaling.save(run, out_dir, device, "prediction.json", saved)
    text = "\n".join(
        [
            *describe(cfg, saved, gradient_bytes / 2**20),
            groups,
            *advise_buckets(runs, shares, link),
            *(line for one in explained for line in describe_time(one, gradient_bytes / 2**20)),
        ]
    )
    write_text(out_dir / "prediction.txt", text.rstrip("\n") + "\n")
    log.info("\n%s\nwritten to %s/prediction.json and prediction.txt", text, out_dir)
    return saved


def bytes_per_number(cfg: PredictConfig) -> int:
    """Return the bytes that one number of a gradient is sent in."""
    return 4 if cfg.ddp.hook == "none" else 2


def check(run: Run, out_dir: Path, simulating: bool) -> None:
    """Raise ConfigError for settings that conflict with algo=predict."""
    cfg: PredictConfig = run.algo
    scaling.check_alone(run, out_dir)
    if cfg.times and run.hardware.device != "cuda":
        raise ConfigError(
            f"algo.times are explained with the facts of a GPU, and hardware={run.hardware.name}"
            " has none. Name the one that they were measured on, for example hardware=a100_40g."
        )
    for switch in ("compile", "deterministic") if simulating else ():
        if getattr(run.opt, switch).enabled:
            name = run.hardware.name
            raise ConfigError(
                f"opt={switch} can be measured on a {name}, not simulated. Leave it out."
            )
    for key in ("steps", "warmup_steps", "repeats") if simulating else ():
        why = "here: the GPU is not on this node, so its steps are simulated. Leave it out."
        no_effect("algo/scaling.yaml", f"algo.{key}", getattr(cfg, key), why)


def list_cells(cfg: PredictConfig) -> dict[Cell, int]:
    """Return the cells to predict, the one rank first, with the rows of a step on all ranks."""
    rows = cfg.batch_size
    cells = [(mode, ranks) for mode in cfg.modes for ranks in cfg.ranks]
    several = {cell: rows * (cell[1] if cell[0] == "weak" else 1) for cell in cells}
    return {("one rank", 1): rows} | several


@dataclass(frozen=True)
class Share:
    """The seconds that one rank takes for its share of a step's rows, without sending.

    Attributes:
        phases: seconds of each phase, median.
        p50: median seconds of a step, of the slowest of the ranks measured together.
        p90: 90th percentile of the same.
        wait: seconds of waiting for the slowest rank.
        passes: forwards per step; gradients are sent in the last backward pass.
        ready: (bytes as sent, time of arrival as a share of that pass) of each gradient, by
            arrival.
        overlap: whether sending overlaps with computing.
        sent: the share of a gradient's bytes that is sent; buckets are cut by all bytes.
    """

    phases: dict[str, float]
    p50: float
    p90: float
    wait: float
    passes: int
    ready: list[tuple[float, float]]
    overlap: bool
    sent: float = 1.0

    def scaled(self, factor: float) -> "Share":
        """Return the share on a device that takes `factor` times as long."""
        phases = {name: factor * seconds for name, seconds in self.phases.items()}
        times = {name: factor * getattr(self, name) for name in ("p50", "p90", "wait")}
        return replace(self, phases=phases, **times)

    def exposed(self, cap_mb: float, link: Link, ranks: int) -> float:
        """Return the seconds of exposed communication with buckets of `cap_mb` MB."""
        backward = self.phases["backward"] / self.passes
        cap = cap_mb * 2**20 * self.sent
        return find_exposed(self.ready, backward, cap, link, ranks, self.overlap)


@contextmanager
def watching_gradients(stepper: Stepper, clock: Clock) -> Iterator[list[tuple[float, float]]]:
    """Record the time at which each gradient of a step is ready. Yields a list that holds
    Share.ready of the step's last backward pass after the block.
    """
    ready: list[tuple[float, float]] = []
    marks: list[tuple[int, Any]] = []  # the numbers of a gradient, and when it is there

    def note(parameter: torch.Tensor) -> None:
        marks.append((parameter.numel(), clock.mark()))

    hooks = [p.register_post_accumulate_grad_hook(note) for p in stepper.model.parameters()]
    yield ready
    for hook in hooks:
        hook.remove()
    marks, spans = marks[-len(hooks) :], Clock(stepper.device)
    for i, (_, mark) in enumerate(marks):
        spans.add(str(i), marks[0][1], mark)
    times = list(spans.read().values())
    size, last = bytes_per_number(stepper.run.algo), max(times[-1], 1e-12)
    ready += [(size * count, t / last) for (count, _), t in zip(marks, times, strict=True)]


# --- measured


def measure(run: Run, out_dir: Path, task: ClassTask | None) -> tuple[dict[str, Any], Link]:
    """Return facts, shares and the link, measured with as many processes as ranks, devices or
    cores.
    """
    cfg: PredictConfig = run.algo
    devices, cores = hardware.local_devices(run.hardware), count_cores()
    threads = None if devices else scaling.threads_per_rank(run)
    processes = sorted({min(n, devices or cores) for n in (1, *cfg.ranks)})
    entry, most = "ddp_bench.predict:measure_neighbours", processes[-1]
    stated = find_link(run.hardware) if most == 1 else None  # an error before all measurements
    measured: scaling.Measured = {count: [] for count in processes}
    scaling.launch_each(entry, run, measured, out_dir, task)
    if stated is not None:
        link = stated
    else:
        times = [part["messages"] for part in measured[most]]
        medians = map(statistics.median, zip(*times, strict=True))
        points = list(zip(links.SIZES, medians, strict=True))
        source = f"measured between {most} {'GPUs' if devices else 'processes'}"
        link = fit_link(points, most, source)
    shares = {}
    for mode, ranks in list_cells(cfg):
        repeats = [part["times"][mode, ranks] for part in measured[min(ranks, most)]]
        overlap = bool(devices) or cores > ranks * (threads or 1)
        turns = 1.0 if devices else max(1.0, ranks / cores)  # ranks beyond the cores take turns
        # More ranks than were measured also share the cores that make batches.
        making_cores = cores / ranks if ranks > devices > 0 else None
        shares[mode, ranks] = sum_share(repeats, overlap, making_cores).scaled(turns)
    return measured[1][0] | {"shares": shares, "threads": threads}, link


def measure_neighbours(run: Run, context: Context, task: ClassTask | None = None) -> dict[str, Any]:
    """Make steps next to other processes that do the same, without sending; then
    measure the link.
    """
    cfg: PredictConfig = run.algo
    device = context.device.device
    if device.type == "cpu":
        torch.set_num_threads(scaling.threads_per_rank(run))
    places = hardware.local_devices(run.hardware) or count_cores()
    bench = Bench(run, context, task, precision.resolve(run.opt, device))
    stepper = bench.make_stepper(replace(context, rank=0, world_size=1))
    times = {}
    for (mode, ranks), batch_rows in list_cells(cfg).items():
        if min(ranks, places) != context.world_size:
            continue
        if context.main:
            log.info("measuring one of %d ranks, %d rows a step in all", ranks, batch_rows)
        loader = scaling.open_loader(bench, batch_rows, ranks)
        feed = loader.from_step(0)
        context.barrier()  # else some would have no neighbours at first
        spans = scaling.time_steps(stepper, feed, batch_rows, cfg)
        batch, rows = next(feed)
        clock = Clock(device)
        with watching_gradients(stepper, clock) as ready:
            stepper.step(batch, len(rows), 0, 1, clock)
        times[mode, ranks] = {
            "spans": context.gather_objects(spans),
            "passes": -(-len(batch[1]) // stepper.row_limit.rows),
            "ready": ready,
            "workers": loader.workers,
            "making": time_making(bench, loader),
        }
    return scaling.find_facts(bench, stepper) | {"times": times, "messages": time_messages(context)}


def time_making(bench: Bench, loader: Loader) -> float:
    """Return the seconds that a process takes to make the batch of a rank."""
    seconds = []
    for batch in list(loader.batches)[:PROBED]:
        started = time.perf_counter()
        bench.train_rows.__getitems__(batch)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def sum_share(repeats: list[dict[str, Any]], overlap: bool, cores: float | None) -> Share:
    """Return the share of a rank from results of `measure_neighbours`.

    Args: cores: cores per rank, if more ranks share the cores than were measured.
    """
    first = repeats[0]
    spans = [span for repeat in repeats for every in repeat["spans"] for span in every]
    phases = scaling.pool([{"spans": spans, "exposed": 0.0, "batch_rows": 0}])["phase_seconds"]
    steps = [  # per step, the seconds of the ranks that run at the same time
        [span["seconds"] for span in step]
        for repeat in repeats
        for step in zip(*repeat["spans"], strict=True)
    ]
    p50, p90 = np.percentile(np.max(steps, axis=1), (50, 90)).tolist()
    stall = 0.0
    if cores is not None and first["workers"]:
        # The time to make a batch, minus the time of a step, in which the loader works.
        stall = max(0.0, first["making"] / min(first["workers"], cores) - p50)
    return Share(
        phases={name: span["p50"] + stall * (name == "data") for name, span in phases.items()},
        p50=p50 + stall,
        p90=p90 + stall,
        wait=max(0.0, p50 - float(np.median(np.mean(steps, axis=1)))),
        passes=first["passes"],
        ready=first["ready"],
        overlap=overlap,
    )


# --- simulated


def simulate(run: Run, context: Context, task: ClassTask | None = None) -> dict[str, Any]:
    """Return facts and shares on the preset's device: the mean of SIMULATED steps, simulated on
    this CPU.
    """
    dtype, absent = find_peak(run)
    loader, off = run.algo.loader, replace(run.opt.amp, enabled=False, dtype="auto")
    workers = WORKERS_PER_GPU if loader.workers is None else loader.workers
    rows = run.algo.train_rows or TRAIN_ROWS["cuda"]  # of a forward there, not of one here
    algo = replace(run.algo, loader=replace(loader, workers=0, prefetch=None), train_rows=rows)
    plain = replace(run, algo=algo, opt=replace(run.opt, amp=off))
    bench = Bench(plain, context, task, Precision(torch.float32))
    stepper = bench.make_stepper(replace(context, rank=0, world_size=1))
    shares: dict[Cell, Share] = {}
    for (mode, ranks), batch_rows in list_cells(run.algo).items():
        if mode == "weak":  # as many rows per rank as the one has
            shares[mode, ranks] = shares["one rank", 1]
            continue
        log.info("simulating one of %d ranks, %d rows a step in all", ranks, batch_rows)
        loader = scaling.open_loader(bench, batch_rows, ranks)
        shares[mode, ranks] = simulate_share(bench, stepper, loader, Simulator(absent), workers)
    return scaling.find_facts(bench, stepper) | {"shares": shares, "dtype": dtype}


def simulate_share(
    bench: Bench, stepper: Stepper, loader: Loader, device: Simulator, workers: int
) -> Share:
    """Return the share of a rank on the simulated device, with batches made by
    `workers` processes.
    """
    spans: list[dict[str, float]] = []
    feed = loader.from_step(0)
    batch, rows = next(feed)
    # The first step makes the optimizer's state, which no later one does; one row is enough for
    # that.
    stepper.step(split(batch, 1)[0], len(rows), 0, 1 + SIMULATED, Clock(stepper.device))
    for step in range(1, 1 + SIMULATED):
        batch, rows = next(feed)
        device.host = device.device = 0.0
        clock = SimulatedClock(device)
        with Fused(), watching_gradients(stepper, clock) as ready, device, clock("seconds"):
            stepper.step(batch, len(rows), step, 1 + SIMULATED, clock)
        spans.append(clock.read())
    names = (*PHASES, "seconds")
    phases = {name: statistics.fmean(span.get(name, 0.0) for span in spans) for name in names}
    seconds, made_in = phases.pop("seconds"), time_making(bench, loader)
    phases["data"] = max(0.0, made_in / workers - seconds) if workers else made_in
    passes = -(-len(batch[1]) // stepper.row_limit.rows)
    total = seconds + phases["data"]
    return Share(phases, total, total, 0.0, passes, ready, overlap=True)


# --- results


def assemble_runs(
    cfg: PredictConfig, shares: dict[Cell, Share], link: Link
) -> list[dict[str, Any]]:
    """Return the lines of prediction.json, in the format of those of scaling.json."""
    runs = []
    for (mode, ranks), batch_rows in list_cells(cfg).items():
        share = shares[mode, ranks]
        communication = share.exposed(cfg.ddp.bucket_cap_mb, link, ranks)
        exchange = link.seconds(8, ranks)  # of the loss, float64
        phases = share.phases | {"communication": communication, "exchange": exchange + share.wait}
        p50, p90 = (part + communication + exchange for part in (share.p50, share.p90))
        runs.append(
            {
                "scaling": mode,
                "ranks": ranks,
                "batch_rows": batch_rows,
                "step_seconds": {"p50": p50, "p90": p90},
                "phase_seconds": {name: {"p50": phases.get(name, 0.0)} for name in PHASES},
                "rows_per_second": batch_rows / p50,
            }
        )
    scaling.compare(runs)
    return runs


def explain_time(
    cfg: PredictConfig, line: dict[str, Any], alone: dict[str, Any], sent: float, link: Link
) -> dict[str, Any]:
    """Explain the measured step time of algo.times.

    Args: sent: bytes of gradients.
    """
    ranks, measured = line["ranks"], cfg.times[line["ranks"]] / 1000
    one, predicted = alone["step_seconds"]["p50"], line["step_seconds"]["p50"]
    phases = line["phase_seconds"]
    waited = phases["communication"]["p50"] + phases["exchange"]["p50"]
    free = predicted - waited
    rest = measured - predicted
    # bytes a second, if the link were all of it
    needed = 2 * (ranks - 1) / ranks * sent / max(measured - free, 1e-12)
    causes = []
    if one / free < ENOUGH:
        causes.append("launch-bound")
    if waited > 0.05 * measured:
        causes.append("communication-bound")
    if rest > 0.2 * measured and needed < links.PCIE / 2:
        causes.append("loader-or-socket-bound")
    return {
        "ranks": ranks,
        "measured_seconds": measured,
        "predicted_seconds": predicted,
        "speedup": one / measured,
        "predicted_speedup": one / predicted,
        "free_speedup": one / free,
        "unexplained_seconds": max(0.0, rest),
        "needed_gbs": needed / 1e9,
        "link_gbs": link.beta / 1e9,
        "causes": causes,
    }


def describe(cfg: PredictConfig, saved: dict[str, Any], sent_mb: float) -> list[str]:
    """Return lines on the method of the prediction, and its table."""
    how = "simulated from hardware facts, which is a guess" if saved["simulated"] else "measured"
    if cfg.times:
        how = "simulated, and scaled to the time of one rank that was given"
    alpha, beta, source = (saved["link"][name] for name in ("alpha", "beta", "source"))
    return [
        f"one device   {how}: {saved['device']}",
        f"link         {1e6 * alpha:.1f} us a hop, {beta / 1e9:.2f} GB/s: {source}",
        f"gradients    {sent_mb:.1f} MB a step, in buckets of {cfg.ddp.bucket_cap_mb:g} MB",
        *("", "predicted milliseconds of a step", scaling.make_table(saved["runs"]), ""),
    ]


def advise_buckets(runs: list[dict[str, Any]], shares: dict[Cell, Share], link: Link) -> list[str]:
    """Return a line for each number of ranks that would gain from smaller buckets."""
    lines = []
    for line in runs:
        mode, ranks, step = line["scaling"], line["ranks"], line["step_seconds"]["p50"]
        share, now = shares[mode, ranks], line["phase_seconds"]["communication"]["p50"]
        wait, best = min((share.exposed(cap, link, ranks), cap) for cap in CAPS_MB)
        gain = step / (step - now + wait)
        if share.overlap and gain >= 1.05:
            text = f"{ranks} ranks, {mode}: algo.ddp.bucket_cap_mb={best}"
            lines.append(f"{text}: gain {gain:.2f}x (predicted)")
    return [*lines, ""] if lines else []


def describe_time(found: dict[str, Any], sent_mb: float) -> list[str]:
    """Return lines on one time of algo.times.

    Args: sent_mb: MB of gradients per step.
    """
    causes, rest = found["causes"], found["unexplained_seconds"]
    milliseconds, predicted = 1000 * found["measured_seconds"], found["predicted_seconds"]
    head = f"measured elsewhere: {found['ranks']} ranks, {milliseconds:.1f} ms a step,"
    head += f" {found['speedup']:.2f}x"
    lines = [
        *(head, "=" * len(head), ""),
        f"  cause: {', then '.join(causes) or 'none, it is as predicted'}",
        f"  predicted {1000 * predicted:.1f} ms, {found['predicted_speedup']:.2f}x",
        f"  if communication took no time: {found['free_speedup']:.2f}x",
    ]
    if "launch-bound" in causes:
        lines.append("  fewer rows take as long: give each rank more of them, or use one GPU")
    if "loader-or-socket-bound" in causes:
        lines += [
            f"  {1000 * rest:.1f} ms are neither computing nor the link. It is not the bandwidth of"
            " the link: that",
            f"  would be {sent_mb:.0f} MB at {found['needed_gbs']:.2f} GB/s, and this link gives"
            f" {found['link_gbs']:.0f}, PCIe 3 gives {links.PCIE / 1e9:.0f}. Look at",
            "    phase_seconds.data: waiting for the loader",
            "    NCCL_DEBUG=INFO: it must not say NET/Socket",
            "    processes: srun --ntasks=4 with torchrun --nproc_per_node=4 makes 16 on 4 GPUs",
        ]
    elif rest > 0.2 * found["measured_seconds"]:
        gbs = found["needed_gbs"]
        lines.append(f"  a link of {gbs:.1f} GB/s would explain it: look at nvidia-smi topo -m")
    return [*lines, ""]
