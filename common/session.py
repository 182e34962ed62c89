"""The frame around the steps of a run, the same for every algorithm.

    with Session(run, context, subject) as session:
        session.start(state, plan)
        for step in session.steps():
            ...                        # the algorithm; it reports to `step`
        return session.finish()

An algorithm reports numbers (`log`), consumption (`used`), problems (`non_finite`, `stop_if`),
times of phases (`phase`) and completions (`rows`) to its step, nothing else. When its block ends,
the session does the following, in this order:

1. It stops the run (exit code 3), without counting the step or writing its event, if sampling
   gave NaN or infinity (`non_finite`) and the run's not_finite policy says stop.
2. It gathers the rows that the run keeps from all ranks.
3. It counts the step, its seconds and what it consumed.
4. It adds the consumption to the budget.
5. It measures, if this is due and the step reported no problem: on held-out examples where a curve
   of them is asked for, and on validation examples, which choose the exported model
   (common/choice.py).
6. It writes the step's event, on rank 0.
7. It stops the run (exit code 3) if a guard tripped, or if a loss or weights were not finite.
8. It writes a checkpoint, if one is due, the algorithm asked for one, the model was chosen, a
   signal has come, or this was the last step.
9. It stops the run (exit code 75) after a signal, unless this was the last step.

Seconds count training only, without evaluations and checkpoints. `session.updates(step, n)` makes
several optimizer steps on one rollout: points 1 to 7 happen for each of them; validation,
checkpoints and signals wait for the last, because the rollout is not stored.
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
from common.choice import Choice
from common.config import Run, name_folder
from common.device import hardware, profile_steps
from common.distributed import Context
from common.evaluation import Evaluation
from common.report import Tracker, gpu_usage, page, summary
from common.run import Budget, Checkpointed, Checkpoints, NonFiniteHandler, RunState, Timer, resume
from common.system import EXIT_NUMBERS, EXIT_SIGNAL, RunStopped, StopSignal, write_log

log = logging.getLogger("clutch")


@dataclass
class Step:
    """One step, or one of several updates of a step. It is a record: the session reads it when the
    algorithm's block ends.

    Attributes:
        index: the number of the step, from 0.
        progress: the progress of the run before this step, from 0 at the first step to 1 at the
            last.
        state: the part of a checkpoint that belongs to the run.
        timer: seconds by phase.
        non_finite_handler: decides about numbers that are not finite.
        numbers: the numbers of the step's event.
        tokens: the generated tokens of all ranks together.
        samples: the computed rewards of all ranks together.
        learnt: the given tokens that were learnt from, of all ranks together.
        rows: this rank's completions that the run keeps (common/report/samples.py); None on all
            ranks if there are none.
        trouble: the reason that the run must stop after this step; None = it continues.
        logged: whether the step is counted and its event written before the run stops.
        needs_checkpoint: whether to write a checkpoint after the step, whatever the schedule.
        started: the clock's seconds at the start of the step.
        untimed_seconds: the seconds of the step that do not count as training.
    """

    index: int
    progress: float
    state: RunState
    timer: Timer
    non_finite_handler: NonFiniteHandler
    numbers: dict[str, Any] = field(default_factory=dict)
    tokens: int = 0
    samples: int = 0
    learnt: int = 0
    rows: Sequence[dict[str, Any]] | None = None
    trouble: str | None = None
    logged: bool = True
    needs_checkpoint: bool = False
    started: float = field(default_factory=time.perf_counter)
    untimed_seconds: float = 0.0

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time the block under `name`; the times of blocks with the same name add up."""
        return self.timer(name)

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Do not count the time of the block as training."""
        began = time.perf_counter()
        yield
        self.untimed_seconds += time.perf_counter() - began

    def used(self, *, tokens: int = 0, samples: int = 0) -> None:
        """Count the generated tokens and computed rewards of all ranks together, for budget and
        speed.
        """
        self.tokens += tokens
        self.samples += samples

    def trained(self, tokens: int) -> None:
        """Count the tokens that were learnt from, for an algorithm that generates none."""
        self.learnt += tokens

    def log(self, **numbers: Any) -> None:
        """Add numbers to the event of this step."""
        self.numbers |= numbers

    def event(
        self, seconds: float, counted: bool, warmed_up: dict[str, float], memory_gb: float
    ) -> dict[str, Any]:
        """Return the event of the step for the log.

        Args:
            seconds: the training seconds of the step.
            counted: whether to add the tokens and rewards that the run has needed so far.
            warmed_up: the seconds of the compilation before the first step; empty in later steps.
            memory_gb: the peak of memory, in GB.
        """
        state = self.state
        totals = {
            "generated_tokens": state.generated,
            "reward_evaluations": state.reward_evaluations,
        }
        speeds = {"tokens_per_second": self.tokens, "samples_per_second": self.samples}
        return {
            "step": state.step,
            "seconds": seconds,
            "phase_seconds": self.timer.seconds,
            **warmed_up,
            **(totals if counted else {}),
            # Further updates on one rollout generate nothing.
            **{name: count / seconds for name, count in speeds.items() if self.samples},
            **({"tokens_per_second": self.learnt / seconds} if self.learnt else {}),
            "skipped_steps": state.skipped,
            "peak_memory_gb": memory_gb,
            **self.numbers,
        }

    def stop_if(self, reason: str | None) -> None:
        """Stop the run after this step, once the step is logged, if there is a reason; None = no
        reason.
        """
        self.trouble = self.trouble or reason

    def handle_non_finite(
        self, what: str, rows: Sequence[dict[str, Any]], advice: str = ""
    ) -> str | None:
        """Save rows whose numbers are not finite. Returns the reason that the run must stop; None =
        skip the step. All ranks call it together.

        Args:
            what: the numbers that are not finite, the same text on all ranks.
            rows: the rows of this rank, each with the `id` of its example.
            advice: the next step for the user.
        """
        return self.non_finite_handler.handle(self.index + 1, what, rows, advice)

    def non_finite(self, what: str, rows: Sequence[dict[str, Any]]) -> None:
        """Report that rewards or logits of sampled rows are NaN or infinite; call it on all ranks,
        instead of an update. With not_finite.policy=skip the step counts without an update. With
        policy=stop, or after max_skips skipped steps, the run stops before the step is counted or
        logged.

        Args:
            what: the numbers that are not finite, the same text on all ranks.
            rows: the rows of this rank, each with the `id` of its example.
        """
        self.trouble = self.handle_non_finite(what, rows)
        self.logged = self.trouble is None


class Subject(Protocol):
    """The object that a run trains: a language model with its task, or a classifier."""

    @property
    def task(self) -> Any:
        """The task of the training."""
        ...

    @property
    def model(self) -> Any:
        """The module whose weights are saved in checkpoints and exported."""
        ...

    @property
    def precision(self) -> Any:
        """The dtype of forward passes."""
        ...

    @property
    def held_out(self) -> Any:
        """The examples of every evaluation."""
        ...

    @property
    def validator(self) -> Callable[[], Evaluation] | None:
        """Measures on validation examples, which choose the exported model; every rank returns the
        same result. None = the last model is exported.
        """
        ...

    @property
    def reproducible(self) -> bool:
        """Whether the same command gives the same numbers."""
        ...

    @property
    def name(self) -> str:
        """The name of the model, for people."""
        ...

    @property
    def digests(self) -> dict[str, str]:
        """Hashes by name: `rows`, of the task's rows, and `beside`, of everything that is evaluated
        in addition to the task, if anything is.
        """
        ...

    def wake(self) -> None:
        """Start the engine, so that the first step and the first completion do not include its
        start.
        """
        ...

    def evaluate(self) -> Evaluation:
        """Evaluate on the held-out examples; every rank returns the same result."""
        ...

    def gather(self) -> dict[str, Tensor] | None:
        """Return the weights for the export on rank 0, gathered from all ranks; None if they are
        not sharded.
        """
        ...

    def export(self, folder: Path, weights: dict[str, Tensor] | None) -> Path:
        """Write the trained model below `folder`, and return the path.

        Args: weights: the gathered weights of a sharded model; None = the model's own.
        """
        ...

    def close(self) -> None:
        """Release worker processes and files."""
        ...


class Session:
    """One run on one rank. Every method is called on all ranks.

    Attributes:
        state: the part of a checkpoint that belongs to the run (common/run/state.py). An algorithm
            may add keys of its own to `state.own` before `start`.
        total_steps: the number of steps of the whole run; None = a budget ends it.
        ending: the reason, for result.json, that the run ends before its steps or its budget are
            used up; None = there is none.
        generates: whether the algorithm generates: its tokens and rewards are counted and logged,
            and the subject is evaluated on a schedule.
        several_updates: whether steps can be several updates on one rollout (`updates`).
    """

    def __init__(
        self,
        run: Run,
        context: Context,
        subject: Subject,
        *,
        steps: int | None = None,
        generates: bool = True,
        several_updates: bool = False,
    ) -> None:
        self.run, self.context, self.subject = run, context, subject
        self.generates, self.total_steps = generates, steps
        self.state = RunState(
            reproducible=subject.reproducible,
            digests=subject.digests,
            updates_left=0 if several_updates else None,
        )
        self.stack = ExitStack()
        self.tracker: Tracker | None = None
        self.warmed_up: dict[str, float] = {}
        self.timer = Timer()
        self.ending: str | None = None
        self.signal: StopSignal | None = None
        self.checkpoints: Checkpoints | None = None
        self.choice: Choice | None = None
        self.measurement_due = False  # since the last one
        self.gpu: gpu_usage.Usage | None = None
        self.non_finite_handler = NonFiniteHandler(run, context, subject.precision.compute)
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
                page.write_or_warn(self.context.out_dir)  # the report up to here

    # --- before the steps

    def start(
        self, saved: Checkpointed, plan: dict[str, str], before: dict[str, Any] | None = None
    ) -> None:
        """Resume or begin: print the plan, evaluate before the first step, open the log.

        Args:
            saved: the algorithm's part of a checkpoint.
            plan: the lines of the plan.
            before: the result that replaces the evaluation before the first step
                (`Evaluation.content`); None = the subject is evaluated.
        Raises: ConfigError if the run folder or its checkpoints do not fit this run.
        """
        run, context, state = self.run, self.context, self.state
        if before is not None:
            state.before = before
        self.checkpoints = Checkpoints(run, context, self.subject.model, saved)
        if context.main:
            summary.print_plan(plan | {"folder": str(context.out_dir)})
        resume.take_over(run, context, state, saved)
        self.non_finite_handler.resume(state.skipped)
        write_log(log)
        if context.main:
            facts = context.device.name, state.reproducible, plan.get("attention")
            summary.write_run(run, context.out_dir, *facts)
        self.subject.wake()
        if state.before is None and self.generates:
            measured = self.subject.evaluate()
            state.before = measured.content()
            if context.main:
                log.info("before: held-out %s %.2f", measured.name, measured.value)
            completions = len(self.subject.held_out) * run.evaluate.repeats
            self.budget.foresee(run, measured, completions)
        if self.generates and summary.has_learnt_all(self.before["metrics"]):
            self.end_if(summary.LEARNT_ALL)
        self._begin_choosing()
        self.budget.add(state.generated, state.seconds)
        if context.main:
            self._open_tracker()

    def warm_up(self, rehearse: Callable[[], Any]) -> None:
        """With opt=compile, call `rehearse`, so that the first step does not include the
        compilation.
        """
        if self.run.opt.compile.enabled:
            began = time.perf_counter()
            rehearse()
            self.warmed_up = {"compile_seconds": time.perf_counter() - began}
            if self.context.main:
                log.info("compiled in %.0f s", self.warmed_up["compile_seconds"])

    def take_warm_up(self) -> dict[str, float]:
        """Return the seconds of the compilation for the next event, once; empty afterwards."""
        taken, self.warmed_up = self.warmed_up, {}
        return taken

    def replace_subject(self, subject: Subject) -> None:
        """Go on with another subject, such as one whose model was loaded again."""
        self.subject = subject

    def log_to(self, tracker: Tracker) -> None:
        """Write to a log that the algorithm has opened; for algorithms that do without `start`."""
        self.tracker = tracker

    # --- the steps

    def end_if(self, reason: str | None) -> None:
        """End the run before its steps or its budget are used up, if there is a reason; None = no
        reason.
        """
        self.ending = self.ending or reason

    def count(self, *, tokens: int, samples: int, seconds: float) -> None:
        """Count generated tokens, computed rewards and seconds as training, outside of a step."""
        state = self.state
        state.generated += tokens
        state.reward_evaluations += samples
        state.seconds += seconds
        self.budget.add(state.generated, state.seconds)

    @property
    def over(self) -> bool:
        """Whether the run has no step left."""
        return self.budget.spent or self.ending is not None or self.reached(self.state.step)

    @property
    def before(self) -> dict[str, Any]:
        """The evaluation before the first step, which `start` makes."""
        assert self.state.before is not None
        return self.state.before

    def reached(self, step: int) -> bool:
        """Return whether the run ends at 1-based `step`, whatever the budget says."""
        return self.total_steps is not None and step >= self.total_steps

    def steps(self) -> Iterator[Step]:
        """Yield the remaining steps; the module's docstring lists what happens after each step."""
        self.listen()
        while not self.over:
            step = self._begin()
            yield step
            if self.state.step == step.index:  # else it was the first of several updates
                self._end(step)
            self._save(step)
        self.stack.close()

    def updates(self, step: Step, count: int) -> Iterator[Step]:
        """Yield `count` optimizer steps on one rollout, or fewer if the run's steps end before. The
        first one is `step`.
        """
        total, numbers = self.total_steps, dict(step.numbers)
        made = count if total is None else min(count, total - step.index)
        for number in range(made):
            update = self._begin() if number else step
            update.numbers = dict(numbers)
            yield update
            self._end(update, last=number == made - 1)
        self.state.updates_left = step.index + count - self.state.step

    def listen(self) -> None:
        """Begin to listen for signals, measure the peak of memory and the use of the GPU, and trace
        steps with opt=profile.
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
        return Step(index, progress, self.state, self.timer, self.non_finite_handler)

    def _end(self, step: Step, last: bool = True) -> None:
        """Do what follows each optimizer step: points 1 to 7 of the module's list.

        Args: last: whether it was the last one on its rollout.
        """
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
        state.reward_evaluations += step.samples * counts
        state.skipped = self.non_finite_handler.skipped
        self.budget.add(state.generated, state.seconds)
        if counts and not step.trouble and not self.reached(done):
            self._measure(step, last)
        self._write_event(step, seconds)
        if step.trouble:
            self._stop(step)
        self.timer = Timer()
        self.trace()

    # --- measurements between steps

    def _measure(self, step: Step, last: bool) -> None:
        """Measure after a step, if it is due: on validation examples, once the updates on a rollout
        are done, since a checkpoint cannot be written before; and on held-out examples if their
        curve is asked for, or if nothing else is measured.
        """
        done, every, choice = self.state.step, self.run.evaluate.every, self.choice
        if choice is not None:
            one = choice.cost
        else:
            one = (self.state.before or {}).get("generated", math.inf)  # inf = not known
        generated = self.state.generated
        # An algorithm that learns from given answers has no tokens to compare with.
        cost = one / generated if generated else 0.0
        validates = choice is not None
        due = self.budget.evaluation_due(done, every, self.total_steps, cost, validates)
        if due and (not validates or every is not None or self.run.budget.given):
            with step.phase("evaluate"):
                measured = self.subject.evaluate()
            self._keep_completions(f"step-{done:08d}", done, measured.content())
            step.log(metric=measured.value, metric_name=measured.name, metrics=measured.metrics)
        self.measurement_due |= due
        if choice is not None and self.measurement_due and last:
            self.measurement_due = False
            with step.phase("evaluate"):
                step.needs_checkpoint |= self._validate(done)
            step.log(validation=choice.values[-1])

    def _begin_choosing(self) -> None:
        """Make or resume the choice of the exported model, if there are validation examples."""
        if self.subject.validator is None:
            return
        if self.state.choice is None:
            self._validate(self.state.step)
            assert self.checkpoints is not None
            assert self.choice is not None
            if self.run.keep == "best":  # of weights that are nowhere else
                self.checkpoints.save(self.state.content(), False, None, self.choice.needed)
        else:
            self.choice = Choice(**self.state.choice)
            self._end_if_chosen()

    def _validate(self, step: int) -> bool:
        """Measure on the validation examples after `step`. Returns whether this model is chosen."""
        assert self.subject.validator is not None
        found = self.subject.validator()
        if self.choice is None:
            self.choice, chosen = Choice.first(step, found), True
        else:
            chosen = self.choice.add(step, found)
        self.state.choice = self.choice.content()
        if self.context.main and step == 0:
            log.info("before: validation %s %.2f", found.name, found.value)
        self._end_if_chosen()
        return chosen and self.run.keep == "best"

    def _end_if_chosen(self) -> None:
        """End the run if its choice cannot, or need not, become better: algo.patience and
        evaluate.stop_at.
        """
        assert self.choice is not None
        patience = getattr(self.run.algo, "patience", None)
        wanted = self.run.evaluate.stop_at
        if wanted is not None and self.choice.value >= wanted:
            self.end_if(f"evaluate.stop_at={wanted:g}")
        elif patience is not None and self.choice.fallen >= patience:
            self.end_if(f"algo.patience={patience}")

    def _write_event(self, step: Step, seconds: float) -> None:
        if self.tracker is None:
            return
        memory = hardware.peak_memory_gb(self.context.device.device)
        event = step.event(seconds, self.generates, self.take_warm_up(), memory)
        self.tracker.log(event, self.budget.used if self.total_steps is None else None)
        self.state.tracker = self.tracker.state()

    def _stop(self, step: Step) -> NoReturn:
        assert self.checkpoints is not None
        self.checkpoints.settle(self.tracker)
        last = checkpoint.describe_latest(self.context.out_dir / "checkpoints")
        raise RunStopped(f"step {step.index + 1}: {step.trouble} {last}", EXIT_NUMBERS)

    def _save(self, step: Step) -> None:
        """Write a checkpoint if one is due, and stop after a signal: points 8 and 9 of the module's
        list.
        """
        done, every = self.state.step, self.run.checkpoint.every
        stopping = self.stopping
        due = every and done // every > step.index // every
        if due or step.needs_checkpoint or stopping or self.over:
            assert self.checkpoints is not None
            with self.timer("checkpoint"):  # in the next step's event
                in_background, needed = not (stopping or self.over), self._needed()
                self.checkpoints.save(self.state.content(), in_background, self.tracker, needed)
        if stopping and not self.over:
            of = f" of {self.total_steps}" if self.total_steps else ""
            raise RunStopped(
                f"stopped after step {done}{of}, saved in {self.context.out_dir}/checkpoints."
                f" Go on with {name_folder(self.context.out_dir)} resume=auto.",
                EXIT_SIGNAL,
            )

    # --- the end

    def _needed(self) -> Sequence[int]:
        """Return the steps whose checkpoints must be kept."""
        best = self.choice is not None and self.run.keep == "best"
        return self.choice.needed if best and self.choice else ()

    def _go_back(self) -> int:
        """Measure the last model on the validation examples, and load the chosen one. Returns its
        step; that of the last one if it is chosen, or if nothing chooses.
        """
        if self.choice is None:
            return self.state.step
        if self.choice.measured != self.state.step:
            self._validate(self.state.step)
        chosen = self.choice.step
        if chosen == self.state.step or self.run.keep == "last":
            return self.state.step
        assert self.checkpoints is not None
        if self.checkpoints.load(chosen):
            return chosen
        log.warning("the model of step %d was the best one; the last one is exported", chosen)
        return self.state.step

    def finish(self, model: str | None = None, last: Evaluation | None = None) -> summary.Result:
        """Evaluate, export the model, write and print the result. If another model than the last
        one is chosen, it is loaded, evaluated and exported, and the result has both measures.

        Args:
            model: the way to load the exported model, for the result; None = as a language model.
            last: the evaluation after training; None = evaluate now.
        """
        context, state, subject = self.context, self.state, self.subject
        after = last = last or subject.evaluate()
        ended_by, before = self.ending or self.budget.ended_by, self.before
        step = self._go_back()
        # Without generation `before` is of another model.
        unchanged = step == 0 and self.generates
        if unchanged:
            after = Evaluation(**before)
        elif step != state.step:
            after = subject.evaluate()
        measured = before, after.content()
        result = summary.make_result(
            self.run, context, subject, state.content(), measured, ended_by, unchanged
        )
        result.metrics |= after.further_metrics
        result.answered_by = after.by
        if self.choice is not None:
            result.add_choice(self.choice, step, after, last)
        weights = subject.gather()
        if self.tracker:
            if self.generates:
                validation = self.choice.values[-1] if self.choice else None
                self.tracker.measured(state.step, last.name, last.metrics, validation)
            seconds = self.timer.seconds.get("checkpoint", 0.0)
            self.tracker.summary({"last_checkpoint_seconds": seconds})
            summary.finish_run(self.run, self.tracker, result, subject, measured, weights, model)
        context.meet()  # an upload may take longer than a collective waits
        return result

    def _open_tracker(self) -> None:
        run, state, context, total = self.run, self.state, self.context, self.total_steps
        self.tracker = Tracker(run, context.out_dir, total, state.step, state.tracker)
        if total is None:  # the progress line shows the used part of the budget
            self.tracker.begin("", self.budget.whole, self.budget.used, self.budget.unit)
        if self.generates:
            metrics = self.before["metrics"]
            headline = next(iter(metrics))
            validation = self.choice.values[0] if self.choice else None
            used = {"generated_tokens": 0, "reward_evaluations": 0}
            self.tracker.measured(0, headline, metrics, validation, **used)
            self._keep_completions("before", 0, self.before)

    def _keep_completions(self, name: str, step: int, measured: dict[str, Any]) -> None:
        if self.tracker:
            subject = self.subject
            rows = summary.completion_rows(subject.task, subject.held_out, measured)
            self.tracker.completions(name, step, rows)
