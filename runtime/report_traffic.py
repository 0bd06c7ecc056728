"""The report's sections on what happened on the road: time and space, speeds, who was chosen, the shield."""
import csv
import html
from collections import Counter

import numpy as np

from runtime import pictures
from runtime.pictures import grid, lines, plot, steps

COLOURS = {"without control": "--c0", "policy": "--c1", "lane_advice": "--c2", "harmonise": "--c3", "random": "--c4",
           "tuned": "--c5", "idm": "--c6", "speed_advice": "--c7", "pi_saturation": "--c8",
           "follower_stopper": "--c9"}  # the same everywhere
GAP_M, BINS, PLACES = 100, 40, 30  # histograms: largest gap shown, bins; parts of the road
TRAJECTORY = ("step", "vehicle", "along", "speed")
PIXELS = (360, 900)                # height and width of a time-space diagram


def time_space(episodes, facts):
    """Trajectories on the main road in time and space, coloured by speed, one diagram per controller."""
    of = f" of {html.escape(str(facts['variant']))}" if "variant" in facts else ""
    on = np.concatenate([np.isfinite(track["along"]) for track in episodes.values()]).mean()
    return [f"<h2>Time and space</h2><p>Each line is a vehicle on the main road, seed {facts['seed']}{of}; the same "
            "traffic meets each controller. Red bands that move against the traffic are jams, those that stay wait at "
            f"traffic lights. ({100 * on:.0f} % of all vehicles and steps are on the main road, the route on whose "
            "edges most were seen.)</p>",
            '<div class="row wide">',
            *(diagram(named(n), t, t["speed"] >= 0, episodes, facts) for n, t in episodes.items()), "</div>"]


def diagram(title, track, shown, episodes, facts):
    """Time-space diagram of the `shown` rows of a track, on the axes of all episodes."""
    pixels, minutes, km, fastest = pixels_of(track, shown, episodes, facts)
    picture = pictures.image(pixels, pictures.speed_palette(), f"time-space diagram: {title}")
    return plot(title, picture, (0, minutes), (0, km), "time, min; place along the main road, km",
                pictures.speed_key(fastest), 1.7)


def pixels_of(track, shown, episodes, facts):
    """(pixels, minutes, km, fastest m/s) of a time-space diagram with the axes and colours of all episodes."""
    metres, fastest, last = (max(float(np.nanmax(track[name], initial=1)) for track in episodes.values())
                             for name in ("along", "speed", "step"))
    fastest, on = 5 * np.ceil(fastest / 5), np.isfinite(track["along"])
    rows = (values[on] for values in (*map(track.get, TRAJECTORY), shown))
    interval = float(facts["interval"])
    pixels = pictures.trajectories(*rows, PIXELS, (last + 1, metres + 1, fastest, interval))
    return pixels, (last + 1) * interval / 60, metres / 1000, fastest


def named(controller):
    """A controller's name as HTML."""
    return "without control" if controller == "none" else html.escape(controller)


def traffic_section(episodes, facts):
    """Histograms of speeds and gaps, and the mean speed by time."""
    fastest = max(float(track["speed"].max()) for track in episodes.values())
    speed, gap = np.linspace(0, fastest + 1e-3, BINS + 1), np.linspace(0, GAP_M, BINS + 1)

    def shares(column, edges):
        return {named(n): 100 * np.histogram(t[column], edges)[0] / len(t[column]) for n, t in episodes.items()}
    mean = {named(n): by_minute(t["step"], t["speed"], facts) for n, t in episodes.items()}
    return ["<h2>Speeds and gaps</h2><div class=row>",
            steps("Speed", speed, shares("speed", speed), "m/s; % of all vehicles and steps", COLOURS),
            steps("Gap to the leader", gap, shares("gap", gap), "m; % of all vehicles and steps", COLOURS),
            lines("Mean speed", mean, "time, min; m/s", True, COLOURS), "</div>"]


def by_minute(step, values, facts):
    """[(middle of a minute, mean of the values in it)]"""
    minute = (step * float(facts["interval"]) // 60).astype(int)
    total, count = np.bincount(minute, values.astype(float)), np.bincount(minute)
    return [(i + 0.5, float(total[i] / count[i])) for i in np.flatnonzero(count)]


def influence_section(episodes, facts):
    """Who is commanded: where along the road, how often, and how the policy's scores fall off with the rank."""
    acting = {named(n): track for n, track in episodes.items() if track["commanded"].any()}
    if not acting:
        return []
    edges = np.linspace(0, max(float(np.nanmax(track["along"], initial=1)) for track in acting.values()), PLACES + 1)
    where = {n: share_by_place(track, edges) for n, track in acting.items()}
    often = {n: by_minute(t["step"][t["icv"]], 100 * t["commanded"][t["icv"]], facts) for n, t in acting.items()}
    scores = {n: t["influence"].astype(float) for n, t in acting.items()}
    ranks = {n: [(rank, column[np.isfinite(column)].mean()) for rank, column in enumerate(s.T, 1)
                 if np.isfinite(column).any()] for n, s in scores.items()}
    pictures = [diagram(f"Commanded vehicles, {n}", t, t["commanded"], episodes, facts) for n, t in acting.items()]
    share = "; ".join(f"{n} {100 * t['commanded'].sum() / t['icv'].sum():.1f} %" for n, t in acting.items())
    return [f"<h2>Who is chosen</h2><p>Share of the connected vehicles commanded, over the episode: {share}.</p>",
            '<div class="row wide">', *pictures, "</div><div class=row>",
            steps("Where they are commanded", edges / 1000, where, "km along the main road; % of connected", COLOURS),
            lines("When they are commanded", often, "time, min; % of connected", True, COLOURS),
            lines("Influence score by rank", ranks, "rank; mean score", False, COLOURS), "</div>"]


def share_by_place(track, edges):
    """Per cent of the connected vehicles between `edges` of the main road that were commanded."""
    on = np.isfinite(track["along"])
    chosen, connected = (np.histogram(track["along"][on & track[name]], edges)[0] for name in ("commanded", "icv"))
    return 100 * chosen / np.maximum(connected, 1)


def own(result):
    """The controllers; the one that it is about, the policy or else the last one, comes first."""
    names = list(result["summary"])
    mine = "policy" if "policy" in names else names[-1]
    return [mine, *(name for name in names if name != mine)]


def shield_section(path, result):
    """The shield's log: reasons by controller, and when."""
    with open(path, newline="", encoding="utf-8") as file:
        events = [(row["controller"], row["reason"], int(row["step"])) for row in csv.DictReader(file)]
    if not events:
        return ["<h2>Shield</h2><p>The shield changed no command.</p>"]
    names = [name for name in own(result) if name != "none"]
    count = Counter((name, reason) for name, reason, _ in events)
    reasons = sorted({reason for _, reason, _ in events})
    episodes = len(result["seeds"]) * max(len(result.get("variants", ())), 1)
    rows = [[reason, *(f"{count[n, reason] / episodes:.1f}" for n in names)] for reason in reasons]
    minutes = {n: Counter(step // 60 for name, _, step in events if name == n) for n in names}
    last = max(step for _, _, step in events) // 60
    return ["<h2>Shield</h2><p>Commands that the shield changed, per episode, by reason and by time.</p>",
            "<div class=beside>", grid(["reason", *names], rows, mine=1),
            lines("Commands changed in 60 control steps", {
                html.escape(n): [(m + 0.5, c[m] / episodes) for m in range(last + 1)] for n, c in minutes.items()},
                "60 control steps; number per episode", True, COLOURS), "</div>"]
