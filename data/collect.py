"""Collect raw samples: N processes run SUMO with baseline controllers and write JSON chunks.

    python -m data.collect --config configs/quick.yaml

A sample is one region of the traffic graph in one window of time: a vehicle and its nearest ones over T control steps
of history and H of future, with a margin of M steps on either side. Networks of any size are so split into graphs of
one size; `data.regions` cuts several from the same moment. A sample's number of vehicles is drawn from `data.vehicles`,
so that [2, N] keeps most scenes of far fewer than N vehicles whole. An episode's files appear when it is complete, so
the same command continues an interrupted collection. While collecting, SUMO's own safe-speed check stays on (speed mode
31): the baselines are not shielded here.
"""
import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import sys
from collections import deque
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, ProcessPoolExecutor, wait
from importlib.metadata import version
from pathlib import Path
from configs import ConfigError, WriteError, console
if __name__ == "__main__":
    console.hush_ctrl_c()

import numpy as np

from configs.files import file_hash, write_whole
from data.layout import DataError, only_writer, read_json
from data.location import cannot_share
from data.plan import episode_plan, held_out_episodes
from data.settings import check_settings, of_scenario, raw_settings, scenarios
from env import graph
from env.baselines import make_baseline
from env.launch import SumoError, die_with_parent, without_main
from env.traffic_env import check_scenario, make_env
from env.workers import WorkerError

FIELDS = tuple(name for name in graph.SCENE.names if name != "lead")  # that becomes an index into the sample
SEEN = ("surround", "fresh", "conflict")  # of an observation
HEAD = ("episode", "seed", "scenario", "controller", "demand_scale")  # of a raw chunk
NO_LEADER, LEADER_OUTSIDE = -1, -2


def chunk_names(job, per_chunk):
    """File names of one episode's chunks."""
    return [f"chunk_{job.episode:03d}_{part}.json" for part in range(-(-job.samples // per_chunk))]


def collect(cfg, report=print, meanwhile=lambda: None):
    """Write every missing chunk of the plan and then metadata.json. Returns the raw folder. `meanwhile` is called after
    every episode, and while another process collects; what it raises ends the collection."""
    folder = Path(cfg.data.folder) / "raw"
    for name in [] if (folder / "metadata.json").exists() else scenarios(cfg):
        try:
            check_scenario(of_scenario(cfg, name), folder / "scenario")
        except SumoError as error:
            named = "" if cfg.data.scenarios == ["same"] else f"data.scenarios={cfg.data.scenarios}: "
            raise SumoError(f"{named}{error}") from None
    with only_writer(cfg.data.folder, report, meanwhile):
        check_settings(folder / "config.json", raw_settings(cfg), "name another data.folder or remove this one")
        plan = episode_plan(cfg)
        todo = [job for job in plan if not all((folder / name).exists()
                                               for name in chunk_names(job, cfg.data.samples_per_chunk))]
        report(f"collect: {len(plan)} episodes, {len(plan) - len(todo)} already there, {cfg.data.processes} processes")
        run_episodes(cfg, todo, folder, meanwhile)
        if not (folder / "metadata.json").exists():  # never anew: its hashes are what damage is measured against
            _write_metadata(cfg, folder, plan)
    return folder


def run_episodes(cfg, jobs, folder, meanwhile):
    """Collect several episodes at once, each in a process with a SUMO of its own."""
    if not jobs:
        return
    context, others = multiprocessing.get_context("spawn"), multiprocessing.active_children()
    mine = lambda: [process for process in multiprocessing.active_children() if process not in others]  # noqa: E731
    try:
        pool = ProcessPoolExecutor(cfg.data.processes, context, _start_worker, (os.getpid(),))
    except OSError as error:
        cannot_share(f"collect: its processes do not start ({error.strerror})", "the same command continues", error)
    with without_main():
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited: the parent alone answers Ctrl-C
        try:
            futures = {pool.submit(collect_episode, cfg, job, str(folder)): job for job in jobs}
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            console.begin("collect: episode")
            patience = cfg.env.start_timeout_s + 2 * cfg.env.call_timeout_s + 30  # all that SUMO may take has deadlines
            for done, future in enumerate(as_they_end(futures, mine, patience), 1):
                samples, job = future.result(), futures[future]
                console.progress("collect: episode", done, len(jobs), f"{samples} samples of {job.scenario}, "
                                 f"{job.controller}, demand x{job.demand_scale}")
                meanwhile()
        except BrokenExecutor:
            raise WorkerError("collect: one of its processes was killed; finished episodes are kept, the same command "
                              "continues") from None
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a second one has to wait
            for process in mine():  # else waited for, to the end of its episode, or for ever where it is frozen
                process.kill()
            pool.shutdown(cancel_futures=True)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def as_they_end(futures, processes, patience):
    """The futures as they end; WorkerError when `patience` seconds pass in which none does and no process computes.
    Only seconds in which it looks count: with Ctrl-Z, or a lid that is closed, they all stand still together."""
    before, idle, look = None, 0.0, min(patience, 5.0)
    while futures:
        ended, futures = wait(futures, look, FIRST_COMPLETED)
        yield from ended
        now = [processor_time(process.pid) for process in processes()]
        before, idle = now, 0.0 if ended or now != before else idle + look
        if idle > patience:
            raise WorkerError(f"collect: one of its processes is stuck, none has computed for {patience:.0f} s; "
                              "finished episodes are kept, the same command continues")


def processor_time(pid):
    """How long a process has computed, user's and kernel's ticks; None when it has gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]


def collect_episode(cfg, job, folder):
    """Run one episode and write its chunks; returns the number of samples."""
    cfg = of_scenario(cfg, job.scenario).variant_of(job.seed)  # now: it may set what is changed here
    cfg.env.demand_scale *= job.demand_scale
    cfg.env.terminate_on_collision, cfg.env.speed_mode = False, 31
    samples, size = _simulate(cfg, job, os.path.join(folder, "scenario")), cfg.data.samples_per_chunk
    for part, name in enumerate(chunk_names(job, size)):
        batch = samples[part * size:(part + 1) * size]
        texts = [json.dumps(sample) for sample in batch]
        head = json.dumps({**{key: getattr(job, key) for key in HEAD}, "hashes": [*map(content_hash, batch)]})
        write_whole(Path(folder) / name, head[:-1] + ', "samples": [' + ",\n".join(texts) + "]}")
    return len(samples)


def _simulate(cfg, job, folder):
    """An episode's samples. A simulator that dies or freezes begins it again, `rollout.restarts` times; then
    WorkerError."""
    for again in range(cfg.rollout.restarts, -1, -1):
        env, rng = make_env(cfg, folder), np.random.default_rng([job.seed, job.episode])
        try:
            return list(_samples(env, cfg.data, make_baseline(job.controller, cfg), job, rng))
        except SumoError as error:
            if not again:
                raise WorkerError(f"collect: episode {job.episode}, seed {job.seed}: {error}") from None
            console.say(f"NOTE: episode {job.episode}: {error}; it begins again")
        finally:
            env.close()


def content_hash(sample):
    """SHA-1 of a sample's traffic: the same traffic at another time or in another episode is a duplicate."""
    content = {key: value for key, value in sample.items() if key not in ("episode", "time")}
    return hashlib.sha1(json.dumps(content).encode()).hexdigest()


def _samples(env, data, controller, job, rng):
    """Yield up to job.samples samples from moments that are evenly spread over the episode."""
    length = data.history + data.future + 2 * data.margin
    steps = env.env_cfg.episode_steps
    wanted = np.linspace(length, steps, -(-job.samples // data.regions)).astype(int)
    frames, moment, left = deque(maxlen=length), 0, job.samples
    observation, _ = env.reset(seed=job.seed)
    for step in range(1, steps + 1):
        rows = [env.slots.slot_of[name] for name in env.ids]
        seen = {name: observation[name][rows] for name in SEEN}
        frames.append((env.ids, env.scene, observation["globals"], env.k, env.time, seen))
        if moment < len(wanted) and step >= wanted[moment] and len(frames) == length:
            samples = cut_regions(frames, data, env.road.extent, rng)[:left]
            moment, left = moment + bool(samples), left - len(samples)  # too few vehicles: made up for a step later
            yield from ({"episode": job.episode, **sample} for sample in samples)
        command = controller(observation, env.env_cfg.max_commands, rng)
        observation, _, _, truncated, _ = env.command(*command)
        if truncated:
            return


def cut_regions(frames, data, extent, rng):
    """`data.regions` samples of one moment, each around a vehicle that no earlier one holds, as long as there is one.

    frames: [(ids, SCENE array, globals, k, time, {SEEN: array [N, ...]})] of M + T + H + M control steps; empty list if
    the road is empty.
    """
    low, high = data.vehicles
    ids, scene = frames[data.margin + data.history - 1][:2]
    free, samples = np.ones(len(ids), bool), []
    for _ in range(data.regions if len(ids) >= low else 0):
        focus = rng.choice(np.flatnonzero(free if free.any() else ~free))
        distance = np.hypot(scene["x"] - scene["x"][focus], scene["y"] - scene["y"][focus])
        members = np.argsort(distance, kind="stable")[:rng.integers(low, high + 1)]
        samples.append(cut_sample(frames, [ids[i] for i in members], extent))
        free[members] = False
    return samples


def cut_sample(frames, members, extent):
    """One sample: what the vehicles `members` (ids) did in the frames, as a dictionary of plain lists."""
    sample = {"extent": extent, "k": [f[3] for f in frames], "time": [f[4] for f in frames],
              "globals": [np.round(f[2].astype(float), 5).tolist() for f in frames],
              "ids": [name.decode() for name in members],
              **{name: [] for name in ("present", "lead", *SEEN, *FIELDS)}}
    for frame_ids, frame_scene, *_, seen in frames:
        place = {name: i for i, name in enumerate(frame_ids)}
        rows = [place.get(name, -1) for name in members]
        inside = {**{row: n for n, row in enumerate(rows)}, -1: NO_LEADER}
        leaders = np.append(frame_scene["lead"], -1)[rows].tolist()  # the last one for who is absent
        sample["present"].append([int(row >= 0) for row in rows])
        sample["lead"].append([inside.get(lead, LEADER_OUTSIDE) for lead in leaders])
        for name, values in seen.items():
            values = np.append(values, np.zeros((1, *values.shape[1:]), values.dtype), 0)[rows]
            sample[name].append((np.round(values.astype(float), 2) if name == "surround" else values).tolist())
        for name in FIELDS:
            values = np.append(frame_scene[name].astype(float), 0)
            sample[name].append(np.round(values[rows], 4).tolist())
    return sample


def _write_metadata(cfg, folder, plan):
    chunks = []
    for job in plan:
        for name in chunk_names(job, cfg.data.samples_per_chunk):
            content = read_json(folder / name, "a raw chunk")
            chunks.append({"file": name, "sha256": file_hash(folder / name), "hashes": content["hashes"],
                           **{key: content[key] for key in HEAD}})
    held_out = held_out_episodes(plan, cfg.data.held_out, len(cfg.env.suite))
    write_whole(folder / "metadata.json", json.dumps(
        {"sumo_version": version("eclipse-sumo"), "scenarios": scenarios(cfg), "held_out_episodes": held_out,
         "settings": raw_settings(cfg), "graph": file_hash(graph.__file__), "chunks": chunks}, indent=1))


def _start_worker(parent):
    os.setpgid(0, 0)  # signals may come to the whole group: the parent decides, and must be able to end this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # also where the parent ignores it
    die_with_parent(parent)


def main():
    from configs.command_line import parse
    signal.signal(signal.SIGTERM, console.leave)  # else Python warns of the pool's locks
    collect(parse(__doc__).config)


if __name__ == "__main__":
    from data.collect import main  # noqa: F811  (processes find the functions of a module, not those of __main__)
    sys.exit(console.exit_code(main, (ConfigError, DataError, SumoError), "finished episodes are kept, ",
                               (WorkerError, WriteError)))
