"""The real client of the Hub, in a process of its own: it reads `HF_ENDPOINT` and others as it is imported."""

import logging
import multiprocessing
import warnings
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from .conftest import DeprecationHandler


# Whatever would lead the client elsewhere.
UNSET = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_CACHE", "HF_ASSETS_CACHE", "HF_XET_CACHE")


@contextmanager
def client(home, **environment):
    """
    A function that calls a function of a module, with arguments that can be pickled, in a process whose environment has
    these variables. What is deprecated is an error there too.
    """
    usual = {
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    executor = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_prepare)
    with pytest.MonkeyPatch.context() as patch:
        for name in UNSET:
            patch.delenv(name, raising=False)
        for name, value in (usual | environment).items():
            patch.setenv(name, value)
        executor.submit(int).result()  # the process begins here, in this environment
    with executor:
        yield lambda function, *args, **kwargs: executor.submit(function, *args, **kwargs).result()


def _prepare():
    torch.set_num_threads(1)
    for category in (DeprecationWarning, FutureWarning, PendingDeprecationWarning):
        warnings.filterwarnings("error", category=category)
    # What libraries say of one another: transformers scripts functions, and the client sends files in old ways.
    for message in ("`torch.jit.*` is deprecated", "Use 'content=<...>' to upload", "hf_xet.upload_"):
        warnings.filterwarnings("ignore", message=message, category=DeprecationWarning)
    for name in ("transformers", "huggingface_hub"):
        logging.getLogger(name).addHandler(DeprecationHandler())
