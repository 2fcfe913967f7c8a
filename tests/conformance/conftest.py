from .summary import pytest_terminal_summary  # noqa: F401 - a hook
