"""python -m common.export: what it writes, as transformers and llama.cpp read it."""

import importlib.util
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers import decoders as token_decoders
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from common.config import ModelConfig
from common.model import byte_tokenizer, load_model
from plugins.gguf import command
from tests.support.models import SIZES, small_model

pytest.importorskip("gguf")
pytest.importorskip("accelerate")
TEXTS = ["two plus 12 is 14.", "the sea, the sky", "It's naïve — 2024 😀\n\n  x", "a" * 40]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LLAMA3 = LINEAR | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
SMALL = SIZES | {"hidden_size": 64, "intermediate_size": 96}


def make_tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    """A byte-level BPE that splits texts as SmolLM2's does, with merges of a few words."""
    tokenizer = Tokenizer(models.BPE(**options))
    digits = pre_tokenizers.Digits(individual_digits=True)
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, split])
    tokenizer.decoder = token_decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the sea the sky two plus twelve is fourteen"] * 9, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=TEMPLATE,
    )


def make_model(kind: str, **changes: Any) -> Any:
    """A random model whose weights float16 holds exactly."""
    sizes = SMALL | {"tie_word_embeddings": kind != "llama", "vocab_size": 320} | changes
    with torch.random.fork_rng():
        torch.manual_seed(0)
        ends = {"bos_token_id": 1, "eos_token_id": 2}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **ends))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.add(torch.randn_like(parameter) * 0.15).half())
    return model.eval()


@pytest.fixture
def run(tmp_path):
    """Writes a run folder with a model in it."""

    def write(model: Any, tokenizer: Any, name: str = "model") -> Path:
        folder = tmp_path / "mine"
        (folder / name).mkdir(parents=True)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        (folder / "run.yaml").write_text(
            "config: {algo: {name: grpo}, task: {name: units}, model: {name: hf}}\n"
        )
        (folder / "result.json").write_text("{}")
        return folder

    return write


@pytest.fixture
def export(capsys, monkeypatch):
    """Runs the command in this process; returns what it printed."""

    def call(*arguments: Any, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["export", *map(str, arguments)])
        if code == 0:
            assert command.main() == 0
        else:
            with pytest.raises(SystemExit) as end:
                command.main()
            assert end.value.code == code
        printed = capsys.readouterr()
        return printed.out + printed.err

    return call


def read_back(path: Path) -> tuple[Any, Any]:
    options = {"revision": None, "attention": "sdpa", "gguf_file": path.name}
    config = ModelConfig(name="gguf", path=str(path.parent), **options)
    return load_model(config, None, torch.float32, torch.device("cpu"), progress=False)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 43).view(2, 20)).logits


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("stored", "far"), [("f32", 1e-5), ("f16", 1e-5), ("q8_0", 0.05)])
def test_a_model_is_read_back(kind, stored, far, run, export):
    # transformers reads no other size of Qwen3's heads
    changes = {"head_dim": 128} if kind == "qwen3" else {}
    model, tokenizer = make_model(kind, **changes), make_tokenizer()
    folder = run(model, tokenizer)
    assert f"model-{stored}.gguf" in export(folder, "--gguf", stored)
    back, words = read_back(folder / f"model-{stored}.gguf")
    wanted = logits(model)
    assert (logits(back) - wanted).abs().max() <= far * wanted.abs().max()
    for text in TEXTS:
        assert words(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert (words.eos_token, words.bos_token) == ("<|im_end|>", "<|im_start|>")
    assert words.chat_template == TEMPLATE
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["model", "run.yaml", "result.json", f"model-{stored}.gguf"]
    )


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_an_adapter_is_merged(run, export, tmp_path):
    peft = pytest.importorskip("peft")
    base, tokenizer = make_model("llama"), make_tokenizer()
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    base.name_or_path = str(tmp_path / "base")
    adapted = peft.get_peft_model(
        base, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    wanted = logits(adapted.eval())
    folder = run(adapted, tokenizer, "adapter")
    export(folder, "--gguf", "f32", "--out", tmp_path / "m.gguf")
    assert torch.allclose(logits(read_back(tmp_path / "m.gguf")[0]), wanted, atol=1e-4)


def test_bytes_of_the_tiny_model_are_refused(run, export):
    model = small_model("llama", vocabulary=258)
    said = export(run(model, byte_tokenizer()), "--gguf", "f16", code=2)
    assert "model=tiny" in said
    assert "convert_hf_to_gguf.py" in said


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("gpt2", {}, "gpt2"),
        ("mistral", {}, "mistral"),
        ("llama", {"hidden_act": "gelu"}, "gelu"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, "sliding"),
        (
            "qwen3",
            {"rope_parameters": LINEAR},
            "linear",
        ),
    ],
)
def test_other_architectures_name_the_converter(kind, changes, reason, run, export):
    model = small_model("gpt2", 320) if kind == "gpt2" else make_model(kind, **changes)
    folder = run(model, make_tokenizer())
    said = export(folder, "--gguf", "q8_0", code=2)
    assert reason in said
    assert f"convert_hf_to_gguf.py {folder / 'model'} --outtype q8_0" in said
    assert not list(folder.glob("*.gguf*"))


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
    ],
)
def test_tokenizers_without_a_name_in_llama_cpp_are_refused(change, run, export):
    folder = run(make_model("llama"), make_tokenizer())
    path = folder / "model" / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert "tokenizer" in export(folder, "--gguf", "f16", code=2)


def test_numbers_too_large_for_float16(run, export):
    model = make_model("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = 1e5
    folder = run(model, make_tokenizer())
    assert "float16" in export(folder, "--gguf", "f16", code=2)
    assert not list(folder.glob("*gguf*"))
    export(folder, "--gguf", "f32")


def test_mistakes_are_explained(run, export, tmp_path, monkeypatch):
    assert "no run folder" in export(tmp_path, "--gguf", "f16", code=2)
    folder = run(make_model("llama"), make_tokenizer())
    assert "is a folder" in export(folder, "--gguf", "f16", "--out", tmp_path, code=2)
    (folder / "result.json").unlink()
    assert "resume=auto" in export(folder, "--gguf", "f16", code=2)
    assert "model-f16.gguf" in export(folder / "model", "--gguf", "f16")  # RUN/model itself
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install -e '.[gguf]'" in export(folder / "model", "--gguf", "f16", code=2)


needs_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None, reason="needs llama.cpp"
)


class Llama:
    """llama.cpp's server on a GGUF file, on one thread, with keys and values in float32."""

    def __init__(self, path: Path, hidden: Sequence[int] = ()) -> None:
        import xllamacpp  # pyright: ignore[reportMissingImports]

        given = xllamacpp.CommonParams()
        given.model.path = str(path)
        given.n_ctx, given.n_parallel, given.warmup, given.verbosity = 512, 1, False, -1
        given.cpuparams.n_threads = given.cpuparams_batch.n_threads = 1
        given.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        given.cache_type_k = given.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        self.server = xllamacpp.Server(given)
        self.biases = [[one, False] for one in hidden]

    def answer(self, text: str, length: int) -> list[dict[str, Any]]:
        """The tokens of 32 greedy steps, each with the log-probabilities of the first 20."""
        asked = {"prompt": text, "max_tokens": 32, "temperature": 0.0, "logprobs": 20}
        asked |= {"cache_prompt": False, "logit_bias": self.biases}
        answer = self.server.handle_completions(asked)
        assert answer["usage"]["prompt_tokens"] == length
        return answer["choices"][0]["logprobs"]["content"]


def hide(model: Any, tokenizer: Any) -> list[int]:
    """The tokens that are no plain character: the server shows none that ends within one."""
    shown = tokenizer.convert_tokens_to_ids([*"abcdefghijklmnopqrstuvwxyz0123456789.,:"])
    return sorted(set(range(model.config.vocab_size)) - set(shown))


@pytest.mark.run
@needs_llama_cpp
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", {"rope_parameters": LINEAR}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_llama_cpp_answers_alike(kind, changes, run, export):
    """32 greedy tokens; in float32, since random weights leave the first two close together."""
    model, tokenizer = make_model(kind, **changes), make_tokenizer()
    hidden = hide(model, tokenizer)
    model.generation_config.suppress_tokens = hidden
    folder = run(model, tokenizer)
    export(folder, "--gguf", "f32")
    server = Llama(folder / "model-f32.gguf", hidden)
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        ours = model.generate(ids, max_new_tokens=32, do_sample=False)[0, ids.shape[1] :].tolist()
        assert [one["id"] for one in server.answer(text, ids.shape[1])] == ours


def round_input(module: Any, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """The input of a matrix product as llama.cpp rounds it if the matrix is stored as Q8_0: each
    block of 32 numbers to multiples of a 127th of its largest one, which is kept as float16.
    """
    blocks = given[0].unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    whole = torch.where(largest > 0, blocks * (127 / largest), 0.0).round()  # halves to even
    return ((whole * (largest / 127).half().float()).flatten(-2),)


def find_distance(model: Any, tokenizer: Any, server: Llama) -> float:
    """The median distance of the log-probabilities after llama.cpp's own tokens."""
    far = []
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        said = server.answer(text, ids.shape[1])
        whole = torch.cat([ids, torch.tensor([[one["id"] for one in said[:-1]]])], 1)
        with torch.no_grad():
            logprobs = model(whole).logits[0, ids.shape[1] - 1 :].log_softmax(-1)
        far += [
            abs(logprobs[place, other["id"]].item() - other["logprob"])
            for place, one in enumerate(said)
            for other in one["top_logprobs"]
        ]
    return statistics.median(far)


@pytest.mark.run
@needs_llama_cpp
@pytest.mark.parametrize(
    ("kind", "changes"), [("llama", {}), ("qwen2", {}), ("qwen3", {"head_dim": 128})]
)
def test_llama_cpp_rounds_inputs_too(kind, changes, run, export):
    """Q8_0: what differs from the model that is read back is the rounding of inputs."""
    model, tokenizer = make_model(kind, **changes), make_tokenizer()
    folder = run(model, tokenizer)
    export(folder, "--gguf", "q8_0")
    back, words = read_back(folder / "model-q8_0.gguf")
    server = Llama(folder / "model-q8_0.gguf", hide(model, tokenizer))
    plain = find_distance(back, words, server)
    for module in back.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(round_input)
    assert find_distance(back, words, server) < plain / 100
