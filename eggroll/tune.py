"""The sigma and learning rate of a run: as set, or as the probe measures them at its start."""

from dataclasses import asdict, dataclass
from typing import Any

from common.config import AUTO, PROBE, Run
from common.session import Session
from common.system import import_named
from eggroll.config import EggrollConfig
from eggroll.population import PopulationCollector
from eggroll.weights import Weights

ADVICE = "Give algo.sigma and algo.lr as numbers, without probe=true."


@dataclass(frozen=True)
class Tuned:
    """Sigma and learning rate of a run.

    Attributes:
        sigma: the standard deviation of the noise.
        lr: the learning rate; 0 for a method that moves no weights.
        drift: the drift that a run with lr=auto is planned to reach by luck alone; None = no probe.
    """

    sigma: float
    lr: float
    drift: float | None = None


def tune(collector: PopulationCollector, weights: Weights, session: Session) -> Tuned:
    """Return sigma and learning rate as they are set. If one is auto, the probe chooses both at the
    start of the run, and checkpoints keep the choice. The probe's tokens and seconds count as
    training.
    """
    cfg, own = collector.cfg, session.state.own
    if not find_auto(cfg):
        return Tuned(float(cfg.sigma), 0.0 if cfg.lr == AUTO else float(cfg.lr))
    if "tuned" not in own:
        if session.over:  # no step asks for them
            return Tuned(0.0, 0.0)
        measure = load_probe(collector.parts.run, "measure")
        own["tuned"] = asdict(measure(collector, weights, session))
    return Tuned(**own["tuned"])


def find_auto(cfg: EggrollConfig) -> str | None:
    """Return the setting that asks for the probe at the start of a run; None if there is none."""
    if cfg.sigma == AUTO:
        return "algo.sigma=auto"
    # RandOpt moves no weights, so its lr is not used.
    return "algo.lr=auto" if cfg.lr == AUTO and cfg.method != "randopt" else None


def load_probe(run: Run, name: str) -> Any:
    """Return a function of the probe's plugin. Raises: ConfigError if the plugin is missing."""
    asked = "probe=true" if run.probe else find_auto(run.algo)
    return import_named(f"{asked}", PROBE, name, ADVICE)
