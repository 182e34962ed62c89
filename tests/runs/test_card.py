"""The model card in RUN/model and RUN/adapter: accepted by huggingface_hub, true, and without paths
or secrets.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import EvalResult, ModelCard

from common.report import card
from launch import compose, train
from tests.support import CONF, SMALL_GRPO, SMALL_RFT, SMALL_SFT
from tests.support.adapters import ADAPTER, EGGROLL

pytestmark = pytest.mark.usefixtures("in_cache")
SHORT = [*SMALL_GRPO, "algo.steps=1"]


def read(path: Path) -> ModelCard:
    """A card, after the checks that hold for each."""
    text = (path / card.CARD).read_text(encoding="utf-8")
    found = ModelCard(text)
    results = found.data.eval_results
    assert results
    assert all(isinstance(one, EvalResult) for one in results)
    assert {"license", "library_name", "tags", "model_name"} <= found.data.__dict__.keys()
    assert str(path.parent.resolve()) not in text
    assert str(Path.home()) not in text
    assert len(text) < 60_000
    return found


def trained(folder: Path, *overrides: str) -> Any:
    return train(compose([*overrides, "hardware=cpu"], CONF), folder)


@pytest.fixture(scope="module")
def run(cache, tmp_path_factory) -> Path:
    """A run of all weights, which also measured another task."""
    folder = tmp_path_factory.mktemp("card") / "full"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLUTCH_CACHE", str(cache))
        trained(folder, *SHORT, "evaluate.also=[units]")
    return folder


@pytest.fixture
def copy(run, tmp_path) -> Path:
    return shutil.copytree(run, tmp_path / "copy")


def change(path: Path, **values: Any) -> None:
    content = yaml.safe_load(path.read_text())
    for key, value in values.items():
        node = content
        *outer, last = key.split("__")
        for name in outer:
            node = node[name]
        node[last] = value
    text = json.dumps(content) if path.suffix == ".json" else yaml.safe_dump(content)
    path.write_text(text)


# --- the kinds of runs


def test_a_run_of_all_weights(run):
    found = read(run / "model")
    result = json.loads((run / "result.json").read_text())
    assert found.data.pipeline_tag == "text-generation"
    assert found.data.library_name == "transformers"
    by_name = {(one.dataset_name, one.metric_name): one for one in found.data.eval_results}
    headline = by_name["translate", result["metric"]]
    assert headline.metric_value == pytest.approx(result["after"], abs=1e-6)
    assert any(task == "units" for task, _ in by_name)
    assert "units/accuracy" in found.text.partition("## What it forgot")[2]
    for part in ("## A failure", "## Cost", "energy: not measured", "## How it was made", "seed"):
        assert part in found.text
    assert "AutoModelForCausalLM.from_pretrained" in found.text


def test_an_adapter_and_its_merged_model(tmp_path):
    pytest.importorskip("peft")
    trained(tmp_path / "out", *EGGROLL, "algo.steps=1", "model.adapter.merge=true")
    found = read(tmp_path / "out" / "adapter")
    assert found.data.library_name == "peft"
    assert "lora" in found.data.tags
    assert "PeftModel.from_pretrained" in found.text
    assert "rank 4, alpha" in found.text
    assert "linear layers: down_proj, gate_proj, k_proj" in found.text
    merged = read(tmp_path / "out" / "model")
    assert merged.data.library_name == "transformers"
    assert "merged" in merged.text


@pytest.mark.parametrize(
    ("overrides", "folder", "said"),
    [
        ([*EGGROLL[:-1], "algo.steps=1", "model.quantize=int8"], "model", "int8"),
        ([*SHORT, ADAPTER, "model.quantize=nf4"], "adapter", "nf4"),
        ([*SMALL_RFT, "algo.iterations=1"], "model", "rft"),
        ([*SMALL_SFT, "algo.steps=1"], "model", "sft"),
    ],
    ids=["quantised", "an adapter on quantised weights", "rft", "sft"],
)
def test_other_kinds_of_runs(tmp_path, overrides, folder, said):
    if folder == "adapter":
        pytest.importorskip("peft")
    trained(tmp_path / "out", *overrides)
    found = read(tmp_path / "out" / folder)
    assert said in found.data.tags
    assert said in found.text


def test_a_classifier(tmp_path):
    small = ["algo.epochs=1", "algo.model.size=16", "algo.model.heads=2", "algo.model.layers=1"]
    trained(tmp_path / "out", "algo=classify", *small, "task.rows=64", "task.test_rows=32")
    found = read(tmp_path / "out" / "model")
    assert found.data.pipeline_tag == "text-classification"
    assert "ddp_bench.models.load" in found.text


# --- what it must not hold, and what it survives


def test_local_paths_become_names(copy):
    base = copy.parent / "private-place" / "my-base"
    base.mkdir(parents=True)
    (base / "README.md").write_text("---\nlicense: mit\nlanguage: de\n---\n")
    rows = str(copy.parent / "private-place" / "rows.jsonl")
    change(copy / "run.yaml", config__model__path=str(base), config__task__path=rows)
    change(copy / "result.json", model=str(base))
    (copy / ".hydra").mkdir(exist_ok=True)
    overrides = [f"model.path={base}", f"task.path={rows}", "task.test_path=../private-place/t.csv"]
    (copy / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    text = card.make(copy, "model")
    assert "private-place" not in text
    assert "model.path=my-base" in text
    assert "rows.jsonl" in text
    assert "t.csv" in text
    data = ModelCard(text).data
    # The name of a local folder may be that of another model on the hub.
    assert (data.base_model, data.license, data.language) == (None, "mit", "de")


def test_a_hub_id_stays(copy):
    change(copy / "run.yaml", config__model__path="org/base-1b", model_commit="abc123")
    data = ModelCard(text := card.make(copy, "model")).data
    assert data.base_model == "org/base-1b"
    assert "abc123" in text
    assert data.license == "other"


def test_secrets_are_left_out(copy, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "correct-horse-battery")
    rows = [{"id": 0, "prompt": "p", "answer": "a", "scores": {}}]
    rows[0]["completion"] = "correct-horse-battery hf_" + "x1Y2" * 8
    (copy / "completions" / "after.jsonl").write_text(json.dumps(rows[0]) + "\n")
    text = card.make(copy, "model")
    assert "[secret]" in text
    assert "horse" not in text
    assert "x1Y2" not in text


@pytest.mark.parametrize(
    "completion",
    [
        "```\n# A heading\n```python",
        "---\nlicense: mine\n---",
        "| a | b |\n|---|---|",
        "\x1b]0;title\x07\x00",
        "\ud800 half",
        "x" * 10**6,
        "`" * 500,
        "<script>alert(1)</script>",
        "",
    ],
    ids=[
        "fences",
        "front matter",
        "table",
        "control",
        "surrogate",
        "long",
        "ticks",
        "html",
        "none",
    ],
)
def test_odd_completions_stay_inside(copy, completion):
    row = {"id": 0, "prompt": completion, "answer": completion + "y", "completion": completion}
    (copy / "completions" / "after.jsonl").write_text(json.dumps(row | {"scores": {}}) + "\n")
    text = card.make(copy, "model")
    assert len(text) < 60_000
    assert ModelCard(text).data.license == "other"
    fence, inside = "", []
    for line in text.splitlines():
        if re.fullmatch(r"`{3,}\w*", line) and not fence:
            fence = re.match("`+", line)[0]
        elif line == fence:
            fence = ""
        elif not fence:
            inside.append(line)
    assert fence == ""
    assert "## How to load it" in inside
    assert not any("# A heading" in line or "<script" in line for line in inside)
    assert "\x1b" not in text


def test_a_run_without_failures_says_so(copy):
    row = {"id": 0, "prompt": "p", "answer": "a", "completion": "a"}
    scores = {json.loads((copy / "result.json").read_text())["metric"]: 100.0}
    (copy / "completions" / "after.jsonl").write_text(json.dumps(row | {"scores": scores}) + "\n")
    assert "None among 1 held-out" in card.make(copy, "model")


def test_measures_that_are_no_numbers_are_left_out(copy):
    result = json.loads((copy / "result.json").read_text())
    result["metrics"]["after"]["odd"] = result["metrics"]["before"]["odd"] = float("nan")
    (copy / "result.json").write_text(json.dumps(result))
    names = {one.metric_name for one in ModelCard(card.make(copy, "model")).data.eval_results}
    assert "odd" not in names
    assert result["metric"] in names


def test_small_numbers_keep_their_digits(copy):
    result = json.loads((copy / "result.json").read_text())
    small = {"before": 3.2e-8, "after": 1.23456e-9, "change": [-4e-8, -2.5e-8]}
    result["metrics"]["before"]["odd"], result["metrics"]["after"]["odd"] = 3.2e-8, 1.23456e-9
    sure = small | {"before": [3e-8, 4e-8], "after": [1e-9, 2e-9], "p_value": 1.23456e-11}
    result.setdefault("intervals", {})["odd"] = sure
    (copy / "result.json").write_text(json.dumps(result))
    results = ModelCard(card.make(copy, "model")).data.eval_results
    (found,) = [one for one in results if one.metric_name == "odd"]
    assert found.metric_value == 1.23456e-9
    assert found.metric_args == {
        "before": 3.2e-8,
        "interval_95": [1e-9, 2e-9],
        "change_interval_95": [-4e-8, -2.5e-8],
        "p_value": 1.23e-11,
    }


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["v_proj", "q_proj"], "on q_proj, v_proj\n"),
        ("all-linear", "on all-linear\n"),
        ([f"a.{n}.{kind}" for n in range(60) for kind in "vq"], "120 linear layers: q, v\n"),
        ([f"layers.{n}.part_{n:03}" for n in range(200)], "part\\_011 and 188 more\n"),
    ],
    ids=["ends", "pattern", "names", "many kinds"],
)
def test_adapted_layers_are_named_whole(copy, targets, said):
    (copy / "adapter").mkdir()
    settings = {"r": 2, "lora_alpha": 4, "target_modules": targets}
    (copy / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    assert said.replace("\\_", "_") in card.make(copy, "adapter").replace("\\_", "_")


def test_long_texts_are_cut_between_words(copy):
    words = [f"word{number:04}" for number in range(2000)]
    change(copy / "result.json", verdict=" ".join(words), ended_by=", ".join(words))
    (copy / ".hydra").mkdir(exist_ok=True)
    (copy / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump([f"a={w}" for w in words]))
    text = card.make(copy, "model")
    assert len(text) < 60_000
    ends = re.findall(r"(\S+) \.\.\.", text)
    assert len(ends) >= 3
    assert all(re.fullmatch(r"(a=)?word\d{4}", end) for end in ends)


@pytest.mark.parametrize("place", [1180, 1190, 1195])
def test_a_secret_at_a_cut_is_left_out_whole(copy, monkeypatch, place):
    monkeypatch.setenv("MY_API_KEY", "zebra_horse_battery_staple")
    row = {"id": 0, "prompt": "p", "answer": "a", "scores": {}}
    row["completion"] = "x" * place + "zebra_horse_battery_staple"
    (copy / "completions" / "after.jsonl").write_text(json.dumps(row) + "\n")
    change(copy / "result.json", verdict="y" * place + "zebra_horse_battery_staple " * 3)
    assert "zebra" not in card.make(copy, "model")


def test_a_card_that_cannot_be_made_does_not_fail_the_run(copy, caplog):
    (copy / "run.yaml").unlink()
    card.write_or_warn(copy)
    assert "README.md" in caplog.text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("task.path=/home/me/rows.jsonl", "task.path=rows.jsonl"),
        ("model.path=org/name", "model.path=org/name"),
        ("'~/x/y z'", "'y z'"),
        ("[C:\\Users\\me\\a.csv]", "[a.csv]"),
        ("data/deep/er/rows.csv", "rows.csv"),
        ("12 tokens/s, 1 / 2", "12 tokens/s, 1 / 2"),
        ("https://example.org/a/b", "https://example.org/a/b"),
        ("docs/eggroll.md", "docs/eggroll.md"),
    ],
)
def test_paths_in_texts(text, shown):
    if " z" in text:
        text, shown = text.replace(" z", ""), shown.replace(" z", "")
    assert card.hide_paths(text) == shown
