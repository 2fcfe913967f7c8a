"""Every sentence with which the package refuses something, read from its source."""

import ast
import functools
from pathlib import Path


PACKAGE = Path(__file__).resolve().parent.parent / "hf_kvtransfer"


def error_types():
    tree = ast.parse((PACKAGE / "errors.py").read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef)]


def sentence(node):
    """The constant text of a message; what is filled in is shown as `…`."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return None


@functools.cache
def raised():
    """`(type, sentence, place)` of every error of the package's own types that it makes, where its text can be read."""
    types, found = set(error_types()), []
    for path in sorted(PACKAGE.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in types:
                text = sentence(call.args[0])
                if text is not None:  # a list of reasons is made in `compatibility.py`
                    found.append((call.func.id, text, f"{path.relative_to(PACKAGE)}:{call.lineno}"))
    return found
