"""The work of a sweep (-m) around its jobs: a line per job, its failures next to its results, and
the comparison at its end.
"""

import math
import shlex
import sys
import traceback
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from common.config import COMPARISON, explain_removed, resolvers
from common.system import (
    FAILED,
    OVERRIDES,
    is_main,
    markdown_table,
    safe_read,
    user_code,
    write_text,
)

PROBE = "probe.json"  # the result of a run that searched for its noise and its step size


class Sweep(Callback):
    """Hydra's callback, set in conf/hydra/clutch.yaml; silent in a single run and on ranks other
    than 0.

    Args: swept: the keys that differ between jobs.
    """

    def __init__(self, swept: list[str] | None = None) -> None:
        self.swept = swept or []
        self.earlier: dict[Path, int] = {}  # failure files of earlier commands -> time of writing
        # a job of submitit begins here, in a process of its own, before it composes
        resolvers.register()

    def __reduce__(self) -> Any:
        return Sweep, (self.swept,)

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Record the keys that differ between the jobs, and the jobs that failed in earlier
        commands.
        """
        noted = Path(str(config.hydra.sweep.dir)).rglob(FAILED)
        self.earlier = {path: path.stat().st_mtime_ns for path in noted}
        overrides = OverridesParser.create().parse_overrides(list(config.hydra.overrides.task))
        self.swept = [one.get_key_element() for one in overrides if one.is_sweep_override()]

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        """Print the name of the job."""
        if config.hydra.mode == RunMode.MULTIRUN and is_main():
            (Path(config.hydra.runtime.output_dir) / FAILED).unlink(missing_ok=True)
            print(f"\n=== {self._name(config)}", flush=True)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        """Print the outcome of the job on one line."""
        if config.hydra.mode == RunMode.MULTIRUN and is_main():
            folder = Path(config.hydra.runtime.output_dir)
            print(f"=== {self._name(config)}: {_outcome(folder)}", flush=True)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Write the comparison, and exit with the code of the first job that failed, if one did."""
        if not is_main():
            return
        from common.report import read_runs, side_by_side  # torch comes with it

        folder = Path(str(config.hydra.sweep.dir))
        runs, others = read_runs([folder])
        failures = [one for one in others if not _is_probe(one.folder)]
        print()
        if len(failures) < len(others):
            rows = [self._describe_probe(one.folder) for one in others if _is_probe(one.folder)]
            write_text(folder / "probes.md", markdown_table(rows))
            print(f"{side_by_side(rows)}\n\nwritten to {folder}/probes.md")
        there = [run.folder for run in runs if (run.folder / FAILED).exists()]
        refused = {path: safe_read.read(path / FAILED) for path in there}
        noted = [*(failure.folder for failure in failures if failure.code), *refused]
        noted.sort(key=lambda path: (path / FAILED).stat().st_mtime_ns)  # as they ended
        codes = [safe_read.read(path / FAILED)["code"] for path in noted if self._is_new(path)]
        try:
            if removed := explain_removed(COMPARISON.partition(":")[0]):
                print(f"no comparison, which {removed}")
            elif runs or failures:
                user_code.load(COMPARISON)(runs, failures, folder)
        except Exception:  # Hydra would log it and exit with code 0
            traceback.print_exc()
            codes.append(1)
        for path, why in refused.items():
            print(f"failed, beside the result of an earlier command: {path}: {why['error']}")
        if failures or codes:
            again = f"again: python -m common.compare {shlex.quote(str(folder))}"
            print(again, file=sys.stderr)
            sys.exit(codes[0] if codes else 0)

    def _describe_probe(self, folder: Path) -> dict[str, str]:
        """Return the result of a probe as a row of a table: the chosen sigma, and its
        measurements.
        """
        overrides, findings = safe_read.read(folder / OVERRIDES), safe_read.read(folder / PROBE)
        row = next(row for row in findings["rows"] if math.isclose(row["sigma"], findings["sigma"]))
        swept = [text for text in overrides if text.partition("=")[0] in self.swept]
        # Headers that 80 columns hold.
        numbers = {"sigma": findings["sigma"], "lr": findings["lr"], "without": findings["centre"]}
        numbers |= {"reward": row["reward"], "spread": row["reward_std"]}
        numbers |= {"changed": row["changed"], "same": row["identical_pairs"]}
        numbers |= {"agreement": row["prompt_agreement"]}
        cells = {k: "-" if value is None else f"{value:.3g}" for k, value in numbers.items()}
        return {"probe": " ".join(swept) or folder.name} | cells

    def _is_new(self, folder: Path) -> bool:
        """Return whether a job of this sweep, not an earlier one, has recorded the failure."""
        path = folder / FAILED
        return path.stat().st_mtime_ns != self.earlier.get(path)

    def _name(self, config: DictConfig) -> str:
        swept = [
            text for text in config.hydra.overrides.task if text.partition("=")[0] in self.swept
        ]
        return " ".join([f"job {config.hydra.job.num}", *swept])


def _is_probe(folder: Path) -> bool:
    """Return whether a job only probed: a job that trained has a run.yaml next to its
    probe.json.
    """
    others = [folder / "run.yaml", folder / FAILED]
    return (folder / PROBE).exists() and not any(path.exists() for path in others)


def _outcome(folder: Path) -> str:
    if failed := safe_read.read(folder / FAILED):
        return f"failed: {failed['error']}"
    if (result := safe_read.read(folder / "result.json")) is None:
        return f"done, in {folder}"
    from common.uncertainty import show_interval

    change = f"{result['metric']} {result['before']:.2f} -> {result['after']:.2f}"
    sure = result.get("intervals", {}).get(result["metric"], {}).get("change")
    change += f" (change at 95 %: {show_interval(sure, signed=True)})" if sure else ""
    ended = f", ended by {result['ended_by']}" if result.get("ended_by") else ""
    return f"{change}, {result['steps']} steps, {result['seconds']:.0f} s{ended}"
