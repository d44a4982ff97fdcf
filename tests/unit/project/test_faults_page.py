"""Every numbered sentence of docs/faults.md has a test, and every number that a test names is on the page."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def numbers_of_tests() -> set[str]:
    """The arguments of all ``pytest.mark.faults`` decorators."""
    found = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "pytest.mark.faults" in text else ():  # parsing all takes two seconds
            if isinstance(node, ast.FunctionDef):
                for decorator in node.decorator_list:
                    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.faults":
                        found |= {ast.literal_eval(argument) for argument in decorator.args}
    return found


def test_numbers_of_the_page_and_of_the_tests_are_the_same() -> None:
    page = (ROOT / "docs" / "faults.md").read_text()
    numbers = re.findall(r"^\| (F\d+) \||\((F\d+)\)(?! has)", page, flags=re.MULTILINE)
    on_page = [row or paragraph for row, paragraph in numbers]
    assert on_page == [f"F{number}" for number in range(1, len(on_page) + 1)]
    assert numbers_of_tests() == set(on_page)


def test_every_row_and_every_paragraph_about_losses_has_a_number() -> None:
    page = (ROOT / "docs" / "faults.md").read_text()
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert all(re.match(r"\| F\d+ \|", line) for line in table[2:])
    assert all(
        re.match(r"\* \(F\d+\)", line) for line in page.split("## What is not")[0].splitlines() if line.startswith("* ")
    )
