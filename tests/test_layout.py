"""The shape of the repository: which folders are packages, who may import whom, and habits that a parser can check."""

import ast
import fnmatch
import importlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Top-level folder → the name it is imported under.
FOLDERS = {
    "kimijax": "kimijax",
    "pallas_kernels": "kimijax.pallas_kernels",
    "serve": "kimijax.serve",
    "train": "kimijax.train",
}
BESIDE = [folder for folder, name in FOLDERS.items() if folder != name]


def sources() -> list[Path]:
    """Every Python file of the four source folders."""
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def package_of(path: Path) -> str:
    """The dotted package that holds `path`, under the name it is imported by: train/a/b.py → kimijax.train.a."""
    folder, *inner = path.relative_to(ROOT).parent.parts
    return ".".join([FOLDERS[folder], *inner])


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted target of each import in `path`; a relative import is made absolute."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package_of(path).split(".")
                base = ".".join(parents[: len(parents) - node.level + 1] + ([base] if base else []))
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def is_in(target: str, package: str) -> bool:
    """Whether the dotted `target` is `package` or lies inside it."""
    return target == package or target.startswith(package + ".")


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_every_package_is_listed() -> None:
    """setuptools leaves an unlisted package out of the wheel without a warning."""
    found = {package_of(path) for path in sources()}
    assert found == set(PYPROJECT["tool"]["setuptools"]["packages"])
    without_init = [str(path.parent) for path in sources() if not (path.parent / "__init__.py").is_file()]
    assert not without_init, "folders with Python files and no __init__.py"


def test_every_data_file_is_shipped() -> None:
    """A file that is no Python source reaches a wheel only if package-data names it."""
    config = PYPROJECT["tool"]["setuptools"]
    packages = sorted(config["packages"], key=len, reverse=True)
    missing = []
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.is_dir() or path.suffix in (".py", ".pyc", ".pyi"):
                continue
            parts = [*FOLDERS[folder].split("."), *path.relative_to(ROOT / folder).parent.parts]
            package = next(name for name in packages if is_in(".".join(parts), name))
            inner = "/".join([*parts[package.count(".") + 1 :], path.name])
            # fnmatch's * crosses folders, as `**` does; setuptools' single * does not, hence the second test.
            patterns = config["package-data"].get(package, [])
            if not any(
                fnmatch.fnmatch(inner, pattern) and ("**" in pattern or inner.count("/") == pattern.count("/"))
                for pattern in patterns
            ):
                missing.append(str(path.relative_to(ROOT)))
    assert not missing, "add these to [tool.setuptools.package-data]"


def test_imports_go_one_way() -> None:
    """pallas_kernels ← kimijax ← serve, train; nothing between serve and train; nothing imports tests."""
    forbidden = {
        "kimijax": ["kimijax.serve", "kimijax.train"],
        "pallas_kernels": ["kimijax"],
        "serve": ["kimijax.train", "kimijax.pallas_kernels"],
        "train": ["kimijax.serve", "kimijax.pallas_kernels"],
    }
    faults = []
    for path in sources():
        folder = path.relative_to(ROOT).parts[0]
        own = FOLDERS[folder]
        for line, target in imports(path):
            if target.split(".")[0] in ("tests", *BESIDE):
                faults.append(f"{where(path, line)}: {target}: import it as kimijax.…, and tests not at all")
            banned = [name for name in forbidden[folder] if is_in(target, name)]
            if banned and not (folder != "kimijax" and is_in(target, own)):
                faults.append(f"{where(path, line)}: {folder}/ must not import {target}")
    assert not faults, "\n".join(faults)


def test_pallas_kernels_needs_only_jax() -> None:
    allowed = {"jax", "jaxlib", "kimijax.pallas_kernels"} | sys.stdlib_module_names
    faults = [
        f"{where(path, line)}: {target}"
        for path in sources()
        if is_in(package_of(path), "kimijax.pallas_kernels")
        for line, target in imports(path)
        if target.split(".")[0] not in allowed and not is_in(target, "kimijax.pallas_kernels")
    ]
    assert not faults, "\n".join(faults)


def test_kernels_are_used_by_their_public_names() -> None:
    """Outside pallas_kernels, only `from kimijax.pallas_kernels import name`: no module of it, no private name."""
    faults = []
    for path in sources():
        if is_in(package_of(path), "kimijax.pallas_kernels"):
            continue
        for line, target in imports(path):
            if not is_in(target, "kimijax.pallas_kernels"):
                continue
            inner = target.split(".")[2:]
            if len(inner) != 1 or inner[0].startswith("_") or (ROOT / "pallas_kernels" / f"{inner[0]}.py").is_file():
                faults.append(f"{where(path, line)}: {target}")
    assert not faults, "\n".join(faults)


def test_relative_imports_stay_in_their_folder() -> None:
    """`from ..config import x` in train/ would run, but neither type checkers nor readers could follow it."""
    faults = []
    for path in sources():
        depth = len(path.relative_to(ROOT).parent.parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level > depth:
                faults.append(f"{where(path, node.lineno)}: write from kimijax.{node.module or ''} import …")
    assert not faults, "\n".join(faults)


def test_third_party_imports_are_declared() -> None:
    """What the source folders import is a run-time dependency, not something that happens to be installed here."""
    requirements = [re.split(r"[\[<>=!~; ]", text)[0] for text in PYPROJECT["project"]["dependencies"]]
    declared = {re.sub(r"[-_.]+", "-", name).lower() for name in requirements}
    distributions = importlib.metadata.packages_distributions()
    faults = []
    for path in sources():
        for line, target in imports(path):
            top = target.split(".")[0]
            if top in sys.stdlib_module_names or top == "kimijax":
                continue
            owners = {re.sub(r"[-_.]+", "-", name).lower() for name in distributions.get(top, [])}
            if not owners & declared:
                faults.append(f"{where(path, line)}: {top} is not in [project] dependencies")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("folder", BESIDE)
def test_bare_name_is_refused(folder: str) -> None:
    """`import serve` in a checkout would make a second copy of every class; it must fail by name."""
    run = subprocess.run(
        [sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert f"ImportError: import kimijax.{folder}, not {folder}" in run.stderr


@pytest.mark.parametrize("folder", BESIDE)
def test_folder_is_part_of_kimijax(folder: str) -> None:
    module = importlib.import_module(f"kimijax.{folder}")
    assert module.__file__ is not None
    assert Path(module.__file__) == ROOT / folder / "__init__.py"


@pytest.mark.parametrize("folder", ["serve", "train"])
def test_type_checkers_find_every_module(folder: str) -> None:
    """kimijax/serve.pyi names each module of serve/, so that `from kimijax.serve import app` resolves in an editor."""
    pointer = (ROOT / "kimijax" / f"{folder}.pyi").read_text().splitlines()
    modules = [path.stem for path in (ROOT / folder).glob("*.py")]
    modules += [path.parent.name for path in (ROOT / folder).glob("*/__init__.py")]
    wanted = {f"from {folder} import {name} as {name}" for name in modules if not name.startswith("_")}
    named = {line for line in pointer if " as " in line}
    assert named == wanted, f"kimijax/{folder}.pyi should hold:\n" + "\n".join(sorted(wanted))


def test_no_getattr_with_a_default() -> None:
    """A misspelt attribute must fail; a default would hide it."""
    faults = [
        where(path, node.lineno)
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "getattr"
        and len(node.args) == 3
    ]
    assert not faults, "\n".join(faults)


def test_environment_is_no_configuration() -> None:
    """Settings are fields of a configuration, seen in --help and in the log; JAX's own variables are read by JAX.

    Two modules may look at variables of XLA and SLURM: to bound collectives, which XLA takes from its flags alone, to
    read what SLURM says of a job, as JAX does, and not to ask for virtual devices where a flag has done so.
    """
    faults = [
        where(path, node.lineno)
        for path in sources()
        if path.name not in ("multihost.py", "plan_compile.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in {("os", "environ"), ("os", "getenv")}
    ]
    assert not faults, "\n".join(faults)


REPORT = """
import json, sys
import kimijax, kimijax.serve.config, kimijax.train.config, kimijax.pallas_kernels
from kimijax.loader import NANO
print(json.dumps({"files": {name: m.__file__ for name, m in sys.modules.items() if name.startswith("kimijax")},
                  "recipe": kimijax.train.config.load_recipe("nano-target", []).name, "nano": str(NANO)}))
"""


@pytest.mark.slow
def test_a_wheel_is_complete(tmp_path: Path) -> None:
    """Built from the sources alone and unpacked elsewhere, it imports under the same names and has its data."""
    source, site = tmp_path / "source", tmp_path / "site"
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    [wheel] = tmp_path.glob("kimijax-*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert [name for name in archive.namelist() if name.endswith("/licenses/LICENSE")]
    expected = {
        "/".join([*FOLDERS[folder].split("."), path.relative_to(ROOT / folder).as_posix()])
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".pyi")
    }
    assert names == expected
    assert {"kimijax/py.typed", "kimijax/nano/config.json", "kimijax/train/recipes/nano-target.toml"} <= names
    run = subprocess.run(
        [sys.executable, "-c", REPORT],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert (found["recipe"], found["nano"]) == ("nano-target", str(site / "kimijax" / "nano"))
    outside = {name: file for name, file in found["files"].items() if not file.startswith(str(site / "kimijax"))}
    assert not outside
