"""A recorded episode as an animated GIF: vehicles coloured by speed, connected ones with a rim, commanded ones large.

    python -m runtime.animation runs/quick/evaluation.tracks.npz policy drive.gif

Needs matplotlib and pillow (extra `viz`).
"""
import importlib.util
import sys
from pathlib import Path

import numpy as np

from configs import ConfigError
from runtime.tracks import load_tracks

FRAMES, PER_SECOND = 300, 15  # a longer episode leaves steps out
FLATTEST = 4.0                # roads much longer than wide are drawn wider than they are


def check(path):
    """ConfigError when no animation can be written to `path`."""
    if Path(path).suffix != ".gif":
        raise ConfigError(f"{path}: an animation is a .gif file")
    if not Path(path).resolve().parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {Path(path).resolve().parent}")
    missing = [name for name, module in (("matplotlib", "matplotlib"), ("pillow", "PIL"))
               if importlib.util.find_spec(module) is None]
    if missing:
        raise ConfigError(f"an animation needs {' and '.join(missing)}: pip install 'mixed-autonomy[viz]'")


def draw(tracks, path, controller=None, say=print):
    """Write the animation of one controller (the last one by default) in the file `tracks`."""
    episodes, facts = load_tracks(tracks)
    if controller is not None and controller not in episodes:
        raise ConfigError(f"{tracks}: no episode of {controller!r} in it, only of {', '.join(episodes)}")
    controller = controller or list(episodes)[-1]
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import animation, pyplot
    track, interval = episodes[controller], float(facts["interval"])
    first = np.searchsorted(track["step"], np.arange(track["step"][-1] + 2))
    figure, vehicles, commanded, title = _scene(pyplot, track, facts)

    def frame(step):
        now = slice(first[step], first[step + 1])
        place = np.stack([track["x"][now], track["y"][now]], 1)
        vehicles.set_offsets(place)
        vehicles.set_array(track["speed"][now].astype(float))
        vehicles.set_linewidths(track["icv"][now] * 1.2)
        commanded.set_offsets(place[track["commanded"][now]])
        mean = track["speed"][now].mean() if len(place) else np.nan
        title.set_text(f"{controller}   t = {step * interval:4.0f} s   {len(place)} vehicles, mean {mean:.1f} m/s   "
                       "blue rim: connected   magenta: commanded")

    steps = range(0, len(first) - 1, -(-(len(first) - 1) // FRAMES))
    animation.FuncAnimation(figure, frame, steps).save(path, writer=animation.PillowWriter(fps=PER_SECOND))
    pyplot.close(figure)
    say(f"animation: {path} ({len(steps)} frames)")


def _scene(pyplot, track, facts):
    """(figure, scatter of all vehicles, scatter of the commanded ones, title) with the roads drawn."""
    xy, first = facts["lanes/xy"], facts["lanes/first"]
    lanes = np.split(xy, first[1:])
    width, height = np.ptp(xy, 0) + 20
    flat = width / height > FLATTEST
    shown = np.clip(height / width, 1 / FLATTEST, 1.2)
    figure, axes = pyplot.subplots(figsize=(10, 10 * shown + 0.8), dpi=90, layout="constrained")
    for lane in lanes:
        axes.plot(*lane.T, color="0.85", lw=5 if flat else 3, solid_capstyle="butt", zorder=0)
    commanded = axes.scatter([], [], s=90, facecolors="none", edgecolors="#ff00aa", linewidths=2, zorder=2)
    vehicles = axes.scatter([], [], s=22, c=[], cmap="RdYlBu", vmin=0, vmax=max(float(track["speed"].max()), 1.0),
                            edgecolors="#1e50ff", zorder=3)
    figure.colorbar(vehicles, label="speed, m/s", pad=0.01)
    axes.set_aspect("auto" if flat else "equal")
    axes.set(xlabel="x, m", ylabel="y, m (stretched)" if flat else "y, m")
    return figure, vehicles, commanded, axes.set_title("", loc="left", fontsize=9)


def main():
    if len(sys.argv) != 4:
        print("usage: python -m runtime.animation TRACKS.npz CONTROLLER FILE.gif", file=sys.stderr)
        return 2
    try:
        check(sys.argv[3])
        draw(sys.argv[1], sys.argv[3], sys.argv[2])
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
