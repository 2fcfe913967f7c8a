"""How long prefill and conversion take by context length, in one picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


# Okabe and Ito's colours, which are told apart with any kind of colour vision; shapes say the same again.
_RECIPES = {
    "full": ("#0072B2", "o", "full heads"),
    "local": ("#E69F00", "s", "local heads"),
    "all": ("#CC79A7", "v", "all source layers"),
    "anchored": ("#009E73", "D", "one target layer and four of the source"),
}
_TITLES = {"tiny": "tiny family", "smollm2": "SmolLM2-135M", "qwen3": "Qwen3, narrower"}


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """
    Draws times above and speed-ups below, one column per pair of models.

    Args:
        rows (`Sequence[dict]`): of `benchmarks.prefill`.
        path (`Path`): an image file; its suffix is its format.
    """
    import matplotlib

    matplotlib.use("Agg")
    # No dates and no random names: the same figures give the same file.
    matplotlib.rcParams.update({"svg.hashsalt": "hf_kvtransfer", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    figure, axes = pyplot.subplots(
        2, len(shapes), figsize=(3.6 * len(shapes), 6.0), sharex="col", squeeze=False, layout="constrained"
    )
    handles: dict[str, Any] = {}
    for column, shape in enumerate(shapes):
        times, gains = axes[0][column], axes[1][column]
        here = [row for row in rows if row["shape"] == shape]
        first = [row for row in here if row["recipe"] == here[0]["recipe"]]
        _line(times, first, "target_prefill", "#000000", "P", "target's prefill")
        for recipe, (colour, marker, label) in _RECIPES.items():
            some = [row for row in here if row["recipe"] == recipe]
            if not some:
                continue
            _line(times, some, "conversion", colour, marker, label)
            _line(times, some, "conversion_floor", colour, "", "", linestyle=":")
            _line(gains, some, "warm_speedup", colour, marker, label)
            _line(gains, some, "counted_speedup", colour, "", "", linestyle="--")
        gains.axhline(1, color="black", linewidth=0.8)
        times.set_title(_TITLES.get(shape, shape))
        for axis in (times, gains):
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xticks(sorted({row["context"] for row in here}))
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
            axis.minorticks_off()
            axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.spines[["top", "right"]].set_visible(False)
            for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
                handles.setdefault(name, handle)
        gains.set_xlabel("context, tokens")
    axes[0][0].set_ylabel("time, seconds")
    axes[1][0].set_ylabel("prefill / conversion")
    # What the colours' thin lines are, once for all of them.
    for linestyle, name in ((":", "the conversion's floor"), ("--", "speed-up by operations alone")):
        handles[name] = pyplot.Line2D([], [], color="#777777", linestyle=linestyle, linewidth=1.2)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
    pyplot.close(figure)


def _line(
    axis: Any, rows: Sequence[dict[str, Any]], name: str, colour: str, marker: str, label: str, linestyle: str = "-"
) -> None:
    axis.plot(
        [row["context"] for row in rows],
        [row[name] for row in rows],
        color=colour,
        marker=marker,
        markersize=5,
        linestyle=linestyle,
        linewidth=1.2,
        label=label,
    )
