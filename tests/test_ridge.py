"""The closed form is scikit-learn's, and figures from moments are figures from rows."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression, Ridge

from hf_kvtransfer.calibration import CalibrationStatistics, layer_scores, r2, select_layers, solve_ridge
from hf_kvtransfer.errors import CalibrationError, SingularSystemError
from hf_kvtransfer.geometry import LayerGeometry, ModelGeometry


SOURCE_LAYERS = ((2, 8), (1, 16), (2, 8))
TARGET_LAYERS = ((2, 8), (2, 12))
SOURCE_SLICES = [slice(0, 16), slice(16, 32), slice(32, 48)]
TARGET_SLICES = [slice(0, 16), slice(16, 40)]
KINDS = ("keys", "values")


def geometry(layers):
    return ModelGeometry(
        model_type="llama",
        layers=tuple(LayerGeometry(heads, dim, "full_attention", None, True) for heads, dim in layers),
        hidden_size=32,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        text_config_name=None,
        checkpoint=None,
        revision=None,
        attention_heads=4,
    )


class Calibrated:
    """Rows, and the statistics made of them."""

    def __init__(self, fit=400, heldout=150, offset=0.0, change=None, dtype=torch.float64):
        self.statistics = CalibrationStatistics(geometry(SOURCE_LAYERS), geometry(TARGET_LAYERS), "same", dtype=dtype)
        mixing = torch.randn(48, 40, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        generator = torch.Generator().manual_seed(0)
        self.x, self.y = {}, {}
        # The held-out rows lie elsewhere, so that a bias matters.
        for split, count, shift in (("fit", fit, 0.0), ("heldout", heldout, 0.3)):
            for kind in KINDS:
                x = torch.randn(count, 48, generator=generator, dtype=torch.float64) + shift + offset
                if change is not None:
                    change(x)
                noise = torch.randn(count, 40, generator=generator, dtype=torch.float64)
                self.x[split, kind], self.y[split, kind] = x, x @ mixing + 3 * noise
            if count:
                sources = [self.x[split, kind] for kind in KINDS]
                self.statistics.update(split, *sources, *(self.y[split, kind] for kind in KINDS))

    def features(self, split, kind, layers):
        return torch.cat([self.x[split, kind][:, SOURCE_SLICES[s]] for s in layers], dim=1).numpy()

    def outputs(self, split, kind, t):
        return self.y[split, kind][:, TARGET_SLICES[t]].numpy()


def pooled_r2(expected, predicted, heads):
    """`1 − Σ SSE / Σ SST` of each head, from rows."""
    sse = ((expected - predicted) ** 2).sum(0).reshape(heads, -1).sum(1)
    sst = ((expected - expected.mean(0)) ** 2).sum(0).reshape(heads, -1).sum(1)
    return 1 - sse / sst


@pytest.fixture(scope="module")
def calibrated():
    return Calibrated()


SUPPORTS = [[[0], [2]], [[0, 2], [1, 2]], [[0, 1, 2], [0, 1, 2]]]


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_heo2026_is_the_dense_ridge_solution(support, offset):
    calibrated = Calibrated(offset=offset)
    solution = solve_ridge(calibrated.statistics, support, ridge_lambda=0.01)
    for kind in KINDS:
        for t, layers in enumerate(support):
            dense = Ridge(alpha=0.01).fit(calibrated.features("fit", kind, layers), calibrated.outputs("fit", kind, t))
            weight, bias = solution.weights(kind)[t].numpy(), solution.biases(kind)[t].numpy()
            assert weight.shape == (TARGET_SLICES[t].stop - TARGET_SLICES[t].start, 16 * len(layers))
            np.testing.assert_allclose(weight, dense.coef_, rtol=1e-4, atol=1e-8)
            unseen = calibrated.features("heldout", kind, layers)
            np.testing.assert_allclose(unseen @ weight.T + bias, dense.predict(unseen), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("fit", "change"),
    [
        (30, None),
        (400, lambda x: x[:, 1].copy_(x[:, 0] + 1e-6 * x[:, 5])),
        (400, lambda x: x[:, 3].zero_()),
        (400, lambda x: x[:, 4:8].mul_(1e4)),
    ],
    ids=["fewer rows than features", "nearly equal features", "a dead feature", "features of very different size"],
)
def test_heo2026_predicts_as_the_dense_solution_when_ill_posed(fit, change):
    calibrated = Calibrated(fit=fit, change=change)
    support = [[0, 1, 2]] * 2
    solution = solve_ridge(calibrated.statistics, support)
    for kind in KINDS:
        for t in range(2):
            x, unseen = (calibrated.features(split, kind, support[t]) for split in ("fit", "heldout"))
            dense = Ridge(alpha=0.01, solver="svd").fit(x, calibrated.outputs("fit", kind, t))
            predicted = unseen @ solution.weights(kind)[t].numpy().T + solution.biases(kind)[t].numpy()
            expected = dense.predict(unseen)
            np.testing.assert_allclose(predicted, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("scored", ["fit", "heldout"])
def test_probes_are_ordinary_least_squares(calibrated, scored):
    scores = layer_scores(calibrated.statistics, scored)
    assert scores.shape == (2, 3)
    for t, (heads, _) in enumerate(TARGET_LAYERS):
        for s in range(3):
            figures = []
            for kind in KINDS:
                dense = LinearRegression().fit(
                    calibrated.features("fit", kind, [s]), calibrated.outputs("fit", kind, t)
                )
                predicted = dense.predict(calibrated.features(scored, kind, [s]))
                figures.append(pooled_r2(calibrated.outputs(scored, kind, t), predicted, heads).mean())
            assert scores[t, s].item() == pytest.approx(np.mean(figures), abs=1e-9)


def test_dead_and_copied_features_dont_disturb_the_probes(calibrated):
    def change(x):
        x[:, 3] = 0
        x[:, 5] = x[:, 4]

    disturbed = Calibrated(change=change)
    scores = layer_scores(disturbed.statistics)
    dense = LinearRegression()
    figures = []
    for kind in KINDS:
        x, y = disturbed.features("fit", kind, [0]), disturbed.outputs("fit", kind, 1)
        figures.append(pooled_r2(y, dense.fit(x, y).predict(x), 2).mean())
    assert scores[1, 0].item() == pytest.approx(np.mean(figures), abs=1e-9)


@pytest.mark.parametrize("split", ["fit", "heldout"])
@pytest.mark.parametrize("ridge_lambda", [0.01, 100.0])
@pytest.mark.parametrize("support", SUPPORTS)
def test_r2_from_moments_is_r2_from_rows(calibrated, split, ridge_lambda, support):
    solution = solve_ridge(calibrated.statistics, support, ridge_lambda)
    figures = r2(calibrated.statistics, solution, split)
    for kind in KINDS:
        for t, (heads, _) in enumerate(TARGET_LAYERS):
            x, y = calibrated.features(split, kind, support[t]), calibrated.outputs(split, kind, t)
            predicted = x @ solution.weights(kind)[t].numpy().T + solution.biases(kind)[t].numpy()
            np.testing.assert_allclose(figures[kind][t], pooled_r2(y, predicted, heads), atol=1e-9)
            assert figures[f"{kind}_per_layer"][t] == pytest.approx(pooled_r2(y, predicted, 1)[0], abs=1e-9)


def test_a_wrong_bias_costs_r2(calibrated):
    solution = solve_ridge(calibrated.statistics, [[0], [1]])
    before = r2(calibrated.statistics, solution, "fit")
    solution.bias_keys[0] += 5
    after = r2(calibrated.statistics, solution, "fit")
    assert max(after["keys"][0]) < min(before["keys"][0])
    assert after["values"] == before["values"]


def test_more_features_and_less_shrinkage_fit_better(calibrated):
    def fitted(support, ridge_lambda=0.01):
        return r2(calibrated.statistics, solve_ridge(calibrated.statistics, support, ridge_lambda), "fit")[
            "keys_per_layer"
        ]

    by_layers = [fitted([list(range(k))] * 2)[0] for k in (1, 2, 3)]
    by_shrinkage = [fitted([[0, 1, 2]] * 2, value)[0] for value in (0.0, 0.01, 1.0, 100.0)]
    assert by_layers == sorted(by_layers)
    assert by_shrinkage == sorted(by_shrinkage, reverse=True)


def test_a_model_is_predicted_by_itself():
    same = CalibrationStatistics(geometry(SOURCE_LAYERS), geometry(SOURCE_LAYERS), "same")
    keys, values = torch.randn(400, 48), torch.randn(400, 48)
    same.update("fit", keys, values, keys, values)
    support = select_layers(layer_scores(same), 1)
    assert support == [[0], [1], [2]]
    solution = solve_ridge(same, support)
    for weight, bias in zip(solution.weight_keys, solution.bias_keys, strict=True):
        torch.testing.assert_close(weight, torch.eye(16, dtype=torch.float64), rtol=0, atol=1e-4)
        torch.testing.assert_close(bias, torch.zeros(16, dtype=torch.float64), rtol=0, atol=1e-4)
    assert min(r2(same, solution, "fit")["values_per_layer"]) > 1 - 1e-8


def test_target_layers_with_one_support_share_a_factorisation(calibrated, monkeypatch):
    factored = []
    cholesky = torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda matrix: factored.append(matrix.shape) or cholesky(matrix))
    solve_ridge(calibrated.statistics, [[0, 1], [0, 1]])
    assert factored == [(32, 32)] * 2
    factored.clear()
    solve_ridge(calibrated.statistics, [[0], [1]])
    assert factored == [(16, 16)] * 4


def test_the_order_of_the_support_does_not_matter(calibrated):
    ascending, descending = (solve_ridge(calibrated.statistics, [layers] * 2) for layers in ([0, 2], [2, 0]))
    assert torch.equal(ascending.weight_values[1], descending.weight_values[1])
    assert ascending.support == descending.support == [[0, 2]] * 2


def test_rounded_weights_keep_the_mean():
    calibrated = Calibrated(offset=1e3)
    rounded = solve_ridge(calibrated.statistics, [[0, 1, 2]] * 2, dtype=torch.float32)
    assert rounded.weight_keys[0].dtype == rounded.bias_keys[0].dtype == torch.float32
    x, y = calibrated.features("fit", "keys", [0, 1, 2]), calibrated.outputs("fit", "keys", 0)
    predicted = x @ rounded.weight_keys[0].double().numpy().T + rounded.bias_keys[0].double().numpy()
    np.testing.assert_allclose(predicted.mean(0), y.mean(0), rtol=1e-6)


def test_float32_sums_solve_alike(calibrated):
    support = [[0, 1, 2]] * 2
    rough = solve_ridge(Calibrated(dtype=torch.float32).statistics, support)
    exact = solve_ridge(calibrated.statistics, support)
    torch.testing.assert_close(rough.weight_keys[1], exact.weight_keys[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("fit", "change"),
    [
        (400, lambda x: x[:, 1].copy_(x[:, 0])),
        (400, lambda x: x[:, 1].copy_(x[:, 0] + x[:, 2])),
        (400, lambda x: x[:, 1].zero_()),
        (20, None),
    ],
    ids=["copied", "combined", "dead", "few rows"],
)
def test_a_singular_system_is_refused_in_a_sentence(fit, change):
    statistics = Calibrated(fit=fit, change=change).statistics
    support = [[0, 1], [0, 1]]
    with pytest.raises(
        SingularSystemError, match=rf"keys of target layer 0, 1 .*32 features, {fit} tokens, λ = 0.*larger λ"
    ):
        solve_ridge(statistics, support, ridge_lambda=0.0)
    assert all(torch.isfinite(weight).all() for weight in solve_ridge(statistics, support).weight_keys)


@pytest.mark.parametrize("seed", range(20))
def test_rounding_doesnt_let_a_singular_system_pass(seed):
    generator = torch.Generator().manual_seed(seed)

    def change(x):
        # Exactly singular in the reals; in float64 the last pivot is noise of either sign.
        x[:, 15] = x[:, :15] @ torch.randn(15, generator=generator, dtype=torch.float64)

    statistics = Calibrated(heldout=0, change=change).statistics
    with pytest.raises(SingularSystemError, match="16 features"):
        solve_ridge(statistics, [[0], [0]], ridge_lambda=0.0)


def test_damaged_sums_are_refused():
    statistics = Calibrated().statistics
    statistics.splits["fit"]["values"].sxx[4, 4] = float("nan")
    with pytest.raises(SingularSystemError, match="values of target layer 0"):
        solve_ridge(statistics, [[0], [1]])


@pytest.mark.parametrize("support", [[[0]], [[0], []], [[0], [3]], [[0], [1, 1]]])
def test_an_impossible_support_is_refused(calibrated, support):
    with pytest.raises(CalibrationError, match="expected"):
        solve_ridge(calibrated.statistics, support)


@pytest.mark.parametrize("ridge_lambda", [-1.0, float("nan"), float("inf")])
def test_an_impossible_lambda_is_refused(calibrated, ridge_lambda):
    with pytest.raises(CalibrationError, match="ridge_lambda"):
        solve_ridge(calibrated.statistics, [[0], [1]], ridge_lambda)


def test_figures_of_an_empty_split_are_refused():
    statistics = Calibrated(heldout=0).statistics
    with pytest.raises(CalibrationError, match="'heldout' split"):
        r2(statistics, solve_ridge(statistics, [[0], [1]]), "heldout")


class TestSelection:
    scores = torch.tensor([[0.1, 0.9, 0.5, 0.9], [0.3, 0.3, 0.3, 0.3]])

    def test_takes_the_best_in_ascending_order(self):
        assert select_layers(self.scores, 2) == [[1, 3], [0, 1]]
        assert select_layers(self.scores, 3) == [[1, 2, 3], [0, 1, 2]]

    def test_a_tie_goes_to_the_lower_layer(self):
        assert select_layers(self.scores, 1) == [[1], [0]]
        assert select_layers(torch.zeros(1, 400), 300) == [list(range(300))]

    def test_supports_are_nested(self):
        for k in range(1, 4):
            pairs = zip(select_layers(self.scores, k), select_layers(self.scores, k + 1), strict=True)
            assert all(set(small) < set(large) for small, large in pairs)

    def test_all_takes_every_layer(self):
        assert select_layers(self.scores, "all") == [[0, 1, 2, 3]] * 2

    @pytest.mark.parametrize("k", [0, 5, "some", 1.5, True])
    def test_an_impossible_k_is_refused(self, k):
        with pytest.raises(CalibrationError, match="from 1 to 4"):
            select_layers(self.scores, k)

    def test_scores_that_arent_numbers_are_refused(self):
        with pytest.raises(CalibrationError, match="finite"):
            select_layers(torch.tensor([[0.1, float("nan")]]), 1)
