"""Facts about the running interpreter's standard library: names, signatures, the first sentence of each docstring.

Only the modules of `CORE_MODULES` are imported, all free of side effects; other source files are read and parsed.
"""

import ast
import builtins
import dataclasses
import doctest
import enum
import fnmatch
import functools
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

CORE_MODULES = tuple(
    "abc argparse array ast asyncio base64 bisect builtins calendar cmath collections collections.abc configparser "
    "contextlib copy csv datetime decimal difflib enum fnmatch fractions functools getpass glob gzip hashlib heapq "
    "hmac html http.client http.server importlib inspect io itertools json keyword linecache locale logging math "
    "mimetypes numbers operator os os.path pathlib pickle platform pprint queue random re secrets select shlex "
    "shutil signal socket sqlite3 ssl stat statistics string struct subprocess sys tarfile tempfile textwrap "
    "threading time timeit tokenize traceback types typing unicodedata unittest urllib.error urllib.parse "
    "urllib.request uuid warnings weakref xml.etree.ElementTree zipfile zlib concurrent.futures multiprocessing".split()
)

# Modules whose source is written to be read; accelerated ones have a Python twin (`_pydatetime`).
SOURCE_MODULES = tuple(
    "_collections_abc _pydatetime abc argparse base64 bisect calendar cmd codecs collections colorsys configparser "
    "contextlib copy csv dataclasses difflib enum filecmp fileinput fnmatch fractions functools genericpath getopt "
    "getpass glob graphlib gzip hashlib heapq hmac html imaplib io ipaddress json json.decoder json.encoder "
    "linecache logging mimetypes netrc nntplib numbers operator optparse os pathlib pickle poplib posixpath pprint "
    "queue random reprlib sched secrets shelve shlex shutil smtplib socketserver statistics string stringprep "
    "subprocess tempfile textwrap threading timeit traceback types urllib.parse urllib.request urllib.robotparser "
    "uuid warnings wave weakref wsgiref.util wsgiref.headers xml.dom.minidom zipfile".split()
)

# Classes whose public methods are worth a fact each.
CORE_CLASSES = tuple(
    "str list dict set bytes int float tuple collections.deque collections.Counter collections.OrderedDict "
    "collections.defaultdict datetime.datetime datetime.date datetime.timedelta datetime.time pathlib.Path "
    "re.Pattern re.Match argparse.ArgumentParser threading.Thread threading.Lock threading.Event "
    "threading.Condition logging.Logger subprocess.Popen sqlite3.Connection sqlite3.Cursor random.Random "
    "csv.DictReader csv.DictWriter csv.Sniffer queue.Queue zipfile.ZipFile tarfile.TarFile decimal.Decimal "
    "fractions.Fraction unittest.TestCase string.Template string.Formatter configparser.ConfigParser io.StringIO "
    "io.BytesIO io.TextIOWrapper socket.socket contextlib.ExitStack types.SimpleNamespace textwrap.TextWrapper "
    "concurrent.futures.ThreadPoolExecutor concurrent.futures.Future asyncio.Queue asyncio.Event asyncio.Task "
    "asyncio.Lock asyncio.Semaphore struct.Struct array.array http.client.HTTPConnection inspect.Signature "
    "difflib.SequenceMatcher timeit.Timer statistics.NormalDist uuid.UUID weakref.WeakValueDictionary "
    "xml.etree.ElementTree.Element xml.etree.ElementTree.ElementTree multiprocessing.Process".split()
)


TEXTS = Path(__file__).parent / "recipes" / "nano"


@functools.cache
def _skip_rules() -> list[tuple[bool, str]]:
    """(skip, pattern) of `skip.txt`, in order."""
    words = [word for line in (TEXTS / "skip.txt").read_text().splitlines() if line[:1] != "#" for word in line.split()]
    return [(not word.startswith("!"), word.removeprefix("!")) for word in words]


def is_skipped(name: str) -> bool:
    """Whether the last matching rule of `skip.txt` leaves `name` out."""
    for skip, pattern in reversed(_skip_rules()):
        if fnmatch.fnmatchcase(name, pattern):
            return skip
    return False


@dataclasses.dataclass(frozen=True)
class Fact:
    """One documented name of the standard library.

    `name` is how people write it ("os.path.join", "str.upper", "len"); `module` where it is imported from; `owner` the
    class of a method or ""; `kind` "function", "class", "method" or "exception"; `summary` the docstring's first
    sentence, cleaned; `signature` "(a, b=1)" or "" when unknown; `parameters` its names; `example` a doctest or "".
    """

    name: str
    module: str
    owner: str
    kind: str
    summary: str
    signature: str
    parameters: tuple[str, ...]
    example: str


_ROLE = re.compile(r":[a-z:]+:`[~!]?([^`]+)`")
_SIGNATURE_LINE = re.compile(r"^[A-Za-z_.]+\(.*\)(\s*(->|-->|=>|--|:)\s*.*)?$")
_SENTENCE_END = re.compile(r"(?<!e\.g)(?<!i\.e)(?<!\beg)(?<!etc)(?<!vs)\.(?=\s+[A-Za-z`'\"(]|$)")
_MAX_SUMMARY = 190


def clean_summary(doc: str) -> str:
    """The first sentence of a docstring as one line of readable English; "" when there is none."""
    lines = doc.expandtabs().strip().split("\n")
    after_arrow = ""
    while lines and (_SIGNATURE_LINE.match(lines[0].strip()) or not lines[0].strip()):
        tail = re.search(r"\)\s*(?:--|:)\s+(.*)$", lines[0].strip())
        arrow = re.search(r"\)\s*(?:->|-->|=>)\s+[\w\[\], |]+?\s*(?:--|\.)\s+(.*)$", lines[0].strip())
        found = tail or arrow
        if found:
            after_arrow = found.group(1)
        lines = lines[1:]
        if after_arrow:
            lines = [after_arrow, *lines]
            break
    paragraph: list[str] = []
    for line in lines:
        if not line.strip():
            break
        paragraph.append(line.strip())
    text = re.sub(r"\s+", " ", " ".join(paragraph))
    text = _ROLE.sub(r"`\1`", text).replace("``", "`")
    text = re.sub(r"\*(\w+)\*", r"`\1`", text)
    end = _SENTENCE_END.search(text)
    if end:
        text = text[: end.start()]
    text = text.strip().rstrip(".:;,\\").strip()
    if len(text) > _MAX_SUMMARY or len(text) < 8 or not text.isascii() or ">>>" in text:
        return ""
    return text


def doctest_example(doc: str) -> str:
    """The first short doctest of a docstring, at most seven lines, or ""."""
    block: list[str] = []
    for line in inspect.cleandoc(doc).split("\n"):
        if line.lstrip().startswith(">>>") or (block and line.strip()):
            block.append(line)
        elif block:
            break
    text = inspect.cleandoc("\n".join(block)) if block else ""
    lines = [re.sub(r"\s{2,}#.*$", "", line).rstrip() for line in text.split("\n")]
    while lines[-1] in {">>>", "..."}:
        lines.pop()
        if not lines:
            return ""
    text = "\n".join(lines)
    if (
        not text.startswith(">>>")
        or len(lines) > 7
        or max(map(len, lines)) > 80
        or "doctest" in text
        or " at 0x" in text
    ):
        return ""
    return text


def is_self_contained(example: str) -> bool:
    """Whether a doctest session runs as it stands: it is correct Python and uses no name that it does not make."""
    code = "".join(ex.source for ex in doctest.DocTestParser().get_examples(example + "\n"))
    try:
        tree = compile(code, "<example>", "exec", ast.PyCF_ONLY_AST)
        compile(code, "<example>", "exec")
    except SyntaxError:
        return False
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    made = {node.id for node in names if isinstance(node.ctx, ast.Store)} | set(vars(builtins))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            made |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            made.add(node.name)
        elif isinstance(node, ast.arg):
            made.add(node.arg)
    return bool(code.strip()) and all(node.id in made for node in names)


def describe_signature(value: object, *, drop_first: bool) -> tuple[str, tuple[str, ...]]:
    """("(a, b=1)", ("a", "b")) for a callable, or ("", ()) where Python knows no signature.

    Annotations are left out and long lists end in `...`: the text is to be learned by a very small model.
    """
    try:
        signature = inspect.signature(value)  # pyright: ignore[reportArgumentType]
    except (ValueError, TypeError):  # inspect's documented answers for "no signature" and "not a callable"
        return "", ()
    parts: list[str] = []
    names: list[str] = []
    starred = False
    parameters = list(signature.parameters.values())
    for parameter in parameters[1:] if drop_first else parameters:
        if parameter.name.startswith("_"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        if parameter.kind is parameter.VAR_POSITIONAL:
            starred = True
        text = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "") + parameter.name
        if parameter.default is not parameter.empty:
            default = repr(parameter.default)
            if parameter.name == "mode" and type(parameter.default) is int:
                default = f"0o{parameter.default:o}"
            text += "=" + (default if len(default) <= 16 and "<" not in default and default[0] != "_" else "...")
        parts.append(text)
        names.append(parameter.name)
    while len(", ".join(parts)) > 70 and len(parts) > 2:
        parts = [*parts[: -2 if parts[-1] == "..." else -1], "..."]
        if parts[-2] == "*":
            parts = [*parts[:-2], "..."]
    return f"({', '.join(parts)})", tuple(names)


def _public_names(module: ModuleType) -> list[str]:
    if module.__name__ == "builtins" or "__all__" not in vars(module):
        names = [name for name in vars(module) if not name.startswith("_")]
    else:
        names = list(module.__all__)
    return sorted({name for name in names if not name.startswith("_")})


def _make_fact(name: str, module: str, owner: str, kind: str, value: object) -> Fact | None:
    # A class without a docstring of its own would be described by that of its base.
    doc = vars(value).get("__doc__") if inspect.isclass(value) else inspect.getdoc(value)
    if not isinstance(doc, str) or is_skipped(name):
        return None
    summary = clean_summary(inspect.cleandoc(doc))
    if not summary:
        return None
    is_bound = (
        isinstance(value, (classmethod, staticmethod))
        or inspect.ismethod(value)
        or (inspect.isbuiltin(value) and inspect.isclass(value.__self__))
    )
    drop = kind == "method" and not is_bound
    signature, parameters = describe_signature(value, drop_first=drop)
    if inspect.isclass(value) and issubclass(
        value, enum.Enum
    ):  # calling one looks a member up, its signature says nothing
        signature, parameters = "", ()
    return Fact(name, module, owner, kind, summary, signature, parameters, doctest_example(inspect.cleandoc(doc)))


def _module_facts(module_name: str, module: ModuleType) -> Iterator[Fact]:
    prefix = "" if module_name == "builtins" else module_name + "."
    home = module_name.split(".")[0]
    for name in _public_names(module):
        value = getattr(module, name)  # some packages load their names lazily
        if value is None or inspect.ismodule(value):
            continue
        origin = value.__module__ if inspect.isclass(value) or inspect.isfunction(value) else module_name
        # A name that another module only re-exports is that module's fact, unless an accelerator (`_json`) defines it.
        if "__all__" not in vars(module) and origin.lstrip("_").split(".")[0] not in {
            home,
            "builtins",
            "posix",
            "nt",
            "io",
        }:
            continue
        if inspect.isclass(value):
            kind = "exception" if issubclass(value, BaseException) else "class"
        elif callable(value):
            kind = "function"
        else:
            continue
        fact = _make_fact(prefix + name, module_name, "", kind, value)
        if fact:
            yield fact


def _class_facts(class_name: str) -> Iterator[Fact]:
    module_name, _, short = class_name.rpartition(".")
    module = importlib.import_module(module_name or "builtins")
    cls = getattr(module, short)
    if not inspect.isclass(cls):  # threading.Lock is a function that makes locks, before Python 3.13
        cls = type(cls())
    for method in sorted({name for base in cls.__mro__[:-1] for name in vars(base) if not name.startswith("_")}):
        value = inspect.getattr_static(cls, method)
        if isinstance(value, property) or not (callable(value) or isinstance(value, (classmethod, staticmethod))):
            continue
        raw = cls.__dict__.get(method, value)
        bound = raw.__get__(None, cls) if isinstance(raw, (classmethod, staticmethod)) else raw
        if inspect.ismethoddescriptor(raw) and type(raw).__name__ == "classmethod_descriptor":
            bound = raw.__get__(None, cls)
        fact = _make_fact(f"{class_name}.{method}", module_name or "builtins", class_name, "method", bound)
        if fact:
            yield fact


def collect_facts() -> tuple[list[Fact], list[str]]:
    """All facts in name order, and the core modules that this interpreter was built without."""
    facts: dict[str, Fact] = {}
    missing: list[str] = []
    for module_name in CORE_MODULES:
        try:
            module = importlib.import_module(module_name)
        except (
            ImportError
        ):  # an interpreter may be built without sqlite3, ssl or zlib; the report names what is missing
            missing.append(module_name)
            continue
        for fact in _module_facts(module_name, module):
            facts.setdefault(fact.name, fact)
    for class_name in CORE_CLASSES:
        if class_name.rpartition(".")[0] in missing:
            continue
        for fact in _class_facts(class_name):
            facts.setdefault(fact.name, fact)
    return [facts[name] for name in sorted(facts)], missing


def source_functions(module_names: Sequence[str], *, max_lines: int = 32) -> list[tuple[str, str]]:
    """Short documented or plain functions of the modules' own sources as (qualified name, text), in source order.

    Sources are read and parsed, not imported again. Functions longer than `max_lines` or nested in others are left out.
    """
    found: list[tuple[str, str]] = []
    for module_name in module_names:
        spec = importlib.util.find_spec(module_name)
        source_file = spec.origin if spec else None
        if source_file is None or not source_file.endswith(".py"):
            continue
        with open(source_file, encoding="utf-8") as handle:
            source = handle.read()
        lines = source.split("\n")
        for node in ast.parse(source).body:
            inner = node.body if isinstance(node, ast.ClassDef) else [node]
            owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
            for item in inner:
                if not isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)) or item.end_lineno is None:
                    continue
                first = min([item.lineno, *(decorator.lineno for decorator in item.decorator_list)])
                block = lines[first - 1 : item.end_lineno]
                text = inspect.cleandoc("\n" + "\n".join(block))
                if 4 <= len(block) <= max_lines and text.isascii() and max(map(len, block)) <= 100:
                    found.append((f"{module_name}.{owner}{item.name}", text))
    return found
