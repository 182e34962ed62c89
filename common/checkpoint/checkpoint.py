"""Checkpoints that survive kill -9, a full disk and a flipped bit.

A checkpoint is a folder `step-00000120` with `tensors.safetensors`, `state.json`, optionally
`extra.pt`, and `manifest.json` with the SHA-256 of each; sharded weights have one safetensors file
per rank instead (common/distributed/checkpoints.py). It is written to a temporary folder, synced
and renamed, so a folder of that name is never half-written; `latest` detects damage by the hashes
and returns the newest undamaged checkpoint. Nothing here unpickles objects: only safetensors, JSON
and `torch.load(weights_only=True)`.

`replacing`, `seal` and `problem` give the same guarantees for any folder; exports use them, and
`cached` for folders that are built once.
"""

import json
import logging
import pickle
import re
import shutil
import threading
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._pytree import tree_map_only

from common.system import (
    MANIFEST,
    TEMPORARY,
    CheckpointError,
    first_line,
    problem,
    replacing,
    safe_read,
    seal,
)

log = logging.getLogger("clutch")
WRITER = "checkpoint"  # the name of the thread that writes
TENSORS, STATE, EXTRA = "tensors.safetensors", "state.json", "extra.pt"
# `.old` is the previous folder of that step, which exists between the two renames of a replacement.
_NAME = re.compile(r"step-(\d{8,})(\.old)?")
_OBJECTS = "objects that torch.load(weights_only=True) refuses"


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint. Tensors are on the CPU; names that were tied when saved share
    one tensor again.

    Attributes:
        path: the folder.
        step: the step after which it was saved.
        tensors: the weights by name; empty if `sharded`.
        state: the JSON state.
        extra: nested tensors and numbers, such as an optimizer's state.
        sharded: whether tensors are in one file per rank, which
            common/distributed/checkpoints.py reads.
    """

    path: Path
    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    extra: dict[str, Any] | None
    sharded: bool = False


def save(
    root: Path,
    step: int,
    tensors: dict[str, Tensor],
    state: dict[str, Any],
    extra: dict[str, Any] | None,
    keep: int,
    write: Callable[[Path], None] | None = None,
    needed: Sequence[int] = (),
) -> Path:
    """Write checkpoint `step` below `root`, then remove all but the newest `keep` checkpoints up to
    it; return its folder. Only one process writes to a root. A checkpoint of the same step is
    replaced.

    Args:
        tensors: the weights, which may be tied or overlap.
        state: JSON values.
        extra: values that `torch.load(weights_only=True)` can read.
        write: writes safetensors files into the folder itself, in place of `tensors`
            (common/distributed/checkpoints.py).
        needed: steps whose checkpoints are kept in addition to the newest ones.
    Raises: CheckpointError on any I/O error, with all earlier checkpoints intact; TypeError if
    `extra` holds objects that need unpickling, or `state` is not JSON.
    """
    text, separated = json.dumps(state, indent=1), _separate(tensors)
    return _write(root, step, separated, text, extra, keep, write, needed)


class Writer:
    """Writes checkpoints in a background thread, one after the other."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.folder: Path | None = None
        self.error: BaseException | None = None

    def start(
        self,
        root: Path,
        step: int,
        tensors: dict[str, Tensor],
        state: dict[str, Any],
        extra: dict[str, Any],
        keep: int,
        needed: Sequence[int] = (),
    ) -> None:
        """Copy all tensors to the host before returning, then write them as `save` does in a
        thread. `wait` must be called first.
        """
        assert self.thread is None
        text = json.dumps(state, indent=1)
        separated = _separate(tensors)
        copied = tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), extra)

        def run() -> None:
            try:
                self.folder = _write(root, step, separated, text, copied, keep, needed=needed)
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=run, name=WRITER, daemon=True)
        self.thread.start()

    def wait(self) -> Path | None:
        """Wait for the pending checkpoint and return its folder; None if none is pending. Raises:
        the exceptions of `save`.
        """
        if self.thread is not None:
            self.thread.join()
        folder, error = self.folder, self.error
        self.thread = self.folder = self.error = None
        if error is not None:
            raise error
        return folder

    def settle(self) -> Path | None:
        """Wait when a run stops: an error is logged as a warning, since the run already stops for
        another reason.
        """
        try:
            return self.wait()
        except CheckpointError as error:
            log.warning("%s", error)
            return None


def _write(
    root: Path,
    step: int,
    separated: tuple[dict[str, Tensor], dict[str, str]],
    state: str,
    extra: dict[str, Any] | None,
    keep: int,
    write: Callable[[Path], None] | None = None,
    needed: Sequence[int] = (),
) -> Path:
    assert keep >= 1
    assert step >= 0
    weights, tied = separated
    folder = folder_of(root, step)
    # first, since the leftovers of a killed writer may fill the disk
    for stale in root.glob(f"{TEMPORARY}*"):
        shutil.rmtree(stale, ignore_errors=True)
    with replacing(folder) as temporary:
        if write is None:
            save_file(weights, temporary / TENSORS, metadata={"tied": json.dumps(tied)})
        else:
            write(temporary)
        (temporary / STATE).write_text(state, encoding="utf-8")
        if extra is not None:
            _save_extra(extra, temporary / EXTRA)
        seal(temporary, {"step": step} | ({"sharded": True} if write else {}))
    _prune(root, step, keep, needed)
    return folder


def folder_of(root: Path, step: int) -> Path:
    """Return the folder of checkpoint `step` below `root`."""
    return root / f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """Return the step of a checkpoint's folder, from its name; None for other folders."""
    name = _NAME.fullmatch(folder.name)
    return None if name is None else int(name[1])


def latest(root: Path, kind: Any = dict) -> Checkpoint | None:
    """Return the newest valid checkpoint below `root`, or None. Each newer invalid entry gets one
    logged warning.

    Args: kind: the type of its state (common/system/safe_read.py).
    """
    candidates: list[tuple[int, bool, Path]] = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        name = _NAME.fullmatch(path.name)
        if name:
            candidates.append((int(name[1]), name[2] is None, path))
        elif path.name.startswith(TEMPORARY):
            log.warning("checkpoint %s is skipped: half-written, its writer was stopped.", path)
        elif not path.name.startswith("."):
            log.warning("checkpoint %s is skipped: foreign, its name is not step-NNNNNNNN.", path)
    for _, _, path in sorted(candidates, reverse=True):
        try:
            return load(path, kind)
        except CheckpointError as error:
            log.warning("%s It is skipped.", error)
    return None


def describe_latest(root: Path) -> str:
    """Describe in a sentence the newest valid checkpoint below `root`."""
    newest = latest(root)
    return (
        f"Last good checkpoint: {newest.path}." if newest else "No checkpoint was written before."
    )


def load(path: Path, kind: Any = dict) -> Checkpoint:
    """Read one checkpoint folder after checking its hashes. Raises: CheckpointError with the path
    and the reason.

    Args: kind: the type of its state.
    """
    reason = problem(path)
    if reason:
        raise CheckpointError(f"checkpoint {path} is not valid: {reason}.")
    try:
        manifest = safe_read.read(path / MANIFEST, {"step": int})
        step, files = manifest["step"], manifest["files"]
        name = _NAME.fullmatch(path.name)
        if name and int(name[1]) != step:
            raise CheckpointError(f"checkpoint {path} is not valid: foreign, it holds step {step}.")
        sharded = manifest.get("sharded", False)
        tensors = {} if sharded else _stored(path)
        state = safe_read.read(path / STATE, kind) or {}
        extra = _load_extra(path / EXTRA) if EXTRA in files else None
    except CheckpointError:
        raise
    except Exception as error:
        # The hashes are right, so another program wrote it, with any content.
        reason = f"foreign, {type(error).__name__}: {first_line(error)}"
        if isinstance(error, pickle.UnpicklingError):  # torch advises to unpickle anyway
            reason = f"{EXTRA} holds {_OBJECTS}"
        raise CheckpointError(f"checkpoint {path} is not valid: {reason}.") from error
    return Checkpoint(path, step, tensors, state, extra, sharded)


# --- inside


def _separate(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return contiguous CPU copies that share no memory, and the names tied to each by name: tied
    name -> stored name.
    """
    stored: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and first.setdefault(place, name) != name:
            tied[name] = first[place]
            continue
        # A copy also when it is contiguous already: it may be a view of a storage that another
        # name views too.
        stored[name] = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
    return stored, tied


def _stored(folder: Path) -> dict[str, Tensor]:
    """Read the tensors that `_separate` has split; tied names share a tensor again."""
    with safe_open(folder / TENSORS, framework="pt", device="cpu") as reader:
        tied = json.loads((reader.metadata() or {})["tied"])
        tensors = {key: reader.get_tensor(key) for key in reader.keys()}  # noqa: SIM118 (not a dict)
    return tensors | {alias: tensors[key] for alias, key in tied.items()}


def _save_extra(extra: dict[str, Any], path: Path) -> None:
    """Save with torch.save, and read it back at once rather than when a run is resumed."""
    try:
        with path.open("wb") as file:
            torch.save(extra, file)
    except RuntimeError as error:
        # torch's writer reports a full disk as "unexpected pos"; the OSError is its context.
        raise OSError(f"{path.name}: {first_line(error.__context__ or error)}") from error
    try:
        _load_extra(path)
    except pickle.UnpicklingError as error:
        text = f"extra holds {_OBJECTS}. Give tensors, numbers, strings, lists and dicts."
        raise TypeError(text) from error


def _load_extra(path: Path) -> Any:
    # Memory-mapped, so that ranks share it; a file that is no zip archive is refused by torch.load.
    mapped = zipfile.is_zipfile(path)
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)


def _prune(root: Path, step: int, keep: int, needed: Sequence[int]) -> None:
    """Remove all but the newest `keep` checkpoints up to `step` and those of the steps `needed`,
    and displaced folders up to `step`.
    """
    named = [
        (int(name[1]), name[2], path)
        for path in root.iterdir()
        if (name := _NAME.fullmatch(path.name))
    ]
    plain = sorted((number, path) for number, old, path in named if old is None and number <= step)
    displaced = [path for number, old, path in named if old is not None and number <= step]
    old = [path for number, path in plain[:-keep] if number not in needed]
    for path in [*displaced, *old]:
        try:
            shutil.rmtree(path)
        except OSError as error:
            log.warning("checkpoint %s could not be removed: %s.", path, first_line(error))
