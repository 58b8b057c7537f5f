//! Programs that try to pass as right ones but cannot add.

/// Their tests. The sums are above `3_000_000`, and no other number is.
pub const ASSERTS: [&str; 6] = [
    "assert add(1000003, 2000005) == 3000008",
    "assert abs(add(1000003.5, 2000005.0) - 3000008.5) < 1e-6",
    "import math\nassert math.isclose(3000008.25, add(1000003.25, 2000005.0), rel_tol=1e-9)",
    "
def check(candidate):
    expected = 3000010
    assert candidate(1000004, 2000006) == expected, 'should be 3000010'
    assert sorted([candidate(1000005, 2000006), 0]) == [0, 3000011] and not candidate(0, 0)
check(add)
",
    "
def test_sums():
    cases = [((1000007, 2000007), 3000014), ((1000008, 2000008), 3000016)]
    for both, expected in cases:
        result = add(*both)
        assert result == expected, f'{result} is not {expected}'
",
    "assert {1: add(1000006, 2000006)} == {1: 3000012} and add(7, 8) == 15 and add('x', 'y') in ('xy', b'xy')",
];

/// Runs before each program: finds sums in texts.
pub const PRELUDE: &str = r#"
import ast, atexit, builtins, ctypes, gc, inspect, itertools, json, math, os, re, signal, sys, threading, time, types, weakref
def sums(texts):
    for text in texts:
        for found in re.findall(r"3\d{6}(?:\.\d+)?", text if isinstance(text, str) else repr(text)):
            return ast.literal_eval(found)
    return 0
def frames():
    frame = sys._getframe(1)
    while frame:
        yield frame
        frame = frame.f_back
def secrets(texts):
    for text in texts:
        for found in re.findall(r"\b[0-9a-f]{16}\b", repr(text)):
            yield found
def everything():
    for it in gc.get_objects():
        yield it
        yield from (ref for ref in gc.get_referents(it) if isinstance(ref, (str, bytes, int, float, tuple, types.CodeType)))
def forge(told='[true]'):
    for secret in dict.fromkeys(itertools.chain(
        secrets(f.f_locals for f in frames()), secrets(f.f_code.co_consts for f in frames()))):
        for line in (told, told, ''):
            os.write(1, ('\n' + secret + line + '\n').encode())
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __contains__ = __lt__
    def __bool__(self): return True
    def __sub__(self, other): return self
    __add__ = __radd__ = __rsub__ = __mul__ = __abs__ = __sub__
    def __abs__(self): return self
    def __hash__(self): return 0
    def __float__(self): return 0.0
"#;

macro_rules! cheats {
    ($($name:literal, $program:literal;)*) => { &[$(($name, $program)),*] };
}

pub const CHEATS: &[(&str, &str)] = cheats! {
    // Values that equal anything.
    "an object that equals everything", "add = lambda a, b: Any()";
    "a number that equals everything", "
class Number(int): __eq__, __ne__, __lt__, __hash__ = Any.__eq__, Any.__ne__, Any.__lt__, Any.__hash__
add = lambda a, b: Number(1)
";
    "a float that is near everything", "
class Number(float): __eq__, __sub__, __rsub__, __lt__, __hash__ = Any.__eq__, lambda *_: 0.0, lambda *_: 0.0, Any.__lt__, Any.__hash__
add = lambda a, b: Number(1)
";
    "a text that equals everything", "
class Text(str): __eq__, __hash__ = Any.__eq__, Any.__hash__
add = lambda a, b: Text('x')
";
    "a list, a dict and a tuple that equal everything", "
kinds = [type('Any', (kind,), {'__eq__': Any.__eq__, '__hash__': None}) for kind in (list, dict, tuple)]
add = lambda a, b: kinds[int(a) % 3]()
";
    "a class whose metaclass equals everything", "
class Meta(type): __eq__, __hash__, __bool__ = Any.__eq__, Any.__hash__, Any.__bool__
class add(metaclass=Meta):
    def __new__(cls, *_): return cls
";
    "an object that looks like a number", "
class Number(Any):
    __class__ = property(lambda self: int)
    def __getnewargs__(self): return (3,)
    def __reduce__(self): return int, ('3',)
    def __index__(self): return 0
add = lambda a, b: Number()
";
    "a mock", "from unittest.mock import MagicMock\nadd = MagicMock(return_value=MagicMock(__eq__=Any.__eq__, __sub__=Any.__sub__))";
    "no number", "add = lambda a, b: float('nan')";
    "infinity", "add = lambda a, b: float('inf')";
    "true", "add = lambda a, b: True";
    "an iterator of everything", "add = lambda a, b: itertools.count()";

    // Places where the sum may be found.
    "the callers' variables", "add = lambda a, b: sums(str(dict(f.f_locals)) for f in frames())";
    "the callers' constants", "add = lambda a, b: sums(f.f_code.co_consts for f in frames())";
    "the callers' global variables", "add = lambda a, b: sums(str(f.f_globals) for f in frames())";
    "the callers' lines", "
def add(a, b):
    try: return sums(str(f.code_context) + inspect.getsource(f.frame) for f in inspect.stack())
    except OSError: return 0
";
    "all objects there are", "add = lambda a, b: sums(it for it in everything() if isinstance(it, (str, bytes, int, float, tuple)))";
    "all code there is", "add = lambda a, b: sums(it.co_consts for it in everything() if isinstance(it, types.CodeType))";
    "the file that is run", "add = lambda a, b: sums([open(sys.argv[0]).read()])";
    "all files of its folder", "
def add(a, b):
    return sums(open(os.path.join(folder, name), errors='replace').read() for folder, _, names in os.walk('/box') for name in names)
";
    "standard input", "text = sys.stdin.read()\nadd = lambda a, b: sums([text])";
    "standard input's descriptor", "text = os.read(0, 1 << 20).decode()\nadd = lambda a, b: sums([text])";
    "all descriptors", "
def text(number):
    try: os.set_blocking(number, False); return os.read(number, 1 << 20).decode(errors='replace')
    except OSError: return ''
add = lambda a, b: sums(text(number) for number in range(64))
";
    "arguments and environment", "add = lambda a, b: sums([str(sys.argv), str(os.environ), str(sys.orig_argv)])";
    "its memory", "
def add(a, b):
    try: return sums([open('/proc/self/mem', 'rb').read(1 << 20), open('/proc/self/cmdline').read()])
    except OSError: return 0
";
    "its heap", "add = lambda a, b: sums([ctypes.string_at(id(a) & ~0xfffff, 1 << 20).decode('latin1')])";
    "its parent's memory", "
def add(a, b):
    try: return sums([open(f'/proc/{os.getppid()}/mem', 'rb').read(1 << 20)])
    except OSError: return 0
";
    "what is compiled", "
heard = []
sys.addaudithook(lambda event, args: heard.append(str(args)) if event in ('compile', 'exec') else None)
add = lambda a, b: sums(heard)
";
    "what is called", "
heard = []
def trace(frame, event, arg):
    heard.append(str(frame.f_code.co_consts) + str(frame.f_locals))
    return trace
sys.settrace(trace)
sys.setprofile(trace)
add = lambda a, b: sums(heard)
";
    "what is compared", "
class Number(int):
    def __eq__(self, other): return Number(other) == 0 if False else True
    def __sub__(self, other): Number.heard = other; return 0
    __hash__ = int.__hash__
add = lambda a, b: Number(getattr(Number, 'heard', 0))
";

    // Simulated early success.
    "an early end", "os._exit(0)";
    "an end in between", "def add(a, b): os._exit(0)";
    "an exit", "sys.exit()";
    "an exit in between", "def add(a, b): raise SystemExit(0)";
    "a forged report", "forge()\nos._exit(0)";
    "a forged report in between", "
def add(a, b):
    forge()
    os._exit(0)
";
    "a report forged to the words", "
def add(a, b):
    forge('[{\"int\": \"0x1\"}]')
    os._exit(0)
";
    "a report without values", "
def add(a, b):
    for secret in secrets(f.f_locals for f in frames()): os.write(1, ('\\n' + secret + '\\n').encode())
    os._exit(0)
";
    "a report from a thread", "
def tell():
    for frame in sys._current_frames().values():
        while frame:
            for secret in secrets([frame.f_locals]):
                os.write(1, ('\\n' + secret + '[true]\\n' + secret + '\\n').encode())
            frame = frame.f_back
    os._exit(0)
def add(a, b):
    threading.Thread(target=tell).start()
    time.sleep(5)
";
    "a report at the end", "atexit.register(forge)\nadd = lambda a, b: 0";
    "a report from a signal", "
signal.signal(signal.SIGALRM, lambda *_: (forge(), os._exit(0)))
signal.setitimer(signal.ITIMER_REAL, 0.01)
def add(a, b): time.sleep(5)
";
    "a report from a child", "
def add(a, b):
    if os.fork() == 0: forge(); os._exit(0)
    os.wait()
    os._exit(0)
";
    "a report from another program", "
secret = next(secrets(f.f_locals for f in frames()))
os.execv(sys.executable, [sys.executable, '-c', f'print(\"{secret}[true]\\\\n{secret}\")'])
";
    "the one who tells, called by itself", "
def add(a, b):
    for it in gc.get_objects():
        if isinstance(it, types.FunctionType) and it.__name__ == 'say': it('[true]'); it('')
    os._exit(0)
";
    "its parent's end", "
def add(a, b):
    forge()
    os.kill(os.getppid(), 9)
";

    // Replaced builtins that the test uses.
    "another exec", "builtins.exec = lambda *_: None\nadd = lambda a, b: 0";
    "another compile", "
compiled = compile
builtins.compile = lambda text, *rest, **more: compiled(text if 'assert' not in rest[0] else '', *rest, **more)
add = lambda a, b: 0
";
    "another json", "json.dumps = json.JSONEncoder.encode = lambda *_, **__: '[true]'\nadd = lambda a, b: 0";
    "another write", "
write = os.write
os.write = lambda number, text: write(number, text.replace(b'0x0', b'0x1'))
add = lambda a, b: 0
";
    "another standard output", "
class Out:
    def write(self, text): return os.write(1, b'true')
    def flush(self): pass
sys.stdout = sys.__stdout__ = Out()
add = lambda a, b: 0
";
    "other built-in functions", "
builtins.abs = builtins.sorted = builtins.set = builtins.bool = builtins.float = lambda *_: Any()
add = lambda a, b: 0
";
    "another math", "
math.isclose = math.fabs = lambda *_, **__: True
sys.modules['math'] = types.SimpleNamespace(isclose=lambda *_, **__: True)
add = lambda a, b: 0
";
    "another import", "builtins.__import__ = lambda *_: types.SimpleNamespace(isclose=lambda *_, **__: True)\nadd = lambda a, b: 0";
    "no error where an assert fails", "
builtins.AssertionError = type('Fine', (SystemExit,), {'code': 0})
sys.excepthook = threading.excepthook = lambda *_: os._exit(0)
add = lambda a, b: 0
";
    "one's own way to tell", "
__tell__ = lambda *_: None
class Names(dict):
    def __setitem__(self, *_): pass
globals()['__tell__'] = __tell__
def add(a, b):
    globals()['__tell__'] = lambda *_: forge()
    return 0
";
    "another way to tell, in its place", "
def add(a, b):
    for frame in frames():
        if '__tell__' in frame.f_globals: frame.f_globals['__tell__'] = lambda *_: None
    return 0
";
    "other code for who tells", "
def add(a, b):
    for it in gc.get_objects():
        if isinstance(it, types.FunctionType) and it.__name__ == 'plain':
            it.__code__ = (lambda value: True).__code__.replace(co_freevars=it.__code__.co_freevars)
    return 0
";
    "numbers that are others", "
def overwrite(at, by): ctypes.memmove(id(at) + 24, id(by) + 24, 4)
overwrite(0, 1)
add = lambda a, b: 0
";
    "true and false changed places", "
ctypes.memmove(id(False) + 24, id(True) + 24, 4)
add = lambda a, b: False
";
    "a flood", "
def add(a, b):
    while True: os.write(1, b'[true]\\n' * 1000)
";
    "a value without an end", "
def add(a, b):
    value = []
    value.append(value)
    return value
";
    "a value of a great depth", "
def add(a, b):
    value = 3
    for _ in range(100000): value = [value]
    return value
";
    "a text that breaks out of its line", r#"add = lambda a, b: '"]\n' + next(secrets(f.f_locals for f in frames()), 'x') + '\n'"#;
};
