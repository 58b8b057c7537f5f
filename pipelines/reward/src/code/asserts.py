"""The asserts of a programming task, divided into what the program computes and what is expected of it.

Runs where the program does not, before it and behind it. Before, `{"asserts": [TEXT, ...]}` on standard input becomes a
text for the program's interpreter each, `{"told": TEXT}`, in which an assert only tells values of the program's:

    assert abs(area(2, x) - 0.5) < 1e-6        ->        __tell__(lambda: area(2, x))

Behind it, with `"values": [[LINE, ...], ...]`, what the asserts of each text have told, the rest of each assert,
`abs(v0 - 0.5) < 1e-6`, is evaluated here, and the answer is, for each text, whether all hold.

Divided are the asserts that surely run, and once: those of the text itself and of functions that it calls, outside of
conditions, `try`, `with` and loops, of which those over literals are written out before. The others stay as they are.
"""

import ast
import builtins
import collections
import copy
import datetime
import decimal
import fractions
import importlib
import json
import sys

# What the rest of an assert may use; a name that the text binds is none of them.
BUILTINS = """abs all any ascii bin bool bytearray bytes callable chr complex dict divmod enumerate filter float format
frozenset hash hex int isinstance issubclass iter len list map max min next oct ord pow range repr reversed round set
slice sorted str sum tuple type zip""".split()
MODULES = "cmath collections datetime decimal fractions itertools math operator re string".split()

# Loops of more turns stay loops.
MOST_TURNS = 200

# What an expression is made of: the program's values, the asserts' own, names that mean the same to both, or the first two.
PROGRAMS, OWN, NAMES, BOTH = range(4)
DIVISIBLE = (
    ast.Attribute, ast.BinOp, ast.BoolOp, ast.Call, ast.Compare, ast.Dict, ast.IfExp, ast.List, ast.Set, ast.Slice,
    ast.Starred, ast.Subscript, ast.Tuple, ast.UnaryOp, ast.keyword,
)


def not_(node):
    return ast.UnaryOp(ast.Not(), node)


class Assert:
    """The values that it asks the program for, and the test that is left, in which they are `v0`, `v1`, ..."""

    def __init__(self, test, known):
        self.known, self.values = known, []
        self.test = self.truth(test)
        if not self.values:
            # `assert sum(10, 15) == 6` is of a function of the program's that has the name of a built-in one.
            self.known = {name: what for name, what in known.items() if name not in BUILTINS}
            self.test = self.truth(test)

    def truth(self, node):
        """The test for an expression of which only the truth counts, whatever it is: not that it is to be true."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return not_(self.truth(node.operand))
        if isinstance(node, ast.BoolOp):
            return ast.BoolOp(node.op, [self.truth(value) for value in node.values])
        return self.value(not_(not_(node))) if self.divide(node) == PROGRAMS else node

    def divide(self, node):
        """What `node` is made of; if of both, the program's values are then names in it."""
        if isinstance(node, ast.Constant):
            return OWN
        if isinstance(node, ast.Name):
            what = self.known.get(node.id)
            return PROGRAMS if what is None else OWN if isinstance(what, ast.AST) else NAMES
        if not isinstance(node, DIVISIBLE):
            return OWN if free_names(node) <= self.known.keys() else PROGRAMS
        parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, (ast.expr, ast.keyword))]
        kinds = []
        for part in parts:
            kinds.append(self.divide(part))
            # What the program's functions are called with, and what its values are asked for, goes with them.
            if kinds == [PROGRAMS] and isinstance(node, (ast.Call, ast.Subscript)):
                return PROGRAMS
        if PROGRAMS not in kinds:
            return max(kinds, key=[NAMES, OWN, BOTH].index, default=OWN)
        if OWN not in kinds and BOTH not in kinds:
            return PROGRAMS
        self.name({id(part) for part, kind in zip(parts, kinds) if kind == PROGRAMS}, node)
        return BOTH

    def name(self, parts, node):
        """Replaces the children of `node` that are in `parts` by names for their values."""
        for field, child in ast.iter_fields(node):
            if isinstance(child, list):
                child[:] = [self.value(item) if id(item) in parts else item for item in child]
            elif id(child) in parts:
                setattr(node, field, self.value(child))

    def value(self, node):
        if isinstance(node, (ast.Slice, ast.Starred, ast.keyword)):
            self.name({id(part) for part in ast.iter_child_nodes(node)}, node)
            return node
        self.values.append(node)
        return ast.Name(f"v{len(self.values) - 1}", ast.Load())

    def tells(self):
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        values = [ast.Lambda(nothing, value) for value in self.values]
        return ast.Expr(ast.Call(ast.Name("__tell__", ast.Load()), values, []))

    def holds(self, line):
        """Whether the test holds for the values that the program told."""
        names = {"__builtins__": {}}
        for name, what in self.known.items():
            names[name] = ast.literal_eval(what) if isinstance(what, ast.AST) else what
        # The test may do without a value that could not be computed, as in `f(1) == 2 or f(1)[0] == 2`.
        for index, value in enumerate(json.loads(line)):
            if value != {"raised": None}:
                names[f"v{index}"] = made(value)
        test = ast.fix_missing_locations(ast.Expression(self.test))
        return bool(eval(compile(test, "assert", "eval"), names))


class Foreign:
    """A value of a class that is not of the language: equal to nothing but itself, and true."""


# How values come that JSON has not, as `program.py` tells them.
MAKE = {
    "int": lambda text: int(text, 16),
    "complex": lambda parts: complex(*parts),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "Fraction": fractions.Fraction,
    "Decimal": decimal.Decimal,
    "date": datetime.date.fromisoformat,
    "datetime": datetime.datetime.fromisoformat,
    "time": datetime.time.fromisoformat,
    "tuple": lambda items: tuple(made(item) for item in items),
    "set": lambda items: {made(item) for item in items},
    "frozenset": lambda items: frozenset(made(item) for item in items),
    "deque": lambda items: collections.deque(made(item) for item in items),
    "dict": lambda items: {made(key): made(value) for key, value in items},
    "range": lambda ends: range(*map(made, ends)),
    "other": lambda _: Foreign(),
}


def made(value):
    if isinstance(value, list):
        return [made(item) for item in value]
    if isinstance(value, dict):
        ((kind, form),) = value.items()
        return MAKE[kind](form)
    return value


class Text:
    """A text of asserts: what it tells, and the asserts in the order in which they do."""

    def __init__(self, text):
        tree, uses_stub = prepared(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assert):
                # It may say what is expected.
                node.msg = None
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        for scope in (*functions.values(), tree):
            write_out(scope)
        loads = loaded(tree)
        self.known = known(tree, uses_stub)
        self.depends = self.check(tree)
        calls = collections.Counter(called(statement) for statement in tree.body)
        once = {
            name: self.divide(function)
            for name, function in functions.items()
            if calls[name] and loads[name] in (0, calls[name]) and runs_through(function)
        }
        self.asserts = []
        own = iter(self.divide(tree))
        for statement in tree.body:
            self.asserts += [next(own)] if tells(statement) else once.get(called(statement), [])
        tree = ast.fix_missing_locations(Reached().visit(tree))
        self.told = (STUB if uses_stub else "") + ast.unparse(tree)

    def check(self, tree):
        """Refuses a text that asserts nothing of the program's. Whether it may depend on the program if anything is."""
        loads = loaded(tree)
        decorated = {it.name for it in tree.body if getattr(it, "decorator_list", [])}
        sites = Sites(tree).found
        if not sites:
            raise Bad("nothing is asserted in it")
        called = [site for site in sites if not site.scope or loads[site.scope] or site.scope in decorated]
        if not called:
            raise Bad(f"its asserts stand in `{sites[0].scope}`, which nothing calls")
        heard = [site for site in called if not site.is_caught]
        if not heard:
            raise Bad("it catches the errors of its own asserts")
        asking = [site for site in heard if site.asked is None or self.asks(site.asked)]
        if not asking:
            raise Bad("its asserts ask for nothing of the program's")
        known = self.known.keys() | literals(tree, self.known).keys()
        return any(loaded(guard).keys() - known for site in asking for guard in site.guards)

    def asks(self, test):
        """Whether a test is of the program's values."""
        return bool(Assert(copy.deepcopy(test), self.known).values)

    def divide(self, scope):
        """The asserts that are statements of `scope` itself, which then only tells."""
        own, before, asserts = literals(scope, self.known), loaded(scope), []
        for index, statement in enumerate(scope.body):
            if divisible(statement):
                asserts.append(Assert(statement.test, {**self.known, **own}))
                scope.body[index] = asserts[-1].tells()
        # What was only to be compared with.
        left = before.keys() & own.keys() - loaded(scope).keys()
        scope.body = [statement for statement in scope.body if assigned(statement) not in left]
        return asserts

    def holds(self, lines):
        try:
            return len(lines) == len(self.asserts) and all(map(Assert.holds, self.asserts, lines))
        except Exception:
            # A type that the test does not expect, or a value that there is not.
            return False


def write_out(scope):
    """Puts the turns of its loops over literals in their place, and in that of the literals, if they have names."""
    written, read = [], set()
    for statement in scope.body:
        found = turns(scope, statement)
        if found and isinstance(statement.iter, ast.Name):
            read.add(statement.iter.id)
        written += found or [statement]
    scope.body = [statement for statement in written if assigned(statement) not in read]


def turns(scope, loop):
    """The statements of all turns of a loop, each with names of its own for what the loop binds; none if it is another."""
    if not isinstance(loop, ast.For) or loop.orelse:
        return []
    has_names = isinstance(loop.target, ast.Tuple)
    targets = loop.target.elts if has_names else [loop.target]
    items = values_of(scope, loop.iter)
    inner = ast.Module(loop.body, [])
    simple = all(isinstance(it, (ast.Assert, ast.Assign, ast.Expr)) for it in loop.body)
    has_few = 0 < len(items) <= MOST_TURNS
    if not (simple and has_few and all(isinstance(target, ast.Name) for target in targets)):
        return []
    names = [target.id for target in targets]
    bindings, outer, loads = bound(scope), loaded(scope), loaded(inner)
    if any(bindings[name] != 1 or outer[name] != loads[name] for name in names):
        return []
    written = []
    for index, item in enumerate(items):
        parts = getattr(item, "elts", []) if has_names else [item]
        if len(parts) != len(names):
            return []
        own = {name: f"__{name}_{index}__" for name in names}
        written += [ast.Assign([ast.Name(own[name], ast.Store())], part) for name, part in zip(names, parts)]
        written += [Renamed(own).visit(copy.deepcopy(statement)) for statement in loop.body]
    return written


def values_of(scope, node):
    """What a literal list or tuple has in it, or the one that a name is bound to for nothing but this."""
    if isinstance(node, ast.Name) and bound(scope)[node.id] == 1 == loaded(scope)[node.id]:
        node = next((it.value for it in scope.body if assigned(it) == node.id), node)
    return node.elts if isinstance(node, (ast.List, ast.Tuple)) and is_literal(node) else []


class Renamed(ast.NodeTransformer):
    """With other names for some."""

    def __init__(self, names):
        self.names = names

    def visit_Name(self, node):
        return ast.Name(self.names.get(node.id, node.id), node.ctx)


def divisible(statement):
    """Whether it is an assert whose parts may run in functions of their own."""
    not_apart = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)
    return isinstance(statement, ast.Assert) and not any(isinstance(node, not_apart) for node in ast.walk(statement))


def tells(statement):
    return called(statement) == "__tell__"


def called(statement):
    """The function that a statement calls by its name, if it does nothing else."""
    call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) and statement.value.func
    return call.id if isinstance(call, ast.Name) else None


def runs_through(function):
    """Whether every statement of a function's body runs when it is called."""
    leaves = (ast.Return, ast.Yield, ast.YieldFrom)
    return not function.decorator_list and not any(isinstance(node, leaves) for node in ast.walk(function))


def assigned(statement):
    """The name that a statement binds, if it is an assignment to one name."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return targets[0].id if [type(target) for target in targets] == [ast.Name] else None


def literals(scope, known):
    """Names that stay what they are bound to: literals that nobody can change, or that are only compared with."""
    bindings, loads, found = bound(scope), loaded(scope), {}
    for statement in scope.body:
        name = assigned(statement)
        if name and bindings[name] == 1 and is_literal(statement.value):
            found[name] = statement.value
    asserts = [statement for statement in scope.body if divisible(statement)]
    sides = [side for statement in asserts for side in compared(statement.test)]
    closed = [side for side in sides if free_names(side) <= known.keys() | found.keys()]
    uses = sum((loaded(side) for side in closed), collections.Counter())
    lasting = {name: 0 < uses[name] == loads[name] or not may_change(value) for name, value in found.items()}
    return {name: value for name, value in found.items() if lasting[name]}


def may_change(literal):
    return any(isinstance(node, (ast.List, ast.Dict, ast.Set, ast.Call)) for node in ast.walk(literal))


def compared(test):
    """The sides of the comparisons of a test."""
    if isinstance(test, ast.Compare):
        return [test.left, *test.comparators]
    parts = test.values if isinstance(test, ast.BoolOp) else [test.operand] if isinstance(test, ast.UnaryOp) else []
    return [side for part in parts for side in compared(part)]


def is_literal(node):
    try:
        ast.literal_eval(node)
    except Exception:
        return False
    return True


def loaded(node):
    names = [it for it in ast.walk(node) if isinstance(it, ast.Name)]
    return collections.Counter(it.id for it in names if isinstance(it.ctx, ast.Load))


def bound(node):
    """How often each name is bound, in whatever scope."""
    counts = collections.Counter()
    for it in ast.walk(node):
        if isinstance(it, ast.Name) and not isinstance(it.ctx, ast.Load):
            counts[it.id] += 1
        elif isinstance(it, ast.arg):
            counts[it.arg] += 1
        elif isinstance(it, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            counts[it.name] += 1
        elif isinstance(it, (ast.Global, ast.Nonlocal)):
            counts.update(it.names)
        elif isinstance(it, ast.alias):
            counts[it.asname or it.name] += 1
        elif isinstance(it, ast.ExceptHandler) and it.name:
            counts[it.name] += 1
    return counts


def free_names(node):
    return loaded(node).keys() - bound(node).keys()


def known(tree, uses_stub):
    """What names mean that are not the program's, if the text gives them no other meaning."""
    bindings = bound(tree)
    found = {name: getattr(builtins, name) for name in BUILTINS}
    # Programs import it, and asserts rely on that.
    found["math"] = importlib.import_module("math")
    found = {name: what for name, what in found.items() if not bindings[name]}
    for statement in tree.body:
        origin = statement.module if isinstance(statement, ast.ImportFrom) else None
        for alias in statement.names if isinstance(statement, (ast.Import, ast.ImportFrom)) else []:
            name = alias.asname or alias.name
            module = origin or alias.name
            if module in MODULES and bindings[name] == 1:
                module = importlib.import_module(module)
                what = getattr(module, alias.name, None) if origin else module
                found.update({name: what} if what is not None else {})
    if uses_stub:
        stub = {"__reach__": lambda: None}
        exec(STUB, stub)
        found.update({name: stub[name] for name in ("pytest", "unittest") if not bindings[name]})
    return {**found, **helpers(tree, found, bindings)}


def helpers(tree, found, bindings):
    """The text's own functions that have nothing of the program's."""
    own = {}
    globals_of = {**vars(builtins), **{name: what for name, what in found.items() if not isinstance(what, ast.AST)}}
    usual = vars(builtins).keys() - bindings.keys() | globals_of.keys() - vars(builtins).keys()
    for statement in tree.body:
        is_function = isinstance(statement, ast.FunctionDef) and not statement.decorator_list
        name = statement.name if is_function else assigned(statement)
        is_lambda = name and not is_function and isinstance(statement.value, ast.Lambda)
        if not (is_function or is_lambda) or bindings[name] != 1 or name.startswith("test"):
            continue
        strange = (ast.Assert, ast.Raise, ast.Global, ast.Nonlocal, ast.Import, ast.ImportFrom)
        free = free_names(statement) - {name}
        if free <= usual | own.keys() and not any(isinstance(it, strange) for it in ast.walk(statement)):
            module = ast.fix_missing_locations(ast.Module([copy.deepcopy(statement)], []))
            exec(compile(module, "helpers", "exec"), globals_of)
            own[name] = globals_of[name]
    return own


class StandIns(dict):
    """Globals in which a name that nobody binds is a stand-in for something of the program's."""

    def __missing__(self, name):
        if hasattr(builtins, name):
            raise KeyError(name)
        return self["__stand_in__"]


def is_reached(text):
    """Whether it asserts something where no program keeps it from that. A text that needs more than a stand-in may."""
    reached, names = [], StandIns()
    exec(STUB, names)
    count = lambda *values: reached.append(values)
    names.update(__stand_in__=names["__Nothing__"](), __tell__=count, __reach__=count, __same__=lambda *values: True)
    try:
        exec(compile(text.told, "asserts", "exec"), names)
    except BaseException:
        return True
    return bool(reached)


def main():
    job = json.load(sys.stdin.buffer)
    answers = []
    for index, text in enumerate(job["asserts"]):
        try:
            text = Text(text)
        except Bad as why:
            answers.append({"bad": str(why)})
            continue
        except (SyntaxError, ValueError, RecursionError) as error:
            answers.append({"error": str(error)})
            continue
        if "only_reached" in job:
            answers.append(is_reached(text))
            continue
        told = {"text": "" if "only_checks" in job else text.told, "depends": text.depends}
        answers.append(text.holds(job["values"][index]) if "values" in job else {"told": told})
    print(json.dumps(answers))


main()
