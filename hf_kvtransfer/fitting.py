"""From two loaded models, or from saved statistics, to a fitted mapper."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from .calibration import CalibrationStatistics, collect, iter_texts, r2
from .calibration.apart import collect_apart
from .calibration.ridge import RidgeSolution
from .calibration.texts import DEFAULT_DATASET, describe_source
from .config import KVMapperConfig
from .errors import CalibrationError
from .geometry import ModelGeometry, tokenizer_fingerprint
from .mapper import KVMapper
from .memory import available_memory
from .pairing import pair_manifest
from .recipes import PRESETS, Recipe, recipe
from .rope import RotaryCodec, verify_position_free
from .saving import check_writable
from .solving import K_CANDIDATES, Entry, Solved, mean, solve_published, solve_selected


__all__ = ["K_CANDIDATES", "PRESETS", "fit_mapper", "mapper_from_statistics"]


logger = logging.get_logger(__name__)

# Beside statistics of the target's own stream, those of what it makes of a predicted one.
_REFIT = "anchored"


def fit_mapper(
    source: nn.Module,
    target: nn.Module,
    dataset: Any = None,
    *,
    tokenizer: Any,
    preset: str = "auto",
    k: Any = None,
    ridge_lambda: float | None = None,
    heads: str | None = None,
    joint: bool | None = None,
    window: int | None = None,
    order: str | None = None,
    weighted: bool | None = None,
    anchor_layers: Any = None,
    anchor_start: Any = None,
    max_cost: float | None = None,
    exact_prefix: int | None = None,
    exact_suffix: int | None = None,
    statistics_dir: str | os.PathLike[str] | None = None,
    kinds_apart: bool = False,
    target_tokenizer: Any = None,
    source_revision: str | None = None,
    target_revision: str | None = None,
    dataset_name: str | None = None,
    dataset_config: str | None = None,
    dataset_split: str = "train",
    text_field: str = "text",
    **calibration: Any,
) -> KVMapper:
    """
    Runs both models over the same text, sums second moments between all their layers, and solves the maps.

    Args:
        source (`PreTrainedModel`): the model whose caches will be converted.
        target (`PreTrainedModel`): the model that will use them.
        dataset (`str`, `datasets.Dataset`, `list[str]`, *optional*):
            Text: a list of strings, a `.txt` or `.jsonl` file, a dataset, or the name of one on the Hub. Defaults to
            `HuggingFaceFW/fineweb-edu`, streamed.
        tokenizer (`PreTrainedTokenizerBase`): the tokenizer that both models share.
        preset (`str`, *optional*, defaults to `"auto"`):
            The recipe. `"auto"` chooses, for the keys and the values of every target layer, what they read and λ by
            held-out attention-output error. `"heo2026"` is arXiv 2608.03893, `"cachebridge2026"` arXiv 2609.00891.
        k (`int`, `"all"` or `"auto"`, *optional*):
            How many source layers each map reads; 0, which leaves the anchor alone, with `anchor_layers`. `"auto"`,
            the default of all presets, takes the one with the highest held-out R² among the paper's values, except
            with the preset `"auto"`, which chooses for each map.
        ridge_lambda (`float`, *optional*): λ, on the unnormalised Gram matrix; 0.01 in the published presets.
        heads (`"full"` or `"local"`, *optional*): whether a target head reads all source heads, or its own.
        joint (`bool`, *optional*): whether keys and values are both read to make either.
        window (`int`, *optional*): how many previous tokens are read too; 0 by default.
        order (`"ranked"` or `"greedy"`, *optional*):
            Source layers by the R² of single-layer probes, or by what each adds to those before.
        weighted (`bool`, *optional*): whether rows are weighted by attention.
        anchor_layers (`int` or `"auto"`, *optional*):
            How many of its own first layers the target runs over the context in every conversion. Look-ups into the
            context mostly need one or a few; by default there are none, and the cache alone is converted. `"auto"`
            takes the number that leaves the smallest held-out error at `max_cost`; a list, one of these.
        anchor_start (`int`, *optional*):
            The first of these layers, or a list of those to choose among; 0 by default, where the embedding enters.
            Above 0 what enters is predicted from the source cache. That pays where the source knows the target's
            residual stream well, as a pruned or fine-tuned relative does. The text is then read twice: the maps of the
            layers above are solved on what the target makes of the prediction.
        max_cost (`float`, *optional*):
            What a conversion may cost, as a share of the target's prefill of 1,024 tokens, in floating-point
            operations; of the preset `"auto"` only. No limit by default, 0.4 with `anchor_layers="auto"`.
        exact_prefix (`int`, *optional*):
            First tokens of a context that the target reads itself, which attention falls back on. 4 by default with the
            preset `"auto"` and an anchor, else none.
        exact_suffix (`int`, *optional*): last tokens that it reads itself on top of the converted ones; 0 by default.
        statistics_dir (`str` or `os.PathLike`, *optional*):
            Where the statistics are kept while they grow and afterwards. A fit that was interrupted goes on from there.
        kinds_apart (`bool`, *optional*, defaults to `False`):
            Read the text once for keys and once for values, which halves the memory for statistics and doubles the
            time; with `statistics_dir`, for maps that don't read both kinds.
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*):
            The target's own tokenizer; if given, it must be the same as `tokenizer`.
        source_revision (`str`, *optional*):
            The revision that the source was loaded with from the Hub, if not the main branch; recorded as a commit.
        target_revision (`str`, *optional*): the same for the target.
        dataset_name (`str`, *optional*): what the manifest calls the text; by default derived from `dataset`.
        dataset_config (`str`, *optional*): of a dataset on the Hub.
        dataset_split (`str`, *optional*, defaults to `"train"`): of a dataset on the Hub.
        text_field (`str`, *optional*, defaults to `"text"`): the field of a row that holds the text.
        **calibration:
            As in [`~hf_kvtransfer.calibration.collect`]: `sequence_length` (1,024 tokens), `num_sequences` (500),
            `token_stride` (4), `heldout_fraction` (0.1), `batch_size`, `dtype`, `progress`, ….

    Returns:
        [`KVMapper`]: in evaluation mode, float32, on the CPU.

    Raises:
        [`UnsupportedModelError`]: if a model can't be mapped exactly.
        [`CalibrationError`]: if the text, the tokenizer or earlier statistics don't fit, or the recipe is impossible.
        [`SingularSystemError`]: if the ridge system has no unique solution.
    """
    changes = {
        "k": k,
        "ridge_lambda": ridge_lambda,
        "heads": heads,
        "joint": joint,
        "window": window,
        "order": order,
        "weighted": weighted,
        "anchor_layers": anchor_layers,
        "anchor_start": anchor_start,
        "max_cost": max_cost,
        "exact_prefix": exact_prefix,
        "exact_suffix": exact_suffix,
    }
    chosen = recipe(preset, **changes)
    sequences = calibration.get("num_sequences")
    is_single = sequences == 1 and not isinstance(sequences, bool)
    if chosen.selects and (calibration.get("heldout_fraction") == 0 or is_single):
        raise CalibrationError(
            'The preset "auto" compares recipes on held-out sequences, and none are to be held out; expected a '
            "`heldout_fraction` above 0 and two sequences or more. Hold some out, or use a published preset."
        )
    if statistics_dir is not None:
        check_writable(statistics_dir)
    geometries = ModelGeometry.from_model(source), ModelGeometry.from_model(target)
    _check_layers(chosen, *geometries)
    for model in (source, target):
        verify_position_free(model, RotaryCodec.from_model(model))
    dataset = DEFAULT_DATASET if dataset is None else dataset
    if kinds_apart and (statistics_dir is None or isinstance(dataset, Iterator)):
        raise CalibrationError(
            f"kinds_apart needs a `statistics_dir`, given {statistics_dir}, and a dataset that can be read twice, "
            f"given a {type(dataset).__name__}; expected a folder, and a list, a file or the name of a dataset."
        )
    texts = partial(iter_texts, dataset, text_field=text_field, split=dataset_split, config_name=dataset_config)
    if target_tokenizer is not None:
        calibration["fingerprints"] = tokenizer_fingerprint(tokenizer), tokenizer_fingerprint(target_tokenizer)
    calibration.setdefault("layout", chosen.layout(*geometries, memory=0 if kinds_apart else available_memory() // 2))
    calibration.setdefault("attention_rows", chosen.weighted)
    calibration.setdefault("sample_tokens", chosen.sample_tokens)
    manifest = pair_manifest(source, target, source_revision, target_revision)
    name = dataset_name or describe_source(dataset)
    calibration |= {"dataset": name, "manifest": manifest}
    gathered = partial(_gathered, source, target, tokenizer, texts, kinds_apart)
    statistics = gathered(checkpoint_dir=statistics_dir, **calibration)
    anchors = [] if isinstance(dataset, Iterator) else chosen.anchors(geometries[1].num_layers)
    # Whether maps will read what the target makes of a predicted stream, of which these statistics know nothing yet.
    refits = [start > 0 and start + layers < geometries[1].num_layers for start, layers in anchors]
    if refits == [True] and not chosen.chooses_anchor:
        # Of this first solution only what enters the anchor is needed.
        first = {**changes, "k": 1, "max_cost": None, "exact_prefix": chosen.tokens_before}
        mapper, solved = _solve(statistics, "heo2026", first)
    else:
        mapper, solved = _solve(statistics, preset, changes)
    settled = mapper.config.anchor_start, mapper.config.anchor_layers
    if settled not in anchors or not refits[anchors.index(settled)]:
        return mapper
    depth = sum(settled)
    # What the target makes of a predicted stream is not quite its own; the maps that read it are solved on what they
    # will be given. The anchor and the prediction stay.
    calibration["layout"] = replace(calibration["layout"], anchors=(depth,))
    folder = None if statistics_dir is None else os.path.join(statistics_dir, _REFIT)
    statistics = gathered(checkpoint_dir=folder, anchored_by=mapper, **calibration)
    changes |= {"anchor_start": settled[0], "anchor_layers": settled[1]}
    if chosen.chooses_anchor:
        changes["max_cost"] = mapper.config.selection["max_cost"]
    refitted, _ = _solve(statistics, preset, changes, solved.entry)
    if chosen.chooses_anchor:
        refitted.config.selection["anchors"] = mapper.config.selection["anchors"]
    return refitted


def _gathered(
    source: nn.Module, target: nn.Module, tokenizer: Any, texts: Callable[[], Any], apart: bool, **wishes: Any
) -> CalibrationStatistics:
    if apart:
        return collect_apart(source, target, tokenizer, texts=texts, **wishes)
    return collect(source, target, tokenizer, texts(), **wishes)


def mapper_from_statistics(
    statistics: CalibrationStatistics | str | os.PathLike[str], *, preset: str = "auto", **changes: Any
) -> KVMapper:
    """
    Solves a mapper from calibration statistics, without touching a model.

    Args:
        statistics ([`CalibrationStatistics`] or `str`): the statistics, or the folder they were saved to.
        preset (`str`, *optional*, defaults to `"auto"`): the recipe.
        **changes:
            What differs from the preset: `k`, `ridge_lambda`, `heads`, `joint`, `window`, `order`, `weighted`,
            `anchor_layers`, `anchor_start`, `max_cost`, `exact_prefix`, `exact_suffix`, as in [`fit_mapper`].

    Returns:
        [`KVMapper`]: with R² in sample and held out, per target layer, kind and KV head, in `config.scores`, and all
        that was compared in `config.selection`.

    Raises:
        [`CalibrationError`]: if the statistics are empty, lack the manifest of their pair or what the recipe reads.
        [`SingularSystemError`]: if the ridge system has no unique solution.
    """
    if not isinstance(statistics, CalibrationStatistics):
        statistics = CalibrationStatistics.load(statistics)
    return _solve(statistics, preset, changes)[0]


def _solve(
    statistics: CalibrationStatistics, preset: str, changes: dict[str, Any], entry: Entry | None = None
) -> tuple[KVMapper, Solved]:
    chosen = recipe(preset, **changes)
    _check_layers(chosen, statistics.source, statistics.target)
    _check_statistics(statistics, chosen, entry)
    manifest = statistics.manifest
    for name in ("source_config", "target_config"):
        if name not in manifest:
            raise CalibrationError(
                f"The statistics carry no `{name}`; expected statistics collected by `KVMapper.fit` or with "
                "`collect(..., manifest=pair_manifest(source, target))`. Collect them again."
            )
    config = KVMapperConfig(
        source_geometry=statistics.source.to_dict(),
        target_geometry=statistics.target.to_dict(),
        preset=preset,
        exact_prefix=chosen.tokens_before,
        exact_suffix=chosen.exact_suffix,
        tokenizer_fingerprint=statistics.tokenizer_fingerprint,
        calibration={**statistics.calibration, "tokens": statistics.tokens},
        **manifest,
    )
    solve = solve_selected if chosen.selects else solve_published
    solved = solve(statistics, chosen, config, entry)
    config.support, config.ridge_lambda, config.selection = (
        solved.solution.support,
        solved.ridge_lambda,
        solved.selection,
    )
    if solved.anchor is not None:
        config.anchor_start, config.anchor_layers = solved.anchor
    for layer, kind in sorted(solved.first_token):
        config.first_token.setdefault(kind, []).append(layer)
    read = [len(one.layers) for entry in config.supports() for one in (entry or {}).values()]
    config.k = max(read, default=0)
    config.scores = {"r2": _scored(statistics, solved.solution)}
    if solved.k_candidates:
        config.scores["k_candidates"] = solved.k_candidates
    if solved.entry is not None:
        config.entry = solved.entry.support.to_dict()
        config.scores["r2"]["heldout"]["entry"] = solved.entry.r2
    return _with_weights(KVMapper(config), solved), solved


def _check_statistics(statistics: CalibrationStatistics, chosen: Recipe, entry: Entry | None) -> None:
    """Refuses recipes whose maps would be used on other tokens or streams than they are solved on."""
    layout, depth = statistics.layout, statistics.target.num_layers
    if chosen.tokens_before < layout.skip:
        logger.warning(
            f"These statistics leave out the first {layout.skip} tokens of every sequence, and this recipe maps "
            f"{f'all but the first {chosen.tokens_before}' if chosen.tokens_before else 'all tokens'}. With "
            f"`exact_prefix={layout.skip}` the target reads them itself."
        )
    anchors = chosen.anchors(depth)
    missing = {start for start, _ in anchors if start and entry is None} - set(layout.anchors)
    above = statistics.calibration.get("anchored_by") is not None
    if missing or (
        above and not all(start and start + count == layout.anchors[-1] for start, count in anchors or [(0, 0)])
    ):
        raise CalibrationError(
            f"These statistics hold the target's residual stream at depths {list(layout.anchors)}"
            f"{', the last as it comes from a predicted one' if above else ''}, and the recipe asks for anchors "
            f"{anchors} (first layer, how many); expected anchors that start and end there. Collect statistics with "
            "the recipe that they are to be solved with, by `KVMapper.fit`."
        )


def _check_layers(chosen: Recipe, source: ModelGeometry, target: ModelGeometry) -> None:
    k, anchor = chosen.k, chosen.anchor_layers
    # With an anchor from the embedding on, the source can be left out: the control that shows what it adds.
    least = 0 if anchor is not None and chosen.anchor_start == 0 else 1
    if k not in ("all", "auto") and not (
        isinstance(k, int) and not isinstance(k, bool) and least <= k <= source.num_layers
    ):
        raise CalibrationError(
            f'k is {k!r}, expected "auto", "all" or a whole number from 1 to {source.num_layers}, the number of source '
            "layers."
        )
    if anchor is not None and not chosen.anchors(target.num_layers):
        raise CalibrationError(
            f"anchor_layers is {anchor} from layer {chosen.anchor_start} on, expected a whole number from 0 to "
            f"{target.num_layers}, the number of target layers, and from 1 on above layer 0."
        )


def _scored(statistics: CalibrationStatistics, solution: RidgeSolution) -> dict[str, Any]:
    scored: dict[str, Any] = {}
    for split in ("fit", "heldout"):
        if statistics.tokens[split]:
            figures = r2(statistics, solution, split)
            scored[split] = {
                **figures,
                "keys_mean": mean(figures["keys_per_layer"]),
                "values_mean": mean(figures["values_per_layer"]),
            }
    return scored


@torch.no_grad()
def _with_weights(mapper: KVMapper, solved: Solved) -> KVMapper:
    mapper = mapper.float()  # whatever the default dtype is
    solution, entry = solved.solution, solved.entry
    if entry is not None and mapper.entry is not None:
        mapper.entry.set_linear(entry.weight, entry.bias)
    for index, layer in enumerate(mapper.layers):
        for kind, part in layer.named_children():
            form: Any = part
            form.set_linear(solution.weights(kind)[index], solution.biases(kind)[index])
            if (index, kind) in solved.first_token:
                first_token: Any = layer.first_token(kind)  # type: ignore[operator]
                first_token.copy_(solved.first_token[index, kind])
    return mapper.eval()
