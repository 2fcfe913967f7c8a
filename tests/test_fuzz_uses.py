"""Random uses of a converted cache: each case equals what a native cache does, or is refused."""

import copy

import pytest
import torch
from hypothesis import strategies as st
from transformers import DynamicCache

from hf_kvtransfer import KVTransferError, TransferredCache
from hf_kvtransfer._compat import TAKES_NEW_TOKENS_ONLY

from .architectures import build
from .fuzzing import PADS, attempt, feed, fuzz, generate, identity, ids, mostly, padded, prefilled, tally  # noqa: F401


MODELS = {name: build(name) for name in ("qwen3", "gemma3")}
MAPPERS = {name: identity(model) for name, model in MODELS.items()}
QWEN3, MAPPER = MODELS["qwen3"], MAPPERS["qwen3"]

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@fuzz(
    200,
    dtype=st.sampled_from(FLOATS[:2] + FLOATS[3:]),
    source_dtype=st.sampled_from(FLOATS),
    batch=st.integers(1, 2),
    fed=st.integers(1, 4),
    times=st.integers(1, 3),
    hold_back=st.integers(0, 10),
    again=st.sampled_from([None, None, "dtype", "batch"]),
)
def test_targets_of_any_dtype_and_batch(dtype, source_dtype, batch, fed, times, hold_back, again):
    target = _in(dtype)
    tokens = ids(batch=batch, tokens=8)
    source = prefilled(QWEN3, tokens)
    for layer in source.layers:
        layer.keys, layer.values = layer.keys.to(source_dtype), layer.values.to(source_dtype)
    cache, error = attempt(MAPPER.convert, source, hold_back=hold_back)
    assert error is None
    start = max(8 - hold_back, 0)
    whole = torch.cat([tokens[:, :start], ids(batch=batch, tokens=times + 3, seed=2)], 1)
    rows = fed if cache.get_seq_length() else batch
    more = whole[[min(row * batch // rows, batch - 1) for row in range(rows)], start:]
    logits, error = attempt(feed, target, more, cache)
    assert (error is None) == (rows % batch == 0)
    if error is not None:
        return
    own = feed(target, whole)[:, start:].repeat_interleave(rows // batch, dim=0)
    coarse = torch.bfloat16 in (dtype, source_dtype)
    tolerance = 0.15 if coarse else 0.01
    torch.testing.assert_close(logits.float(), own.float(), rtol=tolerance, atol=tolerance * float(own.abs().max()))
    if again is not None:
        wrong = _in(torch.float64 if dtype != torch.float64 else torch.float32) if again == "dtype" else target
        extra = more[:, -1:] if again == "dtype" else more[:, -1:].repeat(2, 1)
        assert attempt(feed, wrong, extra, cache)[1] is not None


def _in(dtype, made={}):  # noqa: B006
    if dtype not in made:
        made[dtype] = copy.deepcopy(QWEN3).to(dtype)
    return made[dtype]


@fuzz(
    220,
    name=st.sampled_from(sorted(MODELS)),
    read=st.integers(1, 12),
    hold_back=st.integers(0, 2),
    first=st.integers(0, 11),
    mask_length=mostly(12, 0, 3, 11, 13, weight=6),
    pads=mostly((0, 0), (3, 0), (2, 4), weight=6),
    forward=st.booleans(),
    way=st.sampled_from(["greedy", "beams", "sequences", "look-up", "twice", "fork", "other", "crop"]),
)
def test_generate(name, read, hold_back, first, mask_length, pads, forward, way):
    """Any part of a prompt in the cache, any part of it fed, any mask: the native answer or a refusal."""
    model = MODELS[name]
    tokens, right, from_mask = padded(pads, tokens=12)
    positions = {} if forward else {"position_ids": from_mask[:, :read]}
    source = prefilled(model, tokens[:, :read], attention_mask=right[:, :read], **positions)
    given = {"position_ids": torch.arange(read)[None] if forward else from_mask[:, :read]}
    if int(right[:, :read].sum(-1).min()) == 0 or not bool(right[:, read - 1].all()):
        return  # a row of nothing but padding
    cache, error = attempt(MAPPERS[name].convert, source, attention_mask=right, hold_back=hold_back, **given)
    assert error is None
    if way == "look-up" and name == "gemma3" and not TAKES_NEW_TOKENS_ONLY:
        return  # that release can't take candidates back out of a sliding window, with no cache of ours either
    first = first if way != "greedy" else 0
    kwargs = {
        "beams": {"num_beams": 3},
        "sequences": {"num_return_sequences": 2, "num_beams": 2},
        "look-up": {"prompt_lookup_num_tokens": 2} if max(pads) == 0 else {},
    }.get(way, {})
    rows = slice(0, 1) if way == "look-up" else slice(None)
    if way == "look-up":
        cache.batch_select_indices(torch.tensor([0]))
    tokens, right = tokens[rows], right[rows]
    mask = torch.cat([right, torch.ones_like(right)], 1)[:, :mask_length] if mask_length else None
    expected = generate(model, tokens, right, **kwargs)
    if way == "crop" and (name == "qwen3" or cache.get_seq_length() < 6) and cache.get_seq_length() > 1:
        cache.crop(-1)
    twin = cache.fork()
    try:
        answer, error = attempt(generate, model, tokens[:, first:], mask, cache, **kwargs)
    except (ValueError, RuntimeError, IndexError):
        # An empty cache is as good as none; what transformers makes of other lengths is its own affair.
        assert twin.get_seq_length() == 0
        return
    exact = mask_length == 12 and first == 0 and twin.get_seq_length() < 12 and way != "look-up"
    assert error is None or not exact, error
    if answer is None:
        return
    if mask is not None and mask.shape == right.shape and first in (0, twin.get_seq_length()):
        assert torch.equal(answer, expected[:, first:])
    if way == "twice":
        _, error = attempt(generate, model, tokens, right, cache)
        assert error is not None
    elif way == "fork" and exact:
        assert torch.equal(generate(model, tokens, right, twin), expected)
    elif way == "other" and twin.get_seq_length():
        _, error = attempt(generate, model, ids(batch=2, tokens=20, seed=9), None, cache)
        assert error is not None


@fuzz(
    200,
    name=st.sampled_from(sorted(MODELS)),
    held=st.integers(0, 12),
    kind=st.sampled_from(["native", "converted", "other batch", "ragged", "other heads", "fewer layers", "used"]),
    pads=mostly((0, 0), (3, 0), (2, 4), weight=5),
    other=st.booleans(),
    hold_back=st.integers(0, 3),
)
def test_into(name, held, kind, pads, other, hold_back):
    model, mapper = MODELS[name], MAPPERS[name]
    tokens, right, from_mask = padded(pads, tokens=10)
    source = prefilled(model, tokens, attention_mask=right, position_ids=from_mask)
    earlier = min(held, 10)
    into = DynamicCache()
    if earlier > max(pads):
        earlier_mask = right[:, :earlier]
        into = prefilled(model, tokens[:, :earlier], attention_mask=earlier_mask, position_ids=from_mask[:, :earlier])
        if kind in ("converted", "used"):
            into = mapper.convert(into, attention_mask=earlier_mask, position_ids=from_mask[:, :earlier])
    if kind == "used":
        more = ids(batch=2, tokens=held + 1, seed=3)
        feed(model, more, into)
    elif kind == "other batch" and into.layers:
        into.batch_select_indices(torch.tensor([0]))
    elif kind == "ragged" and into.layers:
        into.layers[1].crop(-1)
    elif kind == "other heads" and into.layers:
        into.layers[2].keys = into.layers[2].keys[:, :1]
        into.layers[2].values = into.layers[2].values[:, :1]
    elif kind == "fewer layers" and into.layers:
        del into.layers[2]
    before = [(layer.get_seq_length(), layer.keys) for layer in into.layers]
    start = into.get_seq_length()
    mask = torch.ones_like(right) if other else right
    result, error = attempt(
        mapper.convert, source, attention_mask=mask, position_ids=from_mask, into=into, hold_back=hold_back
    )
    broken = kind in ("other batch", "ragged", "other heads", "fewer layers") and start > 0
    if error is not None:
        assert all(layer.keys is keys for layer, (_, keys) in zip(into.layers, before, strict=True))
        assert broken or start > 10 or (other and kind in ("converted", "used")), error
        return
    assert result is into
    assert not broken
    assert into.get_seq_length() == max(10 - hold_back, start)
    left = into.get_seq_length()
    if kind == "used" or left == 10:
        return
    if other and max(pads):
        if isinstance(into, TransferredCache) and start:
            assert torch.equal(mask, right)
        return  # a native cache doesn't tell which of its tokens were padding
    kept = from_mask[:, left:]
    logits = feed(model, tokens[:, left:], into, attention_mask=right, position_ids=kept)[:, -1:]
    own = feed(model, tokens, attention_mask=right, position_ids=from_mask)[:, -1:]
    torch.testing.assert_close(logits, own, rtol=1e-3, atol=1e-3 * float(own.abs().max()))


OPERATIONS = st.lists(
    st.sampled_from(["crop", "repeat", "select", "reorder", "fork", "feed", "reset", "copy"]), min_size=1, max_size=5
)


@fuzz(180, name=st.sampled_from(sorted(MODELS)), operations=OPERATIONS, tokens=st.integers(2, 9))
def test_operations_on_a_cache_are_those_of_a_native_one(name, operations, tokens):
    model = MODELS[name]
    prompt = ids(batch=2, tokens=tokens)
    cache = MAPPERS[name].convert(prefilled(model, prompt), hold_back=0)
    native = DynamicCache(config=model.config)
    feed(model, prompt, native)
    twins = []
    for step, operation in enumerate(operations):
        rows = next((layer.keys.shape[0] for layer in native.layers if layer.keys is not None), 0)
        if operation == "fork":
            twins.append((cache, [layer.keys for layer in cache.layers]))
            cache = cache.fork()
        elif operation == "copy":
            cache = copy.deepcopy(cache)
        elif operation == "feed":
            more = ids(batch=rows or 2, tokens=2, seed=step)
            try:
                own = feed(model, more, native)
            except Exception:
                with pytest.raises((KVTransferError, RuntimeError)):
                    feed(model, more, cache)
                return
            torch.testing.assert_close(feed(model, more, cache), own, rtol=1e-3, atol=1e-3 * float(own.abs().max()))
        else:
            results = [_operate(operation, some, rows) for some in (cache, native)]
            assert results[0] is None or isinstance(results[0], KVTransferError) or rows == 0
            assert (results[0] is None) == (results[1] is None)
            if results[0] is not None:
                return
            if operation == "reset":
                native = DynamicCache(config=model.config)
        assert cache.get_seq_length() == native.get_seq_length()
    for twin, keys in twins:
        assert all(layer.keys is tensor for layer, tensor in zip(twin.layers, keys, strict=True))


def _operate(operation, cache, rows):
    indices = torch.arange(max(rows, 1) - 1, -1, -1)
    try:
        if operation == "crop":
            cache.crop(-1)
        elif operation == "repeat":
            cache.batch_repeat_interleave(2)
        elif operation == "select":
            cache.batch_select_indices(indices[:1])
        elif operation == "reorder":
            cache.reorder_cache(indices)
        else:
            cache.reset()
    except Exception as error:
        return error
