"""The commands that make mappers: `hf-kvtransfer fit`, in closed form, and `hf-kvtransfer train`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .cli_options import (
    Device,
    Dtype,
    Source,
    SourceRevision,
    Target,
    TargetRevision,
    Trust,
    in_words,
    parsed_k,
    tokenizer_or_none,
    typed_errors,
)


def fit(
    source: Source,
    target: Target,
    output: Annotated[Path, typer.Argument(help="The folder to save the mapper in.")],
    data: Annotated[
        str | None,
        typer.Option(help="A .txt or .jsonl file, or a dataset on the Hub; FineWeb-Edu, streamed, by default."),
    ] = None,
    data_config: Annotated[str | None, typer.Option(help="The dataset's configuration.")] = None,
    data_split: Annotated[str, typer.Option(help="The dataset's split.")] = "train",
    text_field: Annotated[str, typer.Option(help="The field of a .jsonl file or a dataset that holds the text.")] = (
        "text"
    ),
    preset: Annotated[
        str, typer.Option(help='The recipe: "auto", or a published one, "heo2026" or "cachebridge2026".')
    ] = "auto",
    k: Annotated[
        str, typer.Option(help='Source layers per target layer: a number (0: the anchor alone), "all", or "auto".')
    ] = "auto",
    ridge_lambda: Annotated[float | None, typer.Option(help="λ, on the unnormalised Gram matrix.")] = None,
    heads: Annotated[str | None, typer.Option(help='Source heads that a target head reads: "full" or "local".')] = None,
    joint: Annotated[bool | None, typer.Option(help="Read keys and values together to make either.")] = None,
    window: Annotated[int | None, typer.Option(min=0, help="Previous tokens that are read too.")] = None,
    order: Annotated[str | None, typer.Option(help='How source layers are found: "ranked" or "greedy".')] = None,
    anchor_layers: Annotated[
        str | None, typer.Option(help='Of its own first layers, how many the target runs: a number, or "auto".')
    ] = None,
    anchor_start: Annotated[
        int | None, typer.Option(min=0, help="The first of these; above 0 its input is predicted from the source.")
    ] = None,
    max_cost: Annotated[
        float | None, typer.Option(help="What a conversion may cost, as a share of the target's prefill.")
    ] = None,
    exact_prefix: Annotated[int | None, typer.Option(min=0, help="First tokens the target reads itself.")] = None,
    exact_suffix: Annotated[int | None, typer.Option(min=0, help="Last tokens the target reads itself.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show what was chosen, and what was rejected.")] = False,
    sequences: Annotated[int, typer.Option(help="Calibration sequences.")] = 500,
    sequence_length: Annotated[int, typer.Option(help="Tokens per sequence.")] = 1024,
    token_stride: Annotated[int, typer.Option(help="Keep every n-th token.")] = 4,
    batch_size: Annotated[int | None, typer.Option(help="Sequences per forward pass.")] = None,
    statistics: Annotated[
        Path | None, typer.Option(help="Keep the statistics here; an interrupted fit goes on from there.")
    ] = None,
    save_dtype: Annotated[str, typer.Option(help="Of the mapper's saved weights.")] = "float32",
    source_revision: SourceRevision = None,
    target_revision: TargetRevision = None,
    dtype: Dtype = "auto",
    device: Device = None,
    trust_remote_code: Trust = False,
) -> None:
    """Fit a mapper in closed form and save it; under `torchrun -m` or `accelerate launch -m`, with all processes."""
    import torch

    from .calibration.processes import launched
    from .explanation import explanation, in_use
    from .loading import load_pair, load_tokenizer
    from .mapper import KVMapper
    from .saving import check_writable

    with typed_errors(), launched() as shard:
        chosen = parsed_k(k)
        check_writable(output)
        if save_dtype not in ("float32", "bfloat16", "float16", "float64"):
            raise typer.BadParameter(f"{save_dtype!r} is not a floating-point dtype of 16 bits or more.")
        saved_as = getattr(torch, save_dtype)
        tokenizer = load_tokenizer(source, revision=source_revision, trust_remote_code=trust_remote_code)
        pair = (source, source_revision), (target, target_revision)
        reader, writer = load_pair(*pair, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
        optional: dict[str, Any] = {} if batch_size is None else {"batch_size": batch_size}
        mapper = KVMapper.fit(
            reader,
            writer,
            data,
            tokenizer=tokenizer,
            target_tokenizer=tokenizer_or_none(target, target_revision, trust_remote_code),
            source_revision=source_revision,
            target_revision=target_revision,
            preset=preset,
            k=chosen,
            ridge_lambda=ridge_lambda,
            heads=heads,
            joint=joint,
            window=window,
            order=order,
            anchor_layers=_anchor(anchor_layers),
            anchor_start=anchor_start,
            max_cost=max_cost,
            exact_prefix=exact_prefix,
            exact_suffix=exact_suffix,
            statistics_dir=statistics,
            num_sequences=sequences,
            sequence_length=sequence_length,
            token_stride=token_stride,
            dataset_config=data_config,
            dataset_split=data_split,
            text_field=text_field,
            **optional,
        )
        # All processes have solved the same.
        if shard.rank:
            return
        mapper.to(saved_as).save_pretrained(output)
        if explain:
            print(explanation(mapper.config))
        figures = mapper.config.scores["r2"]
        for split, words in (("fit", "in sample"), ("heldout", "held out")):
            if split in figures:
                print(
                    f"R² {words}: {figures[split]['keys_mean']:.3f} (keys), "
                    f"{figures[split]['values_mean']:.3f} (values)"
                )
        print(
            f"k = {mapper.config.k}, {in_words(mapper.num_parameters())} parameters, fitted on "
            f"{mapper.config.calibration['tokens']['fit']:,} tokens, saved in {output}"
        )
        print(in_use(mapper.config))
        if not mapper.config.anchor_layers:
            print(
                "Look-ups into the context may be lost without layers of the target's own, whatever R² says: measure "
                "them with `hf-kvtransfer evaluate --questions`, or fit with `--anchor-layers 1`."
            )


def _anchor(value: str | None) -> Any:
    if value in (None, "auto"):
        return value
    if not (value.isascii() and value.isdecimal()):
        raise typer.BadParameter(f'{value!r} is not a number of layers or "auto".')
    return int(value)


def train(context: typer.Context) -> None:
    """Train a fitted mapper further, with every argument of transformers' Trainer (`--help` lists them)."""
    from .training.command import train_from_arguments

    with typed_errors():
        train_from_arguments(context.args)
