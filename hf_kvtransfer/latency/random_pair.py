"""Models and mappers with random weights, for measuring a pair before anything of it is downloaded or fitted."""

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from ..config import KVMapperConfig
from ..errors import KVTransferError
from ..geometry import ModelGeometry
from ..mapper import KVMapper
from ..modules import text_config


def random_model(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """
    A model with random weights, in evaluation mode.

    Args:
        config (`PreTrainedConfig`): of the model.
        dtype (`torch.dtype`): of its weights.
        device (`torch.device`): where they are made.

    Raises:
        [`KVTransferError`]: if it can't be built there.
    """
    is_wrapper = type(config) in AutoModelForImageTextToText._model_mapping
    auto: Any = AutoModelForImageTextToText if is_wrapper else AutoModelForCausalLM
    try:
        with torch.device(device):
            model: nn.Module = auto.from_config(config, dtype=dtype)
    except Exception as error:  # too little memory, an unknown class: each constructor fails in its own way
        raise KVTransferError(
            f"A {config.model_type} model with random weights can't be made on {device} ({type(error).__name__}: "
            f"{error}); expected one that fits there in {dtype}. Take a smaller model or dtype, or another device."
        ) from error
    return model.eval()


def shallow(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """
    The text configuration of the same model with fewer layers.

    Args:
        config (`PreTrainedConfig`): of the model.
        layers (`int`): how many layers it is to have, no more than it has.
    """
    section = copy.deepcopy(text_config(config))
    depth = section.num_hidden_layers
    for name, value in vars(section).items():
        if isinstance(value, list | tuple) and len(value) == depth:
            setattr(section, name, value[:layers])
    section.num_hidden_layers = layers
    return section


def pair_config(source: PreTrainedConfig, target: PreTrainedConfig, fields: dict[str, Any]) -> KVMapperConfig:
    """
    The configuration of a mapper of two models of which nothing but their configurations is there.

    Args:
        source (`PreTrainedConfig`): of the source.
        target (`PreTrainedConfig`): of the target.
        fields (`dict`): from [`~hf_kvtransfer.planning.uniform_support`].
    """
    return KVMapperConfig(
        source_config=text_config(source).to_dict(),
        target_config=text_config(target).to_dict(),
        source_geometry=ModelGeometry.from_config(source).to_dict(),
        target_geometry=ModelGeometry.from_config(target).to_dict(),
        **fields,
    )


@torch.no_grad()
def with_random_weights(mapper: KVMapper) -> KVMapper:
    """
    Fills a mapper's maps with random numbers that keep what is converted about as large as what is read.

    Args:
        mapper ([`KVMapper`]): of any configuration; changed in place.
    """
    for parameter in mapper.parameters():
        scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.01
        parameter.normal_(0, scale)
    return mapper.eval()


def random_mapper(
    source: nn.Module, target: nn.Module, fields: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> KVMapper:
    """
    A mapper of two loaded models with random weights.

    Args:
        source (`PreTrainedModel`): the source.
        target (`PreTrainedModel`): the target.
        fields (`dict`): of [`KVMapperConfig`], such as [`~hf_kvtransfer.planning.uniform_support`] gives.
        dtype (`torch.dtype`): of the maps.
        device (`torch.device`): where they are.
    """
    return with_random_weights(KVMapper.for_pair(source, target, **fields).to(device=device, dtype=dtype))


def recipe_fields(config: KVMapperConfig) -> dict[str, Any]:
    """What of a mapper's configuration decides how much a conversion takes."""
    names = ("support", "map_type", "map_options", "first_token", "anchor_layers", "anchor_start", "entry", "k")
    return {name: getattr(config, name) for name in (*names, "exact_prefix", "exact_suffix")}
