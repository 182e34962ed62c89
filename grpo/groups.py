"""From prompts to scored groups of completions: sampled once a prompt, scored in parallel, dead
groups replaced.
"""

import itertools
import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common import hardware, loop, nonfinite
from common.config import Run
from common.distributed import fsdp
from common.distributed.context import Context
from common.model import logprobs
from common.model.prompts import encode_prompts
from common.precision import Precision
from common.sampling.engine import Completions
from common.sampling.native import Sampler
from common.tasks import Example, Task
from common.tasks.scoring import Scorer
from common.timer import Timer
from grpo.config import GrpoConfig
from grpo.loss import kl, overlong_penalty

log = logging.getLogger("clutch")


@dataclass
class Group:
    """One prompt and its G completions. Lists, so that ranks can hand them to each other."""

    example: Example
    prompt: list[int]
    completions: list[list[int]]  # the stop token included
    logprobs: list[list[float]]  # of the sampler
    finished: list[bool]
    carries: list[bool]  # whether there is loss on it
    rewards: list[float]  # what the advantage is made of; NaN where the logits were not finite
    scores: list[float]  # the task's own
    reference: list[list[float]] | None  # log-probabilities of the reference model
    dead: str | None  # see `why_dead`


WHY_DEAD = ("all_wrong", "all_right", "cut_off", "all_equal")


def why_dead(
    scores: Sequence[float], earned: Sequence[float], carries: Sequence[bool]
) -> str | None:
    """Why a group has nothing to teach, one of WHY_DEAD; None if it has.

    Args: scores: the task's; earned: with the overlong penalty, but without KL, which is never
    equal twice and would make every group look alive; carries: which completions carry loss.
    """
    if not any(carries):
        return "cut_off"
    if max(earned) != min(earned):
        return None
    return "all_wrong" if max(scores) <= 0 else "all_right" if min(scores) >= 1 else "all_equal"


@dataclass
class Rollout:
    """The groups to learn from, and what was seen on the way to them."""

    groups: list[Group]  # none where no group is alive: there is no step to take
    seen: int  # groups sampled
    dead: Counter[str]  # by reason
    rounds: int
    generated: int
    completions: int
    scores: Tensor  # of all completions sampled
    lengths: Tensor
    truncated: float  # share
    components: dict[str, float]  # mean scores by component of the reward
    component_seconds: dict[str, float]
    finite: bool  # whether all rewards and logits are
    offending: list[dict[str, Any]]  # this rank's rows that are not

    def record(self) -> dict[str, Any]:
        """What goes into the log."""
        return {
            "reward": self.scores.mean().item(),
            "reward_std": self.scores.std(1).mean().item(),
            "components": self.components,
            "component_seconds": self.component_seconds,
            "dead_groups": self.dead.total() / self.seen,
            **{f"dead_{why}": self.dead[why] / self.seen for why in WHY_DEAD},
            "rounds": self.rounds,
            "live_groups": len(self.groups),
            "truncated": self.truncated,
            "length": self.lengths.mean().item(),
        }

    def nothing_to_learn(self) -> str:
        """Why there is no group to learn from."""
        return (
            f"nothing to learn, so no optimizer step. Of {self.seen} groups in {self.rounds} rounds"
            f" {self.dead['all_wrong']} are all wrong (too hard), {self.dead['all_right']} all"
            f" right (too easy), {self.dead['cut_off']} cut off as a whole (raise"
            f" algo.sampling.max_new_tokens), and {self.dead['all_equal']} have equal rewards in"
            " between (too coarse)."
        )


class Roller:
    """Makes rollouts. Every rank samples its share of the prompts; all of them see all groups."""

    def __init__(
        self,
        run: Run,
        context: Context,
        sampler: Sampler,
        tokenizer: Any,
        task: Task,
        order: loop.Order,
        reference: Any,
        numbers: Precision,
        reference_rows: int,
    ) -> None:
        self.settings: GrpoConfig = run.algo
        self.seed, self.context, self.sampler, self.tokenizer = (
            run.seed,
            context,
            sampler,
            tokenizer,
        )
        self.task, self.order, self.reference, self.numbers = task, order, reference, numbers
        self.scorer = Scorer(task, run.scoring)
        self.rows, self.reference_rows = sampler.rows, reference_rows
        self.offload = run.opt.offload.enabled

    def roll(self, step: int, cursor: int, phases: Timer) -> tuple[Rollout, int]:
        """Groups for one step, from position `cursor` of the training order on. Returns the next
        position too.
        """
        live: list[Group] = []
        offending: list[dict[str, Any]] = []
        seen: list[Group] = []
        components: list[dict[str, list[float]]] = []
        seconds: dict[str, float] = {}
        rounds, wanted = 0, self.settings.prompts_per_step
        while len(live) < wanted and rounds <= self.settings.resample_rounds:
            examples = self.order.take(cursor, wanted - len(live))
            cursor += len(examples)
            mine, scored = self._sample(examples, cursor - len(examples), step, phases)
            with phases("exchange"):
                parts = self.context.gather_objects((mine, scored.components, scored.seconds))
            groups: list[Group | None] = [None] * len(examples)
            for rank, (part, of_components, of_seconds) in enumerate(parts):
                groups[rank :: self.context.world_size] = part
                components.append(of_components)
                for name, value in of_seconds.items():
                    seconds[name] = seconds.get(name, 0.0) + value
            offending += self._offending(mine)
            fresh = [group for group in groups if group is not None]
            seen += fresh
            live += [
                group for group in fresh if not group.dead or self.settings.resample_rounds == 0
            ]
            rounds += 1
        scores = torch.tensor([group.scores for group in seen], dtype=torch.float64)
        sound = all(
            math.isfinite(reward) for group in seen for reward in (*group.scores, *group.rewards)
        )
        names = components[0] if components else {}
        return (
            Rollout(
                groups=live if sound and any(not group.dead for group in live) else [],
                seen=len(seen),
                dead=Counter(group.dead for group in seen if group.dead),
                rounds=rounds,
                generated=sum(len(c) for group in seen for c in group.completions),
                completions=scores.numel(),
                scores=scores,
                lengths=torch.tensor(
                    [[len(c) for c in group.completions] for group in seen], dtype=torch.float64
                ),
                truncated=1 - sum(sum(group.finished) for group in seen) / scores.numel(),
                components={
                    n: _mean([v for part in components for v in part.get(n, [])]) for n in names
                },
                component_seconds=seconds,
                finite=sound,
                offending=offending,
            ),
            cursor,
        )

    def _offending(self, groups: list[Group]) -> list[dict[str, Any]]:
        """The rows of `groups` whose rewards are not finite."""
        return [
            nonfinite.row(
                self.task,
                group.example,
                self.tokenizer.decode(tokens),
                score,
                broken=math.isfinite(score),
            )
            for group in groups
            for tokens, score, reward in zip(
                group.completions, group.scores, group.rewards, strict=True
            )
            if not (math.isfinite(score) and math.isfinite(reward))
        ]

    def _sample(
        self, examples: list[Example], start: int, step: int, phases: Timer
    ) -> tuple[list[Group], Any]:
        """This rank's share of `examples`: sampled, scored, and looked at by the reference model
        meanwhile.

        start: position of the first one in the training order. Draws are keyed by it: an example
        that comes twice in a step gets other samples the second time.
        """
        settings, share = self.settings, slice(self.context.rank, None, self.context.world_size)
        mine, positions = examples[share], list(range(start, start + len(examples)))[share]
        prompts = encode_prompts(self.tokenizer, [self.task.prompt(example) for example in mine])

        def sample(rows: int) -> Completions:
            self.sampler.rows = rows
            return self.sampler.generate(
                prompts,
                settings.sampling,
                samples_per_prompt=settings.samples_per_prompt,
                seed=self.seed,
                draw=step,
                prompt_ids=positions,
                logprobs=True,
            )

        with phases("rollout"), fsdp.forwards(self.sampler.model):
            floor = fsdp.floor(self.sampler.model, self.rows, 1)
            made, self.rows = (
                hardware.halving(sample, self.rows, floor) if mine else (None, self.rows)
            )
        if made is None:  # a rank without a prompt has only kept step
            with fsdp.forwards(self.reference):
                return [], self.scorer.nothing()
        texts = made.texts(self.tokenizer)
        assert made.logprobs is not None
        size = settings.samples_per_prompt
        lengths = made.lengths.tolist()
        tokens = [row[:n] for row, n in zip(made.tokens.tolist(), lengths, strict=True)]
        logps = [row[:n] for row, n in zip(made.logprobs.tolist(), lengths, strict=True)]
        with phases("reward"):
            pending = self.scorer.submit([example for example in mine for _ in range(size)], texts)
        reference = None
        if self.reference is not None:
            with phases("reference"), fsdp.forwards(self.reference):
                if self.offload:
                    self.reference.to(self.context.device.device)
                floor = fsdp.floor(self.reference, self.reference_rows, 1)
                reference, self.reference_rows = hardware.halving(
                    lambda rows: self._reference(prompts, tokens, rows),
                    self.reference_rows,
                    floor,
                    key="algo.micro_batch_rows",
                )
                if self.offload:
                    self.reference.to("cpu")
        with phases("reward"):
            scored = pending.result()
        rewards = torch.tensor(scored.rewards, dtype=torch.float64)
        if settings.overlong_buffer:
            limit = settings.sampling.max_new_tokens
            rewards = rewards + overlong_penalty(
                made.lengths.cpu().double(), limit, settings.overlong_buffer
            )
        earned = rewards.tolist()
        if settings.kl.beta and settings.kl.where == "reward":
            assert reference is not None
            for row, (logp, ref) in enumerate(zip(logps, reference, strict=True)):
                divergence = kl(
                    torch.tensor(logp), torch.tensor(ref), settings.kl.estimator, settings.kl.clamp
                )
                rewards[row] -= settings.kl.beta * divergence.sum().double()
        rewards[made.broken.cpu()] = math.nan  # a policy without finite logits has drawn nothing
        finished = made.finished.tolist()
        groups = []
        for index, example in enumerate(mine):
            part = slice(index * size, (index + 1) * size)
            carries = [done or not settings.mask_truncated for done in finished[part]]
            groups.append(
                Group(
                    example=example,
                    prompt=list(prompts[index]),
                    completions=tokens[part],
                    logprobs=logps[part],
                    finished=finished[part],
                    carries=carries,
                    rewards=rewards[part].tolist(),
                    scores=scored.rewards[part],
                    reference=reference[part] if reference is not None else None,
                    dead=why_dead(scored.rewards[part], earned[part], carries),
                )
            )
        return groups, scored

    @torch.no_grad()
    def _reference(
        self, prompts: list[list[int]], tokens: list[list[int]], rows: int
    ) -> list[list[float]]:
        """Log-probabilities of all completions under the reference model, `rows` in a forward, in
        order.
        """
        device, size = self.context.device.device, self.settings.samples_per_prompt
        found: list[list[float]] = []
        each, cut = (
            max(1, rows // size),
            min(rows, size),
        )  # whole groups side by side, or parts of one
        for start, first in itertools.product(range(0, len(prompts), each), range(0, size, cut)):
            part = prompts[start : start + each]
            chosen = [
                tokens[i * size : (i + 1) * size][first : first + cut]
                for i in range(start, start + len(part))
            ]
            with torch.autocast(
                device.type, self.numbers.compute, enabled=self.numbers.compute != torch.float32
            ):
                logp, _ = logprobs.token_logprobs(
                    self.reference,
                    logprobs.group(part, chosen, device),
                    self.settings.sampling.temperature,
                )
            flat = [row for group in chosen for row in group]
            found += [values[: len(row)] for values, row in zip(logp.tolist(), flat, strict=True)]
        return found


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))
