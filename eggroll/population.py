"""The population of a step: perturbed copies of the model sample side by side and are scored."""

import logging
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from common.budget import describe_length
from common.distributed import fsdp
from common.lm import LM
from common.recipe import describe_source
from common.report import samples
from common.sampling.engine import Completions, Requests
from common.tasks import Example
from common.tasks.scoring import Scored
from eggroll.config import EggrollConfig
from eggroll.fitness import equal_parts, fitness, over_samples
from eggroll.noise import Noise
from eggroll.weights import count_state

log = logging.getLogger("clutch")


@dataclass(frozen=True)
class Centre:
    """The unperturbed model's completions of a step's prompts: their rewards, float64 [rows], and
    the shares of them that are cut off, and that hold an answer.
    """

    texts: list[str]
    rewards: Tensor
    cut: float
    answered: float | None
    generated: int


@dataclass(frozen=True)
class Tried:
    """The outcome of all members, float64 [members, prompts * samples] each; equal on every rank.

    Attributes:
        rewards: NaN where a row's logits or its reward were not finite. components: the parts of
        the reward by name, where the task has some. cut: 1 where a completion was cut off;
        repeating: 1 where that was while its end repeated itself. twins: 1 where the text is that
        of the mirrored member; None without mirrored noise.
        centre: what the unperturbed model came to; changed: 1 where a text is not its; answered: 1
        where a text holds an answer. None where that model was not asked, or the task cannot tell.
    """

    rewards: Tensor
    components: dict[str, Tensor]
    cut: Tensor
    repeating: Tensor
    twins: Tensor | None
    changed: Tensor | None = None
    answered: Tensor | None = None
    centre: Centre | None = None

    @property
    def finite(self) -> bool:
        """Whether every reward is a number."""
        return bool(torch.isfinite(self.rewards).all())

    def shaped(self, cfg: EggrollConfig) -> Tensor:
        """Return the fitness of the members, [members]."""
        counted, samples = self.counted(cfg)
        return fitness(counted.rewards, cfg.fitness, samples, counted.components)

    def of(self, columns: slice) -> "Tried":
        """Return the same with some of the columns of rewards and components."""
        components = {name: part[:, columns] for name, part in self.components.items()}
        return replace(self, rewards=self.rewards[:, columns], components=components)

    def counted(self, cfg: EggrollConfig) -> tuple["Tried", int]:
        """Return the same with the rewards that count, of the samples and of the components, and
        how many samples of each prompt there are then.
        """
        found, samples = self, cfg.samples_per_prompt
        if cfg.sample_quantile is not None:
            pick = partial(over_samples, samples=samples, quantile=cfg.sample_quantile)
            components = {name: pick(part) for name, part in self.components.items()}
            found, samples = replace(self, rewards=pick(self.rewards), components=components), 1
        if cfg.fitness == "component_zscore":
            found = replace(found, rewards=equal_parts(found.components))
        return found, samples

    def numbers(self, cfg: EggrollConfig) -> dict[str, Any]:
        """Return what goes into the log."""
        means = self.rewards.mean(1)
        found: dict[str, Any] = {
            "reward": self.rewards.mean().item(),
            "reward_best": means.max().item(),
            "reward_std": means.std(correction=0).item(),
            "truncated": self.cut.mean().item(),
            "repeating": self.repeating.mean().item(),
        }
        if self.components:
            found["components"] = {n: part.mean().item() for n, part in self.components.items()}
        if self.twins is not None:
            found["identical_pairs"] = self.twins.mean().item()
        if self.changed is not None and self.centre is not None:
            found["changed"] = self.changed.mean().item()
            found["reward_centre"] = self.centre.rewards.mean().item()
        if self.answered is not None:
            found["answered"] = self.answered.mean().item()
        return found


class Population:
    """Samples and scores all members of a step, in chunks that the ranks share out."""

    def __init__(self, lm: LM, noise: Noise, cfg: EggrollConfig) -> None:
        self.lm, self.noise, self.cfg = lm, noise, cfg
        self.offending: list[dict[str, Any]] = []  # this rank's rows of the step, not finite
        self.shown: list[samples.Row] = []  # those that the run keeps
        lm.engine.limit.floor = cfg.pair
        ranks = lm.context.world_size
        self.state = count_state(lm, noise, cfg)
        directions = len(self._chunks()[0]) // cfg.pair
        drawn = 4.0 * sum(4 * a.blocks for a in noise.addresses) * directions
        lm.fit_rollout(self.state, drawn, len(self._chunks()[0]), cfg.rows_per_member)
        self._agree()
        self.perturbed = sum(math.prod(address.shape) for address in noise.addresses)
        if ranks > len(self._chunks()) and lm.context.main:
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
        """Sample and score every member. `offending` then describes the rows of this rank that are
        not finite, and `shown` those that the run keeps.

        Args: step: common.step.Step, or what takes the same calls outside of one; closely: look at
        the unperturbed model too; centre: what it came to, None = ask it, as an evaluation.
        """
        cfg, context = self.cfg, self.lm.context
        repeated = [example for example in examples for _ in range(cfg.samples_per_prompt)]
        # What Tried has of each row, in its order; 0 for the members of other ranks.
        names = list(getattr(self.lm.scorer.task, "components", None) or {})
        found = torch.zeros(6 + len(names), cfg.members, cfg.rows_per_member, dtype=torch.float64)
        generated, self.offending, self.shown = 0, [], []
        requests = self.request(examples, step.index)
        self._agree()
        mine = context.share(self._chunks())
        with fsdp.gathered(self.lm.model):
            if closely and centre is None:
                with step.untimed():
                    centre = self.ask_centre(requests, repeated)
            for members in mine:
                with step.phase("rollout"):
                    made = self.sample(members, requests, draw, sigma)
                    texts = [text for part in made for text in part.texts(self.lm.tokenizer)]
                    generated += sum(part.generated for part in made)
                with step.phase("reward"):
                    asked = repeated * len(members)
                    scored = self.lm.scorer.submit(asked, texts).result()
                    broken = [bad for part in made for bad in part.broken.tolist()]
                    self._mark(scored.rewards, broken, texts, asked, members)
                    cut = [not done for part in made for done in part.finished.tolist()]
                    loops = [again for part in made for again in part.repeating()]
                    plain = centre.texts * len(members) if centre else texts
                    changed = [text != other for text, other in zip(texts, plain, strict=True)]
                    whole = self._answered(texts) if closely else cut
                    rows = [scored.rewards, cut, loops, self._compare_pairs(texts), changed, whole]
                    rows += [scored.components[name] for name in names]
                    here = torch.tensor(rows, dtype=torch.float64).unflatten(1, (len(members), -1))
                    found[:, members.start : members.stop] = here
                with step.phase("keep"):
                    self._keep(members, asked, texts, made, scored)
        with step.phase("exchange"):
            found, generated = self._exchange(found, generated)
        step.used(tokens=generated, samples=found[0].numel())
        rewards, cut, loops, twins, changed, whole, *parts = found
        return Tried(
            rewards=rewards,
            components=dict(zip(names, parts, strict=True)),
            cut=cut,
            repeating=loops,
            twins=twins if cfg.mirrored else None,
            changed=changed if centre else None,
            answered=whole if centre and centre.answered is not None else None,
            centre=centre,
        )

    def rows(self, fitness: Tensor | None = None) -> list[samples.Row]:
        """Return the rows that the run keeps, with the fitness of their members [members]."""
        values = None if fitness is None else fitness.tolist()
        return [row | {"fitness": values and values[row["member"]]} for row in self.shown]

    def _keep(
        self,
        members: range,
        asked: list[Example],
        texts: list[str],
        made: list[Completions],
        scored: Scored,
    ) -> None:
        """Put the rows of some members that the run keeps into `shown`."""
        cfg, run, each = self.cfg, self.lm.run, self.cfg.samples_per_prompt
        prompts = samples.kept(run, cfg.prompts_per_step)
        everything = run.completions == "all"
        most = cfg.members if everything else max(cfg.pair, samples.ROWS // each)
        lengths = [length for part in made for length in part.lengths.tolist()]
        cut = [not done for part in made for done in part.finished.tolist()]
        for i, member in enumerate(members[: max(0, most - members.start)]):
            for place in range(prompts * each):
                row = i * cfg.rows_per_member + place
                self.shown.append(
                    {
                        **samples.describe(self.lm.task, asked[row], place // each),
                        "member": member,
                        "sample": place % each,
                        "sign": (-1) ** member if cfg.mirrored else 1,
                        "completion": texts[row],
                        "tokens": lengths[row],
                        "cut": cut[row],
                        "reward": scored.rewards[row],
                        "components": {n: v[row] for n, v in scored.components.items()} or None,
                    }
                )

    def ask_centre(self, requests: Requests, repeated: list[Example]) -> Centre:
        """Return what the unperturbed model completes with the draws that every member has, and
        earns; each rank asks it.
        """
        made = self.lm.generate(requests)
        texts = made.texts(self.lm.tokenizer)
        rewards = self.lm.scorer.submit(repeated, texts).result().rewards
        cut = 1 - made.finished.double().mean().item()
        known = getattr(self.lm.task, "answer", None) is not None
        answered = sum(self._answered(texts)) / len(texts) if known else None
        return Centre(
            texts, torch.tensor(rewards, dtype=torch.float64), cut, answered, made.generated
        )

    def _answered(self, texts: list[str]) -> list[bool]:
        """Return for each text whether the task finds an answer in it, if it looks for one."""
        read = getattr(self.lm.task, "answer", None)
        return [read is not None and read(text) is not None for text in texts]

    def _mark(
        self,
        rewards: list[float],
        broken: list[bool],
        texts: list[str],
        asked: list[Example],
        members: range,
    ) -> None:
        """Put NaN for rewards whose row says nothing, and keep those rows in `offending`."""
        for row, (score, bad) in enumerate(zip(rewards, broken, strict=True)):
            if bad or not math.isfinite(score):
                found = self.lm.offending_row(asked[row], texts[row], score, bad)
                member = members[row // self.cfg.rows_per_member]
                self.offending.append({"member": member, **found})
                rewards[row] = math.nan

    def _compare_pairs(self, texts: list[str]) -> list[bool]:
        """Return for each text whether it is that of the mirrored member, or of the member itself
        without mirrored noise.
        """
        each, pair = self.cfg.rows_per_member, self.cfg.pair
        return [
            text == texts[(row // each ^ (pair - 1)) * each + row % each]
            for row, text in enumerate(texts)
        ]

    def request(self, examples: list[Example], step: int) -> Requests:
        """Ask for all that the members are to complete in a step."""
        return Requests(
            prompts=self.lm.encode(examples),
            ids=[example.id for example in examples],
            samples=self.cfg.samples_per_prompt,
            seed=self.lm.run.seed,
            draw=step,
        )

    def sample(
        self, members: range, requests: Requests, draw: int, sigma: float
    ) -> list[Completions]:
        """Sample `members` side by side; in several parts where memory has just run out."""
        asked_for = self.lm.engine.limit.rows

        def attempt(rows: int) -> list[Completions]:
            made = []
            if rows < asked_for:
                self.noise.forget()  # what it takes for forwards that did not fit
            for part in split(members, self.cfg, rows):
                with self.noise.members(draw, part, sigma) as population:
                    made.append(self.lm.generate(replace(requests, population=population)))
            return made

        return self.lm.engine.limit.run(attempt)

    def rehearse(self) -> None:
        """Sample the first chunk of a step and throw it away: compilation happens here."""
        examples = self.lm.order.take(0, self.cfg.prompts_per_step)
        with fsdp.gathered(self.lm.model):
            self.sample(self._chunks()[0], self.request(examples, 0), 0, 1e-3)

    def plan(self) -> dict[str, str]:
        """Say what a step will do, with sizes."""
        cfg, lm, ranks = self.cfg, self.lm, self.lm.context.world_size
        chunks, rows = self._chunks(), lm.engine.limit.rows
        used = min(rows, len(chunks[0]) * cfg.rows_per_member)
        memory = lm.rollout_peak(used, cfg.samples_per_prompt)
        facts, heat = lm.describe(), cfg.sampling.temperature
        trunk = self.noise.trunk
        above = f", above block {trunk}" if trunk else ""
        if trunk and not lm.engine.separate and fsdp.of(lm.model) is None:
            above += ", up to which members share a prefill"
        drawn = f"sampled (temperature {heat:g})" if heat else "greedy"
        length = describe_length(lm.run, cfg.steps, "steps")
        lr = f", lr {show(cfg.lr)}" if cfg.method != "randopt" else ""
        return {
            "algorithm": f"{cfg.method}, {length}, rank {cfg.rank}, sigma {show(cfg.sigma)}{lr}"
            f" ({describe_source(lm.run)})",
            **facts,
            "model": f"{facts['model']}, {self.perturbed / 1e6:.2f}M perturbed{above}",
            "population": f"{cfg.members} members x {cfg.prompts_per_step} prompts x"
            f" {cfg.samples_per_prompt} samples, {cfg.sampling.max_new_tokens} new tokens at most;"
            f" rewards are of {drawn} completions",
            "forwards": f"{len(chunks)} per step, {used} rows each (algo.rollout_rows={rows}),"
            f" {-(-len(chunks) // ranks)} per rank",
            **lm.describe_memory(memory, used, self.state),
        }

    def _exchange(self, found: Tensor, generated: int) -> tuple[Tensor, int]:
        """Add up what was found of each row, and the tokens, over all ranks."""
        tokens = torch.tensor([generated], dtype=torch.float64)
        totals = torch.cat((found.flatten(), tokens)).to(self.lm.device)
        totals = self.lm.context.sum(totals).cpu()
        return totals[:-1].view_as(found), int(totals[-1])

    def _agree(self) -> None:
        """Take the fewest rows of all ranks, as members are shared out by them. Ranks have unlike
        memory, or one has run out of it, among members, in an evaluation or wherever else.
        """
        limit = self.lm.engine.limit
        limit.rows = min(self.lm.context.gather_objects(limit.rows))

    def _chunks(self) -> list[range]:
        ranks, rows = self.lm.context.world_size, self.lm.engine.limit.rows
        return share_out(self.cfg, rows, ranks)


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
