"""Take pictures of pages of the documentation site in a headless Chromium: light and dark, wide and narrow.

``make docs-look`` builds the site in ``build/site`` and runs this. The pictures lie in ``build/look``. The command
fails if a page is wider than its window, or if it asks for anything outside of the site.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).parents[1]
#: Pages of each kind: prose with a table, a tutorial, a how-to with many tables, pictures, the reference, a drawing.
PAGES = ("index", "tutorial", "planning", "explanation", "reference/training", "architecture")
#: Width and height of the windows in pixels: of a laptop and of a telephone.
WINDOWS = {"wide": (1400, 900), "narrow": (390, 844)}
#: A page is cut off after so many heights of the window.
_HEIGHTS = 6
_PATIENCE_S = 120.0


def main(arguments: list[str]) -> int:
    """Take the pictures; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=Path, default=ROOT / "build" / "site", help="the built site")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "look", help="the folder for the pictures")
    parser.add_argument("pages", nargs="*", default=PAGES, help="as tutorial or reference/training")
    options = parser.parse_args(arguments)
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        print("no Chromium on PATH (package chromium)", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    problems: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for page in options.pages:
            for window in WINDOWS:
                for scheme in ("light", "dark"):
                    problems += _look(browser, options.site, page, window, scheme, options.out)
        browser.close()
    print("\n".join(problems or [f"{len(list(options.out.glob('*.png')))} pictures in {options.out}"]))
    return 1 if problems else 0


def _look(browser: Browser, site: Path, name: str, window: str, scheme: str, out: Path) -> list[str]:
    """Take the picture of a page; return what is wrong with it."""
    width, height = WINDOWS[window]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
    context.set_default_timeout(1000 * _PATIENCE_S)
    tab = context.new_page()
    problems: list[str] = []
    what = f"{name}, {window}, {scheme}"
    tab.on("pageerror", lambda error: problems.append(f"{what}: {error}"))
    tab.on(
        "request",
        lambda request: problems.append(f"{what} asks for {request.url}") if request.url.startswith("http") else None,
    )
    tab.goto((site / f"{name}.html").as_uri())
    tab.wait_for_load_state("networkidle")
    wide = tab.evaluate("document.documentElement.scrollWidth")
    if wide > width:
        problems.append(f"{what}: {wide} pixels wide in a window of {width}")
    length = min(tab.evaluate("document.documentElement.scrollHeight"), _HEIGHTS * height)
    picture = out / f"{name.replace('/', '-')}-{window}-{scheme}.png"
    tab.screenshot(path=picture, full_page=True, clip={"x": 0, "y": 0, "width": width, "height": length})
    context.close()
    return problems


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
