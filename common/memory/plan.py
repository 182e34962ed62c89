"""Plan a run without running it: plan=true.

The run is built on the meta device, without weights, for the device of its preset, which need not
be present. The function `plan` of an algorithm builds the same parts as its `train`, so that the
numbers are those that the run itself would print. If they do not fit the device, switches that save
memory are tried in order of cost.
"""

import copy
import logging
import math
import operator
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from common.config import (
    AdapterConfig,
    ConfigError,
    Run,
    SamplingConfig,
    find_file,
    flat,
    list_files,
    shipped,
)
from common.device import hardware, precision, threads
from common.distributed import Context, cut_mesh
from common.memory.arithmetic import cache_bytes
from common.memory.row_limit import FITTED, TradesMemory
from common.model import find_window, head_size, quantized, template_date, varlen
from common.system import user_code
from common.task import task_name

if TYPE_CHECKING:
    from common.episodes import Turns

# A decode step on CUDA: the share of the memory bandwidth that it reaches, and the least seconds
# per layer, however small the layer (LOG.md).
BANDWIDTH_SHARE, LAYER_SECONDS = 0.6, 40e-6
ADAPTER_RANK = 16  # rank of the adapter that is proposed if training all weights does not fit


@dataclass(frozen=True)
class Plan:
    """The plan of a run on one rank.

    Attributes:
        rows: the lines to print, by title.
        peak_gb: the peak memory of a step, in GB of 2**30 bytes.
        memory_gb: the memory of the device, or of the rank's share of the machine, in GB of 2**30
            bytes.
    """

    rows: dict[str, str]
    peak_gb: float
    memory_gb: float

    @property
    def fits(self) -> bool:
        """Whether the peak fits with a tenth of the memory to spare."""
        return self.peak_gb <= FITTED * self.memory_gb


def show(entry: str, run: Run, task: Any = None) -> Plan:
    """Print the plan of a run and, if it does not fit, the switches that would make it fit. Returns
    the plan.

    Args:
        entry: "module:function" that plans a run of the algorithm.
        task: the task; None = the one that the run's configuration names.
    Raises: ConfigError for settings that cannot work.
    """
    plan = make(entry, run, task)
    width = max(map(len, plan.rows))
    for key, value in plan.rows.items():
        print(f"{key:{width}}  {value}")
    room = f"{plan.memory_gb:.1f}".removesuffix(".0") + " GB, of which a tenth is to spare"
    if plan.fits:
        print(f"{'fits':{width}}  yes: {plan.peak_gb:.1f} of {room}")
        return plan
    print(f"{'fits':{width}}  no: {plan.peak_gb:.1f} of {room}. With one more switch at a time:")
    changed, peak_gb = run, plan.peak_gb
    for change in WAYS:
        try:
            if (more := change(changed)) == changed:
                continue
            other = make(entry, more, task)
        except ConfigError:  # it has no effect here, or conflicts with other settings
            continue
        if other.peak_gb == peak_gb:  # such as opt=amp on a CPU without native bfloat16
            continue
        peak_gb = other.peak_gb
        changed, answer = more, "fits" if other.fits else "does not fit"
        print(f"{'':{width}}  {_describe(run, more)}: {other.peak_gb:.1f} GB, {answer}")
        if other.fits:
            return plan
    shared = "more ranks (opt.fsdp.ranks)" if run.opt.fsdp.enabled else "several with opt=fsdp"
    print(f"{'':{width}}  Take a smaller model or a device with more memory, or share the model")
    print(f"{'':{width}}  out over {shared}.")
    return plan


def make(entry: str, run: Run, task: Any = None) -> Plan:
    """Return the plan of a run.

    Args: entry: names a function of (run, context, task) that returns the lines to print, the parts
    of the run and the `Memory` of a step.
    Raises: ConfigError for settings that cannot work.
    """
    switch, workers = run.opt.workers
    if run.opt.fsdp.cpu_offload:
        raise ConfigError(
            "plan=true does not count what opt.fsdp.cpu_offload=true keeps on the CPU. Leave it out"
            " for the plan of a rank that keeps its share on the device."
        )
    world, mesh = workers.ranks or 1, None
    if run.opt.fsdp.enabled:
        mesh = cut_mesh(run.opt.fsdp, world)
    run = copy.deepcopy(run)  # lengths are filled in
    run.algo.check_run(run)
    device = hardware.find_planned(run.hardware)
    with TemporaryDirectory() as folder, _quiet():
        hardware.check(run.hardware, run.opt, device)
        context = Context(0, world, device, Path(folder), mesh)
        rows, parts, memory = user_code.load(entry)(run, context, task)
        rows |= _estimate_speed(run, parts, memory.rows) | _remark(run, device)
        parts.close()
    if workers.enabled and workers.ranks is None:
        rows["ranks"] += f" (opt.{switch}.ranks plans more)"
    return Plan(rows, memory.peak / 2**30, context.memory_gb)


def _remark(run: Run, device: hardware.Device) -> dict[str, str]:
    """List the settings that a plan ignores."""
    remarks = {}
    if run.hardware.device == "cuda" and run.hardware.memory_gb is None:
        remarks["planned for"] = (
            f"this machine ({device.name}, {device.memory_gb:.0f} GB), as hardware.memory_gb=null"
            f" does not say what hardware={run.hardware.name} has"
        )
    if run.resume != "no":
        remarks["resume"] = (
            f"{run.resume} changes nothing here: a run that goes on needs as much as a new one"
        )
    return remarks


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence logs and warnings in the block: the plan itself prints the fitted sizes."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(level)


def _estimate_speed(run: Run, parts: Any, rows: int) -> dict[str, str]:
    """Estimate the sampling speed of a rank on a GPU, assuming that memory bandwidth limits it.

    Args: rows: rows of a decode step.
    """
    bandwidth = run.hardware.bandwidth_gbs
    if bandwidth is None:
        return {}
    new = run.algo.sampling.max_new_tokens
    size = parts.lm.precision.compute.itemsize
    cache = cache_bytes(parts.lm.model.config, size) * (parts.examples.longest_prompt + new / 2)
    merged = (
        isinstance(parts.engine, TradesMemory) and parts.engine.merged_bytes
    )  # merged weights are in the compute dtype, not quantized
    weights = (
        size * parts.lm.parameters
        if merged
        else quantized.forward_bytes(parts.lm.model, parts.lm.parameters, size)
    )
    layers = parts.lm.model.config.num_hidden_layers
    seconds = decode_seconds(weights + rows * cache, layers, bandwidth * 1e9)
    return {
        "speed": f"an estimate, not measured: {float(f'{rows / seconds:.2g}'):,.0f} tokens/s"
        f" sampled per rank with {rows} rows at {BANDWIDTH_SHARE:.0%} of {bandwidth:,.0f} GB/s"
    }


def decode_seconds(read: float, layers: int, bandwidth: float) -> float:
    """Return an estimate of the seconds of a decode step on a GPU (`python -m benchmarks distance`
    measures it).

    Args: read: the bytes of weights and cache that it reads; bandwidth: bytes per second.
    """
    return max(read / (BANDWIDTH_SHARE * bandwidth), LAYER_SECONDS * layers)


# --- the description of a run


def describe(parts: Any) -> dict[str, str]:
    """Describe the task, the model, the device and the precision of a run, as lines by title."""
    run, device = parts.run, parts.context.device
    examples = parts.examples
    skipped = f"; {examples.skipped} too long and left out" if examples.skipped else ""
    mode = run.opt.compile.mode
    compiled_parts = "decoding and training" if run.opt.compile.training else "decoding"
    compiled = f", {compiled_parts} compiled ({mode})" if run.opt.compile.enabled else ""
    recomputed = ", activations recomputed" if run.opt.checkpointing.enabled else ""
    adapter = f"; {parts.lm.adapter.describe()}" if parts.lm.adapter else ""
    prompt = parts.task.prompt(parts.task.examples("train")[0])
    templated = parts.lm.tokenizer.chat_template is not None and not isinstance(prompt, str)
    count, unused = len(examples.validation), "" if parts.validator else ", which are not measured"
    validation = f", {count} for validation{unused}" if count else ""
    return {
        "task": f"{task_name(parts.task)}: {len(examples.order.examples):,} training examples,"
        f" {len(examples.held_out)} held out{validation}{skipped}",
        **_describe_files(parts.task.own),
        "prompts": describe_template(parts.lm.tokenizer) if templated else "plain text",
        **_describe_episodes(examples.turns),
        **_describe_answers(parts.task.own),
        "model": f"{parts.name}, {parts.lm.parameters / 1e6:.2f}M parameters{adapter}",
        "engine": describe_engine(parts),
        **_describe_evaluation(run, parts.lm.model),
        "device": f"{device.name}, {device.memory_gb:.0f} GB; hardware={run.hardware.name}",
        **name_experiment(run, device),
        "numbers": f"{parts.lm.precision.name}{', GradScaler' if parts.lm.precision.scaler else ''}"
        f"{compiled}, masters float32{recomputed}"
        + precision.advise(parts.lm.precision, run, device, parts.lm.parameters),
        "attention": describe_attention(parts),
        "ranks": str(parts.context.world_size),
        **threads.describe(device),
    }


def name_experiment(run: Run, device: hardware.Device) -> dict[str, str]:
    """Name the experiment of this algorithm for the card that hardware=auto found, unless the run
    already has its settings.
    """
    card = hardware.find_preset(device) if run.hardware.name == "auto" else None
    name = f"{run.algo.name}_{card}"
    if card is None or not find_file(f"experiment/{name}.yaml").exists():
        return {}
    sizes = flat(shipped(f"experiment/{name}.yaml")["algo"])
    if all(operator.attrgetter(key)(run.algo) == value for key, value in sizes.items()):
        return {}
    return {"experiment": f"experiment={name} is made for this card (hardware={card})"}


def describe_template(tokenizer: Any) -> str:
    """Describe that prompts are rendered by the chat template, and whether it lets the
    model think.
    """
    text, name = str(tokenizer.chat_template), "enable_thinking"
    thinks = name in text and f"set {name} = " not in text
    hint = f" (model.chat_template_kwargs.{name}=false: answers without thinking)" if thinks else ""
    date = template_date(tokenizer)
    dated = "" if date is None else f", in which today is {date}"
    return f"through the chat template{dated}{hint}"


def _describe_episodes(turns: "Turns | None") -> dict[str, str]:
    if turns is None:
        return {}
    task = turns.task
    answers = f"{task.max_turns} answer{'s' * (task.max_turns > 1)}"
    limits = f"{answers} and {turns.reply_tokens} tokens of replies at most"
    return {"episodes": f"{limits}, {task.call_seconds:g} s for each"}


def _describe_evaluation(run: Run, model: Any) -> dict[str, str]:
    """Describe how measured completions are drawn, if it is not greedy, or if the model's own
    generation_config.json asks for something else.
    """
    evaluate, asked = run.evaluate, model.generation_config
    names = ("temperature", "top_p", "top_k", "min_p")
    if evaluate.sampling != "greedy":
        how = evaluate.drawn(run.algo.sampling, run.algo.sampling.max_new_tokens)
        usual = SamplingConfig.uncut(0, 0.0)
        said = [f"{n} {getattr(how, n):g}" for n in names if getattr(how, n) != getattr(usual, n)]
        each = f", mean of {evaluate.repeats} completions" if evaluate.repeats > 1 else ""
        return {"evaluation": f"sampled: {', '.join(said) or 'greedy'}{each}"}
    if not getattr(asked, "do_sample", False):
        return {}
    keys = {name: getattr(asked, name, None) for name in names}
    given = ", ".join(f"{name}: {value:g}" for name, value in keys.items() if value)
    return {
        "evaluation": "greedy, and the model's generation_config.json asks for samples:"
        f" 'evaluate.sampling={{{given}}}', with evaluate.repeats=4"
    }


def _describe_answers(task: Any) -> dict[str, str]:
    behind = getattr(task, "behind", None)  # of a task that thoughts.Answering gives answers
    return {} if behind is None else {"answers": f"what stands behind {behind.close}"}


def _describe_files(task: Any) -> dict[str, str]:
    """Describe what was detected in the files of rows, such as an encoding."""
    reading = getattr(task, "reading", None)
    return {"rows": "; ".join(reading.notes)} if reading is not None and reading.notes else {}


def describe_attention(parts: Any) -> str:
    """Describe the attention of sampling and of training; on CUDA also whether decode steps are
    recorded, and why flash attention is not used.
    """
    config, dtype = parts.lm.model.config, parts.lm.precision.compute
    device = parts.context.device
    kernel = hardware.attention_kernel(device, dtype, head_size(config))
    masked = f"{parts.run.model.attention} ({kernel})"
    if device.type != "cuda":
        return masked
    why = varlen.why_not_flash(config, device, dtype)
    training = "flash" if why is None else f"{masked}, flash: no, {why}"
    engine = parts.engine
    sampling = engine.describe() if isinstance(engine, TradesMemory) else "the engine's own"
    window = find_window(config, math.inf)
    beyond = f"; masked in rows of more than {window.size} tokens" if window else ""
    return f"sampling {sampling}" + (f"; training {training}" * (not parts.lm.population)) + beyond


def describe_engine(parts: Any) -> str:
    """Describe which engine samples, and whether its samples can be reproduced."""
    target = parts.run.engine["_target_"]
    shipped = (path for path in list_files("engine") if target in path.read_text())
    name = next((path.stem for path in shipped), target)
    if parts.engine.separate:
        idle = f"{parts.idle_bytes / 2**30:.1f} GB"
        name += f" in a process of its own, {idle} while the model is trained"
    return name if parts.engine.reproducible else f"{name}; the run cannot be repeated to the bit"


# --- changes that save memory


def _switch(run: Run, name: str, enabled: bool = True) -> Run:
    switch = replace(getattr(run.opt, name), enabled=enabled)
    return replace(run, opt=replace(run.opt, **{name: switch}))


def _drop_reference(run: Run) -> Run:
    if (kl := getattr(run.algo, "kl", None)) is None:
        return run
    settings = shipped(f"algo/{run.algo.name}.yaml")["kl"]
    without = type(kl)(**settings)
    return replace(run, algo=replace(run.algo, kl=without))


def _adapt(run: Run) -> Run:
    """Return the run with an adapter trained in place of all weights, and without opt=offload,
    which then has nothing to offload.
    """
    if run.model.adapter is not None:
        return run
    model, algo = replace(run.model, adapter=AdapterConfig(rank=ADAPTER_RANK)), run.algo
    if (noise := getattr(algo, "noise", None)) is not None:  # of a population: on the adapter
        algo = replace(algo, noise=replace(noise, matrices="lowrank", vectors="frozen"))
    return _switch(replace(run, model=model, algo=algo), "offload", False)


# In order of their cost: none, a third of the training time, copies to and from the host, another
# objective, fewer trained weights, and rounded frozen weights.
WAYS: tuple[Callable[[Run], Run], ...] = (
    *(partial(_switch, name=name) for name in ("amp", "checkpointing", "offload")),
    *(_drop_reference, _adapt),
    lambda run: replace(run, model=replace(run.model, quantize="int8")),
    lambda run: replace(run, model=replace(run.model, quantize="nf4")),
)


def _describe(run: Run, changed: Run) -> str:
    """Return the command-line overrides that turn `run` into `changed`."""
    switches = [key for key, on in vars(changed.opt).items() if getattr(on, "enabled", False)]
    adapter, quantize = changed.model.adapter, changed.model.quantize
    words = {
        f"'opt=[{','.join(switches)}]'": changed.opt != run.opt,
        "algo.kl.beta=0": getattr(changed.algo, "kl", None) != getattr(run.algo, "kl", None),
        f"model.adapter.rank={ADAPTER_RANK}": adapter != run.model.adapter,
        f"model.quantize={quantize}": quantize != run.model.quantize,
    }
    return " ".join(word for word, differs in words.items() if differs)
