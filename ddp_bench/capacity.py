"""Before a cluster is booked: the four algorithms on 1 to 1024 devices of each preset, from facts
alone.

    python -m ddp_bench.predict --model qwen2.5_7b --hardware a100_80g h100 --rows 2048
    python -m ddp_bench.predict --model outputs/mine/model --scaling weak --out capacity

Tells, for each algorithm, what ranks send each other a step, how long a step takes and where it
stops scaling, the memory of a device, and the largest model that fits. Nothing is run: sizes are
those of the model's own config, built without storage; computing and link cost what
ddp_bench/predict.py says of a device that is not there. A guess, to tell algorithms and sizes of
cluster apart. algo=predict measures what is here.

A step of all four has the same `rows`: completions that are sampled and learnt from, or for
classify texts. What a rank does:

    eggroll   samples its members' rows; gets the rewards of all; makes the update of all members
    grpo      samples its rows, trains on them; all-reduce of the gradients, once
    rft       samples its rows, trains on the accepted ones; all-reduce of the gradients, once an
    optimizer step
    classify  trains on its rows; all-reduce of the gradients, once
"""

import argparse
import csv
import itertools
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
)

from common.config import ConfigError, HardwareConfig, above, at_least, build, choice
from common.files import write_text
from common.model import logprobs
from common.model.memory import activation_bytes
from common.report import plots
from common.sampling.native import Sampler
from ddp_bench.predict import ARITHMETIC, LAUNCH, MEMORY, Link, from_facts

ALGORITHMS = ("eggroll", "grpo", "rft", "classify")
DEVICES = tuple(2**i for i in range(11))
PRESETS = ("a100_40g", "a100_80g", "h100", "h200", "rtx4090", "v100")
CONF = Path(__file__).resolve().parent.parent / "conf"
HEADROOM = 0.9  # of the memory, as common.hardware.fit_rows
WORTH = 1.2  # twice the devices must be this much faster


def _qwen(
    hidden: int, wide: int, layers: int, heads: int, kv: int, vocabulary: int, tied: bool
) -> Qwen2Config:
    sizes: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
    }
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocabulary}
    return Qwen2Config(**sizes, tie_word_embeddings=tied, max_position_embeddings=32768)


def _llama(
    hidden: int, wide: int, layers: int, heads: int, kv: int, vocabulary: int, tied: bool
) -> LlamaConfig:
    sizes: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
    }
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocabulary}
    return LlamaConfig(**sizes, tie_word_embeddings=tied, max_position_embeddings=32768)


# Sizes that the models' own configs publish.
MODELS: dict[str, PretrainedConfig] = {
    "gpt2": GPT2Config(),
    "smollm2_135m": _llama(576, 1536, 30, 9, 3, 49152, True),
    "qwen2.5_0.5b": _qwen(896, 4864, 24, 14, 2, 151936, True),
    "qwen2.5_1.5b": _qwen(1536, 8960, 28, 12, 2, 151936, True),
    "qwen2.5_7b": _qwen(3584, 18944, 28, 28, 4, 152064, False),
    "llama3_8b": _llama(4096, 14336, 32, 32, 8, 128256, False),
    "qwen2.5_14b": _qwen(5120, 13824, 48, 40, 8, 152064, False),
    "qwen2.5_32b": _qwen(5120, 27648, 64, 40, 8, 152064, False),
    "llama3_70b": _llama(8192, 28672, 80, 64, 8, 128256, False),
}


@dataclass(frozen=True)
class Work:
    """What a step is made of; the same for all algorithms."""

    rows: int  # of all devices (strong scaling), or of each (weak)
    scaling: str  # strong | weak
    prompt_tokens: int
    new_tokens: int
    samples: int  # completions of a prompt
    member_prompts: int  # rows of a member
    accepted: float  # share of the completions that RFT learns from
    optimizer_rows: (
        int  # completions of an optimizer step of RFT; of all devices or of each, as rows
    )
    micro_rows: int  # completions of a forward, at most

    def __post_init__(self) -> None:
        for name in (
            "rows",
            "prompt_tokens",
            "new_tokens",
            "samples",
            "member_prompts",
            "optimizer_rows",
            "micro_rows",
        ):
            at_least(f"--{name.replace('_', '-')}", getattr(self, name), 1)
        if not 0 < self.accepted <= 1:
            raise ConfigError(
                f"--accepted {self.accepted} is out of range. Give a share above 0, up to 1."
            )


class Model:
    """A model's sizes; its weights have no storage."""

    def __init__(self, name: str) -> None:
        if name in MODELS:
            config = MODELS[name]
        elif (Path(name) / "config.json").exists():
            config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        else:
            choice("--model", name, (*MODELS, "a folder with config.json"))
            raise AssertionError
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self.name, self.config = name, config
        embeddings = {
            id(p)
            for m in self.model.modules()
            if isinstance(m, torch.nn.Embedding)
            for p in m.parameters()
        }
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.matrices = sum(
            p.numel() for p in self.model.parameters() if p.ndim == 2 and id(p) not in embeddings
        )
        sides = [
            p.shape for p in self.model.parameters() if p.ndim == 2 and id(p) not in embeddings
        ]
        self.sides = sum(sum(shape) for shape in sides)  # numbers of a rank-1 noise
        self.block = max(
            sum(p.numel() for p in block.parameters()) for block in _blocks(self.model)
        )
        head = self.model.get_output_embeddings().weight.numel()
        self.used = self.matrices + (
            0 if not config.tie_word_embeddings else head
        )  # each token is multiplied with

    @cached_property
    def launches(self) -> int:
        """Operations of one decoding step."""
        mask = torch.zeros(
            1, 1, 1, 1, dtype=torch.bfloat16, device="meta"
        )  # given, or its making would look at values
        with _Count() as count, torch.no_grad():
            self.model(
                torch.zeros(1, 1, dtype=torch.long, device="meta"),
                attention_mask=mask,
                use_cache=False,
            )
        return count.operations

    def row_bytes(self, prompt_tokens: int, new_tokens: int) -> float:
        """Of one row while it is sampled."""
        sampler = Sampler(self.model, pad_id=0, stop_ids=[], rows=1)
        return sampler.row_bytes(prompt_tokens, new_tokens)

    def cache_bytes(self, tokens: float) -> float:
        """Keys and values of one row of `tokens`."""
        config = self.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 2 * 2 * config.num_hidden_layers * heads * size * tokens

    def training_bytes(self, work: Work, prompts: float, rows: int) -> float:
        """Activations of a training forward with checkpointing, and its logits."""
        kept = activation_bytes(
            self.model,
            prompts,
            work.prompt_tokens,
            rows,
            work.new_tokens,
            torch.bfloat16,
            recomputed=True,
        )
        return kept + 16 * min(rows * work.new_tokens * self.config.vocab_size, logprobs.LOGITS)


class _Count(TorchDispatchMode):
    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += not func.is_view
        return func(*args, **(kwargs or {}))


def _blocks(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    return iter(next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList)))


@dataclass(frozen=True)
class Device:
    """A preset, and how its devices are connected. network: between nodes of `node` devices."""

    name: str
    flops: float  # a second, of 16-bit products
    bandwidth: float  # bytes a second
    memory: float  # bytes
    inside: Link
    network: Link
    node: int
    launch: float  # seconds that the host takes for an operation

    def seconds(self, size: float, devices: int) -> float:
        """Of an all-reduce of `size` bytes: a ring or a tree, whichever is faster, as NCCL chooses."""
        if devices == 1:
            return 0.0
        link = self.inside if devices <= self.node else self.network
        tree = 2 * math.ceil(math.log2(devices)) * link.alpha + 2 * size / link.beta
        return min(link.seconds(size, devices), tree)


def device(name: str, node: int, network_gbs: float, network_us: float, launch_us: float) -> Device:
    """The preset conf/hardware/NAME.yaml. Raises: ConfigError."""
    choice("--hardware", name, PRESETS)
    loaded: Any = OmegaConf.to_container(OmegaConf.load(CONF / "hardware" / f"{name}.yaml"))
    facts: HardwareConfig = build(HardwareConfig, loaded, "hardware")
    peak = facts.peak_tflops.bf16 or facts.peak_tflops.fp16
    assert peak is not None, name
    assert facts.bandwidth_gbs is not None, name
    assert facts.memory_gb is not None, name
    network = Link(network_us * 1e-6, network_gbs * 1e9, "given", [])
    return Device(
        *(
            name,
            ARITHMETIC * peak * 1e12,
            MEMORY * facts.bandwidth_gbs * 1e9,
            facts.memory_gb * 2**30,
        ),
        *(from_facts(facts), network, node, launch_us * 1e-6),
    )


@dataclass(frozen=True)
class Step:
    """One step of an algorithm. Seconds; sent: bytes that a rank gives to all-reduces."""

    algorithm: str
    devices: int
    rows: int
    sample: float
    train: float
    update: float  # the optimizer; of eggroll the update from all members' noise
    communication: float  # that no computing hides
    sent: float

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.sample + self.train + self.update + self.communication


def step(algorithm: str, model: Model, work: Work, here: Device, devices: int) -> Step:
    """The time of a step, and what is sent. Weights are replicated, the largest communication there
    is.
    """
    rows = work.rows * (devices if work.scaling == "weak" else 1)
    own = max(1, math.ceil(rows / devices))  # of the rank with the most
    weights = 2 * model.parameters
    sample = train = 0.0
    if algorithm != "classify":
        # A member prefills each of its rows; samples of a prompt share one prefill.
        prefilled = own if algorithm == "eggroll" else math.ceil(own / work.samples)
        cache = own * model.cache_bytes(work.prompt_tokens + work.new_tokens / 2)
        token = max(
            here.launch * model.launches,
            (weights + cache) / here.bandwidth,
            2 * model.used * own / here.flops,
        )
        prefill = max(
            weights / here.bandwidth, 2 * model.used * prefilled * work.prompt_tokens / here.flops
        )
        sample = prefill + work.new_tokens * token
    if algorithm == "eggroll":
        members = math.ceil(rows / work.member_prompts)
        directions = math.ceil(members / 2)  # mirrored pairs share one
        product = 2 * model.matrices * directions / here.flops
        drawn = 4 * model.sides * directions / here.bandwidth
        update = (
            product + drawn + 18 * model.matrices / here.bandwidth
        )  # masters, initial and used weights
        sent = 8.0 * rows if devices > 1 else 0.0
        return Step(
            algorithm, devices, rows, sample, 0.0, update, here.seconds(sent, devices), sent
        )
    learnt = own if algorithm != "rft" else max(1, math.ceil(own * work.accepted))
    steps = (
        1 if algorithm != "rft" else max(1, round(work.rows * work.accepted / work.optimizer_rows))
    )
    tokens = learnt * (work.new_tokens + work.prompt_tokens / work.samples)
    if algorithm == "classify":
        tokens = own * work.prompt_tokens
    passes = max(
        steps, math.ceil(learnt / work.micro_rows)
    )  # at least the launches of so many forwards
    train = max(6 * model.used * tokens / here.flops, 3 * here.launch * model.launches * passes)
    update = (
        steps * 28 * model.parameters / here.bandwidth
    )  # AdamW reads and writes weights, gradients, two moments
    sent = 4.0 * model.parameters * steps if devices > 1 else 0.0
    # Gradients leave while the rest of the backward pass (two thirds of training) goes on, of the
    # last forward of a step alone.
    hidden = train / max(passes, 1) * steps * 2 / 3
    communication = max(
        steps * here.seconds(4.0 * model.block, devices),
        steps * here.seconds(4.0 * model.parameters, devices) - hidden,
    )
    return Step(
        algorithm, devices, rows, sample, train, update, communication if devices > 1 else 0.0, sent
    )


def limits(steps: list[Step]) -> tuple[int, str]:
    """The most devices that pay, and what stops more of them: "" where nothing does. steps: of one
    algorithm, devices doubling.

    Twice the devices pay where rows a second grow by WORTH.
    """
    for few, many in itertools.pairwise(steps):
        if (many.rows / many.seconds) / (few.rows / few.seconds) < WORTH:
            ideal = (many.rows / few.rows) * (
                few.devices / many.devices
            )  # what a part should have shrunk to
            parts = {
                "decoding does not shrink: weights are read, or kernels launched, for few rows as for many": (
                    "sample"
                ),
                "training is launch-bound": "train",
                "gradients are waited for": "communication",
                (
                    "every rank makes the whole update"
                    if many.algorithm == "eggroll"
                    else "the optimizer"
                ): "update",
            }
            return few.devices, max(
                parts,
                key=lambda name: getattr(many, parts[name]) - ideal * getattr(few, parts[name]),
            )
    return steps[-1].devices, ""


def fixed_bytes(algorithm: str, parameters: float, shards: int, block: float) -> float:
    """Weights, gradients and optimizer state of a rank, with bf16 forwards; opt=fsdp shares them
    out over `shards`.

    eggroll: bf16 weights, float32 masters and initial weights. Others: float32 weights, gradients
    and Adam's two moments, and the bf16 copy that a forward uses, of all weights or, sharded, of
    two blocks.
    """
    if algorithm == "eggroll":
        return 10 * parameters / shards + (4 * block if shards > 1 else 0)
    return 16 * parameters / shards + (2 * parameters if shards == 1 else 4 * block)


def memory(algorithm: str, model: Model, work: Work, shards: int, rows: int) -> float:
    """Bytes of a rank that has `rows` rows in a forward."""
    fixed = fixed_bytes(algorithm, model.parameters, shards, model.block)
    sampling = (
        rows * model.row_bytes(work.prompt_tokens, work.new_tokens)
        if algorithm != "classify"
        else 0.0
    )
    training = (
        model.training_bytes(work, rows / work.samples, rows) if algorithm != "eggroll" else 0.0
    )
    return fixed + max(sampling, training)


def largest(algorithm: str, models: list[Model], work: Work, here: Device, shards: int) -> float:
    """Parameters of the largest model that a device holds with one row (of eggroll two: a pair) a
    forward.

    models: by size; between them what a row takes is interpolated on a logarithmic scale.
    """
    rows = 2 if algorithm == "eggroll" else 1
    sizes = [math.log(model.parameters) for model in models]
    needs = [math.log(memory(algorithm, model, work, shards, rows)) for model in models]
    room = math.log(HEADROOM * here.memory)
    if room <= needs[0]:
        return 0.0
    for i in range(len(models) - 1):
        if room <= needs[i + 1]:
            return math.exp(
                sizes[i] + (room - needs[i]) / (needs[i + 1] - needs[i]) * (sizes[i + 1] - sizes[i])
            )
    return math.exp(sizes[-1] + room - needs[-1])  # beyond the largest of them: in proportion


# --- the command -----------------------------------------------------------------------------------------------------


def described(
    models: list[Model], chosen: Model, work: Work, here: Device, shards: int
) -> dict[str, Any]:
    """All that is told of one preset."""
    found: dict[str, Any] = {
        "hardware": here.name,
        "model": chosen.name,
        "work": asdict(work),
        "shards": shards,
        "algorithms": {},
    }
    for algorithm in ALGORITHMS:
        steps = [step(algorithm, chosen, work, here, devices) for devices in DEVICES]
        most, why = limits(steps)
        found["algorithms"][algorithm] = {
            "steps": [
                asdict(one) | {"seconds": one.seconds, "rows_per_second": one.rows / one.seconds}
                for one in steps
            ],
            "pays_up_to": most,
            "then": why,
            "fixed_gb": fixed_bytes(algorithm, chosen.parameters, 1, chosen.block) / 2**30,
            "fixed_sharded_gb": (
                fixed_bytes(algorithm, chosen.parameters, shards, chosen.block) / 2**30
            ),
            "largest": largest(algorithm, models, work, here, 1),
            "largest_sharded": largest(algorithm, models, work, here, shards),
        }
    return found


def worded(found: dict[str, Any], work: Work) -> str:
    """One preset, for people."""
    told = found["algorithms"]
    shown = [i for i, n in enumerate(DEVICES) if n in (1, 2, 8, 64, 512, 1024)]
    total = f"{work.rows:,} rows a step" + (" and device" if work.scaling == "weak" else " in all")
    lines = [
        f"{found['model']} on {found['hardware']}: milliseconds of a step, {total} ({work.scaling}"
        " scaling)"
    ]
    rows = [["", *(f"{DEVICES[i]:,}" for i in shown), "sent", "pays up to"]]
    for name, one in told.items():
        sent = one["steps"][1]["sent"]
        cells = [f"{1000 * one['steps'][i]['seconds']:,.0f}" for i in shown]
        rows.append([name, *cells, size(sent), f"{one['pays_up_to']:,}"])
    lines += [*aligned(rows), ""]
    lines += [
        f"{name} beyond {one['pays_up_to']:,}: {one['then']}"
        for name, one in told.items()
        if one["then"]
    ]
    if tight := [
        name for name, one in told.items() if one["fixed_gb"] > HEADROOM * found["memory_gb"]
    ]:
        lines.append(
            "does not fit a device with weights replicated, as these times have them:"
            f" {', '.join(tight)}"
        )
    lines += [
        "",
        (
            "a device: weights, gradients, optimizer; the largest model that fits its"
            f" {found['memory_gb']:.0f} GB"
        ),
    ]
    rows = [
        [
            "",
            "replicated",
            f"over {found['shards']}",
            "largest, replicated",
            f"largest, over {found['shards']}",
        ]
    ]
    for name, one in told.items():
        largest_two = [f"{one[key] / 1e9:,.1f}B" for key in ("largest", "largest_sharded")]
        rows.append(
            [name, f"{one['fixed_gb']:,.1f} GB", f"{one['fixed_sharded_gb']:,.1f} GB", *largest_two]
        )
    return "\n".join([*lines, *aligned(rows)]) + "\n"


def aligned(rows: list[list[str]]) -> list[str]:
    """Columns, the first to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)),
            ]
        )
        for row in rows
    ]


def size(number: float) -> str:
    """Bytes, for people: GB of 2**30 bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 2**10 or unit == "GB":
            break
        number /= 2**10
    return f"{number:.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"


def draw(found: dict[str, Any], work: Work, folder: Path) -> None:
    """exchange.png: bytes that a rank gives to all-reduces; speedup.png: rows a second against one
    device.
    """
    told = found["algorithms"]
    with plots.saved(folder / f"exchange_{found['hardware']}.png") as axis:
        for number, (name, one) in enumerate(told.items()):
            steps = one["steps"][1:]
            style = {"linestyle": ("-", "-", "-", "--")[number], "color": plots.COLOURS[number]}
            axis.plot(
                [s["devices"] for s in steps], [s["sent"] for s in steps], label=name, **style
            )
        scaled(axis)
        axis.set_yscale("log", base=2**5, subs=[])  # ticks at 1 and 32 of a unit
        title = f"What a rank sends: {found['model']}, {work.rows:,} rows"
        plots.finished(axis, title, "devices", "bytes a step", zero=False)
        axis.yaxis.set_major_formatter(lambda value, _: size(value))
    with plots.saved(folder / f"speedup_{found['hardware']}.png") as axis:
        axis.plot(DEVICES, DEVICES, color="#999999", linestyle=":", label="ideal")
        for number, (name, one) in enumerate(told.items()):
            first = one["steps"][0]["rows_per_second"]
            speedup = [s["rows_per_second"] / first for s in one["steps"]]
            axis.plot(DEVICES, speedup, label=name, color=plots.COLOURS[number])
        scaled(axis)
        title = f"Speed-up, {work.scaling} scaling: {found['model']} on {found['hardware']}"
        plots.finished(axis, title, "devices", "times one device", zero=False)


def scaled(axis: Any) -> None:
    """Both axes logarithmic, devices as numbers."""
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def main() -> int:
    """The command. Exit codes: 0 done, 2 a mistake."""
    parser = argparse.ArgumentParser(
        "python -m ddp_bench.predict",
        description="Steps, bytes and memory of the four algorithms on 1 to 1024 devices.",
    )
    add = parser.add_argument
    add("--model", default="qwen2.5_7b", help=f"{', '.join(MODELS)}, or a folder with config.json")
    add("--hardware", nargs="+", default=["a100_80g"], help=f"{', '.join(PRESETS)}")
    add(
        "--rows",
        type=int,
        default=1024,
        help="completions a step (of each device with --scaling weak)",
    )
    add("--scaling", choices=("strong", "weak"), default="strong")
    add("--prompt-tokens", type=int, default=256)
    add("--new-tokens", type=int, default=512)
    add("--samples", type=int, default=8, help="completions of a prompt (grpo, rft)")
    add("--member-prompts", type=int, default=8, help="rows of a member (eggroll)")
    add("--accepted", type=float, default=0.25, help="share of completions that rft learns from")
    add("--optimizer-rows", type=int, default=64, help="completions of an optimizer step (rft)")
    add("--micro-rows", type=int, default=16, help="completions of a training forward at most")
    add("--shards", type=int, default=8, help="devices that opt=fsdp shares weights out over")
    add("--node", type=int, default=8, help="devices of a node; beyond it the network carries")
    add("--network-gbs", type=float, default=25.0, help="GB/s of an all-reduce between nodes")
    add("--network-us", type=float, default=20.0, help="microseconds of each of its steps")
    add(
        "--launch-us",
        type=float,
        default=1e6 * LAUNCH,
        help="microseconds of an operation; about 1 with opt=compile, reduce-overhead",
    )
    add("--out", type=Path, help="folder for capacity.json, capacity.csv and the plots")
    given = parser.parse_args()
    try:
        work = Work(**{name: getattr(given, name) for name in Work.__dataclass_fields__})
        at_least("--shards", given.shards, 1)
        at_least("--node", given.node, 1)
        above("--network-gbs", given.network_gbs, 0)
        above("--network-us", given.network_us, 0)
        above("--launch-us", given.launch_us, 0)
        devices = [
            device(name, given.node, given.network_gbs, given.network_us, given.launch_us)
            for name in given.hardware
        ]
        chosen = Model(given.model)
        models = sorted((Model(name) for name in MODELS), key=lambda model: model.parameters)
        found = [
            described(models, chosen, work, here, given.shards) | {"memory_gb": here.memory / 2**30}
            for here in devices
        ]
        text = "\n".join(worded(one, work) for one in found) + "\n" + assumed(given)
        print(text)
        if given.out is not None:
            write(found, work, text, given.out)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def assumed(given: argparse.Namespace) -> str:
    """What the numbers rest on."""
    return (
        f"From facts alone, nothing is measured: products reach {ARITHMETIC:.0%} of the peak,"
        f" memory {MEMORY:.0%} of its bandwidth, an operation costs {given.launch_us:g} us to"
        f" launch.\n{given.prompt_tokens} + {given.new_tokens} tokens. Between nodes of"
        f" {given.node}: {given.network_gbs:g} GB/s, {given.network_us:g} us a hop. Weights are"
        " replicated in the times; sent: by a rank, at 2 devices.\nGB, MB and kB are of 2**30,"
        " 2**20 and 2**10 bytes, and a GB/s is 10**9 bytes a second."
    )


def write(found: list[dict[str, Any]], work: Work, text: str, folder: Path) -> None:
    """capacity.txt, .json, .csv and the plots. Raises: ConfigError where the folder cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {folder} cannot be made: {error.strerror}. Choose another folder."
        ) from None
    write_text(folder / "capacity.txt", text)
    write_text(folder / "capacity.json", json.dumps(found, indent=2) + "\n")
    lines = [
        {"hardware": one["hardware"], **step}
        for one in found
        for told in one["algorithms"].values()
        for step in told["steps"]
    ]
    with (folder / "capacity.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    for one in found:
        draw(one, work, folder)
    print(f"written to {folder}")
