"""Where the parts of a Transformers model are: the text config, the text decoder, its layers, their attention.

Nothing here knows a model by name. A part is recognised by its structure, so that an architecture that Transformers
adds tomorrow is found in the same way, and one with another structure is refused in a sentence.
"""

import ast
import copy
import inspect
import json
import textwrap
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig

from .errors import UnsupportedModelError


# Configs of the skeletons kept in memory. A process rarely handles more than one pair of models.
_SKELETON_LIMIT = 16
_skeletons: OrderedDict[str, nn.Module] = OrderedDict()
_skeletons_lock = threading.Lock()


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """
    The config of the part of a model that writes text: `config` itself, or the text section of a multimodal wrapper.

    Args:
        config (`PreTrainedConfig`):
            The config of a whole model.

    Returns:
        `PreTrainedConfig`: the same object that `config` holds, never a copy of it.

    Raises:
        UnsupportedModelError: the config names several text sections, so that there is no telling which one is meant.
    """
    try:
        section = config.get_text_config(decoder=True)
    except ValueError as error:
        raise UnsupportedModelError(
            f"The config of {config.model_type} has several text sections ({error}); pass the text model instead."
        ) from error
    # Old encoder-decoder models, which are refused anyway, have flat configs that Transformers returns rewritten.
    return config if section.model_type == config.model_type else section


def unwrap(model: nn.Module) -> nn.Module:
    """
    The Transformers model inside `torch.compile`, `DistributedDataParallel` and PEFT wrappers.

    Args:
        model (`torch.nn.Module`):
            A model, wrapped any number of times.

    Returns:
        `torch.nn.Module`: the innermost model. PEFT's adapter layers stay inside it, as they are part of its weights.
    """
    inner: Any = model
    while True:
        if isinstance(getattr(inner, "_orig_mod", None), nn.Module):
            inner = inner._orig_mod
        elif isinstance(inner, nn.parallel.DistributedDataParallel):
            inner = inner.module
        elif hasattr(inner, "peft_config") and callable(getattr(inner, "get_base_model", None)):
            inner = inner.get_base_model()
        else:
            return inner


def decoder_of(model: nn.Module) -> Any:
    """
    The text decoder of a model: the module that holds the decoder layers as `.layers` and their `.rotary_emb`.

    Args:
        model (`torch.nn.Module`):
            A Transformers model with or without a head, a multimodal wrapper around one, or either of them wrapped by
            PEFT, `torch.compile` or `DistributedDataParallel`.

    Returns:
        `torch.nn.Module`: the decoder, with one entry in `.layers` for each layer of the cache.

    Raises:
        UnsupportedModelError: the model has no config, or no module with a list of decoder layers.
    """
    model = unwrap(model)
    config = getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        raise UnsupportedModelError(
            f"Expected a Transformers model with a config, got {type(model).__name__}; pass the model that "
            "`from_pretrained` returned."
        )
    section = text_config(config)
    depth = getattr(section, "num_hidden_layers", None)
    # Not by `get_decoder`, which returns the output layer of a model that calls that one its decoder.
    found = [
        module
        for module in model.modules()
        if isinstance(layers := getattr(module, "layers", None), nn.ModuleList) and len(layers) == depth
    ]
    # A vision tower may be as deep as the text decoder, so the text config and the rotary module come first.
    found.sort(
        key=lambda module: (
            getattr(getattr(module, "config", None), "model_type", None) != section.model_type,
            not isinstance(getattr(module, "rotary_emb", None), nn.Module),
        )
    )
    if not found:
        raise UnsupportedModelError(
            f"{section.model_type} has no text decoder that holds its {depth or 'decoder'} layers in `.layers`, so "
            "this package can't tell what its cache holds; use a model whose decoder has `.layers` and `.rotary_emb`."
        )
    return found[0]


def skeleton(config: PreTrainedConfig) -> nn.Module:
    """
    The model of a config without weights, built on the meta device and kept for the process.

    Args:
        config (`PreTrainedConfig`):
            The config of a whole model. It is copied, not changed.

    Returns:
        `torch.nn.Module`: the bare text model where Transformers knows the text config by itself, else the whole one.

    Raises:
        UnsupportedModelError: Transformers has no model class for the config, or the class can't be built from it.
    """
    key = f"{type(config).__qualname__}:{json.dumps(config.to_dict(), sort_keys=True, default=str)}"
    with _skeletons_lock:
        if key not in _skeletons:
            _skeletons[key] = _build_skeleton(config)
            while len(_skeletons) > _SKELETON_LIMIT:
                _skeletons.popitem(last=False)
        _skeletons.move_to_end(key)
        return _skeletons[key]


def _build_skeleton(config: PreTrainedConfig) -> nn.Module:
    config = copy.deepcopy(config)
    section = text_config(config)
    # The text model alone first: it is all that the cache depends on, and vision towers may need packages that are
    # not installed.
    attempts = [("AutoModel", section), ("AutoModelForCausalLM", section)]
    if section is not config:
        attempts += [("AutoModelForCausalLM", config), ("AutoModelForImageTextToText", config), ("AutoModel", config)]
    failures = []
    for name, candidate in attempts:
        try:
            with torch.device("meta"):
                return getattr(transformers, name).from_config(candidate)
        except Exception as error:  # any constructor of any architecture runs here, and each fails in its own way
            failures.append(
                f"{name}: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            )
    raise UnsupportedModelError(
        f"Transformers {transformers.__version__} can't build {config.model_type} from its config "
        f"({'; '.join(failures)}); upgrade Transformers, or pass the loaded model instead of its config."
    )


def forward_of(module: nn.Module) -> tuple[Callable[..., Any], ast.FunctionDef] | None:
    """
    The `forward` that a module really runs, without decorators, and its syntax tree.

    Args:
        module (`torch.nn.Module`):
            Any module. Its class may inherit `forward` from another file.

    Returns:
        `tuple[Callable, ast.FunctionDef]`, or `None` where the source isn't available.
    """
    # Of the class: an instance may have a forward that accelerate put around it.
    return _parsed(inspect.unwrap(type(module).forward))


@lru_cache(maxsize=512)
def _parsed(forward: Callable[..., Any]) -> tuple[Callable[..., Any], ast.FunctionDef] | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return None
    definition = tree.body[0] if tree.body else None
    return (forward, definition) if isinstance(definition, ast.FunctionDef) else None


@lru_cache(maxsize=512)
def cache_updates(definition: ast.AST) -> tuple[ast.Call, ...]:
    """
    The calls in a `forward` that write keys and values into a cache: `<cache>.update(keys, values, layer, …)`.

    Args:
        definition (`ast.AST`):
            The syntax tree to look in.

    Returns:
        `tuple[ast.Call, ...]`: one call for each place where the cache is written.
    """
    return tuple(
        node
        for node in ast.walk(definition)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "update"
        and isinstance(node.func.value, ast.Name)
        and len(node.args) >= 3
    )


def attention_of(layer: nn.Module) -> nn.Module | None:
    """
    The self-attention module of a decoder layer: the child whose `forward` writes into the cache.

    Args:
        layer (`torch.nn.Module`):
            One decoder layer.

    Returns:
        `torch.nn.Module`, or `None` when no child, or more than one, writes keys and values.
    """
    layer = getattr(layer, "_orig_mod", layer)
    found = [
        module
        for child in layer.children()
        if (code := forward_of(module := getattr(child, "_orig_mod", child))) and cache_updates(code[1])
    ]
    return found[0] if len(found) == 1 else None


def heads_of(attention: nn.Module, section: PreTrainedConfig) -> tuple[int, int, int]:
    """
    The heads of one attention module, from its projections where it has them separately.

    Args:
        attention (`torch.nn.Module`):
            A self-attention module, with or without weights.
        section (`PreTrainedConfig`):
            The text config, for what the module itself does not say.

    Returns:
        `tuple[int, int, int]`: KV heads, width of one key head (`head_dim`), query heads.

    Raises:
        UnsupportedModelError: neither the module nor the config says how wide a head is, or the projection of the keys
            is not a whole number of heads.
    """
    head_dim = _first_int([attention, section], "head_dim", "head_size")
    queries = _first_int([attention, section], "num_attention_heads", "num_heads")
    if head_dim is None and queries and getattr(section, "hidden_size", None):
        head_dim = section.hidden_size // queries
    if not head_dim:
        raise UnsupportedModelError(
            f"{type(attention).__name__} of {section.model_type} has neither head_dim nor head_size, and its config "
            "does not say how wide a head is; this package can't tell the shape of its cache."
        )
    width = getattr(getattr(attention, "k_proj", None), "out_features", None)
    if isinstance(width, int):
        if width % head_dim:
            raise UnsupportedModelError(
                f"{type(attention).__name__} of {section.model_type} projects keys to {width} dimensions, which is "
                f"not a whole number of heads of {head_dim}; this package can't tell the shape of its cache."
            )
        heads: int | None = width // head_dim
    else:
        heads = _first_int([attention, section], "num_key_value_heads", "num_attention_heads", "num_heads")
    if not heads:
        raise UnsupportedModelError(
            f"{type(attention).__name__} of {section.model_type} has no k_proj, and its config gives no "
            "num_key_value_heads; this package can't tell the shape of its cache."
        )
    groups = _first_int([attention], "num_key_value_groups")
    return heads, head_dim, heads * groups if groups else queries or heads


def _first_int(owners: list[Any], *names: str) -> int | None:
    for owner in owners:
        for name in names:
            try:
                value = getattr(owner, name, None)
            except Exception:  # a config whose layers differ refuses to give one value for all of them
                continue
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switches a model to evaluation, and afterwards each of its modules back to what it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
