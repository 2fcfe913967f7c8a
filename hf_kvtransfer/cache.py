"""The target's side: a `DynamicCache` that holds converted entries and adapts itself to the target on first use."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ._compat import TAKES_NEW_TOKENS_ONLY, GenerateCall, running_generate
from .errors import CacheUseError, ConversionError
from .geometry import ModelGeometry


class _AdaptsOnFirstUse:
    """
    What a converted layer adds to the transformers layer below it: until the target first calls `update`, neither its
    dtype, its device nor its batch size are known, so the entries are cast, moved and repeated then, layer by layer.
    """

    keys: Tensor | None
    values: Tensor | None
    is_initialized: bool

    def _start(self) -> None:
        self.is_adapted = False

    def extend(self, keys: Tensor, values: Tensor) -> None:
        """
        Appends converted entries of shape `[batch, kv_heads, tokens, head_dim]` without binding the layer to a target.

        Raises:
            [`ConversionError`]: if the batch sizes differ.
        """
        if self.keys is not None and self.keys.dim() == 4:
            _check_batch(self.keys.shape[0], keys.shape[0])
            keys = keys.to(self.keys.device, self.keys.dtype)
            values = values.to(self.keys.device, self.keys.dtype)
        super().update(keys, values)  # type: ignore[misc]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Adapts the converted entries to the target's tensors if this is their first use, then appends."""
        if not self.is_adapted:
            self._adapt(key_states)
        return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]

    def _adapt(self, states: Tensor) -> None:
        self.is_adapted = True
        if self.keys is None or self.values is None or self.keys.dim() != 4:
            return  # nothing was converted: an ordinary empty layer
        if (self.keys.shape[1], self.keys.shape[3]) != (states.shape[1], states.shape[3]):
            raise CacheUseError(
                f"The converted cache holds {self.keys.shape[1]} KV heads × {self.keys.shape[3]} per layer, the model "
                f"that uses it has {states.shape[1]} × {states.shape[3]}; expected the target model that the mapper "
                "was fitted for. Pass the cache to that model, or convert with the mapper of this pair."
            )
        rows, wanted = self.keys.shape[0], states.shape[0]
        if wanted % rows:
            raise CacheUseError(
                f"The converted cache holds {rows} rows, the model feeds a batch of {wanted}; expected a multiple, "
                "as beams and several return sequences give. Convert the caches of the same batch of prompts."
            )
        repeats = wanted // rows
        for name in ("keys", "values"):
            tensor = getattr(self, name).to(device=states.device, dtype=states.dtype)
            setattr(self, name, tensor.repeat_interleave(repeats, dim=0) if repeats > 1 else tensor)
        self.device = states.device
        window = getattr(self, "_sliding_window_tensor", None)
        if window is not None:
            self._sliding_window_tensor = window.to(states.device)

    def reset(self) -> None:
        """Empties the layer; tensors that a fork may share are dropped, not zeroed."""
        self.keys = self.values = None
        self.is_initialized = False
        if hasattr(self, "cumulative_length"):
            self.cumulative_length = 0
        self._start()

    def fork(self) -> Any:
        """A layer of its own over the same tensors; growing never writes into them, so nothing is copied."""
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin


class TransferredLayer(_AdaptsOnFirstUse, DynamicLayer):
    """A full-attention layer of converted keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self._start()


class TransferredSlidingWindowLayer(_AdaptsOnFirstUse, DynamicSlidingWindowLayer):
    """A sliding-window layer: fed full-length converted entries, it keeps what its window needs and counts them all."""

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window=sliding_window)
        self._start()


class TransferredCache(DynamicCache):
    """
    A target cache made of another model's entries, for `target.generate(**inputs, past_key_values=cache)`.

    It is usually made by [`KVMapper.convert`]. It behaves as the `DynamicCache` of the target model would, and adapts
    itself at the target's first forward pass: dtype, device (per layer, so a target spread over devices works) and
    batch size (beams, several return sequences, or one converted document for many prompts).

    Args:
        ddp_cache_data (`Iterable[tuple[torch.Tensor, ...]]`, *optional*):
            As in `DynamicCache`.
        config (`PreTrainedConfig`, *optional*):
            As in `DynamicCache`.
        **kwargs:
            Passed on to `DynamicCache`.
    """

    def __init__(
        self,
        ddp_cache_data: Iterable[tuple[Tensor | None, ...]] | None = None,
        config: PreTrainedConfig | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(ddp_cache_data, config=config, **kwargs)
        self._checked_call: object = None
        self._prompt: Tensor | None = None

    @classmethod
    def for_geometry(cls, geometry: ModelGeometry) -> "TransferredCache":
        """An empty cache with one converted layer per decoder layer of `geometry`, sliding where the model slides."""
        cache = cls()
        cache.layers = [
            TransferredSlidingWindowLayer(layer.sliding_window) if layer.sliding_window else TransferredLayer()
            for layer in geometry.layers
        ]
        cache.layer_class_to_replicate = None
        return cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """As in `DynamicCache`; `generate` asks for it before it slices its prompt, which is where misuse shows."""
        cached = super().get_seq_length(layer_idx)
        self._check_generate(cached)
        return cached

    def get_mask_sizes(self, query_length: Any, layer_idx: int) -> tuple[int, int]:
        """As in `DynamicCache`; asked for in every forward pass before anything is computed."""
        self._check_generate(super().get_seq_length(layer_idx))
        return super().get_mask_sizes(query_length, layer_idx)

    def _check_generate(self, cached: int) -> None:
        """
        Checks once per `generate` call that the prompt and its mask go on from what is cached.

        Raises:
            [`CacheUseError`]: if they don't, which transformers would answer with wrong logits.
        """
        call = running_generate()
        if call is None or call.identity is self._checked_call:
            return
        if cached:
            self._check_lengths(call, cached)
            if call.prompt_tokens == call.mask_tokens:
                self._check_prompt(call.input_ids)
        self._checked_call = call.identity

    @staticmethod
    def _check_lengths(call: GenerateCall, cached: int) -> None:
        prompt, spanned = call.prompt_tokens, call.mask_tokens
        given = f"`generate` was given {prompt} tokens and an attention mask over {spanned}; the cache holds {cached}"
        if prompt == spanned <= cached:
            raise CacheUseError(
                f"{given}, so that no token of the prompt is left to start from; expected a longer prompt. If it is "
                "the first use, convert with `hold_back=1`. If the cache was used before, it has grown: convert again, "
                "or give each use its own `cache.fork()`. If these are new tokens only, pass an attention mask over "
                f"everything, {cached + prompt} tokens."
            )
        if prompt != spanned and cached + prompt != spanned:
            raise CacheUseError(
                f"{given}; expected either the whole prompt and a mask of the same length, or only the tokens that are "
                f"not cached and a mask over everything, {cached + prompt} tokens."
            )
        if prompt != spanned and not TAKES_NEW_TOKENS_ONLY:
            raise CacheUseError(
                f"{given}. This release of transformers can't go on from new tokens alone; expected the whole prompt "
                "and a mask of the same length. Pass all ids, or use transformers 5.3 or newer."
            )
        if call.is_assisted and prompt == spanned:
            way_out = (
                f"expected new tokens only: pass `input_ids[:, {cached}:]` and the mask over everything. The output "
                f"then lacks the first {cached} tokens."
                if TAKES_NEW_TOKENS_ONLY
                else "expected another way of decoding, or transformers 5.3 or newer, which takes new tokens only."
            )
            raise CacheUseError(f"{given}. Assisted and prompt look-up decoding do not skip what is cached; {way_out}")

    def _check_prompt(self, ids: Tensor) -> None:
        """A cache that has served one prompt can go on with that prompt grown longer, and with no other."""
        before = self._prompt
        if before is not None and ids.shape[0] == before.shape[0] and before.device == ids.device:
            common = min(before.shape[1], ids.shape[1])
            if not torch.equal(before[:, :common], ids[:, :common]):
                raise CacheUseError(
                    f"The cache was used for a prompt of {before.shape[1]} tokens, and `generate` was given one that "
                    "does not begin with it; expected the same conversation, grown longer. Convert again for another "
                    "prompt, or give each prompt its own `cache.fork()`."
                )
        self._prompt = ids

    @property
    def is_adapted(self) -> bool:
        """Whether a target model has already used this cache."""
        return any(getattr(layer, "is_adapted", True) for layer in self.layers)

    def fork(self) -> "TransferredCache":
        """
        An independent cache with the same entries. The tensors are shared until one of the two grows, so that one
        conversion can serve many continuations at no cost in memory.
        """
        twin = type(self)()
        twin.__dict__.update(self.__dict__)
        twin.layers = [layer.fork() for layer in self.layers]
        twin._checked_call = None
        return twin


def extend_cache(cache: DynamicCache, layer: int, keys: Tensor, values: Tensor) -> None:
    """
    Appends converted entries `[batch, kv_heads, tokens, head_dim]` to one layer of a target cache, converted or native.

    Raises:
        [`ConversionError`]: if the batch sizes differ.
    """
    target = cache.layers[layer] if layer < len(cache.layers) else None
    if isinstance(target, _AdaptsOnFirstUse):
        target.extend(keys, values)
        return
    held = getattr(target, "keys", None)
    if held is not None and held.dim() == 4:
        _check_batch(held.shape[0], keys.shape[0])
        keys, values = keys.to(held.device, held.dtype), values.to(held.device, held.dtype)
    cache.update(keys, values, layer)


def _check_batch(held: int, given: int) -> None:
    if held != given:
        raise ConversionError(
            f"`into` holds {held} rows, the source cache {given}; expected the same batch in both. Convert the source "
            "cache of the same prompts, before beams or return sequences multiply the rows."
        )


def cached_lengths(layers: Sequence[Any]) -> list[int]:
    """The number of tokens that each layer has seen."""
    return [int(layer.get_seq_length()) for layer in layers]
