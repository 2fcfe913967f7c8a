"""The functional forms of a map from source features to the keys or values of one target layer."""

from .base import MapForm
from .linear import LinearMap
from .mlp import MLPMap
from .residual import ResidualMap


MAPS: dict[str, type[MapForm]] = {"linear": LinearMap, "mlp": MLPMap, "residual": ResidualMap}

__all__ = ["MAPS", "LinearMap", "MLPMap", "MapForm", "ResidualMap"]
