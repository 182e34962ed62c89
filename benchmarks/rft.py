"""Compare RFT's sampling with `generate` on the same prompts: the project's third document.

    python -m benchmarks rft --json rft.json --repeats 7

The work: the longest of 16,000 chess prompts, temperature 1, lengths from the tiny model that comes
with the project; all completions are verified by the task. Rows: one question at a time, with the
cache of free memory cleared after each (the document's "before"); `generate` for all prompts
together, padded on the left; this project's sampling stage, with its file of samples written; then
one more switch per row. Utilisation counts the products with weights for new tokens alone.
"""

import argparse
import gc
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import measure
from benchmarks.measure import Case, name_of, paired
from benchmarks.models import generate
from common.device import Device, native_bf16
from common.distributed import Context
from common.model import encode_prompts, narrowed, stop_ids
from common.parts import open_parts
from common.sampling import Sampler
from common.tasks import RIGHT
from launch import compose
from rft.generate import Generator, Store, missing

ONE, BATCHED, OURS = "one question at a time", "generate, batched", "this project"
AMP, COMPILE = "+ amp", "+ compile"


class Work:
    """The prompts, the model, and the processing of completions that all rows share."""

    def __init__(
        self, device: torch.device, prompts: int, samples: int, new: int, model: Path | None = None
    ) -> None:
        changes = {
            "second_round_samples": 0,
            "samples_per_prompt": samples,
            "chunk_size": samples,
            "prompts_per_batch": prompts,
            "rollout_rows": prompts * samples,
            "sampling.max_new_tokens": new,
            "sampling.temperature": 1.0,
            "select.accept": RIGHT,
        }
        settings = ["algo=rft", "task=chess", *(f"algo.{k}={v}" for k, v in changes.items())]
        run = compose(settings + ([f"model.path={model}", "model=hf"] if model else []))
        self.parts = open_parts(run, Context(0, 1, Device(device, "", 0.0, True), Path()))
        self.model: Any = self.parts.lm.model
        self.tokenizer: Any = self.parts.lm.tokenizer
        self.device, self.samples, self.new = device, samples, new
        task = self.parts.task
        longest = sorted(task.examples("train"), key=lambda e: len(task.prompt(e)), reverse=True)
        self.examples = longest[:prompts]
        self.prompts = encode_prompts(self.tokenizer, [task.prompt(e) for e in self.examples])

    def verified(self, rows: list[tuple[int, list[int], bool]]) -> dict[str, int]:
        """Score (prompt, token ids, finished) rows. Returns the counts of the work."""
        texts = self.tokenizer.batch_decode([ids for _, ids, _ in rows], skip_special_tokens=True)
        scored = self.parts.scorer.submit([self.examples[i] for i, _, _ in rows], texts).result()
        accepted = [
            reward >= RIGHT and done
            for reward, (_, _, done) in zip(scored.rewards, rows, strict=True)
        ]
        tokens = sum(len(ids) for _, ids, _ in rows)
        return {"samples": len(rows), "tokens": tokens, "accepted": sum(accepted)}

    @torch.inference_mode()
    def generated(self, batch: int, clear: bool) -> dict[str, int]:
        """Call `generate` for `batch` prompts at a time."""
        stops = set(stop_ids(self.model, self.tokenizer))
        rows = []
        for start in range(0, len(self.prompts), batch):
            part = {"input_ids": [list(p) for p in self.prompts[start : start + batch]]}
            padded = self.tokenizer.pad(part, padding_side="left", return_tensors="pt")
            heat = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
            made = generate(
                self.model,
                padded["input_ids"],
                attention_mask=padded["attention_mask"].to(self.device),
                max_new_tokens=self.new,
                num_return_sequences=self.samples,
                eos_token_id=sorted(stops),
                **heat,
            )
            for row, tokens in enumerate(made.tolist()):
                end = next((i + 1 for i, token in enumerate(tokens) if token in stops), None)
                rows.append((start + row // self.samples, tokens[:end], end is not None))
            if clear:
                gc.collect()
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
        return self.verified(rows)

    def ours(self, compute: torch.dtype, compiled: str | None) -> Callable[[], dict[str, int]]:
        """Return the sampling stage, with samples written to a file."""
        sampler = Sampler(
            narrowed(self.parts.lm.model, compute),
            pad_id=self.tokenizer.pad_token_id,
            stop_ids=stop_ids(self.model, self.tokenizer),
            rows=len(self.prompts) * self.samples,
            compile_mode=compiled,
            graphs=True,
        )
        parts = replace(self.parts, engine=sampler)

        def once() -> dict[str, int]:
            with tempfile.TemporaryDirectory() as folder:
                store = Store(Path(folder) / "samples.jsonl", {}, writes=True)
                generator = Generator(parts, store, 1)
                while todo := missing(self.examples, store.held, parts.run.algo):
                    for wave in generator.waves(todo, lambda: False):
                        store.add(wave.records)
                held = store.held.values()
                tokens = sum(len(record["tokens"]) for record in held)
                accepted = sum(record["accepted"] for record in held)
                return {"samples": len(held), "tokens": tokens, "accepted": accepted}

        return once


def run(options: argparse.Namespace) -> measure.Report:
    """Time every row in turn."""
    prompts, samples, new = (4, 3, 12) if options.quick else (32, 10, 80)
    report = measure.Report("rft", options, 5)
    device = report.device
    work = Work(device, prompts, samples, new)
    bf16 = native_bf16(device)
    half = torch.bfloat16 if bf16 else torch.float32
    skipped = {} if bf16 else {AMP: "no native bfloat16"}
    reason = "not with --quick" if options.quick else measure.why_no_compiler(device)
    if reason is not None:
        skipped[COMPILE] = reason
    cases = [
        Case(ONE, lambda: work.generated(1, clear=True)),
        Case(BATCHED, lambda: work.generated(prompts, clear=False)),
        Case(OURS, work.ours(torch.float32, None)),
        Case(AMP, work.ours(half, None)),
        Case(COMPILE, work.ours(half, "default"), warm_ups=2),
    ]
    peaks = {kind: measure.peak_flops(device, kind) for kind in {torch.float32, half}}
    timings = report.time([case for case in cases if case.name not in skipped])
    flops = 2 * sum(p.numel() for p in work.model.parameters())  # a token
    report.compare({name: t.seconds for name, t in timings.items()}, "s", ONE, less=True)
    for name, timing in timings.items():
        per_second = {kind: count / timing.p50 for kind, count in timing.first.items()}
        peak = peaks[half if name.startswith("+") else torch.float32]
        report.add(name, per_second["samples"], "samples/s")
        report.add(name, per_second["tokens"], "tokens/s")
        report.add(name, per_second["tokens"] * flops / peak, "share of peak FLOP/s")
        report.add(name, 60 * per_second["accepted"], "accepted/min")
    for name, reason in skipped.items():
        report.skip(name, "s", reason)
    for base, wanted in ((ONE, 3), (BATCHED, 1.5)):
        ratio = paired(timings[base].seconds, timings[OURS].seconds)
        report.figures.append((f"{OURS} against {base}", f">= {wanted}x", f"{ratio:.2f}x"))
    report.conditions |= {
        "sizes": {"parameters": flops // 2, "prompts": prompts, "samples": samples, "tokens": new},
        "dtype": name_of(half),
        "peak_flops": {name_of(kind): value for kind, value in peaks.items()},
        "work": {name: timing.first for name, timing in timings.items()},
    }
    return report
