"""A held-out measurement: greedy completions of the task and of other tasks, samples for pass@k,
and the log-probability of a text; each with the scores of its examples (common/uncertainty.py).

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
from common.distributed import fsdp, put_back
from common.engine import Completions, Requests
from common.examples import adapt_task, hold_out_other, longest_answer
from common.language_model import LanguageModel
from common.model import check_ids, context_length, encode_prompts, evaluating, find_front
from common.report import watch_completions
from common.rollout import Rollout, Rollouter
from common.system import EXIT_NUMBERS, RunStopped
from common.task import Example, class_name, describe_rows, hash_rows
from common.tasks import Checked, build_others, naming, read_text, right_from
from common.uncertainty import BATCHES

WINDOW = 1024  # tokens of a text at a time, or the model's context where that is shorter

# the reward of a sample, and whether it ended by itself -> whether it is right
Accepts = Callable[[float, bool], bool]


@dataclass
class Evaluation:
    """metrics: all measures, the headline first. completions: one for each example, in order.
    scores: by measure what each example adds, where that can be told: their mean is the measure.
    by: who has answered, "" = the model. beside: by kind measures that stand beside them.
    generated: tokens in all, of samples and other tasks too. greedy, seconds: the tokens of the
    completions, and how long they took.
    """

    metrics: dict[str, float]
    completions: list[str]
    generated: int
    scores: dict[str, list[float]] = field(default_factory=dict)
    by: str = ""
    beside: dict[str, dict[str, float]] = field(default_factory=dict)
    greedy: int = 0
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """The name of the headline measure."""
        return next(iter(self.metrics))

    @property
    def value(self) -> float:
        """The headline measure."""
        return self.metrics[self.name]

    def kept(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it."""
        names = ("metrics", "completions", "scores", "generated")
        return {name: getattr(self, name) for name in names}

    def add(self, measures: dict[str, tuple[float, list[float]]]) -> None:
        """Add measures, each with its scores."""
        self.metrics |= {name: value for name, (value, _) in measures.items()}
        self.scores |= {name: scores for name, (_, scores) in measures.items()}


@dataclass(frozen=True)
class Other:
    """A task that is measured beside the one that is trained on (evaluate.also). longest_prompt:
    its tokens; tokens: new ones at most.
    """

    name: str
    task: Any
    examples: list[Example]
    longest_prompt: int
    tokens: int


@dataclass(frozen=True)
class Beside:
    """All that is measured beside the run's own task. windows: of evaluate.text, each what stands
    before it and its tokens; token_bytes: the bytes of a token of it.
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
    """Raise RunStopped where logits were not finite: `broken` holds the ids of such examples, of
    `count` in all.
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
    """Return what tells whether a sample is right: it earns task.right_at, cut off or not."""
    least = right_from(task)
    return lambda reward, ended: reward >= least


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Measures a language model on held-out examples and on all that `evaluate` of a run names."""

    run: Run
    lm: LanguageModel
    rollouter: Rollouter
    held_out: Sequence[Example]
    beside: Beside

    def evaluate(self, accepts: Accepts | None = None) -> Evaluation:
        """Measure on all that the run asks for; every rank returns the same.

        Args: accepts: which samples are right; None = those that earn task.right_at, cut off or
        not. Raises: RunStopped where the model's logits are NaN or infinite.
        """
        measured = self.measure(self.held_out)
        if count := self.run.evaluate.samples or 0:
            right = self._draw_samples(count, accepts or earns_enough(self.rollouter.task))
            measured.add(find_pass_rates(right, count))
            measured.generated *= 1 + count  # about as long as the greedy one
        for other in self.beside.others:
            also = self.measure(other.examples, other)
            measured.generated += also.generated
            name = other.name
            measured.metrics |= {f"{name}/{key}": value for key, value in also.metrics.items()}
            measured.scores |= {f"{name}/{key}": values for key, values in also.scores.items()}
        if self.beside.windows:
            measured.add({"text/bits_per_byte": self._measure_text()})
        self.rollouter.engine.rest()
        return measured

    def measure(self, examples: Sequence[Example], other: Other | None = None) -> Evaluation:
        """Complete examples greedily, shared out over the ranks, and measure.

        Args: other: the task of evaluate.also that they are of; None = the run's own.
        Raises: RunStopped where the model's logits are NaN or infinite.
        """
        context, began = self.lm.context, time.perf_counter()
        rollouter = self.rollouter if other is None else self.rollouter.on(other.task)
        tokens = self.rollouter.sampling.max_new_tokens if other is None else other.tokens
        mine = context.share(examples)
        texts, generated, broken = [], 0, []
        with fsdp.gathered(self.lm.model):
            if other is None:  # the weights stay the same for what else is measured
                rollouter.engine.refresh()
            if mine:
                greedy = SamplingConfig.uncut(tokens, 0.0)
                requests = rollouter.request(mine, ids=None)
                line = f"evaluating {other.name}" if other else "evaluating"
                with watch_completions(line, len(mine), context.main) as watch:
                    completions = rollouter.sample(requests, greedy, watch, refresh=False)
                rollout = Rollout.decode(rollouter.decode, requests, completions, mine)
                texts, generated = rollout.texts, rollout.generated
                pairs = zip(mine, rollout.broken.tolist(), strict=True)
                broken = [example.id for example, bad in pairs if bad]
        parts = context.gather_objects((texts, generated, broken))
        broken = [example for _, _, ids in parts for example in ids]
        check_logits(broken, len(examples), self.lm.precision.compute)
        completions, seconds = put_back([part for part, _, _ in parts]), time.perf_counter() - began
        counted = sum(count for _, count, _ in parts)
        task = rollouter.task
        metrics = task.metrics(examples, completions)
        scores = score(task, examples, completions, metrics)
        return Evaluation(metrics, completions, counted, scores, greedy=counted, seconds=seconds)

    def _draw_samples(self, count: int, accepts: Accepts) -> list[int]:
        """Return of each held-out example how many of `count` samples are right. A draw is a
        function of (seed, example, sample, position): neither ranks nor batches change it.
        """
        context, right, rollouter = self.lm.context, [], self.rollouter
        mine = context.share(self.held_out)
        sampling = sampled_with(rollouter.sampling)
        with fsdp.gathered(self.lm.model):
            if mine:
                requests = rollouter.request(mine, samples=count)
                with watch_completions(f"pass@{count}", len(mine) * count, context.main) as watch:

                    def draw(requests: Requests) -> Completions:
                        return rollouter.sample(requests, sampling, watch, refresh=False)

                    rollout = rollouter.roll_out(mine, requests, draw=draw)
                scored = rollout.scored
                rows = zip(scored.rewards, scored.unscored, rollout.finished.tolist(), strict=True)
                good = [accepts(reward, ended) and not lacks for reward, lacks, ended in rows]
                right = [sum(good[i : i + count]) for i in range(0, len(good), count)]
        return put_back(context.gather_objects(right))

    def _measure_text(self) -> tuple[float, list[float]]:
        """Return the bits per byte of evaluate.text, and the scores of its windows. The ranks share
        the windows out; each goes through the model alone, so that the result is that of one rank.
        """
        context = self.lm.context
        with fsdp.gathered(self.lm.model):
            mine = [_bits(self.lm, *window) for window in context.share(self.beside.windows)]
        everyone = put_back(context.gather_objects(mine))
        broken = [place for place, (bits, _) in enumerate(everyone) if not math.isfinite(bits)]
        check_logits(broken, len(everyone), self.lm.precision.compute, "windows of evaluate.text")
        return uncertainty.contributions(
            np.array(everyone), lambda rows: rows[:, 0] / rows[:, 1] / self.beside.token_bytes
        )


# --- scores of examples


def score(
    task: Any, examples: Sequence[Example], completions: Sequence[str], metrics: dict[str, float]
) -> dict[str, list[float]]:
    """Return by measure the scores of the examples: what the task says itself, or else what it
    says of each alone where these average to the measure, or else of batches of them. A measure of
    which nothing of this can be told is left out.

    Raises: ConfigError where the task's own do not average to its measures.
    """
    scores = {}
    if score_each := getattr(task, "scores", None):
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
    """Return the measures of parts of the examples, part by part; nothing where the task cannot
    measure so few.
    """
    measures: dict[str, list[float]] = {}
    for part in parts:
        try:
            measured = task.metrics([examples[i] for i in part], [completions[i] for i in part])
        except (ConfigError, RunStopped):  # as a deviation of one example, or a mean of none
            return {}
        for name, value in measured.items():
            measures.setdefault(name, []).append(value)
    return measures


# --- samples


def sampled_with(sampling: SamplingConfig) -> SamplingConfig:
    """Return how samples are drawn for pass@k: as in training, or at temperature 1 where that is
    greedy.
    """
    if sampling.temperature:
        return sampling
    return SamplingConfig.uncut(sampling.max_new_tokens, 1.0)


def find_pass_rates(right: Sequence[int], of: int) -> dict[str, tuple[float, list[float]]]:
    """Return pass@1, 2, 4, ... and pass@`of` in percent, with the scores of the examples, from how
    many of the `of` samples of each are right.
    """
    sizes = sorted({of, *(2**i for i in range(of.bit_length()))})
    rates = {f"pass@{k}": [100 * pass_at(n, of, k) for n in right] for k in sizes}
    return {name: (sum(scores) / len(scores), scores) for name, scores in rates.items()}


def pass_at(right: int, of: int, k: int) -> float:
    """Return an unbiased estimate of the chance that one of `k` samples is right, from `right` of
    `of` (arXiv:2107.03374).
    """
    if of - right < k:
        return 1.0
    return 1 - math.prod(1 - k / i for i in range(of - right + 1, of + 1))


# --- other tasks


def read_beside(run: Run, lm: LanguageModel) -> Beside:
    """Read what evaluate.also and evaluate.text name. Raises: ConfigError, also where a rank reads
    other examples, or another text, than rank 0.
    """
    beside = Beside(read_others(run, lm), *read_windows(run, lm))
    if beside.others or beside.windows:
        lm.context.check_same("rows of evaluate.also and evaluate.text", beside.digest)
    return beside


def read_others(run: Run, lm: LanguageModel) -> list[Other]:
    """Return the tasks of evaluate.also with their held-out examples. Raises: ConfigError, with the
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
    """Return the windows of evaluate.text, each what stands before it and its tokens, and the bytes
    of a token; at most evaluate.examples of them, evenly spread over the file.
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
    """Return the bits of the tokens of a window, and how many of them were predicted."""
    ids = torch.tensor([[*before, *tokens]], device=lm.device)
    half = lm.half and not lm.population
    with evaluating(lm.model), torch.autocast(lm.device.type, lm.precision.compute, enabled=half):
        logits = lm.model(input_ids=ids, use_cache=False).logits[0, max(0, len(before) - 1) : -1]
    wanted, nats = ids[0, max(1, len(before)) :], 0.0
    for part, target in zip(logits.split(256), wanted.split(256), strict=True):
        logp = torch.log_softmax(part.float(), dim=1).gather(1, target[:, None])
        nats -= float(logp.double().sum())
    return nats / math.log(2), len(wanted)
