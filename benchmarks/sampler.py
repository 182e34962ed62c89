"""The sampler beside `generate` and transformers' continuous batching, on the same model, prompts
and stop tokens.

    python -m benchmarks sampler
    python -m benchmarks sampler --model gpt2 --json sampler.json

Two works, on random weights. Equal lengths: one greedy completion of 64 tokens for each of 64
prompts of 96 tokens; the completions are compared. Spread lengths: groups of 8 samples at
temperature 1, 96-token prompts, up to 128 new tokens; every token is about as likely as any other,
so a few stop tokens make lengths that spread like a geometric distribution. There are more rows
than slots: `generate` takes batches of as many rows as the sampler has slots, and each waits for
its longest row. Speed is new tokens per second, up to and with the stop token.

Decode roofline: the seconds that reading the weights and the valid part of the cache once per step
would take at the device's measured copy bandwidth, over those that the equal lengths took (prefill
included).

--model: small (Llama d=256, 6 layers, bytes; the default on a CPU, float32), gpt2 (124M) and 0.5b
(Qwen2's 0.5B shape; the default on CUDA), both in bfloat16 where the device has it.
"""

import argparse
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GPT2Config, LlamaConfig, Qwen2Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from benchmarks import measure
from benchmarks.measure import Case, Row, Timing
from common.config import SamplingConfig
from common.precision import native_bf16
from common.sampling.engine import Requests
from common.sampling.native import Sampler

GENERATE, PAGED, OURS = "generate", "continuous batching", "this project"
LAUNCHED = "this project, no CUDA graphs"  # on CUDA alone
MEAN_LENGTH = 48  # of the spread lengths before they are cut, in tokens
TIE = {
    torch.float32: 1e-3,
    torch.bfloat16: 0.1,
}  # logits closer than this may change places by rounding
# What is to be reached: on two CPU cores, on one data-centre GPU.
WANTED = {
    "equal lengths, against generate": (1.05, 5.0),
    "spread lengths, against generate": (2.0, 6.0),
    "spread lengths, against continuous batching": (1.5, 1.0),
}


@dataclass(frozen=True)
class Sizes:
    """The work. rows: slots, and rows of a batch of `generate`."""

    rows: int = 64
    prompts: int = 32  # of the spread lengths; the equal ones have one a row
    samples: int = 8
    prompt_tokens: int = 96
    new_tokens: int = 64
    longest: int = 128


QUICK = Sizes(rows=8, prompts=4, samples=4, prompt_tokens=12, new_tokens=8, longest=24)


def build(name: str, longest: int) -> Any:
    """A model of random weights that no token of its own stops."""
    none: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    if name == "gpt2":
        config: Any = GPT2Config(**none)
    elif name == "0.5b":
        config = Qwen2Config(
            vocab_size=151936,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            **none,
        )
    else:
        config = LlamaConfig(
            vocab_size=260,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=6,
            num_attention_heads=8,
            max_position_embeddings=max(256, longest),
            **none,
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).requires_grad_(False).eval()


class Work:
    """The model, the prompts, and each way to sample."""

    def __init__(self, name: str, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> None:
        self.sizes, self.device, self.dtype = sizes, device, dtype
        self.model = build(name, sizes.prompt_tokens + max(sizes.longest, sizes.new_tokens)).to(
            device, dtype
        )
        self.vocabulary = self.model.config.vocab_size
        draw = torch.Generator().manual_seed(1)
        shape = (max(sizes.rows, sizes.prompts), sizes.prompt_tokens)
        self.prompts = torch.randint(1, self.vocabulary, shape, generator=draw)
        self.stops = list(range(1, 1 + max(1, self.vocabulary // MEAN_LENGTH)))

    # --- equal lengths

    @torch.inference_mode()
    def equal_generate(self) -> Tensor:
        """`generate`, one batch."""
        prompts = self.prompts[: self.sizes.rows].to(self.device)
        new = self.sizes.new_tokens
        return self.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )[:, prompts.shape[1] :]

    def equal_ours(self, graphs: bool = True) -> Tensor:
        """The sampler, one batch."""
        sampler = Sampler(self.model, pad_id=0, stop_ids=(), rows=self.sizes.rows, graphs=graphs)
        greedy = SamplingConfig(
            max_new_tokens=self.sizes.new_tokens, temperature=0.0, top_k=0, top_p=1.0
        )
        return sampler.generate(
            Requests(prompts=self.prompts[: self.sizes.rows].tolist()), greedy
        ).tokens

    def differ(self, ours: Tensor, theirs: Tensor) -> int:
        """Count the rows that differ. Raises: RuntimeError if two differ by more than a tie that
        rounding decides.
        """
        rows = (ours != theirs).any(1).nonzero()[:, 0].tolist()
        for row in rows:
            first = int((ours[row] != theirs[row]).nonzero()[0])
            text = torch.cat((self.prompts[row].to(self.device), ours[row, :first]))[None]
            with torch.no_grad():
                logits = self.model(input_ids=text).logits[0, -1].float()
            if (logits[ours[row, first]] - logits[theirs[row, first]]).abs() > TIE[self.dtype]:
                raise RuntimeError(f"not the same work: row {row} differs at token {first}.")
        return len(rows)

    # --- spread lengths; each returns the lengths of all rows

    def until_stop(self, rows: list[list[int]]) -> list[int]:
        """Lengths of rows up to and with their stop token."""
        stops = set(self.stops)
        return [
            next((i + 1 for i, token in enumerate(row) if token in stops), len(row)) for row in rows
        ]

    @property
    def sampled(self) -> GenerationConfig:
        """Temperature 1 and nothing cut."""
        return GenerationConfig(
            max_new_tokens=self.sizes.longest,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=self.stops,
            pad_token_id=0,
            num_return_sequences=self.sizes.samples,
        )

    @torch.inference_mode()
    def spread_generate(self) -> list[int]:
        """`generate` in batches of as many rows as the sampler has slots."""
        lengths, each = [], max(1, self.sizes.rows // self.sizes.samples)
        for start in range(0, self.sizes.prompts, each):
            prompts = self.prompts[start : min(start + each, self.sizes.prompts)].to(self.device)
            made = self.model.generate(
                prompts, attention_mask=torch.ones_like(prompts), generation_config=self.sampled
            )
            lengths += self.until_stop(made[:, prompts.shape[1] :].tolist())
        return lengths

    def spread_paged(self) -> list[int]:
        """transformers' continuous batching; a paged cache for as many rows as the sampler has
        slots.
        """
        from transformers import ContinuousBatchingConfig

        page = 32
        pages = -(-(self.sizes.prompt_tokens + self.sizes.longest) // page)
        settings: Any = ContinuousBatchingConfig(
            page_size=page,
            num_blocks=pages * self.sizes.rows,
            max_batch_tokens=max(1024, self.sizes.rows),
            max_requests_per_batch=self.sizes.rows,
        )
        made = self.model.generate_batch(
            self.prompts[: self.sizes.prompts].tolist(),
            generation_config=self.sampled,
            continuous_batching_config=settings,
            warmup=False,
        )
        rows = [one.generated_tokens for one in made.values()]
        if len(rows) != self.sizes.prompts * self.sizes.samples:
            raise RuntimeError(
                f"continuous batching returned {len(rows)} rows of"
                f" {self.sizes.prompts * self.sizes.samples}"
            )
        return self.until_stop(rows)

    def spread_ours(self, graphs: bool = True) -> list[int]:
        """The sampler."""
        sampler = Sampler(
            self.model, pad_id=0, stop_ids=self.stops, rows=self.sizes.rows, graphs=graphs
        )
        sampling = SamplingConfig(
            max_new_tokens=self.sizes.longest, temperature=1.0, top_k=0, top_p=1.0
        )
        prompts = self.prompts[: self.sizes.prompts].tolist()
        return sampler.generate(
            Requests(prompts=prompts, samples=self.sizes.samples), sampling
        ).lengths.tolist()

    # --- roofline

    def decode_bytes(self) -> float:
        """Return the bytes that all decode steps of the equal lengths must read: the weights, and
        the cache as it grows.
        """
        config, size = self.model.config, self.dtype.itemsize
        weights = sum(p.numel() for p in self.model.parameters())
        if not config.tie_word_embeddings:
            # of which a step reads a few rows
            weights -= self.model.get_input_embeddings().weight.numel()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        token = (
            2
            * config.num_hidden_layers
            * heads
            * (config.hidden_size // config.num_attention_heads)
        )
        new = self.sizes.new_tokens
        cached = self.sizes.rows * token * (new * self.sizes.prompt_tokens + new * (new + 1) / 2)
        return size * (new * weights + cached)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written a second by a large copy, the best of ten."""
    source = torch.empty(
        (1 << 28) if device.type == "cpu" else (1 << 31), dtype=torch.uint8, device=device
    ).fill_(1)
    target = torch.empty_like(source)
    return (
        2
        * source.numel()
        / min(measure.seconds(lambda: target.copy_(source), device)[0] for _ in range(10))
    )


def run(options: argparse.Namespace) -> measure.Report:
    """Time every row in turn."""
    device = measure.find_device(options.device)
    name = options.model or ("0.5b" if device.type == "cuda" else "small")
    dtype = torch.bfloat16 if name != "small" and native_bf16(device) else torch.float32
    sizes = QUICK if options.quick else Sizes()
    repeats = options.repeats or (1 if options.quick else 5)
    work = Work(name, sizes, device, dtype)
    conditions = measure.conditions(
        device,
        sizes=asdict(sizes)
        | {
            "model": name,
            "parameters": sum(p.numel() for p in work.model.parameters()),
        },
        repeats=repeats,
        dtype=str(dtype).removeprefix("torch."),
        quick=options.quick,
    )
    ways = [Case(GENERATE, work.equal_generate), Case(OURS, work.equal_ours)]
    if device.type == "cuda":
        ways.append(Case(LAUNCHED, lambda: work.equal_ours(graphs=False)))
    equal = measure.interleaved(ways, repeats, device)
    conditions["rows_that_rounding_changed"] = work.differ(
        equal[OURS].result, equal[GENERATE].result
    )
    lengths: dict[str, list[list[int]]] = {GENERATE: [], PAGED: [], OURS: [], LAUNCHED: []}

    def kept(row: str, sample: Any) -> Case:
        return Case(row, lambda: lengths[row].append(sample()))

    ways = [
        kept(GENERATE, work.spread_generate),
        kept(PAGED, work.spread_paged),
        kept(OURS, work.spread_ours),
    ]
    if device.type == "cuda":
        ways.append(kept(LAUNCHED, lambda: work.spread_ours(graphs=False)))
    spread = measure.interleaved(ways, repeats, device)
    bandwidth = copy_bandwidth(device)
    return report(
        work, conditions, equal, spread, {k: v[1:] for k, v in lengths.items() if v}, bandwidth
    )


def report(
    work: Work,
    conditions: dict[str, Any],
    equal: dict[str, Timing],
    spread: dict[str, Timing],
    lengths: dict[str, list[list[int]]],
    bandwidth: float,
) -> measure.Report:
    """The table and the JSON. lengths: of all rows, of each repeat."""
    tokens = work.sizes.rows * work.sizes.new_tokens
    speeds = {
        ("equal lengths", row): [tokens / s for s in timing.seconds]
        for row, timing in equal.items()
    }
    for row, timing in spread.items():
        pairs = zip(lengths[row], timing.seconds, strict=True)
        speeds["spread lengths", row] = [sum(made) / s for made, s in pairs]
    lines, rows = [], []
    for (kind, row), values in speeds.items():
        ratio = measure.quantile(measure.paired(values, speeds[kind, GENERATE]), 0.5)
        middle = measure.quantile(values, 0.5)
        lines.append([f"{kind}: {row}", measure.number(middle), f"{ratio:.2f}x"])
        compared = (None, None) if row == GENERATE else (GENERATE, ratio)
        rows.append(Row("sampler", f"{kind}: {row}", middle, "tokens/s", *compared))
    ours = speeds["spread lengths", OURS]
    paged = measure.quantile(measure.paired(ours, speeds["spread lengths", PAGED]), 0.5)
    middle = measure.quantile(ours, 0.5)
    rows.append(Row("sampler", f"spread lengths: {OURS}, too", middle, "tokens/s", PAGED, paged))
    found = {}
    for kind in ("equal lengths", "spread lengths"):
        pairs = measure.paired(speeds[kind, OURS], speeds[kind, GENERATE])
        found[f"{kind}, against generate"] = measure.quantile(pairs, 0.5)
    found["spread lengths, against continuous batching"] = paged
    share = work.decode_bytes() / bandwidth / equal[OURS].p50
    rows.append(Row("sampler", "decode, share of the bandwidth roofline", share, "share"))

    device = conditions["device_type"]
    figures = [
        (what, f"{WANTED[what][device == 'cuda']:.2f}x", f"{value:.2f}x")
        for what, value in found.items()
    ]
    wanted = "60 %" if device == "cuda" else "-"
    figures.append(("decode, share of the bandwidth roofline", wanted, f"{share:.0%}"))
    drawn = [length for made in lengths[OURS] for length in made]
    spread_of = [round(measure.quantile([float(n) for n in drawn], q)) for q in (0.1, 0.5, 0.9)]
    mean = {
        row: round(sum(map(sum, made)) / sum(map(len, made)), 1) for row, made in lengths.items()
    }
    text = measure.table(["", "tokens/s", "ratio"], lines)
    text += "\n\n" + measure.table(["", "wanted", "measured"], figures)
    text += "\n\nSpread lengths: p10 {}, p50 {}, p90 {} tokens.".format(*spread_of)
    text += f"\nCopy bandwidth {bandwidth / 1e9:.0f} GB/s. Equal lengths: the same completions"
    changed = conditions["rows_that_rounding_changed"]
    text += f", but {changed} of {work.sizes.rows} that rounding changed." if changed else "."
    conditions |= {
        "copy_bandwidth": bandwidth,
        "mean_length": mean,
        "lengths_p10_p50_p90": spread_of,
        "timing": {"equal": measure.taken(equal), "spread": measure.taken(spread)},
        "ratio": "tokens per second of row / those of against, the median over repeats",
    }
    return measure.Report(text, conditions, rows)
