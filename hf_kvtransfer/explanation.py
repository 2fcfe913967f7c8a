"""What a recipe chose for each map, and what it rejected, in a table."""

from typing import Any

from .config import KVMapperConfig
from .costs import conversion_flops
from .recipes import CONTEXT_LENGTH
from .tables import percent, table


def explanation(config: KVMapperConfig) -> str:
    """
    The selection that a mapper's configuration holds.

    Args:
        config ([`KVMapperConfig`]): of a fitted mapper.

    Returns:
        `str`: a table of the chosen maps, each with its held-out error and the best that was rejected; and how the
        anchor was chosen, where there was a choice.
    """
    selection = config.selection
    if not selection.get("chosen"):
        tried = config.scores.get("k_candidates", {})
        figures = ", ".join(f"k = {k}: {figure:.3f}" for k, figure in tried.items())
        chosen = f" by held-out R² ({figures})" if figures else ""
        return f"Preset {config.preset}: every target layer reads {config.k} source layers{chosen}."
    lines = []
    if len(selection["anchors"]) > 1:
        rows = [
            [
                "none" if one["anchor_layers"] is None else f"{one['anchor_layers']} from layer {one['anchor_start']}",
                f"{one['error']:.3f}",
                percent(one["cost"]),
                "chosen"
                if (one["anchor_start"], one["anchor_layers"]) == (config.anchor_start, config.anchor_layers)
                else "",
            ]
            for one in selection["anchors"]
        ]
        lines += [table(["anchor layers", "summed error", "cost", ""], rows), ""]
    rejected: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for way in selection["rejected"]:
        rejected.setdefault((way["layer"], way["kind"]), []).append(way)
    rows = []
    for way in selection["chosen"]:
        others = rejected.get((way["layer"], way["kind"]), [])
        best = min(others, key=lambda other: other["error"], default=None)
        rows.append(
            [
                str(way["layer"]),
                way["kind"],
                _described(way),
                f"{way['error']:.4f}",
                str(len(others)),
                f"{best['error']:.4f}: {_described(best)}" if best else "",
            ]
        )
    lines.append(table(["layer", "kind", "chosen", "error", "rejected", "best of them"], rows))
    lines.append(
        "\nerror: of the target's attention output on held-out text, relative to its size; cost: of a prefill."
    )
    if constants := {kind: layers for kind, layers in config.first_token.items() if layers}:
        counts = " and ".join(f"the {kind} of {len(layers)} layers" for kind, layers in constants.items())
        lines += [f"The first token is a constant in {counts}: it is nearer to the target's than what the maps make."]
    return "\n".join(lines)


def in_use(config: KVMapperConfig) -> str:
    """
    What a conversion with this mapper takes, in one sentence: what the target does itself, and the share of a prefill.

    Args:
        config ([`KVMapperConfig`]): of a fitted mapper.
    """
    start, layers = config.anchor_start, config.anchor_layers
    own = [
        *(
            []
            if layers is None
            else [f"embedding and first {layers} layers" if not start else f"layers from {start}, {layers} of them,"]
        ),
        *([f"the first {config.exact_prefix} tokens"] if config.exact_prefix else []),
        *([f"the last {config.exact_suffix} tokens"] if config.exact_suffix else []),
    ]
    share = percent(conversion_flops(config, CONTEXT_LENGTH).share_of_prefill)
    does = f"the target itself runs {' and '.join(own)}" if own else "it reads the source's cache alone"
    return f"A conversion of {CONTEXT_LENGTH:,} tokens takes {share} of a prefill's operations; {does}."


def _described(way: dict[str, Any]) -> str:
    parts = [f"{len(way['layers'])} layers ({way['order']})" if way["layers"] else "no source layer"]
    parts += [way["heads"]] * bool(way["layers"])
    parts += ["joint"] * way["joint"] + ["anchor"] * way["anchor"]
    parts += [f"{way['window']} before"] * bool(way["window"])
    return f"{', '.join(parts)}, λ = {way['ridge_lambda']:g}"
