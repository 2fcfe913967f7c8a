"""What named hardware can do, from a small table of vendors' figures."""

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from ..errors import KVTransferError


THIS_MACHINE = "this"
"""What stands for the machine this runs on, which is measured."""


@dataclass(frozen=True)
class Hardware:
    """
    Args:
        name (`str`): what it is called.
        flops (`float`): dense bfloat16 operations per second, as the vendor states it.
        bandwidth (`float`): bytes of memory per second, likewise.
        products (`float`): share of `flops` that large matrix products reach.
        attention (`float`): share of `flops` that a fused attention kernel reaches.
        copies (`float`): share of `bandwidth` that copies reach.
        operation (`float`): seconds that the host takes to start one operation.
        source (`str`): where the vendor's figures are from.
    """

    name: str
    flops: float
    bandwidth: float
    products: float
    attention: float
    copies: float
    operation: float
    source: str

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Hardware":
        """Reads one entry of `hardware.json`."""
        shares = values["achievable"]
        return cls(
            **{name: values[name] for name in ("name", "flops", "bandwidth", "operation", "source")},
            products=shares["products"],
            attention=shares["attention"],
            copies=shares["bandwidth"],
        )


def known_hardware() -> dict[str, Hardware]:
    """All hardware of `hardware.json`, by name."""
    text = files(__package__).joinpath("hardware.json").read_text(encoding="utf-8")
    return {entry["name"]: Hardware.from_dict(entry) for entry in json.loads(text)["hardware"]}


def hardware_named(name: str) -> Hardware:
    """
    Named hardware; upper and lower case are the same.

    Args:
        name (`str`): such as `"H100"`.

    Raises:
        [`KVTransferError`]: if there is none of this name.
    """
    known = known_hardware()
    for candidate, hardware in known.items():
        if candidate.lower() == name.strip().lower():
            return hardware
    raise KVTransferError(
        f"There is no hardware {name!r}; expected one of {', '.join(known)}, or {THIS_MACHINE!r} for this machine, "
        "which is measured then. Choose the nearest."
    )
