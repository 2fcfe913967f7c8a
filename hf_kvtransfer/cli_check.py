"""The command `hf-kvtransfer check`: what a pair of models would take, from configurations alone."""

import re
from typing import Annotated, Any

import typer

from .cli_options import (
    Source,
    SourceRevision,
    Target,
    TargetRevision,
    Trust,
    fail,
    in_bytes,
    in_words,
    tokenizer_or_none,
    typed_errors,
)


_LENGTHS = (1024, 4096, 16_384, 32_768)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def check(
    source: Source,
    target: Target,
    k: Annotated[list[int] | None, typer.Option(min=0, help="Show a mapper of this k (repeatable).")] = None,
    heads: Annotated[str, typer.Option(help='Source heads that a target head reads: "full" or "local".')] = "full",
    anchor_layers: Annotated[
        list[int] | None, typer.Option(min=0, help="Of its own layers, how many the target runs (repeatable).")
    ] = None,
    anchor_start: Annotated[int, typer.Option(min=0, help="The first of these.")] = 0,
    max_cost: Annotated[
        float | None, typer.Option(help="What a conversion may cost, as a share of the target's prefill.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Main memory for a fit, beside the two models: 64GiB, 32GB, ….")
    ] = None,
    sequences: Annotated[int, typer.Option(help="Calibration sequences.")] = 500,
    sequence_length: Annotated[int, typer.Option(help="Tokens per sequence.")] = 1024,
    token_stride: Annotated[int, typer.Option(help="Keep every n-th token.")] = 4,
    lengths: Annotated[
        str | None, typer.Option(help="Tokens of the contexts to predict times for, separated by commas.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Contexts at a time.")] = 1,
    hardware: Annotated[
        list[str] | None,
        typer.Option(help='To predict times for (repeatable): "H100", …; "this" measures a few layers here.'),
    ] = None,
    dtype: Annotated[str, typer.Option(help='On "this" hardware: "bfloat16", "float32", …')] = "float32",
    device: Annotated[str | None, typer.Option(help='Of "this" machine: "cuda", "cpu".')] = None,
    threads: Annotated[int | None, typer.Option(min=1, help='Of the CPU of "this" machine.')] = None,
    source_revision: SourceRevision = None,
    target_revision: TargetRevision = None,
    trust_remote_code: Trust = False,
) -> None:
    """Tell from configurations alone whether a pair can be mapped, why not, and what a mapper would take and give."""
    from .latency.measure import check_lengths
    from .loading import load_config
    from .planning import Calibration, chosen_plan, plan_pair, plan_recipes

    with typed_errors():
        if anchor_start and not anchor_layers:
            raise typer.BadParameter("--anchor-start needs --anchor-layers, how many layers run from there on.")
        budget = None if memory is None else parsed_bytes(memory)
        configs = (
            load_config(source, source_revision, trust_remote_code),
            load_config(target, target_revision, trust_remote_code),
        )
        plan = plan_pair(*configs)
        if plan.source is None or plan.target is None:
            for side, name in (("source", source), ("target", target)):
                for reason in plan.refusals[side]:
                    print(f"The {side} {name} can't be mapped: {reason}")
            raise typer.Exit(1)
        tokens = _lengths(lengths, configs)
        check_lengths(tokens, *configs)
        calibration = Calibration(sequences, sequence_length, token_stride)
        plans = plan_recipes(
            plan,
            ks=k,
            heads=heads,
            anchors=anchor_layers or (None,),
            anchor_start=anchor_start,
            calibration=calibration,
            memory=budget,
            max_cost=max_cost,
        )
        print(_sides(((f"source {source}", plan.source), (f"target {target}", plan.target))))
        print("\nThe two can be mapped, by a linear mapper of each of these recipes:\n")
        print(_recipes(plans, memory is not None or max_cost is not None))
        shown = chosen_plan(plans)
        if shown.excess:
            print("\nNone of these keeps to the budget; what follows is of the cheapest.")
        print(f"\n{_fit(shown, plan, calibration)}\n")
        for note in plan.notes:
            print(f"Note: {note}")
        here = (configs, dtype, device, threads)
        print(_predictions(shown, plan, tokens, batch_size, hardware, here))
        _print_tokenizers((source, source_revision), (target, target_revision), trust_remote_code)


def _lengths(given: str | None, configs: Any) -> list[int]:
    from .cli_bench import parsed_lengths
    from .modules import text_config

    if given is not None:
        return parsed_lengths(given)
    limits = [getattr(text_config(config), "max_position_embeddings", None) or _LENGTHS[-1] for config in configs]
    most = min(limits)
    return [length for length in _LENGTHS if length <= most] or [most]


def _sides(sides: Any) -> str:
    from .tables import table

    rows = []
    for name, geometry in sides:
        heads = sorted({(layer.kv_heads, layer.head_dim) for layer in geometry.layers})
        shapes = ", ".join(f"{kv_heads} × {head_dim}" for kv_heads, head_dim in heads)
        sliding = sum(layer.sliding_window is not None for layer in geometry.layers)
        rotary = sum(layer.rotary for layer in geometry.layers)
        rows.append([name, geometry.model_type, str(geometry.num_layers), shapes, str(sliding), str(rotary)])
    return table(["", "type", "layers", "KV heads × head_dim", "sliding", "with RoPE"], rows)


def _recipes(plans: Any, has_budget: bool) -> str:
    from .recipes import CONTEXT_LENGTH
    from .tables import table

    rows = []
    for plan in plans:
        name = _name(plan)
        rows.append(
            [
                name,
                in_words(plan.parameters),
                in_bytes(2 * plan.parameters),
                in_bytes(4 * plan.parameters),
                in_bytes(plan.statistics_bytes),
                in_bytes(plan.fit_memory),
                in_flops(plan.cost.total / CONTEXT_LENGTH),
                f"{100 * plan.cost.share_of_prefill:.1f} %",
                *([f"too much {' and '.join(plan.excess)}" if plan.excess else "yes"] if has_budget else []),
            ]
        )
    header = ["recipe", "parameters", "bfloat16", "float32", "statistics", "fit memory", "per token", "of a prefill"]
    return table([*header, *(["within budget"] if has_budget else [])], rows) + (
        "\n\nstatistics: both splits, in float64 (half in float32). fit memory: these, solving and the mapper, beside\n"
        "the two models. per token: floating-point operations of a conversion of "
        f"{CONTEXT_LENGTH:,} tokens, and what that is of\nthe target's prefill."
    )


def _name(plan: Any) -> str:
    anchor = "" if plan.anchor_layers is None else f", anchor {plan.anchor_layers}"
    start = f" from {plan.anchor_start}" if plan.anchor_start else ""
    return f"k = {plan.k}{'' if plan.heads == 'full' else ', local heads'}{anchor}{start}"


def _fit(shown: Any, plan: Any, calibration: Any) -> str:
    from .recipes import CONTEXT_LENGTH

    moved = shown.conversion_bytes(plan.source, plan.target, CONTEXT_LENGTH)
    return (
        f"Fitting {_name(shown)} on {calibration.sequences:,} × {calibration.sequence_length:,} tokens: "
        f"{in_flops(shown.forward_flops)} in the passes of both models,\n"
        f"{in_flops(shown.sum_flops)} in the statistics, {in_flops(shown.solve_flops)} to solve them once; "
        f"{in_bytes(shown.sum_bytes)} of statistics read and written.\n"
        f"Converting {CONTEXT_LENGTH:,} tokens: {in_flops(shown.cost.total)}; {in_bytes(moved)} of caches and weights "
        "in bfloat16."
    )


def _predictions(shown: Any, plan: Any, tokens: Any, batch: int, hardware: Any, here: Any) -> str:
    from .latency.hardware import THIS_MACHINE, hardware_named, known_hardware
    from .latency.prediction import Roofline
    from .tables import table

    rows = []
    for name in hardware or list(known_hardware()):
        if name.strip().lower() == THIS_MACHINE:
            predicted: Any = _measured(shown, plan, batch, *here)
            title = f"this machine, {here[1]}"
        else:
            named = hardware_named(name)
            predicted, title = Roofline(plan, shown, named, batch_size=batch), named.name
        cells = []
        for length in tokens:
            native, converted = predicted.target_prefill(length), predicted.conversion(length)
            cold = native / (converted + predicted.source_prefill(length))
            cells.append(f"{_time(native)} → {_time(converted)}: {native / converted:.1f} × ({cold:.1f} ×)")
        rows.append([title, *cells])
    return (
        f"Predicted for {_name(shown)}: target prefill → conversion, speed-up where the source's cache is there (where "
        "it isn't):\n\n"
        + table(["tokens", *[f"{length:,}" for length in tokens]], rows)
        + "\n\nIn bfloat16 where nothing else is said, from vendors' peak rates and the shares of them that are "
        "commonly\nreached. With --hardware this, a few layers of random weights are run here and scaled to the whole."
        "\n"
    )


def _measured(shown: Any, plan: Any, batch: int, configs: Any, dtype: str, device: Any, threads: Any) -> Any:
    import torch

    from .cli_bench import parsed_device, parsed_dtype
    from .latency.this_machine import ThisMachine
    from .planning import uniform_support

    if threads is not None:
        torch.set_num_threads(threads)
    fields = uniform_support(
        plan.source,
        plan.target,
        shown.k,
        heads=shown.heads,
        anchor_layers=shown.anchor_layers,
        anchor_start=shown.anchor_start,
    )
    source, target = configs
    return ThisMachine(source, target, fields, parsed_dtype(dtype), parsed_device(device), batch)


def _print_tokenizers(source: tuple[str, str | None], target: tuple[str, str | None], trust_remote_code: bool) -> None:
    """Compares the tokenizers of both sides where both have one at hand; different ones rule the pair out."""
    from .geometry import tokenizer_fingerprint

    tokenizers = [tokenizer_or_none(name, revision, trust_remote_code) for name, revision in (source, target)]
    if any(tokenizer is None for tokenizer in tokenizers):
        print("Not every side has its tokenizer with it, so `fit` will have to compare them.")
        return
    one, other = (tokenizer_fingerprint(tokenizer) for tokenizer in tokenizers)
    if one != other:
        fail(
            f"The tokenizers of {source[0]} and {target[0]} have different vocabularies or merges; expected the same. "
            "A cache can only be converted between models that read the same token ids: choose a pair with one "
            "tokenizer."
        )
    print("The two share a tokenizer.")


def parsed_bytes(value: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", value.lower())
    if match is None or match[2] not in _UNITS or not float(match[1]):
        raise typer.BadParameter(f"{value!r} is not an amount of memory, such as 64GiB or 32GB.")
    return float(match[1]) * _UNITS[match[2]]


def in_flops(number: float) -> str:
    for unit, name in ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number / 1e3:.3g} kFLOP"


def _time(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:.0f} s"
    if seconds >= 1:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.2g} ms"
