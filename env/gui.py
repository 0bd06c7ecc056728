"""sumo-gui instead of sumo, for looking at traffic live: the same simulation in a window."""
import os
import tempfile

from env.launch import SumoError
from env.sumo import Sumo

DELAY_MS = 200  # between two control steps; the window has a slider for it
SETTINGS = ('<viewsettings><scheme name="large vehicles"><vehicles vehicle_constantSize="1" vehicle_minSize="5"/>'
            '</scheme></viewsettings>')
ICV, COMMANDED = (30, 144, 255, 255), (255, 0, 170, 255)  # red, green, blue, opacity; human drivers stay yellow


class SumoGui(Sumo):
    """A Sumo with a window, which starts running and closes with the episode."""
    binary = "sumo-gui"

    def __init__(self, *arguments):
        check_display()
        super().__init__(*arguments)

    def _start(self, arguments):
        with tempfile.NamedTemporaryFile("w", suffix=".xml", encoding="utf-8") as settings:
            settings.write(SETTINGS)
            settings.flush()
            super()._start([*arguments, "--start", "--quit-on-end", "--delay", str(DELAY_MS),
                            "--window-size", "1400,700", "--gui-settings-file", settings.name])

    def load(self, arguments):
        """Start another episode, in a new window."""
        self.close()
        self._start(arguments)

    def paint(self, icvs, commanded):
        """Colour vehicles (names as bytes): all connected ones, and those that are being commanded."""
        for name in icvs:
            colour = COMMANDED if name in commanded else ICV
            self._ask(lambda: self.client.vehicle.setColor(name.decode(), colour))


def check_display():
    """SumoError when there is nothing to draw on."""
    if not os.environ.get("DISPLAY"):
        raise SumoError("sumo-gui needs a display, and DISPLAY is not set: run it on a desktop or through `ssh -X`, "
                        "or draw the episode without one: evaluate.py --animate FILE.gif")
