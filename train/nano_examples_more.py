"""More hand-written examples, in the form of `nano_examples.EXAMPLES`: time, files, processes, text, data and types."""

MORE_EXAMPLES = r"""
# datetime.datetime
>>> from datetime import datetime
>>> datetime(2024, 1, 31).year
2024

# datetime.datetime.now
>>> from datetime import datetime
>>> now = datetime.now()

# datetime.datetime.strftime
>>> from datetime import datetime
>>> datetime(2024, 1, 31).strftime("%Y-%m-%d")
'2024-01-31'

# datetime.datetime.strptime
>>> from datetime import datetime
>>> d = datetime.strptime("2024-01-31", "%Y-%m-%d")
>>> d.day
31

# datetime.datetime.isoformat
>>> from datetime import datetime
>>> datetime(2024, 1, 31).isoformat()
'2024-01-31T00:00:00'

# datetime.date
>>> from datetime import date
>>> date(2024, 1, 31).weekday()
2

# datetime.date.today
>>> from datetime import date
>>> today = date.today()

# datetime.timedelta
>>> from datetime import date, timedelta
>>> date(2024, 1, 31) + timedelta(days=1)
datetime.date(2024, 2, 1)

# datetime.timedelta.total_seconds
>>> from datetime import timedelta
>>> timedelta(minutes=2).total_seconds()
120.0

# pathlib.Path
>>> from pathlib import Path
>>> Path("dir/a.txt").name
'a.txt'

# pathlib.Path.exists
>>> from pathlib import Path
>>> Path("missing.txt").exists()
False

# pathlib.Path.read_text
>>> from pathlib import Path
>>> text = Path("a.txt").read_text()  # doctest: +SKIP

# pathlib.Path.write_text
>>> from pathlib import Path
>>> Path("a.txt").write_text("hello")  # doctest: +SKIP
5

# pathlib.Path.glob
>>> from pathlib import Path
>>> for path in Path(".").glob("*.py"):  # doctest: +SKIP
...     print(path)

# pathlib.Path.mkdir
>>> from pathlib import Path
>>> Path("data").mkdir(exist_ok=True)  # doctest: +SKIP

# pathlib.Path.iterdir
>>> from pathlib import Path
>>> names = [p.name for p in Path(".").iterdir()]

# pathlib.Path.with_suffix
>>> from pathlib import Path
>>> Path("a.txt").with_suffix(".md").name
'a.md'

# pathlib.Path.is_file
>>> from pathlib import Path
>>> Path("missing.txt").is_file()
False

# pathlib.Path.unlink
>>> from pathlib import Path
>>> Path("old.txt").unlink(missing_ok=True)  # doctest: +SKIP

# time.time
>>> import time
>>> start = time.time()

# time.sleep
>>> import time
>>> time.sleep(0.01)

# time.perf_counter
>>> import time
>>> start = time.perf_counter()
>>> elapsed = time.perf_counter() - start

# time.monotonic
>>> import time
>>> start = time.monotonic()

# time.strftime
>>> import time
>>> text = time.strftime("%Y-%m-%d")

# statistics.mean
>>> import statistics
>>> statistics.mean([1, 2, 3, 4])
2.5

# statistics.median
>>> import statistics
>>> statistics.median([1, 3, 2])
2

# statistics.mode
>>> import statistics
>>> statistics.mode([1, 1, 2])
1

# statistics.stdev
>>> import statistics
>>> statistics.stdev([1, 2, 3])
1.0

# csv.reader
>>> import csv
>>> list(csv.reader(["a,b", "1,2"]))
[['a', 'b'], ['1', '2']]

# csv.writer
>>> import csv
>>> with open("data.csv", "w", newline="") as f:  # doctest: +SKIP
...     csv.writer(f).writerow(["a", 1])

# csv.DictReader
>>> import csv
>>> rows = list(csv.DictReader(["a,b", "1,2"]))
>>> rows[0]["a"]
'1'

# csv.DictWriter
>>> import csv, sys
>>> w = csv.DictWriter(sys.stdout, ["a", "b"])
>>> w.writerow({"a": 1, "b": 2})  # doctest: +SKIP
1,2

# io.StringIO
>>> import io
>>> buffer = io.StringIO()
>>> n = buffer.write("hello")
>>> buffer.getvalue()
'hello'

# io.BytesIO
>>> import io
>>> io.BytesIO(b"abc").read(2)
b'ab'

# shutil.copy
>>> import shutil
>>> shutil.copy("a.txt", "b.txt")  # doctest: +SKIP
'b.txt'

# shutil.copytree
>>> import shutil
>>> shutil.copytree("src", "backup")  # doctest: +SKIP
'backup'

# shutil.move
>>> import shutil
>>> shutil.move("a.txt", "dir")  # doctest: +SKIP
'dir/a.txt'

# shutil.rmtree
>>> import shutil
>>> shutil.rmtree("build")  # doctest: +SKIP

# shutil.which
>>> import shutil
>>> path = shutil.which("python3")

# shutil.disk_usage
>>> import shutil
>>> usage = shutil.disk_usage(".")
>>> usage.free > 0
True

# subprocess.run
>>> import subprocess
>>> result = subprocess.run(["ls"], capture_output=True, text=True)  # doctest: +SKIP
>>> print(result.stdout)  # doctest: +SKIP

# subprocess.check_output
>>> import subprocess
>>> out = subprocess.check_output(["ls"], text=True)  # doctest: +SKIP

# subprocess.Popen
>>> import subprocess
>>> p = subprocess.Popen(["ls"])  # doctest: +SKIP
>>> p.wait()  # doctest: +SKIP
0

# threading.Thread
>>> import threading
>>> t = threading.Thread(target=print, args=("hi",))
>>> t.start(); t.join()
hi

# threading.Lock
>>> import threading
>>> lock = threading.Lock()
>>> with lock:
...     print("locked")
locked

# threading.Event
>>> import threading
>>> event = threading.Event()
>>> event.set()
>>> event.is_set()
True

# queue.Queue
>>> import queue
>>> q = queue.Queue()
>>> q.put(1)
>>> q.get()
1

# logging.basicConfig
>>> import logging
>>> logging.basicConfig(level=logging.INFO)  # doctest: +SKIP

# logging.getLogger
>>> import logging
>>> log = logging.getLogger("app")
>>> log.name
'app'

# logging.info
>>> import logging
>>> logging.info("started %s", "app")  # doctest: +SKIP

# argparse.ArgumentParser
>>> import argparse
>>> parser = argparse.ArgumentParser()
>>> _ = parser.add_argument("--n", type=int, default=1)
>>> parser.parse_args(["--n", "3"]).n
3

# urllib.parse.urlparse
>>> from urllib.parse import urlparse
>>> urlparse("https://example.com/a?b=1").netloc
'example.com'

# urllib.parse.quote
>>> from urllib.parse import quote
>>> quote("a b")
'a%20b'

# urllib.parse.unquote
>>> from urllib.parse import unquote
>>> unquote("a%20b")
'a b'

# urllib.parse.urlencode
>>> from urllib.parse import urlencode
>>> urlencode({"a": 1, "b": 2})
'a=1&b=2'

# urllib.parse.urljoin
>>> from urllib.parse import urljoin
>>> urljoin("https://example.com/a/", "b")
'https://example.com/a/b'

# urllib.parse.parse_qs
>>> from urllib.parse import parse_qs
>>> parse_qs("a=1&b=2")
{'a': ['1'], 'b': ['2']}

# urllib.request.urlopen
>>> from urllib.request import urlopen
>>> with urlopen("https://example.com") as r:  # doctest: +SKIP
...     html = r.read()

# hashlib.sha256
>>> import hashlib
>>> hashlib.sha256(b"hi").hexdigest()[:8]
'8f434346'

# hashlib.md5
>>> import hashlib
>>> hashlib.md5(b"hi").hexdigest()[:8]  # doctest: +SKIP
'49f68a5c'

# base64.b64encode
>>> import base64
>>> base64.b64encode(b"hi")
b'aGk='

# base64.b64decode
>>> import base64
>>> base64.b64decode("aGk=")
b'hi'

# struct.pack
>>> import struct
>>> struct.pack("<I", 1)
b'\x01\x00\x00\x00'

# struct.unpack
>>> import struct
>>> struct.unpack("<I", b"\x01\x00\x00\x00")
(1,)

# struct.calcsize
>>> import struct
>>> struct.calcsize("<If")
8

# copy.copy
>>> import copy
>>> a = [1, [2]]
>>> b = copy.copy(a)
>>> b[1] is a[1]
True

# copy.deepcopy
>>> import copy
>>> a = [1, [2]]
>>> b = copy.deepcopy(a)
>>> b[1] is a[1]
False

# heapq.heappush
>>> import heapq
>>> heap = [2, 3]
>>> heapq.heappush(heap, 1)
>>> heap[0]
1

# heapq.heappop
>>> import heapq
>>> heap = [1, 3, 2]
>>> heapq.heappop(heap)
1

# heapq.heapify
>>> import heapq
>>> heap = [3, 1, 2]
>>> heapq.heapify(heap)
>>> heap[0]
1

# heapq.nlargest
>>> import heapq
>>> heapq.nlargest(2, [1, 5, 3])
[5, 3]

# heapq.nsmallest
>>> import heapq
>>> heapq.nsmallest(2, [1, 5, 3])
[1, 3]

# heapq.merge
>>> import heapq
>>> list(heapq.merge([1, 4], [2, 3]))
[1, 2, 3, 4]

# bisect.bisect_left
>>> import bisect
>>> bisect.bisect_left([1, 3, 5], 3)
1

# bisect.bisect_right
>>> import bisect
>>> bisect.bisect_right([1, 3, 5], 3)
2

# bisect.insort_right
>>> import bisect
>>> a = [1, 3]
>>> bisect.insort_right(a, 2)
>>> a
[1, 2, 3]

# operator.itemgetter
>>> from operator import itemgetter
>>> sorted([("a", 2), ("b", 1)], key=itemgetter(1))
[('b', 1), ('a', 2)]

# operator.attrgetter
>>> from operator import attrgetter
>>> attrgetter("real")(3)
3

# operator.add
>>> import operator
>>> operator.add(1, 2)
3

# contextlib.contextmanager
>>> from contextlib import contextmanager
>>> @contextmanager
... def tag(name):
...     print("<" + name + ">")
...     yield
...     print("</" + name + ">")
>>> with tag("b"):
...     print("text")
<b>
text
</b>

# contextlib.suppress
>>> from contextlib import suppress
>>> with suppress(ZeroDivisionError):
...     1 / 0

# contextlib.redirect_stdout
>>> import contextlib, io
>>> out = io.StringIO()
>>> with contextlib.redirect_stdout(out):
...     print("hi")
>>> out.getvalue()
'hi\n'

# contextlib.closing
>>> import contextlib, io
>>> with contextlib.closing(io.StringIO("hi")) as f:
...     f.read()
'hi'

# contextlib.ExitStack
>>> from contextlib import ExitStack
>>> with ExitStack() as stack:
...     _ = stack.callback(print, "done")
done

# dataclasses.dataclass
>>> from dataclasses import dataclass
>>> @dataclass
... class Point:
...     x: int
...     y: int = 0
>>> Point(1)
Point(x=1, y=0)

# dataclasses.field
>>> from dataclasses import dataclass, field
>>> @dataclass
... class Box:
...     items: list = field(default_factory=list)
>>> Box().items
[]

# dataclasses.asdict
>>> from dataclasses import asdict, dataclass
>>> @dataclass
... class Point:
...     x: int
...     y: int
>>> asdict(Point(1, 2))
{'x': 1, 'y': 2}

# dataclasses.replace
>>> from dataclasses import dataclass, replace
>>> @dataclass
... class Point:
...     x: int
...     y: int
>>> replace(Point(1, 2), y=5)
Point(x=1, y=5)

# enum.Enum
>>> from enum import Enum
>>> class Color(Enum):
...     RED = 1
...     GREEN = 2
>>> Color.RED.value
1

# enum.auto
>>> from enum import Enum, auto
>>> class Color(Enum):
...     RED = auto()
...     GREEN = auto()
>>> Color.GREEN.value
2

# abc.abstractmethod
>>> from abc import ABC, abstractmethod
>>> class Shape(ABC):
...     @abstractmethod
...     def area(self):
...         pass

# abc.ABC
>>> from abc import ABC, abstractmethod
>>> class Shape(ABC):
...     @abstractmethod
...     def area(self):
...         pass

# textwrap.dedent
>>> import textwrap
>>> textwrap.dedent("  a\n  b")
'a\nb'

# textwrap.fill
>>> import textwrap
>>> print(textwrap.fill("one two three", 8))
one two
three

# textwrap.wrap
>>> import textwrap
>>> textwrap.wrap("one two three", 8)
['one two', 'three']

# textwrap.indent
>>> import textwrap
>>> textwrap.indent("a\nb", "  ")
'  a\n  b'

# textwrap.shorten
>>> import textwrap
>>> textwrap.shorten("one two three", 12)
'one [...]'

# glob.glob
>>> import glob
>>> names = glob.glob("*.txt")

# fnmatch.fnmatch
>>> import fnmatch
>>> fnmatch.fnmatch("a.txt", "*.txt")
True

# fnmatch.filter
>>> import fnmatch
>>> fnmatch.filter(["a.txt", "b.py"], "*.py")
['b.py']

# tempfile.TemporaryDirectory
>>> import tempfile
>>> with tempfile.TemporaryDirectory() as path:
...     pass

# tempfile.NamedTemporaryFile
>>> import tempfile
>>> with tempfile.NamedTemporaryFile("w") as f:
...     n = f.write("hello")

# zipfile.ZipFile
>>> import zipfile
>>> with zipfile.ZipFile("a.zip") as z:  # doctest: +SKIP
...     z.extractall("out")

# gzip.open
>>> import gzip
>>> with gzip.open("a.txt.gz", "rt") as f:  # doctest: +SKIP
...     text = f.read()

# gzip.compress
>>> import gzip
>>> gzip.decompress(gzip.compress(b"hi"))
b'hi'

# zlib.compress
>>> import zlib
>>> zlib.decompress(zlib.compress(b"hi"))
b'hi'

# zlib.crc32
>>> import zlib
>>> zlib.crc32(b"hi")
3633523372

# pickle.dumps
>>> import pickle
>>> pickle.loads(pickle.dumps([1, 2]))
[1, 2]

# pickle.loads
>>> import pickle
>>> pickle.loads(pickle.dumps([1, 2]))
[1, 2]

# pickle.dump
>>> import pickle
>>> with open("data.pkl", "wb") as f:  # doctest: +SKIP
...     pickle.dump([1, 2], f)

# pickle.load
>>> import pickle
>>> with open("data.pkl", "rb") as f:  # doctest: +SKIP
...     data = pickle.load(f)

# sqlite3.connect
>>> import sqlite3
>>> db = sqlite3.connect(":memory:")
>>> db.execute("select 1 + 1").fetchone()
(2,)
>>> db.close()

# unittest.TestCase
>>> import unittest
>>> class TestMath(unittest.TestCase):
...     def test_add(self):
...         self.assertEqual(1 + 1, 2)

# unittest.main
>>> import unittest
>>> unittest.main()  # doctest: +SKIP

# decimal.Decimal
>>> from decimal import Decimal
>>> Decimal("0.1") + Decimal("0.2")
Decimal('0.3')

# fractions.Fraction
>>> from fractions import Fraction
>>> Fraction(1, 3) + Fraction(1, 6)
Fraction(1, 2)

# asyncio.run
>>> import asyncio
>>> async def main():
...     return 42
>>> asyncio.run(main())
42

# asyncio.sleep
>>> import asyncio
>>> async def main():
...     await asyncio.sleep(0)
...     print("done")
>>> asyncio.run(main())
done

# asyncio.gather
>>> import asyncio
>>> async def square(n):
...     return n * n
>>> async def main():
...     return await asyncio.gather(square(2), square(3))
>>> asyncio.run(main())
[4, 9]

# asyncio.create_task
>>> import asyncio
>>> async def work():
...     return 1
>>> async def main():
...     task = asyncio.create_task(work())
...     return await task
>>> asyncio.run(main())
1

# concurrent.futures.ThreadPoolExecutor
>>> from concurrent.futures import ThreadPoolExecutor
>>> with ThreadPoolExecutor(2) as pool:
...     list(pool.map(abs, [-1, -2]))
[1, 2]

# pprint.pprint
>>> from pprint import pprint
>>> pprint({"b": 1, "a": 2})
{'a': 2, 'b': 1}

# secrets.token_hex
>>> import secrets
>>> token = secrets.token_hex(16)
>>> len(token)
32

# secrets.choice
>>> import secrets
>>> letter = secrets.choice("abc")

# uuid.uuid4
>>> import uuid
>>> len(str(uuid.uuid4()))
36

# shlex.split
>>> import shlex
>>> shlex.split("cp 'my file' b")
['cp', 'my file', 'b']

# html.escape
>>> import html
>>> html.escape("<b>")
'&lt;b&gt;'

# html.unescape
>>> import html
>>> html.unescape("&lt;b&gt;")
'<b>'

# inspect.signature
>>> import inspect
>>> def f(a, b=1):
...     pass
>>> inspect.signature(f)
<Signature (a, b=1)>

# inspect.getsource
>>> import inspect, textwrap
>>> source = inspect.getsource(textwrap.dedent)

# string.Template
>>> from string import Template
>>> Template("Hi $name").substitute(name="Ann")
'Hi Ann'

# string.capwords
>>> import string
>>> string.capwords("hello world")
'Hello World'

# calendar.isleap
>>> import calendar
>>> calendar.isleap(2024)
True

# calendar.monthrange
>>> import calendar
>>> calendar.monthrange(2024, 2)[1]
29

# difflib.get_close_matches
>>> import difflib
>>> difflib.get_close_matches("appel", ["apple", "ape"])
['apple', 'ape']

# timeit.timeit
>>> import timeit
>>> seconds = timeit.timeit("1 + 1", number=1000)

# traceback.print_exc
>>> import traceback
>>> try:
...     1 / 0
... except ZeroDivisionError:
...     traceback.print_exc()  # doctest: +SKIP

# warnings.warn
>>> import warnings
>>> warnings.warn("old function", DeprecationWarning)  # doctest: +SKIP

# ast.literal_eval
>>> import ast
>>> ast.literal_eval("[1, 2]")
[1, 2]

# ast.parse
>>> import ast
>>> tree = ast.parse("x = 1")

# importlib.import_module
>>> import importlib
>>> importlib.import_module("math").sqrt(4)
2.0

# platform.system
>>> import platform
>>> name = platform.system()

# types.SimpleNamespace
>>> from types import SimpleNamespace
>>> SimpleNamespace(a=1).a
1

# typing.NamedTuple
>>> from typing import NamedTuple
>>> class Point(NamedTuple):
...     x: int
...     y: int
>>> Point(1, 2).y
2

# configparser.ConfigParser
>>> from configparser import ConfigParser
>>> c = ConfigParser()
>>> c.read_string("[app]\nport = 80")
>>> c["app"]["port"]
'80'

# array.array
>>> from array import array
>>> array("i", [1, 2, 3]).tolist()
[1, 2, 3]

# unicodedata.name
>>> import unicodedata
>>> unicodedata.name("a")
'LATIN SMALL LETTER A'
"""
