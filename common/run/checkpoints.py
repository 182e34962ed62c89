"""The checkpoints that a run writes."""

import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from common.checkpoint import Checkpoint, Writer, checkpoint
from common.config import Run
from common.distributed import Context, check_equal, save_checkpoint, sharding_of
from common.report import Tracker
from common.system import CheckpointError

log = logging.getLogger("clutch")


class Checkpointed(Protocol):
    """The part of a checkpoint that belongs to the algorithm."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights."""
        ...

    def extra(self) -> dict[str, Any]:
        """Return nested dicts of tensors and numbers, such as an optimizer's state."""
        ...

    def load(self, saved: Checkpoint) -> None:
        """Load a checkpoint. Raises: ConfigError if it does not fit."""
        ...


class Checkpoints:
    """Writes checkpoints; on a GPU in the background, while training continues.

    Args: model: the model that is trained; saved: the algorithm's part of a checkpoint.
    """

    def __init__(self, run: Run, context: Context, model: Any, saved: Checkpointed) -> None:
        self.run, self.context, self.saved = run, context, saved
        self.can_go_on = context.device.device.type == "cuda" and not sharding_of(model).shared
        self.writer = Writer()

    def save(
        self,
        state: dict[str, Any],
        in_background: bool,
        tracker: Tracker | None,
        needed: Sequence[int] = (),
    ) -> None:
        """Write a checkpoint, and upload the checkpoints that are complete by then, before a later
        one removes them.

        Args:
            state: the state of the run; its `step` names the checkpoint.
            in_background: whether the run may go on while it is written.
            needed: steps whose checkpoints are kept, however old they are.
        """
        if tracker:
            tracker.sync()  # so that all steps before the checkpoint are on the disk
        context, step = self.context, state["step"]
        _upload(self.writer.wait(), tracker)
        context.meet()  # that may take longer than a collective waits
        extra = self.saved.extra()
        tensors = {name: tensor.detach() for name, tensor in self.saved.tensors().items()}
        content = {"run": state, "config": asdict(self.run)}
        root, keep = context.out_dir / "checkpoints", self.run.checkpoint.keep
        if in_background and self.can_go_on:
            check_equal(context, tensors, step)
            if context.main:
                self.writer.start(root, step, tensors, content, extra, keep, needed)
            return
        _upload(
            save_checkpoint(context, root, step, tensors, content, extra, keep, needed), tracker
        )
        context.meet()

    def load(self, step: int) -> bool:
        """Load the weights of a checkpoint of this run, on all ranks. Returns False, with a
        warning, if it is missing or damaged.
        """
        self.context.meet()  # no rank reads while another may still write
        root, saved = self.context.out_dir / "checkpoints", None
        try:
            saved = checkpoint.load(checkpoint.folder_of(root, step))
        except CheckpointError as error:
            log.warning("%s", error)
        if self.context.any(saved is None):
            return False
        assert saved is not None
        self.saved.load(saved)
        return True

    def settle(self, tracker: Tracker | None) -> None:
        """Wait for the pending checkpoint when the run stops, and upload it if it is complete."""
        _upload(self.writer.settle(), tracker)


def _upload(folder: Path | None, tracker: Tracker | None) -> None:
    if folder is not None and tracker:
        tracker.artifact("checkpoint", folder, f"step-{int(folder.name[5:])}")
