"""What the tables of a model card say, from a mapper's configuration and its report."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .config import KVMapperConfig
from .errors import KVTransferError
from .report.wording import SHARE, SHARES, shown
from .tables import percent


_TITLES = {
    "look-up": "Look-ups, whose answers stand in the context and nowhere else",
    "text": "Running text",
    "task": "Tasks",
}


def fit_facts(config: KVMapperConfig, described: dict[str, Any] | None = None) -> list[tuple[str, str]]:
    """
    How a mapper was fitted, as rows of a table.

    Args:
        config ([`KVMapperConfig`]): of the mapper.
        described (`dict`, *optional*): what its report says of it; what it lacks is counted from the configuration.

    Returns:
        `list[tuple[str, str]]`: names and values; only of what is known.
    """
    described = described or _counted(config)
    calibration = config.calibration
    tokens = calibration.get("tokens") or {}
    training = calibration.get("training") or {}
    versions = calibration.get("versions") or {}
    heldout = (config.scores.get("r2") or {}).get("heldout") or {}
    share, length = described.get("cost_share"), described.get("cost_tokens")
    facts = {
        "recipe": f"`{config.preset}`" if config.preset else None,
        "form of the maps": f"{config.map_type}{_options(config.map_options)}",
        "size": _plural(described.get("parameters"), "parameter"),
        "maps read": supports_in_words(config),
        "read by the target itself": native_in_words(config) or "nothing",
        "λ": f"{config.ridge_lambda:g}" if config.ridge_lambda is not None else None,
        "cost of a conversion": f"{percent(share)} of the operations of the target's prefill of {length:,} tokens"
        if share is not None and length
        else None,
        "calibration text": calibration.get("dataset"),
        "calibration tokens": f"{tokens['fit']:,} fitted, {tokens.get('heldout', 0):,} held out" if tokens else None,
        "sequences": _sequences(calibration),
        "training after the fit": f"{training.get('steps')} steps, losses {training.get('losses')}"
        if training
        else None,
        "R² held out": f"{heldout['keys_mean']:.3f} (keys), {heldout['values_mean']:.3f} (values)"
        if {"keys_mean", "values_mean"} <= heldout.keys()
        else None,
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    return [(name, str(value)) for name, value in facts.items() if value]


def _counted(config: KVMapperConfig) -> dict[str, Any]:
    """Size and cost, from the configuration alone."""
    from .costs import conversion_flops
    from .mapper import KVMapper
    from .recipes import CONTEXT_LENGTH

    if not config.support:
        return {}
    with torch.device("meta"):
        parameters = KVMapper(config).num_parameters()
    try:
        share = conversion_flops(config, CONTEXT_LENGTH).share_of_prefill
    except KVTransferError:  # a target that this release of transformers doesn't know, for example
        share = None
    return {"parameters": parameters, "cost_share": share, "cost_tokens": CONTEXT_LENGTH}


def supports_in_words(config: KVMapperConfig) -> str:
    """What the maps of a mapper read, in one phrase."""
    supports = [support for layer in config.supports() for support in (layer or {}).values()]
    if not supports:
        return "nothing: there are no maps"
    counts = [len(support.layers) for support in supports]
    most, least = max(counts), min(counts)
    parts = [f"{least} to {most} source layers each" if least != most else _plural(most, "source layer") + " each"]
    if most:
        heads = {support.heads for support in supports if support.layers}
        parts.append(
            " or ".join({"full": "all KV heads", "local": "their own KV head"}[name] for name in sorted(heads))
        )
    if any(support.joint for support in supports):
        parts.append("keys and values together")
    if window := max(support.window for support in supports):
        parts.append(f"also of the {_plural(window, 'token')} before")
    if any(support.anchor for support in supports):
        parts.append("and what the target's own layers put out")
    return ", ".join(parts)


def native_in_words(config: KVMapperConfig) -> str:
    """What the target reads itself in a conversion, in one phrase; empty if nothing."""
    parts = []
    if config.anchor_layers is not None:
        if config.anchor_start:
            run = (
                f"{_plural(config.anchor_layers, 'layer')} from layer {config.anchor_start} on, from a predicted stream"
            )
        else:
            numbered = "its embedding", "its first layer"
            run = (*numbered, f"its first {config.anchor_layers} layers")[min(config.anchor_layers, 2)]
        parts.append(f"{run}, over the whole context")
    if config.exact_prefix:
        parts.append(f"the first {_plural(config.exact_prefix, 'token')}")
    if config.exact_suffix:
        parts.append(f"the last {_plural(config.exact_suffix, 'token')}")
    return " and ".join(parts)


def measure_groups(measures: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    One table of conditions by measures for look-ups, one for text, one for other tasks.

    Args:
        measures (`Sequence[dict]`): of a report, or of the summary that a configuration holds.

    Returns:
        `list[dict]`: `title`, `header` and `rows` of each table that isn't empty.
    """
    groups = []
    for kind, title in _TITLES.items():
        of_kind = [measure for measure in measures if measure["kind"] == kind]
        names = list(dict.fromkeys(name for measure in of_kind for name in conditions_of(measure)))
        if not names:
            continue
        header = ["condition", *(_titled(measure) for measure in of_kind)]
        rows = [
            [
                f"**{name}**" if name == "transferred" else name,
                *(figure(conditions_of(measure).get(name), measure["unit"]) for measure in of_kind),
            ]
            for name in names
        ]
        if any(measure.get("chance") is not None for measure in of_kind):
            chances = (measure.get("chance") for measure in of_kind)
            rows.append(["by chance", *("–" if chance is None else percent(chance) for chance in chances)])
        groups.append({"title": title, "header": header, "rows": rows})
    return groups


def conditions_of(measure: dict[str, Any]) -> dict[str, Any]:
    """The conditions of a measure by name; a summary holds only three, and without intervals."""
    if "conditions" in measure:
        return dict(measure["conditions"])
    names = {"source alone": "source_alone", "target native": "native", "transferred": "transferred"}
    return {name: {"value": measure.get(key)} for name, key in names.items()}


def shares_kept(measures: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Per measure what is kept of the gap, of the context's value, of its content, and above chance."""
    rows = [[_titled(one), *(figure(one.get(name)) for name in SHARES)] for one in measures]
    return [row for row in rows if set(row[1:]) != {"–"}]


def likeness(fidelity: dict[str, Any] | None, summary: dict[str, Any] | None = None) -> list[tuple[str, str]]:
    """
    How near converted entries are to native ones.

    Args:
        fidelity (`dict`, *optional*): the report's section.
        summary (`dict`, *optional*): without it, the summary that a configuration holds.
    """
    found: dict[str, Any] = {}
    if fidelity:
        found = {
            "R² of keys, mean over layers and heads": mean_of(fidelity["r2"]["keys"]),
            "R² of values, likewise": mean_of(fidelity["r2"]["values"]),
            "cosine of attention outputs, likewise": mean_of(fidelity["cosine"]),
        }
    rows = [(name, f"{value:.3f}") for name, value in found.items() if value is not None]
    other = fidelity or summary or {}
    kl, agreement = (
        one if isinstance(one, dict) else {"value": one} for one in (other.get("kl"), other.get("agreement"))
    )
    rows.append(("KL of next-token distributions, native to transferred, nats per token", figure(kl, "")))
    rows.append(("same most likely next token", figure(agreement)))
    return [row for row in rows if row[1] != "–"]


def mean_of(nested: Any) -> float | None:
    """The mean of all numbers in nested lists, or `None` if there are none."""
    numbers = list(_numbers(nested))
    return sum(numbers) / len(numbers) if numbers else None


def _numbers(nested: Any) -> Iterator[float]:
    if isinstance(nested, list | tuple):
        for one in nested:
            yield from _numbers(one)
    elif is_number(nested):
        yield float(nested)


def figure(value: dict[str, Any] | None, unit: str = SHARE) -> str:
    """A figure, with its interval where it has one; a dash where it is undefined."""
    numbers = [(value or {}).get(name) for name in ("value", "low", "high")]
    if not is_number(numbers[0]):
        return "–"
    # What rounds to zero from below is zero.
    texts = [re.sub(r"^-(?=[0.]+( %)?$)", "", shown(one, unit)).replace("-", "−") for one in numbers if is_number(one)]
    return f"{texts[0]} [{texts[1].removesuffix(' %')}, {texts[2].removesuffix(' %')}]" if len(texts) == 3 else texts[0]


def is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _titled(measure: dict[str, Any]) -> str:
    unit = "" if measure["unit"] == SHARE else f", {measure['unit']}"
    return f"{measure['task']}: {measure['metric']}{unit} (n = {measure['n']:,})"


def _sequences(calibration: dict[str, Any]) -> str | None:
    if not calibration.get("sequences"):
        return None
    stride = calibration.get("token_stride", 1)
    every = "" if stride == 1 else f", of which every {stride}th token is used"
    return f"{calibration['sequences']:,} of {calibration.get('sequence_length', 0):,} tokens{every}"


def _options(options: dict[str, Any]) -> str:
    return f" ({', '.join(f'{name} = {value}' for name, value in options.items())})" if options else ""


def _plural(number: Any, noun: str) -> str:
    return "" if number is None else f"{number:,} {noun}{'' if number == 1 else 's'}"
