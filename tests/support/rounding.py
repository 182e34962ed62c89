"""How far two right results may differ: the rounding of a sum in its dtype, whatever the order of
the sum, which processors and kernels choose.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


def rounding_of_product(rows: Tensor, columns: Tensor) -> float:
    """The largest difference of two computations of `rows @ columns.T` in the rows' dtype.

    A sum of n products rounds by at most n units in the last place of the sum of their absolute
    values, in any order (Higham, Accuracy and Stability of Numerical Algorithms, 3.1); two of them
    differ by at most twice as much. rows: [M, n]; columns: [N, n].
    """
    unit = torch.finfo(rows.dtype).eps / 2
    sizes = rows.detach().abs().double() @ columns.detach().abs().double().T
    return 2 * rows.shape[1] * unit * sizes.max().item()


def rounding_of_gradients(gradients: Iterable[Tensor | None], terms: int) -> float:
    """The largest difference of two computations of a model's gradients, relative to the largest
    element of all, since that of a weight may be a sum whose terms cancel. terms: in the longest
    chain of sums from the loss to a weight.
    """
    known = [gradient for gradient in gradients if gradient is not None]
    largest = max(gradient.abs().max().item() for gradient in known)
    return terms * torch.finfo(known[0].dtype).eps * largest
