"""RFT's sampling beside `generate`, on the same prompts and with the same number of samples: the
project's third document, measured.

    python -m benchmarks rft
    python -m benchmarks rft --json rft.json --repeats 7

The work: 32 chess prompts of 79 to 82 byte tokens (the longest of 16,000) x 10 samples, temperature
1, up to 80 new tokens, lengths as the model makes them; all completions are verified by the task.
The model is the tiny one that comes with the project, trained on such positions.

Rows: one question at a time, `generate` with num_return_sequences, the cache of free memory cleared
after each (the document's "before"); `generate` for all prompts of a batch together, padded on the
left; this project's sampling stage, its file of samples written; then one switch more a row. Ratios
are of seconds for the whole work; utilisation counts the weights' products of the new tokens alone.
"""

import argparse
import copy
import gc
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import measure
from benchmarks.measure import Case
from common.config import Run
from common.distributed.context import Context
from common.hardware import Device
from common.lm import LM
from common.model.half import narrowed
from common.model.prompts import encode_prompts, stop_ids
from common.precision import native_bf16
from common.sampling.native import Sampler
from launch import compose
from rft.generate import Generator, Store, missing

ONE, BATCHED, OURS = "one question at a time", "generate, batched", "this project"
PROMPTS, SAMPLES, NEW = 32, 10, 80


class Work:
    """The prompts, the model and what every row does with its completions."""

    def __init__(
        self, device: torch.device, prompts: int, samples: int, new: int, rows: int
    ) -> None:
        self.run: Run = compose(
            [
                *("algo=rft", "task=chess"),
                *(
                    "algo.second_round_samples=0",
                    f"algo.samples_per_prompt={samples}",
                    f"algo.chunk_size={samples}",
                ),
                *(f"algo.prompts_per_batch={prompts}", f"algo.rollout_rows={rows}"),
                *(f"algo.sampling.max_new_tokens={new}", "algo.sampling.temperature=1.0"),
            ]
        )
        context = Context(0, 1, Device(device, "", 0.0, True), Path())
        self.lm = LM(self.run, context)
        self.task = self.lm.task
        longest = sorted(
            self.task.examples("train"), key=lambda e: len(self.task.prompt(e)), reverse=True
        )
        self.examples = longest[:prompts]
        self.device = device
        self.model: Any = self.lm.model
        self.tokenizer: Any = self.lm.tokenizer
        self.prompts = encode_prompts(self.tokenizer, [self.task.prompt(e) for e in self.examples])
        self.samples, self.new, self.rows = samples, new, rows
        self.scorer = self.lm.scorer

    def verified(self, rows: list[tuple[int, list[int], bool]]) -> dict[str, int]:
        """Score (prompt, token ids, finished) rows. Returns what the work came to."""
        texts = self.tokenizer.batch_decode([ids for _, ids, _ in rows], skip_special_tokens=True)
        rewards = self.scorer.submit([self.examples[i] for i, _, _ in rows], texts).result().rewards
        accepted = sum(
            r >= 1 - 1e-9 and done for r, (_, _, done) in zip(rewards, rows, strict=True)
        )
        return {
            "samples": len(rows),
            "tokens": sum(len(ids) for _, ids, _ in rows),
            "accepted": accepted,
        }

    @torch.inference_mode()
    def generated(self, batch: int, clear: bool) -> dict[str, int]:
        """`generate` for `batch` prompts at a time."""
        eos = set(stop_ids(self.model, self.tokenizer))
        rows = []
        for start in range(0, len(self.prompts), batch):
            part = self.prompts[start : start + batch]
            width = max(map(len, part))
            pad = self.tokenizer.pad_token_id
            ids = torch.tensor(
                [[pad] * (width - len(p)) + list(p) for p in part], device=self.device
            )
            mask = torch.tensor(
                [[0] * (width - len(p)) + [1] * len(p) for p in part], device=self.device
            )
            made = self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=self.new,
                do_sample=True,
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                num_return_sequences=self.samples,
                pad_token_id=pad,
                eos_token_id=sorted(eos),
            )[:, width:]
            for row, tokens in enumerate(made.tolist()):
                end = next((i + 1 for i, token in enumerate(tokens) if token in eos), None)
                rows.append((start + row // self.samples, tokens[:end], end is not None))
            if clear:
                gc.collect()
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
        return self.verified(rows)

    def ours(self, compute: torch.dtype, compiled: str | None) -> Any:
        """The sampling stage, samples written to a file. Returns a function that does it once."""
        lm = copy.copy(self.lm)
        lm.engine = Sampler(
            narrowed(lm.model, compute),
            pad_id=self.tokenizer.pad_token_id,
            stop_ids=stop_ids(lm.model, self.tokenizer),
            rows=self.rows,
            compile_mode=compiled,
            graphs=True,
        )

        def once() -> dict[str, int]:
            with tempfile.TemporaryDirectory() as folder:
                store = Store(Path(folder) / "samples.jsonl", {}, writes=True)
                generator = Generator(lm, store, 1)
                while todo := missing(self.examples, store.held, lm.run.algo):
                    for wave in generator.waves(todo, lambda: False):
                        store.add(wave.records)
                held = store.held.values()
                return {
                    "samples": len(held),
                    "tokens": sum(len(record["tokens"]) for record in held),
                    "accepted": sum(record["accepted"] for record in held),
                }

        return once


def run(options: argparse.Namespace) -> measure.Report:
    """Time every row in turn."""
    device = measure.find_device(options.device)
    prompts, samples, new = (4, 3, 12) if options.quick else (PROMPTS, SAMPLES, NEW)
    rows = prompts * samples
    repeats = options.repeats or (2 if options.quick else 5)
    work = Work(device, prompts, samples, new, rows)
    cases = [
        Case(ONE, lambda: work.generated(1, clear=True)),
        Case(BATCHED, lambda: work.generated(prompts, clear=False)),
        Case(OURS, work.ours(torch.float32, None)),
    ]
    skipped: dict[str, str] = {}
    half = torch.bfloat16 if device.type == "cuda" or native_bf16(device) else torch.float32
    if half == torch.float32:
        skipped["+ amp"] = "no native bfloat16"
    else:
        cases.append(Case("+ amp", work.ours(half, None)))
    if (
        reason := "not with --quick" if options.quick else measure.why_no_compiler(device)
    ) is not None:
        skipped["+ compile"] = reason
    else:
        cases.append(Case("+ compile", work.ours(half, "default"), warm_ups=2))
    peak = {kind: measure.peak_flops(device, kind) for kind in {torch.float32, half}}
    timings = measure.interleaved(cases, repeats, device)
    return report(work, timings, skipped, peak, half, repeats)


def report(
    work: Work,
    timings: dict[str, measure.Timing],
    skipped: dict[str, str],
    peak: dict[torch.dtype, float],
    half: torch.dtype,
    repeats: int,
) -> measure.Report:
    """The table and the JSON."""
    flops = 2 * sum(p.numel() for p in work.model.parameters())  # a token
    lines: list[list[str]] = []
    rows: list[measure.Row] = []
    for name, timing in timings.items():
        total = timing.result
        ratio = measure.quantile(measure.paired(timings[ONE].seconds, timing.seconds), 0.5)
        speed, samples = total["tokens"] / timing.p50, total["samples"] / timing.p50
        accepted = 60 * total["accepted"] / timing.p50
        rate = peak[half if name.startswith("+") else torch.float32]
        shown = [measure.number(samples), measure.number(speed)]
        shown += [f"{100 * speed * flops / rate:.1f} %", measure.number(accepted)]
        lines.append([name, f"{timing.p50:.2f}", *shown, f"{ratio:.1f}x"])
        against = (None, None) if name == ONE else (ONE, ratio)
        rows.append(measure.Row("rft", name, samples, "samples/s", *against))
        rows.append(measure.Row("rft", f"{name}, accepted", accepted, "samples/min"))
    for name, reason in skipped.items():
        lines.append([name, f"skipped: {reason}"])
        rows.append(measure.Row("rft", name, None, "samples/s"))
    batched = measure.quantile(measure.paired(timings[BATCHED].seconds, timings[OURS].seconds), 0.5)
    speed = work.samples * len(work.prompts) / timings[OURS].p50
    rows.append(measure.Row("rft", f"{OURS} against batched", speed, "samples/s", BATCHED, batched))
    text = measure.table(
        ["", "s", "samples/s", "tokens/s", "util.", "accepted/min", "ratio"], lines
    )
    text += (
        f"\n\n{OURS} against {BATCHED}: {batched:.2f}x (medians of {repeats}; ratios within a"
        " repeat)"
    )
    conditions = measure.conditions(
        work.device,
        sizes={
            "parameters": flops // 2,
            "prompts": len(work.prompts),
            "prompt_tokens": sum(map(len, work.prompts)) / len(work.prompts),
            "samples": work.samples,
            "max_new_tokens": work.new,
            "rollout_rows": work.rows,
        },
        repeats=repeats,
        dtype=str(half).removeprefix("torch."),
        peak_flops={str(kind).removeprefix("torch."): value for kind, value in peak.items()},
        skipped=skipped,
        work={name: timing.result for name, timing in timings.items()},
        timing=measure.taken(timings),
    )
    return measure.Report(text, conditions, rows)
