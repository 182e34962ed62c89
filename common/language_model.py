"""A language model with its tokenizer, task, prompts, engine, evaluation and export."""

import copy
import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from common import evaluation, optim
from common.config import ConfigError, Run
from common.device import precision
from common.distributed import Context, fsdp
from common.engine import Engine, Setup, open_engine
from common.evaluation import Accepts, Evaluation
from common.examples import Examples, read_examples
from common.memory import Load
from common.model import (
    Adapter,
    Decoder,
    Encoder,
    context_length,
    empty_like,
    encode_prompts,
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
from common.sampling import StopTexts
from common.scoring import Scorer
from common.task import Example, Task, build
from common.tasks import Checked, Rows, thoughts

log = logging.getLogger("clutch")

# Rows of a rollout forward where algo.rollout_rows is null, before they are fitted to the memory.
ROLLOUT_ROWS = {"cpu": 256, "cuda": 1024}
REASONING = 64  # tokens at least, for a model that was trained elsewhere and short answers
USUAL = 0.99  # share of answers whose lengths count for such a model
LOOKED_AT = 4096  # prompts at most, of which the longest says how much room there is


class LM:
    """The language model of a run.

    Args: task: None = the one that the run names; population: how many perturbed copies of its
    weights there are, which never see a backward pass, and whose rows may come in mirrored pairs;
    rank: of their noise; reference: keep a frozen copy; read: chooses the examples.
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
        read: Callable[["LM"], Examples] = read_examples,
    ) -> None:
        self.run, self.context = run, context
        self.task: Any = Checked(task or build(run.task))
        self.precision = precision.resolve(run.opt, context.device)
        self.population = population
        adapted = run.model.adapter
        # What is frozen has no masters.
        held = self.precision.compute if adapted else torch.float32
        self.model: Any
        # A population in half precision has no float32 weights on the device, but for masters.
        narrows = self.half and bool(population) and context.mesh is None
        home = torch.device("cpu") if narrows and adapted is None else None
        self.model, self.tokenizer = load_on_all_ranks(run, self.task, context, held, home)
        self.decode = Decoder.of(self.model, self.tokenizer)
        self.adopt(self.task, run.task, task is None)
        if not run.algo.sampling.max_new_tokens:
            run.algo.sampling.max_new_tokens = self.longest_answer(self.task)
            run.algo.__post_init__()  # what could not be checked before
        self.beside = evaluation.read_beside(self)
        self._check_beside()
        self.examples = read(self)
        self.epochs = run.algo.count_steps(len(self.examples.order.examples))
        self.prepare()
        self.reference: Any = None
        if reference and adapted is None:
            self.reference = copy.deepcopy(self.model).requires_grad_(False)
            if self.half and context.mesh is None:
                round_layers(self.reference, self.precision.compute)
            if run.opt.offload.enabled:
                to_host(self.reference)
        fsdp.shard([self.reference], run, context, self.precision)
        fsdp.shard([self.model], run, context, self.precision)
        self.adapter: Adapter | None = None
        if adapted is not None:
            self.adapter = Adapter(self.model, adapted, context, run.seed, model_commit(run.model))
        if adapted is not None and population:
            self.model.requires_grad_(False)
        elif adapted is not None:
            self.reference = self.model if reference else None
            keep_wide(self.model)
        self.wide: dict[str, torch.Tensor] = {}  # float32 originals of half-precision weights
        if narrows:
            self.wide = narrow(self.model, self.precision.compute, context.device.home)
        # Those of an algorithm in stages are iterations.
        steps = getattr(run.algo, "steps", None) or getattr(run.algo, "iterations", None)
        self.scorer = Scorer(self.task.own, run.scoring, steps)
        # A population's weights are in the compute dtype themselves.
        autocast = self.precision.compute if self.half and not population else None
        floor = 2 if population else 1
        self.engine: Any
        self.engine = self.open_engine(self.model, floor=floor, autocast=autocast, rank=rank)
        self.reproducible = self.engine.reproducible
        if population and not self.engine.populations:
            raise ConfigError(
                f"{run.engine['_target_']} cannot sample from perturbed copies of a model, which"
                f" algo={run.algo.name} needs. Use engine=native."
            )

    @property
    def digests(self) -> dict[str, str]:
        """Return hashes of the task's rows, and of what is measured beside them."""
        return {"rows": digest(self.task), "beside": self._digest_beside()}

    def open_engine(
        self, model: Any, floor: int = 1, autocast: torch.dtype | None = None, rank: int = 1
    ) -> Engine:
        """Open the run's engine for `model`, which is this one or a copy of it."""
        compiled, stop = self.run.opt.compile, self.run.algo.sampling.stop
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
            stops=StopTexts(stop, self.decode) if stop else None,
            members=self.population,
            rank=rank,
        )
        return open_engine(self.run, setup)

    def longest_answer(self, task: Any) -> int:
        """Return how many tokens a completion may have, by the answers of a task: twice as many as
        the longest has, with the one that ends it.

        A model that was trained elsewhere may reason, or say more than the answer. Of its tasks the
        longest answer but for one in a hundred counts, a worked solution counts once, and what the
        context leaves behind the longest prompt is the most.
        """
        examples = [one for split in ("train", "test") for one in task.examples(split)]
        solutions = getattr(task, "solutions", {})
        whole = [solutions.get(one.question, one.answer) for one in examples]
        texts = list(dict.fromkeys(whole))
        ids = self.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        tokens = dict(zip(texts, map(len, ids), strict=True))
        if self.run.model.path is None:
            return 2 * max(tokens.values(), default=0) + 1  # room for what is wrong, too
        wanted = sorted(
            tokens[text] * (2 if one.extra.get("final", one.answer) == text else 1)
            for one, text in zip(examples, whole, strict=True)
        )
        usual = 1 + (wanted[math.ceil(USUAL * len(wanted)) - 1] if wanted else 0)
        most = max(REASONING, usual)
        if not hasattr(task, "episode") and examples:
            some = examples[:: -(-len(examples) // LOOKED_AT)]
            prompts = encode_prompts(self.tokenizer, [task.prompt(one) for one in some])
            lengths = sorted(map(len, prompts))
            context = context_length(self.model)
            room = context - lengths[-1]
            if room < REASONING:  # for the others; the longest do not fit
                room = context - lengths[math.ceil(USUAL * len(lengths)) - 1]
            most = min(most, room) if room > 0 else most
        if most < usual or usual < 1 + max(wanted, default=0):
            longer = sum(1 + length > most for length in wanted)
            log.info(
                "completions may have %d tokens; %d of %d answers ask for more: raise"
                " algo.sampling.max_new_tokens for them",
                *(most, longer, len(wanted)),
            )
        return most

    def _check_beside(self) -> None:
        """Raise ConfigError where a rank measures other examples, or another text, than rank 0."""
        if self.beside.others or self.beside.windows:
            what = "rows of evaluate.also and evaluate.text"
            same_on_all_ranks(self.context, what, self._digest_beside())

    def _digest_beside(self) -> str:
        others = [list(_rows(other.examples)) for other in self.beside.others]
        return _digest([others, self.beside.windows])

    def prepare(self) -> None:
        """Make the model ready to be trained, or to be perturbed."""
        if self.half and self.run.opt.amp.head == "float32":
            widen_head(self.model)
        if self.population:
            self.model.requires_grad_(False)
        else:
            logprobs.prepare(self.model, alone=self.context.mesh is None)
            optim.no_dropout(self.model)
            if self.run.opt.compile.training:
                training_graph.check(self.model)

    @contextmanager
    def training_forward(self) -> Iterator[None]:
        """Compute forward and backward passes of the block as training does: compiled, if
        opt.compile.training says so.
        """
        compiled = self.run.opt.compile
        if not compiled.training:
            yield
            return
        with training_graph.compiled_blocks(self.model, compiled.mode):
            yield

    def rehearse_training(self) -> None:
        """With opt.compile.training, compile before the first step."""
        if self.run.opt.compile.training:
            with self.training_forward(), self.autocast():
                training_graph.rehearse(self.model, self.device)

    def autocast(self) -> torch.autocast:
        """Return the context of forwards in the run's precision."""
        return torch.autocast(self.device.type, self.precision.compute, enabled=self.half)

    def adopt(self, task: Checked, node: dict[str, Any], built: bool = True) -> None:
        """Tell a task with task.chat=auto whether the tokenizer has a chat template, and give it
        the answers of completions without the thoughts before them (task.after).

        Args: node: its settings; built: whether it is made from these alone. Raises: ConfigError.
        """
        own: Any = task.own
        if isinstance(own, Rows):
            own.templated = self.tokenizer.chat_template is not None
            own.encode = Encoder(self.tokenizer)
        elif not built:
            return
        if (after := node.get("after")) is None or hasattr(own, "episode"):
            return
        if not (examples := task.examples("test")):
            return
        ids = encode_prompts(self.tokenizer, [task.prompt(examples[0])])[0]
        template = str(self.tokenizer.chat_template or "")
        behind = thoughts.find(after, template, self.tokenizer.decode(ids))
        if behind is not None:
            task.own = thoughts.Answering(own, behind)

    def wake(self) -> None:
        """Start an engine that runs in another process, with the weights as they are."""
        with fsdp.gathered(self.model):
            self.engine.refresh()

    def evaluate(self, accepts: Accepts | None = None) -> Evaluation:
        """Measure all that the run asks for on held-out examples; every rank returns the same.
        accepts: which samples are right, for evaluate.samples.

        Raises: RunStopped where the model's logits are NaN or infinite.
        """
        measured = evaluation.evaluate(self, accepts)
        self.engine.rest()
        return measured

    def measure(self, examples: Sequence[Example]) -> Evaluation:
        """Complete other examples of the task greedily, and measure. Raises: RunStopped."""
        tokens = self.run.algo.sampling.max_new_tokens
        return evaluation.measure(self, self.task, examples, tokens)

    # --- the plan and the ends of a run

    @property
    def name(self) -> str:
        """The path of the model, or its name."""
        return self.run.model.path or self.run.model.name

    @property
    def device(self) -> torch.device:
        """The device of forwards."""
        return self.context.device.device

    @property
    def half(self) -> bool:
        """Whether forwards are in 16 bits."""
        return self.precision.compute != torch.float32

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

    @property
    def idle_bytes(self) -> float:
        """The bytes that the engine holds while nobody samples."""
        return self.engine.peak_bytes(0, Load(1, self.run.algo.sampling))

    @property
    def held_out(self) -> list[Example]:
        """The examples that every evaluation measures on."""
        return self.examples.held_out

    @property
    def room(self) -> int:
        """The most tokens that a completion can have behind the longest prompt."""
        left = context_length(self.model) - self.examples.longest_prompt
        replies = self.examples.reply_tokens
        return (left - replies) // 2 if replies else left  # an episode has another turn

    def gather(self) -> dict[str, torch.Tensor] | None:
        """Return the weights that `export` writes, where they are shared out, on rank 0: none
        beside an adapter that is not merged.
        """
        alone = self.adapter is not None and not self.adapter.config.merge
        return None if alone else fsdp.whole(self.model)

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
        lent = self.run.opt.offload.enabled
        with fsdp.gathered(self.reference), on_device(self.reference, self.device, lent):
            yield self.reference


def load_on_all_ranks(
    run: Run, task: Task, context: Context, dtype: torch.dtype, home: torch.device | None = None
) -> tuple[Any, Any]:
    """Load the model in `dtype` and the tokenizer on rank 0, from which the others get both. With
    opt=fsdp the weights stay on the CPU of rank 0 until `fsdp.shard` sends them block by block.
    home: where the weights are then; None = on the device.
    """
    loaded: Any = None
    if context.device.planned:
        loaded = load_model(run.model, task, dtype, context.device.home, progress=False)
        loaded[0].planned_for = context.device
        return loaded
    if context.main:
        device = home or context.device.device
        device = device if context.mesh is None else torch.device("cpu")
        loaded = load_model(run.model, task, dtype, device)
    if context.world_size == 1:
        return loaded
    context.meet()
    of_rank_0 = context.gather_objects(loaded and (fsdp.without_weights(loaded[0]), loaded[1]))
    model, tokenizer = loaded or of_rank_0[0]
    same_on_all_ranks(context, "rows of the task", digest(task))
    if context.mesh is None:
        fsdp.send_weights(model, context, home)
    return model, tokenizer


def digest(task: Task) -> str:
    """Return a hash of the rows of a task."""
    splits = [task.examples(split) for split in ("train", "test")]
    return _digest(row for examples in splits for row in _rows(examples))


def _rows(examples: Sequence[Example]) -> Iterator[Any]:
    """Yield what tells each example apart; of what JSON does not know in `extra` the kind alone, as
    its text may hold an address.
    """
    for one in examples:
        extra = json.dumps(one.extra, skipkeys=True, default=_kind) if one.extra else "{}"
        yield one.id, one.question, one.answer, extra


def _kind(value: Any) -> str:
    return type(value).__qualname__


def _digest(rows: Iterable[Any]) -> str:
    """Return the hash of the text of a list of the rows, which is never held whole."""
    found, between = hashlib.sha256(b"["), ""
    for row in rows:
        found.update(f"{between}{row!r}".encode("utf-8", "replace"))
        between = ", "
    found.update(b"]")
    return found.hexdigest()


def same_on_all_ranks(context: Context, what: str, found: Any) -> None:
    """Raise ConfigError where `found`, a digest of `what`, is not that of rank 0."""
    context.meet()
    if (other := context.find_other(found)) is not None:
        raise ConfigError(
            f"the {what} on rank {other} are not those of rank 0, so the ranks would train apart."
            " Give all ranks the same files, and a task whose rows do not depend on the machine,"
            " the time or chance."
        )
