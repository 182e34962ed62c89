"""classify: its models and their batches, without a run."""

import numpy as np
import torch

from benchmarks import loader as benchmark
from ddp_bench import data, models
from ddp_bench.config import EncoderConfig
from ddp_bench.data import Ragged, Rows
from ddp_bench.tasks import Trajectories

SIZES = EncoderConfig(size=16, heads=2, layers=2, feedforward=32, dropout=0.3, max_tokens=41)


def random_weights(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():  # fresh biases are zero, which hides mistakes
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def test_logits_do_not_depend_on_the_batch():
    torch.manual_seed(0)
    model = random_weights(models.TextClassifier(SIZES, 3, 50)).eval()
    texts = [np.random.default_rng(i).integers(2, 50, n) for i, n in enumerate((1, 7, 41, 20))]
    rows = Rows({"ids": Ragged.of(texts, np.int32)}, np.zeros(4, np.int64))
    together = model(**rows.__getitems__([0, 1, 2, 3])[0])
    alone = torch.cat([model(**rows.__getitems__([i])[0]) for i in range(4)])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    assert (together[0] - together[1]).abs().max() > 0.1


def trajectories(count=9, longest=20):
    return list(
        Trajectories(rows=count + 10, test_rows=10, longest=longest, noise=0.1).rows("train")
    )[:count]


def test_slow_and_fast_collate_and_forward_are_equal():
    listed = trajectories()
    rows = data.trajectories(listed, 41)
    (slow, slow_labels), (fast, fast_labels) = (
        benchmark.concatenated(listed),
        rows.__getitems__(list(range(9))),
    )
    assert slow.keys() == fast.keys()
    for name, tensor in slow.items():
        assert tensor.dtype == fast[name].dtype
        assert torch.equal(tensor, fast[name]), name
    assert torch.equal(slow_labels, fast_labels)

    torch.manual_seed(0)
    model = random_weights(models.TrajectoryClassifier(SIZES, 4, 4)).eval()
    gradients = []
    for forward in (model, lambda **inputs: benchmark.looped(model, inputs)):
        model.zero_grad()
        logits = forward(**fast)
        torch.nn.functional.cross_entropy(logits, fast_labels).backward()
        gradients.append([logits.detach(), *(p.grad.clone() for p in model.parameters())])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_recomputed_activations_change_nothing():
    rows = data.trajectories(trajectories(), 41)
    inputs, labels = rows.__getitems__(list(range(9)))
    model = random_weights(models.TrajectoryClassifier(SIZES, 4, 4)).train()
    found = []
    for model.encoder.recompute in (False, True):
        torch.manual_seed(1)
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(**inputs), labels).backward()
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_probabilities_come_in_the_order_asked_for():
    model = random_weights(models.TrajectoryClassifier(SIZES, 4, 4))
    rows = data.trajectories(trajectories(), 41)
    chosen = [7, 0, 3, 3, 8]
    found = models.probabilities_of(model, rows, chosen, batch_rows=2)
    one_by_one = torch.cat(
        [models.probabilities_of(model, rows, [i], batch_rows=1) for i in chosen]
    )
    torch.testing.assert_close(found, one_by_one, rtol=1e-5, atol=1e-6)
    assert model.training, "as it was"
