"""The command line: `hf-kvtransfer check | fit | train | generate | demo`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from ._version import __version__
from .cli_fit import fit, train
from .cli_options import (
    Device,
    Dtype,
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


app = typer.Typer(
    help="Move a conversation between language models by converting its KV cache instead of prefilling it again.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.command()(fit)
# Its arguments are those of transformers' own parser, which also shows them.
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})(train)


def _version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    pass


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

    with typed_errors():
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
                        in_words(size.parameters),
                        in_bytes(size.size_in_bytes(2)),
                        in_bytes(size.size_in_bytes(4)),
                    ]
                    for size in plan.sizes
                ],
            )
        )
        print(f"\nCalibration statistics: {in_bytes(plan.statistics_bytes)} of memory in float64, half in float32.")
        for note in plan.notes:
            print(f"Note: {note}")
        _print_tokenizers((source, source_revision), (target, target_revision), trust_remote_code)


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

    with typed_errors():
        if prompt is not None and prompt_file is not None:
            raise typer.BadParameter("Give either --prompt or --prompt-file, not both.")
        if prompt_file is not None:
            try:
                prompt = prompt_file.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                fail(f"The prompt could not be read from {prompt_file}: {error}")
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
    with typed_errors():
        run_demo(
            find_family(family),
            source_name=source,
            target_name=target,
            questions_per_kind=questions,
            sequences=sequences,
        )
