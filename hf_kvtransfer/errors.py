"""Every refusal of this package is one of these types, and its sentence says what was given, what was expected and
what to do about it."""


class KVTransferError(Exception):
    """Base class of all errors raised by this package."""


class UnsupportedModelError(KVTransferError, ValueError):
    """The model's cache can't be mapped exactly: recurrent layers, latent attention, length-dependent RoPE, …"""


class SourceCacheError(KVTransferError, ValueError):
    """A cache that can't be read: empty, ragged, truncated by a sliding window, not finite, of the wrong shape."""


class PairMismatchError(KVTransferError, ValueError):
    """A mapper meets a checkpoint, a geometry or a tokenizer other than those it was fitted for."""


class CalibrationError(KVTransferError, ValueError):
    """Calibration can't go on: no text, too little text, statistics of another pair, a resume that doesn't match."""


class SingularSystemError(CalibrationError):
    """The ridge system is not positive definite in float64, so it has no unique solution."""


class ConversionError(KVTransferError, ValueError):
    """`convert` was given arguments that contradict each other or the cache."""


class CacheUseError(KVTransferError, RuntimeError):
    """A `TransferredCache` is used in a way that would give silently wrong logits."""


class MapperFileError(KVTransferError, OSError):
    """A saved mapper or saved statistics can't be read: missing, truncated, or damaged."""


class EvidenceError(KVTransferError, ValueError):
    """A mapper hasn't shown what was asked of it, or a report is of another mapper."""


class HubError(KVTransferError, OSError):
    """Nothing could be published: no token, no permission, no connection, or an upload that broke off."""
