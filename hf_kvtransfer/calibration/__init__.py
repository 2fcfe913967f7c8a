"""From two models and a text to the closed form: capture, statistics, layer selection, ridge."""

from .capture import Content, capture, capture_content
from .collect import collect
from .layout import FeatureLayout
from .moments import Moments
from .probes import layer_scores, select_layers
from .ridge import RidgeSolution, r2, solve_ridge
from .statistics import CalibrationStatistics
from .texts import iter_texts, pack


__all__ = [
    "CalibrationStatistics",
    "Content",
    "FeatureLayout",
    "Moments",
    "RidgeSolution",
    "capture",
    "capture_content",
    "collect",
    "iter_texts",
    "layer_scores",
    "pack",
    "r2",
    "select_layers",
    "solve_ridge",
]
