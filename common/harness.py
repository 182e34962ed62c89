"""Measure a run with lm-eval (EleutherAI's evaluation harness), before and after its training.

    pip install 'clutch[harness]'
    python -m common.harness outputs/mine --tasks arc_easy,hellaswag
    python -m common.harness outputs/mine --tasks mine --task-dir my_tasks

Writes RUN/harness.json: by task and measure the value before and after, with the standard errors
that lm-eval gives. Nothing is downloaded: a task must lie in the cache of `datasets`, or name local
files in a YAML file of --task-dir.
"""

import argparse
import difflib
import importlib.util
import json
import math
import os
from pathlib import Path
from typing import Any

from common.config import ConfigError
from common.exits import ending_tool
from common.files import write_text
from common.report import story
from common.report.events import markdown_table

FILE = "harness.json"


def find_models(folder: Path) -> dict[str, tuple[str, str | None]]:
    """Return where a run's model is before and after: the path of the model, and of an adapter.

    Raises: ConfigError where the run has no model, or has built the one that it began with.
    """
    if not (folder / "run.yaml").exists():
        raise ConfigError(
            f"{folder} has no run.yaml, so it is no run folder. Give one, for example outputs/mine."
        )
    model = story.read_run(folder, "config")["config"]["model"]
    model_dir, adapter = folder / "model", folder / "adapter"
    if not model_dir.is_dir() and not adapter.is_dir():
        raise ConfigError(f"{folder} has no model yet: the run has not ended. Go on with it first.")
    found: dict[str, tuple[str, str | None]] = {}
    if model["path"] is not None and model["gguf_file"] is None:
        found["before"] = model["path"], None
    if model_dir.is_dir():
        found["after"] = str(model_dir), None
    else:
        found["after"] = str(model["path"]), str(adapter)
    return found


def measure(
    models: dict[str, tuple[str, str | None]],
    tasks: list[str],
    task_dir: Path | None,
    limit: int | None,
    batch: int,
) -> dict[str, dict[str, Any]]:
    """Return by task and measure what lm-eval finds of each model: {"before": {"value", "stderr"},
    "after": ...}. Raises: ConfigError for a task that it does not know or has no data for.
    """
    import torch
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if task_dir is None else str(task_dir))
    known = tuple(manager.all_tasks)
    for task in tasks:
        near = difflib.get_close_matches(task, known, n=5)
        if task not in known:
            raise ConfigError(
                f"--tasks={task}: lm-eval has no such task, of {len(known):,}."
                + (f" Did you mean {', '.join(near)}?" if near else "")
                + " lm-eval ls tasks lists them; --task-dir names a folder with tasks of your own."
            )
    found: dict[str, dict[str, Any]] = {}
    for when, (path, adapter) in models.items():
        more: dict[str, Any] = {} if adapter is None else {"peft": adapter}
        device = "cuda" if torch.cuda.is_available() else "cpu"
        lm = HFLM(pretrained=path, batch_size=batch, device=device, **more)
        try:
            results: Any = evaluator.simple_evaluate(
                lm, tasks=tasks, task_manager=manager, limit=limit, bootstrap_iters=1000
            )
        except (ConnectionError, FileNotFoundError, OSError) as error:
            raise ConfigError(
                f"--tasks={','.join(tasks)}: lm-eval has no data for them here"
                f" ({type(error).__name__}: {str(error).splitlines()[0]}). Load them once where"
                " there is a network, or give tasks over local files with --task-dir."
            ) from error
        for task, measures in results["results"].items():
            for name, value in measures.items():
                measure_name, _, kept = name.partition(",")
                if not isinstance(value, int | float) or measure_name.endswith(
                    ("_stderr", "sample_len")
                ):
                    continue
                error = measures.get(f"{measure_name}_stderr,{kept}")
                known = isinstance(error, int | float) and math.isfinite(error)
                row = found.setdefault(task, {}).setdefault(measure_name, {})
                row[when] = {"value": value, "stderr": error if known else None}
    return found


def main() -> None:
    """Run the command. Exit codes: 0 done, 2 a mistake."""
    parser = argparse.ArgumentParser(
        "python -m common.harness", description="Measure a run with lm-eval, before and after."
    )
    parser.add_argument("folder", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("--tasks", required=True, help="names of lm-eval's, with commas")
    parser.add_argument("--task-dir", type=Path, help="a folder of YAML files of tasks of your own")
    parser.add_argument("--limit", type=int, help="examples of each task; all without it")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a forward")
    given = parser.parse_args()
    with ending_tool():
        if importlib.util.find_spec("lm_eval") is None:
            raise ConfigError(
                "lm-eval is not installed. Install it: pip install 'clutch[harness]'."
            )
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            os.environ.setdefault(name, "1")
        models = find_models(given.folder)
        tasks = [name for name in given.tasks.split(",") if name]
        if not tasks:
            raise ConfigError(f"--tasks={given.tasks} names none. Give names with commas.")
        if given.limit is not None and given.limit < 1:
            raise ConfigError(f"--limit={given.limit} must be at least 1. Leave it out for all.")
        if given.task_dir is not None and not given.task_dir.is_dir():
            raise ConfigError(f"--task-dir={given.task_dir} is no folder.")
        found = measure(models, tasks, given.task_dir, given.limit, given.batch)
        path = given.folder / FILE
        about = {
            "tasks": (story.load(path) or {}).get("tasks", {}) | found,
            "limit": given.limit,
            "models": {k: v[0] for k, v in models.items()},
        }
        write_text(path, json.dumps(about, indent=2) + "\n")
        print(markdown_table(story.find_harness(given.folder)))
        if "before" not in models:
            print("The model that the run began with was built by it, so there is no `before`.")
        print(f"written to {path}")


if __name__ == "__main__":
    main()
