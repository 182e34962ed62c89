"""What a plan says of a vLLM's memory, the settings of the engine, and what is sent to it."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.config import ConfigError
from launch import compose
from plugins.vllm.client import OVERHEAD_GB, Vllm
from tests.runs import test_plan
from tests.runs.test_plan import FEW, SHAPES, plan
from tests.support.models import small_model

pytestmark = pytest.mark.run
models = test_plan.models  # a fixture


def test_a_setting_of_the_engine_needs_it():
    with pytest.raises(ConfigError) as caught:
        compose(["engine.python=.vllm/bin/python"])
    assert str(caught.value) == (
        "engine.python=.vllm/bin/python has no effect with engine=native. It is a setting of"
        " engine=vllm. Leave it out, or choose that."
    )


def test_the_name_of_the_version_before_is_found():
    run = compose(["engine=vllm", "engine._target_=common.sampling.remote.client.open_vllm"])
    assert run.engine == compose(["engine=vllm"]).engine


@pytest.mark.thorough
def test_a_vllm_that_sleeps_lends_its_memory(models):
    """While the model is trained, but for what vLLM cannot give back; a rollout takes the same."""
    model = ["algo=grpo", "model=hf", f"model.path={models['3b']}", *FEW]
    engine = ["hardware=a100_80g", "engine=vllm", "engine.python=x", "engine.cache_gb=40"]
    awake = plan(*model, *engine)
    asleep = plan(*model, *engine, "+engine.settings.enable_sleep_mode=true")
    held = float(re.findall(r"([0-9.]+) GB while", awake.rows["engine"])[0])
    lent = float(re.findall(r"([0-9.]+) GB while", asleep.rows["engine"])[0])
    assert held > 40 + OVERHEAD_GB
    assert lent == OVERHEAD_GB
    assert 0 < awake.peak_gb - asleep.peak_gb <= held - lent


def test_the_adapters_of_a_vllm_are_in_its_memory(models):
    """It has room for each member at every matrix and at the output layer, in bfloat16, and for
    rank eight where two is wanted.
    """
    model = ["algo=eggroll", "model=hf", f"model.path={models['3b']}", "opt=[amp]"]
    engine = ["hardware=a100_80g", "engine=vllm", "engine.python=x"]

    def held(*settings):
        shown = plan(*model, *engine, *settings).rows["engine"]
        return float(re.findall(r"([0-9.]+) GB while", shown)[0]) * 2**30

    config = SHAPES["3b"]
    hidden, wide, keys = config.hidden_size, config.intermediate_size, 256
    block = 2 * (hidden + hidden) + 2 * (hidden + keys) + 3 * (hidden + wide)
    sides = config.num_hidden_layers * block + 2 * (config.vocab_size + hidden)
    more = held("algo.rank=2", "algo.members=128") - held("algo.rank=2", "algo.members=64")
    assert more == pytest.approx(64 * 8 * sides * 2, abs=0.1 * 2**30)


def fetched_bytes():
    """Return the bytes that are copied to the host where vLLM is sent float32 weights in bfloat16,
    and how many weights there are.
    """

    class Fetched(TorchDispatchMode):
        moved = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default and args[0].is_cuda and not out.is_cuda:
                self.moved += args[0].nbytes
            return out

    model = small_model("llama").to("cuda:0")
    engine = SimpleNamespace(model=model, adapter=None, dtype=torch.bfloat16)
    with Fetched() as fetched:
        sent = Vllm.read_weights(engine)
    assert {tensor.dtype for tensor in sent.values()} == {torch.bfloat16}
    return fetched.moved, sum(tensor.numel() for tensor in sent.values())


def test_weights_for_another_engine_are_cast_before_they_are_copied(standin):
    moved, count = standin.call(fetched_bytes)
    assert moved == 2 * count
