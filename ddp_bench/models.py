"""Transformer encoders that classify: pre-norm ("On Layer Normalization in the Transformer
Architecture", arXiv:2002.04745), learnt positions, mean pooling over real tokens.

    from ddp_bench.models import load
    classifier = load("outputs/mine/model")
    classifier.predict(["Stocks fell on Monday"])  # [("Business", 0.97)]
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recomputed

from common.config import ConfigError
from common.device import device_of
from common.distributed import sharding_of
from common.system import replacing
from ddp_bench.config import EncoderConfig
from ddp_bench.data import Ragged, Rows, encode, trajectories
from ddp_bench.tasks import Labelled


class Layer(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual connection."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        size, wide = config.size, config.feedforward
        self.norm_attention, self.norm_feedforward = nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.up, self.down = nn.Linear(size, wide), nn.Linear(wide, size)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return the new hidden states.

        Args: states: [B, T, size]; mask: bool [B, T], True on real tokens.
        """
        qkv = self.qkv(self.norm_attention(states)).unflatten(2, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [B, heads, T, size / heads] each
        p = self.dropout if self.training else 0.0
        there = mask[:, None, None, :]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=there, dropout_p=p)
        states = states + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), p)
        inner = F.dropout(F.gelu(self.up(self.norm_feedforward(states))), p)
        return states + F.dropout(self.down(inner), p)


class Encoder(nn.Module):
    """Maps embedded tokens to logits."""

    def __init__(self, config: EncoderConfig, classes: int) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.recompute = False
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm, self.head = nn.LayerNorm(config.size), nn.Linear(config.size, classes)

    def recompute_activations(self) -> None:
        """Recompute the activations of layers in the backward pass (opt=checkpointing)."""
        self.recompute = True

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return logits, float [B, classes].

        Args: states: [B, T, size]; mask: bool [B, T], True on real tokens.
        """
        states = F.dropout(states, self.dropout, self.training)
        for layer in self.layers:
            if self.recompute and self.training:
                states = recomputed(layer, states, mask, use_reentrant=False)  # type: ignore[assignment]
            else:
                states = layer(states, mask)
        there = mask[:, :, None]
        # [B, size]; every row has a token
        return self.head((self.norm(states) * there).sum(1) / there.sum(1))


def activation_bytes(
    config: EncoderConfig, tokens: int, compute: torch.dtype, recomputed: bool
) -> float:
    """Return an estimate of the bytes that a training forward of `tokens` tokens keeps for its
    backward pass, with an attention that stores no scores (tests/runs/test_standin.py counts it).

    Args: compute: the dtype under autocast; recomputed: whether layers are recomputed.
    """
    narrow = compute.itemsize
    # The float32 residual and norms, queries, keys, values and outputs; masks of two dropouts.
    per_number = (32 if narrow == 4 else 20) + 2 * (config.dropout > 0)
    layer = tokens * (per_number * config.size + 2 * narrow * config.feedforward)
    # A layer that is recomputed keeps its input alone; the one that goes backward has gradients.
    within = tokens * config.layers * 4 * config.size + 1.5 * layer
    return within if recomputed else config.layers * layer


class TextClassifier(nn.Module):
    """Maps token ids to logits."""

    def __init__(self, config: EncoderConfig, classes: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, config.size)
        self.positions = nn.Embedding(config.max_tokens, config.size)
        self.encoder = Encoder(config, classes)
        initialise(self)

    def forward(self, ids: Tensor, ids_lengths: Tensor) -> Tensor:
        """Return logits [B, classes].

        Args: ids: int [B, T]; ids_lengths: int64 [B], each at least 1.
        """
        place = torch.arange(ids.shape[1], device=ids.device)
        return self.encoder(self.tokens(ids) + self.positions(place), place < ids_lengths[:, None])


class TrajectoryClassifier(nn.Module):
    """Maps context, states and goal to logits: one token per state, of three types, with
    consecutive positions. Padding between the regions is masked.
    """

    def __init__(self, config: EncoderConfig, classes: int, state_size: int) -> None:
        super().__init__()
        self.types = nn.Embedding(3, config.size)  # context, states, goal
        self.positions = nn.Embedding(config.max_tokens, config.size)
        self.encoder = Encoder(config, classes)
        initialise(self)
        # as torch draws it: 0.02 is too little for so few inputs
        self.features = nn.Linear(state_size, config.size)

    def forward(
        self,
        context: Tensor,
        context_lengths: Tensor,
        states: Tensor,
        states_lengths: Tensor,
        goal: Tensor,
    ) -> Tensor:
        """Return logits [B, classes].

        Args: context: [B, C, S]; states: [B, T, S]; goal: [B, S]; lengths: int64 [B].
        """
        device, sizes = goal.device, [context.shape[1], states.shape[1], 1]
        tokens = self.features(torch.cat([context, states, goal[:, None]], 1))
        counts, kinds = torch.tensor(sizes, device=device), torch.arange(3, device=device)
        types = kinds.repeat_interleave(counts, output_size=sum(sizes))
        in_context, in_states, _ = (torch.arange(size, device=device) for size in sizes)
        starts, ends = context_lengths[:, None], (context_lengths + states_lengths)[:, None]
        # Padding has a position too, which is masked; it must only be one that exists.
        places = torch.cat([in_context.expand(len(goal), -1), starts + in_states, ends], 1)
        places = places.clamp(max=self.positions.num_embeddings - 1)
        there = torch.cat([in_context < starts, in_states < states_lengths[:, None], ends >= 0], 1)
        return self.encoder(tokens + self.types(types) + self.positions(places), there)


def initialise(model: nn.Module) -> None:
    """Initialise weights: normal with standard deviation 0.02, zero biases."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)


def build(
    config: EncoderConfig, classes: int, tokenizer: Tokenizer | None, rows: Rows, seed: int
) -> nn.Module:
    """Return the model for these rows, with weights initialised from `seed`, in
    float32 on the CPU.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if tokenizer is not None:
            return TextClassifier(config, classes, tokenizer.get_vocab_size())
        states = rows.fields["states"]
        assert isinstance(states, Ragged)
        return TrajectoryClassifier(config, classes, states.values.shape[1])


def export(
    model: nn.Module,
    config: EncoderConfig,
    classes: Sequence[str],
    tokenizer: Tokenizer | None,
    folder: Path,
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Write model.safetensors, config.json and, for texts, tokenizer.json. Raises: CheckpointError.

    Args: weights: the gathered weights of a sharded model; None = the model's own.
    """
    with replacing(folder) as temporary:
        named = (weights or model.state_dict()).items()
        on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in named}
        save_file(on_cpu, temporary / "model.safetensors")
        kind = type(model).__name__.removeprefix("FSDP")  # which fully_shard puts in front
        facts: dict[str, Any] = {"kind": kind, "classes": list(classes), "model": asdict(config)}
        if tokenizer is not None:
            tokenizer.save(str(temporary / "tokenizer.json"))
        (temporary / "config.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Classifier:
    """A trained model, ready to use."""

    model: nn.Module
    config: EncoderConfig
    classes: list[str]
    tokenizer: Tokenizer | None

    def predict(self, values: Sequence[Any], batch_rows: int = 256) -> list[tuple[str, float]]:
        """Return the class of each text (or `Trajectory`) and its probability.

        Args: batch_rows: rows of a forward.
        Raises: ConfigError for a trajectory that is too long.
        """
        if not values:
            return []
        labelled = [Labelled(value, 0) for value in values]
        if self.tokenizer is None:
            rows = trajectories(labelled, self.config.max_tokens)
        else:
            ids = encode(self.tokenizer, values, self.config.max_tokens)
            rows = Rows({"ids": ids}, np.zeros(len(values), np.int64))
        best = probabilities_of(self.model, rows, range(len(rows)), batch_rows).max(1)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [(self.classes[i], p) for i, p in pairs]


def load(folder: str | Path, device: str = "cpu") -> Classifier:
    """Load the classifier in RUN/model, in eval mode. Raises: ConfigError if it cannot
    be loaded.
    """
    folder = Path(folder)
    try:
        facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights = load_file(folder / "model.safetensors")
        classes, config = facts["classes"], EncoderConfig(**facts["model"])
        texts = facts["kind"] == "TextClassifier"
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json")) if texts else None
    except Exception as error:  # tokenizers raises the bare class
        raise ConfigError(
            f"{folder} holds no classifier: {type(error).__name__}: {error}. Give RUN/model."
        ) from None
    if texts:
        model: nn.Module = TextClassifier(config, len(classes), weights["tokens.weight"].shape[0])
    else:
        model = TrajectoryClassifier(config, len(classes), weights["features.weight"].shape[1])
    model.load_state_dict(weights)
    return Classifier(model.to(device).eval(), config, classes, tokenizer)


def probabilities_of(
    model: nn.Module,
    rows: Rows,
    chosen: Sequence[int],
    batch_rows: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return class probabilities of the rows `chosen`, float64 [len(chosen), classes], on the CPU.

    Args: batch_rows: rows of a forward; dtype: the dtype of autocast.
    """
    device, training, lengths = device_of(model), model.training, rows.lengths
    model.eval()
    order = sorted(range(len(chosen)), key=lambda i: lengths[chosen[i]])
    outputs: list[Tensor] = []
    with sharding_of(model).inference():
        for start in range(0, len(order), batch_rows):
            inputs, _ = rows.__getitems__([chosen[i] for i in order[start : start + batch_rows]])
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                logits = model(**{name: tensor.to(device) for name, tensor in inputs.items()})
            outputs.append(logits.float())
    model.train(training)
    probabilities = torch.cat(outputs).double().softmax(1).cpu()
    out = torch.empty_like(probabilities)
    out[torch.tensor(order)] = probabilities
    return out
