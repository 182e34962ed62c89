"""Sample completions of prompts and score them: encode, generate, decode, score, and describe the
rows that a run saves.

Shapes: N rows in the order (member, prompt, sample), of T tokens at most.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any, Self

import torch
from torch import Tensor

from common.config import SamplingConfig
from common.distributed import Context
from common.engine import Completions, Engine, Requests, Watch
from common.episodes import Played, Turns, play
from common.model import Decoder, encode_prompts
from common.report import samples
from common.scoring import Pending, Scorer, ScoringResult, fill
from common.task import Example, TaskFeatures

Phase = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of completions that ranks exchange: one tensor per quantity, all on the CPU.

    The shape is [..., G] for groups of G completions, such as those of one prompt or of one member
    of a population, and [..., G, C] for C components of the score. An algorithm adds quantities of
    its own in a subclass.
    """

    # The task's score, float64; of a completion that has none, the mean of the prompt's others.
    score: Tensor
    # What the algorithm learns from, float64; NaN if the logits of the completion were not finite.
    reward: Tensor
    # Tokens that the policy wrote, int64.
    length: Tensor
    # Whether the completion ended by itself, bool; False: it was cut off.
    finished: Tensor
    # Whether it was cut off while its end repeated itself, bool.
    repeating: Tensor
    # Whether the task gave it no score, bool.
    unscored: Tensor
    # The scores by component, float64.
    components: Tensor
    # Whether the completion has a score of the component, bool.
    known: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the scores with `change` applied to every tensor."""
        return replace(self, **{one.name: change(getattr(self, one.name)) for one in fields(self)})

    def select(self, which: Tensor | slice | int) -> Self:
        """Return entries of the first dimension: by a mask, by places, or one of them."""
        return self.map(lambda tensor: tensor[which])

    def group(self, size: int) -> Self:
        """Return the scores of [n * size] completions as [n, size]."""
        return self.map(lambda tensor: tensor.unflatten(0, (-1, size)))

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Return the entries of all parts, one after the other in the first dimension."""
        names = [one.name for one in fields(cls)]
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """Return parts of equal shapes as one record with a new first dimension."""
        return cls.join([part.map(lambda tensor: tensor[None]) for part in parts])

    @classmethod
    def gather(cls, parts: Sequence[Self], places: Sequence[int], context: Context) -> Self:
        """Return the entries of all ranks, on every rank the same. Called on all ranks.

        Args:
            parts: what this rank knows; a rank may have nothing.
            places: the place of each of its entries among those of all ranks, from 0.
        """
        mine = cls.join(parts) if parts else None
        shares = context.gather_objects((mine, list(places)))
        whole = cls.join([part for part, _ in shares if part is not None])
        order = torch.tensor([place for _, share in shares for place in share]).argsort()
        return whole.select(order)


@dataclass
class Rollout:
    """Completions with their texts, decoded once, and their rewards. A rollout stays on its rank.

    Attributes:
        examples: the example of each prompt.
        requests: the request that was sampled: prompts, samples, members.
        completions: the engine's output, on the device.
        tokens: int64 [N, T] token ids, padded after `lengths`, on the CPU.
        written: bool [N, T], True for tokens that the policy wrote, on the CPU.
        lengths: int64 [N], tokens per row, on the CPU.
        finished: bool [N], False if the row was cut off at its length limit, on the CPU.
        broken: bool [N], True if the logits of the row were not finite, so that its text is
            meaningless, on the CPU.
        texts: the text of each row, without padding and end-of-turn tokens.
        pending: the rewards while they are computed; None if scoring has not started.
    """

    examples: Sequence[Example]
    requests: Requests
    completions: Completions
    tokens: Tensor
    written: Tensor
    lengths: Tensor
    finished: Tensor
    broken: Tensor
    texts: list[str]
    pending: Pending | None = None

    @classmethod
    def decode(
        cls,
        decode: Callable[[list[list[int]]], list[str]],
        requests: Requests,
        completions: Completions,
        examples: Sequence[Example] = (),
    ) -> "Rollout":
        """Decode completions into a rollout whose scoring has not started."""
        tokens, lengths = completions.tokens.cpu(), completions.lengths.cpu()
        written = torch.arange(tokens.shape[1]) < lengths[:, None]
        return cls(
            examples=examples,
            requests=requests,
            completions=completions,
            tokens=tokens,
            written=written if completions.written is None else completions.written.cpu(),
            lengths=lengths,
            finished=completions.finished.cpu(),
            broken=completions.broken.cpu(),
            texts=completions.texts(decode),
        )

    def start_scoring(self, scorer: Scorer, step: int | None = None) -> None:
        """Start to compute the rewards of all rows.

        Args: step: the training step of these completions; None = held-out completions.
        """
        repeated = [self.example(row) for row in range(len(self.texts))]
        self.pending = scorer.submit(repeated, self.texts, step)

    @cached_property
    def scored(self) -> ScoringResult:
        """The rewards per row; waits until they are computed. A missing score is replaced by the
        mean over the other rows of the same prompt, or by 0 if they have none.

        Raises: ConfigError if a reward function fails or hangs.
        """
        assert self.pending is not None
        scored = self.pending.result()
        count, samples = len(self.examples), self.requests.samples
        prompts = [row // samples % count for row in range(len(scored.rewards))]
        components = scored.components.items()
        return replace(
            scored,
            rewards=fill(scored.rewards, prompts),
            components={name: fill(scores, prompts) for name, scores in components},
            unscored=[reward is None for reward in scored.rewards],
            lacking={name: [one is None for one in scores] for name, scores in components},
        )

    def await_scores(self) -> None:
        """Wait until the rewards are there. Raises: as `scored`."""
        _ = self.scored

    def scores(self, components: Sequence[str] = ()) -> Scores:
        """Return what is known of each row, [N]: the reward is the task's score. components: the
        components of the reward whose scores are wanted, in this order.
        """
        scored, count = self.scored, len(self.texts)
        score = torch.tensor(scored.rewards, dtype=torch.float64)
        parts = [torch.tensor(scored.components[n], dtype=torch.float64) for n in components]
        known = [~torch.tensor(scored.lacking[n], dtype=torch.bool) for n in components]
        return Scores(
            score=score,
            reward=score.masked_fill(self.broken, math.nan),
            length=self.drawn,
            finished=self.finished,
            repeating=torch.tensor(self.repeating, dtype=torch.bool),
            unscored=torch.tensor(scored.unscored, dtype=torch.bool),
            components=torch.stack(parts, 1) if parts else torch.zeros(count, 0).double(),
            known=torch.stack(known, 1) if known else torch.zeros(count, 0, dtype=torch.bool),
        )

    @cached_property
    def stops(self) -> list[str]:
        """The reason that each episode ended; empty for tasks with one turn."""
        return [text.stop for text in self.texts if isinstance(text, Played)]

    @property
    def logprobs(self) -> Tensor | None:
        """Log-probabilities of the sampled tokens, float32 [N, T], on the device; None if the
        request did not ask for them.
        """
        return self.completions.logprobs

    @cached_property
    def repeating(self) -> list[bool]:
        """Per row, whether it was cut off while it repeated one sequence of tokens."""
        return self.completions.repeating()

    @cached_property
    def drawn(self) -> Tensor:
        """The number of tokens per row that the policy wrote, int64 [N], on the CPU."""
        return self.written.sum(1)

    @property
    def generated(self) -> int:
        """The number of tokens in all rows that the policy wrote."""
        return int(self.drawn.sum())

    def example(self, row: int) -> Example:
        """Return the example that a row completes."""
        return self.examples[row // self.requests.samples % len(self.examples)]

    @cached_property
    def sound(self) -> list[bool]:
        """Per row, whether its logits and its reward are finite."""
        pairs = zip(self.scored.rewards, self.broken.tolist(), strict=True)
        return [math.isfinite(reward) and not broken for reward, broken in pairs]

    def describe_offending(self, row: int, task: Any, broken: bool) -> dict[str, Any]:
        """Describe a row with a reward that is not finite, or (`broken`) with logits that are not
        finite.
        """
        example = self.example(row)
        return {
            "id": example.id,
            "prompt": task.prompt(example),
            "answer": example.answer,
            "completion": self.texts[row],
            "reward": str(self.scored.rewards[row]),  # JSON has no NaN
            "logits": "not finite" if broken else "finite",
        }

    def find_offending(self, task: Any) -> dict[int, dict[str, Any]]:
        """Return the descriptions of all rows with logits or rewards that are not finite, by row
        number.
        """
        broken = self.broken.tolist()
        rows = [row for row, sound in enumerate(self.sound) if not sound]
        return {row: self.describe_offending(row, task, broken[row]) for row in rows}

    def describe(
        self, rows: Sequence[int], task: Any, tokens: samples.Tokens | None = None
    ) -> list[samples.Row]:
        """Return records of some rows for the samples that a run saves; their group is the index of
        the prompt in this rollout.

        Args: tokens: adds the tokens and their log-probabilities to each record; None = texts only.
        """

        @cache
        def describe_prompt(place: int) -> samples.Row:
            return samples.describe(task, self.examples[place], place)

        described = []
        for row in rows:
            place = row // self.requests.samples % len(self.examples)
            length, components = int(self.lengths[row]), self.scored.components.items()
            described.append(
                {
                    **describe_prompt(place),
                    "sample": self.requests.first_sample + row % self.requests.samples,
                    "completion": self.texts[row],
                    "tokens": length,
                    "cut": not self.finished[row],
                    "reward": None if self.scored.unscored[row] else self.scored.rewards[row],
                    "unscored": self.scored.unscored[row] or None,
                    "extra": {n: values[row] for n, values in self.scored.logged.columns.items()}
                    or None,
                    "components": {
                        name: None if self.scored.lacking[name][row] else part[row]
                        for name, part in components
                    }
                    or None,
                }
            )
        if tokens is not None:
            assert self.logprobs is not None
            logprobs = self.logprobs[[*rows]].tolist()
            for row, drawn, about in zip(rows, logprobs, described, strict=True):
                ids = self.tokens[row, : self.lengths[row]].tolist()
                about |= tokens.describe(ids, self.texts[row], drawn)
        return described


@dataclass(frozen=True, kw_only=True)
class Rollouter:
    """Samples completions of a task's examples from an engine, and scores them."""

    task: Any
    tokenizer: Any
    # Turns token ids into texts.
    decode: Decoder
    engine: Engine
    scorer: Scorer
    # The seed of the run, which keys all draws.
    seed: int
    # Sampling settings of training completions: algo.sampling.
    sampling: SamplingConfig
    # Limits and environment of episodes; None = the task has one turn.
    turns: Turns | None = None

    def request(
        self,
        examples: Sequence[Example],
        ask: Callable[[Example], Any] | None = None,
        **settings: Any,
    ) -> Requests:
        """Return the request for completions of examples. Draws are keyed by the run's seed and
        `ids`, the examples' own unless others are given.

        Args:
            ask: makes the prompt of an example; None = the task's own prompt.
            settings: other fields of Requests.
        """
        asked = [(ask or self.task.prompt)(one) for one in examples]
        keys: dict[str, Any] = {"ids": [example.id for example in examples], "seed": self.seed}
        if self.turns is not None:
            keys["episodes"] = replace(self.turns, examples=examples)
        return Requests(prompts=encode_prompts(self.tokenizer, asked), **(keys | settings))

    def sample(
        self,
        requests: Requests,
        sampling: SamplingConfig | None = None,
        watch: Watch | None = None,
        *,
        refresh: bool = True,
    ) -> Completions:
        """Sample the requests: completions of one turn, or episodes.

        Args:
            sampling: the sampling settings; None = those of training.
            watch: called with the number of rows that have just finished.
            refresh: whether the engine takes over the trainer's weights first.
        """
        if refresh:
            self.engine.refresh()
        return sample(self.engine, requests, sampling or self.sampling, watch)

    def roll_out(
        self,
        examples: Sequence[Example],
        requests: Requests,
        phase: Phase = nullcontext,
        *,
        draw: Callable[[Requests], Completions] | None = None,
        step: int | None = None,
    ) -> Rollout:
        """Sample completions of examples and start to score them in the background.

        Args:
            phase: a context manager by name, which times its block.
            draw: samples the requests; None = `sample`.
            step: the training step; None = held-out completions.
        """
        with phase("rollout"):
            completions = (draw or self.sample)(requests)
            rollout = Rollout.decode(self.decode, requests, completions, examples)
        with phase("reward"):
            rollout.start_scoring(self.scorer, step)
        return rollout

    def on(self, task: Any) -> "Rollouter":
        """Return a Rollouter of another task, whose completions are evaluated but not scored by
        rewards.
        """
        turns = Turns.of(task, self.decode, ()) if TaskFeatures(task).episode else None
        return replace(self, task=task, turns=turns)


def sample(
    engine: Engine, requests: Requests, sampling: SamplingConfig, watch: Watch | None = None
) -> Completions:
    """Sample requests from an engine: completions of one turn, or episodes.

    Args: watch: called with the number of rows that have just finished.
    """
    if requests.episodes is None:
        return engine.generate(requests, sampling, watch)
    return play(engine, requests, sampling, watch)
