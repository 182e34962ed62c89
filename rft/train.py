"""The loop of RFT: generate, verify, select, fine-tune, evaluate, and repeat.

    python launch.py algo=rft
    python launch.py algo=rft algo.stage=generate algo.shard=2/8 hydra.run.dir=runs/mine
    python launch.py algo=rft task=gsm8k task.path=data/gsm8k model=hf model.path=...
        model.adapter.rank=16

After STaR (arXiv:2203.14465), RFT (2308.01825) and ReST-EM (2312.06585). Departures: samples are
resumed chunk by chunk; unsolved prompts get a second round; a few distinct reasoning paths are kept
per prompt, and they share the prompt's forward; prompts of the evaluation are never trained on.

Existing files of the run folder are not made again (rft/folder.py), so a run that was killed
resumes with resume=auto, and stages can be run one by one.
"""

import itertools
import logging
from dataclasses import replace

from common import optim
from common.config import Run
from common.distributed import Context
from common.memory import Memory, describe_attention
from common.parts import Parts, open_parts
from common.report import page, summary
from common.run import warn_if_overshot
from common.session import Session
from common.system import run_record
from common.task import Task, TaskFeatures
from rft.config import STAGES, RftConfig
from rft.folder import RunFolder, Sizes, read_json
from rft.journal import Journal
from rft.plan import describe_run, fit_rows
from rft.prompts import Prompts, check_hints, split_prompts
from rft.stages import Work, evaluate, finetune, generate, select_samples

log = logging.getLogger("clutch")


def train(run: Run, context: Context, task: Task | None = None) -> summary.Result | None:
    """Train a model on its own right answers. A single stage returns None.

    Raises: ConfigError for settings that cannot work; RunStopped after a signal, or on NaN.
    """
    parts = _open(run, context, task)
    cfg: RftConfig = parts.run.algo
    with Session(parts.run, context, parts, steps=None) as session:
        work = prepare(session, parts)
        del parts  # `work` replaces its model
        session.listen()
        if cfg.stage != "all":
            stages = {"generate": generate, "select": select_samples, "finetune": finetune}
            (stages | {"evaluate": evaluate})[cfg.stage](work, work.folder.under_way())
            return leave(work)
        best = last = evaluate(work, 0)
        fallen, ended_by = 0, None
        if summary.has_learnt_all(best["metrics"]):
            return finish(work, 0, summary.LEARNT_ALL)
        work.stop_if_asked(0)
        for iteration in itertools.islice(itertools.count(1), cfg.iterations):
            if (ended_by := work.journal.spent_before(iteration)) is not None:
                break
            generate(work, iteration)  # samples of the model as it is
            # The right ones, a few distinct ways of each prompt.
            if (ended_by := select_samples(work, iteration)) is not None:
                break
            finetune(work, iteration)  # maximise their likelihood
            last = evaluate(work, iteration)
            if not work.prompts.validation or last["validation"] > best["validation"]:
                best, fallen = last, 0
            else:
                fallen += 1
            wanted = run.evaluate.stop_at
            if wanted is not None and (last["validation"] or 0.0) >= wanted:
                ended_by = f"evaluate.stop_at={wanted:g}"
                break
            more = iteration != cfg.iterations and work.journal.spent_before(iteration + 1) is None
            if fallen == cfg.patience and more:
                log.info(
                    f"stopping after iteration {iteration}: the validation {best['metric']} was"
                    f" best after iteration {best['iteration']}"
                )
                ended_by = f"algo.patience={cfg.patience}"
                break
            if more:  # after the last iteration all is done
                work.stop_if_asked(iteration)
        if ended_by is None and work.folder.was_cut(iteration):
            ended_by = work.journal.budget().limit
        kept = best if run.keep == "best" else last
        return finish(work, kept["iteration"], ended_by)


def plan(
    run: Run, context: Context, task: Task | None = None
) -> tuple[dict[str, str], Parts, Memory]:
    """Return the lines of a run's plan, its parts, and the memory of a step
    (common/memory/plan.py).
    """
    parts = _open(run, context, task)
    row_limit, memory = fit_rows(parts)
    return describe_run(parts, row_limit, memory), parts, memory


def _open(run: Run, context: Context, task: Task | None) -> Parts:
    """Open the parts of a run. If algo.select.accept is null, it is set to the task's own bound of
    right answers.
    """
    parts = open_parts(run, context, task, read=split_prompts, check=check_hints)
    run, algo = parts.run, parts.run.algo
    if algo.select.accept is not None:
        return parts
    select = replace(algo.select, accept=TaskFeatures(parts.task).right_at)
    return replace(parts, run=replace(run, algo=replace(algo, select=select)))


def prepare(session: Session, parts: Parts) -> Work:
    """Check all that can be checked before hours of sampling, print the plan, open the log."""
    run, cfg = session.run, session.run.algo
    prompts = parts.examples
    assert isinstance(prompts, Prompts)
    folder = RunFolder(run, parts.context, session.state.digests)
    train_limit, memory = fit_rows(parts)
    rows_of_plan = describe_run(parts, train_limit, memory)
    if parts.context.main:
        summary.print_plan(rows_of_plan | {"folder": str(parts.context.out_dir)})
    run_record.write_log(log)
    optim.optimizer(cfg.optimizer, [p for p in parts.lm.model.parameters() if p.requires_grad])
    # A model that is measured once more leaves the record of its run as it is.
    ended = cfg.stage == "evaluate" and (folder.root / "result.json").exists()
    if parts.context.main and cfg.shard:
        run_record.accept(parts.context.out_dir, log)
    elif parts.context.main and not ended:
        facts = parts.context.device.name, parts.reproducible, describe_attention(parts)
        summary.write_run(run, parts.context.out_dir, *facts)
    journal = Journal(session, folder)
    sizes, row_limit = Sizes(folder), parts.engine.row_limit
    rows = row_limit.rows, row_limit.cached_episodes, row_limit.columns
    return Work(parts, cfg, folder, journal, prompts, train_limit, sizes, *rows)


def leave(work: Work) -> None:
    """Print, after a single stage, the paths of its output and the next stage."""
    folder, stage = work.folder, work.cfg.stage
    if work.journal.tracker:
        work.journal.tracker.close()
    if work.parts.context.main:
        # Shards run side by side: python -m common.report when all are done.
        if folder.written == folder.root:
            page.write_or_warn(folder.root)
        after = STAGES[(STAGES.index(stage) + 1) % len(STAGES)]
        log.info("%s is done; %s. Next: algo.stage=%s", stage, folder.root, after)


def finish(work: Work, best: int, ended_by: str | None) -> summary.Result:
    """Write the result, the export and the summary of the whole run, with the best iteration's
    model.
    """
    journal, folder, context = work.journal, work.folder, work.parts.context
    first, last = folder.evaluation(0), folder.evaluation(best)
    done = list(itertools.takewhile(folder.finished, itertools.count(1)))
    counts = [folder.count_samples(k) for k in done]
    used = journal.budget()
    if context.main:
        warn_if_overshot(used.share, used.limit)
        base = "the base: no iteration was better on the validation prompts"
        log.info(f"the model is {f'of iteration {best}' if best else base}")
    state = {
        "step": sum(read_json(folder.of(k) / "finetune.json")["steps"] for k in done),
        "seconds": journal.seconds.total(),
        # Shards are logged apart, and samples that nothing came of are in the log alone.
        "generated": max(sum(n for _, n in counts), journal.used["generated_tokens"]),
        "evaluations": max(sum(n for n, _ in counts), journal.used["reward_evaluations"]),
        "skipped": journal.non_finite_handler.skipped,
    }
    work.load(best, sampling=False)
    parts = work.parts
    result = summary.make_result(
        parts.run, context, parts, state, (first, last), ended_by, unchanged=best == 0
    )
    result = replace(result, iteration=best)
    weights = parts.gather()
    if journal.tracker:
        summary.finish_run(parts.run, journal.tracker, result, parts, (first, last), weights)
    context.meet()  # an upload may take longer than a collective waits
    return result
