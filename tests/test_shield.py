"""models/safety_shield.py: the safe speed, level 1 and level 2, lane vetoes, reasons, the learned risk head."""
import math
from dataclasses import replace

import pytest
import torch

from configs import Config
from models.controller import KEEP, LEFT, RIGHT, SURROUND_FEATURES
from models.presets import PRESETS
from models.safety_shield import (CLIPPED, EMERGENCY, LANE_VETO, NONE, REASONS, RISK, SafetyShield, safe_next_speed)

NAN = math.nan
LEFT_SIDE, RIGHT_SIDE, HAS_LEFT, HAS_RIGHT = 2, 6, 10, 11  # columns: a side's gap, speed, rear gap, rear speed


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tensors this small are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def shield(interval=1.0, **changes):
    torch.manual_seed(0)
    return SafetyShield(PRESETS["small"], replace(Config().shield, **changes), interval)


def around(gap=200.0, lead_speed=20.0, left=None, right=None):
    """[1, 14] surroundings; a side is (gap, speed, rear gap, rear speed), None = no such lane."""
    out = torch.zeros(1, SURROUND_FEATURES)
    out[0, 0], out[0, 1], out[0, 12] = gap, lead_speed, 500.0
    for side, column, flag in ((left, LEFT_SIDE, HAS_LEFT), (right, RIGHT_SIDE, HAS_RIGHT)):
        if side is not None:
            out[0, column:column + 4], out[0, flag] = torch.tensor(side), 1.0
    return out


def check(guard, accel, lane, speed, surround, risk=None):
    """One vehicle's command through the shield, as plain numbers: acceleration, lane, brake, reason."""
    risk = None if risk is None else torch.tensor([risk])
    out = guard(torch.tensor([float(accel)]), torch.tensor([lane]), torch.tensor([float(speed)]), surround, risk)
    return tuple(x.item() for x in out)


# ---- level 1: acceleration ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("interval, own, leader", [(1.0, 9.0, 9.0), (0.5, 4.5, 9.0), (1.0, 9.0, 4.5)])
def test_safe_speed_solves_its_equation(interval, own, leader):
    """The way of the interval at the mean speed, plus the way to stop, is the gap plus the leader's way to stop."""
    g = torch.Generator().manual_seed(0)
    gap, speed, lead = 40 * torch.rand(3, 5000, generator=g, dtype=torch.float64)
    gap = 4 * gap
    v = safe_next_speed(gap, speed, lead, interval, own, leader)
    used = (speed + v) / 2 * interval + v ** 2 / (2 * own)
    room = gap + lead ** 2 / (2 * leader)
    moving = v > 0
    torch.testing.assert_close(used[moving], room[moving])
    assert (used[~moving] >= room[~moving] - 1e-9).all()  # standing still at the end is not enough to fit
    assert moving.any() and (~moving).any()


@pytest.mark.parametrize("side", ["left", "right"])
def test_nobody_accelerates_at_who_may_cut_in(side):
    """With all ICVs at full throttle in a jam, a human driver moved over in front of an ICV that had just begun to
    accelerate for a second: 2.46 m between them, a collision in SUMO's count (2.5 m)."""
    guard = shield()
    beside = lambda gap, speed: around(9.88, 27.16, **{side: (gap, speed, 50.0, 0.0)})  # noqa: E731
    accel, *_, reason = check(guard, 2.0, KEEP, 0.472, beside(3.27, 0.156))
    way = 0.472 + accel / 2
    assert 0 <= accel < 1.0 and reason == CLIPPED and 3.27 - way + 0.156 ** 2 / 18 > 2.5
    assert check(guard, 2.0, KEEP, 0.472, around(9.88, 27.16))[0] > 1.9  # nobody there
    assert check(guard, 2.0, KEEP, 0.472, beside(60.0, 0.156))[0] > 1.9  # far away
    assert check(guard, 2.0, KEEP, 10.0, beside(-1.0, 0.0))[0] == 0.0    # level with it: no acceleration, no braking
    assert check(guard, -1.0, KEEP, 10.0, beside(-1.0, 0.0))[0] == -1.0


def test_safe_speed_rises_with_gap_and_leader_and_falls_with_speed():
    gap, fixed = torch.linspace(-20, 200, 500), torch.full((500,), 15.0)
    speeds = gap.clamp(min=0) / 5
    for arguments, sign in (((gap, fixed, fixed), 1), ((fixed, fixed, speeds), 1), ((fixed, speeds, fixed), -1)):
        v = safe_next_speed(*arguments, 1.0, 9.0, 9.0)
        assert (sign * v.diff() >= 0).all() and v[0] != v[-1] and (v >= 0).all()


def test_free_road_limits_acceleration_by_speed_alone():
    guard = shield(comfort_accel=2.0, max_speed=30.0)
    assert check(guard, 2.0, KEEP, 0.0, around()) == (2.0, KEEP, 0.0, NONE)
    accel, _, brake, reason = check(guard, 2.0, KEEP, 15.0, around(lead_speed=15.0))
    assert accel == pytest.approx(1.0) and brake == 0 and reason == CLIPPED
    assert check(guard, 2.0, KEEP, 31.0, around(lead_speed=31.0))[0] == 0.0  # no faster, but nobody is braked for it
    assert check(guard, -1.5, KEEP, 15.0, around(lead_speed=15.0)) == (-1.5, KEEP, 0.0, NONE)


def safe_starts(cfg, count, seed):
    """Speeds and gaps from which full braking keeps the standstill gap behind a leader that brakes fully."""
    g = torch.Generator().manual_seed(seed)
    speed, lead, spare = (torch.rand(3, count, generator=g) * torch.tensor([[35.0], [35], [30]])).unbind()
    spare[: count // 2] = 1e-3  # half of them on the edge
    need = speed ** 2 / (2 * cfg.own_decel) - lead ** 2 / (2 * cfg.leader_decel)
    return speed, lead, cfg.min_gap_m + need.clamp(min=0) + spare


def drive(guard, speed, lead, gap, lead_accel, steps, substeps=20):
    """Follower at full throttle under the shield; `lead_accel(step)` is the leader's. Returns the smallest gap."""
    dt, smallest = guard.interval / substeps, gap.clone()
    for step in range(steps):
        surround = torch.zeros(len(speed), SURROUND_FEATURES)
        surround[:, 0], surround[:, 1] = gap, lead
        accel, _, brake, _ = guard(torch.full_like(speed, 2.0), torch.full((len(speed),), KEEP), speed, surround)
        own, other = torch.where(brake > 0, -brake, accel), lead_accel(step)
        for _ in range(substeps):
            after, lead_after = (speed + own * dt).clamp(min=0), (lead + other * dt).clamp(min=0)
            # The leader is given no way in the substep in which it stops, the follower all of it: never too kind.
            gap = gap + torch.where(lead_after > 0, (lead + lead_after) / 2, 0.0) * dt - (speed + after) / 2 * dt
            speed, lead = after, lead_after
            smallest = torch.minimum(smallest, gap)
    return smallest


@pytest.mark.parametrize("interval", [0.5, 1.0])
def test_follower_never_hits_a_leader_that_brakes_fully(interval):
    """From every safe state, at full throttle, with commands once per control interval."""
    guard = shield(interval)
    speed, lead, gap = safe_starts(guard.cfg, 4000, 1)
    full = torch.full((4000,), -9.0)
    smallest = drive(guard, speed, lead, gap, lambda step: full, int(6 / interval))
    assert smallest.min() > guard.cfg.min_gap_m - 0.05


def test_follower_survives_a_leader_that_drives_on_and_brakes_at_any_time():
    guard, g = shield(), torch.Generator().manual_seed(2)
    speed, lead, gap = safe_starts(guard.cfg, 3000, 3)
    brakes_at = torch.randint(1, 12, (3000,), generator=g)

    def leader(step):
        return torch.where(step >= brakes_at, -9.0, torch.rand(3000, generator=g) * 5 - 3)
    assert drive(guard, speed, lead, gap, leader, 17).min() > guard.cfg.min_gap_m - 0.05


def test_an_unsafe_assumption_about_the_leader_does_crash():
    """The simulation above can fail: a shield that expects gentle leaders hits one that brakes fully."""
    guard = shield(leader_decel=4.5, ttc_s=0.0, thw_s=0.0)
    speed, lead, gap = safe_starts(guard.cfg, 500, 4)
    assert drive(guard, speed, lead, gap.clamp(min=5.0), lambda step: torch.full((500,), -9.0), 8).min() < 0


def test_stopping_within_the_interval_keeps_the_gap():
    """It once planned to reach 0 at the end of the interval, also where the vehicle had to stand long before: at 4 m/s
    and 1 m of room that is 2 m of way, past the standstill gap."""
    guard = shield(thw_s=0.0, ttc_s=0.0)
    accel, _, brake, _ = check(guard, 2.0, KEEP, 4.0, around(guard.cfg.min_gap_m + 1.0, 0.0))
    assert 4.0 ** 2 / (2 * max(brake, -accel)) <= 1.0 + 1e-4


# ---- level 2: emergencies ----------------------------------------------------------------------------------------

def test_short_headway_is_an_emergency_at_equal_speeds():
    """Nothing closes, time to collision is infinite, and yet 5 m at 20 m/s is 0.25 s."""
    accel, _, brake, reason = check(shield(), 0.0, KEEP, 20.0, around(5.0, 20.0))
    assert brake >= 4.5 and accel == -3.0 and reason == EMERGENCY


def test_short_time_to_collision_is_an_emergency():
    """40 m at 25 against 2 m/s: 1.7 s, at a headway of 1.6 s."""
    _, _, brake, reason = check(shield(), 1.0, KEEP, 25.0, around(40.0, 2.0))
    assert brake >= 4.5 and reason == EMERGENCY


def test_level_2_brakes_everybody_in_danger_and_only_them():
    g = torch.Generator().manual_seed(5)
    guard, n = shield(), 5000
    speed, lead, gap = (torch.rand(3, n, generator=g) * torch.tensor([[35.0], [35], [100]])).unbind()
    surround = torch.zeros(n, SURROUND_FEATURES)
    surround[:, 0], surround[:, 1] = gap, lead
    accel, _, brake, reason = guard(torch.zeros(n), torch.full((n,), KEEP), speed, surround)
    ttc = torch.where(speed - lead > 0.1, gap / (speed - lead), math.inf)
    danger = (ttc < guard.cfg.ttc_s) | (gap < guard.cfg.thw_s * speed)
    assert torch.equal(reason & EMERGENCY > 0, danger) and danger.any() and (~danger).any()
    assert (brake[danger] >= guard.cfg.emergency_decel).all() and (brake <= guard.cfg.own_decel).all()
    assert ((brake == 0) | (brake > 3.0)).all() and (accel[brake > 0] == -3.0).all() and (accel >= -3.0).all()


@pytest.mark.parametrize("gap", [0.0, -3.0])
def test_touching_vehicles_do_not_move_on(gap):
    assert check(shield(), 2.0, KEEP, 0.0, around(gap, 0.0))[0] <= 0.0
    assert check(shield(), 2.0, KEEP, 5.0, around(gap, 5.0))[2] >= 4.5


def test_stronger_wish_to_brake_is_granted():
    """The shield only ever makes a command more careful."""
    g = torch.Generator().manual_seed(6)
    n, guard = 2000, shield()
    wanted, speed = torch.rand(n, generator=g) * 5 - 3, torch.rand(n, generator=g) * 35
    surround = torch.rand(n, SURROUND_FEATURES, generator=g) * 60
    accel, _, brake, reason = guard(wanted, torch.full((n,), KEEP), speed, surround)
    assert (accel <= wanted + 1e-6).all()
    untouched = reason == NONE
    assert torch.equal(accel[untouched], wanted[untouched]) and (brake[untouched] == 0).all() and untouched.any()


# ---- lanes -------------------------------------------------------------------------------------------------------

FREE = (100.0, 20.0, 100.0, 20.0)


@pytest.mark.parametrize("lane, side", [(LEFT, "left"), (RIGHT, "right")])
def test_lane_changes_need_a_lane_and_gaps(lane, side):
    guard, other = shield(), {"left": "right", "right": "left"}[side]
    cases = [(FREE, True), (None, False),                       # no such lane
             ((1.0, 20.0, 100.0, 20.0), False),                 # no room in front
             ((30.0, 0.0, 100.0, 20.0), False),                 # somebody stands there
             ((100.0, 20.0, 4.0, 20.0), False),                 # the gap behind is cut
             ((100.0, 20.0, 40.0, 35.0), False),                # somebody comes fast from behind
             ((100.0, 20.0, 40.0, 5.0), True)]                  # somebody slow behind
    for target, allowed in cases:
        surround = around(lead_speed=20.0, **{side: target, other: (0.0, 0.0, 0.0, 0.0)})
        accel, result, brake, reason = check(guard, 0.0, lane, 20.0, surround)
        assert (result, reason) == ((lane, NONE) if allowed else (KEEP, LANE_VETO)), (side, target)
        assert accel == 0.0 and brake == 0.0
    assert check(guard, 0.0, KEEP, 20.0, around(lead_speed=20.0))[1:] == (KEEP, 0.0, NONE)


def test_a_lane_that_does_not_exist_is_no_target_whatever_its_gaps():
    surround = around(lead_speed=20.0, left=FREE, right=FREE)
    surround[0, HAS_LEFT] = 0.0
    assert check(shield(), 0.0, LEFT, 20.0, surround)[1::2] == (KEEP, LANE_VETO)
    assert check(shield(), 0.0, RIGHT, 20.0, surround)[1::2] == (RIGHT, NONE)


def test_rear_gap_must_cover_headway_and_braking():
    """Follower 10 m/s faster: it needs the standstill gap, half its speed, one second of closing, and its braking."""
    guard = shield()
    need = guard.cfg.min_gap_m + 0.5 * 30 + 1.0 * 10 + 10 ** 2 / (2 * 4.5)
    for rear, result in ((need - 0.1, KEEP), (need + 0.1, LEFT)):
        assert check(guard, 0.0, LEFT, 20.0, around(left=(100.0, 20.0, rear, 30.0)))[1] == result


def test_no_lane_change_in_an_emergency():
    accel, lane, brake, reason = check(shield(), 0.0, LEFT, 20.0, around(5.0, 20.0, left=FREE))
    assert lane == KEEP and brake >= 4.5 and reason == EMERGENCY + LANE_VETO


# ---- what passes -------------------------------------------------------------------------------------------------

def test_lane_advice_leaves_the_speed_to_sumo():
    """No acceleration (NaN): never a brake or a number, also in danger. SUMO's driver waits for a gap; vetoed in dense
    traffic, ICVs did not get out of the way of a ramp and the rule lost all that it gains (3200/800 veh/h: 863 arrivals
    instead of 1100)."""
    narrow = around(left=(2.0, 0.0, 1.0, 30.0))
    for surround, lane in ((around(left=FREE), LEFT), (around(2.0, 0.0, left=FREE), LEFT), (narrow, LEFT),
                           (around(), KEEP)):
        accel, result, brake, reason = check(shield(), NAN, LEFT, 20.0, surround)
        assert math.isnan(accel) and brake == 0.0 and result == lane
        assert reason == (NONE if lane == LEFT else LANE_VETO)


def test_switched_off_it_passes_everything():
    off = shield(enabled=False)
    assert check(off, 2.0, LEFT, 30.0, around(0.5, 0.0), 99.0) == (2.0, LEFT, 0.0, NONE)


def test_reasons_are_single_bits_with_names():
    assert sorted(REASONS) == [CLIPPED, LANE_VETO, EMERGENCY, RISK] == [1, 2, 4, 8] and len(set(REASONS.values())) == 4
    _, _, brake, reason = check(shield(), 2.0, RIGHT, 20.0, around(30.0, 20.0))
    assert reason == CLIPPED + LANE_VETO and brake == 0.0


# ---- learned risk ------------------------------------------------------------------------------------------------

def test_risk_head_is_silent_until_it_is_trained():
    guard, surround = shield(), around(left=FREE)
    assert check(guard, 0.5, LEFT, 20.0, surround, 50.0) == (0.5, LEFT, 0.0, NONE)
    guard.risk_trained.fill_(True)
    assert check(guard, 0.5, LEFT, 20.0, surround, 50.0) == (0.0, KEEP, 0.0, RISK)
    assert check(guard, 0.5, LEFT, 20.0, surround, -50.0) == (0.5, LEFT, 0.0, NONE)
    assert check(guard, 0.5, LEFT, 20.0, surround) == (0.5, LEFT, 0.0, NONE)
    assert check(guard, -1.0, KEEP, 20.0, surround, 50.0) == (-1.0, KEEP, 0.0, NONE)  # nothing to forbid


def test_risk_threshold_is_a_probability():
    guard = shield(risk_threshold=0.9)
    guard.risk_trained.fill_(True)
    edge = math.log(0.9 / 0.1)
    assert check(guard, 0.5, KEEP, 10.0, around(), edge - 0.01)[3] == NONE
    assert check(guard, 0.5, KEEP, 10.0, around(), edge + 0.01)[3] == RISK


def test_risk_flag_travels_with_the_weights():
    trained, fresh = shield(), shield()
    trained.risk_trained.fill_(True)
    fresh.load_state_dict(trained.state_dict())
    assert check(fresh, 0.5, KEEP, 10.0, around(), 50.0)[3] == RISK


def test_risk_head_sees_latents_and_surroundings():
    guard = shield()
    inputs = [torch.randn(3, 2, PRESETS["small"].latent, requires_grad=True) for _ in range(2)]
    surround = (torch.rand(3, 2, SURROUND_FEATURES) * 30).requires_grad_()
    logit = guard.risk_logit(*inputs, surround)
    logit.sum().backward()
    assert logit.shape == (3, 2) and all((x.grad != 0).any(-1).all() for x in (*inputs, surround))


# ---- vectorised --------------------------------------------------------------------------------------------------

def test_all_at_once_equals_one_by_one():
    g = torch.Generator().manual_seed(7)
    guard, shape = shield(), (60, 5)
    guard.risk_trained.fill_(True)
    accel = torch.rand(shape, generator=g) * 5 - 3
    accel[torch.rand(shape, generator=g) < 0.1] = NAN
    lane, speed = torch.randint(0, 3, shape, generator=g), torch.rand(shape, generator=g) * 35
    surround = torch.rand(*shape, SURROUND_FEATURES, generator=g) * 60
    surround[..., HAS_LEFT:HAS_RIGHT + 1] = (surround[..., HAS_LEFT:HAS_RIGHT + 1] > 20).float()
    risk = torch.randn(shape, generator=g) * 4
    together = guard(accel, lane, speed, surround, risk)
    for b in range(shape[0]):
        for k in range(shape[1]):
            alone = guard(accel[b, k], lane[b, k], speed[b, k], surround[b, k], risk[b, k])
            for whole, single in zip(together, alone):
                torch.testing.assert_close(whole[b, k], single, rtol=0, atol=0, equal_nan=True)
    assert {reason & bit for reason in together[3].flatten().tolist() for bit in REASONS} == {0, 1, 2, 4, 8}


def test_two_abreast_do_not_wait_for_each_other():
    """Each was in front of the other: at a red light two ICVs held each other for ever. The left one goes first."""
    beside = (-5.0, 0.0, -5.0, 0.0)
    held, goes = (check(shield(), 1.0, KEEP, 0.0, around(**{side: beside}))[0] for side in ("left", "right"))
    assert held == 0 and goes == 1
    assert check(shield(), 1.0, KEEP, 0.0, around(right=(-4.9, 0.0, 10.0, 0.0)))[0] == 0  # that one is in front


@pytest.mark.parametrize("gap, expected", [(22.0, (-2.0, LEFT, CLIPPED)), (18.0, (0.0, KEEP, CLIPPED | LANE_VETO))])
def test_lane_change_that_needs_braking_brakes(gap, expected):
    """It was granted because the vehicle could brake by 3 m/s^2 behind its new leader, and then it did not. A lane
    change that is not granted needs no braking."""
    accel, lane, brake, reason = check(shield(), 1.0, LEFT, 20.0, around(left=(gap, 18.0, 200.0, 0.0)))
    assert (round(accel, 3), lane, reason) == expected and brake == 0
