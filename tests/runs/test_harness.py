"""python -m common.harness: lm-eval on the model before and after a run, with a task over a local
file.
"""

import importlib.util
import json
import math
import shutil
from pathlib import Path

import pytest

from tests.support import ROOT, SMALL_GRPO

TASK = """task: letters_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{rows}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list: [{{metric: acc}}]
metadata: {{version: 1}}
"""


@pytest.fixture
def finished(in_cache, tmp_path) -> Path:
    """A run of the model that comes with the project, named by its path."""
    from launch import compose, train

    (base,) = (ROOT / "common" / "assets").glob("tiny-*")
    kept = [text for text in SMALL_GRPO if not text.startswith(("model", "task"))]
    more = ["task=units", "model=hf", f"model.path={base}", "algo.steps=1"]
    train(compose([*kept, *more]), tmp_path / "run")
    return tmp_path / "run"


def test_mistakes_are_worded(launch, tmp_path):
    (tmp_path / "empty").mkdir()
    done = launch(str(tmp_path / "empty"), "--tasks", "a", module="common.harness", code=2)
    if importlib.util.find_spec("lm_eval") is None:
        assert done.stderr == (
            "error: lm-eval is not installed. Install it: pip install 'clutch[harness]'.\n"
        )
    else:
        assert "has no run.yaml, so it is no run folder" in done.stderr


@pytest.mark.filterwarnings("ignore")
def test_a_task_over_a_local_file_before_and_after(launch, finished, tmp_path):
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("lm-eval is not installed: pip install 'clutch[harness]'")
    rows = tmp_path / "rows.jsonl"
    choices = [" aa", " bb"]
    text = "".join(
        json.dumps({"question": f"{i} km in m:", "choices": choices, "label": i % 2}) + "\n"
        for i in range(12)
    )
    rows.write_text(text)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "letters.yaml").write_text(TASK.format(rows=rows))
    own = ["--task-dir", str(tmp_path / "tasks")]
    given = [str(finished), *own, "--tasks"]
    done = launch(*given, "letters_choice", module="common.harness", fresh=True)
    found = json.loads((finished / "harness.json").read_text())
    sides = found["tasks"]["letters_choice"]["acc"]
    assert sides.keys() == {"before", "after"}
    for side in sides.values():
        assert 0 <= side["value"] <= 1
        assert math.isclose(
            side["stderr"], math.sqrt(side["value"] * (1 - side["value"]) / 11), abs_tol=1e-6
        )
    assert "| letters_choice | acc |" in done.stdout
    done = launch(*given, "leters_choice", module="common.harness", code=2, fresh=True)
    assert "Did you mean 'letters_choice'?" in done.stderr
    shutil.rmtree(finished / "model")
    done = launch(*given, "letters_choice", module="common.harness", code=2, fresh=True)
    assert "has no model yet" in done.stderr
