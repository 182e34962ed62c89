"""Metrics of a run: metrics.jsonl always; W&B, TensorBoard and the progress line read the same events. Rank 0 only."""

import json
import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.checkpoint import write_text
from common.config import ConfigError, Run, flat
from common.signals import RunStopped
from common.tasks import plain

log = logging.getLogger("clutch")

EVALUATIONS = "evaluations.jsonl"  # in the run folder: every held-out measure, the one before and the one after too
KEPT = (
    "step",
    "stage",
    "iteration",
    "metric",
    "metric_name",
    "metrics",
    "validation",
)  # of an event with held-out measures
# The same curve whatever the stage of a run, so that runs of different algorithms lie in one plot.
SHARED = ("step", "iteration", "metric", "metric_name", "metrics", "generated_tokens", "reward_evaluations")
TABLE_ROWS = 32  # of the completions that W&B and TensorBoard show; the files have all


class Phases:
    """Seconds of a step by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block under `name`; blocks of one name add up."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


class Progress:
    """A progress line: a bar on a terminal, a plain line now and then elsewhere. What has no room in the terminal is left out.

    Args: what: before the count; total, done: in `unit`s; brief: for work inside a step: the bar goes when it is done, and
    where there is no bar nothing is said before ten seconds have passed.
    """

    def __init__(self, what: str, total: int, done: int = 0, unit: str = "step", brief: bool = False) -> None:
        self.name = f"{what}: {unit}" if what else unit
        self.total, self.start, self.brief = total, done, brief
        self.began = self.printed = time.monotonic()
        self.said = brief
        self.bar: Any = None
        if sys.stderr.isatty():
            self.width = 10 if _columns() >= 100 else 6
            layout = f"{self.name} {{n_fmt}}/{{total_fmt}} |{{bar:{self.width}}}| {{remaining}} left{{postfix}}"
            self.bar = tqdm(total=total, initial=done, bar_format=layout, leave=not brief, dynamic_ncols=True)

    def to(self, done: int, text: str = "", always: bool = False) -> None:
        """Move to `done` of `total`. always: say it even if a line was printed a moment ago."""
        if self.bar is not None:
            self.bar.set_postfix_str(self._cut(text), refresh=False)
            self.bar.update(done - self.bar.n)
            return
        now = time.monotonic()
        due = now - self.printed > max(10, (now - self.began) / 50)  # seconds; days of training are not a million lines
        if due or not self.said or always or (done == self.total and not self.brief):
            self.printed, self.said = now, True
            left = (now - self.began) / max(1, done - self.start) * (self.total - done)
            parts = [f"{tqdm.format_interval(left)} left", *([text] if text else [])]
            log.info("%s %d/%d: %s", self.name, done, self.total, ", ".join(parts))

    def _cut(self, text: str) -> str:
        """As many whole parts of `text` as the terminal has room for."""
        head = f"{self.name} {self.total}/{self.total} |{' ' * self.width}| 0:00:00 left, "
        while len(head) + len(text) >= _columns() and ", " in text:
            text = text.rpartition(", ")[0]
        return text

    def close(self) -> None:
        """End the line."""
        if self.bar is not None:
            self.bar.close()


def _columns() -> int:
    """Of the terminal."""
    return shutil.get_terminal_size((80, 24)).columns


class Tracker:
    """Writes the events of one run.

    Args: steps: of the whole run; None = the run tells by `begin`, stage by stage. resumed: steps already done; later
    events of an earlier attempt are cut off. state: what `state()` of the interrupted run returned.
    """

    def __init__(
        self, run: Run, out_dir: Path, steps: int | None, resumed: int = 0, state: dict[str, Any] | None = None
    ) -> None:
        self.out_dir, self.artifacts = out_dir, run.tracker.artifacts
        self.step = resumed  # of the last event
        for path in (out_dir / "metrics.jsonl", out_dir / EVALUATIONS):
            _cut(path, resumed)
        for path in (out_dir / "completions").glob("step-*.jsonl"):
            if int(path.stem.removeprefix("step-")) > resumed:
                path.unlink()
        self.file = open(out_dir / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115 (closed in `close`)
        self.sink = _sink(run, out_dir, resumed, state or {})
        self.held: list[dict[str, Any]] = events(out_dir / EVALUATIONS)
        self.line: Progress | None = None
        if steps is not None:
            self.begin("", steps, resumed, "step")

    def begin(self, what: str, total: int, done: int, unit: str) -> None:
        """A new progress line: `what` is counted in `unit`s from `done` to `total`."""
        if self.line:
            self.line.close()
        self.line = Progress(what, total, done, unit)

    def write(self, event: dict[str, Any]) -> None:
        """One event: a flat dict (phase seconds nested) with at least `step`, 1-based."""
        self.step = event["step"]
        self.file.write(json.dumps(_json(event)) + "\n")
        self.file.flush()
        if self.sink:
            self.sink.log(numbers(event), event["step"])
        if "metrics" in event:
            self._evaluated({key: event[key] for key in event if key in KEPT})

    def sync(self) -> None:
        """Bring what is logged to the disk: before a checkpoint, so that after a power cut no event before it is missing."""
        os.fsync(self.file.fileno())

    def log(self, event: dict[str, Any], done: int | None = None, shown: str | None = None) -> None:
        """Write an event and move the progress line.

        Args: done: units of the progress line, None = the step; shown: its text, None = reward, metric and speed.
        """
        assert self.line is not None
        self.write(event)
        text = _shown(event, self.held[-1] if self.held else None) if shown is None else shown
        self.line.to(int(event["step"]) if done is None else done, text, always="metric" in event)

    def measured(self, step: int, name: str, metrics: dict[str, float], **used: int) -> None:
        """Held-out measures that no event has: those before the first step and after the last.

        Args: name: the headline's; used: what it took so far, for curves against it.
        """
        record = {"step": step, "metric": metrics[name], "metric_name": name, "metrics": metrics}
        self._evaluated(record)
        if self.sink:
            self.sink.log(numbers(record) | used, step)

    def _evaluated(self, record: dict[str, Any]) -> None:
        """Keep one line a step in RUN/evaluations.jsonl."""
        others = (held for held in self.held if held["step"] != record["step"])
        self.held = sorted((*others, record), key=lambda held: held["step"])
        write_text(self.out_dir / EVALUATIONS, "".join(json.dumps(held) + "\n" for held in self.held))

    def completions(self, name: str, step: int, rows: list[dict[str, Any]]) -> None:
        """Keep completions in RUN/completions/NAME.jsonl, and the first of them as a table of that name, never overwritten."""
        folder = self.out_dir / "completions"
        folder.mkdir(exist_ok=True)
        write_text(folder / f"{name}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        if self.sink and rows:
            shown = [{key: _text(value) for key, value in row.items()} for row in rows[:TABLE_ROWS]]
            self.sink.table(f"completions/{name}", step, shown)

    def artifact(self, kind: str, folder: Path, alias: str) -> None:
        """With tracker.artifacts, upload `folder` as a new version of the run's artifact `kind`: checkpoint or model."""
        if self.sink and self.artifacts:
            self.sink.artifact(kind, folder, alias)

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to go on in the same tracker run."""
        return {"id": self.sink.id} if self.sink and self.sink.id else {}

    def summary(self, values: dict[str, Any]) -> None:
        """The headline numbers of the run."""
        if self.sink:
            self.sink.summary(values)

    def close(self, code: int = 0) -> None:
        """Flush and end; safe to call again. code: of a run that failed, not 0."""
        if self.line:
            self.line.close()
        self.file.close()
        if self.sink:
            self.sink.close(code)
            self.sink = None


def _json(value: Any) -> Any:
    """The same with null for NaN and infinity, which JSON has not."""
    if isinstance(value, dict):
        return {key: _json(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _shown(event: dict[str, Any], held: dict[str, Any] | None) -> str:
    """What the progress line says of a step of a loop that samples and learns at once; what may be cut comes last.

    held: the last held-out measures.
    """
    parts = [f"reward {event['reward']:.3f}"]
    if held:
        parts.append(f"{held['metric_name']} {held['metric']:.1f}")
    parts.append(f"{event['tokens_per_second']:,.0f} tokens/s")
    if "drift" in event:
        parts.append(f"drift {event['drift']:.2f}")
    if event.get("dead_groups"):
        parts.append(f"{100 * event['dead_groups']:.0f} % dead groups")
    return ", ".join(parts)


def _text(value: Any) -> Any:
    """A cell of a table: numbers and texts as they are, a conversation as text."""
    return plain(value) if isinstance(value, list) else value


@contextmanager
def closed_on_error(tracker: Tracker | None) -> Iterator[None]:
    """Close `tracker` if the block is left by an exception, so that what was logged is not lost.

    A run that was stopped has a report of what it did so far.
    """
    try:
        yield
    except BaseException as error:
        if tracker:
            tracker.close(error.code if isinstance(error, RunStopped) else 1)
            if isinstance(error, RunStopped) and (tracker.out_dir / "run.yaml").exists():
                from common import pages  # which reads what is written here

                pages.write_or_warn(tracker.out_dir)
        raise


def events(path: Path) -> list[dict[str, Any]]:
    """What an interrupted run has logged; a torn line is left out."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def markdown_table(rows: list[dict[str, Any]]) -> str:
    """Rows as a Markdown table; what would end a cell is escaped."""
    if not rows:
        return ""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)


def _cell(value: Any) -> str:
    text = str(value).strip().replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
    return text.replace("\r", "").replace("\n", "<br>")


def _cut(path: Path, steps: int) -> None:
    """Drop events after `steps`, and a torn last line, from an interrupted run's file."""
    if not path.exists():
        return
    kept = [json.dumps(event) + "\n" for event in events(path) if event["step"] <= steps]
    write_text(path, "".join(kept))


def numbers(event: dict[str, Any]) -> dict[str, float]:
    """The numbers of an event under the names that W&B, TensorBoard and the report show, without the step.

    {"phase_seconds": {"rollout": 1}} -> {"phase_seconds/rollout": 1}, with the stage in front where there is one: curves of
    different stages are different curves, but for SHARED ones.
    """
    if stage := event.get("stage"):
        own = {key: value for key, value in event.items() if key not in (*SHARED, "stage")}
        named = flat({key: event[key] for key in SHARED if key in event}, separator="/") | flat(own, f"{stage}/", "/")
    else:
        named = flat(event, separator="/")
    return {key: v for key, v in named.items() if isinstance(v, (int, float)) and key != "step"}


def _sink(run: Run, out_dir: Path, resumed: int, state: dict[str, Any]) -> Any:
    if run.tracker.name == "wandb":
        return _Wandb(run, out_dir, resumed, state)
    if run.tracker.name == "tensorboard":
        return _TensorBoard(out_dir, resumed)
    return None


def sweep_of(out_dir: Path) -> Path | None:
    """The folder of the multirun that a run folder is a job of, None where it is of none."""
    return next((parent for parent in out_dir.parents if (parent / "multirun.yaml").exists()), None)


class _Wandb:
    """One W&B run a job, of rank 0. Its history is by our step, so that a resumed run goes on where it was."""

    def __init__(self, run: Run, out_dir: Path, resumed: int, state: dict[str, Any]) -> None:
        import wandb  # seconds to import, so only when asked for

        self.wandb, settings, sweep = wandb, run.tracker, sweep_of(out_dir)
        wandb.setup(wandb.Settings(silent=True))  # what matters of its chatter is logged below
        mode = settings.mode or os.environ.get("WANDB_MODE")
        mode = mode or ("online" if wandb.login(prompt=False, verify=False) else "offline")
        offline = mode == "offline"
        options: dict[str, Any] = dict(
            project=settings.project,
            entity=settings.entity,
            name=str(out_dir.relative_to(sweep.parent)) if sweep else out_dir.name,
            group=settings.group or (sweep.name if sweep else None),
            job_type=settings.job_type or run.algo.name,
            id=state.get("id"),
            resume=None if offline else "allow",  # offline, W&B goes on by the id alone and warns of the other
            dir=out_dir,
            mode=mode,
            config=asdict(run),
        )
        try:
            self.run = wandb.init(**options)
        except wandb.Error as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            raise ConfigError(
                f"tracker=wandb cannot start: {reason}. Run wandb login, or use tracker.mode=offline and wandb sync later."
            ) from None
        self.id = self.run.id
        # What W&B already has is not sent again: offline it cannot tell.
        self.known, self.resumed = max(self.run.step, resumed + 1 if resumed else 0), resumed
        for axis in ("step", "epoch", "iteration", "generated_tokens", "reward_evaluations"):
            self.run.define_metric(axis, hidden=axis != "generated_tokens")
        self.run.define_metric("*", step_metric="step")
        self.run.define_metric("evaluate/*", step_metric="iteration")
        self.run.define_metric("validation/*", step_metric="epoch")
        self.run.define_metric("metric", step_metric="step", summary="max,last")
        log.info("W&B: %s", f"offline; send it with: wandb sync {self._folder()}" if offline else self.run.url)

    def _folder(self) -> Path:
        return Path(self.run.settings.sync_dir)

    def log(self, values: dict[str, Any], step: int) -> None:
        # What comes at the step that a run was resumed at is its end: no event has that step again.
        if step >= self.known or step == self.resumed > 0:
            self.run.log({"step": step, **values}, step=max(step, self.known))

    def table(self, name: str, step: int, rows: list[dict[str, Any]]) -> None:
        table = self.wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self.log({name: table}, step)

    def artifact(self, kind: str, folder: Path, alias: str) -> None:
        artifact = self.wandb.Artifact(f"{kind}-{self.id}", type=kind)
        for path in sorted(folder.rglob("*")):  # add_dir prints
            if path.is_file():
                artifact.add_file(str(path), name=str(path.relative_to(folder)))
        self.run.log_artifact(artifact, aliases=["latest", alias])

    def summary(self, values: dict[str, Any]) -> None:
        self.run.summary.update(values)

    def close(self, code: int) -> None:
        self.run.finish(exit_code=code)


class _TensorBoard:
    id = None

    def __init__(self, out_dir: Path, resumed: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                "tracker=tensorboard needs a package: pip install tensorboard. Or use tracker=jsonl."
            ) from None
        self.writer = SummaryWriter(str(out_dir / "tensorboard"), purge_step=resumed + 1 if resumed else None)

    def log(self, values: dict[str, float], step: int) -> None:
        for key, value in values.items():
            self.writer.add_scalar(key, value, step)

    def table(self, name: str, step: int, rows: list[dict[str, Any]]) -> None:
        self.writer.add_text(name, markdown_table(rows), step)

    def summary(self, values: dict[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, (int, float)):
                self.writer.add_scalar(f"summary/{key}", value)

    def close(self, code: int) -> None:
        self.writer.close()
