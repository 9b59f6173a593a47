"""What `make docs` does beyond mkdocs: search passes over the project's own pages, and programs that read documentation
find each page as Markdown, beside its HTML, and a list of them in llms.txt."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_COMMENT = re.compile(r"<!--.*?-->\n*", re.DOTALL)  # of the pages' tests
_pages: dict[str, tuple[str, str]] = {}  # address: title, and Markdown


def on_page_markdown(markdown: str, page: Any, **_: Any) -> None:
    if page.file.src_uri.startswith("project/"):
        page.meta["search"] = {"exclude": True}
    _pages[page.file.src_uri] = page.title, _COMMENT.sub("", markdown)


def on_post_build(config: Any, **_: Any) -> None:
    site = Path(config["site_dir"])
    for address, (_title, markdown) in _pages.items():
        path = site / address
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(markdown)
    (site / "llms.txt").write_text(listed(config["site_name"], config["site_description"], config["nav"]))


def listed(name: str, description: str, nav: list[Any]) -> str:
    """The pages in the navigation's order, in the format of https://llmstxt.org."""
    lines = [f"# {name}", "", f"> {description}"]
    for entry in nav:
        if isinstance(entry, dict):
            ((heading, pages),) = entry.items()
            lines += ["", f"## {heading}", ""]
            for address in addresses(pages):
                lines.append(f"- [{_pages[address][0]}]({address})")
    return "\n".join(lines) + "\n"


def addresses(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [address for item in (entry.values() if isinstance(entry, dict) else entry) for address in addresses(item)]
