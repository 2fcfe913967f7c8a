"""The command line: `hf-kvtransfer check | fit | train | generate | demo`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from ._version import __version__
from .cli_bench import bench
from .cli_card import card
from .cli_check import check
from .cli_evaluate import evaluate
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
    typed_errors,
)
from .cli_push import push
from .harness.command import lm_eval


app = typer.Typer(
    help="Move a conversation between language models by converting its KV cache instead of prefilling it again.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.command()(bench)
app.command()(card)
app.command()(check)
app.command()(evaluate)
app.command()(fit)
app.command()(push)
# Their arguments are those of other libraries' own parsers, which also show them.
_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
app.command("lm-eval", context_settings=_PASSED_ON)(lm_eval)
app.command(context_settings=_PASSED_ON)(train)


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
    from .explanation import in_use
    from .loading import load_pair, load_tokenizer
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
        pair = (source, source_revision), (target, target_revision)
        reader, writer = load_pair(*pair, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
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
        print(in_use(loaded.config))


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
