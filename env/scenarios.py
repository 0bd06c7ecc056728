"""Built-in scenarios, generated from numbers by netconvert, and user networks given as a .sumocfg.

`build_scenario` is the only entry: it returns the path of a .sumocfg that SUMO can run.
"""
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

from env.launch import OUT_OF_THE_WAY, ROOT, SumoError, explained, find_binary, put_in, sumo_environment
from env.networks import NETWORKS

PLACES = "run.name, run.folder, data.folder or TMPDIR"  # where a built-in scenario is generated
OUTPUTS = ("netstate-dump", "netstate", "ndump", "summary", "tripinfo", "vehroutes", "personinfo", "log", "log-file",
           "message-log", "error-log", "pedestrian.jupedsim.wkt", "pedestrian.jupedsim.py",
           "save-state.files")  # SUMO's options that name a file to write, besides all in -output and .output
SAVE_AND_END = {"save-configuration", "C", "save-template", "save-schema"}  # SUMO's options that let it do only that
READ_AHEAD_S = 200  # SUMO's `route-steps`
REREAD = r",|%[0-9a-fA-F]|\$\{"  # in the name of a file's folder: SUMO splits there, decodes %20, puts in ${HOME}


def build_scenario(cfg, folder):
    """Path of the .sumocfg of `cfg.env.scenario`; built-in ones are generated once below `folder`.

    The folder's name holds a hash of all that netconvert is given, so several demands live side by side.
    Raises SumoError (with SUMO's own words) for a missing file or a network that netconvert refuses, and for a folder
    whose files SUMO would look for under another name.
    """
    name = cfg.env.scenario
    if name not in NETWORKS:
        return _user_scenario(name)
    files = {root: list(lines) for root, lines in NETWORKS[name](cfg, cfg.env.horizon_s + cfg.env.warmup_s).items()}
    made_of = json.dumps([files, version("eclipse-sumo")])
    target = Path(folder).absolute() / f"{name}-{hashlib.sha1(made_of.encode()).hexdigest()[:8]}"
    config = target / f"{name}.sumocfg"
    _check_folder(target, PLACES)
    if not config.exists():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".building-", dir=target.parent,
                                             ignore_cleanup_errors=True) as work:
                for root, lines in files.items():
                    (Path(work) / f"{root}.xml").write_text(_xml(root, lines), encoding="utf-8")
                _netconvert(Path(work), name)
                os.replace(work, target)
        except OSError as error:
            if not config.exists():  # else another process was first
                raise SumoError(f"{target} ({PLACES} says where): could not be written: {error.strerror}") from None
    return str(config)


def path_of(scenario):
    """Where a .sumocfg is; the shipped ones (configs/...) are found from any folder."""
    path, shipped = Path(scenario), ROOT / scenario
    return shipped if not path.exists() and path.parts[:1] == ("configs",) and shipped.is_file() else path


def options_of(scenario):
    """{option: value} of a .sumocfg, as SUMO reads it; {} when it is gone or no XML (SUMO itself will say so)."""
    try:
        root = ElementTree.fromstring(as_unicode(path_of(scenario).read_bytes()))
        return {e.tag: put_in(e.get("value", e.get("v", ""))) for e in root.iter()}
    except (OSError, ElementTree.ParseError, ValueError, LookupError):
        return {}


def as_unicode(xml):
    """XML (bytes), as text if in an encoding of several bytes, which SUMO's parser knows and Python's does not."""
    declared = re.match(rb"""<\?xml[^>]*encoding=["']((?!utf|iso|us-|win)[^"']+)["'][^>]*\?>""", xml, re.I)
    return xml[declared.end():].decode(declared[1].decode()) if declared else xml


def own_scale(scenario):
    """The demand scale that a .sumocfg sets itself; 1 where it sets none that SUMO would take."""
    try:
        return float(options_of(scenario).get("scale", 1.0))
    except ValueError:
        return 1.0


def without_outputs(scenario):
    """Words for SUMO's command line that send what a .sumocfg lets it write (`fcd-output` ...) nowhere: simulators that
    run at once would write over each other, and over what the user has there."""
    options = options_of(scenario)
    nowhere = {name: os.devnull for name, value in options.items()
               if value and (name.endswith(("-output", ".output")) or name in OUTPUTS)}
    nowhere |= {name: "-1" for name in ("save-state.period", "save-state.times") if name in options}
    if scenario not in NETWORKS:  # vehicles may have such devices by their type
        nowhere |= {"device.ssm.file": os.devnull, "device.toc.file": os.devnull}
    return [word for name, value in nowhere.items() for word in (f"--{name}", value)]


def check_traffic(name, arguments, horizon_s):
    """SumoError where SUMO will not drive a user's scenario to its end, as for a route over edges that do not meet. Its
    words are passed on where it leaves traffic out (what does not stand in the order of departures; `--no-warnings`
    hides that)."""
    start = start_of(name) if name not in NETWORKS else None
    if start is None:
        return
    words = [word for word in arguments if word != "--no-warnings"]
    words += ["--end", str(start + horizon_s + READ_AHEAD_S), "--remote-port", "0"]  # whose scenario waits for a client
    words[words.index("--mesosim") + 1] = "true"  # routes are read as time goes on, and this is the quickest way
    ended, said = _dry_run(words)
    if ended:  # would it be so vehicle by vehicle too? (The sublane model is never mesoscopic.)
        words[words.index("--mesosim") + 1] = "false"
        ended, said = _dry_run(words)  # what it says now counts: some are refused in the mesoscopic model only
        if ended:
            raise SumoError("SUMO ends before the episode does. It said:\n" + "\n".join(said))
    if said:
        print(f"WARNING: scenario {name}: not all of its traffic will be there. SUMO said:", *said, sep="\n",
              file=sys.stderr)


def _dry_run(words):
    """(whether SUMO refused to go on, what it said about that and about traffic that it left out)."""
    try:
        done = subprocess.run([find_binary("sumo"), *words], capture_output=True, text=True, errors="replace",
                              env=sumo_environment(), timeout=20, **OUT_OF_THE_WAY)
    except subprocess.TimeoutExpired:
        return False, []
    said = [line for line in done.stderr.splitlines()
            if "sorted by departure" in line or line.startswith("Error") and "mesoscopic" not in line
            and "Could not set option" not in line]  # said of an empty section of the file
    return done.returncode != 0, said


def start_of(scenario):
    """The begin that a .sumocfg sets, s; None where SUMO would not take it."""
    options = options_of(scenario)
    try:
        return seconds_of(options.get("begin", options.get("b", "0")))
    except ValueError:
        return None


def seconds_of(text):
    """A time as SUMO writes it, s or [days:]hours:minutes:seconds, in s; ValueError when it is none."""
    return sum(float(part) * unit for part, unit in zip(reversed(text.split(":")), (1, 60, 3600, 86400)))


def _user_scenario(name):
    path = path_of(name)
    if path.suffix != ".sumocfg":
        raise SumoError(f"env.scenario: {name!r} is neither built in ({', '.join(NETWORKS)}) nor a .sumocfg file")
    if not path.is_file():
        found = "a folder" if path.is_dir() else "no such file"
        raise SumoError(f"env.scenario: {path}: {found}; expected a .sumocfg, its path relative to {Path.cwd()}")
    _check_folder(path.absolute().parent, "env.scenario")  # of a link: SUMO looks beside it for the other files
    if (options := options_of(path)) and not {"net-file", "net", "n"} & options.keys():
        raise SumoError(f"env.scenario: {path} names no network; expected <net-file value=\"...\"/> inside <input>")
    if found := sorted(SAVE_AND_END & options.keys()):
        raise SumoError(f"env.scenario: {path} has {found[0]}, with which SUMO writes a file and ends; remove it")
    return str(path.absolute())


def _check_folder(folder, keys):
    wrong = re.search(REREAD, str(folder))
    if wrong:
        raise SumoError(f"{folder}: SUMO finds no files in a folder with {wrong[0][0]!r} in its name; rename it or "
                        f"change {keys}")


def _netconvert(work, name):
    parts = ["-n=nodes.xml", "-e=edges.xml", f"-o={name}.net.xml"]  # in `work`: a colon before them would be a port's
    if (work / "connections.xml").exists():
        parts.append("-x=connections.xml")
    command = [find_binary("netconvert"), *parts, "--no-turnarounds", "true", "--xml-validation", "never"]
    done = subprocess.run(command, capture_output=True, text=True, env=sumo_environment(), cwd=work,
                          **OUT_OF_THE_WAY)
    if done.returncode:
        raise SumoError(f"netconvert refused the network of scenario {name!r}; change `{name}:` in the configuration. "
                        f"It said:\n{explained(done.stderr.strip())}")
    (work / f"{name}.sumocfg").write_text(_xml("configuration", [
        f'<input><net-file value="{name}.net.xml"/><route-files value="routes.xml"/></input>']), encoding="utf-8")


def _xml(root, lines):
    return f"<{root}>\n" + "\n".join("    " + line for line in lines) + f"\n</{root}>\n"
