"""What stands on the axes of a report's figures."""

from collections.abc import Iterable, Mapping, Sequence
from textwrap import wrap
from typing import Any

import numpy as np

from .retention import ANCHOR, CONDITIONS, DIFFERENT, NATIVE, NOTHING, RANDOM, RAW, SOURCE, TRANSFERRED
from .schema import Drift, FidelitySection, Length, Measure
from .wording import SHARE, SHARES, shown


# Okabe and Ito's colours, which are told apart with any kind of colour vision; markers and dashes say the same again.
_BLACK, _ORANGE, _SKY, _GREEN, _BLUE, _RED, _PURPLE, _GREY = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
    "#999999",
)
_STYLES = {
    NATIVE: (_BLACK, "s", "-"),
    TRANSFERRED: (_BLUE, "o", "-"),
    ANCHOR: (_GREEN, "D", "-."),
    SOURCE: (_ORANGE, "^", "--"),
    DIFFERENT: (_PURPLE, "v", ":"),
    NOTHING: (_GREY, "x", ":"),
}
# Controls that may be so far off that the others would be pressed together.
_FAR = (RANDOM, RAW)
# Those that a line of text is worth something under; the others would press them together.
_DRIFTING = (NOTHING, DIFFERENT, SOURCE, ANCHOR, TRANSFERRED)
_MOST_NUMBERED = 12
_MOST_MARKERS = 16
# Shares outside of these would press the others together.
_LEFT, _RIGHT = -0.5, 1.25


def r2_panel(axis: Any, values: np.ndarray, title: str) -> Any:
    """
    A heat map of R², target layers upwards and source layers to the right.

    Args:
        axis (`matplotlib.axes.Axes`): to draw on.
        values (`numpy.ndarray` of shape `[target layers, source layers]`): `nan` where undefined.
        title (`str`): above it.
    """
    import matplotlib

    colours = matplotlib.colormaps["viridis"].with_extremes(bad=_GREY)
    image = axis.imshow(values, origin="lower", aspect="auto", cmap=colours, vmin=0, vmax=1)
    axis.set_title(title)
    axis.set_xlabel("source layer")
    axis.spines[:].set_visible(False)
    for which in (axis.xaxis, axis.yaxis):
        which.get_major_locator().set_params(integer=True, min_n_ticks=1)
    if max(values.shape) <= _MOST_NUMBERED:
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                text = f"{value:.2f}".replace("0.", ".", 1).replace("-", "−")
                colour = "black" if value > 0.6 else "white"
                axis.text(column, row, text, ha="center", va="center", color=colour, fontsize=7)
    return image


def layers_panel(axis: Any, fidelity: FidelitySection) -> bool:
    """
    R² and cosine per target layer: the mean over heads, and the span from the worst head to the best.

    Args:
        axis (`matplotlib.axes.Axes`): to draw on.
        fidelity (`dict`): of the report.
    """
    lines = (
        ("R² of keys", fidelity["r2"]["keys"], _BLUE, "o", "-"),
        ("R² of values", fidelity["r2"]["values"], _RED, "s", "--"),
        ("cosine of attention outputs", fidelity["cosine"], _GREEN, "^", "-."),
    )
    lowest, drawn = 0.0, False
    for label, layers, colour, marker, dashes in lines:
        heads = [[value for value in layer if value is not None] for layer in layers]
        there = [index for index, layer in enumerate(heads) if layer]
        if there:
            spans = np.array([(np.mean(heads[i]), min(heads[i]), max(heads[i])) for i in there])
            (line,) = axis.plot(there, spans[:, 0], color=colour, linestyle=dashes, label=label)
            line.set(marker=marker, markersize=5, markevery=_every(there))
            axis.fill_between(there, spans[:, 1], spans[:, 2], color=colour, alpha=0.15, linewidth=0)
            lowest, drawn = min(lowest, float(spans[:, 0].min())), True
    axis.set_xlabel("target layer")
    axis.set_ylabel("R² and cosine, 1 is native\n(bands: worst to best head)")
    axis.set_ylim(max(lowest, -1) - 0.02, 1.03)
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axis.axhline(0, color=_BLACK, linewidth=0.5)
    if drawn:
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    return drawn


def measure_panel(axis: Any, measure: Measure) -> None:
    """
    One measure under all conditions, with intervals: bars for shares, points where zero means nothing.

    Args:
        axis (`matplotlib.axes.Axes`): to draw on.
        measure (`dict`): of the report.
    """
    names = [name for name in CONDITIONS if name in measure["conditions"]]
    names += sorted(set(measure["conditions"]) - set(names))
    is_share = measure["unit"] == SHARE
    ends = {name: _numbers(measure["conditions"][name].values()) for name in names}
    near = np.concatenate([ends[name] for name in names if name not in _FAR] or [np.zeros(1)])
    lowest, highest = (0.0, 1.0) if is_share else (np.nanmin(near), np.nanmax(near))
    room = 0.02 if is_share else 0.08 * (highest - lowest) or 1.0
    for place, name in enumerate(reversed(names)):
        value, low, high = ends[name]
        colour, marker, _ = _STYLES.get(name, (_SKY, "o", "-"))
        if is_share:
            axis.barh(place, value, color=colour, height=0.7, alpha=0.6)
        elif value > highest + room:
            axis.annotate(f"{value:.2f} →", (0.99, place), xycoords=("axes fraction", "data"), ha="right", va="center")
        else:
            axis.plot(value, place, color=colour, marker=marker, markersize=6)
        axis.plot([low, high], [place, place], color=_BLACK, linewidth=1.2)
    axis.set_yticks(range(len(names)), list(reversed(names)), fontsize=8)
    axis.set_title("\n".join(wrap(f"{measure['task']} (n = {measure['n']:,})", 36)), fontsize=9)
    axis.set_xlim(lowest - (0 if is_share else room), highest + room)
    label = measure["metric"] if is_share else f"{measure['metric']}, {measure['unit']}"
    axis.set_xlabel("\n".join(wrap(label, 32)))
    if is_share:
        axis.xaxis.set_major_formatter(_percent)
    else:
        axis.grid(axis="y", linewidth=0.3)
    if measure["chance"] is not None:
        axis.axvline(measure["chance"], color=_BLACK, linestyle=":", linewidth=1)


def kept_panel(axis: Any, measures: Sequence[Measure]) -> bool:
    """
    What is kept by each measure, as the report's shares with their intervals.

    Args:
        axis (`matplotlib.axes.Axes`): to draw on.
        measures (`Sequence[dict]`): of the report.
    """
    styles = zip(SHARES.items(), ((_BLUE, "o"), (_GREEN, "D"), (_PURPLE, "v"), (_ORANGE, "^")), strict=True)
    handles: dict[str, Any] = {}
    for number, ((share, words), (colour, marker)) in enumerate(styles):
        for place, measure in enumerate(reversed(measures)):
            figure = dict(measure)[share]
            if not isinstance(figure, dict) or figure["value"] is None or figure["low"] is None:
                continue
            value, low, high = np.clip(_numbers([figure["value"], figure["low"], figure["high"]]), _LEFT, _RIGHT)
            at = place + 0.27 - 0.18 * number
            if abs(value - figure["value"]) > 0.005:
                # What lies outside is shown at the edge, with its number.
                side = "right" if value == _RIGHT else "left"
                axis.annotate(f"   {shown(figure['value'])}   ", (value, at), ha=side, va="bottom", fontsize=7)
            axis.plot([low, high], [at, at], color=colour, linewidth=1.2)
            (points,) = axis.plot(value, at, color=colour, marker=marker, markersize=5, linestyle="none", clip_on=False)
            handles[words] = points
    names = ["\n".join(wrap(f"{one['task']}, {one['metric']}", 32)) for one in reversed(measures)]
    axis.set_yticks(range(len(measures)), names, fontsize=8)
    left, right = axis.get_xlim()
    axis.set_xlim(max(min(left, -0.05), _LEFT), min(max(right, 1.05), _RIGHT))
    axis.set_ylim(-0.6, len(measures) - 0.4)
    axis.set_xlabel("share of what the native target is better by (100 % is native, 0 % what it is compared with)")
    axis.xaxis.set_major_formatter(_percent)
    axis.grid(axis="x", linewidth=0.3)
    for edge in (0, 1):
        axis.axvline(edge, color=_BLACK, linewidth=0.8)
    axis.legend(
        list(handles.values()), list(handles), loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False
    )
    return bool(handles)


def drift_panel(axes: Sequence[Any], drift: Drift) -> None:
    """
    Two panels: NLL above the native target's, and KL, by the distance from the hand-over.

    Args:
        axes (`Sequence[matplotlib.axes.Axes]`): two.
        drift (`dict`): of the report.
    """
    bins = max(map(len, [*drift["nll"].values(), drift["kl"]]), default=0)
    middles = (np.arange(bins) + 0.5) * drift["tokens_per_bin"]
    label = f"tokens after the hand-over, in bins of {drift['tokens_per_bin']}"
    _against_native(axes, middles, drift["nll"], drift["kl"], label)


def length_panel(axes: Sequence[Any], lengths: Sequence[Length]) -> None:
    """
    Two panels: NLL above the native target's, and KL, by the length of the context.

    Args:
        axes (`Sequence[matplotlib.axes.Axes]`): two.
        lengths (`Sequence[dict]`): of the report.
    """
    rows = sorted(lengths, key=lambda row: row["context"])
    contexts = np.array([row["context"] for row in rows])
    columns = {name: [row["conditions"].get(name) for row in rows] for name in CONDITIONS}
    _against_native(axes, contexts, columns, [row["kl"] for row in rows], "tokens of context")
    for axis in axes:
        _tokens(axis, contexts)


def _against_native(
    axes: Sequence[Any], places: np.ndarray, nll: Mapping[str, Sequence[Any]], kl: Sequence[Any], label: str
) -> None:
    columns = {name: _numbers(column) for name, column in nll.items()}
    columns = {name: column for name, column in columns.items() if np.isfinite(column).any()}
    native = columns.get(NATIVE)
    above = {name: columns[name] - (0 if native is None else native) for name in _DRIFTING if name in columns}
    for name, values in above.items():
        _line(axes[0], places, values, name)
    near = [float(np.nanmax(values)) for name, values in above.items() if name != SOURCE]
    top = 1.25 * max(near, default=0.0)
    if native is not None and top > 0 and SOURCE in above and np.nanmin(above[SOURCE]) > top:
        # A source far off would press the others together.
        axes[0].set_ylim(None, top)
        text = f"source alone: {np.nanmean(above[SOURCE]):.2f} on average ↑"
        axes[0].annotate(text, (0.98, 0.97), xycoords="axes fraction", ha="right", va="top", fontsize=8)
    if len(kl):
        _line(axes[1], places, _numbers(kl), TRANSFERRED)
    axes[0].set_ylabel("NLL, nats per token" if native is None else "NLL above native,\nnats per token")
    axes[1].set_ylabel("KL(native ‖ transferred),\nnats per token")
    axes[1].set_ylim(0, None)
    for axis in axes:
        axis.set_xlabel(label)
        axis.axhline(0, color=_BLACK, linewidth=0.5)


def latency_panel(axes: Sequence[Any], rows: Sequence[dict[str, Any]]) -> bool:
    """
    Two panels: the time to the target's cache, and to its first token, by the length of the context.

    Args:
        axes (`Sequence[matplotlib.axes.Axes]`): two.
        rows (`Sequence[dict]`): of `measure_latency`.
    """
    rows = sorted(rows, key=lambda row: row["context"])
    contexts = np.array([row["context"] for row in rows])
    ways = (
        (0, ("target_prefill",), "target's prefill", NATIVE),
        (0, ("conversion",), "conversion, warm", TRANSFERRED),
        (0, ("source_prefill", "conversion"), "cold: source's prefill and conversion", SOURCE),
        (1, ("target_first_token",), "native", NATIVE),
        (1, ("converted_first_token",), "converted, warm", TRANSFERRED),
        (1, ("source_prefill", "converted_first_token"), "converted, cold", SOURCE),
    )
    for panel, parts, label, style in ways:
        seconds = np.sum([_numbers([row.get(part) for row in rows]) for part in parts], axis=0)
        if not np.isfinite(seconds).any():
            continue
        _line(axes[panel], contexts, 1000 * seconds, style, label)
        for row in rows if len(parts) == 1 else ():
            low, high = (row.get("spread") or {}).get(parts[0]) or (np.nan, np.nan)
            axes[panel].plot([row["context"]] * 2, [1000 * low, 1000 * high], color=_STYLES[style][0], linewidth=1)
    floors = (
        ("conversion_floor", "floor of a conversion", _BLUE),
        ("target_prefill_floor", "floor of a prefill", _BLACK),
    )
    for name, label, colour in floors:
        seconds = _numbers([row.get(name) for row in rows])
        if np.isfinite(seconds).any():
            axes[0].plot(contexts, 1000 * seconds, color=colour, linewidth=0.8, linestyle=":", label=label)
    for axis, title in zip(axes, ("until the target has its cache", "until its first token"), strict=True):
        axis.set_yscale("log")
        axis.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_xlabel("tokens of context")
        axis.set_ylabel(f"milliseconds {title}")
        axis.grid(axis="y", linewidth=0.3)
        _tokens(axis, contexts)
        if axis.lines:
            axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=8, frameon=False)
    return any(axis.lines for axis in axes)


def _tokens(axis: Any, contexts: np.ndarray) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axis.minorticks_off()
    axis.margins(x=0.06)


def _line(axis: Any, places: np.ndarray, values: np.ndarray, name: str, label: str | None = None) -> None:
    colour, marker, dashes = _STYLES[name]
    (line,) = axis.plot(places, values, color=colour, linestyle=dashes, label=label or name)
    line.set(marker=marker, markersize=4, markevery=_every(places))


def _every(places: Sequence[int] | np.ndarray) -> int:
    return max(1, len(places) // _MOST_MARKERS)


def _numbers(column: Iterable[Any]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in column], dtype=float)


def _percent(value: float, _: Any) -> str:
    return f"{100 * value:.0f} %".replace("-", "−")
