"""From labelled rows to batches: the tokenizer, rows of varying length in one array, the order of
batches, the loader.
"""

import hashlib
import json
import logging
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import DataLoader

from common.config import ConfigError
from common.system import cached, leave_stops_to_the_run
from ddp_bench.config import LoaderConfig, TokenizerConfig
from ddp_bench.tasks import ClassTask, Labelled, Trajectory

log = logging.getLogger("clutch")

PAD, UNKNOWN = "[PAD]", "[UNK]"  # ids 0 and 1
FORMAT = 1  # part of the cache key: raise it when tokenising changes
WORKERS_PER_GPU = 4
IGNORED = -100  # label of a row that carries no loss

# {argument of the model: tensor}, and labels int64 [B].
Batch = tuple[dict[str, Tensor], Tensor]


@dataclass(frozen=True)
class Ragged:
    """Rows of varying length.

    Attributes:
        values: the concatenated rows, [sum of lengths, ...].
        offsets: int64 [rows + 1], the first index of each row, and their total.
    """

    values: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Any], dtype: Any) -> "Ragged":
        """Make it from a sequence of arrays or lists."""
        offsets = np.cumsum([0, *map(len, rows)])
        return cls(np.concatenate([np.asarray(row, dtype) for row in rows]), offsets)

    @property
    def lengths(self) -> np.ndarray:
        """The length of each row, int64 [rows]."""
        return np.diff(self.offsets)

    def padded(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the rows, padded with zeros at the end, [B, longest, ...], and their lengths,
        int64 [B].
        """
        starts, ends = self.offsets[rows], self.offsets[np.asarray(rows) + 1]
        lengths = ends - starts
        out = np.zeros((len(rows), int(lengths.max()), *self.values.shape[1:]), self.values.dtype)
        for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
            out[i, : end - start] = self.values[start:end]
        return torch.from_numpy(out), torch.from_numpy(lengths)


@dataclass(frozen=True)
class Rows:
    """Rows in the format of the model; the dataset of a DataLoader.

    Attributes:
        fields: the model's arguments by name; a ragged one also yields `NAME_lengths`.
        labels: int64 [rows].
    """

    fields: dict[str, Ragged | np.ndarray]
    labels: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """The length of each row over all of its ragged fields, int64 [rows]."""
        ragged = [field for field in self.fields.values() if isinstance(field, Ragged)]
        return np.sum([field.lengths for field in ragged], 0)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, rows: list[int]) -> Batch:
        """Return the batch of these rows; without rows a batch without loss."""
        inputs: dict[str, Tensor] = {}
        chosen = rows or [0]
        for name, field in self.fields.items():
            if isinstance(field, Ragged):
                inputs[name], inputs[f"{name}_lengths"] = field.padded(chosen)
            else:
                inputs[name] = torch.from_numpy(field[chosen])
        return inputs, torch.from_numpy(self.labels[rows]) if rows else torch.tensor([IGNORED])

    def content(self, row: int) -> bytes:
        """Return the content of a row as bytes, to detect copies of it."""
        parts = []
        for field in self.fields.values():
            span = slice(row, row + 1)
            if isinstance(field, Ragged):
                span = slice(field.offsets[row], field.offsets[row + 1])
                field = field.values
            parts.append(field[span].tobytes())
        return b"|".join(parts)

    def digest(self) -> str:
        """Return a hash of all rows, to check that a resumed run has the same data."""
        digest = hashlib.sha256(np.ascontiguousarray(self.labels).data)
        for field in self.fields.values():
            for array in (field.values, field.offsets) if isinstance(field, Ragged) else (field,):
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()[:16]


def prepare(
    task: ClassTask, tokenizer: TokenizerConfig, max_tokens: int, say: Any
) -> tuple[dict[str, Rows], Tokenizer | None]:
    """Return the splits of a task, and the tokenizer of its texts (None for trajectories). Texts
    longer than `max_tokens` are truncated.

    Args: say: called with a message before waiting for another process.
    """
    splits, classes = {s: list(task.rows(s)) for s in ("train", "test")}, len(task.classes)
    for split, rows in splits.items():
        if not rows:
            raise ConfigError(f"the task's rows({split!r}) returns none. It must return some.")
        wrong = [row.label for row in rows if not 0 <= row.label < classes]
        if wrong:
            raise ConfigError(f"a {split} row has the label {wrong[0]} of {classes} classes.")
    kinds = {type(row.value) for rows in splits.values() for row in rows}
    if kinds == {str}:
        return _encode_texts(splits, tokenizer, max_tokens, say)
    if kinds == {Trajectory}:
        return {split: trajectories(rows, max_tokens) for split, rows in splits.items()}, None
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise ConfigError(
        f"the task's rows are {names}. All must be str, or all ddp_bench.tasks.Trajectory."
    )


def trajectories(rows: Sequence[Labelled], max_tokens: int) -> Rows:
    """Return trajectories as arrays. Raises: ConfigError for more than `max_tokens` steps."""
    encoded = Rows(
        {
            "context": Ragged.of([row.value.context for row in rows], np.float32),
            "states": Ragged.of([row.value.states for row in rows], np.float32),
            "goal": np.stack([row.value.goal for row in rows]).astype(np.float32),
        },
        np.array([row.label for row in rows], np.int64),
    )
    longest = int(encoded.lengths.max()) + 1
    if longest > max_tokens:
        raise ConfigError(
            f"algo.model.max_tokens={max_tokens} is too small: the longest trajectory has {longest}"
            f" tokens, context and goal with it. Use algo.model.max_tokens={longest}."
        )
    return encoded


def _encode_texts(
    splits: dict[str, list[Labelled]], config: TokenizerConfig, max_tokens: int, say: Any
) -> tuple[dict[str, Rows], Tokenizer]:
    texts = {split: [row.value for row in rows] for split, rows in splits.items()}
    made_of = json.dumps([FORMAT, asdict(config), max_tokens, texts], sort_keys=True)
    digest = hashlib.sha256(made_of.encode()).hexdigest()[:16]

    def build(folder: Path) -> dict[str, Any]:
        tokenizer, arrays = train_tokenizer(config, texts["train"]), {}
        for split, values in texts.items():
            ids = encode(tokenizer, values, max_tokens)
            arrays |= {f"{split}.values": ids.values, f"{split}.offsets": ids.offsets}
        tokenizer.save(str(folder / "tokenizer.json"))
        save_file(arrays, folder / "rows.safetensors")
        return {"tokenizer": asdict(config), "max_tokens": max_tokens}

    folder = cached(f"text-{digest}", "the tokenised text", build, say)
    arrays = load_file(folder / "rows.safetensors")
    encoded = {}
    for split, rows in splits.items():
        ids = Ragged(arrays[f"{split}.values"], arrays[f"{split}.offsets"])
        encoded[split] = Rows({"ids": ids}, np.array([row.label for row in rows], np.int64))
    return encoded, Tokenizer.from_file(str(folder / "tokenizer.json"))


def encode(tokenizer: Tokenizer, texts: Sequence[str], max_tokens: int) -> Ragged:
    """Return the tokens of texts, truncated to `max_tokens`."""
    # A text without tokens, such as a control character, becomes one unknown token.
    rows = tokenizer.encode_batch(list(texts))
    return Ragged.of([row.ids[:max_tokens] or [1] for row in rows], np.int32)


def train_tokenizer(config: TokenizerConfig, texts: Sequence[str]) -> Tokenizer:
    """Return a tokenizer trained on `texts`: id 0 pads, id 1 is unknown."""
    steps = [normalizers.NFC(), *([normalizers.Lowercase()] if config.lowercase else [])]
    options: dict[str, Any] = {
        "vocab_size": config.vocabulary,
        "special_tokens": [PAD, UNKNOWN],
        "show_progress": False,
    }
    if config.kind == "bpe":
        tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.decoder = decoders.ByteLevel()
        options["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(**options)
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(**options)
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def held_out(rows: Rows, share: float, seed: int) -> tuple[list[int], list[int]]:
    """Return the row numbers for training and for validation; all copies of a row are in the same
    set. Raises: ConfigError if a set is empty.
    """
    order = list(range(len(rows)))
    random.Random(f"validation {seed}").shuffle(order)
    copies: dict[bytes, list[int]] = {}
    for row in order:
        copies.setdefault(rows.content(row), []).append(row)
    count, chosen = round(share * len(rows)), []
    for same in copies.values():
        if len(chosen) >= count:
            break
        chosen += same
    if share and not 0 < len(chosen) < len(rows):
        raise ConfigError(
            f"algo.validation_share={share} of {len(rows)} training rows, {len(copies)} of them"
            f" different, are {len(chosen)}. Change it, or give more rows."
        )
    return sorted(set(order) - set(chosen)), sorted(chosen)


class Batches:
    """The rows of each batch, a function of (seed, epoch, position): every row once per epoch. A
    rank takes every world-th row of a batch.

    Args:
        batch_rows: the rows of a batch on all ranks together.
        bucket_batches: the number of batches that are sorted by length together; 1 = not sorted.
    """

    def __init__(
        self,
        rows: Sequence[int],
        lengths: np.ndarray,
        batch_rows: int,
        bucket_batches: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.rows, self.lengths = list(rows), {row: int(lengths[row]) for row in rows}
        self.batch_rows, self.pool, self.seed = batch_rows, batch_rows * bucket_batches, seed
        self.rank, self.world = rank, world
        self.step = 0  # the first step of the next iteration, which ends with that epoch
        self.last: tuple[int, list[list[int]]] = (-1, [])  # the epoch of the last call of `at`

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return -(-len(self.rows) // self.batch_rows)

    def epoch(self, epoch: int) -> list[list[int]]:
        """Return the batches of an epoch, in order, for all ranks together."""
        draw = random.Random(f"batches {self.seed} {epoch}")
        order = list(self.rows)
        draw.shuffle(order)
        if self.pool > self.batch_rows:
            pools = [order[i : i + self.pool] for i in range(0, len(order), self.pool)]
            order = [row for pool in pools for row in sorted(pool, key=self.lengths.__getitem__)]
        batches = [order[i : i + self.batch_rows] for i in range(0, len(order), self.batch_rows)]
        draw.shuffle(batches)
        return batches

    def at(self, step: int) -> list[int]:
        """Return the rows of all ranks in the batch of a step."""
        epoch, position = divmod(step, len(self))
        if self.last[0] != epoch:
            self.last = epoch, self.epoch(epoch)
        return self.last[1][position]

    def __iter__(self) -> Iterator[list[int]]:
        epoch, position = divmod(self.step, len(self))
        for batch in self.epoch(epoch)[position:]:
            yield batch[self.rank :: self.world]


class Loader:
    """Batches of a rank from any step on, made by persistent worker processes, or by this one."""

    def __init__(
        self, rows: Rows, batches: Batches, config: LoaderConfig, device: torch.device
    ) -> None:
        cuda = device.type == "cuda"
        self.workers = config.workers if config.workers is not None else WORKERS_PER_GPU * cuda
        self.batches = batches
        if config.prefetch is not None and not self.workers:
            raise ConfigError(
                f"algo.loader.prefetch={config.prefetch} has no effect without algo.loader.workers."
                " Set them, for example to 2, or leave it out."
            )
        if self.workers:  # else the tokenizers library warns in each of them
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.loader = DataLoader(
            rows,  # type: ignore[arg-type]
            batch_sampler=batches,  # type: ignore[arg-type]
            collate_fn=_keep,  # pyright: ignore[reportArgumentType] (the rows make the batch)
            num_workers=self.workers,
            prefetch_factor=config.prefetch,  # None = 2
            persistent_workers=self.workers > 0,
            pin_memory=cuda,
            worker_init_fn=ignore_signals,
            # else every epoch would draw from torch's own, which dropout uses
            generator=torch.Generator(),
        )

    def look(self, step: int) -> tuple[Batch, int]:
        """Return the batch of a step, and the number of its rows on all ranks."""
        batch, rows = next(self.from_step(step))
        return batch, len(rows)

    def from_step(self, step: int) -> Iterator[tuple[Batch, list[int]]]:
        """Yield the batches of `step`, step + 1, ..., on the CPU, each with the rows of
        all ranks.
        """
        while True:
            self.batches.step = step
            for batch in self.loader:
                yield batch, self.batches.at(step)
                step += 1


def to(batch: Batch, device: torch.device) -> Batch:
    """Move the batch to a device, from pinned memory without blocking."""
    inputs, labels = batch
    moved = {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}
    return moved, labels.to(device, non_blocking=True)


def split(batch: Batch, rows: int) -> list[Batch]:
    """Split the batch into parts of at most `rows` rows."""
    inputs, labels = batch
    columns = [tensor.split(rows) for tensor in (*inputs.values(), labels)]
    return [
        (dict(zip(inputs, part, strict=True)), of_labels)
        for *part, of_labels in zip(*columns, strict=True)
    ]


def _keep(batch: Batch) -> Batch:
    return batch


def ignore_signals(worker: int) -> None:
    """Ignore signals in a worker: its main process handles them, finishes the step and saves."""
    leave_stops_to_the_run()
