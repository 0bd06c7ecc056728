"""Pictures of predictions, for benchmarks.world_model; needs matplotlib (extra `viz`)."""
import numpy as np

RULES = {"velocity": ("constant velocity", "C7", ":"), "accel": ("constant acceleration", "C7", "--"),
         "idm": ("IDM", "C1", "-.")}
STRETCH_M, SPAN_S, EVERY_S = 350.0, 48.0, 8.0  # of the time-space picture


def draw(path, result, interval, episode, predicted):
    """Errors against the horizon in the first and the last scene, calibration, and one episode in time and space.

    result: see benchmarks.world_model; predicted: states [F, N, H, 2] of the model in `episode` of the first scene.
    """
    from matplotlib.figure import Figure
    scenes, figure = list(result["scenes"]), Figure(figsize=(13.5, 8))
    (position, speed, last), (calibration, *_) = figure.subplots(2, 3)
    error_curves(position, result, scenes[0], "position", "m", interval)
    error_curves(speed, result, scenes[0], "speed", "m/s", interval)
    error_curves(last, result, scenes[-1], "position", "m", interval)
    position.legend(fontsize=8)
    calibration_curves(calibration, result["scenes"])
    grid = figure.axes[4].get_gridspec()
    for axes in figure.axes[4:]:
        axes.remove()
    time_space(figure.add_subplot(grid[1, 1:]), episode, predicted, interval)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    print(f"picture: {path}")


def error_curves(axes, result, scene, quantity, unit, interval):
    """RMSE in dense traffic against how far ahead; the band is the 95 % interval over training seeds."""
    facts = result["scenes"][scene]
    steps = [name for name in facts["model"] if name.startswith(f"{quantity}_")]
    ahead = interval * np.arange(1, len(steps) + 1)
    for rule, (label, colour, style) in RULES.items():
        axes.plot(ahead, [facts["rules"][rule][name] for name in steps], color=colour, ls=style, label=label)
    mean = np.array([facts["model"][name]["mean"] for name in steps])
    spread = np.array([facts["model"][name]["ci95"] or 0.0 for name in steps])
    axes.plot(ahead, mean, color="C0", marker="o", ms=4, label="world model")
    axes.fill_between(ahead, mean - spread, mean + spread, color="C0", alpha=0.25, lw=0)
    axes.set(title=scene, xlabel="prediction ahead, s", ylabel=f"RMSE of {quantity}, {unit}", xticks=ahead,
             ylim=(0, None))
    axes.grid(alpha=0.3)


def calibration_curves(axes, scenes):
    """Observed frequency of a conflict against the predicted probability, with at least 100 predictions a point."""
    axes.plot([1e-4, 1], [1e-4, 1], color="k", lw=0.8)
    for number, (scene, facts) in enumerate(scenes.items()):
        points = [(p, seen) for p, seen, count in facts["reliability"] if count >= 100 and seen > 0]
        if points:
            axes.plot(*zip(*points), marker="o", ms=3, color=f"C{number}", label=scene)
    axes.set(xscale="log", yscale="log", xlim=(5e-4, 1.2), ylim=(5e-4, 1.2), title="conflict within the horizon",
             xlabel="predicted probability", ylabel="observed frequency")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def time_space(axes, episode, predicted, interval):
    """True paths in grey, predictions from every EVERY_S seconds in blue, on the stretch where speeds differ most."""
    place, here = episode["position"].numpy(), episode["mask"].numpy()
    start, low = busiest(place, here, episode["speed"].numpy(), int(SPAN_S / interval))
    stop = min(start + int(SPAN_S / interval), len(place) - 1)
    same = here[1:] & here[:-1] & ~episode["fresh"].numpy()[1:]
    for slot in np.flatnonzero(here[start:stop].any(0)):
        for run in np.split(np.arange(start, stop), np.flatnonzero(~same[start:stop - 1, slot]) + 1):
            path = run[here[run, slot]]
            axes.plot(path * interval, place[path, slot], color="0.8", lw=3)
    for frame in range(start, stop, max(int(EVERY_S / interval), 1)):
        for slot in np.flatnonzero(here[frame]):
            ahead = place[frame, slot] + np.append(0, predicted[frame, slot, :, 0])
            axes.plot((frame + np.arange(len(ahead))) * interval, ahead, "C0o-", lw=1, ms=3, markevery=[0])
    axes.set(xlim=(start * interval, stop * interval), ylim=(low, low + STRETCH_M), xlabel="time, s",
             ylabel="position along the road, m", title="true paths (grey) and predictions (blue), all lanes")


def busiest(place, here, speed, frames):
    """(first frame, lower end of the stretch, m) where the speeds of the vehicles are spread most."""
    best = (-1.0, 0, 0.0)
    for start in range(0, max(len(place) - frames, 1), frames // 2):
        for low in np.arange(0, max(place.max() - STRETCH_M, 1), STRETCH_M / 2):
            rows = slice(start, start + frames)
            inside = here[rows] & (place[rows] >= low) & (place[rows] < low + STRETCH_M)
            if inside.sum() > frames:
                best = max(best, (float(speed[rows][inside].std()), start, float(low)))
    return best[1:]
