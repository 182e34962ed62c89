"""model.adapter: low-rank matrices that are trained in place of the weights, for every algorithm."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from common import checkpoint
from common.config import AdapterConfig, ConfigError
from common.lm import LM
from launch import compose, train
from tests.support import CONF, MOVING, SMALL_GRPO, SMALL_RFT, events

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

ADAPTER = "model.adapter={rank: 4}"
GRPO = [*SMALL_GRPO, ADAPTER, "algo.lr=1e-2", "algo.kl.beta=0.1", "evaluate.every=2"]
GRPO += ["algo.resample_rounds=0"]
EGGROLL = [*MOVING, ADAPTER]
RFT = [*SMALL_RFT, ADAPTER, "algo.iterations=1", "algo.lr=5e-3"]
AMP = "opt=[amp]"


def run(folder, *overrides):
    return train(compose([*overrides, "hardware=cpu"], CONF), folder)


def matrices(folder):
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def same(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("settings", [GRPO, [*GRPO, AMP], EGGROLL, [*EGGROLL, AMP], RFT])
def test_a_run_trains_the_adapter_alone(tmp_path, settings):
    result = run(tmp_path / "out", *settings, "model.adapter.merge=true")
    base = AutoModelForCausalLM.from_pretrained(
        json.loads((tmp_path / "out/adapter/adapter_config.json").read_text())[
            "base_model_name_or_path"
        ]
    )
    if AMP in settings:  # the run has held it like this
        base = base.bfloat16().float()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out/model")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "out/adapter").eval()
    again, tokenizer = result.model_and_tokenizer()
    ids = torch.tensor([tokenizer("ab => abab")["input_ids"]])
    with torch.no_grad():
        wanted = loaded(ids).logits
        torch.testing.assert_close(merged(ids).logits, wanted, rtol=1e-5, atol=1e-5)
        if AMP not in settings:
            torch.testing.assert_close(again(ids).logits, wanted, rtol=1e-5, atol=1e-5)
        with loaded.disable_adapter():
            assert not torch.allclose(loaded(ids).logits, wanted, atol=1e-3)
    found = matrices(tmp_path / "out")
    assert all("lora_" in name for name in found)
    assert any(tensor.any() for name, tensor in found.items() if "lora_B" in name)
