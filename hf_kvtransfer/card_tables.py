"""What the tables of a model card say, from a mapper's configuration and its report."""

from collections.abc import Iterator
from typing import Any

import torch

from .config import KVMapperConfig
from .errors import KVTransferError
from .report.wording import SHARE, shown, with_interval
from .tables import percent


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
        "calibration tokens": f"{tokens['fit']:,} fitted, {tokens.get('heldout') or 0:,} held out"
        if tokens.get("fit") is not None
        else None,
        "sequences": _sequences(calibration),
        "training after the fit": f"{training.get('steps')} steps, losses {training.get('losses')}"
        if training
        else None,
        "R² held out": f"{heldout['keys_mean']:.3f} (keys), {heldout['values_mean']:.3f} (values)"
        if None not in (heldout.get("keys_mean"), heldout.get("values_mean"))
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


def likeness(fidelity: dict[str, Any]) -> list[tuple[str, str]]:
    """
    How near converted entries are to native ones, as rows of a table.

    Args:
        fidelity (`dict`): the report's section, or `kl` and `agreement` alone, as a configuration holds them.
    """
    r2 = fidelity.get("r2") or {}
    means = {
        "R² of keys, mean over layers and heads": mean_of(r2.get("keys")),
        "R² of values, likewise": mean_of(r2.get("values")),
        "cosine of attention outputs, likewise": mean_of(fidelity.get("cosine")),
    }
    rows = [(name, shown(value, "")) for name, value in means.items()]
    rows.append(("KL of next-token distributions, native to transferred, nats per token", _figure(fidelity, "kl", "")))
    rows.append(("same most likely next token", _figure(fidelity, "agreement", SHARE)))
    return [row for row in rows if row[1] != "–"]


def _figure(fidelity: dict[str, Any], name: str, unit: str) -> str:
    figure = fidelity.get(name) or {}
    return with_interval({"value": figure.get("value"), "low": figure.get("low"), "high": figure.get("high")}, unit)


def mean_of(nested: Any) -> float | None:
    """The mean of all numbers in nested lists, or `None` if there are none."""
    numbers = list(_numbers(nested))
    return sum(numbers) / len(numbers) if numbers else None


def _numbers(nested: Any) -> Iterator[float]:
    if isinstance(nested, list | tuple):
        for one in nested:
            yield from _numbers(one)
    elif nested is not None:
        yield float(nested)


def _sequences(calibration: dict[str, Any]) -> str | None:
    if not calibration.get("sequences"):
        return None
    stride = calibration.get("token_stride") or 1
    every = "" if stride == 1 else f", one in {stride} of which is used"
    return f"{calibration['sequences']:,} of {calibration.get('sequence_length') or 0:,} tokens{every}"


def _options(options: dict[str, Any]) -> str:
    return f" ({', '.join(f'{name} = {value}' for name, value in options.items())})" if options else ""


def _plural(number: Any, noun: str) -> str:
    return "" if number is None else f"{number:,} {noun}{'' if number == 1 else 's'}"
