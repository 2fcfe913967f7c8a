"""A class method that lives in a module of its own."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


class Delegated:
    """
    A static method that is a function of a module which imports the class. It is looked up at its first use, so that
    signature and documentation are the function's own, as in `help(KVMapper.fit)`.

    Args:
        module (`str`): the full name of the module.
        function (`str`): its name there.
    """

    def __init__(self, module: str, function: str) -> None:
        self.module = module
        self.function = function

    def __get__(self, instance: Any, owner: type | None = None) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(import_module(self.module), self.function)
        return found
