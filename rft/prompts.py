"""Which prompts are trained on, which tell when to stop, and which measure; no prompt is two of
these.
"""

from dataclasses import dataclass
from typing import Any

from common import loop
from common.config import ConfigError, Run
from common.tasks import Example, Task
from rft.config import RftConfig


@dataclass(frozen=True)
class Prompts:
    """overlap: a sentence on what training and evaluation prompts had in common. longest: in
    tokens.
    """

    train: list[Example]
    validation: list[Example]
    held_out: list[Example]
    overlap: str
    order: loop.Order
    longest: int

    def of(self, iteration: int, count: int | None) -> list[Example]:
        """The `count` training prompts (None = all) of a 1-based iteration, in the order in which
        they are sampled.
        """
        count = min(count or len(self.train), len(self.train))
        return list({e.id: e for e in self.order.take((iteration - 1) * count, count)}.values())


def split(run: Run, task: Task, tokenizer: Any, context: int) -> Prompts:
    """Training prompts without those of the test split and of validation, which is the first part
    of their order.

    Raises: ConfigError where nothing is left to train on, or a prompt does not fit the model's
    `context` in tokens.
    """
    settings: RftConfig = run.algo
    everything = list(task.examples("test"))
    examples = list(task.examples("train"))
    train = without(task, examples, everything)
    # A task that reads both files may have left some out itself.
    overlap = len(examples) - len(train) + getattr(task, "overlap", 0)
    if not train:
        raise ConfigError(
            f"all {len(examples)} training prompts are evaluation prompts too, so none is left to"
            " train on. Give other training or test rows."
        )
    count = settings.validation_prompts
    if count >= len(train):
        raise ConfigError(
            f"algo.validation_prompts={count} leaves none of the {len(train)} training prompts to"
            " train on. Lower it."
        )
    validation = loop.Order(train, run.seed).take(0, count)
    train = without(task, train, validation)
    held_out = loop.held_out(task, run)
    tokens, splits = (
        settings.sampling.max_new_tokens,
        {
            "train": (*train, *validation),
            "test": held_out,
        },
    )
    if settings.hint_samples:  # longer than the prompts
        loop.longest_prompt(context, tokenizer, task.hint, {"train": train}, tokens)  # type: ignore[attr-defined]
    return Prompts(
        train,
        validation,
        held_out,
        (
            f"{overlap} training prompts are evaluation prompts too: left out"
            if overlap
            else (
                f"none of {len(examples):,} training prompts is among the {len(everything):,}"
                " evaluation prompts"
            )
        ),
        loop.Order(train, run.seed),
        loop.longest_prompt(context, tokenizer, task.prompt, splits, tokens),
    )


def without(task: Task, examples: list[Example], measured: list[Example]) -> list[Example]:
    """`examples` whose prompt is none of `measured`. Spaces do not count, letter case does: 1 Mb is
    not 1 mb.
    """
    taken = {_words(task.prompt(example)) for example in measured}
    return [example for example in examples if _words(task.prompt(example)) not in taken]


def _words(prompt: Any) -> str:
    return " ".join(str(prompt).split())
