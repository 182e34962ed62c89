"""Compare kinds of noise by the cosine of their update with the exact policy gradient, per forward.

    python -m benchmarks directions

A pre-trained tiny model draws completions of a task's prompts. The objective is the model's
expected reward among them, sum_y p(y) r(y) with p normalised over these completions. Its policy
gradient is exact, by backpropagation, and its fitness is without luck, by one forward per member,
so the remaining error is due to the kind of noise.

Then the same for one matrix, with more and more members: the agreement of two halves of the
members, compared with theory.
"""

import argparse
import math
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import measure
from benchmarks.measure import Report
from common.config import SamplingConfig
from common.engine import Requests
from common.model import Decoder, encode_prompts, load_model, stop_ids
from common.sampling import Sampler
from common.task import build
from eggroll.addresses import kind_of
from launch import compose

# rank 0 = full: a number for each element
KINDS: dict[str, tuple[str, int, bool]] = {
    "gaussian, rank 1": ("gaussian", 1, True),
    "gaussian, rank 1, not antithetic": ("gaussian", 1, False),
    "gaussian, rank 4": ("gaussian", 4, True),
    "gaussian, full": ("gaussian", 0, True),
    "rademacher, rank 1": ("rademacher", 1, True),
    "orthogonal directions, rank 1": ("orthogonal", 1, True),
    "in the span of the inputs, rank 1": ("inputs", 1, True),
}
BASE = next(iter(KINDS))
SPAN = 0.99  # of the inputs' square that their span keeps


@dataclass(frozen=True)
class Sizes:
    """The sizes of the work.

    Attributes:
        sigma: the standard deviation of the noise.
        halves: the numbers of members of the last part.
    """

    task: str = "translate"
    prompts: int = 4
    samples: int = 4
    members: int = 64
    sigma: float = 0.005
    halves: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    overrides: tuple[str, ...] = ()


SMALL = ("hidden_size=32", "layers=2", "heads=2", "intermediate_size=64", "pretrain_steps=0")
QUICK = Sizes(
    prompts=2,
    samples=4,
    members=8,
    sigma=0.05,
    halves=(8, 16),
    overrides=tuple(f"model.tiny.{text}" for text in SMALL),
)


class Objective:
    """A model's expected reward among completions that it drew, and its gradient."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        run = compose([f"task={sizes.task}", *sizes.overrides])
        task = build(run.task)
        self.model, tokenizer = load_model(run.model, task, torch.float32, device)
        self.model.eval()
        kinds = kind_of(self.model)
        self.weights = {n: p for n, p in self.model.named_parameters() if kinds[n] == "matrices"}
        examples = list(task.examples("train"))[: sizes.prompts]
        prompts = encode_prompts(tokenizer, [task.prompt(example) for example in examples])
        stop, pad = stop_ids(self.model, tokenizer), int(str(tokenizer.pad_token_id))
        sampler = Sampler(self.model, pad_id=pad, stop_ids=stop, rows=256)
        drawn = SamplingConfig.uncut(32, 1.0)
        made = sampler.generate(Requests(prompts=prompts, samples=sizes.samples), drawn)
        texts = made.texts(Decoder.of(self.model, tokenizer))
        repeated = [example for example in examples for _ in range(sizes.samples)]
        scores = [task.reward(e, text) for e, text in zip(repeated, texts, strict=True)]
        self.rewards = torch.tensor(scores, device=device).view(sizes.prompts, -1)
        rows = []
        for row, (length, tokens) in enumerate(
            zip(made.lengths.tolist(), made.tokens.tolist(), strict=True)
        ):
            prompt = prompts[row // sizes.samples]
            rows.append((len(prompt), [*prompt, *tokens[:length]]))
        width = max(len(ids) for _, ids in rows)
        self.ids = torch.zeros(len(rows), width, dtype=torch.long, device=device)
        self.mask = torch.zeros(len(rows), width - 1, device=device)
        self.read = torch.zeros_like(self.ids, dtype=torch.bool)  # tokens that are no padding
        for row, (start, ids) in enumerate(rows):
            self.ids[row, : len(ids)] = torch.tensor(ids)
            self.mask[row, start - 1 : len(ids) - 1] = 1
            self.read[row, : len(ids)] = True

    def value(self) -> Tensor:
        """Return the expected reward, averaged over prompts; padding does not count."""
        logits = self.model(input_ids=self.ids, use_cache=False).logits[:, :-1]
        logp = -F.cross_entropy(logits.transpose(1, 2), self.ids[:, 1:], reduction="none")
        by_prompt = (logp * self.mask).sum(1).view_as(self.rewards)
        return (by_prompt.softmax(1) * self.rewards).sum(1).mean()

    def gradient(self) -> dict[str, Tensor]:
        """Return the exact gradient of each matrix."""
        self.model.requires_grad_(True)
        found = torch.autograd.grad(self.value(), list(self.weights.values()))
        self.model.requires_grad_(False)
        return dict(zip(self.weights, found, strict=True))

    @torch.no_grad()
    def spans(self) -> dict[str, Tensor]:
        """Return for each matrix an orthonormal basis [k, in] of its inputs, up to a small
        remainder.
        """
        inputs: dict[str, Tensor] = {}
        hooks = [
            module.register_forward_pre_hook(
                lambda _, args, name=name: inputs.update({f"{name}.weight": args[0][self.read]})
            )
            for name, module in self.model.named_modules()
            if f"{name}.weight" in self.weights
        ]
        self.value()
        for hook in hooks:
            hook.remove()
        found = {}
        for name, x in inputs.items():
            square, basis = torch.linalg.eigh(x.T @ x)
            kept = (square.flip(0).cumsum(0) / square.sum() < SPAN).sum().item() + 1
            found[name] = basis.flip(1)[:, : int(kept)].T
        return found

    @torch.no_grad()
    def at(self, direction: dict[str, Tensor], scale: float) -> float:
        """Return the objective at the weights plus `scale` times a direction."""
        for name, change in direction.items():
            self.weights[name].add_(change, alpha=scale)
        value = self.value().item()
        for name, change in direction.items():
            self.weights[name].sub_(change, alpha=scale)
        return value


def draw(
    kind: str, rank: int, count: int, objective: Objective, spans: dict[str, Tensor], seed: int
) -> Iterator[dict[str, Tensor]]:
    """Yield `count` directions, each of unit variance per weight."""
    generator = torch.Generator().manual_seed(seed)
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    for name, weight in objective.weights.items():
        pair = [
            torch.randn(count, max(rank, 1), size, generator=generator) for size in weight.shape
        ]
        if kind == "rademacher":
            pair = [part.sign() for part in pair]
        elif kind == "orthogonal":  # as long as there are dimensions for it
            pair = [orthogonal(part) for part in pair]
        elif kind == "inputs":
            basis = spans[name].cpu()
            z = torch.randn(count, rank, len(basis), generator=generator)
            pair[1] = z @ basis * math.sqrt(basis.shape[1] / len(basis))
        factors[name] = (pair[0], pair[1])
    for j in range(count):
        yield {
            name: torch.randn(w.shape, generator=generator)
            if rank == 0
            else factors[name][0][j].T @ factors[name][1][j] / math.sqrt(rank)
            for name, w in objective.weights.items()
        }


def orthogonal(part: Tensor) -> Tensor:
    """Return vectors [count, 1, size] made orthogonal in blocks of `size`, with their lengths
    unchanged.
    """
    flat = part.flatten(0, 1)
    rows = []
    for block in flat.split(flat.shape[1]):
        q = torch.linalg.qr(block.T)[0].T
        rows.append(q * block.norm(dim=1, keepdim=True))
    return torch.cat(rows).view_as(part)


def estimate(
    objective: Objective, directions: Iterator[dict[str, Tensor]], sigma: float, antithetic: bool
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Return the directions, and the weight of each in the update."""
    kept = list(directions)
    if antithetic:
        return [objective.at(e, sigma) - objective.at(e, -sigma) for e in kept], kept
    values = [objective.at(e, sigma) for e in kept]
    mean = statistics.fmean(values)
    return [value - mean for value in values], kept


def combine(weights: list[float], directions: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the weighted sum of directions."""
    total = {name: torch.zeros_like(part) for name, part in directions[0].items()}
    for weight, direction in zip(weights, directions, strict=True):
        for name, part in direction.items():
            total[name].add_(part, alpha=weight)
    return total


def cosine(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the cosine of two updates over all matrices."""
    flat, others = (torch.cat([part.flatten() for part in d.values()]) for d in (one, other))
    return F.cosine_similarity(flat, others, dim=0).item()


def run(options: argparse.Namespace) -> Report:
    """Measure each kind of noise, then the halves."""
    sizes = QUICK if options.quick else Sizes()
    report = Report("directions", options, 10, sizes=asdict(sizes))
    report.device = torch.device("cpu")
    objective = Objective(sizes, report.device)
    exact, spans = objective.gradient(), objective.spans()
    series: dict[str, list[float]] = {name: [] for name in KINDS}
    for repeat in range(report.repeats):
        for name, (kind, rank, antithetic) in KINDS.items():
            measure.progress(f"{repeat + 1} of {report.repeats}: {name}")
            count = sizes.members // (2 if antithetic else 1)
            directions = draw(kind, rank, count, objective, spans, repeat)
            found = combine(*estimate(objective, directions, sizes.sigma, antithetic))
            series[name].append(cosine(found, exact))
    base = statistics.fmean(series[BASE])
    for name, values in series.items():
        mean = statistics.fmean(values)
        report.add(name, mean, "cosine", *(() if name == BASE else (BASE, mean / base)))
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        report.add(name, error, "standard error")
    kept = sum(
        len(s) * w.shape[0] for s, w in zip(spans.values(), objective.weights.values(), strict=True)
    )
    dimensions = sum(w.numel() for w in objective.weights.values())
    report.conditions |= {"cosines": series, "dimensions": dimensions, "within_spans": kept}
    report.notes += [
        f"{sizes.members} forwards each; {dimensions:,} dimensions, {kept:,} of them in the spans.",
        f"By theory {math.sqrt(sizes.members / 2 / dimensions):.4f} for {BASE}.",
    ]
    add_halves(report, sizes, objective, spans)
    measure.progress("")
    return report


def add_halves(
    report: Report, sizes: Sizes, objective: Objective, spans: dict[str, Tensor]
) -> None:
    """Add the cosine of the updates of two halves of the members, with noise on one matrix alone,
    and the value of theory: 1 / (1 + d / D) for D directions in each half.
    """
    name, weight = min(objective.weights.items(), key=lambda item: item[1].numel())
    objective.weights = {name: weight}
    found: dict[int, list[float]] = {members: [] for members in sizes.halves}
    for repeat in range(repeats := max(1, report.repeats // 2)):
        measure.progress(f"{repeat + 1} of {repeats}: halves")
        most = max(sizes.halves) // 2
        directions = draw("gaussian", 1, most, objective, spans, 1000 + repeat)
        weights, kept = estimate(objective, directions, sizes.sigma, antithetic=True)
        for members in sizes.halves:
            half = members // 4
            parts = [slice(0, half), slice(half, 2 * half)]
            updates = [combine(weights[part], kept[part]) for part in parts]
            found[members].append(cosine(*updates))
    theory = {members: 1 / (1 + weight.numel() / (members / 4)) for members in sizes.halves}
    for members, values in found.items():
        row = f"halves of {members} members, {name}"
        report.add(row, statistics.fmean(values), "cosine")
        report.add(row, theory[members], "theory")
    report.conditions |= {"halves": found, "halves_theory": theory}
