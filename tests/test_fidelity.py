"""Laws of the measures of fidelity: a model and itself, a literal recomputation, and what a worse map must show."""

import math

import pytest
import torch
from transformers import DynamicCache

from hf_kvtransfer import KVMapper
from hf_kvtransfer._compat import cache_keyword
from hf_kvtransfer.errors import KVTransferError
from hf_kvtransfer.evaluation import conditions, divergence, measure_fidelity, prefill, prefix_nll, transfer
from hf_kvtransfer.geometry import ModelGeometry
from hf_kvtransfer.modules import decoder_of
from hf_kvtransfer.rope import RotaryCodec

from .architectures import build


PREFIX, SCORED, CHUNKS = 40, 12, 3
SIZES = {"prefix": PREFIX, "scored": SCORED, "max_chunks": CHUNKS, "progress": False}


@pytest.fixture(scope="module")
def text(family):
    return (family / "data" / "text_test.txt").read_text(encoding="utf-8")[:3000]


@pytest.fixture(scope="module")
def identity(family_model):
    model = family_model("small")
    return KVMapper.for_pair(model, model).set_as_identity()


@torch.no_grad()
def disturbed(mapper, size):
    """The same maps with some noise on them."""
    twin = KVMapper(mapper.config).eval()
    twin.load_state_dict(mapper.state_dict())
    generator = torch.Generator().manual_seed(0)
    for parameter in twin.parameters():
        parameter += size * torch.randn(parameter.shape, generator=generator)
    return twin


def by(mapper, source, **options):
    return lambda ids: mapper.convert(prefill(source, ids), **options)


@pytest.mark.parametrize("hold_back", [1, 0, 3])
def test_a_model_and_itself_are_alike_in_everything(identity, family_model, family_tokenizer, text, hold_back):
    model = family_model("small")
    found = measure_fidelity(by(identity, model, hold_back=hold_back), model, text, family_tokenizer, **SIZES)
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    assert found.r2_keys + found.r2_values == pytest.approx([1.0] * 2 * layers)
    assert [len(row) for row in found.cosine] == [heads] * layers
    assert torch.tensor(found.cosine).min() > 1 - 1e-5
    assert found.chunk_cosine == pytest.approx([1.0] * CHUNKS, abs=1e-5)
    assert found.kl == pytest.approx([0.0] * CHUNKS, abs=1e-5)
    assert found.agreement == [1.0] * CHUNKS
    assert found.means()["r2_keys"] == pytest.approx(1.0)


def test_worse_maps_are_worse_in_everything(identity, family_model, family_tokenizer, text):
    model = family_model("small")
    figures = [
        measure_fidelity(by(disturbed(identity, size), model), model, text, family_tokenizer, **SIZES).means()
        for size in (0.0, 0.03, 0.3)
    ]
    for name in ("r2_keys", "r2_values", "chunk_cosine", "agreement"):
        assert figures[0][name] > figures[1][name] > figures[2][name], name
    assert figures[0]["kl"] < figures[1]["kl"] < figures[2]["kl"]


@torch.no_grad()
def test_the_figures_are_those_of_a_literal_computation(identity, family_model, family_tokenizer, text):
    """All chunks at once, attention written out, nothing streamed."""
    model, mapper = family_model("small"), disturbed(identity, 0.05)
    found = measure_fidelity(by(mapper, model), model, text, family_tokenizer, queries=PREFIX, **SIZES)
    length = PREFIX + SCORED
    ids = family_tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    chunks = ids[:, : CHUNKS * length].view(CHUNKS, length)
    native, made = prefill(model, chunks[:, :PREFIX]), mapper.convert(prefill(model, chunks[:, :PREFIX]))
    codec = RotaryCodec.from_model(model)
    tables = codec.tables(torch.arange(PREFIX - 1)[None])
    for index in range(model.config.num_hidden_layers):
        own = [getattr(native.layers[index], kind)[:, :, :-1] for kind in ("keys", "values")]
        other = [getattr(made.layers[index], kind) for kind in ("keys", "values")]
        for part, figures in ((0, found.r2_keys), (1, found.r2_values)):
            pair = [own[part], other[part]]
            if part == 0:
                pair = [codec.remove(keys, tables, index) for keys in pair]
            spread = (pair[0] - pair[0].mean(dim=(0, 2), keepdim=True)).square().sum()
            assert figures[index] == pytest.approx(float(1 - (pair[1] - pair[0]).square().sum() / spread), abs=1e-5)
    # Layer 0: its queries are known from the embeddings alone.
    layer, config = decoder_of(model).layers[0], model.config
    states = layer.input_layernorm(decoder_of(model).embed_tokens(chunks[:, :PREFIX]))
    queries = layer.self_attn.q_proj(states).view(CHUNKS, PREFIX, -1, config.head_dim)
    if hasattr(layer.self_attn, "q_norm"):
        queries = layer.self_attn.q_norm(queries)
    queries = codec.apply(queries.transpose(1, 2), codec.tables(torch.arange(PREFIX)[None]), 0)
    outputs = []
    for cache in (native, made):
        repeats = config.num_attention_heads // config.num_key_value_heads
        keys, values = (
            getattr(cache.layers[0], kind)[:, :, : PREFIX - 1].repeat_interleave(repeats, dim=1)
            for kind in ("keys", "values")
        )
        rows = []
        for position in range(12, PREFIX):
            scores = queries[:, :, position : position + 1] @ keys[:, :, :position].mT * config.head_dim**-0.5
            rows.append(scores.softmax(-1) @ values[:, :, :position])
        outputs.append(torch.cat(rows, dim=2))
    cosine = torch.nn.functional.cosine_similarity(*outputs, dim=-1).mean(dim=(0, 2))
    assert found.cosine[0] == pytest.approx(cosine.tolist(), abs=1e-4)


@torch.no_grad()
def test_the_divergence_is_that_of_the_native_distribution():
    native, other = torch.randn(2, 70, 11), torch.randn(2, 70, 11)
    kl, agreement = divergence(native, other)
    p, q = native.softmax(-1), other.softmax(-1)
    torch.testing.assert_close(kl, (p * (p / q).log()).sum(-1))
    assert torch.equal(agreement, (p.argmax(-1) == q.argmax(-1)).float())
    assert float(divergence(native, native + 3)[0].abs().max()) < 1e-5
    assert bool(divergence(native, other[..., :-1])[0].isnan().all())


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "mistral-sliding"])
def test_sliding_windows_are_compared_where_they_hold_what_is_read(name, family_tokenizer, text):
    """A converted sliding layer keeps the window alone; only the last query reads nothing else."""

    class Ids:
        """A tokenizer whose ids the tiny models know."""

        bos_token_id = None

        def __call__(self, text, **options):
            return {"input_ids": [token % 100 + 3 for token in family_tokenizer(text, **options)["input_ids"]]}

    model = build(name)
    mapper = KVMapper.for_pair(model, model).set_as_identity()
    found = measure_fidelity(by(mapper, model), model, text, Ids(), **SIZES)
    assert torch.tensor(found.cosine).min() > 1 - 1e-4
    assert found.r2_keys + found.r2_values == pytest.approx([1.0] * 6)
    assert found.means()["agreement"] == 1.0
    # Without a token held back, the last query reads one token more than the window keeps.
    whole = measure_fidelity(by(mapper, model, hold_back=0), model, text, Ids(), **SIZES)
    slides = [layer.sliding_window is not None for layer in ModelGeometry.from_model(model).layers]
    assert [all(map(math.isnan, row)) for row in whole.cosine] == slides


def test_prefixes_are_compared_with_the_reference(identity, family_model, family_tokenizer, text):
    model = family_model("small")
    mapper = disturbed(identity, 0.05)
    ways = conditions(model, model, mapper)
    compared = prefix_nll(ways, text, family_tokenizer, reference="target native", **SIZES)
    plain = prefix_nll(ways, text, family_tokenizer, **SIZES)
    assert list(compared) == list(plain)
    for name, result in compared.items():
        assert result.nll == plain[name].nll
        assert plain[name].kl == plain[name].agreement == []
        assert len(result.kl) == len(result.agreement) == CHUNKS
    assert compared["target native"].kl == pytest.approx([0.0] * CHUNKS, abs=1e-6)
    assert compared["target native"].agreement == [1.0] * CHUNKS
    found = measure_fidelity(by(mapper, model), model, text, family_tokenizer, **SIZES)
    assert compared["transferred"].kl == pytest.approx(found.kl, rel=1e-4)
    assert compared["transferred"].agreement == found.agreement
    with pytest.raises(KVTransferError, match="'native' is none of the conditions"):
        prefix_nll(ways, text, family_tokenizer, reference="native", **SIZES)


def test_conversions_can_be_told_what_was_read(identity, family_model, family_tokenizer, text):
    """Native layers and the like need the token ids: of the document that the source has read."""
    model, read = family_model("small"), []

    def convert(mapper, cache, ids):
        assert cache.get_seq_length() == ids.shape[1]
        read.append((mapper, ids))
        return mapper.convert(cache)

    ways = {way.name: way for way in conditions(model, model, identity, convert=convert)}
    ways["alone"] = transfer("alone", model, model, identity, lambda mapper, cache, ids: DynamicCache())
    context, other = torch.arange(5, 25)[None], torch.arange(5, 15)[None]
    for name in ("transferred", "random mapper", "different document"):
        cache, _ = ways[name].read(context, other)
        assert cache.get_seq_length() == (9 if name == "different document" else 19)
    assert [mapper is identity for mapper, _ in read] == [True, False, True]
    assert all(torch.equal(ids, asked) for (_, ids), asked in zip(read, (context, context, other), strict=True))
    assert ways["alone"].read(context, other)[0].get_seq_length() == 0
    logits = [model(context[:, -1:], **{cache_keyword(model): ways["transferred"].read(context, other)[0]}).logits]
    logits.append(model(context).logits[:, -1:])
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
