"""GRPO, the loop: sample groups, reward, advantage, loss, backward, step.

    python launch.py algo=grpo task=chess
    python launch.py algo=grpo task=countdown hardware=rtx4090 'opt=[amp,compile,ddp]'

After "DeepSeekMath" (arXiv:2402.03300), with the losses of Dr. GRPO, DAPO, BNPO, GSPO and CISPO
(grpo/loss.py). Departures: one exact denominator for an optimizer step, whatever the micro-batches
and ranks; groups without variance are replaced; the prompt is computed once a group in training as
in sampling; no dropout anywhere.
"""

import copy
import logging
import sys
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from common import checkpoint, hardware, loop, nonfinite, optim, precision, resume
from common.config import ConfigError, Run
from common.distributed import fsdp
from common.distributed.context import Context
from common.evaluation import evaluate
from common.model import logprobs
from common.model.prompts import stop_ids
from common.report import summary
from common.report.tracker import closed_on_error
from common.sampling.native import Sampler
from common.signals import EXIT_NUMBERS, RunStopped, StopSignal
from common.tasks import Task, build
from common.timer import Timer
from grpo.config import GrpoConfig, check_switches
from grpo.groups import Group, Roller
from grpo.loss import Counts, advantages, policy_loss
from grpo.plan import plan

log = logging.getLogger("clutch")

# Sums over tokens -> what the log calls their mean. gap: between the log-probabilities of the
# sampler and of the trainer.
PER_TOKEN = {
    "entropy": "entropy",
    "clipped": "clipped",
    "ratio_kl": "ratio_kl",
    "kl": "kl",
    "gap": "sampler_gap",
}


def train(run: Run, context: Context, task: Task | None = None) -> summary.Result:
    """Train a model on a task with GRPO. Every rank returns the same numbers; rank 0 writes.

    Raises: ConfigError for settings that cannot work; RunStopped after a signal, a guard, or on NaN
    or infinity.
    """
    settings: GrpoConfig = run.algo
    check_switches(run, settings)
    device = context.device.device
    task = task or build(run.task)
    numbers = precision.resolve(run.opt, device)
    model, tokenizer = loop.load(run, task, context)
    logprobs.prepare(model)
    optim.no_dropout(model)
    reference = copy.deepcopy(model).requires_grad_(False) if settings.kl.beta else None
    if reference is not None and run.opt.offload.enabled:
        reference.to("cpu")
    fsdp.shard([model, reference], run, context, numbers)
    policy = Policy(model, run, context, numbers)
    guards = optim.Guards(numbers.scaler)

    resumed = resume.find(run, context)
    state: dict[str, Any] = {
        "step": 0,
        "cursor": 0,
        "passes_left": 0,
        "seconds": 0.0,
        "tracker": {},
    }
    state |= {"generated": 0, "evaluations": 0, "skipped": 0}
    if resumed is not None:
        policy.load(resumed)
        state |= resumed.state["run"]
        if state["passes_left"] and not loop.reached(state["step"], settings.steps):
            raise ConfigError(
                f"algo.steps={settings.steps} goes on from step {state['step']}, which ended a run"
                f" with {state['passes_left']} of algo.passes={settings.passes} over its last"
                " rollout to come; that rollout is gone. Start anew with another hydra.run.dir."
            )

    unusual = nonfinite.NotFinite(run, context, state["skipped"])
    order = loop.Order(task.examples("train"), run.seed)
    held_out = loop.held_out(task, run)
    sampler = Sampler(
        model,
        pad_id=tokenizer.pad_token_id,
        stop_ids=stop_ids(model, tokenizer),
        rows=settings.rows_per_forward,
        compile_mode=run.opt.compile.mode if run.opt.compile.enabled else None,
        graphs=run.hardware.cuda_graphs,
        autocast=None if numbers.compute == torch.float32 else numbers.compute,
    )
    sampler.rows, policy.rows = plan(
        run, context, sampler, tokenizer, task, order, held_out, numbers
    )
    roller = Roller(run, context, sampler, tokenizer, task, order, reference, numbers, policy.rows)

    def measure() -> Any:
        return evaluate(
            sampler, tokenizer, task, held_out, settings.sampling.max_new_tokens, context
        )

    tracker = loop.begin(run, context, task, held_out, state, settings.steps, measure)
    loop.start_line(tracker, run, state, settings.steps)
    spending = loop.Spending(run, context, state["generated"], state["seconds"])
    with (
        closed_on_error(tracker),
        closing(roller.scorer),
        StopSignal() as stop,
        summary.profiled(run, context) as traced,
    ):
        phases = Timer()
        while not loop.reached(state["step"], settings.steps) and not spending.spent:
            started, first_step = time.perf_counter(), state["step"]
            rollout, state["cursor"] = roller.roll(first_step, state["cursor"], phases)
            state["generated"] += rollout.generated
            state["evaluations"] += rollout.completions
            rewards = torch.tensor([group.rewards for group in rollout.groups], dtype=torch.float64)
            advantage = advantages(rewards, settings.advantage) if rollout.groups else rewards
            refused = None
            if not rollout.finite:
                refused = unusual.met(
                    first_step + 1, "NaN or infinity in a reward or logits", rollout.offending
                )
            elif not rollout.groups and context.main:
                log.warning("step %d: %s", first_step + 1, rollout.nothing_to_learn())
            if refused is not None:
                raise RunStopped(
                    f"step {first_step + 1}: {refused} {loop.last_good(context)}", EXIT_NUMBERS
                )

            # By group: log-probabilities of the policy that sampled, as the trainer computed them
            # in the first pass.
            olds: dict[int, list[Any]] = {}
            passes = settings.passes if rollout.groups else 1
            final = min(
                first_step + passes, settings.steps or sys.maxsize
            )  # a budget never cuts a rollout's passes
            for step in range(first_step, final):
                seen = (
                    policy.step(step, rollout.groups, advantage, olds, phases)
                    if rollout.groups
                    else {}
                )
                trouble = None
                if seen and (what := guards.not_finite(seen)) is not None:
                    trouble = unusual.met(
                        step + 1,
                        what,
                        policy.offending(task, rollout.groups, tokenizer),
                        guards.ADVICE,
                    )
                elif seen:
                    trouble = guards.trouble(seen) or settings.stop_at.crossed(seen)
                state["skipped"] = unusual.skipped
                state["step"] = step + 1
                event: dict[str, Any] = {}
                seconds = (
                    time.perf_counter() - started
                )  # of training: an evaluation's tokens are not counted either
                state["seconds"] += seconds
                spending.add(state["generated"], state["seconds"])
                if (
                    spending.evaluation_due(step + 1)
                    and not loop.reached(step + 1, settings.steps)
                    and not trouble
                ):
                    with phases("evaluate"):
                        held = measure()
                    event = loop.measured(tracker, task, held_out, step + 1, held)
                if tracker:
                    new = rollout.generated if step == first_step else 0
                    tracker.log(
                        {
                            "step": step + 1,
                            "seconds": seconds,
                            "phase_seconds": phases.seconds,
                            **rollout.record(),
                            **seen,
                            "generated_tokens": state["generated"],
                            "reward_evaluations": state["evaluations"],
                            "skipped_steps": state["skipped"],
                            "tokens_per_second": new / seconds,
                            "samples_per_second": (
                                (rollout.completions if step == first_step else 0) / seconds
                            ),
                            "peak_memory_gb": hardware.peak_memory_gb(device),
                            **event,
                        },
                        loop.done(run, state, settings.steps),
                    )
                    state["tracker"] = tracker.state()
                if trouble:
                    raise RunStopped(
                        f"step {step + 1}: {trouble} {loop.last_good(context)}", EXIT_NUMBERS
                    )
                started, phases = time.perf_counter(), Timer()
                traced()

            done = state["step"]
            state["passes_left"] = passes - (
                done - first_step
            )  # above 0 where the last step came before the last pass
            stopping = context.any(stop.name is not None)
            due = (
                run.checkpoint.every
                and done // run.checkpoint.every > first_step // run.checkpoint.every
            )
            last = spending.spent or loop.reached(done, settings.steps)
            if due or stopping or last:
                with phases("checkpoint"):  # in the next step's record
                    loop.save(tracker, done, lambda: policy.save(state))
                    context.barrier()
            if stopping and not last:
                raise loop.stopped(context, done - 1, settings.steps)

    if tracker:
        tracker.summary({"last_checkpoint_seconds": phases.seconds.get("checkpoint", 0.0)})
    return loop.finish(
        *(run, context, task, model, tokenizer, held_out, state, measure(), numbers.name, tracker),
        ended_by=spending.ended_by,
    )


class Policy:
    """The model being trained, with its optimizer: one exact optimizer step over groups, shared out
    over ranks.
    """

    def __init__(
        self, model: Any, run: Run, context: Context, numbers: precision.Precision
    ) -> None:
        self.model, self.run, self.context, self.numbers = model, run, context, numbers
        self.settings: GrpoConfig = run.algo
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.updater = optim.Updater(parameters, self.settings, numbers, context.device.device)
        self.rows = self.settings.micro_batch_rows
        # Of each micro-batch of the last step: its rows, and whether their log-probabilities are
        # not finite, on the device.
        self.watched: list[tuple[list[tuple[int, int]], torch.Tensor]] = []
        if run.opt.checkpointing.enabled:
            optim.checkpoint_activations(model)

    def step(
        self,
        step: int,
        groups: list[Group],
        advantage: torch.Tensor,
        olds: dict[int, list[Any]],
        phases: Timer,
    ) -> dict[str, float]:
        """One optimizer step on `groups` with their advantages [groups, G]. Returns what goes into
        the log.

        olds: by group, filled in a rollout's first pass and used in later ones.
        """
        first_pass = not olds

        def attempt(rows: int) -> dict[str, float]:
            self.updater.clear()
            self.watched.clear()
            if (
                first_pass
            ):  # what an attempt that ran out of memory left: the ratio is to be exactly 1
                olds.clear()
            return self._backward(groups, advantage, olds, rows)

        with phases("train"):
            self.model.train(
                self.run.opt.checkpointing.enabled
            )  # a checkpointed block wants training mode
            totals, self.rows = hardware.halving(
                attempt,
                self.rows,
                fsdp.floor(self.model, self.rows, 1),
                key="algo.micro_batch_rows",
            )
            # bnpo counts the micro-batches of all ranks, so when memory runs out on one, all cut
            # theirs as it does.
            while (fewest := min(held := self.context.gather_objects(self.rows))) < max(held):
                if self.rows > fewest:
                    totals, self.rows = hardware.halving(attempt, fewest, floor=1)
        with phases("exchange"):
            optim.sum_gradients(self.updater.parameters)
            names = sorted(totals)
            device = self.context.device.device
            summed = self.context.sum(
                torch.tensor([totals[n] for n in names], dtype=torch.float64, device=device)
            )
            totals = dict(zip(names, summed.tolist(), strict=True))
        with phases("update"):
            updated = self.updater.step(self.lr(step), totals["loss"])
        tokens = max(1.0, totals["tokens"])
        return {
            **updated,
            **{shown: totals[name] / tokens for name, shown in PER_TOKEN.items()},
        }

    def offending(self, task: Task, groups: list[Group], tokenizer: Any) -> list[dict[str, Any]]:
        """The rows of this rank whose log-probabilities are not finite; all of them where only
        their gradient is not.
        """
        watched = [
            pair for keys, bad in self.watched for pair in zip(keys, bad.tolist(), strict=True)
        ]
        broken = [key for key, is_bad in watched if is_bad]
        found = []
        for index, row in sorted(broken or [key for key, _ in watched]):
            group = groups[index]
            text = tokenizer.decode(group.completions[row])
            found.append(nonfinite.row(task, group.example, text, group.scores[row], bool(broken)))
        return found

    def lr(self, step: int) -> float:
        """The learning rate of a 0-based step: linear warm-up, then the schedule."""
        settings = self.settings
        warm = min(1.0, (step + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
        return settings.lr * warm * settings.lr_schedule.factor(step, settings.steps)

    def _backward(
        self, groups: list[Group], advantage: torch.Tensor, olds: dict[int, list[Any]], rows: int
    ) -> dict[str, float]:
        """Accumulate the gradient of this rank's groups. Returns sums over its tokens."""
        context, settings = self.context, self.settings
        device = context.device.device
        every = [
            micro_batches(groups, range(rank, len(groups), context.world_size), rows)
            for rank in range(context.world_size)
        ]
        counts = Counts(
            rows=sum(sum(group.carries) for group in groups),
            tokens=sum(
                len(c) for g in groups for c, ok in zip(g.completions, g.carries, strict=True) if ok
            ),
            micro_batches=sum(len(batches) for batches in every),
        )
        # Summed on the device: reading a number after each micro-batch would wait for it.
        totals = {
            name: torch.zeros((), dtype=torch.float64, device=device)
            for name in ("loss", "tokens", *PER_TOKEN)
        }
        half = self.numbers.compute != torch.float32
        for batch in every[context.rank]:
            chosen = [(groups[index], part) for index, part in batch]
            laid = logprobs.group(
                [g.prompt for g, _ in chosen], [g.completions[p] for g, p in chosen], device
            )
            width = laid.mask.shape[1]
            mask = (
                laid.mask
                & torch.tensor([ok for g, p in chosen for ok in g.carries[p]], device=device)[
                    :, None
                ]
            )

            def padded(values: list[list[float]], width: int = width) -> torch.Tensor:
                return torch.tensor(
                    [row + [0.0] * (width - len(row)) for row in values], device=device
                )

            with torch.autocast(device.type, self.numbers.compute, enabled=half):
                logp, entropy = logprobs.token_logprobs(
                    self.model, laid, settings.sampling.temperature
                )
            key = [
                (index, row)
                for index, part in batch
                for row in range(len(groups[index].completions))[part]
            ]
            self.watched.append((key, (~torch.isfinite(logp.detach()) & mask).any(1)))
            if all(index in olds and olds[index][row] is not None for index, row in key):
                old = padded([olds[index][row].tolist() for index, row in key])
            else:
                old = logp.detach()
                for (index, row), values in zip(key, old, strict=True):
                    kept = olds.setdefault(index, [None] * len(groups[index].completions))
                    kept[row] = values[: len(groups[index].completions[row])].clone()
            ref = None
            if settings.kl.beta and settings.kl.where == "loss":
                ref = padded([row for g, p in chosen for row in (g.reference or [])[p]])
            sampled = padded([row for g, p in chosen for row in g.logprobs[p]])
            weights = torch.cat([advantage[index, part] for index, part in batch]).to(
                device, torch.float32
            )
            loss, sums = policy_loss(
                logp, old, weights, mask, counts, settings, ref=ref, entropy=entropy
            )
            self.updater.scaler.scale(loss).backward()
            totals["loss"] += loss.detach()
            totals["tokens"] += mask.sum()
            totals["gap"] += ((logp.detach() - sampled).abs() * mask).sum()
            for name, value in sums.items():
                totals[name] += value
        if fsdp.of(self.model):
            logprobs.keep_step(self.model, max(map(len, every)) - len(every[context.rank]), device)
        return {name: value.item() for name, value in totals.items()}

    def save(self, state: dict[str, Any]) -> Path:
        """Write a checkpoint with all that the next step needs. Every rank calls it. Returns its
        folder.
        """
        return fsdp.save(
            self.context,
            self.context.out_dir / "checkpoints",
            state["step"],
            {name: parameter.detach() for name, parameter in self.model.named_parameters()},
            {"run": state, "config": asdict(self.run)},
            self.updater.state(),
            keep=self.run.checkpoint.keep,
        )

    def load(self, saved: checkpoint.Checkpoint) -> None:
        """Take over a checkpoint's weights, optimizer and scaler."""
        self.updater.load(
            fsdp.restore(saved, dict(self.model.named_parameters()), self.updater.fresh)
        )


def micro_batches(groups: list[Group], indices: range, rows: int) -> list[list[tuple[int, slice]]]:
    """Forwards of at most `rows` completions: lists of (group, which of its completions).

    Groups of like length go together, so that little is padding; a group larger than `rows` is
    split.
    """
    longest = {i: max(len(c) for c in groups[i].completions) for i in indices}
    ordered = sorted(indices, key=lambda i: (longest[i], i))
    if not ordered:
        return []
    size = len(groups[ordered[0]].completions)
    if size > rows:
        return [[(i, slice(s, min(s + rows, size)))] for i in ordered for s in range(0, size, rows)]
    each = rows // size
    return [
        [(i, slice(0, size)) for i in ordered[s : s + each]] for s in range(0, len(ordered), each)
    ]
