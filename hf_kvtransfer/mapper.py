"""`KVMapper`: converts the KV cache of one model into that of another."""

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from .config import KVMapperConfig
from .conversion import convert_cache
from .delegation import Delegated
from .errors import PairMismatchError
from .features import stream_width
from .geometry import ModelGeometry, tokenizer_fingerprint
from .layer_map import LayerMap
from .maps import LinearMap, MapForm
from .packing import Packing
from .pairing import check_model, check_tokenizer, pair_manifest
from .rope import RotaryCodec
from .saving import load_checked, save_atomically
from .sides import Sides


# Of `save_pretrained`, what concerns the repository on the Hub and not the files.
_REPOSITORY_ARGUMENTS = ("repo_id", "commit_message", "commit_description", "private", "revision", "create_pr", "tags")


class KVMapper(PreTrainedModel):
    """
    Converts the KV cache of a source model into a cache of a target model that reads the same tokens.

    Keys are mapped with RoPE removed, values directly (arXiv 2608.03893, §3): `K̂ = rope_T(unrope_S(K) W_K + b_K)`,
    `V̂ = V W_V + b_V`, per target layer, from the KV heads of the source layers in its support. A mapper belongs to
    one ordered pair of checkpoints.

    Args:
        config ([`KVMapperConfig`]): the manifest of the pair.

    Example:

    ```python
    >>> mapper = KVMapper.from_pretrained("org/qwen3-14b-to-32b")
    >>> source_cache = source(**inputs).past_key_values
    >>> output = target.generate(**inputs, past_key_values=mapper.convert(source_cache))
    ```
    """

    config_class = KVMapperConfig
    config: KVMapperConfig
    base_model_prefix = ""
    main_input_name = "source_cache"
    _no_split_modules = ("LayerMap",)

    def __init__(self, config: KVMapperConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList()
        self.entry: LinearMap | None = None
        if config.support:
            self._build_layers()
        self._sides = Sides(config)
        self.post_init()

    def _build_layers(self) -> None:
        self.config.check_maps()
        # Layers that the target runs itself have no maps, and an entry without parameters here.
        self.layers = nn.ModuleList(LayerMap(self.config, index) for index in range(len(self.config.support)))
        entry, target = self.config.entry_support(), self.config.geometry("target")
        if entry is None:
            self.entry = None
        else:
            width = entry.width(self.config.geometry("source"), target.layers[0], 0)
            self.entry = LinearMap(width, 1, stream_width(target))

    def _init_weights(self, module: nn.Module) -> None:
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()

    # ------------------------------------------------------------------------------------------------ construction

    fit = Delegated("hf_kvtransfer.fitting", "fit_mapper")
    """Fits a mapper for a pair of loaded models in closed form: [`fit_mapper`], with all of its arguments."""

    @classmethod
    def from_statistics(cls, statistics: Any, **kwargs: Any) -> "KVMapper":
        """
        Solves a mapper from saved calibration statistics, without touching a model. See [`mapper_from_statistics`].

        Args:
            statistics ([`CalibrationStatistics`] or `str`): the statistics, or the folder they were saved to.
            **kwargs: `preset`, `k`, `ridge_lambda`, as in [`mapper_from_statistics`].
        """
        from .fitting import mapper_from_statistics

        return mapper_from_statistics(statistics, **kwargs)

    @classmethod
    def for_pair(
        cls,
        source: nn.Module,
        target: nn.Module,
        *,
        tokenizer: Any = None,
        support: Sequence[Any] | None = None,
        **settings: Any,
    ) -> "KVMapper":
        """
        A mapper with the manifest of a pair and without a fit, to be filled by [`~KVMapper.set_as_identity`] or by you.

        Args:
            source (`PreTrainedModel`): the model whose caches will be converted.
            target (`PreTrainedModel`): the model that will use them.
            tokenizer (`PreTrainedTokenizerBase`, *optional*): the tokenizer that both models share.
            support (`list`, *optional*):
                For every target layer what it reads, as in [`KVMapperConfig`]: source layers, or supports by kind.
                Without it the mapper has no maps yet.
            **settings: further fields of [`KVMapperConfig`], such as `map_type` and `anchor_layers`.

        Returns:
            [`KVMapper`]: with maps of zeros, in evaluation mode.
        """
        config = KVMapperConfig(
            source_geometry=ModelGeometry.from_model(source).to_dict(),
            target_geometry=ModelGeometry.from_model(target).to_dict(),
            support=list(support) if support is not None else None,
            tokenizer_fingerprint=tokenizer_fingerprint(tokenizer) if tokenizer is not None else None,
            **settings,
            **pair_manifest(source, target),
        )
        return cls(config).eval()

    @torch.no_grad()
    def set_as_identity(self) -> "KVMapper":
        """
        Makes every target layer a copy of the source layer of the same index, which is exact for a model and itself.

        Returns:
            [`KVMapper`]: itself.

        Raises:
            [`PairMismatchError`]: if the two geometries differ.
        """
        source, target = self.config.geometry("source"), self.config.geometry("target")
        shapes = [(layer.kv_heads, layer.head_dim) for layer in source.layers]
        if shapes != [(layer.kv_heads, layer.head_dim) for layer in target.layers]:
            raise PairMismatchError(
                "`set_as_identity` needs the same layers, KV heads and head_dim on both sides; this pair differs: "
                f"{'; '.join(source.differences(target))}. Fit a mapper instead."
            )
        self.config.support = [[index] for index in range(len(shapes))]
        self.config.map_type, self.config.map_options, self.config.preset = "linear", {}, "identity"
        self.config.anchor_layers, self.config.exact_prefix, self.config.exact_suffix = None, 0, 0
        self.config.anchor_start, self.config.entry, self.config.first_token = 0, None, {}
        like = next(self.parameters(), torch.empty(0))
        self._build_layers()
        for layer in self.layers:
            maps: Any = layer
            for part in (maps.keys, maps.values):
                nn.init.eye_(part.weight)
                nn.init.zeros_(part.bias)
        self.to(device=like.device, dtype=like.dtype)
        return self.eval()

    # -------------------------------------------------------------------------------------------------- conversion

    def convert(
        self,
        source_cache: Any,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        target_position_ids: Tensor | None = None,
        hold_back: int = 1,
        into: DynamicCache | None = None,
        source: nn.Module | None = None,
        target: nn.Module | None = None,
        tokenizer: Any = None,
        validate: bool = True,
        input_ids: Tensor | None = None,
        exact_prefix: int | None = None,
        exact_suffix: int | None = None,
        chunk_tokens: int | None = None,
    ) -> Any:
        """
        Converts a source cache into a cache of the target model.

        Args:
            source_cache (`Cache` or `ModelOutput`):
                The source model's cache of any class, or the output that carries it: `[batch, kv_heads, tokens,
                head_dim]` per layer.
            attention_mask (`torch.Tensor` of shape `[batch, ≥ tokens]`, *optional*):
                1 for real tokens, 0 for left padding. Needed when there is padding.
            position_ids (`torch.Tensor` of shape `[batch or 1, ≥ tokens]`, *optional*):
                The positions that the source model used, where they differ from counting (or from the mask). Required
                for models that give images 3-D positions.
            target_position_ids (`torch.Tensor` of shape `[batch or 1, ≥ tokens]`, *optional*):
                The positions that the target will expect; by default those of the mask, as `generate` counts them.
            hold_back (`int`, *optional*, defaults to 1):
                How many of the last tokens are left out. The target must read at least one token of the prompt itself
                to produce its first logits, so 0 is for callers who feed further tokens.
            into (`DynamicCache`, *optional*):
                A cache of the target, native or converted, that already holds the first tokens. Only what is missing
                is converted and appended to it, in place.
            source (`PreTrainedModel`, *optional*): if given, checked against the mapper's manifest.
            target (`PreTrainedModel`, *optional*): if given, checked against the mapper's manifest.
            tokenizer (`PreTrainedTokenizerBase`, *optional*): if given, checked against the mapper's manifest.
            validate (`bool`, *optional*, defaults to `True`):
                Whether to look for NaN and infinities in what is read and made of the source cache, which costs one
                pass over the result and, on an accelerator, the only time that the host waits for it.
            input_ids (`torch.Tensor` of shape `[batch, ≥ tokens]`, *optional*):
                The token ids of the context. Together with `target` needed where the target reads a part of it itself:
                by a mapper with `anchor_layers`, and for the two arguments below.
            exact_prefix (`int`, *optional*):
                How many of the first tokens of each row the target reads itself; they are exact, by causality. By
                default as the mapper was made for, mostly 0.
            exact_suffix (`int`, *optional*):
                How many of the last tokens the target reads itself, on top of the converted ones. Likewise. They stay
                so in a cache that is later given as `into`.
            chunk_tokens (`int`, *optional*):
                How many tokens are mapped at once, which bounds the memory that is needed beside the two caches. By
                default so many that it stays small ([`~hf_kvtransfer.contents.chunk_length`]); all at once while
                gradients are recorded.

        Returns:
            [`TransferredCache`]: holding `tokens − hold_back` tokens; or `into` itself.

        Raises:
            [`SourceCacheError`]: if the cache can't be read, is of another geometry or is not finite.
            [`ConversionError`]: if mask, positions, `hold_back` or `into` don't fit the cache.
            [`PairMismatchError`]: if a given model or tokenizer is another one than the mapper was fitted for.
        """
        self.check_pair(source=source, target=target, tokenizer=tokenizer)
        return convert_cache(
            self,
            source_cache,
            attention_mask=attention_mask,
            position_ids=position_ids,
            target_position_ids=target_position_ids,
            hold_back=hold_back,
            into=into,
            target=target,
            validate=validate,
            input_ids=input_ids,
            exact_prefix=exact_prefix,
            exact_suffix=exact_suffix,
            chunk_tokens=chunk_tokens,
        )

    def forward(self, source_cache: Any, **kwargs: Any) -> Any:
        """The same as [`~KVMapper.convert`]."""
        return self.convert(source_cache, **kwargs)

    # ------------------------------------------------------------------------------------------------ the manifest

    def check_pair(
        self, *, source: nn.Module | None = None, target: nn.Module | None = None, tokenizer: Any = None
    ) -> None:
        """
        Checks models and tokenizer against the manifest: geometry, rotary parameters, a sample of the weights, the
        tokenizer's vocabulary and merges.

        Raises:
            [`PairMismatchError`]: naming every difference.
        """
        if source is not None:
            check_model(self.config, "source", source)
        if target is not None:
            check_model(self.config, "target", target)
        if tokenizer is not None:
            check_tokenizer(self.config, tokenizer)

    def geometry(self, side: str) -> ModelGeometry:
        """The geometry of one side, `"source"` or `"target"`."""
        return self._sides.geometry(side)

    def packing(self) -> Packing:
        """What the maps read of a source cache, and where it lies side by side."""
        return self._sides.packing()

    def codec(self, side: str) -> RotaryCodec:
        """
        The rotary code of one side, `"source"` or `"target"`, built once from its configuration.

        Raises:
            [`PairMismatchError`]: if the stored configuration and the stored geometry contradict each other.
        """
        return self._sides.codec(side)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """
        Compiles every map with `torch.compile`, for any number of tokens. What surrounds the maps stays as it is.

        Args:
            *args: as in `torch.compile`.
            **kwargs: likewise; `dynamic=True` unless told otherwise.
        """
        for module in self.modules():
            if isinstance(module, MapForm):
                module.compile(*args, **{"dynamic": True, **kwargs})

    # ------------------------------------------------------------------------------------------------------- files

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """
        Saves configuration and weights (safetensors, sharded by `max_shard_size`). Everything is written beside the
        folder first and moved in when complete, so that a failed write leaves an earlier mapper as it was. Digests of
        the files are recorded in the configuration.

        Args:
            save_directory (`str` or `os.PathLike`): the folder; made if missing.
            **kwargs: as in `PreTrainedModel.save_pretrained`.
        """
        push_to_hub = kwargs.pop("push_to_hub", False)
        repository = {name: kwargs.pop(name) for name in _REPOSITORY_ARGUMENTS if name in kwargs}
        save_atomically(super().save_pretrained, save_directory, **kwargs)
        if push_to_hub:
            from .publishing import push_folder

            repository.setdefault("repo_id", os.path.basename(os.path.normpath(save_directory)))
            push_folder(save_directory, token=kwargs.get("token"), **repository)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: bool | str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str | None = "50GB",
        tags: list[str] | None = None,
        report_dir: str | os.PathLike[str] | None = None,
    ) -> Any:
        """
        Publishes weights, configuration, a card, and the report with its figures in one commit, and nothing else.
        Arguments are those of `PreTrainedModel.push_to_hub`; see [`push_mapper`] for each, and for `report_dir`.

        Returns:
            `huggingface_hub.CommitInfo`.

        Raises:
            [`EvidenceError`]: if the report is of another mapper.
            [`HubError`]: if nothing could be published.
            [`MapperFileError`]: if the mapper has no maps, or there is no report in `report_dir`.
        """
        from .publishing import push_mapper

        return push_mapper(
            self,
            repo_id,
            report_dir=report_dir,
            max_shard_size=max_shard_size,
            commit_message=commit_message,
            commit_description=commit_description,
            private=private,
            token=token,
            revision=revision,
            create_pr=create_pr,
            tags=tags,
        )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """
        Loads a mapper from a folder or the Hub. All arguments of `PreTrainedModel.from_pretrained` apply: `revision`,
        `dtype`, `device_map`, `local_files_only`, `token`, …. `verify=False` skips the comparison of the files with the
        digests that were recorded when they were saved. `min_gap_recovered=0.8` refuses a mapper whose evaluation
        doesn't show that it recovers as much of the gap between the source alone and the native target, on each of its
        measures; without it, a mapper without evidence is loaded with a warning, and with `False` without.

        Raises:
            [`MapperFileError`]: if weights are missing, damaged, or don't belong to the configuration.
            [`PairMismatchError`]: if the configuration contradicts itself.
            [`EvidenceError`]: if the mapper hasn't shown what `min_gap_recovered` asks for.
        """
        return load_checked(super().from_pretrained, pretrained_model_name_or_path, *args, **kwargs)
