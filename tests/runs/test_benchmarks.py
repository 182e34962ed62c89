import json
import re
import subprocess
import sys
from dataclasses import make_dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import directions, eggroll, grpo, measure, real, sampler
from benchmarks.measure import Case
from benchmarks.together import RUNS
from common.config import ConfigError
from tests.support import ROOT
from tests.support.commands import Launch
from tests.support.models import small_model

pytestmark = pytest.mark.thorough  # no part of the product

ROWS = [
    "one sample at a time (2 of 16 samples, scaled)",
    "weights perturbed once a member, batched (2 of 8 members, scaled)",
    "population in one forward",
    "+ amp",
    "+ compile",
    "plain sampler, no noise",
    "noise generation",
    "update",
    "noise generation and update",
]


@pytest.fixture
def benchmark(launch: Launch):
    """python -m benchmarks; fresh where it compiles, which wants an environment and processes of
    its own.
    """
    return partial(launch, module="benchmarks")


def check(content):
    """The form that is set, and nothing claimed that was not measured."""
    assert set(content) == {"conditions", "rows"}
    conditions, rows = content["conditions"], content["rows"]
    for key in ("device", "threads", "torch", "transformers", "commit", "date", "sizes", "dtype"):
        assert key in conditions, key
    for row in rows:
        assert list(row) == ["benchmark", "row", "value", "unit", "against", "ratio"]
        assert row["benchmark"] == "eggroll"
        assert (row["against"] is None) == (row["ratio"] is None)
        assert row["value"] is None or row["value"] >= 0
    assert {row["row"] for row in rows} == set(ROWS)
    for name in conditions["skipped"]:
        assert [row["value"] for row in rows if row["row"] == name] == [None]
        assert not any(row["against"] == name for row in rows)
        assert name not in conditions["timing"]
    timed = {row["row"] for row in rows if row["unit"] == "s/step" and row["value"] is not None}
    assert timed == set(conditions["timing"])
    assert all(
        len(timing["seconds"]) == conditions["repeats"] for timing in conditions["timing"].values()
    )
    assert set(conditions["same_completions"]) == {eggroll.ONE, eggroll.MEMBER}
    assert len(conditions["figures"]) == 4
    (against,) = [
        row["against"] for row in rows if row["row"] == eggroll.POPULATION and row["against"]
    ]
    assert against == ROWS[0]


def test_eggroll_without_a_compiler(benchmark, tmp_path):
    path = tmp_path / "there" / "out.json"
    done = benchmark(
        "eggroll",
        "--quick",
        "--device",
        "cpu",
        "--json",
        str(path),
        env={"CXX": "/no/compiler"},
        fresh=True,
    )
    content = json.loads(path.read_text())
    check(content)
    assert "InvalidCxxCompiler" in content["conditions"]["skipped"]["+ compile"]
    assert done.stderr == ""  # no progress line where there is no terminal


@pytest.mark.slow
def test_eggroll_with_a_compiler(benchmark, tmp_path):
    benchmark(
        "eggroll",
        "--quick",
        "--device",
        "cpu",
        "--repeats",
        "1",
        "--json",
        str(tmp_path / "out.json"),
        fresh=True,
    )
    content = json.loads((tmp_path / "out.json").read_text())
    check(content)
    assert content["conditions"]["compile_seconds"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_eggroll_on_cuda(benchmark, tmp_path):
    benchmark(
        "eggroll", "--quick", "--device", "cuda", "--json", str(tmp_path / "out.json"), fresh=True
    )
    check(json.loads((tmp_path / "out.json").read_text()))


def test_loader_shows_one_change_at_a_time(benchmark, tmp_path):
    path = tmp_path / "out.json"
    done = benchmark("loader", "--quick", "--device", "cpu", "--json", str(path))
    content = json.loads(path.read_text())
    rows = {row["row"]: row for row in content["rows"]}
    assert list(rows) == [
        *("before", "+ collate pre-allocated", "+ forward without loop", "+ both"),
        *("+ batch twice as large", "+ worker processes"),
        *("collate: list and concatenate", "collate: pre-allocated"),
    ]
    assert all(row["value"] > 0 for row in rows.values())
    assert rows["+ both"]["ratio"] > 2  # tiny sizes; far more in earnest
    assert "both changes together" in done.stdout


@pytest.mark.slow
def test_rft_rows_do_the_same_work(benchmark, tmp_path):
    path = tmp_path / "out.json"
    done = benchmark("rft", "--quick", "--device", "cpu", "--json", str(path))
    content = json.loads(path.read_text())
    work = content["conditions"]["work"]
    assert {"one question at a time", "generate, batched", "this project"} <= set(work)
    assert {one["samples"] for one in work.values()} == {12}
    assert all(0 < one["tokens"] <= 12 * 12 for one in work.values())
    assert content["conditions"]["skipped"]["+ compile"] == "not with --quick"
    assert all(row["value"] is not None for row in content["rows"] if row["row"] in work)
    assert "this project against generate, batched" in done.stdout


def test_scoring_in_each_way_by_samples(benchmark, tmp_path):
    benchmark("scoring", "--quick", "--device", "cpu", "--json", str(tmp_path / "out.json"))
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    values = {row["row"]: row for row in rows}
    kinds = ("serial", "threads", "processes")
    assert set(values) == {f"{task}, K=4, {k}" for task in ("waits", "computes") for k in kinds}
    assert all(row["value"] > 0 for row in rows)
    assert values["waits, K=4, threads"]["against"] == "waits, K=4, serial"


def test_training_compiled_beside_eager(benchmark, tmp_path):
    benchmark("training", "--quick", "--device", "cpu", "--json", str(tmp_path / "out.json"))
    content = json.loads((tmp_path / "out.json").read_text())
    if skipped := content["conditions"]["skipped"]:
        assert set(skipped) == {"compiled blocks"}
        return
    values = {(row["row"], row["unit"]): row["value"] for row in content["rows"]}
    assert values["compiled blocks", "share of the gradient"] < 1e-5
    assert values["compiled blocks", "s"] > 0


def test_grpo_in_brief(benchmark, tmp_path):
    done = benchmark(
        "grpo", "--quick", "--brief", "--device", "cpu", "--json", str(tmp_path / "out.json")
    )
    content = json.loads((tmp_path / "out.json").read_text())
    values = {row["row"]: row["value"] for row in content["rows"] if row["unit"] == "s/step"}
    assert values[grpo.PLAIN] > 0
    assert values[grpo.OURS] > 0
    assert content["conditions"]["loss_deviation"][grpo.PLAIN] < 1e-4
    assert content["conditions"]["skipped"]["+ 2 ranks"] == "not with --brief"
    assert done.stderr == ""


def test_grpo_with_the_switches_of_an_experiment(benchmark, tmp_path):
    asked = ["--experiment", "grpo_rtx4090", "--quick", "--brief", "--device", "cpu"]
    done = benchmark("grpo", *asked, "--repeats", "1", "--json", str(tmp_path / "out.json"))
    content = json.loads((tmp_path / "out.json").read_text())
    row = "experiment=grpo_rtx4090"
    values = {row["row"]: row["value"] for row in content["rows"] if row["unit"] == "s/step"}
    assert values[row] > 0
    skipped = content["conditions"]["skipped"]
    assert skipped[f"{row}: offload"] == "a CPU has no other memory"
    assert "capability" in skipped[f"{row}: tf32"]
    assert content["conditions"]["loss_deviation"][row] < 0.05
    assert row in done.stdout


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("rft_fast", "--experiment=rft_fast is of algo=rft. Give one of GRPO"),
        ("grpo_rtx3090", "experiment=grpo_rtx3090 is not a choice. Did you mean 'grpo_rtx4090'?"),
    ],
)
def test_grpo_with_an_experiment_that_it_cannot_have(name, complaint):
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        grpo.find_experiment(name, {})


@pytest.mark.slow
def test_grpo(benchmark, tmp_path):
    """Every row that a CPU has, tiny; the loss curves are the check that all of them do the same
    work.
    """
    done = benchmark(
        "grpo", "--quick", "--device", "cpu", "--json", str(tmp_path / "out.json"), fresh=True
    )
    content = json.loads((tmp_path / "out.json").read_text())
    conditions, rows = content["conditions"], content["rows"]
    seconds = {row["row"]: row["value"] for row in rows if row["unit"] == "s/step"}
    document = {grpo.PLAIN, grpo.PEER, grpo.OURS, *grpo.CUMULATIVE}
    assert set(seconds) - {"float32 against TRL"} == document | set(grpo.ALONE)
    skipped = conditions["skipped"]
    may = {grpo.PEER, "+ amp", "+ compile"} | set(grpo.ALONE) - {
        "checkpointing alone",
        "AdamW not fused alone",
    }
    assert set(skipped) <= may, skipped
    assert all((value is None) == (row in skipped) for row, value in seconds.items())
    gaps = conditions["loss_deviation"]
    assert gaps.pop(grpo.PEER, None) is None
    for name, gap in gaps.items():
        half = name in ("+ amp", "+ parallel rewards", "+ 2 ranks", "amp alone")
        assert gap < (0.05 if half else 1e-4), name
    for name in gaps:
        assert set(conditions["phases"][name]) == {
            "rollout",
            "reward",
            "reference",
            "train",
            "update",
        }
        assert 0 < conditions["memory"][name] < 1
        losses = conditions["losses"][name]
        assert len(losses) == 4
        assert all(abs(loss) > 1e-6 for loss in losses[1:])
    assert "tf32 alone: skipped, wants a CUDA device" in done.stdout
    assert done.stderr == ""


def test_the_sampler_that_is_timed_is_made_once():
    """Each would record its steps anew, and the time be that of recording."""
    work = sampler.Work("small", sampler.QUICK, torch.device("cpu"), torch.float32)
    made = [work.equal_ours(), work.equal_ours()]
    assert torch.equal(*made)
    work.spread_ours()
    assert len(work.samplers) == 2


def test_sampler(benchmark, tmp_path):
    done = benchmark("sampler", "--quick", "--device", "cpu", "--json", str(tmp_path / "out.json"))
    content = json.loads((tmp_path / "out.json").read_text())
    ratios = {row["row"]: row["ratio"] for row in content["rows"] if row["against"]}
    assert set(ratios) == {
        *(
            "equal lengths: this project",
            "spread lengths: this project",
            "spread lengths: this project, too",
        ),
        "spread lengths: continuous batching",
    }
    assert all(ratio > 0 for ratio in ratios.values())
    drawn = content["conditions"]["mean_length"]
    assert len(drawn) >= 3
    assert all(4 < length < 24 for length in drawn.values())  # longest is 24
    assert "decode, share of the bandwidth roofline" in done.stdout


@pytest.mark.slow
def test_memory_of_training_and_of_sampling(benchmark, tmp_path):
    done = benchmark("memory", "--quick", "--device", "cpu", "--json", str(tmp_path / "out.json"))
    content = json.loads((tmp_path / "out.json").read_text())
    assert [row["unit"] for row in content["rows"]] == ["GB"] * 4
    assert all(row["value"] > 0 for row in content["rows"])
    assert done.stdout.count("<= 1.15x") == 2


def test_results_side_by_side(benchmark, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for side, value in (("a", 2.0), ("b", 3.0)):
        rows = [
            {
                "benchmark": "x",
                "row": "y",
                "value": value,
                "unit": "s",
                "against": None,
                "ratio": None,
            }
        ]
        content = {"conditions": {"device": side, "torch": "2"}, "rows": rows}
        (tmp_path / side / "x.json").write_text(json.dumps(content))
    done = benchmark("compare", str(tmp_path / "a"), str(tmp_path / "b"))
    assert "y  2.00  3.00     s   1.50" in done.stdout
    assert "differs: device: a | b" in done.stdout
    assert "torch" not in done.stdout
    (tmp_path / "b" / "x.json").write_text("{}")
    assert (
        "is no result of a benchmark"
        in benchmark("compare", *(str(tmp_path / x) for x in "ab"), code=1).stderr
    )
    assert "holds no results" in benchmark("compare", "nowhere", str(tmp_path / "a"), code=1).stderr


@pytest.mark.slow
def test_all_in_one_go(benchmark, tmp_path):
    done = benchmark(
        "all", "--quick", "--device", "cpu", "--out", str(tmp_path / "out"), fresh=True
    )
    assert {path.stem for path in (tmp_path / "out").glob("*.json")} == set(RUNS["cpu"])
    assert "sampler: spread lengths: this project / spread lengths: generate" in done.stdout


def test_an_unknown_name_is_answered_with_the_names(benchmark):
    said = benchmark("nothing", code=2).stderr
    assert "choose from" in said
    assert "eggroll" in said


def test_help_names_each_benchmark_and_imports_no_torch():
    code = (
        "import sys; from benchmarks.__main__ import parser; print(parser().format_help());"
        " sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert "eggroll" in done.stdout


def test_different_completions_are_not_equal_work():
    work = eggroll.Work(eggroll.QUICK, torch.device("cpu"))
    made = work.population()
    which = [(i % work.sizes.prompts, i // work.sizes.prompts) for i in range(work.sizes.samples)]
    assert work.same(made, made, which) == len(which)
    other = made.clone()
    other[3, 5] = (other[3, 5] + 1) % 256
    with pytest.raises(
        RuntimeError, match="not the same work: member 1, prompt 1 differ at token 5"
    ):
        work.same(other, made, which)


def test_the_weights_come_back():
    work = eggroll.Work(eggroll.QUICK, torch.device("cpu"))
    before = {name: weight.clone() for name, weight in work.parameters.items()}
    with work.materialised(3):
        assert any(
            not torch.equal(weight, before[name]) for name, weight in work.parameters.items()
        )
    work.member_by_member()
    work.population()
    work.update()
    assert all(torch.equal(weight, before[name]) for name, weight in work.parameters.items())


def test_cases_take_turns_and_the_warm_up_is_not_counted():
    calls = []
    cases = [
        Case("a", lambda: calls.append("a") or len(calls), warm_ups=2),
        Case("b", lambda: calls.append("b")),
    ]
    timings = measure.interleaved(cases, 3, torch.device("cpu"))
    assert "".join(calls) == "aab" + "ababab"
    assert [len(timing.seconds) for timing in timings.values()] == [3, 3]
    assert timings["a"].first == 1


def test_memory_is_that_of_the_case_alone():
    ballast = torch.ones(1 << 26)  # 256 MB that this process holds and the other does not
    peak = measure.peak_memory_gb(buffer, 1 << 25)
    if peak is None:
        pytest.skip("this system does not tell")
    assert 0.125 <= peak < 0.2
    del ballast


def buffer(numbers):
    return lambda: torch.ones(numbers).sum()


def test_kinds_of_noise_have_unit_variance():
    objective = directions.Objective(directions.QUICK, torch.device("cpu"))
    spans = objective.spans()
    for name, basis in spans.items():
        torch.testing.assert_close(basis @ basis.T, torch.eye(len(basis)), atol=1e-4, rtol=0)
        assert 0 < len(basis) <= objective.weights[name].shape[1]
    for kind, rank, _ in directions.KINDS.values():
        for one in directions.draw(kind, rank, 4, objective, spans, seed=0):
            assert one.keys() == objective.weights.keys()
            flat = torch.cat([part.flatten() for part in one.values()])
            assert flat.square().mean().item() == pytest.approx(1, abs=0.25), kind


def test_the_exact_gradient_is_what_the_value_does():
    objective = directions.Objective(directions.QUICK, torch.device("cpu"))
    gradient = objective.gradient()
    size = sum(part.square().sum().item() for part in gradient.values())
    before = {name: weight.clone() for name, weight in objective.weights.items()}
    step = 1e-2 / size**0.5
    slope = (objective.at(gradient, step) - objective.at(gradient, -step)) / (2 * step)
    assert slope == pytest.approx(size, rel=0.05)
    for name, weight in objective.weights.items():
        torch.testing.assert_close(weight, before[name])


def test_directions_by_command(benchmark, tmp_path):
    path = tmp_path / "out.json"
    benchmark("directions", "--quick", "--json", str(path))
    content = json.loads(path.read_text())
    assert set(content["conditions"]["cosines"]) == set(directions.KINDS)
    assert all(abs(row["value"] or 0) <= 1 for row in content["rows"])


@pytest.mark.parametrize(
    ("part", "rows"),
    [
        (
            "sampling",
            {
                *("8 x 8: generate", "8 x 8: this project", "32 x 8: this project"),
                *("this project without noise", "this project, a population"),
            },
        ),
        ("eggroll", {real.STEP, real.ALIKE}),
    ],
)
def test_shapes_of_users_are_measured(benchmark, tmp_path, part, rows):
    model = small_model("llama", vocabulary=49152)
    model.config.max_position_embeddings = 256
    model.save_pretrained(tmp_path / "weights")
    path = tmp_path / "out.json"
    given = ("--weights", str(tmp_path / "weights"), "--part", part, "--json", str(path))
    benchmark("real", "--quick", "--repeats", "1", "--device", "cpu", *given)
    content = json.loads(path.read_text())
    measured = {row["row"]: row["value"] for row in content["rows"]}
    assert rows <= measured.keys()
    assert all(measured[row] > 0 for row in rows)
    assert content["conditions"]["dtype"] == "bfloat16"


def test_the_page_of_a_long_run_is_measured(benchmark, tmp_path):
    path = tmp_path / "out.json"
    benchmark("report", "--quick", "--device", "cpu", "--json", str(path))
    content = json.loads(path.read_text())
    figures = content["conditions"]["figures"]
    assert {"made in", "size"} <= figures.keys()
    assert content["conditions"]["sizes"] == {"steps": 200, "completions": 2000}
    if "requests that leave it" in figures:  # there is a Chromium
        assert figures["requests that leave it"]["measured"] == "0"


@pytest.mark.parametrize("field", ["page_size", "block_size"])
def test_continuous_batching_is_asked_in_the_words_of_its_version(field, monkeypatch):
    """transformers 5.17 calls block_size what later ones call page_size."""
    names = [field, "num_blocks", "max_batch_tokens", "max_requests_per_batch"]
    settings = make_dataclass("Settings", names)
    monkeypatch.setattr(sampler, "ContinuousBatchingConfig", settings)
    asked = []

    def generate_batch(prompts, continuous_batching_config, **_):
        asked.append(continuous_batching_config)
        return {row: SimpleNamespace(generated_tokens=[5]) for row in range(len(prompts))}

    sizes = SimpleNamespace(prompt_tokens=40, longest=30, rows=4, prompts=2, samples=1)
    work: Any = SimpleNamespace(
        sizes=sizes,
        model=SimpleNamespace(generate_batch=generate_batch),
        prompts=torch.zeros(2, 40, dtype=torch.long),
        sampled={"max_new_tokens": 3},
        until_stop=list,
    )
    assert len(sampler.Work.spread_paged(work)) == 2
    assert asked == [settings(32, 4 * 3, 1024, 4)]
