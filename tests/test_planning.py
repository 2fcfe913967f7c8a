"""What a plan says of a recipe, from configurations alone, against the mapper, the statistics and the conversion."""

import itertools
from collections import Counter

import pytest
import torch
from transformers import GPT2Config, Qwen3Config

from hf_kvtransfer import KVMapper
from hf_kvtransfer.calibration import CalibrationStatistics
from hf_kvtransfer.costs import conversion_flops, layer_costs, map_shapes
from hf_kvtransfer.errors import KVTransferError, UnsupportedModelError
from hf_kvtransfer.geometry import ModelGeometry
from hf_kvtransfer.latency.random_pair import pair_config
from hf_kvtransfer.modules import decoder_of
from hf_kvtransfer.planning import Calibration, chosen_plan, plan_pair, plan_recipes, uniform_support
from hf_kvtransfer.recipes import CONTEXT_LENGTH

from .architectures import ARCHITECTURES, build, missing
from .test_cli import invoke


def qwen3(layers, hidden=32, heads=4, kv_heads=2, **changes):
    shape = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16}
    return Qwen3Config(num_hidden_layers=layers, intermediate_size=48, vocab_size=64, **(shape | changes))


SOURCE, TARGET = qwen3(4), qwen3(6, hidden=48)
PAIR = plan_pair(SOURCE, TARGET)
RECIPES = [
    {"k": 1},
    {"k": 4},
    {"k": 2, "heads": "local"},
    {"k": 2, "anchor_layers": 0},
    {"k": 2, "anchor_layers": 1},
    {"k": 0, "anchor_layers": 2},
    {"k": 1, "anchor_layers": 6},
    {"k": 2, "anchor_layers": 2, "anchor_start": 3},
    {"k": 0, "anchor_layers": 1, "anchor_start": 2, "heads": "local"},
]


def planned(k, heads="full", anchor_layers=None, anchor_start=0, **more):
    plans = plan_recipes(PAIR, ks=[k], heads=heads, anchors=[anchor_layers], anchor_start=anchor_start, **more)
    assert len(plans) == 1
    return plans[0]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_plan_is_that_of_the_mapper(recipe):
    plan = planned(**recipe)
    config = pair_config(SOURCE, TARGET, uniform_support(PAIR.source, PAIR.target, **recipe))
    mapper = KVMapper(config)
    assert plan.parameters == mapper.num_parameters()
    assert Counter(plan.maps) == Counter(map_shapes(config))
    assert plan.cost == conversion_flops(config, CONTEXT_LENGTH)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("memory", [None, 2**40])
def test_the_statistics_are_as_large_as_planned(recipe, memory):
    """With memory enough, keys and values are summed in one system, as `fit` does."""
    from hf_kvtransfer.recipes import recipe as made

    plan = planned(**recipe, memory=memory)
    settings = {name: value for name, value in recipe.items() if name.startswith("anchor")}
    layout = made("auto", **settings).layout(PAIR.source, PAIR.target, memory or 0)
    assert layout.joint == (memory is not None)
    statistics = CalibrationStatistics(PAIR.source, PAIR.target, "", layout=layout)
    sums = [m for split in statistics.splits.values() for m in split.values()]
    assert plan.statistics_bytes == sum(8 * (m.sxx.numel() + m.sxy.numel()) for m in sums)


@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - set(missing())))
def test_what_the_matrices_of_a_layer_hold_and_put_out(name):
    model = build(name)
    for layer, cost in zip(decoder_of(model).layers, layer_costs(model.config), strict=True):
        linear = [module for module in layer.modules() if isinstance(module, torch.nn.Linear)]
        outputs, weights = sum(m.out_features for m in linear), sum(m.weight.numel() for m in linear)
        is_whole = 2 * weights == cost.matrices
        # Where experts are mixed, or matrices aren't `Linear`, there is more.
        assert (cost.outputs, cost.weights) == (outputs, weights) if is_whole else cost.weights >= cost.matrices // 2
        assert 0 < cost.outputs < cost.weights


def test_more_costs_more():
    plans = plan_recipes(PAIR, ks=[1, 2, 4])
    for less, more in itertools.pairwise(plans):
        assert less.cost.map < more.cost.map
        assert less.solve_flops < more.solve_flops
        assert less.parameters < more.parameters
        assert less.conversion_bytes(PAIR.source, PAIR.target, 100) < more.conversion_bytes(
            PAIR.source, PAIR.target, 100
        )
    local, full = planned(2, heads="local"), planned(2)
    assert local.cost.map * 2 == full.cost.map  # two KV heads
    twice, once = planned(2, calibration=Calibration(1000)), planned(2, calibration=Calibration(500))
    assert (twice.forward_flops, twice.sum_flops) == (2 * once.forward_flops, 2 * once.sum_flops)
    assert twice.solve_flops == once.solve_flops


def test_a_budget_marks_what_exceeds_it_and_chooses_the_costliest_within():
    plans = plan_recipes(PAIR, ks=[1, 2, 4])
    for limit in range(3):
        marked = plan_recipes(PAIR, ks=[1, 2, 4], max_cost=plans[limit].cost.share_of_prefill)
        assert [plan.excess for plan in marked] == [()] * (limit + 1) + [("cost",)] * (2 - limit)
        assert chosen_plan(marked).k == plans[limit].k
    nothing = plan_recipes(PAIR, ks=[1, 2, 4], max_cost=1e-9, memory=1)
    assert {plan.excess for plan in nothing} == {("memory", "cost")}
    assert chosen_plan(nothing).k == 1
    assert chosen_plan(plans).k == 4


def test_conversion_bytes_are_what_the_caches_and_the_maps_hold():
    plan = planned(4)
    caches = 4 * 2 * 10 * (PAIR.source.offsets[-1] + PAIR.target.offsets[-1])
    assert plan.conversion_bytes(PAIR.source, PAIR.target, 10, number=4) == caches + 4 * plan.parameters


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"k": 0}, "expected a number from 1 to 4"),
        ({"k": 5}, "expected a number from 1 to 4"),
        ({"k": 5, "anchor_layers": 1}, "expected a number from 0 to 4"),
        ({"k": 1, "anchor_layers": 7}, "An anchor of 7 layers from layer 0 on"),
        ({"k": 1, "anchor_layers": 3, "anchor_start": 4}, "An anchor of 3 layers from layer 4 on"),
        ({"k": 1, "anchor_layers": 0, "anchor_start": 2}, "no layers were asked to run"),
        ({"k": 1, "heads": "some"}, "expected 'full' or 'local'"),
        ({"k": 1, "calibration": Calibration(0)}, "`sequences` is 0"),
        ({"k": 1, "calibration": Calibration(5, 16, 32)}, "at least one token per sequence"),
        ({"k": 1, "memory": 0}, "`memory` is 0"),
        ({"k": 1, "max_cost": float("nan")}, "`max_cost` is nan"),
    ],
)
def test_impossible_plans_are_refused(change, sentence):
    with pytest.raises(KVTransferError, match=sentence):
        planned(**change)


def test_a_refused_pair_has_no_plan():
    pair = plan_pair(GPT2Config(), TARGET)
    assert not pair.is_supported
    with pytest.raises(UnsupportedModelError, match="gpt2"):
        plan_recipes(pair)


@pytest.fixture
def folders(tmp_path):
    for name, config in (("source", SOURCE), ("target", TARGET)):
        config.max_position_embeddings = 256
        config.save_pretrained(tmp_path / name)
    return tmp_path / "source", tmp_path / "target"


class TestCheck:
    def test_a_budget_is_shown_and_times_are_predicted(self, folders):
        result = invoke(
            "check", *folders, "--max-cost", 0.02, "--memory", "1.5GiB", "--anchor-layers", 1, "--k", 0, "--k", 2,
            "--hardware", "h100", "--lengths", "64,256",
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        output = " ".join(result.output.split())
        assert "k = 2, anchor 1" in output
        assert "too much cost" in output
        assert "Fitting k = 0, anchor 1 on 500 × 1,024 tokens" in output
        assert "H100" in output
        assert "A100" not in output
        assert "tokens 64 256" in output

    def test_a_budget_that_nothing_keeps_to_is_said(self, folders):
        result = invoke("check", *folders, "--max-cost", 1e-6, "--hardware", "A100", "--lengths", 64)
        assert result.exit_code == 0, result.output
        assert "None of these keeps to the budget" in result.output
        assert "Fitting k = 1 on" in result.output

    def test_this_machine_is_measured_when_asked(self, folders):
        result = invoke("check", *folders, "--k", 1, "--hardware", "this", "--threads", 1, "--lengths", "64")
        assert result.exit_code == 0, result.output
        assert "this machine, float32" in result.output
        assert "H100" not in result.output

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (("--hardware", "abacus"), "There is no hardware 'abacus'"),
            (("--memory", "much"), "is not an amount of memory"),
            (("--memory", "0GB"), "is not an amount of memory"),
            (("--lengths", "64,x"), "is not a list of whole numbers"),
            (("--lengths", "512"), "longer than the 256 positions"),
            (("--anchor-start", "2"), "needs --anchor-layers"),
            (("--k", "9"), "expected a number from 1 to 4"),
            (("--sequences", "0"), "`sequences` is 0"),
        ],
    )
    def test_wrong_options_are_sentences(self, folders, arguments, sentence):
        result = invoke("check", *folders, *arguments)
        assert result.exit_code != 0
        assert sentence in " ".join(result.output.replace("│", " ").split())
        assert "Traceback" not in result.output


def test_reading_nearest_layers_keeps_their_order():
    fields = uniform_support(PAIR.source, PAIR.target, 2)
    read = [entry["keys"]["layers"] for entry in fields["support"]]
    assert read == sorted(read)
    assert read[0] == [0, 1]
    assert read[-1] == [2, 3]
    whole = uniform_support(PAIR.source, ModelGeometry.from_config(TARGET), 4)
    assert all(entry["values"]["layers"] == [0, 1, 2, 3] for entry in whole["support"])
