"""Split prompts into disjoint sets: for training, for validation (which decides when to stop), and
held out.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from common.config import ConfigError, Run
from common.distributed import Context
from common.examples import (
    Examples,
    Fitting,
    fit_prompts,
    list_candidates,
    measure_prompts,
    read_turns,
    take_validation,
)
from common.language_model import LanguageModel
from common.task import Example, Task, TaskFeatures, class_name
from common.tasks import ExampleOrder
from rft.config import RftConfig


@dataclass(frozen=True, kw_only=True)
class Prompts(Examples):
    """The prompts of an RFT run.

    Attributes:
        train: the training prompts.
        overlap: a sentence on prompts that training and evaluation would share.
    """

    train: list[Example]
    overlap: str

    def of(self, iteration: int, count: int | None) -> list[Example]:
        """Return the `count` training prompts (None = all) of a 1-based iteration, in order."""
        count = min(count or len(self.train), len(self.train))
        return list({e.id: e for e in self.order.take((iteration - 1) * count, count)}.values())


def check_hints(run: Run, _: Context, task: Any) -> None:
    """Raise ConfigError for algo.hint_samples of a task without hints."""
    if run.algo.hint_samples and TaskFeatures(task).hint is None:
        raise ConfigError(
            f"algo.hint_samples={run.algo.hint_samples}: {class_name(task)} has no method"
            " `hint(example)`, a prompt that tells the answer. Set it to 0."
        )


def split_prompts(run: Run, lm: LanguageModel, task: Any) -> Prompts:
    """Split the task's prompts. Validation is the first part of the training order; training leaves
    out the prompts of the test split and of validation.

    Raises: ConfigError if no prompt is left to train on, or a prompt does not fit the context.
    """
    cfg: RftConfig = run.algo
    seed = run.seed
    everything, examples = list(task.examples("test")), list(task.examples("train"))
    train = without(task, examples, everything)
    # A task that reads both files may have left some out itself.
    shared = len(examples) - len(train) + TaskFeatures(task).dropped
    if not train:
        raise ConfigError(
            f"all {len(examples)} training prompts are evaluation prompts too, so none is left to"
            " train on. Give other training or test rows."
        )
    count = min(cfg.validation_prompts, max(1, len(train) // 2))
    train, validation = take_validation(
        train, count, seed, partial(_identify, task), "algo.validation_prompts"
    )
    hinted = Fitting({"train": train}, [])
    if cfg.hint_samples:  # longer than the prompts
        hinted = fit_prompts(run, lm, task.hint, {"train": train})
        train = hinted.splits["train"]
    splits = {"train": [*train, *validation], "test": list_candidates(run, task)}
    turns = read_turns(run, lm, task)
    fitting = fit_prompts(run, lm, task.prompt, splits, turns=turns)
    fits = {example.id for example in fitting.splits["train"]}
    train = [example for example in train if example.id in fits]
    validation = [example for example in validation if example.id in fits]
    overlap = f"{shared} training prompts are evaluation prompts too: left out"
    if not shared:
        overlap = f"none of {len(examples):,} training prompts is among the {len(everything):,}"
        overlap += " evaluation prompts"
    return Prompts(
        order=ExampleOrder(train, seed),
        held_out=fitting.splits["test"][: run.evaluate.examples],
        train=train,
        validation=validation,
        overlap=overlap,
        skipped=hinted.skipped + fitting.skipped,
        turns=turns,
        **measure_prompts(fitting.prompts, hinted.prompts),
    )


def without(task: Task, examples: list[Example], measured: list[Example]) -> list[Example]:
    """Return the `examples` whose prompt, or whose episode, is not in `measured`. White space is
    ignored, case is not.
    """
    taken = {_identify(task, example) for example in measured}
    return [example for example in examples if _identify(task, example) not in taken]


def _identify(task: Any, example: Example) -> Any:
    """Return what examples with the same prompt, or the same episode, share."""
    if TaskFeatures(task).episode:
        return repr(example.extra.get("row", example.extra["seed"]))
    return " ".join(str(task.prompt(example)).split())
