"""Settings: names, types and checks; the values live in conf/*.yaml, each exactly once. No torch in
here, so that `--help` stays fast.
"""

from common.config.algorithm import AlgorithmConfig, Rule, SteppedConfig
from common.config.checks import (
    AUTO,
    ConfigError,
    Count,
    Natural,
    Nonnegative,
    Number,
    Part,
    Positive,
    Share,
    Tuned,
    Whole,
    choice,
    flat,
    holds,
    name_folder,
    no_effect,
    one_of,
    shipped,
    unused,
)
from common.config.convert import typed
from common.config.schema import (
    AdapterConfig,
    BudgetConfig,
    DdpConfig,
    ForcedEndConfig,
    HardwareConfig,
    ModelConfig,
    OptConfig,
    OptimizerConfig,
    Run,
    SamplingConfig,
    ScheduleConfig,
    ScoringConfig,
    TinyConfig,
)
from common.config.validate import build, check
