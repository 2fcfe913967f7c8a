"""What one model's cache looks like: layers, KV heads, head_dim, layer types, rotary parameters, and its tokenizer.

All of it is read from the model's own modules, or from a skeleton of them built without weights, never from a table of
architectures.
"""

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

from torch import nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedTokenizerBase

from .compatibility import refusals
from .errors import UnsupportedModelError
from .key_path import key_path, positions_given
from .modules import attention_of, decoder_of, heads_of, skeleton, text_config, unwrap


__all__ = [
    "LayerGeometry",
    "ModelGeometry",
    "decoder_of",
    "refusals",
    "text_config",
    "tokenizer_fingerprint",
]


@dataclass(frozen=True)
class LayerGeometry:
    """
    What one layer of the cache holds.

    Args:
        kv_heads (`int`):
            Number of KV heads.
        head_dim (`int`):
            Width of one key and of one value head.
        layer_type (`str`):
            `"full_attention"`, `"sliding_attention"` or `"chunked_attention"`.
        sliding_window (`int`, *optional*):
            Number of tokens that attention reaches back, for the types other than `"full_attention"`.
        rotary (`bool`):
            Whether the keys are rotated by their position. False on NoPE layers.
    """

    kv_heads: int
    head_dim: int
    layer_type: str
    sliding_window: int | None
    rotary: bool

    @property
    def width(self) -> int:
        """Number of key dimensions of one token in this layer, all heads together."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class ModelGeometry:
    """
    What the cache of one model looks like, and which checkpoint that model is.

    Args:
        model_type (`str`):
            The model type of the text config.
        layers (`tuple[LayerGeometry, ...]`):
            One entry for each decoder layer.
        hidden_size (`int`):
            Width of the hidden states.
        rope_parameters (`dict`):
            The rotary parameters as the text config has them: flat, or by layer type.
        text_config_name (`str`, *optional*):
            The name of the text section where the text model sits in a multimodal wrapper.
        checkpoint (`str`, *optional*):
            The repository on the Hub. A checkpoint that was loaded from a folder has the name of that folder only, so
            that a published mapper doesn't show the paths of the machine it was made on.
        revision (`str`, *optional*):
            The commit of the checkpoint on the Hub.
        attention_heads (`int` or `tuple[int, ...]`):
            Query heads of every layer, or of each layer where they differ.
    """

    model_type: str
    layers: tuple[LayerGeometry, ...]
    hidden_size: int
    rope_parameters: dict[str, Any]
    text_config_name: str | None
    checkpoint: str | None
    revision: str | None
    attention_heads: int | tuple[int, ...]

    @property
    def num_layers(self) -> int:
        """Number of decoder layers, which is the number of layers of the cache."""
        return len(self.layers)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each layer starts when the keys of all layers are put side by side; the last entry is the total."""
        offsets = [0]
        for layer in self.layers:
            offsets.append(offsets[-1] + layer.width)
        return tuple(offsets)

    @property
    def multimodal_positions(self) -> bool:
        """
        Whether images take 3-D positions (MRoPE) in this model. Text then has the usual positions, but a cache that
        holds an image can't be converted without the positions that the model gave it.
        """
        nested = [value for value in self.rope_parameters.values() if isinstance(value, dict)]
        return any("mrope_section" in parameters for parameters in [self.rope_parameters, *nested])

    def query_heads(self, layer: int) -> int:
        """
        Number of query heads of one layer.

        Args:
            layer (`int`):
                Index of the decoder layer.
        """
        return self.attention_heads if isinstance(self.attention_heads, int) else self.attention_heads[layer]

    def to_dict(self) -> dict[str, Any]:
        """The geometry as JSON types, which `from_dict` reads back into an equal geometry."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelGeometry":
        """
        Reads what `to_dict` wrote.

        Args:
            values (`dict`):
                A geometry in JSON types.

        Raises:
            ValueError: a field is missing or unknown.
        """
        values = dict(values)
        try:
            values["layers"] = tuple(LayerGeometry(**layer) for layer in values["layers"])
            heads = values["attention_heads"]
            values["attention_heads"] = tuple(heads) if isinstance(heads, list) else heads
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"Expected the fields of a model geometry, got {sorted(values)} ({error}); the file was written by "
                "another version of this package."
            ) from error

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> "ModelGeometry":
        """
        Reads the geometry from a config alone, through a skeleton of the model without weights.

        Args:
            config (`PreTrainedConfig`):
                The config of the whole model.

        Raises:
            UnsupportedModelError: the model can't be mapped exactly; the message is the list of reasons.
        """
        refuse_unsupported(config)
        return cls._read(config, decoder_of(skeleton(config)))

    @classmethod
    def from_model(cls, model: nn.Module) -> "ModelGeometry":
        """
        Reads the geometry from a loaded model.

        Args:
            model (`torch.nn.Module`):
                A Transformers model, possibly wrapped by PEFT, `torch.compile` or a multimodal model.

        Raises:
            UnsupportedModelError: the model can't be mapped exactly; the message is the list of reasons.
        """
        refuse_unsupported(model)
        return cls._read(unwrap(model).config, decoder_of(model))

    @classmethod
    def _read(cls, config: PreTrainedConfig, decoder: Any) -> "ModelGeometry":
        section = text_config(config)
        cached = _cache_layers(section)
        layers = []
        queries = []
        for index, layer in enumerate(decoder.layers):
            attention = attention_of(layer)
            if attention is None:
                raise UnsupportedModelError(f"{section.model_type} has no self-attention module in layer {index}.")
            kv_heads, head_dim, heads = heads_of(attention, section)
            layer_type, window = cached[index] if cached else ("full_attention", None)
            rotary = key_path(attention, positions_given(decoder, section, index)).rotary
            layers.append(LayerGeometry(kv_heads, head_dim, layer_type, window, rotary))
            queries.append(heads)
        return cls(
            model_type=section.model_type,
            layers=tuple(layers),
            hidden_size=section.hidden_size,
            rope_parameters=json.loads(json.dumps(getattr(section, "rope_parameters", None) or {}, default=str)),
            text_config_name=_section_name(config, section),
            checkpoint=_checkpoint_name(getattr(config, "_name_or_path", None)),
            revision=getattr(config, "_commit_hash", None),
            attention_heads=queries[0] if len(set(queries)) == 1 else tuple(queries),
        )

    def differences(self, other: "ModelGeometry") -> list[str]:
        """
        How another model's cache differs from this one's. Which checkpoint it is, or whether it sits in a multimodal
        wrapper, does not matter here.

        Args:
            other (`ModelGeometry`):
                The geometry to compare with.

        Returns:
            `list[str]`: one phrase for each difference, this geometry first. Empty for interchangeable caches.
        """
        found = []
        if self.num_layers != other.num_layers:
            found.append(f"{self.num_layers} layers against {other.num_layers}")
        for name, words in (
            ("kv_heads", "KV heads"),
            ("head_dim", "head_dim"),
            ("layer_type", "layer type"),
            ("sliding_window", "sliding window"),
            ("rotary", "RoPE"),
        ):
            pairs = [(getattr(a, name), getattr(b, name)) for a, b in zip(self.layers, other.layers, strict=False)]
            differing = [(index, pair) for index, pair in enumerate(pairs) if pair[0] != pair[1]]
            if differing:
                index, (mine, theirs) = differing[0]
                more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
                found.append(f"{words} {mine} against {theirs} (layer {index}{more})")
        if self.hidden_size != other.hidden_size:
            found.append(f"hidden size {self.hidden_size} against {other.hidden_size}")
        mine_rope, their_rope = _plain_rope(self.rope_parameters), _plain_rope(other.rope_parameters)
        for key in sorted(mine_rope.keys() | their_rope.keys()):
            if mine_rope.get(key) != their_rope.get(key):
                found.append(f"rotary parameter {key} {mine_rope.get(key)} against {their_rope.get(key)}")
        return found


def refuse_unsupported(config_or_model: PreTrainedConfig | nn.Module) -> None:
    """
    Raises one error with all the reasons why a model can't be mapped exactly.

    Args:
        config_or_model (`PreTrainedConfig` or `torch.nn.Module`):
            The config of a model, or the model.

    Raises:
        UnsupportedModelError: there is at least one reason.
    """
    if reasons := refusals(config_or_model):
        raise UnsupportedModelError("\n".join(reasons))


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """
    A hash of what decides which token ids a text gets: vocabulary, merges or scores, normaliser, pre-tokeniser and
    added tokens. The tokenizer's name, its padding and truncation, its chat template and the special tokens that it
    puts around a text don't count.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            Any tokenizer; a slow one is known by its vocabulary and its added tokens alone.

    Returns:
        `str`: 64 hexadecimal digits, equal for two tokenizers exactly when they share all of the above.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if hasattr(backend, "to_str"):
        state = json.loads(backend.to_str())
        content = {
            "model": _canonical_model(state.get("model") or {}),
            "normalizer": state.get("normalizer"),
            "pre_tokenizer": state.get("pre_tokenizer"),
            "added_tokens": sorted(state.get("added_tokens") or [], key=lambda token: (token["id"], token["content"])),
        }
    else:
        content = {"vocabulary": tokenizer.get_vocab(), "added_tokens": tokenizer.get_added_vocab()}
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _canonical_model(model: dict[str, Any]) -> dict[str, Any]:
    # Merges are written as "a b" by old and as ["a", "b"] by new releases of tokenizers; tokens with spaces are only
    # possible in the new form.
    merges = model.get("merges")
    if isinstance(merges, list):
        model = {**model, "merges": [pair.split(" ") if isinstance(pair, str) else pair for pair in merges]}
    return model


def _cache_layers(section: PreTrainedConfig) -> list[tuple[str, int | None]]:
    """The type and the window of each layer, as Transformers itself gives them to a cache."""
    typed = getattr(section, "layer_types", None) or []
    layers = []
    for index, layer in enumerate(DynamicCache(config=section).layers):
        window = getattr(layer, "sliding_window", None) if layer.is_sliding else None
        inferred = "chunked_attention" if getattr(section, "attention_chunk_size", None) else "sliding_attention"
        kind = typed[index] if index < len(typed) else ("full_attention" if window is None else inferred)
        layers.append((kind, window))
    return layers


def _section_name(config: PreTrainedConfig, section: PreTrainedConfig) -> str | None:
    if section is config:
        return None
    return next((name for name, value in vars(config).items() if value is section), "text_config")


def _checkpoint_name(path: str | None) -> str | None:
    if not path:
        return None
    on_hub = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) and not path.startswith(".") and not os.path.isdir(path)
    return path if on_hub else PurePath(path.replace("\\", "/")).name or None


def _plain_rope(parameters: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Rotary parameters as one flat dict, without the entries that only spell out a default."""
    plain: dict[str, Any] = {}
    for key, value in parameters.items():
        if isinstance(value, dict):
            plain |= _plain_rope(value, f"{prefix}{key}.")
        elif value is not None and (key, value) not in (("partial_rotary_factor", 1.0), ("rope_type", "default")):
            plain[f"{prefix}{key}"] = value
    return plain
