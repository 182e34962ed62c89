"""Compare the sampler with `generate` and transformers' continuous batching, with the same random
weights, prompts and stop tokens.

    python -m benchmarks sampler --model gpt2 --json sampler.json

Equal lengths: one greedy completion per prompt; the completions are compared. Spread lengths:
groups of samples at temperature 1; a few stop tokens, each as likely as any other token, make the
lengths geometrically distributed. There are more rows than slots, and `generate` takes batches of
as many rows as the sampler has slots. Speed is new tokens per second, up to and including the stop
token.

Decode roofline: the seconds to read the weights and the valid part of the cache once per step at
the device's measured copy bandwidth, divided by the seconds of the equal lengths.
"""

import argparse
import statistics
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks import measure
from benchmarks.measure import Case
from benchmarks.models import build, differs, generate
from common.config import SamplingConfig
from common.engine import Requests
from common.model import head_size
from common.sampling import Sampler

GENERATE, PAGED, OURS = "generate", "continuous batching", "this project"
LAUNCHED = "this project, no CUDA graphs"  # on CUDA alone
EQUAL, SPREAD = "equal lengths: ", "spread lengths: "
ROOFLINE = "decode, share of the bandwidth roofline"
MEAN_LENGTH = 48  # of the spread lengths before they are cut, in tokens
# logits closer than this may change places by rounding
TIE = {torch.float32: 1e-3, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class Sizes:
    """The sizes of the work. rows: slots, and rows per batch of `generate`."""

    rows: int = 64
    prompts: int = 32  # of the spread lengths; the equal ones have one a row
    samples: int = 8
    prompt_tokens: int = 96
    new_tokens: int = 64
    longest: int = 128


QUICK = Sizes(rows=8, prompts=4, samples=4, prompt_tokens=12, new_tokens=8, longest=24)


class Work:
    """The model, the prompts, and each way to sample."""

    def __init__(self, name: str, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> None:
        self.sizes, self.device, self.dtype = sizes, device, dtype
        self.model = build(name).to(device, dtype)
        vocabulary = self.model.config.vocab_size
        draw = torch.Generator().manual_seed(1)
        shape = (max(sizes.rows, sizes.prompts), sizes.prompt_tokens)
        self.prompts = torch.randint(1, vocabulary, shape, generator=draw)
        self.stops = list(range(1, 1 + max(1, vocabulary // MEAN_LENGTH)))
        # Temperature 1 and nothing cut.
        heat = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        length = {"max_new_tokens": sizes.longest, "eos_token_id": self.stops}
        self.sampled: dict[str, Any] = {"num_return_sequences": sizes.samples, **heat, **length}
        self.samplers: dict[tuple[bool, bool], Sampler] = {}  # by greedy and graphs, as in a run

    def ours(self, prompts: Tensor, samples: int, greedy: bool, graphs: bool) -> Any:
        """Return the completions of this project's sampler."""
        if (greedy, graphs) not in self.samplers:
            stops, rows = () if greedy else self.stops, self.sizes.rows
            made = Sampler(self.model, pad_id=0, stop_ids=stops, rows=rows, graphs=graphs)
            self.samplers[greedy, graphs] = made
        sampler = self.samplers[greedy, graphs]
        new = self.sizes.new_tokens if greedy else self.sizes.longest
        heat = 0.0 if greedy else 1.0
        sampling = SamplingConfig.uncut(new, heat)
        return sampler.generate(Requests(prompts=prompts.tolist(), samples=samples), sampling)

    # --- equal lengths; each returns the tokens

    def equal_generate(self) -> Tensor:
        """Call `generate` for all rows."""
        prompts, new = self.prompts[: self.sizes.rows], self.sizes.new_tokens
        return generate(self.model, prompts, max_new_tokens=new)

    def equal_ours(self, graphs: bool = True) -> Tensor:
        """Call the sampler for all rows."""
        return self.ours(self.prompts[: self.sizes.rows], 1, True, graphs).tokens

    def count_differing(self, ours: Tensor, theirs: Tensor) -> int:
        """Count the rows that differ. Raises: RuntimeError if a difference is more than a tie."""
        rows = (ours != theirs).any(1).nonzero()[:, 0].tolist()
        for row in rows:
            given = self.prompts[row], ours[row], theirs[row]
            if (found := differs(self.model, *given, TIE[self.dtype])) is not None:
                raise RuntimeError(f"not the same work: row {row} {found}.")
        return len(rows)

    # --- spread lengths; each returns the lengths of all rows

    def until_stop(self, rows: list[list[int]]) -> list[int]:
        """Return the lengths of rows up to and including their stop token."""
        stops = set(self.stops)
        return [
            next((i + 1 for i, token in enumerate(row) if token in stops), len(row)) for row in rows
        ]

    def spread_generate(self) -> list[int]:
        """Call `generate` in batches of as many rows as the sampler has slots."""
        lengths: list[int] = []
        batch = max(1, self.sizes.rows // self.sizes.samples)
        for prompts in self.prompts[: self.sizes.prompts].split(batch):
            lengths += self.until_stop(generate(self.model, prompts, **self.sampled).tolist())
        return lengths

    def spread_paged(self) -> list[int]:
        """Call transformers' continuous batching, with a cache for as many rows as slots."""
        page, sizes = 32, self.sizes
        named = {field.name for field in fields(ContinuousBatchingConfig)}
        key = "page_size" if "page_size" in named else "block_size"  # transformers 5.17
        size: dict[str, Any] = {key: page}
        pages = -(-(sizes.prompt_tokens + sizes.longest) // page)
        settings: Any = ContinuousBatchingConfig(
            **size,
            num_blocks=pages * sizes.rows,
            max_batch_tokens=max(1024, sizes.rows),
            max_requests_per_batch=sizes.rows,
        )
        made = self.model.generate_batch(
            self.prompts[: sizes.prompts].tolist(),
            generation_config=GenerationConfig(pad_token_id=0, **self.sampled),
            continuous_batching_config=settings,
            warmup=False,
        )
        rows = [one.generated_tokens for one in made.values()]
        if len(rows) != sizes.prompts * sizes.samples:
            raise RuntimeError(f"continuous batching returned {len(rows)} rows")
        return self.until_stop(rows)

    def spread_ours(self, graphs: bool = True) -> list[int]:
        """Call the sampler for all rows."""
        prompts = self.prompts[: self.sizes.prompts]
        return self.ours(prompts, self.sizes.samples, False, graphs).lengths.tolist()

    # --- roofline

    def decode_bytes(self) -> float:
        """Return the bytes that the decode steps must read: the weights, and the cache so far."""
        config, sizes = self.model.config, self.sizes
        weights = sum(p.numel() for p in self.model.parameters())
        if not config.tie_word_embeddings:
            # of which a step reads a few rows
            weights -= self.model.get_input_embeddings().weight.numel()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        token = 2 * config.num_hidden_layers * heads * head_size(config)
        new = sizes.new_tokens
        cached = sizes.rows * token * (new * sizes.prompt_tokens + new * (new + 1) / 2)
        return self.dtype.itemsize * (new * weights + cached)


def copy_bandwidth(device: torch.device, size: int | None = None) -> float:
    """Return the bytes read and written per second by a large copy, the best of ten."""
    size = size or 1 << (28 if device.type == "cpu" else 31)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    spans = [measure.seconds(lambda: target.copy_(source), device)[0] for _ in range(10)]
    return 2 * size / min(spans)


def run(options: argparse.Namespace) -> measure.Report:
    """Time every row in turn."""
    name, dtype = measure.choose_model(options.model, measure.find_device(options.device))
    sizes = QUICK if options.quick else Sizes()
    report = measure.Report("sampler", options, 5, dtype=measure.name_of(dtype))
    cuda = report.device.type == "cuda"
    work = Work(name, sizes, report.device, dtype)
    parameters = sum(p.numel() for p in work.model.parameters())
    report.conditions["sizes"] = asdict(sizes) | {"model": name, "parameters": parameters}
    equal = [
        Case(EQUAL + GENERATE, work.equal_generate),
        Case(EQUAL + OURS, work.equal_ours),
        Case(EQUAL + LAUNCHED, partial(work.equal_ours, graphs=False)),
    ]
    spread = [
        Case(SPREAD + GENERATE, work.spread_generate),
        Case(SPREAD + PAGED, work.spread_paged),
        Case(SPREAD + OURS, work.spread_ours),
        Case(SPREAD + LAUNCHED, partial(work.spread_ours, graphs=False)),
    ]
    for kind, cases, count in ((EQUAL, equal, torch.numel), (SPREAD, spread, sum)):
        timings = report.time(cases if cuda else cases[:-1])
        speeds = {row: timing.speeds(count) for row, timing in timings.items()}
        report.compare(speeds, "tokens/s", kind + GENERATE, less=False)
        ratio = measure.paired(speeds[kind + OURS], speeds[kind + GENERATE])
        wanted = {EQUAL: (1.05, 5.0), SPREAD: (2.0, 6.0)}[kind][cuda]
        report.figures.append((f"{kind}against generate", f">= {wanted}x", f"{ratio:.2f}x"))
        if kind == EQUAL:
            made = timings[EQUAL + OURS].first, timings[EQUAL + GENERATE].first
            report.conditions["rows_that_rounding_changed"] = work.count_differing(*made)
            bandwidth = report.conditions["copy_bandwidth"] = copy_bandwidth(report.device)
            share = work.decode_bytes() / bandwidth / timings[EQUAL + OURS].p50
            report.add(ROOFLINE, share, "share")
            report.figures.append((ROOFLINE, ">= 60% on CUDA", f"{share:.1%}"))
            continue
        ratio = measure.paired(speeds[SPREAD + OURS], speeds[SPREAD + PAGED])
        middle = statistics.median(speeds[SPREAD + OURS])
        report.add(f"{SPREAD}{OURS}, too", middle, "tokens/s", SPREAD + PAGED, ratio)
        wanted = 1.0 if cuda else 1.5
        report.figures.append((f"{kind}against {PAGED}", f">= {wanted}x", f"{ratio:.2f}x"))
        lengths = {row: [*chain(*timing.results)] for row, timing in timings.items()}
        means = {row: round(statistics.fmean(found), 1) for row, found in lengths.items()}
        tenths = statistics.quantiles(lengths[SPREAD + OURS], n=10)
        spread_of = [round(tenths[i]) for i in (0, 4, 8)]
        report.conditions |= {"mean_length": means, "lengths_p10_p50_p90": spread_of}
    return report
