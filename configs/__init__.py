"""Configuration: dataclasses with units and meaning (schema), and the strict YAML loader (loader)."""
from configs.files import WriteError
from configs.loader import ConfigError, dump_config, from_dict, load_config, to_dict
from configs.schema import Config

__all__ = ["Config", "ConfigError", "WriteError", "dump_config", "from_dict", "load_config", "to_dict"]
