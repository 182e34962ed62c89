"""Read the state of a run from its folder: run.yaml, metrics.jsonl, evaluations.jsonl, result.json,
failed.json and the lock.

Reading takes a bounded time whatever the size of the logs, and a damaged file is named under
`problems` instead of ending the command.
"""

import math
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from common.config import ConfigError, name_folder
from common.report import advice, card, page, run_folder
from common.system import (
    EVALUATION,
    EVALUATIONS,
    EXIT_CONFIG,
    EXIT_CRASH,
    EXIT_INTERRUPTED,
    EXIT_NUMBERS,
    EXIT_SIGNAL,
    EXIT_WRITE,
    FAILED,
    OVERRIDES,
    DamagedError,
    has_stages,
    jsonable,
    lock,
    safe_read,
)
from common.uncertainty import find_interval

STATES = ("waiting", "running", "stopped", "failed", "stale", "ended")
CODES = {
    0: "done",
    EXIT_CRASH: "a rank or a job was killed, or an error of the program",
    EXIT_CONFIG: "a mistake in the settings",
    EXIT_NUMBERS: "NaN or infinity, or a guard stopped the run",
    EXIT_WRITE: "a file could not be written (a full disk)",
    EXIT_SIGNAL: "stopped by a signal, after saving: resume=auto goes on",
    EXIT_INTERRUPTED: "Ctrl-C outside the training steps",
    138: "SIGUSR1 outside the training steps, or a second one",
    143: "SIGTERM outside the training steps, or a second one",
}
TAIL = 1 << 20  # bytes that are read of the end of a log
QUIET = 600.0  # seconds without a written file, or ten times the longest step, make a run stale
WRITTEN = ("metrics.jsonl", EVALUATIONS, "run.log", "run.yaml", "checkpoints", "completions")
EVENT = {"step": int}
MOST = 10_000  # rows of completions that are read for an interval
ADVICE = [{"code": str, "text": str, "settings": dict}]
RESULT = run_folder.RESULT | dict.fromkeys(("verdict?", "outcome?", "next_command?"), str)
RESULT |= {"advice?": ADVICE, "intervals?": {str: dict}}
Events = list[dict[str, Any]]


@dataclass
class Status:
    """The state of a run.

    Attributes:
        folder: the run folder.
        state: one of `STATES`.
        algo, step, steps: of the last event; null if they are not known, or have no end.
        iteration, iterations: of a run in stages.
        share: the share of the steps, or of the budget if that is further, 0 to 1.
        seconds_left: an estimate of the seconds of training that are left.
        heartbeat: the seconds since a file of the run was written.
        measure: the last held-out measure: name, value, step, interval at 95 %, and of a run that
            has ended also before, change, change_interval and p_value.
        outcome: learnt, worse or not-learnt.
        verdict: the same in words.
        advice: the problems, each with a code, a text, and the settings to try.
        exit_code, exit_meaning: of the run's process; null as long as it is not known.
        error: the reason that it failed.
        exported: the folder of the exported model or adapter.
        next_command: a command to try next; of an interrupted run the one that resumes it.
        problems: files that are damaged.
    """

    folder: str
    state: str = "waiting"
    algo: str | None = None
    step: int | None = None
    steps: int | None = None
    iteration: int | None = None
    iterations: int | None = None
    share: float | None = None
    seconds_left: float | None = None
    heartbeat: float | None = None
    measure: dict[str, Any] | None = None
    outcome: str | None = None
    verdict: str | None = None
    advice: list[dict[str, Any]] = field(default_factory=list)
    exit_code: int | None = None
    exit_meaning: str | None = None
    error: str | None = None
    exported: str | None = None
    next_command: str | None = None
    problems: list[str] = field(default_factory=list)

    def content(self) -> dict[str, Any]:
        """Return the status for JSON."""
        return jsonable(asdict(self))


def read_status(folder: Path, now: float | None = None) -> Status:
    """Return the state of a run.

    Args: now: the time in seconds since 1970; None = that of the clock.
    Raises: ConfigError if `folder` is no run folder.
    """
    held = lock.is_held(folder) if folder.is_dir() else False
    marks = ("run.yaml", "result.json", FAILED)
    if not any((folder / name).exists() for name in marks) and held is False:
        raise ConfigError(f"{folder} is no run folder. {page.advise(folder)}")
    found = Status(str(folder))
    settings = {"algo": {"name": str}, "task": dict, "budget?": dict}
    saved = _read(found, folder / "run.yaml", {"config": settings})
    result = _read(found, folder / "result.json", RESULT)
    failed = _read(found, folder / FAILED, {"code": int, "error": str})
    log = list(read_tail(folder / "metrics.jsonl", EVENT))
    config = saved["config"] if saved else {}
    found.heartbeat = _find_heartbeat(folder, time.time() if now is None else now)
    found.state = _find_state(found.heartbeat, held, result, failed, log)
    found.algo = config.get("algo", {}).get("name")
    with _noting(found, folder / "metrics.jsonl"):
        _add_progress(found, config, log)
    with _noting(found, folder / EVALUATIONS):
        found.measure = _find_measure(folder, result)
    with _noting(found, folder):
        _add_verdict(found, folder, config, result, log)
    if found.state == "ended":
        found.exit_code, found.share, found.step = 0, 1.0, result["steps"]
    elif failed and found.state in ("stopped", "failed"):
        found.exit_code, found.error = failed["code"], failed["error"]
    if found.exit_code is not None:
        found.exit_meaning = CODES.get(found.exit_code, "ended by a signal, or unknown")
    there = [folder / name for name in card.EXPORTS if (folder / name).is_dir()]
    found.exported = str(there[0]) if there else None
    return found


def read_tail(path: Path, kind: Any) -> Iterator[dict[str, Any]]:
    """Yield the last lines of a JSON Lines file, within `TAIL` bytes, without damaged ones."""
    if not path.is_file():
        return
    with suppress(OSError), path.open("rb") as file:
        start = max(0, file.seek(0, 2) - TAIL)
        file.seek(start)
        lines = file.read(TAIL).split(b"\n")
        for line in lines[1 if start else 0 : -1]:
            with suppress(*safe_read.ERRORS):
                value = safe_read.parse_json(line.decode("utf-8", "replace"))
                safe_read.check(value, kind)
                yield value


class _noting:
    """Notes the errors of damaged content under `problems`."""

    def __init__(self, found: Status, path: Path) -> None:
        self.found, self.path = found, path

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> bool:
        if isinstance(error, (DamagedError, *safe_read.ERRORS)):
            self.found.problems.append(f"{self.path} is damaged: {error!s:.200}")
            return True
        return False


def _read(found: Status, path: Path, kind: Any) -> Any:
    try:
        return safe_read.read(path, kind)
    except DamagedError as error:
        found.problems.append(str(error))
        return None


def _find_heartbeat(folder: Path, now: float) -> float | None:
    times = []
    for name in WRITTEN:
        with suppress(OSError):
            times.append((folder / name).stat().st_mtime)
    return max(0.0, now - max(times)) if times else None


def _find_state(quiet: float | None, held: bool | None, result: Any, failed: Any, log: Any) -> str:
    slow = 10 * max((_number(event.get("seconds")) or 0.0 for event in log), default=0.0)
    alive = quiet is None or quiet <= max(QUIET, slow)
    if held or (held is None and not result and not failed):
        if not alive:
            return "stale"
        return "running" if log else "waiting"
    if failed and not result:
        return "stopped" if failed["code"] == EXIT_SIGNAL else "failed"
    return "ended" if result else "stale"


def _number(value: Any) -> float | None:
    sound = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if sound and math.isfinite(value) else None


def _add_progress(found: Status, config: dict[str, Any], log: Sequence[dict[str, Any]]) -> None:
    algo, budget = config.get("algo", {}), config.get("budget") or {}
    last = log[-1] if log else {}
    found.step = done = int(last.get("step", 0))
    if has_stages(log) or "iterations" in algo:
        found.iteration, found.iterations = last.get("iteration", 0), algo.get("iterations")
    else:
        found.steps = algo.get("steps")
    recent = [value for e in log[-20:] if (value := _number(e.get("seconds"))) is not None]
    pace = fmean(recent) if recent else None
    shares, left = list[float](), list[float]()
    if found.steps:
        shares.append(done / found.steps)
        if pace is not None:
            left.append(pace * (found.steps - done))
    if limit := _number(budget.get("tokens")):
        used = _number(last.get("generated_tokens")) or 0.0
        shares.append(used / limit)
        first = _number(log[-20:][0].get("generated_tokens")) if len(recent) > 1 else None
        if first is not None and used > first:
            left.append((limit - used) / (used - first) * sum(recent[1:]))
    if limit := _number(budget.get("seconds")):
        used = sum(_number(event.get("seconds")) or 0.0 for event in log)
        shares.append(used / limit)
        left.append(limit - used)
    found.share = min(1.0, max(shares)) if shares else None
    if found.state == "running" and left:
        found.seconds_left = max(0.0, min(left))


def _find_measure(folder: Path, result: dict[str, Any] | None) -> dict[str, Any] | None:
    if result:
        name = result["metric"]
        sure = result.get("intervals", {}).get(name, {})
        gain = result["after"] - result["before"]
        measure = {"name": name, "value": result["after"], "step": result["steps"]}
        measure |= {
            "interval": _interval(sure.get("after")),
            "before": result["before"],
            "change": gain,
        }
        return measure | {
            "change_interval": _interval(sure.get("change")),
            "p_value": sure.get("p_value"),
        }
    held = list(read_tail(folder / EVALUATIONS, EVALUATION))
    if not held:
        return None
    last = held[-1]
    name = last.get("metric_name") or next(iter(last["metrics"]), "metric")
    file = f"step-{last['step']:08d}" if last["step"] else "before"
    rows = safe_read.read_lines(folder / "completions" / f"{file}.jsonl", dict, MOST)
    scores = [_number((row.get("scores") or {}).get(name)) for row in rows]
    known = [score for score in scores if score is not None]
    interval = find_interval(known) if len(known) == len(scores) > 1 else None
    sure = _interval(interval)
    return {"name": name, "value": last["metric"], "step": last["step"], "interval": sure}


def _interval(value: Any) -> list[float] | None:
    """Return an interval of a result; None if it is none."""
    sound = isinstance(value, (list, tuple)) and len(value) == 2
    return list(value) if sound and None not in map(_number, value) else None


def _add_verdict(
    found: Status,
    folder: Path,
    config: dict[str, Any],
    result: dict[str, Any] | None,
    log: Events,
) -> None:
    begun = (folder / OVERRIDES).is_file()
    if result:
        found.outcome, found.verdict = result.get("outcome"), result.get("verdict")
        found.advice = result.get("advice") or []
        found.next_command = result.get("next_command") or None
        return
    if found.state in ("stopped", "stale", "failed") and begun:
        given = [a for a in run_folder.arguments(folder) if not a.startswith("hydra.run.dir=")]
        again = f"{name_folder(folder)} resume=auto"
        found.next_command = f"{shlex.join(['python', 'launch.py', *given])} {again}"
    if len(log) >= advice.WINDOW:
        first = list(safe_read.read_lines(folder / "metrics.jsonl", EVENT, 1))
        known = {"room": None, "bounded": not config.get("task", {}).get("rewards")}
        said = advice.find_advice([*first, *log[-advice.WINDOW :]], config.get("algo", {}) | known)
        found.advice = [one.content() for one in said]
