"""`KVMapperConfig`, the manifest of a mapper: the pair, its geometry, the support, how it was fitted, its scores."""

from collections.abc import Sequence
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .errors import MapperFileError, PairMismatchError
from .features import KINDS, LayerSupport, Support, as_json, as_supports, native_layers, stream_width
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
    "map_options": _OBJECT,
    "anchor_layers": (int, type(None)),
    "anchor_start": (int,),
    "entry": _OBJECT,
    "exact_prefix": (int,),
    "exact_suffix": (int,),
    "first_token": _OBJECT,
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
    "selection": _OBJECT,
    "dtype": _TEXT,
    "torch_dtype": _TEXT,
}
_COUNTS = ("anchor_layers", "anchor_start", "exact_prefix", "exact_suffix")
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
        support (`list`, *optional*):
            For every target layer what its maps read: the source layers in ascending order, where they read all KV
            heads of the kind they map; else a dictionary with one [`Support`] for `"keys"` and one for `"values"`;
            `None` for layers that the target runs itself.
        map_type (`str`, *optional*, defaults to `"linear"`):
            The functional form, a key of `hf_kvtransfer.maps.MAPS`.
        map_options (`dict`, *optional*):
            Further arguments of that form, such as `{"hidden": 1024}`.
        anchor_layers (`int`, *optional*):
            How many of its own first layers the target runs over the context in every conversion, `m`. Layers 0 to `m`
            are then exact, and the normalised output of the first `m` can be read by the maps of the others. `None`
            for a mapper that needs no target.
        anchor_start (`int`, *optional*, defaults to 0):
            The first of these layers. Above 0 what enters it is predicted from the source cache, and layers
            `anchor_start` to `anchor_start + m` are the target's own.
        entry (`dict`, *optional*):
            The [`Support`] of that prediction; `None` with `anchor_start=0`, where the embedding enters.
        exact_prefix (`int`, *optional*, defaults to 0):
            How many of the first tokens the target reads itself, unless `convert` is told otherwise.
        exact_suffix (`int`, *optional*, defaults to 0):
            How many of the last tokens the target reads itself on top of the converted ones, likewise.
        first_token (`dict`, *optional*):
            `{"keys": […], "values": […]}`: target layers in which the first token of a context is a stored constant
            instead of mapped, as attention falls back on it and it is the same whatever the text.
        preset (`str`, *optional*):
            The recipe that was followed, for example `"heo2026"`.
        k (`int`, *optional*):
            How many source layers each target layer reads; the most, where they differ.
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
        selection (`dict`, *optional*):
            How the recipe was chosen: every candidate of every layer and kind with its held-out score.
    """

    model_type = "kv_mapper"

    def __init__(
        self,
        source_config: dict[str, Any] | None = None,
        target_config: dict[str, Any] | None = None,
        source_geometry: dict[str, Any] | None = None,
        target_geometry: dict[str, Any] | None = None,
        support: list[Any] | None = None,
        map_type: str = "linear",
        map_options: dict[str, Any] | None = None,
        anchor_layers: int | None = None,
        anchor_start: int = 0,
        entry: dict[str, Any] | None = None,
        exact_prefix: int = 0,
        exact_suffix: int = 0,
        first_token: dict[str, list[int]] | None = None,
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
        selection: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in _TYPES}
        self._check_types(given)
        kwargs.pop("digests", None)  # of the files that lie beside one saved configuration
        self.source_config = source_config
        self.target_config = target_config
        self.source_geometry = source_geometry
        self.target_geometry = target_geometry
        self.support = [as_json(as_supports(entry)) if entry is not None else None for entry in support or ()]
        self.map_type = map_type
        self.map_options = map_options or {}
        self.anchor_layers = anchor_layers
        self.anchor_start = anchor_start
        self.entry = entry
        self.exact_prefix = exact_prefix
        self.exact_suffix = exact_suffix
        self.first_token = {kind: list(layers) for kind, layers in (first_token or {}).items()}
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
        self.selection = selection or {}
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
                fits = all(map(_is_support, value))
            elif name in _COUNTS and fits and value is not None:
                fits = value >= 0
            elif name == "entry" and fits and value is not None:
                fits = _is_support(dict.fromkeys(KINDS, value))
            elif name == "first_token" and fits and value:
                fits = set(value) <= set(KINDS) and all(
                    isinstance(layers, list | tuple) and all(map(_is_whole, layers)) for layers in value.values()
                )
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
        self._check_anchor(source, target)
        native = self.native_layers(len(target.layers))
        after = native.stop if self.anchor_layers is not None else len(target.layers)
        _check_support(self.supports(), native, after, source, target)
        mapped = [index for index, layer in enumerate(self.support) if layer is not None]
        if stray := {layer for layers in self.first_token.values() for layer in layers} - set(mapped):
            raise PairMismatchError(
                f"The mapper holds constants of the first token for target layers {sorted(stray)}, which have no maps; "
                "expected some of those that have. The configuration is damaged: load the mapper again."
            )

    def supports(self) -> list[LayerSupport | None]:
        """What the maps of every target layer read, by kind; `None` for layers that the target runs itself."""
        return [as_supports(entry) if entry is not None else None for entry in self.support]

    def entry_support(self) -> Support | None:
        """What the prediction of the residual stream that enters the anchor reads; `None` if nothing is predicted."""
        return Support.from_dict(self.entry) if self.entry is not None else None

    def native_layers(self, depth: int) -> range:
        """
        The target layers that it runs itself in every conversion, the last of them by its projection alone.

        Args:
            depth (`int`): number of target layers.
        """
        return native_layers(self.anchor_start, self.anchor_layers, depth)

    def _check_anchor(self, source: ModelGeometry, target: ModelGeometry) -> None:
        start, layers, entry = self.anchor_start, self.anchor_layers, self.entry_support()
        if layers is not None and start + layers > len(target.layers):
            raise PairMismatchError(
                f"The mapper's anchor runs {layers} layers from layer {start} on, of a target that has "
                f"{len(target.layers)}; expected no more than there are. Fit the mapper with fewer, or load it again."
            )
        predicts = layers is not None and start > 0
        plain = entry is not None and entry.heads == "full" and not entry.anchor and bool(entry.layers)
        known = entry is None or (
            len(set(entry.layers)) == len(entry.layers)
            and all(layer < len(source.layers) for layer in entry.layers)
            and entry.width(source, target.layers[0], 0) <= _WIDEST
        )
        if (
            predicts != (entry is not None)
            or (entry is not None and not (plain and known))
            or (predicts and not layers)
        ):
            raise PairMismatchError(
                f"The mapper's anchor runs {layers} layers from layer {start} on, and what enters them is predicted "
                f"from {self.entry}; expected a support of full heads above layer 0, one layer or more there, and "
                "neither otherwise. The configuration is damaged: load the mapper again."
            )

    @property
    def needs_target(self) -> bool:
        """Whether a conversion takes the target model and the token ids, unless it is told to do without."""
        return self.anchor_layers is not None or bool(self.exact_prefix or self.exact_suffix)

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
    if not _is_whole(geometry.hidden_size) or not 0 < geometry.hidden_size <= _WIDEST:
        return f"`hidden_size` is {geometry.hidden_size!r}"
    rope: Any = geometry.rope_parameters
    if not isinstance(rope, dict):
        return f"`rope_parameters` is {rope!r}"
    return None


def _is_support(entry: Any) -> bool:
    if entry is None:
        return True
    try:
        as_supports(entry)
    except (ValueError, TypeError):
        return False
    return True


def _check_support(
    supports: Sequence[LayerSupport | None], native: range, after: int, source: ModelGeometry, target: ModelGeometry
) -> None:
    if len(supports) != len(target.layers):
        raise PairMismatchError(
            f"The mapper's support names {len(supports)} target layers, its geometry {len(target.layers)}; expected "
            "the same number. The configuration is damaged: load the mapper again."
        )
    for index, layer in enumerate(supports):
        if (layer is None) != (index in native):
            raise PairMismatchError(
                f"Target layer {index} has {'no ' if layer is None else ''}maps, and the target itself makes layers "
                f"{list(native)}; expected maps for all others and for no others. The configuration is damaged: load "
                "the mapper again."
            )
        for support in (layer or {}).values():
            layers = support.layers
            reads = bool(layers) or support.anchor
            if not reads or len(set(layers)) != len(layers) or not all(i < len(source.layers) for i in layers):
                raise PairMismatchError(
                    f"The support of target layer {index} is {list(layers)}; expected one or more different source "
                    f"layers below {len(source.layers)}. The configuration is damaged: load the mapper again."
                )
            width = support.width(source, target.layers[index], stream_width(target))
            if width > _WIDEST:
                raise PairMismatchError(
                    f"The maps of target layer {index} read {width:,} numbers of a token; expected {_WIDEST:,} at "
                    "most. The configuration is damaged: load the mapper again."
                )
            if support.anchor and index < after:
                raise PairMismatchError(
                    f"Target layer {index} reads the anchor's output, which is there for layers from {after} on; "
                    "expected no such support below. The configuration is damaged: load the mapper again."
                )
