"""The checkpoints that a run writes."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from common.checkpoint import Checkpoint, Writer
from common.config import Run
from common.distributed import fsdp
from common.distributed.context import Context


class Checkpointed(Protocol):
    """The part of a checkpoint that is the algorithm's."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights."""
        ...

    def extra(self) -> dict[str, Any]:
        """Return nested dicts of tensors and numbers, such as an optimizer's state."""
        ...

    def load(self, saved: Checkpoint) -> None:
        """Take over a checkpoint. Raises: ConfigError where it does not fit."""
        ...


class Checkpoints:
    """Writes checkpoints, on a GPU while training goes on. Args: model: the one that is trained."""

    def __init__(self, run: Run, context: Context, model: Any, saved: Checkpointed) -> None:
        self.run, self.context, self.saved = run, context, saved
        self.can_go_on = context.device.device.type == "cuda" and not fsdp.of(model)
        self.writer = Writer()

    def wait(self) -> list[Path]:
        """Wait for the checkpoint that is under way. Returns its folder."""
        return _listed(self.writer.wait())

    def save(self, state: dict[str, Any], beside: bool) -> list[Path]:
        """Write a checkpoint, with `beside` while training goes on; `wait` before, as the next one
        may remove the last. Returns the folder if it is whole.

        Args: state: of the run; its `step` names the checkpoint.
        """
        context, step, extra = self.context, state["step"], self.saved.extra()
        tensors = {name: tensor.detach() for name, tensor in self.saved.tensors().items()}
        content = {"run": state, "config": asdict(self.run)}
        root, keep = context.out_dir / "checkpoints", self.run.checkpoint.keep
        if beside and self.can_go_on:
            fsdp.check_equal(context, tensors, step)
            if context.main:
                self.writer.start(root, step, tensors, content, extra, keep)
            return []
        return _listed(fsdp.save(context, root, step, tensors, content, extra, keep))

    def settle(self) -> list[Path]:
        """Wait for the checkpoint that is under way as the run stops. Returns its folder, if that
        is whole.
        """
        return _listed(self.writer.settle())


def _listed(folder: Path | None) -> list[Path]:
    return [] if folder is None else [folder]
