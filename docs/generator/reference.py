"""The pages of docs/reference, written from the package's docstrings and signatures: `make reference`.

A page is its own input. Its anchors (``<a id="fsdp_compose.fully_shard"></a>``, each on a line) name what it documents,
in this order; what stands above the first one is written by hand. To add an entry, add its anchor and run this.

It reads the sources and imports nothing, so any Python does, and the installed torch makes no difference. Docstrings
are written for ``help()``: ``Args:``, ``Returns:``, ``Raises:``, ``Yields:`` and ``Attributes:`` begin lists,
``Ranks:`` a paragraph that says which ranks call, and a paragraph that ends in ``::`` is followed by code."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs/reference"
LINE_LENGTH = 100  # of signatures

_ANCHOR = re.compile(r'^<a id="(fsdp_compose[\w.]*)"></a>$', re.MULTILINE)
_NOTICE = "<!-- Below, `make reference` writes what the docstrings say. Edit those, and run it. -->"
_SECTION = re.compile(r"(Args|Returns|Raises|Yields|Attributes):")
_HEADINGS = {"Args": "Arguments"}
_NAMED = re.compile(r"([\w.*]+(?:, [\w.*]+)*):(?:\s+|$)")  # of an item of a section: "a, b: what they are"
_SHOWN_DECORATORS = ("contextmanager", "property")

Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


def main() -> None:
    for path in sorted(PAGES.glob("*.md")):
        text = path.read_text()
        if (made := page_from(text)) != text:
            path.write_text(made)
            print(f"wrote {path.relative_to(ROOT)}")


def page_from(text: str) -> str:
    """The page, with what its anchors name."""
    names = _ANCHOR.findall(text)
    if not names:
        return text
    by_hand = text[: _ANCHOR.search(text).start()].replace(_NOTICE, "").rstrip()  # type: ignore[union-attr]
    return "\n\n".join([by_hand, _NOTICE, *map(entry, names)]) + "\n"


def entry(name: str) -> str:
    """What a page says about ``name``, a path such as "fsdp_compose.Trace.save"."""
    item = find(name)
    parts = [f'<a id="{name}"></a>', f"{'###' if item.owner else '##'} `{item.title}`"]
    docstring = item.docstring
    if not docstring:
        raise SystemExit(f"{name} has no docstring ({item.source.path.relative_to(ROOT)}:{item.node.lineno})")
    if signature := _signature(item, docstring):
        parts.append(f"```python\n{signature}\n```")
    return "\n\n".join([*parts, *as_markdown(docstring)])


# ---- finding what a name means


@dataclass(frozen=True)
class Source:
    path: Path
    text: str
    tree: ast.Module

    def text_of(self, node: ast.expr) -> str:
        """The source of an expression, in one line."""
        return re.sub(r"\s+", " ", ast.get_source_segment(self.text, node) or "")


@dataclass(frozen=True)
class Found:
    source: Source
    node: Definition
    name: str
    owner: str = ""  # the class, of a method
    docstring: str = ""

    @property
    def title(self) -> str:
        return f"{self.owner}.{self.name}" if self.owner else self.name


def find(name: str) -> Found:
    """The definition that ``name`` stands for, through imports from one module of the package to another."""
    names = name.split(".")
    split = len(names)
    while split and _module_file(names[:split]) is None:
        split -= 1
    found = None
    if split == len(names):  # a function may be called like its module: "fsdp_compose.drop_in.install"
        split -= 1
    module, (first, *rest) = names[:split], names[split:]
    source, node = _definition(module, first)
    if not rest:
        found = Found(source, node, first, docstring=_docstring(source.tree.body, node))
    elif isinstance(node, ast.ClassDef) and len(rest) == 1:
        member = _defined_in(node.body, rest[0])
        if member is not None:
            found = Found(source, member, rest[0], first, _docstring(node.body, member))
    if found is None:
        raise SystemExit(f"docs/reference names {'.'.join(module)}.{name}, which is not there")
    return found


def _module_file(names: list[str]) -> Path | None:
    path = ROOT.joinpath(*names)
    candidates = (path / "__init__.py", path.with_suffix(".py"))
    return next((candidate for candidate in candidates if candidate.is_file()), None)


@cache
def _read(path: Path) -> Source:
    text = path.read_text()
    return Source(path, text, ast.parse(text))


def _definition(module: list[str], name: str) -> tuple[Source, Definition]:
    path = _module_file(module)
    if path is not None:
        source = _read(path)
        if (node := _defined_in(source.tree.body, name)) is not None:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
                return _definition(module, node.value.id)  # another name for it
            return source, node
        for imported in ast.walk(source.tree):  # also in "if TYPE_CHECKING:", of what is imported when first used
            if isinstance(imported, ast.ImportFrom):
                for alias in imported.names:
                    if name == (alias.asname or alias.name):
                        return _definition(_imported_module(module, path, imported), alias.name)
    raise SystemExit(f"docs/reference names {'.'.join(module)}.{name}, which is not there")


def _imported_module(module: list[str], path: Path, imported: ast.ImportFrom) -> list[str]:
    inner = imported.module.split(".") if imported.module else []
    if not imported.level:
        return inner
    package = module if path.name == "__init__.py" else module[:-1]
    return [*package[: len(package) - imported.level + 1], *inner]


def _defined_in(body: list[ast.stmt], name: str) -> Definition | None:
    """The last one: the overloads of a function stand before it."""
    return next((node for node in reversed(body) if isinstance(node, Definition) and name in _names(node)), None)


def _names(node: Definition) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _docstring(body: list[ast.stmt], node: Definition) -> str:
    """Return the docstring below a constant."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return ast.get_docstring(node) or ""
    after = body[body.index(node) + 1 :][:1]
    if after and isinstance(after[0], ast.Expr) and isinstance(after[0].value, ast.Constant):
        return inspect.cleandoc(str(after[0].value.value))
    return ""


# ---- signatures


def _signature(item: Found, docstring: str) -> str:
    """The definition as it is called; nothing for classes that users do not build."""
    node, source = item.node, item.source
    if isinstance(node, ast.ClassDef):
        sections = set(_SECTION.findall(docstring))
        fields = _fields(source, node) if sections & {"Args", "Attributes"} else []
        initializer = _defined_in(node.body, "__init__")
        if fields:
            return _laid_out(item.title, fields, "")
        if isinstance(initializer, ast.FunctionDef) and "Args" in sections:
            return _laid_out(item.title, _parameters(source, initializer.args)[1:], "")
        return ""
    if isinstance(node, ast.FunctionDef):
        decorators = [source.text_of(decorator) for decorator in node.decorator_list]
        shown = [f"@{name}\n" for name in decorators if name.split(".")[-1] in _SHOWN_DECORATORS]
        parameters = _parameters(source, node.args)
        if item.owner and "staticmethod" not in decorators:
            parameters = parameters[1:]
        result = "" if node.returns is None else f" -> {source.text_of(node.returns)}"
        return "".join(shown) + _laid_out(item.title, parameters, result)
    start, end = node.lineno - 1, node.end_lineno
    return "\n".join(source.text.splitlines()[start:end])


def _fields(source: Source, node: ast.ClassDef) -> list[str]:
    """The public fields of a dataclass or a NamedTuple, as its constructor takes them."""
    makers = [source.text_of(maker) for maker in (*node.decorator_list, *node.bases)]
    if not any(maker.split("(")[0].split(".")[-1] in ("dataclass", "NamedTuple") for maker in makers):
        return []
    found: dict[bool, list[str]] = {False: [], True: []}
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id[0] != "_":
            options = _field_options(source, field.value)
            default = f" = {options['default']}" if "default" in options else ""
            by_keyword = options.get("kw_only") == "True"
            found[by_keyword].append(f"{field.target.id}: {source.text_of(field.annotation)}{default}")
    return [*found[False], *(["*", *found[True]] if found[True] else [])]


def _field_options(source: Source, value: ast.expr | None) -> dict[str, str]:
    """The arguments of a call of ``dataclasses.field``; a value is the default."""
    if value is None:
        return {}
    if not isinstance(value, ast.Call) or source.text_of(value.func).split(".")[-1] != "field":
        return {"default": source.text_of(value)}
    options = {item.arg: source.text_of(item.value) for item in value.keywords if item.arg}
    if "default_factory" in options:
        options["default"] = f"{options['default_factory']}()"
    return options


def _parameters(source: Source, given: ast.arguments) -> list[str]:
    def text(argument: ast.arg, default: ast.expr | None = None) -> str:
        annotation = "" if argument.annotation is None else f": {source.text_of(argument.annotation)}"
        return argument.arg + annotation + ("" if default is None else f" = {source.text_of(default)}")

    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    made = [text(argument, default) for argument, default in zip(positional, defaults)]
    if given.posonlyargs:
        made.insert(len(given.posonlyargs), "/")
    if given.vararg or given.kwonlyargs:
        made.append("*" + (text(given.vararg) if given.vararg else ""))
    made += [text(argument, default) for argument, default in zip(given.kwonlyargs, given.kw_defaults)]
    return [*made, *(["**" + text(given.kwarg)] if given.kwarg else [])]


def _laid_out(name: str, parameters: list[str], result: str) -> str:
    line = f"{name}({', '.join(parameters)}){result}"
    if len(line) <= LINE_LENGTH:
        return line
    return "\n".join([f"{name}(", *(f"    {parameter}," for parameter in parameters), f"){result}"])


# ---- docstrings


def as_markdown(docstring: str) -> list[str]:
    """The paragraphs of a docstring, as those of a page."""
    made: list[str] = []
    is_code = False
    for part in re.split(r"\n\s*\n", docstring.strip("\n")):
        if is_code and part.startswith("    "):
            code = textwrap.dedent(part)
            if made[-1].endswith("\n```"):  # the code has an empty line in it
                made[-1] = made[-1].removesuffix("\n```") + f"\n\n{code}\n```"
            else:
                made.append(f"```python\n{code}\n```")
            continue
        is_code = part.endswith("::")
        if found := _SECTION.match(part):
            made += _section(found[1], part[found.end() :])
        else:
            made.append(_paragraph(part.removesuffix(":") if is_code else part))
    return [text if text.startswith("```python") else re.sub(r"``([^`]+)``", r"`\1`", text) for text in made]


def _paragraph(text: str) -> str:
    if found := re.match(r"(Ranks|Example):", text):
        return f"**{found[1]}**:" + " ".join(["", *text[found.end() :].split()]).rstrip()
    return text


def _section(heading: str, text: str) -> list[str]:
    """A list with an item for each name; a paragraph for what is returned."""
    heading = _HEADINGS.get(heading, heading)
    text = textwrap.dedent(text.strip("\n"))
    if heading in ("Returns", "Yields"):
        return [f"**{heading}**: " + " ".join(text.split())]
    items = re.split(r"\n(?! )", text)
    return [f"**{heading}**:", "\n".join(f"- {_item(item)}" for item in items)]


def _item(text: str) -> str:
    found = _NAMED.match(text)
    rest = " ".join((text[found.end() :] if found else text).split())
    if found is None:
        return rest
    return ", ".join(f"`{name}`" for name in found[1].split(", ")) + f": {rest}"


if __name__ == "__main__":
    sys.exit(main())
