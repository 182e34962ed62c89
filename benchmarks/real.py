"""Compare with `generate` and vLLM on a model that people use: SmolLM2-135M, in bfloat16.

    python -m benchmarks real --weights DIR --vllm PYTHON --json real.json
    python -m benchmarks real --weights DIR --part eggroll --json eggroll.json
    python -m benchmarks real --weights DIR --part grpo --json grpo.json
    python -m benchmarks real --weights DIR --part rft --json rft.json

Without --weights the model has the shape of SmolLM2-135M and random numbers, and the other parts
are errors. --vllm names the Python of an environment with vLLM, which runs as a process of its own;
without it those rows are left out. No token stops a row, so that all make the same number of
tokens, at temperature 1.

The population is 32 members with rank-1 noise on every linear layer; vLLM gets the same number of
rank-1 adapters, and two samples per adapter. An EGGROLL step is noise, sampling and update, once:
of prompts that differ from the first token on, and of prompts with the same worked examples. GRPO's
prompts begin alike for two thirds of their tokens.
"""

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from benchmarks import finetuning, grpo, measure, rft
from benchmarks.eggroll import Sizes, Work, settings
from benchmarks.measure import Case, Report, paired
from benchmarks.models import build, generate
from benchmarks.peer import Peer
from common.config import SamplingConfig, shipped
from common.device import Device, total_gb
from common.distributed import Context
from common.engine import Population, Requests, Setup, open_engine
from common.sampling import Sampler
from eggroll.config import EggrollConfig

OURS, GENERATE, VLLM = "this project", "generate", "vLLM"
PLAIN, POPULATION = "this project without noise", "this project, a population"
ADAPTERS = "vLLM, adapters"
STEP = "EGGROLL step, 32 members x 8 prompts of 139 tokens"
ALIKE = "EGGROLL step, the same with 121 tokens that all prompts begin with"
OPENING = 121  # of task=units: a system text and two worked examples
DIFFERENT = "this project, prompts that begin differently"
HEAT: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
GRPO = {"prompts": 16, "samples": 8, "new": 48}
SHAPES = {"8 x 8": (8, 8), "32 x 8": (32, 8)}  # prompts x samples
MEMBERS = Sizes("smollm2", members=32, prompts=2, prompt_tokens=40, new_tokens=64)
EVOLVED = Sizes("smollm2", members=32, prompts=8, prompt_tokens=139, new_tokens=32)


def load(weights: Path | None) -> Any:
    """Return the model of a folder, or random weights of its shape, in bfloat16."""
    model: Any = build("smollm2")
    if weights is not None:
        model = AutoModelForCausalLM.from_pretrained(weights)
    return model.to(torch.bfloat16).requires_grad_(False).eval()


def write_adapters(model: Any, count: int, folder: Path) -> Path:
    """Write rank-1 adapters of every linear layer except the head. Returns the folder."""
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    one = get_peft_model(model, LoraConfig(r=1, target_modules=layers, init_lora_weights=False))
    for index in range(count):
        one.save_pretrained(str(folder / f"{index:03d}"), save_embedding_layers=False)
    one.unload()
    return folder


def draw_prompts(count: int, tokens: int) -> list[list[int]]:
    """Return random prompts, the same at every call."""
    draw = torch.Generator().manual_seed(1)
    return torch.randint(100, 40000, (count, tokens), generator=draw).tolist()


def sampling_cases(
    model: Any, peer: Peer | None, prompts: int, samples: int, new_tokens: int, plain: bool
) -> list[Case]:
    """Return the ways to sample; each returns the number of tokens. plain: whether `generate` is
    one.
    """
    asked = draw_prompts(prompts, MEMBERS.prompt_tokens)
    sampling = SamplingConfig.uncut(new_tokens, 1.0)

    def ours() -> int:
        sampler = Sampler(model, pad_id=0, stop_ids=(), rows=prompts * samples, graphs=True)
        return sampler.generate(Requests(prompts=asked, samples=samples), sampling).generated

    def theirs() -> int:
        heat: Any = {"do_sample": True, "num_return_sequences": samples, **HEAT}
        ids = torch.tensor(asked)
        made = generate(model, ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, **heat)
        return made.numel()

    name = f"{prompts} x {samples}: "
    cases = [Case(name + GENERATE, theirs)] if plain else []
    if peer is not None:
        cases.append(Case(name + VLLM, lambda: peer.generate(asked, samples, new_tokens)))
    return [*cases, Case(name + OURS, ours)]


def run(options: argparse.Namespace) -> Report:
    """Time every row in turn."""
    report = Report("real", options, 5, dtype="bfloat16")
    if options.part != "sampling":
        if options.weights is None:
            sys.exit(f"error: --part {options.part} needs --weights DIR.")
        PARTS[options.part](report, options)
        return report
    new = 4 if options.quick else MEMBERS.new_tokens
    model = load(options.weights).to(report.device)
    report.conditions["sizes"] = {"members": asdict(MEMBERS), "evolved": asdict(EVOLVED)}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        peer = adapted = None
        if options.vllm is not None:
            measure.progress("loading vLLM, twice")
            model.save_pretrained(folder / "model")
            adapters = write_adapters(model, MEMBERS.members, folder / "adapters")
            peer = stack.enter_context(Peer("vllm_peer.py", options.vllm, folder / "model"))
            adapted = stack.enter_context(
                Peer("vllm_peer.py", options.vllm, folder / "model", adapters)
            )
        else:
            report.notes.append("vLLM was left out: --vllm names no Python that has it.")
        for index, (prompts, samples) in enumerate(SHAPES.values()):
            timed = report.time(sampling_cases(model, peer, prompts, samples, new, index == 0))
            speeds = {name: timing.speeds(float) for name, timing in timed.items()}
            report.compare(speeds, "tokens/s", next(iter(speeds)), less=False)
            add_figures(report, speeds, f"{prompts} x {samples}: ")
        compare_population(report, model, adapted, new)
    if options.vllm is not None:
        compare_engine(report, model, options.vllm, new)
    return report


def time_steps(report: Report, options: argparse.Namespace) -> None:
    """Time a step of EGGROLL."""
    model = load(options.weights).to(report.device)
    few = {"members": 2, "prompts": 2, "new_tokens": 4} if options.quick else {}
    sizes = replace(EVOLVED, **few)
    report.conditions["sizes"] = {"evolved": asdict(sizes)}

    def prepare(alike: bool) -> Callable[[], None]:
        work = Work(sizes, report.device, torch.bfloat16, model=model, algo=warm(sizes))
        if alike:
            work.prompts[:, :OPENING] = work.prompts[0, :OPENING]

        def step() -> None:
            work.population()
            work.update()

        return step

    cases = [Case(STEP, prepare(alike=False)), Case(ALIKE, prepare(alike=True))]
    for name, timing in report.time(cases).items():
        report.add(name, timing.p50, "s")
        report.figures.append((name, "<= 30 s on two cores", f"{timing.p50:.1f} s"))


def warm(sizes: Sizes) -> EggrollConfig:
    """Return EGGROLL's defaults in these sizes, with draws at temperature 1."""
    algo = settings(sizes)
    return replace(algo, sampling=replace(algo.sampling, **HEAT))


def compare_population(report: Report, model: Any, adapted: Peer | None, new: int) -> None:
    """Time a population, the same rows without noise, and vLLM with an adapter per member."""
    sizes = Sizes("smollm2", 32, prompts=2, prompt_tokens=MEMBERS.prompt_tokens, new_tokens=new)
    work = Work(sizes, report.device, torch.bfloat16, model=model, algo=warm(sizes))
    cases = [Case(PLAIN, lambda: work.plain().numel())]
    if adapted is not None:
        asked = draw_prompts(sizes.members, sizes.prompt_tokens)
        cases.append(Case(ADAPTERS, lambda: adapted.generate(asked, sizes.prompts, new)))
    cases.append(Case(POPULATION, lambda: work.population().numel()))
    timed = report.time(cases)
    speeds = {name: timing.speeds(float) for name, timing in timed.items()}
    report.compare(speeds, "tokens/s", PLAIN, less=False)
    share = paired(speeds[POPULATION], speeds[PLAIN])
    report.figures.append(("population against no noise", ">= 95%", f"{share:.0%}"))
    if adapted is not None:
        ratio = paired(speeds[POPULATION], speeds[ADAPTERS])
        report.figures.append(("population against vLLM's adapters", ">= 1.5x", f"{ratio:.2f}x"))


def compare_engine(report: Report, model: Any, python: Path, new: int) -> None:
    """Time engine=vllm as in a run, and the transfer of the weights."""
    sizes = Sizes("smollm2", 32, prompts=2, prompt_tokens=MEMBERS.prompt_tokens, new_tokens=new)
    work = Work(sizes, report.device, torch.bfloat16, model=model, algo=warm(sizes))
    sampling = SamplingConfig.uncut(new, 1.0)
    prompts, samples = SHAPES["8 x 8"]
    plain = Requests(prompts=draw_prompts(prompts, MEMBERS.prompt_tokens), samples=samples)
    measure.progress("loading engine=vllm, twice")
    with TemporaryDirectory() as folder, ExitStack() as stack:
        here = Device(report.device, "here", total_gb(report.device), matches=True)
        setup = Setup(
            model=model, pad_id=0, stop_ids=(), context=Context(0, 1, here, Path(folder)), rows=256
        )
        node = dict(shipped("engine/vllm.yaml")) | {"python": str(python)}
        engine: Any = open_engine(node, setup)
        adapted: Any = open_engine(node, replace(setup, members=sizes.members))
        for one in (engine, adapted):
            stack.callback(one.close)
            one.refresh()
        members = Requests(
            prompts=draw_prompts(sizes.prompts, sizes.prompt_tokens),
            population=Population(
                members=sizes.members,
                factors=lambda: work.noise.factors(0, range(sizes.members), 0.01),
            ),
        )
        weight = next(model.parameters())

        def send() -> None:
            weight.data.neg_()
            engine.refresh()

        cases = [
            Case("8 x 8: engine=vllm", lambda: engine.generate(plain, sampling).generated),
            Case("population: engine=vllm", lambda: adapted.generate(members, sampling).generated),
        ]
        for name, timing in report.time(cases).items():
            report.add(name, median(timing.speeds(float)), "tokens/s")
        sent = [measure.seconds(send, report.device)[0] for _ in range(2 * report.repeats)]
        report.add("engine=vllm: all weights sent", median(sent), "s")


def compare_grpo(report: Report, options: argparse.Namespace) -> None:
    """Time GRPO steps of TRL and of this project, each in a process of its own."""
    disable_progress_bar()
    with TemporaryDirectory() as folder:
        tokenizer = AutoTokenizer.from_pretrained(options.weights)
        model = AutoModelForCausalLM.from_pretrained(options.weights)
        model.config.eos_token_id = model.generation_config.eos_token_id = None
        tokenizer.eos_token = None  # no token stops a row
        model.save_pretrained(f"{folder}/model")
        tokenizer.save_pretrained(f"{folder}/model")
        sizes = {"prompts": 2, "samples": 2, "new": 4} if options.quick else GRPO
        work = {"model": f"{folder}/model", "folder": folder, "device": report.device.type} | sizes
        work["parts"] = 1 if options.quick else 8  # TRL's 128 rows at once want more than 24 GB
        work |= {"times": 3, "steps": report.repeats, "beta": 0.0, "half": True, "curve": False}
        work["lr"] = 1e-6  # groups stay alive, and so every step is whole
        report.conditions["sizes"] = {"grpo": sizes}
        found: dict[str, dict[str, Any]] = {}
        # TRL computes whole prompts, whatever they begin with.
        for name, row, alike in (
            (grpo.PEER, grpo.PEER, True),
            (OURS, grpo.OURS, True),
            (DIFFERENT, grpo.OURS, False),
        ):
            measure.progress(name)
            given = work | {"row": row, "switches": ["opt=[amp]"], "alike": alike}
            try:
                found[name] = measure.in_new_process(grpo.__name__, grpo.measure_row, given)
            except Exception as error:  # whatever it is, the other row stands
                report.skip(f"GRPO step: {name}", "s/step", measure.describe(error))
    for row, one in found.items():
        report.add(f"GRPO step: {row}", median(one["seconds"]), "s/step")
        report.add(f"GRPO step: {row}", one["memory"], "GB")
    for row in (OURS, DIFFERENT):
        if row in found and grpo.PEER in found:
            ratio = median(found[grpo.PEER]["seconds"]) / median(found[row]["seconds"])
            report.figures.append((f"GRPO step against TRL: {row}", ">= 8x", f"{ratio:.2f}x"))
    report.conditions["seconds"] = {row: one["seconds"] for row, one in found.items()}


def compare_rft(report: Report, options: argparse.Namespace) -> None:
    """Time RFT's sampling, scored and written, and `generate`; then its fine-tuning."""
    prompts, samples, new = (2, 2, 4) if options.quick else (8, 8, MEMBERS.new_tokens)
    work = rft.Work(report.device, prompts, samples, new, options.weights)
    work.model = load(options.weights).to(report.device)
    cases = [
        Case(f"RFT sampling: {GENERATE}", lambda: work.generated(prompts, clear=False)),
        Case(f"RFT sampling: {OURS}", work.ours(torch.bfloat16, None)),
    ]
    timed = report.time(cases)
    speeds = {name: one.speeds(lambda made: made["tokens"]) for name, one in timed.items()}
    report.compare(speeds, "tokens/s", cases[0].name, less=False)
    ratio = paired(speeds[cases[1].name], speeds[cases[0].name])
    report.figures.append(("RFT sampling against generate", ">= 3.5x", f"{ratio:.2f}x"))
    with TemporaryDirectory() as folder:
        finetuning.compare(report, str(options.weights), folder)


def add_figures(report: Report, speeds: dict[str, list[float]], shape: str) -> None:
    """Add the targets of the sampler and the measured values."""
    wanted = {VLLM: ">= 1.1x", GENERATE: ">= 3.5x"}
    for peer, least in wanted.items():
        if shape + peer in speeds:
            ratio = paired(speeds[shape + OURS], speeds[shape + peer])
            report.figures.append((f"{shape}against {peer}", least, f"{ratio:.2f}x"))


PARTS = {"eggroll": time_steps, "grpo": compare_grpo, "rft": compare_rft}
