"""Hand-written examples for the names people ask about most, in doctest form.

Each entry is `# name` followed by a doctest session; a test runs every one of them.
"""

EXAMPLES = r"""
# len
>>> len([1, 2, 3])
3
>>> len("hello")
5

# range
>>> list(range(5))
[0, 1, 2, 3, 4]
>>> list(range(2, 10, 2))
[2, 4, 6, 8]

# sorted
>>> sorted([3, 1, 2])
[1, 2, 3]
>>> sorted(["bb", "a"], key=len)
['a', 'bb']

# print
>>> print("hello", "world")
hello world
>>> print("a", "b", sep="-")
a-b

# input
>>> name = input("Name: ")  # doctest: +SKIP

# open
>>> with open("notes.txt", encoding="utf-8") as f:  # doctest: +SKIP
...     text = f.read()

# sum
>>> sum([1, 2, 3])
6

# min
>>> min([3, 1, 2])
1

# max
>>> max([3, 1, 2])
3
>>> max("a", "bbb", key=len)
'bbb'

# abs
>>> abs(-5)
5

# round
>>> round(3.14159, 2)
3.14

# enumerate
>>> for i, c in enumerate("ab"):
...     print(i, c)
0 a
1 b

# zip
>>> list(zip([1, 2], ["a", "b"]))
[(1, 'a'), (2, 'b')]

# map
>>> list(map(str.upper, ["a", "b"]))
['A', 'B']

# filter
>>> list(filter(str.isdigit, ["1", "a"]))
['1']

# reversed
>>> list(reversed([1, 2, 3]))
[3, 2, 1]

# any
>>> any([False, True])
True

# all
>>> all([True, False])
False

# isinstance
>>> isinstance(1, int)
True
>>> isinstance("a", (int, str))
True

# issubclass
>>> issubclass(bool, int)
True

# type
>>> type(1)
<class 'int'>

# int
>>> int("42")
42
>>> int("ff", 16)
255

# float
>>> float("1.5")
1.5

# str
>>> str(42)
'42'

# bool
>>> bool([])
False
>>> bool([0])
True

# list
>>> list("abc")
['a', 'b', 'c']

# dict
>>> dict(a=1, b=2)
{'a': 1, 'b': 2}

# set
>>> len(set([1, 1, 2]))
2

# tuple
>>> tuple([1, 2])
(1, 2)

# bytes
>>> bytes([72, 105])
b'Hi'

# chr
>>> chr(97)
'a'

# ord
>>> ord("a")
97

# hex
>>> hex(255)
'0xff'

# bin
>>> bin(5)
'0b101'

# oct
>>> oct(8)
'0o10'

# divmod
>>> divmod(7, 2)
(3, 1)

# pow
>>> pow(2, 10)
1024

# repr
>>> repr("a")
"'a'"

# getattr
>>> getattr("abc", "upper")()
'ABC'

# hasattr
>>> hasattr([], "append")
True

# setattr
>>> class Point:
...     pass
>>> p = Point()
>>> setattr(p, "x", 3)
>>> p.x
3

# iter
>>> it = iter([1, 2])
>>> next(it)
1

# next
>>> it = iter([1, 2])
>>> next(it)
1
>>> next(it, None)
2

# callable
>>> callable(len)
True

# eval
>>> eval("1 + 2")
3

# format
>>> format(3.14159, ".2f")
'3.14'

# id
>>> a = []
>>> id(a) == id(a)
True

# hash
>>> hash("a") == hash("a")
True

# slice
>>> [0, 1, 2, 3][slice(1, 3)]
[1, 2]

# str.upper
>>> "hello".upper()
'HELLO'

# str.lower
>>> "HELLO".lower()
'hello'

# str.title
>>> "hello world".title()
'Hello World'

# str.capitalize
>>> "hello".capitalize()
'Hello'

# str.split
>>> "a,b,c".split(",")
['a', 'b', 'c']
>>> "a b  c".split()
['a', 'b', 'c']

# str.rsplit
>>> "a.b.c".rsplit(".", 1)
['a.b', 'c']

# str.splitlines
>>> "a\nb".splitlines()
['a', 'b']

# str.join
>>> ", ".join(["a", "b", "c"])
'a, b, c'

# str.strip
>>> "  hello  ".strip()
'hello'

# str.lstrip
>>> "  hello".lstrip()
'hello'

# str.rstrip
>>> "hello\n".rstrip()
'hello'

# str.replace
>>> "hello".replace("l", "L")
'heLLo'

# str.find
>>> "hello".find("l")
2
>>> "hello".find("z")
-1

# str.index
>>> "hello".index("l")
2

# str.count
>>> "banana".count("a")
3

# str.startswith
>>> "hello".startswith("he")
True

# str.endswith
>>> "a.txt".endswith(".txt")
True

# str.format
>>> "{} is {}".format("x", 1)
'x is 1'

# str.isdigit
>>> "123".isdigit()
True

# str.isalpha
>>> "abc".isalpha()
True

# str.isalnum
>>> "abc1".isalnum()
True

# str.isspace
>>> "  ".isspace()
True

# str.zfill
>>> "7".zfill(3)
'007'

# str.center
>>> "hi".center(6, "*")
'**hi**'

# str.ljust
>>> "hi".ljust(4, ".")
'hi..'

# str.rjust
>>> "hi".rjust(4, ".")
'..hi'

# str.partition
>>> "key=value".partition("=")
('key', '=', 'value')

# str.encode
>>> "hi".encode("utf-8")
b'hi'

# str.removeprefix
>>> "test_a".removeprefix("test_")
'a'

# str.removesuffix
>>> "a.py".removesuffix(".py")
'a'

# str.swapcase
>>> "Hello".swapcase()
'hELLO'

# bytes.decode
>>> b"hi".decode("utf-8")
'hi'

# bytes.hex
>>> b"hi".hex()
'6869'

# list.append
>>> a = [1, 2]
>>> a.append(3)
>>> a
[1, 2, 3]

# list.extend
>>> a = [1]
>>> a.extend([2, 3])
>>> a
[1, 2, 3]

# list.insert
>>> a = [1, 3]
>>> a.insert(1, 2)
>>> a
[1, 2, 3]

# list.remove
>>> a = [1, 2, 3]
>>> a.remove(2)
>>> a
[1, 3]

# list.pop
>>> a = [1, 2, 3]
>>> a.pop()
3
>>> a
[1, 2]

# list.index
>>> ["a", "b"].index("b")
1

# list.count
>>> [1, 1, 2].count(1)
2

# list.sort
>>> a = [3, 1, 2]
>>> a.sort()
>>> a
[1, 2, 3]

# list.reverse
>>> a = [1, 2, 3]
>>> a.reverse()
>>> a
[3, 2, 1]

# list.copy
>>> a = [1, 2]
>>> b = a.copy()
>>> b is a
False

# list.clear
>>> a = [1, 2]
>>> a.clear()
>>> a
[]

# dict.get
>>> d = {"a": 1}
>>> d.get("a")
1
>>> d.get("b", 0)
0

# dict.items
>>> d = {"a": 1, "b": 2}
>>> for key, value in d.items():
...     print(key, value)
a 1
b 2

# dict.keys
>>> list({"a": 1, "b": 2}.keys())
['a', 'b']

# dict.values
>>> list({"a": 1, "b": 2}.values())
[1, 2]

# dict.pop
>>> d = {"a": 1, "b": 2}
>>> d.pop("a")
1
>>> d
{'b': 2}

# dict.update
>>> d = {"a": 1}
>>> d.update({"b": 2})
>>> d
{'a': 1, 'b': 2}

# dict.setdefault
>>> d = {}
>>> d.setdefault("a", []).append(1)
>>> d
{'a': [1]}

# dict.popitem
>>> d = {"a": 1, "b": 2}
>>> d.popitem()
('b', 2)

# dict.fromkeys
>>> dict.fromkeys(["a", "b"], 0)
{'a': 0, 'b': 0}

# set.add
>>> s = {1}
>>> s.add(2)
>>> s
{1, 2}

# set.remove
>>> s = {1, 2}
>>> s.remove(1)
>>> s
{2}

# set.discard
>>> s = {1, 2}
>>> s.discard(3)
>>> s
{1, 2}

# set.union
>>> {1, 2}.union({2, 3})
{1, 2, 3}

# set.intersection
>>> {1, 2}.intersection({2, 3})
{2}

# set.difference
>>> {1, 2}.difference({2, 3})
{1}

# set.issubset
>>> {1}.issubset({1, 2})
True

# json.dumps
>>> import json
>>> json.dumps({"a": 1, "b": [2, 3]})
'{"a": 1, "b": [2, 3]}'

# json.loads
>>> import json
>>> json.loads('{"a": 1}')
{'a': 1}

# json.dump
>>> import json
>>> with open("data.json", "w") as f:  # doctest: +SKIP
...     json.dump({"a": 1}, f)

# json.load
>>> import json
>>> with open("data.json") as f:  # doctest: +SKIP
...     data = json.load(f)

# os.getcwd
>>> import os
>>> path = os.getcwd()

# os.listdir
>>> import os
>>> for name in os.listdir("."):  # doctest: +SKIP
...     print(name)

# os.makedirs
>>> import os
>>> os.makedirs("data/raw", exist_ok=True)  # doctest: +SKIP

# os.mkdir
>>> import os
>>> os.mkdir("data")  # doctest: +SKIP

# os.remove
>>> import os
>>> os.remove("old.txt")  # doctest: +SKIP

# os.rename
>>> import os
>>> os.rename("old.txt", "new.txt")  # doctest: +SKIP

# os.walk
>>> import os
>>> for root, dirs, files in os.walk("."):  # doctest: +SKIP
...     print(root, len(files))

# os.getenv
>>> import os
>>> os.getenv("NOT_SET", "default")
'default'

# os.cpu_count
>>> import os
>>> n = os.cpu_count()

# os.path.join
>>> import os.path
>>> os.path.join("dir", "file.txt")  # doctest: +SKIP
'dir/file.txt'

# os.path.exists
>>> import os.path
>>> os.path.exists("missing.txt")
False

# os.path.basename
>>> import os.path
>>> os.path.basename("/tmp/a.txt")
'a.txt'

# os.path.dirname
>>> import os.path
>>> os.path.dirname("/tmp/a.txt")
'/tmp'

# os.path.splitext
>>> import os.path
>>> os.path.splitext("a.txt")
('a', '.txt')

# os.path.isfile
>>> import os.path
>>> os.path.isfile("missing.txt")
False

# os.path.isdir
>>> import os.path
>>> os.path.isdir(".")
True

# os.path.abspath
>>> import os.path
>>> path = os.path.abspath("a.txt")

# os.path.getsize
>>> import os.path
>>> size = os.path.getsize("a.txt")  # doctest: +SKIP

# os.path.split
>>> import os.path
>>> os.path.split("/tmp/a.txt")
('/tmp', 'a.txt')

# sys.exit
>>> import sys
>>> sys.exit(1)  # doctest: +SKIP

# sys.getsizeof
>>> import sys
>>> sys.getsizeof([]) > 0
True

# sys.getrecursionlimit
>>> import sys
>>> limit = sys.getrecursionlimit()

# re.search
>>> import re
>>> m = re.search(r"\d+", "abc 42")
>>> m.group()
'42'

# re.match
>>> import re
>>> m = re.match(r"(\w+)=(\d+)", "x=10")
>>> m.groups()
('x', '10')

# re.fullmatch
>>> import re
>>> bool(re.fullmatch(r"[a-z]+", "abc"))
True

# re.findall
>>> import re
>>> re.findall(r"\d+", "1 and 22")
['1', '22']

# re.finditer
>>> import re
>>> [m.start() for m in re.finditer("a", "banana")]
[1, 3, 5]

# re.sub
>>> import re
>>> re.sub(r"\s+", " ", "a   b")
'a b'

# re.split
>>> import re
>>> re.split(r"[,;]", "a,b;c")
['a', 'b', 'c']

# re.compile
>>> import re
>>> pattern = re.compile(r"\d+")
>>> pattern.findall("1 22")
['1', '22']

# re.escape
>>> import re
>>> re.escape("a.b")
'a\\.b'

# math.sqrt
>>> import math
>>> math.sqrt(16)
4.0

# math.floor
>>> import math
>>> math.floor(2.7)
2

# math.ceil
>>> import math
>>> math.ceil(2.1)
3

# math.factorial
>>> import math
>>> math.factorial(5)
120

# math.gcd
>>> import math
>>> math.gcd(12, 18)
6

# math.lcm
>>> import math
>>> math.lcm(4, 6)
12

# math.sin
>>> import math
>>> math.sin(0)
0.0

# math.cos
>>> import math
>>> math.cos(0)
1.0

# math.exp
>>> import math
>>> math.exp(0)
1.0

# math.log
>>> import math
>>> math.log(8, 2)
3.0

# math.log2
>>> import math
>>> math.log2(8)
3.0

# math.log10
>>> import math
>>> math.log10(1000)
3.0

# math.pow
>>> import math
>>> math.pow(2, 3)
8.0

# math.hypot
>>> import math
>>> math.hypot(3, 4)
5.0

# math.isclose
>>> import math
>>> math.isclose(0.1 + 0.2, 0.3)
True

# math.comb
>>> import math
>>> math.comb(5, 2)
10

# math.prod
>>> import math
>>> math.prod([2, 3, 4])
24

# math.radians
>>> import math
>>> math.radians(180) == math.pi
True

# math.isqrt
>>> import math
>>> math.isqrt(17)
4

# random.randint
>>> import random
>>> n = random.randint(1, 6)

# random.random
>>> import random
>>> 0 <= random.random() < 1
True

# random.choice
>>> import random
>>> color = random.choice(["red", "green", "blue"])

# random.choices
>>> import random
>>> letters = random.choices("abc", k=5)

# random.shuffle
>>> import random
>>> items = [1, 2, 3]
>>> random.shuffle(items)

# random.sample
>>> import random
>>> numbers = random.sample(range(100), 3)

# random.uniform
>>> import random
>>> x = random.uniform(0, 10)

# random.seed
>>> import random
>>> random.seed(42)

# random.gauss
>>> import random
>>> x = random.gauss(0, 1)

# itertools.chain
>>> import itertools
>>> list(itertools.chain([1, 2], [3]))
[1, 2, 3]

# itertools.product
>>> import itertools
>>> list(itertools.product("ab", [1, 2]))
[('a', 1), ('a', 2), ('b', 1), ('b', 2)]

# itertools.permutations
>>> import itertools
>>> list(itertools.permutations([1, 2]))
[(1, 2), (2, 1)]

# itertools.combinations
>>> import itertools
>>> list(itertools.combinations("abc", 2))
[('a', 'b'), ('a', 'c'), ('b', 'c')]

# itertools.count
>>> import itertools
>>> counter = itertools.count(10)
>>> next(counter)
10

# itertools.cycle
>>> import itertools
>>> c = itertools.cycle("ab")
>>> [next(c) for _ in range(3)]
['a', 'b', 'a']

# itertools.repeat
>>> import itertools
>>> list(itertools.repeat(7, 3))
[7, 7, 7]

# itertools.islice
>>> import itertools
>>> list(itertools.islice(range(100), 3))
[0, 1, 2]

# itertools.groupby
>>> import itertools
>>> [(k, len(list(g))) for k, g in itertools.groupby("aabb")]
[('a', 2), ('b', 2)]

# itertools.accumulate
>>> import itertools
>>> list(itertools.accumulate([1, 2, 3]))
[1, 3, 6]

# itertools.zip_longest
>>> import itertools
>>> list(itertools.zip_longest([1, 2], ["a"]))
[(1, 'a'), (2, None)]

# itertools.takewhile
>>> import itertools
>>> list(itertools.takewhile(lambda x: x < 3, [1, 2, 3, 1]))
[1, 2]

# itertools.dropwhile
>>> import itertools
>>> list(itertools.dropwhile(lambda x: x < 3, [1, 2, 3, 1]))
[3, 1]

# itertools.starmap
>>> import itertools
>>> list(itertools.starmap(pow, [(2, 3), (3, 2)]))
[8, 9]

# itertools.pairwise
>>> import itertools
>>> list(itertools.pairwise([1, 2, 3]))
[(1, 2), (2, 3)]

# itertools.tee
>>> import itertools
>>> a, b = itertools.tee([1, 2])
>>> list(a), list(b)
([1, 2], [1, 2])

# functools.reduce
>>> import functools
>>> functools.reduce(lambda a, b: a + b, [1, 2, 3])
6

# functools.partial
>>> import functools
>>> double = functools.partial(pow, 2)
>>> double(3)
8

# functools.lru_cache
>>> import functools
>>> @functools.lru_cache(maxsize=None)
... def fib(n):
...     return n if n < 2 else fib(n - 1) + fib(n - 2)
>>> fib(30)
832040

# functools.cache
>>> import functools
>>> @functools.cache
... def square(n):
...     return n * n
>>> square(4)
16

# functools.wraps
>>> import functools
>>> def logged(func):
...     @functools.wraps(func)
...     def wrapper(*args):
...         return func(*args)
...     return wrapper

# functools.cmp_to_key
>>> import functools
>>> sorted([1, 3, 2], key=functools.cmp_to_key(lambda a, b: b - a))
[3, 2, 1]

# collections.Counter
>>> from collections import Counter
>>> Counter("banana").most_common(1)
[('a', 3)]

# collections.Counter.most_common
>>> from collections import Counter
>>> Counter("banana").most_common(2)
[('a', 3), ('n', 2)]

# collections.defaultdict
>>> from collections import defaultdict
>>> d = defaultdict(list)
>>> d["a"].append(1)
>>> d["a"]
[1]

# collections.deque
>>> from collections import deque
>>> d = deque([1, 2])
>>> d.appendleft(0)
>>> d
deque([0, 1, 2])

# collections.deque.appendleft
>>> from collections import deque
>>> d = deque([1, 2])
>>> d.appendleft(0)
>>> d
deque([0, 1, 2])

# collections.deque.popleft
>>> from collections import deque
>>> d = deque([1, 2])
>>> d.popleft()
1

# collections.deque.rotate
>>> from collections import deque
>>> d = deque([1, 2, 3])
>>> d.rotate(1)
>>> d
deque([3, 1, 2])

# collections.namedtuple
>>> from collections import namedtuple
>>> Point = namedtuple("Point", ["x", "y"])
>>> Point(1, 2).x
1

# collections.OrderedDict
>>> from collections import OrderedDict
>>> d = OrderedDict(a=1, b=2)
>>> d.move_to_end("a")
>>> list(d)
['b', 'a']

# collections.ChainMap
>>> from collections import ChainMap
>>> ChainMap({"a": 1}, {"a": 2, "b": 3})["a"]
1
"""
