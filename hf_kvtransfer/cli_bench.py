"""The command `hf-kvtransfer bench`: how long a conversion takes, against the target's prefill and the floor."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from .cli_options import (
    Device,
    Source,
    SourceRevision,
    Target,
    TargetRevision,
    Trust,
    fail,
    in_bytes,
    typed_errors,
)


_MOST_THREADS = 1024
"""As many as large machines have; far more of them bring the process down."""


def bench(
    source: Source,
    target: Target,
    mapper: Annotated[
        str | None, typer.Argument(help="The mapper of this pair; with --random only its recipe is used.")
    ] = None,
    random: Annotated[
        bool, typer.Option("--random", help="Random weights for models and mapper: only configurations are read.")
    ] = False,
    lengths: Annotated[str, typer.Option(help="Tokens of the contexts, separated by commas.")] = "64,256,1024",
    batch_size: Annotated[int, typer.Option(min=1, help="Contexts at a time.")] = 1,
    trials: Annotated[int, typer.Option(min=1, help="How often each way is timed; medians are shown.")] = 5,
    k: Annotated[int | None, typer.Option(min=0, help="With --random: source layers per map; 8 or all.")] = None,
    heads: Annotated[str, typer.Option(help='With --random: "full" or "local".')] = "full",
    anchor_layers: Annotated[int | None, typer.Option(min=0, help="With --random: layers the target runs.")] = None,
    anchor_start: Annotated[int, typer.Option(min=0, help="With --random: the first of these.")] = 0,
    dtype: Annotated[str, typer.Option(help='Of models and mapper: "bfloat16", "float32", …')] = "float32",
    device: Device = None,
    threads: Annotated[
        int | None, typer.Option(min=1, max=_MOST_THREADS, help="Of the CPU; torch's own choice by default.")
    ] = None,
    memory: Annotated[bool, typer.Option(help="Measure peak memory, too.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
    mapper_revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the mapper.")] = None,
    source_revision: SourceRevision = None,
    target_revision: TargetRevision = None,
    trust_remote_code: Trust = False,
) -> None:
    """Time conversion against target prefill by context length, with the floor that this machine sets."""
    import torch

    from .latency import measure_latency
    from .loading import load_config, load_pair
    from .mapper import KVMapper

    with typed_errors():
        if mapper is None and not random:
            raise typer.BadParameter("Give the mapper of this pair, or --random to measure before one is fitted.")
        if json_file is not None:
            _check_file(json_file)
        tokens = parsed_lengths(lengths)
        computed_in, on = parsed_dtype(dtype), parsed_device(device)
        if threads is not None:
            torch.set_num_threads(threads)
        if random:
            recipe = {"k": k, "heads": heads, "anchor_layers": anchor_layers, "anchor_start": anchor_start}
            configs = [
                load_config(name, revision, trust_remote_code)
                for name, revision in ((source, source_revision), (target, target_revision))
            ]
            given = None if mapper is None else KVMapper.from_pretrained(mapper, revision=mapper_revision or "main")
            models, used = _random_pair(configs, tokens, given, recipe, computed_in, on)
        else:
            used = KVMapper.from_pretrained(mapper, revision=mapper_revision or "main", dtype=computed_in).to(on)
            pair = (source, source_revision), (target, target_revision)
            models = load_pair(*pair, dtype=dtype, device=str(on), trust_remote_code=trust_remote_code)
        rows = measure_latency(models[0], models[1], used, tokens, batch_size=batch_size, trials=trials, memory=memory)
        if json_file is not None:
            json_file.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
        print(latency_tables(rows))


def _check_file(path: Path) -> None:
    """Fails unless a file can be written; before it is measured, not after. What is there stays as it is."""
    try:
        if not path.absolute().parent.is_dir():
            fail(f"There is no folder {path.parent} to write {path.name} to; make it first.")
        existed = path.exists()
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except (OSError, ValueError) as error:
        fail(f"--json {path} can't be written ({getattr(error, 'strerror', None) or error}); name another file.")


def _random_pair(
    configs: list[Any], lengths: list[int], mapper: Any, recipe: dict[str, Any], dtype: Any, device: Any
) -> tuple[list[Any], Any]:
    """Two models and a mapper of random weights; the recipe is that of a given mapper, or as asked for."""
    from .geometry import ModelGeometry
    from .latency.measure import check_lengths
    from .latency.random_pair import random_mapper, random_model, recipe_fields
    from .planning import uniform_support

    check_lengths(lengths, *configs)
    geometries = [ModelGeometry.from_config(config) for config in configs]
    if mapper is not None:
        fields = recipe_fields(mapper.config)
    else:
        k = min(8, geometries[0].num_layers) if recipe["k"] is None else recipe["k"]
        fields = uniform_support(geometries[0], geometries[1], **{**recipe, "k": k})
    models = [random_model(config, dtype, device) for config in configs]
    return models, random_mapper(models[0], models[1], fields, dtype, device)


def latency_tables(rows: list[dict[str, Any]]) -> str:
    """
    What `bench` prints.

    Args:
        rows (`list[dict]`): from [`measure_latency`].
    """
    from .tables import table

    first = rows[0]
    conversion = table(
        ["tokens", "prefill ms", "of floor", "conversion ms", "of floor", "warm", "counted", "source ms", "cold"],
        [
            [
                f"{row['context']:,}",
                _ms(row["target_prefill"]),
                f"{row['target_prefill_to_floor']:.2f} ×",
                _ms(row["conversion"]),
                f"{row['conversion_to_floor']:.2f} ×",
                f"{row['warm_speedup']:.2f} ×",
                f"{row['counted_speedup']:.2f} ×",
                _ms(row["source_prefill"]),
                f"{row['cold_speedup']:.2f} ×",
            ]
            for row in rows
        ],
    )
    first_token = table(
        ["tokens", "first token ms", "converted ms", "speed-up", "prefill peak", "conversion peak", "cache"],
        [
            [
                f"{row['context']:,}",
                _ms(row["target_first_token"]),
                _ms(row["converted_first_token"]),
                f"{row['first_token_speedup']:.2f} ×",
                _bytes(row["target_prefill_peak"]),
                _bytes(row["conversion_peak"]),
                in_bytes(row["cache_bytes"]),
            ]
            for row in rows
        ],
    )
    threads = "" if first["device"] != "cpu" else f", {first['threads']} thread{'s' if first['threads'] > 1 else ''}"
    return (
        f"{first['device']}, {first['dtype']}{threads}, batch {first['batch_size']}, medians of {first['trials']}.\n"
        f"Measured here: {first['matmul_flops'] / 1e12:.3g} TFLOP/s in large products, "
        f"{rows[-1]['copy_bandwidth'] / 1e9:.3g} GB/s in copies.\n\n{conversion}\n\n{first_token}\n\n"
        "of floor: in times of what products and memory would take at these rates. warm: prefill / conversion of a\n"
        "source cache that is there; counted: what floating-point operations alone would give; cold: with the prefill\n"
        "of the source. first token: of the target, after its prefill or after a conversion. peak: tensors that are\n"
        "there at once, beyond models, mapper and source cache."
    )


def parsed_lengths(value: str) -> list[int]:
    parts = [part.strip().replace("_", "") for part in value.split(",") if part.strip()]
    # No context has as many tokens as a number of ten digits says.
    if not parts or not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts):
        shown = value if len(value) <= 60 else f"{value[:60]} …"
        raise typer.BadParameter(f"{shown!r} is not a list of whole numbers of tokens, such as 64,1024.")
    return list(dict.fromkeys(int(part) for part in parts))


def parsed_dtype(value: str) -> Any:
    import torch

    if value not in ("float32", "bfloat16", "float16", "float64"):
        raise typer.BadParameter(f"{value!r} is not a floating-point dtype of 16 bits or more.")
    return getattr(torch, value)


def parsed_device(value: str | None) -> Any:
    import torch

    try:
        device = torch.device(value or "cpu")
        if device.type == "meta":
            raise NotImplementedError("tensors there have no values, and take no time")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise typer.BadParameter(f"{value!r} is no device of this machine ({reason}); use cpu or cuda.") from error
    # So that tensors' devices compare equal to it.
    return torch.empty(0, device=device).device


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.{2 if seconds < 0.01 else 1 if seconds < 1 else 0}f}"


def _bytes(size: int | None) -> str:
    return "–" if size is None else in_bytes(size)
