"""Masks and positions: what is taken, what is refused, and what `into=` and `generate` compare with each other."""

import numpy as np
import pytest
import torch

from hf_kvtransfer import CacheUseError, ConversionError

from .architectures import build
from .fuzzing import feed, generate, identity, ids, prefilled


MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])
FROM_MASK = (MASK.cumsum(-1) - 1).clamp(min=0)
TOKENS = torch.where(MASK == 1, ids(batch=2, tokens=8), 0)


@pytest.fixture(scope="module")
def qwen3():
    return build("qwen3")


@pytest.fixture(scope="module")
def mapper(qwen3):
    return identity(qwen3)


@pytest.fixture(scope="module")
def source(qwen3):
    """As `generate` runs a left-padded batch."""
    return prefilled(qwen3, TOKENS, attention_mask=MASK, position_ids=FROM_MASK)


class TestMasks:
    @pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint8, torch.float32, torch.bfloat16])
    def test_of_any_dtype(self, mapper, source, dtype):
        plain, other = (mapper.convert(source, attention_mask=mask) for mask in (MASK, MASK.to(dtype)))
        assert torch.equal(plain.layers[2].keys, other.layers[2].keys)

    def test_longer_than_the_source(self, mapper, source):
        longer = torch.cat([MASK, torch.ones(2, 5, dtype=torch.long)], 1)
        plain, other = (mapper.convert(source, attention_mask=mask) for mask in (MASK, longer))
        assert torch.equal(plain.layers[2].keys, other.layers[2].keys)

    @pytest.mark.parametrize("mask", [MASK.tolist(), MASK.numpy(), MASK.to("meta"), MASK.to_sparse(), "mask", 1])
    def test_what_is_no_tensor_is_refused(self, mapper, source, mask):
        with pytest.raises(ConversionError, match="`attention_mask` is a .*; expected a dense `torch.Tensor`"):
            mapper.convert(source, attention_mask=mask)

    def test_one_that_is_added_to_scores_is_refused(self, mapper, source):
        added = (1.0 - MASK) * torch.finfo(torch.float32).min
        with pytest.raises(ConversionError, match="holds other numbers than 0 and 1"):
            mapper.convert(source, attention_mask=added)
        with pytest.raises(ConversionError, match="holds other numbers than 0 and 1"):
            mapper.convert(source, attention_mask=torch.where(MASK == 1, float("nan"), 0.0))

    @pytest.mark.parametrize("shape", [(8,), (1, 8), (2, 7), (2, 1, 8), (2, 1, 8, 8)])
    def test_another_shape_is_refused(self, mapper, source, shape):
        with pytest.raises(ConversionError, match=r"`attention_mask` has shape .*; expected \[2, 8\]"):
            mapper.convert(source, attention_mask=torch.ones(shape))

    def test_a_row_of_padding_alone_is_refused(self, mapper, source):
        with pytest.raises(ConversionError, match="Row 1 of `attention_mask` ends in padding"):
            mapper.convert(source, attention_mask=torch.tensor([[1] * 8, [0] * 8]))

    def test_gaps_further_on_do_not_tell_how_positions_were_numbered(self, qwen3, mapper):
        """Only the padding at the left is known to be one token."""
        mask = torch.tensor([[1, 1, 0, 0, 0, 1, 1, 1]])
        gap = prefilled(qwen3, ids(tokens=8), attention_mask=mask)
        with pytest.raises(ConversionError, match="doesn't tell how the source numbered its positions"):
            mapper.convert(gap, attention_mask=mask)


class TestPositionIds:
    @pytest.mark.parametrize("name", ["position_ids", "target_position_ids"])
    @pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.complex64])
    def test_of_another_dtype_are_refused(self, mapper, source, name, dtype):
        with pytest.raises(ConversionError, match=f"`{name}` has shape .* expected whole numbers"):
            mapper.convert(source, **{name: torch.ones(2, 8).to(dtype)})

    @pytest.mark.parametrize("name", ["position_ids", "target_position_ids"])
    def test_that_are_negative_or_no_tensor_are_refused(self, mapper, source, name):
        with pytest.raises(ConversionError, match=f"`{name}` holds negative positions"):
            mapper.convert(source, **{name: -torch.ones(2, 8, dtype=torch.long)})
        with pytest.raises(ConversionError, match=f"`{name}` is a ndarray; expected a dense"):
            mapper.convert(source, **{name: np.arange(8)[None]})


class TestGenerateMustFindTokensWhereTheyWerePut:
    def test_a_batch_converted_without_its_mask(self, qwen3, mapper):
        counted = prefilled(qwen3, TOKENS, attention_mask=MASK)
        cache = mapper.convert(counted)
        with pytest.raises(CacheUseError, match=r"Row 0, token 3.*position 3 there.*real token at position 0"):
            generate(qwen3, TOKENS, MASK, cache)

    def test_a_batch_generated_without_its_mask(self, qwen3, mapper, source):
        cache = mapper.convert(source, attention_mask=MASK)
        with pytest.raises(CacheUseError, match="converted with padding there, and `generate` takes it for a real"):
            generate(qwen3, TOKENS, torch.ones_like(MASK), cache)

    def test_positions_that_generate_will_not_count(self, qwen3, mapper):
        late = torch.arange(500, 508)[None]
        cache = mapper.convert(prefilled(qwen3, ids(tokens=8), position_ids=late), position_ids=late)
        with pytest.raises(CacheUseError, match="position 500 there"):
            generate(qwen3, ids(tokens=8), torch.ones(1, 8, dtype=torch.long), cache)

    @pytest.mark.parametrize("beams", [1, 2])
    def test_the_same_mask_on_both_sides_works(self, qwen3, mapper, source, beams):
        cache = mapper.convert(source, attention_mask=MASK)
        own = generate(qwen3, TOKENS, MASK, num_beams=beams)
        assert torch.equal(own, generate(qwen3, TOKENS, MASK, cache, num_beams=beams))

    def test_rows_that_were_chosen_repeated_or_reordered(self, qwen3, mapper, source):
        order = torch.tensor([1, 0])
        for change, chosen in (
            (lambda cache: cache.reorder_cache(order), [1, 0]),
            (lambda cache: cache.batch_select_indices(order[:1]), [1]),
            (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
        ):
            cache = mapper.convert(source, attention_mask=MASK)
            change(cache)
            own = generate(qwen3, TOKENS[chosen], MASK[chosen])
            assert torch.equal(own, generate(qwen3, TOKENS[chosen], MASK[chosen], cache))


class TestIntoGoesOnWhereItLeftOff:
    def test_a_cache_converted_with_another_mask(self, qwen3, mapper, source):
        part = prefilled(qwen3, TOKENS[:, :5], attention_mask=MASK[:, :5], position_ids=FROM_MASK[:, :5])
        into = mapper.convert(part, attention_mask=MASK)
        with pytest.raises(ConversionError, match="converted with other positions or another `attention_mask`"):
            mapper.convert(source, position_ids=FROM_MASK, into=into)
        assert into.get_seq_length() == 4
        mapper.convert(source, attention_mask=MASK, into=into)
        own = generate(qwen3, TOKENS, MASK)
        assert torch.equal(own, generate(qwen3, TOKENS, MASK, into))

    def test_a_cache_converted_at_other_positions(self, qwen3, mapper):
        tokens = ids(tokens=8)
        into = mapper.convert(prefilled(qwen3, tokens[:, :5]))
        moved = torch.arange(100, 108)[None]
        with pytest.raises(ConversionError, match="converted with other positions"):
            mapper.convert(prefilled(qwen3, tokens), target_position_ids=moved, into=into)

    def test_a_native_cache_whose_padding_was_counted(self, qwen3, mapper, source):
        """The target's own left padding shows how it numbered its tokens."""
        counted = prefilled(qwen3, TOKENS[:, :5], attention_mask=MASK[:, :5])
        with pytest.raises(ConversionError, match="Row 0 of `into` is left-padded.*the other way"):
            mapper.convert(source, attention_mask=MASK, into=counted)
        assert counted.get_seq_length() == 5
        positions = torch.arange(8)[None]
        mapper.convert(source, attention_mask=MASK, target_position_ids=positions, into=counted)
        own = feed(qwen3, TOKENS, attention_mask=MASK)[:, -1:]
        logits = feed(qwen3, TOKENS[:, -1:], counted, attention_mask=MASK)
        torch.testing.assert_close(logits, own, rtol=1e-3, atol=1e-3)

    def test_a_native_cache_run_as_generate_does(self, qwen3, mapper, source):
        native = prefilled(qwen3, TOKENS[:, :5], attention_mask=MASK[:, :5], position_ids=FROM_MASK[:, :5])
        mapper.convert(source, attention_mask=MASK, into=native)
        assert torch.equal(generate(qwen3, TOKENS, MASK), generate(qwen3, TOKENS, MASK, native))

    @pytest.mark.parametrize("kind", ["native", "converted"])
    def test_other_rows_are_refused_and_nothing_is_added(self, qwen3, mapper, kind):
        into = prefilled(qwen3, ids(tokens=4))
        into = into if kind == "native" else mapper.convert(into)
        before = into.get_seq_length()
        with pytest.raises(ConversionError, match="`into` holds 1 rows, the source cache 2"):
            mapper.convert(prefilled(qwen3, ids(batch=2, tokens=8)), into=into)
        assert into.get_seq_length() == before

    def test_other_heads_are_refused_and_nothing_is_added(self, qwen3, mapper):
        into = prefilled(qwen3, ids(tokens=4))
        into.layers[2].keys = into.layers[2].keys[:, :1]
        with pytest.raises(ConversionError, match="Layer 2 of `into` has 1 KV heads × 16, the target 2 × 16"):
            mapper.convert(prefilled(qwen3, ids(tokens=8)), into=into)
        assert into.layers[0].get_seq_length() == 4

    @pytest.mark.parametrize("kind", ["native", "converted", "empty"])
    def test_a_conversion_that_fails_half_way_leaves_it_as_it_was(self, qwen3, kind):
        mapper = identity(qwen3)
        source, part = prefilled(qwen3, ids(tokens=8)), prefilled(qwen3, ids(tokens=4))
        into = {"native": part, "converted": mapper.convert(part), "empty": type(part)()}[kind]
        before = [(layer.keys, layer.get_seq_length()) for layer in into.layers]
        with torch.no_grad():
            mapper.layers[2].values.bias[0] = float("inf")
        with pytest.raises(ConversionError, match="Target layer 2 comes out with NaN or infinite numbers"):
            mapper.convert(source, into=into)
        assert [(layer.keys, layer.get_seq_length()) for layer in into.layers] == before
        mapper.convert(source, validate=False)
