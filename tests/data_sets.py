"""A small data set's configuration and hashes, for the tests of data/."""
from configs import load_config
from data.layout import file_hash


def config(folder, *overrides):
    small = [f"data.folder={folder}", "data.samples=30", "data.samples_per_chunk=5"]
    return load_config("configs/smoke.yaml", [*small, *overrides])


def silent(_):
    pass


def hashes(folder, pattern="*"):
    return {p.name: file_hash(p) for p in folder.glob(pattern)}
