"""A GRPO step beside TRL's and beside one prompt at a time, on the same work: the project's second document, measured.

    python -m benchmarks grpo
    python -m benchmarks grpo --json grpo.json --repeats 9

The work: 8 chess prompts of about 75 byte tokens x 8 samples x exactly 64 new tokens, temperature 1, a reward by edit distance,
one AdamW step, no reference model. Llama of d=256, 6 layers, 8 heads, byte vocabulary, random weights.

Rows: TRL 1.16 (pip install -e .[peers]; its trainer as it is, in a process of its own with the same threads); one prompt at a
time (generate for each prompt, then a padded forward of its rows: the document's baseline); this project in float32; then
one switch more a row: amp, rewards scored in processes, compiled decoding, two ranks. A switch that this device
cannot use is skipped with the reason. Every row's reward curve is compared with that of float32 (on policy the loss is zero but for rounding).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from Levenshtein import ratio
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import measure
from common import models
from common.precision import native_bf16
from common.tasks import Example
from launch import compose, train

FULL: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 8}
QUICK: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
PROMPTS, SAMPLES, NEW = 8, 8, 64


class Positions:
    """The task of the comparison: the chess rows, scored by edit distance, as the peer's script scores them."""

    name = "positions"

    def __init__(self) -> None:
        from common.tasks.chess import Chess

        weights = {"levenshtein": 1.0}
        settings: dict[str, Any] = {"path": None, "test_path": None, "positions": 256, "test_positions": 8, "plies": 20}
        self.rows = Chess(template="{fen} {move} =>", weights=weights, share_right=1.0, **settings).examples("train")

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


def folder_of(sizes: dict[str, Any], where: Path) -> Path:
    """A model folder of random weights, with the byte tokenizer and no stop token, so that all rows have equal length."""
    torch.manual_seed(0)
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
    tokenizer = models.byte_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(where)
    return where


def ours(model: Path, steps: int, switches: list[str], work: Path) -> dict[str, Any]:
    """Run `launch.train` and return seconds a step, by phase, and losses (the first step is warm-up)."""
    overrides = [
        "algo=grpo",
        "model=hf",
        f"model.path={model}",
        "algo.resample_rounds=0",
        f"algo.prompts_per_step={PROMPTS}",
        f"algo.samples_per_prompt={SAMPLES}",
        f"algo.sampling.max_new_tokens={NEW}",
        f"algo.micro_batch_rows={PROMPTS * SAMPLES}",
        f"algo.steps={steps + 1}",
        "algo.lr=1e-4",
        "algo.warmup_steps=0",
        "algo.loss=grpo",
        "evaluate.examples=1",
        "checkpoint.every=0",
        *switches,
    ]
    train(compose(overrides), work, task=Positions())
    events = [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()][1:]
    assert all(event["length"] == NEW for event in events), "every row has the same length"
    phases = {k: [e["phase_seconds"].get(k, 0.0) for e in events] for k in ("rollout", "reward", "train", "update")}
    return {
        "seconds": [event["seconds"] for event in events],
        "phases": {name: measure.quantile(values, 0.5) for name, values in phases.items()},
        "losses": [event["loss"] for event in events],
        "rewards": [event["reward"] for event in events],
        "memory": max(event["peak_memory_gb"] for event in events),
    }


def one_prompt_at_a_time(model_folder: Path, steps: int) -> dict[str, Any]:
    """The document's baseline: model.generate a prompt, its padded rows through the model, gradients accumulated."""
    model: Any = LlamaForCausalLM.from_pretrained(model_folder)
    tokenizer = models.byte_tokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    task = Positions()
    seconds, rollout, training = [], [], []
    for step in range(steps + 1):
        started = time.perf_counter()
        sampling = 0.0
        optimizer.zero_grad()
        for example in task.rows[step * PROMPTS : (step + 1) * PROMPTS]:
            begun = time.perf_counter()
            prompt = torch.tensor(models.encode_prompts(tokenizer, [task.prompt(example)]))
            with torch.no_grad():
                rows = model.generate(
                    prompt.expand(SAMPLES, -1),
                    attention_mask=torch.ones_like(prompt).expand(SAMPLES, -1),
                    max_new_tokens=NEW,
                    min_new_tokens=NEW,
                    do_sample=True,
                    pad_token_id=256,
                )
            sampling += time.perf_counter() - begun
            texts = tokenizer.batch_decode(rows[:, prompt.shape[1] :], skip_special_tokens=True)
            rewards = torch.tensor([task.reward(example, text) for text in texts])
            advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            logits = model(input_ids=rows).logits[:, prompt.shape[1] - 1 : -1]
            logp = torch.log_softmax(logits, -1).gather(2, rows[:, prompt.shape[1] :, None])[..., 0]
            loss = -(torch.exp(logp - logp.detach()) * advantage[:, None]).mean() / PROMPTS
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seconds.append(time.perf_counter() - started)
        rollout.append(sampling)
        training.append(seconds[-1] - sampling)
    return {
        "seconds": seconds[1:],
        "phases": {"rollout": measure.quantile(rollout[1:], 0.5), "train": measure.quantile(training[1:], 0.5)},
    }


def peer(model_folder: Path, steps: int) -> dict[str, Any]:
    """TRL's GRPOTrainer on the same rows, model and sizes. Runs in a process of its own: see `main` below."""
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    task = Positions()
    data = Dataset.from_list([{"prompt": row.question, "answer": row.answer} for row in task.rows])
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=NEW,
        max_steps=steps + 1,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        learning_rate=1e-4,
        beta=0.0,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    seconds: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.started)

    trainer = GRPOTrainer(
        model=LlamaForCausalLM.from_pretrained(model_folder),
        reward_funcs=lambda completions, answer, **_: [ratio(c, a) for c, a in zip(completions, answer, strict=True)],
        args=arguments,
        train_dataset=data,
        processing_class=models.byte_tokenizer(),
        callbacks=[Clock()],
    )
    trainer.generation_config.min_new_tokens = NEW
    trainer.train()
    return {"seconds": seconds[1:], "phases": {}}


def alone(what: str, model: Path, steps: int) -> dict[str, Any] | str:
    """One of the peers in a process of its own; a reason where it cannot run."""
    command = [sys.executable, "-m", "benchmarks.grpo", what, str(model), str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TOKENIZERS_PARALLELISM": "false"})
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return (
        json.loads(lines[-1])
        if done.returncode == 0 and lines
        else (done.stderr.strip().splitlines() or ["no output"])[-1][:120]
    )


def run(options: argparse.Namespace) -> measure.Report:
    """Measure every row in turn; two rounds, so that a slow minute does not fall on one row alone."""
    sizes = QUICK if options.quick else FULL
    steps = options.repeats or (2 if options.quick else 5)
    device = measure.find_device(options.device)
    cases: dict[str, Any] = {
        "one prompt at a time": "baseline",
        "TRL 1.16": "peer",
        "float32": [],
        "+ amp": ["opt=[amp]"],
        "+ parallel rewards": ["opt=[amp]", "scoring.kind=processes"],
        "+ compile": ["opt=[amp,compile]", "scoring.kind=processes"],
        "+ 2 ranks": ["opt=[amp,ddp]", "opt.ddp.ranks=2"],
        "float32, 2 ranks": ["opt=[ddp]", "opt.ddp.ranks=2"],
    }
    skipped: dict[str, str] = {}
    if device.type == "cpu" and not native_bf16(device):
        skipped |= {name: "no native bfloat16" for name in cases if "amp" in str(cases[name])}
    if (reason := measure.why_no_compiler(device)) is not None or options.quick:
        skipped["+ compile"] = reason or "not with --quick"
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = folder_of(sizes, Path(folder) / "model")
        for turn in range(1 if options.quick else 2):
            for name, case in cases.items():
                if name in skipped:
                    continue
                measure.progress(f"round {turn + 1}: {name}")
                if isinstance(case, str):
                    one = alone(case, model, steps)
                    if isinstance(one, str):
                        skipped[name] = one
                        continue
                else:
                    quiet = os.dup(1)
                    with open(os.devnull, "w") as nowhere:
                        os.dup2(nowhere.fileno(), 1)  # the plan and summary of each run
                        try:
                            one = ours(
                                model, steps, case, Path(folder) / f"{turn}-{len(found)}-{name.replace(' ', '')}"
                            )
                        finally:
                            os.dup2(quiet, 1)
                kept = found.setdefault(name, one | {"seconds": []})
                kept["seconds"] += one["seconds"]
    measure.progress("")
    return report(found, skipped, sizes, steps, device)


def report(
    found: dict[str, dict[str, Any]], skipped: dict[str, str], sizes: dict[str, Any], steps: int, device: torch.device
) -> measure.Report:
    """The table and the JSON."""
    base = found["float32"]
    tokens = PROMPTS * SAMPLES * NEW
    lines = [f"{'':22}{'s/step':>8}{'p90':>7}{'rollout':>9}{'train':>7}{'tokens/s':>10}{'dev.':>11}{'ratio':>7}"]
    rows, deviations = [], {}
    slowest = found.get("one prompt at a time", base)
    for name, one in found.items():
        p50 = measure.quantile(one["seconds"], 0.5)
        gap = deviation(one, base)
        deviations[name] = gap
        speed = measure.quantile(slowest["seconds"], 0.5) / p50
        phases = one["phases"]
        lines.append(
            f"{name:22}{p50:8.2f}{measure.quantile(one['seconds'], 0.9):7.2f}"
            f"{phases.get('rollout', float('nan')):9.2f}{phases.get('train', float('nan')):7.2f}{tokens / p50:10,.0f}"
            f"{'-' if gap is None else f'{gap:.2%}':>11}{speed:6.1f}x"
        )
        rows.append(measure.Row("grpo", name, p50, "s/step", "one prompt at a time", speed))
    for name, reason in skipped.items():
        lines.append(f"{name:22}skipped: {reason}")
        rows.append(measure.Row("grpo", name, None, "s/step"))
    if "TRL 1.16" in found:
        ratio_to_peer = measure.quantile(found["TRL 1.16"]["seconds"], 0.5) / measure.quantile(base["seconds"], 0.5)
        lines.append(f"\nfloat32 against TRL 1.16: {ratio_to_peer:.2f}x")
        rows.append(
            measure.Row(
                "grpo",
                "float32 against TRL",
                measure.quantile(base["seconds"], 0.5),
                "s/step",
                "TRL 1.16",
                ratio_to_peer,
            )
        )
    lines.append("dev.: mean |reward - float32's| over mean |float32's|, from the same seeds, over the steps timed.")
    conditions = measure.conditions(
        device,
        sizes=sizes | {"prompts": PROMPTS, "samples": SAMPLES, "new_tokens": NEW},
        steps=steps,
        skipped=skipped,
        reward_deviation=deviations,
        phases={name: one["phases"] for name, one in found.items()},
        seconds={name: one["seconds"] for name, one in found.items()},
    )
    return measure.Report("\n".join(lines), conditions, rows)


def deviation(one: dict[str, Any], base: dict[str, Any]) -> float | None:
    """How far a row's mean rewards are from float32's, step by step: on policy the loss itself is zero but for rounding."""
    if "rewards" not in one:
        return None
    pairs = list(zip(one["rewards"], base["rewards"], strict=False))
    return sum(abs(a - b) for a, b in pairs) / max(1e-12, sum(abs(b) for _, b in pairs))


if __name__ == "__main__":
    which, where, count = sys.argv[1:]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    print(json.dumps((peer if which == "peer" else one_prompt_at_a_time)(Path(where), int(count))))
