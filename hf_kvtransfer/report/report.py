"""`TransferReport`: everything that was measured of a mapper, as plain JSON values."""

import dataclasses
import hashlib
import json
import os
import tempfile
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import MapperFileError
from ..saving import check_writable
from .files import FIGURES_FOLDER, MARKDOWN_FILE, REPORT_FILE, check_place
from .schema import (
    SCHEMA_VERSION,
    Drift,
    FidelitySection,
    LayerR2,
    Length,
    Mapper,
    Measure,
    Pair,
    checked,
    checked_latency,
    plain,
    wrong,
)
from .verdict import Verdict, judge


__all__ = ["FIGURES_FOLDER", "MARKDOWN_FILE", "REPORT_FILE", "TIMES", "TransferReport", "write_whole"]

# Nothing else may differ between two reports of the same mapper, data and seeds.
TIMES = ("latency", "seconds", "created")


@dataclass
class TransferReport:
    """
    What a mapper keeps, what it costs, and beside which controls that was measured. Every section holds plain JSON
    values; whatever is not finite is `None`. The keys of the sections are documented with their types in
    `hf_kvtransfer/report/schema.py` and in `docs/report.md`.

    Args:
        pair (`dict`): both checkpoints, [`Pair`].
        mapper (`dict`): the recipe, size and cost of the mapper, [`Mapper`].
        settings (`dict`): everything that the figures depend on: data, split, seeds, lengths, number of chunks.
        versions (`dict[str, str]`): of the libraries that were used.
        fidelity (`dict`, *optional*): how near the converted entries are to native ones, [`FidelitySection`].
        measures (`list[dict]`, *optional*, defaults to none): quality under all conditions, [`Measure`].
        drift (`dict`, *optional*): with the distance from the hand-over, [`Drift`].
        lengths (`list[dict]`, *optional*, defaults to none): by length of the context, [`Length`].
        layers_r2 (`dict`, *optional*): of every target layer from every source layer, [`LayerR2`].
        latency (`list[dict]`, *optional*): rows of `measure_latency`, each with `context`, its tokens.
        seconds (`float`, *optional*): how long the evaluation took.
        created (`str`, *optional*): when it was made, as ISO 8601 in UTC.
        schema_version (`int`, *optional*, defaults to 1): of this layout.

    Raises:
        [`MapperFileError`]: if a section isn't laid out as documented; the sentence names the field.
    """

    pair: Pair
    mapper: Mapper
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    fidelity: FidelitySection | None = None
    measures: list[Measure] = field(default_factory=list)
    drift: Drift | None = None
    lengths: list[Length] = field(default_factory=list)
    layers_r2: LayerR2 | None = None
    latency: list[dict[str, Any]] | None = None
    seconds: float | None = None
    created: str | None = None
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        for name, value in self._checked().items():
            setattr(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        """
        The report as JSON values, a copy. `TransferReport.from_dict(report.to_dict()) == report`.

        Raises:
            [`MapperFileError`]: if a section was changed into something that isn't laid out as documented.
        """
        return self._checked()

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TransferReport":
        """
        A report from JSON values.

        Args:
            values (`dict`): as [`~TransferReport.to_dict`] gives it. Fields that may be `None` may be missing.

        Raises:
            [`MapperFileError`]: names the first field that is missing, unknown, or of another type.
        """
        if not isinstance(values, dict):
            raise MapperFileError(
                f"A report is a {type(values).__name__} here; expected an object with the fields of a "
                "`TransferReport`. Evaluate the mapper again."
            )
        known = {one.name: one for one in dataclasses.fields(cls)}
        unknown = [str(name) for name in values if name not in known]
        needed = {name for name, one in known.items() if _has_no_default(one)} | {"schema_version"}
        missing = sorted(needed - set(values))
        if unknown or missing:
            raise MapperFileError(
                f"A report has the unknown fields {unknown} and lacks {missing}; expected the fields of a "
                "`TransferReport`. Evaluate the mapper again, or upgrade hf_kvtransfer if the report is newer."
            )
        return cls(**values)

    def verdict(self) -> str:
        """What the mapper keeps, in words and with the figures it rests on; [`judge`] says by which rules."""
        return str(self.judged())

    def judged(self) -> Verdict:
        """The verdict with its level and its sentences apart."""
        mapper = self.mapper
        # An anchor whose stream is predicted from the source isn't there without it.
        has_anchor = mapper["anchor_layers"] is not None and mapper["anchor_start"] == 0
        return judge(self.measures, self.lengths, has_anchor=has_anchor)

    def to_markdown(self, figures: Sequence[str] = ()) -> str:
        """
        The report as Markdown.

        Args:
            figures (`Sequence[str]`, *optional*): paths of figures to show, relative to where the text will lie.
        """
        from .markdown import to_markdown

        return to_markdown(self, figures)

    def without_times(self) -> dict[str, Any]:
        """All that may not differ between two reports of the same mapper, data and seeds."""
        return {name: value for name, value in self.to_dict().items() if name not in TIMES}

    def digest(self) -> str:
        """32 hexadecimal digits over all but the times, to tell which report a figure is from."""
        text = json.dumps(self.without_times(), sort_keys=True, ensure_ascii=False, allow_nan=False)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """
        Writes `report.json` into a folder, whole or not at all.

        Args:
            folder (`str` or `os.PathLike`): as a rule the mapper's; made if missing.

        Returns:
            `pathlib.Path`: of the file.

        Raises:
            [`MapperFileError`]: if nothing can be written there.
        """
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"
        return write_whole(Path(folder), REPORT_FILE, text)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "TransferReport":
        """
        Reads what [`~TransferReport.save`] wrote.

        Args:
            folder (`str` or `os.PathLike`): the folder, or the file itself.

        Raises:
            [`MapperFileError`]: if there is no such file, or it isn't laid out as documented.
        """
        path = Path(folder)
        path = path / REPORT_FILE if path.is_dir() else path
        try:
            values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_repeats)
        except (OSError, ValueError, RecursionError) as error:
            raise MapperFileError(
                f"No report could be read from {path} ({error}); expected the `{REPORT_FILE}` that "
                "`hf-kvtransfer evaluate --report` writes. Check the path, or evaluate the mapper again."
            ) from error
        return cls.from_dict(values)

    def _checked(self) -> dict[str, Any]:
        if self.schema_version != SCHEMA_VERSION or isinstance(self.schema_version, bool):
            raise MapperFileError(
                f"`schema_version` of this report is {str(self.schema_version)[:80]!r}; this release reads "
                f"{SCHEMA_VERSION}. Upgrade hf_kvtransfer if the report is newer, or evaluate the mapper again."
            )
        kinds = typing.get_type_hints(type(self))
        names = [one.name for one in dataclasses.fields(self)]
        values: dict[str, Any] = {}
        for name in names:
            try:
                values[name] = checked(plain(getattr(self, name)), kinds[name], name)
            except RecursionError as error:
                raise wrong(name, "nested too deep", "lists and objects that JSON can hold") from error
        values["latency"] = checked_latency(values["latency"])
        _check_numbers(values)
        return values


def write_whole(folder: Path, name: str, content: str | bytes) -> Path:
    """
    Writes a file so that it is never seen half written.

    Args:
        folder (`pathlib.Path`): made if missing.
        name (`str`): of the file in it.
        content (`str` or `bytes`): what it holds; text in UTF-8.

    Raises:
        [`MapperFileError`]: if nothing can be written there.
    """
    check_writable(folder)
    check_place(folder / name)
    folder.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(prefix=f".{name}-", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)
        os.chmod(beside, 0o644)  # temporary files are private to their maker
        os.replace(beside, folder / name)
    finally:
        Path(beside).unlink(missing_ok=True)
    return folder / name


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for index, (name, _) in enumerate(pairs) if name in dict(pairs[:index]))
        raise ValueError(f"the name {twice!r} stands twice in one object")
    return found


def _has_no_default(one: Any) -> bool:
    return one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING


def _check_numbers(values: dict[str, Any]) -> None:
    """What types don't say: counts of one or more, and columns of one length."""
    counts = {f"measures[{index}].n": one["n"] for index, one in enumerate(values["measures"])}
    counts |= {f"lengths[{index}].context": one["context"] for index, one in enumerate(values["lengths"])}
    counts |= {f"latency[{index}].context": one["context"] for index, one in enumerate(values["latency"] or ())}
    if values["fidelity"]:
        counts["fidelity.chunks"] = values["fidelity"]["chunks"]
    drift = values["drift"]
    if drift:
        counts["drift.tokens_per_bin"] = drift["tokens_per_bin"]
        columns = {f"drift.nll.{name}": column for name, column in drift["nll"].items()}
        columns |= {f"drift.{name}": drift[name] for name in ("kl", "agreement") if drift[name]}
        bins = max(map(len, columns.values()), default=0)
        for where, column in columns.items():
            if len(column) != bins:
                raise wrong(where, f"{len(column)} bins", f"{bins}, as in the longest column")
    for where, count in counts.items():
        if count < 1:
            raise wrong(where, count, "one or more")
