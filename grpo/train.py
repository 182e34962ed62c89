"""GRPO, the loop: sample groups, reward, advantage, loss, backward, step.

    python launch.py algo=grpo task=chess
    python launch.py algo=grpo task=countdown hardware=rtx4090 'opt=[amp,compile,ddp]'

After "DeepSeekMath" (arXiv:2402.03300), with the losses and advantages of its kin (grpo/loss.py).
Departures: one exact denominator for an optimizer step, whatever the micro-batches and ranks;
groups without variance are replaced; the prompt is computed once per group in training as in
sampling; no dropout anywhere.
"""

import itertools
import logging

from common.config import ConfigError, Run
from common.distributed import Context
from common.memory import Memory
from common.parts import Parts, open_parts
from common.report import Result
from common.session import Session
from common.task import Task
from grpo.config import GrpoConfig
from grpo.loss import policy_loss
from grpo.plan import describe_run
from grpo.policy import Policy
from grpo.rollouts import Collector
from grpo.rounds import Saved

log = logging.getLogger("clutch")


def train(run: Run, context: Context, task: Task | None = None) -> Result:
    """Train a model on a task with GRPO. Every rank returns the same numbers; rank 0 writes.

    Raises: ConfigError for settings that cannot work; RunStopped after a signal, a guard, or on NaN
    or infinity.
    """
    policy, collector = prepare(run, context, task)
    parts, cfg = policy.parts, policy.cfg
    with Session(parts.run, context, parts, steps=cfg.steps) as session:
        session.state |= {"cursor": 0, "updates_left": 0, "idle": 0, "visits": {}}
        session.start(Saved(policy, collector.rounds), describe_run(policy))
        if session.state["updates_left"] and not session.over:
            split = f" x algo.minibatches={cfg.minibatches}" if cfg.minibatches > 1 else ""
            raise ConfigError(
                f"algo.steps={cfg.steps} goes on from step {session.state['step']}, which ended a"
                f" run with {session.state['updates_left']} of"
                f" algo.num_iterations={cfg.num_iterations}{split} over its last rollout to come;"
                " that rollout is gone. Start anew with another hydra.run.dir."
            )
        if not session.over:
            session.ending = collector.rounds.exhausted(session.state)
            session.warm_up(lambda: (collector.rehearse(), policy.rehearse()))
        for step in session.steps():
            collected = collector.collect(step)
            step.log(**collected.numbers)
            session.ending = collector.rounds.exhausted(session.state)
            if not collected.finite:
                what = "NaN or infinity in a reward or logits"
                step.non_finite(what, collected.offending)
            elif collected.batch is None:
                session.state["idle"] += 1
                if context.main and session.state["idle"] == 1:  # the others are counted
                    log.warning("step %d: %s", step.index + 1, collected.why)
            if (batch := collected.batch) is None:
                continue  # counted and logged, without an optimizer step
            # A = (r - mean(r of the group)) / std, or as algo.advantage says: [prompts, G]
            advantage = batch.advantages(cfg)
            minibatches = batch.cut(cfg.minibatches)
            policy.look_back(minibatches, step)
            updates = session.updates(step, cfg.num_iterations * len(minibatches))
            for update, part in zip(updates, itertools.cycle(minibatches), strict=False):
                # mean over tokens of -min(ratio A, clip(ratio) A) + beta KL, or as algo.loss says
                numbers = policy.step(part, advantage, policy_loss, update)
                update.log(**numbers)
                policy.check(numbers, part, update)
        if context.main and (idle := session.state["idle"]) > 1:
            steps = session.state["step"]
            log.warning("%d of %d steps had nothing to learn, so no update", idle, steps)
        return session.finish()


def prepare(run: Run, context: Context, task: Task | None) -> tuple[Policy, Collector]:
    """Return what makes optimizer steps, and what samples for them. Raises: ConfigError for
    settings that cannot work.
    """
    parts = open_parts(run, context, task, reference=bool(run.algo.kl.beta))
    cfg: GrpoConfig = parts.run.algo
    policy = Policy(parts, cfg)  # backward, clip, optimizer step
    return policy, Collector(parts, cfg, policy.limit)  # sample, score, replace dead groups


def plan(
    run: Run, context: Context, task: Task | None = None
) -> tuple[dict[str, str], Parts, Memory]:
    """Return the lines of a run's plan, its model, and what a step takes (memory/plan.py)."""
    policy, _ = prepare(run, context, task)
    return describe_run(policy), policy.parts, policy.memory
