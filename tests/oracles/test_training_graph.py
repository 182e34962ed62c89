"""The compiled training forward and backward pass against the eager one: opt.compile.training."""

import random

import pytest
import torch

from benchmarks.measure import why_no_compiler
from common import optim
from common.config import ConfigError
from common.model import logprobs, training_graph
from launch import compose, train
from tests.support import CONF, SMALL_GRPO, SMALL_RFT, events
from tests.support.models import small_model
from tests.support.refusals import refuses

CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.run,  # compilation takes seconds
    pytest.mark.skipif(why_no_compiler(CPU) is not None, reason="torch.compile does not work here"),
]


def batch(seed: int) -> logprobs.Groups:
    """Groups of changing sizes and lengths: one prompt, one completion and none padded too."""
    draw = random.Random(seed)
    n, size = draw.randint(1, 4), draw.randint(1, 4)
    equal = draw.random() < 0.3

    def tokens(least: int, most: int) -> list[int]:
        return [draw.randrange(2, 97) for _ in range(most if equal else draw.randint(least, most))]

    prompts = [tokens(1, 30) for _ in range(n)]
    return logprobs.group(prompts, [[tokens(1, 20) for _ in range(size)] for _ in prompts], CPU)


def measured(model, groups, half=False):
    """Return log-probabilities, entropies and the gradient of both."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        logp, entropy = logprobs.token_logprobs(model, groups, 1.0)
    (logp.sum() + 0.1 * entropy.sum()).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return logp.detach(), entropy.detach(), gradient


def gap(ours, theirs):
    """Return the largest difference of the values, and of the gradients a share of their norm."""
    values = max((a - b).abs().max().item() for a, b in zip(ours[:2], theirs[:2], strict=True))
    return values, ((ours[2] - theirs[2]).norm() / theirs[2].norm()).item()


@pytest.mark.parametrize(
    ("name", "half", "recomputed"),
    [
        ("llama", False, False),
        pytest.param("llama", True, False, marks=pytest.mark.thorough),
        pytest.param("llama", False, True, marks=pytest.mark.thorough),
        pytest.param("gpt2", False, False, marks=pytest.mark.thorough),
        pytest.param("qwen3", False, False, marks=pytest.mark.thorough),
    ],
)
def test_compiled_blocks_are_those_of_the_model(name, half, recomputed):
    """For sums of some 50 numbers: rounding of float32, or of bfloat16 where half."""
    model = small_model(name)
    logprobs.prepare(model)
    training_graph.check(model)
    if recomputed:
        optim.checkpoint_activations(model)
        model.train()
        optim.no_dropout(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with training_graph.compiled_blocks(model, "default"), torch.autocast("cpu", enabled=half):
        training_graph.rehearse(model, CPU)
    assert all(parameter.grad is None for parameter in model.parameters())
    after_rehearsal = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    eps = torch.finfo(torch.bfloat16 if half else torch.float32).eps
    for seed in range(12):
        groups = batch(seed)
        eager = measured(model, groups, half)
        with training_graph.compiled_blocks(model, "default"):
            values, gradient = gap(measured(model, groups, half), eager)
        assert values < 50 * eps
        assert gradient < 10 * eps
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs <= after_rehearsal + 2, "lengths are open: no step compiles anew"
    assert all(block._compiled_call_impl is None for block in training_graph.find_blocks(model))


def test_models_of_another_layout_are_refused(monkeypatch):
    model = small_model("llama")
    logprobs.prepare(model)
    model.__dict__["rows_apart"] = True
    refuses(lambda: training_graph.check(model), key="opt.compile.training", value="true")
    del model.__dict__["rows_apart"]
    monkeypatch.setattr(training_graph, "find_blocks", lambda _: [])
    with pytest.raises(ConfigError, match="whose blocks are not those of transformers"):
        training_graph.check(model)


@pytest.mark.parametrize("algo", ["grpo", pytest.param("rft", marks=pytest.mark.thorough)])
def test_a_run_is_the_same_compiled(algo, in_cache, tmp_path, monkeypatch):
    """Decoding stays as it is, so that the samples are the same to the bit."""
    monkeypatch.setattr("common.sampling.native.compiled", lambda part, mode: part)
    settings = SMALL_GRPO if algo == "grpo" else SMALL_RFT
    more = ["algo.steps=2"] if algo == "grpo" else ["algo.iterations=1", "algo.epochs=2"]
    for name, opt in {
        "eager": ["opt=[]"],
        "compiled": ["opt=[compile]", "opt.compile.training=true"],
    }.items():
        train(compose([*settings, *more, *opt], CONF), tmp_path / name)
    ours, theirs = (
        [event for event in events(tmp_path / name) if event.get("loss") is not None]
        for name in ("compiled", "eager")
    )
    assert [e["loss"] for e in ours] == pytest.approx([e["loss"] for e in theirs], abs=1e-4)
    key = "grad_norm"
    assert [e[key] for e in ours] == pytest.approx([e[key] for e in theirs], rel=1e-3)
    assert any("compile_seconds" in event for event in events(tmp_path / "compiled"))


@pytest.mark.parametrize("algo", ["eggroll", "classify", "scaling"])
def test_compiled_training_needs_a_language_models_training_forward(algo):
    with pytest.raises(
        ConfigError, match=f"opt.compile.training=true has no effect with algo={algo}"
    ):
        compose([f"algo={algo}", "opt=[compile]", "opt.compile.training=true"])
    refuses(
        lambda: compose(["algo=grpo", "opt.compile.training=true"]),
        key="opt.compile.training",
        value="true",
    )
