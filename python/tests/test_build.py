"""The platform that the wheel's name promises."""

import importlib.util
import sys
import types
import unittest
from pathlib import Path


def hook():
    """Loads the build's hook, with a stand-in for the builder's interface."""
    names = ["hatchling", "hatchling.builders", "hatchling.builders.hooks", "hatchling.builders.hooks.plugin"]
    for name in [*names, "hatchling.builders.hooks.plugin.interface"]:
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules["hatchling.builders.hooks.plugin.interface"].BuildHookInterface = object
    path = Path(__file__).parents[1] / "hatch_build.py"
    spec = importlib.util.spec_from_file_location("hatch_build", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Platform(unittest.TestCase):
    def test_the_newest_symbol_decides(self):
        def needed(*names):
            return hook().needed_glibc("".join(f"  0x0010:   Name: {name}  Flags: none  Version: 2\n" for name in names))

        self.assertEqual(needed("GLIBC_2.2.5", "GLIBC_2.28", "GLIBC_2.4"), (2, 28))
        self.assertEqual(needed("GLIBC_2.17", "GLIBCXX_3.4.25", "CXXABI_1.3.11"), (2, 28))
        self.assertEqual(needed("GLIBC_2.28", "GLIBCXX_3.4.29"), (2, 34))
        self.assertEqual(needed("GLIBC_2.35", "GLIBCXX_3.4.29", "GCC_4.2.0"), (2, 35))
        # Versions are numbers, not texts.
        self.assertEqual(needed("GLIBC_2.9", "GLIBC_2.10"), (2, 10))
        with self.assertRaisesRegex(SystemExit, "GLIBCXX_3.9.1 is newer"):
            needed("GLIBCXX_3.9.1")

    def test_libraries_that_other_machines_lack_are_refused(self):
        line = " 0x0000000000000001 (NEEDED)             Shared library: [{}]\n"
        path = " 0x000000000000001d (RUNPATH)            Library runpath: [{}]\n"
        check = hook().check_libraries
        check("program", line.format("libtorch_cpu.so") + path.format("$ORIGIN/torch-lib:/nonexistent//"))
        with self.assertRaisesRegex(SystemExit, "libcuda.so.1"):
            check("program", line.format("libc.so.6") + line.format("libcuda.so.1"))
        with self.assertRaisesRegex(SystemExit, "/opt/mine"):
            check("program", path.format("$ORIGIN/torch-lib:/opt/mine/torch/lib"))
