"""The model card of a mapper: what it converts, how it was fitted, and what was measured of it."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .card_fields import check_fields
from .card_metadata import ON_HUB, card_metadata, measures_of
from .card_tables import fit_facts, likeness, native_in_words
from .config import KVMapperConfig
from .errors import MapperFileError
from .evidence import EVALUATION, check_report, evaluation_of, read_config, record_evidence, report_in, summary_of
from .report.files import FIGURE_FILES, MARKDOWN_FILE, REPORT_FILE, check_places, own_files, report_folder
from .report.markdown import results_tables
from .report.verdict import judge
from .report.wording import CAPTIONS


if TYPE_CHECKING:
    from huggingface_hub import ModelCard

    from .report import TransferReport


CARD_FILE = "README.md"
_MARKER = re.compile(r"<!-- hf_kvtransfer: (begin|end) ([a-z]+) -->")


def model_card(
    config: KVMapperConfig,
    report: "TransferReport | None" = None,
    *,
    existing: "str | ModelCard | None" = None,
    name: str | None = None,
    source: str | None = None,
    target: str | None = None,
    figures: Sequence[str] = (),
) -> "ModelCard":
    """
    The card of a mapper, from its configuration and its report.

    Args:
        config ([`KVMapperConfig`]): of the mapper.
        report ([`TransferReport`], *optional*):
            What was measured. Without it the summary in the configuration is shown, or that there is none.
        existing (`str` or `huggingface_hub.ModelCard`, *optional*):
            The card so far. What stands outside of the generated blocks is kept, and so are metadata and results that
            aren't generated; blocks that were taken out stay out. A card without any block gets them all at its end.
        name (`str`, *optional*): what `from_pretrained` finds the mapper by; by default where it was loaded from.
        source (`str`, *optional*):
            The same for the source, where it isn't on the Hub: a folder. By default what the report or the
            configuration calls it.
        target (`str`, *optional*): the same for the target.
        figures (`Sequence[str]`, *optional*): paths, relative to the card, of the figures that it shows.

    Returns:
        `huggingface_hub.ModelCard`: with valid metadata; `str(card)` is the file.

    Raises:
        [`MapperFileError`]:
            if the existing card's metadata or markers can't be read, or the configuration was edited by hand into
            something that can't be shown.
        [`PairMismatchError`]: if the configuration is of no pair.
    """
    from huggingface_hub import ModelCard

    check_fields(dict(vars(config)))
    before = _existing(existing)
    values = report.to_dict() if report is not None else {}
    name = name or _name_of(config)
    sides = {
        side: _side(config, side, given, values.get("pair") or {})
        for side, given in (("source", source), ("target", target))
    }
    text = _rendered(config, report, values, name, sides, figures)
    line_break = "\r\n" if "\r\n" in before.text else "\n"
    body = _merged(before.text.replace("\r\n", "\n"), text).replace("\n", line_break)
    models = [str(one["name"]) for one in sides.values() if one["on_hub"]]
    metadata = card_metadata(before.data.to_dict(), config, values, name, models)
    card = ModelCard(f"---{line_break}{metadata.to_yaml(line_break=line_break)}{line_break}---{line_break}{body}")
    return card


def write_card(
    folder: str | os.PathLike[str],
    report_dir: str | os.PathLike[str] | None = None,
    *,
    name: str | None = None,
    source: str | None = None,
    target: str | None = None,
) -> Path:
    """
    Writes, or writes again, the `README.md` of a mapper's folder, with the report and the figures that lie there.

    Args:
        folder (`str` or `os.PathLike`): of the mapper.
        report_dir (`str` or `os.PathLike`, *optional*):
            The folder with the report and the figures of these weights, which may be the mapper's own. The report's
            summary is recorded in the configuration, and its files are copied beside the mapper. By default the report
            that lies in the mapper's folder and is recorded already, if there is one.
        name (`str`, *optional*): of the repository it will be published in; by default the folder, as given.
        source (`str`, *optional*): as in [`model_card`].
        target (`str`, *optional*): as in [`model_card`].

    Returns:
        `pathlib.Path`: of the card.

    Raises:
        [`EvidenceError`]: if the report is of another mapper or other weights.
        [`MapperFileError`]:
            if there is no mapper, if the card or the report can't be read, or if a link or a folder lies where one of
            the files should; nothing is changed then.
    """
    from .report import TransferReport
    from .report.report import write_whole

    folder = Path(folder)
    values = read_config(folder)
    check_fields(values)
    KVMapperConfig.check_values(values)
    check_places(folder, CARD_FILE)
    config = KVMapperConfig.from_dict(values)
    given = None if report_dir is None else report_folder(report_dir)
    if given is None:
        report = report_in(folder)
        if evaluation_of(values) is None:
            config.scores.pop(EVALUATION, None)  # of other weights
    else:
        report = TransferReport.load(given / REPORT_FILE)
        check_report(values, report)
        config.scores[EVALUATION] = summary_of(report)
    copied = own_files(given or folder, (MARKDOWN_FILE, *FIGURE_FILES)) if report is not None else []
    figures = [path.relative_to(given or folder).as_posix() for path in copied if path.name != MARKDOWN_FILE]
    card = model_card(
        config,
        report,
        existing=_card_in(folder),
        name=name or (folder.name if folder.is_absolute() else folder.as_posix()),
        source=source,
        target=target,
        figures=figures,
    )
    # Nothing was written so far, so that a refusal leaves everything as it was.
    if given is not None and report is not None:
        record_evidence(folder, report)
        if given.resolve() != folder.resolve():
            _copy_report(given, copied, folder)
    return write_whole(folder, CARD_FILE, str(card))


def _card_in(folder: Path) -> str | None:
    try:
        # As bytes, so that line ends stay what they are.
        return next((path.read_bytes().decode("utf-8-sig") for path in own_files(folder, [CARD_FILE])), None)
    except MapperFileError:
        raise
    except (OSError, ValueError) as error:
        raise MapperFileError(
            f"The card in {folder} can't be read ({error}); expected a `{CARD_FILE}` in UTF-8. Mend or remove it."
        ) from error


def _copy_report(report_dir: Path, others: Sequence[Path], folder: Path) -> None:
    """Copies a report, its Markdown and its figures beside a mapper, in place of those of an earlier report."""
    from .report.report import write_whole

    names = [REPORT_FILE, *(path.relative_to(report_dir).as_posix() for path in others)]
    for name in names:
        place = folder / name
        write_whole(place.parent, place.name, (report_dir / name).read_bytes())
    for name in {MARKDOWN_FILE, *FIGURE_FILES} - set(names):
        (folder / name).unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------------- the text


def _rendered(
    config: KVMapperConfig,
    report: "TransferReport | None",
    values: dict[str, Any],
    name: str,
    sides: dict[str, dict[str, Any]],
    figures: Sequence[str],
) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hf_kvtransfer"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"cell": lambda text: _prose(text).replace("|", "\\|"), "prose": _prose}
    summary = config.scores.get(EVALUATION) or {}
    measures = measures_of(config, values)
    tasks = {one["task"]: one["n"] for one in measures if ": " not in one["task"]}
    return environment.get_template("card.md.jinja").render(
        title=f"{sides['source']['short']} → {sides['target']['short']}: KV cache transfer",
        name=_quoted(name),
        **sides,
        autos=", ".join(sorted({side["auto"] for side in sides.values()})),
        needs_target=config.needs_target,
        needs_positions=any(side["multimodal"] for side in sides.values()),
        multimodal=any(side["auto"] != "AutoModelForCausalLM" for side in sides.values()),
        native=native_in_words(config),
        facts=fit_facts(config, values.get("mapper")),
        **_verdict(report, summary),
        tables=results_tables(measures),
        likeness=likeness(values.get("fidelity") or summary),
        figures=[{"path": path, "words": CAPTIONS.get(Path(path).stem, Path(path).stem)} for path in figures],
        has_report=report is not None,
        measured=", ".join(f"{task} (n = {n:,})" for task, n in tasks.items()) or "nothing yet",
        fingerprint=config.tokenizer_fingerprint,
        preset=config.preset,
        version=__version__,
    )


def _verdict(report: "TransferReport | None", summary: dict[str, Any]) -> dict[str, Any]:
    """The verdict's first sentence, and those with the figures it rests on, which a summary's tables show as well."""
    if report is None:
        return {"headline": str(summary.get("verdict") or "").partition(". ")[0], "sentences": []}
    verdict = judge(report.measures, report.lengths, has_anchor=report.mapper["anchor_layers"] is not None)
    return {"headline": verdict.headline, "sentences": verdict.sentences}


def _prose(text: Any) -> str:
    """One line that can't open or close a comment."""
    return " ".join(str(text).split()).replace("<!--", "<! --").replace("-->", "-- >")


def _side(config: KVMapperConfig, side: str, given: str | None, pair: dict[str, Any]) -> dict[str, Any]:
    geometry = config.geometry(side)
    checkpoint, revision = geometry.checkpoint or side, getattr(config, f"{side}_revision")
    on_hub = given is None and bool(ON_HUB.fullmatch(checkpoint) or revision)
    told = str(pair.get(side) or "")
    # A path of the machine that measured means nothing elsewhere.
    name = given or (checkpoint if on_hub or not told or os.path.isabs(told) else told)
    short = Path(name).name
    is_pinned = revision and on_hub
    heads = sorted({f"{layer.kv_heads} × {layer.head_dim}" for layer in geometry.layers})
    return {
        "name": name,
        "short": short,
        "on_hub": on_hub,
        "link": f"[{name}](https://huggingface.co/{name})" if on_hub else f"`{name}`",
        "revision": f"`{revision}`" if revision else None,
        "layers": geometry.num_layers,
        "heads": ", ".join(heads),
        "auto": "AutoModelForImageTextToText" if geometry.text_config_name else "AutoModelForCausalLM",
        "arguments": _quoted(name) + (f", revision={_quoted(revision)}" if is_pinned else ""),
        "wants_full_cache": any(layer.sliding_window for layer in geometry.layers),
        "multimodal": geometry.multimodal_positions,
    }


def _quoted(text: Any) -> str:
    """A text as Python writes it in code, in one line and with double quotes."""
    inner = repr(str(text))[1:-1].replace("\\'", "'").replace('"', '\\"')
    return f'"{inner}"'


def _name_of(config: KVMapperConfig) -> str:
    path = str(getattr(config, "name_or_path", "") or "")
    if path and not Path(path).is_dir() and ON_HUB.fullmatch(path):
        return path
    return Path(path).name or "path/to/this/mapper"


# ------------------------------------------------------------------------------------------------ the card so far


def _existing(card: "str | ModelCard | None") -> "ModelCard":
    from huggingface_hub import ModelCard

    if card is None:
        return ModelCard("---\n{}\n---\n")
    try:
        text = str(card).removeprefix("\ufeff")
        return ModelCard(text if text.lstrip().startswith("---") else f"---\n{{}}\n---\n{text}")
    except Exception as error:  # of the YAML library, or of what reads results from it
        reason = " ".join(str(error).split())
        raise MapperFileError(
            f"The metadata of the existing card can't be read ({reason}); expected YAML between two lines of `---`. "
            f"Mend or remove the `{CARD_FILE}`, and write the card again."
        ) from error


def _blocks(text: str) -> dict[str, tuple[int, int]]:
    """Where each generated block of a card begins and ends, markers included."""
    found: dict[str, tuple[int, int]] = {}
    opened: re.Match[str] | None = None
    for marker in _MARKER.finditer(text):
        is_begin, name = marker[1] == "begin", marker[2]
        fits = opened is None and name not in found if is_begin else opened is not None and opened[2] == name
        if not fits:
            opened = opened or marker  # the one that is still open lacks its end
            break
        if is_begin:
            opened = marker
        elif opened is not None:
            found[name], opened = (opened.start(), marker.end()), None
    if opened is not None:
        raise MapperFileError(
            f"The marker `{opened[0]}` of the existing card has no counterpart, or stands there twice; expected one "
            f"`begin` and one `end` around each generated block. Mend the `{CARD_FILE}`, or remove all of its markers."
        )
    return found


def _merged(before: str, text: str) -> str:
    """The card so far with its generated blocks replaced by the new ones."""
    old, new = _blocks(before), _blocks(text)
    if not old:
        return f"{before.rstrip()}\n\n{text}" if before.strip() else f"\n{text}"
    for name, (start, stop) in sorted(old.items(), key=lambda item: -item[1][0]):
        if name in new:
            before = before[:start] + text[slice(*new[name])] + before[stop:]
    return before
