"""Settings: names, types and checks; the values live in conf/*.yaml, each exactly once. No torch in
here, so that `--help` stays fast.
"""

from common.config.algorithm import AlgorithmConfig, Rule
from common.config.checks import (
    AUTO,
    ConfigError,
    Count,
    Natural,
    Nonnegative,
    Positive,
    Share,
    Tuned,
    above,
    at_least,
    at_most,
    below,
    choice,
    flat,
    holds,
    no_effect,
    share,
    shipped,
    unused,
)
from common.config.convert import build, no_secrets, typed
from common.config.explain import unknown_key, wrong_type
from common.config.schema import (
    AdapterConfig,
    AmpConfig,
    BudgetConfig,
    CheckpointConfig,
    CompileConfig,
    DdpConfig,
    EvaluateConfig,
    FsdpConfig,
    HardwareConfig,
    ModelConfig,
    NotFiniteConfig,
    OptConfig,
    OptimizerConfig,
    PeakConfig,
    ProfileConfig,
    Run,
    SamplingConfig,
    ScheduleConfig,
    ScoringConfig,
    SlurmConfig,
    SwitchConfig,
    TinyConfig,
    TrackerConfig,
)
