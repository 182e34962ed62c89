"""Loading, the tiny model and its cache, the byte tokenizer, exports, errors for users."""

import json
import logging
import multiprocessing
import random
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    GPTNeoConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from common.config import ConfigError, ModelConfig, TinyConfig
from common.examples import fit_prompts
from common.memory.plan import describe_template
from common.model import load, tiny
from common.model.export import export_model
from common.model.load import load_model
from common.model.precision_copies import narrow, narrowed
from common.model.prompts import context_length, encode_prompts, stop_ids
from common.model.tiny import byte_tokenizer
from common.task import Example, Messages
from tests.support import ROOT
from tests.support.refusals import refuses

STORIES = ROOT.parent / "shared" / "data" / "stories260k-hf"
needs_stories = pytest.mark.skipif(
    not STORIES.is_dir(), reason=f"needs the real model in {STORIES}"
)
CPU = torch.device("cpu")


class Doubling:
    """A task for the tiny model: write a letter twice."""

    def examples(self, split):
        assert split == "train"
        return list("abcdefgh")

    def pretraining(self, example, draw):
        return f"{example}>", example * draw.choice([2, 2, 3])


class Silent:
    """A task that teaches nothing."""

    def examples(self, split):
        return ["a"]


def tiny_config(**changes):
    values = {"hidden_size": 32, "layers": 1, "heads": 2, "intermediate_size": 32, "context": 16}
    values |= {"pretrain_steps": 4, "pretrain_rows": 8, "pretrain_lr": 3e-3, "pretrain_seed": 0}
    return TinyConfig(**(values | changes))


def tiny_model(**changes):
    return ModelConfig(
        name="tiny",
        path=None,
        revision=None,
        gguf_file=None,
        attention="sdpa",
        tiny=tiny_config(**changes),
    )


def folder_model(path, **changes):
    values = {"revision": None, "gguf_file": None, "attention": "sdpa"} | changes
    return ModelConfig(name="hf", path=str(path), **values)


def get(path, dtype=torch.float32, **changes):
    return load_model(folder_model(path, **changes), None, dtype, CPU, progress=False)


def small_gpt2(**changes):
    values = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 258, "n_positions": 40}
    return GPT2LMHeadModel(
        GPT2Config(**(values | {"bos_token_id": 257, "eos_token_id": 257} | changes))
    )


def small_qwen2(**changes):
    values = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    values |= {
        "intermediate_size": 32,
        "vocab_size": 258,
        "max_position_embeddings": 48,
        "eos_token_id": 257,
    }
    return Qwen2ForCausalLM(Qwen2Config(**(values | changes)))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CLUTCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def gpt2(tmp_path):
    folder = tmp_path / "gpt2"
    export_model(small_gpt2(), byte_tokenizer(), folder)
    return folder


def cached(cache):
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


# --- byte tokenizer


def random_texts(count):
    draw = random.Random(0)
    alphabets = ["ab <>/\n\t ", "\x00\x01\x7f\x80\xa0\xad\xff", "äß€漢字 ️👩‍👧", "<pad><eos>"]
    for _ in range(count):
        kind = draw.randrange(6)
        length = draw.randrange(40)
        if kind < 4:
            yield "".join(draw.choice(alphabets[kind]) for _ in range(length))
        else:
            points = (draw.randrange(0x110000) for _ in range(length))
            yield "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)


def test_byte_tokenizer_is_lossless_and_its_ids_are_the_bytes(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in ["", " ", "  a  ", "<eos>", "don 't .", "\r\n", *random_texts(400)]:
        for candidate in (tokenizer, loaded):
            ids = candidate(text)["input_ids"]
            assert ids == list(text.encode())
            assert candidate.decode(ids, skip_special_tokens=True) == text
    assert (len(loaded), loaded.pad_token_id, loaded.eos_token_id) == (258, 256, 257)


def test_byte_tokenizer_decodes_anything():
    tokenizer = byte_tokenizer()
    assert tokenizer.decode([0xFF, 65, 257], skip_special_tokens=True) == "\ufffdA"
    assert tokenizer.decode([65, 257, 256]) == "A<eos><pad>"
    draw = random.Random(1)
    for _ in range(300):
        ids = [draw.randrange(258) for _ in range(draw.randrange(20))]
        expected = bytes(i for i in ids if i < 256).decode(errors="replace")
        assert tokenizer.decode(ids, skip_special_tokens=True) == expected


# --- tiny


def test_tiny_learns_what_the_task_teaches():
    model, tokenizer = load_model(
        tiny_model(pretrain_steps=80, pretrain_rows=16, pretrain_lr=1e-2),
        Doubling(),
        torch.float32,
        CPU,
        progress=False,
    )
    prompts = encode_prompts(tokenizer, [f"{letter}>" for letter in "abcdefgh"])
    output = model.generate(torch.tensor(prompts), max_new_tokens=5, do_sample=False)[:, 2:]
    answers = [tokenizer.decode(row, skip_special_tokens=True) for row in output]
    assert (
        sum(
            answer in (letter * 2, letter * 3)
            for letter, answer in zip("abcdefgh", answers, strict=True)
        )
        >= 7
    )
    assert not model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert context_length(model) == 16
    assert stop_ids(model, tokenizer) == [257]


def test_tiny_is_a_function_of_its_settings(cache):
    before = torch.get_rng_state()
    first = tiny.tiny_model(tiny_config(), Doubling(), progress=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert cached(cache) == [first.name]
    weights = (first / "model.safetensors").read_bytes()
    cache.rename(cache.with_name("elsewhere"))
    torch.manual_seed(123)
    assert tiny.tiny_model(tiny_config(), Doubling(), progress=False).name == first.name
    assert (first / "model.safetensors").read_bytes() == weights

    other_seed = tiny.tiny_model(tiny_config(pretrain_seed=1), Doubling(), progress=False)
    assert (other_seed / "model.safetensors").read_bytes() != weights

    class Tripling(Doubling):
        def pretraining(self, example, draw):
            return f"{example}>", example * 3

    assert tiny.tiny_model(tiny_config(), Tripling(), progress=False).name != first.name
    assert len(cached(cache)) == 3
    # The same rows, another model or training of it.
    for changes in ({"hidden_size": 16}, {"pretrain_lr": 1e-3}, {"context": 17}):
        assert (
            tiny.tiny_model(tiny_config(**changes), Doubling(), progress=False).name != first.name
        )


def test_where_a_prompt_ends_is_part_of_the_key():
    class Shifted(Doubling):
        def pretraining(self, example, draw):
            prompt, completion = super().pretraining(example, draw)
            return prompt + completion[:1], completion[1:]

    names = {
        tiny.tiny_model(tiny_config(), task, progress=False).name
        for task in (Doubling(), Shifted())
    }
    assert len(names) == 2


def test_tiny_is_built_once(monkeypatch):
    tiny.tiny_model(tiny_config(), Doubling(), progress=False)
    monkeypatch.setattr(tiny, "train_from_scratch", lambda *_: pytest.fail("built again"))
    tiny.tiny_model(tiny_config(), Doubling(), progress=False)


def build_and_count(barrier, counter, names):
    original = tiny.train_from_scratch

    def counting(*arguments):
        with counter.get_lock():
            counter.value += 1
        return original(*arguments)

    tiny.train_from_scratch = counting
    torch.set_num_threads(1)
    barrier.wait()
    names.put(tiny.tiny_model(tiny_config(pretrain_steps=30), Doubling(), progress=False).name)


def in_two_processes():
    fork = multiprocessing.get_context("fork")
    barrier, counter, names = fork.Barrier(2), fork.Value("i", 0), fork.Queue()
    workers = [
        fork.Process(target=build_and_count, args=(barrier, counter, names)) for _ in range(2)
    ]
    for worker in workers:
        worker.start()
    found = {names.get(timeout=120) for _ in workers}
    for worker in workers:
        worker.join()
    return found, counter.value, [worker.exitcode for worker in workers]


def test_two_processes_build_it_once(cache, warm):
    found, built, codes = warm.call(in_two_processes)
    assert codes == [0, 0]
    assert built == 1
    assert cached(cache) == sorted(found)


@pytest.mark.parametrize("damage", ["flipped", "truncated", "half", "no tokenizer"])
def test_a_damaged_cache_is_built_again_with_a_warning(caplog, damage):
    folder = tiny.tiny_model(tiny_config(), Doubling(), progress=False)
    weights = (folder / "model.safetensors").read_bytes()
    if damage == "flipped":
        (folder / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    elif damage == "truncated":
        (folder / "model.safetensors").write_bytes(weights[:100])
    elif damage == "half":
        (folder / "manifest.json").unlink()
    else:
        (folder / "tokenizer.json").unlink()
    caplog.clear()
    assert tiny.tiny_model(tiny_config(), Doubling(), progress=False) == folder
    assert [record.levelno for record in caplog.records if record.name == "clutch"] == [
        logging.WARNING
    ]
    assert str(folder) in caplog.text
    assert (folder / "model.safetensors").read_bytes() == weights


def test_tiny_without_pretraining_needs_no_teacher():
    model, tokenizer = load_model(
        tiny_model(pretrain_steps=0), Silent(), torch.bfloat16, CPU, progress=False
    )
    assert model.dtype == torch.bfloat16
    assert len(tokenizer) == 258


def test_errors_of_tiny(tmp_path, monkeypatch):
    with pytest.raises(
        ConfigError,
        match=r"Silent has no pretraining method.*model=hf model\.path=.*pretrain_steps=0",
    ):
        tiny.tiny_model(tiny_config(), Silent())
    refuses(
        lambda: tiny.tiny_model(tiny_config(context=4), Doubling()),
        key="model.tiny.context",
        value="4",
        try_next="model.tiny.context=6",
    )
    monkeypatch.setattr(Doubling, "examples", lambda self, split: [])
    with pytest.raises(ConfigError, match="Doubling has no training examples"):
        tiny.tiny_model(tiny_config(), Doubling())
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CLUTCH_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match="Set CLUTCH_CACHE to a folder"):
        tiny.tiny_model(tiny_config(pretrain_steps=0), Doubling())


def test_progress_is_plain_lines_without_a_terminal(capsys):
    tiny.tiny_model(tiny_config(), Doubling())
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(
        "model=tiny: teaching a new model of 0.02M parameters the task's form"
    )
    assert "4 steps of 8 rows. This is done once and kept in " in lines[0]
    assert 2 <= len(lines) <= 6
    assert "step 4 of 4, loss" in lines[-1]
    tiny.tiny_model(tiny_config(pretrain_seed=5), Doubling(), progress=False)
    assert capsys.readouterr().err == ""


# --- load and export


@needs_stories
def test_a_real_model_says_what_its_readme_says():
    model, tokenizer = get(STORIES)
    [prompt] = encode_prompts(tokenizer, ["Once upon a time"])
    assert prompt[0] == tokenizer.bos_token_id
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=60, do_sample=False, pad_token_id=0
    )[0]
    text = tokenizer.decode(output[len(prompt) :], skip_special_tokens=True)
    assert text.startswith(
        ", there was a little girl named Lily. She loved to play outside in the park."
    )
    assert stop_ids(model, tokenizer) == [1, 2]
    assert context_length(model) == 512
    # Here bos also ends a story; in front it stays.
    assert encode_prompts(tokenizer, [""]) == [[1]]


@pytest.mark.parametrize(
    "build", [small_gpt2, small_qwen2, lambda: small_qwen2(tie_word_embeddings=True)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_export_and_load_are_the_same_model(tmp_path, build, dtype):
    torch.manual_seed(0)
    model = build().to(dtype).eval()
    folder = tmp_path / "runs" / "export"
    export_model(model, byte_tokenizer(), folder)
    assert [path.name for path in folder.parent.iterdir()] == ["export"]
    loaded, tokenizer = get(folder, dtype)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == plain.dtype == dtype
    tokens = torch.tensor([tokenizer("Straße")["input_ids"]])
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, plain(tokens).logits)
        if (
            dtype == torch.float32
        ):  # `to(bfloat16)` above also rounded the rotary frequencies, which loading does not
            assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("build", [small_gpt2, small_qwen2])
def test_a_head_of_its_own_is_exported_as_such(tmp_path, build):
    """Its config says that head and embedding are tied, its file has two different matrices."""
    torch.manual_seed(0)
    model = build(tie_word_embeddings=False)
    export_model(model, byte_tokenizer(), tmp_path / "given")
    place = tmp_path / "given" / "config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"tie_word_embeddings": True}))
    loaded, tokenizer = get(tmp_path / "given")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert not loaded.config.tie_word_embeddings
    export_model(loaded, tokenizer, tmp_path / "export")
    assert not json.loads((tmp_path / "export/config.json").read_text())["tie_word_embeddings"]
    again, _ = get(tmp_path / "export")
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_float32_norms_are_loaded_unchanged(tmp_path):
    """A model that EGGROLL sampled in half precision has matrices of 16 bits and norms of 32."""
    model = small_qwen2()
    torch.nn.init.constant_(model.model.norm.weight, 1.001)
    narrow(model, torch.bfloat16, torch.device("cpu"))
    export_model(model, byte_tokenizer(), tmp_path / "m")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert plain.state_dict().keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(plain.state_dict()[name], weight.float()), name


def test_a_copy_to_sample_from_has_what_norms_have_learnt():
    """Updates of 0.001 near 1 are lost in bfloat16, whose steps are of 1/128 there."""
    torch.manual_seed(0)
    model, tokens = small_qwen2(), torch.arange(12)[None]
    with torch.no_grad():
        before = narrowed(model, torch.bfloat16)(tokens).logits
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += 0.001
        copied = narrowed(model, torch.bfloat16)
        assert not torch.equal(copied(tokens).logits, before)
    kinds = {name: parameter.dtype for name, parameter in copied.named_parameters()}
    assert {kinds[name] for name in kinds if "norm" in name} == {torch.float32}
    assert {kinds[name] for name in kinds if "norm" not in name} == {torch.bfloat16}


def test_the_tokenizer_is_the_files_whatever_the_model_is(tmp_path):
    """AutoTokenizer would put Qwen2's tokenizer in its place, which composes e + accent to one
    letter.
    """
    export_model(small_qwen2(), byte_tokenizer(), tmp_path / "m")
    tokenizer = get(tmp_path / "m")[1]
    assert tokenizer("e\u0301")["input_ids"] == list("e\u0301".encode())
    assert tokenizer("<eos>")["input_ids"] == list(b"<eos>")


def test_export_replaces_an_export_and_nothing_else(tmp_path, gpt2):
    export_model(small_qwen2(), byte_tokenizer(), gpt2)
    assert json.loads((gpt2 / "config.json").read_text())["model_type"] == "qwen2"
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "chapter").write_text("")
    with pytest.raises(ConfigError, match="not a model folder"):
        export_model(small_qwen2(), byte_tokenizer(), thesis)
    assert (thesis / "chapter").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.6, "do_sample": False},
        {"early_stopping": True, "num_beams": 1},  # which saves with a warning as it came
        {"length_penalty": 0.8, "temperature": 0.6},
    ],
)
def test_export_of_a_generation_config_that_transformers_refuses_to_save(settings, tmp_path):
    (tmp_path / "in").mkdir()
    text = json.dumps(settings | {"eos_token_id": 257})
    (tmp_path / "in" / "generation_config.json").write_text(text)
    model = small_gpt2()
    model.generation_config = GenerationConfig.from_pretrained(tmp_path / "in")
    export_model(model, byte_tokenizer(), tmp_path / "out")
    assert not model.generation_config.do_sample
    saved = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert settings.items() - {("do_sample", False)} <= saved.items()


def test_attention_is_the_configs(gpt2):
    assert get(gpt2, attention="eager")[0].config._attn_implementation == "eager"
    assert get(gpt2)[0].config._attn_implementation == "sdpa"


def test_a_missing_pad_token_becomes_eos(gpt2):
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(gpt2)
    model, loaded = get(gpt2)
    assert loaded.pad_token_id == loaded.eos_token_id == 257
    assert model.get_input_embeddings().weight.shape[0] == 258


def test_neither_pad_nor_eos(gpt2):
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = None
    tokenizer.save_pretrained(gpt2)
    with pytest.raises(ConfigError, match="neither a pad token nor an eos token"):
        get(gpt2)


THINKING = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)


def test_values_for_the_chat_template(gpt2, tmp_path):
    """They are in all that fills it in, and in what is exported."""
    asked: Messages = [{"role": "user", "content": "7?"}]
    model, tokenizer = get(gpt2)
    tokenizer.chat_template = THINKING
    tokenizer.save_pretrained(gpt2)
    wanted = {"true": "<user>7?<assistant>", "false": "<user>7?<assistant><think></think>"}
    for value, text in wanted.items():
        given = {"enable_thinking": json.loads(value)}
        model, tokenizer = get(gpt2, chat_template_kwargs=given)
        assert tokenizer.decode(encode_prompts(tokenizer, [asked])[0]) == text
        export_model(model, tokenizer, tmp_path / "export")
        _, again = get(tmp_path / "export")
        assert again.decode(encode_prompts(again, [asked])[0]) == text
    said = complaint(gpt2, chat_template_kwargs={"thinking": False})
    assert (
        "model.chat_template_kwargs.thinking has no effect: the chat template of model.path" in said
    )


def test_a_template_that_lets_a_model_think_is_told(gpt2):
    _, tokenizer = get(gpt2)
    tokenizer.chat_template = THINKING
    assert "model.chat_template_kwargs.enable_thinking=false" in describe_template(tokenizer)
    tokenizer.chat_template = "{% set enable_thinking = false %}" + THINKING
    assert describe_template(tokenizer) == "through the chat template"


def test_stop_ids_are_the_union():
    model, tokenizer = small_gpt2(), byte_tokenizer()
    model.generation_config.eos_token_id = [9, 3]
    assert stop_ids(model, tokenizer) == [3, 9, 257]
    model.generation_config.eos_token_id = 3
    tokenizer.eos_token = None
    assert stop_ids(model, tokenizer) == [3]
    model.generation_config.eos_token_id = None
    assert stop_ids(model, tokenizer) == []


FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 24}
PHI = dict(num_attention_heads=4, hidden_size=32, max_position_embeddings=99, sliding_window=None)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GPT2Config(n_positions=77), 77),
        (LlamaConfig(max_position_embeddings=99), 99),
        (MistralConfig(max_position_embeddings=99, sliding_window=32), 99),
        (GPTNeoConfig(max_position_embeddings=99, window_size=16), 16),
        (
            Phi3Config(
                original_max_position_embeddings=24, rope_parameters=LONG_ROPE | FACTORS, **PHI
            ),
            24,
        ),
    ],
)
def test_context_length(config, expected):
    model = small_gpt2()
    model.config = config
    assert context_length(model) == expected


def test_no_context_length():
    model = small_gpt2()
    model.config = T5Config()
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        context_length(model)


# --- prompts


def framed_tokenizer(template):
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=[("<eos>", 257), ("<pad>", 256)]
    )
    return tokenizer


@pytest.mark.parametrize(
    ("template", "front"),
    [
        ("$A", []),
        ("<pad> $A", [256]),
        ("$A <eos>", []),
        ("<eos> $A <eos>", [257]),
        ("<pad> <eos> $A <pad>", [256, 257]),
    ],
)
def test_what_the_tokenizer_appends_is_left_out(template, front):
    tokenizer = framed_tokenizer(template)
    assert encode_prompts(tokenizer, ["ab", "a<eos>"]) == [
        [*front, 97, 98],
        [*front, 97, *b"<eos>"],
    ]
    assert encode_prompts(tokenizer, []) == []


def test_an_empty_prompt():
    assert encode_prompts(framed_tokenizer("<pad> $A"), [""]) == [[256]]
    for template in ("$A", "$A <eos>"):
        with pytest.raises(ValueError, match="prompt 1 is ''"):
            encode_prompts(framed_tokenizer(template), ["x", ""])


def test_truncation_stored_with_the_tokenizer_is_not_applied():
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    assert encode_prompts(tokenizer, ["abcdef", "x"]) == [list(b"abcdef"), list(b"x")]


# --- users' mistakes


def complaint(path, **changes):
    with pytest.raises(ConfigError) as caught:
        get(path, **changes)
    return str(caught.value)


def test_missing_folder():
    text = complaint("./modles/gpt2")
    assert text.startswith(
        "model.path='./modles/gpt2': there is no such folder. Correct the path (relative ones"
        " start at"
    )
    assert "hub id" in text
    assert "no such folder" in complaint("/a/b/c")


def test_not_a_model_folder(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    text = complaint(tmp_path)
    assert (
        f"model.path='{tmp_path}' is not a model folder: it has no config.json (it has: notes.txt)"
        in text
    )
    assert "is a file" in complaint(tmp_path / "notes.txt")
    (tmp_path / "m.gguf").write_text("")
    assert f"model=gguf model.path={tmp_path} model.gguf_file=m.gguf" in complaint(
        tmp_path / "m.gguf"
    )


def test_hub_id_without_a_network(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    text = complaint("nobody/nothing-like-this")
    assert text.startswith("model.path='nobody/nothing-like-this' could not be loaded:")
    assert "model.path=FOLDER" in text


def test_revision_of_a_local_folder(gpt2):
    assert "model.revision='v1' has no effect" in complaint(gpt2, revision="v1")


def bert(kind):
    return kind(
        BertConfig(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=16)
    )


@pytest.mark.parametrize(
    "build",
    [
        lambda: bert(BertForMaskedLM),
        lambda: bert(BertLMHeadModel),
        lambda: T5ForConditionalGeneration(
            T5Config(num_layers=1, d_model=16, d_ff=16, d_kv=8, num_heads=2, vocab_size=258)
        ),
        lambda: GPT2Model(GPT2Config(n_layer=1, n_embd=16, n_head=2)),
    ],
)
def test_not_a_causal_language_model(tmp_path, build):
    build().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    text = complaint(tmp_path)
    assert f"model.path='{tmp_path}' is not a causal language model: its config.json says" in text
    assert "ForCausalLM" in text


def test_no_tokenizer(tmp_path):
    for name, model in (("gpt2", small_gpt2()), ("qwen2", small_qwen2())):
        model.save_pretrained(tmp_path / name)
        text = complaint(tmp_path / name)
        assert "has no tokenizer that can be loaded" in text
        assert "tokenizer.json" in text


def test_tokenizer_of_another_model(tmp_path):
    export_model(
        small_gpt2(vocab_size=100, bos_token_id=1, eos_token_id=1), byte_tokenizer(), tmp_path / "m"
    )
    assert "ids up to 257, its embedding has 100 rows" in complaint(tmp_path / "m")


def test_an_added_token_may_have_no_row(tmp_path):
    """As the token of images in text models of Gemma 3, until a prompt holds it."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image_soft_token>"]})
    export_model(small_gpt2(), tokenizer, tmp_path / "m")
    model, loaded = get(tmp_path / "m")
    assert loaded.convert_tokens_to_ids("<image_soft_token>") == 258
    loaded.split_special_tokens = False
    config = SimpleNamespace(max_new_tokens=4)
    run = SimpleNamespace(
        algo=SimpleNamespace(sampling=config), prompts=SimpleNamespace(too_long="error")
    )
    lm = SimpleNamespace(model=model, tokenizer=loaded)
    rows = {"train": [Example(0, "a", ""), Example(1, "b<image_soft_token>", "")]}
    with pytest.raises(ConfigError, match=r"prompt of train example 1 holds '<image_soft_token>'"):
        fit_prompts(run, lm, lambda example: example.question, rows)


def test_a_gguf_file_is_checked_as_a_folder_is(gpt2, monkeypatch):
    """gguf and accelerate are not needed for that."""
    kinds = {
        "caps the scores of its attention": transformers.Gemma2Config(num_hidden_layers=1),
        "layers of another kind than attention": transformers.BloomConfig(),
    }
    (gpt2 / "m.gguf").touch()
    monkeypatch.setattr(load.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(load, "GgufConfig", lambda **_: None)
    for words, config in kinds.items():
        model = SimpleNamespace(config=config, get_output_embeddings=lambda: None)
        loaded = model, {"missing_keys": [], "mismatched_keys": []}
        monkeypatch.setattr(
            load.AutoModelForCausalLM, "from_pretrained", lambda *_, found=loaded, **__: found
        )
        with pytest.raises(ConfigError, match=words):
            get(gpt2, gguf_file="m.gguf")


def test_damaged_and_missing_weights(gpt2):
    (gpt2 / "model.safetensors").write_bytes(b"\x00" * 50)
    assert "could not be loaded" in complaint(gpt2)
    (gpt2 / "model.safetensors").unlink()
    assert "could not be loaded" in complaint(gpt2)


def test_weights_that_are_not_in_the_file(gpt2):
    config = json.loads((gpt2 / "config.json").read_text())
    (gpt2 / "config.json").write_text(json.dumps({**config, "n_layer": 3}))
    text = complaint(gpt2)
    assert "is not a whole causal language model: 12 weights are not in its files" in text
    (gpt2 / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    assert "could not be loaded" in complaint(gpt2) or "not a whole" in complaint(gpt2)
    (gpt2 / "config.json").write_text("{")
    assert "could not be loaded" in complaint(gpt2)


@pytest.mark.faults
def test_code_that_comes_with_a_model_is_not_run(gpt2, tmp_path):
    sprung = tmp_path / "sprung"
    (gpt2 / "custom.py").write_text(f"open({str(sprung)!r}, 'w')\n")
    config = json.loads((gpt2 / "config.json").read_text())
    auto = {"AutoConfig": "custom.C", "AutoModelForCausalLM": "custom.M"}
    (gpt2 / "config.json").write_text(
        json.dumps({**config, "model_type": "own_kind", "auto_map": auto})
    )
    assert "never run here" in complaint(gpt2)
    assert not sprung.exists()


def test_gguf_without_its_packages(tmp_path, monkeypatch):
    (tmp_path / "m.gguf").write_text("")
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(load.importlib.util, "find_spec", lambda name: None)
    text = complaint(tmp_path, gguf_file="m.gguf")
    assert text.startswith("model.gguf_file='m.gguf' needs the Python package gguf and accelerate.")
    assert "pip install -e '.[gguf]'" in text
    assert "it has no other.gguf (it has: m.gguf). Correct model.gguf_file." in complaint(
        tmp_path, gguf_file="other.gguf"
    )
