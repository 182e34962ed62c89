"""One exact optimizer step of a classifier on a batch that is split over ranks, and the phases of
its time.

Every row of a batch has the same weight, whatever the number of ranks and forwards: a rank's loss
is the sum over its rows, divided by the rows of all ranks and multiplied by the number of ranks,
which the mean of DistributedDataParallel then divides by.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from common import optim
from common.config import ConfigError, Run
from common.device import Precision
from common.distributed import Context, shard, sharding_of
from common.memory import RowLimit
from common.model import WITHOUT_GRAPHS
from ddp_bench.config import ClassifyConfig, WrapperConfig
from ddp_bench.data import IGNORED, Batch, split, to

# Rows of a forward if algo.train_rows is null; halved when memory runs out on a single device.
TRAIN_ROWS = {"cpu": 256, "cuda": 1024}


class Clock:
    """Marks on the timeline of a device: wall clock on a CPU, events on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.seconds: dict[str, float] = {}
        self._spans: list[tuple[str, Any, Any]] = []

    def mark(self) -> Any:
        """Return a mark of the current time."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, name: str, start: Any, end: Any) -> None:
        """Add the time between two marks to `name`."""
        self._spans.append((name, start, end))

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block under `name`; blocks of one name add up."""
        start = self.mark()
        yield
        self.add(name, start, self.mark())

    def read(self) -> dict[str, float]:
        """Return the seconds by name; waits for the device."""
        if self.cuda:
            torch.cuda.synchronize()
        for name, start, end in self._spans:
            span = start.elapsed_time(end) / 1000 if self.cuda else end - start
            self.seconds[name] = self.seconds.get(name, 0.0) + span
        self._spans.clear()
        return self.seconds


class Stepper:
    """The model, its optimizer and the wrapper that connects the ranks.

    Args: model: a float32 model, which is trained in place.
    """

    def __init__(self, model: Any, run: Run, context: Context, precision: Precision) -> None:
        self.model, self.run, self.context, self.precision = model, run, context, precision
        self.settings: ClassifyConfig = run.algo
        self.device = context.device.device
        rows = self.settings.train_rows or TRAIN_ROWS[self.device.type]
        # A rank that repeated a forward alone would leave the others waiting.
        fixed = context.world_size > 1 or context.shares_weights
        shorter = "algo.model.max_tokens"
        self.row_limit = RowLimit("algo.train_rows", rows, fixed=fixed, shorter=shorter)
        if run.opt.checkpointing.enabled:
            model.encoder.recompute_activations()
        if run.opt.compile.enabled:
            # Lengths differ from batch to batch: CUDA graphs would be recorded for each.
            model.compile(mode=WITHOUT_GRAPHS[run.opt.compile.mode], dynamic=True)
        self.forward: Any = model
        self.wrapper: DistributedDataParallel | None = None
        self.looked = not self.settings.ddp.static_graph
        self.last_gradient: Any = None  # mark: when the backward pass had computed everything
        if context.shares_weights:
            shard(model, run, context, precision)
        elif context.world_size > 1:
            self.forward = self.wrapper = wrapped(model, self.settings.ddp, self.device)
            # The first layer's gradients are nearly the last ones, the embeddings' the very last.
            last = [model.encoder.layers[0], *model.children()]
            for module in (m for m in last if m is not model.encoder):
                for parameter in module.parameters():
                    parameter.register_post_accumulate_grad_hook(self._computed)
        self.updater = optim.Updater(
            list(model.parameters()), self.settings, precision, self.device
        )

    def step(
        self, batch: Batch, rows: int, step: int, steps: int, clock: Clock
    ) -> dict[str, float]:
        """Make one optimizer step, unless the loss or the gradients are not finite; return the
        numbers to log.

        Args:
            batch: this rank's share of the batch, on the CPU.
            rows: the rows of the batch on all ranks together.
            step: the 0-based step, of `steps`.
        Raises: ConfigError if the memory does not hold even one row.
        """
        batch = self._begin(batch, rows)
        place = (self.run.seed * 1_000_003 + step) * 1_000_003 + self.context.rank

        def attempt(micro: int) -> Tensor:
            # Dropout is a function of (seed, step, rank), so that a resumed run draws the same as
            # an uninterrupted one, and so does a step that is repeated after memory ran out.
            torch.manual_seed(place % 2**63)
            self.updater.clear()
            return self.backward(batch, rows, micro, clock)

        loss = self.row_limit.run(attempt)
        with clock("exchange"):
            total = self.context.sum(loss)
        with clock("optimizer"):
            lr = self.settings.lr * optim.lr_factor(self.settings, step, steps)
            seen = self.updater.step(lr, total.item())
        return seen

    def rehearse(self, batch: Batch, rows: int) -> None:
        """Make the passes of a step and discard the gradients, so that compilation happens here."""
        batch = self._begin(batch, rows)

        def attempt(micro: int) -> None:
            self.updater.clear()
            self.backward(batch, rows, micro, Clock(self.device))

        self.row_limit.run(attempt)
        self.updater.clear()

    def _begin(self, batch: Batch, rows: int) -> Batch:
        """Return the batch on the device. The first backward pass records a static graph, so
        no_sync must not hide it (pytorch#143580), and another pass must follow it (pytorch#187732).
        """
        self.model.train()
        batch = to(batch, self.device)
        if self.wrapper is not None and not self.looked:
            self.looked = True
            (inputs, labels), *_ = split(batch, 1)
            self.backward((inputs, torch.full_like(labels, IGNORED)), rows, 1, Clock(self.device))
        return batch

    def backward(self, batch: Batch, rows: int, micro: int, clock: Clock) -> Tensor:
        """Accumulate gradients, which are exchanged with the last part; return this rank's share of
        the loss.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        parts = split(batch, micro)
        if sharding_of(self.model).shared:  # all ranks make the same number of passes
            (inputs, labels), *_ = parts
            most = -(-rows // self.context.world_size)
            parts += [(inputs, torch.full_like(labels, IGNORED))] * (-(-most // micro) - len(parts))
        # DistributedDataParallel's gradient is a mean over ranks, FSDP's a sum.
        scale = (self.context.world_size if self.wrapper is not None else 1) / rows
        half = self.precision.compute != torch.float32
        for number, (inputs, labels) in enumerate(parts):
            last = number == len(parts) - 1
            with nullcontext() if last or self.wrapper is None else self.wrapper.no_sync():
                with clock("forward"):
                    with torch.autocast(self.device.type, self.precision.compute, enabled=half):
                        logits = self.forward(**inputs)
                    loss = F.cross_entropy(
                        logits.float(),
                        labels,
                        ignore_index=IGNORED,
                        reduction="sum",
                        label_smoothing=self.settings.label_smoothing,
                    )
                    total += loss.detach() / rows
                start = clock.mark()
                self.updater.backward(loss * scale)
                end = clock.mark()
            # sending that overlaps with computing does not count
            if self.wrapper is not None and last:
                clock.add("backward", start, self.last_gradient)
                clock.add("communication", self.last_gradient, end)
            else:
                clock.add("backward", start, end)
        return total

    def _computed(self, _: Any) -> None:
        self.last_gradient = Clock(self.device).mark()


def wrapped(
    model: nn.Module, settings: WrapperConfig, device: torch.device
) -> DistributedDataParallel:
    """Return the model wrapped in DistributedDataParallel with the settings of algo.ddp."""
    parallel = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        static_graph=settings.static_graph,
        gradient_as_bucket_view=settings.gradient_as_bucket_view,
        bucket_cap_mb=settings.bucket_cap_mb,
    )
    if settings.hook != "none":
        if settings.hook == "bf16" and dist.get_backend() != "nccl":
            raise ConfigError("algo.ddp.hook=bf16 needs NCCL, not gloo. Use algo.ddp.hook=fp16.")
        hook = getattr(default_hooks, f"{settings.hook}_compress_hook")
        parallel.register_comm_hook(None, hook)
    return parallel
