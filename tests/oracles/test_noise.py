import copy
import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from common.config import ConfigError, SamplingConfig
from common.device import blocks_of
from common.engine import Population, Requests
from common.model.packed_linear import multiply, packed, plain_weight
from common.model.precision_copies import narrow
from common.model.quantized import replace_layers
from common.sampling import native
from common.sampling.native import Sampler
from eggroll import forwards
from eggroll import noise as noise_module
from eggroll.config import NoiseConfig
from eggroll.fitness import fitness, over_samples
from eggroll.instruments import idle_share
from eggroll.noise import Noise
from tests.support.models import EACH, prompts_that_open_alike, small_model
from tests.support.refusals import refuses

GREEDY = SamplingConfig.uncut(12, 0.0)


def noise_config(
    name="llama",
    matrices="lowrank",
    vectors="frozen",
    embeddings="frozen",
    head="frozen",
    **patterns,
):
    if name == "gpt2" and embeddings != "frozen":
        patterns = {"*wpe*": "frozen", **patterns}  # positions are shared by all rows
    if small_model(name).config.tie_word_embeddings:
        head = "frozen"  # it is the embedding
    return NoiseConfig(
        matrices=matrices, vectors=vectors, embeddings=embeddings, head=head, patterns=patterns
    )


def dense(noise, model, draw, members):
    """E of every member by name, [members, *shape], signs included: the slow way."""
    directions = torch.arange(members // 2 if noise.mirrored else members)
    out = {}
    for address, drawn in zip(
        noise.addresses, noise.draw(draw, directions, noise.addresses), strict=True
    ):
        if address.form == "lowrank":
            m, n = address.shape
            a_t = drawn[:, : address.rank * m].reshape(-1, address.rank, m)
            b_t = drawn[:, address.rank * m : address.rank * (m + n)].reshape(-1, address.rank, n)
            each = torch.stack(
                [a.T @ b / math.sqrt(address.rank) for a, b in zip(a_t, b_t, strict=True)]
            )
        else:
            each = drawn[:, : address.floats].reshape(-1, *address.shape)
        if noise.mirrored:
            each = torch.stack([s * e for e in each for s in (1, -1)])
        out[address.name] = each
    return out


def materialised(model, noise, draw, member, members, sigma):
    other = copy.deepcopy(model)
    parameters = dict(other.named_parameters())
    with torch.no_grad():
        for name, each in dense(noise, model, draw, members).items():
            parameters[name] += sigma * each[member]
    return other


FORMS = {
    "matrices": {},
    "everything low rank": {"vectors": "full", "embeddings": "lowrank", "head": "lowrank"},
    "everything full": {
        "matrices": "full",
        "vectors": "full",
        "embeddings": "full",
        "head": "full",
    },
}


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("which", FORMS)
@pytest.mark.parametrize(("rank", "mirrored"), [(1, True), (1, False), (4, True)])
def test_population_forward_equals_materialised_weights(name, which, rank, mirrored):
    model = small_model(name)
    noise = Noise(model, noise_config(name, **FORMS[which]), rank=rank, mirrored=mirrored, seed=3)
    members, each, tokens = 6, 3, 7
    ids = torch.randint(2, 90, (members * each, tokens), generator=torch.Generator().manual_seed(1))
    position = torch.arange(tokens).expand(len(ids), -1)
    with torch.inference_mode(), noise.members(5, range(members), 0.05):
        together = model(input_ids=ids, position_ids=position).logits
    for member in range(members):
        part = slice(member * each, (member + 1) * each)
        with torch.no_grad():
            alone = materialised(model, noise, 5, member, members, 0.05)(input_ids=ids[part]).logits
        torch.testing.assert_close(together[part], alone, rtol=1e-4, atol=3e-5)
    with torch.no_grad():
        after = model(input_ids=ids).logits
        assert torch.equal(after, small_model(name)(input_ids=ids).logits)  # nothing is left behind


@pytest.mark.parametrize("name", EACH)
def test_population_samples_what_each_member_would(name):
    """Prompts of several lengths, more of them than slots; every member's completions are its own
    model's.
    """
    model = small_model(name)
    noise = Noise(model, noise_config(name), rank=2, mirrored=True, seed=3)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(2, 90, (n,), generator=generator).tolist() for n in (4, 9, 6)]
    for rows in (8, 100):
        with noise.members(1, range(4), 0.05):
            made = Sampler(model, pad_id=0, stop_ids=[11, 12], rows=rows).generate(
                Requests(prompts=prompts, population=Population(members=4)), GREEDY
            )
        for member in range(4):
            alone = Sampler(
                materialised(model, noise, 1, member, 4, 0.05), pad_id=0, stop_ids=[11, 12], rows=3
            ).generate(Requests(prompts=prompts), GREEDY)
            assert torch.equal(made.tokens.view(4, 3, -1)[member], alone.tokens)


@pytest.mark.run
@pytest.mark.parametrize("which", FORMS)
@pytest.mark.parametrize("mirrored", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_a_prefill_in_pieces_samples_the_same(which, mirrored, monkeypatch):
    """Pieces have some of the members, or some of a pair's prompts, with and without slots for all
    rows; a forward has no more tokens than a piece unless it is one prompt of a pair.
    """
    model = small_model("gpt2")  # it has biases, too
    noise = Noise(model, noise_config("gpt2", **FORMS[which]), rank=2, mirrored=mirrored, seed=3)
    prompts = [[5, 6, 7, 8], [9, 8, 7, 6, 5, 4, 3, 2, 30], [40, 41, 42, 43, 44, 45]]
    forwards: list[int] = []

    def note(_: object, args: object, kwargs: dict) -> None:
        rows, width = kwargs["input_ids"].shape
        if width > 1:
            forwards.append(rows * width)

    def sample(tokens: int, rows: int) -> torch.Tensor:
        monkeypatch.setattr(native, "PIECE_ON_CPU", tokens)
        forwards.clear()
        sampler = Sampler(model, pad_id=0, stop_ids=[11, 12], rows=rows)
        with noise.members(1, range(6), 0.05) as population:
            asked = Requests(prompts=prompts, population=population)
            return sampler.generate(asked, GREEDY).tokens

    model.register_forward_pre_hook(note, with_kwargs=True)
    whole = sample(1 << 12, 18)
    assert forwards == [6 * 3 * 9]
    for tokens, rows in [(1, 18), (40, 18), (60, 18), (110, 18), (40, 6)]:
        assert torch.equal(sample(tokens, rows), whole)
        assert max(forwards) <= max(tokens, 2 * 9)


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("rows", [8, pytest.param(100, marks=pytest.mark.thorough)])
def test_members_share_the_blocks_below_the_noise(name, rows, monkeypatch):
    """A prompt goes once through the blocks that no member perturbs, whatever the pieces; every
    member's completions are its own model's, also where slots are few and members refill apart.
    """
    model = small_model(name)
    noise = Noise(model, noise_config(name, lower="frozen"), rank=2, mirrored=True, seed=3)
    assert noise.trunk == 1
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(2, 90, (n,), generator=generator).tolist() for n in (4, 9, 6)]
    prefilled: dict[int, int] = {0: 0, 1: 0}
    for index, block in enumerate(blocks_of(model)):
        attention = block.get_submodule("attn" if name == "gpt2" else "self_attn")

        def note(_: object, args: tuple, kwargs: dict, index: int = index) -> None:
            x = args[0] if args else kwargs["hidden_states"]
            prefilled[index] += x.shape[0] if x.shape[1] > 1 else 0

        attention.register_forward_pre_hook(note, with_kwargs=True)
    for piece in (1 << 12, 20):
        monkeypatch.setattr(native, "PIECE_ON_CPU", piece)
        prefilled.update({0: 0, 1: 0})
        with noise.members(1, range(4), 0.3) as population:
            asked = Requests(prompts=prompts, population=population)
            made = Sampler(model, pad_id=0, stop_ids=[11, 12], rows=rows).generate(asked, GREEDY)
        assert prefilled[1] >= 4 * 3
        assert prefilled[0] == 3 if rows == 100 else prefilled[0] <= prefilled[1] / 2
        alone = [
            Sampler(
                materialised(model, noise, 1, member, 4, 0.3), pad_id=0, stop_ids=[11, 12], rows=3
            ).generate(Requests(prompts=prompts), GREEDY)
            for member in range(4)
        ]
        assert torch.equal(made.tokens, torch.cat([one.tokens for one in alone]))
        assert len({tuple(row) for row in made.tokens.tolist()}) > 3, "members differ"


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("shared", [{}, {"lower": "frozen"}])
@pytest.mark.parametrize("rows", [8, pytest.param(100, marks=pytest.mark.thorough)])
def test_members_prefill_what_prompts_begin_with_once(name, shared, rows, monkeypatch):
    """Each of them, and all of them together below the noise; every member's completions are its
    own model's.
    """
    model = small_model(name)
    noise = Noise(model, noise_config(name, **shared), rank=2, mirrored=True, seed=3)
    prompts, seen = prompts_that_open_alike(), []
    alone = [
        Sampler(
            materialised(model, noise, 1, member, 4, 0.3), pad_id=0, stop_ids=[11, 12], rows=4
        ).generate(Requests(prompts=prompts), GREEDY)
        for member in range(4)
    ]
    model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    for piece in (1 << 12, 20):
        monkeypatch.setattr(native, "PIECE_ON_CPU", piece)
        seen.clear()
        with noise.members(1, range(4), 0.3) as population:
            asked = Requests(prompts=prompts, population=population)
            made = Sampler(model, pad_id=0, stop_ids=[11, 12], rows=rows).generate(asked, GREEDY)
        assert torch.equal(made.tokens, torch.cat([one.tokens for one in alone]))
        opened = sum(rows for rows, width in seen if width == 40)
        assert opened == 4 + noise.trunk, "frozen blocks have read it before"
        assert len({tuple(row) for row in made.tokens.tolist()}) > 3, "members differ"


def test_what_lies_below_the_noise():
    model = small_model("llama")

    def trunk(**kinds: str) -> int:
        return Noise(model, noise_config(**kinds), rank=1, mirrored=True, seed=0).trunk

    assert trunk() == 0
    assert trunk(lower="frozen") == 1
    assert trunk(lower="frozen", head="lowrank", vectors="full") == 1
    assert trunk(lower="frozen", embeddings="lowrank") == 0
    assert trunk(matrices="frozen", head="lowrank") == 2
    names = [a.name for a in noise_module.addresses(model, noise_config(lower="frozen"), 1)]
    assert names
    assert all(name.startswith("model.layers.1.") for name in names)


def test_noise_does_not_depend_on_the_chunk():
    model = small_model("llama")
    noise = Noise(model, noise_config(), rank=1, mirrored=True, seed=3)
    ids = torch.randint(2, 90, (8, 5), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        with noise.members(0, range(8), 0.1):
            whole = model(input_ids=ids).logits
        for members in (range(0, 4), range(4, 8), range(2, 4)):
            with noise.members(0, members, 0.1):
                part = model(input_ids=ids[members.start : members.stop]).logits
            torch.testing.assert_close(
                part, whole[members.start : members.stop], rtol=1e-4, atol=1e-5
            )


def test_equal_shapes_never_share_noise():
    model = small_model("llama")
    noise = Noise(model, noise_config(), rank=1, mirrored=True, seed=3)
    drawn = noise.draw(0, torch.arange(2), noise.addresses)
    rows = torch.cat([d[:, :48] for d in drawn])
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)


@pytest.mark.parametrize("rank", [1, 4, 16])
def test_variance_is_one_for_every_rank(rank):
    model = small_model("llama")
    noise = Noise(model, noise_config(), rank=rank, mirrored=False, seed=0)
    values = torch.cat([e.flatten() for e in dense(noise, model, 0, 64).values()])
    assert abs(values.mean()) < 0.01
    assert abs(values.var() - 1) < 0.03


@pytest.mark.parametrize("which", FORMS)
@pytest.mark.parametrize(("rank", "mirrored"), [(1, True), (3, False), (4, True)])
@pytest.mark.parametrize("buffer", [None, 3000])
def test_gradient_equals_the_dense_sum(which, rank, mirrored, buffer, monkeypatch):
    if buffer:
        monkeypatch.setattr(
            noise_module, "BUFFER", buffer
        )  # streamed over parameters and directions
    model = small_model("llama")
    noise = Noise(model, noise_config(**FORMS[which]), rank=rank, mirrored=mirrored, seed=7)
    f = torch.randn(10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    slow = dense(noise, model, 4, 10)
    fast = dict(noise.gradients(4, f))
    assert fast.keys() == slow.keys()
    for name, each in slow.items():
        expected = -sum(f[i] * each[i].double() for i in range(10)) / 10
        torch.testing.assert_close(fast[name].double(), expected, rtol=1e-4, atol=1e-5)


def test_equal_fitness_in_a_pair_gives_exactly_nothing():
    model = small_model("llama")
    noise = Noise(model, noise_config(), rank=2, mirrored=True, seed=7)
    f = torch.tensor([0.3, 0.3, -1.2, -1.2, 0.9, 0.9])
    assert all((gradient == 0).all() for _, gradient in noise.gradients(0, f))


def test_the_gradient_points_uphill():
    """On a linear reward the ES gradient is as close to the true one as theory says."""
    model = small_model("llama")
    noise = Noise(
        model,
        noise_config(**{"*q_proj*": "lowrank"}, matrices="frozen"),
        rank=1,
        mirrored=True,
        seed=0,
    )
    members = 4096
    slow = dense(noise, model, 0, members)
    target = {
        a.name: torch.randn(a.shape, generator=torch.Generator().manual_seed(a.number))
        for a in noise.addresses
    }
    rewards = sum((each * target[name]).sum((1, 2)) for name, each in slow.items())
    found = dict(noise.gradients(0, rewards))
    flat = torch.cat([-found[name].flatten() for name in target])
    true = torch.cat([target[name].flatten() for name in target])
    # N independent directions in d dimensions: cosine sqrt(N / (N + d)).
    expected = math.sqrt(members / 2 / (members / 2 + len(true)))
    assert abs(torch.cosine_similarity(flat, true, dim=0) - expected) < 0.03


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("mirrored", [True, False])
def test_factors_are_the_noise_of_members(rank, mirrored):
    """What engines with adapters are given; of some members, as a chunk of a population has."""
    model = small_model("llama")
    noise = Noise(model, noise_config(), rank=rank, mirrored=mirrored, seed=2)
    expected = dense(noise, model, 5, 8)
    part = range(2, 6)
    found = {name: (left, right) for name, left, right in noise.factors(5, part, 0.02)}
    assert found.keys() == expected.keys()
    for name, (left, right) in found.items():
        torch.testing.assert_close(left @ right, 0.02 * expected[name][2:6], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("choices", "text"),
    [
        ({"vectors": "full"}, "norm.weight cannot have. Set algo.noise.vectors=frozen"),
        ({"embeddings": "lowrank"}, "embed_tokens.weight cannot have. Set algo.noise.embeddings"),
        ({"matrices": "full"}, "cannot have. Set algo.noise.matrices=frozen"),
    ],
)
def test_noise_without_factors_is_told(choices, text):
    noise = Noise(small_model("llama"), noise_config(**choices), rank=1, mirrored=True, seed=2)
    with pytest.raises(ConfigError, match=text):
        list(noise.factors(0, range(2), 0.02))


def test_policies_choose_parameters():
    model = small_model("qwen2")
    names = [a.name for a in Noise(model, noise_config(), rank=1, mirrored=True, seed=0).addresses]
    assert len(names) == 14
    assert all(name.endswith("proj.weight") for name in names)
    some = Noise(
        model,
        noise_config(**{"*mlp*": "frozen", "*k_proj.bias": "full"}),
        rank=1,
        mirrored=True,
        seed=0,
    ).addresses
    assert {a.form for a in some if a.name.endswith("bias")} == {"full"}
    assert not any("mlp" in a.name for a in some)
    tied = [
        a.name
        for a in Noise(
            model,
            noise_config(matrices="frozen", embeddings="lowrank"),
            rank=1,
            mirrored=True,
            seed=0,
        ).addresses
    ]
    assert tied == ["model.embed_tokens.weight"]
    assert next(
        a.name
        for a in Noise(small_model("gpt2"), noise_config(), rank=1, mirrored=True, seed=0).addresses
    ).endswith("c_attn.weight")


@pytest.mark.parametrize(
    ("choices", "text"),
    [
        ({"*nothing*": "frozen"}, "'*nothing*' has no effect: it matches no parameter"),
        ({"*layernorm*": "lowrank"}, "which has no rank. Use full or frozen there"),
        ({"matrices": "frozen"}, "algo.noise freezes every parameter"),
    ],
)
def test_policies_that_cannot_be(choices, text):
    with pytest.raises(ConfigError) as caught:
        Noise(small_model("llama"), noise_config(**choices), rank=1, mirrored=True, seed=0)
    assert text in str(caught.value)


def test_a_head_that_is_tied_has_no_noise_of_its_own():
    tied = NoiseConfig(
        matrices="lowrank", vectors="frozen", embeddings="frozen", head="full", patterns={}
    )
    refuses(
        lambda: Noise(small_model("qwen2"), tied, rank=1, mirrored=True, seed=0),
        key="algo.noise.head",
        value="full",
    )


def test_an_unknown_module_is_refused_with_the_way_out():
    model = small_model("llama")
    model.model.norm = torch.nn.BatchNorm1d(32)
    with pytest.raises(
        ConfigError, match=r"BatchNorm1d is no plain .* Freeze it: 'algo.noise.patterns="
    ):
        Noise(model, noise_config(vectors="full"), rank=1, mirrored=True, seed=0)


def test_noise_below_the_spacing_of_bfloat16_is_not_rounded_away():
    """On a norm, whose weights are 1: there are 1/128 between the numbers above it."""
    model, sigma = small_model("llama").bfloat16(), 1e-3
    settings = noise_config(matrices="frozen", vectors="full")
    noise = Noise(model, settings, rank=1, mirrored=True, seed=3)
    norm, name = model.model.norm, "model.norm.weight"
    states = torch.randn(4096, 1, len(norm.weight), generator=torch.Generator().manual_seed(1))
    states = states.bfloat16()
    with torch.inference_mode():
        wanted = sigma * dense(noise, model, 5, 2)[name][0] * norm(states).float()
        with noise.members(5, range(2), sigma):
            plus, minus = norm(states.repeat(2, 1, 1)).split(4096)
    assert plus.dtype == torch.bfloat16
    moved = (plus.float() - minus.float()) / 2
    assert (moved * wanted).sum() / wanted.square().sum() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_small_updates_of_norms_reach_a_model_in_bfloat16(kind):
    model = small_model(kind)
    wide = narrow(model, torch.bfloat16, torch.device("cpu"))
    kept = {n: p for n, p in model.named_parameters() if p.dtype == torch.float32}
    assert kept
    assert not kept.keys() & wide.keys()
    assert all(parameter.ndim == 1 for parameter in kept.values())
    ids = torch.randint(2, 90, (64, 5), generator=torch.Generator().manual_seed(1))
    norm = model.transformer.ln_f if kind == "gpt2" else model.model.norm
    outputs = []
    norm.register_forward_hook(lambda _, inputs, output: outputs.append((inputs[0], output)))
    with torch.no_grad():
        assert model(input_ids=ids).logits.dtype == torch.bfloat16
        change = 1e-3 * norm.weight
        norm.weight += change
        model(input_ids=ids)
    (states, before), (same, after) = outputs
    assert before.dtype == torch.bfloat16
    assert torch.equal(states, same)
    plain = F.layer_norm(states, change.shape) if kind == "gpt2" else before.float() / norm.weight
    wanted, moved = (plain * change).detach(), after.float() - before.float()
    assert (moved * wanted).sum() / wanted.square().sum() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("matrices", ["frozen", "lowrank"])
@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "int8"])
@pytest.mark.parametrize("packs", [packed, lambda _: nullcontext()])
def test_noise_and_small_updates_of_biases_are_not_rounded_away(kind, matrices, packs, monkeypatch):
    """Biases of Qwen2 go up to hundreds; between 2 and 4 bfloat16 has steps of 1/64."""
    model, sigma = small_model("qwen2" if kind == "int8" else kind), 2e-3
    place = "transformer.h.0.attn.c_attn" if kind == "gpt2" else "model.layers.0.self_attn.k_proj"
    layer = model.get_submodule(place)
    torch.nn.init.normal_(layer.bias, 3.0, 0.1)
    if kind == "int8":
        replace_layers(model, "int8", "model.quantize")
        layer = model.get_submodule(place)
    wide = narrow(model, torch.bfloat16, torch.device("cpu"))
    assert (f"{place}.weight" in wide) == (kind != "int8")
    assert layer.bias.dtype == torch.float32
    noise = Noise(
        model, noise_config(matrices=matrices, vectors="full"), rank=1, mirrored=True, seed=3
    )
    states = torch.randn(4096, 1, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    used = []
    monkeypatch.setattr(forwards, "multiply", lambda *a: used.append(1) or multiply(*a))
    with torch.inference_mode(), packs(model):
        with noise.members(5, range(2), sigma):
            plus, minus = layer(states.repeat(2, 1, 1)).float().split(4096)
            assert bool(used) == ("packed" in layer.__dict__), "what is packed is multiplied with"
        layer.bias += sigma
        after = layer(states)
        weight = plain_weight(layer, torch.bfloat16)
        weight = weight if kind == "gpt2" else weight.T
        wanted = ((states @ weight).float() + layer.bias).bfloat16()
    assert after.dtype == torch.bfloat16
    assert (after != wanted).float().mean() < 0.02, "of a rounded bias a quarter differs"
    drawn = {name: each[0] for name, each in dense(noise, model, 5, 2).items()}
    added = sigma * drawn[f"{place}.bias"]
    if matrices == "lowrank":
        noisy = drawn[f"{place}.weight"]
        added = added + sigma * states.float() @ (noisy if kind == "gpt2" else noisy.T)
    moved = (plus - minus) / 2
    assert (moved * added).sum() / (added * added).expand_as(moved).sum() == pytest.approx(
        1, abs=0.3
    )


def test_bfloat16_stays_close_to_float32():
    model, half = small_model("llama"), small_model("llama").to(torch.bfloat16)
    ids = torch.randint(2, 90, (8, 5), generator=torch.Generator().manual_seed(1))
    outputs = []
    for one in (model, half):
        noise = Noise(one, noise_config(), rank=1, mirrored=True, seed=3)
        with torch.inference_mode(), noise.members(0, range(8), 0.05):
            outputs.append(one(input_ids=ids).logits.float())
    assert (outputs[0] - outputs[1]).abs().max() < 0.05 * outputs[0].abs().max()


def test_zscore():
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.5, 0.5]])
    f = fitness(rewards, "zscore")
    mean = rewards.mean(1).double()
    torch.testing.assert_close(f, (mean - mean.mean()) / mean.std(correction=0))


def test_prompt_zscore_ignores_how_hard_a_prompt_is():
    rewards = torch.rand(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    shifted = rewards + torch.tensor([0.0, 5.0, -3.0])
    torch.testing.assert_close(fitness(rewards, "prompt_zscore"), fitness(shifted, "prompt_zscore"))
    centred = rewards - rewards.mean(0)
    torch.testing.assert_close(
        fitness(rewards, "prompt_zscore"), (centred / centred.std(correction=0)).mean(1)
    )


def test_prompt_zscore_is_a_zscore_that_is_shorter_where_prompts_disagree():
    draw = torch.Generator().manual_seed(0)
    member, luck = (torch.randn(400, n, generator=draw).double() for n in (1, 9))
    for rewards, length in ((luck, 1 / 3), (member + 0 * luck, 1), (member + luck, 5**0.5 / 3)):
        f, wanted = fitness(rewards, "prompt_zscore"), fitness(rewards, "zscore")
        ratio = (f @ wanted / wanted.square().sum()).item()
        torch.testing.assert_close(f, ratio * wanted)
        assert ratio == pytest.approx(length, rel=0.06)


def test_components_count_alike():
    """Whatever their spread; one that is equal for all members counts for nothing."""
    draw = torch.Generator().manual_seed(0)
    wide, equal = torch.rand(6, 3, generator=draw), torch.full((6, 3), 0.3)
    narrow = 0.01 * torch.rand(6, 3, generator=draw)
    parts = {"wide": wide, "narrow": narrow, "equal": equal}
    f = fitness(wide + narrow + equal, "component_zscore", components=parts)
    torch.testing.assert_close(f, (fitness(wide, "zscore") + fitness(narrow, "zscore")) / 3)


def test_centered_fitness_keeps_the_scale_of_rewards():
    rewards = torch.rand(6, 3, generator=torch.Generator().manual_seed(0)).double()
    f = fitness(rewards, "centered")
    torch.testing.assert_close(f, rewards.mean(1) - rewards.mean())
    torch.testing.assert_close(fitness(0.1 * rewards, "centered"), 0.1 * f)


def test_a_quantile_of_the_samples_counts():
    rewards = torch.tensor([[0.0, 1.0, 0.2, 0.4], [0.3, 0.5, 0.0, 0.0]]).double()
    best = torch.tensor([[1.0, 0.4], [0.5, 0.0]]).double()
    torch.testing.assert_close(over_samples(rewards, 2, 1.0), best)
    torch.testing.assert_close(over_samples(rewards, 2, 0.5), rewards.view(2, 2, 2).mean(2))


def test_centered_rank_shares_ties():
    f = fitness(torch.tensor([[3.0], [1.0], [3.0], [0.0], [9.0]]), "centered_rank")
    assert f.tolist() == [0.125, -0.25, 0.125, -0.5, 0.5]


def test_pair_sign():
    f = fitness(torch.tensor([[3.0], [1.0], [2.0], [2.0], [0.0], [9.0]]), "pair_sign")
    assert f.tolist() == [1, -1, 0, 0, -1, 1]


SHAPINGS = ("zscore", "prompt_zscore", "centered", "centered_rank", "pair_sign")


@pytest.mark.parametrize("shaping", SHAPINGS)
def test_equal_rewards_give_zero(shaping):
    assert (fitness(torch.full((8, 3), 0.1), shaping) == 0).all()


@pytest.mark.parametrize("shaping", SHAPINGS)
def test_members_that_earn_the_same_on_other_prompts_are_equal(shaping):
    """In whatever order the tenths are added up, whose sums differ in the last bit."""
    draw = torch.Generator().manual_seed(0)
    tenths = torch.randint(0, 11, (20, 1, 8), generator=draw).double() / 10
    order = torch.rand(20, 2, 8, generator=draw).argsort(2)
    rewards = tenths.expand(-1, 2, -1).gather(2, order).flatten(0, 1)
    assert (rewards.mean(1)[0::2] != rewards.mean(1)[1::2]).any(), "otherwise this says nothing"
    assert idle_share(fitness(rewards, shaping), mirrored=True) == 1


def test_a_layer_that_does_more_than_its_class_is_refused():
    """Gemma's embedding multiplies what it looks up: noise beside it would be of another scale."""

    class Scaled(torch.nn.Embedding):
        def forward(self, ids):
            return 5 * super().forward(ids)

    model = small_model("llama")
    model.model.embed_tokens = Scaled(97, 32)
    with pytest.raises(ConfigError, match="Scaled is no plain Linear"):
        Noise(model, noise_config(embeddings="lowrank"), rank=1, mirrored=True, seed=0)
    Noise(model, noise_config(), rank=1, mirrored=True, seed=0)


def test_prompt_zscore_centres_a_prompt_over_its_samples():
    rewards = torch.rand(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    by_prompt = rewards.view(4, 3, 2)
    centred = (by_prompt - by_prompt.mean((0, 2), keepdim=True)).view(4, 6)
    torch.testing.assert_close(
        fitness(rewards, "prompt_zscore", samples=2), (centred / centred.std(correction=0)).mean(1)
    )
