"""SFT, the loop: take rows, maximise the likelihood of their answers, step.

    python launch.py algo=sft task=custom task.path=data.jsonl task.prompt_field=messages ...
    python launch.py algo=grpo model=hf model.path=RUN/model ...

Supervised fine-tuning, as a first stage for a base model that is never right: a reward teaches
nothing where no sample earns any. Loss on the tokens of answers only, with one denominator for an
optimizer step, whatever the micro-batches and ranks; no padding, and no attention between rows.
"""

from common import optim
from common.answers import GivenExamples, check_answers, read_given
from common.config import Run
from common.distributed import Context
from common.finetune import RATES, Finetuner
from common.memory import (
    TRAIN_ROWS,
    Memory,
    RolloutMemory,
    RowLimit,
    count_state,
    describe,
    fit_training,
)
from common.optim import describe_lr, find_lr
from common.parts import Parts, open_parts
from common.report import Result
from common.run import describe_length
from common.session import Session
from common.task import Task
from sft.config import SftConfig


def train(run: Run, context: Context, task: Task | None = None) -> Result:
    """Fine-tune a model on the answers of a task's training examples. Every rank returns the same
    result; rank 0 writes the files.

    Raises: ConfigError for settings that cannot work; RunStopped after a signal, or on NaN or
    infinity.
    """
    parts, tuner, memory = prepare(run, context, task)
    cfg, examples = parts.run.algo, parts.examples
    assert isinstance(examples, GivenExamples)
    with Session(parts.run, context, parts, steps=cfg.steps) as session:
        session.start(tuner, describe_run(parts, tuner, memory))
        if not session.over:
            session.warm_up(tuner.rehearse)
        for step in session.steps():
            first = step.index * cfg.prompts_per_step
            taken = examples.order.take(first, cfg.prompts_per_step)
            trees = [examples.trees[example.id] for example in taken]
            lr = tuner.peak_lr * find_lr(cfg, step.index, step.progress)
            numbers = tuner.step(trees, step.index, lr, step.timer)
            step.log(epoch=(first + len(taken)) / len(examples.order.examples), **numbers)
            step.trained(int(numbers["trained_tokens"]))
            if (what := tuner.guards.not_finite(numbers)) is not None:
                ids = {id(tree): one.id for tree, one in zip(trees, taken, strict=True)}
                bad = tuner.offending(trees)
                rows = [{"id": ids[id(tree)], **tuner.describe(tree)} for tree in bad]
                step.stop_if(step.handle_non_finite(what, rows, tuner.guards.ADVICE))
            else:
                step.stop_if(tuner.guards.trouble(numbers))
        return session.finish()


def prepare(run: Run, context: Context, task: Task | None) -> tuple[Parts, Finetuner, Memory]:
    """Return the parts of a run, the fine-tuner, and the memory of a step.

    Raises: ConfigError for settings that cannot work.
    """
    parts = open_parts(run, context, task, read=read_given, check=check_answers)
    cfg: SftConfig = parts.run.algo
    optim.check_repeatable(parts.lm.model.config, parts.lm.precision)
    rows = cfg.train_rows or TRAIN_ROWS[parts.lm.device.type]
    limit = RowLimit("algo.train_rows", rows, fixed=parts.lm.sharding.shared)
    tuner = Finetuner(parts, parts.run.seed, limit)
    return parts, tuner, fit_rows(parts, limit)


def plan(
    run: Run, context: Context, task: Task | None = None
) -> tuple[dict[str, str], Parts, Memory]:
    """Return the lines of a run's plan, its parts, and the memory of a step
    (common/memory/plan.py).
    """
    parts, tuner, memory = prepare(run, context, task)
    return describe_run(parts, tuner, memory), parts, memory


def fit_rows(parts: Parts, limit: RowLimit) -> Memory:
    """Fit the rows of evaluations and of training to the memory, and return the memory of a
    step.
    """
    cfg, examples = parts.run.algo, parts.examples
    assert isinstance(examples, GivenExamples)
    most = max(len(examples.held_out), len(examples.validation)) * parts.run.evaluate.repeats
    wave = max(1, -(-most // parts.context.world_size))
    # With autocast the engine samples from a copy, which is dropped while the model is trained.
    sampled = count_state(parts, True, copies=parts.lm.half)
    rollout = RolloutMemory(parts, sampled, each=wave)
    trained = count_state(
        parts, True, copies=parts.lm.half and not parts.run.opt.checkpointing.enabled
    )
    share = -(-cfg.prompts_per_step // parts.context.world_size)
    training = fit_training(parts, limit, trained, share, new=examples.longest_answer)
    sampling = rollout.sampling_bytes(wave, 1)
    peak = max(training, rollout.fixed + sampling)
    return Memory(trained, sampling, min(parts.engine.row_limit.rows, wave), peak)


def describe_run(parts: Parts, tuner: Finetuner, memory: Memory) -> dict[str, str]:
    """Return the lines of the plan."""
    cfg, examples = parts.run.algo, parts.examples
    assert isinstance(examples, GivenExamples)
    length = describe_length(parts, cfg.steps, "optimizer steps")
    trained = "the adapter" if parts.lm.adapter else "all weights"
    tokens = sum(tree.targets for tree in examples.trees.values())
    cut = f"; {examples.cut} too long with their answers and left out" if examples.cut else ""
    return {
        "algorithm": f"sft, {length}, {trained}, {describe_lr(parts, RATES)}",
        **describe(parts),
        "answers": f"{len(examples.trees):,} with {tokens:,} tokens that carry loss, the longest"
        f" has {examples.longest_answer:,}{cut}",
        "training": f"{cfg.prompts_per_step} rows per optimizer step, {tuner.limit.rows} per"
        " forward, gradients accumulated",
        **memory.describe(parts.lm.model),
    }
