"""plan=true: what a run would take, without making it. Counted peaks are in test_standin.py."""

import copy
import json
import re
import subprocess
import sys

import pytest
from transformers import Qwen3Config

from common.config import ConfigError, command
from common.device.hardware import find_planned
from common.distributed.context import Context
from common.model.tiny import byte_tokenizer
from common.parts import open_parts
from common.system import exits
from launch import compose, train
from tests.support import CONF, ROOT, SMALL, SMALL_GRPO, SMALL_RFT
from tests.support.models import configure_qwen

SIZED = ("memory", "rollout", "training", "forwards", "generate", "fine-tune")


# What tells Qwen2.5-7B, Qwen2.5-3B and Qwen3-8B apart.
SHAPES = {
    "7b": configure_qwen("7b"),
    "3b": configure_qwen("3b"),
    "8b": Qwen3Config(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        architectures=["Qwen3ForCausalLM"],
    ),
}
# What experiment headers promise for these, with prompts of the length that a byte tokenizer makes.
LARGE = {
    "grpo_lora_7b_80gb": "7b",
    "grpo_lora_7b_24gb": "7b",
    "grpo_lora_3b_24gb": "3b",
    "eggroll_7b_40gb": "7b",
    "rft_lora_8b_40gb": "8b",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a folder for each of `SHAPES`: its shapes and a tokenizer, without weights."""
    folders = {}
    for name, config in SHAPES.items():
        folders[name] = tmp_path_factory.mktemp(name)
        config.save_pretrained(folders[name])
        byte_tokenizer().save_pretrained(folders[name])
    return folders


FEW = ["task.positions=64", "task.test_positions=16"]  # prompts are made, and encoded, each time


def plan(*arguments):
    return train(compose([*arguments, "plan=true"]), "nowhere")


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(SMALL, id="eggroll", marks=pytest.mark.thorough),
        pytest.param(SMALL_GRPO, id="grpo"),
        pytest.param(SMALL_RFT, id="rft", marks=pytest.mark.thorough),
    ],
)
def test_the_plan_of_the_run_itself(settings, tmp_path):
    """Sizes are those that the run prints when it starts on the same device."""
    end = "algo.stage=generate" if settings is SMALL_RFT else "algo.steps=1"
    arguments = [*settings, "model.tiny.pretrain_steps=0", end]
    made = train(compose([*arguments, "plan=true"], CONF), "nowhere")
    train(compose(arguments, CONF), tmp_path)
    log = (tmp_path / "run.log").read_text().splitlines()
    said = [" ".join(line.split()[3:]) for line in log]  # behind the time and the level
    rows = {name: " ".join(text.split()) for name, text in made.rows.items()}
    compared = [name for name in SIZED if name in rows]
    assert len(compared) > 1
    assert [name for name in compared if f"{name} {rows[name]}" not in said] == []


MASKED = "masked (flash: no, {}), steps {}"
RECORDED = "recorded as CUDA graphs"
OWN = "sdpa (its kernel is chosen on the device)"


@pytest.mark.parametrize(
    ("arguments", "sampling", "training"),
    [
        (["hardware=a100_40g", "opt=[amp]"], f"flash, steps {RECORDED}", "flash"),
        (
            ["hardware=a100_40g"],
            MASKED.format("float32", RECORDED),
            f"{OWN}, flash: no, float32",
        ),
        (
            ["hardware=a100_40g", "opt=[amp]", "engine.cuda_graphs=false"],
            MASKED.format("steps are not recorded", "not recorded: engine.cuda_graphs=false"),
            "flash",
        ),
        (
            ["hardware=h100", "opt=[amp,compile]"],
            MASKED.format("opt=compile", RECORDED),
            "flash",
        ),
        (
            ["hardware=v100", "opt=[amp]"],
            MASKED.format("PyTorch has no kernel for the device and these heads", RECORDED),
            f"{OWN}, flash: no, PyTorch has no kernel for the device and these heads",
        ),
        (["hardware=cpu"], None, None),
    ],
)
def test_it_says_which_attention_there_is_and_why_not_another(arguments, sampling, training):
    rows = plan(*SMALL_GRPO, "model.tiny.pretrain_steps=0", *arguments).rows
    said = rows["attention"]
    if sampling is None:
        assert re.fullmatch(r"sdpa \(\w+\)", said)
    else:
        assert said == f"sampling {sampling}; training {training}"


@pytest.mark.thorough
def test_from_the_command_line_it_leaves_nothing(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "launch.py"),
            "algo=grpo",
            "hardware=rtx4090",
            "plan=true",
            *FEW,
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^device +rtx4090, 24 GB", done.stdout, re.M)
    assert re.search(r"^speed +an estimate, not measured: [0-9,]+ tokens/s", done.stdout, re.M)
    assert re.search(r"^fits +yes: [0-9.]+ of 24 GB", done.stdout, re.M)
    assert not list(tmp_path.rglob("*.*"))


def test_an_empty_file_of_somebody_elses_stays(tmp_path):
    folder = tmp_path / "results"
    for name in (".hydra", ".gitkeep", "run.log", ".lock-command"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).mkdir() if name == ".hydra" else (folder / name).touch()
    exits.remove_unused(folder)
    assert [path.name for path in folder.iterdir()] == [".gitkeep"]
    (folder / ".gitkeep").unlink()
    exits.remove_unused(folder)
    assert not folder.exists()


def test_in_the_folder_of_a_run_it_changes_nothing(launch, tmp_path):
    ran = [*SMALL, "algo.steps=1", "hydra.run.dir=run"]
    launch(*ran)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    launch(*ran, "plan=true")
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before
    assert (
        launch(*ran[:-1], "plan=true", "-m", code=2).stderr
        == "error: plan=true plans one run. Leave out -m, and plan the jobs one by one.\n"
    )


@pytest.mark.parametrize("value", ["true", "True", "yes", "1"])
def test_every_word_for_true_asks_for_a_plan(value):
    assert compose([*SMALL, f"plan={value}"]).plan
    assert command.asks_for_plan(["seed=1", f"plan={value}"])
    assert not command.asks_for_plan([f"plan={value}", "plan=false"])


def test_a_plan_leaves_the_run_of_the_caller_alone():
    run = compose([*SMALL, "plan=true"])
    kept = copy.deepcopy(run)
    train(run, "nowhere")
    assert run == kept


@pytest.mark.thorough
def test_planned_rows_fit_extra_tasks(models, tmp_path):
    """Their completions may be much longer than those of the run's own."""
    (tmp_path / "task").mkdir()
    (tmp_path / "task/long.yaml").write_text("defaults: [units, _self_]\nmax_new_tokens: 4096\n")
    given = [
        "algo=grpo",
        "algo.prompts_per_step=32",
        "algo.sampling.max_new_tokens=16",
        "plan=true",
    ]
    given += ["model=hf", f"model.path={models['3b']}", "model.adapter.rank=8"]
    given += ["hardware=rtx4090", "opt=[amp]"]
    rows = []
    for also in ("[]", "[units]", "[long]"):
        made = train(compose([*given, f"evaluate.also={also}"], str(tmp_path)), "nowhere")
        rows += map(int, re.findall(r"(\d+) rows per forward", made.rows["rollout"]))
    config = SHAPES["3b"]
    cache = 4096 * 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * 128
    assert rows[0] == rows[1] == 256
    assert 32 < rows[2] < 24e9 / cache


def test_what_would_make_it_fit(models, capsys):
    """Switches are added by what they cost, until the plan fits."""
    model = ["model=hf", f"model.path={models['7b']}", "algo=eggroll"]
    model += ["algo.noise.matrices=lowrank"]
    made = plan(*model, "hardware=rtx4090")
    assert not made.fits
    shown = capsys.readouterr().out
    assert re.search(r"'opt=\[amp\]': [0-9.]+ GB, does not fit\n", shown)
    last = shown.strip().splitlines()[-1]
    assert re.search(r"'opt=\[amp,offload\]': [0-9.]+ GB, fits$", last), last
    promised = float(re.findall(r"([0-9.]+) GB, fits", last)[0])
    kept = plan(*model, "hardware=rtx4090", "opt=[amp,offload]")
    assert kept.fits
    assert kept.peak_gb == pytest.approx(promised, abs=0.05)


def test_rows_are_fitted_with_the_noise_of_their_own_chunk(models):
    """Fewer rows have fewer members, and these less noise: as many as fit are no fewer than those
    that are asked for.
    """
    model = ["model=hf", f"model.path={models['3b']}", "algo=eggroll", "hardware=rtx4090"]
    model += ["opt=[amp]", "algo.noise.matrices=lowrank", "algo.rank=16", "algo.members=128"]
    asked, fitted = (
        plan(*model, f"algo.rollout_rows={rows}", "algo.sampling.max_new_tokens=64")
        for rows in ("96", "null")
    )
    assert asked.fits
    assert fitted.fits
    rows = [int(re.findall(r"([0-9]+) rows", str(one.rows))[0]) for one in (asked, fitted)]
    assert rows[1] >= rows[0]


def test_an_adapter_makes_it_fit(models, capsys):
    """What an earlier switch did not bring is kept, and offload leaves with the reference model."""
    model = ["model=hf", f"model.path={models['7b']}", "hardware=rtx4090", *FEW]
    assert not plan("algo=grpo", *model).fits
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert re.search(r"'opt=\[amp,checkpointing\]' model.adapter.rank=16: [0-9.]+ GB, fits$", last)


@pytest.mark.thorough
def test_few_bits_make_it_fit(models, capsys):
    model = ["model=hf", f"model.path={models['7b']}", "hardware=rtx4090", "hardware.memory_gb=8"]
    model += FEW
    assert not plan("algo=grpo", *model).fits
    *_, other, last = capsys.readouterr().out.strip().splitlines()
    more = r"'opt=\[amp,checkpointing\]' model.adapter.rank=16 model.quantize="
    assert re.search(more + r"int8: [0-9.]+ GB, does not fit$", other)
    assert re.search(more + r"nf4: [0-9.]+ GB, fits$", last)
    promised = float(re.findall(r"([0-9.]+) GB, fits", last)[0])
    taken = ["opt=[amp,checkpointing]", "model.adapter.rank=16", "model.quantize=nf4"]
    assert plan("algo=grpo", *model, *taken).peak_gb == pytest.approx(promised, abs=0.05)


@pytest.mark.thorough
def test_few_bits_make_a_population_fit(models, capsys):
    """With the adapter the noise is on it, and not on the norms that a run without one has."""
    model = ["model=hf", f"model.path={models['7b']}", "hardware=rtx4090", "hardware.memory_gb=8"]
    assert not plan("algo=eggroll", *model).fits
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert re.search(r"'opt=\[amp\]' model.adapter.rank=16 model.quantize=nf4: .* GB, fits$", last)
    promised = float(re.findall(r"([0-9.]+) GB, fits", last)[0])
    taken = ["opt=[amp]", "model.adapter.rank=16", "model.quantize=nf4"]
    assert plan("algo=eggroll", *model, *taken).peak_gb == pytest.approx(promised, abs=0.05)


@pytest.mark.thorough
def test_a_model_that_nothing_makes_fit(models, capsys):
    model = ["model=hf", f"model.path={models['7b']}", "hardware=rtx4090", "hardware.memory_gb=6"]
    model += FEW
    assert not plan("algo=grpo", *model).fits
    assert "opt=fsdp" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.thorough
def test_ranks_share_out_what_one_cannot_hold(models, capsys):
    """Weights, gradients and state; what is gathered, and activations, each of them has whole."""
    model = ["algo=grpo", "opt=[amp,checkpointing,fsdp]", "model=hf", f"model.path={models['7b']}"]
    model += ["hardware=h100", "algo.sampling.max_new_tokens=64", *FEW]
    alone, two, eight = (plan(*model, f"opt.fsdp.ranks={n}") for n in (1, 2, 8))
    state = 16 * 7.62e9 / 2**30
    assert alone.peak_gb - two.peak_gb == pytest.approx(state / 2, rel=0.15)
    assert two.peak_gb - eight.peak_gb == pytest.approx(state * 3 / 8, rel=0.15)
    assert (alone.fits, two.fits) == (False, True)
    assert "training state" in eight.rows["memory"]
    assert plan(*model).rows["ranks"] == "1 (opt.fsdp.ranks plans more)"
    groups = plan(*model, "opt.fsdp.ranks=8", "opt.fsdp.ranks_per_group=2")
    assert groups.peak_gb == pytest.approx(two.peak_gb, rel=0.02)


def test_a_plan_says_what_it_does_not_go_by():
    made = plan(*SMALL_GRPO, "resume=auto")
    assert made.rows["resume"].startswith("auto changes nothing here")
    other = [text for text in SMALL_GRPO if text != "hardware=cpu"]
    made = plan(*other, "hardware=h100", "hardware.memory_gb=null")
    assert re.match(
        r"this machine \(.*, \d+ GB\), as hardware.memory_gb=null does not say what"
        r" hardware=h100 has",
        made.rows["planned for"],
    )
    assert "planned for" not in plan(*other, "hardware=h100").rows


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.thorough] * (n != "grpo_lora_7b_24gb")) for n in LARGE],
)
def test_experiments_of_large_models_fit_their_card(name, models):
    pytest.importorskip("peft")
    path = f"model.path={models[LARGE[name]]}"
    made = plan(f"experiment={name}", path, "task.chat=false")
    assert made.fits, made
    assert f"{made.memory_gb:.0f}gb" in name
    header = (ROOT / "conf" / "experiment" / f"{name}.yaml").read_text()
    promised = float(re.findall(r"planned, with plan=true: ([0-9.]+) GB", header)[0])
    assert made.peak_gb == pytest.approx(promised, rel=0.05)


@pytest.fixture(scope="module")
def instructed(models, tmp_path_factory):
    """Return a folder of an instruction model: its shapes, and a tokenizer with a template."""
    folder = tmp_path_factory.mktemp("instructed")
    SHAPES["3b"].save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


GIVEN = ["task.path=data.jsonl", "task.prompt_field=question", "task.answer_field=answer"]


@pytest.mark.parametrize(
    ("algo", "task"),
    [
        ("grpo", "units"),
        *(
            pytest.param(algo, task, marks=pytest.mark.thorough)
            for algo, task in (("eggroll", "custom"), ("rft", "units"), ("rft", "custom"))
        ),
    ],
)
def test_a_plan_says_whether_prompts_go_through_a_chat_template(
    task, algo, models, instructed, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"q{i}", "answer": f"a{i}"} for i in range(60)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [f"algo={algo}", f"task={task}", "model=hf", "hardware=a100_80g"]
    given += ["algo.sampling.max_new_tokens=16", *(GIVEN if task == "custom" else [])]
    chatty, plain = "through the chat template", "plain text"
    for folder, chat, said in (
        (instructed, "auto", chatty),
        (instructed, "true", chatty),
        (instructed, "false", plain),
        (models["3b"], "auto", plain),
    ):
        made = plan(*given, f"model.path={folder}", f"task.chat={chat}")
        assert made.rows["prompts"] == said


@pytest.mark.thorough
def test_extra_tasks_use_the_models_prompt_form(instructed, tmp_path):
    given = ["model=hf", f"model.path={instructed}", "evaluate.also=[units]", "algo=grpo"]
    run = compose([*given, "plan=true"])
    (other,) = open_parts(run, Context(0, 1, find_planned(run.hardware), tmp_path)).extras.others
    assert isinstance(other.task.prompt(other.examples[0]), list)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["algo=classify"], "plan=true has no effect with algo=classify"),
        (
            ["algo=grpo", "opt=[fsdp]", "opt.fsdp.cpu_offload=true", "hardware=a100_80g"],
            "does not count what opt.fsdp.cpu_offload=true keeps on the CPU",
        ),
        (
            ["algo=grpo", "opt=[fsdp]", "opt.fsdp.ranks=4", "opt.fsdp.ranks_per_group=3"],
            "opt.fsdp.ranks_per_group=3 does not divide the 4 ranks",
        ),
        (["algo=predict"], "is a plan, or a measurement, itself"),
        (["algo=eggroll", "opt=[amp,offload]", "hardware=cpu"], "opt=offload has no effect"),
        (["algo=eggroll", "opt=[tf32]", "hardware=v100"], "compute capability 8.0"),
        (
            ["algo=eggroll", "model.adapter.rank=4", "engine=vllm", "engine.python=x"],
            "engine=vllm cannot sample from perturbed copies of an adapter",
        ),
    ],
)
def test_what_has_no_plan(arguments, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        plan(*arguments)


@pytest.mark.parametrize("switch", ["ddp", pytest.param("fsdp", marks=pytest.mark.thorough)])
def test_the_plan_of_rft_on_several_ranks(switch):
    settings = [text for text in SMALL_RFT if text != "hardware=cpu"]
    settings += ["hardware=h100", f"opt=[{switch}]", f"opt.{switch}.ranks=2", "plan=true"]
    made = train(compose(settings, CONF), "nowhere")
    assert made.rows["ranks"].startswith("2")
