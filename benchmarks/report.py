"""Measure the page of a long run: the time to make and to open it, and its size.

    python -m benchmarks report

The run folder is generated: 20,000 steps with the numbers of a real event, and 100,000 completions
in all, from 100 held-out evaluations and from training. The page is opened in a headless Chromium
without network, and is open when its load event and all its scripts have ended.
"""

import argparse
import json
import math
import random
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.browser import Browser, find_browser
from benchmarks.measure import Case
from common.report import page
from common.system import EVALUATIONS, write_jsonl

STEPS, COMPLETIONS = 20_000, 100_000
EVALUATED, HELD_OUT, MEMBERS = 100, 256, 64
FIGURES = {"make": 10.0, "open": 2.0, "size": 5.0}  # seconds, seconds, MB
NUMBERS = ("reward", "reward_best", "reward_std", "drift", "update_norm", "lr", "zero_fitness")
NUMBERS += ("changed", "identical_pairs", "truncated", "prompt_agreement", "member_agreement")
NUMBERS += ("tokens_per_second", "samples_per_second", "peak_memory_gb")
PHASES = ("rollout", "reward", "keep", "exchange", "update")
WORDS = (
    "so",
    "the",
    "sum",
    "of",
    "both",
    "is",
    "then",
    "divided",
    "by",
    "two,",
    "which",
    "gives",
    "42",
)


def write_run(folder: Path, steps: int = STEPS, completions: int = COMPLETIONS) -> None:
    """Write the files of a run that its page is made from."""
    draw = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    algo = {"name": "eggroll", "steps": steps, "members": MEMBERS}
    config = {"seed": 0, "algo": algo, "model": {"name": "tiny", "path": None}}
    config["task"] = {"_target_": "common.tasks.units.Units"}
    versions = {"python": "3.13", "torch": "2.13.0", "transformers": "5.23.0"}
    saved = {"config": config, "versions": versions, "commit": None, "device": "generated"}
    (folder / "run.yaml").write_text(json.dumps(saved), encoding="utf-8")  # JSON is YAML
    write_jsonl(folder / "metrics.jsonl", [_event(draw, step) for step in range(1, steps + 1)])
    every = [step * steps // EVALUATED for step in range(EVALUATED + 1)]
    held = [
        {"step": step, "metric": value, "metric_name": "exact", "metrics": {"exact": value}}
        for step, value in ((step, 100 * draw.random()) for step in every)
    ]
    write_jsonl(folder / EVALUATIONS, held)
    out, count = folder / "completions", min(HELD_OUT, completions // (2 * EVALUATED))
    out.mkdir(exist_ok=True)
    for step in every:
        name = f"step-{step:08d}" if step else "before"
        rows = [{**_asked(n), "completion": _text(draw)} for n in range(count)]
        scores = [100.0 * (draw.random() < 0.2 + 0.6 * step / steps) for _ in rows]
        write_jsonl(
            out / f"{name}.jsonl",
            [r | {"scores": {"exact": s}} for r, s in zip(rows, scores, strict=True)],
        )
    left = completions - count * len(every)
    lines = [
        _line(draw, step, step * steps // (left // MEMBERS)) for step in range(left // MEMBERS)
    ]
    write_jsonl(out / "training.jsonl", lines)


def _event(draw: random.Random, step: int) -> dict[str, Any]:
    numbers = {name: draw.random() * (2 + math.sin(step / 3000)) for name in NUMBERS}
    phases = {name: draw.random() for name in PHASES}
    counts = {"generated_tokens": 9000 * step, "reward_evaluations": 512 * step}
    return {"step": step, "seconds": draw.random(), "phase_seconds": phases, **counts, **numbers}


def _asked(number: int) -> dict[str, Any]:
    prompt = f"Question {number}: what is half of {number} and {84 - number}?"
    return {"id": number, "prompt": prompt, "answer": "42"}


def _text(draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(20, 60)))


def _line(draw: random.Random, number: int, step: int) -> dict[str, Any]:
    rows = [
        {
            "member": member,
            "sample": 0,
            "sign": (-1) ** member,
            "completion": _text(draw),
            "tokens": 60,
            "cut": draw.random() < 0.1,
            "reward": float(draw.random() < 0.3),
            "fitness": draw.gauss(0, 1),
        }
        for member in range(MEMBERS)
    ]
    return {"step": step + 1, "group": 0, **_asked(number), "rows": rows}


def run(options: argparse.Namespace) -> measure.Report:
    """Time making and opening the page, and measure its size."""
    steps, completions = (200, 2000) if options.quick else (STEPS, COMPLETIONS)
    report = measure.Report("report", options, 3)
    report.conditions["sizes"] = {"steps": steps, "completions": completions}
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept) / "run"
        write_run(folder, steps, completions)
        case = Case("make", lambda: page.write_report(folder))
        made = min(report.time([case])[case.name].seconds)
        report.add(case.name, made, "s")
        size = (folder / "report.html").stat().st_size / 1e6
        report.add("report.html", size, "MB")
        report.figures.append(("made in", f"< {FIGURES['make']:g} s", f"{made:.2f} s"))
        report.figures.append(("size", f"< {FIGURES['size']:g} MB", f"{size:.2f} MB"))
        if find_browser() is None:
            report.skip("open", "s", "there is no Chromium")
            return report
        opened, asked = [], 0
        for _ in range(report.repeats):
            with Browser() as browser:
                opened.append(browser.open((folder / "report.html").as_uri()))
                asked += len(browser.requests)
        report.add("open", min(opened), "s")
        report.figures.append(("opens in", f"< {FIGURES['open']:g} s", f"{min(opened):.2f} s"))
        report.figures.append(("requests that leave it", "0", str(asked)))
    return report
