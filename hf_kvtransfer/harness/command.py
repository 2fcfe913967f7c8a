"""`hf-kvtransfer lm-eval`: the program of lm-evaluation-harness with this package's model type and tasks."""

import sys

import typer

from ..cli_options import typed_errors
from .registration import run_lm_eval, tasks_path


def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness with `--model hf_kvtransfer` and the tasks of this package; all its arguments work."""
    with typed_errors():
        if context.args == ["--tasks_path"]:
            print(tasks_path())
            return
        run_lm_eval(context.args)


def main() -> None:
    """`python -m hf_kvtransfer.harness`, with the same arguments."""
    from ..cli import app

    app(["lm-eval", *sys.argv[1:]])
