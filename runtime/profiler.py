"""Profiles of training steps: a trace for chrome://tracing or Perfetto, and the ten most expensive operations."""
import atexit

import torch
from torch.profiler import ProfilerActivity

from configs import console
from configs.files import next_name

KEPT = 10  # traces of a phase, some MB each


def profile_steps(optimizer, settings, folder):
    """Profile what happens between the optimiser's steps, from now on; nothing at all when settings.active is 0.

    `settings` is configs.ProfileConfig. Each round leaves <folder's parent>/profile_<folder's name>_<round>.json.gz.
    """
    if not settings.active:
        return
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    schedule = torch.profiler.schedule(wait=settings.wait, warmup=settings.warmup, active=settings.active,
                                       repeat=settings.repeat)
    profiler = torch.profiler.profile(activities=kinds, schedule=schedule,
                                      on_trace_ready=lambda finished: _tell(finished, folder, len(kinds) > 1))
    profiler.start()
    optimizer.register_step_post_hook(lambda *_: profiler.step())
    atexit.register(profiler.stop)  # a run that is shorter than its profile


def _tell(profiler, folder, gpu):
    path, older = next_name(folder.with_name(f"profile_{folder.name}_"), KEPT, ".json.gz")
    for old in older:
        old.unlink(missing_ok=True)
        console.say(f"removed {old}: the last {KEPT} profiles of a phase are kept")
    try:
        profiler.export_chrome_trace(str(path))
    except OSError as error:
        path.unlink(missing_ok=True)
        console.say(f"WARNING: {path} could not be written: {error}")
    own = f"self_{'device' if gpu else 'cpu'}_time_total"  # microseconds
    costs = sorted(((getattr(event, own), event.count, event.key) for event in profiler.key_averages()
                    if not event.key.startswith("ProfilerStep")), reverse=True)
    whole = sum(cost for cost, _, _ in costs) or 1
    console.say(f"profile of {folder.name}: {path}; the ten most expensive operations, own time on the "
                f"{'GPU' if gpu else 'CPU'}:")
    for cost, count, name in costs[:10]:
        console.say(f"{cost / 1000:12.2f} ms {cost / whole:6.1%} {count:8d} calls  {name[:70]}")
