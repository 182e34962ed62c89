"""One big run on Slurm: a batch script for it, and the ranks that srun starts.

    python launch.py algo=NAME task=chess 'opt=[amp,ddp]' \\
        slurm.script=chess.sbatch slurm.nodes=2 slurm.gpus_per_node=8
    sbatch chess.sbatch

srun is the one launcher: it starts one rank per device, and each rank tells torch.distributed who
it is. So Slurm's warning (SIGUSR1) reaches the ranks themselves; they save and exit with 75, and
the script puts the job back into the queue. It then goes on in the same run folder. Sweeps use
hydra/launcher=submitit_slurm. This module imports no torch.
"""

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from common.config import ConfigError, Run, show
from common.system import EXIT_SIGNAL, write_text

# seconds that ranks may go on after the first has ended: rank 0 writes what comes out, others wait
# in vain for a dead one
LEFT_BEHIND = 300
WARNED_EARLY = 128 + 10  # SIGUSR1 before the first step, where nothing handles it yet


def write(run: Run, arguments: list[str]) -> Path:
    """Write the batch script run.slurm.script for the command `arguments`. Returns its path.

    Raises: ConfigError if there is a script that this function did not write, or if it cannot be
    written.
    """
    assert run.slurm.script is not None
    path = Path(run.slurm.script)
    try:
        if path.exists() and not path.read_bytes().startswith(_HEAD.encode()):
            raise ConfigError(
                f"slurm.script={path} is there already, and is no script of launch.py. Choose"
                " another name."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, script(run, arguments))
    except OSError as error:
        raise ConfigError(
            f"slurm.script={path} cannot be written: {error.strerror}. Choose another file."
        ) from None
    except UnicodeEncodeError as error:
        around = error.object[max(0, error.start - 20) : error.end]
        raise ConfigError(
            f"the command holds bytes that are not UTF-8 ({around!r}), which a batch script cannot."
            " Rename that file or value."
        ) from None
    return path


# Options of sbatch that `script` decides, and the setting to use instead.
_OWN = {
    "nodes": "nodes",
    "ntasks-per-node": "ranks_per_node",
    "ntasks": "ranks_per_node",
    "time": "time",
    "cpus-per-task": "cpus_per_rank",
    "gpus-per-node": "gpus_per_node",
    "gpus-per-task": "gpus_per_node",
    "partition": "partition",
    "account": "account",
    "signal": "warn_seconds",
    **dict.fromkeys(("requeue", "no-requeue", "open-mode")),
}
# Options of srun that `script` decides, or that would change which ranks there are.
_OWN_OF_SRUN = {
    "nodes": "nodes",
    "ntasks": "ranks_per_node",
    "ntasks-per-node": "ranks_per_node",
    "cpus-per-task": "cpus_per_rank",
    "gpus-per-node": "gpus_per_node",
    "gpus-per-task": "gpus_per_node",
    **dict.fromkeys(("kill-on-bad-exit", "wait")),
}
_HEAD = "#!/bin/bash\n# Written by launch.py slurm.script="


def script(run: Run, arguments: list[str]) -> str:
    """Return the batch script.

    Args: arguments: the arguments of launch.py; those that begin with slurm. are omitted.
    """
    settings, gpus = run.slurm, run.slurm.gpus_per_node
    if gpus is None:
        gpus = 0 if run.hardware.name == "cpu" else 1
    ranks = settings.ranks_per_node or (1 if run.algo.STARTS_RANKS else max(1, gpus))
    others = [argument for argument in arguments if not argument.lstrip("+").startswith("slurm.")]
    pairs = (argument.lstrip("+").partition("=") for argument in others)
    chosen = {key: value for key, _, value in pairs}
    _check(run, ranks, gpus, chosen)
    task = run.task.get("name") or run.task["_target_"].rpartition(".")[2].lower()
    # A task's name may hold what the shell, Hydra or a folder takes for something else.
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", f"{run.algo.name}_{task}")
    command = [sys.executable, str(Path(__file__).resolve().parents[2] / "launch.py"), *others]
    if "resume" not in chosen and not run.algo.STARTS_RANKS:
        command.append("resume=auto")
    words = [shlex.quote(word) for word in command]
    # a job keeps its number when it is queued again, and so its folder
    if "hydra.run.dir" not in chosen:
        words.append(f'"hydra.run.dir=outputs/{name}_$SLURM_JOB_ID"')
    options = {
        "job-name": name,
        "output": "%x_%j.out",
        "open-mode": "append",
        "nodes": settings.nodes,
        "ntasks-per-node": ranks,
        "cpus-per-task": settings.cpus_per_rank,
        "gpus-per-node": gpus or None,
        "time": settings.time,
        "partition": settings.partition,
        "account": settings.account,
        "signal": f"USR1@{settings.warn_seconds}",
        **settings.options,
    }
    of_srun = {
        "kill-on-bad-exit": 0,
        "wait": LEFT_BEHIND,
        "cpus-per-task": settings.cpus_per_rank,
        **settings.srun_options,
    }
    lines = [
        f"{_HEAD}{settings.script}; submit it with: sbatch {shlex.quote(str(settings.script))}",
        *(f"#SBATCH {option}" for option in _spell(options)),
        "#SBATCH --requeue",
        "set -eo pipefail",
        *settings.setup,  # which may read variables that are not set
        "set -u",
        f"cd {shlex.quote(os.getcwd())}",
        *_MEETING.splitlines(),
        f"srun {' '.join(_spell(of_srun))} \\",
        "    " + " ".join(words) + " && code=0 || code=$?",
        *_AGAIN.splitlines(),
    ]
    return "\n".join(lines) + "\n"


def _spell(options: dict[str, Any]) -> list[str]:
    """Return options by their long names as words of the shell. true = an option without a value;
    false and None = no option.
    """
    return [
        f"--{key}" + ("" if value is True else f"={shlex.quote(str(value))}")
        for key, value in options.items()
        if value is not None and value is not False
    ]


def _check(run: Run, ranks: int, gpus: int, given: dict[str, str]) -> None:
    settings = run.slurm
    if gpus and ranks > gpus:
        raise ConfigError(
            f"slurm.ranks_per_node={ranks}, but slurm.gpus_per_node={gpus}: each rank has a device"
            f" of its own. Ask for slurm.gpus_per_node={ranks}."
        )
    total, each = settings.nodes * ranks, run.opt.fsdp.ranks_per_group
    if total > 1 and run.algo.STARTS_RANKS:
        raise ConfigError(
            f"algo={run.algo.name} starts its own ranks, and srun would start {total}. Use"
            " slurm.nodes=1 slurm.ranks_per_node=1, with slurm.cpus_per_rank for all of them."
        )
    for switch, workers in (("ddp", run.opt.ddp), ("fsdp", run.opt.fsdp)):
        if total > 1 and workers.ranks is not None:
            raise ConfigError(
                f"opt.{switch}.ranks={workers.ranks} has no effect: srun starts {total} ranks."
                " Leave it out, and say how many with slurm.ranks_per_node."
            )
    # one rank alone starts opt.fsdp.ranks of its own
    if total > 1 and run.opt.fsdp.enabled and each and total % each:
        raise ConfigError(
            f"opt.fsdp.ranks_per_group={each} does not divide the {total} ranks of"
            f" slurm.nodes={settings.nodes} with {ranks} each."
        )
    _check_options("slurm.options", settings.options, _OWN)
    _check_options("slurm.srun_options", settings.srun_options, _OWN_OF_SRUN)
    if given.get("resume", "").strip("'\"") == "no":
        why = "a job that is queued again goes on. Leave it out."
        raise ConfigError(f"resume=no does not go with slurm.script: {why}")
    if "${" in given.get("hydra.run.dir", ""):
        raise ConfigError(
            f"hydra.run.dir={given['hydra.run.dir']} may be another folder when the job is queued"
            " again. Name one, or leave it out."
        )


def _check_options(group: str, options: dict[str, Any], own: dict[str, str | None]) -> None:
    """Raise ConfigError for an option that the script sets itself, and for a key that is not the
    long name of an option.

    Args: own: the setting to use instead; None = there is none.
    """
    for key, value in options.items():
        if not re.fullmatch(r"[a-z][a-z0-9-]*[a-z0-9]", str(key)):
            raise ConfigError(
                f"{group}.{key}={show(value)} is no option: give its long name without the dashes,"
                f" such as {group}.comment=mine."
            )
        if key in own:
            instead = f"Use slurm.{own[key]}." if own[key] else "Leave it out."
            raise ConfigError(f"{group}.{key} is what the script sets itself. {instead}")


_MEETING = """\
# The ranks meet on the first node, at a port that other jobs of that node do not have.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR=$(scontrol show node --oneliner "$first" |
    grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
# Slurm warns all ranks before it takes the nodes away: they finish the step, save, and exit."""

_AGAIN = f"""\
if [ "$code" = {EXIT_SIGNAL} ] || [ "$code" = {WARNED_EARLY} ]; then
    echo "stopped by a signal: back into the queue, then on from the newest checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code\""""


def adopt() -> None:
    """Set the variables of torch.distributed (RANK, WORLD_SIZE, ...) if srun started several ranks.
    Does nothing under torchrun.

    Raises: ConfigError if ranks of several nodes have no address to meet at.
    """
    environment = os.environ
    ranks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    if ranks == 1 or "RANK" in environment:
        return
    if environment.get("SLURM_STEP_NUM_NODES", "1") == "1":
        environment.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_ADDR" not in environment:
        raise ConfigError(
            f"srun started {ranks} ranks on {environment['SLURM_STEP_NUM_NODES']} nodes, and"
            " MASTER_ADDR does not say where they meet. Set it to the address of the first node,"
            " or let launch.py write the batch script: slurm.script=FILE."
        )
    environment.setdefault("MASTER_PORT", str(20000 + int(environment["SLURM_JOB_ID"]) % 20000))
    environment["RANK"], environment["WORLD_SIZE"] = environment["SLURM_PROCID"], str(ranks)
    environment["LOCAL_RANK"] = environment["SLURM_LOCALID"]
    # As "4" or "4(x2),1": nodes in turn. The script gives every node as many.
    by_node = environment["SLURM_STEP_TASKS_PER_NODE"]
    environment["LOCAL_WORLD_SIZE"] = by_node.partition("(")[0].partition(",")[0]
