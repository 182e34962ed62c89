"""A language model with its tokenizer, task, prompts, engine, evaluation and export."""

import copy
import gc
import hashlib
import logging
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from common import evaluation, hardware, optim, precision, threads
from common.config import ConfigError, Run, SamplingConfig
from common.config.checks import CONF
from common.distributed import fsdp
from common.distributed.context import Context
from common.evaluation import Accepts, Evaluation
from common.model import logprobs, quantized
from common.model.adapter import Adapter
from common.model.export import empty_like, export_model
from common.model.half import keep_wide, narrow, narrowed, round_layers
from common.model.load import load_model
from common.model.memory import (
    Batch,
    StateMemory,
    activation_bytes,
    head_size,
    logits_bytes,
    passing_bytes,
    training_peak,
)
from common.model.prompts import (
    context_length,
    context_name,
    encode_prompts,
    find_opening,
    stop_ids,
)
from common.rows import RowLimit
from common.sampling.engine import Completions, Engine, Load, Requests, Setup, open_engine
from common.tasks import Example, Task, build, task_name
from common.tasks.checked import Checked
from common.tasks.order import ExampleOrder, hold_out
from common.tasks.rows import Rows
from common.tasks.scoring import Scorer

log = logging.getLogger("clutch")

# Rows of a rollout forward where algo.rollout_rows is null, before they are fitted to the memory.
ROLLOUT_ROWS = {"cpu": 256, "cuda": 1024}
REASONING = 64  # tokens at least, for a model that was trained elsewhere and short answers


class LM:
    """The language model of a run.

    Args: task: None = the one that the run names; population: how many perturbed copies of its
    weights there are, which never see a backward pass, and whose rows may come in mirrored pairs;
    rank: of their noise; reference: keep a frozen copy.
    Raises: ConfigError for a model, a task or settings that cannot work.
    """

    def __init__(
        self,
        run: Run,
        context: Context,
        task: Task | None = None,
        *,
        population: int = 0,
        rank: int = 1,
        reference: bool = False,
    ) -> None:
        self.run, self.context = run, context
        self.device = context.device.device
        self.task: Any = Checked(task or build(run.task))
        self.name = run.model.path or run.model.name
        self.precision = precision.resolve(run.opt, self.device)
        self.half = self.precision.compute != torch.float32
        self.population, self.rank, self.skipped_prompts = population, rank, 0
        adapted = run.model.adapter
        # What is frozen has no masters.
        held = self.precision.compute if adapted else torch.float32
        self.model: Any
        # A population in half precision has no float32 weights on the device, but for masters.
        narrows = self.half and bool(population) and context.mesh is None
        home = torch.device("cpu") if narrows and adapted is None else None
        self.model, self.tokenizer = load_on_all_ranks(run, self.task, context, held, home)
        self.tell_chat(self.task.own)
        if not run.algo.sampling.max_new_tokens:
            run.algo.sampling.max_new_tokens = self.longest_answer(self.task)
            run.algo.__post_init__()  # what could not be checked before
        self.others = evaluation.read_others(self)
        self.windows, self.token_bytes = evaluation.read_windows(self)
        self._check_others()
        self._prepare()
        self.reference: Any = None
        if reference and adapted is None:
            self.reference = copy.deepcopy(self.model).requires_grad_(False)
            if self.half and context.mesh is None:
                round_layers(self.reference, self.precision.compute)
            if run.opt.offload.enabled and not context.device.planned:
                self.reference.to("cpu")
        fsdp.shard([self.reference], run, context, self.precision)
        fsdp.shard([self.model], run, context, self.precision)
        self.adapter = Adapter(self.model, adapted, context, run.seed) if adapted else None
        if adapted is not None and population:
            self.model.requires_grad_(False)
        elif adapted is not None:
            self.reference = self.model if reference else None
            keep_wide(self.model)
        self.wide: dict[str, torch.Tensor] = {}  # float32 originals of half-precision weights
        if narrows:
            here = torch.device("meta") if context.device.planned else self.device
            self.wide = narrow(self.model, self.precision.compute, here)
        self.scorer = Scorer(self.task.own, run.scoring)
        # A population's weights are in the compute dtype themselves.
        autocast = self.precision.compute if self.half and not population else None
        self.engine: Any
        self.engine = self.open_engine(self.model, floor=2 if population else 1, autocast=autocast)
        self.reproducible = self.engine.reproducible
        if population and not self.engine.populations:
            raise ConfigError(
                f"{run.engine['_target_']} cannot sample from perturbed copies of a model, which"
                f" algo={run.algo.name} needs. Use engine=native."
            )

    def open_engine(
        self, model: Any, floor: int = 1, autocast: torch.dtype | None = None
    ) -> Engine:
        """Open the run's engine for `model`, which is this one or a copy of it."""
        compiled = self.run.opt.compile
        setup = Setup(
            model=model,
            context=self.context,
            adapter=self.adapter,
            pad_id=self.tokenizer.pad_token_id,
            stop_ids=stop_ids(model, self.tokenizer),
            rows=self.run.algo.rollout_rows or ROLLOUT_ROWS[self.device.type],
            floor=floor,
            compile_mode=compiled.mode if compiled.enabled else None,
            autocast=autocast,
            members=self.population,
            rank=self.rank,
        )
        return open_engine(self.run, setup)

    def reload(self, folder: Path | None) -> None:
        """Take the model of a folder instead, None = the run's own; with an adapter, the adapter of
        that folder. The engine stays the old.
        """
        if self.adapter is not None:
            return self.adapter.load(folder) if folder is not None else self.adapter.reset()
        run, self.model = self.run, None
        gc.collect()
        if folder is not None:
            options: Any = dict.fromkeys(("revision", "gguf_file", "tiny"))
            model = replace(run.model, name="hf", path=str(folder), **options)
            run = replace(run, model=model)
        self.model, _ = load_on_all_ranks(run, self.task, self.context, torch.float32)
        self.share_out()

    def share_out(self) -> None:
        """Make `model` ready to be trained, and with opt=fsdp share it out if it is not yet."""
        if self.adapter is None and not fsdp.of(self.model):
            self._prepare()
            fsdp.shard([self.model], self.run, self.context, self.precision)

    def open_copy(self) -> None:
        """Sample from a half-precision copy of the model as it is now; in float32, and where an
        adapter lies on weights in half precision, from itself. An engine with weights of its own
        takes them over.
        """
        autocast = self.precision.compute if self.half else None
        if self.engine is not None:
            self.engine.model = self.model
            self.engine.refresh()
            return
        if self.adapter is not None:
            self.engine = self.open_engine(self.model, autocast=autocast)
            return
        self.engine = self.open_engine(narrowed(self.model, self.precision.compute))

    def close_copy(self) -> None:
        """Drop the copy that `open_copy` has made; an engine with weights of its own goes on."""
        if self.engine is not None and self.engine.separate:
            self.engine.rest()
            self.engine.model = None  # else it would keep the model that `reload` replaces
        else:
            self.engine = None

    def longest_answer(self, task: Any) -> int:
        """Return how many tokens the answers of a task ask for, with the one that ends them."""
        splits = [task.examples(split) for split in ("train", "test")]
        texts = list({example.answer for examples in splits for example in examples})
        ids = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        longest = 2 * max((len(one) for one in ids), default=0) + 1  # room for what is wrong, too
        # a model that was trained elsewhere may reason, or say more than the answer
        return longest if self.run.model.path is None else max(REASONING, longest)

    def _check_others(self) -> None:
        """Raise ConfigError where a rank measures other examples, or another text, than rank 0."""
        if self.others or self.windows:
            rows = [_rows(other.examples) for other in self.others]
            digest = _digest([rows, self.windows])
            same_on_all_ranks(self.context, "rows of evaluate.also and evaluate.text", digest)

    def _prepare(self) -> None:
        if self.population:
            self.model.requires_grad_(False)
        else:
            logprobs.prepare(self.model)
            optim.no_dropout(self.model)

    # --- prompts

    def tell_chat(self, task: Any) -> None:
        """Tell a task with task.chat=auto whether the tokenizer has a chat template."""
        if isinstance(task, Rows):
            task.templated = self.tokenizer.chat_template is not None

    def read_examples(self) -> None:
        """Read training and held-out examples into `order` and `held_out`. Raises: ConfigError."""
        splits = {"train": list(self.task.examples("train")), "test": self.candidates()}
        splits, prompts = self.fit_prompts(self.task.prompt, splits)
        self.measure_prompts(prompts, [])
        self.order = ExampleOrder(splits["train"], self.run.seed)
        self.held_out = splits["test"][: self.run.evaluate.examples]

    def measure_prompts(self, prompts: list[list[int]], hinted: list[list[int]]) -> None:
        """Note for plans how many tokens the longest prompt has, and how many all begin with.
        hinted: other prompts, which no model is trained on.
        """
        self.longest_prompt = max(map(len, [*prompts, *hinted]))
        # As of a set of many. That of the few prompts of a step is at least as long, and longer
        # where some of the task's prompts begin otherwise, which a plan does not know.
        self.opening = len(find_opening(prompts, 0.0))

    def candidates(self) -> list[Example]:
        """Return the test examples that evaluate.examples are taken of: with prompts.too_long=skip
        all, since others take the place of those that do not fit.
        """
        skip = self.run.prompts.too_long == "skip"
        return hold_out(self.task, None if skip else self.run.evaluate.examples)

    def hold_out(self, task: Any, tokens: int) -> list[Example]:
        """Return the held-out examples of another task, whose completions have `tokens` at most.

        Raises: ConfigError where a prompt does not fit the context.
        """
        count, skipped = self.run.evaluate.examples, self.skipped_prompts
        found = hold_out(task, None if self.run.prompts.too_long == "skip" else count)
        kept, _ = self.fit_prompts(task.prompt, {"test": found}, tokens)
        self.skipped_prompts = skipped  # those of the run's own task
        return kept["test"][:count]

    def fit_prompts(
        self,
        ask: Callable[[Example], Any],
        splits: dict[str, list[Example]],
        tokens: int | None = None,
    ) -> tuple[dict[str, list[Example]], list[list[int]]]:
        """Return the examples whose prompts fit the context, and the tokens of all these prompts.

        Args: ask: makes the prompt of an example; tokens: of a completion, None =
        algo.sampling.max_new_tokens.
        Raises: ConfigError where one does not fit with prompts.too_long=error, or none does.
        """
        key = "max_new_tokens" if tokens else "algo.sampling.max_new_tokens"
        new: int = tokens or self.run.algo.sampling.max_new_tokens
        context = context_length(self.model)
        kept: dict[str, list[Example]] = {split: [] for split in splits}
        misfits, fitting, longest = [], [], 0
        for split, examples in splits.items():
            prompts = encode_prompts(self.tokenizer, [ask(example) for example in examples])
            for example, ids in zip(examples, prompts, strict=True):
                longest = max(longest, len(ids))
                if len(ids) + new > context:
                    misfits.append((split, example.id, len(ids)))
                else:
                    kept[split].append(example)
                    fitting.append(ids)
        count = sum(map(len, splits.values()))
        self.skipped_prompts += len(misfits)
        if misfits and (self.run.prompts.too_long == "error" or not all(kept.values())):
            split, first, length = misfits[0]
            room, what = context - longest, context_name(self.model)
            advice = f"Lower it to {room}, shorten" if room > 0 else "Shorten"
            other = ", or leave them out with prompts.too_long=skip"
            other = " so that some fit" if self.run.prompts.too_long == "skip" else other
            raise ConfigError(
                f"{len(misfits)} of {count} prompts do not fit the model's {what} of {context}"
                f" tokens with {key}={new}: the first is {split} example {first} with {length}"
                f" tokens, the longest has {longest}. {advice} the prompts{other}."
            )
        if misfits and self.context.main:
            log.warning(
                "%d of %d prompts do not fit the model's context of %d tokens and are left out"
                " (prompts.too_long=skip)",
                *(len(misfits), count, context),
            )
        return kept, fitting

    def encode(self, examples: Sequence[Example]) -> list[list[int]]:
        """Return the token ids of the examples' prompts."""
        return encode_prompts(self.tokenizer, [self.task.prompt(example) for example in examples])

    # --- sampling

    def generate(self, requests: Requests, sampling: SamplingConfig | None = None) -> Completions:
        """Sample with the weights as they are now; sampling: None = algo.sampling."""
        self.engine.refresh()
        return self.engine.generate(requests, sampling or self.run.algo.sampling)

    def evaluate(self, accepts: Accepts = evaluation.earns_all) -> Evaluation:
        """Measure all that the run asks for on held-out examples; every rank returns the same.
        accepts: which samples are right, for evaluate.samples.

        Raises: RunStopped where the model's logits are NaN or infinite.
        """
        found = evaluation.evaluate(self, accepts)
        self.engine.rest()
        return found

    def measure(self, examples: Sequence[Example]) -> Evaluation:
        """Complete other examples of the task greedily, and measure. Raises: RunStopped."""
        tokens = self.run.algo.sampling.max_new_tokens
        return evaluation.measure(self, self.task, examples, tokens)

    # --- the plan and the ends of a run

    @property
    def parameters(self) -> int:
        """The number of the model's own weights."""
        held = fsdp.parameters(self.model) + quantized.packed_away(self.model)
        return held - (self.adapter.size if self.adapter else 0)

    @property
    def own_bytes(self) -> int:
        """The bytes of the model's own weights, without an adapter."""
        parts = [p for n, p in self.model.named_parameters() if n not in (self.adapter or ())]
        parts += [layer.scale for layer in quantized.layers(self.model).values()]
        return sum(part.numel() * part.dtype.itemsize for part in parts)

    @property
    def reference_bytes(self) -> int:
        """The bytes of a reference model that has weights of its own."""
        assert self.adapter is None
        parts = () if self.reference is None else self.reference.parameters()
        return sum(part.numel() * part.dtype.itemsize for part in parts)

    def state_memory(self, trained: bool, reference: bool = False, copies: int = 0) -> StateMemory:
        """Count weights and training state. reference: a frozen copy beside it; copies: in half
        precision, of what has float32 weights.
        """
        engine = idle_bytes(self.run, self.engine) if self.engine.separate else 0.0
        moments = optim.state_bytes(self.run.algo.optimizer)
        if self.adapter is None:
            size = self.parameters
            frozen = self.reference_bytes if reference else 0
            state = StateMemory.of_training(size, size * trained, frozen, copies, moments)
        else:
            held = self.own_bytes, self.adapter.size
            state = StateMemory.of_adapter(*held, trained, copies, moments)
        return replace(state, engine=engine)

    def fit_rollout(
        self, state: StateMemory, extra_bytes: float = 0.0, groups: int = 1, each: int = 1
    ) -> None:
        """Fit the engine's rows to the memory, for prompts of which each has one sample, and more
        of them than rows.

        Args: extra_bytes: what else is there, whatever the rows; groups: the most of a call; each:
        rows of a group.
        """
        self.rollout_fixed = state.on_rank(self.model, rollout=True) + extra_bytes
        self.groups, self.group_rows = groups, each

        def peak(rows: int) -> float:
            return self.rollout_fixed + self.engine.peak_bytes(rows, self._load(rows))

        fit(self.engine.limit, peak, self.context)

    def _load(self, rows: int, samples: int = 1, completions: int | None = None) -> Load:
        """Return what a plan of so many rows is made for: an opening for each group among them."""
        opened = self.opening * min(self.groups, max(1, rows // self.group_rows))
        settings = self.run.algo.sampling
        return Load(self.longest_prompt, settings, samples, completions, opened)

    def fit_training(
        self, limit: RowLimit, state: StateMemory, completions: int, samples: int = 1
    ) -> float:
        """Fit the rows of training forwards to the memory, on every rank the same, since ranks cut
        micro-batches alike. Returns the bytes of a step's training.

        Args: completions: of this rank per step; samples: of a prompt, which share it.
        """
        new, compute = self.run.algo.sampling.max_new_tokens, self.precision.compute
        recomputed = self.run.opt.checkpointing.enabled
        fixed = state.on_rank(self.model, rollout=False)

        def batch(rows: int) -> Batch:
            return Batch(rows / samples, self.longest_prompt, rows, new, compute, self.opening)

        def held(rows: int) -> float:
            return activation_bytes(self.model, batch(rows), recomputed)

        once = logits_bytes(self.model, limit.rows * new)
        fit(limit, lambda rows: fixed + once + held(rows), self.context)
        limit.rows = min(self.context.gather_objects(limit.rows))
        most, single = min(limit.rows, completions), completions <= limit.rows
        once = logits_bytes(self.model, most * new)
        passing = passing_bytes(self.model, batch(most)) if recomputed else 0.0
        return training_peak(self.model, state, held(most), single, once, passing)

    def rollout_peak(self, completions: int, samples: int) -> float:
        """Return the bytes of a rollout of so many completions, `samples` of each prompt, with the
        weights and what else is there.
        """
        rows = min(self.engine.limit.rows, completions)
        load = self._load(rows, samples, completions)
        self.rollout_sampled = self.engine.peak_bytes(rows, load)
        return self.rollout_fixed + self.rollout_sampled

    def describe_memory(self, peak: float, rows: int, state: StateMemory) -> dict[str, str]:
        """Say for the plan what a rank takes. peak: bytes of a step; rows: of a rollout's forward;
        state: the weights and the training state.
        """
        self.peak, self.planned_rows = peak, rows
        shared = fsdp.planned(self.model, state.whole)
        rollout = f"a rollout of {rows} rows {self.rollout_sampled / 2**30:.2f} GB"
        return {
            "memory": f"about {peak / 2**30:.2f} GB per rank, estimated: "
            f"{state.describe(self.model)},"
            f" {rollout}{shared}",
        }

    def describe(self) -> dict[str, str]:
        """Say for the plan what the task, the model, the device and the numbers are."""
        run, device = self.run, self.context.device
        skipped = f"; {self.skipped_prompts} too long and left out" if self.skipped_prompts else ""
        head = head_size(self.model.config)
        kernel = hardware.attention_kernel(self.device, self.precision.compute, head, masked=True)
        mode = run.opt.compile.mode
        compiled = f", decoding compiled ({mode})" if run.opt.compile.enabled else ""
        recomputed = ", activations recomputed" if run.opt.checkpointing.enabled else ""
        adapter = f"; {self.adapter.describe()}" if self.adapter else ""
        prompt = self.task.prompt(self.task.examples("train")[0])
        templated = self.tokenizer.chat_template is not None and not isinstance(prompt, str)
        return {
            "task": f"{task_name(self.task)}: {len(self.order.examples):,} training examples,"
            f" {len(self.held_out)} held out{skipped}",
            "prompts": "through the chat template" if templated else "plain text",
            "model": f"{self.name}, {self.parameters / 1e6:.2f}M parameters{adapter}",
            "engine": describe_engine(run, self.engine),
            "device": f"{device.name}, {device.memory_gb:.0f} GB; hardware={run.hardware.name}",
            "numbers": f"{self.precision.name}{', GradScaler' if self.precision.scaler else ''}"
            f"{compiled}, masters float32; attention {run.model.attention} ({kernel}){recomputed}"
            + precision.advise(self.precision, run, self.device, self.parameters),
            "ranks": str(self.context.world_size),
            **threads.describe(device),
        }

    def offending_row(
        self, example: Example, completion: Any, reward: float, broken: bool
    ) -> dict[str, Any]:
        """Describe a completion whose reward, or else whose logits (`broken`), are not finite.

        Args: completion: its text, or its token ids.
        """
        if not isinstance(completion, str):
            completion = self.tokenizer.decode(completion)
        return {
            "id": example.id,
            "prompt": self.task.prompt(example),
            "answer": example.answer,
            "completion": completion,
            "reward": str(reward),  # JSON has no NaN
            "logits": "not finite" if broken else "finite",
        }

    def export(self, folder: Path, weights: dict[str, torch.Tensor] | None) -> Path:
        """Write FOLDER/model, the model and its tokenizer as `from_pretrained` loads them; with an
        adapter FOLDER/adapter, and the model where model.adapter.merge asks for it. Returns where
        what was trained is.
        """
        if self.adapter is not None:
            self.adapter.save(folder / "adapter", self.tokenizer)
            if self.adapter.config.merge:
                merged = self.adapter.merged(weights)
                export_model(empty_like(self.model), self.tokenizer, folder / "model", merged)
            return folder / "adapter"
        if self.run.model.quantize is not None:
            plain = quantized.plain_weights(self.model)
            export_model(empty_like(self.model), self.tokenizer, folder / "model", plain)
            return folder / "model"
        export_model(self.model, self.tokenizer, folder / "model", weights)
        return folder / "model"

    def close(self) -> None:
        """End the workers that score, and an engine in another process."""
        self.scorer.close()
        if self.engine is not None:
            self.engine.close()

    @contextmanager
    def reference_on_device(self):
        """Use the reference model on the device for the block, wherever opt=offload keeps it."""
        assert self.reference is not None
        if self.adapter is not None:  # the same weights
            with self.adapter.initially(), fsdp.gathered(self.reference):
                yield self.reference
            return
        with fsdp.gathered(self.reference):
            if self.run.opt.offload.enabled:
                self.reference.to(self.device)
            yield self.reference
            if self.run.opt.offload.enabled:
                self.reference.to("cpu")


def describe_engine(run: Run, engine: Engine) -> str:
    """Say which engine samples, and whether a sample can be drawn again."""
    target = run.engine["_target_"]
    shipped = (path for path in CONF.glob("engine/*.yaml") if target in path.read_text())
    name = next((path.stem for path in shipped), target)
    if engine.separate:
        held = idle_bytes(run, engine) / 2**30
        name += f" in a process of its own, {held:.1f} GB while the model is trained"
    return name if engine.reproducible else f"{name}; the run cannot be repeated to the bit"


def idle_bytes(run: Run, engine: Engine) -> float:
    """Return what an engine holds while nobody samples."""
    return engine.peak_bytes(0, Load(1, run.algo.sampling))


def fit(limit: RowLimit, peak: Callable[[int], float], context: Context) -> None:
    """Fit a limit to the memory of this rank, and say so where the setting asked for more. peak: as
    for `RowLimit.fit`.
    """
    asked = limit.rows
    limit.fit(peak, context.memory_gb)
    if limit.rows < asked and context.main:
        gb = context.memory_gb
        log.info("%s=%d does not fit %.0f GB; going on with %d", limit.key, asked, gb, limit.rows)


def load_on_all_ranks(
    run: Run, task: Task, context: Context, dtype: torch.dtype, home: torch.device | None = None
) -> tuple[Any, Any]:
    """Load the model in `dtype` and the tokenizer on rank 0, from which the others get both. With
    opt=fsdp the weights stay on the CPU of rank 0 until `fsdp.shard` sends them block by block.
    home: where the weights are then; None = on the device.
    """
    if context.device.planned:
        return load_model(run.model, task, dtype, torch.device("meta"), progress=False)
    loaded: Any = None
    if context.main:
        device = home or context.device.device
        device = device if context.mesh is None else torch.device("cpu")
        loaded = load_model(run.model, task, dtype, device)
    if context.world_size == 1:
        return loaded
    told = context.gather_objects(loaded and (fsdp.without_weights(loaded[0]), loaded[1]))
    model, tokenizer = loaded or told[0]
    splits = [task.examples(split) for split in ("train", "test")]
    digest = _digest([row for examples in splits for row in _rows(examples)])
    same_on_all_ranks(context, "rows of the task", digest)
    if context.mesh is None:
        fsdp.send_weights(model, context, home)
    return model, tokenizer


def _rows(examples: Sequence[Example]) -> list[Any]:
    return [(example.id, example.question, example.answer) for example in examples]


def _digest(rows: list[Any]) -> str:
    return hashlib.sha256(repr(rows).encode("utf-8", "replace")).hexdigest()


def same_on_all_ranks(context: Context, what: str, found: Any) -> None:
    """Raise ConfigError where `found`, a digest of `what`, is not that of rank 0."""
    if (other := context.find_other(found)) is not None:
        raise ConfigError(
            f"the {what} on rank {other} are not those of rank 0, so the ranks would train apart."
            " Give all ranks the same files, and a task whose rows do not depend on the machine,"
            " the time or chance."
        )
