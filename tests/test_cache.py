"""`TransferredCache` adapts itself to the target on first use, and refuses what would be silently wrong."""

import copy

import pytest
import torch
from transformers import DynamicCache

from hf_kvtransfer import CacheUseError, ConversionError, KVMapper, TransferredCache
from hf_kvtransfer._compat import TAKES_NEW_TOKENS_ONLY, cache_keyword

from .architectures import VOCAB, build


def ids(batch=1, tokens=12, seed=1):
    return torch.randint(3, VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def feed(model, tokens, cache=None):
    return model(input_ids=tokens, use_cache=True, **({} if cache is None else {cache_keyword(model): cache})).logits


def identity(model):
    return KVMapper.for_pair(model, model).set_as_identity()


def converted(model, tokens, **kwargs):
    cache = DynamicCache()  # without a config it keeps every token, past any window
    feed(model, tokens, cache)
    return identity(model).convert(cache, **kwargs)


@pytest.fixture(scope="module")
def llama():
    return build("llama")


def test_it_casts_itself_to_the_targets_dtype(llama):
    cache = converted(llama, ids())
    assert cache.layers[0].keys.dtype == torch.float32
    half = build("llama", dtype=torch.bfloat16)
    logits = feed(half, ids()[:, -1:], cache)
    assert cache.layers[0].keys.dtype == torch.bfloat16
    torch.testing.assert_close(logits, feed(half, ids())[:, -1:], rtol=0.1, atol=0.5)


def test_it_repeats_itself_for_beams_and_return_sequences(llama):
    tokens = ids(batch=2)
    cache = converted(llama, tokens)
    repeated = tokens.repeat_interleave(3, dim=0)
    logits = feed(llama, repeated[:, -1:], cache)
    torch.testing.assert_close(logits, feed(llama, repeated)[:, -1:], rtol=1e-4, atol=1e-4)
    assert cache.layers[0].keys.shape[0] == 6


def test_a_batch_that_is_no_multiple_is_refused(llama):
    with pytest.raises(CacheUseError, match="holds 2 rows, the model feeds a batch of 3; expected a multiple"):
        feed(llama, ids(batch=3, tokens=1), converted(llama, ids(batch=2)))


def test_another_model_is_refused():
    with pytest.raises(CacheUseError, match=r"holds 2 KV heads × 16 per layer.*has 4 × 16"):
        feed(build("gpt_neox"), ids(tokens=1), converted(build("llama"), ids()))


class TestTheMaskMustSpanWhatIsCachedAndWhatIsFed:
    """The ways in which `generate` is silently wrong with a cache, each refused at its first forward pass."""

    @staticmethod
    def generate(model, tokens, cache, mask_length=None, **kwargs):
        mask = torch.ones(tokens.shape[0], mask_length or tokens.shape[1], dtype=torch.long)
        return model.generate(
            input_ids=tokens,
            attention_mask=mask,
            max_new_tokens=4,
            do_sample=False,
            **{cache_keyword(model.generate): cache},
            **kwargs,
        )

    def test_a_fully_covered_prompt(self, llama):
        tokens = ids()
        with pytest.raises(
            CacheUseError, match=r"given 12 tokens.*over 12; the cache holds 12.*convert with `hold_back=1`"
        ):
            self.generate(llama, tokens, converted(llama, tokens, hold_back=0))

    def test_a_cache_used_twice(self, llama):
        tokens = ids()
        cache = converted(llama, tokens)
        self.generate(llama, tokens, cache)
        with pytest.raises(CacheUseError, match=r"used before, it has grown.*`cache.fork\(\)`"):
            self.generate(llama, tokens, cache)

    def test_prompt_lookup_with_the_whole_prompt(self, llama):
        tokens = ids().repeat(1, 2)
        if TAKES_NEW_TOKENS_ONLY:
            with pytest.raises(CacheUseError, match=r"prompt look-up decoding do not skip.*input_ids\[:, 23:\]"):
                self.generate(llama, tokens, converted(llama, tokens), prompt_lookup_num_tokens=2)
        else:  # these releases do skip it
            own = self.generate(llama, tokens, None)
            again = self.generate(llama, tokens, converted(llama, tokens), prompt_lookup_num_tokens=2)
            assert torch.equal(own, again)

    @pytest.mark.skipif(not TAKES_NEW_TOKENS_ONLY, reason="this release takes the whole prompt only")
    def test_prompt_lookup_with_new_tokens_only_works(self, llama):
        tokens = ids().repeat(1, 2)
        own = self.generate(llama, tokens, None)
        new_only = self.generate(
            llama, tokens[:, 23:], converted(llama, tokens), mask_length=24, prompt_lookup_num_tokens=2
        )
        assert torch.equal(own[:, 23:], new_only)

    def test_a_longer_prompt_of_another_conversation(self, llama):
        cache = converted(llama, ids())
        self.generate(llama, ids(), cache)
        with pytest.raises(CacheUseError, match="used for a prompt of 12 tokens.*does not go on from it"):
            self.generate(llama, ids(tokens=30, seed=9), cache)

    def test_the_same_conversation_grown_longer_goes_on(self, llama):
        cache = converted(llama, ids())
        first = self.generate(llama, ids(), cache)
        longer = torch.cat([first, ids(tokens=5, seed=4)], 1)
        assert torch.equal(self.generate(llama, longer, None), self.generate(llama, longer, cache))

    def test_a_mask_that_fits_neither_way(self, llama):
        with pytest.raises(CacheUseError, match="expected either the whole prompt"):
            self.generate(llama, ids(tokens=2), converted(llama, ids(), hold_back=0), mask_length=13)

    def test_new_tokens_without_a_mask_over_everything(self, llama):
        tokens = ids()
        with pytest.raises(CacheUseError, match="pass an attention mask over everything, 12 tokens"):
            self.generate(llama, tokens[:, -1:], converted(llama, tokens))

    def test_the_right_ways_are_not_refused(self, llama):
        tokens, more = ids(), ids(tokens=3, seed=2)
        whole = torch.cat([tokens, more], 1)
        own = self.generate(llama, whole, None)
        assert torch.equal(own, self.generate(llama, whole, converted(llama, tokens, hold_back=0)))
        if TAKES_NEW_TOKENS_ONLY:
            new_only = self.generate(llama, more, converted(llama, tokens, hold_back=0), mask_length=15)
            assert torch.equal(own[:, 12:], new_only)
        else:
            with pytest.raises(CacheUseError, match="can't go on from new tokens alone"):
                self.generate(llama, more, converted(llama, tokens, hold_back=0), mask_length=15)
        logits = feed(llama, more, converted(llama, tokens, hold_back=0))
        torch.testing.assert_close(logits, feed(llama, whole)[:, -3:], rtol=1e-4, atol=1e-4)
        # As many new tokens as are cached is nothing special.
        feed(llama, tokens, converted(llama, tokens, hold_back=0))


def test_sliding_layers_keep_what_their_window_needs_and_count_everything():
    model = build("gemma3")  # windows of 6 tokens beside full attention
    tokens = ids(tokens=20)
    cache = converted(model, tokens)
    assert [layer.get_seq_length() for layer in cache.layers] == [19, 19, 19]
    assert [layer.keys.shape[2] for layer in cache.layers] == [5, 19, 5]
    logits = feed(model, tokens[:, -1:], cache)
    torch.testing.assert_close(logits, feed(model, tokens)[:, -1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_forks_are_independent_and_share_memory_until_they_grow(name):
    model = build(name)
    tokens = ids(tokens=15)
    cache = converted(model, tokens)
    twin = cache.fork()
    assert twin.layers[0].keys.data_ptr() == cache.layers[0].keys.data_ptr()
    first = feed(model, torch.cat([tokens[:, -1:], ids(tokens=4, seed=3)], 1), cache)
    again = feed(model, torch.cat([tokens[:, -1:], ids(tokens=4, seed=3)], 1), twin)
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    cache.reset()
    assert twin.get_seq_length() == 19
    assert cache.get_seq_length() == 0
    assert isinstance(twin, TransferredCache)


def test_a_deep_copy_is_a_cache_of_its_own(llama):
    cache = converted(llama, ids())
    twin = copy.deepcopy(cache)
    torch.testing.assert_close(feed(llama, ids()[:, -1:], twin), feed(llama, ids()[:, -1:], cache))


def test_it_can_be_made_as_a_dynamic_cache_is(llama):
    assert TransferredCache(config=llama.config).get_seq_length() == 0
    pairs = [(torch.zeros(1, 2, 3, 16),) * 2] * 3
    assert TransferredCache(pairs).get_seq_length() == 3


def test_extending_rows_of_another_batch_is_refused(llama):
    mapper, long = identity(llama), ids(batch=2, tokens=12)
    cache = converted(llama, ids(batch=1, tokens=6))
    with torch.no_grad(), pytest.raises(ConversionError, match="`into` holds 1 rows, the source cache 2"):
        mapper.convert(llama(input_ids=long), into=cache)
