import re
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from common.config import ConfigError, ScheduleConfig
from common.config.plugins import conf_folders, find_file, list_files
from common.config.validate import build
from common.run.resume import differences
from grpo.train import describe_variables
from launch import ALGORITHMS, compose
from tests.support import ROOT
from tests.support.refusals import COLUMNS, refuses

FILES = sorted(path for folder in conf_folders() for path in folder.rglob("*.yaml"))


def options(group: str) -> list[str]:
    return [path.stem for path in list_files(group)]


@pytest.mark.run
@pytest.mark.parametrize("task", options("task"))
def test_every_task_composes(task):
    """tests/runs/test_every_task.py runs each with every algorithm."""
    has_classes = "ddp_bench" in find_file(f"task/{task}.yaml").read_text()
    for algo in ("scaling", "predict") if has_classes else ("eggroll",):
        assert compose([f"algo={algo}", f"task={task}"]).algo.name == algo


@pytest.mark.run
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_preset_composes_and_never_changes_a_result(algo):
    """Hardware files hold facts: the algorithm's settings are the same whatever the device; all
    files with one algorithm, and one of them with each of the others.
    """
    names = options("hardware") if algo == "eggroll" else ["cpu", "v100"]
    runs = [compose([f"algo={algo}", f"hardware={name}"]) for name in names]
    assert [run.hardware.name for run in runs] == names
    assert {run.algo.name for run in runs} == {algo}
    assert all(asdict(run.algo) == asdict(runs[0].algo) for run in runs)


@pytest.mark.run
@pytest.mark.parametrize("experiment", options("experiment"))
def test_every_experiment_composes(experiment):
    extra = ["model.path=x"] if "smollm2" in experiment else []
    assert compose([f"experiment={experiment}", *extra]).algo.name in ALGORITHMS


def test_an_experiment_changes_what_stands_in_config_yaml():
    data = ["task.source=x", "task.target=y", "task.test_source=x", "task.test_target=y"]
    run = compose(["experiment=eggroll_multi30k", *data])
    assert (run.evaluate.examples, run.task["reward"], run.model.tiny.context) == (100, "chrf", 512)
    assert (
        compose(["experiment=eggroll_multi30k", *data, "evaluate.examples=7"]).evaluate.examples
        == 7
    )


@pytest.mark.parametrize("tracker", options("tracker"))
def test_every_tracker_composes(tracker):
    assert compose([f"tracker={tracker}"]).tracker.name == tracker


@pytest.mark.parametrize("model", options("model"))
def test_every_model_composes(model):
    extra = {"hf": ["model.path=x"], "gguf": ["model.path=x", "model.gguf_file=y"]}.get(model, [])
    assert compose([f"model={model}", *extra]).model.name == model


@pytest.mark.parametrize("name", ["conf (copy)", "conf=1", "conf,v2", "it's"])
def test_a_folder_of_settings_may_have_any_name(name, tmp_path):
    (tmp_path / name / "task").mkdir(parents=True)
    mine = "defaults: [units, _self_]\nproblems: 77\n"
    (tmp_path / name / "task" / "mine.yaml").write_text(mine)
    run = compose(["task=chess", "evaluate.also=[mine]"], str(tmp_path / name))
    assert run.evaluate.also["mine"]["problems"] == 77
    assert compose(["task=mine"], str(tmp_path / name)).task["problems"] == 77


def test_opt_is_a_set():
    switches = [
        name for name in options("opt") if name != "fsdp"
    ]  # with which some of them do not go
    assert (
        compose([f"opt=[{','.join(switches)}]"]).opt.enabled()
        == compose([f"opt=[{','.join(switches[::-1])}]"]).opt.enabled()
    )
    assert sorted(compose([f"opt=[{','.join(switches)}]"]).opt.enabled()) == switches
    assert compose(["opt=amp"]).opt.enabled() == ["amp"]
    assert compose(["opt=[]"]).opt.enabled() == []


@pytest.mark.parametrize(
    "path", sorted((ROOT / "conf" / "opt").glob("*.yaml")), ids=lambda p: p.stem
)
def test_an_opt_file_writes_under_its_own_key(path: Path):
    assert list(yaml.safe_load(path.read_text())) == [path.stem]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_setting_has_a_comment(path: Path):
    """Beside the key, or above it (a run of keys below one comment shares it). The file has one at
    its head.
    """
    lines = path.read_text().splitlines()
    assert lines[0].startswith("#"), "the file says what it is"
    below_comment = True
    for line in lines:
        if not line.strip():
            below_comment = False
        elif line.lstrip().startswith("#"):
            below_comment = True
        elif re.match(r"\s*[\w]+:", line) and "_target_" not in line:
            name = line.split(":")[0].strip()
            plain = name in ("name", "defaults", "peak_tflops") or line.rstrip().endswith(
                (":", "|-")
            )
            assert "#" in line or below_comment or plain or "hydra" in str(path), (
                f"{name} has no comment"
            )


@pytest.mark.run
def test_the_rows_of_the_document():
    """Samples, chunks, rows and batches by card, as the project's A100 document gives them, are
    experiments; the hardware itself changes none of them.
    """
    keys = ("samples_per_prompt", "prompts_per_batch", "chunk_size", "rollout_rows", "batch_size")
    cards = {
        "a100_40g": (30, 8, 10, 256, 32),
        "a100_80g": (50, 12, 15, 512, 64),
        "rtx4090": (20, 8, 10, None, 32),  # ours
        "v100": (20, 4, 5, 128, 16),
    }
    for name, sizes in cards.items():
        found = compose([f"experiment=rft_{name}"])
        assert tuple(getattr(found.algo, key) for key in keys) == sizes
        assert found.algo.sampling.temperature == 0.7
        assert found.opt.enabled() == ["amp"]
    assert compose(["algo=rft"]).algo.chunk_size == 10
    plain = {name: compose(["algo=rft", f"hardware={name}"]).algo for name in cards}
    assert all(algo == plain["v100"] for algo in plain.values())


MISTAKES = [
    ("algo.sgima=1", "algo.sgima", "1", "'sigma'"),
    ("+algo.lrr=3", "algo.lrr", "3", "'lr'"),
    ("engine.cuda_graph=false", "engine.cuda_graph", "false", "'cuda_graphs'"),
    ("sede=1", "sede", "1", "'seed'"),
    ("algo.sigma=high", "algo.sigma", "high", "Give one above 0, or auto"),
    ("algo.weight_decay=high", "algo.weight_decay", "high", "Give one"),
    ("algo.steps=1.5", "algo.steps", "1.5", "Give one"),
    ("algo.mirrored=maybe", "algo.mirrored", "maybe", "Give one of them"),
    ("algo.record=maybe", "algo.record", "maybe", "neither true, false nor null"),
    ("algo.max_drift=none", "algo.max_drift", "none", "or null"),
    ("algo.rollout_rows=1", "algo.rollout_rows", "1", "at least 2, or null"),
    ("budget.tokens=0", "budget.tokens", "0", "or null"),
    ("evaluate.every=-1", "evaluate.every", "-1", "or null"),
    ("evaluate.text=[1]", "evaluate.text", "[1]", "or null"),
    ("model.quantize=int4", "model.quantize", "int4", "or null"),
    ("model.adapter=lora", "model.adapter", "lora", ["or null", "model.adapter.rank=VALUE"]),
    ("algo=grpo algo.correction_bounds=5", "algo.correction_bounds", "5", "or null"),
    ("algo=grpo algo.delta=1", "algo.delta", "1", "or null"),
    ("algo=rft algo.shard=half", "algo.shard", "half", "or null"),
    ("seed=null", "seed", "null", "Give one, or leave it out"),
    ("slurm.setup=module", "slurm.setup", "module", "'slurm.setup=[module]'"),
    ("slurm.options=3", "slurm.options", "3", "NAME: VALUE"),
    ("algo.optimizer=AdamW", "algo.optimizer", "AdamW", "algo.optimizer.name=VALUE"),
    ("slurm.options.qos=long", "slurm.options.qos", "long", "slurm.script=FILE"),
    ("scoring.workers=3", "scoring.workers", "3", "scoring.kind=threads"),
    ("scoring.timeout_seconds=5", "scoring.timeout_seconds", "5", "scoring.kind=threads"),
    ("experiment=null", "experiment", "null", "Leave it out"),
    ("resume=true", "resume", "true", "Give auto, no or a run folder"),
    ("hardware.memory_gb=-1", "hardware.memory_gb", "-1", "Give a value above 0"),
    ("hardware.peak_tflops.bf16=0", "hardware.peak_tflops.bf16", "0", "Give a value above 0"),
    ("opt=[amp,cmpile]", "opt", "cmpile", "'compile'"),
    ("opt=null", "opt", "null", ["opt=[]", "'opt=[amp,compile]'"]),
    ("opt.amp.dtype=float16", "opt.amp.dtype", "float16", "'opt=[amp,...]'"),
    ("hardware=a100", "hardware", "a100", "'v100'"),
    ("algo=egroll", "algo", "egroll", "'eggroll'"),
    ("algo.members=3", "algo.members", "3", ["algo.members=4", "algo.mirrored=false"]),
    ("algo.fitness=zscor", "algo.fitness", "zscor", "'zscore'"),
    ("algo.sigma=-1", "algo.sigma", "-1", "Give a value above 0"),
    ("algo.samples_per_prompt=2", "algo.samples_per_prompt", "2", "Set a temperature above 0"),
    ("model=hf", "model.path", None, ["model=hf", "model.path=HuggingFaceTB/SmolLM2-135M"]),
    ("model.path=gpt2", "model.path", "gpt2", "model=hf"),
    ("hardware=4090", "hardware", "4090", "'rtx4090'"),
    ("opt=[3]", "opt", "3", "amp"),
    (["algo.optimizer.kwargs={lr: 5}"], "algo.optimizer.kwargs.lr", "5", "Use algo.lr"),
    (
        "algo.lr_schedule.kind=linear",
        "algo.lr_schedule.kind",
        "linear",
        "Set both, or leave both out",
    ),
    (
        ["algo.sigma_schedule={kind: exponential, end: 0}"],
        "algo.sigma_schedule.end",
        "0",
        "Give a value above 0",
    ),
    (
        ["algo.sampling={temperature: 0, top_k: 3}"],
        ["algo.sampling.top_p", "top_k", "min_p"],
        None,
        "Set a temperature above 0, or leave them out",
    ),
    ("+tracker.mode=offline", "tracker.mode", "offline", "tracker=wandb"),
]


def test_a_wide_head_is_not_multiplied_in_tf32():
    overrides = ["algo=grpo", "opt=[amp,tf32]", "opt.amp.head=float32"]
    refuses(overrides, key="opt.amp.head", value="float32", try_next="opt=tf32")


@pytest.mark.parametrize(COLUMNS, MISTAKES)
def test_mistakes_are_refused(overrides, key, value, try_next):
    refuses(overrides, key=key, value=value, try_next=try_next)


def test_a_list_in_place_of_a_dict_is_refused():
    refuses("task=custom task.format=[1]", key="task.format", value="[1]", try_next="Use")


def test_a_wrong_environment_variable_is_named_alone(monkeypatch):
    monkeypatch.setenv("MICRO_BATCH_SIZE", "x")
    refuses("algo=rft", key="MICRO_BATCH_SIZE", value="'x'", try_next="Unset it")


def test_samples_of_eggroll_that_would_be_equal_are_refused():
    several = ["algo.samples_per_prompt=2", "algo.sampling.temperature=1"]
    assert compose(several).algo.samples_per_prompt == 2
    for key in ("top_k", "min_p"):
        refuses([*several, f"algo.sampling.{key}=1"], key=f"algo.sampling.{key}", value=1)


def test_an_opt_of_ones_own_is_a_choice(tmp_path):
    (tmp_path / "opt").mkdir()
    (tmp_path / "opt" / "half.yaml").write_text("amp: {enabled: true}\n")
    assert compose(["opt=[half]"], str(tmp_path)).opt.amp.enabled
    refuses(
        lambda: compose(["opt=[hlf]"], str(tmp_path)), key="opt", value="hlf", try_next="'half'"
    )


def test_the_production_configuration_of_grpo_has_every_switch():
    run = compose(["experiment=grpo_rtx4090", "hardware=rtx4090"])
    assert run.opt.enabled() == ["amp", "compile", "tf32", "offload"]
    assert (run.scoring.kind, run.scoring.workers, run.checkpoint.every) == ("threads", 4, 100)
    assert run.algo.kl.beta > 0, "there is a reference model to keep on the host"


def test_environment_variables_of_grpo_are_defaults(monkeypatch):
    plain = compose(["algo=grpo"])
    assert (plain.opt.enabled(), plain.scoring.kind, plain.scoring.workers) == ([], "serial", 2)
    for name, text in {
        "USE_AMP": "true",
        "AMP_DTYPE": "bfloat16",
        "USE_TF32": "1",
        "COMPILE_MODEL": "Yes",
        "PARALLEL_REWARDS": "on",
        "NUM_WORKERS": "3",
    }.items():
        monkeypatch.setenv(name, text)
    run = compose(["algo=grpo"])
    assert run.opt.enabled() == ["amp", "compile", "tf32"]
    assert run.opt.amp.dtype == "bfloat16"
    assert (run.scoring.kind, run.scoring.workers) == ("threads", 3)
    assert describe_variables(run)[:2] == ["USE_AMP=true", "AMP_DTYPE=bfloat16"]
    assert not any("(" in text for text in describe_variables(run))
    assert compose(["algo=eggroll"]).opt.enabled() == [], "another algorithm does not read them"
    assert compose(["algo=eggroll"]).scoring.kind == "serial"


def test_an_explicit_setting_comes_before_an_environment_variable(monkeypatch):
    for name, text in {"USE_AMP": "true", "USE_TF32": "true", "PARALLEL_REWARDS": "true"}.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("NUM_WORKERS", "3")
    assert compose(["algo=grpo", "opt=[]"]).opt.enabled() == []
    assert compose(["experiment=grpo_fp32"]).opt.enabled() == []
    run = compose(["algo=grpo", "opt=[amp]", "scoring.kind=processes", "scoring.workers=5"])
    assert (run.opt.enabled(), run.scoring.kind, run.scoring.workers) == (["amp"], "processes", 5)
    assert describe_variables(run) == [
        "USE_AMP=true",
        "USE_TF32=true (overridden: false)",
        "PARALLEL_REWARDS=true (overridden: processes)",
        "NUM_WORKERS=3 (overridden: 5)",
    ]
    serial = compose(["algo=grpo", "scoring.kind=serial"])
    assert describe_variables(serial)[-1] == "NUM_WORKERS=3 (no effect: scoring.kind=serial)"
    for name in ("USE_AMP", "USE_TF32", "PARALLEL_REWARDS"):
        monkeypatch.setenv(name, "false")
    run = compose(["algo=grpo"])
    assert (run.opt.enabled(), run.scoring.kind) == ([], "serial")
    monkeypatch.setenv("AMP_DTYPE", "float16")
    assert compose(["algo=grpo", "opt=[amp]"]).opt.amp.dtype == "float16"
    assert "AMP_DTYPE=float16 (no effect: opt=amp is off)" in describe_variables(run)


@pytest.mark.parametrize(
    ("name", "text", "try_next"),
    [
        ("USE_AMP", "maybe", ["Give one", "unset it"]),
        ("USE_TF32", "2", "unset it"),
        ("COMPILE_MODEL", "reduce-overhead", "unset it"),
        ("PARALLEL_REWARDS", "4", "unset it"),
        ("AMP_DTYPE", "half", ["auto", "bfloat16", "float16", "unset it"]),
        ("NUM_WORKERS", "-1", "Unset it"),
    ],
)
def test_unreadable_environment_variables_are_refused(monkeypatch, name, text, try_next):
    for other in ("USE_AMP", "PARALLEL_REWARDS"):
        monkeypatch.setenv(other, "true")
    monkeypatch.setenv(name, text)
    refuses("algo=grpo", key=name, value=text, try_next=try_next)
    compose(["algo=rft"])  # which does not read it


@pytest.mark.parametrize(("group", "given"), [("opt", "opt=[16]"), ("hardware", "hardware=16")])
def test_a_file_of_ones_own_whose_name_is_a_number(tmp_path, group, given):
    (tmp_path / group).mkdir()
    (tmp_path / group / "16.yaml").write_text("{}")
    refuses(
        lambda: compose([given], str(tmp_path)),
        key=group,
        value=16,
        try_next="Give the file a name",
    )


def test_schedules():
    def factors(kind, end):
        return [round(ScheduleConfig(kind=kind, end=end).factor(step / 4), 4) for step in range(5)]

    assert factors("constant", 1.0) == [1, 1, 1, 1, 1]
    assert factors("linear", 0.0) == [1, 0.75, 0.5, 0.25, 0]
    assert factors("cosine", 0.0) == [1, 0.8536, 0.5, 0.1464, 0]
    assert factors("exponential", 0.0625) == [1, 0.5, 0.25, 0.125, 0.0625]
    refuses(
        lambda: build(ScheduleConfig, {"kind": "constant", "end": 0.5}, "algo.lr_schedule"),
        key="algo.lr_schedule.kind",
        value="constant",
    )


def test_values_as_other_trainers_write_them():
    run = compose(["algo=grpo", "algo.sampling.top_k=-1", "algo.warmup_steps=0.1"])
    assert (run.algo.sampling.top_k, run.algo.warmup_steps) == (0, 0.1)
    targets = "model.adapter.targets=[q_proj,v_proj]"
    run = compose(["algo=grpo", "model=hf", "model.path=x", "model.adapter.rank=4", targets])
    assert run.model.adapter.targets == "q_proj,v_proj"
    refuses("algo=grpo algo.sampling.top_k=-2", key="algo.sampling.top_k", value=-2)


def test_a_setting_that_came_later_is_what_runs_did_before():
    saved, given = {"algo": {"lr": 1}}, {"algo": {"lr": 1, "minibatches": 1}}
    assert differences(saved, given) == []
    given["algo"]["minibatches"] = 2
    assert differences(saved, given) == ["algo.minibatches was 1, is 2"]


def test_a_removed_setting_is_ignored_when_off():
    ended = {"text": None, "tokens": 16}
    saved = {"lr": 1, "curriculum": False, "length_cosine": 0.0, "max_update": None}
    assert differences({"algo": saved | {"forced_end": ended}}, {"algo": {"lr": 1}}) == []
    for key, value in {"curriculum": True, "length_cosine": 0.5, "max_update": 0.1}.items():
        found = differences({"algo": saved | {key: value}}, {"algo": {"lr": 1}})
        assert [text.split(",")[0] for text in found] == [f"algo.{key} was {value!r}"]
    saved["forced_end"] = ended | {"text": "So: "}
    found = differences({"algo": saved}, {"algo": {"lr": 1}})
    assert [text.split(",")[0] for text in found] == ["algo.forced_end.text was 'So: '"]


def test_a_setting_that_was_taken_out_is_an_error():
    for given in ("length_cosine=0.1", "curriculum=true", "forced_end.text=So"):
        with pytest.raises(ConfigError, match=r"is not a setting"):
            compose(["algo=grpo", f"algo.{given}"])
    with pytest.raises(ConfigError, match=r"is not a setting"):
        compose(["algo.max_update=0.1"])
