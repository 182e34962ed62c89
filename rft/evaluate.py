"""pass@1 and pass@k of a model, from samples drawn as in training."""

import math
from collections.abc import Sequence

from common.distributed import fsdp
from common.lm import LM
from common.report.progress import watch_completions
from common.sampling.engine import Requests
from common.tasks import Example
from rft.config import RftConfig


def pass_rates(lm: LM, examples: Sequence[Example]) -> dict[str, float]:
    """Return pass@1 and pass@k in percent, with k = algo.pass_samples; empty where that is 0."""
    cfg: RftConfig = lm.run.algo
    context, count = lm.context, cfg.pass_samples
    mine = examples[context.rank :: context.world_size]
    if not count:
        return {}
    right: list[int] = []
    with fsdp.forwards(lm.model):
        if mine:
            ids, encoded = [example.id for example in mine], lm.encode(mine)
            requests = Requests(prompts=encoded, ids=ids, samples=count, seed=lm.run.seed)
            with watch_completions(f"pass@{count}", len(mine) * count, context.main) as watch:
                made = lm.engine.generate(requests, cfg.sampling, watch)
            repeated = [example for example in mine for _ in range(count)]
            rewards = lm.scorer.submit(repeated, made.texts(lm.tokenizer)).result().rewards
            pairs = zip(rewards, made.finished.tolist(), strict=True)
            good = [cfg.select.accepts(reward, done) for reward, done in pairs]
            right = [sum(good[i : i + count]) for i in range(0, len(good), count)]
    everyone = [n for part in context.gather_objects(right) for n in part]
    return {
        f"pass@{k}": 100 * sum(pass_at(n, count, k) for n in everyone) / len(everyone)
        for k in sorted({1, count})
    }


def pass_at(right: int, of: int, k: int) -> float:
    """Return an unbiased estimate of the chance that one of `k` samples is right, from `right` of
    `of` (arXiv:2107.03374).
    """
    if of - right < k:
        return 1.0
    return 1 - math.prod(1 - k / i for i in range(of - right + 1, of + 1))
