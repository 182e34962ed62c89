"""The frame around the steps of a run, the same for every algorithm.

    with Session(run, context, subject) as session:
        session.start(state, plan)
        for step in session.steps():
            ...                        # the algorithm; it tells `step` what it did
        return session.finish()

An algorithm tells a step numbers (`log`), cost (`used`), trouble (`non_finite`, `stop_if`), phases
(`phase`) and completions (`rows`), nothing else. When its block ends, the session does in order:

1. it counts the step, its seconds and what it used, and looks at the budget;
2. evaluates on held-out examples, if that is due and the run neither ends here nor is in trouble;
3. writes the step's event, on rank 0;
4. stops the run if a guard tripped or the loss was not finite (exit code 3);
5. writes a checkpoint if one is due, a signal has come, or this was the last step;
6. stops the run after a signal, unless all is done (exit code 75).

Seconds are of training alone: neither of evaluations nor of checkpoints. Several optimizer steps on
one rollout are `session.updates(step, n)`: each is counted, evaluated and logged (1 to 4);
checkpoints and signals wait for the last of them, as the rollout that is learnt from is not stored.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

from torch import Tensor

from common.checkpoint import checkpoint
from common.config import Run, name_folder
from common.device import hardware, profile_steps
from common.distributed import Context
from common.evaluation import Evaluation
from common.report import Tracker, gpu_usage, page, summary
from common.run import Budget, Checkpointed, Checkpoints, NonFinitePolicy, RunState, Timer, resume
from common.system import EXIT_NUMBERS, EXIT_SIGNAL, RunStopped, StopSignal, write_log

log = logging.getLogger("clutch")


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
    state: RunState
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
        totals = {"generated_tokens": state.generated, "reward_evaluations": state.evaluations}
        speeds = {"tokens_per_second": self.tokens, "samples_per_second": self.samples}
        return {
            "step": state.step,
            "seconds": seconds,
            "phase_seconds": self.timer.seconds,
            **warmed_up,
            **(totals if counted else {}),
            # A further update on one rollout has none.
            **{name: count / seconds for name, count in speeds.items() if self.samples},
            "skipped_steps": state.skipped,
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


class Subject(Protocol):
    """The thing that a run trains: a language model with its task, or a classifier."""

    @property
    def task(self) -> Any:
        """The task that it is trained on."""
        ...

    @property
    def model(self) -> Any:
        """The module whose weights are checkpointed and exported."""
        ...

    @property
    def precision(self) -> Any:
        """The dtype of forward passes."""
        ...

    @property
    def held_out(self) -> Any:
        """The examples that every evaluation measures on."""
        ...

    @property
    def reproducible(self) -> bool:
        """Whether the same command gives the same numbers."""
        ...

    @property
    def name(self) -> str:
        """The name of what is trained, for people."""
        ...

    @property
    def digests(self) -> dict[str, str]:
        """Hashes: of the `rows` of the task, and of what is measured `beside` them, if anything."""
        ...

    def wake(self) -> None:
        """Start what samples, so that the time of a step or of a completion is that alone."""
        ...

    def evaluate(self) -> Evaluation:
        """Measure on the held-out examples; every rank returns the same."""
        ...

    def gather(self) -> dict[str, Tensor] | None:
        """Return the weights that are exported, where they are shared out, on rank 0."""
        ...

    def export(self, folder: Path, weights: dict[str, Tensor] | None) -> Path:
        """Write what was trained below `folder`; return where. weights: of a sharded model."""
        ...

    def close(self) -> None:
        """Give back workers and files."""
        ...


class Session:
    """One run on one rank. Every method is called on all ranks.

    Attributes:
        state: what a checkpoint keeps of the run (common/run/state.py). An algorithm may add keys
            of its own to `state.own` before `start`.
        total_steps: of the whole run; None = a budget ends it.
        ending: what ends the run before its steps or its budget do, as result.json says it.
        generates: whether tokens and rewards are counted and logged, and the subject evaluated on a
            schedule.
    """

    def __init__(
        self,
        run: Run,
        context: Context,
        subject: Subject,
        *,
        steps: int | None = None,
        generates: bool = True,
    ) -> None:
        self.run, self.context, self.subject = run, context, subject
        self.generates, self.total_steps = generates, steps
        self.state = RunState(reproducible=subject.reproducible, digests=subject.digests)
        self.stack = ExitStack()
        self.tracker: Tracker | None = None
        self.warmed_up: dict[str, float] = {}
        self.timer = Timer()
        self.ending: str | None = None
        self.signal: StopSignal | None = None
        self.checkpoints: Checkpoints | None = None
        self.gpu: gpu_usage.Usage | None = None
        self.policy = NonFinitePolicy(run, context, subject.precision.compute)
        self.budget = Budget(run.budget, context)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self.checkpoints is not None:
            self.checkpoints.settle(self.tracker)
        self.stack.close()
        self.subject.close()
        if error is not None and self.tracker:
            stopped = isinstance(error, RunStopped)
            self.tracker.close(error.code if stopped else 1)
            if stopped and (self.context.out_dir / "run.yaml").exists():
                page.write_or_warn(self.context.out_dir)  # what it came to so far

    # --- before the steps

    def start(self, saved: Checkpointed, plan: dict[str, str]) -> None:
        """Resume or begin: print the plan, measure before the first step, open the log. Raises:
        ConfigError where the run folder does not allow it.
        """
        run, context, state = self.run, self.context, self.state
        self.checkpoints = Checkpoints(run, context, self.subject.model, saved)
        if context.main:
            summary.print_plan(plan | {"folder": str(context.out_dir)})
        resume.take_over(run, context, state, saved)
        self.policy.skipped = state.skipped
        write_log(log)
        if context.main:
            facts = context.device.name, state.reproducible, plan.get("attention")
            summary.write_run(run, context.out_dir, *facts)
        self.subject.wake()
        if state.before is None and self.generates:
            before = self.subject.evaluate()
            state.before = before.kept()
            if context.main:
                log.info("before: held-out %s %.2f", before.name, before.value)
            self.budget.foresee(run, before, len(self.subject.held_out))
        if self.generates and summary.has_learnt_all(self.before["metrics"]):
            self.ending = summary.LEARNT_ALL
        self.budget.add(state.generated, state.seconds)
        if context.main:
            self._open_tracker()

    def warm_up(self, rehearse: Callable[[], Any]) -> None:
        """With opt=compile, call `rehearse`, so that the first step's time is that of a step."""
        if self.run.opt.compile.enabled:
            began = time.perf_counter()
            rehearse()
            self.warmed_up = {"compile_seconds": time.perf_counter() - began}
            if self.context.main:
                log.info("compiled in %.0f s", self.warmed_up["compile_seconds"])

    # --- the steps

    @property
    def over(self) -> bool:
        """Whether no step is left."""
        return self.budget.spent or self.ending is not None or self.reached(self.state.step)

    @property
    def before(self) -> dict[str, Any]:
        """The measurement before the first step, which `start` makes."""
        assert self.state.before is not None
        return self.state.before

    def reached(self, step: int) -> bool:
        """Return whether the run ends at 1-based `step`, whatever the budget says."""
        return self.total_steps is not None and step >= self.total_steps

    def steps(self) -> Iterator[Step]:
        """Yield the steps that are left; see the module for what happens between two of them."""
        self.listen()
        while not self.over:
            step = self._begin()
            yield step
            if self.state.step == step.index:  # else it was the first of several updates
                self._end(step)
            self._keep(step)
        self.stack.close()

    def updates(self, step: Step, count: int) -> Iterator[Step]:
        """Yield `count` optimizer steps on one rollout, fewer where the run's steps end before. The
        first one is `step`.
        """
        total, numbers = self.total_steps, dict(step.numbers)
        for number in range(count if total is None else min(count, total - step.index)):
            update = self._begin() if number else step
            update.numbers = dict(numbers)
            yield update
            self._end(update)
        self.state.updates_left = step.index + count - self.state.step

    def listen(self) -> None:
        """From now on, take note of signals and of the peak of memory, read the use of the GPU, and
        trace steps with opt=profile.
        """
        if self.signal is None:
            hardware.forget_peak(self.context.device.device)
            self.signal = self.stack.enter_context(StopSignal())
            self.trace = self.stack.enter_context(profile_steps(self.run, self.context))
            self.gpu = self.stack.enter_context(gpu_usage.watching(self.context))

    @property
    def stopping(self) -> bool:
        """Whether a signal has come on any rank."""
        return self.context.any(self.signal is not None and self.signal.name is not None)

    def _begin(self) -> Step:
        index = self.state.step
        progress = self.budget.progress(index, self.total_steps)
        return Step(index, progress, self.state, self.timer, self.policy)

    def _end(self, step: Step) -> None:
        """Do what comes after each optimizer step: points 1 to 4 of the module's list."""
        if not step.logged:
            self._stop(step)
        if step.rows is not None:
            with step.phase("keep"):
                parts = self.context.gather_objects(step.rows)
                if self.tracker:
                    rows = [row for part in parts for row in part]
                    self.tracker.samples.add(step.index + 1, rows)
        seconds = time.perf_counter() - step.started - step.untimed_seconds
        state, counts = self.state, self.generates
        if self.gpu is not None:
            step.log(gpu=self.gpu.measure(seconds, step.tokens * counts))
        state.step = done = step.index + 1
        state.seconds += seconds
        state.generated += step.tokens * counts
        state.evaluations += step.samples * counts
        state.skipped = self.policy.skipped
        self.budget.add(state.generated, state.seconds)
        one = (state.before or {}).get("generated", math.inf)  # inf = not known
        cost, every = one / max(1, state.generated), self.run.evaluate.every
        due = self.budget.evaluation_due(done, every, self.total_steps, cost)
        if counts and due and not step.trouble and not self.reached(done):
            with step.phase("evaluate"):
                measured = self.subject.evaluate()
            self._keep_completions(f"step-{done:08d}", done, measured.kept())
            step.log(metric=measured.value, metric_name=measured.name, metrics=measured.metrics)
        self._write_event(step, seconds)
        if step.trouble:
            self._stop(step)
        self.timer = Timer()
        self.trace()

    def _write_event(self, step: Step, seconds: float) -> None:
        if self.tracker is None:
            return
        memory = hardware.peak_memory_gb(self.context.device.device)
        event = step.event(seconds, self.generates, self.warmed_up, memory)
        self.warmed_up = {}
        self.tracker.log(event, self.budget.used if self.total_steps is None else None)
        self.state.tracker = self.tracker.state()

    def _stop(self, step: Step) -> NoReturn:
        assert self.checkpoints is not None
        self.checkpoints.settle(self.tracker)
        last = checkpoint.describe_latest(self.context.out_dir / "checkpoints")
        raise RunStopped(f"step {step.index + 1}: {step.trouble} {last}", EXIT_NUMBERS)

    def _keep(self, step: Step) -> None:
        """Write a checkpoint if one is due, and stop after a signal."""
        done, every = self.state.step, self.run.checkpoint.every
        stopping = self.stopping
        due = every and done // every > step.index // every
        if due or step.keep or stopping or self.over:
            assert self.checkpoints is not None
            with self.timer("checkpoint"):  # in the next step's event
                self.checkpoints.save(
                    self.state.content(), not (stopping or self.over), self.tracker
                )
        if stopping and not self.over:
            of = f" of {self.total_steps}" if self.total_steps else ""
            raise RunStopped(
                f"stopped after step {done}{of}, saved in {self.context.out_dir}/checkpoints."
                f" Go on with {name_folder(self.context.out_dir)} resume=auto.",
                EXIT_SIGNAL,
            )

    # --- the end

    def finish(self, model: str | None = None, last: Evaluation | None = None) -> summary.Result:
        """Measure, export the model, write and print the result.

        Args: model: how to load it, None = a language model; last: the measurement, None = now.
        """
        context, state, subject = self.context, self.state, self.subject
        last, before = last or subject.evaluate(), self.before
        ended_by = self.ending or self.budget.ended_by
        measured = before, last.kept()
        result = summary.make_result(
            self.run, context, subject, state.content(), measured, ended_by
        )
        result.metrics |= last.beside
        result.answered_by = last.by
        weights = subject.gather()
        if self.tracker:
            if self.generates:
                self.tracker.measured(state.step, last.name, last.metrics)
            seconds = self.timer.seconds.get("checkpoint", 0.0)
            self.tracker.summary({"last_checkpoint_seconds": seconds})
            summary.finish_run(self.run, self.tracker, result, subject, measured, weights, model)
        context.meet()  # an upload may take longer than a collective waits
        return result

    def _open_tracker(self) -> None:
        run, state, context, total = self.run, self.state, self.context, self.total_steps
        self.tracker = Tracker(run, context.out_dir, total, state.step, state.tracker)
        if total is None:  # the progress line counts what is used of the budget
            self.tracker.begin("", self.budget.whole, self.budget.used, self.budget.unit)
        if self.generates:
            metrics = self.before["metrics"]
            headline = next(iter(metrics))
            self.tracker.measured(0, headline, metrics, generated_tokens=0, reward_evaluations=0)
            self._keep_completions("before", 0, self.before)

    def _keep_completions(self, name: str, step: int, measured: dict[str, Any]) -> None:
        if self.tracker:
            subject = self.subject
            rows = summary.completion_rows(subject.task, subject.held_out, measured)
            self.tracker.completions(name, step, rows)
