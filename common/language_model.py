"""A language model: its weights, tokenizer, adapter and precision, in one frozen value."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from common import optim
from common.config import ModelConfig, OptConfig, Run
from common.device import Precision, count_parameters, precision
from common.distributed import Context, Sharding, send_weights, shard, sharding_of, without_weights
from common.model import (
    Adapter,
    Decoder,
    empty_like,
    export_model,
    keep_wide,
    load_model,
    logprobs,
    model_commit,
    narrow,
    on_device,
    quantized,
    round_layers,
    stop_ids,
    to_host,
    training_graph,
    widen_head,
)
from common.task import Task, digest


@dataclass(frozen=True, kw_only=True, eq=False)
class LanguageModel:
    """A causal language model on this rank, ready to be trained or to be perturbed.

    `load` makes it. Its fields never change: an algorithm that continues with other weights loads
    another model.
    """

    # The source of the weights: model.path, quantisation, adapter.
    settings: ModelConfig
    # The switches: mixed precision, compilation, offload, sharding.
    opt: OptConfig
    context: Context
    precision: Precision
    # A transformers model; with opt=fsdp its weights are sharded over the ranks.
    model: Any
    # The transformers tokenizer; its chat template, if it has one, renders conversations.
    tokenizer: Any
    # Turns token ids back into texts.
    decode: Decoder
    # The adapter that is trained; None = all weights are trained.
    adapter: Adapter | None = None
    # The frozen initial model of a KL penalty, or with an adapter the model; None = no penalty.
    reference: Any = None
    # The number of perturbed copies that are sampled from side by side; 0 = none, and the model is
    # trained by backward passes.
    population: int = 0
    # The float32 originals of weights that are held in half precision, by name. The trainer that
    # keeps the float32 masters removes them from here.
    wide: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The path of the model, or the name of its configuration if it has no path."""
        return self.settings.path or self.settings.name

    @property
    def device(self) -> torch.device:
        """The device of forward passes."""
        return self.context.device.device

    @property
    def half(self) -> bool:
        """Whether forward passes compute in 16 bits."""
        return self.precision.compute != torch.float32

    @property
    def sharding(self) -> Sharding:
        """The sharding of the weights over the ranks."""
        return sharding_of(self.model)

    @property
    def parameters(self) -> int:
        """The number of the model's own weights."""
        held = count_parameters(self.model) + quantized.packed_away(self.model)
        return held - (self.adapter.size if self.adapter else 0)

    @property
    def own_bytes(self) -> int:
        """Bytes of the model's own weights on this rank, without an adapter."""
        parts = [p for n, p in self.model.named_parameters() if n not in (self.adapter or ())]
        parts += [layer.scale for layer in quantized.layers(self.model).values()]
        return sum(part.numel() * part.dtype.itemsize for part in parts)

    @property
    def reference_bytes(self) -> int:
        """Bytes of the reference model's weights; 0 without a reference. Not defined with an
        adapter, whose reference shares the model's weights.
        """
        assert self.adapter is None
        parts = () if self.reference is None else self.reference.parameters()
        return sum(part.numel() * part.dtype.itemsize for part in parts)

    @property
    def stop_ids(self) -> list[int]:
        """The ids of tokens that end a completion."""
        return stop_ids(self.model, self.tokenizer)

    # --- forward passes

    @contextmanager
    def training_forward(self) -> Iterator[None]:
        """Run the forward and backward passes of the block with compiled layers if
        opt.compile.training is set.
        """
        compiled = self.opt.compile
        if not compiled.training:
            yield
            return
        with training_graph.compiled_blocks(self.model, compiled.mode):
            yield

    def rehearse_training(self) -> None:
        """Compile the training forward before the first step if opt.compile.training is set."""
        if self.opt.compile.training:
            with self.training_forward(), self.autocast():
                training_graph.rehearse(self.model, self.device)

    def autocast(self) -> torch.autocast:
        """Return the autocast context of forward passes in the run's precision."""
        return torch.autocast(self.device.type, self.precision.compute, enabled=self.half)

    @contextmanager
    def reference_on_device(self):
        """Yield the reference model on the device, and move it back afterwards if opt=offload keeps
        it on the CPU.
        """
        assert self.reference is not None
        if self.adapter is not None:  # the same weights
            with self.adapter.initially(), sharding_of(self.reference).gathered():
                yield self.reference
            return
        lent = self.opt.offload.enabled
        with sharding_of(self.reference).gathered(), on_device(self.reference, self.device, lent):
            yield self.reference

    # --- the end of a run

    def gather(self) -> dict[str, torch.Tensor] | None:
        """Return the full weights that `export` writes, by name, gathered from the ranks on rank 0.
        None if the weights are not sharded, or if only an adapter is exported.
        """
        alone = self.adapter is not None and not self.adapter.config.merge
        return None if alone else self.sharding.whole()

    def export(self, folder: Path, weights: dict[str, torch.Tensor] | None) -> Path:
        """Write the trained weights in the format of `from_pretrained` and return their folder.

        A run that trains all weights writes the model and its tokenizer to FOLDER/model. A run with
        an adapter writes FOLDER/adapter, and in addition the merged model to FOLDER/model if
        model.adapter.merge is true.
        """
        if self.adapter is not None:
            self.adapter.save(folder / "adapter", self.tokenizer)
            if self.adapter.config.merge:
                merged = self.adapter.merged(weights)
                export_model(empty_like(self.model), self.tokenizer, folder / "model", merged)
            return folder / "adapter"
        if self.settings.quantize is not None:
            plain = quantized.plain_weights(self.model)
            export_model(empty_like(self.model), self.tokenizer, folder / "model", plain)
            return folder / "model"
        export_model(self.model, self.tokenizer, folder / "model", weights)
        return folder / "model"


def load(
    run: Run,
    context: Context,
    task: Task,
    *,
    population: int = 0,
    reference: bool = False,
    compute: Precision | None = None,
) -> LanguageModel:
    """Load the model of a run on every rank, and prepare it for training or perturbation.

    Args:
        task: the task that a tiny model is pre-trained for.
        population: the number of perturbed copies to sample from; 0 = none.
        reference: whether to keep a frozen copy of the initial weights.
        compute: the precision; None = chosen from opt=amp and the device.
    Raises: ConfigError for a model or for switches that cannot work.
    """
    chosen = compute or precision.resolve(run.opt, context.device)
    half, settings = chosen.compute != torch.float32, run.model
    # A frozen model has no float32 masters.
    held = chosen.compute if settings.adapter else torch.float32
    # A population in half precision keeps no float32 weights on the device except the masters.
    narrows = half and bool(population) and not context.shares_weights
    home = torch.device("cpu") if narrows and settings.adapter is None else None
    model, tokenizer = load_on_all_ranks(run, task, context, held, home)
    decode = Decoder.of(model, tokenizer)
    prepare(model, run.opt, context, half, bool(population))
    frozen: Any = None
    if reference and settings.adapter is None:
        frozen = copy.deepcopy(model).requires_grad_(False)
        if half and not context.shares_weights:
            round_layers(frozen, chosen.compute)
        if run.opt.offload.enabled:
            to_host(frozen)
        shard(frozen, run, context, chosen)
    shard(model, run, context, chosen)
    adapter = None
    if settings.adapter is not None:
        adapter = Adapter(model, settings.adapter, context, run.seed, model_commit(settings))
        if population:
            model.requires_grad_(False)
        else:
            frozen = model if reference else None
            keep_wide(model)
    wide = narrow(model, chosen.compute, context.device.home) if narrows else {}
    return LanguageModel(
        settings=settings,
        opt=run.opt,
        context=context,
        precision=chosen,
        model=model,
        tokenizer=tokenizer,
        decode=decode,
        adapter=adapter,
        reference=frozen,
        population=population,
        wide=wide,
    )


def prepare(model: Any, opt: OptConfig, context: Context, half: bool, perturbed: bool) -> None:
    """Prepare a loaded model, in place, for backward passes or (`perturbed`) for perturbation."""
    if half and opt.amp.head == "float32":
        widen_head(model)
    if perturbed:
        model.requires_grad_(False)
        return
    logprobs.prepare(model, alone=not context.shares_weights)
    optim.no_dropout(model)
    if opt.compile.training:
        training_graph.check(model)


def load_on_all_ranks(
    run: Run, task: Task, context: Context, dtype: torch.dtype, home: torch.device | None = None
) -> tuple[Any, Any]:
    """Load the model, in `dtype`, and the tokenizer on rank 0, and send both to the other ranks.

    With opt=fsdp the weights stay on the CPU of rank 0 until `shard` sends them block by
    block.
    Args: home: the device of the loaded weights; None = the device of the rank.
    """
    loaded: Any = None
    if context.device.planned:
        loaded = load_model(run.model, task, dtype, context.device.home, progress=False)
        loaded[0].planned_for = context.device
        return loaded
    if context.main:
        device = home or context.device.device
        device = torch.device("cpu") if context.shares_weights else device
        loaded = load_model(run.model, task, dtype, device)
    if context.world_size == 1:
        return loaded
    context.meet()
    of_rank_0 = context.gather_objects(loaded and (without_weights(loaded[0]), loaded[1]))
    model, tokenizer = loaded or of_rank_0[0]
    context.check_same("rows of the task", digest(task))
    if not context.shares_weights:
        send_weights(model, context, home)
    return model, tokenizer
