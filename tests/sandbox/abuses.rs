//! Programs that try to escape, to spy, or to bring down the machine. Each prints `ESCAPED` on success, and
//! `refused` if it was blocked.

use anyroll_sandbox::Exit;

/// A program, its permitted exits, and the output it must have.
pub struct Abuse {
    pub name: &'static str,
    pub program: &'static str,
    pub exits: &'static [Exit],
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

const SUCCESS: &[Exit] = &[Exit::Success];
const FAILURE: &[Exit] = &[Exit::Failure];
const TIMED_OUT: &[Exit] = &[Exit::TimedOut];
const TIMED_OUT_OR_FAILURE: &[Exit] = &[Exit::TimedOut, Exit::Failure];
const OUTPUT_LIMIT: &[Exit] = &[Exit::OutputLimit];

macro_rules! abuses {
    ($($name:literal, $exits:ident, $says:literal, $program:literal;)*) => {
        &[$(Abuse { name: $name, program: $program, exits: $exits, says: $says }),*]
    };
}

pub const ABUSES: &[Abuse] = abuses! {
    // Bringing down the machine.
    "fork bomb", TIMED_OUT, "", "
while True:
    try: os.fork()
    except OSError: pass
";
    "children up to the limit", SUCCESS, "refused", "
count = 0
try:
    while count < 100:
        if os.fork() == 0: time.sleep(60)
        count += 1
except OSError: print('refused')
print('ESCAPED' if count > 8 else count)
";
    "thread bomb", SUCCESS, "refused", "
for _ in range(100):
    try: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    except RuntimeError: print('refused', flush=True); os._exit(0)
print('ESCAPED')
";
    "memory at once", SUCCESS, "refused", "refused(bytearray, 1 << 32)";
    "memory little by little", SUCCESS, "refused", "
held = []
def grow():
    while True: held.append(bytearray(1 << 20))
refused(grow)
";
    "memory from a file descriptor", SUCCESS, "refused", "refused(os.memfd_create, 'x')";
    "shared memory", SUCCESS, "refused", "refused(call, 29, 194, 0, 1 << 34, 0o1777)";
    "disk", SUCCESS, "refused", "
def fill():
    with open('big', 'wb', buffering=0) as file:
        while True:
            if file.write(bytes(1 << 20)) == 0: raise OSError
refused(fill)
print('ESCAPED' if os.path.getsize('big') > 8 << 20 else 'bounded')
";
    "disk by many files", SUCCESS, "refused", "
def fill():
    for number in range(100000): write(f'file{number}')
refused(fill)
";
    "a file of a terabyte", SUCCESS, "refused", "
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
write('big')
refused(os.truncate, 'big', 1 << 40)
";
    "open files", SUCCESS, "refused", "
held = []
def grow():
    while len(held) < 10000: held.append(open('/dev/null'))
refused(grow)
";
    "output flood", OUTPUT_LIMIT, "x", "
while True: sys.stdout.write('x' * 4096)
";
    "error flood", OUTPUT_LIMIT, "", "
while True: sys.stderr.write('x' * 4096)
";
    "lifting its limits", SUCCESS, "refused", "
most = resource.RLIM_INFINITY
refused(resource.setrlimit, resource.RLIMIT_AS, (most, most))
refused(resource.setrlimit, resource.RLIMIT_NPROC, (1000, 1000))
";
    "rebooting", SUCCESS, "refused", "refused(call, 169, 142, 0xfee1dead, 672274793, 0x1234567, 0)";
    "priority", SUCCESS, "refused", "refused(os.setpriority, os.PRIO_PROCESS, 0, -20)";

    // Not ending.
    "sleep", TIMED_OUT, "", "time.sleep(3600)";
    "busy loop", TIMED_OUT_OR_FAILURE, "", "while True: pass";
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
    "double fork", SUCCESS, "parent", "
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1)
        os.write(1, b'ESCAPED')
        time.sleep(3600)
    os._exit(0)
print('parent')
";
    "a child with its pipes closed", SUCCESS, "parent", "
again = [sys.executable, '-I', 'main.py', 'child', 'main.py', 'abuse']
if 'child' in sys.argv: time.sleep(3600)
subprocess.Popen(again, stdin=-3, stdout=-3, stderr=-3, start_new_session=True)
print('parent')
";

    // Other processes.
    "killing the host's process", SUCCESS, "refused", "refused(os.kill, HOST_PID, 9)";
    "killing all", SUCCESS, "", "
try: os.kill(-1, 9)
except OSError: pass
";
    "killing its parent", SUCCESS, "alive", "
os.kill(os.getppid(), 9)
time.sleep(0.2)
print('alive')
";
    "tracing its parent", SUCCESS, "refused", "refused(call, 101, 117, 16, os.getppid(), 0, 0)";
    "being traced", SUCCESS, "refused", "refused(call, 101, 117, 0, 0, 0, 0)";
    "reading its parent's memory", SUCCESS, "refused", "refused(call, 310, 270, os.getppid(), 0, 0, 0, 0, 0)";
    "stealing a descriptor", SUCCESS, "refused", "refused(call, 438, 438, 0, 0, 0)";
    "/proc", SUCCESS, "refused", "
for path in ['/proc/1/environ', '/proc/self/mem', '/proc/self/exe', '/proc/sysrq-trigger']: refused(read, path)
refused(os.listdir, '/proc')
";

    // The host's files.
    "a file of the host", SUCCESS, "refused", "refused(read, SECRET)";
    "a file of the host through a link", SUCCESS, "refused", "
os.symlink(SECRET, 'link')
refused(read, 'link')
";
    "overwriting a file of the host", SUCCESS, "refused", "refused(write, SECRET)";
    "passwords", SUCCESS, "refused", "
for path in ['/etc/shadow', '/etc/passwd', '/etc/hostname']: refused(read, path)
";
    "homes", SUCCESS, "refused", "
for path in ['/root', '/home', os.path.expanduser('~root')]: refused(os.listdir, path)
";
    "the system's programs", SUCCESS, "refused", "
refused(write, '/usr/bin/ls')
refused(write, '/usr/bin/new')
refused(os.unlink, '/usr/bin/env')
refused(os.chmod, '/usr/bin/env', 0o777)
";
    "the root folder", SUCCESS, "refused", "
refused(write, '/new')
refused(os.mkdir, '/new')
refused(os.rename, '/usr', '/usr2')
";
    "deleting everything", SUCCESS, "gone", "
shutil.rmtree('/', ignore_errors=True)
print('gone' if os.path.exists('/usr/bin/env') else 'ESCAPED')
";
    "the helper program", SUCCESS, "refused", "refused(write, '/helper')";
    "up and out", SUCCESS, "refused", "
os.chdir('../../../../..')
refused(os.listdir, '../root')
";
    "devices", SUCCESS, "refused", "
for path in ['/dev/mem', '/dev/kmsg', '/dev/sda', '/dev/vda', '/dev/tty', '/dev/fuse', '/dev/kvm']: refused(read, path)
";
    "making a device", SUCCESS, "refused", "refused(os.mknod, 'disk', 0o60666, os.makedev(8, 0))";
    "/sys", SUCCESS, "refused", "refused(os.listdir, '/sys')";
    "secrets of the environment", SUCCESS, "nothing", "
known = {'PATH', 'HOME', 'TMPDIR', 'LANG', 'LC_CTYPE', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'PYTHONDONTWRITEBYTECODE'}
print('ESCAPED' if set(os.environ) - known else 'nothing')
";

    // The network.
    "connecting to the host", SUCCESS, "refused", "refused(socket.create_connection, ('127.0.0.1', PORT), 2)";
    "a datagram to the world", SUCCESS, "refused", "
def tell(): socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('9.9.9.9', 53))
refused(tell)
";
    "listening", SUCCESS, "refused", "refused(lambda: socket.create_server(('0.0.0.0', 0)))";
    "raw packets", SUCCESS, "refused", "refused(socket.socket, 17, 3, 0)";
    "the kernel's sockets", SUCCESS, "refused", "refused(socket.socket, 16, 3, 0)";
    "a socket file of the host", SUCCESS, "refused", "
def dial(path):
    socket.socket(socket.AF_UNIX).connect(path)
for path in ['/var/run/docker.sock', '/run/dbus/system_bus_socket', '\\0abstract']: refused(dial, path)
";

    // The kernel.
    "a new user namespace", SUCCESS, "refused", "
refused(call, 272, 97, 0x10000000)
refused(call, 435, 435, 0, 0)
refused(call, 56, 220, 0x10000011, 0, 0, 0, 0)
";
    "mounting", SUCCESS, "refused", "
folder = ctypes.cast(ctypes.c_char_p(b'/box'), ctypes.c_void_p).value
kind = ctypes.cast(ctypes.c_char_p(b'tmpfs'), ctypes.c_void_p).value
refused(call, 165, 40, kind, folder, kind, 0, 0)
refused(call, 166, 39, folder, 2)
";
    "changing the root", SUCCESS, "refused", "refused(os.chroot, '/box')";
    "becoming root", SUCCESS, "refused", "
refused(os.setuid, 0)
refused(os.setgid, 0)
refused(os.setgroups, [0])
";
    "a program that becomes root", SUCCESS, "not root", "
out = subprocess.run(['su', '-c', 'id'], capture_output=True, stdin=-3, text=True).stdout if shutil.which('su') else ''
print('ESCAPED' if 'uid=0' in out else 'not root')
";
    "large parts of the kernel", SUCCESS, "refused", "
for numbers in [(321, 280), (298, 241), (323, 282), (425, 425), (250, 219), (248, 217), (246, 104), (175, 105)]:
    refused(call, *numbers, 0, 0, 0, 0, 0)
";
    "the clock", SUCCESS, "refused", "refused(time.clock_settime, time.CLOCK_REALTIME, 0.0)";

    // The reader of the result.
    "the helper's own exit code", FAILURE, "", "sys.exit(125)";
    "the helper as a program", FAILURE, "", "os.execv('/helper', ['/helper'])";
    "a crash", FAILURE, "", "ctypes.string_at(0)";
};
