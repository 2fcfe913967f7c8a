"""Making the model type known to lm-evaluation-harness, which looks for no plugins, and handing over to its program."""

import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import KVTransferError


MODEL = "hf_kvtransfer"
_HELP = {"-h", "--help"}


def tasks_path() -> Path:
    """The folder of the task files that come with this package, as `--include_path` takes it."""
    return Path(__file__).parent / "tasks"


def register() -> None:
    """
    Makes `--model hf_kvtransfer` known to lm-evaluation-harness in this process; a second call does nothing.

    Raises:
        [`KVTransferError`]: if lm-evaluation-harness is not installed.
    """
    try:
        # The harness adds its own only to a registry that is empty.
        import lm_eval.models  # noqa: F401
        from lm_eval.api.registry import model_registry
    except ImportError as error:
        raise KVTransferError(
            f"lm-evaluation-harness can't be imported ({error}); expected it beside this package. Install both with "
            "`pip install hf_kvtransfer[eval]`."
        ) from error
    if MODEL not in model_registry:
        model_registry.register(MODEL, target="hf_kvtransfer.harness.model:TransferLM")


def run_lm_eval(arguments: Sequence[str]) -> None:
    """
    The program `lm_eval` with the model type registered, and with the tasks of this package where no other
    `--include_path` is given.

    Args:
        arguments (`Sequence[str]`): what would follow `lm_eval` in a shell.

    Raises:
        [`KVTransferError`]: if lm-evaluation-harness is not installed.
    """
    register()
    from lm_eval.__main__ import cli_evaluate

    arguments = list(arguments)
    is_given = any(argument.split("=")[0] == "--include_path" for argument in arguments)
    if arguments and not is_given and not _HELP & set(arguments):
        arguments += ["--include_path", str(tasks_path())]
    before = sys.argv
    # The program reads its arguments from there, and from nowhere else.
    sys.argv = ["lm_eval", *arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
