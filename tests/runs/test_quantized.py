"""model.quantize: runs on a base in few bits."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from common.config import ConfigError
from common.model.quantized import dequantize, layers, quantize
from launch import compose, train
from tests.support import CONF, MOVING, SMALL_GRPO, SMALL_RFT, events

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

ADAPTER = "model.adapter={rank: 4}"
GRPO = [*SMALL_GRPO, ADAPTER, "algo.lr=1e-2", "algo.kl.beta=0.1", "evaluate.every=0"]
GRPO += ["algo.resample_rounds=0"]
EGGROLL = [*MOVING, ADAPTER]
RFT = [*SMALL_RFT, ADAPTER, "algo.iterations=1", "algo.lr=5e-3"]
AMP = "opt=[amp]"
INT8, NF4 = "model.quantize=int8", "model.quantize=nf4"


def run(folder, *overrides):
    return train(compose([*overrides, "hardware=cpu"], CONF), folder)


def matrices(folder):
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def same(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("settings", [[*GRPO, NF4], [*RFT, INT8, AMP], [*EGGROLL, NF4]])
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


@pytest.mark.parametrize(("more", "largest"), [([NF4], 1e-6), ([INT8, AMP], 2e-3)])
def test_what_samples_is_what_learns(tmp_path, more, largest):
    run(tmp_path / "out", *GRPO, *more)
    gaps = [event["sampler_gap"] for event in events(tmp_path / "out") if "sampler_gap" in event]
    assert len(gaps) == 4
    assert max(gaps) < largest


@pytest.mark.parametrize("settings", [[*GRPO, NF4, AMP], [*EGGROLL, INT8, AMP]])
def test_a_run_in_two_parts_ends_as_a_whole_one(tmp_path, settings):
    run(tmp_path / "whole", *settings)
    run(tmp_path / "parts", *settings, "algo.steps=2")
    saved = load_file(next(tmp_path.glob("parts/checkpoints/*2/tensors.safetensors")))
    assert all("lora_" in name for name in saved)
    run(tmp_path / "parts", *settings, "resume=auto")
    same(matrices(tmp_path / "whole"), matrices(tmp_path / "parts"))


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
        (["algo=grpo", ADAPTER, "model.quantize=nf5"], "model.quantize='nf5' is not a choice"),
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
