"""Recorded episodes as an animated GIF, or all of a file as time-space diagrams.

    python -m runtime.animation runs/quick/evaluation.tracks.npz drive.gif policy
    python -m runtime.animation runs/quick/evaluation.tracks.npz time_space.png

Needs matplotlib and pillow (extra `viz`).
"""
import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path

import numpy as np

from configs import ConfigError, WriteError
from configs.console import exit_code
from configs.files import whole
from runtime.pictures import SLOW_TO_FAST, speed_palette
from runtime.report_traffic import pixels_of
from runtime.tracks import load_tracks

FRAMES, PER_SECOND = 240, 12  # a longer episode leaves steps out
FLATTEST = 4.0                # roads much longer than wide are drawn wider than they are


def check(path, kinds=(".gif",)):
    """ConfigError when no animation (or other picture of these kinds) can be written to `path`."""
    if Path(path).suffix not in kinds:
        raise ConfigError(f"{path}: expected a file that ends in {' or '.join(kinds)}")
    if not Path(path).resolve().parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {Path(path).resolve().parent}")
    missing = [name for name, module in (("matplotlib", "matplotlib"), ("pillow", "PIL"))
               if importlib.util.find_spec(module) is None]
    if missing:
        raise ConfigError(f"a picture needs {' and '.join(missing)}: in the project's folder, pip install -e '.[viz]'")


def draw(tracks, path, controller=None, say=print):
    """Write the animation of one controller (the last one by default) in the file `tracks`."""
    episodes, facts = load_tracks(tracks)
    if controller is not None and controller not in episodes:
        raise ConfigError(f"{tracks}: no episode of {controller!r} in it, only of {', '.join(episodes)}")
    controller = controller or list(episodes)[-1]
    from matplotlib import animation
    track, interval = episodes[controller], float(facts["interval"])
    count = len(track["influence"])
    first = np.searchsorted(track["step"], np.arange(count + 1))
    figure, vehicles, commanded, title = _scene(track, facts)

    def frame(step):
        now = slice(first[step], first[step + 1])
        place = np.stack([track["x"][now], track["y"][now]], 1)
        vehicles.set(offsets=place, array=track["speed"][now].astype(float), linewidths=track["icv"][now] * 1.3)
        commanded.set_offsets(place[track["commanded"][now]])
        mean = track["speed"][now].astype(float).mean() if len(place) else 0.0
        title.set_text(f"{controller}  {step * interval:4.0f} s  {len(place):3d} vehicles, mean speed {mean:4.1f} m/s  "
                       "(black rim: connected, magenta ring: commanded)")

    shown = range(0, count, -(-count // FRAMES))
    with whole(path) as file, tempfile.TemporaryDirectory() as folder:  # its writer takes names only
        drawn = Path(folder) / "drive.gif"
        animation.FuncAnimation(figure, frame, shown).save(drawn, writer=animation.PillowWriter(fps=PER_SECOND))
        file.write(drawn.read_bytes())
    say(f"animation: {path} ({len(shown)} frames)")


def _scene(track, facts):
    """(figure, scatter of all vehicles, scatter of the commanded ones, title) with the roads drawn."""
    from matplotlib.collections import LineCollection
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    colours = LinearSegmentedColormap.from_list("speed", np.array(SLOW_TO_FAST) / 255)
    xy, fastest = facts["lanes/xy"], max(float(track["speed"].max(initial=1)), 1.0)
    width, height = np.ptp(xy, 0) + 20
    flat = width / height > FLATTEST
    figure = Figure(figsize=(10, 10 * np.clip(height / width, 1 / FLATTEST, 1.2) + 0.6), dpi=80)
    axes = figure.subplots()
    lanes = LineCollection(np.split(xy, facts["lanes/first"][1:]), colors="0.87", linewidths=7 if flat else 4)
    axes.add_collection(lanes)
    commanded = axes.scatter([], [], s=110, facecolors="none", edgecolors="#e6007e", linewidths=2.5, zorder=4)
    vehicles = axes.scatter([], [], s=26, c=[], cmap=colours, vmin=0, vmax=fastest, edgecolors="black", zorder=3)
    figure.colorbar(vehicles, label="speed, m/s", pad=0.01, fraction=0.03)
    axes.set(xlim=(xy[:, 0].min() - 10, xy[:, 0].max() + 10), ylim=(xy[:, 1].min() - 10, xy[:, 1].max() + 10),
             aspect="auto" if flat else "equal", xlabel="x, m", ylabel="y, m (stretched)" if flat else "y, m")
    title = axes.set_title("", loc="left", fontsize=9)
    figure.tight_layout()
    return figure, vehicles, commanded, title


def draw_time_space(tracks, path, say=print):
    """Write the time-space diagrams of all controllers in the file `tracks` side by side."""
    episodes, facts = load_tracks(tracks)
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    figure = Figure(figsize=(5 * len(episodes) + 1, 3.4), dpi=80, layout="constrained")
    panels = figure.subplots(1, len(episodes), sharey=True, squeeze=False)[0]
    colours = ListedColormap(np.array([(255, 255, 255), *speed_palette()[1:]]) / 255)
    for axes, (name, track) in zip(panels, episodes.items()):
        pixels, minutes, km, fastest = pixels_of(track, track["speed"] >= 0, episodes, facts)
        axes.imshow(pixels, colours, vmin=0, vmax=255, extent=(0, minutes, 0, km), aspect="auto",
                    interpolation_stage="rgba")
        axes.set(title="without control" if name == "none" else name, xlabel="time, min")
    panels[0].set_ylabel("place along the main road, km")
    bar = figure.colorbar(panels[-1].images[0], ax=panels, pad=0.01, ticks=np.linspace(1, 255, 4))
    bar.set_label("speed, m/s")
    bar.ax.set_yticklabels([f"{v:.0f}" for v in np.linspace(0, fastest, 4)])
    with whole(path) as file:
        figure.savefig(file, format="png")
    say(f"time-space diagrams: {path}")


def main():
    parser = argparse.ArgumentParser(prog="python -m runtime.animation", description="Draw what evaluate.py recorded.")
    parser.add_argument("tracks", metavar="TRACKS.npz", help="from evaluate.py --tracks")
    parser.add_argument("picture", metavar="FILE.gif", help="an animation; FILE.png: time-space diagrams of all")
    parser.add_argument("controller", nargs="?", help="whose traffic the animation shows (default: the last one)")
    options = parser.parse_args()
    if options.controller and not options.picture.endswith(".gif"):
        parser.error(f"{options.picture}: the diagrams show all controllers; only an animation shows one")
    check(options.picture, (".gif", ".png"))
    if options.picture.endswith(".gif"):
        draw(options.tracks, options.picture, options.controller)
    else:
        draw_time_space(options.tracks, options.picture)


if __name__ == "__main__":
    sys.exit(exit_code(main, (ConfigError, OSError, ValueError), troubles=(WriteError,)))
