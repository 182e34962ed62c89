"""Philox4x32-10, the counter-based generator of Salmon et al., "Parallel Random Numbers: As Easy as
1, 2, 3" (SC'11).

A draw is a pure function of its address (key and counter): nothing is stored, nothing depends on
order, batch, device or rank. Written in int64 tensor operations, so the bits are the same on CPU
and CUDA; normals agree to float32 rounding.
"""

import math

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)

# The second half of the key is XORed with one of these, so that two uses of one seed never share a
# draw.
TOKENS = 0x746F6B65  # which token is sampled
NOISE = 0x6E6F6973  # the noise on a parameter


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, ...]:
    """Return four random 32-bit words for each counter.

    Args:
        counter: four int64 tensors that broadcast to one shape [...], values in [0, 2**32).
        key: two 32-bit numbers.
    Returns: four int64 tensors [...], values in [0, 2**32).
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    c0, c1, c2, c3 = c0.clone(), c1.clone(), c2.clone(), c3.clone()
    k0, k1 = key
    for _ in range(10):
        # A 32 x 32 bit product wraps in a signed 64-bit number, but its bits are right. Low halves
        # are left unmasked until they meet a high half below: one mask a word and round instead of
        # two.
        p0, p1 = c0.mul_(MULTIPLIERS[0]), c2.mul_(MULTIPLIERS[1])
        c0 = (p1 >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(MASK)
        c2 = (p0 >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(MASK)
        c1, c3 = p1, p0
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1 & MASK, c2, c3 & MASK


def key_of(seed: int, purpose: int) -> tuple[int, int]:
    """Return the 64-bit key of a seed (any integer below 2**63) and one of this
    module's purposes.
    """
    return seed & MASK, ((seed >> 32) ^ purpose) & MASK


def uniform(word: Tensor) -> Tensor:
    """Turn 32-bit words [...] into float32 numbers in [0, 1), multiples of 2**-24."""
    return (word >> 8).float().mul_(2**-24)


# Words per slice: the int64 intermediates of a slice stay in the CPU's second-level cache.
SLICE = {"cpu": 1 << 16, "cuda": 1 << 24}


def token_uniforms(
    seed: int,
    draw: int,
    prompt: Tensor,
    sample: Tensor,
    positions: int,
    first: Tensor | int = 0,
) -> Tensor:
    """Return the uniform number behind each sampled token: a function of (seed, draw, prompt,
    sample, position) alone.

    Args:
        draw: distinguishes visits to one prompt, for example the step; below 2**32.
        prompt: int64 [N], prompt ids below 2**32.
        sample: int64 [N], sample ids below 2**32.
        positions: the number of tokens.
        first: the position of the first token, one number or int64 [N].
    Returns: float32 [N, positions] in [0, 1).
    """
    device, key = prompt.device, key_of(seed, TOKENS)
    places, word = torch.arange(positions, device=device), torch.tensor(draw, device=device)
    begun = first if isinstance(first, Tensor) else torch.full_like(prompt, first)
    out = torch.empty(len(prompt), positions, device=device)
    size = SLICE["cuda" if out.is_cuda else "cpu"]
    for part in torch.arange(len(prompt)).split(max(1, size // max(1, positions))):
        rows = slice(int(part[0]), int(part[-1]) + 1)
        position = places + begun[rows, None]
        words = philox((position, sample[rows, None], prompt[rows, None], word), key)
        out[rows] = uniform(words[0])
    return out


def normals(
    seed: int, step: int, parameter: Tensor, block: Tensor, direction: Tensor, out: Tensor
) -> Tensor:
    """Fill `out` with standard normals at addresses (seed, step, parameter, direction, index), with
    index = 4 * block + lane.

    Args:
        parameter: int64 [K].
        block: int64 [K].
        direction: int64 [D].
        out: float32 [D, 4 * K], filled in place.
    Returns: `out`. Box-Muller on 24-bit uniforms: the largest magnitude is 5.9.
    """
    key = key_of(seed, NOISE)
    size = SLICE["cuda" if out.is_cuda else "cpu"]
    stride = max(1, size // max(1, len(direction)))
    step_word = torch.tensor(step, device=out.device)
    blocks = out.view(len(direction), -1, 4)  # [D, K, 4]
    for start in range(0, len(block), stride):
        part = slice(start, start + stride)
        words = philox(
            (block[part][None], direction[:, None], parameter[part][None], step_word), key
        )  # 4 x [D, k]
        for lane in (0, 2):
            # (0, 1] for the logarithm, [0, 1) for the angle
            radius = uniform(words[lane]).neg_().add_(1.0).log_().mul_(-2.0).sqrt_()
            angle = uniform(words[lane + 1]).mul_(2 * math.pi)
            torch.mul(radius, angle.cos(), out=blocks[:, part, lane])
            torch.mul(radius, angle.sin_(), out=blocks[:, part, lane + 1])
    return out
