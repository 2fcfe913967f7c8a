"""The first token of a context may be a stored constant, as attention falls back on it whatever the text."""

import pytest
import torch

from hf_kvtransfer import KVMapper, PairMismatchError, TransferredCache
from hf_kvtransfer.calibration import CalibrationStatistics, FeatureLayout
from hf_kvtransfer.calibration.sample import take_sample
from hf_kvtransfer.calibration.selection import AttentionScorer
from hf_kvtransfer.evaluation import prefill
from hf_kvtransfer.features import KINDS, Support
from hf_kvtransfer.geometry import ModelGeometry
from hf_kvtransfer.rope import RotaryCodec
from hf_kvtransfer.training import KVTransferModule, with_form
from hf_kvtransfer.training.batches import capture_batch

from .architectures import VOCAB, build


def drawn(rows, tokens, seed=0):
    return torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def pair():
    return build("llama", seed=5), build("qwen3")


@pytest.fixture(scope="module")
def mapper(pair):
    """A mapper of zeros that holds the constants of some layers."""
    constants = {"keys": [0, 2], "values": [1]}
    mapper = KVMapper.for_pair(*pair, support=[[0, 1, 2]] * 3, first_token=constants)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for kind, layers in constants.items():
            for layer in layers:
                constant = mapper.layers[layer].first_token(kind)
                constant.copy_(torch.randn(constant.shape, generator=generator))
    return mapper


def content_of(mapper, cache, positions):
    """Per layer RoPE-free keys, and values, `[batch, tokens, width]`."""
    codec = mapper.codec("target")
    tables = codec.tables(positions)
    return [
        [part.transpose(1, 2).flatten(2) for part in (codec.remove(layer.keys, tables, index), layer.values)]
        for index, layer in enumerate(cache.layers)
    ]


@torch.no_grad()
def test_only_the_first_real_token_of_each_row_is_the_constant(pair, mapper):
    ids, padding = drawn(2, 9), torch.tensor([3, 0])
    mask = (torch.arange(9)[None] >= padding[:, None]).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = pair[0](input_ids=ids, attention_mask=mask, position_ids=positions)
    made = content_of(
        mapper, mapper.convert(cache, attention_mask=mask, position_ids=positions, hold_back=0), positions
    )
    for layer, entries in enumerate(made):
        for kind, content in zip(KINDS, entries, strict=True):
            expected = torch.zeros_like(content)
            if (constant := mapper.layers[layer].first_token(kind)) is not None:
                expected[torch.arange(2), padding] = constant
            torch.testing.assert_close(content, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_what_is_appended_has_no_first_token(pair, mapper):
    ids = drawn(1, 9)
    whole = mapper.convert(prefill(pair[0], ids), hold_back=0)
    grown = mapper.convert(prefill(pair[0], ids[:, :4]), hold_back=0)
    mapper.convert(prefill(pair[0], ids), into=grown, hold_back=0)
    for one, other in zip(whole.layers, grown.layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys)
        torch.testing.assert_close(one.values, other.values)
    assert isinstance(grown, TransferredCache)


@torch.no_grad()
def test_it_is_saved_loaded_and_kept_by_other_forms(pair, mapper, tmp_path):
    mapper.save_pretrained(tmp_path)
    cache = prefill(pair[0], drawn(1, 5))
    expected = mapper.convert(cache)
    for other in (KVMapper.from_pretrained(tmp_path), with_form(mapper, "residual", hidden=4)):
        for one, two in zip(expected.layers, other.convert(cache).layers, strict=True):
            assert torch.equal(one.keys, two.keys)
            assert torch.equal(one.values, two.values)


def test_constants_of_layers_without_maps_are_refused(pair):
    with pytest.raises(PairMismatchError, match=r"constants of the first token for target layers \[7\]"):
        KVMapper.for_pair(*pair, support=[[0]] * 3, first_token={"keys": [7]})


@pytest.mark.parametrize("same", [True, False])
def test_it_is_chosen_where_it_predicts_better_than_the_map(pair, same):
    """A first token that is the same in every text has the same entries in every text, exactly."""
    ids = drawn(3, 12)
    if same:
        ids[:, 0] = 7
    codecs = [RotaryCodec.from_model(model) for model in pair]
    geometries = [ModelGeometry.from_model(model) for model in pair]
    statistics = CalibrationStatistics(*geometries, "same", layout=FeatureLayout())
    statistics.sample = take_sample(*pair, codecs, ids, FeatureLayout())
    scorer = AttentionScorer(statistics, codecs[1])
    native = content_of(KVMapper.for_pair(*pair), prefill(pair[1], ids), torch.arange(12)[None])
    for layer, width in enumerate(geometry.width for geometry in geometries[1].layers):
        for kind, content in zip(KINDS, native[layer], strict=True):
            # The mean over sequences: no constant is nearer, and on other first tokens each sequence pulls it its way.
            bias = content[:, 0].mean(0)
            given = (layer, kind), Support((0,)), torch.zeros(width, geometries[0].layers[0].width)
            assert scorer.first_token(*given, bias + 1e-3, None) is None or same
            if same:
                torch.testing.assert_close(scorer.first_token(*given, bias + 1, None), bias, atol=1e-5, rtol=1e-4)
    assert AttentionScorer(statistics, codecs[1], 1).first_token(*given, bias + 1, None) is None


def test_it_can_be_trained(pair, mapper):
    """Every parameter takes part in the content loss, as processes that train together need it."""
    ids = drawn(2, 9)
    batch, _ = capture_batch(*pair, ids)
    KVTransferModule(mapper)(**batch).loss.backward()
    for name, parameter in mapper.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.abs().sum() > 0), name
    mapper.zero_grad()
