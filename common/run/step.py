"""One step of a run: all that an algorithm says to the session."""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from common.run.nonfinite import NonFinitePolicy
from common.run.timer import Timer


@dataclass
class Step:
    """One step, or one of the updates of a step. It is a record: the session reads it when the
    algorithm's block ends.

    Attributes:
        index: from 0. progress: how far the run is before this step, from 0 at the first to 1 at
            the last.
        state: what a checkpoint keeps of the run. timer: seconds by phase. policy: judges numbers
            that are not finite.
        numbers: of the step's event. tokens, samples: what it took on all ranks together.
        rows: completions of this rank that the run keeps, as common.report.samples has them; None
            on all ranks where there are none.
        trouble: why the run must stop after this step; None = it goes on. logged: whether its
            event is written before.
        keep: write a checkpoint after it, whatever the schedule.
    """

    index: int
    progress: float
    state: dict[str, Any]
    timer: Timer
    policy: NonFinitePolicy
    numbers: dict[str, Any] = field(default_factory=dict)
    tokens: int = 0
    samples: int = 0
    rows: Sequence[dict[str, Any]] | None = None
    trouble: str | None = None
    logged: bool = True
    keep: bool = False
    started: float = field(default_factory=time.perf_counter)
    untimed_seconds: float = 0.0

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time the block under `name`; blocks of one name add up."""
        return self.timer(name)

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Do not count the block as training."""
        began = time.perf_counter()
        yield
        self.untimed_seconds += time.perf_counter() - began

    def used(self, *, tokens: int = 0, samples: int = 0) -> None:
        """Count what the step took on all ranks together, for the budget and the speed."""
        self.tokens += tokens
        self.samples += samples

    def log(self, **numbers: Any) -> None:
        """Add numbers to the event of this step."""
        self.numbers |= numbers

    def event(
        self, seconds: float, counted: bool, warmed_up: dict[str, float], memory_gb: float
    ) -> dict[str, Any]:
        """Return what the log says of the step: its seconds, those of what came before the first,
        the peak of memory, and if `counted` what the run has generated so far.
        """
        state = self.state
        totals = {"generated_tokens": "generated", "reward_evaluations": "evaluations"}
        speeds = {"tokens_per_second": self.tokens, "samples_per_second": self.samples}
        return {
            "step": state["step"],
            "seconds": seconds,
            "phase_seconds": self.timer.seconds,
            **warmed_up,
            **({name: state[key] for name, key in totals.items()} if counted else {}),
            # A further update on one rollout has none.
            **{name: count / seconds for name, count in speeds.items() if self.samples},
            "skipped_steps": state["skipped"],
            "peak_memory_gb": memory_gb,
            **self.numbers,
        }

    def stop_if(self, reason: str | None) -> None:
        """Stop the run after this step, which is logged first, where there is a reason."""
        self.trouble = self.trouble or reason

    def judge(self, what: str, rows: Sequence[dict[str, Any]], advice: str = "") -> str | None:
        """Keep the rows behind numbers that are not finite. Returns why the run must stop; None =
        the step is left out.

        Args: what: the same on all ranks; rows: of this rank, with the `id` of their example.
        """
        return self.policy.handle(self.index + 1, what, rows, advice)

    def non_finite(self, what: str, rows: Sequence[dict[str, Any]]) -> None:
        """Leave the step out because of what was sampled, or stop the run without its event, as the
        policy says.
        """
        self.trouble = self.judge(what, rows)
        self.logged = self.trouble is None
