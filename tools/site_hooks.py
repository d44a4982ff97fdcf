"""What MkDocs does beside its usual work when it builds the documentation site (``mkdocs.yml``).

Files outside of ``docs/`` that readers look for (``PAGES``) become pages of the site, and so do the
examples. Links between files of the repository are turned into links between pages, so that the same Markdown is right
in the repository and in the site.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from totalreduce.cli.examples import example_files, summary

ROOT = Path(__file__).parents[1]
#: By path in the repository: the page of the site.
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "reporting.md",
    "CITATION.cff": "citation.md",
}
#: By folder of the repository: the page that lists its files.
_FOLDERS = {"examples": "examples/index.md", "docs/design": "explanation.md"}
_LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".toml": "toml", ".yaml": "yaml", "": "dockerfile"}
#: The theme fetches this script, which search needs in pages that are opened as files. The site has a copy of it.
_SHIM = re.compile(r'"https://[^"]*/iframe-worker/shim"')
#: What docstrings have for readers of the source: marks before examples, roles, and names of pages.
_MARK_BEFORE_EXAMPLE = re.compile(r"<p>::</p>\s*(?=<div)|:(?=:</p>\s*<div)")
_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):(?=<code>)")
_NAME_OF_PAGE = re.compile(r'(?<![/\w])(?<!">)docs/([\w/-]+\.md)')
_FENCE = re.compile(r"^ *(```|~~~)")
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are not files of ``docs/``."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text("utf-8")
        if not source.endswith(".md"):
            text = f"# {source}\n\n```yaml\n{text}```\n"
        files.append(File.generated(config, page, content=text))
    examples = sorted(
        path
        for path in (ROOT / "examples").iterdir()
        if path.name != "__pycache__" and (path.is_dir() or path.suffix in (*_LANGUAGES, ".ipynb"))
    )
    for path in examples:
        files.append(File.generated(config, _page_of_example(path.name), content=_example(path)))
    files.append(File.generated(config, "examples/index.md", content=_list_of_examples(examples)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages."""
    del config, files
    here = page.file.src_uri
    if here == "index.md":
        page.meta["hide"] = ["navigation"]  # it has nothing but the page itself
    source = next((source for source, made in PAGES.items() if made == here), f"docs/{here}")
    in_code, lines = False, []
    for line in markdown.splitlines():
        if _FENCE.match(line):
            in_code = not in_code
        lines.append(line if in_code else _LINK.sub(lambda found: _translate(found, source, here), line))
    return "\n".join(lines)


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links of the names of pages in code and docstrings, and leave out marks that are not of Markdown."""
    del config
    here = posixpath.dirname(page.file.dest_uri)

    def link(found: re.Match[str]) -> str:
        file = files.get_file_from_path(found[1])
        return f'<a href="{posixpath.relpath(file.dest_uri, here)}">{found[0]}</a>' if file else found[0]

    html = _ROLE.sub("", _MARK_BEFORE_EXAMPLE.sub("", html))
    return _NAME_OF_PAGE.sub(link, html)


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Let the page use the site's copy of the script that the theme would fetch."""
    del config
    script = posixpath.relpath("javascripts/iframe-worker.js", posixpath.dirname(page.file.dest_uri))
    return _SHIM.sub(f'"{script}"', output)


def on_post_template(output_content: str, *, template_name: str, config: MkDocsConfig) -> str:
    """Do the same for pages that are not made from Markdown, such as that for addresses without a page."""
    del template_name, config
    return _SHIM.sub('"/javascripts/iframe-worker.js"', output_content)


def _translate(found: re.Match[str], source: str, here: str) -> str:
    """Return a Markdown link of the file ``source`` as it must stand in the page ``here``."""
    target, hash_sign, anchor = found[2].partition("#")
    if not target or ":" in target:
        return found[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if path in PAGES:
        page = PAGES[path]
    elif path.startswith("examples/"):
        page = _page_of_example(path.removeprefix("examples/").partition("/")[0])  # a folder has one page
    elif path in _FOLDERS:
        page = _FOLDERS[path]
    elif path.startswith("docs/"):
        page = path.removeprefix("docs/")
    else:
        return found[0]
    return f"{found[1]}{posixpath.relpath(page, posixpath.dirname(here))}{hash_sign}{anchor}{found[3]}"


def _page_of_example(name: str) -> str:
    return f"examples/{name}.md"


def _example(path: Path) -> str:
    blocks = [f"# {path.name}"]
    if path.suffix == ".ipynb":
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            text = "".join(cell["source"])
            blocks.append(text.removeprefix("# ") if cell["cell_type"] == "markdown" else f"````python\n{text}\n````")
        return "\n\n".join(blocks) + "\n"
    for file in example_files(path) if path.is_dir() else [path]:
        if path.is_dir():
            blocks.append(f"## {file.relative_to(path)}")
        blocks.append(f"````{_LANGUAGES[file.suffix]}\n{file.read_text('utf-8').rstrip()}\n````")
    return "\n\n".join(blocks) + "\n"


def _list_of_examples(examples: list[Path]) -> str:
    first = {path: example_files(path)[-1] if path.is_dir() else path for path in examples}
    rows = [f"| [{path.name}]({path.name}.md) | {summary(file)} |" for path, file in first.items()]
    return "\n".join(
        [
            "# Examples",
            "",
            "`totalreduce examples --copy DIR` writes these files into a folder.",
            "",
            *("| file | what it does |", "|---|---|"),
            *rows,
            "",
        ]
    )
