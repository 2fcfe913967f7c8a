"""`KVMapperConfig`, the manifest of a mapper: the pair, its geometry, the support, how it was fitted, its scores."""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from .errors import PairMismatchError
from .geometry import ModelGeometry


class KVMapperConfig(PreTrainedConfig):
    """
    Configuration of a [`KVMapper`]. Everything that a mapper depends on is in it, so that a mapper alone can convert
    and can tell whether it meets the pair that it was fitted for.

    Args:
        source_config (`dict`, *optional*):
            The source model's text configuration, as its `to_dict()` gives it: from it the source's own rotary code
            is built.
        target_config (`dict`, *optional*):
            The same for the target.
        source_geometry (`dict`, *optional*):
            [`ModelGeometry`] of the source, as a dictionary.
        target_geometry (`dict`, *optional*):
            The same for the target.
        support (`list[list[int]]`, *optional*):
            For every target layer the source layers that it reads, in ascending order.
        map_type (`str`, *optional*, defaults to `"linear"`):
            The functional form, a key of `hf_kvtransfer.maps.MAPS`.
        preset (`str`, *optional*):
            The published recipe that was followed, for example `"heo2026"`.
        k (`int`, *optional*):
            How many source layers each target layer reads.
        ridge_lambda (`float`, *optional*):
            The ridge penalty on the unnormalised Gram matrix.
        tokenizer_fingerprint (`str`, *optional*):
            Of the vocabulary and merges that both models share.
        source_revision (`str`, *optional*):
            The commit of the source checkpoint on the Hub, where it came from there.
        target_revision (`str`, *optional*):
            The same for the target.
        source_weights (`dict`, *optional*):
            A few numbers of the source checkpoint's weights ([`weight_sample`]), to tell checkpoints apart that share
            a configuration.
        target_weights (`dict`, *optional*):
            The same for the target.
        calibration (`dict`, *optional*):
            Data, token counts and versions of the fit.
        scores (`dict`, *optional*):
            What was measured: `r2` in sample and held out, per target layer and kind.
    """

    model_type = "kv_mapper"

    def __init__(
        self,
        source_config: dict[str, Any] | None = None,
        target_config: dict[str, Any] | None = None,
        source_geometry: dict[str, Any] | None = None,
        target_geometry: dict[str, Any] | None = None,
        support: list[list[int]] | None = None,
        map_type: str = "linear",
        preset: str | None = None,
        k: int | None = None,
        ridge_lambda: float | None = None,
        tokenizer_fingerprint: str | None = None,
        source_revision: str | None = None,
        target_revision: str | None = None,
        source_weights: dict[str, list[float]] | None = None,
        target_weights: dict[str, list[float]] | None = None,
        calibration: dict[str, Any] | None = None,
        scores: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.source_config = source_config
        self.target_config = target_config
        self.source_geometry = source_geometry
        self.target_geometry = target_geometry
        self.support = [sorted(layers) for layers in support] if support is not None else []
        self.map_type = map_type
        self.preset = preset
        self.k = k
        self.ridge_lambda = ridge_lambda
        self.tokenizer_fingerprint = tokenizer_fingerprint
        self.source_revision = source_revision
        self.target_revision = target_revision
        self.source_weights = source_weights or {}
        self.target_weights = target_weights or {}
        self.calibration = calibration or {}
        self.scores = scores or {}
        super().__init__(**kwargs)

    def geometry(self, side: str) -> ModelGeometry:
        """
        The geometry of one side, `"source"` or `"target"`.

        Raises:
            [`PairMismatchError`]: if the configuration has none.
        """
        stored = getattr(self, f"{side}_geometry")
        if stored is None:
            raise PairMismatchError(
                f"This KVMapperConfig has no `{side}_geometry`; expected a configuration made by `KVMapper.fit` or "
                "`KVMapper.from_statistics`. Fit a mapper, or load one with `KVMapper.from_pretrained`."
            )
        return ModelGeometry.from_dict(stored)

    def model_config(self, side: str) -> PreTrainedConfig:
        """
        The text configuration of one side, `"source"` or `"target"`, as an object.

        Raises:
            [`PairMismatchError`]: if there is none, or if this transformers release doesn't know its model type.
        """
        stored = getattr(self, f"{side}_config")
        if stored is None:
            raise PairMismatchError(
                f"This KVMapperConfig has no `{side}_config`; expected a configuration made by `KVMapper.fit`. Fit a "
                "mapper, or load one with `KVMapper.from_pretrained`."
            )
        try:
            return AutoConfig.for_model(**stored)
        except (ValueError, KeyError) as error:
            raise PairMismatchError(
                f"The {side} of this mapper is a `{stored.get('model_type')}` model, which the installed transformers "
                "release doesn't know; expected a release that has it. Upgrade transformers."
            ) from error
