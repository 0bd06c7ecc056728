"""The rows of scored episodes against the same episodes driven by the stock client, sub-step by sub-step."""
import numpy as np
import pytest

from env.baselines import make_baseline
from env.sumo import Sumo
from env.wire import Accelerate, ChangeLane

STEPS, WARMUP = 60, 40
ACROSS = ('<vehicle id="stands" depart="0"><route edges="A0B0 B0C0"/><stop lane="B0C0_0" endPos="8" duration="200"/>'
          '</vehicle><flow id="f" begin="10" end="90" period="20"><route edges="A0B0 B0C0"/></flow>')
COUNTED = ("departed", "loaded", "arrived", "teleports", "collisions")


def record(env, rule):
    """(row of an episode of `rule`, what SUMO was told in it: [(until when, commands)], sum of |acceleration|)."""
    rng, told, wanted, rule = np.random.default_rng(1), [], 0.0, make_baseline(rule, env.cfg)

    class Noted(Sumo):
        """Sumo that notes what it is told."""

        def step(self, until, commands=()):
            told.append((until, list(commands)))
            super().step(until, commands)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("env.sumo.Sumo", Noted)
        observation, _ = env.reset(seed=1)
        for _ in range(STEPS):
            slot, accel, *rest = rule(observation, env.env_cfg.max_commands, rng)
            observation, *_ = env.command(slot, accel, *rest)
            wanted += np.abs(accel[slot < env.env_cfg.max_vehicles]).sum()
    return env.totals.summary(), told, wanted


def tell(vehicle, command):
    """Send one command with the stock client; whether it is a change of lanes."""
    name = command.vehicle.decode()
    if isinstance(command, Accelerate):
        vehicle.setAcceleration(name, command.acceleration, command.duration)
    elif isinstance(command, ChangeLane):
        vehicle.changeLane(name, command.lane, command.duration)
    else:
        vehicle.setSpeedMode(name, command.speed_mode)
        vehicle.setLaneChangeMode(name, command.lane_change_mode)
    return isinstance(command, ChangeLane)


def time_to_collision(vehicle, name):
    """With the leader that SUMO itself sees within 200 m; 20 s where there is none, or nothing closes."""
    leader, gap = vehicle.getLeader(name, 200.0) or ("", 0.0)
    closing = vehicle.getSpeed(name) - vehicle.getSpeed(leader) if leader else 0.0
    return min(max(gap + vehicle.getMinGap(name), 0.0) / closing, 20.0) if closing > 0.1 else 20.0


def replay(client, told, wanted, is_icv):
    """The row of the episode, worked out in loops."""
    vehicle, simulation, colliding, aloft = client.vehicle, client.simulation, set(), set()
    row, changes = dict.fromkeys(COUNTED, 0), 0
    for number, (until, commands) in enumerate(told):
        if number == WARMUP:
            row.update(collisions=0)
            sigma, abs_a, mean_speed, icvs, ttc = [], [], [], [], []
        changes += sum([tell(vehicle, command) for command in commands])
        while simulation.getTime() < until - 1e-6:
            client.simulationStep()
            now = {(one.collider, one.victim) for one in simulation.getCollisions()}
            row["collisions"], colliding = row["collisions"] + len(now - colliding), now
            row["teleports"] += len(simulation.getStartingTeleportIDList())
            aloft = aloft.union(simulation.getStartingTeleportIDList()).difference(simulation.getEndingTeleportIDList())
            row["departed"] += len(simulation.getDepartedIDList())
            row["arrived"] += len(set(simulation.getArrivedIDList()) - aloft)
        if number >= WARMUP:
            names = [name for name in vehicle.getIDList() if vehicle.getLaneID(name)]
            sigma.append(np.std([vehicle.getSpeed(name) for name in names]))
            mean_speed.append(np.mean([vehicle.getSpeed(name) for name in names]))
            abs_a.append(np.mean([abs(vehicle.getAcceleration(name)) for name in names]))
            ttc += [time_to_collision(vehicle, name) for name in names]
            icvs.append(sum(is_icv(name.encode()) for name in names))
    row["loaded"] = row["departed"] + len(simulation.getPendingVehicles())
    return {**row, "sigma_v": np.mean(sigma), "abs_a": np.mean(abs_a), "mean_speed": np.mean(mean_speed),
            "min_ttc": min(ttc), "icvs": np.mean(icvs), "c_int": (wanted + 5 * changes) / sum(icvs)}


@pytest.mark.parametrize("scenario, rule, shield, teleport_s, happens", [
    ("corridor", "random", False, 3.0, ("collisions", "teleports", "c_int")), ("bottleneck", "none", True, 300.0, ()),
    ("no junction lanes", "none", True, 300.0, ())])
def test_a_row_equals_a_replay_with_the_stock_client(make, grid, scenario, rule, shield, teleport_s, happens):
    """In the zipper of a bottleneck min_ttc was 0 s of cars beside each other, where SUMO's own leaders have 1.8. Where
    a network has no junction lanes, it left out who stands behind a junction, farther away than by SUMO's metres."""
    if scenario == "no junction lanes":
        scenario = grid(ACROSS, more='<no-internal-links value="true"/>')
    env = make(scenario=scenario, warmup_s=float(WARMUP), icv_share=0.6, max_commands=20, teleport_s=teleport_s)
    env.cfg.shield.enabled, env.cfg.bottleneck.flow, env.cfg.corridor.ramp_flow = shield, 3000.0, 1500.0
    row, told, wanted = record(env, rule)
    other = Sumo(env.arguments(1))
    try:
        expected = replay(other.client, told, wanted, env.slots.is_icv)
    finally:
        other.close()
    seen = ("min_ttc",) if not happens else ()  # those who collide are too near for SUMO's leaders
    for name in (*COUNTED, "sigma_v", "abs_a", "mean_speed", "icvs", "c_int", *seen):
        assert row[name] == pytest.approx(expected[name], rel=1e-9), name
    assert all(row[name] > 0 for name in happens), row
