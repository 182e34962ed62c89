"""The run folder of RFT: its paths, the settings that its content was made with, and the repair
after a kill.

RUN/iteration-K holds samples-*.jsonl, selected.json, selected.jsonl, finetune.json, model/ and
evaluation.json; iteration-0 is the base model. Existing content is not made again.
"""

import itertools
import json
import logging
import math
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.config import ConfigError, Run, name_folder
from common.distributed import Context
from common.run import resume
from common.system import events, problem, safe_read, write_text
from rft.config import RftConfig
from rft.generate import Record, Store, find_written, merged, shard_path
from rft.made_with import check_same, evaluated_with, finetuned_with, sampled_with
from rft.prompts import Prompts

log = logging.getLogger("clutch")

LOGGED = {"step": int, "stage": str, "iteration": int}  # an event of RFT


class RunFolder:
    """The run folder; every rank reads, rank 0 writes.

    Attributes:
        written: the folder of this run's log: each shard has its own, since shards run in parallel
            in one run folder.
        digests: hashes of the task's rows, and of the rows of evaluate.also and evaluate.text.
    """

    def __init__(self, run: Run, context: Context, digests: dict[str, str]) -> None:
        self.run, self.context, self.root = run, context, context.out_dir
        self.digests = digests
        self.cfg: RftConfig = run.algo
        index, of = self.cfg.part()
        shard = f"shard-{index}-of-{of}" if self.cfg.shard else ""
        self.written = self.root / shard
        self.written.mkdir(exist_ok=True)
        self._check()

    def of(self, iteration: int) -> Path:
        """Return the folder of an iteration, 0 = the base model."""
        return self.root / f"iteration-{iteration}"

    # --- finished work

    def trained(self, iteration: int) -> Path:
        """Return the folder of an iteration's model or adapter."""
        return self.of(iteration) / ("adapter" if self.run.model.adapter else "model")

    def finished(self, iteration: int) -> bool:
        """Return whether an iteration has its model, which must have been made with these
        settings.
        """
        folder = self.of(iteration)
        exported = [folder / name for name in ("model", "adapter") if (folder / name).is_dir()]
        if not exported:
            return False
        path = folder / "finetune.json"
        record = read_json(path)
        if "made_with" not in record or not isinstance(record.get("steps"), int):
            raise ConfigError(
                f"{path} is missing or damaged beside {exported[0]}. Remove {exported[0]} to"
                " make it again."
            )
        check_same(path, record["made_with"], finetuned_with(self.run))
        return True

    def sampling_cut(self, iteration: int) -> bool:
        """Return whether the budget ended the sampling of an iteration."""
        return (self.of(iteration) / "budget.json").exists()

    def was_cut(self, iteration: int) -> bool:
        """Return whether the budget ended the sampling or the fine-tuning of an iteration."""
        tuned = read_json(self.of(iteration) / "finetune.json")
        return self.sampling_cut(iteration) or tuned.get("cut", False)

    def under_way(self) -> int:
        """Return the first iteration without a model; for stage evaluate the last one with
        a model.
        """
        done = next(done for done in itertools.count() if not self.finished(done + 1))
        return done if self.cfg.stage == "evaluate" else done + 1

    def evaluation(self, iteration: int) -> dict[str, Any]:
        """Return the evaluation of an iteration; empty if there is none."""
        return read_json(self.of(iteration) / "evaluation.json")

    def evaluated(self, iteration: int, prompts: Prompts) -> dict[str, Any] | None:
        """Return the evaluation of an iteration if it was made with these settings."""
        saved = self.evaluation(iteration)
        settings = json.loads(json.dumps(evaluated_with(self.run, prompts, self.digests)))
        differ = resume.differences(saved.get("made_with"), settings)
        return None if differ else saved

    # --- samples

    def samples(self, iteration: int, prompts: Prompts) -> list[Record]:
        """Return all samples of an iteration. Raises: ConfigError if some are missing."""
        mine = prompts.of(iteration, self.cfg.prompts)
        header = sampled_with(self.run, iteration, self.digests["rows"])
        whole = not self.sampling_cut(iteration)
        return merged(self.of(iteration), mine, header, self.cfg, whole=whole)

    def count_samples(self, iteration: int) -> tuple[int, int]:
        """Return the number of samples of an iteration and of their generated tokens, whatever
        settings they were made with.
        """
        paths = sorted(self.of(iteration).glob("samples-*.jsonl"))
        records = [r for path in paths for r in Store(path, None, writes=False).held.values()]
        return len(records), sum(sum(find_written(record)) for record in records)

    def open_store(self, iteration: int, found: list[dict[str, Any]]) -> Store:
        """Open the samples of this run's shard; rank 0 repairs the file before the others read it.

        Samples of a wave whose event was not logged before a kill are dropped: both are made again,
        as in a run that was not killed.
        Args: found: the events that remain valid.
        """
        path = shard_path(self.of(iteration), *self.cfg.part())
        header = sampled_with(self.run, iteration, self.digests["rows"])
        store = Store(path, header, writes=True) if self.context.main else None
        self.context.barrier()
        store = store or Store(path, header, writes=False)
        waves = [e for e in found if (e["stage"], e["iteration"]) == ("generate", iteration)]
        logged, cfg = waves[-1].get("samples") if waves else 0, self.cfg
        counts = [0, *(event.get("samples", 0) for event in waves)]
        earlier = max((b - a for a, b in itertools.pairwise(counts)), default=0)
        # The killed run may have had more ranks.
        wave = max(earlier, cfg.prompts_per_batch * cfg.chunk_samples * self.context.world_size)
        # More than a wave comes from elsewhere, such as a file that was copied into this folder.
        if self.continued and logged is not None and 0 < len(store.held) - logged <= wave:
            store.keep(logged)
        return store

    # --- after a kill

    def begin(self, iteration: int) -> None:
        """Start or resume an iteration that has no model: remove the result of the run and the
        evaluation of an earlier model, which are outdated.
        """
        if self.context.main:
            resume.forget_result(self.root)
            (self.of(iteration) / "evaluation.json").unlink(missing_ok=True)

    def reopen(self) -> None:
        """Reopen an iteration that a smaller budget had cut short, so that it continues with the
        new budget.
        """
        folders = self.root.glob("iteration-*")
        last = max((int(path.name.removeprefix("iteration-")) for path in folders), default=0)
        logged = events(self.written / "metrics.jsonl")
        tokens = max((event.get("generated_tokens", 0) for event in logged), default=0)
        seconds = sum(event.get("seconds", 0.0) for event in logged)
        if not last or not self.was_cut(last) or self.run.budget.nearest(tokens, seconds)[0] >= 1:
            return
        # Sampling is cut at half of the seconds, so that some are left of the same budget.
        if read_json(self.of(last) / "budget.json").get("budget") == self.run.budget.limits():
            return
        folder = self.of(last)
        log.info("iteration %d goes on: the budget that cut it short is no longer spent", last)
        for name in ("model", "adapter", "checkpoints"):
            shutil.rmtree(folder / name, ignore_errors=True)
        # The files that record a cut are removed last: a kill may come between.
        for stem in ("evaluation.json", "selected.json*", "finetune.json", "budget.json"):
            for path in folder.glob(stem):
                path.unlink()

    def logged_events(self) -> list[dict[str, Any]]:
        """Return the events of an interrupted run, without those that will be logged again."""
        path = self.written / "metrics.jsonl"
        self.continued = path.exists()
        saved: dict[int, float] = {}  # fine-tuning steps of an iteration that will not come again
        standing = []
        for event in events(path, LOGGED):
            if event["stage"] == "finetune":
                iteration = event["iteration"]
                if iteration not in saved:
                    done = self.finished(iteration)
                    saved[iteration] = math.inf if done else self._steps_saved(iteration)
                if event["train_step"] > saved[iteration]:
                    break
            standing.append(event)
        while standing and not self._came_to_be(standing[-1]):
            standing.pop()
        return standing

    def _came_to_be(self, event: dict[str, Any]) -> bool:
        """Return whether the files that the last event reports exist: a kill may have come
        between.
        """
        iteration = event["iteration"]
        folder, finished = self.of(iteration), self.finished(iteration)
        if event["stage"] == "evaluate":
            return (folder / "evaluation.json").exists()
        if event["stage"] == "select" and not finished:
            saved = read_json(folder / "selected.json")
            saved.pop("made_with", None)
            return event == {**saved, **{k: event[k] for k in ("step", "stage", "iteration")}}
        path = shard_path(folder, *self.cfg.part())
        if event["stage"] == "generate" and path.exists() and not finished:
            return path.read_bytes().count(b"\n") - 1 >= event.get("samples", 0)
        return True

    def _steps_saved(self, iteration: int) -> int:
        folders = (self.of(iteration) / "checkpoints").glob("step-????????")
        sound = (path.name for path in folders if problem(path) is None)
        return max((int(name.removeprefix("step-")) for name in sound), default=0)

    def _check(self) -> None:
        """Raise ConfigError if the stage would overwrite another run, or would need a run that is
        not there.
        """
        cfg = self.cfg
        resume.check_algorithm(self.run, self.root)
        present = any(self.root.glob("iteration-*"))
        folder = self.of(self.under_way())  # also checks the settings of finished iterations
        if cfg.stage == "generate":
            present = shard_path(folder, *cfg.part()).exists()
        elif cfg.stage in ("select", "finetune"):
            present = any(folder.glob("samples-*.jsonl"))
        self.context.barrier()  # no rank reads after another has started to write
        if present and cfg.stage in ("all", "generate") and self.run.resume != "auto":
            raise ConfigError(
                f"{self.root} already holds a run. Use resume=auto to go on with it, or another"
                " hydra.run.dir."
            )
        if cfg.stage != "evaluate":
            self._check_samples()
        if not present and cfg.stage in ("select", "finetune"):
            raise ConfigError(
                f"{folder} holds no samples for algo.stage={cfg.stage}. Make them with"
                f" algo.stage=generate {name_folder(self.root)}, or give a folder that has some."
            )

    def _check_samples(self) -> None:
        """Raise ConfigError if the settings differ from those of the samples that will be read,
        before anything is written.
        """
        for path in sorted(self.root.glob("iteration-*/samples-*.jsonl")):
            iteration = int(path.parent.name.removeprefix("iteration-"))
            if self.cfg.select.buffer == "last" and self.finished(iteration):
                continue
            # A damaged line is reported when the samples are read.
            damaged = (json.JSONDecodeError, UnicodeDecodeError)
            with path.open("rb") as file, suppress(*damaged):
                saved = json.loads(file.readline())
                check_same(path, saved, sampled_with(self.run, iteration, self.digests["rows"]))


class Sizes:
    """Stores the rows that fitted after memory ran out, in FOLDER/sizes.json, across a restart."""

    def __init__(self, folder: RunFolder) -> None:
        self.path, self.writes = folder.written / "sizes.json", folder.context.main
        self.rows: dict[str, int] = read_json(self.path)
        self.used: dict[str, int] = {}

    def lower(self, key: str, rows: int) -> int:
        """Return the smaller of `rows` and the stored rows of `key`."""
        self.used[key] = min(rows, self.rows.get(key, rows))
        return self.used[key]

    def keep(self, key: str, rows: int) -> None:
        """Store `rows` if they are fewer than `lower` returned: memory has run out."""
        if rows < self.used[key]:
            self.used[key] = self.rows[key] = rows
            if self.writes:
                write_json(self.path, self.rows)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write JSON, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return the content that `write_json` wrote; empty if there is no file, or a damaged one."""
    return safe_read.read_or_warn(path, dict) or {}
