"""`KVMapper.fit` is documented where it is written, and shown where it is looked for."""

import inspect
import subprocess
import sys
from pydoc import render_doc

from hf_kvtransfer import KVMapper
from hf_kvtransfer.fitting import fit_mapper

from .conftest import ROOT


def test_fit_has_every_argument_of_fit_mapper():
    assert inspect.signature(KVMapper.fit) == inspect.signature(fit_mapper)
    shown = render_doc(KVMapper.fit)
    for name in inspect.signature(fit_mapper).parameters:
        assert f"{name}:" in shown  # in the signature
        assert f"\n        {name} (" in shown or f"\n        **{name}:" in shown  # in the documentation


def test_fitting_is_not_loaded_before_it_is_asked_for():
    code = "import sys, hf_kvtransfer; assert 'hf_kvtransfer.fitting' not in sys.modules; hf_kvtransfer.KVMapper.fit"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
