"""`LayerMap`, what a mapper has for one target layer."""

import torch
from torch import Tensor, nn

from .config import KVMapperConfig
from .features import stream_width
from .maps import MAPS


class LayerMap(nn.Module):
    """The maps of one target layer: one for its keys, one for its values."""

    def __init__(self, config: KVMapperConfig, index: int) -> None:
        super().__init__()
        source, target = config.geometry("source"), config.geometry("target")
        supports, layer = config.supports()[index], target.layers[index]
        for kind, support in (supports or {}).items():
            width = support.width(source, layer, stream_width(target))
            form = MAPS[config.map_type](
                width, layer.kv_heads, layer.head_dim, support.groups(layer), **config.map_options
            )
            setattr(self, kind, form)
            if index in config.first_token.get(kind, ()):
                self.register_parameter(f"first_{kind}", nn.Parameter(torch.zeros(layer.width)))

    def first_token(self, kind: str) -> Tensor | None:
        """RoPE-free content of a context's first token, `[kv_heads · head_dim]`, where it is a stored constant."""
        return getattr(self, f"first_{kind}", None)
