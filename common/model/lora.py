"""Low-rank adapters (LoRA, arXiv:2106.09685), through peft."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def peft_of_today() -> Iterator[None]:
    """Meanwhile peft 0.21 may look at a property that transformers 5.23 has renamed, without a
    warning.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning
        )
        yield
