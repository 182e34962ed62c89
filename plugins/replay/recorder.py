"""Write RUN/run.egg while a run trains."""

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from common.config import ConfigError
from common.device import Device
from common.model import model_commit
from common.parts import Parts
from common.report import Result, find_commit
from common.session import Session
from common.system import DamagedError, find_moved
from common.task import TaskFeatures
from eggroll.config import LOOK_EVERY
from eggroll.fitness import by_direction
from eggroll.population import Tried
from eggroll.record import Recorder
from eggroll.weights import Weights
from plugins.replay import egg

log = logging.getLogger("clutch")

NAME = "run.egg"
# The most weights whose hash is computed after every step; of more it is computed in every tenth.
SMALL = 1 << 22


class EggRecorder(Recorder):
    """Adds a record per update to RUN/run.egg, on rank 0. Made by `make_recorder`."""

    def __init__(self, parts: Parts, weights: Weights, components: list[str]) -> None:
        self.main, self.path = parts.context.main, parts.context.out_dir / NAME
        self.weights, self.components = weights, components
        # Only rank 0 writes, but sharded weights are gathered on all ranks.
        self.hashes = parts.context.main or parts.lm.sharding.shared
        self.mirrored = parts.run.algo.mirrored
        self.every = 1 if sum(p.numel() for p in weights.used.values()) <= SMALL else LOOK_EVERY

    def add(
        self, number: int, draw: int, sigma: float, lr: float, fitness: Tensor, tried: Tried
    ) -> None:
        """Record an update, after the weights have been updated."""
        digest = None
        if self.hashes and number % self.every == 0:
            digest = bytes.fromhex(egg.digest(self.weights.tensors().items()))[:16]
        if not self.main:
            return
        directions = by_direction(fitness.to(dtype=torch.float32), self.mirrored).cpu().numpy()
        means = [tried.components[name].mean(1).cpu().numpy() for name in self.components]
        columns = np.stack(means, 1) if means else np.zeros((len(fitness), 0))
        record = egg.StepRecord(number, draw, sigma, lr, digest, directions, columns)
        egg.append(self.path, record.pack())

    def end(self, result: Result) -> None:
        """Record the end of the run, when the weights are those of the exported model."""
        digest = self.hashes and egg.digest(self.weights.tensors().items())
        if not self.main:
            return
        exported = result.chosen["step"] if result.chosen else result.steps
        facts = {"step": result.steps, "exported": exported, "sha256": digest}
        measures = {"headline": result.metric, "before": result.before, "after": result.after}
        egg.append(self.path, egg.pack_json("E", facts | measures))


def make_recorder(parts: Parts, weights: Weights, session: Session) -> EggRecorder | None:
    """Return the recorder of a run that begins or resumes; None with algo.record=false, or if a
    resumed run cannot be recorded because its earlier updates were not. A file that is not gone on
    with is set aside.

    Raises: ConfigError in the latter case with algo.record=true.
    """
    features, context, wanted = TaskFeatures(parts.task), parts.context, parts.run.algo.record
    path = context.out_dir / NAME
    if wanted is False:
        if context.main and path.is_file():
            log.warning("algo.record=false: the earlier %s", _set_aside(path))
        return None
    components = [name for name in features.components if features.weights.get(name, 1)]
    # A single component, or fitness that is no mean of rewards, cannot be weighed otherwise.
    kept = components if len(components) > 1 and parts.run.algo.fitness_of == "rewards" else []
    recorder = EggRecorder(parts, weights, kept)
    begins = recorder.hashes and session.state.step == 0
    parts_of = (base_tensors(parts.lm.model), weights.tensors().items()) if begins else ()
    digests = [egg.digest(tensors) for tensors in parts_of]
    problem = _open(parts, session, recorder, digests) if context.main else None
    problem = context.gather_objects(problem)[0]
    if problem is None:
        return recorder
    if wanted:
        raise ConfigError(
            f"algo.record=true, but {problem}. Leave algo.record out, or start anew with another"
            " hydra.run.dir."
        )
    if context.main:
        aside = f"; {_set_aside(path)}" if path.is_file() else ""
        log.warning("%s is not written any more: %s%s", NAME, problem, aside)
    return None


def _set_aside(path: Path) -> str:
    """Rename a file that does not belong to the run's further steps. Returns what was done."""
    aside = path.with_name(f"{path.name}.old")
    path.replace(aside)
    return f"{path.name} was renamed to {aside.name}"


def is_named(parts: Parts) -> bool:
    """Return whether the settings name the run's task; a task given from Python has none."""
    own = type(parts.task.own)
    return f"{own.__module__}.{own.__qualname__}" == find_moved(parts.run.task["_target_"])


def base_tensors(model: Any) -> list[tuple[str, Tensor]]:
    """Return all weights of a model, by name."""
    state = model.state_dict()
    return [(name, value) for name, value in state.items() if isinstance(value, Tensor)]


def _open(parts: Parts, session: Session, recorder: EggRecorder, digests: list[str]) -> str | None:
    """Begin the file, or remove from it what came after the checkpoint of a resumed run. Returns
    why that cannot be done; None if it is done.
    """
    state, now = session.state, describe_machine(parts.context.device)
    if parts.run.algo.record and not is_named(parts) and parts.run.model.path is None:
        return (
            "this run begins from model=tiny, made from the rows of a task that was given from"
            " Python, so that nobody can make its base model again (model=hf model.path=FOLDER can"
            " be recorded)"
        )
    if state.step == 0:
        header = _header(parts, recorder.components, digests, now)
        egg.write(recorder.path, [egg.pack_header(header)])
        return None
    if not recorder.path.is_file():
        return f"this run goes on from step {state.step}, and {recorder.path} is not there"
    try:
        held = egg.read(recorder.path).cut(state.step)
    except DamagedError as error:
        return str(error).rstrip(".")
    made = state.step - state.skipped
    same = held.header["members"], held.header["components"]
    if len(held.steps) != made or same != (parts.run.algo.members, recorder.components):
        return (
            f"{recorder.path} has {len(held.steps)} of the {made} updates before step {state.step}"
        )
    if now != ([one for _, one in held.machines] or [held.header["machine"]])[-1]:
        held.machines.append((len(held.steps), now))
    egg.write(recorder.path, held.payloads())
    return None


def _header(
    parts: Parts, components: list[str], digests: list[str], machine: dict[str, Any]
) -> dict[str, Any]:
    run, weights = parts.run, TaskFeatures(parts.task).weights
    settings = asdict(run)
    return {
        "format": egg.FORMAT,
        "members": run.algo.members,
        "directions": run.algo.members // run.algo.pair,
        "components": components,
        "weights": [float(weights.get(name, 1)) for name in components],
        "task": is_named(parts),
        "settings": settings,
        "dtype": str(parts.precision.compute).removeprefix("torch."),
        "base": digests[0],
        "start": digests[1],
        "machine": machine,
        "transformers": transformers.__version__,
        "commit": find_commit(),
        "model_commit": model_commit(run.model),
    }


def describe_machine(device: Device) -> dict[str, Any]:
    """Return what the rounding of an update may depend on: the device, its instructions, the
    number of threads of this rank, and the version of torch.
    """
    return {
        "device": device.name,
        "type": device.type,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
    }
