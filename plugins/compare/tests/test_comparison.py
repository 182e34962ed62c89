"""The comparison of runs: settings, intervals, tests, pages."""

import csv
import itertools
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from common.config import ConfigError
from common.report import read_runs
from common.report.forgetting import find_others
from common.report.runs import points
from common.sweep import Sweep
from plugins.compare import comparison as compare
from tests.support import CONF, ROOT, SMALL, events
from tests.support.short_runs import LETTERS


@pytest.mark.thorough
def test_one_command_compares_algorithms_at_equal_budget(launch, tmp_path):
    done = launch(
        *(
            "--config-dir",
            CONF,
            "-m",
            "algo=eggroll,grpo,rft,classify",
            *LETTERS[:3],
            *LETTERS[5:],
            "seed=1,2",
        ),
        *("budget.tokens=2000", "hydra.sweep.dir=sweep"),
        code=2,
    )
    sweep = tmp_path / "sweep"
    results = [json.loads((sweep / str(n) / "result.json").read_text()) for n in range(6)]
    assert [result["algo"] for result in results] == ["eggroll"] * 2 + ["grpo"] * 2 + ["rft"] * 2
    for result in results:
        assert result["ended_by"] == "budget.tokens=2000"
        assert 2000 <= result["generated_tokens"] < 6000
    for number, result in enumerate(results):
        said = rf"{result['before']:.2f} -> {result['after']:.2f} \(change at 95 %: .*\),"
        said += f" {result['steps']} steps"
        assert re.search(
            rf"^=== job {number} algo={result['algo']} seed=\d: exact {said}",
            done.stdout,
            flags=re.M,
        )
    # Those that failed are named, and did not stop the others.
    assert json.loads((sweep / "6" / "failed.json").read_text())["code"] == 2
    page = read_page(sweep)
    for text in (done.stdout, page):
        assert re.search(
            r"^(- )?failed \(exit code 2\): .*6`? \(algo=classify\): \S+ has no effect with"
            r" algo=classify",
            text,
            flags=re.M,
        )
    assert "Traceback" not in done.stderr
    for algo in ("eggroll", "grpo", "rft"):
        assert re.search(rf"^\| algo={algo} \| 2 \| ", page, flags=re.M)
        assert re.search(rf"^algo={algo} +2 +\d", done.stdout, flags=re.M)
    rows = list(csv.DictReader((sweep / "comparison.csv").read_text().splitlines()))
    assert {row["setting"] for row in rows} == {"algo=eggroll", "algo=grpo", "algo=rft"}
    assert (sweep / "comparison.png").read_bytes()[:4] == b"\x89PNG"

    repeat = ["-cp", "sweep/3/.hydra", "-cn", "config"]
    launch(*repeat, "hydra.run.dir=again")
    assert (
        json.loads((tmp_path / "again" / "result.json").read_text())["after"] == results[3]["after"]
    )
    assert [e["reward"] for e in events(tmp_path / "again")] == [
        e["reward"] for e in events(sweep / "3")
    ]
    done = launch(*repeat, "-m", "model.tiny.hidden_size=31", "hydra.sweep.dir=more", code=2)
    assert "failed (exit code 2)" in done.stdout
    done = launch(*repeat, "model=hf", code=2)
    assert "model=hf chooses from a group, and " in done.stderr


@pytest.mark.slow
def test_submitit_jobs_share_the_tiny_model(launch, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    small = [text for text in SMALL if not text.startswith(("model.tiny.pretrain", "algo.steps"))]
    launch(
        *(
            "-m",
            "hydra/launcher=submitit_local",
            *small,
            "model.tiny.pretrain_steps=3",
            "algo.steps=1",
            "seed=1,2",
        ),
        env={"PYTHONPATH": str(ROOT), "CLUTCH_CACHE": str(tmp_path / "fresh")},
    )
    (sweep,) = (tmp_path / "multirun").iterdir()
    assert [(sweep / name / "result.json").exists() for name in ("0", "1")] == [True, True]
    assert "| algo=eggroll" not in (page := read_page(sweep))
    assert re.search(r"^\| eggroll \| 2 \| ", page, flags=re.M), "seeds alone make one setting"
    said = [path.read_text() for path in sweep.glob(".submitit/*/*_log.*")]
    assert sum("the task's form, 3 steps" in text for text in said) == 1
    assert len([path for path in (tmp_path / "fresh").iterdir() if path.is_dir()]) == 1


@pytest.mark.slurm
def test_submitit_sends_a_sweep_to_slurm(launch, slurm, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    if not slurm:
        pytest.skip("no Slurm is up")
    given = [f"hydra.launcher.{text}" for text in ("mem_gb=2", "cpus_per_task=1", "timeout_min=10")]
    launch(
        "-m",
        "hydra/launcher=submitit_slurm",
        *given,
        *SMALL,
        "seed=1,2",
        env={"PYTHONPATH": str(ROOT)},
    )
    (sweep,) = (tmp_path / "multirun").iterdir()
    assert re.search(r"^\| eggroll \| 2 \| ", read_page(sweep), flags=re.M)


def test_settings_differ_by_configuration_without_overrides(tmp_path):
    """A run repeated with -cp has no overrides: it joins its first one, and leaves those of other
    settings alone.
    """
    folders = [
        job(tmp_path, number, 1, 30.0, 100, algo__lr=str(0.1 + number // 2)) for number in range(4)
    ]
    for folder in folders[1::2]:
        (folder / ".hydra" / "overrides.yaml").write_text("[]")
    runs, _ = read_runs([tmp_path])
    assert [run.setting for run in runs][0::2] == [run.setting for run in runs][1::2]
    assert len({run.setting for run in runs}) == 2
    (folders[0] / "result.json").write_text("{")
    runs, failures = read_runs([tmp_path])
    assert len(runs) == 3
    assert "damaged" in failures[0].error


def read_page(folder: Path) -> str:
    """The text that comparison.html shows, its tables as lines of cells."""
    page = (folder / "comparison.html").read_text(encoding="utf-8")
    [data] = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL
    )
    lines = []
    for kind in json.loads(data)["kinds"]:
        lines += [f"## Held-out {kind['title']}", *kind["remarks"]]
        for table in (*kind["tables"], *kind["apart"]):
            rows = [table["heads"], *table["rows"]]
            lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "## In no table", *json.loads(data)["failures"]])


def job(
    folder: Path,
    number: int,
    seed: int,
    after: float,
    tokens: int,
    middle: bool = True,
    **given: str,
) -> Path:
    """A run folder as a sweep leaves it, with two steps of a second each."""
    here = folder / str(number)
    (here / ".hydra").mkdir(parents=True)
    overrides = [f"{key.replace('__', '.')}={value}" for key, value in given.items()] + [
        f"seed={seed}",
        "task=letters",
    ]
    (here / ".hydra" / "overrides.yaml").write_text(json.dumps(overrides))
    algo = {key.partition("__")[2] or "name": value for key, value in given.items()}
    config = {"seed": seed, "algo": {"name": "grpo", **algo}, "task": {}}
    (here / "run.yaml").write_text(json.dumps({"config": config}))
    measured = {"metric": 20.0, "metric_name": "exact"} if middle else {}
    log = [
        {
            "step": 1,
            "seconds": 1.0,
            "generated_tokens": tokens // 2,
            "reward_evaluations": 5,
            **measured,
        },
        {"step": 2, "seconds": 1.0, "generated_tokens": tokens, "reward_evaluations": 10},
    ]
    (here / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in log))
    result = {
        "algo": "grpo",
        "task": "letters",
        "model": "tiny",
        "metric": "exact",
        "before": 10.0,
        "after": after,
    }
    result |= {"steps": 2, "seconds": 2.0, "generated_tokens": tokens, "reward_evaluations": 10}
    (here / "result.json").write_text(json.dumps(result))
    return here


def test_settings_are_named_by_further_keys_if_needed(tmp_path):
    job(tmp_path, 0, 1, 10.0, 100, algo__a="0", algo__b="0", algo__c="0", algo__d="0", algo__lr="1")
    for number, lr in enumerate("12", start=1):
        job(tmp_path, number, 1, 10.0, 100, **dict.fromkeys(map("algo__{}".format, "abcd"), "1"))
        path = tmp_path / str(number) / "run.yaml"
        path.write_text(path.read_text().replace('"d": "1"', f'"d": "1", "lr": "{lr}"'))
    for number in range(3):  # as runs from Python leave none
        (tmp_path / str(number) / ".hydra" / "overrides.yaml").write_text("[]")
    runs, _ = read_runs([tmp_path])
    assert len({run.setting for run in runs}) == 3, [run.setting for run in runs]


def test_a_setting_may_look_like_a_formula(tmp_path):
    for number, system in enumerate(["", r"in $\boxed{}$"]):
        job(tmp_path, number, 1, 10.0, 100, task__system=system)
    compare.report_runs(*read_runs([tmp_path]), tmp_path)
    assert (tmp_path / "comparison.png").read_bytes()[:4] == b"\x89PNG"


def test_curves_are_means_over_seeds_per_setting(tmp_path):
    for number, (seed, after, rate) in enumerate(
        [(1, 30.0, "0.1"), (2, 34.0, "0.1"), (1, 50.0, "0.2")]
    ):
        job(tmp_path / "sweep", number, seed, after, 100 * (number + 1), algo__lr=rate)
    gone = tmp_path / "sweep" / "3"
    (gone / ".hydra").mkdir(parents=True)
    (gone / ".hydra" / "overrides.yaml").write_text('["algo.lr=-1", "seed=1", "task=letters"]')
    (gone / "failed.json").write_text('{"code": 2, "error": "algo.lr=-1.0 is out of range."}')
    runs, failures = read_runs([tmp_path / "sweep"])
    assert [(run.setting, run.seed) for run in runs] == [
        ("algo.lr=0.1", 1),
        ("algo.lr=0.1", 2),
        ("algo.lr=0.2", 1),
    ]
    assert [(f.overrides, f.code) for f in failures] == [({"algo.lr": "-1"}, 2)]
    x, mean, within = compare.curve(runs[:2], "generated_tokens")
    assert (x.tolist(), mean.tolist()) == ([0, 75, 150], [10, 20, 32])
    assert within.tolist() == [[10, 10], [20, 20], pytest.approx([6.59, 57.41], abs=0.01)]
    assert compare.curve(runs[:1], "generated_tokens")[2] is None, "one seed, and no scores"
    row = compare.table({"algo.lr=0.1": runs[:2]})[0]
    assert (row["before"], row["after"], row["tokens"]) == (
        "10.00 ± 0.00",
        "32.00 ± 2.83",
        "150 ± 71",
    )

    # A run that was measured less often: read off where the other was measured.
    job(tmp_path / "sweep", 4, 3, 42.0, 400, middle=False, algo__lr="0.1")
    runs, _ = read_runs([tmp_path / "sweep"])
    x, mean, _ = compare.curve(
        [run for run in runs if run.seed != 2 and run.setting == "algo.lr=0.1"], "generated_tokens"
    )
    assert (x.tolist(), mean.tolist()) == ([0, 125, 250], [10, 23, 36])


def answers(
    folder: Path, right: list[bool], prompt: str = "{} =>", answer: str | None = None
) -> None:
    """The scored completions of a run."""
    rows = [
        {"id": i, "prompt": prompt.format(i), "answer": answer, "completion": ""}
        | {"scores": {"exact": 100.0 * good}}
        for i, good in enumerate(right)
    ]
    (folder / "completions").mkdir()
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "completions" / "after.jsonl").write_text(text)


def test_settings_are_told_apart_prompt_by_prompt_with_their_seeds(tmp_path):
    """The same shares right: told apart where it is the same prompts that both get wrong."""
    for number, (seed, rate) in enumerate(itertools.product((1, 2), ("0.1", "0.2"))):
        folder = job(tmp_path, number, seed, 50.0 + 20 * (rate == "0.2"), 100, algo__lr=rate)
        answers(folder, [i % 10 < (7 if rate == "0.2" else 5) for i in range(100)])
    runs, _ = read_runs([tmp_path])
    settings = {
        name: [r for r in runs if r.setting == name] for name in sorted({r.setting for r in runs})
    }
    ((row,), remarks) = compare.tell_apart(settings)
    assert (row["best"], row["against"]) == ("algo.lr=0.2", "algo.lr=0.1")
    assert (row["ahead by"], row["told apart"], remarks) == ("+20.00", "yes", [])
    assert row["test"] == "p < 0.001"
    low, high = compare.find_interval(settings["algo.lr=0.2"])
    assert low < 70 < high
    assert compare.table(settings)[1]["95 %"] == f"{low:.1f} to {high:.1f}"
    for runs in settings.values():  # the band of a curve is that interval, at each measurement
        for run in runs:
            for name in ("before", "step-00000001"):
                source = run.folder / "completions" / "after.jsonl"
                shutil.copy(source, source.with_stem(name))
    read, _ = read_runs([tmp_path])
    *_, within = compare.curve([r for r in read if r.setting == "algo.lr=0.2"], "steps")
    assert within.tolist() == 3 * [pytest.approx([low, high])]

    one = {"one": [settings["algo.lr=0.1"][0]], "two": [settings["algo.lr=0.2"][0]]}
    ((row,), _) = compare.tell_apart(one)
    assert row["95 %"] == "+13.3 to +28.9", "of one seed each: Tango's, of 20 gained and 0 lost"

    path = settings["algo.lr=0.2"][0].folder
    shutil.rmtree(path / "completions")
    answers(path, [True] * 100, prompt="Now {} =>")
    runs, _ = read_runs([tmp_path])
    settings = {name: [r for r in runs if r.setting == name] for name in settings}
    rows, (remark,) = compare.tell_apart(settings)
    assert rows == []
    assert "are not compared prompt by prompt: of 100 held-out prompts of " in remark
    assert " none are the same. Give both runs the same task" in remark


def test_a_seed_that_is_there_twice_counts_once(tmp_path, capsys):
    """As where a sweep was interrupted and made again in a new folder."""
    for number, (seed, rate) in enumerate(itertools.product((1, 2), ("0.1", "0.2"))):
        share = 2 + seed + 2 * (rate == "0.2")
        folder = job(tmp_path / "new", number, seed, 10.0 * share, 100, algo__lr=rate)
        answers(folder, [i % 10 < share for i in range(100)])
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    for path in (tmp_path / "old").glob("*/result.json"):
        os.utime(path, (1, 1))
    (tmp_path / "link").symlink_to(tmp_path / "new" / "0")
    pages = []
    for folders in (["new"], ["old", "new", "link"]):
        read = read_runs([tmp_path / name for name in folders])
        compare.report_runs(*read, tmp_path / "out")
        pages.append(read_page(tmp_path / "out"))
    once, twice = (page.partition("## In no table")[0].strip() for page in pages)
    assert once == twice
    assert len(re.findall(r"left out: `.*/old/\d` \(algo.lr=0.\d\), as `.*/new/\d`", pages[1])) == 4


def test_data_sets_of_one_task_are_compared_apart(tmp_path):
    for number, (data, algo) in enumerate(itertools.product(("sums", "legs"), ("grpo", "rft"))):
        ahead = 10.0 * (algo == "rft") + 40 * (data == "sums")
        folder = job(tmp_path, number, 1, 20.0 + ahead, 100, algo=algo, task__dataset=data)
        (folder / "run.yaml").write_text(
            json.dumps({"config": {"seed": 1, "algo": {"name": algo}, "task": {"dataset": data}}})
        )
        answers(folder, [i < 20 + ahead for i in range(100)], answer=data)
    runs, _ = read_runs([tmp_path])
    compare.report_runs(runs, [], tmp_path)
    page = read_page(tmp_path)
    for data in ("sums", "legs"):
        assert f"## Held-out letters (task.dataset={data}): exact" in page
    assert page.count("| +10.00 |") == 2
    assert "not compared" not in page
    # Prompts of another form ask for the same answers: one table.
    for number, run in enumerate(runs):
        shutil.rmtree(run.folder / "completions")
        answers(run.folder, [True] * 9, prompt="{}" + "?" * number, answer="same")
    assert len(set(compare.find_titles(read_runs([tmp_path])[0]))) == 1
    # An environment has no answers: its data sets are told apart by what it asks.
    for run in runs:
        shutil.rmtree(run.folder / "completions")
        data = run.config["task.dataset"]
        answers(run.folder, [True] * 9, prompt=f"{data} {{}}", answer="")
    titles = set(compare.find_titles(read_runs([tmp_path])[0]))
    assert titles == {f"letters (task.dataset={data}): exact" for data in ("sums", "legs")}


def test_the_best_is_one_that_others_can_be_compared_with(tmp_path):
    """A quick run on fewer examples that happens to be ahead leaves the others compared."""
    for number, (rate, after, count) in enumerate(
        [("0.1", 40.0, 100), ("0.2", 60.0, 100), ("0.3", 90.0, 10)]
    ):
        folder = job(tmp_path, number, 1, after, 100, algo__lr=rate)
        answers(folder, [i % 10 < after / 10 for i in range(count)])
    runs, _ = read_runs([tmp_path])
    ((row,), (remark,)) = compare.tell_apart({run.setting: [run] for run in runs})
    assert (row["best"], row["against"]) == ("algo.lr=0.2", "algo.lr=0.1")
    assert remark.startswith("algo.lr=0.3 and algo.lr=0.2 are not compared")


def test_other_changes_are_read_at_equal_gain():
    def run(*measured: tuple[float, float]) -> list[dict]:
        return [
            {"step": 5 * i, "metric": own, "metrics": {"exact": own, "units/accuracy": other}}
            for i, (own, other) in enumerate(measured)
        ]

    slow, quick = run((10, 50), (20, 45), (30, 40)), run((10, 50), (60, 20), (90, 0))
    rows, told = find_others({"slow": [slow], "quick": [quick, quick]})
    assert "first gained 20.0 points" in told
    assert rows == [
        {"setting": "slow", "gain": "+20.0", "step": "10", "units/accuracy": "-10.0"},
        {"setting": "quick", "gain": "+50.0", "step": "5", "units/accuracy": "-30.0"},
    ]
    rows, told = find_others({"slow": [slow], "never": [run((10, 50), (5, 50))]})
    assert rows == []
    assert "gained nothing" in told
    assert (
        find_others({"alone": [[{"step": 0, "metric": 1.0, "metrics": {"exact": 1.0}}]]})[0] == []
    )


def test_the_points_of_rft_count_its_fine_tuning_steps_alone():
    cost = {"generated_tokens": 60, "reward_evaluations": 6}
    held_out = {"stage": "evaluate", "metric_name": "exact"}
    log = [
        {"step": 1, "iteration": 0, "metric": 1.0, **held_out},
        {"step": 2, "stage": "generate", "seconds": 3.0, **cost},
        {"step": 3, "stage": "finetune", "seconds": 1.0},
        {"step": 4, "stage": "finetune", "seconds": 1.0},
        {"step": 5, "iteration": 1, "metric": 7.0, **held_out, **cost},
        {"step": 6, "stage": "finetune", "seconds": 1.0},
        {"step": 7, "iteration": 2, "metric": 6.0, **held_out, **cost},
    ]
    result = {"metric": "exact", "before": 1.0, "after": 7.0, "steps": 3, "seconds": 6.0, **cost}
    # The result is the best iteration's, at the cost of all.
    assert [
        (p["steps"], p["seconds"], p["generated_tokens"], p["value"]) for p in points(log, result)
    ] == [
        *((0, 0, 0, 1), (2, 5, 60, 7), (3, 6, 60, 7)),
    ]


def test_rft_points_have_the_last_measures():
    """A run that is resumed with other settings of `evaluate` measures them again; the completions
    that are there, and their scores, are of the last ones.
    """
    held_out = {"stage": "evaluate", "metric_name": "exact"}
    log = [
        {"step": 1, "iteration": 0, "metric": 1.0, **held_out},
        *({"step": step, "stage": "finetune", "seconds": 1.0} for step in (2, 3)),
        {"step": 4, "iteration": 1, "metric": 7.0, **held_out},
        {"step": 5, "stage": "generate", "seconds": 3.0},
        {"step": 6, "iteration": 0, "metric": 1.0, **held_out},
        {"step": 7, "iteration": 1, "metric": 6.5, **held_out},
        {"step": 8, "stage": "finetune", "seconds": 1.0},
        {"step": 9, "iteration": 2, "metric": 8.0, **held_out},
    ]
    cost = {"generated_tokens": 60, "reward_evaluations": 6}
    result = {"metric": "exact", "before": 1.0, "after": 8.0, "steps": 3, "seconds": 6.0, **cost}
    assert [(p["steps"], p["seconds"], p["value"]) for p in points(log, result)] == [
        *((0, 0, 1), (2, 2, 6.5), (3, 6, 8)),
    ]


def test_points_count_the_seconds_before_the_first_step():
    """Those of a probe, or of the run that this one has gone on from."""
    cost = {"generated_tokens": 60, "reward_evaluations": 6}
    log = [{"step": n, "seconds": 2.0, **cost} for n in (1, 2, 3)]
    log[0] |= {"metric_name": "exact", "metric": 4.0}
    result = {"metric": "exact", "before": 1.0, "after": 7.0, "steps": 3, "seconds": 16.0, **cost}
    assert [(p["steps"], p["seconds"]) for p in points(log, result)] == [
        *((0, 0), (1, 12), (3, 16)),
    ]


def test_a_comparison_for_programs(tmp_path, monkeypatch, capsys):
    for number, after in enumerate((30.0, 32.0, 70.0, 72.0)):
        lr = "0.1" if number < 2 else "0.2"
        job(tmp_path / "jobs", number, number % 2, after, 100, algo="grpo", algo__lr=lr)
    (tmp_path / "jobs" / "9").mkdir()
    (tmp_path / "jobs" / "9" / "failed.json").write_text('{"code": 2, "error": "no such key"}')
    monkeypatch.setattr("sys.argv", ["compare", str(tmp_path / "jobs"), "--json"])
    compare.main()
    found = json.loads(capsys.readouterr().out)
    (kind,) = found["kinds"]
    assert [(row["setting"], row["after"]) for row in kind["settings"]] == [
        ("algo.lr=0.1", 31.0),
        ("algo.lr=0.2", 71.0),
    ]
    assert [run["seed"] for run in kind["settings"][0]["runs"]] == [0, 1]
    for test in kind["apart"]:
        assert test["best"] == "algo.lr=0.2"
        assert test["interval"][0] < test["ahead"] < test["interval"][1]
    assert kind["apart"] or kind["remarks"]
    assert "no such key" in found["left_out"][0]
    assert not list((tmp_path / "jobs").glob("comparison*")), "it writes no file"


def test_a_run_that_failed_after_its_result_still_has_it(tmp_path):
    folder = job(tmp_path, 1, 1, 30.0, 100, algo="grpo")
    (folder / "failed.json").write_text('{"code": 2, "error": "later"}')
    runs, failures = read_runs([folder])
    assert (len(runs), failures) == (1, [])


def test_a_sweep_whose_jobs_are_refused_ends_with_their_code(tmp_path, capsys):
    """Where an earlier sweep has left results, which are compared all the same."""
    for number in (0, 1):
        job(tmp_path, number, number, 30.0, 100, algo="grpo")
    (tmp_path / "1" / "failed.json").write_text('{"code": 3, "error": "it holds a run"}')
    config = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}})
    with pytest.raises(SystemExit, match="3"):
        Sweep().on_multirun_end(config)
    said = capsys.readouterr().out
    assert f"{tmp_path / '1'}: it holds a run" in said
    assert (tmp_path / "comparison.html").exists()


def test_a_sweep_ends_with_the_code_of_its_own_jobs(tmp_path, capsys):
    before, now = ({"code": code, "error": "boom"} for code in (4, 2))
    job(tmp_path, 0, 1, 10.0, 100)
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "failed.json").write_text(json.dumps(before))
    (tmp_path / "7" / ".hydra").mkdir()
    (tmp_path / "7" / ".hydra" / "overrides.yaml").write_text("- algo=rft\n")
    settings = {"sweep": {"dir": str(tmp_path)}, "overrides": {"task": []}}
    config, sweep = OmegaConf.create({"hydra": settings}), Sweep()
    sweep.on_multirun_start(config)
    with pytest.raises(SystemExit) as ended:
        sweep.on_multirun_end(config)
    assert ended.value.code == 0
    assert f"failed (exit code 4): `{tmp_path / '7'}` (algo=rft): boom" in capsys.readouterr().out
    (tmp_path / "8").mkdir()
    (tmp_path / "8" / "failed.json").write_text(json.dumps(now))
    with pytest.raises(SystemExit) as ended:
        sweep.on_multirun_end(config)
    assert ended.value.code == 2
    # Refused beside the result of an earlier command, and before the others failed.
    refused = tmp_path / "0" / "failed.json"
    refused.write_text('{"code": 3, "error": "it holds a run"}')
    os.utime(refused, (1, 1))
    with pytest.raises(SystemExit) as ended:
        sweep.on_multirun_end(config)
    assert ended.value.code == 3


def test_runs_without_a_step_are_compared(tmp_path):
    """The base model was right about everything."""
    for number in (0, 1):
        folder = job(tmp_path, number, number, 10.0, 0, algo="grpo")
        (folder / "metrics.jsonl").write_text("")
        result = json.loads((folder / "result.json").read_text())
        result |= dict.fromkeys(("steps", "seconds", "generated_tokens", "reward_evaluations"), 0)
        (folder / "result.json").write_text(json.dumps(result))
    compare.report_runs(*read_runs([tmp_path]), tmp_path)
    assert (tmp_path / "comparison.png").read_bytes()[:4] == b"\x89PNG"


def test_files_are_written_where_they_are_asked_for(tmp_path, monkeypatch, capsys):
    runs = [job(tmp_path / "jobs", n, 1, 30.0, 100, algo=name) for n, name in enumerate("ab")]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def run(*arguments) -> set[str]:
        monkeypatch.setattr("sys.argv", ["compare", *map(str, arguments)])
        compare.main()
        return {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("comparison.*")}

    for folders in (runs, [tmp_path / "jobs"], runs[:1]):
        assert run(*folders) == set()
        said = capsys.readouterr().out
        assert "algo=a" in said or len(folders) == 1
        assert "--out FOLDER" in said
    (tmp_path / "jobs" / "multirun.yaml").write_text("hydra: {}\n")  # a sweep has its own
    names = [f"comparison.{kind}" for kind in ("html", "csv", "png")]
    assert run(tmp_path / "jobs") == {f"jobs/{name}" for name in names}
    assert run(*runs, "--out", "out") == {f"{at}/{n}" for at in ("jobs", "here/out") for n in names}
    with pytest.raises(SystemExit, match="2"):
        run(*runs, "--out", "out", "--json")
    assert "--out has no effect with --json" in capsys.readouterr().err


def test_the_command_compares_any_folders(launch, tmp_path, monkeypatch, capsys):
    one, two = (
        job(tmp_path, 1, 1, 30.0, 100, algo="grpo"),
        job(tmp_path, 2, 1, 31.0, 1234567, algo="eggroll"),
    )
    (tmp_path / "empty").mkdir()

    given = (str(one), str(two), "--out", "here")
    done = launch(*given, module="common.compare", env={"COLUMNS": "80"})
    assert re.search(
        r"^algo=eggroll +1 +10\.00 +31\.00 +2 +1\.23M +10 +2$", done.stdout, flags=re.M
    )
    lines = done.stdout.splitlines()
    assert "\n\n\n" not in done.stdout, "what is not there leaves no gap"
    (remark,) = (line for line in lines if "has no scores of its prompts" in line)
    assert max(len(line) for line in lines if line != remark) <= 80
    assert {path.name for path in (tmp_path / "here").iterdir()} == {
        "comparison.html",
        "comparison.csv",
        "comparison.png",
    }

    monkeypatch.setattr(sys, "argv", ["compare", str(one), str(two), "--out", "/dev/null/x"])
    with pytest.raises(SystemExit, match="2"):
        compare.main()
    assert (
        capsys.readouterr().err
        == "error: /dev/null/x cannot be written: Not a directory. Give another --out.\n"
    )
    with pytest.raises(
        ConfigError, match=r"empty holds no run\. Give run folders, or a folder that holds some\.$"
    ):
        read_runs([tmp_path / "empty"])


PAGE = (ROOT / "docs" / "sweeps.md").read_text().replace("\\\n", "")


def test_a_run_on_another_runs_model_costs_what_both_cost(tmp_path, capsys):
    first = job(tmp_path, 1, 1, 20.0, 100, algo="grpo")
    for number, before in ((2, first), (3, tmp_path / "2")):
        config = json.loads((job(tmp_path, number, 1, 30.0, 100) / "run.yaml").read_text())
        config["config"]["model"] = {"path": str(before / "model")}
        (tmp_path / str(number) / "run.yaml").write_text(json.dumps(config))
    runs, _ = read_runs([tmp_path])
    costs = {run.folder.name: run.result for run in runs}
    assert [costs[name]["seconds"] for name in "123"] == [2, 4, 6]
    assert [costs[name]["generated_tokens"] for name in "123"] == [100, 200, 300]
    assert [costs[name]["steps"] for name in "123"] == [2, 2, 2]
    by_name = {run.folder.name: run for run in runs}
    assert [point["seconds"] for point in by_name["3"].points] == [4, 5, 6]
    compare.report_runs(runs, [], tmp_path)
    assert str(tmp_path / "2") in read_page(tmp_path).replace("\n", " ")
