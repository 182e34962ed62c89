"""classify, the loop: batch, forward, backward, step; validate after each epoch; test with the best
weights.

    python launch.py algo=classify
    python launch.py algo=classify task=ag_news task.path=data/ag_news 'opt=[amp,compile,ddp]'

A transformer encoder trained from scratch, data-parallel with DistributedDataParallel
(arXiv:2006.15704). Departures: ranks may have different numbers of rows, and two ranks do what one
does at an equal batch; the order of rows and dropout are functions of seed and step, so a run that
is killed goes on with the next batch.

RUN/model is the best model, and checkpoints/ holds the newest weights and the best ones.
predictions.jsonl and confusion.json are of the test rows, which nothing is chosen by.
"""

import functools
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import checkpoint, hardware, loop, optim, precision, resume
from common.config import ConfigError, Run
from common.distributed import fsdp
from common.distributed.context import Context
from common.nonfinite import NotFinite
from common.report import summary
from common.report.tracker import Tracker, closed_on_error
from common.signals import EXIT_NUMBERS, RunStopped, StopSignal
from ddp_bench import models
from ddp_bench.config import ClassifyConfig, check_switches
from ddp_bench.data import Batches, Loader, Rows, held_out, prepare
from ddp_bench.metrics import confusion, measures
from ddp_bench.step import Clock, Stepper
from ddp_bench.tasks import ClassTask, made, majority

log = logging.getLogger("clutch")

BEST = "best."  # in front of the names of the best weights in a checkpoint


def train(run: Run, context: Context, task: ClassTask | None = None) -> summary.Result:
    """Train a classifier on a class task. Every rank returns the same; rank 0 writes.

    Raises: ConfigError for settings that cannot work; RunStopped after a signal, or on NaN or
    infinity.
    """
    settings: ClassifyConfig = run.algo
    check_switches(run, settings, context.world_size)
    device = context.device.device
    task = task or made(run.task)
    numbers = precision.resolve(run.opt, device)
    torch.backends.cudnn.benchmark = device.type == "cuda"
    data, tokenizer = prepare(task, settings.tokenizer, settings.model.max_tokens, log.info)
    loop.same_on_all_ranks(
        context, "rows of the task", data["train"].digest() + data["test"].digest()
    )
    rows, validation = held_out(data["train"], settings.validation_share, run.seed)
    model = models.build(settings.model, len(task.classes), tokenizer, data["train"], run.seed)
    model.to(device if context.mesh is None else "cpu")  # sharding takes it there block by block
    stepper = Stepper(model, run, context, numbers)

    batches = Batches(
        *(
            rows,
            data["train"].lengths,
            settings.batch_rows,
            settings.loader.bucket_batches,
            run.seed,
        ),
        *(context.rank, context.world_size),
    )
    loader = Loader(data["train"], batches, settings.loader, device)
    steps = settings.epochs * len(batches)
    state: dict[str, Any] = {"step": 0, "seconds": 0.0, "waited": 0, "best": None, "tracker": {}}
    state |= {"skipped": 0, "rows": data["train"].digest()}
    best: dict[str, Tensor] = {}
    resumed = resume.find(run, context)
    if resumed is not None:
        saved, best = load(stepper, resumed, state["rows"])
        state |= saved
    guards, unusual = optim.Guards(numbers.scaler), NotFinite(run, context, state["skipped"])
    plan(run, context, task, data, len(rows), len(validation), model, loader, numbers.name)

    tracker = (
        Tracker(run, context.out_dir, steps, state["step"], state["tracker"])
        if context.main
        else None
    )
    with closed_on_error(tracker), StopSignal() as stop, summary.profiled(run, context) as traced:
        feed, order = loader.from_step(state["step"]), []
        while state["step"] < steps and state["waited"] != settings.patience:
            started, clock, step = time.perf_counter(), Clock(device), state["step"]
            epoch, position = divmod(step, len(batches))
            order = order if order and position else batches.epoch(epoch)
            batch = next(feed)
            waited = time.perf_counter() - started
            seen = stepper.step(batch, len(order[position]), step, steps, clock)
            if (what := guards.not_finite(seen)) is not None:
                mine = order[position][context.rank :: context.world_size]
                trouble = unusual.met(
                    step + 1, what, offending(stepper, task, data["train"], mine), guards.ADVICE
                )
            else:
                trouble = guards.trouble(seen)
            state["skipped"] = unusual.skipped
            phases = {"data": waited, **clock.read()}
            seconds = time.perf_counter() - started
            state["step"], state["seconds"] = step + 1, state["seconds"] + seconds
            event: dict[str, Any] = {}
            if position == len(batches) - 1 and not trouble:
                event["epoch_done"] = epoch + 1
                if validation:
                    held = evaluate(model, data["train"], validation, context, stepper)
                    event["validation"] = found = measures(
                        torch.from_numpy(data["train"].labels[validation]), held
                    )
                    event["evaluate_seconds"] = time.perf_counter() - started - seconds
                    if state["best"] is None or found["accuracy"] > state["best"]["accuracy"]:
                        state["best"], state["waited"] = {"epoch": epoch + 1, **found}, 0
                        best = {name: t.detach().clone() for name, t in model.named_parameters()}
                    else:
                        state["waited"] += 1
            if tracker:
                tokens = sum(batches.lengths[row] for row in order[position])
                tracker.log(
                    {
                        "step": step + 1,
                        "epoch": (step + 1) / len(batches),
                        "seconds": seconds,
                        "phase_seconds": phases,
                        **seen,
                        "rows": len(order[position]),
                        "samples_per_second": len(order[position]) / seconds,
                        "tokens_per_second": tokens / seconds,
                        "peak_memory_gb": hardware.peak_memory_gb(device),
                        "skipped_steps": state["skipped"],
                        **event,
                    },
                    shown=shown(seen, event, epoch, len(order[position]) / seconds),
                )
                state["tracker"] = tracker.state()
            if trouble is not None:
                raise RunStopped(
                    f"step {step + 1}: {trouble} {loop.last_good(context)}", EXIT_NUMBERS
                )
            traced()
            stopping = context.any(stop.name is not None)
            due = run.checkpoint.every and state["step"] % run.checkpoint.every == 0
            if due or stopping or event:
                loop.save(tracker, step + 1, functools.partial(save, stepper, best, state))
            if stopping and state["step"] < steps:
                context.barrier()
                raise loop.stopped(context, step, steps)

    if best:
        restore(model, best)
    return finish(run, context, task, data, stepper, tokenizer, state, tracker)


def offending(
    stepper: Stepper, task: ClassTask, rows: Rows, chosen: Sequence[int]
) -> list[dict[str, Any]]:
    """The training rows among `chosen` whose probabilities are not finite; all of them where only
    their gradient is not.
    """

    def probabilities(which: Sequence[int]) -> Any:
        return models.probabilities_of(
            stepper.model, rows, which, stepper.rows, stepper.numbers.compute
        )

    with fsdp.forwards(stepper.model, idle=lambda: probabilities([0])):
        found = probabilities(chosen) if chosen else []
    broken = [
        row for row, part in zip(chosen, found, strict=True) if not torch.isfinite(part).all()
    ]
    given = list(task.rows("train"))
    return [
        {"id": row, "prompt": str(given[row].value), "answer": task.classes[given[row].label]}
        for row in broken or chosen
    ]


def shown(seen: dict[str, float], event: dict[str, Any], epoch: int, speed: float) -> str:
    """What the progress line says of a step."""
    text = f"epoch {epoch + 1}, loss {seen['loss']:.3f}, {speed:.0f} rows/s"
    if "validation" in event:
        text += f", validation accuracy {event['validation']['accuracy']:.2f}"
    return text


def evaluate(
    model: Any, rows: Rows, chosen: Sequence[int], context: Context, stepper: Stepper
) -> Tensor:
    """Class probabilities of the rows `chosen`, float64 [len(chosen), classes], from all ranks
    together.
    """
    mine = range(context.rank, len(chosen), context.world_size)
    found = torch.zeros(len(chosen), model.encoder.head.out_features, dtype=torch.float64)

    def probabilities(numbers: Sequence[int]) -> Tensor:
        return models.probabilities_of(model, rows, numbers, stepper.rows, stepper.numbers.compute)

    with fsdp.forwards(model, idle=lambda: probabilities([0])):
        if mine:
            found[list(mine)] = probabilities([chosen[i] for i in mine])
    return context.sum(found.to(context.device.device)).cpu()


def save(stepper: Stepper, best: dict[str, Tensor], state: dict[str, Any]) -> Path:
    """Write a checkpoint with all that the next step needs, and the best weights so far. Every rank
    calls it. Returns its folder.
    """
    weights = {name: parameter.detach() for name, parameter in stepper.model.named_parameters()}
    return fsdp.save(
        stepper.context,
        stepper.context.out_dir / "checkpoints",
        state["step"],
        weights | {f"{BEST}{name}": tensor for name, tensor in best.items()},
        {"run": state, "config": asdict(stepper.run)},
        stepper.updater.state(),
        keep=stepper.run.checkpoint.keep,
    )


def load(
    stepper: Stepper, saved: checkpoint.Checkpoint, rows: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Take over a checkpoint; returns the state of the run and the best weights. Raises:
    ConfigError for other rows.
    """
    state = saved.state["run"]
    if state["rows"] != rows:
        raise ConfigError(
            f"{saved.path} was made with other training rows. Give the same data, or start anew"
            " with another hydra.run.dir."
        )
    weights: dict[str, Tensor] = dict(stepper.model.named_parameters())
    best = (
        {name: torch.empty_like(t, requires_grad=False) for name, t in weights.items()}
        if state["best"]
        else {}
    )
    both = weights | {f"{BEST}{name}": tensor for name, tensor in best.items()}
    stepper.updater.load(fsdp.restore(saved, both, stepper.updater.fresh))
    return state, best


@torch.no_grad()
def restore(model: Any, weights: dict[str, Tensor]) -> None:
    """Copy weights into the model."""
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])


def plan(
    run: Run,
    context: Context,
    task: ClassTask,
    data: dict[str, Rows],
    trained: int,
    validated: int,
    model: Any,
    loader: Loader,
    dtype: str,
) -> None:
    """Print what will be done, with sizes."""
    if not context.main:
        return
    settings: ClassifyConfig = run.algo
    lengths, batches = data["train"].lengths, loader.batches
    share = -(-settings.batch_rows // context.world_size)
    forwards = -(-share // settings.micro_batch_rows)
    size = sum(p.numel() for p in model.parameters())
    ddp = settings.ddp
    summary.print_plan(
        {
            "algorithm": (
                f"classify, {settings.epochs} epochs of {len(batches)} steps, lr {settings.lr:g}"
            ),
            "task": (
                f"{getattr(task, 'name', type(task).__name__)}: {len(task.classes)} classes,"
                f" {trained:,} training rows, {validated:,} for validation, {len(data['test']):,}"
                f" for the test; tokens {lengths.mean():.0f} on average, {lengths.max()} at most"
            ),
            "model": (
                f"encoder, {settings.model.layers} layers of {settings.model.size},"
                f" {size / 1e6:.2f}M parameters"
            ),
            "device": (
                f"{context.device.name}, {context.device.memory_gb:.0f} GB;"
                f" hardware={run.hardware.name}"
            ),
            "numbers": (
                f"{dtype}{', GradScaler' if dtype == 'float16' else ''}, masters float32"
                f"{', compiled' if run.opt.compile.enabled else ''}"
            ),
            "ranks": (
                f"{context.world_size}"
                + (
                    f", {4 * size / 2**20:.1f} MB of gradients a step"
                    if context.world_size > 1
                    else ""
                )
                + (f", hook {ddp.hook}" if context.world_size > 1 and context.mesh is None else "")
            ),
            **(
                {"memory": fsdp.planned(model, 16 * size).removeprefix("; ")}
                if fsdp.of(model)
                else {}
            ),
            "batch": (
                f"{settings.batch_rows} rows: {share} a rank, in {forwards}"
                f" forward{'s' * (forwards > 1)}"
            ),
            "loader": (
                f"{loader.workers} worker processes a rank" if loader.workers else "in this process"
            ),
            "folder": str(context.out_dir),
        }
    )
    summary.write_run(run, context.out_dir, context.device.name)


def finish(
    run: Run,
    context: Context,
    task: ClassTask,
    data: dict[str, Rows],
    stepper: Stepper,
    tokenizer: Any,
    state: dict[str, Any],
    tracker: Tracker | None,
) -> summary.Result:
    """Test, export and summarise. `before` is what naming the most frequent training class would
    get.
    """
    test, labels = data["test"], torch.from_numpy(data["test"].labels)
    probabilities = evaluate(stepper.model, test, range(len(test)), context, stepper)
    weights = fsdp.whole(stepper.model)
    after = measures(labels, probabilities)
    guess = torch.full_like(labels, majority(task.rows("train")))
    before = measures(labels, torch.nn.functional.one_hot(guess, len(task.classes)).double())
    before.pop("loss")  # infinite
    result = summary.Result(
        algo=run.algo.name,
        task=getattr(task, "name", type(task).__name__),
        model=f"encoder {run.algo.model.layers}x{run.algo.model.size}",
        metric="accuracy",
        before=before["accuracy"],
        after=after["accuracy"],
        steps=state["step"],
        seconds=state["seconds"],
        generated_tokens=0,
        reward_evaluations=0,
        world_size=context.world_size,
        device=context.device.name,
        dtype=stepper.numbers.name,
        folder=str(context.out_dir),
        skipped_steps=state["skipped"],
        metrics={
            "before": before,
            "after": after,
            **({"validation": state["best"]} if state["best"] else {}),
        },
    )
    if tracker:
        tracker.summary(summary.headline(result))
        models.export(
            stepper.model,
            run.algo.model,
            task.classes,
            tokenizer,
            context.out_dir / "model",
            weights,
        )
        tracker.artifact("model", context.out_dir / "model", f"step-{state['step']}")
        tracker.close()
        predictions = probabilities.argmax(1)
        table = confusion(labels, predictions, len(task.classes))
        content = {"classes": task.classes, "rows_are": "true class", "table": table.tolist()}
        (context.out_dir / "confusion.json").write_text(
            json.dumps(content) + "\n", encoding="utf-8"
        )
        with (context.out_dir / "predictions.jsonl").open("w", encoding="utf-8") as file:
            for i, (label, predicted) in enumerate(
                zip(labels.tolist(), predictions.tolist(), strict=True)
            ):
                line = {
                    "row": i,
                    "class": task.classes[label],
                    "predicted": task.classes[predicted],
                }
                file.write(
                    json.dumps(line | {"probability": round(probabilities[i, predicted].item(), 4)})
                    + "\n"
                )
        result.save()
        summary.print_summary(result, [], f"{result.folder}/model (ddp_bench.models.load)")
        named = [
            {"true \\ predicted": name, **dict(zip(task.classes, map(str, line), strict=True))}
            for name, line in zip(task.classes, table.tolist(), strict=True)
        ]
        if len(named) <= 12:
            log.info("\n%s", summary.side_by_side(named))
    context.barrier()
    return result
