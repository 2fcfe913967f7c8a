"""Laws of the bootstrap over documents."""

import math

import numpy as np
import pytest

from hf_kvtransfer.errors import KVTransferError
from hf_kvtransfer.evaluation import bootstrap, context_value_kept, difference, gap_recovered, mean_interval


RANDOM = np.random.default_rng(0)
HARD = RANDOM.normal(size=40)  # what makes a document hard does so for all conditions


def test_what_does_not_vary_is_a_point():
    interval = mean_interval([0.3] * 20)
    assert (interval.point, interval.low, interval.high) == pytest.approx((0.3, 0.3, 0.3))
    assert vars(difference([1.0, 2.0, 4.0], [0.0, 1.0, 3.0])) == pytest.approx({"point": 1, "low": 1, "high": 1})


def test_means_are_those_of_the_drawn_documents():
    """Against the literal bootstrap with the same draws."""
    values = {"a": RANDOM.normal(size=12), "b": RANDOM.normal(size=12) + 3}
    interval = bootstrap(values, lambda mean: mean["a"] / mean["b"], samples=300, level=0.8, seed=3)
    draws = np.random.default_rng(3).multinomial(12, [1 / 12] * 12, size=300)
    figures = []
    for draw in draws:
        rows = [row for row, times in enumerate(draw) for _ in range(times)]
        figures.append(values["a"][rows].mean() / values["b"][rows].mean())
    assert interval.point == pytest.approx(values["a"].mean() / values["b"].mean())
    assert (interval.low, interval.high) == pytest.approx(np.quantile(figures, [0.1, 0.9]))


def test_an_interval_has_the_width_that_theory_gives():
    interval = mean_interval(HARD)
    error = HARD.std() / math.sqrt(len(HARD))
    assert interval.low == pytest.approx(HARD.mean() - 1.96 * error, abs=0.2 * error)
    assert interval.high == pytest.approx(HARD.mean() + 1.96 * error, abs=0.2 * error)


def test_a_seed_gives_the_same_interval_again():
    assert mean_interval(HARD, seed=1) == mean_interval(HARD, seed=1) != mean_interval(HARD, seed=2)


def test_a_higher_level_is_wider():
    narrow, wide = (mean_interval(HARD, level=level) for level in (0.5, 0.99))
    assert wide.low < narrow.low < narrow.point < narrow.high < wide.high


def test_conditions_are_paired():
    """A difference that is small beside how much documents differ is still found."""
    better = HARD - 0.05 + 0.01 * RANDOM.normal(size=len(HARD))
    paired = difference(HARD, better)
    assert paired.excludes(0)
    assert not paired.excludes(0.05)
    assert not mean_interval(HARD).excludes(float(better.mean()))


def test_figures_of_several_conditions():
    native, alone, none = HARD + 3, HARD + 5, HARD + 6
    values = {"transferred": HARD + 3.5, "source alone": alone, "target native": native, "no context": none}
    gap = bootstrap(values, lambda m: gap_recovered(m["transferred"], m["source alone"], m["target native"]))
    kept = bootstrap(values, lambda m: context_value_kept(m["transferred"], m["no context"], m["target native"]))
    assert (gap.point, gap.low, gap.high) == pytest.approx((0.75, 0.75, 0.75))
    assert (kept.point, kept.low, kept.high) == pytest.approx((5 / 6, 5 / 6, 5 / 6))


def test_values_of_a_document_are_drawn_together():
    """Asking every question of a document five times over tells nothing new."""
    repeated = mean_interval(np.repeat(HARD, 5), documents=np.repeat(np.arange(len(HARD)), 5).tolist())
    assert vars(repeated) == pytest.approx(vars(mean_interval(HARD)))
    alone = mean_interval(np.repeat(HARD, 5))
    assert alone.high - alone.low < 0.6 * (repeated.high - repeated.low)


def test_documents_of_unequal_length_count_by_their_questions():
    interval = mean_interval([1.0, 1.0, 1.0, 0.0], documents=["long", "long", "long", "short"], samples=100)
    assert (interval.point, interval.low, interval.high) == (0.75, 0.0, 1.0)


def test_an_undefined_figure_has_no_interval():
    values = {"a": [1.0, 0.0], "b": [1.0, 0.0]}
    interval = bootstrap(values, lambda mean: gap_recovered(mean["a"], mean["a"], mean["b"]))
    assert math.isnan(interval.point)
    assert math.isnan(interval.low)
    assert not interval.excludes(0)
    # One resample of many does not take the others with it.
    rarely = bootstrap({"a": [0.0] + [1.0] * 5}, lambda mean: float("nan") if mean["a"] < 0.2 else mean["a"])
    assert rarely.low == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("values", "options", "sentence"),
    [
        ({}, {}, "Got no values"),
        ({"a": []}, {}, "one or more for every condition"),
        ({"a": [1.0], "b": [1.0, 2.0]}, {}, "in the same order"),
        ({"a": [1.0]}, {"documents": [1, 2]}, "of 2 documents"),
        ({"a": [1.0]}, {"samples": 0}, "`samples` is 0"),
        ({"a": [1.0]}, {"level": 1.0}, "`level` 1.0"),
    ],
)
def test_what_cannot_be_drawn_from_is_refused(values, options, sentence):
    with pytest.raises(KVTransferError, match=sentence):
        bootstrap(values, lambda mean: 0.0, **options)
