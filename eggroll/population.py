"""The population of a step: perturbed copies of the model sample side by side and are scored."""

import logging
import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from common.budget import describe_length
from common.distributed import fsdp
from common.lm import LM
from common.model.memory import StateMemory
from common.sampling.engine import Completions, Requests
from common.step import Step
from common.tasks import Example
from eggroll.config import EggrollConfig
from eggroll.noise import Noise

log = logging.getLogger("clutch")


class Population:
    """Samples and scores all members of a step, in chunks that the ranks share out."""

    def __init__(self, lm: LM, noise: Noise, cfg: EggrollConfig) -> None:
        self.lm, self.noise, self.cfg = lm, noise, cfg
        self.offending: list[dict[str, Any]] = []  # this rank's rows of the step, not finite
        lm.engine.limit.floor = cfg.pair
        parameters, ranks = lm.parameters, lm.context.world_size
        perturbed = sum(math.prod(address.shape) for address in noise.addresses)
        if fsdp.of(lm.model):  # the model's own weights are the masters
            self.state = StateMemory(4.0 * parameters)
        else:
            masters = lm.half and not lm.run.opt.offload.enabled
            beside = 4.0 * perturbed * masters
            if lm.adapter is None and lm.run.model.quantize is not None:
                beside = 2.0 * perturbed * (not lm.run.opt.offload.enabled)  # what rounding left
            self.state = StateMemory(lm.own_bytes + beside)
        directions = len(self._chunks()[0]) // cfg.pair
        drawn = 4.0 * sum(4 * a.blocks for a in noise.addresses) * directions
        lm.fit_rollout(self.state, drawn)
        # Members are shared out by the rows, so ranks with unlike memory must agree on them.
        lm.engine.limit.rows = min(lm.context.gather_objects(lm.engine.limit.rows))
        self.perturbed = perturbed
        if ranks > len(self._chunks()) and lm.context.main:
            log.warning(
                "%d ranks share %d forward(s) per step, so some are idle. Use more members, or"
                " fewer ranks.",
                ranks,
                len(self._chunks()),
            )

    def rewards(self, examples: list[Example], draw: int, sigma: float, step: Step) -> Tensor:
        """Return rewards, float64 [members, prompts * samples], on every rank the same.

        A row whose logits were not finite has NaN; `offending` describes such rows of this rank.
        """
        cfg, context = self.cfg, self.lm.context
        repeated = [example for example in examples for _ in range(cfg.samples_per_prompt)]
        rewards = torch.zeros(cfg.members, len(repeated), dtype=torch.float64)
        generated, self.offending = 0, []
        requests = self.request(examples, step.index)
        mine = self._chunks()[context.rank :: context.world_size]
        for members in fsdp.each(self.lm.model, mine):
            with step.phase("rollout"):
                made = self.sample(members, requests, draw, sigma)
                texts = [text for part in made for text in part.texts(self.lm.tokenizer)]
                generated += sum(part.generated for part in made)
            with step.phase("reward"):
                scores = self.lm.scorer.submit(repeated * len(members), texts).result().rewards
                broken = [bad for part in made for bad in part.broken.tolist()]
                for row, (score, bad) in enumerate(zip(scores, broken, strict=True)):
                    if bad or not math.isfinite(score):
                        member, place = divmod(row, len(repeated))
                        found = self.lm.offending_row(repeated[place], texts[row], score, bad)
                        self.offending.append({"member": members[member], **found})
                        scores[row] = math.nan
                shaped = torch.tensor(scores, dtype=torch.float64).view(len(members), -1)
                rewards[members.start : members.stop] = shaped
        with step.phase("exchange"):
            rewards, generated = self._exchange(rewards, generated)
        step.used(tokens=generated, samples=rewards.numel())
        return rewards

    def request(self, examples: list[Example], step: int) -> Requests:
        """Ask for what every member is to complete in a step."""
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

        def attempt(rows: int) -> list[Completions]:
            made = []
            for part in split(members, self.cfg, rows):
                with self.noise.members(draw, part, sigma):
                    factors = partial(self.noise.factors, draw, part, sigma)
                    asked = replace(
                        requests, groups=len(part), narrow=self.noise.narrow, factors=factors
                    )
                    made.append(self.lm.generate(asked))
            return made

        return self.lm.engine.limit.run(attempt)

    def rehearse(self, examples: list[Example]) -> None:
        """Sample the first chunk of a step and throw it away: compilation happens here."""
        with fsdp.forwards(self.lm.model):
            self.sample(self._chunks()[0], self.request(examples, 0), 0, self.cfg.sigma)

    def plan(self) -> dict[str, str]:
        """Say what a step will do, with sizes."""
        cfg, lm, ranks = self.cfg, self.lm, self.lm.context.world_size
        chunks, rows = self._chunks(), lm.engine.limit.rows
        used = min(rows, len(chunks[0]) * cfg.rows_per_member)
        memory = lm.rollout_fixed + used * lm.rollout_row
        facts, heat = lm.describe(), cfg.sampling.temperature
        drawn = f"sampled (temperature {heat:g})" if heat else "greedy"
        return {
            "algorithm": f"eggroll, {describe_length(lm.run, cfg.steps, 'steps')}, rank {cfg.rank},"
            f" sigma {cfg.sigma:g}, lr {cfg.lr:g}",
            **facts,
            "model": f"{facts['model']}, {self.perturbed / 1e6:.2f}M perturbed",
            "population": f"{cfg.members} members x {cfg.prompts_per_step} prompts x"
            f" {cfg.samples_per_prompt} samples, {cfg.sampling.max_new_tokens} new tokens at most;"
            f" rewards are of {drawn} completions",
            "forwards": f"{len(chunks)} per step, {used} rows each (algo.rollout_rows={rows}),"
            f" {-(-len(chunks) // ranks)} per rank",
            **lm.describe_memory(memory, used, self.state),
        }

    def _exchange(self, rewards: Tensor, generated: int) -> tuple[Tensor, int]:
        """Add up the rewards and tokens of all ranks: fitness is all that they exchange.

        A rank whose memory ran out takes fewer rows from now on, and so must all, because members
        are shared out by them.
        """
        context, limit = self.lm.context, self.lm.engine.limit
        held = torch.zeros(context.world_size, dtype=torch.float64)
        held[context.rank] = limit.rows
        tokens = torch.tensor([generated], dtype=torch.float64)
        totals = torch.cat((rewards.flatten(), tokens, held))
        totals = context.sum(totals.to(self.lm.device)).cpu()
        limit.rows = int(totals[rewards.numel() + 1 :].min())
        return totals[: rewards.numel()].view_as(rewards), int(totals[rewards.numel()])

    def _chunks(self) -> list[range]:
        return share_out(self.cfg, self.lm.engine.limit.rows, self.lm.context.world_size)


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


def idle_share(shaped: Tensor, mirrored: bool) -> float:
    """Return the share of members that move nothing: their fitness [members] is 0, or equal to that
    of their mirrored one.
    """
    idle = shaped[0::2] == shaped[1::2] if mirrored else shaped == 0
    return idle.double().mean().item()
