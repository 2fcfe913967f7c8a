"""Recorded queries attend as the model does, and CacheBridge's row weights are its formulas, written out."""

import math

import pytest
import torch
import transformers
from torch import nn
from transformers import DynamicCache, Qwen3Model

from hf_kvtransfer._compat import cache_keyword
from hf_kvtransfer.calibration.attention import (
    attention_output,
    attention_probabilities,
    boundaries,
    record_queries,
    row_weights,
)
from hf_kvtransfer.errors import CalibrationError, UnsupportedModelError
from hf_kvtransfer.modules import attention_of, decoder_of

from .architectures import ARCHITECTURES, REFUSED, VOCAB, build, missing


TOKENS = 20
AVAILABLE = sorted(set(ARCHITECTURES) - set(missing()))


def token_ids(rows=2, tokens=TOKENS):
    return torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def prefill(decoder, ids, cache=None):
    """The keys and values of each layer, as the cache holds them."""
    cache = DynamicCache() if cache is None else cache
    decoder(input_ids=ids, use_cache=True, **{cache_keyword(decoder): cache})
    return [(layer.keys, layer.values) for layer in cache.layers]


def native_outputs(decoder, ids):
    """What the attention function of each layer returns, `[rows, tokens, width]`, by another road: it is what goes into
    the last projection of the attention module."""
    outputs, handles = [], []
    for index, layer in enumerate(decoder.layers):
        outputs.append(None)
        for module in attention_of(layer).modules():
            if isinstance(module, nn.Linear):
                handles.append(
                    module.register_forward_pre_hook(lambda _, given, index=index: outputs.__setitem__(index, given[0]))
                )
    prefill(decoder, ids)
    for handle in handles:
        handle.remove()
    return outputs


def recorded(decoder, ids, positions=None):
    with record_queries(decoder, positions) as records:
        cache = prefill(decoder, ids)
    return records, cache


@pytest.fixture(scope="module")
def qwen3():
    """Grouped queries: 4 query heads share 2 KV heads."""
    return decoder_of(build("qwen3"))


@pytest.mark.parametrize("eager", [False, True], ids=["default", "eager"])
@pytest.mark.parametrize("name", AVAILABLE)
def test_probabilities_times_values_are_what_the_attention_function_returns(name, eager):
    model = build(name)
    decoder = decoder_of(model)
    if eager:
        decoder.set_attn_implementation("eager")
    positions = torch.tensor([0, 3, 11, TOKENS - 1])
    expected = native_outputs(decoder, token_ids())
    with record_queries(model, positions) as records:
        cache = prefill(decoder, token_ids())
    assert list(records) == list(range(len(decoder.layers)))
    for layer, (keys, values) in enumerate(cache):
        probabilities = attention_probabilities(records[layer], keys)
        found = attention_output(probabilities, values)
        found = found.transpose(1, 2).flatten(2)
        torch.testing.assert_close(found, expected[layer][:, positions], rtol=1e-5, atol=1e-5)
        if records[layer].sinks is None:
            torch.testing.assert_close(probabilities.sum(-1), torch.ones(probabilities.shape[:3]))


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "mistral-sliding", "granite"])
def test_what_makes_attention_special_is_recorded(name):
    decoder = decoder_of(build(name))
    decoder.set_attn_implementation("eager")
    record = recorded(decoder, token_ids())[0][0]
    assert record.queries.dtype is torch.float32
    assert record.positions.tolist() == list(range(TOKENS))
    assert (record.softcap is not None) == (name == "gemma2")
    assert (record.sinks is not None) == (name == "gpt_oss")
    assert record.sliding_window == (None if name == "granite" else 6)
    assert record.scaling == {"granite": 0.25, "gemma2": 256**-0.5}.get(name, 16**-0.5)


@pytest.mark.parametrize("name", ["qwen3", "mistral-sliding", "gpt_oss", "gemma2"])
def test_before_is_attention_without_the_own_token(name):
    records, cache = recorded(decoder_of(build(name)), token_ids())
    for layer, (keys, _) in enumerate(cache):
        record, keys = records[layer], keys.double()
        whole = attention_probabilities(record, keys)
        before = attention_probabilities(record, keys, before=True)
        own = torch.diagonal(whole, dim1=2, dim2=3)[..., None]
        expected = torch.where(torch.eye(TOKENS, dtype=torch.bool), 0.0, whole / (1 - own))[:, :, 1:]
        torch.testing.assert_close(before[:, :, 1:], expected, rtol=1e-6, atol=1e-8)
        assert not before[:, :, 0].any()
        # Later keys are not looked at, so that the prefix alone is enough.
        prefix = attention_probabilities(record, keys[:, :, :8], before=True)
        torch.testing.assert_close(prefix[:, :, 8], before[:, :, 8, :8])


def test_a_pass_that_goes_on_from_a_cache_counts_from_its_start(qwen3):
    ids = token_ids()
    cache = DynamicCache()
    prefill(qwen3, ids[:, :12], cache)
    positions = torch.tensor([12, 17])
    with record_queries(qwen3, positions) as records:
        prefill(qwen3, ids[:, 12:], cache)
    whole, _ = recorded(qwen3, ids, positions)
    for layer, record in records.items():
        torch.testing.assert_close(record.queries, whole[layer].queries, rtol=1e-4, atol=1e-4)
    cache = DynamicCache()
    prefill(qwen3, ids[:, :12], cache)
    with record_queries(qwen3, torch.tensor([3])), pytest.raises(CalibrationError, match="expected some of 12 to 19"):
        prefill(qwen3, ids[:, 12:], cache)
    assert qwen3.config._attn_implementation == "sdpa"


def test_logits_don_t_notice_the_recording_and_only_the_latest_pass_is_kept(qwen3):
    ids = token_ids()
    expected = qwen3(input_ids=ids).last_hidden_state
    with record_queries(qwen3) as records:
        qwen3(input_ids=ids[:1, :4])
        assert records[0].queries.shape == (1, 4, 4, 16)
        torch.testing.assert_close(qwen3(input_ids=ids).last_hidden_state, expected, rtol=0, atol=0)
        assert records[0].queries.shape == (2, 4, TOKENS, 16)
    kept = dict(records)
    qwen3(input_ids=ids)
    assert records == kept


def test_a_record_owns_its_queries_and_can_be_trained_on(qwen3):
    with torch.inference_mode():
        records, cache = recorded(qwen3, token_ids(), torch.tensor([5]))
    record = records[0]
    assert record.queries.untyped_storage().nbytes() == record.queries.numel() * 4
    keys = cache[0][0].clone().requires_grad_()
    attention_probabilities(record, keys)[..., 0].sum().backward()
    assert keys.grad[:, :, :6].abs().amin() > 0
    assert not keys.grad[:, :, 6:].any()


def test_the_implementation_is_restored(qwen3):
    for implementation in ("sdpa", "eager"):
        qwen3.set_attn_implementation(implementation)
        with pytest.raises(CalibrationError), record_queries(qwen3, torch.tensor([TOKENS])):
            qwen3(input_ids=token_ids())
        assert qwen3.config._attn_implementation == implementation
    qwen3.set_attn_implementation("sdpa")


def test_recordings_may_be_nested(qwen3):
    with record_queries(qwen3) as outer:
        with record_queries(qwen3, torch.tensor([2])) as inner:
            qwen3(input_ids=token_ids())
        assert (len(outer[0].positions), len(inner[0].positions)) == (TOKENS, 1)
        qwen3(input_ids=token_ids(tokens=5))
        assert len(outer[0].positions) == 5
    assert qwen3.config._attn_implementation == "sdpa"


def test_another_implementation_is_recorded_with_eager(qwen3):
    expected, _ = recorded(qwen3, token_ids())
    qwen3.set_attn_implementation("flex_attention")
    try:
        records, _ = recorded(qwen3, token_ids())
        assert qwen3.config._attn_implementation == "flex_attention"
    finally:
        qwen3.set_attn_implementation("sdpa")
    torch.testing.assert_close(records[2].queries, expected[2].queries, rtol=1e-4, atol=1e-4)


def test_half_precision_is_recorded_in_float32():
    decoder = decoder_of(build("llama", torch.bfloat16))
    records, cache = recorded(decoder, token_ids(), torch.tensor([9]))
    probabilities = attention_probabilities(records[1], cache[1][0])
    assert records[1].queries.dtype is probabilities.dtype is torch.float32


class OwnAttention(nn.Module):
    """As in code from before the interface: it writes into the cache, and computes its scores itself."""

    def forward(self, hidden_states, cache):
        keys, values = cache.update(hidden_states, hidden_states, 0)
        return nn.functional.scaled_dot_product_attention(hidden_states, keys, values)


class OwnModel(Qwen3Model):
    """One of a file that Transformers finds no interface in."""

    @classmethod
    def _can_set_attn_implementation(cls):
        return False


def own_attention():
    model = build("qwen3")
    model.model.layers[1].self_attn = OwnAttention()
    return model


def without_attention():
    with torch.device("meta"):
        return transformers.AutoModel.from_config(REFUSED["mamba"][0]())


@pytest.mark.parametrize("make", [own_attention, without_attention, lambda: OwnModel(ARCHITECTURES["qwen3"]())])
def test_a_model_without_the_interface_is_refused(make):
    model = make()
    implementation = model.config._attn_implementation
    recording = record_queries(model)
    with pytest.raises(UnsupportedModelError, match="doesn't attend through the AttentionInterface"):
        recording.__enter__()
    assert model.config._attn_implementation == implementation


def test_keys_of_another_layer_are_refused(qwen3):
    records, cache = recorded(qwen3, token_ids())
    for keys in (cache[0][0][:1], cache[0][0][..., :8], cache[0][0][0]):
        with pytest.raises(CalibrationError, match="record and cache must be of one pass"):
            attention_probabilities(records[0], keys)


def test_boundaries():
    found = boundaries(1024)
    assert (found[0], found[-1], len(found)) == (12, 1023, 32)
    steps = found[1:] / found[:-1]
    assert steps.max() / steps.min() < 1.1  # evenly spaced on a logarithmic scale, up to whole numbers
    assert boundaries(16).tolist() == [12, 13, 14, 15]
    assert boundaries(8).tolist() == [7]
    assert boundaries(30, count=3, first=4).tolist() == [4, 11, 29]
    with pytest.raises(CalibrationError, match="There is no boundary in 1 tokens"):
        boundaries(1)


def literal_row_weights(queries, keys, values, positions, scaling, before):
    """The formulas of CacheBridge in plain loops, over numbers alone."""
    batch, query_heads, _, width = queries.shape
    kv_heads, tokens = keys.shape[1], keys.shape[2]
    result = {"keys": torch.zeros(batch, kv_heads, tokens).double(), "values": torch.zeros(batch, kv_heads, tokens)}
    result["values"] = result["values"].double()
    q_all, k_all, v_all = queries.tolist(), keys.tolist(), values.tolist()
    for row in range(batch):
        for head in range(kv_heads):
            groups = query_heads // kv_heads
            for number, boundary in enumerate(positions):
                by_key, by_value = [0.0] * boundary, [0.0] * boundary
                for u in range(head * groups, (head + 1) * groups):
                    q = q_all[row][u][number]
                    seen = boundary if before else boundary + 1
                    scores = [
                        scaling * math.fsum(a * b for a, b in zip(q, k_all[row][head][i], strict=True))
                        for i in range(seen)
                    ]
                    total = math.fsum(math.exp(score) for score in scores)
                    a = [math.exp(score) / total for score in scores]
                    o = [math.fsum(a[i] * v_all[row][head][i][j] for i in range(seen)) for j in range(width)]
                    q_squared = math.fsum(x * x for x in q)
                    for i in range(boundary):
                        distance = math.fsum((v - x) ** 2 for v, x in zip(v_all[row][head][i], o, strict=True))
                        by_value[i] += a[i] ** 2
                        by_key[i] += a[i] ** 2 * distance * q_squared / width
                for name, each in (("keys", by_key), ("values", by_value)):
                    mass = math.fsum(each)
                    for i in range(boundary):
                        result[name][row, head, i] += each[i] / mass
    return result["keys"], result["values"]


@pytest.mark.parametrize("before", [False, True])
def test_row_weights_are_the_formulas_of_the_paper(qwen3, before):
    positions = boundaries(TOKENS, count=4, first=3)
    records, cache = recorded(qwen3, token_ids(), positions)
    for layer, (keys, values) in enumerate(cache):
        found = row_weights(records[layer], keys, values, before=before)
        expected = literal_row_weights(records[layer].queries, keys, values, positions.tolist(), 16**-0.5, before)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-12)
            torch.testing.assert_close(mine.sum(-1), torch.full((2, 2), 4.0, dtype=torch.float64))


def test_a_boundary_that_reads_nothing_adds_nothing(qwen3):
    records, cache = recorded(qwen3, token_ids(), torch.tensor([0]))
    for weights in row_weights(records[0], *cache[0]):
        assert not weights.any()
