"""Estimate, before a cluster is booked, the four algorithms on 1 to 1024 devices of each preset.

    python -m ddp_bench.capacity --model qwen2.5_7b --hardware a100_80g h100 --rows 2048
    python -m ddp_bench.capacity --model outputs/mine/model --scaling weak --out capacity

Tells what ranks send each other per step, how long a step takes and where it stops scaling, the
memory of a device, and the largest known model that fits. Nothing is run: sizes are those of the
model's config, built without storage, and computing costs what ddp_bench/simulate.py says of a
device that is not there. A step of all four has the same `rows`. What a rank does:

    eggroll   samples its members' rows; gets the rewards of all; makes the update of all members
    grpo      samples its rows, trains on them; all-reduce of the gradients, once
    rft       samples its rows, trains on the accepted ones; all-reduce per optimizer step
    classify  trains on its rows; all-reduce of the gradients, once
"""

import argparse
import itertools
import json
import math
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config

from common.config import (
    ConfigError,
    Count,
    HardwareConfig,
    Positive,
    SamplingConfig,
    Share,
    build,
    check,
    choice,
    shipped,
)
from common.engine import Load
from common.memory import (
    FITTED,
    BatchShape,
    StateMemory,
    activation_bytes,
    cache_bytes,
)
from common.model import logits_bytes
from common.report import plots
from common.sampling import Sampler
from common.system import ending_tool, first_line, write_text
from ddp_bench.link import Link, find_link
from ddp_bench.report.tables import align, write_rows
from ddp_bench.simulate import ARITHMETIC, LAUNCH, MEMORY, Absent, Simulator

ALGORITHMS = ("eggroll", "grpo", "rft", "classify")
DEVICES = tuple(2**i for i in range(11))
SHOWN = (1, 2, 8, 64, 512, 1024)  # of them, in the table
PRESETS = ("a100_40g", "a100_80g", "h100", "h200", "rtx4090", "v100")
WORTH = 1.2  # twice the devices must be this much faster

# Sizes that the models' own configs publish: hidden, feed-forward, layers, heads, heads of keys and
# values, vocabulary, and whether the head is the embedding.
SIZES: dict[str, tuple[type[Any], tuple[int, int, int, int, int, int, bool]]] = {
    "smollm2_135m": (LlamaConfig, (576, 1536, 30, 9, 3, 49152, True)),
    "qwen2.5_0.5b": (Qwen2Config, (896, 4864, 24, 14, 2, 151936, True)),
    "qwen2.5_1.5b": (Qwen2Config, (1536, 8960, 28, 12, 2, 151936, True)),
    "qwen2.5_7b": (Qwen2Config, (3584, 18944, 28, 28, 4, 152064, False)),
    "llama3_8b": (LlamaConfig, (4096, 14336, 32, 32, 8, 128256, False)),
    "qwen2.5_14b": (Qwen2Config, (5120, 13824, 48, 40, 8, 152064, False)),
    "qwen2.5_32b": (Qwen2Config, (5120, 27648, 64, 40, 8, 152064, False)),
    "llama3_70b": (LlamaConfig, (8192, 28672, 80, 64, 8, 128256, False)),
}
NAMES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "tie_word_embeddings"),
)
MODELS: dict[str, Any] = {"gpt2": GPT2Config()} | {
    name: kind.from_dict({"max_position_embeddings": 32768} | dict(zip(NAMES, sizes, strict=True)))
    for name, (kind, sizes) in SIZES.items()
}

ASSUMPTIONS = (
    f"From facts alone, nothing is measured: products reach {ARITHMETIC:.0%} of the peak, memory"
    f" {MEMORY:.0%} of its bandwidth, an operation costs {{work.launch_us:g}} us to launch.\n"
    "{work.prompt_tokens} + {work.new_tokens} tokens. Between nodes of {work.node}:"
    " {work.network_gbs:g} GB/s, {work.network_us:g} us a hop. Weights are replicated in the times;"
    " sent: by a rank, at 2 devices.\n"
    "GB, MB and kB are of 2**30, 2**20 and 2**10 bytes, and a GB/s is 10**9 bytes a second."
)


# What ranks of EGGROLL exchange of a row: its reward, and six marks for the log, in float64.
ROW_BYTES = 7 * 8


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of a step, the same for all algorithms, and the links between devices."""

    rows: int = _option(1024, "completions a step (of each device with --scaling weak)")
    scaling: str = _option("strong", "strong or weak")
    prompt_tokens: int = 256
    new_tokens: int = 512
    samples: int = _option(8, "completions of a prompt (grpo, rft)")
    member_prompts: int = _option(8, "rows of a member (eggroll)")
    accepted: float = _option(0.25, "share of completions that rft learns from")
    optimizer_rows: int = _option(64, "completions of an optimizer step (rft)")
    micro_rows: int = _option(16, "completions of a training forward at most")
    shards: int = _option(8, "devices that opt=fsdp shares weights out over")
    node: int = _option(8, "devices of a node; beyond it the network carries")
    network_gbs: float = _option(25.0, "GB/s of an all-reduce between nodes")
    network_us: float = _option(20.0, "microseconds of each of its steps")
    launch_us: float = _option(
        1e6 * LAUNCH,
        "microseconds of an operation; about 1 where CUDA graphs are replayed",
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            key, value = f"--{item.name.replace('_', '-')}", getattr(self, item.name)
            if isinstance(value, int):
                check(Count, value, key)
            elif isinstance(value, float):
                check(Positive, value, key)
        check(Share, self.accepted, "--accepted")
        choice("--scaling", self.scaling, ("strong", "weak"))


def _build(name: str) -> Any:
    """Return a model of `MODELS`, or the model of a folder. Raises: ConfigError if the name is
    neither, or if the folder's config.json describes no language model.
    """
    local = (Path(name) / "config.json").exists()
    if not local:
        choice("--model", name, (*MODELS, "a folder with config.json"))
    try:
        known = not local and name in MODELS
        config = MODELS[name] if known else AutoConfig.from_pretrained(name)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except Exception as error:  # whatever the file says
        why = first_line(error)
        raise ConfigError(f"--model={name} is no language model's folder: {why}.") from None


class Model:
    """A model's sizes; its weights have no storage."""

    def __init__(self, name: str) -> None:
        with torch.device("meta"):
            self.model = _build(name)
        self.name = name
        self.config = config = self.model.config
        modules, parameters = list(self.model.modules()), list(self.model.parameters())
        embeddings = {id(m.weight) for m in modules if isinstance(m, nn.Embedding)}
        matrices = [p for p in parameters if p.ndim == 2 and id(p) not in embeddings]
        self.parameters = sum(p.numel() for p in parameters)
        self.matrices = sum(p.numel() for p in matrices)
        self.sides = sum(sum(p.shape) for p in matrices)  # numbers of a rank-1 noise
        blocks = next(m for m in modules if isinstance(m, nn.ModuleList))
        self.block = max(sum(p.numel() for p in block.parameters()) for block in blocks)
        head = self.model.get_output_embeddings().weight.numel()
        # What each token is multiplied with: of a mixture's experts those that it is sent to.
        chosen = getattr(config, "num_experts_per_tok", None) or 1
        experts = sum(p.numel() * chosen // len(p) for p in parameters if p.ndim == 3)
        self.used = self.matrices + experts + (head if config.tie_word_embeddings else 0)

    @cached_property
    def launches(self) -> float:
        """The kernel launches of one decoding step."""
        # The mask is given, or its making would look at values.
        mask = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16, device="meta")
        with Simulator(Absent(1.0, 1.0, launch=1.0)) as simulator, torch.no_grad():
            token = torch.zeros(1, 1, dtype=torch.long, device="meta")
            self.model(token, attention_mask=mask, use_cache=False)
        return simulator.host


class Device:
    """The devices of the preset conf/hardware/NAME.yaml, with the links of `work`. Raises:
    ConfigError for an unknown name.
    """

    def __init__(self, name: str, work: Work) -> None:
        choice("--hardware", name, PRESETS)
        facts: Any = build(HardwareConfig, shipped(f"hardware/{name}.yaml"), "hardware")
        self.name, self.node, self.memory = name, work.node, facts.memory_gb * 2**30  # bytes
        peak = facts.peak_tflops.bf16 or facts.peak_tflops.fp16
        self.absent = Absent.of(peak, facts.bandwidth_gbs, work.launch_us * 1e-6)
        self.inside = find_link(facts)
        self.network = Link(work.network_us * 1e-6, work.network_gbs * 1e9, "given", [])

    def reduce_seconds(self, size: float, devices: int) -> float:
        """Return the seconds of an all-reduce by ring or tree, whichever is faster."""
        if devices == 1:
            return 0.0
        link = self.inside if devices <= self.node else self.network
        tree = 2 * math.ceil(math.log2(devices)) * link.alpha + 2 * size / link.beta
        return min(link.seconds(size, devices), tree)


# --- time


@dataclass
class Step:
    """A step of one algorithm, in seconds. sent: bytes that a rank gives to all-reduces."""

    algorithm: str
    devices: int
    rows: int
    sample: float
    train: float
    update: float  # the optimizer; of eggroll the update from all members' noise
    communication: float  # that no computing hides
    sent: float
    seconds: float = field(init=False)  # of the whole step
    rows_per_second: float = field(init=False)

    def __post_init__(self) -> None:
        self.seconds = self.sample + self.train + self.update + self.communication
        self.rows_per_second = self.rows / self.seconds


def estimate_step(algorithm: str, model: Model, work: Work, here: Device, devices: int) -> Step:
    """Return the time of a step and the bytes that are sent, with replicated weights."""
    rows = work.rows * (devices if work.scaling == "weak" else 1)
    largest = math.ceil(rows / devices)  # of the rank with the most
    sample = train = 0.0
    if algorithm != "classify":
        # Samples of a prompt share one prefill; a member prefills each row.
        shared = 1 if algorithm == "eggroll" else work.samples
        sample = _estimate_sampling(model, work, here, largest, math.ceil(largest / shared))
    if algorithm == "eggroll":
        directions = math.ceil(math.ceil(rows / work.member_prompts) / 2)  # mirrored pairs share
        # The products of the noise, drawing it, and masters, initial and used weights.
        update = here.absent.seconds(2 * model.matrices * directions)
        update += here.absent.seconds(0, 4 * model.sides * directions + 18 * model.matrices)
        sent = float(ROW_BYTES * rows) if devices > 1 else 0.0
        waited = here.reduce_seconds(sent, devices)
    else:
        learnt, steps = largest, 1
        if algorithm == "rft":
            learnt = math.ceil(largest * work.accepted)
            steps = max(1, round(work.rows * work.accepted / work.optimizer_rows))
        tokens = learnt * (work.new_tokens + work.prompt_tokens / work.samples)
        if algorithm == "classify":
            tokens = largest * work.prompt_tokens
        passes = max(steps, math.ceil(learnt / work.micro_rows))
        launches = 3 * model.launches * passes
        train = here.absent.seconds(6 * model.used * tokens, launches=launches)
        # AdamW reads and writes weights, gradients, two moments.
        update = steps * here.absent.seconds(0, 28 * model.parameters)
        # Gradients leave while the rest of the backward pass (two thirds of training) goes on, of
        # the last forward of a step alone.
        hidden = train / passes * steps * 2 / 3
        sizes = (4.0 * model.parameters, 4.0 * model.block)
        whole, block = (here.reduce_seconds(size, devices) for size in sizes)
        waited = max(steps * block, steps * whole - hidden)
        sent = 4.0 * model.parameters * steps if devices > 1 else 0.0
    return Step(algorithm, devices, rows, sample, train, update, waited, sent)


def _estimate_sampling(model: Model, work: Work, here: Device, rows: int, prefilled: int) -> float:
    weights = 2 * model.parameters
    cache = rows * cache_bytes(model.config, 2) * (work.prompt_tokens + work.new_tokens / 2)
    token = here.absent.seconds(2 * model.used * rows, weights + cache, model.launches)
    prefill = here.absent.seconds(2 * model.used * prefilled * work.prompt_tokens, weights)
    return prefill + work.new_tokens * token


def find_limit(steps: list[Step]) -> tuple[int, str]:
    """Return the largest number of devices that pays, and the reason that more do not pay; "" if
    there is no limit. Doubling the devices pays if rows per second grow by WORTH.

    Args: steps: the steps of one algorithm, with the number of devices doubling.
    """
    evolution = steps[0].algorithm == "eggroll"
    parts = {
        "sample": "decoding does not shrink: weights are read, or kernels launched, for few rows as"
        " for many",
        "train": "training is launch-bound",
        "communication": "gradients are waited for",
        "update": "every rank makes the whole update" if evolution else "the optimizer",
    }
    for few, many in itertools.pairwise(steps):
        if many.rows_per_second / few.rows_per_second < WORTH:
            # What a part should have shrunk to.
            ideal = (many.rows / few.rows) * (few.devices / many.devices)
            excess = {name: getattr(many, name) - ideal * getattr(few, name) for name in parts}
            return few.devices, parts[max(excess, key=excess.__getitem__)]
    return steps[-1].devices, ""


# --- memory


def fixed_bytes(algorithm: str, parameters: int, shards: int, gathered: float) -> float:
    """Return the bytes of weights, gradients and optimizer state on a rank, with forwards in bf16.
    With opt=fsdp they are divided over `shards`, and `gathered` bytes replace the copies.
    """
    state = StateMemory.of_training(parameters, parameters, half_copies=1)
    if algorithm == "eggroll":  # float32 masters; the initial weights are in a file
        state = StateMemory(4 * parameters, copies=2.0 * parameters)
    return state.whole / shards + (state.copies if shards == 1 else gathered)


def most_gathered(algorithm: str, model: Model) -> float:
    """Return the most bf16 bytes that a rank gathers: all weights while it samples, else the
    weights of two blocks.
    """
    return 4.0 * model.block if algorithm == "classify" else 2.0 * model.parameters


def total_bytes(algorithm: str, model: Model, work: Work, shards: int, rows: int) -> float:
    """Return the bytes of a rank with `rows` rows per forward, when activations are recomputed in
    training.
    """
    rollout = training = 0.0
    drawn = SamplingConfig.uncut(work.new_tokens, 1.0)
    if algorithm != "classify":
        sampler = Sampler(model.model, pad_id=0, stop_ids=[], rows=rows)
        rollout = sampler.peak_bytes(rows, Load(work.prompt_tokens, drawn))
        rollout += fixed_bytes(algorithm, model.parameters, shards, 2.0 * model.parameters)
    if algorithm != "eggroll":
        sizes = rows / work.samples, work.prompt_tokens, rows, work.new_tokens
        batch = BatchShape(*sizes, torch.bfloat16)
        logits = logits_bytes(model.model, rows * work.new_tokens, drawn)
        training = activation_bytes(model.model, batch, True) + logits
        training += fixed_bytes(algorithm, model.parameters, shards, 4.0 * model.block)
    return max(rollout, training)


def find_largest(algorithm: str, models: list[Model], work: Work, here: Device, shards: int) -> str:
    """Return the largest of `models` that fits a device with one row per forward, or for EGGROLL
    with one mirrored pair.
    """
    rows, room = 2 if algorithm == "eggroll" else 1, FITTED * here.memory
    sizes = {m.name: m.parameters for m in models}
    fit = [m.name for m in models if total_bytes(algorithm, m, work, shards, rows) <= room]
    return max(fit, key=sizes.__getitem__, default="none")


# --- the command


def estimate(models: list[Model], chosen: Model, work: Work, here: Device) -> dict[str, Any]:
    """Return the whole estimate for one preset."""
    estimates: dict[str, Any] = {}
    for name in ALGORITHMS:
        steps = [estimate_step(name, chosen, work, here, devices) for devices in DEVICES]
        most, why = find_limit(steps)
        sizes, shared, gathered = chosen.parameters, work.shards, most_gathered(name, chosen)
        estimates[name] = {
            "steps": [asdict(step) for step in steps],
            "pays_up_to": most,
            "then": why,
            "fixed_gb": fixed_bytes(name, sizes, 1, gathered) / 2**30,
            "fixed_sharded_gb": fixed_bytes(name, sizes, shared, gathered) / 2**30,
            "largest": find_largest(name, models, work, here, 1),
            "largest_sharded": find_largest(name, models, work, here, shared),
        }
    facts = {"hardware": here.name, "model": chosen.name, "memory_gb": here.memory / 2**30}
    return facts | {"work": asdict(work), "algorithms": estimates}


def describe(found: dict[str, Any], work: Work) -> str:
    """Describe the estimate for one preset."""
    shards, memory = work.shards, found["memory_gb"]
    times = [["", *(f"{devices:,}" for devices in SHOWN), "sent", "pays up to"]]
    sizes = [["", "replicated", f"over {shards}", "largest, replicated", f"largest, over {shards}"]]
    limits, tight = [], []
    for name, one in found["algorithms"].items():
        cells = [f"{1000 * s['seconds']:,.0f}" for s in one["steps"] if s["devices"] in SHOWN]
        sent = format_bytes(one["steps"][1]["sent"])
        times.append([name, *cells, sent, f"{one['pays_up_to']:,}"])
        fixed = [f"{one[key]:,.1f} GB" for key in ("fixed_gb", "fixed_sharded_gb")]
        sizes.append([name, *fixed, one["largest"], one["largest_sharded"]])
        if one["then"]:
            limits.append(f"{name} beyond {one['pays_up_to']:,}: {one['then']}")
        if one["fixed_gb"] > FITTED * memory:
            tight.append(name)
    if tight:
        limits.append(
            "does not fit a device with weights replicated, as these times have them:"
            f" {', '.join(tight)}"
        )
    total = f"{work.rows:,} rows a step" + (" and device" if work.scaling == "weak" else " in all")
    lines = [
        f"{found['model']} on {found['hardware']}: milliseconds of a step, {total} ({work.scaling}"
        " scaling)",
        *(*align(times, left=1), "", *limits, ""),
        f"a device: weights, gradients, optimizer; the largest known model in its {memory:.0f} GB",
        *align(sizes, left=1),
    ]
    return "\n".join(lines) + "\n"


def format_bytes(number: float) -> str:
    """Format bytes in GB of 2**30 bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 2**10 or unit == "GB":
            break
        number /= 2**10
    return f"{number:.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"


def draw(found: dict[str, Any], work: Work, folder: Path) -> None:
    """Plot the speed-up, as speedup_NAME.png."""
    title = f"Speed-up, {work.scaling} scaling: {found['model']} on {found['hardware']}"
    path = folder / f"speedup_{found['hardware']}.png"
    with plots.saved(path, title, "devices", "times one device") as axis:
        axis.plot(DEVICES, DEVICES, color="#999999", linestyle=":", label="ideal")
        styles = zip(("-", "-", "-", "--"), plots.COLOURS, strict=False)
        for (name, one), (dashes, colour) in zip(found["algorithms"].items(), styles, strict=True):
            speeds = [step["rows_per_second"] for step in one["steps"]]
            axis.plot(DEVICES, [s / speeds[0] for s in speeds], dashes, label=name, color=colour)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")


def write(found: list[dict[str, Any]], work: Work, text: str, folder: Path) -> None:
    """Write capacity.txt, .json, .csv and the plots."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "capacity.txt", text)
    write_text(folder / "capacity.json", json.dumps(found, indent=2) + "\n")
    rows = [
        {"hardware": one["hardware"], **step}
        for one in found
        for algorithm in one["algorithms"].values()
        for step in algorithm["steps"]
    ]
    write_rows(rows, folder / "capacity.csv")
    for one in found:
        draw(one, work, folder)
    print(f"written to {folder}")


def main() -> None:
    """Run the command. Exit codes: 0 done, 2 a mistake of the user."""
    parser = argparse.ArgumentParser(
        "python -m ddp_bench.capacity",
        description="Steps, bytes and memory of the four algorithms on 1 to 1024 devices.",
    )
    add = parser.add_argument
    add("--model", default="qwen2.5_7b", help=f"{', '.join(MODELS)}, or a folder with config.json")
    add("--hardware", nargs="+", default=["a100_80g"], help=f"{', '.join(PRESETS)}")
    add("--out", type=Path, help="folder for capacity.json, capacity.csv and the plots")
    for item in fields(Work):
        option = f"--{item.name.replace('_', '-')}"
        add(option, type=type(item.default), default=item.default, **item.metadata)
    options = vars(parser.parse_args())
    name, hardware, out = (options.pop(key) for key in ("model", "hardware", "out"))
    with ending_tool():
        work = Work(**options)
        devices = [Device(preset, work) for preset in hardware]
        chosen, models = Model(name), [Model(known) for known in MODELS]
        estimates = [estimate(models, chosen, work, here) for here in devices]
        text = "\n".join(
            [*(describe(one, work) for one in estimates), ASSUMPTIONS.format(work=work)]
        )
        print(text)
        if out is not None:
            write(estimates, work, text, out)


if __name__ == "__main__":
    main()
