"""Every way to generate on every architecture: a converted cache computes what the model without a cache computes."""

import pytest

from hf_kvtransfer import KVMapper, UnsupportedModelError
from hf_kvtransfer.modules import skeleton

from ..architectures import REFUSED, missing
from .limits import Limit, limit_of
from .settings import BATCH, LAWS, NAMES, SHORT, NativeSetting, Setting, setting
from .ways import WAYS


# One worker builds each architecture's models.
by_name = pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in NAMES])


@by_name
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("law", LAWS)
def test_conformance(name, way, law, record_property):
    chosen = setting(name, law)
    limit = limit_of(way, chosen)
    if limit is None:
        follow(way, chosen)
    else:
        with pytest.raises(limit.error, match=limit.sentence):
            follow(way, chosen)
        show_native_limit(way, chosen, limit)
    record_property("conformance", [name, way, law, "exact" if limit is None else limit.sentence])


def follow(way: str, chosen: Setting) -> None:
    for result, expected in WAYS[way](chosen):
        result.check(expected)


def show_native_limit(way: str, chosen: Setting, limit: Limit) -> None:
    """What is refused would not have been right with the model's own cache either."""
    native = NativeSetting(chosen)
    if limit.natively == "alike":
        with pytest.raises(limit.error, match=limit.sentence):
            follow(way, native)
    elif chosen.law == "identity" and not chosen.is_all_sliding:
        # Where every layer slides, tokens that are read twice have left all windows before they matter.
        with pytest.raises((AssertionError, RuntimeError, ValueError, IndexError)):
            follow(way, native)


@by_name
def test_the_injected_entries_matter(name):
    """The references of the two laws differ widely, so that neither can be met by a cache that is not read."""
    plain, injected = (setting(name, law).reference(BATCH).logits[0] for law in LAWS)
    assert float((plain - injected).abs().max()) > 0.02 * float(plain.abs().max())


@by_name
def test_sliding_layers_drop_what_has_left_their_window(name):
    chosen = setting(name, "identity")
    windows = [layer.sliding_window for layer in chosen.mapper.config.geometry("target").layers]
    cache = chosen.cache(SHORT)
    chosen.generate(SHORT, cache, max_new_tokens=8)
    read = SHORT.tokens + 8 - 1
    assert [layer.get_seq_length() for layer in cache.layers] == [read] * 3
    assert [layer.keys.shape[2] for layer in cache.layers] == [min(read, (w or read + 1) - 1) for w in windows]


@pytest.mark.parametrize("name", sorted(set(REFUSED) - set(missing())))
def test_what_is_not_supported_is_refused_with_its_reason(name):
    factory, word = REFUSED[name]
    model = skeleton(factory())
    with pytest.raises(UnsupportedModelError, match=word):
        KVMapper.for_pair(model, model)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("lfm2", "conv in layers 0 and 2"),
        ("qwen3_next", "linear_attention in layers 0–2"),
        ("jamba", "in layers 0–2"),
        ("bamba", "in layers 0 and 2"),
    ],
)
def test_refusals_of_hybrid_attention_name_the_layers(name, layers):
    model = skeleton(REFUSED[name][0]())
    with pytest.raises(UnsupportedModelError, match=layers):
        KVMapper.for_pair(model, model)


def test_the_suite_is_as_large_as_it_says():
    assert missing() == []
    assert len(NAMES) >= 20
    assert len(WAYS) >= 15
    exact = [way for way in WAYS if limit_of(way, setting("llama", "identity")) is None]
    assert len(exact) >= 15
