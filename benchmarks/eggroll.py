"""python -m benchmarks eggroll: a step's sampling from the first state of the EGGROLL document to
this project's.

Each row does the same work: members x prompts greedy completions of one length, on a Llama with
random weights, under the same noise. Rows that would take minutes do a stated part of it and are
scaled; their completions are compared with the population's, so that what is compared is equal
work. Then the parts of a step that are not sampling.
"""

import argparse
import copy
import math
import os
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import measure
from benchmarks.measure import Case, Report, Row, Timing
from common.config import OptimizerConfig, SamplingConfig, ScheduleConfig
from common.precision import native_bf16
from common.sampling.engine import Requests
from common.sampling.native import Sampler
from eggroll.config import EggrollConfig, NoiseConfig, StopAtConfig
from eggroll.fitness import fitness
from eggroll.noise import Noise
from eggroll.weights import Weights

NAME = "eggroll"
VOCABULARY = 260
ONE = "one sample at a time"
MEMBER = "weights perturbed once a member, batched"
POPULATION = "population in one forward"
AMP = "+ amp"
COMPILE = "+ compile"
PLAIN = "plain sampler, no noise"
NOISE = "noise generation"
UPDATE = "update"
BOTH = "noise generation and update"
# The names in tables.
SHORT = {
    ONE: "one at a time",
    MEMBER: "once per member",
    POPULATION: "population forward",
    PLAIN: "plain sampler",
}
SAMPLING = ("one_at_a_time", "member_by_member", "population", "plain")  # methods of Work

# logits closer than this may change places by rounding; their standard deviation is about 0.3
TIE = 1e-3
REPEATS = 7


@dataclass(frozen=True)
class Sizes:
    """The work of a step, and how much of it the slow rows do."""

    hidden_size: int = 256
    layers: int = 6
    heads: int = 8
    intermediate_size: int = 768
    members: int = 64
    prompts: int = 2
    prompt_tokens: int = 32
    new_tokens: int = 64
    samples_measured: int = 4  # of the row that goes one sample at a time
    members_measured: int = 8  # of the row that goes member by member

    @property
    def samples(self) -> int:
        """Completions of a step."""
        return self.members * self.prompts

    @property
    def flops(self) -> float:
        """The work of the unperturbed model for all completions: the noise is overhead."""
        d, positions = (
            self.hidden_size,
            self.prompt_tokens + self.new_tokens - 1,
        )  # the last token is not fed back
        layers = 2 * self.layers * (4 * d * d + 3 * d * self.intermediate_size) * positions
        attention = 4 * self.layers * d * positions * (positions + 1) / 2
        return self.samples * (layers + attention + 2 * d * VOCABULARY * self.new_tokens)


QUICK = Sizes(
    32, 2, 2, 64, members=8, prompt_tokens=8, new_tokens=8, samples_measured=2, members_measured=2
)


@dataclass(frozen=True)
class Way:
    """A row of the table: a method of Work, and how the model runs.

    part: what is done of the work, where that is not all of it; scale: the whole over the part.
    """

    row: str
    method: str
    dtype: torch.dtype = torch.float32
    compiled: bool = False
    scale: float = 1.0
    part: str = ""


def settings(sizes: Sizes) -> EggrollConfig:
    """The defaults of conf/algo/eggroll.yaml in these sizes."""
    constant = ScheduleConfig(kind="constant", end=1.0)
    return EggrollConfig(
        name="eggroll",
        steps=1,
        members=sizes.members,
        prompts_per_step=sizes.prompts,
        samples_per_prompt=1,
        rollout_rows=sizes.samples,
        rank=1,
        sigma=0.01,
        lr=0.02,
        mirrored=True,
        noise_reuse=1,
        fitness="zscore",
        noise=NoiseConfig(
            matrices="lowrank", vectors="frozen", embeddings="frozen", head="frozen", patterns={}
        ),
        optimizer=OptimizerConfig(name="SGD", kwargs={}),
        lr_schedule=constant,
        sigma_schedule=constant,
        weight_decay=0.0,
        stop_at=StopAtConfig(drift=None),
        sampling=SamplingConfig(
            max_new_tokens=sizes.new_tokens, temperature=0.0, top_p=1.0, top_k=0
        ),
    )


class Work:
    """The model, the noise and the prompts of a step, and the ways to do it; completions are [n,
    new tokens].
    """

    def __init__(
        self,
        sizes: Sizes,
        device: torch.device,
        dtype: torch.dtype,
        compiled: bool,
        model: Any = None,
    ) -> None:
        self.sizes, self.settings, self.device = sizes, settings(sizes), device
        model = build(sizes) if model is None else model
        self.model = model.to(device=device, dtype=dtype)
        self.parameters = dict(self.model.named_parameters())
        self.noise = Noise(
            self.model, self.settings.noise, rank=self.settings.rank, mirrored=True, seed=0
        )
        self.sampler = Sampler(
            self.model,
            pad_id=VOCABULARY - 1,
            stop_ids=(),
            rows=sizes.samples,
            compile_mode="default" if compiled else None,
            graphs=True,
        )
        draw = torch.Generator().manual_seed(1)
        self.prompts = torch.randint(0, 256, (sizes.prompts, sizes.prompt_tokens), generator=draw)
        self.rewards = torch.rand(sizes.members, sizes.prompts, generator=draw)

    # --- as the document's code does it

    @contextmanager
    def materialised(self, member: int) -> Iterator[None]:
        """The weights of one member in place of the model's: keep a copy, add sigma E, put the copy
        back.
        """
        kept = {a.name: self.parameters[a.name].detach().clone() for a in self.noise.addresses}
        direction = torch.tensor([member // 2], device=self.device)
        scale = (-1) ** member * self.settings.sigma / math.sqrt(self.settings.rank)
        try:
            drawn = self.noise.draw(0, self.noise.addresses, direction)
            for address, noise in zip(self.noise.addresses, drawn, strict=True):
                out_t, in_t = address.split(noise)  # [1, r, out], [1, r, in]
                self.parameters[address.name].addmm_(out_t[0].T, in_t[0], alpha=scale)
            yield
        finally:
            for name, weight in kept.items():
                self.parameters[name].copy_(weight)

    def generate(self, prompts: Tensor) -> Tensor:
        """transformers' own generation, greedy."""
        prompts = prompts.to(self.device)
        made = self.model.generate(  # pyright: ignore[reportCallIssue]
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=self.sizes.new_tokens,
            do_sample=False,
        )
        return made[:, prompts.shape[1] :]

    @torch.inference_mode()
    def one_at_a_time(self) -> Tensor:
        """Prompt by prompt, and for each member by member."""
        made = []
        for index in range(self.sizes.samples_measured):
            prompt, member = divmod(index, self.sizes.members)
            with self.materialised(member):
                made.append(self.generate(self.prompts[prompt : prompt + 1]))
        return torch.cat(made)

    @torch.inference_mode()
    def member_by_member(self) -> Tensor:
        """Each member's prompts in one batch."""
        made = []
        for member in range(self.sizes.members_measured):
            with self.materialised(member):
                made.append(self.generate(self.prompts))
        return torch.cat(made)

    # --- as this project does it

    def plain(self) -> Tensor:
        """The sampler without noise, every prompt once per member."""
        sampling = self.settings.sampling
        return self.sampler.generate(
            Requests(prompts=self.prompts.tolist(), groups=self.sizes.members), sampling
        ).tokens

    def population(self) -> Tensor:
        """All members in one forward; their noise is made here too."""
        with self.noise.members(0, range(self.sizes.members), self.settings.sigma):
            return self.plain()

    def draw_noise(self) -> None:
        """Draw the noise as `population` does before it samples."""
        with self.noise.members(0, range(self.sizes.members), self.settings.sigma):
            pass

    @cached_property
    def weights(self) -> Weights:
        """A second model that the updates move, so that this one stays as it is."""
        model, folder = copy.deepcopy(self.model), Path(tempfile.gettempdir())
        return Weights(model, self.noise, self.settings, model.dtype, offload=False, folder=folder)

    def update(self) -> None:
        """Rewards to new weights, as the training loop does it."""
        shaped = fitness(self.rewards, self.settings.fitness)
        for name, gradient in self.noise.gradients(0, shaped):
            self.weights.descend(name, gradient, self.settings.lr)
            del gradient
        self.weights.drift()

    # --- the same work?

    def same(self, rows: Tensor, others: Tensor, which: list[tuple[int, int]]) -> int:
        """Count the completions that are equal. which: prompt and member of each.

        Raises: RuntimeError if two differ by more than a tie that rounding decides.
        """
        equal = 0
        for row, other, (prompt, member) in zip(rows, others, which, strict=True):
            differ = (row != other).nonzero()
            if len(differ) == 0:
                equal += 1
                continue
            first = int(differ[0])
            text = torch.cat((self.prompts[prompt].to(self.device), row[:first]))[None]
            with self.materialised(member), torch.no_grad():
                logits = self.model(input_ids=text).logits[0, -1]
            if (logits[row[first]] - logits[other[first]]).abs() > TIE:
                raise RuntimeError(
                    f"not the same work: member {member}, prompt {prompt} differ at token {first}: "
                    f"{row[first].item()} and {other[first].item()}."
                )
        return equal


def build(sizes: Sizes) -> LlamaForCausalLM:
    """A Llama with random weights, the same at every call, that no token stops."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=sizes.hidden_size,
            intermediate_size=sizes.intermediate_size,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            max_position_embeddings=max(256, sizes.prompt_tokens + sizes.new_tokens),
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=VOCABULARY - 1,
            tie_word_embeddings=False,
        )
        model = LlamaForCausalLM(config)
    return model.requires_grad_(False).eval()


def ways(sizes: Sizes, bf16: bool, compiler: bool) -> list[Way]:
    """The rows of the table that this device can measure, in its order."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    s, m = sizes.samples_measured, sizes.members_measured
    found = [
        Way(ONE, "one_at_a_time", scale=sizes.samples / s, part=f"{s} of {sizes.samples} samples"),
        Way(
            MEMBER,
            "member_by_member",
            scale=sizes.members / m,
            part=f"{m} of {sizes.members} members",
        ),
        Way(POPULATION, "population"),
        Way(AMP, "population", dtype) if bf16 else None,
        Way(COMPILE, "population", dtype, compiled=True) if compiler else None,
        Way(PLAIN, "plain"),
        Way(NOISE, "draw_noise"),
        Way(UPDATE, "update"),
    ]
    return [way for way in found if way is not None]


# Which rows a row's speed is compared with, beside the first.
AGAINST = {
    MEMBER: (ONE,),
    POPULATION: (PLAIN, MEMBER, ONE),
    AMP: (POPULATION, PLAIN, MEMBER, ONE),
    COMPILE: (AMP, POPULATION, PLAIN, MEMBER, ONE),
    PLAIN: (MEMBER, ONE),
}


def prepare(sizes: Sizes, device: torch.device, way: Way) -> Callable[[], Any]:
    """A row alone, for the process in which its memory is measured."""
    # the peak is the same
    sizes = Sizes(**asdict(sizes) | {"samples_measured": 1, "members_measured": 1})
    return getattr(Work(sizes, device, way.dtype, way.compiled), way.method)


def run(options: argparse.Namespace) -> Report:
    """Measure, compare, and say what came out."""
    with tempfile.TemporaryDirectory(prefix="clutch-bench-") as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = (
            folder  # an earlier run's cache would hide the seconds of compiling
        )
        return _run(options)


def _run(options: argparse.Namespace) -> Report:
    device = measure.find_device(options.device)
    sizes = QUICK if options.quick else Sizes()
    repeats = options.repeats or (2 if options.quick else REPEATS)
    torch.set_float32_matmul_precision("highest")
    conditions = measure.conditions(
        device, sizes=asdict(sizes), quick=options.quick, repeats=repeats
    )
    skipped = {}
    bf16, no_compiler = native_bf16(device), measure.why_no_compiler(device)
    if not bf16:
        skipped[AMP] = "this device has no native bfloat16"
    if no_compiler is not None:
        skipped[COMPILE] = no_compiler
    measured = ways(sizes, bf16, no_compiler is None)

    works = {
        key: Work(sizes, device, *key)
        for key in dict.fromkeys((way.dtype, way.compiled) for way in measured)
    }
    cases = [
        # A compiled row compiles again when it meets its shapes for the second time.
        Case(
            way.row,
            getattr(works[way.dtype, way.compiled], way.method),
            way.scale,
            warm_ups=2 if way.compiled else 1,
        )
        for way in measured
    ]
    peaks = {
        dtype: measure.peak_flops(device, dtype)
        for dtype in dict.fromkeys(way.dtype for way in measured)
    }
    timings = measure.interleaved(cases, repeats, device)
    guard = check(works[torch.float32, False], timings)
    memory = {}
    for way in measured:
        measure.progress(f"memory: {way.row}")
        memory[way.row] = (
            measure.peak_memory_gb(prepare, sizes, device, way) if way.method in SAMPLING else None
        )
    measure.progress("")

    found = Found(sizes, measured, timings, memory, peaks, shares_of(timings))
    compiling = None
    if COMPILE in timings:  # two first calls
        compiling = timings[COMPILE].warm_up - 2 * timings[COMPILE].p50
    claim = not options.quick and device.type == "cpu" and torch.get_num_threads() == 2
    conditions |= details(found, device) | {
        "compile_seconds": compiling,
        "same_completions": guard,
        "skipped": skipped,
        "figures": reached(timings, found.shares[BOTH], claim=claim),
    }
    return Report(shown(found, conditions), conditions, rows_of(found, conditions))


@dataclass(frozen=True)
class Found:
    """The measurements, by row. memory: in GB; peaks: in FLOP/s; shares: of a step, per repeat."""

    sizes: Sizes
    ways: list[Way]
    timings: dict[str, Timing]
    memory: dict[str, float | None]
    peaks: dict[torch.dtype, float]
    shares: dict[str, list[float]]

    def utilisation(self, way: Way) -> float:
        """Return the share of the peak FLOP/s."""
        return self.sizes.flops / self.timings[way.row].p50 / self.peaks[way.dtype]


def shares_of(timings: dict[str, Timing]) -> dict[str, list[float]]:
    """Return what part of a step, population and update, the noise and the update are."""
    update = timings[UPDATE].seconds
    step, extra = (
        [a + b for a, b in zip(timings[row].seconds, update, strict=True)]
        for row in (POPULATION, NOISE)
    )
    return {
        NOISE: measure.paired(timings[NOISE].seconds, step),
        UPDATE: measure.paired(update, step),
        BOTH: measure.paired(extra, step),
    }


def rows_of(found: Found, conditions: dict[str, Any]) -> list[Row]:
    """Return the rows of the JSON."""
    names = {
        way.row: f"{way.row} ({way.part}, scaled)" if way.part else way.row for way in found.ways
    }
    rows = []
    for way in found.ways:
        timing, name = found.timings[way.row], names[way.row]
        others = [other for other in AGAINST.get(way.row, ()) if other in found.timings]
        for other in others:
            pairs = measure.paired(found.timings[other].seconds, timing.seconds)
            ratio = measure.quantile(pairs, 0.5)
            rows.append(Row(NAME, name, timing.p50, "s/step", names[other], ratio))
        if not others:
            rows.append(Row(NAME, name, timing.p50, "s/step"))
        if way.method in SAMPLING:
            speed = found.sizes.samples / timing.p50
            rows += [
                Row(NAME, name, speed, "samples/s"),
                Row(NAME, name, speed * found.sizes.new_tokens, "tokens/s"),
                Row(NAME, name, found.utilisation(way), "share of peak FLOP/s"),
                Row(NAME, name, found.memory[way.row], "GB"),
            ]
    for name, share in found.shares.items():
        value, against = measure.quantile(share, 0.5), "population, one forward, and update"
        rows.append(Row(NAME, name, value, "share of the step", against, value))
    rows += [Row(NAME, name, None, "s/step") for name in conditions["skipped"]]
    if conditions["compile_seconds"] is not None:
        rows.append(Row(NAME, COMPILE, conditions["compile_seconds"], "s compiling, once"))
    return rows


def details(found: Found, device: torch.device) -> dict[str, Any]:
    """Return what the conditions say of the rows."""
    resident = "resident, less that after the imports; compiler included"
    where = "allocated by torch" if device.type == "cuda" else resident
    return {
        "dtype": {way.row: name_of(way.dtype) for way in found.ways},
        "peak_tflops": {name_of(d): round(p / 1e12, 3) for d, p in found.peaks.items()},
        "timing": {
            name: {"p50": t.p50, "p90": t.p90, "repeats": len(t.seconds), **taken}
            for (name, t), taken in zip(
                found.timings.items(), measure.taken(found.timings).values(), strict=True
            )
        },
        "ratio": (
            "speed of row / speed of against, the median over repeats; for a share, the share"
            " itself"
        ),
        "memory": f"peak of each row alone in a process of its own, model included, {where}",
        "utilisation": (
            "FLOP of the model without noise per second, over those of a big matrix product in the"
            " row's dtype"
        ),
        "scaled": {way.row: way.part for way in found.ways if way.part},
    }


def check(work: Work, timings: dict[str, Timing]) -> dict[str, str]:
    """Whether the rows made the same completions. Raises RuntimeError where they did not."""
    sizes, made = work.sizes, timings[POPULATION].result
    assert made.shape == (sizes.samples, sizes.new_tokens), "every row has its full length"
    if torch.equal(made, timings[PLAIN].result):
        raise RuntimeError("not the same work: the noise changes no completion.")
    found = {}
    for name, which in {
        ONE: [divmod(index, sizes.members) for index in range(sizes.samples_measured)],
        MEMBER: [(p, m) for m in range(sizes.members_measured) for p in range(sizes.prompts)],
    }.items():
        places = [member * sizes.prompts + prompt for prompt, member in which]
        equal = work.same(timings[name].result, made[places], which)
        found[name] = f"{equal} of {len(which)}"
    return found


def reached(timings: dict[str, Timing], share: list[float], claim: bool) -> list[dict[str, Any]]:
    """The figures to reach. claim: sizes and device are the issue's; else `reached` stays None."""
    population = timings[POPULATION].seconds

    def over(row: str) -> list[float]:
        return measure.paired(timings[row].seconds, population)

    figures = []
    for what, values, target, unit in (
        ("population against plain sampler", over(PLAIN), 0.95, "%"),
        ("population against once a member", over(MEMBER), 5.0, "x"),
        ("population against one at a time", over(ONE), 20.0, "x"),
        ("noise and update, of a step", share, 0.10, "%"),
    ):
        value = measure.quantile(values, 0.5)
        good = value <= target if values is share else value >= target
        spread = [measure.quantile(values, 0.1), measure.quantile(values, 0.9)]
        figures.append(
            {
                "what": what,
                "figure": target,
                "at": "most" if values is share else "least",
                "unit": unit,
                "value": value,
                "p10_p90": spread,
            }
            | {"reached": good if claim else None}
        )
    return figures


def shown(found: Found, conditions: dict[str, Any]) -> str:
    """The table and what goes with it, 80 columns wide."""
    number, sizes = measure.number, found.sizes
    mark = {way.row: "¹²"[index] for index, way in enumerate(w for w in found.ways if w.part)}
    lines: list[tuple[str, ...]] = []
    parts: list[tuple[str, ...]] = []
    for way in found.ways:
        timing = found.timings[way.row]
        seconds = (number(timing.p50), number(timing.p90))
        if way.method not in SAMPLING:
            share = measure.quantile(found.shares[way.row], 0.5)
            parts.append((way.row, *seconds, f"{share:.1%}"))
            continue
        faster = measure.quantile(measure.paired(found.timings[ONE].seconds, timing.seconds), 0.5)
        speed = sizes.samples / timing.p50
        speeds = (number(speed), number(speed * sizes.new_tokens), f"{found.utilisation(way):.1%}")
        name = SHORT.get(way.row, way.row) + mark.get(way.row, "")
        lines.append((name, *seconds, *speeds, number(found.memory[way.row], 2), f"{faster:.1f}x"))
    lines[-1:-1] = [(name, "skipped, see below") for name in conditions["skipped"]]
    parts.append((BOTH, "", "", f"{measure.quantile(found.shares[BOTH], 0.5):.1%}"))
    about = (
        f"{conditions['device']}, {conditions['threads']} threads, load"
        f" {conditions['load_average']} before; torch {conditions['torch']}, transformers"
        f" {conditions['transformers']}, commit {conditions['commit']}. Llama"
        f" d={sizes.hidden_size}, {sizes.layers} layers, float32; {sizes.members} members x"
        f" {sizes.prompts} prompts of {sizes.prompt_tokens} tokens, {sizes.new_tokens} new tokens,"
        f" greedy; medians of {conditions['repeats']} repeats."
    )
    header = ("", "s/step", "p90", "samples/s", "tokens/s", "util.", "GB", "ratio")
    claimed = all(figure["reached"] is not None for figure in conditions["figures"])
    stated = "stated for two CPU cores" + ("" if claimed else "; not claimed here")
    return "\n".join(
        [
            textwrap.fill(about, measure.WIDTH),
            "",
            measure.table(header, lines),
            textwrap.fill(notes(found, mark, conditions), measure.WIDTH),
            "",
            measure.table(("", "s/step", "p90", "of a step"), parts),
            "",
            f"Figures to reach, {stated}:",
            measure.table(
                ("", "figure", "here", "p10 to p90", "reached"),
                [figure_line(figure) for figure in conditions["figures"]],
            ),
        ]
    )


def notes(found: Found, mark: dict[str, str], conditions: dict[str, Any]) -> str:
    """Explain the table."""
    said = [f"{mark[way.row]} {way.part} measured, scaled." for way in found.ways if way.part]
    said += [f"{w.row}: in {name_of(w.dtype)}." for w in found.ways if w.row in (AMP, COMPILE)]
    said += [f"{name}: skipped, {why.rstrip('.')}." for name, why in conditions["skipped"].items()]
    if conditions["compile_seconds"] is not None:
        said.append(f"Compiling took {conditions['compile_seconds']:.0f} s more, once.")
    peaks = (f"{peak / 1e9:,.0f} GFLOP/s ({name_of(d)})" for d, peak in found.peaks.items())
    said.append(f"util.: of {', '.join(peaks)}.")
    said.append("GB: peak of the row alone, in its own process. ratio: over one sample at a time.")
    same = conditions["same_completions"].items()
    said += [f"{SHORT.get(name, name)}: {equal} completions equal." for name, equal in same]
    return " ".join(said)


def figure_line(figure: dict[str, Any]) -> tuple[str, ...]:
    """Return one line of the table of figures."""
    scale = 100 if figure["unit"] == "%" else 1
    low, high = (f"{scale * value:.1f}" for value in figure["p10_p90"])
    sign = "<=" if figure["at"] == "most" else ">="
    return (
        figure["what"],
        f"{sign} {scale * figure['figure']:.0f} {figure['unit']}",
        f"{scale * figure['value']:.1f}",
        f"{low} to {high}",
        {True: "yes", False: "NO", None: "-"}[figure["reached"]],
    )


def name_of(dtype: torch.dtype) -> str:
    """float32, bfloat16."""
    return str(dtype).removeprefix("torch.")
