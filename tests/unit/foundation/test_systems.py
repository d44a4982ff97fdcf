"""Other systems than Linux: what is refused, and what the metadata says."""

import tomllib
from pathlib import Path

from totalreduce.foundation.systems import why_not


def test_a_python_of_32_bits_is_named():
    assert "needs a Python of 64 bits" in why_not("linux", 2**31 - 1)
    assert why_not("linux", 2**63 - 1) is None


def test_the_metadata_names_linux_and_no_other_system():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    systems = [name for name in project["classifiers"] if name.startswith("Operating System")]
    assert systems == ["Operating System :: POSIX :: Linux"]
