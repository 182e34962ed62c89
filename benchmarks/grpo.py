"""Compare a GRPO step with TRL's and with one prompt at a time: the project's second document.

    python -m benchmarks grpo --beta 0 --brief
    python -m benchmarks grpo --model gpt2 --json grpo.json --repeats 9
    python -m benchmarks grpo --brief --experiment grpo_rtx4090

The work: 8 chess prompts x 8 samples of one length, temperature 1, a reward by edit distance, KL to
a reference model (--beta 0: none), one AdamW step, on a byte Llama or GPT-2 of random weights.

The first rows are the document's table, cumulative: one prompt at a time (generate for each prompt,
then its rows through the model); this project in float32; then one switch more a row. TRL 1.16
stands beside them (pip install -e .[peers]; its trainer as it is). The others have each switch
alone, against float32. Each row runs in a process of its own, so that its peak memory is its own.

Deviation: all rows take the same rollout (made in float32) and make four optimizer passes over it;
it is mean |loss - loss of float32| over mean |loss of float32| from the second pass on (in the
first, on policy, the loss is zero).
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from Levenshtein import ratio
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks import measure
from benchmarks.models import build, generate, save
from common.config import ConfigError, Run, shipped
from common.device import native_bf16
from common.distributed import Context, launch
from common.model import encode_prompts
from common.parts import Parts, open_parts
from common.run import RunState, Timer
from common.task import FOR_OTHERS, Example
from common.tasks import Chess
from ddp_bench.step import Clock
from grpo.collect import Batch, Collector
from grpo.loss import advantages, policy_loss
from grpo.policy import Policy
from launch import compose, train

PROMPTS, SAMPLES = 8, 8
NEW = {"small": 64, "quick": 8, "gpt2": 144, "0.5b": 144}  # new tokens of every completion
CLIP, LR = 0.2, 1e-4
PASSES = 4  # of the loss curve
PHASES = ("rollout", "reward", "reference", "train", "update")
PLAIN, OURS, PEER = "one prompt at a time", "float32", "TRL 1.16"


class Positions(Chess):
    """The chess rows, scored like the peer's script: random bytes earn something. A random number
    is added, so that groups are alive even where few of the tokens are bytes: a group without
    differences would not be trained.

    Args: times: the number of questions in a prompt: its own or, with `alike`, other ones before
    it, the same in all prompts.
    """

    def __init__(self, times: int = 1, alike: bool = False) -> None:
        ours = {"positions": 256, "test_positions": 8, "weights": {"levenshtein": 1.0}}
        settings: dict[str, Any] = dict(shipped("task/chess.yaml")) | ours
        for name in ("_target_", *FOR_OTHERS):
            settings.pop(name, None)
        super().__init__(**settings)
        self.components = {"levenshtein": self.rewards}
        self.times, self.first, self.draw = times, None, random.Random(0)
        if alike:
            self.first = next(iter(self.examples("train"))).question

    def prompt(self, example: Example) -> str:
        """Return the question after other questions."""
        before = [self.first or example.question] * (self.times - 1)
        return " ".join([*before, example.question])

    def rewards(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        """Return the similarity of each completion to the answer, and a little chance."""
        pairs = zip(examples, completions, strict=True)
        return [ratio(text, e.answer) + 0.01 * self.draw.random() for e, text in pairs]


def write_model(name: str, folder: str) -> dict[str, Any]:
    """Write a model, and a byte tokenizer without a stop token. Returns the model's sizes."""
    known = name in ("gpt2", "0.5b")  # which keep their vocabulary
    changes = {} if known else {"vocab_size": 258, "tie_word_embeddings": True}
    parameters = save(build(name, pad_token_id=256, **changes), folder)
    sizes = {"model": name, "parameters": parameters, "prompts": PROMPTS, "samples": SAMPLES}
    return sizes | {"new_tokens": NEW[name]}


# --- one row, in a process of its own


def run_of(work: dict[str, Any], *changes: str) -> Run:
    """Return the run of a row."""
    settings = {
        "algo": "grpo",
        "model": "hf",
        "model.path": work["model"],
        "hardware": "cpu" if work["device"] == "cpu" else "auto",
        "algo.resample_rounds": 0,
        "algo.prompts_per_step": work["prompts"],
        "algo.samples_per_prompt": work["samples"],
        "algo.sampling.max_new_tokens": work["new"],
        "algo.train_rows": work["prompts"] * work["samples"],
        "algo.kl.beta": work["beta"],
        "algo.lr": work["lr"],
        "algo.warmup_steps": 0,
        "algo.loss": "grpo",
        "evaluate.examples": 1,
        "checkpoint.every": 0,
    }
    return compose([*(f"{key}={value}" for key, value in settings.items()), *changes])


def ours(work: dict[str, Any]) -> dict[str, Any]:
    """Measure `launch.train` unchanged, then its loss curve. The first step is warm-up."""
    memory = measure.Peak()
    run = run_of(work, f"algo.steps={work['steps'] + 1}", *work["switches"])
    folder = Path(tempfile.mkdtemp(dir=work["folder"]))
    train(run, folder / "run", task=Positions(work["times"], work["alike"]))
    peak = memory.gb()
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()[1:]
    events = [json.loads(line) for line in lines]
    assert all(event["length"] == work["new"] for event in events), "every row has the same length"
    if run.opt.ddp.enabled:
        # ranks are processes of their own: what the first one logged, on a CPU less its imports
        imports = (memory.before or 0) / 2**30 if work["device"] == "cpu" else 0.0
        peak = max(event["peak_memory_gb"] for event in events) - imports
    if not work["curve"]:
        return {"seconds": [event["seconds"] for event in events], "memory": peak}
    passes = f"algo.steps={PASSES}", f"algo.num_iterations={PASSES}"
    curve_run = run_of(work, *passes, *work["switches"])
    return {
        "seconds": [event["seconds"] for event in events],
        "phases": {k: median(e["phase_seconds"].get(k, 0.0) for e in events) for k in PHASES},
        "memory": peak,
        "losses": launch("benchmarks.grpo:curve", curve_run, folder / "curve", work),
    }


class Alone:
    """A step without a session: an index, a progress, and a timer."""

    def __init__(self, index: int) -> None:
        self.index, self.phase = index, Timer()
        self.state = RunState(own={"cursor": 0, "visits": {}})
        self.progress = 0.0

    def used(self, **_: int) -> None:
        """Count nothing."""


def open_policy(run: Run, context: Context) -> tuple[Parts, Policy]:
    """Return the model and its policy before its first step."""
    parts = open_parts(run, context, Positions(), reference=bool(run.algo.kl.beta))
    return parts, Policy(parts, run.algo)


def collect(run: Run, context: Context, work: dict[str, Any]) -> Batch:
    """Return this rank's groups of the fixed rollout: a first step in float32."""
    parts, policy = open_policy(run_of(work), context)
    collected = Collector(parts, parts.run.algo, policy.row_limit).collect(Alone(0))  # type: ignore[arg-type]
    assert collected.batch is not None
    return collected.batch


def curve(run: Run, context: Context, work: dict[str, Any]) -> list[float]:
    """Return the losses of the passes over the fixed rollout; called on every rank."""
    batch = collect(run, context, work)
    advantage = advantages(batch.scores.reward, "group")
    _, policy = open_policy(run, context)
    steps: list[Any] = [Alone(index) for index in range(PASSES)]
    return [policy.step(batch, advantage, policy_loss, step)["loss"] for step in steps]


class Plain:
    """The document's model and optimizer: one prompt's rows at a time, with gradients
    accumulated.
    """

    def __init__(self, work: dict[str, Any]) -> None:
        self.new, self.beta, self.device = work["new"], work["beta"], torch.device(work["device"])
        # eval: no dropout
        self.model: Any = AutoModelForCausalLM.from_pretrained(work["model"]).eval()
        self.model.to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR)

    def logps(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities of the new tokens."""
        logits = self.model(input_ids=rows).logits[:, -self.new - 1 : -1]
        return torch.log_softmax(logits, -1).gather(2, rows[:, -self.new :, None])[..., 0]

    def backward(self, rows: torch.Tensor, rewards: list[float], ref: Any, old: Any) -> Any:
        """Add the gradient of one group. Returns its loss and its log-probabilities."""
        advantage = advantages(torch.tensor([rewards]), "group")[0].to(self.device)[:, None]
        logp = self.logps(rows)
        quotient = torch.exp(logp - (logp.detach() if old is None else old))
        clipped = quotient.clamp(1 - CLIP, 1 + CLIP)
        surrogate = torch.minimum(quotient * advantage, clipped * advantage)
        divergence = 0.0 if ref is None else torch.exp(ref - logp) - (ref - logp) - 1
        loss = (self.beta * divergence - surrogate).mean() / PROMPTS
        loss.backward()
        return loss.item(), logp.detach()

    def update(self) -> None:
        """Make an optimizer step."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def baseline(work: dict[str, Any]) -> dict[str, Any]:
    """Measure the document's first state: generate, score and train prompt by prompt."""
    memory = measure.Peak()
    plain, reference = Plain(work), Plain(work)
    reference.model.requires_grad_(False)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work["model"])
    task, device, seconds, phases = Positions(), plain.device, [], []
    examples = task.examples("train")
    for step in range(work["steps"] + 1):
        started, clock = time.perf_counter(), Clock(device)
        for example in examples[step * PROMPTS : (step + 1) * PROMPTS]:
            with clock("rollout"), torch.no_grad():
                encoded = encode_prompts(tokenizer, [task.prompt(example)])
                prompt = torch.tensor(encoded, device=device).expand(SAMPLES, -1)
                lengths = {"max_new_tokens": work["new"], "min_new_tokens": work["new"]}
                new = generate(plain.model, prompt, do_sample=True, top_k=0, **lengths)
                rows = torch.cat((prompt, new), dim=1)
            with clock("reward"):
                texts = tokenizer.batch_decode(new, skip_special_tokens=True)
                rewards = task.rewards([example] * SAMPLES, texts)
            with clock("reference"), torch.no_grad():
                ref = reference.logps(rows) if work["beta"] else None
            with clock("train"):
                plain.backward(rows, rewards, ref, None)
        with clock("update"):
            plain.update()
        phases.append(clock.read())  # waits for the device
        seconds.append(time.perf_counter() - started)
    return {
        "seconds": seconds[1:],
        "phases": {name: median(one[name] for one in phases[1:]) for name in PHASES},
        "memory": memory.gb(),
        "losses": fixed_losses(work),
    }


def fixed_losses(work: dict[str, Any]) -> list[float]:
    """Return the losses of the passes over the fixed rollout."""
    folder = Path(work["folder"]) / "fixed"
    whole: Batch = launch("benchmarks.grpo:collect", run_of(work), folder, work)
    plain, losses, olds = Plain(work), [], {}
    for _ in range(PASSES):
        total = 0.0
        prompts = [rollout.requests.prompts[place] for rollout, place in whole.sources]
        for index, (prompt, rewards) in enumerate(zip(prompts, whole.scores.reward, strict=True)):
            part = slice(index * whole.size, (index + 1) * whole.size)
            start = torch.tensor([prompt] * whole.size)
            rows = torch.cat((start, whole.tokens[part]), dim=1).to(plain.device)
            ref = None if whole.reference is None else whole.reference[part].to(plain.device)
            loss, logp = plain.backward(rows, rewards.tolist(), ref, olds.get(index))
            olds.setdefault(index, logp)
            total += loss
        plain.update()
        losses.append(total)
    return losses


def peer(work: dict[str, Any]) -> dict[str, Any]:
    """Measure TRL's GRPOTrainer on the same rows, model and sizes."""
    memory = measure.Peak()
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = PreTrainedTokenizerFast.from_pretrained(work["model"])
    tokenizer.eos_token = "<eos>"  # it wants one; the model's configuration has none
    task = Positions(work["times"], work["alike"])
    rows = [(task.prompt(row), row.answer) for row in task.examples("train")]
    data = Dataset.from_list([{"prompt": prompt, "answer": answer} for prompt, answer in rows])
    arguments = GRPOConfig(
        **measure.trainer_settings(work),
        per_device_train_batch_size=work["prompts"] * work["samples"] // work["parts"],
        gradient_accumulation_steps=work["parts"],
        num_generations=work["samples"],
        max_completion_length=work["new"],
        bf16=work["half"],
        learning_rate=work["lr"],
        beta=work["beta"],
    )
    watch = measure.Stopwatch()
    trainer = GRPOTrainer(
        model=work["model"],
        reward_funcs=lambda completions, answer, **_: list(map(ratio, completions, answer)),
        args=arguments,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[watch],
    )
    trainer.generation_config.min_new_tokens = work["new"]
    trainer.train()
    return {"seconds": watch.seconds, "phases": {}, "memory": memory.gb(), "losses": None}


def measure_row(work: dict[str, Any]) -> dict[str, Any]:
    """Measure one row in a process of its own, whose output goes to a file."""
    measure.print_to(f"{work['folder']}/rows.log")
    return {PLAIN: baseline, PEER: peer}.get(work["row"], ours)(work)


# --- all rows

SCORING = "scoring.kind=processes"
# The document's table: each row adds one switch to those before it.
CUMULATIVE = {
    "+ amp": "amp",
    "+ parallel rewards": SCORING,
    "+ compile": "compile",
    "+ 2 ranks": "ddp",
}
SWITCHES = ("amp", "tf32", "checkpointing", "offload", "compile")
ALONE: dict[str, list[str]] = {
    **{f"{name} alone": [f"opt=[{name}]"] for name in SWITCHES},
    "AdamW not fused alone": ["algo.optimizer.kwargs={fused: false}"],
    "parallel rewards alone": [SCORING],
}


def list_rows(impossible: dict[str, str], brief: bool, alone: bool) -> dict[str, Any]:
    """Return the settings of each row, or the reason that it cannot run. The document's rows come
    first.

    Args: brief: whether the rows with switches are left out; alone: whether there are rows of each
    switch alone.
    """
    rows: dict[str, Any] = {PLAIN: [], PEER: [], OURS: []}
    opts, others = [], []
    for row, switch in CUMULATIVE.items():
        if brief or switch in impossible:
            rows[row] = impossible.get(switch, "not with --brief")
            continue
        (others if switch == SCORING else opts).append(switch)
        ranks = ["opt.ddp.ranks=2"] if switch == "ddp" else []
        rows[row] = [f"opt=[{','.join(opts)}]", *others, *ranks]
    for row, switches in ALONE.items() if alone else ():
        left_out = "not with --brief" if brief else impossible.get(row.removesuffix(" alone"))
        rows[row] = left_out or switches
    return rows


def find_experiment(name: str, impossible: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the settings of an experiment's row, and the switches that it omits, each with the
    reason.

    Raises: ConfigError if there is no such experiment, or if it is for another algorithm.
    """
    chosen = compose([f"experiment={name}"])
    if chosen.algo.name != "grpo":
        raise ConfigError(
            f"--experiment={name} is of algo={chosen.algo.name}. Give one of GRPO, such as"
            " grpo_rtx4090."
        )
    enabled = chosen.opt.enabled()
    kept = [switch for switch in enabled if switch not in impossible]
    left_out = {switch: impossible[switch] for switch in enabled if switch in impossible}
    return [f"experiment={name}", f"opt=[{','.join(kept)}]"], left_out


def why_not(device: torch.device, quick: bool) -> dict[str, str]:
    """Return the reason per switch that this device cannot use."""
    cuda = device.type == "cuda"
    reasons = {}
    if not cuda:
        reasons["offload"] = "a CPU has no other memory"
        if not native_bf16(device):
            reasons["amp"] = "no native bfloat16 or float16"
    elif torch.cuda.device_count() < 2:
        reasons["ddp"] = "one CUDA device"
    if not cuda or torch.cuda.get_device_capability(device) < (8, 0):
        reasons["tf32"] = "wants a CUDA device of compute capability 8.0"
    if (reason := "not with --quick" if quick else measure.why_no_compiler(device)) is not None:
        reasons["compile"] = reason
    return reasons


def run(options: argparse.Namespace) -> measure.Report:
    """Measure every row; the document's rows in two rounds, so that slow minutes affect all of
    them.
    """
    name = "quick" if options.quick else options.model
    report = measure.Report("grpo", options, 5, dtype="float32", beta=options.beta)
    device = report.device
    impossible = why_not(device, options.quick)
    rows = list_rows(impossible, options.brief, alone=not options.cumulative)
    if options.experiment:
        if not options.beta:
            impossible.setdefault("offload", "no reference model with --beta 0")
        row = f"experiment={options.experiment}"
        rows[row], left_out = find_experiment(options.experiment, impossible)
        for switch, reason in left_out.items():
            report.skip(f"{row}: {switch}", "s/step", reason)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = {"model": f"{folder}/model", "folder": folder, "new": NEW[name], "half": False}
        work |= {"prompts": PROMPTS, "samples": SAMPLES, "times": 1, "alike": False, "parts": 1}
        work |= {"lr": LR, "curve": True}
        work |= {"steps": report.repeats, "device": device.type, "beta": options.beta}
        report.conditions["sizes"] = write_model(name, work["model"])
        for turn in range(1 if options.quick or options.cumulative else 2):
            for row, switches in rows.items():
                if isinstance(switches, str) or (turn and row in ALONE):
                    continue
                measure.progress(f"round {turn + 1}: {row}")
                given = work | {"row": row, "switches": switches}
                try:
                    one = measure.in_new_process(__name__, measure_row, given)
                except Exception as error:  # whatever it is, the other rows stand
                    rows[row] = measure.describe(error)
                    found.pop(row, None)
                    continue
                before = found[row]["seconds"] if row in found else []
                found[row] = one | {"seconds": before + one["seconds"]}
    measure.progress("")
    if OURS not in found:
        raise RuntimeError(f"{OURS}: {rows[OURS]}")
    add_rows(report, found)
    for row, reason in rows.items():
        if row not in found:
            report.skip(row, "s/step", reason)
    return report


def add_rows(report: measure.Report, found: dict[str, dict[str, Any]]) -> None:
    """Add the rows, the deviations of the loss curves and the raw numbers."""
    middle = {row: median(one["seconds"]) for row, one in found.items()}
    tokens = PROMPTS * SAMPLES * report.conditions["sizes"]["new_tokens"]
    losses = found[OURS]["losses"]
    curves = {row: one["losses"] for row, one in found.items()}
    deviations = {row: curve and deviation(curve, losses) for row, curve in curves.items()}
    for row, one in found.items():
        beside = row in ALONE or row.startswith("experiment=")
        base = OURS if beside or PLAIN not in found else PLAIN
        against = () if row == base else (base, middle[base] / middle[row])
        report.add(row, middle[row], "s/step", *against)
        for phase, seconds in one["phases"].items():
            report.add(row, seconds, f"{phase}, s")
        report.add(row, tokens / middle[row], "tokens/s")
        report.add(row, one["memory"], "GB")
        report.add(row, deviations[row], "share of deviation")
    if PEER in found:
        against = middle[PEER] / middle[OURS]
        report.add("float32 against TRL", middle[OURS], "s/step", PEER, against)
    report.notes += [
        f"ratio: against {PLAIN}, and of a switch alone or an experiment against float32.",
        "deviation: mean |loss - float32's| over mean |float32's|, passes 2 to 4 over one rollout.",
        "GB: peak of the row's process (with 2 ranks of the first), on a CPU without its imports.",
    ]
    report.conditions["loss_deviation"] = deviations
    for key in ("phases", "memory", "losses", "seconds"):
        report.conditions[key] = {row: one[key] for row, one in found.items()}


def deviation(losses: list[float], base: list[float]) -> float:
    """Return the deviation of a loss curve from float32's, from the second pass on."""
    pairs = list(zip(losses, base, strict=True))[1:]
    return fmean(abs(a - b) for a, b in pairs) / fmean(abs(b) for _, b in pairs)
