"""Rules about files that import-linter cannot express: who may have threads, a clock, sockets, the environment."""

import ast
import functools
import re
import tomllib
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

import totalreduce
import totalreduce_benchmarks

ROOT, BENCHMARKS = Path(totalreduce.__path__[0]), Path(totalreduce_benchmarks.__path__[0])
FILES = [*sorted(ROOT.rglob("*.py")), *sorted(BENCHMARKS.rglob("*.py"))]
#: Folders whose files are programs of their own, and what only programs use.
PROGRAMS = ("cli/", "bench/", "planning/", "benchmarks/")
#: Who carries exchanges out and measures them, and the thread that does it beside the backward pass.
SPARSE_DRIVERS = {"auto.py", "c10d_driver.py", "group_driver.py", "rounds.py", "worker.py"}
#: What programs call of a parameter server, the thread behind it, and its messages.
SERVER_DRIVERS = {"connection.py", "driver.py", "messenger.py"}
PURE = [
    *(ROOT / "engine").glob("*.py"),
    *(ROOT / "coordination").glob("*.py"),
    *(ROOT / "schedules").glob("*.py"),
    *(ROOT / "foundation").glob("*.py"),
    *(path for path in (ROOT / "sparse").glob("*.py") if path.name not in SPARSE_DRIVERS),
    *(path for path in (ROOT / "server").glob("*.py") if path.name not in SERVER_DRIVERS),
    ROOT / "transports" / "simulated.py",
    ROOT / "transports" / "simulated_hosts.py",
    ROOT / "planning" / "simulation.py",
    ROOT / "planning" / "traffic.py",
    ROOT / "testing" / "simulation.py",
]
IMPURE_MODULES = {"asyncio", "concurrent", "multiprocessing", "select", "selectors", "socket", "threading", "time"}
UNSAFE_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
#: ``tr.run`` copies a function to processes that it has started, by a file in a private folder. The index of a snapshot
#: is a pickle of torch: only the classes of an index are loaded from it.
PICKLING = {"launch/called.py", "launch/functions.py", "recovery/snapshot_index.py"}


def name(path: Path) -> str:
    return f"benchmarks/{path.name}" if path.is_relative_to(BENCHMARKS) else str(path.relative_to(ROOT))


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def imported(path: Path) -> set[str]:
    """Top-level names of everything a file imports, inside functions too."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def uses(path: Path, module: str, attributes: set[str]) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == module
        and node.attr in attributes
        for node in nodes(path)
    )


@pytest.mark.parametrize("path", sorted(set(PURE)), ids=name)
def test_the_core_has_no_thread_socket_or_clock(path: Path) -> None:
    assert imported(path) & IMPURE_MODULES == set()


def test_the_foundation_needs_the_standard_library_only() -> None:
    for path in (ROOT / "foundation").glob("*.py"):
        assert imported(path) & {"torch", "numpy"} == set(), name(path)


def test_engine_and_schedules_know_no_tensor_library() -> None:
    pure = [path for path in PURE if path.parent.name in ("engine", "coordination", "schedules")]
    assert [name(path) for path in pure if imported(path) & {"torch", "numpy"}] == []


def test_only_one_file_reads_the_environment() -> None:
    readers = {name(path) for path in FILES if uses(path, "os", {"environ", "getenv", "putenv", "environb"})}
    # What starts processes hands the environment on; it takes no setting from it.
    handing_on = {reader for reader in readers if reader.startswith(("launch/", *PROGRAMS))}
    assert readers - handing_on == {"foundation/environment.py"}


def test_nothing_is_unpickled_or_evaluated() -> None:
    for path in FILES:
        assert bool(imported(path) & UNSAFE_MODULES) == (name(path) in PICKLING), name(path)
        calls = {node.func.id for node in nodes(path) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        assert calls & {"eval", "exec"} == set(), name(path)


def test_a_transport_knows_no_collective() -> None:
    """import-linter forbids the packages; the names of collectives and reductions are in ``foundation.types``."""
    named = {
        (name(path), node.id)
        for path in (ROOT / "transports").glob("*.py")
        for node in nodes(path)
        if isinstance(node, ast.Name) and node.id in ("OpKind", "ReduceOp", "Algorithm", "Signature")
    }
    assert named == set()


def test_examples_import_no_benchmark() -> None:
    for path in (ROOT.parents[1] / "examples").rglob("*.py"):
        modules = {node.module or "" for node in nodes(path) if isinstance(node, ast.ImportFrom)}
        modules |= {alias.name for node in nodes(path) if isinstance(node, ast.Import) for alias in node.names}
        found = [module for module in modules if module.startswith(("totalreduce.bench", "totalreduce_benchmarks"))]
        assert not found, path


def test_files_with_threads_are_known() -> None:
    threaded = {name(path) for path in FILES if uses(path, "threading", {"Thread"})}
    of_the_library = {file for file in threaded if not file.startswith(("launch/", "testing/", *PROGRAMS))}
    assert of_the_library == {
        "runner/runner.py",
        "native/executor.py",
        "groups/mesh.py",
        "c10d/callbacks.py",
        "horovod/joining.py",
        "pytorch/ddp_group.py",
        "pytorch/gossip_steps.py",
        "server/driver.py",
        "sparse/worker.py",
        "tensors/staging.py",
        "recovery/snapshots.py",
        "observe/dashboard.py",
        "observe/publisher.py",
    }


def test_loggers_are_those_of_their_areas() -> None:
    """The logger of a module is below the logger of its folder, whose level a program can set."""
    named = {
        (name(path), ast.unparse(node.args[0]))
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "logging.getLogger" and node.args
    }
    others = {(file, argument) for file, argument in named if argument != "__name__"}
    assert others == {("launch/bootstrap.py", "'totalreduce'")}  # the parent of all, which is set up there
    assert len(named) > 20


#: The functions of torch whose tensors are on the default device, unless the call names another one.
FACTORIES = {function.__name__ for function in _device_constructors()}
#: Their dtype is that of the values that are passed.
OF_THE_VALUES = {"sparse_coo_tensor", "sparse_csr_tensor", "sparse_compressed_tensor"}
#: They make a tensor of the default dtype, and of the default device if that was set in the old way.
OLD_FACTORIES = {"Tensor", "FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor"}


def calls_that_follow_a_default(tree: list[ast.AST]) -> list[str]:
    """Return the code that makes a tensor on torch's default device, or maybe of its default dtype."""
    found = []
    called = {id(node.func): node for node in tree if isinstance(node, ast.Call)}
    for node in tree:
        if isinstance(node, ast.ImportFrom) and node.module == "torch":  # a call would not show that it is torch's
            found += [alias.name for alias in node.names if alias.name in FACTORIES]
        if not (isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[0] == "torch"):
            continue
        call = called.get(id(node))
        if node.attr in OLD_FACTORIES and call is not None:
            found.append(ast.unparse(call))
        elif node.attr in FACTORIES:
            named = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords} if call else {}
            if named.get("device", "None") == "None" or (node.attr not in OF_THE_VALUES and "dtype" not in named):
                found.append(ast.unparse(call or node))
    return found


@pytest.mark.parametrize(
    ("code", "follows"),
    [
        ("torch.zeros(3, dtype=torch.uint8, device='cpu')", False),
        ("torch.sparse_coo_tensor(indices, values, device=values.device)", False),
        ("torch.zeros(3, dtype=torch.uint8)", True),
        ("torch.zeros(3, dtype=torch.uint8, device=None)", True),
        ("torch.tensor([1.5], device='cpu')", True),
        ("torch.sparse_coo_tensor(indices, values)", True),
        ("make = torch.zeros", True),
        ("from torch import zeros", True),
        ("torch.Tensor([1])", True),
    ],
)
def test_calls_that_follow_a_default_are_found(code: str, follows: bool) -> None:
    assert bool(calls_that_follow_a_default(list(ast.walk(ast.parse(code))))) == follows


#: All files but those of programs, which set no default.
IN_PROGRAMS_OF_USERS = [path for path in FILES if not name(path).startswith(PROGRAMS)]


def test_no_tensor_of_the_library_follows_the_default_device_or_dtype_of_the_program() -> None:
    found = {name(path): calls_that_follow_a_default(nodes(path)) for path in IN_PROGRAMS_OF_USERS}
    assert {file: calls for file, calls in found.items() if calls} == {}


# ---------------------------------------------------------------------------------------------- the architecture page

PAGE = (ROOT.parents[1] / "ARCHITECTURE.md").read_text()


def test_the_table_of_floors_has_the_order_that_is_enforced() -> None:
    contracts = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [[benchmarks, *layers]] = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    assert benchmarks == "totalreduce_benchmarks"
    rows = re.findall(r"^\| `(\w+)/` \|", PAGE, re.MULTILINE)
    assert rows == [layer.removeprefix("totalreduce.") for layer in reversed(layers)]


# ------------------------------------------------------------------------------------------------------ large classes

METHODS_MAX, ATTRIBUTES_MAX = 30, 15
#: Larger classes: their methods, their attributes, and the reason. A number may only become smaller.
LARGE = {
    "c10d/process_group.py ProcessGroupTotalReduce": (40, 12, "torch calls each method"),
    "engine/counters.py Counters": (0, 19, "a table of figures"),
    "engine/engine.py Engine": (31, 20, "events and the steps of an operation's life"),
    "engine/layout.py OperationLayout": (12, 21, "what is computed once for every message"),
    "engine/operation.py Operation": (14, 24, "the record of an operation"),
    "fastlane/lane.py LaneCarriage": (14, 19, "the record of an operation"),
    "foundation/environment.py Settings": (0, 22, "one attribute for each variable"),
    "groups/group.py Group": (33, 13, "what users call"),
    "groups/statistics.py Statistics": (1, 21, "a table of figures"),
    "observe/figures.py RankFigures": (2, 25, "a table of figures"),
    "pytorch/local_steps.py LocalSteps": (32, 18, "a step that can be undone, and join"),
    "pytorch/optimizer.py DistributedOptimizer": (35, 20, "the methods of torch's optimizers"),
    "runner/runner.py Runner": (31, 17, "how threads end"),
    "server/client.py Client": (35, 18, "it cuts, encodes, filters, sends and sends again"),
    "server/messenger.py Messenger": (13, 18, "the functions that it calls"),
    "transports/simulated.py SimulatedNetwork": (23, 18, "what is simulated"),
}


def attributes_of(definition: ast.ClassDef) -> set[str]:
    """Fields, slots, and what the methods assign to ``self``."""
    found = set()
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found |= set() if "ClassVar" in ast.dump(node.annotation) else {node.target.id}
        elif isinstance(node, ast.FunctionDef):
            found |= {
                inner.attr
                for inner in ast.walk(node)
                if isinstance(inner, ast.Attribute)
                and isinstance(inner.ctx, ast.Store)
                and isinstance(inner.value, ast.Name)
                and inner.value.id == "self"
            }
    return found


def test_large_classes_are_known_and_become_smaller() -> None:
    found = {}
    for path in FILES:
        for node in nodes(path):
            # What an enumeration or a structure has are names.
            if isinstance(node, ast.ClassDef) and not any(
                kind in ast.dump(base) for base in node.bases for kind in ("Enum", "Structure")
            ):
                methods = sum(isinstance(each, ast.FunctionDef) for each in node.body)
                attributes = len(attributes_of(node))
                if methods > METHODS_MAX or attributes > ATTRIBUTES_MAX:
                    found[f"{name(path)} {node.name}"] = (methods, attributes)
    # A class that has become smaller has smaller numbers here, or leaves the list.
    assert found == {where: (methods, attributes) for where, (methods, attributes, _) in LARGE.items()}
