"""What the documents promise: the status table, commands, code and links."""

import ast
import importlib
import importlib.util
import itertools
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])


def status_rows() -> list[tuple[str, str, list[str]]]:
    """(feature, status, names in backticks) of each row of the table below "## Status"."""
    table = README.split("## Status\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    return [(feature, status, re.findall(r"`([^`]+)`", where)) for feature, status, where in rows[2:]]


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def module_exists(name: str) -> bool:
    """Whether `name` can be imported, without importing more than its parents."""
    parent = name.rpartition(".")[0]
    return (not parent or module_exists(parent)) and importlib.util.find_spec(name) is not None


def slug(heading: str) -> str:
    """The anchor that a Markdown viewer gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize(("feature", "status", "names"), status_rows(), ids=[row[0] for row in status_rows()])
def test_status_row_is_true(feature: str, status: str, names: list[str]) -> None:
    assert names, f"{feature}: the row names nothing that could be checked"
    if status == "planned":
        there = [name for name in names if (ROOT / name).exists() or ("/" not in name and module_exists(name))]
        assert not there, f"{feature}: exists, so the row must say what works"
        return
    assert status == "works"
    modules = [name for name in names if "/" not in name]
    tests = [name for name in names if "/" in name]
    assert modules, f"{feature}: name the module"
    assert tests, f"{feature}: name the tests"
    for name in modules:
        importlib.import_module(name)
    for name in tests:
        assert re.search(r"^def test_", (ROOT / name).read_text(), flags=re.MULTILINE), f"{name} holds no test"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if re.match(r"https?://", target):
            continue
        file, _, anchor = target.partition("#")
        path = document.parent / file if file else document
        if not path.exists():
            broken.append(target)
        elif anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE)
            if anchor not in map(slug, headings):
                broken.append(target)
    assert not broken


def in_backticks(document: Path) -> list[str]:
    """What a document writes as code within its sentences, the status table apart: it names what is planned."""
    text = document.read_text()
    if document.name == "README.md":
        before, _, after = text.partition("## Status\n")
        text = before + after[after.index("\n## ") :]
    return re.findall(r"`([^`\n]+)`", text)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_exist(document: Path) -> None:
    folders = "kimijax|pallas_kernels|serve|train|tests|docs|benchmarks"
    paths = [code for code in in_backticks(document) if re.fullmatch(rf"({folders})/[\w./-]*", code)]
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_imports_exist(document: Path) -> None:
    """Each `from kimijax.a import b` holds, and so does each `b.c` beside it."""
    codes = in_backticks(document)
    modules = {}
    for code in codes:
        if found := re.fullmatch(r"from (kimijax[\w.]*) import (\w{2,})", code):  # one letter stands for any name
            package, name = found.groups()
            modules[name] = importlib.import_module(f"{package}.{name}")
    missing = []
    for code in codes:
        name, _, attribute = code.partition(".")
        if name in modules and not code.endswith(".py") and not hasattr(modules[name], attribute):
            missing.append(code)
    assert not missing


def test_every_module_is_in_the_list_of_folders() -> None:
    [block] = [b for b in re.findall(r"^```\n(.*?)^```$", ARCHITECTURE, re.M | re.S) if "kimijax/ " in b]
    listed = set(re.findall(r"\b(\w+\.py)\b", block))
    there = {path.name for path in (ROOT / "kimijax").glob("*.py")} - {"__init__.py"}
    assert listed == there, "docs/architecture.md, Folders"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_exist(document: Path) -> None:
    """Each `make X` has a target, and each `python -m kimijax.x` can be run."""
    text = document.read_text()
    commands = "\n".join([*code_blocks(text, "sh"), *re.findall(r"`([^`\n]+)`", text)])
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    asked = set(re.findall(r"^make ([a-z-]+)", commands, flags=re.MULTILINE))
    assert asked <= targets
    # Planned commands are shown in no document, so that no reader tries one in vain.
    modules = set(re.findall(r"python -m (kimijax[\w.]*)", commands))
    missing = [name for name in modules if not (module_exists(name) and is_runnable(name))]
    assert not missing


def is_runnable(name: str) -> bool:
    """Whether `python -m name` does something: a module guarded by `__name__`, or a package with `__main__`."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    if spec.submodule_search_locations is not None:
        return module_exists(f"{name}.__main__")
    assert spec.origin is not None
    return 'if __name__ == "__main__":' in Path(spec.origin).read_text()


@pytest.mark.parametrize("snippet", code_blocks(README, "python"), ids=itertools.count())
def test_python_snippet_names_exist(snippet: str) -> None:
    """Imports resolve and `kimijax.x` exists; the engine's tests run what the snippet calls."""
    tree = ast.parse(snippet)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module or "")
            assert not [alias.name for alias in node.names if not hasattr(module, alias.name)]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "kimijax":
            assert hasattr(importlib.import_module("kimijax"), node.attr), node.attr


@pytest.mark.slow
@pytest.mark.parametrize("snippet", code_blocks(README, "python"), ids=itertools.count())
def test_python_snippet_runs(snippet: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(snippet, "README.md", "exec"), {})
    assert "dedent" in capsys.readouterr().out


def test_shell_snippets_parse() -> None:
    for snippet in code_blocks(README, "sh"):
        subprocess.run(["bash", "-n", "-c", snippet], check=True)
