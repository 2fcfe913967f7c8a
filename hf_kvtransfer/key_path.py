"""What an attention module does to its keys between RoPE and the cache, read from its own source code.

The keys that reach `cache.update` are followed backwards through the assignments of `forward`. That tells which
function rotates them, whether this layer is one of those that skip RoPE, and whether anything happens to them
afterwards that taking RoPE off would not undo.
"""

import ast
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch import nn
from transformers import PreTrainedConfig

from .modules import cache_updates, forward_of


_ROTARY_NAME = re.compile(r"rotary|rope", re.IGNORECASE)
# Tensor methods that move or copy elements and leave their values alone.
_LAYOUT_METHODS = frozenset(
    {"view", "reshape", "transpose", "permute", "contiguous", "to", "type_as", "float", "clone", "expand", "flatten"}
    | {"unsqueeze", "squeeze", "unflatten"}
)
# Arguments of an attention `forward` that are present whenever the model runs with a cache.
_PRESENT = ("position_embeddings", "cache", "past_key_values", "past_key_value", "layer_past", "hidden_states")
_UNKNOWN = object()


@dataclass(frozen=True)
class KeyPath:
    """
    How one attention module makes the keys of the cache.

    Args:
        rotary (`bool`):
            Whether the keys of this layer are rotated. False on the NoPE layers of a model that otherwise has RoPE.
        rotate (`Callable`, *optional*):
            The function that rotates, from the globals of `forward`. `None` when `forward` never calls one.
        problem (`str`, *optional*):
            Why the keys can't be followed, as the end of a sentence that starts with the name of the attention class.
    """

    rotary: bool
    rotate: Callable[..., Any] | None = None
    problem: str | None = None


class _ProblemError(Exception):
    """Ends the reading of one `forward` with a reason."""


@dataclass(frozen=True)
class _Assignment:
    target: ast.expr
    value: ast.expr
    certain: bool


def key_path(attention: nn.Module, positioned: bool | None = True) -> KeyPath:
    """
    Reads from the source of an attention module how the keys in the cache came about.

    Args:
        attention (`torch.nn.Module`):
            A self-attention module, with or without weights. Conditions in its `forward` that depend only on the
            module are evaluated on it, which is how the layers without RoPE are told apart.
        positioned (`bool`, *optional*, defaults to `True`):
            Whether the decoder gives this layer `position_embeddings` (`False` when it gives `None` in their place);
            `None` when that is unknown. See [`positions_given`].

    Returns:
        [`KeyPath`]: with `problem` set when the code is not understood.
    """
    code = forward_of(attention)
    if code is None:
        return KeyPath(False, problem="has a forward without readable source")
    reader = _Reader(attention, *code)
    if positioned is None:
        reader.names.pop("position_embeddings")
    elif not positioned:
        reader.names["position_embeddings"] = None
    try:
        return reader.read()
    except _ProblemError as problem:
        return KeyPath(False, reader.rotate, str(problem))


def positions_given(decoder: nn.Module, section: PreTrainedConfig, layer: int) -> bool | None:
    """
    Whether a decoder gives one of its layers cos and sin, or `None` in their place to leave RoPE out.

    Args:
        decoder (`torch.nn.Module`):
            The text decoder.
        section (`PreTrainedConfig`):
            The text config.
        layer (`int`):
            Index of the decoder layer.

    Returns:
        `bool`, or `None` when the decoder decides it in a way that is not understood.
    """
    types = getattr(section, "layer_types", None) or []
    parameters = getattr(section, "rope_parameters", None) or {}
    if layer < len(types) and types[layer] in parameters and parameters[types[layer]] is None:
        return False
    code = forward_of(decoder)
    loops = [node for node in ast.walk(code[1]) if isinstance(node, ast.For)] if code else []
    for loop in loops:
        for call in ast.walk(loop):
            given = [k.value for k in call.keywords if k.arg == "position_embeddings"] if _is_call(call) else []
            if given:
                names = {"self": decoder, **{node.id: layer for node in _counters(loop)}}
                return _is_given(given[0], loop, names)
    return True


def _is_call(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call)


def _counters(loop: ast.For) -> list[ast.Name]:
    """The loop variable that counts the layers, in `for i, layer in enumerate(…)`."""
    counted = isinstance(loop.iter, ast.Call) and ast.unparse(loop.iter.func) == "enumerate"
    target = loop.target.elts[0] if counted and isinstance(loop.target, ast.Tuple) else None
    return [target] if isinstance(target, ast.Name) else []


def _is_given(value: ast.expr, loop: ast.For, names: dict[str, Any]) -> bool | None:
    if isinstance(value, ast.Name):
        assigned = [
            n.value for n in ast.walk(loop) if isinstance(n, ast.Assign) and _position(n.targets[0], value.id) == -1
        ]
        return True if not assigned else (_is_given(assigned[0], loop, names) if len(assigned) == 1 else None)
    if isinstance(value, ast.IfExp):
        outcome = _evaluate(value.test, names)
        return None if outcome is _UNKNOWN else _is_given(value.body if outcome else value.orelse, loop, names)
    return not (isinstance(value, ast.Constant) and value.value is None)


def _evaluate(expression: ast.expr, names: dict[str, Any]) -> Any:
    """The value of an expression that has no calls in it and depends only on the given names."""
    allowed = (
        ast.Compare, ast.cmpop, ast.BoolOp, ast.boolop, ast.UnaryOp, ast.unaryop, ast.Name, ast.Attribute,
        ast.Constant, ast.Subscript, ast.Load, ast.BinOp, ast.operator, ast.Tuple, ast.List,
    )  # fmt: skip
    for node in ast.walk(expression):
        if not isinstance(node, allowed) or (isinstance(node, ast.Name) and node.id not in names):
            return _UNKNOWN
    try:
        code = compile(ast.fix_missing_locations(ast.Expression(expression)), "<condition>", "eval")
        return eval(code, {"__builtins__": {}}, names)  # the model's own expression, without any call in it
    except Exception:  # the module lacks an attribute, or the values don't compare
        return _UNKNOWN


class _Reader:
    def __init__(self, attention: nn.Module, forward: Callable[..., Any], definition: ast.FunctionDef) -> None:
        self.attention = attention
        self.globals = forward.__globals__
        self.definition = definition
        self.assignments: list[_Assignment] = []
        self.names: dict[str, Any] = {"self": attention, **dict.fromkeys(_PRESENT, object())}
        self.update: ast.Call | None = None
        self.rotate: Callable[..., Any] | None = None
        self._known: dict[tuple[str, int], bool] = {}

    def read(self) -> KeyPath:
        called = [node for node in ast.walk(self.definition) if isinstance(node, ast.Call) and self._is_rotary(node)]
        if called:
            self.rotate = self._function(called[0])
        self._walk(self.definition.body, certain=True)
        if self.update is None:
            raise _ProblemError("does not write its keys into the cache in its own forward")
        end = len(self.assignments)
        if self._rotated(self.update.args[1], end):
            raise _ProblemError("rotates its values as well as its keys")
        rotated = self._rotated(self.update.args[0], end)
        return KeyPath(rotated, self.rotate)

    # The statements that run, in their order

    def _walk(self, statements: list[ast.stmt], certain: bool) -> None:
        for statement in statements:
            if self.update is not None:
                return
            self._visit(statement, certain)

    def _visit(self, statement: ast.stmt, certain: bool) -> None:
        if isinstance(statement, ast.If):
            outcome = _evaluate(statement.test, self.names)
            if outcome is _UNKNOWN:
                self._walk(statement.body, certain=False)
                self._walk(statement.orelse, certain=False)
            else:
                self._walk(statement.body if outcome else statement.orelse, certain)
        elif isinstance(statement, ast.With):
            self._walk(statement.body, certain)
        elif isinstance(statement, ast.For | ast.While | ast.Try):
            self._walk(statement.body, certain=False)
        elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr | ast.Return):
            if self.update is None:
                self.update = next(iter(cache_updates(statement)), None)
                if self.update is not None:
                    if not certain:
                        raise _ProblemError("writes its cache under a condition that can't be decided from the module")
                    return
            if not isinstance(statement, ast.Expr | ast.Return):
                self._assign(statement, certain)

    def _assign(self, statement: ast.Assign | ast.AnnAssign | ast.AugAssign, certain: bool) -> None:
        if statement.value is None:
            return
        targets: list[ast.expr]
        if isinstance(statement, ast.AugAssign):
            value: ast.expr = ast.BinOp(statement.target, statement.op, statement.value)
            targets = [statement.target]
        else:
            value = statement.value
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            self.assignments.append(_Assignment(target, value, certain))
            for node in ast.walk(target):
                if isinstance(node, ast.Name):
                    self.names.pop(node.id, None)
            if certain and isinstance(target, ast.Name) and (outcome := _evaluate(value, self.names)) is not _UNKNOWN:
                self.names[target.id] = outcome

    # Backwards from the cache

    def _rotated(self, expression: ast.expr, before: int) -> bool:
        """Whether the value of an expression, just before the given assignment, holds rotated keys."""
        if isinstance(expression, ast.Name):
            return self._name_rotated(expression.id, before)
        if isinstance(expression, ast.IfExp):
            outcome = _evaluate(expression.test, self.names)
            if outcome is _UNKNOWN:
                self._refuse_if_rotated([expression.body, expression.orelse], before, expression)
                return False
            return self._rotated(expression.body if outcome else expression.orelse, before)
        if isinstance(expression, ast.Call):
            return self._call_rotated(expression, before)
        inputs = [child for child in ast.iter_child_nodes(expression) if isinstance(child, ast.expr)]
        self._refuse_if_rotated(inputs, before, expression)
        return False

    def _name_rotated(self, name: str, before: int) -> bool:
        if (name, before) not in self._known:
            self._known[name, before] = self._trace(name, before)
        return self._known[name, before]

    def _trace(self, name: str, before: int) -> bool:
        for index in reversed(range(before)):
            assignment = self.assignments[index]
            position = _position(assignment.target, name)
            if position is None:
                continue
            if not assignment.certain and self._involves_rotary(assignment.value, index):
                raise _ProblemError(
                    f"assigns {name} under a condition that can't be decided from the module "
                    f"({ast.unparse(assignment.value)})"
                )
            if isinstance(assignment.value, ast.Tuple) and position >= 0:
                return self._rotated(assignment.value.elts[position], index)
            rotated = self._rotated(assignment.value, index)
            return rotated or (not assignment.certain and self._name_rotated(name, index))
        return False

    def _call_rotated(self, call: ast.Call, before: int) -> bool:
        inputs = [*call.args, *(keyword.value for keyword in call.keywords)]
        if self._is_rotary(call):
            self._refuse_if_rotated(inputs, before, call)
            self._check_rotary(call)
            self.rotate = self._function(call)
            return True
        function = call.func
        if isinstance(function, ast.Attribute) and function.attr in {"cat", "concat", "concatenate"} and call.args:
            parts = call.args[0].elts if isinstance(call.args[0], ast.List | ast.Tuple) else []
            rotated = [self._rotated(part, before) for part in parts]
            if any(rotated[1:]):
                raise _ProblemError("rotates other dimensions of its keys than the first ones")
            return any(rotated)
        if isinstance(function, ast.Attribute) and function.attr in _LAYOUT_METHODS:
            return self._rotated(function.value, before)
        module = self._submodule(function)
        if module is not None and any(self._rotated(value, before) for value in inputs):
            # A norm without weights divides a whole head by one number, which commutes with the rotation.
            if any(True for _ in module.parameters()) or "norm" not in type(module).__name__.lower():
                raise _ProblemError(
                    f"applies {ast.unparse(function).removeprefix('self.')} ({type(module).__name__}), which has "
                    "weights, to its keys after RoPE, so that RoPE can't be taken off exactly"
                )
            return True
        receiver = [function.value] if isinstance(function, ast.Attribute) else []
        self._refuse_if_rotated([*receiver, *inputs], before, call)
        return False

    def _refuse_if_rotated(self, expressions: list[ast.expr], before: int, whole: ast.expr) -> None:
        if any(self._rotated(expression, before) for expression in expressions):
            raise _ProblemError(f"changes its keys after RoPE by `{ast.unparse(whole)}`, which is not understood")

    def _involves_rotary(self, expression: ast.expr, before: int) -> bool:
        return any(isinstance(node, ast.Call) and self._is_rotary(node) for node in ast.walk(expression)) or any(
            self._name_rotated(node.id, before)
            for node in ast.walk(expression)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        )

    def _check_rotary(self, call: ast.Call) -> None:
        function = self._function(call)
        names = list(inspect.signature(function).parameters)
        if "cos" not in names or "sin" not in names:
            raise _ProblemError(
                f"rotates its keys with {ast.unparse(call.func)}({', '.join(names)}), which takes complex numbers or "
                "another form than cos and sin"
            )
        extra = set(names[len(call.args) :]) & {keyword.arg for keyword in call.keywords} - {"unsqueeze_dim"}
        known = {"cos", "sin", "unsqueeze_dim", "position_ids"}
        extra |= set(names[names.index("cos") : len(call.args)]) - known
        if extra - known:
            raise _ProblemError(
                f"rotates its keys with {ast.unparse(call.func)}, which also takes {', '.join(sorted(extra - known))}"
                + (" (MRoPE, with 3-D positions)" if "mrope_section" in extra else "")
            )

    def _is_rotary(self, call: ast.Call) -> bool:
        return isinstance(call.func, ast.Name) and bool(_ROTARY_NAME.search(call.func.id))

    def _function(self, call: ast.Call) -> Callable[..., Any]:
        function = self.globals.get(call.func.id) if isinstance(call.func, ast.Name) else None
        if not callable(function):
            raise _ProblemError(f"rotates its keys with {ast.unparse(call.func)}, which its own file does not define")
        return function

    def _submodule(self, function: ast.expr) -> nn.Module | None:
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "self":
            module = getattr(self.attention, function.attr, None)
            return module if isinstance(module, nn.Module) else None
        return None


def _position(target: ast.expr, name: str) -> int | None:
    """Where an assignment's target holds a name: its place in a tuple, −1 when it is the name, `None` when absent."""
    if isinstance(target, ast.Name):
        return -1 if target.id == name else None
    if isinstance(target, ast.Tuple | ast.List):
        for position, element in enumerate(target.elts):
            if isinstance(element, ast.Name) and element.id == name:
                return position
    return None
