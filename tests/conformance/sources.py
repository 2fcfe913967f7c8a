"""The registry of source caches. A function here is all that a new kind of source cache needs to be tested.

Each makes the cache of a prompt with a model, the way a user would, or gives the model output that carries it.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import QuantizedLayer

from hf_kvtransfer._compat import cache_keyword

from .settings import Prompt


Source = Callable[[PreTrainedModel, Prompt], Any]
SOURCES: dict[str, Source] = {}


def source(function: Source) -> Source:
    SOURCES[function.__name__] = function
    return function


@torch.no_grad()
def read(model: Any, prompt: Prompt, cache: Any, start: int = 0, stop: int | None = None) -> Any:
    """Runs tokens `start` to `stop` of a prompt, the mask over everything so far."""
    stop = prompt.tokens if stop is None else stop
    return model(
        input_ids=prompt.ids[:, start:stop],
        attention_mask=prompt.mask[:, :stop],
        position_ids=prompt.positions[:, start:stop],
        use_cache=True,
        **{cache_keyword(model): cache},
    )


@source
def a_forward_pass(model, prompt):
    read(model, prompt, cache := DynamicCache())
    return cache


@source
def the_output_of_a_forward_pass(model, prompt):
    return read(model, prompt, DynamicCache())


@source
def a_list_of_pairs(model, prompt):
    read(model, prompt, cache := DynamicCache())
    return [(layer.keys, layer.values) for layer in cache.layers]


@source
def chunked_prefill_by_hand(model, prompt):
    cache = DynamicCache()
    for start in range(0, prompt.tokens, 5):
        read(model, prompt, cache, start, min(start + 5, prompt.tokens))
    return cache


@source
def chunked_prefill_by_generate(model, prompt):
    cache = DynamicCache()
    model.generate(
        input_ids=prompt.ids,
        attention_mask=prompt.mask,
        max_new_tokens=1,
        do_sample=False,
        prefill_chunk_size=5,
        **{cache_keyword(model.generate): cache},
    )
    return cache


@source
def a_static_cache(model, prompt):
    cache = StaticCache(config=model.config.get_text_config(), max_cache_len=prompt.tokens + 9)
    read(model, prompt, cache)
    return cache


@source
def an_offloaded_cache(model, prompt):
    """Layers put away as an offloading cache does it, which itself can't be made without a CUDA device."""
    read(model, prompt, cache := DynamicCache())
    for layer in cache.layers:
        layer.offload()
    return cache


@source
def a_quantised_cache(model, prompt):
    """In two parts, of which the second stays in the residual."""
    return _layered(model, prompt, lambda: RoundedLayer(residual_length=64))


@source
def a_quantised_cache_without_residual(model, prompt):
    return _layered(model, prompt, lambda: RoundedLayer(residual_length=1))


if hasattr(transformers.cache_utils, "Fp8QuantizedLayer"):

    @source
    def an_fp8_cache(model, prompt):
        return _layered(model, prompt, transformers.cache_utils.Fp8QuantizedLayer)


class RoundedLayer(QuantizedLayer):
    """A quantised layer without a backend: what is stored is rounded to bfloat16."""

    def _quantize(self, tensor, axis):
        return tensor.to(torch.bfloat16)

    def _dequantize(self, q_tensor):
        return q_tensor.to(torch.float32)


def _layered(model: PreTrainedModel, prompt: Prompt, layer: Callable[[], Any]) -> DynamicCache:
    cache = DynamicCache()
    cache.layers = [layer() for _ in range(model.config.get_text_config().num_hidden_layers)]
    cache.layer_class_to_replicate = None
    read(model, prompt, cache, 0, prompt.tokens - 4)
    read(model, prompt, cache, prompt.tokens - 4)
    return cache
