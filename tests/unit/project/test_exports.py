"""What is public exists, is documented, and is imported lazily."""

import importlib
import importlib.util
import pkgutil
from types import ModuleType

import pytest

import totalreduce

TRITON = "totalreduce.kernels.device_triton"
#: Modules that need a package which users may do without.
OPTIONAL = {"totalreduce.cli.top_app"} if importlib.util.find_spec("textual") is None else set()
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(totalreduce.__path__, "totalreduce.")
    if module.name not in ("totalreduce.__main__", TRITON, *OPTIONAL)
)


@pytest.fixture(params=["every module", "the module that needs Triton"])
def modules(request: pytest.FixtureRequest) -> list[ModuleType]:
    if request.param == "every module":
        assert len(MODULES) > 250
        return [importlib.import_module(name) for name in MODULES]
    pytest.importorskip("triton", reason="looked at where Triton is: see test_device_accumulator")
    return [importlib.import_module(TRITON)]


def test_modules_have_a_docstring_and_export_what_exists(modules: list[ModuleType]) -> None:
    for module in modules:
        assert module.__doc__, module.__name__
        exported = getattr(module, "__all__", [])
        assert len(set(exported)) == len(exported), module.__name__
        for name in exported:
            assert hasattr(module, name), f"{module.__name__}.{name}"


def test_public_things_have_docstrings(modules: list[ModuleType]) -> None:
    for module in modules:
        for name in getattr(module, "__all__", []):
            thing = getattr(module, name)
            ours = callable(thing) and getattr(thing, "__module__", "").startswith("totalreduce")
            if isinstance(thing, type) or ours:
                assert thing.__doc__, f"{module.__name__}.{name}"


def test_the_package_exports_what_it_can_find() -> None:
    assert len(set(totalreduce.__all__)) == len(totalreduce.__all__)  # ruff sorts them
    assert set(totalreduce.__all__) == {*totalreduce._HOMES, *totalreduce._PACKAGES, "__version__"}
    for name in totalreduce.__all__:
        thing = getattr(totalreduce, name)
        if name in totalreduce._PACKAGES:
            assert thing.__name__ == f"totalreduce.{totalreduce._PACKAGES[name]}"
        elif name != "__version__":
            assert thing.__module__ == f"totalreduce.{totalreduce._HOMES[name]}"
    assert set(totalreduce.__all__) <= set(dir(totalreduce))


def test_every_error_is_exported() -> None:
    errors = importlib.import_module("totalreduce.foundation.errors")
    assert set(errors.__all__) <= set(totalreduce.__all__)


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match="module 'totalreduce' has no attribute 'al_reduce'"):
        totalreduce.al_reduce  # noqa: B018
