"""`import anyroll`: runs, metrics and rewards."""

import importlib.util
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest
from pathlib import Path

from short import CONFIG

import anyroll


@anyroll.reward
def brevity(completion: str, answer: str) -> float:
    return 1.0 / (1 + abs(len(completion) - len(answer)))


@anyroll.reward
async def wanted(completion, prompt, **columns):
    return float(columns["word"] in completion and prompt == "p")


@anyroll.reward
def logs(completion: str, log_metric, log_extra) -> float:
    log_metric("length", len(completion))
    log_extra("text", completion.upper())
    if completion == "twice":
        log_extra("text", "again")
    return 0.0


class Rewards(unittest.TestCase):
    def test_a_function_of_one_completion_is_called_with_lists(self):
        scores = brevity(prompts=["p", "p"], completions=["ab", "a"], answer=["ab", "ab"], unused=[1, 2])
        self.assertEqual(scores, [1.0, 0.5])
        self.assertEqual(brevity.score("abc", "ab"), 0.5)
        message = [{"role": "assistant", "content": "ab"}]
        self.assertEqual(brevity(prompts=[[]], completions=[message], answer=["ab"]), [1.0])

    def test_a_function_logs_a_value_of_each_completion(self):
        metrics, columns = [], []
        calls = {"log_metric": lambda *call: metrics.append(call), "log_extra": lambda *call: columns.append(call)}
        self.assertEqual(logs(prompts=["p", "p"], completions=["ab", "c"], **calls), [0.0, 0.0])
        self.assertEqual(metrics, [("length", 2), ("length", 1)])
        self.assertEqual(columns, [("text", ["AB", "C"])])
        self.assertEqual(logs(prompts=["p"], completions=["ab"]), [0.0])
        self.assertEqual(list(inspect.signature(logs).parameters), ["prompts", "completions", "log_metric", "log_extra"])
        with self.assertRaisesRegex(ValueError, "'text' has a value"):
            logs(prompts=["p"], completions=["twice"])

    def test_an_async_function_is_awaited(self):
        lists = {"prompts": ["p", "q", "p"], "completions": ["yes", "yes", "no"], "word": ["yes"] * 3}
        self.assertEqual(wanted(**lists), [1.0, 0.0, 0.0])

    def test_the_signature_names_the_columns(self):
        self.assertEqual(list(inspect.signature(brevity).parameters), ["prompts", "completions", "answer"])
        self.assertEqual(list(inspect.signature(wanted).parameters), ["prompts", "completions", "columns"])

    def test_functions_without_a_completion_are_refused(self):
        with self.assertRaisesRegex(TypeError, "has no parameter `completion`"):
            anyroll.reward(lambda text: 1.0)
        with self.assertRaisesRegex(TypeError, "`columns` .* cannot be given by name"):
            anyroll.reward(lambda completion, *columns: 1.0)

    def test_a_term_names_file_function_and_interpreter(self):
        python = {"path": str(Path(__file__).resolve()), "function": "brevity", "python": sys.executable}
        self.assertEqual(brevity.term(weight=0.5), {"python": python, "weight": 0.5})


class Runs(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(scratch.name)

    def test_a_dict_is_trained_with_overrides(self):
        run = anyroll.run(CONFIG, seed=3, pipeline__rlvr__steps=3, **{"pipeline.rlvr.group_size": 2})
        self.assertEqual(run.parent, Path("runs"))
        self.assertTrue(run.name.startswith("from-python-"), run)
        resolved = (run / "resolved.yaml").read_text()
        for line in ("seed: 3\n", "steps: 3\n", "group_size: 2\n"):
            self.assertIn(line, resolved)
        steps = [row["step"] for row in anyroll.metrics(run) if "reward/mean" in row]
        self.assertEqual(steps, [1, 2, 3])
        lines = (run / "metrics.jsonl").read_text().splitlines()
        self.assertEqual(anyroll.metrics(run), [json.loads(line) for line in lines])
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step":4,"rew')
        self.assertEqual(len(anyroll.metrics(run)), len(lines))
        if importlib.util.find_spec("pandas"):
            self.assertEqual(anyroll.frame(run)["reward/mean"].count(), 3)
        else:
            with self.assertRaisesRegex(ImportError, "pip install pandas"):
                anyroll.frame(run)

    def test_a_file_is_trained_and_a_mistake_is_raised(self):
        Path("mine.yaml").write_text(json.dumps(CONFIG))
        run = anyroll.run("mine.yaml", output="out")
        self.assertEqual(anyroll.metrics(run)[-1]["step"], 2)
        with self.assertRaisesRegex(anyroll.Error, "did you mean `seed`") as raised:
            anyroll.run("mine.yaml", sead=1)
        self.assertEqual(raised.exception.exit_code, 1)
        with self.assertRaisesRegex(anyroll.Error, "already holds a run"):
            anyroll.run("mine.yaml", output="out")
        with self.assertRaisesRegex(TypeError, "no values of the type set"):
            anyroll.run("mine.yaml", devices={1})

    def test_an_own_reward_is_trained_with(self):
        run = anyroll.run(CONFIG, **{"pipeline.rlvr.reward": [brevity]})
        last = anyroll.metrics(run)[-1]
        self.assertGreater(last["reward/python/mean"], 0.0)
        self.assertLessEqual(last["reward/python/mean"], 1.0)

    def test_a_script_that_its_reward_would_run_again_is_refused(self):
        script = """
            import anyroll
            from short import CONFIG

            @anyroll.reward
            def length(completion):
                return float(len(completion))

            anyroll.run(CONFIG, **{"pipeline.rlvr.reward": [length]})
        """
        Path("script.py").write_text(textwrap.dedent(script))
        tests = {"PYTHONPATH": str(Path(__file__).parent)}
        ended = subprocess.run(
            [sys.executable, "script.py"], env={**os.environ, **tests}, capture_output=True, text=True, timeout=120
        )
        self.assertNotEqual(ended.returncode, 0)
        self.assertIn("below `if __name__ == '__main__':`", ended.stderr)

    def test_an_interrupt_saves_a_checkpoint_and_the_run_resumes(self):
        # A shell that starts the tests in the background has SIGINT ignored, which Python would keep.
        heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
        script = f"{heard}; import anyroll; anyroll.run({CONFIG!r}, output='out', pipeline__rlvr__steps=100000)"
        process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        metrics, deadline = Path("out/metrics.jsonl"), time.monotonic() + 60
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1].decode()
        self.assertIn("KeyboardInterrupt", said)
        self.assertTrue(any(Path("out/checkpoints").iterdir()))
        step = anyroll.metrics("out")[-1]["step"]
        # The resumed run goes on to the steps of its config.
        resolved = Path("out/resolved.yaml")
        resolved.write_text(resolved.read_text().replace("steps: 100000", f"steps: {step + 2}"))
        anyroll.resume("out")
        self.assertEqual(anyroll.metrics("out")[-1]["step"], step + 2)


if __name__ == "__main__":
    unittest.main()
