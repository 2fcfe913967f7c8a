"""Training maps: losses, cached features, and `KVMapperTrainer`, which is `transformers.Trainer` for a mapper."""

from .arguments import KVTrainingArguments
from .batches import capture_batch
from .cached import CachedFeatures
from .forms import with_form
from .handover import HandOver
from .module import KVTransferModule, KVTransferOutput, LossWeights
from .rows import TokenRows
from .scales import estimate_scales
from .trainer import KVMapperTrainer


__all__ = [
    "CachedFeatures",
    "HandOver",
    "KVMapperTrainer",
    "KVTrainingArguments",
    "KVTransferModule",
    "KVTransferOutput",
    "LossWeights",
    "TokenRows",
    "capture_batch",
    "estimate_scales",
    "with_form",
]
