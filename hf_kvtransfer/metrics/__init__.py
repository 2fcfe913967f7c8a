"""Fidelity and retention as modules of the library `evaluate`, which only those who import this need (extra `eval`)."""

from ..errors import KVTransferError


try:
    from .kv_fidelity import KVFidelity
    from .kv_retention import KVRetention
except ModuleNotFoundError as error:
    if error.name != "evaluate":
        raise
    raise KVTransferError(
        "The metrics need the library `evaluate`, which isn't installed; expected the extra `eval`. Install it with "
        "`pip install hf_kvtransfer[eval]`; `hf_kvtransfer.evaluation` gives the same figures without it."
    ) from error


__all__ = ["KVFidelity", "KVRetention"]
