"""Compare a training iteration on sequences of varying length before and after the project's fourth
document, one change at a time.

    python -m benchmarks loader --json loader.json --repeats 7

The work: task=trajectories, batches of 512 rows (then 1,024), collate, forward, backward and
optimizer step of a small encoder in float32. Before: rows are padded by concatenating and stacking;
the forward pass loops over rows and steps. After: one allocation per field, one sum over the batch
(ddp_bench). Both give the same numbers (tests/unit/test_classify_models.py). The loop is timed on
128 rows and scaled up, which flatters it: its backward pass grows faster than the batch.
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

BEFORE, BOTH = "before", "+ both"
COLLATE = "collate: "
FIGURE = 15  # what both changes together must give


# --- the document's version


def concatenated(rows: Sequence[Labelled]) -> Batch:
    """Collate as in the document: zeros concatenated to every row, a list, a stack."""
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


def looped(model: models.TrajectoryClassifier, inputs: dict[str, Tensor]) -> Tensor:
    """Return logits as in the document: a loop over rows and steps, a type tensor at each."""
    device = inputs["goal"].device
    regions = [(name, model.features(inputs[name])) for name in ("context", "states")]
    at_goal = model.features(inputs["goal"])
    sequences = []
    for b in range(len(at_goal)):
        tokens = []
        for kind, (name, states) in enumerate(regions):
            for t in range(int(inputs[f"{name}_lengths"][b])):
                tokens.append(states[b, t] + model.types(torch.tensor([kind], device=device))[0])
        tokens.append(at_goal[b] + model.types(torch.tensor([2], device=device))[0])
        places = torch.arange(len(tokens), device=device)
        sequences.append(torch.stack(tokens) + model.positions(places))
    lengths = torch.tensor([len(sequence) for sequence in sequences], device=device)
    padded = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    return model.encoder(padded, torch.arange(padded.shape[1], device=device) < lengths[:, None])


# --- the measurement


class Work:
    """The rows, the model and its optimizer."""

    def __init__(self, device: torch.device, rows: int, longest: int) -> None:
        task = Trajectories(rows=4 * rows, test_rows=10, longest=longest, noise=0.05)
        self.listed, self.device, tokens = task.rows("train"), device, 2 * longest + 1
        sizes: Any = {"size": 32, "heads": 2, "layers": 1, "feedforward": 64}
        config = EncoderConfig(**sizes, dropout=0.0, max_tokens=tokens)
        self.rows: Rows = trajectories(self.listed, tokens)
        self.model = models.TrajectoryClassifier(config, len(task.classes), 4).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def iteration(self, batches: Any, loop: bool) -> Callable[[], None]:
        """Return a training iteration on the next batch."""

        def once() -> None:
            inputs, labels = to(next(batches), self.device)
            logits = looped(self.model, inputs) if loop else self.model(**inputs)
            self.optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(logits, labels).backward()
            self.optimizer.step()

        return once

    def order(self, rows: int) -> Batches:
        """Return random batches, with rows of all lengths together as in the document."""
        return Batches(range(len(self.rows)), self.rows.lengths, rows, 1, seed=0)

    def before(self, rows: int) -> Any:
        """Yield batches by the document's collate, without end."""
        while True:
            listed: Any = self.listed
            yield from DataLoader(listed, batch_sampler=self.order(rows), collate_fn=concatenated)

    def after(self, rows: int, workers: int = 0) -> Any:
        """Return batches by the project's loader, without end."""
        config = LoaderConfig(workers=workers, prefetch=2 if workers else None, bucket_batches=1)
        feed = Loader(self.rows, self.order(rows), config, self.device).from_step(0)
        return (batch for batch, _ in feed)


def run(options: argparse.Namespace) -> measure.Report:
    """Time every row in turn. part: the rows of an iteration with the loop."""
    rows, part, longest = (16, 4, 8) if options.quick else (512, 128, 80)
    report = measure.Report("loader", options, 5, dtype="float32")
    workers = min(4, os.cpu_count() or 1)
    torch.manual_seed(0)
    work = Work(report.device, rows, longest)
    report.conditions["sizes"] = {"rows": rows, "rows_with_loop": part, "workers": workers}
    chosen = next(iter(work.order(rows).epoch(0)))
    batch = [work.listed[row] for row in chosen]
    larger = work.after(2 * rows), work.after(2 * rows, workers)
    cases = [
        Case(BEFORE, work.iteration(work.before(part), loop=True), rows / part),
        Case("+ collate pre-allocated", work.iteration(work.after(part), loop=True), rows / part),
        Case("+ forward without loop", work.iteration(work.before(rows), loop=False)),
        Case(BOTH, work.iteration(work.after(rows), loop=False)),
        Case("+ batch twice as large", work.iteration(larger[0], loop=False), 0.5),
        Case("+ worker processes", work.iteration(larger[1], loop=False), 0.5, warm_ups=2),
        Case(f"{COLLATE}list and concatenate", lambda: concatenated(batch)),
        Case(f"{COLLATE}pre-allocated", lambda: work.rows.__getitems__(chosen)),
    ]
    timings = report.time(cases)
    for of_collate, base in ((False, BEFORE), (True, cases[-2].name)):
        series = {n: t.seconds for n, t in timings.items() if n.startswith(COLLATE) == of_collate}
        report.compare(series, f"s/{rows} rows", base, less=True)
    both = measure.paired(timings[BEFORE].seconds, timings[BOTH].seconds)
    report.figures.append(("both changes together", f">= {FIGURE}x", f"{both:.1f}x"))
    return report
