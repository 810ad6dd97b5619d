"""Build the documentation site from the pages of the repository: `python -m tools.docs_site [DIRECTORY]`.

The pages keep their places in the repository, so a link that works in an editor works on the site. Files that they
link to, such as examples, are copied beside them. A link or an anchor that leads nowhere, a page that the navigation
does not name, and a name of the API that does not exist end the build with status 1.
"""

from __future__ import annotations

import logging
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/RESULTS.md", "benchmarks/history.md", "docs"),
    "examples/README.md",
)
"""Pages, and directories whose files are all of the site."""
BOOSTS = {
    "docs/recovery.md": 4,
    "docs/checkpoints.md": 2,
    "docs/models.md": 2,
    "docs/config.md": 0.1,
    "docs/api.md": 0.1,
}
"""How much the search prefers a page: guides come before lists that have every word."""
_LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")


def gather(target: Path, root: Path = ROOT) -> list[Path]:
    """Copy the pages, and the files that they link to, below `target`. Return their paths in the repository."""
    places = [root / name for name in PAGES]
    files = {file for place in places for file in (place.rglob("*") if place.is_dir() else [place]) if file.is_file()}
    for page in [file for file in files if file.suffix == ".md"]:
        linked = [(page.parent / link).resolve() for link in _LINK.findall(page.read_text()) if "://" not in link]
        files |= {file for file in linked if file.is_file() and file.suffix != ".md" and root in file.parents}
    for file in files:
        copy = target / file.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    for name, boost in BOOSTS.items():
        page = target / name
        page.write_text(f"---\nsearch: {{boost: {boost}}}\n---\n{page.read_text()}")
    return sorted(file.relative_to(root) for file in files)


def build_site(pages: Path, site: Path) -> None:
    """Build the site of the gathered `pages` in the directory `site`.

    Raises:
        mkdocs.exceptions.Abort: something is wrong with a page; the log says what.
    """
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    config = load_config(str(ROOT / "mkdocs.yml"), docs_dir=str(pages), site_dir=str(site))
    config.plugins.on_startup(command="build", dirty=False)
    try:
        build(config)
    finally:
        config.plugins.on_shutdown()


def main() -> int:
    from mkdocs.exceptions import Abort

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    site = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build/site").resolve()
    pages = ROOT / "build/pages"
    shutil.rmtree(pages, ignore_errors=True)
    gather(pages)
    try:
        build_site(pages, site)
    except Abort as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    print(f"{site}: to look at it, python -m http.server --directory {site}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
