"""Features on disk: float16 as they are, or int8 with a scale and a zero per feature.

int8 halves the size. A code c stands for scale * (c - zero); the scale divides a feature's range in the data set,
extended to 0, into 253 steps, so a value read back is wrong by half a step at most, and by float16's rounding, of which
it is made (`largest_error`). 0, which stands for "nobody" and "nothing", is exact.
"""
import numpy as np

from data.layout import FEATURES

STEPS = 253


def value_ranges(chunks):
    """{part: [least values, largest values]} by feature over arrays of float16 frames."""
    low, high = ({name: np.zeros(len(columns)) for name, columns in FEATURES.items()} for _ in range(2))
    for frames in chunks:
        for name, columns in FEATURES.items():
            values = frames[name].reshape(-1, len(columns))
            low[name], high[name] = np.minimum(low[name], values.min(0)), np.maximum(high[name], values.max(0))
    return {name: [low[name].tolist(), high[name].tolist()] for name in FEATURES}


def scale_and_zero(low, high):
    """Arrays (scale, zero) by feature, float32."""
    low, high = np.asarray(low), np.asarray(high)
    scale = (high - low) / STEPS
    scale = np.where(scale > 0, scale, 1)
    return scale.astype(np.float32), np.rint(-127 - low / scale).astype(np.float32)


def largest_error(ranges):
    """{part: {feature: largest error of a value read back}}."""
    def error(low, high):
        return (np.array(high) - low) / STEPS / 2 + np.spacing(np.maximum(np.abs(low), high).astype(np.float16)) / 2.0
    return {name: dict(zip(FEATURES[name], error(*limits).round(6).tolist())) for name, limits in ranges.items()}


def encode(values, low, high):
    """int8 codes of features [..., C] in the range [low, high] by feature."""
    scale, zero = scale_and_zero(low, high)
    return (np.rint(values.astype(np.float32) / scale) + zero).astype(np.int8)


def features(frames, name, ranges):
    """float32 values of one part of an array of frames, however it is stored."""
    if not ranges:
        return frames[name].astype(np.float32)
    scale, zero = scale_and_zero(*ranges[name])
    return (frames[name] - zero) * scale
