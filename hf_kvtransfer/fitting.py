"""From two loaded models, or from saved statistics, to a fitted mapper."""

import os
from typing import Any, Literal

import torch
from torch import nn
from transformers.utils import logging

from .calibration import CalibrationStatistics, collect, iter_texts, layer_scores, r2, select_layers, solve_ridge
from .calibration.ridge import RidgeSolution
from .calibration.texts import DEFAULT_DATASET, describe_source
from .config import KVMapperConfig
from .errors import CalibrationError
from .geometry import ModelGeometry, tokenizer_fingerprint
from .mapper import KVMapper
from .pairing import pair_manifest
from .rope import RotaryCodec, verify_position_free
from .saving import check_writable


logger = logging.get_logger(__name__)

PRESETS = ("heo2026",)
# arXiv 2608.03893 chooses k per pair among these and "all layers".
K_CANDIDATES = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24)


def fit_mapper(
    source: nn.Module,
    target: nn.Module,
    dataset: Any = None,
    *,
    tokenizer: Any,
    preset: str = "heo2026",
    k: int | Literal["all", "auto"] = "auto",
    ridge_lambda: float = 0.01,
    statistics_dir: str | os.PathLike[str] | None = None,
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
        preset (`str`, *optional*, defaults to `"heo2026"`): the recipe; `"heo2026"` is arXiv 2608.03893.
        k (`int`, `"all"` or `"auto"`, *optional*, defaults to `"auto"`):
            How many source layers each target layer reads. `"auto"` takes, among the paper's values, the one with the
            highest held-out R².
        ridge_lambda (`float`, *optional*, defaults to 0.01): λ, on the unnormalised Gram matrix.
        statistics_dir (`str` or `os.PathLike`, *optional*):
            Where the statistics are kept while they grow and afterwards. A fit that was interrupted goes on from there.
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
        [`CalibrationError`]: if the text, the tokenizer or earlier statistics don't fit.
        [`SingularSystemError`]: if the ridge system has no unique solution.
    """
    _check_preset(preset)
    ridge_lambda = _number(ridge_lambda)
    if statistics_dir is not None:
        check_writable(statistics_dir)
    _check_k(k, ModelGeometry.from_model(source).num_layers)
    for model in (source, target):
        verify_position_free(model, RotaryCodec.from_model(model))
    dataset = DEFAULT_DATASET if dataset is None else dataset
    texts = iter_texts(dataset, text_field=text_field, split=dataset_split, config_name=dataset_config)
    if target_tokenizer is not None:
        calibration["fingerprints"] = tokenizer_fingerprint(tokenizer), tokenizer_fingerprint(target_tokenizer)
    statistics = collect(
        source,
        target,
        tokenizer,
        texts,
        dataset=dataset_name or describe_source(dataset),
        checkpoint_dir=statistics_dir,
        manifest=pair_manifest(source, target, source_revision, target_revision),
        **calibration,
    )
    return mapper_from_statistics(statistics, preset=preset, k=k, ridge_lambda=ridge_lambda)


def mapper_from_statistics(
    statistics: CalibrationStatistics | str | os.PathLike[str],
    *,
    preset: str = "heo2026",
    k: int | Literal["all", "auto"] = "auto",
    ridge_lambda: float = 0.01,
) -> KVMapper:
    """
    Solves a mapper from calibration statistics, without touching a model.

    Args:
        statistics ([`CalibrationStatistics`] or `str`): the statistics, or the folder they were saved to.
        preset (`str`, *optional*, defaults to `"heo2026"`): the recipe.
        k (`int`, `"all"` or `"auto"`, *optional*, defaults to `"auto"`): source layers per target layer.
        ridge_lambda (`float`, *optional*, defaults to 0.01): λ, on the unnormalised Gram matrix.

    Returns:
        [`KVMapper`]: with R² in sample and held out, per target layer, kind and KV head, in `config.scores`.

    Raises:
        [`CalibrationError`]: if the statistics are empty or lack the manifest of their pair.
        [`SingularSystemError`]: if the ridge system has no unique solution.
    """
    _check_preset(preset)
    ridge_lambda = _number(ridge_lambda)
    if not isinstance(statistics, CalibrationStatistics):
        statistics = CalibrationStatistics.load(statistics)
    _check_k(k, statistics.source.num_layers)
    scores = layer_scores(statistics)
    candidates: dict[str, float] = {}
    if k == "auto":
        k, solution, candidates = _best_k(statistics, scores, ridge_lambda)
    else:
        solution = solve_ridge(statistics, select_layers(scores, k), ridge_lambda, dtype=torch.float32)

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
        support=solution.support,
        preset=preset,
        k=len(solution.support[0]),
        ridge_lambda=ridge_lambda,
        tokenizer_fingerprint=statistics.tokenizer_fingerprint,
        calibration={**statistics.calibration, "tokens": statistics.tokens},
        scores={"r2": _scored(statistics, solution), "k_candidates": candidates},
        **manifest,
    )
    return _with_weights(KVMapper(config), solution)


def _number(ridge_lambda: Any) -> float:
    try:
        return float(ridge_lambda)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CalibrationError(f"ridge_lambda is {ridge_lambda!r}, expected a finite number of at least 0.") from error


def _check_preset(preset: str) -> None:
    if preset not in PRESETS:
        raise CalibrationError(f"There is no preset {preset!r}; the presets are {', '.join(map(repr, PRESETS))}.")


def _check_k(k: int | str, layers: int) -> None:
    if k not in ("all", "auto") and not (isinstance(k, int) and not isinstance(k, bool) and 1 <= k <= layers):
        raise CalibrationError(
            f'k is {k!r}, expected "auto", "all" or a whole number from 1 to {layers}, the number of source layers.'
        )


def _best_k(
    statistics: CalibrationStatistics, scores: torch.Tensor, ridge_lambda: float
) -> tuple[int, RidgeSolution, dict[str, float]]:
    """The k with the highest held-out R², its solution, and the figure of every k that was tried."""
    layers = scores.shape[1]
    tried: dict[str, float] = {}
    best: tuple[float, int, RidgeSolution] | None = None
    for k in [*(k for k in K_CANDIDATES if k < layers), layers]:
        solution = solve_ridge(statistics, select_layers(scores, k), ridge_lambda, dtype=torch.float32)
        figures = r2(statistics, solution, "heldout")
        tried[str(k)] = _mean([*figures["keys_per_layer"], *figures["values_per_layer"]])
        if best is None or tried[str(k)] > best[0]:
            best = (tried[str(k)], k, solution)
    if best is None:
        raise CalibrationError("The source has no layers to choose from; expected at least one.")
    logger.info(f"k = {best[1]} has the highest held-out R² ({best[0]:.3f}) among {tried}")
    return best[1], best[2], tried


def _scored(statistics: CalibrationStatistics, solution: RidgeSolution) -> dict[str, Any]:
    scored: dict[str, Any] = {}
    for split in ("fit", "heldout"):
        if statistics.tokens[split]:
            figures = r2(statistics, solution, split)
            scored[split] = {
                **figures,
                "keys_mean": _mean(figures["keys_per_layer"]),
                "values_mean": _mean(figures["values_per_layer"]),
            }
    return scored


def _mean(figures: list[float]) -> float:
    return sum(figures) / len(figures)


@torch.no_grad()
def _with_weights(mapper: KVMapper, solution: RidgeSolution) -> KVMapper:
    mapper = mapper.float()  # whatever the default dtype is
    for index, layer in enumerate(mapper.layers):
        maps: Any = layer
        for kind, part in (("keys", maps.keys), ("values", maps.values)):
            part.weight.copy_(solution.weights(kind)[index])
            part.bias.copy_(solution.biases(kind)[index])
    return mapper.eval()
