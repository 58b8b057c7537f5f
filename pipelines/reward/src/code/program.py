def __NAME__(secret, names, program, asserts):
    # Runs `program`, and `asserts` behind it. What they tell stands in lines that begin with `secret`, the last of which
    # counts the asserts that told nothing; whatever the program makes of `print`, `exec` or of what `print` writes to is
    # its own affair. Nothing that is told here has to be true: it is compared elsewhere, with what this interpreter has
    # never had.
    from json import dumps
    from os import write
    from sys import stdout

    HEAP = 1 << 9
    bases = int, float, complex, str, bytes, tuple, list, dict, set, frozenset
    parts = "tuple", "set", "frozenset", "deque"
    flush, run = stdout.flush, exec

    def plain(value):
        kind = type(value)
        if value is None or kind in (bool, float, str):
            return value
        if kind is int:
            # Python refuses to write long ones in decimal.
            return value if -(10**18) < value < 10**18 else {"int": hex(value)}
        if kind is list:
            return [plain(item) for item in value]
        if kind is complex:
            return {"complex": [value.real, value.imag]}
        if kind in (bytes, bytearray):
            return {kind.__name__: value.hex()}
        if kind.__name__ in parts and kind.__module__ in ("builtins", "collections"):
            return {kind.__name__: [plain(item) for item in value]}
        if kind is dict:
            return {"dict": [[plain(key), plain(item)] for key, item in value.items()]}
        if kind is range:
            return {"range": [plain(value.start), plain(value.stop), plain(value.step)]}
        if kind.__module__ in ("fractions", "decimal"):
            return {kind.__name__: str(value)}
        if kind.__module__ == "datetime" and kind.__name__ in ("date", "datetime", "time"):
            return {kind.__name__: value.isoformat()}
        if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():
            return plain(value.item())
        # As what it is a kind of: an enum's member, a named tuple, a counter.
        for base in bases:
            if isinstance(value, base):
                return plain(base(*base.__getnewargs__(value)) if hasattr(base, "__getnewargs__") else base(value))
        return {"other": None}

    def own(value):
        # The value as one of the language's types, or an error if a class of the program's is in it.
        kind = type(value)
        if kind in (list, tuple, set, frozenset):
            return kind([own(item) for item in value])
        if kind is dict:
            return {own(key): own(item) for key, item in value.items()}
        if not kind.__flags__ & HEAP:
            return value
        if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():
            return own(value.item())
        for base in bases:
            if isinstance(value, base):
                return own(base(*base.__getnewargs__(value)) if hasattr(base, "__getnewargs__") else base(value))
        raise TypeError

    def same(found, expected):
        # As `==`, but that an object of the program's equals nothing of the language's.
        is_near = type(expected) is names.get("__approx__")
        strange, values = 0, []
        for value in (found, expected):
            try:
                values.append(own(value))
            except TypeError:
                strange += 1
                values.append(value)
        if strange == 1 and not is_near or strange == 2 and is_near:
            return False
        return values[1] == values[0] if is_near else values[0] == values[1]

    def say(text):
        flush()
        rest = ("\n" + secret + text + "\n").encode()
        while rest:
            rest = rest[write(1, rest) :]

    def tell(*values):
        told = []
        for value in values:
            try:
                told.append(plain(value()))
            except Exception:
                told.append({"raised": None})
        say(dumps(told))

    reached = [0]

    def reach():
        reached[0] += 1

    run(compile(program, "program", "exec", dont_inherit=True), names)
    names["__tell__"], names["__reach__"], names["__same__"] = tell, reach, same
    names["__solution__"] = type("solution", (), {key: staticmethod(it) if callable(it) else it for key, it in names.items()})
    run(compile(asserts, "asserts", "exec", dont_inherit=True), names)
    say("end %d" % reached[0])


