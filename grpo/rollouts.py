"""From prompts to scored groups of completions: sampled once per prompt, scored in parallel, dead
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

from common.distributed import fsdp
from common.distributed.context import put_back
from common.lm import LM
from common.model import logprobs
from common.model.transfer import to_device
from common.report import samples
from common.rows import RowLimit
from common.sampling.engine import Completions, Requests
from common.step import Step
from common.tasks import Example
from common.tasks.scoring import Scored
from grpo.config import GrpoConfig
from grpo.loss import advantages, kl, overlong_penalty

log = logging.getLogger("clutch")

WHY_DEAD = ("all_wrong", "all_right", "cut_off", "all_equal")


@dataclass
class Group:
    """The numbers of one prompt and its G completions that all ranks know; no tokens."""

    rank: int  # that sampled it, and has its tokens
    place: int  # among the groups of that rank in one round
    rewards: list[float]  # what the advantage is made of; NaN where logits were not finite
    scores: list[float]  # the task's own
    lengths: list[int]
    finished: list[bool]
    repeating: list[bool]  # cut off while their end repeated itself
    carries: list[bool]  # whether there is loss on a completion
    dead: str | None  # why it has nothing to teach, one of WHY_DEAD


def why_dead(
    scores: Sequence[float], earned: Sequence[float], carries: Sequence[bool]
) -> str | None:
    """Return why a group has nothing to teach, one of WHY_DEAD; None if it has.

    Args: scores: the task's; earned: with the overlong penalty, but without KL, which is never
    equal twice and would make every group look alive; carries: which completions carry loss.
    """
    if not any(carries):
        return "cut_off"
    if max(earned) != min(earned):
        return None
    return "all_wrong" if max(scores) <= 0 else "all_right" if min(scores) >= 1 else "all_equal"


@dataclass
class Sampled:
    """The groups that this rank sampled in a round: n prompts, n * G completions."""

    examples: Sequence[Example]
    prompts: list[list[int]]
    made: Completions
    reference: Tensor | None  # log-probabilities, float32 [n * G, T]
    scored: Scored


@dataclass
class Rollouts:
    """The groups to learn from. n of P prompts are on this rank, with G completions of up to T
    tokens.
    """

    examples: list[Example]
    prompts: list[list[int]]  # token ids
    tokens: Tensor  # int64 [n * G, T], on the CPU
    lengths: Tensor  # int64 [n * G]
    logprobs: Tensor  # float32 [n * G, T], of the sampler
    reference: Tensor | None  # the same of the reference model
    carries: Tensor  # bool [n * G], whether there is loss on a completion
    scores: list[list[float]]  # by group, the task's own rewards
    places: list[int]  # of this rank's groups among all P
    groups_per_rank: list[int]
    rewards: Tensor  # float64 [P, G], what the advantage is made of, on every rank the same
    rows: int  # completions of all ranks that carry loss
    loss_tokens: int  # of these
    # float32 [n * G, T], of the policy that sampled, as the trainer's first pass computes them.
    old_logprobs: Tensor | None = None

    @property
    def size(self) -> int:
        """G, the completions of a prompt."""
        return self.rewards.shape[1]


class Collector:
    """Makes rollouts: every rank samples its share of the prompts and keeps it.

    `numbers` and `offending` are those of the last rollout: what goes into the log, and this rank's
    rows whose rewards or logits are not finite.
    """

    def __init__(self, lm: LM, cfg: GrpoConfig, train_limit: RowLimit) -> None:
        self.lm, self.cfg = lm, cfg
        fixed = lm.reference is not None and fsdp.of(lm.reference) is not None
        # No gradients are kept here, but the same forward is made.
        self.limit = RowLimit("algo.train_rows", train_limit.rows, fixed=fixed)
        self.numbers: dict[str, Any] = {}
        self.offending: list[dict[str, Any]] = []
        self.tokens = samples.Tokens(lm.tokenizer)

    def collect(self, step: Step) -> Rollouts | None:
        """Sample the groups of one step, from where the last one ended in the training order.

        Returns: None where there is no group to learn from, because all are dead or some numbers
        are not finite (then `offending` and the reward in `numbers` say so).
        """
        cfg, lm, context, state = self.cfg, self.lm, self.lm.context, step.state
        rounds: list[Any] = []  # of Sampled, None where this rank had no prompt
        seen: list[tuple[int, Group]] = []  # by round
        live: list[tuple[int, Group]] = []
        components: list[dict[str, list[float]]] = []
        seconds: Counter[str] = Counter()
        self.offending = []
        while len(live) < cfg.prompts_per_step and len(rounds) <= cfg.resample_rounds:
            examples = lm.order.take(state["cursor"], cfg.prompts_per_step - len(live))
            sampled = self._sample(examples, state["cursor"], step)
            state["cursor"] += len(examples)
            judged = self._judge(sampled) if sampled else []
            scored = sampled.scored if sampled else lm.scorer.nothing()
            with step.phase("exchange"):
                parts = context.gather_objects((judged, scored.components, scored.seconds))
            for _, of_components, of_seconds in parts:
                components.append(of_components)
                seconds.update(of_seconds)
            fresh = [(len(rounds), group) for group in put_back([part for part, _, _ in parts])]
            seen += fresh
            live += [pair for pair in fresh if not pair[1].dead or cfg.resample_rounds == 0]
            rounds.append(sampled)
        lm.engine.rest()
        every = [group for _, group in seen]
        self._describe(every, len(rounds))
        found = {n: [v for part in components for v in part.get(n, [])] for n in components[0]}
        self.numbers["components"] = {n: sum(v) / max(1, len(v)) for n, v in found.items()}
        self.numbers["component_seconds"] = dict(seconds)
        step.used(
            tokens=sum(sum(group.lengths) for group in every),
            samples=len(every) * cfg.samples_per_prompt,
        )
        self.finite = all(math.isfinite(r) for g in every for r in (*g.scores, *g.rewards))
        learns = self.finite and not all(group.dead for _, group in live)
        self.numbers["live_groups"] = len(live) if learns else 0
        rollouts = self._assemble(live, rounds) if learns else None
        if self.finite:
            step.show(self._rows(live, seen, rounds, rollouts, step))
        return rollouts

    def nothing_to_learn(self) -> str:
        """Say why there was no group to learn from."""
        dead = self.dead
        return (
            f"nothing to learn, so no optimizer step. Of {self.seen} groups in"
            f" {self.numbers['rounds']} rounds {dead['all_wrong']} are all wrong (too hard),"
            f" {dead['all_right']} all right (too easy), {dead['cut_off']} cut off as a whole"
            f" (too long, or in a loop), and {dead['all_equal']} have equal rewards in between"
            " (too coarse)."
        )

    def rehearse(self) -> None:
        """Sample the first prompts and throw them away: compilation happens here."""
        mine = self.lm.context.share(self.lm.order.take(0, self.cfg.prompts_per_step))
        if mine:
            prompts, samples = self.lm.encode(mine), self.cfg.samples_per_prompt
            self.lm.generate(Requests(prompts=prompts, samples=samples, logprobs=True))

    # --- one round

    def _sample(self, examples: list[Example], start: int, step: Step) -> Sampled | None:
        """Sample and score this rank's share of `examples`; the reference model looks at them
        meanwhile.

        Args: start: position of the first one in the training order. Draws are keyed by it: an
        example that comes twice in a step gets other samples the second time.
        """
        cfg, lm = self.cfg, self.lm
        mine = lm.context.share(examples)
        requests = Requests(
            prompts=lm.encode(mine),
            ids=list(lm.context.share(range(start, start + len(examples)))),
            samples=cfg.samples_per_prompt,
            seed=lm.run.seed,
            draw=step.index,
            logprobs=True,
        )
        with step.phase("rollout"), fsdp.gathered(lm.model):
            made = lm.generate(requests) if mine else None
        if made is None:  # a rank without a prompt has only kept pace with the others
            with fsdp.gathered(lm.reference):
                return None
        texts = made.texts(lm.tokenizer)
        with step.phase("reward"):
            repeated = [example for example in mine for _ in range(cfg.samples_per_prompt)]
            pending = lm.scorer.submit(repeated, texts)
        made.tokens = made.tokens.cpu()
        reference = None
        if lm.reference is not None:
            with step.phase("reference"), lm.reference_on_device():
                prompts = list(requests.prompts)
                reference = self.limit.run(lambda rows: self._reference(prompts, made, rows))
        with step.phase("reward"):
            scored = pending.result()
        return Sampled(mine, [list(p) for p in requests.prompts], made, reference, scored)

    @torch.no_grad()
    def _reference(self, prompts: list[Any], made: Completions, rows: int) -> Tensor:
        """Return the log-probabilities of all completions under the reference model, float32
        [n * G, T], computed for `rows` at a time.
        """
        lm, size = self.lm, self.cfg.samples_per_prompt
        assert lm.reference is not None
        found = torch.zeros(made.tokens.shape, device=lm.device)
        lengths = made.lengths.tolist()
        # Whole groups side by side, or parts of one.
        each, cut = max(1, rows // size), min(rows, size)
        for start, first in itertools.product(range(0, len(prompts), each), range(0, size, cut)):
            part = range(start, min(start + each, len(prompts)))
            chosen = [[i * size + j for j in range(first, min(first + cut, size))] for i in part]
            completions = [[made.tokens[row, : lengths[row]] for row in rows] for rows in chosen]
            laid = logprobs.group([prompts[i] for i in part], completions, lm.device)
            with torch.autocast(lm.device.type, lm.precision.compute, enabled=lm.half):
                logp, _ = logprobs.token_logprobs(lm.reference, laid, self.cfg.sampling.temperature)
            [index] = to_device([torch.tensor(chosen).flatten()], lm.device)
            found[index, : logp.shape[1]] = logp
        return found

    def _judge(self, sampled: Sampled) -> list[Group]:
        """Turn scores into rewards, and tell dead groups from live ones."""
        cfg, lm, made, size = self.cfg, self.lm, sampled.made, self.cfg.samples_per_prompt
        scores = sampled.scored.rewards
        rewards = torch.tensor(scores, dtype=torch.float64)
        if cfg.overlong_buffer:
            lengths = made.lengths.cpu().double()
            limit = cfg.sampling.max_new_tokens
            rewards = rewards + overlong_penalty(lengths, limit, cfg.overlong_buffer)
        earned, lengths = rewards.tolist(), made.lengths.tolist()
        if cfg.kl.beta and cfg.kl.where == "reward":
            assert sampled.reference is not None
            assert made.logprobs is not None
            pairs = zip(made.logprobs.cpu(), sampled.reference.cpu(), lengths, strict=True)
            for row, (logp, ref, n) in enumerate(pairs):
                divergence = kl(logp[:n], ref[:n], cfg.kl.estimator, cfg.kl.clamp)
                rewards[row] -= cfg.kl.beta * divergence.sum().double()
        rewards[made.broken.cpu()] = math.nan  # a policy without finite logits has drawn nothing
        finished, repeating = made.finished.tolist(), made.repeating()
        groups = []
        for place, example in enumerate(sampled.examples):
            part = slice(place * size, (place + 1) * size)
            carries = [done or not cfg.mask_truncated for done in finished[part]]
            dead = why_dead(scores[part], earned[part], carries)
            shared = rewards[part].tolist(), scores[part], lengths[part], finished[part]
            group = Group(lm.context.rank, place, *shared, repeating[part], carries, dead)
            groups.append(group)
            for row, (score, reward) in enumerate(zip(group.scores, group.rewards, strict=True)):
                if not (math.isfinite(score) and math.isfinite(reward)):
                    tokens = made.tokens[part][row, : group.lengths[row]].tolist()
                    broken = math.isfinite(score)
                    self.offending.append(lm.offending_row(example, tokens, score, broken))
        return groups

    # --- all rounds together

    def _describe(self, seen: list[Group], rounds: int) -> None:
        """Note what was sampled, for the log."""
        scores = torch.tensor([group.scores for group in seen], dtype=torch.float64)
        lengths = torch.tensor([group.lengths for group in seen], dtype=torch.float64)
        self.dead, self.seen = Counter(group.dead for group in seen if group.dead), len(seen)
        finished = sum(sum(group.finished) for group in seen)
        self.numbers = {
            "reward": scores.mean().item(),
            "reward_std": scores.std(1).mean().item(),
            "dead_groups": self.dead.total() / len(seen),
            **{f"dead_{why}": self.dead[why] / len(seen) for why in WHY_DEAD},
            "rounds": rounds,
            "truncated": 1 - finished / scores.numel(),
            "repeating": sum(sum(group.repeating) for group in seen) / scores.numel(),
            "length": lengths.mean().item(),
        }

    def _rows(
        self,
        live: list[tuple[int, Group]],
        seen: list[tuple[int, Group]],
        rounds: list[Any],
        rollouts: Rollouts | None,
        step: Step,
    ) -> list[samples.Row]:
        """Return this rank's completions that the run keeps, in the order in which the groups were
        sampled; those of live groups have advantages.
        """
        lm, size = self.lm, self.cfg.samples_per_prompt
        known = (
            [] if rollouts is None else advantages(rollouts.rewards, self.cfg.advantage).tolist()
        )
        alive = {id(group): place for place, (_, group) in enumerate(live)}
        found: list[samples.Row] = []
        with step.phase("keep"):
            for place, (number, group) in enumerate(seen[: samples.kept(lm.run, len(seen))]):
                if group.rank != lm.context.rank:
                    continue
                sampled, first = rounds[number], group.place * size
                own = known[alive[id(group)]] if known and id(group) in alive else None
                shared = samples.describe(lm.task, sampled.examples[group.place], place)
                tokens = sampled.made.tokens[first : first + size].tolist()
                tokens = [row[:n] for row, n in zip(tokens, group.lengths, strict=True)]
                texts = lm.tokenizer.batch_decode(tokens, skip_special_tokens=True)
                drawn = sampled.made.logprobs[first : first + size].tolist()
                parts = sampled.scored.components.items()
                for row, text in enumerate(texts):
                    found.append(
                        {
                            **shared,
                            "sample": row,
                            "completion": text,
                            "tokens": group.lengths[row],
                            "cut": not group.finished[row],
                            "reward": group.scores[row],
                            "components": {n: v[first + row] for n, v in parts} or None,
                            "advantage": None if own is None else own[row],
                            **self.tokens.describe(tokens[row], text, drawn[row]),
                        }
                    )
        return found

    def _assemble(self, live: list[tuple[int, Group]], rounds: list[Any]) -> Rollouts:
        """Put this rank's groups among `live` side by side."""
        size, rank = self.cfg.samples_per_prompt, self.lm.context.rank
        mine = [(i, pair) for i, pair in enumerate(live) if pair[1].rank == rank]
        parts = [(rounds[number], group.place) for _, (number, group) in mine]

        def rows(values: list[Any]) -> Tensor:
            """Cut the G rows of each group out of its round."""
            cut = [v[p * size : (p + 1) * size] for v, (_, p) in zip(values, parts, strict=True)]
            return torch.cat(cut) if cut else torch.zeros(0, self.cfg.sampling.max_new_tokens)

        groups, keeps = [group for _, group in live], self.lm.reference is not None
        ranks = [group.rank for group in groups]
        return Rollouts(
            examples=[sampled.examples[place] for sampled, place in parts],
            prompts=[sampled.prompts[place] for sampled, place in parts],
            tokens=rows([sampled.made.tokens for sampled, _ in parts]),
            lengths=torch.tensor([n for _, (_, g) in mine for n in g.lengths]),
            logprobs=rows([sampled.made.logprobs for sampled, _ in parts]),
            reference=rows([sampled.reference for sampled, _ in parts]) if keeps else None,
            carries=torch.tensor([ok for _, (_, g) in mine for ok in g.carries], dtype=torch.bool),
            scores=[group.scores for _, (_, group) in mine],
            places=[i for i, _ in mine],
            groups_per_rank=[ranks.count(r) for r in range(self.lm.context.world_size)],
            rewards=torch.tensor([group.rewards for group in groups], dtype=torch.float64),
            rows=sum(sum(group.carries) for group in groups),
            loss_tokens=sum(sum(itertools.compress(g.lengths, g.carries)) for g in groups),
        )
