"""Loading the models and tokenizers that the command line is given by name."""

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from .errors import KVTransferError


def load_config(name: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """
    The configuration of a checkpoint, from a folder or the Hub.

    Raises:
        [`KVTransferError`]: if there is none.
    """
    try:
        return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise KVTransferError(
            f"No configuration could be read from {name}: {error} Expected a folder with a `config.json`, or the name "
            "of a model on the Hub."
        ) from error


def load_model(
    name: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """
    A model in evaluation mode; text models and multimodal wrappers alike.

    Args:
        name (`str`): a folder or the name of a model on the Hub.
        revision (`str`, *optional*): branch, tag or commit on the Hub.
        dtype (`str`, *optional*, defaults to `"auto"`): as in `from_pretrained`.
        device (`str`, *optional*):
            A device, or a device map such as `"auto"` (which needs accelerate); the CPU by default.
        trust_remote_code (`bool`, *optional*, defaults to `False`): as in `from_pretrained`.

    Raises:
        [`KVTransferError`]: if the model can't be loaded.
    """
    config = load_config(name, revision, trust_remote_code)
    is_wrapper = type(config) in AutoModelForImageTextToText._model_mapping
    auto: Any = AutoModelForImageTextToText if is_wrapper else AutoModelForCausalLM
    keywords: dict[str, Any] = {"revision": revision, "dtype": dtype, "trust_remote_code": trust_remote_code}
    is_map = device in ("auto", "balanced", "balanced_low_0", "sequential")
    if is_map:
        keywords["device_map"] = device
    try:
        model, found = auto.from_pretrained(name, output_loading_info=True, **keywords)
        if device is not None and not is_map:
            model = model.to(torch.device(device))
    except Exception as error:  # a damaged file, an unknown dtype or device: each library has its own
        raise KVTransferError(
            f"The model {name} could not be loaded ({type(error).__name__}: {error}) Expected a folder with a config "
            "and whole weights, or the name of a model on the Hub; and a dtype and a device that this machine has."
        ) from error
    missing = sorted(map(str, [*found["missing_keys"], *found["mismatched_keys"]]))
    if missing:
        raise KVTransferError(
            f"The checkpoint {name} lacks {len(missing)} of the model's weights (first: {missing[0]}), which would be "
            "random; expected all of them. Fetch the checkpoint again."
        )
    result: nn.Module = model.eval()
    return result


def load_pair(source: tuple[str, str | None], target: tuple[str, str | None], **options: Any) -> list[nn.Module]:
    """
    Both models of a pair.

    Args:
        source (`tuple[str, str | None]`): name and revision of the model that reads.
        target (`tuple[str, str | None]`): of the model that goes on.
        **options: `dtype`, `device` and `trust_remote_code` of both, as in [`load_model`].
    """
    return [load_model(name, revision=revision, **options) for name, revision in (source, target)]


def load_tokenizer(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """
    The tokenizer of a checkpoint, from a folder or the Hub.

    Raises:
        [`KVTransferError`]: if there is none.
    """
    expected = "Expected a folder with tokenizer files, or the name of a model on the Hub."
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise KVTransferError(f"No tokenizer could be loaded from {name}: {error} {expected}") from error
    # From a folder with a config alone, transformers makes a tokenizer of the right class with nothing in it.
    if len(tokenizer.get_vocab()) <= len(tokenizer.get_added_vocab()):
        raise KVTransferError(f"The tokenizer of {name} has an empty vocabulary. {expected}")
    return tokenizer
