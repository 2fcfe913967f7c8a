"""The numerical backstop: a model's own keys must be free of their position once RoPE is off."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ._compat import output_cache
from .errors import UnsupportedModelError
from .modules import evaluation_mode, text_config, unwrap


if TYPE_CHECKING:
    from .rope import RotaryCodec


@torch.no_grad()
def verify_position_free(
    model: nn.Module,
    codec: "RotaryCodec",
    vocab_size: int | None = None,
    *,
    shift: int = 1000,
    tokens: int = 8,
    tolerance: float | None = None,
) -> float:
    """
    Proves on the model itself that its keys are free of their position once RoPE is off: runs it on random tokens at
    positions 0… and at `shift`…, and compares the content keys. Whatever this package misunderstands about a model's
    rotation shows here.

    Args:
        model (`torch.nn.Module`):
            The loaded model. It runs two short forward passes without gradients, in evaluation mode.
        codec ([`RotaryCodec`]):
            The codec of that model.
        vocab_size (`int`, *optional*, defaults to the model's own):
            Random tokens are drawn below this number.
        shift (`int`, *optional*, defaults to 1000):
            How many positions the second pass is moved by.
        tokens (`int`, *optional*, defaults to 8):
            Number of random tokens.
        tolerance (`float`, *optional*, defaults to 1e-4 in fp32 and fp64, and 0.03 in bf16 and fp16):
            Largest difference in the first layer, as a part of the size of its keys. Later layers, which see the
            rounding of those before, only have to stay under 0.5, where a wrong rotation is near 1.4.

    Returns:
        `float`: the largest relative difference in the first layer.

    Raises:
        UnsupportedModelError: the content keys depend on the position, or the cache has another shape than expected.
    """
    inner: Any = unwrap(model)
    geometry = codec.geometry
    size = vocab_size or text_config(inner.config).vocab_size
    device = inner.get_input_embeddings().weight.device
    if device.type == "meta":  # offloaded weights: accelerate moves the inputs to where they run
        device = torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(size, (1, tokens), generator=generator).to(device)
    contents: list[list[Tensor]] = []
    with evaluation_mode(inner):
        for start in (0, shift):
            position_ids = torch.arange(start, start + tokens, device=device)[None]
            output = inner(input_ids=input_ids, position_ids=position_ids, use_cache=True)
            cache = output_cache(output)
            layers = getattr(cache, "layers", None)
            if layers is None or len(layers) != geometry.num_layers:
                raise UnsupportedModelError(
                    f"{geometry.model_type}: expected a cache of {geometry.num_layers} layers, the model made "
                    f"{type(cache).__name__} of {len(layers or [])}; this model is not understood."
                )
            contents.append([_content(codec, layer.keys, position_ids, index) for index, layer in enumerate(layers)])
    differences = [_relative(moved, still) for still, moved in zip(*contents, strict=True)]
    low = next(inner.parameters()).dtype in (torch.bfloat16, torch.float16)
    limit = tolerance if tolerance is not None else (0.03 if low else 1e-4)
    for index, difference in enumerate(differences):
        allowed = limit if index == 0 else max(limit, 0.5)
        if not difference <= allowed:
            raise UnsupportedModelError(
                f"{geometry.model_type}: with RoPE taken off, the keys of layer {index} at positions 0… and {shift}… "
                f"differ by {difference:.1e} of their size, where {allowed:.0e} is allowed; this model's positions "
                "are not understood, so its cache can't be mapped exactly."
            )
    return differences[0]


def _content(codec: "RotaryCodec", keys: Tensor, position_ids: Tensor, layer: int) -> Tensor:
    shape = codec.geometry.layers[layer]
    if keys.ndim != 4 or keys.shape[1] != shape.kv_heads or keys.shape[3] != shape.head_dim:
        raise UnsupportedModelError(
            f"{codec.geometry.model_type}: expected keys of {shape.kv_heads} heads of {shape.head_dim} in layer "
            f"{layer}, the model cached {list(keys.shape)}; this model is not understood."
        )
    # A sliding layer keeps the last tokens only.
    return codec.remove(keys, codec.tables(position_ids[:, -keys.shape[2] :], keys.device), layer)


def _relative(moved: Tensor, still: Tensor) -> float:
    scale = still.abs().amax().clamp_min(torch.finfo(still.dtype).tiny)
    return ((moved - still).abs().amax() / scale).item()
