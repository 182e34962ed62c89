"""Say what a run will do, before the first step."""

from common.plan import describe
from common.recipe import describe_lr
from common.run.budget import describe_length
from grpo.policy import RATES, Policy


def describe_run(policy: Policy) -> dict[str, str]:
    """Say what a run will do, with sizes."""
    lm, cfg = policy.lm, policy.cfg
    run, facts = lm.run, describe(lm)
    offload = run.opt.offload.enabled
    reference = "none (beta 0)" if not cfg.kl.beta else f"on the {'CPU' if offload else 'device'}"
    if cfg.kl.beta and lm.adapter:
        which = "with the adapter as it was" if lm.adapter.config.path else "without the adapter"
        reference = f"the same weights {which}"
    length = describe_length(lm, cfg.steps, "optimizer steps")
    aggregate = "" if cfg.aggregate == "auto" else f" by {cfg.aggregate}"
    ahead = ", begun while the one before is learnt from" if cfg.overlap else ""
    against = "sampler" if cfg.against_sampler else "trainer"
    return {
        "algorithm": f"grpo, loss {cfg.loss}{aggregate}, advantage {cfg.advantage}, {length},"
        f" {cfg.num_iterations} per rollout, {describe_lr(lm, RATES)}",
        **facts,
        "model": f"{facts['model']}; reference {reference}",
        "rollout": f"{cfg.prompts_per_step} prompts x {cfg.samples_per_prompt} samples,"
        f" {cfg.sampling.max_new_tokens} new tokens at most, {policy.memory.rows} rows per forward;"
        f" rewards are of sampled completions (temperature {cfg.sampling.temperature:g}); dead"
        f" groups replaced in {cfg.resample_rounds} rounds at most{ahead}",
        "training": f"{min(policy.limit.rows, policy.completions)} completions per forward,"
        f" gradients accumulated; ratio to the {against}, correction {policy.correction}",
        **policy.memory.describe(lm.model),
    }
