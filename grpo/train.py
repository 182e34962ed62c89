"""GRPO, the loop: sample groups, reward, advantage, loss, backward, step.

    python launch.py algo=grpo task=chess
    python launch.py algo=grpo task=countdown hardware=rtx4090 'opt=[amp,compile,ddp]'

After "DeepSeekMath" (arXiv:2402.03300), with the losses and advantages of its variants
(grpo/loss.py). Departures: one exact denominator for an optimizer step, whatever the micro-batches
and ranks; groups without variance are replaced; the prompt is computed once per group in training
as in sampling; no dropout anywhere.
"""

import itertools
import logging
import operator
from typing import Any

from torch import Tensor

from common.checkpoint import Checkpoint
from common.config import ConfigError, Run, environment
from common.distributed import Context
from common.memory import Memory, describe
from common.optim import describe_lr
from common.parts import Parts, open_parts
from common.report import Result
from common.run import describe_length
from common.session import Session
from common.task import Task
from grpo.collect import Collector
from grpo.config import ENVIRONMENT, GrpoConfig
from grpo.loss import policy_loss
from grpo.policy import RATES, Policy

log = logging.getLogger("clutch")


def train(run: Run, context: Context, task: Task | None = None) -> Result:
    """Train a model on a task with GRPO. Every rank returns the same result; rank 0 writes the
    files.

    Raises: ConfigError for settings that cannot work; RunStopped after a signal, a guard, or on NaN
    or infinity.
    """
    policy, collector = prepare(run, context, task)
    parts, cfg = policy.parts, policy.cfg
    with Session(parts.run, context, parts, steps=cfg.steps, several_updates=True) as session:
        state = session.state
        # The next prompt of the training order and the samples per example
        # (grpo.collect.PromptQueue), and the steps without an update.
        state.own |= {"cursor": 0, "visits": {}, "idle": 0}
        session.start(GrpoState(policy, collector), describe_run(policy))
        if state.updates_left and not session.over:
            split = f" x algo.minibatches={cfg.minibatches}" if cfg.minibatches > 1 else ""
            raise ConfigError(
                f"algo.steps={cfg.steps} goes on from step {state.step}, which ended a"
                f" run with {state.updates_left} of"
                f" algo.num_iterations={cfg.num_iterations}{split} over its last rollout to come;"
                " that rollout is gone. Start anew with another hydra.run.dir."
            )
        if not session.over:
            session.end_if(collector.prompts.exhausted(state.own))
            session.warm_up(lambda: (collector.rehearse(), policy.rehearse()))
        for step in session.steps():
            collected = collector.collect(step)
            step.log(**collected.numbers)
            session.end_if(collector.prompts.exhausted(state.own))
            if not collected.finite:
                what = "NaN or infinity in a reward or logits"
                step.non_finite(what, collected.offending)
            elif collected.batch is None:
                state.own["idle"] += 1
                if context.main and state.own["idle"] == 1:  # the others are counted
                    log.warning("step %d: %s", step.index + 1, collected.why)
            if (batch := collected.batch) is None:
                continue  # counted and logged, without an optimizer step
            # A = (r - mean(r in the group)) / std, or as algo.advantage says: [prompts, G]
            advantage = batch.advantages(cfg)
            minibatches = batch.cut(cfg.minibatches)
            policy.look_back(minibatches, step)
            updates = session.updates(step, cfg.num_iterations * len(minibatches))
            for update, part in zip(updates, itertools.cycle(minibatches), strict=False):
                # mean over tokens of -min(ratio A, clip(ratio) A) + beta KL, or as algo.loss says
                numbers = policy.step(part, advantage, policy_loss, update)
                update.log(**numbers)
                policy.check(numbers, part, update)
        if context.main and (idle := state.own["idle"]) > 1:
            log.warning("%d of %d steps had nothing to learn, so no update", idle, state.step)
        return session.finish()


def prepare(run: Run, context: Context, task: Task | None) -> tuple[Policy, Collector]:
    """Return the policy, which makes optimizer steps, and the collector, which samples for it.

    Raises: ConfigError for settings that cannot work.
    """
    parts = open_parts(run, context, task, reference=bool(run.algo.kl.beta))
    cfg: GrpoConfig = parts.run.algo
    policy = Policy(parts, cfg)  # backward, clip, optimizer step
    return policy, Collector(parts, cfg, policy.row_limit)  # sample, score, replace dead groups


class GrpoState:
    """The algorithm's part of a checkpoint: the policy, and the rollout under way."""

    def __init__(self, policy: Policy, collector: Collector) -> None:
        self.policy, self.collector = policy, collector

    def tensors(self) -> dict[str, Tensor]:
        """Return the trained tensors."""
        return self.policy.tensors()

    def extra(self) -> dict[str, Any]:
        """Return the state of the optimizer, and the rollout that is under way."""
        return self.policy.extra() | self.collector.extra()

    def load(self, saved: Checkpoint) -> None:
        """Take over a checkpoint."""
        self.policy.load(saved)
        self.collector.load(saved.extra or {})


def plan(
    run: Run, context: Context, task: Task | None = None
) -> tuple[dict[str, str], Parts, Memory]:
    """Return the lines of a run's plan, its parts, and the memory of a step
    (common/memory/plan.py).
    """
    policy, _ = prepare(run, context, task)
    return describe_run(policy), policy.parts, policy.memory


def describe_run(policy: Policy) -> dict[str, str]:
    """Return the lines of the plan."""
    parts, cfg = policy.parts, policy.cfg
    run, facts = parts.run, describe(parts)
    offload = run.opt.offload.enabled
    reference = "none (beta 0)" if not cfg.kl.beta else f"on the {'CPU' if offload else 'device'}"
    if cfg.kl.beta and parts.lm.adapter:
        which = (
            "with the adapter as it was" if parts.lm.adapter.config.path else "without the adapter"
        )
        reference = f"the same weights {which}"
    length = describe_length(parts, cfg.steps, "optimizer steps")
    aggregate = "" if cfg.aggregate == "auto" else f" by {cfg.aggregate}"
    ahead = ", begun while the one before is learnt from" if cfg.overlap else ""
    against = "sampler" if cfg.against_sampler else "trainer"
    passes = f" in {cfg.num_iterations} passes" if cfg.num_iterations > 1 else ""
    split = f" of {cfg.minibatches} parts{passes}" if cfg.minibatches > 1 else ""
    variables = describe_variables(run)
    return {
        "algorithm": f"grpo, loss {cfg.loss}{aggregate}, advantage {cfg.advantage}, {length},"
        f" {cfg.updates_per_rollout} per rollout{split}, {describe_lr(parts, RATES)}",
        **facts,
        "model": f"{facts['model']}; reference {reference}",
        "rollout": f"{cfg.prompts_per_step} prompts x {cfg.samples_per_prompt} samples,"
        f" {cfg.sampling.max_new_tokens} new tokens at most, {policy.memory.rows} rows per forward;"
        f" rewards are of sampled completions (temperature {cfg.sampling.temperature:g}); dead"
        f" groups replaced in {cfg.resample_rounds} rounds at most{ahead}",
        "training": f"{min(policy.row_limit.rows, policy.completions)} completions per forward,"
        f" gradients accumulated; ratio to the {against}, correction {policy.correction}",
        **({"environment": ", ".join(variables)} if variables else {}),
        **policy.memory.describe(parts.lm.model),
    }


def describe_variables(run: Run) -> list[str]:
    """Describe the environment variables that are set, and whether a setting overrides them or
    makes them have no effect.
    """
    pool = environment.switch("PARALLEL_REWARDS")
    wanted: dict[str, Any] = {
        **{name: environment.switch(name) for name in ("USE_AMP", "USE_TF32", "COMPILE_MODEL")},
        "AMP_DTYPE": environment.word("AMP_DTYPE"),
        "PARALLEL_REWARDS": "threads" if pool else "serial",
        "NUM_WORKERS": environment.number("NUM_WORKERS"),
    }
    idle = {
        "AMP_DTYPE": "" if run.opt.amp.enabled else "opt=amp is off",
        "NUM_WORKERS": "scoring.kind=serial" if run.scoring.kind == "serial" else "",
    }
    described: list[str] = []
    for name, key in ENVIRONMENT.items():
        found = operator.attrgetter(key)(run)
        described += environment.describe(name, wanted[name], found, idle.get(name, ""))
    return described
