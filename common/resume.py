"""The choice of the checkpoint that a run goes on from, and the check that it may."""

import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from common import checkpoint
from common.config import ConfigError, Run
from common.distributed.context import Context

log = logging.getLogger("clutch")

# What may differ between a run and its continuation, beside the algorithm's RESUME_MAY_CHANGE;
# anything else would make another run of it.
FREE = (
    "resume",
    "budget",
    "evaluate",
    "checkpoint",
    "tracker",
    "scoring",
    "not_finite",
    "opt",
    "hardware",
    "slurm",
    "engine",
)


def check_algorithm(run: Run, out_dir: Path) -> None:
    """Raise ConfigError where `out_dir` holds a run of another algorithm."""
    path = out_dir / "run.yaml"
    if not path.exists():
        return
    loaded: Any = OmegaConf.load(path)
    other = OmegaConf.select(loaded, "config.algo.name")
    if other not in (None, run.algo.name):
        raise ConfigError(f"{out_dir} holds a run of algo={other}. Use another hydra.run.dir.")


def find(run: Run, context: Context) -> checkpoint.Checkpoint | None:
    """The newest valid checkpoint that `run.resume` names, or None for a fresh start.

    Raises: ConfigError where a folder is named that has none, where a fresh run would overwrite an
    earlier one, or where the settings differ from the checkpoint's (the keys are listed).
    """
    own = context.out_dir / "checkpoints"
    check_algorithm(run, context.out_dir)
    context.barrier()  # no rank looks while another may still write
    present = any(own.glob("step-*"))
    finished = context.out_dir / "result.json"
    if finished.exists() and not present:
        raise ConfigError(
            f"{context.out_dir} holds a run that has ended, without its checkpoints. Use another"
            " hydra.run.dir."
        )
    if run.resume == "no":
        if present:
            raise ConfigError(
                f"{context.out_dir} already holds a run. Use resume=auto to go on with it, or"
                " another hydra.run.dir."
            )
        return None
    if run.resume != "auto" and not Path(run.resume).exists():
        raise ConfigError(
            f"resume={run.resume}: no valid checkpoint there. Give a run folder, or resume=auto"
            " or no."
        )
    found = checkpoint.latest(own)
    if found is None and present:
        raise ConfigError(
            f"all checkpoints in {own} are damaged (see the warnings), and starting anew would"
            " overwrite the run. Move them away to do that, or use another hydra.run.dir."
        )
    if (
        found is not None
        and run.resume != "auto"
        and not Path(run.resume).resolve().samefile(context.out_dir)
    ):
        log.warning(
            "resume=%s is not looked at: %s has checkpoints of its own. To begin there again, use"
            " another hydra.run.dir.",
            *(run.resume, context.out_dir),
        )
    if found is None and run.resume != "auto":
        root = Path(run.resume)
        found = checkpoint.latest(root / "checkpoints" if (root / "checkpoints").is_dir() else root)
        if found is None:
            raise ConfigError(
                f"resume={run.resume}: no valid checkpoint there. Give a run folder, or resume=auto"
                " or no."
            )
    if found is None:
        return None
    given = asdict(run)
    own_keys = [f"algo.{key}" for key in run.algo.RESUME_MAY_CHANGE]
    differing = differences(found.state["config"], given, (*FREE, *own_keys))
    # None where the run is counted in epochs, whose number must stay.
    steps = given["algo"].get("steps")
    if run.scheduled and steps is not None and found.state["config"]["algo"]["steps"] != steps:
        differing.append(
            f"algo.steps was {found.state['config']['algo']['steps']}, which"
            f" algo.{run.scheduled[0]} depends on"
        )
    if steps is not None and steps < found.step:
        differing.append(f"{found.step} steps are done already, algo.steps is {steps}")
    if differing:
        raise ConfigError(
            f"{found.path} was made with other settings: {'; '.join(differing)}. "
            "Give the same ones, or start anew with another hydra.run.dir."
        )
    if not found.path.is_relative_to(own):
        # Another run, which must not write into the first one's record.
        found.state["run"]["tracker"] = {}
    if context.main:
        log.info("resuming after step %d from %s", found.step, found.path)
        if steps is None or steps > found.step:
            finished.unlink(missing_ok=True)  # no longer what the run came to
    return found


def differences(saved: Any, given: Any, free: Sequence[str] = FREE, prefix: str = "") -> list[str]:
    """Describe what differs between two nested settings, but for the keys in `free`."""
    if prefix in free:
        return []
    if isinstance(saved, dict) and isinstance(given, dict):
        keys = [*saved, *(key for key in given if key not in saved)]
        dot = f"{prefix}." if prefix else ""
        pairs = [(f"{dot}{key}", saved.get(key), given.get(key)) for key in keys]
        return [text for key, old, new in pairs for text in differences(old, new, free, key)]
    return [] if saved == given else [f"{prefix} was {saved!r}, is {given!r}"]
