"""Say what a run will do, before the first step."""

import operator
from typing import Any

from common.config import Run, environment
from common.memory import describe
from common.optim import describe_lr
from common.run import describe_length
from grpo.config import ENVIRONMENT
from grpo.policy import RATES, Policy


def describe_run(policy: Policy) -> dict[str, str]:
    """Say what a run will do, with sizes."""
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
        "training": f"{min(policy.limit.rows, policy.completions)} completions per forward,"
        f" gradients accumulated; ratio to the {against}, correction {policy.correction}",
        **({"environment": ", ".join(variables)} if variables else {}),
        **policy.memory.describe(parts.lm.model),
    }


def describe_variables(run: Run) -> list[str]:
    """Say which of the environment variables are set, and whether a setting overrides them or
    leaves them without effect.
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
