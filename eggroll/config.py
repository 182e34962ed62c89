"""Names, types and checks of conf/algo/eggroll.yaml."""

from dataclasses import dataclass

from common.config import (
    ConfigError,
    OptConfig,
    OptimizerConfig,
    SamplingConfig,
    ScheduleConfig,
    above,
    at_least,
    choice,
)

POLICIES = ("lowrank", "full", "frozen")
FITNESS = ("zscore", "prompt_zscore", "centered_rank", "pair_sign")


@dataclass(kw_only=True)
class NoiseConfig:
    """Which parameters are perturbed, and how."""

    matrices: str
    vectors: str
    embeddings: str
    head: str
    patterns: dict[str, str]

    def __post_init__(self) -> None:
        for key in ("matrices", "vectors", "embeddings", "head"):
            choice(f"algo.noise.{key}", getattr(self, key), POLICIES)
        for pattern, policy in self.patterns.items():
            choice(f"algo.noise.patterns[{pattern!r}]", policy, POLICIES)
        if self.vectors == "lowrank":
            raise ConfigError(
                "algo.noise.vectors=lowrank is not possible: a vector has no rank. Use full or"
                " frozen."
            )


@dataclass(kw_only=True)
class StopAtConfig:
    """Guards; null = off."""

    drift: float | None

    def crossed(self, drift: float) -> str | None:
        """What to say where the drift is beyond its bound; None where it is within."""
        if self.drift is None or drift <= self.drift:
            return None
        return (
            f"drift {drift:.3g} is above algo.stop_at.drift={self.drift:g}. Lower algo.lr or raise"
            " algo.weight_decay."
        )

    def __post_init__(self) -> None:
        if self.drift is not None:
            above("algo.stop_at.drift", self.drift, 0)


@dataclass(kw_only=True)
class EggrollConfig:
    """Settings of EGGROLL; what each does stands beside its value in conf/algo/eggroll.yaml."""

    name: str
    steps: int | None
    members: int
    prompts_per_step: int
    samples_per_prompt: int
    rows_per_forward: int
    rank: int
    sigma: float
    lr: float
    mirrored: bool
    noise_reuse: int
    fitness: str
    noise: NoiseConfig
    optimizer: OptimizerConfig
    lr_schedule: ScheduleConfig
    sigma_schedule: ScheduleConfig
    weight_decay: float
    stop_at: StopAtConfig
    sampling: SamplingConfig

    def __post_init__(self) -> None:
        if self.steps is not None:
            at_least("algo.steps", self.steps, 1)
        at_least("algo.members", self.members, 2)
        for key in ("prompts_per_step", "samples_per_prompt", "rank", "noise_reuse"):
            at_least(f"algo.{key}", getattr(self, key), 1)
        at_least("algo.rows_per_forward", self.rows_per_forward, 2 if self.mirrored else 1)
        above("algo.sigma", self.sigma, 0)
        above("algo.lr", self.lr, 0)
        at_least("algo.weight_decay", self.weight_decay, 0)
        choice("algo.fitness", self.fitness, FITNESS)
        if self.mirrored and self.members % 2:
            raise ConfigError(
                f"algo.members={self.members} is odd, and algo.mirrored=true needs pairs. "
                f"Use algo.members={self.members + 1}, or algo.mirrored=false."
            )
        if self.fitness == "pair_sign" and not self.mirrored:
            raise ConfigError(
                "algo.fitness=pair_sign compares mirrored pairs. Set algo.mirrored=true, or use"
                " zscore."
            )
        if self.samples_per_prompt > 1 and self.sampling.temperature == 0:
            raise ConfigError(
                f"algo.samples_per_prompt={self.samples_per_prompt} has no effect at"
                " algo.sampling.temperature=0: greedy completions of one prompt are equal. Set a"
                " temperature above 0."
            )

    def directions(self) -> int:
        """Independent noise draws a step: members, or half of them when mirrored."""
        return self.members // 2 if self.mirrored else self.members


def check_switches(opt: OptConfig) -> None:
    """Raise ConfigError for an opt switch that has no effect in EGGROLL."""
    if opt.checkpointing.enabled:
        raise ConfigError(
            "opt=checkpointing has no effect with algo=eggroll: there is no backward pass to"
            " recompute for. Leave it out."
        )
    if opt.offload.enabled and not opt.amp.enabled:
        raise ConfigError(
            "opt=offload has no effect with algo=eggroll in float32: the forward uses the masters"
            " themselves. Leave it out, or add opt=amp."
        )
