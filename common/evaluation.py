"""The held-out measure: greedy completions of test examples, scored by the task's metrics."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from common import hardware
from common.config import SamplingConfig
from common.distributed import fsdp
from common.distributed.context import Context
from common.model.prompts import encode_prompts
from common.report.progress import Progress
from common.sampling.engine import Completions
from common.sampling.native import Sampler
from common.signals import EXIT_NUMBERS, RunStopped
from common.tasks import Example, Task


@dataclass
class Evaluation:
    """metrics: all measures, the headline first. completions: one for each example, in order."""

    metrics: dict[str, float]
    completions: list[str]
    generated: int

    @property
    def name(self) -> str:
        """Of the headline measure."""
        return next(iter(self.metrics))

    @property
    def value(self) -> float:
        """The headline measure."""
        return self.metrics[self.name]


def evaluate(
    sampler: Sampler,
    tokenizer: Any,
    task: Task,
    examples: Sequence[Example],
    max_new_tokens: int,
    context: Context,
) -> Evaluation:
    """Complete `examples` greedily, shared out over the ranks. Every rank returns the same.

    Raises: RunStopped where the model's logits are NaN or infinite.
    """
    with fsdp.forwards(sampler.model):
        texts, generated, broken = _completed(
            sampler, tokenizer, task, examples, max_new_tokens, context
        )
    parts = context.gather_objects((texts, generated, broken))
    if ids := [example for _, _, found in parts for example in found]:
        raise RunStopped(
            f"evaluation: the model's logits are not finite, on {len(ids)} of {len(examples)} test"
            f" examples (the first: {ids[0]}). The model is broken: go back to a checkpoint with a"
            " lower algo.lr, or leave out opt=amp.",
            EXIT_NUMBERS,
        )
    completions = [""] * len(examples)
    for rank, (part, _, _) in enumerate(parts):
        completions[rank :: context.world_size] = part
    return Evaluation(
        task.metrics(examples, completions), completions, sum(count for _, count, _ in parts)
    )


def _completed(
    sampler: Sampler,
    tokenizer: Any,
    task: Task,
    examples: Sequence[Example],
    max_new_tokens: int,
    context: Context,
) -> tuple[list[str], int, list[Any]]:
    """This rank's share of the completions, how many tokens they have, and the ids of examples with
    logits that are not finite.
    """
    mine = examples[context.rank :: context.world_size]
    if not mine:
        return [], 0, []
    greedy = SamplingConfig(max_new_tokens=max_new_tokens, temperature=0.0, top_p=1.0, top_k=0)
    prompts = encode_prompts(tokenizer, [task.prompt(e) for e in mine])

    def complete(rows: int) -> Completions:
        sampler.rows = rows
        with watched(sampler, "evaluating", len(prompts), context):
            return sampler.generate(prompts, greedy)

    made, sampler.rows = hardware.halving(
        complete, sampler.rows, fsdp.floor(sampler.model, sampler.rows, 1)
    )
    broken = [example.id for example, bad in zip(mine, made.broken.tolist(), strict=True) if bad]
    return made.texts(tokenizer), made.generated, broken


@contextmanager
def watched(sampler: Sampler, what: str, total: int, context: Context) -> Iterator[None]:
    """On rank 0, a progress line of what `sampler` completes in the block: `total` completions."""
    if not context.main:
        yield
        return
    line, done = Progress(what, total, unit="completion", brief=True), 0

    def seen(rows: int) -> None:
        nonlocal done
        done += rows
        line.to(done)

    sampler.watch = seen
    try:
        yield
    finally:
        sampler.watch = None
        line.close()
