"""The scripts that ``bench ddp`` and ``bench train`` launch are found in a source tree, and are in the wheel."""

from pathlib import Path

import pytest

from totalreduce.bench.launching import find_script
from totalreduce.foundation.errors import ConfigurationError

ROOT = Path(__file__).parents[3]
SCRIPTS = ("torch_ddp", "torch_fsdp", "lightning_fit", "accelerate_fit", "transformers_fit", "sparse_training")


def test_a_script_is_a_file_or_an_example(tmp_path):
    own = tmp_path / "own.py"
    own.touch()
    assert find_script(str(own)) == own
    assert [find_script(name) for name in SCRIPTS] == [ROOT / "examples" / f"{name}.py" for name in SCRIPTS]
    with pytest.raises(ConfigurationError, match="neither a file nonesuch nor an example"):
        find_script("nonesuch")
