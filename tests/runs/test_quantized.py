"""model.quantize: runs on a base in few bits."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from common.config import ConfigError
from common.model.export import empty_like, export_model
from common.model.load import load_model
from common.model.quantized import (
    QuantizedLinear,
    dequantize,
    layers,
    plain_weights,
    quantize,
)
from eggroll.weights import Fixed
from launch import compose
from tests.support import CONF, SMALL, adapters, events
from tests.support.adapters import ADAPTER, AMP, EGGROLL, RFT, matrices, run, same

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.usefixtures("emulated_bf16"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

GRPO = [*adapters.GRPO, "evaluate.every=0"]
INT8, NF4 = "model.quantize=int8", "model.quantize=nf4"


@pytest.mark.parametrize(
    "settings",
    [
        [*GRPO, NF4],
        pytest.param([*RFT, INT8, AMP], marks=pytest.mark.thorough),
        pytest.param([*EGGROLL, NF4], marks=pytest.mark.thorough),
    ],
)
def test_an_adapter_is_learnt_on_rounded_weights(tmp_path, settings):
    """What peft makes of the rounded weights and RUN/adapter is RUN/model."""
    result = run(tmp_path / "out", *settings, "model.adapter.merge=true")
    name = json.loads((tmp_path / "out/adapter/adapter_config.json").read_text())
    base = AutoModelForCausalLM.from_pretrained(name["base_model_name_or_path"])
    kind = compose(settings, CONF).model.quantize
    for name, module in base.named_modules():
        if type(module) is torch.nn.Linear and name != "lm_head":
            weight = module.weight.data
            weight = weight.bfloat16() if AMP in settings else weight
            module.weight.data = dequantize(*quantize(weight, kind), weight.shape, torch.float32)
    plain = peft.PeftModel.from_pretrained(base, tmp_path / "out/adapter").eval()
    merged, tokenizer = result.model_and_tokenizer()
    assert not layers(merged)
    ids = torch.tensor([tokenizer("ab => abab")["input_ids"]])
    near = {"rtol": 0.03, "atol": 0.03} if AMP in settings else {"rtol": 1e-5, "atol": 1e-5}
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, plain(ids).logits, **near)
    assert any(t.any() for n, t in matrices(tmp_path / "out").items() if "lora_B" in n)
    if settings[: len(RFT)] == RFT:
        assert result.after > result.before + 50, "it has learnt on the rounded weights"


@pytest.mark.thorough
@pytest.mark.parametrize(("more", "largest"), [([NF4], 1e-6), ([INT8, AMP], 2e-3)])
def test_what_samples_is_what_learns(tmp_path, more, largest):
    run(tmp_path / "out", *GRPO, *more)
    gaps = [event["sampler_gap"] for event in events(tmp_path / "out") if "sampler_gap" in event]
    assert len(gaps) == 4
    assert max(gaps) < largest


@pytest.mark.parametrize(
    "settings",
    [pytest.param([*GRPO, NF4, AMP], marks=pytest.mark.thorough), [*EGGROLL, INT8, AMP]],
)
def test_a_run_in_two_parts_ends_as_a_whole_one(tmp_path, settings):
    run(tmp_path / "whole", *settings, "checkpoint.every=2")
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts/checkpoints/step-00000004")
    shutil.rmtree(tmp_path / "parts/adapter")
    saved = load_file(next(tmp_path.glob("parts/checkpoints/*2/tensors.safetensors")))
    assert all("lora_" in name for name in saved)
    run(tmp_path / "parts", *settings, "checkpoint.every=2", "resume=auto")
    same(matrices(tmp_path / "whole"), matrices(tmp_path / "parts"))


@pytest.mark.thorough
def test_two_ranks_make_the_adapter_of_one(launch, tmp_path):
    own = ["--config-dir", CONF, *GRPO, NF4, "algo.optimizer.name=SGD", "algo.lr=0.3"]
    launch(*own, "hydra.run.dir=one")
    launch(*own, "opt=[ddp]", "opt.ddp.ranks=2", "hydra.run.dir=two")
    one, two = matrices(tmp_path / "one"), matrices(tmp_path / "two")
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["algo=grpo", NF4], "model.quantize=nf4 needs model.adapter.rank, for example 16"),
        (["algo=eggroll", NF4], "Or use model.quantize=int8, which is moved itself."),
        (["algo=grpo", ADAPTER, "model.quantize=nf5"], "model.quantize=nf5 is not a choice"),
        (
            ["algo=rft", "model=gguf", "model.path=x", "model.gguf_file=y.gguf", ADAPTER, INT8],
            "model.quantize=int8 does not go with model.gguf_file",
        ),
        (["algo=rft", ADAPTER, INT8, "opt=[fsdp]"], "does not go with opt=fsdp, which shares out"),
        (["algo=classify", INT8], "model"),
    ],
)
def test_settings_that_do_not_go_together(overrides, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        compose([*overrides, "hardware=cpu"], CONF)


# --- EGGROLL, which moves whole numbers themselves


def test_updates_below_a_step_add_up():
    """A thousand updates of a thousandth of a step, where rounding each would move nothing."""
    layer = QuantizedLinear(torch.nn.Linear(64, 8), "int8")
    fixed, before = Fixed(layer, offload=False), layer.weight.clone()
    start = fixed.read()
    assert torch.equal(start, layer.plain(torch.float32))
    down = (before.float().sign() * layer.scale) / 1000  # away from the ends of the range
    for count in range(1, 1001):
        fixed.write(fixed.read() - down)
        if count == 400:
            assert torch.equal(layer.weight, before)
    assert torch.equal(layer.weight, before - before.sign())
    torch.testing.assert_close(
        fixed.read(), start - 1000 * down, rtol=0, atol=1e-2 * layer.scale.min()
    )


def test_quantized_weights_follow_the_float32_update(tmp_path, in_cache):
    """One step of SGD from the same rounded weights, where both had the same rewards."""
    given = [*SMALL, "algo.steps=1", "algo.sigma=0.1", "algo.lr=0.01", "evaluate.every=0"]
    given.append("algo.sampling.temperature=1.0")
    run(tmp_path / "whole", *given, INT8)
    base = rounded(given, tmp_path / "base")
    again = [text for text in given if "model.tiny" not in text]
    run(tmp_path / "float", *again, "model=hf", f"model.path={base}", "algo.noise.matrices=lowrank")
    one, two = (
        load_file(next(tmp_path.glob(f"{name}/checkpoints/*1/tensors.safetensors")))
        for name in ("whole", "float")
    )
    rewards = [events(tmp_path / name)[0]["reward"] for name in ("whole", "float")]
    assert rewards[0] == rewards[1]
    start = load_file(base / "model.safetensors")
    names = [name for name in one if name.endswith(".rest")]
    assert len(names) > 4
    for rest in names:
        name = rest.removesuffix(".rest")
        scale = start[name].abs().amax(1, keepdim=True) / 127
        found = (one[name].float() + one[rest].float() / Fixed.STEP) * scale
        inside = two[name].abs() < 127.4 * scale
        assert (two[name] - start[name]).abs().max() > 3e-5
        assert ((found - two[name]).abs() <= 2e-5 * scale)[inside].all()
    exported = load_file(tmp_path / "whole/model/model.safetensors")
    assert exported[name].dtype == torch.float32
    torch.testing.assert_close(exported[name], one[name].float() * scale)


def rounded(given, folder):
    """Write the model of a run with its linear layers rounded. Returns the folder."""
    config = compose([*given, "hardware=cpu", INT8], CONF)
    model, tokenizer = load_model(config.model, None, torch.float32, torch.device("cpu"))
    export_model(empty_like(model), tokenizer, folder, plain_weights(model))
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize(
    "more", [[AMP], ["algo.optimizer.name=Adam"], ["algo.optimizer.name=Adagrad"]]
)
def test_quantized_runs_resume_exactly(tmp_path, more):
    settings = [*SMALL, "algo.sigma=0.1", "algo.lr=0.01", INT8, "algo.weight_decay=0.1", *more]
    run(tmp_path / "whole", *settings)
    run(tmp_path / "parts", *settings, "algo.steps=2")
    run(tmp_path / "parts", *settings, "resume=auto")
    same(*(load_file(tmp_path / f / "model/model.safetensors") for f in ("whole", "parts")))
