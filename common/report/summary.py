"""The texts and files of a run for people: the plan before it, the summary after it, run.yaml,
result.json, completions.
"""

import json
import logging
import math
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from omegaconf import OmegaConf
from rich.box import Box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from common import uncertainty
from common.config import ConfigError, Run
from common.distributed import Context
from common.model import load_adapted, model_commit
from common.report import advice, card, gpu_usage, page, run_folder
from common.report.completions import find_evaluations, read_all, read_training
from common.report.run_folder import WHEN, describe_choice, find_next
from common.report.tracker import Tracker
from common.system import (
    EVALUATIONS,
    OVERRIDES,
    events,
    import_optional,
    numeric_values,
    run_record,
    visible,
    write_text,
)
from common.task import Example, Task, TaskFeatures, plain, task_name

log = logging.getLogger("clutch")


LEARNT_ALL = "the base model, which has nothing left to learn"  # a value of Result.ended_by
SHOWN = 240  # the most characters of a text in the table at the end


def has_learnt_all(metrics: dict[str, float]) -> bool:
    """Return whether the held-out headline is already 100 before training, and log it. A user's own
    measure may have another scale than percent.
    """
    name, value = next(iter(metrics.items()))
    whole = math.isclose(value, 100, abs_tol=1e-6)
    if whole:
        log.info("held-out %s is 100 before the first step: nothing is trained", name)
    return whole


@dataclass
class Result:
    """The outcome of a run, as in RUN/result.json.

    `before` and `after` are the held-out metric, of 100. A classifier generates nothing and earns
    no rewards; its `before` is the metric of the most frequent class.
    """

    algo: str
    task: str
    model: str
    metric: str
    before: float
    after: float
    steps: int
    seconds: float
    generated_tokens: int
    reward_evaluations: int
    world_size: int
    device: str
    dtype: str
    folder: str
    # All measures, before and after.
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    # By measure: the 95 % intervals before, after and of the change, [low, high], and the p_value
    # of a paired test of the change; null if it cannot be computed. The change of an exported base
    # model is exactly 0: [0, 0]. docs/uncertainty.md
    intervals: dict[str, dict[str, Any]] = field(default_factory=dict)
    # By measure: its signature, with which another program can reproduce it, such as sacrebleu's.
    signatures: dict[str, str] = field(default_factory=dict)
    # The name of who answered after training, if it is not the model in RUN/model.
    answered_by: str = ""
    # The iteration of the exported model, if there are iterations; 0 = the base: none was better.
    iteration: int | None = None
    # If validation examples choose the exported model: its step, "metric" and "examples" of the
    # validation, "before", "value" and "last", the measures of the first, the chosen and the last
    # model on them; and if another one than the last is exported, "last_metrics", the held-out
    # measures of the last one, and "gain", "interval" and "p_value" of the headline over it.
    chosen: dict[str, Any] | None = None
    # The setting that ended the run, such as budget.tokens=200000; None = it did all its steps.
    ended_by: str | None = None
    # Steps left out because numbers were not finite (not_finite.policy=skip).
    skipped_steps: int = 0
    # Utilisation and memory of the GPUs in percent, and their energy; None = they were not read.
    gpu: dict[str, Any] | None = None
    # In words: whether it has learnt, by its own numbers, and if not, the likely reason.
    verdict: str = ""
    # The verdict for programs: learnt, worse or not-learnt; "" without held-out examples.
    outcome: str = ""
    # The problems, the most likely reason first: "code", "text", and "settings" to try, by key.
    advice: list[dict[str, Any]] = field(default_factory=list)
    # A whole command to try next, or "": a run from Python has the settings in `advice` alone.
    next_command: str = ""

    def model_and_tokenizer(self) -> tuple[Any, Any]:
        """Load the trained model and its tokenizer from RUN/model, or from RUN/adapter and its base
        model.
        """
        path = Path(self.folder) / "model"
        if not path.is_dir():
            return load_adapted(Path(self.folder) / "adapter")
        if "model_type" not in json.loads((path / "config.json").read_text(encoding="utf-8")):
            raise ConfigError(
                f"{path} is of no language model. The page of docs/ about the run's algorithm shows"
                " what loads it."
            )
        model = transformers.AutoModelForCausalLM.from_pretrained(path)
        return model, transformers.AutoTokenizer.from_pretrained(path)

    def history(self) -> Any:
        """Return metrics.jsonl as a pandas data frame: a row per event, and columns named as in
        W&B, such as reward and phase_seconds/rollout.
        """
        logged = events(Path(self.folder) / "metrics.jsonl")
        return _pandas().DataFrame(
            [{"step": event["step"], **numeric_values(event)} for event in logged]
        )

    def evaluations(self) -> Any:
        """Return a data frame of the held-out measures, including those before the first step."""
        held = events(Path(self.folder) / EVALUATIONS)
        return _pandas().DataFrame([{"step": one["step"], **one["metrics"]} for one in held])

    def completions(self) -> Any:
        """Return a data frame of the completions that the run saved. `kind` is held-out or
        training. Held-out rows have the name of their evaluation; training rows have step, reward
        and advantage or fitness.
        """
        pandas, folder, rows = _pandas(), Path(self.folder), list[dict[str, Any]]()
        for path in find_evaluations(folder / "completions"):
            held = events(path, dict)
            rows += [{"kind": "held-out", "evaluation": path.stem, **row} for row in held]
        if everything := read_all(folder):  # completions=all
            rows += [{"kind": "training", **row} for row in everything]
            return pandas.DataFrame(rows)
        for line in read_training(folder):
            shared = {key: value for key, value in line.items() if key != "rows"}
            rows += [{"kind": "training", **shared, **row} for row in line["rows"]]
        return pandas.DataFrame(rows)

    def add_choice(self, choice: Any, step: int, after: Any, last: Any) -> None:
        """Add the choice of the exported model.

        Args:
            choice: a common.choice.Choice.
            step: the step of the exported model.
            after, last: the Evaluations of the exported and of the last model.
        """
        of = {"metric": choice.metric, "examples": choice.examples}
        values = {"before": choice.values[0], "value": choice.value, "last": choice.values[-1]}
        self.chosen = {"step": step, **of, **values}
        if step != self.steps:
            scores = (one.scores.get(self.metric, []) for one in (last, after))
            interval, p = uncertainty.find_change(*scores)
            self.chosen |= {"last_metrics": last.metrics, "gain": after.value - last.value}
            self.chosen |= {"interval": interval, "p_value": p}

    def save(self) -> None:
        """Write RUN/result.json, atomically."""
        content = asdict(self)
        for name in ("gpu", "chosen"):
            if content[name] is None:
                del content[name]
        write_text(Path(self.folder) / "result.json", json.dumps(content, indent=2) + "\n")


def _pandas() -> Any:
    return import_optional("pandas", "data frames need a package: pip install -e '.[frames]'.")


def print_plan(rows: dict[str, str]) -> None:
    """Log the plan of a run, a line per fact."""
    width = max(len(key) for key in rows)
    for key, value in rows.items():
        log.info("%-*s  %s", width, key, value)


def write_run(
    run: Run,
    out_dir: Path,
    device: str,
    reproducible: bool = True,
    attention: str | None = None,
) -> None:
    """Write RUN/run.yaml, and the record that was buffered until now (system/run_record.py).

    run.yaml has the configuration, versions, commits of this code and of the model, the attention
    of the plan, and whether the same command reproduces the same numbers.
    """
    content = {
        "config": asdict(run),
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
        },
        "commit": find_commit(),
        "model_commit": model_commit(run.model),
        "device": device,
        "attention": attention,
        "reproducible": reproducible,
    }
    run_record.accept(out_dir, log)
    write_text(out_dir / run_record.RUN_FILE, OmegaConf.to_yaml(OmegaConf.create(content)))


def find_commit() -> str | None:
    """Return the commit of this code, with a + if files are modified; None outside a checkout."""

    def git(*command: str) -> str:
        full = ["git", "-C", str(Path(__file__).parent), *command]
        return subprocess.run(full, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def completion_rows(
    task: Task, examples: Sequence[Example], measured: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the rows of held-out completions to save, one per example, with its scores per measure
    of the task.

    Args: measured: the result of `Evaluation.content`.
    """
    texts, count, repeats = measured["completions"], len(examples), measured.get("repeats")
    scores = {
        name: values
        for name, values in measured.get("scores", {}).items()
        if "/" not in name and len(values) == count  # not of another task, nor of batches
    }
    return [
        {"id": e.id, "prompt": task.prompt(e), "answer": e.answer, "completion": text}
        | ({"repeats": repeats[place]} if repeats else {})
        | {"scores": {name: round(values[place], 6) for name, values in scores.items()}}
        for place, (e, text) in enumerate(zip(examples, texts, strict=True))
    ]


def find_intervals(
    before: dict[str, Any], after: dict[str, Any], unchanged: bool = False
) -> dict[str, dict[str, Any]]:
    """Return the intervals and the p-value of each measure.

    Args:
        before, after: results of `Evaluation.content`.
        unchanged: whether both are of the same weights, so that every change is exactly 0. Equal
            scores of two models leave open by how much they differ on other examples.
    """
    intervals = {}
    for name in dict.fromkeys((*before["metrics"], *after["metrics"])):
        old, new = (measured.get("scores", {}).get(name, []) for measured in (before, after))
        change, p = ((0.0, 0.0), 1.0) if unchanged else uncertainty.find_change(old, new)
        intervals[name] = {
            "before": uncertainty.find_interval(old),
            "after": uncertainty.find_interval(new),
            "change": change,
            "p_value": p,
        }
    return intervals


# A rule below the heads, and nothing else.
_RULE = Box("    \n    \n -  \n    \n    \n    \n    \n    \n")


def side_by_side(rows: list[dict[str, str]]) -> str:
    """Return a table of texts, with columns as wide as the terminal allows, and folded cells."""
    if not rows:
        return ""
    gap: Any = {"padding": (0, 1, 0, 0), "pad_edge": False, "show_edge": False}
    columns = (Column(name, overflow="fold") for name in rows[0])
    table = Table(*columns, box=_RULE, header_style="", **gap)
    for row in rows:
        table.add_row(*(Text(visible(text)) for text in row.values()))
    width = max(40, shutil.get_terminal_size((110, 24)).columns)
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def make_result(
    run: Run,
    context: Context,
    subject: Any,
    state: dict[str, Any],
    measured: tuple[dict[str, Any], dict[str, Any]],
    ended_by: str | None,
    unchanged: bool = False,
) -> Result:
    """Return the outcome of a run.

    Args:
        subject: the trained parts (common.session.Subject).
        state: the counts of the session.
        measured: before and after, results of `Evaluation.content`.
        unchanged: whether the exported model is the base model as it was.
    """
    metrics = {when: one["metrics"] for when, one in zip(WHEN, measured, strict=True)}
    name = next(iter(metrics["after"]))
    return Result(
        algo=run.algo.name,
        task=task_name(subject.task),
        model=subject.name,
        metric=name,
        before=metrics["before"][name],
        after=metrics["after"][name],
        steps=state["step"],
        seconds=state["seconds"],
        generated_tokens=state["generated"],
        reward_evaluations=state["evaluations"],
        world_size=context.world_size,
        device=context.device.name,
        dtype=subject.precision.name,
        folder=str(context.out_dir),
        metrics=metrics,
        intervals=find_intervals(*measured, unchanged),
        signatures=dict(TaskFeatures(subject.task).signatures),
        ended_by=ended_by,
        skipped_steps=state["skipped"],
    )


def finish_run(
    run: Run,
    tracker: Tracker,
    result: Result,
    subject: Any,
    measured: tuple[dict[str, Any], dict[str, Any]],
    weights: dict[str, Any] | None,
    model: str | None = None,
) -> None:
    """Export the model with its card, write result.json, close the tracker and print the summary;
    on rank 0.

    Args:
        measured: before and after, results of `Evaluation.content`.
        weights: the gathered weights of a sharded model.
        model: the exported model's path and how to load it; None = a language model.
    """
    folder = Path(result.folder)
    before, after = (kept["completions"] for kept in measured)
    rows = completion_rows(subject.task, subject.held_out, measured[1]) if after else []
    if rows:
        tracker.completions("after", tracker.step, rows)
    kept = ("before", "after", "steps", "seconds", "generated_tokens", "reward_evaluations")
    measures = {f"after/{name}": value for name, value in result.metrics["after"].items()}
    numbers = {name: getattr(result, name) for name in kept} | measures
    gain = result.after - result.before
    tracker.summary(numbers | {"gain": gain, "metric_name": result.metric})
    exported = subject.export(folder, weights)
    logged = events(folder / "metrics.jsonl")
    result.gpu = gpu_usage.summarise(logged)
    if count := len(subject.held_out or ()):
        algo = advice.settings(run.algo, getattr(subject, "room", None), run.task)
        verdict = advice.judge(result, count, logged, algo)
        result.verdict, result.outcome, change = verdict.text, verdict.outcome, verdict.change
        result.advice = [one.content() for one in verdict.advice]
        if change and (folder / OVERRIDES).exists():  # a run from Python has no command to repeat
            result.next_command = advice.command(run_folder.arguments(folder), change)
    result.save()
    card.write_or_warn(folder, model)
    step = result.steps if result.chosen is None else result.chosen["step"]
    tracker.artifact("model", exported, f"step-{step}")
    tracker.close()  # which may wait for uploads
    samples = [
        {
            "prompt": show_end(plain(row["prompt"]).rstrip("\n")),
            "before": show_end(old),
            "after": show_end(new),
            "answer": show_end(row["answer"]),
        }
        for row, old, new in list(zip(rows, before, after, strict=True))[:3]
    ]
    tried = f"{exported} (to try it: python -m common.chat {shlex.quote(str(folder))})"
    _print_summary(result, samples, exported.name, model or tried)


def show_end(text: str) -> str:
    """Return the end of a text, which most likely contains its question or its answer."""
    return text if len(text) <= SHOWN else f"...{text[-SHOWN:]}"


def _show_change(result: Result, name: str) -> str:
    before, after = (result.metrics[when][name] for when in WHEN)
    interval = result.intervals[name]["change"]
    sure = f", 95 % {uncertainty.show_interval(interval, signed=True)}" if interval else ""
    return f"{before:.2f} -> {after:.2f} ({after - before:+.2f}{sure})"


def _print_summary(result: Result, samples: list[dict[str, str]], what: str, model: str) -> None:
    folder, after = result.folder, result.metrics["after"]
    reported = page.write_or_warn(Path(folder))
    log.info("")
    if samples:
        log.info(side_by_side(samples))
        log.info("")
    names = [n for n in result.metrics["before"] if n in after and n != result.metric]
    rows = {f"held-out {n}": _show_change(result, n) for n in (result.metric, *names)}
    rows |= {f"{name} is": f"sacrebleu's {one}" for name, one in result.signatures.items()}
    rows["steps"] = f"{result.steps} in {result.seconds:.0f} s"
    if result.ended_by:
        rows["steps"] += f", ended by {result.ended_by}"
    if result.chosen:
        rows["exported"] = describe_choice(asdict(result))
    if result.skipped_steps:
        rows["steps"] += f", {result.skipped_steps} left out: see not_finite.jsonl"
    if result.generated_tokens:
        rewards = f"{result.reward_evaluations:,} rewards"
        rows["generated"] = f"{result.generated_tokens:,} tokens, {rewards}"
    if result.verdict:
        rows["verdict"] = result.verdict
    if following := find_next(asdict(result)):
        rows["try next"] = following
    rows["written to"] = folder
    if reported:
        rows["  report"] = f"{folder}/report.html, and report.md"
    rows[f"  {what}"] = model
    rows |= {"  metrics": f"{folder}/metrics.jsonl", "  result": f"{folder}/result.json"}
    print_plan(rows)
