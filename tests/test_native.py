"""The target's own layers give what the target would have cached, in one piece or in several, and leave no trace."""

import threading
import weakref

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from hf_kvtransfer._compat import cache_keyword
from hf_kvtransfer.errors import ConversionError, UnsupportedModelError
from hf_kvtransfer.geometry import ModelGeometry
from hf_kvtransfer.modules import decoder_of
from hf_kvtransfer.native import rms_normalised, run_native

from .architectures import ARCHITECTURES, VOCAB, build, missing


TOKENS, DEPTH = 11, 3  # more tokens than any sliding window of the registry holds


@pytest.fixture(scope="module", params=[name for name in ARCHITECTURES if name not in missing()])
def model(request):
    return build(request.param)


@pytest.fixture(scope="module")
def qwen3():
    return build("qwen3")


@pytest.fixture
def ids():
    return torch.randint(3, VOCAB, (2, TOKENS))


@torch.no_grad()
def native(model, ids, **inputs):
    """What the model caches by itself, and the residual stream before each of its layers."""
    decoder = decoder_of(model)
    cache = DynamicCache()
    output = decoder(input_ids=ids, output_hidden_states=True, **inputs, **{cache_keyword(decoder): cache})
    return [(layer.keys, layer.values) for layer in cache.layers], output.hidden_states


def entries(run):
    return list(zip(run.keys, run.values, strict=True))


def assert_close(found, expected, tolerance=2e-5):
    """As a part of the largest number, since sums over tokens come in another order."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


def assert_same(found, expected, tolerance=2e-5):
    assert len(found) == len(expected)
    for pair, reference in zip(found, expected, strict=True):
        for tensor, other in zip(pair, reference, strict=True):
            assert_close(tensor, other, tolerance)


def cut(pairs, *index):
    """The same part of all keys and values."""
    return [(keys[index], values[index]) for keys, values in pairs]


def state(model):
    """Everything about a model's modules that a run might leave changed."""
    return [
        (
            name,
            id(module),
            module.training,
            sorted(vars(module)),
            *(list(vars(module)[hooks].values()) for hooks in ("_forward_hooks", "_forward_pre_hooks")),
        )
        for name, module in model.named_modules()
    ]


def test_layers_are_the_models_own(model, ids):
    cached, hidden = native(model, ids)
    before = state(model)
    for layers in range(DEPTH):
        run = run_native(model, ids, layers=layers)
        assert_same(entries(run), cached[: layers + 1])
        assert_close(run.hidden, hidden[layers])
    for layers in (DEPTH, None):
        run = run_native(model, ids, layers=layers)
        assert_same(entries(run), cached)
        assert run.hidden is None
    assert state(model) == before


@pytest.mark.parametrize("first", [1, 4, 10])
def test_two_calls_are_one(model, ids, first):
    for layers in (None, 0, 1):
        whole = run_native(model, ids, layers=layers)
        begin = run_native(model, ids[:, :first], layers=layers)
        end = run_native(model, ids[:, first:], layers=layers, past=entries(begin))
        assert_same(entries(begin), cut(entries(whole), ..., slice(first), slice(None)))
        assert_same(entries(end), cut(entries(whole), ..., slice(first, None), slice(None)))
        if layers is not None:
            assert_close(torch.cat([begin.hidden, end.hidden], 1), whole.hidden)


def test_padded_rows_are_the_rows_alone(model, ids):
    """In one piece, in pieces of which the first are all padding, and in two calls."""
    pads, first = 5, 6
    mask = torch.ones_like(ids)
    mask[0, :pads] = 0
    for layers in (None, 0, 2):
        alone = [run_native(model, ids[:1, pads:], layers=layers), run_native(model, ids[1:], layers=layers)]
        begin = run_native(model, ids[:, :first], layers=layers, attention_mask=mask[:, :first], chunk=2)
        runs = [
            (run_native(model, ids, layers=layers, attention_mask=mask), 0),
            (run_native(model, ids, layers=layers, attention_mask=mask.bool(), chunk=4), 0),
            (run_native(model, ids, layers=layers, attention_mask=mask, chunk=50), 0),
            (run_native(model, ids[:, first:], layers=layers, attention_mask=mask, past=entries(begin)), first),
        ]
        for run, start in runs:
            assert all(tensor.isfinite().all() for pair in entries(run) for tensor in pair)
            for row, skipped in ((0, pads), (1, 0)):
                here, there = max(skipped - start, 0), max(start - skipped, 0)
                found = cut(entries(run), slice(row, row + 1), slice(None), slice(here, None))
                assert_same(found, cut(entries(alone[row]), ..., slice(there, None), slice(None)))
                if layers is not None:
                    assert_close(run.hidden[row : row + 1, here:], alone[row].hidden[:, there:])


def test_positions_are_taken_as_given(model, ids):
    positions = torch.arange(100, 100 + TOKENS)[None]
    cached, _ = native(model, ids, position_ids=positions)
    assert_same(entries(run_native(model, ids, position_ids=positions)), cached)


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "phi3"])
def test_half_precision_is_kept(name, ids):
    model = build(name, dtype=torch.bfloat16)
    cached, hidden = native(model, ids)
    run = run_native(model, ids, layers=1)
    assert_same(entries(run), cached[:2], tolerance=0)
    assert_close(run.hidden, hidden[1], tolerance=0)
    # A converted past may be more precise than the target; what comes back is as the target caches.
    first = run_native(model, ids[:, :6])
    precise = [(keys.float(), values.float()) for keys, values in entries(first)]
    for chunk in (None, 2):
        run = run_native(model, ids[:, 6:], past=precise, chunk=chunk)
        assert_same(entries(run), cut(cached, ..., slice(6, None), slice(None)), tolerance=0.02)


def test_the_callers_precision_and_mode_do_not_matter(qwen3, ids):
    cached, _ = native(qwen3, ids)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad():
        run = run_native(qwen3, ids)
    assert_same(entries(run), cached, tolerance=0)
    assert not any(tensor.requires_grad for pair in entries(run) for tensor in pair)


def test_a_past_is_only_read(qwen3, ids):
    cache = DynamicCache()
    with torch.no_grad():
        decoder_of(qwen3)(input_ids=ids[:, :6], **{cache_keyword(decoder_of(qwen3)): cache})
    past = [(layer.keys, layer.values) for layer in cache.layers]
    copies = [(keys.clone(), values.clone()) for keys, values in past]
    # More layers than are needed are no matter.
    run = run_native(qwen3, ids[:, 6:], layers=1, past=past, chunk=2)
    assert len(run.keys) == 2
    assert cache.get_seq_length() == 6
    assert all(layer.keys is keys for layer, (keys, _) in zip(cache.layers, past, strict=True))
    assert_same(past, copies, tolerance=0)


def test_an_empty_past_is_none(qwen3, ids):
    empty = [(torch.zeros(2, 2, 0, 16), torch.zeros(2, 2, 0, 16))] * DEPTH
    assert_same(entries(run_native(qwen3, ids, past=empty)), native(qwen3, ids)[0], tolerance=0)


def test_layers_behind_the_last_one_do_not_run(ids):
    model = build("llama")
    ran = []
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.o_proj.register_forward_hook(lambda *_, index=index: ran.append(index))
        layer.self_attn.k_proj.register_forward_hook(lambda *_, index=index: ran.append(f"keys {index}"))
    run_native(model, ids, layers=1)
    assert ran == ["keys 0", 0, "keys 1"]
    ran.clear()
    run_native(model, ids, layers=0)
    assert ran == ["keys 0"]


def test_training_mode_comes_back(ids):
    model = build("llama")
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    cached, _ = native(model, ids)
    model.train()
    model.model.layers[1].mlp.eval()
    before = state(model)
    for layers in (None, 1):
        assert_same(entries(run_native(model, ids, layers=layers)), cached[: DEPTH if layers is None else 2])
        assert state(model) == before


@pytest.mark.parametrize("flag", ["output_hidden_states", "output_attentions", "output_router_logits"])
def test_what_a_config_collects_leaves_nothing_behind(flag, ids):
    model = build("qwen3_moe")
    if flag == "output_attentions":
        model.set_attn_implementation("eager")
    cached, _ = native(build("qwen3_moe"), ids)
    before = state(model)
    setattr(model.config, flag, True)
    assert_same(entries(run_native(model, ids, layers=1)), cached[:2])
    assert state(model) == before


class Interruption(Exception):
    """What a user's own hook raises."""


@pytest.mark.parametrize("layers", [None, 0, 2])
@pytest.mark.parametrize("place", ["model.embed_tokens", "model.layers.0", "model.layers.2.self_attn.v_proj"])
def test_an_error_within_leaves_nothing_behind(place, layers, ids):
    model = build("qwen3").train()
    module = model.get_submodule(place)

    def fail(*_):
        raise Interruption

    handle = module.register_forward_pre_hook(fail)
    before = state(model)
    if layers != 0 or place != "model.layers.2.self_attn.v_proj":
        with pytest.raises(Interruption):
            run_native(model, ids, layers=layers)
    assert state(model) == before
    handle.remove()
    assert_same(entries(run_native(model, ids)), native(model.eval(), ids)[0])


def test_threads_do_not_hear_each_other(ids):
    """While a run is in the last layer it needs, another thread reads other tokens with all layers of the model."""
    model = build("qwen3")
    cached, hidden = native(model, ids)
    other_ids = ids[:1, :5] + 1
    others = []

    def read():
        others.append(run_native(model, other_ids))

    def read_elsewhere(*_):
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=read)
            thread.start()
            thread.join()

    handle = model.model.layers[1].self_attn.k_proj.register_forward_pre_hook(read_elsewhere)
    run = run_native(model, ids, layers=1)
    handle.remove()
    assert_same(entries(run), cached[:2])
    assert_close(run.hidden, hidden[1])
    assert_same(entries(others[0]), native(model, other_ids)[0])


def test_nothing_holds_on_to_the_model(ids):
    model = build("llama")
    run = run_native(model, ids, layers=1)
    reference = weakref.ref(model.model.layers[1].self_attn.k_proj)
    del model
    assert reference() is None
    assert run.hidden is not None


def test_wrapped_models_run(ids):
    peft = pytest.importorskip("peft")
    model = build("qwen3")
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj"], lora_dropout=0.5, init_lora_weights=False)
    )
    adapted.train()
    run = run_native(torch.compile(adapted), ids, layers=2)
    assert adapted.training
    cached, hidden = native(adapted.eval(), ids)
    assert_same(entries(run), cached)
    assert_close(run.hidden, hidden[2])


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_compiled_layers_run(in_place, ids):
    model = build("qwen3")
    cached, hidden = native(model, ids)
    for index, layer in enumerate(model.model.layers):
        if in_place:
            layer.compile(backend="eager")
        else:
            model.model.layers[index] = torch.compile(layer, backend="eager")
    for layers in (None, 0, 2):
        run = run_native(model, ids, layers=layers)
        assert_same(entries(run), cached[: DEPTH if layers is None else layers + 1])
        if layers is not None:
            assert_close(run.hidden, hidden[layers])


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_layers_compiled_as_one_graph_run(ids):
    # Of another copy: what transformers hooks into a model that shows its hidden states can't be in one graph.
    cached, _ = native(build("llama"), ids)
    model = build("llama")
    for layer in model.model.layers:
        layer.compile(backend="eager", fullgraph=True)
    assert_same(entries(run_native(model, ids)), cached)


def test_offloaded_models_run(ids):
    accelerate = pytest.importorskip("accelerate")
    model = build("qwen3")
    cached, hidden = native(model, ids)
    accelerate.cpu_offload(model, execution_device="cpu")
    run = run_native(model, ids, layers=1)
    assert_same(entries(run), cached[:2])
    assert_close(run.hidden, hidden[1])
    assert all(parameter.device.type == "meta" for parameter in model.parameters())


def test_normalised_features():
    hidden = 300 * torch.randn(2, 5, 64, dtype=torch.bfloat16)
    features = rms_normalised(hidden)
    assert features.dtype == torch.float32
    assert features.shape == hidden.shape
    assert_close(features.square().mean(-1), torch.ones(2, 5))
    assert_close(rms_normalised(hidden * 4), features)
    assert torch.equal(rms_normalised(torch.zeros(1, 1, 8)), torch.zeros(1, 1, 8))


ONES, PAIR = torch.ones(2, 4), (torch.ones(2, 2, 3, 16), torch.ones(2, 2, 3, 16))
NARROW = (torch.ones(2, 2, 3, 8), torch.ones(2, 2, 3, 8))
REFUSALS = [
    ("new tokens", {"input_ids": [[1, 2]]}),
    ("new tokens", {"input_ids": torch.tensor([1, 2])}),
    ("new tokens", {"input_ids": torch.ones(2, 4)}),
    ("new tokens", {"input_ids": torch.ones(2, 4, dtype=torch.bool)}),
    ("new tokens", {"input_ids": torch.ones(2, 0, dtype=torch.long)}),
    ("new tokens", {"input_ids": torch.ones(2, 4, dtype=torch.long, device="meta")}),
    ("goes from 3 to 128", {"input_ids": torch.tensor([[3, VOCAB]])}),
    ("goes from -100 to 3", {"input_ids": torch.tensor([[-100, 3]])}),
    ("`layers` is 4", {"layers": DEPTH + 1}),
    ("`layers` is -1", {"layers": -1}),
    ("`layers` is True", {"layers": True}),
    ("`layers` is 1.0", {"layers": 1.0}),
    ("`chunk` is 0", {"chunk": 0}),
    ("`chunk` is 2.5", {"chunk": 2.5}),
    ("of 2 layers; expected", {"past": [PAIR] * 2}),
    ("of 2 layers; expected", {"past": [PAIR] * 2, "layers": 2}),
    ("of 0 layers; expected", {"past": [], "layers": 0}),
    ("DynamicCache of 0 layers", {"past": DynamicCache()}),
    ("of 3 layers; expected", {"past": [PAIR, PAIR, PAIR[:1]]}),
    ("of 3 layers; expected", {"past": [PAIR, PAIR, (ONES, ONES)]}),
    ("rows × tokens", {"past": [PAIR, PAIR, tuple(t[:, :, 1:] for t in PAIR)]}),
    ("rows × tokens", {"past": [(PAIR[0], PAIR[1][:, :, 1:])] * DEPTH}),
    ("rows × tokens", {"past": [tuple(t[:1] for t in PAIR)] * DEPTH}),
    (r"\(2, 8\), \(2, 8\)\], the target \[\(2, 16\)", {"past": [NARROW] * DEPTH}),
    (r"Layer 1 of `past` .*\(1, 16\)\], the target", {"past": [PAIR, (PAIR[0], PAIR[1][:, :1]), PAIR]}),
    ("Layer 0 of `past`", {"past": [NARROW], "layers": 0, "chunk": 1}),
    ("`attention_mask` is list", {"attention_mask": [[1] * 4] * 2}),
    ("`attention_mask` is torch.float32 of shape", {"attention_mask": torch.ones(2, 3)}),
    ("`attention_mask` is", {"attention_mask": torch.ones(1, 4)}),
    ("`attention_mask` is", {"attention_mask": torch.ones(2, 4), "past": [PAIR] * DEPTH}),
    ("`attention_mask` is", {"attention_mask": -torch.ones(2, 4)}),
    ("`position_ids` is torch.float32", {"position_ids": torch.ones(2, 4)}),
    ("`position_ids` is", {"position_ids": torch.arange(4)}),
    ("`position_ids` is", {"position_ids": torch.arange(5)[None]}),
    ("`position_ids` is", {"position_ids": torch.arange(4)[None].expand(3, 4)}),
    ("negative positions", {"position_ids": torch.arange(-1, 3)[None]}),
]


@pytest.mark.parametrize(("words", "arguments"), REFUSALS)
def test_refusals(qwen3, words, arguments):
    before = state(qwen3)
    ids = arguments.get("input_ids", torch.arange(8).view(2, 4))
    with pytest.raises(ConversionError, match=words):
        run_native(qwen3, **{**arguments, "input_ids": ids})
    assert state(qwen3) == before


def test_models_that_cannot_run_are_refused(ids):
    with torch.device("meta"):
        empty = build("llama")
    with pytest.raises(ConversionError, match="meta device"):
        run_native(empty, ids)
    with pytest.raises(UnsupportedModelError, match="Transformers model"):
        run_native(nn.Linear(2, 2), ids)


def test_geometry_is_that_of_the_model(model, ids):
    geometry = ModelGeometry.from_model(model)
    for layer, keys in zip(geometry.layers, run_native(model, ids).keys, strict=True):
        assert keys.shape == (2, layer.kv_heads, TOKENS, layer.head_dim)
        assert keys.is_contiguous()
