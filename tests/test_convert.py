"""Laws of `convert`: identity, positions as data, held-back tokens, appending, and the sentences of its refusals."""

import pytest
import torch
from transformers import DynamicCache

from hf_kvtransfer import (
    ConversionError,
    KVMapper,
    PairMismatchError,
    SourceCacheError,
    TransferredCache,
    UnsupportedModelError,
)
from hf_kvtransfer._compat import cache_keyword

from .architectures import ARCHITECTURES, VOCAB, build, missing


def ids(batch=1, tokens=12, seed=1):
    return torch.randint(3, VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def feed(model, tokens, cache=None, **kwargs):
    keywords = {} if cache is None else {cache_keyword(model): cache}
    return model(input_ids=tokens, use_cache=True, **keywords, **kwargs).logits


def prefilled(model, tokens, **kwargs):
    cache = DynamicCache()
    feed(model, tokens, cache, **kwargs)
    return cache


def identity(model):
    return KVMapper.for_pair(model, model).set_as_identity()


def random_mapper(source, target, support, seed=0):
    mapper = KVMapper.for_pair(source, target, support=support)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in mapper.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return mapper


@pytest.fixture(scope="module")
def qwen3():
    return build("qwen3")


@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - set(missing())))
def test_identity_gives_the_models_own_logits(name):
    model = build(name)
    tokens = ids(batch=2, tokens=14)
    cache = identity(model).convert(prefilled(model, tokens))
    own = feed(model, tokens)[:, -1:]
    converted = feed(model, tokens[:, -1:], cache)
    torch.testing.assert_close(converted, own, rtol=1e-4, atol=1e-4 * float(own.abs().max()))


def test_generate_goes_on_from_a_converted_cache_as_from_its_own(qwen3):
    inputs = {"input_ids": ids(batch=2), "attention_mask": torch.ones(2, 12, dtype=torch.long)}
    own = qwen3.generate(**inputs, max_new_tokens=8, do_sample=False)
    cache = identity(qwen3).convert(prefilled(qwen3, inputs["input_ids"]))
    keyword = {cache_keyword(qwen3.generate): cache}
    assert torch.equal(own, qwen3.generate(**inputs, max_new_tokens=8, do_sample=False, **keyword))


def test_a_linear_map_equals_the_formula_by_hand():
    """K̂ = rope_T(unrope_S(K) W + b): checked against keys taken before RoPE by a hook, and RoPE put on by the model."""
    source, target = build("llama"), build("qwen3", seed=1)
    tokens = ids(batch=2)
    support = [[0, 2], [1], [0, 1, 2]]
    mapper = random_mapper(source, target, support)
    cache = mapper.convert(prefilled(source, tokens), hold_back=0)
    before_rope = []
    hooks = [
        layer.self_attn.k_proj.register_forward_hook(lambda module, args, output: before_rope.append(output))
        for layer in source.model.layers
    ]
    native = prefilled(source, tokens)
    for hook in hooks:
        hook.remove()
    values = [layer.values.transpose(1, 2).flatten(2) for layer in native.layers]
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    cos, sin = target.model.rotary_emb(before_rope[0], torch.arange(12)[None])
    for index, layers in enumerate(support):
        maps = mapper.layers[index]
        expected = torch.cat([before_rope[i] for i in layers], -1) @ maps.keys.weight.T + maps.keys.bias
        expected = expected.view(2, 12, 2, 16).transpose(1, 2)
        expected, _ = apply_rotary_pos_emb(expected, expected, cos, sin)
        torch.testing.assert_close(cache.layers[index].keys, expected.detach(), rtol=1e-4, atol=1e-4)
        expected = torch.cat([values[i] for i in layers], -1) @ maps.values.weight.T + maps.values.bias
        expected = expected.view(2, 12, 2, 16).transpose(1, 2)
        torch.testing.assert_close(cache.layers[index].values, expected.detach(), rtol=1e-4, atol=1e-4)


def test_sides_may_differ_in_layers_heads_and_head_dim():
    source, target = build("llama"), build("gpt_neox")  # 2 KV heads with full RoPE, 4 with a quarter of it
    mapper = random_mapper(source, target, [[0], [1, 2], [0, 2]])
    cache = mapper.convert(prefilled(source, ids()))
    assert cache.layers[0].keys.shape == (1, 4, 11, 16)
    assert torch.isfinite(feed(target, ids()[:, -1:], cache)).all()


class TestPositions:
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8, [0, 1, 1, 1, 1, 1, 1, 1]])
    from_mask = (mask.cumsum(-1) - 1).clamp(min=0)

    def padded(self):
        tokens = ids(batch=3, tokens=8)
        return torch.where(self.mask == 1, tokens, 0)

    def check(self, model, cache):
        """The target, fed as `generate` feeds it, sees what it would see of each row alone."""
        padded = self.padded()
        logits = feed(
            model, padded[:, -1:], cache, attention_mask=self.mask, position_ids=self.mask.sum(-1, keepdim=True) - 1
        )
        for row in range(3):
            alone = feed(model, padded[row : row + 1, self.mask[row] == 1])[:, -1:]
            torch.testing.assert_close(logits[row : row + 1], alone, rtol=1e-3, atol=1e-3)

    def test_a_source_run_with_positions_from_the_mask(self, qwen3):
        source = prefilled(qwen3, self.padded(), attention_mask=self.mask, position_ids=self.from_mask)
        self.check(qwen3, identity(qwen3).convert(source, attention_mask=self.mask))

    def test_a_source_run_with_positions_that_count_the_padding(self, qwen3):
        source = prefilled(qwen3, self.padded(), attention_mask=self.mask)
        self.check(qwen3, identity(qwen3).convert(source, attention_mask=self.mask))

    def test_a_source_run_by_generate(self, qwen3):
        with torch.no_grad():
            output = qwen3.generate(
                input_ids=self.padded(),
                attention_mask=self.mask,
                max_new_tokens=3,
                do_sample=False,
                return_dict_in_generate=True,
            )
        mapper = identity(qwen3)
        sequences = output.sequences
        mask = torch.cat([self.mask, torch.ones(3, 3, dtype=torch.long)], 1)
        cache = mapper.convert(output, attention_mask=mask, hold_back=0)
        assert cache.get_seq_length() == 10  # the last token written was never read
        own = qwen3.generate(input_ids=sequences, attention_mask=mask, max_new_tokens=4, do_sample=False)
        keyword = {cache_keyword(qwen3.generate): cache}
        again = qwen3.generate(input_ids=sequences, attention_mask=mask, max_new_tokens=4, do_sample=False, **keyword)
        assert torch.equal(own, again)

    def test_given_positions_are_taken(self, qwen3):
        source = prefilled(qwen3, self.padded(), attention_mask=self.mask, position_ids=self.from_mask)
        cache = identity(qwen3).convert(source, attention_mask=self.mask, position_ids=self.from_mask)
        self.check(qwen3, cache)

    def test_positions_may_start_anywhere_and_move(self, qwen3):
        tokens = ids()
        source = prefilled(qwen3, tokens, position_ids=torch.arange(500, 512)[None])
        moved = identity(qwen3).convert(
            source, position_ids=torch.arange(500, 512)[None], target_position_ids=torch.arange(12)[None]
        )
        own = feed(qwen3, tokens)[:, -1:]
        torch.testing.assert_close(feed(qwen3, tokens[:, -1:], moved), own, rtol=1e-3, atol=1e-3)

    def test_positions_that_cannot_be_told_are_asked_for(self, qwen3):
        mask = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1]])
        source = prefilled(qwen3, ids(tokens=8), attention_mask=mask)
        with pytest.raises(ConversionError, match="expected `position_ids`"):
            identity(qwen3).convert(source, attention_mask=mask)

    @pytest.mark.parametrize("bad", [float("nan"), 1e4])
    def test_padding_may_hold_anything(self, qwen3, bad):
        source = prefilled(qwen3, self.padded(), attention_mask=self.mask, position_ids=self.from_mask)
        clean = identity(qwen3).convert(source, attention_mask=self.mask, position_ids=self.from_mask)
        for layer in source.layers:
            layer.values.masked_fill_((self.mask == 0)[:, None, :, None], bad)
        again = identity(qwen3).convert(source, attention_mask=self.mask, position_ids=self.from_mask)
        assert torch.equal(clean.layers[1].values, again.layers[1].values)

    def test_right_padding_is_refused(self, qwen3):
        with pytest.raises(ConversionError, match='Row 0 of `attention_mask` ends in padding.*padding_side="left"'):
            identity(qwen3).convert(prefilled(qwen3, ids()), attention_mask=torch.tensor([[1] * 11 + [0]]))

    def test_masks_and_positions_of_another_shape_are_refused(self, qwen3):
        source = prefilled(qwen3, ids())
        with pytest.raises(ConversionError, match=r"`attention_mask` has shape \[1, 5\]; expected \[1, 12\]"):
            identity(qwen3).convert(source, attention_mask=torch.ones(1, 5))
        with pytest.raises(ConversionError, match=r"`position_ids` has shape \[2, 12\]"):
            identity(qwen3).convert(source, position_ids=torch.zeros(2, 12, dtype=torch.long))
        with pytest.raises(ConversionError, match="negative positions"):
            identity(qwen3).convert(source, position_ids=torch.arange(-2, 10)[None])


class TestHoldBack:
    @pytest.mark.parametrize("hold_back", [0, 1, 5])
    def test_so_many_tokens_are_left_out(self, qwen3, hold_back):
        cache = identity(qwen3).convert(prefilled(qwen3, ids()), hold_back=hold_back)
        assert cache.get_seq_length() == 12 - hold_back
        fed = ids()[:, 12 - hold_back :] if hold_back else ids(tokens=2, seed=9)
        whole = ids() if hold_back else torch.cat([ids(), fed], 1)
        own = feed(qwen3, whole)[:, -1:]
        torch.testing.assert_close(feed(qwen3, fed, cache)[:, -1:], own, rtol=1e-3, atol=1e-3)

    def test_a_prompt_of_one_token_leaves_an_empty_cache_that_works(self, qwen3):
        cache = identity(qwen3).convert(prefilled(qwen3, ids(tokens=1)))
        assert cache.get_seq_length() == 0
        torch.testing.assert_close(feed(qwen3, ids(tokens=1), cache), feed(qwen3, ids(tokens=1)))

    @pytest.mark.parametrize("bad", [-1, 1.5, True, None])
    def test_anything_but_a_number_of_tokens_is_refused(self, qwen3, bad):
        with pytest.raises(ConversionError, match="expected a whole number of tokens"):
            identity(qwen3).convert(prefilled(qwen3, ids()), hold_back=bad)


class TestInto:
    @pytest.mark.parametrize("name", ["qwen3", "gemma3"])
    def test_appending_to_a_converted_cache_equals_converting_at_once(self, name):
        model = build(name)
        mapper = random_mapper(model, model, [[0], [0, 1], [2]])
        whole, part = prefilled(model, ids(tokens=20)), prefilled(model, ids(tokens=20)[:, :8])
        cache = mapper.convert(part)
        assert mapper.convert(whole, into=cache) is cache
        at_once = mapper.convert(whole)
        assert [layer.get_seq_length() for layer in cache.layers] == [19] * 3
        for mine, theirs in zip(cache.layers, at_once.layers, strict=True):
            torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-5, atol=1e-5)

    def test_a_native_cache_keeps_its_own_entries(self, qwen3):
        tokens = ids(tokens=20)
        native = prefilled(qwen3, tokens[:, :8])
        own = [layer.keys.clone() for layer in native.layers]
        mapper = random_mapper(qwen3, qwen3, [[0], [1], [2]])
        mapper.convert(prefilled(qwen3, tokens), into=native)
        assert native.get_seq_length() == 19
        assert all(torch.equal(layer.keys[:, :, :8], mine) for layer, mine in zip(native.layers, own, strict=True))
        identity(qwen3).convert(prefilled(qwen3, tokens), into=(grown := prefilled(qwen3, tokens[:, :8])))
        own_logits = feed(qwen3, tokens)[:, -1:]
        torch.testing.assert_close(feed(qwen3, tokens[:, -1:], grown), own_logits, rtol=1e-3, atol=1e-3)

    def test_a_native_cache_keeps_its_dtype(self):
        half = build("qwen3", dtype=torch.bfloat16)
        native = prefilled(half, ids()[:, :4])
        identity(half).convert(prefilled(build("qwen3"), ids()), into=native)
        assert native.layers[0].keys.dtype == torch.bfloat16

    def test_nothing_is_added_when_nothing_is_missing(self, qwen3):
        native = prefilled(qwen3, ids())
        identity(qwen3).convert(prefilled(qwen3, ids()), into=native)
        assert native.get_seq_length() == 12

    def test_an_empty_cache_is_filled(self, qwen3):
        cache = identity(qwen3).convert(prefilled(qwen3, ids()), into=DynamicCache())
        assert cache.get_seq_length() == 11

    def test_a_source_that_has_read_less_is_refused(self, qwen3):
        with pytest.raises(ConversionError, match="already holds 12 tokens, the source cache only 6"):
            identity(qwen3).convert(prefilled(qwen3, ids()[:, :6]), into=prefilled(qwen3, ids()))

    def test_other_things_are_refused(self, qwen3):
        with pytest.raises(ConversionError, match="`into` is a list; expected a `DynamicCache`"):
            identity(qwen3).convert(prefilled(qwen3, ids()), into=[])
        ragged = prefilled(qwen3, ids()[:, :6])
        ragged.layers[1].crop(-2)
        with pytest.raises(ConversionError, match="expected the same number"):
            identity(qwen3).convert(prefilled(qwen3, ids()), into=ragged)


class TestRefusals:
    def test_a_mapper_without_maps(self, qwen3):
        with pytest.raises(ConversionError, match="no maps yet"):
            KVMapper.for_pair(qwen3, qwen3).convert(prefilled(qwen3, ids()))

    def test_a_source_cache_that_is_not_finite(self, qwen3):
        source = prefilled(qwen3, ids())
        source.layers[2].values[0, 1, 3] = float("nan")
        with pytest.raises(SourceCacheError, match="NaN or infinite value in layer 2"):
            identity(qwen3).convert(source)
        identity(qwen3).convert(source, validate=False)

    def test_the_cache_of_another_model(self, qwen3):
        with pytest.raises(SourceCacheError, match="KV heads × 16; the mapper's source model"):
            identity(qwen3).convert(prefilled(build("gpt_neox"), ids()))

    def test_a_model_of_another_configuration_or_with_other_weights(self, qwen3):
        mapper, source = identity(qwen3), prefilled(qwen3, ids())
        assert isinstance(mapper.convert(source, source=qwen3, target=qwen3), TransferredCache)
        with pytest.raises(PairMismatchError, match="target model .* is not the one.*other weights"):
            mapper.convert(source, target=build("qwen3", seed=7))
        with pytest.raises(PairMismatchError, match="source model .*rotary parameter"):
            mapper.convert(source, source=build("qwen3-yarn"))

    def test_the_same_model_in_another_dtype_is_no_other_model(self, qwen3):
        half = build("qwen3", dtype=torch.bfloat16)
        identity(qwen3).check_pair(source=half, target=half)

    def test_a_model_whose_rotary_frequencies_were_rounded_by_a_cast(self, qwen3):
        rounded = build("qwen3").to(torch.bfloat16)
        with pytest.raises(UnsupportedModelError, match=r"frequencies .* not those of its config.*dtype="):
            identity(qwen3).convert(prefilled(qwen3, ids()), source=rounded)

    def test_identity_between_different_geometries(self):
        with pytest.raises(PairMismatchError, match="`set_as_identity` needs the same"):
            KVMapper.for_pair(build("qwen3"), build("gpt_neox")).set_as_identity()


def test_gradients_reach_the_mapper_in_training_and_not_in_evaluation(qwen3):
    mapper = random_mapper(qwen3, qwen3, [[0], [1], [2]])
    assert not mapper.convert(prefilled(qwen3, ids())).layers[0].keys.requires_grad
    mapper.train()
    cache = mapper.convert(prefilled(qwen3, ids()))
    output = qwen3(input_ids=ids()[:, -1:], use_cache=True, **{cache_keyword(qwen3): cache})
    output.logits.square().mean().backward()
    assert all(parameter.grad is not None for parameter in mapper.parameters())
    qwen3.zero_grad()


def test_models_with_3d_positions_ask_for_positions(qwen3):
    """Text is exact with them; a cache that holds an image can't be told from one that doesn't."""
    mapper, source = identity(qwen3), prefilled(qwen3, ids())
    rope = {**mapper.config.source_geometry["rope_parameters"], "mrope_section": [2, 3, 3]}
    mapper.config.source_geometry = {**mapper.config.source_geometry, "rope_parameters": rope}
    with pytest.raises(ConversionError, match="3-D positions.*expected `position_ids`"):
        mapper.convert(source)
    cache = mapper.convert(source, position_ids=torch.arange(12)[None])
    own = feed(qwen3, ids())[:, -1:]
    torch.testing.assert_close(feed(qwen3, ids()[:, -1:], cache), own, rtol=1e-3, atol=1e-3)
