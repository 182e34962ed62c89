"""The trained model with its optimizer: one exact optimizer step, divided among the ranks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from common import optim
from common.checkpoint import Checkpoint
from common.config import ConfigError, unused
from common.distributed import restore_checkpoint, sharding_of
from common.memory import TRAIN_ROWS, Memory, RolloutMemory, RowLimit, count_state, fit_training
from common.model import logprobs, to_device
from common.optim import Rates, choose_lr
from common.parts import Parts
from common.session import Step
from grpo.collect import Batch
from grpo.config import GrpoConfig
from grpo.loss import BOUNDS, USUAL, off_policy_mask, sampler_weights

# Learning rates if algo.lr is auto. Measured: model=tiny and SmolLM2-135M-Instruct (LOG.md). At 7B:
# the defaults of TRL and verl, and their advice for an adapter.
RATES = Rates(
    weights=((0.9e6, 1e-4), (0.135e9, 3e-5), (7e9, 1e-6)), adapter=((0.135e9, 6e-4), (7e9, 1e-5))
)
# Sums over tokens -> the log's names of their means. gap: the absolute difference between the
# log-probabilities of sampler and trainer.
PER_TOKEN = {
    "entropy": "entropy",
    "clip_fraction": "clip_fraction",
    "approx_kl": "approx_kl",
    "gap": "sampler_gap",
}
# In addition, if the loss pulls towards a reference model.
PULLED = {"kl": "kl"}
# In addition, if weights correct for the gap. dropped: the tokens with the weight 0.
CORRECTED = {"weight": "sampler_weight", "dropped": "sampler_dropped"}

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # of a model's config.json

Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
MicroBatches = list[list[tuple[int, slice]]]  # per micro-batch: (group, slice of its completions)


def check_native(cfg: GrpoConfig, correction: str) -> None:
    """Raise ConfigError for settings that have no effect if the engine has the trainer's weights.

    Args: correction: the correction in use, after auto.
    """
    same = "with engine=native: samples are of the policy that learns from them, "
    unused(
        (
            cfg.correction_bounds is not None and correction == "off",
            f"algo.correction_bounds={cfg.correction_bounds}",
            f"{same}and algo.correction=auto is off",
        ),
        (
            cfg.off_policy_mask is not None and cfg.updates_per_rollout == 1 and not cfg.overlap,
            f"algo.off_policy_mask={cfg.off_policy_mask}",
            f"{same}with algo.num_iterations=1, algo.minibatches=1 and algo.overlap=0",
        ),
    )


class Policy:
    """Turns a rollout and its advantages into optimizer steps."""

    def __init__(self, parts: Parts, cfg: GrpoConfig) -> None:
        self.parts, self.model, self.cfg = parts, parts.lm.model, cfg
        check_dense(parts.lm.model.config)
        optim.check_repeatable(parts.lm.model.config, parts.lm.precision)
        self.trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        parameters = list(self.trained.values())
        self.peak_lr = choose_lr(parts, RATES)
        self.updater = optim.Updater(parameters, cfg, parts.lm.precision, parts.lm.device)
        self.guards = optim.Guards(parts.lm.precision.scaler)
        # The result of bnpo depends on the rows, so they are the same on every device.
        kind = "cpu" if cfg.loss == "bnpo" else parts.lm.device.type
        rows = cfg.train_rows or TRAIN_ROWS[kind]
        self.row_limit = RowLimit("algo.train_rows", rows, fixed=sharding_of(self.model).shared)
        # Per micro-batch of the last step: its rows, and whether their log-probabilities are not
        # finite, on the device.
        self.watched: list[tuple[Tensor, Tensor]] = []
        self.recomputed = parts.run.opt.checkpointing.enabled
        if self.recomputed:
            optim.checkpoint_activations(self.model)
        # An engine with weights of its own has other kernels, and so other probabilities.
        automatic = "sequence_mask" if parts.engine.separate else "off"
        self.correction = automatic if cfg.correction == "auto" else cfg.correction
        if cfg.against_sampler:
            self.correction = "off"  # the ratio itself is relative to the sampler
        if not parts.engine.separate:
            check_native(cfg, self.correction)
        least, most = cfg.correction_bounds or BOUNDS.get(self.correction, USUAL)
        self.bounds = least, most
        self.weighs = self.correction != "off" or cfg.off_policy_mask is not None
        self._fit_rows()

    def step(self, batch: Batch, advantage: Tensor, loss: Loss, update: Step) -> dict[str, float]:
        """Make one optimizer step on the groups of all ranks. Returns the numbers for its event.

        Args:
            advantage: float64 [P, G].
            loss: grpo.loss.policy_loss, or a function with the same arguments.
            update: the session's record of the step.
        """
        context = self.parts.context
        computed = torch.zeros_like(batch.logprobs)  # in this pass

        def attempt(rows: int) -> dict[str, float]:
            self.updater.clear()
            self.watched.clear()
            with self.parts.lm.training_forward():
                return self.backward(batch, advantage, loss, rows, computed)

        with update.phase("train"):
            self.model.train(self.recomputed)  # a checkpointed block wants training mode
            totals = self.row_limit.run(attempt)
            # bnpo counts the micro-batches of all ranks, so when memory runs out on one rank, all
            # ranks use its number of rows.
            while (fewest := min(held := context.gather_objects(self.row_limit.rows))) < max(held):
                if self.row_limit.rows > fewest:
                    self.row_limit.lower(fewest)
                    totals = self.row_limit.run(attempt)
            if batch.old_logprobs is None:
                batch.old_logprobs = computed
        with update.phase("exchange"):
            optim.sum_gradients(self.updater.parameters)
            names = sorted(totals)
            values = [totals[name] for name in names]
            summed = torch.tensor(values, dtype=torch.float64, device=self.parts.lm.device)
            totals = dict(zip(names, context.sum(summed).tolist(), strict=True))
        with update.phase("update"):
            updated = self.updater.step(self.lr(update), totals["loss"])
        tokens = max(1.0, totals["tokens"])
        shown = PER_TOKEN | (PULLED if self.cfg.kl.in_loss else {})
        shown |= CORRECTED if self.weighs else {}
        return updated | {name: totals[key] / tokens for key, name in shown.items()}

    def look_back(self, parts: Sequence[Batch], step: Step) -> None:
        """Compute the log-probabilities of the policy that sampled, for all parts but the first,
        because updates on earlier parts change the policy before the first pass over them. The
        first part gets them from its own first pass.
        """
        for part in parts[1:]:
            old_NT = torch.zeros_like(part.logprobs)

            def attempt(rows: int, part: Batch = part, old_NT: Tensor = old_NT) -> None:
                with self.parts.lm.training_forward():
                    for index, _, logp, _ in self._forward(part, self._cut(part, rows)):
                        old_NT[index, : logp.shape[1]] = logp

            with step.phase("train"), torch.no_grad(), sharding_of(self.model).gathered():
                self.model.train(self.recomputed)
                self.row_limit.run(attempt)
            part.old_logprobs = old_NT

    def rehearse(self) -> None:
        """With opt.compile.training, compile before the first step."""
        self.model.train(self.recomputed)
        self.parts.lm.rehearse_training()

    def check(self, numbers: dict[str, float], batch: Batch, update: Step) -> None:
        """Stop the update's run if a number is not finite, unless the policy for such numbers skips
        the step, or if a guard has tripped.
        """
        if (what := self.guards.not_finite(numbers)) is not None:
            rows = self._offending(batch)
            update.stop_if(update.handle_non_finite(what, rows, self.guards.ADVICE))
        else:
            update.stop_if(self.guards.trouble(numbers) or self.cfg.stop_at.crossed(numbers))

    def lr(self, update: Step) -> float:
        """Return the learning rate of an optimizer step: linear warm-up, then the schedule."""
        return self.peak_lr * optim.find_lr(self.cfg, update.index, update.progress)

    # --- for checkpoints

    def tensors(self) -> dict[str, Tensor]:
        """Return the trained tensors: all weights, or the adapter."""
        return dict(self.trained)

    def extra(self) -> dict[str, Any]:
        """Return the state of optimizer and scaler."""
        return self.updater.state()

    def load(self, saved: Checkpoint) -> None:
        """Take over a checkpoint's weights, optimizer and scaler."""
        self.updater.load(restore_checkpoint(saved, self.tensors(), self.updater.fresh))

    # --- inside

    def backward(
        self, batch: Batch, advantage: Tensor, loss: Loss, rows: int, computed: Tensor
    ) -> dict[str, float]:
        """Accumulate the gradient of this rank's groups. Returns sums over its tokens.

        Args:
            rows: the most completions of a forward.
            computed: float32 [n * G, T], filled with the log-probabilities of this pass.
        """
        device, size = self.parts.lm.device, batch.size
        micro_batches = self._cut(batch, rows)
        cut = [cut_batches(torch.zeros(n, size), rows) for n in batch.groups_per_rank]
        counts = batch.count(sum(map(len, cut)))
        # Summed on the device: reading a number after each micro-batch would wait for it.
        totals = {
            name: torch.zeros((), dtype=torch.float64, device=device)
            for name in ("loss", "tokens", *PER_TOKEN, *PULLED, *CORRECTED)
        }
        of_rows = [advantage[batch.places].float().flatten(), batch.of_prompt]
        mine, of_prompt = to_device(of_rows, device)
        for index, mask, logp, entropy in self._forward(batch, micro_batches):
            width = mask.shape[1]
            self.watched.append((index, (~torch.isfinite(logp.detach()) & mask).any(1)))
            computed[index, :width] = logp.detach()
            sampled, old = batch.logprobs[index, :width], logp.detach()
            if batch.old_logprobs is not None:
                old = batch.old_logprobs[index, :width]
            gap = (old - sampled).abs() * mask  # without the updates since the rollout
            ref = None
            if self.cfg.kl.in_loss:
                assert batch.reference is not None
                ref = batch.reference[index, :width]
            weight = None
            if self.weighs:
                weight = self._weigh(logp, old, sampled, mine[index], mask)
                totals["weight"] += (weight * mask).sum()
                totals["dropped"] += ((weight == 0) & mask).sum()
            if self.cfg.against_sampler:
                old = sampled
            counts = replace(counts, of_prompt=of_prompt[index])
            value, sums = loss(
                logp,
                old,
                mine[index],
                mask,
                counts,
                self.cfg,
                ref=ref,
                entropy=entropy,
                weight=weight,
            )
            self.updater.backward(value)
            totals["loss"] += value.detach()
            totals["tokens"] += mask.sum()
            totals["gap"] += gap.sum()
            for name, number in sums.items():
                totals[name] += number
        if sharding_of(self.model).shared:
            missing = max(map(len, cut)) - len(micro_batches)
            logprobs.match_backward_passes(self.model, missing, device)
        return dict(zip(totals, torch.stack(list(totals.values())).tolist(), strict=True))

    def _cut(self, batch: Batch, rows: int) -> MicroBatches:
        return cut_batches(batch.lengths.view(-1, batch.size), rows)

    def _forward(
        self, batch: Batch, micro_batches: MicroBatches
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yield per micro-batch: its rows, int64 [B]; the tokens that carry loss, bool [B, T];
        their log-probabilities, [B, T]; and the entropies of their distributions, [B, T].
        """
        parts, sampling = self.parts, self.cfg.sampling
        device, size = parts.lm.device, batch.size
        lengths = batch.lengths.tolist()
        rows_of = [
            [g * size + row for g, part in groups for row in range(size)[part]]
            for groups in micro_batches
        ]
        indices = to_device([torch.tensor(chosen) for chosen in rows_of], device) if rows_of else []
        [mask] = to_device([batch.loss_mask], device)
        for groups, index in zip(micro_batches, indices, strict=True):
            completions = [
                [batch.tokens[i * size + j, : lengths[i * size + j]] for j in range(size)[part]]
                for i, part in groups
            ]
            sources = [batch.sources[group] for group, _ in groups]
            prompts = [rollout.requests.prompts[place] for rollout, place in sources]
            laid = logprobs.group(prompts, completions, device)
            with parts.lm.autocast():
                logp, entropy = logprobs.token_logprobs(
                    self.model, laid, sampling.temperature, sampling
                )
            yield index, mask[index, : laid.mask.shape[1]], logp, entropy

    def _weigh(
        self, logp: Tensor, old: Tensor, sampled: Tensor, advantage: Tensor, mask: Tensor
    ) -> Tensor:
        """Return the factors of the tokens' losses, [B, T]."""
        weight = torch.ones_like(logp)
        if self.correction != "off":
            weight = sampler_weights(old, sampled, mask, self.correction, self.bounds)
        if (bound := self.cfg.off_policy_mask) is not None:
            weight = weight * off_policy_mask(logp, sampled, advantage, mask, bound)
        return weight

    def _offending(self, batch: Batch) -> list[dict[str, Any]]:
        """Describe this rank's rows whose log-probabilities are not finite; all rows if only their
        gradient is not finite.
        """
        watched = [
            pair
            for rows, bad in self.watched
            for pair in zip(rows.tolist(), bad.tolist(), strict=True)
        ]
        broken = [row for row, is_bad in watched if is_bad]
        offending = []
        for index in sorted(broken or [row for row, _ in watched]):
            rollout, place = batch.sources[index // batch.size]
            row = place * batch.size + index % batch.size
            offending.append(rollout.describe_offending(row, self.parts.task, bool(broken)))
        return offending

    def _fit_rows(self) -> None:
        """Fit the rows of rollouts and of training to the memory of this device."""
        parts, cfg = self.parts, self.cfg
        has_weights = bool(
            cfg.kl.beta and parts.lm.adapter is None
        )  # the reference model has weights
        stays = has_weights and not parts.run.opt.offload.enabled
        # Half-precision copies: the sampler's, and those of autocast, which exist for one block at
        # a time if activations are recomputed.
        copies = parts.lm.half * (1 if self.recomputed else 2)
        state = count_state(parts, True, stays, copies)
        share = -(-cfg.prompts_per_step // parts.context.world_size) * cfg.samples_per_prompt
        self.completions = share  # the completions of this rank per step
        parts.check_sessions(share, "algo.prompts_per_step or algo.samples_per_prompt")
        rollout = RolloutMemory(parts, state, each=share)
        training = fit_training(parts, self.row_limit, state, share, cfg.samples_per_prompt)
        reference = parts.lm.reference_bytes if has_weights and not stays else 0
        sampling = rollout.sampling_bytes(share, cfg.samples_per_prompt)
        resting = rollout.keep(training, sampling)
        peak = max(rollout.fixed + sampling, max(training, rollout.fixed + reference) + resting)
        self.memory = Memory(state, sampling, min(parts.engine.row_limit.rows, share), peak)


def check_dense(config: Any) -> None:
    """Raise ConfigError for a mixture of experts: because of rounding, the sampler and the trainer
    would choose different experts for a token, and so give it different probabilities.
    """
    if config.model_type == "nemotron_h" and "moe" not in config.layer_types:
        return  # a dense one counts experts too
    counts = [getattr(config, name, None) for name in EXPERTS]
    if (most := max((n for n in counts if isinstance(n, int)), default=0)) > 1:
        raise ConfigError(
            f"the model is a mixture of {most} experts, which algo=grpo does not support: the"
            " sampler and the trainer would choose other ones for a token. Give a dense model, or"
            " use algo=rft or algo=eggroll."
        )


def cut_batches(lengths: Tensor, rows: int) -> MicroBatches:
    """Cut groups into forwards of at most `rows` completions: lists of (group, slice of its
    completions).

    Groups of similar length go together, so that there is little padding. A group larger than
    `rows` is split.

    Args: lengths: the lengths of the completions, int64 [n, G].
    """
    if not lengths.numel():
        return []
    size, longest = lengths.shape[1], lengths.amax(1).tolist()
    ordered = sorted(range(len(longest)), key=lambda i: (longest[i], i))
    if size > rows:
        starts = range(0, size, rows)
        return [[(i, slice(s, min(s + rows, size)))] for i in ordered for s in starts]
    each = rows // size
    return [
        [(i, slice(0, size)) for i in ordered[s : s + each]] for s in range(0, len(ordered), each)
    ]
