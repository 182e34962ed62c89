"""From prompts to verified samples, in chunks that are written atomically and never made twice.

Samples are lines of RUN/iteration-K/samples-I-of-N.jsonl, one file per shard, after a first line
with the settings that they were made with. A chunk (some prompts, some sample ids of each) is one
call of the sampler; a chunk that a kill cut short is made again as a whole.
"""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.config import ConfigError
from common.engine import Requests
from common.parts import Parts
from common.report import samples
from common.rollout import Rollout
from common.run import Timer
from common.system import write_jsonl
from common.task import Example, TaskFeatures
from rft.config import RftConfig
from rft.made_with import check_same

log = logging.getLogger("clutch")

# Waves between two clearings of CUDA's cache of free memory.
EMPTY_CACHE_EVERY = 10

Record = dict[str, Any]
# The fields of a record that later stages read.
FIELDS = {
    *("prompt", "sample", "round", "completion", "parsed", "finished", "accepted", "path"),
    *("entropy", "tokens"),
}


@dataclass(frozen=True)
class Chunk:
    """Sample ids `first` to `first + count - 1` of some prompts."""

    round: str  # first | second | hint
    examples: tuple[Example, ...]
    first: int
    count: int

    def keys(self) -> list[tuple[int, int]]:
        """Return (prompt id, sample id) of each of its samples, in order."""
        numbers = range(self.first, self.first + self.count)
        return [(example.id, sample) for example in self.examples for sample in numbers]


def missing(
    examples: Sequence[Example], held: dict[tuple[int, int], Record], settings: RftConfig
) -> list[Chunk]:
    """Return the chunks of the first unfinished round that are not completely in `held`.

    The later rounds are for prompts that have no accepted sample so far.
    """
    first, unsolved = 0, list(examples)
    counts = settings.samples_per_prompt, settings.second_round_samples, settings.hint_samples
    for name, count in zip(("first", "second", "hint"), counts, strict=True):
        chunks = _chunks(name, unsolved, first, count, settings)
        if todo := [chunk for chunk in chunks if not held.keys() >= set(chunk.keys())]:
            return todo
        first += count
        unsolved = [e for e in unsolved if not any(held[e.id, s]["accepted"] for s in range(first))]
    return []


def _chunks(
    name: str, examples: Sequence[Example], first: int, count: int, settings: RftConfig
) -> Iterator[Chunk]:
    for start in range(0, len(examples), settings.prompts_per_batch):
        together = tuple(examples[start : start + settings.prompts_per_batch])
        for offset in range(0, count, settings.chunk_size):
            yield Chunk(name, together, first + offset, min(settings.chunk_size, count - offset))


class Store:
    """The samples of one shard, in memory and in its file.

    Args:
        header: the settings that they are made with; None = any.
        writes: whether to write the file; only on rank 0.
    """

    def __init__(self, path: Path, header: dict[str, Any] | None, writes: bool) -> None:
        self.path, self.header, self.writes = path, header, writes
        self.held: dict[tuple[int, int], Record] = {}
        if path.exists():
            self._read()
        elif writes:
            self._rewrite()

    def _read(self) -> None:
        lines = self.path.read_bytes().split(b"\n")
        try:
            saved = json.loads(lines[0])
        except ValueError:
            if len(lines) > 1:
                text = f"{self.path}:1 is not of a file of samples. Move it away."
                raise ConfigError(text) from None
            saved = self.header or {}  # the file was torn in its first line: nothing is lost
        if self.header is not None:
            check_same(self.path, saved, self.header)
        records = []
        for number, line in enumerate(lines[1:], start=2):
            try:
                record = json.loads(line)
                if not record.keys() >= FIELDS:
                    raise KeyError
                records.append(((record["prompt"], record["sample"]), record))
            except (ValueError, KeyError, TypeError, AttributeError):
                if number < len(lines):
                    text = f"{self.path}:{number} is not a sample. Remove the line, to remake it."
                    raise ConfigError(text) from None
        self.held = dict(records)
        if self.writes and (len(lines) == 1 or lines[-1] or len(self.held) < len(records)):
            self._rewrite()

    def drop(self, chunks: Sequence[Chunk]) -> None:
        """Remove the existing samples of `chunks`, which will be made again."""
        wanted = {key for chunk in chunks for key in chunk.keys()}  # noqa: SIM118 (not a dict)
        stale = wanted & self.held.keys()
        for key in stale:
            del self.held[key]
        if stale and self.writes:
            self._rewrite()

    def keep(self, count: int) -> None:
        """Remove all samples except the first `count`."""
        self.held = dict(list(self.held.items())[:count])
        if self.writes:
            self._rewrite()

    def add(self, records: Sequence[Record]) -> None:
        """Append the samples of a chunk, in one write."""
        self.held |= {(record["prompt"], record["sample"]): record for record in records}
        if self.writes:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
                file.flush()
                os.fsync(file.fileno())

    def _rewrite(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        assert self.header is not None
        write_jsonl(self.path, [self.header, *self.held.values()], ascii_only=False)


def find_runs(mask: Tensor) -> list[list[int]]:
    """Return [first, last + 1] of each run of True in a mask [T]."""
    edges = torch.diff(mask.int(), prepend=torch.zeros(1), append=torch.zeros(1)).nonzero()
    return edges.view(-1, 2).tolist()


def find_written(record: Record) -> list[bool]:
    """Return, per token of a record, whether the model drew it; the tokens of its
    environment (the spans in `told`) were not.
    """
    written = [True] * len(record["tokens"])
    for start, end in record.get("told", ()):
        written[start:end] = [False] * (end - start)
    return written


def shard_path(folder: Path, index: int, of: int) -> Path:
    """Return the file of the samples of shard `index` (from 1) of `of`."""
    return folder / f"samples-{index}-of-{of}.jsonl"


def shard_counts(folder: Path) -> set[int]:
    """Return the numbers of shards that samples exist for; several if that number was changed."""
    return {int(path.stem.rsplit("-", 1)[1]) for path in folder.glob("samples-*-of-*.jsonl")}


def merged(
    folder: Path,
    examples: Sequence[Example],
    header: dict[str, Any],
    settings: RftConfig,
    whole: bool = True,
) -> list[Record]:
    """Return the samples of all shards of an iteration, by prompt and sample.

    Raises: ConfigError for a shard that is missing, was made with other settings, or, if it must be
    whole, is not.
    """
    counts = shard_counts(folder)
    if not counts:
        raise ConfigError(f"{folder} has no samples yet. Make them: algo.stage=generate.")
    if len(counts) > 1:
        raise ConfigError(
            f"{folder} has samples in shards of {' and of '.join(map(str, sorted(counts)))}. Keep"
            " the files of one of them."
        )
    of = counts.pop()
    records: dict[tuple[int, int], Record] = {}
    for index in range(1, of + 1):
        path = shard_path(folder, index, of)
        stage = "algo.stage=generate" + (f" algo.shard={index}/{of}" if of > 1 else "")
        if not path.exists():
            raise ConfigError(f"{path} is missing. Make it: {stage}.")
        held = Store(path, header, writes=False).held
        if whole and missing(examples[index - 1 :: of], held, settings):
            raise ConfigError(f"{path} is not complete. Go on with it: {stage} resume=auto.")
        records |= held
    return [records[key] for key in sorted(records)]


@dataclass(frozen=True)
class _Sampled:
    """A sampled chunk whose rewards are being computed."""

    chunk: Chunk
    rollout: Rollout
    seconds: float  # of sampling


@dataclass(frozen=True)
class Wave:
    """The samples of one chunk per rank."""

    records: list[Record]  # the samples of all ranks
    offending: list[dict[str, Any]] | None  # this rank's samples that are not finite; None = none
    shown: list[samples.Row]  # samples of the first prompts of each chunk, in the saved format
    sampling: float  # seconds of sampling
    started: float  # the time of its start, by perf_counter
    timer: Timer


class Generator:
    """Fills a store. Each rank samples a chunk at a time; every rank holds all samples."""

    def __init__(self, parts: Parts, store: Store, iteration: int) -> None:
        self.parts, self.store, self.iteration = parts, store, iteration
        self.cfg: RftConfig = parts.run.algo
        self.tokens = samples.Tokens(parts.lm.tokenizer)

    def waves(self, todo: Sequence[Chunk], enough: Callable[[], bool]) -> Iterator[Wave]:
        """Make `todo`, a chunk per rank at a time; yield each wave, to be added to the store.

        The rewards of a wave are computed while the next one is sampled. Once `enough` returns
        True, sampling ends after the current wave.
        """
        context, size = self.parts.context, self.parts.context.world_size
        self.store.drop(todo)
        last: _Sampled | None = None
        ending = False
        started, timer = time.perf_counter(), Timer()
        for start in range(0, len(todo) + size, size):
            was_ending, place = ending, start + context.rank
            mine = todo[place] if place < len(todo) and not ending else None
            with self.parts.lm.sharding.gathered():
                sampled = self._sample(mine, timer) if mine else None
            if start > 0:
                with timer("reward"):
                    records, offending = self._records(last) if last else ([], [])
                with timer("keep"):
                    shown = self._describe_kept(last.rollout) if last else []
                with timer("exchange"):
                    seconds = last.seconds if last else 0.0
                    parts = context.gather_objects((records, shown, seconds, bool(offending)))
                fresh = [record for part, *_ in parts for record in part]
                shown = [row for _, part, *_ in parts for row in part]
                seconds = max(seconds for *_, seconds, _ in parts)
                broken = offending if any(bad for *_, bad in parts) else None
                yield Wave(fresh, broken, shown, seconds, started, timer)
                ending |= enough()
                if start // size % EMPTY_CACHE_EVERY == 0 and torch.cuda.is_available():
                    torch.cuda.empty_cache()
                started, timer = time.perf_counter(), Timer()
            if was_ending:
                break
            last = sampled

    def rehearse(self, todo: Sequence[Chunk]) -> None:
        """Sample this rank's first chunk and discard it, so that compilation happens here."""
        with self.parts.lm.sharding.gathered():
            for chunk in todo[self.parts.context.rank :][:1]:
                self.parts.rollouter.sample(self._request(chunk))

    def _request(self, chunk: Chunk) -> Requests:
        task = self.parts.task
        return self.parts.rollouter.request(
            chunk.examples,
            task.hint if chunk.round == "hint" else task.prompt,  # type: ignore[attr-defined]
            samples=chunk.count,
            first_sample=chunk.first,
            draw=self.iteration,
            logprobs=True,
        )

    def _sample(self, chunk: Chunk, timer: Timer) -> _Sampled:
        before = timer.seconds.get("rollout", 0.0)
        asked = self._request(chunk)
        rollout = self.parts.rollouter.roll_out(
            chunk.examples, asked, timer, step=self.iteration - 1
        )
        return _Sampled(chunk, rollout, timer.seconds["rollout"] - before)

    def _records(self, sampled: _Sampled) -> tuple[list[Record], list[dict[str, Any]]]:
        """Return the samples as records, and descriptions of those that are not finite, which count
        as wrong.
        """
        task, rollout = self.parts.task, sampled.rollout
        assert rollout.logprobs is not None
        # Estimated from the drawn tokens.
        entropy = (-rollout.logprobs.sum(1).cpu() / rollout.drawn).tolist()
        features = TaskFeatures(task)
        answer = features.answer or (lambda text: None)
        path_key = features.path_key or (lambda text: "")
        records: list[Record] = []
        finished, unsound = rollout.finished.tolist(), rollout.find_offending(task)
        for row, (prompt, sample) in enumerate(sampled.chunk.keys()):
            text, reward = rollout.texts[row], rollout.scored.rewards[row]
            sound, example = rollout.sound[row], rollout.example(row)
            if not sound:
                unsound[row] = {"sample": sample, **unsound[row]}
            unscored = rollout.scored.unscored[row]
            replies = find_runs(~rollout.written[row, : rollout.lengths[row]])
            records.append(
                {
                    "prompt": prompt,
                    "sample": sample,
                    "round": sampled.chunk.round,
                    "question": example.question,
                    "answer": example.answer,
                    "completion": text,
                    "parsed": answer(text),
                    "reward": reward if sound and not unscored else 0.0,
                    "finished": finished[row],
                    "repeating": rollout.repeating[row],
                    "accepted": sound
                    and not unscored
                    and self.cfg.select.accepts(reward, finished[row]),
                    "path": path_key(text),
                    "entropy": round(entropy[row], 4) if math.isfinite(entropy[row]) else 0.0,
                    "tokens": rollout.tokens[row, : rollout.lengths[row]].tolist(),
                    **({"told": replies} if replies else {}),
                    **({"stop": rollout.stops[row]} if rollout.stops else {}),
                    **({"unscored": True} if unscored else {}),
                }
            )
        return records, list(unsound.values())

    def _describe_kept(self, rollout: Rollout) -> list[samples.Row]:
        prompts = samples.kept_prompts(self.parts.run, len(rollout.examples))
        rows = range(prompts * rollout.requests.samples)
        return rollout.describe(rows, self.parts.task, self.tokens)
