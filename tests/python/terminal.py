"""Runs a program on a terminal of its own and answers its questions.

    python3 terminal.py PROGRAM [ARGUMENT ...]

Standard input is a JSON list of pairs: a text that the terminal shows, and what is typed once it does. Control-C is "\\u0003" and
the end of input "\\u0004". Writes {"code": exit code, minus the signal that ended it, "shown": all that the terminal showed}.
"""

import json
import os
import pty
import select
import signal
import sys
import time

DEADLINE_S = 60


def main():
    answers = json.load(sys.stdin)
    pid, terminal = pty.fork()
    if pid == 0:
        # Whoever started the test may have had it ignored.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.execvp(sys.argv[1], sys.argv[1:])
    deadline, shown, read = time.monotonic() + DEADLINE_S, "", 0
    try:
        while time.monotonic() < deadline:
            if not select.select([terminal], [], [], 0.1)[0]:
                continue
            try:
                part = os.read(terminal, 4096)
            except OSError:  # the program has closed its end
                break
            if not part:
                break
            shown += part.decode(errors="replace")
            # A question is answered after all that was shown before the last answer.
            if answers and (found := shown.find(answers[0][0], read)) >= 0:
                read = found + len(answers[0][0])
                os.write(terminal, answers.pop(0)[1].encode())
        else:
            os.kill(pid, signal.SIGKILL)
            shown += f"\n(no end after {DEADLINE_S} s)"
    finally:
        _, status = os.waitpid(pid, 0)
    if answers:
        shown += f"\n(never shown: {answers[0][0]!r})"
    print(json.dumps({"code": os.waitstatus_to_exitcode(status), "shown": shown}))


main()
