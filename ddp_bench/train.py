"""Train a classifier: step by step, validate after each epoch, test the best weights.

    python launch.py algo=classify
    python launch.py algo=classify task=ag_news task.path=data/ag_news 'opt=[amp,compile,ddp]'

A transformer encoder trained from scratch, data-parallel with DistributedDataParallel
(arXiv:2006.15704). Departures: ranks may have different numbers of rows, and two ranks compute the
same as one with an equal batch; the order of rows and dropout are functions of seed and step, so a
run that is killed resumes with the next batch.
"""

from common.config import Run
from common.distributed import Context
from common.optim import Guards
from common.report import Result
from common.session import Session
from ddp_bench.classifier import Classifier
from ddp_bench.config import ClassifyConfig, check_switches
from ddp_bench.step import Clock
from ddp_bench.tasks import ClassTask


def train(run: Run, context: Context, task: ClassTask | None = None) -> Result:
    """Train a classifier on a class task. Every rank returns the same result; rank 0 writes.

    Raises: ConfigError for settings that cannot work; RunStopped after a signal, or on NaN or
    infinity.
    """
    cfg: ClassifyConfig = run.algo
    check_switches(run, cfg, context.world_size)
    subject = Classifier(run, context, task)
    stepper, batches, guards = subject.stepper, subject.batches, Guards(subject.precision.scaler)
    total = cfg.epochs * len(batches)
    with Session(run, context, subject, steps=total, generates=False) as session:
        # Epochs since the best one, and its measures on the validation rows.
        kept = session.state.own
        kept |= {"waited": 0, "best": None}
        session.start(subject, subject.plan(), before=subject.guess().content())
        if kept["waited"] == cfg.patience and not session.over:
            session.end_if(f"algo.patience={cfg.patience}")
        if not session.over:
            session.warm_up(lambda: stepper.rehearse(*subject.loader.look(session.state.step)))
        feed = subject.loader.from_step(session.state.step)
        for step in session.steps():
            epoch, position = divmod(step.index, len(batches))
            clock = Clock(subject.device)
            with step.phase("data"):
                batch, rows = next(feed)
            numbers = stepper.step(batch, len(rows), step.index, total, clock)
            step.used(tokens=sum(batches.lengths[row] for row in rows), samples=len(rows))
            step.log(epoch=(step.index + 1) / len(batches), rows=len(rows), **numbers)
            step.log(ranks=context.world_size)  # which may be another one after a resume
            if (what := guards.not_finite(numbers)) is not None:
                mine = context.share(rows)
                step.stop_if(step.handle_non_finite(what, subject.offending(mine), guards.ADVICE))
            step.stop_if(guards.trouble(numbers))
            step.timer.add(clock.read())
            if position < len(batches) - 1 or step.trouble:
                continue
            step.needs_checkpoint = True  # a checkpoint after each epoch
            step.log(epoch_done=epoch + 1)
            if subject.validation:
                with step.untimed():
                    validated = subject.validate()
                step.log(validation=validated, evaluate_seconds=step.untimed_seconds)
                if kept["best"] is None or validated["accuracy"] > kept["best"]["accuracy"]:
                    kept |= {"best": {"epoch": epoch + 1, **validated}, "waited": 0}
                    if run.keep == "best":
                        subject.keep_best()
                else:
                    kept["waited"] += 1
                if kept["waited"] == cfg.patience and not session.reached(step.index + 1):
                    session.end_if(f"algo.patience={cfg.patience}")
        last = subject.evaluate()
        last.further_metrics = {"validation": kept["best"]} if kept["best"] else {}
        return session.finish(f"{context.out_dir}/model (ddp_bench.models.load)", last)
