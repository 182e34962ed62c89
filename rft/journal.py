"""The log of an RFT run, its used tokens and seconds, and its budget; shared by all stages."""

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

from common.config import BudgetConfig, name_folder
from common.report import Tracker
from common.run import Budget
from common.session import Session
from common.system import EXIT_NUMBERS, EXIT_SIGNAL, RunStopped, events
from rft.folder import LOGGED, RunFolder, read_json, write_json
from rft.generate import shard_counts

COUNTED = ("generated_tokens", "reward_evaluations")


def _most(logged: list[dict[str, Any]], key: str) -> int:
    """Return the count of the newest event that has it; counts never fall along a log."""
    return max((event.get(key, 0) for event in logged), default=0)


class Journal:
    """The events of a run by stage, numbered by steps; every method is called on all ranks.

    Attributes:
        used: tokens and rewards so far.
        seconds: seconds so far, by iteration.
    """

    def __init__(self, session: Session, folder: RunFolder) -> None:
        self.session, self.folder, self.context = session, folder, session.context
        run, context = session.run, session.context
        if context.main and run.algo.stage == "all":
            folder.reopen()
        context.barrier()
        self.events = folder.logged_events()
        context.barrier()  # no rank reads the log after rank 0 has begun to write it
        self.step = len(self.events)
        self.stages = Counter(event["stage"] for event in self.events)
        self.seconds: Counter[int] = Counter()
        for event in self.events:
            self.seconds[event["iteration"]] += event.get("seconds", 0.0)
        self.used = {key: _most(self.events, key) for key in COUNTED}
        self.counted = self.used["generated_tokens"]  # up to the last event
        self.non_finite_handler = session.non_finite_handler
        skipped = max((e.get("skipped_steps", 0) for e in self.events), default=0)
        self.non_finite_handler.resume(skipped, folder.written)
        if context.main:
            saved = folder.written / "tracker.json"
            tracker = Tracker(run, folder.written, None, self.step, read_json(saved))
            session.log_to(tracker)
            write_json(saved, tracker.state())

    @property
    def tracker(self) -> Tracker | None:
        """The session's log, on rank 0."""
        return self.session.tracker

    # --- events

    def begin(self, what: str, total: int, done: int, unit: str) -> None:
        """Start a progress line."""
        if self.tracker:
            self.tracker.begin(what, total, done, unit)

    def agree(self) -> None:
        """Set every rank's number of events to the highest of all ranks: only rank 0 knows what it
        has logged.
        """
        self.step = max(self.context.gather_objects(self.step))

    def write(self, stage: str, iteration: int, **event: Any) -> None:
        """Write an event without moving the progress line."""
        self.step += 1
        self.stages[stage] += 1
        if self.tracker:
            event = {"step": self.step, "stage": stage, "iteration": iteration, **event}
            self.tracker.write(event)

    def count_shards(self, iteration: int) -> None:
        """Write, once, the total cost of an iteration's samples that were made in shards, each of
        which has a log of its own. Seconds are the sum of theirs, whether they ran in parallel or
        not.
        """
        logs = [events(path, LOGGED) for path in self.folder.root.glob("shard-*/metrics.jsonl")]
        waves = [[e for e in log if e["stage"] == "generate"] for log in logs]
        mine = [e for log in waves for e in log if e["iteration"] == iteration]
        counted = any((e["stage"], e["iteration"]) == ("generate", iteration) for e in self.events)
        if counted or not mine:
            return
        for key, log in itertools.product(COUNTED, waves):
            until = [e for e in log if e["iteration"] <= iteration]
            before = [e for e in log if e["iteration"] < iteration]
            self.used[key] += _most(until, key) - _most(before, key)
        seconds = sum(event["seconds"] for event in mine)
        self.seconds[iteration] += seconds
        self.write("generate", iteration, seconds=seconds, **self.used)

    def log(self, event: dict[str, Any], done: int, shown: str) -> None:
        """Write an event of sampling or fine-tuning, and move the progress line."""
        self.step += 1
        self.stages[event["stage"]] += 1
        self.seconds[event["iteration"]] += event["seconds"]
        if (gpu := self.session.gpu) is not None:
            generated = event.get("generated_tokens", self.counted)
            event = event | {"gpu": gpu.measure(event["seconds"], generated - self.counted)}
            self.counted = generated
        more = {"skipped_steps": self.non_finite_handler.skipped, **self.session.take_warm_up()}
        if self.tracker:
            self.tracker.log({"step": self.step, **event, **more}, done, shown)
        self.session.trace()

    def show(self, rows: list[dict[str, Any]]) -> None:
        """Save samples for the next event."""
        if self.tracker:
            chunk = self.stages["generate"] + 1
            self.tracker.samples.add(self.step + 1, rows, chunk)

    def sync(self) -> None:
        """Flush the log to the disk, before a file is written that implies it."""
        if self.tracker:
            self.tracker.sync()

    def non_finite(self, what: str, rows: list[dict[str, Any]], advice: str = "") -> None:
        """Save the rows that caused numbers that are not finite, under the step of the next event.
        Raises: RunStopped if the policy is to stop.
        """
        if (
            trouble := self.non_finite_handler.handle(self.step + 1, what, rows, advice)
        ) is not None:
            raise RunStopped(f"step {self.step + 1}: {trouble}", EXIT_NUMBERS)

    # --- the end

    def stop(self, iteration: int, stage: str) -> RunStopped:
        """Return the exception for a run that a signal stops."""
        root = self.folder.root
        return RunStopped(
            f"stopped in iteration {iteration}, stage {stage}; what is done is in {root}. "
            f"Go on with {name_folder(root)} resume=auto.",
            EXIT_SIGNAL,
        )

    def budget(self, limits: BudgetConfig | None = None) -> Budget:
        """Return the spent share of the run's budget, or of other limits."""
        chosen, used = limits or self.session.run.budget, self.used["generated_tokens"]
        return Budget(chosen, self.context, used, self.seconds.total(), quiet=True)

    def sampling_limits(self, iteration: int) -> BudgetConfig:
        """Return the limits for the samples of an iteration: half of the seconds that were left
        before it.
        """
        limits = self.session.run.budget
        if limits.seconds is None:
            return limits
        before = self.seconds.total() - self.seconds[iteration]
        return replace(limits, seconds=(before + limits.seconds) / 2)

    def spent_before(self, iteration: int) -> str | None:
        """Return the limit that leaves nothing for an iteration that has not started; None =
        continue.
        """
        begun = shard_counts(self.folder.of(iteration))
        return None if begun else self.budget().ended_by
