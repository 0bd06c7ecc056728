"""From a raw sample to the frames that are trained on: each holds its graph and the vehicles' motion."""
import numpy as np

from env.graph import GLOBAL, SCENE, SURROUND, neighbour_graph, node_features


def build_record(sample, shape, radius, k_shift=0):
    """The float16 frames [F] of a raw sample (see data.collect.cut_sample); ValueError says what is wrong with it.
    `k_shift` is added to the number of neighbours that the scene had."""
    series, record = parse(sample, shape), np.zeros(shape.frames, shape._replace(storage="float16").frame())
    record["neighbours"], record["extent"] = -1, sample["extent"]
    present = series["present"] > 0
    n, before = present.shape[1], np.zeros(present.shape[1], bool)
    odometer = np.zeros(n)
    for f, here in enumerate(present):
        scene = np.zeros(n, SCENE)
        for name in SCENE.names:
            scene[name] = series[name][f]
        fresh, members = here & (~before | (series["fresh"][f] > 0)), np.flatnonzero(here)
        record["present"][f, :n], record["fresh"][f, :n] = here, fresh
        record["speed"][f, :n], record["conflict"][f, :n] = scene["speed"], series["conflict"][f]
        record["moved"][f, :n] = np.where(here & ~fresh, scene["odometer"] - odometer, 0)
        before, odometer = here, scene["odometer"]
        k = min(max(int(series["k"][f]) + k_shift, 1), shape.k)
        _graph_of_frame(record, f, scene, members, k, radius, series["time"][f])
        record["globals"][f], record["surround"][f, members] = series["globals"][f], series["surround"][f][members]
    return record


def parse(sample, shape):
    """{field: float64 array with the frame axis first} of a raw sample; ValueError names a field that is missing, of
    another size, or not finite."""
    try:
        n, series = len(sample["ids"]), {}
        sizes = {"k": (), "time": (), "globals": (len(GLOBAL),), "surround": (n, len(SURROUND)),
                 **dict.fromkeys(("present", "fresh", "conflict", *SCENE.names), (n,))}
        for name, size in sizes.items():
            series[name] = _numbers(name, sample[name], (shape.frames, *size))
        if not (n <= shape.vehicles and np.isfinite(sample["extent"]) and sample["extent"] > 0):
            raise ValueError(f"{n} vehicles of at most {shape.vehicles}, extent {sample['extent']}")
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a sample: {type(error).__name__} {error}") from None
    return series


def _numbers(name, values, size):
    try:
        values = np.array(values, float)
    except ValueError:
        raise ValueError(f"{name}: rows of unequal length, or no numbers") from None
    if values.shape != size:
        raise ValueError(f"{name}: shape {values.shape}, expected {size}")
    if not np.isfinite(values).all():
        raise ValueError(f"{name}: NaN or infinite")
    return values


def _graph_of_frame(record, f, scene, members, k, radius, time):
    """Fill nodes, neighbours and edges of frame f; absent vehicles have none and are nobody's neighbour."""
    compact = np.full(len(scene) + 1, -1)  # index in the sample -> index among the members; -1 stays -1
    compact[members] = np.arange(len(members))
    inside = scene[members]
    record["usable"][f, members] = inside["lead"] != -2
    inside["lead"] = np.where(inside["lead"] >= 0, compact[inside["lead"]], -1)
    near, edges = neighbour_graph(inside, k, radius)
    record["nodes"][f, members] = node_features(inside, record["extent"][f], time)
    record["neighbours"][f, members, :near.shape[1]] = np.append(members, -1)[near]
    record["edges"][f, members, :near.shape[1]] = edges


def not_finite(records):
    """[(row, field)] of an array [samples, F] of frames in which a value is NaN or infinite."""
    bad = []
    for name in records.dtype.names:
        values = records[name].reshape(len(records), -1)
        if values.dtype.kind == "f":
            bad += [(int(row), name) for row in np.flatnonzero(~np.isfinite(values).all(1))]
    return sorted(bad)
