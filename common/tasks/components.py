"""Rewards that are a weighted mean of several scores."""

from collections.abc import Callable, Sequence

from common.config import ConfigError, at_least
from common.tasks import Example

# (examples, completions) -> a score in [0, 1] for each.
Component = Callable[[Sequence[Example], Sequence[str]], list[float]]


def chosen(known: dict[str, Component], weights: dict[str, float]) -> dict[str, Component]:
    """The components that carry weight. Raises: ConfigError for an unknown one, a negative weight,
    or no weight at all.
    """
    for name, weight in weights.items():
        if name not in known:
            raise ConfigError(
                f"task.weights.{name} is not a component. Components: {', '.join(known)}."
            )
        at_least(f"task.weights.{name}", weight, 0)
    if not sum(weights.values()) > 0:
        raise ConfigError("task.weights are all 0. Give at least one component a weight above 0.")
    return {name: known[name] for name, weight in weights.items() if weight > 0}


def weighted(found: dict[str, list[float]], weights: dict[str, float]) -> list[float]:
    """Weighted mean by row of the scores `found` by component."""
    total = sum(weights[name] for name in found)
    rows = len(next(iter(found.values())))
    return [sum(weights[name] * found[name][row] for name in found) / total for row in range(rows)]
