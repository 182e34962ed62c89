"""The population of a step: perturbed copies of the model sample side by side and are scored."""

import logging
import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from common.distributed import fsdp
from common.engine import Completions, Requests
from common.episodes import STOPS
from common.memory import Memory, RolloutMemory, describe
from common.optim import describe_source
from common.parts import Parts
from common.report import samples
from common.rollout import Rollout, Scores
from common.run import describe_length
from common.scoring import fill
from common.task import Example, TaskFeatures
from eggroll.config import EggrollConfig
from eggroll.fitness import equal_parts, fitness, over_samples
from eggroll.noise import Noise
from eggroll.weights import count_state

log = logging.getLogger("clutch")


@dataclass(frozen=True)
class Centre:
    """The unperturbed model's completions of a step's prompts: their rewards, float64 [rows], which
    of them has one, bool [rows], and 1 where one is cut off, and where one holds an answer, float64
    [rows].
    """

    texts: list[str]
    rewards: Tensor
    scored: Tensor
    cut: Tensor
    answered: Tensor | None
    generated: int

    @property
    def reward(self) -> float:
        """Return the mean of the rewards that there are; 0 where there is none."""
        return self.rewards[self.scored].mean().item() if self.scored.any() else 0.0


@dataclass(frozen=True, kw_only=True)
class MemberScores(Scores):
    """The scores of members, [members, prompts * samples]. `reward` is the score; NaN if that or
    the logits are not finite.
    """

    # Whether the text is that of the mirrored member, bool; True without mirrored noise.
    twin: Tensor
    # Whether the text is not the unperturbed model's, bool; False if that model was not asked.
    changed: Tensor
    # Whether the text holds an answer, bool; False if the task cannot tell, or nobody asked.
    answered: Tensor
    # Why the episode ended, int64: a place in STOPS; -1 for completions of one turn.
    stop: Tensor

    def filled(self, samples: int) -> "MemberScores":
        """Return the scores of all members; a row that lacks a reward, or the score of a component,
        has the mean of its prompt's rows of all members. `Rollout.scored` knows the members of one
        chunk alone. samples: rows per prompt of a member.
        """
        pairs = zip(self.components.unbind(2), self.known.unbind(2), strict=True)
        parts = [fill_members(part, ~known, samples) for part, known in pairs]
        return replace(
            self,
            reward=fill_members(self.reward, self.unscored, samples),
            components=torch.stack(parts, 2) if parts else self.components,
        )


@dataclass(frozen=True)
class Tried:
    """The outcome of all members, float64 [members, prompts * samples] each; equal on every rank.

    Attributes:
        rewards: NaN where a row's logits or its reward were not finite. components: the parts of
        the reward by name, where the task has some; watched: those that have no weight in it.
        cut: 1 where a completion was cut off; repeating: 1 where that was while its end repeated
        itself. twins: 1 where the text is that of the mirrored member; None without mirrored noise.
        centre: what the unperturbed model came to; changed: 1 where a text is not its; answered: 1
        where a text holds an answer. None where that model was not asked, or the task cannot tell.
        unscored: 1 where a row has no reward; stops: the shares of how episodes ended.
        offending: this rank's rows that are not finite; shown: those that the run keeps. logged:
        the means of what reward functions have logged, as the event has them.
    """

    rewards: Tensor
    components: dict[str, Tensor]
    cut: Tensor
    repeating: Tensor
    twins: Tensor | None
    changed: Tensor | None = None
    answered: Tensor | None = None
    centre: Centre | None = None
    unscored: Tensor | None = None
    stops: dict[str, float] = field(default_factory=dict)
    watched: frozenset[str] = frozenset()
    offending: list[dict[str, Any]] = field(default_factory=list)
    shown: list[samples.Row] = field(default_factory=list)
    logged: dict[str, Any] = field(default_factory=dict)

    @property
    def finite(self) -> bool:
        """Whether every reward is a number."""
        return bool(torch.isfinite(self.rewards).all())

    @property
    def scored(self) -> Tensor:
        """Return for which rows of a member any member has a reward, bool [prompts * samples]."""
        if self.unscored is None:
            return torch.ones(self.rewards.shape[1], dtype=torch.bool)
        return (self.unscored == 0).any(0)

    @property
    def followed(self) -> dict[str, Tensor]:
        """Return the components that the reward is made of."""
        return {n: part for n, part in self.components.items() if n not in self.watched}

    def shaped(self, cfg: EggrollConfig) -> Tensor:
        """Return the fitness of the members, [members]."""
        counted, samples = self.counted(cfg)
        return fitness(counted.rewards, cfg.fitness, samples, counted.followed)

    def rows(self, fitness: Tensor | None = None) -> list[samples.Row]:
        """Return the rows that the run keeps, with the fitness of their members [members]."""
        values = None if fitness is None else fitness.tolist()
        return [row | {"fitness": values and values[row["member"]]} for row in self.shown]

    def of(self, columns: slice) -> "Tried":
        """Return the same with some of the columns of rewards and components."""
        components = {name: part[:, columns] for name, part in self.components.items()}
        return replace(self, rewards=self.rewards[:, columns], components=components)

    def counted(self, cfg: EggrollConfig) -> tuple["Tried", int]:
        """Return the same with the rewards that count, of the samples and of the components, and
        how many samples of each prompt there are then.
        """
        counted, samples = self, cfg.samples_per_prompt
        if cfg.sample_quantile is not None:
            pick = partial(over_samples, samples=samples, quantile=cfg.sample_quantile)
            components = {name: pick(part) for name, part in self.components.items()}
            counted, samples = replace(self, rewards=pick(self.rewards), components=components), 1
        if cfg.fitness == "component_zscore":
            counted = replace(counted, rewards=equal_parts(counted.followed))
        return counted, samples

    def numbers(self, cfg: EggrollConfig) -> dict[str, Any]:
        """Return what goes into the log."""
        known = self.rewards[:, self.scored] if self.scored.any() else self.rewards
        means = known.mean(1)
        numbers: dict[str, Any] = {
            "reward": known.mean().item(),
            "reward_best": means.max().item(),
            "reward_std": means.std(correction=0).item(),
            "truncated": self.cut.mean().item(),
            "repeating": self.repeating.mean().item(),
        }
        numbers |= self.logged
        if self.components:
            numbers["components"] = {n: part.mean().item() for n, part in self.components.items()}
        if self.unscored is not None and self.unscored.any():
            numbers["unscored"] = self.unscored.mean().item()
        if self.stops:
            numbers["stops"] = self.stops
        if self.twins is not None:
            numbers["identical_pairs"] = self.twins.mean().item()
        if self.changed is not None and self.centre is not None:
            numbers["changed"] = self.changed.mean().item()
            numbers["reward_centre"] = self.centre.reward
        if self.answered is not None:
            numbers["answered"] = self.answered.mean().item()
        return numbers


class Population:
    """Samples and scores all members of a step, in chunks that the ranks share out."""

    def __init__(self, parts: Parts, noise: Noise, cfg: EggrollConfig) -> None:
        self.parts, self.noise, self.cfg = parts, noise, cfg
        parts.engine.limit.floor = cfg.pair
        ranks = parts.context.world_size
        self.state = count_state(parts, noise, cfg)
        members = len(self._chunks()[0])
        numbers = sum(4 * address.blocks for address in noise.addresses)
        each = float(fsdp.dtype(parts.lm.model).itemsize * numbers)  # of a member

        def drawn(rows: int) -> float:
            """Return the bytes of the noise: of two chunks, as the last one may be shorter."""
            return each * min(cfg.members, 2 * len(share_out(cfg, rows, ranks)[0]))

        self.memory = RolloutMemory(parts, self.state, drawn, members, cfg.rows_per_member)
        self._agree()
        episodes = len(self._chunks()[0]) * cfg.rows_per_member
        parts.check_sessions(episodes, "algo.members, algo.prompts_per_step or algo.rollout_rows")
        self.perturbed = sum(math.prod(address.shape) for address in noise.addresses)
        if ranks > len(self._chunks()) and parts.context.main:
            log.warning(
                "%d ranks share %d forward(s) per step, so some are idle. Use more members, or"
                " fewer ranks.",
                ranks,
                len(self._chunks()),
            )

    def try_out(
        self,
        examples: list[Example],
        draw: int,
        sigma: float,
        step: Any,
        closely: bool = False,
        centre: Centre | None = None,
    ) -> Tried:
        """Sample and score every member.

        Args: step: a Step, or what takes the same calls outside of one; closely: look at the
        unperturbed model too; centre: what it came to, None = ask it, as an evaluation.
        """
        cfg, context = self.cfg, self.parts.context
        features = TaskFeatures(self.parts.scorer.task)
        components: list[str] = list(features.components or features.shown)
        judged: list[MemberScores] = []
        places: list[int] = []  # the members of this rank
        generated, offending, shown = 0, [], []
        requests = self.ask(examples, step.index)
        self._agree()
        chunks = context.share(self._chunks())  # before memory can run out on one rank alone
        with fsdp.gathered(self.parts.lm.model):
            if closely and centre is None:
                with step.untimed():
                    centre = self.ask_centre(examples, requests)
            for members in chunks:
                drawn = partial(self.sample, members, draw=draw, sigma=sigma)
                rollout = self.parts.rollouter.roll_out(
                    examples, requests, step.phase, draw=drawn, step=step.index
                )
                generated += rollout.generated
                with step.phase("reward"):
                    judged.append(self._judge(rollout, components, centre if closely else None))
                    places += members
                    for row, described in rollout.find_offending(self.parts.task).items():
                        member = members[row // cfg.rows_per_member]
                        offending.append({"member": member, **described})
                with step.phase("keep"):
                    shown += self._describe_kept(rollout, members)
        with step.phase("exchange"):
            scores = MemberScores.gather(judged, places, context)
            generated = sum(context.gather_objects(generated))
        step.used(tokens=generated, samples=scores.reward.numel())
        scores = scores.filled(cfg.samples_per_prompt)
        parts = scores.components.unbind(2)
        stops = {why: (scores.stop == place).double() for place, why in enumerate(STOPS)}
        return Tried(
            rewards=scores.reward,
            components={n: p.contiguous() for n, p in zip(components, parts, strict=True)},
            cut=(~scores.finished).double(),
            repeating=scores.repeating.double(),
            twins=scores.twin.double() if cfg.mirrored else None,
            changed=scores.changed.double() if centre else None,
            answered=scores.answered.double() if centre and centre.answered is not None else None,
            centre=centre,
            unscored=scores.unscored.double(),
            stops={why: ended.mean().item() for why, ended in stops.items() if ended.any()},
            watched=frozenset(n for n, w in features.weights.items() if not w),
            offending=offending,
            shown=shown,
            logged=self.parts.scorer.take_logged(context),
        )

    def ask_centre(self, examples: list[Example], requests: Requests) -> Centre:
        """Return what the unperturbed model completes with the draws that every member has, and
        earns. Each rank asks it, and all take what rank 0 has: an engine or an environment may say
        something else the second time.
        """
        rollout = self.parts.rollouter.roll_out(examples, requests, step=requests.draw)
        answered = self._find_answers(rollout.texts)
        centre = Centre(
            texts=rollout.texts,
            rewards=torch.tensor(rollout.scored.rewards, dtype=torch.float64),
            scored=~torch.tensor(rollout.scored.unscored),
            cut=(~rollout.finished).double(),
            answered=torch.tensor(answered, dtype=torch.float64) if answered else None,
            generated=rollout.generated,
        )
        return self.parts.context.gather_objects(centre if self.parts.context.main else None)[0]

    def _judge(
        self, rollout: Rollout, components: list[str], centre: Centre | None
    ) -> MemberScores:
        """Return the scores of some members. components: the names of those that are wanted;
        centre: what the unperturbed model came to, None = do not compare with it.
        """
        texts, scores = rollout.texts, rollout.scores(components)
        each, pair = self.cfg.rows_per_member, self.cfg.pair
        # The mirrored member, or the member itself without mirrored noise.
        twins = [(row // each ^ (pair - 1)) * each + row % each for row in range(len(texts))]
        changed = answered = [False] * len(texts)
        if centre is not None:
            changed = [text != centre.texts[row % each] for row, text in enumerate(texts)]
            if centre.answered is not None:
                answered = self._find_answers(texts)
        stops = [STOPS.index(why) for why in rollout.stops] or [-1] * len(texts)
        same = [text == texts[twin] for text, twin in zip(texts, twins, strict=True)]
        reward = scores.score.masked_fill(~torch.tensor(rollout.sound), math.nan)
        scores = replace(scores, reward=reward)
        return MemberScores(
            **vars(scores),
            twin=torch.tensor(same),
            changed=torch.tensor(changed),
            answered=torch.tensor(answered),
            stop=torch.tensor(stops),
        ).group(each)

    def _describe_kept(self, rollout: Rollout, members: range) -> list[samples.Row]:
        """Describe the rows that the run keeps."""
        cfg, run = self.cfg, self.parts.run
        each, prompts = cfg.samples_per_prompt, samples.kept(run, cfg.prompts_per_step)
        everything = run.completions == "all"
        most = cfg.members if everything else max(cfg.pair, samples.ROWS // each)
        shown = []
        for i, member in enumerate(members[: max(0, most - members.start)]):
            first = i * cfg.rows_per_member
            rows = rollout.describe(range(first, first + prompts * each), self.parts.task)
            sign = (-1) ** member if cfg.mirrored else 1
            shown += [{**row, "member": member, "sign": sign} for row in rows]
        return shown

    def _find_answers(self, texts: list[str]) -> list[bool]:
        """Return for each text whether the task finds an answer in it; empty where the task does
        not look for one.
        """
        read = TaskFeatures(self.parts.task).answer
        return [] if read is None else [read(text) is not None for text in texts]

    def ask(self, examples: list[Example], step: int) -> Requests:
        """Return the request for all that a member is to complete in a step. Draws are keyed by an
        example's place in it: one that comes twice gets other samples the second time.
        """
        each, places = self.cfg.samples_per_prompt, list(range(len(examples)))
        return self.parts.rollouter.request(examples, samples=each, draw=step, ids=places)

    def sample(self, members: range, requests: Requests, draw: int, sigma: float) -> Completions:
        """Sample `members` side by side; in several parts where memory has just run out."""
        asked_for = self.parts.engine.limit.rows

        def attempt(rows: int) -> Completions:
            parts = []
            if rows < asked_for:
                self.noise.forget()  # what it takes for forwards that did not fit
            for part in split(members, self.cfg, rows):
                with self.noise.members(draw, part, sigma) as population:
                    parts.append(
                        self.parts.rollouter.sample(replace(requests, population=population))
                    )
            return Completions.join(parts)

        return self.parts.engine.limit.run(attempt)

    def rehearse(self) -> None:
        """Sample the first chunk of a step and throw it away: compilation happens here."""
        examples = self.parts.examples.order.take(0, self.cfg.prompts_per_step)
        with fsdp.gathered(self.parts.lm.model):
            self.sample(self._chunks()[0], self.ask(examples, 0), 0, 1e-3)

    def plan(self) -> tuple[dict[str, str], Memory]:
        """Say what a step will do, with sizes, and what it takes."""
        cfg, parts, ranks = self.cfg, self.parts, self.parts.context.world_size
        chunks, rows = self._chunks(), parts.engine.limit.rows
        used = min(rows, len(chunks[0]) * cfg.rows_per_member)
        sampling = self.memory.sampling_bytes(used, cfg.samples_per_prompt)
        memory = Memory(self.state, sampling, used, self.memory.fixed + sampling)
        facts, heat = describe(parts), cfg.sampling.temperature
        trunk = self.noise.trunk
        above = f", above block {trunk}" if trunk else ""
        if trunk and not parts.engine.separate and fsdp.of(parts.lm.model) is None:
            above += ", up to which members share a prefill"
        drawn = f"sampled (temperature {heat:g})" if heat else "greedy"
        length = describe_length(parts, cfg.steps, "steps")
        lr = f", lr {show(cfg.lr)}" if cfg.method != "randopt" else ""
        rank = f", rank {cfg.rank}" if self.noise.is_lowrank else ""
        rows_of_plan = {
            "algorithm": f"{cfg.method}, {length}{rank}, sigma {show(cfg.sigma)}{lr}"
            f" ({describe_source(parts.run)})",
            **facts,
            "model": f"{facts['model']}, {self.perturbed / 1e6:.2f}M perturbed"
            f" ({', '.join(self.noise.kinds)}){above}",
            "population": f"{cfg.members} members x {cfg.prompts_per_step} prompts x"
            f" {cfg.samples_per_prompt} samples, {cfg.sampling.max_new_tokens} new tokens at most;"
            f" rewards are of {drawn} completions",
            "forwards": f"{len(chunks)} per step, {used} rows each (algo.rollout_rows={rows}),"
            f" {-(-len(chunks) // ranks)} per rank",
            **memory.describe(parts.lm.model),
        }
        return rows_of_plan, memory

    def _agree(self) -> None:
        """Take the fewest rows of all ranks, as members are shared out by them. Ranks have unlike
        memory, or one has run out of it, among members, in an evaluation or wherever else.
        """
        limit = self.parts.engine.limit
        limit.rows = min(self.parts.context.gather_objects(limit.rows))

    def _chunks(self) -> list[range]:
        ranks, rows = self.parts.context.world_size, self.parts.engine.limit.rows
        return share_out(self.cfg, rows, ranks)


def fill_members(values: Tensor, lacking: Tensor, samples: int) -> Tensor:
    """Return values [members, prompts * samples]; one that is lacking is replaced by the mean of
    those of its prompt, of all members (common.scoring.fill).
    """
    if not lacking.any():
        return values
    pairs = zip(values.flatten().tolist(), lacking.flatten().tolist(), strict=True)
    known = [None if lacks else value for value, lacks in pairs]
    prompts = [row // samples for row in range(values.shape[1])] * len(values)
    return torch.tensor(fill(known, prompts), dtype=values.dtype).view_as(values)


def show(value: float | str) -> str:
    """Return a setting that may be auto as the plan has it."""
    return value if isinstance(value, str) else f"{value:g}"


def share_out(cfg: EggrollConfig, rows: int, ranks: int) -> list[range]:
    """Return the members of each forward: as many as `rows` holds, and few enough that every rank
    has a forward.

    Chunks change the result by float rounding alone; where they are the same on one rank and on
    two, as when one rank makes two forwards of equal size, a CPU gives the same bits.
    """
    share = -(-cfg.members // (ranks * cfg.pair)) * cfg.pair
    return split(range(cfg.members), cfg, min(rows, share * cfg.rows_per_member))


def split(members: range, cfg: EggrollConfig, rows: int) -> list[range]:
    """Cut `members` into parts of as many whole pairs as `rows` holds, one pair at least."""
    size = max(cfg.pair, rows // cfg.rows_per_member // cfg.pair * cfg.pair)
    return [members[start : start + size] for start in range(0, len(members), size)]
