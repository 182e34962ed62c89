"""When a run must stop: numbers that are not finite, fp16 that overflows for good, and the bounds of algo.stop_at."""

import math

from grpo.config import StopAtConfig

OVERFLOWS = 20  # in a row; a scale that starts at 65,536 is below 1 by then, but one may have grown first


class Guards:
    """Looks at what each step logs. scaled: gradients are fp16 with a GradScaler, which skips steps that overflow."""

    def __init__(self, stop_at: StopAtConfig, scaled: bool) -> None:
        self.stop_at, self.scaled, self.overflows = stop_at, scaled, 0

    def trouble(self, seen: dict[str, float]) -> str | None:
        """Why the run must stop after a step that logged `seen`, and what to do about it; None where it may go on."""
        if not math.isfinite(seen["loss"]) or not (math.isfinite(seen["grad_norm"]) or self.scaled):
            return (
                f"loss {seen['loss']}, gradient norm {seen['grad_norm']}. Lower algo.lr, or use experiment=grpo_fp32."
            )
        self.overflows = self.overflows + 1 if seen.get("overflow") else 0
        if self.overflows >= OVERFLOWS or seen.get("loss_scale", 1.0) < 1:
            return (
                f"fp16 gradients overflow for good: {self.overflows} in a row, loss scale {seen['loss_scale']:g}. "
                "Lower algo.lr, use a device with native bfloat16, or leave out opt=amp."
            )
        if self.stop_at.ratio_kl is not None and seen["ratio_kl"] > self.stop_at.ratio_kl:
            return (
                f"ratio_kl {seen['ratio_kl']:.3g} is above algo.stop_at.ratio_kl={self.stop_at.ratio_kl:g}. "
                "Lower algo.lr or algo.passes."
            )
        if self.stop_at.entropy_below is not None and seen["entropy"] < self.stop_at.entropy_below:
            return (
                f"entropy {seen['entropy']:.3g} is below algo.stop_at.entropy_below={self.stop_at.entropy_below:g}. "
                "Raise algo.epsilon_high or algo.entropy_bonus."
            )
        return None
