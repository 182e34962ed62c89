"""The log-probability of given answers under each member as its fitness: one forward of the
population over prompts and answers, no sampling.

It is the setting of the paper's pre-training (arXiv:2511.16652), and a first stage for a base model
that is never right, whose samples earn nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from common.device import device_of
from common.finetune import Tree
from common.model import evaluating
from eggroll.noise import Noise

FLOATS = 1 << 28  # the most logits of a forward


class Likelihood:
    """Scores members by the answers of training examples.

    Args:
        pad_id: the token that fills rows up.
        per_token: whether a score is the mean over the answer's tokens; else their sum.
    """

    def __init__(self, model: Any, noise: Noise, pad_id: int, per_token: bool) -> None:
        self.model, self.noise, self.pad_id, self.per_token = model, noise, pad_id, per_token
        self.vocabulary = model.get_output_embeddings().weight.shape[0]

    def most_rows(self, trees: Sequence[Tree]) -> int:
        """Return the most rows of a forward over these answers, by the memory of its logits."""
        _, positions, *_ = self._lay_out(trees)
        return FLOATS // (len(positions) * self.vocabulary)

    def score(self, trees: Sequence[Tree], members: range, draw: int, sigma: float) -> Tensor:
        """Return the log-probability of each answer under each member, float64 [members, answers],
        on the CPU. NaN = its logits were not finite.

        Args:
            draw: the number of the noise.
            sigma: the standard deviation of the noise.
        """
        model, count = self.model, len(members)
        ids, positions, wanted, counts = self._lay_out(trees)
        with (
            self.noise.members(draw, members, sigma),
            torch.inference_mode(),
            evaluating(model),
        ):
            # Padding is on the right, where causal attention never looks from an answer's token.
            logits = model(
                input_ids=ids.repeat(count, 1), use_cache=False, logits_to_keep=positions
            ).logits  # [members * answers, K, V]
            targets = ids[:, positions + 1].repeat(count, 1)[..., None]
            chosen = logits.gather(2, targets)[..., 0].float()
            logp = chosen - logits.float().logsumexp(2)
        counted = torch.where(wanted.repeat(count, 1), logp, 0.0).double().sum(1)
        by_answer = counted.unflatten(0, (count, -1)).cpu()
        return by_answer / counts if self.per_token else by_answer

    def _lay_out(self, trees: Sequence[Tree]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the token ids of prompts and answers, padded on the right, [answers, T]; the
        positions whose logits are needed [K]; whether the token after each position carries a loss,
        bool [answers, K]; and the number of such tokens, float64 [answers], on the CPU.
        """
        rows = [[*tree.prompt, *tree.completions[0]] for tree in trees]
        marks = [[False] * len(tree.prompt) + list(tree.trains[0]) for tree in trees]
        width, device = max(map(len, rows)), device_of(self.model)
        ids = torch.tensor([[*row, *[self.pad_id] * (width - len(row))] for row in rows])
        trained = torch.tensor([[*mark, *[False] * (width - len(mark))] for mark in marks])
        first = min(len(tree.prompt) for tree in trees) - 1
        positions = torch.arange(first, width - 1)
        wanted = trained[:, positions + 1]
        counts = wanted.sum(1).double()
        return ids.to(device), positions.to(device), wanted.to(device), counts
