"""What maps read: heads, kinds, previous tokens, anchors, and that solving and converting agree on the order."""

import itertools

import pytest
import torch

from hf_kvtransfer.calibration.layout import FeatureLayout
from hf_kvtransfer.features import KINDS, Support, as_json, as_supports, gather, head_map, stream_width
from hf_kvtransfer.geometry import ModelGeometry

from .architectures import ARCHITECTURES


@pytest.mark.parametrize(("source", "target"), list(itertools.product((1, 2, 3, 4, 8), repeat=2)))
def test_head_map_gives_every_head_its_neighbours_in_order(source, target):
    heads = head_map(source, target)
    assert len(heads) == target
    assert len({number for _, number in heads}) == 1
    assert [first for first, _ in heads] == sorted(first for first, _ in heads)
    assert {head for first, number in heads for head in range(first, first + number)} == set(range(source))
    if source == target:
        assert heads == [(head, 1) for head in range(source)]


SUPPORTS = [
    Support((0, 2)),
    Support((1,), heads="local"),
    Support((0, 1, 2), joint=True),
    Support((0, 2), joint=True, window=2),
    Support((0, 1), heads="local", joint=True, window=1, anchor=True),
    Support((), anchor=True),
]


@pytest.mark.parametrize("support", SUPPORTS, ids=str)
def test_short_forms_come_back(support):
    entry = {"keys": support, "values": Support((1,))}
    assert as_supports(as_json(entry)) == entry
    assert as_json(as_supports([2, 0])) == [0, 2]


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers": [0], "heads": "some"},
        {"layers": [-1]},
        {"layers": [True]},
        {"layers": [0], "window": -1},
        {"layers": [0], "window": 1.5},
        {"layers": [0], "joint": 1},
        {"layers": [0], "unknown": 1},
        {"heads": "full"},
    ],
    ids=str,
)
def test_what_is_no_support_is_refused(wrong):
    with pytest.raises(ValueError, match="no support can be read"):
        Support.from_dict(wrong)


def geometries():
    one, other = ("llama", "qwen3")
    return ModelGeometry.from_config(ARCHITECTURES[one]()), ModelGeometry.from_config(ARCHITECTURES[other]())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("support", SUPPORTS, ids=str)
def test_solving_and_converting_put_the_same_numbers_together(support, kind):
    source, target = geometries()
    layout = FeatureLayout(joint=True, window=2, anchors=(0, 2))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, layout.source_width(source, target), generator=generator)
    total = source.offsets[-1]

    def read(lag, kind_read, layer):
        start = (2 * lag + KINDS.index(kind_read)) * total
        return rows[:, start + source.offsets[layer] : start + source.offsets[layer + 1]]

    anchor = rows[:, -stream_width(target) :]
    for layer, geometry in enumerate(target.layers):
        columns = layout.features(support, kind, source, target, layer, anchor_depth=2)
        pieces = gather(support, kind, source, geometry, read, anchor)
        assert len(columns) == len(pieces) == support.groups(geometry)
        for parts, group in zip(columns, pieces, strict=True):
            solved = torch.cat([rows[:, part] for part in parts], 1)
            assert torch.equal(solved, torch.cat(group, 1))
            assert solved.shape[1] == support.width(source, geometry, stream_width(target))
