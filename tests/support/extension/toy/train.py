"""Hill climbing: add noise to the weights, keep it if the reward is the best so far."""

import math

import torch

from common.distributed import restore_checkpoint
from common.memory.plan import describe
from common.parts import open_parts
from common.session import Session


def train(run, context, task=None):
    """Climb, and return the result."""
    cfg, parts = run.algo, open_parts(run, context, task, population=True)
    climber = Climber(parts.lm.model)
    with Session(run, context, parts, steps=cfg.steps) as session:
        session.state.own["best"] = -1.0
        session.start(climber, {"algorithm": "toy", **describe(parts)})
        for step in session.steps():
            first = step.index * cfg.prompts_per_step
            examples = parts.examples.order.take(first, cfg.prompts_per_step)
            climber.move(step.index, cfg.sigma)
            requests = parts.rollouter.request(examples, draw=step.index)
            rollout = parts.rollouter.roll_out(examples, requests, step.phase)
            rewards = rollout.scored.rewards
            step.used(tokens=rollout.generated, samples=len(rewards))
            reward = sum(rewards) / len(rewards)
            step.log(reward=reward)
            if not math.isfinite(reward):
                step.non_finite("NaN in a reward", [{"id": example.id} for example in examples])
            if reward > step.state.own["best"]:
                step.state.own["best"] = reward
            else:
                climber.move(step.index, -cfg.sigma)
        return session.finish()


class Climber:
    """The weights, and what a checkpoint holds of them."""

    def __init__(self, model):
        self.model = model

    @torch.no_grad()
    def move(self, seed, sigma):
        """Add noise that is a function of the seed."""
        draw = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=sigma)

    def tensors(self):
        """Return the weights."""
        return dict(self.model.named_parameters())

    def extra(self):
        """Return nothing more."""
        return {}

    def load(self, saved):
        """Take over a checkpoint."""
        restore_checkpoint(saved, self.tensors(), self.extra)
