"""common.chat: a model tried from the command line; models of a hub and LoRA adapters, which it
loads as runs do.
"""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.config import ADAPTER, ConfigError, ModelConfig
from common.model import byte_tokenizer, load_model, merge_folder, model_commit
from common.model.adapter import peft_of_today
from plugins.chat import command as chat
from tests.support import ROOT
from tests.support.models import small_model

CPU = torch.device("cpu")
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A random model with the byte tokenizer."""
    found = tmp_path_factory.mktemp("model")
    model, tokenizer = small_model("llama", 258), byte_tokenizer()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(found)
    tokenizer.save_pretrained(found)
    return found


@pytest.fixture
def run_folder(folder, tmp_path) -> Path:
    """A run folder as a task with few-shot conversations leaves it."""
    run = tmp_path / "run"
    shutil.copytree(folder, run / "model")
    write_settings(run)
    (run / "result.json").write_text('{"algo": "grpo"}')
    (run / "completions").mkdir()
    turns = [("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "c")]
    row = {"id": 0, "prompt": [{"role": role, "content": text} for role, text in turns]}
    (run / "completions" / "after.jsonl").write_text(json.dumps(row) + "\n")
    return run


def write_settings(run: Path, **task: str) -> None:
    """Write run.yaml with these settings of the task."""
    config = {"algo": {"name": "grpo"}, "task": task}
    (run / "run.yaml").write_text(json.dumps({"config": config}))


def talk(monkeypatch, capsys, *arguments: str, code: int = 0) -> tuple[str, str]:
    monkeypatch.setattr(sys, "argv", ["chat", *map(str, arguments)])
    assert chat.main() == code
    return capsys.readouterr()


def test_one_prompt_is_what_generate_makes_of_it(folder, monkeypatch, capsys):
    shown, _ = talk(
        monkeypatch,
        capsys,
        folder,
        "--prompt",
        "ab",
        "--temperature",
        "0",
        "--max-new-tokens",
        "12",
        "--device",
        "cpu",
    )
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    ids = tokenizer("ab", return_tensors="pt")["input_ids"]
    expected = model.generate(
        ids, max_new_tokens=12, do_sample=False, pad_token_id=256, eos_token_id=257
    )[0, 2:]
    assert shown == tokenizer.decode(expected, skip_special_tokens=True).strip() + "\n"


@pytest.fixture
def asked(folder, warm, tmp_path):
    """Run the command with bytes as standard input; returns exit code, errors and output."""

    def run(given: bytes):
        (tmp_path / "stdin").write_bytes(given)
        arguments = [str(folder), "--max-new-tokens", "4", "--temperature", "0"]
        files = {"module": "common.chat", "stdin": str(tmp_path / "stdin")}
        process = warm.start(ROOT, dict(os.environ), tmp_path, arguments=arguments, **files)
        out, err = process.communicate()
        return process.returncode, err, out

    return run


def test_lines_of_a_file(asked):
    code, err, out = asked(b"ab\n\nab\n")
    assert (code, err) == (0, "")
    half = len(out) // 2
    assert out
    assert out[:half] == out[half:]  # the blank line is no prompt


def test_the_help_says_what_becomes_of_blank_lines():
    assert "lines of standard input, blank ones skipped" in " ".join(
        chat.parser().format_help().split()
    )


def test_bytes_that_are_no_text(asked):
    code, err, _ = asked(b"ab\n\xff\n")
    assert code == 2
    assert (
        err == "error: line 2 of standard input is not UTF-8. Convert it, for example with"
        " iconv -f LATIN1 -t UTF-8.\n"
    )


@pytest.mark.run
@pytest.mark.thorough
def test_a_pipe_whose_reader_leaves(folder):
    call = [
        sys.executable,
        "-m",
        "common.chat",
        str(folder),
        "--max-new-tokens",
        "4",
        "--temperature",
        "0",
    ]
    process = subprocess.Popen(
        call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    process.stdout.close()
    process.stdin.write(b"ab\n" * 20)
    process.stdin.close()
    assert (process.stderr.read(), process.wait(60)) == (b"", 0)
    process.stderr.close()


def test_the_template_of_a_run_is_filled_in(run_folder):
    for template, parts in {
        "Q: {question}\\nA {{x}}:": ("Q: ", "\\nA {x}:"),
        "{question}": ("", ""),
        "{a} and {b}": None,
    }.items():
        write_settings(run_folder, name="custom", template=template)
        assert chat.template_of(str(run_folder), None) == parts
        asked = [{"role": "user", "content": "Q: 1\\nA {x}:"}]
        assert chat.template_of(str(run_folder), asked) == parts
    write_settings(run_folder, template="{question}:")
    bare = [{"role": "user", "content": "7 km in m"}]  # in a conversation task=units has none
    assert chat.template_of(str(run_folder), bare) is None
    write_settings(run_folder)
    assert chat.template_of(str(run_folder), None) is None
    # Braces of other tasks are text; and a run from Python may have a task that run.yaml has not.
    write_settings(run_folder, template="Put { in \\boxed{}. {question}")
    before = "Put { in \\boxed{}. "
    assert chat.template_of(str(run_folder), before + "7 km") == (before, "")
    write_settings(run_folder, template="{source} =>")
    assert chat.template_of(str(run_folder), "moon") is None
    assert chat.template_of(str(run_folder), "moon =>") == ("", " =>")


def test_the_attention_of_a_run_is_used(run_folder, monkeypatch, capsys):
    """A model whose attention is eager alone, such as Gemma 2, has no other."""
    config = {"algo": {"name": "eggroll"}, "task": {}, "model": {"attention": "eager"}}
    (run_folder / "run.yaml").write_text(json.dumps({"config": config}))
    asked, load = [], chat.load_model

    def note(config, *arguments, **more):
        asked.append(config.attention)
        return load(config, *arguments, **more)

    monkeypatch.setattr(chat, "load_model", note)
    talk(monkeypatch, capsys, run_folder, "--prompt", "ab", "--max-new-tokens", "2")
    assert asked == ["eager"]


def test_a_terminal_has_a_prompt_and_ends_with_ctrl_d(folder, warm, tmp_path):
    ours, theirs = pty.openpty()
    terminal = dict.fromkeys(("stdin", "stdout", "stderr"), os.ttyname(theirs))
    arguments = [str(folder), "--max-new-tokens", "2"]
    process = warm.start(
        ROOT, dict(os.environ), tmp_path, arguments=arguments, module="common.chat", **terminal
    )
    seen = b""
    while b"> " not in seen:
        seen += os.read(ours, 1000)
    os.write(ours, b"hello\n")
    while seen.count(b"> ") < 2:
        seen += os.read(ours, 1000)
    os.write(ours, b"\x04")
    process.communicate(60)
    assert process.returncode == 0
    os.close(ours)
    os.close(theirs)
    assert b"prompts go in as plain text, each alone. Ctrl-D ends." in seen


def test_prompts_take_the_form_of_the_runs(run_folder):
    path, _, shown = chat.model_of(str(run_folder))
    assert path == str(run_folder / "model")
    made = chat.prompt_like("new", shown, None, True)
    assert [m["content"] for m in made] == ["Be brief.", "a", "b", "new"]
    assert [m["content"] for m in chat.prompt_like("new", shown, "Other.", True)] == [
        "Other.",
        "a",
        "b",
        "new",
    ]
    assert chat.prompt_like("new", shown, None, False) == "new"


def test_a_chat_template_is_used(folder, tmp_path, monkeypatch, capsys):
    model = tmp_path / "chatty"
    shutil.copytree(folder, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    own = ["--temperature", "0", "--max-new-tokens", "8"]
    through, _ = talk(monkeypatch, capsys, model, "--prompt", "ab", *own)
    spelled, _ = talk(
        monkeypatch, capsys, model, "--plain", "--prompt", "[user]ab[assistant]", *own
    )
    bare, _ = talk(monkeypatch, capsys, model, "--plain", "--prompt", "ab", *own)
    assert through == spelled != bare


def test_template_tokens_unknown_to_the_model(folder, tmp_path, monkeypatch, capsys):
    """As of a model that tokens of a chat were added to, and no rows for these."""
    model = tmp_path / "chatty"
    shutil.copytree(folder, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<{i}>" for i in range(99)]})
    tokenizer.split_special_tokens = False
    tokenizer.chat_template = TEMPLATE.replace("[assistant]", "<98>")
    tokenizer.save_pretrained(model)
    _, error = talk(monkeypatch, capsys, model, "--prompt", "ab", code=2)
    assert "the prompt holds '<98>', which the model has no embedding of" in error


@pytest.mark.parametrize(
    ("break_it", "arguments", "text"),
    [
        (
            lambda run: shutil.rmtree(run / "model"),
            [],
            "has no model/ yet: the run has not ended. Go on with it",
        ),
        (
            lambda run: (run / "model" / "config.json").write_text('{"size": 128}'),
            [],
            "holds a classifier",
        ),
        (
            lambda run: (run / "scaling.json").write_text("{}"),
            [],
            "has trained no model: it has measured scaling.json.",
        ),
        (lambda run: None, ["--temperature", "-1"], "sampling.temperature=-1 is too small"),
        (
            lambda run: None,
            ["--prompt", "x" * 500],
            "fills the model's context of 128. Shorten it.",
        ),
        (lambda run: None, ["--plain", "--system", "x"], "--system has no effect with --plain"),
        (lambda run: None, ["--play", "0", "--prompt", "x"], "--prompt has no effect with --play"),
        (
            lambda run: None,
            ["--adapter", "nowhere"],
            "--adapter='nowhere' is not a folder with a LoRA adapter",
        ),
    ],
)
def test_mistakes_are_worded(run_folder, monkeypatch, capsys, break_it, arguments, text):
    break_it(run_folder)
    _, error = talk(monkeypatch, capsys, run_folder, *arguments, code=2)
    assert error.startswith("error: ")
    assert text in error
    assert "Traceback" not in error


# --- adapters


@pytest.fixture
def adapter(folder, tmp_path) -> Path:
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        settings = peft.LoraConfig(
            r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False
        )
        with peft_of_today():
            made = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), settings)
    made.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def config(path, **changes) -> ModelConfig:
    values = {"revision": None, "gguf_file": None, "attention": "sdpa"} | changes
    return ModelConfig(name="hf", path=str(path), **values)


def test_an_adapter_is_merged(folder, adapter):
    import peft

    model, _ = load_model(config(folder), None, torch.float32, CPU)
    model = merge_folder(model, str(adapter), "it", "--adapter")
    with peft_of_today():
        wanted = peft.PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(folder), adapter
        )
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, wanted(ids).logits, atol=1e-5)
        assert not torch.allclose(
            model(ids).logits, AutoModelForCausalLM.from_pretrained(folder)(ids).logits, atol=1e-3
        )
    assert {type(m).__module__.split(".")[0] for m in model.modules()} <= {
        "transformers",
        "torch",
    }  # it is plain again


def test_adapters_that_do_not_fit(folder, adapter, tmp_path):
    def wording(path) -> str:
        def load() -> None:
            model, _ = load_model(config(path), None, torch.float32, CPU)
            merge_folder(model, str(adapter), "the model", "model.adapter.path")

        with pytest.raises(ConfigError) as caught:
            load()
        return str(caught.value)

    assert "is an adapter and no model. Give the model that it belongs to" in wording(adapter)
    other = tmp_path / "other"
    small_model("gpt2", 258).save_pretrained(other)
    byte_tokenizer().save_pretrained(other)
    assert "does not go into the model" in wording(other)
    weights = adapter / "adapter_model.safetensors"
    held = load_file(weights)
    name = next(iter(held))
    deeper = {part: held[name].clone() for part in (name.replace("layers.0.", "layers.7."),)}
    assert deeper.keys() - held.keys()
    save_file(held | deeper, weights)
    assert next(iter(deeper)).replace(".default", "") in wording(folder), "named, not dropped"
    save_file(held, weights)
    settings = json.loads((adapter / ADAPTER).read_text())
    for key, value, text in (
        ("peft_type", "IA3", "an adapter of the kind IA3. Give a plain LoRA"),
        ("use_dora", True, "an adapter with use_dora. Give a plain LoRA"),
        ("modules_to_save", ["norm"], "an adapter with modules_to_save"),
        ("bias", "all", "an adapter with bias"),
    ):
        (adapter / ADAPTER).write_text(json.dumps(settings | {key: value}))
        assert text in wording(folder)
    (adapter / ADAPTER).write_text(json.dumps(settings))
    (adapter / "adapter_model.safetensors").write_bytes(b"torn")
    assert "does not go into the model" in wording(folder)


# --- the hub


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def put_on_hub(folder: Path, hub: Path) -> Path:
    """Put a model into the hub's cache as acme/small, as a download leaves it. Returns where its
    commit of today stands.
    """
    repository = hub / "models--acme--small"
    shutil.copytree(folder, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(COMMIT)
    return repository / "refs/main"


@pytest.mark.run
@pytest.mark.thorough
def test_an_adapter_uses_the_commit_of_its_training(folder, launch, tmp_path):
    pytest.importorskip("peft")
    main, cache = put_on_hub(folder, tmp_path / "hub"), {"HF_HUB_CACHE": str(tmp_path / "hub")}
    small = ["algo.members=2", "algo.prompts_per_step=1", "algo.steps=1", "evaluate.examples=2"]
    small += ["algo.sampling.max_new_tokens=4", "algo.sigma=0.01", "algo.lr=0.02", "hardware=cpu"]
    model = ["model=hf", "model.path=acme/small", "model.adapter.rank=2"]
    launch("algo=eggroll", *small, *model, "hydra.run.dir=out", env=cache, fresh=True)
    assert json.loads((tmp_path / "out/adapter" / ADAPTER).read_text())["revision"] == COMMIT
    main.write_text("f" * 40)  # there is another one since, which is not here
    call = [sys.executable, "-m", "common.chat", str(tmp_path / "out"), "--prompt", "ab"]
    environment = os.environ | cache | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(call, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.thorough
def test_the_commit_of_a_model_of_the_hub_is_kept(folder, launch, tmp_path):
    """A model in the hub's cache, as a download leaves it; its commit is printed and stands in
    run.yaml.
    """
    put_on_hub(folder, tmp_path / "hub")
    small = [
        "algo.members=2",
        "algo.prompts_per_step=1",
        "algo.steps=1",
        "algo.sampling.max_new_tokens=4",
    ]
    arguments = [
        "algo=eggroll",
        "algo.sigma=0.01",
        "algo.lr=0.02",
        "hardware=cpu",
        "model=hf",
        "model.path=acme/small",
        *small,
        "evaluate.examples=2",
    ]
    cache = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    done = launch(*arguments, "hydra.run.dir=out", env=cache, fresh=True)
    assert (
        f"model.path='acme/small' is at commit {COMMIT} (model.revision=COMMIT pins it)"
        in done.stdout + done.stderr
    )
    assert re.search(
        rf"^model_commit: ['\"]?{COMMIT}", (tmp_path / "out" / "run.yaml").read_text(), re.MULTILINE
    )
    assert model_commit(replace(config(folder), path=str(folder))) is None
