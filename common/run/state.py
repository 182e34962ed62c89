"""The part of a checkpoint that belongs to the run, not to its weights or its algorithm."""

from dataclasses import dataclass, field, fields
from typing import Any

# The key in a checkpoint of a field that has another name.
KEYS = {"reward_evaluations": "evaluations"}


@dataclass
class RunState:
    """The counts and records of a run that outlive it. All values are JSON.

    A checkpoint holds one flat dict: the fields by their names (but for KEYS), and the keys of
    `own` next to them.
    """

    # Optimizer steps that are done.
    step: int = 0
    # Seconds of training, without evaluations and checkpoints.
    seconds: float = 0.0
    # Tokens that were generated for training, on all ranks.
    generated: int = 0
    # Rewards that were computed for training, on all ranks.
    reward_evaluations: int = 0
    # Steps that were left out because their numbers were not finite.
    skipped: int = 0
    # The ids of the run in the services that log it.
    tracker: dict[str, Any] = field(default_factory=dict)
    # Whether the same command gives the same numbers.
    reproducible: bool = True
    # Hashes by name: of the task's rows, and of all rows and texts that are evaluated in addition.
    digests: dict[str, str] = field(default_factory=dict)
    # The measurement before the first step (common.evaluation.Evaluation.content); None until then.
    before: dict[str, Any] | None = None
    # The choice of the exported model so far (common.choice.Choice.content); None = it is the last.
    choice: dict[str, Any] | None = None
    # The number of updates on the last rollout that the run's steps left out; None if a step is
    # one update.
    updates_left: int | None = None
    # The algorithm's own values.
    own: dict[str, Any] = field(default_factory=dict)

    def content(self) -> dict[str, Any]:
        """Return the dict for a checkpoint, without the fields that are None.

        Raises: ValueError if the algorithm has a key with the name of a field.
        """
        content = {key: getattr(self, name) for key, name in _names().items()}
        if both := sorted(content.keys() & self.own.keys()):
            raise ValueError(
                f"session.state.own has the key {both[0]!r}, which is a field of"
                " common.run.RunState. Give it another name."
            )
        return {key: value for key, value in content.items() if value is not None} | self.own

    def update(self, content: dict[str, Any]) -> None:
        """Take over the dict of a checkpoint; fields that it lacks keep their values."""
        names = _names()
        for key, value in content.items():
            if key in names:
                setattr(self, names[key], value)
            else:
                self.own[key] = value


def _names() -> dict[str, str]:
    """The names of the fields by their keys in a checkpoint."""
    names = [one.name for one in fields(RunState) if one.name != "own"]
    return {KEYS.get(name, name): name for name in names}
