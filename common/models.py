"""Language models: load one from a folder or the hub, build and pre-train the tiny one, export.

Every mistake that a user can make with `model.*` is a ConfigError that names the key, the value and the next step. Code
that comes with a model is never run (`trust_remote_code=False`).

The tiny model is a byte-level Llama of under a million parameters that is pre-trained on the task's own stream, once: it
is cached by a hash of its settings and of the very rows that it was trained on. It makes every algorithm runnable in
minutes, on any machine, without a download.
"""

import copy
import hashlib
import importlib.util
import json
import logging
import math
import random
import re
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateError
from safetensors import SafetensorError
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch.nn import functional as F
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from common import sharding
from common.checkpoint import cached, replacing
from common.config import ConfigError, ModelConfig, TinyConfig
from common.tasks import Messages, plain

log = logging.getLogger("clutch")

PAD, EOS = 256, 257  # ids of the byte tokenizer; ids below are the bytes themselves
# Tiny models that take minutes to make, in float16.
ASSETS = Path(__file__).parent / "assets"
ADAPTER = "adapter_config.json"  # what tells the folder of a peft adapter
TINY_FORMAT = 1  # part of the cache key: raise it when building or training changes
POOL_BATCHES = 16  # batches that are sorted by length together
WARMUP = 0.05  # share of the pre-training steps
# torch.compile's modes without CUDA graphs.
WITHOUT_GRAPHS = {
    "default": "default",
    "reduce-overhead": "default",
    "max-autotune": "max-autotune-no-cudagraphs",
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def load(
    config: ModelConfig, task: Any, dtype: torch.dtype, device: torch.device, *, progress: bool = True
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model that `config` names, in eval mode on `device`, and its tokenizer, which has a pad token.

    Args: task: pre-trains the tiny model, otherwise unused; dtype: of the weights; progress: report on stderr.
    Raises: ConfigError for all that a user can correct: no such folder or hub id, no causal language model in it, no
    tokenizer, a tokenizer with more ids than the model has embeddings, a missing package.
    """
    if config.path is None:
        assert config.tiny is not None  # ModelConfig checks it
        path, where = str(tiny(config.tiny, task, progress=progress)), "model=tiny"
    else:
        path, where = _source(config), f"model.path={config.path!r}"
    origin: dict[str, Any] = {"revision": config.revision, "trust_remote_code": False}
    with _bars(progress and config.path is not None and sys.stderr.isatty()):
        model = _model(config, path, where, origin, dtype)
        tokenizer = _tokenizer(config, path, where, origin)
    if config.lora is not None:
        model = _with_adapter(model, config.lora, where)
    if progress and (found := commit(config)):
        log.info("%s is at commit %s (model.revision=COMMIT pins it)", where, found)
    rows = model.get_input_embeddings().weight.shape[0]  # pyright: ignore[reportIndexIssue]
    largest = max(tokenizer.get_vocab().values())
    if largest >= rows:
        raise ConfigError(
            f"{where}: its tokenizer has ids up to {largest}, its embedding has {rows} rows. "
            "The two do not belong together; put the tokenizer files that the model was trained with into the folder."
        )
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise ConfigError(
                f"{where}: its tokenizer has neither a pad token nor an eos token. "
                'Set "pad_token" in its tokenizer_config.json to a token that it has.'
            )
        tokenizer.pad_token = tokenizer.eos_token  # padding is masked everywhere, so which token it is has no effect
    # `to` is typed by a decorator that loses its first argument.
    model.to(device)  # pyright: ignore[reportArgumentType]
    return model.eval(), tokenizer


def commit(config: ModelConfig) -> str | None:
    """The commit that a model of the hub has been loaded from, as the hub's cache knows it; None for a local one."""
    if config.path is None or Path(config.path).expanduser().exists():
        return None
    found = try_to_load_from_cache(config.path, config.gguf_file or "config.json", revision=config.revision)
    if not isinstance(found, str):
        return None
    parts = Path(found).parts
    return parts[len(parts) - parts[::-1].index("snapshots")]  # .../snapshots/COMMIT/config.json


def context_length(model: PreTrainedModel) -> int:
    """The longest sequence, prompt and completion together in tokens, that the sampler computes exactly.

    That is the number of positions, and at most the attention window if any layer has one (Mistral, Gemma, Qwen2 with
    use_sliding_window, GPT-Neo): the sampler's mask is plain causal, which equals the model's own inside the window only.
    Raises: ConfigError if the model's config.json names no number of positions.
    """
    config = model.config.get_text_config()
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    bounds = [value for name in names if isinstance(value := getattr(config, name, None), int)][:1]
    if not bounds:
        raise ConfigError(
            f"model.path={model.name_or_path!r}: its config.json ({config.model_type}) names no context length. "
            'Add "max_position_embeddings" to a local copy: the longest sequence in tokens that it was trained on.'
        )
    layers = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if window and ("sliding_attention" in layers if layers else getattr(config, "use_sliding_window", True)):
        bounds.append(window)
    if layers and "chunked_attention" in layers:
        bounds.append(config.attention_chunk_size)
    if "local" in (getattr(config, "attention_layers", None) or []):  # GPT-Neo
        bounds.append(config.window_size)
    return min(bounds)


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids that end a completion: the eos ids of the generation config and of the tokenizer, sorted. May be empty."""
    ids: list[Any] = [tokenizer.eos_token_id]
    if model.generation_config is not None:
        of_model: Any = model.generation_config.eos_token_id
        ids += of_model if isinstance(of_model, list) else [of_model]
    return sorted({token for token in ids if token is not None})


def encode_prompts(tokenizer: PreTrainedTokenizerBase, given: Sequence[str | Messages]) -> list[list[int]]:
    """Token ids of each prompt: what the tokenizer puts in front (<s>) and the text, but nothing that it appends.

    An appended eos would tell the model that the text is over; a prompt is to be continued. A conversation goes through
    the tokenizer's chat template, up to where the answer begins; without a template it is plain lines.
    Raises: ValueError naming the prompt that encodes to nothing; ConfigError for a conversation that the template
    refuses.
    """
    if tokenizer.chat_template is not None and any(not isinstance(prompt, str) for prompt in given):
        return [
            encode_prompts(tokenizer, [prompt])[0] if isinstance(prompt, str) else _conversation(tokenizer, prompt)
            for prompt in given
        ]
    texts = [plain(prompt) for prompt in given]
    # What is in front is found with a probe, not by stripping ids at the end: in some vocabularies bos and eos are one.
    probe = tokenizer("a", add_special_tokens=False)["input_ids"]
    framed = tokenizer("a")["input_ids"]
    start = next(i for i in range(len(framed)) if framed[i : i + len(probe)] == probe)
    front = framed[:start]
    prompts = []
    if texts:  # transformers fails on an empty batch
        bare = tokenizer(texts, add_special_tokens=False, padding=False, truncation=False, verbose=False)["input_ids"]
        prompts = [front + list(ids) for ids in bare]
    for index, ids in enumerate(prompts):
        if not ids:
            raise ValueError(
                f"prompt {index} is {texts[index]!r}, which is no token at all, and this tokenizer puts none in front. "
                "A model needs at least one token to continue; give the task's prompt a text."
            )
    return prompts


def _conversation(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> list[int]:
    try:
        made: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    except (
        TemplateError,
        ValueError,
        TypeError,
        KeyError,
    ) as error:  # many refuse a system text, or two users in a row
        roles = ", ".join(message["role"] for message in messages)
        raise ConfigError(
            f"the chat template of {tokenizer.name_or_path!r} refuses a prompt of the roles {roles}: "
            f"{_first_line(error)} Leave out the system text (task.system='' in task=units), or give plain prompts (task.chat=false)."
        ) from None
    return list(made["input_ids"])


def narrowed(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """`model` itself for float32 or where it is sharded, else a copy with its parameters in `dtype`, to sample from.

    Under autocast the weights would be cast anew for every token. Buffers stay: rotary frequencies in bf16 are off by 0.4 %.
    """
    if dtype == torch.float32 or sharding.of(model):
        return model
    copied = copy.deepcopy(model).requires_grad_(False)
    for parameter in copied.parameters():
        parameter.data = parameter.data.to(dtype)
    return copied


def compiled(part: Any, mode: str) -> Any:
    """A model, or its inside, compiled for inputs of any shape. CUDA graphs would be recorded for each shape: none here."""
    return torch.compile(part, mode=WITHOUT_GRAPHS[mode], dynamic=True)


class Narrow:
    """A twin of a float32 model whose linear layers are in `dtype`, to sample from under autocast, which casts no more then.

    All else is shared, so that results are those of autocast to the bit (a tied head is the twin's own). 2 bytes a parameter.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        layers = [module for module in model.modules() if type(module) in (torch.nn.Linear, Conv1D)]
        shared = [*model.parameters(), *model.buffers()]
        self.twin = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
        twins = [module for module in self.twin.modules() if type(module) in (torch.nn.Linear, Conv1D)]
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []  # of the model, of the twin
        for layer, twin in zip(layers, twins, strict=True):
            for name, parameter in layer.named_parameters(recurse=False):
                own = torch.nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
                setattr(twin, name, own)
                self.pairs.append((parameter, own))

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the model's weights as they are now."""
        for parameter, own in self.pairs:
            own.copy_(parameter)


def export(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write a Hugging Face folder in the model's dtype that `from_pretrained` loads; whole or not at all.

    An earlier export at `folder` is replaced. Args: weights: of a sharded model, gathered. Raises: ConfigError if `folder` holds something else; CheckpointError with
    path and reason on I/O errors.
    """
    if folder.exists() and not (folder / "config.json").is_file() and (folder.is_file() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not a model folder. Give a new folder, or remove this one.")
    with replacing(folder) as temporary, _savable(model), _bars(False):
        model.save_pretrained(temporary, state_dict=weights)
        tokenizer.save_pretrained(temporary)


# --- the byte tokenizer ----------------------------------------------------------------------------------------------


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 258 ids: the 256 bytes, id = byte value, then <pad> and <eos>.

    Lossless for every string that UTF-8 can hold; the text "<eos>" is five bytes, so a prompt cannot smuggle in an
    end. Decoding never raises: bytes that are not UTF-8 become U+FFFD.
    """
    # ByteLevel writes each byte as one printable character: printable Latin-1 as itself, the rest from U+0100 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<pad>", special=True), AddedToken("<eos>", special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )


# --- the tiny model --------------------------------------------------------------------------------------------------


def tiny(config: TinyConfig, task: Any, *, progress: bool = True) -> Path:
    """The folder of the tiny model for this task; built and pre-trained on the CPU if it is not in the cache.

    Some come with the project (scripts/ship_tiny.py), the others are kept as `common.checkpoint.cached` does.
    Raises: ConfigError if the task cannot teach, a row is longer than `context`, or the cache
    cannot be written.
    """
    rows = _pretraining_rows(config, task)
    digest = hashlib.sha256(json.dumps([TINY_FORMAT, asdict(config)], sort_keys=True).encode())
    for prompt, completion in rows:
        for part in (prompt, completion):
            digest.update(len(part).to_bytes(8, "little") + part)
    name = f"tiny-{digest.hexdigest()[:16]}"
    if (ASSETS / name / "model.safetensors").exists():
        return ASSETS / name

    def build(folder: Path) -> dict[str, Any]:
        model = _pretrained(config, rows, progress)
        # Each node without a shared cache builds its own, and transformers would save on rank 0 alone.
        model.should_save_on_this_rank = lambda is_main_process: True
        with _bars(False):
            model.save_pretrained(folder)
            byte_tokenizer().save_pretrained(folder)
        return {"task": type(task).__name__, "tiny": asdict(config)}

    return cached(name, "model=tiny", build, lambda text: _say(progress, text))


def _pretraining_rows(config: TinyConfig, task: Any) -> list[tuple[bytes, bytes]]:
    """The rows of all steps in training order before sorting: prompt and completion in UTF-8, without <eos>."""
    count = config.pretrain_steps * config.pretrain_rows
    if count == 0:
        return []
    name = type(task).__name__
    way_out = "Use a trained model (model=hf model.path=...), or random weights (model.tiny.pretrain_steps=0)."
    if not hasattr(task, "pretraining"):
        raise ConfigError(f"model=tiny is pre-trained by the task, and {name} has no pretraining method. {way_out}")
    draw = random.Random(config.pretrain_seed)
    examples = list(task.examples("train"))
    if not examples:
        raise ConfigError(f"model=tiny is pre-trained by the task, and {name} has no training examples. {way_out}")
    rows: list[tuple[bytes, bytes]] = []
    while len(rows) < count:
        draw.shuffle(examples)
        for example in examples[: count - len(rows)]:
            prompt, completion = task.pretraining(example, draw)
            rows.append((prompt.encode(), completion.encode()))
    longest = max(len(prompt) + len(completion) for prompt, completion in rows) + 1
    if longest > config.context:
        raise ConfigError(
            f"model.tiny.context={config.context} is too small: a pre-training row of {name} has {longest} tokens "
            f"(bytes). Set model.tiny.context={longest} or more."
        )
    return rows


def _pretrained(config: TinyConfig, rows: list[tuple[bytes, bytes]], progress: bool) -> LlamaForCausalLM:
    """A float32 Llama from `pretrain_seed`, trained on `rows`. Leaves torch's global generator as it was."""
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
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.pretrain_seed)
        model = LlamaForCausalLM(architecture)
    if not rows:
        return model
    start = time.monotonic()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.pretrain_lr, betas=(0.9, 0.95), weight_decay=0.01)
    warmup = max(1, round(WARMUP * config.pretrain_steps))
    bar = tqdm(
        total=config.pretrain_steps,
        desc="pre-training the tiny model",
        unit="step",
        disable=not (progress and sys.stderr.isatty()),
    )
    lines = progress and not sys.stderr.isatty()
    _say(lines, f"pre-training the tiny model: {config.pretrain_steps} steps, {config.pretrain_rows} rows a step.")
    with bar:
        for step, (tokens, targets) in enumerate(_batches(config, rows)):
            rate = min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * step / config.pretrain_steps)))
            for group in optimizer.param_groups:
                group["lr"] = config.pretrain_lr * rate
            # No attention mask: padding is on the right, where causal attention never looks from a real token.
            logits = model(input_ids=tokens, use_cache=False).logits  # [B, T, 258]
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            bar.update()
            if step % 10 == 0:
                bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
            if (step + 1) % math.ceil(config.pretrain_steps / 4) == 0 or step + 1 == config.pretrain_steps:
                _say(lines, f"  step {step + 1}, loss {loss.item():.3f}, {time.monotonic() - start:.0f} s")
    return model.eval()


def _batches(config: TinyConfig, rows: list[tuple[bytes, bytes]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids and next-token targets, int64 [B, T] each, a step; targets are -100 elsewhere.

    Targets are the completion and <eos> only. A prompt is never sampled, so learning to predict it spends capacity for
    nothing: greedy answers to 200 unseen numbers (0-999 into Spanish or German) were right 92.5% of the time, against
    89.5% with the prompt's tokens in the loss (default sizes, one seed each, CPU).
    Rows of similar length go together: a pool of batches is sorted by length and cut, and the batches are shuffled.
    """
    draw = random.Random(config.pretrain_seed)
    size = config.pretrain_rows
    for start in range(0, len(rows), POOL_BATCHES * size):
        pool = sorted(rows[start : start + POOL_BATCHES * size], key=lambda row: len(row[0]) + len(row[1]))
        batches = [pool[i : i + size] for i in range(0, len(pool), size)]
        draw.shuffle(batches)
        for batch in batches:
            width = len(batch[-1][0]) + len(batch[-1][1])
            tokens = torch.full((size, width + 1), PAD)
            targets = torch.full((size, width + 1), -100)
            for index, (prompt, completion) in enumerate(batch):
                ids = torch.tensor([*prompt, *completion, EOS])
                tokens[index, : len(ids)] = ids
                targets[index, len(prompt) : len(ids)] = ids[len(prompt) :]
            yield tokens[:, :-1], targets[:, 1:]


# --- inside ----------------------------------------------------------------------------------------------------------


def _source(config: ModelConfig) -> str:
    """`model.path` as transformers takes it: a local folder with ~ expanded, or a hub id. Raises ConfigError."""
    assert config.path is not None
    given = f"model.path={config.path!r}"
    local = Path(config.path).expanduser()
    wanted = config.gguf_file or "config.json"
    if local.is_file():
        raise ConfigError(
            f"{given} is a file. Give the folder that holds it, with a config.json"
            + (
                f"; for a GGUF file: model=gguf model.path={local.parent} model.gguf_file={local.name}."
                if local.suffix == ".gguf"
                else "."
            )
        )
    if local.is_dir():
        if not (local / wanted).is_file() and (local / ADAPTER).is_file():
            raise ConfigError(
                f"{given} is an adapter and no model. Give the model that it belongs to, and the adapter on top: "
                f"model=hf model.path=FOLDER_OR_HUB_ID model.lora={config.path}."
            )
        if not (local / wanted).is_file():
            inside = ", ".join(sorted(entry.name for entry in local.iterdir())[:8]) or "nothing"
            key = "model.gguf_file" if config.gguf_file else given
            raise ConfigError(
                f"{given} is not a model folder: it has no {wanted} (it has: {inside}). "
                + (f"Correct {key}." if config.gguf_file else "Give a folder written by save_pretrained.")
            )
        if config.revision is not None:
            raise ConfigError(
                f"model.revision={config.revision!r} has no effect: {given} is a local folder. Remove it."
            )
        return str(local)
    if not _HUB_ID.fullmatch(config.path):
        raise ConfigError(
            f"{given}: there is no such folder. Correct the path (relative ones start at {Path.cwd()}), "
            "or give a hub id such as HuggingFaceTB/SmolLM2-135M."
        )
    return config.path


def _model(config: ModelConfig, path: str, where: str, origin: dict[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    """The model on the CPU, every weight of it from the files. Raises ConfigError."""
    options: dict[str, Any] = {}
    if config.gguf_file:
        missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"model.gguf_file={config.gguf_file!r} needs the Python package {' and '.join(missing)}. "
                "Install: pip install 'clutch[gguf]'."
            )
        options = {"gguf_file": config.gguf_file, "quantization_config": GgufConfig(dequantize=True)}
    try:
        if not config.gguf_file:
            _check_causal(AutoConfig.from_pretrained(path, **origin), where)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=config.attention, output_loading_info=True, **origin, **options
        )
        model, info = loaded
    except ConfigError:
        raise
    except (
        *(OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError),
        *(SafetensorError, StrictDataclassError),
    ) as error:
        # What a wrong config.json is told is in the cause: "Validation error for field 'hidden_size':" says little.
        reason = (error.__cause__ if isinstance(error, StrictDataclassError) else None) or error
        raise ConfigError(f"{where} could not be loaded: {_first_line(reason)} {_advice(path, error)}") from error
    if info["missing_keys"] or info["mismatched_keys"]:
        names = sorted(str(name) for name in [*info["missing_keys"], *info["mismatched_keys"]])
        raise ConfigError(
            f"{where} is not a whole causal language model: {len(names)} weights are not in its files "
            f"(the first: {names[0]}). Give the folder of a model saved with its language-model head."
        )
    if config.gguf_file and hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are plain now, and an export must say so
    return model


def _with_adapter(model: PreTrainedModel, given: str, where: str) -> PreTrainedModel:
    """`model` with the LoRA adapter of a folder merged into its weights. Raises ConfigError."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(f"model.lora={given!r} needs a package: pip install 'clutch[lora]'.")
    folder, key = Path(given).expanduser(), f"model.lora={given!r}"
    settings = folder / ADAPTER
    if not settings.is_file():
        raise ConfigError(
            f"{key} is no folder with a LoRA adapter: there is no {settings.absolute()}. Give the folder that peft's "
            "save_pretrained wrote, or RUN/iteration-K/adapter of algo=rft; one on the hub comes with: hf download ID --local-dir FOLDER."
        )
    kind = json.loads(settings.read_text(encoding="utf-8")).get("peft_type")
    if kind != "LORA":
        raise ConfigError(f"{key} holds an adapter of the kind {kind}, which is not merged here. Give a LoRA adapter.")
    import peft

    try:
        with peft_of_today():
            warnings.filterwarnings("error", "Found missing adapter keys", UserWarning)
            return peft.PeftModel.from_pretrained(model, folder).merge_and_unload(safe_merge=True)  # pyright: ignore
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError, UserWarning) as error:
        raise ConfigError(
            f"{key} does not go into {where}: {_first_line(error)} It must be an adapter of this very model, whole."
        ) from error


@contextmanager
def peft_of_today() -> Iterator[None]:
    """Meanwhile peft 0.21 may look at a property that transformers 5.23 has renamed, without a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield


def _check_causal(config: Any, where: str) -> None:
    """Raise ConfigError for encoders and encoder-decoders; transformers would load some of them without a word."""
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    architectures = config.architectures or []
    causal = not architectures or any(
        name in known or name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures
    )
    # BERT and its kin can be decoders, and say so; GPT-NeoX has the same field and is always one.
    encoder = getattr(config, "is_decoder", True) is False and not config.model_type.startswith("gpt_neox")
    if not causal or encoder or config.is_encoder_decoder:
        kind = ", ".join(architectures) or config.model_type
        raise ConfigError(
            f"{where} is not a causal language model: its config.json says {kind}. Give a model that predicts the "
            "next token, such as gpt2, a Llama or a Qwen (architectures: ...ForCausalLM)."
        )


def _tokenizer(config: ModelConfig, path: str, where: str, origin: dict[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer beside the weights, or the one inside the GGUF file. Raises ConfigError if there is none."""
    options = {}
    if config.gguf_file and not (Path(path) / "tokenizer.json").is_file():
        options = {"gguf_file": config.gguf_file}
    try:
        # AutoTokenizer goes by the model's type first: below a Qwen2 config it turns any tokenizer.json into Qwen2's own,
        # with other normalisation and one more id. Where the folder says that the file is all there is, it is.
        declared = get_tokenizer_config(path, revision=config.revision).get("tokenizer_class")
        if declared in ("TokenizersBackend", "PreTrainedTokenizerFast") and not options:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(path, revision=config.revision or "main")
        else:
            tokenizer = AutoTokenizer.from_pretrained(path, **origin, **options)
        # Without files transformers may build an empty vocabulary, which encodes every text to nothing.
        reason = "" if tokenizer("a", add_special_tokens=False)["input_ids"] else "its vocabulary is empty."
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError) as error:
        reason = _first_line(error)
    if reason:
        raise ConfigError(
            f"{where} has no tokenizer that can be loaded: {reason} Put its tokenizer files (tokenizer.json and "
            "tokenizer_config.json) into the folder."
        )
    return tokenizer


def _advice(path: str, error: Exception) -> str:
    text = str(error)
    if "trust_remote_code" in text or "contains custom code" in text:
        return "Code that comes with a model is never run here. Choose a model that transformers knows by itself."
    if "attn_implementation" in text or "scaled_dot_product_attention" in text:
        return "Try model.attention=eager."
    if Path(path).is_dir():
        return "Check that the folder is complete and written by save_pretrained."
    return "Check the spelling and the network, log in for a gated model (hf auth login), or give a local folder."


@contextmanager
def _savable(model: PreTrainedModel) -> Iterator[None]:
    """Some published generation configs set a temperature without do_sample, which transformers loads but refuses to save.

    Meanwhile the model has a copy that says do_sample=True, as transformers itself advises.
    """
    generation = model.generation_config
    if generation is not None:
        try:
            generation.validate(strict=True)
        except ValueError:
            model.generation_config = copy.deepcopy(generation)
            model.generation_config.do_sample = True
    try:
        yield
    finally:
        model.generation_config = generation


@contextmanager
def _bars(shown: bool) -> Iterator[None]:
    """Switch the progress bars of transformers off for a while unless `shown`."""
    before = transformers_logging.is_progress_bar_enabled()
    if before and not shown:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if before and not shown:
            transformers_logging.enable_progress_bar()


def _say(shown: bool, text: str) -> None:
    if shown:
        print(text, file=sys.stderr, flush=True)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".:") + "."
