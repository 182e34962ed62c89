import math

import pytest
import torch

from common.sampling import random
from common.sampling.random import normals, token_uniforms, uniform

# Known answers of Random123 (kat_vectors, philox4x32-10).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter, key, expected):
    words = random.philox(tuple(torch.tensor([c]) for c in counter), key)
    assert tuple(int(w) for w in words) == expected


def draw(seed=0, step=0, parameter=0, blocks=range(64), directions=range(8)):
    block = torch.tensor(list(blocks))
    direction = torch.tensor(list(directions))
    out = torch.empty(len(direction), 4 * len(block))
    return normals(seed, step, torch.full_like(block, parameter), block, direction, out)


def test_normals_are_a_function_of_their_address(monkeypatch):
    whole = draw()
    assert torch.equal(draw(directions=[5]), whole[5:6])
    assert torch.equal(draw(blocks=range(10, 20)), whole[:, 40:80])
    monkeypatch.setitem(random.SLICE, "cpu", 16)
    assert torch.equal(draw(), whole)


@pytest.mark.parametrize("other", [{"seed": 1}, {"seed": 1 << 40}, {"step": 1}, {"parameter": 1}])
def test_another_address_is_another_draw(other):
    first, second = draw(blocks=range(4096)), draw(blocks=range(4096), **other)
    correlation = (first * second).mean() * math.sqrt(first.numel())
    assert abs(correlation) < 5


def test_normals_are_normal():
    values = draw(blocks=range(1 << 16)).double().flatten()  # 2M
    n = values.numel()
    assert abs(values.mean()) < 5 / math.sqrt(n)
    assert abs(values.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((values**4).mean() - 3) < 5 * math.sqrt(96 / n)
    assert abs((values < -1.959964).double().mean() - 0.025) < 5 * math.sqrt(0.025 / n)
    assert torch.isfinite(values).all()


def test_uniforms_cover_the_interval():
    assert uniform(torch.tensor([0])).item() == 0
    assert uniform(torch.tensor([0xFFFFFFFF])).item() == 1 - 2**-24
    u = token_uniforms(3, 0, torch.arange(500), torch.zeros(500, dtype=torch.long), 40)
    assert u.shape == (500, 40)
    assert abs(u.mean() - 0.5) < 5 * math.sqrt(1 / 12 / u.numel())
    assert not torch.equal(
        u, token_uniforms(3, 1, torch.arange(500), torch.zeros(500, dtype=torch.long), 40)
    )


@pytest.mark.parametrize("first", [3, torch.arange(300)])
def test_uniforms_of_many_tokens_are_made_in_slices(first, monkeypatch):
    """Their int64 words would take 48 bytes a token otherwise, of which no plan knows."""
    made, plain = [], random.philox
    monkeypatch.setattr(
        random,
        "philox",
        lambda *a: made.append(torch.broadcast_tensors(*a[0])[0].numel()) or plain(*a),
    )
    prompts, samples = torch.arange(300), torch.arange(300) % 7
    whole = token_uniforms(3, 5, prompts, samples, 40, first)
    assert made == [12000]
    monkeypatch.setattr(random, "SLICE", {"cpu": 1000})
    assert torch.equal(token_uniforms(3, 5, prompts, samples, 40, first), whole)
    assert max(made[1:]) <= 1000
    begun = 3 if isinstance(first, int) else 17
    alone = token_uniforms(3, 5, prompts[17:18], samples[17:18], 1, begun + 9)
    assert alone == whole[17, 9], "an address is enough"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_draws_the_same():
    block, direction = torch.arange(4096), torch.arange(16)
    parameter = torch.full_like(block, 7)
    here = normals(1, 2, parameter, block, direction, torch.empty(16, 4 * 4096))
    there = normals(
        1,
        2,
        parameter.cuda(),
        block.cuda(),
        direction.cuda(),
        torch.empty(16, 4 * 4096, device="cuda"),
    ).cpu()
    torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-6)
    prompts = torch.arange(100)
    assert torch.equal(
        token_uniforms(1, 2, prompts, prompts, 9),
        token_uniforms(1, 2, prompts.cuda(), prompts.cuda(), 9).cpu(),
    )
