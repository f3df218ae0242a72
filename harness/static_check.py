"""Reads a submission's source, without running it: only Triton kernels may do the work.

What is refused, outside of kernels (functions under @triton.jit) where nothing else is said
(the lists are in static_check.toml):

    import      any module but those of `MODULES`, the submission's own files, and
                `from harness import virtual_npu`
    torch       any name of torch but those of `TORCH`: memory, dtypes, padding, autograd.Function
    method      tensor methods that compute, those of `METHODS`
    matmul      the @ operator
    process     subprocess but run([..., "--version"]), shutil but which
    builtin     open, exec, eval, and what else reaches around this check, those of `BUILTINS`
    attribute   names with two underscores that lead to a module's or function's insides
    patch       assignment to an attribute of anything but self, cls and ctx
    harness     any name of virtual_npu but install
    atomic      inside of kernels: atomics, since results must repeat bit for bit
    kernel      a submission without any kernel

It is a fence, not a proof: the outputs are judged, and kernels counted, by the evaluator.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

_LISTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
MODULES, TORCH, METHODS, BUILTINS, INSIDES = (
    frozenset(_LISTS[name]) for name in ("modules", "torch", "methods", "builtins", "insides")
)
PACKAGES = frozenset({"autograd", "nn", "nn.functional", "npu", "library", "compiler"})  # of torch: each name counts


@dataclass(frozen=True)
class Refusal:
    """One thing that a submission must not do."""

    rule: str
    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what} ({self.rule})"


def _is_kernel(node: ast.AST) -> bool:
    if not isinstance(node, ast.FunctionDef):
        return False
    names = {ast.unparse(x.func if isinstance(x, ast.Call) else x) for x in node.decorator_list}
    return bool(names & {"triton.jit", "jit"})


class _Reader(ast.NodeVisitor):
    def __init__(self, path: Path) -> None:
        self.path, self.refusals, self.own, self.kernels = path, list[Refusal](), list[Path](), 0
        self.aliases: dict[str, str] = {}  # name here: dotted name of the module or of what is in it
        self.in_kernel = False

    def refuse(self, rule: str, node: ast.AST, what: str) -> None:
        self.refusals.append(Refusal(rule, self.path.name, getattr(node, "lineno", 0), what))

    def _dotted(self, node: ast.AST) -> str | None:
        """Full name of a chain of attributes that starts at an import, else None."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self._dotted(node.value)
            return None if base is None else f"{base}.{node.attr}"
        return None

    def _module(self, node: ast.AST, name: str, imported: str | None = None) -> None:
        """An import of a module, or of one name from it."""
        top = name.split(".")[0]
        local = self.path.parent / f"{top}.py"
        if top == "harness":
            if (name, imported) != ("harness", "virtual_npu"):
                self.refuse("import", node, f"imports {name}; of harness only virtual_npu may be imported")
        elif top in MODULES:
            if top == "torch":
                self._torch(node, ".".join(filter(None, [name, imported])))
        elif local.is_file():
            self.own.append(local)
        else:
            self.refuse("import", node, f"imports {name}")

    def _torch(self, node: ast.AST, dotted: str) -> None:
        name = dotted.removeprefix("torch").removeprefix(".")
        allowed = name in TORCH or any(name.startswith(f"{one}.") for one in TORCH - PACKAGES)
        if name and not allowed:
            self.refuse("torch", node, f"uses torch.{name}; only a Triton kernel may compute")

    def visit_Import(self, node: ast.Import) -> None:
        for one in node.names:
            self._module(node, one.name)
            self.aliases[one.asname or one.name.split(".")[0]] = one.name if one.asname else one.name.split(".")[0]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level:
            self.refuse("import", node, "imports relatively")
            return
        for one in node.names:
            if one.name == "*":
                self.refuse("import", node, f"imports * from {node.module}")
                continue
            self._module(node, node.module or "", one.name)
            self.aliases[one.asname or one.name] = f"{node.module}.{one.name}"

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if not _is_kernel(node):
            self.generic_visit(node)
            return
        self.kernels += 1
        before, self.in_kernel = self.in_kernel, True
        self.generic_visit(node)
        self.in_kernel = before

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if self.in_kernel:
            if node.attr.startswith("atomic_"):
                self.refuse("atomic", node, f"uses {ast.unparse(node)}; results must repeat bit for bit")
            self.generic_visit(node)
            return
        dotted = self._dotted(node)
        if node.attr in INSIDES:
            self.refuse("attribute", node, f"reads {ast.unparse(node)}")
        elif dotted is None:
            if node.attr in METHODS:
                self.refuse("method", node, f"uses .{node.attr}; only a Triton kernel may compute")
            self.generic_visit(node)
        elif dotted.startswith("torch."):
            self._torch(node, dotted)
        elif dotted.startswith("harness.virtual_npu.") and dotted != "harness.virtual_npu.install":
            self.refuse("harness", node, f"uses {dotted}")
        elif dotted.startswith(("shutil.", "subprocess.")) and dotted not in ("shutil.which", "subprocess.run"):
            self.refuse("process", node, f"uses {dotted}")

    def visit_Call(self, node: ast.Call) -> None:
        dotted = self._dotted(node.func)
        if dotted == "subprocess.run" and not self._asks_version(node):
            self.refuse("process", node, "runs a program for more than its --version")
        if isinstance(node.func, ast.Name) and node.func.id == "getattr":
            name = node.args[1] if len(node.args) > 1 else None
            if not isinstance(name, ast.Constant) or name.value in METHODS | INSIDES:
                self.refuse("builtin", node, f"uses {ast.unparse(node)}")
        self.generic_visit(node)

    @staticmethod
    def _asks_version(node: ast.Call) -> bool:
        command = node.args[0] if node.args else None
        shell = any(keyword.arg in ("shell", None) for keyword in node.keywords)
        if shell or not isinstance(command, ast.List) or len(command.elts) != 2:
            return False
        return isinstance(command.elts[1], ast.Constant) and command.elts[1].value == "--version"

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in BUILTINS and not self.in_kernel:
            self.refuse("builtin", node, f"uses {node.id}")
        elif node.id in INSIDES:
            self.refuse("attribute", node, f"reads {node.id}")
        dotted = self.aliases.get(node.id, "")
        if dotted.count(".") and dotted.split(".")[0] == "subprocess" and dotted != "subprocess.run":
            self.refuse("process", node, f"uses {dotted}")

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, ast.MatMult) and not self.in_kernel:
            self.refuse("matmul", node, f"uses {ast.unparse(node)}; only a Triton kernel may compute")
        self.generic_visit(node)

    def _targets(self, targets: list[ast.expr]) -> None:
        for target in targets:
            for node in ast.walk(target):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
                    if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "ctx")):
                        self.refuse("patch", node, f"assigns {ast.unparse(node)}")

    def visit_Assign(self, node: ast.Assign) -> None:
        self._targets(node.targets)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.op, ast.MatMult):
            self.refuse("matmul", node, f"uses {ast.unparse(node)}; only a Triton kernel may compute")
        self._targets([node.target])
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._targets([node.target])
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._targets([node.target])
        self.generic_visit(node)

    def visit_With(self, node: ast.With) -> None:
        self._targets([item.optional_vars for item in node.items if item.optional_vars])
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._targets(node.targets)
        self.generic_visit(node)


def refusals(path: Path) -> list[Refusal]:
    """What a submission must not do and does, in its file and the own files that it imports.

    A file that cannot be parsed is refused by nothing: importing it gives the better message.
    """
    found: list[Refusal] = []
    kernels, waiting, seen = 0, [path.resolve()], set[Path]()
    while waiting:
        file = waiting.pop(0)
        if file in seen:
            continue
        seen.add(file)
        try:
            tree = ast.parse(file.read_text())
        except (SyntaxError, ValueError):
            return []
        reader = _Reader(file)
        for node in ast.walk(tree):  # imports first, wherever they stand: aliases are then known
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                reader.visit(node)
        reader.refusals.clear()
        reader.own.clear()
        reader.visit(tree)
        found += reader.refusals
        waiting += reader.own
        kernels += reader.kernels
    if not kernels:
        found.append(Refusal("kernel", path.name, 1, "has no function under @triton.jit"))
    return found


def main() -> int:
    """`python -m harness.static_check FILE...`: print what is refused; 1 when anything is."""
    found = [refusal for name in sys.argv[1:] for refusal in refusals(Path(name))]
    print("\n".join(str(refusal) for refusal in found) or "nothing is refused")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
