"""Baselines that keep evolution honest: what trying perturbations gives without following them.

    python launch.py algo=eggroll algo.method=randopt algo.sigma=auto
    python launch.py algo=eggroll algo.method=corp algo.sigma=auto

Both try `members` perturbations of the weights per step, as EGGROLL does. RandOpt
(arXiv:2603.12228) keeps the best of all that were tried and lets them vote; the weights stay as
they are. CoRP (arXiv:2605.31494) folds the best of a step into the weights, if a gate of other
prompts lets it. Departures: noise is EGGROLL's, low-rank and mirrored, and CoRP's gate is the
reward of one step's prompts.
"""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from common.config import Run, SamplingConfig
from common.distributed import fsdp
from common.report.summary import Result
from common.sampling.engine import Requests
from common.session import Session
from eggroll import probe
from eggroll.population import Population
from eggroll.weights import Weights

BEST = 8  # perturbations that vote, or are folded in; of a step a quarter at most are folded


def run_baseline(run: Run, population: Population, weights: Weights) -> Result:
    """Run the method that the settings name. Raises: as eggroll.train.train."""
    lm, cfg = population.lm, population.cfg
    randopt = cfg.method == "randopt"
    act = choose_best if randopt else fold
    with Session(run, lm.context, lm, steps=cfg.steps) as session:
        session.state["best"] = []  # of RandOpt: [reward, draw, member], the best first
        session.start(weights, population.plan())
        tuned = probe.tune(population, weights, session)
        for step in session.steps():
            start = 0 if randopt else step.index  # one answer sheet for all that are compared
            examples = lm.order.take(start * cfg.prompts_per_step, cfg.prompts_per_step)
            tried = population.try_out(examples, step.index, tuned.sigma, step)
            step.log(**tried.numbers(), sigma=tuned.sigma)
            if not tried.finite:
                step.non_finite("NaN or infinity in a reward or logits", population.offending)
                continue
            step.show(population.rows())
            act(step, tried.rewards.mean(1), tuned, population, weights)
        if not randopt:
            return session.finish()
        if not session.state["best"]:  # a budget that the probe has used up
            return session.finish()
        return session.finish(voted=vote(population, session.state["best"], tuned.sigma))


# --- RandOpt


def choose_best(
    step: Any, rewards: torch.Tensor, tuned: probe.Tuned, population: Population, weights: Weights
) -> None:
    """Keep the best members of this step and those before."""
    scored = [[reward, step.index, member] for member, reward in enumerate(rewards.tolist())]
    step.state["best"] = sorted([*step.state["best"], *scored], reverse=True)[:BEST]
    step.log(reward_kept=step.state["best"][-1][0])


def vote(population: Population, best: list[list[Any]], sigma: float) -> dict[str, float]:
    """Return the held-out measures of what most of the best members answer; of equally many, the
    better member's. Each answers greedily, and each rank asks them all.
    """
    lm, cfg = population.lm, population.cfg
    tokens, held_out = cfg.sampling.max_new_tokens, lm.held_out
    greedy = SamplingConfig(max_new_tokens=tokens, temperature=0.0, top_p=1.0, top_k=0)
    asked = Requests(
        prompts=lm.encode(held_out),
        groups=cfg.pair,
        narrow=population.noise.narrow,
        trunk=population.noise.trunk,
    )
    answers: list[list[str]] = []
    with fsdp.forwards(lm.model):
        for _, draw, member in best:
            first = member - member % cfg.pair
            pair, noise = range(first, first + cfg.pair), population.noise
            with noise.members(draw, pair, sigma):
                factors = partial(noise.factors, draw, pair, sigma)
                made = lm.generate(replace(asked, factors=factors), greedy)
            texts = made.texts(lm.tokenizer)
            own = (member - first) * len(held_out)
            answers.append(texts[own : own + len(held_out)])
    read = getattr(lm.task, "answer", None) or str.strip
    chosen = []
    for texts in zip(*answers, strict=True):
        said = [read(text) for text in texts]
        most, _ = Counter(said).most_common(1)[0]  # of equal counts the first, which is the best's
        chosen.append(texts[said.index(most)])
    return lm.task.metrics(held_out, chosen)


# --- CoRP


def fold(
    step: Any, rewards: torch.Tensor, tuned: probe.Tuned, population: Population, weights: Weights
) -> None:
    """Move the weights by lr times the mean of the best members' noise, if the prompts of the next
    step are answered better then.
    """
    lm, cfg = population.lm, population.cfg
    others = (step.index + 1) * cfg.prompts_per_step
    examples = lm.order.take(others, cfg.prompts_per_step)
    requests = population.request(examples, step.index)
    repeated = [example for example in examples for _ in range(cfg.samples_per_prompt)]
    best = rewards.topk(max(1, min(BEST, len(rewards) // 4))).indices
    chosen = torch.zeros_like(rewards)
    chosen[best] = len(rewards) / len(best)  # gradients are -1/N sum_i f_i E_i
    with fsdp.forwards(lm.model):
        before = population.ask_centre(requests, repeated)
    kept = weights.copy()
    with step.phase("update"):
        for name, gradient in population.noise.gradients(step.index, chosen):
            weights.descend(name, gradient, tuned.lr, compare=False)
        finite, _ = weights.measure()
    with fsdp.forwards(lm.model):
        after = population.ask_centre(requests, repeated)
    passed = finite and bool(after.rewards.mean() > before.rewards.mean())
    if not passed:
        weights.put_back(*kept)
    step.used(tokens=before.generated + after.generated, samples=2 * len(repeated))
    step.log(passed=float(passed), lr=tuned.lr)
