"""What the target reads itself is exact whatever the maps hold, and meets them however it is asked for."""

import copy

import pytest
import torch
from transformers import DynamicCache

from hf_kvtransfer import ConversionError, KVMapper, MapperFileError, PairMismatchError
from hf_kvtransfer._compat import cache_keyword
from hf_kvtransfer.blocks import run_block, stream_features, stream_from
from hf_kvtransfer.contents import predicted_stream
from hf_kvtransfer.conversion import anchor_output
from hf_kvtransfer.evaluation import prefill
from hf_kvtransfer.features import KINDS, Support
from hf_kvtransfer.modules import decoder_of
from hf_kvtransfer.native import run_native
from hf_kvtransfer.positions import resolve_positions
from hf_kvtransfer.source import read_source_cache

from .architectures import ARCHITECTURES, VOCAB, build, missing
from .test_native import assert_close, state


TOKENS, DEPTH = 13, 3  # more tokens than any sliding window of the registry holds
NAMES = sorted(set(ARCHITECTURES) - set(missing()))


def ids(rows=2, tokens=TOKENS, seed=1):
    return torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def padded(*padding, tokens=TOKENS):
    """Ids and mask of rows with so much left padding."""
    given, mask = ids(len(padding), tokens), torch.ones(len(padding), tokens, dtype=torch.long)
    for row, pads in enumerate(padding):
        given[row, :pads], mask[row, :pads] = 0, 0
    return given, mask


@torch.no_grad()
def native(model, given, mask=None):
    """Keys and values of every layer and token, as the model caches them."""
    decoder, cache = decoder_of(model), DynamicCache()
    inputs = {}
    if mask is not None:
        inputs = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    decoder(input_ids=given, use_cache=True, **inputs, **{cache_keyword(decoder): cache})
    return cache


@torch.no_grad()
def logits(model, given, cache=None):
    keywords = {} if cache is None else {cache_keyword(model): cache}
    return model(input_ids=given, use_cache=cache is not None, **keywords).logits


def anchored(source, target, layers, start=0, **settings):
    """Random maps of every kind of support around an anchor."""
    own = range(start, min(start + layers + 1, DEPTH)) if layers is not None else range(0)
    support = [
        {
            "keys": Support((0, 2), joint=True, window=1, anchor=bool(own) and layer >= own.stop),
            "values": Support((1,), heads="local", window=2, anchor=bool(own) and layer >= own.stop),
        }
        if layer not in own
        else None
        for layer in range(DEPTH)
    ]
    entry = Support((0, 1), joint=True).to_dict() if start else None
    mapper = KVMapper.for_pair(
        source, target, support=support, anchor_layers=layers, anchor_start=start, entry=entry, **settings
    )
    return randomised(mapper)


@torch.no_grad()
def randomised(mapper):
    generator = torch.Generator().manual_seed(0)
    for parameter in mapper.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return mapper


def assert_same_cache(mine, other, layers=None, tokens=slice(None), mask=None):
    """Sliding layers hold the last tokens only; of the padding nothing is asked."""
    pairs = list(zip(mine.layers, other.layers, strict=True))
    for index, (one, two) in enumerate(pairs):
        if layers is not None and index not in layers:
            continue
        held = min(one.keys.shape[2], two.keys.shape[2])
        for kind in ("keys", "values"):
            found, expected = (getattr(layer, kind)[:, :, -held:][:, :, tokens] for layer in (one, two))
            if mask is not None:
                real = mask[:, None, -held:, None][:, :, tokens] != 0
                found, expected = found.where(real, 0), expected.where(real, 0)
            assert_close(found, expected.to(found.dtype), 5e-5)


@pytest.fixture(scope="module")
def source():
    return build("llama", seed=5)


@pytest.fixture(scope="module", params=NAMES)
def target(request):
    return build(request.param)


@pytest.fixture(scope="module")
def qwen3():
    return build("qwen3")


@pytest.mark.parametrize("way", ["anchor", "prefix", "suffix"])
def test_what_the_target_reads_entirely_is_native(source, target, way):
    given = ids()
    mapper = anchored(source, target, DEPTH if way == "anchor" else None)
    before = state(target)
    wishes = {} if way == "anchor" else {f"exact_{way}": TOKENS}
    cache = mapper.convert(native(source, given), target=target, input_ids=given, **wishes)
    assert state(target) == before
    assert cache.get_seq_length() == TOKENS - 1
    own = logits(target, given)[:, -1:]
    found = logits(target, given[:, -1:], cache)
    torch.testing.assert_close(found, own, rtol=0, atol=1e-4 * float(own.abs().max()))


def test_the_first_layers_and_tokens_are_native_whatever_the_maps_hold(source, target):
    given, mask = padded(0, 4)
    own = native(target, given, mask)
    for layers in range(DEPTH):
        mapper = anchored(source, target, layers)
        cache = mapper.convert(
            native(source, given, mask),
            attention_mask=mask,
            target=target,
            input_ids=given,
            hold_back=0,
            exact_prefix=2,
        )
        assert_same_cache(cache, own, layers=range(layers + 1), mask=mask)
        if not any(layer.sliding_window for layer in mapper.config.geometry("target").layers):
            assert_same_cache(cache, own, tokens=slice(6), mask=mask)


def test_a_block_from_the_true_stream_is_native(target):
    given = ids()
    own, before = native(target, given), state(target)
    for start, layers in ((1, 1), (1, 2), (2, 1)):
        entry = run_native(target, given, layers=start).hidden
        run = run_block(target, given, entry, start=start, layers=layers)
        expected = own.layers[start : start + layers + 1]
        assert len(run.keys) == len(run.values) == len(expected)
        for index, layer in enumerate(expected):
            assert_close(run.keys[index], layer.keys)
            assert_close(run.values[index], layer.values)
        first = run_block(target, given[:, :5], entry[:, :5], start=start, layers=layers)
        past = list(zip(first.keys, first.values, strict=True))
        rest = run_block(target, given[:, 5:], entry[:, 5:], start=start, layers=layers, past=past)
        for index, layer in enumerate(expected):
            assert_close(rest.keys[index], layer.keys[:, :, 5:])
    assert state(target) == before


def test_a_block_that_fails_leaves_the_model_as_it_was(qwen3):
    given = ids()
    before = state(qwen3)
    with pytest.raises((RuntimeError, ValueError)):
        run_block(qwen3, given, torch.zeros(2, TOKENS, 7), start=1, layers=1)
    assert state(qwen3) == before
    qwen3.train()
    try:
        run_block(qwen3, given, torch.zeros(2, TOKENS, 64), start=1, layers=1)
        assert all(module.training for module in qwen3.modules())
    finally:
        qwen3.eval()


def test_a_stream_comes_back_from_its_features():
    hidden = torch.randn(2, 3, 64) * torch.logspace(0, 3, 3)[:, None]
    torch.testing.assert_close(stream_from(stream_features(hidden)), hidden, rtol=1e-4, atol=1e-5)
    assert bool(torch.isfinite(stream_features(torch.zeros(1, 1, 64))).all())


def test_the_identity_with_any_prefix_and_suffix_is_native(qwen3):
    given = ids()
    mapper = KVMapper.for_pair(qwen3, qwen3).set_as_identity()
    own = native(qwen3, given[:, :-1])
    for prefix, suffix in ((0, 0), (3, 0), (0, 4), (3, 4), (7, 9), (99, 0), (0, 99)):
        cache = mapper.convert(
            native(qwen3, given), target=qwen3, input_ids=given, exact_prefix=prefix, exact_suffix=suffix
        )
        assert_same_cache(cache, own)


@pytest.mark.parametrize("layers", [None, 0, 1])
def test_an_exact_suffix_is_the_target_run_on_what_was_converted(source, qwen3, layers):
    given = ids()
    mapper, read = anchored(source, qwen3, layers), native(source, given)
    whole = mapper.convert(read, target=qwen3, input_ids=given, exact_suffix=4)
    shorter = mapper.convert(read, target=qwen3, input_ids=given, hold_back=5)
    logits(qwen3, given[:, TOKENS - 5 : TOKENS - 1], shorter)
    assert_same_cache(whole, shorter)


# (layers, first layer of the anchor)
ANCHORS = [(None, 0), (0, 0), (1, 0), (3, 0), (1, 1), (2, 1), (1, 2)]


@pytest.mark.parametrize(("layers", "start"), ANCHORS)
@pytest.mark.parametrize("name", ["qwen3", "gpt_neox"])
def test_a_context_converted_in_steps_is_converted_at_once(source, name, layers, start):
    target, (given, mask) = build(name), padded(0, 2)
    mapper = anchored(source, target, layers, start)
    read = native(source, given, mask)

    def convert(tokens, **wishes):
        part = DynamicCache()
        for index, layer in enumerate(read.layers):
            part.update(layer.keys[:, :, :tokens], layer.values[:, :, :tokens], index)
        return mapper.convert(
            part, attention_mask=mask, target=target, input_ids=given, hold_back=0, exact_prefix=3, **wishes
        )

    whole = convert(TOKENS, exact_suffix=2)
    for steps in ((7,), (3, 4), (5, 6, 9)):
        cache = None
        for tokens in steps:
            cache = convert(tokens, into=cache)
        assert convert(TOKENS, into=cache, exact_suffix=2) is cache
        assert_same_cache(cache, whole, mask=mask)


@pytest.mark.parametrize(("layers", "start"), ANCHORS)
def test_padded_rows_are_the_rows_alone(source, qwen3, layers, start):
    given, mask = padded(0, 5)
    mapper = anchored(source, qwen3, layers, start)

    def convert(rows, first):
        part = given[rows, first:]
        read = native(source, part, mask[rows, first:])
        return mapper.convert(read, attention_mask=mask[rows, first:], target=qwen3, input_ids=part, exact_suffix=3)

    both = convert(slice(0, 2), 0)
    for row, pads in ((0, 0), (1, 5)):
        alone = convert(slice(row, row + 1), pads)
        for mine, other in zip(both.layers, alone.layers, strict=True):
            assert_close(mine.keys[row : row + 1, :, pads:], other.keys, 5e-5)
            assert_close(mine.values[row : row + 1, :, pads:], other.values, 5e-5)


def test_a_predicted_stream_is_what_the_block_is_given(source, qwen3):
    given = ids()
    mapper, read = anchored(source, qwen3, 1, 1), native(source, given)
    cache = mapper.convert(read, target=qwen3, input_ids=given, hold_back=0)
    plain = read_source_cache(read, mapper.config.geometry("source"))
    positions = resolve_positions(plain, mapper.codec("source"), None, None, None)
    entry = predicted_stream(mapper, plain, positions, 0, TOKENS)
    run = run_block(qwen3, given, entry, start=1, layers=1)
    assert_close(cache.layers[1].keys, run.keys[0])
    assert_close(cache.layers[2].values, run.values[1])
    with pytest.raises(ConversionError, match="predicts no residual stream"):
        predicted_stream(anchored(source, qwen3, 1), plain, positions, 0, TOKENS)


@pytest.mark.parametrize(("layers", "start"), [(1, 0), (1, 1)])
def test_what_the_anchor_puts_out_is_what_maps_are_given(source, qwen3, layers, start):
    given = ids()
    mapper, read = anchored(source, qwen3, layers, start, exact_prefix=2), native(source, given)
    hidden = anchor_output(mapper, read, qwen3, given)
    assert hidden.shape == (2, TOKENS - 2, 65)
    if not start:
        torch.testing.assert_close(hidden, stream_features(run_native(qwen3, given, layers=layers).hidden)[:, 2:])
        with pytest.raises(ConversionError, match="puts nothing out that a map could read"):
            anchor_output(anchored(source, qwen3, DEPTH), read, qwen3, given)


SLIDING = [name for name in NAMES if name in ("gemma3", "mistral-sliding", "cohere2", "gpt_oss")]


@pytest.mark.parametrize("name", SLIDING)
def test_sliding_windows_convert_at_once_and_refuse_to_go_on_from_a_cut_cache(source, name):
    target, given = build(name), ids()
    read = native(source, given)
    mapper = anchored(source, target, 1)
    whole = mapper.convert(read, target=target, input_ids=given, exact_prefix=2, exact_suffix=2)
    logits(target, given[:, -1:], whole)
    cut = KVMapper.for_pair(target, target).set_as_identity().convert(native(target, given), hold_back=4)
    with pytest.raises(ConversionError, match="in a sliding-window layer"):
        mapper.convert(read, target=target, input_ids=given, into=cut)
    # A native cache that has kept every token goes on.
    kept = native(target, given[:, :8])
    assert mapper.convert(read, target=target, input_ids=given, into=kept) is kept
    assert_same_cache(kept, native(target, given[:, :-1]), layers=(0, 1))


def test_generate_is_forward_step_by_step(source, qwen3):
    given, mask = padded(0, 3)
    mapper = anchored(source, qwen3, 1, exact_prefix=2, exact_suffix=2)
    cache = mapper.convert(native(source, given, mask), attention_mask=mask, target=qwen3, input_ids=given)
    keyword, twin = cache_keyword(qwen3.generate), cache.fork()
    output = qwen3.generate(
        input_ids=given, attention_mask=mask, max_new_tokens=5, do_sample=False, eos_token_id=None, **{keyword: cache}
    )
    tokens, seen = given[:, -1:], mask
    for step in range(5):
        positions = seen.cumsum(-1)[:, -1:] - 1
        with torch.no_grad():
            found = qwen3(
                input_ids=tokens,
                attention_mask=seen,
                position_ids=positions,
                **{cache_keyword(qwen3): twin},
            ).logits
        tokens = found[:, -1:].argmax(-1)
        assert torch.equal(tokens, output[:, TOKENS + step, None])
        seen = torch.cat([seen, torch.ones_like(tokens)], dim=1)


def test_forks_beams_and_sequences_go_on_from_an_anchored_cache(source, qwen3):
    given = ids()
    mapper = anchored(source, qwen3, 1, exact_suffix=2)
    cache = mapper.convert(native(source, given), target=qwen3, input_ids=given)
    keyword = cache_keyword(qwen3.generate)
    options = {"input_ids": given, "max_new_tokens": 4, "eos_token_id": None, "do_sample": False}

    def generate(**more):
        return qwen3.generate(**options, **more, **{keyword: cache.fork()})

    assert torch.equal(generate(), generate())
    beams = generate(num_beams=3, num_return_sequences=2)
    assert beams.shape == (4, TOKENS + 4)
    # The rows of a batch don't know of one another.
    one = mapper.convert(native(source, given[:1]), target=qwen3, input_ids=given[:1])
    options["input_ids"] = given[:1]
    alone = qwen3.generate(**options, num_beams=3, num_return_sequences=2, **{keyword: one})
    assert torch.equal(alone, beams[:2])


@pytest.mark.parametrize("start", [0, 1])
def test_a_half_precision_target_takes_a_float32_mapper(source, start):
    target, given = build("qwen3", dtype=torch.bfloat16), ids()
    mapper = anchored(source, target, 1, start, exact_prefix=0 if start else 2, exact_suffix=2)
    for reader in (source, build("llama", dtype=torch.bfloat16, seed=5)):
        cache = mapper.convert(native(reader, given), target=target, input_ids=given)
        if not start:
            own = native(target, given[:, :-1])
            error = cache.layers[1].keys[:, :, :10].float() - own.layers[1].keys[:, :, :10].float()
            assert float(error.abs().max()) <= 0.02 * float(own.layers[1].keys.abs().max())
        output = target.generate(
            input_ids=given, max_new_tokens=3, do_sample=False, **{cache_keyword(target.generate): cache}
        )
        assert output.shape == (2, TOKENS + 3)


def test_gradients_flow_into_the_maps_while_a_mapper_trains(source, qwen3):
    given = ids()
    mapper = anchored(source, qwen3, 1)
    read = native(source, given)
    assert not mapper.convert(read, target=qwen3, input_ids=given).layers[2].keys.requires_grad
    mapper.train()
    cache = mapper.convert(read, target=qwen3, input_ids=given, exact_prefix=2)
    (cache.layers[2].keys.square().sum() + cache.layers[2].values.square().sum()).backward()
    assert all(float(parameter.grad.abs().max()) > 0 for parameter in mapper.parameters())
    assert all(parameter.grad is None for parameter in qwen3.parameters())


@pytest.mark.parametrize(("layers", "start"), [(1, 0), (1, 1)])
def test_a_saved_mapper_converts_alike(source, qwen3, tmp_path, layers, start):
    given = ids()
    mapper = anchored(source, qwen3, layers, start, exact_prefix=3, exact_suffix=1)
    mapper.save_pretrained(tmp_path)
    loaded = KVMapper.from_pretrained(tmp_path)
    assert loaded.config.needs_target
    one, two = (each.convert(native(source, given), target=qwen3, input_ids=given) for each in (mapper, loaded))
    for mine, other in zip(one.layers, two.layers, strict=True):
        assert torch.equal(mine.keys, other.keys)
        assert torch.equal(mine.values, other.values)


ANCHOR = {"keys": Support((1,), anchor=True).to_dict(), "values": Support((1,), anchor=True).to_dict()}
ENTRY = Support((0, 1)).to_dict()


class TestConfigurationsThatContradictThemselves:
    """As a damaged file or a slip of the hand makes them."""

    @pytest.mark.parametrize(
        ("settings", "sentence"),
        [
            ({"support": [None, None, None], "anchor_layers": 4}, "anchor runs 4 layers from layer 0 on, of a target"),
            ({"support": [None, None, [0]]}, "Target layer 0 has no maps, and the target itself makes layers \\[\\]"),
            ({"support": [[0], None, [0]], "anchor_layers": 1}, "Target layer 0 has maps"),
            ({"support": [[0], ANCHOR, [0]]}, "Target layer 1 reads the anchor's output"),
            ({"support": [[0], None, None], "anchor_layers": 1, "anchor_start": 1}, "is predicted from None"),
            ({"support": [None, None, [0]], "anchor_layers": 1, "entry": ENTRY}, "is predicted from {"),
            (
                {"support": [[0], None, [0]], "anchor_layers": 0, "anchor_start": 1, "entry": ENTRY},
                "one layer or more there",
            ),
            (
                {"support": [ANCHOR, None, None], "anchor_layers": 1, "anchor_start": 1, "entry": ENTRY},
                "Target layer 0 reads the anchor's output, which is there for layers from 3 on",
            ),
            (
                {
                    "support": [[0], None, None],
                    "anchor_layers": 1,
                    "anchor_start": 1,
                    "entry": {**ENTRY, "layers": [0, 7]},
                },
                "is predicted from {",
            ),
            (
                {
                    "support": [[0], None, None],
                    "anchor_layers": 1,
                    "anchor_start": 1,
                    "entry": {**ENTRY, "window": 10**9},
                },
                "is predicted from {",
            ),
            ({"support": [dict.fromkeys(KINDS, Support((1,), window=10**12))] * 3}, "numbers of a token; expected"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_anchor_and_maps(self, qwen3, settings, sentence):
        with pytest.raises(PairMismatchError, match=sentence):
            KVMapper.for_pair(qwen3, qwen3, **settings)

    @pytest.mark.parametrize(
        ("name", "value"),
        [("anchor_layers", -1), ("anchor_start", True), ("exact_prefix", "4"), ("exact_suffix", -2), ("entry", {})],
    )
    def test_values_of_another_type(self, qwen3, name, value):
        with pytest.raises(MapperFileError, match=f"`{name}` of this KVMapperConfig"):
            KVMapper.for_pair(qwen3, qwen3, **{name: value})

    def test_a_size_that_no_model_has(self, qwen3):
        config = KVMapper.for_pair(qwen3, qwen3, support=[[0], [1], [2]]).config
        config.target_geometry["hidden_size"] = 10**12
        with pytest.raises(MapperFileError, match="`hidden_size` is 1000000000000"):
            KVMapper(config)


class TestRefusals:
    @pytest.mark.parametrize(
        ("given", "missing_part"),
        [
            ({}, "target and input_ids are missing"),
            ({"target"}, "input_ids is missing"),
            ({"input_ids"}, "target is missing"),
        ],
    )
    def test_a_conversion_without_target_or_ids(self, source, qwen3, given, missing_part):
        mapper, tokens = anchored(source, qwen3, 1), ids()
        arguments = {name: value for name, value in (("target", qwen3), ("input_ids", tokens)) if name in given}
        with pytest.raises(ConversionError, match=f"With anchor_layers=1 the target reads .* and {missing_part}"):
            mapper.convert(native(source, tokens), **arguments)

    def test_what_the_configuration_asks_for_can_be_left_out(self, source, qwen3):
        mapper, tokens = anchored(source, qwen3, None, exact_prefix=3), ids()
        with pytest.raises(ConversionError, match="With exact_prefix=3"):
            mapper.convert(native(source, tokens))
        mapper.convert(native(source, tokens), exact_prefix=0)

    @pytest.mark.parametrize(
        ("tokens", "sentence"),
        [
            (torch.ones(1, TOKENS).long(), "expected the ids that the source has read"),
            (torch.ones(TOKENS).long(), "expected the ids that the source has read"),
            ([[1] * TOKENS] * 2, "is list; expected the ids"),
            (torch.ones(2, TOKENS - 1).long(), "expected the ids of everything"),
            (torch.ones(2, TOKENS), "expected the target's new tokens"),
            (torch.full((2, TOKENS), VOCAB), "the rows of the target's embedding"),
        ],
    )
    def test_ids_that_the_source_has_not_read(self, source, qwen3, tokens, sentence):
        with pytest.raises(ConversionError, match=sentence):
            anchored(source, qwen3, 1).convert(native(source, ids()), target=qwen3, input_ids=tokens)

    @pytest.mark.parametrize("name", ["exact_prefix", "exact_suffix"])
    @pytest.mark.parametrize("value", [-1, 1.5, True, "all"])
    def test_numbers_of_tokens_that_are_none(self, source, qwen3, name, value):
        with pytest.raises(ConversionError, match=f"`{name}` is .*; expected a whole number of tokens"):
            anchored(source, qwen3, 1).convert(native(source, ids()), target=qwen3, input_ids=ids(), **{name: value})

    def test_longer_ids_and_held_back_tokens(self, source, qwen3):
        mapper, tokens = anchored(source, qwen3, 1), ids(tokens=TOKENS + 3)
        read = native(source, tokens[:, :TOKENS])
        one = mapper.convert(read, target=qwen3, input_ids=tokens, hold_back=4)
        assert one.get_seq_length() == TOKENS - 4
        assert_same_cache(one, native(qwen3, tokens[:, : TOKENS - 4]), layers=(0, 1))
        assert mapper.convert(read, target=qwen3, input_ids=tokens, hold_back=99).get_seq_length() == 0


class TestWhatTheTargetAdds:
    """What isn't finite, or can't be what the source has read, is refused and not passed on."""

    @pytest.fixture
    def anchored(self, family_model, family_tokenizer):
        source, target = family_model("small"), copy.deepcopy(family_model("large"))
        mapper = KVMapper.for_pair(source, target, support=[None] * 2 + [[0]] * 4, anchor_layers=1)
        text = "Notes: kettle in garden. lamp in attic. drum in barn. kettle in garden. lamp in"
        ids = family_tokenizer(text, return_tensors="pt").input_ids
        return mapper, source, target, ids

    def test_a_target_that_overflows(self, anchored):
        mapper, source, target, ids = anchored
        cache = prefill(source, ids)
        with torch.no_grad():
            target.model.layers[0].mlp.down_proj.weight[3, 3] = float("nan")
        with pytest.raises(ConversionError, match="The target's own layers give NaN"):
            mapper.convert(cache, target=target, input_ids=ids)

    @pytest.mark.parametrize("change", [lambda ids: ids.roll(1, 1), lambda ids: ids.flip(1)], ids=["shifted", "turned"])
    def test_ids_of_another_text(self, anchored, change):
        mapper, source, target, ids = anchored
        cache = prefill(source, ids)
        assert mapper.convert(cache, target=target, input_ids=ids).get_seq_length() == ids.shape[1] - 1
        with pytest.raises(ConversionError, match="gives the same id to tokens whose keys differ"):
            mapper.convert(cache, target=target, input_ids=change(ids))
