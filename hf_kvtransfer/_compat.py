"""What differs between the supported releases of transformers, each with the condition under which it can go."""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from packaging.version import Version
from torch import nn
from transformers.utils import ModelOutput


TRANSFORMERS_VERSION = Version(transformers.__version__).release

# transformers 5.24 renamed the keyword `past_key_values` to `cache`, in `generate` and in every `forward`.
# Remove together with `cache_keyword` when the oldest supported release is 5.24.
_HAS_CACHE_KEYWORD = TRANSFORMERS_VERSION >= (5, 24)


def cache_keyword(function: "Callable[..., Any] | nn.Module") -> str:
    """
    The name under which a model's `forward` or `generate` takes its cache: `"cache"` or `"past_key_values"`.

    Models from remote code may still carry the old name on a release that has the new one, so the signature decides;
    wrappers that only show `**kwargs` (PEFT, `torch.compile`) follow the release.
    """
    target = function.forward if isinstance(function, nn.Module) else function
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        parameters = {}  # type: ignore[assignment]
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    return "cache" if _HAS_CACHE_KEYWORD else "past_key_values"


def checkpoint_commit(config: Any, revision: str | None = None) -> str | None:
    """
    The commit of the checkpoint on the Hub that a configuration was loaded from, or `None` when that can't be told.

    Up to transformers 5.20 or so a configuration carries it; later ones don't, and the Hub's local cache tells what a
    branch or tag stands for. Remove the first way when the oldest supported release no longer sets `_commit_hash`.

    Args:
        config (`PreTrainedConfig`): of a loaded model.
        revision (`str`, *optional*): what it was loaded with; the main branch by default.
    """
    carried = getattr(config, "_commit_hash", None)
    name = getattr(config, "_name_or_path", None)
    if carried or not name or Path(name).exists():
        return carried
    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:  # a folder that is gone, for example
        return None
    # …/snapshots/<commit>/config.json
    return Path(found).parent.name if isinstance(found, str) else None


def mask_being_prepared() -> "torch.Tensor | None":
    """
    The two-dimensional attention mask for which transformers is asking a cache for its sizes, or `None`.

    It is what tells a right use of a cache from the silently wrong ones: it must span the cached and the fed tokens.
    No hook hands it to a cache, but in every supported release the function that asks (in `masking_utils`) has it as
    `attention_mask`. Where it hasn't, nothing is checked; tests on both ends of the range notice that. Remove when
    caches are given the mask.
    """
    # Two frames up: past the method of the cache, to its caller.
    frame = sys._getframe(2)
    mask = frame.f_locals.get("attention_mask") if frame.f_code.co_filename.endswith("masking_utils.py") else None
    return mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None


def output_cache(output: Any) -> Any:
    """The cache inside a model output under its name of any release, or `None` when the output has none."""
    # Asking a model output of a new release for the old name is a deprecated call.
    renamed = _HAS_CACHE_KEYWORD and isinstance(output, ModelOutput)
    for name in ("cache",) if renamed else ("cache", "past_key_values"):
        value = output.get(name) if isinstance(output, dict) else getattr(output, name, None)
        if value is not None:
            return value
    return None
