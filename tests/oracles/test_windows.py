"""Sequences that are longer than the window of a model's sliding attention: samples are those of
`generate`, and log-probabilities and gradients those of the model's own forward.
"""

import copy
from dataclasses import replace

import pytest
import torch

from common.engine import Population, Requests
from common.memory.arithmetic import BatchShape, activation_bytes
from common.model import attention
from common.model.load import load_model
from common.model.logprobs import prepare
from common.model.masks import find_window
from common.sampling.native import Sampler
from eggroll.config import NoiseConfig
from eggroll.noise import Noise
from tests.oracles.test_architectures import made
from tests.oracles.test_logprobs import CPU, check_unpadded, data, data_that_opens_alike
from tests.support.models import check_greedy, prompts, prompts_that_open_alike, sampling
from tests.unit.test_graphs import Tape, same

SIZE = 8
# All layers, or five of six, or the upper one of two.
UPPER = {"use_sliding_window": True, "max_window_layers": 1}
MODELS = {"mistral": {}, "gemma3_text": {}, "qwen2": UPPER, "phi3": {}, "gemma4_text": {}}
STOPS = {"pad_id": 96, "stop_ids": (11, 12)}


@pytest.fixture(
    params=[
        "mistral",
        pytest.param("gemma3_text", marks=pytest.mark.run),
        *(pytest.param(name, marks=pytest.mark.thorough) for name in list(MODELS)[2:]),
    ]
)
def model(request, tmp_path) -> torch.nn.Module:
    changes = MODELS[request.param] | {"sliding_window": SIZE}
    given = made(tmp_path, request.param, **changes)
    loaded = load_model(given, None, torch.float32, CPU, progress=False)[0].eval()
    assert find_window(loaded.config, SIZE) is None
    assert find_window(loaded.config, SIZE + 1) is not None
    return loaded


def widened(model: torch.nn.Module) -> torch.nn.Module:
    """The same model with a window that all sequences here lie within."""
    wide = copy.deepcopy(model)
    for module in wide.modules():
        for owner in (module, getattr(module, "config", None)):
            if getattr(owner, "sliding_window", None):
                owner.sliding_window = 1000
    return wide


@pytest.mark.parametrize("rows", [2, 8])
def test_it_samples_as_generate_does(model, rows):
    sampler = Sampler(model, rows=rows, **STOPS)
    completions = sampler.generate(Requests(prompts=prompts()), sampling())
    check_greedy(model, completions)
    other = Sampler(widened(model), rows=rows, **STOPS)
    plain = other.generate(Requests(prompts=prompts()), sampling())
    assert not torch.equal(completions.tokens, plain.tokens), "the window changes nothing"
    several = sampler.generate(Requests(prompts=prompts(), samples=3), sampling())
    check_greedy(model, several.take(range(0, 15, 3)))


def test_recorded_steps_are_the_same(model, monkeypatch):
    plain = Sampler(model, rows=4, **STOPS)
    recorded = Sampler(model, rows=4, **STOPS)
    recorded.recorder = Tape
    monkeypatch.setattr("common.distributed.Sharding.inference", lambda _: torch.no_grad())
    asked = Requests(prompts=prompts(), logprobs=True)
    same(recorded.generate(asked, sampling(0.7)), plain.generate(asked, sampling(0.7)))


def test_prompts_that_open_alike(model):
    alike = prompts_that_open_alike()
    sampler = Sampler(model, rows=4, **STOPS)
    together = sampler.generate(Requests(prompts=alike, logprobs=True), sampling())
    for place, prompt in enumerate(alike):
        alone = sampler.generate(Requests(prompts=[prompt], logprobs=True), sampling())
        same(alone, together.take([place]))


def check_pairs(sampler, noise, alike) -> None:
    """Assert that members sample together as each mirrored pair does alone. alike: compares."""

    def sample(members):
        with noise.members(0, members, sigma=0.1):
            some = Population(members=len(members))
            asked = Requests(prompts=prompts(), population=some, logprobs=True)
            return sampler.generate(asked, sampling())

    together, each = sample(range(4)), len(prompts())
    for member in range(0, 4, 2):  # a mirrored pair
        pair = sample(range(member, member + 2))
        alike(pair, together.take(range(member * each, (member + 2) * each)))


def test_windows_of_members_equal_those_of_a_pair(model):
    config = NoiseConfig(
        matrices="lowrank", vectors="full", embeddings="frozen", head="frozen", patterns={}
    )
    noise = Noise(model, config, rank=2, mirrored=True, seed=5)
    check_pairs(Sampler(model, rows=8, **STOPS), noise, same)


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("fused", [True, False])
def test_log_probabilities_are_the_models(model, alike, fused, monkeypatch):
    if not fused:
        monkeypatch.setattr(attention, "fits", lambda *_: False)
    other = copy.deepcopy(model)
    prepare(model)
    check_unpadded(model, other, *(data_that_opens_alike() if alike else data()), 1.0, 1e-4)


def test_a_window_that_the_model_does_not_look_at(tmp_path):
    """As a Llama's config may have one from elsewhere."""
    given = made(tmp_path, "llama", sliding_window=SIZE)
    model = load_model(given, None, torch.float32, CPU, progress=False)[0].eval()
    assert find_window(model.config, 99) is None
    other = copy.deepcopy(model)
    prepare(model)
    check_unpadded(model, other, *data(), 1.0, 1e-4)


def test_masks_of_both_kinds_are_counted(model):
    within = BatchShape(2, SIZE // 2, 8, SIZE // 2, torch.float32)
    beyond = replace(within, new_tokens=SIZE // 2 + 1)
    wide = widened(model)
    assert activation_bytes(model, within, False) == activation_bytes(wide, within, False)
    assert activation_bytes(model, beyond, False) > activation_bytes(wide, beyond, False)
