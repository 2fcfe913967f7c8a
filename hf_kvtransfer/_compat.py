"""What differs between the supported releases of transformers, each with the condition under which it can go."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
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

# Before 5.3 `generate` takes the whole prompt only; new tokens with a mask over everything came then. Remove when the
# oldest supported release is 5.3.
TAKES_NEW_TOKENS_ONLY = TRANSFORMERS_VERSION >= (5, 3)

# Before 5.21 `prefill_chunk_size` reads the whole prompt again, whatever is cached of it. Remove when the oldest
# supported release is 5.21.
CHUNKED_PREFILL_SKIPS_CACHED = TRANSFORMERS_VERSION >= (5, 21)

_GENERATE_FILE = str(Path("transformers") / "generation" / "utils.py")


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


def layer_kinds(section: Any) -> list[str]:
    """
    What kind each layer of a text config is, or nothing where it doesn't say.

    The oldest supported releases call it `layers_block_type` in some hybrid models, and full attention `attention`.
    Remove when the oldest supported release has `layer_types` in Jamba and Bamba.
    """
    kinds = getattr(section, "layer_types", None) or getattr(section, "layers_block_type", None) or []
    return ["full_attention" if kind == "attention" else kind for kind in kinds]


@dataclass(frozen=True)
class GenerateCall:
    """
    What a running `generate` was called with.

    Args:
        identity (`object`): tells one running call from another, by `is`: the configuration that each makes for itself.
        prompt (`torch.Tensor` of shape `[batch, tokens]` or `[batch, tokens, hidden]`):
            The ids, or the embeddings, that it was given, rows repeated for beams.
        mask (`torch.Tensor` of shape `[batch, tokens]`, *optional*): `None` where every token is real.
        mask_tokens (`int`): how many tokens the attention mask spans.
        position_ids (`torch.Tensor`, *optional*): where they were given, or already worked out from the mask.
        is_assisted (`bool`): whether it decodes with an assistant or by prompt look-up.
        is_chunked (`bool`): whether it reads the prompt in chunks.
    """

    identity: object
    prompt: "torch.Tensor"
    mask: "torch.Tensor | None"
    mask_tokens: int
    position_ids: "torch.Tensor | None"
    is_assisted: bool
    is_chunked: bool

    @property
    def prompt_tokens(self) -> int:
        return self.prompt.shape[1]


def running_generate() -> "GenerateCall | None":
    """
    The innermost `generate` of transformers that the current code runs under, or `None`.

    Whether a cache is used rightly depends on the prompt and the mask that `generate` was given, and no hook hands them
    to a cache; the call itself has them. Where it can't be found, nothing is checked, which tests on both ends of the
    supported range would notice. Remove when caches are given the mask.
    """
    if torch.compiler.is_compiling():
        return None
    frame: FrameType | None = sys._getframe(1)
    is_assisted = False
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(_GENERATE_FILE):
            is_assisted = is_assisted or code.co_name == "_assisted_decoding"
            if code.co_name == "generate":
                return _read_call(frame, is_assisted)
        frame = frame.f_back
    return None


def _read_call(frame: FrameType, is_assisted: bool) -> "GenerateCall | None":
    values = frame.f_locals
    ids, keywords, config = (values.get(name) for name in ("input_ids", "model_kwargs", "generation_config"))
    if not isinstance(ids, torch.Tensor) or not isinstance(keywords, dict):
        return None
    embeddings = keywords.get("inputs_embeds")
    prompt = ids if embeddings is None else embeddings
    mask, positions = (
        value if isinstance(value, torch.Tensor) and value.dim() == 2 else None
        for value in (keywords.get("attention_mask"), keywords.get("position_ids"))
    )
    # A mask of ones is dropped by newer releases, which remember its length instead.
    spanned = mask.shape[-1] if mask is not None else getattr(config, "_mask_length", prompt.shape[1])
    is_chunked = getattr(config, "prefill_chunk_size", None) is not None
    return GenerateCall(config, prompt, mask, spanned, positions, is_assisted, is_chunked)


def output_cache(output: Any) -> Any:
    """The cache inside a model output under its name of any release, or `None` when the output has none."""
    # Asking a model output of a new release for the old name is a deprecated call.
    renamed = _HAS_CACHE_KEYWORD and isinstance(output, ModelOutput)
    for name in ("cache",) if renamed else ("cache", "past_key_values"):
        value = output.get(name) if isinstance(output, dict) else getattr(output, name, None)
        if value is not None:
            return value
    return None
