"""The sharding of whole weights, which does nothing."""

import inspect

import torch

from common.distributed import Sharding, full_tensor, is_sharded, sharding_of
from common.distributed.fsdp import Sharded


def test_whole_weights_are_left_alone():
    model, tensor = torch.nn.Linear(3, 2), torch.ones(2, 3)
    sharding = sharding_of(model)
    assert not sharding.shared
    assert sharding.ranks == 1
    with sharding.gathered():
        assert sharding.inside(lambda *of: of, 1) == (model, 1)
    with sharding.inference():
        assert torch.is_inference_mode_enabled()
    assert sharding.whole() is None
    assert sharding.rows(tensor) == range(2)
    for same in (sharding.local, sharding.total, full_tensor, lambda x: sharding.like(x, x)):
        assert same(tensor) is tensor
    assert not is_sharded(tensor)
    sizes = sharding.gathered_bytes(True), sharding.gathered_bytes(False), sharding.gradient_bytes()
    assert sizes == (0, 0, 0)
    assert sharding.describe(1.0) == ""


def test_no_model_has_nothing_to_gather():
    with sharding_of(None).gathered():
        pass


def test_sharded_weights_have_an_answer_to_all_that_whole_ones_skip():
    asked = {name for name, _ in inspect.getmembers(Sharding, inspect.isfunction)}
    assert asked <= set(vars(Sharded))
