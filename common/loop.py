"""What every training loop needs around its steps: model and order of examples, checks, the ends of
a run.
"""

import hashlib
import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from common import checkpoint
from common.config import ConfigError, Run
from common.distributed import fsdp
from common.distributed.context import Context
from common.evaluation import Evaluation
from common.model.export import export_model
from common.model.load import load_model
from common.model.prompts import encode_prompts
from common.report import summary
from common.report.tracker import Tracker
from common.signals import EXIT_SIGNAL, RunStopped
from common.tasks import Example, Task

log = logging.getLogger("clutch")


def load(run: Run, task: Task, context: Context) -> tuple[Any, Any]:
    """Model in float32 and tokenizer; rank 0 first, so that it alone builds or downloads.

    With opt=fsdp on the CPU: the device need not hold all of it, and `sharding.shard` takes it
    there block by block.
    """
    if not context.main:
        context.barrier()
    device = context.device.device if context.mesh is None else torch.device("cpu")
    loaded = load_model(run.model, task, torch.float32, device, progress=context.main)
    if context.main:
        context.barrier()
    if context.world_size > 1:
        rows = [
            (e.id, e.question, e.answer)
            for split in ("train", "test")
            for e in task.examples(split)
        ]
        same_on_all_ranks(
            context,
            "rows of the task",
            hashlib.sha256(repr(rows).encode("utf-8", "replace")).hexdigest(),
        )
        same_on_all_ranks(context, "weights of the model", _fingerprint(loaded[0]))
    return loaded


def same_on_all_ranks(context: Context, what: str, found: Any) -> None:
    """Raise ConfigError where `found`, a digest of `what`, is not that of rank 0: the nodes have
    other files, say.
    """
    every = context.gather_objects(found)
    other = next((rank for rank, theirs in enumerate(every) if theirs != every[0]), None)
    if other is not None:
        raise ConfigError(
            f"the {what} on rank {other} are not those of rank 0, so the ranks would train apart."
            " Give all ranks the same files, and a task whose rows do not depend on the machine,"
            " the time or chance."
        )


def _fingerprint(model: torch.nn.Module) -> list[int]:
    """A number a parameter, summed on the device: other weights have others, but for a freak of
    chance.
    """
    return [int(p.detach().view(torch.int32).sum(dtype=torch.int64)) for p in model.parameters()]


class Order:
    """The order in which training examples come: shuffled anew each epoch, a function of (seed,
    position) alone.
    """

    def __init__(self, examples: Sequence[Example], seed: int) -> None:
        if not examples:
            raise ConfigError(
                'the task has no training examples. Its examples("train") must return some.'
            )
        if type(examples[0].id) is not int:
            raise ConfigError(
                f"the id of the task's first example is {examples[0].id!r}. It must be an int: the"
                " row's position."
            )
        if len({example.id for example in examples}) < len(examples):
            raise ConfigError(
                "several of the task's training examples have the same id. Give each its position"
                " as id."
            )
        self.examples, self.seed = examples, seed
        self.epoch, self.shuffled = -1, list(range(len(examples)))

    def take(self, start: int, count: int) -> list[Example]:
        """`count` examples from 0-based position `start` on."""
        return [self._at(position) for position in range(start, start + count)]

    def _at(self, position: int) -> Example:
        epoch, index = divmod(position, len(self.examples))
        if epoch != self.epoch:
            self.epoch, self.shuffled = epoch, list(range(len(self.examples)))
            random.Random(f"order {self.seed} {epoch}").shuffle(self.shuffled)
        return self.examples[self.shuffled[index]]


def held_out(task: Task, run: Run) -> list[Example]:
    """The first `evaluate.examples` test examples. Raises: ConfigError where there are none."""
    found = list(task.examples("test"))[: run.evaluate.examples]
    if not found:
        raise ConfigError(
            'the task has no test examples. Its examples("test") must return some, to be held out.'
        )
    return found


def longest_prompt(
    context: int,
    tokenizer: Any,
    ask: Callable[[Example], Any],
    splits: dict[str, Sequence[Example]],
    new_tokens: int,
) -> int:
    """Tokens of the longest prompt that `ask` (the task's `prompt`, say) makes of the examples of
    all `splits`.

    Raises: ConfigError where one does not fit the model's `context` with `new_tokens` more.
    """
    longest, misfits, count = 0, [], 0
    for split, examples in splits.items():
        for example, ids in zip(
            examples, encode_prompts(tokenizer, [ask(e) for e in examples]), strict=True
        ):
            longest, count = max(longest, len(ids)), count + 1
            if len(ids) + new_tokens > context:
                misfits.append((split, example.id, len(ids)))
    if misfits:
        split, first, tokens = misfits[0]
        room = context - longest
        raise ConfigError(
            f"{len(misfits)} of {count} prompts do not fit the model's context of {context} tokens"
            f" with algo.sampling.max_new_tokens={new_tokens}: the first is {split} example {first}"
            f" with {tokens} tokens, the longest has {longest}. "
            + (
                f"Lower it to {room}, or shorten the prompts."
                if room > 0
                else "Shorten the prompts, or leave them out."
            )
        )
    return longest


def last_good(context: Context) -> str:
    """A sentence on the newest valid checkpoint."""
    found = checkpoint.latest(context.out_dir / "checkpoints")
    return f"Last good checkpoint: {found.path}." if found else "No checkpoint was written before."


class Spending:
    """What of `run.budget` is used, on every rank alike. Without a budget nothing ever is.

    Args: tokens, seconds: what the run used before it was interrupted.
    """

    def __init__(self, run: Run, context: Context, tokens: int, seconds: float) -> None:
        self.run, self.context = run, context
        self.before, self.share = 0.0, 0.0
        self.add(tokens, seconds)

    def add(self, tokens: int, seconds: float) -> bool:
        """Take note of what is used in all. Returns whether the budget is spent."""
        found = self.run.budget.nearest(tokens, seconds)
        if self.run.budget.seconds is not None:  # clocks of ranks differ
            found = max(self.context.gather_objects(found))
        self.before, (self.share, self.limit) = self.share, found
        if self.context.main and self.before < 1:
            warn_if_overshot(self.share, self.limit)
        return self.spent

    @property
    def spent(self) -> bool:
        """Whether the run is to end."""
        return self.share >= 1

    @property
    def ended_by(self) -> str | None:
        """For result.json: the limit that ended the run; None where it is not spent."""
        return self.limit if self.spent else None

    def evaluation_due(self, step: int) -> bool:
        """Whether to measure after 1-based `step`, apart from the end of the run."""
        every = self.run.evaluate.every
        if every is not None:
            return every > 0 and step % every == 0 and not self.spent
        return int(TENTHS * self.share) > int(TENTHS * self.before) and not self.spent


TENTHS = 10
OVERSHOT = 1.1  # share of a budget from which on it is worth a warning


def warn_if_overshot(share: float, limit: str) -> None:
    """Say that a budget was far below what is spent at once. share: used of it; limit: its text, as
    budget.tokens=100.
    """
    if share > OVERSHOT:
        log.warning(
            "%s is overshot: %.3g times as much is used, because what is under way is never cut"
            " short. Raise it, or make steps smaller.",
            *(limit, share),
        )


def reached(step: int, steps: int | None) -> bool:
    """Whether a run of `steps` ends at `step`, both counted from 1."""
    return steps is not None and step >= steps


def start_line(tracker: Tracker | None, run: Run, state: dict[str, Any], steps: int | None) -> None:
    """Where a budget and not `steps` ends the run, let the progress line count what is used of it."""
    if tracker and steps is None:
        unit = "token" if run.budget.tokens is not None else "second"
        tracker.begin(
            "", round(getattr(run.budget, f"{unit}s")), done(run, state, steps) or 0, unit
        )


def done(run: Run, state: dict[str, Any], steps: int | None) -> int | None:
    """How far the progress line of `start_line` is; None = the step."""
    if steps is not None:
        return None
    used, limit = (
        (state["generated"], run.budget.tokens)
        if run.budget.tokens is not None
        else (state["seconds"], run.budget.seconds)
    )
    return round(min(used, limit or used))  # the last step goes beyond the budget


def length(run: Run, count: int | None, what: str) -> str:
    """For the plan, how long a run is: "60 steps", "60 steps, or budget.tokens=200000", "steps
    until budget.tokens=200000".
    """
    limits = list(run.budget.limits().values())
    if count is None:
        return f"{what} until {' or '.join(limits)}"
    return " or ".join([f"{count} {what}", *limits])


def save(tracker: Tracker | None, step: int, write: Callable[[], Path]) -> None:
    """Write a checkpoint after `step` steps. Every rank calls it; write: writes it on all ranks and
    returns its folder.

    The tracker's files go to the disk before it: what a checkpoint says is logged is then there.
    """
    if tracker:
        tracker.sync()
    saved = write()
    if tracker:
        tracker.artifact("checkpoint", saved, f"step-{step}")


def stopped(context: Context, step: int, steps: int | None) -> RunStopped:
    """The end of a run by a signal, after saving. step: 0-based, the last one done."""
    return RunStopped(
        f"stopped after step {step + 1}{f' of {steps}' if steps else ''}, saved in"
        f" {context.out_dir}/checkpoints. Go on with hydra.run.dir={context.out_dir} resume=auto.",
        EXIT_SIGNAL,
    )


def begin(
    run: Run,
    context: Context,
    task: Task,
    examples: list[Example],
    state: dict[str, Any],
    steps: int | None,
    measure: Callable[[], Evaluation],
) -> Tracker | None:
    """Measure before the first step, unless the run is resumed. Returns the tracker, on rank 0.

    Args: state: gets state["before"], the first evaluation; steps: of the whole run, None = a
    budget ends it.
    """
    if "before" not in state:
        first = measure()
        state["before"] = {"metrics": first.metrics, "completions": first.completions}
        if context.main:
            log.info("before: held-out %s %.2f", first.name, first.value)
    if not context.main:
        return None
    tracker = Tracker(run, context.out_dir, steps, state["step"], state["tracker"])
    metrics = state["before"]["metrics"]
    tracker.measured(0, next(iter(metrics)), metrics, generated_tokens=0, reward_evaluations=0)
    tracker.completions(
        "before", 0, summary.completion_rows(task, examples, state["before"]["completions"])
    )
    return tracker


def measured(
    tracker: Tracker | None, task: Task, examples: list[Example], step: int, found: Evaluation
) -> dict[str, Any]:
    """Keep the completions of an evaluation after `step` steps, on rank 0. Returns what goes into
    the step's event.
    """
    if tracker:
        tracker.completions(
            f"step-{step:08d}", step, summary.completion_rows(task, examples, found.completions)
        )
    return {"metric": found.value, "metric_name": found.name, "metrics": found.metrics}


def finish(
    run: Run,
    context: Context,
    task: Task,
    model: Any,
    tokenizer: Any,
    examples: list[Example],
    state: dict[str, Any],
    last: Evaluation,
    dtype: str,
    tracker: Tracker | None,
    iteration: int | None = None,
    ended_by: str | None = None,
) -> summary.Result:
    """The end of a run that did all its steps: result, export, summary.

    Args: state: state["before"] is the first evaluation; iteration, ended_by: see report.Result.
    """
    before = state["before"]["metrics"]
    result = summary.Result(
        algo=run.algo.name,
        task=getattr(task, "name", type(task).__name__),
        model=run.model.path or run.model.name,
        metric=last.name,
        before=before[last.name],
        after=last.value,
        steps=state["step"],
        seconds=state["seconds"],
        generated_tokens=state["generated"],
        reward_evaluations=state["evaluations"],
        world_size=context.world_size,
        device=context.device.name,
        dtype=dtype,
        folder=str(context.out_dir),
        metrics={"before": before, "after": last.metrics},
        iteration=iteration,
        ended_by=ended_by,
        skipped_steps=state["skipped"],
    )
    weights = fsdp.whole(model)
    if tracker:
        if iteration is None:  # RFT has measured after each
            tracker.measured(tracker.step, last.name, last.metrics)
        tracker.completions(
            "after", tracker.step, summary.completion_rows(task, examples, last.completions)
        )
        tracker.summary(summary.headline(result))
        export_model(model, tokenizer, context.out_dir / "model", weights)
        tracker.artifact("model", context.out_dir / "model", f"step-{state['step']}")
        tracker.close()
        summary.finish_report(
            result, task, examples, state["before"]["completions"], last.completions
        )
    context.barrier()
    return result
