"""The environment variables with which torchrun, or srun, identifies a rank. Imports no torch."""

import os
from collections.abc import Mapping

from common.config import ConfigError
from common.system.failures import GROUP


def is_of_srun() -> bool:
    """Return whether srun started several ranks and torchrun's variables are not set yet."""
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "RANK" not in os.environ


def check_group() -> None:
    """Raise ConfigError if only some of torchrun's variables are set."""
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
    plugins/slurm has translated to torchrun's.
    """
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def leave_out_ours(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for another program: this one's without the variables of the run's
    ranks and of its allocator.

    With torchrun's variables, a program that makes a process group of its own, such as vLLM, would
    wait for a store that nobody serves. And vLLM's sleep mode disables expandable segments only if
    it set them itself.
    """
    kinds = ("", "LOCAL_", "GROUP_", "ROLE_")
    ours = {f"{kind}{name}" for kind in kinds for name in ("RANK", "WORLD_SIZE")}
    ours |= {"ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "PYTORCH_ALLOC_CONF"}
    return {
        name: value
        for name, value in environment.items()
        if name not in ours and not name.startswith("TORCHELASTIC_")
    }
