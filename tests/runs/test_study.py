import argparse
import itertools
import json
import os
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from benchmarks import study as studies
from benchmarks.study import Study, join, name_places, page
from common.config import ConfigError
from common.uncertainty import find_difference
from launch import compose
from tests.support import ROOT
from tests.support.commands import Launch
from tests.support.refusals import refuses

STUDIES = sorted((ROOT / "benchmarks" / "study").glob("*.yaml"))


def make_run(seed, after, **more):
    points = [[0, 0, 0, 0.0], [5, 1000, 10, 40.0], [10, 2000, 20, 50.0]]
    metrics = {"before": {"exact": 0.0}, "after": {"exact": 50.0}}
    return {
        **{"of": {"algo": "one"}, "seed": seed, "metric": "exact", "before": 0.0, "after": after},
        **{"steps": 10, "generated_tokens": 2000, "seconds": 20.0, "metrics": metrics},
        **{"points": points, "entropy": [1.0, 0.5], "drift": None, "prompts": "same"},
        "scores": {"before": "0000", "after": "0011"},
        **more,
    }


@pytest.mark.thorough
@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_run_of_a_shipped_study_composes(path):
    study = Study.read(path)
    runs = list(study.runs(1))
    sizes = [len(values) for values in study.axes.values()]
    assert len(runs) == np.prod(sizes)
    assert study.seeds >= 3 or study.skip, "one seed is enough to choose settings"
    places = {"{weights}": "w", "{data}": "d", "{start}": "w"}
    places |= {"{root}": str(ROOT), "{rows}": str(ROOT)}
    for one in runs:
        for overrides in (one["overrides"], one.get("start", [])):
            given = [name_places(text, places) for text in overrides]
            folders = [text for text in given if text.startswith("--config-dir=")]
            folder = folders[0].partition("=")[2] if folders else None
            compose([text for text in given if text not in folders], folder)


def test_a_page_says_what_the_results_say():
    """Means, the range of seeds, the cost of nine tenths of the gain, and the paired test."""
    other = "1111"
    one = [make_run(seed, 50.0) for seed in (0, 1)]
    two = [
        make_run(seed, after, of={"algo": "two"}, scores={"before": "0000", "after": other})
        for seed, after in ((0, 90.0), (1, 110.0))
    ]
    refused = {"of": {"algo": "three"}, "seed": 0, "verdict": "it has no backward pass", "code": 2}
    about = {"device": "a CPU", "torch": "2", "commit": "abcdef01", "date": "2026-11-25T00:00"}
    records = [record | about for record in (*one, *two, refused)]
    study = Study("study", "What it is.", 2, {"algo": dict.fromkeys(("one", "two", "three"))}, [])
    wanted = [{"of": {"algo": name}, "seed": 0} for name in ("one", "two", "three", "four")]
    text = page.write(study, wanted, records, None)
    assert "| one | 2 | exact | 0.0 | 50.0 |" in text
    assert "| 90.0 to 110.0 |" in text
    assert "1.5k, 15 s" in text, "45 points lie half way between 40 and 50"
    scores = np.array([[0.0, 0, 100, 100]] * 2), np.array([[100.0] * 4] * 2)
    gap, _, _ = find_difference(scores[1], scores[0])
    assert f"| one | two | {gap:+.1f} |" in text
    assert "- three, seed 0: it has no backward pass" in text
    assert "3 of 4 runs are there." in text


def test_a_page_compares_at_equal_seconds_too():
    """The slow one had 40 points after the 10 seconds in which the quick one came to 50."""
    quick = [[0, 0, 0, 0.0], [5, 1000, 5, 40.0], [10, 2000, 10, 50.0]]
    runs = [
        make_run(0, 50.0, of={"task": task, "algo": algo})
        | ({"points": quick, "seconds": 10.0} if algo == "quick" else {})
        for task in ("a", "b")
        for algo in ("quick", "slow")
    ]
    about = {"device": "a CPU", "torch": "2", "commit": "abcdef01", "date": "2026-11-25T00:00"}
    axes = {"task": dict.fromkeys("ab"), "algo": dict.fromkeys(("quick", "slow"))}
    study = Study("study", "What it is.", 1, axes, [])
    text = page.write(study, [], [run | about for run in runs], None)
    assert "| algo | a, 10 s | b, 10 s |" in text
    assert "| quick | 50.0 | 50.0 |" in text
    assert "| slow | 40.0 | 40.0 |" in text


def test_a_run_that_goes_on_from_another_counts_both():
    warm = [["algo=rft"], ["algo=eggroll", "model.path={start}/model"]]
    study = Study(
        "study", "", 1, {"task": {"units": ["task=units"]}, "way": {"warm": warm}}, ["a=1"]
    )
    (one,) = study.runs(1)
    assert one["start"] == ["a=1", "task=units", "algo=rft", "seed=0"]
    assert one["overrides"] == ["a=1", "task=units", *warm[1], "seed=0"]
    first, then = make_run(0, 50.0), make_run(0, 90.0, before=50.0)
    both = join(first, then)
    assert (both["before"], both["after"]) == (0.0, 90.0)
    assert (both["steps"], both["seconds"], both["generated_tokens"]) == (20, 40.0, 4000)
    assert both["points"][3] == [15, 3000, 30, 40.0]
    refused = {"code": 2, "verdict": "it has no backward pass"}
    assert join(refused, then) == join(first, refused) == refused


def test_a_run_that_fails_takes_no_other_with_it(monkeypatch, tmp_path):
    """A line of each that has ended is in the file, whatever became of those before it."""

    def run(overrides, folder, environment):
        if overrides == ["fails"]:
            raise RuntimeError("it failed")
        return {"after": 1.0}

    monkeypatch.setattr(studies, "measure_run", run)
    wanted = ["fails", "one", "other"]
    missing = [{"of": {"way": name}, "seed": 0, "overrides": [name]} for name in wanted]
    options = argparse.Namespace(jobs=1, weights=None, data=None, quick=False)
    report = SimpleNamespace(conditions=dict.fromkeys(studies.MACHINE))
    with pytest.raises(RuntimeError, match=r"1 of 3 runs .* it failed"):
        studies.run_all(missing, tmp_path / "results.jsonl", options, report)
    ended = studies.read_records(tmp_path / "results.jsonl")
    assert sorted(record["of"]["way"] for record in ended) == ["one", "other"]


def test_a_run_that_is_refused_is_made_again(tmp_path):
    """It may lack no more than a package: what it came to is no result of the study."""
    with pytest.raises(RuntimeError, match=r"ended with 2: .*algo\.no_such"):
        studies.measure_run(["algo=rft", "algo.no_such=1"], tmp_path / "out", dict(os.environ))


def test_a_missing_folder_option_is_refused_first(monkeypatch, tmp_path):
    ran = []
    monkeypatch.setattr(studies, "measure_run", lambda *given: ran.append(given) or {"after": 1.0})
    wanted = ["task=units", "model.path={weights}"]
    missing = [{"of": {"way": name}, "seed": 0, "overrides": [name]} for name in wanted]
    options = argparse.Namespace(jobs=1, weights=None, data=None, quick=False)
    report = SimpleNamespace(conditions=dict.fromkeys(studies.MACHINE))
    with pytest.raises(ConfigError, match="needs a folder: --weights DIR"):
        studies.run_all(missing, tmp_path / "results.jsonl", options, report)
    assert not ran


def test_missing_folders_are_refused_before_the_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(studies, "measure_run", lambda *_: pytest.fail("it was run"))
    one = {"of": {"way": "a"}, "seed": 0, "overrides": ["algo=grpo"], "start": ["task.path={data}"]}
    options = argparse.Namespace(jobs=1, weights=None, data=tmp_path / "typo", quick=False)
    report = SimpleNamespace(conditions=dict.fromkeys(studies.MACHINE))
    with pytest.raises(ConfigError, match="typo is none: this study needs a folder: --data DIR"):
        studies.run_all([one], tmp_path / "results.jsonl", options, report)


def test_a_torn_line_is_made_again(monkeypatch, tmp_path):
    monkeypatch.setattr(studies, "measure_run", lambda *_: {"after": 1.0})
    path = tmp_path / "results.jsonl"
    whole = {"of": {"way": "a"}, "seed": 0, "overrides": []}
    path.write_text(json.dumps(whole) + '\n{"of": {"wa')
    assert studies.read_records(path) == [whole]
    options = argparse.Namespace(jobs=1, weights=None, data=None, quick=False)
    report = SimpleNamespace(conditions=dict.fromkeys(studies.MACHINE))
    studies.run_all([whole | {"of": {"way": "b"}}], path, options, report)
    assert [one["of"]["way"] for one in studies.read_records(path)] == ["a", "b"]


def test_records_of_other_settings_are_not_those_of_the_study():
    one = {"of": {"way": "a"}, "seed": 0, "overrides": ["budget.tokens=500000", "seed=0"]}
    other = one | {"overrides": ["budget.tokens=250000", "seed=0"]}
    assert not studies.is_same(one, other)
    assert studies.is_outdated(other, [one])
    assert not studies.is_outdated(one, [one])
    assert studies.is_outdated(other | {"seed": 7}, [one])
    beyond = one | {"seed": 7, "overrides": [*one["overrides"][:-1], "seed=7"]}
    assert not studies.is_outdated(beyond, [one]), "it is of a seed beyond --repeats"


def test_values_of_an_axis_may_be_numbers(monkeypatch, tmp_path):
    monkeypatch.setattr(studies, "measure_run", lambda *_: {"after": 1.0})
    path, results = tmp_path / "a.yaml", tmp_path / "results.jsonl"
    study = {"about": "", "seeds": 1, "every": [], "axes": {"lr": {0.001: [], 1: []}}}
    path.write_text(yaml.safe_dump(study))
    options = argparse.Namespace(jobs=1, weights=None, data=None, quick=False)
    report = SimpleNamespace(conditions=dict.fromkeys(studies.MACHINE))
    studies.run_all(list(Study.read(path).runs(1)), results, options, report)
    assert [one["of"] for one in studies.read_records(results)] == [{"lr": "0.001"}, {"lr": "1"}]
    for values in ({True: []}, ["a"], {"a": "b"}):
        path.write_text(yaml.safe_dump(study | {"axes": {"amp": values}}))
        with pytest.raises(ConfigError, match=r"axes\.amp=.* is no dict of lists of overrides"):
            Study.read(path)


def test_a_run_leaves_nothing_while_the_others_run(monkeypatch, tmp_path):
    """A model and two checkpoints of each would fill the disk."""
    present = []

    def measure(overrides, folder, environment):
        present.append(sorted(path.name for path in folder.parent.glob("*-*")))
        folder.mkdir()
        return {"after": 1.0, "before": 0.0, "metrics": {}, "scores": {}, "points": [[0] * 4]}

    monkeypatch.setattr(studies, "measure_run", measure)
    monkeypatch.setattr(studies, "join", lambda first, then: then)
    ones = [{"of": {"way": n}, "seed": 0, "overrides": [], "start": []} for n in ("a", "b")]
    options = argparse.Namespace(jobs=1, weights=None, data=None, quick=False)
    report = SimpleNamespace(conditions=dict.fromkeys(studies.MACHINE))
    studies.run_all(ones, tmp_path / "results.jsonl", options, report)
    assert present == [[], ["0-start"], [], ["1-start"]]


def test_examples_that_are_skipped_are_in_no_measure(tmp_path):
    study = Study("a", "", 1, {"way": {"x": []}}, [], skip=2)
    measures = {"exact": 50.0, "pass@1": 50.0}
    record = {"of": {"way": "x"}, "seed": 0, "overrides": [], "after": 50.0, "before": 25.0}
    record |= {"metric": "exact", "steps": 1, "generated_tokens": 1, "seconds": 1.0, "points": []}
    record |= {"entropy": [], "drift": None, "prompts": "a", "peak_memory_gb": None, "code": 0}
    record |= dict.fromkeys(studies.MACHINE, "x") | {"date": "2026-11-27"}
    scores = {"before": "0001", "after": "0011"}
    record |= {"metrics": {"before": measures, "after": measures}, "scores": scores}
    said = page.write(study, [record], [record], None)
    assert "100.0" in said
    assert "pass@" not in said
    for lacking in ({"before": ""}, {"after": "01"}):
        torn = record | {"scores": scores | lacking}
        refuses(lambda torn=torn: page.write(study, [record], [torn], None), key="skip", value="2")


def test_toy_runs_are_not_put_among_the_results(tmp_path):
    path = ROOT / "benchmarks" / "study" / "readme.yaml"
    options = argparse.Namespace(file=path, quick=True, results=None, repeats=1, device="cpu")
    with pytest.raises(ConfigError, match="give them a file of their own, --results FILE"):
        studies.run(options)


def test_a_study_from_an_archive_has_a_page(tmp_path):
    said = page.describe_state(
        [], [dict.fromkeys(studies.MACHINE, "x") | {"commit": None, "date": "2026-11-27"}]
    )
    assert "commits unknown" in said


def test_what_is_no_study_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("seeds: 3\n")
    with pytest.raises(ConfigError, match="it needs about, axes, every, seeds"):
        Study.read(tmp_path / "a.yaml")


@pytest.mark.thorough
def test_a_study_is_filled_in_over_several_sessions(launch: Launch, tmp_path):
    """Runs that are there are not run again, and the page is made of the file alone."""
    study = {"about": "Two.", "seeds": 1, "every": ["algo.steps=1", "task=units"]}
    study["axes"] = {"algorithm": {"grpo": ["algo=grpo"], "eggroll": ["algo=eggroll"]}}
    path, results = tmp_path / "two.yaml", tmp_path / "two.jsonl"
    path.write_text(yaml.safe_dump(study, sort_keys=False))
    benchmark = partial(launch, "study", str(path), "--quick", "--results", str(results))
    assert "1 of 2 runs are there" in benchmark("--runs", "1", module="benchmarks").stdout
    (first,) = map(json.loads, results.read_text().splitlines())
    assert first["of"] == {"algorithm": "grpo"}
    assert len(first["scores"]["after"]) == 4
    assert first["points"][-1][3] == pytest.approx(first["after"])
    results.write_text(json.dumps(first | {"after": 77.0}) + "\n")
    said = benchmark(module="benchmarks").stdout
    assert "2 of 2 runs are there" in said
    assert "77.0" in said, "it was run again"
    one, two = map(json.loads, results.read_text().splitlines())
    assert (one["after"], two["of"]) == (77.0, {"algorithm": "eggroll"})
    benchmark("--page", str(tmp_path / "page.md"), module="benchmarks")
    assert (tmp_path / "page.md").read_text() in said


def read_results(name):
    """The records of a study that is shipped, by what tells its combinations apart."""
    path = ROOT / "benchmarks" / "results" / "cpu-2core" / f"study-{name}.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        pytest.param(list(runs), id=" ".join([name, *of]))
        for of, runs in itertools.groupby(
            sorted(records, key=lambda record: [*record["of"].values()]),
            key=lambda record: [*record["of"].values()],
        )
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "runs", [*read_results("readme"), *read_results("grpo"), *read_results("recipes")]
)
def test_the_documented_ranges_hold(runs, launch: Launch, tmp_path):
    """A command comes to what the README, docs/grpo.md and conf/experiment say of five seeds,
    within the uncertainty of its examples.
    """
    after = [run["after"] for run in runs]
    assert len(after) == 5
    overrides = [text for text in runs[0]["overrides"] if not text.startswith("seed=")]
    launch(*overrides, "seed=7", "hydra.run.dir=out")
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert min(after) - 6 <= result["after"] <= max(after) + 6
