//! Programs that try to escape, to spy, or to bring down the machine. Each prints `ESCAPED` on success, and
//! `refused` if it was blocked.

use anyroll_sandbox::Ended;

/// A program, its permitted exits, and the output it must have.
pub struct Abuse {
    pub name: &'static str,
    pub program: &'static str,
    pub ended: &'static [Ended],
    pub says: &'static str,
}

/// Runs before each program.
pub const PRELUDE: &str = r#"
import ctypes, errno, os, platform, resource, shutil, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
x86 = platform.machine() == "x86_64"
def refused(attempt, *args):
    try:
        result = attempt(*args)
    except (OSError, MemoryError, RuntimeError, ValueError, AttributeError) as error:
        print("refused", type(error).__name__, flush=True)
    else:
        print("ESCAPED", result, flush=True)
def call(x86_number, other_number, *args):
    number = x86_number if x86 else other_number
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(it) for it in args])
    if result == -1:
        raise OSError(ctypes.get_errno(), "refused")
    return result
def read(path):
    with open(path, "rb") as file:
        return file.read(100)
def write(path):
    with open(path, "w") as file:
        return file.write("x")
"#;

const WELL: &[Ended] = &[Ended::Well];
const BADLY: &[Ended] = &[Ended::Badly];
const TIMED_OUT: &[Ended] = &[Ended::TimedOut];
const ENDED: &[Ended] = &[Ended::TimedOut, Ended::Badly];
const FLOODED: &[Ended] = &[Ended::Flooded];

macro_rules! abuses {
    ($($name:literal, $ended:ident, $says:literal, $program:literal;)*) => {
        &[$(Abuse { name: $name, program: $program, ended: $ended, says: $says }),*]
    };
}

pub const ABUSES: &[Abuse] = abuses! {
    // Bringing down the machine.
    "fork bomb", TIMED_OUT, "", "
while True:
    try: os.fork()
    except OSError: pass
";
    "children up to the limit", WELL, "refused", "
count = 0
try:
    while count < 100:
        if os.fork() == 0: time.sleep(60)
        count += 1
except OSError: print('refused')
print('ESCAPED' if count > 8 else count)
";
    "thread bomb", WELL, "refused", "
for _ in range(100):
    try: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    except RuntimeError: print('refused', flush=True); os._exit(0)
print('ESCAPED')
";
    "memory at once", WELL, "refused", "refused(bytearray, 1 << 32)";
    "memory little by little", WELL, "refused", "
held = []
def grow():
    while True: held.append(bytearray(1 << 20))
refused(grow)
";
    "memory from a file descriptor", WELL, "refused", "refused(os.memfd_create, 'x')";
    "shared memory", WELL, "refused", "refused(call, 29, 194, 0, 1 << 34, 0o1777)";
    "disk", WELL, "refused", "
def fill():
    with open('big', 'wb', buffering=0) as file:
        while True:
            if file.write(bytes(1 << 20)) == 0: raise OSError
refused(fill)
print('ESCAPED' if os.path.getsize('big') > 8 << 20 else 'bounded')
";
    "disk by many files", WELL, "refused", "
def fill():
    for number in range(100000): write(f'file{number}')
refused(fill)
";
    "a file of a terabyte", WELL, "refused", "
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
write('big')
refused(os.truncate, 'big', 1 << 40)
";
    "open files", WELL, "refused", "
held = []
def grow():
    while len(held) < 10000: held.append(open('/dev/null'))
refused(grow)
";
    "output flood", FLOODED, "x", "
while True: sys.stdout.write('x' * 4096)
";
    "error flood", FLOODED, "", "
while True: sys.stderr.write('x' * 4096)
";
    "lifting its limits", WELL, "refused", "
most = resource.RLIM_INFINITY
refused(resource.setrlimit, resource.RLIMIT_AS, (most, most))
refused(resource.setrlimit, resource.RLIMIT_NPROC, (1000, 1000))
";
    "rebooting", WELL, "refused", "refused(call, 169, 142, 0xfee1dead, 672274793, 0x1234567, 0)";
    "priority", WELL, "refused", "refused(os.setpriority, os.PRIO_PROCESS, 0, -20)";

    // Not ending.
    "sleep", TIMED_OUT, "", "time.sleep(3600)";
    "busy loop", ENDED, "", "while True: pass";
    "closed pipes, and sleep", TIMED_OUT, "", "
for number in range(3): os.close(number)
time.sleep(3600)
";
    "deaf to signals", TIMED_OUT, "", "
for number in range(1, 32):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
time.sleep(3600)
";
    "double fork", WELL, "parent", "
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1)
        os.write(1, b'ESCAPED')
        time.sleep(3600)
    os._exit(0)
print('parent')
";
    "a child with its pipes closed", WELL, "parent", "
again = [sys.executable, '-I', 'main.py', 'child', 'main.py', 'abuse']
if 'child' in sys.argv: time.sleep(3600)
subprocess.Popen(again, stdin=-3, stdout=-3, stderr=-3, start_new_session=True)
print('parent')
";

    // Other processes.
    "killing the host's process", WELL, "refused", "refused(os.kill, HOST_PID, 9)";
    "killing all", WELL, "", "
try: os.kill(-1, 9)
except OSError: pass
";
    "killing its parent", WELL, "alive", "
os.kill(os.getppid(), 9)
time.sleep(0.2)
print('alive')
";
    "tracing its parent", WELL, "refused", "refused(call, 101, 117, 16, os.getppid(), 0, 0)";
    "being traced", WELL, "refused", "refused(call, 101, 117, 0, 0, 0, 0)";
    "reading its parent's memory", WELL, "refused", "refused(call, 310, 270, os.getppid(), 0, 0, 0, 0, 0)";
    "stealing a descriptor", WELL, "refused", "refused(call, 438, 438, 0, 0, 0)";
    "/proc", WELL, "refused", "
for path in ['/proc/1/environ', '/proc/self/mem', '/proc/self/exe', '/proc/sysrq-trigger']: refused(read, path)
refused(os.listdir, '/proc')
";

    // The host's files.
    "a file of the host", WELL, "refused", "refused(read, SECRET)";
    "a file of the host through a link", WELL, "refused", "
os.symlink(SECRET, 'link')
refused(read, 'link')
";
    "overwriting a file of the host", WELL, "refused", "refused(write, SECRET)";
    "passwords", WELL, "refused", "
for path in ['/etc/shadow', '/etc/passwd', '/etc/hostname']: refused(read, path)
";
    "homes", WELL, "refused", "
for path in ['/root', '/home', os.path.expanduser('~root')]: refused(os.listdir, path)
";
    "the system's programs", WELL, "refused", "
refused(write, '/usr/bin/ls')
refused(write, '/usr/bin/new')
refused(os.unlink, '/usr/bin/env')
refused(os.chmod, '/usr/bin/env', 0o777)
";
    "the root folder", WELL, "refused", "
refused(write, '/new')
refused(os.mkdir, '/new')
refused(os.rename, '/usr', '/usr2')
";
    "deleting everything", WELL, "gone", "
shutil.rmtree('/', ignore_errors=True)
print('gone' if os.path.exists('/usr/bin/env') else 'ESCAPED')
";
    "the helper program", WELL, "refused", "refused(write, '/helper')";
    "up and out", WELL, "refused", "
os.chdir('../../../../..')
refused(os.listdir, '../root')
";
    "devices", WELL, "refused", "
for path in ['/dev/mem', '/dev/kmsg', '/dev/sda', '/dev/vda', '/dev/tty', '/dev/fuse', '/dev/kvm']: refused(read, path)
";
    "making a device", WELL, "refused", "refused(os.mknod, 'disk', 0o60666, os.makedev(8, 0))";
    "/sys", WELL, "refused", "refused(os.listdir, '/sys')";
    "secrets of the environment", WELL, "nothing", "
known = {'PATH', 'HOME', 'TMPDIR', 'LANG', 'LC_CTYPE', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'PYTHONDONTWRITEBYTECODE'}
print('ESCAPED' if set(os.environ) - known else 'nothing')
";

    // The network.
    "connecting to the host", WELL, "refused", "refused(socket.create_connection, ('127.0.0.1', PORT), 2)";
    "a datagram to the world", WELL, "refused", "
def tell(): socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('9.9.9.9', 53))
refused(tell)
";
    "listening", WELL, "refused", "refused(lambda: socket.create_server(('0.0.0.0', 0)))";
    "raw packets", WELL, "refused", "refused(socket.socket, 17, 3, 0)";
    "the kernel's sockets", WELL, "refused", "refused(socket.socket, 16, 3, 0)";
    "a socket file of the host", WELL, "refused", "
def dial(path):
    socket.socket(socket.AF_UNIX).connect(path)
for path in ['/var/run/docker.sock', '/run/dbus/system_bus_socket', '\\0abstract']: refused(dial, path)
";

    // The kernel.
    "a new user namespace", WELL, "refused", "
refused(call, 272, 97, 0x10000000)
refused(call, 435, 435, 0, 0)
refused(call, 56, 220, 0x10000011, 0, 0, 0, 0)
";
    "mounting", WELL, "refused", "
folder = ctypes.cast(ctypes.c_char_p(b'/box'), ctypes.c_void_p).value
kind = ctypes.cast(ctypes.c_char_p(b'tmpfs'), ctypes.c_void_p).value
refused(call, 165, 40, kind, folder, kind, 0, 0)
refused(call, 166, 39, folder, 2)
";
    "changing the root", WELL, "refused", "refused(os.chroot, '/box')";
    "becoming root", WELL, "refused", "
refused(os.setuid, 0)
refused(os.setgid, 0)
refused(os.setgroups, [0])
";
    "a program that becomes root", WELL, "not root", "
out = subprocess.run(['su', '-c', 'id'], capture_output=True, stdin=-3, text=True).stdout if shutil.which('su') else ''
print('ESCAPED' if 'uid=0' in out else 'not root')
";
    "large parts of the kernel", WELL, "refused", "
for numbers in [(321, 280), (298, 241), (323, 282), (425, 425), (250, 219), (248, 217), (246, 104), (175, 105)]:
    refused(call, *numbers, 0, 0, 0, 0, 0)
";
    "the clock", WELL, "refused", "refused(time.clock_settime, time.CLOCK_REALTIME, 0.0)";

    // The reader of the result.
    "the helper's own exit code", BADLY, "", "sys.exit(125)";
    "the helper as a program", BADLY, "", "os.execv('/helper', ['/helper'])";
    "a crash", BADLY, "", "ctypes.string_at(0)";
};
