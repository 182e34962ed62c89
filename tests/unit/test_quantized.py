"""model.quantize: linear layers in few bits."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.config import ConfigError
from common.model.load import load_model
from common.model.packed_linear import packed, packs
from common.model.quantized import (
    BLOCK,
    NF4,
    QuantizedLinear,
    dequantize,
    forward_bytes,
    layers,
    packed_away,
    quantize,
    replace_layers,
)
from launch import compose
from tests.support import CONF
from tests.support.models import small_model
from tests.support.refusals import refuses

KINDS = ("int8", "nf4")
# What bitsandbytes 0.50 makes of the lower half of 128 numbers from -1 to 1.
BYTES = [0, 0, 0, 0, 0, 17, 17, 17, 17, 17, 17, 17, 18, 34, 34, 34, 34, 35, 51, 51, 51, 68, 68, 68]
BYTES += [69, 85, 85, 86, 102, 102, 103, 119]


def naive(weight, kind):
    """Round number by number."""
    rows = weight.tolist() if kind == "int8" else weight.flatten().split(BLOCK)
    found = []
    for row in rows:
        row = [float(number) for number in row]
        largest = max(map(abs, row))
        if kind == "int8":
            found += [round(number / (largest / 127)) * largest / 127 for number in row]
        else:
            nearest = (min(NF4, key=lambda q: abs(q - number / largest)) for number in row)
            found += [q * largest for q in nearest]
    return torch.tensor(found).view(weight.shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(6, 64), (5, 23)])
def test_numbers_are_those_of_a_loop(kind, shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = dequantize(*quantize(weight, kind), shape, torch.float32)
    torch.testing.assert_close(found, naive(weight, kind))


def test_zeros_stay_zeros():
    for kind in KINDS:
        whole, scale = quantize(torch.zeros(2, 64), kind)
        assert not dequantize(whole, scale, (2, 64), torch.bfloat16).any()


def test_nf4_is_that_of_bitsandbytes():
    """By its bytes of some numbers, and by the package where there is one."""
    weight = torch.linspace(-1, 1, 128).view(2, 64)
    whole, scale = quantize(weight, "nf4")
    assert whole.flatten().tolist()[:32] == BYTES
    assert scale.flatten().tolist() == [1.0, 1.0]
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(64, 96)
    theirs, state = functional.quantize_4bit(weight, quant_type="nf4", blocksize=BLOCK)
    whole, scale = quantize(weight, "nf4")
    assert torch.equal(theirs.flatten(), whole.flatten())
    assert torch.equal(state.absmax, scale.flatten())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("amp", [False, True])
def test_a_quantized_layer_equals_a_rounded_plain_layer(kind, amp):
    torch.manual_seed(0)
    layer = nn.Linear(40, 24).requires_grad_(False)
    small = QuantizedLinear(layer, kind)
    dtype = torch.bfloat16 if amp else torch.float32
    plain = copy.deepcopy(layer)
    plain.weight.data = small.plain(dtype).float()
    x = torch.randn(3, 5, 40, requires_grad=True)
    found, kept = [], []
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            found.append(small(x))
        found.append(plain(x))
    assert sum(t.numel() for t in kept) == small.weight.numel() + small.scale.numel()
    grads = [torch.autograd.grad(y.float().square().sum(), x)[0] for y in found]
    for one, other in (found, grads):
        torch.testing.assert_close(one, other)
    assert found[0].dtype == dtype


@pytest.mark.parametrize("kind", KINDS)
def test_models_are_quantized_weight_by_weight(tmp_path, in_cache, kind):
    """Peak: what stays, and one weight of it in float32; the same numbers as rounded afterwards."""
    own = ["algo=grpo", "model.adapter.rank=2", "model.tiny.pretrain_steps=0", "hardware=cpu"]
    run = compose([*own, "model.tiny.layers=8"], CONF)
    plain, tokenizer = load_model(run.model, None, torch.bfloat16, torch.device("cpu"))
    plain.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    own = ["algo=grpo", "model=hf", f"model.path={tmp_path}", "model.adapter.rank=2"]
    config = compose([*own, f"model.quantize={kind}", "hardware=cpu"], CONF).model
    tracker = MemTracker()
    with tracker:
        model, _ = load_model(config, None, torch.bfloat16, torch.device("cpu"))
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    largest = max(m.in_features * m.out_features for m in layers(model).values())
    assert peak < held + 5 * 4 * largest
    assert held + 5 * 4 * largest < sum(p.nbytes for p in plain.parameters()), (
        "else it says nothing"
    )
    count = sum(p.numel() for p in plain.parameters())
    replace_layers(plain, kind, "model.quantize")
    wanted = plain.state_dict()
    assert model.state_dict().keys() == wanted.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name
    assert not hasattr(model.config, "quantization_config")
    with torch.device("meta"):
        shapes, _ = load_model(config, None, torch.bfloat16, torch.device("meta"))
    for name, tensor in shapes.state_dict().items():
        assert (tensor.shape, tensor.dtype) == (wanted[name].shape, wanted[name].dtype)
    assert sum(p.numel() for p in model.parameters()) + packed_away(model) == count


@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_are_the_rounded_ones(kind):
    model = small_model("llama").bfloat16()
    if not packs(model.device, model.dtype):
        pytest.skip("this CPU does not multiply bfloat16")
    replace_layers(model, kind, "model.quantize")
    ids = torch.arange(5, 13)[None]
    with torch.no_grad():
        wanted = model(ids).logits
        with packed(model):
            assert all("packed" in layer.__dict__ for layer in layers(model).values())
            found = model(ids).logits
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05)


def test_layers_of_another_kind_are_told():
    refuses(
        lambda: replace_layers(small_model("gpt2"), "nf4", "model.quantize"),
        key="model.quantize",
        value="nf4",
    )


def test_what_is_quantised_already_is_told(tmp_path, in_cache):
    small_model("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    given = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    path.write_text(json.dumps(given))
    own = ["algo=grpo", "model=hf", f"model.path={tmp_path}", "model.adapter.rank=2"]
    config = compose([*own, "model.quantize=nf4", "hardware=cpu"], CONF).model
    for kind in ("nf4", None):
        with pytest.raises(
            ConfigError, match=r"is quantised already, .* with model\.quantize for few"
        ):
            load_model(replace(config, quantize=kind), None, torch.bfloat16, torch.device("cpu"))


class Moved(TorchDispatchMode):
    """Counts the bytes that operations read and write."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view and not func.overloadpacket.__name__.startswith("empty"):
            leaves = tree_leaves((args, kwargs or {}, out))
            once = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
            self.bytes += sum(t.numel() * t.dtype.itemsize for t in once.values())
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_planned_bytes_of_a_forward_are_those_that_it_moves(kind):
    """Of one row, whose own numbers are few beside the weights."""
    plain = nn.Linear(512, 512, bias=False)
    layer = QuantizedLinear(plain, kind)
    wanted = forward_bytes(nn.Sequential(layer), 512 * 512, 2)
    x = torch.zeros(1, 512, dtype=torch.bfloat16)
    with torch.no_grad():
        layer(x)  # the table of nf4
        with Moved() as moved:
            layer(x)
    assert wanted / 1.3 < moved.bytes < wanted * 1.3
