"""Does the world model predict SUMO's traffic better than simple rules?

    python -m benchmarks.world_model --seeds 1-3 --json world_model.json --plot world_model.png

Trains phase 1 once per seed in runs/<name>-seed<N> (what is finished is not repeated). With `data.seed` set, all seeds
share one data set and differ in first weights, order and augmentation only; otherwise each records traffic of its own
in <data.folder>-seed<N>. Then it follows held-out episodes of whole scenes, as the controller does, and compares
predictions 1 and H control steps ahead with three rules, none of which drives backwards: "constant velocity", "constant
acceleration" (that of the last control interval), and IDM (Treiber et al. 2000) rolled forward for all vehicles at
once, each behind its true leader along its route, with the parameters that fit other episodes of the first scene best.
"""
import copy
import importlib.util
import sys
from pathlib import Path

import numpy as np
import torch

from benchmarks import phases
from benchmarks.arguments import at_least, positive, some_of, writable
from benchmarks.prediction import (LEAD_GAP, LEAD_SPEED, calibration_error, constant_acceleration, errors, fit_idm, idm,
                                   pool, reliability, roc_area)
from benchmarks.report import finish
from configs import ConfigError, load_config
from configs.command_line import parse
from env.baselines import BASELINES, make_baseline
from env.graph import time_to_collision
from env.launch import SumoError
from env.networks import NETWORKS
from env.traffic_env import make_env
from evaluate import parse_seeds
from models import objectives
from models.policy import TrafficModel
from models.risk_gnn import INPUTS, SPEED
from runtime import checkpoint
from runtime.ending import run_script
from runtime.scores import mean_ci
from runtime.training import schema

SCENES = "corridor:1.0,corridor:0.7,corridor:1.2,merge:1.0,bottleneck:1.0"
SEEDS, FIT_SEEDS = 3001, 9001  # first seeds of the episodes to predict, and to fit IDM's parameters on
DENSE_GAP = 50.0               # m; who has a leader nearer than this is in dense traffic
FIELDS = (*INPUTS, "fresh", "moved", "conflict")


# ---- traffic -----------------------------------------------------------------------------------------------------

def record(cfg, scene, controller, seed, folder):
    """One episode of `scene` ("scenario:demand scale") as tensors [F, N, ...] of the observations, and two of shape
    [F, N]: `lead`, the slot of the leader (-1 = none), and `position` along the road, m."""
    cfg, (scenario, _, scale), frames = copy.deepcopy(cfg), scene.rpartition(":"), []
    cfg.env.scenario, cfg.env.demand_scale = scenario, cfg.env.demand_scale * float(scale)
    cfg.env.terminate_on_collision, cfg.env.speed_mode = False, 31  # as in data.collect
    env, rng, drive = make_env(cfg, folder), np.random.default_rng(seed), make_baseline(controller, cfg)
    try:
        observation, _ = env.reset(seed=seed)
        for _ in range(cfg.env.episode_steps):
            lead, slot = np.full(cfg.env.max_vehicles, -1), np.array([env.slots.slot_of[i] for i in env.ids], int)
            position, lead[slot] = np.zeros(len(lead), np.float32), np.append(slot, -1)[env.scene["lead"]]
            position[slot] = env.scene["position"]
            frames.append({"lead": lead, "position": position, **{name: observation[name] for name in FIELDS}})
            observation, *_ = env.command(*drive(observation, cfg.env.max_commands, rng))
    finally:
        env.close()
    used = max(int(np.flatnonzero(f["mask"]).max(initial=0)) for f in frames) + 1
    episode = {name: torch.from_numpy(np.stack([f[name][:used] for f in frames])) for name in frames[0]}
    return {name: x.bool() if x.dtype == torch.int8 else x for name, x in episode.items()}


def with_truth(episode, interval, horizon):
    """The episode without its last H frames, with what happened: states [F, N, H, 2], valid [F, N, H], conflict and
    conflict_known [F, N] within the horizon; and accel (of the last interval) and dense [F, N]."""
    e, speed = dict(episode), episode["nodes"][..., SPEED]
    series = [x[None] for x in (e["moved"], speed, e["mask"], e["fresh"], e["conflict"])]
    e["states"], e["valid"], steps = (x[0] for x in objectives.motion_targets(*series, horizon))
    conflict, known = objectives.within_horizon(steps, e["valid"])
    e["conflict"], e["conflict_known"] = conflict[..., -1] > 0, known[..., -1]
    change = torch.cat([torch.zeros_like(speed[:1]), speed[1:] - speed[:-1]]) / interval
    e["speed"], e["accel"] = speed, torch.where(e["fresh"], 0.0, change)
    e["dense"] = (e["lead"] >= 0) & (e["surround"][..., LEAD_GAP] < DENSE_GAP)
    return {name: x[:len(e["states"])] for name, x in e.items()}


# ---- model -------------------------------------------------------------------------------------------------------

def train(options, seed):
    """Phase 1 with one seed (or what is left of it); returns its model."""
    cfg = options.config
    own = [f"run.name={cfg.run.name}-seed{seed}", f"run.seed={seed}"]
    own += [] if cfg.data.seed else [f"data.folder={cfg.data.folder}-seed{seed}"]
    words = ["--config", options.config_file, *options.overrides, *own]
    phases.train(cfg, f"phase 1 of seed {seed}", "train_ddp.py", "--phase", "1", *words)
    cfg = load_config(options.config_file, words[2:])
    folder, model = Path(cfg.run.folder) / cfg.run.name / "phase1", TrafficModel(cfg)
    checkpoint.load_weights(model, checkpoint.load(folder, "best")["weights"], schema(cfg), folder)
    return model.eval()


def predict(model, episode, chunk=32):
    """Frame after frame with memory: (states [F, N, H, 2], probability [F, N] of a conflict within the horizon)."""
    world = model.world_model
    with torch.no_grad():
        chunks = zip(*(episode[name].split(chunk) for name in INPUTS))
        embedding = torch.cat([model.risk_gnn(*parts) for parts in chunks])
        start = world.initial_state(1, embedding.shape[1])
        flow, risk = world.latents(world.sequence(embedding[None], start, episode["fresh"][None])[0])
        return world.predict_states(flow, episode["speed"]), world.predict_conflict(risk)[..., -1].sigmoid()


# ---- comparison --------------------------------------------------------------------------------------------------

def judge(episodes, predict_one):
    """(errors in dense traffic and of all vehicles, and facts of the conflict score; score and label of each vehicle
    and frame) of `predict_one(episode)` -> (states, score of a conflict)."""
    results = [predict_one(e) for e in episodes]
    row = pool([errors(states, e, e["dense"]) for (states, _), e in zip(results, episodes)])
    every = pool([errors(states, e, e["mask"]) for (states, _), e in zip(results, episodes)])
    score, label = (np.concatenate([x[e["conflict_known"]].numpy() for x, e in zip(xs, episodes)])
                    for xs in ([score for _, score in results], [e["conflict"] for e in episodes]))
    row.update({f"all_{name}": value for name, value in every.items()}, auc=roc_area(score, label),
               calibration_error=calibration_error(score, label), conflict_rate=float(label.mean()))
    return row, (score, label)


def rules(p, interval, horizon):
    """{name: function of an episode} of the rules; the score of a conflict is the present time to collision."""
    def rule(predict_states):
        return lambda e: (predict_states(e), -torch.from_numpy(time_to_collision(*(x.numpy() for x in (
            e["surround"][..., LEAD_GAP], e["speed"], e["surround"][..., LEAD_SPEED])))))
    steady = lambda e, accel: constant_acceleration(e["speed"], accel, interval, horizon)  # noqa: E731
    return {"velocity": rule(lambda e: steady(e, 0 * e["accel"])), "accel": rule(lambda e: steady(e, e["accel"])),
            "idm": rule(lambda e: idm(e, p, interval, horizon))}


def table(scene, rows, models, horizon):
    """Print one scene; returns its facts for the JSON file."""
    scores, labels = (np.concatenate(x) for x in zip(*(scored for _, scored in models)))
    models = [row for row, _ in models]
    facts = {"rules": {name: row for name, (row, _) in rows.items()}, "reliability": reliability(scores, labels),
             "model": {name: mean_ci([m[name] for m in models]) for name in models[0]}, "seeds": models}
    rows = facts["rules"]
    for name in ("position_1", "speed_1", f"position_{horizon}", f"speed_{horizon}"):
        simple = min(rows["velocity"][name], rows["accel"][name])
        mean, spread = facts["model"][name]["mean"], facts["model"][name]["ci95"] or float("nan")
        print(f"{scene:16s}{name:12s}" + "".join(f"{rows[rule][name]:10.3f}" for rule in rows)
              + f"{mean:10.3f} +- {spread:5.3f}{mean / simple - 1:+12.0%}{mean / rows['idm'][name] - 1:+9.0%}")
    auc, error = facts["model"]["auc"], facts["model"]["calibration_error"]
    print(f"{scene:16s}conflicts ({models[0]['conflict_rate']:.2%}): area under ROC {auc['mean']:.3f} +- "
          f"{auc['ci95'] or float('nan'):.3f}, of the present TTC {rows['velocity']['auc']:.3f}; calibration error "
          f"{error['mean']:.4f}")
    return facts


def scenes_of(text):
    """An argparse type: built-in scenarios and the scale of their demand, scenario:scale, ... as they were typed."""
    for part in text.split(","):
        name, _, scale = part.partition(":")
        some_of(NETWORKS)(name), positive(scale)
    return text


def main():
    def add(parser):
        parser.set_defaults(config="configs/world_model.yaml")
        parser.add_argument("--seeds", default="1-3", help="training seeds")
        parser.add_argument("--scenes", type=scenes_of, default=SCENES,
                            help="scenario:demand scale, ...; IDM is fitted to the first")
        parser.add_argument("--controllers", type=some_of(BASELINES), default="none",
                            help="who drives the ICVs, in turn by episode")
        parser.add_argument("--episodes", type=at_least(1), default=3, help="held-out episodes of each scene")
        parser.add_argument("--json", type=writable, default="world_model.json", help="where the result goes")
        parser.add_argument("--plot", type=writable, help="draw the result here, FILE.png; needs matplotlib")
    options = parse(__doc__, add=add)
    cfg, controllers = options.config, options.controllers.split(",")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install -e '.[viz]'")
    torch.set_num_threads(1)
    models = [train(options, seed) for seed in parse_seeds(options.seeds)]
    interval, horizon = cfg.env.control_interval, cfg.data.future
    folder = str(Path(cfg.run.folder) / cfg.run.name / "scenario")

    def episodes(scene, first):
        return [with_truth(record(cfg, scene, controllers[i % len(controllers)], first + i, folder), interval, horizon)
                for i in range(options.episodes)]
    scenes = options.scenes.split(",")
    p = fit_idm(episodes(scenes[0], FIT_SEEDS), interval, horizon)
    print(f"IDM fitted to {scenes[0]}: {', '.join(f'{n}={x:.2f}' for n, x in p.items())}\n"
          f"RMSE in dense traffic (leader nearer than {DENSE_GAP:g} m), m and m/s, 1 and H={horizon} steps ahead;"
          f" model: mean and 95 % interval of {len(models)} training seeds\n{'':28s}{'velocity':>10s}{'accel':>10s}"
          f"{'idm':>10s}{'model':>10s}{'':9s}{'vs simple':>12s}{'vs idm':>9s}")
    result, shown = {"idm": p, "training_seeds": options.seeds, "controllers": controllers, "scenes": {}}, None
    for scene in scenes:
        held_out = episodes(scene, SEEDS)
        rows = {name: judge(held_out, rule) for name, rule in rules(p, interval, horizon).items()}
        own = [judge(held_out, lambda e, m=model: predict(m, e)) for model in models]
        result["scenes"][scene] = table(scene, rows, own, horizon)
        shown = shown or held_out[0]
    finish(options.json, **result)
    if options.plot:
        from benchmarks.prediction_plots import draw
        draw(options.plot, result, interval, shown, predict(models[0], shown)[0])
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main, (ConfigError, SumoError)))
