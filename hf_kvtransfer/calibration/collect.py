"""The calibration loop: two models read the same rows of tokens, and only sums remain."""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from .._version import __version__
from ..conversion import anchor_output
from ..errors import CalibrationError
from ..geometry import ModelGeometry, tokenizer_fingerprint
from ..pairing import weight_sample
from ..rope import RotaryCodec
from .capture import Content, capture_content, embedding_weight
from .layout import FeatureLayout
from .rows import AttentionRows
from .sample import take_sample
from .statistics import SPLITS, CalibrationStatistics
from .storage import STATISTICS_NAME
from .texts import check_whole, describe_source, iter_texts, pack


if TYPE_CHECKING:
    import os

    from ..mapper import KVMapper


# What must agree for a collection to go on where it stopped; the batch size and the number of sequences may change.
_SETTINGS = (
    "dataset",
    "sequence_length",
    "token_stride",
    "heldout_fraction",
    "attention_rows",
    "sample_tokens",
    "anchored_by",
    "source_dtype",
    "target_dtype",
)


def collect(
    source: nn.Module,
    target: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    texts: Any,
    *,
    sequence_length: int = 1024,
    num_sequences: int | None = 500,
    token_stride: int = 4,
    heldout_fraction: float = 0.1,
    batch_size: int = 8,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
    fingerprints: tuple[str, str] | None = None,
    dataset: str | None = None,
    manifest: dict[str, Any] | None = None,
    layout: FeatureLayout | None = None,
    attention_rows: bool = False,
    sample_tokens: int = 0,
    anchored_by: KVMapper | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 16,
    resume: bool = True,
    progress: bool = True,
) -> CalibrationStatistics:
    """
    Run both models over text and sum what a closed-form map between their caches needs (arXiv 2608.03893,
    calibration). The defaults are the published ones: 500 sequences of 1,024 tokens, every 4th token kept.

    Memory doesn't grow with the text: it holds the sums and one batch.

    Args:
        source (`torch.nn.Module`): Causal language model whose cache will be converted.
        target (`torch.nn.Module`): Causal language model that will decode from it.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer of both.
        texts: Anything that [`iter_texts`] reads, or the iterator it gives.
        sequence_length (`int`, *optional*, defaults to 1024): Tokens per sequence.
        num_sequences (`int`, *optional*, defaults to 500): Sequences at most; `None` for all of the text.
        token_stride (`int`, *optional*, defaults to 4): One token in so many is kept.
        heldout_fraction (`float`, *optional*, defaults to 0.1):
            Share of the sequences, evenly spread from the second on, that goes to the `"heldout"` split.
        batch_size (`int`, *optional*, defaults to 8): Sequences per forward pass.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float64`): Precision of the large sums.
        device (`torch.device` or `str`, *optional*):
            Where the sums live. By default the source's accelerator if it has room for them twice over, else the CPU.
        fingerprints (`tuple[str, str]`, *optional*):
            `tokenizer_fingerprint` of the source's and of the target's own tokenizer, to be compared.
        dataset (`str`, *optional*): Name of the text for the manifest; by default derived from `texts`.
        manifest (`dict`, *optional*):
            What tells the two checkpoints from others; kept with the statistics, and compared when resuming. By
            default a sample of their weights.
        layout ([`FeatureLayout`], *optional*): What is summed beyond the plain features; nothing by default.
        attention_rows (`bool`, *optional*, defaults to `False`):
            Also sum rows weighted by the target's attention (arXiv 2609.00891), for every KV head by itself.
        sample_tokens (`int`, *optional*, defaults to 0):
            Keep about so many tokens of held-out sequences with the target's queries, to score maps by what attention
            reads of them. They are taken from the first held-out sequences.
        anchored_by ([`~hf_kvtransfer.KVMapper`], *optional*):
            What its anchor makes of a predicted stream is summed in place of the target's own stream at the layout's
            last depth.
        checkpoint_dir (`str` or `os.PathLike`, *optional*):
            Folder to save to, from time to time and at the end, and to resume from. An interruption, at whatever
            moment, costs the batches since the last save and nothing else.
        checkpoint_every (`int`, *optional*, defaults to 16): Batches between two saves.
        resume (`bool`, *optional*, defaults to `True`): Go on from what is in `checkpoint_dir`, else start over.
        progress (`bool`, *optional*, defaults to `True`): Show a progress bar, if standard error is a terminal.

    Returns:
        `CalibrationStatistics`

    Raises:
        CalibrationError:
            If an argument is impossible, the tokenizers differ, a token id is outside a model's vocabulary, there is
            too little text, or the checkpoint is of another collection.
        MapperFileError: If the checkpoint is damaged.
    """
    if not isinstance(heldout_fraction, int | float) or not 0 <= heldout_fraction < 1:
        raise CalibrationError(f"heldout_fraction is {heldout_fraction!r}, expected a number, at least 0 and below 1.")
    for name, value in (
        ("batch_size", batch_size),
        ("token_stride", token_stride),
        ("checkpoint_every", checkpoint_every),
    ):
        check_whole(name, value, 1)
    check_whole("sequence_length", sequence_length, 2)
    if token_stride >= sequence_length:
        raise CalibrationError(
            f"token_stride is {token_stride} and sequence_length {sequence_length}: only the first token of each "
            "sequence would be kept. Expected a stride below the length."
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise CalibrationError(
            f"The tokenizer is a {type(tokenizer).__name__}, expected the tokenizer that both models share: load it "
            "with `AutoTokenizer.from_pretrained`."
        )
    if manifest is None:
        manifest = {"source_weights": weight_sample(source), "target_weights": weight_sample(target)}
    geometries = ModelGeometry.from_model(source), ModelGeometry.from_model(target)
    expected = _Collection(
        source=geometries[0],
        target=geometries[1],
        tokenizer_fingerprint=_shared_fingerprint(tokenizer, fingerprints),
        calibration={
            "dataset": dataset or describe_source(texts),
            "sequences": 0,
            "rows_sha256": hashlib.sha256().hexdigest(),
            "sequence_length": sequence_length,
            "token_stride": token_stride,
            "heldout_fraction": heldout_fraction,
            "attention_rows": attention_rows,
            "sample_tokens": sample_tokens,
            "anchored_by": None if anchored_by is None else _entry_digest(anchored_by),
            "source_dtype": _dtype_name(source),
            "target_dtype": _dtype_name(target),
            "versions": {
                "hf_kvtransfer": __version__,
                "transformers": transformers.__version__,
                "torch": str(torch.__version__),
            },
        },
        # As it will read when it comes back from a file.
        manifest=json.loads(json.dumps(manifest)),
        dtype=dtype,
        device=torch.device(device) if device is not None else _roomy_device(*geometries, dtype, source, layout),
        layout=layout or FeatureLayout(),
    )
    rows = pack(iter_texts(texts), tokenizer, sequence_length, num_sequences)
    folder = Path(checkpoint_dir) if checkpoint_dir is not None else None
    if folder is not None and resume and (folder / STATISTICS_NAME).exists():
        statistics = expected.resume(folder)
        digest = _skip_rows(rows, statistics.calibration, num_sequences)
    else:
        statistics, digest = expected.start(), hashlib.sha256()

    codecs = RotaryCodec.from_model(source), RotaryCodec.from_model(target)
    limit = min(_vocabulary(source), _vocabulary(target))
    known = len(tokenizer.get_vocab())
    if known < limit / 2:
        raise CalibrationError(
            f"The tokenizer knows {known} tokens, the models have {limit} embeddings; expected the tokenizer that both "
            "were trained with. Load it from the source checkpoint with `AutoTokenizer.from_pretrained`."
        )
    reading = _Reading(
        source, target, codecs, token_stride, heldout_fraction, attention_rows, sample_tokens, anchored_by
    )
    unsaved = 0
    with tqdm(
        total=num_sequences,
        initial=statistics.calibration["sequences"],
        desc="Calibrating",
        unit="sequence",
        disable=None if progress else True,
    ) as bar:
        while batch := list(islice(rows, batch_size)):
            for row in batch:
                _check_vocabulary(row, limit)
                digest.update(array("q", row).tobytes())
            reading.add(statistics, torch.tensor(batch))
            statistics.calibration["sequences"] += len(batch)
            statistics.calibration["rows_sha256"] = digest.hexdigest()
            bar.update(len(batch))
            unsaved += 1
            if folder is not None and unsaved == checkpoint_every:
                statistics.save(folder)
                unsaved = 0
    if folder is not None and unsaved:
        statistics.save(folder)
    return statistics


@dataclass
class _Collection:
    """What a collection is about, before its sums exist: they are large, and a resumed one brings its own."""

    source: ModelGeometry
    target: ModelGeometry
    tokenizer_fingerprint: str
    calibration: dict[str, Any]
    manifest: dict[str, Any]
    dtype: torch.dtype
    device: torch.device
    layout: FeatureLayout

    def start(self) -> CalibrationStatistics:
        return CalibrationStatistics(**vars(self))

    def resume(self, folder: Path) -> CalibrationStatistics:
        found = CalibrationStatistics.load(folder, mmap=False)
        differences = []
        for side, mine, theirs in (("source", self.source, found.source), ("target", self.target, found.target)):
            differences += [f"{side} model: {difference}" for difference in mine.differences(theirs)]
        if found.tokenizer_fingerprint != self.tokenizer_fingerprint:
            differences.append("the tokenizer")
        if found.dtype != self.dtype:
            differences.append(f"dtype is {self.dtype}, was {found.dtype}")
        if found.layout != self.layout:
            differences.append(f"features are {self.layout}, were {found.layout}")
        for name in _SETTINGS:
            given, stored = self.calibration[name], found.calibration.get(name)
            if given != stored:
                differences.append(f"{name} is {given!r}, was {stored!r}")
        # Parts of a manifest are whole configurations, too long for a sentence.
        names = {**self.manifest, **found.manifest}
        differences += [name for name in names if self.manifest.get(name) != found.manifest.get(name)]
        if differences:
            raise _other_collection(folder, "; ".join(differences))
        return found.to(self.device)


def _other_collection(folder: Path, what: str) -> CalibrationError:
    return CalibrationError(
        f"The checkpoint in {folder} is of another collection ({what}). Pass another folder as `statistics_dir` "
        "(`checkpoint_dir` of `collect`), or resume=False to start over and replace it."
    )


def _skip_rows(rows: Iterator[list[int]], calibration: dict[str, Any], num_sequences: int | None) -> Any:
    """Pass over the rows that a checkpoint has seen, and check that they are the same. Returns their running hash."""
    done = calibration["sequences"]
    if num_sequences is not None and done > num_sequences:
        raise CalibrationError(
            f"The checkpoint already holds {done} sequences, more than num_sequences = {num_sequences}. Ask for at "
            f"least {done}, or pass resume=False to start over."
        )
    digest = hashlib.sha256()
    for row in islice(rows, done):
        digest.update(array("q", row).tobytes())
    if digest.hexdigest() != calibration.get("rows_sha256"):
        raise CalibrationError(
            f"The first {done} sequences aren't those that the checkpoint has seen: the text, its order or its "
            "tokenization changed, or the statistics were merged. Pass the same text, or resume=False to start over."
        )
    return digest


@dataclass
class _Reading:
    """What is done with each batch."""

    source: nn.Module
    target: nn.Module
    codecs: tuple[RotaryCodec, RotaryCodec]
    stride: int
    heldout_fraction: float
    attention_rows: bool
    sample_tokens: int
    anchored_by: KVMapper | None

    def add(self, statistics: CalibrationStatistics, ids: torch.Tensor) -> None:
        """Adds a batch of shape `[rows, tokens]`, each row to its split."""
        layout, rows = statistics.layout, ids.shape[0]
        first = statistics.calibration["sequences"]
        heldout = [row for row in range(rows) if _is_heldout(first + row, self.heldout_fraction)]
        fit = [row for row in range(rows) if row not in heldout]
        weights = None
        stream = None if self.anchored_by is None else partial(self._stream, self.anchored_by)
        streams: list[torch.Tensor] = []
        read = capture_content(
            self.source,
            self.codecs[0],
            ids,
            stride=self.stride,
            skip=layout.skip,
            window=layout.window,
            on_cache=None if stream is None else lambda cache: streams.append(stream(cache, ids)),
        )
        if self.attention_rows and fit:
            weights = AttentionRows(self.target, ids.shape[1], slice(layout.skip, None, self.stride))
            with weights.recording() as on_layer:
                predicted = self._capture_target(ids, layout, on_layer)
        else:
            predicted = self._capture_target(ids, layout)
        if streams:
            predicted.hidden[-1] = streams[0][:, :: self.stride].to(predicted.hidden[-1]).flatten(0, 1)
        for split, chosen in zip(SPLITS, (fit, heldout), strict=True):
            if chosen:
                parts = (read, predicted) if len(chosen) == rows else (c.rows(chosen, rows) for c in (read, predicted))
                statistics.update_content(split, *parts)
        if weights is not None:
            weights.add_to(statistics, read.rows(fit, rows), predicted.rows(fit, rows), fit)
        held = statistics.sample.sequences if statistics.sample is not None else 0
        missing = heldout[: max(math.ceil(self.sample_tokens / ids.shape[1]) - held, 0)]
        if missing:
            taken = take_sample(self.source, self.target, self.codecs, ids[missing], layout, stream=stream)
            statistics.sample = taken if statistics.sample is None else statistics.sample.extended(taken)

    def _stream(self, mapper: KVMapper, cache: Any, ids: torch.Tensor) -> torch.Tensor:
        return anchor_output(mapper, cache, self.target, ids.to(embedding_weight(self.target).device))

    def _capture_target(self, ids: torch.Tensor, layout: FeatureLayout, on_layer: Any = None) -> Content:
        codec, depths = self.codecs[1], layout.anchors
        return capture_content(
            self.target, codec, ids, stride=self.stride, skip=layout.skip, hidden_at=depths, on_layer=on_layer
        )


def _entry_digest(mapper: KVMapper) -> str:
    """Tells one predicted stream from another."""
    config, entry = mapper.config, mapper.entry
    weights = b"" if entry is None else entry.weight.detach().float().cpu().contiguous().numpy().tobytes()
    described = f"{config.anchor_start} {config.anchor_layers} {config.exact_prefix} {config.entry}".encode()
    return hashlib.sha256(described + weights).hexdigest()


def _is_heldout(index: int, fraction: float) -> bool:
    """Evenly spread from the second sequence on: two sequences already give one of each split."""
    share = Fraction(str(fraction))
    return index > 0 and math.ceil(index * share) > math.ceil((index - 1) * share)


def _shared_fingerprint(tokenizer: PreTrainedTokenizerBase, fingerprints: tuple[str, str] | None) -> str:
    fingerprint = tokenizer_fingerprint(tokenizer)
    for side, other in zip(("source", "target"), fingerprints or (), strict=False):
        if other != fingerprint:
            raise CalibrationError(
                f"The {side}'s tokenizer (fingerprint {other}) isn't the one that was passed ({fingerprint}). A cache "
                "can only be converted between models that read the same token ids: pick a pair with one tokenizer."
            )
    return fingerprint


def _vocabulary(model: nn.Module) -> int:
    return embedding_weight(model).shape[0]


def _check_vocabulary(row: list[int], limit: int) -> None:
    # By the ids that occur: some checkpoints are published with tokens that their embedding has no row for.
    if max(row) >= limit:
        raise CalibrationError(
            f"The tokenizer gives token id {max(row)}, but one of the models has only {limit} embeddings: use the "
            "tokenizer that both models were trained with."
        )


def _dtype_name(model: nn.Module) -> str:
    dtypes = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return str(next(dtypes, None)).removeprefix("torch.")


def _roomy_device(
    source: ModelGeometry, target: ModelGeometry, dtype: torch.dtype, model: nn.Module, layout: FeatureLayout | None
) -> torch.device:
    """The model's own device if the sums fit there with as much again to spare for activations, else the CPU."""
    device = embedding_weight(model).device
    if device.type != "cuda":
        return torch.device("cpu")
    layout = layout or FeatureLayout()
    width, outputs = layout.source_width(source, target), layout.target_width(target)
    needed = len(SPLITS) * len(layout.names) * width * (width + outputs) * dtype.itemsize
    return device if 2 * needed < torch.cuda.mem_get_info(device)[0] else torch.device("cpu")
