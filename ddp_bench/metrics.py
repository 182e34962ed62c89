"""Held-out measures of a classifier."""

import torch
from torch import Tensor


def confusion(labels: Tensor, predictions: Tensor, classes: int) -> Tensor:
    """Return the confusion matrix, int64 [classes, classes]: rows of class i (row) predicted as
    class j (column).
    """
    counts = torch.bincount(labels * classes + predictions, minlength=classes**2)
    return counts.view(classes, classes)


def accuracy(table: Tensor) -> float:
    """Return the percent of rows on the diagonal of a confusion matrix."""
    return 100 * table.diagonal().sum().item() / table.sum().item()


def macro_f1(table: Tensor) -> float:
    """Return the mean F1 in percent over the classes that occur or were predicted."""
    right, there = table.diagonal().double(), (table.sum(0) + table.sum(1)).double()
    return 100 * (2 * right / there)[there > 0].mean().item()


def measures(labels: Tensor, probabilities: Tensor) -> dict[str, float]:
    """Return accuracy and macro_f1 in percent, and the mean loss, of probabilities
    [rows, classes].
    """
    table = confusion(labels, probabilities.argmax(1), probabilities.shape[1])
    chosen = probabilities.gather(1, labels[:, None]).clamp_min(1e-300)
    return {
        "accuracy": accuracy(table),
        "macro_f1": macro_f1(table),
        "loss": -chosen.log().mean().item(),
    }
