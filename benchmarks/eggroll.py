"""Compare the sampling of a step in the EGGROLL document's first state with this project's.

    python -m benchmarks eggroll
    python -m benchmarks eggroll --peers PYTHON --weights DIR

Each row does the same work: members x prompts greedy completions of one length, on a Llama with
random weights, under the same noise. Slow rows do a stated part of it and are scaled; their
completions are compared with the population's. Then the parts of a step other than sampling.

With --peers, also a step of 32 members by this project, eggroll-es 0.2.0 and torcheggroll 0.2.0,
which are in the environment of PYTHON.
"""

import argparse
import copy
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks import measure
from benchmarks.measure import Case, Report, name_of, paired
from benchmarks.models import Counts, build, count_pairs, differs, generate
from benchmarks.peer import Peer
from common.config import ConfigError
from common.device import native_bf16
from common.engine import Population, Requests
from common.model import narrow
from common.sampling import Sampler
from eggroll.config import EggrollConfig
from eggroll.fitness import fitness
from eggroll.noise import Noise
from eggroll.weights import Weights
from launch import compose

ONE = "one sample at a time"
MEMBER = "weights perturbed once a member, batched"
POPULATION = "population in one forward"
AMP = "+ amp"
COMPILE = "+ compile"
PLAIN = "plain sampler, no noise"
NOISE = "noise generation"
UPDATE = "update"
BOTH = "noise generation and update"

# logits closer than this may change places by rounding; their standard deviation is about 0.3
TIE = 1e-3


@dataclass(frozen=True)
class Sizes:
    """The work of a step, and the part of it that slow rows do. model: a name in
    benchmarks.models.
    """

    model: str = "small"
    members: int = 64
    prompts: int = 2
    prompt_tokens: int = 32
    new_tokens: int = 64
    samples_measured: int = 4  # of the row that goes one sample at a time
    members_measured: int = 8  # of the row that goes member by member

    @property
    def samples(self) -> int:
        """The completions of a step."""
        return self.members * self.prompts

    def flops(self, model: Any) -> float:
        """Return the floating-point operations of the unperturbed model for all completions."""
        positions = self.prompt_tokens + self.new_tokens - 1
        counts = Counts(model, torch.float32)
        return self.samples * counts.flops(positions, count_pairs(positions), self.new_tokens)


PEERS = Sizes("", members=32, prompts=4, prompt_tokens=32, new_tokens=16)
# How often a peer holds a member's weights: the perturbed ones, their noise.
COPIES = {"eggroll-es": 1, "torcheggroll": 2}
LARGE, FEW = 1 << 28, 4  # bytes of a model, of which peers do so many members, one by one
QUICK = Sizes("quick", 8, prompt_tokens=8, new_tokens=8, samples_measured=2, members_measured=2)


@dataclass(frozen=True)
class Way:
    """A row of the table. part: the part of the work that is done, out of how much, and its
    unit.
    """

    row: str
    method: str
    dtype: torch.dtype = torch.float32
    compiled: bool = False
    part: tuple[int, int, str] = (1, 1, "")

    @property
    def name(self) -> str:
        """The name of the row, with the part that was measured."""
        done, whole, unit = self.part
        return f"{self.row} ({done} of {whole} {unit}, scaled)" if unit else self.row


@cache
def settings(sizes: Sizes) -> EggrollConfig:
    """Return the defaults of conf/algo/eggroll.yaml with these sizes."""
    changes = {
        "members": sizes.members,
        "prompts_per_step": sizes.prompts,
        "samples_per_prompt": 1,
        "sampling.max_new_tokens": sizes.new_tokens,
    }
    return compose(["algo=eggroll", *(f"algo.{k}={v}" for k, v in changes.items())]).algo


class Work:
    """A step's model, noise and prompts, and the ways to sample; completions are [n, new
    tokens].
    """

    def __init__(
        self,
        sizes: Sizes,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        compiled: bool = False,
        model: Any = None,
        algo: EggrollConfig | None = None,
    ) -> None:
        self.sizes, self.settings, self.device = sizes, algo or settings(sizes), device
        model = model or build(sizes.model)
        self.model: Any = model.to(device=device, dtype=dtype)
        self.parameters = dict(self.model.named_parameters())
        rank = self.settings.rank
        self.noise = Noise(self.model, self.settings.noise, rank=rank, mirrored=True, seed=0)
        mode, rows = "default" if compiled else None, sizes.samples
        self.sampler = Sampler(
            self.model, pad_id=0, stop_ids=(), rows=rows, compile_mode=mode, graphs=True
        )
        draw = torch.Generator().manual_seed(1)
        self.prompts = torch.randint(0, 256, (sizes.prompts, sizes.prompt_tokens), generator=draw)
        self.rewards = torch.rand(sizes.members, sizes.prompts, generator=draw)

    # --- as the document's code does it

    @contextmanager
    def materialised(self, member: int) -> Iterator[None]:
        """Replace the model's weights by one member's for the block."""
        kept = {a.name: self.parameters[a.name].detach().clone() for a in self.noise.addresses}
        direction = torch.tensor([member // 2], device=self.device)
        scale = (-1) ** member * float(self.settings.sigma) / math.sqrt(self.settings.rank)
        try:
            drawn = self.noise.draw(0, direction, self.noise.addresses)
            for address, noise in zip(self.noise.addresses, drawn, strict=True):
                out_t, in_t = address.split(noise)  # [1, r, out], [1, r, in]
                self.parameters[address.name].addmm_(out_t[0].T, in_t[0], alpha=scale)
            yield
        finally:
            for name, weight in kept.items():
                self.parameters[name].copy_(weight)

    def one_at_a_time(self) -> Tensor:
        """Sample prompt by prompt, and for each prompt member by member."""
        pairs = [divmod(i, self.sizes.members) for i in range(self.sizes.samples_measured)]
        return self._generate([(self.prompts[prompt][None], member) for prompt, member in pairs])

    def member_by_member(self) -> Tensor:
        """Sample each member's prompts in one batch."""
        members = range(self.sizes.members_measured)
        return self._generate([(self.prompts, member) for member in members])

    @torch.inference_mode()
    def _generate(self, batches: list[tuple[Tensor, int]]) -> Tensor:
        made = []
        for prompts, member in batches:
            with self.materialised(member):
                made.append(generate(self.model, prompts, max_new_tokens=self.sizes.new_tokens))
        return torch.cat(made)

    # --- as this project does it

    def plain(self, population: Population | None = None) -> Tensor:
        """Sample without noise, every prompt once per member."""
        population = population or Population(
            members=self.sizes.members, narrow=lambda _: nullcontext()
        )
        requests = Requests(prompts=self.prompts.tolist(), population=population)
        return self.sampler.generate(requests, self.settings.sampling).tokens

    def population(self) -> Tensor:
        """Sample all members in one forward, including the time to draw their noise."""
        members = range(self.sizes.members)
        with self.noise.members(0, members, float(self.settings.sigma)) as population:
            return self.plain(population)

    def draw_noise(self) -> None:
        """Draw the noise as `population` does before it samples."""
        with self.noise.members(0, range(self.sizes.members), float(self.settings.sigma)):
            pass

    @cached_property
    def weights(self) -> Weights:
        """A copy of the model that the updates move, so that the model itself stays unchanged."""
        model, folder = copy.deepcopy(self.model).float(), Path(tempfile.gettempdir())
        wide = narrow(model, self.model.dtype, model.device)  # masters are float32
        return Weights(model, self.noise, self.settings, wide, offload=False, folder=folder)

    def update(self) -> None:
        """Compute new weights from the rewards, as the training loop does."""
        shaped = fitness(self.rewards, self.settings.fitness)
        for name, gradient in self.noise.gradients(0, shaped):
            self.weights.descend(name, gradient, float(self.settings.lr), compare=False)
            del gradient
        self.weights.measure()

    def same(self, rows: Tensor, others: Tensor, which: list[tuple[int, int]]) -> int:
        """Count the completions that are equal. which: the prompt and member of each.

        Raises: RuntimeError if two differ by more than a tie that rounding decides.
        """
        equal = 0
        for row, other, (prompt, member) in zip(rows, others, which, strict=True):
            with self.materialised(member):
                found = differs(self.model, self.prompts[prompt], row, other, TIE)
            if found is not None:
                raise RuntimeError(f"not the same work: member {member}, prompt {prompt} {found}.")
            equal += torch.equal(row, other)
        return equal


def ways(sizes: Sizes, half: torch.dtype) -> list[Way]:
    """Return the rows of the table, in its order."""
    one = (sizes.samples_measured, sizes.samples, "samples")
    member = (sizes.members_measured, sizes.members, "members")
    return [
        Way(ONE, "one_at_a_time", part=one),
        Way(MEMBER, "member_by_member", part=member),
        Way(POPULATION, "population"),
        Way(AMP, "population", half),
        Way(COMPILE, "population", half, compiled=True),
        Way(PLAIN, "plain"),
        Way(NOISE, "draw_noise"),
        Way(UPDATE, "update"),
    ]


def prepare(sizes: Sizes, algo: EggrollConfig, device: torch.device, way: Way) -> Callable[[], Any]:
    """Return one row alone, for the process in which its memory is measured."""
    few = replace(sizes, samples_measured=1, members_measured=1)  # the peak is the same
    return getattr(Work(few, device, way.dtype, way.compiled, algo=algo), way.method)


def compare_peers(options: argparse.Namespace) -> Report:
    """Measure a step of this project and of other packages, on the model of a folder, in
    float32.
    """
    if options.weights is None or not (options.weights / "config.json").is_file():
        raise ConfigError(
            f"--peers needs a model: --weights {options.weights} is no folder of one. Give a folder"
            " with config.json and model.safetensors."
        )
    sizes = replace(PEERS, members=4, new_tokens=4) if options.quick else PEERS
    report = Report("eggroll", options, 3, sizes=asdict(sizes), model=options.weights.name)
    model = AutoModelForCausalLM.from_pretrained(options.weights, dtype=torch.float32)
    work = Work(sizes, report.device, model=model.requires_grad_(False).eval())
    asked = {
        "members": sizes.members,
        "prompts": work.prompts.tolist(),
        "new_tokens": sizes.new_tokens,
        "threads": torch.get_num_threads(),
    }

    def step() -> int:
        tokens = work.population().numel()
        work.update()
        return tokens

    bytes_each = 4 * sum(p.numel() for p in model.parameters())
    room = 0.8 * psutil.virtual_memory().available
    with ExitStack() as open_peers:
        cases = [Case("this project", step)]
        for package, copies in COPIES.items():
            members = sizes.members if bytes_each < LARGE else FEW
            if copies * members * bytes_each > room:
                members = max(2, int(room / copies / bytes_each) // 2 * 2)
            if members < sizes.members:
                name = f"{package} ({members} of {sizes.members} members, scaled)"
            else:
                name = package
            folder = options.weights.resolve()
            peer = open_peers.enter_context(Peer("eggroll_peer.py", options.peers, package, folder))
            part = asked | {"members": members}
            cases.append(Case(name, partial(ask, peer, part), sizes.members / members))
        timings = report.time(cases)
    for name, timing in timings.items():
        share = 1.0 if "(" not in name else int(name.split("(")[1].split()[0]) / sizes.members
        if timing.first != round(share * sizes.samples * sizes.new_tokens):
            raise RuntimeError(f"not the same work: {name} sampled {timing.first} tokens.")
    series = {name: timing.seconds for name, timing in timings.items()}
    report.compare(series, "s/step", "this project", less=False)
    return report


def ask(peer: Peer, work: dict[str, Any]) -> int:
    """Return the number of tokens that a peer sampled in a step."""
    return int(peer.ask(work))


def run(options: argparse.Namespace) -> Report:
    """Measure every row in turn, then its memory, and compare."""
    if options.peers is not None:
        return compare_peers(options)
    torch.set_float32_matmul_precision("highest")
    with tempfile.TemporaryDirectory(prefix="clutch-bench-") as folder:
        # an earlier run's cache would hide the seconds of compiling
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        sizes = QUICK if options.quick else Sizes()
        report = Report("eggroll", options, 7, sizes=asdict(sizes))
        device = report.device
        half = torch.bfloat16 if native_bf16(device) else torch.float32
        reasons = {AMP: "no native bfloat16" if half == torch.float32 else None}
        reasons[COMPILE] = measure.why_no_compiler(device)
        measured = [way for way in ways(sizes, half) if reasons.get(way.row) is None]
        kinds = dict.fromkeys((way.dtype, way.compiled) for way in measured)
        works = {key: Work(sizes, device, *key) for key in kinds}
        peaks = {dtype: measure.peak_flops(device, dtype) for dtype, _ in kinds}
        cases = []
        for way in measured:  # a compiled row compiles again when it meets its shapes once more
            act = getattr(works[way.dtype, way.compiled], way.method)
            scale = way.part[1] / way.part[0]
            cases.append(Case(way.name, act, scale, warm_ups=2 if way.compiled else 1))
        timings = report.time(cases)
        by_row = {way.row: timings[way.name] for way in measured}
        report.conditions["same_completions"] = check(
            works[torch.float32, False], {row: timing.first for row, timing in by_row.items()}
        )
        add_rows(report, sizes, measured, peaks, works[torch.float32, False].model)
        for row, reason in reasons.items():
            if reason is not None:
                report.skip(row, "s/step", reason)
        if COMPILE in by_row:
            once = by_row[COMPILE].warm_up - 2 * by_row[COMPILE].p50
            report.conditions["compile_seconds"] = once
            report.notes.append(f"Compiling took {once:.0f} s more, once.")
        add_figures(report, {row: timing.seconds for row, timing in by_row.items()})
        return report


def add_rows(
    report: Report, sizes: Sizes, measured: list[Way], peaks: dict[torch.dtype, float], model: Any
) -> None:
    """Add the seconds, speeds, utilisation and memory of each row."""
    taken = report.conditions["timing"]
    series = {way.name: taken[way.name]["seconds"] for way in measured}
    others = {name: series.pop(name) for name in (NOISE, UPDATE)}
    report.compare(series, "s/step", measured[0].name, less=True)
    for name, seconds in others.items():
        report.add(name, statistics.median(seconds), "s/step")
    flops, algo = sizes.flops(model), settings(sizes)
    for way in measured[:-2]:  # without noise and update
        speed = 1 / statistics.median(series[way.name])
        measure.progress(f"memory: {way.row}")
        memory = measure.peak_memory_gb(prepare, sizes, algo, report.device, way)
        report.add(way.name, sizes.samples * speed, "samples/s")
        report.add(way.name, sizes.samples * sizes.new_tokens * speed, "tokens/s")
        report.add(way.name, flops * speed / peaks[way.dtype], "share of peak FLOP/s")
        report.add(way.name, memory, "GB")
    measure.progress("")
    report.conditions |= {
        "dtype": {way.row: name_of(way.dtype) for way in measured},
        "peak_tflops": {name_of(d): round(p / 1e12, 3) for d, p in peaks.items()},
    }
    report.notes += [
        "GB: peak of the row alone, in its own process. ratio: over one sample at a time.",
        "Utilisation counts the model without noise, against a big product in the row's dtype.",
        f"Equal completions: {report.conditions['same_completions']}.",
    ]


def check(work: Work, made: dict[str, Any]) -> dict[str, str]:
    """Return the number of completions that the rows share. Raises: RuntimeError if the work
    differs.
    """
    sizes, population = work.sizes, made[POPULATION]
    assert population.shape == (sizes.samples, sizes.new_tokens), "every row has its full length"
    if torch.equal(population, made[PLAIN]):
        raise RuntimeError("not the same work: the noise changes no completion.")
    found = {}
    for name, which in {
        ONE: [divmod(index, sizes.members) for index in range(sizes.samples_measured)],
        MEMBER: [(p, m) for m in range(sizes.members_measured) for p in range(sizes.prompts)],
    }.items():
        places = [member * sizes.prompts + prompt for prompt, member in which]
        found[name] = f"{work.same(made[name], population[places], which)} of {len(which)}"
    return found


def add_figures(report: Report, seconds: dict[str, list[float]]) -> None:
    """Add the targets for two CPU cores with the measured values, and the shares of a
    step's parts.
    """
    population, update = seconds[POPULATION], seconds[UPDATE]
    step = [a + b for a, b in zip(population, update, strict=True)]
    both = [a + b for a, b in zip(seconds[NOISE], update, strict=True)]
    for name, part in {NOISE: seconds[NOISE], UPDATE: update, BOTH: both}.items():
        report.add(name, paired(part, step), "share of the step")
    for row, wanted in ((PLAIN, 0.95), (MEMBER, 5), (ONE, 20)):
        found = paired(seconds[row], population)
        report.figures.append((f"population against {row}", f">= {wanted}x", f"{found:.2f}x"))
    report.figures.append(("noise and update, of a step", "<= 10%", f"{paired(both, step):.1%}"))
