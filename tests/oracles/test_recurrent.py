"""Models with recurrent layers, which keep a state of each row in place of keys and values: samples
are those of `generate`, and log-probabilities and gradients those of the model's own forward.
"""

import copy
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from common.config import AdapterConfig, ConfigError
from common.device.hardware import Device
from common.device.precision import Precision
from common.distributed.context import Context
from common.engine import Population, Requests
from common.memory.arithmetic import BatchShape, activation_bytes, cache_bytes
from common.model.adapter import STATE_SPACES, Adapter
from common.model.load import load_model
from common.model.logprobs import group, hidden_states, prepare
from common.model.masks import HYBRIDS, keeps_states
from common.model.precision_copies import narrowed
from common.model.recurrent import read_states
from common.model.saved_bytes import count_saved
from common.optim import check_repeatable
from common.sampling.native import Sampler, waits_for_experts
from common.sampling.recurrent_cache import count_state_bytes
from eggroll.config import NoiseConfig
from eggroll.noise import Noise
from tests.oracles.test_architectures import made
from tests.oracles.test_logprobs import CPU, check_unpadded, data, data_that_opens_alike
from tests.oracles.test_windows import check_pairs
from tests.support import ROOT
from tests.support.models import SIZES, check_greedy, prompts, prompts_that_open_alike, sampling
from tests.support.refusals import refuses
from tests.unit.test_graphs import Tape

STOPS = {"pad_id": 96, "stop_ids": (11, 12)}
THREE = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention"] * 2}
THREE["layer_types"] = THREE["layer_types"][:3]
CONV = THREE | {"layer_types": ["conv", "full_attention", "conv"]}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
DELTA |= {"linear_value_head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 16}
MAMBA |= {"mamba_chunk_size": 16}
NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 16}
ZAMBA = {"n_mamba_heads": 8, "mamba_ngroups": 1, "mamba_d_state": 8, "num_mem_blocks": 1}
KINDS = {
    "lfm2": CONV,
    "qwen3_5_text": THREE | DELTA,
    "granitemoehybrid": THREE
    | MAMBA
    | {"num_local_experts": 0, "shared_intermediate_size": 48, "position_embedding_type": "rope"},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "qwen3_next": THREE | DELTA | EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3_5_moe_text": THREE | DELTA | EXPERTS | {"shared_expert_intermediate_size": 16},
    "lfm2_moe": CONV | EXPERTS | {"num_dense_layers": 1},
    "olmo_hybrid": THREE | DELTA | {"linear_num_key_heads": 4},
    "nemotron_h": NEMOTRON
    | {"chunk_size": 16, "layers_block_type": ["linear_attention", "full_attention", "mlp"]},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "zamba2": ZAMBA
    | {"layers_block_type": ["linear_attention", "hybrid"], "hybrid_layer_ids": [1]},
}
EACH = [
    "lfm2",
    pytest.param("qwen3_5_text", marks=pytest.mark.run),
    *(pytest.param(name, marks=pytest.mark.thorough) for name in list(KINDS)[2:]),
]


def build(folder, name: str) -> torch.nn.Module:
    given = made(folder, name, **SIZES | KINDS[name])
    model = load_model(given, None, torch.float32, CPU, progress=False)[0].eval()
    assert keeps_states(model.config)
    return model


@pytest.fixture(params=EACH)
def model(request, tmp_path) -> torch.nn.Module:
    return build(tmp_path, request.param)


def alike(some, others) -> None:
    """Rows of other forwards: the same, but for the order of sums."""
    assert torch.equal(some.tokens, others.tokens)
    torch.testing.assert_close(some.logprobs, others.logprobs, rtol=1e-4, atol=1e-4)


def test_every_model_that_is_let_in_is_tried():
    assert sorted(KINDS) == sorted(HYBRIDS)


@pytest.mark.parametrize("rows", [2, 8])
def test_it_samples_as_generate_does(model, rows):
    sampler = Sampler(model, rows=rows, **STOPS)
    check_greedy(model, sampler.generate(Requests(prompts=prompts()), sampling()))
    several = sampler.generate(Requests(prompts=prompts(), samples=3), sampling())
    check_greedy(model, several.take(range(0, 15, 3)))


def test_vectors_of_a_copy_in_half_precision_are_the_models(model):
    """Norms with a gate, A_log, dt_bias and D: small updates of them would be lost."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 1e-3
    narrow = narrowed(model, torch.bfloat16)
    for (name, wide), copied in zip(model.named_parameters(), narrow.parameters(), strict=True):
        if wide.ndim == 1 and not name.endswith("conv1d.bias"):
            assert torch.equal(copied, wide), name
    ids = torch.arange(40).view(2, 20)
    difference = narrow(input_ids=ids).logits.float() - model(input_ids=ids).logits
    assert difference.abs().median() < 0.02, "but where a token goes to other experts"


def test_recorded_steps_are_the_same(model, monkeypatch):
    plain, recorded = (Sampler(model, rows=4, **STOPS) for _ in range(2))
    recorded.recorder = Tape
    monkeypatch.setattr("common.distributed.Sharding.inference", lambda _: torch.no_grad())
    asked = Requests(prompts=prompts(), logprobs=True)
    alike(recorded.generate(asked, sampling(0.7)), plain.generate(asked, sampling(0.7)))


def count_prefilled(model, run) -> int:
    """The tokens of forwards with more than one of a row."""
    counted = []

    def note(_, args, kwargs):
        rows, tokens = kwargs["input_ids"].shape
        counted.append(rows * tokens if tokens > 1 else 0)

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    run()
    hook.remove()
    return sum(counted)


def test_prompts_that_open_alike(model):
    """What they begin with is prefilled once."""
    same = prompts_that_open_alike()
    sampler = Sampler(model, rows=4, **STOPS)
    asked = Requests(prompts=same, logprobs=True)
    together = sampler.generate(asked, sampling())
    for place, prompt in enumerate(same):
        alone = sampler.generate(Requests(prompts=[prompt], logprobs=True), sampling())
        alike(alone, together.take([place]))
    prefilled = count_prefilled(model, lambda: sampler.generate(asked, sampling()))
    assert prefilled < sum(map(len, same))


def test_members_whose_prompts_open_alike(model):
    """Together, a member at a time, and where each has prompts of its own."""
    same, members = prompts_that_open_alike(), 4
    asked = Requests(prompts=same, population=Population(members=members), logprobs=True)
    own = [prompt[shift:] for shift in range(members) for prompt in same]
    apart = Requests(prompts=own, population=Population(members=members), apart=True, logprobs=True)
    for rows in (members, 4 * members):
        sampler = Sampler(model, rows=rows, **STOPS)
        alone = sampler.generate(Requests(prompts=same, logprobs=True), sampling())
        together = sampler.generate(asked, sampling())
        of_each = sampler.generate(apart, sampling())
        for member in range(members):
            each = range(member * len(same), (member + 1) * len(same))
            alike(alone, together.take(each))
            others = Requests(prompts=[own[row] for row in each], logprobs=True)
            alike(sampler.generate(others, sampling()), of_each.take(each))


def test_members_of_a_population_sample_as_a_pair_alone(model):
    """The rates of decay and the convolutions are the same for all, unless one asks for more."""
    routed = any(name.endswith(".gate.weight") for name, _ in model.named_parameters())
    routers = {"*.gate.weight": "frozen"} if routed else {}
    config = NoiseConfig(
        matrices="lowrank", vectors="full", embeddings="frozen", head="frozen", patterns=routers
    )
    noise = Noise(model, config, rank=2, mirrored=True, seed=5)
    assert noise.trunk == 0
    check_pairs(Sampler(model, rows=8, **STOPS), noise, alike)


def test_rates_of_decay_are_not_perturbed_unless_one_asks(tmp_path):
    model = build(tmp_path, "qwen3_5_text")
    kinds = dict(matrices="frozen", embeddings="frozen", head="frozen")
    noise = Noise(
        model, NoiseConfig(vectors="full", **kinds, patterns={}), rank=1, mirrored=True, seed=0
    )
    perturbed = {address.name.rpartition(".")[2] for address in noise.addresses}
    assert perturbed == {"weight"}, "of norms"
    asked = NoiseConfig(vectors="full", **kinds, patterns={"*.dt_bias": "full"})
    with pytest.raises(ConfigError, match=r"noise on .*dt_bias is not possible"):
        Noise(model, asked, rank=1, mirrored=True, seed=0)


def test_logits_that_are_scaled(tmp_path):
    """As those of Granite 4 and Falcon-H1 are."""
    for name, scale in (
        ("granitemoehybrid", "logits_scaling"),
        ("falcon_h1", "lm_head_multiplier"),
    ):
        given = made(tmp_path / name, name, **SIZES | KINDS[name] | {scale: 3.0})
        model = load_model(given, None, torch.float32, CPU, progress=False)[0].eval()
        other = copy.deepcopy(model)
        prepare(model)
        for temperature in (1.0, 0.7):
            check_unpadded(model, other, *data(), temperature, 1e-4)


def test_a_model_whose_layers_are_all_recurrent(tmp_path):
    """transformers' own `generate` refuses it."""
    given = made(tmp_path, "lfm2", **SIZES | {"layer_types": ["conv", "conv"]})
    model = load_model(given, None, torch.float32, CPU, progress=False)[0].eval()
    sampler = Sampler(model, **STOPS, rows=4)
    found = sampler.generate(Requests(prompts=prompts()), sampling())
    for prompt, tokens, length in zip(prompts(), found.tokens, found.lengths, strict=True):
        row = torch.tensor([prompt + tokens[:length].tolist()])
        greedy = model(row, use_cache=False).logits[0, len(prompt) - 1 : -1].argmax(1)
        assert greedy.tolist() == tokens[:length].tolist()
    other = copy.deepcopy(model)
    prepare(model)
    check_unpadded(model, other, *data(), 1.0, 1e-4)


def test_an_adapter_is_on_every_linear_layer(model, tmp_path):
    """But for the experts of a mixture and what goes with them, and for a matrix that kernels of
    state spaces multiply with as it is.
    """
    pytest.importorskip("peft")
    head = model.get_output_embeddings()
    linear = [
        n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head
    ]
    one = Context(0, 1, Device(CPU, "cpu", 1.0, False), tmp_path)
    adapter = Adapter(model, AdapterConfig(rank=2), one, seed=0)
    names = {name for name, m in model.named_modules() if hasattr(m, "lora_A")}
    mixer = {name for name in linear if name.endswith("out_proj")}
    left_out = set(linear) - names
    if model.config.model_type in STATE_SPACES:
        assert left_out == mixer
    elif not any(".experts." in name for name, _ in model.named_parameters()):
        assert not left_out
    assert len(adapter.layers) == len(names) > 0


def test_a_matrix_that_peft_refuses_is_told(tmp_path):
    pytest.importorskip("peft")
    model = build(tmp_path, "falcon_h1")
    one = Context(0, 1, Device(CPU, "cpu", 1.0, False), tmp_path)
    refuses(
        lambda: Adapter(model, AdapterConfig(rank=2, targets="out_proj"), one, seed=0),
        key="targets",
        value="out_proj",
    )


@pytest.mark.parametrize("opening", [False, True])
def test_log_probabilities_are_the_models(model, opening):
    other = copy.deepcopy(model)
    prepare(model)
    check_unpadded(model, other, *(data_that_opens_alike() if opening else data()), 1.0, 1e-4)


def test_memory_is_counted(model):
    cache = DynamicCache(config=model.config)
    model(torch.arange(5, 9)[None], past_key_values=cache, use_cache=True)
    states = sum(state.nbytes for _, state in read_states(cache))
    assert count_state_bytes(model.config, torch.float32) == states
    stored = [one for one in cache.layers if getattr(one, "keys", None) is not None]
    keys = sum(layer.keys.nbytes + layer.values.nbytes for layer in stored)
    assert keys == 4 * cache_bytes(model.config, 4)

    kept: dict[int, int] = {p.untyped_storage().data_ptr(): 0 for p in model.parameters()}
    alive = []

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept.setdefault(storage.data_ptr(), storage.nbytes())
        alive.append(tensor)
        return tensor

    prepare(model)
    laid = group([[5] * 60] * 2, [[[7] * 64] * 2] * 2, CPU)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden_states(model, laid)
    batch = BatchShape(2, 60, 4, 64, torch.float32)
    estimate = activation_bytes(model, batch, False)
    assert sum(kept.values()) < 1.15 * estimate
    assert estimate < 2 * sum(kept.values())  # that of a mixture is of both kinds of numbers
    assert activation_bytes(model, batch, True) > estimate / 3


def test_attention_is_counted_as_fused(tmp_path):
    """What it keeps of a token does not grow with the row."""
    model = build(tmp_path, "lfm2")
    short, long = (count_saved(model, tokens)[2] / tokens for tokens in (64, 1024))
    assert long < 1.01 * short


# A package with kernels, as transformers looks for it: none of its functions can run here.
PACKAGE = """
class Kernel:
    def __getattr__(self, name):
        if name.startswith("__"): raise AttributeError(name)
        return Kernel()
    def __call__(self, *tensors, **settings): raise SystemExit("a kernel was started")

import sys
sys.modules[__name__].__class__ = type("Any", (type(sys),), {"__getattr__": lambda *_: Kernel()})
"""
COUNT = """
import sys, torch
from transformers import AutoConfig
from transformers.models.qwen3_5 import modeling_qwen3_5
from common.model.saved_bytes import count_saved_of
from common.sampling.recurrent_cache import count_state_bytes
config = AutoConfig.from_pretrained(sys.argv[1])
print(count_state_bytes(config, torch.float32), sum(count_saved_of(config, 8)))
modeling_qwen3_5.torch_chunk_gated_delta_rule(*[torch.zeros(1, 1, 1, 1)] * 5)
"""


@pytest.mark.thorough
def test_memory_is_counted_without_the_kernels_of_other_packages(tmp_path):
    (tmp_path / "fla.py").write_text(PACKAGE)
    given = made(tmp_path / "model", "qwen3_5_text", **SIZES | KINDS["qwen3_5_text"])
    paths = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-c", COUNT, str(given.path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=paths)
    model = load_model(given, None, torch.float32, CPU, progress=False)[0]
    counted = f"{count_state_bytes(model.config, torch.float32)} {sum(count_saved(model, 8))}"
    assert ended.stdout.split() == counted.split(), ended.stderr
    assert "a kernel was started" in ended.stderr, "it would have been, on numbers"


@pytest.mark.parametrize(("name", "refused"), [("qwen3_5_text", True), ("lfm2", False)])
def test_repeatable_gradients_of_running_sums_are_refused(tmp_path, name, refused):
    config = build(tmp_path, name).config
    check_repeatable(config, Precision(torch.float32))
    if not refused:
        check_repeatable(config, Precision(torch.float32, repeatable=True))
        return
    refuses(
        lambda: check_repeatable(config, Precision(torch.float32, repeatable=True)),
        key="opt",
        value="deterministic",
    )


@pytest.mark.parametrize(
    ("capability", "dtype", "kind", "waits"),
    [
        ((9, 0), torch.bfloat16, "grouped_mm", False),
        ((9, 0), torch.float32, "grouped_mm", True),
        ((9, 0), torch.bfloat16, "eager", True),
        ((8, 0), torch.bfloat16, "grouped_mm", True),
    ],
)
def test_experts_that_wait_for_the_host_are_not_recorded(
    capability, dtype, kind, waits, monkeypatch
):
    """Of a device that is not here: only its name and that of the kernel are asked for."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    expert, cuda = SimpleNamespace(dtype=dtype), torch.device("cuda", 0)
    model: Any = SimpleNamespace(
        config=SimpleNamespace(_experts_implementation=kind),
        named_parameters=lambda: iter([("layers.0.mlp.experts.gate_up_proj", expert)]),
    )
    assert waits_for_experts(model, cuda) == waits
    assert not waits_for_experts(model, CPU)
    model.named_parameters = lambda: iter([("layers.0.mlp.up_proj.weight", expert)])
    assert not waits_for_experts(model, cuda)
