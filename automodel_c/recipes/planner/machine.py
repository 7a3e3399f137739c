"""Constants of a machine, each with where it comes from."""

import json
from importlib import resources
from pathlib import Path


class Machine:
    """Attributes are the constants of a file that `automodel-c bench machine` writes; sources maps
    each to the measurement it comes from; pair: two GPUs of one host alone, whose link was measured."""

    def __init__(self, constants, about="", pair=False):
        self.about, self.sources, self.pair = about, {}, pair
        for name, of in constants.items():
            setattr(self, name, of["value"])
            self.sources[name] = of["source"]

    @classmethod
    def load(cls, path=None, pair=False):
        """From a file, None: the package's own of an H200. ValueError for one that holds no constants."""
        text = Path(path).read_text() if path else (resources.files(__package__) / "machines/h200.json").read_text()
        kept = json.loads(text)
        if "constants" not in kept:
            raise ValueError(f"{path}: no file of bench_machine, it has no 'constants'")
        return cls(kept["constants"], kept.get("machine", ""), pair)

    def link(self, across):
        """Bytes a second and direction between two GPUs, of one host or, `across`, of two."""
        if across:
            return self.infiniband_bytes
        return self.pair_bytes if self.pair else self.nvlink_bytes

    def shards(self, ranks, in_host):
        """The same of gathers and of reductions of weights over so many ranks, `in_host` of them on each host: what
        comes from other hosts comes in once, through the links of all of them."""
        if ranks > in_host:
            return 2 * (min(self.nvlink_bytes, in_host * self.infiniband_bytes),)
        return (self.pair_gather, self.pair_reduce_scatter) if self.pair else 2 * (self.nvlink_bytes,)
