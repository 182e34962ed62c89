"""Compose a run with Hydra, convert it to typed dataclasses, and start its workers.

    python launch.py algo=eggroll hardware=a100_40g
    python launch.py -m algo=eggroll seed=1,2,3
    torchrun --nproc_per_node=2 launch.py algo=eggroll

From Python: `run = compose(["algo=eggroll", "seed=1"])`, then `train(run, "outputs/mine")`.
This module does not import torch, which the workers do, so that `--help` and `--cfg job` answer at
once.
"""

import logging
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from common.config import (
    CONF,
    HYDRA_ERRORS,
    SLURM,
    AlgorithmConfig,
    ConfigError,
    Run,
    check_groups,
    choice,
    command,
    describe,
    explain,
    find_source,
    open_dicts,
    resolve_also,
    resolvers,
    search_in,
    typed,
)
from common.system import (
    check_group,
    ending_command,
    ending_job,
    is_of_srun,
    keep_early,
    lock,
    user_code,
)
from common.task import build

log = logging.getLogger("clutch")

# The algorithms, a closed set: the dataclass of each one's settings, in a module without torch. The
# train.py next to it has train(run, context, task) -> Result, and plan(run, context, task) for
# plan=true, unless the class names another function in STARTS_RANKS. common/config/algorithm.py
# lists the other attributes of the class.
ALGORITHMS: dict[str, type[AlgorithmConfig]] = {
    "eggroll": user_code.load("eggroll.config:EggrollConfig"),
    "grpo": user_code.load("grpo.config:GrpoConfig"),
    "rft": user_code.load("rft.config:RftConfig"),
    "sft": user_code.load("sft.config:SftConfig"),
    "classify": user_code.load("ddp_bench.config:ClassifyConfig"),
    "scaling": user_code.load("ddp_bench.config:ScalingConfig"),
    "predict": user_code.load("ddp_bench.config:PredictConfig"),
}


def to_run(config: DictConfig, overrides: list[str], config_dir: str | None = None) -> Run:
    """Return the typed run. Raises: ConfigError for wrong settings, and for overrides without
    effect.
    """
    name = config.algo.get("name") if OmegaConf.is_config(config.algo) else config.algo
    choice("algo", name, tuple(ALGORITHMS))
    command.check_effect(config, ALGORITHMS[name], overrides)
    resolve_also(config, config_dir)
    user_code.update_targets(config)
    run = typed(config, ALGORITHMS[name])
    command.check_run(run, ALGORITHMS, overrides)
    return run


def compose(overrides: list[str], config_dir: str | None = None) -> Run:
    """Compose a run from Python.

    Args:
        overrides: as on the command line.
        config_dir: a further folder of YAML files, as --config-dir.
    Raises: ConfigError with the text that the command line would print.
    """
    resolvers.register()
    search = [search_in(config_dir)] if config_dir else []
    try:
        overrides = open_dicts(overrides)
        check_groups(overrides, config_dir)
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            config = hydra.compose("config", overrides=[*search, *overrides])
            return to_run(config, overrides, config_dir)
    except HYDRA_ERRORS as error:
        raise ConfigError(explain(error, overrides, config_dir)) from None


def train(
    run: Run,
    out_dir: str | Path,
    task: Any = None,
    *,
    rows: Any = None,
    test_rows: Any = None,
    reward: Callable[..., Any] | None = None,
) -> Any:
    """Train in this process, or in the ranks of opt=ddp, and return the algorithm's `Result`. With
    plan=true, return a `Plan`. An algorithm that starts its own ranks returns its own kind of
    result.

    Args:
        run: the settings, from `compose`.
        out_dir: the run folder, made if needed.
        task: the user's own task, with the methods of common.task.Task or of the algorithm's kind
            of task; None = the task that run.task names.
        rows: prompts and answers for task=custom, in place of a task: a list of dicts, a
            datasets.Dataset or a pandas data frame.
        test_rows: the held-out rows, in the same form.
        reward: the reward function of task=custom, called with a completion and its answer, or with
            the arguments of TRL; None = task.reward (docs/python.md).
    Raises: ConfigError for a mistake in the settings or in the rows.
    """
    if any(given is not None for given in (rows, test_rows, reward)):
        if task is not None:
            raise ConfigError("train takes a task or rows=, and not both. Leave one of them out.")
        run, task = user_code.load("common.tasks.in_memory:build")(run, rows, test_rows, reward)
    if task is None:
        task = build_early(run, *map(user_code.load, run.algo.BUILDS_TASK))
    if starter := run.algo.STARTS_RANKS:
        folder = Path(out_dir).resolve()
        with lock.held(folder / ".lock-own"):  # its ranks hold the folder in turn
            return user_code.load(starter)(run, folder, task)
    module = f"{type(run.algo).__module__.partition('.')[0]}.train"
    if run.plan:
        return user_code.load("common.memory.plan:show")(f"{module}:plan", run, task)
    return user_code.load("common.distributed.workers:launch")(
        f"{module}:train", run, Path(out_dir), task
    )


def build_early(run: Run, maker: Callable[[dict[str, Any]], Any] = build) -> Any:
    """Build the run's task with its rows, and check the model's folder, the tasks of evaluate.also
    and the text of evaluate.text. This happens before torch is imported, which takes seconds.

    Log messages are kept until the log is open. Returns: the task; None if every rank builds its
    own.
    Raises: ConfigError for a mistake in one of them.
    """
    from common.tasks import build_others, forget_others, read_text  # slow to import

    if "RANK" in os.environ:  # ranks check later, when an error of one can reach the others
        return None
    if run.model.path is not None:
        find_source(run.model)
    keep_early(log)
    task = maker(run.task)
    forget_others()  # the files of an earlier run of this process may have changed
    build_others(run.evaluate.also)
    if run.evaluate.text is not None:
        read_text(run.evaluate.text)
    return None if run.opt.workers[1].enabled else task


@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def _main(config: DictConfig) -> None:
    with ending_job() as folder:
        of_hydra = HydraConfig.get()
        run = to_run(config, list(of_hydra.overrides.task), command.given_dir(of_hydra))
        if run.slurm.script is not None:  # `main` has handled it on the command line of one run
            sweeps = "Sweeps: hydra/launcher=submitit_slurm."
            raise ConfigError(f"slurm.script goes on the command line, and not with -m. {sweeps}")
        train(run, folder)


def main() -> None:
    """Run the command line. Exit codes: 0 = done, 2 = a mistake in the settings; the others are in
    common/system/signals.py.
    """
    resolvers.register()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises errors, so that they are explained here
    arguments = sys.argv[1:] = open_dicts(command.resolve_config_path(sys.argv[1:]))
    with ending_command(arguments):
        if describe.asks(arguments):
            print(describe.answer(arguments, ALGORITHMS))
            return None
        arguments = sys.argv[1:] = command.complete_repeated(arguments)
        if is_of_srun():
            user_code.load(f"{SLURM}:adopt")()
        check_group()
        command.check_secrets(arguments)
        check_groups(arguments, command.find_config_dir(arguments))
        if any(argument.startswith("slurm.script=") for argument in arguments):
            return submit(arguments)
        if not {"--cfg", "-c", "--help", "-h", "--info", "-i"} & set(arguments):
            command.check_folder(arguments)
        command.check_values(arguments, compose)
        if command.asks_for_plan(arguments):  # a plan leaves the .hydra of the folder's run alone
            sys.argv.append("hydra.output_subdir=null")
        with command.removing_empty_folders(arguments), lock.reserved(arguments):
            _main()


def submit(arguments: list[str]) -> None:
    """Check the command and write a batch script for it: slurm.script=FILE. Raises: ConfigError."""
    command.check_script(arguments)
    settings = [a for a in arguments if "=" in a and not a.startswith(("-", "hydra."))]
    run = compose(settings, command.find_config_dir(arguments))
    written = user_code.load(f"{SLURM}:write")(run, arguments)
    print(f"{written} is written. Read it, then: sbatch {shlex.quote(str(written))}")


if __name__ == "__main__":
    main()
