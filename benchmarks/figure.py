"""What is kept against what it costs, in one picture."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any


# Okabe and Ito's colours, which are told apart with any kind of colour vision; shapes say the same again.
_STYLES = {
    "published": ("#E69F00", "s", "published recipes"),
    "cache alone": ("#0072B2", "o", "auto, from the source's cache alone"),
    "trained": ("#56B4E9", "^", "auto, trained"),
    "anchored": ("#009E73", "D", "auto, with layers of the target"),
    "ingredient": ("#999999", ".", "one ingredient changed"),
    "control": ("#CC79A7", "X", "control: the target's layers without the source"),
}
_LOWEST = -0.4


def draw(pairs: Sequence[dict[str, Any]], path: Path) -> None:
    """
    Draws gap recovered and context value kept, of the text, against the share of a prefill that a conversion costs.

    Args:
        pairs (`Sequence[dict]`): from `summary.summary`.
        path (`Path`): an image file; its suffix is its format.
    """
    import matplotlib

    matplotlib.use("Agg")
    # No dates and no random names: the same figures give the same file.
    matplotlib.rcParams.update({"svg.hashsalt": "hf_kvtransfer", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    shares = (("kept", "context value kept"), ("gap", "gap recovered"))
    figure, axes = pyplot.subplots(
        len(shares), len(pairs), figsize=(3.6 * len(pairs), 6.4), sharex="col", squeeze=False, layout="constrained"
    )
    for column, pair in enumerate(pairs):
        for row, (share, title) in enumerate(shares):
            axis = axes[row][column]
            _panel(axis, pair, share)
            axis.set_ylabel(title if column == 0 else "")
            if row == 0:
                axis.set_title(pair["title"].replace(" → ", " →\n"), fontsize=9)
        axes[-1][column].set_xlabel("cost, share of the target's prefill")
    handles, labels = {}, []
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    labels = [label for _, _, label in _STYLES.values() if label in handles]
    figure.legend([handles[label] for label in labels], labels, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
    pyplot.close(figure)


def _panel(axis: Any, pair: dict[str, Any], share: str) -> None:
    measure = f"text {pair['readings'][0]}, NLL, {share}"
    below = shown = 0
    for role, (colour, marker, label) in _STYLES.items():
        points = []
        for name, described in pair["recipes"].items():
            point, low, high = pair["figures"][name].get(measure, (math.nan,) * 3)
            if described["role"] != role or math.isnan(point):
                continue
            if point < _LOWEST:
                below += 1
                continue
            points.append((described["cost"]["here"], point, point - low, high - point))
        shown += len(points)
        if points:
            cost, middle, down, up = zip(*points, strict=True)
            axis.errorbar(
                cost,
                middle,
                yerr=[[0 if math.isnan(value) else value for value in side] for side in (down, up)],
                color=colour,
                marker=marker,
                markersize=8 if marker == "." else 6,
                linestyle="none",
                elinewidth=1,
                alpha=0.9,
                label=label,
                zorder=2 if role == "ingredient" else 3,
            )
    axis.axhline(1, color="black", linewidth=0.8)
    axis.axhline(0, color="black", linewidth=0.5, linestyle=":")
    promised = pair["bars"]
    if promised and share == "kept":
        axis.axhline(promised["kept"], color="#D55E00", linewidth=0.8, linestyle="--")
        axis.axvline(promised["cost"], color="#D55E00", linewidth=0.8, linestyle="--")
    if not shown:
        axis.annotate("no gap: the source is\nthe better model", (0.5, 0.5), xycoords="axes fraction", ha="center")
    if below:
        axis.annotate(f"{below} below {_LOWEST:g}", (0.97, 0.03), xycoords="axes fraction", ha="right", fontsize=8)
    axis.set_ylim(_LOWEST, 1.12)
    axis.set_xlim(0, None)
    axis.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axis.spines[["top", "right"]].set_visible(False)
