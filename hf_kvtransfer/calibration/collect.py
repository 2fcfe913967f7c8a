"""The calibration loop: two models read the same rows of tokens, and only sums remain."""

from __future__ import annotations

import hashlib
import json
import tempfile
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from .._version import __version__
from ..errors import CalibrationError
from ..features import KINDS
from ..geometry import ModelGeometry, tokenizer_fingerprint
from ..memory import available_memory
from ..pairing import weight_sample
from ..rope import RotaryCodec
from .capture import embedding_weight
from .checkpoints import Collection, finish
from .layout import FeatureLayout
from .passes import Passes
from .processes import Shard, pool
from .statistics import CalibrationStatistics, bytes_needed
from .storage import exclusive
from .texts import check_whole, describe_source, iter_texts, pack


if TYPE_CHECKING:
    import os

    from ..mapper import KVMapper


# Sums that take more of the free main memory than this go to the disk: models and batches need some too.
_MOST_OF_MEMORY = 0.7


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
    kinds: Sequence[str] = KINDS,
    sums_on_disk: bool | None = None,
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
        kinds (`Sequence[str]`, *optional*):
            `("keys",)` or `("values",)` to sum one kind alone, which takes half the memory; the other in another
            collection, and [`CalibrationStatistics.with_kind`] to put them together. Both by default.
        sums_on_disk (`bool`, *optional*):
            Keep the large sums in files, of `checkpoint_dir` if given, that are mapped into memory. By default only if
            they take more than most of the main memory. It is slow if the disk is.
        progress (`bool`, *optional*, defaults to `True`): Show a progress bar, if standard error is a terminal.

    Where `torch.distributed` is initialised, as by `torchrun` or `accelerate launch`, each process reads its own share
    of the sequences (number `i` modulo the processes), and all get the sums of one process to rounding. Every process
    must be given the same text. Each keeps its part in a folder inside `checkpoint_dir`, and goes on from there.

    Returns:
        `CalibrationStatistics`

    Raises:
        CalibrationError:
            If an argument is impossible, the tokenizers differ, a token id is outside a model's vocabulary, there is
            too little text, the checkpoint is of another collection or of another number of processes, somebody else
            writes to it, or the disk has no room.
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
    layout = layout or FeatureLayout()
    if tuple(kinds) not in (KINDS, KINDS[:1], KINDS[1:]) or (layout.joint and tuple(kinds) != KINDS):
        raise CalibrationError(
            f"kinds is {kinds!r}{' with joint features' if layout.joint else ''}; expected ('keys',), ('values',) or "
            "both, and both with joint features, which are summed together. Leave out `kinds`, or the joint features."
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise CalibrationError(
            f"The tokenizer is a {type(tokenizer).__name__}, expected the tokenizer that both models share: load it "
            "with `AutoTokenizer.from_pretrained`."
        )
    if manifest is None:
        manifest = {"source_weights": weight_sample(source), "target_weights": weight_sample(target)}
    geometries = ModelGeometry.from_model(source), ModelGeometry.from_model(target)
    folder = Path(checkpoint_dir) if checkpoint_dir is not None else None
    shard = Shard.current()
    # What isn't summed isn't written to either, and takes no room.
    needed = bytes_needed(*geometries, layout, dtype, attention_rows) * len(kinds) // len(KINDS)
    place, disk = _place(needed, device, sums_on_disk, folder, source)
    expected = Collection(
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
            "kinds": list(kinds),
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
        device=place,
        layout=layout,
        attention_rows=attention_rows,
        disk=disk,
    )
    rows = pack(iter_texts(texts), tokenizer, sequence_length, num_sequences)
    with ExitStack() as held:
        if folder is not None:
            held.enter_context(exclusive(folder if shard.rank == 0 else shard.folder(folder)))
        statistics, digest = expected.begin(folder, resume, rows, num_sequences, shard)
        codecs = RotaryCodec.from_model(source), RotaryCodec.from_model(target)
        limit = min(_vocabulary(source), _vocabulary(target))
        known = len(tokenizer.get_vocab())
        if known < limit / 2:
            raise CalibrationError(
                f"The tokenizer knows {known} tokens, the models have {limit} embeddings; expected the tokenizer that "
                "both were trained with. Load it from the source checkpoint with `AutoTokenizer.from_pretrained`."
            )
        passes = Passes(
            source, target, codecs, token_stride, heldout_fraction, attention_rows, sample_tokens, anchored_by, kinds
        )
        own = None if folder is None else shard.folder(folder)
        unsaved = 0
        with tqdm(
            total=num_sequences,
            initial=statistics.calibration["sequences"],
            desc="Calibrating",
            unit="sequence",
            disable=None if progress and shard.rank == 0 else True,
        ) as bar:
            # Every process sees all rows, and reads its own: they are packed and told apart in one order.
            while batch := list(islice(rows, batch_size * shard.world)):
                first = statistics.calibration["sequences"]
                for row in batch:
                    _check_vocabulary(row, limit)
                    digest.update(array("q", row).tobytes())
                mine = [
                    (index, row)
                    for index, row in enumerate(batch, first)
                    if shard.owns(index, passes.is_sampled(index, sequence_length))
                ]
                for start in range(0, len(mine), batch_size):
                    indices, chosen = zip(*mine[start : start + batch_size], strict=True)
                    passes.add(statistics, torch.tensor(chosen), indices)
                statistics.calibration["sequences"] += len(batch)
                statistics.calibration["rows_sha256"] = digest.hexdigest()
                bar.update(len(batch))
                unsaved += 1
                if own is not None and unsaved == checkpoint_every:
                    statistics.save(own)
                    unsaved = 0
        if shard.world > 1:
            statistics.calibration.pop("part")
            pool(statistics)
        if folder is not None and (unsaved or shard.world > 1):
            finish(statistics, folder, shard)
    return statistics


def _entry_digest(mapper: KVMapper) -> str:
    """Tells one predicted stream from another."""
    config, entry = mapper.config, mapper.entry
    weights = b"" if entry is None else entry.weight.detach().float().cpu().contiguous().numpy().tobytes()
    described = f"{config.anchor_start} {config.anchor_layers} {config.exact_prefix} {config.entry}".encode()
    return hashlib.sha256(described + weights).hexdigest()


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


def _place(
    needed: int, device: torch.device | str | None, disk: bool | None, folder: Path | None, model: nn.Module
) -> tuple[torch.device, Path | None]:
    """
    Where sums of so many bytes live: the device, and the folder whose disk holds them if main memory can't. By default
    the model's own accelerator, if they fit there with as much again to spare for activations.
    """
    own = embedding_weight(model).device
    if device is None:
        roomy = own.type == "cuda" and not disk and 2 * needed < torch.cuda.mem_get_info(own)[0]
        device = own if roomy else "cpu"
    device = torch.device(device)
    if disk is None:
        disk = device.type == "cpu" and needed > _MOST_OF_MEMORY * available_memory()
    return device, (folder or Path(tempfile.gettempdir())) if disk else None
