"""The interface of a sampling engine: what goes in, and what comes out."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass
class Completions:
    """What was sampled, in order (group, prompt, sample). N rows in all.

    tokens: int64 [N, L], padded with the pad id after `lengths`; the stop token, where there is
    one, is included. lengths: int64 [N]. finished: bool [N], False where max_new_tokens cut the row
    off. logprobs: float32 [N, L], of the sampled tokens under the tempered distribution; None if
    not asked for. broken: bool [N], True where the model's logits were not finite, so that the row
    says nothing. generated: tokens the model produced in all, those thrown away after a row's end
    not counted.
    """

    tokens: Tensor
    lengths: Tensor
    finished: Tensor
    logprobs: Tensor | None
    broken: Tensor

    @property
    def generated(self) -> int:
        """Sum of the lengths."""
        return int(self.lengths.sum())

    def texts(self, tokenizer: Any) -> list[str]:
        """The completions as text, special tokens left out."""
        rows = [
            row[:length]
            for row, length in zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)
        ]
        return tokenizer.batch_decode(rows, skip_special_tokens=True)
