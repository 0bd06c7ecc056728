"""Phase 2 while simulators and workers are killed and frozen: does it finish, what is lost, does it learn the same?

    python -m benchmarks.chaos --minutes 30 --every 20 --json chaos.json [section.key=value ...]

After a short phase 1, phase 2 runs undisturbed for --minutes; then again with the same seed and as many iterations,
while every --every seconds a random SUMO or rollout worker gets SIGKILL or SIGSTOP; then undisturbed with another seed.
The difference of the first two learning curves (return by iteration) is compared with the noise, which is that of the
two undisturbed ones. Deadlines are shorter than the configuration's, so that freezing does not take up all the time.
An iteration must be short against the disturbances, or no episode is left whole: on a busy machine disturb less often.
"""
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from benchmarks.arguments import at_least, positive, writable
from benchmarks.leftovers import marked_environment, survivors
from benchmarks.report import ROOT, finish, load_line
from configs import ConfigError
from configs.command_line import parse
from runtime.ending import run_script
from runtime.memory import component, process_tree
from runtime.metrics import read_metrics

SHORT = ["data.samples=100", "phase1.epochs=2", "phase1.stage1_epochs=1", "phase2.checkpoint_every=1",
         "env.call_timeout_s=5", "env.start_timeout_s=10", "rollout.restarts=10"]
WORD, ENVIRONMENT = marked_environment(PYTHONPATH=str(ROOT))


def command(options, script, *words):
    config = Path(options.config_file).resolve() if Path(options.config_file).exists() else options.config_file
    return [sys.executable, str(ROOT / script[0]), *script[1:], "--config", str(config), *SHORT, *options.overrides,
            *words]


def disturb_one(rng, pid):
    """Kill or freeze one simulator or worker below `pid`; returns what was done, or None when there is nobody."""
    victims = [(p, component(p)) for p in process_tree(pid)]
    victims = [(p, name) for p, name in victims if name in ("sumo", "rollout worker")]
    if not victims:
        return None
    (victim, name), number = rng.choice(victims), rng.choice((signal.SIGKILL, signal.SIGSTOP))
    try:
        os.kill(victim, number)
    except ProcessLookupError:
        return None
    return f"{name} {'killed' if number == signal.SIGKILL else 'frozen'}"


def train(options, place, name, *words, minutes=None, every=None):
    """Run phase 2 to its end, or for some minutes; disturbed once in `every` seconds if given. Returns its facts."""
    folder, rng, done = place / "runs" / name, random.Random(options.seed), Counter()
    shutil.copytree(place / "runs" / "start" / "phase1", folder / "phase1")
    begun, log = time.monotonic(), place / f"{name}.txt"
    with open(log, "w") as out:
        process = subprocess.Popen(command(options, ["train_rl.py"], f"run.name={name}", *words), cwd=place,
                                   env=ENVIRONMENT, stdout=out, stderr=out)
    following = begun + (every or 0)
    while process.poll() is None:
        time.sleep(0.2)
        if minutes and time.monotonic() > begun + 60 * minutes:
            process.send_signal(signal.SIGTERM)
            minutes = None
        if every and (folder / "metrics.jsonl").exists() and time.monotonic() > following:
            done[disturb_one(rng, process.pid)] += 1
            following = time.monotonic() + every
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["phase"] == 2]
    facts = {"exit_code": process.returncode, "minutes": (time.monotonic() - begun) / 60, "iterations": len(rows),
             "steps": rows[-1]["env_steps"], "lost_steps": sum(row["lost_steps"] for row in rows),
             "episodes": sum(row["episodes"] for row in rows), "returns": [row.get("return") for row in rows],
             "disturbed": {what: n for what, n in done.items() if what}, "left": survivors(WORD)}
    print(f"{name}: exit code {facts['exit_code']}, {facts['minutes']:.1f} minutes, {len(rows)} iterations, "
          f"{facts['episodes']} whole episodes, {facts['lost_steps']} of {facts['steps']} steps lost, left behind: "
          f"{facts['left'] or 'nothing'}; {facts['disturbed'] or 'undisturbed'}", flush=True)
    return facts


def difference(one, other):
    """(mean, root mean square, number) of the differences of two learning curves, where both have a return."""
    pairs = [(a, b) for a, b in zip(one["returns"], other["returns"]) if a is not None and b is not None]
    if not pairs:
        return math.nan, math.nan, 0
    way = np.array([a - b for a, b in pairs])
    return float(way.mean()), float((way ** 2).mean() ** 0.5), len(way)


def judge(alone, disturbed, other):
    """{promise: (figures as text, kept)}. A difference of one and a half times the noise could be chance in one case
    of twenty with 20 iterations (F distribution); a mean difference of three standard errors in one of hundreds."""
    share = disturbed["lost_steps"] / disturbed["steps"]
    (mean, rms, n), (noise_mean, noise, _) = difference(disturbed, alone), difference(other, alone)
    alike = rms < 1.5 * noise and abs(mean) < abs(noise_mean) + 3 * noise / max(n, 1) ** 0.5
    return {"finishes": (f"exit code {disturbed['exit_code']}, {disturbed['iterations']} of {alone['iterations']} "
                         "iterations", disturbed["exit_code"] == 0 and disturbed["iterations"] == alone["iterations"]),
            "loses under 10 % of the steps": (f"{100 * share:.2f} %", share < 0.1),
            "learns the same": (f"return differs by {mean:+.2f} (rms {rms:.2f}); another seed by {noise_mean:+.2f} "
                                f"(rms {noise:.2f})", alike),
            "leaves nothing behind": ("; ".join(disturbed["left"]) or "nothing", not disturbed["left"])}


def main():
    def add(parser):
        parser.add_argument("--minutes", type=positive, default=30.0, help="of the undisturbed run")
        parser.add_argument("--every", type=positive, default=20.0, help="seconds between two disturbances")
        parser.add_argument("--seed", type=at_least(0), default=0, help="of the disturbances")
        parser.add_argument("--json", type=writable, default="chaos.json", help="where the result goes")
        parser.set_defaults(config="configs/quick.yaml")
    options = parse(__doc__, add=add)
    print(load_line(1), flush=True)
    with tempfile.TemporaryDirectory(prefix="chaos-") as place:
        place = Path(place)
        first = subprocess.run(command(options, ["train_ddp.py", "--phase", "1"], "run.name=start"), cwd=place,
                               env=ENVIRONMENT, capture_output=True, text=True)
        if first.returncode:
            raise ConfigError(f"phase 1 failed: {first.stderr[-3000:]}")
        seed = options.config.run.seed
        alone = train(options, place, "alone", "phase2.iterations=100000", minutes=options.minutes)
        as_many = f"phase2.iterations={alone['iterations']}"
        disturbed = train(options, place, "disturbed", as_many, every=options.every)
        other = train(options, place, "other-seed", as_many, f"run.seed={seed + 1}", f"data.seed={seed}")
        verdict = judge(alone, disturbed, other)
    for promise, (figures, kept) in verdict.items():
        print(f"{'pass' if kept else 'FAIL'}  {promise}: {figures}")
    finish(options.json, alone=alone, disturbed=disturbed, other_seed=other, verdict=verdict)
    return 0 if all(kept for _, kept in verdict.values()) else 1


if __name__ == "__main__":
    sys.exit(run_script(main, (ConfigError,)))
