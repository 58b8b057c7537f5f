//! Tasks like those of common benchmarks, each with programs that are right and one that is wrong.

pub struct Task {
    pub asserts: &'static str,
    pub right: [&'static str; 2],
    pub wrong: &'static str,
}

macro_rules! tasks {
    ($($asserts:literal, $one:literal, $other:literal, $wrong:literal;)*) => {
        &[$(Task { asserts: $asserts, right: [$one, $other], wrong: $wrong }),*]
    };
}

pub const TASKS: &[Task] = tasks! {
    // Types of values.
    "assert set(similar((3, 4, 5, 6), (5, 7, 4, 10))) == set((4, 5))\nassert similar((1, 2), (5, 4)) == ()",
    "def similar(a, b): return tuple(set(a) & set(b))",
    "def similar(a, b):\n    return tuple(x for x in a if x in b)",
    "def similar(a, b): return tuple(set(a) | set(b))";

    "assert count('abcab') == {'a': 2, 'b': 2, 'c': 1}\nassert count('') == {}",
    "from collections import Counter\ndef count(text): return Counter(text)",
    "from collections import defaultdict\ndef count(text):\n    counts = defaultdict(int)\n    for c in text: counts[c] += 1\n    return counts",
    "def count(text): return {c: 1 for c in text}";

    "assert point(1, 2) == (1, 2)\nassert point(1, 2)[0] == 1\nassert point(1, 2) != [1, 2]",
    "from collections import namedtuple\npoint = namedtuple('point', 'x y')",
    "def point(x, y): return x, y",
    "def point(x, y): return [x, y]";

    "assert color('red') == 1\nassert color('blue') == 2",
    "import enum\nclass Color(enum.IntEnum):\n    red = 1\n    blue = 2\ndef color(name): return Color[name]",
    "color = {'red': 1, 'blue': 2}.get",
    "import enum\nclass Color(enum.Enum):\n    red = 1\n    blue = 2\ndef color(name): return Color[name]";

    "assert big(3) == 27\nassert big(200) % 1000 == 0\nassert big(5000) == 5000 ** 5000\nassert [big(1)] * 30000 == [1] * 30000",
    "def big(n): return n ** n",
    "def big(n):\n    product = 1\n    for _ in range(n): product *= n\n    return product",
    "def big(n): return float(n) ** min(n, 50)";

    "assert root(2.0) == [1.4142135623730951, -1.4142135623730951]\nassert root(-4.0) == [2j, -2j] and root(0.0) is None",
    "import cmath, math\ndef root(x):\n    if not x: return None\n    r = math.sqrt(x) if x > 0 else complex(0, math.sqrt(-x))\n    return [r, -r]",
    "def root(x):\n    if x == 0: return\n    r = x ** 0.5 if x > 0 else 1j * (-x) ** 0.5\n    return [r, -r]",
    "def root(x): return [abs(x) ** 0.5, -abs(x) ** 0.5]";

    "from fractions import Fraction\nfrom decimal import Decimal\nimport datetime\nassert half(3) == Fraction(3, 2)\nassert half('3') == Decimal('1.5')\nassert half(datetime.date(2024, 2, 3)) == datetime.date(2024, 1, 3)\nassert half(b'abcd') == b'ab'",
    "from fractions import Fraction\nfrom decimal import Decimal\ndef half(x):\n    if isinstance(x, int): return Fraction(x, 2)\n    if isinstance(x, str): return Decimal(x) / 2\n    if isinstance(x, bytes): return x[:len(x) // 2]\n    return x.replace(month=x.month // 2)",
    "import fractions, decimal, datetime\ndef half(x):\n    match x:\n        case int(): return fractions.Fraction(x) / 2\n        case str(): return decimal.Decimal(x) * decimal.Decimal('0.5')\n        case bytes(): return bytes(list(x)[:2])\n    return datetime.date(x.year, x.month - 1, x.day)",
    "def half(x): return x / 2 if isinstance(x, int) else x";

    "assert list(odds(5)) == [1, 3, 5]\nassert next(odds(1)) == 1\nassert sum(odds(3)) == 4",
    "def odds(n): return iter(range(1, n + 1, 2))",
    "def odds(n):\n    for i in range(1, n + 1):\n        if i % 2: yield i",
    "def odds(n): return iter(range(0, n + 1, 2))";

    "assert {frozenset(pair) for pair in pairs('abc')} == {frozenset('ab'), frozenset('ac'), frozenset('bc')}",
    "import itertools\ndef pairs(text): return itertools.combinations(text, 2)",
    "def pairs(text): return [(a, b) for a in text for b in text if a < b]",
    "def pairs(text): return [(a, b) for a in text for b in text]";

    // Kinds of comparisons.
    "assert abs(area(2) - 12.566370614) < 1e-6\nassert 3 < area(1) <= 3.2\nassert round(area(3), 2) == 28.27",
    "import math\ndef area(r): return math.pi * r * r",
    "def area(r):\n    print('radius', r, end='')\n    return 3.141592653589793 * r ** 2",
    "def area(r): return 3 * r * r";

    "import math\nassert math.isclose(mean([1, 2, 4]), 2.3333333, rel_tol=1e-6)\nassert math.isnan(mean([]))",
    "def mean(xs): return sum(xs) / len(xs) if xs else float('nan')",
    "import statistics\nmean = lambda xs: statistics.fmean(xs) if xs else float('nan')",
    "def mean(xs): return sum(xs) // max(len(xs), 1)";

    "assert is_prime(7) and not is_prime(8)\nassert is_prime(2) == True\nassert is_prime(1) is False\nassert not (is_prime(0) or is_prime(9))",
    "def is_prime(n): return n > 1 and all(n % d for d in range(2, int(n ** 0.5) + 1))",
    "import sys\nsys.stdout.write('no newline')\ndef is_prime(n):\n    if n < 2: return False\n    return next((False for d in range(2, n) if n % d == 0), True)",
    "def is_prime(n): return True";

    "assert find('b12c') and find('b12c').group() == '12'\nassert not find('bc')\nassert find('x') is None",
    "import re\ndef find(text): return re.search(r'\\d+', text)",
    "from __future__ import annotations\nimport re\ndef find(text: str) -> re.Match | None: return re.compile('[0-9]+').search(text)",
    "import re\ndef find(text): return re.match(r'\\d+', text)";

    "assert split('a b') == ['a', 'b'] or split('a b') == ('a', 'b')\nassert len(split('a b c')) == 3\nassert ', '.join(split('a b')) == 'a, b'",
    "def split(text): return text.split()",
    "def split(text): return tuple(text.split(' '))",
    "def split(text): return {'a', 'b'}";

    // Loops, over literals and other values.
    "
cases = [('', 0), ('a', 1), ('aab', 2)]
for text, count in cases:
    assert letters(text) == count, f'{text} has {count}'
for text in ('b', 'bb'):
    n = 1
    assert letters(text) == n and letters(text * 2) == n, n
    assert letters(text) < n + 1
for count, text in enumerate(['', 'x', 'xyx']):
    assert letters(text) == count
",
    "def letters(text): return len(set(text))",
    "def letters(text):\n    seen = ''\n    for c in text: seen += c * (c not in seen)\n    return len(seen)",
    "def letters(text): return len(text)";

    // Functions named like built-in ones, and names defined by the test.
    "assert sum(10, 15) == 6\nassert sum(100, 150) == 93",
    "def sum(a, b):\n    total = 0\n    for i in range(1, min(a, b)):\n        if a % i == 0 and b % i == 0: total += i\n    return total",
    "def sum(a, b):\n    divisors = [i for i in range(1, min(a, b)) if a % i == b % i == 0]\n    return __builtins__.sum(divisors)",
    "def sum(a, b): return a + b";

    "
METADATA = {'author': 'x'}
def check(candidate):
    'Sorts.'
    assert candidate([3, 1, 2]) == [1, 2, 3], 'sorted'
    expected = [1, 1]
    result = candidate([1, 1])
    assert result == expected, f'{result} is not {expected}'
    for length in range(4):
        assert candidate(list(range(length, 0, -1))) == list(range(1, length + 1))
    try:
        candidate(None)
        assert False
    except TypeError:
        pass
check(order)
",
    "order = sorted",
    "def order(xs):\n    if len(xs) < 2: return xs\n    pivot, *rest = xs\n    return order([x for x in rest if x < pivot]) + [pivot] + order([x for x in rest if x >= pivot])",
    "def order(xs): return sorted(set(xs)) or xs";

    "
def test_pushes():
    stack = Stack()
    stack.push(1)
    stack.push('two')
    assert stack.pop() == 'two' and len(stack) == 1
def test_is_empty():
    assert len(Stack()) == 0
    assert not Stack()
",
    "class Stack(list):\n    push = list.append",
    "class Stack:\n    def __init__(self): self.items = []\n    def push(self, item): self.items.append(item)\n    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)",
    "class Stack(list):\n    def push(self, item): self.insert(0, item)";

    "assert Vector(1, 2) + Vector(3, 4) == Vector(4, 6)\nassert (Vector(1, 2) + Vector(0, 1)).y == 3\nassert str(Vector(1, 2)) == '<1, 2>'",
    "from dataclasses import dataclass\n@dataclass\nclass Vector:\n    x: int\n    y: int\n    def __add__(self, o): return Vector(self.x + o.x, self.y + o.y)\n    def __str__(self): return f'<{self.x}, {self.y}>'",
    "class Vector(tuple):\n    def __new__(cls, x, y): return super().__new__(cls, (x, y))\n    def __add__(self, o): return Vector(self[0] + o[0], self[1] + o[1])\n    def __str__(self): return '<%d, %d>' % self\n    y = property(lambda self: self[1])",
    "from dataclasses import dataclass\n@dataclass\nclass Vector:\n    x: int\n    y: int\n    def __add__(self, o): return Vector(self.x + o.x, self.y + o.y)";

    "numbers = [3, 1, 2]\nturn(numbers)\nassert numbers == [2, 1, 3]\nassert apply(lambda x: x + 1, 3) == 4\nassert [apply(str, 1), turn([])] == ['1', None]",
    "def turn(xs): xs.reverse()\ndef apply(f, x): return f(x)",
    "apply = lambda f, *xs: f(*xs)\ndef turn(xs): xs[:] = xs[::-1]",
    "def turn(xs): return xs[::-1]\ndef apply(f, x): return f(x)";

    "assert depth([1, [2, [3]]]) == 3\nassert nest(3) == [[[]]]\nassert nest(100) == eval('[' * 100 + ']' * 100)",
    "def depth(x): return 1 + max(map(depth, x), default=0) if isinstance(x, list) else 0\ndef nest(n): return [nest(n - 1)] if n > 1 else []",
    "import atexit\natexit.register(print, 'bye')\ndef depth(x):\n    return max([0, *[depth(y) for y in x]]) + 1 if isinstance(x, list) else 0\ndef nest(n):\n    x = []\n    for _ in range(n - 1): x = [x]\n    return x",
    "def depth(x): return 2\ndef nest(n): return [] * n";
};
