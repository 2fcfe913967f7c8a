"""What a mapper's configuration says of its two sides, read once: geometries, rotary codes, and what maps read."""

from typing import Any

from .config import KVMapperConfig
from .errors import PairMismatchError
from .geometry import ModelGeometry
from .packing import Packing
from .rope import RotaryCodec


class Sides:
    """
    Args:
        config ([`KVMapperConfig`]): of the mapper. A field that is set anew is read anew.
    """

    def __init__(self, config: KVMapperConfig) -> None:
        self.config = config
        self._codecs: dict[str, RotaryCodec] = {}
        # Each with what it was read from.
        self._geometries: dict[str, tuple[Any, ModelGeometry]] = {}
        self._packing: tuple[tuple[Any, ...], Packing] | None = None

    def geometry(self, side: str) -> ModelGeometry:
        """The geometry of one side, `"source"` or `"target"`, as [`KVMapperConfig.geometry`] reads it."""
        stored = getattr(self.config, f"{side}_geometry")
        if side not in self._geometries or self._geometries[side][0] is not stored:
            self._geometries[side] = (stored, self.config.geometry(side))
        return self._geometries[side][1]

    def packing(self) -> Packing:
        """What the maps read, and where it lies side by side."""
        geometries = self.geometry("source"), self.geometry("target")
        made_of = (self.config.support, *geometries)
        if self._packing is None or any(one is not other for one, other in zip(self._packing[0], made_of, strict=True)):
            self._packing = (made_of, Packing(self.config.supports(), *geometries))
        return self._packing[1]

    def codec(self, side: str) -> RotaryCodec:
        """
        The rotary code of one side, `"source"` or `"target"`, built once from its configuration.

        Raises:
            [`PairMismatchError`]: if the stored configuration and the stored geometry contradict each other.
        """
        if side not in self._codecs:
            codec = RotaryCodec.from_config(self.config.model_config(side))
            shapes = [
                [(layer.kv_heads, layer.head_dim, layer.rotary) for layer in geometry.layers]
                for geometry in (self.config.geometry(side), codec.geometry)
            ]
            if shapes[0] != shapes[1]:
                raise PairMismatchError(
                    f"`{side}_config` and `{side}_geometry` of this mapper describe different models "
                    f"({'; '.join(self.config.geometry(side).differences(codec.geometry))}); expected one and the "
                    "same. The configuration is damaged: load the mapper again."
                )
            self._codecs[side] = codec
        return self._codecs[side]
