"""What the trained part of a map and the content loss are scaled by, from a few rows."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import CalibrationError
from ..features import KINDS
from ..maps import MapForm
from ..reading import ContentReader
from .batches import FEATURES, counted_positions, source_cache, unflatten
from .module import KVTransferModule


class _Spread:
    """Running mean and variance of columns. In float64, a common offset costs no digits that matter."""

    def __init__(self) -> None:
        self._count = 0
        self._sum: Any = 0.0
        self._squares: Any = 0.0

    def add(self, rows: Tensor) -> None:
        """`[..., rows, columns]`"""
        rows = rows.double()
        self._count += rows.shape[-2]
        self._sum = self._sum + rows.sum(-2)
        self._squares = self._squares + rows.square().sum(-2)

    @property
    def mean(self) -> Tensor:
        return self._sum / self._count

    @property
    def variance(self) -> Tensor:
        return (self._squares / self._count - self.mean.square()).clamp(min=0)

    @property
    def deviation(self) -> Tensor:
        """Where a column hardly varies, that of the one that varies most: dividing by it must not blow up noise."""
        deviation = self.variance.sqrt()
        largest = deviation.amax(-1, keepdim=True)
        largest = largest.where(largest > 0, 1.0)
        return deviation.where(deviation > _NOISE * largest, largest)


_NOISE = 1e-4


@torch.no_grad()
def estimate_scales(module: KVTransferModule, batches: Iterable[Mapping[str, Any]]) -> None:
    """
    Measures, on a few batches, the variance of each target layer's keys and values, which the content loss is scaled
    by; and for maps that standardise and have not been told yet, means and deviations of what they read and write.

    Args:
        module ([`KVTransferModule`]): is told what was measured.
        batches (iterable of `dict`): as the module's `forward` takes them; rows without a batch dimension will do.

    Raises:
        [`CalibrationError`]: if there are none.
    """
    mapper = module.mapper
    source_geometry, geometry = mapper.config.geometry("source"), mapper.config.geometry("target")
    supports, codec = mapper.config.supports(), mapper.codec("target")
    features = {
        (index, kind): _Spread()
        for index, entry in enumerate(supports)
        if entry is not None
        for kind in KINDS
        if _form(mapper, index, kind).needs_scales
    }
    outputs = {(i, kind): _Spread() for i, entry in enumerate(supports) if entry is not None for kind in KINDS}
    seen = 0
    for batch in batches:
        tensors = {
            name: batch[name] if batch[name].dim() == 3 else batch[name][None]
            for name in (*FEATURES, "hidden")
            if name in batch
        }
        source = source_cache(tensors, source_geometry)
        native = {kind: unflatten(tensors[f"target_{kind}"], geometry) for kind in KINDS}
        positions = counted_positions(source.num_tokens, source.keys[0].device)
        tables = codec.tables(positions.target)
        reader = ContentReader(mapper.codec("source"), source, positions, mapper.packing(), 0, source.num_tokens)
        for (index, kind), spread in outputs.items():
            states = native[kind][index]
            states = codec.remove(states, tables, index) if kind == "keys" else states
            spread.add(states.transpose(1, 2).flatten(2).flatten(0, 1))
            if (index, kind) in features:
                device = source.keys[0].device
                features[index, kind].add(reader.features(index, kind, tensors.get("hidden"), device, torch.float32))
        seen += 1
    if not seen:
        raise CalibrationError(
            "There are no rows to measure the scales of keys and values on; expected one batch or more. Pass a "
            "training set that isn't empty."
        )
    for (index, kind), spread in outputs.items():
        module.variances[index, KINDS.index(kind)] = spread.variance.mean().clamp(min=torch.finfo(torch.float32).tiny)
        if (index, kind) in features:
            read = features[index, kind]
            _form(mapper, index, kind).set_scales(read.mean, read.deviation, spread.mean, spread.deviation)


def _form(mapper: Any, index: int, kind: str) -> MapForm:
    form: MapForm = getattr(mapper.layers[index], kind)
    return form
