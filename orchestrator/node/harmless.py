"""What comes back by itself, and neither steps nor waits for other ranks? Tables of names, and nothing else.

`Care.SURE`: what it could raise it would have raised the first time. `Care.UNLESS_IT_FAILS`: it may raise in a later round,
and where nobody catches that, the rank dies by it.
"""

from __future__ import annotations

import ast
import enum
import re


class Care(enum.Enum):
    """How sure it shall be that a statement does not leave the loop around it."""

    SURE = "nothing that could raise, but what would have done so the first time"
    UNLESS_IT_FAILS = "an error may leave it"


def of(module: str, names: str) -> frozenset[str]:
    """Return the full names of what a module has."""
    return frozenset(f"{module}.{name}" for name in names.split())


CLOCKS = of("time", "time time_ns monotonic monotonic_ns perf_counter perf_counter_ns")

CONSUMERS = of("builtins", "all any enumerate frozenset list max min set sorted sum tuple")
"""What goes over all of its argument, if that is one."""

_STATEMENTS = (
    ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Pass, ast.If, ast.Continue, ast.Expr, ast.Name, ast.Constant,
    ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.IfExp, ast.expr_context, ast.boolop, ast.unaryop, ast.cmpop,
    ast.operator, ast.While, ast.Tuple, ast.List, ast.Attribute, ast.JoinedStr, ast.FormattedValue,
    ast.Global, ast.Nonlocal,
)  # fmt: skip
_MAY_FAIL = (ast.Subscript, ast.Slice, ast.Dict, ast.Set, ast.Starred, ast.Assert, ast.Delete, ast.NamedExpr)
_OPERATORS = (ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.LShift, ast.RShift, ast.MatMult)
"""Operators that may raise."""

_CALLS = (
    of(
        "builtins",
        "abs all any bool divmod enumerate float hash id int isinstance len list max min range round set sorted str "
        "sum tuple type zip",
    )
    | of(
        "torch",
        "add arange bmm cos empty exp eye full log matmul mean mm mul ones rand randint randn relu sigmoid sin "
        "softmax sqrt sum tanh tensor zeros",
    )
    | CLOCKS
    | of("time", "sleep process_time thread_time gmtime localtime ctime")
    | of("os", "cpu_count getloadavg getpid getppid sched_yield times urandom")
    | of("datetime.datetime", "now utcnow today")
)
_MODULES = ("math.", "random.")

_CALLS_THAT_MAY_FAIL = of(
    "builtins",
    "bin bytearray bytes chr complex dict format frozenset hex object oct ord pow print repr reversed slice",
)
_MODULES_THAT_MAY_FAIL = re.compile(
    r"""(?x) logging\.(debug | info | warning | error | log) | (cmath | hashlib | itertools | operator | statistics | string | struct | zlib | binascii | base64)\.\w+
    | collections\.(Counter | OrderedDict | defaultdict | deque)
    | torch\.(?!load|save|compile|distributed|hub|jit|multiprocessing|package|utils)\w+
    | torch\.(nn\.functional | linalg | fft | special)\.\w+
    | numpy\.(?!load|save|fromfile|memmap|vectorize|apply_|frompyfunc|genfromtxt)\w+
    | numpy\.(linalg | fft | random)\.\w+"""
)
_METHODS = re.compile(
    r"""(?x) [a-z]+_  # a tensor's own, in place: `mul_`
    | debug | info | warning  # a logger's
    | append | extend | insert | clear | copy | keys | values | items | index | count | sort | reverse
    | encode | decode | digest | hexdigest | join | split | strip | lower | upper | replace | startswith | endswith
    | abs | add | argmax | bmm | chunk | clamp | clone | contiguous | cos | cpu | detach | dim | div | dot | double | exp
    | expand | fill | flatten | float | half | item | log | long | matmul | max | mean | min | mm | mul | norm | numel
    | numpy | permute | pow | relu | reshape | sigmoid | sin | size | softmax | sqrt | squeeze | std | sub | sum | t | tanh
    | tolist | transpose | unsqueeze | var | view"""
)
"""How methods are called that texts, lists and tensors have. A method `update` or `forward` might do anything."""

_CONTEXTS = of("torch", "enable_grad inference_mode no_grad")


def is_plain(node: ast.AST, care: Care) -> bool:
    """Tell whether a part of a program, what is in it aside, leaves no loop."""
    return isinstance(node, _STATEMENTS) or (care is not Care.SURE and isinstance(node, _MAY_FAIL))


def may_raise(operator: ast.operator, care: Care) -> bool:
    """Tell whether an operator is to be looked at more closely."""
    return care is Care.SURE and isinstance(operator, _OPERATORS)


def comes_back(name: str, care: Care) -> bool:
    """Tell whether the function of that full name returns by itself."""
    if name in _CALLS or name.startswith(_MODULES):
        return True
    if care is Care.SURE:
        return False
    return name in _CALLS_THAT_MAY_FAIL or _MODULES_THAT_MAY_FAIL.fullmatch(name) is not None


def is_method_of_data(name: str, care: Care) -> bool:
    """Tell whether a method of that name, of whatever it is, returns by itself."""
    return care is not Care.SURE and _METHODS.fullmatch(name) is not None


def is_plain_context(name: str, care: Care) -> bool:
    """Tell whether the context of that full name swallows nothing."""
    return care is not Care.SURE and name in _CONTEXTS
