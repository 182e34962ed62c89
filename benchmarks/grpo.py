"""A GRPO step beside TRL's and beside one prompt at a time, on the same work: the project's second
document, measured.

    python -m benchmarks grpo
    python -m benchmarks grpo --beta 0 --brief
    python -m benchmarks grpo --model gpt2 --json grpo.json --repeats 9

The work: 8 chess prompts of about 75 byte tokens x 8 samples x exactly 64 new tokens, temperature
1, a reward by edit distance, KL to a reference model (--beta 0: none), one AdamW step. Llama of
d=256, 6 layers, 8 heads, byte vocabulary, random weights. --model gpt2: GPT-2 with 124M parameters
and 50,257 tokens, 144 new tokens.

The first table is the document's, cumulative: one prompt at a time (generate for each prompt, then
its rows through the model); this project in float32; then one switch more a row: amp, rewards
scored in processes, compile, two ranks. TRL 1.16 stands beside it (pip install -e .[peers]; its
trainer as it is). The second table has each switch alone against float32. A switch that this device
cannot use is skipped with the reason. Each row runs in a process of its own, one after the other,
so that its peak memory is its own.

Deviation: all rows take the same fixed rollout (made once, in float32) and make four optimizer
passes over it; it is mean |loss - loss of float32| over mean |loss of float32| from the second pass
on (in the first, on policy, the loss is zero).
"""

import argparse
import json
import os
import pickle
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from Levenshtein import ratio
from tokenizers import Tokenizer
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

from benchmarks import measure
from common.config import Run
from common.distributed.context import Context
from common.distributed.workers import launch
from common.lm import LM
from common.model import logprobs
from common.model.prompts import encode_prompts
from common.model.tiny import byte_tokenizer
from common.precision import native_bf16
from common.tasks import Example
from common.timer import Timer
from grpo.loss import advantages, policy_loss
from grpo.policy import Policy
from grpo.rollouts import Collector, Rollouts
from launch import compose, train

SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
}
QUICK: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
PROMPTS, SAMPLES = 8, 8
NEW = {"small": 64, "quick": 8, "gpt2": 144}  # new tokens of every completion
CLIP, LR = 0.2, 1e-4
PASSES = 4  # of the loss curve
PHASES = ("rollout", "reward", "reference", "train", "update")
PLAIN, OURS, PEER = "one prompt at a time", "float32", "TRL 1.16"


class Positions:
    """The task of the comparison: the chess rows, scored by edit distance, as the peer's script
    scores them.
    """

    name = "positions"

    def __init__(self) -> None:
        from common.tasks.chess import Chess

        weights = {"levenshtein": 1.0}
        settings: dict[str, Any] = {
            "path": None,
            "test_path": None,
            "positions": 256,
            "test_positions": 8,
            "plies": 20,
        }
        self.rows = Chess(
            template="{fen} {move} =>", weights=weights, share_right=1.0, **settings
        ).examples("train")

    def examples(self, split: str) -> list[Example]:
        """The same rows for both splits: nothing is evaluated."""
        return list(self.rows)

    def prompt(self, example: Example) -> str:
        """FEN and move."""
        return example.question

    def reward(self, example: Example, completion: str) -> float:
        """Similarity to the answer; random bytes earn something, so groups are alive."""
        return ratio(completion, example.answer)

    def metrics(self, examples: list[Example], completions: list[str]) -> dict[str, float]:
        """Not looked at."""
        return {"none": 0.0}


def folder_of(name: str, where: Path) -> dict[str, Any]:
    """Write a model folder of random weights; returns its sizes. No stop token, so that all rows
    have equal length.
    """
    torch.manual_seed(0)
    disable_progress_bar()
    tokenizer = byte_tokenizer()
    if name == "gpt2":
        config = GPT2Config(bos_token_id=None, eos_token_id=None, pad_token_id=256)
        GPT2LMHeadModel(config).save_pretrained(where)
        tokenizer = widened(tokenizer, config.vocab_size)
        sizes: dict[str, Any] = {"model": "GPT-2 124M", "vocabulary": config.vocab_size}
    else:
        sizes = QUICK if name == "quick" else SMALL
        config = LlamaConfig(
            vocab_size=258,
            num_key_value_heads=sizes["num_attention_heads"],
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=256,
            **sizes,
        )
        LlamaForCausalLM(config).save_pretrained(where)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(where)
    return sizes | {"prompts": PROMPTS, "samples": SAMPLES, "new_tokens": NEW[name]}


def widened(tokenizer: Any, size: int) -> Any:
    """The byte tokenizer with as many ids as GPT-2: the further ones are pairs of letters, which
    decode but never encode.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    letters = [
        chr(i)
        for i in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x100, 0x130))
    ]
    pairs = (one + other for one in letters for other in letters)
    content["model"]["vocab"] |= {pair: i for i, pair in zip(range(258, size), pairs, strict=False)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)),
        clean_up_tokenization_spaces=False,
        pad_token="<pad>",
        eos_token="<eos>",
    )


# --- one row, in a process of its own


def run_of(work: dict[str, Any], *changes: str) -> Run:
    """The run of a row."""
    return compose(
        [
            "algo=grpo",
            "model=hf",
            f"model.path={work['model']}",
            f"hardware={'cpu' if work['device'] == 'cpu' else 'auto'}",
            "algo.resample_rounds=0",
            f"algo.prompts_per_step={PROMPTS}",
            f"algo.samples_per_prompt={SAMPLES}",
            f"algo.sampling.max_new_tokens={work['new']}",
            f"algo.train_rows={PROMPTS * SAMPLES}",
            f"algo.kl.beta={work['beta']}",
            f"algo.lr={LR}",
            "algo.warmup_steps=0",
            "algo.loss=grpo",
            "evaluate.examples=1",
            "checkpoint.every=0",
            *changes,
        ]
    )


def ours(work: dict[str, Any]) -> dict[str, Any]:
    """`launch.train` as it is: seconds per step, by phase, peak memory; then the loss curve. The
    first step is warm-up.
    """
    switches = work["switches"]
    if work["full"]:
        logprobs.token_logprobs = with_full_logits
    memory = measure.Peak()
    run = run_of(work, f"algo.steps={work['steps'] + 1}", *switches)
    folder = Path(tempfile.mkdtemp(dir=work["folder"]))
    train(run, folder / "run", task=Positions())
    single = not run.opt.ddp.enabled
    peak = memory.gb() if single else None
    events = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ][1:]
    assert all(event["length"] == work["new"] for event in events), "every row has the same length"
    if (
        peak is None
        # ranks are processes of their own: what the first one logged, on a CPU less what its
        # imports take
    ):
        imports = (memory.before or 0) / 2**30 if work["device"] == "cpu" else 0.0
        peak = max(event["peak_memory_gb"] for event in events) - imports
    curve_run = run_of(work, f"algo.steps={PASSES}", f"algo.num_iterations={PASSES}", *switches)
    return {
        "seconds": [event["seconds"] for event in events],
        "phases": {
            k: measure.quantile([e["phase_seconds"].get(k, 0.0) for e in events], 0.5)
            for k in PHASES
        },
        "memory": peak,
        "losses": launch("benchmarks.grpo:curve", curve_run, folder / "curve", Positions()),
    }


def with_full_logits(
    model: Any, groups: logprobs.Groups, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As logprobs.token_logprobs, but the logits of all tokens exist at once, and their softmax is
    kept for the backward pass.
    """
    logits = (
        model.get_output_embeddings()(logprobs.hidden_states(model, groups)).float() / temperature
    )
    logp = torch.log_softmax(logits, -1)
    entropy = -(logp.exp() * logp).sum(-1)
    out = []
    for values in (logp.gather(1, groups.targets[:, None])[:, 0], entropy):
        out.append(values.new_zeros(groups.mask.shape).masked_scatter(groups.mask, values))
    return out[0], out[1]


class Alone:
    """A step without a session: an index, and a clock by phase."""

    def __init__(self, index: int) -> None:
        self.index, self.phase = index, Timer()
        self.state = {"cursor": 0}

    def used(self, **_: int) -> None:
        """Count nothing."""


def policy_of(run: Run, context: Context, task: Any) -> tuple[LM, Policy]:
    """Make the model and its policy before its first step."""
    lm = LM(run, context, task, reference=bool(run.algo.kl.beta))
    lm.read_examples()
    return lm, Policy(lm, run.algo)


def curve(run: Run, context: Context, task: Any) -> list[float]:
    """Return the losses of the passes over the fixed rollout; called in every rank."""
    lm, policy = policy_of(run, context, task)
    whole: Rollouts = pickle.loads((Path(lm.name).parent / "rollout.pickle").read_bytes())
    mine = share(whole, context)
    advantage = advantages(mine.rewards, "group")
    steps: list[Any] = [Alone(index) for index in range(PASSES)]
    return [policy.step(mine, advantage, policy_loss, step)["loss"] for step in steps]


def share(whole: Rollouts, context: Context) -> Rollouts:
    """Return this rank's groups of a rollout that one rank made."""
    rank, ranks, device = context.rank, context.world_size, context.device.device
    groups = list(range(rank, len(whole.prompts), ranks))
    rows = [group * whole.size + row for group in groups for row in range(whole.size)]
    return replace(
        whole,
        examples=[whole.examples[group] for group in groups],
        prompts=[whole.prompts[group] for group in groups],
        tokens=whole.tokens[rows],
        lengths=whole.lengths[rows],
        logprobs=whole.logprobs[rows].to(device),
        reference=None if whole.reference is None else whole.reference[rows].to(device),
        carries=whole.carries[rows],
        scores=[whole.scores[group] for group in groups],
        places=groups,
        groups_per_rank=[len(range(r, len(whole.prompts), ranks)) for r in range(ranks)],
    )


def make_rollout(work: dict[str, Any]) -> dict[str, Any]:
    """Leave the fixed rollout beside the model."""
    launch(
        "benchmarks.grpo:roll",
        run_of(work, "algo.steps=1"),
        Path(work["folder"]) / "roll",
        Positions(),
    )
    return {}


def roll(run: Run, context: Context, task: Any) -> None:
    """Keep the groups of a first step, in float32."""
    lm, policy = policy_of(run, context, task)
    step: Any = Alone(0)
    rollouts = Collector(lm, run.algo, policy.limit).collect(step)
    assert rollouts is not None
    rollouts.logprobs = rollouts.logprobs.cpu()
    if rollouts.reference is not None:
        rollouts.reference = rollouts.reference.cpu()
    (Path(lm.name).parent / "rollout.pickle").write_bytes(pickle.dumps(rollouts))


class Plain:
    """The document's model and optimizer: one prompt's rows at a time, gradients accumulated."""

    def __init__(self, work: dict[str, Any]) -> None:
        self.new, self.beta, self.device = work["new"], work["beta"], torch.device(work["device"])
        kind: Any = GPT2LMHeadModel if work["name"] == "gpt2" else LlamaForCausalLM
        # eval: no dropout
        self.model: Any = kind.from_pretrained(work["model"]).to(self.device).eval()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR)

    def logps(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities of the new tokens."""
        logits = self.model(input_ids=rows).logits[:, -self.new - 1 : -1]
        return torch.log_softmax(logits, -1).gather(2, rows[:, -self.new :, None])[..., 0]

    def backward(
        self,
        rows: torch.Tensor,
        rewards: list[float],
        ref: torch.Tensor | None,
        old: torch.Tensor | None,
    ) -> Any:
        """Add the gradient of one group. Returns its loss and its log-probabilities."""
        advantage = advantages(torch.tensor([rewards]), "group")[0].to(self.device)[:, None]
        logp = self.logps(rows)
        quotient = torch.exp(logp - (logp.detach() if old is None else old))
        surrogate = torch.minimum(
            quotient * advantage, quotient.clamp(1 - CLIP, 1 + CLIP) * advantage
        )
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
    """The document's start: model.generate a prompt, score, its rows through both models, gradients
    accumulated.
    """
    memory = measure.Peak()
    plain, reference = Plain(work), Plain(work)
    reference.model.requires_grad_(False)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work["model"])
    task, device, seconds, phases = Positions(), plain.device, [], []
    for step in range(work["steps"] + 1):
        started, clock = time.perf_counter(), Clock(device)
        for example in task.rows[step * PROMPTS : (step + 1) * PROMPTS]:
            with clock("rollout"), torch.no_grad():
                prompt = torch.tensor(
                    encode_prompts(tokenizer, [task.prompt(example)]), device=device
                )
                rows = plain.model.generate(
                    prompt.expand(SAMPLES, -1),
                    attention_mask=torch.ones_like(prompt).expand(SAMPLES, -1),
                    max_new_tokens=work["new"],
                    min_new_tokens=work["new"],
                    do_sample=True,
                    top_k=0,
                    pad_token_id=256,
                )
            with clock("reward"):
                texts = tokenizer.batch_decode(rows[:, prompt.shape[1] :], skip_special_tokens=True)
                rewards = [task.reward(example, text) for text in texts]
            with clock("reference"), torch.no_grad():
                ref = reference.logps(rows) if work["beta"] else None
            with clock("train"):
                plain.backward(rows, rewards, ref, None)
        with clock("update"):
            plain.update()
        seconds.append(time.perf_counter() - started)
        phases.append(clock.seconds)
    names, middle = PHASES, measure.quantile
    return {
        "seconds": seconds[1:],
        "phases": {name: middle([one[name] for one in phases[1:]], 0.5) for name in names},
        "memory": memory.gb(),
        "losses": fixed_losses(work),
    }


def fixed_losses(work: dict[str, Any]) -> list[float]:
    """Return the losses of the passes over the fixed rollout."""
    plain, losses, olds = Plain(work), [], {}
    whole: Rollouts = pickle.loads((Path(work["model"]).parent / "rollout.pickle").read_bytes())
    assert whole.reference is not None
    for _ in range(PASSES):
        total = 0.0
        for index, (prompt, rewards) in enumerate(zip(whole.prompts, whole.rewards, strict=True)):
            part = slice(index * whole.size, (index + 1) * whole.size)
            start = torch.tensor([prompt] * whole.size)
            rows = torch.cat((start, whole.tokens[part]), dim=1).to(plain.device)
            ref = whole.reference[part].to(plain.device)
            loss, logp = plain.backward(rows, rewards.tolist(), ref, olds.get(index))
            olds.setdefault(index, logp)
            total += loss
        plain.update()
        losses.append(total)
    return losses


class Clock(Timer):
    """Phases that wait for the device, as a loop that works prompt by prompt must to know where its
    time goes.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block, the device's work included."""
        with super().__call__(name):
            yield
            measure.synchronize(self.device)


def peer(work: dict[str, Any]) -> dict[str, Any]:
    """TRL's GRPOTrainer on the same rows, model and sizes."""
    memory = measure.Peak()
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    task, tokenizer = Positions(), PreTrainedTokenizerFast.from_pretrained(work["model"])
    tokenizer.eos_token = "<eos>"  # it wants one; the model's configuration has none
    data = Dataset.from_list([{"prompt": row.question, "answer": row.answer} for row in task.rows])
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(dir=work["folder"]),
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=work["new"],
        max_steps=work["steps"] + 1,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=work["device"] == "cpu",
        bf16=False,
        learning_rate=LR,
        beta=work["beta"],
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    seconds: list[float] = []

    class Stopwatch(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.started)

    trainer = GRPOTrainer(
        model=work["model"],
        reward_funcs=lambda completions, answer, **_: [
            ratio(c, a) for c, a in zip(completions, answer, strict=True)
        ],
        args=arguments,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[Stopwatch()],
    )
    trainer.generation_config.min_new_tokens = work["new"]
    trainer.train()
    return {"seconds": seconds[1:], "phases": {}, "memory": memory.gb(), "losses": None}


def row(work: dict[str, Any]) -> dict[str, Any]:
    """Measure one row in a process of its own. What it prints goes to a file."""
    log = os.open(f"{work['folder']}/rows.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    return {"roll": make_rollout, "baseline": baseline, "peer": peer, "ours": ours}[work["kind"]](
        work
    )


def alone(work: dict[str, Any], **what: Any) -> dict[str, Any] | str:
    """A row in a process of its own; where it cannot run, the reason."""
    try:
        return measure.in_new_process(__name__, row, work | what)
    except Exception as error:  # whatever it is, the other rows stand
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:160]


# --- all rows

AMP, SCORING, COMPILE = "opt=[amp]", "scoring.kind=processes", "opt=[compile]"
CUMULATIVE = {
    "+ amp": "amp",
    "+ parallel rewards": SCORING,
    "+ compile": "compile",
    "+ 2 ranks": "ddp",
}
SWITCHES: dict[str, list[str]] = {
    "amp": [AMP],
    "tf32": ["opt=[tf32]"],
    "checkpointing": ["opt=[checkpointing]"],
    "offload": ["opt=[offload]"],
    "compile": [COMPILE],
    "AdamW not fused": ["algo.optimizer.kwargs={fused: false}"],
    "logits not in chunks": [],
    "parallel rewards": [SCORING],
}


def run(options: argparse.Namespace) -> measure.Report:
    """Measure every row; the first table in two rounds, so that a slow minute does not fall on one
    row alone.
    """
    name = "quick" if options.quick else options.model
    steps = options.repeats or (1 if options.quick else 5)
    device = measure.find_device(options.device)
    conditions = measure.conditions(device, beta=options.beta, steps=steps)
    impossible = why_not(device, options.quick)
    cases: dict[str, dict[str, Any]] = {PLAIN: {"kind": "baseline"}, PEER: {"kind": "peer"}}
    cases[OURS] = {"kind": "ours", "switches": [], "full": False}
    opts, others = [], []
    if options.brief:
        impossible |= dict.fromkeys((*CUMULATIVE.values(), *SWITCHES), "not with --brief")
    for case, switch in CUMULATIVE.items():
        if switch in impossible:
            continue
        if switch == SCORING:
            others.append(switch)
        else:
            opts.append(switch)
        ranks = ["opt.ddp.ranks=2"] if switch == "ddp" else []
        cases[case] = {
            "kind": "ours",
            "switches": [f"opt=[{','.join(opts)}]", *others, *ranks],
            "full": False,
        }
    skipped = {
        case: impossible[switch] for case, switch in CUMULATIVE.items() if switch in impossible
    }
    found: dict[str, dict[str, Any]] = {}
    singles: dict[str, dict[str, Any]] = {}
    reasons: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = {
            "model": f"{folder}/model",
            "folder": folder,
            "name": name,
            "new": NEW[name],
            "steps": steps,
        }
        work |= {"device": device.type, "beta": options.beta}
        sizes = folder_of(name, Path(work["model"]))
        if isinstance(problem := alone(work, kind="roll"), str):
            raise RuntimeError(f"the fixed rollout: {problem}")
        for turn in range(1 if options.quick else 2):
            for case, what in cases.items():
                if case in skipped:
                    continue
                measure.progress(f"round {turn + 1}: {case}")
                one = alone(work, **what)
                if isinstance(one, str):
                    skipped[case] = one
                    continue
                kept = found.setdefault(case, one | {"seconds": []})
                kept["seconds"] += one["seconds"]
        for case, switches in SWITCHES.items():
            if case in impossible or (options.quick and f"+ {case}" in CUMULATIVE):
                reasons[case] = impossible.get(case, "not with --quick")
                continue
            measure.progress(f"alone: {case}")
            one = alone(work, kind="ours", switches=switches, full=case == "logits not in chunks")
            if isinstance(one, str):
                reasons[case] = one
            else:
                singles[case] = one
    measure.progress("")
    conditions |= {"sizes": sizes}
    return report(found, skipped, singles, reasons, conditions)


def why_not(device: torch.device, quick: bool) -> dict[str, str]:
    """Switches that this device cannot use -> the reason."""
    reasons = {}
    cuda = device.type == "cuda"
    if not cuda and not native_bf16(device):
        reasons["amp"] = "no native bfloat16 or float16"
    if not cuda or torch.cuda.get_device_capability(device) < (8, 0):
        reasons["tf32"] = "wants a CUDA device of compute capability 8.0"
    if not cuda:
        reasons["offload"] = "a CPU has no other memory"
    if (reason := "not with --quick" if quick else measure.why_no_compiler(device)) is not None:
        reasons["compile"] = reason
    if cuda and torch.cuda.device_count() < 2:
        reasons["ddp"] = "one CUDA device"
    return reasons


def report(
    found: dict[str, dict[str, Any]],
    skipped: dict[str, str],
    singles: dict[str, dict[str, Any]],
    reasons: dict[str, str],
    conditions: dict[str, Any],
) -> measure.Report:
    """The tables and the JSON."""
    if OURS not in found:
        raise RuntimeError(f"{OURS}: {skipped[OURS]}")
    tokens = PROMPTS * SAMPLES * conditions["sizes"]["new_tokens"]
    text, rows = cumulative(found, skipped, tokens)
    alone_text, alone_rows = one_by_one(found[OURS], singles, reasons)
    losses = found[OURS]["losses"]
    text += (
        "\n\n"
        + alone_text
        + (
            "\n\ndev.: mean |loss - float32's| over mean |float32's|, passes 2 to 4 over one fixed"
            " rollout."
        )
    )
    text += (
        "\nGB: peak memory of the row's process (with 2 ranks of the first one), without its"
        " imports on a CPU."
    )
    everything = found | {f"{name} alone": one for name, one in singles.items()}
    conditions |= {
        "skipped": skipped | {f"{name} alone": reason for name, reason in reasons.items()},
        "loss_deviation": {
            name: deviation(one["losses"], losses) for name, one in everything.items()
        },
    }
    conditions |= {
        key: {name: one[key] for name, one in everything.items()}
        for key in ("phases", "memory", "losses", "seconds")
    }
    return measure.Report(text, conditions, rows + alone_rows)


def cumulative(
    found: dict[str, dict[str, Any]], skipped: dict[str, str], tokens: int
) -> tuple[str, list[measure.Row]]:
    """Return the document's table, and its rows."""
    middle = {name: measure.quantile(one["seconds"], 0.5) for name, one in found.items()}
    base, number = PLAIN if PLAIN in found else OURS, measure.number
    lines, rows = [], []
    for name in (PLAIN, PEER, OURS, *CUMULATIVE):
        if name in skipped:
            lines.append([name, f"skipped: {skipped[name]}"])
            rows.append(measure.Row("grpo", name, None, "s/step"))
            continue
        one, speed = found[name], middle[base] / middle[name]
        of_phases = [number(one["phases"].get(phase)) for phase in PHASES]
        shown = [f"{tokens / middle[name]:,.0f}", number(one["memory"]), gap(one, found[OURS])]
        lines.append([name, number(middle[name]), *of_phases, *shown, f"{speed:.1f}x"])
        rows.append(measure.Row("grpo", name, middle[name], "s/step", base, speed))
    text = measure.table(["", "s/step", *PHASES, "tokens/s", "GB", "dev.", "ratio"], lines)
    if PEER in found:
        against = middle[PEER] / middle[OURS]
        text += f"\n\nfloat32 against {PEER}: {against:.2f}x"
        rows.append(
            measure.Row("grpo", "float32 against TRL", middle[OURS], "s/step", PEER, against)
        )
    return text, rows


def one_by_one(
    base: dict[str, Any], singles: dict[str, dict[str, Any]], reasons: dict[str, str]
) -> tuple[str, list[measure.Row]]:
    """Return the table of each switch alone, and its rows."""
    number, float32 = measure.number, measure.quantile(base["seconds"], 0.5)
    lines, rows = [["float32", number(float32), number(base["memory"]), number(0.0), "1.0x"]], []
    for name in SWITCHES:
        if name in reasons:
            lines.append([name, f"skipped: {reasons[name]}"])
            rows.append(measure.Row("grpo switch", name, None, "s/step"))
            continue
        one = singles[name]
        middle = measure.quantile(one["seconds"], 0.5)
        shown = [number(middle), number(one["memory"]), gap(one, base)]
        lines.append([name, *shown, f"{float32 / middle:.2f}x"])
        rows.append(measure.Row("grpo switch", name, middle, "s/step", OURS, float32 / middle))
    return measure.table(["each alone", "s/step", "GB", "dev.", "ratio"], lines), rows


def gap(one: dict[str, Any], base: dict[str, Any]) -> str:
    """Return the deviation of a row's losses in percent."""
    found = deviation(one["losses"], base["losses"])
    return "-" if found is None else f"{found:.2%}"


def deviation(losses: list[float] | None, base: list[float]) -> float | None:
    """Return how far a loss curve is from float32's, from the second pass on; None where there is
    no curve.
    """
    if losses is None:
        return None
    pairs = list(zip(losses, base, strict=True))[1:]
    return sum(abs(a - b) for a, b in pairs) / sum(abs(b) for _, b in pairs)
