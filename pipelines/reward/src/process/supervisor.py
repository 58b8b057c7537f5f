"""The first part of each of anyroll's Python processes, which becomes two.

The child runs the code below, in a session of its own. The parent ends the child and all that the child has started, as soon
as anyroll closes the pipe of its standard input, which it does however it ends, or sends SIGTERM. Then it ends as the child did.
"""

import os
import resource
import select
import signal
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def prctl(option, value):
    """Linux's call of this name. A Python without ctypes does without."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0)))
    except (ImportError, OSError, AttributeError):
        pass


def supervise():
    """Returns in the child only."""
    # Orphans of the child become this process's children.
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    woken, waker = os.pipe()
    for end in (woken, waker):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(waker)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    own = os.getpid()
    child = os.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.close(woken)
        os.close(waker)
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != own:
            os._exit(1)
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The output ends with the child's.
    os.dup2(2, 1)
    wait_for_end(child, woken)
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    end_orphans(own)
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if os.WTERMSIG(status) != signal.SIGKILL:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(own, os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def wait_for_end(child, woken):
    """Waits until the child has ended, SIGTERM comes or anyroll is gone."""
    poll = select.poll()
    # Without events it still tells that the pipe was closed, and reads nothing.
    poll.register(0, 0)
    poll.register(woken, select.POLLIN)
    while True:
        ready = [descriptor for descriptor, _ in poll.poll()]
        if 0 in ready or woken in ready and signal.SIGTERM in os.read(woken, 4096):
            return
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid == child:
                return
            os.waitpid(ended.si_pid, 0)


def end_orphans(own):
    """Ends what the child's own processes have left behind, in whatever session."""
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        orphans = [process for process in processes() if parent_of(process) == own]
        if not orphans:
            return
        for orphan in orphans:
            os.kill(orphan, signal.SIGKILL)
        for orphan in orphans:
            os.waitpid(orphan, 0)


def processes():
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:
        return []


def parent_of(process):
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return None


supervise()
