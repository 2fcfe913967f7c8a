"""How quality changes with the distance from the hand-over, in bins of tokens."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor


TOKENS_PER_BIN = 16


def bin_means(values: Tensor, tokens: int = TOKENS_PER_BIN) -> list[list[float]]:
    """
    Means over neighbouring tokens.

    Args:
        values (`torch.Tensor` of shape `[batch, scored]`): one figure for each token, from the hand-over on.
        tokens (`int`, *optional*, defaults to 16): of one bin.

    Returns:
        `list[list[float]]`: per row the mean of each bin, the last of which may have fewer tokens.
    """
    bins = [part.double().mean(dim=1) for part in values.split(tokens, dim=1)]
    return [[float(one[row]) for one in bins] for row in range(values.shape[0])]


def mean_of_bins(bins: Sequence[float], scored: int, tokens: int = TOKENS_PER_BIN) -> float:
    """
    The mean over all tokens that a row's bins are made of.

    Args:
        bins (`Sequence[float]`): of one row, from [`bin_means`].
        scored (`int`): how many tokens there are.
        tokens (`int`, *optional*, defaults to 16): of one bin.
    """
    sizes = [min(tokens, scored - start) for start in range(0, scored, tokens)]
    return sum(size * value for size, value in zip(sizes, bins, strict=True)) / scored


def drift(rows: Sequence[Sequence[float]]) -> list[float]:
    """
    The mean of each bin over chunks.

    Args:
        rows (`Sequence[Sequence[float]]`): per chunk its bins, from [`bin_means`].
    """
    means: list[float] = np.asarray(rows, dtype=np.float64).mean(axis=0).tolist()
    return means
