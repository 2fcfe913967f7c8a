"""Which models can be mapped exactly and, in a sentence each, why the others can't.

A model qualifies when its cache holds one set of keys and values per layer, and when its keys depend on their position
only through a rotation (RoPE) that is a function of that position alone.
"""

import ast
import inspect
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from ._compat import layer_kinds
from .errors import UnsupportedModelError
from .key_path import key_path, positions_given
from .modules import attention_of, decoder_of, heads_of, skeleton, text_config, unwrap


ATTENTION_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")


def refusals(config_or_model: PreTrainedConfig | nn.Module) -> list[str]:
    """
    Every reason why a model can't be mapped exactly.

    Args:
        config_or_model (`PreTrainedConfig` or `torch.nn.Module`):
            The config of a model, from which a skeleton without weights is built, or the model.

    Returns:
        `list[str]`: one full sentence for each reason, with the model type, the layers concerned and what to do. Empty
        when the model is supported.
    """
    loaded = None if isinstance(config_or_model, PreTrainedConfig) else unwrap(config_or_model)
    config = config_or_model if loaded is None else getattr(loaded, "config", None)
    if not isinstance(config, PreTrainedConfig):
        return [
            f"Expected a Transformers model or config, got {type(config_or_model).__name__}; pass the model that "
            "from_pretrained returned."
        ]
    try:
        section = text_config(config)
        if getattr(config, "is_encoder_decoder", False) or getattr(section, "is_encoder_decoder", False):
            return [
                f"{config.model_type} is an encoder-decoder model, whose cache also holds cross-attention to an "
                "encoder; use a decoder-only model."
            ]
        reasons = list(_config_refusals(config.model_type, section))
    except UnsupportedModelError as error:
        return [str(error)]
    try:
        model = skeleton(config) if loaded is None else loaded
    except UnsupportedModelError as error:
        return reasons or [str(error)]
    return reasons + list(_model_refusals(config.model_type, model, section, known=bool(reasons)))


def _config_refusals(name: str, section: PreTrainedConfig) -> Iterator[str]:
    kinds = defaultdict(list)
    for layer, kind in enumerate(layer_kinds(section)):
        if kind not in ATTENTION_LAYER_TYPES:
            kinds[kind].append(layer)
    for kind, layers in kinds.items():
        yield (
            f"{name} has {kind} in {_layers(layers)}, which does not cache plain keys and values of every token (but a "
            "recurrent, convolution or compressed state, or none); use a model with full or sliding attention."
        )
    if shared := getattr(section, "num_kv_shared_layers", None):
        yield (
            f"{name} shares keys and values between layers, the last {shared} of which have none of their own; use a "
            "model in which every layer has its own."
        )


def _model_refusals(name: str, model: Any, section: PreTrainedConfig, known: bool) -> Iterator[str]:
    """The reasons in the modules; `known` when the config has given one, so that the vaguest of these add nothing."""
    if getattr(model, "_is_stateful", False) and not known:
        yield (
            f"{name} has recurrent layers, whose state is not a list of keys and values; use a model with attention "
            "in every layer."
        )
        return
    try:
        decoder = decoder_of(model)
    except UnsupportedModelError as error:
        yield _position_refusal(name, model, section) or str(error)
        return
    has_rope = isinstance(getattr(decoder, "rotary_emb", None), nn.Module)
    problems = _layer_problems(decoder, section, has_rope)
    if has_rope:
        yield from _rotary_refusals(name, decoder, section)
    else:
        found = _position_refusal(name, decoder, section)
        if found or not (known or problems):
            yield found or (
                f"{name} has no rotary module in {type(decoder).__name__}.rotary_emb, so it is unknown how its keys "
                "depend on their position; use a model with RoPE."
            )
    for problem, layers in problems.items():
        yield (
            f"{name} can't be mapped exactly: in {_layers(layers)}, {problem}; use a model whose keys go from RoPE "
            "into the cache as they are."
        )


def _layer_problems(decoder: Any, section: PreTrainedConfig, has_rope: bool) -> dict[str, list[int]]:
    types = layer_kinds(section)
    problems: dict[str, list[int]] = defaultdict(list)
    shared = getattr(section, "num_kv_shared_layers", None) or 0
    for index, layer in enumerate(decoder.layers):
        if index < len(types) and types[index] not in ATTENTION_LAYER_TYPES:
            continue  # refused by its type
        if index >= len(decoder.layers) - shared:
            continue  # refused for sharing
        for problem in _problems(layer, section, has_rope, positions_given(decoder, section, index)):
            problems[problem].append(index)
    return problems


def _problems(layer: nn.Module, section: PreTrainedConfig, has_rope: bool, given: bool | None) -> Iterator[str]:
    if any(hasattr(module, "kv_lora_rank") for module in layer.modules()):
        yield "the attention compresses its keys and values into a latent vector (MLA)"
        return
    attention = attention_of(layer)
    if attention is None:
        yield f"{type(layer).__name__} doesn't have one self-attention module that writes into the cache"
        return
    kind = type(attention).__name__
    path = key_path(attention, given)
    if path.problem is not None:
        yield f"{kind} {path.problem}"
    elif has_rope and path.rotate is None:
        yield f"{kind}.forward never applies RoPE, though the model has it"
    try:
        heads, head_dim, _ = heads_of(attention, section)
    except UnsupportedModelError as error:
        yield str(error).rstrip(".")
        return
    values = getattr(getattr(attention, "v_proj", None), "out_features", None)
    if isinstance(values, int) and values != heads * head_dim:
        yield f"{kind} has values of another width ({values}) than its keys ({heads * head_dim})"


def _rotary_refusals(name: str, decoder: Any, section: PreTrainedConfig) -> Iterator[str]:
    # The module before the config: some modules make a static form of what the config calls dynamic.
    kinds = getattr(decoder.rotary_emb, "rope_type", None) or _rope_types(getattr(section, "rope_parameters", None))
    for kind in sorted({str(kind) for kind in kinds.values()} if isinstance(kinds, dict) else {str(kinds)}):
        if "dynamic" in kind or kind == "longrope":
            yield (
                f"{name} uses {kind} RoPE, whose frequencies change with the length of the text, so that keys cached "
                "at one length don't fit another; use a checkpoint with default, linear, llama3 or yarn RoPE."
            )
    others = [child for child, _ in decoder.named_children() if "rotary" in child and child != "rotary_emb"]
    if others:
        yield (
            f"{name} has several rotary modules (rotary_emb and {', '.join(others)}), and it is unknown which layer "
            "uses which; use a model with one."
        )


def _rope_types(parameters: Any) -> Any:
    if not isinstance(parameters, dict):
        return None
    nested = {key: value.get("rope_type") for key, value in parameters.items() if isinstance(value, dict)}
    return nested or parameters.get("rope_type")


def _position_refusal(name: str, model: nn.Module, section: PreTrainedConfig) -> str | None:
    """How a model without a rotary module tells positions apart, by what its modules and functions are called."""
    # The config's own switch decides where there is one: the same class then also has a form with RoPE.
    switch = getattr(section, "alibi", None)
    if switch is True or (switch is None and any("alibi" in word for word in _words(model))):
        return f"{name} has ALiBi position biases instead of RoPE; use a model with RoPE."
    modules = [(path.rpartition(".")[2], module) for path, module in model.named_modules()]
    for word, _ in modules:
        if "relative" in word or word.startswith("rel_"):
            return f"{name} has relative position biases ({word}) instead of RoPE; use a model with RoPE."
    for word, module in modules:
        if isinstance(module, nn.Embedding) and ("position" in word or word in ("wpe", "pos_emb", "pos_embed")):
            return (
                f"{name} has learned absolute positions ({word}) mixed into its hidden states, so that its keys can't "
                "be freed of their position; use a model with RoPE."
            )
    return None


def _words(model: nn.Module) -> set[str]:
    """The names that the source of a model's own classes mentions, in lower case."""
    words: set[str] = set()
    for kind in {type(module) for module in model.modules() if type(module).__module__ == type(model).__module__}:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
        except (OSError, TypeError, SyntaxError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute):
                words.add((node.id if isinstance(node, ast.Name) else node.attr).lower())
    return words


def _layers(indices: list[int]) -> str:
    """Layer numbers as words, with runs shortened: `layers 0–2 and 5`."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    words = [str(first) if first == last else f"{first}–{last}" for first, last in runs]
    listed = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    return f"{'layer' if len(indices) == 1 else 'layers'} {listed}"
