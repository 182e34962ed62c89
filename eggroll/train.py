"""EGGROLL, the loop: perturb, sample, score, shape, update.

    python launch.py algo=eggroll hardware=a100_40g
    python launch.py algo=eggroll 'opt=[amp,ddp]' algo.members=1024

After "Evolution Strategies at the Hyperscale" (arXiv:2511.16652), algorithm 1. Departures: any
Hugging Face decoder with a key-value cache and a parallel prefill; all members answer the same
prompts of a step; weight decay pulls towards the initial weights (arXiv:2605.30148). Ranks share
members out and exchange rewards alone; all make the same update.
"""

import logging
import math
import tempfile
import time
import weakref
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import checkpoint, hardware, loop, nonfinite, optim, precision, resume
from common.config import ConfigError, Run
from common.distributed import fsdp
from common.distributed.context import Context
from common.evaluation import evaluate
from common.model.prompts import encode_prompts, stop_ids
from common.report import summary
from common.report.tracker import closed_on_error
from common.sampling.engine import Completions
from common.sampling.native import Sampler
from common.signals import EXIT_NUMBERS, RunStopped, StopSignal
from common.tasks import Example, Task, build
from common.tasks.scoring import Scorer
from common.timer import Timer
from eggroll.config import EggrollConfig, check_switches
from eggroll.fitness import fitness
from eggroll.noise import Noise

log = logging.getLogger("clutch")


def train(run: Run, context: Context, task: Task | None = None) -> summary.Result:
    """Evolve a model on a task. Every rank returns the same numbers; rank 0 writes.

    Raises: ConfigError for settings that cannot work; RunStopped after a signal, or on NaN or
    infinity.
    """
    settings: EggrollConfig = run.algo
    check_switches(run.opt)
    device = context.device.device
    task = task or build(run.task)
    numbers = precision.resolve(run.opt, device)
    model, tokenizer = loop.load(run, task, context)
    model.requires_grad_(False)
    fsdp.shard([model], run, context, numbers)
    noise = Noise(
        model, settings.noise, rank=settings.rank, mirrored=settings.mirrored, seed=run.seed
    )
    if settings.rank != 1 and all(address.policy == "full" for address in noise.addresses):
        raise ConfigError(
            f"algo.rank={settings.rank} has no effect: nothing has low-rank noise. Set algo.rank=1."
        )
    weights = Weights(
        model,
        noise,
        settings,
        numbers.compute,
        offload=run.opt.offload.enabled,
        folder=context.out_dir,
    )

    resumed = resume.find(run, context)
    state: dict[str, Any] = {
        "step": 0,
        "seconds": 0.0,
        "generated": 0,
        "evaluations": 0,
        "skipped": 0,
        "tracker": {},
    }
    if resumed is not None:
        weights.load(resumed)
        state |= resumed.state["run"]
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
    )
    rows = sampler.rows = plan(
        run, context, sampler, weights, noise, tokenizer, task, order, held_out, numbers.name
    )
    population = Population(run, sampler, noise, tokenizer, task, context, rows)

    def measure() -> Any:
        return evaluate(
            sampler, tokenizer, task, held_out, settings.sampling.max_new_tokens, context
        )

    tracker = loop.begin(run, context, task, held_out, state, settings.steps, measure)
    loop.start_line(tracker, run, state, settings.steps)
    spending = loop.Spending(run, context, state["generated"], state["seconds"])
    last = spending.spent or loop.reached(state["step"], settings.steps)
    compiling: dict[str, float] = {}
    if run.opt.compile.enabled and not last:
        # A rehearsal whose rewards are thrown away, so that the first step's time is that of a
        # step.
        began = time.perf_counter()
        rehearsed = order.take(state["step"] * settings.prompts_per_step, settings.prompts_per_step)
        population.rewards(
            rehearsed, state["step"], state["step"] // settings.noise_reuse, settings.sigma, Timer()
        )
        compiling = {"compile_seconds": time.perf_counter() - began}
        if context.main:
            log.info("compiled in %.0f s", compiling["compile_seconds"])
    with (
        closed_on_error(tracker),
        closing(population.scorer),
        StopSignal() as stop,
        summary.profiled(run, context) as traced,
    ):
        while not last:
            step = state["step"]
            started, phases = time.perf_counter(), Timer()
            sigma = settings.sigma * settings.sigma_schedule.factor(step, settings.steps)
            lr = settings.lr * settings.lr_schedule.factor(step, settings.steps)
            draw = step // settings.noise_reuse
            examples = order.take(step * settings.prompts_per_step, settings.prompts_per_step)

            rewards, generated = population.rewards(
                examples, step, draw, sigma, phases
            )  # [members, rows a member]
            moved, trouble = {}, None
            if torch.isfinite(rewards).all():
                shaped = fitness(
                    rewards, settings.fitness, settings.samples_per_prompt
                )  # [members]
                with phases("update"):
                    drift = weights.update(noise, draw, shaped, lr)
                if not math.isfinite(drift):
                    raise RunStopped(
                        f"step {step + 1}: weights are not finite. {loop.last_good(context)}",
                        EXIT_NUMBERS,
                    )
                moved = {
                    "zero_fitness": without_influence(shaped, settings.mirrored),
                    "drift": drift,
                }
                trouble = settings.stop_at.crossed(drift)
            elif (
                trouble := unusual.met(
                    step + 1, "NaN or infinity in a reward or logits", population.offending
                )
            ) is not None:
                raise RunStopped(
                    f"step {step + 1}: {trouble} {loop.last_good(context)}", EXIT_NUMBERS
                )
            state["skipped"] = unusual.skipped

            state["step"] = step + 1
            state["generated"] += generated
            state["evaluations"] += rewards.numel()
            event: dict[str, Any] = compiling
            compiling = {}
            seconds = (
                time.perf_counter() - started
            )  # of training: an evaluation's tokens are not counted either
            state["seconds"] += seconds
            last = spending.add(state["generated"], state["seconds"]) or loop.reached(
                step + 1, settings.steps
            )
            if spending.evaluation_due(step + 1) and not last and not trouble:
                with phases("evaluate"):
                    seen = measure()
                event |= loop.measured(tracker, task, held_out, step + 1, seen)
            if tracker:
                tracker.log(
                    {
                        "step": step + 1,
                        "seconds": seconds,
                        "phase_seconds": phases.seconds,
                        "reward": rewards.mean().item(),
                        "reward_best": rewards.mean(1).max().item(),
                        "reward_std": rewards.mean(1).std(correction=0).item(),
                        **moved,
                        "state_memory_gb": weights.memory_gb,
                        "sigma": sigma,
                        "lr": lr,
                        "generated_tokens": state["generated"],
                        "reward_evaluations": state["evaluations"],
                        "skipped_steps": state["skipped"],
                        "tokens_per_second": generated / seconds,
                        "samples_per_second": rewards.numel() / seconds,
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
            stopping = context.any(stop.name is not None)
            due = run.checkpoint.every and (step + 1) % run.checkpoint.every == 0
            if due or stopping or last:
                loop.save(tracker, step + 1, lambda: weights.save(run, context, state))
            context.barrier()
            traced()
            if stopping:
                raise loop.stopped(context, step, settings.steps)

    return loop.finish(
        *(run, context, task, model, tokenizer, held_out, state, measure(), numbers.name, tracker),
        ended_by=spending.ended_by,
    )


class Population:
    """Samples and scores all members of a step, in chunks that the ranks share out."""

    def __init__(
        self,
        run: Run,
        sampler: Sampler,
        noise: Noise,
        tokenizer: Any,
        task: Task,
        context: Context,
        rows: int,
    ) -> None:
        self.settings: EggrollConfig = run.algo
        self.sampler, self.noise, self.tokenizer = sampler, noise, tokenizer
        self.task, self.context, self.seed, self.rows = task, context, run.seed, rows
        self.scorer = Scorer(task, run.scoring)
        self.offending: list[
            dict[str, Any]
        ] = []  # this rank's rows of the step that are not finite

    def rewards(
        self, examples: list[Example], step: int, draw: int, sigma: float, phases: Timer
    ) -> tuple[Tensor, int]:
        """Rewards float64 [members, prompts * samples], on every rank the same, and tokens
        generated by all ranks.

        The reward of a row whose logits were not finite is NaN.
        """
        settings, context = self.settings, self.context
        prompts = encode_prompts(
            self.tokenizer, [self.task.prompt(example) for example in examples]
        )
        repeated = [example for example in examples for _ in range(settings.samples_per_prompt)]
        rewards = torch.zeros(settings.members, len(repeated), dtype=torch.float64)
        generated, self.offending = 0, []
        mine = chunks(settings, self.rows, context.world_size)[context.rank :: context.world_size]
        for members in fsdp.each(self.sampler.model, mine):

            def sample(rows: int, members: range = members) -> list[Completions]:
                self.sampler.rows = rows
                made = []
                for part in parts(members, settings, rows):  # one, unless memory has just run out
                    with self.noise.members(draw, part, sigma):
                        made.append(
                            self.sampler.generate(
                                prompts,
                                settings.sampling,
                                samples_per_prompt=settings.samples_per_prompt,
                                seed=self.seed,
                                draw=step,
                                prompt_ids=[example.id for example in examples],
                                groups=len(part),
                            )
                        )
                return made

            with phases("rollout"):
                floor = fsdp.floor(self.sampler.model, self.rows, 2 if settings.mirrored else 1)
                made, self.rows = hardware.halving(sample, self.rows, floor)
                texts = [text for part in made for text in part.texts(self.tokenizer)]
                generated += sum(part.generated for part in made)
            with phases("reward"):
                scores = self.scorer.submit(repeated * len(members), texts).result().rewards
                broken = [bad for part in made for bad in part.broken.tolist()]
                for row, (score, bad) in enumerate(zip(scores, broken, strict=True)):
                    if bad or not math.isfinite(score):
                        member, place = divmod(row, len(repeated))
                        found = nonfinite.row(self.task, repeated[place], texts[row], score, bad)
                        self.offending.append({"member": members[member], **found})
                        scores[row] = math.nan
                rewards[members.start : members.stop] = torch.tensor(
                    scores, dtype=torch.float64
                ).view(len(members), -1)
        with phases("exchange"):
            held = torch.zeros(context.world_size, dtype=torch.float64)
            held[context.rank] = self.rows
            totals = torch.cat(
                (rewards.flatten(), torch.tensor([generated], dtype=torch.float64), held)
            )
            totals = context.sum(totals.to(context.device.device)).cpu()
        # A rank whose memory ran out takes fewer rows from now on, and so must all: members are
        # shared out by them.
        self.rows = int(totals[rewards.numel() + 1 :].min())
        return totals[: rewards.numel()].view_as(rewards), int(totals[rewards.numel()])


def chunks(settings: EggrollConfig, rows: int, ranks: int) -> list[range]:
    """Members of each forward: as many as `rows` holds, and few enough that every rank has a
    forward.

    Chunks change the result by float rounding alone; where they are the same on one rank and on
    two, as when one rank makes two forwards of equal size, a CPU gives the same bits.
    """
    pair = 2 if settings.mirrored else 1
    share = -(-settings.members // (ranks * pair)) * pair
    return parts(range(settings.members), settings, min(rows, share * row_count(settings)))


def parts(members: range, settings: EggrollConfig, rows: int) -> list[range]:
    """Cut `members` into parts of as many whole pairs as `rows` holds, one pair at least."""
    pair = 2 if settings.mirrored else 1
    size = max(pair, rows // row_count(settings) // pair * pair)
    return [members[start : start + size] for start in range(0, len(members), size)]


def row_count(settings: EggrollConfig) -> int:
    """Completions of one member a step."""
    return settings.prompts_per_step * settings.samples_per_prompt


class Stored:
    """Tensors that are needed a moment each step: in a file without a name, which ends with the
    process, however it ends.

    float32 on the CPU when read. Raises: OSError with the folder where there is no room.
    """

    def __init__(self, tensors: dict[str, Tensor], folder: Path) -> None:
        self.places: dict[str, tuple[int, torch.Size]] = {}
        self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (open as long as this object lives)
        weakref.finalize(self, self.file.close)
        try:
            for name, tensor in tensors.items():
                self.places[name] = self.file.tell(), tensor.shape
                self.file.write(tensor.detach().float().cpu().contiguous().numpy())  # type: ignore[arg-type]
            self.file.flush()
        except OSError as error:
            with suppress(OSError):  # what could not be written cannot be written now either
                self.file.close()
            raise OSError(
                error.errno, f"the initial weights cannot be kept there: {error.strerror}", folder
            ) from error

    def __getitem__(self, name: str) -> Tensor:
        offset, shape = self.places[name]
        tensor = torch.empty(shape)
        self.file.seek(offset)
        read = self.file.readinto(tensor.numpy())  # type: ignore[attr-defined]
        if read != tensor.nbytes:
            raise OSError(
                f"the initial weights of {name} cannot be read back: {read} of {tensor.nbytes}"
                " bytes came."
            )
        return tensor


class Weights:
    """The perturbed weights: float32 masters, what the forward uses, the initial ones, and their
    optimizers.

    Training is to take hardly more memory than sampling does: the initial weights lie in a file of
    `folder` and are read for each update, which goes parameter by parameter. In float32 the forward
    uses the masters; else they are beside what it uses, on the CPU with `offload`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        noise: Noise,
        settings: EggrollConfig,
        compute: torch.dtype,
        *,
        offload: bool,
        folder: Path,
    ) -> None:
        self.settings, self.compute, self.model = settings, compute, model
        self.memory_gb: float | None = None  # of weights and optimizer state on this rank
        names = [address.name for address in noise.addresses]
        parameters = dict(model.named_parameters())
        # What this rank holds of them.
        self.initial = Stored({n: fsdp.local(parameters[n]) for n in names}, folder)
        # |W0|^2
        self.started = sum(
            fsdp.local(parameters[n]).detach().square().sum().double().item() for n in names
        )
        if compute == torch.float32 or fsdp.of(model):
            self.masters = {n: parameters[n] for n in names}
        else:
            self.masters = {
                n: parameters[n].detach().to("cpu" if offload else parameters[n].device, copy=True)
                for n in names
            }
            model.to(compute)
        self.used = {n: dict(model.named_parameters())[n] for n in names}
        kind = optim.optimizer_class(settings.optimizer)
        try:
            # One for each parameter, so that a gradient is used and dropped before the next is
            # made.
            options: dict[str, Any] = {"lr": settings.lr, **settings.optimizer.kwargs}
            self.optimizers = {n: kind([m], **options) for n, m in self.masters.items()}
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"algo.optimizer.kwargs={settings.optimizer.kwargs}: {error}"
            ) from None

    @torch.no_grad()
    def update(self, noise: Noise, draw: int, shaped: Tensor, lr: float) -> float:
        """One optimizer step along the ES gradient. Returns the drift: |W - W0| / |W0| over all
        perturbed weights.
        """
        moved = 0.0
        for name, gradient in noise.gradients(draw, shaped):
            master, optimizer = self.masters[name], self.optimizers[name]
            gradient = gradient.to(master.device)
            initial = self.initial[name].to(master.device)
            if self.settings.weight_decay:
                gradient.add_(fsdp.local(master) - initial, alpha=self.settings.weight_decay)
            master.grad = fsdp.like(master, gradient)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            master.grad = gradient = None
            if self.used[name] is not master:
                self.used[name].copy_(master)
            moved += initial.sub_(fsdp.local(master)).square_().sum().double().item()
            del initial  # before the next gradient is made
        if self.memory_gb is None:
            self.memory_gb = fsdp.measured(
                [list(self.model.parameters()), self.masters, self.extra()]
            )
        both = fsdp.total(
            self.model,
            torch.tensor((moved, self.started), dtype=torch.float64, device=noise.device),
        )
        return float((both[0] / both[1].clamp(min=1e-30)).sqrt())

    def save(self, run: Run, context: Context, state: dict[str, Any]) -> Path:
        """Write a checkpoint with all that the next step needs. Every rank calls it. Returns its
        folder.
        """
        tensors = {name: master.detach() for name, master in self.masters.items()}
        return fsdp.save(
            context,
            context.out_dir / "checkpoints",
            state["step"],
            tensors,
            {"run": state, "config": asdict(run)},
            self.extra(),
            keep=run.checkpoint.keep,
        )

    def extra(self) -> dict[str, Any]:
        """Beside the weights, what a checkpoint holds."""
        return {
            "optimizers": {
                name: optimizer.state_dict() for name, optimizer in self.optimizers.items()
            }
        }

    def fresh(self) -> dict[str, Any]:
        """`extra` as it is after a first step."""
        for optimizer in self.optimizers.values():
            optim.step_nowhere(optimizer)
        return self.extra()

    @torch.no_grad()
    def load(self, saved: checkpoint.Checkpoint) -> None:
        """Take over a checkpoint's weights and optimizers."""
        if fsdp.names(saved) != set(self.masters):
            raise ConfigError(
                f"{saved.path} holds other parameters than this run perturbs. Start with resume=no."
            )
        extra = fsdp.restore(saved, dict(self.masters), self.fresh)
        for name, master in self.masters.items():
            self.used[name].copy_(master)
            self.optimizers[name].load_state_dict(extra["optimizers"][name])


def without_influence(shaped: Tensor, mirrored: bool) -> float:
    """Share of members that move nothing: fitness 0, or equal to that of the mirrored one. shaped
    [members].
    """
    idle = shaped[0::2] == shaped[1::2] if mirrored else shaped == 0
    return idle.double().mean().item()


def plan(
    run: Run,
    context: Context,
    sampler: Sampler,
    weights: Weights,
    noise: Noise,
    tokenizer: Any,
    task: Task,
    order: loop.Order,
    held_out: list[Example],
    dtype: str,
) -> int:
    """Print what will be done, with sizes. Returns the rows a forward, refitted to this device's
    memory.
    """
    settings: EggrollConfig = run.algo
    looked_at = [*order.take(0, 256), *held_out]
    prompt = max(len(ids) for ids in encode_prompts(tokenizer, [task.prompt(e) for e in looked_at]))
    tokens = settings.sampling.max_new_tokens
    if prompt + tokens > sampler.context:
        raise ConfigError(
            f"algo.sampling.max_new_tokens={tokens} and a prompt of {prompt} tokens exceed the"
            f" model's context of {sampler.context} tokens. Lower it to"
            f" {max(0, sampler.context - prompt)}, or shorten the prompts."
        )
    row = sampler.bytes_per_row(prompt, tokens)
    size = sum(p.numel() for p in sampler.model.parameters())
    perturbed = sum(m.numel() for m in weights.masters.values())
    chunk_directions = len(chunks(settings, settings.rows_per_forward, context.world_size)[0]) // (
        2 if settings.mirrored else 1
    )
    drawn = 4 * sum(4 * a.blocks for a in noise.addresses) * chunk_directions
    if fsdp.of(sampler.model):
        whole = 4.0 * size  # the model's own weights are the masters
        fixed = (
            whole / fsdp.share(sampler.model)
            + fsdp.gathered_bytes(sampler.model, rollout=True)
            + drawn
        )
    else:
        masters = 4 * perturbed * (dtype != "float32" and not run.opt.offload.enabled)
        whole = size * sampler.dtype.itemsize + masters
        fixed = whole + drawn
    share = (
        context.world_size if context.device.device.type == "cpu" else 1
    )  # ranks of a CPU share its memory
    pair = 2 if settings.mirrored else 1
    rows = hardware.fit_rows(
        settings.rows_per_forward, row, fixed, context.device.memory_gb / share, pair
    )
    forwards = chunks(settings, rows, context.world_size)
    used = min(rows, len(forwards[0]) * settings.prompts_per_step * settings.samples_per_prompt)
    compiled = f", compiled ({run.opt.compile.mode})" if run.opt.compile.enabled else ""
    summary.print_plan(
        {
            "algorithm": (
                f"eggroll, {loop.length(run, settings.steps, 'steps')}, rank {settings.rank}, sigma"
                f" {settings.sigma:g}, lr {settings.lr:g}"
            ),
            "task": (
                f"{getattr(task, 'name', type(task).__name__)}: {len(order.examples):,} training"
                f" examples, {len(held_out)} held out"
            ),
            "model": (
                f"{run.model.path or run.model.name}, {size / 1e6:.2f}M parameters,"
                f" {perturbed / 1e6:.2f}M perturbed"
            ),
            "device": (
                f"{context.device.name}, {context.device.memory_gb:.0f} GB;"
                f" hardware={run.hardware.name}"
            ),
            "numbers": f"{dtype}{compiled}, masters float32; attention {run.model.attention}",
            "ranks": str(context.world_size),
            "population": (
                f"{settings.members} members x {settings.prompts_per_step} prompts x"
                f" {settings.samples_per_prompt} samples, {tokens} new tokens at most"
            ),
            "forwards": (
                f"{len(forwards)} a step, {used} rows each (algo.rows_per_forward={rows}), "
                f"{-(-len(forwards) // context.world_size)} a rank"
            ),
            "memory": (
                f"about {(fixed + used * row) / 2**30:.2f} GB a"
                f" rank{fsdp.planned(sampler.model, whole)}"
            ),
            "folder": str(context.out_dir),
        }
    )
    if context.world_size > len(forwards):
        log.warning(
            "%d ranks share %d forward(s) a step, so some are idle. Use more members, or fewer"
            " ranks.",
            context.world_size,
            len(forwards),
        )
    summary.write_run(run, context.out_dir, context.device.name) if context.main else None
    return rows
