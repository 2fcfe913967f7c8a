"""`KVFidelity`: how near converted entries, or the predictions made on them, come to native ones."""

import statistics
from typing import Any

import evaluate
import torch
from datasets import Features, List, Value
from torch import Tensor, nn

from ..errors import KVTransferError
from ..evaluation.continuation import divergence
from ..evaluation.fidelity import FidelitySums, squared_errors
from ..features import KINDS
from .base import PAIR, TransferMetric


ENTRIES, LOGITS = "entries", "logits"
SHAPES = {ENTRIES: "[heads, tokens, head_dim]", LOGITS: "[tokens, vocabulary]"}
FLOAT = Value("float64")


class KVFidelity(TransferMetric):
    """
    An `evaluate.Metric` with the figures of [`~hf_kvtransfer.evaluation.measure_fidelity`], of tensors at hand.

    Of what is added only sums are kept, a few numbers a document, so that logits of any size can be added one document
    at a time. `features` describes these sums; what `add_batch` takes are the tensors.

    Args:
        config_name (`str`, *optional*, defaults to `"entries"`):
            `"entries"` for keys, values or attention outputs of one layer, `"logits"` for predictions. Keys are
            comparable between models and positions without their rotation only
            ([`~hf_kvtransfer.rope.RotaryCodec.remove`]).
        by_head (`bool`, *optional*, defaults to `False`):
            Whether `"entries"` also gives lists, one number a head. `Trainer` logs numbers alone.
        **options: as in [`TransferMetric`].

    Example:

    ```python
    >>> metric = KVFidelity("logits")
    >>> metric.compute(predictions=logits, references=native_logits)
    {'kl': 0.0312, 'agreement': 0.9375}
    ```

    Raises:
        [`KVTransferError`]: if the configuration or an option is unknown.
    """

    def __init__(self, config_name: str = ENTRIES, *, by_head: bool = False, **options: Any) -> None:
        if config_name not in SHAPES:
            raise KVTransferError(
                f"KVFidelity of {config_name!r} is unknown; expected one of {list(SHAPES)}. Take {ENTRIES!r} for keys, "
                "for values and for attention outputs."
            )
        self._by_head = by_head
        super().__init__(config_name, **options)

    def _info(self) -> evaluate.EvaluationModuleInfo:
        stored: tuple[Any, Any] = {"kl": FLOAT, "agreement": FLOAT}, {"tokens": Value("int64")}
        if self.config_name == ENTRIES:
            stored = (
                {"error": List(FLOAT), "cosine": List(FLOAT)},
                {"tokens": Value("int64"), "total": List(List(FLOAT)), "squares": List(FLOAT)},
            )
        return evaluate.EvaluationModuleInfo(
            description="How near the entries of a converted KV cache, or predictions made on it, come to native ones.",
            citation="",
            inputs_description=f"`predictions` and `references`: per document {SHAPES[self.config_name]}.",
            features=Features(dict(zip(PAIR, stored, strict=True))),
            reference_urls=["https://arxiv.org/abs/2608.03893"],
        )

    def add_batch(self, *, predictions: Any = None, references: Any = None, **columns: Any) -> None:
        """
        Adds documents.

        Args:
            predictions (`torch.Tensor`, `numpy.ndarray`, or a list of either or of numbers):
                What the conversion made of each document; the first dimension counts documents, which may differ in
                length. Of `"entries"` each is `[heads, tokens, head_dim]`, or `[tokens, head_dim]` of one head; of
                `"logits"` each is `[tokens, vocabulary]`, or `[vocabulary]` of one token.
            references: what is native, likewise.
            **columns: of another metric of this package; left to it.

        Raises:
            [`KVTransferError`]: if shapes don't fit, numbers are missing or not finite, or a column is unknown.
        """
        given = self._own({"predictions": predictions, "references": references, **columns})
        documents = {name: self._documents(name, given.get(name)) for name in PAIR}
        counts = [len(each) for each in documents.values()]
        if counts[0] != counts[1]:
            raise KVTransferError(
                f"KVFidelity got {counts[0]} predictions and {counts[1]} references; expected a reference for each "
                "prediction. Pass both of the same documents, in one order."
            )
        rows = [self._sums(*pair) for pair in zip(*documents.values(), strict=True)]
        if rows:
            super().add_batch(**{name: [row[index] for row in rows] for index, name in enumerate(PAIR)})

    def add(self, *, prediction: Any = None, reference: Any = None, **columns: Any) -> None:
        """
        Adds one document; arguments and errors as in `add_batch`, without the dimension that counts documents.
        """
        # `evaluate.combine` passes a single document under the names of many.
        pair = {"predictions": prediction, "references": reference}
        given = {name: one for name, one in (*pair.items(), *columns.items()) if one is not None}
        self.add_batch(**{name: [one] for name, one in given.items()})

    def _documents(self, name: str, given: Any) -> list[Tensor]:
        expected = f"{SHAPES[self.config_name]} for each document"
        if given is None:
            raise KVTransferError(f"KVFidelity got no {name}; expected {expected}. Pass predictions and references.")
        try:
            documents = [_tensor(each) for each in given]
        except (TypeError, ValueError, RuntimeError) as error:
            raise KVTransferError(
                f"KVFidelity got {name} that are no tensors ({type(given).__name__}: {error}); expected {expected}. "
                "Pass tensors, arrays, or lists of numbers."
            ) from error
        dimensions = 3 if self.config_name == ENTRIES else 2
        for index, document in enumerate(documents):
            if document.dim() not in (dimensions - 1, dimensions) or not document.numel():
                raise KVTransferError(
                    f"KVFidelity got {name} of shape {list(document.shape)} for document {index}; expected {expected}. "
                    "The first dimension of all counts documents: add one where there is a single document."
                )
            if not bool(document.isfinite().all()):
                raise KVTransferError(
                    f"KVFidelity got {name} with NaN or infinite numbers for document {index}; expected finite ones. "
                    "Leave out what is masked, and use bfloat16 or float32 where float16 overflows."
                )
        return [document if document.dim() == dimensions else document[None] for document in documents]

    def _sums(self, prediction: Tensor, reference: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
        if prediction.shape != reference.shape:
            raise KVTransferError(
                f"KVFidelity got a prediction of shape {list(prediction.shape)} and a reference of shape "
                f"{list(reference.shape)}; expected one shape. Compare the same tokens, of the same target."
            )
        if self.config_name == LOGITS:
            kl, agreement = divergence(reference[None], prediction.to(reference.device)[None])
            return {"kl": float(kl.mean()), "agreement": float(agreement.mean())}, {"tokens": len(reference)}
        prediction = prediction.to(reference.device)
        sums = squared_errors(reference[None], prediction[None])
        cosine = nn.functional.cosine_similarity(prediction, reference, dim=-1).sum(-1)
        return {"error": sums.pop("error"), "cosine": cosine.tolist()}, sums

    def _compute(self, *, predictions: Any, references: Any) -> dict[str, Any]:
        """The figures of all documents, from the sums of each."""
        if self.config_name == LOGITS:
            return {name: statistics.fmean(one[name] for one in predictions) for name in ("kl", "agreement")}
        shapes = {(len(one["total"]), len(one["total"][0])) for one in references}
        if len(shapes) > 1:
            raise KVTransferError(
                f"KVFidelity got documents of {sorted(shapes)} heads and dimensions; expected the same for all. "
                "Take one metric for each layer and kind."
            )
        sums = FidelitySums()
        for found, own in zip(predictions, references, strict=True):
            errors = {**own, "error": found["error"]}
            layer = dict.fromkeys(KINDS, errors) | {"cosine": found["cosine"], "queries": own["tokens"]}
            sums.add({"layers": [layer]})
        kind, cosine = KINDS[0], sums.cosine()[0]
        figures: dict[str, Any] = {"r2": sums.r2(kind)[0], "cosine": statistics.fmean(cosine)}
        if self._by_head:
            figures |= {"r2_by_head": sums.r2_by_head(kind)[0], "cosine_by_head": cosine}
        return figures


def _tensor(given: Any) -> Tensor:
    """Full precision, as `evaluation` computes in it."""
    tensor = torch.as_tensor(given).detach()
    return tensor if tensor.dtype is torch.float64 else tensor.float()
