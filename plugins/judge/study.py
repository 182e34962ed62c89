"""Simulate the gate: how many ledgers keep a proposal without effect, and how often a true effect
is kept.

    python -m plugins.judge.study --ledgers 100 --trials 60   # the tables of README.md, ten minutes
    python -m plugins.judge.study                             # more of each, half an hour

An answer is right with the probability logistic(prompt + seed + both + effect): prompts differ in
difficulty by 2, seeds by so much that runs of one setting differ by `spread` points, and each
answer of a run by 0.5, since runs that are equally good answer different prompts. Numbers are of
the logistic scale.
"""

import argparse
from dataclasses import dataclass
from functools import cache

import numpy as np

from common.uncertainty import pair_seeds
from plugins.judge.statistics import KEEP, NOT_YET, decide, find_level, find_share, foresee

DIFFICULTY, NOISE = 2.0, 0.5


@dataclass(frozen=True)
class World:
    """The simulated runs.

    Attributes:
        prompts: the number of held-out prompts.
        spread: the standard deviation of runs of one setting, in points.
        effect: the gain of a proposal, in points.
        mixed: the deviation of its effect between prompts, on the logistic scale.
        easy: the mean difficulty; 0 = half of the answers are right.
    """

    prompts: int = 512
    spread: float = 1.5
    effect: float = 0.0
    mixed: float = 0.0
    easy: float = 0.0

    def calibrate(self) -> tuple[float, float]:
        """Return the deviation of seeds, and the shift of the proposal, on the logistic scale."""
        return _calibrate(self.spread, self.effect, self.easy)


@cache
def _calibrate(spread: float, effect: float, easy: float) -> tuple[float, float]:
    grid = np.random.default_rng(0).normal(easy, np.hypot(DIFFICULTY, NOISE), 50_000)
    right = logistic(grid)
    slope = float(np.mean(right * (1 - right)))
    low, high = 0.0, 10.0
    for _ in range(50):
        middle = (low + high) / 2
        gain = 100 * float(np.mean(logistic(grid + middle) - right))
        low, high = (middle, high) if gain < effect else (low, middle)
    return spread / 100 / slope, low


@dataclass(frozen=True)
class Policy:
    """A way to judge a proposal: with `first` seeds, then as the gate recommends.

    Attributes:
        first: the number of seeds of the first look.
        most: the most seeds.
        useful: the smallest effect of use, in points.
    """

    first: int = 3
    most: int = 24
    useful: float = 2.0


def logistic(x: np.ndarray) -> np.ndarray:
    """Return the probabilities of log-odds."""
    return 1 / (1 + np.exp(-x))


class Runs:
    """The scores of the seeds of one setting, drawn when they are needed."""

    def __init__(self, draw: np.random.Generator, hard: np.ndarray, seeds: float) -> None:
        self.draw, self.hard, self.seeds = draw, hard, seeds
        self.scores = np.empty((0, len(hard)))

    def take(self, count: int) -> np.ndarray:
        """Return the scores of the first `count` seeds."""
        shape = (max(0, count - len(self.scores)), len(self.hard))
        moved = self.draw.normal(0, self.seeds, (shape[0], 1)) + self.draw.normal(0, NOISE, shape)
        fresh = 100.0 * (self.draw.random(shape) < logistic(self.hard + moved))
        self.scores = np.concatenate([self.scores, fresh])
        return self.scores[:count]


def judge(base: Runs, new: Runs, level: float, policy: Policy) -> tuple[str, int]:
    """Return the verdict on a proposal at a place with this level, and the number of seeds."""
    seeds, look = policy.first, 1
    while True:
        spread = pair_seeds(base.take(seeds), new.take(seeds))
        answer = decide(spread, level * find_share(look), policy.useful)
        if answer != NOT_YET or seeds == policy.most:
            return answer, seeds
        look += 1
        more = foresee(spread, seeds, level * find_share(look), policy.useful)
        if more is None or more > 2 * policy.most:
            return answer, seeds
        seeds = min(more, policy.most)


def keeps_noise(
    draw: np.random.Generator, world: World, policy: Policy, proposals: int
) -> tuple[bool, int]:
    """Return whether a ledger keeps any of its proposals, and the number of runs it has made."""
    seeds, shift = world.calibrate()
    hard = draw.normal(world.easy, DIFFICULTY, world.prompts)
    base, runs = Runs(draw, hard, seeds), 0
    for place in range(1, proposals + 1):
        moved = shift + draw.normal(0, world.mixed, world.prompts)
        level = find_level(place, [False] * place)
        answer, used = judge(base, Runs(draw, hard + moved, seeds), level, policy)
        runs += used
        if answer == KEEP:
            return True, runs
    return False, runs


def find_power(
    draw: np.random.Generator, world: World, policy: Policy, place: int, trials: int
) -> tuple[float, float]:
    """Return the share of trials in which an effect is kept at this place, and the mean number of
    seeds.
    """
    (seeds, shift), kept, used = world.calibrate(), 0, 0
    level = find_level(place, [False] * place)
    for _ in range(trials):
        hard = draw.normal(world.easy, DIFFICULTY, world.prompts)
        moved = shift + draw.normal(0, world.mixed, world.prompts)
        pair = Runs(draw, hard, seeds), Runs(draw, hard + moved, seeds)
        answer, count = judge(*pair, level, policy)
        kept, used = kept + (answer == KEEP), used + count
    return kept / trials, used / trials


NOTHING = {
    "no effect": World(),
    "no effect, 128 prompts": World(prompts=128),
    "no effect, seeds do not differ": World(spread=0.0),
    "no effect, 95 % are right": World(prompts=256, easy=5.0),
    "an effect that is +- by prompt": World(mixed=1.0),
}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser("python -m plugins.judge.study", description="Simulate.")
    parser.add_argument("--ledgers", type=int, default=400, help="simulated ledgers per row")
    parser.add_argument("--trials", type=int, default=200, help="simulated proposals per cell")
    given = parser.parse_args()
    print("| 200 proposals | ledgers that keep one | runs per proposal |\n|---|---|---|")
    for name, world in NOTHING.items():
        draw = np.random.default_rng(1)
        policy = Policy(most=12)
        ledgers = [keeps_noise(draw, world, policy, 200) for _ in range(given.ledgers)]
        kept, runs = (np.mean(values) for values in zip(*ledgers, strict=True))
        print(f"| {name} | {100 * kept:.1f} % | {runs / 200:.1f} |", flush=True)
    for first, heading in ((3, "3 seeds, then as recommended"), (0, "all seeds at once")):
        print(
            f"\n| prompts | most seeds | place 1 | 10 | 50 | 200 | ({heading})\n" + "|---" * 7 + "|"
        )
        for prompts in (256, 512, 1000):
            for most in (8, 12, 16, 24, 32):
                draw, cells = np.random.default_rng(2), []
                policy = Policy(first or most, most)
                for place in (1, 10, 50, 200):
                    world = World(prompts, effect=5.0)
                    kept, _ = find_power(draw, world, policy, place, given.trials)
                    cells.append(f"{100 * kept:.0f} %")
                print(f"| {prompts} | {most} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
