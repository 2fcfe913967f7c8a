"""Laws of the rotary codec: it undoes exactly what the model did, at any position, and it says when it can't.

Errors are relative: the largest difference of any element, divided by the largest element of the keys compared with.
Measured with transformers 5.24.0 and 5.0.0 on these models at position 5,000: at most 3e-7 in the first layer, and at
most 2e-4 in deeper layers. There the limit is not the codec but the model: attention sees cos and sin of angles near
5,000 in fp32, whose spacing there is 5e-4, so that its own scores differ a little from those at position 0.
"""

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from hf_kvtransfer._compat import output_cache
from hf_kvtransfer.errors import UnsupportedModelError
from hf_kvtransfer.geometry import ModelGeometry, decoder_of
from hf_kvtransfer.rope import RotaryCodec, verify_position_free

from .architectures import ARCHITECTURES, REFUSED, VOCAB, build, missing


FAR = 5_000
TOKENS = 24

# The last is torch's own, when it is asked to compile.
pytestmark = pytest.mark.filterwarnings(
    "error::DeprecationWarning", "error::FutureWarning", "ignore:`torch.jit:DeprecationWarning"
)


@pytest.fixture(params=ARCHITECTURES)
def name(request: pytest.FixtureRequest) -> str:
    if request.param in missing():
        pytest.skip(f"transformers {transformers.__version__} has no {request.param}")
    return request.param


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


@torch.no_grad()
def cached_keys(model: Any, input_ids: Tensor, position_ids: Tensor) -> list[Tensor]:
    output = model(input_ids=input_ids, position_ids=position_ids, use_cache=True)
    return [layer.keys for layer in output_cache(output).layers]


def content(codec: RotaryCodec, keys: list[Tensor], position_ids: Tensor) -> list[Tensor]:
    """The content keys of every layer; sliding layers hold the last tokens only."""
    return [
        codec.remove(layer, codec.tables(position_ids[:, -layer.shape[2] :]), index) for index, layer in enumerate(keys)
    ]


def text(rows: int = 2) -> Tensor:
    return torch.randint(VOCAB, (rows, TOKENS), generator=torch.Generator().manual_seed(1))


def positions(*starts: int) -> Tensor:
    return torch.stack([torch.arange(start, start + TOKENS) for start in starts])


def test_exact_undo(name: str) -> None:
    model = build(name)
    codec = RotaryCodec.from_model(model)
    near, far = (
        content(codec, cached_keys(model, text(), positions(start, start)), positions(start, start))
        for start in (0, FAR)
    )
    errors = [relative(moved, still) for still, moved in zip(near, far, strict=True)]
    first = next(index for index, layer in enumerate(codec.geometry.layers) if layer.rotary)
    assert errors[0] <= 1e-5
    assert max(errors) <= 1e-3
    # The law says something only where the cached keys do depend on the position.
    raw = [cached_keys(model, text(), positions(start, start))[first] for start in (0, FAR)]
    assert relative(raw[1], raw[0]) > 0.1


def test_first_layer_content_is_the_projection(name: str) -> None:
    """Content keys are no arbitrary position-free form: they are the keys as attention made them, before RoPE."""
    model = build(name)
    codec = RotaryCodec.from_model(model)
    if name == "nanochat":
        pytest.skip("normalises after RoPE, so that its content keys are the normalised ones")
    zero = torch.zeros(1, 1, dtype=torch.long)
    keys = cached_keys(model, text(1)[:, :1], zero)
    scale = 1.0
    parameters = codec.geometry.rope_parameters
    kind = codec.geometry.layers[0].layer_type
    parameters = parameters.get(kind, parameters)
    if parameters["rope_type"] == "yarn":
        cos, _ = next(iter(codec.tables(zero).rotations.values()))
        scale = cos[0, 0, 0].item()
    width = keys[0].shape[-1]
    found = codec.remove(keys[0], codec.tables(zero), 0)
    # At position 0 a rotation is its scale alone, on the dimensions that it has.
    rotated = (found * scale - keys[0]).abs().amax(dim=(0, 1, 2)) <= 1e-6 * keys[0].abs().max()
    passed = (found - keys[0]).abs().amax(dim=(0, 1, 2)) <= 1e-6 * keys[0].abs().max()
    assert int((rotated | passed).sum()) == width


def test_apply_and_remove_are_inverse(name: str) -> None:
    codec = RotaryCodec.from_config(ARCHITECTURES[name]())
    generator = torch.Generator().manual_seed(0)
    tables = codec.tables(positions(0, 130_000))
    for index, layer in enumerate(codec.geometry.layers):
        keys = torch.randn(2, layer.kv_heads, TOKENS, layer.head_dim, generator=generator)
        assert relative(codec.remove(codec.apply(keys, tables, index), tables, index), keys) <= 1e-6
        assert relative(codec.apply(codec.remove(keys, tables, index), tables, index), keys) <= 1e-6
        assert torch.equal(codec.apply(keys, tables, index), keys) != layer.rotary


def test_apply_is_what_the_model_does(name: str) -> None:
    """Taking RoPE off at one place and putting it on at another gives the keys that the model caches there."""
    model = build(name)
    codec = RotaryCodec.from_config(ARCHITECTURES[name]())
    near, far = positions(0), positions(FAR)
    keys = cached_keys(model, text(1), near)
    expected = cached_keys(model, text(1), far)
    tokens = keys[0].shape[2]
    found = codec.apply(content(codec, keys, near)[0], codec.tables(far[:, -tokens:]), 0)
    assert relative(found, expected[0]) <= 1e-5


def test_rows_may_have_different_positions(name: str) -> None:
    model = build(name)
    codec = RotaryCodec.from_model(model)
    rows = positions(0, 700)
    both = content(codec, cached_keys(model, text(), rows), rows)[0]
    alone = content(codec, cached_keys(model, text()[1:], rows[1:]), rows[1:])[0]
    assert relative(both[1:], alone) <= 1e-5


def test_half_precision_keys_are_undone_within_one_percent(name: str) -> None:
    model = build(name, torch.bfloat16)
    codec = RotaryCodec.from_model(model)
    near, far = (
        content(codec, cached_keys(model, text(), positions(start, start)), positions(start, start))[0]
        for start in (0, FAR)
    )
    assert far.dtype == torch.float32
    assert ((far - near).norm() / near.norm()).item() <= 0.01


def test_config_and_model_give_the_same_codec(name: str) -> None:
    model = build(name)
    first, second = RotaryCodec.from_config(ARCHITECTURES[name]()), RotaryCodec.from_model(model)
    assert first.geometry == second.geometry
    for index, keys in enumerate(cached_keys(model, text(1), positions(9))):
        places = positions(9)[:, -keys.shape[2] :]
        assert torch.equal(
            first.remove(keys, first.tables(places), index), second.remove(keys, second.tables(places), index)
        )


def test_verified_on_the_model_itself(name: str) -> None:
    model = build(name)
    codec = RotaryCodec.from_model(model)
    modules = [module.training for module in model.modules()]
    assert verify_position_free(model, codec) <= 1e-6
    assert [module.training for module in model.modules()] == modules


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "stablelm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_verified_in_half_precision(name: str, dtype: torch.dtype) -> None:
    model = build(name, dtype)
    assert verify_position_free(model, RotaryCodec.from_model(model)) <= 0.03


# Dtypes, devices, shapes


def test_double_precision_stays() -> None:
    codec = RotaryCodec.from_config(ARCHITECTURES["llama-yarn"]())
    keys = torch.randn(1, 2, TOKENS, 16, dtype=torch.float64)
    tables = codec.tables(positions(FAR))
    back = codec.remove(codec.apply(keys, tables, 0), tables, 0)
    assert back.dtype == torch.float64
    assert relative(back, keys) <= 1e-14


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_everything_else_becomes_fp32(dtype: torch.dtype) -> None:
    codec = RotaryCodec.from_config(ARCHITECTURES["smollm3"]())
    keys = torch.randn(1, 2, TOKENS, 16).to(dtype)
    tables = codec.tables(positions(0))
    for layer in range(3):
        assert codec.remove(keys, tables, layer).dtype == torch.float32
        assert codec.apply(keys, tables, layer).dtype == torch.float32


def test_one_row_of_positions_serves_a_batch() -> None:
    codec = RotaryCodec.from_config(ARCHITECTURES["phi3"]())
    keys = torch.randn(3, 2, TOKENS, 16)
    one = codec.apply(keys, codec.tables(positions(7)), 0)
    each = codec.apply(keys, codec.tables(positions(7, 7, 7)), 0)
    assert torch.equal(one, each)


def test_positions_need_two_dimensions() -> None:
    codec = RotaryCodec.from_config(ARCHITECTURES["llama"]())
    with pytest.raises(ValueError, match=r"\[batch, tokens\]"):
        codec.tables(torch.arange(4))


def test_gradients_flow_through() -> None:
    codec = RotaryCodec.from_config(ARCHITECTURES["qwen3-yarn"]())
    keys = torch.randn(1, 2, TOKENS, 16, requires_grad=True)
    tables = codec.tables(positions(3))
    codec.apply(keys, tables, 0).square().sum().backward()
    # The rotation keeps lengths up to YaRN's scaling s, so the gradient of ‖R k‖² is 2 s² k.
    scale = tables.rotations[None][0].square() + tables.rotations[None][1].square()
    assert relative(keys.grad, 2 * scale.mean() * keys.detach()) <= 1e-5


def test_codec_holds_numbers_even_when_built_on_the_meta_device_in_half_precision() -> None:
    expected = RotaryCodec.from_config(ARCHITECTURES["llama-llama3"]()).tables(positions(FAR)).rotations[None]
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            codec = RotaryCodec.from_config(ARCHITECTURES["llama-llama3"]())
    finally:
        torch.set_default_dtype(default)
    found = codec.tables(positions(FAR)).rotations[None]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_tables_are_computed_once_for_a_position_tensor() -> None:
    codec = RotaryCodec.from_config(ARCHITECTURES["llama"]())
    places = positions(0)
    tables = codec.tables(places)
    assert codec.tables(places) is tables
    assert codec.tables(places.clone()) is not tables
    places += 1
    assert codec.tables(places) is not tables
    assert torch.equal(codec.tables(places).rotations[None][0], codec.tables(positions(1)).rotations[None][0])
    inverse = tables.inverse(None, torch.float32)
    assert tables.inverse(None, torch.float32) is inverse


def test_tables_in_inference_mode() -> None:
    codec = RotaryCodec.from_config(ARCHITECTURES["llama"]())
    with torch.inference_mode():
        inside = codec.tables(positions(4)).rotations[None][0]
    assert torch.equal(inside, codec.tables(positions(4)).rotations[None][0])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda codec: pickle.loads(pickle.dumps(codec))])
def test_codec_can_be_copied(duplicate: Any) -> None:
    codec = RotaryCodec.from_config(ARCHITECTURES["gemma3"]())
    places = positions(5)
    codec.tables(places)
    keys = torch.randn(1, 2, TOKENS, 16)
    again = duplicate(codec)
    assert torch.equal(again.apply(keys, again.tables(places), 1), codec.apply(keys, codec.tables(places), 1))


def test_codec_is_no_module() -> None:
    assert not isinstance(RotaryCodec.from_config(ARCHITECTURES["llama"]()), torch.nn.Module)


def test_building_a_codec_leaves_the_config_and_the_model() -> None:
    model = build("gemma3")
    config, buffers = model.config.to_dict(), {k: v.clone() for k, v in model.named_buffers()}
    RotaryCodec.from_model(model)
    assert model.config.to_dict() == config
    assert all(torch.equal(v, buffers[k]) for k, v in model.named_buffers())


# What is refused, and what the backstop catches


@pytest.mark.parametrize("name", REFUSED)
def test_refused_models_have_no_codec(name: str) -> None:
    factory, word = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=word):
        RotaryCodec.from_config(factory())


def test_rounded_frequencies_are_noticed() -> None:
    model = build("llama").to(torch.bfloat16)
    with pytest.raises(UnsupportedModelError, match="from_pretrained"):
        RotaryCodec.from_model(model)


def test_backstop_catches_the_wrong_frequencies() -> None:
    model = build("llama")
    other = RotaryCodec.from_config(ARCHITECTURES["llama-llama3"]())
    with pytest.raises(UnsupportedModelError, match="positions are not understood"):
        verify_position_free(model, other)


def test_backstop_catches_a_layer_misread_as_rotary() -> None:
    """In a deeper layer too, where rounding differs more than in the first."""
    model = build("smollm3")
    codec = RotaryCodec.from_model(model)
    decoder_of(model).layers[1].self_attn.use_rope = 1
    with pytest.raises(UnsupportedModelError, match="layer 1"):
        verify_position_free(model, codec)


def test_backstop_catches_another_shape() -> None:
    model = build("llama")
    config = ARCHITECTURES["llama"]()
    config.num_hidden_layers = 2
    with pytest.raises(UnsupportedModelError, match="cache of 2 layers"):
        verify_position_free(model, RotaryCodec.from_config(config))
    config = ARCHITECTURES["llama"]()
    config.num_key_value_heads = 4
    with pytest.raises(UnsupportedModelError, match="4 heads of 16"):
        verify_position_free(model, RotaryCodec.from_config(config))


def test_backstop_honours_the_tolerance_and_the_mode() -> None:
    model = build("llama").train()
    model.model.layers[0].eval()
    codec = RotaryCodec.from_model(model)
    with pytest.raises(UnsupportedModelError, match="are not understood"):
        verify_position_free(model, codec, tolerance=0.0)
    assert verify_position_free(torch.compile(model), codec, 50, shift=3, tokens=4, tolerance=1.0) < 1e-6
    assert model.training
    assert not model.model.layers[0].training


def test_geometry_of_the_codec_is_that_of_the_model() -> None:
    model = build("exaone4")
    assert RotaryCodec.from_model(model).geometry == ModelGeometry.from_model(model)
