"""Models of the kinds that people train, at toy size: each is loaded, samples as `generate` does
and makes a step with and without an adapter, or is told at once what it cannot do.
"""

import copy
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from common.config import AdapterConfig, ConfigError, ModelConfig, SamplingConfig
from common.device.hardware import Device
from common.distributed.context import Context
from common.engine import Requests
from common.episodes.episodes import Turns
from common.memory.arithmetic import BatchShape, activation_bytes, cache_bytes
from common.model import varlen
from common.model.adapter import Adapter
from common.model.export import empty_like, export_model
from common.model.load import TEXT_PARTS, load_model
from common.model.logprobs import group, is_apart, prepare, token_logprobs
from common.model.prompts import Decoder, encode_prompts
from common.model.tiny import byte_tokenizer
from common.model.token_filters import keep_drawable
from common.report.summary import Result
from common.sampling.native import Sampler
from eggroll.config import NoiseConfig
from eggroll.noise import Noise
from tests.oracles.test_logprobs import check_unpadded, data
from tests.support.models import SIZES, check_greedy, prompts, sampling
from tests.support.rounding import rounding_of_gradients

CPU = torch.device("cpu")
LLAMA_3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA_3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
HEAD = SIZES | {"head_dim": 8}
GEMMA_3 = HEAD | {"num_hidden_layers": 6}
GEMMA_4 = {"global_head_dim": 16, "vocab_size_per_layer_input": 260}
GEMMA_4 |= {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2}
GEMMA_4 |= {"layer_types": ["sliding_attention", "full_attention"] * 3}
OTHER = {"n_layer": 2, "n_head": 4, "n_embd": 32, "rotary_dim": 4}
KINDS = {
    "llama": SIZES | {"rope_parameters": LLAMA_3},
    "qwen2": SIZES | {"tie_word_embeddings": True},
    "qwen3": HEAD,
    "mistral": HEAD | {"sliding_window": None},
    "phi": SIZES,
    "phi3": SIZES,
    "opt": SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 32, "do_layer_norm_before": True},
    "gemma3_text": GEMMA_3 | {"sliding_window": 128},
    "gemma4_text": GEMMA_3 | {"sliding_window": 128, **GEMMA_4},
    "granite": SIZES | {"logits_scaling": 8.0, "residual_multiplier": 0.2},
    "cohere": SIZES | {"logit_scale": 0.25},
    "qwen3_moe": HEAD | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
# Latents that are widened after the cache, and keys or values that are repeated there.
MLA = SIZES | {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4}
MLA |= {"qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
MIXTURE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "deepseek_v3": MLA | MIXTURE | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "minicpm3": MLA,
    "jetmoe": dict(hidden_size=32, num_hidden_layers=2, num_key_value_heads=2, kv_channels=8)
    | dict(intermediate_size=48, num_local_experts=4, num_experts_per_tok=2),
    "diffllama": SIZES,
}
REFUSED = {"falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}}


def made(folder, name: str, **changes) -> ModelConfig:
    """Write a random model of that kind; return the settings that load it."""
    values = (KINDS | LATENT | REFUSED).get(name, HEAD) | dict(
        vocab_size=260, bos_token_id=0, eos_token_id=1
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(name, **(values | {"pad_token_id": 0} | changes))
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return setting(folder)


def setting(folder) -> ModelConfig:
    return ModelConfig(name="hf", path=str(folder), revision=None, gguf_file=None, attention="sdpa")


@pytest.fixture(params=KINDS)
def model(request, tmp_path) -> torch.nn.Module:
    return load_model(made(tmp_path, request.param), None, torch.float32, CPU, progress=False)[0]


@pytest.mark.run
def test_it_samples_as_generate_does(model):
    sampler = Sampler(model, pad_id=96, stop_ids=(11, 12), rows=4)
    check_greedy(model, sampler.generate(Requests(prompts=prompts()), sampling()))


@pytest.mark.parametrize("name", LATENT)
def test_attention_with_transformed_keys_samples_correctly(name, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(made(tmp_path, name).path).eval()
    sampler = Sampler(model, pad_id=96, stop_ids=(11, 12), rows=8)
    asked = Requests(prompts=prompts(), samples=3)
    completions = sampler.generate(asked, sampling())
    check_greedy(model, completions.take(range(0, 15, 3)))


@pytest.mark.parametrize("name", ["deepseek_v3", "minicpm3", "falcon", "qwen3", "gemma4_text"])
def test_a_token_takes_the_memory_that_plans_count(name, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(made(tmp_path, name).path)
    cache = model(torch.arange(5, 9)[None], use_cache=True).past_key_values
    layers = [layer for layer in cache.layers if layer.keys is not None]  # else it reads another's
    stored = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    assert stored == 4 * cache_bytes(model.config, 4)


def test_what_is_exported_has_the_buffers_of_a_router(tmp_path):
    pytest.importorskip("peft")
    given = made(tmp_path / "base", "deepseek_v3")
    model, tokenizer = load_model(given, None, torch.float32, CPU, progress=False)
    biases = [b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]
    assert biases
    for bias in biases:
        bias.copy_(torch.linspace(-1, 1, len(bias)))
    one = Context(0, 1, Device(CPU, "cpu", 1.0, False), tmp_path)
    ids = torch.arange(5, 13)[None]
    wanted = model(ids).logits
    given_experts = AdapterConfig(rank=2, targets="q_a_proj,gate_proj,up_proj,down_proj")
    with pytest.raises(ConfigError, match=r"on the experts of .* model\.adapter\.targets=q_a_proj"):
        Adapter(copy.deepcopy(model), given_experts, one, seed=0)
    adapter = Adapter(model, AdapterConfig(rank=2), one, seed=0)
    assert len(adapter.layers) == 2 * 5, "five matrices of attention in each of two blocks"
    export_model(empty_like(model), tokenizer, tmp_path / "whole", adapter.merged(None))
    again, _ = load_model(
        replace(given, path=str(tmp_path / "whole")), None, torch.float32, CPU, progress=False
    )
    torch.testing.assert_close(again(ids).logits, wanted)


def test_what_cannot_be_perturbed_is_frozen_as_advised(tmp_path):
    name, sizes = "mixtral", {"num_local_experts": 2, "num_experts_per_tok": 1}
    path = made(tmp_path, name, **sizes, **SIZES).path
    model = AutoModelForCausalLM.from_pretrained(path)
    policies = {"matrices": "lowrank", "vectors": "frozen", "embeddings": "frozen"}
    noise = NoiseConfig(**policies, head="frozen", patterns={})
    with pytest.raises(ConfigError, match="is not possible") as told:
        Noise(model, noise, rank=1, mirrored=True, seed=0)
    (pattern,) = re.findall(r'patterns=\{"([^"]+)": frozen\}', str(told.value))
    perturbed = Noise(
        model, replace(noise, patterns={pattern: "frozen"}), rank=1, mirrored=True, seed=0
    )
    assert len(perturbed.addresses) == 8, "four matrices of attention in each of two blocks"


@pytest.mark.parametrize("adapted", [False, True])
def test_it_makes_a_step(model, adapted, tmp_path):
    """With the gradient of the model's own forward."""
    prepare(model)  # which compares log-probabilities with the model's own
    if adapted:
        pytest.importorskip("peft")
        one = Context(0, 1, Device(CPU, "cpu", 1.0, False), tmp_path)
        Adapter(model, AdapterConfig(rank=2), one, seed=0)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    prompt, completion = [5, 6, 7], [3, 4, 5, 9]
    logp, _ = token_logprobs(model, group([prompt], [[completion]], CPU), 1.0)
    found = torch.autograd.grad(logp.sum(), list(trained.values()), allow_unused=True)
    ids = torch.tensor([prompt + completion])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    own = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None]).sum()
    wanted = torch.autograd.grad(own, list(trained.values()), allow_unused=True)
    assert any(gradient is not None and gradient.any() for gradient in found)
    rounding = rounding_of_gradients(wanted, terms=1000)  # 260 tokens, 32 wide, 4 layers
    for name, mine, theirs in zip(trained, found, wanted, strict=True):
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=0, atol=rounding, msg=name)


def test_a_text_beyond_chunks_of_attention_is_told(tmp_path):
    experts = {"intermediate_size_mlp": 64, "num_local_experts": 2}
    given = made(tmp_path, "llama4_text", attention_chunk_size=8, **experts)
    model, _ = load_model(given, None, torch.float32, CPU, progress=False)
    sampler = Sampler(model, pad_id=96, stop_ids=(), rows=4)
    with pytest.raises(ConfigError, match="exceed the model's attention window of 8"):
        sampler.generate(Requests(prompts=prompts()), sampling())


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("gemma2", {}, r"caps .*\. Use model\.attention=eager"),
        ("gptj", OTHER, r"does not support .*\. Use model\.attention=eager"),
        ("recurrent_gemma", {}, r"positions: .*(linear_attention|recurrent)"),
        ("falcon", {"alibi": True}, "positions: attention without positions"),
        ("bloom", OTHER, "positions: attention without positions"),
        ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2}, "attention without positions"),
    ],
)
def test_what_cannot_be_computed_is_told(name, changes, text, tmp_path):
    with pytest.raises(ConfigError, match=text):
        load_model(made(tmp_path, name, **changes), None, torch.float32, CPU, progress=False)


def pictured(folder, kind: str, **changes) -> torch.nn.Module:
    """Write a model of text and images, and return it."""
    picture = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    picture |= {"intermediate_size": 16, "image_size": 8, "patch_size": 4}
    text = SIZES | {"vocab_size": 260, "head_dim": 16, "pad_token_id": 0}
    changed = {"text_config": text | changes, "vision_config": picture} | changes
    config = AutoConfig.for_model(kind, **changed)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config).eval()
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("gemma3", marks=pytest.mark.run),
        *(
            pytest.param(kind, marks=pytest.mark.thorough)
            for kind in TEXT_PARTS
            if kind != "gemma3"
        ),
    ],
)
def test_the_text_part_of_a_model_of_text_and_images(kind, tmp_path):
    """It answers as the whole does, before and after it is exported."""
    layers = {"layer_types": ["linear_attention", "full_attention"]} if "qwen3_5" in kind else {}
    whole, ids = pictured(tmp_path / "whole", kind, **layers), torch.arange(5, 25)[None]
    given = setting(tmp_path / "whole")
    model, tokenizer = load_model(given, None, torch.float32, CPU, progress=False)
    assert not any("vision" in name for name, _ in model.named_parameters())
    wanted = whole(input_ids=ids).logits
    torch.testing.assert_close(model(input_ids=ids).logits, wanted)
    shapes, _ = load_model(given, None, torch.float32, torch.device("meta"), progress=False)
    sizes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert sizes == {name: tensor.shape for name, tensor in shapes.state_dict().items()}
    sampler = Sampler(model, pad_id=96, stop_ids=(11, 12), rows=4)
    check_greedy(model, sampler.generate(Requests(prompts=prompts()), sampling()))
    export_model(model, tokenizer, tmp_path / "part")
    again, _ = load_model(setting(tmp_path / "part"), None, torch.float32, CPU, progress=False)
    torch.testing.assert_close(again(input_ids=ids).logits, wanted)


@pytest.mark.parametrize("text", [True, False])
def test_a_head_of_its_own_that_the_config_does_not_tell(text, tmp_path):
    """As published ones have it: the key is left out, and the default is another."""
    whole = pictured(tmp_path / "whole", "mistral3", tie_word_embeddings=False)
    path = tmp_path / "whole/config.json"
    config = json.loads(path.read_text())
    del config["tie_word_embeddings"]
    if text:
        del config["text_config"]["tie_word_embeddings"]
    path.write_text(json.dumps(config))
    model, tokenizer = load_model(
        setting(tmp_path / "whole"), None, torch.float32, CPU, progress=False
    )
    export_model(model, tokenizer, tmp_path / "part")
    assert not AutoConfig.from_pretrained(tmp_path / "part").tie_word_embeddings
    ids = torch.arange(5, 25)[None]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "part")
    torch.testing.assert_close(again(input_ids=ids).logits, whole(input_ids=ids).logits)


def test_an_adapter_of_a_text_part_is_loaded_on_that_part(tmp_path):
    pytest.importorskip("peft")
    pictured(tmp_path / "whole", "gemma3")
    model, tokenizer = load_model(
        setting(tmp_path / "whole"), None, torch.float32, CPU, progress=False
    )
    one = Context(0, 1, Device(CPU, "cpu", 1.0, False), tmp_path)
    adapter = Adapter(model, AdapterConfig(rank=2), one, seed=0)
    with torch.no_grad():
        for parameter in adapter.parameters.values():
            parameter.add_(0.1)
    adapter.write(tmp_path / "run/adapter")
    tokenizer.save_pretrained(tmp_path / "run/adapter")
    again, _ = Result.model_and_tokenizer(SimpleNamespace(folder=str(tmp_path / "run")))
    ids = torch.arange(5, 25)[None]
    torch.testing.assert_close(again(input_ids=ids).logits, model(input_ids=ids).logits)


def test_layers_of_gemma_4_that_share_keys_are_not_left_out(tmp_path):
    """Blocks below the first one with noise are, of other models: these read what those make."""
    given = made(tmp_path, "gemma4_text")
    model, _ = load_model(given, None, torch.float32, CPU, progress=False)
    kinds = dict(vectors="frozen", embeddings="frozen", head="frozen")
    config = NoiseConfig(matrices="lowrank", **kinds, patterns={"lower": "frozen"})
    assert Noise(model, config, rank=1, mirrored=True, seed=0).trunk == 0


def test_gemma_4_with_other_keys_in_some_layers_is_planned(tmp_path):
    changes = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 512}
    given = made(tmp_path, "gemma4_text", **changes | {"num_kv_shared_layers": 0})
    model, _ = load_model(given, None, torch.float32, torch.device("meta"), progress=False)
    batch = BatchShape(2, 8, 4, 8, torch.bfloat16)
    assert activation_bytes(model, batch, False) > 0
    assert cache_bytes(model.config, 2) == 2 * 2 * 3 * (2 * 8 + 1 * 512)
    why = varlen.why_not_flash(model.config, torch.device("cuda"), torch.bfloat16)
    assert why == "heads of 512 numbers, more than 256"


PARTS = (
    "{% for m in messages %}{{ m['role'] }}: {% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}|{% endfor %}"
)


def test_a_template_that_takes_parts_alone_gets_the_question():
    """As those of LLaVA and SmolVLM."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = PARTS
    asked = [{"role": "system", "content": "Count."}, {"role": "user", "content": "3 + 4?"}]
    [ids] = encode_prompts(tokenizer, [asked])
    assert tokenizer.decode(ids) == "system: Count.|user: 3 + 4?|"
    behind = Turns(None, Decoder(tokenizer), ()).render(
        [{"role": "user", "content": "Higher."}], None
    )
    assert tokenizer.decode(behind) == "|user: Higher.|"


def test_unsupported_image_models_are_refused_before_loading(tmp_path):
    AutoConfig.for_model("aya_vision").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    for device in (CPU, torch.device("meta")):
        with pytest.raises(ConfigError, match=r"text and images .* text parts of gemma3, gemma4"):
            load_model(setting(tmp_path), None, torch.float32, device, progress=False)


@pytest.mark.parametrize("cuts", [{}, {"top_k": 20}])
def test_a_cap_of_the_logits(cuts, tmp_path):
    """As published models of Gemma 4 have one. Gradients are those of the same formula."""
    given = made(tmp_path, "gemma4_text", final_logit_softcapping=1.5)
    model, _ = load_model(given, None, torch.float32, CPU, progress=False)
    prepare(model)  # which compares with the model's own logits
    prompt, completion = [5, 6, 7], [3, 4, 5, 9]
    logits = model(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0, 2:-1]
    assert 1.0 < logits.abs().max() < 1.5
    drawn = replace(SamplingConfig.uncut(4, 0.7), **cuts) if cuts else None
    target = torch.tensor(completion)
    if drawn is not None:
        logits = keep_drawable(logits / 0.7, target, drawn) * 0.7
    log_softmax = (logits / 0.7).log_softmax(-1)
    own_logp = log_softmax.gather(1, target[:, None])[:, 0]
    own_entropy = -(log_softmax.exp() * log_softmax.clamp(min=-1e4)).sum(1)
    laid = group([prompt], [[completion]], CPU)
    logp, entropy = token_logprobs(model, laid, 0.7, drawn)
    torch.testing.assert_close(logp[0], own_logp)
    torch.testing.assert_close(entropy[0], own_entropy)
    trained = [p for p in model.parameters() if p.requires_grad]
    for mine, theirs in ((logp, own_logp), (logp + entropy, own_logp + own_entropy)):
        pair = [
            torch.autograd.grad(x.sum(), trained, retain_graph=True, allow_unused=True)
            for x in (mine, theirs)
        ]
        for found, wanted in zip(*pair, strict=True):
            if wanted is not None:
                torch.testing.assert_close(found, wanted, rtol=5e-3, atol=5e-4)


@pytest.mark.parametrize(
    "name",
    [
        "stablelm",
        pytest.param("gemma2", marks=pytest.mark.run),
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("gptj", "falcon", "nemotron")
        ),
    ],
)
def test_attention_that_knows_no_groups_stays(name, tmp_path):
    """Each completion has a row of its own then; ranks that share weights could not agree on it."""
    given = made(tmp_path, name, **({"gptj": OTHER, "gemma2": HEAD}.get(name, {})))
    own = "eager" if name in ("gptj", "gemma2") else "sdpa"
    model, _ = load_model(replace(given, attention=own), None, torch.float32, CPU, progress=False)
    sampler = Sampler(model, pad_id=96, stop_ids=(11, 12), rows=4)
    check_greedy(model, sampler.generate(Requests(prompts=prompts()), sampling()))
    refused, other = copy.deepcopy(model), copy.deepcopy(model)
    with pytest.raises(ConfigError, match=r"attends in a way .* with opt=fsdp .*without gradients"):
        prepare(refused, alone=False)
    prepare(model)
    assert model.config._attn_implementation == own
    assert is_apart(model)
    assert not is_apart(other)
    check_unpadded(model, other, *data(), 1.0, 1e-4)
    batch = BatchShape(2, 30, 8, 20, torch.float32)
    assert activation_bytes(model, batch, False) > activation_bytes(other, batch, False)
