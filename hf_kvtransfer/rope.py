"""Taking RoPE off keys and putting it on, with the model's own rotary code.

A model rotates by cos and sin that its rotary module computes and that its `apply_rotary_pos_emb` combines with the
keys. With `n = cos² + sin²` (the square of YaRN's attention scaling, 1 elsewhere), calling the same function with
`cos / n` and `−sin / n` is the exact inverse, whichever dimensions a model pairs up.
"""

import copy
import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedConfig

from .errors import UnsupportedModelError
from .geometry import ModelGeometry
from .key_path import key_path
from .modules import attention_of, decoder_of, skeleton, text_config, unwrap
from .verification import verify_position_free


__all__ = ["RotaryCodec", "RotaryTables", "verify_position_free"]


@dataclass
class RotaryTables:
    """
    Cos and sin of one position tensor, for every kind of layer that a model has.

    Args:
        rotations (`dict`):
            By layer type (`None` where all layers share one), cos and sin in fp32, each
            `[batch, tokens, width]`, where the width is the rotary module's own.
    """

    rotations: dict[str | None, tuple[Tensor, Tensor]]
    _inverses: dict[tuple[str | None, torch.dtype], tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def rotation(self, layer_type: str | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """
        Cos and sin that rotate.

        Args:
            layer_type (`str`, *optional*):
                The kind of layer.
            dtype (`torch.dtype`):
                `torch.float32` or `torch.float64`.
        """
        cos, sin = self.rotations[layer_type]
        return cos.to(dtype), sin.to(dtype)

    def inverse(self, layer_type: str | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """
        Cos and sin that undo the rotation and its scaling. They are computed once for all layers of a kind.

        Args:
            layer_type (`str`, *optional*):
                The kind of layer.
            dtype (`torch.dtype`):
                `torch.float32` or `torch.float64`.
        """
        key = (layer_type, dtype)
        if key not in self._inverses:
            cos, sin = self.rotation(layer_type, dtype)
            norm = cos.square() + sin.square()
            self._inverses[key] = (cos / norm, -sin / norm)
        return self._inverses[key]


@dataclass(frozen=True)
class _LayerRotation:
    """How one layer rotates: which function, which table, and how many of its dimensions the function is given."""

    rotate: Callable[..., Any]
    keys_only: bool
    layer_type: str | None
    width: int


class RotaryCodec:
    """
    Takes RoPE off the keys of one model and puts it on.

    Content keys are the keys as they were before RoPE. Everything is computed in fp32 (fp64 for fp64 keys) by the
    model's own rotary module and its own `apply_rotary_pos_emb`, whatever the dtype of the model: undoing bf16 keys
    then costs about 0.3 % of their size, which is the rounding that is in them already.

    This is not a module, as it has nothing that belongs in a state dict.

    Args:
        geometry ([`ModelGeometry`]):
            What the model's cache looks like.
        rotary (`torch.nn.Module`):
            The model's rotary module, in fp32 on the CPU.
        rotations (`list`):
            For each layer how it rotates, `None` for NoPE layers.

    Use [`RotaryCodec.from_config`] or [`RotaryCodec.from_model`].
    """

    def __init__(self, geometry: ModelGeometry, rotary: nn.Module, rotations: list[_LayerRotation | None]) -> None:
        self.geometry = geometry
        self._rotary: dict[str, nn.Module] = {"cpu": rotary}
        self._rotations = rotations
        self._tables_of: Any = WeakTensorKeyDictionary()
        self._partners: dict[tuple[Any, int], Tensor] = {}
        self._layer_types = sorted({r.layer_type for r in rotations if r is not None}, key=str)

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> "RotaryCodec":
        """
        Builds the codec from a config alone.

        Args:
            config (`PreTrainedConfig`):
                The config of the whole model.

        Raises:
            UnsupportedModelError: the model can't be mapped exactly, or its rotation can't be undone.
        """
        geometry = ModelGeometry.from_config(config)
        # Loading builds a mapper on the meta device; the codec must hold numbers even then.
        with torch.device("cpu"):
            return cls._build(geometry, config, decoder_of(skeleton(config)))

    @classmethod
    def from_model(cls, model: nn.Module) -> "RotaryCodec":
        """
        Builds the codec from a loaded model. Its rotary module is built afresh from the config, in fp32 on the CPU.

        Args:
            model (`torch.nn.Module`):
                A Transformers model, possibly wrapped by PEFT, `torch.compile` or a multimodal model.

        Raises:
            UnsupportedModelError: the model can't be mapped exactly, its rotation can't be undone, or the frequencies
                in the model are not those of its config, as after `model.to(torch.bfloat16)`.
        """
        geometry = ModelGeometry.from_model(model)
        decoder = decoder_of(model)
        inner: Any = unwrap(model)
        with torch.device("cpu"):
            codec = cls._build(geometry, inner.config, decoder)
        codec._compare_frequencies(decoder.rotary_emb)
        return codec

    @classmethod
    def _build(cls, geometry: ModelGeometry, config: PreTrainedConfig, decoder: Any) -> "RotaryCodec":
        kind = type(decoder.rotary_emb)
        # A copy, as a rotary module may complete the rotary parameters of the config it is given.
        section = copy.deepcopy(text_config(config))
        try:
            rotary = kind(section).float().requires_grad_(False)
        except Exception as error:  # any architecture's constructor runs here
            raise UnsupportedModelError(
                f"{geometry.model_type}: {kind.__name__} can't be built from the text config alone "
                f"({type(error).__name__}: {error}); this model's RoPE is not understood."
            ) from error
        # Some modules accept a layer type only to say that they don't support it.
        by_type = "layer_type" in inspect.signature(kind.forward).parameters and isinstance(rotary.rope_type, dict)
        codec = cls(geometry, rotary, [])
        known: dict[tuple[Any, ...], _LayerRotation] = {}
        for index, (layer, shape) in enumerate(zip(decoder.layers, geometry.layers, strict=True)):
            attention = attention_of(layer)
            rotate = key_path(attention).rotate if attention is not None else None
            if not shape.rotary or rotate is None:
                codec._rotations.append(None)
                continue
            key = (rotate, shape.layer_type if by_type else None, shape.head_dim)
            if key not in known:
                known[key] = codec._fit(*key, index)
            codec._rotations.append(known[key])
        codec._layer_types = sorted({kind for _, kind, _ in known}, key=str)
        return codec

    def tables(self, position_ids: Tensor, device: torch.device | str | None = None) -> RotaryTables:
        """
        Cos and sin for the positions of a text. They are computed once for each position tensor and device, and kept
        as long as that tensor is.

        Args:
            position_ids (`torch.Tensor` of shape `[batch, tokens]`):
                The position of each token. A batch of 1 serves keys of any batch size.
            device (`torch.device` or `str`, *optional*):
                Where the keys are. Defaults to the device of `position_ids`.

        Returns:
            [`RotaryTables`]: in fp32.

        Raises:
            ValueError: `position_ids` doesn't have two dimensions.
        """
        if position_ids.ndim != 2:
            raise ValueError(
                f"Expected position_ids of shape [batch, tokens], got {list(position_ids.shape)}; for MRoPE pass the "
                "positions of the text."
            )
        place = torch.device(device or position_ids.device)
        # A converter asks for the tables of one position tensor in every layer, on the device of that layer.
        version = None if position_ids.is_inference() else position_ids._version
        known = self._tables_of.get(position_ids, {})
        if version is None or known.get("version") != version:
            known = {"version": version}
        if place not in known:
            known[place] = self._tables(position_ids, place, self._layer_types)
            self._tables_of[position_ids] = known
        tables: RotaryTables = known[place]
        return tables

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_tables_of"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _tables_of=WeakTensorKeyDictionary())

    @torch.no_grad()
    def _tables(self, position_ids: Tensor, device: torch.device, kinds: list[str | None]) -> RotaryTables:
        if str(device) not in self._rotary:
            self._rotary[str(device)] = copy.deepcopy(self._rotary["cpu"]).to(device)
        rotary = self._rotary[str(device)]
        position_ids = position_ids.to(device)
        like = torch.empty(position_ids.shape[0], 1, 1, dtype=torch.float32, device=device)
        rotations = {}
        for kind in kinds:
            cos, sin = rotary(like, position_ids) if kind is None else rotary(like, position_ids, layer_type=kind)
            rotations[kind] = (cos.float(), sin.float())
        return RotaryTables(rotations)

    def remove(self, keys: Tensor, tables: RotaryTables, layer: int) -> Tensor:
        """
        Takes RoPE off the keys of one layer.

        Args:
            keys (`torch.Tensor` of shape `[batch, kv_heads, tokens, head_dim]`):
                Keys as the cache holds them, in any floating dtype.
            tables ([`RotaryTables`]):
                Of the positions of these tokens, on the device of the keys.
            layer (`int`):
                Index of the decoder layer.

        Returns:
            `torch.Tensor`: the content keys in fp32, or in fp64 for fp64 keys; of the same shape.
        """
        keys = keys if keys.dtype == torch.float64 else keys.float()
        rotation = self._rotations[layer]
        if rotation is None:
            return keys
        return _rotate(keys, *tables.inverse(rotation.layer_type, keys.dtype), rotation)

    def apply(self, content: Tensor, tables: RotaryTables, layer: int) -> Tensor:
        """
        Puts RoPE on the content keys of one layer.

        Args:
            content (`torch.Tensor` of shape `[batch, kv_heads, tokens, head_dim]`):
                Keys without RoPE, in any floating dtype.
            tables ([`RotaryTables`]):
                Of the positions that the tokens get, on the device of the keys.
            layer (`int`):
                Index of the decoder layer.

        Returns:
            `torch.Tensor`: the keys as the cache holds them, in fp32, or in fp64 for fp64 keys; of the same shape.
        """
        content = content if content.dtype == torch.float64 else content.float()
        rotation = self._rotations[layer]
        if rotation is None:
            return content
        return _rotate(content, *tables.rotation(rotation.layer_type, content.dtype), rotation)

    def kind(self, layer: int) -> Hashable:
        """Equal for layers that rotate in the same way; `None` for layers that don't rotate."""
        return self._rotations[layer]

    def partners(self, layer: int, head_dim: int) -> Tensor:
        """
        Which dimension each dimension is turned with: itself where it is passed through.

        Args:
            layer (`int`): index of a decoder layer that rotates.
            head_dim (`int`): width of its heads.

        Returns:
            `torch.Tensor` of shape `[head_dim]`, on the CPU.
        """
        rotation: Any = self._rotations[layer]
        if (rotation, head_dim) in self._partners:
            return self._partners[rotation, head_dim]
        here = torch.zeros(1, 1, dtype=torch.long)
        tables = self._tables(here, torch.device("cpu"), [rotation.layer_type])
        cos, sin = tables.rotations[rotation.layer_type]
        # A quarter turn puts each dimension in the place of its partner.
        numbers = torch.arange(1, head_dim + 1, dtype=torch.float32).view(1, 1, 1, head_dim)
        turned = _rotate(numbers, torch.zeros_like(cos), torch.ones_like(sin), rotation)
        self._partners[rotation, head_dim] = turned.abs().round().long().flatten() - 1
        return self._partners[rotation, head_dim]

    def _fit(self, rotate: Callable[..., Any], layer_type: str | None, head_dim: int, layer: int) -> _LayerRotation:
        """Finds how many dimensions a layer's function takes, and proves on numbers that it can be undone."""
        name = self.geometry.model_type
        parameters = list(inspect.signature(rotate).parameters)
        positions = torch.tensor([[0, 1, 1000, 30_000]])
        try:
            tables = self._tables(positions, torch.device("cpu"), [layer_type])
        except Exception as error:  # any architecture's rotary module runs here
            raise UnsupportedModelError(
                f"{name}: its rotary module can't compute cos and sin from the positions of a text "
                f"({type(error).__name__}: {error}); this model's RoPE is not understood."
            ) from error
        cos, sin = tables.rotations[layer_type]
        if cos.ndim != 3 or cos.shape[:2] != positions.shape or cos.shape != sin.shape:
            raise UnsupportedModelError(
                f"{name}: its rotary module gives cos of shape {list(cos.shape)} for positions of shape "
                f"{list(positions.shape)}, such as for 3-D positions (MRoPE); use a model with positions of text only."
            )
        generator = torch.Generator().manual_seed(0)
        keys = torch.randn(1, 2, positions.shape[1], head_dim, generator=generator, dtype=torch.float32)
        failures = []
        # A function that leaves the other dimensions alone gets all of them; the rest gets what its model slices off.
        for width in dict.fromkeys((head_dim, cos.shape[-1], 2 * cos.shape[-1])):
            if width > head_dim:
                continue
            rotation = _LayerRotation(rotate, parameters.index("cos") == 1, layer_type, width)
            try:
                rotated = _rotate(keys, cos, sin, rotation)
                back = _rotate(rotated, *tables.inverse(layer_type, torch.float32), rotation)
            except Exception as error:
                failures.append(f"{type(error).__name__}: {error}")
                continue
            # One factor for all positions and heads: the attention scaling, applied to the rotated part.
            part = min(width, 2 * cos.shape[-1])
            if (back - keys).abs().max() > 1e-5 * keys.abs().max():
                failures.append(f"undoing it leaves an error of {(back - keys).abs().max():.1e}")
            elif not _scales_evenly(keys, rotated, cos, sin, part):
                failures.append("it changes the length of the keys by more than its attention scaling")
            elif torch.allclose(rotated[:, :, 0], _rotate(keys[:, :, :1], cos[:, 2:3], sin[:, 2:3], rotation)[:, :, 0]):
                failures.append("it does not depend on the position")
            else:
                return rotation
        raise UnsupportedModelError(
            f"{name}: the rotation of layer {layer} ({getattr(rotate, '__name__', rotate)}) can't be undone exactly: "
            f"{'; '.join(failures)}."
        )

    def compare_frequencies(self, model: nn.Module) -> None:
        """
        Compares the rotary frequencies that a model holds with those of its configuration.

        Args:
            model (`torch.nn.Module`): the model that this codec is of.

        Raises:
            [`UnsupportedModelError`]: if they differ, as after a cast of the loaded model.
        """
        self._compare_frequencies(decoder_of(model).rotary_emb)

    def _compare_frequencies(self, loaded: nn.Module) -> None:
        own = dict(self._rotary["cpu"].named_buffers())
        for name, buffer in loaded.named_buffers():
            if buffer.device.type == "meta" or name not in own or buffer.shape != own[name].shape:
                continue
            frequencies = buffer.detach().to("cpu", torch.float32)
            if not torch.allclose(frequencies, own[name], rtol=1e-4, atol=0.0):
                raise UnsupportedModelError(
                    f"{self.geometry.model_type}: the rotary frequencies in the model ({name}, {buffer.dtype}) are "
                    "not those of its config, as after model.to(dtype) or model.half(), which round them; load it "
                    "with from_pretrained(…, dtype=…) instead, which keeps them in fp32."
                )


def _rotate(keys: Tensor, cos: Tensor, sin: Tensor, rotation: _LayerRotation) -> Tensor:
    width = rotation.width
    part = keys if width == keys.shape[-1] else keys[..., :width]
    if rotation.keys_only:
        turned = rotation.rotate(part, cos=cos, sin=sin, unsqueeze_dim=1)
    else:
        # The function rotates queries too. An empty set of heads costs nothing.
        turned = rotation.rotate(part[:, :0], part, cos=cos, sin=sin, unsqueeze_dim=1)[1]
    turned = turned.to(keys.dtype)
    return turned if width == keys.shape[-1] else torch.cat((turned, keys[..., width:]), dim=-1)


def _scales_evenly(keys: Tensor, rotated: Tensor, cos: Tensor, sin: Tensor, part: int) -> bool:
    scale = (cos.square() + sin.square()).sqrt()
    if (scale - scale.mean()).abs().max() > 1e-4:
        return False
    ratio = rotated[..., :part].norm(dim=-1) / keys[..., :part].norm(dim=-1)
    return bool(torch.allclose(ratio, scale.mean().expand_as(ratio), rtol=1e-4))
