"""A held-out evaluation: completions of the run's task and of other tasks, samples for pass@k, and
the log-probability of a text; each with scores per example (common/uncertainty.py).

pass@k is the unbiased estimate of arXiv:2107.03374.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from common import uncertainty
from common.config import ConfigError, Run, SamplingConfig
from common.device import precision
from common.distributed import put_back
from common.engine import Completions, Requests
from common.examples import adapt_task, hold_out_other, longest_answer
from common.language_model import LanguageModel
from common.model import check_ids, context_length, encode_prompts, evaluating, find_front
from common.report import watch_completions
from common.rollout import Rollout, Rollouter
from common.system import EXIT_NUMBERS, RunStopped
from common.task import Example, TaskFeatures, class_name, describe_rows, hash_rows
from common.tasks import Checked, build_others, naming, read_text, right_from
from common.uncertainty import BATCHES

WINDOW = 1024  # tokens per window of a text; less if the model's context is shorter

# the reward of a sample, and whether it ended by itself -> whether it is right
Accepts = Callable[[float, bool], bool]


@dataclass
class Evaluation:
    """The result of an evaluation.

    Attributes:
        metrics: all measures by name, the headline first.
        completions: the completion of each held-out example, in order; the first one if there are
            several.
        generated: the number of generated tokens, with those of samples and of other tasks.
        scores: the contributions of the examples to each measure, whose mean is the measure;
            measures without per-example scores are omitted.
        by: the name of who answered; "" = the model.
        further_metrics: further measures, by kind, that are reported next to `metrics`.
        repeats: all completions of each held-out example, if there are several.
        answered: the number of tokens of the completions of the task's own examples.
        seconds: their wall time.
    """

    metrics: dict[str, float]
    completions: list[str]
    generated: int
    scores: dict[str, list[float]] = field(default_factory=dict)
    by: str = ""
    further_metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    repeats: list[list[str]] = field(default_factory=list)
    answered: int = 0
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """The name of the headline measure."""
        return next(iter(self.metrics))

    @property
    def value(self) -> float:
        """The headline measure."""
        return self.metrics[self.name]

    def content(self) -> dict[str, Any]:
        """Return the fields that a checkpoint saves."""
        names = ("metrics", "completions", "scores", "generated")
        repeats = {"repeats": self.repeats} if self.repeats else {}
        return {name: getattr(self, name) for name in names} | repeats

    def add(self, measures: dict[str, tuple[float, list[float]]]) -> None:
        """Add measures: name -> (value, scores per example)."""
        self.metrics |= {name: value for name, (value, _) in measures.items()}
        self.scores |= {name: scores for name, (_, scores) in measures.items()}


@dataclass(frozen=True)
class Other:
    """A task of evaluate.also, which is evaluated in addition to the one that is trained on.

    Attributes:
        name: its key in evaluate.also.
        task: the task.
        examples: its held-out examples.
        longest_prompt: the number of tokens of its longest prompt.
        tokens: the most new tokens of a completion.
    """

    name: str
    task: Any
    examples: list[Example]
    longest_prompt: int
    tokens: int


@dataclass(frozen=True)
class Extras:
    """All that is evaluated in addition to the run's own task.

    Attributes:
        others: the tasks of evaluate.also.
        windows: the windows of evaluate.text, each (tokens of its context, tokens to predict).
        token_bytes: the mean number of bytes per token of that text.
    """

    others: list[Other]
    windows: list[tuple[list[int], list[int]]]
    token_bytes: float

    @property
    def digest(self) -> str:
        """A hash of all rows and windows."""
        others = [list(describe_rows(other.examples)) for other in self.others]
        return hash_rows([others, self.windows])


def check_logits(
    broken: Sequence[Any], count: int, compute: torch.dtype, of: str = "test examples"
) -> None:
    """Raise RunStopped if logits were not finite.

    Args:
        broken: the ids of the examples with such logits.
        count: the number of all examples.
        of: the kind of examples, for the error message.
    """
    if broken:
        advice = precision.OVERFLOW if compute == torch.float16 else ""
        raise RunStopped(
            f"evaluation: the model's logits are not finite, on {len(broken)} of {count} {of}"
            f" (the first: {broken[0]}). The model is broken: go back to a checkpoint with"
            f" a lower algo.lr, or leave out opt=amp.{advice}",
            EXIT_NUMBERS,
        )


def earns_enough(task: Any) -> Accepts:
    """Return a function that decides whether a sample is right: its reward is at least
    task.right_at, even if the sample was cut off.
    """
    least = right_from(task)
    return lambda reward, ended: reward >= least


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Evaluates a language model on held-out examples and on all that the run's `evaluate` settings
    name.
    """

    run: Run
    lm: LanguageModel
    rollouter: Rollouter
    held_out: Sequence[Example]
    validation: Sequence[Example]
    extras: Extras

    def evaluate(self, accepts: Accepts | None = None) -> Evaluation:
        """Evaluate on all that the run's `evaluate` settings name. Every rank returns the same
        result.

        Args: accepts: decides which samples are right; None = `earns_enough`.
        Raises: RunStopped if the model's logits are NaN or infinite.
        """
        measured = self.measure(self.held_out, accepts=accepts or earns_enough(self.rollouter.task))
        if self.run.evaluate.repeats == 1 and (count := self.run.evaluate.samples or 0):
            right = self._draw_samples(count, accepts or earns_enough(self.rollouter.task))
            measured.add(find_pass_rates(right, count))
            measured.generated *= 1 + count  # about as long as the greedy one
        for other in self.extras.others:
            also = self.measure(other.examples, other)
            measured.generated += also.generated
            name = other.name
            measured.metrics |= {f"{name}/{key}": value for key, value in also.metrics.items()}
            measured.scores |= {f"{name}/{key}": values for key, values in also.scores.items()}
        if self.extras.windows:
            measured.add({"text/bits_per_byte": self._measure_text()})
        self.rollouter.engine.rest()
        return measured

    def validate(self) -> Evaluation:
        """Measure on the validation examples, by which a model is chosen. Every rank returns the
        same result.

        Raises: RunStopped if the model's logits are NaN or infinite.
        """
        measured = self.measure(self.validation)
        self.rollouter.engine.rest()
        return measured

    def measure(
        self,
        examples: Sequence[Example],
        other: Other | None = None,
        accepts: Accepts | None = None,
    ) -> Evaluation:
        """Complete examples as evaluate.sampling says, split over the ranks, and compute the task's
        measures: the means over the evaluate.repeats completions of each example.

        Args:
            other: the task of evaluate.also that the examples belong to; None = the run's own task.
            accepts: decides which completions are right, for pass@k of several; None = no pass@k.
        Raises: RunStopped if the model's logits are NaN or infinite.
        """
        context, began, count = self.lm.context, time.perf_counter(), self.run.evaluate.repeats
        rollouter = self.rollouter if other is None else self.rollouter.on(other.task)
        tokens = self.rollouter.sampling.max_new_tokens if other is None else other.tokens
        mine, found = context.share(examples), Drawn()
        with self.lm.sharding.gathered():
            if other is None:  # the weights stay the same for the other tasks
                rollouter.engine.refresh()
            if mine:
                line = f"evaluating {other.name}" if other else "evaluating"
                with watch_completions(line, len(mine) * count, context.main) as watch:
                    found = self._draw(rollouter, mine, tokens, watch, accepts)
        parts = context.gather_objects(found)
        broken = [example for part in parts for example in part.broken]
        check_logits(broken, len(examples), self.lm.precision.compute)
        completions, seconds = put_back([p.texts for p in parts]), time.perf_counter() - began
        counted = sum(part.generated for part in parts)
        metrics, scores = measure_repeats(rollouter.task, examples, completions)
        first = [texts[0] for texts in completions]
        measured = Evaluation(metrics, first, counted, scores, answered=counted, seconds=seconds)
        if count > 1:
            measured.repeats = completions
        if accepts is not None and count > 1:
            right = put_back([part.right for part in parts])
            measured.add(find_pass_rates(right, count))
        return measured

    def _draw(
        self,
        rollouter: Rollouter,
        examples: Sequence[Example],
        tokens: int,
        watch: Any,
        accepts: Accepts | None,
    ) -> "Drawn":
        """Complete this rank's examples, and with `accepts` find which completions are right.

        A sampled draw is a function of (seed, example, sample, position), the same at every
        evaluation: neither ranks nor batches change it.
        """
        evaluate = self.run.evaluate
        count, sampling = evaluate.repeats, evaluate.drawn(self.rollouter.sampling, tokens)
        keys: dict[str, Any] = {"samples": count} if sampling.temperature else {"ids": None}
        requests = rollouter.request(examples, **keys)

        def draw(requests: Requests) -> Completions:
            return rollouter.sample(requests, sampling, watch, refresh=False)

        if accepts is not None and count > 1:
            rollout = rollouter.roll_out(examples, requests, draw=draw)
            right = count_right(rollout, accepts, count)
        else:
            rollout = Rollout.decode(rollouter.decode, requests, draw(requests), examples)
            right = []
        texts = [rollout.texts[i : i + count] for i in range(0, len(rollout.texts), count)]
        ids = [example.id for example in examples for _ in range(count)]
        pairs = zip(ids, rollout.broken.tolist(), strict=True)
        broken = list(dict.fromkeys(example for example, bad in pairs if bad))
        return Drawn(texts, rollout.generated, broken, right)

    def _draw_samples(self, count: int, accepts: Accepts) -> list[int]:
        """Return per held-out example the number of right samples, of `count` drawn. A draw is a
        function of (seed, example, sample, position): neither ranks nor batches change it.
        """
        context, right, rollouter = self.lm.context, [], self.rollouter
        mine = context.share(self.held_out)
        sampling = sampled_with(rollouter.sampling)
        with self.lm.sharding.gathered():
            if mine:
                requests = rollouter.request(mine, samples=count)
                with watch_completions(f"pass@{count}", len(mine) * count, context.main) as watch:

                    def draw(requests: Requests) -> Completions:
                        return rollouter.sample(requests, sampling, watch, refresh=False)

                    rollout = rollouter.roll_out(mine, requests, draw=draw)
                right = count_right(rollout, accepts, count)
        return put_back(context.gather_objects(right))

    def _measure_text(self) -> tuple[float, list[float]]:
        """Return the bits per byte of evaluate.text, and the score of each window. The ranks split
        the windows; each window is a forward of its own, so that the result does not depend on the
        number of ranks.
        """
        context = self.lm.context
        with self.lm.sharding.gathered():
            mine = [_bits(self.lm, *window) for window in context.share(self.extras.windows)]
        everyone = put_back(context.gather_objects(mine))
        broken = [place for place, (bits, _) in enumerate(everyone) if not math.isfinite(bits)]
        check_logits(broken, len(everyone), self.lm.precision.compute, "windows of evaluate.text")
        return uncertainty.contributions(
            np.array(everyone), lambda rows: rows[:, 0] / rows[:, 1] / self.extras.token_bytes
        )


@dataclass
class Drawn:
    """The completions of a rank's examples.

    Attributes:
        texts: the completions of each example.
        generated: the number of generated tokens.
        broken: the ids of examples whose logits were not finite.
        right: the number of right completions of each example, if it was asked for.
    """

    texts: list[list[str]] = field(default_factory=list)
    generated: int = 0
    broken: list[Any] = field(default_factory=list)
    right: list[int] = field(default_factory=list)


def count_right(rollout: Rollout, accepts: Accepts, count: int) -> list[int]:
    """Return the number of right completions of each example, of `count` each; waits for the
    rewards.
    """
    scored = rollout.scored
    rows = zip(scored.rewards, scored.unscored, rollout.finished.tolist(), strict=True)
    good = [accepts(reward, ended) and not lacks for reward, lacks, ended in rows]
    return [sum(good[i : i + count]) for i in range(0, len(good), count)]


# --- scores of examples


def measure_repeats(
    task: Any, examples: Sequence[Example], completions: Sequence[Sequence[str]]
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return the measures of a task and the scores of the examples, each the mean over the repeated
    completions.

    Args: completions: the same number of completions for every example.
    """
    metrics, scores = [], []
    for texts in zip(*completions, strict=True):
        metrics.append(task.metrics(examples, list(texts)))
        scores.append(score(task, examples, list(texts), metrics[-1]))
    names = [name for name in metrics[0] if all(name in one for one in metrics)]
    means = {name: math.fsum(one[name] for one in metrics) / len(metrics) for name in names}
    lengths = {name: {len(one.get(name, ())) for one in scores} for name in names}
    known = [name for name in names if len(lengths[name]) == 1 and lengths[name] != {0}]
    columns = {name: zip(*(one[name] for one in scores), strict=True) for name in known}
    return means, {
        name: [math.fsum(values) / len(values) for values in column]
        for name, column in columns.items()
    }


def score(
    task: Any, examples: Sequence[Example], completions: Sequence[str], metrics: dict[str, float]
) -> dict[str, list[float]]:
    """Return the scores of the examples, by measure.

    They come from the task's method `scores`; else from the measures of each example alone, if
    these average to the measure; else from the measures of `BATCHES` batches of examples. Measures
    without per-example scores are omitted.
    Raises: ConfigError if the task's own scores do not average to its measures.
    """
    scores = {}
    if score_each := TaskFeatures(task).scores:
        scores = {n: list(v) for n, v in score_each(examples, completions).items() if n in metrics}
    for name, values in scores.items():
        if not _average_to(values, metrics[name], len(examples)):
            raise ConfigError(
                f"{class_name(task)}.scores returned {len(values)} values for {name!r} with a mean"
                f" of {math.fsum(values) / max(1, len(values)):.6g}, and metrics says"
                f" {metrics[name]:.6g} of {len(examples)} examples. Return a value for each"
                " example, so that their mean is the measure; see docs/tasks.md."
            )
    alone = [range(place, place + 1) for place in range(len(examples))]
    batches = [range(first, len(examples), BATCHES) for first in range(BATCHES)]
    for parts in (alone, batches if len(examples) >= 2 * BATCHES else []):
        rest = [name for name in metrics if name not in scores]
        of_parts = _of_parts(task, examples, completions, parts if rest else [])
        for name in rest:
            values = of_parts.get(name, [])
            if parts is batches and len(values) == BATCHES:
                mean = math.fsum(values) / BATCHES
                values = [metrics[name] + value - mean for value in values]
            if parts and _average_to(values, metrics[name], len(parts)):
                scores[name] = values
    return scores


def _average_to(values: list[float], value: float, count: int) -> bool:
    mean = math.fsum(values) / max(1, len(values))
    return len(values) == count and math.isclose(mean, value, rel_tol=1e-6, abs_tol=1e-6)


def _of_parts(
    task: Any, examples: Sequence[Example], completions: Sequence[str], parts: Sequence[range]
) -> dict[str, list[float]]:
    """Return the measures of each part of the examples, by name; empty if the task cannot compute
    its measures on so few examples.
    """
    measures: dict[str, list[float]] = {}
    for part in parts:
        try:
            measured = task.metrics([examples[i] for i in part], [completions[i] for i in part])
        except (ConfigError, RunStopped):  # such as a standard deviation of one example
            return {}
        for name, value in measured.items():
            measures.setdefault(name, []).append(value)
    return measures


# --- samples


def sampled_with(sampling: SamplingConfig) -> SamplingConfig:
    """Return the sampling settings of pass@k: those of training, or temperature 1 if training is
    greedy.
    """
    if sampling.temperature:
        return sampling
    return SamplingConfig.uncut(sampling.max_new_tokens, 1.0)


def find_pass_rates(right: Sequence[int], of: int) -> dict[str, tuple[float, list[float]]]:
    """Return pass@1, 2, 4, ... and pass@`of` in percent, each with the scores of the examples.

    Args:
        right: the number of right samples of each example.
        of: the number of samples per example.
    """
    sizes = sorted({of, *(2**i for i in range(of.bit_length()))})
    rates = {f"pass@{k}": [100 * pass_at(n, of, k) for n in right] for k in sizes}
    return {name: (sum(scores) / len(scores), scores) for name, scores in rates.items()}


def pass_at(right: int, of: int, k: int) -> float:
    """Return an unbiased estimate of the probability that at least one of `k` samples is right,
    given `right` right samples of `of` (arXiv:2107.03374).
    """
    if of - right < k:
        return 1.0
    return 1 - math.prod(1 - k / i for i in range(of - right + 1, of + 1))


# --- other tasks


def read_extras(run: Run, lm: LanguageModel) -> Extras:
    """Read the tasks of evaluate.also and the text of evaluate.text. Raises: ConfigError if one
    cannot be read, or if a rank reads other examples or another text than rank 0.
    """
    extras = Extras(read_others(run, lm), *read_windows(run, lm))
    if extras.others or extras.windows:
        lm.context.check_same("rows of evaluate.also and evaluate.text", extras.digest)
    return extras


def read_others(run: Run, lm: LanguageModel) -> list[Other]:
    """Return the tasks of evaluate.also with their held-out examples. Raises: ConfigError with the
    key and the name of the task.
    """
    others, nodes = [], run.evaluate.also
    for name, plain_task in build_others(nodes).items():
        with naming(name):
            task: Any = Checked(plain_task)
            adapt_task(lm, task, nodes[name])
            tokens = nodes[name].get("max_new_tokens") or longest_answer(lm, task)
            others.append(Other(name, task, *hold_out_other(run, lm, task, tokens), tokens))
    return others


# --- a text


def read_windows(run: Run, lm: LanguageModel) -> tuple[list[tuple[list[int], list[int]]], float]:
    """Return the windows of evaluate.text, each (tokens of its context, tokens to predict), and the
    mean number of bytes per token. There are at most evaluate.examples windows, evenly spread over
    the file.

    Raises: ConfigError for a text that is too short.
    """
    if run.evaluate.text is None:
        return [], 0.0
    text = read_text(run.evaluate.text)
    front = find_front(lm.tokenizer)
    ids = encode_prompts(lm.tokenizer, [text])[0][len(front) :]
    check_ids(lm.model, lm.tokenizer, ids, f"evaluate.text={run.evaluate.text}")
    size = min(WINDOW, context_length(lm.model)) - max(1, len(front))
    windows = [
        (front or ids[max(0, at - 1) : at], ids[at : at + size]) for at in range(0, len(ids), size)
    ]
    windows = [(before, part) for before, part in windows if len(before) + len(part) > 1]
    if not windows:
        raise ConfigError(
            f"evaluate.text={run.evaluate.text} is too short to measure. Give a longer text."
        )
    most = run.evaluate.examples
    if len(windows) > most:
        windows = [windows[i * len(windows) // most] for i in range(most)]
    return windows, len(text.encode()) / max(1, len(ids))


@torch.no_grad()
def _bits(lm: LanguageModel, before: list[int], tokens: list[int]) -> tuple[float, int]:
    """Return the sum of the bits of a window's tokens, and the number of predicted tokens."""
    ids = torch.tensor([[*before, *tokens]], device=lm.device)
    half = lm.half and not lm.population
    with evaluating(lm.model), torch.autocast(lm.device.type, lm.precision.compute, enabled=half):
        logits = lm.model(input_ids=ids, use_cache=False).logits[0, max(0, len(before) - 1) : -1]
    wanted, nats = ids[0, max(1, len(before)) :], 0.0
    for part, target in zip(logits.split(256), wanted.split(256), strict=True):
        logp = torch.log_softmax(part.float(), dim=1).gather(1, target[:, None])
        nats -= float(logp.double().sum())
    return nats / math.log(2), len(wanted)
