"""`KVMapperConfig`, the manifest of a mapper: the pair, its geometry, the support, how it was fitted, its scores."""

from collections.abc import Sequence
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .errors import MapperFileError, PairMismatchError
from .geometry import ModelGeometry
from .maps import MAPS


_TEXT, _OBJECT = (str, type(None)), (dict, type(None))
_TYPES: dict[str, tuple[type, ...]] = {
    "source_config": _OBJECT,
    "target_config": _OBJECT,
    "source_geometry": _OBJECT,
    "target_geometry": _OBJECT,
    "support": (list, tuple, type(None)),
    "map_type": (str,),
    "preset": _TEXT,
    "k": (int, type(None)),
    "ridge_lambda": (int, float, type(None)),
    "tokenizer_fingerprint": _TEXT,
    "source_revision": _TEXT,
    "target_revision": _TEXT,
    "source_weights": _OBJECT,
    "target_weights": _OBJECT,
    "calibration": _OBJECT,
    "scores": _OBJECT,
    "dtype": _TEXT,
    "torch_dtype": _TEXT,
}
# No layer of any model caches so many numbers per token; a damaged number must not ask for terabytes of memory.
_WIDEST = 2**20


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
        given = {name: value for name, value in locals().items() if name in _TYPES}
        self._check_types(given)
        kwargs.pop("digests", None)  # of the files that lie beside one saved configuration
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

    @classmethod
    def check_values(cls, values: dict[str, Any]) -> None:
        """
        Refuses the content of a `config.json` from which no mapper can be built. Names it doesn't know don't matter.

        Args:
            values (`dict`): what was read from the file.

        Raises:
            [`MapperFileError`]: if a value is of another type than it was saved with.
            [`PairMismatchError`]: if support, map type and geometries don't belong together.
        """
        cls._check_types({name: values[name] for name in ("dtype", "torch_dtype") if name in values})
        cls(**{name: value for name, value in values.items() if name in _TYPES and "dtype" not in name}).check_maps()

    @staticmethod
    def _check_types(values: dict[str, Any]) -> None:
        for name, value in values.items():
            fits = isinstance(value, _TYPES[name]) and not isinstance(value, bool)
            if name == "support" and fits and value is not None:
                fits = all(isinstance(layers, list | tuple) and all(map(_is_whole, layers)) for layers in value)
            elif name.endswith("_weights") and fits and value:
                fits = all(isinstance(row, list | tuple) and all(map(_is_number, row)) for row in value.values())
            if not fits:
                raise MapperFileError(
                    f"`{name}` of this KVMapperConfig is {str(value)[:80]!r}; expected what `KVMapper.save_pretrained` "
                    "writes there. The configuration is damaged: fetch or fit the mapper again."
                )

    def check_maps(self) -> None:
        """
        Raises [`PairMismatchError`] if support, map type and geometries don't belong together. Without a support
        there are no maps yet, and nothing to check.
        """
        if not self.support:
            return
        source, target = self.geometry("source"), self.geometry("target")
        if self.map_type not in MAPS:
            raise PairMismatchError(
                f"This mapper has the functional form `{self.map_type}`; this release knows {sorted(MAPS)}. Upgrade "
                "hf_kvtransfer."
            )
        _check_support(self.support, source, target)

    def geometry(self, side: str) -> ModelGeometry:
        """
        The geometry of one side, `"source"` or `"target"`.

        Raises:
            [`PairMismatchError`]: if the configuration has none.
            [`MapperFileError`]: if it holds what no model's geometry holds.
        """
        stored = getattr(self, f"{side}_geometry")
        if stored is None:
            raise PairMismatchError(
                f"This KVMapperConfig has no `{side}_geometry`; expected a configuration made by `KVMapper.fit` or "
                "`KVMapper.from_statistics`. Fit a mapper, or load one with `KVMapper.from_pretrained`."
            )
        try:
            geometry = ModelGeometry.from_dict(stored)
            wrong = _wrong_in(geometry)
        except (ValueError, TypeError, AttributeError) as error:
            wrong = str(error)
        if wrong:
            raise MapperFileError(
                f"`{side}_geometry` of this KVMapperConfig can't be read: {wrong}. Expected what "
                "`KVMapper.save_pretrained` writes there. Fetch or fit the mapper again, or upgrade hf_kvtransfer if "
                "the mapper is newer."
            )
        return geometry

    def model_config(self, side: str) -> PreTrainedConfig:
        """
        The text configuration of one side, `"source"` or `"target"`, as an object.

        Raises:
            [`PairMismatchError`]: if there is none, or if this transformers release doesn't know its model type.
            [`MapperFileError`]: if no configuration of that type can be made of it.
        """
        stored = getattr(self, f"{side}_config")
        if stored is None:
            raise PairMismatchError(
                f"This KVMapperConfig has no `{side}_config`; expected a configuration made by `KVMapper.fit`. Fit a "
                "mapper, or load one with `KVMapper.from_pretrained`."
            )
        if str(stored.get("model_type")) not in CONFIG_MAPPING:
            raise PairMismatchError(
                f"The {side} of this mapper is a `{stored.get('model_type')}` model, which the installed transformers "
                "release doesn't know; expected a release that has it. Upgrade transformers."
            )
        try:
            return AutoConfig.for_model(**stored)
        except Exception as error:  # each configuration class checks its values in a way of its own
            raise MapperFileError(
                f"`{side}_config` of this KVMapperConfig can't be read ({type(error).__name__}: {error}); expected a "
                f"configuration of a `{stored['model_type']}` model. Fetch or fit the mapper again."
            ) from error


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _wrong_in(geometry: ModelGeometry) -> str | None:
    for index, layer in enumerate(geometry.layers):
        for name in ("kv_heads", "head_dim"):
            value = getattr(layer, name)
            if not _is_whole(value) or not 0 < value <= _WIDEST:
                return f"`{name}` of layer {index} is {value!r}"
        if layer.width > _WIDEST:
            return f"layer {index} is {layer.width} wide"
        window = layer.sliding_window
        if window is not None and (not _is_whole(window) or window <= 0):
            return f"`sliding_window` of layer {index} is {window!r}"
    if not geometry.layers:
        return "it has no layers"
    rope: Any = geometry.rope_parameters
    if not isinstance(rope, dict):
        return f"`rope_parameters` is {rope!r}"
    return None


def _check_support(support: Sequence[Sequence[int]], source: ModelGeometry, target: ModelGeometry) -> None:
    if len(support) != len(target.layers):
        raise PairMismatchError(
            f"The mapper's support names {len(support)} target layers, its geometry {len(target.layers)}; expected "
            "the same number. The configuration is damaged: load the mapper again."
        )
    for index, layers in enumerate(support):
        if not layers or len(set(layers)) != len(layers) or not all(0 <= i < len(source.layers) for i in layers):
            raise PairMismatchError(
                f"The support of target layer {index} is {list(layers)}; expected one or more different source layers "
                f"below {len(source.layers)}. The configuration is damaged: load the mapper again."
            )
