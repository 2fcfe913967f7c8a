"""A report as Markdown: what it keeps, what it costs, its limits, and the verdict in words."""

import json
import statistics
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from .retention import CONDITIONS, TRANSFERRED
from .schema import LOOKUP, TASK, TEXT, Measure
from .wording import CAPTIONS, SHARE, SHARES, shown, with_interval


if TYPE_CHECKING:
    from .report import TransferReport


_HEADINGS = {LOOKUP: "Look-ups: answers that stand in the context and nowhere else", TASK: "Tasks", TEXT: "Text"}

# Bins of drift that a table has room for.
_MOST_BINS = 8

# What the table of latencies shows of a row: its heading, the factor to its unit, and the form of the number.
_LATENCY = {
    "context": ("tokens of context", 1, ",.0f"),
    "target_prefill": ("target's prefill, ms", 1e3, ",.1f"),
    "conversion": ("conversion, ms", 1e3, ",.1f"),
    "conversion_floor": ("its floor, ms", 1e3, ",.2f"),
    "source_prefill": ("source's prefill, ms", 1e3, ",.1f"),
    "warm_speedup": ("warm, times as fast", 1, ",.2f"),
    "cold_speedup": ("cold, times as fast", 1, ",.2f"),
    "target_first_token": ("first token natively, ms", 1e3, ",.1f"),
    "converted_first_token": ("first token converted, ms", 1e3, ",.1f"),
    "target_prefill_peak": ("peak of the prefill, MiB", 2**-20, ",.1f"),
    "conversion_peak": ("peak of the conversion, MiB", 2**-20, ",.1f"),
    "device": ("device", 1, ""),
    "dtype": ("dtype", 1, ""),
}


def to_markdown(report: "TransferReport", figures: Sequence[str] = ()) -> str:
    """
    A report as Markdown.

    Args:
        report ([`TransferReport`]): what was measured.
        figures (`Sequence[str]`, *optional*): paths of figures to show, relative to where the text will lie.

    Returns:
        `str`: with tables that GitHub and the Hub show.
    """
    pair = report.pair
    parts = [
        f"# What a transfer from {_code(pair['source'])} to {_code(pair['target'])} keeps",
        *_verdict(report),
        *_results(report.measures),
        *_fidelity(report),
        *_drift(report),
        *_lengths(report),
        *_costs(report),
        *_limits(report),
        *(["## Figures", *map(_image, figures)] if figures else []),
        *_setup(report),
    ]
    return "\n\n".join(parts) + "\n"


def results_tables(measures: Sequence[Measure]) -> list[str]:
    """
    The results as Markdown: for each kind of measure its heading and a table with a row for each condition and share.

    Args:
        measures (`Sequence[Measure]`): of the report.
    """
    parts = []
    for kind, heading in _HEADINGS.items():
        of_kind = [one for one in measures if one["kind"] == kind]
        if of_kind:
            parts += [f"### {heading}", _measures(of_kind)]
    return parts


def _verdict(report: "TransferReport") -> list[str]:
    verdict = report.judged()
    points = "\n".join(f"- {_safe(sentence)}" for sentence in verdict.sentences)
    return ["## Verdict", f"**{verdict.headline}**", *([points] if points else [])]


def _results(measures: Sequence[Measure]) -> list[str]:
    if not measures:
        return []
    explained = (
        "Brackets are 95 % intervals; the same questions are drawn for all conditions. *Gap recovered* is what the "
        "transfer is better by than the source alone, *context value kept* than no context, *content kept* than the "
        "converted cache of a different document, and *retention above chance* than guessing, each as a share of what "
        "the native target is better by. A dash stands where the native target is not shown to be better."
    )
    return ["## Results", *results_tables(measures), explained]


def _measures(measures: Sequence[Measure]) -> str:
    named = [name for one in measures for name in one["conditions"]]
    names = [name for name in CONDITIONS if name in named] + sorted(set(named) - set(CONDITIONS))
    header = ["", *(f"{one['task']}, {one['metric']}{_unit(one)}" for one in measures)]
    rows = [
        [
            f"**{name}**" if name == TRANSFERRED else name,
            *(with_interval(one["conditions"].get(name), one["unit"]) for one in measures),
        ]
        for name in names
    ]
    rows.append(["chance", *(shown(one["chance"], one["unit"]) for one in measures)])
    for share, words in SHARES.items():
        figures: list[Any] = [dict(one)[share] for one in measures]
        rows.append([f"*{words}*", *map(with_interval, figures)])
    rows.append(["n", *(f"{one['n']:,}" for one in measures)])
    return table(header, [row for row in rows if any(cell != "–" for cell in row[1:])])


def _unit(measure: Measure) -> str:
    direction = "" if measure["higher_is_better"] else ", less is better"
    unit = "" if measure["unit"] == SHARE else measure["unit"]
    return f" ({unit}{direction})" if unit else f" ({direction[2:]})" if direction else ""


def _fidelity(report: "TransferReport") -> list[str]:
    found = report.fidelity
    if found is None:
        return []
    rows = []
    for what, layers in (
        ("R² of keys, per layer and KV head", found["r2"]["keys"]),
        ("R² of values, per layer and KV head", found["r2"]["values"]),
        ("cosine of attention outputs, per layer and query head", found["cosine"]),
    ):
        values = [value for layer in layers for value in layer if value is not None]
        means = [(statistics.fmean(there), index) for index, layer in enumerate(layers) if (there := _there(layer))]
        worst = min(means, default=None)
        rows.append(
            [
                what,
                shown(statistics.fmean(values) if values else None, ""),
                f"{worst[0]:.3f} (layer {worst[1]})" if worst else "–",
            ]
        )
    rows.append(["KL(native ‖ transferred), nats per token", with_interval(found["kl"], ""), ""])
    rows.append(["same most likely next token", with_interval(found["agreement"]), ""])
    note = (
        f"Means over {found['chunks']} chunks of text. R² and perplexity can look fine where every look-up is lost: "
        "the results above decide."
    )
    return ["## How near the entries are", table(["", "mean", "worst layer"], rows), note]


def _drift(report: "TransferReport") -> list[str]:
    drift = report.drift
    if drift is None:
        return []
    columns = {name: drift["nll"][name] for name in _sorted(drift["nll"])}
    columns |= {"KL": drift["kl"], "same token": drift["agreement"]}
    bins = max(map(len, columns.values()), default=0)
    chosen = sorted({round(index * (bins - 1) / (_MOST_BINS - 1)) for index in range(_MOST_BINS)}) if bins else []
    size = drift["tokens_per_bin"]
    rows = [
        [
            f"{index * size + 1:,}–{(index + 1) * size:,}",
            *(
                shown(column[index] if index < len(column) else None, SHARE if name == "same token" else "")
                for name, column in columns.items()
            ),
        ]
        for index in chosen
    ]
    note = "NLL and KL in nats per token; the table shows some of the bins, the JSON all of them."
    return ["## Drift after the hand-over", table(["tokens", *columns], rows), note] if rows else []


def _lengths(report: "TransferReport") -> list[str]:
    if not report.lengths:
        return []
    names = _sorted({name: None for row in report.lengths for name in row["conditions"]})
    rows = [
        [
            f"{row['context']:,}",
            *(shown(row["conditions"].get(name), "") for name in names),
            shown(row["kl"], ""),
            shown(row["agreement"]),
        ]
        for row in report.lengths
    ]
    header = ["tokens of context", *names, "KL", "same token"]
    return ["## By length of the context", table(header, rows), "NLL and KL in nats per token."]


def _costs(report: "TransferReport") -> list[str]:
    mapper = report.mapper
    share = shown(mapper["cost_share"])
    tokens = "" if mapper["cost_tokens"] is None else f" at {mapper['cost_tokens']:,} tokens of context"
    rows = [
        ["parameters of the mapper", f"{mapper['parameters']:,}"],
        ["conversion, share of the target's prefill in floating-point operations", f"{share}{tokens}"],
    ]
    parts = ["## What it costs", table(["", ""], rows, right=False)]
    if report.latency:
        latency = report.latency
        columns = {
            name: column for name, column in _LATENCY.items() if any(row.get(name) is not None for row in latency)
        }
        rows = [[_scaled(row.get(name), scale, form) for name, (_, scale, form) in columns.items()] for row in latency]
        parts.append(table([title for title, _, _ in columns.values()], rows))
        parts.append(
            "Medians. *Warm*: the source's cache exists; *cold*: its prefill is counted. *Times as fast* compares a "
            "conversion with the target's prefill. The floor is what the measured rates of this machine allow."
        )
    return parts


def _limits(report: "TransferReport") -> list[str]:
    contexts = [row["context"] for row in report.lengths]
    points = [
        "This is of one ordered pair of checkpoints. Fine-tuned or quantised variants of them are others.",
        "It holds for text like that which was measured, listed below, in its language and of its length.",
    ]
    if contexts:
        points.append(f"No context longer than {max(contexts):,} tokens was measured.")
    if not any(one["kind"] == LOOKUP for one in report.measures):
        points.append("No look-up into a context was measured. They are what a transfer loses first.")
    small = sorted({one["n"] for one in report.measures if one["n"] < 30})
    if small:
        points.append(
            f"Some measures have only {' or '.join(map(str, small))} questions or chunks; a share of 90 % can't be "
            "shown by fewer than 30."
        )
    return ["## Limits", "\n".join(f"- {point}" for point in points)]


def _setup(report: "TransferReport") -> list[str]:
    rows = []
    for name, section in (
        ("pair", report.pair),
        ("mapper", report.mapper),
        ("settings", report.settings),
        ("versions", report.versions),
        ("times", {"created": report.created, "seconds": report.seconds}),
    ):
        rows += [[name, key, _value(value)] for key, value in dict(section).items() if value is not None]
    return ["## How it was measured", table(["", "", ""], rows, right=False)]


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: bool = True) -> str:
    """
    A Markdown table, the first column to the left.

    Args:
        header (`Sequence[str]`): the columns' names.
        rows (`Sequence[Sequence[str]]`): as many cells each.
        right (`bool`, *optional*, defaults to `True`): whether the others are to the right, as numbers are.
    """
    lines = [list(map(_safe, line)) for line in (header, *rows)]
    lines.insert(1, ["---", *["---:" if right else "---"] * (len(header) - 1)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _value(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _scaled(value: Any, scale: float, form: str) -> str:
    return format(value * scale, form) if isinstance(value, int | float) else _value(value)


def _sorted(conditions: Any) -> list[str]:
    return [name for name in CONDITIONS if name in conditions] + sorted(set(conditions) - set(CONDITIONS))


def _there(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _safe(text: str) -> str:
    """Text of others in a table or a list: it may hold what would end a cell or begin a tag."""
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def _code(text: str) -> str:
    return "`" + " ".join(text.split()).replace("`", "'") + "`"


def _image(path: str) -> str:
    name = PurePosixPath(path).stem
    return f"![{CAPTIONS.get(name, name)}]({path})"
