"""How figures are written: shares as percentages, anything else with three decimals, a dash for what is undefined."""

from .schema import Figure, Measure


SHARE = "share"

SHARES = {
    "gap_recovered": "gap recovered",
    "context_value_kept": "context value kept",
    "content_kept": "content kept",
    "normalised_retention": "retention above chance",
}
"""The shares of a measure, as they are called."""

CAPTIONS = {
    "retention": "Every measure under all conditions",
    "kept": "What the transfer keeps",
    "layers": "R² and attention cosine by target layer",
    "source_layers": "Held-out R² of each target layer from each source layer alone",
    "drift": "Drift with the distance from the hand-over and with the length of the context",
    "latency": "Conversion against prefill by length of the context",
}
"""What each figure shows, by its file's name, in the order in which they are shown."""


def shown(value: float | None, unit: str = SHARE) -> str:
    """
    A number as text.

    Args:
        value (`float`, *optional*): the number.
        unit (`str`, *optional*, defaults to `"share"`): of a measure; only shares become percentages.
    """
    if value is None:
        return "–"
    text = f"{100 * value:.1f}" if unit == SHARE else f"{value:.3f}"
    # No minus before a zero that was rounded.
    text = text.lstrip("-") if float(text) == 0 else text.replace("-", "−")
    return f"{text} %" if unit == SHARE else text


def with_interval(figure: Figure | None, unit: str = SHARE) -> str:
    """
    A figure and its interval as text; a dash if it has none, since nothing is shown then.

    Args:
        figure (`dict`, *optional*): a [`Figure`].
        unit (`str`, *optional*, defaults to `"share"`): of the measure.
    """
    if figure is None or None in figure.values():
        return "–"
    low, high = (shown(end, unit).removesuffix(" %") for end in (figure["low"], figure["high"]))
    return f"{shown(figure['value'], unit)} [{low}, {high}]"


def titled(measure: Measure) -> str:
    """What a measure is called in a sentence."""
    return f"{measure['task']} ({measure['metric']})"


def listed(names: list[str]) -> str:
    """Names as they stand in a sentence."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""
