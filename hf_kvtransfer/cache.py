"""The target's side: a `DynamicCache` that holds converted entries and adapts itself to the target on first use."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ._compat import CHUNKED_PREFILL_SKIPS_CACHED, TAKES_NEW_TOKENS_ONLY, GenerateCall, running_generate
from .errors import CacheUseError
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
        An empty layer takes them over as they are.
        """
        if not self.is_initialized:
            self._take(keys, values)
            return
        if self.keys is not None and self.keys.dim() == 4:
            keys = keys.to(self.keys.device, self.keys.dtype)
            values = values.to(self.keys.device, self.keys.dtype)
        super().update(keys, values)  # type: ignore[misc]

    def _take(self, keys: Tensor, values: Tensor) -> None:
        """What `update` does for an empty layer, which would copy everything."""
        self.lazy_initialization(keys, values)  # type: ignore[attr-defined]
        self.keys, self.values = keys, values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Adapts the converted entries to the target's tensors if this is their first use, then appends."""
        if self.keys is not None and self.values is not None and self.keys.dim() == 4:
            if self.is_adapted:
                self._check_same_model(key_states)
            else:
                self._adapt(key_states, value_states)
        self.is_adapted = True
        return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]

    def _check_same_model(self, states: Tensor) -> None:
        keys: Any = self.keys
        held = (keys.shape[0], keys.shape[1], keys.shape[3], keys.device)
        if held != (states.shape[0], states.shape[1], states.shape[3], states.device) or (
            keys.dtype != states.dtype and not torch.is_autocast_enabled(states.device.type)
        ):
            raise CacheUseError(
                f"The converted cache has been used with keys of shape {list(keys.shape)} in {keys.dtype} on "
                f"{keys.device}, and is now fed {list(states.shape)} in {states.dtype} on {states.device}; expected "
                "the same model and batch until the end. Convert again, or `fork()` the cache before its first use."
            )

    def _adapt(self, states: Tensor, value_states: Tensor) -> None:
        keys: Any = self.keys
        if (keys.shape[1], keys.shape[3]) != (states.shape[1], states.shape[3]):
            raise CacheUseError(
                f"The converted cache holds {keys.shape[1]} KV heads × {keys.shape[3]} per layer, the model "
                f"that uses it has {states.shape[1]} × {states.shape[3]}; expected the target model that the mapper "
                "was fitted for. Pass the cache to that model, or convert with the mapper of this pair."
            )
        rows, wanted = keys.shape[0], states.shape[0]
        if wanted % rows:
            raise CacheUseError(
                f"The converted cache holds {rows} rows, the model feeds a batch of {wanted}; expected a multiple, "
                "as beams and several return sequences give. Convert the caches of the same batch of prompts."
            )
        repeats = wanted // rows
        for name, like in (("keys", states), ("values", value_states)):
            tensor = getattr(self, name).to(device=like.device, dtype=like.dtype)
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

    def crop(self, tokens_to_remove: int) -> None:
        """As the layer below, which can't take back tokens once its window has dropped earlier ones."""
        held = self.keys.shape[-2] if self.keys is not None else 0
        window = getattr(self, "sliding_window", None)
        seen = int(self.get_seq_length())  # type: ignore[attr-defined]
        # A negative number is how many to remove; before transformers 5.16 a positive one is how many to keep.
        removed = -tokens_to_remove if tokens_to_remove <= 0 else max(seen - tokens_to_remove, 0)
        # Assisted decoding lets newer releases keep what was fed until it is cropped, which leaves the window whole.
        if window and removed and held - removed < min(window - 1, seen - removed):
            raise CacheUseError(
                f"A sliding-window layer of the converted cache has seen {seen} tokens and holds the last {held}; "
                f"expected fewer than its window of {window} tokens to crop it. Convert again, with a `hold_back` that "
                "leaves out the tokens you want to remove."
            )
        super().crop(tokens_to_remove)  # type: ignore[misc]

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

    def _take(self, keys: Tensor, values: Tensor) -> None:
        super()._take(keys, values)
        self.cumulative_length += keys.shape[2]
        if keys.shape[2] >= self.sliding_window and not getattr(self, "record_past", False):
            # Copied, so that the tokens before the window are let go.
            self.keys, self.values = (states[:, :, 1 - self.sliding_window :].clone() for states in (keys, values))


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
        self._prompt_start = 0
        self._positions: Tensor | None = None
        self._mask: Tensor | None = None

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
        self._check_depth()
        self._check_generate(super().get_seq_length(layer_idx))
        return super().get_mask_sizes(query_length, layer_idx)

    def _check_depth(self) -> None:
        """A model of fewer layers than were converted leaves the last ones behind in its first pass."""
        lengths = [int(layer.get_seq_length()) for layer in (self.layers[:1] + self.layers[-1:])]
        if len(set(lengths)) > 1:
            raise CacheUseError(
                f"The converted cache has {len(self.layers)} layers, and the model that used it feeds fewer: the first "
                f"holds {lengths[0]} tokens now, the last {lengths[1]}; expected the target model that the mapper was "
                "fitted for. Convert again and pass the cache to that model, or convert with the mapper of this pair."
            )

    def _check_generate(self, cached: int) -> None:
        """
        Checks once per `generate` call that the prompt and its mask go on from what is cached.

        Raises:
            [`CacheUseError`]: if they don't, which transformers would answer with wrong logits.
        """
        call = running_generate()
        if call is None or call.identity is self._checked_call:
            return
        self._check_lengths(call, cached)
        if cached and self._positions is not None:
            check_positions(call, self._positions[:, :cached], self._mask)
        if not cached:
            self._prompt = None
        self._check_prompt(call.prompt, call.mask_tokens - call.prompt_tokens)
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
        if cached and call.is_chunked and not CHUNKED_PREFILL_SKIPS_CACHED:
            raise CacheUseError(
                f"{given}. With `prefill_chunk_size` this release of transformers reads again what is cached; expected "
                "the rest of the prompt in one piece. Leave `prefill_chunk_size` out, or use transformers 5.21 or "
                "newer."
            )
        # Earlier releases slice what is cached off in every way of decoding.
        if cached and call.is_assisted and prompt == spanned and TAKES_NEW_TOKENS_ONLY:
            raise CacheUseError(
                f"{given}. Assisted and prompt look-up decoding do not skip what is cached; expected new tokens only: "
                f"pass `input_ids[:, {cached}:]` and the mask over everything. The output then lacks the first "
                f"{cached} tokens."
            )

    def _check_prompt(self, prompt: Tensor, start: int) -> None:
        """A cache that has served one prompt can go on with that prompt grown longer, and with no other."""
        before = self._prompt
        comparable = before is not None and before.device == prompt.device and before.dim() == prompt.dim()
        if before is not None and comparable and before.shape[0] == prompt.shape[0]:
            first = max(start, self._prompt_start)
            last = min(start + prompt.shape[1], self._prompt_start + before.shape[1])
            one, other = before[:, first - self._prompt_start : last - self._prompt_start], prompt[:, first - start :]
            if last > first and not torch.equal(one, other[:, : last - first]):
                raise CacheUseError(
                    f"The cache was used for a prompt of {before.shape[1]} tokens, and `generate` was given one that "
                    "does not go on from it; expected the same conversation, grown longer. Convert again for another "
                    "prompt, or give each prompt its own `cache.fork()`."
                )
        if before is None or start <= self._prompt_start:
            self._prompt, self._prompt_start = prompt, start

    def record_positions(self, positions: Tensor, mask: Tensor | None) -> None:
        """
        Notes where the target must find the converted tokens, so that a use which would put them elsewhere is refused.

        Args:
            positions (`torch.Tensor` of shape `[batch or 1, tokens]`): the target's position of each token.
            mask (`torch.Tensor` of shape `[batch, tokens]`, *optional*): 1 for real tokens; `None` without padding.
        """
        self._positions, self._mask = positions, mask

    @property
    def recorded(self) -> tuple[Tensor | None, Tensor | None]:
        """What [`~TransferredCache.record_positions`] noted: the target's positions, and the mask."""
        return self._positions, self._mask

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """As in `DynamicCache`; a model of more layers than were converted is refused."""
        if layer_idx >= len(self.layers) and self.layer_class_to_replicate is None:
            raise CacheUseError(
                f"The converted cache has {len(self.layers)} layers, and the model that uses it feeds layer "
                f"{layer_idx}; expected the target model that the mapper was fitted for. Pass the cache to that model, "
                "or convert with the mapper of this pair."
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def reset(self) -> None:
        """As in `DynamicCache`; what was known of the tokens goes with them."""
        super().reset()
        self._prompt = self._positions = self._mask = None

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """As in `DynamicCache`."""
        super().crop(*args, **kwargs)
        held = super().get_seq_length()
        self._positions, self._mask = (
            None if noted is None else noted[:, :held] for noted in (self._positions, self._mask)
        )
        if self._prompt is not None:
            self._prompt = self._prompt[:, : max(held - self._prompt_start, 0)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """As in `DynamicCache`."""
        self._change_rows(lambda noted: noted.repeat_interleave(repeats, dim=0))
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """As in `DynamicCache`."""
        self._change_rows(lambda noted: noted[indices.to(noted.device) if isinstance(indices, Tensor) else indices])
        super().batch_select_indices(indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """As in `DynamicCache`."""
        self._change_rows(lambda noted: noted.index_select(0, beam_idx.to(noted.device)))
        super().reorder_cache(beam_idx)

    def _change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Does to what is known of the rows what is about to be done to the rows."""
        keys = next((layer.keys for layer in self.layers if getattr(layer, "keys", None) is not None), None)
        rows = keys.shape[0] if keys is not None and keys.dim() == 4 else 0
        for name in ("_prompt", "_positions", "_mask"):
            noted = getattr(self, name)
            if noted is None or (name == "_positions" and noted.shape[0] == 1):
                continue
            known = noted.shape[0]
            fits = rows >= known > 0 and rows % known == 0
            setattr(self, name, change(noted.repeat_interleave(rows // known, dim=0)) if fits else None)

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


def check_positions(call: GenerateCall, expected: Tensor, mask: Tensor | None) -> None:
    """
    Compares where a running `generate` takes the converted tokens to be with where they were put.

    Args:
        call ([`GenerateCall`]): the running call.
        expected (`torch.Tensor` of shape `[batch or 1, tokens]`): the positions that the keys were rotated to.
        mask (`torch.Tensor` of shape `[batch, tokens]`, *optional*): which tokens were real when they were converted.

    Raises:
        [`CacheUseError`]: if a real token has another position, or if padding is taken for a real token.
    """
    tokens = expected.shape[1]
    if call.position_ids is not None and call.position_ids.shape[1] != call.mask_tokens:
        return  # positions of the new tokens alone
    given = torch.ones(1, tokens, dtype=torch.long) if call.mask is None else (call.mask[:, :tokens] != 0).long()
    given = given.to(expected.device)
    positions = (given.cumsum(-1) - 1) if call.position_ids is None else call.position_ids[:, :tokens]
    converted = torch.ones_like(expected[:1]) if mask is None else mask[:, :tokens].to(expected.device)
    rows = call.prompt.shape[0]
    if any(rows % tensor.shape[0] for tensor in (given, positions, expected, converted)):
        return  # a batch that is no multiple is refused by the layers
    given, positions, expected, converted = (
        tensor.to(expected.device).repeat_interleave(rows // tensor.shape[0], dim=0)
        for tensor in (given, positions, expected, converted)
    )
    wrong = (given != 0) & ((positions != expected) | (converted == 0))
    if bool(wrong.any()):
        row, token = (int(index) for index in wrong.nonzero()[0])
        place = "padding" if not int(converted[row, token]) else f"position {int(expected[row, token])}"
        raise CacheUseError(
            f"Row {row}, token {token}: the cache was converted with {place} there, and `generate` takes it for a real "
            f"token at position {int(positions[row, token])}; expected the same left padding in both. Pass the same "
            "`attention_mask` to `convert` and to `generate` (and to `generate` the `position_ids` of the whole "
            "context, if you gave `convert` others than those of the mask)."
        )
