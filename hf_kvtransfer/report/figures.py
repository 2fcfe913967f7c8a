"""The figures of a report; each is drawn if its section is there."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import KVTransferError
from .panels import drift_panel, kept_panel, latency_panel, layers_panel, length_panel, measure_panel, r2_panel
from .report import FIGURES_FOLDER, write_whole
from .wording import SHARES


if TYPE_CHECKING:
    from .report import TransferReport


# Inches; at 150 dots each, a README shows them at about two thirds of their size.
_WIDTH = 9.0
_COLUMNS = 3


def draw_figures(report: "TransferReport", folder: str | Path) -> list[Path]:
    """
    Draws what a report holds into `figures/*.png` of a folder. Figures whose section isn't there are removed.

    The same report gives the same bytes, with one release of matplotlib.

    Args:
        report ([`TransferReport`]): what was measured.
        folder (`str` or `os.PathLike`): where `report.json` lies; made if missing.

    Returns:
        `list[pathlib.Path]`: the figures, in the order in which they are shown.

    Raises:
        [`KVTransferError`]: if matplotlib isn't installed.
        [`MapperFileError`]: if nothing can be written there.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise KVTransferError(
            "Figures need matplotlib, which isn't installed; expected the extra `plots`. Install it with `pip install "
            "hf_kvtransfer[plots]`, or write the report without figures."
        ) from error
    paths = []
    for name, draw in FIGURES.items():
        path = Path(folder) / FIGURES_FOLDER / f"{name}.png"
        # Without what a user's own settings would change.
        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
            matplotlib.rcParams["text.parse_math"] = False  # names of tasks are no formulas
            figure = Figure(layout="constrained")
            if not draw(figure, report):
                path.unlink(missing_ok=True)
                continue
            file = io.BytesIO()
            figure.savefig(file, format="png", dpi=150, metadata={"Software": None})
        paths.append(write_whole(path.parent, path.name, file.getvalue()))
    return paths


def _r2(figure: Any, report: "TransferReport") -> bool:
    found = report.layers_r2
    if not found or not (_is_table(found["keys"]) and _is_table(found["values"])):
        return False
    figure.set_size_inches(_WIDTH, min(max(2.6, 0.9 + 0.4 * len(found["keys"])), 7.0))
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (name, rows) in zip(axes, dict(found).items(), strict=True):
        image = r2_panel(axis, np.array(rows, dtype=float), name)
    axes[0].set_ylabel("target layer")
    extend = "min" if image.get_array().min() < 0 else "neither"
    figure.colorbar(image, ax=list(axes), label="held-out R²", extend=extend, fraction=0.05)
    return True


def _is_table(rows: Sequence[Sequence[Any]]) -> bool:
    return bool(rows) and bool(rows[0]) and len({len(row) for row in rows}) == 1


def _layers(figure: Any, report: "TransferReport") -> bool:
    if report.fidelity is None:
        return False
    figure.set_size_inches(_WIDTH, 3.4)
    return layers_panel(figure.subplots(), report.fidelity)


def _retention(figure: Any, report: "TransferReport") -> bool:
    if not report.measures:
        return False
    rows = -(-len(report.measures) // _COLUMNS)
    columns = min(_COLUMNS, len(report.measures))
    most = max(len(one["conditions"]) for one in report.measures)
    figure.set_size_inches(_WIDTH, rows * (0.24 * most + 1.1) + 0.2)
    axes = figure.subplots(rows, columns, squeeze=False)
    for index, axis in enumerate(axes.flat):
        if index < len(report.measures):
            measure_panel(axis, report.measures[index])
        else:
            axis.set_axis_off()
    figure.supxlabel("Lines are 95 % intervals; dotted ones are chance.", fontsize=8)
    return True


def _kept(figure: Any, report: "TransferReport") -> bool:
    measures = [one for one in report.measures if any(dict(one)[share] is not None for share in SHARES)]
    figure.set_size_inches(_WIDTH, 1.4 + 0.55 * len(measures))
    return bool(measures) and kept_panel(figure.subplots(), measures)


def _drift(figure: Any, report: "TransferReport") -> bool:
    panels: list[tuple[Callable[..., None], Any]] = []
    if report.drift is not None and any(report.drift["nll"].values()):
        panels.append((drift_panel, report.drift))
    if len(report.lengths) > 1:
        panels.append((length_panel, report.lengths))
    if not panels:
        return False
    figure.set_size_inches(_WIDTH, 0.5 + 2.7 * len(panels))
    axes = figure.subplots(len(panels), 2, squeeze=False)
    for row, (panel, section) in zip(axes, panels, strict=True):
        panel(row, section)
    handles: dict[str, Any] = {}
    for axis in axes[:, 0]:
        drawn, labels = axis.get_legend_handles_labels()
        handles |= dict(zip(labels, drawn, strict=True))
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=6, frameon=False)
    return True


def _latency(figure: Any, report: "TransferReport") -> bool:
    if not report.latency:
        return False
    figure.set_size_inches(_WIDTH, 4.0)
    return latency_panel(figure.subplots(1, 2), report.latency)


FIGURES: dict[str, Callable[[Any, "TransferReport"], bool]] = {
    "retention": _retention,
    "kept": _kept,
    "layers": _layers,
    "source_layers": _r2,
    "drift": _drift,
    "latency": _latency,
}
"""By file name, what draws a report's figure, or returns `False` if its section isn't there."""
