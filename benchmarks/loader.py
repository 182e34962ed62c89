"""A training iteration on sequences of varying length, before and after: the project's fourth
document, one change at a time.

    python -m benchmarks loader
    python -m benchmarks loader --json loader.json --repeats 7

The work: task=trajectories, batches of 512 rows (then 1,024), collate, forward, backward and
optimizer step of a small encoder in float32. Before: each row is padded by concatenating and the
batch is made of a list; the forward pass goes over rows and steps in a Python loop and makes a
tensor of the token type at each of them. After: one allocation a field, one sum over the batch
(ddp_bench). Both give the same numbers (tests/runs/test_classify.py).

The loop is timed on 128 rows, the document's share of a GPU, and scaled up to 512, which flatters
it: its backward pass writes a tensor of the size of the batch for every token, so it grows faster
than the batch does.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks import measure
from benchmarks.measure import Case
from ddp_bench import models
from ddp_bench.config import EncoderConfig, LoaderConfig
from ddp_bench.data import Batch, Batches, Loader, Rows, to, trajectories
from ddp_bench.tasks import Labelled, Trajectories

BEFORE, COLLATE, FORWARD, BOTH = (
    "before",
    "+ collate pre-allocated",
    "+ forward without loop",
    "+ both",
)
LARGER, WORKERS = "+ batch twice as large", "+ worker processes"
ROWS, PART, LONGEST = (
    512,
    128,
    80,
)  # PART: rows of an iteration that has the loop; the document's rows a GPU
FIGURE = 15  # what both changes together must give


# --- the document's version


def concatenated(rows: Sequence[Labelled]) -> Batch:
    """The document's collate: zeros concatenated to every row, a list of arrays, a stack, a tensor.
    Same as `Rows`.
    """
    inputs: dict[str, Tensor] = {}
    for name in ("context", "states"):
        values = [getattr(row.value, name) for row in rows]
        longest = max(len(value) for value in values)
        padded = []
        for value in values:
            missing = longest - len(value)
            if missing > 0:
                value = np.concatenate([value, np.zeros((missing, value.shape[1]))])
            padded.append(value)
        inputs[name] = torch.tensor(np.stack(padded), dtype=torch.float32)
        inputs[f"{name}_lengths"] = torch.tensor([len(getattr(row.value, name)) for row in rows])
    inputs["goal"] = torch.tensor(np.stack([row.value.goal for row in rows]), dtype=torch.float32)
    return inputs, torch.tensor([row.label for row in rows])


def looped(
    model: models.TrajectoryClassifier,
    context: Tensor,
    context_lengths: Tensor,
    states: Tensor,
    states_lengths: Tensor,
    goal: Tensor,
) -> Tensor:
    """The document's forward: a loop over rows and steps, a tensor of the type at each. Same as the
    model's.
    """
    device = goal.device
    in_context, in_states, at_goal = (
        model.features(context),
        model.features(states),
        model.features(goal),
    )
    sequences = []
    for b in range(len(goal)):
        tokens = []
        for t in range(int(context_lengths[b])):
            tokens.append(in_context[b, t] + model.types(torch.tensor([0], device=device))[0])
        for t in range(int(states_lengths[b])):
            tokens.append(in_states[b, t] + model.types(torch.tensor([1], device=device))[0])
        tokens.append(at_goal[b] + model.types(torch.tensor([2], device=device))[0])
        sequences.append(
            torch.stack(tokens) + model.positions(torch.arange(len(tokens), device=device))
        )
    lengths = torch.tensor([len(sequence) for sequence in sequences], device=device)
    padded = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    return model.encoder(padded, torch.arange(padded.shape[1], device=device) < lengths[:, None])


# --- the measurement


class Listed:
    """Rows as a list of items, for the document's collate."""

    def __init__(self, rows: Sequence[Labelled]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Labelled:
        return self.rows[row]


class Work:
    """The rows, the model and its optimizer."""

    def __init__(self, device: torch.device, rows: int, longest: int) -> None:
        task = Trajectories(rows=4 * rows, test_rows=10, longest=longest, noise=0.05)
        self.listed = Listed(task.rows("train"))
        self.device, self.tokens = device, 2 * longest + 1
        config = EncoderConfig(
            size=32, heads=2, layers=1, feedforward=64, dropout=0.0, max_tokens=self.tokens
        )
        self.rows: Rows = trajectories(self.listed.rows, self.tokens)
        self.model = models.TrajectoryClassifier(config, len(task.classes), 4).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def iteration(self, batches: Any, loop: bool) -> Callable[[], None]:
        """One training iteration on the next batch."""

        def once() -> None:
            inputs, labels = to(next(batches), self.device)
            logits = looped(self.model, **inputs) if loop else self.model(**inputs)
            self.optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(logits, labels).backward()
            self.optimizer.step()

        return once

    def order(self, rows: int) -> Batches:
        """Random batches, rows of all lengths together as in the document."""
        return Batches(range(len(self.rows)), self.rows.lengths, rows, 1, seed=0)

    def before(self, rows: int) -> Any:
        """Batches by the document's collate, without end."""
        while True:
            yield from DataLoader(
                self.listed,  # type: ignore[arg-type]
                batch_sampler=self.order(rows),
                collate_fn=concatenated,
            )

    def after(self, rows: int, workers: int = 0) -> Any:
        """Batches by the project's loader, without end."""
        config = LoaderConfig(workers=workers, prefetch=2 if workers else None, bucket_batches=1)
        return Loader(self.rows, self.order(rows), config, self.device).from_step(0)


def run(options: argparse.Namespace) -> measure.Report:
    """Time every row in turn."""
    device = measure.find_device(options.device)
    rows, part, longest = (16, 4, 8) if options.quick else (ROWS, PART, LONGEST)
    repeats = options.repeats or (2 if options.quick else 5)
    workers = min(4, os.cpu_count() or 1)
    torch.manual_seed(0)
    work = Work(device, rows, longest)
    scale = rows / part
    cases = [
        Case(BEFORE, work.iteration(work.before(part), loop=True), scale),
        Case(COLLATE, work.iteration(work.after(part), loop=True), scale),
        Case(FORWARD, work.iteration(work.before(rows), loop=False)),
        Case(BOTH, work.iteration(work.after(rows), loop=False)),
        Case(LARGER, work.iteration(work.after(2 * rows), loop=False), 0.5),
        Case(WORKERS, work.iteration(work.after(2 * rows, workers), loop=False), 0.5, warm_ups=2),
    ]
    # The collate alone, and the tokens of the forward pass alone.
    chosen = next(iter(work.order(rows).epoch(0)))
    batch = [work.listed[row] for row in chosen]
    parts = [
        Case("collate: list and concatenate", lambda: concatenated(batch)),
        Case("collate: pre-allocated", lambda: work.rows.__getitems__(chosen)),
    ]
    timings = measure.interleaved([*cases, *parts], repeats, device)
    return report(work, timings, [case.name for case in parts], rows, part, workers, repeats)


def report(
    work: Work,
    timings: dict[str, measure.Timing],
    parts: list[str],
    rows: int,
    part: int,
    workers: int,
    repeats: int,
) -> measure.Report:
    """The table and the JSON. Seconds are those of `rows` rows."""
    lines: list[list[str]] = []
    found: list[measure.Row] = []
    for name, timing in timings.items():
        first = parts[0] if name in parts else BEFORE
        ratio = measure.quantile(measure.paired(timings[first].seconds, timing.seconds), 0.5)
        lines.append(
            [
                name,
                measure.number(timing.p50),
                measure.number(timing.p90),
                measure.number(rows / timing.p50),
                f"{ratio:.1f}x",
            ]
        )
        against = None if name == first else first
        found.append(
            measure.Row(
                "loader", name, timing.p50, f"s/{rows} rows", against, ratio if against else None
            )
        )
    both = measure.quantile(measure.paired(timings[BEFORE].seconds, timings[BOTH].seconds), 0.5)
    text = measure.table(["", "s", "p90", "rows/s", "ratio"], lines)
    text += (
        f"\n\nseconds of {rows} rows, medians of {repeats}; both changes together {both:.1f}x"
        f" (wanted: {FIGURE}x)"
    )
    conditions = measure.conditions(
        work.device,
        sizes={
            "rows": rows,
            "rows_with_loop": part,
            "workers": workers,
            "tokens": int(work.rows.lengths.mean()) + 1,
            "parameters": sum(p.numel() for p in work.model.parameters()),
        },
        repeats=repeats,
        dtype="float32",
        figures=[
            {"figure": FIGURE, "ratio": both, "reached": both >= FIGURE if rows == ROWS else None}
        ],
        timing={name: {"warm_up": t.warm_up, "seconds": t.seconds} for name, t in timings.items()},
    )
    return measure.Report(text, conditions, found)
