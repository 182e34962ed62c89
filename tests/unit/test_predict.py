"""algo=predict: its arithmetic on known numbers, document 004's own times, and real runs."""

import csv
import json
import random
from pathlib import Path

import pytest
import torch

from common.config import ConfigError
from common.report import page
from ddp_bench import link as links
from ddp_bench import predict, report
from ddp_bench.link import Link, find_exposed, fit_link
from ddp_bench.predict import Share, sum_share
from ddp_bench.report import figures
from ddp_bench.report.diagnosis import group_records
from ddp_bench.report.records import Record, read_table
from ddp_bench.simulate import ARITHMETIC, LAUNCH, Absent, Simulator, find_peak
from launch import compose, train
from tests.support import SMALL_SCALING
from tests.support.refusals import COLUMNS, refuses

TINY = ["algo=predict", *(s for s in SMALL_SCALING[1:] if not s.startswith("algo.ranks="))]
MB = 2**20


# --- arithmetic


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_link_is_found_again_from_its_times(ranks):
    link = Link(8e-6, 50e9, "", [])
    points = [(size, link.seconds(size, ranks)) for size in links.SIZES]
    assert len(points) == 8
    found = fit_link(points, ranks, "here")
    assert found.alpha == pytest.approx(8e-6)
    assert found.beta == pytest.approx(50e9)
    # References, section 3.2: 40 MB among 4 over PCIe 4 (12 GB/s) and over NVLink 3 (230 GB/s).
    assert Link(0, 12e9, "", []).seconds(40e6, 4) == pytest.approx(5e-3)
    assert Link(0, 230e9, "", []).seconds(40e6, 4) == pytest.approx(0.26e-3, rel=0.01)


def test_one_slow_message_does_not_turn_the_bandwidth_negative():
    points = [(size, 1e-4) for size in links.SIZES]
    found = fit_link(points, 2, "")
    assert found.alpha == pytest.approx(5e-5, rel=1e-3)
    assert found.beta > 0


def test_what_of_the_gradients_is_exposed():
    link = Link(0, 1 * MB, "", [])  # among two: a MB takes a second
    ready = [(1.0 * MB, share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert find_exposed(ready, 8.0, 25 * MB, link, 2, True) == pytest.approx(5.0), (
        "one bucket leaves at the end"
    )
    assert find_exposed(ready, 8.0, 1 * MB, link, 2, True) == pytest.approx(1.0), (
        "the last bucket cannot hide"
    )
    assert find_exposed(ready, 8.0, 2 * MB, link, 2, True) == pytest.approx(1.0), (
        "buckets of 2, 2 and 1"
    )
    assert find_exposed(ready, 2.0, 1 * MB, link, 2, True) == pytest.approx(3.0), (
        "five seconds of sending, two of computing"
    )
    assert find_exposed(ready, 8.0, 1 * MB, link, 2, False) == pytest.approx(5.0), (
        "no core is free to send"
    )
    assert find_exposed(ready, 8.0, 1 * MB, Link(1.0, 1e18, "", []), 2, True) == pytest.approx(
        2.0
    ), "one hop there and back"


def test_a_simulated_device_is_bound_by_launches_or_by_work():
    small, large = torch.zeros(4, 4), torch.zeros(256, 256)
    with Simulator(Absent(1e15, 1e15)) as fast:
        for _ in range(10):
            small @ small
    assert fast.host == pytest.approx(10 * LAUNCH)
    assert fast.device == pytest.approx(fast.host, rel=1e-3)
    with Simulator(Absent(1e9, 1e15)) as slow:
        for _ in range(10):
            large @ large
        (large @ large)[0, 0].item()  # waits for the device
    assert slow.device == slow.host == pytest.approx(11 * 2 * 256**3 / 1e9, rel=1e-3)
    with Simulator(Absent(1e15, 1e9)) as narrow:
        large + large
    assert narrow.device == pytest.approx(LAUNCH + 3 * 4 * 256**2 / 1e9)
    with Simulator(Absent(1e15, 1e9)) as views:
        large.view(-1).view(256, 256).t()
    assert views.host == 0


def repeat(*ranks: list[float], workers: int = 0, making: float = 0.0) -> dict:
    spans = [
        [{"seconds": s, "data": 0.0, "forward": s, "backward": 0.0} for s in rank] for rank in ranks
    ]
    return {
        "spans": spans,
        "passes": 1,
        "ready": [(4.0, 1.0)],
        "workers": workers,
        "making": making,
    }


def test_a_step_lasts_as_long_as_the_slowest():
    share = sum_share([repeat([1.0, 3.0, 2.0], [2.0, 1.0, 2.0])], overlap=False, cores=None)
    assert share.p50 == pytest.approx(2.0)  # of 2, 3, 2
    assert share.wait == pytest.approx(0.0)  # the middle means are 1.5, 2, 2
    uneven = sum_share([repeat([1.0, 1.0, 1.0], [3.0, 3.0, 3.0])], overlap=False, cores=None)
    assert (uneven.p50, uneven.wait) == (pytest.approx(3.0), pytest.approx(1.0))
    assert uneven.scaled(2.0).p50 == pytest.approx(6.0)


def test_loader_workers_that_share_cores_make_a_step_wait():
    four = repeat([1.0], workers=4, making=2.0)
    assert sum_share([four], overlap=True, cores=None).p50 == pytest.approx(1.0)
    assert sum_share([four], overlap=True, cores=2.0).p50 == pytest.approx(1.0), (
        "a batch a second is made in time"
    )
    starved = sum_share([four], overlap=True, cores=0.5)
    assert starved.p50 == pytest.approx(4.0)
    assert starved.phases["data"] == pytest.approx(3.0)


def test_smaller_buckets_are_advised_where_they_hide_the_sending():
    ready = [(1.0 * MB, i / 19) for i in range(20)]
    share = Share({"backward": 1.0}, 1.5, 1.5, 0.0, 1, ready, overlap=True)
    link = Link(0, 25 * MB, "", [])  # 0.8 s for all of it
    line = {
        "scaling": "strong",
        "ranks": 2,
        "step_seconds": {"p50": 2.3},
        "phase_seconds": {"communication": {"p50": 0.8}},
    }
    text = predict.advise_buckets([line], {("strong", 2): share}, link)
    assert text[0] == "2 ranks, strong: algo.ddp.bucket_cap_mb=1: gain 1.49x (predicted)"
    hidden = Share({"backward": 1.0}, 1.5, 1.5, 0.0, 1, ready, overlap=False)
    assert predict.advise_buckets([line], {("strong", 2): hidden}, link) == []


@pytest.mark.run
def test_peaks_of_presets():
    def found(*settings: str) -> tuple[str, float]:
        name, absent = find_peak(compose(["algo=predict", "algo.ranks=[2]", *settings]))
        return name, absent.flops / ARITHMETIC

    assert found("hardware=a100_40g") == ("float32", 19.5e12)
    assert found("hardware=a100_40g", "opt=[amp]") == ("bfloat16", 312e12)
    assert found("hardware=v100", "opt=[amp]") == ("float16", 125e12)
    assert found("hardware=a100_40g", "opt=[tf32]") == ("float32", 156e12)
    with pytest.raises(ConfigError, match="hardware=v100 has no peak for tf32"):
        found("hardware=v100", "opt=[tf32]")


# --- document 004


@pytest.fixture
def long_texts(tmp_path: Path) -> list[str]:
    """Rows that fill the sequences of document 004, 128 and 256 tokens."""
    words, draw = [f"w{i:04d}" for i in range(1000)], random.Random(0)
    for name, rows in (("train", 300), ("test", 20)):
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "label"])
            writer.writerows(
                [" ".join(draw.choices(words, k=300)), "ab"[i % 2]] for i in range(rows)
            )
    return [
        "algo=predict",
        "task=custom_text",
        *(f"task.{n}={tmp_path / n}.csv" for n in ("train", "test")),
    ]


def explained(settings: list[str], out: Path) -> tuple[dict, str]:
    saved = train(
        compose([*settings, "hardware=a100_40g", "algo.ranks=[4]", "algo.mode=strong"]),
        out,
    )
    (found,) = saved["explained"]
    assert saved["runs"][0]["step_seconds"]["p50"] == pytest.approx(
        found["speedup"] * found["measured_seconds"]
    )
    return found, (out / "prediction.txt").read_text()


@pytest.mark.usefixtures("in_cache")
def test_document_004_small_model_is_launch_bound(long_texts, tmp_path, monkeypatch):
    monkeypatch.setattr(predict, "SIMULATED", 1)
    found, text = explained([*long_texts, "algo.times={1: 5.2, 4: 11.3}"], tmp_path / "out")
    assert found["speedup"] == pytest.approx(0.46, abs=0.005)
    assert found["causes"][0] == "launch-bound"
    assert "communication-bound" not in found["causes"], "the link is not what it waits for"
    assert found["free_speedup"] == pytest.approx(1.0, abs=0.15), "free communication gives nothing"
    assert found["needed_gbs"] < 6 < found["link_gbs"]
    assert "use one GPU" in text
    assert "cause: launch-bound" in text


@pytest.mark.thorough
@pytest.mark.usefixtures("in_cache")
def test_document_004_large_model_is_loader_or_socket_bound(long_texts, tmp_path, monkeypatch):
    monkeypatch.setattr(predict, "SIMULATED", 1)
    larger = "algo.model={size: 256, heads: 8, layers: 4, feedforward: 1024, max_tokens: 256}"
    # Of its 128 rows a quarter, to be quick: the times are given, and what shrinks does so all the
    # same.
    settings = [
        *long_texts,
        larger,
        "algo.batch_size=32",
        "algo.times={1: 106.6, 4: 133.3}",
    ]
    found, text = explained(settings, tmp_path / "out")
    assert found["speedup"] == pytest.approx(0.80, abs=0.005)
    assert found["causes"] == ["loader-or-socket-bound"]
    assert found["predicted_seconds"] == pytest.approx(0.0267, rel=0.1), (
        "computing shrinks with the rows"
    )
    assert found["needed_gbs"] < 0.6, "slower than any link inside a node"
    assert "It is not the bandwidth of the link" in text
    assert "must not say NET/Socket" in text


def test_a_slow_link_is_named_where_it_explains_a_step():
    run = compose(
        [
            "algo=predict",
            "algo.ranks=[4]",
            "algo.times={1: 100, 4: 45}",
            "hardware=rtx4090",
        ]
    )
    alone = {"step_seconds": {"p50": 0.1}}
    line = {
        "ranks": 4,
        "step_seconds": {"p50": 0.04},
        "phase_seconds": {"communication": {"p50": 0.014}, "exchange": {"p50": 0.001}},
    }
    found = predict.explain_time(run.algo, line, alone, 112 * 10**6, links.find_link(run.hardware))
    assert found["causes"] == ["communication-bound"]


# --- real runs


@pytest.mark.usefixtures("in_cache")
def test_a_prediction_and_its_error_are_reported(warm, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "draw_figures", lambda *_: None)
    out = tmp_path / "in" / "prediction"
    saved = warm.call(train, compose([*TINY, "algo.ranks=[2]"]), out)
    assert [(r["scaling"], r["ranks"], r["batch_rows"]) for r in saved["runs"]] == [
        *(("one rank", 1, 32), ("strong", 2, 32), ("weak", 2, 64))
    ]
    assert [size for size, _ in saved["link"]["points"]] == list(links.SIZES)
    assert saved["link"]["alpha"] > 0
    assert saved["simulated"] is False
    one, strong, weak = saved["runs"]
    assert one["phase_seconds"]["communication"]["p50"] == 0
    for run in (strong, weak):
        assert run["phase_seconds"]["communication"]["p50"] > 0
        assert run["rows_per_second"] == pytest.approx(
            run["batch_rows"] / run["step_seconds"]["p50"]
        )
    text = (out / "prediction.txt").read_text()
    assert "predicted milliseconds of a step" in text
    assert "measured between 2 processes" in text
    assert group_records(read_table(out / "prediction.json"))[0].name == "topics-predicted"

    # What a scaling run with the same settings writes, 1.25 times as long.
    for run in saved["runs"]:
        run["step_seconds"] = {
            name: 1.25 * seconds for name, seconds in run["step_seconds"].items()
        }
    (tmp_path / "in" / "scaling").mkdir()
    (tmp_path / "in" / "scaling" / "scaling.json").write_text(json.dumps(saved))
    text = report.write(tmp_path / "in", tmp_path / "report")
    assert text.count("the prediction is 20.0 % too low") == 3
    with (tmp_path / "report" / "comprehensive_summary.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["prediction_error_percent"] for line in lines] == ["-20", "-20", "-20"]
    assert {line["how"] for line in lines} == {"measured"}
    with pytest.raises(ConfigError, match="already holds a run"):
        train(compose([*TINY, "algo.ranks=[2]"]), out)


def test_simulated_devices_are_compared_by_name():
    def record(device: str, seconds: float, **more) -> Record:
        return Record(
            "f", "t", "m", "g", 1, 32, device, "float32", seconds, seconds, 32 / seconds, {}, **more
        )

    guess = record("a100_40g of conf/hardware", 2.0, predicted=True, match="A100")
    found = group_records([guess, record("NVIDIA A100-SXM4-40GB", 1.0), record("NVIDIA H100", 1.0)])
    assert {g.points[0].records[0].device: g.points[0].error for g in found} == {
        "NVIDIA A100-SXM4-40GB": pytest.approx(100.0),
        "NVIDIA H100": None,
    }
    assert [g.name for g in group_records([guess])] == ["t-predicted"]


def test_predictions_of_what_was_not_measured_are_shown():
    def record(ranks: int, **more) -> Record:
        seconds = 1 / ranks
        return Record(
            *("f", "t", "m", "g", ranks, 32, "CPU (2 cores)", "float32"),
            *(seconds, seconds, 32 / seconds, {}),
            **more,
        )

    predicted = [record(ranks, predicted=True) for ranks in (1, 2, 4, 8)]
    here, beyond = group_records([record(1), record(2), *predicted])
    assert [(point.ranks, point.how) for point in here.points] == [(1, "measured"), (2, "measured")]
    assert [point.error for point in here.points] == [pytest.approx(0.0)] * 2
    assert [(point.ranks, point.speedup) for point in beyond.points] == [
        (1, 1.0),
        (4, 4.0),
        (8, 8.0),
    ]


@pytest.mark.usefixtures("in_cache")
def test_an_unknown_link_is_refused_before_measuring(tmp_path, monkeypatch):
    """On one core there are no two processes to measure it between."""
    monkeypatch.setattr(predict, "count_cores", lambda: 1)
    monkeypatch.setattr(predict.scaling, "launch_each", lambda *_: pytest.fail("it was measured"))
    run = compose(["algo=predict", "hardware=cpu", "task=topics"])
    with pytest.raises(ConfigError, match=r"does not say how fast its link is.*hardware=a100_40g"):
        predict.measure(run, tmp_path, None)


def test_a_gpu_that_is_not_here_is_simulated(tmp_path, monkeypatch):
    assemble, shares = predict.assemble_runs, {}

    def assemble_runs(cfg, of_cells, link):
        shares.update(of_cells)
        return assemble(cfg, of_cells, link)

    monkeypatch.setattr(predict, "assemble_runs", assemble_runs)
    arguments = [*TINY[:1], "hardware=h100", *TINY[2:5], "opt=[amp,ddp]", "algo.ranks=[2,8]"]
    saved = train(compose([*arguments, "algo.batch_size=264"]), tmp_path)
    assert shares["one rank", 1].passes == 1, "a forward has the rows of a GPU, not of the CPU"
    assert (saved["simulated"], saved["match"], saved["dtype"]) == (True, "H100", "bfloat16")
    strong = [run for run in saved["runs"] if run["scaling"] == "strong"]
    weak = [run for run in saved["runs"] if run["scaling"] == "weak"]
    assert [run["ranks"] for run in weak] == [2, 8]
    # So small a model is launched, not computed: more GPUs do not make a step shorter, but take
    # more rows in it.
    assert all(run["speedup"] < 1.1 for run in strong)
    assert weak[1]["speedup"] > 5
    said = (tmp_path / "prediction.txt").read_text()
    assert "use one GPU" in said
    text = page.write_report(tmp_path).read_text()
    assert text.startswith("# predict on Topics: prediction\n")
    assert said.strip() in text
    assert "not finished" not in text
    refuses(
        lambda: train(
            compose([*TINY[:1], "hardware=h100", "algo.ranks=[2]", "algo.repeats=2"]),
            tmp_path / "other",
        ),
        key="algo.repeats",
        value="2",
    )


MISTAKES = [
    ("algo.ranks=[1,2]", "algo.ranks", "[1, 2]", "algo.ranks=[2,4,8]"),
    ("algo.epochs=3", "algo.epochs", "3", "Leave it out"),
    ("algo.ranks=[4] algo.times={1:5,2:4}", "algo.times", None, "Add 2 to algo.ranks"),
    ("algo.ranks=[4] algo.times={4:5}", "algo.times", None, "'algo.times={1: 5.2, 4: 2}'"),
    ("algo.ranks=[4] algo.times={1:0,4:5}", "algo.times.1", "0", "Give a value above 0"),
    ("algo.ranks=[4] algo.times={1:2,4:5} algo.mode=weak", "algo.times", None, "algo.mode=strong"),
]


@pytest.mark.parametrize(COLUMNS, MISTAKES)
def test_mistakes_are_refused(overrides, key, value, try_next):
    refuses(f"algo=predict {overrides}", key=key, value=value, try_next=try_next)


RUN_MISTAKES = [
    ("hardware=cpu algo.times={1:5,4:4}", "hardware", "cpu", None),
    ("hardware=a100_40g opt=[compile]", "opt", "compile", None),
    ("hardware=cpu opt=[ddp] opt.ddp.ranks=2", "opt.ddp.ranks", 2, "algo.ranks=[4]"),
]


@pytest.mark.run
@pytest.mark.parametrize(COLUMNS, RUN_MISTAKES)
def test_mistakes_that_a_run_finds(overrides, key, value, try_next, tmp_path):
    given = ["algo=predict", "algo.ranks=[4]", *overrides.split()]
    refuses(lambda: train(compose(given), tmp_path), key=key, value=value, try_next=try_next)
    assert not (tmp_path / "prediction.json").exists()
