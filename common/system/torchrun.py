"""The variables by which torchrun, or srun, tells a rank who it is. No torch in here."""

import os
from collections.abc import Mapping

from common.config import ConfigError
from common.system.failures import GROUP


def is_of_srun() -> bool:
    """Return whether srun started several ranks, and nobody has set torchrun's variables yet."""
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "RANK" not in os.environ


def check_group() -> None:
    """Raise ConfigError where some of torchrun's variables are set, and others are not."""
    variables = {name: os.environ[name] for name in sorted(GROUP) if name in os.environ}
    if variables.keys() == GROUP or not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & variables.keys():
        return
    there = " ".join(f"{name}={text}" for name, text in variables.items())
    raise ConfigError(
        f"the environment has {there} without {', '.join(sorted(GROUP - variables.keys()))}, so it"
        f" is that of no rank. Run unset {' '.join(variables)}, or start the ranks with torchrun."
    )


def ranked() -> bool:
    """Return whether another program started this rank: torchrun, or srun, whose variables
    plugins/slurm has turned into torchrun's.
    """
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def leave_out_ours(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of another program: this one's without the variables of the run's
    ranks and of its allocator.

    A program that makes a group of its own, such as vLLM, would wait with torchrun's variables for
    a store that nobody serves. And vLLM's sleep mode switches expandable segments off only where it
    knows of them.
    """
    kinds = ("", "LOCAL_", "GROUP_", "ROLE_")
    ours = {f"{kind}{name}" for kind in kinds for name in ("RANK", "WORLD_SIZE")}
    ours |= {"ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "PYTORCH_ALLOC_CONF"}
    return {
        name: value
        for name, value in environment.items()
        if name not in ours and not name.startswith("TORCHELASTIC_")
    }
