"""Models of random weights, the same at every call, without stop tokens; and a check that two ways
to sample them did the same work.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, LlamaConfig, Qwen2Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from common.device import blocks_of
from common.memory import cache_bytes
from common.model import byte_tokenizer


def _llama(hidden: int, layers: int, heads: int, wide: int, **more: Any) -> Any:
    settings: dict[str, Any] = {"vocab_size": 260, "max_position_embeddings": 512} | more
    return LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=wide,
        **settings,
    )


def _qwen(hidden: int, layers: int, heads: tuple[int, int], wide: int) -> Any:
    return Qwen2Config(
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        vocab_size=151936,
        tie_word_embeddings=True,
        max_position_embeddings=32768,
    )


CONFIGS: dict[str, Any] = {
    "quick": _llama(32, 2, 2, 64),
    "tiny": _llama(128, 4, 4, 384),  # conf/model/tiny.yaml
    "small": _llama(256, 6, 8, 768),
    "gpt2": GPT2Config(),
    "gpt2-quick": GPT2Config(n_embd=64, n_layer=2, n_head=2),
    "smollm2": _llama(
        *(576, 30, 9, 1536),
        vocab_size=49152,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "0.5b": _qwen(896, 24, (14, 2), 4864),  # qwen2.5_0.5b
    "1.5b": _qwen(1536, 28, (12, 2), 8960),
    "8b": _llama(  # llama3.1_8b
        *(4096, 32, 32, 14336),
        vocab_size=128256,
        num_key_value_heads=8,
        max_position_embeddings=131072,
    ),
}


def build(name: str, **changes: Any) -> Any:
    """Return the model of CONFIGS in the default dtype and on the default device, frozen."""
    settings = CONFIGS[name].to_dict() | {"bos_token_id": None, "eos_token_id": None} | changes
    config = type(CONFIGS[name]).from_dict({"pad_token_id": 0} | settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).requires_grad_(False).eval()


class Counts:
    """The operations and bytes of a model.

    Attributes:
        read: the bytes of the weights that a forward reads.
    """

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self.config: Any = model.config
        layers = [p for block in blocks_of(model) for p in block.parameters() if p.ndim == 2]
        self.matrices = sum(p.numel() for p in layers)
        self.head = model.get_output_embeddings().weight.numel()
        self.read = dtype.itemsize * (self.matrices + self.head)
        self.cached = cache_bytes(self.config, dtype.itemsize)  # per token

    def flops(self, tokens: float, pairs: float, heads: float) -> float:
        """Return the operations of a forward.

        Args: tokens: those that pass the layers; pairs: of queries and keys; heads: the tokens
        whose distribution is computed.
        """
        attention = 4 * self.config.num_hidden_layers * self.config.hidden_size * pairs
        return 2 * self.matrices * tokens + attention + 2 * self.head * heads


def count_pairs(tokens: int) -> float:
    """Return the pairs of queries and keys of a causal sequence."""
    return tokens * (tokens + 1) / 2


def save(model: Any, folder: str) -> int:
    """Write a model, and a byte tokenizer without a stop token. Returns the number of
    parameters.
    """
    disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


@torch.inference_mode()
def generate(model: Any, prompts: Tensor, **settings: Any) -> Tensor:
    """Return the new tokens of transformers' own generation, greedy unless `settings` say
    otherwise.
    """
    prompts = prompts.to(model.device)
    settings = {"attention_mask": torch.ones_like(prompts), "do_sample": False} | settings
    return model.generate(prompts, pad_token_id=0, **settings)[:, prompts.shape[1] :]


@torch.no_grad()
def differs(model: Any, prompt: Tensor, row: Tensor, other: Tensor, tie: float) -> str | None:
    """Return the place where two greedy completions differ, unless the logits there differ by at
    most `tie`.
    """
    if torch.equal(row, other):
        return None
    first = int((row != other).nonzero()[0])
    text = torch.cat((prompt.to(row), row[:first]))[None]
    logits = model(input_ids=text).logits[0, -1].float()
    if (logits[row[first]] - logits[other[first]]).abs() <= tie:
        return None
    return f"differ at token {first}: {row[first].item()} and {other[first].item()}"
