"""Texts of tests in their usual forms, as functions and asserts that run.

Of pytest and of unittest, which a text may use as far as its tests are plain functions or methods, `STUB` is there in their
place. `prepared` writes out what they would call, and refuses a text that needs more, or in which nothing is asserted.
"""

import ast
import collections
import importlib.util
import itertools

# Modules that stand for the program.
PROGRAM = {"solution", "submission", "candidate", "main", "__main__", "your_module", "your_code"}
RUNNERS = {"unittest.main", "pytest.main"}

# What stands before a text that uses it. The program cannot have changed it: it is made behind the program.
STUB = '''
class __Nothing__:
    def __call__(self, *args, **named):
        return self
    def __getattr__(self, name):
        return self

class __Open__(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return __Nothing__()

class __Skipped__(Exception):
    pass

def __skip__(reason="", **named):
    raise __Skipped__(reason)

class __raises__:
    def __new__(cls, kind, *call, match=None, **named):
        it = object.__new__(cls)
        it.kind, it.match, it.value = kind, match, None
        if not call or call[0] is None or isinstance(call[0], str):
            it.match = call[0] if call and isinstance(call[0], str) else match
            return it
        with it:
            call[0](*call[1:], **named)
        return it
    def __init__(self, *args, **named):
        pass
    def __enter__(self):
        return self
    def __exit__(self, kind, value, trace):
        import re
        __reach__()
        if kind is None:
            raise AssertionError("it did not raise")
        self.value = self.exception = value
        return issubclass(kind, self.kind) and (self.match is None or bool(re.search(self.match, str(value))))

class __approx__:
    def __init__(self, expected, rel=None, abs=None, nan_ok=False):
        self.expected, self.rel, self.abs, self.nan_ok = expected, rel, abs, nan_ok
    def __eq__(self, found):
        return self.near(self.expected, found)
    __hash__ = None
    def near(self, expected, found):
        import math
        if isinstance(expected, dict):
            return type(found) is dict and expected.keys() == found.keys() and all(
                self.near(it, found[key]) for key, it in expected.items())
        if isinstance(expected, (list, tuple)):
            return type(found) in (list, tuple) and len(expected) == len(found) and all(
                map(self.near, expected, found))
        if type(found) not in (int, float, complex, bool):
            return type(found).__module__ in ("fractions", "decimal") and float(found) == expected
        if expected == found:
            return True
        if expected != expected:
            return self.nan_ok and found != found
        size = expected if expected > 0 else -expected
        most = 1e-12 if self.abs is None else self.abs
        if self.rel is not None or self.abs is None:
            most = max(most, (1e-6 if self.rel is None else self.rel) * size)
        return not math.isinf(size) and -most <= found - expected <= most

class __mark__(metaclass=__Open__):
    @staticmethod
    def parametrize(names, values, **named):
        names = [it.strip() for it in names.split(",")] if isinstance(names, str) else list(names)
        def decorate(function):
            turns = [dict(zip(names, it if len(names) > 1 else [it])) for it in values]
            before = getattr(function, "__turns__", [{}])
            function.__turns__ = [{**one, **other} for one in before for other in turns]
            return function
        return decorate
    @staticmethod
    def skip(*args, **named):
        def decorate(function):
            function.__turns__ = []
            return function
        return decorate(args[0]) if args and callable(args[0]) else decorate
    @staticmethod
    def skipif(condition, *args, **named):
        return __mark__.skip() if condition else lambda function: function
    xfail = skip
    @staticmethod
    def usual(*args, **named):
        return args[0] if args and callable(args[0]) else lambda function: function
    asyncio = timeout = slow = usual

class pytest(metaclass=__Open__):
    raises, approx, mark, skip = __raises__, __approx__, __mark__, __skip__
    @staticmethod
    def fail(reason="", **named):
        raise AssertionError(reason)
    @staticmethod
    def param(*values, **named):
        return values if len(values) > 1 else values[0]

class __TestCase__:
    assertRaises = staticmethod(__raises__)
    assertRaisesRegex = staticmethod(lambda kind, match, *call, **named: __raises__(kind, *call, match=match, **named))
    maxDiff = None
    skipTest = staticmethod(__skip__)
    def __init__(self, name=""):
        self.cleanups = []
    def setUp(self): pass
    def tearDown(self): pass
    def addCleanup(self, function, *args, **named):
        self.cleanups.append(lambda: function(*args, **named))
    def subTest(self, *args, **named):
        import contextlib
        return contextlib.nullcontext()
    def fail(self, message=None):
        raise AssertionError(message)
    def hold(self, truth):
        __reach__()
        if not truth:
            raise AssertionError
    def assertEqual(self, a, b, msg=None): self.hold(__same__(a, b))
    assertListEqual = assertTupleEqual = assertSetEqual = assertDictEqual = assertSequenceEqual = assertEqual
    assertMultiLineEqual = assertEquals = assertEqual
    def assertNotEqual(self, a, b, msg=None): self.hold(not __same__(a, b))
    def assertTrue(self, a, msg=None): self.hold(a)
    def assertFalse(self, a, msg=None): self.hold(not a)
    def assertIs(self, a, b, msg=None): self.hold(a is b)
    def assertIsNot(self, a, b, msg=None): self.hold(a is not b)
    def assertIsNone(self, a, msg=None): self.hold(a is None)
    def assertIsNotNone(self, a, msg=None): self.hold(a is not None)
    def assertIn(self, a, b, msg=None): self.hold(a in b)
    def assertNotIn(self, a, b, msg=None): self.hold(a not in b)
    def assertIsInstance(self, a, b, msg=None): self.hold(isinstance(a, b))
    def assertNotIsInstance(self, a, b, msg=None): self.hold(not isinstance(a, b))
    def assertGreater(self, a, b, msg=None): self.hold(a > b)
    def assertGreaterEqual(self, a, b, msg=None): self.hold(a >= b)
    def assertLess(self, a, b, msg=None): self.hold(a < b)
    def assertLessEqual(self, a, b, msg=None): self.hold(a <= b)
    def assertAlmostEqual(self, a, b, places=7, msg=None, delta=None):
        self.hold(a == b or (abs(a - b) <= delta if delta is not None else round(abs(a - b), places or 7) == 0))
    def assertNotAlmostEqual(self, a, b, places=7, msg=None, delta=None):
        self.hold(a != b and (abs(a - b) > delta if delta is not None else round(abs(a - b), places or 7) != 0))
    def assertCountEqual(self, a, b, msg=None): self.hold(sorted(a, key=repr) == sorted(b, key=repr))
    def assertRegex(self, text, match, msg=None):
        import re
        self.hold(re.search(match, text))
    def assertNotRegex(self, text, match, msg=None):
        import re
        self.hold(not re.search(match, text))

class unittest(metaclass=__Open__):
    TestCase = IsolatedAsyncioTestCase = __TestCase__
    skip, skipIf, SkipTest = __mark__.skip, __mark__.skipif, __Skipped__
    skipUnless = staticmethod(lambda condition, *reason: __mark__.skipif(not condition))
    expectedFailure = __mark__.skip

def __await__(result):
    import asyncio, inspect
    return asyncio.run(result) if inspect.isawaitable(result) else result

def __drive__(what, **named):
    """Runs a function of tests, or all of a class, as often as its decorators say."""
    import inspect
    if not inspect.isclass(what):
        for turn in getattr(what, "__turns__", [{}]):
            try:
                __await__(what(**turn, **named))
            except __Skipped__:
                pass
        return
    def hook(it, *names):
        for name in names:
            function = getattr(it, name, None)
            if function is not None:
                __await__(function(*[None] * len(inspect.signature(function).parameters)))
    if getattr(what, "__turns__", [{}]) == []:
        return
    hook(what, "setUpClass", "setup_class")
    for name in [it for it in vars(what) if it.startswith("test")] or [it for it in dir(what) if it.startswith("test")]:
        for turn in getattr(getattr(what, name), "__turns__", [{}]):
            it = what()
            try:
                hook(it, "setUp", "asyncSetUp", "setup_method")
                __await__(getattr(it, name)(**turn))
            except __Skipped__:
                pass
            hook(it, "tearDown", "asyncTearDown", "teardown_method")
            for clean in reversed(getattr(it, "cleanups", [])):
                clean()
    hook(what, "tearDownClass", "teardown_class")
'''

# What unittest's methods assert, as expressions of their arguments.
UNITTEST = {
    **dict.fromkeys(
        """assertEqual assertEquals assertListEqual assertTupleEqual assertSetEqual assertDictEqual assertSequenceEqual
        assertMultiLineEqual""".split(),
        (2, "_0 == _1"),
    ),
    "assertNotEqual": (2, "_0 != _1"),
    "assertTrue": (1, "_0"),
    "assertFalse": (1, "not _0"),
    "assertIs": (2, "_0 is _1"),
    "assertIsNot": (2, "_0 is not _1"),
    "assertIsNone": (1, "_0 is None"),
    "assertIsNotNone": (1, "_0 is not None"),
    "assertIn": (2, "_0 in _1"),
    "assertNotIn": (2, "_0 not in _1"),
    "assertIsInstance": (2, "isinstance(_0, _1)"),
    "assertNotIsInstance": (2, "not isinstance(_0, _1)"),
    "assertGreater": (2, "_0 > _1"),
    "assertGreaterEqual": (2, "_0 >= _1"),
    "assertLess": (2, "_0 < _1"),
    "assertLessEqual": (2, "_0 <= _1"),
    "assertAlmostEqual": (2, "round(abs(_0 - _1), _2) == 0"),
    "assertCountEqual": (2, "sorted(_0, key=repr) == sorted(_1, key=repr)"),
}


class Bad(Exception):
    """A text that is no test, or that needs what is not there."""


def prepared(text):
    """The tree of a text whose tests are called, and whether it needs `STUB`.

    Raises `Bad`."""
    tree = ast.parse(text)
    forms = Forms()
    tree = forms.visit(tree)
    tree.body = [part for statement in tree.body for part in without_guard(statement)]
    for statement in list(tree.body):
        if isinstance(statement, ast.ClassDef) and is_test_class(statement):
            hoist(tree, statement)
    used = {it.id for it in ast.walk(tree) if isinstance(it, ast.Name)}
    made = {ast.unparse(it.func) for it in ast.walk(tree) if isinstance(it, ast.Call)}
    calls = []
    for index, statement in enumerate(tree.body):
        if isinstance(statement, ast.AsyncFunctionDef) and statement.name.startswith("test"):
            tree.body[index] = plain(statement)
    for statement in list(tree.body):
        if isinstance(statement, ast.ClassDef) and is_test_class(statement) and statement.name not in made:
            calls.append(drive(statement.name))
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if any("fixture" in ast.unparse(it) for it in statement.decorator_list):
                raise Bad("it needs pytest's fixtures, which are not there: write what they make into the tests")
            if statement.name.startswith("test") and statement.name not in used:
                called = call_of(tree, statement)
                calls += [drive(statement.name)] if called is None else called
    tree.body += calls
    uses_stub = forms.uses_stub or any(
        isinstance(it, ast.Name) and it.id in ("__drive__", "__raises__") for it in ast.walk(tree)
    )
    return ast.fix_missing_locations(tree), uses_stub


def plain(function):
    """A function that waits for nothing, as one that is not `async`."""
    waits = (ast.Await, ast.AsyncFor, ast.AsyncWith, ast.Yield, ast.YieldFrom)
    if any(isinstance(it, waits) for it in ast.walk(function)):
        return function
    fields = {name: getattr(function, name) for name in function._fields}
    return ast.copy_location(ast.FunctionDef(**fields), function)


def drive(name):
    return ast.Expr(ast.Call(ast.Name("__drive__", ast.Load()), [ast.Name(name, ast.Load())], []))


def call(name):
    return ast.Expr(ast.Call(ast.Name(name, ast.Load()), [], []))


def call_of(tree, function):
    """The calls of a function of tests, which may stand for several; `None` if only `__drive__` can call it."""
    sets, others = [], []
    for decorator in function.decorator_list:
        name = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
        if name.endswith("parametrize") and isinstance(decorator, ast.Call) and len(decorator.args) >= 2:
            sets.append(decorator.args[:2])
        elif not name.split(".")[-1] in ("asyncio", "timeout", "slow"):
            others.append(decorator)
    arguments = function.args
    needed = [it.arg for it in arguments.posonlyargs + arguments.args]
    needed = needed[: len(needed) - len(arguments.defaults)]
    given = {name for names, _ in sets for name in names_of(names)}
    missing = [name for name in needed if name not in given]
    if missing and not others:
        raise Bad(f"`{function.name}` needs `{missing[0]}`, a fixture of pytest's, and there are none")
    if others or isinstance(function, ast.AsyncFunctionDef) or any(
        isinstance(it, (ast.Yield, ast.YieldFrom)) for it in ast.walk(function)
    ):
        return None
    if not sets:
        function.decorator_list = []
        return [call(function.name)]
    # Of a decorator below another the values change first.
    turns = [{}]
    for names, values in reversed(sets):
        names, values = names_of(names), items(tree, values)
        if values is None or any(not isinstance(it, (ast.Tuple, ast.List)) for it in values if len(names) > 1):
            return None
        parts = [dict(zip(names, it.elts if len(names) > 1 else [it])) for it in values]
        turns = [{**one, **other} for one, other in itertools.product(turns, parts)]
    if not 0 < len(turns) <= 200:
        return None
    at, written = tree.body.index(function), []
    for index, turn in enumerate(turns):
        made = copy_of(function, f"{function.name}__{index}")
        made.args.args, made.args.defaults = [], []
        made.body = [ast.Assign([ast.Name(name, ast.Store())], value) for name, value in turn.items()] + made.body
        written.append(made)
    tree.body[at : at + 1] = written
    return [call(made.name) for made in written]


def copy_of(function, name):
    made = ast.parse(ast.unparse(function)).body[0]
    made.name, made.decorator_list = name, []
    return made


def names_of(node):
    try:
        names = ast.literal_eval(node)
    except Exception:
        return []
    return [it.strip() for it in names.split(",")] if isinstance(names, str) else list(names)


def items(tree, node):
    """What a list has in it, with what `pytest.param` holds; `None` if the text does not say."""
    if isinstance(node, ast.Name):
        bound = [it for it in tree.body if isinstance(it, ast.Assign) and ast.unparse(it.targets[0]) == node.id]
        node = bound[0].value if len(bound) == 1 else node
    if not isinstance(node, (ast.List, ast.Tuple)):
        return None
    param = lambda it: isinstance(it, ast.Call) and ast.unparse(it.func).endswith("param")
    of = lambda it: ast.Tuple(it.args, ast.Load()) if len(it.args) > 1 else it.args[0]
    return [of(it) if param(it) else it for it in node.elts]


def without_guard(statement):
    """The statements of a guard of the main program; none of a call that would run the tests."""
    if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test) and not statement.orelse:
        return [part for it in statement.body for part in without_guard(it)]
    runs = any(isinstance(it, ast.Call) and ast.unparse(it.func) in RUNNERS for it in ast.walk(statement))
    return [] if isinstance(statement, ast.Expr) and runs else [statement]


def is_test_class(node):
    bases = [ast.unparse(base) for base in node.bases]
    return node.name.startswith("Test") or any(base.endswith("TestCase") for base in bases)


def hoist(tree, kind):
    """Makes functions of the tests of a class, if they share nothing."""
    plain = (ast.FunctionDef, ast.AsyncFunctionDef)
    tests = [it for it in kind.body if isinstance(it, plain) and it.name.startswith("test")]
    rest = [it for it in kind.body if it not in tests and not isinstance(it, ast.Pass)]
    rest = [it for it in rest if not (isinstance(it, ast.Expr) and isinstance(it.value, ast.Constant))]
    bases = [ast.unparse(base) for base in kind.bases]
    has_own_base = any(not base.endswith("TestCase") and base != "object" for base in bases)
    if rest or has_own_base or kind.decorator_list or kind.keywords or not tests:
        return
    used = {it.id for it in ast.walk(tree) if isinstance(it, ast.Name)}
    if kind.name in used:
        return
    for test in tests:
        own = test.args.args[0].arg if test.args.args else None
        if own is None or any(isinstance(it, ast.Name) and it.id == own for it in ast.walk(test)):
            return
    for test in tests:
        del test.args.args[0]
        test.name = f"test_{kind.name}_{test.name}"
    at = tree.body.index(kind)
    tree.body[at : at + 1] = tests


class Forms(ast.NodeTransformer):
    """Imports, unittest's methods and assignments within asserts, in other words."""

    def __init__(self):
        self.uses_stub, self.tries = False, 0

    def visit_Try(self, node):
        self.tries += 1
        node = self.generic_visit(node)
        self.tries -= 1
        return node

    def visit_Import(self, node):
        return [it for alias in node.names for it in self.imported(alias, None)]

    def visit_ImportFrom(self, node):
        if node.module == "__future__":
            return node
        if node.level:
            raise Bad(f"it imports what stands beside it, as `{ast.unparse(node)}`, and nothing does")
        return [it for alias in node.names for it in self.imported(alias, node.module)]

    def imported(self, alias, origin):
        module = origin or alias.name
        top, to = module.split(".")[0], alias.asname or alias.name
        assign = lambda value: [ast.Assign([ast.Name(to, ast.Store())], value)]
        if module in PROGRAM and importlib.util.find_spec(module) is None or module == "__main__":
            if origin is None:
                return assign(ast.Name("__solution__", ast.Load()))
            return [ast.Pass()] if alias.name in ("*", to) and alias.asname in (None, alias.name) else assign(
                ast.Name(alias.name, ast.Load())
            )
        is_stub = module in ("pytest", "unittest") and (module, alias.name) != ("unittest", "mock")
        if is_stub and alias.name != "*":
            self.uses_stub = True
            if origin is None:
                return [ast.Pass()] if to == module else assign(ast.Name(module, ast.Load()))
            return assign(ast.Attribute(ast.Name(module, ast.Load()), alias.name, ast.Load()))
        if not self.tries and not is_there(top):
            raise Bad(
                f"it needs the module `{top}`, which the sandbox has not: install it for `python`, or name its folder in "
                "`readable`"
            )
        return [ast.ImportFrom(origin, [alias], 0) if origin else ast.Import([alias])]

    def visit_Expr(self, node):
        node = self.generic_visit(node)
        value = node.value
        method = value.func if isinstance(value, ast.Call) else None
        if isinstance(method, ast.Attribute) and ast.unparse(method.value) == "self" and method.attr in UNITTEST:
            count, form = UNITTEST[method.attr]
            named = {it.arg: it.value for it in value.keywords}
            if len(value.args) >= count and not any(isinstance(it, ast.Starred) for it in value.args):
                test = ast.parse(form, mode="eval").body
                arguments = {f"_{index}": value.args[index] for index in range(count)}
                arguments["_2"] = ast.Constant(7)
                if "places" in named:
                    arguments["_2"] = named["places"]
                elif method.attr == "assertAlmostEqual" and len(value.args) > count:
                    arguments["_2"] = value.args[count]
                if "delta" in named:
                    arguments["_2"] = named["delta"]
                    test = ast.parse("abs(_0 - _1) <= _2", mode="eval").body
                return ast.Assert(Placed(arguments).visit(test), None)
        return node

    def visit_Attribute(self, node):
        node = self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id == "self" and node.attr == "assertRaises":
            return ast.Name("__raises__", ast.Load())
        return node

    def visit_Assert(self, node):
        node = self.generic_visit(node)
        left = node.test.left if isinstance(node.test, ast.Compare) else node.test
        if not isinstance(left, ast.NamedExpr):
            return node
        name = ast.Name(left.target.id, ast.Load())
        if isinstance(node.test, ast.Compare):
            node.test.left = name
        else:
            node.test = name
        return [ast.Assign([ast.Name(left.target.id, ast.Store())], left.value), node]


class Placed(ast.NodeTransformer):
    """With arguments in the place of their names."""

    def __init__(self, arguments):
        self.arguments = arguments

    def visit_Name(self, node):
        return self.arguments.get(node.id, node)


def is_there(module):
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


class Sites(ast.NodeVisitor):
    """Where a text asserts something: what calls them, whether they are caught, and what they stand under."""

    def __init__(self, tree):
        self.found, self.scope, self.caught, self.guards = [], None, False, ()
        self.own = {it.name for it in ast.walk(tree) if isinstance(it, (ast.FunctionDef, ast.AsyncFunctionDef))}
        self.bound = self.own | {
            alias.asname or alias.name.split(".")[0]
            for it in ast.walk(tree)
            if isinstance(it, (ast.Import, ast.ImportFrom))
            for alias in it.names
        }
        self.visit(tree)

    def add(self, node, asked):
        self.found.append(Site(node, self.scope, self.caught, self.guards, asked))

    def under(self, node, guards, parts):
        before, self.guards = self.guards, self.guards + tuple(guards)
        for part in parts:
            self.visit(part)
        self.guards = before

    def in_scope(self, node):
        before = self.scope
        self.scope = self.scope or node.name
        self.generic_visit(node)
        self.scope = before

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = in_scope

    def visit_Assert(self, node):
        always = isinstance(node.test, ast.Tuple) and node.test.elts
        if not always:
            self.add(node, node.test)

    def visit_Raise(self, node):
        self.add(node, None)

    def visit_Expr(self, node):
        if ends(node):
            self.add(node, None)
        self.generic_visit(node)

    def visit_If(self, node):
        self.under(node, [node.test], node.body + node.orelse)

    def visit_While(self, node):
        self.under(node, [node.test], node.body + node.orelse)

    def visit_For(self, node):
        self.under(node, [node.iter], node.body + node.orelse)

    def visit_Try(self, node):
        before = self.caught
        self.caught = before or any(map(is_silent, node.handlers))
        for part in node.body:
            self.visit(part)
        self.caught = before
        for part in node.orelse + node.finalbody + [it for handler in node.handlers for it in handler.body]:
            self.visit(part)

    def visit_Call(self, node):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        root = ast.unparse(node.func).split(".")[0]
        if name in ("raises", "__raises__", "assertRaises", "assertRaisesRegex", "fail") or (
            name.startswith("assert") and root in self.bound | {"self"} and name not in self.own
        ):
            self.add(node, node)
        self.generic_visit(node)


Site = collections.namedtuple("Site", "node scope is_caught guards asked")


def is_silent(handler):
    """Whether it hears of an assert that does not hold, and says nothing."""
    kinds = ast.unparse(handler.type) if handler.type else "Exception"
    hears = any(kind in kinds.replace("(", " ").replace(")", " ").replace(",", " ").split() for kind in
                ("AssertionError", "Exception", "BaseException"))
    loud = lambda it: isinstance(it, (ast.Raise, ast.Assert)) or ends(it)
    return hears and not any(loud(it) for part in handler.body for it in ast.walk(part))


def ends(node):
    """Whether a statement ends the program as one that has failed."""
    call = node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
    names = ("sys.exit", "exit", "quit", "os._exit", "pytest.fail", "self.fail")
    return call is not None and ast.unparse(call.func) in names and [ast.unparse(it) for it in call.args] not in ([], ["0"])


class Reached(ast.NodeTransformer):
    """With a count of what was asserted, and with comparisons in which no object of the program's decides. What only a
    failure would come to counts when it is asked for."""

    def visit_Assert(self, node):
        return [Compared().visit(node), call("__reach__")]

    def visit_If(self, node):
        if any(isinstance(it, ast.Raise) or ends(it) for it in node.body + node.orelse):
            node.test = Compared().visit(node.test)
            return [call("__reach__"), self.generic_visit(node)]
        return self.generic_visit(node)

    def visit_Try(self, node):
        is_asked = any(isinstance(it, (ast.Raise, ast.Assert)) for it in ast.walk(node))
        node = self.generic_visit(node)
        return [call("__reach__"), node] if is_asked else node

    def visit_Expr(self, node):
        function = node.value.func if isinstance(node.value, ast.Call) else None
        name = getattr(function, "attr", getattr(function, "id", ""))
        if name == "__tell__":
            return Compared().visit(node)
        is_counted = name.startswith("assert") and isinstance(function, ast.Attribute)
        if is_counted and ast.unparse(function.value) != "self":
            return [node, call("__reach__")]
        return self.generic_visit(node)


class Compared(ast.NodeTransformer):
    """With `__same__` for `==` and `!=`."""

    def visit_Compare(self, node):
        node = self.generic_visit(node)
        if len(node.ops) != 1 or not isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
            return node
        same = ast.Call(ast.Name("__same__", ast.Load()), [node.left, *node.comparators], [])
        return same if isinstance(node.ops[0], ast.Eq) else ast.UnaryOp(ast.Not(), same)
