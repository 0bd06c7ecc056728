"""The gymnasium environment: one episode of traffic, a graph as observation, commands to at most K ICVs as action."""
import tempfile
import time

import gymnasium
import numpy as np

from env import graph, sumo
from env.launch import SumoError
from env.orders import Orders
from env.road import Road, Traffic
from env.routes import Routes
from env.scenarios import build_scenario, check_traffic
from env.score import EpisodeTotals
from env.slots import Odometer, Slots, keep
from env.spaces import (ACCEL_HIGH, ACCEL_LOW, LANE_CHANGE, LEFT, MAX_BRAKE, RIGHT, action_space, observation_space,
                        speed_change, write_observation)
from env.tails import came_from, unforeseen


class TrafficEnv(gymnasium.Env):
    """Mixed traffic on one SUMO process.

    `cfg` is a configs.Config; `folder` is where built-in scenarios are generated (a temporary one by default). SUMO
    starts with the first `reset`. With n variants in `env.suite`, an episode is variant number seed % n. Collisions are
    `terminated`, the time limit is `truncated`. `info["cost"]` is the intervention cost of the step, on what was
    commanded: (sum |a| + 5 * lane changes) / ICVs present, where a lane change that still stands is neither sent nor
    counted again; `info["executed"]` says what SUMO made of it, `info["summary"]` of the last step holds the totals.
    """

    def __init__(self, cfg=None, folder=None, render_mode=None):  # nothing is drawn: of any mode gymnasium warns
        if not hasattr(cfg, "env"):
            raise TypeError(f"cfg={cfg!r}: the environment needs a configuration, for example gymnasium.make("
                            "'mixed_autonomy/Traffic-v0', cfg=configs.load_config('configs/quick.yaml'))")
        self.cfg, self.env_cfg, self.variants = cfg, cfg.env, cfg.variants()
        self._own_folder = None if folder else tempfile.TemporaryDirectory(prefix="mixed-autonomy-")
        self.folder = folder or self._own_folder.name
        self.observation_space = observation_space(cfg.env.max_vehicles, cfg.graph.k_max)
        self.action_space = action_space(cfg.env.max_vehicles, cfg.env.max_commands)
        self.simulator, self.observation, self.built, self.roads = None, {}, {}, {}  # by variant, by scenario
        self.seed, self.episodes, self.seconds = 0, 0, np.zeros(3)  # s of the last step: SUMO, reading it, building

    # ---- gymnasium's interface ---------------------------------------------------------------------------------

    def reset(self, *, seed=None, options=None):
        """Begin an episode. With `seed` the traffic, the choice of ICVs and so the whole episode are determined."""
        super().reset(seed=seed)
        self.seed = int(self.np_random.integers(2 ** 31 - 1)) if seed is None else int(seed) % (2 ** 31 - 1)
        self._start_traffic()
        n = self.env_cfg.max_vehicles
        self.slots, self.routes = Slots(n, self.seed, self.env_cfg.icv_share), Routes(self.road, self.cfg)
        self.speed, self.allowed, self.way, self.length = np.zeros((4, n))  # way: to the lane's end
        self.lane_at, self.came = np.zeros(n, int), np.full(n, -1)  # now, and last on another edge
        self.route_at, self.orders, self.odometer = np.zeros(n, int), Orders(self.road, self.cfg), Odometer(n)
        self.steps, self.driven, self.checked = 0, {}, np.zeros(n, int)  # modes of commanded ICVs; bits added, by slot
        self.time = begin = self.simulator.time()
        self.totals = EpisodeTotals(self.cfg.reward, self.env_cfg.control_interval, self.env_cfg.horizon_s)
        while self.time < begin + self.env_cfg.warmup_s - 1e-6:
            self._advance([])
        if self.env_cfg.warmup_s == 0:
            self._observe(first=True)
        self.observation["fresh"][:] = self.observation["mask"]  # after a warm-up too, all are new to the reader
        self.totals.forget_averages()
        return self.observation, self._info(0.0)

    def step(self, action):
        """Send the commands of `action_space`, simulate one control interval. Reward: see env/score.py."""
        accel = ACCEL_LOW + (np.asarray(action["accel"], float) + 1) * (ACCEL_HIGH - ACCEL_LOW) / 2
        return self.command(action["slot"], accel, action["lane"], np.asarray(action["brake"], float) * MAX_BRAKE)

    def command(self, slot, accel, lane, brake, out=None):
        """`step` in physical units: accel and brake in m/s^2, each argument of length K; accel NaN leaves the speed to
        SUMO's driver (lane advice only). `out`: arrays to write the observation into."""
        if self.simulator is None:
            raise gymnasium.error.ResetNeeded("the environment is closed or was never reset: call reset() first")
        was = {s: (self.slots.names[s], self.speed[s]) for s in map(int, slot) if 0 <= s < len(self.speed)}
        commands, cost = self._commands(slot, accel, lane, brake)
        self._advance(commands, out)
        self.steps += 1
        terminated = bool(self.env_cfg.terminate_on_collision and self.totals.collisions)
        truncated = not terminated and self.steps >= self.env_cfg.episode_steps
        info = {**self._info(cost), "executed": self._executed(was)}
        if terminated or truncated:
            info["summary"] = self.totals.summary()
        return self.observation, self.totals.reward, terminated, truncated, info

    def _executed(self, was):
        """{slot: acceleration that SUMO realised in the step, m/s^2} of the slots whose ICV is still there."""
        return {slot: float(self.speed[slot] - speed) / self.env_cfg.control_interval
                for slot, (name, speed) in was.items() if self.slots.icv[slot] and self.slots.names[slot] == name}

    def close(self):
        """End SUMO and remove the environment's own folder; safe to call twice."""
        if self.simulator is not None:
            self.simulator.close()
            self.simulator = None
        if self._own_folder is not None:
            self._own_folder.cleanup()  # a later `reset` makes it anew
            self.built = {}

    # ---- inside ------------------------------------------------------------------------------------------------

    def arguments(self, seed):
        """SUMO's command line, without the binary, for an episode of the built scenario."""
        return sumo.episode_arguments(self.scenario, seed, self.env_cfg)

    def _start_traffic(self):
        which = self.seed % len(self.variants)
        self.cfg, self.env_cfg = self.variants[which], self.variants[which].env
        self.scenario = self.built[which] = self.built.get(which) or build_scenario(self.cfg, self.folder)
        if self.simulator is not None and (not self.simulator.alive
                                           or self.episodes % self.env_cfg.recycle_episodes == 0):
            self.simulator.close()
            self.simulator = None
        if self.simulator is None:
            self.simulator = sumo.open_simulator(self.arguments(self.seed), self.env_cfg)
        else:
            self.simulator.load(self.arguments(self.seed))
        if self.scenario not in self.roads:
            self.roads[self.scenario] = Road(self.simulator.road_lanes(), self.cfg.graph.lookahead_m + 50,
                                             **self.simulator.special_lanes())
        self.road = self.roads[self.scenario]
        self.lane_km = max(self.road.lane_length.sum() / 1000, 0.1)
        self.lane_named = {name.encode(): index for name, index in self.road.lane_index.items()}
        self.episodes += 1

    def _advance(self, commands, out=None):
        self.time = round(self.time + self.env_cfg.control_interval, 6)
        start = time.perf_counter()
        self.simulator.step(self.time, commands)
        self.seconds[0] = time.perf_counter() - start
        self._observe(out)

    def _commands(self, slots, accels, lanes, brakes):
        """(packed commands, cost of the step). Ignored are commands to empty slots, human drivers, a slot twice, and to
        whom `routes.left_alone` names: others count on their going on as they are."""
        e, commands, effort, seen, driven = self.env_cfg, [], 0.0, set(), {}
        for slot, accel, lane, brake in zip(map(int, slots), accels, lanes, brakes, strict=True):
            if (not 0 <= slot < e.max_vehicles or not self.slots.icv[slot] or slot in seen
                    or self.routes.left_alone(slot, self.lane_at[slot], self.length[slot], self.way[slot])):
                continue
            name = self.slots.names[slot]
            seen.add(slot)
            if brake > 0 or not np.isnan(accel):
                wanted = -brake if brake > 0 else max(accel, ACCEL_LOW)
                accel = float(np.clip(wanted, -self.routes.hardest[slot], ACCEL_HIGH))
                driven[name] = e.speed_mode | int(self.checked[slot] | self.routes.bits(slot, accel))
                if self.driven.get(name) != driven[name]:
                    commands.append(sumo.SetModes(name, driven[name], e.lane_change_mode))
                commands.append(sumo.Accelerate(name, *speed_change(accel, self.speed[slot], self.allowed[slot],
                                                                    e.control_interval, e.step_length)))
                effort += abs(accel)
            side = {LEFT: 1, RIGHT: -1}.get(int(lane), 0)
            target = int(self.road.lane_number[self.lane_at[slot]]) + side
            if side and self._may_move(slot, target):
                commands.append(sumo.ChangeLane(name, target, round(self.orders.until[slot] - self.time, 6)))
                effort += LANE_CHANGE
        commands += [sumo.SetModes(name, sumo.ALL_CHECKS, sumo.OWN_LANE_CHANGES)  # or its driver ignores speed limits
                     for name in sorted(self.driven.keys() - driven) if name in self.present]
        self.driven = {**{name: mode for name, mode in self.driven.items() if name not in self.present}, **driven}
        self.totals.intervention(effort, len(seen))
        return commands, effort / max(int(self.slots.icv.sum()), 1)

    def _may_move(self, slot, number):
        """As Orders has it, and not where the shield leaves SUMO's check on: who then has to brake may be hit."""
        lane, following = self.lane_at[slot], self.routes.flat[self.route_at[slot] + 1]
        return (not self.checked[slot] and self.road.has_lane(lane, number, self.routes.kind[slot])
                and self.orders.give(slot, number, following, self.lane_at, self.way, self.speed, self.time))

    def _observe(self, out=None, first=False):
        """Read SUMO, update slots, build the observation and the totals."""
        start = time.perf_counter()
        ids, records, lanes, routes, events = self.simulator.read(self.time)
        read = time.perf_counter()
        events = {**events, **(dict.fromkeys(sumo.EVENTS, []) if first else {})}  # none yet
        self.present, lane = set(ids), np.array([self.lane_named.get(name, -1) for name in lanes], int)
        if (lane < 0).any():  # vehicles that are being teleported are on no lane
            ids, routes, records, lane = keep(np.flatnonzero(lane >= 0), ids, routes, records, lane)
        self.slots.forget(events["landed"])
        slots, fresh = self.slots.assign(ids)
        self.driven = {name: mode for name, mode in self.driven.items() if name not in events["arrived"]}
        if overflow := int((slots < 0).sum()):  # beyond max_vehicles nobody is seen or commanded, only counted
            ids, routes, records, lane, slots, fresh = keep(np.flatnonzero(slots >= 0), ids, routes, records, lane,
                                                            slots, fresh)
        self.routes.follow(self.simulator, ids, routes, slots, fresh, self.slots.icv[slots])
        self.ids, self.lane = ids, lane
        self._build(records, slots, fresh, events, overflow, out)
        self.seconds[1:] = read - start, time.perf_counter() - read

    def _build(self, records, slots, fresh, events, overflow, out):
        """Scene, totals and observation of the vehicles that have slots."""
        before, came = np.where(fresh, [self.lane, np.full_like(slots, -1)], [self.lane_at[slots], self.came[slots]])
        self.orders.forget(slots[fresh])
        self.came[slots] = came_from(self.road, came, before, self.lane, records["pos"] - records["length"])
        way = (self.speed[slots] + records["speed"]) / 2 * self.env_cfg.control_interval
        moved, odometer = self.odometer.read(records["odometer"].astype(float), slots, fresh, way,
                                             self.road.oncoming[self.lane] | self.road.oncoming[before])
        g, surround, scene = self.cfg.graph, self._set_scene(records, slots, odometer), self.scene
        self.lane_at[slots], self.way[slots] = self.lane, scene["lane_end"]
        self.speed[slots], self.length[slots], self.allowed[slots] = scene["speed"], scene["length"], records["allowed"]
        if self.cfg.shield.enabled:  # SUMO's check stays where it does not see who is to be met
            self.checked[slots] = sumo.SAFE_SPEED * unforeseen(
                self.road, self.lane, scene, events["stats.persons.running"], overflow, g.lookahead_m)
        self.totals.step(scene, moved, self.routes.metres[slots], events, overflow)
        counts = {"waiting": events["stats.vehicles.waiting"], "departed": len(events["departed"]),
                  "arrived": self.totals.arrivals, "ocr": self.totals.ocr}
        self.k = graph.adaptive_k(len(scene), g.k_min, g.k_divisor, g.k_max)
        near, edges = graph.neighbour_graph(scene, self.k, g.radius_m)
        rows = {"nodes": graph.node_features(scene, self.road.extent, self.time), "edges": edges[:, :g.k_max],
                "neighbours": np.append(slots, -1)[near[:, :g.k_max]],  # neighbour -1 stays -1
                "surround": surround, "moved": moved, "mask": np.ones(len(scene)), "fresh": fresh, "icv": scene["icv"],
                "conflict": graph.conflicts(scene)}
        self.observation = out or {name: np.empty(box.shape, box.dtype) for name, box in self.observation_space.items()}
        write_observation(self.observation, slots, rows, graph.global_features(scene, counts, self.lane_km))

    def _set_scene(self, records, slots, odometer):
        """Fill `scene`, a SCENE array; returns the surround features."""
        road, lane, pos = self.road, self.lane, records["pos"].astype(float)
        self.scene = scene = np.zeros(len(lane), graph.SCENE)
        for name in ("angle", "speed", "accel", "length"):
            scene[name] = records[name]
        scene["x"], scene["y"] = records["xy"].T
        scene["lane"], scene["icv"] = road.driving_number[lane], self.slots.icv[slots]
        scene["position"], scene["lane_end"] = road.coordinate[lane] + pos, road.lane_length[lane] - pos
        scene["odometer"], scene["progress"] = odometer, odometer / self.routes.on_edges[slots]
        self.route_at[slots] = self.routes.start[slots] + records["route_index"]
        return graph.surround_features(
            Traffic(road, lane, pos, scene["speed"], scene["length"], self.route_at[slots], self.routes.flat,
                    self.cfg.graph.lookahead_m, self.came[slots], self.routes.views(slots)), scene)

    def _info(self, cost):
        return {"cost": float(cost), "time": self.time, "seed": self.seed, **self.totals.step_facts()}


def make_env(cfg=None, folder=None):
    """The environment of a configs.Config; importable and constructible without SUMO, which `reset` starts."""
    return TrafficEnv(cfg, folder)


def check_scenario(cfg, folder):
    """Start each variant of the scenario once: raises SumoError, with SUMO's own words, before anything else begins."""
    env = make_env(cfg, str(folder))
    try:
        for variant in range(len(env.variants)):
            env.reset(seed=variant)
            check_traffic(env.env_cfg.scenario, env.arguments(variant), env.env_cfg.warmup_s + env.env_cfg.horizon_s)
    except SumoError as error:
        raise SumoError(f"scenario {env.env_cfg.scenario}: {error}") from None
    finally:
        env.close()
