"""The command line that all scripts share: --config FILE and section.key=value."""
import argparse
import tempfile

from configs.loader import ConfigError, load_config


def parse(doc, arguments=None, add=None, load=True):
    """Parsed arguments with `.config`, the resolved Config (unless `load` is off). `add(parser)` adds a script's own
    options.

    Raises ConfigError for a wrong configuration; argparse itself exits with 2 for wrong options.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.register("action", None, Once)
    parser.add_argument("--config", default="configs/default.yaml", help="YAML file (default: configs/default.yaml)")
    if add:
        add(parser)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the configuration")
    options = parser.parse_intermixed_args(arguments)  # overrides may stand between options
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ConfigError(f"{error.strerror}: make room, or let TMPDIR name a folder that has some") from None
    options.config_file = options.config
    options.config = load_config(options.config_file, options.overrides) if load else None
    return options


class Once(argparse.Action):
    """Any option with a value: a second one would silently replace the first, an empty one count as none."""
    given = False

    def __call__(self, parser, namespace, values, option_string=None):
        if self.given:
            parser.error(f"{option_string} {values}: there is one already; run the command once for each")
        if values == "":
            parser.error(f"{option_string} '': expected a value; is a variable of the shell not set?")
        self.given = option_string is not None
        setattr(namespace, self.dest, values)
