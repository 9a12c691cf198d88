"""Hand-written answers to everyday tasks, the language itself, exceptions and small programs.

Each entry is `@ phrases`, parted by `;`, one line of answer, a blank line and code: a doctest session or a plain program.
Tests run every session and every program that has no file, network or user in it.
"""

TASKS = r"""
@ reverse a list
Slice it with a step of -1, or call `reverse` to change it in place.

>>> a = [1, 2, 3]
>>> a[::-1]
[3, 2, 1]

@ reverse a string
Slice the string with a step of -1.

>>> "hello"[::-1]
'olleh'

@ sort a list
Use `sorted` for a new list, or `list.sort` to sort in place.

>>> sorted([3, 1, 2])
[1, 2, 3]

@ sort a list in descending order; sort a list in reverse order
Pass `reverse=True` to `sorted`.

>>> sorted([3, 1, 2], reverse=True)
[3, 2, 1]

@ sort a list of strings by length; sort strings by length
Pass `key=len` to `sorted`.

>>> sorted(["ccc", "a", "bb"], key=len)
['a', 'bb', 'ccc']

@ sort a dictionary by value; sort a dict by value
Sort its items with a key function that takes the value.

>>> d = {"a": 2, "b": 1}
>>> dict(sorted(d.items(), key=lambda item: item[1]))
{'b': 1, 'a': 2}

@ sort a dictionary by key; sort a dict by key
Sort its items.

>>> dict(sorted({"b": 1, "a": 2}.items()))
{'a': 2, 'b': 1}

@ sort a list of tuples by the second item; sort tuples by the second item
Use `operator.itemgetter` as the key.

>>> from operator import itemgetter
>>> sorted([("a", 2), ("b", 1)], key=itemgetter(1))
[('b', 1), ('a', 2)]

@ loop over a list; iterate over a list; go through a list
Use a `for` loop.

>>> for item in ["a", "b"]:
...     print(item)
a
b

@ loop over a list with an index; get the index in a for loop; loop with an index
Use `enumerate`.

>>> for i, item in enumerate(["a", "b"]):
...     print(i, item)
0 a
1 b

@ loop over a dictionary; iterate over a dict; loop over a dict
Use its `items` method.

>>> d = {"a": 1, "b": 2}
>>> for key, value in d.items():
...     print(key, value)
a 1
b 2

@ loop over two lists at once; iterate over two lists together
Use `zip`.

>>> for a, b in zip([1, 2], ["x", "y"]):
...     print(a, b)
1 x
2 y

@ add an item to a list; append to a list
Use `list.append`.

>>> a = [1, 2]
>>> a.append(3)
>>> a
[1, 2, 3]

@ join two lists; concatenate two lists; combine two lists
Use `+` for a new list, or `extend` to change the first.

>>> [1, 2] + [3]
[1, 2, 3]

@ remove an item from a list; delete an item from a list
Use `remove` with the value, or `pop` with the position.

>>> a = ["x", "y", "z"]
>>> a.remove("y")
>>> a.pop(0)
'x'
>>> a
['z']

@ remove duplicates from a list; make a list unique
Make a dictionary of its items, which keeps their order.

>>> list(dict.fromkeys([1, 2, 1, 3]))
[1, 2, 3]

@ get the length of a list; find the length of a list; count the items of a list
Use `len`.

>>> len([1, 2, 3])
3

@ get the last item of a list; get the last element of a list
Use the index -1.

>>> a = [1, 2, 3]
>>> a[-1]
3

@ slice a list; get a part of a list
Write the start and the stop in brackets; the stop is not included.

>>> a = [0, 1, 2, 3, 4]
>>> a[1:3]
[1, 2]

@ copy a list
Use its `copy` method, or `copy.deepcopy` for nested lists.

>>> a = [1, 2]
>>> b = a.copy()
>>> b.append(3)
>>> a
[1, 2]

@ flatten a list of lists; flatten a list; flatten a nested list
Use a list comprehension with two loops.

>>> lists = [[1, 2], [3]]
>>> [x for inner in lists for x in inner]
[1, 2, 3]

@ find the maximum of a list; get the largest number in a list; find the largest item
Use `max`.

>>> max([3, 7, 5])
7

@ find the minimum of a list; get the smallest number in a list; find the smallest item
Use `min`.

>>> min([3, 7, 5])
3

@ sum a list; add the numbers of a list; get the sum of a list
Use `sum`.

>>> sum([1, 2, 3])
6

@ compute the average of a list; get the mean of a list; compute the average
Use `statistics.mean`.

>>> import statistics
>>> statistics.mean([1, 2, 3, 4])
2.5

@ compute the median; get the median of a list
Use `statistics.median`.

>>> import statistics
>>> statistics.median([5, 1, 3])
3

@ filter a list; keep some items of a list
Use a list comprehension with a condition.

>>> [x for x in [1, 2, 3, 4] if x % 2 == 0]
[2, 4]

@ check if an item is in a list; test whether a list contains an item
Use the `in` operator.

>>> 2 in [1, 2, 3]
True

@ check if a list is empty; test for an empty list
An empty list is false in a condition.

>>> a = []
>>> if not a:
...     print("empty")
empty

@ find the index of an item in a list; find the position of an item
Use `list.index`.

>>> ["a", "b", "c"].index("b")
1

@ split a list into chunks; cut a list into parts of equal size
Slice it with a step.

>>> a = [1, 2, 3, 4, 5]
>>> [a[i:i + 2] for i in range(0, len(a), 2)]
[[1, 2], [3, 4], [5]]

@ count the items in a list; count how often items occur; count words
Use `collections.Counter`.

>>> from collections import Counter
>>> Counter(["a", "b", "a"])
Counter({'a': 2, 'b': 1})

@ shuffle a list
Use `random.shuffle`, which changes the list in place.

>>> import random
>>> items = [1, 2, 3]
>>> random.shuffle(items)

@ choose a random item; pick a random item from a list
Use `random.choice`.

>>> import random
>>> item = random.choice(["a", "b", "c"])

@ make a random number; generate a random number; get a random integer
Use `random.randint` for an integer, or `random.random` for a float from 0 to 1.

>>> import random
>>> n = random.randint(1, 10)

@ make a dictionary; create a dict; create a dictionary
Write keys and values in braces.

>>> d = {"a": 1, "b": 2}
>>> d["a"]
1

@ get a value from a dictionary with a default; avoid a KeyError
Use `dict.get`.

>>> d = {"a": 1}
>>> d.get("b", 0)
0

@ merge two dictionaries; combine two dicts; merge two dicts
Use the `|` operator.

>>> {"a": 1} | {"b": 2}
{'a': 1, 'b': 2}

@ remove a key from a dictionary; delete a key from a dict
Use `del`, or `pop` to get the value too.

>>> d = {"a": 1, "b": 2}
>>> del d["a"]
>>> d
{'b': 2}

@ check if a key is in a dictionary; check if a key exists
Use the `in` operator.

>>> "a" in {"a": 1}
True

@ invert a dictionary; swap keys and values
Use a dict comprehension.

>>> d = {"a": 1, "b": 2}
>>> {value: key for key, value in d.items()}
{1: 'a', 2: 'b'}

@ group items by a key; group a list
Use `collections.defaultdict(list)`.

>>> from collections import defaultdict
>>> groups = defaultdict(list)
>>> for word in ["apple", "bee", "ant"]:
...     groups[word[0]].append(word)
>>> groups["a"]
['apple', 'ant']

@ make a set; create a set
Write the items in braces, or call `set`.

>>> s = {1, 2, 2}
>>> len(s)
2

@ split a string; split a string into words
Use `str.split`.

>>> "one two three".split()
['one', 'two', 'three']

@ join strings; join a list of strings
Use `str.join`.

>>> ", ".join(["a", "b", "c"])
'a, b, c'

@ replace text in a string; replace a part of a string
Use `str.replace`.

>>> "hello".replace("l", "L")
'heLLo'

@ convert a string to upper case; make a string upper case
Use `str.upper`.

>>> "hello".upper()
'HELLO'

@ convert a string to lower case; make a string lower case
Use `str.lower`.

>>> "HELLO".lower()
'hello'

@ remove whitespace from a string; strip a string; trim a string
Use `str.strip`.

>>> "  hello  ".strip()
'hello'

@ check if a string contains a substring; find a substring
Use the `in` operator, or `str.find` for the position.

>>> "ell" in "hello"
True

@ check if a string starts with a prefix
Use `str.startswith`.

>>> "hello".startswith("he")
True

@ check if a string is a number; test whether a string is numeric
Use `str.isdigit`.

>>> "42".isdigit()
True

@ convert a string to an integer; convert a string to an int; parse an integer
Use `int`.

>>> int("42")
42

@ convert a string to a float; parse a float
Use `float`.

>>> float("1.5")
1.5

@ convert a number to a string; convert an int to a string
Use `str`.

>>> str(42)
'42'

@ convert a string to bytes; encode a string
Use `str.encode`.

>>> "hi".encode("utf-8")
b'hi'

@ convert bytes to a string; decode bytes
Use `bytes.decode`.

>>> b"hi".decode("utf-8")
'hi'

@ format a string; put a variable into a string; use a variable in a string
Use an f-string.

>>> name = "Ann"
>>> f"Hello {name}"
'Hello Ann'

@ format a number with two decimals; round a number to two decimals
Use the format `.2f`.

>>> f"{3.14159:.2f}"
'3.14'

@ round a number
Use `round`.

>>> round(3.14159, 2)
3.14

@ repeat a string
Multiply it by a number.

>>> "ab" * 3
'ababab'

@ count a character in a string; count letters
Use `str.count`.

>>> "banana".count("a")
3

@ read a file; read a text file; open a file; read a whole file
Open it with `open` in a `with` statement and call `read`.

with open("notes.txt", encoding="utf-8") as f:
    text = f.read()

@ read a file line by line; loop over the lines of a file
Loop over the file object.

with open("notes.txt", encoding="utf-8") as f:
    for line in f:
        print(line.rstrip())

@ write a file; write text to a file; save text to a file
Open it with mode "w" and call `write`.

with open("notes.txt", "w", encoding="utf-8") as f:
    f.write("hello")

@ append to a file; add text to a file
Open it with mode "a".

with open("log.txt", "a", encoding="utf-8") as f:
    f.write("one more line\n")

@ check if a file exists; test whether a file exists
Use `pathlib.Path.exists`.

>>> from pathlib import Path
>>> Path("missing.txt").exists()
False

@ delete a file; remove a file
Use `os.remove`.

import os
os.remove("old.txt")

@ copy a file
Use `shutil.copy`.

import shutil
shutil.copy("a.txt", "b.txt")

@ move a file
Use `shutil.move`.

import shutil
shutil.move("a.txt", "dir/a.txt")

@ rename a file
Use `os.rename`.

import os
os.rename("old.txt", "new.txt")

@ list the files in a directory; list the files of a folder; list a directory
Use `os.listdir`, or `pathlib.Path.iterdir`.

import os
for name in os.listdir("."):
    print(name)

@ make a directory; create a directory; create a folder; make a folder
Use `os.makedirs`.

import os
os.makedirs("data/raw", exist_ok=True)

@ delete a directory; remove a folder
Use `shutil.rmtree`.

import shutil
shutil.rmtree("build")

@ get the current directory; get the working directory
Use `os.getcwd`.

import os
print(os.getcwd())

@ change the current directory
Use `os.chdir`.

import os
os.chdir("data")

@ join paths; build a path
Use the `/` operator of `pathlib.Path`, or `os.path.join`.

>>> from pathlib import Path
>>> path = Path("data") / "a.txt"
>>> path.name
'a.txt'

@ get the extension of a file; get the file extension
Use the `suffix` of a `pathlib.Path`.

>>> from pathlib import Path
>>> Path("a.txt").suffix
'.txt'

@ get the size of a file
Use `os.path.getsize`.

import os
print(os.path.getsize("a.txt"))

@ find all files with a pattern; find files by name; find all Python files
Use `pathlib.Path.rglob`.

from pathlib import Path
for path in Path(".").rglob("*.py"):
    print(path)

@ walk a directory tree
Use `os.walk`.

import os
for root, dirs, files in os.walk("."):
    print(root, len(files))

@ read an environment variable; get an environment variable
Use `os.getenv`, or `os.environ`.

>>> import os
>>> os.getenv("NOT_SET", "default")
'default'

@ make a temporary file; create a temporary file
Use `tempfile.NamedTemporaryFile`.

import tempfile
with tempfile.NamedTemporaryFile("w") as f:
    f.write("hello")

@ make a temporary directory; create a temporary folder
Use `tempfile.TemporaryDirectory`.

import tempfile
with tempfile.TemporaryDirectory() as path:
    print(path)

@ read a JSON file; load a JSON file
Use `json.load`.

import json
with open("data.json") as f:
    data = json.load(f)

@ write a JSON file; save JSON to a file
Use `json.dump`.

import json
with open("data.json", "w") as f:
    json.dump({"a": 1}, f, indent=2)

@ parse JSON; parse a JSON string
Use `json.loads`.

>>> import json
>>> json.loads('{"a": 1}')
{'a': 1}

@ convert a dict to JSON; convert a dictionary to JSON; make JSON
Use `json.dumps`.

>>> import json
>>> json.dumps({"a": 1})
'{"a": 1}'

@ pretty print JSON; indent JSON
Pass `indent` to `json.dumps`.

>>> import json
>>> print(json.dumps({"a": 1}, indent=2))
{
  "a": 1
}

@ read a CSV file; load a CSV file
Use `csv.DictReader`, which gives each row as a dictionary.

import csv
with open("data.csv", newline="") as f:
    for row in csv.DictReader(f):
        print(row)

@ write a CSV file; save a CSV file
Use `csv.writer`.

import csv
with open("data.csv", "w", newline="") as f:
    writer = csv.writer(f)
    writer.writerow(["name", "age"])

@ get the current time; get the current date and time; get the time now
Use `datetime.datetime.now`.

from datetime import datetime
print(datetime.now())

@ get today's date; get the current date
Use `datetime.date.today`.

from datetime import date
print(date.today())

@ format a date
Use `strftime`.

>>> from datetime import date
>>> date(2024, 1, 31).strftime("%d.%m.%Y")
'31.01.2024'

@ parse a date; convert a string to a date
Use `datetime.datetime.strptime`.

>>> from datetime import datetime
>>> datetime.strptime("2024-01-31", "%Y-%m-%d")
datetime.datetime(2024, 1, 31, 0, 0)

@ add days to a date; add a day to a date
Add a `datetime.timedelta`.

>>> from datetime import date, timedelta
>>> date(2024, 1, 31) + timedelta(days=1)
datetime.date(2024, 2, 1)

@ get the difference between two dates; subtract two dates
Subtract them; the result is a `datetime.timedelta`.

>>> from datetime import date
>>> (date(2024, 3, 1) - date(2024, 2, 1)).days
29

@ measure the time of code; measure how long code takes; time my code
Use `time.perf_counter`.

import time
start = time.perf_counter()
total = sum(range(1000000))
print(time.perf_counter() - start)

@ wait for a second; sleep; pause a program
Use `time.sleep`.

import time
time.sleep(1)

@ run a command; run a shell command; run another program; start a program
Use `subprocess.run`.

import subprocess
result = subprocess.run(["ls"], capture_output=True, text=True)
print(result.stdout)

@ read command-line arguments; parse command-line arguments; parse arguments
Use `argparse`.

import argparse
parser = argparse.ArgumentParser()
parser.add_argument("name")
parser.add_argument("--count", type=int, default=1)
args = parser.parse_args(["Ann"])
print(args.name, args.count)

@ exit a program; end a program; stop a program
Use `sys.exit`.

import sys
sys.exit(0)

@ start a thread; run a function in a thread; use threads
Use `threading.Thread`.

import threading
thread = threading.Thread(target=print, args=("hello",))
thread.start()
thread.join()

@ run functions in parallel; use a thread pool
Use `concurrent.futures.ThreadPoolExecutor`.

>>> from concurrent.futures import ThreadPoolExecutor
>>> with ThreadPoolExecutor(4) as pool:
...     list(pool.map(abs, [-1, -2]))
[1, 2]

@ write log messages; log a message; use logging
Use the `logging` module.

import logging
logging.basicConfig(level=logging.INFO)
logging.info("started")

@ download a web page; open a URL; fetch a URL
Use `urllib.request.urlopen`.

from urllib.request import urlopen
with urlopen("https://example.com") as response:
    html = response.read().decode()

@ parse a URL; split a URL
Use `urllib.parse.urlparse`.

>>> from urllib.parse import urlparse
>>> urlparse("https://example.com/a?b=1").path
'/a'

@ hash a string; compute a SHA-256 hash
Use `hashlib.sha256`.

import hashlib
print(hashlib.sha256(b"hello").hexdigest())

@ encode data as Base64; encode Base64
Use `base64.b64encode`.

>>> import base64
>>> base64.b64encode(b"hi")
b'aGk='

@ find numbers in a string; extract numbers from text
Use `re.findall`.

>>> import re
>>> re.findall(r"\d+", "3 cats and 12 dogs")
['3', '12']

@ search with a regular expression; match a pattern; use a regular expression
Use `re.search`.

>>> import re
>>> m = re.search(r"(\w+)@(\w+)", "ann@example")
>>> m.group(1)
'ann'

@ replace with a regular expression; replace a pattern
Use `re.sub`.

>>> import re
>>> re.sub(r"\d", "#", "a1b2")
'a#b#'

@ compute a square root; get the square root
Use `math.sqrt`.

>>> import math
>>> math.sqrt(16)
4.0

@ get pi; use pi
Use `math.pi`.

>>> import math
>>> round(math.pi, 5)
3.14159

@ get the remainder of a division; check if a number is even
Use the `%` operator.

>>> 7 % 2
1
>>> 4 % 2 == 0
True

@ divide two integers; do integer division
Use `//` for a whole number and `/` for a float.

>>> 7 // 2
3
>>> 7 / 2
3.5

@ raise a number to a power; compute a power
Use the `**` operator.

>>> 2 ** 10
1024

@ swap two variables
Assign both at once.

>>> a, b = 1, 2
>>> a, b = b, a
>>> a, b
(2, 1)

@ get all permutations
Use `itertools.permutations`.

>>> import itertools
>>> list(itertools.permutations("ab"))
[('a', 'b'), ('b', 'a')]

@ get all combinations
Use `itertools.combinations`.

>>> import itertools
>>> list(itertools.combinations([1, 2, 3], 2))
[(1, 2), (1, 3), (2, 3)]

@ cache the results of a function; cache a function
Use the `functools.cache` decorator.

import functools

@functools.cache
def square(n):
    return n * n

@ make a priority queue; use a heap
Use `heapq`.

>>> import heapq
>>> heap = []
>>> heapq.heappush(heap, (2, "b"))
>>> heapq.heappush(heap, (1, "a"))
>>> heapq.heappop(heap)
(1, 'a')

@ make a queue
Use `collections.deque`.

>>> from collections import deque
>>> q = deque()
>>> q.append("a")
>>> q.popleft()
'a'

@ use a SQLite database; open a database
Use `sqlite3.connect`.

>>> import sqlite3
>>> db = sqlite3.connect(":memory:")
>>> db.execute("select 1 + 1").fetchone()
(2,)
>>> db.close()

@ save a Python object to a file; pickle an object
Use `pickle.dump`.

import pickle
with open("data.pkl", "wb") as f:
    pickle.dump([1, 2, 3], f)

@ zip files; make a ZIP file
Use `zipfile.ZipFile`.

import zipfile
with zipfile.ZipFile("a.zip", "w") as z:
    z.write("notes.txt")

@ unzip a file; extract a ZIP file
Use `zipfile.ZipFile`.

import zipfile
with zipfile.ZipFile("a.zip") as z:
    z.extractall("out")

@ write a unit test; test my code
Use the `unittest` module.

import unittest

class TestMath(unittest.TestCase):
    def test_add(self):
        self.assertEqual(1 + 1, 2)

@ ask the user for input; read user input; read a line from the user
Use `input`.

name = input("Name: ")
print("Hello", name)

@ print without a newline
Pass `end=""` to `print`.

print("hello", end="")

@ import a module
Write `import` and its name.

>>> import math
>>> math.sqrt(9)
3.0

@ check the type of a variable; get the type of an object
Use `isinstance` to test it, or `type` to get it.

>>> isinstance(1, int)
True

@ copy an object; make a deep copy
Use `copy.deepcopy`.

>>> import copy
>>> a = [1, [2]]
>>> b = copy.deepcopy(a)
>>> b[1] is a[1]
False

@ make a random password; create a secure token
Use `secrets`.

>>> import secrets
>>> token = secrets.token_urlsafe(16)

@ make a unique id; create a UUID
Use `uuid.uuid4`.

>>> import uuid
>>> key = str(uuid.uuid4())

@ wrap long text; wrap text
Use `textwrap.fill`.

>>> import textwrap
>>> print(textwrap.fill("one two three", 8))
one two
three

@ run async code; run a coroutine
Use `asyncio.run`.

import asyncio

async def main():
    await asyncio.sleep(0)
    print("done")

asyncio.run(main())
"""
