"""The scaling run, and the report on run folders with known numbers."""

import csv
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from common.config import ConfigError
from common.device import hardware
from ddp_bench import report, scaling
from ddp_bench.report import figures, tables
from ddp_bench.report.diagnosis import Group, group_records
from ddp_bench.report.records import PHASES, Record, read_records, read_table, select_tasks
from launch import compose, train
from tests.support import SIZES, SMALL_SCALING
from tests.support.commands import Launch
from tests.support.refusals import COLUMNS, refuses

# Document 004: AG News, 120,000 rows, batches of 32, one GPU and four; then the larger model,
# batches of 128.
SMALL_ALONE = {
    "data": 0.0001,
    "forward": 0.0017,
    "backward": 0.0024,
    "exchange": 0.0,
    "optimizer": 0.0009,
}
SMALL_FOUR = {
    "data": 0.0002,
    "forward": 0.0018,
    "backward": 0.0025,
    "exchange": 0.001,
    "communication": 0.0045,
    "optimizer": 0.0013,
}
LARGE_ALONE = {
    "data": 0.002,
    "forward": 0.034,
    "backward": 0.069,
    "exchange": 0.0,
    "optimizer": 0.001,
}
LARGE_FOUR = {
    "data": 0.085,
    "forward": 0.0102,
    "backward": 0.0191,
    "communication": 0.016,
    "optimizer": 0.002,
}


def write_run(
    folder: Path,
    ranks: int = 1,
    epoch_seconds: float = 10.0,
    phases: dict[str, float] | None = None,
    batch_rows: int = 32,
    task: str = "ag_news",
    model: str = "encoder 2x128",
    device: str = "NVIDIA A100",
    epochs: int = 3,
    steps: int = 10,
    rows: int = 120_000,
    **algo,
) -> Path:
    """A finished run: the first epoch takes twice as long, the others `epoch_seconds`. An epoch is
    `steps` steps.
    """
    folder.mkdir(parents=True)
    config = {
        "algo": {
            "name": "classify",
            "batch_size": batch_rows,
            "ddp": {"hook": "none"},
            "model": model,
            **algo,
        },
        "opt": {"amp": {"enabled": False}, "ddp": {"enabled": ranks > 1}},
        "task": {"_target_": task},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump({"config": config}))
    lines = []
    for step in range(epochs * steps):
        event = {"step": step + 1, "seconds": epoch_seconds / steps * (2 if step < steps else 1)}
        event |= {"rows": rows // steps, "phase_seconds": phases or {}}
        if step % steps == steps - 1:
            event |= {
                "epoch_done": step // steps + 1,
                "validation": {"accuracy": 80.0 + step // steps},
            }
        lines.append(json.dumps(event) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    result = {
        "algo": "classify",
        "task": task,
        "model": model,
        "world_size": ranks,
        "device": device,
    }
    result |= {"dtype": "float32", "steps": epochs * steps, "after": 81.5}
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def groups_of(root: Path, warmup: int = 1) -> list[Group]:
    records, incomplete = read_records(root, warmup)
    assert incomplete == []
    return group_records(records)


def without_figures(monkeypatch) -> None:
    monkeypatch.setattr(figures, "draw_figures", lambda *_: None)


# --- the report


def test_speedup_and_efficiency_of_known_times(tmp_path):
    write_run(tmp_path / "a" / "one", 1, 40.0)
    write_run(tmp_path / "four", 4, 12.5, epochs=5)
    write_run(tmp_path / "weak", 2, 25.0, batch_rows=64)
    write_run(tmp_path / "odd", 2, 25.0, batch_rows=100)
    (group,) = groups_of(tmp_path)
    assert group.name == "ag_news"
    found = {(p.mode, p.ranks, p.batch_rows): (p.speedup, p.efficiency) for p in group.points}
    assert found == {
        ("one rank", 1, 32): (1.0, 100.0),
        ("strong", 4, 32): (pytest.approx(3.2), pytest.approx(80.0)),
        ("weak", 2, 64): (pytest.approx(1.6), pytest.approx(80.0)),
        ("unpaired", 2, 100): (None, None),
    }
    one = group.points[0]
    assert one.number("epoch_seconds") == pytest.approx(40.0), (
        "the first epoch, of 80 s, is warm-up"
    )
    assert groups_of(tmp_path, warmup=0)[0].points[0].number("rows_per_second") == pytest.approx(
        360_000 / 160
    )


def test_runs_are_grouped_by_equal_settings(tmp_path):
    for seed, seconds in enumerate((10.0, 14.0, 11.0)):
        write_run(tmp_path / f"one-{seed}", 1, seconds)
    write_run(tmp_path / "other", 1, 3.0, model="encoder 4x256")
    write_run(tmp_path / "also", 1, 3.0, model="encoder 4x256", dropout=0.5)
    write_run(tmp_path / "fp16", 2, 6.0, ddp={"hook": "fp16"})
    write_run(tmp_path / "plain", 2, 7.0)
    groups = {group.name: group for group in groups_of(tmp_path)}
    assert set(groups) == {
        "ag_news-encoder-2x128",
        "ag_news-encoder-4x256",
        "ag_news-encoder-4x256-2",
    }
    points = groups["ag_news-encoder-2x128"].points
    assert [(len(p.records), p.hook) for p in points] == [(3, ""), (1, ", hook fp16"), (1, "")]
    assert points[0].number("epoch_seconds") == pytest.approx(11.0)
    assert points[1].speedup == pytest.approx(11 / 6, rel=1e-6)


def test_runs_that_share_weights_out_are_compared_with_one_rank(tmp_path):
    def add_fsdp(folder, ranks):
        saved = yaml.safe_load((folder / "run.yaml").read_text())
        off = {"enabled": ranks > 1, "ranks": ranks, "ranks_per_group": None, "cpu_offload": False}
        saved["config"]["opt"]["fsdp"] = off
        (folder / "run.yaml").write_text(yaml.safe_dump(saved))

    for ranks, seconds in ((1, 40.0), (2, 25.0), (4, 20.0)):
        add_fsdp(write_run(tmp_path / str(ranks), ranks, seconds), ranks)
    (group,) = groups_of(tmp_path)
    assert [(p.mode, p.ranks, p.speedup) for p in group.points] == [
        *(("one rank", 1, 1.0), ("strong", 2, 1.6), ("strong", 4, 2.0)),
    ]
    assert [p.hook for p in group.points] == ["", ", fsdp", ", fsdp"]
    # What they exchange is within forward and backward, so nothing is known of it.
    assert [(p.phases, p.causes) for p in group.points[1:]] == [({}, [])] * 2


def test_a_loader_that_holds_up_every_fourth_step_is_seen():
    """The median of these steps is 5 ms, and their mean is 10."""
    held = {"seconds": 0.025, "data": 0.020, "forward": 0.005}
    quick = {"seconds": 0.005, "data": 0.0, "forward": 0.005}
    spans = [one | {"backward": 0.0} for one in [held, quick, quick, quick] * 25]
    pooled = scaling.pool([{"exposed": 0.0, "batch_rows": 32, "spans": spans}])
    assert pooled["rows_per_second"] == pytest.approx(3200)
    assert pooled["phase_seconds"]["data"]["mean"] == pytest.approx(0.005)
    assert pooled["step_seconds"]["p50"] == 0.005


def test_a_slow_repeat_keeps_phases_within_their_step():
    """The first one reads from a disk that is cold."""
    quick = {"seconds": 0.010, "data": 0.0, "forward": 0.010, "backward": 0.0}
    cold = quick | {"seconds": 0.160, "data": 0.150}
    repeats = [[cold] * 10 + [quick] * 40, [quick] * 50, [quick] * 50]
    pooled = scaling.pool([{"exposed": 0.0, "batch_rows": 32, "spans": s} for s in repeats])
    assert pooled["step_seconds"]["mean"] == pytest.approx(0.010)
    assert pooled["phase_seconds"]["data"]["mean"] == 0


def test_no_gain_is_beyond_what_a_phase_takes(tmp_path):
    """Waits in a few long steps are parts of the mean step, and more than a median one."""
    one, two = (
        write_run(tmp_path / str(ranks), ranks, 10.0, {"data": 0.0075, "forward": 0.002})
        for ranks in (1, 2)
    )
    for folder in (one, two):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for number, event in enumerate(lines):
            wait = 0.0 if number % 4 else 0.030 * (2 if folder == two else 1)
            event |= {
                "rows": 32,
                "seconds": 0.005 + wait,
                "phase_seconds": {"data": wait, "forward": 0.005},
            }
        (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    (group,) = groups_of(tmp_path)
    point = next(point for point in group.points if point.ranks == 2)
    most = point.mean_step / (point.mean_step - point.seconds("data"))
    assert "loader-bound" in point.causes
    assert max(gain for gain, text in point.advice if "loader" in text) == pytest.approx(most)


def test_tables_of_other_threads_or_vocabularies_are_kept_apart(tmp_path):
    run = {"ranks": 1, "batch_rows": 32, "rows_per_second": 100.0}
    run |= {"step_seconds": {"p50": 0.3, "p90": 0.4}, "phase_seconds": {}}
    saved = {"task": "a", "model": "b", "device": "c", "dtype": "float32", "runs": [run]}
    saved |= {"training_rows": 320, "settings": {"ddp": {}}, "threads_per_rank": 4}
    groups = set()
    for change in ({}, {"threads_per_rank": 1}, {"settings": {"ddp": {}, "tokenizer": {"a": 1}}}):
        path = tmp_path / "scaling.json"
        path.write_text(json.dumps(saved | change))
        groups |= {record.group for record in read_table(path)}
    assert len(groups) == 3


def test_what_is_written(tmp_path, monkeypatch):
    without_figures(monkeypatch)
    write_run(tmp_path / "in" / "one", 1, 40.0, SMALL_ALONE)
    write_run(tmp_path / "in" / "four", 4, 12.5, SMALL_FOUR)
    text = report.write(tmp_path / "in", tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("comprehensive_summary.csv", "summary_table.tex", "performance_report.txt")
    }
    assert (tmp_path / "out" / "performance_report.txt").read_text() == text
    with (tmp_path / "out" / "comprehensive_summary.csv").open() as file:
        one, four = csv.DictReader(file)
    assert (one["scaling"], one["epoch_seconds"], one["rows_per_second"]) == (
        "one rank",
        "40",
        "3000",
    )
    assert (four["speedup"], four["efficiency_percent"], four["communication_seconds"]) == (
        "3.2",
        "80",
        "0.0045",
    )
    assert (four["best_validation_accuracy_percent"], four["test_accuracy_percent"]) == (
        "82",
        "81.5",
    )
    table = (tmp_path / "out" / "summary_table.tex").read_text()
    assert (
        r"ag\_news & encoder 2x128 & strong & 4 & 32 & 12.50 & 9600 & 3.20x & 80.0 \% & 81.5 \% \\"
        in table
    )
    assert table.count(r"\begin{") == table.count(r"\end{") == 2


def test_the_table_compiles_as_it_is(tmp_path):
    if shutil.which("pdflatex") is None:
        pytest.skip("pdflatex is not installed")
    write_run(tmp_path / "one", 1, 40.0, SMALL_ALONE, task="a_b & 5 % of #1 {x} $2 \\d ~e^f")
    tables.write_tex(groups_of(tmp_path), tmp_path / "summary_table.tex")
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "summary_table.tex"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "Overfull" not in done.stdout


def test_latex_escapes():
    assert (
        tables.escape(r"a_b & 5 % of #1 {x} $2 c:\d ~e^f")
        == r"a\_b \& 5 \% of \#1 \{x\} \$2 c:\textbackslash{}d"
        r" \textasciitilde{}e\textasciicircum{}f"
    )


def test_incomplete_folders_are_named_with_the_reason(tmp_path, monkeypatch):
    without_figures(monkeypatch)
    write_run(tmp_path / "whole")
    (write_run(tmp_path / "stopped") / "result.json").unlink()
    (write_run(tmp_path / "no-settings") / "run.yaml").unlink()
    (write_run(tmp_path / "no-log") / "metrics.jsonl").unlink()
    write_run(tmp_path / "short", epochs=1)
    (write_run(tmp_path / "torn") / "result.json").write_text("{")
    log = write_run(tmp_path / "other-ranks") / "metrics.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    log.write_text("".join(json.dumps(e | {"ranks": 1 + (e["step"] > 15)}) + "\n" for e in lines))
    cut = write_run(tmp_path / "cut") / "metrics.jsonl"
    cut.write_text("".join(cut.read_text().splitlines(keepends=True)[:25]))
    (tmp_path / "rft" / "shard-1-of-2").mkdir(parents=True)
    (tmp_path / "rft" / "shard-1-of-2" / "metrics.jsonl").write_text(
        '{"step": 1, "seconds": 1.0, "stage": "generate"}\n'
    )
    other = write_run(tmp_path / "grpo")
    (other / "run.yaml").write_text(yaml.safe_dump({"config": {"algo": {"name": "grpo"}}}))
    records, incomplete = read_records(tmp_path, 1)
    assert [Path(record.folder).name for record in records] == ["whole"]
    reasons = {Path(folder).name: reason for folder, reason in incomplete}
    assert reasons.pop("torn").startswith("damaged or of another version (DamagedError: ")
    assert reasons == {
        "stopped": "no result.json: the run stopped after 30 steps",
        "no-settings": "no run.yaml: its settings are not known",
        "no-log": "no metrics.jsonl, or an empty one",
        "short": "1 whole epochs, of which --warmup 1 leaves none",
        "cut": "metrics.jsonl has 25 steps, result.json says 30",
        "other-ranks": "its steps were made by 1 and 2 ranks: it was resumed with others",
    }
    text = report.write(tmp_path, tmp_path / "out")
    assert f"{tmp_path / 'stopped'}: no result.json: the run stopped after 30 steps" in text


def test_document_004_small_model_wants_one_gpu(tmp_path):
    write_run(tmp_path / "one", 1, 19.53, SMALL_ALONE, steps=3750)
    write_run(tmp_path / "four", 4, 42.34, SMALL_FOUR, steps=3750)
    (group,) = groups_of(tmp_path)
    four = group.points[1]
    assert four.speedup == pytest.approx(0.461, abs=5e-4)
    assert four.efficiency == pytest.approx(11.5, abs=0.05)
    text = tables.describe_groups([group])
    assert "speed-up 0.46x, efficiency 11.5 %: NEGATIVE SCALING" in text
    # Without any communication four would still not be worth it: 11.3 - 5.5 = 5.8 ms against 5.2
    # ms.
    assert four.number("step_p50") == pytest.approx(0.01129, abs=1e-5)
    assert "cause: launch-bound: the work of a step does not shrink with its rows" in text
    assert four.causes == ["launch-bound", "communication-bound"]
    assert "if communication took no time: 0.90x" in text
    assert "gain 2.17x: use one GPU (measured)" in text
    gains = [gain for gain, _ in four.advice]
    assert gains == sorted(gains, reverse=True)
    # Four times the rows: communication and loader as now, computing as on one GPU.
    assert four.advice[0][0] == pytest.approx(4 * 11.29 / (5.5 + 0.8 + 5.0), rel=1e-3)
    assert four.advice[0][1].startswith("algo.batch_size=128: more rows a rank")


def test_document_004_large_model_is_loader_bound(tmp_path):
    write_run(tmp_path / "one", 1, 99.94, LARGE_ALONE, batch_rows=128, steps=937, rows=119_936)
    write_run(tmp_path / "four", 4, 124.95, LARGE_FOUR, batch_rows=128, steps=937, rows=119_936)
    (group,) = groups_of(tmp_path)
    four = group.points[1]
    assert four.speedup == pytest.approx(0.80, abs=5e-4)
    assert four.causes[:2] == ["loader-bound", "communication-bound"]
    advised = [text for _, text in four.advice]
    assert advised[:2] == [
        "more algo.loader.workers (predicted, at best)",
        "use one GPU (measured)",
    ]
    assert four.advice[0][0] == pytest.approx(133.35 / (133.35 - 85), rel=1e-3)


@pytest.mark.parametrize(
    ("phases", "ranks", "device", "cause"),
    [
        ({"forward": 0.3, "backward": 0.3, "communication": 0.5}, 2, "A100", "communication-bound"),
        ({"forward": 0.45, "backward": 0.5, "communication": 0.05}, 2, "A100", "launch-bound"),
        (
            {"forward": 0.7, "backward": 0.6, "communication": 0.05},
            2,
            "A100",
            "oversubscribed cores",
        ),
        (
            {"forward": 0.25, "backward": 0.25, "communication": 0.6},
            4,
            "CPU (2 cores)",
            "oversubscribed cores",
        ),
        (
            {"forward": 0.4, "backward": 0.4, "communication": 0.6},
            2,
            "CPU (2 cores)",
            "oversubscribed cores",
        ),
        ({"forward": 0.25, "backward": 0.25, "communication": 0.02}, 2, "A100", None),
    ],
)
def test_causes(tmp_path, phases, ranks, device, cause):
    write_run(tmp_path / "one", 1, 10.0, {"forward": 0.5, "backward": 0.5}, device=device)
    write_run(tmp_path / "many", ranks, 10 * sum(phases.values()), phases, device=device)
    (group,) = groups_of(tmp_path)
    assert (group.points[1].causes or [None])[0] == cause


def test_what_was_measured_is_not_predicted(tmp_path):
    write_run(tmp_path / "one", 1, 10.0, {"forward": 0.5, "backward": 0.5})
    write_run(
        tmp_path / "strong", 2, 10.0, {"forward": 0.45, "backward": 0.5, "communication": 0.05}
    )
    write_run(
        tmp_path / "weak",
        2,
        8.0,
        {"forward": 0.7, "backward": 0.8, "communication": 0.1},
        batch_rows=64,
    )
    (group,) = groups_of(tmp_path)
    _, strong, weak = group.points
    # The same rows a rank take longer than on one: what keeps the strong run from shrinking is
    # shared, not launched.
    assert strong.causes[0] == weak.causes[0] == "oversubscribed cores"
    more = "algo.batch_size=64: more rows a rank; raise algo.lr, check accuracy (measured)"
    assert strong.advice == [
        (pytest.approx(1.25), more),
        (pytest.approx(1.0), "use one GPU (measured)"),
    ]
    write_run(
        tmp_path / "better", 2, 5.0, {"forward": 0.5, "backward": 0.5}, batch_rows=64, task="imdb"
    )
    write_run(tmp_path / "alone", 1, 10.0, {"forward": 0.5, "backward": 0.5}, task="imdb")
    write_run(
        tmp_path / "split",
        2,
        10.0,
        {"forward": 0.45, "backward": 0.5, "communication": 0.05},
        task="imdb",
    )
    strong = groups_of(tmp_path)[1].points[1]
    assert strong.causes[0] == "launch-bound"
    assert strong.advice[0][0] == pytest.approx(2.0)
    assert strong.advice[0][1].endswith("(measured)")


def test_the_command_and_its_mistakes(launch: Launch, tmp_path):
    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return launch(*arguments, module="ddp_bench.report", code=None)

    done = command("--root", str(tmp_path / "none"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: --root" in done.stderr
    assert "is not a folder. Give the one that holds the run folders" in done.stderr
    write_run(tmp_path / "one")
    done = command("--root", str(tmp_path), "--datasets", "IMDB")
    assert done.stderr == "error: --datasets IMDB: no run of that task. Choices: ag_news.\n"
    done = command("--root", str(tmp_path), "--warmup", "3")
    assert "holds no finished classify run" in done.stderr
    assert "3 whole epochs, of which --warmup 3 leaves none" in done.stderr
    assert command("--root", str(tmp_path), "--warmup", "-1").returncode == 2
    (tmp_path / "file").write_text("")
    done = command("--root", str(tmp_path), "--warmup", "0", "--out", f"{tmp_path}/file")
    assert (done.returncode, done.stderr) == (
        2,
        f"error: {tmp_path}/file cannot be written: File exists. Give another --out.\n",
    )


def test_names_of_tasks_need_no_case():
    record = Record("f", "ag_news", "m", "g", 1, 32, "d", "float32", 1, 1, 1, {})
    assert select_tasks([record], ["AGNews"]) == [record]


@pytest.mark.thorough
def test_figures(tmp_path):
    write_run(tmp_path / "one", 1, 40.0, SMALL_ALONE)
    write_run(tmp_path / "four", 4, 12.5, SMALL_FOUR)
    report.write(tmp_path, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").glob("*.png")) == [
        *("ag_news_accuracy.png", "ag_news_epoch_time_detailed.png"),
        *("ag_news_speedup_efficiency.png", "ag_news_throughput.png"),
    ]


@pytest.mark.thorough
@pytest.mark.usefixtures("in_cache")
def test_real_runs_are_read(warm, tmp_path):
    settings = ["algo=classify", *SIZES]
    for ranks in (1, 2):
        more = ["opt=[ddp]", f"opt.ddp.ranks={ranks}"] if ranks > 1 else []
        warm.call(train, compose([*settings, "algo.epochs=2", *more]), tmp_path / f"{ranks}")
    records, incomplete = read_records(tmp_path, 1)
    assert incomplete == []
    (group,) = group_records(records)
    one, two = group.points
    assert (one.mode, two.mode, group.name) == ("one rank", "strong", "topics")
    lines = [
        json.loads(line) for line in (tmp_path / "2" / "metrics.jsonl").read_text().splitlines()
    ]
    second = [line for line in lines if line["epoch"] > 1]
    assert two.number("epoch_seconds") == pytest.approx(sum(line["seconds"] for line in second))
    assert two.speedup == pytest.approx(one.number("epoch_seconds") / two.number("epoch_seconds"))
    assert 0 < sum(two.phases.values()) <= sum(line["seconds"] for line in second) / len(second)


# --- the scaling run


def test_a_scaling_run(launch: Launch, tmp_path, monkeypatch):
    out = tmp_path / "out"
    done = launch(*SMALL_SCALING, f"hydra.run.dir={out}")
    saved = json.loads((out / "scaling.json").read_text())
    assert [(r["scaling"], r["ranks"], r["batch_rows"]) for r in saved["runs"]] == [
        ("one rank", 1, 32),
        ("strong", 2, 32),
        ("weak", 2, 64),
    ]
    assert saved["loss_check"]["same"] is True
    assert 0 < saved["loss_check"]["largest_difference"] < scaling.ROUNDING, (
        "ranks add in another order"
    )
    one, strong, weak = saved["runs"]
    assert (one["speedup"], one["phase_seconds"]["communication"]["p50"]) == (1.0, 0.0)
    for run in saved["runs"]:
        step = run["step_seconds"]
        assert 0 < step["p50"] <= step["p90"]
        assert len(step["p50_of_repeats"]) == 1
        assert set(run["phase_seconds"]) == set(PHASES)
        assert run["rows_per_second"] == pytest.approx(run["batch_rows"] / step["mean"])
        assert sum(span["p50"] for span in run["phase_seconds"].values()) < 1.5 * step["p50"]
    assert weak["efficiency_percent"] == pytest.approx(
        50 * weak["rows_per_second"] / one["rows_per_second"]
    )
    assert "apart at most" in done.stdout
    assert "strong" in done.stdout
    table = done.stdout.partition("milliseconds of a step")[2].partition("\nloss of")[0]
    assert all(name in table for name in (*PHASES, "speed-up", "efficiency"))
    assert max(map(len, table.splitlines())) <= 80
    assert not (out / "checkpoints").exists()

    without_figures(monkeypatch)
    text = report.write(tmp_path, tmp_path / "report")
    assert f"speed-up {strong['speedup']:.2f}x" in text
    with pytest.raises(ConfigError, match="already holds a run"):
        train(compose(SMALL_SCALING), out)


def test_what_was_measured_before_a_failure_is_kept(tmp_path, monkeypatch):
    inner = scaling.launch

    def launch(entry, run, *more):
        if run.opt.ddp.ranks == 2:
            raise RuntimeError("rank 1 was killed")
        return inner(entry, run, *more)

    monkeypatch.setattr(scaling, "launch", launch)
    with pytest.raises(RuntimeError, match="rank 1 was killed"):
        train(compose(SMALL_SCALING), tmp_path)
    saved = json.loads((tmp_path / "scaling.json").read_text())
    assert [run["ranks"] for run in saved["runs"]] == [1]


MISTAKES = [
    ("algo=scaling algo.ranks=[2,4]", "algo.ranks", "[2, 4]", "algo.ranks=[1,2,4]"),
    ("algo=scaling algo.mode=stong", "algo.mode", "stong", "'strong'"),
    ("algo=scaling algo.steps=0", "algo.steps", "0", "Give a value of at least 1"),
    ("algo=scaling algo.epochs=2", "algo.epochs", "2", "Leave it out"),
    ("algo=scaling not_finite.policy=stop", "not_finite.policy", "stop", "Leave it out"),
    ("algo=scaling tracker=wandb", "tracker", "wandb", "Leave it out"),
]


@pytest.mark.parametrize(COLUMNS, MISTAKES)
def test_mistakes_are_refused(overrides, key, value, try_next):
    refuses(overrides, key=key, value=value, try_next=try_next)


def test_mistakes_that_a_run_finds(tmp_path, monkeypatch):
    run = compose([*SMALL_SCALING, "opt=[ddp]", "opt.ddp.ranks=2"])
    refuses(lambda: train(run, tmp_path), key="opt.ddp.ranks", value=2, try_next="algo.ranks")
    run = compose([*SMALL_SCALING, "algo.batch_size=200"])
    refuses(
        lambda: train(run, tmp_path), key="algo.batch_size", value=["200", "400"], try_next="268"
    )
    with monkeypatch.context() as patched:
        patched.setattr(hardware, "local_devices", lambda _: 1)
        with pytest.raises(ConfigError, match="this node has 1 CUDA devices"):
            train(compose(SMALL_SCALING), tmp_path)
    for key in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(key, "0")
    with pytest.raises(ConfigError, match="Run it without torchrun"):
        train(compose(SMALL_SCALING), tmp_path)
