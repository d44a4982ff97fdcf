"""The pages of the documentation, read by a parser of Markdown: their code blocks, links and headings.

A comment above a block says what the tests do with it:

``<!-- from FILE -->``: it is a part of a file that other tests run.
``<!-- ranks: N -->``: it needs N ranks. Without this comment a program runs on two.
``<!-- not run: REASON -->``: it cannot run here.
``<!-- needs: root -->``: it runs alone, and only for root.
``<!-- file: NAME -->``: the reader saves it under this name.
``<!-- output -->``: the block before prints it.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
_NOTE = re.compile(r"<!-- (from|file|output|ranks|needs|not run):? ?(.*) -->")


@dataclass(frozen=True)
class Block:
    """A code block. ``line`` is the number of its first line of code, ``note`` the comment above it."""

    page: str
    line: int
    language: str
    source: str
    note: tuple[str, str] | None

    def __str__(self):
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Program:
    """Blocks that are run one after the other: a block that begins with an import, and those that follow it."""

    blocks: tuple[Block, ...]

    def __str__(self):
        return str(self.blocks[0])

    @property
    def ranks(self):
        return int(self.blocks[0].note[1]) if self.kind == "ranks" else 2

    @property
    def kind(self):
        return self.blocks[0].note[0] if self.blocks[0].note else ""

    @property
    def source(self):
        """The program, with every line of code at the line that it has in the page."""
        lines = []
        for block in self.blocks:
            lines += [""] * (block.line - 1 - len(lines))
            lines += block.source.splitlines()
        return "\n".join(lines) + "\n"


def pages():
    """Paths of all pages, relative to the repository."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(str(path.relative_to(ROOT)) for path in found)


@cache
def tokens(page):
    return MarkdownIt("commonmark").enable("table").parse((ROOT / page).read_text())


def blocks(page):
    """The code blocks of a page, in their order."""
    found, note = [], None
    for token in tokens(page):
        if token.type == "html_block":
            match = _NOTE.fullmatch(token.content.strip())
            note = (match[1], match[2]) if match else None
        elif token.type == "fence":
            language = token.info.split()[0] if token.info else ""
            found.append(Block(page, token.map[0] + 2, language, token.content, note))
            note = None
        elif token.nesting >= 0:
            note = None
    return found


def programs(page):
    """The programs of a page that are not parts of files."""
    found = []
    for block in blocks(page):
        if block.language != "python" or (block.note and block.note[0] == "from"):
            continue
        if re.match(r"import |from ", block.source):
            found.append([block])
        else:
            assert found, f"{block}: the first block of a page begins with its imports"
            found[-1].append(block)
    return [Program(tuple(parts)) for parts in found]


def _text(inline):
    return "".join(child.content for child in inline.children if child.type in ("text", "code_inline"))


def anchors(page):
    """The anchors of a page's headings, as forges and the site make them."""
    found = []
    for token, inline in zip(tokens(page), tokens(page)[1:], strict=False):
        if token.type == "heading_open":
            slug = re.sub(r"[^\w\- ]", "", _text(inline).lower()).strip().replace(" ", "-")
            found.append(slug)
    return set(found)


def quoted(text):
    """A text as code, as tables of the pages have the lines of errors."""
    return f"`{text}`"


def table_below(page, heading):
    """The rows of the first table below a heading, without its head: the Markdown of each cell."""
    found, below = [], False
    for token, inline in zip(tokens(page), tokens(page)[1:], strict=False):
        if token.type == "heading_open":
            below = below or inline.content == heading
        elif below and token.type == "tr_open":
            found.append(())
        elif below and token.type == "td_open":
            found[-1] += (inline.content,)
        elif below and token.type == "table_close":
            break
    return [row for row in found if row]


def items(page):
    """The texts of a page's list items as a reader sees them, without the code blocks in them."""
    found, open_items = [], []
    for token in tokens(page):
        if token.type == "list_item_open":
            open_items.append([])
            found.append(open_items[-1])
        elif token.type == "list_item_close":
            open_items.pop()
        elif token.type == "inline" and open_items:
            open_items[-1].append(_text(token))
    return [" ".join(parts) for parts in found]


def links(page):
    """The targets of a page's links and pictures."""
    found = []
    for token in tokens(page):
        for child in token.children or ():
            if child.type in ("link_open", "image"):
                found.append(child.attrs.get("href") or child.attrs["src"])
    return found
