"""Reads the file that an offline W&B run writes: a LevelDB log of protobuf records."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 32768
HEAD = struct.Struct(
    "<IHB"
)  # checksum, length, type: 1 whole, 2 first, 3 middle, 4 last part of a record


def records(folder: Path) -> Iterator[Any]:
    """The records of the run in `folder`, in order."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("run-*.wandb")
    content = path.read_bytes()
    assert content.startswith(b":W&B")
    position, held = 7, b""
    while position + HEAD.size <= len(content):
        if (
            BLOCK - position % BLOCK < HEAD.size
        ):  # too little room for a head: the rest of a block is empty
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = HEAD.unpack_from(content, position)
        position += HEAD.size
        held += content[position : position + length]
        position += length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(held)
            held = b""
            yield record
