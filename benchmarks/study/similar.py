"""Rows of one's own whose similarity leads the held-out measures, for likelihood.yaml: where hardly
an answer is right, the share of right ones says little.
"""

from collections.abc import Sequence

from common.task import Example
from common.tasks import Custom


class Similar(Custom):
    """The task of conf/task/custom.yaml with its similarity first."""

    repeatable = True

    def metrics(self, examples: Sequence[Example], completions: Sequence[str]) -> dict[str, float]:
        """Return similarity and the percentage of equal answers."""
        return dict(sorted(super().metrics(examples, completions).items(), reverse=True))
