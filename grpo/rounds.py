"""Choose the next prompts and sample them: now, or for the next step while this one trains.

With algo.overlap=1 the first round of a step is sampled in the step before, so that its rewards are
computed meanwhile; an engine with weights of its own samples beside the training too. A rollout is
then one step older than the policy that learns from it. Replacements of dead groups are sampled in
their own step. Nothing that was begun is left out, and a checkpoint holds what is under way.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from common.checkpoint import Checkpoint
from common.config import ConfigError
from common.distributed import fsdp, put_back
from common.engine import Completions
from common.episodes import Played
from common.parts import Parts
from common.rollout import Phase, Rollout
from common.run import Checkpointed
from common.session import Step
from common.task import Example
from grpo.config import GrpoConfig

RETIRED = "algo.retire_at: all training prompts have retired"  # what ended the run
# The columns of completions that a checkpoint holds, where there are any.
SAVED = ("tokens", "lengths", "finished", "logprobs", "broken", "trains")

Taken = list[tuple[int, Example]]  # prompts with their positions in the training order


@dataclass
class Round:
    """Prompts that were sampled together, by all ranks.

    Attributes: taken: the prompts. version: optimizer steps that the policy had made. rollout: of
    this rank's share, n * G completions; None where it had no prompt. reference: their
    log-probabilities under the reference model, float32 [n * G, T], once it has looked at them.
    """

    taken: Taken
    version: int
    rollout: Rollout | None
    reference: Tensor | None = None


class Rounds:
    """Takes prompts from the training order and samples them."""

    def __init__(self, parts: Parts, cfg: GrpoConfig) -> None:
        self.parts, self.cfg = parts, cfg
        self.ahead: Future[Round] | None = None  # the first round of the next step
        self.beside = parts.engine.separate  # it can sample while the trainer's weights change
        self.thread = ThreadPoolExecutor(1, "rollout")
        if cfg.overlap and not self.beside and parts.run.scoring.kind == "serial":
            raise ConfigError(
                "algo.overlap=1 has no effect with scoring.kind=serial, where rewards are computed"
                " before anything else goes on. Set scoring.kind=threads for rewards that wait, or"
                " processes for rewards that compute."
            )
        if cfg.overlap and getattr(parts.engine, "sleeps", False):
            raise ConfigError(
                "algo.overlap=1 samples while the model is trained, and with"
                " engine.settings.enable_sleep_mode=true vLLM sleeps then. Leave one of them out."
            )

    def first(self, step: Step) -> Round:
        """Return the first round of a step; with overlap the one that was begun in the step before,
        and that of the next is begun.
        """
        if not self.cfg.overlap:
            return self.more(step, self.cfg.prompts_per_step)
        current, self.ahead = self.ahead, None
        if current is None:
            current = self._begin(step)
        with step.phase("rollout"):
            sampled = current.result()
        if not self.beside:
            self._begin_next(step)
        return sampled

    def more(self, step: Step, count: int) -> Round:
        """Sample so many prompts now."""
        return self._sample(self._take(step.state, count), step.index, step.phase)

    def end(self, step: Step) -> None:
        """Let the engine rest, or go on with the next step: this one needs no more rounds."""
        self.parts.engine.rest()
        if self.cfg.overlap and self.beside:
            self._begin_next(step)

    # --- prompts

    def _take(self, state: dict[str, Any], count: int) -> Taken:
        """Return the next prompts, without those that have retired."""
        taken: Taken = []
        while len(taken) < count:
            position = state["cursor"]
            state["cursor"] += 1
            [example] = self.parts.examples.order.take(position, 1)
            visits = state["visits"].get(str(example.id))
            if visits is None or not self._retires(*visits):
                taken.append((position, example))
        return taken

    def _retires(self, samples: int, right: int) -> bool:
        return self.cfg.retire_at is not None and right >= self.cfg.retire_at * samples

    def remember(self, example: Example, right: list[bool], state: dict[str, Any]) -> None:
        """Count the samples of a prompt that were scored, and those of them that are right, if
        prompts can retire.
        """
        if right and self.cfg.retire_at is not None:
            samples, before = state["visits"].get(str(example.id), (0, 0))
            state["visits"][str(example.id)] = samples + len(right), before + sum(right)

    def retired(self, state: dict[str, Any]) -> float:
        """Return the share of the training prompts that have retired."""
        if self.cfg.retire_at is None:
            return 0.0
        retired = sum(self._retires(*visits) for visits in state["visits"].values())
        return retired / len(self.parts.examples.order.examples)

    def exhausted(self, state: dict[str, Any]) -> str | None:
        """Return what ends the run where no prompt is left; None as long as one is."""
        return RETIRED if self.retired(state) == 1 else None

    # --- samples

    def _sample(
        self, taken: Taken, version: int, phase: Phase = nullcontext, *, refresh: bool = True
    ) -> Round:
        """Sample this rank's share of the prompts, and start to score it. Draws are keyed by the
        position of a prompt in the training order: an example that comes twice in a step gets other
        samples the second time.
        """
        cfg, parts = self.cfg, self.parts
        share = parts.context.share(taken)
        mine = [example for _, example in share]
        with fsdp.gathered(parts.lm.model):  # a rank without a prompt keeps pace with the others
            if not mine:
                return Round(taken, version, None)
            requests = parts.rollouter.request(
                mine,
                ids=[position for position, _ in share],
                samples=cfg.samples_per_prompt,
                draw=version,
                logprobs=True,
            )
            draw = partial(parts.rollouter.sample, refresh=refresh)
            rollout = parts.rollouter.roll_out(mine, requests, phase, draw=draw, step=version)
            return Round(taken, version, rollout)

    def _begin_next(self, step: Step) -> None:
        steps, done = self.cfg.steps, step.index + self.cfg.updates_per_rollout
        if (steps is None or done < steps) and self.exhausted(step.state) is None:
            self.ahead = self._begin(step)

    def _begin(self, step: Step) -> Future[Round]:
        """Begin a round: on its way with an engine of its own, else sampled, with its rewards on
        their way.
        """
        count = self.cfg.prompts_per_step
        if self.beside:
            with step.phase("rollout"):
                self.parts.engine.refresh()  # before the weights change
            taken = self._take(step.state, count)
            return self.thread.submit(self._sample, taken, step.index, refresh=False)
        begun: Future[Round] = Future()
        begun.set_result(self.more(step, count))
        return begun

    # --- for checkpoints

    def extra(self) -> dict[str, Any]:
        """Return what is under way, of all ranks, once it is sampled; empty where nothing is."""
        if self.ahead is None:
            return {}
        ahead, size = self.ahead.result(), self.cfg.samples_per_prompt
        mine: list[dict[str, Any]] = []  # of each prompt
        if ahead.rollout is not None:
            completions = ahead.rollout.completions
            held = {name: getattr(completions, name) for name in SAVED}
            for rows in torch.arange(len(completions.lengths)).split(size):
                one = {name: part[rows].cpu() for name, part in held.items() if part is not None}
                if completions.played is not None:
                    one["played"] = [completions.played[row].__getnewargs__() for row in rows]
                mine.append(one)
        prompts = put_back(self.parts.context.gather_objects(mine))
        positions = [position for position, _ in ahead.taken]
        return {"ahead": {"version": ahead.version, "positions": positions, "prompts": prompts}}

    def load(self, extra: dict[str, Any]) -> None:
        """Take over what was under way, and score it."""
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
        """Return the completions of a prompt that `extra` has put away."""
        columns = {name: one[name].to(self.parts.lm.device) for name in SAVED if name in one}
        played = [Played(*outcome) for outcome in one.get("played", [])]
        return Completions(**{"logprobs": None, **columns}, played=[*played] or None)


class Saved:
    """The part of a checkpoint that is the algorithm's: the policy, and the rollout under way."""

    def __init__(self, policy: Checkpointed, rounds: Rounds) -> None:
        self.tensors, self.policy, self.rounds = policy.tensors, policy, rounds

    def extra(self) -> dict[str, Any]:
        """Return the state of the optimizer, and the rollout that is under way."""
        return self.policy.extra() | self.rounds.extra()

    def load(self, saved: Checkpoint) -> None:
        """Take over a checkpoint."""
        self.policy.load(saved)
        self.rounds.load(saved.extra or {})
