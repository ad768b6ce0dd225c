"""Print the figures that the house keeps an eye on, and fail where a limit is passed.

Lines of `fit()`, the largest file, the longest function (docstrings not counted), the number of config keys.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE_LIMIT, ADAPTER_LIMIT, FUNCTION_LIMIT = 400, 600, 60


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    lines = node.end_lineno - node.lineno + 1  # pyright: ignore[reportOptionalOperand]
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        lines -= first.end_lineno - first.lineno + 1  # pyright: ignore[reportOptionalOperand]
    return lines


def main() -> None:
    """Measure every source file."""
    files, functions, over = [], [], []
    for path in sorted([*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("apps/*/src/**/*.py")]):
        text, name = path.read_text(), str(path.relative_to(ROOT))
        files.append((text.count("\n"), name))
        limit = ADAPTER_LIMIT if {"backends", "kernels"} & set(path.parts) else FILE_LIMIT
        if files[-1][0] > limit:
            over.append(f"{name}: {files[-1][0]} lines, the limit is {limit}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append((function_lines(node), f"{name}:{node.lineno} {node.name}"))
                if functions[-1][0] > FUNCTION_LIMIT:
                    over.append(f"{functions[-1][1]}: {functions[-1][0]} lines, the limit is {FUNCTION_LIMIT}")
    fit = next((lines for lines, where in functions if where.endswith(" fit")), None)
    keys = ROOT / "apps/ppo/tests/config_keys.txt"
    print(f"fit(): {fit} lines (limit {FUNCTION_LIMIT})")
    print("largest file: {} lines, {} (limit {})".format(*max(files), FILE_LIMIT))
    print("longest function: {} lines, {} (limit {})".format(*max(functions), FUNCTION_LIMIT))
    print(f"config keys: {len(keys.read_text().split()) if keys.exists() else 'no snapshot'}")
    print(f"source: {len(files)} files, {sum(lines for lines, _ in files)} lines")
    if over:
        sys.exit("\n".join(over))


if __name__ == "__main__":
    main()
