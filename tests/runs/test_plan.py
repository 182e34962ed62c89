"""plan=true: what a run would take, without making it. Counted peaks are in test_standin.py."""

import re
import subprocess
import sys

import pytest
from transformers import Qwen2Config

from common.config import ConfigError
from common.model.tiny import byte_tokenizer
from launch import compose, train
from tests.support import CONF, ROOT, SMALL, SMALL_GRPO, SMALL_RFT

SIZED = ("memory", "rollout", "training", "forwards", "generate", "fine-tune")


@pytest.fixture(scope="module")
def seven_billion(tmp_path_factory):
    """Return a folder with the shapes of Qwen2.5-7B and a tokenizer, without weights."""
    folder = tmp_path_factory.mktemp("7b")
    Qwen2Config(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def plan(*arguments):
    return train(compose([*arguments, "plan=true"]), "nowhere")


@pytest.mark.parametrize("settings", [SMALL, SMALL_GRPO, SMALL_RFT], ids=["eggroll", "grpo", "rft"])
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


def test_from_the_command_line_it_leaves_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch.py"), "algo=grpo", "hardware=rtx4090", "plan=true"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^device +rtx4090, 24 GB", done.stdout, re.M)
    assert re.search(r"^speed +an estimate, not measured: [0-9,]+ tokens/s", done.stdout, re.M)
    assert re.search(r"^fits +yes: [0-9.]+ of 24 GB", done.stdout, re.M)
    assert not list(tmp_path.rglob("*.*"))


def test_what_would_make_it_fit(seven_billion, capsys):
    """Switches are added by what they cost, until the plan fits."""
    model = ["model=hf", f"model.path={seven_billion}", "algo=eggroll"]
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


def test_a_model_that_nothing_makes_fit(seven_billion, capsys):
    made = plan("algo=grpo", "model=hf", f"model.path={seven_billion}", "hardware=rtx4090")
    assert not made.fits
    assert "opt=fsdp" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["algo=classify"], "plan has no effect with algo=classify"),
        (["algo=grpo", "opt=[fsdp]"], "Leave fsdp out"),
        (["algo=eggroll", "opt=[tf32]", "hardware=v100"], "compute capability 8.0"),
    ],
)
def test_what_has_no_plan(arguments, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        plan(*arguments)
