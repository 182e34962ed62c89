"""RUN/run.egg: a run of EGGROLL as the numbers that its updates were made of.

The format, all numbers little-endian:

    8 bytes     b"CLUTCHEG"
    records     uint32 length, uint32 CRC-32 of the payload, payload

The first byte of a payload is its kind:

    H   the header, once, first: JSON, compressed by zlib (`HEADER`)
    S   a step: uint32 number (from 1), uint32 draw of the noise, float64 sigma, float64 lr,
        16 bytes of the SHA-256 of the weights after the step (zeros = not computed),
        float32 [directions] the weight of each direction of noise in the update,
        float64 [members, components] the mean of each component of the reward by member (absent
        if the reward has fewer than two)
    M   the machine, if a resumed run goes on elsewhere: JSON (`MACHINE`)
    E   the end: JSON (`END`)

A step that made no update (not_finite.policy=skip) has no record. A run that was killed may leave
an incomplete last record, which is ignored. Nothing in the file is run: it is numbers and JSON, all
of it bounded and checked when it is read.
"""

import hashlib
import json
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.config import ConfigError
from common.distributed import full_tensor
from common.system import NUMBER, DamagedError, safe_read, write_bytes

MAGIC = b"CLUTCHEG"
FORMAT = 1
FRAME = struct.Struct("<II")
STEP = struct.Struct("<II dd 16s")
LARGEST = 1 << 22  # bytes of JSON, decompressed
LARGEST_LR = 1e30  # beyond it a float32 weight overflows
THREADS = 1024  # the most that a machine has
MOST = 1 << 24  # members, and bytes of a record
DTYPES = ("float32", "bfloat16", "float16")
MACHINE = {"device": str, "type": str, "instructions": str, "threads": int, "torch": str}
HEADER = {
    "format": int,
    "members": int,
    "directions": int,
    "components": [str],
    "weights": [NUMBER],
    "task": bool,
    "settings": {
        "algo": dict,
        "model": dict,
        "hardware": dict,
        "evaluate": dict,
        "opt": {"fsdp": {"enabled": bool}, "amp": dict},
        "task": dict,
        "seed": int,
    },
    "dtype": str,
    "base": str,
    "start": str,
    "machine": MACHINE,
    "transformers": str,
    "commit": (str, type(None)),
    "model_commit": (str, type(None)),
}
END = {"step": int, "exported": int, "sha256": str, "headline": str, "before": NUMBER}
END |= {"after": NUMBER}


@dataclass(frozen=True)
class StepRecord:
    """The numbers that one update was made of.

    Attributes:
        number: the number of the step, from 1.
        draw: the number of its noise.
        sigma: the standard deviation of the noise.
        lr: the learning rate of the update, as it was applied.
        digest: the first 16 bytes of `digest` of the weights after the update; None = not computed.
        directions: the weight of each direction of noise, float32 [directions]: the fitness of the
            member, or of mirrored members the difference within the pair.
        components: the mean of each component of the reward, float64 [members, components].
    """

    number: int
    draw: int
    sigma: float
    lr: float
    digest: bytes | None
    directions: np.ndarray
    components: np.ndarray

    def pack(self) -> bytes:
        """Return the payload of the record."""
        fixed = (self.number, self.draw, self.sigma, self.lr, self.digest or bytes(16))
        arrays = self.directions.astype("<f4"), self.components.astype("<f8")
        return b"S" + STEP.pack(*fixed) + b"".join(array.tobytes() for array in arrays)


@dataclass
class Egg:
    """The content of a file.

    Attributes:
        path: the file.
        header: `HEADER`.
        steps: the records of the updates, in order.
        machines: the machines on which the run went on, each with the number of records before.
        end: `END` of a run that has ended; None = it has not.
        torn: whether the last record is incomplete.
    """

    path: Path
    header: dict[str, Any]
    steps: list[StepRecord] = field(default_factory=list)
    machines: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    torn: bool = False

    @property
    def last(self) -> int:
        """The number of the last step with a record; 0 if there is none."""
        return self.steps[-1].number if self.steps else 0

    def cut(self, step: int) -> "Egg":
        """Return the content up to a step, without an end."""
        steps = [one for one in self.steps if one.number <= step]
        machines = [(place, one) for place, one in self.machines if place < len(steps)]
        return Egg(self.path, self.header, steps, machines)

    def payloads(self) -> Iterator[bytes]:
        """Yield the payloads of all records, in order."""
        yield pack_header(self.header)
        for place in range(len(self.steps) + 1):
            yield from (pack_json("M", one) for at, one in self.machines if at == place)
            if place < len(self.steps):
                yield self.steps[place].pack()
        if self.end is not None:
            yield pack_json("E", self.end)


def pack_header(header: dict[str, Any]) -> bytes:
    """Return the payload of the header."""
    return b"H" + zlib.compress(json.dumps(header).encode(), 9)


def pack_json(kind: str, content: dict[str, Any]) -> bytes:
    """Return the payload of a record of JSON."""
    return kind.encode() + json.dumps(content).encode()


def frame(payload: bytes) -> bytes:
    """Return a payload with its length and checksum."""
    return FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def write(path: Path, payloads: Iterable[bytes]) -> None:
    """Write a file: atomic, and safe against a kill."""
    write_bytes(path, MAGIC + b"".join(map(frame, payloads)))


def append(path: Path, payload: bytes) -> None:
    """Add a record to a file. A kill leaves it incomplete, which `read` ignores."""
    with path.open("ab") as file:
        file.write(frame(payload))


def read(path: Path) -> Egg:
    """Read a file. Raises: ConfigError if it is none or is damaged, with the place."""
    if not path.is_file():
        raise ConfigError(
            f"{path}: there is no such file. A run of algo=eggroll writes run.egg into its folder;"
            " give the file or the run folder."
        )
    advice = "Get the file again from where it was made."
    with safe_read.reading(path, advice), path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise DamagedError(
                f"{path} is no run.egg: it begins with other bytes. Give the file"
                " that a run of algo=eggroll has written."
            )
        egg: Egg | None = None
        while (payload := _next_payload(file)) is not None:
            if egg is None:
                egg = Egg(path, _header(payload))
            elif not payload:
                egg.torn = True
                break
            else:
                _take(egg, payload)
        if egg is None:
            raise ValueError("it has no header")
    return egg


def _next_payload(file: Any) -> bytes | None:
    """Return the next payload; None at the end, and b"" for an incomplete record at the end.

    Raises: ValueError for a record with another checksum or of an impossible length.
    """
    place, head = file.tell(), file.read(FRAME.size)
    if not head:
        return None
    if len(head) < FRAME.size:
        return b""
    length, checksum = FRAME.unpack(head)
    if not 0 < length <= MOST:
        raise ValueError(f"the record at byte {place} has the length {length}")
    payload = file.read(length)
    if len(payload) < length:
        return b""
    if zlib.crc32(payload) != checksum:
        raise ValueError(
            f"the record at byte {place} has another checksum than when it was written"
        )
    return payload


def _header(payload: bytes) -> dict[str, Any]:
    if payload[:1] != b"H":
        raise ValueError("its first record is not a header")
    opened = zlib.decompressobj()
    text = opened.decompress(payload[1:], LARGEST)
    if opened.unconsumed_tail:
        raise ValueError(f"its header is longer than {LARGEST} bytes")
    header = safe_read.parse_json(text.decode("utf-8"))
    known = isinstance(header, dict) and type(header.get("format")) is int
    if not known or header["format"] != FORMAT:
        found = header.get("format") if isinstance(header, dict) else header
        raise ValueError(f"it has format {found!r:.20}, and this version reads {FORMAT}")
    safe_read.check(header, HEADER)
    if header["dtype"] not in DTYPES:
        raise ValueError(f"its dtype is {header['dtype']!r:.20}")
    if not 1 <= header["machine"]["threads"] <= THREADS:
        raise ValueError(f"its machine has {header['machine']['threads']} threads")
    members, directions = header["members"], header["directions"]
    if len(header["weights"]) != len(header["components"]):
        raise ValueError("its components have other weights")
    if not 2 <= members <= MOST or directions not in (members, members // 2):
        raise ValueError(f"it has {members} members and {directions} directions")
    return header


def _take(egg: Egg, payload: bytes) -> None:
    """Add a record to the content. Raises: ValueError if it cannot be part of it."""
    kind, body = payload[:1], payload[1:]
    if egg.end is not None:
        raise ValueError("a record follows the end")
    if kind == b"S":
        egg.steps.append(_step(egg, body))
    elif kind in (b"M", b"E"):
        content = safe_read.parse_json(body[:LARGEST].decode("utf-8"))
        safe_read.check(content, MACHINE if kind == b"M" else END)
        if kind == b"M":
            egg.machines.append((len(egg.steps), content))
        else:
            egg.end = content
            if not 0 <= content["exported"] <= content["step"] or not (
                egg.last <= content["step"] < 1 << 32
            ):
                raise ValueError("its end names steps that it does not have")
    else:
        raise ValueError(f"a record has the kind {kind!r}")


def _step(egg: Egg, body: bytes) -> StepRecord:
    count, members = egg.header["directions"], egg.header["members"]
    parts = len(egg.header["components"])
    if len(body) != STEP.size + 4 * count + 8 * members * parts:
        raise ValueError(f"the record after step {egg.last} has {len(body)} bytes")
    number, draw, sigma, lr, digest = STEP.unpack_from(body)
    directions = np.frombuffer(body, "<f4", count, STEP.size)
    components = np.frombuffer(body, "<f8", members * parts, STEP.size + 4 * count)
    sound = np.isfinite(directions).all() and np.isfinite(components).all()
    sound = sound and 0 <= lr < LARGEST_LR and 0 < sigma < LARGEST_LR
    if not sound or number <= egg.last:
        raise ValueError(f"the record after step {egg.last} holds numbers that no step has")
    known = digest if any(digest) else None
    shaped = components.reshape(members, parts)
    return StepRecord(number, draw, sigma, lr, known, directions, shaped)


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the SHA-256 of named tensors: of each, in the order of names, its name, dtype, shape
    and bytes. Sharded tensors are gathered, so every rank calls it.
    """
    whole = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        full = full_tensor(tensor.detach()).cpu().contiguous()
        whole.update(f"{name} {full.dtype} {tuple(full.shape)}\n".encode())
        whole.update(full.reshape(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest()
