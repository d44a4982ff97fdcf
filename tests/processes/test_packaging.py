"""The version of a build comes from git: a tag, a commit after it, an archive, and a folder without git."""

import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("hatch_vcs") is None, reason="hatch-vcs is not installed"),
    pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="this is no clone"),
]


def git(folder, *words):
    options = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *options, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A repository with the files of this one and the tag v7.8.9."""
    folder = tmp_path_factory.mktemp("clone")
    for name in git(ROOT, "ls-files", "-z").split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    git(folder, "init", "--quiet", "--initial-branch", "main")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "all files")
    git(folder, "tag", "--annotate", "v7.8.9", "--message", "a release")
    return folder


def build(folder, target, carried=()):
    """Build the wheel; the version of its name, that of its metadata, and that in its module.

    ``carried``: the files of compiled code that it must have.
    """
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(target)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    [wheel] = target.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        [metadata] = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        stated = re.search(r"^Version: (.+)$", files.read(metadata).decode(), re.MULTILINE)[1]
        written = re.search(r'VERSION = "(.+)"', files.read("totalreduce/foundation/_version.py").decode())[1]
        assert "totalreduce/examples/kubernetes/jobset.yaml" in files.namelist()
        assert "totalreduce/py.typed" in files.namelist()
        shipped = [name for name in files.namelist() if name.startswith("totalreduce/kernels/shipped/")]
        assert [name.rpartition("/")[2] for name in shipped] == list(carried)
        assert wheel.name.endswith("-py3-none-any.whl")
        assert "totalreduce_autoload.py" in files.namelist()
    return wheel.name.split("-")[1], stated, written


def test_a_tag_is_the_version(clone, tmp_path):
    assert build(clone, tmp_path) == ("7.8.9",) * 3


def test_an_archive_of_git_knows_its_tag(clone, tmp_path):
    git(clone, "archive", "--output", str(tmp_path / "all.tar"), "v7.8.9")
    (tmp_path / "archive").mkdir()
    shutil.unpack_archive(tmp_path / "all.tar", tmp_path / "archive", filter="data")
    assert build(tmp_path / "archive", tmp_path / "dist") == ("7.8.9",) * 3


def test_a_folder_without_git_has_the_fallback(clone, tmp_path):
    """Nor does the wheel need the package of benchmarks."""
    absent = shutil.ignore_patterns(".git", ".git_archival.txt", "_version.py", "benchmarks")
    shutil.copytree(clone, tmp_path / "plain", ignore=absent)
    assert build(tmp_path / "plain", tmp_path / "dist") == ("0.1.0.dev0",) * 3


def test_a_commit_after_a_tag_is_a_version_in_development(clone, tmp_path):
    git(clone, "commit", "--quiet", "--allow-empty", "--message", "more")
    name, stated, written = build(clone, tmp_path)
    assert re.fullmatch(r"7\.8\.10\.dev1\+g[0-9a-f]+", stated)
    assert name.replace("_", ".") == stated == written


def test_a_wheel_carries_the_compiled_code_that_make_dist_has_left(clone, tmp_path):
    shipped = clone / "build" / "shipped"
    shipped.mkdir(parents=True)
    (shipped / "manifest.json").write_text("{}")
    build(clone, tmp_path, carried=["manifest.json"])
    shutil.rmtree(clone / "build")
