"""pass@1 and pass@k of a model, from samples drawn as in training."""

from collections.abc import Sequence
from typing import Any

from common import hardware
from common.config import Run
from common.distributed import fsdp
from common.distributed.context import Context
from common.evaluation import watched
from common.model.prompts import encode_prompts
from common.sampling.engine import Completions
from common.sampling.native import Sampler
from common.tasks import Example, Task
from common.tasks.scoring import Scorer
from rft.config import RftConfig


def pass_rates(
    run: Run,
    context: Context,
    sampler: Sampler,
    tokenizer: Any,
    task: Task,
    scorer: Scorer,
    examples: Sequence[Example],
) -> dict[str, float]:
    """pass@1 and pass@k in percent, with k = algo.pass_samples; empty where that is 0. Every rank
    returns the same.
    """
    settings: RftConfig = run.algo
    count, mine = settings.pass_samples, examples[context.rank :: context.world_size]
    if not count:
        return {}
    right: list[int] = []
    prompts = encode_prompts(tokenizer, [task.prompt(example) for example in mine])

    def sample(rows: int) -> Completions:
        sampler.rows = rows
        with watched(sampler, f"pass@{count}", len(mine) * count, context):
            return sampler.generate(
                prompts,
                settings.sampling,
                samples_per_prompt=count,
                seed=run.seed,
                prompt_ids=[example.id for example in mine],
            )

    with fsdp.forwards(sampler.model):
        floor = fsdp.floor(sampler.model, sampler.rows, 1)
        made, sampler.rows = (
            hardware.halving(sample, sampler.rows, floor) if mine else (None, sampler.rows)
        )
    if made is not None:
        repeated = [example for example in mine for _ in range(count)]
        rewards = scorer.submit(repeated, made.texts(tokenizer)).result().rewards
        good = [
            settings.select.accepts(reward, done)
            for reward, done in zip(rewards, made.finished.tolist(), strict=True)
        ]
        right = [sum(good[i : i + count]) for i in range(0, len(good), count)]
    everyone = [n for part in context.gather_objects(right) for n in part]
    return {
        f"pass@{k}": 100 * sum(pass_at(n, count, k) for n in everyone) / len(everyone)
        for k in sorted({1, count})
    }


def pass_at(right: int, of: int, k: int) -> float:
    """Unbiased estimate of the chance that one of `k` samples is right, from `right` of `of`
    (arXiv:2107.03374).
    """
    if of - right < k:
        return 1.0
    chance = 1.0
    for i in range(of - right + 1, of + 1):
        chance *= 1 - k / i
    return 1 - chance
