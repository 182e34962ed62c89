"""Each file of conf/experiment is run, at toy size. Those of classify, which want real rows, are in
test_classify.py.
"""

import gzip
import re

import pytest

from common.config import ConfigError
from launch import compose, train
from tests.support import ROOT, SHARED, SMALL, TINY

FILES = sorted((ROOT / "conf" / "experiment").glob("*.yaml"))
GRPO = [
    *(*TINY, "model.tiny.context=512", "task.positions=64", "task.test_positions=8"),
    *("algo.steps=2", "algo.prompts_per_step=2", "algo.samples_per_prompt=3"),
]
# A base that knows a little (that of test_every_task.py), few samples and a low bar, so that
# something is accepted.
RFT = [
    *(
        "algo.prompts=8",
        "algo.validation_prompts=2",
        "algo.samples_per_prompt=4",
        "algo.iterations=1",
        "algo.epochs=1",
    ),
    *("algo.select.accept=0.05", "evaluate.samples=2", "algo.sampling.max_new_tokens=48"),
    *(s for s in TINY if "pretrain" not in s and "hidden" not in s),
    *(
        "model.tiny.context=512",
        "model.tiny.hidden_size=64",
        "model.tiny.pretrain_steps=75",
        "model.tiny.pretrain_rows=32",
        "model.tiny.pretrain_lr=5e-3",
    ),
]
# Of models of billions of parameters: the tiny one without training, or with RFT's.
LARGE = ["model=tiny", "model.path=null", "task.chat=false", "algo.sampling.max_new_tokens=48"]
LARGE_GRPO = [*LARGE, *(s for s in GRPO if not s.startswith("task.")), "model.adapter.rank=4"]
TOY = {
    "eggroll_multi30k": [
        *(s for s in SMALL if "context" not in s),
        *("algo.steps=1", "task.source=train.en.gz", "task.target=train.de.gz"),
        *("task.test_source=test_2016_flickr.en.gz", "task.test_target=test_2016_flickr.de.gz"),
    ],
    "eggroll_numbers": [*SMALL, "algo.steps=1"],
    # A model that has learnt nothing gives a probe nothing to go by.
    "eggroll_smollm2_units": [
        *(*SMALL, *LARGE, "algo.steps=1", "budget.tokens=null"),
        *("algo.sigma=0.01", "algo.lr=0.01"),
    ],
    "grpo_chess": GRPO,
    "grpo_dapo": GRPO,
    "grpo_scalerl": GRPO,
    "grpo_fp32": GRPO,
    "grpo_rtx4090": [*GRPO, "opt=[amp]"],  # a CPU has neither TF32 nor another memory
    **dict.fromkeys(("rft_balanced", "rft_conservative", "rft_fast", "rft_quality"), RFT),
    **dict.fromkeys(("rft_a100_40g", "rft_a100_80g", "rft_rtx4090", "rft_v100"), RFT),
    "sft_own_rows": [
        *(*TINY, "algo.steps=2", "algo.prompts_per_step=4"),
        *(f"task.path={ROOT}/examples/own_data/numbers.csv", "task.prompt_field=words"),
        "task.answer_field=number",
    ],
    "sft_smollm2_units": [*TINY, "model=tiny", "algo.steps=2", "task.chat=false"],
    "rft_smollm2_units": [s for s in RFT if not s.startswith("model")],
    **dict.fromkeys(("grpo_lora_7b_80gb", "grpo_lora_7b_24gb", "grpo_lora_3b_24gb"), LARGE_GRPO),
    "eggroll_7b_40gb": [*SMALL, *LARGE, "opt=[amp]", "algo.steps=1"],
    "rft_lora_8b_40gb": [*LARGE, *RFT],
}  # fmt: skip


def test_every_experiment_has_a_test():
    classify = {"ag_news_small", "ag_news_optimized", "imdb"}
    assert {path.stem for path in FILES} == set(TOY) | classify
    tested = (ROOT / "tests" / "runs" / "test_classify.py").read_text()
    assert all(f'"{name}"' in tested for name in classify)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_an_experiment_says_what_came_of_it(path):
    """Its header has the command, and hardware, time and score, or why there are none."""
    header = path.read_text().split("defaults:")[0]
    assert re.search(rf"(?m)^# command: python launch.py experiment={path.stem}\b", header)
    if path.stem.endswith("gb"):  # tests/runs/test_plan.py compares the plan
        assert re.search(
            r"# not yet measured on a GPU; planned, with plan=true: [0-9.]+ GB", header
        )
        return
    measured = re.search(r"(?s)# measured: (.*)", header)
    assert measured, "no line of what was measured"
    for what in (
        r"\d %|BLEU|chrF",
        r"\d s\b|\d min|minutes",
        r"EPYC|Xeon|A100|H\d00|RTX",
        r"torch \d",
        r"20\d\d-\d\d-\d\d",
    ):
        assert re.search(what, measured[1]), f"{what} is not in {measured[1]}"


# Presets that differ from another one in numbers alone; the others run each time.
LIKE_ANOTHER = {
    *("rft_balanced", "rft_quality"),
    *("rft_a100_40g", "rft_a100_80g", "rft_rtx4090"),
}

ONCE = {"eggroll_numbers", "grpo_chess", "sft_own_rows", "sft_smollm2_units"}  # in make test


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[pytest.mark.slow]
            if name in LIKE_ANOTHER
            else [pytest.mark.thorough] * (name not in ONCE),
        )
        for name in sorted(set(TOY) - {"rft_smollm2_units"})
    ],
)
def test_an_experiment_runs(name, in_cache, tmp_path, monkeypatch):
    if name == "eggroll_multi30k":
        if not (SHARED / "data").is_dir():
            pytest.skip("the captions are not beside the repository")
        monkeypatch.chdir(tmp_path)
        for part in ("train", "test_2016_flickr"):
            for language in ("en", "de"):
                real = gzip.decompress(
                    (SHARED / "data" / "multi30k" / f"{part}.{language}.gz").read_bytes()
                )
                (tmp_path / f"{part}.{language}.gz").write_bytes(
                    gzip.compress(b"".join(real.splitlines(True)[:50]))
                )
    run = compose([f"experiment={name}", *TOY[name], "hardware=cpu", "evaluate.examples=4"])
    result = train(run, tmp_path / "out")
    assert result.algo == name.partition("_")[0]
    assert result.reward_evaluations > 0 or result.algo == "sft"  # its answers are given
    assert (tmp_path / "out" / "report.md").is_file()


def test_the_experiment_of_smollm2_runs(tmp_path):
    """With a small model of stories in its place: prompts, samples and rewards are made, and as it
    answers nothing, that is said.
    """
    if not (SHARED / "data").is_dir():
        pytest.skip("the conversions and the model are not beside the repository")
    data = SHARED / "data"
    files = [
        f"task.{key}={data}/unit_conversion/{file}.json"
        for key, file in (("path", "train"), ("test_path", "valid"))
    ]
    own = [f"model.path={data}/stories260k-hf", *files, "task.few_shot=[]", "task.system=''"]
    run = compose(
        [
            "experiment=rft_smollm2_units",
            *TOY["rft_smollm2_units"],
            *own,
            "hardware=cpu",
            "evaluate.examples=4",
        ]
    )
    with pytest.raises(ConfigError, match="no completion of iteration 1 was accepted"):
        train(run, tmp_path / "out")
    assert (tmp_path / "out" / "iteration-1").is_dir()
