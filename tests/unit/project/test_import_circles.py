"""No module of the package imports itself through others, also not for type annotations or inside functions."""

import ast
from pathlib import Path

import totalreduce

ROOT = Path(totalreduce.__path__[0])


def modules_of(root: Path) -> dict[str, Path]:
    """Every module by its dotted name; a package by the name of its directory."""
    names = {path: path.relative_to(root.parent).with_suffix("").parts for path in root.rglob("*.py")}
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for path, parts in names.items()}


def imports_of(module: str, path: Path, modules: dict[str, Path]) -> set[str]:
    """The modules of the package that a file names in import statements, wherever the statements are."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return (found & modules.keys()) - {module}


def circles_of(graph: dict[str, set[str]]) -> list[list[str]]:
    """The sets of modules of which each one reaches every other one, by Kahn's elimination from both ends."""
    left = dict(graph)
    while True:
        targets = {target for source in left for target in left[source]}
        ends = {module for module in left if not left[module] & left.keys() or module not in targets}
        if not ends:
            break
        left = {module: left[module] - ends for module in left if module not in ends}
    reached = {module: _reachable(module, left) for module in left}
    circles = {frozenset(other for other in reached[module] if module in reached[other]) for module in left}
    return sorted(sorted(circle) for circle in circles if circle)


def _reachable(module: str, graph: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = [module]
    while waiting:
        new = graph[waiting.pop()] & graph.keys() - reached
        reached |= new
        waiting += new
    return reached


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"f"}, "f": {"e", "g"}, "g": set(), "h": {"a"}}
    assert circles_of(graph) == [["a", "b", "c"], ["e", "f"]]
    assert circles_of({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def test_no_module_imports_itself_through_others() -> None:
    modules = modules_of(ROOT)
    graph = {module: imports_of(module, path, modules) for module, path in modules.items()}
    circles = circles_of(graph)
    assert circles == []
