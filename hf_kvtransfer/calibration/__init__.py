"""From two models and a text to the closed form: capture, statistics, layer selection, ridge."""

from .capture import capture
from .collect import collect
from .moments import Moments
from .ridge import RidgeSolution, layer_scores, r2, select_layers, solve_ridge
from .statistics import CalibrationStatistics
from .texts import iter_texts, pack


__all__ = [
    "CalibrationStatistics",
    "Moments",
    "RidgeSolution",
    "capture",
    "collect",
    "iter_texts",
    "layer_scores",
    "pack",
    "r2",
    "select_layers",
    "solve_ridge",
]
