"""From prompts to scored groups of completions: sampled once per prompt, scored in parallel, dead
groups replaced.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from common.config import ConfigError
from common.device import awaited
from common.distributed import fsdp, put_back
from common.memory import RowLimit
from common.model import logprobs, to_device
from common.parts import Parts
from common.report import samples
from common.rollout import Rollout
from common.scoring import Scored
from common.session import Step
from common.task import Task, task_name
from common.tasks import right_from
from grpo.config import GrpoConfig
from grpo.loss import (
    Counts,
    advantages,
    decoupled_advantages,
    kl,
    overlong_penalty,
)
from grpo.rounds import Round, Rounds

WHY_DEAD = ("all_wrong", "all_right", "cut_off", "all_equal", "unscored")


# What all ranks know of each completion, in this order: the task's reward; the same with the
# penalties of its length; what the advantage is made of, NaN where logits were not finite; its
# tokens; whether it ended by itself; whether it was cut off while its end repeated itself; whether
# it has a token that chance would have drawn more often; whether it has no reward, and so carries
# no loss. With algo.advantage=components its scores by component follow.
COLUMNS = ("score", "earned", "reward", "length", "finished", "repeating", "gibberish", "unscored")
RARE = 2.0  # nats below the log-probability of a token drawn at random


def why_dead(scores: Sequence[float], carries: Sequence[bool], right: float = 1.0) -> str | None:
    """Return why a group has nothing to teach, one of WHY_DEAD; None if it has.

    Args: scores: the task's own; penalties of length and of KL differ within a group whose members
    are all wrong, and would make it look alive; carries: which completions carry loss; right: the
    least score of a right one.
    """
    if not any(carries):
        return "cut_off"
    if max(scores) != min(scores):
        return None
    return _describe_equal(scores, right)


def _describe_equal(scores: Sequence[float], right: float) -> str:
    return "all_right" if min(scores) >= right else "all_wrong" if max(scores) <= 0 else "all_equal"


@dataclass
class Group:
    """One prompt with G completions. version: optimizer steps of the policy that sampled it; place:
    among the groups of its rank in its round; table: what all ranks know, float64 [G, columns];
    dead: why it has nothing to teach, one of WHY_DEAD.
    """

    version: int
    round: int
    rank: int
    place: int
    table: Tensor
    dead: str | None


@dataclass
class Batch:
    """The groups to learn from. n of P prompts are on this rank, with G completions of up to T
    tokens.
    """

    sources: list[tuple[Rollout, int]]  # of each group the rollout, and the place of its prompt
    tokens: Tensor  # int64 [n * G, T], on the CPU
    trains: Tensor  # bool [n * G, T], the tokens that carry loss, on the CPU
    lengths: Tensor  # int64 [n * G]
    logprobs: Tensor  # float32 [n * G, T], of the sampler
    reference: Tensor | None  # the same of the reference model
    places: list[int]  # of this rank's groups among all P
    ranks: list[int]  # of each of the P groups the rank that has it
    learns: list[bool]  # whether each of the P groups has something to teach
    chosen: range  # the groups that an optimizer step learns from: all P, or a part
    rewards: Tensor  # float64 [P, G], what the advantage is made of, on every rank the same
    carries: Tensor  # bool [P, G], which completions carry loss
    drawn: Tensor  # float64 [P, G], tokens of each completion that the policy wrote
    scored: Tensor  # bool [P, G], which have a reward
    parts: Tensor  # float64 [P, G, components], of none but with algo.advantage=components
    known: Tensor  # bool [P, G, components], which of them a sample has
    weights: Tensor  # float64 [components], of the task
    # float32 [n * G, T], of the policy that sampled, as the trainer's first pass computed them.
    old_logprobs: Tensor | None = None

    @property
    def size(self) -> int:
        """G, the completions of a prompt."""
        return self.rewards.shape[1]

    @property
    def groups_per_rank(self) -> list[int]:
        """The number of the chosen groups that each rank has."""
        ranks = [self.ranks[place] for place in self.chosen]
        return [ranks.count(rank) for rank in range(max(self.ranks) + 1)]

    def count(self, micro_batches: int) -> Counts:
        """Return the denominators of an optimizer step on the chosen groups of all ranks."""
        carries = self.carries[self.chosen.start : self.chosen.stop]
        tokens_PG = self.drawn[self.chosen.start : self.chosen.stop] * carries
        rows, prompts = int(carries.sum()), int(tokens_PG.any(1).sum())
        return Counts(rows, int(tokens_PG.sum()), micro_batches, prompts)

    @property
    def of_prompt(self) -> Tensor:
        """The tokens that carry loss of all completions of a row's prompt, float32 [n * G]."""
        of_prompts = self.trains.sum(1).view(-1, self.size).sum(1)
        return of_prompts.repeat_interleave(self.size).float()

    def cut(self, parts: int) -> list["Batch"]:
        """Return the groups in so many parts, as they were sampled, each for one optimizer step.
        A part without a group that has something to teach is left out.
        """
        if parts == 1:
            return [self]
        total = len(self.learns)
        bounds = [total * part // parts for part in range(parts + 1)]
        spans = [range(*span) for span in itertools.pairwise(bounds)]
        return [self._choose(span) for span in spans if any(self.learns[place] for place in span)]

    def _choose(self, span: range) -> "Batch":
        held = [at for at, place in enumerate(self.places) if place in span]
        rows = [at * self.size + row for at in held for row in range(self.size)]
        return replace(
            self,
            sources=[self.sources[at] for at in held],
            tokens=self.tokens[rows],
            trains=self.trains[rows],
            lengths=self.lengths[rows],
            logprobs=self.logprobs[rows],
            reference=None if self.reference is None else self.reference[rows],
            places=[self.places[at] for at in held],
            chosen=span,
        )

    def advantages(self, cfg: GrpoConfig) -> Tensor:
        """Return how much better each completion is than its group, float64 [P, G]."""
        if len(self.weights):
            return decoupled_advantages(self.parts, self.weights, self.known)
        return advantages(self.rewards, cfg.advantage, cfg.pass_k, self.scored)


@dataclass
class Collected:
    """The outcome of a step's prompts.

    Attributes:
        numbers: what goes into the log. batch: the groups to learn from; None where there are none.
        offending: this rank's rows whose rewards or logits are not finite. finite: whether no rank
        has such a row. why: why there is nothing to learn, where that is so.
    """

    numbers: dict[str, Any]
    batch: Batch | None
    offending: list[dict[str, Any]]
    finite: bool
    why: str


def find_weights(task: Task) -> dict[str, float]:
    """Return the weights of the components that a task's reward is the sum of, if it is of two or
    more.

    Raises: ConfigError: it has fewer, so algo.advantage=components has nothing to take apart.
    """
    names, weights = (getattr(task, of, None) or {} for of in ("components", "weights"))
    weights = {n: w for n, w in weights.items() if w and n in names}
    if len(weights) < 2:
        raise ConfigError(
            "algo.advantage=components needs a reward of several components, and that of"
            f" task={task_name(task)} has {len(weights) or 'none'}. Use algo.advantage=group."
        )
    return weights


class Collector:
    """Makes batches: every rank samples its share of the prompts and keeps it."""

    def __init__(self, parts: Parts, cfg: GrpoConfig, train_limit: RowLimit) -> None:
        self.parts, self.cfg = parts, cfg
        fixed = parts.lm.reference is not None and fsdp.of(parts.lm.reference) is not None
        # No gradients are kept here, but the same forward is made.
        self.limit = RowLimit("algo.train_rows", train_limit.rows, fixed=fixed)
        self.tokens = samples.Tokens(parts.lm.tokenizer)
        self.rounds = Rounds(parts, cfg)
        self.carries_cut = not cfg.mask_truncated  # whether a cut-off completion carries loss
        # Of the components that advantages are of.
        self.weights = find_weights(parts.task) if cfg.advantage == "components" else {}

    def collect(self, step: Step) -> Collected:
        """Sample the groups of one step, from where the last one ended in the training order."""
        cfg, context, state = self.cfg, self.parts.context, step.state
        rounds: list[Round] = []
        groups: list[Group] = []
        live: list[Group] = []
        offending: list[dict[str, Any]] = []
        components: defaultdict[str, list[float]] = defaultdict(list)
        seconds: Counter[str] = Counter()
        stops: Counter[str] = Counter()
        while len(live) < cfg.prompts_per_step and len(rounds) <= cfg.resample_rounds:
            if self.rounds.exhausted(state) is not None:
                break  # this step's first rounds were right throughout
            missing = cfg.prompts_per_step - len(live)
            current = self.rounds.more(step, missing) if rounds else self.rounds.first(step)
            self._finish(current, step)
            tables, scored, stopped = [], Scored([], {}, {}), []
            if (rollout := current.rollout) is not None:
                tables, scored = self._judge(rollout, current.reference), rollout.scored
                offending += self._describe_offending(rollout, tables)
                stopped = rollout.stops
            with step.phase("exchange"):
                parts = context.gather_objects((tables, scored.components, scored.seconds, stopped))
            for _, of_components, of_seconds, of_stops in parts:
                seconds.update(of_seconds)
                stops.update(of_stops)
                for name, values in of_components.items():
                    components[name] += values
            for place, table in enumerate(put_back([part for part, *_ in parts])):
                rank, at = place % context.world_size, place // context.world_size
                dead_as = self._find_why_dead(table)
                group = Group(current.version, len(rounds), rank, at, table, dead_as)
                groups.append(group)
                scored_as, unscored = (table[:, COLUMNS.index(n)] for n in ("score", "unscored"))
                right = (scored_as[unscored == 0] >= right_from(self.parts.task)).tolist()
                self.rounds.remember(current.taken[place][1], right, state)
                if group.dead is None or cfg.resample_rounds == 0:
                    live.append(group)
            rounds.append(current)
        self.rounds.end(step)
        table = torch.stack([group.table for group in groups])  # [S, G, columns]
        dead = Counter(group.dead for group in groups if group.dead)
        numbers = describe(table, dead) | {"rounds": len(rounds)}
        numbers["components"] = {n: sum(v) / max(1, len(v)) for n, v in components.items()}
        numbers["component_seconds"] = dict(seconds)
        numbers |= self.parts.scorer.take_logged(context)
        if stops:
            numbers["stops"] = {why: count / stops.total() for why, count in stops.items()}
        tokens = int(table[:, :, COLUMNS.index("length")].sum())
        step.used(tokens=tokens, samples=len(groups) * cfg.samples_per_prompt)
        finite = bool(table.isfinite().all())
        learns = finite and not all(group.dead for group in live)
        numbers["live_groups"] = len(live) if learns else 0
        if cfg.retire_at is not None:
            numbers["retired"] = self.rounds.retired(state)
        if cfg.overlap:
            ages = [step.index - group.version for group in live]
            numbers["staleness"] = sum(ages) / max(1, len(ages))
        batch = self._assemble(live, rounds) if learns else None
        if finite:
            with step.phase("keep"):
                step.rows = self._describe_kept(groups, live, rounds, batch)
        return Collected(
            numbers, batch, offending, finite, explain_nothing(len(groups), dead, len(rounds))
        )

    def rehearse(self) -> None:
        """Sample the first prompts and throw them away: compilation happens here."""
        mine = self.parts.context.share(
            self.parts.examples.order.take(0, self.cfg.prompts_per_step)
        )
        if mine:
            asked = self.parts.rollouter.request(
                mine, samples=self.cfg.samples_per_prompt, logprobs=True
            )
            self.parts.rollouter.sample(asked)

    # --- one round

    def _finish(self, current: Round, step: Step) -> None:
        """Wait for the rewards of a round; the reference model looks at it meanwhile."""
        parts, rollout = self.parts, current.rollout
        if rollout is None:  # a rank without a prompt only keeps pace with the others
            with fsdp.gathered(parts.lm.reference):
                return
        if parts.lm.reference is not None:
            with step.phase("reference"), awaited(parts.lm.device), parts.lm.reference_on_device():
                current.reference = self.limit.run(lambda rows: self._reference(rollout, rows))
        with step.phase("reward"):
            _ = rollout.scored  # waits

    @torch.no_grad()
    def _reference(self, rollout: Rollout, rows: int) -> Tensor:
        """Return the log-probabilities of all completions under the reference model, float32
        [n * G, T], computed for `rows` at a time.
        """
        parts, size, prompts = self.parts, self.cfg.samples_per_prompt, rollout.requests.prompts
        assert parts.lm.reference is not None
        logprobs_NT = torch.zeros(rollout.tokens.shape, device=parts.lm.device)
        lengths, cuts = rollout.lengths.tolist(), self.cfg.sampling
        # Whole groups side by side, or parts of one.
        each, cut = max(1, rows // size), min(rows, size)
        for start, first in itertools.product(range(0, len(prompts), each), range(0, size, cut)):
            part = range(start, min(start + each, len(prompts)))
            chosen = [[i * size + j for j in range(first, min(first + cut, size))] for i in part]
            completions = [[rollout.tokens[row, : lengths[row]] for row in rows] for rows in chosen]
            laid = logprobs.group([prompts[i] for i in part], completions, parts.lm.device)
            with torch.autocast(
                parts.lm.device.type, parts.lm.precision.compute, enabled=parts.lm.half
            ):
                logp, _ = logprobs.token_logprobs(parts.lm.reference, laid, cuts.temperature, cuts)
            [index] = to_device([torch.tensor(chosen).flatten()], parts.lm.device)
            logprobs_NT[index, : logp.shape[1]] = logp
        return logprobs_NT

    def _judge(self, rollout: Rollout, reference: Tensor | None) -> list[Tensor]:
        """Turn scores into rewards. Returns of each group what all ranks are to know, float64
        [G, columns].
        """
        cfg = self.cfg
        scores = torch.tensor(rollout.scored.rewards, dtype=torch.float64)
        earned, lengths = scores, rollout.drawn.double()
        if cfg.overlong_buffer:
            limit = cfg.sampling.max_new_tokens
            earned = scores + overlong_penalty(lengths, limit, cfg.overlong_buffer)
        rewards = earned.clone()
        if cfg.kl.beta and cfg.kl.where == "reward":
            assert reference is not None
            assert rollout.logprobs is not None
            pairs = zip(rollout.logprobs.cpu(), reference.cpu(), strict=True)
            for row, (logp, ref) in enumerate(pairs):
                drawn = rollout.trains[row]
                divergence = kl(logp[drawn], ref[drawn], cfg.kl.estimator, cfg.kl.clamp)
                rewards[row] -= cfg.kl.beta * divergence.sum().double()
        rewards[rollout.broken] = math.nan  # a policy without finite logits has drawn nothing
        repeating, gibberish = torch.tensor(rollout.repeating), self._find_gibberish(rollout)
        unscored = torch.tensor(rollout.scored.unscored)
        if cfg.advantage == "maxrl" and bool((scores < 0).any()):
            raise ConfigError(
                "algo.advantage=maxrl divides by the mean reward of a prompt, and a sample has"
                f" earned {float(scores.min()):g}. Use algo.advantage=group, or a reward of at"
                " least 0."
            )
        columns = [scores, earned, rewards, lengths, rollout.finished, repeating, gibberish]
        parts = (rollout.scored.components, rollout.scored.lacking)
        columns += [unscored, *(torch.tensor(part[n]) for part in parts for n in self.weights)]
        table = torch.stack([column.double() for column in columns], 1)
        return list(table.unflatten(0, (-1, cfg.samples_per_prompt)))

    def _find_gibberish(self, rollout: Rollout) -> Tensor:
        """Return whether each row has a token that is rarer than one drawn at random: bool [N]."""
        assert rollout.logprobs is not None  # 0 of tokens that the policy has not drawn
        least = -math.log(self.parts.lm.model.config.vocab_size) - RARE
        return (rollout.logprobs < least).any(1).cpu()

    def _find_why_dead(self, table: Tensor) -> str | None:
        """Return why a group has nothing to teach; None if it has."""
        cfg = self.cfg
        unscored = table[:, COLUMNS.index("unscored")].bool()
        scores, earned, _, _, finished, _, _, _, *others = table[~unscored].T.tolist()
        best_of = cfg.pass_k if cfg.advantage == "pass_at_k" else 1
        if len(scores) < best_of:
            return "unscored"
        carries = [bool(done) or self.carries_cut for done in finished]
        if best_of > 1:  # the others are the best of no k samples
            order = sorted(range(len(earned)), key=earned.__getitem__)[best_of - 2 :]
            gaining = [row for row in order if earned[row] > earned[order[0]]]
            carries = [carries[row] for row in gaining or order]
            scores, earned = [scores[row] for row in order], [earned[row] for row in order]
        if not self.weights or not any(carries):
            return why_dead(scores, carries, right_from(self.parts.task))
        # Each component is compared among the samples that have it.
        parts, lacking = others[: len(self.weights)], others[len(self.weights) :]
        for weight, part, lacks in zip(self.weights.values(), parts, lacking, strict=True):
            known = [value for value, lack in zip(part, lacks, strict=True) if not lack]
            if weight and known and max(known) != min(known):
                return None
        return _describe_equal(scores, right_from(self.parts.task))

    def _describe_offending(self, rollout: Rollout, tables: list[Tensor]) -> list[dict[str, Any]]:
        """Describe the completions whose scores or rewards are not finite."""
        score, _, reward, *_ = torch.cat(tables).isfinite().T.tolist()
        rows = [row for row, both in enumerate(zip(score, reward, strict=True)) if not all(both)]
        return [rollout.describe_offending(row, self.parts.task, score[row]) for row in rows]

    # --- all rounds together

    def _describe_kept(
        self,
        groups: list[Group],
        live: list[Group],
        rounds: list[Round],
        batch: Batch | None,
    ) -> list[samples.Row]:
        """Return this rank's completions that the run keeps, in the order in which the groups were
        sampled; those of live groups have advantages.
        """
        parts, size = self.parts, self.cfg.samples_per_prompt
        known = {}
        if batch is not None:
            advantage = batch.advantages(self.cfg).tolist()
            known = {id(group): values for group, values in zip(live, advantage, strict=True)}
        shown: list[samples.Row] = []
        for place, group in enumerate(groups[: samples.kept(parts.run, len(groups))]):
            if group.rank != parts.context.rank:
                continue
            rollout, first = rounds[group.round].rollout, group.place * size
            assert rollout is not None
            rows = rollout.describe(range(first, first + size), parts.task, self.tokens)
            values = known.get(id(group), [None] * size)
            shown += [
                {**row, "group": place, "advantage": value, "version": group.version}
                for row, value in zip(rows, values, strict=True)
            ]
        return shown

    def _assemble(self, live: list[Group], rounds: list[Round]) -> Batch:
        """Put this rank's groups among `live` side by side."""
        size, context = self.cfg.samples_per_prompt, self.parts.context
        places = [place for place, group in enumerate(live) if group.rank == context.rank]
        mine = [(rounds[live[place].round], live[place].place) for place in places]

        width = self.cfg.sampling.max_new_tokens + self.parts.examples.reply_tokens

        def cut(column: Callable[[Any], Tensor]) -> Tensor:
            """Cut the G rows of each group out of its round."""
            parts = [column(sampled)[at * size : (at + 1) * size] for sampled, at in mine]
            return torch.cat(parts) if parts else torch.zeros(0, width)

        table = torch.stack([group.table for group in live])
        columns, parts, lacking = table.split([len(COLUMNS), *[len(self.weights)] * 2], dim=2)
        _, _, rewards, lengths, finished, _, _, unscored = columns.unbind(2)
        carries = (finished.bool() | self.carries_cut) & ~unscored.bool()
        return Batch(
            sources=[(one.rollout, at) for one, at in mine if one.rollout is not None],
            tokens=cut(lambda sampled: sampled.rollout.tokens),
            trains=cut(lambda sampled: sampled.rollout.trains) * carries[places].view(-1, 1),
            lengths=cut(lambda sampled: sampled.rollout.lengths).flatten().long(),
            logprobs=cut(lambda sampled: sampled.rollout.logprobs),
            reference=None if self.parts.lm.reference is None else cut(lambda one: one.reference),
            places=places,
            ranks=[group.rank for group in live],
            learns=[group.dead is None for group in live],
            chosen=range(len(live)),
            rewards=rewards,
            carries=carries,
            drawn=lengths,
            scored=unscored == 0,
            parts=parts,
            known=(lacking == 0) & (unscored == 0)[:, :, None],
            weights=torch.tensor(list(self.weights.values()), dtype=torch.float64),
        )


def describe(table: Tensor, dead: Counter[str]) -> dict[str, Any]:
    """Return what the log says of the groups of a step. table: float64 [S, G, columns]; dead: why
    groups are.
    """
    columns = table[:, :, : len(COLUMNS)].unbind(2)
    scores, _, _, lengths, finished, repeating, gibberish, unscored = columns
    left_out = {"unscored": int(unscored.sum()) / unscored.numel()} if unscored.any() else {}
    scored = (unscored == 0).any(1)
    known = scores[scored] if scored.any() else scores
    return left_out | {
        "reward": known.mean().item(),
        "reward_std": known.std(1).mean().item(),
        "dead_groups": dead.total() / len(table),
        **{f"dead_{why}": dead[why] / len(table) for why in WHY_DEAD},
        "truncated": 1 - int(finished.sum()) / scores.numel(),
        "repeating": int(repeating.sum()) / scores.numel(),
        "gibberish": int(gibberish.sum()) / scores.numel(),
        "length": lengths.mean().item(),
    }


def explain_nothing(groups: int, dead: Counter[str], rounds: int) -> str:
    """Say why there is no group to learn from."""
    return (
        f"nothing to learn, so no optimizer step. Of {groups} groups in {rounds} rounds"
        f" {dead['all_wrong']} are all wrong (too hard), {dead['all_right']} all right (too easy),"
        f" {dead['cut_off']} cut off as a whole (too long, or in a loop), {dead['all_equal']} have"
        f" equal rewards in between (too coarse), and {dead['unscored']} have no reward (None)."
    )
