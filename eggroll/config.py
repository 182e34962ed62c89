"""Names, types and checks of conf/algo/eggroll.yaml."""

import math
import operator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from common.config import (
    ConfigError,
    Count,
    Nonnegative,
    OptimizerConfig,
    Positive,
    Run,
    SamplingConfig,
    ScheduleConfig,
    Share,
    above,
    at_least,
    choice,
    no_effect,
    unused,
)

Policy = Annotated[str, (choice, ("lowrank", "full", "frozen"))]
AUTO = "auto"  # of sigma and lr: a probe chooses
LOOK_EVERY = 10  # steps, one of which is looked at closely for the log
FITNESS = ("zscore", "prompt_zscore", "component_zscore", "centered")
FITNESS += ("centered_rank", "pair_sign")


def positive_or_auto(key: str, value: float | str) -> None:
    """Raise ConfigError unless `value` is a number above 0, or auto."""
    if isinstance(value, str) and value != AUTO:
        raise ConfigError(f"{key}={value} is no number. Give one above 0, or auto.")
    if not isinstance(value, str):
        above(key, float(value), 0)


def members_or_range(key: str, value: int | str) -> None:
    """Raise ConfigError unless `value` is a number from 2 on, or doublings of one: 16-128."""
    if isinstance(value, int):
        return at_least(key, value, 2)
    first, dash, most = value.partition("-")
    numbers = [int(text) for text in (first, most if dash else first) if text.isdecimal()]
    doubled = len(numbers) == 2 and numbers[0] and numbers[1] / numbers[0]
    if not doubled or numbers[0] < 2 or doubled < 1 or not math.log2(doubled).is_integer():
        raise ConfigError(
            f"{key}={value} is no number of members. Give one from 2 on, such as 64, or two, the"
            " second of which is the first doubled some times, such as 16-128."
        )


def ends(value: int | str, sign: str) -> tuple[int, int]:
    """Return both numbers of 16-128 or 8/64; of a single number it, twice."""
    numbers = [int(text) for text in str(value).split(sign)]
    return numbers[0], numbers[-1]


def prompts_or_share(key: str, value: int | str) -> None:
    """Raise ConfigError unless `value` is a number of prompts, or an equal share of more: 8/64."""
    each, slash, whole = str(value).partition("/")
    if not (each.isdecimal() and int(each) and (not slash or whole.isdecimal())) or (
        slash and (int(whole) % int(each) or int(whole) <= int(each))
    ):
        raise ConfigError(
            f"{key}={value} is no number of prompts. Give one above 0, such as 8, or what each"
            " member answers of a larger multiple of it, such as 8/64."
        )


Tuned = Annotated[int | float | str, (positive_or_auto,)]


@dataclass(kw_only=True)
class NoiseConfig:
    """The parameters that are perturbed, and how."""

    matrices: Policy
    vectors: Policy
    embeddings: Policy
    head: Policy
    patterns: dict[str, Policy]

    def __post_init__(self) -> None:
        if self.vectors == "lowrank":
            raise ConfigError(
                "algo.noise.vectors=lowrank is not possible: a vector has no rank. Use full."
            )


@dataclass(kw_only=True)
class StopAtConfig:
    """Guards; null = off."""

    drift: Positive | None

    def crossed(self, drift: float) -> str | None:
        """Return what to say where the drift is beyond its bound; None where it is within."""
        if self.drift is None or drift <= self.drift:
            return None
        return (
            f"drift {drift:.3g} is above algo.stop_at.drift={self.drift:g}. Lower algo.lr or raise"
            " algo.weight_decay."
        )


@dataclass(kw_only=True)
class EggrollConfig:
    """Settings of EGGROLL; what each does stands beside its value in conf/algo/eggroll.yaml."""

    # How the progress line writes the numbers of a step.
    PROGRESS: ClassVar = {
        "reward": "reward {:.3f}",
        "metric": "",
        "tokens_per_second": "{:,.0f} tokens/s",
        "drift": "drift {:.2f}",
    }
    # Settings that a run that is resumed may change.
    RESUME_MAY_CHANGE: ClassVar = ("steps", "rollout_rows")
    # Of model.quantize, what is trained itself (eggroll/weights.py).
    WHOLE_NUMBERS: ClassVar = ("int8",)
    PROBES: ClassVar = True
    RENAMED: ClassVar = {"rows_per_forward": "algo.rollout_rows"}
    NO_EFFECT_WITH_METHOD: ClassVar = {
        "randopt": {"algo.lr": "algo.method=randopt, which moves no weights"}
    }

    name: str
    method: Annotated[str, (choice, ("eggroll", "randopt", "corp"))]
    steps: Count | None
    members: Annotated[int | str, (members_or_range,)]
    prompts_per_step: Annotated[int | str, (prompts_or_share,)]
    samples_per_prompt: Count
    rollout_rows: int | None
    rank: Count
    sigma: Tuned
    lr: Tuned
    mirrored: bool
    noise_reuse: Count
    fitness: Annotated[str, (choice, FITNESS)]
    sample_quantile: Share | None
    noise: NoiseConfig
    optimizer: OptimizerConfig
    lr_schedule: ScheduleConfig
    sigma_schedule: ScheduleConfig
    weight_decay: Nonnegative
    max_update: Positive | None
    stop_at: StopAtConfig
    sampling: SamplingConfig

    def __post_init__(self) -> None:
        if self.rollout_rows is not None:
            at_least("algo.rollout_rows", self.rollout_rows, self.pair)
        if self.mirrored and self.first_members % 2:
            times = self.most_members // self.first_members
            even = str(self.first_members + 1)
            even += f"-{(self.first_members + 1) * times}" if times > 1 else ""
            raise ConfigError(
                f"algo.members={self.members} is odd, and algo.mirrored=true needs pairs. "
                f"Use algo.members={even}, or algo.mirrored=false."
            )
        halves = self.prompts_each if self.sample_quantile is not None else self.rows_per_member
        if self.most_members > self.first_members and halves == 1:
            raise ConfigError(
                f"algo.members={self.members} has no effect with"
                f" algo.prompts_per_step={self.prompts_per_step}: members are doubled where halves"
                " of the prompts disagree. Give a step more prompts."
            )
        if self.fitness == "pair_sign" and not self.mirrored:
            raise ConfigError(
                "algo.fitness=pair_sign compares pairs. Set algo.mirrored=true, or use zscore."
            )
        if self.fitness == "prompt_zscore" and self.rows_per_member == 1:
            raise ConfigError(
                "algo.fitness=prompt_zscore has no effect with algo.prompts_per_step=1: it is"
                " zscore. Give a step more prompts, or use algo.fitness=zscore."
            )
        self._check_shares()
        if self.method != "eggroll":
            if self.most_members > self.first_members:
                raise ConfigError(
                    f"algo.members={self.members} has no effect with algo.method={self.method},"
                    " which tries as many members at every step. Set"
                    f" algo.members={self.first_members}."
                )
            no = f"with algo.method={self.method}, which takes the best members. Leave it out."
            idle = ["fitness", "noise_reuse", "weight_decay", "max_update", "sample_quantile"]
            idle += ["optimizer.name", "optimizer.kwargs", "stop_at.drift"]
            idle += ["lr_schedule.kind", "sigma_schedule.kind"]
            for key in idle:
                value = operator.attrgetter(key)(self)
                no_effect("algo/eggroll.yaml", key, value, no)
        if self.method == "randopt" and self.lr == AUTO:
            raise ConfigError(
                "algo.lr=auto has no effect with algo.method=randopt, which moves no weights. Leave"
                " it out."
            )
        if self.method == "corp" and self.prompts_each == 1:
            raise ConfigError(
                "algo.prompts_per_step=1 does not go with algo.method=corp, which takes a step"
                " where prompts earn more by more than the standard error, and that of one prompt"
                " is not known. Use 2 or more."
            )
        if self.max_update is not None and (self.optimizer.name != "SGD" or self.optimizer.kwargs):
            raise ConfigError(
                f"algo.max_update={self.max_update:g} goes with plain SGD, whose step is lr times"
                " the gradient. Leave out algo.optimizer, or algo.max_update."
            )
        if self.sample_quantile is not None and self.samples_per_prompt == 1:
            raise ConfigError(
                f"algo.sample_quantile={self.sample_quantile:g} has no effect with"
                " algo.samples_per_prompt=1. Take more samples, or leave it out."
            )
        if self.samples_per_prompt > 1 and self.sampling.temperature == 0:
            raise ConfigError(
                f"algo.samples_per_prompt={self.samples_per_prompt} has no effect at"
                " algo.sampling.temperature=0: they would be equal. Set a temperature above 0."
            )

    def _check_shares(self) -> None:
        """Raise ConfigError for settings that do not go with prompts that are shared out."""
        if self.shares == 1:
            return
        if not self.mirrored or self.first_members // self.pair % self.shares:
            raise ConfigError(
                f"algo.prompts_per_step={self.prompts_per_step} makes {self.shares} shares, which"
                f" {self.members} members with algo.mirrored={str(self.mirrored).lower()} cannot"
                " have: as many pairs answer each share, and only pairs can be compared. Give a"
                " number of pairs that the shares divide, and algo.mirrored=true."
            )
        if self.method != "eggroll":
            raise ConfigError(
                f"algo.method={self.method} compares members by their rewards, so all answer the"
                f" same prompts. Set algo.prompts_per_step={self.prompts_each}."
            )
        if self.fitness == "prompt_zscore":
            raise ConfigError(
                f"algo.fitness=prompt_zscore does not go with"
                f" algo.prompts_per_step={self.prompts_per_step}, where members answer different"
                " prompts. Use algo.fitness=zscore."
            )

    def check_run(self, run: Run) -> None:
        """Raise ConfigError for settings outside `algo` that do not go with these."""
        adapter = run.model.adapter
        if adapter is not None and run.opt.fsdp.enabled and run.opt.amp.enabled:
            raise ConfigError(
                "algo=eggroll with model.adapter does not go with opt=[fsdp,amp]: the adapter is"
                " float32 and whole on every rank, the weights are gathered in half precision. Use"
                " 'opt=[ddp,amp]', which needs 2 bytes per weight, or leave out one of the two."
            )
        for kind in ("vectors", "embeddings", "head") if adapter is not None else ():
            off = "with model.adapter, whose matrices alone are perturbed. Leave it out."
            no_effect("algo/eggroll.yaml", f"noise.{kind}", getattr(self.noise, kind), off)
        dropout = adapter.dropout if adapter is not None else 0
        if self.shares > 1 and run.engine["_target_"] != "common.sampling.native.open_native":
            raise ConfigError(
                f"algo.prompts_per_step={self.prompts_per_step} needs engine=native: another engine"
                " gives all members the same prompts."
            )
        unused(
            (
                dropout,
                f"model.adapter.dropout={dropout:g}",
                "with algo=eggroll: there is no backward pass",
            ),
            (
                run.opt.checkpointing.enabled,
                "opt=checkpointing",
                "with algo=eggroll: there is no backward pass to recompute for",
            ),
            (
                run.opt.offload.enabled and not run.opt.amp.enabled,
                "opt=offload",
                "with algo=eggroll in float32, whose forward uses the masters (add opt=amp)",
            ),
        )

    @property
    def pair(self) -> int:
        """Members that stay together: 2 where they are mirrored."""
        return 2 if self.mirrored else 1

    @property
    def rows_per_member(self) -> int:
        """Completions of one member per step."""
        return self.prompts_each * self.samples_per_prompt

    @property
    def first_members(self) -> int:
        """Members of the first step."""
        return ends(self.members, "-")[0]

    @property
    def most_members(self) -> int:
        """Members of a step at most."""
        return ends(self.members, "-")[1]

    @property
    def prompts_each(self) -> int:
        """Prompts that a member answers per step."""
        return ends(self.prompts_per_step, "/")[0]

    @property
    def prompts(self) -> int:
        """Prompts of a step: those of all members together."""
        return ends(self.prompts_per_step, "/")[1]

    @property
    def shares(self) -> int:
        """The parts that a step's prompts are in, of which a pair answers one."""
        return self.prompts // self.prompts_each

    def share_of(self, member: int) -> range:
        """Return the places, among the prompts of a step, of those that a member answers."""
        first = member // self.pair % self.shares * self.prompts_each
        return range(first, first + self.prompts_each)
