"""The documentation site is built without a warning, and its pages need nothing from elsewhere."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from pages import ROOT, pages

EXTERNAL = re.compile(r'<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"')


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed; make docs installs it")
def test_the_site_is_built_and_stands_alone(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    built = {str(path.relative_to(tmp_path / "site")): path.read_text() for path in (tmp_path / "site").rglob("*.html")}
    for page in pages():
        if page.startswith("docs/"):
            assert page.removeprefix("docs/").removesuffix(".md") + ".html" in built
    for page, text in built.items():
        assert not EXTERNAL.findall(text), page
        assert "javascripts/iframe-worker.js" in text, page
    assert (tmp_path / "site" / "search" / "search_index.js").stat().st_size > 500_000
    assert 'href="torch.html">docs/torch.md</a>' in built["index.html"]
    assert 'href="../extending.html">docs/extending.md</a>' in built["reference/groups.html"]
    assert "DistributedDataParallel" in built["examples/torch_ddp.py.html"]
