"""Pictures for a page without scripts and without network: inline SVG and PNG. Text is HTML, so that it keeps its size.

A picture is a `plot`: a drawing that stretches to the frame, and around it ticks placed by percent. Colours are names
of CSS variables (--c0, --c1, ...), so that light and dark pages have their own.
"""
import base64
import html
import itertools
import math
import struct
import zlib

import numpy as np

SLOW_TO_FAST = ((206, 26, 52), (232, 82, 38), (247, 160, 38), (84, 178, 121), (40, 117, 190))  # red: stands still
COLOURS = ("--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c0")


def png(pixels, palette):
    """PNG file of indices [height, width] uint8 into `palette` [(r, g, b)]; index 0 is transparent."""
    def chunk(kind, data):
        return struct.pack("!I", len(data)) + kind + data + struct.pack("!I", zlib.crc32(kind + data))
    height, width = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels], 1).tobytes()  # no filter before each row
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack("!IIBBBBB", width, height, 8, 3, 0, 0, 0))
            + chunk(b"PLTE", bytes(np.array(palette, np.uint8))) + chunk(b"tRNS", b"\0")
            + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b""))


def image(pixels, palette, alt):
    """HTML of a picture: pixels [H, W] of a palette, `alt` for who does not see it."""
    data = base64.b64encode(png(pixels, palette)).decode()
    return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{data}">'


def speed_palette():
    """256 colours: 0 is transparent, 1 standing still to 255 the fastest."""
    at = np.linspace(0, len(SLOW_TO_FAST) - 1, 255)
    channels = [np.interp(at, range(len(SLOW_TO_FAST)), channel) for channel in zip(*SLOW_TO_FAST)]
    return [(0, 0, 0), *np.round(np.stack(channels, 1)).astype(int).tolist()]


def speed_key(fastest):
    """Legend of `speed_palette`."""
    colours = ",".join(f"rgb{c}" for c in SLOW_TO_FAST)
    return (f'<div class=key><span>0 m/s</span><span class=ramp style="background:linear-gradient(90deg,{colours})">'
            f"</span><span>{fastest:.0f} m/s</span></div>")


def trajectories(step, vehicle, place, speed, shown, shape, extent):
    """Pixels [height, width] of vehicles' lines in time and space, 0 = nobody, 1 to 255 = speed; the slowest wins.

    The arrays have one row per vehicle and control step; a line to the vehicle's next step is drawn where `shown`.
    `extent`: steps, metres and m/s of the whole picture, and s of a step.
    """
    (height, width), (steps, metres, fastest, interval) = shape, extent
    order = np.lexsort((step, vehicle))
    t, who, y, v, drawn = (values[order].astype(float) for values in (step, vehicle, place, speed, shown))
    forward = np.diff(y)
    joined = (drawn[:-1] > 0) & (np.diff(who) == 0) & (np.diff(t) == 1)
    # A new lap begins at 0 again, and who turns off and crosses the road has not driven along it.
    begin = np.flatnonzero(joined & (forward >= 0) & (forward <= 2 * fastest * interval))
    share = np.linspace(0, 1, 1 + math.ceil((forward[begin] / metres * height).max(initial=1)))[None]
    column = ((t[begin, None] + share) / steps * width).astype(int)
    row = ((1 - (y[begin, None] + share * forward[begin, None]) / metres) * height).astype(int)
    colour = 1 + np.clip((v[begin, None] * (1 - share) + v[begin + 1, None] * share) / fastest, 0, 1) * 254
    pixels = np.full(height * width, 256)
    flat = np.clip(row, 0, height - 1) * width + np.clip(column, 0, width - 1)
    np.minimum.at(pixels, flat.ravel(), colour.ravel().astype(int))
    return np.where(pixels == 256, 0, pixels).astype(np.uint8).reshape(height, width)


def ticks(low, high, most=5):
    """Round numbers between low and high, at most `most` + 1."""
    step = 10 ** math.floor(math.log10(max(high - low, 1e-12) / most))
    step = next(s for s in (step, 2 * step, 2.5 * step, 5 * step, 10 * step, 20 * step) if (high - low) / s <= most)
    return [round(i * step, 12) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def plot(title, drawing, x, y, unit="", key="", ratio=2, left=2.9):
    """A figure: `drawing` fills the frame, x and y = (low, high) or {text: share}; `unit` is written below; `left` rem
    are kept for the text of y."""
    def marks(axis, style):
        if not isinstance(axis, dict):
            low, high = axis
            axis = {f"{t:g}": (t - low) / (high - low) for t in ticks(low, high)}
        return "".join(f'<span style="{style.format(100 * share)}">{text}</span>' for text, share in axis.items())
    left_of = "left:{0:.2f}%;transform:translateX(-{0:.0f}%)"  # the outer ones stay inside
    return (f'<figure><figcaption>{title}</figcaption><div class=plot style="--ratio:{ratio};--left:{left}rem">'
            f'<div class=y>{marks(y, "bottom:{0:.2f}%")}</div><div class=box>{drawing}</div>'
            f'<div class=x>{marks(x, left_of)}</div>'
            f"<div class=unit>{unit}</div></div>{key}</figure>")


def key(names):
    """Legend: {text: colour}."""
    return "<div class=key>" + "".join(f'<span><i style="background:var({colour})"></i>{text}</span>'
                                       for text, colour in names.items()) + "</div>"


def svg(body):
    """A drawing of 100 x 100 units that fills its place."""
    return f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">{body}</svg>'


def path(points, x, y, colour, width=2, fill=False):
    """An SVG line through [(x, y)], or the area between it and the lower edge; x and y = (low, high)."""
    at = [f"{100 * (a - x[0]) / (x[1] - x[0]):.2f} {100 - 100 * (b - y[0]) / (y[1] - y[0]):.2f}" for a, b in points]
    if fill:
        return f'<path d="M{at[0].split()[0]} 100L{"L".join(at)}L{at[-1].split()[0]} 100Z" fill="var({colour})"/>'
    at += at if len(at) == 1 else []  # round caps make a dot of it
    return (f'<path d="M{"L".join(at)}" fill="none" stroke="var({colour})" stroke-width="{width}" '
            'stroke-linecap="round" stroke-linejoin="round" vector-effect="non-scaling-stroke"/>')


def lines(title, series, unit="", zero=False, colours=(), about=""):
    """Line chart of {text: [(x, y)]}; `zero` begins the y axis at 0 or below; `colours` {text: colour} are kept, the
    other lines take what is left; `about` is written below."""
    series = {name: kept for name, points in series.items() if (kept := [p for p in points if math.isfinite(p[1])])}
    if not series:
        return ""
    x, y = (span([p[axis] for points in series.values() for p in points]) for axis in (0, 1))
    low = min(y[0], 0.0) if zero else y[0]
    y = low, low + 1.05 * (y[1] - low)  # a little air above
    colours = coloured(series, colours)
    drawing = svg("".join(path(points, x, y, colours[name], 2 if points[1:] else 7) for name, points in series.items()))
    only = {p[0] for points in series.values() for p in points}
    return plot(title, drawing, {f"{only.pop():g}": 0.5} if len(only) == 1 else x, y, unit,
                (key(colours) if len(series) > 1 else "") + (f"<p class=about>{about}</p>" if about else ""))


def stacked(title, x, parts, unit=""):
    """Areas on top of each other: x [n], parts {text: [n]}."""
    total = np.cumsum(list(parts.values()), 0)
    xs, ys, colours = span(x), (0.0, max(float(total[-1].max()), 1e-9) * 1.05), coloured(parts)
    areas = [path(list(zip(x, top)), xs, ys, colours[name], fill=True) for name, top in zip(parts, total)]
    return plot(title, svg("".join(areas[::-1])), xs, ys, unit, key(colours))


def steps(title, edges, heights, unit="", colours=()):
    """Histograms {text: heights [n]} over common `edges` [n + 1], as outlines."""
    outlines = {name: [(x, h) for h, a, b in zip(values, edges, edges[1:]) for x in (a, b)]
                for name, values in heights.items()}
    return lines(title, outlines, unit, zero=True, colours=colours)


def intervals(title, rows, colours):
    """Means with their 95 % intervals, one row each: {text: (mean, half width or None)}."""
    rows, n = {name: (mean, half or 0.0) for name, (mean, half) in rows.items()}, len(rows)
    low, high = span([0.0, *(mean + sign * half for mean, half in rows.values() for sign in (-1, 1))])
    x, y = (low - 0.04 * (high - low), high + 0.04 * (high - low)), (0, n)
    colours, body = coloured(rows, colours), [path([(0, 0), (0, n)], x, y, "--line", 1)]
    for at, (name, (mean, half)) in zip(np.arange(n - 0.5, 0, -1), rows.items()):
        body += [path([(mean - half, at), (mean + half, at)], x, y, colours[name], 3),
                 path([(mean, at)], x, y, colours[name], 11)]
    names = {name: 1 - (i + 0.5) / n for i, name in enumerate(rows)}
    return plot(title, svg("".join(body)), x, names, ratio=8 / max(n, 4), left=7.5)


def coloured(names, fixed=()):
    """{name: colour}, the fixed ones and others in turn."""
    fixed = {name: fixed[name] for name in names if name in fixed}
    left = itertools.cycle([colour for colour in COLOURS if colour not in fixed.values()] or COLOURS)
    return {name: fixed.get(name) or next(left) for name in names}


def grid(head, rows, mine=None):
    """An HTML table; column `mine` stands out."""
    def line(tag, cells):
        return "<tr>" + "".join(f"<{tag}{' class=mine' if i == mine else ''}>{html.escape(str(c))}</{tag}>"
                                for i, c in enumerate(cells)) + "</tr>"
    return "<div class=scroll><table>" + line("th", head) + "".join(line("td", r) for r in rows) + "</table></div>"


def span(values):
    """(low, high) of some numbers, never empty: one alone is in the middle."""
    low, high = float(min(values)), float(max(values))
    around = (abs(low) / 2 or 0.5) * (high == low)
    return low - around, high + around
