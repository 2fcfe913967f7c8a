"""Maps are scored by what the target's own attention reads of them, and chosen within what they may cost."""

import itertools
import random

import pytest
import torch
from transformers import DynamicCache

from hf_kvtransfer import CalibrationError
from hf_kvtransfer._compat import cache_keyword
from hf_kvtransfer.calibration import CalibrationStatistics, FeatureLayout
from hf_kvtransfer.calibration.attention import boundaries
from hf_kvtransfer.calibration.capture import capture_content
from hf_kvtransfer.calibration.sample import take_sample
from hf_kvtransfer.calibration.selection import (
    AttentionScorer,
    Candidate,
    Space,
    candidates,
    choose,
    pareto,
    refined,
    total_error,
)
from hf_kvtransfer.features import KINDS, Support
from hf_kvtransfer.geometry import ModelGeometry
from hf_kvtransfer.modules import decoder_of
from hf_kvtransfer.rope import RotaryCodec

from .architectures import VOCAB, build


TOKENS = 20
LAYOUT = FeatureLayout(joint=True, anchors=(1,))


def read_by(source, target, rows=6):
    """Statistics of random tokens, with a sample of the last two rows; and the ids of the sample."""
    ids = torch.randint(3, VOCAB, (rows, TOKENS), generator=torch.Generator().manual_seed(3))
    codecs = [RotaryCodec.from_model(model) for model in (source, target)]
    geometries = [ModelGeometry.from_model(model) for model in (source, target)]
    statistics = CalibrationStatistics(*geometries, "same", layout=LAYOUT)
    for split, part in (("fit", ids[:-2]), ("heldout", ids[-2:])):
        statistics.update_content(
            split,
            capture_content(source, codecs[0], part, stride=1),
            capture_content(target, codecs[1], part, stride=1, hidden_at=LAYOUT.anchors),
        )
    statistics.sample = take_sample(source, target, codecs, ids[-2:], LAYOUT)
    return statistics, AttentionScorer(statistics, codecs[1]), ids[-2:]


class Replaced(DynamicCache):
    """Hands attention other keys and values of one layer than those it has written."""

    def __init__(self, layer, keys=None, values=None):
        super().__init__()
        self.replaced = layer, keys, values

    def update(self, keys, values, layer_idx, *args, **kwargs):
        keys, values = super().update(keys, values, layer_idx, *args, **kwargs)
        layer, other_keys, other_values = self.replaced
        if layer_idx != layer:
            return keys, values
        return keys if other_keys is None else other_keys, values if other_values is None else other_values


@torch.no_grad()
def attention_outputs(model, ids, layer, cache):
    """What the attention of one layer puts out at the boundaries, before its output projection."""
    decoder, noted = decoder_of(model), []
    handle = decoder.layers[layer].self_attn.o_proj.register_forward_pre_hook(lambda _, given: noted.append(given[0]))
    try:
        decoder(input_ids=ids, **{cache_keyword(decoder): cache})
    finally:
        handle.remove()
    return noted[0][:, boundaries(ids.shape[1], 32)]


@pytest.mark.parametrize("name", ["qwen3", "mistral-sliding", "gpt_oss", "cohere2"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_error_is_that_of_the_targets_own_attention(name, kind):
    source, target = build("llama", seed=5), build(name)
    statistics, scorer, ids = read_by(source, target)
    layer, support = 1, Support((0, 2), joint=True)
    geometry = statistics.target.layers[layer]
    width = support.width(statistics.source, geometry, 0)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(geometry.width, width, generator=generator) / width**0.5
    bias = torch.randn(geometry.width, generator=generator)
    made = scorer.predict((layer, kind), support, weight, bias, None).view(2, TOKENS, -1)
    offsets, own = statistics.target.offsets, getattr(statistics.sample.target, kind).view(2, TOKENS, -1)
    first = own[:, 0, offsets[layer] : offsets[layer + 1]]
    # Two sequences: the mean of the others is the other.
    if (first.flip(0) - first).norm() < (made[:, 0] - first).norm():
        made[:, 0] = first.flip(0)
    made = made.view(2, TOKENS, geometry.kv_heads, geometry.head_dim).transpose(1, 2)
    if kind == "keys":
        codec = RotaryCodec.from_model(target)
        made = codec.apply(made, codec.tables(torch.arange(TOKENS)[None]), layer)
    native = attention_outputs(target, ids, layer, DynamicCache())
    changed = attention_outputs(target, ids, layer, Replaced(layer, **{kind: made}))
    literal = float((changed - native).square().sum() / native.square().sum())
    found = scorer.error((layer, kind), support, weight, bias, None)
    assert found == pytest.approx(literal, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_the_target_reads_itself_have_no_error(kind):
    source, target = build("llama", seed=5), build("qwen3")
    statistics, scorer, _ = read_by(source, target)
    support, geometry = Support((0,)), statistics.target.layers[1]
    given = (1, kind), support, torch.randn(geometry.width, support.width(statistics.source, geometry, 0))
    errors = [
        AttentionScorer(statistics, RotaryCodec.from_model(target), exact_prefix).error(
            *given, torch.zeros(geometry.width), None
        )
        for exact_prefix in (0, 4, TOKENS)
    ]
    assert errors[0] == scorer.error(*given, torch.zeros(geometry.width), None)
    assert errors[0] != errors[1]
    assert errors[2] < 1e-10


def test_native_content_has_no_error_and_nothing_at_all_has_much():
    model = build("qwen3")
    _, scorer, _ = read_by(model, model)
    width = 32
    for layer in range(3):
        for kind in KINDS:
            support, bias = Support((layer,)), torch.zeros(width)
            assert scorer.error((layer, kind), support, torch.eye(width), bias, None) < 1e-9
            nothing = scorer.error((layer, kind), support, torch.zeros(width, width), bias, None)
            assert nothing == pytest.approx(1) if kind == "values" else nothing > 0.1


def test_candidates_are_what_the_space_spans():
    statistics, scorer, _ = read_by(build("llama", seed=5), build("qwen3"))
    space = Space((1, 3), lambdas=(1.0, 10.0), native=range(2), anchor_depth=1)
    found = candidates(statistics, scorer, space, progress=False)
    assert set(found) == {(2, kind) for kind in KINDS}
    for ways in found.values():
        assert all(way.support.anchor and way.ridge_lambda == 1.0 for way in ways)
        assert Support((), anchor=True) in [way.support for way in ways]
        supports = [way.support for way in ways]
        assert len(set(supports)) == len(supports)
        for heads in ("full", "local"):
            for joint in (False, True):
                assert {len(s.layers) for s in supports if (s.heads, s.joint) == (heads, joint)} >= {1, 3}
    chosen = choose(found)
    best = refined(statistics, scorer, space, found, chosen)
    assert total_error(best) <= total_error(chosen)
    for key, way in best.items():
        assert way.support == chosen[key].support
        assert way in found[key]
    cheap = candidates(statistics, scorer, Space((1, 3), lambdas=(1.0,), largest=2000), progress=False)
    assert all(way.multiplications <= 2000 for ways in cheap.values() for way in ways)


def ways_at_random(chance, keys=4):
    def way():
        error = chance.choice([chance.random(), round(chance.random(), 1)])
        return Candidate(Support((0,)), chance.random(), "ranked", chance.randint(1, 30), error)

    return {(layer, "keys"): [way() for _ in range(chance.randint(1, 9))] for layer in range(keys)}


@pytest.mark.parametrize("seed", range(100))
def test_choices_keep_to_the_budget_and_more_of_it_never_hurts(seed):
    found = ways_at_random(random.Random(seed))
    least = sum(min(way.multiplications for way in ways) for ways in found.values())
    before = float("inf")
    for budget in range(least, 125):
        chosen = choose(found, budget)
        assert chosen.keys() == found.keys()
        assert all(way in found[key] for key, way in chosen.items())
        assert sum(way.multiplications for way in chosen.values()) <= budget
        error = total_error(chosen)
        assert error <= before + 1e-9
        before = error
    # Beyond all costs everything is the best of its own; without a budget within the noise of it.
    best = sum(min(way.error for way in ways) for ways in found.values())
    assert before == pytest.approx(best)
    free = choose(found)
    assert total_error(free) <= best * 1.005 + 1e-12
    assert sum(way.multiplications for way in free.values()) <= sum(way.multiplications for way in chosen.values())
    for short in (least - 1, -1):
        with pytest.raises(CalibrationError, match="The cheapest maps take more than"):
            choose(found, short)
    with pytest.raises(CalibrationError, match="The cheapest maps take more than"):
        choose({**found, (9, "keys"): []})


@pytest.mark.parametrize("seed", range(20))
def test_the_front_holds_what_no_other_beats(seed):
    ways = next(iter(ways_at_random(random.Random(seed)).values()))
    front = pareto(ways)
    assert front
    for one, other in itertools.pairwise(front):
        assert one.multiplications < other.multiplications
        assert one.error > other.error
    for way in ways:
        assert any(best.multiplications <= way.multiplications and best.error <= way.error for best in front)
