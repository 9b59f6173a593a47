"""What `make docs` does beyond mkdocs: names of the package link to the reference, in prose and in code, search passes
over the project's own pages, and programs that read documentation find each page as Markdown beside its HTML, and all
pages in llms.txt.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

_COMMENT = re.compile(r"<!--.*?-->\n*", re.DOTALL)  # of the pages' tests
_KEPT = re.compile(r"^```.*?^```|<!--.*?-->|^#[^\n]*$|\[[^\]]*\]\([^)]*\)|``[^`]+``", re.DOTALL | re.MULTILINE)
_NAME = re.compile(r"`([\w.]+)(\([^`]*\))?`")
_IN_CODE = re.compile(r'(?<!<span class="o">\.</span>)<span class="(?:n|nf|nc)">(\w+)</span>')  # no `torch.save`
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
    """The page, in which the first mention of a name in prose is a link to the reference; on the reference's own pages
    the first one in an entry."""
    seen: set[str] = set()

    def link(found: re.Match[str]) -> str:
        target = _anchors.get(found[1], "")
        if not target or target in seen:
            return found[0]
        seen.add(target)
        return f"[{found[0]}]({from_page(target, address)})"

    made, end = "", 0
    for kept in _KEPT.finditer(markdown):
        made += _NAME.sub(link, markdown[end : kept.start()]) + kept[0]
        end = kept.end()
        if address.startswith("reference/") and kept[0].startswith("#"):
            seen = {_anchors.get(name, "") for name, _ in _NAME.findall(kept[0])}  # what it describes
    return made + _NAME.sub(link, markdown[end:])


def from_page(target: str, address: str) -> str:
    page, _, anchor = target.partition("#")
    return f"#{anchor}" if page == address else os.path.relpath(target, os.path.dirname(address) or ".")


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Links the names in blocks of code and signatures."""
    address = page.file.src_uri

    def link(found: re.Match[str]) -> str:
        if found[1] not in _anchors:
            return found[0]
        place = from_page(_anchors[found[1]], address).replace(".md#", ".html#")
        return f'<a href="{place}">{found[0]}</a>'

    return _IN_CODE.sub(link, html)


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
