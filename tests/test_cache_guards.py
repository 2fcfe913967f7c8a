"""What a `TransferredCache` is used for besides one `generate`: other models, other rows, cropping, restarts."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from hf_kvtransfer import CacheUseError, KVMapper
from hf_kvtransfer._compat import TAKES_NEW_TOKENS_ONLY, cache_keyword

from .architectures import ARCHITECTURES, build, randomise
from .fuzzing import feed, generate, identity, ids, prefilled


@pytest.fixture(scope="module")
def llama():
    return build("llama")


@pytest.fixture(scope="module")
def mapper(llama):
    return identity(llama)


def ones(*shape):
    return torch.ones(*shape, dtype=torch.long)


def deeper(layers):
    config = AutoConfig.for_model(**{**ARCHITECTURES["llama"]().to_dict(), "num_hidden_layers": layers})
    model = AutoModelForCausalLM.from_config(config).eval()
    randomise(model)
    return model


def test_a_model_with_more_layers_is_refused(llama, mapper):
    cache = mapper.convert(prefilled(llama, ids()))
    with pytest.raises(CacheUseError, match="has 3 layers, and the model that uses it feeds layer 3"):
        feed(deeper(4), ids(tokens=1), cache)


def test_a_model_with_fewer_layers_is_refused_at_its_second_pass(llama, mapper):
    cache = mapper.convert(prefilled(llama, ids()))
    shallow = deeper(2)
    feed(shallow, ids(tokens=1), cache)
    with pytest.raises(CacheUseError, match="has 3 layers, and the model that used it feeds fewer"):
        feed(shallow, ids(tokens=1), cache)


@pytest.mark.parametrize("change", ["dtype", "rows"])
def test_another_model_or_batch_after_the_first_use_is_refused(llama, mapper, change):
    cache = mapper.convert(prefilled(llama, ids()))
    feed(llama, ids(tokens=1), cache)
    model = build("llama", dtype=torch.bfloat16) if change == "dtype" else llama
    with pytest.raises(CacheUseError, match="expected the same model and batch until the end"):
        feed(model, ids(batch=1 if change == "dtype" else 2, tokens=1), cache)


def test_a_refused_first_use_changes_nothing(llama, mapper):
    cache = mapper.convert(prefilled(llama, ids(batch=2)))
    for _ in range(2):  # the second attempt is refused as the first was
        with pytest.raises(CacheUseError, match="expected a multiple"):
            feed(llama, ids(batch=3, tokens=1), cache)
    own = feed(llama, ids(batch=2))[:, -1:]
    torch.testing.assert_close(feed(llama, ids(batch=2)[:, -1:], cache), own, rtol=1e-4, atol=1e-4)


def test_rows_repeated_before_the_first_use(llama, mapper):
    cache = mapper.convert(prefilled(llama, ids(batch=2)))
    cache.batch_repeat_interleave(2)
    own = generate(llama, ids(batch=2), ones(2, 12), num_beams=2)
    assert torch.equal(own, generate(llama, ids(batch=2), ones(2, 12), cache, num_beams=2))


def test_a_crop_before_the_first_use_and_of_a_fork(llama, mapper):
    cache = mapper.convert(prefilled(llama, ids()), hold_back=0)
    twin = cache.fork()
    twin.crop(-4)
    assert (cache.get_seq_length(), twin.get_seq_length()) == (12, 8)
    assert torch.equal(generate(llama, ids(), ones(1, 12)), generate(llama, ids(), ones(1, 12), twin))
    assert cache.layers[0].keys.shape[2] == 12


def test_a_crop_past_the_window_is_refused():
    model = build("gemma3")
    cache = identity(model).convert(prefilled(model, ids()))
    with pytest.raises(CacheUseError, match="has seen 11 tokens and holds the last 5; expected fewer than its window"):
        cache.crop(-2)
    within = identity(model).convert(prefilled(model, ids(tokens=5)), hold_back=0)
    within.crop(-2)
    own = feed(model, ids(tokens=5))[:, -1:]
    torch.testing.assert_close(feed(model, ids(tokens=5)[:, -2:], within)[:, -1:], own, rtol=1e-3, atol=1e-3)


def test_a_fork_of_a_used_cache_with_its_rows_reordered(llama, mapper):
    tokens = ids(batch=2)
    cache = mapper.convert(prefilled(llama, tokens))
    grown = generate(llama, tokens, ones(2, 12), cache)
    twin = cache.fork()
    twin.reorder_cache(torch.tensor([1, 0]))
    longer = torch.cat([grown, ids(batch=2, tokens=2, seed=4)], 1)
    own = generate(llama, longer, ones(*longer.shape))
    assert torch.equal(own, generate(llama, longer, ones(*longer.shape), cache))
    assert torch.equal(own[[1, 0]], generate(llama, longer[[1, 0]], ones(*longer.shape), twin))


def test_a_reset_cache_is_an_empty_one(llama, mapper):
    cache = mapper.convert(prefilled(llama, ids()))
    generate(llama, ids(), ones(1, 12), cache)
    cache.reset()
    other = ids(tokens=9, seed=8)
    assert torch.equal(generate(llama, other, ones(1, 9)), generate(llama, other, ones(1, 9), cache))


def test_an_empty_cache_remembers_what_it_was_used_for(llama, mapper):
    """A prompt of one token leaves an empty cache; it has its conversation from its first use on."""
    cache = mapper.convert(prefilled(llama, ids(tokens=1)))
    with pytest.raises(CacheUseError, match=r"given 8 tokens .* over 12; the cache holds 0; expected either"):
        generate(llama, ids()[:, 4:], ones(1, 12), cache)
    own = generate(llama, ids(), ones(1, 12), prompt_lookup_num_tokens=2)
    assert torch.equal(own, generate(llama, ids(), ones(1, 12), cache, prompt_lookup_num_tokens=2))
    with pytest.raises(CacheUseError, match="does not go on from it"):
        generate(llama, ids(tokens=30, seed=9), ones(1, 30), cache)


def test_what_was_cropped_may_go_on_otherwise(llama, mapper):
    cache = mapper.convert(prefilled(llama, ids()))
    generate(llama, ids(), ones(1, 12), cache)
    cache.crop(-(cache.get_seq_length() - 8))
    other = torch.cat([ids()[:, :8], ids(tokens=6, seed=9)], 1)
    assert torch.equal(generate(llama, other, ones(1, 14)), generate(llama, other, ones(1, 14), cache))
    cache.crop(-cache.get_seq_length())
    assert torch.equal(generate(llama, ids(seed=5), ones(1, 12)), generate(llama, ids(seed=5), ones(1, 12), cache))


def test_restarts_from_embeddings(llama, mapper):
    """The whole prompt as embeddings goes on from what is cached; those of another prompt are refused."""

    @torch.no_grad()
    def embedded(tokens, cache=None):
        keywords = {} if cache is None else {cache_keyword(llama.generate): cache}
        embeddings = llama.get_input_embeddings()(tokens)
        return llama.generate(
            inputs_embeds=embeddings,
            attention_mask=ones(*tokens.shape),
            max_new_tokens=4,
            do_sample=False,
            eos_token_id=999,
            **keywords,
        )

    cache = mapper.convert(prefilled(llama, ids()))
    assert torch.equal(embedded(ids()), embedded(ids(), cache))
    with pytest.raises(CacheUseError, match="does not go on from it"):
        embedded(ids(tokens=30, seed=9), cache)


@pytest.mark.skipif(not TAKES_NEW_TOKENS_ONLY, reason="this release takes the whole prompt only")
def test_another_prompt_after_new_tokens_only_is_refused(llama, mapper):
    cache = mapper.convert(prefilled(llama, ids()), hold_back=0)
    generate(llama, ids(tokens=3, seed=2), ones(1, 15), cache)
    with pytest.raises(CacheUseError, match="used for a prompt of 3 tokens"):
        generate(llama, ids(tokens=30, seed=9), ones(1, 30), cache)


def test_cache_implementation_beside_a_cache_is_refused_by_transformers(llama, mapper):
    with pytest.raises(ValueError, match="cache_implementation"):
        generate(llama, ids(), ones(1, 12), mapper.convert(prefilled(llama, ids())), cache_implementation="static")


def test_a_mapper_in_another_dtype(llama):
    source = prefilled(llama, ids())
    exact = identity(llama).convert(source)
    for dtype, tolerance in ((torch.float64, 1e-5), (torch.bfloat16, 0.05), (torch.float16, 0.01)):
        cache = identity(llama).to(dtype).convert(source)
        assert cache.layers[1].keys.dtype == torch.float32
        torch.testing.assert_close(cache.layers[1].keys, exact.layers[1].keys, rtol=tolerance, atol=tolerance * 5)


def test_converting_twice_into_the_same_cache(llama, mapper):
    into = DynamicCache()
    for _ in range(2):
        mapper.convert(prefilled(llama, ids()), into=into)
    assert into.get_seq_length() == 11
    assert torch.equal(generate(llama, ids(), ones(1, 12)), generate(llama, ids(), ones(1, 12), into))


def test_overflow_in_half_precision_is_refused_and_not_passed_on(llama):
    from hf_kvtransfer import ConversionError

    source = prefilled(llama, ids())
    for layer in source.layers:
        layer.values = layer.values * 1e6
    mapper: KVMapper = identity(llama).to(torch.float16)
    with pytest.raises(ConversionError, match="comes out with NaN or infinite numbers.*float16"):
        mapper.convert(source)


def test_new_tokens_only_on_a_release_that_cannot_go_on_from_them(llama, mapper, monkeypatch):
    """Refused there before anything is computed, so that any release shows the sentence."""
    monkeypatch.setattr("hf_kvtransfer.cache.TAKES_NEW_TOKENS_ONLY", False)
    cache = mapper.convert(prefilled(llama, ids()), hold_back=0)
    with pytest.raises(CacheUseError, match="can't go on from new tokens alone"):
        generate(llama, ids(tokens=3, seed=2), ones(1, 15), cache)


def test_chunked_prefill_on_a_release_that_reads_everything_again(llama, mapper, monkeypatch):
    monkeypatch.setattr("hf_kvtransfer.cache.CHUNKED_PREFILL_SKIPS_CACHED", False)
    cache = mapper.convert(prefilled(llama, ids()), hold_back=5)
    with pytest.raises(CacheUseError, match="`prefill_chunk_size` this release of transformers reads again"):
        generate(llama, ids(), ones(1, 12), cache, prefill_chunk_size=3)
