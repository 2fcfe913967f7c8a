"""The command `hf-kvtransfer evaluate`: from a fitted mapper to a folder with report, figures and card."""

import dataclasses
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from .cli_bench import parsed_lengths
from .cli_options import Device, Dtype, Source, SourceRevision, Target, TargetRevision, Trust, fail, typed_errors
from .errors import MapperFileError


_WORK = ".evaluation"
_SHARES = (
    ("gap_recovered", "gap recovered"),
    ("context_value_kept", "context value kept"),
    ("normalised_retention", "retention above chance"),
)


def evaluate(
    source: Source,
    target: Target,
    mapper: Annotated[str, typer.Argument(help="The mapper of this pair: a folder or a name on the Hub.")],
    data: Annotated[str, typer.Option(help="Held-out text: a .txt or .jsonl file, or a dataset on the Hub.")],
    data_config: Annotated[str | None, typer.Option(help="The dataset's configuration.")] = None,
    data_split: Annotated[str, typer.Option(help="The dataset's split.")] = "test",
    text_field: Annotated[str, typer.Option(help="The field of a .jsonl file or a dataset that holds the text.")] = (
        "text"
    ),
    questions: Annotated[Path | None, typer.Option(help="A .jsonl file of questions about documents.")] = None,
    questions_per_kind: Annotated[int | None, typer.Option(min=1, help="At most so many of each kind.")] = None,
    choices: Annotated[Path | None, typer.Option(help="A .jsonl file of questions with several options.")] = None,
    shots: Annotated[int, typer.Option(help="The first of --choices, shown with their answers.")] = 0,
    prefix: Annotated[int, typer.Option(help="Tokens of context.")] = 1024,
    scored: Annotated[int | None, typer.Option(help="Tokens scored after it; as many by default.")] = None,
    chunks: Annotated[int, typer.Option(help="Chunks of text at most.")] = 32,
    lengths: Annotated[
        str | None, typer.Option(help="Other lengths of context, separated by commas; a quarter and half of --prefix.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Chunks at once.")] = 1,
    statistics: Annotated[
        Path | None, typer.Option(help="Of the fit: for the R² between single layers, and the anchor alone.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="The folder for report, figures and card, and a copy of the mapper; its own by default."),
    ] = None,
    figures: Annotated[
        bool | None, typer.Option("--figures/--no-figures", help="Draw figures; if matplotlib is there by default.")
    ] = None,
    bench: Annotated[bool, typer.Option("--bench", help="Time conversion against prefill, too.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Start anew what was interrupted.")] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the random mapper and of the intervals.")] = 0,
    source_revision: SourceRevision = None,
    target_revision: TargetRevision = None,
    mapper_revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the mapper.")] = None,
    dtype: Dtype = "auto",
    device: Device = None,
    trust_remote_code: Trust = False,
) -> None:
    """Measure what a mapper keeps, beside the models alone and controls, and write report, figures and card."""
    from .calibration.texts import describe_source, iter_texts
    from .cards import write_card
    from .evaluation import evaluate_mapper, read_choices, read_questions
    from .evaluation.inputs import Sizes
    from .evaluation.questions import first_of_each_kind
    from .latency import measure_latency
    from .loading import load_pair, load_tokenizer
    from .mapper import KVMapper
    from .report import write_report

    with typed_errors():
        asked = read_questions(questions) if questions is not None else []
        put = read_choices(choices) if choices is not None else []
        others = None if lengths is None else parsed_lengths(lengths)
        # Before models are loaded: `evaluate_mapper` says the same, after it.
        Sizes.of(prefix=prefix, scored=scored, lengths=others, max_chunks=chunks, batch_size=batch_size, shots=shots)
        loaded = KVMapper.from_pretrained(mapper, revision=mapper_revision or "main", min_gap_recovered=False)
        folder, is_own = _folder(mapper, report, loaded)
        if figures and find_spec("matplotlib") is None:
            fail("--figures needs matplotlib, and it isn't installed; `pip install hf_kvtransfer[plots]`.")
        names = {"texts": describe_source(data)}
        if not Path(data).exists():
            names["split"] = data_split
        names |= {name: path.name for name, path in (("questions", questions), ("choices", choices)) if path}
        tokenizer = load_tokenizer(source, revision=source_revision, trust_remote_code=trust_remote_code)
        pair = (source, source_revision), (target, target_revision)
        reader, writer = load_pair(*pair, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
        loaded = loaded.to(next(writer.parameters()).device)
        made = evaluate_mapper(
            reader,
            writer,
            loaded,
            tokenizer,
            texts=iter_texts(data, text_field=text_field, split=data_split, config_name=data_config, whole_file=True),
            questions=first_of_each_kind(asked, questions_per_kind),
            choices=put,
            shots=shots,
            prefix=prefix,
            scored=scored,
            max_chunks=chunks,
            lengths=others,
            batch_size=batch_size,
            statistics=statistics,
            seed=seed,
            data=names,
            work_dir=folder / _WORK,
            restart=restart,
        )
        if bench:
            made = dataclasses.replace(made, latency=measure_latency(reader, writer, loaded, made.settings["lengths"]))
        if not is_own:
            loaded.to("cpu").save_pretrained(folder)
        written = write_report(made, folder, figures=figures)
        card = write_card(folder, folder, source=_local(source), target=_local(target))
        shutil.rmtree(folder / _WORK, ignore_errors=True)
        print(f"{summary(made)}\n\n{made.verdict()}\n")
        if not any(path.suffix == ".png" for path in written) and figures is None:
            print("Without matplotlib there are no figures; `pip install hf_kvtransfer[plots]`.")
        print("Written: " + ", ".join(str(path) for path in (*written, card)))


def _folder(mapper: str, report: Path | None, loaded: Any) -> tuple[Path, bool]:
    """Where report and card belong, and whether the mapper lies there already."""
    from .digests import CONFIG_FILE
    from .evaluation.inputs import digest_of_mapper
    from .saving import check_writable

    if report is None and not Path(mapper).is_dir():
        fail(f"The mapper {mapper} isn't in a folder of this machine; say with --report where its report belongs.")
    folder = Path(mapper) if report is None else report
    check_writable(folder)
    if not (folder / CONFIG_FILE).exists():
        return folder, False
    if report is not None:
        there = type(loaded).from_pretrained(folder, min_gap_recovered=False)
        if digest_of_mapper(there) != digest_of_mapper(loaded):
            raise MapperFileError(
                f"The folder {folder} holds another mapper than {mapper}; expected a folder of its own for the report. "
                "Choose another with --report."
            )
    return folder, True


def _local(name: str) -> str | None:
    """What a card calls a checkpoint in a folder, as long as that means something elsewhere."""
    path = Path(name)
    return path.as_posix() if path.is_dir() and not path.is_absolute() else None


def summary(report: Any) -> str:
    """
    What `evaluate` prints: every measure under every condition, and what is kept.

    Args:
        report ([`TransferReport`]): of the mapper.
    """
    from .tables import table

    shown = [one for one in report.measures if one["metric"] != "perplexity"]
    conditions = list(dict.fromkeys(name for one in shown for name in one["conditions"]))
    rows = [
        [name, *(_shown((one["conditions"].get(name) or {}).get("value"), one["unit"]) for one in shown)]
        for name in conditions
    ]
    rows += [[words, *(_shown((one[share] or {}).get("value"), "share") for one in shown)] for share, words in _SHARES]
    return table(["", *map(_titled, shown)], rows)


def _titled(measure: Any) -> str:
    """The measure as a column; of one kind of question its kind."""
    task, _, kind = measure["task"].partition(": ")
    return kind or f"{task}, {measure['metric']}"


def _shown(value: float | None, unit: str) -> str:
    from .tables import percent

    if value is None:
        return "–"
    return percent(value) if unit == "share" else f"{value:.3f}"
