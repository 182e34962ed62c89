"""RFT, the loop: generate, verify, select, fine-tune, evaluate, and again.

    python launch.py algo=rft
    python launch.py algo=rft algo.stage=generate algo.shard=2/8 hydra.run.dir=runs/mine
    python launch.py algo=rft task=gsm8k task.path=data/gsm8k model=hf model.path=...
    algo.lora.rank=16

After STaR (arXiv:2203.14465), RFT (2308.01825) and ReST-EM (2312.06585). Departures: samples are
resumed chunk by chunk; prompts that nothing solved get a second round; of each prompt a few
distinct ways are kept, and they share the prompt's forward; prompts that are also evaluated on are
never trained on.

RUN/iteration-K holds samples-*.jsonl, selected.json, selected.jsonl, finetune.json, model/ and
evaluation.json; iteration-0 is the base model. What is there is not made again, so a run that was
killed goes on with resume=auto, and stages can be run one by one.
"""

import logging
from contextlib import closing

from common.config import ConfigError, Run
from common.distributed.context import Context
from common.report import summary
from common.report.tracker import closed_on_error
from common.signals import StopSignal
from common.tasks import Task, build
from rft.config import RftConfig, check_switches
from rft.stages import Stages

log = logging.getLogger("clutch")


def train(run: Run, context: Context, task: Task | None = None) -> summary.Result | None:
    """Train a model on its own right answers. Every rank returns the same; rank 0 writes. One stage
    alone returns None.

    Raises: ConfigError for settings that cannot work; RunStopped after a signal, or on NaN or
    infinity.
    """
    settings: RftConfig = run.algo
    check_switches(run, settings)
    task = task or build(run.task)
    if settings.hint_samples and not hasattr(task, "hint"):
        raise ConfigError(
            f"algo.hint_samples={settings.hint_samples}: {type(task).__name__} has no method"
            " `hint(example)`, a prompt that tells the answer. Set it to 0."
        )
    stages = Stages(run, context, task)
    with (
        closed_on_error(stages.tracker),
        closing(stages.scorer),
        StopSignal() as stages.stop,
        summary.profiled(run, context) as stages.traced,
    ):
        if settings.stage != "all":
            getattr(stages, settings.stage)(stages.under_way())
            return stages.leave()
        best, fallen = stages.evaluate(0), 0
        for iteration in stages.iterations:
            if (ended_by := stages.spent(iteration)) is not None:
                break
            stages.generate(iteration)
            if not stages.select(iteration):
                ended_by = stages.limit()
                break
            stages.finetune(iteration)
            last = stages.evaluate(iteration)
            if not settings.validation_prompts or last["validation"] > best["validation"]:
                best, fallen = last, 0
            else:
                fallen += 1
            more = iteration != settings.iterations and stages.spent(iteration + 1) is None
            if fallen == settings.patience and more:
                log.info(
                    "stopping after iteration %d: the validation %s was best after iteration %d",
                    iteration,
                    best["metric"],
                    best["iteration"],
                )
                ended_by = f"algo.patience={settings.patience}"
                break
        if ended_by is None and stages.was_cut(iteration):
            ended_by = stages.limit()
    return stages.finish(best["iteration"], ended_by)
