"""Telling whether a mapper meets the checkpoints and the tokenizer that it was fitted for."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ._compat import checkpoint_commit
from .config import KVMapperConfig
from .errors import PairMismatchError
from .geometry import ModelGeometry, decoder_of, text_config, tokenizer_fingerprint
from .rope import RotaryCodec


_VALUES_PER_TENSOR = 8
_TENSORS_PER_LAYER = 3
_ADAPTERS = "adapters"
# Loading in float16 or bfloat16 moves a weight by up to 2⁻⁸ of its size; another checkpoint moves it by all of it.
_TOLERANCE = 0.02

# The geometries that a model was found to have, with its rotary code. Reading one takes many times as long as comparing
# weights and frequencies does.
_read: "WeakKeyDictionary[nn.Module, list[tuple[ModelGeometry, RotaryCodec]]]" = WeakKeyDictionary()

# Nothing of a configuration that depends on where or how a checkpoint was loaded belongs into a mapper.
_NOT_OF_THE_MODEL = (
    "_name_or_path",
    "name_or_path",
    "_commit_hash",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "_attn_implementation",
    "_attn_implementation_internal",
    "_attn_implementation_autoset",
    "_experts_implementation",
    "_experts_implementation_internal",
)


def weight_sample(model: nn.Module) -> dict[str, list[float]]:
    """
    A few numbers of a checkpoint's weights, which tell it from others of the same configuration whatever dtype it is
    loaded in.

    Args:
        model (`torch.nn.Module`): the loaded model. Quantised or offloaded weights are left out.

    Returns:
        `dict[str, list[float]]`: up to eight evenly spaced weights of up to three matrices of the first and the last
        decoder layer, by parameter name; and the size of all adapters (PEFT), which change keys but no weights.
    """
    layers: Any = decoder_of(model).layers
    sample: dict[str, list[float]] = {}
    for index in sorted({0, len(layers) - 1}):
        matrices = sorted(
            (name.replace(".base_layer", ""), parameter)
            for name, parameter in layers[index].named_parameters()
            if parameter.dim() == 2 and "lora_" not in name
        )
        usable = [(n, p) for n, p in matrices if p.is_floating_point() and p.device.type != "meta"]
        for name, parameter in usable[:_TENSORS_PER_LAYER]:
            sample[f"layers.{index}.{name}"] = _evenly_spaced(parameter)
    sample[_ADAPTERS] = [_adapter_size(layers)]
    return sample


@torch.no_grad()
def _adapter_size(layers: Any) -> float:
    """The summed size of the adapters' output matrices, which is zero without adapters and with untrained ones."""
    sizes = [
        float(parameter.float().abs().sum())
        for name, parameter in layers.named_parameters()
        if "lora_B" in name and parameter.device.type != "meta"
    ]
    return round(sum(sizes), 6)


@torch.no_grad()
def _evenly_spaced(parameter: Tensor) -> list[float]:
    flat = parameter.detach().reshape(-1)
    where = torch.arange(_VALUES_PER_TENSOR, device=flat.device) * (flat.numel() - 1) // (_VALUES_PER_TENSOR - 1)
    return [round(value, 8) for value in flat[where].float().tolist()]


def pair_manifest(
    source: nn.Module, target: nn.Module, source_revision: str | None = None, target_revision: str | None = None
) -> dict[str, Any]:
    """
    What tells two checkpoints from others, for [`KVMapperConfig`]: configurations, commits, a sample of the weights.

    Args:
        source (`PreTrainedModel`): the loaded source.
        target (`PreTrainedModel`): the loaded target.
        source_revision (`str`, *optional*): what the source was loaded with from the Hub, if not the main branch.
        target_revision (`str`, *optional*): the same for the target.
    """
    manifest: dict[str, Any] = {}
    for side, model, revision in (("source", source, source_revision), ("target", target, target_revision)):
        config = text_config(model.config).to_dict()
        manifest[f"{side}_revision"] = checkpoint_commit(model.config, revision)
        manifest[f"{side}_config"] = {key: value for key, value in config.items() if key not in _NOT_OF_THE_MODEL}
        manifest[f"{side}_weights"] = weight_sample(model)
    return manifest


def check_model(config: KVMapperConfig, side: str, model: nn.Module) -> None:
    """
    Refuses a model that is not the one the mapper was fitted for.

    Args:
        config ([`KVMapperConfig`]): the manifest.
        side (`str`): `"source"` or `"target"`.
        model (`torch.nn.Module`): the model at hand.

    Raises:
        [`PairMismatchError`]: naming every difference.
        [`UnsupportedModelError`]: if the model's rotary frequencies were rounded by a cast after loading.
    """
    expected = config.geometry(side)
    if not isinstance(model, nn.Module):
        raise PairMismatchError(
            f"`{side}` is a {type(model).__name__}; expected the loaded {side} model. Load it with "
            "`AutoModelForCausalLM.from_pretrained`, or leave the argument out to skip the check."
        )
    # A structure that has been read stays; weights can be loaded into it at any time, and are compared each time.
    known = [codec for geometry, codec in _read.get(model, []) if geometry == expected]
    is_known = bool(known)
    given = expected if is_known else ModelGeometry.from_model(model)
    differences = expected.differences(given)
    stored = getattr(config, f"{side}_weights")
    if not differences and stored:
        differences = _different_weights(stored, weight_sample(model))
    if differences:
        raise PairMismatchError(
            f"The {side} model ({given.checkpoint or given.model_type}) is not the one this mapper was fitted for "
            f"({expected.checkpoint or expected.model_type}): {'; '.join(differences)}. Use the mapper of this pair, "
            "or fit one; to go on unchecked, give `convert` the cache alone."
        )
    if is_known:
        known[0].compare_frequencies(model)
    else:
        # Compares the frequencies that the model holds with those of its configuration, too.
        _read.setdefault(model, []).append((expected, RotaryCodec.from_model(model)))


def check_tokenizer(config: KVMapperConfig, tokenizer: Any) -> None:
    """
    Refuses a tokenizer that gives other token ids than the one the mapper was fitted with.

    Raises:
        [`PairMismatchError`]: if the fingerprints differ.
    """
    expected = config.tokenizer_fingerprint
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise PairMismatchError(
            f"`tokenizer` is a {type(tokenizer).__name__}; expected a tokenizer of Transformers. Load it with "
            "`AutoTokenizer.from_pretrained`, or leave the argument out to skip the check."
        )
    if expected is not None and tokenizer_fingerprint(tokenizer) != expected:
        raise PairMismatchError(
            f"The tokenizer ({getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__}) has another "
            "vocabulary or other merges than the one this mapper was fitted with; expected the same token ids on both "
            "sides. Load the tokenizer of the mapper's source checkpoint."
        )


def _different_weights(stored: dict[str, list[float]], given: dict[str, list[float]]) -> list[str]:
    adapters = [sample.get(_ADAPTERS, [0.0])[0] for sample in (stored, given)]
    if not abs(adapters[0] - adapters[1]) <= _TOLERANCE * max(adapters):
        return ["the same configuration, but another adapter, or one where there was none"]
    for name in sorted(stored.keys() & given.keys() - {_ADAPTERS}):
        one, other = torch.tensor(stored[name]), torch.tensor(given[name])
        # Not "greater": what isn't a number is no match either.
        if one.shape == other.shape and not (one - other).abs().max() <= _TOLERANCE * one.abs().max():
            return [f"the same configuration, but other weights (`{name}` differs)"]
    return []
