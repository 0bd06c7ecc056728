"""The gymnasium environment: one episode of traffic, a graph as observation, commands to at most K ICVs as action."""
import tempfile

import gymnasium
import numpy as np

from env import graph, sumo
from env.launch import SumoError
from env.road import Road, Traffic
from env.scenarios import build_scenario
from env.score import EpisodeTotals
from env.slots import Slots
from env.spaces import ACCEL_HIGH, ACCEL_LOW, KEEP, LEFT, MAX_BRAKE, RIGHT, SPEED, action_space, observation_space


class TrafficEnv(gymnasium.Env):
    """Mixed traffic on one SUMO process.

    `cfg` is a configs.Config; `folder` is where built-in scenarios are generated (a temporary one by default). SUMO
    starts with the first `reset`. Collisions are `terminated`, the time limit is `truncated`. `info["cost"]` is the
    intervention cost of the step, on what was commanded: (sum |a| + 5 * lane changes) / ICVs present;
    `info["executed"]` says what SUMO made of it.
    """
    metadata = {"render_modes": []}

    def __init__(self, cfg, folder=None):
        self.cfg, self.env_cfg = cfg, cfg.env
        self._own_folder = None if folder else tempfile.TemporaryDirectory(prefix="mixed-autonomy-")
        self.folder = folder or self._own_folder.name
        self.observation_space = observation_space(cfg.env.max_vehicles, cfg.graph.k_max)
        self.action_space = action_space(cfg.env.max_vehicles, cfg.env.max_commands)
        self.simulator, self.road, self.scenario = None, None, None
        self.seed, self.episodes = 0, 0

    # ---- gymnasium's interface ---------------------------------------------------------------------------------

    def reset(self, *, seed=None, options=None):
        """Begin an episode. With `seed` the traffic, the choice of ICVs and so the whole episode are determined."""
        super().reset(seed=seed)
        self.seed = int(self.np_random.integers(2 ** 31 - 1)) if seed is None else int(seed) % (2 ** 31 - 1)
        self._start_traffic()
        n = self.env_cfg.max_vehicles
        self.slots, self.known = Slots(n, self.seed, self.env_cfg.icv_share), {}
        self.odometer, self.allowed, self.driven = np.zeros(n), np.zeros(n), set()
        self.route_index, self.routes = {}, [-1, -1]
        self.time = self.begin = self.simulator.client.simulation.getTime()
        self.totals = EpisodeTotals(self.cfg.reward, self.env_cfg.control_interval, self.env_cfg.horizon_s)
        while self.time < self.begin + self.env_cfg.warmup_s - 1e-6:
            self._advance([])
        if self.env_cfg.warmup_s == 0:
            self._observe(first=True)
        self.totals.forget_averages()
        self.steps = 0
        return self.observation, self._info(0.0)

    def step(self, action):
        """Send the commands of `action_space`, simulate one control interval. Reward: see env/score.py."""
        accel = ACCEL_LOW + (np.asarray(action["accel"], float) + 1) * (ACCEL_HIGH - ACCEL_LOW) / 2
        return self.command(action["slot"], accel, action["lane"], np.asarray(action["brake"], float) * MAX_BRAKE)

    def command(self, slot, accel, lane, brake):
        """`step` in physical units: accel and brake in m/s^2, each argument of length K; accel NaN leaves the speed to
        SUMO's driver (lane advice only)."""
        was, (commands, cost) = self.observation, self._commands(slot, accel, lane, brake)
        self._advance(commands)
        self.steps += 1
        terminated = bool(self.env_cfg.terminate_on_collision and self.totals.collisions)
        truncated = not terminated and self.time >= self.begin + self.env_cfg.warmup_s + self.env_cfg.horizon_s - 1e-6
        info = {**self._info(cost), "executed": self._executed(was, slot)}
        if terminated or truncated:
            info["episode"] = self.totals.summary()
        return self.observation, self.totals.reward, terminated, truncated, info

    def _executed(self, was, slots):
        """{slot: acceleration that SUMO realised in the step, m/s^2} of the slots whose ICV is still there."""
        now = self.observation
        return {int(s): float(now["nodes"][s, SPEED] - was["nodes"][s, SPEED]) / self.env_cfg.control_interval
                for s in slots if 0 <= s < len(was["icv"]) and was["icv"][s] and now["mask"][s] and not now["fresh"][s]}

    def close(self):
        if self.simulator is not None:
            self.simulator.close()
            self.simulator = None
        if self._own_folder is not None:
            self._own_folder.cleanup()
            self._own_folder = None

    # ---- inside ------------------------------------------------------------------------------------------------

    def _arguments(self):
        e = self.env_cfg
        scale = [] if e.demand_scale == 1.0 else ["--scale", str(e.demand_scale)]
        return ["-c", self.scenario, *scale, "--seed", str(self.seed), "--step-length", str(e.step_length),
                "--no-step-log", "--no-warnings", "--xml-validation", "never", "--time-to-teleport", str(e.teleport_s),
                "--collision.action", "warn", "--collision.check-junctions", "--duration-log.disable"]

    def _start_traffic(self):
        if self.simulator is not None and (not self.simulator.alive
                                           or self.episodes % self.env_cfg.recycle_episodes == 0):
            self.simulator.close()
            self.simulator = None
        if self.simulator is None:
            self.scenario = self.scenario or build_scenario(self.cfg, self.folder)
            self.simulator = sumo.Sumo(self._arguments(), self.env_cfg.call_timeout_s, self.env_cfg.start_timeout_s)
            if self.road is None:
                self.road = Road.from_lanes(self.simulator.road_lanes(), self.cfg.graph.lookahead_m + 50)
                self.lane_km = max(self.road.lane_length.sum() / 1000, 0.1)
        else:
            self.simulator.load(self._arguments())
        self.episodes += 1

    def _advance(self, commands):
        self.time = round(self.time + self.env_cfg.control_interval, 6)
        self.simulator.step(self.time, commands)
        self._observe()

    def _commands(self, slots, accels, lanes, brakes):
        """(packed commands, cost of the step). Commands to empty slots, human drivers or a slot twice are ignored."""
        e, commands, effort, seen, driven = self.env_cfg, [], 0.0, set(), set()
        for slot, accel, lane, brake in zip(slots, accels, lanes, brakes):
            slot = int(slot)
            if not 0 <= slot < e.max_vehicles or not self.slots.icv[slot] or slot in seen:
                continue
            seen.add(slot)
            name = self.slots.names[slot]
            if brake > 0 or not np.isnan(accel):
                accel = -min(float(brake), MAX_BRAKE) if brake > 0 else float(np.clip(accel, ACCEL_LOW, ACCEL_HIGH))
                if name not in self.driven:
                    commands += sumo.set_modes(name, e.speed_mode, e.lane_change_mode)
                commands.append(self._accelerate(slot, accel))
                driven.add(name)
                effort += abs(accel)
            target = self.lane_number[slot] + {LEFT: 1, KEEP: 0, RIGHT: -1}[int(lane)]
            if lane != KEEP and 0 <= target < self.lane_count[slot]:
                commands.append(sumo.change_lane(name, target, e.lane_change_hold_s))
                effort += 5.0
        for name in sorted(self.driven - driven):  # without its safe-speed check SUMO's driver ignores speed limits too
            commands += sumo.set_modes(name, sumo.ALL_CHECKS, sumo.OWN_LANE_CHANGES)
        self.driven = driven
        self.totals.intervention(effort, len(seen))
        return commands, effort / max(int(self.slots.icv.sum()), 1)

    def _accelerate(self, slot, accel):
        """The acceleration as SUMO is told it: not beyond the speed limit, which SUMO ignores without its safe-speed
        check; and braking only until the vehicle stands, because SUMO spreads a change of speed over the duration."""
        e, speed = self.env_cfg, float(self.observation["nodes"][slot, SPEED])
        accel = min(accel, max((self.allowed[slot] - speed) / e.control_interval, -1.0))
        stop = speed / -accel if accel < 0 else e.control_interval
        return sumo.accelerate(self.slots.names[slot], accel, min(e.control_interval, max(stop, e.step_length)))

    def _observe(self, first=False):
        """Read SUMO, update slots, build the observation and the totals."""
        ids, records, lanes, routes, events = self.simulator.read(self.time)
        if first:  # nothing has been simulated yet
            events = {**events, "departed": [], "arrived": []}
        lane = np.array([self.road.lane_index.get(name.decode(), -1) for name in lanes], int)
        routes = np.array(routes, object)
        # Vehicles that are being teleported are on no lane.
        ids, records, lane, routes = _keep(np.flatnonzero(lane >= 0), ids, records, lane, routes)
        slots, fresh = self.slots.assign(ids)
        self.driven &= self.slots.slot_of.keys()
        seen = np.flatnonzero(slots >= 0)  # beyond max_vehicles nobody is seen or commanded, only counted
        overflow = len(ids) - len(seen)
        ids, records, lane, routes, slots, fresh = _keep(seen, ids, records, lane, routes, slots, fresh)
        self._learn_routes(ids, routes)
        scene, surround = self._scene(ids, records, lane, slots)
        moved = np.where(fresh, 0.0, records["odometer"] - self.odometer[slots])
        self.odometer[slots], self.allowed[slots] = records["odometer"], records["allowed"]
        self.totals.step(scene, moved, self.route_length, events, overflow)
        counts = {"waiting": max(self.totals.loaded - self.totals.departed, 0), "departed": len(events["departed"]),
                  "arrived": len(events["arrived"]), "ocr": self.totals.ocr}
        k = graph.adaptive_k(len(scene), self.cfg.graph.k_min, self.cfg.graph.k_divisor, self.cfg.graph.k_max)
        near, edges = graph.neighbour_graph(scene, k, self.cfg.graph.radius_m)
        self.scene, self.ids, self.k = scene, ids, k
        self._fill(slots, near, edges, surround, moved, fresh, graph.global_features(scene, counts, self.lane_km))

    def _fill(self, slots, near, edges, surround, moved, fresh, globals_):
        """Scatter the compact graph into the slots of a new observation."""
        n, k_max = self.env_cfg.max_vehicles, self.cfg.graph.k_max
        observation = {name: np.zeros(space.shape, space.dtype) for name, space in self.observation_space.items()}
        observation["neighbours"] -= 1
        extended = np.append(slots, -1)  # neighbour -1 stays -1
        observation["nodes"][slots] = graph.node_features(self.scene, self.road.extent, self.time)
        observation["neighbours"][slots, :near.shape[1]] = extended[near][:, :k_max]
        observation["edges"][slots, :near.shape[1]] = edges[:, :k_max]
        observation["surround"][slots], observation["moved"][slots] = surround, moved
        observation["mask"][slots], observation["fresh"][slots] = 1, fresh
        observation["icv"][slots], observation["conflict"][slots] = self.slots.icv[slots], graph.conflicts(self.scene)
        observation["globals"][:] = globals_
        self.lane_number, self.lane_count = np.zeros(n, int), np.zeros(n, int)
        self.lane_number[slots] = self.scene["lane"]
        self.lane_count[slots] = (self.road.edge_lanes[self.road.lane_edge[self.lane]] >= 0).sum(1)
        self.observation = observation

    def _scene(self, ids, records, lane, slots):
        """(SCENE array, surround features) of the vehicles that have slots."""
        road, scene = self.road, np.zeros(len(ids), graph.SCENE)
        route, length, route_m = np.array([self.known[i][1:] for i in ids]).reshape(-1, 3).T
        self.lane, self.route_length = lane, route_m
        for name in ("angle", "speed", "accel", "odometer"):
            scene[name] = records[name]
        scene["x"], scene["y"] = records["xy"][:, 0], records["xy"][:, 1]
        scene["lane"], scene["length"], scene["icv"] = road.lane_number[lane], length, self.slots.icv[slots]
        scene["position"] = road.coordinate[lane] + records["pos"]
        scene["lane_end"] = road.lane_length[lane] - records["pos"]
        scene["progress"] = records["odometer"] / route_m
        traffic = Traffic(road, lane, records["pos"].astype(float), scene["speed"], length,
                          route.astype(int) + records["route_index"], np.array(self.routes), self.cfg.graph.lookahead_m)
        return scene, graph.surround_features(traffic, scene)

    def _learn_routes(self, ids, routes):
        """Ask once for what does not change: `known[id]` = (route id, place in `routes`, length m, route m). A vehicle
        that is sent another way gets another route id."""
        news = [(name, route) for name, route in zip(ids, routes) if self.known.get(name, ("",))[0] != route]
        names = [name for name, _ in news]
        answers = self.simulator.get([(v, name) for name in names for v in (sumo.tc.VAR_EDGES, sumo.tc.VAR_LENGTH)])
        for (name, route), edges, length in zip(news, answers[::2], answers[1::2]):
            edges = tuple(edges or ())
            if edges not in self.route_index:
                numbers = [self.road.edge_index[e.decode()] for e in edges]
                metres = self.road.lane_length[self.road.edge_lanes[numbers, 0]].sum() if numbers else 1.0
                self.route_index[edges] = (len(self.routes), max(float(metres), 1.0))
                self.routes += numbers + [-1, -1]
            start, metres = self.route_index[edges]
            self.known[name] = (route, start, float(length or 5.0), metres)

    def _info(self, cost):
        return {"cost": float(cost), "time": self.time, "seed": self.seed, **self.totals.step_facts()}


def _keep(rows, ids, *arrays):
    """The given rows of a list and of arrays."""
    return [ids[i] for i in rows], *(array[rows] for array in arrays)


def make_env(cfg, folder=None):
    """The environment of a configuration; importable and constructible without SUMO, which `reset` starts."""
    return TrafficEnv(cfg, folder)


def check_scenario(cfg, folder):
    """Start the scenario once and end it: raises SumoError, with SUMO's own words, before anything else begins."""
    env = make_env(cfg, str(folder))
    try:
        env.reset(seed=cfg.run.seed)
    except SumoError as error:
        raise SumoError(f"scenario {cfg.env.scenario}: {error}") from None
    finally:
        env.close()
