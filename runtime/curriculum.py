"""Curriculum of phase 2: the elements of env.suite are stages of growing difficulty.

An evaluation is an iteration in which episodes of the present stage ended; its score is the share of loaded vehicles
that arrived in them. The state is a dictionary of plain values that travels in the checkpoints.
"""
import numpy as np

from configs import ConfigError

START = {"stage": 0, "evaluations": 0, "over": 0, "over_sum": 0.0, "under": 0, "level": 0.0, "fallbacks": 0,
         "lower": []}  # levels of the stages below
MOST = 2 ** 31 - 1  # seeds of an environment are below


def check(state, stages, folder):
    """ConfigError when the state found in `folder` is at no stage of this suite."""
    if state.get("stage") not in range(stages):
        raise ConfigError(f"env.suite: the curriculum of {folder} is at its element {state.get('stage')!r}, counted "
                          f"from 0, of {stages}; give the suite as many as it had, or train with another run.name")


def after(state, score, last_stage, p):
    """The state after an evaluation. `p` is configs.CurriculumConfig.

    The next stage follows `evaluations` scores in a row above `threshold`, whose mean is then the `level` to keep;
    the stage before follows `collapse_evaluations` scores in a row below `collapse_share` of that level, and has the
    level again that it had.
    """
    s = {**START, **state, "evaluations": state["evaluations"] + 1}
    s["over"], s["over_sum"] = (s["over"] + 1, s["over_sum"] + score) if score > p.threshold else (0, 0.0)
    s["under"] = s["under"] + 1 if score < p.collapse_share * s["level"] else 0
    if s["over"] >= p.evaluations and s["evaluations"] >= p.patience and s["stage"] < last_stage:
        return {**START, "stage": s["stage"] + 1, "level": s["over_sum"] / s["over"], "fallbacks": s["fallbacks"],
                "lower": [*s["lower"], s["level"]]}
    if s["under"] >= p.collapse_evaluations and s["fallbacks"] < p.fallbacks:
        *lower, level = s["lower"] or [0.0]
        return {**START, "stage": s["stage"] - 1, "fallbacks": s["fallbacks"] + 1, "level": level, "lower": lower}
    return s


def seed_of_stage(seed, stage, variants, replay):
    """A seed drawn from this one, of the stage's variant of the suite (an environment's is seed % variants) or, with
    the probability that `replay` gives by stage, of an earlier one's. Nothing else enters, so a resumed run sees the
    same traffic; the seeds of an environment follow each other, and must not become one."""
    rng = np.random.default_rng(seed)
    again = rng.random() < replay[min(stage, len(replay) - 1)] and stage > 0
    variant = int(rng.integers(stage)) if again else stage
    return int(rng.integers(MOST // variants)) * variants + variant
