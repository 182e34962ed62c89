"""One step of a run: all that an algorithm says to the session."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from common import hardware
from common.checkpoint import describe_latest
from common.signals import EXIT_NUMBERS, RunStopped
from common.timer import Timer


@dataclass
class Span:
    """A stretch of time."""

    began: float
    seconds: float = 0.0


class Step:
    """One step, or one of the updates of a step: all that an algorithm says to the session.

    Attributes: session: the common.session.Session; index: from 0; keep: write a checkpoint after
    it, whatever the schedule.
    """

    def __init__(self, session: Any) -> None:
        self.session, self.index = session, session.state["step"]
        self.keep, self.updated = False, False
        self.numbers: dict[str, Any] = {}
        self.tokens = self.samples = 0
        self.trouble: str | None = None
        self.started, self.untimed_seconds = time.perf_counter(), 0.0

    @property
    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the run."""
        return self.session.state

    @property
    def progress(self) -> float:
        """Return how far the run is before this step, from 0 at the first to 1 at the last."""
        return self.session.budget.progress(self.index, self.session.total_steps)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time the block under `name`; blocks of one name add up."""
        return self.session.timer(name)

    def add_phases(self, seconds: dict[str, float]) -> None:
        """Add seconds by phase that something else has timed."""
        for name, value in seconds.items():
            total = self.session.timer.seconds
            total[name] = total.get(name, 0.0) + value

    @contextmanager
    def untimed(self) -> Iterator["Span"]:
        """Do not count the block as training. Yields its span."""
        span = Span(time.perf_counter())
        yield span
        span.seconds = time.perf_counter() - span.began
        self.untimed_seconds += span.seconds

    def used(self, *, tokens: int = 0, samples: int = 0) -> None:
        """Count what the step took on all ranks together, for the budget and the speed."""
        self.tokens += tokens
        self.samples += samples

    def log(self, **numbers: Any) -> None:
        """Add numbers to the event of this step."""
        self.numbers |= numbers

    def show(self, rows: Sequence[dict[str, Any]]) -> None:
        """Keep completions of this step in the run folder; rows: of this rank, each as
        common.report.samples has them.
        """
        with self.phase("keep"):
            parts = self.session.context.gather_objects(rows)
            if self.session.tracker:
                self.session.tracker.keep(self.index + 1, [r for part in parts for r in part])

    def judge(self, what: str, rows: Sequence[dict[str, Any]], advice: str = "") -> str | None:
        """Keep the rows behind numbers that are not finite. Returns why the run must stop; None =
        the step is left out.

        Args: what: the same on all ranks; rows: of this rank, with the `id` of their example.
        """
        return self.session.policy.handle(self.index + 1, what, rows, advice)

    def non_finite(self, what: str, rows: Sequence[dict[str, Any]]) -> None:
        """Leave the step out because of what was sampled, or stop the run at once, as the policy
        says.

        Raises: RunStopped.
        """
        self._stop(self.judge(what, rows))

    def stop_if(self, reason: str | None) -> None:
        """Stop the run after this step, which is logged first, where there is a reason."""
        self.trouble = self.trouble or reason

    def updates(self, count: int) -> Iterator["Step"]:
        """Yield `count` optimizer steps on one rollout, fewer where the run's steps end before. The
        first one is this step.
        """
        session, self.updated = self.session, True
        update, total = self, session.total_steps
        shared = dict(self.numbers)
        for number in range(count if total is None else min(count, total - self.index)):
            if number:
                update = Step(session)
                update.numbers = dict(shared)
            yield update
            update.close()
        session.state["updates_left"] = self.index + count - session.state["step"]

    def close(self) -> None:
        """Count, evaluate, log: what the session does after each optimizer step."""
        session, state = self.session, self.session.state
        seconds = time.perf_counter() - self.started - self.untimed_seconds
        state["step"] = done = self.index + 1
        state["seconds"] += seconds
        state["generated"] += self.tokens * session.generates
        state["evaluations"] += self.samples * session.generates
        state["skipped"] = session.policy.skipped
        session.budget.add(state["generated"], state["seconds"])
        one = state.get("before", {}).get("generated", math.inf)  # inf = not known
        given = session.run.evaluate.every, session.total_steps, one / max(1, state["generated"])
        due = session.budget.evaluation_due(done, *given) and not session.reached(done)
        if due and session.generates and not self.trouble:
            with self.phase("evaluate"):
                found = session.subject.evaluate()
            session._keep_completions(f"step-{done:08d}", done, found.kept())
            self.log(metric=found.value, metric_name=found.name, metrics=found.metrics)
        self._write_event(seconds)
        self._stop(self.trouble)
        session.timer = Timer()
        session.trace()

    def _stop(self, reason: str | None) -> None:
        """Stop the run where there is a reason."""
        if reason:
            self.session._written(self.session.writer.settle())
            last = describe_latest(self.session.context.out_dir / "checkpoints")
            raise RunStopped(f"step {self.index + 1}: {reason} {last}", EXIT_NUMBERS)

    def _write_event(self, seconds: float) -> None:
        session, state = self.session, self.session.state
        if session.tracker is None:
            return
        counted = {}
        if session.generates:
            counted = {
                "generated_tokens": state["generated"],
                "reward_evaluations": state["evaluations"],
            }
        event = {
            "step": state["step"],
            "seconds": seconds,
            "phase_seconds": session.timer.seconds,
            **session.warmed_up,
            **counted,
            "tokens_per_second": self.tokens / seconds,
            "samples_per_second": self.samples / seconds,
            "skipped_steps": state["skipped"],
            "peak_memory_gb": hardware.peak_memory_gb(session.context.device.device),
            **self.numbers,
        }
        session.warmed_up = {}
        session.tracker.log(event, session._budget_used())
        state["tracker"] = session.tracker.state()
