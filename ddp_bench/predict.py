"""algo=predict: step time, speed-up and efficiency of ranks that nobody has booked yet.

    python launch.py algo=predict 'algo.ranks=[2,4,8]' hardware=a100_40g
    python launch.py algo=predict 'algo.ranks=[4]' 'algo.times={1: 5.2, 4: 11.3}' hardware=a100_40g

step(n) = data + forward + backward + exposed communication + exchange + optimizer. Computing is
that of one device on its share of the rows, so a step that is launched rather than computed does
not shrink. An all-reduce of S bytes takes 2 (n-1) alpha + 2 (n-1)/n S/beta. Gradients leave in
buckets of algo.ddp.bucket_cap_mb as the backward pass makes them; what is not there when it ends is
exposed, the last bucket always.

The device is measured with the real step. Where several ranks share a machine, as many processes as
it holds compute at once and send nothing: one device while its neighbours work too, since they
share caches, memory and clocks. The wait for the slowest is the mean of the slowest of each step,
less the mean. The link is measured with all-reduces of eight sizes. A GPU that is not there is
simulated from hardware=NAME: the real step runs on this CPU, and each of its operations costs a
launch on the host, and on the device the larger of its arithmetic and its memory traffic. That is a
guess; a measured device is not.
"""

import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from common import hardware, precision
from common.config import ConfigError, DdpConfig, HardwareConfig, Run, no_effect
from common.distributed.context import Context
from common.distributed.workers import launch
from common.files import write_text
from common.precision import Precision
from common.report import summary
from ddp_bench import models
from ddp_bench.config import PredictConfig
from ddp_bench.data import WORKERS_PER_GPU, Rows, held_out, prepare, split
from ddp_bench.report import ENOUGH, PHASES, grouped, quantile, told
from ddp_bench.report import scaling as read_back
from ddp_bench.scaling import Feed, check_alone, compare, described, pooled, table, timed
from ddp_bench.step import Clock, Stepper
from ddp_bench.tasks import ClassTask, made

log = logging.getLogger("clutch")

SIZES = tuple(
    1024 * 4**i for i in range(8)
)  # bytes of the messages that measure a link: 1 KiB to 16 MiB
SENT = 15  # all-reduces of each size
# Of a device that is not there. An eager operation of PyTorch costs the host about ten
# microseconds; products reach half of the peak and other operations seven tenths of the memory
# bandwidth. Rules of thumb: predictions from them say so.
LAUNCH, ARITHMETIC, MEMORY = 10e-6, 0.5, 0.7
# bytes a second of an all-reduce over PCIe 3 x16 (NCCL's topo.h), the slowest link inside a node
PCIE = 12e9
SIMULATED, PROBED = 3, 10  # steps that are simulated; batches whose making is timed
HALF = ("fp16", "bf16")  # hooks that halve the bytes


@dataclass(frozen=True)
class Link:
    """What an all-reduce costs. alpha: seconds of each of its 2 (ranks - 1) steps; beta: bytes a
    second.
    """

    alpha: float
    beta: float
    source: str  # for people
    points: list[tuple[int, float]]  # bytes, seconds: what it was fitted to

    def seconds(self, size: float, ranks: int) -> float:
        """Of one all-reduce of `size` bytes."""
        return 2 * (ranks - 1) * self.alpha + 2 * (ranks - 1) / ranks * size / self.beta


def fitted(points: list[tuple[int, float]], ranks: int, source: str) -> Link:
    """The link through measured (bytes, seconds): least squares of the relative error, so that
    small messages count too.
    """
    sizes, seconds = (np.array(column, float) for column in zip(*points, strict=True))
    columns = np.stack([np.full_like(sizes, 2 * (ranks - 1)), 2 * (ranks - 1) / ranks * sizes], 1)
    alpha, inverse = np.linalg.lstsq(columns / seconds[:, None], np.ones_like(seconds), rcond=None)[
        0
    ]
    return Link(max(float(alpha), 1e-9), 1 / max(float(inverse), 1e-15), source, points)


def from_facts(config: HardwareConfig) -> Link:
    """The link of a preset. Raises: ConfigError where it has no facts."""
    if config.allreduce_gbs is None or config.hop_us is None:
        raise ConfigError(
            f"hardware={config.name} does not say how fast its link is, and there are no two"
            " devices here to measure it with. Name the device: hardware=a100_40g, a100_80g, h100,"
            " h200, rtx4090 or v100; or hardware=cpu."
        )
    return Link(
        config.hop_us * 1e-6, config.allreduce_gbs * 1e9, f"conf/hardware/{config.name}.yaml", []
    )


def exposed(
    ready: list[tuple[float, float]],
    backward: float,
    cap: float,
    link: Link,
    ranks: int,
    overlap: bool,
) -> float:
    """Seconds for which the ranks wait for gradients after a backward pass of `backward` seconds.

    Args: ready: of each gradient in order of arrival, its bytes as sent and when it is there, in
    shares of the pass; cap: bytes of a bucket; overlap: whether sending goes on beside computing,
    which on a CPU without free cores it does not.
    """
    buckets: list[tuple[float, float]] = []
    size = 0.0
    for i, (part, share) in enumerate(ready):
        size += part
        if (
            size >= cap or i == len(ready) - 1
        ):  # as DistributedDataParallel rebuilds them: by arrival, full or last
            buckets.append((size, share))
            size = 0.0
    if not overlap:
        return sum(link.seconds(size, ranks) for size, _ in buckets)
    done = 0.0
    for size, share in buckets:
        done = max(done, share * backward) + link.seconds(size, ranks)
    return max(0.0, done - backward)


def predict(run: Run, out_dir: Path, task: ClassTask | None = None) -> dict[str, Any]:
    """Measure what is here, predict, write RUN/prediction.json and prediction.txt, and print it.
    Returns what the file holds.

    Raises: ConfigError for settings that cannot work.
    """
    settings: PredictConfig = run.algo
    check(run, out_dir)
    simulating = absent(run) or bool(settings.times)
    if simulating:
        check_timing(settings)
        link, threads = from_facts(run.hardware), None
        # One process on the CPU takes the steps, whatever other devices are here.
        here = replace(
            run, hardware=replace(run.hardware, device="cpu"), opt=replace(run.opt, ddp=DdpConfig())
        )
        found = launch("ddp_bench.predict:simulate", here, out_dir, task)
        device = f"{run.hardware.name} of conf/hardware"
    else:
        found, link = measured(run, out_dir, task)
        device, threads = hardware.find(run.hardware).name, found["threads"]
    shares: dict[Cell, Share] = found["shares"]
    if settings.times:
        alone = assembled(run, shares, link)[0]["step_seconds"]["p50"]
        shares = {
            cell: share.scaled(settings.times[1] / 1000 / alone) for cell, share in shares.items()
        }
    saved = described(run, found) | {
        "device": device,
        "threads_per_rank": threads,
        "simulated": simulating,
    }
    saved |= {"match": run.hardware.match if simulating else None, "link": asdict(link)}
    saved["runs"] = runs = assembled(run, shares, link)
    saved["explained"] = [
        explained(run, line, runs[0], 4 * found["parameters"], link)
        for line in runs
        if line["scaling"] == "strong" and line["ranks"] in settings.times
    ]
    summary.write_run(run, out_dir, device)
    write_text(out_dir / "prediction.json", json.dumps(saved, indent=2) + "\n")
    text = worded(run, saved, shares, link, out_dir)
    write_text(out_dir / "prediction.txt", text)
    log.info("\n%s\nwritten to %s/prediction.json and prediction.txt", text, out_dir)
    return saved


def check(run: Run, out_dir: Path) -> None:
    """Raise ConfigError for what algo=predict cannot go with here."""
    settings: PredictConfig = run.algo
    check_alone(run, out_dir, settings.ranks)
    if settings.ddp.hook == "powersgd":
        raise ConfigError(
            "algo=predict does not know what algo.ddp.hook=powersgd costs. Use none or fp16."
        )
    if settings.times and run.hardware.device != "cuda":
        raise ConfigError(
            "algo.times are explained with the facts of a GPU, and"
            f" hardware={run.hardware.name} has none. Name the one that they were measured on, for"
            " example hardware=a100_40g."
        )
    if (absent(run) or settings.times) and run.opt.compile.enabled:
        raise ConfigError(
            f"opt=compile can be measured on a {run.hardware.name}, not simulated. Leave it out:"
            " with fewer launches a step is shorter than what is then predicted."
        )


def check_timing(settings: PredictConfig) -> None:
    """Raise ConfigError where settings of the timing were changed, and steps are simulated, so that
    nothing is timed.
    """
    for key in ("steps", "warmup_steps", "repeats"):
        why = (
            "here: the GPU is not on this node, so its steps are simulated and not timed. Leave it"
            " out."
        )
        no_effect("algo/scaling.yaml", f"algo.{key}", getattr(settings, key), why)


def absent(run: Run) -> bool:
    """Whether the preset names a GPU that this node does not have."""
    return run.hardware.device == "cuda" and not hardware.find(run.hardware).matches


Cell = tuple[str, int]  # how it scales (one rank, strong, weak), and ranks


def wanted(settings: PredictConfig) -> dict[Cell, int]:
    """What is predicted, the one rank first: cells, and the rows that all of its ranks have in a
    step.
    """
    found: dict[Cell, int] = {("one rank", 1): settings.batch_size}
    for mode in ("strong", "weak"):
        if settings.mode in (mode, "both"):
            found |= {
                (mode, n): settings.batch_size * (n if mode == "weak" else 1)
                for n in settings.ranks
            }
    return found


@dataclass(frozen=True)
class Share:
    """What a rank does by itself in a step: its share of the rows, nothing sent. Seconds."""

    phases: dict[str, float]  # p50
    p50: float  # of the slowest of the ranks that were measured together
    p90: float
    wait: float  # for that slowest one
    passes: int  # forwards of a step; the last backward pass sends
    ready: list[
        tuple[float, float]
    ]  # of each gradient by arrival: bytes as sent, when it is there in shares of that pass
    overlap: bool  # sending goes on beside computing

    def scaled(self, factor: float) -> "Share":
        """The same on a device that takes `factor` times as long."""
        phases = {name: factor * seconds for name, seconds in self.phases.items()}
        return replace(
            self,
            phases=phases,
            p50=factor * self.p50,
            p90=factor * self.p90,
            wait=factor * self.wait,
        )

    def waits(self, cap_mb: float, link: Link, ranks: int) -> float:
        """Seconds of exposed communication with buckets of `cap_mb`."""
        backward = self.phases["backward"] / self.passes
        return exposed(self.ready, backward, cap_mb * 2**20, link, ranks, self.overlap)


def prepared(
    run: Run, context: Context, task: ClassTask | None, numbers: Precision
) -> tuple[Stepper, Rows, list[int], dict[str, Any]]:
    """A stepper of one rank, the training data, the rows of it, and what prediction.json says of
    them.
    """
    settings: PredictConfig = run.algo
    task = task or made(run.task)
    data, tokenizer = prepare(task, settings.tokenizer, settings.model.max_tokens, log.info)
    rows, _ = held_out(data["train"], settings.validation_share, run.seed)
    model = models.build(settings.model, len(task.classes), tokenizer, data["train"], run.seed).to(
        context.device.device
    )
    stepper = Stepper(model, run, replace(context, rank=0, world_size=1), numbers)
    told_of = {
        "task": getattr(task, "name", type(task).__name__),
        "parameters": sum(p.numel() for p in model.parameters()),
        "training_rows": len(rows),
        "dtype": numbers.name,
    }
    return stepper, data["train"], rows, told_of


@contextmanager
def arriving(stepper: Stepper, clock: Clock) -> Iterator[list[tuple[int, Any]]]:
    """Note each gradient that a step makes: its numbers, and when it is there."""
    seen: list[tuple[int, Any]] = []
    handles = [
        parameter.register_post_accumulate_grad_hook(
            lambda p: seen.append((p.numel(), clock.mark()))
        )
        for parameter in stepper.model.parameters()
    ]
    yield seen
    for handle in handles:
        handle.remove()


def arrived(stepper: Stepper, seen: list[tuple[int, Any]]) -> list[tuple[float, float]]:
    """Share.ready from the last backward pass of what `arriving` noted: from its first gradient (0)
    to its last (1).
    """
    seen, clock = seen[-len(list(stepper.model.parameters())) :], Clock(stepper.device)
    for i, (_, mark) in enumerate(seen):
        clock.add(str(i), seen[0][1], mark)
    found = clock.read()
    last = max(found[str(len(seen) - 1)], 1e-12)
    size = 2 if stepper.settings.ddp.hook in HALF else 4  # bytes of a number
    return [(size * count, min(1.0, found[str(i)] / last)) for i, (count, _) in enumerate(seen)]


# --- measured --------------------------------------------------------------------------------------------------------


def measured(run: Run, out_dir: Path, task: ClassTask | None) -> tuple[dict[str, Any], Link]:
    """What `prepared` tells and the shares, from as many processes at once as there are ranks,
    devices or cores; the link.
    """
    settings: PredictConfig = run.algo
    devices, cores = hardware.local_devices(run.hardware), os.cpu_count() or 1
    threads = None if devices else max(1, cores // max(settings.ranks))
    cells = wanted(settings)
    before = torch.get_num_threads()
    parts: list[dict[str, Any]] = []
    try:
        for _ in range(settings.repeats):
            for processes in sorted({min(ranks, devices or cores) for _, ranks in cells}):
                ddp = (
                    replace(run.opt.ddp, enabled=True, ranks=processes)
                    if processes > 1
                    else DdpConfig()
                )
                one = replace(run, opt=replace(run.opt, ddp=ddp))
                parts.append(
                    launch("ddp_bench.predict:neighbours", one, out_dir, task)
                    | {"processes": processes}
                )
    finally:
        torch.set_num_threads(before)
    most = max(part["processes"] for part in parts)
    points = [part["points"] for part in parts if part["processes"] == most]
    if most == 1:
        link = from_facts(run.hardware)
    else:
        middle = [
            (size, statistics.median(found[i] for found in points)) for i, size in enumerate(SIZES)
        ]
        link = fitted(middle, most, f"measured between {most} {'GPUs' if devices else 'processes'}")
    shares = {}
    for mode, ranks in cells:
        repeats = [part["times"][mode, ranks] for part in parts if (mode, ranks) in part["times"]]
        overlap = bool(devices) or cores > ranks * (threads or 1)
        turns = 1.0 if devices else max(1.0, ranks / cores)  # ranks beyond the cores take turns
        # More ranks than were measured also share the cores that make batches.
        making_cores = cores / ranks if ranks > devices > 0 else None
        shares[mode, ranks] = summed(repeats, overlap, making_cores).scaled(turns)
    return parts[0] | {"shares": shares, "threads": threads}, link


def neighbours(run: Run, context: Context, task: ClassTask | None = None) -> dict[str, Any]:
    """In each process: the steps of a rank, sending nothing, while those beside it take theirs;
    then the link.
    """
    settings: PredictConfig = run.algo
    device, cores = context.device.device, os.cpu_count() or 1
    if device.type == "cpu":
        torch.set_num_threads(max(1, cores // max(settings.ranks)))
    torch.backends.cudnn.benchmark = device.type == "cuda"
    places = hardware.local_devices(run.hardware) or cores
    stepper, data, rows, found = prepared(run, context, task, precision.resolve(run.opt, device))
    times = {}
    for (mode, ranks), batch_rows in wanted(settings).items():
        if min(ranks, places) != context.world_size:
            continue
        if context.main:
            log.info("measuring one of %d ranks, %d rows a step in all", ranks, batch_rows)
        feed = Feed(run, replace(context, world_size=ranks), data, rows, batch_rows)
        context.barrier()  # else some would have no neighbours at first
        spans = timed(stepper, feed)["spans"]
        batch, of_all = feed.take()
        clock = Clock(device)
        with arriving(stepper, clock) as seen:
            stepper.step(batch, of_all, 0, 1, clock)
        times[mode, ranks] = {
            "batch_rows": batch_rows,
            "spans": context.gather_objects(spans),
            "passes": -(-len(batch[1]) // stepper.limit.rows),
            "ready": arrived(stepper, seen),
            "workers": (
                settings.loader.workers
                if settings.loader.workers is not None
                else WORKERS_PER_GPU * (device.type == "cuda")
            ),
            "making": making(data, feed),
        }
    return found | {"times": times, "points": messages(context)}


def making(data: Rows, feed: Feed) -> float:
    """Seconds that a process takes to make the batch of a rank."""
    seconds = []
    for batch in list(feed.batches)[:PROBED]:
        started = time.perf_counter()
        data.__getitems__(batch)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def messages(context: Context) -> list[float]:
    """Seconds of an all-reduce of each of SIZES; nothing where there is one rank."""
    found, device = [], context.device.device
    for size in SIZES if context.world_size > 1 else ():
        tensor = torch.zeros(size // 4, device=device)
        spans = []
        for _ in range(SENT):
            context.barrier()
            clock = Clock(device)
            with clock("sent"):
                dist.all_reduce(tensor)
            spans.append(clock.read()["sent"])
        found.append(statistics.median(spans))
    return found


def summed(repeats: list[dict[str, Any]], overlap: bool, cores: float | None) -> Share:
    """The share of a rank from the repeats of `neighbours`. cores: of each rank, where more ranks
    share them than did.
    """
    first = repeats[0]
    spans = [span for repeat in repeats for every in repeat["spans"] for span in every]
    phases = pooled([{"spans": spans, "exposed": 0.0, "batch_rows": 0}])["phase_seconds"]
    steps = [
        [span["seconds"] for span in step]
        for repeat in repeats
        for step in zip(*repeat["spans"], strict=True)
    ]
    slowest = [max(step) for step in steps]
    stall = 0.0
    if cores is not None and first["workers"]:
        busy = statistics.median(slowest) - phases["data"]["p50"]
        stall = max(
            0.0, first["making"] / min(first["workers"], cores) - busy - phases["data"]["p50"]
        )
    return Share(
        phases={name: span["p50"] + stall * (name == "data") for name, span in phases.items()},
        p50=quantile(slowest, 50) + stall,
        p90=quantile(slowest, 90) + stall,
        wait=max(
            0.0, quantile(slowest, 50) - quantile([statistics.fmean(step) for step in steps], 50)
        ),
        passes=first["passes"],
        ready=first["ready"],
        overlap=overlap,
    )


# --- simulated -------------------------------------------------------------------------------------------------------


class Simulator(TorchDispatchMode):
    """A device that works off what a host launches, in order: the host's time and the device's,
    seconds.

    Args: flops, bandwidth: of products and of memory, a second, as they are reached.
    """

    def __init__(self, flops: float, bandwidth: float) -> None:
        super().__init__()
        self.flops, self.bandwidth = flops, bandwidth
        self.host = self.device = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        kind = func.overloadpacket
        if kind is torch.ops.aten._local_scalar_dense:  # .item() waits
            self.host = self.device = max(self.host, self.device)
        elif not func.is_view and not kind.__name__.startswith(("empty", "detach")):
            self.host += LAUNCH
            count = (
                flop_registry[kind](*args, **kwargs, out_val=out) if kind in flop_registry else 0
            )
            moved = sum(t.nbytes for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor))
            self.device = max(self.device, self.host) + max(
                count / self.flops, moved / self.bandwidth
            )
        return out


class SimulatedClock(Clock):
    """Marks on the timeline of a simulated device."""

    def __init__(self, simulator: Simulator) -> None:
        super().__init__(torch.device("cpu"))
        self.simulator = simulator

    def mark(self) -> float:
        """Now, there."""
        return max(self.simulator.host, self.simulator.device)


class _Fused(TorchFunctionMode):
    """Attention as the one kernel that it is on a GPU; with dropout a CPU takes it to pieces."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(
            *args,
            **(kwargs | {"dropout_p": 0.0} if func is F.scaled_dot_product_attention else kwargs),
        )


def peak(run: Run) -> tuple[str, float]:
    """The dtype that the preset's device would use, and its peak in FLOP/s. Raises: ConfigError
    where facts are missing.
    """
    facts = run.hardware.peak_tflops
    if run.opt.amp.enabled:
        half = (
            run.opt.amp.dtype
            if run.opt.amp.dtype != "auto"
            else "bfloat16"
            if facts.bf16
            else "float16"
        )
        name, found = half, facts.bf16 if half == "bfloat16" else facts.fp16
    else:
        name, found = "float32", facts.tf32 if run.opt.tf32.enabled else facts.fp32
    if found is None or run.hardware.bandwidth_gbs is None:
        raise ConfigError(
            f"hardware={run.hardware.name} has no peak for"
            f" {'tf32' if run.opt.tf32.enabled else name}. Leave"
            f" {'opt=tf32' if run.opt.tf32.enabled else 'opt.amp.dtype'} out, or name another"
            " device."
        )
    return name, found * 1e12


def simulate(run: Run, context: Context, task: ClassTask | None = None) -> dict[str, Any]:
    """What `prepared` tells, and the shares of ranks on the preset's device: the mean of SIMULATED
    real steps on this CPU.
    """
    settings: PredictConfig = run.algo
    dtype, flops = peak(run)
    bandwidth = run.hardware.bandwidth_gbs
    assert bandwidth is not None
    plain = replace(
        run, opt=replace(run.opt, amp=replace(run.opt.amp, enabled=False, dtype="auto"))
    )
    stepper, data, rows, found = prepared(
        plain, context, task, Precision(torch.float32, scaler=False)
    )
    workers = settings.loader.workers if settings.loader.workers is not None else WORKERS_PER_GPU
    feeding = replace(
        plain, algo=replace(settings, loader=replace(settings.loader, workers=0, prefetch=None))
    )
    shares: dict[Cell, Share] = {}
    for (mode, ranks), batch_rows in wanted(settings).items():
        if mode == "weak":  # as many rows a rank as the one has
            shares[mode, ranks] = shares["one rank", 1]
            continue
        log.info("simulating one of %d ranks, %d rows a step in all", ranks, batch_rows)
        feed = Feed(feeding, replace(context, world_size=ranks), data, rows, batch_rows)
        spans: list[dict[str, float]] = []
        batch, of_all = feed.take()
        # The first step makes the optimizer's state, which no later one does; one row is enough for
        # that.
        stepper.step(split(batch, 1)[0], of_all, 0, 1 + SIMULATED, Clock(stepper.device))
        for step in range(1, 1 + SIMULATED):
            batch, of_all = feed.take()
            simulator = Simulator(ARITHMETIC * flops, MEMORY * bandwidth * 1e9)
            clock = SimulatedClock(simulator)
            with _Fused(), arriving(stepper, clock) as seen, simulator:
                start = clock.mark()
                stepper.step(batch, of_all, step, 1 + SIMULATED, clock)
                clock.add("seconds", start, clock.mark())
            spans.append(clock.read())
        phases = {
            name: statistics.fmean(span.get(name, 0.0) for span in spans)
            for name in (*PHASES, "seconds")
        }
        seconds, made_in = phases.pop("seconds"), making(data, feed)
        phases["data"] = max(0.0, made_in / workers - seconds) if workers else made_in
        passes, ready = -(-len(batch[1]) // stepper.limit.rows), arrived(stepper, seen)
        total = seconds + phases["data"]
        shares[mode, ranks] = Share(phases, total, total, 0.0, passes, ready, overlap=True)
    return found | {"shares": shares, "dtype": dtype}


# --- what comes of it ------------------------------------------------------------------------------------------------


def assembled(run: Run, shares: dict[Cell, Share], link: Link) -> list[dict[str, Any]]:
    """The lines of prediction.json, as those of scaling.json."""
    settings: PredictConfig = run.algo
    runs = []
    for (mode, ranks), batch_rows in wanted(settings).items():
        share = shares[mode, ranks]
        communication = exchange = 0.0
        if ranks > 1:
            communication = share.waits(settings.ddp.bucket_cap_mb, link, ranks)
            exchange = link.seconds(8, ranks)  # of the loss, float64
        phases = share.phases | {"communication": communication, "exchange": exchange + share.wait}
        total = communication + exchange
        step = {"p50": share.p50 + total, "p90": share.p90 + total}
        found = {"scaling": mode, "ranks": ranks, "batch_rows": batch_rows, "step_seconds": step}
        found["phase_seconds"] = {name: {"p50": phases.get(name, 0.0)} for name in PHASES}
        runs.append(found | {"rows_per_second": batch_rows / step["p50"]})
    compare(runs)
    return runs


def explained(
    run: Run, line: dict[str, Any], alone: dict[str, Any], gradient_bytes: int, link: Link
) -> dict[str, Any]:
    """Why a step of algo.times took what it did, by what is left when computing and link
    are taken off.
    """
    settings: PredictConfig = run.algo
    ranks, measured_seconds = line["ranks"], settings.times[line["ranks"]] / 1000
    one, predicted = alone["step_seconds"]["p50"], line["step_seconds"]["p50"]
    waited = (
        line["phase_seconds"]["communication"]["p50"] + line["phase_seconds"]["exchange"]["p50"]
    )
    free = predicted - waited
    rest = measured_seconds - predicted
    sent = 2 * (ranks - 1) / ranks * gradient_bytes / (2 if settings.ddp.hook in HALF else 1)
    needed = sent / max(
        measured_seconds - free, 1e-12
    )  # bytes a second, if the link were all of it
    causes = []
    if one / free < ENOUGH:
        causes.append("launch-bound")
    if waited > 0.05 * measured_seconds:
        causes.append("communication-bound")
    if rest > 0.2 * measured_seconds and needed < PCIE / 2:
        causes.append("loader-or-socket-bound")
    return {
        "ranks": ranks,
        "measured_seconds": measured_seconds,
        "predicted_seconds": predicted,
        "speedup": one / measured_seconds,
        "predicted_speedup": one / predicted,
        "free_speedup": one / free,
        "unexplained_seconds": max(0.0, rest),
        "needed_gbs": needed / 1e9,
        "link_gbs": link.beta / 1e9,
        "causes": causes,
    }


def worded(
    run: Run, saved: dict[str, Any], shares: dict[Cell, Share], link: Link, out_dir: Path
) -> str:
    """prediction.txt: how it came about, the table, the diagnosis, and what measured times say."""
    settings: PredictConfig = run.algo
    cap = settings.ddp.bucket_cap_mb
    size = saved["gradient_mb"] / (2 if settings.ddp.hook in HALF else 1)
    how = "simulated from hardware facts, which is a guess" if saved["simulated"] else "measured"
    if settings.times:
        how = "simulated, and scaled to the time of one rank that was given"
    told_of = "\n".join(
        short(saved["runs"], mode) for mode in ("strong", "weak") if settings.mode in (mode, "both")
    )
    lines = [
        f"one device   {how}: {saved['device']}",
        f"link         {1e6 * link.alpha:.1f} us a hop, {link.beta / 1e9:.2f} GB/s: {link.source}",
        f"gradients    {size:.1f} MB a step, in buckets of {cap:g} MB",
        *(
            ["             one bucket: nothing is sent before the backward pass ends"]
            if size <= cap
            else []
        ),
        "",
        "predicted milliseconds of a step",
        table(saved["runs"], phases=False),
        "",
        told_of,
        *crowded(settings, saved),
        "",
        told(grouped(read_back(out_dir / "prediction.json")), []),
    ]
    lines += buckets(settings, saved, shares, link)
    for found in saved["explained"]:
        lines += diagnosed(found, size)
    return "\n".join(lines).rstrip("\n") + "\n"


def short(runs: list[dict[str, Any]], mode: str) -> str:
    """One line of advice: how many ranks, for one way to scale."""
    best = max((run for run in runs if run["scaling"] == mode), key=lambda run: run["speedup"])
    if best["speedup"] < ENOUGH:
        return (
            f"{mode}: use one. {best['ranks']} give {best['speedup']:.2f}x at most, and 1.2x is"
            " worth a second one"
        )
    enough = [run for run in runs if run["scaling"] == mode and run["efficiency_percent"] >= 80]
    text = f"{mode}: {best['ranks']} are the fastest, {best['speedup']:.2f}x"
    if best not in enough:
        most = enough[-1]["ranks"] if enough else 1
        text += f"; more than {most} use{'s' * (most == 1)} less than 80 % of what is booked"
    return text


def crowded(settings: PredictConfig, saved: dict[str, Any]) -> list[str]:
    """A line where more ranks than cores were asked for on a CPU."""
    cores, ranks = os.cpu_count() or 1, max(settings.ranks)
    if saved["threads_per_rank"] is None or ranks <= cores:
        return []
    return [
        f"oversubscribed cores: {ranks} ranks and {cores} cores, so ranks take turns; more than"
        f" {cores} cannot pay"
    ]


def buckets(
    settings: PredictConfig, saved: dict[str, Any], shares: dict[Cell, Share], link: Link
) -> list[str]:
    """Whether smaller buckets, which leave earlier, would pay: a line for each number of ranks
    where they do.
    """
    lines = []
    for line in saved["runs"]:
        share, step = shares[line["scaling"], line["ranks"]], line["step_seconds"]["p50"]
        if line["ranks"] == 1 or not share.overlap:
            continue
        now = line["phase_seconds"]["communication"]["p50"]
        best = min((1, 2, 5, 10, 25, 50), key=lambda cap: share.waits(cap, link, line["ranks"]))
        gain = step / (step - now + share.waits(best, link, line["ranks"]))
        if gain >= 1.05:
            lines.append(
                f"{line['ranks']} ranks, {line['scaling']}: algo.ddp.bucket_cap_mb={best}: gain"
                f" {gain:.2f}x (predicted)"
            )
    return [*lines, ""] if lines else []


def diagnosed(found: dict[str, Any], sent_mb: float) -> list[str]:
    """What the measured step of one number of ranks says, for people. sent_mb: of gradients, a
    step.
    """
    ranks, causes = found["ranks"], found["causes"]
    head = (
        f"measured elsewhere: {ranks} ranks, {1000 * found['measured_seconds']:.1f} ms a step,"
        f" {found['speedup']:.2f}x"
    )
    lines = [
        head,
        "=" * len(head),
        "",
        f"  cause: {', then '.join(causes) or 'none, it is as predicted'}",
    ]
    lines.append(
        f"  predicted {1000 * found['predicted_seconds']:.1f} ms, {found['predicted_speedup']:.2f}x"
    )
    lines.append(f"  if communication took no time: {found['free_speedup']:.2f}x")
    if "launch-bound" in causes:
        lines.append("  fewer rows take as long: give each rank more of them, or use one GPU")
    if "loader-or-socket-bound" in causes:
        lines += [
            (
                f"  {1000 * found['unexplained_seconds']:.1f} ms are neither computing nor the"
                " link. It is not the bandwidth of the link: to be all of that,"
            ),
            (
                f"  {sent_mb:.0f} MB would have to go at {found['needed_gbs']:.2f} GB/s. This link"
                f" gives {found['link_gbs']:.0f}, PCIe 3 gives {PCIE / 1e9:.0f}. Look at"
            ),
            "    phase_seconds.data: waiting for the loader",
            "    NCCL_DEBUG=INFO: it must not say NET/Socket",
            "    processes: srun --ntasks=4 with torchrun --nproc_per_node=4 makes 16 on 4 GPUs",
        ]
    elif found["unexplained_seconds"] > 0.2 * found["measured_seconds"]:
        lines.append(
            f"  a link of {found['needed_gbs']:.1f} GB/s would explain it: look at nvidia-smi"
            " topo -m"
        )
    return [*lines, ""]


def main() -> int:
    """The command python -m ddp_bench.predict: from facts alone, all four algorithms and many more
    devices.
    """
    from ddp_bench import capacity

    return capacity.main()


if __name__ == "__main__":
    sys.exit(main())
