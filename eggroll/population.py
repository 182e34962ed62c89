"""The population of a step: perturbed copies of the model sample side by side and are scored."""

import logging
import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from common.answers import GivenExamples
from common.device import dtype_of
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
from eggroll.likelihood import Likelihood
from eggroll.measure import Measured, find_measure, gather, leave_out
from eggroll.noise import Noise
from eggroll.weights import count_state

log = logging.getLogger("clutch")


@dataclass(frozen=True)
class Centre:
    """The completions of the unperturbed model for a step's prompts.

    Attributes:
        texts: the completions.
        rewards: float64 [rows].
        scored: whether a completion has a reward, bool [rows].
        cut: 1 if a completion was cut off, else 0, float64 [rows].
        answered: 1 if a completion contains an answer, else 0, float64 [rows]; None if the task has
            no method `answer`.
        generated: the number of generated tokens.
    """

    texts: list[str]
    rewards: Tensor
    scored: Tensor
    cut: Tensor
    answered: Tensor | None
    generated: int

    @property
    def reward(self) -> float:
        """The mean of the rewards; 0 if no completion has one."""
        return self.rewards[self.scored].mean().item() if self.scored.any() else 0.0


@dataclass(frozen=True, kw_only=True)
class MemberScores(Scores):
    """The scores of members, [members, prompts * samples]. `reward` is the score, or NaN if the
    score or the logits are not finite.
    """

    # Whether the text equals the mirrored member's, bool; True without mirrored noise.
    twin: Tensor
    # Whether the text differs from the unperturbed model's, bool; False if that was not sampled.
    changed: Tensor
    # Whether the text contains an answer, bool; False if the task cannot tell, or if the
    # unperturbed model was not sampled.
    answered: Tensor
    # Why the episode ended, int64: an index of STOPS; -1 for completions of one turn.
    stop: Tensor

    def filled(self, samples: int) -> "MemberScores":
        """Return the scores with missing values filled in: a row without a reward, or without the
        score of a component, gets the mean of all members' rows with the same prompt.
        (`Rollout.scored` has filled them from the members of one chunk only.)

        Args: samples: rows per prompt of a member.
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
    """The outcome of all members, the same on every rank except `offending` and `shown`. Tensors
    are float64 [members, prompts * samples].

    Attributes:
        rewards: NaN if the logits or the reward of a row were not finite.
        components: the components of the reward by name; empty if the task has none.
        cut: 1 if a completion was cut off, else 0.
        repeating: 1 if a completion was cut off while its end repeated itself, else 0.
        twins: 1 if the text equals the mirrored member's, else 0; None without mirrored noise.
        changed: 1 if the text differs from the unperturbed model's, else 0; None if that model was
            not sampled.
        answered: 1 if the text contains an answer, else 0; None if the unperturbed model was not
            sampled, or if the task cannot tell.
        centre: the outcome of the unperturbed model; None if it was not sampled.
        unscored: 1 if a row has no reward, else 0; None = all rows have one.
        stops: the share of episodes by the reason that ended them.
        watched: the names of the components with the weight 0 in the reward.
        offending: this rank's rows whose reward or logits are not finite.
        shown: this rank's rows that the run keeps.
        logged: the means of the values that reward functions have logged, as an event has them.
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
    # The fitness before it is shaped, [members], if it is not a mean of rewards; NaN = not known.
    measures: Tensor | None = None

    @property
    def finite(self) -> bool:
        """Whether all rewards are finite."""
        return bool(torch.isfinite(self.rewards).all())

    @property
    def scored(self) -> Tensor:
        """Whether at least one member has a reward, per row of a member, bool [prompts *
        samples].
        """
        if self.unscored is None:
            return torch.ones(self.rewards.shape[1], dtype=torch.bool)
        return (self.unscored == 0).any(0)

    @property
    def followed(self) -> dict[str, Tensor]:
        """The components that have a weight in the reward."""
        return {n: part for n, part in self.components.items() if n not in self.watched}

    def shaped(self, cfg: EggrollConfig) -> Tensor:
        """Return the fitness of the members, [members]."""
        counted, samples = self.counted(cfg)
        return fitness(counted.rewards, cfg.fitness, samples, counted.followed)

    def rows(self, fitness: Tensor | None = None) -> list[samples.Row]:
        """Return the rows that the run keeps, each with its member's fitness.

        Args: fitness: [members]; None = the rows have no fitness.
        """
        values = None if fitness is None else fitness.tolist()
        return [row | {"fitness": values and values[row["member"]]} for row in self.shown]

    def of(self, columns: slice) -> "Tried":
        """Return this outcome with the given columns of rewards and components only."""
        components = {name: part[:, columns] for name, part in self.components.items()}
        return replace(self, rewards=self.rewards[:, columns], components=components)

    def counted(self, cfg: EggrollConfig) -> tuple["Tried", int]:
        """Return the outcome with the rewards that fitness is computed from, and its number of
        samples per prompt: with algo.sample_quantile a quantile of each prompt's samples, with
        component_zscore the sum of the standardised components, and if the fitness is a measure one
        column, the measure.
        """
        counted, samples = self, cfg.samples_per_prompt
        if self.measures is not None:
            alone = leave_out(self.measures, cfg.mirrored)[:, None]
            return replace(self, rewards=alone, components={}), 1
        if cfg.sample_quantile is not None:
            pick = partial(over_samples, samples=samples, quantile=cfg.sample_quantile)
            components = {name: pick(part) for name, part in self.components.items()}
            counted, samples = replace(self, rewards=pick(self.rewards), components=components), 1
        if cfg.fitness == "component_zscore":
            counted = replace(counted, rewards=equal_parts(counted.followed))
        return counted, samples

    def numbers(self, cfg: EggrollConfig) -> dict[str, Any]:
        """Return the outcome's numbers for the event of the step."""
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
        if self.measures is not None:
            finite = self.measures[torch.isfinite(self.measures)]
            if len(finite):
                numbers["measure"] = finite.mean().item()
                numbers["measure_std"] = finite.std(correction=0).item()
            if out := 1 - len(finite) / len(self.measures):
                numbers["unmeasured"] = out
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


class PopulationCollector:
    """Samples and scores all members of a step, in chunks that are divided among the ranks."""

    def __init__(self, parts: Parts, noise: Noise, cfg: EggrollConfig) -> None:
        self.parts, self.noise, self.cfg = parts, noise, cfg
        self.measured: Measured | None = None
        if cfg.fitness_of == "measure":
            score = find_measure(parts.task, cfg.measure)
            self.measured = Measured(score, f"algo.measure={cfg.measure or 'null'}")
        self.likelihood: Likelihood | None = None
        if cfg.fitness_of == "likelihood":
            per_token = cfg.likelihood == "token"
            pad_id = parts.lm.tokenizer.pad_token_id
            self.likelihood = Likelihood(parts.lm.model, noise, pad_id, per_token)
        ranks = parts.context.world_size
        self.state = count_state(parts, noise, cfg)
        members = len(self._chunks()[0])
        floats = sum(4 * address.blocks for address in noise.addresses)
        each = float(dtype_of(parts.lm.model).itemsize * floats)  # bytes of a member's noise

        def drawn(rows: int) -> float:
            """Return the bytes of the noise of two chunks, because the last may be shorter."""
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

        Args:
            examples: the prompts, the same for every member.
            draw: the number of the noise.
            sigma: the standard deviation of the noise.
            step: the Step that counts tokens and times; outside of a step, an object with the same
                methods.
            closely: whether to compare the members with the unperturbed model.
            centre: the unperturbed model's outcome; None = sample it if `closely`, without counting
                the time as training.
        """
        cfg, context = self.cfg, self.parts.context
        if self.likelihood is not None:
            return self._try_answers(self.likelihood, examples, draw, sigma, step)
        features = TaskFeatures(self.parts.scorer.task)
        components: list[str] = list(features.components or features.shown)
        judged: list[MemberScores] = []
        places: list[int] = []  # the members of this rank
        measures: list[float] = []  # theirs
        generated, offending, shown = 0, [], []
        requests = self.ask(examples, step.index)
        self._agree()
        chunks = context.share(self._chunks())  # before memory can run out on one rank alone
        with self.parts.lm.sharding.gathered():
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
                    if self.measured is not None:
                        measures += self.measured.members(rollout, cfg.samples_per_prompt)
                    for row, described in rollout.find_offending(self.parts.task).items():
                        member = members[row // cfg.rows_per_member]
                        offending.append({"member": member, **described})
                with step.phase("keep"):
                    shown += self._describe_kept(rollout, members)
        with step.phase("exchange"):
            scores = MemberScores.gather(judged, places, context)
            generated = sum(context.gather_objects(generated))
            own = torch.tensor(measures, dtype=torch.float64)
            whole = gather(own, places, context) if self.measured is not None else None
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
            measures=whole,
        )

    def _try_answers(
        self, likelihood: Likelihood, examples: list[Example], draw: int, sigma: float, step: Any
    ) -> Tried:
        """Return the log-probabilities of the examples' answers under every member, as rewards. No
        member samples.
        """
        cfg, context, given = self.cfg, self.parts.context, self.parts.examples
        assert isinstance(given, GivenExamples)
        trees = [given.trees[example.id] for example in examples]
        self._agree()
        rows = min(self.parts.engine.row_limit.rows, likelihood.most_rows(trees))
        mine = context.share(share_out(cfg, rows, context.world_size))
        places = [member for members in mine for member in members]

        def attempt(rows: int) -> list[Tensor]:
            parts = [part for members in mine for part in split(members, cfg, rows)]
            return [likelihood.score(trees, part, draw, sigma) for part in parts]

        with step.phase("forward"), self.parts.lm.sharding.gathered():
            scored = self.parts.engine.row_limit.run(attempt)
        with step.phase("exchange"):
            mine_scored = torch.cat([*scored, torch.zeros(0, len(trees), dtype=torch.float64)])
            rewards = gather(mine_scored, places, context)
        step.trained(cfg.members * sum(tree.targets for tree in trees))
        none = torch.zeros(cfg.members, len(trees), dtype=torch.float64)
        broken = [
            {"id": example.id, "prompt": self.parts.task.prompt(example), "answer": example.answer}
            for place, example in enumerate(examples)
            if not torch.isfinite(rewards[:, place]).all()
        ]
        return Tried(
            rewards=rewards,
            components={},
            cut=none,
            repeating=none,
            twins=None,
            offending=broken if context.main else [],
        )

    def ask_centre(self, examples: list[Example], requests: Requests) -> Centre:
        """Return the outcome of the unperturbed model, sampled with the same random draws as every
        member. Every rank samples it, and all take the outcome of rank 0, because an engine or an
        environment may answer differently the second time.
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
        """Return the scores of some members.

        Args:
            components: the names of the components.
            centre: the outcome of the unperturbed model; None = do not compare with it.
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
        each, prompts = cfg.samples_per_prompt, samples.kept_prompts(run, cfg.prompts_per_step)
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
        """Return whether the task finds an answer in each text; empty if the task has no method
        `answer`.
        """
        read = TaskFeatures(self.parts.task).answer
        return [] if read is None else [read(text) is not None for text in texts]

    def ask(self, examples: list[Example], step: int) -> Requests:
        """Return the request for all completions of a member in a step. Random draws are keyed by
        an example's place in the step, so that an example that comes twice gets other samples the
        second time.
        """
        each, places = self.cfg.samples_per_prompt, list(range(len(examples)))
        return self.parts.rollouter.request(examples, samples=each, draw=step, ids=places)

    def sample(self, members: range, requests: Requests, draw: int, sigma: float) -> Completions:
        """Sample `members` side by side; in smaller parts after the memory has run out."""
        asked_for = self.parts.engine.row_limit.rows

        def attempt(rows: int) -> Completions:
            parts = []
            if rows < asked_for:
                self.noise.forget()  # free the buffers of the forwards that did not fit
            for part in split(members, self.cfg, rows):
                with self.noise.members(draw, part, sigma) as population:
                    parts.append(
                        self.parts.rollouter.sample(replace(requests, population=population))
                    )
            return Completions.join(parts)

        return self.parts.engine.row_limit.run(attempt)

    def rehearse(self) -> None:
        """Sample the first chunk of a step and discard the completions, so that compilation happens
        here.
        """
        examples = self.parts.examples.order.take(0, self.cfg.prompts_per_step)
        with self.parts.lm.sharding.gathered():
            self.sample(self._chunks()[0], self.ask(examples, 0), 0, 1e-3)

    def plan(self) -> tuple[dict[str, str], Memory]:
        """Return the lines of the plan about a step, and the memory that a step needs."""
        cfg, parts, ranks = self.cfg, self.parts, self.parts.context.world_size
        chunks, rows = self._chunks(), parts.engine.row_limit.rows
        used = min(rows, len(chunks[0]) * cfg.rows_per_member)
        sampling = self.memory.sampling_bytes(used, cfg.samples_per_prompt)
        memory = Memory(self.state, sampling, used, self.memory.fixed + sampling)
        facts, heat = describe(parts), cfg.sampling.temperature
        trunk = self.noise.trunk
        above = f", above block {trunk}" if trunk else ""
        if trunk and not parts.engine.separate and not parts.lm.sharding.shared:
            above += ", up to which members share a prefill"
        drawn = f"sampled (temperature {heat:g})" if heat else "greedy"
        of = ""
        if cfg.fitness_of == "measure":
            of = f"; the fitness of a member is {cfg.measure or 'the measure'} of all its answers"
        if cfg.fitness_of == "likelihood":
            of = f"; the fitness is the log-probability of given answers, per {cfg.likelihood}"
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
            f" rewards are of {drawn} completions{of}",
            "forwards": f"{len(chunks)} per step, {used} rows each (algo.rollout_rows={rows}),"
            f" {-(-len(chunks) // ranks)} per rank",
            **memory.describe(parts.lm.model),
        }
        return rows_of_plan, memory

    def _agree(self) -> None:
        """Set every rank's limit of rows to the lowest of all ranks, because the limit decides how
        members are divided. Ranks may have different memory, and one may have run out of it since.
        """
        row_limit = self.parts.engine.row_limit
        row_limit.lower(min(self.parts.context.gather_objects(row_limit.rows)))

    def _chunks(self) -> list[range]:
        ranks, rows = self.parts.context.world_size, self.parts.engine.row_limit.rows
        return share_out(self.cfg, rows, ranks)


def fill_members(values: Tensor, lacking: Tensor, samples: int) -> Tensor:
    """Return values [members, prompts * samples] in which a missing value is replaced by the mean
    of the prompt's other values, over all members (common.scoring.fill).

    Args:
        lacking: whether a value is missing, bool like `values`.
        samples: samples per prompt.
    """
    if not lacking.any():
        return values
    pairs = zip(values.flatten().tolist(), lacking.flatten().tolist(), strict=True)
    known = [None if lacks else value for value, lacks in pairs]
    prompts = [row // samples for row in range(values.shape[1])] * len(values)
    return torch.tensor(fill(known, prompts), dtype=values.dtype).view_as(values)


def show(value: float | str) -> str:
    """Return the text of a setting that may be "auto", for the plan."""
    return value if isinstance(value, str) else f"{value:g}"


def share_out(cfg: EggrollConfig, rows: int, ranks: int) -> list[range]:
    """Return the members of each forward: as many as `rows` rows allow, but few enough that every
    rank has a forward.

    Args:
        rows: the most rows of a forward.
        ranks: the number of ranks.

    Chunks change the result by float rounding only. If one rank and two ranks have the same chunks,
    such as one rank with two forwards of equal size, a CPU gives the same bits.
    """
    share = -(-cfg.members // (ranks * cfg.pair)) * cfg.pair
    return split(range(cfg.members), cfg, min(rows, share * cfg.rows_per_member))


def split(members: range, cfg: EggrollConfig, rows: int) -> list[range]:
    """Split `members` into parts of as many whole pairs as `rows` rows allow, at least one pair
    each.
    """
    size = max(cfg.pair, rows // cfg.rows_per_member // cfg.pair * cfg.pair)
    return [members[start : start + size] for start in range(0, len(members), size)]
