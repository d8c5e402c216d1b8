"""Which answers count as a function: a whitelist of syntax.

It keeps verdicts on the embedded functions the same everywhere, and is the only protection on machines that cannot
contain a program: no imports, no attributes but plain methods, no builtins but a few harmless ones.
"""

import ast
import builtins

_MAX_SOURCE = 4000
_BUILTINS = frozenset(
    "abs all any bool dict divmod enumerate filter float int isinstance len list map max min range reversed "
    "round set sorted str sum tuple zip".split()
)
_METHODS = frozenset(
    "append capitalize copy count endswith extend find get index insert isalpha isdigit islower isupper items "
    "join keys lower lstrip pop remove replace reverse rstrip sort split startswith strip title upper "
    "values".split()
)
_NODES = (
    *(ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AugAssign, ast.Expr, ast.For),
    *(ast.While, ast.If, ast.Break, ast.Continue, ast.Pass, ast.Name, ast.Constant, ast.Load, ast.Store, ast.BinOp),
    *(ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Call, ast.keyword, ast.Lambda, ast.Subscript, ast.Slice),
    *(ast.List, ast.Tuple, ast.Dict, ast.Set, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Starred),
    *(ast.comprehension, ast.JoinedStr, ast.FormattedValue, ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)


def function_name(source: str) -> str | None:
    """The name of the one function that ``source`` defines, or None if anything in it is not on the whitelist."""
    if len(source) > _MAX_SOURCE:
        return None
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
        return None
    function = tree.body[0]
    nodes = [node for node in ast.walk(tree) if node is not function]
    plain = not function.decorator_list and not any(isinstance(node, ast.FunctionDef) for node in nodes)
    return function.name if plain and all(_allowed_node(node) for node in nodes) else None


def _allowed_node(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in _METHODS and isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.Name):
        return not node.id.startswith("__") and (node.id in _BUILTINS or node.id not in dir(builtins))
    if isinstance(node, ast.arg):
        return not node.arg.startswith("__")
    return isinstance(node, _NODES)
