"""Ridge from streamed weighted moments is weighted least squares over the rows themselves."""

import pytest
import torch
from sklearn.linear_model import Ridge

from hf_kvtransfer.calibration import Moments, weighted
from hf_kvtransfer.calibration.weighted import System, WeightedMoments
from hf_kvtransfer.errors import CalibrationError


HEADS, FEATURES, WIDTH, ROWS = 3, 12, 5, 400
PENALTY = 0.5


def make_rows(rows=ROWS, seed=0, offset=0.0):
    """Features, outputs that depend on them, and uneven weights whose scale differs by head."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(HEADS, rows, FEATURES, generator=generator)
    mixing = torch.randn(HEADS, FEATURES, WIDTH, generator=torch.Generator().manual_seed(99))
    weights = torch.randn(HEADS, rows, generator=generator).exp() * torch.tensor([1e-3, 1.0, 30.0])[:, None]
    # Heavy rows follow another rule, so that weights matter.
    y = x @ mixing + weights[..., None].log() * x[..., :WIDTH] + torch.randn(HEADS, rows, WIDTH, generator=generator)
    return x + offset, y + offset, weights


def summed(*pieces, dtype=torch.float64):
    moments = WeightedMoments(HEADS, FEATURES, WIDTH, dtype)
    for piece in pieces:
        moments.update(*piece)
    return moments


def system(moments, rows, alpha, columns=(slice(0, FEATURES),)):
    """Of all heads, with the plain sums that other moments keep of the same rows."""
    x, y, _ = rows
    x = torch.cat([x[..., part] for part in columns], dim=-1)
    found = []
    for head, strength in enumerate(torch.as_tensor(alpha, dtype=torch.float64).expand(HEADS).tolist()):
        plain = Moments(x.shape[2], WIDTH, moments.dtype)
        plain.update(x[head], y[head])
        own = System(plain.sxx, plain.sxy, plain.mean_x, plain.mean_y, plain.syy)
        found.append(moments.system(head, strength, own, columns))
    return System(*(torch.stack(parts) for parts in zip(*found, strict=True)))


def solve(system):
    gram, cross, mean_x, mean_y, _ = (each.double() for each in system)
    slope = torch.linalg.solve(gram + PENALTY * torch.eye(gram.shape[1]), cross)
    return slope, mean_y - (mean_x[:, None] @ slope)[:, 0]


def cut(rows, *ends):
    return [tuple(each[:, start:stop] for each in rows) for start, stop in zip((0, *ends), (*ends, ROWS), strict=True)]


def assert_same(a, b, rtol=1e-10):
    assert a.count == b.count
    for (name, mine), theirs in zip(a.tensors().items(), b.tensors().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=rtol * float(theirs.abs().max()), msg=name)


@pytest.mark.parametrize("columns", [[slice(0, FEATURES)], [slice(6, 9), slice(0, 2)]], ids=["all", "some"])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_it_is_weighted_ridge_over_the_rows(alpha, columns):
    x, y, weights = make_rows(offset=3.0)
    weights[:, 5:9] = 0.0
    rows = x, y, weights
    found = system(summed(*cut(rows, 7, 150)), rows, alpha, columns)
    slope, intercept = solve(found)
    x = torch.cat([x[..., part] for part in columns], dim=-1)
    w = 1 + alpha * (weights / weights.mean(1, keepdim=True) - 1)
    for head in range(HEADS):
        reference = Ridge(alpha=PENALTY).fit(x[head].double(), y[head].double(), sample_weight=w[head].double())
        torch.testing.assert_close(slope[head], torch.tensor(reference.coef_).T, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(intercept[head], torch.tensor(reference.intercept_), rtol=1e-5, atol=1e-5)
        mean = (w[head, :, None] * y[head]).sum(0).double() / ROWS
        syy = (w[head, :, None] * (y[head] - mean).square()).sum(0).double()
        torch.testing.assert_close(found.syy[head], syy, rtol=1e-5, atol=1e-5)


def test_heads_have_strengths_of_their_own():
    rows = make_rows()
    moments, alphas = summed(rows), torch.tensor([0.0, 0.4, 1.0], dtype=torch.float64)
    mixed = system(moments, rows, alphas)
    for head, alpha in enumerate(alphas.tolist()):
        for mine, theirs in zip(mixed, system(moments, rows, alpha), strict=True):
            torch.testing.assert_close(mine[head], theirs[head], rtol=0, atol=0)


def test_without_weights_it_is_the_unweighted_system():
    x, y, weights = make_rows(offset=10.0)
    ones = x, y, torch.ones_like(weights)
    plain = system(summed(ones), ones, 0.0)
    # To the last bit the plain sums, whatever the weights are, and those of weights of one at any strength.
    for other in (weights.square(), torch.zeros_like(weights)):
        for mine, theirs in zip(system(summed((x, y, other)), (x, y, other), 0.0), plain, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    for mine, theirs in zip(system(summed(ones), ones, 0.7), plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-8)


@pytest.mark.parametrize("features", [FEATURES, 700], ids=["one panel", "panels"])
def test_pieces_and_merged_parts_are_the_whole(monkeypatch, features):
    generator = torch.Generator().manual_seed(3)
    x, y, weights = make_rows(offset=100.0)
    x = torch.randn(HEADS, ROWS, features, generator=generator) + 100.0
    whole, first, second = (WeightedMoments(HEADS, features, WIDTH) for _ in range(3))
    whole.update(x, y, weights)
    monkeypatch.setattr(weighted, "BLOCK_ROWS", 64)
    pieces = cut((x, y, weights), 1, 90, 200)
    for part, mine in ((first, pieces[:2]), (second, pieces[2:])):
        for piece in mine:
            part.update(*piece)
        part.tensors()  # reading in between changes nothing
    first.merge(second)
    first.merge(WeightedMoments(HEADS, features, WIDTH))
    assert_same(first, whole)
    gram = first.tensors()["gram"]
    torch.testing.assert_close(gram, gram.mT, rtol=1e-12, atol=1e-9)


def test_what_is_stored_is_what_was_summed():
    moments = summed(make_rows())
    again = WeightedMoments.from_tensors(moments.count, moments.tensors())
    assert_same(again, moments, rtol=0)
    again.update(*make_rows(seed=1))
    assert again.count == 2 * ROWS
    assert_same(again, summed(make_rows(), make_rows(seed=1)))


def test_a_common_offset_costs_no_digits_and_float32_few():
    expected = solve(system(summed(make_rows()), make_rows(), 0.5))[0]
    for dtype, offset, tolerance in ((torch.float64, 1e3, 1e-3), (torch.float32, 0.0, 1e-5)):
        rows = make_rows(offset=offset)
        moments = summed(*cut(rows, 100), dtype=dtype)
        found = system(moments, rows, 0.5)
        assert moments.dtype is found.gram.dtype is dtype
        torch.testing.assert_close(solve(found)[0], expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("features", [1, 40, 150, 199, 200, 500])
def test_the_largest_alpha_keeps_enough_rows_and_is_the_largest(features):
    x, y, weights = make_rows()
    alpha = summed((x, y, weights)).largest_alpha(features)
    variation = weights.double().var(1, correction=0) / weights.double().mean(1).square()
    effective = ROWS / (1 + alpha.square() * variation)
    needed = min(ROWS, 2 * features)
    assert (effective >= needed * (1 - 1e-9)).all()
    assert (alpha <= 1).all()
    tight = (effective - needed).abs() < 1e-6 * needed
    assert (tight | (alpha == 1)).all()
    assert (alpha > 0).all() if 2 * features < ROWS else not alpha.any()


def test_heads_without_or_with_even_weights():
    x, y, weights = make_rows()
    weights[0], weights[1] = 0.0, 2.0
    rows = x, y, weights
    moments = summed(*cut(rows, 50))
    alpha = moments.largest_alpha(150)
    assert alpha[:2].tolist() == [0, 1]
    assert 0 < alpha[2] < 1
    for mine, plain in zip(system(moments, rows, 1.0), system(moments, rows, 0.0), strict=True):
        torch.testing.assert_close(mine[0], plain[0], rtol=0, atol=0)  # there is nothing to go by
        torch.testing.assert_close(mine[1], plain[1])
    assert not WeightedMoments(HEADS, FEATURES, WIDTH).largest_alpha(5).any()


def test_what_does_not_fit_is_refused():
    moments = WeightedMoments(HEADS, FEATURES, WIDTH)
    x, y, weights = make_rows(4)
    for rows in (
        (x[:2], y, weights),
        (x[..., 1:], y, weights),
        (x, y[:, 1:], weights),
        (x, y, weights[0]),
        (x[0], y[0], weights),
    ):
        with pytest.raises(CalibrationError, match="for the same tokens"):
            moments.update(*rows)
    for bad in (-1.0, float("nan"), float("inf")):
        spoilt = weights.clone()
        spoilt[1, 2] = bad
        with pytest.raises(CalibrationError, match="negative or not finite"):
            moments.update(x, y, spoilt)
    with pytest.raises(CalibrationError, match="can't be merged into moments"):
        moments.merge(WeightedMoments(HEADS, FEATURES + 1, WIDTH))
    with pytest.raises(CalibrationError, match="half precision would lose"):
        WeightedMoments(HEADS, FEATURES, WIDTH, torch.bfloat16)
    assert moments.count == 0
