"""runtime/curriculum.py: when stages change, by a hand-written table; which episodes belong to a stage."""
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from configs import ConfigError, load_config
from configs.phases import CurriculumConfig
from runtime.curriculum import START, after, check, seed_of_stage
from runtime.training import Progress
from train_rl import enter_stage, judge_stage, learner

from test_ppo import ALONE

P = CurriculumConfig(threshold=0.8, evaluations=2, patience=4, collapse_share=0.5, collapse_evaluations=2, fallbacks=1)
# Score of an evaluation -> stage and fallbacks after it.
TABLE = ((0.9, 0, 0), (0.9, 0, 0), (0.7, 0, 0),          # two in a row are too early; a dip ends the row
         (0.9, 0, 0), (0.8, 0, 0), (0.82, 0, 0), (0.84, 1, 0),  # 0.8 is not above; level 0.83
         (0.4, 1, 0), (0.42, 1, 0), (0.41, 1, 0), (0.4, 0, 1),  # below 0.415 twice in a row: back
         (0.1, 0, 1), (0.1, 0, 1), (0.1, 0, 1),                 # the first stage has none before it
         (0.9, 0, 1), (0.9, 1, 1),
         (0.1, 1, 1), (0.1, 1, 1), (0.1, 1, 1), (0.1, 1, 1),    # once only
         (0.9, 1, 1), (0.9, 2, 1), *[(0.9, 2, 1)] * 5)          # the last stage


def test_stages_follow_the_table():
    state = START
    for score, stage, fallbacks in TABLE:
        state = after(state, score, 2, P)
        assert (state["stage"], state["fallbacks"]) == (stage, fallbacks), score
    assert START == {**dict.fromkeys(START, 0), "lower": []}


def test_a_second_collapse_leads_further_down():
    """The level of the stage below was forgotten, so that nothing could collapse there."""
    p = CurriculumConfig(evaluations=2, patience=2, collapse_evaluations=2, fallbacks=2)
    old = {name: value for name, value in START.items() if name != "lower"}  # of an older checkpoint
    state, seen = old, []
    for score in (0.9, 0.9, 0.85, 0.85, *[0.05] * 8):
        state = after(state, score, 2, p)
        seen.append((state["stage"], round(state["level"], 6)))
    assert seen == [(0, 0), (1, 0.9), (1, 0.9), (2, 0.85), (2, 0.85), (1, 0.9), (1, 0.9), *[(0, 0)] * 5]
    assert state["fallbacks"] == 2


@pytest.mark.parametrize("stage, share", [(0, 0.0), (1, 0.3), (2, 0.4), (3, 0.5), (4, 0.5)])
def test_share_of_earlier_stages(stage, share):
    """Five episodes of an environment in a row, whose seeds follow each other, were the same traffic."""
    moved = [seed_of_stage(seed, stage, 5, [0.0, 0.3, 0.4, 0.5]) for seed in range(10_000, 14_000)]
    assert len(set(moved)) == len(moved) and 0 <= min(moved) and max(moved) < 2 ** 31 - 1
    counts = [sum(a % 5 == variant for a in moved) / len(moved) for variant in range(5)]
    assert counts[stage] == pytest.approx(1 - share, abs=0.03) and sum(counts[stage + 1:]) == 0
    assert seed_of_stage(10_003, 0, 5, [1.0]) % 5 == 0  # there is nothing to repeat yet
    assert counts[:stage] == pytest.approx([share / max(stage, 1)] * stage, abs=0.03)


def test_score_is_the_arrivals_in_the_stages_own_episodes():
    cfg = load_config("configs/smoke.yaml", ["env.suite=[same, corridor.lanes=3]", "phase2.curriculum.enabled=true",
                                             "phase2.curriculum.evaluations=1", "phase2.curriculum.patience=1"])
    facts = {"episodes": [{"seed": 10, "ocr": 0.7}, {"seed": 12, "ocr": 0.95}, {"seed": 11, "ocr": 0.0}]}
    state = judge_stage(cfg, ALONE, START, facts)
    assert state["stage"] == 1 and state["level"] == pytest.approx(0.825)
    assert judge_stage(cfg, ALONE, START, {"episodes": facts["episodes"][2:]}) == START  # nothing to judge by


def test_state_travels_in_the_checkpoint(tmp_path):
    cfg, model = load_config("configs/smoke.yaml"), torch.nn.Linear(1, 1)

    def progress():
        one = Progress(cfg, ALONE, tmp_path, model, torch.optim.Adam(model.parameters()), torch.amp.GradScaler("cpu"))
        one.counters["curriculum"] = START
        return one
    first = progress()
    first.counters["curriculum"] = state = after(after(START, 0.9, 2, P), 0.85, 2, P)
    first.save()
    [lock.close() for lock in first.locks]
    second = progress()
    assert second.resume() and second.counters["curriculum"] == state != START


@pytest.mark.parametrize("stage", [2, -1, "1", None])
def test_a_suite_that_has_lost_the_present_stage_is_refused(stage):
    """Its episodes were of any variant, none of them was judged, and it never went on or back, without a word."""
    check({**START, "stage": 1}, 2, "runs/x/phase2")
    with pytest.raises(ConfigError, match=f"env.suite: the curriculum of runs/x/phase2 is at its element {stage!r}"):
        check({**START, "stage": stage}, 2, "runs/x/phase2")


def test_the_learner_asks(tmp_path):
    words = ["run.device=cpu", f"run.folder={tmp_path}", "phase2.curriculum.enabled=true"]
    suites = [f"env.suite=[same, corridor.lanes=3{more}]" for more in (", corridor.ramps=1", "")]
    progress, _ = learner(load_config("configs/smoke.yaml", [*words, suites[0]]), ALONE, tmp_path)
    progress.counters["curriculum"] = {**START, "stage": 2}
    progress.save()
    [lock.close() for lock in progress.locks]
    with pytest.raises(ConfigError, match="at its element 2.*of 2"):
        learner(load_config("configs/smoke.yaml", [*words, suites[1]]), ALONE, tmp_path)


def test_a_stage_that_nobody_leaves_may_only_be_the_last():
    """The share of arrivals decides, and on a ring nobody arrives: configs/scenes.yaml would stay there for ever,
    without a word."""
    overrides = ["phase2.curriculum.enabled=true", "env.suite=[same, env.scenario=ring]"]
    assert load_config("configs/smoke.yaml", overrides).phase2.curriculum.enabled
    with pytest.raises(ConfigError, match="nobody ever arrives on ring.*'env.scenario=ring'"):
        load_config("configs/smoke.yaml", [overrides[0], "env.suite=[env.scenario=ring, same]"])


def test_stages_follow_each_other_while_a_rule_corrects_the_policy(tmp_path):
    """Under a warm start nothing was judged: where every iteration is one, training never left the first stage."""
    changes = ["env.suite=[same,env.demand_scale=1.2]", "phase2.curriculum.enabled=true", "phase2.fragment_length=60",
               "phase2.curriculum.threshold=0.0", "phase2.curriculum.evaluations=1", "phase2.curriculum.patience=1",
               "phase2.iterations=3", "phase2.imitate_corrections=2", f"run.folder={tmp_path}", "run.device=cpu"]
    done = subprocess.run([sys.executable, "train_rl.py", "--config", "configs/smoke.yaml", *changes],
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = map(json.loads, (tmp_path / "smoke/metrics.jsonl").read_text().splitlines())
    assert [row["curriculum_stage"] for row in rows if "curriculum_stage" in row] == [0, 0, 1]


def test_each_fall_halves_the_learning_rate():
    cfg = load_config("configs/smoke.yaml", ["phase2.curriculum.fallback_lr=0.5"])
    rates = [enter_stage(cfg, {**START, "fallbacks": n}, SimpleNamespace()) for n in range(3)]
    assert rates == [1.0, 0.5, 0.25]
