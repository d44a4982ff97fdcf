"""What the pages of the documentation say is true: their links, the parts of files they show, their command lines."""

import posixpath
import re
import shlex

import pytest
import typer
from pages import ROOT, anchors, blocks, items, links, pages, programs

from totalreduce.cli.main import build

PAGES = pages()
SHELL = ("sh", "bash")
CODE = {"python", "text", "toml", "json", "yaml", *SHELL}


def test_all_pages_are_looked_at():
    assert len(PAGES) > 80
    assert sum(len(programs(page)) for page in PAGES) > 20


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page):
    for link in links(page):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            assert target.startswith("https://"), link
            continue
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target)) if target else page
        assert (ROOT / path).exists(), f"{page}: no such file: {link}"
        if anchor:
            assert anchor in anchors(path), f"{page}: no such heading: {link}"


#: The most bytes of a page, by the kind that the navigation of the site gives it.
HOW_TO, OTHER, ARCHITECTURE = 8192, 16 * 1024, 15 * 1024
ITEM = 400


def pages_of(kind):
    """The pages that ``mkdocs.yml`` has in one part of the navigation."""
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    [part] = re.findall(rf"^  - {kind}:\n((?:   .*\n)+)", navigation, re.MULTILINE)
    return {f"docs/{page}" for page in re.findall(r"([\w/-]+\.md)$", part, re.MULTILINE)}


def test_pages_for_doing_something_are_short():
    sizes = {page: (ROOT / page).stat().st_size for page in pages_of("How to") - {"docs/examples/index.md"}}
    assert len(sizes) > 40
    assert {page: size for page, size in sizes.items() if size > HOW_TO} == {}


def test_only_the_reference_and_the_results_are_long():
    sizes = {str(path.relative_to(ROOT)): path.stat().st_size for path in (ROOT / "docs").glob("*.md")}
    assert {page: size for page, size in sizes.items() if size > OTHER} == {}


def test_the_architecture_is_a_map():
    assert (ROOT / "ARCHITECTURE.md").stat().st_size <= ARCHITECTURE


LISTS = re.compile(r"docs/(results/|reference/(?!commands)|[^/]*$)")


@pytest.mark.parametrize("page", [page for page in PAGES if LISTS.match(page)])
def test_items_of_lists_are_short(page):
    """Those of design pages and of the commands' page, which the commands' texts make, are not looked at."""
    assert [item for item in items(page) if len(item) > ITEM] == []


#: What a reader of README's first screen may have, and the page or section to which its row leads.
WAYS_IN = {
    "a DDP script on a slow network": "#ddp-on-a-slow-network",
    "a script for Horovod": "docs/horovod.md",
    "Lightning, Accelerate or Trainer": "docs/frameworks.md#lightning",
    "machines at home, or a VPN": "docs/where.md#home-networks-and-vpns",
    "spot machines": "docs/where.md#spot-machines",
    "Slurm": "docs/slurm.md",
    "Kubernetes": "docs/kubernetes.md",
    "Docker, or a firewall": "docs/where.md#docker",
    "a notebook, Colab": "docs/where.md#colab-and-notebooks",
    "GPUs": "docs/gpu.md",
    "Windows, macOS": "docs/platforms.md",
    "Arm (aarch64)": "docs/platforms.md#arm",
}
FIRST_SCREEN = 50


def test_the_first_screen_has_every_way_in():
    """Twelve kinds of reader find a link; test_links_lead_to_files_and_headings says that it leads somewhere."""
    screen = (ROOT / "README.md").read_text().partition("\n## ")[0]
    assert len(screen.splitlines()) <= FIRST_SCREEN
    rows = dict(re.findall(r"^\| ([^|]+) \| [^|]*?\]\(([^)]+)\)[^|]*\|$", screen, re.MULTILINE))
    assert rows == WAYS_IN


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/")])
def test_links_lead_to_pages_of_the_site(page):
    """The site has pages for docs, examples and the files at the top; make docs stops at other links."""
    for link in links(page):
        target = link.partition("#")[0]
        if target and not re.match(r"[a-z]+:", target):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
            assert path.partition("/")[0] in ("docs", "examples") or "/" not in path, link


def test_errors_and_docstrings_name_pages_and_headings_that_are_there():
    """They write ``docs/where.md``, or ``docs/where.md, 'Firewalls and ports'`` for a heading."""
    named = {
        found
        for folder in ("src", "benchmarks", "examples", "tools")
        for path in (ROOT / folder).rglob("*.py")
        for found in re.findall(r"(docs/[\w/-]+\.md)(?:, (?:'([^']+)'|([A-Z]\w+)\)))?", path.read_text())
    }
    assert len(named) > 15
    for page, *headings in named:
        assert (ROOT / page).is_file(), page
        for heading in filter(None, headings):
            assert heading.lower().replace(" ", "-") in anchors(page), (page, heading)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_say_their_language(page):
    for block in blocks(page):
        assert block.language in CODE, f"{block}: {block.language!r}"


def test_parts_of_files_are_parts_of_files():
    shown = [block for page in PAGES for block in blocks(page) if block.note and block.note[0] == "from"]
    for block in shown:
        assert block.source in (ROOT / block.note[1]).read_text(), f"{block} is no part of {block.note[1]}"
    assert {block.note[1] for block in shown} >= {
        *(f"examples/torch_{name}.py" for name in ("ddp", "fsdp", "fsdp_recovery")),
        *(f"examples/{name}_fit.py" for name in ("lightning", "accelerate", "ray", "transformers")),
        "examples/rabit_kmeans.py",
    }


def test_no_block_is_left_out_for_other_reasons():
    notes = [block.note for page in PAGES for block in blocks(page) if block.note]
    assert sorted(reason for kind, reason in notes if kind == "not run") == [
        "it needs a GPU",
        "it needs a GPU for each rank",
        "it needs a second machine",
        "it needs tensorboard",
        "it needs wandb",
        "the tests run in an environment that has the package",
    ]


def command_lines(source):
    """The words of each command line, without variables, comments and other commands before it."""
    for line in re.sub(r" *\\\n *", " ", source).splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        words = words[: next((place for place, word in enumerate(words) if word in (">", "|", "&&")), None)]
        if "totalreduce" in words:
            yield words[words.index("totalreduce") + 1 :]
        elif "make" in words[:1]:
            yield words


def check_command(command, words):
    """Parse a command line as the program does, but do not run it."""
    context = typer.Context(command, info_name="totalreduce")
    if words == ["--version"]:
        return
    while hasattr(command, "commands"):
        name, *words = words
        assert name in command.commands, f"no command {name}"
        command = command.commands[name]
        context = command.make_context(name, list(words), parent=context, resilient_parsing=False)
        words = [*context._protected_args, *context.args] if hasattr(command, "commands") else []


@pytest.mark.parametrize("page", PAGES)
def test_command_lines_are_understood(page):
    command = typer.main.get_command(build())
    for block in blocks(page):
        if block.language not in SHELL:
            continue
        for words in command_lines(block.source):
            if words[:1] == ["make"]:
                targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
                assert {word for word in words[1:2] if "=" not in word} <= targets, f"{block}: {words}"
                continue
            try:
                check_command(command, words)
            except typer.Exit:
                pass
            except Exception as error:
                pytest.fail(f"{block}: totalreduce {shlex.join(words)}: {error}")


@pytest.mark.parametrize("page", PAGES)
def test_examples_that_are_named_are_there(page):
    text = (ROOT / page).read_text()
    for name in re.findall(r"(?<![\w/])examples/[\w./]*\w", text):
        assert (ROOT / name).exists(), f"{page}: {name}"


def test_every_library_that_is_tested_is_in_the_table():
    table = (ROOT / "docs/reference/tested-with.md").read_text()
    rows = re.findall(r"^\| ([^|]+?) \| ([\w-]+) [^|]*\| ([\w* ]+?) \|", table, re.MULTILINE)
    marked = {
        found
        for path in (ROOT / "tests" / "processes").glob("test_*.py")
        for found in re.findall(r"(?:tested_with|row)\(\"([^\"]+)\", \"([^\"]+)\"\)", path.read_text())
    }
    assert {row[:2] for row in rows[1:]} == marked
    assert {row[2] for row in rows[1:]} == {"passed"}


def test_no_page_says_that_nothing_was_run_on_a_gpu():
    """docs/gpu.md says what was measured there."""
    words = re.compile(r"\b(not|nothing|never|no|yet)\b[^.|]{0,60}\b(on a (real )?GPU|seen a GPU)\b", re.IGNORECASE)
    assert [page for page in PAGES if page != "CHANGELOG.md" and words.search((ROOT / page).read_text())] == []
