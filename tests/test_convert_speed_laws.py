"""Laws of how a conversion is computed: in chunks of any size, with bounded memory, and always the same numbers."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_kvtransfer import ConversionError, KVMapper, SourceCacheError
from hf_kvtransfer.contents import chunk_length, chunks
from hf_kvtransfer.features import Support
from hf_kvtransfer.packing import Packing
from hf_kvtransfer.placement import Placed, layer_devices
from hf_kvtransfer.positions import Positions
from hf_kvtransfer.reading import ContentReader
from hf_kvtransfer.source import read_source_cache
from hf_kvtransfer.turning import Turner

from .architectures import ARCHITECTURES, build, missing
from .test_convert import ids, prefilled


FULL = [[0, 2], [1], [0, 1, 2]]
SUPPORTS = {
    "full": FULL,
    "local": [Support((0, 2), "local"), Support((1,), "local"), Support((0, 1, 2), "local")],
    "unsorted": [Support((2, 0)), Support((1, 2, 0), "local"), Support((2, 1, 0))],
    "joint": [Support((0, 2), joint=True)] * 3,
    "window": [Support((0, 2), window=2), Support((1,), "local", joint=True, window=1), Support((0,))],
    "mixed": [{"keys": Support((0, 1)), "values": Support((2,), "local")}, [1], [2]],
}


def random_mapper(source, target, support, seed=0, **settings):
    mapper = KVMapper.for_pair(source, target, support=support, **settings)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in mapper.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return mapper


def assert_same(one, other, tolerance=1e-5):
    for mine, theirs in zip(one.layers, other.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(mine.values, theirs.values, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def pair():
    """Two KV heads on the one side, four on the other."""
    return build("qwen3"), build("gpt_neox", seed=1)


@pytest.fixture(params=[False, True], ids=["no padding", "padding"])
def read(request, pair):
    """Source caches and what goes with them."""
    tokens = ids(batch=3, tokens=13)
    if not request.param:
        return prefilled(pair[0], tokens), {}
    mask = torch.ones(3, 13, dtype=torch.long)
    mask[0, :4], mask[2, :1] = 0, 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = prefilled(pair[0], tokens, attention_mask=mask, position_ids=positions)
    return cache, {"attention_mask": mask, "position_ids": positions}


@pytest.mark.parametrize("form", ["linear", "mlp", "residual"])
@pytest.mark.parametrize("name", SUPPORTS)
def test_chunks_of_any_size_give_what_one_chunk_gives(pair, read, name, form):
    options = {} if form == "linear" else {"map_options": {"hidden": 8}}
    mapper = random_mapper(*pair, SUPPORTS[name], map_type=form, **options)
    cache, given = read
    whole = mapper.convert(cache, chunk_tokens=99, **given)
    for length in (1, 5):
        assert_same(mapper.convert(cache, chunk_tokens=length, **given), whole, 1e-4)
    assert_same(mapper.convert(cache, **given), whole, 1e-4)


@pytest.mark.parametrize("name", SUPPORTS)
def test_gradients_change_no_number_and_reach_every_weight(pair, read, name):
    mapper = random_mapper(*pair, SUPPORTS[name])
    cache, given = read
    plain = mapper.convert(cache, **given)
    trained = mapper.train().convert(cache, **given)
    assert_same(trained, plain, 1e-4)
    sum((layer.keys.square().sum() + layer.values.square().sum()) for layer in trained.layers).backward()
    assert all(bool(parameter.grad.abs().sum() > 0) for parameter in mapper.parameters())


def test_wide_pieces_add_up_to_the_product_of_all(pair):
    """Wider than 512 features each piece is multiplied where it lies."""
    from hf_kvtransfer.maps import LinearMap

    for groups in (1, 2):
        form = LinearMap(1300, 2, 16, groups)
        with torch.no_grad():
            form.weight.normal_()
            form.bias.normal_()
            pieces = [torch.randn(groups, 7, width) for width in (600, 700)]
            given = pieces if groups > 1 else [piece[0] for piece in pieces]
            made = form.prepared([600, 700])(given)
            made = made if groups == 1 else made.transpose(0, 1).flatten(1)
            torch.testing.assert_close(made, form(torch.cat(pieces, -1)), rtol=1e-4, atol=1e-3)


class Memory(TorchDispatchMode):
    """Bytes of all tensors that are made while it is on, at most at one time."""

    def __init__(self, given):
        super().__init__()
        self.given = {tensor.untyped_storage()._cdata for tensor in given}
        self.live, self.peak, self.largest = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                address = storage._cdata
                if address not in self.live and address not in self.given:
                    self.live[address] = storage.nbytes()
                    self.largest = max(self.largest, storage.nbytes())
                    weakref.finalize(storage, self.live.pop, address, None)
        self.peak = max(self.peak, sum(self.live.values()))
        return result


def extra_memory(mapper, tokens, chunk):
    """Bytes beside weights, source and result."""
    generator = torch.Generator().manual_seed(0)
    cache = [tuple(torch.randn(1, 2, tokens, 16, generator=generator) for _ in range(2)) for _ in range(3)]
    mapper.convert(cache, hold_back=0, chunk_tokens=chunk)  # what is worked out once is there then
    with Memory([*mapper.parameters(), *(state for pair in cache for state in pair)]) as memory:
        result = mapper.convert(cache, hold_back=0, chunk_tokens=chunk)
    written = sum(state.nbytes for layer in result.layers for state in (layer.keys, layer.values))
    return memory.peak - written


@pytest.mark.parametrize("name", ["full", "local", "window"])
def test_memory_beside_both_caches_is_that_of_a_chunk(name):
    model = build("qwen3")
    mapper = random_mapper(model, model, SUPPORTS[name])
    chunk, tokens = 256, 2048
    bound = chunk * 4 * (mapper.packing().width + sum(2 * layer.width for layer in mapper.packing().target.layers))
    # Positions, 8 bytes for each token on either side, are as long as the context.
    positions = 64 * tokens
    taken = extra_memory(mapper, tokens, chunk)
    # Features that aren't neighbours in memory are put together for one map at a time, beside what all share.
    assert taken < bound + positions + (chunk * 4 * 200 if name == "window" else 0)
    assert extra_memory(mapper, 2 * tokens, chunk) < taken + positions
    # And the measure notices: all at once it takes as many times more.
    assert extra_memory(mapper, tokens, tokens) > 3 * bound


def test_entries_are_written_once_and_taken_over_as_they_are(pair):
    """No tensor of the result's size is made beside the result."""
    mapper = random_mapper(pair[0], pair[0], FULL)
    cache = [tuple(torch.randn(1, 2, 512, 16) for _ in range(2)) for _ in range(3)]
    with Memory([*mapper.parameters(), *(state for pair in cache for state in pair)]) as memory:
        result = mapper.convert(cache, hold_back=0, chunk_tokens=64)
    assert memory.largest == result.layers[0].keys.nbytes
    assert all(layer.keys.is_contiguous() and layer.values.is_contiguous() for layer in result.layers)


def test_source_content_is_computed_once_for_all_target_layers(pair, monkeypatch):
    written = []
    monkeypatch.setattr(Turner, "write", lambda self, keys, layer, out: written.append(layer) or out.copy_(keys))
    cache = read_source_cache(prefilled(pair[0], ids()))
    mapper = random_mapper(*pair, [[0, 1, 2]] * 3)
    counted = torch.arange(12)[None]
    packing = mapper.packing()
    reader = ContentReader(mapper.codec("source"), cache, Positions(counted, counted, None), packing, 0, 12)
    pieces = [
        piece
        for columns in packing.columns.values()
        for piece in reader.pieces(columns, None, torch.device("cpu"), torch.float32)
    ]
    assert sorted(written) == [0, 1, 2]
    # Two buffers, one for each kind, of which all features are views.
    assert len({piece.untyped_storage().data_ptr() for piece in pieces}) == 2


@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - set(missing())))
def test_turning_is_what_the_model_does(name):
    """For every architecture, both ways, in full and in half precision, into strided memory."""
    model = build(name)
    mapper = KVMapper.for_pair(model, model)
    codec, positions = mapper.codec("source"), torch.tensor([[0, 3, 4, 900], [7, 8, 9, 10]])
    tables = codec.tables(positions)
    for layer, shape in enumerate(codec.geometry.layers):
        keys = torch.randn(2, shape.kv_heads, 4, shape.head_dim)
        for off, whole in ((True, codec.remove), (False, codec.apply)):
            out = torch.empty(2, 4, shape.kv_heads, 2 * shape.head_dim)[..., ::2].transpose(1, 2)
            Turner(codec, positions, off=off).write(keys, layer, out)
            torch.testing.assert_close(out, whole(keys, tables, layer), rtol=1e-5, atol=1e-5)
            half = torch.empty(keys.shape, dtype=torch.bfloat16)
            Turner(codec, positions, off=off).write(keys.bfloat16(), layer, half)
            torch.testing.assert_close(half, whole(keys.bfloat16(), tables, layer).bfloat16(), rtol=1e-2, atol=1e-2)


def test_rotations_that_pair_dimensions_in_no_known_way_are_left_to_the_model(pair, monkeypatch):
    codec, counted = KVMapper.for_pair(pair[0], pair[0]).codec("source"), torch.arange(5)[None]
    keys, out = torch.randn(1, 2, 5, 16), torch.empty(1, 2, 5, 16)
    monkeypatch.setattr(type(codec), "partners", lambda *_: torch.arange(16).flip(0))
    Turner(codec, counted, off=True).write(keys, 0, out)
    assert torch.equal(out, codec.remove(keys, codec.tables(counted), 0))


def test_half_precision_maps_add_up_in_full_precision(pair):
    mapper = random_mapper(*pair, [[0, 2]] * 3)
    cache = prefilled(pair[0], ids(tokens=40))
    exact = mapper.convert(cache)
    rounded = mapper.to(torch.bfloat16).convert(cache)
    for mine, theirs in zip(rounded.layers, exact.layers, strict=True):
        assert float((mine.values - theirs.values).norm() / theirs.values.norm()) < 0.01


class TestWhatIsLookedAt:
    def test_only_new_tokens(self, pair):
        """What was refused or let pass at an earlier step is not looked at again."""
        mapper = random_mapper(pair[0], pair[0], FULL)
        cache = mapper.convert(prefilled(pair[0], ids(tokens=12)), hold_back=0)
        longer = prefilled(pair[0], ids(tokens=20))
        longer.layers[1].values[0, 0, 3] = float("nan")
        assert mapper.convert(longer, hold_back=0, into=cache).get_seq_length() == 20
        with pytest.raises(SourceCacheError, match="NaN or infinite value in layer 1, batch row 0, token 3"):
            mapper.convert(longer, hold_back=0)

    @pytest.mark.parametrize("form", ["linear", "mlp"])
    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    def test_what_is_not_finite_is_found_in_every_chunk(self, pair, bad, form):
        options = {} if form == "linear" else {"map_options": {"hidden": 2}}
        mapper = random_mapper(*pair, FULL, map_type=form, **options)
        for token in (0, 7, 11):
            source = prefilled(pair[0], ids())
            source.layers[2].keys[0, 1, token, 3] = bad
            with pytest.raises(SourceCacheError, match=f"infinite key in layer 2, batch row 0, token {token}"):
                mapper.convert(source, hold_back=0, chunk_tokens=5)

    def test_large_numbers_whose_sum_overflows_are_no_infinities(self, pair):
        mapper = KVMapper.for_pair(pair[0], pair[0]).set_as_identity()
        source = prefilled(pair[0], ids())
        for layer in source.layers:
            layer.values = torch.full_like(layer.values, 1e38)
        assert mapper.convert(source).get_seq_length() == 11

    @pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "8"])
    def test_chunks_of_no_size(self, pair, wrong):
        with pytest.raises(ConversionError, match="`chunk_tokens` is .*; expected a whole number of tokens, 1 or more"):
            random_mapper(*pair, FULL).convert(prefilled(pair[0], ids()), chunk_tokens=wrong)


def test_chunks_cover_the_range_once_and_evenly():
    for start, stop, length in ((0, 1, 5), (3, 20, 4), (0, 1000, 256), (7, 8, 1)):
        pieces = list(chunks(start, stop, length))
        assert [token for begin, end in pieces for token in range(begin, end)] == list(range(start, stop))
        sizes = {end - begin for begin, end in pieces}
        assert max(sizes) <= length
        assert max(sizes) - min(sizes) <= 1


def test_wider_mappers_take_fewer_tokens_at_once(pair):
    source, target = (KVMapper.for_pair(*pair).geometry(side) for side in ("source", "target"))
    narrow, wide = (
        Packing([{"keys": support, "values": support}], source, target)
        for support in (Support((0,)), Support((0, 1, 2), joint=True))
    )
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert wide.width == 3 * narrow.width
    assert chunk_length(wide, 1, cuda) < chunk_length(narrow, 1, cuda)
    assert chunk_length(wide, 4, cpu) == chunk_length(wide, 1, cpu) // 4 >= 1


class TestPlaces:
    def test_weights_in_cpu_memory_come_to_the_source_cache(self, pair):
        form = random_mapper(*pair, FULL).layers[0].keys
        placed = Placed(form, [64], torch.device("meta"))
        assert placed.device == torch.device("meta")
        placed.fetch()
        made = placed([torch.empty(5, 64, device="meta")])
        assert made.device.type == "meta"
        assert made.shape == (5, form.out_features)
        assert form.weight.device.type == "cpu"

    def test_weights_beside_the_cache_stay_where_they_are(self, pair):
        form = random_mapper(*pair, FULL).layers[0].keys
        placed = Placed(form, [64], torch.device("cpu"))
        placed.fetch()
        features = torch.randn(5, 64)
        torch.testing.assert_close(placed([features]), form(features[None]))

    def test_each_layer_of_a_target_has_its_device(self, pair):
        target = build("qwen3")
        target.model.layers[1].to("meta")
        assert layer_devices(target, 3) == [torch.device("cpu"), None, torch.device("cpu")]
        assert layer_devices(None, 2) == [None, None]


class TestCompiled:
    def test_one_graph_serves_all_lengths(self, pair):
        """As many graphs as there are shapes of weights, however many tokens there are."""
        from torch._dynamo.testing import CompileCounter

        mapper = random_mapper(*pair, [[0, 1]] * 3)
        caches = {tokens: prefilled(pair[0], ids(tokens=tokens)) for tokens in (5, 9, 17)}
        plain = {tokens: mapper.convert(cache) for tokens, cache in caches.items()}
        counter = CompileCounter()
        torch._dynamo.reset()
        mapper.compile(backend=counter, fullgraph=True)
        counts = []
        for tokens, cache in caches.items():
            assert_same(mapper.convert(cache), plain[tokens])
            counts.append(counter.frame_count)
        assert counts[0] >= 1
        assert counts == [counts[0]] * len(counts)

    def test_a_hook_on_a_map_is_called(self, pair):
        mapper, seen = random_mapper(*pair, FULL), []
        mapper.layers[1].values.register_forward_hook(lambda module, given, made: seen.append(made.shape))
        mapper.convert(prefilled(pair[0], ids()), hold_back=0)
        assert seen == [(12, mapper.layers[1].values.out_features)]

    def test_weights_of_another_kind_are_called_too(self, pair):
        class Halved(nn.Module):
            def forward(self, weight):
                return weight / 2

        mapper = random_mapper(*pair, FULL)
        source = prefilled(pair[0], ids())
        plain = mapper.convert(source)
        nn.utils.parametrize.register_parametrization(mapper.layers[0].values, "weight", Halved())
        nn.utils.parametrize.register_parametrization(mapper.layers[0].values, "bias", Halved())
        halved = mapper.convert(source)
        torch.testing.assert_close(halved.layers[0].values, plain.layers[0].values / 2, rtol=1e-4, atol=1e-5)
