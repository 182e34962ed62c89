"""EGGROLL, the loop: perturb, sample, score, shape, update.

    python launch.py algo=eggroll hardware=a100_40g
    python launch.py algo=eggroll 'opt=[amp,ddp]' algo.members=1024

After "Evolution Strategies at the Hyperscale" (arXiv:2511.16652), algorithm 1. Departures: any
Hugging Face decoder with a key-value cache and a parallel prefill; all members answer the same
prompts of a step; weight decay pulls towards the initial weights (arXiv:2605.30148). Ranks share
the members between them and exchange the scores of every row; all make the same update.
"""

from collections.abc import Callable
from typing import Any

from common.answers import check_answers, read_given
from common.config import RANDOPT, ConfigError, Run
from common.distributed import Context
from common.examples import read_examples
from common.memory import Memory
from common.parts import Parts, open_parts
from common.report import Result
from common.session import Session
from common.system import import_named
from common.task import Task, TaskFeatures
from eggroll import instruments
from eggroll.config import LOOK_EVERY, EggrollConfig
from eggroll.noise import Noise
from eggroll.population import PopulationCollector
from eggroll.record import open_recorder
from eggroll.trust import TrustRegion
from eggroll.tune import find_auto, load_probe, tune
from eggroll.weights import Weights


def train(run: Run, context: Context, task: Task | None = None) -> Any:
    """Evolve a model on a task. Every rank returns the same result: a Result, or with probe=true
    the Findings of the probe. Rank 0 writes the files.

    Raises: ConfigError for settings that cannot work; RunStopped after a signal, or on NaN or
    infinity.
    """
    collector, weights = prepare(run, context, task)
    parts, cfg, noise = collector.parts, collector.cfg, collector.noise
    run = parts.run
    if run.probe:
        try:
            return load_probe(run, "show")(collector, weights)
        finally:
            parts.close()
    if cfg.method == "randopt":
        return load_randopt()(run, collector, weights)
    with Session(run, context, parts, steps=cfg.steps) as session:
        session.start(weights, collector.plan()[0])
        tuned = tune(collector, weights, session)  # sigma and lr, as set or as measured
        region = TrustRegion(cfg, weights, tuned.drift, session)
        recorder = open_recorder(parts, weights, session)
        if not session.over:
            session.warm_up(collector.rehearse)
        for step in session.steps():
            sigma = tuned.sigma * cfg.sigma_schedule.factor(step.progress)
            lr = tuned.lr * cfg.lr_schedule.factor(step.progress)
            draw = step.index // cfg.noise_reuse
            first = step.index * cfg.prompts_per_step
            examples = parts.examples.order.take(first, cfg.prompts_per_step)

            closely = step.index % LOOK_EVERY == 0
            tried = collector.try_out(examples, draw, sigma, step, closely)
            step.log(**tried.numbers(cfg), sigma=sigma)
            if not tried.finite:
                step.non_finite("NaN or infinity in a reward or logits", tried.offending)
                continue
            shaped = tried.shaped(cfg)  # fitness [members]
            step.rows = tried.rows(shaped)
            lr, length = region.shorten(lr, noise.expected_norm(shaped), step)
            compare = weights.compares(step.index)
            with step.phase("update"):
                for name, gradient in noise.gradients(draw, shaped):  # -1/N sum_i fitness_i E_i
                    weights.descend(name, gradient, lr, compare)  # W <- W - lr * gradient
                    del gradient  # free it before the next one is computed
                finite, moved = weights.measure()
                recorder.add(step.index + 1, draw, sigma, lr, shaped, tried)
            region.follow(length, moved.get("drift"))
            counted, samples = tried.counted(cfg)
            looked = instruments.look(counted, shaped, noise, draw, samples, closely)
            step.log(lr=lr, **moved, **looked, state_memory_gb=weights.memory_gb)
            step.stop_if(None if finite else "weights are not finite.")
            step.stop_if(cfg.stop_at.crossed(moved.get("drift", 0.0)))
        result = session.finish()
        recorder.end(result)
        return result


def prepare(run: Run, context: Context, task: Task | None) -> tuple[PopulationCollector, Weights]:
    """Return the collector, and the weights with their masters, initial values and optimizers.

    Raises: ConfigError for settings that cannot work.
    """
    cfg: EggrollConfig = run.algo
    if cfg.method == "randopt":
        load_randopt()  # report a missing plugin before the model is loaded
    if run.probe or find_auto(cfg):
        load_probe(run, "Probe")
    parts = open_parts(
        run,
        context,
        task,
        population=cfg.members,
        noise_rank=cfg.rank,
        floor=cfg.pair,
        read=read_given if cfg.fitness_of == "likelihood" else read_examples,
        check=check_task,
    )
    cfg, noise = parts.run.algo, Noise.of(parts.run, parts.lm)
    if cfg.rank != 1 and all(address.form == "full" for address in noise.addresses):
        raise ConfigError(
            f"algo.rank={cfg.rank} has no effect: nothing has low-rank noise. Set algo.rank=1."
        )
    # Only the loop of `train` measures the drift, which needs the initial weights.
    looped = cfg.method == "eggroll" and not run.probe
    weights = Weights.of(parts.run, parts.lm, noise, context.out_dir if looped else None)
    return PopulationCollector(parts, noise, cfg), weights


def plan(
    run: Run, context: Context, task: Task | None = None
) -> tuple[dict[str, str], Parts, Memory]:
    """Return the lines of a run's plan, its parts, and the memory of a step
    (common/memory/plan.py).
    """
    collector, _ = prepare(run, context, task)
    rows, memory = collector.plan()
    return rows, collector.parts, memory


def load_randopt() -> Callable[[Run, PopulationCollector, Weights], Result]:
    """Return the function that runs RandOpt. Raises: ConfigError if its plugin is missing."""
    return import_named("algo.method=randopt", RANDOPT, "run_randopt", "Use algo.method=eggroll.")


def check_task(run: Run, context: Context, task: Any) -> None:
    """Raise ConfigError for a task that the fitness cannot be computed from."""
    cfg: EggrollConfig = run.algo
    if cfg.fitness_of == "likelihood":
        check_answers(run, context, task)
    components, weights = TaskFeatures(task).components, TaskFeatures(task).weights
    count = sum(weights.get(name, 1) > 0 for name in components)
    if cfg.fitness == "component_zscore" and count < 2:
        raise ConfigError(
            "algo.fitness=component_zscore needs a reward with two components or more, and this"
            f" task's has {count or 'none'} with a weight above 0. Use algo.fitness=zscore, or"
            " task=custom with several rewards."
        )
