"""A report holds what was measured, exactly, and refuses what isn't laid out as documented."""

import json
import math
import random
import typing

import numpy as np
import pytest
import torch

from hf_kvtransfer.errors import MapperFileError
from hf_kvtransfer.evaluation import Interval
from hf_kvtransfer.report import REPORT_FILE, TransferReport, measure, schema, write_report
from hf_kvtransfer.report.report import TIMES

from .conftest import ROOT


CONDITIONS = {
    "source alone": 0.8,
    "target native": 1.0,
    "transferred": 0.95,
    "source cache raw": 0.02,
    "random mapper": 0.3,
    "different document": 0.05,
    "no context": 0.0,
    "anchor alone": 0.7,
}


def answered(shares, n=120, seed=0):
    """Right and wrong answers with these shares of right ones, to within one answer."""
    order = list(range(n))
    random.Random(seed).shuffle(order)
    return {name: [float(place < round(share * n)) for place in order] for name, share in shares.items()}


def texts(levels, n=40, seed=0):
    """NLL of chunks that are hard or easy for all conditions alike."""
    generator = np.random.default_rng(seed)
    hard, noise = generator.normal(0, 0.3, n), generator.normal(0, 0.004, (len(levels), n))
    return {name: list(level + hard + noise[row]) for row, (name, level) in enumerate(levels.items())}


LEVELS = {
    "source alone": 4.92,
    "target native": 4.389,
    "transferred": 4.395,
    "random mapper": 5.87,
    "different document": 4.42,
    "no context": 4.467,
    "anchor alone": 4.40,
}


def sample(**changes):
    """A report with every section, of made-up figures."""
    curve = {name: [level + 0.02 * math.exp(-place) for place in range(8)] for name, level in LEVELS.items()}
    sections = {
        "pair": {"source": "org/small", "target": "org/large", "source_revision": "0" * 40},
        "mapper": {
            "preset": "auto",
            "map_type": "linear",
            "k": 4,
            "anchor_layers": 1,
            "anchor_start": 0,
            "exact_prefix": 4,
            "exact_suffix": 0,
            "parameters": 377_600,
            "cost_share": 0.38,
            "cost_tokens": 128,
            "calibration": {"tokens": {"fit": 57_600}, "data": "calibration.jsonl"},
        },
        "settings": {"seed": 0, "data": "text_test.txt", "split": "test", "prefix": 128},
        "versions": {"hf_kvtransfer": "0.1.0", "transformers": "5.24.0"},
        "fidelity": {
            "r2": {
                "keys": [[1.0, 1.0], [0.93, 0.9], [0.88, 0.91], [0.8, 0.7]],
                "values": [[1.0, 1.0], [0.9, 0.8], [0.85, 0.8], [0.75, 0.6]],
            },
            "cosine": [[1.0] * 4, [0.99, 0.98, 0.97, 0.99], [0.96, 0.95, float("nan"), 0.97], [0.9, 0.92, 0.85, 0.95]],
            "kl": Interval(0.0023, 0.002, 0.0026),
            "agreement": Interval(0.963, 0.955, 0.97),
            "chunks": 40,
        },
        "measures": [
            measure("questions", "accuracy", "look-up", answered(CONDITIONS), chance=0.14, samples=400),
            measure(
                "stories",
                "nll",
                "text",
                texts(LEVELS),
                unit="nats per token",
                higher_is_better=False,
                samples=400,
            ),
            measure(
                "cloze",
                "accuracy",
                "task",
                answered({"source alone": 0.5, "target native": 0.7, "transferred": 0.65, "no context": 0.3}, seed=1),
                chance=0.25,
                samples=400,
            ),
        ],
        "drift": {
            "tokens_per_bin": 16,
            "nll": curve,
            "kl": [0.002 + 0.0005 * place for place in range(8)],
            "agreement": [0.97 - 0.004 * place for place in range(8)],
        },
        "lengths": [
            {
                "context": context,
                "conditions": {name: level - 0.01 * place for name, level in LEVELS.items()},
                "kl": 0.002 * (1 + place),
                "agreement": 0.97 - 0.01 * place,
            }
            for place, context in enumerate((64, 256, 1024))
        ],
        "layers_r2": {
            "keys": [[0.9 - 0.15 * abs(target - source) for source in range(6)] for target in range(4)],
            "values": [[0.8 - 0.2 * abs(target - source) for source in range(6)] for target in range(4)],
        },
        "latency": [
            {
                "context": context,
                "batch_size": 1,
                "trials": 5,
                "device": "cpu",
                "dtype": "float32",
                "threads": 1,
                "source_prefill": 4e-5 * context,
                "target_prefill": 9e-5 * context,
                "conversion": 3e-5 * context + 1e-3,
                "target_first_token": 9e-5 * context + 1e-3,
                "converted_first_token": 3e-5 * context + 3e-3,
                "spread": {"target_prefill": [8e-5 * context, 1.2e-4 * context]},
                "warm_speedup": 2.5,
                "cold_speedup": 1.2,
                "first_token_speedup": 2.2,
                "conversion_floor": 1e-5 * context,
                "target_prefill_floor": 5e-5 * context,
                "conversion_peak": 1000 * context,
                "target_prefill_peak": 3000 * context,
            }
            for context in (64, 256, 1024)
        ],
        "seconds": 12.5,
        "created": "2026-01-01T00:00:00Z",
    }
    return TransferReport(**{**sections, **changes})
