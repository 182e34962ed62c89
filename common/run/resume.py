"""Find the checkpoint that a run resumes from, and check that the run may resume from it."""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.checkpoint import checkpoint
from common.config import ConfigError, Run
from common.distributed import Context
from common.run.checkpoints import Checkpointed
from common.run.state import RunState
from common.system import NUMBER, safe_read, user_code

log = logging.getLogger("clutch")

# Settings that may change when a run resumes, in addition to the algorithm's RESUME_MAY_CHANGE; any
# other change would make it a different run. evaluate.examples is not among them: the evaluations
# before and after training use the same number of examples.
FREE = ("resume", "budget", "checkpoint", "tracker", "scoring", "not_finite", "completions")
FREE += ("opt", "hardware", "slurm", "engine", "model.adapter.merge")
# Their values end up in `algo` and `model.tiny`, which are compared.
FREE += ("model.recipe", "task.tiny")
FREE += ("evaluate.every", "evaluate.samples", "evaluate.also", "evaluate.text")
FREE += ("evaluate.stop_at", "keep")
# Settings that an earlier version did not have, with the value that keeps its behaviour.
CAME_LATER = {
    "algo.answers": "auto",
    "algo.fitness_of": "rewards",
    "algo.likelihood": "token",
    "algo.minibatches": 1,
    "algo.record": None,
    "algo.sampling.stop": [],
    "evaluate.repeats": 1,
    "evaluate.sampling": "greedy",
    "evaluate.validation_examples": 0,
    "opt.compile.training": False,
    "task.call_seconds": 1.5,
    "task.chat": False,
    "task.format": {},
    "task.incomplete": "error",
    "task.reward_errors": "error",
    "task.reward_weight": 1.0,
    "task.right_at": 1.0,
    "task.system": "",
}
# Settings that only earlier versions had, with the values that switched them off.
TAKEN_OUT = {
    "algo.curriculum": False,
    "algo.forced_end": {"text": None},
    "algo.length_cosine": 0.0,
    "algo.max_update": None,
}
# The types of the evaluation before the first step in a checkpoint, and of the choice of a model.
BEFORE = {"metrics": {str: NUMBER}, "completions?": [str], "scores?": {str: list}}
CHOICE = {
    **{"step": int, "value": NUMBER, "metric": str, "examples": int, "values": [NUMBER]},
    **{"measured": int, "cost": int, "fallen": int, "earlier": [int]},
    "best": {"step": int, "value": NUMBER, "scores": [NUMBER]},
}


def check_algorithm(run: Run, out_dir: Path) -> None:
    """Raise ConfigError if `out_dir` holds a run of another algorithm."""
    kind = {"config": {"algo": {"name": str}}}
    saved = safe_read.read_or_warn(out_dir / "run.yaml", kind)  # where damaged, it is written again
    other = saved and saved["config"]["algo"]["name"]
    if other not in (None, run.algo.name):
        raise ConfigError(f"{out_dir} holds a run of algo={other}. Use another hydra.run.dir.")


def take_over(run: Run, context: Context, state: RunState, saved: Checkpointed) -> None:
    """Load the newest checkpoint that `run.resume` names, if there is one, into the algorithm and
    into `state`, the state of a run that begins. Raises: what `find` raises, and ConfigError if the
    checkpoint does not fit.
    """
    resumed = find(run, context, state.content())
    if resumed is not None:
        with safe_read.reading(resumed.path, "Remove it to go on from an earlier one."):
            saved.load(resumed)
        reproducible, digests = state.reproducible, state.digests
        state.update(resumed.state["run"])
        state.reproducible = state.reproducible and reproducible
        state.digests = digests


def find(run: Run, context: Context, fresh: dict[str, Any]) -> checkpoint.Checkpoint | None:
    """Return the newest valid checkpoint that `run.resume` names; None for a fresh start.

    Args: fresh: the state of a run that begins; a saved state must have the same types.
    Raises: ConfigError if a named folder has no checkpoint, if a fresh run would overwrite an
    earlier one, or if the task's rows or the settings differ from the checkpoint's (the differing
    keys are listed).
    """
    folder = context.out_dir / "checkpoints"
    check_algorithm(run, context.out_dir)
    context.meet()  # no rank looks while another may still write
    kinds = {f"{key}?": _kind(value) for key, value in fresh.items()}
    kinds |= {"step": int, "before?": BEFORE, "choice?": CHOICE}
    kind = {"run": kinds, "config": {"algo": dict}}
    newest = _locate(run, context, folder, kind)
    check_newest(context, newest)
    if newest is None:
        if context.main:  # a run that had nothing to learn has a result without checkpoints
            forget_result(context.out_dir)
        return None
    refuse(newest.path, list_changes(run, newest))
    then, now = newest.state["run"].get("digests", fresh["digests"]), fresh["digests"]
    if "rows" in now and then.get("rows", now["rows"]) != now["rows"]:
        raise ConfigError(
            f"{newest.path} was made with other training or test rows. Give the same data, or start"
            " anew with another hydra.run.dir."
        )
    _warn_of_schedule(run, newest, context.main)
    _forget_others(run, newest, then.get("beside") == now.get("beside"))
    if not newest.path.is_relative_to(folder):
        # Another run, which must not write into the first one's record.
        newest.state["run"]["tracker"] = {}
        # The checkpoints that the choice names are in that folder.
        newest.state["run"].pop("choice", None)
    if context.main:
        log.info("resuming after step %d from %s", newest.step, newest.path)
        steps = asdict(run)["algo"].get("steps")
        if steps is None or steps > newest.step:
            forget_result(context.out_dir)
    return newest


def check_newest(context: Context, newest: checkpoint.Checkpoint | None) -> None:
    """Raise ConfigError if a rank has found another newest checkpoint than rank 0."""
    name = None if newest is None else newest.path.name
    if (rank := context.find_other(name)) is not None:
        where = "none" if newest is None else newest.path
        raise ConfigError(
            f"rank {rank} finds another newest checkpoint than rank 0, which finds {where}: their"
            " nodes do not see the same files yet. Start again in a moment."
        )


def forget_result(folder: Path) -> None:
    """Remove the result of the run in a folder, and the completions after training, because it
    resumes.
    """
    for name in ("result.json", "completions/after.jsonl"):
        (folder / name).unlink(missing_ok=True)


def _forget_others(run: Run, found: checkpoint.Checkpoint, same_rows: bool) -> None:
    """Remove from the saved evaluation before the first step the measures of texts and tasks that
    have changed since.

    Args: same_rows: whether the rows of all these texts and tasks are the same as before.
    """
    now, then = json.loads(json.dumps(asdict(run.evaluate))), found.state["config"]["evaluate"]
    others = {f"{name}/": node == now["also"].get(name) for name, node in then["also"].items()}
    others["text/"] = then["text"] == now["text"]
    others = {name: same and same_rows for name, same in others.items()}
    changed = tuple(name for name, same in others.items() if not same)
    before = found.state["run"].get("before", {})
    for measures in (before.get("metrics", {}), before.get("scores", {})):
        for name in [name for name in measures if name.startswith(changed)]:
            del measures[name]


def _kind(value: Any) -> Any:
    if value is None:
        return object
    return NUMBER if isinstance(value, NUMBER) else type(value)


def _locate(run: Run, context: Context, own: Path, kind: Any) -> checkpoint.Checkpoint | None:
    # The checkpoint before the first step has no work that could be lost.
    present = any(checkpoint.step_of(path) for path in own.glob("step-*"))
    result = context.out_dir / "result.json"
    # A run without a step has no weights that could be lost.
    ended = not present and result.exists() and (run.resume == "no" or _has_steps(result))
    if ended:
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
    named = None if run.resume == "auto" else Path(run.resume)
    nothing = f"resume={run.resume}: no valid checkpoint there. Give a run folder, or auto or no."
    if named is not None and not named.exists():
        raise ConfigError(nothing)
    newest = checkpoint.latest(own, kind)
    if newest is None and present:
        raise ConfigError(
            f"all checkpoints in {own} are damaged (see the warnings), and starting anew would"
            " overwrite the run. Move them away to do that, or use another hydra.run.dir."
        )
    if named is None:
        return newest
    if newest is not None:
        if not named.resolve().samefile(context.out_dir):
            log.warning(
                "resume=%s is not looked at: %s has checkpoints of its own. To begin there again,"
                " use another hydra.run.dir.",
                *(run.resume, context.out_dir),
            )
        return newest
    below = named / "checkpoints"
    newest = checkpoint.latest(below if below.is_dir() else named, kind)
    if newest is None:
        raise ConfigError(nothing)
    return newest


def _has_steps(result: Path) -> bool:
    read = safe_read.read_or_warn(result, {"steps": int})
    return read is None or read["steps"] > 0


def list_changes(run: Run, found: checkpoint.Checkpoint) -> list[str]:
    """Describe the settings of a run that differ from a checkpoint's and may not."""
    settings = json.loads(json.dumps(asdict(run)))  # as a checkpoint has them: keys are texts
    own_keys = [f"algo.{key}" for key in run.algo.RESUME_MAY_CHANGE]
    differing = differences(found.state["config"], settings, (*FREE, *own_keys))
    # None if a budget ends the run, or if its length is in epochs, whose number must not change.
    steps, before = settings["algo"].get("steps"), found.state["config"]["algo"].get("steps")
    if run.scheduled and before != steps:
        differing.append(f"algo.steps was {before}, which algo.{run.scheduled[0]} depends on")
    if steps is not None and steps < found.step:
        differing.append(f"{found.step} steps are done already, algo.steps is {steps}")
    return differing


def _warn_of_schedule(run: Run, found: checkpoint.Checkpoint, main: bool) -> None:
    changed = differences(found.state["config"].get("budget"), asdict(run)["budget"], (), "budget")
    if main and run.scheduled and changed:
        log.warning(
            "%s: algo.%s follows the budget and goes on at the point that the run has reached in"
            " the new one, so its value may jump",
            *("; ".join(changed), run.scheduled[0]),
        )


def refuse(path: Path, differing: Sequence[str]) -> None:
    """Raise ConfigError if there are settings that differ from those that made `path`."""
    if differing:
        raise ConfigError(
            f"{path} was made with other settings: {'; '.join(differing)}. Give the same ones, or"
            " start anew with another hydra.run.dir."
        )


def differences(saved: Any, given: Any, free: Sequence[str] = FREE, prefix: str = "") -> list[str]:
    """Describe the differences between two nested settings, except for the keys in `free`."""
    if prefix in free or saved == given:
        return []
    if isinstance(saved, dict) and isinstance(given, dict):
        keys = [*saved, *(key for key in given if key not in saved)]
        dot = f"{prefix}." if prefix else ""
        pairs = [(f"{dot}{key}", saved.get(key), given.get(key)) for key in keys]
        return [text for key, old, new in pairs for text in differences(old, new, free, key)]
    if given is None and prefix in TAKEN_OUT:
        return _used(saved, TAKEN_OUT[prefix], prefix)
    if saved is None and prefix in CAME_LATER:
        saved = CAME_LATER[prefix]
    if isinstance(saved, str) and isinstance(given, str):
        saved, given = user_code.find_moved(saved), user_code.find_moved(given)
    return [] if saved == given else [f"{prefix} was {saved!r}, is {given!r}"]


def _used(saved: Any, off: Any, prefix: str) -> list[str]:
    """Describe settings of a checkpoint that this version does not have, unless they were off."""
    if isinstance(off, dict):
        pairs = [(saved.get(key), value, f"{prefix}.{key}") for key, value in off.items()]
        return [text for one in pairs for text in _used(*one)]
    if saved in (None, off):
        return []
    return [f"{prefix} was {saved!r}, and this version does not have it any more"]
