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


MISTAKES = {
    "algo.sgima=1": (
        "algo.sgima=1 is not a setting. Did you mean 'sigma'? Settings here: steps, epochs,"
        " prompts_per_step, patience, name, method, members, samples_per_prompt, rollout_rows,"
        " rank, sigma, lr, mirrored, noise_reuse, fitness, sample_quantile, noise, optimizer,"
        " lr_schedule, sigma_schedule, weight_decay, max_drift, stop_at, sampling."
    ),
    "+algo.lrr=3": (
        "algo.lrr=3 is not a setting. Did you mean 'lr'? Settings here: steps, epochs,"
        " prompts_per_step, patience, name, method, members, samples_per_prompt, rollout_rows,"
        " rank, sigma, lr, mirrored, noise_reuse, fitness, sample_quantile, noise, optimizer,"
        " lr_schedule, sigma_schedule, weight_decay, max_drift, stop_at, sampling."
    ),
    "engine.cuda_graph=false": (
        "engine.cuda_graph=false is not a setting. Did you mean 'cuda_graphs'? Settings here:"
        " cuda_graphs."
    ),
    "sede=1": (
        "sede=1 is not a setting. Did you mean 'seed'? Settings here: seed, resume, plan, probe,"
        " budget, prompts, evaluate, keep, completions, checkpoint, scoring, not_finite, hardware,"
        " model, opt, tracker, slurm, engine, algo, task."
    ),
    "algo.sigma=high": "algo.sigma=high is not a number. Give one above 0, or auto.",
    "algo.weight_decay=high": ("algo.weight_decay=high is not a number. Give one."),
    "algo.steps=1.5": ("algo.steps=1.5 is not a whole number. Give one."),
    "algo.mirrored=maybe": ("algo.mirrored=maybe is neither true nor false. Give one of them."),
    "seed=null": "seed=null: the setting needs a value. Give one, or leave it out.",
    "slurm.setup=module": "slurm.setup=module is not a list. Use 'slurm.setup=[module]'.",
    "slurm.options=3": "slurm.options=3 is not a dict. Use 'slurm.options={NAME: VALUE}'.",
    "algo.optimizer=AdamW": (
        "algo.optimizer=AdamW: algo.optimizer is a group of settings. Set them one by one, such as "
        "algo.optimizer.name=VALUE. Settings there: name, kwargs."
    ),
    "slurm.options.qos=long": (
        "slurm.options.qos=long has no effect without slurm.script, the batch script to write. Add "
        "slurm.script=FILE."
    ),
    "scoring.workers=3": (
        "scoring.workers=3 has no effect with scoring.kind=serial: this process scores. Add "
        "scoring.kind=threads or processes, or leave it out."
    ),
    "scoring.timeout_seconds=5": (
        "scoring.timeout_seconds=5 has no effect with scoring.kind=serial: this process scores."
        " Add scoring.kind=threads or processes, or leave it out."
    ),
    "experiment=null": "experiment=null is the default. Leave it out.",
    "resume=true": "resume=true names no run. Give auto, no or a run folder.",
    "hardware.memory_gb=-1": "hardware.memory_gb=-1 is out of range. Give a value above 0.",
    "hardware.peak_tflops.bf16=0": (
        "hardware.peak_tflops.bf16=0 is out of range. Give a value above 0."
    ),
    "opt=[amp,cmpile]": (
        "opt=cmpile is not a choice. Did you mean 'compile'? Choices: amp, checkpointing,"
        " compile, ddp, deterministic, fsdp, offload, profile, tf32."
    ),
    "opt=null": "opt=null is not a list. Use opt=[] for none, or for example 'opt=[amp,compile]'.",
    "opt.amp.dtype=float16": (
        "opt.amp.dtype=float16 has no effect: amp is off. Add it: 'opt=[amp,...]'."
    ),
    "hardware=a100": (
        "hardware=a100 is not a choice. Did you mean 'v100'? Choices: a100_40g, a100_80g, auto,"
        " cpu, h100, h200, rtx4090, v100."
    ),
    "algo=egroll": (
        "algo=egroll is not a choice. Did you mean 'eggroll'? Choices: classify, eggroll, grpo,"
        " predict, rft, scaling, sft."
    ),
    "algo.members=3": (
        "algo.members=3 is odd, and algo.mirrored=true needs pairs. Use algo.members=4, or "
        "algo.mirrored=false."
    ),
    "algo.fitness=zscor": (
        "algo.fitness=zscor is not a choice. Did you mean 'zscore'? Choices: zscore,"
        " prompt_zscore, component_zscore, centered, centered_rank, pair_sign."
    ),
    "algo.sigma=-1": "algo.sigma=-1 is out of range. Give a value above 0.",
    "algo.samples_per_prompt=2": (
        "algo.samples_per_prompt=2 has no effect at algo.sampling.temperature=0: they would be"
        " equal. Set a temperature above 0."
    ),
    "model=hf": (
        "model.path is not set. Give a hub id or a local folder, for example model=hf "
        "model.path=HuggingFaceTB/SmolLM2-135M, or use model=tiny."
    ),
    "model.path=gpt2": (
        "model.path='gpt2' has no effect with model=tiny, which is built here. Use model=hf."
    ),
    "hardware=4090": (
        "hardware=4090 is not a choice. Did you mean 'rtx4090'? Choices: a100_40g, a100_80g,"
        " auto, cpu, h100, h200, rtx4090, v100."
    ),
    "opt=[3]": (
        "opt=3 is not a choice. Choices: amp, checkpointing, compile, ddp,"
        " deterministic, fsdp, offload, profile, tf32."
    ),
    "algo.optimizer.kwargs={lr: 5}": "algo.optimizer.kwargs.lr=5 has no effect. Use algo.lr.",
    "algo.lr_schedule.kind=linear": (
        "algo.lr_schedule.kind=linear has no effect with algo.lr_schedule.end=1: it goes from 1 to"
        " another end. Set both, or leave both out."
    ),
    "algo.sigma_schedule={kind: exponential, end: 0}": (
        "algo.sigma_schedule.end=0 is out of range. Give a value above 0."
    ),
    "algo.sampling={temperature: 0, top_k: 3}": (
        "algo.sampling.top_p, top_k and min_p have no effect at algo.sampling.temperature=0"
        " (greedy). Set a temperature above 0, or leave them out."
    ),
    "+tracker.mode=offline": (
        "tracker.mode='offline' has no effect with tracker=jsonl. Use tracker=wandb."
    ),
}


def test_a_wide_head_is_not_multiplied_in_tf32():
    with pytest.raises(ConfigError, match=r"opt\.amp\.head=float32 does not go with opt=tf32"):
        compose(["algo=grpo", "opt=[amp,tf32]", "opt.amp.head=float32"])


@pytest.mark.parametrize("override", MISTAKES)
def test_mistakes_are_worded(override):
    with pytest.raises(ConfigError) as caught:
        compose([override])
    assert str(caught.value) == MISTAKES[override]


def test_a_list_in_place_of_a_dict_is_worded():
    with pytest.raises(ConfigError, match=r"^task\.format=\[1\] is not a dict\. Use"):
        compose(["task=custom", "task.format=[1]"])


def test_a_wrong_environment_variable_is_named_alone(monkeypatch):
    monkeypatch.setenv("MICRO_BATCH_SIZE", "x")
    with pytest.raises(ConfigError, match=r"^the environment variable MICRO_BATCH_SIZE='x' is no"):
        compose(["algo=rft"])


def test_samples_of_eggroll_that_would_be_equal_are_refused():
    several = ["algo.samples_per_prompt=2", "algo.sampling.temperature=1"]
    assert compose(several).algo.samples_per_prompt == 2
    for key in ("top_k", "min_p"):
        with pytest.raises(ConfigError, match=rf"{key}=1 makes all samples of a prompt equal"):
            compose([*several, f"algo.sampling.{key}=1"])


def test_an_opt_of_ones_own_is_a_choice(tmp_path):
    (tmp_path / "opt").mkdir()
    (tmp_path / "opt" / "half.yaml").write_text("amp: {enabled: true}\n")
    assert compose(["opt=[half]"], str(tmp_path)).opt.amp.enabled
    with pytest.raises(ConfigError, match=r"opt=hlf is not a choice. Did you mean 'half'"):
        compose(["opt=[hlf]"], str(tmp_path))


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
    ("name", "text", "complaint"),
    [
        ("USE_AMP", "maybe", "='maybe' is neither true nor false. Give one of them, or unset it."),
        ("USE_TF32", "2", "='2' is neither true nor false"),
        ("COMPILE_MODEL", "reduce-overhead", "is neither true nor false"),
        ("PARALLEL_REWARDS", "4", "is neither true nor false"),
        ("AMP_DTYPE", "half", "is not a choice. Choices: auto, bfloat16, float16. Or unset it."),
        ("NUM_WORKERS", "-1", "='-1' is not a number. Unset it."),
    ],
)
def test_an_environment_variable_that_cannot_be_read(monkeypatch, name, text, complaint):
    for other in ("USE_AMP", "PARALLEL_REWARDS"):
        monkeypatch.setenv(other, "true")
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError) as caught:
        compose(["algo=grpo"])
    assert f"the environment variable {name}" in str(caught.value)
    assert complaint in str(caught.value)
    compose(["algo=rft"])  # which does not read it


@pytest.mark.parametrize(("group", "given"), [("opt", "opt=[16]"), ("hardware", "hardware=16")])
def test_a_file_of_ones_own_whose_name_is_a_number(tmp_path, group, given):
    (tmp_path / group).mkdir()
    (tmp_path / group / "16.yaml").write_text("{}")
    with pytest.raises(ConfigError, match=r"takes 16 for a number\. Give the file a name"):
        compose([given], str(tmp_path))


def test_schedules():
    def factors(kind, end):
        return [round(ScheduleConfig(kind=kind, end=end).factor(step / 4), 4) for step in range(5)]

    assert factors("constant", 1.0) == [1, 1, 1, 1, 1]
    assert factors("linear", 0.0) == [1, 0.75, 0.5, 0.25, 0]
    assert factors("cosine", 0.0) == [1, 0.8536, 0.5, 0.1464, 0]
    assert factors("exponential", 0.0625) == [1, 0.5, 0.25, 0.125, 0.0625]
    with pytest.raises(ConfigError, match=r"^algo\.lr_schedule\.kind=constant has no effect"):
        build(ScheduleConfig, {"kind": "constant", "end": 0.5}, "algo.lr_schedule")


def test_values_as_other_trainers_write_them():
    run = compose(["algo=grpo", "algo.sampling.top_k=-1", "algo.warmup_steps=0.1"])
    assert (run.algo.sampling.top_k, run.algo.warmup_steps) == (0, 0.1)
    targets = "model.adapter.targets=[q_proj,v_proj]"
    run = compose(["algo=grpo", "model=hf", "model.path=x", "model.adapter.rank=4", targets])
    assert run.model.adapter.targets == "q_proj,v_proj"
    with pytest.raises(ConfigError, match=r"algo\.sampling\.top_k=-2 is too small"):
        compose(["algo=grpo", "algo.sampling.top_k=-2"])


def test_a_setting_that_came_later_is_what_runs_did_before():
    saved, given = {"algo": {"lr": 1}}, {"algo": {"lr": 1, "minibatches": 1}}
    assert differences(saved, given) == []
    given["algo"]["minibatches"] = 2
    assert differences(saved, given) == ["algo.minibatches was 1, is 2"]


def test_a_setting_that_was_taken_out_is_ignored_if_it_was_off():
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
