"""From prompts to verified samples, in chunks that are written whole and never made twice.

Samples are lines of RUN/iteration-K/samples-I-of-N.jsonl, one file a shard, below a first line that
says what they were made with. A chunk (some prompts, some sample ids of each) is one call of the
sampler; a run that was killed makes a chunk that was cut short again as a whole, the same rows
together, so that it ends with the set of a run that was not killed.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from common import hardware, nonfinite, resume
from common.config import ConfigError, Run
from common.distributed import fsdp
from common.distributed.context import Context
from common.files import write_text
from common.model.prompts import encode_prompts
from common.sampling.engine import Completions
from common.sampling.native import Sampler
from common.tasks import Example, Task
from common.tasks.scoring import Pending, Scorer
from common.timer import Timer
from rft.config import RftConfig

log = logging.getLogger("clutch")

Record = dict[str, Any]
# What later stages read of a record.
FIELDS = {
    "prompt",
    "sample",
    "round",
    "completion",
    "parsed",
    "finished",
    "accepted",
    "path",
    "entropy",
    "tokens",
}


@dataclass(frozen=True)
class Chunk:
    """Sample ids `first` to `first + count - 1` of some prompts."""

    round: str  # first | second | hint
    examples: tuple[Example, ...]
    first: int
    count: int

    def keys(self) -> list[tuple[int, int]]:
        """(prompt id, sample id) of each of its samples, in order."""
        return [
            (e.id, s) for e in self.examples for s in range(self.first, self.first + self.count)
        ]


def missing(
    examples: Sequence[Example], held: dict[tuple[int, int], Record], settings: RftConfig
) -> list[Chunk]:
    """Chunks of the first unfinished round that are not wholly in `held`; empty when all rounds are
    done.

    The later rounds are for the prompts that have no accepted sample by then.
    """
    first, unsolved = 0, list(examples)
    rounds = {
        "first": settings.samples_per_prompt,
        "second": settings.second_round_samples,
        "hint": settings.hint_samples,
    }
    for name, count in rounds.items():
        todo = [
            chunk
            for chunk in _chunks(name, unsolved, first, count, settings)
            if not all(key in held for key in chunk.keys())  # noqa: SIM118 (not a dict)
        ]
        if todo:
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


def made_with(run: Run, iteration: int) -> dict[str, Any]:
    """The settings that the samples of an iteration depend on."""
    settings: RftConfig = run.algo
    keys = (
        "prompts",
        "samples_per_prompt",
        "second_round_samples",
        "hint_samples",
        "prompts_per_batch",
        "chunk_size",
    )
    return {
        "iteration": iteration,
        "seed": run.seed,
        "model": asdict(run.model),
        "task": run.task,
        "algo": (
            {key: getattr(settings, key) for key in (*keys, "validation_prompts")}
            | {"sampling": asdict(settings.sampling), "select.accept": settings.select.accept}
        ),
    }


class Store:
    """The samples of one shard, in memory and in its file. `writes`: on rank 0 alone."""

    def __init__(self, path: Path, header: dict[str, Any], writes: bool) -> None:
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
                raise ConfigError(
                    f"{self.path}:1 is not the first line of a file of samples. Move the file away,"
                    " or use another hydra.run.dir."
                ) from None
            saved = self.header  # the file was torn in its first line: nothing is lost
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
                    raise ConfigError(
                        f"{self.path}:{number} is not a sample. Remove the line: its chunk is then"
                        " made again."
                    ) from None
        self.held = dict(records)
        if self.writes and (len(lines) == 1 or lines[-1] or len(self.held) < len(records)):
            self._rewrite()

    def drop(self, chunks: Sequence[Chunk]) -> None:
        """Forget what there is of `chunks`, which are to be made again."""
        stale = [key for chunk in chunks for key in chunk.keys() if key in self.held]  # noqa: SIM118 (not a dict)
        for key in stale:
            del self.held[key]
        if stale and self.writes:
            self._rewrite()

    def keep(self, count: int) -> None:
        """Forget all samples but the first `count`."""
        self.held = dict(list(self.held.items())[:count])
        if self.writes:
            self._rewrite()

    def add(self, records: Sequence[Record]) -> None:
        """Keep a chunk's samples, in one write."""
        self.held |= {(record["prompt"], record["sample"]): record for record in records}
        if self.writes:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(_line(record) for record in records))

    def _rewrite(self) -> None:
        """The header and what is held, beside the file and then in its place."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, _line(self.header) + "".join(_line(r) for r in self.held.values()))


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"


def check_same(path: Path, saved: dict[str, Any], given: dict[str, Any]) -> None:
    """Raise ConfigError where what `path` was made with differs from what is given now."""
    differing = resume.differences(saved, json.loads(json.dumps(given)))
    if differing:
        raise ConfigError(
            f"{path} was made with other settings: {'; '.join(differing)}. "
            "Give the same ones, or start anew with another hydra.run.dir."
        )


def shard_path(folder: Path, index: int, of: int) -> Path:
    """The samples of shard `index` (from 1) of `of`."""
    return folder / f"samples-{index}-of-{of}.jsonl"


def shard_counts(folder: Path) -> set[int]:
    """In how many shards there are samples; several numbers where that was changed."""
    return {int(path.stem.rsplit("-", 1)[1]) for path in folder.glob("samples-*-of-*.jsonl")}


def merged(
    folder: Path,
    examples: Sequence[Example],
    header: dict[str, Any],
    settings: RftConfig,
    whole: bool = True,
) -> list[Record]:
    """The samples of all shards of an iteration, by prompt and sample.

    Raises: ConfigError where a shard is missing or, if they are to be `whole`, not done, or was
    made with other settings.
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
class _Made:
    """A sampled chunk whose rewards are on their way."""

    chunk: Chunk
    completions: Completions
    texts: list[str]
    pending: Pending
    seconds: float  # of sampling


class Generator:
    """Fills a store. Each rank samples a chunk at a time; rank 0 writes; all of them hold all
    samples.
    """

    def __init__(
        self, run: Run, context: Context, task: Task, tokenizer: Any, scorer: Scorer, rows: int
    ) -> None:
        self.run, self.context, self.task, self.tokenizer, self.scorer = (
            run,
            context,
            task,
            tokenizer,
            scorer,
        )
        self.settings: RftConfig = run.algo
        self.rows = rows

    def fill(
        self,
        store: Store,
        examples: Sequence[Example],
        sampler: Sampler,
        iteration: int,
        begin: Callable[[str, int], None],
        seen: Callable[[list[Record], float, float, dict[str, float]], bool],
        unusual: Callable[[list[dict[str, Any]]], None],
    ) -> None:
        """Make all that is missing, a chunk a rank at a time.

        Args: begin: called before each round with its name and the number of samples to come. seen:
        called on every rank after each wave of chunks with their samples, the seconds of sampling,
        all seconds since the last call, and those by phase; it may raise to stop the run, or return
        True to end the sampling after the wave that is under way. unusual: called on every rank
        with its samples of a wave whose rewards or logits are not finite, where any rank has some;
        it may raise.
        """
        context, size = self.context, self.context.world_size
        sampler.rows, waves = self.rows, 0
        while todo := missing(examples, store.held, self.settings):
            store.drop(todo)
            begin(todo[0].round, sum(len(chunk.keys()) for chunk in todo))
            last: _Made | None = None
            ending = False
            started, phases = time.perf_counter(), Timer()
            for start in range(0, len(todo) + size, size):
                # The rewards of a wave are computed, in a pool of workers, while the next one is
                # sampled.
                was_ending = ending
                mine = (
                    todo[start + context.rank]
                    if start + context.rank < len(todo) and not ending
                    else None
                )
                with fsdp.forwards(sampler.model):
                    made = self._sample(mine, sampler, iteration, phases) if mine else None
                if start > 0:
                    with phases("reward"):
                        records, offending = self._records(last) if last else ([], [])
                    with phases("exchange"):
                        parts = context.gather_objects(
                            (records, last.seconds if last else 0.0, bool(offending))
                        )
                    fresh = [record for part, _, _ in parts for record in part]
                    if any(bad for _, _, bad in parts):
                        unusual(offending)
                    with phases("write"):
                        store.add(fresh)
                    sampling = max(seconds for _, seconds, _ in parts)
                    ending |= seen(fresh, sampling, time.perf_counter() - started, phases.seconds)
                    started, phases = time.perf_counter(), Timer()
                    waves += 1
                    if waves % self.settings.empty_cache_every == 0 and torch.cuda.is_available():
                        torch.cuda.empty_cache()
                if was_ending:
                    break
                last = made
            if ending:
                break
        self.rows = sampler.rows

    def _sample(self, chunk: Chunk, sampler: Sampler, iteration: int, phases: Timer) -> _Made:
        ask = self.task.hint if chunk.round == "hint" else self.task.prompt  # type: ignore[attr-defined]
        prompts = encode_prompts(self.tokenizer, [ask(example) for example in chunk.examples])

        def sample(rows: int) -> Completions:
            sampler.rows = rows
            return sampler.generate(
                prompts,
                self.settings.sampling,
                samples_per_prompt=chunk.count,
                first_sample=chunk.first,
                seed=self.run.seed,
                draw=iteration,
                prompt_ids=[example.id for example in chunk.examples],
                logprobs=True,
            )

        started = time.perf_counter()
        with phases("rollout"):
            made, self.rows = hardware.halving(
                sample, self.rows, fsdp.floor(sampler.model, self.rows, 1)
            )
            texts = made.texts(self.tokenizer)
        seconds = time.perf_counter() - started
        repeated = [example for example in chunk.examples for _ in range(chunk.count)]
        with phases("reward"):
            return _Made(chunk, made, texts, self.scorer.submit(repeated, texts), seconds)

    def _records(self, made: _Made) -> tuple[list[Record], list[dict[str, Any]]]:
        """The samples, and those whose reward or logits are not finite, which count as wrong."""
        scored, completions = made.pending.result(), made.completions
        assert completions.logprobs is not None
        lengths = completions.lengths.tolist()
        entropy = (
            -completions.logprobs.sum(1) / completions.lengths
        ).tolist()  # estimated from what was drawn
        answer = getattr(self.task, "answer", lambda text: None)
        path_key = getattr(self.task, "path_key", lambda text: "")
        by_id = {example.id: example for example in made.chunk.examples}
        records: list[Record] = []
        offending: list[dict[str, Any]] = []
        broken = completions.broken.tolist()
        for row, (prompt, sample) in enumerate(made.chunk.keys()):
            example, text, finished = (
                by_id[prompt],
                made.texts[row],
                bool(completions.finished[row]),
            )
            reward = scored.rewards[row]
            if sound := math.isfinite(reward) and not broken[row]:
                accepted = self.settings.select.accepts(reward, finished)
            else:
                accepted = False
                offending.append(
                    {
                        "sample": sample,
                        **nonfinite.row(self.task, example, text, reward, broken[row]),
                    }
                )
            records.append(
                {
                    "prompt": prompt,
                    "sample": sample,
                    "round": made.chunk.round,
                    "question": example.question,
                    "answer": example.answer,
                    "completion": text,
                    "parsed": answer(text),
                    "reward": reward if sound else 0.0,
                    "finished": finished,
                    "accepted": accepted,
                    "path": path_key(text),
                    "entropy": round(entropy[row], 4) if math.isfinite(entropy[row]) else 0.0,
                    "tokens": completions.tokens[row, : lengths[row]].tolist(),
                }
            )
        return records, offending
