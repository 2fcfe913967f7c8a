"""One evaluation of a mapper, from both models and data to a report; one that was interrupted goes on."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from torch import Tensor, nn
from transformers.utils import logging

from ..calibration import CalibrationStatistics
from ..calibration.probes import layer_scores
from ..calibration.texts import starting_token
from ..config import KVMapperConfig
from ..costs import conversion_flops
from ..errors import KVTransferError, UnsupportedModelError
from ..features import KINDS
from ..geometry import tokenizer_fingerprint
from ..mapper import KVMapper
from ..report import TransferReport
from ..report.schema import SCHEMA_VERSION
from .checks import check_draws, check_tokenizer
from .choices import Choice, encode_choice
from .controls import Condition, SharedPrefill, anchor_alone, conditions, raw_layers, transfer
from .fidelity import Comparison
from .inputs import (
    Sizes,
    batches,
    check_reach,
    chunks_of,
    digest,
    digest_of_mapper,
    digest_of_pair,
    dtype_of,
    settings_of,
    versions,
)
from .journal import Journal
from .prefix import shortened
from .questions import Question, different_documents, encode
from .tasks import (
    TRANSFERRED,
    TextSums,
    asked,
    choice_measures,
    chosen,
    fidelity_section,
    question_measures,
    read_batch,
)


logger = logging.get_logger(__name__)

_ANCHOR_ALONE, _RAW = "anchor alone", "source cache raw"


def evaluate_mapper(
    source: nn.Module,
    target: nn.Module,
    mapper: KVMapper,
    tokenizer: Any,
    *,
    texts: str | Iterable[str],
    questions: Sequence[Question] | None = None,
    choices: Sequence[Choice] | None = None,
    shots: int = 0,
    prefix: int = 1024,
    scored: int | None = None,
    max_chunks: int = 32,
    lengths: Sequence[int] | None = None,
    batch_size: int = 1,
    queries: int | None = None,
    statistics: CalibrationStatistics | str | os.PathLike[str] | None = None,
    seed: int = 0,
    samples: int = 2000,
    data: dict[str, str] | None = None,
    latency: list[dict[str, Any]] | None = None,
    work_dir: str | os.PathLike[str] | None = None,
    restart: bool = False,
    progress: bool = True,
) -> TransferReport:
    """
    Measures what a mapper keeps, beside both models alone and beside the controls of a believable result: fidelity and
    likelihood on held-out text, with distance from the hand-over and with the length of the context; right answers to
    questions about documents; and multiple choice. Every figure has a 95 % interval, drawn over documents.

    Text is scored by the published protocol (arXiv 2608.03893, §4): non-overlapping chunks, of which the last `scored`
    tokens are predicted after a prefix that was converted. The different document of a chunk is one from about half the
    text away. At all lengths the same tokens are scored, after as many of those before them.

    Args:
        source (`PreTrainedModel`): the model that reads.
        target (`PreTrainedModel`): the model that goes on.
        mapper ([`KVMapper`]): of this pair.
        tokenizer (`PreTrainedTokenizerBase`): of both models.
        texts (`str` or `Iterable[str]`):
            Held-out text, one or several, read as far as needed. Neither the mapper's calibration nor what its recipe
            was chosen on.
        questions (`Sequence[Question]`, *optional*): from [`read_questions`].
        choices (`Sequence[Choice]`, *optional*): from [`read_choices`].
        shots (`int`, *optional*, defaults to 0): of `choices`, how many are shown with their answers and not asked.
        prefix (`int`, *optional*, defaults to 1024): tokens of context.
        scored (`int`, *optional*): tokens that are scored after it; as many as the prefix by default.
        max_chunks (`int`, *optional*, defaults to 32): chunks of text at most.
        lengths (`Sequence[int]`, *optional*):
            Other lengths of context, in tokens; a quarter and half of the prefix by default. Those for which there is
            too little text, or that a model doesn't reach, are left out, and `settings` says so.
        batch_size (`int`, *optional*, defaults to 1): chunks at once; figures differ by rounding only.
        queries (`int`, *optional*):
            At how many positions of a context attention is compared: no more than the prefix has; 32 or all of them by
            default.
        statistics ([`CalibrationStatistics`] or `str`, *optional*):
            Those that the mapper was solved from, or their folder. With them the report has the R² of each target layer
            from each source layer, and the condition `anchor alone` where there is such a thing ([`anchor_alone`]).
        seed (`int`, *optional*, defaults to 0): of the random mapper and of the intervals, below 2³².
        samples (`int`, *optional*, defaults to 2000):
            How often documents are drawn for an interval, 100,000 times at most.
        data (`dict[str, str]`, *optional*):
            What the report calls the data: names for `texts`, `questions` and `choices`, and the `split`.
        latency (`list[dict]`, *optional*): rows of `measure_latency`, for the report.
        work_dir (`str` or `os.PathLike`, *optional*):
            Where each result is kept as soon as it is there. An evaluation that was interrupted goes on from there, and
            gives the same report.
        restart (`bool`, *optional*, defaults to `False`): whether to start anew whatever is in `work_dir`.
        progress (`bool`, *optional*, defaults to `True`): whether to show bars, on a terminal only.

    Returns:
        [`TransferReport`]: two from the same inputs differ in times only.

    Raises:
        [`PairMismatchError`]: if a model, the tokenizer or the statistics are of another pair than the mapper.
        [`KVTransferError`]:
            If a number is out of range, the text is too short, the questions are about one document, a question can't
            be asked or is longer than a model reads, a model predicts NaN, or `work_dir` holds results of another
            evaluation.
    """
    started = time.perf_counter()
    check_tokenizer(tokenizer)
    check_draws(seed, samples)
    sizes = Sizes.of(
        prefix=prefix,
        scored=scored,
        lengths=lengths,
        max_chunks=max_chunks,
        batch_size=batch_size,
        queries=queries,
        shots=shots,
    )
    mapper.check_pair(source=source, target=target, tokenizer=tokenizer)
    models = {"source": source, "target": target}
    chunks, sizes, lengths_left_out = chunks_of(texts, tokenizer, sizes, models)
    questions, choices = list(questions or ()), list(choices or ())
    others = different_documents(questions) if questions else []
    # What can't be asked shows now, not after hours.
    _check_askable([*questions, *choices])
    for question, other in zip(questions, others, strict=True):
        context, different, asking, answer = encode(question, other, tokenizer)
        longest = max(context.shape[1], different.shape[1]) + asking.shape[1] + answer.shape[1]
        check_reach(f"question {question.question!r}", longest, models)
    if choices and len(choices) < shots + 2:
        raise KVTransferError(
            f"Got {len(choices)} questions of several options, and {shots} of them are to be shown; expected two or "
            "more beside those, so that there is a different document to each."
        )
    shown = "".join(f"{shot.answered()}\n\n" for shot in choices[:shots])
    put = choices[shots:]
    turns = list(zip(put, [*put[1:], *put[:1]], strict=True))
    for choice, following in turns:
        context, different, options_ids = encode_choice(choice, following, tokenizer, shown)
        longest = max(context.shape[1], different.shape[1]) + max(map(len, options_ids))
        check_reach(f"question {choice.question!r}", longest, models)
    if statistics is not None:
        statistics = _statistics_of_pair(statistics, source, target, tokenizer)
    named = dict(data or {})
    _warn_of_calibration_text(mapper.config, named)
    alone = None if statistics is None else anchor_alone(mapper, statistics)
    inputs = {
        "versions": versions(),
        **digest_of_pair(source, target),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "mapper": digest_of_mapper(mapper),
        _ANCHOR_ALONE: digest_of_mapper(alone),
        "texts": digest(chunks.tolist()),
        "questions": digest([asdict(question) for question in questions]),
        "choices": digest([asdict(choice) for choice in choices]),
        **settings_of(sizes),
        "seed": seed,
    }
    ways = _conditions(source, target, mapper, alone, seed)
    work = _Work(Journal(work_dir, inputs, restart), ways, starting_token(tokenizer), progress)

    readings = {length: work.text(chunks, length, sizes) for length in sizes.lengths}
    main, options = readings[sizes.prefix], {"samples": samples, "seed": seed}
    fidelity = fidelity_section(work.fidelity(chunks, sizes), len(chunks), main.divergence(**options))
    measures = main.measures(**options)
    if questions:
        pairs = list(zip(questions, others, strict=True))
        found = work.results("Questions", pairs, lambda pair: asked(work.conditions, pair[0], pair[1], tokenizer))
        measures += question_measures(found, questions, **options)
    if choices:
        found = work.results("Choices", turns, lambda pair: chosen(work.conditions, pair[0], pair[1], tokenizer, shown))
        measures += choice_measures(found, put, **options)
    layers_r2, split = _layers_r2(statistics)
    return TransferReport.from_dict(
        {
            "schema_version": SCHEMA_VERSION,
            "pair": _pair(mapper.config),
            "mapper": _described(mapper, sizes.prefix),
            "settings": {
                **named,
                **settings_of(sizes),
                "chunks": len(chunks),
                "lengths_left_out": lengths_left_out,
                "conditions_left_out": _left_out(mapper, statistics is not None),
                "questions_asked": len(questions),
                "choices_asked": max(len(choices) - shots, 0),
                "layers_r2_split": split,
                "seed": seed,
                "samples": samples,
                "dtype": {"source": dtype_of(source), "target": dtype_of(target), "mapper": dtype_of(mapper)},
                "device": next(target.parameters()).device.type,
            },
            "versions": versions(),
            "fidelity": fidelity,
            "measures": measures,
            "drift": main.drift(),
            "lengths": [reading.length(length) for length, reading in readings.items()],
            "layers_r2": layers_r2,
            "latency": latency,
            "seconds": time.perf_counter() - started,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
    )


def _check_askable(given: Iterable[Question | Choice]) -> None:
    for one in given:
        if problem := one.problem():
            raise KVTransferError(f"A question can't be asked ({problem}). Correct it, or leave it out: {one!r}.")


class _Work:
    """The conditions, and the results of each task under them, made or read back."""

    def __init__(self, journal: Journal, ways: list[Condition], first: int | None, progress: bool) -> None:
        self.conditions, self._first = ways, first
        self._journal, self._progress = journal, progress

    def results(self, task: str, units: Sequence[Any], make: Callable[[Any], Any]) -> Iterable[Any]:
        return self._journal.results(task, units, make, progress=self._progress)

    def text(self, chunks: Tensor, length: int, sizes: Sizes) -> TextSums:
        """All chunks with a context of some length."""
        near = shortened(chunks, length + sizes.scored, self._first)

        def make(pair: tuple[Tensor, Tensor]) -> dict[str, Any]:
            return read_batch(self.conditions, pair[0], pair[1][:, :length], sizes.scored)

        return TextSums(
            self.results(f"Text after {length} tokens", batches(near, sizes.batch_size), make), sizes.scored
        )

    def fidelity(self, chunks: Tensor, sizes: Sizes) -> Iterable[dict[str, Any]]:
        """The converted entries of all prefixes beside the native ones."""
        converted = next(way for way in self.conditions if way.name == TRANSFERRED)
        comparison = Comparison(converted.model, lambda ids: converted.read(ids, ids)[0], sizes.prefix, sizes.queries)
        near = shortened(chunks, sizes.prefix + sizes.scored, self._first)
        contexts = near[:, : sizes.prefix].split(sizes.batch_size)
        return self.results("Fidelity", contexts, lambda context: comparison.compare(context)[0])


def _conditions(
    source: nn.Module, target: nn.Module, mapper: KVMapper, alone: KVMapper | None, seed: int
) -> list[Condition]:
    read = SharedPrefill(source)
    ways = conditions(source, target, mapper, seed, read_source=read)
    if alone is not None:
        place = [way.name for way in ways].index(TRANSFERRED) + 1
        like = next(mapper.parameters(), None)
        alone = alone if like is None else alone.to(like.device)
        ways.insert(place, transfer(_ANCHOR_ALONE, source, target, alone, read_source=read))
    return ways


def _left_out(mapper: KVMapper, has_statistics: bool) -> dict[str, str]:
    """Controls that a reader may look for, and why they aren't there."""
    left_out = {}
    if raw_layers(mapper) is None:
        left_out[_RAW] = "KV heads or head_dim differ"
    if mapper.config.anchor_layers is not None:
        if mapper.config.anchor_start:
            left_out[_ANCHOR_ALONE] = "its stream is predicted from the source"
        elif not has_statistics:
            left_out[_ANCHOR_ALONE] = "it is solved from statistics, and none were given"
    return left_out


def _statistics_of_pair(
    statistics: CalibrationStatistics | str | os.PathLike[str], source: nn.Module, target: nn.Module, tokenizer: Any
) -> CalibrationStatistics:
    if not isinstance(statistics, CalibrationStatistics):
        statistics = CalibrationStatistics.load(statistics)
    manifest = KVMapperConfig(
        source_geometry=statistics.source.to_dict(),
        target_geometry=statistics.target.to_dict(),
        tokenizer_fingerprint=statistics.tokenizer_fingerprint,
        **statistics.manifest,
    )
    KVMapper(manifest).check_pair(source=source, target=target, tokenizer=tokenizer)
    return statistics


def _layers_r2(statistics: CalibrationStatistics | None) -> tuple[dict[str, Any] | None, str | None]:
    """R² of each target layer from each source layer, and on which split of the statistics."""
    if statistics is None:
        return None, None
    split = "heldout" if statistics.tokens["heldout"] else "fit"
    return {kind: layer_scores(statistics, split, [kind]).tolist() for kind in KINDS}, split


def _warn_of_calibration_text(config: KVMapperConfig, named: dict[str, str]) -> None:
    if named.get("texts") is not None and named["texts"] == config.calibration.get("dataset"):
        logger.warning(
            f"The text {named['texts']} is called like the one that the mapper was calibrated on. If it is the same, "
            "the figures are not held out."
        )


def _pair(config: KVMapperConfig) -> dict[str, Any]:
    sides = {side: config.geometry(side) for side in ("source", "target")}
    names = {side: geometry.checkpoint or geometry.model_type for side, geometry in sides.items()}
    return {**names, "source_revision": config.source_revision, "target_revision": config.target_revision}


def _described(mapper: KVMapper, tokens: int) -> dict[str, Any]:
    config = mapper.config
    names = ("preset", "map_type", "k", "anchor_layers", "anchor_start", "exact_prefix", "exact_suffix", "calibration")
    try:
        share = conversion_flops(config, tokens).share_of_prefill
    except UnsupportedModelError:  # the operations of such a model can't be counted
        share = None
    return {
        **{name: getattr(config, name) for name in names},
        "parameters": mapper.num_parameters(),
        "cost_share": share,
        "cost_tokens": tokens,
    }
