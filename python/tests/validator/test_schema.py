"""The JSON Schema of configs, read by a library that is not ours: what it accepts, and what it refuses."""

import json
import re
import unittest
from pathlib import Path

import yaml
from jsonschema import Draft202012Validator

ROOT = Path(__file__).parents[3]
MALFORMED = ROOT / "pipelines/config/tests/fields/malformed.jsonl"


class Loader(yaml.SafeLoader):
    """Reads numbers as YAML 1.2 has them: `1e-6` is one."""


NUMBER = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")
Loader.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, list("-+0123456789."))


def read(path):
    return yaml.load((ROOT / path).read_text(), Loader)


class Schema(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.schema = json.loads((ROOT / "docs/reference/config.schema.json").read_text())
        Draft202012Validator.check_schema(cls.schema)
        cls.validator = Draft202012Validator(cls.schema)

    def test_every_config_of_the_repository_is_accepted(self):
        folders = ["configs", "bench/rlvr_gpu", "bench/offline_gpu"]
        paths = [path for folder in folders for path in sorted((ROOT / folder).glob("*.yaml"))]
        self.assertGreater(len(paths), 25)
        for path in paths:
            errors = [f"{error.json_path}: {error.message}" for error in self.validator.iter_errors(read(path))]
            self.assertEqual(errors, [], path)

    def test_malformed_configs_are_refused(self):
        cases = [json.loads(line) for line in MALFORMED.read_text().splitlines()]
        self.assertGreater(len(cases), 40)
        for case in cases:
            config = read(case["config"])
            self.assertTrue(self.validator.is_valid(config), case)
            *sections, name = case["field"].split(".")
            section = config
            for part in sections:
                section = section[part]
            if "value" in case:
                section[name] = case["value"]
            else:
                del section[name]
            self.assertFalse(self.validator.is_valid(config), case)

    def test_defaults_are_valid_values(self):
        definitions = {"$defs": self.schema["$defs"]}
        compared = 0
        for section in [self.schema, *self.schema["$defs"].values()]:
            for name, field in section.get("properties", {}).items():
                if "default" in field:
                    own = Draft202012Validator({**field, **definitions})
                    self.assertTrue(own.is_valid(field["default"]), (name, field))
                    compared += 1
        self.assertGreater(compared, 150)

    def test_every_field_has_a_sentence(self):
        for section in [self.schema, *self.schema["$defs"].values()]:
            for name, field in section.get("properties", {}).items():
                self.assertTrue(field["description"], name)


if __name__ == "__main__":
    unittest.main()
