"""Collect the groups that a step learns from: a group is one prompt with G scored completions.

The story of a step is `Collector.collect`: take prompts from the training order, sample them, score
the completions, judge them (rewards with penalties), exchange the scores between ranks, replace
dead groups by further rounds, and assemble the batch. Every rank samples its share of the prompts
and keeps it; the scores are known to all ranks.

With algo.overlap=1 the first round of a step is sampled in the step before, so that its rewards are
computed meanwhile; an engine with weights of its own also samples while the model is trained. A
rollout is then one step older than the policy that learns from it. Replacements of dead groups are
sampled in their own step. Every round that was begun is used, and a checkpoint holds the round that
is under way.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from common.config import ConfigError, ScoringConfig
from common.device import awaited
from common.distributed import put_back, sharding_of
from common.engine import Completions, Engine
from common.episodes import Played
from common.memory import RowLimit
from common.model import logprobs, to_device
from common.parts import Parts
from common.report import samples
from common.rollout import Phase, Rollout, Scores
from common.session import Step
from common.task import Example, Task, TaskFeatures, task_name
from common.tasks import ExampleOrder, right_from
from grpo.config import GrpoConfig
from grpo.loss import (
    Counts,
    advantages,
    decoupled_advantages,
    kl,
    overlong_penalty,
)

WHY_DEAD = ("all_wrong", "all_right", "cut_off", "all_equal", "unscored")
RETIRED = "algo.retire_at: all training prompts have retired"  # what ended the run
RARE = 2.0  # nats below the log-probability of a token drawn at random: rarer is gibberish
# The tensors of completions that a checkpoint holds, if they exist: its key -> the attribute.
SAVED = {name: name for name in ("tokens", "lengths", "finished", "logprobs", "broken")}
SAVED |= {"trains": "written"}


@dataclass(frozen=True, kw_only=True)
class GroupScores(Scores):
    """The scores of groups. `reward` is what advantages are computed from."""

    # The score with the penalty for length, float64.
    earned: Tensor
    # Whether a token is rarer than one drawn at random, bool.
    gibberish: Tensor


@dataclass(frozen=True, eq=False)
class Round:
    """Prompts that all ranks sampled together."""

    # The prompts of all ranks, with their positions in the training order.
    taken: list[tuple[int, Example]]
    # The number of optimizer steps that the policy had made.
    version: int
    # The n * G completions of this rank's share; None if it had no prompt.
    rollout: Rollout | None
    # Their log-probabilities under the reference model, float32 [n * G, T], if there is one.
    reference: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Group:
    """One prompt with G completions."""

    round: Round
    # The rank that has the completions.
    rank: int
    # The place of the prompt among its rank's prompts of the round.
    place: int
    # [G]
    scores: GroupScores
    # The reason that it has nothing to teach, one of WHY_DEAD; None if it has something.
    dead: str | None

    @property
    def rollout(self) -> Rollout:
        """The rollout that has the completions; only the group's own rank has it."""
        assert self.round.rollout is not None
        return self.round.rollout

    @property
    def rows(self) -> slice:
        """The rows of the completions in the rollout."""
        size = len(self.scores.score)
        return slice(self.place * size, (self.place + 1) * size)


@dataclass
class Batch:
    """The P groups to learn from, n of them on this rank, with G completions of up to T tokens."""

    # Per group of this rank: its rollout, and the place of its prompt there.
    sources: list[tuple[Rollout, int]]
    # int64 [n * G, T], on the CPU.
    tokens: Tensor
    # The tokens that carry loss, bool [n * G, T], on the CPU.
    loss_mask: Tensor
    # int64 [n * G]
    lengths: Tensor
    # The log-probabilities of the sampler, float32 [n * G, T].
    logprobs: Tensor
    # The log-probabilities of the reference model, float32 [n * G, T]; None without one.
    reference: Tensor | None
    # The places of this rank's groups among all P.
    places: list[int]
    # Per group: the rank that has it.
    ranks: list[int]
    # Per group: whether it has something to teach.
    learns: list[bool]
    # The groups that an optimizer step learns from: all P, or a part of them.
    chosen: range
    # [P, G], the same on every rank.
    scores: GroupScores
    # Which completions carry loss, bool [P, G].
    carries_loss: Tensor
    # The task's weights of the components, float64 [C]; empty unless algo.advantage=components.
    weights: Tensor
    # The log-probabilities of the policy that sampled, float32 [n * G, T], as the trainer's first
    # pass computed them; None before that pass.
    old_logprobs: Tensor | None = None

    @property
    def size(self) -> int:
        """G, the number of completions per prompt."""
        return self.carries_loss.shape[1]

    @property
    def groups_per_rank(self) -> list[int]:
        """The number of chosen groups per rank."""
        ranks = [self.ranks[place] for place in self.chosen]
        return [ranks.count(rank) for rank in range(max(self.ranks) + 1)]

    def count(self, micro_batches: int) -> Counts:
        """Return the denominators of an optimizer step on the chosen groups of all ranks."""
        chosen = slice(self.chosen.start, self.chosen.stop)
        carries_loss = self.carries_loss[chosen]
        tokens_PG = self.scores.length[chosen] * carries_loss
        rows, prompts = int(carries_loss.sum()), int(tokens_PG.any(1).sum())
        return Counts(rows, int(tokens_PG.sum()), micro_batches, prompts)

    @property
    def of_prompt(self) -> Tensor:
        """Per row, the number of tokens that carry loss in all completions of the row's prompt,
        float32 [n * G].
        """
        of_prompts = self.loss_mask.sum(1).view(-1, self.size).sum(1)
        return of_prompts.repeat_interleave(self.size).float()

    def cut(self, parts: int) -> list["Batch"]:
        """Cut the groups, in the order of sampling, into `parts` parts, one per optimizer step. A
        part in which no group has something to teach is left out.
        """
        if parts == 1:
            return [self]
        total = len(self.learns)
        bounds = [total * part // parts for part in range(parts + 1)]
        spans = [range(start, stop) for start, stop in itertools.pairwise(bounds)]
        return [self._choose(span) for span in spans if any(self.learns[place] for place in span)]

    def _choose(self, span: range) -> "Batch":
        held = [at for at, place in enumerate(self.places) if place in span]
        rows = [at * self.size + row for at in held for row in range(self.size)]
        return replace(
            self,
            sources=[self.sources[at] for at in held],
            tokens=self.tokens[rows],
            loss_mask=self.loss_mask[rows],
            lengths=self.lengths[rows],
            logprobs=self.logprobs[rows],
            reference=None if self.reference is None else self.reference[rows],
            places=[self.places[at] for at in held],
            chosen=span,
        )

    def advantages(self, cfg: GrpoConfig) -> Tensor:
        """Return how much better each completion is than its group, float64 [P, G]."""
        scored = ~self.scores.unscored
        if len(self.weights):
            known = self.scores.known & scored[:, :, None]
            return decoupled_advantages(self.scores.components, self.weights, known)
        return advantages(self.scores.reward, cfg.advantage, cfg.pass_k, scored)


@dataclass(frozen=True)
class Collected:
    """The outcome of a step's prompts."""

    # The numbers for the event of the step.
    numbers: dict[str, Any]
    # The groups to learn from; None if there are none.
    batch: Batch | None
    # This rank's rows whose rewards or logits are not finite.
    offending: list[dict[str, Any]]
    # Whether no rank has such a row.
    finite: bool
    # A sentence that says why there is nothing to learn, for a step without a batch.
    why: str


def find_why_dead(
    scores: GroupScores, cfg: GrpoConfig, *, components: bool = False, right: float = 1.0
) -> str | None:
    """Return the reason that a group has nothing to teach, one of WHY_DEAD; None if it has
    something.

    The task's scores decide, not the rewards: penalties for length and for KL differ within a group
    whose completions are all wrong, and would make it look alive.

    Args:
        scores: the scores of the group, [G].
        components: whether advantages are computed from the components of the score.
        right: the least score of a right completion.
    """
    scored = scores.select(~scores.unscored)
    best_of = cfg.pass_k if cfg.advantage == "pass_at_k" else 1
    if len(scored.score) < best_of:
        return "unscored"
    carriers = scored
    if best_of > 1:
        # Only a completion that can be the best of k samples counts, and only one that is better
        # than the least of these has a gain.
        scored = scored.select(scored.earned.argsort(stable=True)[best_of - 2 :])
        gains = scored.earned > scored.earned[0]
        carriers = scored.select(gains) if gains.any() else scored
    if cfg.mask_truncated and not carriers.finished.any():
        return "cut_off"
    if components:
        columns = zip(scored.components.unbind(1), scored.known.unbind(1), strict=True)
        # Each component is compared among the completions that have a score of it.
        differs = any(_differ(part[known]) for part, known in columns)
    else:
        differs = _differ(scored.score)
    if differs:
        return None
    if scored.score.min() >= right:
        return "all_right"
    return "all_wrong" if scored.score.max() <= 0 else "all_equal"


def _differ(values: Tensor) -> bool:
    return len(values) > 0 and bool(values.max() != values.min())


def find_weights(task: Task) -> dict[str, float]:
    """Return the weights, other than 0, of the components whose weighted sum is the task's reward.

    Raises: ConfigError if there are fewer than two, so that algo.advantage=components has no
    effect.
    """
    features = TaskFeatures(task)
    components, weights = features.components, features.weights
    weights = {name: weight for name, weight in weights.items() if weight and name in components}
    if len(weights) < 2:
        raise ConfigError(
            "algo.advantage=components needs a reward of several components, and that of"
            f" task={task_name(task)} has {len(weights) or 'none'}. Use algo.advantage=group."
        )
    return weights


def check_overlap(cfg: GrpoConfig, engine: Engine, scoring: ScoringConfig) -> None:
    """Raise ConfigError if algo.overlap=1 gains nothing, or cannot work with the engine."""
    if cfg.overlap and not engine.separate and scoring.kind == "serial":
        raise ConfigError(
            "algo.overlap=1 has no effect with scoring.kind=serial, where rewards are computed"
            " before anything else goes on. Set scoring.kind=threads for rewards that wait, or"
            " processes for rewards that compute."
        )
    if cfg.overlap and getattr(engine, "sleeps", False):
        raise ConfigError(
            "algo.overlap=1 samples while the model is trained, and with"
            " engine.settings.enable_sleep_mode=true vLLM sleeps then. Leave one of them out."
        )


class PromptQueue:
    """Hands out the prompts of the training order, except those that have retired.

    Its memory is in `state.own` of the run, which checkpoints keep: `cursor`, the position of the
    next prompt, and `visits`, per example the number of scored samples and of right ones among
    them.
    """

    def __init__(self, order: ExampleOrder, retire_at: float | None) -> None:
        self.order, self.retire_at = order, retire_at

    def take(self, count: int, state: dict[str, Any]) -> list[tuple[int, Example]]:
        """Return the next `count` prompts that have not retired, with their positions in the
        training order.
        """
        taken: list[tuple[int, Example]] = []
        while len(taken) < count:
            position = state["cursor"]
            state["cursor"] += 1
            [example] = self.order.take(position, 1)
            visits = state["visits"].get(str(example.id))
            if visits is None or not self._retires(*visits):
                taken.append((position, example))
        return taken

    def remember(self, example: Example, right: list[bool], state: dict[str, Any]) -> None:
        """Add the scored samples of a prompt, and the right ones among them, to its counts, if
        prompts can retire.

        Args: right: whether each scored sample is right.
        """
        if right and self.retire_at is not None:
            samples, before = state["visits"].get(str(example.id), (0, 0))
            state["visits"][str(example.id)] = samples + len(right), before + sum(right)

    def retired(self, state: dict[str, Any]) -> float:
        """Return the share of the training prompts that have retired."""
        if self.retire_at is None:
            return 0.0
        retired = sum(self._retires(*visits) for visits in state["visits"].values())
        return retired / len(self.order.examples)

    def exhausted(self, state: dict[str, Any]) -> str | None:
        """Return the reason that ends the run if no prompt is left, otherwise None."""
        return RETIRED if self.retired(state) == 1 else None

    def _retires(self, samples: int, right: int) -> bool:
        return self.retire_at is not None and right >= self.retire_at * samples


@dataclass
class Tally:
    """Sums about the scoring of a step, of one rank or of all, for the log."""

    components: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    # The number of ended episodes by reason.
    stops: Counter[str] = field(default_factory=Counter)

    def count(self, rollout: Rollout) -> None:
        """Add the completions of a rollout."""
        scored = rollout.scored
        self.add(Tally(defaultdict(list, scored.components), defaultdict(float, scored.seconds)))
        self.stops.update(rollout.stops)

    def add(self, other: "Tally") -> None:
        """Add another tally."""
        for name, values in other.components.items():
            self.components[name] += values
        for name, value in other.seconds.items():
            self.seconds[name] += value
        self.stops.update(other.stops)

    def numbers(self) -> dict[str, Any]:
        """Return the tally's numbers for the event of the step."""
        means = {name: sum(part) / max(1, len(part)) for name, part in self.components.items()}
        numbers: dict[str, Any] = {"components": means, "component_seconds": dict(self.seconds)}
        if self.stops:
            total = self.stops.total()
            numbers["stops"] = {why: count / total for why, count in self.stops.items()}
        return numbers


class Collector:
    """Makes batches: every rank samples its share of the prompts and keeps it."""

    def __init__(self, parts: Parts, cfg: GrpoConfig, train_limit: RowLimit) -> None:
        check_overlap(cfg, parts.engine, parts.run.scoring)
        self.parts, self.cfg = parts, cfg
        self.prompts = PromptQueue(parts.examples.order, cfg.retire_at)
        # The components that advantages are computed from, with their weights.
        self.weights = find_weights(parts.task) if cfg.advantage == "components" else {}
        fixed = parts.lm.reference is not None and sharding_of(parts.lm.reference).shared
        # The rows of the reference model's forward, which is training's forward without gradients.
        self.row_limit = RowLimit("algo.train_rows", train_limit.rows, fixed=fixed)
        self.tokens = samples.Tokens(parts.lm.tokenizer)
        # The first round of the next step.
        self.ahead: Future[Round] | None = None
        self.thread = ThreadPoolExecutor(1, "rollout")

    def collect(self, step: Step) -> Collected:
        """Sample the groups of one step, from where the step before ended in the training order."""
        cfg, context, state = self.cfg, self.parts.context, step.state.own
        groups: list[Group] = []
        live: list[Group] = []
        offending: list[dict[str, Any]] = []
        tally = Tally()
        rounds = 0
        while len(live) < cfg.prompts_per_step and rounds <= cfg.resample_rounds:
            if self.prompts.exhausted(state) is not None:
                break  # the completions of this step's first rounds made the last prompts retire
            if rounds == 0:
                current = self._take_first_round(step)
            else:
                current = self._sample_now(step, cfg.prompts_per_step - len(live))
            rounds += 1
            current = self._await_scores(current, step)
            judged = self._judge(current)
            offending += self._describe_offending(current, judged)
            with step.phase("exchange"):
                scores = self._exchange(current, judged, tally)
            for group in self._cut_into_groups(current, scores):
                groups.append(group)
                if group.dead is None or cfg.resample_rounds == 0:
                    live.append(group)
            self._remember(current, scores, state)
        self._end_rounds(step)

        scores = GroupScores.stack([group.scores for group in groups])  # [S, G]
        finite = all(
            bool(part.isfinite().all()) for part in (scores.score, scores.reward, scores.components)
        )
        learns = finite and not all(group.dead for group in live)
        batch = self._assemble(live) if learns else None
        dead = Counter(group.dead for group in groups if group.dead)
        numbers = describe(scores, dead) | {"rounds": rounds} | tally.numbers()
        numbers |= self.parts.scorer.take_logged(context)
        numbers["live_groups"] = len(live) if learns else 0
        if cfg.retire_at is not None:
            numbers["retired"] = self.prompts.retired(state)
        if cfg.overlap:
            ages = [step.index - group.round.version for group in live]
            numbers["staleness"] = sum(ages) / max(1, len(ages))
        step.used(tokens=int(scores.length.sum()), samples=scores.score.numel())
        if finite:
            with step.phase("keep"):
                step.rows = self._describe_kept(groups, live, batch)
        why = explain_nothing(len(groups), dead, rounds)
        return Collected(numbers, batch, offending, finite, why)

    def rehearse(self) -> None:
        """Sample the first prompts and discard the completions, so that compilation happens
        here.
        """
        parts, cfg = self.parts, self.cfg
        mine = parts.context.share(parts.examples.order.take(0, cfg.prompts_per_step))
        if mine:
            requests = parts.rollouter.request(mine, samples=cfg.samples_per_prompt, logprobs=True)
            parts.rollouter.sample(requests)

    # --- take prompts and sample them

    def _take_first_round(self, step: Step) -> Round:
        """Return the first round of a step. With overlap it was begun in the step before, and the
        first round of the next step is begun now, unless an engine of its own does that later.
        """
        if not self.cfg.overlap:
            return self._sample_now(step, self.cfg.prompts_per_step)
        begun = self.ahead or self._begin(step)
        self.ahead = None
        with step.phase("rollout"):
            current = begun.result()
        if not self.parts.engine.separate:
            self._begin_next(step)
        return current

    def _sample_now(self, step: Step, count: int) -> Round:
        """Take `count` prompts and sample them."""
        return self._sample(self.prompts.take(count, step.state.own), step.index, step.phase)

    def _sample(
        self,
        taken: list[tuple[int, Example]],
        version: int,
        phase: Phase = nullcontext,
        *,
        refresh: bool = True,
    ) -> Round:
        """Sample this rank's share of the prompts, and start to score it. Draws are keyed by the
        position of a prompt in the training order: an example that comes twice in a step gets other
        samples the second time.
        """
        parts = self.parts
        share = parts.context.share(taken)
        mine = [example for _, example in share]
        with parts.lm.sharding.gathered():  # a rank without a prompt keeps pace with the others
            if not mine:
                return Round(taken, version, None)
            requests = parts.rollouter.request(
                mine,
                ids=[position for position, _ in share],
                samples=self.cfg.samples_per_prompt,
                draw=version,
                logprobs=True,
            )
            draw = partial(parts.rollouter.sample, refresh=refresh)
            rollout = parts.rollouter.roll_out(mine, requests, phase, draw=draw, step=version)
            return Round(taken, version, rollout)

    def _begin(self, step: Step) -> Future[Round]:
        """Begin a round. An engine with weights of its own samples it in another thread; otherwise
        it is sampled now, and its rewards are computed while the run continues.
        """
        count = self.cfg.prompts_per_step
        if self.parts.engine.separate:
            with step.phase("rollout"):
                self.parts.engine.refresh()  # before the weights change
            taken = self.prompts.take(count, step.state.own)
            return self.thread.submit(self._sample, taken, step.index, refresh=False)
        begun: Future[Round] = Future()
        begun.set_result(self._sample_now(step, count))
        return begun

    def _begin_next(self, step: Step) -> None:
        steps, done = self.cfg.steps, step.index + self.cfg.updates_per_rollout
        if (steps is None or done < steps) and self.prompts.exhausted(step.state.own) is None:
            self.ahead = self._begin(step)

    def _end_rounds(self, step: Step) -> None:
        """Let the engine rest, because this step needs no more rounds; with overlap, begin the next
        step's first round on an engine with weights of its own.
        """
        self.parts.engine.rest()
        if self.cfg.overlap and self.parts.engine.separate:
            self._begin_next(step)

    # --- score and judge

    def _await_scores(self, current: Round, step: Step) -> Round:
        """Wait for the scores of a round. Returns it with the log-probabilities of the reference
        model, which are computed meanwhile.
        """
        lm, rollout = self.parts.lm, current.rollout
        if rollout is None:  # a rank without a prompt only keeps pace with the others
            with sharding_of(lm.reference).gathered():
                return current
        if lm.reference is not None:
            with step.phase("reference"), awaited(lm.device), lm.reference_on_device():
                reference = self.row_limit.run(lambda rows: self._refer(rollout, rows))
                current = replace(current, reference=reference)
        with step.phase("reward"):
            rollout.await_scores()
        return current

    @torch.no_grad()
    def _refer(self, rollout: Rollout, rows: int) -> Tensor:
        """Return the log-probabilities of all completions under the reference model, float32
        [n * G, T], computed for `rows` at a time.
        """
        lm, cuts = self.parts.lm, self.cfg.sampling
        size, prompts = self.cfg.samples_per_prompt, rollout.requests.prompts
        assert lm.reference is not None
        logprobs_NT = torch.zeros(rollout.tokens.shape, device=lm.device)
        lengths = rollout.lengths.tolist()
        # Several whole groups per forward, or a part of one.
        each, cut = max(1, rows // size), min(rows, size)
        for start, first in itertools.product(range(0, len(prompts), each), range(0, size, cut)):
            part = range(start, min(start + each, len(prompts)))
            chosen = [[i * size + j for j in range(first, min(first + cut, size))] for i in part]
            completions = [[rollout.tokens[row, : lengths[row]] for row in rows] for rows in chosen]
            laid = logprobs.group([prompts[i] for i in part], completions, lm.device)
            with torch.autocast(lm.device.type, lm.precision.compute, enabled=lm.half):
                logp, _ = logprobs.token_logprobs(lm.reference, laid, cuts.temperature, cuts)
            [index] = to_device([torch.tensor(chosen).flatten()], lm.device)
            logprobs_NT[index, : logp.shape[1]] = logp
        return logprobs_NT

    def _judge(self, current: Round) -> GroupScores | None:
        """Turn the scores of this rank's completions into rewards with penalties, [n * G]; None if
        the rank has no completions. A completion without finite logits gets the reward NaN.

        Raises: ConfigError for a negative score with algo.advantage=maxrl.
        """
        cfg, rollout = self.cfg, current.rollout
        if rollout is None:
            return None
        scores = rollout.scores(list(self.weights))
        if cfg.advantage == "maxrl" and bool((scores.score < 0).any()):
            raise ConfigError(
                "algo.advantage=maxrl divides by the mean reward of a prompt, and a sample has"
                f" earned {float(scores.score.min()):g}. Use algo.advantage=group, or a reward of"
                " at least 0."
            )
        earned = scores.score
        if cfg.overlong_buffer:
            longest = cfg.sampling.max_new_tokens
            penalty = overlong_penalty(scores.length.double(), longest, cfg.overlong_buffer)
            earned = earned + penalty
        reward = earned.clone()
        if cfg.kl.beta and cfg.kl.where == "reward":
            reward -= cfg.kl.beta * self._diverge(rollout, current.reference)
        reward[rollout.broken] = math.nan  # a policy without finite logits has drawn nothing
        scores = replace(scores, reward=reward)
        gibberish = self._find_gibberish(rollout)
        return GroupScores(**vars(scores), earned=earned, gibberish=gibberish)

    def _diverge(self, rollout: Rollout, reference: Tensor | None) -> Tensor:
        """Return the estimated KL between policy and reference model per completion, float64 [n *
        G].
        """
        assert reference is not None
        assert rollout.logprobs is not None
        kind, clamp = self.cfg.kl.estimator, self.cfg.kl.clamp
        rows = zip(rollout.logprobs.cpu(), reference.cpu(), rollout.written, strict=True)
        return torch.stack(
            [kl(logp[drawn], ref[drawn], kind, clamp).sum().double() for logp, ref, drawn in rows]
        )

    def _find_gibberish(self, rollout: Rollout) -> Tensor:
        """Return whether each completion has a token that is rarer than one drawn at random, bool
        [n * G].
        """
        assert rollout.logprobs is not None  # 0 for tokens that the policy has not drawn
        least = -math.log(self.parts.lm.model.config.vocab_size) - RARE
        return (rollout.logprobs < least).any(1).cpu()

    def _describe_offending(
        self, current: Round, judged: GroupScores | None
    ) -> list[dict[str, Any]]:
        """Describe the completions whose scores or rewards are not finite."""
        if current.rollout is None or judged is None:
            return []
        scored = judged.score.isfinite()
        rows = (~(scored & judged.reward.isfinite())).nonzero().flatten().tolist()
        task = self.parts.task
        return [current.rollout.describe_offending(row, task, bool(scored[row])) for row in rows]

    # --- exchange

    def _exchange(self, current: Round, judged: GroupScores | None, tally: Tally) -> GroupScores:
        """Return the scores of a round's groups on all ranks, [prompts, G], and add the sums of all
        ranks to the tally.
        """
        context = self.parts.context
        mine = [] if judged is None else [judged.group(self.cfg.samples_per_prompt)]
        places = context.share(range(len(current.taken)))
        scores = GroupScores.gather(mine, places, context)
        share = Tally()
        if current.rollout is not None:
            share.count(current.rollout)
        for one in context.gather_objects(share):
            tally.add(one)
        return scores

    def _cut_into_groups(self, current: Round, scores: GroupScores) -> list[Group]:
        """Return the groups of a round in the order of its prompts."""
        ranks, groups = self.parts.context.world_size, []
        components, right = bool(self.weights), right_from(self.parts.task)
        for place in range(len(current.taken)):
            group = scores.select(place)
            dead = find_why_dead(group, self.cfg, components=components, right=right)
            groups.append(Group(current, place % ranks, place // ranks, group, dead))
        return groups

    def _remember(self, current: Round, scores: GroupScores, state: dict[str, Any]) -> None:
        """Count the right samples of each prompt of a round."""
        right = scores.score >= right_from(self.parts.task)
        for place, (_, example) in enumerate(current.taken):
            known = ~scores.unscored[place]
            self.prompts.remember(example, right[place, known].tolist(), state)

    # --- assemble the batch

    def _assemble(self, live: list[Group]) -> Batch:
        """Make the batch from the groups `live`, with the rows of this rank's groups one after the
        other.
        """
        cfg, parts = self.cfg, self.parts
        places = [place for place, group in enumerate(live) if group.rank == parts.context.rank]
        mine = [live[place] for place in places]
        width = cfg.sampling.max_new_tokens + parts.examples.reply_tokens

        def join(tensor_of: Callable[[Group], Tensor | None]) -> Tensor:
            """Return the rows of this rank's groups of a tensor of their rounds."""
            rows: list[Tensor] = []
            for group in mine:
                tensor = tensor_of(group)
                assert tensor is not None
                rows.append(tensor[group.rows])
            return torch.cat(rows) if rows else torch.zeros(0, width)

        scores = GroupScores.stack([group.scores for group in live])
        finished = torch.ones_like(scores.finished) if not cfg.mask_truncated else scores.finished
        carries_loss = finished & ~scores.unscored
        reference = None
        if parts.lm.reference is not None:
            reference = join(lambda group: group.round.reference)
        return Batch(
            sources=[(group.rollout, group.place) for group in mine],
            tokens=join(lambda group: group.rollout.tokens),
            loss_mask=join(lambda group: group.rollout.written) * carries_loss[places].view(-1, 1),
            lengths=join(lambda group: group.rollout.lengths).flatten().long(),
            logprobs=join(lambda group: group.rollout.logprobs),
            reference=reference,
            places=places,
            ranks=[group.rank for group in live],
            learns=[group.dead is None for group in live],
            chosen=range(len(live)),
            scores=scores,
            carries_loss=carries_loss,
            weights=torch.tensor(list(self.weights.values()), dtype=torch.float64),
        )

    def _describe_kept(
        self, groups: list[Group], live: list[Group], batch: Batch | None
    ) -> list[samples.Row]:
        """Return this rank's completions that the run keeps, in the order in which the groups were
        sampled. Completions of live groups have advantages.
        """
        parts, size = self.parts, self.cfg.samples_per_prompt
        advantages_of: dict[Group, list[float]] = {}
        if batch is not None:
            advantages_of = dict(zip(live, batch.advantages(self.cfg).tolist(), strict=True))
        shown: list[samples.Row] = []
        for place, group in enumerate(groups[: samples.kept_prompts(parts.run, len(groups))]):
            if group.rank != parts.context.rank:
                continue
            rows = range(group.rows.start, group.rows.stop)
            described = group.rollout.describe(rows, parts.task, self.tokens)
            values: Sequence[float | None] = advantages_of.get(group, [None] * size)
            for row, value in zip(described, values, strict=True):
                own = {"group": place, "advantage": value, "version": group.round.version}
                shown.append(row | own)
        return shown

    # --- for checkpoints

    def extra(self) -> dict[str, Any]:
        """Return the round under way, from all ranks, after waiting until it is sampled; empty if
        there is none.
        """
        if self.ahead is None:
            return {}
        ahead = self.ahead.result()
        mine: list[dict[str, Any]] = []  # one entry per prompt
        if ahead.rollout is not None:
            completions = ahead.rollout.completions
            held = {key: getattr(completions, name) for key, name in SAVED.items()}
            places = torch.arange(len(completions.lengths))
            for rows in places.split(self.cfg.samples_per_prompt):
                one = {key: part[rows].cpu() for key, part in held.items() if part is not None}
                if completions.played is not None:
                    one["played"] = [completions.played[row].__getnewargs__() for row in rows]
                mine.append(one)
        prompts = put_back(self.parts.context.gather_objects(mine))
        positions = [position for position, _ in ahead.taken]
        return {"ahead": {"version": ahead.version, "positions": positions, "prompts": prompts}}

    def load(self, extra: dict[str, Any]) -> None:
        """Take over the round that was under way, and start to score it."""
        if (held := extra.get("ahead")) is None:
            return
        parts, rollout = self.parts, None
        taken = [(at, parts.examples.order.take(at, 1)[0]) for at in held["positions"]]
        if mine := parts.context.share(list(zip(taken, held["prompts"], strict=True))):
            completions = Completions.join([self._restore(one) for _, one in mine])
            examples = [example for (_, example), _ in mine]
            requests = parts.rollouter.request(
                examples, samples=self.cfg.samples_per_prompt, logprobs=True
            )
            rollout = Rollout.decode(parts.lm.decode, requests, completions, examples)
            rollout.start_scoring(parts.scorer, held["version"])
        self.ahead = Future()
        self.ahead.set_result(Round(taken, held["version"], rollout))

    def _restore(self, one: dict[str, Any]) -> Completions:
        """Return the completions of a prompt from the form in which `extra` saved them."""
        device = self.parts.lm.device
        columns = {name: one[key].to(device) for key, name in SAVED.items() if key in one}
        played = [Played(*outcome) for outcome in one.get("played", [])]
        return Completions(**{"logprobs": None, **columns}, played=[*played] or None)


def describe(scores: GroupScores, dead: Counter[str]) -> dict[str, Any]:
    """Return the numbers about the groups of a step for its event.

    Args:
        scores: the scores of all groups, [S, G].
        dead: the number of groups with nothing to teach, by the reason.
    """
    groups, completions = scores.score.shape[0], scores.score.numel()
    scored = (~scores.unscored).any(1)
    known = scores.score[scored] if scored.any() else scores.score
    numbers = {
        "reward": known.mean().item(),
        "reward_std": known.std(1).mean().item(),
        "dead_groups": dead.total() / groups,
        **{f"dead_{why}": dead[why] / groups for why in WHY_DEAD},
        "truncated": 1 - int(scores.finished.sum()) / completions,
        "repeating": int(scores.repeating.sum()) / completions,
        "gibberish": int(scores.gibberish.sum()) / completions,
        "length": scores.length.double().mean().item(),
    }
    if scores.unscored.any():
        numbers["unscored"] = int(scores.unscored.sum()) / completions
    return numbers


def explain_nothing(groups: int, dead: Counter[str], rounds: int) -> str:
    """Return a sentence that says why there is no group to learn from."""
    return (
        f"nothing to learn, so no optimizer step. Of {groups} groups in {rounds} rounds"
        f" {dead['all_wrong']} are all wrong (too hard), {dead['all_right']} all right (too easy),"
        f" {dead['cut_off']} cut off as a whole (too long, or in a loop), {dead['all_equal']} have"
        f" equal rewards in between (too coarse), and {dead['unscored']} have no reward (None)."
    )
