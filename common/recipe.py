"""Learning rates by the size of a model and by what is trained (algo.lr=auto), and where a step
size comes from.
"""

import logging
from dataclasses import dataclass

import numpy as np

from common.config import AUTO, ConfigError, Run
from common.config.resolvers import find_recipe
from common.lm import LM
from common.optim import ADAMS

log = logging.getLogger("clutch")

FAR = 30.0  # times the rate of the recipe, from which on a rate is worth a warning
Points = tuple[tuple[float, float], ...]  # (parameters of the model, learning rate), by size


@dataclass(frozen=True)
class Rates:
    """Learning rates at some sizes: where all weights are trained, and where an adapter is."""

    weights: Points
    adapter: Points

    def at(self, parameters: int, adapted: bool) -> float:
        """Return the rate for a model of that size: along lines in logarithms between the sizes,
        and beyond the outermost sizes theirs.
        """
        sizes, rates = np.log(self.adapter if adapted else self.weights).T
        return float(f"{np.exp(np.interp(np.log(max(parameters, 1)), sizes, rates)):.2g}")


def choose_lr(lm: LM, rates: Rates) -> float:
    """Return the learning rate of a run: algo.lr as it is set, or with auto that of `rates`.

    Raises: ConfigError for auto with an optimizer that the rates are not for.
    """
    cfg = lm.run.algo
    if cfg.lr != AUTO:
        return float(cfg.lr)
    if cfg.optimizer.name not in ADAMS:
        raise ConfigError(
            f"algo.lr=auto does not know the steps of algo.optimizer.name={cfg.optimizer.name}. Use"
            f" one of {', '.join(ADAMS)}, or give algo.lr."
        )
    return rates.at(lm.parameters, lm.adapter is not None)


def describe_lr(lm: LM, rates: Rates) -> str:
    """Say for the plan what the learning rate is and where it comes from. Warns of one that is far
    above that of `rates`.
    """
    run, lr = lm.run, choose_lr(lm, rates)
    usual = rates.at(lm.parameters, lm.adapter is not None)
    if run.algo.optimizer.name in ADAMS and lr >= FAR * usual and lm.context.main:
        log.warning(
            "algo.lr=%g is %.0f times what is usual for a model of this size, and may destroy what"
            " the model can do. Leave it out (algo.lr=auto is %g here), or watch a text with"
            " evaluate.text=FILE.",
            *(lr, lr / usual, usual),
        )
    return f"lr {lr:g} ({describe_source(run)})"


def describe_source(run: Run) -> str:
    """Say where algo.lr, and what else its recipe has, come from."""
    name, algo = run.algo.name, run.algo
    if algo.lr == AUTO:
        return "auto"
    recipe = find_recipe(run, name)
    tuned = all(getattr(algo, key, value) == value for key, value in recipe.items())
    return f"the recipe of model={run.model.name}" if recipe and tuned else "as set"
