"""Metrics of a run: metrics.jsonl always; W&B, TensorBoard and the progress line read the same
events. Rank 0 only.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any

from common.config import Run
from common.report.advice import Adviser, settings
from common.report.progress import Progress
from common.report.samples import Samples
from common.system import (
    EVALUATIONS,
    cut_events,
    events,
    import_named,
    jsonable,
    numeric_values,
    write_jsonl,
)
from common.task import plain

log = logging.getLogger("clutch")
# the keys of an event with held-out measures that evaluations.jsonl has
KEPT = ("step", "stage", "iteration", "metric", "metric_name", "metrics", "validation")
TABLE_ROWS = 32  # the most completions that W&B and TensorBoard show; the files have all


class Tracker:
    """Writes the events of one run.

    Args:
        steps: the number of steps; None = the run calls `begin` per stage.
        resumed: the number of finished steps; later events are removed.
        state: the result of `state()` in the interrupted run.
    """

    def __init__(
        self,
        run: Run,
        out_dir: Path,
        steps: int | None,
        resumed: int = 0,
        state: dict[str, Any] | None = None,
    ) -> None:
        self.out_dir, self.artifacts = out_dir, run.tracker.artifacts
        self.shown: dict[str, str] = run.algo.PROGRESS
        self.step = resumed  # of the last event
        for path in (out_dir / "metrics.jsonl", out_dir / EVALUATIONS):
            cut_events(path, resumed)
        for path in (out_dir / "completions").glob("step-*.jsonl"):
            if int(path.stem.removeprefix("step-")) > resumed:
                path.unlink()
        self.samples = Samples(out_dir, run.completions == "all", resumed)
        self.name, self.ids = run.tracker.name, dict(state or {})
        own = {"id": self.ids[self.name]} if self.name in self.ids else {}
        self.sink = open_sink(run, out_dir, resumed, own)
        self.file = open(out_dir / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115 (closed in `close`)
        self.held: list[dict[str, Any]] = events(out_dir / EVALUATIONS)
        self.line: Progress | None = None
        self.adviser = Adviser(settings(run.algo, task=run.task))
        if steps is not None:
            self.begin("", steps, resumed, "step")

    def begin(self, what: str, total: int, done: int, unit: str) -> None:
        """Start a progress line: `what` is counted in `unit`s from `done` to `total`."""
        if self.line:
            self.line.close()
        self.line = Progress(what, total, done, unit)

    def write(self, event: dict[str, Any]) -> None:
        """Write one event: a flat dict (phase seconds nested) with at least `step`, 1-based."""
        self.step = event["step"]
        logged = jsonable(event)
        self.file.write(json.dumps(logged) + "\n")
        self.file.flush()
        if self.sink:
            self.sink.log(numeric_values(event), event["step"])
        if "metrics" in event:
            self._evaluated({key: event[key] for key in event if key in KEPT})
        for advice in self.adviser.look(logged):
            change = f" Try {advice.change}." if advice.change else ""
            log.warning("step %d: %s%s", self.step, advice.text, change)

    def sync(self) -> None:
        """Flush the log to the disk, before a checkpoint, in case of a power cut."""
        os.fsync(self.file.fileno())
        self.samples.sync()

    def log(self, event: dict[str, Any], done: int | None = None, shown: str | None = None) -> None:
        """Write an event and move the progress line.

        Args:
            done: units of the progress line; None = the step.
            shown: the text of the progress line; None = reward, metric and speed.
        """
        assert self.line is not None
        self.write(event)
        if shown is None:
            shown = describe_event(event, self.held[-1] if self.held else None, self.shown)
        measured = "metric" in event or "validation" in event
        self.line.to(event["step"] if done is None else done, shown, always=measured)

    def measured(
        self,
        step: int,
        name: str,
        metrics: dict[str, float],
        validation: float | None = None,
        **used: int,
    ) -> None:
        """Write held-out measures that belong to no event: before the first step and after the
        last.

        Args:
            name: the name of the headline.
            validation: the headline on the validation examples, if there are any.
            used: costs so far, as the x axes of curves.
        """
        record = {"step": step, "metric": metrics[name], "metric_name": name, "metrics": metrics}
        if validation is not None:
            record["validation"] = validation
        self._evaluated(record)
        if self.sink:
            self.sink.log(numeric_values(record) | used, step)

    def _evaluated(self, record: dict[str, Any]) -> None:
        """Write one line per step, or per iteration of a run in stages, to RUN/evaluations.jsonl:
        the latest evaluation, at the step of the first one.
        """
        unit = "iteration" if "iteration" in record else "step"
        earlier = [held for held in self.held if held.get(unit) == record[unit]]
        others = [held for held in self.held if held not in earlier]
        newest = record | {"step": min(held["step"] for held in (*earlier, record))}
        self.held = sorted((*others, newest), key=lambda held: held["step"])
        write_jsonl(self.out_dir / EVALUATIONS, self.held)

    def completions(self, name: str, step: int, rows: list[dict[str, Any]]) -> None:
        """Save completions to RUN/completions/NAME.jsonl, and send the first of them to the tracker
        as a table.
        """
        folder = self.out_dir / "completions"
        folder.mkdir(exist_ok=True)
        write_jsonl(folder / f"{name}.jsonl", rows, ascii_only=False)
        if self.sink and rows:
            shown = [  # a conversation as text, without the scores that comparisons read
                {k: plain(v) if isinstance(v, list) else v for k, v in row.items() if k != "scores"}
                for row in rows[:TABLE_ROWS]
            ]
            self.sink.table(f"completions/{name}", step, shown)

    def artifact(self, kind: str, folder: Path, alias: str) -> None:
        """Upload `folder` as a version of the artifact `kind` (checkpoint, model), if
        tracker.artifacts is true.
        """
        if self.sink and self.artifacts:
            self.sink.artifact(kind, folder, alias)

    def state(self) -> dict[str, Any]:
        """Return the id of the run by tracker, with which a resumed run continues the same tracked
        run.
        """
        own = {self.name: self.sink.id} if self.sink and self.sink.id else {}
        return self.ids | own

    def summary(self, values: dict[str, Any]) -> None:
        """Send the headline numbers of the run to the tracker."""
        if self.sink:
            self.sink.summary(values)

    def close(self, code: int = 0) -> None:
        """Flush and close; may be called again.

        Args: code: the exit code of the run.
        """
        if self.line:
            self.line.close()
        self.file.close()
        if self.sink:
            self.sink.close(code)
            self.sink = None


def open_sink(run: Run, out_dir: Path, resumed: int, state: dict[str, Any]) -> Any:
    """Open the tracker that the run names in addition to metrics.jsonl; None without one.

    Its class is called on rank 0 with (run, out_dir, resumed, state): `resumed` is the number of
    finished steps, and `state` has the `id` of the resumed run, if any. It has `id`, which may be
    None, and log(values, step), table(name, step, rows), summary(values) and close(exit code); and,
    with tracker.artifacts, artifact(kind, folder, alias).
    """
    if (target := run.tracker._target_) is None:
        return None
    module, _, name = target.rpartition(".")
    advice = "Check the name, and that its folder is on PYTHONPATH."
    sink = import_named(f"tracker._target_={target!r}", module, name, advice)
    return sink(run, out_dir, resumed, state)


def describe_event(
    event: dict[str, Any], held: dict[str, Any] | None, shown: dict[str, str]
) -> str:
    """Return the text of the progress line for a step, with the most important numbers first.

    Args:
        held: the last held-out measures; those of an earlier step are shown as "bleu 21.5 @40".
        shown: the format of each number by name, with "metric" for the headline of `held`.
    """
    parts = []
    since = f" @{held['step']}" if held and held["step"] != event["step"] else ""
    for name, text in shown.items():
        if name == "metric":
            parts += [f"{held['metric_name']} {held['metric']:.1f}{since}"] if held else []
        elif name in event:
            parts.append(text.format(event[name]))
    return ", ".join(parts)
