"""Where maps are computed and where a target layer's entries belong, and bringing weights from memory in time."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .maps import MapForm
from .modules import decoder_of


Call = Callable[[Sequence[Tensor]], Tensor]
"""A map of features in pieces, `MapForm.from_pieces`."""


def place_of(form: MapForm, cache: torch.device) -> torch.device:
    """
    Where a map is computed: where its weights are, or, for weights in CPU memory, where the source cache is.

    Args:
        form ([`MapForm`]): the map.
        cache (`torch.device`): where the source cache is.
    """
    # Weights that accelerate has put away have no device of their own until they are called for.
    hook: Any = getattr(form, "_hf_hook", None)
    executed = getattr(hook, "execution_device", None)
    if executed is not None:
        return torch.device(executed)
    device = form.weight_like.device
    return cache if device.type == "cpu" else device


def forms_at(forms: Sequence[MapForm], cache: torch.device) -> Iterator[tuple[MapForm, Call, torch.device]]:
    """
    Maps one after another, ready to be called. Weights in CPU memory, memory-mapped or not, are copied to where the
    source cache is while the map before them is computed, and let go after their use.

    Args:
        forms (`Sequence[MapForm]`): the maps, in the order of their use.
        cache (`torch.device`): where the source cache is.

    Yields:
        `tuple`: a map, what to call, and where it takes its features.
    """
    fetched = _Fetched(forms[0], cache) if forms else None
    for number, form in enumerate(forms):
        current: Any = fetched
        yield form, current.call(), current.device
        # The map has been started now, and on an accelerator it runs while the next weights come.
        fetched = _Fetched(forms[number + 1], cache) if number + 1 < len(forms) else None


class _Fetched:
    def __init__(self, form: MapForm, cache: torch.device) -> None:
        self.device = place_of(form, cache)
        self._form = form
        self._weights: dict[str, Tensor] = {}
        self._stream = None
        if form.weight_like.device.type != "cpu" or self.device.type == "cpu" or hasattr(form, "_hf_hook"):
            return
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        with torch.cuda.stream(self._stream):
            for name, tensor in form.state_dict(keep_vars=True).items():
                self._weights[name] = tensor.to(self.device, non_blocking=True)

    def call(self) -> Call:
        """What to call, once the weights are there."""
        if not self._weights:
            return self._form.from_pieces
        if self._stream is not None:
            computing = torch.cuda.current_stream(self.device)
            computing.wait_stream(self._stream)
            for tensor in self._weights.values():
                tensor.record_stream(computing)
        return self._with_weights

    def _with_weights(self, pieces: Sequence[Tensor]) -> Tensor:
        features = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim=-1)
        made: Tensor = functional_call(self._form, self._weights, (features,))
        return made.unflatten(-1, (self._form.heads, self._form.head_dim)).transpose(0, 1)


def layer_devices(target: nn.Module | None, depth: int) -> list[torch.device | None]:
    """
    The device of each decoder layer of a target.

    Args:
        target (`PreTrainedModel`, *optional*): the target.
        depth (`int`): number of its layers.

    Returns:
        `list`: `None` where it can't be told, as without a target, or for a layer that isn't kept anywhere.
    """
    if target is None:
        return [None] * depth
    found: list[torch.device | None] = []
    for layer in decoder_of(target).layers:
        device = next((parameter.device for parameter in layer.parameters()), None)
        found.append(None if device is None or device.type == "meta" else device)
    return found
