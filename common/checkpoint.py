"""Checkpoints that survive kill -9, a full disk and a flipped bit.

A checkpoint is a folder `step-00000120`: `tensors.safetensors`, `state.json`, perhaps `extra.pt`, and `manifest.json` with
the SHA-256 of each; of sharded weights there is a safetensors file a rank instead (common/sharding.py). It is written
beside its place, synced and renamed, so a folder of that name is whole or damaged afterwards, never half-written;
`latest` finds damage by the hashes and goes back to the newest checkpoint without it.
Nothing here unpickles objects: safetensors, JSON and `torch.load(weights_only=True)` only.

`replacing`, `seal` and `problem` are the same guarantees for any folder; exports use them, and `cached` for what is
built once.
"""

import hashlib
import json
import logging
import os
import pickle
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from common.config import ConfigError

log = logging.getLogger("clutch")

FORMAT = 1
MANIFEST = "manifest.json"
TENSORS, STATE, EXTRA = "tensors.safetensors", "state.json", "extra.pt"
# `.old`: the previous folder of that step, alive for the moment between the two renames of a replacement.
_NAME = re.compile(r"step-(\d{8,})(\.old)?")
_TEMPORARY = ".tmp-"
_OBJECTS = "objects that torch.load(weights_only=True) refuses"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or is not valid: the text names the path and the reason."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds. Tensors are on the CPU; names that were tied when saved are one tensor again."""

    path: Path
    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    extra: dict[str, Any] | None
    sharded: bool = False  # its tensors are in a file a rank, which common/sharding.py reads; `tensors` is empty


def save(
    root: Path,
    step: int,
    tensors: dict[str, Tensor],
    state: dict[str, Any],
    extra: dict[str, Any] | None,
    keep: int,
    write: Callable[[Path], None] | None = None,
) -> Path:
    """Write checkpoint `step` below `root`, then remove all but the newest `keep` up to it. One writer a root.

    Args: root: made if needed; tensors: any device, dtype, layout; tied or overlapping ones are fine; state: JSON (string
    keys, lists); extra: what `torch.load(weights_only=True)` reads: optimizer state, generator states; keep: >= 1;
    write: puts safetensors files of its own into the folder, in place of `tensors` (see common/sharding.py).
    Returns: the folder. A checkpoint of the same step is replaced; it stays readable until the new one is in place.
    Checkpoints of later steps, left by a run that went back, are not touched.
    Raises: CheckpointError with path and reason on any I/O error, with all earlier checkpoints as they were;
    TypeError if `extra` holds something that only unpickling could read, or `state` something that is not JSON.
    """
    assert keep >= 1
    assert step >= 0
    weights, tied = _separate(tensors)
    state_text = json.dumps(state, indent=1)
    folder = folder_of(root, step)
    for stale in root.glob(f"{_TEMPORARY}*"):  # first: a killed writer's leftovers may be what fills the disk
        shutil.rmtree(stale, ignore_errors=True)
    with replacing(folder) as temporary:
        if write is None:
            save_file(weights, temporary / TENSORS, metadata={"tied": json.dumps(tied)})
        else:
            write(temporary)
        (temporary / STATE).write_text(state_text, encoding="utf-8")
        if extra is not None:
            _save_extra(extra, temporary / EXTRA)
        seal(temporary, {"step": step} | ({"sharded": True} if write else {}))
    _prune(root, step, keep)
    return folder


def folder_of(root: Path, step: int) -> Path:
    """Where checkpoint `step` below `root` is."""
    return root / f"step-{step:08d}"


def latest(root: Path) -> Checkpoint | None:
    """The newest valid checkpoint below `root`, or None. Each invalid entry that is newer gets one logged warning."""
    found: list[tuple[int, bool, Path]] = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        name = _NAME.fullmatch(path.name)
        if name:
            found.append((int(name[1]), name[2] is None, path))
        elif path.name.startswith(_TEMPORARY):
            log.warning("checkpoint %s is skipped: half-written, its writer was stopped.", path)
        elif not path.name.startswith("."):
            log.warning("checkpoint %s is skipped: foreign, its name is not step-NNNNNNNN.", path)
    for _, _, path in sorted(found, reverse=True):
        try:
            return load(path)
        except CheckpointError as error:
            log.warning("%s It is skipped.", error)
    return None


def load(path: Path) -> Checkpoint:
    """Read one checkpoint folder after checking its hashes. Raises CheckpointError naming the path and what is wrong."""
    reason = problem(path)
    if reason:
        raise CheckpointError(f"checkpoint {path} is not valid: {reason}.")
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        step, files = manifest["step"], manifest["files"]
        name = _NAME.fullmatch(path.name)
        if name and int(name[1]) != step:
            raise CheckpointError(f"checkpoint {path} is not valid: foreign, it holds step {step}.")
        sharded = manifest.get("sharded", False)
        tensors = {} if sharded else _stored(path)
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        extra = torch.load(path / EXTRA, map_location="cpu", weights_only=True) if EXTRA in files else None
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:  # torch's own text advises to unpickle all the same
        raise CheckpointError(f"checkpoint {path} is not valid: {EXTRA} holds {_OBJECTS}.") from error
    except Exception as error:  # hashes are right, so another program wrote it: anything can be in there
        reason = f"foreign, {type(error).__name__}: {_first_line(error)}"
        raise CheckpointError(f"checkpoint {path} is not valid: {reason}.") from error
    return Checkpoint(path=path, step=step, tensors=tensors, state=state, extra=extra, sharded=sharded)


# --- folders that are whole or absent --------------------------------------------------------------------------------


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield an empty folder beside `folder`; when the block ends, sync it to disk and rename it into place.

    An existing `folder` is moved aside to `NAME.old` and removed after the new one is in place. If the block fails, nothing
    has changed and the temporary folder is gone. Raises: CheckpointError for I/O errors, inside the block too.
    """
    temporary = folder.with_name(f"{_TEMPORARY}{folder.name}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in temporary.rglob("*"):
            _sync(path)
        _sync(temporary)
        displaced = folder.with_name(f"{folder.name}.old")
        if folder.exists():
            shutil.rmtree(displaced, ignore_errors=True)
            folder.rename(displaced)
        temporary.rename(folder)
        _sync(folder.parent)
        shutil.rmtree(displaced, ignore_errors=True)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error
        raise CheckpointError(f"{folder} could not be written: {_first_line(error)}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a file beside its place and rename it: whole or not at all, a kill in between loses nothing."""
    beside = path.with_suffix(".tmp")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def seal(folder: Path, facts: dict[str, Any]) -> None:
    """Write `manifest.json`: `facts` and the SHA-256 of every file in `folder`. Call it last inside `replacing`."""
    files = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
    text = json.dumps({"format": FORMAT, **facts, "files": files}, indent=1)
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def problem(folder: Path) -> str | None:
    """What is wrong with a sealed folder, in words; None if every file of its manifest is there and unchanged."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        files = manifest["files"]
        if manifest["format"] != FORMAT:
            return f"foreign, {MANIFEST} has format {manifest['format']} and this version reads {FORMAT}"
        for name, digest in files.items():
            if Path(name).name != name:
                return f"foreign, {MANIFEST} names {name!r}"
            if not (folder / name).is_file():
                return f"{name} is missing"
            if _sha256(folder / name) != digest:
                return f"{name} is damaged, its SHA-256 is not the manifest's"
    except FileNotFoundError:
        return f"{MANIFEST} is missing" if folder.is_dir() else "there is no such folder"
    except OSError as error:
        return _first_line(error)
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is damaged or foreign"
    return None


def cached(name: str, what: str, build: Callable[[Path], dict[str, Any]], say: Callable[[str], None]) -> Path:
    """The folder `name` of the cache, `$CLUTCH_CACHE` or `~/.cache/clutch`; built if it is not there or damaged.

    Parallel processes build once, the others wait. Args: what: is kept, for errors; build: fills an empty folder and returns
    the facts of its manifest; say: told where another process is waited for. Raises: ConfigError if nothing can be written.
    """
    cache = Path(os.environ.get("CLUTCH_CACHE") or "~/.cache/clutch").expanduser()
    folder = cache / name
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{folder}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(f"{folder} is being built by another process; waiting for it.")
            lock.acquire()
    except OSError as error:
        raise ConfigError(
            f"{what} is cached in {cache}, which cannot be written: {error.strerror or error}. "
            "Set CLUTCH_CACHE to a folder that can."
        ) from error
    try:
        if folder.exists():
            damage = problem(folder)
            if damage is None:
                return folder
            log.warning("%s in %s is built again: %s.", what, folder, damage)
        for stale in cache.glob(f"{_TEMPORARY}{folder.name}-*"):  # of a build that was killed; ours is the only one now
            shutil.rmtree(stale, ignore_errors=True)
        with replacing(folder) as temporary:
            seal(temporary, build(temporary))
    finally:
        lock.release()
    return folder


# --- inside ----------------------------------------------------------------------------------------------------------


def _separate(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Contiguous CPU copies that share no memory, and {name: name of the stored tensor it is tied to}."""
    stored: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and first.setdefault(place, name) != name:
            tied[name] = first[place]
            continue
        # A clone also when it is contiguous already: it may be a view of a storage that another name views too.
        stored[name] = tensor.clone(memory_format=torch.contiguous_format).cpu()
    return stored, tied


def _stored(folder: Path) -> dict[str, Tensor]:
    """What `_separate` took apart."""
    with safe_open(folder / TENSORS, framework="pt", device="cpu") as reader:
        tied = json.loads((reader.metadata() or {})["tied"])
        tensors = {key: reader.get_tensor(key) for key in reader.keys()}  # noqa: SIM118 (not a dict)
    return tensors | {alias: tensors[key] for alias, key in tied.items()}


def _save_extra(extra: dict[str, Any], path: Path) -> None:
    """torch.save, and proof that it can be read back; found now, not when a run is to be resumed."""
    try:
        with path.open("wb") as file:
            torch.save(extra, file)
    except RuntimeError as error:
        # torch's writer reports a full disk as "unexpected pos"; the OSError that it met is the context.
        raise OSError(f"{path.name}: {_first_line(error.__context__ or error)}") from error
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # mmap: structure only, no tensor is read
    except pickle.UnpicklingError as error:
        raise TypeError(f"extra holds {_OBJECTS}. Give tensors, numbers, strings, lists and dicts.") from error


def _prune(root: Path, step: int, keep: int) -> None:
    """Remove the checkpoints up to `step` beyond the newest `keep`, and displaced folders up to it."""
    named = [(int(name[1]), name[2], path) for path in root.iterdir() if (name := _NAME.fullmatch(path.name))]
    plain = sorted((number, path) for number, old, path in named if old is None and number <= step)
    displaced = [path for number, old, path in named if old is not None and number <= step]
    for path in [*displaced, *(path for _, path in plain[:-keep])]:
        try:
            shutil.rmtree(path)
        except OSError as error:
            log.warning("checkpoint %s is no longer needed but could not be removed: %s.", path, _first_line(error))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
