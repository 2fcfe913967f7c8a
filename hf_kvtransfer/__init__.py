"""Move a conversation between language models by converting its KV cache instead of prefilling it again."""

from transformers import AutoConfig, AutoModel

from ._version import __version__
from .cache import TransferredCache
from .calibration import CalibrationStatistics
from .config import KVMapperConfig
from .errors import (
    CacheUseError,
    CalibrationError,
    ConversionError,
    EvidenceError,
    HubError,
    KVTransferError,
    MapperFileError,
    PairMismatchError,
    SingularSystemError,
    SourceCacheError,
    UnsupportedModelError,
)
from .geometry import ModelGeometry, tokenizer_fingerprint
from .mapper import KVMapper
from .rope import RotaryCodec
from .source import read_source_cache


AutoConfig.register(KVMapperConfig.model_type, KVMapperConfig, exist_ok=True)
AutoModel.register(KVMapperConfig, KVMapper, exist_ok=True)

__all__ = [
    "CacheUseError",
    "CalibrationError",
    "CalibrationStatistics",
    "ConversionError",
    "EvidenceError",
    "HubError",
    "KVMapper",
    "KVMapperConfig",
    "KVTransferError",
    "MapperFileError",
    "ModelGeometry",
    "PairMismatchError",
    "RotaryCodec",
    "SingularSystemError",
    "SourceCacheError",
    "TransferredCache",
    "UnsupportedModelError",
    "__version__",
    "read_source_cache",
    "tokenizer_fingerprint",
]
