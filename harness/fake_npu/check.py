"""`make npu-schema WHEEL=FOLDER`: are the interfaces in signatures.toml those of an unpacked
torch_npu wheel? Reads its sources and binaries as text; imports nothing of it."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path
from typing import Any

from . import SIGNATURES


def _functions(tree: ast.Module) -> dict[str, list[str]]:
    """Signatures by name, methods too, as `name(parameters)`."""
    found: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, []).append(f"{node.name}({ast.unparse(node.args)})")
    return found


def _class_body(text: str, name: str) -> ast.Module:
    """The class of that name alone, or the whole module where there is none."""
    tree = ast.parse(text)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return ast.Module(body=node.body, type_ignores=[])
    return tree


def faults(wheel: Path, table: dict[str, Any] | None = None) -> list[str]:
    """In words, each interface that the wheel declares otherwise; empty when all agree.

    Raises:
        ValueError: the folder holds no torch_npu.
    """
    if not (wheel / "torch_npu" / "version.py").is_file():
        raise ValueError(f"WHEEL must be a folder with an unpacked torch_npu wheel, got {wheel}")
    if table is None:
        table = tomllib.loads(SIGNATURES.read_text())
    wrong = []
    version = (wheel / "torch_npu" / "version.py").read_text()
    if f"'{table['version']}'" not in version:
        wrong.append(f"version: the table is of {table['version']}, the wheel says {version.splitlines()[0]}")
    for entry in (*table["operator"], *table["function"], *table["attribute"]):
        name, path = entry["name"], wheel / entry["source"]
        if not path.is_file():
            wrong.append(f"{name}: {entry['source']} is not in the wheel")
            continue
        if "string" in entry:
            data = path.read_bytes()
            start = data.find(entry["class"].encode())
            if start < 0 or data.find(b"\0" + entry["string"].encode() + b"\0", start) < 0:
                wrong.append(f"{name}: {entry['string']} is not among the strings of {entry['source']}")
            continue
        text = path.read_text()
        if "schema" in entry:
            if f"func: {entry['schema']}\n" not in text:
                wrong.append(f"{name}: {entry['source']} has another schema")
        elif "assigned" in entry:
            if f"{entry['assigned']} = " not in text:
                wrong.append(f"{name}: {entry['source']} does not assign it")
        else:
            owner = name.split(".")[-2]
            short = name.split(".")[-1]
            declared = _functions(_class_body(text, owner)).get(short, [])
            if entry["signature"] not in declared:
                wrong.append(f"{name}: expected {entry['signature']}, the wheel has {declared or 'no such function'}")
            if entry.get("contains", "") not in text:
                wrong.append(f"{name}: {entry['contains']} does not occur in {entry['source']}")
    return wrong


def main() -> int:
    """Print the faults; returns 1 when there are any."""
    if len(sys.argv) != 2:
        print("error: one argument, the folder of an unpacked torch_npu wheel", file=sys.stderr)
        return 2
    table = tomllib.loads(SIGNATURES.read_text())
    try:
        wrong = faults(Path(sys.argv[1]), table)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    count = sum(len(table[kind]) for kind in ("operator", "function", "attribute"))
    for line in wrong:
        print(line)
    agreeing = count - len({line.split(":")[0] for line in wrong} - {"version"})
    print(f"{agreeing} of {count} interfaces agree with torch_npu {table['version']}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
