"""Devices, the servers they are in, and the links between them."""

from __future__ import annotations

from dataclasses import dataclass, field

from symbiosis.errors import BadProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockTopology:
    """Equal devices in servers. The default is BlockLLM's: two servers of two A100 of 80 GB, two of four, 100 Gbit/s."""

    servers: tuple[int, ...] = (2, 2, 4, 4)
    """Devices of each server."""
    memory_bytes: int = 72_000_000_000
    """For weights and KV cache of each device: 80 GB without what activations and kernels take."""
    net_bytes_s: float = 12.5e9
    """Between two servers."""
    net_s: float = 50e-6
    """Latency between two servers."""
    local_bytes_s: float = 300e9
    """Between two devices of a server."""
    local_s: float = 10e-6
    memory_bytes_s: float = 2e12
    """Of a device's memory."""
    load_bytes_s: float = 12.5e9
    """Of weights onto a device."""
    run_s: float = 100e-6
    """Of an agent for each batch: queue, launch."""
    server_of: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        if not self.servers or min(self.servers) < 1 or sum(self.servers) > 10_000:
            raise BadProfile(f"servers are {self.servers!r:.60}: expected the devices of each, at least one")
        found = tuple(server for server, count in enumerate(self.servers) for _ in range(count))
        object.__setattr__(self, "server_of", found)

    @property
    def num_devices(self) -> int:
        return len(self.server_of)

    def is_local(self, source: int, target: int) -> bool:
        """Whether two devices are in one server."""
        return self.server_of[source] == self.server_of[target]

    def transfer_s(self, source: int, target: int, size: int) -> float:
        """Seconds for bytes from one device to another, on an idle link."""
        if source == target:
            return 0.0
        if self.is_local(source, target):
            return self.local_s + size / self.local_bytes_s
        return self.net_s + size / self.net_bytes_s
