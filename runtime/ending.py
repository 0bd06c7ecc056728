"""How every script ends: its exit code, and who says why."""
import contextlib
import os
import sys
import traceback
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from configs import console
from runtime.resources import after_imports

NO_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "ALLOC_FAILED")


def run_script(main, user_errors, troubles=()):
    """Exit code of `main()`: mistakes of the user, and paths closed to us, become one message and 2, `troubles`
    (which another try may survive) one message and 1, want of memory a traceback and 4; all else a traceback and 1."""
    console.settle_output()
    after_imports()
    try:
        code = main() or 0
        sys.stdout.flush()
        return note(code)
    except Exception as error:
        told = tell(error, user_errors, troubles)
        note(told or 1)
        if told:
            _leave_word("told")
        if news := told is None and not spoken():  # another rank's end is none: this one lost its connection to it
            with contextlib.suppress(OSError):  # a full disk
                get_error_handler().record_exception(error)  # for torchrun, which shows a traceback of each rank
        if os.environ.get("WORLD_SIZE", "1") != "1":  # an orderly end waits for ranks that know nothing of the error
            if news:
                traceback.print_exc()
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            os._exit(told or 1)
        if told is None:
            raise
        return told
    except SystemExit as end:  # before the first step
        return note(end.code or 0)
    except KeyboardInterrupt:
        print("interrupted, nothing new was saved; the same command starts again", file=sys.stderr)
        return 130


def tell(error, user_errors, troubles):
    """Say what ended the script, if that is no fault of the program's; returns its exit code, or None."""
    code = console.tell(error, user_errors, troubles, first_to_speak)
    if code is not None or not out_of_memory(error):
        return code
    first_to_speak()  # or not: every rank's own traceback tells what was too large
    traceback.print_exc()
    print("error: out of memory; memory.split=2, 4, ... needs less, learns the same", file=sys.stderr, flush=True)
    return console.OUT_OF_MEMORY


def out_of_memory(error):
    """Whether memory was wanting: PyTorch's allocators have a type for that, the CUDA driver and cuBLAS have words."""
    return (isinstance(error, (MemoryError, torch.OutOfMemoryError)) or isinstance(error, RuntimeError)
            and any(words in str(error) for words in NO_MEMORY) and "NCCL" not in str(error))


def note(code):
    """Leave the exit code where the coordinator finds it: torchrun itself knows only success and failure, and a stop is
    none to it. Of several ranks the highest counts: where one ends, others lose their connection to it, which is 1."""
    path = Path(os.environ.get("EXIT_CODE_FILE", os.devnull))
    with contextlib.suppress(OSError):  # a full disk: the process's own code has to do
        if not path.exists() or code > int(path.read_text() or 0):
            path.write_text(str(code))
    return code


def note_stop():
    """Leave word for the coordinator that a phase was asked to stop before its end: that is no failure either."""
    _leave_word("stopped")


def _leave_word(word):
    if "EXIT_CODE_FILE" in os.environ:
        with contextlib.suppress(OSError):
            Path(os.environ["EXIT_CODE_FILE"]).with_name(word).touch()


def first_to_speak():
    """Whether no other rank of this node has said what is wrong: most mistakes are seen by all of them, some by one."""
    with contextlib.suppress(FileExistsError):
        if word := _word():
            word.touch(exist_ok=False)
        return True
    return False


def spoken():
    """Whether a rank of this node has said what is wrong."""
    word = _word()
    return bool(word) and word.exists()


def _word():
    """The file that marks it; torchrun gives the ranks of a node one folder for each attempt. None without torchrun."""
    attempt = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return attempt and Path(attempt).parent.with_name("said")
