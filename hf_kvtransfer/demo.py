"""The whole path on the tiny family that the repository ships: fit, save, load, convert, answer."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .costs import conversion_flops
from .errors import KVTransferError
from .evaluation import (
    answer_questions,
    conditions,
    context_value_kept,
    gap_recovered,
    prefix_nll,
    read_questions,
    transfer,
)
from .loading import load_model, load_tokenizer
from .mapper import KVMapper
from .tables import percent, table


_FOLDER = Path("examples") / "tiny_family"
_PREFIX_TOKENS = 128
_PUBLISHED = "published ridge"
_ALONE = "anchor alone"


def find_family(folder: str | None = None) -> Path:
    """
    The folder of the tiny family: as given, or in the clone that the package or the working directory lies in.

    Raises:
        [`KVTransferError`]: if it is nowhere to be found.
    """
    if folder is not None:
        places = [Path(folder)]
    else:
        here, package = Path.cwd(), Path(__file__).resolve().parent
        places = [root / _FOLDER for root in (here, *here.parents, package.parent)]
    for place in places:
        if (place / "data" / "calibration.jsonl").is_file():
            return place
    raise KVTransferError(
        f"The tiny family was not found ({', '.join(map(str, places[:1]))}); expected `examples/tiny_family` of a "
        "clone of the repository. Run the demo from a clone, or name the folder with `--family`."
    )


def run_demo(
    family: Path,
    *,
    source_name: str = "small",
    target_name: str = "large",
    questions_per_kind: int = 40,
    sequences: int = 500,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """
    Fits a mapper for two members of the tiny family and lets the target answer questions about documents that only
    the source has read.

    Args:
        family (`Path`): the family's folder, from [`find_family`].
        source_name (`str`, *optional*, defaults to `"small"`): the member that reads.
        target_name (`str`, *optional*, defaults to `"large"`): the member that answers.
        questions_per_kind (`int`, *optional*, defaults to 40): how many of each kind of question.
        sequences (`int`, *optional*, defaults to 500): calibration sequences of 256 tokens.
        say (`Callable`, *optional*, defaults to `print`): where the text goes.

    Returns:
        `dict`: the figures of the table, by condition.
    """
    started = time.perf_counter()
    source, target = load_model(str(family / source_name)), load_model(str(family / target_name))
    tokenizer = load_tokenizer(str(family / source_name))
    say(f"Source: {source_name}, {_described(source)}.  Target: {target_name}, {_described(target)}.")

    fitting = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        statistics = Path(folder) / "statistics"
        # Without an exact prefix, so that the published recipe is solved from the same sums.
        mapper = KVMapper.fit(
            source,
            target,
            str(family / "data" / "calibration.jsonl"),
            tokenizer=tokenizer,
            anchor_layers=1,
            exact_prefix=0,
            sequence_length=256,
            num_sequences=sequences,
            token_stride=2,
            statistics_dir=statistics,
        )
        say(
            f"Calibrated on {mapper.config.calibration['tokens']['fit']:,} tokens and solved in "
            f"{time.perf_counter() - fitting:.0f} s."
        )
        published = KVMapper.from_statistics(statistics, preset="heo2026")
        alone = KVMapper.from_statistics(statistics, anchor_layers=1, exact_prefix=0, k=0)
        mapper.save_pretrained(Path(folder) / "mapper")
        mapper = KVMapper.from_pretrained(Path(folder) / "mapper", min_gap_recovered=False)
    mapper.check_pair(source=source, target=target, tokenizer=tokenizer)
    costs = {
        name: conversion_flops(one.config, _PREFIX_TOKENS).share_of_prefill
        for name, one in (("transferred", mapper), (_PUBLISHED, published), (_ALONE, alone))
    }
    for name, one in (("transferred", mapper), (_PUBLISHED, published), (_ALONE, alone)):
        r2 = one.config.scores["r2"]["heldout"]
        say(
            f"{name}: preset {one.config.preset}, k = {one.config.k}, anchor layers {one.config.anchor_layers}, "
            f"{one.num_parameters() / 1e6:.1f} M parameters, held-out R² {r2['keys_mean']:.2f} (keys) and "
            f"{r2['values_mean']:.2f} (values)."
        )

    questions = _first_of_each_kind(read_questions(family / "data" / "questions.jsonl"), questions_per_kind)
    kinds = list(dict.fromkeys(question.kind for question in questions))
    text = (family / "data" / "text_test.txt").read_text(encoding="utf-8")
    ways = conditions(source, target, mapper)
    place = [way.name for way in ways].index("transferred") + 1
    ways[place:place] = [
        transfer(_PUBLISHED, source, target, published),
        transfer(_ALONE, source, target, alone),
    ]
    answers = answer_questions(ways, questions, tokenizer)
    readings = prefix_nll(ways, text, tokenizer, prefix=_PREFIX_TOKENS, max_chunks=40)

    say(f"\n{len(questions)} questions about documents of six to eight facts, and {_PREFIX_TOKENS}-token prefixes:\n")
    rows = []
    for way in ways:
        asked, read = answers[way.name], readings[way.name]
        rows.append(
            [
                way.name,
                *(percent(asked.accuracy(kind)) for kind in kinds),
                percent(asked.accuracy()),
                f"{asked.mean_nll():.2f}",
                f"{read.mean_nll():.3f}",
                f"{1000 * read.median_seconds():.1f}",
                percent(costs[way.name]) if way.name in costs else "100 %" if way.name == "target native" else "",
            ]
        )
    say(table(["who answers", *kinds, "all", "answer NLL", "text NLL", "ms", "cost"], rows))
    figures = {
        way.name: {
            "accuracy": answers[way.name].accuracy(),
            "answer_nll": answers[way.name].mean_nll(),
            "text_nll": readings[way.name].mean_nll(),
        }
        for way in ways
    }
    say(_legend(questions, figures))
    say(f"\nAll of it took {time.perf_counter() - started:.0f} s.")
    return figures


def _legend(questions: list[Any], figures: dict[str, dict[str, float]]) -> str:
    chance = sum(1 / max(len(question.choices), 1) for question in questions) / len(questions)
    shares = []
    for name, unit in (("accuracy", "look-ups"), ("text_nll", "text NLL")):
        native, alone = figures["target native"][name], figures["source alone"][name]
        transferred, nothing = figures["transferred"][name], figures["no context"][name]
        is_better = native > alone if name == "accuracy" else native < alone
        gap = percent(gap_recovered(transferred, alone, native)) if is_better else "– (the source is the better model)"
        kept = percent(context_value_kept(transferred, nothing, native))
        shares.append(f"  {unit}: gap recovered {gap}, context value kept {kept}")
    return "\n".join(
        [
            f"\nAccuracy: the answer is the most likely token of the whole vocabulary; guessing among the places named "
            f"would give {percent(chance)}.",
            "NLL in nats, per answer and per token of text. ms: median time until the answering side has the cache of "
            "a prefix — its own prefill, or the conversion of a source cache that exists already. cost: of that in "
            "floating-point operations, as a share of the target's prefill.",
            "What the transfer keeps:",
            *shares,
            f"  In words: {_verdict(figures)}",
        ]
    )


def _verdict(figures: dict[str, dict[str, float]]) -> str:
    """What the table says of look-ups, which R² and perplexity hide."""
    accuracy = {name: values["accuracy"] for name, values in figures.items()}
    sentences = [_told(accuracy, "transferred"), f"With the {_PUBLISHED}, {_told(accuracy, _PUBLISHED)}"]
    if accuracy[_ALONE] >= accuracy["transferred"]:
        sentences.append(
            "The anchor alone answers as many look-ups as the transfer does: on this pair its own first layer is what "
            "brings them back, and the source's cache adds nothing to them."
        )
    return " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)


def _told(accuracy: dict[str, float], name: str) -> str:
    kept = accuracy[name] - accuracy["different document"]
    worth = accuracy["target native"] - accuracy["different document"]
    if kept < 0.1 * worth:
        return "look-ups are lost: the target answers as if it had been given a different document."
    if accuracy[name] < accuracy["source alone"]:
        return "some look-ups survive, but the source alone answers more of them."
    return "look-ups survive, and the target answers more of them than the source alone."


def _described(model: Any) -> str:
    config = model.config
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    return f"{config.num_hidden_layers} layers × {config.hidden_size}, {size:.1f} M parameters"


def _first_of_each_kind(questions: list[Any], count: int) -> list[Any]:
    kinds = list(dict.fromkeys(question.kind for question in questions))
    return [q for kind in kinds for q in [q for q in questions if q.kind == kind][:count]]
