"""The scripts that ``bench ddp`` and ``bench train`` launch are found in a source tree, and are in the wheel."""

import ast
import tomllib
from pathlib import Path

import pytest

from totalreduce.bench.launching import find_script
from totalreduce.foundation.errors import ConfigurationError

ROOT = Path(__file__).parents[2]
SCRIPTS = ("torch_ddp", "torch_fsdp", "lightning_fit", "accelerate_fit", "transformers_fit", "sparse_training")


def test_a_script_is_a_file_or_an_example(tmp_path):
    own = tmp_path / "own.py"
    own.touch()
    assert find_script(str(own)) == own
    assert [find_script(name) for name in SCRIPTS] == [ROOT / "examples" / f"{name}.py" for name in SCRIPTS]
    with pytest.raises(ConfigurationError, match="neither a file nonesuch nor an example"):
        find_script("nonesuch")


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_wheel_has_every_script_and_what_it_imports(script):
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    included = built["force-include"]
    nodes = ast.walk(ast.parse((ROOT / "examples" / f"{script}.py").read_text()))
    imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    siblings = {name for name in imported if (ROOT / "examples" / f"{name}.py").is_file()}
    assert siblings
    for name in (script, *siblings):
        assert included[f"examples/{name}.py"] == f"totalreduce/bench/examples/{name}.py"
