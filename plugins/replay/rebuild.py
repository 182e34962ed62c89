"""Rebuild the model of any step of a run from RUN/run.egg, without sampling."""

import copy
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from common.config import ConfigError, Run, from_plain, shipped
from common.device import Device, Precision, hardware
from common.distributed import Context
from common.language_model import LanguageModel, load
from common.system import DamagedError, safe_read
from common.task import build
from common.tasks import Checked
from eggroll.config import EggrollConfig
from eggroll.fitness import by_direction, fitness
from eggroll.noise import Noise
from eggroll.weights import Weights
from plugins.replay import egg
from plugins.replay.egg import Egg, StepRecord
from plugins.replay.recorder import NAME, base_tensors, describe_machine
from plugins.replay.sizes import check_sizes, settings_of

log = logging.getLogger("clutch")

FREE = ("task.", "scoring.")  # settings that --verify may replace
ONE_RANK = {"ddp": {"enabled": False}, "fsdp": {"enabled": False}, "compile": {"enabled": False}}


@dataclass
class Proof:
    """The comparison of a rebuilt model's weights with those of the run.

    Attributes:
        machine: what differs from the machine of the run, in words; "" = nothing that matters.
        base: whether all weights of the base model are equal.
        equal: the number of steps whose weights were compared by hash and are equal.
        first_other: the first step whose weights are not equal; None = there is none.
        result: whether the weights are those that the run exported; None = it was not asked to
            rebuild those, or the run has not ended.
        start: whether it is the model before the first step.
        changed: whether updates were left out or reweighted, so that nothing can be equal.
    """

    machine: str = ""
    base: bool = True
    equal: int = 0
    first_other: int | None = None
    result: bool | None = None
    start: bool = False
    changed: bool = False

    @property
    def holds(self) -> bool:
        """Whether nothing that was compared differs."""
        return self.base and self.first_other is None and self.result is not False

    def describe(self) -> str:
        """Describe the comparison in a sentence."""
        if self.changed:
            return "it is another model than the run's, as you have asked."
        if not self.base:
            return f"the base model's weights are not those that the run began with.{self._where()}"
        if self.first_other is not None or self.result is False:
            place = f"from step {self.first_other} on" if self.first_other else "at the end"
            why = self._where() or " Nothing here explains it: the file is not of these weights."
            return f"the weights are not bit for bit the run's {place}.{why}"
        if self.result:
            return f"bit for bit the model that the run exported ({self.equal} steps compared)."
        if self.start:
            return "bit for bit the base model of the run."
        if self.equal:
            return f"bit for bit the run's weights ({self.equal} steps compared)."
        return "the run has no hash of these weights to compare with."

    def _where(self) -> str:
        return f" {self.machine}" if self.machine else ""


@dataclass
class Changes:
    """The changes to a run that are asked for.

    Attributes:
        dropped: the numbers of the steps whose updates are left out.
        weights: other weights of components of the reward, by name.
    """

    dropped: Collection[int] = ()
    weights: Mapping[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.dropped or self.weights)


class Replay:
    """A model at the start of a run, and the updates that the run made.

    Attributes:
        proof: the comparison so far.
    """

    def __init__(
        self, held: Egg, run: Run, lm: LanguageModel, noise: Noise, weights: Weights
    ) -> None:
        self.held, self.lm, self.noise, self.weights = held, lm, noise, weights
        self.cfg: EggrollConfig = run.algo
        header = held.header
        same = (
            egg.digest(base_tensors(lm.model)) == header["base"]
            and egg.digest(weights.tensors().items()) == header["start"]
        )
        self.proof = Proof(machine=compare_machines(held, lm.context.device), base=same)

    def steps(self, last: int, changes: Changes) -> Iterator[StepRecord]:
        """Yield the records up to a step, each before its update is made."""
        self.proof.changed = bool(changes)
        for record in self.held.steps:
            if record.number > last:
                return
            yield record
            if record.number not in changes.dropped:
                self._update(record, changes.weights)
            if record.digest is not None and not changes:
                self._compare(record)

    def _update(self, record: StepRecord, reweighted: Mapping[str, float]) -> None:
        """Make one update, as the loop of eggroll/train.py does."""
        shaped = as_fitness(record.directions, self.cfg)
        if reweighted:
            shaped = reweigh(record, self.held, self.cfg, reweighted)
        for name, gradient in self.noise.gradients(record.draw, shaped):
            self.weights.descend(name, gradient, record.lr, self.cfg.weight_decay > 0)
            del gradient

    def _compare(self, record: StepRecord) -> None:
        now = egg.digest(self.weights.tensors().items())
        if bytes.fromhex(now)[:16] == record.digest:
            self.proof.equal += 1
        elif self.proof.first_other is None:
            self.proof.first_other = record.number

    def conclude(self, step: int) -> None:
        """Compare the weights with those that the run exported, if `step` was exported."""
        end = self.held.end
        self.proof.start = step == 0
        if end is not None and step == end["exported"] and not self.proof.changed:
            self.proof.result = egg.digest(self.weights.tensors().items()) == end["sha256"]


def as_fitness(directions: np.ndarray, cfg: EggrollConfig) -> Tensor:
    """Return fitness [members] with the given weights of directions: of mirrored members the first
    has the weight, and the second none.
    """
    weights = torch.from_numpy(directions.copy())
    if not cfg.mirrored:
        return weights
    return torch.stack((weights, torch.zeros_like(weights)), dim=1).flatten()


def reweigh(
    record: StepRecord, held: Egg, cfg: EggrollConfig, changed: Mapping[str, float]
) -> Tensor:
    """Return the fitness [members] of a step with other weights of the reward's components."""
    names: list[str] = held.header["components"]
    known = dict(zip(names, held.header["weights"], strict=True))
    weights = torch.tensor([float(changed.get(n, known[n])) for n in names])
    means = torch.from_numpy(record.components.copy())  # [members, components]
    rewards = (means * weights.double()).sum(1, keepdim=True) / weights.double().abs().sum()
    used = {n: means[:, [k]] for k, n in enumerate(names) if weights[k] != 0}
    return fitness(rewards, cfg.fitness, 1, used)


def check_weights(held: Egg, cfg: EggrollConfig, changed: Mapping[str, float]) -> None:
    """Raise ConfigError if the fitness of a run cannot be computed with other weights."""
    names = held.header["components"]
    if not names:
        raise ConfigError(
            "--weights: this run's fitness has no components to weigh: its reward is a single"
            " score, or algo.fitness_of is not rewards. Leave it out."
        )
    if unknown := sorted(set(changed) - set(names)):
        raise ConfigError(
            f"--weights {unknown[0]}: the reward has no such component. Components:"
            f" {', '.join(names)}."
        )
    if all(changed.get(name, 1) == 0 for name in names):
        raise ConfigError("--weights: at least one component needs a weight other than 0.")
    if cfg.fitness == "prompt_zscore" or cfg.sample_quantile is not None:
        raise ConfigError(
            "--weights does not go with algo.fitness=prompt_zscore or algo.sample_quantile, which"
            " need the rewards by prompt; the file has their means."
        )
    for record in held.steps:
        same = by_direction(reweigh(record, held, cfg, {}).float(), cfg.mirrored).numpy()
        if not np.allclose(same, record.directions, rtol=1e-3, atol=1e-4):
            raise ConfigError(
                f"--weights: the fitness of step {record.number} is not that of the weighted means"
                " of its components, as where a reward has no score for some completions. Leave it"
                " out."
            )


def find_egg(given: str) -> Path:
    """Return the path of the file, given it or its run folder."""
    path = Path(given).expanduser()
    return path / NAME if path.is_dir() else path


def read_settings(
    held: Egg, base: str | None, overrides: Sequence[str] = (), device: str = "auto"
) -> Run:
    """Return the settings of a recorded run, for one rank of this machine.

    Args:
        base: the folder or hub id of the base model; None = the run's.
        overrides: KEY=VALUE, in place of the recorded ones.
        device: auto, cpu or cuda.
    Raises: ConfigError for settings that this version does not know, or that cannot work.
    """
    plain: dict[str, Any] = copy.deepcopy(held.header["settings"])
    opt = plain["opt"]
    # A run with sharded weights trains and exports them in float32.
    amp = {"enabled": False} if opt["fsdp"]["enabled"] else opt["amp"] | {"dtype": "auto"}
    plain["opt"] = opt | ONE_RANK | {"amp": amp, "profile": {"enabled": False}}
    plain["hardware"]["device"] = device
    plain["engine"] = shipped("engine/native.yaml")  # nothing is sampled, or only to compare
    plain["tracker"] = shipped("tracker/jsonl.yaml")
    plain["evaluate"] = plain["evaluate"] | {"also": {}, "text": None}  # nothing is evaluated
    if base is not None:
        kept = {key: plain["model"].get(key) for key in ("attention", "adapter", "quantize")}
        plain["model"] = {"revision": None, "gguf_file": None, **kept, "name": "hf", "path": base}
    for override in overrides:
        replace_setting(plain, override)
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no CUDA device. Use --device cpu.")
    try:
        run = from_plain(plain, EggrollConfig)
    except ConfigError as error:
        if overrides:
            raise
        version = held.header["commit"] or "another version"
        raise ConfigError(f"{held.path} was written by {version}: {error}") from None
    counts = run.algo.members, run.algo.members // run.algo.pair
    if counts != (held.header["members"], held.header["directions"]):
        raise DamagedError(f"{held.path} is damaged: its settings have {counts[0]} members.")
    check_sizes(held, run)
    return run


def replace_setting(plain: dict[str, Any], override: str) -> None:
    """Replace one of the recorded settings. Raises: ConfigError if there is no such setting.

    Args: override: KEY=VALUE; the value is YAML.
    """
    key, equals, value = override.partition("=")
    if not key.startswith(FREE):
        raise ConfigError(
            f"{override!r} is no setting that may change: {', '.join(FREE)}... can, such as"
            " task.path=FILE."
        )
    *path, name = key.split(".")
    node: Any = plain
    for part in path:
        node = node.get(part) if isinstance(node, dict) else None
    if not equals or not isinstance(node, dict) or name not in node:
        raise ConfigError(
            f"{override!r} names no recorded setting. Give KEY=VALUE; --show lists them."
        )
    try:
        node[name] = yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(
            f"{override!r} cannot be read as YAML. Put the value in quotes."
        ) from None


def compare_machines(held: Egg, device: Device) -> str:
    """Describe how this machine differs from those of a run, as far as rounding depends on it; ""
    if it does not.
    """
    now = describe_machine(device)
    machines = [held.header["machine"], *(one for _, one in held.machines)]
    keys = ("type", "instructions", "threads", "torch")
    if now["type"] == "cuda":
        keys = ("type", "device", "torch")
    other = [f"{key} {one[key]}" for one in machines for key in keys if one[key] != now[key]]
    if not other:
        return ""
    here = ", ".join(f"{key} {now[key]}" for key in keys)
    return f"The run had {', '.join(dict.fromkeys(other))}; here: {here}."


@contextmanager
def opened(
    held: Egg, base: str | None, device: str = "auto", threads: int | None = None
) -> Iterator[Replay]:
    """Yield the replay of a run, with its base model loaded.

    Args:
        base: the folder or hub id of the base model; None = the run's.
        threads: the number of threads; None = as many as the run had.
    Raises: ConfigError if the base model cannot be loaded.
    """
    run = read_settings(held, base, device=device)
    with as_recorded(held, run, threads) as context:
        compute = held.header["dtype"] if run.opt.amp.enabled else "float32"
        with settings_of(held):
            lm = load(
                run,
                context,
                find_task(held, run),
                population=run.algo.members,
                compute=Precision(getattr(torch, compute)),
            )
            noise = Noise.of(run, lm)
            weights = Weights.of(run, lm, noise, context.out_dir)
        yield Replay(held, run, lm, noise, weights)


@contextmanager
def as_recorded(held: Egg, run: Run, threads: int | None) -> Iterator[Context]:
    """Yield the context of one rank with a temporary folder, and compute in the block with the
    given number of threads; None = as many as the run had.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads or held.header["machine"]["threads"])
    try:
        with TemporaryDirectory() as folder:
            yield Context(0, 1, hardware.find(run.hardware), Path(folder))
    finally:
        torch.set_num_threads(before)


def find_task(held: Egg, run: Run) -> Any:
    """Return the task whose rows a tiny base model is pre-trained on; None if the base model is
    given.

    Raises: ConfigError if the file is not in its run folder: a task may run Python code that the
    settings name.
    """
    if run.model.path is not None:
        return None
    if not is_own(held) or not held.header["task"]:
        raise ConfigError(
            f"{held.path} began from model=tiny, which is made from the rows of its task. Give the"
            " folder of that model: --base FOLDER."
        )
    return Checked(build(run.task))


def is_own(held: Egg) -> bool:
    """Return whether a file is in the folder of its run: run.yaml has the same settings, as far as
    they may name Python code, which a foreign file must not.
    """
    saved = safe_read.read_or_warn(held.path.parent / "run.yaml", {"config": {"algo": dict}})
    if saved is None:
        return False
    one, other = saved["config"], held.header["settings"]
    named = one["algo"].get("measure"), other["algo"].get("measure")
    return one.get("task") == other["task"] and named[0] == named[1]


def rebuild(
    held: Egg,
    out: Path,
    *,
    base: str | None = None,
    step: int | None = None,
    changes: Changes | None = None,
    device: str = "auto",
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Path, int, Proof]:
    """Write the model of a step to OUT/model, or its adapter to OUT/adapter.

    Args:
        step: the number of the step, 0 for the base model; None = the step that the run exported,
            or the last one of a run that has not ended.
        progress: is called with the number of the step and of the last one.
    Returns: the folder, the step and the comparison with the run.
    Raises: ConfigError for a step that the file does not have, or changes that it cannot make.
    """
    changes = changes or Changes()
    last: int = held.end["step"] if held.end else held.last
    exported: int = held.end["exported"] if held.end and not changes else last
    step = exported if step is None else step
    if not 0 <= step <= last:
        raise ConfigError(f"--step {step}: {held.path} has the steps 0 to {last}. Give one.")
    if changes and step == 0:
        raise ConfigError(
            "--drop-steps and --weights have no effect with --step 0. Leave them out."
        )
    if unknown := [number for number in changes.dropped if not 1 <= number <= step]:
        raise ConfigError(f"--drop-steps {unknown[0]}: the steps are 1 to {step}.")
    if (out / "run.yaml").exists():
        raise ConfigError(
            f"--out {out} is the folder of a run, whose model would be replaced. Give another one."
        )
    with opened(held, base, device, threads) as replay:
        if changes.weights:
            check_weights(held, replay.cfg, changes.weights)
        for record in replay.steps(step, changes):
            if progress is not None:
                progress(record.number, step)
        replay.conclude(step)
        return replay.lm.export(out, None), step, replay.proof


def rebuild_step(folder: Path, step: int, out: Path) -> Path:
    """Write the model of a step of the run in `folder` below `out`, and return its folder. A
    difference from the run's model is a warning.

    Raises: ConfigError if the run was not recorded, or has no such step.
    """
    written, _, proof = rebuild(egg.read(folder / NAME), out, step=step)
    if not proof.holds:
        log.warning("step %d: %s", step, proof.describe())
    return written
