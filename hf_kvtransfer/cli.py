"""The command line: `hf-kvtransfer check | fit | generate | demo`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from ._version import __version__
from .errors import KVTransferError


app = typer.Typer(
    help="Move a conversation between language models by converting its KV cache instead of prefilling it again.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Source = Annotated[str, typer.Argument(help="The model that reads: a folder or a name on the Hub.")]
Target = Annotated[str, typer.Argument(help="The model that goes on: a folder or a name on the Hub.")]
SourceRevision = Annotated[str | None, typer.Option(help="Branch, tag or commit of the source on the Hub.")]
TargetRevision = Annotated[str | None, typer.Option(help="Branch, tag or commit of the target on the Hub.")]
Dtype = Annotated[str, typer.Option(help='Of both models\' weights: "auto", "bfloat16", "float32", …')]
Device = Annotated[str | None, typer.Option(help='"cuda", "cpu", … or a device map such as "auto".')]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run model code that comes with a checkpoint.")]


def _version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    pass


@contextmanager
def _typed_errors() -> Iterator[None]:
    """What a user can mend is a sentence on standard error, not a traceback; progress bars are for terminals."""
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    except KVTransferError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        _fail("Interrupted.", code=130)


def _fail(sentence: str, code: int = 1) -> NoReturn:
    print(f"hf-kvtransfer: {sentence}", file=sys.stderr)
    raise typer.Exit(code)


def _k(value: str) -> Any:
    if value in ("auto", "all"):
        return value
    if not (value.isascii() and value.isdecimal()) or int(value) < 1:
        raise typer.BadParameter(f'{value!r} is not a number of layers, "all" or "auto".')
    return int(value)


@app.command()
def check(
    source: Source,
    target: Target,
    k: Annotated[list[int] | None, typer.Option(min=1, help="Show the mapper's size at this k (repeatable).")] = None,
    source_revision: SourceRevision = None,
    target_revision: TargetRevision = None,
    trust_remote_code: Trust = False,
) -> None:
    """Tell from configurations alone whether a pair can be mapped, why not, and how large the mapper will be."""
    from .loading import load_config
    from .planning import plan_pair
    from .tables import table

    with _typed_errors():
        plan = plan_pair(
            load_config(source, source_revision, trust_remote_code),
            load_config(target, target_revision, trust_remote_code),
            k,
        )
        if plan.source is None or plan.target is None:
            for side, name in (("source", source), ("target", target)):
                for reason in plan.refusals[side]:
                    print(f"The {side} {name} can't be mapped: {reason}")
            raise typer.Exit(1)
        rows = []
        for name, geometry in ((f"source {source}", plan.source), (f"target {target}", plan.target)):
            heads = sorted({(layer.kv_heads, layer.head_dim) for layer in geometry.layers})
            shapes = ", ".join(f"{kv_heads} × {head_dim}" for kv_heads, head_dim in heads)
            sliding = sum(layer.sliding_window is not None for layer in geometry.layers)
            rotary = sum(layer.rotary for layer in geometry.layers)
            rows.append([name, geometry.model_type, str(geometry.num_layers), shapes, str(sliding), str(rotary)])
        print(table(["", "type", "layers", "KV heads × head_dim", "sliding", "with RoPE"], rows))
        print("\nThe two can be mapped. A full-head linear mapper:\n")
        print(
            table(
                ["k", "parameters", "bfloat16", "float32"],
                [
                    [
                        str(size.k),
                        _count(size.parameters),
                        _bytes(size.size_in_bytes(2)),
                        _bytes(size.size_in_bytes(4)),
                    ]
                    for size in plan.sizes
                ],
            )
        )
        print(f"\nCalibration statistics: {_bytes(plan.statistics_bytes)} of memory in float64, half in float32.")
        for note in plan.notes:
            print(f"Note: {note}")
        _print_tokenizers((source, source_revision), (target, target_revision), trust_remote_code)


def _print_tokenizers(source: tuple[str, str | None], target: tuple[str, str | None], trust_remote_code: bool) -> None:
    """Compares the tokenizers of both sides where both have one at hand; different ones rule the pair out."""
    from .geometry import tokenizer_fingerprint

    tokenizers = [_tokenizer_or_none(name, revision, trust_remote_code) for name, revision in (source, target)]
    if any(tokenizer is None for tokenizer in tokenizers):
        print("Not every side has its tokenizer with it, so `fit` will have to compare them.")
        return
    one, other = (tokenizer_fingerprint(tokenizer) for tokenizer in tokenizers)
    if one != other:
        _fail(
            f"The tokenizers of {source[0]} and {target[0]} have different vocabularies or merges; expected the same. "
            "A cache can only be converted between models that read the same token ids: choose a pair with one "
            "tokenizer."
        )
    print("The two share a tokenizer.")


@app.command()
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
    preset: Annotated[str, typer.Option(help='The recipe: "heo2026".')] = "heo2026",
    k: Annotated[str, typer.Option(help='Source layers per target layer: a number, "all", or "auto".')] = "auto",
    ridge_lambda: Annotated[float, typer.Option(help="λ, on the unnormalised Gram matrix.")] = 0.01,
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
    """Fit a mapper in closed form and save it."""
    import torch

    from .loading import load_model, load_tokenizer
    from .mapper import KVMapper
    from .saving import check_writable

    with _typed_errors():
        chosen = _k(k)
        check_writable(output)
        if save_dtype not in ("float32", "bfloat16", "float16", "float64"):
            raise typer.BadParameter(f"{save_dtype!r} is not a floating-point dtype of 16 bits or more.")
        saved_as = getattr(torch, save_dtype)
        tokenizer = load_tokenizer(source, revision=source_revision, trust_remote_code=trust_remote_code)
        reader, writer = (
            load_model(name, revision=revision, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
            for name, revision in ((source, source_revision), (target, target_revision))
        )
        optional: dict[str, Any] = {} if batch_size is None else {"batch_size": batch_size}
        mapper = KVMapper.fit(
            reader,
            writer,
            data,
            tokenizer=tokenizer,
            target_tokenizer=_tokenizer_or_none(target, target_revision, trust_remote_code),
            source_revision=source_revision,
            target_revision=target_revision,
            preset=preset,
            k=chosen,
            ridge_lambda=ridge_lambda,
            statistics_dir=statistics,
            num_sequences=sequences,
            sequence_length=sequence_length,
            token_stride=token_stride,
            dataset_config=data_config,
            dataset_split=data_split,
            text_field=text_field,
            **optional,
        )
        mapper.to(saved_as).save_pretrained(output)
        figures = mapper.config.scores["r2"]
        for split, words in (("fit", "in sample"), ("heldout", "held out")):
            if split in figures:
                print(
                    f"R² {words}: {figures[split]['keys_mean']:.3f} (keys), "
                    f"{figures[split]['values_mean']:.3f} (values)"
                )
        print(
            f"k = {mapper.config.k}, {_count(mapper.num_parameters())} parameters, fitted on "
            f"{mapper.config.calibration['tokens']['fit']:,} tokens, saved in {output}"
        )


def _tokenizer_or_none(name: str, revision: str | None, trust_remote_code: bool) -> Any:
    """A target checkpoint need not carry its tokenizer; where it does, `fit` compares the two."""
    from .loading import load_tokenizer

    try:
        return load_tokenizer(name, revision=revision, trust_remote_code=trust_remote_code)
    except KVTransferError:
        if any(Path(name).glob("tokenizer*")):  # it has one, which is damaged
            raise
        return None


@app.command()
def generate(
    source: Source,
    target: Target,
    mapper: Annotated[str, typer.Argument(help="The mapper of this pair: a folder or a name on the Hub.")],
    prompt: Annotated[str | None, typer.Option(help="What the source reads; standard input by default.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A file with what the source reads.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Show source alone and target native beside it.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="How much is written.")] = 64,
    sample: Annotated[bool, typer.Option("--sample", help="Sample instead of taking the most likely token.")] = False,
    source_revision: SourceRevision = None,
    target_revision: TargetRevision = None,
    mapper_revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the mapper.")] = None,
    dtype: Dtype = "auto",
    device: Device = None,
    trust_remote_code: Trust = False,
) -> None:
    """Let the source read a prompt and the target go on from the converted cache."""
    from .comparison import compare_generations
    from .loading import load_model, load_tokenizer
    from .mapper import KVMapper
    from .tables import table

    with _typed_errors():
        if prompt is not None and prompt_file is not None:
            raise typer.BadParameter("Give either --prompt or --prompt-file, not both.")
        if prompt_file is not None:
            try:
                prompt = prompt_file.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                _fail(f"The prompt could not be read from {prompt_file}: {error}")
        text = sys.stdin.read() if prompt is None else prompt
        loaded = KVMapper.from_pretrained(mapper, revision=mapper_revision or "main")
        tokenizer = load_tokenizer(source, revision=source_revision, trust_remote_code=trust_remote_code)
        reader, writer = (
            load_model(name, revision=revision, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
            for name, revision in ((source, source_revision), (target, target_revision))
        )
        results = compare_generations(
            reader,
            writer,
            loaded.to(next(writer.parameters()).device),
            tokenizer,
            text,
            only_transferred=not compare,
            max_new_tokens=max_new_tokens,
            do_sample=sample,
        )
        if not compare:
            print(results[0].text)
            return
        for r in results:
            print(f"{r.name}: {' '.join(r.text.split())}")
        times = [[r.name, f"{1000 * r.prefill_seconds:.1f}", f"{1000 * r.total_seconds:.1f}"] for r in results]
        print(f"\n{table(['', 'prefill ms', 'total ms'], times)}")
        print("\nprefill: until the answering model has a cache of the prompt; for the transfer, the conversion alone.")


@app.command()
def demo(
    family: Annotated[str | None, typer.Option(help="The folder of the tiny family; that of the clone.")] = None,
    source: Annotated[str, typer.Option(help="The member that reads.")] = "small",
    target: Annotated[str, typer.Option(help="The member that answers.")] = "large",
    questions: Annotated[int, typer.Option(min=1, help="Questions of each kind.")] = 40,
    sequences: Annotated[int, typer.Option(help="Calibration sequences of 256 tokens.")] = 500,
) -> None:
    """Fit, save, load, convert and answer on the tiny models that the repository ships."""
    import torch

    from .demo import find_family, run_demo

    # Models this small gain nothing from more threads, and on a busy machine lose much by waiting for them.
    torch.set_num_threads(1)
    with _typed_errors():
        run_demo(
            find_family(family),
            source_name=source,
            target_name=target,
            questions_per_kind=questions,
            sequences=sequences,
        )


def _count(number: int) -> str:
    for unit, name in ((1_000_000_000, "B"), (1_000_000, "M"), (1_000, "k")):
        if number >= unit:
            return f"{number / unit:.2f} {name}"
    return str(number)


def _bytes(number: float) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= unit:
            return f"{number / unit:.2f} {name}"
    return f"{number:.0f} B"
