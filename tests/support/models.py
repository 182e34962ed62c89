"""Small random models of real architectures, what they are asked, and what a run makes of them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

from common.config import SamplingConfig

SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, max_position_embeddings=128)
KINDS = {
    "llama": SIZES | {"tie_word_embeddings": False},
    "qwen2": SIZES | {"tie_word_embeddings": True},
    "qwen3": SIZES | {"tie_word_embeddings": True, "head_dim": 8},
    "gpt2": dict(n_embd=32, n_layer=2, n_head=4, n_positions=128),
}
ARCHITECTURES = tuple(KINDS)
# For tests of what does not know an architecture: one in make quick, another that has little in
# common with it in make test, and the others in make test-all.
EACH = (
    "llama",
    pytest.param("gpt2", marks=pytest.mark.run),
    *(pytest.param(name, marks=pytest.mark.thorough) for name in ("qwen2", "qwen3")),
)
# hidden size, intermediate size, layers, heads, key heads, vocabulary, tied head: of Qwen2.5
QWEN = {
    "0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "3b": (2048, 11008, 36, 16, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
}


def configure_qwen(shape: str) -> Qwen2Config:
    """Return the configuration of a Qwen2.5 of that many parameters."""
    hidden, wide, layers, heads, key_heads, vocabulary, tied = QWEN[shape]
    return Qwen2Config(
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        architectures=["Qwen2ForCausalLM"],
    )


def small_model(name: str, vocabulary: int = 97) -> torch.nn.Module:
    """A random model of a real architecture, float32, in eval mode; the same at every call."""
    ids = dict(vocab_size=vocabulary, bos_token_id=0, eos_token_id=1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **KINDS[name], **ids))
        # Random biases and norms too: fresh ones are 0 and 1, which hides mistakes.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def sampling(temperature=0.0, new=20, top_p=1.0, top_k=0, min_p=0.0):
    return SamplingConfig(
        max_new_tokens=new, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p
    )


def prompts(lengths=(3, 9, 5, 12, 7), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 90, (n,), generator=generator).tolist() for n in lengths]


def prompts_that_open_alike(lengths=(3, 9, 5, 1), opening=40, seed=0):
    """Prompts with the same instructions before tokens of their own, so many of each."""
    generator = torch.Generator().manual_seed(seed)
    start, *rest = (
        torch.randint(2, 90, (n,), generator=generator).tolist() for n in (opening, *lengths)
    )
    return [[*start, 90 + place, *own[1:]] for place, own in enumerate(rest)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def same_weights(one: Path, other: Path) -> bool:
    a, b = weights(one), weights(other)
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def check_greedy(model, made):
    """Assert that the completions of `prompts()` are those of `generate`, ended by 11 or 12 or
    after 20 tokens, and filled with 96.
    """
    for index, prompt in enumerate(prompts()):
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=[11, 12],
            pad_token_id=96,
        )[0, len(prompt) :].tolist()
        length = int(made.lengths[index])
        assert made.tokens[index, :length].tolist() == expected
        assert bool(made.finished[index]) == (expected[-1] in (11, 12))
        assert (made.tokens[index, length:] == 96).all()
