"""Choose sigma and lr by trying a few sigmas on the run's own model and task.

    python launch.py algo=eggroll probe=true                    # measure, and end
    python launch.py algo=eggroll algo.sigma=auto algo.lr=auto  # measure, and train

Sigma. The noise that a model survives differs a hundredfold between models, so the probe searches
between 1/1000 of the weights' root mean square and all of it. From 1/64 on, sigma grows until it
breaks the members: they earn less than the model without noise, or write fewer whole answers. The
search stops after two consecutive broken sigmas, because a single one may look broken by chance, or
at once if no answer at all is whole. If none of these sigmas is survived, sigma falls from 1/64
until one is. Then the interval above the largest survived sigma is halved twice. A run uses half of
the largest survived sigma: there, members differ in quality and do not just break.

Lr. Most of an update is luck (for D directions in d dimensions, all but a share D / d), so the
updates of a run are a random walk with a drift. Lr is chosen so that the random part, after all
steps, is WALK times sigma per weight, because nothing was measured further away. (A published run,
arXiv:2509.24372, has 2.0: 500 steps, 30 members, lr = sigma / 2. LOG.md has the origin of 1.25.)
"""

import copy
import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from common.config import AUTO, BudgetConfig, ConfigError
from common.distributed import Context
from common.optim import ADAMS
from common.report import plots
from common.run import NonFiniteHandler, RunState, Timer
from common.session import Session, Step
from common.system import EXIT_SIGNAL, RunStopped, run_record, write_text
from eggroll.config import EggrollConfig
from eggroll.fitness import by_direction
from eggroll.instruments import agree_prompts
from eggroll.population import Centre, PopulationCollector, Tried
from eggroll.tune import Tuned
from eggroll.weights import Weights

log = logging.getLogger("clutch")

# Sigmas, as shares of the weights' root mean square.
SMALLEST, START, LARGEST, FACTOR, HALVINGS = 1 / 1024, 1 / 64, 1.0, 4.0, 2
MEMBERS = 16  # the most members that try a sigma, with enough prompts for the rows of a full step
SHARE = 0.25  # the share of a budget that a probe may use; it has fewer prompts to stay below it
LOSS = 0.1  # a larger loss of reward (as a share), or of the share of whole answers, is broken
WALK = 1.25
TRIES = 6  # the number of sigmas that a probe is likely to try
DRAW = 2**31 - 1  # the number of the probe's noise, which no step uses


@dataclass(frozen=True)
class Row:
    """The outcome of one sigma.

    Attributes:
        sigma: the standard deviation of the noise.
        changed: the share of completions that differ from the unperturbed model's.
        identical_pairs: the share of completions that equal the mirrored member's; None without
            mirrored noise.
        truncated: the share of completions that were cut off.
        answered: the share of completions that contain an answer; None if the task cannot tell.
        reward: the mean reward.
        reward_std: the standard deviation of the members' mean rewards.
        prompt_agreement: how alike two halves of the prompts would update the model
            (eggroll.instruments.agree_prompts).
        step: the root mean square, per weight, of an update at lr 1 with as many members as the run
            has.
        survived: whether the members are not broken.
        tokens: the number of tokens that the members generated.
        as_set: whether this is algo.sigma, which probe=true tries in addition to its own sigmas.
        lost: whether no member wrote a whole answer (all were cut off, or none contains an answer)
            although the unperturbed model did.
        seconds: the time that it took.
    """

    sigma: float
    changed: float
    identical_pairs: float | None
    truncated: float
    answered: float | None
    reward: float
    reward_std: float
    prompt_agreement: float | None
    step: float
    survived: bool
    tokens: int = 0
    as_set: bool = False
    lost: bool = False
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class Findings:
    """The outcome of a probe.

    Attributes:
        sigma: the chosen sigma.
        lr: the chosen lr; None if the members do not differ, and for RandOpt.
        why: the reasons for the choice, in words.
        centre: the reward of the unperturbed model.
        rows: the outcome of each sigma.
        tokens: the number of generated tokens.
        evaluations: the number of computed rewards.
        seconds: the time of the probe.
    """

    sigma: float
    lr: float | None
    why: str
    centre: float
    rows: list[Row]
    tokens: int
    evaluations: int
    seconds: float


def measure(collector: PopulationCollector, weights: Weights, session: Session) -> Tuned:
    """Return the sigma and lr that the probe chooses, and count the probe's tokens, rewards and
    seconds as training.
    """
    session.listen()
    completion = session.budget.completion
    findings = Probe(collector, weights, completion, lambda: session.stopping).look()
    collector.noise.forget()  # the run's forwards have other members
    tell(findings, collector.parts.context)
    auto = collector.cfg.lr == AUTO
    drift = WALK * findings.sigma / weights.root_mean_square() if auto else None
    session.count(tokens=findings.tokens, samples=findings.evaluations, seconds=findings.seconds)
    return Tuned(findings.sigma, findings.lr or 0.0, drift)


def show(collector: PopulationCollector, weights: Weights) -> Findings:
    """Probe without training. Raises: ConfigError if the run folder holds a run."""
    context = collector.parts.context
    folder = context.out_dir
    if (folder / "result.json").exists() or any(folder.glob("checkpoints/step-*")):
        raise ConfigError(
            f"{folder} holds a run, whose probe.json would be lost. Use another hydra.run.dir."
        )
    if context.main:
        # An earlier probe of this folder is replaced, with its settings.
        run_record.accept(folder, log)
    findings = Probe(collector, weights).look()
    tell(findings, context)
    return findings


class Probe:
    """Tries sigmas. It changes neither the weights nor the run's collector.

    Args:
        completion: the tokens and seconds that a completion is likely to need; 0 = unknown.
        stopping: returns whether to stop before the next sigma.
    """

    def __init__(
        self,
        collector: PopulationCollector,
        weights: Weights,
        completion: tuple[float, float] = (0.0, 0.0),
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        cfg, self.stopping = collector.cfg, stopping
        if cfg.lr == AUTO:
            scale_step(cfg, 1.0)  # report an unknown optimizer at once
        members = min(cfg.members, MEMBERS)
        prompts = count_prompts(cfg, members, collector.parts.run.budget, *completion)
        self.cfg, self.context, self.run = cfg, collector.parts.context, collector.parts.run
        self.collector = copy.copy(collector)
        sizes = {"members": members, "prompts_per_step": prompts}
        self.collector.cfg = replace(cfg, **sizes, sigma=1.0, lr=1.0)
        self.examples = collector.parts.examples.order.take(0, prompts)
        self.size = weights.root_mean_square()
        if self.size == 0 and (self.run.probe or AUTO in (cfg.sigma, cfg.lr)):
            raise ConfigError(
                "probe=true, algo.sigma=auto and algo.lr=auto measure sigma by the size of the"
                " weights, and all that are perturbed here are 0. Give both, or perturb others too."
            )
        handler = NonFiniteHandler(self.run, self.context, collector.parts.lm.precision.compute)
        # Counts tokens and rewards of all sigmas, outside of the run's steps.
        self.attempt = Step(0, 0.0, RunState(), Timer(), handler)
        self.plain: Centre | None = None  # the outcome of the model without noise, sampled once

    @property
    def centre(self) -> float:
        """The reward of the model without noise; 0 before it has been sampled."""
        return 0.0 if self.plain is None else self.plain.reward

    def look(self) -> Findings:
        """Try sigmas and choose. Returns the same on every rank, except for times.

        Raises: ConfigError if no sigma makes members differ, or if the budget or the optimizer does
        not allow a choice.
        """
        if self.run.opt.compile.enabled:  # compilation is no part of a step's time
            self.collector.rehearse()
        began = time.perf_counter()
        if self.context.main:
            log.info(HEAD)
        if self.run.probe or self.cfg.sigma == AUTO:
            rows = sorted(self.search(), key=lambda row: row.sigma)
            if not self.run.probe and not any(row.reward_std for row in rows):
                raise ConfigError(
                    "algo.sigma=auto finds no difference between the members at any sigma: all earn"
                    f" {self.centre:.3g}. Use a finer reward or other prompts, or give algo.sigma."
                )
            sigma, why = choose_sigma(rows, self.size)
            if self.cfg.sigma != AUTO:  # try the setting too; the choice does not depend on it
                rows.append(self.try_sigma(float(self.cfg.sigma), as_set=True))
        else:
            rows = [self.try_sigma(float(self.cfg.sigma))]
            sigma, why = rows[0].sigma, f"sigma {rows[0].sigma:g} is set"
        chosen = next((row for row in rows if math.isclose(row.sigma, sigma)), None)
        if chosen is None:  # lr depends on the measurement at the chosen sigma
            rows.append(chosen := self.try_sigma(sigma))
        rows.sort(key=lambda row: row.sigma)
        seconds, used = time.perf_counter() - began, self.attempt
        lr = None if self.cfg.method == "randopt" else self.cfg.lr  # RandOpt moves no weights
        if lr is not None and (self.run.probe or lr == AUTO):
            steps = self.count_steps(chosen, used.tokens, seconds)
            try:
                lr, reason = choose_lr(self.cfg, sigma, chosen.step, steps)
            except ConfigError as error:
                if not self.run.probe:
                    raise
                lr, reason = None, str(error).rstrip(".")  # measurements are still reported
            why += f"; {reason}"
        lr = None if lr is None else float(lr)
        return Findings(sigma, lr, why, self.centre, rows, used.tokens, used.samples, seconds)

    def search(self) -> list[Row]:
        """Return the outcomes of the sigmas that the probe tries, in their order."""
        began = time.perf_counter()
        rows = [self.try_sigma(self.size * START)]
        self.foresee(TRIES * (time.perf_counter() - began))
        broken = 0  # the number of consecutive broken sigmas
        while rows[-1].sigma * FACTOR <= self.size * LARGEST * 1.01:
            broken = 0 if rows[-1].survived else broken + 1
            if broken == 2 or rows[-1].lost:
                break
            rows.append(self.try_sigma(rows[-1].sigma * FACTOR))
        sigma = rows[0].sigma / FACTOR
        while sigma >= self.size * SMALLEST * 0.99 and not any(row.survived for row in rows):
            rows.append(self.try_sigma(sigma))
            sigma /= FACTOR
        low = max((row.sigma for row in rows if row.survived), default=0.0)
        high = min((row.sigma for row in rows if row.sigma > low), default=0.0)
        for _ in range(HALVINGS if low and high else 0):
            rows.append(row := self.try_sigma(math.sqrt(low * high)))
            low, high = (row.sigma, high) if row.survived else (low, row.sigma)
        return rows

    def foresee(self, seconds: float) -> None:
        """Raise ConfigError if the probe is likely to use up the budget.

        Args: seconds: the time that the probe is likely to take.
        """
        tokens = TRIES * self.attempt.tokens
        share, limit = self.run.budget.nearest(tokens, seconds)
        if not self.run.probe and self.context.any(share >= 1):
            raise ConfigError(
                f"{limit} does not suffice for the probe of algo.sigma=auto alone, which is likely"
                f" to take {tokens:,} tokens and {seconds:.0f} s. Give at least three times as"
                " much, or algo.sigma and algo.lr, or fewer algo.members or algo.prompts_per_step."
            )

    def try_sigma(self, sigma: float, as_set: bool = False) -> Row:
        """Sample and score the members with noise of `sigma`. Raises: RunStopped after a signal."""
        if self.stopping():
            raise RunStopped(
                "stopped in the probe, before the first step. The same command begins anew.",
                EXIT_SIGNAL,
            )
        collector, pair, before = self.collector, self.cfg.mirrored, self.attempt.tokens
        began = time.perf_counter()
        tried = collector.try_out(self.examples, DRAW, sigma, self.attempt, True, self.plain)
        assert tried.centre is not None
        assert tried.changed is not None
        tokens = self.attempt.tokens - before
        if self.plain is None:
            self.plain = tried.centre
            self.attempt.used(tokens=self.plain.generated, samples=len(self.plain.texts))
        if not tried.centre.rewards.isfinite().all():
            raise ConfigError(
                "the probe met NaN or infinity in a reward or in logits of the model without noise."
                " Fix the reward, or the model."
            )
        # Rewards that are not finite count as 0, and such a sigma is too large.
        rewards = tried.rewards.nan_to_num(0.0, 0.0, 0.0)
        plain, whole = tried.centre, tried.answered
        scored = plain.scored & tried.scored
        means = (rewards[:, scored] if scored.any() else rewards).mean(1)
        spread = means.std(correction=0).item()
        known, of_plain = rewards[:, scored], plain.rewards[scored]
        worse = bool(scored.any()) and falls(known, of_plain, LOSS * self.centre)
        worse |= falls(1 - tried.cut, 1 - plain.cut, LOSS)
        lost = tried.cut.all() and not plain.cut.all()
        if whole is not None and plain.answered is not None:
            worse |= falls(whole, plain.answered, LOSS)
            lost |= plain.answered.any() and not whole.any()
        mended = replace(tried, rewards=rewards)
        counted, samples = mended.counted(self.cfg)
        row = Row(
            sigma=sigma,
            changed=tried.changed.mean().item(),
            identical_pairs=None if tried.twins is None else tried.twins.mean().item(),
            truncated=tried.cut.mean().item(),
            answered=None if whole is None else whole.mean().item(),
            reward=means.mean().item(),
            reward_std=spread,
            prompt_agreement=agree_prompts(counted.rewards, pair, samples),
            step=find_step(mended, self.cfg),
            survived=tried.finite and not worse and not lost,
            tokens=tokens,
            as_set=as_set,
            lost=bool(lost),
            seconds=time.perf_counter() - began,
        )
        if self.context.main:
            log.info("%s", describe(row))
        return row

    def count_steps(self, one: Row, tokens: int, seconds: float) -> int:
        """Return the number of steps that the run is expected to make, if a completion takes as
        many tokens and seconds as with `one`. The same on every rank.

        Args:
            tokens: the tokens that the probe has used, which count for the budget.
            seconds: the seconds that the probe has used, which count for the budget.
        """
        budget, most = self.run.budget, self.cfg.steps
        if not budget.given:
            assert most is not None, "nothing would end the run"
            return most
        larger = self.cfg.step_samples / self.collector.cfg.step_samples
        share, _ = budget.nearest(larger * one.tokens, larger * one.seconds)
        used, _ = budget.nearest(tokens, seconds)
        affordable = max(1, round((1 - used) / max(share, 1e-9)))
        affordable = max(self.context.gather_objects(affordable))  # clocks of ranks differ
        return affordable if most is None else min(affordable, most)


def find_step(tried: Tried, cfg: EggrollConfig) -> float:
    """Return the root mean square, per weight, of an update at lr 1 from as many prompts as a step
    of the run has.

    More prompts would make z-scores smaller: a loss that both members of a pair share is part of
    the standard deviation but not of their difference, and chance makes the share of the difference
    larger with few prompts.
    """
    rows, each = tried.rewards.shape[1], cfg.rows_per_member
    starts = range(0, rows - each + 1, each)
    parts = [tried.of(slice(at, at + each)).shaped(cfg) for at in starts]
    directions = by_direction(torch.stack(parts, 1), bool(cfg.mirrored))
    variance = directions.square().mean().item() * (cfg.members // cfg.pair)
    return math.sqrt(variance) / cfg.members


def falls(members: Tensor, plain: Tensor, allowed: float) -> bool:
    """Return whether `members` [members, rows] are below the model without noise, `plain` [rows],
    by more than `allowed` plus the standard error over members and prompts.
    """
    changes = members.mean(0) - plain
    over_members = members.mean(1).std(correction=0).item() / math.sqrt(len(members))
    over_prompts = changes.std(correction=0).item() / math.sqrt(len(changes))
    return changes.mean().item() < -allowed - math.hypot(over_members, over_prompts)


def count_prompts(
    cfg: EggrollConfig,
    members: int,
    budget: BudgetConfig,
    tokens: float = 0.0,
    seconds: float = 0.0,
) -> int:
    """Return the number of prompts for each of the probe's `members`: their completions are as many
    as those of a step of the run, or fewer if that would use more than SHARE of the budget, but
    there are at least as many prompts as in a step.

    Args:
        tokens: the tokens of a completion of the model without noise; 0 = unknown.
        seconds: the seconds of a completion of the model without noise; 0 = unknown.
    """
    whole = -(-cfg.members * cfg.prompts_per_step // members)
    completions = TRIES * members * cfg.samples_per_prompt  # per prompt
    # Half of the sigmas are likely to break the members, which then write up to the limit.
    end = cfg.sampling.max_new_tokens
    longer = (1 + end / tokens) / 2 if tokens else 1.0
    each, _ = budget.nearest(completions * longer * (tokens or end), completions * longer * seconds)
    return min(whole, max(cfg.prompts_per_step, int(SHARE / each))) if each else whole


def choose_sigma(rows: list[Row], size: float) -> tuple[float, str]:
    """Return half of the largest sigma that members survived, and the reason. If members differ at
    some of the survived sigmas, it is the largest of these.

    Args:
        rows: the outcomes, sorted by sigma.
        size: the root mean square of the weights.
    """
    survivors = [row for row in rows if row.survived]
    if not survivors:
        smallest = rows[0].sigma
        why = f"members break at the smallest sigma that was tried, {smallest:.3g}; half of it"
        return smallest / 2, why
    # On a few prompts that are too hard, members that write nonsense lose nothing.
    differing = [row for row in survivors if row.reward_std] or survivors
    largest = differing[-1].sigma
    share = f"({largest / size:.2g} of the weights' size)"
    why = f"members survive up to sigma {largest:.3g} {share}"
    if differing[-1] is not survivors[-1]:
        why = f"members all earn the same at sigmas above {largest:.3g} {share}"
    elif len(survivors) == len(rows):
        why = f"no sigma that was tried breaks the members, up to {largest:.3g} {share}: the reward"
        why += " does not say where they do"
    return largest / 2, f"{why}; half of it is used"


def choose_lr(cfg: EggrollConfig, sigma: float, step: float, steps: int) -> tuple[float, str]:
    """Return the lr with which `steps` random updates add up to WALK * sigma per weight, and the
    reason.

    Args: step: the root mean square, per weight, of an update at lr 1.
    Raises: ConfigError if the members do not differ, and for an optimizer whose steps are not
    known.
    """
    step = scale_step(cfg, step)
    if step == 0:
        raise ConfigError(
            f"algo.lr=auto finds no difference between the members at sigma {sigma:.3g}: all earn"
            " the same. Use a finer reward or more prompts (algo.prompts_per_step), or give"
            " algo.sigma and algo.lr."
        )
    schedule = cfg.lr_schedule  # it follows the budget if that ends the run
    square = sum(schedule.factor(index / max(1, steps - 1)) ** 2 for index in range(steps))
    walk = sigma * WALK / math.sqrt(square)
    per = "the first step" if schedule.changes else "step"
    return (
        walk / step,
        f"lr moves a weight by {walk / sigma:.2g} sigma per {per}, for {steps} steps",
    )


def scale_step(cfg: EggrollConfig, step: float) -> float:
    """Return the root mean square, per weight, of the optimizer's step at lr 1, given the root mean
    square `step` of the update. Raises: ConfigError for an optimizer whose steps are not known.
    """
    name, kwargs = cfg.optimizer.name, cfg.optimizer.kwargs
    if name in ADAMS:
        return 1.0  # Adam moves each weight by about lr, whatever the gradient
    if name == "SGD":
        momentum = kwargs.get("momentum", 0.0)
        if not 0 <= momentum < 1:
            raise ConfigError(
                f"algo.lr=auto with algo.optimizer.kwargs.momentum={momentum:g}: it must be at"
                " least 0 and below 1."
            )
        return step * (1 - kwargs.get("dampening", 0.0)) / (1 - momentum)
    raise ConfigError(
        f"algo.lr=auto does not know the steps of algo.optimizer.name={name}. Use SGD, Adam or"
        " AdamW, or give algo.lr."
    )


# --- what people see


HEAD = "   sigma  changed  same pairs  cut off  answered  reward  spread  agreement"


def describe(row: Row) -> str:
    """Return the text of a row, for the table below HEAD."""
    shares = (row.changed, row.identical_pairs, row.truncated, row.answered)
    cells = [f"{'-' if share is None else f'{share:.0%}':>8}" for share in shares]
    agreement = "-" if row.prompt_agreement is None else f"{row.prompt_agreement:.2f}"
    marks = ("" if row.survived else "  broken") + ("  as set" if row.as_set else "")
    return (
        f"{row.sigma:8.2g} {cells[0]} {cells[1]:>11} {cells[2]} {cells[3]:>9} {row.reward:7.3f}"
        f" {row.reward_std:7.3f} {agreement:>10}{marks}"
    )


def draw(findings: Findings, path: Path) -> None:
    """Plot the measures over sigma, with the chosen sigma."""
    curves = {"reward": "reward", "changed": "answers changed"}
    curves |= {"identical_pairs": "pairs identical", "truncated": "answers cut off"}
    x = "sigma (dashed: chosen; dotted: reward without noise)"
    with plots.saved(path, "What sigma does", x, "share, reward or cosine") as axis:
        for (key, label), colour in zip(curves.items(), plots.COLOURS, strict=False):
            known = [row for row in findings.rows if getattr(row, key) is not None]
            if known:
                at, values = [row.sigma for row in known], [getattr(row, key) for row in known]
                axis.plot(at, values, color=colour, label=label, marker="o", markersize=8)
        axis.axhline(findings.centre, color="0.4", linestyle=":", linewidth=1.5)
        axis.axvline(findings.sigma, color="0.4", linestyle="--", linewidth=1.5)
        axis.set_xscale("log")


def tell(findings: Findings, context: Context) -> None:
    """Log the choice, and write RUN/probe.json and RUN/probe.png, on rank 0."""
    if not context.main:
        return
    lr = "" if findings.lr is None else f" algo.lr={findings.lr:.3g}"
    log.info("without noise: reward %.3f", findings.centre)
    log.info("probe: algo.sigma=%.3g%s: %s.", findings.sigma, lr, findings.why)
    write_text(context.out_dir / "probe.json", json.dumps(asdict(findings), indent=2) + "\n")
    draw(findings, context.out_dir / "probe.png")
