"""Measuring a pair: one figure for each document and condition, from which everything else is computed."""

import copy
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_kvtransfer import KVMapper
from hf_kvtransfer.calibration import CalibrationStatistics, collect
from hf_kvtransfer.evaluation import (
    Condition,
    SharedPrefill,
    answer_choices,
    answer_questions,
    conditions,
    measure_fidelity,
    prefix_nll,
    random_mapper,
)
from hf_kvtransfer.pairing import pair_manifest

from .pairs import Pair, Sums
from .recipes import Way, costs
from .training import trained


# With few tokens after the context: what is predicted there is measured by the readings.
_FIDELITY_SCORED = 8


def load(pair: Pair) -> tuple[nn.Module, nn.Module, Any]:
    """Source, target and their tokenizer."""
    dtype = getattr(torch, pair.dtype)
    source, target = (AutoModelForCausalLM.from_pretrained(f, dtype=dtype).eval() for f in (pair.source, pair.target))
    return source, target, AutoTokenizer.from_pretrained(pair.target)


def statistics_of(
    pair: Pair,
    sums: Sums,
    source: nn.Module,
    target: nn.Module,
    tokenizer: Any,
    folder: Path,
    anchored_by: KVMapper | None = None,
) -> CalibrationStatistics:
    """
    Sums over the calibration text, on which maps are fitted, and over the selection text, on which they are compared.
    They are kept in a folder, and read from there when they are complete.
    """
    parts = []
    for name, texts, sequences, heldout in (
        ("calibration", pair.calibration, sums.sequences, 0),
        # All but the first sequence.
        ("selection", pair.selection, sums.selection, 0.99),
    ):
        parts.append(
            collect(
                source,
                target,
                tokenizer,
                texts,
                dataset=f"{pair.name}: {name}",
                sequence_length=sums.tokens,
                num_sequences=sequences,
                token_stride=sums.stride,
                heldout_fraction=heldout,
                batch_size=2 if sums.tokens > 512 else 8,
                dtype=torch.float32,
                manifest=pair_manifest(source, target),
                layout=sums.layout,
                attention_rows=sums.attention_rows,
                sample_tokens=sums.sample_tokens,
                anchored_by=anchored_by,
                checkpoint_dir=folder / name,
                checkpoint_every=10**6,
            )
        )
    return parts[0].merge(parts[1])


def mappers_of(
    pair: Pair, source: nn.Module, target: nn.Module, tokenizer: Any, folder: Path, say: Any = print
) -> dict[str, tuple[Way, KVMapper, dict[str, Any]]]:
    """Every recipe of a pair, solved; with what is to be told of it."""
    made: dict[str, tuple[Way, KVMapper, dict[str, Any]]] = {}
    first: dict[str, KVMapper] = {}
    for name, sums in pair.sums.items():
        started = time.perf_counter()
        place = folder / f"statistics-{name}"
        statistics = statistics_of(pair, sums, source, target, tokenizer, place, first.get(name))
        say(f"  statistics “{name}”: {statistics.tokens['fit']:,} tokens in {time.perf_counter() - started:.0f} s")
        for other, wanted in pair.sums.items():
            if name == "all" and wanted.anchored_by:
                first[other] = KVMapper.from_statistics(statistics, **wanted.anchored_by)
        for way in pair.ways:
            if way.sums != name:
                continue
            started = time.perf_counter()
            mapper = _made(pair, way, statistics, made, source, target, tokenizer)
            seconds = time.perf_counter() - started
            described = _described(pair, way, mapper, statistics, seconds)
            made[way.name] = way, mapper, described
            say(f"  {way.name}: solved in {seconds:.0f} s, {100 * described['cost']['here']:.1f} % of a prefill")
        del statistics
    # In the order of the list, whatever they were solved from.
    return {way.name: made[way.name] for way in pair.ways}


def _made(
    pair: Pair,
    way: Way,
    statistics: CalibrationStatistics,
    made: dict[str, Any],
    source: nn.Module,
    target: nn.Module,
    tokenizer: Any,
) -> KVMapper:
    if way.of is None:
        return KVMapper.from_statistics(statistics, **way.recipe)
    if way.trained is not None:
        return trained(made[way.of][1], source, target, tokenizer, pair.calibration, **way.trained)
    mapper = copy.copy(made[way.of][1])
    mapper.config = copy.deepcopy(mapper.config)
    mapper.config.update(way.recipe)
    if "first_token" in way.recipe:
        # Without these parameters, and the others shared.
        weights = mapper.state_dict()
        mapper = KVMapper(mapper.config).eval()
        mapper.load_state_dict({name: weights[name] for name in mapper.state_dict()}, assign=True)
    return mapper


def _described(
    pair: Pair, way: Way, mapper: KVMapper, statistics: CalibrationStatistics, seconds: float
) -> dict[str, Any]:
    config = mapper.config
    # Of a trained mapper those of the closed form that it started from.
    scores = config.scores if "r2" in config.scores else config.scores["closed_form"]
    heldout = scores["r2"]["heldout"]
    return {
        "role": way.role,
        "recipe": way.recipe,
        "of": way.of,
        "trained": way.trained,
        "calibration_tokens": statistics.tokens["fit"],
        "seconds_to_solve": seconds,
        "parameters": mapper.num_parameters(),
        "k": config.k,
        "anchor_layers": config.anchor_layers,
        "anchor_start": config.anchor_start,
        "exact_prefix": config.exact_prefix,
        "exact_suffix": config.exact_suffix,
        "r2_in_sample": {kind: scores["r2"]["fit"][f"{kind}_mean"] for kind in ("keys", "values")},
        "r2_heldout": {kind: heldout[f"{kind}_mean"] for kind in ("keys", "values")},
        "r2_entry": heldout.get("entry"),
        "k_candidates": scores.get("k_candidates", {}),
        "anchors_compared": config.selection.get("anchors", []),
        "cost": costs(config, pair.readings[0].prefix),
    }


def measure(pair: Pair, folder: Path, say: Any = print) -> dict[str, Any]:
    """
    All figures of one pair.

    Args:
        pair (`Pair`): what is measured.
        folder (`Path`): where statistics are kept.
        say (`Callable`, *optional*, defaults to `print`): where progress is told.

    Returns:
        `dict`: raw values per document, as JSON types.
    """
    started = time.perf_counter()
    source, target, tokenizer = load(pair)
    mappers = mappers_of(pair, source, target, tokenizer, folder, say)
    read = SharedPrefill(source)
    main = mappers[pair.main][1]
    # The source alone, the target native, no context and, where shapes allow, the raw cache; with the controls of
    # the main recipe, which are this benchmark's own, since they share the source's prefill.
    alone = [c for c in conditions(source, target, main) if c.name not in ("transferred", "random mapper")]
    alone = [condition for condition in alone if condition.name != "different document"]
    controls = [
        _transferred("random mapper", random_mapper(main), read, target),
        _transferred("different document", main, read, target, different=True),
    ]
    recipes = [_transferred(name, mapper, read, target) for name, (_, mapper, _) in mappers.items()]
    ways = [*alone, *controls, *recipes]
    main_ways = [condition for condition in ways if condition.name not in mappers or mappers[condition.name][0].is_main]
    result: dict[str, Any] = {
        "name": pair.name,
        "title": pair.title,
        "main": pair.main,
        "dtype": pair.dtype,
        "note": pair.note,
        "bars": pair.bars,
        "recipes": {name: described for name, (_, _, described) in mappers.items()},
        "readings": {},
        "choices": {},
    }
    for reading in pair.readings:
        scored = prefix_nll(
            main_ways if reading.is_long else ways,
            pair.test,
            tokenizer,
            prefix=reading.prefix,
            scored=reading.scored,
            max_chunks=reading.chunks,
            reference="target native",
        )
        result["readings"][reading.name] = {
            name: {"nll": one.nll, "kl": one.kl, "agreement": one.agreement, "seconds": one.median_seconds()}
            for name, one in scored.items()
        }
        say(f"  text {reading.name}: after {time.perf_counter() - started:.0f} s")
    first = pair.readings[0]
    for _, mapper, described in mappers.values():
        fidelity = measure_fidelity(
            _converter(mapper, read, target),
            target,
            pair.test,
            tokenizer,
            prefix=first.prefix,
            scored=min(_FIDELITY_SCORED, first.scored),
            max_chunks=min(pair.attention_chunks, first.chunks),
        )
        described["attention_cosine"] = fidelity.chunk_cosine
        described["r2_test"] = {kind: fidelity.means()[f"r2_{kind}"] for kind in ("keys", "values")}
    say(f"  attention: after {time.perf_counter() - started:.0f} s")
    if pair.questions:
        answered = answer_questions(ways, pair.questions, tokenizer)
        result["questions"] = {name: {"correct": one.correct, "nll": one.nll} for name, one in answered.items()}
        result["documents"] = {}
        for question in pair.questions:
            result["documents"].setdefault(question.kind, []).append(question.document)
        lengths = sorted(len(tokenizer(question.document).input_ids) for question in pair.questions)
        result["question_tokens"] = lengths[len(lengths) // 2]
        for _, mapper, described in mappers.values():
            described["cost"]["questions"] = costs(mapper.config, result["question_tokens"])["here"]
        say(f"  look-ups: after {time.perf_counter() - started:.0f} s")
    for name, (choices, shots) in pair.choices.items():
        scored = answer_choices(main_ways, choices, tokenizer, shots=shots)
        result["choices"][name] = {
            condition: {"correct": one.hits(normalised=True), "nll": _right(one)} for condition, one in scored.items()
        }
        result["choices"][name]["chance"] = next(iter(scored.values())).chance()
        say(f"  {name}: after {time.perf_counter() - started:.0f} s")
    result["seconds"] = time.perf_counter() - started
    return result


def _right(result: Any) -> list[float]:
    """Nats per token of the right option, by which recipes differ where their accuracies don't."""
    return [
        nll[correct[0]] / tokens[correct[0]]
        for nll, tokens, correct in zip(result.nll, result.tokens, result.correct, strict=True)
    ]


def _converter(mapper: KVMapper, read: SharedPrefill, target: nn.Module) -> Any:
    def convert(ids: Tensor) -> Any:
        given = {"input_ids": ids, "target": target} if mapper.config.needs_target else {}
        return mapper.convert(read(ids), **given)

    return convert


def _transferred(
    name: str, mapper: KVMapper, read: SharedPrefill, target: nn.Module, different: bool = False
) -> Condition:
    def make(context: Tensor, other: Tensor) -> tuple[Any, float]:
        ids = other if different else context
        cache = read(ids)
        given = {"input_ids": ids, "target": target} if mapper.config.needs_target else {}
        started = time.perf_counter()
        made = mapper.convert(cache, **given)
        return made, time.perf_counter() - started

    return Condition(name, target, make)
