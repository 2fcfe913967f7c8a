"""Functional forms: batched is one by one, head-local at one head is full-head, an untrained residual is linear."""

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_kvtransfer.maps import MAPS, LinearMap, MLPMap, ResidualMap


ROWS, IN, HEADS, DIM = 7, 12, 3, 5
OPTIONS = {"linear": {}, "mlp": {"hidden": 16}, "residual": {"hidden": 16}}
EACH_FORM = pytest.mark.parametrize("name", MAPS)
EACH_GROUPING = pytest.mark.parametrize("groups", [1, HEADS], ids=["shared", "local"])


def make(name, groups=1, heads=HEADS, **options):
    form = MAPS[name](IN, heads, DIM, groups, **{**OPTIONS[name], **options})
    form.reset_parameters()
    return form


def randomise(form):
    """Random weights, buffers too, scales above zero."""
    for key, tensor in form.state_dict().items():
        tensor.copy_(torch.rand_like(tensor) + 0.5 if key.endswith("scale") else torch.randn_like(tensor))
    return form


@EACH_FORM
@EACH_GROUPING
class TestEveryForm:
    def test_maps_features_of_its_groups_to_all_heads(self, name, groups):
        form = randomise(make(name, groups))
        assert form.out_features == HEADS * DIM
        assert form(torch.randn(groups, ROWS, IN)).shape == (ROWS, HEADS * DIM)

    def test_maps_rows_independently(self, name, groups):
        form = randomise(make(name, groups).double())
        features = torch.randn(groups, ROWS, IN, dtype=torch.float64)
        one_by_one = torch.cat([form(features[:, row : row + 1]) for row in range(ROWS)])
        torch.testing.assert_close(form(features), one_by_one)

    def test_gives_finite_gradients(self, name, groups):
        form = make(name, groups)
        form(torch.randn(groups, ROWS, IN)).square().sum().backward()
        form(torch.randn(groups, ROWS, IN)).sum().backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in form.parameters())
        assert any(p.grad.any() for p in form.parameters())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    def test_computes_in_the_dtype_of_its_weights(self, name, groups, dtype):
        form = make(name, groups).to(dtype)
        assert form(torch.randn(groups, ROWS, IN)).dtype == dtype
        assert form.weight_like.dtype == dtype

    def test_head_by_head_with_repeated_features_is_all_heads_with_shared_ones(self, name, groups):
        shared, local = randomise(make(name)), make(name, HEADS)
        state = shared.state_dict()
        for key, tensor in local.state_dict().items():
            given = state[key]
            if key.rpartition(".")[2] in ("feature_mean", "feature_scale"):
                given = given.expand(HEADS, -1)
            tensor.copy_(given.reshape(tensor.shape))
        features = torch.randn(1, ROWS, IN)
        torch.testing.assert_close(shared(features), local(features.expand(HEADS, -1, -1)), rtol=1e-5, atol=1e-4)

    def test_survives_a_save(self, name, groups, tmp_path):
        class Holder(PreTrainedModel):
            config_class = PreTrainedConfig

            def __init__(self, config):
                super().__init__(config)
                self.form = MAPS[name](IN, HEADS, DIM, groups, **OPTIONS[name])
                self.post_init()

            def _init_weights(self, module):
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()

        before = Holder(PreTrainedConfig())
        randomise(before.form)
        before.save_pretrained(tmp_path)
        after = Holder.from_pretrained(tmp_path)
        features = torch.randn(groups, ROWS, IN)
        assert torch.equal(before.form(features), after.form(features))
        assert {n for n, p in before.named_parameters() if p.requires_grad} == {
            n for n, p in after.named_parameters() if p.requires_grad
        }


@EACH_FORM
def test_head_local_at_one_head_is_full_head(name):
    full = randomise(make(name, groups=1, heads=1))
    local = make(name, groups=1, heads=1)
    local.load_state_dict(full.state_dict())
    features = torch.randn(1, ROWS, IN)
    assert torch.equal(full(features), local(features))


@pytest.mark.parametrize("name", [name for name, form in MAPS.items() if form.has_linear_part])
@EACH_GROUPING
def test_untrained_is_the_closed_form(name, groups):
    weight, bias = torch.randn(HEADS, DIM, IN), torch.randn(HEADS, DIM)
    features = torch.randn(groups, ROWS, IN)
    form = make(name, groups)
    form.set_linear(weight, bias)
    expected = torch.einsum("hri,hdi->rhd", features.expand(HEADS, -1, -1), weight) + bias
    torch.testing.assert_close(form(features), expected.flatten(1))


@EACH_GROUPING
def test_untrained_residual_is_its_linear_part_to_the_last_bit(groups):
    weight, bias = torch.randn(HEADS * DIM, IN), torch.randn(HEADS * DIM)
    residual, linear = make("residual", groups), make("linear", groups)
    residual.set_scales(*(torch.rand(n) + 0.5 for n in (IN, IN, HEADS * DIM, HEADS * DIM)))
    for form in (residual, linear):
        form.set_linear(weight, bias)
    features = 100 * torch.randn(groups, ROWS, IN)
    assert torch.equal(residual(features), linear(features))


def test_residual_trains_its_correction_alone():
    assert all(name.startswith("correction.") for name, _ in ResidualMap(IN, HEADS, DIM, hidden=4).named_parameters())


@EACH_GROUPING
def test_mlp_is_one_sequential_per_head(groups):
    form = randomise(make("mlp", groups).double())
    features = torch.randn(groups, ROWS, IN, dtype=torch.float64)
    outputs = []
    for head in range(HEADS):
        layers = [nn.Linear(IN, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, DIM)]
        alone = nn.Sequential(*layers).double()
        names = ("in", "hidden", "out")
        alone.load_state_dict(
            {
                f"{2 * i}.{part}": getattr(form, f"{part}_{names[i]}")[head]
                for i in range(3)
                for part in ("weight", "bias")
            }
        )
        own = min(head, groups - 1)
        standard = (features[own] - form.feature_mean[own]) / form.feature_scale[own]
        outputs.append(alone(standard))
    expected = torch.cat(outputs, dim=-1) * form.output_scale + form.output_mean
    torch.testing.assert_close(form(features), expected)


def test_mlp_with_scales_does_not_mind_the_units_of_its_features():
    form, features = make("mlp").double(), torch.randn(1, ROWS, IN, dtype=torch.float64)
    scale, mean = torch.rand(IN, dtype=torch.float64) * 1000, torch.randn(IN, dtype=torch.float64) * 1000
    plain = form(features)
    form.set_scales(mean, scale, form.output_mean, form.output_scale)
    torch.testing.assert_close(form(features * scale + mean), plain)


def test_a_linear_map_keeps_the_names_and_shapes_of_saved_mappers():
    shapes = {name: tuple(tensor.shape) for name, tensor in LinearMap(IN, HEADS, DIM).state_dict().items()}
    assert shapes == {"weight": (HEADS * DIM, IN), "bias": (HEADS * DIM,)}


def test_mlp_has_no_linear_part_to_fill():
    form = make("mlp")
    before = {name: tensor.clone() for name, tensor in form.state_dict().items()}
    form.set_linear(torch.randn(HEADS * DIM, IN), torch.randn(HEADS * DIM))
    assert not MLPMap.has_linear_part
    assert all(torch.equal(tensor, before[name]) for name, tensor in form.state_dict().items())
