"""Measure this project and other ways to do the same work: python -m benchmarks NAME.

A benchmark is a module of this package with `run(options) -> measure.Report`. It is imported on
demand, so that --help needs no torch.
"""

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from common.config import ConfigError

BENCHMARKS = {
    "sampler": "completions: `generate`, continuous batching, this project",
    "eggroll": "a step's sampling: one at a time, member by member, the population in one forward",
    "population": "a population's forward beside the plain sampler, by rows",
    "likelihood": "a population's log-probabilities of given answers beside a plain forward",
    "published": "steps in the shapes of figures that others published, for a GPU",
    "distance": "decoding, prefill and training beside the least that the device allows",
    "agreement": "the same short runs on the GPU and on its CPU: their numbers side by side",
    "real": "SmolLM2-135M in bfloat16: `generate`, vLLM, this project, a population",
    "memory": "peak memory of EGGROLL's training beside sampling the same rows",
    "grpo": "a GRPO step: one prompt at a time, TRL, this project and its switches",
    "training": "a training forward and backward pass: eager, compiled",
    "readers": "what reads answers out of completions, on long texts that repeat themselves",
    "scoring": "rewards that wait or compute, by samples: serial, threads, processes",
    "overlap": "GRPO with rewards that make it wait: algo.overlap=0 beside 1",
    "rft": "sampling for RFT: one question at a time, batched `generate`, this project",
    "sharding": "opt=fsdp beside opt=ddp: a rollout, a training step and memory, two ranks",
    "report": "the page of a long run: made, opened in a headless Chromium, its size",
    "directions": "kinds of noise: cosine of their update with the exact policy gradient",
    "study": "combinations of settings with several seeds, filled in over sessions, and their page",
    "crowded": "a run beside other processes: alone, beside a busy one, two at once",
    "loader": "a training iteration on sequences of varying length: lists and loops, then without",
}


def positive(text: str) -> int:
    """Parse a whole number from 1 on, for argparse."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


PUBLISHED = ("population-1.5b", "grpo-0.5b", "deterministic", "grpo-1.5b-nf4", "grpo-8b-20k")
SAMPLED = {"choices": ("small", "gpt2", "0.5b"), "help": "default: small on a CPU, 0.5b on CUDA"}
# Options that not all benchmarks have.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "sampler": {"--model": SAMPLED},
    "population": {
        "--model": SAMPLED,
        "--layer": {"type": positive, "metavar": "D", "help": "one linear layer of size D alone"},
        "--batch": {"type": positive, "metavar": "N", "help": "its rows; 256, on CUDA 1,024"},
    },
    "likelihood": {"--model": SAMPLED},
    "eggroll": {
        "--peers": {
            "type": Path,
            "metavar": "PYTHON",
            "help": "a step beside those of eggroll-es and torcheggroll, which this Python has",
        },
        "--weights": {"type": Path, "metavar": "DIR", "help": "the model, with --peers"},
    },
    "study": {
        "file": {"type": Path, "metavar": "FILE", "help": "a study: benchmarks/study/NAME.yaml"},
        "--results": {"type": Path, "metavar": "JSONL", "help": "default: in benchmarks/results"},
        "--weights": {"type": Path, "metavar": "DIR", "help": "SmolLM2-135M-Instruct"},
        "--data": {"type": Path, "metavar": "DIR", "help": "ag_news, imdb, multi30k and so on"},
        "--runs": {"type": int, "metavar": "N", "help": "at most N new runs; default: all"},
        "--jobs": {"type": positive, "default": 1, "metavar": "N", "help": "runs at a time"},
        "--page": {"type": Path, "metavar": "FILE", "help": "write the page of what is there"},
    },
    "published": {
        "--row": {
            "required": True,
            "choices": PUBLISHED,
            "help": ", ".join(PUBLISHED),
            "metavar": "NAME",
        }
    },
    "distance": {"--model": SAMPLED},
    "crowded": {
        "--weights": {"type": Path, "metavar": "DIR", "help": "SmolLM2-135M-Instruct, alone"},
    },
    "training": {
        "--weights": {"type": Path, "metavar": "DIR", "help": "SmolLM2-135M; default: tiny"},
    },
    "overlap": {
        "--weights": {"type": Path, "metavar": "DIR", "help": "SmolLM2-135M-Instruct"},
    },
    "real": {
        "--weights": {"type": Path, "metavar": "DIR", "help": "default: random numbers"},
        "--vllm": {"type": Path, "metavar": "PYTHON", "help": "default: without vLLM"},
        "--part": {
            "choices": ("sampling", "eggroll", "grpo", "rft"),
            "default": "sampling",
            "help": "sampling; a step of EGGROLL; of GRPO beside TRL's; RFT beside both peers",
        },
    },
    "grpo": {
        "--model": SAMPLED | {"default": "small", "help": "gpt2 and 0.5b: for a GPU"},
        "--brief": {"action": "store_true", "help": "the first three rows, without the switches"},
        "--cumulative": {"action": "store_true", "help": "the document's rows alone, once each"},
        "--experiment": {"metavar": "NAME", "help": "a row with the switches of conf/experiment"},
        "--beta": {"type": float, "default": 0.02, "help": "weight of the KL; 0 = no reference"},
    },
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--device", metavar="NAME", help="default: CUDA where there is any")
    common.add_argument("--quick", action="store_true", help="tiny sizes, to see that it works")
    options = argparse.ArgumentParser(add_help=False, parents=[common])
    options.add_argument("--json", type=Path, metavar="FILE", help="where to write the numbers")
    options.add_argument("--repeats", type=positive, metavar="N", help="timed repeats of each row")
    main = argparse.ArgumentParser(
        "python -m benchmarks", description="Speed, side by side, in one process."
    )
    names = main.add_subparsers(dest="name", metavar="NAME", required=True)
    for name, line in BENCHMARKS.items():
        one = names.add_parser(name, help=line, description=line, parents=[options])
        for option, settings in OPTIONS.get(name, {}).items():
            one.add_argument(option, **settings)
    every = names.add_parser("all", help="every benchmark that fits this device", parents=[common])
    every.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the results")
    limit = "seconds for everything; default: %(default)s"
    every.add_argument("--seconds", type=positive, default=480, metavar="N", help=limit)
    two = names.add_parser("compare", help="two results, or two folders of them, side by side")
    two.add_argument("left", type=Path, metavar="A", help="file or folder")
    two.add_argument("right", type=Path, metavar="B", help="file or folder")
    return main


def main() -> None:
    """Run one benchmark, print its table, and write its JSON."""
    options = parser().parse_args()
    if options.name in ("all", "compare"):
        together = importlib.import_module("benchmarks.together")
        try:
            (together.run_all if options.name == "all" else together.run_compare)(options)
        except ValueError as error:
            sys.exit(f"error: {error}")
        return
    if options.json is not None:  # fail now, not after the measurement
        options.json.parent.mkdir(parents=True, exist_ok=True)
    try:
        report = importlib.import_module(f"benchmarks.{options.name}").run(options)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    print(report.text)
    if options.json is not None:
        report.save(options.json)
        print(f"\nwritten to {options.json}")


if __name__ == "__main__":
    sys.exit(main())
