"""A tiny byte-level Llama that a run builds, and briefly pre-trains, if no model is named."""

import hashlib
import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch.nn import functional as F
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from common.config import ConfigError, TinyConfig
from common.device import count_cores
from common.model.export import progress_bars
from common.system import cache_folder, cached
from common.task import Messages, TaskFeatures, class_name, plain

PAD, EOS = 256, 257  # ids of the byte tokenizer; ids below are the bytes themselves
END = b"\xff"  # which UTF-8 never has
# Tiny models that take minutes to make, in float16.
ASSETS = Path(__file__).parents[1] / "assets"
TINY_FORMAT = 1  # part of the cache key: raise it when building or training changes
POOL_BATCHES = 16  # batches that are sorted by length together
WARMUP = 0.05  # share of the pre-training steps
PRETRAIN_TOKENS = 3e6  # the budget if model.tiny.pretrain_steps is null
LEAST_STEPS, MEASURED = 200, 500  # the fewest steps; rows whose length determines the steps
EVERY = 10.0  # seconds between two lines about pre-training


# --- the byte tokenizer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 258 ids: the 256 bytes, id = byte value, then <pad> and <eos>.

    Lossless for every string that UTF-8 can hold; the text "<eos>" is five bytes, so a prompt
    cannot smuggle in an end. Decoding never raises: bytes that are not UTF-8 become U+FFFD.
    """
    # ByteLevel writes each byte as one printable character: printable Latin-1 as itself, the rest
    # from U+0100 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken("<pad>", special=True), AddedToken("<eos>", special=True)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )


# --- the tiny model


def tiny_model(config: TinyConfig, task: Any, *, progress: bool = True) -> Path:
    """Return the folder of the tiny model for a task. It is built and pre-trained on the CPU unless
    it is cached.

    Some tiny models come with the project (common/assets); others are kept in the cache
    folder.
    Raises: ConfigError if the task has no pre-training rows, a row is longer than `context`, or the
    cache cannot be written.
    """
    if config.pretrain_steps is None:
        config = replace(config, pretrain_steps=_fitting_steps(config, task))
    rows = _pretraining_rows(config, task)
    digest = hashlib.sha256(json.dumps([TINY_FORMAT, asdict(config)], sort_keys=True).encode())
    for prompt, completion in rows:
        for part in (prompt, completion):
            digest.update(len(part).to_bytes(8, "little") + part)
    name = f"tiny-{digest.hexdigest()[:16]}"
    if (ASSETS / name / "model.safetensors").exists():
        return ASSETS / name

    def build(folder: Path) -> dict[str, Any]:
        model = train_from_scratch(config, rows, progress)
        # Each node without a shared cache builds its own, and transformers would save on rank 0
        # alone.
        model.should_save_on_this_rank = lambda is_main_process: True
        with progress_bars(False):
            model.save_pretrained(folder)
            byte_tokenizer().save_pretrained(folder)
        return {"task": class_name(task), "tiny": asdict(config)}

    return cached(name, "model=tiny", build, lambda text: say(progress, text))


def _fitting_steps(config: TinyConfig, task: Any) -> int:
    """Return the number of steps that cover PRETRAIN_TOKENS, estimated from the length of the first
    rows.
    """
    some = replace(config, pretrain_steps=1, pretrain_rows=MEASURED)
    rows = _pretraining_rows(some, task)
    tokens = sum(len(prompt) + len(completion) + 1 for prompt, completion in rows) / len(rows)
    return max(LEAST_STEPS, round(PRETRAIN_TOKENS / (tokens * config.pretrain_rows)))


def _pretraining_rows(config: TinyConfig, task: Any) -> list[tuple[bytes, bytes]]:
    """Return the rows of all steps in training order before sorting: prompt and completion in
    UTF-8, without <eos> at the end.
    """
    assert config.pretrain_steps is not None
    count = config.pretrain_steps * config.pretrain_rows
    if count == 0:
        return []
    name = class_name(task)
    way_out = (
        "Use a trained model (model=hf model.path=...), or random weights"
        " (model.tiny.pretrain_steps=0)."
    )
    if TaskFeatures(task).pretraining is None:
        raise ConfigError(
            f"model=tiny is pre-trained by the task, and {name} has no pretraining method."
            f" {way_out}"
        )
    draw = random.Random(config.pretrain_seed)
    examples = list(task.examples("train"))
    if not examples:
        raise ConfigError(
            f"model=tiny is pre-trained by the task, and {name} has no training examples. {way_out}"
        )
    rows: list[tuple[bytes, bytes]] = []
    while len(rows) < count:
        draw.shuffle(examples)
        for example in examples[: count - len(rows)]:
            prompt, completion = task.pretraining(example, draw)
            rows.append((_encode(prompt), _encode(completion).removesuffix(END + b"\n\n")))
    longest = max(len(prompt) + len(completion) for prompt, completion in rows) + 1
    if longest > config.context:
        raise ConfigError(
            f"model.tiny.context={config.context} is too small: a pre-training row of {name} has"
            f" {longest} tokens (bytes). Set model.tiny.context={longest} or more."
        )
    return rows


def _encode(text: str | Messages) -> bytes:
    """Return a text in UTF-8, with END after each of the model's own turns, in place of <eos>."""
    if isinstance(text, str):
        return text.encode()
    parts = []
    for message in text:
        content = message["content"]
        end = END if message["role"] == "assistant" else b""
        parts.append(content.encode() + end + plain([message]).removeprefix(content).encode())
    return b"".join(parts)


def untrained(config: TinyConfig) -> LlamaForCausalLM:
    """Return the tiny model with random weights. Raises: ConfigError for heads of an odd size."""
    if config.hidden_size // config.heads % 2:
        raise ConfigError(
            f"model.tiny.hidden_size={config.hidden_size} gives each of model.tiny.heads="
            f"{config.heads} an odd number of values, and positions rotate pairs of them. Give a"
            f" multiple of {2 * config.heads}."
        )
    architecture = LlamaConfig(
        vocab_size=EOS + 1,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return LlamaForCausalLM(architecture)


def train_from_scratch(
    config: TinyConfig, rows: list[tuple[bytes, bytes]], progress: bool
) -> LlamaForCausalLM:
    """Train a float32 Llama from `pretrain_seed` on `rows`, on all cores. Leaves torch's global
    generator unchanged.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.pretrain_seed)
        model = untrained(config)
    if not rows:
        return model
    steps = config.pretrain_steps
    assert steps is not None
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.pretrain_lr, betas=(0.9, 0.95), weight_decay=0.01
    )
    warmup = max(1, round(WARMUP * steps))
    parameters = sum(weight.numel() for weight in model.parameters())
    say(
        progress,
        f"model=tiny: teaching a new model of {parameters / 1e6:.2f}M parameters the task's form,"
        f" {steps} steps of {config.pretrain_rows} rows. This is done once and kept in"
        f" {cache_folder()}.",
    )
    start = reported = time.monotonic()
    threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(count_cores())  # other ranks wait for this one
    for step, (tokens, targets) in enumerate(_batches(config, rows), start=1):
        rate = min(step / warmup, 0.5 * (1 + math.cos(math.pi * (step - 1) / steps)))
        for group in optimizer.param_groups:
            group["lr"] = config.pretrain_lr * rate
        # No attention mask: padding is on the right, where causal attention never looks from a
        # real token.
        logits = model(input_ids=tokens, use_cache=False).logits  # [B, T, 258]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        now = time.monotonic()
        # the first line soon, so that one knows how long it takes
        if now - reported > (EVERY if reported > start else EVERY / 5) or step == steps:
            left = (now - start) / step * (steps - step)
            say(
                progress,
                f"  step {step} of {steps}, loss {loss.item():.3f}, {now - start:.0f} s"
                + (f", about {left:.0f} s left" if step < steps else ""),
            )
            reported = now
    torch.set_num_threads(threads)
    return model.eval()


def _batches(
    config: TinyConfig, rows: list[tuple[bytes, bytes]]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield per step token ids and next-token targets, int64 [B, T] each; targets are -100
    elsewhere.

    Targets are only the completion and <eos>. A prompt is never sampled, so predicting it would
    waste capacity: greedy answers to 200 unseen numbers (0-999 into Spanish or German) were right
    92.5% of the time, against 89.5% with the prompt's tokens in the loss (default sizes, one seed
    each, CPU). Batches have rows of similar length: a pool of batches is sorted by length and cut,
    and the batches are shuffled.
    """
    draw = random.Random(config.pretrain_seed)
    size = config.pretrain_rows
    for start in range(0, len(rows), POOL_BATCHES * size):
        pool = sorted(
            rows[start : start + POOL_BATCHES * size], key=lambda row: len(row[0]) + len(row[1])
        )
        batches = [pool[i : i + size] for i in range(0, len(pool), size)]
        draw.shuffle(batches)
        for batch in batches:
            width = len(batch[-1][0]) + len(batch[-1][1])
            tokens = torch.full((size, width + 1), PAD)
            targets = torch.full((size, width + 1), -100)
            for index, (prompt, completion) in enumerate(batch):
                ids = torch.tensor([*prompt, *completion, EOS])
                ids[ids == END[0]] = EOS
                tokens[index, : len(ids)] = ids
                targets[index, len(prompt) : len(ids)] = ids[len(prompt) :]
            yield tokens[:, :-1], targets[:, 1:]


def say(shown: bool, text: str) -> None:
    """Print a line to stderr if `shown`."""
    if shown:
        print(text, file=sys.stderr, flush=True)
