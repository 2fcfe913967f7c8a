"""Telling whether a mapper meets the checkpoints and the tokenizer that it was fitted for."""

from collections.abc import Iterator
from itertools import islice, zip_longest
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ._compat import checkpoint_commit
from .config import KVMapperConfig
from .errors import PairMismatchError, UnsupportedModelError
from .geometry import ModelGeometry, decoder_of, text_config, tokenizer_fingerprint
from .rope import RotaryCodec


_VALUES_PER_TENSOR = 8
# Of a layer's matrices by name: all of a dense layer, the attention's and some others of one with many experts.
_FIRST_MATRICES, _LAST_MATRICES = 3, 4
_ADAPTERS = "adapters"
_EMBEDDING = "embedding"
# Of LoRA, the factor that is zero until it is trained, and the one that does nothing without it.
_ZERO_AT_FIRST, _IDLE = "lora_B", ("lora_A", "lora_embedding_B")
# Loading in float16 or bfloat16 moves a weight by up to 2⁻⁹ of its size, or to a multiple of the smallest number of
# float16; another checkpoint, and a fine-tuned one, moves most by more.
_TOLERANCE, _SMALLEST = 2.0**-8, 1e-7
# A sum over an adapter is rounded at each of its terms.
_SUM_TOLERANCE = 0.02

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
        `dict[str, list[float]]`: by parameter name, eight evenly spaced weights of up to seven matrices of the first,
        the middle and the last decoder layer; weights of the input embedding; and of all adapters (PEFT) that are in
        use, which change keys but no weights, their size and some weights.

    Raises:
        [`UnsupportedModelError`]: if the model adds virtual tokens to what it reads.
    """
    _check_no_virtual_tokens(model)
    decoder = decoder_of(model)
    layers: Any = decoder.layers
    adapters, used = _adapter_parameters(decoder)
    parts: dict[str, Tensor] = {}
    for index in sorted({0, len(layers) // 2, len(layers) - 1}):
        matrices = [
            (name.replace(".base_layer", "").replace(".original_module", ""), parameter)
            for name, parameter in layers[index].named_parameters()
            if parameter.dim() == 2 and id(parameter) not in adapters and _is_readable(parameter)
        ]
        matrices.sort(key=itemgetter(0))
        for name, parameter in matrices[:_FIRST_MATRICES] + matrices[_FIRST_MATRICES:][-_LAST_MATRICES:]:
            parts[f"layers.{index}.{name}"] = _evenly_spaced(parameter)
    if (embedding := _embedding(decoder)) is not None:
        parts[_EMBEDDING] = _of_growing_rows(embedding)
    for name, parameter in (*used[:_FIRST_MATRICES], *used[_FIRST_MATRICES:][-_FIRST_MATRICES:]):
        parts[f"{_ADAPTERS}.{name}"] = _evenly_spaced(parameter)
    parts[_ADAPTERS] = _adapter_sizes(used, embedding)
    return _as_lists(parts)


def _check_no_virtual_tokens(model: nn.Module) -> None:
    # Beneath `torch.compile` or `DistributedDataParallel`.
    for module in islice(model.modules(), 3):
        settings = getattr(module, "active_peft_config", None)
        if getattr(settings, "is_prompt_learning", False) or getattr(settings, "is_adaption_prompt", False):
            raise UnsupportedModelError(
                f"The model is wrapped by PEFT with learned prompts ({type(settings).__name__}), which add virtual "
                "tokens that no token id stands for; expected a model that reads token ids alone. Pass the model "
                "underneath, `model.get_base_model()`, or merge what was learned into its weights."
            )


def _adapter_parameters(decoder: nn.Module) -> tuple[set[int], list[tuple[str, Tensor]]]:
    """Of all adapters: which parameters are theirs, by id; and those in use, not merged or disabled, by name."""
    all_of_them: set[int] = set()
    used: list[tuple[str, Tensor]] = []
    for path, module in decoder.named_modules():
        # What every layer and wrapper of PEFT has, of whatever kind.
        for container in getattr(module, "adapter_layer_names", ()):
            held: Any = getattr(module, container, None)
            for adapter in held.keys() if hasattr(held, "keys") else ():
                inner = list(_parameters_in(held[adapter]))
                all_of_them |= {id(parameter) for _, parameter in inner}
                is_used = adapter in module.active_adapters and adapter not in module.merged_adapters
                if is_used and not module.disable_adapters:
                    used += [(f"{path}.{container}.{name}", parameter) for name, parameter in inner]
    return all_of_them, sorted((one for one in used if _is_readable(one[1])), key=itemgetter(0))


def _parameters_in(part: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(part, nn.Module):
        yield from part.named_parameters()
    elif isinstance(part, Tensor):
        yield "", part


@torch.no_grad()
def _adapter_sizes(used: list[tuple[str, Tensor]], like: Tensor | None) -> Tensor:
    """The summed sizes of LoRA's factors that are zero until they are trained, and of all else that adapters add."""
    sizes = torch.zeros(2, device=None if like is None else like.device)
    for name, parameter in used:
        if not any(f".{idle}." in name for idle in _IDLE):
            sizes[0 if f".{_ZERO_AT_FIRST}." in name else 1] += parameter.float().abs().sum().to(sizes.device)
    return sizes


def _embedding(decoder: Any) -> Tensor | None:
    try:
        module = decoder.get_input_embeddings()
    except NotImplementedError:
        return None
    for name in ("base_layer", "original_module"):
        module = getattr(module, name, module)
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, Tensor) and weight.dim() == 2 and _is_readable(weight) else None


def _is_readable(parameter: Tensor) -> bool:
    """Whether these are weights as they were trained, at hand: nothing quantised, sharded or offloaded."""
    floating = parameter.is_floating_point() and parameter.dtype.itemsize > 1
    return floating and parameter.device.type != "meta" and type(parameter.data) is Tensor and parameter.numel() > 0


@torch.no_grad()
def _evenly_spaced(parameter: Tensor) -> Tensor:
    flat = parameter.detach().reshape(-1)
    where = torch.arange(_VALUES_PER_TENSOR, device=flat.device) * (flat.numel() - 1) // (_VALUES_PER_TENSOR - 1)
    return flat[where].float()


@torch.no_grad()
def _of_growing_rows(weight: Tensor) -> Tensor:
    """One weight of rows 0, 1, 3, 7, …, which stay the same where rows are added for further tokens."""
    rows = 2 ** torch.arange(weight.shape[0].bit_length() - 1, device=weight.device) - 1
    return weight.detach()[rows, 7 * rows % weight.shape[1]].float()


def _as_lists(parts: dict[str, Tensor]) -> dict[str, list[float]]:
    """All values at once: an accelerator is waited for but once."""
    if not parts:
        return {}
    device = next(iter(parts.values())).device
    numbers = iter(torch.cat([part.to(device) for part in parts.values()]).tolist())
    return {name: [round(value, 8) for value in islice(numbers, len(part))] for name, part in parts.items()}


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
    differences = expected.differences(given) or _different_weights(
        getattr(config, f"{side}_weights"), weight_sample(model)
    )
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
    # Earlier releases stored less, and of adapters only the first size; what just one of the two has is no difference.
    sizes = [sample.get(_ADAPTERS, []) for sample in (stored, given)]
    totals = zip_longest(*sizes, fillvalue=0.0)
    if not all(abs(one - other) <= _SUM_TOLERANCE * max(one, other) for one, other in totals):
        return ["the same configuration, but another adapter, or one where there was none"]
    for name in sorted(stored.keys() & given.keys() - {_ADAPTERS}):
        pairs = zip(stored[name], given[name], strict=False)
        # Not "greater": what isn't a number is no match either.
        if not all(abs(one - other) <= _TOLERANCE * abs(one) + _SMALLEST for one, other in pairs):
            return [f"the same configuration, but other weights (`{name}` differs)"]
    return []
