"""The classifier of a run: its data, its model and training steps, the best weights so far, and its
test.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import optim
from common.checkpoint import Checkpoint
from common.config import Run
from common.device import Precision, count_parameters, precision, threads
from common.distributed import Context, restore_checkpoint, sharding_of
from common.evaluation import Evaluation, check_logits
from common.memory import RowLimit, StateMemory, fit, training_peak
from common.system import write_text
from common.task import task_name
from ddp_bench import models
from ddp_bench.config import ClassifyConfig
from ddp_bench.data import Batches, Loader, held_out, prepare
from ddp_bench.metrics import confusion, measures
from ddp_bench.report.tables import align
from ddp_bench.step import Stepper
from ddp_bench.tasks import ClassTask, made, majority

log = logging.getLogger("clutch")

BEST = "best."  # the prefix of the names of the best weights in a checkpoint
SHOWN = 12  # the most classes for which the confusion matrix is printed


class Bench:
    """The rows of a run's task, and factories of the models that learn them and of
    their batches.
    """

    def __init__(
        self, run: Run, context: Context, task: ClassTask | None, precision: Precision
    ) -> None:
        cfg: ClassifyConfig = run.algo
        self.run, self.context, self.cfg, self.precision = run, context, cfg, precision
        self.device = context.device.device
        self.task = task or made(run.task)
        data, self.tokenizer = prepare(self.task, cfg.tokenizer, cfg.model.max_tokens, log.info)
        self.train_rows, self.test_rows = data["train"], data["test"]
        self.rows, self.validation = held_out(self.train_rows, cfg.validation_share, run.seed)

    def make_stepper(self, context: Context, **sizes: float) -> Stepper:
        """Return a new model with its optimizer.

        Args: sizes: model sizes that differ from the run's.
        """
        config, classes = replace(self.cfg.model, **sizes), len(self.task.classes)
        model = models.build(config, classes, self.tokenizer, self.train_rows, self.run.seed)
        # Sharding takes the model to the device block by block.
        model.to("cpu" if context.shares_weights else self.device)
        return Stepper(model, self.run, context, self.precision)

    def make_batches(self, batch_rows: int, ranks: int) -> Loader:
        """Return the batches of this rank.

        Args: batch_rows: the rows of a batch on all `ranks` ranks together.
        """
        loader, lengths = self.cfg.loader, self.train_rows.lengths
        sizes = batch_rows, loader.bucket_batches, self.run.seed, self.context.rank, ranks
        batches = Batches(self.rows, lengths, *sizes)
        return Loader(self.train_rows, batches, loader, self.device)


class Classifier(Bench):
    """A classifier on a class task: the Subject and the Checkpointed of a session."""

    def __init__(self, run: Run, context: Context, task: ClassTask | None) -> None:
        super().__init__(run, context, task, precision.resolve(run.opt, context.device.device))
        self.name = f"encoder {self.cfg.model.layers}x{self.cfg.model.size}"
        self.held_out: Sequence[Any] = ()
        # The best epoch is kept here (`keep_best`), and not by the session.
        self.validator = None
        self.reproducible = True
        self.digests = {"rows": self.train_rows.digest() + self.test_rows.digest()}
        context.check_same("rows of the task", self.digests["rows"])
        self.stepper = self.make_stepper(context)
        self.model: Any = self.stepper.model
        self.loader = self.make_batches(self.cfg.batch_size, context.world_size)
        self.batches = self.loader.batches
        self._fit_rows()
        # Ranks measure without each other, but for weights that they share.
        rows, shared = self.stepper.row_limit.rows, sharding_of(self.model).shared
        shorter = "algo.model.max_tokens"
        self.row_limit = RowLimit("algo.train_rows", rows, fixed=shared, shorter=shorter)
        self.best: dict[str, Tensor] = {}

    # --- measures

    def probabilities(self, rows: Any, chosen: Sequence[int]) -> Tensor:
        """Return class probabilities of the rows `chosen`, float64 [len(chosen), classes], on all
        ranks.

        Raises: RunStopped if they are not finite.
        """
        context, model = self.context, self.model
        mine = context.share(range(len(chosen)))
        sure = torch.zeros(len(chosen), len(self.task.classes), dtype=torch.float64)
        with sharding_of(model).gathered():
            if mine:
                sure[list(mine)] = self._forward(rows, [chosen[i] for i in mine])
        sure = context.sum(sure.to(self.device)).cpu()
        finite = sure.isfinite().all(1).tolist()
        broken = [row for row, fine in zip(chosen, finite, strict=True) if not fine]
        check_logits(broken, len(chosen), self.precision.compute, "rows")
        return sure

    def validate(self) -> dict[str, float]:
        """Return the measures on the validation rows."""
        labels = torch.from_numpy(self.train_rows.labels[self.validation])
        return measures(labels, self.probabilities(self.train_rows, self.validation))

    def guess(self) -> Evaluation:
        """Evaluate predicting the most frequent training class for all test rows."""
        labels = torch.from_numpy(self.test_rows.labels)
        sure = torch.zeros(len(labels), len(self.task.classes), dtype=torch.float64)
        sure[:, majority(self.task.rows("train"))] = 1
        metrics = measures(labels, sure)
        metrics.pop("loss")  # infinite
        return Evaluation(metrics, [], 0, self._scores(sure))

    def evaluate(self) -> Evaluation:
        """Evaluate the best weights on the test rows, which were not used to choose anything."""
        if self.best:
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    parameter.copy_(self.best[name])
        labels = torch.from_numpy(self.test_rows.labels)
        self.tested = self.probabilities(self.test_rows, range(len(self.test_rows)))
        return Evaluation(measures(labels, self.tested), [], 0, self._scores(self.tested))

    def _scores(self, probabilities: Tensor) -> dict[str, list[float]]:
        """Return the contribution of each test row to the accuracy."""
        right = probabilities.argmax(1) == torch.from_numpy(self.test_rows.labels)
        return {"accuracy": (100.0 * right).tolist()}

    def offending(self, chosen: Sequence[int]) -> list[dict[str, Any]]:
        """Describe the rows of `chosen` with probabilities that are not finite; all of them if each
        is finite.
        """
        with sharding_of(self.model).gathered():
            outputs = self._forward(self.train_rows, chosen) if chosen else []
        pairs = zip(chosen, outputs, strict=True)
        broken = [row for row, part in pairs if not torch.isfinite(part).all()]
        rows, classes = list(self.task.rows("train")), self.task.classes
        return [
            {"id": row, "prompt": str(rows[row].value), "answer": classes[rows[row].label]}
            for row in broken or chosen
        ]

    def _forward(self, rows: Any, chosen: Sequence[int]) -> Any:
        compute = self.precision.compute
        return self.row_limit.run(
            lambda most: models.probabilities_of(self.model, rows, chosen, most, compute)
        )

    # --- checkpoints

    def keep_best(self) -> None:
        """Store the current weights as the best ones so far."""
        named = self.model.named_parameters()
        self.best = {name: tensor.detach().clone() for name, tensor in named}

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights, and the best ones so far."""
        best = {f"{BEST}{name}": tensor for name, tensor in self.best.items()}
        return dict(self.model.named_parameters()) | best

    def extra(self) -> dict[str, Any]:
        """Return the state of optimizer and scaler."""
        return self.stepper.updater.state()

    def load(self, saved: Checkpoint) -> None:
        """Load a checkpoint."""
        if saved.state["run"]["best"]:
            named = self.model.named_parameters()
            self.best = {n: torch.empty_like(t, requires_grad=False) for n, t in named}
        updater = self.stepper.updater
        updater.load(restore_checkpoint(saved, self.tensors(), updater.fresh))

    # --- plan and results

    def plan(self) -> dict[str, str]:
        """Describe the run for the plan, with sizes."""
        cfg, ranks, task = self.cfg, self.context.world_size, self.task
        lengths, size = self.train_rows.lengths, count_parameters(self.model)
        share = -(-cfg.batch_size // ranks)
        forwards = -(-share // self.stepper.row_limit.rows)
        sent = f", {4 * size / 2**20:.1f} MB of gradients per step" if ranks > 1 else ""
        hook = f", hook {cfg.ddp.hook}" if ranks > 1 and not self.context.shares_weights else ""
        scaler = ", GradScaler" if self.precision.scaler else ""
        compiled = ", compiled" if self.run.opt.compile.enabled else ""
        workers, device, preset = self.loader.workers, self.context.device, self.run.hardware.name
        advice = precision.advise(self.precision, self.run, device.device, size)
        facts = {
            "algorithm": f"classify, {cfg.epochs} epochs of {len(self.batches)} steps, lr"
            f" {cfg.lr:g}",
            "task": f"{task_name(task)}: {len(task.classes)} classes, {len(self.batches.rows):,}"
            f" training rows, {len(self.validation):,} for validation, {len(self.test_rows):,} for"
            f" the test; tokens {lengths.mean():.0f} on average, {lengths.max()} at most",
            "model": f"{self.name}, {size / 1e6:.2f}M parameters",
            "device": f"{device.name}, {device.memory_gb:.0f} GB; hardware={preset}",
            "numbers": f"{self.precision.name}{scaler}, masters float32{compiled}{advice}",
            "ranks": f"{ranks}{sent}{hook}",
            **({"rows": "; ".join(notes)} if (notes := getattr(task, "notes", ())) else {}),
            **threads.describe(device),
            "batch": f"{cfg.batch_size} rows: {share} per rank, forwards: {forwards}",
            "loader": f"{workers} worker processes per rank" if workers else "in this process",
        }
        planned = sharding_of(self.model).describe(self.memory.whole)
        return facts | {"memory": f"about {self.peak / 2**30:.2f} GB per rank, estimated{planned}"}

    def _fit_rows(self) -> None:
        """Fit the rows of forwards to the memory of this device."""
        size, context = count_parameters(self.model), self.context
        row_limit = self.stepper.row_limit
        recomputed, compute = self.run.opt.checkpointing.enabled, self.precision.compute
        casts = compute != torch.float32 and not recomputed  # autocast's, of the weights
        moments = optim.state_bytes(self.cfg.optimizer)
        self.memory = StateMemory.of_training(size, size, half_copies=casts, moments=moments)
        longest = int(self.train_rows.lengths.max())
        row = models.activation_bytes(self.cfg.model, longest, compute, recomputed)
        held = self.memory.on_rank(self.model, rollout=False)
        fit(row_limit, lambda rows: held + rows * row, context)
        # Ranks cut their batches alike.
        row_limit.lower(min(context.gather_objects(row_limit.rows)))
        share = -(-self.cfg.batch_size // context.world_size)
        held, single = min(row_limit.rows, share) * row, share <= row_limit.rows
        self.peak = training_peak(self.model, self.memory, held, single)

    def gather(self) -> dict[str, Tensor] | None:
        """Return the full weights of a sharded model for `export`, on rank 0; else None."""
        return sharding_of(self.model).whole()

    def export(self, folder: Path, weights: dict[str, Tensor] | None) -> Path:
        """Write FOLDER/model, and the predictions and the confusion matrix of its test to
        FOLDER.
        """
        classes, tested, place = self.task.classes, self.tested, folder / "model"
        models.export(self.model, self.cfg.model, classes, self.tokenizer, place, weights)
        labels, best = torch.from_numpy(self.test_rows.labels), tested.max(1)
        table = confusion(labels, best.indices, len(classes)).tolist()
        content = {"classes": classes, "rows_are": "true class", "table": table}
        write_text(folder / "confusion.json", json.dumps(content) + "\n")
        predictions = zip(labels.tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
        places = [{"place": row.place} if row.place else {} for row in self.task.rows("test")]
        lines = [
            {"row": i, **places[i], "class": classes[label], "predicted": classes[j]}
            | {"probability": round(p, 4)}
            for i, (label, j, p) in enumerate(predictions)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        write_text(folder / "predictions.jsonl", text)
        if len(classes) <= SHOWN:
            rows = [[name, *map(str, line)] for name, line in zip(classes, table, strict=True)]
            text = "\n".join(align([["true \\ predicted", *classes], *rows], left=1))
            log.info("\n%s", text)
        return place

    def wake(self) -> None:
        """Do nothing: a classifier has no engine."""

    def close(self) -> None:
        """Do nothing: the loader's workers end with their iterator."""
