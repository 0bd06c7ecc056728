"""What every command tells on the way: one line that renews itself in a terminal, plain lines in a log."""
import errno
import os
import shlex
import shutil
import signal
import sys
import time

BAD_INPUT, MEMORY_STOP, OUT_OF_MEMORY = 2, 3, 4  # exit codes; 3: the memory guard has stopped, everything is saved
FILES, PROCESSES, ROOM = ("raise the limit on open files (ulimit -n)", "raise the limit on processes (ulimit -u, a "
                          "container's pids)", "make room, the same command continues")
LIMITS = {errno.EMFILE: FILES, errno.ENFILE: FILES, errno.EAGAIN: PROCESSES, "can't start new thread": PROCESSES,
          errno.ENOMEM: "close other programs", errno.ENOSPC: ROOM, errno.EDQUOT: ROOM}  # of the machine: what to do
PATHS = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR, errno.ENOTDIR)  # nobody opens these
EVERY_S = {"terminal": 0.2, "log": 30.0}
_begun, _shown, _lasting = {}, [0.0], [""]  # {step: (time, how far it was)}, time of the last line, the last `always`


def live():
    """Whether somebody watches a terminal."""
    return sys.stdout.isatty()


def first_rank():
    """Whether this is the rank that speaks; so is a process without ranks."""
    return os.environ.get("RANK", "0") == "0"


def begin(what, done=0):
    """Start the clock of a step that stands at `done`."""
    _shown[0] = time.monotonic()
    _begun[what] = _shown[0], done


def progress(what, done, total, text="", always=True):
    """Tell how far the step `what` is, how fast, for how long still, and `text`. Not `always`: a part of that step, of
    which a log hears twice a minute, a terminal, where both share the line, five times a second. Of several ranks only
    the first speaks."""
    now = time.monotonic()
    start, first = _begun.setdefault(what, (now, done))
    if not first_rank() or not always and now - _shown[0] < EVERY_S["terminal" if live() else "log"]:
        return
    _shown[0], speed, left = now, "", ""
    if done > first and now > start:
        rate = (done - first) / (now - start)
        speed = f"  {rate:.3g}/s" if rate >= 1 else f"  {1 / rate:.3g} s each"
        left = f"  {duration((total - done) / rate)} left" if done < total else ""
    line = f"{what}  {done:>{len(str(total))}d}/{total}{speed}{left}  {text}".rstrip()
    if always:
        _lasting[0] = line
    if live() and not (always and done == total):
        columns = shutil.get_terminal_size().columns
        line = line if always else f"{line}  |  {_lasting[0]}"
        print(f"\r\x1b[K{line[:columns - 1]}", end="\r", flush=True)  # what follows is printed over it
    else:
        say(line)


def say(text):
    """Print a line that stays."""
    print(f"\x1b[K{text}" if live() else text, flush=True)


def duration(seconds):
    """As a person would say it: 40 s, 12 min, 3 h 20 min."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def again():
    """How a stopped command is continued. Below the coordinator or torchrun this process's own command is not it."""
    if "EXIT_CODE_FILE" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        return "the same command continues"
    return f"the same command continues: {shlex.join(sys.orig_argv)}"


def tell(error, mistakes, troubles, speaks=lambda: True):
    """Say what ended a command, if it `speaks`; returns its exit code. None where it is neither one of `mistakes` (or a
    path that nobody can open: closed to us, a folder, with too long a name, or a link to itself) nor of `troubles` (or
    a limit of the machine, which is no mistake either where it is behind what looked like one)."""
    if isinstance(error, BrokenPipeError) and nobody_reads():
        return 1
    trouble, known = isinstance(error, troubles), isinstance(error, (*mistakes, *troubles))
    remedy = None if trouble else beyond(error, known)
    if not (remedy or known or getattr(error, "errno", None) in PATHS):
        return None
    if speaks():
        more = f"; {remedy}" if remedy and not any(said in str(error) for said in ("ulimit", ROOM)) else ""
        print(f"error: {error}{more}", file=sys.stderr, flush=True)
    return 1 if trouble or remedy else BAD_INPUT


def beyond(error, behind):
    """What to do about the limit of the machine that an error tells of, or one `behind` it; None where none does."""
    while error is not None:
        if remedy := LIMITS.get(getattr(error, "errno", str(error))):
            return remedy
        error = (error.__cause__ or error.__context__) if behind else None


def nobody_reads():
    """Whether whoever read our output (`| head`) has gone; then nothing more is said."""
    try:
        print(flush=True)  # flush alone does not complain twice
        return False
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True


class Output:
    """A stream that stops nobody: what a full disk does not take is left out. A reader who has gone still ends the
    work."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        """As of any text stream."""
        return self._try(self.stream.write, text)

    def flush(self):
        """As of any text stream."""
        self._try(self.stream.flush)

    @staticmethod
    def _try(method, *arguments):
        try:
            return method(*arguments)
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                raise


def settle_output():
    """Let neither a full disk behind standard output, nor a closed one, nor letters that it does not know end a run."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")
        if not isinstance(stream, Output):
            setattr(sys, name, Output(stream))
        if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def hush_ctrl_c():
    """What a command does before imports that take long: until `heed_ctrl_c`, Ctrl-C ends it without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def heed_ctrl_c():
    """Undo of `hush_ctrl_c`."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def leave(number, frame):
    """Handler of a signal that ends a command, with the exit code that a shell would name; Python's own end, which may
    take a while, would tell of a Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(128 + number)


def exit_code(work, mistakes, kept="", troubles=()):
    """Exit code of `work()`: a mistake of the user (one of these exceptions, or a path that is closed to us) is one
    message and 2, one of `troubles` (which another try may survive) one message and 1; Ctrl-C says what is kept.

    For tools; scripts that train or score, perhaps on several ranks, have `runtime.ending.run_script`.
    """
    settle_output()
    heed_ctrl_c()
    try:
        code = work() or 0
        sys.stdout.flush()
        return code
    except Exception as error:
        if (code := tell(error, mistakes, troubles)) is None:
            raise
        return code
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Python's own end would tell of a second one
        print(f"stopped; {kept}{again()}", file=sys.stderr)
        return 0
