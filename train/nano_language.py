"""Hand-written answers about the language, its exceptions and small programs, in the form of `nano_howto.TASKS`.

`TOPICS`: `@ singular; plural`. `ERRORS`: `@ name`. `PROGRAMS`: `@ what the program or function does`.
"""

TOPICS = r"""
@ a for loop; for loops
A `for` loop runs its body once for each item of an iterable.

>>> for i in range(3):
...     print(i)
0
1
2

@ a while loop; while loops
A `while` loop runs as long as its condition is true.

>>> n = 3
>>> while n > 0:
...     n -= 1
>>> n
0

@ an if statement; if statements
An `if` statement chooses between branches with `if`, `elif` and `else`.

>>> x = 5
>>> if x > 3:
...     print("big")
... else:
...     print("small")
big

@ a list comprehension; list comprehensions
A list comprehension builds a list from an expression and a loop in one line.

>>> [x * x for x in range(4)]
[0, 1, 4, 9]

@ a dict comprehension; dict comprehensions
A dict comprehension builds a dictionary in one line.

>>> {x: x * x for x in range(3)}
{0: 0, 1: 1, 2: 4}

@ a set comprehension; set comprehensions
A set comprehension builds a set in one line.

>>> {x % 2 for x in range(4)}
{0, 1}

@ a generator expression; generator expressions
A generator expression yields values one by one, without making a list.

>>> sum(x * x for x in range(4))
14

@ a function; functions
A function is defined with `def` and gives back a value with `return`.

>>> def add(a, b):
...     return a + b
>>> add(1, 2)
3

@ a default argument; default arguments
A default argument is used when the caller gives no value.

>>> def greet(name="world"):
...     return "hello " + name
>>> greet()
'hello world'

@ a keyword argument; keyword arguments
A keyword argument is passed by name.

>>> def power(base, exponent):
...     return base ** exponent
>>> power(base=2, exponent=3)
8

@ *args; *args
`*args` collects the extra positional arguments in a tuple.

>>> def total(*args):
...     return sum(args)
>>> total(1, 2, 3)
6

@ **kwargs; **kwargs
`**kwargs` collects the extra keyword arguments in a dictionary.

>>> def options(**kwargs):
...     return kwargs
>>> options(a=1)
{'a': 1}

@ a lambda; lambdas
A lambda is a small function without a name.

>>> double = lambda x: x * 2
>>> double(4)
8

@ a class; classes
A class is defined with `class`; its `__init__` method sets up a new object.

>>> class Dog:
...     def __init__(self, name):
...         self.name = name
>>> Dog("Rex").name
'Rex'

@ a method; methods
A method is a function in a class; its first argument is `self`, the object.

>>> class Counter:
...     def __init__(self):
...         self.n = 0
...     def add(self):
...         self.n += 1
...         return self.n
>>> Counter().add()
1

@ inheritance; inheritance
With inheritance a class takes over the methods of a base class.

>>> class Animal:
...     def speak(self):
...         return "..."
>>> class Dog(Animal):
...     def speak(self):
...         return "woof"
>>> Dog().speak()
'woof'

@ super; super
`super` calls a method of the base class.

>>> class Base:
...     def __init__(self, x):
...         self.x = x
>>> class Child(Base):
...     def __init__(self, x, y):
...         super().__init__(x)
...         self.y = y
>>> Child(1, 2).x
1

@ a property; properties
A property is a method that is read like an attribute.

>>> class Circle:
...     def __init__(self, r):
...         self.r = r
...     @property
...     def area(self):
...         return 3 * self.r ** 2
>>> Circle(2).area
12

@ a static method; static methods
A static method needs no object; it is marked with `@staticmethod`.

>>> class Tools:
...     @staticmethod
...     def add(a, b):
...         return a + b
>>> Tools.add(1, 2)
3

@ a class method; class methods
A class method gets the class as its first argument; it is marked with `@classmethod`.

>>> class Point:
...     def __init__(self, x):
...         self.x = x
...     @classmethod
...     def zero(cls):
...         return cls(0)
>>> Point.zero().x
0

@ a decorator; decorators
A decorator is a function that takes a function and returns another one.

>>> def twice(func):
...     def wrapper(x):
...         return func(func(x))
...     return wrapper
>>> @twice
... def add_one(x):
...     return x + 1
>>> add_one(1)
3

@ a generator; generators
A generator is a function with `yield`; it makes its values one by one.

>>> def count(n):
...     i = 0
...     while i < n:
...         yield i
...         i += 1
>>> list(count(3))
[0, 1, 2]

@ yield; yield
`yield` gives a value to the caller and pauses the function there.

>>> def two():
...     yield 1
...     yield 2
>>> list(two())
[1, 2]

@ an iterator; iterators
An iterator gives one item after the other with `next`.

>>> it = iter([1, 2])
>>> next(it)
1

@ an f-string; f-strings
An f-string puts expressions in braces into a string.

>>> name = "Ann"
>>> f"{name} has {1 + 2} cats"
'Ann has 3 cats'

@ a with statement; with statements
A `with` statement opens something and surely closes it again.

with open("notes.txt", encoding="utf-8") as f:
    text = f.read()

@ a context manager; context managers
A context manager is an object with `__enter__` and `__exit__`, used by `with`.

>>> class Timer:
...     def __enter__(self):
...         print("start")
...     def __exit__(self, *error):
...         print("stop")
>>> with Timer():
...     print("work")
start
work
stop

@ a try statement; try and except
`try` runs code and `except` handles its errors.

>>> try:
...     1 / 0
... except ZeroDivisionError:
...     print("cannot divide by zero")
cannot divide by zero

@ an exception; exceptions
An exception is an error at run time. Raise it with `raise`, handle it with `except`.

>>> try:
...     raise ValueError("bad value")
... except ValueError as error:
...     print(error)
bad value

@ finally; finally
The `finally` block always runs, with or without an error.

>>> try:
...     x = 1
... finally:
...     print("done")
done

@ a custom exception; custom exceptions
Make a subclass of `Exception`.

>>> class AppError(Exception):
...     pass
>>> try:
...     raise AppError("failed")
... except AppError as error:
...     print(error)
failed

@ an assert statement; assert statements
`assert` raises an AssertionError when its condition is false.

>>> x = 1
>>> assert x > 0

@ a list; lists
A list is a sequence that can be changed.

>>> a = [1, 2, 3]
>>> a[0] = 10
>>> a
[10, 2, 3]

@ a tuple; tuples
A tuple is a sequence that cannot be changed.

>>> point = (1, 2)
>>> x, y = point
>>> y
2

@ a dictionary; dictionaries
A dictionary maps keys to values.

>>> ages = {"Ann": 30}
>>> ages["Bob"] = 25
>>> ages["Bob"]
25

@ a set; sets
A set holds each item only once.

>>> {1, 2} | {2, 3}
{1, 2, 3}

@ a string; strings
A string is a sequence of characters; it cannot be changed.

>>> s = "hello"
>>> s[0]
'h'
>>> s.upper()
'HELLO'

@ slicing; slices
A slice `a[start:stop:step]` takes a part of a sequence.

>>> "python"[1:4]
'yth'

@ unpacking; unpacking
Unpacking assigns the items of a sequence to several names.

>>> a, *rest = [1, 2, 3]
>>> rest
[2, 3]

@ a dataclass; dataclasses
A dataclass gets its `__init__` and `__repr__` from its annotations.

>>> from dataclasses import dataclass
>>> @dataclass
... class Point:
...     x: int
...     y: int
>>> Point(1, 2)
Point(x=1, y=2)

@ an enum; enums
An enum is a set of named constants.

>>> from enum import Enum
>>> class Color(Enum):
...     RED = 1
...     GREEN = 2
>>> Color.RED.name
'RED'

@ a named tuple; named tuples
A named tuple is a tuple whose fields have names.

>>> from collections import namedtuple
>>> Point = namedtuple("Point", ["x", "y"])
>>> Point(1, 2).y
2

@ a type hint; type hints
A type hint says which type a value should have; Python does not check it.

>>> def add(a: int, b: int) -> int:
...     return a + b

@ a module; modules
A module is a file of Python code that other files can import.

>>> import math
>>> math.pi > 3
True

@ a package; packages
A package is a folder of modules; its `__init__.py` runs when it is imported.

>>> from urllib.parse import quote
>>> quote("a b")
'a%20b'

@ a docstring; docstrings
A docstring is the first string in a function, class or module; it says what it does.

>>> def add(a, b):
...     "Return the sum of a and b."
...     return a + b
>>> add.__doc__
'Return the sum of a and b.'

@ break; break
`break` leaves a loop.

>>> for i in range(10):
...     if i == 2:
...         break
>>> i
2

@ continue; continue
`continue` goes on with the next round of a loop.

>>> for i in range(3):
...     if i == 1:
...         continue
...     print(i)
0
2

@ pass; pass
`pass` does nothing; it fills an empty block.

>>> def later():
...     pass

@ None; None
`None` is the value for "nothing"; test for it with `is`.

>>> x = None
>>> x is None
True

@ a global variable; global variables
A function changes a global variable after `global`.

>>> n = 0
>>> def add():
...     global n
...     n += 1

@ a match statement; match statements
A `match` statement compares a value with patterns.

>>> command = "stop"
>>> match command:
...     case "go":
...         print("going")
...     case "stop":
...         print("stopping")
stopping

@ a conditional expression; conditional expressions
A conditional expression chooses one of two values.

>>> x = 5
>>> "big" if x > 3 else "small"
'big'

@ the walrus operator; walrus operators
The walrus operator `:=` assigns a value inside an expression.

>>> if (n := len("hello")) > 3:
...     print(n)
5

@ an async function; async functions
An async function is defined with `async def` and run with `asyncio.run`.

>>> import asyncio
>>> async def main():
...     return 42
>>> asyncio.run(main())
42

@ await; await
`await` waits for a coroutine inside an async function.

>>> import asyncio
>>> async def main():
...     await asyncio.sleep(0)
...     return "done"
>>> asyncio.run(main())
'done'

@ recursion; recursion
With recursion a function calls itself.

>>> def factorial(n):
...     return 1 if n == 0 else n * factorial(n - 1)
>>> factorial(5)
120
"""

ERRORS = r"""
@ ValueError
is raised when a value has the right type but is not acceptable.

int("abc")

@ TypeError
is raised when an operation gets a value of the wrong type.

"1" + 1

@ KeyError
is raised when a key is not in a dictionary.

{"a": 1}["b"]

@ IndexError
is raised when an index is out of range.

[1, 2][5]

@ NameError
is raised when a name is not defined.

missing_name

@ AttributeError
is raised when an object has no attribute of that name.

[].missing

@ ZeroDivisionError
is raised when a number is divided by zero.

1 / 0

@ FileNotFoundError
is raised when a file does not exist.

open("missing.txt")

@ ImportError
is raised when an import fails.

from math import missing

@ ModuleNotFoundError
is raised when a module cannot be found.

import missing_module

@ StopIteration
is raised by `next` when an iterator has no more items.

next(iter([]))

@ AssertionError
is raised when an assert statement fails.

assert 1 == 2

@ UnicodeDecodeError
is raised when bytes cannot be decoded as text.

b"\xff".decode("utf-8")

@ UnicodeEncodeError
is raised when text cannot be encoded as bytes.

"\xe9".encode("ascii")

@ OverflowError
is raised when the result of a computation is too large.

float(10 ** 400)

@ RecursionError
is raised when functions call themselves too deeply.

@ NotImplementedError
is raised by methods that a subclass must define.

raise NotImplementedError("define this method")

@ RuntimeError
is raised for errors that fit no other class.

raise RuntimeError("something went wrong")

@ OSError
is raised when the operating system reports an error.

@ PermissionError
is raised when the program may not do what it tries to do.

@ FileExistsError
is raised when a file or folder exists already.

@ IsADirectoryError
is raised when a file is expected but a directory is found.

@ NotADirectoryError
is raised when a directory is expected but a file is found.

@ TimeoutError
is raised when an operation takes too long.

@ ConnectionError
is the base class of errors with network connections.

@ ConnectionRefusedError
is raised when the other side refuses a connection.

@ ConnectionResetError
is raised when the other side closes a connection.

@ BrokenPipeError
is raised when a program writes to a closed pipe or socket.

@ KeyboardInterrupt
is raised when the user presses Control-C.

@ SystemExit
is raised by `sys.exit` to end the program.

@ MemoryError
is raised when there is not enough memory.

@ EOFError
is raised when `input` finds the end of the file.

@ SyntaxError
is raised when code is not correct Python.

eval("1 +")

@ IndentationError
is raised when code is not indented correctly.

@ UnboundLocalError
is raised when a local variable is used before it has a value.

@ LookupError
is the base class of KeyError and IndexError.

@ ArithmeticError
is the base class of ZeroDivisionError and OverflowError.

@ Exception
is the base class of all ordinary errors.

@ BaseException
is the base class of all exceptions.

@ json.JSONDecodeError
is raised when a text is not valid JSON.

import json
json.loads("{")

@ subprocess.CalledProcessError
is raised when a command ends with an error and check is true.

@ queue.Empty
is raised when a queue is empty.

import queue
queue.Queue().get_nowait()

@ sqlite3.OperationalError
is raised when the database cannot do what it is asked.
"""

PROGRAMS = r"""
@ computes the factorial of a number; computes a factorial
def factorial(n):
    result = 1
    for i in range(2, n + 1):
        result *= i
    return result

@ computes Fibonacci numbers; returns the n-th Fibonacci number
def fibonacci(n):
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a

@ checks whether a number is prime; tests for prime numbers
def is_prime(n):
    if n < 2:
        return False
    for i in range(2, int(n ** 0.5) + 1):
        if n % i == 0:
            return False
    return True

@ finds all primes up to n; lists prime numbers
def primes(n):
    return [p for p in range(2, n + 1) if all(p % i for i in range(2, p))]

@ reverses a string
def reverse(text):
    return text[::-1]

@ checks for a palindrome; tests whether a word is a palindrome
def is_palindrome(text):
    return text == text[::-1]

@ computes the greatest common divisor; finds the gcd of two numbers
def gcd(a, b):
    while b:
        a, b = b, a % b
    return a

@ counts the words of a text; counts words
from collections import Counter

def count_words(text):
    return Counter(text.split())

@ counts the vowels of a text; counts vowels
def count_vowels(text):
    return sum(c in "aeiou" for c in text.lower())

@ does a binary search; searches a sorted list
def binary_search(items, target):
    low, high = 0, len(items)
    while low < high:
        middle = (low + high) // 2
        if items[middle] < target:
            low = middle + 1
        else:
            high = middle
    return low

@ sorts a list with bubble sort; does a bubble sort
def bubble_sort(items):
    for i in range(len(items)):
        for j in range(len(items) - 1 - i):
            if items[j] > items[j + 1]:
                items[j], items[j + 1] = items[j + 1], items[j]
    return items

@ sorts a list with quicksort; does a quicksort
def quicksort(items):
    if len(items) < 2:
        return items
    first, rest = items[0], items[1:]
    small = [x for x in rest if x < first]
    large = [x for x in rest if x >= first]
    return quicksort(small) + [first] + quicksort(large)

@ prints FizzBuzz; solves FizzBuzz
def fizzbuzz(n):
    for i in range(1, n + 1):
        if i % 15 == 0:
            print("FizzBuzz")
        elif i % 3 == 0:
            print("Fizz")
        elif i % 5 == 0:
            print("Buzz")
        else:
            print(i)

@ adds two numbers
def add(a, b):
    return a + b

@ says hello; prints hello world
def hello():
    print("Hello, world!")

@ computes the average of a list; returns the mean of a list
def average(numbers):
    return sum(numbers) / len(numbers)

@ finds the largest item of a list; returns the maximum of a list
def largest(items):
    best = items[0]
    for item in items:
        if item > best:
            best = item
    return best

@ flattens a nested list; flattens a list of lists
def flatten(lists):
    return [x for inner in lists for x in inner]

@ removes duplicates from a list
def unique(items):
    return list(dict.fromkeys(items))

@ checks whether a number is even
def is_even(n):
    return n % 2 == 0

@ converts Celsius to Fahrenheit
def to_fahrenheit(celsius):
    return celsius * 9 / 5 + 32

@ counts the lines of a file
def count_lines(path):
    with open(path, encoding="utf-8") as f:
        return sum(1 for line in f)

@ reads a JSON file
import json

def read_json(path):
    with open(path, encoding="utf-8") as f:
        return json.load(f)

@ squares a list of numbers
def squares(numbers):
    return [n * n for n in numbers]

@ measures the time of a function; times a function
import time

def timed(func):
    start = time.perf_counter()
    func()
    return time.perf_counter() - start

@ checks whether two words are anagrams; tests for anagrams
def is_anagram(a, b):
    return sorted(a) == sorted(b)

@ sums the digits of a number
def digit_sum(n):
    return sum(int(d) for d in str(n))

@ computes a power
def power(base, exponent):
    result = 1
    for _ in range(exponent):
        result *= base
    return result
"""
