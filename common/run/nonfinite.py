"""NaN and infinity: what a run does about them, on every rank alike, and where the rows behind them
are kept.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from common.config import Run
from common.device import precision
from common.distributed import Context
from common.report import write_jsonl
from common.system import events

log = logging.getLogger("clutch")

FILE = "not_finite.jsonl"  # in the run folder
MOST = 100  # rows of a step that a rank keeps
NAMED = 5  # examples in the message


class NonFinitePolicy:
    """Stops a run, or lets it leave the step out, as `run.not_finite` says.

    Args: compute: dtype of forwards. Attributes: skipped: steps that were left out, also before the
    run was interrupted; folder: where the rows are kept.
    """

    def __init__(self, run: Run, context: Context, compute: torch.dtype) -> None:
        self.policy, self.context, self.compute = run.not_finite, context, compute
        self.skipped, self.folder = 0, context.out_dir

    def handle(
        self, step: int, what: str, rows: Sequence[dict[str, Any]], advice: str = ""
    ) -> str | None:
        """Keep the rows of all ranks in not_finite.jsonl. Returns why the run must stop; None =
        leave the step out.

        All ranks call it together. Args: step: from 1; what: is not finite, the same on all ranks;
        rows: of this rank, with the `id` of their example; advice: what to do about it.
        """
        context = self.context
        mine = [{"step": step, "rank": context.rank, "what": what, **row} for row in rows[:MOST]]
        offending = [row for part in context.gather_objects(mine) for row in part]
        path = self.folder / FILE
        if context.main:
            # a resumed run meets the later ones again
            earlier = [row for row in events(path) if row["step"] < step]
            write_jsonl(path, [*earlier, *offending], ascii_only=False)
        named = list(dict.fromkeys(row["id"] for row in offending))
        more = f" and {len(named) - NAMED} more" if len(named) > NAMED else ""
        where = f" on example {', '.join(map(str, named[:NAMED]))}{more}" if named else ""
        text = f"{what}{where}. The rows are in {path}."
        if self.compute == torch.float16 and any(
            row.get("logits") == "not finite" for row in offending
        ):
            text += precision.OVERFLOW
        if self.policy.policy == "stop":
            return f"{text}{advice and ' '}{advice}"
        assert self.policy.max_skips is not None, "NotFiniteConfig checks it"
        self.skipped += 1
        if self.skipped > self.policy.max_skips:
            return (
                f"{text} More steps are left out than not_finite.max_skips"
                f"={self.policy.max_skips} allows.{advice and ' '}{advice}"
            )
        if context.main:
            log.warning(
                "step %d is left out (%d of %d): %s",
                step,
                self.skipped,
                self.policy.max_skips,
                text,
            )
        return None
