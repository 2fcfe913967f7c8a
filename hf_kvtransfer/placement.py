"""Where maps are computed and where a target layer's entries belong, and bringing weights from memory in time."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .maps import MapForm
from .modules import decoder_of


def place_of(form: MapForm, cache: torch.device) -> torch.device:
    """
    Where a map is computed: where its weights are, or, for weights in CPU memory, where the source cache is.

    Args:
        form ([`MapForm`]): the map.
        cache (`torch.device`): where the source cache is.
    """
    # Weights that accelerate has put away have no device of their own until they are called for.
    hook: Any = form.__dict__.get("_hf_hook")
    executed = getattr(hook, "execution_device", None)
    if executed is not None:
        return torch.device(executed)
    device = form.weight_like.device
    return cache if device.type == "cpu" else device


class Placed:
    """
    A map where it is computed. Weights in CPU memory, memory-mapped or not, come to where the source cache is when they
    are fetched, and are let go after their use.

    Args:
        form ([`MapForm`]): the map.
        widths (`Sequence[int]`): of the pieces of its features.
        cache (`torch.device`): where the source cache is.
    """

    def __init__(self, form: MapForm, widths: Sequence[int], cache: torch.device) -> None:
        like = form.weight_like
        self.device, self.dtype = place_of(form, cache), like.dtype
        self._form = form
        self._comes = like.device.type == "cpu" != self.device.type and "_hf_hook" not in form.__dict__
        self._call = None if self._comes else form.prepared(widths)
        self._weights: dict[str, Tensor] = {}
        self._stream: Any = None

    def fetch(self) -> None:
        """Starts the copy. It goes on beside what has been started before."""
        if not self._comes:
            return
        if self.device.type == "cuda":
            self._stream = self._stream or torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._stream):
            for name, tensor in self._form.state_dict(keep_vars=True).items():
                self._weights[name] = tensor.to(self.device, non_blocking=True)

    def __call__(self, pieces: Sequence[Tensor]) -> Tensor:
        """As [`MapForm.prepared`] returns it."""
        if self._call is not None:
            return self._call(pieces)
        if self._stream is not None:
            computing = torch.cuda.current_stream(self.device)
            computing.wait_stream(self._stream)
            for tensor in self._weights.values():
                tensor.record_stream(computing)
        features = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim=-1)
        features = features if features.dim() == 3 else features[None]
        made: Tensor = functional_call(self._form, self._weights, (features,))
        self._weights = {}
        return made


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
