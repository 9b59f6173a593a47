"""What `make docs` does beyond mkdocs: names of the package link to the reference, search passes over the project's own
pages, and programs that read documentation find each page as Markdown beside its HTML, and a list of pages in llms.txt.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

_COMMENT = re.compile(r"<!--.*?-->\n*", re.DOTALL)  # of the pages' tests
_KEPT = re.compile(r"^```.*?^```|<!--.*?-->|^#[^\n]*$|\[[^\]]*\]\([^)]*\)|``[^`]+``", re.DOTALL | re.MULTILINE)
_NAME = re.compile(r"`([\w.]+)(\([^`]*\))?`")
_pages: dict[str, tuple[str, str]] = {}  # address: title, and Markdown
_anchors: dict[str, str] = {}  # a name, and its path in the package: the address in the reference


def on_files(files: Any, **_: Any) -> None:
    places = {}
    for file in files.documentation_pages():
        if file.src_uri.startswith("reference/"):
            for path in re.findall(r'^<a id="fsdp_compose\.([\w.]*)"></a>$', file.content_string, re.MULTILINE):
                places[path] = f"{file.src_uri}#fsdp_compose.{path}"
    for path, place in places.items():
        _anchors[path] = _anchors[f"fsdp_compose.{path}"] = place
        short = re.sub(r"^[a-z_]+\.", "", path)  # "save" for "checkpoint.save"
        if short not in places:
            _anchors[short] = place


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    address = page.file.src_uri
    if address.startswith("project/"):
        page.meta["search"] = {"exclude": True}
    _pages[address] = page.title, _COMMENT.sub("", markdown)
    return linked(markdown, address)


def linked(markdown: str, address: str) -> str:
    """The page, in which the first mention of a name in prose is a link to the reference."""
    seen: set[str] = set()

    def link(found: re.Match[str]) -> str:
        target = _anchors.get(found[1], "")
        if not target or target in seen or target.partition("#")[0] == address:
            return found[0]
        seen.add(target)
        return f"[{found[0]}]({os.path.relpath(target, os.path.dirname(address) or '.')})"

    made, end = "", 0
    for kept in _KEPT.finditer(markdown):
        made += _NAME.sub(link, markdown[end : kept.start()]) + kept[0]
        end = kept.end()
    return made + _NAME.sub(link, markdown[end:])


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
