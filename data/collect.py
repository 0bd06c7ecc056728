"""Collect raw samples: N processes run SUMO with baseline controllers and write JSON chunks.

    python -m data.collect --config configs/quick.yaml

A sample is one vehicle and its nearest ones over T control steps of history and H of future. An episode's file
appears when it is complete, so the same command continues an interrupted collection. While collecting, SUMO's own
safe-speed check stays on (speed mode 31): the baselines are not shielded here.
"""
import copy
import hashlib
import json
import multiprocessing
import os
import sys
from collections import deque
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path

import numpy as np

from configs import ConfigError
from data.layout import DataError, check_settings, data_settings, file_hash, read_json, write_atomically
from env.baselines import BASELINES
from env.launch import SumoError, die_with_parent
from env.scenarios import build_scenario
from env.traffic_env import make_env

FIELDS = ("x", "y", "angle", "speed", "accel", "lane", "length", "position", "lane_end", "progress", "icv",
          "odometer", "lead_gap", "lead_speed")  # of a SCENE record; `lead` becomes an index into the sample
NO_LEADER, LEADER_OUTSIDE = -1, -2


def episode_plan(cfg):
    """[(episode, seed, controller, demand scale, samples)] for the whole collection."""
    d, plan, left = cfg.data, [], cfg.data.samples
    while left > 0:
        e = len(plan)
        seed = 2_000_000 + cfg.run.seed * 100_003 + 7 * e  # far from the seeds of evaluation
        scale = d.demand_scales[e // len(d.controllers) % len(d.demand_scales)]
        plan.append((e, seed % 2_000_000_000, d.controllers[e % len(d.controllers)], scale,
                     min(left, d.samples_per_episode)))
        left -= d.samples_per_episode
    return plan


def chunk_names(episode, samples, per_chunk):
    """File names of one episode's chunks."""
    return [f"chunk_{episode:03d}_{part}.json" for part in range(-(-samples // per_chunk))]


def collect(cfg, report=print):
    """Write every missing chunk of the plan and then metadata.json. Returns the raw folder."""
    folder = Path(cfg.data.folder) / "raw"
    build_scenario(cfg, folder / "scenario")
    check_settings(folder / "config.json", data_settings(cfg), "name another data.folder or remove this one")
    plan = episode_plan(cfg)
    todo = [job for job in plan if not all((folder / name).exists()
                                           for name in chunk_names(job[0], job[4], cfg.data.samples_per_chunk))]
    report(f"collect: {len(plan)} episodes, {len(plan) - len(todo)} already there, {cfg.data.processes} processes")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(cfg.data.processes, context, initializer=_start_worker) as pool:
        jobs = {pool.submit(collect_episode, cfg, job, str(folder)): job for job in todo}
        try:
            for done, future in enumerate(as_completed(jobs), 1):
                episode, seed, controller, scale, _ = jobs[future]
                report(f"collect: {done}/{len(todo)} episode {episode} ({controller}, demand x{scale}): "
                       f"{future.result()} samples")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if not (folder / "metadata.json").exists():  # never anew: its hashes are what damage is measured against
        _write_metadata(cfg, folder, plan)
    return folder


def collect_episode(cfg, job, folder):
    """Run one episode and write its chunks; returns the number of samples."""
    episode, seed, controller, scale, count = job
    cfg = copy.deepcopy(cfg)
    cfg.env.demand_scale *= scale
    cfg.env.terminate_on_collision, cfg.env.speed_mode = False, 31
    env, rng = make_env(cfg, os.path.join(folder, "scenario")), np.random.default_rng([seed, episode])
    try:
        samples = list(_samples(env, cfg, BASELINES[controller], seed, episode, count, rng))
    finally:
        env.close()
    size = cfg.data.samples_per_chunk
    for part, name in enumerate(chunk_names(episode, count, size)):
        batch = samples[part * size:(part + 1) * size]
        texts = [json.dumps(sample) for sample in batch]
        hashes = [content_hash(sample) for sample in batch]
        head = {"episode": episode, "seed": seed, "controller": controller, "demand_scale": scale, "hashes": hashes}
        write_atomically(Path(folder) / name, json.dumps(head)[:-1] + ', "samples": [' + ",\n".join(texts) + "]}")
    return len(samples)


def content_hash(sample):
    """SHA-1 of a sample's traffic: the same traffic at another time or in another episode is a duplicate."""
    content = {key: value for key, value in sample.items() if key not in ("episode", "time")}
    return hashlib.sha1(json.dumps(content).encode()).hexdigest()


def _samples(env, cfg, controller, seed, episode, count, rng):
    """Yield up to `count` samples, evenly spread over the episode."""
    length = cfg.data.history + cfg.data.future
    steps = int(cfg.env.horizon_s / cfg.env.control_interval)
    wanted = np.linspace(length, steps, count).astype(int)
    frames, taken = deque(maxlen=length), 0
    observation, _ = env.reset(seed=seed)
    for step in range(1, steps + 1):
        around = observation["surround"][[env.slots.slot_of[name] for name in env.ids]]
        frames.append((env.ids, env.scene, observation["globals"], env.k, env.time, around))
        while taken < count and step >= wanted[taken] and len(frames) == length:
            sample = cut_sample(frames, cfg.data, env.road.extent, rng)
            if sample is None:  # too few vehicles yet: made up for at the next steps
                break
            taken += 1
            yield {"episode": episode, **sample}
        command = controller(observation, cfg.env.max_commands, rng)
        observation, _, _, truncated, _ = env.command(*command)
        if truncated:
            return


def cut_sample(frames, data, extent, rng):
    """One sample from T + H frames: the vehicles nearest to a random one at the last step of history.

    frames: [(ids, SCENE array, globals, k, time, surroundings)]; returns a dictionary of plain lists, or None if the
    road is empty.
    """
    low, high = data.vehicles
    ids, scene = frames[data.history - 1][:2]
    if len(ids) < low:
        return None
    focus = rng.integers(len(ids))
    distance = np.hypot(scene["x"] - scene["x"][focus], scene["y"] - scene["y"][focus])
    members = [ids[i] for i in np.argsort(distance, kind="stable")[:rng.integers(low, high + 1)]]
    sample = {"extent": extent, "k": [f[3] for f in frames], "time": [f[4] for f in frames],
              "globals": [np.round(f[2].astype(float), 5).tolist() for f in frames],
              "ids": [name.decode() for name in members],
              **{name: [] for name in ("present", "lead", "surround", *FIELDS)}}
    for frame_ids, frame_scene, *_, around in frames:
        place = {name: i for i, name in enumerate(frame_ids)}
        rows = [place.get(name, -1) for name in members]
        inside = {row: n for n, row in enumerate(rows) if row >= 0}
        sample["present"].append([int(row >= 0) for row in rows])
        sample["lead"].append([_leader(frame_scene, row, inside) for row in rows])
        values = np.append(np.round(around.astype(float), 2), np.zeros((1, around.shape[1])), 0)
        sample["surround"].append(values[rows].tolist())
        for name in FIELDS:
            values = frame_scene[name].astype(float).tolist()
            sample[name].append([round(values[row], 4) if row >= 0 else 0 for row in rows])
    return sample


def _leader(scene, row, inside):
    if row < 0 or scene["lead"][row] < 0:
        return NO_LEADER
    return inside.get(int(scene["lead"][row]), LEADER_OUTSIDE)


def _write_metadata(cfg, folder, plan):
    chunks = []
    for episode, _, _, _, count in plan:
        for name in chunk_names(episode, count, cfg.data.samples_per_chunk):
            content = read_json(folder / name, "a raw chunk")
            chunks.append({"file": name, "sha256": file_hash(folder / name), "hashes": content["hashes"],
                           **{key: content[key] for key in ("episode", "seed", "controller", "demand_scale")}})
    # The golden ratio spreads the held-out episodes over all controllers and demands, whatever their number.
    spread = sorted(range(len(plan)), key=lambda e: e * 0.6180339887 % 1)
    held_out = sorted(spread[:min(max(round(cfg.data.held_out * len(plan)), 1), max(len(plan) - 1, 1))])
    write_atomically(folder / "metadata.json", json.dumps(
        {"sumo_version": version("eclipse-sumo"), "scenario": cfg.env.scenario, "held_out_episodes": held_out,
         "settings": data_settings(cfg), "chunks": chunks}, indent=1))


def _start_worker():
    import signal
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def main(arguments=None):
    from configs.command_line import parse
    try:
        cfg = parse(__doc__, arguments).config
        collect(cfg)
    except (ConfigError, DataError, SumoError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; finished episodes are kept and the same command continues", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
