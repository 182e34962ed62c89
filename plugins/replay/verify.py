"""Sample some steps of a run again, and compare the fitness with the recorded one."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.config import ConfigError
from common.run import NonFiniteHandler, RunState, Timer
from common.session import Step
from eggroll.fitness import by_direction
from eggroll.train import prepare
from plugins.replay.egg import Egg, StepRecord
from plugins.replay.rebuild import Changes, Proof, Replay, as_recorded, is_own, read_settings
from plugins.replay.sizes import settings_of

ALIKE = 0.9  # the least correlation of fitness that is sampled on another kind of machine


@dataclass(frozen=True)
class Compared:
    """The fitness of a step, sampled again.

    Attributes:
        number: the number of the step.
        equal: whether the weights of all directions are equal, bit for bit.
        correlation: the correlation of the two; 1 if both are equal or all zero.
        largest: the largest difference, as a share of the root mean square of the recorded ones.
    """

    number: int
    equal: bool
    correlation: float
    largest: float

    @classmethod
    def of(cls, record: StepRecord, again: Tensor) -> "Compared":
        """Compare a record with the weights of directions, float32, that were sampled again."""
        then = torch.from_numpy(record.directions.copy()).double()
        now = again.to(torch.float32).double()
        equal = bool(torch.equal(then, now))
        size = then.square().mean().sqrt().clamp(min=1e-30)
        norms = (then.norm() * now.norm()).item()
        correlation = 1.0 if equal else (then @ now).item() / norms if norms else 0.0
        return cls(record.number, equal, correlation, ((then - now).abs().max() / size).item())


def verify(
    held: Egg,
    count: int,
    *,
    base: str | None = None,
    trusted: bool = False,
    overrides: Sequence[str] = (),
    device: str = "auto",
    threads: int | None = None,
) -> tuple[list[Compared], Proof]:
    """Rebuild the run up to its last chosen step, and sample `count` steps on the way again.

    Args:
        trusted: whether the task may be built although the file is not in its run folder: a task
            may run Python code that the settings name.
        overrides: KEY=VALUE, in place of recorded settings, such as paths of data.
    Raises: ConfigError if the task cannot be built, or if there are fewer steps.
    """
    if not 1 <= count <= len(held.steps):
        raise ConfigError(
            f"--verify {count}: {held.path} has {len(held.steps)} updates. Give a number from 1 to"
            " that."
        )
    if not held.header["task"]:
        raise ConfigError(
            "--verify: this run's task was given from Python, and the file cannot name it. Rebuild"
            " the model, without --verify, to compare the weights."
        )
    if not trusted and not is_own(held):
        raise ConfigError(
            f"--verify builds the task that {held.path} names, which may run Python code. Read its"
            " settings with --show, and add --trust."
        )
    chosen = {held.steps[0].number, held.steps[-1].number}
    others = [one.number for one in held.steps[1:-1]]
    draw = random.SystemRandom()  # whoever made the file must not know them beforehand
    chosen = set(sorted(chosen)[-count:]) | set(draw.sample(others, max(0, count - 2)))
    run = read_settings(held, base, overrides, device)
    found: list[Compared] = []
    with as_recorded(held, run, threads) as context:
        with settings_of(held):
            collector, weights = prepare(run, context, None)
        parts, cfg = collector.parts, collector.cfg
        handler = NonFiniteHandler(run, context, parts.precision.compute)
        try:
            replay = Replay(held, parts.run, parts.lm, collector.noise, weights)
            if not replay.proof.base:
                raise ConfigError(f"--verify: {replay.proof.describe()}")
            for record in replay.steps(max(chosen), Changes()):
                if record.number not in chosen:
                    continue
                index = record.number - 1
                first = index * cfg.prompts_per_step
                examples = parts.examples.order.take(first, cfg.prompts_per_step)
                step = Step(index, 0.0, RunState(), Timer(), handler)
                tried = collector.try_out(examples, record.draw, record.sigma, step)
                shaped = tried.shaped(cfg).to(torch.float32)
                found.append(Compared.of(record, by_direction(shaped, cfg.mirrored)))
        finally:
            parts.close()
    return found, replay.proof
