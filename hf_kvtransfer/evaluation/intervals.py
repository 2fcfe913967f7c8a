"""How sure a figure is: a paired bootstrap over documents."""

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import KVTransferError


@dataclass(frozen=True)
class Interval:
    """
    A figure and the interval it lies in.

    Args:
        point (`float`): the figure of all documents.
        low (`float`): the lower end of the interval; `nan` if too many resamples leave the figure undefined.
        high (`float`): its upper end.
    """

    point: float
    low: float
    high: float

    def excludes(self, value: float = 0.0) -> bool:
        """Whether a value, by default no difference, lies outside the interval."""
        return self.low > value or self.high < value

    def __str__(self) -> str:
        return f"{self.point:.3f} [{self.low:.3f}, {self.high:.3f}]"


def bootstrap(
    values: Mapping[str, Sequence[float]],
    statistic: Callable[[dict[str, float]], float],
    *,
    documents: Sequence[Hashable] | None = None,
    samples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """
    The percentile interval of a figure that is made of the means of several conditions.

    Documents are drawn with replacement, the same ones for all conditions: what makes a document hard does so for all
    of them, and cancels in a difference or a ratio.

    Args:
        values (`Mapping[str, Sequence[float]]`): per condition one value for each question or chunk, in one order.
        statistic (`Callable`):
            From the mean of each condition, by name, to the figure, for example
            `lambda mean: gap_recovered(mean["transferred"], mean["source alone"], mean["target native"])`.
        documents (`Sequence`, *optional*):
            Which document each value belongs to. Values of one document are drawn together. By default each value is a
            document of its own.
        samples (`int`, *optional*, defaults to 2000): how often documents are drawn.
        level (`float`, *optional*, defaults to 0.95): share of the resamples that the interval holds.
        seed (`int`, *optional*, defaults to 0): of the draw.

    Returns:
        [`Interval`]: resamples that leave the figure undefined (`nan`) don't count, unless they are more than the
        interval leaves out.

    Raises:
        [`KVTransferError`]: if there are no values, or not the same number for all, or `samples` or `level` are out of
            range.
    """
    figures = bootstraps(values, {"figure": statistic}, documents=documents, samples=samples, level=level, seed=seed)
    return figures["figure"]


def bootstraps(
    values: Mapping[str, Sequence[float]],
    statistics_of: Mapping[str, Callable[[dict[str, float]], float]],
    *,
    documents: Sequence[Hashable] | None = None,
    samples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> dict[str, Interval]:
    """
    The intervals of several figures, of the same draw. Arguments, errors and each result as in [`bootstrap`], with a
    statistic for each figure's name.
    """
    lengths = {name: len(column) for name, column in values.items()}
    expected = len(documents) if documents is not None else next(iter(lengths.values()), 0)
    if not expected or set(lengths.values()) != {expected}:
        raise KVTransferError(
            f"Got {lengths or 'no'} values{'' if documents is None else f' of {len(documents)} documents'}; expected "
            "one or more for every condition, in the same order. Give every condition the same questions."
        )
    if samples < 1 or not 0 < level < 1:
        raise KVTransferError(
            f"`samples` is {samples} and `level` {level}; expected one sample or more and a level between 0 and 1."
        )
    labels: Sequence[Hashable] = range(expected) if documents is None else documents
    numbers = {document: number for number, document in enumerate(dict.fromkeys(labels))}
    rows = [numbers[document] for document in labels]
    sums, counts = np.zeros((len(numbers), len(values))), np.bincount(rows)
    np.add.at(sums, rows, np.array([list(column) for column in values.values()], dtype=np.float64).T)
    # How often each document is drawn, instead of the documents: one product gives all means.
    drawn = np.random.default_rng(seed).multinomial(len(counts), np.full(len(counts), 1 / len(counts)), size=samples)
    means = [dict(zip(values, row, strict=True)) for row in ((drawn @ sums) / (drawn @ counts)[:, None]).tolist()]
    whole = {name: statistics.fmean(column) for name, column in values.items()}
    return {
        name: _interval(float(statistic(whole)), np.array([statistic(mean) for mean in means], np.float64), level)
        for name, statistic in statistics_of.items()
    }


def mean_interval(values: Sequence[float], **options: Any) -> Interval:
    """The interval of one condition's mean; options as in [`bootstrap`]."""
    return bootstrap({"values": values}, lambda mean: mean["values"], **options)


def difference(values: Sequence[float], others: Sequence[float], **options: Any) -> Interval:
    """
    The interval of the difference of two conditions' means, `values − others`: one that excludes 0 is more than chance.
    Options as in [`bootstrap`].
    """
    columns = {"values": values, "others": others}
    return bootstrap(columns, lambda mean: mean["values"] - mean["others"], **options)


def _interval(point: float, figures: Any, level: float) -> Interval:
    undefined = np.isnan(figures)
    if undefined.mean() > 1 - level:
        return Interval(point, float("nan"), float("nan"))
    low, high = np.quantile(figures[~undefined], [(1 - level) / 2, (1 + level) / 2])
    return Interval(point, float(low), float(high))
