"""Metrics of a run: metrics.jsonl always; W&B, TensorBoard and the progress line read the same events. Rank 0 only."""

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.checkpoint import write_text
from common.config import ConfigError, Run

log = logging.getLogger("clutch")


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


class Tracker:
    """Writes the events of one run.

    Args: steps: of the whole run; None = the run tells by `begin`, stage by stage. resumed: steps already done; later
    events of an earlier attempt are cut off. state: what `state()` of the interrupted run returned.
    """

    def __init__(
        self, run: Run, out_dir: Path, steps: int | None, resumed: int = 0, state: dict[str, Any] | None = None
    ) -> None:
        self.out_dir = out_dir
        self.path = out_dir / "metrics.jsonl"
        _cut(self.path, resumed)
        self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (closed in `close`)
        self.sink = _sink(run, out_dir, resumed, state or {})
        self.bar: Any = None
        if steps is not None:
            self.begin("", steps, resumed, "step")

    def begin(self, what: str, total: int, done: int, unit: str) -> None:
        """A new progress line: `what` is counted in `unit`s from `done` to `total`."""
        if self.bar is not None:
            self.bar.close()
        shown = sys.stderr.isatty()
        self.bar = tqdm(desc=what or None, total=total, initial=done, unit=unit, dynamic_ncols=True) if shown else None
        self.what, self.total, self.start, self.unit = what, total, done, unit
        self.printed = self.began = time.monotonic()
        self.first = True

    def write(self, event: dict[str, Any]) -> None:
        """One event: a flat dict (phase seconds nested) with at least `step`, 1-based."""
        self.file.write(json.dumps(event) + "\n")
        self.file.flush()
        if self.sink:
            flat = _flat(event)
            if "stage" in event:  # curves of different stages are different curves
                flat = {k if k == "step" else f"{event['stage']}/{k}": v for k, v in flat.items() if k != "stage"}
            self.sink.log(flat)

    def log(self, event: dict[str, Any], done: int | None = None, shown: str | None = None) -> None:
        """Write an event and move the progress line.

        Args: done: units of the progress line, None = the step; shown: its text, None = reward, metric and speed.
        """
        self.write(event)
        done = int(event["step"]) if done is None else done
        shown = _shown(event) if shown is None else shown
        if self.bar is not None:
            self.bar.set_postfix_str(shown, refresh=False)
            self.bar.update(done - self.bar.n)
            return
        now = time.monotonic()
        if now - self.printed > 10 or self.first or done == self.total or "metric" in event:
            self.printed, self.first = now, False
            left = (now - self.began) / max(1, done - self.start) * (self.total - done)
            what = f"{self.what}: " if self.what else ""
            log.info("%s%s %d/%d: %s, %.0f s left", what, self.unit, done, self.total, shown, left)

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to go on in the same tracker run."""
        return {"id": self.sink.id} if self.sink and self.sink.id else {}

    def summary(self, values: dict[str, Any]) -> None:
        """The headline numbers of the run."""
        if self.sink:
            self.sink.summary(values)

    def close(self) -> None:
        """Flush and end."""
        if self.bar is not None:
            self.bar.close()
        self.file.close()
        if self.sink:
            self.sink.close()


def _shown(event: dict[str, Any]) -> str:
    """What the progress line says of a step of a loop that samples and learns at once."""
    text = f"reward {event['reward']:.4f}"
    if "metric" in event:
        text += f", {event['metric_name']} {event['metric']:.2f}"
    if "drift" in event:
        text += f", drift {event['drift']:.2f}"
    return f"{text}, {event['tokens_per_second']:.0f} tokens/s"


@contextmanager
def closed_on_error(tracker: Tracker | None) -> Iterator[None]:
    """Close `tracker` if the block is left by an exception, so that what was logged is not lost."""
    try:
        yield
    except BaseException:
        if tracker:
            tracker.close()
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


def _cut(path: Path, steps: int) -> None:
    """Drop events after `steps`, and a torn last line, from an interrupted run's file."""
    if not path.exists():
        return
    kept = [json.dumps(event) + "\n" for event in events(path) if event["step"] <= steps]
    write_text(path, "".join(kept))


def _flat(event: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"phase_seconds": {"rollout": 1}} -> {"phase_seconds/rollout": 1}."""
    flat: dict[str, Any] = {}
    for key, value in event.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}/")
        else:
            flat[prefix + key] = value
    return flat


def _sink(run: Run, out_dir: Path, resumed: int, state: dict[str, Any]) -> Any:
    if run.tracker.name == "wandb":
        return _Wandb(run, out_dir, state)
    if run.tracker.name == "tensorboard":
        return _TensorBoard(out_dir, resumed)
    return None


class _Wandb:
    def __init__(self, run: Run, out_dir: Path, state: dict[str, Any]) -> None:
        import wandb  # seconds to import, so only when asked for

        mode = run.tracker.mode or os.environ.get("WANDB_MODE") or ("online" if wandb.api.api_key else "offline")
        self.run = wandb.init(
            project=run.tracker.project,
            name=out_dir.name,
            id=state.get("id"),
            resume="allow",
            dir=out_dir,
            mode=mode,  # type: ignore[arg-type]
            config=asdict(run),
            job_type=run.algo.name,
        )
        self.id = self.run.id
        self.run.define_metric("*", step_metric="step")

    def log(self, event: dict[str, Any]) -> None:
        self.run.log(event)

    def summary(self, values: dict[str, Any]) -> None:
        self.run.summary.update(values)

    def close(self) -> None:
        self.run.finish()


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

    def log(self, event: dict[str, Any]) -> None:
        for key, value in event.items():
            if isinstance(value, (int, float)) and key != "step":
                self.writer.add_scalar(key, value, event["step"])

    def summary(self, values: dict[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, (int, float)):
                self.writer.add_scalar(f"summary/{key}", value)

    def close(self) -> None:
        self.writer.close()
