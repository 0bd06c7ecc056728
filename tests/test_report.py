"""The report and what it draws: tracks against the road, pictures by hand, and the page in a real browser."""
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
from data_sets import silent
from scenes import build

import evaluate
from configs import ConfigError, WriteError, dump_config, load_config
from env import gui, sumo
from env.baselines import BASELINES
from env.launch import SumoError
from env.workers import WorkerError
from runtime import animation, pictures, report
from runtime.metrics import VOCABULARY
from runtime.pictures import coloured
from runtime.report import POLICY, build_report, cell
from runtime.report_traffic import COLOURS, shield_section, time_space
from runtime.scores import differences, save_scores
from runtime.tracks import DamagedFile, load_tracks, save_tracks

CONTROLLERS = ["none", "random", "policy"]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: the page is not rendered")
PROBE = """<script>addEventListener("load", () => {
  const texts = [...document.querySelectorAll("body *")].filter(e => [...e.childNodes].some(
    n => n.nodeType == 3 && n.data.trim()) && e.offsetParent);
  parent.postMessage(JSON.stringify([innerWidth, document.documentElement.scrollWidth,
    Math.min(...texts.map(e => parseFloat(getComputedStyle(e).fontSize))), document.querySelectorAll("figure").length,
    [...document.images].every(i => i.complete && i.naturalWidth > 0),
    getComputedStyle(document.body).backgroundColor]), "*");
})</script>"""
FRAME = """<title></title><meta name=color-scheme content="light dark"><script>
onmessage = e => document.title = e.data;</script><iframe width={} height=900 frameborder=0 src=report.html></iframe>"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder with everything in it: real episodes of a minute, invented learning curves, a table that is wide."""
    folder = tmp_path_factory.mktemp("runs") / "trial"
    folder.mkdir()
    cfg = load_config("configs/smoke.yaml", ["evaluate.workers=1", "env.horizon_s=60", "evaluate.sample=true"])
    cfg.env.terminate_on_collision, said = False, ([], [])
    first, second = (lambda *text, lines=lines: lines.append(text[-1]) for lines in said)
    rows, log = evaluate.evaluate(cfg, CONTROLLERS, [5], {"policy": build("small").eval()}, folder / "scenario", first)
    tracks = evaluate.watch(cfg, CONTROLLERS, 5, {"policy": build("small").eval()}, folder / "scenario", second)
    more = [{**rows[1], "controller": name} for name in ("follower_stopper", "lane_advice", "pi_saturation")]
    rows = [*rows[:2], *more, rows[2]]
    save_scores(folder / "evaluation.json", "corridor", [5], rows, differences(rows), evaluate.SHIELD_LOG, log)
    save_tracks(folder / "evaluation.tracks.npz", tracks, cfg.env.control_interval, 5)
    rows = [{**{name: 1.0 + epoch for name in VOCABULARY}, "phase": phase, "epoch": epoch, "env_steps": 9 * epoch}
            for phase in (1, 2, 3) for epoch in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dump_config(cfg, folder / "config.yaml")
    (folder / "state.json").write_text(json.dumps({
        "command": "coordinator.py a<b", "revision": "abc123", "steps": {"phase1": {"status": "done", "seconds": 3}}}))
    page = build_report(folder).read_text()
    return SimpleNamespace(folder=folder, page=page, said=said, recorded=tracks,
                           tracks=folder / "evaluation.tracks.npz")


def test_the_policy_is_compared_pair_by_pair(run):
    """Only the console had it, and it is the comparison that counts."""
    assert "the same traffic, paired" in run.page and "<td>policy - follower_stopper</td>" in run.page


# ---- tracks ----------------------------------------------------------------------------------------------------

def test_recorded_episode_is_the_one_that_was_scored(run):
    """The same words about arrivals: neither the recording nor another process changes a trajectory."""
    words = run.said
    assert len(words[0]) == 3 and sorted(words[0]) == sorted(words[1])


def test_place_along_the_main_road_of_the_corridor_is_x(run):
    """The mainline is straight and begins at x = 0; the ramps come from below and are beside it."""
    for track in load_tracks(run.tracks)[0].values():
        on = np.isfinite(track["along"])
        assert on.any() and np.abs(track["along"] - track["x"])[on].max() < 1.0
        assert (track["y"][~on] < track["y"][on].min()).all() and (~on).any()


def test_tracks_hold_one_row_for_every_vehicle_and_step(run):
    episodes, facts = load_tracks(run.tracks)
    assert list(episodes) == CONTROLLERS and facts["seed"] == 5 and facts["interval"] == 1
    for name, track in episodes.items():
        assert len(set(zip(track["step"], track["vehicle"]))) == len(track["step"]) > 500
        assert (track["commanded"] <= track["icv"]).all() and track["commanded"].any() == (name != "none")
        assert np.isfinite(track["influence"]).any() == (name == "policy")
    scores = episodes["policy"]["influence"]
    assert (np.diff(scores[np.isfinite(scores).all(1)].astype(float)) <= 0).all()  # by rank


def test_no_control_the_best_rule_and_the_policy_are_recorded():
    means = {"none": 0, "random": -9, "idm": 2, "policy": 1}
    score = {name: {"s_total": {"mean": mean}} for name, mean in means.items()}
    assert evaluate.to_record(score) == ["none", "idm", "policy"] and evaluate.to_record({"none": {}}) == ["none"]


# ---- pictures --------------------------------------------------------------------------------------------------

def test_png_holds_the_pixels():
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 4)
    data, chunks, at = pictures.png(pixels, [(i, 2 * i, 3 * i) for i in range(12)]), {}, 8
    while at < len(data):
        size, kind = struct.unpack("!I4s", data[at:at + 8])
        chunks[kind] = data[at + 8:at + 8 + size]
        assert struct.unpack("!I", data[at + 8 + size:at + 12 + size])[0] == zlib.crc32(data[at + 4:at + 8 + size])
        at += 12 + size
    assert struct.unpack("!IIBB", chunks[b"IHDR"][:10]) == (4, 3, 8, 3) and chunks[b"PLTE"][3:6] == bytes((1, 2, 3))
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(3, 5)
    assert (rows[:, 0] == 0).all() and (rows[:, 1:] == pixels).all()


def draw(rows, shown=None):
    """Pixels of rows (step, vehicle, place, speed): 4 steps over 8 m, 8 x 4 pixels, fastest 10 m/s, steps of 1 s."""
    columns = [np.array(column) for column in zip(*rows)]
    return pictures.trajectories(*columns, np.ones(len(rows), bool) if shown is None else np.array(shown), (8, 4),
                                 (4, 8.0, 10.0, 1.0))


def test_a_vehicle_draws_a_line_from_step_to_step():
    pixels = draw([(0, 7, 0.5, 10.0), (1, 7, 4.5, 10.0), (2, 7, 4.5, 0.0)])
    assert (pixels[4:, 0] == 255).all() and pixels[3, 1:].tolist() == [64, 1, 0] and not pixels[:3].any()


def test_lines_end_where_a_vehicle_was_away_begins_a_new_lap_or_is_not_shown():
    assert not draw([(0, 7, 0.5, 10.0), (2, 7, 1.5, 10.0)]).any()
    assert not draw([(0, 7, 7.5, 10.0), (1, 7, 0.5, 10.0)]).any()
    assert not draw([(0, 7, 0.5, 10.0), (1, 8, 0.7, 10.0)]).any()
    rows = [(0, 7, 0.5, 10.0), (1, 7, 0.7, 10.0), (2, 7, 0.9, 10.0)]
    assert draw(rows, [True, False, True])[:, :2].any(0).tolist() == [True, True]  # the line ends where the next begins
    assert not draw(rows, [False, True, True])[:, 0].any()


def test_who_turns_off_and_crosses_the_road_draws_no_line():
    """A jump along it of 1 km in one step took 2 GB for the whole picture, and drew a line that nobody had driven."""
    rows = [(0, 7, 0.5, 10.0), (1, 7, 900.5, 10.0)]
    assert not pictures.trajectories(*map(np.array, zip(*rows)), np.ones(2, bool), (8, 4), (4, 1000.0, 10.0, 1.0)).any()


def test_the_slowest_of_several_vehicles_is_seen():
    """A jam on one lane beside free traffic on the other must not vanish."""
    fast, slow = [(0, 1, 0.5, 10.0), (1, 1, 0.5, 10.0)], [(0, 2, 0.5, 0.0), (1, 2, 0.5, 0.0)]
    assert draw(fast + slow)[7, 0] == draw(slow + fast)[7, 0] == 1


def test_one_point_alone_stands_in_the_middle_of_its_axis():
    """It lay in a corner, and beside the only epoch, 5, the axis named 6, 7, 8, 9 and 10. As wide as a line, it was
    hardly seen: after one epoch the figures looked empty."""
    drawn = pictures.lines("loss", {"loss": [(5, 0.3)]}, "epoch")
    assert 'd="M50.00 52.38L' in drawn and ">5</span>" in drawn and ">6</span>" not in drawn
    assert 'stroke-width="7"' in drawn and 'stroke-width="2"' in pictures.lines("loss", {"loss": [(5, 0.3), (6, 0.2)]})
    assert pictures.span([0.3]) == pytest.approx((0.15, 0.45)) and pictures.span([0, 0]) == (-0.5, 0.5)


def test_ticks_are_round_and_inside():
    assert pictures.ticks(0, 15) == [0, 5, 10, 15] and pictures.ticks(-0.21, 0.4) == [-0.2, 0, 0.2, 0.4]
    for low, high in ((0, 1), (3, 3.001), (-7, 9000), (0.2, 0.9)):
        assert all(low <= t <= high for t in pictures.ticks(low, high)) and 2 <= len(pictures.ticks(low, high)) <= 6


def test_means_are_given_with_as_many_digits_as_their_interval_allows():
    texts = [cell({"mean": m, "ci95": c}) for m, c in ((0.83456, 9.9), (914.2, 78.0), (0.1111, 0.0271), (0.0, 0.0),
                                                       (3.14159, None), (None, None), (2.0, 0.0))]
    assert texts == ["0.8 ± 9.9", "914 ± 78", "0.111 ± 0.027", "0", "3.14", "–", "2.00 ± 0"]


# ---- the page --------------------------------------------------------------------------------------------------

def test_report_shows_everything_and_escapes_it(run):
    headings = re.findall("<h2>(.*?)</h2>", run.page)
    assert headings == ["Time and space", "Scores", "Speeds and gaps", "Who is chosen", "Shield", "Phase 1", "Phase 2",
                        "Phase 3", "Memory and time", "How it was made"]
    shown = "without control", "abc123", "coordinator.py a&lt;b", "Lagrange multiplier", "1.28", "phase2:", "clipped"
    assert [text for text in shown if text not in run.page] == [] and "nan" not in re.sub("data:[^\"]*", "", run.page)


def test_parts_without_files_are_left_out(run, tmp_path):
    with pytest.raises(DamagedFile, match="no results there"):  # it wrote a report of nothing but versions
        build_report(tmp_path)
    shutil.copy(run.folder / "state.json", tmp_path)  # all there is after `--only report` with a mistyped name
    with pytest.raises(DamagedFile, match="no results there"):
        build_report(tmp_path)
    (tmp_path / "state.json").unlink()
    shutil.copy(run.folder / "evaluation.json", tmp_path)
    assert re.findall("<h2>(.*?)</h2>", build_report(tmp_path).read_text()) == ["Scores", "How it was made"]


@pytest.mark.parametrize("name, content", [
    ("state.json", "{}"), ("state.json", '{"command": "x", "steps": {"collect": 3}}'), ("evaluation.json", "null"),
    ("evaluation.json", '{"summary": {}}'), ("evaluation.tracks.npz", "abc"), ("evaluation.shield.csv", "a,b\n1,2\n"),
    ("metrics.jsonl", '{"phase": 2, "epoch": null, "time": "now", "return": 1}')])
def test_damaged_results_are_named(run, tmp_path, name, content):
    """Only JSON that could not be parsed was; the rest were tracebacks."""
    shutil.copy(run.folder / "evaluation.json", tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(DamagedFile, match=f"{name}: damaged"):
        build_report(tmp_path)


def test_report_is_about_the_policy_wherever_it_stands(tmp_path):
    """Of `--controllers policy,idm` the tiles at the top were those of idm."""
    assert report.own({"summary": {"none": 0, "policy": 0, "idm": 0}}) == ["policy", "none", "idm"]
    assert report.own({"summary": {"none": 0, "tuned": 0, "idm": 0}}) == ["idm", "none", "tuned"]
    path = tmp_path / "evaluation.shield.csv"
    path.write_text("controller,seed,step,slot,reason\nidm,1,3,4,clipped\n")
    page = "".join(shield_section(path, {"summary": {"none": 0, "policy": 0, "idm": 0}, "seeds": [1]}))
    assert "<th class=mine>policy</th>" in page


def test_every_rule_has_its_colour_everywhere():
    """`harmonise` was green among the scores and orange beside `without control`; lane advice was orange there."""
    fixed = [COLOURS.get(name) for name in BASELINES if name != "none"]
    assert None not in fixed and len(set(fixed)) == len(fixed)
    assert all(report.STYLE.read_text().count(f"{colour}:#") == 2 for colour in COLOURS.values())


def test_a_figure_alone_in_its_row_does_not_fill_a_desk():
    """Phase 2 of a run without a whole episode has one, which was 1340 pixels wide and taller than the window."""
    assert ".row>figure{max-width:44rem}" in report.STYLE.read_text()


def test_colours_do_not_run_out():
    """Nine controllers, or a sweep: IndexError at the end of a long run."""
    assert len(coloured([f"rule {i}" for i in range(20)])) == 20


def test_rates_of_the_shield_are_those_of_an_episode(tmp_path):
    """Of a suite they were as many times too high as it has variants."""
    log = tmp_path / "log.csv"
    log.write_text("controller,reason,step\n" + "policy,clipped,3\n" * 8)
    result = {"summary": {"none": 0, "policy": 0}, "seeds": [1, 2], "variants": {"a": 0, "b": 0, "c": 0, "d": 0}}
    assert "<td>clipped</td><td class=mine>1.0</td>" in "".join(shield_section(log, result))


@pytest.mark.parametrize("name", ["evaluation.json", "evaluation.tracks.npz", "state.json"])
def test_cut_results_are_named(run, tmp_path, name, monkeypatch, capsys):
    """A kill while they were written: BadZipFile and JSONDecodeError as tracebacks."""
    shutil.copytree(run.folder, tmp_path / "cut")
    path = tmp_path / "cut" / name
    path.write_bytes(path.read_bytes()[:-20])
    monkeypatch.setattr(sys, "argv", ["report", str(path.parent)])
    assert report.exit_code(report.main, (report.DamagedFile,)) == 2
    assert str(path) in capsys.readouterr().err


def browse(page, folder, width, *options):
    """(standard output, console lines) of headless Chromium showing a page `width` pixels wide."""
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
         "--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}", f"--window-size={width},6000", *options,
         page.as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@needs_chromium
@pytest.mark.parametrize("width, options, background", [
    (400, [], "rgb(255, 255, 255)"), (1400, ["--blink-settings=preferredColorScheme=0"], "rgb(18, 22, 28)")])
def test_page_is_legible_on_a_phone_and_on_a_desk(run, tmp_path, width, options, background):
    """Nothing is wider than the window, no text smaller than 11 pixels, every picture is there, light or dark."""
    assert POLICY in run.page
    page = tmp_path / "report.html"
    page.write_text(run.page.replace(POLICY, "script-src 'unsafe-inline'") + PROBE)
    (tmp_path / "frame.html").write_text(FRAME.format(width))  # windows are never narrower than 500 pixels
    told = browse(tmp_path / "frame.html", tmp_path, 1500, "--dump-dom", *options)[0]
    title = re.search("<title>(.*?)</title>", told).group(1)
    inner, needed, smallest, figures, complete, colour = json.loads(title.replace("&quot;", '"'))
    assert inner == width and needed <= width and smallest >= 11 and complete and colour == background
    assert figures == run.page.count("<figure>") >= 20


@needs_chromium
def test_page_has_no_console_error_and_asks_the_network_for_nothing(run, tmp_path):
    """Its own policy forbids everything that is not inside the file; what it forbids is an error on the console."""
    picture = tmp_path / "page.png"
    assert browse(run.folder / "report.html", tmp_path, 400, f"--screenshot={picture}")[1] == []
    assert struct.unpack("!I", picture.read_bytes()[16:20])[0] == 400 and picture.stat().st_size > 100_000
    page = tmp_path / "other.html"
    page.write_text(run.page + '<img src="http://127.0.0.1:9/x.png">')
    assert len(browse(page, tmp_path, 400, "--dump-dom")[1]) == 1


# ---- animation and live view -----------------------------------------------------------------------------------

def test_animation_shows_the_whole_episode(run, tmp_path):
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("PIL.Image")
    episodes, facts = load_tracks(run.tracks)
    track = episodes["policy"]
    short = {name: value[track["step"] < 3] if len(value) == len(track["step"]) else value[:3]
             for name, value in track.items()}
    np.savez(tmp_path / "short.npz", **facts, **{f"policy/{name}": value for name, value in short.items()})
    animation.draw(tmp_path / "short.npz", tmp_path / "drive.gif", say=silent)
    assert image.open(tmp_path / "drive.gif").n_frames == 3
    with pytest.raises(ConfigError, match="no episode of 'idm' in it, only of policy"):
        animation.draw(tmp_path / "short.npz", tmp_path / "drive.gif", "idm", silent)


def test_report_of_a_suite_tells_its_variants_apart(run, tmp_path):
    """It had the means over three networks only, and diagrams of one of them, which it did not name."""
    score = {"s_total": {"mean": 1.5, "ci95": 0.25}}
    table, = report.variant_table({"a.sumocfg": {"none": score, "policy": score}}, ["policy", "none"])
    assert "a.sumocfg" in table and table.count("1.50 ± 0.25") == 2 and report.variant_table({}, ["policy"]) == []
    save_tracks(tmp_path / "one.npz", run.recorded, 1.0, 5, "corridor.lanes=3 <b>")
    text = "".join(time_space(*load_tracks(tmp_path / "one.npz")))
    assert "seed 5 of corridor.lanes=3 &lt;b&gt;; the same" in text
    assert 50 < int(re.search(r"\((\d+) % of all vehicles and steps", text)[1]) < 100  # the rest are on the ramps


def test_time_space_diagrams_of_all_controllers_as_a_picture(run, tmp_path):
    pytest.importorskip("matplotlib")
    animation.draw_time_space(run.tracks, tmp_path / "time_space.png", silent)
    width, height = struct.unpack("!II", (tmp_path / "time_space.png").read_bytes()[16:24])
    assert width > 4 * height  # three panels


def test_a_full_disk_leaves_the_old_picture_and_is_named(run, tmp_path, monkeypatch):
    """Half of a GIF stood in its place, and the message was "[Errno 28] No space left on device"."""
    pytest.importorskip("matplotlib")

    def full(*_):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(animation, "FRAMES", 2)
    for draw_it, path in ((animation.draw, tmp_path / "drive.gif"), (animation.draw_time_space, tmp_path / "all.png")):
        path.write_bytes(b"old")
        with pytest.raises(WriteError, match=f"{path.name}: could not be written: No space left on device; make room"):
            draw_it(run.tracks, path, say=silent)
        assert path.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 2


def test_animation_that_cannot_be_is_refused_before_anything_starts(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="ends in .gif"):
        animation.check("drive.mp4")
    with pytest.raises(ConfigError, match="there is no folder"):
        animation.check(tmp_path / "none" / "drive.gif")
    monkeypatch.setattr(animation.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="matplotlib and pillow: .*pip install"):
        animation.check(tmp_path / "drive.gif")


@pytest.mark.parametrize("module, words, code, told", [
    (report, ["--help"], 0, "RUN_FOLDER"), (report, [], 2, "required: RUN_FOLDER"),
    (animation, ["--help"], 0, "FILE.gif"),
    (animation, ["a.npz", "b.png", "policy"], 2, "the diagrams show all controllers")])
def test_help_and_wrong_words(module, words, code, told, monkeypatch, capsys):
    """`--help` ended with 2, like a mistake."""
    monkeypatch.setattr(sys, "argv", ["program", *words])
    with pytest.raises(SystemExit) as end:
        module.main()
    assert end.value.code == code and told in "".join(capsys.readouterr())


def test_live_view_starts_the_window_with_the_same_episode(make, monkeypatch):
    started = []
    dies = lambda command, stderr: started.append(command) or subprocess.Popen(["true"])  # noqa: E731
    monkeypatch.setattr(sumo, "launch", dies)
    monkeypatch.setenv("DISPLAY", ":0")
    for backend in ("gui", "traci"):
        with pytest.raises(SumoError, match="ended before it could be connected"):
            make(backend=backend).reset(seed=5)
    (window, *shown), (plain, *arguments) = started
    assert window.endswith("/bin/sumo-gui") and plain.endswith("/bin/sumo")
    same = arguments.index("--remote-port")
    assert same > 10 and shown[:same] == arguments[:same]
    assert {"--start", "--quit-on-end", "--delay"} <= set(shown) - set(arguments)


def test_live_view_without_a_display_says_what_to_do(monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    with pytest.raises(SumoError, match="DISPLAY is not set.*--animate"):
        gui.check_display()
    cfg = load_config("configs/smoke.yaml")
    cfg.env.backend, cfg.rollout.restarts = "gui", 0
    with pytest.raises(WorkerError, match="DISPLAY is not set"):
        evaluate.watch(cfg, ["none"], 5, say=silent)
