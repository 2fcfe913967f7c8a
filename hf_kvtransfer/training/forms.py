"""Giving a fitted mapper another functional form, to be trained."""

import copy
from inspect import signature
from typing import Any

import torch

from ..errors import CalibrationError
from ..features import KINDS
from ..mapper import KVMapper
from ..maps import MAPS
from .scores import keep_as_closed_form


# Arguments of a form that the layer decides.
_GIVEN = ("in_features", "heads", "head_dim", "groups")


@torch.no_grad()
def with_form(mapper: KVMapper, map_type: str, **options: Any) -> KVMapper:
    """
    A mapper of another functional form with the same support. Where the form has a linear part, it holds the fitted
    maps; everything else starts as the form does.

    Args:
        mapper ([`KVMapper`]): a linear one.
        map_type (`str`): a key of `hf_kvtransfer.maps.MAPS`.
        **options: arguments of the form, such as `hidden=1024`.

    Returns:
        [`KVMapper`]: a new one, in evaluation mode. The R² of the linear maps are its `config.scores["closed_form"]`.

    Raises:
        [`CalibrationError`]: if the mapper isn't linear, there is no such form, or it has no such option.
    """
    if map_type not in MAPS or mapper.config.map_type != "linear":
        raise CalibrationError(
            f"A mapper of the form `{mapper.config.map_type}` can't be given the form `{map_type}`; expected a linear "
            f"mapper and one of {sorted(MAPS)}. Fit the linear maps first."
        )
    config = copy.deepcopy(mapper.config)
    config.map_type, config.map_options = map_type, dict(options)
    keep_as_closed_form(config)
    known = [name for name in signature(MAPS[map_type]).parameters if name not in _GIVEN]
    wrong = {
        name: value
        for name, value in options.items()
        if name not in known or not isinstance(value, int) or isinstance(value, bool) or value < 1
    }
    if wrong:
        raise CalibrationError(
            f"The form `{map_type}` was given {wrong}; expected whole numbers of at least 1, for "
            f"{', '.join(f'`{name}`' for name in known) or 'no option at all'}. Leave the others out."
        )
    made = KVMapper(config).to(mapper.dtype)
    for layer, fitted in zip(made.layers, mapper.layers, strict=True):
        for kind in KINDS:
            if hasattr(fitted, kind):
                linear: Any = getattr(fitted, kind)
                getattr(layer, kind).set_linear(linear.weight, linear.bias)
            if (constant := fitted.first_token(kind)) is not None:  # type: ignore[operator]
                layer.first_token(kind).copy_(constant)
    if made.entry is not None and mapper.entry is not None:
        made.entry.load_state_dict(mapper.entry.state_dict())
    return made.to(mapper.device).eval()
