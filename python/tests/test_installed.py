"""The installed package as a user runs it: the command line in an empty folder."""

import importlib.util
import json
import os
import tempfile
import unittest
from importlib.metadata import files, requires
from pathlib import Path
from unittest import mock

from short import SHORT, anyroll, sets

from anyroll import __version__, _programs

TORCH = Path(importlib.util.find_spec("torch").submodule_search_locations[0])


class Installed(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = Path(scratch.name)

    def succeed(self, *arguments):
        ended = anyroll(*arguments, folder=self.folder)
        self.assertEqual(ended.returncode, 0, ended)
        return ended.stdout

    def test_the_version_names_the_torch_in_use(self):
        self.assertEqual(self.succeed("-V"), f"anyroll {__version__}\n")
        self.assertIn("torch     2.11.0", self.succeed("--version"))
        self.assertIn("torch==2.11.0", requires("anyroll"))

    def test_doctor_finds_the_torch_of_this_environment(self):
        report = json.loads(self.succeed("doctor", "--json"))
        self.assertTrue(os.path.samefile(report["torch"]["path"], TORCH / "lib"), report)
        available = {it["name"]: it["available"] for it in report["backends"]}
        self.assertTrue(available["cpu"], report)

    def test_doctor_trains(self):
        said = self.succeed("doctor", "--test", "--backend", "cpu")
        self.assertRegex(said, r"^GRPO, .* on 1 x cpu, .*\nworks: 4 steps in \d+\.\d s, held-out accuracy [01]\.\d\d\n$")

    def test_doctor_reports_a_backend_that_does_not_train(self):
        ended = anyroll("doctor", "--test", "--backend", "vulkan", folder=self.folder)
        self.assertEqual(ended.returncode, 1, ended)
        self.assertIn("error: this installation does not train", ended.stderr)
        self.assertIn("vulkan", ended.stderr)

    def test_the_quickstart_needs_no_file(self):
        self.succeed("quickstart", *sets(SHORT), "--output", "first")
        last = json.loads((self.folder / "first/metrics.jsonl").read_text().splitlines()[-1])
        self.assertEqual(last["step"], 3)
        self.assertTrue((self.folder / "first/report.html").is_file())
        # Its own file is no obstacle, a changed one is.
        self.succeed("quickstart", *sets(SHORT), "--set", "seed=1", "--output", "second")
        with (self.folder / "quickstart.yaml").open("a") as file:
            file.write("# mine\n")
        refused = anyroll("quickstart", "--output", "third", folder=self.folder)
        self.assertEqual(refused.returncode, 1, refused)
        self.assertIn("anyroll run quickstart.yaml", refused.stderr)
        self.assertFalse((self.folder / "third").exists())

    def test_the_schema_is_that_of_the_reference(self):
        page = Path(__file__).parents[2] / "docs/reference/config.schema.json"
        self.assertEqual(self.succeed("schema"), page.read_text())

    def test_the_programs_name_no_folder_of_the_build(self):
        built = str(TORCH.resolve() / "lib").encode()
        for name in ("anyroll", "anyroll-engine", "anyroll-sandbox"):
            program = _programs.FOLDER / name
            self.assertTrue(os.access(program, os.X_OK), program)
            self.assertNotIn(built, program.read_bytes())

    def test_the_package_is_typed_and_has_its_licences(self):
        names = {it.name for it in files("anyroll")}
        self.assertLessEqual({"py.typed", "LICENSE-MIT", "LICENSE-APACHE"}, names)

    def test_a_torch_elsewhere_is_found_by_the_interpreter(self):
        with mock.patch.object(_programs, "FOLDER", self.folder / "site/anyroll/bin"):
            found = _programs.environment()["ANYROLL_TORCH_LIB"]
            self.assertTrue(os.path.samefile(found, TORCH / "lib"))
            with mock.patch.dict(os.environ, {"ANYROLL_TORCH_LIB": "/mine"}):
                self.assertEqual(_programs.environment()["ANYROLL_TORCH_LIB"], "/mine")
        self.assertNotIn("ANYROLL_TORCH_LIB", _programs.environment())


if __name__ == "__main__":
    unittest.main()
