"""The search of the site divides pages into words where code does."""

import re

from pages import ROOT


def test_names_in_code_are_words_of_their_own():
    """A call, an attribute, an index or a quoted word is found by its name; numbers of versions stay whole."""
    [separator] = re.findall(r"^      separator: '(.*)'$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    text = """`tr.init("auto")` group.allreduce(tensor) state['epoch'] sync=tr.OkTopk &lt;name&gt; torch 2.13, """
    text += "local_steps"
    words = [word for word in re.split(separator.replace("''", "'"), text) if word]
    assert words == [
        "tr",
        "init",
        "auto",
        "group",
        "allreduce",
        "tensor",
        "state",
        "epoch",
        "sync",
        "tr",
        "OkTopk",
        "name",
        "torch",
        "2.13",
        "local_steps",
    ]
