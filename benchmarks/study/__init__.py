"""Run a study: every combination of what a YAML file names, each with several seeds.

    python -m benchmarks study benchmarks/study/readme.yaml              # the missing runs
    python -m benchmarks study benchmarks/study/readme.yaml --jobs 2     # two at a time
    python -m benchmarks study benchmarks/study/readme.yaml --page FILE  # the page of what is there
    python -m benchmarks study benchmarks/study/smollm2.yaml --weights DIR

A run is a command of its own. What it came to is a line of a results file, which is written after
each; runs that it holds are not run again, so a study is filled in over several sessions, and a
line that is removed is made again. Runs that are ended by seconds want the machine for themselves.

A file has `about`, `seeds` (a number, which --repeats replaces) and `axes`: by name the values of
each, and by value its overrides. The values of the last axis are compared with each other, within
each combination of the others. Overrides may name {weights} (--weights), {data} (--data), {root}
(of this project) and {rows} (a folder with the files of benchmarks/study/rows.py).

A value of the last axis may be two lists of overrides: the second run begins with what the first
one left in {start}, and the record is of both. In a study that chooses settings, `first_seed` (0)
and `skip` (0) keep its seeds and its held-out examples apart from those of the study that they are
chosen for: the first `skip` examples do not count.
"""

import argparse
import functools
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml

from benchmarks import measure
from benchmarks.measure import Report
from benchmarks.study import page, rows
from common.config import ConfigError
from common.report import Run, read_runs
from common.system import EXIT_CONFIG, EXIT_NUMBERS, events, safe_read

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
# Of a run's result.json, and what a condition of the machine is.
KEPT = ("metric", "before", "after", "steps", "seconds", "generated_tokens", "ended_by", "verdict")
MACHINE = ("device", "torch", "transformers", "commit", "date")
QUICK = ["budget.seconds=2", "evaluate.examples=4"]
QUICK_TINY = "model.tiny.pretrain_steps=2"

Record = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """A study, as its file describes it.

    Attributes:
        name: the name of the file.
        axes: by axis, the overrides of each value.
        every: the overrides of all runs.
        first_seed: the first of the `seeds`.
        skip: the number of held-out examples that do not count.
    """

    name: str
    about: str
    seeds: int
    axes: dict[str, dict[str, list[str]]]
    every: list[str]
    first_seed: int = 0
    skip: int = 0

    @classmethod
    def read(cls, path: Path) -> "Study":
        """Read a file. Raises: ConfigError if it is not a study."""
        try:
            found = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
        keys, more = {"about", "seeds", "axes", "every"}, {"first_seed", "skip"}
        if not isinstance(found, dict) or found.keys() - more != keys or not found["axes"]:
            raise ConfigError(
                f"{path} is not a study: it needs {', '.join(sorted(keys))}, and may have"
                f" {' and '.join(sorted(more))}."
            )
        found["axes"] = {
            str(axis): read_values(path, axis, of) for axis, of in found["axes"].items()
        }
        return cls(path.stem, **found)

    def runs(self, seeds: int) -> Iterator[Record]:
        """Yield the key of each run, and its overrides; all combinations with the first seed come
        first.
        """
        for seed in range(self.first_seed, self.first_seed + seeds):
            for values in itertools.product(*self.axes.values()):
                of = dict(zip(self.axes, values, strict=True))
                chosen = [self.axes[axis][value] for axis, value in of.items()]
                *outer, last = chosen
                stages = last if last and isinstance(last[0], list) else [last]
                *start, overrides = (
                    [*self.every, *itertools.chain(*outer), *stage, f"seed={seed}"]
                    for stage in stages
                )
                one = {"of": of, "seed": seed, "overrides": overrides}
                yield one | ({"start": start[0]} if start else {})


def read_values(path: Path, axis: Any, values: Any) -> dict[str, list[str]]:
    """Return the values of an axis by their names, which are texts. Raises: ConfigError."""
    sound = isinstance(values, dict) and all(isinstance(one, list) for one in values.values())
    if not sound or any(isinstance(name, bool | None) for name in values):
        raise ConfigError(
            f"{path}: axes.{axis}={values} is no dict of lists of overrides, by names of values."
            " Put a name such as on, off, yes, no or null in quotes."
        )
    return {str(name): overrides for name, overrides in values.items()}


def run(options: argparse.Namespace) -> Report:
    """Make the missing runs, or write the page of the existing ones."""
    study = Study.read(options.file)
    report = Report("study", options, study.seeds, study=study.name)
    if options.quick and options.results is None:
        raise ConfigError("--quick makes toy runs: give them a file of their own, --results FILE.")
    path = options.results or RESULTS / find_machine(report) / f"study-{study.name}.jsonl"
    records = read_records(path)
    wanted = list(study.runs(report.repeats))
    if options.page is None:
        missing = [one for one in wanted if not any(is_same(one, record) for record in records)]
        run_all(missing[: options.runs], path, options, report)
        records = read_records(path)
    kept = [record for record in records if not is_outdated(record, wanted)]
    report.notes.append(page.write(study, wanted, kept, options.page))
    if outdated := len(records) - len(kept):
        report.notes.append(
            f"{outdated} records are of other settings than {options.file} has now, and left out:"
            f" remove their lines from {path}."
        )
    return report


def find_machine(report: Report) -> str:
    """Return the folder of this machine's results."""
    cores = os.cpu_count()
    on_cpu = report.device.type == "cpu"
    return f"cpu-{cores}core" if on_cpu else report.conditions["device"].replace(" ", "-").lower()


def read_records(path: Path) -> list[Record]:
    """Return the runs of earlier sessions, without a torn last line."""
    return safe_read.read_lines(path, {"of": {str: str}, "seed": int, "overrides": [str]})


def is_same(one: Record, other: Record) -> bool:
    """Return whether two records have the same combination, seed and settings."""
    keys = ("of", "seed", "overrides", "start")
    return all(one.get(key) == other.get(key) for key in keys)


def is_outdated(record: Record, wanted: Sequence[Record]) -> bool:
    """Return whether the settings of a record's combination have changed, whatever its seed: the
    seed may be beyond --repeats.
    """
    alike = [one for one in wanted if one["of"] == record["of"]]
    return bool(alike) and not any(list_settings(one) == list_settings(record) for one in alike)


def list_settings(record: Record) -> list[list[str]]:
    """Return the overrides of each stage of a record, without the seed, which comes last."""
    return [record[key][:-1] for key in ("start", "overrides") if key in record]


def run_all(missing: list[Record], path: Path, options: argparse.Namespace, report: Report) -> None:
    """Make the missing runs, --jobs at a time, and append a line to the file after each."""
    environment = dict(os.environ)
    if options.jobs > 1:
        cores = os.cpu_count() or 1
        environment["OMP_NUM_THREADS"] = str(max(1, cores // options.jobs))
    machine = {key: report.conditions[key] for key in MACHINE} | {"jobs": options.jobs}
    adding = threading.Lock()
    with TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        folders = {"weights": options.weights, "data": options.data}
        places = {f"{{{name}}}": str(place) for name, place in folders.items()}
        places |= {"{root}": str(ROOT), "{rows}": folder}
        rows.write(Path(folder))

        texts = [t for one in missing for t in (*one.get("start", ()), *one["overrides"])]
        for name, place in folders.items():  # before hours of runs that need none
            if not any(f"{{{name}}}" in text for text in texts):
                continue
            if place is None or not place.is_dir():
                found = "" if place is None else f"--{name}={place} is none: "
                raise ConfigError(f"{found}this study needs a folder: --{name} DIR.")

        def make(number: int) -> None:
            one = missing[number]
            came_to = []

            def out(key: str) -> Path:
                return Path(folder) / f"{number}-{key}"

            for key in [key for key in ("start", "overrides") if key in one]:
                overrides = one[key]
                if options.quick:
                    tiny = [] if "model=hf" in overrides else [QUICK_TINY]
                    overrides = [*overrides, *QUICK, *tiny]
                known = places | {"{start}": f"{folder}/{number}-start"}
                overrides = [name_places(override, known) for override in overrides]
                came_to.append(measure_run(overrides, out(key), environment))
            for key in ("start", "overrides"):  # a model and its checkpoints take gigabytes
                shutil.rmtree(out(key), ignore_errors=True)
            record = one | functools.reduce(join, came_to) | machine
            with adding, path.open("a", encoding="utf-8") as file:
                file.write("\n" * is_torn(path) + json.dumps(record, ensure_ascii=False) + "\n")
                measure.progress(f"{' '.join(record['of'].values())}, seed {record['seed']}")

        path.parent.mkdir(parents=True, exist_ok=True)
        failed: list[RuntimeError] = []
        try:
            for run in [pool.submit(make, number) for number in range(len(missing))]:
                try:
                    run.result()
                except RuntimeError as error:  # a kernel may end one that takes too much memory
                    failed.append(error)
        except BaseException:
            pool.shutdown(cancel_futures=True)  # those that have begun end first
            raise
    measure.progress("")
    if failed:
        raise RuntimeError(
            f"{len(failed)} of {len(missing)} runs have left no result; the same command makes them"
            f" again. The first: {failed[0]}"
        ) from failed[0]


def is_torn(path: Path) -> bool:
    """Return whether a file ends within a line."""
    return not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0


def name_places(override: str, places: dict[str, str]) -> str:
    """Return an override in which each {name} is replaced by its path; ${...} stays for Hydra."""
    for place, text in places.items():
        override = override.replace(place, text)
    return override


def measure_run(overrides: list[str], folder: Path, environment: dict[str, str]) -> Record:
    """Return the result and the description of a run; for a run that began but ended without a
    result, such as if no sample is right or a guard stops it, the reason.

    Raises: RuntimeError for another run without a result.
    """
    command = [sys.executable, str(ROOT / "launch.py"), *overrides, f"hydra.run.dir={folder}"]
    ended = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, check=False, env=environment
    )
    begun = any((folder / name).exists() for name in ("metrics.jsonl", "iteration-1"))
    if begun and ended.returncode in (EXIT_CONFIG, EXIT_NUMBERS):
        return {"code": ended.returncode, "verdict": ended.stderr.splitlines()[-1]}
    if not (folder / "result.json").exists():
        raise RuntimeError(f"{command} ended with {ended.returncode}: {ended.stderr[-500:]}")
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    [[one], _] = read_runs([folder])
    assert isinstance(one, Run)
    return {
        "code": ended.returncode,
        **{key: result[key] for key in KEPT},
        **({"chosen": result["chosen"]} if "chosen" in result else {}),
        "changes": {name: found["change"] for name, found in result["intervals"].items()},
        "metrics": result["metrics"],
        **describe_course(one),
        "prompts": hashlib.sha256(json.dumps(one.prompts).encode()).hexdigest()[:12],
        "scores": {"before": shorten(one.known[0]), "after": shorten(one.known[-1])},
    }


def join(first: Record, then: Record) -> Record:
    """Return the result of a run together with that of the run that it began with; if one has no
    result, the reason.
    """
    if "after" not in first or "after" not in then:
        return first if "after" not in first else then
    *used, _ = first["points"][-1]
    later = [[*np.add(used, costs).tolist(), value] for *costs, value in then["points"][1:]]
    return then | {
        "before": first["before"],
        "metrics": {"before": first["metrics"]["before"], "after": then["metrics"]["after"]},
        "scores": {"before": first["scores"]["before"], "after": then["scores"]["after"]},
        "points": [*first["points"], *later],
        "changes": {},  # each stage had its own
        **{cost: first[cost] + then[cost] for cost in ("steps", "seconds", "generated_tokens")},
    }


def describe_course(run: Run) -> Record:
    """Return the measurements of a run by their cost, and remarks from its log."""
    logged = events(run.folder / "metrics.jsonl")
    costs = ("steps", "generated_tokens", "seconds", "value")
    values = {
        name: [event[name] for event in logged if event.get(name) is not None]
        for name in ("entropy", "drift", "peak_memory_gb")
    }
    entropy = values["entropy"]
    return {
        "points": [[round(point[cost], 4) for cost in costs] for point in run.points],
        "entropy": [round(value, 4) for value in entropy[:: max(1, len(entropy) - 1)]],
        "drift": max(values["drift"], default=None),
        "peak_memory_gb": max(values["peak_memory_gb"], default=None),
    }


def shorten(scores: list[float]) -> str | list[float]:
    """Return scores for a file: as digits if all are 0 or 100."""
    if set(scores) <= {0.0, 100.0}:
        return "".join("1" if score else "0" for score in scores)
    return [round(score, 2) for score in scores]
