"""README and docs are true where a machine can tell: every block of Python in them runs, and prints what is below it;
commands and files that they name are there; and the tables that must be complete are."""

from __future__ import annotations

import importlib.util
import inspect
import re
import time
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed import fsdp
from torch.distributed.fsdp import fully_sharded_data_parallel

import fsdp_compose
from fsdp_compose import drop_in
from fsdp_compose.__main__ import COMMANDS
from fsdp_compose.testing import preload
from tests.harness import ROOT, end, start_forked
from tests.whole import pages
from tests.whole.pages import Page, Section, read

preload("fsdp_compose")
preload("tests.whole.pages")

PAGES = [read(path) for path in pages.all_pages()]
REFERENCE = ROOT / "docs/reference"  # signatures and short examples from docstrings, which are not programs
BY_PAGE = {str(page.path.relative_to(ROOT)): page for page in PAGES if page.sections and page.path.parent != REFERENCE}
PROSE = [page.path for page in PAGES if page.path.parent != REFERENCE]
CASES = (ROOT / "docs/project/cases.md").read_text()
TIMEOUT = 60  # seconds for the blocks of a section
FRAGMENTS = {
    ("README.md", "needs a GPU for each process"),
    ("docs/elastic.md", "needs torchft; tests_integration/test_elastic.py runs examples/elastic.py, which has it"),
    ("docs/elastic.md", "needs torchft; tests_integration/test_local_sgd.py runs it, and what is said below"),
    ("docs/gpus_and_nodes.md", "needs a GPU for each process"),
    ("docs/howto/frameworks.md", "needs torchtitan"),
    ("docs/howto/frameworks.md", "needs Lightning"),
    ("docs/howto/frameworks.md", "needs Ray"),
    ("docs/meshes.md", "torch's context_parallel needs the attention kernels of an accelerator"),
}
"""Blocks that are not run, by page and reason. tests_integration has the programs with frameworks."""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", BY_PAGE)
def test_the_code_of_a_page_runs(name: str, tmp_path: Path):
    for section in BY_PAGE[name].sections:
        run_section(section, tmp_path)


def run_section(section: Section, folder: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    outputs = [folder / f"output.{rank}" for rank in range(max(section.ranks, 1))]
    ranks = [
        start_forked(output, pages.run, rank, section, str(folder), store.port) for rank, output in enumerate(outputs)
    ]
    try:
        pending = {process.sentinel: process for process in ranks}
        deadline = time.monotonic() + TIMEOUT
        while pending and (ended := wait([*pending], max(0.0, deadline - time.monotonic()))):
            for sentinel in ended:
                process = pending.pop(sentinel)  # type: ignore[arg-type]
                process.join()
                if process.exitcode:
                    deadline = min(deadline, time.monotonic() + 2)  # for the others to fail in their own words
        codes = [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            end(process)
    said = "\n".join(output.read_text(errors="replace") for output in outputs)
    assert codes == [0] * len(codes), f"{section}: exit codes {codes}, None for a rank that did not end\n{said}"


def test_blocks_that_do_not_run_are_few_and_known():
    found = {
        (str(page.path.relative_to(ROOT)), block.fragment) for page in PAGES for block in page.blocks if block.fragment
    }
    assert found == FRAGMENTS
    assert len(FRAGMENTS) <= 8


def test_every_block_says_what_it_is():
    for page in PAGES:
        for block in page.blocks:
            assert block.language in ("python", "sh", "text"), f"{page.path}:{block.line}: {block.language!r}"


def sources_of(page: Page) -> str:
    return page.path.read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.path.relative_to(ROOT)))
def test_commands_and_files_that_a_page_names_are_there(page: Page):
    text = sources_of(page)
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = re.findall(r"(?:^|`)make ([a-z][a-z-]*)", text, re.MULTILINE)
    assert set(commands) <= targets, f"no such target in the Makefile: {set(commands) - targets}"
    asked = set(re.findall(r"python -m fsdp_compose ([a-z]+)", text))
    assert asked <= COMMANDS.keys(), f"no such command: {asked - COMMANDS.keys()}"
    named = re.findall(r"\b((?:benchmarks|examples|tests|tests_integration|fsdp_compose)/[\w/]+\.(?:py|txt))", text)
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing, f"no such files: {missing}"


def test_the_reference_has_every_public_name():
    text = "".join(page.read_text() for page in REFERENCE.glob("*.md"))
    documented = {name.split(".")[-1] for name in re.findall(r'^<a id="([\w.]+)"></a>$', text, re.MULTILINE)}
    missing = {*fsdp_compose.__all__, *fsdp_compose.checkpoint.__all__} - documented
    assert not missing, f"docs/reference has nothing about {sorted(missing)}"
    index = (REFERENCE / "index.md").read_text()
    unlisted = [name for name in fsdp_compose.__all__ if f"`{name}`" not in index]
    assert not unlisted, f"docs/reference/index.md does not list {unlisted}"


def test_environment_md_has_the_switches_that_the_package_reads():
    read_by_it = set()
    for path in (ROOT / "fsdp_compose").rglob("*.py"):
        read_by_it |= set(re.findall(r"FSDP_COMPOSE_[A-Z0-9_]*[A-Z0-9]", path.read_text()))
    page = (ROOT / "docs/environment.md").read_text()
    assert set(re.findall(r"^\| `(FSDP_COMPOSE_[A-Z0-9_]+)", page, re.MULTILINE)) == read_by_it


def test_files_md_has_every_file_of_the_package():
    package = ROOT / "fsdp_compose"
    files = {str(path.relative_to(package)) for path in package.rglob("*.py") if path.name != "__init__.py"}
    assert set(re.findall(r"^\| `(\S+\.py)`", (ROOT / "docs/project/files.md").read_text(), re.MULTILINE)) == files


def test_design_md_names_tests_and_files_that_there_are():
    text = (ROOT / "docs/project/design.md").read_text()
    tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    missing = set(re.findall(r"`(test_\w+\.py)`", text)) - tests
    wings = re.findall(r"`((?:core|optim|checkpoint|sync|inspect|tuning|drop_in)/[\w/]+\.py)`", text)
    missing |= {name for name in wings if not (ROOT / "fsdp_compose" / name).exists()}
    assert len(wings) > 20 and not missing, f"no such files: {missing}"
    assert len(text.split()) <= 2800


PLACE = "gpus_and_nodes.md#what-has-run-on-gpus"
DEVICE = re.compile(r"\b(GPUs?|NCCL|CUDA|[AHB][12]00|accelerators?)\b")
CLAIM = re.compile(r"\b((un)?tried|(un)?tested|measured|(has|have|was|were|never|not) (been )?r[au]n|pass(es|ed)?)\b")


def paragraphs(page: Path) -> list[str]:
    """The paragraphs of a page, without its code. Each item of a list and each row of a table counts as one."""
    text = re.sub(r"<!--.*?-->|^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n|\n(?=[-|#])", text) if part.strip()]


def test_one_place_says_what_has_run_on_gpus():
    """All others have a link to it beside what they say."""
    place = ROOT / "docs" / PLACE.partition("#")[0]
    section = place.read_text().partition("## What has run on GPUs\n")[2].partition("\n## ")[0]
    assert "H200" in section and "never several GPUs" in section
    pages = [path for path in (*PROSE, ROOT / "CONTRIBUTING.md") if path.name != "changelog.md"]
    found = []
    for path in pages:
        for paragraph in paragraphs(path):
            sentences = [] if paragraph.startswith("#") else re.split(r"(?<=[.!?]) ", paragraph)
            claims = any(DEVICE.search(sentence) and CLAIM.search(sentence) for sentence in sentences)
            is_there = path == place and " ".join(section.split()).find(paragraph) >= 0
            if (claims or "untried" in paragraph) and PLACE not in paragraph and not is_there:
                found.append(f"{path.relative_to(ROOT)}: {paragraph[:200]}")
    assert not found, f"say it in docs/{PLACE}, and give the link: {found}"


def test_every_figure_of_the_readme_says_how_it_was_measured():
    """What it is compared with FSDP2 on, when, and by which command: in its paragraph or row, or by a link."""
    rows, prose = [], []
    for paragraph in paragraphs(ROOT / "README.md"):
        if re.search(r"\b[01]\.\d\d\d?\b", paragraph) and "FSDP2" in paragraph + "FSDP2" * paragraph.startswith("|"):
            (rows if paragraph.startswith("|") else prose).append(paragraph)
    assert len(rows) >= 6 and len(prose) >= 2
    for row in rows:
        assert re.search(r"\| 20\d\d-\d\d-\d\d \| `\S*python benchmarks/\w+\.py", row), row
    for paragraph in prose:
        states = [r"H200|CPU cores", r"torch", r"20\d\d-\d\d-\d\d|\(#measured\)", r"benchmarks/\w+\.py|\(#measured\)"]
        assert all(re.search(state, paragraph) for state in states), paragraph


def pages_linked_from(page: Path) -> set[Path]:
    found = re.findall(r"\]\(([^)#:\s]+\.md)", page.read_text())
    return {(page.parent / target).resolve() for target in found}


def test_every_page_is_at_most_two_clicks_from_the_readme():
    near = pages_linked_from(ROOT / "README.md")
    reached = near.union(*map(pages_linked_from, near))
    far = [path for path in PROSE if path.resolve() not in reached | {ROOT / "README.md"}]
    assert not far, f"link these in docs/index.md: {far}"


def test_figures_on_the_pages_of_users_say_how_they_were_measured():
    """By the command, or by a link to the lab book, which has machine, torch and command of each."""
    figure = re.compile(r"\b\d[\d.,]* (ms|us|µs)\b|\b0\.\d+ (to 0\.\d+ )?of (FSDP2|DDP)'s|\b\d+ s of CPU\b")
    measured = re.compile(r"project/\w+\.md|benchmarks/\w+\.py|make faults")
    users = [path for path in PROSE if path.parent.name in ("docs", "howto")]
    texts = [(path, text) for path in users for text in paragraphs(path) if text[0] != "|" and figure.search(text)]
    assert len(texts) >= 5
    missing = [f"{path.relative_to(ROOT)}: {text[:150]}" for path, text in texts if not measured.search(text)]
    assert not missing


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_links_from_outside_the_site_lead_somewhere(name: str):
    """mkdocs checks those inside."""
    links = re.findall(r"\]\(([\w/.]*)(?:#([\w.-]+))?\)", (ROOT / name).read_text())
    assert len(links) >= 2
    for target, anchor in links:
        path = ROOT / (target or name)
        assert path.exists(), f"{name} links {target}"
        headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE) if anchor else []
        anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors, f"{name} links {target}#{anchor}"


def test_the_citation_is_of_this_version():
    assert f"\nversion: {fsdp_compose.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_compared_md_counts_the_cases():
    rows = re.findall(
        r"^\| (?!case)(?:.*?) \| (.*?) \| (.*) \|$", CASES.partition("## torch's own tests")[0], re.MULTILINE
    )
    wrong = sum("**wrong, silently**" in theirs for theirs, _ in rows)
    text = " ".join((ROOT / "docs/compared.md").read_text().split())
    assert f"runs {len(rows)} small programs" in text and f"FSDP2 got {wrong} of them wrong without an error" in text
    assert not any("**wrong" in ours for _, ours in rows) and "here none were" in text


def test_contributing_names_folders_and_wings_that_there_are():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    tables = [line.split("|")[1] for line in text.partition("## What is where")[2].splitlines() if line.startswith("|")]
    named = {name for cell in tables for name in re.findall(r"`([\w./]+)`", cell)}
    wings = {
        name
        for name in named
        if (ROOT / "fsdp_compose" / name).exists() or (ROOT / "fsdp_compose" / f"{name}.py").exists()
    }
    missing = {name for name in named - wings if not (ROOT / name).exists()}
    assert not missing, f"CONTRIBUTING.md names what is not there: {missing}"
    inits = (ROOT / "fsdp_compose").glob("*/**/__init__.py")
    folders = {f"{path.parent.relative_to(ROOT / 'fsdp_compose')}/" for path in inits if path.parent.name != "ops"}
    assert folders <= named, f"CONTRIBUTING.md does not name {folders - named}"
    examples = {path.name for path in (ROOT / "examples").glob("*.py")}
    listed = (ROOT / "docs/examples.md").read_text()
    assert not {name for name in examples if f"examples/{name}" not in listed}


def test_the_site_links_names_to_the_reference_and_lists_pages_for_programs():
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs/generator/site.py")
    assert spec is not None and spec.loader is not None
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    names = ("plan", "Trace.save", "checkpoint.save")
    content = "\n".join(f'<a id="fsdp_compose.{name}"></a>' for name in names)
    reference = SimpleNamespace(src_uri="reference/all.md", content_string=content)
    site.on_files(SimpleNamespace(documentation_pages=lambda: [reference]))
    text = "# `plan`\n\n`plan()`, then `plan`, `save` and `other`; [`save`](x.md)\n\n```python\n`plan`\n```\n"
    assert site.linked(text, "howto/page.md") == (
        "# `plan`\n\n[`plan()`](../reference/all.md#fsdp_compose.plan), then `plan`, "
        "[`save`](../reference/all.md#fsdp_compose.checkpoint.save) and `other`; [`save`](x.md)\n\n"
        "```python\n`plan`\n```\n"
    )
    entry = "## `save(...)`\n\n`save` and `plan`\n"
    assert site.linked(entry, "reference/all.md") == "## `save(...)`\n\n`save` and [`plan`](#fsdp_compose.plan)\n"
    page = SimpleNamespace(file=SimpleNamespace(src_uri="howto/page.md"))
    code = '<span class="n">torch</span><span class="o">.</span><span class="n">save</span> <span class="n">plan</span>'
    plan = '<a href="../reference/all.html#fsdp_compose.plan"><span class="n">plan</span></a>'
    assert site.on_page_content(code, page=page) == code.replace('<span class="n">plan</span>', plan)
    for address in ("index.md", "project/design.md"):
        page = SimpleNamespace(title=address[:-3], file=SimpleNamespace(src_uri=address), meta={})
        site.on_page_markdown("<!-- ranks: 2 -->\n\n# A page\n", page=page)
        assert page.meta == ({"search": {"exclude": True}} if "project" in address else {})
    made = site.listed("name", "what it is", [{"Home": "index.md"}, {"Project": [{"Design": "project/design.md"}]}])
    assert made == (
        "# name\n\n> what it is\n\n## Home\n\n- [index](index.md)\n\n"
        "## Project\n\n- [project/design](project/design.md)\n"
    )


def test_from_fsdp2_md_has_every_name_argument_and_method_of_torch():
    rows = set(re.findall(r"^\| `(\w+)`", (ROOT / "docs/howto/from_fsdp2.md").read_text(), re.MULTILINE))
    names = {name for name in fsdp.__all__ if not hasattr(fully_sharded_data_parallel, name)}
    arguments = set(inspect.signature(fsdp.fully_shard).parameters)
    methods = {name for name in vars(fsdp.FSDPModule) if not name.startswith("_")}
    ours = {name for name in vars(drop_in.FSDPModule) if not name.startswith("_")}
    missing = (names | arguments | methods | ours) - rows
    assert len(names) >= 9 and len(methods) >= 23, "torch's names are found otherwise now"
    assert not missing, f"docs/howto/from_fsdp2.md has no row for {sorted(missing)}"


def test_from_fsdp2_md_names_functions_that_there_are():
    text = (ROOT / "docs/howto/from_fsdp2.md").read_text()
    for named in re.findall(r"^\| `(\w+)`[^|]*\| the same", text, re.MULTILINE):
        assert named in fsdp_compose.__all__ or named in inspect.signature(fsdp_compose.fully_shard).parameters, named
