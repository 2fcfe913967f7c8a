"""Random input to `convert`: each case equals the native answer or is refused."""

import torch
from hypothesis import strategies as st
from transformers import DynamicCache, StaticCache

from hf_kvtransfer import ConversionError, SourceCacheError, TransferredCache

from . import test_fuzz_files, test_fuzz_uses  # noqa: F401  for their number of cases
from .architectures import build
from .fuzzing import (
    CASES,
    PADS,
    attempt,
    feed,
    fuzz,
    generate,
    identity,
    ids,
    mostly,
    padded,
    prefilled,
    tally,  # noqa: F401
)


MODELS = {name: build(name) for name in ("qwen3", "gemma3")}
MAPPERS = {name: identity(model) for name, model in MODELS.items()}
QWEN3, MAPPER = MODELS["qwen3"], MAPPERS["qwen3"]

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OTHERS = (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)


def test_there_are_enough_cases():
    assert sum(CASES.values()) >= 2000
    print(f"\n{sum(CASES.values())} cases: {dict(CASES)}")


# ------------------------------------------------------------------------------------------------------ source caches

LAYER = st.fixed_dictionaries(
    {
        "rows": mostly(0, 1, -1, weight=9),
        "heads": mostly(2, 1, 3, weight=9),
        "tokens": mostly(0, 1, -1, weight=9),
        "dim": mostly(16, 8, 17, weight=9),
        "bad": mostly(None, float("nan"), float("inf"), -float("inf"), weight=9),
        "kind": mostly("pair", "no values", "3-D", "empty layer", "text", "meta", "one tensor", weight=9),
    }
)


def source_of(layers, batch, tokens, dtype):
    """Pairs of tensors, and whether a mapper of the tiny models must take them."""
    generator, pairs = torch.Generator().manual_seed(7), []
    shapes = set()
    valid = len(layers) == 3 and dtype in FLOATS
    for layer in layers:
        shape = (max(batch + layer["rows"], 0), layer["heads"], max(tokens + layer["tokens"], 0), layer["dim"])
        shapes.add((shape[0], shape[2]))
        pair = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]
        if layer["bad"] is not None and dtype in FLOATS and pair[1].numel():
            pair[1].view(-1)[-1] = layer["bad"]
            valid = False
        valid = valid and layer["kind"] == "pair" and shape[1] == 2 and shape[3] == 16 and min(shape) > 0
        if layer["kind"] == "no values":
            pair[1] = None
        elif layer["kind"] == "3-D":
            pair[0] = pair[0].flatten(0, 1)
        elif layer["kind"] == "empty layer":
            pair = [None, None]
        elif layer["kind"] == "text":
            pair = ["keys", "values"]
        elif layer["kind"] == "meta":
            pair = [tensor.to("meta") for tensor in pair]
        elif layer["kind"] == "one tensor":
            pair = [pair[0], pair[0][..., :-1, :]]
        pairs.append(tuple(pair))
    return pairs, valid and len(shapes) == 1


def wrap(pairs, container):
    if container == "list":
        return pairs
    if container == "triples":
        return tuple((*pair, None) for pair in pairs)
    cache = DynamicCache()
    for _ in pairs:
        cache.layers.append(type(prefilled(QWEN3, ids(tokens=1)).layers[0])())
    for layer, (keys, values) in zip(cache.layers, pairs, strict=True):
        layer.keys, layer.values, layer.is_initialized = keys, values, keys is not None
    return {"cache": cache} if container == "dict" else cache


@fuzz(
    500,
    layers=st.lists(LAYER, min_size=3, max_size=3) | st.lists(LAYER, max_size=5),
    batch=st.integers(1, 3),
    tokens=st.integers(1, 9),
    dtype=mostly(torch.float32, *FLOATS, *OTHERS, weight=4),
    container=st.sampled_from(["list", "triples", "cache", "dict"]),
)
def test_source_caches(layers, batch, tokens, dtype, container):
    pairs, valid = source_of(layers, batch, tokens, dtype)
    result, error = attempt(MAPPER.convert, wrap(pairs, container), hold_back=0)
    assert (error is None) == valid, f"{error}"
    if error is not None:
        assert isinstance(error, SourceCacheError)
        return
    for layer, (keys, values) in zip(result.layers, pairs, strict=True):
        assert torch.equal(layer.values, values)
        torch.testing.assert_close(layer.keys, keys, rtol=2e-2 if dtype in FLOATS[1:3] else 1e-4, atol=2e-2)


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**20),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.lists(st.one_of(st.integers(), st.none(), st.text(max_size=1)), max_size=3),
    st.dictionaries(
        st.sampled_from(["cache", "past_key_values", "x"]), st.one_of(st.integers(), st.none()), max_size=2
    ),
    st.sampled_from([object(), object, print, torch.float32, torch.zeros(0), torch.ones(1, 8), torch.ones(2, 2, 8)]),
    st.builds(lambda: prefilled(QWEN3, ids(tokens=3))),
    st.builds(lambda: StaticCache(config=QWEN3.config, max_cache_len=8)),
    st.builds(TransferredCache),
    st.builds(lambda: DynamicCache(config=QWEN3.config)),
    st.just(QWEN3),
)
SOURCE = prefilled(QWEN3, ids(tokens=8))
NATIVE = feed(QWEN3, ids(tokens=8))[:, -1:]


@fuzz(
    400,
    name=st.sampled_from(
        [
            "source_cache",
            "attention_mask",
            "position_ids",
            "target_position_ids",
            "hold_back",
            "into",
            "source",
            "target",
            "tokenizer",
        ]
    ),
    value=ANYTHING,
)
def test_any_object_as_any_argument(name, value):
    arguments = {"source_cache": SOURCE, name: value}
    result, _ = attempt(MAPPER.convert, **arguments)
    if result is None or name in ("source_cache", "hold_back", "position_ids", "target_position_ids"):
        return
    assert result.get_seq_length() == 7
    if result is value:  # `into` keeps what it had, which was of other tokens
        return
    torch.testing.assert_close(feed(QWEN3, ids(tokens=8)[:, -1:], result), NATIVE, rtol=1e-3, atol=1e-3)


# ---------------------------------------------------------------------------------------------- masks and positions


@st.composite
def masks(draw, tokens=8):
    """A mask of any shape and content, or `None`, or the right one in another dtype or longer."""
    kind = draw(st.sampled_from(["right", "right", "longer", "none", "other pads", "holes", "additive", "shape"]))
    dtype = draw(st.sampled_from([torch.long, torch.bool, torch.float32, torch.int8, torch.bfloat16, torch.uint8]))
    numbers = draw(st.lists(st.integers(0, 1), min_size=2 * tokens, max_size=2 * tokens))
    shape = draw(st.sampled_from([(8,), (1, 8), (2, 7), (2, 1, 8), (2, 1, 8, 8), (3, 8), (0, 8), (16,)]))
    other = draw(PADS)

    def make(mask):
        if kind == "none":
            return None
        if kind == "longer":
            return torch.cat([mask, torch.ones(2, 3, dtype=torch.long)], 1).to(dtype)
        if kind == "other pads":
            return padded(other)[1].to(dtype)
        if kind == "holes":
            return torch.tensor(numbers).view(2, tokens).to(dtype)
        if kind == "additive":
            return (1.0 - mask.float()) * torch.finfo(torch.float32).min
        if kind == "shape":
            return torch.ones(shape).to(dtype)
        return mask.to(dtype)

    return kind, make


@fuzz(250, name=st.sampled_from(sorted(MODELS)), pads=PADS, mask=masks(), counted=st.booleans(), given=st.booleans())
def test_masks(name, pads, mask, counted, given):
    """Whatever mask `convert` gets, `generate` with the right one gives the native answer or nothing."""
    model, (kind, make) = MODELS[name], mask
    tokens, right, from_mask = padded(pads)
    true_positions = torch.arange(8)[None] if counted else from_mask
    source = prefilled(model, tokens, attention_mask=right, position_ids=true_positions)
    keywords = {"position_ids": true_positions} if given else {}
    cache, error = attempt(MAPPERS[name].convert, source, attention_mask=make(right), **keywords)
    if error is not None:
        told = kind in ("right", "longer") and (given or max(pads) == 0 or (name == "qwen3" and max(pads) >= 2))
        assert not told, error
        return
    answer, error = attempt(generate, model, tokens, right, cache)
    if answer is not None:
        assert torch.equal(answer, generate(model, tokens, right))
    else:
        assert kind not in ("right", "longer"), error


@fuzz(
    250,
    values=st.lists(st.integers(-5, 2**40) | st.integers(0, 20), min_size=8, max_size=8),
    shape=st.sampled_from([(1, 8), (1, 8), (1, 8), (8,), (2, 8), (1, 4), (1, 1, 8), (1, 2, 4), (3, 1, 8)]),
    dtype=mostly(torch.long, torch.int32, torch.float32, torch.bool, torch.complex64, torch.uint8, weight=6),
    name=st.sampled_from(["position_ids", "target_position_ids", "both"]),
)
def test_positions(values, shape, dtype, name):
    """Positions are taken as they are, or refused; keys that keep theirs stay as they were."""
    numbers = torch.tensor(values)
    if dtype != torch.long:
        numbers = numbers.clamp(-5, 100)
    count = torch.Size(shape).numel()
    given = numbers.repeat(4)[:count].view(shape).to(dtype)
    names = ["position_ids", "target_position_ids"] if name == "both" else [name]
    result, error = attempt(MAPPER.convert, SOURCE, hold_back=0, **dict.fromkeys(names, given))
    # Negative numbers that unsigned integers can't hold have become large ones, which are positions.
    whole = dtype in (torch.long, torch.int32, torch.uint8)
    valid = shape == (1, 8) and whole and bool((given >= 0).all())
    assert (error is None) == valid, error
    if error is not None:
        assert isinstance(error, ConversionError)
    elif "position_ids" in names:
        for layer, native in zip(result.layers, SOURCE.layers, strict=True):
            torch.testing.assert_close(layer.keys, native.keys, rtol=1e-3, atol=1e-3)
