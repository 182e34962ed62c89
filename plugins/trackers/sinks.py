"""Trackers in addition to metrics.jsonl: Weights & Biases, Trackio and TensorBoard.

common/report/tracker.py opens the one that a run's `_target_` names.
"""

import io
import logging
import os
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.config import ConfigError, Run, flat
from common.system import first_line, import_optional, markdown_table

log = logging.getLogger("clutch")


PROJECT = "clutch"  # where neither tracker.project nor WANDB_PROJECT says another


def _names(run: Run, out_dir: Path) -> tuple[str, str | None]:
    """Return the name of a run and its group: the sweep that it belongs to, unless another
    is set.
    """
    multiruns = (path for path in out_dir.parents if (path / "multirun.yaml").exists())
    sweep = next(multiruns, None)
    name = str(out_dir.relative_to(sweep.parent)) if sweep else out_dir.name
    return name, run.tracker.group or (sweep.name if sweep else None)


def _import(module: str, tracker: str, package: str) -> Any:
    missing = f"tracker={tracker} needs a package: pip install {package}. Or use tracker=jsonl."
    return import_optional(module, missing)


class Wandb:
    """One W&B run per job, on rank 0. Its steps are those of this project, so that a resumed run
    continues it.
    """

    def __init__(self, run: Run, out_dir: Path, resumed: int, state: dict[str, Any]) -> None:
        import wandb  # seconds to import, so only when asked for

        self.wandb, settings = wandb, run.tracker
        name, group = _names(run, out_dir)
        if given := os.environ.get("WANDB_NAME"):
            # The jobs of a sweep share the variable.
            name = given if "/" not in name else f"{given}/{out_dir.name}"
        wandb.setup(wandb.Settings(silent=True))  # what matters of its chatter is logged below
        mode: Any = settings.mode or os.environ.get("WANDB_MODE")
        mode = mode or ("online" if wandb.login(prompt=False, verify=False) else "offline")
        offline = mode == "offline"
        try:
            self.run = wandb.init(
                project=settings.project or os.environ.get("WANDB_PROJECT") or PROJECT,
                entity=settings.entity,
                name=name,
                group=group,
                job_type=settings.job_type or os.environ.get("WANDB_JOB_TYPE") or run.algo.name,
                id=state.get("id"),
                # offline, W&B goes on by the id alone and warns of this one
                resume=None if offline else "allow",
                dir=out_dir,
                mode=mode,
                config=asdict(run),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"tracker=wandb cannot start: {first_line(error)}. Run wandb login, or use"
                " tracker.mode=offline and wandb sync later."
            ) from None
        self.id = self.run.id
        # What W&B already has is not sent again: offline it cannot tell.
        goes_on = resumed > 0 and "id" in state
        self.known, self.resumed = max(self.run.step, resumed + 1 if goes_on else 0), resumed
        for axis in ("step", "epoch", "iteration", "generated_tokens", "reward_evaluations"):
            self.run.define_metric(axis, hidden=axis != "generated_tokens")
        self.run.define_metric("*", step_metric="step")
        self.run.define_metric("evaluate/*", step_metric="iteration")
        self.run.define_metric("validation/*", step_metric="epoch")
        self.run.define_metric("metric", step_metric="step", summary="max,last")
        sent = f"offline; send it with: wandb sync {Path(self.run.settings.sync_dir)}"
        log.info("W&B: %s", sent if offline else self.run.url)

    def log(self, values: dict[str, Any], step: int) -> None:
        """Send the numbers of a step."""
        # What comes at the step that a run was resumed at is its end: no event has that step again.
        if step >= self.known or step == self.resumed > 0:
            self.run.log({"step": step, **values}, step=max(step, self.known))

    def table(self, name: str, step: int, rows: list[dict[str, Any]]) -> None:
        """Send rows as a table."""
        table = self.wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self.log({name: table}, step)

    def artifact(self, kind: str, folder: Path, alias: str) -> None:
        """Upload a folder as a new version of an artifact."""
        artifact = self.wandb.Artifact(f"{kind}-{self.id}", type=kind)
        for path in sorted(folder.rglob("*")):  # add_dir prints
            if path.is_file():
                artifact.add_file(str(path), name=str(path.relative_to(folder)))
        self.run.log_artifact(artifact, aliases=["latest", alias])

    def summary(self, values: dict[str, Any]) -> None:
        """Send the headline numbers of the run."""
        self.run.summary.update(values)

    def close(self, code: int) -> None:
        """Close the record."""
        self.run.finish(exit_code=code)


class Trackio:
    """One Trackio run per job, in a database of the user, or at the place that Trackio's
    environment variables name (TRACKIO_DIR, TRACKIO_SERVER_URL, TRACKIO_SPACE_ID).
    """

    def __init__(self, run: Run, out_dir: Path, resumed: int, state: dict[str, Any]) -> None:
        self.trackio = _import("trackio", "trackio", "-e '.[trackio]'")
        project = run.tracker.project
        name, group = _names(run, out_dir)
        with redirect_stdout(io.StringIO()):  # what matters of its chatter is logged below
            self.run = self.trackio.init(
                project=project,
                name=state.get("id", name),
                group=group,
                config=flat(asdict(run)),
                resume="allow" if "id" in state else "never",
                embed=False,
            )
        self.id = self.run.name
        # What it has of steps after the checkpoint is not sent again.
        self.known, self.step = self.run._next_step if resumed else 0, resumed
        log.info("Trackio: %s in project %s; look at it with: trackio show", self.id, project)

    def log(self, values: dict[str, Any], step: int) -> None:
        """Send the numbers of a step."""
        self.step = step
        if step >= self.known:
            self.run.log(values, step=step)

    def table(self, name: str, step: int, rows: list[dict[str, Any]]) -> None:
        """Send rows as a table."""
        columns = list(rows[0])
        data = [list(row.values()) for row in rows]
        self.log({name: self.trackio.Table(columns=columns, data=data)}, step)

    def summary(self, values: dict[str, Any]) -> None:
        """Send the headline numbers of the run. Trackio has no separate place for them."""
        numbers = {k: v for k, v in values.items() if isinstance(v, (int, float))}
        summary = {f"summary/{name}": value for name, value in numbers.items()}
        self.run.log(summary, step=self.step)  # a step of its own would come before those of more

    def close(self, code: int) -> None:
        """Close the record."""
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            self.run.finish()


class TensorBoard:
    """TensorBoard events of a run, in RUN/tensorboard."""

    id = None

    def __init__(self, run: Run, out_dir: Path, resumed: int, state: dict[str, Any]) -> None:
        tensorboard = _import("torch.utils.tensorboard", "tensorboard", "tensorboard")
        self.writer = tensorboard.SummaryWriter(
            # A run that begins anew drops what an earlier process wrote to this folder.
            str(out_dir / "tensorboard"),
            purge_step=resumed + 1 if resumed else 0,
        )
        self.resumed = resumed

    def log(self, values: dict[str, float], step: int) -> None:
        """Write the numbers of a step, unless they are there: TensorBoard hides points after an
        earlier step.
        """
        if step >= self.resumed:
            for key, value in values.items():
                self.writer.add_scalar(key, value, step)

    def table(self, name: str, step: int, rows: list[dict[str, Any]]) -> None:
        """Send rows as a table."""
        if step >= self.resumed:
            self.writer.add_text(name, markdown_table(rows), step)

    def summary(self, values: dict[str, Any]) -> None:
        """Send the headline numbers of the run."""
        for key, value in values.items():
            if isinstance(value, (int, float)):
                self.writer.add_scalar(f"summary/{key}", value)

    def close(self, code: int) -> None:
        """Close the record."""
        self.writer.close()
