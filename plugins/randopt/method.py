"""RandOpt, a baseline for evolution: the gain from trying perturbations without moving the weights.

    python launch.py algo=eggroll algo.method=randopt algo.sigma=auto

It tries `members` perturbations of the weights per step, as EGGROLL does, keeps the best of all
steps, and lets them vote; the weights stay as they are (arXiv:2603.12228). Departure: the noise is
EGGROLL's, low-rank and mirrored.
"""

import logging
from collections import Counter
from dataclasses import replace
from typing import Any

from common.config import Run, SamplingConfig
from common.evaluation import Evaluation, score
from common.report import Result
from common.rollout import Rollout
from common.session import Session
from common.task import TaskFeatures
from eggroll.population import PopulationCollector
from eggroll.tune import tune
from eggroll.weights import Weights

log = logging.getLogger("clutch")

BEST = 8  # the number of perturbations that vote


def run_randopt(run: Run, collector: PopulationCollector, weights: Weights) -> Result:
    """Try members, step by step, and evaluate the vote of the best of them. Raises: as
    eggroll.train.train.
    """
    parts, cfg = collector.parts, collector.cfg
    # Members of different steps are compared, so all answer the same prompts.
    examples = parts.examples.order.take(0, cfg.prompts_per_step)
    with Session(run, parts.context, parts, steps=cfg.steps) as session:
        own = session.state.own
        own["best"] = []  # [reward, draw, member], the best first
        session.start(weights, collector.plan()[0])
        tuned = tune(collector, weights, session)
        if not session.over:
            session.warm_up(collector.rehearse)
        for step in session.steps():
            tried = collector.try_out(examples, step.index, tuned.sigma, step)
            step.log(**tried.numbers(cfg), sigma=tuned.sigma)
            if not tried.finite:
                step.non_finite("NaN or infinity in a reward or logits", tried.offending)
                continue
            step.rows = tried.rows()
            rewards = tried.rewards.mean(1).tolist()
            scored = [[reward, step.index, member] for member, reward in enumerate(rewards)]
            own["best"] = sorted([*own["best"], *scored], reverse=True)[:BEST]
            step.log(reward_kept=own["best"][-1][0])
        if not own["best"]:  # a budget that the probe has used up
            return session.finish()
        last = vote(collector, own["best"], tuned.sigma, session.before)
        return session.finish(last=last)


def vote(
    collector: PopulationCollector, best: list[list[Any]], sigma: float, before: dict[str, Any]
) -> Evaluation:
    """Return the held-out evaluation of the most frequent answers of the best members, with the
    best member's own measures next to it.

    Every member answers greedily, on every rank. If several answers are equally frequent, the
    better member's counts; a member without an answer does not vote.

    Args:
        best: [reward, draw, member] of the members that vote, the best first.
        sigma: the standard deviation of the noise.
        before: the evaluation before training, as a checkpoint has it.
    """
    parts, cfg = collector.parts, collector.cfg
    tokens, held_out = cfg.sampling.max_new_tokens, parts.held_out
    greedy = SamplingConfig.uncut(tokens, 0.0)
    requests = parts.rollouter.request(held_out)
    answers: list[list[str]] = []
    with parts.lm.sharding.gathered():
        for _, draw, member in best:
            first = member - member % cfg.pair
            pair, noise = range(first, first + cfg.pair), collector.noise
            with noise.members(draw, pair, sigma) as perturbed:
                completions = parts.rollouter.sample(
                    replace(requests, population=perturbed), greedy
                )
            texts = Rollout.decode(parts.lm.decode, requests, completions, held_out).texts
            start = (member - first) * len(held_out)
            answers.append(texts[start : start + len(held_out)])
    read = TaskFeatures(parts.task).answer or str.strip
    chosen = []
    for texts in zip(*answers, strict=True):
        said = [read(text) for text in texts]
        votes = Counter(answer for answer in said if answer) or Counter(said)
        most, _ = votes.most_common(1)[0]  # if counts are equal the first, from the better member
        chosen.append(texts[said.index(most)])
    single, measures = (parts.task.metrics(held_out, texts) for texts in (answers[0], chosen))
    # The other measures from before training still hold: the model has not changed since.
    scores = {name: start for name, start in before["scores"].items() if name not in measures}
    voted = Evaluation(
        before["metrics"] | measures,
        chosen,
        generated=0,
        scores=score(parts.task, held_out, chosen, measures) | scores,
        by=f"the vote of the best {len(best)} members",
        further_metrics={"best_member": single},
    )
    if parts.context.main:
        shown = ", ".join(f"{name} {value:.2f}" for name, value in single.items())
        log.info("held-out, the best member alone: %s", shown)
    return voted
