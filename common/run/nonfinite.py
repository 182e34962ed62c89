"""NaN and infinity: stop the run or skip the step, on every rank alike, and save the rows that
caused them.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from common.config import Run
from common.device import precision
from common.distributed import Context
from common.system import events, write_jsonl

log = logging.getLogger("clutch")

FILE = "not_finite.jsonl"  # in the run folder
MOST = 100  # the most rows of a step that a rank saves
NAMED = 5  # the most examples in the message


class NonFiniteHandler:
    """Stops a run, or makes it skip the step, as `run.not_finite` says.

    Args:
        compute: the dtype of forward passes.
    Attributes:
        skipped: the number of skipped steps, with those before the run was resumed.
        folder: the folder of the saved rows.
    """

    def __init__(self, run: Run, context: Context, compute: torch.dtype) -> None:
        self.settings, self.context, self.compute = run.not_finite, context, compute
        self.skipped, self.folder = 0, context.out_dir

    def resume(self, skipped: int, folder: Path | None = None) -> None:
        """Go on after `skipped` steps of the run before.

        Args: folder: the folder for the saved rows; None = the run folder.
        """
        self.skipped, self.folder = skipped, folder or self.context.out_dir

    def handle(
        self, step: int, what: str, rows: Sequence[dict[str, Any]], advice: str = ""
    ) -> str | None:
        """Save the rows of all ranks in not_finite.jsonl. Returns the reason that the run must
        stop; None = skip the step. All ranks call it together.

        Args:
            step: the 1-based step.
            what: the number that is not finite, the same on all ranks.
            rows: the rows of this rank, with the `id` of their example.
            advice: the next step for the user.
        """
        context = self.context
        mine = [{"step": step, "rank": context.rank, "what": what, **row} for row in rows[:MOST]]
        offending = [row for part in context.gather_objects(mine) for row in part]
        path = self.folder / FILE
        if context.main:
            # a resumed run repeats the later steps
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
        if self.settings.policy == "stop":
            return f"{text}{advice and ' '}{advice}"
        assert self.settings.max_skips is not None, "NotFiniteConfig checks it"
        self.skipped += 1
        if self.skipped > self.settings.max_skips:
            return (
                f"{text} More steps are left out than not_finite.max_skips"
                f"={self.settings.max_skips} allows.{advice and ' '}{advice}"
            )
        if context.main:
            log.warning(
                "step %d is left out (%d of %d): %s",
                step,
                self.skipped,
                self.settings.max_skips,
                text,
            )
        return None
