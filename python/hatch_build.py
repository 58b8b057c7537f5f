"""Puts the built programs into the wheel, and names the platform that they need.

`ANYROLL_PROGRAMS` is their folder; without it, `target/release` of the checkout.
"""

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PROGRAMS = ("anyroll", "anyroll-engine", "anyroll-sandbox")
# Libraries that a program may need: of manylinux, and those of torch's wheels.
MANYLINUX = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1", "libstdc++.so.6"}
LOADERS = {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
OF_TORCH = {"libtorch_cpu.so", "libc10.so", "libgomp.so.1"}
# torch's own wheels need this glibc.
OLDEST_GLIBC = (2, 28)
# glibc of the oldest distribution whose libstdc++ and libgcc have these versions, as auditwheel's policies have them.
GLIBC_OF = {
    "GLIBCXX": [((3, 4, 25), (2, 28)), ((3, 4, 28), (2, 31)), ((3, 4, 29), (2, 34)), ((3, 4, 30), (2, 35)), ((3, 4, 33), (2, 39))],
    "CXXABI": [((1, 3, 11), (2, 28)), ((1, 3, 12), (2, 31)), ((1, 3, 13), (2, 34)), ((1, 3, 14), (2, 38)), ((1, 3, 15), (2, 39))],
    "GCC": [((8, 0, 0), (2, 28)), ((12, 0, 0), (2, 35)), ((14, 0, 0), (2, 39))],
}
# Folder in the search path of the programs that were built on this machine, in the wheel.
NOWHERE = b"/nonexistent"


class Programs(BuildHookInterface):
    """Adds the programs to the wheel."""

    def initialize(self, version, build_data):
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        built = Path(os.environ.get("ANYROLL_PROGRAMS") or root.parent / "target/release")
        staged = Path(self.directory) / "programs"
        staged.mkdir(parents=True, exist_ok=True)
        glibc = OLDEST_GLIBC
        for name in PROGRAMS:
            source, copy = built / name, staged / name
            if not source.is_file():
                raise SystemExit(f"error: {source} is missing: cargo build --release")
            shutil.copy2(source, copy)
            forget_build(copy, built_folder(source))
            subprocess.run(["strip", "--strip-all", copy], check=True)
            check_libraries(name, read_elf(copy, "--dynamic"))
            glibc = max(glibc, needed_glibc(read_elf(copy, "--version-info")))
            build_data["force_include"][str(copy)] = f"anyroll/bin/{name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{glibc[0]}_{glibc[1]}_{platform.machine()}"


def read_elf(program, what):
    return subprocess.run(["readelf", "--wide", what, program], check=True, capture_output=True, text=True).stdout


def search_path(dynamic):
    """Returns the folders in which a program looks for its libraries."""
    found = re.search(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", dynamic)
    return found[1].split(":") if found else []


def built_folder(program):
    """Returns the folder of torch that a program was built against."""
    folders = [it for it in search_path(read_elf(program, "--dynamic")) if not it.startswith("$ORIGIN")]
    if len(folders) != 1:
        raise SystemExit(f"error: {program} was built against {len(folders)} folders of torch, expected 1: {folders}")
    return folders[0].encode()


def forget_build(program, folder):
    """Overwrites the folder that a program was built against with one that nobody has, of the same length."""
    data = program.read_bytes()
    if folder not in data:
        raise SystemExit(f"error: {program} does not name {folder.decode()}, which it was built against")
    if len(folder) < len(NOWHERE):
        raise SystemExit(f"error: {folder.decode()} is shorter than {NOWHERE.decode()}: put torch into another folder")
    aside = program.with_suffix(".new")
    aside.write_bytes(data.replace(folder, NOWHERE.ljust(len(folder), b"/")))
    aside.chmod(0o755)
    aside.replace(program)


def check_libraries(name, dynamic):
    """Refuses a program that needs a library which neither every Linux nor torch has."""
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
    if others := needed - MANYLINUX - LOADERS - OF_TORCH:
        raise SystemExit(f"error: {name} needs {', '.join(sorted(others))}, which other machines may lack")
    if outside := [it for it in search_path(dynamic) if not it.startswith("$ORIGIN/") and NOWHERE.decode() not in it]:
        raise SystemExit(f"error: {name} looks for libraries in {', '.join(outside)}")


def needed_glibc(version_info):
    """Returns the oldest glibc whose distributions have all symbol versions that a program needs."""
    glibc = (0, 0)
    for kind, number in re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI|GCC)_([0-9.]+) ", version_info):
        version = tuple(int(it) for it in number.split("."))
        if kind == "GLIBC":
            glibc = max(glibc, version[:2])
            continue
        enough = [needed for least, needed in GLIBC_OF[kind] if version <= least]
        if not enough:
            raise SystemExit(f"error: {kind}_{number} is newer than this script knows: add it to GLIBC_OF")
        glibc = max(glibc, enough[0])
    return glibc
