//! A program for each kind of system calls in the sandbox's table, which requests as much as it can get.

/// Programs by the names of their kinds. Each prints `refused` if a call fails, and `ESCAPED` if it gets more than the
/// kind's bound. Kinds that are blocked with all arguments need none.
pub const PROGRAMS: &[(&str, &str)] = &[
    // Denied by their arguments.
    ("huge pages", "refused(call, 9, 222, 0, 1 << 21, 3, 0x40022, -1, 0)"),
    ("longer pipes", "refused(fcntl.fcntl, os.pipe()[1], 1031, 1 << 20)"),
    (
        "longer socket buffers",
        "
for option in (7, 8, 32, 33): refused(socket.socketpair()[0].setsockopt, socket.SOL_SOCKET, option, 1 << 20)
passed = ctypes.create_string_buffer(struct.pack('HHI', 6, 0, 0))
program = struct.pack('HxxxxxxQ', 1, ctypes.addressof(passed))
refused(socket.socketpair()[0].setsockopt, socket.SOL_SOCKET, 26, program)
",
    ),
    ("futex tables", "refused(call, 157, 167, 78, 1, 1 << 10, 0, 0)"),
    (
        "namespaces",
        "
for flag in (0x10000000, 0x20000000, 0x20000, 0x40000000, 0x8000000, 0x4000000, 0x2000000):
    refused(call, 56, 220, flag | 17, 0, 0, 0, 0)
",
    ),
    (
        "the network",
        "
for family in (2, 10, 16, 17, 30, 38, 40): refused(socket.socket, family, 2, 0)
refused(socket.socketpair, 30, 2, 0)
",
    ),
    (
        "a terminal's input",
        "
for request in (0x5412, 0x541c): refused(fcntl.ioctl, 0, request, b'x')
",
    ),
    // Bounded.
    (
        "pipes",
        "
held = []
def grow():
    while len(held) < 100:
        held.append(os.pipe())
        os.set_blocking(held[-1][1], False)
        try:
            while True: os.write(held[-1][1], bytes(4096))
        except BlockingIOError: pass
refused(grow)
",
    ),
    (
        "socket buffers",
        "
held, sent = [], 0
def grow():
    global sent
    while len(held) < 100:
        held.append(socket.socketpair())
        for end in held[-1]:
            end.setblocking(False)
            try:
                while True: sent += end.send(bytes(32768))
            except BlockingIOError: pass
refused(grow)
print('ESCAPED' if sent > 40 << 20 else sent)
",
    ),
    (
        "datagrams",
        "
sent = 0
def grow():
    global sent
    server = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    server.bind('server')
    for _ in range(1000):
        client = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        client.setblocking(False)
        sent += client.sendto(bytes(32768), 'server')
refused(grow)
print('ESCAPED' if sent > 1 << 20 else sent)
",
    ),
    (
        "connections that wait",
        "
sent = 0
def grow():
    global sent
    server = socket.socket(socket.AF_UNIX)
    server.bind('server')
    server.listen(4096)
    for _ in range(1000):
        client = socket.socket(socket.AF_UNIX)
        client.setblocking(False)
        client.connect('server')
        try:
            while True: sent += client.send(bytes(32768))
        except BlockingIOError: pass
refused(grow)
print('ESCAPED' if sent > 4 << 20 else sent)
",
    ),
    (
        "descriptors on their way",
        "
sent = 0
def grow():
    global sent
    ends = [socket.socketpair() for _ in range(10)]
    for end, _ in ends: end.setblocking(False)
    for number in range(100000):
        file = open('/dev/null')
        socket.send_fds(ends[number % 10][0], [b'x'], [file.fileno()])
        file.close()
        sent += 1
refused(grow)
print('ESCAPED' if sent > 1000 else sent)
",
    ),
    (
        "epoll",
        "
held = []
def grow():
    pipes = [os.pipe() for _ in range(15)]
    while len(held) < 100:
        held.append(select.epoll())
        for pipe in pipes: held[-1].register(pipe[0])
refused(grow)
",
    ),
    ("eventfd", "held = []\nrefused(lambda: [held.append(call(290, 19, 0, 0)) for _ in range(1000)])"),
    ("timerfd", "held = []\nrefused(lambda: [held.append(call(283, 85, 1, 0)) for _ in range(1000)])"),
    (
        "signalfd",
        "
mask = ctypes.create_string_buffer(8)
refused(lambda: [call(289, 74, -1, ctypes.addressof(mask), 8, 0) for _ in range(1000)])
",
    ),
    ("pidfd", "refused(lambda: [call(434, 434, os.getpid(), 0) for _ in range(1000)])"),
    (
        "splice",
        "
open('file', 'wb').write(bytes(1 << 20))
def fill(write):
    os.set_blocking(write, False)
    file, sent = os.open('file', os.O_RDONLY), 0
    while sent < 1 << 20: sent += os.splice(file, write, 1 << 16, offset_src=0)
refused(fill, os.pipe()[1]) if hasattr(os, 'splice') else print('refused: this Python has none')
",
    ),
    (
        "timers",
        "
def grow():
    for _ in range(10000):
        if libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p())) < 0: raise OSError
refused(grow)
",
    ),
    (
        "queued signals",
        "
signal.pthread_sigmask(signal.SIG_BLOCK, {40})
info = ctypes.create_string_buffer(struct.pack('iii', 40, 0, -1), 128)
refused(lambda: [call(129, 138, os.getpid(), 40, ctypes.addressof(info)) for _ in range(10000)])
",
    ),
    (
        "locks of files",
        "
held = []
def grow():
    while len(held) < 1000:
        held.append(open('file', 'w'))
        fcntl.flock(held[-1], fcntl.LOCK_SH)
refused(grow)
",
    ),
    (
        "locks of records",
        "
files = [open(f'file{number}', 'w') for number in range(50)]
started, count = time.time(), 0
while time.time() < started + 2:
    for file in files: fcntl.lockf(file, fcntl.LOCK_EX, 1, 2 * count)
    count += 1
print('ESCAPED' if count * len(files) > 200000 else count)
",
    ),
    (
        "leases",
        "
held = []
def grow():
    while len(held) < 1000:
        open(f'file{len(held)}', 'w').close()
        held.append(open(f'file{len(held)}'))
        fcntl.fcntl(held[-1], fcntl.F_SETLEASE, fcntl.F_RDLCK)
refused(grow)
",
    ),
    (
        "POSIX semaphores",
        "
import _multiprocessing
held = []
def grow():
    while len(held) < 100000:
        held.append(_multiprocessing.SemLock(1, 1, 1, f'/many{len(held)}', False))
refused(grow)
print('ESCAPED' if len(held) > 4096 else len(held))
",
    ),
    (
        "POSIX shared memory",
        "
def fill():
    with open('/dev/shm/big', 'wb', buffering=0) as file:
        while file.write(bytes(1 << 20)): pass
    raise OSError
refused(fill)
print('ESCAPED' if os.path.getsize('/dev/shm/big') > 8 << 20 else 'bounded')
",
    ),
    (
        "attributes of files",
        "
sent = 0
def grow():
    global sent
    for number in range(5000):
        open(f'file{number}', 'w').close()
        for name in range(1000):
            os.setxattr(f'file{number}', f'user.{name}', bytes(50000))
            sent += 50000
refused(grow)
print('ESCAPED' if sent > 8 << 20 else sent)
",
    ),
    (
        "links",
        "
open('file', 'w').close()
def grow():
    for number in range(100000): os.link('file', f'link{number}')
refused(grow)
",
    ),
    (
        "mappings",
        "
held = []
def grow():
    # Every other page of another protection is a mapping of its own.
    while len(held) < 200000:
        held.append(mmap.mmap(-1, 4096, prot=mmap.PROT_READ if len(held) % 2 else mmap.PROT_READ | mmap.PROT_WRITE))
refused(grow)
",
    ),
    (
        "locked memory",
        "
page = mmap.mmap(-1, 4096)
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
refused(call, 149, 228, address, 4096)
",
    ),
    (
        "processes",
        "
def grow():
    for _ in range(100):
        if os.fork() == 0: time.sleep(60)
refused(grow)
",
    ),
    (
        "filters of calls",
        "
# `return allow`, as often as a filter may have it.
steps = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0x7fff0000) * 4096)
program = ctypes.create_string_buffer(struct.pack('HxxxxxxQ', 4096, ctypes.addressof(steps)))
refused(lambda: [call(317, 277, 1, 0, ctypes.addressof(program)) for _ in range(1000)])
",
    ),
];

/// Modules that the programs use in addition to those of [`crate::PRELUDE`].
pub const IMPORTS: &str = "import fcntl, mmap, select, struct\n";

/// Prints the calls that are not blocked.
pub const ALWAYS: &str = "
for number in NUMBERS:
    try: call(number, number, -1, 0, 0, 0, 0, 0)
    except PermissionError: print('refused')
    except OSError as error: print('ESCAPED', number, error)
    else: print('ESCAPED', number)
";
