"""From one value for each document to figures with intervals, to what was promised, and to tables."""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from hf_kvtransfer.evaluation import Interval, bootstrap, context_value_kept, difference, gap_recovered, mean_interval


ALONE, NATIVE, NOTHING = "source alone", "target native", "no context"
FREE, PUBLISHED = "auto", ("heo2026", "cachebridge2026")
# Of fewer documents than this an interval says nothing; of one it would be empty, and every difference beyond it.
_FEWEST = 5
Figures = dict[str, Any]


def summary(raw: dict[str, Any], samples: int = 2000) -> dict[str, Any]:
    """
    The figures of one pair.

    Args:
        raw (`dict`): from `measuring.measure`.
        samples (`int`, *optional*, defaults to 2000): how often documents are drawn.

    Returns:
        `dict`: what was told of the recipes; and per condition every figure as `[point, low, high]`, an interval of
        95 % over documents.
    """
    figures: dict[str, Figures] = {}
    for name, values in _columns(raw).items():
        for measure, (columns, documents) in values.items():
            interval = mean_interval(columns, documents=documents, samples=samples)
            figures.setdefault(name, {})[measure] = _as_list(interval)
    for measure, (columns, documents, is_more) in _compared(raw).items():
        for name in columns:
            for share, statistic in (("gap", _gap(is_more)), ("kept", _kept)):
                triple = {"this": columns[name], **{other: columns[other] for other in (ALONE, NATIVE, NOTHING)}}
                interval = bootstrap(triple, statistic, documents=documents, samples=samples)
                figures[name][f"{measure}, {share}"] = _as_list(interval)
    told = {key: raw[key] for key in ("name", "title", "main", "dtype", "note", "seconds", "bars")}
    return {
        **told,
        "question_tokens": raw.get("question_tokens"),
        "recipes": raw["recipes"],
        "readings": list(raw["readings"]),
        "tasks": list(raw["choices"]),
        "kinds": list(raw.get("documents", {})),
        "chance": {task: one["chance"] for task, one in raw["choices"].items()},
        "figures": figures,
        "against_published": _against_published(raw, samples),
    }


def _gap(is_more: bool) -> Callable[[dict[str, float]], float]:
    """Where the source is the better model there is no gap to recover."""

    def gap(mean: dict[str, float]) -> float:
        has_gap = mean[NATIVE] > mean[ALONE] if is_more else mean[NATIVE] < mean[ALONE]
        return gap_recovered(mean["this"], mean[ALONE], mean[NATIVE]) if has_gap else math.nan

    return gap


def _kept(mean: dict[str, float]) -> float:
    return context_value_kept(mean["this"], mean[NOTHING], mean[NATIVE])


def _as_list(interval: Interval) -> list[float]:
    return [round(value, 5) for value in (interval.point, interval.low, interval.high)]


def _compared(raw: dict[str, Any]) -> dict[str, tuple[dict[str, Sequence[float]], Sequence[Hashable] | None, bool]]:
    """Per measure that all conditions have: the values by condition, their documents, whether more is better."""
    result: dict[str, Any] = {}
    for reading, conditions in raw["readings"].items():
        result[f"text {reading}, NLL"] = {name: one["nll"] for name, one in conditions.items()}, None, False
    if "questions" in raw:
        documents = [document for kind in raw["documents"].values() for document in kind]
        for measure, field, is_more in (("look-ups, accuracy", "correct", True), ("look-ups, NLL", "nll", False)):
            columns = {
                name: [float(value) for kind in raw["documents"] for value in one[field][kind]]
                for name, one in raw["questions"].items()
            }
            result[measure] = columns, documents, is_more
    for task, conditions in raw["choices"].items():
        for measure, field, is_more in (("accuracy", "correct", True), ("NLL", "nll", False)):
            columns = {
                name: [float(value) for value in one[field]] for name, one in conditions.items() if name != "chance"
            }
            result[f"{task}, {measure}"] = columns, None, is_more
    return result


def _columns(raw: dict[str, Any]) -> dict[str, dict[str, tuple[Sequence[float], Sequence[Hashable] | None]]]:
    """Per condition and measure the values of every document."""
    result: dict[str, Any] = {}
    for measure, (columns, documents, _) in _compared(raw).items():
        for name, values in columns.items():
            result.setdefault(name, {})[measure] = values, documents
    for reading, conditions in raw["readings"].items():
        for name, one in conditions.items():
            for field, title in (("kl", "KL"), ("agreement", "top-1 agreement")):
                if not any(map(math.isnan, one[field])):
                    result[name][f"text {reading}, {title}"] = one[field], None
    for name, one in raw.get("questions", {}).items():
        for kind, correct in one["correct"].items():
            result[name][f"look-ups, {kind}"] = [float(hit) for hit in correct], raw["documents"][kind]
    for name, described in raw["recipes"].items():
        result[name]["attention cosine"] = described["attention_cosine"], None
    return result


def _against_published(raw: dict[str, Any], samples: int) -> list[dict[str, Any]]:
    """The cache alone: how much better the recipe that selects is than the published ones; above zero it is."""
    measures = {name: (columns, documents, more) for name, (columns, documents, more) in _compared(raw).items()}
    for reading, conditions in raw["readings"].items():
        for field, title, is_more in (("kl", "KL", False), ("agreement", "top-1 agreement", True)):
            columns = {name: one[field] for name, one in conditions.items() if name in (FREE, *PUBLISHED)}
            measures[f"text {reading}, {title}"] = columns, None, is_more
    cosines = {name: one["attention_cosine"] for name, one in raw["recipes"].items()}
    measures["attention cosine"] = cosines, None, True
    rows = []
    for measure, (columns, documents, is_more) in measures.items():
        for preset in PUBLISHED:
            if FREE not in columns or preset not in columns:
                continue
            pair = (columns[FREE], columns[preset]) if is_more else (columns[preset], columns[FREE])
            interval = difference(*pair, documents=documents, samples=samples)
            if len(set(documents or range(len(pair[0])))) < _FEWEST:
                interval = Interval(interval.point, math.nan, math.nan)
            rows.append({"measure": measure, "preset": preset, "difference": _as_list(interval)})
    return rows


def bars(pairs: Sequence[dict[str, Any]]) -> list[tuple[str, str, bool]]:
    """
    What was promised, what came out, and whether that is met.

    Args:
        pairs (`Sequence[dict]`): from [`summary`].
    """
    rows = []
    for pair in pairs:
        promised = pair["bars"]
        if promised:
            for name in [name for name in promised["recipes"] if name in pair["recipes"]]:
                rows += [_quality_bar(pair, name, promised), _large_bar(pair, name)]
    compared = [row["difference"] for pair in pairs for row in pair["against_published"]]
    beyond = sum(low > 0 for _, low, _ in compared)
    worse = sum(high < 0 for _, _, high in compared)
    below = sum(point < 0 for point, _, _ in compared)
    few = sum(math.isnan(low) for _, low, _ in compared)
    if compared:
        rows.append(
            (
                "cache alone: `auto` no worse than either published recipe, better beyond the interval on half",
                f"of {len(compared)} comparisons {beyond} better and {worse} worse beyond the interval; {below} with a "
                f"worse mean{f'; {few} of too few documents for an interval' if few else ''}",
                not worse and 2 * beyond >= len(compared),
            )
        )
    return rows


def _quality_bar(pair: dict[str, Any], name: str, promised: dict[str, Any]) -> tuple[str, str, bool]:
    figures, native = pair["figures"][name], pair["figures"][NATIVE]
    cost = pair["recipes"][name]["cost"]
    kept = figures[f"text {pair['readings'][0]}, NLL, kept"]
    met = [cost["here"] <= promised["cost"], kept[0] >= promised["kept"]]
    found = [f"cost {100 * cost['here']:.1f} %", f"context value kept {_share(kept)}"]
    wanted = [f"cost ≤ {_percent(promised['cost'])}", f"kept ≥ {_percent(promised['kept'])}"]
    if pair["kinds"]:
        # A kind that native fails as often as not is none that it answers.
        answered = [kind for kind in pair["kinds"] if native[f"look-ups, {kind}"][0] >= 0.5]
        shares = {kind: figures[f"look-ups, {kind}"][0] / native[f"look-ups, {kind}"][0] for kind in answered}
        worst = min(shares, key=lambda kind: shares[kind])
        met.append(shares[worst] >= 0.95)
        wanted.append("look-ups of each kind ≥ 95 % of native")
        found.append(f"the worst kind, {worst}, {_percent(shares[worst])}")
    return f"{pair['title']}, “{name}”: {', '.join(wanted)}", ", ".join(found), all(met)


def _large_bar(pair: dict[str, Any], name: str) -> tuple[str, str, bool]:
    cost = pair["recipes"][name]["cost"]
    found = f"{_percent(cost['large_same_number'])} with as many layers, {_percent(cost['large_same_share'])} with as "
    return (
        f"{pair['title']}, “{name}”: ≤ 15 % at Qwen3 14B → 32B",
        f"{found}large a share of them",
        cost["large_same_number"] <= 0.15,
    )


def tables(pair: dict[str, Any]) -> str:
    """The tables of one pair, in Markdown."""
    parts = [f"### {pair['title']}\n"]
    parts += [_text_table(pair, reading) for reading in pair["readings"]]
    if pair["kinds"]:
        parts.append(_question_table(pair))
    if pair["tasks"]:
        parts.append(_task_table(pair))
    return "\n".join(parts)


def _text_table(pair: dict[str, Any], reading: str) -> str:
    header = [
        "",
        "cost",
        "R² K / V",
        "cosine",
        "NLL",
        "perplexity",
        "KL",
        "top-1",
        "gap recovered",
        "context value kept",
    ]
    rows = []
    for name, figures in pair["figures"].items():
        if f"text {reading}, NLL" not in figures:
            continue
        nll = figures[f"text {reading}, NLL"]
        kl, agreement = (figures.get(f"text {reading}, {title}") for title in ("KL", "top-1 agreement"))
        described = pair["recipes"].get(name)
        cells = ["100 %" if name == NATIVE else "", "", ""]
        if described:
            r2 = described["r2_heldout"]
            cells = [
                _percent(described["cost"]["here"]),
                # The statistics know of the closed form alone.
                "" if described["trained"] else f"{r2['keys']:.2f} / {r2['values']:.2f}",
                f"{figures['attention cosine'][0]:.3f}",
            ]
        cells += [
            _number(nll, 3),
            f"{math.exp(min(nll[0], 50)):.3g}",
            f"{kl[0]:.3f}" if kl else "",
            _percent(agreement[0]) if agreement else "",
        ]
        shares = [figures[f"text {reading}, NLL, {share}"] for share in ("gap", "kept")]
        rows.append([name, *cells, *map(_share, shares)])
    title = f"Text, {reading} tokens (context + scored)"
    return _markdown(title, header, rows)


def _question_table(pair: dict[str, Any]) -> str:
    header = ["", "cost", *pair["kinds"], "all", "answer NLL", "gap recovered", "context value kept"]
    rows = []
    for name, figures in pair["figures"].items():
        described = pair["recipes"].get(name)
        cost = _percent(described["cost"]["questions"]) if described else "100 %" if name == NATIVE else ""
        kinds = [_percent(figures[f"look-ups, {kind}"][0]) for kind in pair["kinds"]]
        shares = [figures[f"look-ups, accuracy, {share}"] for share in ("gap", "kept")]
        rows.append(
            [
                name,
                cost,
                *kinds,
                _share(figures["look-ups, accuracy"]),
                _number(figures["look-ups, NLL"], 2),
                *map(_share, shares),
            ]
        )
    title = f"Look-ups, right answers (median context {pair['question_tokens']} tokens; gap and value in accuracy)"
    return _markdown(title, header, rows)


def _task_table(pair: dict[str, Any]) -> str:
    header = [""]
    for task in pair["tasks"]:
        header += [f"{task} (chance {_percent(pair['chance'][task])})", "NLL of the right option", "kept, in NLL"]
    rows = []
    for name, figures in pair["figures"].items():
        if f"{pair['tasks'][0]}, accuracy" not in figures:
            continue
        cells = []
        for task in pair["tasks"]:
            accuracy, nll = figures[f"{task}, accuracy"], figures[f"{task}, NLL"]
            cells += [_share(accuracy), _number(nll, 2), _share(figures[f"{task}, NLL, kept"])]
        rows.append([name, *cells])
    return _markdown("Multiple choice, three shots, likelihood per token", header, rows)


def cost_table(pairs: Sequence[dict[str, Any]]) -> str:
    """What every recipe costs here, and counted at the shapes of Qwen3 14B → 32B."""
    header = ["pair", "recipe", "here", "as many layers", "as large a share of the layers"]
    rows = [
        [
            pair["title"],
            name,
            *(_percent(one["cost"][way]) for way in ("here", "large_same_number", "large_same_share")),
        ]
        for pair in pairs
        for name, one in pair["recipes"].items()
        if one["role"] in ("published", "cache alone", "trained", "anchored")
    ]
    return _markdown("Cost, as a share of the target's prefill", header, rows)


def bar_table(pairs: Sequence[dict[str, Any]]) -> str:
    """What was promised and what came out."""
    rows = [[promise, found, "yes" if met else "**no**"] for promise, found, met in bars(pairs)]
    return _markdown("Promised", ["", "found", "met"], rows)


def _markdown(title: str, header: list[str], rows: list[list[str]]) -> str:
    lines = [f"**{title}**", "", f"| {' | '.join(header)} |", f"|---{'|---:' * (len(header) - 1)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), ""])


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{100 * value:.0f} %" if abs(value) >= 0.0995 else f"{100 * value:.1f} %"


def _share(interval: Sequence[float]) -> str:
    point, low, high = interval
    if any(map(math.isnan, interval)):
        return "–"
    if high < -1:
        return "below −100 %"
    # Minus zero is zero.
    point, low, high = (round(100 * value) + 0 for value in interval)
    return f"{point} % [{low}, {high}]"


def _number(interval: Sequence[float], digits: int) -> str:
    point, low, high = interval
    return f"{point:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
