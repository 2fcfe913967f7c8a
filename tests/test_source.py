"""Reading a source cache of any class, and refusing those that can't be read."""

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, EncoderDecoderCache, QuantizedLayer

from hf_kvtransfer import ModelGeometry, SourceCacheError, read_source_cache
from hf_kvtransfer._compat import cache_keyword
from hf_kvtransfer.source import check_finite

from .architectures import VOCAB, build


TOKENS = 11


def run(model, cache=None, batch=2, tokens=TOKENS):
    ids = torch.randint(3, VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=ids, use_cache=True, **({} if cache is None else {cache_keyword(model): cache}))


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True))


class RoundedLayer(QuantizedLayer):
    """A quantised layer without a backend: what is stored is rounded to bfloat16."""

    def _quantize(self, tensor, axis):
        return tensor.to(torch.bfloat16)

    def _dequantize(self, q_tensor):
        return q_tensor.to(torch.float32)


@pytest.fixture(scope="module")
def llama():
    return build("llama")


@pytest.fixture(scope="module")
def plain(llama):
    cache = DynamicCache()
    run(llama, cache)
    return cache


def test_reads_a_dynamic_cache_without_copying(llama, plain):
    source = read_source_cache(plain, ModelGeometry.from_model(llama))
    assert source.num_tokens == TOKENS
    assert source.batch_size == 2
    assert source.keys[0].data_ptr() == plain.layers[0].keys.data_ptr()


def test_reads_the_output_that_carries_a_cache(llama, plain):
    assert equal(read_source_cache(run(llama)), read_source_cache(plain))
    assert equal(read_source_cache(dict(run(llama))), read_source_cache(plain))


def test_reads_pairs_of_tensors(plain):
    pairs = [(layer.keys, layer.values) for layer in plain.layers]
    assert equal(read_source_cache(pairs), read_source_cache(plain))


def test_a_static_cache_gives_what_a_dynamic_one_does(llama, plain):
    static = StaticCache(config=llama.config, max_cache_len=TOKENS + 9)
    run(llama, static)
    read = read_source_cache(static)
    assert read.num_tokens == TOKENS
    for mine, theirs in zip(read.keys, plain.layers, strict=True):
        torch.testing.assert_close(mine, theirs.keys)


def test_a_quantised_cache_gives_its_quantised_and_its_residual_part(llama, plain):
    quantised = DynamicCache()
    quantised.layers = [RoundedLayer(residual_length=64) for _ in plain.layers]
    quantised.layer_class_to_replicate = None
    ids = torch.randint(3, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    for part in (ids[:, :6], ids[:, 6:]):  # the second call stays in the residual part
        with torch.no_grad():
            llama(input_ids=part, use_cache=True, **{cache_keyword(llama): quantised})
    read = read_source_cache(quantised)
    assert read.num_tokens == TOKENS
    for mine, theirs in zip(read.values, plain.layers, strict=True):
        torch.testing.assert_close(mine[:, :, :6], theirs.values[:, :, :6], rtol=1e-2, atol=5e-2)


def test_a_full_length_sliding_cache_is_read_and_a_truncated_one_refused():
    model = build("mistral-sliding")  # a window of 6 tokens
    bare, aware = DynamicCache(), DynamicCache(config=model.config)
    run(model, bare)
    run(model, aware)
    assert read_source_cache(bare).num_tokens == TOKENS
    with pytest.raises(SourceCacheError, match=r"has seen 11 tokens but holds only the last 5.*bare\s+`DynamicCache"):
        read_source_cache(aware)
    short = DynamicCache(config=model.config)
    run(model, short, tokens=4)
    assert read_source_cache(short).num_tokens == 4


def test_refuses_an_output_without_a_cache(llama):
    with torch.no_grad():
        output = llama(input_ids=torch.tensor([[5, 6]]), use_cache=False)
    with pytest.raises(SourceCacheError, match="without a cache in it.*use_cache=True"):
        read_source_cache(output)


def test_refuses_what_is_no_cache():
    with pytest.raises(SourceCacheError, match="Got str as source cache"):
        read_source_cache("cache")
    with pytest.raises(SourceCacheError, match=r"expected a \(key, value\) pair"):
        read_source_cache([torch.zeros(1, 2, 3, 4)])


def test_refuses_an_empty_cache(llama):
    with pytest.raises(SourceCacheError, match="empty"):
        read_source_cache(DynamicCache())
    with pytest.raises(SourceCacheError, match=r"Layer 0 of the source cache \(\w+\) is empty"):
        read_source_cache(DynamicCache(config=llama.config))
    hollow = DynamicCache()
    hollow.update(torch.zeros(1, 2, 0, 4), torch.zeros(1, 2, 0, 4), 0)
    with pytest.raises(SourceCacheError, match="empty"):
        read_source_cache(hollow)


def test_refuses_an_encoder_decoder_cache(plain):
    with pytest.raises(SourceCacheError, match="Got an EncoderDecoderCache"):
        read_source_cache(EncoderDecoderCache(plain, DynamicCache()))


def test_refuses_layers_that_hold_no_tensors(llama):
    cache = DynamicCache()
    run(llama, cache)
    cache.layers[1].values = [0.0]
    with pytest.raises(SourceCacheError, match="Layer 1 of the source cache .* holds Tensor and list"):
        read_source_cache(cache)


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2, 5, 16), torch.zeros(1, 2, 5, 16, dtype=torch.long), torch.zeros(1, 2, 5, 16).to(torch.float8_e5m2)],
    ids=["3-D", "whole numbers", "8 bits without their scale"],
)
def test_refuses_tensors_of_another_shape_or_dtype(tensor):
    with pytest.raises(SourceCacheError, match="The keys of source layer 0 have shape .* 16 bits or more"):
        read_source_cache([(tensor, tensor)])


def test_refuses_a_ragged_cache():
    ragged = DynamicCache()
    ragged.update(torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4), 0)
    ragged.update(torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4, 4), 1)
    with pytest.raises(SourceCacheError, match=r"ragged: layer 0 holds 1 rows × 5 tokens.*layer 1 1 × 4"):
        read_source_cache(ragged)


def test_refuses_another_geometry(llama, plain):
    geometry = ModelGeometry.from_model(build("gemma3"))
    with pytest.raises(SourceCacheError, match="KV heads|layers"):
        read_source_cache([(torch.zeros(1, 1, 5, 8),) * 2] * 3, ModelGeometry.from_model(llama))
    with pytest.raises(SourceCacheError, match="has 2 layers.*has 3"):
        read_source_cache([(torch.zeros(1, 2, 5, 16),) * 2] * 2, geometry)


def test_refuses_recurrent_layers():
    class Recurrent(DynamicLayer):
        recurrent_states = None

    cache = DynamicCache()
    cache.layers = [Recurrent()]
    with pytest.raises(SourceCacheError, match="recurrent state"):
        read_source_cache(cache)


def test_refuses_tensors_without_data():
    with pytest.raises(SourceCacheError, match="meta device"):
        read_source_cache([(torch.zeros(1, 2, 3, 4, device="meta"),) * 2])


@pytest.mark.parametrize("kind", ["keys", "values"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_refuses_what_is_not_finite_and_names_the_place(llama, kind, bad):
    cache = DynamicCache()
    run(llama, cache)
    getattr(cache.layers[1], kind)[1, 0, 7, 3] = bad
    with pytest.raises(SourceCacheError, match=f"{kind[:-1]} in layer 1, batch row 1, token 7"):
        check_finite(read_source_cache(cache))
    mask = torch.ones(2, TOKENS)
    mask[1, :8] = 0
    check_finite(read_source_cache(cache), mask)  # padding may hold anything
