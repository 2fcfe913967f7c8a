"""Writes `docs/support.md` from the registry of architectures in `tests/architectures.py`, or checks that it is so."""

import argparse
import difflib
import os
import sys
from pathlib import Path


os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "support.md"
sys.path.insert(0, str(ROOT))

HEADER = """# Supported architectures

Support is read from a model's own modules; there is no list in the package. These are the architectures that the tests
build and put through every law, on the oldest and the newest supported release of transformers, with what the package
reads in them; and those that it refuses, with the reason it gives. A model that is in neither table is checked the same
way: `hf-kvtransfer check SOURCE TARGET` reads its configuration and tells.

(Written by `python scripts/support_table.py --write`; the models are tiny and have random weights.)
"""


def supported() -> list[str]:
    """One row for each supported architecture."""
    from hf_kvtransfer import ModelGeometry
    from tests.architectures import ARCHITECTURES, missing

    rows = ["| architecture | model type | RoPE | layers |", "|---|---|---|---|"]
    for name, factory in ARCHITECTURES.items():
        if name in missing():
            continue
        geometry = ModelGeometry.from_config(factory())
        types = sorted({layer.layer_type.replace("_attention", "") for layer in geometry.layers})
        without = sum(not layer.rotary for layer in geometry.layers)
        nope = f", {without} of {geometry.num_layers} without RoPE" if without else ""
        inside = " (text part)" if geometry.text_config_name else ""
        rows.append(f"| {name} | `{geometry.model_type}`{inside} | {rope(geometry)} | {' + '.join(types)}{nope} |")
    return rows


def rope(geometry) -> str:
    """The kinds of rotary scaling, and what share of a head is rotated."""
    parameters = geometry.rope_parameters
    nested = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    kinds = sorted({str(value.get("rope_type", "default")) for value in nested})
    shares = sorted({value.get("partial_rotary_factor", 1.0) for value in nested})
    partial = f", {'/'.join(f'{share:g}' for share in shares)} of each head" if shares != [1.0] else ""
    bases = f", {len(nested)} bases" if len(nested) > 1 else ""
    return " + ".join(kinds) + bases + partial


def refused() -> list[str]:
    """One row for each refused architecture."""
    from hf_kvtransfer.compatibility import refusals
    from tests.architectures import REFUSED, missing

    rows = ["| architecture | refused because |", "|---|---|"]
    for name, (factory, _) in REFUSED.items():
        if name not in missing():
            reasons = " ".join(refusals(factory())).replace("|", "\\|").replace("\n", " ")
            rows.append(f"| {name} | {reasons} |")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true", help="write the page")
    mode.add_argument("--check", action="store_true", help="fail if the page is not what would be written")
    arguments = parser.parse_args()
    page = "\n".join([HEADER, "## Supported", "", *supported(), "", "## Refused", "", *refused()]) + "\n"
    if arguments.write:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    written = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    if written == page:
        return 0
    print("docs/support.md is not up to date: run `python scripts/support_table.py --write`.")
    print("\n".join(difflib.unified_diff(written.splitlines(), page.splitlines(), lineterm="", n=0)))
    return 1


if __name__ == "__main__":
    sys.exit(main())
